//! What stays the same when only sizes change: a number for the structure of a plan.
//!
//! Who lives when, what waits for what and who meets whom hang on which buffers ops name and in what order, not
//! on how long a sequence is. Plans of equal structure share what is computed from it.

use super::link::{AtomTable, bind, repeats_itself};
use super::op::*;
use super::program::Plan;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

/// 128 bits that tell structures apart: everything of a plan but the sizes of tensors, where rows are cut as long as the
/// cuts come in the same order, the shapes that kernels name, the degrees of the mesh, and how often a step goes through
/// microbatches that are all alike.
pub fn structure(plan: &Plan, atoms: &AtomTable) -> (u64, u64) {
    let mut h = Halves::default();
    let given = plan.feed.given();
    (plan.tensors.len(), plan.lanes.len(), plan.blocks.len(), plan.programs.len()).hash(&mut h);
    for (t, tensor) in (0..).zip(&plan.tensors) {
        // There is a slot of the inputs for every microbatch.
        let is_input = given.contains(&t);
        let slots = if is_input { 0 } else { tensor.slots };
        (slots, tensor.kind, tensor.host, atoms.per_slot(t), is_input, plan.feed.stays(t)).hash(&mut h);
    }
    plan.lanes.hash(&mut h);
    let bodies = plan.programs.iter().map(|p| &p.ops).chain(plan.blocks.iter().map(|b| &b.ops));
    for ops in bodies {
        ops.len().hash(&mut h);
        ops.iter().for_each(|op| hash_op(plan, &given, op, &mut h));
    }
    let mut rows = Rows { plan, atoms, seen: BTreeSet::new() };
    plan.programs.iter().for_each(|program| rows.hash(&program.ops, &[], &mut h));
    h.both()
}

/// The places of the rows that ops name among the cuts of the tensors they are bound to.
struct Rows<'p> {
    plan: &'p Plan,
    atoms: &'p AtomTable,
    /// Bodies that were gone through, each with the tensors that were bound.
    seen: BTreeSet<(BlockId, Vec<TensorId>)>,
}

impl Rows<'_> {
    fn hash(&mut self, ops: &[Op], env: &[(TensorId, u32)], h: &mut Halves) {
        for op in ops {
            if let OpKind::Call { block, args, .. } = &op.kind {
                let inner = bind(args, env, 0);
                let tensors: Vec<TensorId> = inner.iter().map(|bound| bound.0).collect();
                (op.id, block, &tensors).hash(h);
                if self.seen.insert((*block, tensors)) {
                    self.hash(&self.plan.blocks[*block as usize].ops, &inner, h);
                }
                continue;
            }
            let place = |buf: Buf| self.atoms.place(self.plan, buf, env);
            for at in op.reads().chain(op.writes()).filter(|buf| buf.rows.is_some()).map(place) {
                (op.id, at.atoms.first - self.atoms.slot(at.tensor, at.slot).first, at.atoms.count).hash(h);
            }
            // Whether the parts that an op writes make up a whole slot.
            for part in op.writes().filter(|buf| buf.rows.is_some()) {
                let same = op.writes().filter(|other| (other.of, other.slot) == (part.of, part.slot)).map(place);
                let written: u64 = same.map(|at| at.rows[1] - at.rows[0]).sum();
                (written == self.plan.tensors[place(part).tensor as usize].rows()).hash(h);
            }
        }
    }
}

/// Hashes a buffer without its rows.
fn hash_buf(buf: &Buf, h: &mut Halves) {
    (buf.of, buf.slot, buf.rows.is_some()).hash(h);
}

fn hash_bufs(bufs: &[Buf], h: &mut Halves) {
    bufs.len().hash(h);
    bufs.iter().for_each(|buf| hash_buf(buf, h));
}

fn hash_op(plan: &Plan, given: &[TensorId], op: &Op, h: &mut Halves) {
    (op.lane, &op.after).hash(h);
    std::mem::discriminant(&op.kind).hash(h);
    match &op.kind {
        OpKind::Compute { reads, writes, kernel } => {
            std::mem::discriminant(kernel).hash(h);
            [reads, writes].into_iter().for_each(|bufs| hash_bufs(bufs, h));
        }
        OpKind::Transfer { legs, engine } => {
            (legs.len(), engine).hash(h);
            for leg in legs {
                (leg.dir, leg.by, leg.tag).hash(h);
                hash_buf(&leg.buf, h);
            }
        }
        OpKind::Collective { kind, src, dst, wire, acc, engine } => {
            (kind, wire, acc, engine).hash(h);
            [src, dst].into_iter().for_each(|buf| hash_buf(buf, h));
        }
        OpKind::Exchange { src, dst, engine, .. } => {
            engine.hash(h);
            [src, dst].into_iter().for_each(|bufs| hash_bufs(bufs, h));
        }
        OpKind::Copy { src, dst } => [src, dst].into_iter().for_each(|buf| hash_buf(buf, h)),
        OpKind::Call { block, args, repeat } => {
            // More iterations of the same slots show nothing that three do not.
            let repeat = if repeats_itself(plan, op) { *repeat.min(&3) } else { *repeat };
            (block, args.len(), repeat).hash(h);
            args.iter().for_each(|arg| hash_arg(given, arg, h));
        }
    }
}

fn hash_arg(given: &[TensorId], arg: &Arg, h: &mut Halves) {
    match arg.of() {
        TensorRef::Tensor(t) if given.contains(&t) => t.hash(h),
        _ => arg.hash(h),
    }
}

/// Whether a program's call with these arguments is that of the microbatches that are all alike: one that walks over
/// the inputs `given`.
pub fn is_of_microbatches(given: &[TensorId], args: &[Arg]) -> bool {
    let walks = |arg: &Arg| arg.period() > 1 && matches!(arg.of(), TensorRef::Tensor(t) if given.contains(&t));
    args.iter().any(walks)
}

/// Two hashes in one pass, each value being gone through once.
#[derive(Clone, Copy, Default)]
pub(super) struct Halves([u64; 2]);

impl Halves {
    /// Notes a value, and where it ends and the next begins.
    pub(super) fn note(&mut self, what: &impl Hash) {
        what.hash(self);
        self.mix(0x9e37_79b9);
    }

    fn mix(&mut self, word: u64) {
        let [a, b] = self.0;
        self.0 = [
            a.wrapping_add(word).wrapping_mul(0xf135_7aea_2e62_a9c5).rotate_left(26),
            (b.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95),
        ];
    }

    pub(super) fn both(self) -> (u64, u64) {
        (self.0[0], self.0[1])
    }
}

impl Hasher for Halves {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.mix(u64::from(n));
    }

    fn write_u16(&mut self, n: u16) {
        self.mix(u64::from(n));
    }

    fn write_u32(&mut self, n: u32) {
        self.mix(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        self.mix(n);
    }

    fn write_usize(&mut self, n: usize) {
        self.mix(n as u64);
    }

    fn finish(&self) -> u64 {
        self.0[0]
    }
}
