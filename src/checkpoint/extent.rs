//! Which elements of which parameter a rank holds, and where in its memory.

use crate::error::{Cause, Result};
use crate::exec::inputs::{has, places, share};
use crate::plan::foreach::ForeachKernel;
use crate::plan::link::{AtomTable, Line};
use crate::plan::memory::SlotId;
use crate::plan::muon::{MuonKernel, Part};
use crate::plan::{Kernel, OpKind, Param, Plan, TensorId};
use std::collections::BTreeMap;
use std::ops::Range;

/// What is kept of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Its value as the optimizer has it: the master copy where there is one.
    Weight,
    /// The running mean of its gradient.
    ExpAvg,
    /// The running mean of its gradient's square.
    ExpAvgSq,
}

impl State {
    pub const ALL: [State; 3] = [State::Weight, State::ExpAvg, State::ExpAvgSq];

    /// As PyTorch's optimizers call it.
    pub fn name(self) -> &'static str {
        match self {
            State::Weight => "weight",
            State::ExpAvg => "exp_avg",
            State::ExpAvgSq => "exp_avg_sq",
        }
    }

    pub fn find(name: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// Elements one behind the other both in a flat tensor and in the whole parameter, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub local: u64,
    pub whole: u64,
    pub len: u64,
}

/// Elements of a flat tensor that runs are, those that are one behind the other together: read or written at once.
pub fn stretches(runs: &[Run]) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = vec![];
    for run in runs {
        match all.last_mut() {
            Some(last) if last.end == run.local => last.end += run.len,
            _ => all.push(run.local..run.local + run.len),
        }
    }
    all
}

/// The tensors that the optimizer updates together, slot by slot.
#[derive(Debug, Clone)]
struct Updated {
    /// By [`State`]; the weight's is the master copy where there is one. None: nothing of it has such a state.
    tensors: [Option<TensorId>; 3],
    /// What is what in a rank's share, where Muon updates matrices and keeps squares for the rest alone, packed.
    part: Option<Part>,
}

/// What one rank has of a parameter.
#[derive(Debug, Clone)]
pub struct Held<'p> {
    pub param: &'p Param,
    /// Where it is kept, by [`State`]. None: it has no such state.
    pub states: [Option<SlotId>; 3],
    /// Elements of the share that the optimizer keeps squares of, one behind the other; none: all of them.
    packed: Option<Vec<Range<u64>>>,
    /// Its elements there, in order.
    pub runs: Vec<Run>,
    /// The weight that kernels read, and its elements, where the optimizer has a copy of its own.
    pub working: Option<(SlotId, Vec<Run>)>,
}

/// The optimizer's tensors of a plan, by the tensor that it updates.
pub struct Extents<'p> {
    plan: &'p Plan,
    updated: BTreeMap<TensorId, Updated>,
}

impl<'p> Held<'p> {
    /// What is kept of a parameter by an optimizer that keeps everything of all.
    #[cfg(test)]
    pub fn whole(param: &'p Param, at: SlotId, runs: Vec<Run>) -> Held<'p> {
        Held { param, states: [Some(at); 3], packed: None, runs, working: None }
    }

    /// Where runs of it stand in the tensor of a state.
    pub fn placed(&self, state: State, runs: &[Run]) -> Vec<Run> {
        let Some(packed) = self.packed.as_ref().filter(|_| state == State::ExpAvgSq) else { return runs.to_vec() };
        let place = |run: &Run| {
            let mut before = 0;
            for kept in packed {
                if kept.contains(&run.local) {
                    return Run { local: before + run.local - kept.start, ..*run };
                }
                before += kept.end - kept.start;
            }
            unreachable!("{} has squares, and stands among what has some", self.param.name)
        };
        runs.iter().map(place).collect()
    }
}

impl<'p> Extents<'p> {
    /// Errors: the plan trains nothing.
    pub fn new(plan: &'p Plan, atoms: &AtomTable) -> Result<Extents<'p>> {
        let (mut updated, mut squares) = (BTreeMap::new(), BTreeMap::new());
        for program in 0..plan.programs.len() as u32 {
            let line = Line::program(plan, atoms, program)?;
            for (i, node) in line.nodes.iter().enumerate() {
                let OpKind::Compute { kernel, .. } = &node.op.kind else { continue };
                // Behind the gradient, and what matrices move by.
                let (first, part) = match kernel {
                    Kernel::Adam { .. } => (1, None),
                    Kernel::Foreach(_) => (0, None),
                    Kernel::Muon(MuonKernel::Update { part, .. }) => (2, Some(part.clone())),
                    _ => continue,
                };
                let mut kept: Vec<TensorId> = line.reads(i)[first..].iter().map(|place| place.tensor).collect();
                match kernel {
                    // Both moments are made before the first of them moves the weights.
                    Kernel::Foreach(ForeachKernel::Moments { .. }) => {
                        squares.insert(kept[1], kept[2]);
                        continue;
                    }
                    Kernel::Foreach(ForeachKernel::Move { .. }) => kept[2] = squares[&kept[1]],
                    _ => {}
                }
                let tensors = [0, 1, 2].map(|state| kept.get(state).copied());
                updated.insert(kept[0], Updated { tensors, part });
            }
        }
        if updated.is_empty() {
            return Err(Cause::Checkpoint.infeasible("the plan updates no weights; use one of whole training steps"));
        }
        Ok(Extents { plan, updated })
    }

    /// What a rank holds, parameter by parameter in the plan's order.
    pub fn of(&self, rank: u32) -> Result<Vec<Held<'p>>> {
        self.plan.params.iter().filter(|param| has(self.plan, param, rank)).map(|p| self.held(p, rank)).collect()
    }

