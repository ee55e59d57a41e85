//! Which global sequence positions a rank holds.

use super::mesh::{Axis, Mesh};
use crate::spec::Documents;
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
    /// Coordinate r holds r, r + P, r + 2P and so on: causal work is equal but for the diagonal (Striped
    /// Attention, Brandon et al., arXiv:2311.09431).
    Stripe,
    /// The sequence in this many equal consecutive parts, and each of these cut again: coordinate r holds part r of
    /// every one (FPDT, Yao et al., arXiv:2408.16978).
    Chunks(u32),
}

/// Positions `start`, `start + step` and so on, `len` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    pub start: u64,
    pub len: u64,
    pub step: u64,
}

impl Span {
    pub fn at(&self, i: u64) -> u64 {
        self.start + i * self.step
    }

    /// The last position; a span is never empty.
    pub fn last(&self) -> u64 {
        self.at(self.len - 1)
    }

    /// How many positions of the span are before `pos`.
    pub fn before(&self, pos: u64) -> u64 {
        pos.saturating_sub(self.start).div_ceil(self.step).min(self.len)
    }

    /// The consecutive positions of the span, run by run.
    pub fn runs(self) -> impl Iterator<Item = Range<u64>> {
        let (count, len) = if self.step == 1 { (1, self.len) } else { (self.len, 1) };
        (0..count).map(move |i| self.at(i)..self.at(i) + len)
    }

    /// The positions with index `from` up to `to` of the span.
    pub fn part(&self, from: u64, to: u64) -> Span {
        Span { start: self.at(from), len: to - from, step: self.step }
    }
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
    /// A turn before the shift: within windows of `.0` coordinates along its axis, `.1` further on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<(u32, i32)>,
    /// Part `.0` of `.1` equal consecutive parts of the sequence; `None`: the whole of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<(u32, u32)>,
    /// Documents that the first split cuts each by itself, a rank having its part of one document behind that of the
    /// one before; empty: it cuts the sequence as a whole.
    #[serde(default, skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
}

impl Segs {
    pub fn new(seq: u64, order: &[(Axis, Split)]) -> Segs {
        let (shift, documents) = ((Axis::Cp, 0), Documents::default());
        Segs { seq, view: 0, order: order.to_vec(), shift, turn: None, part: None, documents }
    }

    /// This split, made of each document by itself.
    pub fn of_each(self, documents: &Documents) -> Segs {
        Segs { documents: documents.clone(), ..self }
    }

    /// This split as seen from the rank `by` further along `axis`.
    pub fn shifted(&self, axis: Axis, by: i32) -> Segs {
        Segs { shift: (axis, by), turn: None, ..self.clone() }
    }

    /// This split as seen from the rank `by` further along `axis`, after going `turn` further within its window of
    /// `window` ranks: that is where the block of an inner ring is.
    pub fn turned(&self, axis: Axis, window: u32, turn: i32, by: i32) -> Segs {
        Segs { shift: (axis, by), turn: Some((window, turn)), ..self.clone() }
    }

    /// This split of another part of the sequence; unchanged where there are no parts.
    pub fn of_part(&self, part: u32) -> Segs {
        Segs { part: self.part.map(|(_, of)| (part, of)), ..self.clone() }
    }

    /// The positions that are split.
    fn all(&self) -> Span {
        let (part, of) = self.part.map_or((0, 1), |(part, of)| (u64::from(part), u64::from(of.max(1))));
        Span { start: self.seq / of * part, len: self.seq / of, step: 1 }
    }

    /// The spans that the first split cuts, each by itself.
    fn wholes(&self) -> Vec<Span> {
        let document = |of: std::ops::Range<u64>| Span { start: of.start, len: of.end - of.start, step: 1 };
        match self.documents.is_empty() {
            true => vec![self.all()],
            false => self.documents.ranges().map(document).collect(),
        }
    }

    /// The rank whose positions these are, as `rank` sees them.
    pub fn holder(&self, views: &[Mesh], rank: u32) -> u32 {
        let (mesh, (axis, by)) = (&views[self.view as usize], self.shift);
        let turned = self.turn.map_or(rank, |(window, turn)| {
            let at = mesh.coord(rank, axis);
            let within = (i64::from(at % window) + i64::from(turn)).rem_euclid(i64::from(window)) as u32;
            mesh.with_coord(rank, axis, at - at % window + within)
        });
        mesh.shift(turned, axis, by)
    }

    /// Tokens each rank holds.
    pub fn len(&self, views: &[Mesh]) -> u64 {
        let mesh = &views[self.view as usize];
        self.order.iter().fold(self.all().len, |n, (axis, _)| n / u64::from(mesh.degree(*axis)))
    }

