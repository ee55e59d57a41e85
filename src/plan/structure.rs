//! What stays the same when only sizes change: a number for the structure of a plan.
//!
//! Who lives when, what waits for what and who meets whom hang on which buffers ops name and in what order, not
//! on how long a sequence is. Plans of equal structure share what is computed from it.

use super::link::{AtomTable, repeats_itself};
use super::op::*;
use super::program::Plan;
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};

/// 128 bits that tell structures apart: everything of a plan but the sizes of uncut tensors, the shapes that
/// kernels name, the degrees of the mesh, and how often a step goes through microbatches that are all alike.
pub fn structure(plan: &Plan, atoms: &AtomTable) -> (u64, u64) {
    let half = |seed: u64| {
        let mut h = FxHasher::default();
        seed.hash(&mut h);
        hash_into(plan, atoms, &mut h);
        h.finish()
    };
    (half(0x9e37_79b9_7f4a_7c15), half(0xc2b2_ae3d_27d4_eb4f))
}

fn hash_into(plan: &Plan, atoms: &AtomTable, h: &mut FxHasher) {
    let given = plan.feed.given();
    (plan.tensors.len(), plan.lanes.len(), plan.blocks.len(), plan.programs.len()).hash(h);
    for (t, tensor) in (0..).zip(&plan.tensors) {
        // There is a slot of the inputs for every microbatch.
        let is_input = given.contains(&t);
        let slots = if is_input { 0 } else { tensor.slots };
        let cuts = Some(atoms.cuts(t)).filter(|cuts| cuts.len() > 2);
        (slots, tensor.kind, cuts, is_input, plan.feed.stays(t)).hash(h);
    }
    plan.lanes.hash(h);
    let bodies = plan.programs.iter().map(|p| &p.ops).chain(plan.blocks.iter().map(|b| &b.ops));
    for ops in bodies {
        ops.len().hash(h);
        ops.iter().for_each(|op| hash_op(plan, &given, op, h));
    }
}

fn hash_op(plan: &Plan, given: &[TensorId], op: &Op, h: &mut FxHasher) {
    (op.lane, &op.after).hash(h);
    std::mem::discriminant(&op.kind).hash(h);
    match &op.kind {
        OpKind::Compute { reads, writes, kernel } => (reads, writes, std::mem::discriminant(kernel)).hash(h),
        OpKind::Transfer { legs, engine } => (legs, engine).hash(h),
        OpKind::Collective { kind, src, dst, wire, acc, engine } => (kind, src, dst, wire, acc, engine).hash(h),
        OpKind::Call { block, args, repeat } => {
            // More iterations of the same show nothing that three do not.
            let repeat = if repeats_itself(plan, op) { *repeat.min(&3) } else { *repeat };
            (block, args.len(), repeat).hash(h);
            args.iter().for_each(|arg| hash_arg(given, arg, h));
        }
    }
}

fn hash_arg(given: &[TensorId], arg: &Arg, h: &mut FxHasher) {
    match arg.of() {
        TensorRef::Tensor(t) if given.contains(&t) => t.hash(h),
        _ => arg.hash(h),
    }
}
