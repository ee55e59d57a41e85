//! How the iterations of a call are alike: the slots that they touch, and the arguments that *walk*, that is, bind
//! another slot every time.

use crate::plan::link::{Env, resolve};
use crate::plan::*;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::rc::Rc;

/// A slot as the ops of a block name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    pub of: TensorRef,
    pub slot: u32,
    /// The lane of all ops of the block that touch its tensor; `None` if there are several, or if that is not known.
    pub lane: Option<u16>,
}

/// The slots that each block touches, in the names of its own tensors and formals.
#[derive(Default)]
pub struct Names {
    known: FxHashMap<BlockId, Rc<[Name]>>,
}

impl Names {
    pub fn of(&mut self, plan: &Plan, block: BlockId) -> Rc<[Name]> {
        if let Some(known) = self.known.get(&block) {
            return known.clone();
        }
        let mut names = vec![];
        for op in &plan.blocks[block as usize].ops {
            if let OpKind::Call { block, args, repeat } = &op.kind {
                for name in self.of(plan, *block).iter() {
                    names.extend(outer_names(*name, args, *repeat));
                }
                continue;
            }
            names.extend(op.reads().chain(op.writes()).map(|b| Name { of: b.of, slot: b.slot, lane: None }));
        }
        names.sort_unstable();
        names.dedup();
        let names: Rc<[Name]> = names.into();
        self.known.insert(block, names.clone());
        names
    }
}

/// The names that the caller has for a name inside a call: as many slots as the call's iterations bind.
fn outer_names(name: Name, args: &[Arg], repeat: u32) -> impl Iterator<Item = Name> {
    let arg = match name.of {
        TensorRef::Tensor(_) => Arg::Buf { of: name.of, slot: 0 },
        TensorRef::Formal(formal) => args[formal as usize],
    };
    (0..repeat.min(arg.period())).map(move |i| Name { of: arg.of(), slot: arg.slot(i) + name.slot, lane: None })
}

/// An argument that binds another slot in every iteration.
pub struct Walk {
    arg: Arg,
    pub tensor: TensorId,
    base: u32,
    /// Where the stamps of the tensor's slot 0 begin, by cell (an atom of a class).
    pub first: usize,
    /// Cells of one slot.
    pub cells: usize,
}

/// Where the stamps of a name are, by cell (an atom of a class).
pub struct Cells {
    /// The first cell, if the name's argument binds slot 0.
    first: usize,
    /// Cells of one slot.
    cells: usize,
    arg: Option<Arg>,
    lane: Option<u16>,
    /// Whether the name means another slot in every iteration.
    pub walks: bool,
    /// Whether no other walk is over the same tensor.
    pub alone: bool,
}

impl Cells {
    pub fn of(&self, i: u32) -> Range<usize> {
        let first = self.first + self.arg.map_or(0, |arg| arg.slot(i) as usize) * self.cells;
        first..first + self.cells
    }

    /// The first cell in the first of these iterations, and how far it moves in each; `None` if the walk turns round in
    /// between, or if the name does not walk.
    pub fn pace(&self, iterations: Range<u32>) -> Option<(usize, isize)> {
        let Some(Arg::Each { step, .. }) = self.arg else { return None };
        let [first, last] = [iterations.start, iterations.end - 1].map(|i| self.of(i).start);
        let step = step as isize * self.cells as isize;
        (first.checked_add_signed(step * (iterations.len() as isize - 1)) == Some(last)).then_some((first, step))
    }
}

/// A call whose iterations are alike but for the slots that walks bind.
pub struct Alike {
    /// The cells of every name, in the order of the names.
    pub cells: Vec<Cells>,
    /// The cells of names that mean the same slot in every iteration: each once, in as few runs as can be.
    pub fixed: Vec<Range<usize>>,
    pub walks: Vec<Walk>,
    /// How many iterations back the slot that a walk comes upon was touched last, the most of all walks; at least 1.
    pub lag: u32,
    /// The lane of each cell, which is that of its name: first the cells of `fixed`, then those of names that walk.
    pub lanes: Vec<Option<u16>>,
}

impl Walk {
    pub fn slot(&self, i: u32) -> u32 {
        self.base + self.arg.slot(i)
    }

    /// The slots that the walk binds in these iterations, if they lie one behind the other.
    pub fn run(&self, iterations: Range<u32>) -> Option<Range<usize>> {
        let Arg::Each { step: 1 | -1, .. } = self.arg else { return None };
        let (a, b) = (self.slot(iterations.start) as usize, self.slot(iterations.end - 1) as usize);
        (a.abs_diff(b) + 1 == iterations.len()).then(|| a.min(b)..a.max(b) + 1)
    }
}