    fn held(&self, param: &'p Param, rank: u32) -> Result<Held<'p>> {
        let master = self.plan.masters.iter().find(|m| m.weight == param.weight);
        let kept = master.map_or(param.weight, |m| m.master);
        let updated = self
            .updated
            .get(&kept)
            .ok_or_else(|| Cause::Checkpoint.infeasible(format!("the plan has no optimizer for {}", param.name)))?;
        let slot = |tensor| SlotId { tensor, slot: param.slot };
        let has_squares = param.matrices.is_empty();
        let of = |(state, tensor): (usize, Option<TensorId>)| {
            tensor.filter(|_| has_squares || state != State::ExpAvgSq as usize).map(slot)
        };
        let mut states = updated.tensors.into_iter().enumerate().map(of);
        let states = [0; 3].map(|_| states.next().flatten());
        let packed = updated.part.as_ref().map(|part| {
            let others = part.stretches(&self.plan.views, rank).into_iter().filter(|s| s.of.is_none());
            others.map(|s| s.elems.start as u64..s.elems.end as u64).collect()
        });
        let all = runs(self.plan, param, rank);
        let share = match master {
            Some(master) => within(&all, share(self.plan, master, rank)),
            None => all.clone(),
        };
        let working = master.map(|m| (slot(param.weight), if m.shared { share.clone() } else { all }));
        Ok(Held { param, states, packed, runs: share, working })
    }
}

/// Where the elements of a parameter stand in a rank's flat tensor, before the optimizer's shares are cut.
fn runs(plan: &Plan, param: &Param, rank: u32) -> Vec<Run> {
    let mut runs: Vec<Run> = vec![];
    for (local, whole) in (param.rows[0]..).zip(places(plan, param, rank)) {
        let Some(whole) = whole else { continue };
        match runs.last_mut() {
            Some(last) if last.local + last.len == local && last.whole + last.len == whole => last.len += 1,
            _ => runs.push(Run { local, whole, len: 1 }),
        }
    }
    runs
}

/// The parts of runs that lie in a range of the flat tensor, counted from its start.
fn within(runs: &[Run], range: std::ops::Range<u64>) -> Vec<Run> {
    let cut = |run: &Run| {
        let (from, to) = (run.local.max(range.start), (run.local + run.len).min(range.end));
        (from < to).then(|| Run { local: from - range.start, whole: run.whole + from - run.local, len: to - from })
    };
    runs.iter().filter_map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_cuts_runs_where_it_begins_and_ends() {
        let runs = [Run { local: 0, whole: 100, len: 10 }, Run { local: 10, whole: 200, len: 10 }];
        let cut = within(&runs, 5..12);
        assert_eq!(cut, [Run { local: 0, whole: 105, len: 5 }, Run { local: 5, whole: 200, len: 2 }]);
        assert!(within(&runs, 20..30).is_empty());
    }
}
