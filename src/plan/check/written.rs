//! Checks that nothing is read that was never written. Only weights, optimizer state and the plan's inputs are there
//! before the step begins.

use crate::error::{Error, Result};
use crate::plan::link::{AtomTable, Line, bind};
use crate::plan::*;
use rustc_hash::{FxHashMap, FxHashSet};
use std::rc::Rc;

fn is_given(plan: &Plan, tensor: TensorId) -> bool {
    let kind = plan.tensors[tensor as usize].kind;
    let kept = matches!(kind, TensorKind::Param | TensorKind::OptState);
    kept || plan.feed.given().contains(&tensor)
}

/// Checks a spliced line, by the buffers that names mean. Errors: the first op that reads what nothing has written.
pub fn before_read(plan: &Plan, line: &Line) -> Result<()> {
    for i in 0..line.nodes.len() {
        let outer = line.outer_reads(i);
        for place in line.reads(i) {
            if !is_given(plan, place.tensor) && place.atoms.iter().any(|a| outer.contains(&a)) {
                let tensor = &plan.tensors[place.tensor as usize];
                let why =
                    format!("{} reads {:?} slot {} before anything wrote it", line.path(i), tensor.name, place.slot);
                return Err(Error::plan(why));
            }
        }
    }
    Ok(())
}

/// An atom as the ops of a body name it: tensor or formal, slot, and number within the slot.
type Name = (TensorRef, u32, u32);

/// The atoms that a body reads before it writes them, and those that it writes.
#[derive(Default)]
struct Effect {
    reads: FxHashSet<Name>,
    writes: FxHashSet<Name>,
}

/// Checks a plan body by body, by names. False where that proves nothing: something may be written under one name of a
/// block and read under another.
pub fn by_name(plan: &Plan, atoms: &AtomTable) -> bool {
    let mut effects = Effects { plan, atoms, known: FxHashMap::default() };
    plan.programs.iter().all(|program| {
        let effect = effects.of(&program.ops, &[]);
        let given = |name: &Name| matches!(name.0, TensorRef::Tensor(tensor) if is_given(plan, tensor));
        effect.reads.iter().all(given)
    })
}

struct Effects<'a> {
    plan: &'a Plan,
    atoms: &'a AtomTable,
    known: FxHashMap<(BlockId, Vec<TensorId>), Rc<Effect>>,
}

impl Effects<'_> {
    fn of(&mut self, ops: &[Op], env: &[(TensorId, u32)]) -> Effect {
        let mut all = Effect::default();
        for op in ops {
            let OpKind::Call { block, args, repeat } = &op.kind else {
                let (reads, writes) = op.bufs();
                let name = |buf: Buf| {
                    let atoms = self.atoms.place(self.plan, buf, env);
                    let first = self.atoms.slot(atoms.tensor, atoms.slot).first;
                    atoms.atoms.iter().map(move |atom| (buf.of, buf.slot, atom - first))
                };
                all.then(reads.into_iter().flat_map(name), writes.into_iter().flat_map(name));
                continue;
            };
            let inner = self.of_block(*block, &bind(args, env, 0));
            // After the longest period every slot comes again.
            let different = args.iter().map(Arg::period).max().unwrap_or(1).min(*repeat);
            for i in 0..different {
                let name = |&(of, slot, atom): &Name| match of {
                    TensorRef::Tensor(_) => (of, slot, atom),
                    TensorRef::Formal(f) => (args[f as usize].of(), args[f as usize].slot(i) + slot, atom),
                };
                all.then(inner.reads.iter().map(name), inner.writes.iter().map(name));
            }
        }
        all
    }

    fn of_block(&mut self, block: BlockId, env: &[(TensorId, u32)]) -> Rc<Effect> {
        let key = (block, env.iter().map(|bound| bound.0).collect());
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let effect = Rc::new(self.of(&self.plan.blocks[block as usize].ops, env));
        self.known.insert(key, effect.clone());
        effect
    }
}

impl Effect {
    /// Adds ops that come next, which first read and then write.
    fn then(&mut self, reads: impl Iterator<Item = Name>, writes: impl Iterator<Item = Name>) {
        for name in reads {
            if !self.writes.contains(&name) {
                self.reads.insert(name);
            }
        }
        self.writes.extend(writes);
    }
}
