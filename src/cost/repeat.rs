//! Iterations that repeat the one before, taken in one stride.
//!
//! What an iteration does depends on what it *finds*: the last times of lanes and buffers, what is held, when
//! the compute lane was last busy. Every start is a maximum of found times plus constants. So if an iteration
//! finds everything later by the same D than the one before found it, it does the same, D later; and a time
//! before the *floor*, the earliest start in an iteration, decided nothing there and need not agree.
//!
//! Will the iterations after it find everything D later, too? Lanes: yes, since this one left them so.
//! Buffers take part by name: slot 5 in iteration 5 is what slot 4 was in iteration 4. A walk over slots may
//! come upon one that an iteration up to `lag` back has left, so that many iterations in a row must agree;
//! or upon one that no iteration has touched yet, which must be from before the floor. That is all if no
//! other name means the walked tensor; where one does, nothing is skipped.
//!
//! The CPU that issues the ops either is what everything waits for, and is D later too; or it has issued all of
//! this iteration before the iteration before began, at a pace of at most D an iteration, and stays ahead.
//!
//! The stride adds D times the iterations left and is exact in picoseconds.

use super::ranks::{Held, Ranks, Stamp};
use crate::error::Result;
use crate::plan::link::{Atoms, Env, bind, resolve};
use crate::plan::*;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::rc::Rc;

/// A slot as the ops of a block name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    of: TensorRef,
    slot: u32,
}

/// What an iteration finds.
pub struct Finds {
    lanes: Vec<Stamp>,
    /// Last write and last read of every atom of every named slot.
    written: Vec<Stamp>,
    read: Vec<Stamp>,
    /// One list behind the other, and where each ends.
    held: Vec<Held>,
    held_ends: Vec<usize>,
    compute_end: Vec<u64>,
    devices: Vec<u64>,
    host: Vec<u64>,
    // Sums, which decide nothing.
    waited: Vec<u64>,
    runs: Vec<u64>,
}

/// A stamp that an iteration left: on which cell of which name.
pub struct Trace {
    name: usize,
    cell: usize,
    read: bool,
    stamp: Stamp,
}

/// An argument that binds another slot in every iteration.
struct Walk<'a> {
    arg: &'a Arg,
    tensor: TensorId,
    base: u32,
}

/// A call whose iterations are alike but for the slots that walks bind.
pub struct Alike<'a> {
    args: &'a [Arg],
    env: &'a Env,
    repeat: u32,
    names: Rc<[Name]>,
    walks: Vec<Walk<'a>>,
    /// Iterations back to the last one that touched what a walk comes upon.
    lag: u32,
}

/// Something that goes through calls.
pub trait Course {
    fn ranks(&self) -> &Ranks;
    fn ranks_mut(&mut self) -> &mut Ranks;
    /// How often each segment ran.
    fn runs(&mut self) -> &mut Vec<u64>;
    fn atoms(&self, tensor: TensorId, slot: u32) -> Atoms;
    /// Goes through the body of the call once.
    fn once(&mut self, env: &Env) -> Result<()>;

    /// Goes through it `repeat` times. `names`: what it touches, where strides may be taken.
    fn repeat(&mut self, names: Option<Rc<[Name]>>, args: &[Arg], repeat: u32, env: &Env) -> Result<()> {
        let alike = names.filter(|_| repeat > 2).and_then(|names| Alike::of(names, args, repeat, env));
        let outside = std::mem::replace(&mut self.ranks_mut().floor, u64::MAX);
        let mut earliest = outside;
        // What the iteration before found, by how much later than the one before it, and so how often.
        let (mut before, mut agreed): (Option<Finds>, (u64, u32)) = (None, (0, 0));
        for i in 0..repeat {
            if let Some(alike) = alike.as_ref().filter(|_| i > 0) {
                let finds = self.finds(alike, i);
                let step = before.as_ref().and_then(|b| finds.later_than(b, self.ranks().floor));
                agreed = match step {
                    Some(d) if d == agreed.0 => (d, agreed.1 + 1),
                    Some(d) => (d, 1),
                    None => (0, 0),
                };
                if let Some(before) = before.filter(|_| agreed.1 >= alike.lag && self.rest_is_early(alike, i)) {
                    self.take(alike, i, &before, agreed.0);
                    break;
                }
                before = Some(finds);
            }
            self.ranks_mut().floor = u64::MAX;
            self.once(&bind(args, env, i))?;
            earliest = earliest.min(self.ranks().floor);
        }
        self.ranks_mut().floor = earliest;
        Ok(())
    }

