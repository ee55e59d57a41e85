//! Which slots of a program need their bytes at the same time. It hangs on the structure of a plan alone and
//! not on any size, so that plans that differ in lengths and widths only share it.

use super::SlotId;
use super::footprint::Counts;
use super::walk::{Before, SlotLives, Walk};
use crate::error::Result;
use crate::plan::link::AtomTable;
use crate::plan::op::TensorId;
use crate::plan::program::Plan;

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
    bits: Vec<u64>,
    /// Words of a row of bits.
    width: usize,
    /// (slot, whether a life begins or has ended) in program order, and of one op what has ended first: what is
    /// alive before something ends is alive at the same time. Some moments at which no more is alive than at
    /// another are left out.
    pub changes: Vec<(u32, bool)>,
    pub counts: Counts,
}

impl Conflicts {
    pub fn of(plan: &Plan, atoms: &AtomTable, program: u32) -> Result<Conflicts> {
        let mut walk = Walk::new(plan, atoms);
        walk.body(None, &plan.programs[program as usize].ops, &[])?;
        let (lives, before) = walk.finish();
        let (always, sometimes) = slots(plan, &lives);
        let of = |at: &SlotId| &lives[at.tensor as usize][at.slot as usize];
        let others: Vec<&SlotLives> = sometimes.iter().map(of).collect();
        let given = plan.feed.given();
        let inputs = (0..).zip(&lives).filter(|(t, lives)| given.contains(t) && is_used(lives));
        let mut found = Conflicts {
            inputs: inputs.map(|(t, _)| t).collect(),
            always: always.len(),
            bits: vec![],
            width: others.len().div_ceil(64),
            changes: changes(always.len(), &others),
            slots: [always, sometimes].concat(),
            counts: Counts::default(),
        };
        found.bits = vec![0; found.width * others.len()];
        for (i, a) in others.iter().enumerate() {
            for (j, b) in others.iter().enumerate().take(i) {
                if conflict(a, b, &before) {
                    found.set(i, j);
                    found.set(j, i);
                }
            }
        }
        found.counts = Counts::of(&found);
        Ok(found)
    }

    fn set(&mut self, i: usize, j: usize) {
        self.bits[i * self.width + j / 64] |= 1 << (j % 64);
    }

    /// Whether two slots, numbered as in `slots`, ever need their bytes at the same time.
    pub fn between(&self, a: usize, b: usize) -> bool {
        let (a, b) = (a - self.always, b - self.always);
        self.bits[a * self.width + b / 64] & (1 << (b % 64)) != 0
    }

    /// Which of `count` slots from `first` on, at most 64, a slot conflicts with.
    pub fn with(&self, slot: usize, first: usize, count: usize) -> u64 {
        let row = &self.bits[(slot - self.always) * self.width..][..self.width];
        let (word, bit) = ((first - self.always) / 64, (first - self.always) % 64);
        let low = row[word] >> bit;
        let high = if bit > 0 { row.get(word + 1).map_or(0, |word| word << (64 - bit)) } else { 0 };
        (low | high) & (u64::MAX >> (64 - count))
    }

    /// Words of a set of slots that do not live throughout.
    pub fn words(&self) -> usize {
        self.width
    }

    pub fn add_to(&self, set: &mut [u64], slot: usize) {
        let at = slot - self.always;
        set[at / 64] |= 1 << (at % 64);
    }

    /// Whether two slots conflict with the same slots of a set.
    pub fn same_among(&self, set: &[u64], a: usize, b: usize) -> bool {
        let row = |slot: usize| &self.bits[(slot - self.always) * self.width..][..self.width];
        row(a).iter().zip(row(b)).zip(set).all(|((a, b), of)| (a ^ b) & of == 0)
    }
}

/// The slots that take memory but the inputs: those that live throughout, and the others.
fn slots(plan: &Plan, lives: &[Vec<SlotLives>]) -> (Vec<SlotId>, Vec<SlotId>) {
    let (given, mut found) = (plan.feed.given(), (vec![], vec![]));
    // A stage with fewer layers than another has no use for the slots of the others.
    let staged = plan.programs.len() > 1;
    for (t, (tensor, lives)) in (0..).zip(plan.tensors.iter().zip(lives)) {
        if given.contains(&t) || !is_used(lives) {
            continue;
        }
        for (slot, own) in (0..).zip(lives) {
            match tensor.kind.persists() || plan.feed.stays(t) {
                true if staged && own.lives.is_empty() => {}
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

/// Whether two slots ever need their bytes at the same time, as far as edges can tell.
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

/// What begins and ends to live, in program order.
fn changes(first: usize, others: &[&SlotLives]) -> Vec<(u32, bool)> {
    let mut all = Vec::new();
    for (slot, own) in (first as u32..).zip(others) {
        for life in &own.lives {
            all.push((life.first, true, slot));
            all.push((life.last + 1, false, slot));
        }
    }
    all.sort_unstable();
    let all: Vec<(u32, bool)> = all.into_iter().map(|(_, begins, slot)| (slot, begins)).collect();
    shortened(&all, first, others.len())
}

/// Leaves out of `all` the moments at which no more is alive than at another not far back: a layer is like the one
/// before it.
fn shortened(all: &[(u32, bool)], first: usize, slots: usize) -> Vec<(u32, bool)> {
    const BACK: usize = 64;
    let mut peaks: Vec<Vec<u64>> = vec![];
    let mut alive = vec![0u64; slots.div_ceil(64)];
    let within = |a: &[u64], b: &[u64]| a.iter().zip(b).all(|(a, b)| a & !b == 0);
    let mut grew = false;
    for &(slot, begins) in all {
        let (word, bit) = ((slot as usize - first) / 64, 1 << ((slot as usize - first) % 64));
        if begins {
            alive[word] |= bit;
            grew = true;
            continue;
        }
        let back = peaks.len().saturating_sub(BACK);
        if std::mem::take(&mut grew) && !peaks[back..].iter().any(|peak| within(&alive, peak)) {
            let mut at = 0;
            peaks.retain(|peak| {
                at += 1;
                at <= back || !within(peak, &alive)
            });
            peaks.push(alive.clone());
        }
        alive[word] &= !bit;
    }
    from_peak_to_peak(&peaks, first)
}

/// The changes that lead from each of `peaks` to the next, and from the last to nothing.
fn from_peak_to_peak(peaks: &[Vec<u64>], first: usize) -> Vec<(u32, bool)> {
    let mut all = vec![];
    let nothing = vec![0; peaks.first().map_or(0, Vec::len)];
    for (before, after) in std::iter::once(&nothing).chain(peaks).zip(peaks.iter().chain([&nothing])) {
        for begins in [false, true] {
            for (word, (before, after)) in before.iter().zip(after).enumerate() {
                let changed = if begins { after & !before } else { before & !after };
                let slots = (0..64).filter(|bit| changed & (1 << bit) != 0);
                all.extend(slots.map(|bit| ((first + word * 64 + bit) as u32, begins)));
            }
        }
    }
    all
}
