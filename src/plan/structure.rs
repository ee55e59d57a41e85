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

/// Where the rows that ops name lie among the cuts of what they are bound to.
struct Rows<'p> {
    plan: &'p Plan,
    atoms: &'p AtomTable,
    /// Bodies with the tensors that were bound.
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
            // Whether parts that it writes make up the whole.
            for part in op.writes().filter(|buf| buf.rows.is_some()) {
                let same = op.writes().filter(|other| (other.of, other.slot) == (part.of, part.slot)).map(place);
                let written: u64 = same.map(|at| at.rows[1] - at.rows[0]).sum();
                (written == self.plan.tensors[place(part).tensor as usize].rows()).hash(h);
            }
        }
    }
}

/// A buffer but for its rows.
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
            // More iterations of the same show nothing that three do not.
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

/// Two hashes in one pass: what is noted is gone through once.
#[derive(Clone, Copy, Default)]
struct Halves([u64; 2]);

impl Halves {
    fn mix(&mut self, word: u64) {
        let [a, b] = self.0;
        self.0 = [
            a.wrapping_add(word).wrapping_mul(0xf135_7aea_2e62_a9c5).rotate_left(26),
            (b.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95),
        ];
    }

    fn both(self) -> (u64, u64) {
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

/// What a builder that keeps only sizes notes of all the rest, while it goes.
///
/// A plan of sizes has every tensor and every op, but no names, and kernels without their buffers. Equal prints
/// of two such plans mean equal structure, if strategies, degrees and model are the same as well.
#[derive(Clone, Default)]
pub struct Print {
    halves: Halves,
    /// By block that is closed, then by depth of those still open: formals of which rows are named.
    closed: Vec<u64>,
    open: Vec<u64>,
    /// Tensors of which rows are named.
    cut: Vec<TensorId>,
}

impl Print {
    fn note(&mut self, what: &impl Hash) {
        what.hash(&mut self.halves);
        // Where one thing ends and the next begins.
        self.halves.mix(0x9e37_79b9);
    }

    fn rows(&mut self, depth: usize, buf: &Buf) {
        match (buf.rows, buf.of) {
            (None, _) => {}
            (_, TensorRef::Tensor(id)) => self.cut.push(id),
            (_, TensorRef::Formal(f)) => {
                self.open.resize(self.open.len().max(depth), 0);
                self.open[depth - 1] |= 1 << f.min(63);
            }
        }
    }

    /// The buffers of a kernel in a block `depth` deep.
    pub fn bufs(&mut self, depth: usize, reads: &[Buf], writes: &[Buf]) {
        self.note(&(reads, writes));
        reads.iter().chain(writes).for_each(|buf| self.rows(depth, buf));
    }

    pub fn op(&mut self, depth: usize, lane: Option<u16>, kind: &OpKind) {
        self.note(&(lane, depth, std::mem::discriminant(kind)));
        match kind {
            OpKind::Compute { kernel, .. } => self.note(&std::mem::discriminant(kernel)),
            OpKind::Transfer { legs, engine } => {
                self.note(&(legs, engine));
                legs.iter().for_each(|leg| self.rows(depth, &leg.buf));
            }
            OpKind::Collective { kind, src, dst, wire, acc, engine } => {
                self.note(&(kind, src, dst, wire, acc, engine));
                [src, dst].into_iter().for_each(|buf| self.rows(depth, buf));
            }
            OpKind::Exchange { src, dst, engine, .. } => {
                self.note(&(src, dst, engine));
                src.iter().chain(dst).for_each(|buf| self.rows(depth, buf));
            }
            OpKind::Copy { src, dst } => {
                self.note(&(src, dst));
                [src, dst].into_iter().for_each(|buf| self.rows(depth, buf));
            }
            // When all is built: what it binds may be an input, of which there are more or fewer slots.
            OpKind::Call { .. } => {}
        }
    }

    pub fn after(&mut self, op: u32, earlier: u32) {
        self.note(&(op, earlier));
    }

    /// A block of the ops of two others, the formals of the second behind the `formals` of the first.
    pub fn braid(&mut self, [a, b]: [BlockId; 2], formals: usize) {
        self.note(&("braid", a, b, formals));
        let [first, second] = [a, b].map(|block| self.closed[block as usize]);
        let moved = (0..64).filter(|f| second & (1 << f) != 0).map(|f: usize| 1 << (f + formals).min(63));
        self.closed.push(moved.fold(first, |all, bit: u64| all | bit));
    }

    /// A block `depth` deep is closed.
    pub fn close(&mut self, depth: usize) {
        self.note(&("close", depth));
        self.closed.push(self.open.get_mut(depth - 1).map_or(0, std::mem::take));
    }

    /// The structure of `plan`, the plan of sizes that was built.
    pub fn of(mut self, plan: &Plan) -> (u64, u64) {
        let given = plan.feed.given();
        for (at, block) in plan.blocks.iter().enumerate() {
            let named = self.calls(&block.ops, &given);
            self.closed[at] |= named;
        }
        for program in &plan.programs {
            self.calls(&program.ops, &given);
        }
        for (t, tensor) in (0..).zip(&plan.tensors) {
            let is_input = given.contains(&t);
            let rows = self.cut.contains(&t).then(|| tensor.rows());
            let slots = if is_input { 0 } else { tensor.slots };
            self.note(&(slots, tensor.kind, tensor.host, tensor.dtype, rows, is_input));
        }
        self.note(&(&plan.lanes, &plan.views.len()));
        plan.views.iter().for_each(|view| view.axes.iter().for_each(|axis| self.note(axis)));
        self.halves.both()
    }

    /// Notes the calls of a body. Returns the formals of the body of which rows are named inside calls.
    fn calls(&mut self, ops: &[Op], given: &[TensorId]) -> u64 {
        let mut formals = 0;
        for op in ops {
            let OpKind::Call { block, args, repeat } = &op.kind else { continue };
            let is_input = |arg: &Arg| matches!(arg.of(), TensorRef::Tensor(t) if given.contains(&t));
            // More microbatches of the same show nothing that three do not.
            let inputs = args.iter().any(is_input);
            self.note(&(op.id, block, if inputs { *repeat.min(&3) } else { *repeat }));
            for (formal, arg) in args.iter().enumerate() {
                match is_input(arg) {
                    true => self.note(&arg.of()),
                    false => self.note(arg),
                }
                if self.closed[*block as usize] & (1 << formal.min(63)) != 0 {
                    match arg.of() {
                        TensorRef::Tensor(id) => self.cut.push(id),
                        TensorRef::Formal(f) => formals |= 1 << f.min(63),
                    }
                }
            }
        }
        formals
    }
}
