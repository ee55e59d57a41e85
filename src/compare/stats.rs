//! Times that were measured several times: what counts of them, and how far they spread.

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut all = values.to_vec();
    all.sort_by(f64::total_cmp);
    all
}

/// Between neighbours, for 0 <= q <= 1.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let all = sorted(values);
    let Some(last) = all.len().checked_sub(1) else { return 0.0 };
    let at = q * last as f64;
    let (low, high) = (all[at as usize], all[(at as usize + 1).min(last)]);
    low + (high - low) * at.fract()
}

/// Relative standard deviation, as 1.4826 times the median absolute deviation: outliers are others' doing.
pub fn spread(times: &[f64]) -> f64 {
    let middle = quantile(times, 0.5);
    let off: Vec<f64> = times.iter().map(|t| (t - middle).abs()).collect();
    if middle > 0.0 { 1.4826 * quantile(&off, 0.5) / middle } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disturbed_run_does_not_count() {
        assert_eq!(quantile(&[5.0, 1.0, 1.1], 0.5), 1.1);
        assert_eq!(quantile(&[3.0], 0.5), 3.0);
        assert!(spread(&[1.0, 1.01, 0.99, 7.0, 1.0]) < 0.02);
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), 2.5);
    }
}
