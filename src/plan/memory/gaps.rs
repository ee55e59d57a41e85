//! Layers that are not walked. What a layer keeps alive is what the layer before it does, one slot on: a few layers
//! at either end show it of all. So a walk leaves out those between, and what it would have found of their slots
//! follows from what it has found of the slots beside the gap, see [`families`](super::families).

use crate::plan::link::{Env, resolve};
use crate::plan::op::*;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Iterations at either end of a call that are walked at least: one that is the first or the last, and [`BESIDE`] more.
const ENDS: u32 = 3;

/// The same for the call that says where a gap is: others may have one or two fewer, a first layer before the rest.
const MORE_ENDS: u32 = 5;

/// Slots at either side of a gap that have to be alike.
pub(super) const BESIDE: usize = 2;

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

    /// Every gap: a tensor, the first slot that is left out of it, and how many are.
    pub fn iter(&self) -> impl Iterator<Item = (TensorId, u32, u32)> {
        self.of.iter().flat_map(|(&tensor, gaps)| gaps.iter().map(move |&(first, count)| (tensor, first, count)))
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
