//! What a mask leaves of a block of attention, in closed form.
//!
//! The keys that a query sees are consecutive, the query itself is among them, and both ends of them grow with the
//! query. Where queries and keys are equally spaced, the k-th of the one sees the l-th of the other if l - k lies in a
//! band: areas are differences of triangles, and the rows that take part are consecutive, document by document.

use super::segs::Span;
use crate::spec::Mask;
use std::ops::Range;

/// What a mask leaves of a block of attention: the work, and the rectangle a kernel has to walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct BlockShape {
    /// Pairs (query, key) that are visible.
    pub area: u64,
    /// Queries that see at least one key of the block.
    pub q_rows: u64,
    /// Keys that at least one query of the block sees.
    pub kv_rows: u64,
}

/// The rows of either side that take part in a block, as ascending ranges.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LiveRows {
    pub q: Vec<Range<u64>>,
    pub kv: Vec<Range<u64>>,
}

/// The visible part of queries `q` against keys `kv`, both at global positions.
pub fn block_shape(q: &[Span], kv: &[Span], mask: &Mask) -> BlockShape {
    if mask.is_plain() {
        return plain_shape(q, kv, mask.causal);
    }
    let live = live_rows(q, kv, mask);
    let area = q.iter().map(|q| kv.iter().map(|k| mask.area(q, k)).sum::<u64>()).sum();
    let count = |rows: &[Range<u64>]| rows.iter().map(|r| r.end - r.start).sum();
    BlockShape { area, q_rows: count(&live.q), kv_rows: count(&live.kv) }
}

/// The shape with one document and no window: the first key and the last query decide, and no list of rows is made.
fn plain_shape(q: &[Span], kv: &[Span], causal: bool) -> BlockShape {
    let total = |spans: &[Span]| spans.iter().map(|span| span.len).sum::<u64>();
    if !causal {
        let (nq, nk) = (total(q), total(kv));
        return BlockShape { area: nq * nk, q_rows: nq, kv_rows: nk };
    }
    let first_key = kv.iter().map(|k| k.start).min().unwrap_or(u64::MAX);
    let last_query = q.iter().map(|q| q.last() + 1).max().unwrap_or(0);
    BlockShape {
        area: q.iter().map(|q| kv.iter().map(|k| causal_area(q, k)).sum::<u64>()).sum(),
        q_rows: q.iter().map(|q| q.len - q.before(first_key)).sum(),
        kv_rows: kv.iter().map(|k| k.before(last_query)).sum(),
    }
}

/// The rows of one sequence that take part in a block.
pub fn live_rows(q: &[Span], kv: &[Span], mask: &Mask) -> LiveRows {
    let mut live = LiveRows::default();
    let mut q_row = 0;
    for q in q {
        let mut kv_row = 0;
        for k in kv {
            for (queries, keys) in mask.live(q, k) {
                live.q.push(q_row + queries.start..q_row + queries.end);
                live.kv.push(kv_row + keys.start..kv_row + keys.end);
            }
            kv_row += k.len;
        }
        q_row += q.len;
    }
    LiveRows { q: union(live.q), kv: union(live.kv) }
}

impl Mask {
    /// Whether there is one document a sequence and no window.
    fn is_plain(&self) -> bool {
        self.window.is_none() && self.documents.is_empty()
    }

    /// The keys that query `i` sees.
    fn keys_of(&self, i: u64) -> Range<u64> {
        let document = self.documents.around(i);
        let start = self.window.map_or(document.start, |w| document.start.max((i + 1).saturating_sub(w)));
        start..if self.causal { i + 1 } else { document.end }
    }

    /// The keys of a span that query `i` sees, as indices.
    pub fn seen(&self, i: u64, k: &Span) -> Range<u64> {
        let keys = self.keys_of(i);
        k.before(keys.start)..k.before(keys.end)
    }

    /// The number of visible pairs of two spans.
    fn area(&self, q: &Span, k: &Span) -> u64 {
        if q.step != k.step {
            return (0..q.len).map(|i| self.seen(q.at(i), k)).map(|seen| seen.end - seen.start).sum();
        }
        self.by_document(q, k).map(|(q, k)| self.area_in_document(&q.0, &k.0)).sum()
    }

    fn area_in_document(&self, q: &Span, k: &Span) -> u64 {
        if !self.causal {
            return q.len * k.len;
        }
        // Keys further back than the window are those at or before a query that many positions earlier.
        let behind = |w: u64| causal_area(q, &Span { start: k.start.saturating_add(w), ..*k });
        causal_area(q, k) - self.window.map_or(0, behind)
    }

