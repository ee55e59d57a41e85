//! Which slots of a program need their bytes at the same time. It hangs on the structure of a plan alone and
//! not on any size, so that plans that differ in lengths and widths only share it.

use super::families::{Numbers, Rows};
use super::footprint::Counts;
use super::gaps::Gaps;
use super::walk::{Before, SlotLives, Walk};
use super::{Life, SlotId};
use crate::error::Result;
use crate::plan::lasting::lasting;
use crate::plan::link::AtomTable;
use crate::plan::op::TensorId;
use crate::plan::program::Plan;
use std::ops::Range;

/// The slots of a program that take memory, and which of them must not share it.
#[derive(Debug, Clone)]
pub struct Conflicts {
    /// Inputs that the program reads: they are there from before the step, a slot for every microbatch.
    pub inputs: Vec<TensorId>,
    /// The other slots, those that live throughout first.
    pub slots: Vec<SlotId>,
    /// How many live throughout.
    pub always: usize,
    /// A bit for every pair of those that do not.
    rows: Rows,
    /// Of every slot that does not: it conflicts with the same as the slot before it, but for these two.
    alike: Vec<bool>,
    /// (slot, whether a life begins or has ended) in program order, and of one op what has ended first: what is
    /// alive before something ends is alive at the same time. Some moments at which no more is alive than at
    /// another are left out.
    pub changes: Vec<(u32, bool)>,
    pub counts: Counts,
    /// They are those of a plan with any other number of microbatches, too, that is no less than this, and else the same.
    pub of_microbatches_from: Option<u64>,
}

impl Conflicts {
    /// Bytes that they take themselves, nearly all of them.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.rows.bits) + size_of_val(&*self.changes) + size_of_val(&*self.slots)
    }

    pub fn of(plan: &Plan, atoms: &AtomTable, program: u32) -> Result<Conflicts> {
        let ops = &plan.programs[program as usize].ops;
        let mut walk = Walk::new(plan, atoms).leaving_gaps();
        walk.body(None, ops, &[])?;
        if let Some(found) = Conflicts::of_walk(plan, walk) {
            return Ok(found);
        }
        Conflicts::of_all(plan, atoms, program)
    }

    /// The same from a walk that leaves nothing out.
    fn of_all(plan: &Plan, atoms: &AtomTable, program: u32) -> Result<Conflicts> {
        let mut walk = Walk::new(plan, atoms);
        walk.body(None, &plan.programs[program as usize].ops, &[])?;
        Ok(Conflicts::of_walk(plan, walk).expect("there are no gaps"))
    }

    /// None where what was left out of a walk does not follow from what was not.
    fn of_walk(plan: &Plan, walk: Walk) -> Option<Conflicts> {
        let microbatches = walk.microbatches();
        let (lives, before, gaps) = walk.finish();
        let (always, sometimes) = slots(plan, &lives, &gaps);
        let numbers = Numbers::new(&gaps, &sometimes)?;
        let of = |at: &SlotId| &lives[at.tensor as usize][at.slot as usize];
        let others: Vec<&SlotLives> = sometimes.iter().map(of).collect();
        let given = plan.feed.given();
        let inputs = (0..).zip(&lives).filter(|(t, lives)| given.contains(t) && is_used(lives));
        let width = others.len().div_ceil(64);
        let [begins, ends] = events(&others, before.ops());
        let bits = together(&others, [&begins, &ends], &before, width);
        let peaks = peaks(&begins, &ends, width);
        // Without those that are alike; or with one of the two that were walked, as gradients that are summed away are all
        // there in every microbatch but the last.
        let of_microbatches_from = microbatches.and_then(|all| {
            let fewer = [(1, all.clone()), (2, all.start..all.start + (all.end - all.start) / 2)];
            let alike = |(_, left_out): &(u64, Range<u32>)| {
                rest_alone(&others, [&begins, &ends], left_out.clone()).is_some_and(|[begins, ends]| {
                    let alike = together(&others, [&begins, &ends], &before, width) == bits;
                    alike && self::peaks(&begins, &ends, width) == peaks
                })
            };
            fewer.into_iter().find(alike).map(|(least, _)| least)
        });
        let rows = numbers.rows(Rows { bits, width })?;
        let peaks: Vec<Vec<u64>> = peaks.iter().map(|peak| numbers.set(peak)).collect();
        let mut found = Conflicts {
            inputs: inputs.map(|(t, _)| t).collect(),
            always: always.len(),
            changes: from_peak_to_peak(&peaks, rows.width, always.len()),
            alike: alike(&rows),
            rows,
            slots: [always, numbers.slots(&sometimes)].concat(),
            counts: Counts::default(),
            of_microbatches_from,
        };
        found.counts = Counts::of(&found, &peaks);
        Some(found)
    }

    /// Whether two slots, numbered as in `slots`, ever need their bytes at the same time.
    pub fn between(&self, a: usize, b: usize) -> bool {
        self.rows.get(a - self.always, b - self.always, 1) != 0
    }

    /// Which of `count` slots from `first` on, at most 64, a slot conflicts with.
    pub fn with(&self, slot: usize, first: usize, count: usize) -> u64 {
        self.rows.get(slot - self.always, first - self.always, count)
    }

    /// Words of a set of slots that do not live throughout.
    pub fn words(&self) -> usize {
        self.rows.width
    }

    pub fn add_to(&self, set: &mut [u64], slot: usize) {
        let at = slot - self.always;
        set[at / 64] |= 1 << (at % 64);
    }

    /// Whether a slot, not the first, conflicts with the same as the slot before it whatever others there are.
    pub fn like_before(&self, slot: usize) -> bool {
        self.alike[slot - self.always]
    }

    /// Whether two slots conflict with the same slots of a set.
    pub fn same_among(&self, set: &[u64], a: usize, b: usize) -> bool {
        let width = self.rows.width;
        let row = |slot: usize| &self.rows.bits[(slot - self.always) * width..][..width];
        row(a).iter().zip(row(b)).zip(set).all(|((a, b), of)| (a ^ b) & of == 0)
    }
}