    /// Whether every split comes out even, no axis being split twice, and whether windows divide their axis.
    pub fn divide(&self, views: &[Mesh]) -> bool {
        let mesh = &views[self.view as usize];
        let wholes = self.wholes();
        let mut left = self.all().len;
        self.order.iter().enumerate().all(|(i, (axis, split))| {
            let degree = u64::from(mesh.degree(*axis));
            let parts = match split {
                Split::Zigzag if degree > 1 => 2 * degree,
                Split::Chunks(chunks) => degree * u64::from((*chunks).max(1)),
                _ => degree,
            };
            let cut = if i == 0 { wholes.iter().map(|span| span.len).collect() } else { vec![left] };
            let even = cut.iter().all(|len| len.is_multiple_of(parts));
            let even = even && self.order[..i].iter().all(|before| before.0 != *axis);
            left /= degree;
            even
        }) && left > 0
            && self.part.is_none_or(|(part, of)| part < of && self.seq.is_multiple_of(u64::from(of)))
            && self.turn.is_none_or(|(window, _)| window > 0 && mesh.degree(self.shift.0).is_multiple_of(window))
    }

    /// The positions of a rank, as spans in the order in which it stores them.
    pub fn spans(&self, views: &[Mesh], rank: u32) -> Vec<Span> {
        let (mesh, rank) = (&views[self.view as usize], self.holder(views, rank));
        let mut held = match self.order.is_empty() {
            true => vec![self.all()],
            false => self.wholes(),
        };
        for (i, &(axis, split)) in self.order.iter().enumerate() {
            let (degree, at) = (u64::from(mesh.degree(axis)), u64::from(mesh.coord(rank, axis)));
            held = match i {
                0 => held.into_iter().flat_map(|whole| share(&[whole], split, degree, at)).collect(),
                _ => share(&held, split, degree, at),
            };
        }
        merge_adjacent(held)
    }

    /// The positions of a rank, one by one.
    pub fn positions(&self, views: &[Mesh], rank: u32) -> Vec<u64> {
        self.spans(views, rank).iter().flat_map(|span| (0..span.len).map(|i| span.at(i))).collect()
    }
}

/// The positions that coordinate `at` of `degree` has of those in `held`.
fn share(held: &[Span], split: Split, degree: u64, at: u64) -> Vec<Span> {
    match split {
        _ if degree == 1 => held.to_vec(),
        Split::Contiguous => cut(held, degree, at),
        Split::Zigzag => {
            let mut both = cut(held, 2 * degree, at);
            both.extend(cut(held, 2 * degree, 2 * degree - 1 - at));
            both
        }
        Split::Stripe => every(held, degree, at),
        Split::Chunks(chunks) => {
            let chunks = u64::from(chunks);
            (0..chunks).flat_map(|chunk| cut(held, chunks * degree, chunk * degree + at)).collect()
        }
    }
}

/// Part `at` of `parts` equal parts of the positions in `held`, which keep their order.
fn cut(held: &[Span], parts: u64, at: u64) -> Vec<Span> {
    let total = total(held);
    let (from, to) = (total / parts * at, total / parts * (at + 1));
    let mut before = 0;
    let mut out = Vec::new();
    for span in held {
        let [lo, hi] = [from, to].map(|index| index.clamp(before, before + span.len) - before);
        if hi > lo {
            out.push(span.part(lo, hi));
        }
        before += span.len;
    }
    out
}

/// Every `parts`-th of the positions in `held`, beginning with number `at`.
fn every(held: &[Span], parts: u64, at: u64) -> Vec<Span> {
    let mut before = 0;
    let mut out = Vec::new();
    for span in held {
        // The first index of the span that is `at` past a multiple of `parts`, counted over all spans.
        let first = (at + parts - before % parts) % parts;
        if first < span.len {
            let len = (span.len - first).div_ceil(parts);
            out.push(Span { start: span.at(first), len, step: span.step * parts });
        }
        before += span.len;
    }
    out
}

fn merge_adjacent(spans: Vec<Span>) -> Vec<Span> {
    let mut out: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match out.last_mut() {
            Some(last) if last.step == span.step && last.at(last.len) == span.start => last.len += span.len,
            _ => out.push(span),
        }
    }
    out
}

