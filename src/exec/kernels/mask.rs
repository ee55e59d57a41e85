//! What a causal mask leaves of a block, as runs of evenly spaced positions.
//!
//! Within two runs the keys a query sees are a prefix, so nothing ever compares positions element by
//! element.

use crate::plan::{AttnBlock, Mesh, Side, Span};
use std::ops::Range;

/// Positions `pos`, `pos + step` and so on in consecutive rows of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub row: usize,
    pub pos: usize,
    pub len: usize,
    pub step: usize,
}

impl Run {
    /// How many of its positions are before `pos`.
    fn before(&self, pos: usize) -> usize {
        pos.saturating_sub(self.pos).div_ceil(self.step).min(self.len)
    }

    fn at(&self, i: usize) -> usize {
        self.pos + i * self.step
    }

    /// Without its first `n` rows.
    fn skip(&self, n: usize) -> Run {
        Run { row: self.row + n, pos: self.at(n), len: self.len - n, step: self.step }
    }
}

/// The positions in `spans` as runs of at most `most` rows.
pub fn runs(spans: &[Span], most: usize) -> Vec<Run> {
    let mut row = 0;
    let mut out = Vec::new();
    for span in spans {
        let whole = Run { row, pos: span.start as usize, len: span.len as usize, step: span.step as usize };
        let parts = (0..whole.len).step_by(most).map(|from| whole.skip(from));
        out.extend(parts.map(|rest| Run { len: rest.len.min(most), ..rest }));
        row += whole.len;
    }
    out
}

/// What is left of two runs: every query left sees a key, every key left is seen.
pub fn clip(q: Run, kv: Run, causal: bool) -> Option<(Run, Run)> {
    if !causal {
        return Some((q, kv));
    }
    let blind = q.before(kv.pos);
    if blind >= q.len {
        return None;
    }
    let seen = kv.before(q.at(q.len - 1) + 1);
    Some((q.skip(blind), Run { len: seen, ..kv }))
}

/// How many keys of a clipped `kv` query `i` of a clipped `q` sees.
pub fn keys_seen(q: Run, kv: Run, causal: bool, i: usize) -> usize {
    if causal { kv.before(q.at(i) + 1) } else { kv.len }
}

/// The rows of one side that take part in the block, over the whole batch.
pub fn live_rows(block: &AttnBlock, side: Side, views: &[Mesh], rank: u32) -> Vec<Range<usize>> {
    let (q, kv) = (block.q.spans(views, rank), block.kv.spans(views, rank));
    // One key decides for every query, the first; one query for every key, the last.
    let one = |pos: u64| Run { row: 0, pos: pos as usize, len: 1, step: 1 };
    let first_key = kv.iter().map(|k| k.start).min().map(one);
    let last_query = q.iter().map(Span::last).max().map(one);
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
    use super::super::testing::ring;
    use super::*;
    use crate::plan::{Axis, Segs, Split};

    #[test]
    fn live_rows_and_clipped_runs_agree_with_the_plan_and_a_count() {
        let views = ring(3);
        let steps = (0..3).flat_map(|r| (0..3).flat_map(move |s| [(r, s, true), (r, s, false)]));
        let splits = [Split::Zigzag, Split::Contiguous, Split::Stripe];
        for (split, (rank, shift, causal)) in splits.into_iter().flat_map(|x| steps.clone().map(move |y| (x, y))) {
            let segs = Segs::new(48, &[(Axis::Cp, split)]);
            let kv = segs.shifted(Axis::Cp, -shift);
            let block = AttnBlock { q: segs.clone(), kv, batch: 2, heads: 1, kv_heads: 1, head_dim: 1, causal };
            let shape = block.shape(&views, rank);
            let count = |side| live_rows(&block, side, &views, rank).iter().map(|r| r.len() as u64).sum::<u64>();
            assert_eq!([count(Side::Q), count(Side::Kv)], [2 * shape.q_rows, 2 * shape.kv_rows]);

            let (q, kv) = (block.q.spans(&views, rank), block.kv.spans(&views, rank));
            let (q, kv) = (runs(&q, 5), runs(&kv, 3));
            let pairs = q.iter().flat_map(|&q| kv.iter().filter_map(move |&kv| clip(q, kv, causal)));
            let area: usize = pairs.map(|(q, kv)| (0..q.len).map(|i| keys_seen(q, kv, causal, i)).sum::<usize>()).sum();
            assert_eq!(area as u64, shape.area);
        }
    }
}