/// The slots that take memory but the inputs: those that live throughout, and of the others those with a life.
fn slots(plan: &Plan, lives: &[Vec<SlotLives>], gaps: &Gaps) -> (Vec<SlotId>, Vec<SlotId>) {
    let (given, mut found) = (plan.feed.given(), (vec![], vec![]));
    // A stage with fewer layers than another has no use for the slots of the others.
    let (staged, lasting) = (plan.programs.len() > 1, lasting(plan));
    for (t, lives) in (0..).zip(lives) {
        if given.contains(&t) || !is_used(lives) {
            continue;
        }
        let persists = lasting[t as usize];
        for (slot, own) in (0..).zip(lives) {
            match persists || plan.feed.stays(t) {
                true if staged && own.lives.is_empty() && !gaps.has(t, slot) => {}
                true => found.0.push(SlotId { tensor: t, slot }),
                false if own.lives.is_empty() => {}
                false => found.1.push(SlotId { tensor: t, slot }),
            }
        }
    }
    found
}

fn is_used(lives: &[SlotLives]) -> bool {
    lives.iter().any(|slot| !slot.lives.is_empty())
}

/// A bit for every pair of slots that need their bytes at the same time, as far as edges can tell: when a life of the
/// one begins, the last that has begun of the other has not surely ended.
///
/// What has ended before an op has ended before every later one of its lane. So each lane has a list of what is over in
/// program order and had not surely ended when a life last began there; such lists are short.
fn together(others: &[&SlotLives], [begins, ends]: [&[Event]; 2], before: &Before, width: usize) -> Vec<u64> {
    let mut bits = vec![0; width * others.len()];
    let mut lanes: Vec<u16> = begins.iter().map(|&(op, ..)| before.lane(op)).collect();
    lanes.sort_unstable();
    lanes.dedup();
    let mut over: Vec<Vec<(u32, u32)>> = vec![vec![]; lanes.len()];
    let (mut alive, mut ended) = (vec![0u64; width], 0);
    for born in begins.chunk_by(|a, b| a.0 == b.0) {
        let op = born[0].0;
        while let Some(&(last, slot, life)) = ends.get(ended).filter(|end| end.0 < op) {
            debug_assert!(last < op);
            alive[slot as usize / 64] &= !(1 << (slot % 64));
            over.iter_mut().for_each(|list| list.push((slot, life)));
            ended += 1;
        }
        for &(_, slot, _) in born {
            alive[slot as usize / 64] |= 1 << (slot % 64);
        }
        let list = &mut over[lanes.partition_point(|&lane| lane < before.lane(op))];
        list.retain(|&(slot, life)| !before.ended(others[slot as usize], life as usize, op));
        for &(_, slot, _) in born {
            let row = &mut bits[slot as usize * width..][..width];
            row.iter_mut().zip(&alive).for_each(|(row, alive)| *row |= alive);
            list.iter().for_each(|&(other, _)| row[other as usize / 64] |= 1 << (other % 64));
        }
    }
    mirror(&mut bits, width);
    bits
}

