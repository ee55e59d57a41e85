//! Which global sequence positions a rank holds, and what a causal mask leaves of a block of them.

use super::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How an axis cuts the positions it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Equal consecutive parts.
    Contiguous,
    /// 2P chunks; coordinate r holds chunks r and 2P-1-r, so that causal work is equal everywhere.
    Zigzag,
}

/// The global positions held by the rank shifted along an axis: `order` is applied from the whole
/// sequence inwards, each split cutting what the ones before it left.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segs {
    /// Tokens of the whole sequence.
    pub seq: u64,
    pub view: u8,
    pub order: Vec<(Axis, Split)>,
    pub shift: (Axis, i32),
}

impl Segs {
    pub fn new(seq: u64, order: &[(Axis, Split)]) -> Segs {
        Segs { seq, view: 0, order: order.to_vec(), shift: (Axis::Cp, 0) }
    }

    /// The same split as seen from the rank `by` further along `axis`.
    pub fn shifted(&self, axis: Axis, by: i32) -> Segs {
        Segs { shift: (axis, by), ..self.clone() }
    }

    /// Tokens each rank holds.
    pub fn len(&self, views: &[Mesh]) -> u64 {
        let mesh = &views[self.view as usize];
        self.order.iter().fold(self.seq, |n, (axis, _)| n / u64::from(mesh.degree(*axis)))
    }

    /// Whether every split comes out even, no axis being split twice.
    pub fn divide(&self, views: &[Mesh]) -> bool {
        let mesh = &views[self.view as usize];
        let mut left = self.seq;
        self.order.iter().enumerate().all(|(i, (axis, split))| {
            let degree = u64::from(mesh.degree(*axis));
            let parts = if *split == Split::Zigzag && degree > 1 { 2 * degree } else { degree };
            let even = left.is_multiple_of(parts) && self.order[..i].iter().all(|before| before.0 != *axis);
            left /= degree;
            even
        }) && self.seq > 0
    }

    /// The positions, as ranges in the order in which the rank stores them.
    pub fn ranges(&self, views: &[Mesh], rank: u32) -> Vec<Range<u64>> {
        let mesh = &views[self.view as usize];
        let rank = mesh.shift(rank, self.shift.0, self.shift.1);
        let mut held: Vec<Range<u64>> = std::iter::once(0..self.seq).collect();
        for &(axis, split) in &self.order {
            let (degree, at) = (u64::from(mesh.degree(axis)), u64::from(mesh.coord(rank, axis)));
            held = match split {
                _ if degree == 1 => held,
                Split::Contiguous => cut(&held, degree, at),
                Split::Zigzag => {
                    let mut both = cut(&held, 2 * degree, at);
                    both.extend(cut(&held, 2 * degree, 2 * degree - 1 - at));
                    both
                }
            };
        }
        merge_adjacent(held)
    }

    /// The positions one by one.
    pub fn positions(&self, views: &[Mesh], rank: u32) -> Vec<u64> {
        self.ranges(views, rank).into_iter().flatten().collect()
    }
}

/// Part `at` of `parts` equal parts of the positions in `held`, which keep their order.
fn cut(held: &[Range<u64>], parts: u64, at: u64) -> Vec<Range<u64>> {
    let total: u64 = held.iter().map(|r| r.end - r.start).sum();
    let (from, to) = (total / parts * at, total / parts * (at + 1));
    let mut before = 0;
    let mut out = Vec::new();
    for r in held {
        let len = r.end - r.start;
        let lo = from.clamp(before, before + len) - before;
        let hi = to.clamp(before, before + len) - before;
        if hi > lo {
            out.push(r.start + lo..r.start + hi);
        }
        before += len;
    }
    out
}

fn merge_adjacent(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for r in ranges {
        match out.last_mut() {
            Some(last) if last.end == r.start => last.end = r.end,
            _ => out.push(r),
        }
    }
    out
}

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

/// The visible part of queries `q` against keys `kv`. Causal: a query sees the keys at or before it.
pub fn block_shape(q: &[Range<u64>], kv: &[Range<u64>], causal: bool) -> BlockShape {
    if !causal {
        let (nq, nk) = (total(q), total(kv));
        return BlockShape { area: nq * nk, q_rows: nq, kv_rows: nk };
    }
    let first_key = kv.iter().map(|r| r.start).min().unwrap_or(u64::MAX);
    let last_query = q.iter().map(|r| r.end).max().unwrap_or(0);
    BlockShape {
        area: q.iter().map(|qr| kv.iter().map(|kr| causal_area(qr, kr)).sum::<u64>()).sum(),
        q_rows: q.iter().map(|r| r.end.saturating_sub(r.start.max(first_key))).sum(),
        kv_rows: kv.iter().map(|r| r.end.min(last_query).saturating_sub(r.start)).sum(),
    }
}

fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}

/// The number of pairs i in `q`, j in `k` with j <= i.
fn causal_area(q: &Range<u64>, k: &Range<u64>) -> u64 {
    // Keys visible to query i: clamp(i + 1 - k.start, 0, len). It grows by one a query from k.start to k.end.
    let len = k.end - k.start;
    let ramp_from = q.start.max(k.start);
    let ramp_to = q.end.min(k.end);
    let ramp = if ramp_to > ramp_from {
        let (a, b) = (ramp_from + 1 - k.start, ramp_to - k.start);
        (a + b) * (b - a + 1) / 2
    } else {
        0
    };
    let full_rows = q.end.saturating_sub(q.start.max(k.end));
    ramp + full_rows * len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cp(p: u32) -> Vec<Mesh> {
        vec![Mesh::new(&[(Axis::Cp, p), (Axis::Up, 2)])]
    }

    #[test]
    fn zigzag_ranks_hold_a_chunk_and_its_mirror() {
        let views = cp(4);
        let segs = Segs::new(16, &[(Axis::Cp, Split::Zigzag)]);
        assert_eq!(segs.ranges(&views, 0), [0..2, 14..16]);
        assert_eq!(segs.positions(&views, 3 * 2), [6, 7, 8, 9]);
        assert_eq!(segs.shifted(Axis::Cp, -1).ranges(&views, 0), segs.ranges(&views, 6));
        let usp = Segs::new(16, &[(Axis::Cp, Split::Zigzag), (Axis::Up, Split::Contiguous)]);
        assert_eq!([usp.positions(&views, 0), usp.positions(&views, 1)], [vec![0, 1], vec![14, 15]]);
    }

    #[test]
    fn areas_equal_a_count_by_hand() {
        for (q, k) in [(3..9, 0..4), (0..4, 3..9), (2..7, 2..7), (5..6, 0..10), (0..3, 5..8)] {
            let brute: u64 = q.clone().map(|i| k.clone().filter(|j| *j <= i).count() as u64).sum();
            assert_eq!(causal_area(&q, &k), brute, "{q:?} {k:?}");
        }
    }

    #[test]
    fn every_step_of_a_zigzag_ring_has_equal_area() {
        let views = cp(4);
        let segs = Segs::new(64, &[(Axis::Cp, Split::Zigzag)]);
        for rank in (0..8).step_by(2) {
            for step in 1..4 {
                let q = segs.ranges(&views, rank);
                let kv = segs.shifted(Axis::Cp, -step).ranges(&views, rank);
                assert_eq!(block_shape(&q, &kv, true).area, 64 * 64 / (2 * 16));
            }
        }
    }
}
