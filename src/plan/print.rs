//! The notes of a builder that keeps only sizes, about everything that it does not keep.

use super::op::*;
use super::program::Plan;
use super::structure::{Halves, is_of_microbatches};

/// Notes of a plan of sizes, which has every tensor and every op, but no names, and kernels without their buffers.
///
/// Every block has notes of its own. A call is noted by the notes of the block that it calls, so that the order in
/// which blocks were written does not matter.
#[derive(Clone, Default)]
pub struct Print {
    /// Notes of the blocks that are closed, by block; and of those still open, by depth.
    closed: Vec<Body>,
    open: Vec<Body>,
    /// Tensors some rows of which are named.
    cut: Vec<TensorId>,
}

/// Notes of a block, or of the program, without its calls.
#[derive(Clone, Copy, Default)]
struct Body {
    halves: Halves,
    /// Formals some rows of which are named, a bit each.
    named: u64,
}

/// Numbers for the structure of a plan of sizes. Where two such plans have one of them in common, that part of their
/// structure is equal, if strategies, degrees and model are equal as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prints {
    /// The number of the whole structure. With more than three microbatches that are alike, it is that of three.
    pub whole: (u64, u64),
    /// The number of the structure without how many microbatches are alike.
    pub uncounted: (u64, u64),
    /// The number of the structure without the call of the microbatches that are alike, and without what is only called
    /// there.
    pub rest: (u64, u64),
}

impl Print {
    fn body(&mut self, depth: usize) -> &mut Body {
        self.open.resize(self.open.len().max(depth), Body::default());
        &mut self.open[depth - 1]
    }

    fn rows(&mut self, depth: usize, buf: &Buf) {
        match (buf.rows, buf.of) {
            (None, _) => {}
            (_, TensorRef::Tensor(id)) => self.cut.push(id),
            (_, TensorRef::Formal(f)) => self.body(depth).named |= 1 << f.min(63),
        }
    }

    /// Notes the buffers of a kernel in a block `depth` deep.
    pub fn bufs(&mut self, depth: usize, reads: &[Buf], writes: &[Buf]) {
        self.body(depth).halves.note(&(reads, writes));
        reads.iter().chain(writes).for_each(|buf| self.rows(depth, buf));
    }

    pub fn op(&mut self, depth: usize, lane: Option<u16>, kind: &OpKind) {
        let halves = &mut self.body(depth).halves;
        if !matches!(kind, OpKind::Call { .. }) {
            halves.note(&(lane, std::mem::discriminant(kind)));
        }
        match kind {
            OpKind::Compute { kernel, .. } => halves.note(&(std::mem::discriminant(kernel), kernel.calls())),
            OpKind::Transfer { legs, engine } => {
                halves.note(&(legs, engine));
                legs.iter().for_each(|leg| self.rows(depth, &leg.buf));
            }
            OpKind::Collective { kind, src, dst, wire, acc, engine } => {
                halves.note(&(kind, src, dst, wire, acc, engine));
                [src, dst].into_iter().for_each(|buf| self.rows(depth, buf));
            }
            OpKind::Exchange { src, dst, engine, .. } => {
                halves.note(&(src, dst, engine));
                src.iter().chain(dst).for_each(|buf| self.rows(depth, buf));
            }
            OpKind::Copy { src, dst } => {
                halves.note(&(src, dst));
                [src, dst].into_iter().for_each(|buf| self.rows(depth, buf));
            }
            // Calls are noted when the whole plan is built: a tensor that one binds may be an input, of which there are
            // more or fewer slots.
            OpKind::Call { .. } => {}
        }
    }

    /// Notes an edge, or the lane of an op, in a block `depth` deep.
    pub fn after(&mut self, depth: usize, op: u32, earlier: u32) {
        self.body(depth).halves.note(&(op, earlier));
    }

    /// Notes a block of the ops of two others; the formals of the second stand behind the `formals` of the first.
    pub fn braid(&mut self, both: [BlockId; 2], formals: usize) {
        let [first, second] = both.map(|block| self.closed[block as usize]);
        let moved = (0..64).filter(|f| second.named & (1 << f) != 0).map(|f: usize| 1 << (f + formals).min(63));
        let mut body = Body { halves: first.halves, named: moved.fold(first.named, |all, bit: u64| all | bit) };
        body.halves.note(&("braid", second.halves.both(), formals));
        self.closed.push(body);
    }

    /// Closes the notes of the block `depth` deep.
    pub fn close(&mut self, depth: usize) {
        let body = std::mem::take(self.body(depth));
        self.closed.push(body);
    }

    /// The numbers for the structure of `plan`, the plan of sizes that was built.
    pub fn of(mut self, plan: &Plan) -> Prints {
        let given = plan.feed.given();
        let mut blocks = Vec::with_capacity(plan.blocks.len());
        for (at, block) in plan.blocks.iter().enumerate() {
            let mut halves = self.closed[at].halves;
            self.closed[at].named |= self.calls(&block.ops, &given, &blocks, &mut [&mut halves]);
            blocks.push(halves.both());
        }
        let [mut whole, mut uncounted, mut rest] = [self.body(1).halves; 3];
        for program in &plan.programs {
            self.calls(&program.ops, &given, &blocks, &mut [&mut whole, &mut uncounted, &mut rest]);
        }
        let sizes = self.sizes(plan, &given).both();
        let [whole, uncounted, rest] = [whole, uncounted, rest].map(|mut halves| {
            halves.note(&sizes);
            halves.both()
        });
        Prints { whole, uncounted, rest }
    }

    /// The notes of tensors, lanes and meshes.
    fn sizes(&self, plan: &Plan, given: &[TensorId]) -> Halves {
        let mut halves = Halves::default();
        for (t, tensor) in (0..).zip(&plan.tensors) {
            let is_input = given.contains(&t);
            let rows = self.cut.contains(&t).then(|| tensor.rows());
            let slots = if is_input { 0 } else { tensor.slots };
            halves.note(&(slots, tensor.kind, tensor.host, tensor.dtype, rows, is_input));
        }
        halves.note(&(&plan.lanes, &plan.views.len()));
        plan.views.iter().for_each(|view| view.axes.iter().for_each(|axis| halves.note(axis)));
        halves
    }

    /// Notes the calls of a body. `blocks`: the numbers of the blocks it may call. `into`: the notes of everything and,
    /// for a program, those without how often microbatches repeat, and those without their call. Returns the formals of
    /// the body of which rows are named inside calls, a bit each.
    fn calls(&mut self, ops: &[Op], given: &[TensorId], blocks: &[(u64, u64)], into: &mut [&mut Halves]) -> u64 {
        let (mut formals, mut left_out) = (0, 0);
        for op in ops {
            let OpKind::Call { block, args, repeat } = &op.kind else { continue };
            let of_microbatches = into.len() > 1 && is_of_microbatches(given, args);
            for (n, halves) in into.iter_mut().enumerate() {
                let (id, repeat) = match n {
                    0 if of_microbatches => (op.id, *repeat.min(&3)),
                    1 if of_microbatches => (op.id, 0),
                    2 if of_microbatches => continue,
                    2 => (op.id - left_out, *repeat),
                    _ => (op.id, *repeat),
                };
                halves.note(&(id, blocks[*block as usize], repeat));
                for arg in args {
                    match arg.of() {
                        TensorRef::Tensor(t) if given.contains(&t) => halves.note(&arg.of()),
                        _ => halves.note(arg),
                    }
                }
            }
            left_out += u32::from(of_microbatches);
            for (formal, arg) in args.iter().enumerate() {
                if self.closed[*block as usize].named & (1 << formal.min(63)) != 0 {
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
