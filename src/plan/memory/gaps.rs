//! Layers that are not walked. What a layer keeps alive is what the layer before it does, one slot on: a few layers
//! at either end show it of all. So a walk leaves out those between, and what it would have found of their slots
//! follows from what it has found of the slots beside the gap.
//!
//! That is not taken for granted: where the slots beside the gap are not alike, all layers are walked.

use super::SlotId;
use crate::plan::link::{Env, resolve};
use crate::plan::op::*;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Iterations at either end of a call that are walked at least: one that is the first or the last, and [`BESIDE`] more.
const ENDS: u32 = 3;

/// The same for the call that says where a gap is: others may have one or two fewer, a first layer before the rest.
const MORE_ENDS: u32 = 5;

/// Slots at either side of a gap that have to be alike.
const BESIDE: usize = 2;

/// No gap is worth while with fewer iterations.
const LEAST: u32 = 4;

type Found = FxHashMap<TensorId, Vec<(u32, u32)>>;

/// By tensor the slots that are left out: from each first one, so many.
#[derive(Debug, Default)]
pub struct Gaps {
    of: Found,
    /// The one found last.
    last: Option<(u32, u32)>,
}

/// The iterations of a call that are left out.
pub struct Middle {
    iterations: Range<u32>,
    /// By argument: the gap in the slots that it walks over, if it does.
    gaps: Vec<Option<(u32, u32)>>,
    /// Walks go from the last slot to the first.
    backward: bool,
}

/// An argument that walks from slot to slot.
struct Stroll {
    arg: usize,
    tensor: TensorId,
    /// The lowest slot.
    low: u32,
    backward: bool,
}

impl Gaps {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Whether a slot is left out.
    pub fn has(&self, tensor: TensorId, slot: u32) -> bool {
        self.of
            .get(&tensor)
            .is_some_and(|gaps| gaps.iter().any(|&(first, count)| (first..first + count).contains(&slot)))
    }

    /// What to leave out of a call; none if all of it has to be walked.
    pub fn middle(&mut self, args: &[Arg], env: &[(TensorId, u32)], repeat: u32) -> Option<Middle> {
        if repeat < 2 * MORE_ENDS + LEAST {
            return None;
        }
        let (strolls, period) = strolls(args, env, repeat)?;
        let backward = strolls.first()?.backward;
        if strolls.iter().any(|stroll| stroll.backward != backward) {
            return None;
        }
        // Where a call has a tensor twice, a layer's input and its output, the lower slot is the layer's.
        let low = |of: &Stroll| strolls.iter().filter(|s| s.tensor == of.tensor).map(|s| s.low).min().unwrap_or(of.low);
        let known = |of: &Stroll| {
            let gap = known_of(&self.of, of.tensor, low(of), repeat)?;
            Some((i64::from(gap.0) - i64::from(low(of)), gap.1))
        };
        // In layers from the lowest.
        let all = repeat - 2 * MORE_ENDS;
        let count = all - all % 2;
        let anew = (i64::from(repeat - MORE_ENDS - count), count);
        let fits = |&(first, count): &(i64, u32)| {
            let inside = first >= i64::from(ENDS) && first + i64::from(count + ENDS) <= i64::from(repeat);
            inside && count % period == 0
        };
        // Best the same layers as those of other tensors.
        let same = self.last.map(|(slot, count)| (i64::from(slot) - i64::from(low(&strolls[0])), count)).filter(fits);
        let (first, count) = strolls.iter().find_map(known).or(same).unwrap_or(anew);
        // What is made ready for the next layer is a slot ahead, and what is left to be sent of the last one behind.
        let agrees = |other: (i64, u32)| other.1 == count && other.0.abs_diff(first) <= 2;
        if !fits(&(first, count)) || !strolls.iter().filter_map(known).all(agrees) {
            return None;
        }
        let first = first as u32;
        let mut gaps = vec![None; args.len()];
        for stroll in &strolls {
            let known = known_of(&self.of, stroll.tensor, low(stroll), repeat);
            let gap = known.unwrap_or((low(stroll) + first, count));
            gaps[stroll.arg] = Some(gap);
            if known.is_none() {
                self.last = Some(gap);
                self.of.entry(stroll.tensor).or_default().push(gap);
            }
        }
        let start = if backward { repeat - first - count } else { first };
        Some(Middle { iterations: start..start + count, gaps, backward })
    }
}

/// The gap of a tensor that some slots are about.
fn known_of(all: &Found, tensor: TensorId, low: u32, slots: u32) -> Option<(u32, u32)> {
    all.get(&tensor)?.iter().copied().find(|(first, count)| *first < low + slots && low < first + count)
}

/// The arguments that walk, and after how many iterations all others are the same again. None if that is too seldom
/// for what is left out to be a multiple of it.
fn strolls(args: &[Arg], env: &[(TensorId, u32)], repeat: u32) -> Option<(Vec<Stroll>, u32)> {
    let (mut all, mut period) = (vec![], 1);
    for (number, arg) in args.iter().enumerate() {
        let Arg::Each { of, .. } = arg else { continue };
        let (first, last) = (arg.slot(0), arg.slot(repeat - 1));
        let (tensor, base) = resolve(arg.of(), env);
        match of {
            0 | 1 => {}
            2 => period = 2,
            _ if first.abs_diff(last) + 1 == repeat => {
                all.push(Stroll { arg: number, tensor, low: base + first.min(last), backward: last < first });
            }
            _ => return None,
        }
    }
    Some((all, period))
}

impl Middle {
    pub fn leaves_out(&self, iteration: u32) -> bool {
        self.iterations.contains(&iteration)
    }

    /// Makes what iteration `i` binds what it would be if there were no more layers than are walked: what the one before
    /// the gap hands on, the one behind it has to find.
    pub fn close(&self, i: u32, env: &mut Env) {
        // On the side of the lower slots?
        let below = (i < self.iterations.start) != self.backward;
        for (bound, gap) in env.iter_mut().zip(&self.gaps) {
            match *gap {
                Some((first, count)) if below && bound.1 >= first => bound.1 += count,
                Some((first, count)) if !below && bound.1 < first + count => bound.1 -= count,
                _ => {}
            }
        }
    }
}

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
    pub all: usize,
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
        for (&tensor, of) in &gaps.of {
            for &(first, count) in of {
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