impl Alike {
    /// How the iterations of a call with these names are alike; `None` where slots meet in a way that changes from
    /// iteration to iteration. `cells`: the first cell of a tensor's slot 0, and the cells of one slot.
    pub fn of(
        names: &[Name],
        args: &[Arg],
        repeat: u32,
        env: &Env,
        cells: &dyn Fn(TensorId) -> (usize, usize),
    ) -> Option<Alike> {
        let walk = |(f, arg): (usize, &Arg)| {
            let (tensor, base) = resolve(arg.of(), env);
            let (first, cells) = cells(tensor);
            let named = || names.iter().any(|name| name.of == TensorRef::Formal(f as u32));
            (arg.period() > 1 && named()).then_some(Walk { arg: *arg, tensor, base, first, cells })
        };
        let walks: Vec<Walk> = args.iter().enumerate().filter_map(walk).collect();
        let cells_of = Vec::with_capacity(names.len());
        let mut alike = Alike { cells: cells_of, fixed: vec![], walks, lag: 1, lanes: vec![] };
        let walked = |tensor: TensorId| alike.walks.iter().filter(|w| w.tensor == tensor).count();
        for &name in names {
            let (tensor, base, arg) = match name.of {
                TensorRef::Tensor(id) => (id, 0, None),
                TensorRef::Formal(f) => {
                    let (tensor, base) = resolve(args[f as usize].of(), env);
                    (tensor, base, Some(args[f as usize]))
                }
            };
            let (walks, over) = (arg.is_some_and(|arg| arg.period() > 1), walked(tensor));
            if over > 0 && (!walks || name.slot > 0) {
                return None;
            }
            let (first, cells) = cells(tensor);
            let first = first + (base + name.slot) as usize * cells;
            alike.cells.push(Cells { first, cells, arg, lane: name.lane, walks, alone: over == 1 });
        }
        let (walking, fixed): (Vec<&Cells>, Vec<&Cells>) = alike.cells.iter().partition(|name| name.walks);
        alike.fixed = merged(fixed.iter().map(|name| name.of(0)).collect());
        // All names of one tensor have the same lane.
        let lane_of: FxHashMap<usize, Option<u16>> =
            fixed.iter().flat_map(|name| name.of(0).map(|cell| (cell, name.lane))).collect();
        alike.lanes.extend(alike.fixed.iter().flat_map(|run| run.clone().map(|cell| lane_of[&cell])));
        alike.lanes.extend(walking.iter().flat_map(|name| name.of(0).map(|_| name.lane)));
        for walk in &alike.walks {
            alike.lag = alike.lag.max(alike.lag_of(walk, repeat)?);
        }
        Some(alike)
    }

    /// How many iterations back the slot that `walk` comes upon was touched last; 0 if it is always untouched, `None`
    /// if that differs from iteration to iteration.
    fn lag_of(&self, walk: &Walk, repeat: u32) -> Option<u32> {
        let Arg::Each { first, step, of, .. } = walk.arg else { return Some(0) };
        let mut least = None;
        for other in self.walks.iter().filter(|w| w.tensor == walk.tensor) {
            let Arg::Each { first: other_first, step: other_step, of: other_of, .. } = other.arg else { continue };
            if (other.base, other_step, other_of) != (walk.base, step, of) {
                return None;
            }
            // slot(i) = first + i * step is other_first + (i - k) * step, modulo `of`.
            let apart = |k: u32| i64::from(first) - i64::from(other_first) + i64::from(k) * i64::from(step);
            let lag = (1..repeat.min(of + 1)).find(|&k| apart(k).rem_euclid(i64::from(of)) == 0);
            least = least.into_iter().chain(lag).min();
        }
        Some(least.unwrap_or(0))
    }

    /// Slots that walks bind in these iterations, in their order.
    pub fn touched(&self, iterations: Range<u32>) -> impl Iterator<Item = (TensorId, u32)> {
        iterations.flat_map(|i| self.walks.iter().map(move |w| (w.tensor, w.slot(i))))
    }
}

/// Runs of cells in ascending order, those that touch or overlap joined.
fn merged(mut runs: Vec<Range<usize>>) -> Vec<Range<usize>> {
    runs.sort_unstable_by_key(|run| run.start);
    let mut all: Vec<Range<usize>> = vec![];
    for run in runs {
        match all.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => all.push(run),
        }
    }
    all
}
