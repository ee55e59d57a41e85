//! Which tensors live from before a step to after it.

use super::op::*;
use super::program::Plan;
use std::collections::BTreeSet;

/// Whether each tensor lives from before a step to after it: weights, optimizer state and gradients do, except for
/// gradients that the optimizer does not read. These are whole only until ranks have summed them into their shares, and
/// what comes behind that may have their bytes; so in Megatron-LM's distributed optimizer, whose shares are slices of
/// the buffer of gradients. Where the optimizer is on the host it reads copies of gradients, and so the gradients
/// themselves last.
pub fn lasting(plan: &Plan) -> Vec<bool> {
    let mut read = Read { plan, blocks: vec![None; plan.blocks.len()] };
    let mut updated: BTreeSet<TensorRef> = BTreeSet::new();
    plan.programs.iter().for_each(|program| updated.extend(read.by_optimizer(&program.ops)));
    let loss = plan.feed.tokens().map(|inputs| inputs.loss);
    let passes = |of: &Tensor, id: TensorId| {
        of.kind == TensorKind::Grad && Some(id) != loss && !updated.contains(&TensorRef::Tensor(id))
    };
    let none = updated.is_empty();
    let lasts = |(of, id): (&Tensor, TensorId)| of.kind.persists() && (none || !passes(of, id));
    plan.tensors.iter().zip(0..).map(lasts).collect()
}

/// The tensors and formals that the optimizer reads in each block.
struct Read<'p> {
    plan: &'p Plan,
    blocks: Vec<Option<BTreeSet<TensorRef>>>,
}

impl Read<'_> {
    fn by_optimizer(&mut self, ops: &[Op]) -> BTreeSet<TensorRef> {
        let mut all = BTreeSet::new();
        for op in ops {
            match &op.kind {
                OpKind::Compute { kernel, reads, .. } if kernel.steps() => all.extend(reads.iter().map(|buf| buf.of)),
                // Gradients are copied to the host for the optimizer alone.
                OpKind::Copy { src, .. } => drop(all.insert(src.of)),
                OpKind::Call { block, args, .. } => {
                    for of in self.by_block(*block) {
                        all.insert(match of {
                            TensorRef::Formal(formal) => args[formal as usize].of(),
                            tensor => tensor,
                        });
                    }
                }
                _ => {}
            }
        }
        all
    }

    fn by_block(&mut self, block: BlockId) -> BTreeSet<TensorRef> {
        if let Some(known) = &self.blocks[block as usize] {
            return known.clone();
        }
        let plan = self.plan;
        let found = self.by_optimizer(&plan.blocks[block as usize].ops);
        self.blocks[block as usize] = Some(found.clone());
        found
    }
}

/// The tensors that live from before a step to after it.
pub fn that_last(plan: &Plan) -> impl Iterator<Item = TensorId> {
    lasting(plan).into_iter().zip(0..).filter_map(|(lasts, tensor)| lasts.then_some(tensor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Dtype, LlmSpec, Options, Parallelism, Workload};
    use crate::strategy::{Engines, build};

    /// Gradients are there throughout where the optimizer reads them; a rank that has a share of their sum has them until
    /// then. The loss is read after the step.
    #[test]
    fn gradients_last_where_the_optimizer_reads_them() {
        let (model, dtype) = (LlmSpec::find("tiny").unwrap(), Dtype::F32);
        let work = Workload { seq_len: 64, global_batch: 4, micro_batch: 1, dtype, documents: Default::default() };
        let last = |zero: u32, options: &str| {
            let options: Options = options.parse().unwrap();
            let par = Parallelism { dp: 2, zero, options, ..Parallelism::default() };
            let engine = Engine::Sm { ctas: 1 };
            let plan = build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap();
            let lasting: Vec<TensorId> = that_last(&plan).collect();
            ["g.layers", "g_share.layers", "w.layers", "adam_m.layers", "loss", "x"].map(|name| {
                let at = plan.tensors.iter().position(|t| t.name == name);
                at.is_some_and(|at| lasting.contains(&(at as u32)))
            })
        };
        assert_eq!(last(0, "default"), [true, false, true, true, true, false]);
        assert_eq!(last(1, "default"), [false, false, true, true, true, false]);
        assert_eq!(last(2, "default"), [false, true, true, true, true, false]);
        assert_eq!(last(0, "offload-optimizer"), [true, false, true, true, true, false]);
        assert_eq!(last(1, "offload-optimizer"), [false, false, true, true, true, false]);
        assert_eq!(last(2, "offload-optimizer"), [false, true, true, true, true, false]);
    }
}