    /// The atoms of a named slot in iteration `i`, times classes: where its stamps are.
    fn cells(&self, name: Name, alike: &Alike, i: u32) -> std::ops::Range<usize> {
        let (tensor, base) = match name.of {
            TensorRef::Tensor(id) => (id, 0),
            TensorRef::Formal(f) => {
                let arg = &alike.args[f as usize];
                let (tensor, base) = resolve(arg.of(), alike.env);
                (tensor, base + arg.slot(i))
            }
        };
        self.slot_cells(tensor, base + name.slot)
    }

    fn slot_cells(&self, tensor: TensorId, slot: u32) -> std::ops::Range<usize> {
        let atoms = self.atoms(tensor, slot);
        atoms.first as usize * self.ranks().classes..(atoms.first + atoms.count) as usize * self.ranks().classes
    }

    fn finds(&mut self, alike: &Alike, i: u32) -> Finds {
        let (mut written, mut read) = (vec![], vec![]);
        for &name in alike.names.iter() {
            let cells = self.cells(name, alike, i);
            written.extend_from_slice(&self.ranks().stamps.written[cells.clone()]);
            read.extend_from_slice(&self.ranks().stamps.read[cells]);
        }
        let runs = self.runs().clone();
        let ranks = self.ranks();
        let (mut held, mut held_ends, mut waited) = (vec![], vec![], vec![]);
        for state in &ranks.state {
            for list in state.ports.iter().chain([&state.sms]) {
                held.extend_from_slice(list);
                held_ends.push(held.len());
            }
            waited.extend_from_slice(&state.waited);
        }
        Finds {
            lanes: ranks.stamps.lanes.clone(),
            written,
            read,
            held,
            held_ends,
            compute_end: ranks.state.iter().map(|s| s.compute_end).collect(),
            devices: ranks.devices.clone(),
            host: ranks.host.clone(),
            waited,
            runs,
        }
    }

    /// Whether what iterations from `i` on are the first to touch is from before the floor.
    fn rest_is_early(&self, alike: &Alike, i: u32) -> bool {
        let before: Vec<(TensorId, u32)> = alike.touched(0..i).collect();
        let early = |cells: &[Stamp]| cells.iter().all(|s| s.ps() < self.ranks().floor);
        alike.touched(i..alike.repeat).all(|slot| {
            let cells = self.slot_cells(slot.0, slot.1);
            // What nobody has touched is early: to look that up is cheaper than who has.
            early(&self.ranks().stamps.written[cells.clone()]) && early(&self.ranks().stamps.read[cells])
                || before.contains(&slot)
        })
    }

    /// The stamps that iteration `i` left, but for those from before the floor.
    fn traces(&self, alike: &Alike, i: u32, walks: bool) -> Vec<Trace> {
        let (ranks, mut all) = (self.ranks(), Vec::with_capacity(64));
        for (number, &name) in alike.names.iter().enumerate().filter(|(_, name)| alike.walks(**name) == walks) {
            let cells = self.cells(name, alike, i);
            for (read, stamps) in [(false, &ranks.stamps.written), (true, &ranks.stamps.read)] {
                let late = stamps[cells.clone()].iter().enumerate().filter(|(_, stamp)| stamp.ps() >= ranks.floor);
                all.extend(late.map(|(cell, &stamp)| Trace { name: number, cell, read, stamp }));
            }
        }
        all
    }

