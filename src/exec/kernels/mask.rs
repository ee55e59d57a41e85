//! What a mask leaves of a block, as runs of evenly spaced positions.
//!
//! Within a run the keys a query sees lie together, so nothing ever compares positions element by element.

use super::Scalar;
use crate::plan::{AttnBlock, Mesh, Side, Span};
use crate::spec::Mask;
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
    pub fn at(&self, i: usize) -> usize {
        self.pos + i * self.step
    }

    fn part(&self, rows: Range<usize>) -> Run {
        Run { row: self.row + rows.start, pos: self.at(rows.start), len: rows.len(), step: self.step }
    }
}

/// The positions in `spans` as runs of at most `most` rows.
pub fn runs(spans: &[Span], most: usize) -> Vec<Run> {
    let mut row = 0;
    let mut out = Vec::new();
    for span in spans {
        let whole = Run { row, pos: span.start as usize, len: span.len as usize, step: span.step as usize };
        out.extend((0..whole.len).step_by(most).map(|from| whole.part(from..whole.len.min(from.saturating_add(most)))));
        row += whole.len;
    }
    out
}

/// What is left of two runs: from the first query that sees a key to the last, and the keys that they see.
fn clip(q: Run, kv: Run, mask: &Mask) -> Option<(Run, Run)> {
    let sees = |i: &usize| !keys_seen(q, kv, mask, *i).is_empty();
    let (first, last) = ((0..q.len).find(sees)?, (0..q.len).rfind(sees)?);
    let keys = keys_seen(q, kv, mask, first).start..keys_seen(q, kv, mask, last).end;
    Some((q.part(first..last + 1), kv.part(keys)))
}

/// Queries of a piece where the mask cuts through a tile.
const PIECE: usize = 64;

/// The pairs that [`clip`] leaves, in pieces of few queries where the mask cuts through: little is computed that no
/// query sees.
pub fn clipped(q: Run, kv: Run, mask: &Mask) -> impl Iterator<Item = (Run, Run)> {
    let whole = clip(q, kv, mask);
    let sees_all = |q: Run, kv: Run, i: usize| keys_seen(q, kv, mask, i).len() == kv.len;
    let cut = whole.is_some_and(|(q, kv)| !sees_all(q, kv, 0) || !sees_all(q, kv, q.len - 1));
    let piece = if cut { PIECE } else { q.len };
    (0..q.len).step_by(piece).filter_map(move |from| clip(q.part(from..q.len.min(from + piece)), kv, mask))
}

/// Which keys of `kv` query `i` of `q` sees. Of runs that are not equally spaced there may be none between others.
pub fn keys_seen(q: Run, kv: Run, mask: &Mask, i: usize) -> Range<usize> {
    let span = Span { start: kv.pos as u64, len: kv.len as u64, step: kv.step as u64 };
    let seen = mask.seen(q.at(i) as u64, &span);
    seen.start as usize..seen.end as usize
}

/// Scores of query `i` of `q` with the keys `seen` of `kv`, less what distance takes off them.
pub fn lean<T: Scalar>(scores: &mut [T], slope: Option<f64>, q: Run, kv: Run, i: usize, seen: Range<usize>) {
    let Some(slope) = slope else { return };
    let at = q.at(i) as f64;
    for (score, j) in scores.iter_mut().zip(seen) {
        *score -= T::from_f64(slope * (at - kv.at(j) as f64).abs());
    }
}

/// The rows of one side that take part in the block, over the whole batch.
pub fn live_rows(block: &AttnBlock, side: Side, views: &[Mesh], rank: u32) -> Vec<Range<usize>> {
    let live = block.live_rows(views, rank);
    let (rows, len) = match side {
        Side::Q => (live.q, block.q.len(views)),
        Side::Kv => (live.kv, block.kv.len(views)),
    };
    let starts = (0..block.batch).map(|b| b * len);
    starts.flat_map(|at| rows.iter().map(move |r| (at + r.start) as usize..(at + r.end) as usize)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{masks, ring};
    use super::*;
    use crate::plan::{Axis, Segs, Split};
    use crate::spec::Factor;

    #[test]
    fn live_rows_and_clipped_runs_agree_with_the_plan_and_a_count() {
        let views = ring(3);
        let splits = [Split::Zigzag, Split::Contiguous, Split::Stripe];
        let steps = (0..3).flat_map(|rank| (0..3).map(move |shift| (rank, shift)));
        let cases = splits.into_iter().flat_map(|split| steps.clone().map(move |step| (split, step)));
        for ((split, (rank, shift)), mask) in cases.flat_map(|case| masks(8).map(|mask| (case, mask))) {
            let segs = Segs::new(48, &[(Axis::Cp, split)]);
            let kv = segs.shifted(Axis::Cp, -shift);
            let block = AttnBlock {
                q: segs.clone(),
                kv,
                batch: 2,
                heads: 1,
                kv_heads: 1,
                head_dim: 1,
                v_dim: None,
                mask,
                factor: Factor::ONE,
            };
            let shape = block.shape(&views, rank);
            let count = |side| live_rows(&block, side, &views, rank).iter().map(|r| r.len() as u64).sum::<u64>();
            assert_eq!([count(Side::Q), count(Side::Kv)], [2 * shape.q_rows, 2 * shape.kv_rows]);

            let (q, kv) = (block.q.spans(&views, rank), block.kv.spans(&views, rank));
            let (q, kv) = (runs(&q, 5), runs(&kv, 3));
            let mask = &block.mask;
            let pairs = q.iter().flat_map(|&q| kv.iter().flat_map(move |&kv| clipped(q, kv, mask)));
            let seen = |(q, kv): (Run, Run)| (0..q.len).map(|i| keys_seen(q, kv, mask, i).len()).sum::<usize>();
            assert_eq!(pairs.map(seen).sum::<usize>() as u64, shape.area);
        }
    }
}
