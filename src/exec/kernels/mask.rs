//! What a causal mask leaves of a block, as runs of consecutive positions.
//!
//! Within two runs of consecutive positions the keys a query sees are a prefix, so nothing ever compares
//! positions element by element.

use crate::plan::{AttnBlock, Mesh, Side};
use std::ops::Range;

/// Consecutive positions in consecutive rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub row: usize,
    pub pos: usize,
    pub len: usize,
}

/// The positions in `ranges` as runs of at most `most` rows.
pub fn runs(ranges: &[Range<u64>], most: usize) -> Vec<Run> {
    let mut row = 0;
    let mut out = Vec::new();
    for range in ranges {
        for pos in (range.start as usize..range.end as usize).step_by(most) {
            let len = most.min(range.end as usize - pos);
            out.push(Run { row, pos, len });
            row += len;
        }
    }
    out
}

/// What is left of two runs: every query left sees a key, every key left is seen.
pub fn clip(q: Run, kv: Run, causal: bool) -> Option<(Run, Run)> {
    if !causal {
        return Some((q, kv));
    }
    let blind = kv.pos.saturating_sub(q.pos);
    if blind >= q.len {
        return None;
    }
    let seen = (q.pos + q.len - kv.pos).min(kv.len);
    Some((Run { row: q.row + blind, pos: q.pos + blind, len: q.len - blind }, Run { len: seen, ..kv }))
}

/// How many keys of a clipped `kv` query `i` of a clipped `q` sees.
pub fn keys_seen(q: Run, kv: Run, causal: bool, i: usize) -> usize {
    if causal { (q.pos + i + 1 - kv.pos).min(kv.len) } else { kv.len }
}

/// The rows of one side that take part in the block, over the whole batch.
pub fn live_rows(block: &AttnBlock, side: Side, views: &[Mesh], rank: u32) -> Vec<Range<usize>> {
    let (q, kv) = (block.q.ranges(views, rank), block.kv.ranges(views, rank));
    // One key decides for every query, the first; one query for every key, the last.
    let first_key = kv.iter().map(|r| r.start).min().map(|p| Run { row: 0, pos: p as usize, len: 1 });
    let last_query = q.iter().map(|r| r.end).max().map(|p| Run { row: 0, pos: p as usize - 1, len: 1 });
    let (Some(first_key), Some(last_query)) = (first_key, last_query) else { return Vec::new() };
    let (live, len): (Vec<Run>, u64) = match side {
        Side::Q => {
            let clipped = runs(&q, usize::MAX).into_iter().filter_map(|q| clip(q, first_key, block.causal));
            (clipped.map(|(q, _)| q).collect(), block.q.len(views))
        }
        Side::Kv => {
            let clipped = runs(&kv, usize::MAX).into_iter().filter_map(|kv| clip(last_query, kv, block.causal));
            (clipped.map(|(_, kv)| kv).collect(), block.kv.len(views))
        }
    };
    let starts = (0..block.batch as usize).map(|b| b * len as usize);
    starts.flat_map(|at| live.iter().map(move |run| at + run.row..at + run.row + run.len)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{ring, zigzag};
    use super::*;
    use crate::plan::Axis;

    #[test]
    fn live_rows_and_clipped_runs_agree_with_the_plan_and_a_count() {
        let views = ring(3);
        let segs = zigzag(48);
        for (rank, shift, causal) in (0..3).flat_map(|r| (0..3).flat_map(move |s| [(r, s, true), (r, s, false)])) {
            let kv = segs.shifted(Axis::Cp, -shift);
            let block = AttnBlock { q: segs.clone(), kv, batch: 2, heads: 1, kv_heads: 1, head_dim: 1, causal };
            let shape = block.shape(&views, rank);
            let count = |side| live_rows(&block, side, &views, rank).iter().map(|r| r.len() as u64).sum::<u64>();
            assert_eq!([count(Side::Q), count(Side::Kv)], [2 * shape.q_rows, 2 * shape.kv_rows]);

            let (q, kv) = (block.q.ranges(&views, rank), block.kv.ranges(&views, rank));
            let (q, kv) = (runs(&q, 5), runs(&kv, 3));
            let pairs = q.iter().flat_map(|&q| kv.iter().filter_map(move |&kv| clip(q, kv, causal)));
            let area: usize = pairs.map(|(q, kv)| (0..q.len).map(|i| keys_seen(q, kv, causal, i)).sum::<usize>()).sum();
            assert_eq!(area as u64, shape.area);
        }
    }
}
