//! What a program needs at most, in one pass over its calls: every slot that it touches, with no two sharing their bytes.
//!
//! A stage of a pipeline that needs less than another one even so is not the fullest, and its lives need no closer look.

use super::size;
use crate::plan::memory::SlotId;
use crate::plan::op::*;
use crate::plan::program::Plan;
use std::collections::BTreeSet;

/// The slots that a block touches: of tensors, and of what calls bind to its formals, counted from there.
#[derive(Default)]
struct Touched {
    tensors: BTreeSet<(TensorId, u32)>,
    formals: Vec<BTreeSet<u32>>,
}

impl Touched {
    fn add(&mut self, of: TensorRef, slot: u32) {
        match of {
            TensorRef::Tensor(id) => _ = self.tensors.insert((id, slot)),
            TensorRef::Formal(formal) => {
                let formal = formal as usize;
                self.formals.resize_with(self.formals.len().max(formal + 1), BTreeSet::new);
                self.formals[formal].insert(slot);
            }
        }
    }
}

/// Bounds of the programs of one plan.
pub struct Bounds<'p> {
    plan: &'p Plan,
    blocks: Vec<Option<Touched>>,
}

impl<'p> Bounds<'p> {
    pub fn new(plan: &'p Plan) -> Bounds<'p> {
        let mut bounds = Bounds { plan, blocks: plan.blocks.iter().map(|_| None).collect() };
        (0..plan.blocks.len()).for_each(|block| bounds.block(block));
        bounds
    }

    /// What a block touches, those that it calls first.
    fn block(&mut self, block: usize) {
        if self.blocks[block].is_some() {
            return;
        }
        let ops = &self.plan.blocks[block].ops;
        for op in ops {
            if let OpKind::Call { block, .. } = &op.kind {
                self.block(*block as usize);
            }
        }
        let mut touched = Touched::default();
        self.line(ops, &mut |of, slot| touched.add(of, slot));
        self.blocks[block] = Some(touched);
    }

    /// Bytes of the device that `program` needs at most, as its [`Layout`](super::Layout) has them: whatever is put at
    /// the lowest free place ends no higher than all of it one behind the other.
    pub fn of(&self, program: u32) -> u64 {
        let mut seen: Vec<Vec<bool>> = self.plan.tensors.iter().map(|t| vec![false; t.slots as usize]).collect();
        self.line(&self.plan.programs[program as usize].ops, &mut |of, slot| {
            if let TensorRef::Tensor(id) = of
                && let Some(seen) = seen[id as usize].get_mut(slot as usize)
            {
                *seen = true;
            }
        });
        let given = self.plan.feed.given();
        let of_tensor = |(id, seen): (TensorId, &Vec<bool>)| {
            let used = seen.iter().filter(|seen| **seen).count();
            let slots = if used > 0 && given.contains(&id) { seen.len() } else { used };
            let host = self.plan.tensors[id as usize].host;
            if host || slots == 0 {
                0
            } else {
                size(self.plan, SlotId { tensor: id, slot: 0 }).saturating_mul(slots as u64)
            }
        };
        (0..).zip(&seen).map(of_tensor).fold(0, u64::saturating_add)
    }

    /// Calls `touch` with whatever ops touch, blocks that they call included.
    fn line(&self, ops: &[Op], touch: &mut impl FnMut(TensorRef, u32)) {
        for op in ops {
            let OpKind::Call { block, args, repeat } = &op.kind else {
                op.reads().chain(op.writes()).for_each(|buf| touch(buf.of, buf.slot));
                continue;
            };
            let inner = self.blocks[*block as usize].as_ref().expect("what is called has been looked at");
            inner.tensors.iter().for_each(|(id, slot)| touch(TensorRef::Tensor(*id), *slot));
            for (arg, slots) in args.iter().zip(&inner.formals) {
                for i in 0..(*repeat).min(arg.period()) {
                    slots.iter().for_each(|slot| touch(arg.of(), arg.slot(i) + slot));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::link::AtomTable;
    use crate::plan::memory::Layout;
    use crate::spec::{Dtype, LlmSpec, Parallelism, Recompute, Workload};
    use crate::strategy::{Engines, build};

    #[test]
    fn no_program_needs_more_than_its_bound() {
        let model = LlmSpec { layers: 8, ..LlmSpec::find("tiny").unwrap() };
        let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } };
        let work = Workload {
            seq_len: 128,
            global_batch: 24,
            micro_batch: 1,
            dtype: Dtype::F32,
            documents: Default::default(),
        };
        for (pp, vp, zero, words) in [
            (1, 1, 3, "default"),
            (4, 1, 1, "default"),
            (4, 2, 1, "default"),
            (8, 1, 0, "zb-h1"),
            (4, 2, 1, "zb-v"),
            (2, 1, 2, "default"),
        ] {
            for recompute in [Recompute::None, Recompute::Full] {
                let par = Parallelism {
                    pp,
                    vp,
                    zero,
                    dp: 2,
                    recompute,
                    options: words.parse().unwrap(),
                    ..Parallelism::default()
                };
                let plan = build(&model, &work, &par, engines).unwrap();
                let (atoms, bounds) = (AtomTable::new(&plan).unwrap(), Bounds::new(&plan));
                for program in 0..plan.programs.len() as u32 {
                    let (bound, bytes) = (bounds.of(program), Layout::new(&plan, &atoms, program).unwrap().bytes);
                    assert!(bytes <= bound && bound < 4 * bytes, "{par:?} {program}: {bytes} of {bound}");
                }
            }
        }
    }
}
