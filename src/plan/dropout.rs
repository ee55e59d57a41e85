//! Which elements of a branch are dropped before it is added to the residual stream (Srivastava et al., 2014).
//!
//! A hash of position and column decides, so that every way to share out the tokens drops the same ones. It
//! knows no layer and no sequence, for which a block of ops has no names: all of them drop alike.

use super::mesh::Mesh;
use super::segs::Segs;
use super::share::Share;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dropout {
    pub probability: f64,
    /// A number that tells the dropouts of a layer apart.
    pub salt: u64,
    /// Positions of all rows; a rank may have a share of the rows.
    pub segs: Segs,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
}

/// Whether an element stays: the bits of splitmix64 (Steele et al., 2014) of where it stands, below a bound.
pub fn keeps(probability: f64, salt: u64, position: u64, column: u64) -> bool {
    let mut z = (position << 32 | column).wrapping_add((salt + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64 >= probability
}

impl Dropout {
    /// The positions of the rank's `rows` rows.
    pub fn positions(&self, views: &[Mesh], rank: u32, rows: u64) -> Vec<u64> {
        positions(&self.segs, self.share, views, rank, rows)
    }
}

/// The positions of a rank's `rows` rows, which are all rows of `segs` or its share of them.
pub fn positions(segs: &Segs, share: Option<Share>, views: &[Mesh], rank: u32, rows: u64) -> Vec<u64> {
    let all = segs.positions(views, rank);
    let row = |i| share.map_or(i, |share| share.row(views, rank, rows, i));
    (0..rows).map(|i| all[row(i) as usize % all.len()]).collect()
}

#[cfg(test)]
mod tests {
    use super::keeps;

    #[test]
    fn as_many_are_dropped_as_asked_for_and_others_with_another_salt() {
        for probability in [0.0, 0.1, 0.5] {
            let dropped = |salt| (0..100_000u64).filter(|i| !keeps(probability, salt, i / 100, i % 100)).count() as f64;
            assert!((dropped(0) / 1e5 - probability).abs() < 0.01);
        }
        let both = (0..100_000u64).filter(|i| !keeps(0.1, 0, i / 100, i % 100) && !keeps(0.1, 1, i / 100, i % 100));
        assert!((both.count() as f64 / 1e5 - 0.01).abs() < 0.003, "two salts are independent");
    }
}