    /// Leaves in iteration `j` what `traces` left, so much later.
    fn retrace(&mut self, alike: &Alike, j: u32, traces: &[Trace], by: u64) {
        let mut at = (usize::MAX, 0);
        for trace in traces {
            if at.0 != trace.name {
                at = (trace.name, self.cells(alike.names[trace.name], alike, j).start);
            }
            let stamps = &mut self.ranks_mut().stamps;
            let stamps = if trace.read { &mut stamps.read } else { &mut stamps.written };
            stamps[at.1 + trace.cell] = trace.stamp.later(by);
        }
    }

    /// Adds what the iterations from `i` on do, each `d` later than the one before.
    fn take(&mut self, alike: &Alike, i: u32, before: &Finds, d: u64) {
        let (floor, left) = (self.ranks().floor, u64::from(alike.repeat - i));
        // A slot that all iterations share has the last one's stamps.
        let [shared, walked] = [false, true].map(|walks| self.traces(alike, i - 1, walks));
        for j in i..alike.repeat {
            self.retrace(alike, j, &walked, d * u64::from(j + 1 - i));
        }
        self.retrace(alike, alike.repeat - 1, &shared, d * left);
        let by = d * left;
        let ranks = self.ranks_mut();
        ranks.stamps.lanes.iter_mut().filter(|l| l.ps() >= floor).for_each(|l| *l = l.later(by));
        ranks.devices.iter_mut().filter(|t| **t >= floor).for_each(|t| *t += by);
        // Its own pace, whether that is the device's or it is ahead of it.
        ranks.host.iter_mut().zip(&before.host).for_each(|(now, was)| *now += (*now - was) * left);
        let width = before.waited.len() / ranks.classes;
        for (state, waited) in ranks.state.iter_mut().zip(before.waited.chunks(width)) {
            for held in state.ports.iter_mut().chain([&mut state.sms]).flatten().filter(|h| h.to > floor) {
                (held.from, held.to) = (held.from + by, held.to + by);
            }
            state.compute_end += by;
            state.waited.iter_mut().zip(waited).for_each(|(now, was)| *now += (*now - was) * left);
        }
        for (segment, runs) in self.runs().iter_mut().enumerate() {
            *runs += (*runs - before.runs.get(segment).copied().unwrap_or(0)) * left;
        }
    }
}

impl<'a> Alike<'a> {
    /// None where slots meet in a way that changes from iteration to iteration.
    fn of(names: Rc<[Name]>, args: &'a [Arg], repeat: u32, env: &'a Env) -> Option<Alike<'a>> {
        let walk = |arg: &'a Arg| {
            let (tensor, base) = resolve(arg.of(), env);
            (arg.period() > 1).then_some(Walk { arg, tensor, base })
        };
        let walks: Vec<Walk> = args.iter().filter_map(walk).collect();
        let mut alike = Alike { args, env, repeat, names, walks, lag: 1 };
        let walked = |tensor: TensorId| alike.walks.iter().any(|w| w.tensor == tensor);
        for &name in alike.names.iter() {
            let tensor = match name.of {
                TensorRef::Tensor(id) => id,
                TensorRef::Formal(f) => resolve(args[f as usize].of(), env).0,
            };
            if walked(tensor) && (!alike.walks(name) || name.slot > 0) {
                return None;
            }
        }
        for walk in &alike.walks {
            alike.lag = alike.lag.max(alike.lag_of(walk)?);
        }
        Some(alike)
    }

    /// Whether a name means another slot in every iteration.
    fn walks(&self, name: Name) -> bool {
        matches!(name.of, TensorRef::Formal(f) if self.args[f as usize].period() > 1)
    }

    /// Iterations back to the last one that touched what `walk` comes upon; 0 if it is always untouched,
    /// none if that differs from iteration to iteration.
    fn lag_of(&self, walk: &Walk) -> Option<u32> {
        let Arg::Each { first, step, of, .. } = *walk.arg else { return Some(0) };
        let mut least = None;
        for other in self.walks.iter().filter(|w| w.tensor == walk.tensor) {
            let Arg::Each { first: other_first, step: other_step, of: other_of, .. } = *other.arg else { continue };
            if (other.base, other_step, other_of) != (walk.base, step, of) {
                return None;
            }
            // slot(i) = first + i * step is other_first + (i - k) * step, modulo `of`.
            let apart = |k: u32| i64::from(first) - i64::from(other_first) + i64::from(k) * i64::from(step);
            let lag = (1..self.repeat.min(of + 1)).find(|&k| apart(k).rem_euclid(i64::from(of)) == 0);
            least = least.into_iter().chain(lag).min();
        }
        Some(least.unwrap_or(0))
    }

    /// Slots that walks bind in some iterations, in their order.
    fn touched(&self, iterations: std::ops::Range<u32>) -> impl Iterator<Item = (TensorId, u32)> {
        iterations.flat_map(|i| self.walks.iter().map(move |w| (w.tensor, w.base + w.arg.slot(i))))
    }
}