    /// The parts of two spans that lie in one document, each with its first index.
    fn by_document<'a>(&'a self, q: &'a Span, k: &'a Span) -> impl Iterator<Item = ((Span, u64), (Span, u64))> + 'a {
        // Only documents that end behind both starts and start before both ends have queries and keys.
        let (from, to) = (q.start.max(k.start), q.last().min(k.last()) + 1);
        let next = move |document: &Range<u64>| (document.end < to).then(|| self.documents.around(document.end));
        let documents = std::iter::successors(Some(self.documents.around(from)), next);
        documents.take_while(move |document| document.start < to).filter_map(move |document| {
            let part = |of: &Span| {
                let (from, to) = (of.before(document.start), of.before(document.end));
                (to > from).then(|| (of.part(from, to), from))
            };
            Some((part(q)?, part(k)?))
        })
    }

    /// The queries of `q` that see any key of `k`, and the keys of `k` that any query of `q` sees, as ranges of
    /// indices.
    fn live(&self, q: &Span, k: &Span) -> Vec<(Range<u64>, Range<u64>)> {
        if q.step != k.step {
            return self.live_by_query(q, k);
        }
        let of_document = |((q, q_at), (k, k_at)): ((Span, u64), (Span, u64))| {
            let (queries, keys) = self.live_in_document(&q, &k)?;
            Some((q_at + queries.start..q_at + queries.end, k_at + keys.start..k_at + keys.end))
        };
        self.by_document(q, k).filter_map(of_document).collect()
    }

    /// [`live`](Mask::live) within one document. Query a sees key b if low <= b - a <= high.
    fn live_in_document(&self, q: &Span, k: &Span) -> Option<(Range<u64>, Range<u64>)> {
        if !self.causal {
            return Some((0..q.len, 0..k.len));
        }
        let ahead = q.start as i64 - k.start as i64;
        let (step, nq, nk) = (q.step as i64, q.len as i64, k.len as i64);
        let high = ahead.div_euclid(step);
        let window = self.window.unwrap_or(i64::MAX as u64).min(i64::MAX as u64 / 4) as i64;
        let low = (ahead - window).div_euclid(step) + 1;
        let queries = (-high).max(0)..(nk - low).min(nq);
        let keys = low.max(0)..(nq + high).min(nk);
        let some = low <= high && !queries.is_empty() && !keys.is_empty();
        let rows = |r: Range<i64>| r.start as u64..r.end as u64;
        some.then(|| (rows(queries), rows(keys)))
    }

    fn live_by_query(&self, q: &Span, k: &Span) -> Vec<(Range<u64>, Range<u64>)> {
        let seen = (0..q.len).map(|i| (i..i + 1, self.seen(q.at(i), k)));
        seen.filter(|(_, keys)| !keys.is_empty()).collect()
    }
}

/// Ranges joined: ascending, none touching the next.
fn union(mut spans: Vec<Range<u64>>) -> Vec<Range<u64>> {
    spans.sort_unstable_by_key(|span| span.start);
    let mut out: Vec<Range<u64>> = Vec::with_capacity(spans.len());
    for span in spans {
        match out.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => out.push(span),
        }
    }
    out
}

/// The number of pairs i in `q`, j in `k` with j <= i.
fn causal_area(q: &Span, k: &Span) -> u64 {
    let sees = |i| k.before(q.at(i) + 1);
    if !q.step.is_multiple_of(k.step) {
        return (0..q.len).map(sees).sum();
    }
    // Each query sees more keys than the one before it by an equal number, from the first that sees any to the first
    // that sees all.
    let any = q.before(k.start);
    let all = q.before(k.last()).max(any);
    let ramp = if all > any { (sees(any) + sees(all - 1)) * (all - any) / 2 } else { 0 };
    ramp + (q.len - all) * k.len
}

#[cfg(test)]
mod tests {
    use super::super::mesh::{Axis, Mesh};
    use super::super::segs::{Segs, Split};
    use super::*;
    use proptest::prelude::*;

    /// By the definition alone, documents found by walking them.
    fn sees(mask: &Mask, i: u64, j: u64) -> bool {
        let document = |at: u64| {
            let mut end = 0;
            mask.documents.lengths().iter().position(|length| {
                end += length;
                at < end
            })
        };
        document(i) == document(j) && (!mask.causal || (j <= i && mask.window.is_none_or(|w| i - j < w)))
    }

