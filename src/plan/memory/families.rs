//! What follows for slots that a walk has left out: those on both sides of a gap say which others they need their bytes
//! beside, and when they are alive.
//!
//! That is not taken for granted: where the slots beside the gap are not alike, nothing follows, and all layers are walked.

use super::SlotId;
use super::gaps::{BESIDE, Gaps};
use std::ops::Range;

/// A gap among numbered slots: of those that were walked [`BESIDE`] stand on either side of it.
#[derive(Debug, Clone, Copy)]
struct Family {
    /// The number of the first of them, among those walked and among all.
    walked: usize,
    all: usize,
    count: usize,
}

/// Numbers of slots, with gaps and without.
pub struct Numbers {
    families: Vec<Family>,
    walked: usize,
    all: usize,
}

/// Rows of bits, one for each slot of those that were walked, or of all.
#[derive(Debug, Clone)]
pub struct Rows {
    pub bits: Vec<u64>,
    pub width: usize,
}

impl Rows {
    /// So many bits, at most 64, of row `row` from `first` on.
    pub fn get(&self, row: usize, first: usize, count: usize) -> u64 {
        get(&self.bits[row * self.width..][..self.width], first, count)
    }
}

/// So many bits, at most 64, from `first` on.
pub fn get(set: &[u64], first: usize, count: usize) -> u64 {
    let (word, bit) = (first / 64, first % 64);
    let low = set[word] >> bit;
    let high = if bit > 0 { set.get(word + 1).map_or(0, |word| word << (64 - bit)) } else { 0 };
    (low | high) & (u64::MAX >> (64 - count))
}

/// Adds the bits `bits`, of which there are `count`, from `first` on.
fn add(set: &mut [u64], first: usize, count: usize, bits: u64) {
    let (word, bit) = (first / 64, first % 64);
    set[word] |= bits << bit;
    if bit + count > 64 {
        set[word + 1] |= bits >> (64 - bit);
    }
}

/// Adds all from `range` on.
fn fill(set: &mut [u64], range: Range<usize>) {
    let mut at = range.start;
    while at < range.end {
        let count = (range.end - at).min(64 - at % 64);
        set[at / 64] |= (u64::MAX >> (64 - count)) << (at % 64);
        at += count;
    }
}

impl Numbers {
    /// The numbers of slots that do not live throughout, in order; `walked`: those with a life. None where one that was
    /// left out has a life nevertheless, or one beside a gap has none.
    pub fn new(gaps: &Gaps, walked: &[SlotId]) -> Option<Numbers> {
        let mut families: Vec<Family> = vec![];
        let number = |tensor, slot| walked.binary_search(&SlotId { tensor, slot });
        for (tensor, first, count) in gaps.iter() {
            let below = number(tensor, first - BESIDE as u32);
            let beside = (0..BESIDE as u32).flat_map(|n| [first - 1 - n, first + count + n]);
            if walked.get(below.unwrap_or_else(|at| at)).is_none_or(|slot| slot.tensor != tensor) {
                // It lives throughout, or not on this rank.
                continue;
            }
            let below = below.ok()?;
            if beside.into_iter().any(|slot| number(tensor, slot).is_err())
                || number(tensor, first + count) != Ok(below + BESIDE)
            {
                return None;
            }
            families.push(Family { walked: below, all: 0, count: count as usize });
        }
        families.sort_unstable_by_key(|family| family.walked);
        let mut more = 0;
        for family in &mut families {
            family.all = family.walked + more;
            more += family.count;
        }
        let apart = |pair: &[Family]| pair[0].walked + 2 * BESIDE <= pair[1].walked;
        families.windows(2).all(apart).then_some(Numbers { families, walked: walked.len(), all: walked.len() + more })
    }

    /// Stretches of numbers, those walked and the first of the same among all, and the family behind each.
    fn stretches(&self) -> impl Iterator<Item = (Range<usize>, usize, Option<&Family>)> {
        let starts = std::iter::once((0, 0))
            .chain(self.families.iter().map(|f| (f.walked + 2 * BESIDE, f.all + 2 * BESIDE + f.count)));
        let ends = self.families.iter().map(|f| (f.walked, Some(f))).chain([(self.walked, None)]);
        starts.zip(ends).map(|((walked, all), (end, family))| (walked..end, all, family))
    }

    /// All slots, of which only `walked` were.
    pub fn slots(&self, walked: &[SlotId]) -> Vec<SlotId> {
        let mut all = Vec::with_capacity(self.all);
        for (stretch, _, family) in self.stretches() {
            all.extend_from_slice(&walked[stretch]);
            if let Some(family) = family {
                let first = walked[family.walked];
                all.extend((0..(2 * BESIDE + family.count) as u32).map(|n| SlotId { slot: first.slot + n, ..first }));
            }
        }
        all
    }

    /// A set of slots alive at once: those of a gap are if both neighbours are.
    pub fn set(&self, walked: &[u64]) -> Vec<u64> {
        let mut all = vec![0; self.all.div_ceil(64)];
        self.copy(walked, &mut all, |family, all| {
            let beside = get(walked, family.walked, 2 * BESIDE);
            self::beside(family, beside, all);
            if beside >> (BESIDE - 1) & 3 == 3 {
                fill(all, family.gap());
            }
        });
        all
    }

