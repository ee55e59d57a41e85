//! Work at a speed that changes while others hold a share of what it needs.

/// SMs that a communication kernel holds for a while, or a share of a port that something holds; times in ps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    pub from: u64,
    pub to: u64,
    pub amount: u32,
}

/// How long `duration` of work takes from `start`, ps, at a speed that depends on how much is held.
pub fn lasting(held: impl Iterator<Item = Held> + Clone, start: u64, duration: u64, speed: impl Fn(u32) -> f64) -> u64 {
    if held.clone().all(|h| h.to <= start) {
        return duration;
    }
    let (mut at, mut left) = (start, duration as f64);
    loop {
        // How much is held now, and the next time at which that may change: in one pass, since this runs for most ops.
        let (mut amount, mut edge) = (0, None);
        for h in held.clone() {
            if h.from <= at && at < h.to {
                amount += h.amount;
            }
            let next = if h.from > at { h.from } else { h.to };
            if next > at {
                edge = Some(edge.map_or(next, |edge: u64| edge.min(next)));
            }
        }
        let now = speed(amount);
        match edge.map(|edge| (edge, (edge - at) as f64 * now)) {
            Some((edge, could)) if could < left => (at, left) = (edge, left - could),
            // Rounded to the nearest: neither is negative.
            _ => return (at - start).saturating_add((left / now + 0.5) as u64),
        }
    }
}