    fn counted(q: &[Span], kv: &[Span], mask: &Mask) -> BlockShape {
        let [q, kv] = [q, kv].map(|held| held.iter().flat_map(|s| (0..s.len).map(|i| s.at(i))).collect::<Vec<u64>>());
        let count = |of: &[u64], seen: &dyn Fn(u64) -> bool| of.iter().filter(|at| seen(**at)).count() as u64;
        BlockShape {
            area: q.iter().map(|&i| count(&kv, &|j| sees(mask, i, j))).sum(),
            q_rows: count(&q, &|i| kv.iter().any(|&j| sees(mask, i, j))),
            kv_rows: count(&kv, &|j| q.iter().any(|&i| sees(mask, i, j))),
        }
    }

    fn masks(seq: u64) -> impl Strategy<Value = Mask> {
        let cuts = prop::collection::btree_set(1..seq, 0..6);
        (any::<bool>(), prop::option::of(1..2 * seq), cuts, any::<bool>()).prop_map(
            move |(causal, window, cuts, one)| {
                let mut ends: Vec<u64> = cuts.into_iter().collect();
                ends.push(seq);
                let starts = std::iter::once(&0).chain(&ends);
                let lengths: Vec<u64> = ends.iter().zip(starts).map(|(end, start)| end - start).collect();
                let documents = if one { vec![] } else { lengths }.into();
                let mask = Mask { window: window.filter(|_| causal), documents, ..Mask::new(causal) };
                mask.check(seq).unwrap();
                mask
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn shapes_equal_a_count_by_hand(
            (ranks, up) in (1u32..=4, 1u32..=2),
            split in prop::sample::select(vec![Split::Zigzag, Split::Contiguous, Split::Stripe]),
            (rank, shift) in (0u32..8, 0i32..4),
            whole in any::<bool>(),
            mask in masks(48),
        ) {
            let views = [Mesh::new(&[(Axis::Cp, ranks), (Axis::Up, up)])];
            let segs = Segs::new(48, &[(Axis::Cp, split), (Axis::Up, Split::Contiguous)]);
            let rank = rank % (ranks * up);
            let others = if whole { Segs::new(48, &[]) } else { segs.shifted(Axis::Cp, -shift) };
            let (q, kv) = (segs.spans(&views, rank), others.spans(&views, rank));
            prop_assert_eq!(block_shape(&q, &kv, &mask), counted(&q, &kv, &mask));
        }
    }

    #[test]
    fn areas_of_spans_of_any_spacing_equal_a_count_by_hand() {
        let spans = |step: u64| {
            let starts = (0..9).flat_map(|start| (1..7).map(move |len| (start, len)));
            starts.map(move |(start, len)| Span { start, len, step }).collect::<Vec<_>>()
        };
        for (q_step, k_step) in [(1, 1), (3, 3), (4, 2), (1, 2), (3, 2)] {
            for (q, k) in spans(q_step).iter().flat_map(|q| spans(k_step).into_iter().map(move |k| (q, k))) {
                for mask in [Mask::new(true), Mask { window: Some(4), ..Mask::new(true) }] {
                    assert_eq!(block_shape(&[*q], &[k], &mask), counted(&[*q], &[k], &mask), "{q:?} {k:?}");
                }
            }
        }
    }

    #[test]
    fn every_step_of_a_zigzag_ring_has_equal_area() {
        let views = [Mesh::new(&[(Axis::Cp, 4), (Axis::Up, 2)])];
        let segs = Segs::new(64, &[(Axis::Cp, Split::Zigzag)]);
        for rank in (0..8).step_by(2) {
            for step in 1..4 {
                let q = segs.spans(&views, rank);
                let kv = segs.shifted(Axis::Cp, -step).spans(&views, rank);
                assert_eq!(block_shape(&q, &kv, &Mask::new(true)).area, 64 * 64 / (2 * 16));
            }
        }
    }

    /// A window of w over s tokens leaves w s - w (w - 1) / 2 pairs; documents leave the sum of their triangles.
    #[test]
    fn whole_sequences_have_the_known_areas() {
        let whole = [Span { start: 0, len: 1000, step: 1 }];
        let area = |mask: &Mask| block_shape(&whole, &whole, mask).area;
        assert_eq!(area(&Mask { window: Some(100), ..Mask::new(true) }), 100 * 1000 - 100 * 99 / 2);
        let documents: Vec<u64> = vec![300, 200, 500];
        let triangles: u64 = documents.iter().map(|n| n * (n + 1) / 2).sum();
        assert_eq!(area(&Mask { documents: documents.clone().into(), ..Mask::new(true) }), triangles);
        let squares: u64 = documents.iter().map(|n| n * n).sum();
        assert_eq!(area(&Mask { documents: documents.into(), ..Mask::new(false) }), squares);
    }
}