/// Where lives begin and end without some microbatches that are alike. None if that is not all that a step without
/// these would have: something lives before them alone, or from them on into what is behind them, or not behind them at
/// all. Gradients that are summed away live from before them to behind them, as they would without them.
///
/// What is behind them is the last microbatch and the optimizer. If slots conflict there as they do anywhere, and no
/// more is alive anywhere, then it does not matter how many other microbatches there are: whoever waits for whom among
/// the ops behind them is written there, and a first one is followed by the last as any other is.
fn rest_alone(
    others: &[&SlotLives],
    [begins, ends]: [&[Event]; 2],
    microbatches: Range<u32>,
) -> Option<[Vec<Event>; 2]> {
    let is_behind = |life: &Life| life.last >= microbatches.end;
    let is_apart = |life: &Life| match is_behind(life) {
        true => !microbatches.contains(&life.first),
        false => life.first >= microbatches.start,
    };
    if !others.iter().all(|own| own.lives.iter().all(is_apart) && own.lives.iter().any(is_behind)) {
        return None;
    }
    let stays = |&&(_, slot, life): &&Event| is_behind(&others[slot as usize].lives[life as usize]);
    Some([begins, ends].map(|events| events.iter().filter(stays).copied().collect()))
}

/// An op with which a life begins or ends, its slot and its number.
type Event = (u32, u32, u32);

/// When lives begin, and when they end, in program order: of `ops` ops.
fn events(others: &[&SlotLives], ops: usize) -> [Vec<Event>; 2] {
    [|life: &Life| life.first, |life: &Life| life.last].map(|op| {
        // How many events come before each op.
        let mut next = vec![0u32; ops + 1];
        let lives = || others.iter().flat_map(|own| &own.lives);
        lives().for_each(|life| next[op(life) as usize + 1] += 1);
        (1..next.len()).for_each(|at| next[at] += next[at - 1]);
        let mut all = vec![(0, 0, 0); lives().count()];
        for (slot, own) in (0..).zip(others) {
            for (number, life) in (0..).zip(&own.lives) {
                let at = &mut next[op(life) as usize];
                all[*at as usize] = (op(life), slot, number);
                *at += 1;
            }
        }
        all
    })
}

/// Makes what one slot has of another the other's too; and no slot has itself.
fn mirror(bits: &mut [u64], width: usize) {
    for slot in 0..bits.len().checked_div(width).unwrap_or(0) {
        bits[slot * width + slot / 64] &= !(1 << (slot % 64));
        for word in 0..width {
            let mut left = bits[slot * width + word];
            while left != 0 {
                let other = word * 64 + left.trailing_zeros() as usize;
                bits[other * width + slot / 64] |= 1 << (slot % 64);
                left &= left - 1;
            }
        }
    }
}