fn total(spans: &[Span]) -> u64 {
    spans.iter().map(|span| span.len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn cp(p: u32) -> Vec<Mesh> {
        vec![Mesh::new(&[(Axis::Cp, p), (Axis::Up, 2)])]
    }

    #[test]
    fn zigzag_ranks_hold_a_chunk_and_its_mirror() {
        let views = cp(4);
        let segs = Segs::new(16, &[(Axis::Cp, Split::Zigzag)]);
        assert_eq!(segs.positions(&views, 0), [0, 1, 14, 15]);
        assert_eq!(segs.positions(&views, 3 * 2), [6, 7, 8, 9]);
        assert_eq!(segs.shifted(Axis::Cp, -1).spans(&views, 0), segs.spans(&views, 6));
        let usp = Segs::new(16, &[(Axis::Cp, Split::Zigzag), (Axis::Up, Split::Contiguous)]);
        assert_eq!([usp.positions(&views, 0), usp.positions(&views, 1)], [vec![0, 1], vec![14, 15]]);
    }

    #[test]
    fn striped_ranks_hold_every_so_manieth() {
        let views = cp(4);
        let segs = Segs::new(16, &[(Axis::Cp, Split::Stripe)]);
        assert_eq!(segs.positions(&views, 2 * 2), [2, 6, 10, 14]);
        let usp = Segs::new(16, &[(Axis::Cp, Split::Stripe), (Axis::Up, Split::Contiguous)]);
        assert_eq!([usp.positions(&views, 4), usp.positions(&views, 5)], [vec![2, 6], vec![10, 14]]);
        // Of spans that do not divide, the count goes on from one to the next.
        let held = [Span { start: 0, len: 5, step: 1 }, Span { start: 20, len: 4, step: 1 }];
        let parts = [0, 1, 2].map(|at| every(&held, 3, at).iter().map(|s| (s.start, s.len)).collect::<Vec<_>>());
        assert_eq!(parts, [vec![(0, 2), (21, 1)], vec![(1, 2), (22, 1)], vec![(2, 1), (20, 2)]]);
    }

    #[test]
    fn every_document_is_cut_by_itself() {
        let views = cp(2);
        let documents = Documents::from(vec![4, 8, 4]);
        let of = |split| Segs::new(16, &[(Axis::Cp, split), (Axis::Up, Split::Contiguous)]).of_each(&documents);
        let cp_alone = |split| Segs { order: vec![(Axis::Cp, split)], ..of(split) }.positions(&views, 0);
        assert_eq!(cp_alone(Split::Zigzag), [0, 3, 4, 5, 10, 11, 12, 15]);
        assert_eq!(cp_alone(Split::Contiguous), [0, 1, 4, 5, 6, 7, 12, 13]);
        assert_eq!(cp_alone(Split::Stripe), [0, 2, 4, 6, 8, 10, 12, 14]);
        // Ulysses cuts what a rank of the ring has, whichever documents that is of.
        assert_eq!([0, 1].map(|r| of(Split::Zigzag).positions(&views, r)), [vec![0, 3, 4, 5], vec![10, 11, 12, 15]]);
        assert!(of(Split::Zigzag).divide(&views) && of(Split::Zigzag).len(&views) == 4);
        let uneven = Segs::new(16, &[(Axis::Cp, Split::Zigzag)]).of_each(&Documents::from(vec![6, 10]));
        assert!(!uneven.divide(&views));
    }

    #[test]
    fn chunked_ranks_hold_a_part_of_every_chunk() {
        let views = [Mesh::new(&[(Axis::Cp, 1), (Axis::Up, 3)])];
        let whole = Segs::new(24, &[(Axis::Cp, Split::Zigzag), (Axis::Up, Split::Chunks(4))]);
        assert_eq!(whole.positions(&views, 1), [2, 3, 8, 9, 14, 15, 20, 21]);
        assert_eq!(whole.len(&views), 8);
        // The rows of chunk 2 are those that lie there in the whole.
        let order = [(Axis::Cp, Split::Zigzag), (Axis::Up, Split::Contiguous)];
        let chunk = Segs { part: Some((2, 4)), ..Segs::new(24, &order) };
        assert_eq!((chunk.positions(&views, 1), chunk.len(&views)), (vec![14, 15], 2));
        assert_eq!(chunk.of_part(0).positions(&views, 2), [4, 5]);
        assert!(whole.divide(&views) && chunk.divide(&views));
        let uneven = Segs { seq: 20, ..whole };
        assert!(!uneven.divide(&views) && !Segs { part: Some((4, 4)), ..chunk }.divide(&views));
    }

    #[test]
    fn turning_within_windows_meets_every_rank_once() {
        let views = [Mesh::new(&[(Axis::Cp, 6), (Axis::Up, 2)])];
        let segs = Segs::new(48, &[(Axis::Cp, Split::Zigzag)]);
        for rank in 0..12 {
            let steps = (0..2).flat_map(|outer| (0..3).map(move |inner| (outer, inner)));
            let met = steps.map(|(outer, inner)| segs.turned(Axis::Cp, 3, -inner, -3 * outer).holder(&views, rank));
            let met: BTreeSet<u32> = met.collect();
            assert_eq!(met, (0..12).filter(|r| r % 2 == rank % 2).collect());
        }
        // Coordinate 3 is the first of its window: the one before it there is the last, 5.
        assert_eq!(segs.turned(Axis::Cp, 3, -1, 0).holder(&views, 6), 10);
    }
}
