//! All-to-all by pairs: in round t each member sends to the one t places further.

use super::Hop;

/// The rounds: n - 1 of them, no member idle in any.
pub fn all_to_all(n: usize) -> Vec<Vec<Hop>> {
    let hop = |from: usize, by: usize| {
        let to = (from + by) % n;
        Hop { from, to, part: to, reduce: false }
    };
    (1..n).map(|by| (0..n).map(|from| hop(from, by)).collect()).collect()
}