/// What is alive whenever something ends and nothing has since something else began, as sets of slots. Moments at
/// which no more is alive than at another not far back are left out: a layer is like the one before it.
fn peaks(begins: &[Event], ends: &[Event], width: usize) -> Vec<Vec<u64>> {
    const BACK: usize = 64;
    // With each the slot whose end came next: until that is alive again, no later moment has all that this one has.
    let mut peaks: Vec<(Vec<u64>, u32)> = vec![];
    let mut alive = vec![0u64; width];
    let within = |a: &[u64], b: &[u64]| a.iter().zip(b).all(|(a, b)| a & !b == 0);
    let has = |set: &[u64], slot: u32| set[slot as usize / 64] & (1 << (slot % 64)) != 0;
    let mut newest = None;
    let mut begun = begins.iter().peekable();
    for &(last, ending, _) in ends {
        // What ends with an op is alive with all that begins until then.
        while let Some(&(_, slot, _)) = begun.next_if(|begin| begin.0 <= last) {
            alive[slot as usize / 64] |= 1 << (slot % 64);
            newest = Some(slot);
        }
        if let Some(newest) = newest.take() {
            let back = peaks.len().saturating_sub(BACK);
            let covers = |peak: &(Vec<u64>, u32)| has(&peak.0, newest) && within(&alive, &peak.0);
            if !peaks[back..].iter().rev().any(covers) {
                let mut kept = back;
                for at in back..peaks.len() {
                    if !has(&alive, peaks[at].1) || !within(&peaks[at].0, &alive) {
                        peaks.swap(kept, at);
                        kept += 1;
                    }
                }
                peaks.truncate(kept);
                peaks.push((alive.clone(), ending));
            }
        }
        alive[ending as usize / 64] &= !(1 << (ending % 64));
    }
    peaks.into_iter().map(|(peak, _)| peak).collect()
}

/// Of every row whether it is the one before it, but for the bits of the two.
fn alike(rows: &Rows) -> Vec<bool> {
    let width = rows.width;
    let row = |slot: usize| &rows.bits[slot * width..][..width];
    let like_before = |slot: usize| {
        let of = |slot: usize, word: usize| if slot / 64 == word { 1u64 << (slot % 64) } else { 0 };
        let differs = |(word, (a, b)): (usize, (&u64, &u64))| (a ^ b) & !of(slot, word) & !of(slot - 1, word) != 0;
        slot > 0 && !row(slot - 1).iter().zip(row(slot)).enumerate().any(differs)
    };
    (0..rows.bits.len().checked_div(width).unwrap_or(0)).map(like_before).collect()
}

