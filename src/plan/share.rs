//! Which rows of a microbatch a rank has, where the ranks of an axis share them.

use super::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};

/// A share of rows: the rows are cut into `parts`, and each part into consecutive rows of every rank in turn. So one
/// part of all rows can be gathered, or summed, before the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    pub axis: Axis,
    pub parts: u64,
}

impl Share {
    /// The number, among all rows, of row `i` of the rank's `rows` rows.
    pub fn row(&self, views: &[Mesh], rank: u32, rows: u64, i: u64) -> u64 {
        let (ranks, here) = (u64::from(views[0].degree(self.axis)), u64::from(views[0].coord(rank, self.axis)));
        let run = rows / self.parts;
        (i / run * ranks + here) * run + i % run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_turns_within_each_part() {
        let views = [Mesh::new(&[(Axis::Tp, 3)])];
        let rows =
            |rank, parts| (0..4).map(|i| Share { axis: Axis::Tp, parts }.row(&views, rank, 4, i)).collect::<Vec<_>>();
        assert_eq!(rows(1, 1), [4, 5, 6, 7]);
        assert_eq!(rows(1, 2), [2, 3, 8, 9]);
        assert_eq!(rows(2, 4), [2, 5, 8, 11]);
    }
}