    /// Copies what was walked, but for the families.
    fn copy(&self, walked: &[u64], all: &mut [u64], mut family: impl FnMut(&Family, &mut [u64])) {
        for (stretch, mut to, behind) in self.stretches() {
            let mut at = stretch.start;
            while at < stretch.end {
                let count = (stretch.end - at).min(64);
                add(all, to, count, get(walked, at, count));
                (at, to) = (at + count, to + count);
            }
            if let Some(behind) = behind {
                family(behind, all);
            }
        }
    }

    /// Which of all slots conflict, if `walked` says it of those walked. None where the slots beside a gap are not alike.
    pub fn rows(&self, walked: Rows) -> Option<Rows> {
        if self.families.is_empty() {
            return Some(walked);
        }
        let width = self.all.div_ceil(64);
        let mut rows = Rows { bits: vec![0; width * self.all], width };
        let pairs = self.pairs(&walked)?;
        for (stretch, first, family) in self.stretches() {
            for (to, from) in (first..).zip(stretch) {
                let row = &walked.bits[from * walked.width..][..walked.width];
                self.copy(row, &mut rows.bits[to * width..][..width], |family, all| {
                    let beside = get(row, family.walked, 2 * BESIDE);
                    self::beside(family, beside, all);
                    if beside >> BESIDE & 1 == 1 {
                        fill(all, family.gap());
                    }
                });
            }
            let Some(own) = family else { continue };
            let number = self.families.iter().position(|f| f.walked == own.walked)?;
            let members = 2 * BESIDE + own.count;
            for n in 0..members {
                let from = own.walked + own.representative(n);
                let row = &walked.bits[from * walked.width..][..walked.width];
                let mut others = pairs[number * self.families.len()..].iter();
                self.copy(row, &mut rows.bits[(own.all + n) * width..][..width], |family, all| {
                    let pair = others.next().expect("one of every family");
                    pair.add(family, n, all);
                });
            }
        }
        Some(rows)
    }

    /// What families have to do with each other, family after family; none where that is not one thing.
    fn pairs(&self, walked: &Rows) -> Option<Vec<Pair>> {
        // What has nothing to do with the family sees the same on both sides of the gap.
        for family in &self.families {
            let [below, above] = [BESIDE - 1, BESIDE].map(|n| (family.walked + n) * walked.width);
            let differs = |word: usize| walked.bits[below + word] ^ walked.bits[above + word];
            let mut differs: Vec<u64> = (0..walked.width).map(differs).collect();
            self.families.iter().for_each(|f| {
                (0..2 * BESIDE).for_each(|n| {
                    let at = f.walked + n;
                    differs[at / 64] &= !(1 << (at % 64));
                })
            });
            if differs.iter().any(|word| *word != 0) {
                return None;
            }
        }
        let pair = |a: &Family, b: &Family| {
            let rows: [u64; 2 * BESIDE] = std::array::from_fn(|n| walked.get(a.walked + n, b.walked, 2 * BESIDE));
            Pair::of(rows, a.count == b.count, a.walked == b.walked)
        };
        self.families.iter().flat_map(|a| self.families.iter().map(move |b| pair(a, b))).collect()
    }
}

impl Family {
    /// Numbers of what was left out.
    fn gap(&self) -> Range<usize> {
        self.all + BESIDE..self.all + BESIDE + self.count
    }

    /// Which of those walked is like number `n` of all.
    fn representative(&self, n: usize) -> usize {
        match n {
            _ if n < BESIDE => n,
            _ if n < BESIDE + self.count => BESIDE,
            _ => n - self.count,
        }
    }
}

/// Adds those of `bits` that stand beside a family's gap.
fn beside(family: &Family, bits: u64, all: &mut [u64]) {
    let low = (1 << BESIDE) - 1;
    add(all, family.all, BESIDE, bits & low);
    add(all, family.all + BESIDE + family.count, BESIDE, bits >> BESIDE);
}

/// Whether slots of two families conflict: by how many layers further on the other's is, from two or more back to two
/// or more on.
#[derive(Debug, Clone, Copy)]
struct Pair([bool; 5]);

impl Pair {
    /// `rows`: of each slot beside the gap of the one which it conflicts with of the other. None where that is more than
    /// a matter of how far they are apart, and where that must not matter, because the two have gaps of other lengths.
    fn of(rows: [u64; 2 * BESIDE], aligned: bool, same: bool) -> Option<Pair> {
        let mut by: [Option<bool>; 5] = [None; 5];
        for (a, row) in rows.iter().enumerate() {
            for b in (0..2 * BESIDE).filter(|b| !same || *b != a) {
                let has = row >> b & 1 == 1;
                let known = by[(b + 2).saturating_sub(a).min(4)].get_or_insert(has);
                if *known != has {
                    return None;
                }
            }
        }
        let by = by.map(|has| has.unwrap_or(false));
        (aligned || by.iter().all(|has| *has == by[0])).then_some(Pair(by))
    }

    /// Adds what slot `n` of a family conflicts with of the other one.
    fn add(&self, other: &Family, n: usize, all: &mut [u64]) {
        let Pair([far_back, back, level, on, far_on]) = *self;
        let (first, end) = (other.all, other.all + 2 * BESIDE + other.count);
        let at = first + n;
        let ranges = [
            (far_back, first..at.saturating_sub(1).max(first)),
            (back, at.saturating_sub(1).max(first)..at),
            (level, at..at + 1),
            (on, at + 1..at + 2),
            (far_on, at + 2..end),
        ];
        for (_, range) in ranges.into_iter().filter(|(has, _)| *has) {
            fill(all, range.start.min(end)..range.end.min(end));
        }
    }
}
