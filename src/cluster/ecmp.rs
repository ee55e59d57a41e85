//! What hashing loses: flows that hash to the same uplink share it, and whoever waits for all flows waits for the
//! fullest uplink.

/// Load of the fullest of `uplinks`, over the mean, where flows fill them exactly and each is hashed in `subflows`
/// parts: m = uplinks * subflows parts, each on a link at random. The loads are binomial, (m, 1/uplinks), and taken as
/// independent: E\[max\] = sum over k of 1 - P(load <= k)^uplinks, in parts of a flow. They are not quite, since their sum
/// is known: beside a Monte-Carlo simulation this is 6 % too low for 8 uplinks and whole flows, 2 % for 32 uplinks.
pub fn fullest(uplinks: u32, subflows: u32) -> f64 {
    if uplinks < 2 {
        return 1.0;
    }
    let (links, parts) = (f64::from(uplinks), f64::from(uplinks) * f64::from(subflows));
    let p = 1.0 / links;
    let (mut at_most, mut expected) = (0.0f64, 0.0);
    let mut log_term = parts * (1.0 - p).ln();
    let mut k = 0.0;
    while k <= parts {
        at_most = (at_most + log_term.exp()).min(1.0);
        let over = 1.0 - at_most.powf(links);
        expected += over;
        if k > parts * p && over < 1e-9 {
            break;
        }
        log_term += ((parts - k) / (k + 1.0)).ln() + (p / (1.0 - p)).ln();
        k += 1.0;
    }
    expected / f64::from(subflows)
}

#[cfg(test)]
mod tests {
    use super::fullest;

    /// (uplinks, sub-flows, mean of a Monte-Carlo simulation).
    #[test]
    fn as_a_monte_carlo_has_it() {
        let found = [
            (8, 1, 2.60),
            (8, 4, 1.77),
            (8, 16, 1.37),
            (32, 1, 3.54),
            (32, 4, 2.15),
            (32, 16, 1.55),
            (32, 64, 1.27),
            (64, 1, 3.95),
            (64, 4, 2.35),
            (64, 16, 1.63),
            (64, 64, 1.31),
        ];
        for (uplinks, subflows, simulated) in found {
            let ours = fullest(uplinks, subflows);
            assert!(
                (ours / simulated - 1.0).abs() < if uplinks == 8 { 0.07 } else { 0.03 },
                "{uplinks} {subflows}: {ours}, not {simulated}"
            );
        }
        assert_eq!(fullest(1, 1), 1.0);
        assert!(fullest(4096, 4096) < 1.1 && fullest(64, 4096) < 1.045);
    }
}