/// The changes that lead from each of `peaks` to the next, and from the last to nothing.
fn from_peak_to_peak(peaks: &[Vec<u64>], width: usize, first: usize) -> Vec<(u32, bool)> {
    let mut all = vec![];
    let nothing = vec![0; width];
    for (before, after) in std::iter::once(&nothing).chain(peaks).zip(peaks.iter().chain([&nothing])) {
        for begins in [false, true] {
            for (word, (before, after)) in before.iter().zip(after).enumerate() {
                let mut changed = if begins { after & !before } else { before & !after };
                while changed != 0 {
                    all.push(((first + word * 64) as u32 + changed.trailing_zeros(), begins));
                    changed &= changed - 1;
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::memory::{Footprint, Layout};
    use crate::plan::op::Engine;
    use crate::spec::{Dtype, LlmSpec, Parallelism, Recompute, Workload};
    use crate::strategy::{Engines, build, sizes};

    /// Whether two slots ever need their bytes at the same time, looked at pair by pair.
    fn conflict(a: &SlotLives, b: &SlotLives, before: &Before) -> bool {
        // Lives of one slot are ordered among themselves, so of those that begin before a life of the other slot
        // only the last can still be going on.
        let (mut i, mut j) = (0, 0);
        while let (Some(life_a), Some(life_b)) = (a.lives.get(i), b.lives.get(j)) {
            let ordered = if life_a.first <= life_b.first {
                i = a.lives.partition_point(|life| life.first <= life_b.first);
                before.ended(a, i - 1, life_b.first)
            } else {
                j = b.lives.partition_point(|life| life.first < life_a.first);
                before.ended(b, j - 1, life_a.first)
            };
            if !ordered {
                return true;
            }
        }
        false
    }

    /// Pairs of a plan that conflict, and all.
    fn pairs_are_those_looked_at_one_by_one(plan: &Plan, program: u32) -> [usize; 2] {
        let atoms = AtomTable::new(plan).unwrap();
        let found = Conflicts::of(plan, &atoms, program).unwrap();
        let mut walk = Walk::new(plan, &atoms);
        walk.body(None, &plan.programs[program as usize].ops, &[]).unwrap();
        let (lives, before, _) = walk.finish();
        let of = |slot: usize| {
            let at = found.slots[slot];
            &lives[at.tensor as usize][at.slot as usize]
        };
        let (mut conflicts, mut all) = (0, 0);
        for a in found.always..found.slots.len() {
            for b in (found.always..found.slots.len()).filter(|&b| b != a) {
                let (expected, slots) = (conflict(of(a), of(b), &before), (found.slots[a], found.slots[b]));
                assert_eq!(found.between(a, b), expected, "{:?} {slots:?}", plan.about);
                (conflicts, all) = (conflicts + usize::from(expected), all + 1);
            }
        }
        [conflicts, all]
    }

    /// Whether layers of a plan were left out, and none of that shows.
    fn gaps_show_nowhere(plan: &Plan, program: u32) -> bool {
        let atoms = AtomTable::new(plan).unwrap();
        let mut walk = Walk::new(plan, &atoms).leaving_gaps();
        walk.body(None, &plan.programs[program as usize].ops, &[]).unwrap();
        let has_gaps = !walk.gaps().is_empty();
        // Where layers of a hybrid share sequences, slots beside a gap need not be alike: then nothing is left out.
        let is_hybrid = plan.model().is_ok_and(|model| !model.pattern.is_empty());
        let Some(some) = Conflicts::of_walk(plan, walk) else {
            assert!(is_hybrid && plan.about.par.ring * plan.about.par.ulysses > 1, "{:?}", plan.about);
            return false;
        };
        let all = Conflicts::of_all(plan, &atoms, program).unwrap();
        assert_eq!((some.always, &some.inputs, &some.slots), (all.always, &all.inputs, &all.slots), "{:?}", plan.about);
        assert!(some.rows.bits == all.rows.bits, "{:?}", plan.about);
        let footprints =
            |found: &Conflicts| (Footprint::of(plan, found).unwrap(), Layout::of(plan, found).unwrap().footprint);
        assert_eq!(footprints(&some), footprints(&all), "{:?}", plan.about);
        has_gaps
    }

    /// Plans of a model split in many ways.
    fn plans(model: &LlmSpec, ep: u32) -> Vec<Plan> {
        let engine = Engine::Sm { ctas: 16 };
        let engines = Engines { p2p: engine, collective: engine };
        let ways = [(1, 4, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2), (1, 1, 1, 4)];
        let words = ["default", "burst", "kv-in-two", "merge-in-kernel+one-comm", "offload-activations", "contiguous"];
        let cases = ways.iter().flat_map(|way| words.iter().map(move |words| (way, words)));
        let mut all = vec![];
        for (i, (&(ulysses, ring, tp, pp), words)) in cases.enumerate() {
            for (batches, zero) in [(1, 1), (4, 3), (8, 2)] {
                let recompute = [Recompute::None, Recompute::Full][i % 2];
                let (dp, options) = (2, words.parse().unwrap());
                let rest = Parallelism { ep, zero, recompute, options, ..Parallelism::default() };
                let par = Parallelism { dp, ring, ulysses, tp, pp, ..rest };
                let (seq_len, global_batch) = (256, u64::from(dp) * batches);
                let documents = Default::default();
                let work = Workload { seq_len, global_batch, micro_batch: 1, dtype: Dtype::Bf16, documents };
                all.extend(build(model, &work, &par, engines));
            }
        }
        all
    }

    #[test]
    fn conflicts_of_any_microbatches_are_those_of_one_and_of_two() {
        let engine = Engine::Sm { ctas: 16 };
        let engines = Engines { p2p: engine, collective: engine };
        let model = LlmSpec { layers: 16, ..LlmSpec::find("tiny").unwrap() };
        let (mut shared, mut all) = (0, 0);
        for (ulysses, ring, tp, words) in [
            (1, 1, 1, "default"),
            (4, 1, 1, "one-comm"),
            (1, 4, 1, "default"),
            (1, 4, 1, "gather-kv-prefetch"),
            (2, 2, 2, "burst"),
            (1, 2, 1, "no-overlap-grad"),
        ] {
            for (zero, recompute) in
                [(0, Recompute::None), (1, Recompute::Full), (2, Recompute::None), (3, Recompute::None)]
            {
                let options = words.parse().unwrap();
                let par = Parallelism { dp: 2, ulysses, ring, tp, zero, recompute, options, ..Parallelism::default() };
                let conflicts = |batches: u64| {
                    let (global_batch, documents) = (2 * batches, Default::default());
                    let work = Workload { seq_len: 256, global_batch, micro_batch: 1, dtype: Dtype::Bf16, documents };
                    let plan = build(&model, &work, &par, engines).ok()?;
                    let found = Conflicts::of(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
                    Some((plan, found, sizes(&model, &work, &par, engines).unwrap().prints.rest))
                };
                let Some((_, many, rest)) = conflicts(5) else { continue };
                // Sharded gradients need tensors of their own where there are several microbatches.
                let same = |own: &(Plan, Conflicts, (u64, u64))| own.2 == rest;
                all += 3;
                for batches in (1..=3).filter(|n| many.of_microbatches_from.is_some_and(|least| *n >= least)) {
                    let Some((plan, own, _)) = conflicts(batches).filter(same) else { continue };
                    let (plan, own) = (&plan, &own);
                    shared += 1;
                    assert_eq!(
                        (own.always, &own.inputs, &own.slots),
                        (many.always, &many.inputs, &many.slots),
                        "{par:?}"
                    );
                    assert!(own.rows.bits == many.rows.bits, "{par:?}");
                    assert_eq!(Footprint::of(plan, own).unwrap(), Footprint::of(plan, &many).unwrap(), "{par:?}");
                }
            }
        }
        assert!(shared > all / 2, "{shared} of {all}");
    }

    #[test]
    fn conflicts_are_those_of_every_pair() {
        let mut sums = [0, 0];
        for plan in plans(&LlmSpec { layers: 4, ..LlmSpec::find("tiny").unwrap() }, 1) {
            for program in 0..plan.programs.len() as u32 {
                let found = pairs_are_those_looked_at_one_by_one(&plan, program);
                sums = [sums[0] + found[0], sums[1] + found[1]];
            }
        }
        let [conflicts, all] = sums;
        assert!(all > 100_000 && conflicts > all / 20 && conflicts < all / 20 * 19, "{conflicts} of {all}");
    }

    #[test]
    fn layers_left_out_are_not_missed() {
        let (mut gaps, mut all) = (0, 0);
        for (name, layers, ep) in [
            ("tiny", 22, 1),
            ("tiny", 17, 1),
            ("tiny", 61, 1),
            ("mixtral-8x7b", 16, 2),
            ("deepseek-v3", 21, 2),
            ("nemotron-h-8b", 52, 1),
        ] {
            for plan in plans(&LlmSpec { layers, ..LlmSpec::find(name).unwrap() }, ep) {
                for program in 0..plan.programs.len() as u32 {
                    let has = gaps_show_nowhere(&plan, program);
                    (gaps, all) = (gaps + usize::from(has), all + 1);
                }
            }
        }
        assert!(gaps > all / 2 && gaps > 150, "{gaps} of {all}");
    }
}
