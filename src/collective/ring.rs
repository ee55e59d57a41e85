//! Rings: every round each member sends one part to the next.

use super::Hop;

/// The rounds: n - 1 of them; member i ends with the sum of part i.
pub fn reduce_scatter(n: usize) -> Vec<Vec<Hop>> {
    // The part that ends at i starts at i + 1 and is added to on its way around.
    ring(n, |from, round| (from + 2 * n - 1 - round) % n, true)
}

/// The rounds: n - 1 of them; member i starts with part i.
pub fn all_gather(n: usize) -> Vec<Vec<Hop>> {
    ring(n, |from, round| (from + n - round) % n, false)
}

fn ring(n: usize, part: impl Fn(usize, usize) -> usize, reduce: bool) -> Vec<Vec<Hop>> {
    let hop = |from, round| Hop { from, to: (from + 1) % n, part: part(from, round), reduce };
    (0..n.saturating_sub(1)).map(|round| (0..n).map(|from| hop(from, round)).collect()).collect()
}