/// Every slot that each block touches, in the names of its own tensors and formals.
#[derive(Default)]
pub struct Names {
    known: FxHashMap<BlockId, Rc<[Name]>>,
}

impl Names {
    pub fn of(&mut self, plan: &Plan, block: BlockId) -> Rc<[Name]> {
        if let Some(known) = self.known.get(&block) {
            return known.clone();
        }
        let mut names = BTreeSet::new();
        for op in &plan.blocks[block as usize].ops {
            if let OpKind::Call { block, args, repeat } = &op.kind {
                for name in self.of(plan, *block).iter() {
                    names.extend(outer_names(*name, args, *repeat));
                }
                continue;
            }
            let (reads, writes) = op.bufs();
            names.extend(reads.iter().chain(&writes).map(|b| Name { of: b.of, slot: b.slot }));
        }
        let names: Rc<[Name]> = names.into_iter().collect();
        self.known.insert(block, names.clone());
        names
    }
}

/// What a name inside a call is to the caller: as many slots as the call's iterations bind.
fn outer_names(name: Name, args: &[Arg], repeat: u32) -> impl Iterator<Item = Name> {
    let arg = match name.of {
        TensorRef::Tensor(_) => Arg::Buf { of: name.of, slot: 0 },
        TensorRef::Formal(formal) => args[formal as usize],
    };
    (0..repeat.min(arg.period())).map(move |i| Name { of: arg.of(), slot: arg.slot(i) + name.slot })
}

impl Finds {
    /// What was held of one thing.
    fn held(&self, list: usize) -> &[Held] {
        &self.held[list.checked_sub(1).map_or(0, |before| self.held_ends[before])..self.held_ends[list]]
    }

    /// By how much everything that matters is later than in `before`, what the iteration before found, whose
    /// earliest start was `floor`; none if not all by the same.
    fn later_than(&self, before: &Finds, floor: u64) -> Option<u64> {
        let d = self.compute_end[0].checked_sub(before.compute_end[0])?;
        let same = |now: u64, then: u64| now == then + d || (now < floor + d && then < floor);
        let stamps = |now: &[Stamp], then: &[Stamp]| {
            now.iter().zip(then).all(|(n, t)| *n == t.later(d) || (n.ps() < floor + d && t.ps() < floor))
        };
        let held = |now: &[Held], then: &[Held]| {
            let now = now.iter().filter(|h| h.to > floor + d).map(|h| (h.from, h.to, h.amount));
            now.eq(then.iter().filter(|h| h.to > floor).map(|h| (h.from + d, h.to + d, h.amount)))
        };
        let all = self.compute_end.iter().zip(&before.compute_end).all(|(n, t)| *n == t + d)
            && stamps(&self.lanes, &before.lanes)
            && stamps(&self.written, &before.written)
            && stamps(&self.read, &before.read)
            && (0..self.held_ends.len()).all(|list| held(self.held(list), before.held(list)))
            && self.devices.iter().zip(&before.devices).all(|(n, t)| same(*n, *t))
            && self.host.iter().zip(&before.host).all(|(n, t)| *n == t + d || (n - t <= d && *n < floor));
        all.then_some(d)
    }
}
