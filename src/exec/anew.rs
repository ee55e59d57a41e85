//! Steps of plans that differ in how many rows go where: weights and optimizer states go from one to the next.

use super::arena::{Arena, Data};
use super::inputs;
use super::kernels::Scalar;
use super::train::{Fixed, Keep, one_step};
use super::{Anew, Job, Options};
use crate::error::{Error, Result};
use crate::plan::lasting::that_last;
use crate::plan::link::AtomTable;
use crate::plan::memory::SlotId;
use crate::plan::{Plan, check};

/// A rank's memory that lives from step to step: each tensor by name, slot by slot; `None` where a slot has no place in
/// the rank's memory.
type Memory = Vec<(String, Vec<Option<Data>>)>;

pub(super) fn run<T: Scalar>(mut plan: Plan, options: &Options, job: &Job, each: Anew) -> Result<()> {
    let mut memory: Option<Vec<Memory>> = None;
    for step in job.numbers() {
        check::check(&plan)?;
        let atoms = AtomTable::new(&plan)?;
        let fixed = Fixed::new(&plan, &atoms, options)?;
        let given = inputs::shared(&plan, job.source.seed);
        let mut arenas = fixed.arenas(&plan, &atoms, job.source);
        for (arena, memory) in arenas.iter_mut().zip(memory.iter().flatten()) {
            restore(&plan, &atoms, arena, memory)?;
        }
        let last = step == *job.numbers().end();
        let keep = Keep { all: options.keep || job.keep_last && last, logits: job.keep_last && last, weights: true };
        let options = Options { inject: options.inject.filter(|_| last), ..options.clone() };
        let (run, arenas) = one_step::<T>(&plan, &atoms, &fixed, &options, (job.source, step, keep), &given, arenas)?;
        memory = Some(arenas.iter().map(|arena| saved(&plan, &atoms, arena)).collect());
        if let Some(next) = each(step, &plan, run)? {
            plan = next;
        }
    }
    Ok(())
}

fn slots<'p>(plan: &'p Plan, tensor: u32) -> impl Iterator<Item = SlotId> + use<'p> {
    (0..plan.tensors[tensor as usize].slots).map(move |slot| SlotId { tensor, slot })
}

fn saved(plan: &Plan, atoms: &AtomTable, arena: &Arena) -> Memory {
    let of = |at: SlotId| {
        let whole = || arena.read(&arena.whole(&inputs::slot(plan, atoms, at.tensor, at.slot)));
        arena.holds(at).then(whole)
    };
    that_last(plan).map(|t| (plan.tensors[t as usize].name.clone(), slots(plan, t).map(of).collect())).collect()
}

fn restore(plan: &Plan, atoms: &AtomTable, arena: &mut Arena, memory: &Memory) -> Result<()> {
    let own: Vec<u32> = that_last(plan).collect();
    let other = |why: String| Err(Error::plan(format!("the next step's plan {why}; it needs the same weights")));
    if own.len() != memory.len() {
        return other(format!("has {} tensors that last, the one before has {}", own.len(), memory.len()));
    }
    for (t, (name, data)) in own.into_iter().zip(memory) {
        let tensor = &plan.tensors[t as usize];
        if tensor.name != *name || tensor.slots as usize != data.len() {
            return other(format!("has {:?} in place of {name:?}", tensor.name));
        }
        for (at, data) in slots(plan, t).zip(data).filter_map(|(at, data)| Some((at, data.as_ref()?))) {
            if !arena.holds(at) {
                return other(format!("has no place for {name:?}"));
            }
            let part = arena.whole(&inputs::slot(plan, atoms, at.tensor, at.slot));
            arena.write(&part, data).or_else(|why| other(format!("has another {name:?}: {why}")))?;
        }
    }
    Ok(())
}
