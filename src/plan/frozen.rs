//! A plan of fine-tuning that leaves the weights as they are, as LoRA does (arXiv:2106.09685): no gradient of a weight is
//! made, summed or kept, and there is no optimizer. Gradients of inputs stay, which those of the layers below are made of.
//! Adapters themselves are left out: with a rank of 8 to 64 they are a hundredth of the work.

use super::op::*;
use super::program::Plan;
use std::collections::BTreeSet;

impl Plan {
    /// The plan with every weight frozen. Gradients of parameters have no place in it any more.
    pub fn frozen(mut self) -> Plan {
        let gradients = Gradients::of(&self);
        let [weights, states] = [TensorKind::Param, TensorKind::OptState].map(|kind| Bound::to(&self, kind));
        let lines = self.blocks.len() + self.programs.len();
        for line in 0..lines {
            let ops = std::mem::take(self.line(line));
            *self.line(line) =
                without(ops, |of| gradients.all.has(line, of), |of| weights.has(line, of), |of| states.has(line, of));
        }
        // Products that only a sum of gradients read, and what was gathered for them, are idle now.
        while self.drop_idle() {}
        self
    }

    fn line(&mut self, line: usize) -> &mut Vec<Op> {
        let blocks = self.blocks.len();
        if line < blocks { &mut self.blocks[line].ops } else { &mut self.programs[line - blocks].ops }
    }

    /// Drops ops whose results are all workspace that nobody reads, and calls of blocks that have no ops left; returns
    /// whether there were any.
    fn drop_idle(&mut self) -> bool {
        let lines = self.blocks.len() + self.programs.len();
        let mut read: BTreeSet<TensorId> = BTreeSet::new();
        let mut empty = vec![];
        for line in 0..lines {
            let ops = self.line(line);
            let reads = ops.iter().flat_map(Op::reads).map(|buf| buf.of);
            let args = ops.iter().filter_map(|op| match &op.kind {
                OpKind::Call { args, .. } => Some(args.iter().map(Arg::of)),
                _ => None,
            });
            let tensors = reads.chain(args.flatten()).filter_map(|of| match of {
                TensorRef::Tensor(id) => Some(id),
                TensorRef::Formal(_) => None,
            });
            read.extend(tensors.collect::<Vec<_>>());
            empty.push(self.line(line).is_empty());
        }
        let passing: Vec<bool> =
            (self.tensors.iter()).map(|t| matches!(t.kind, TensorKind::Workspace | TensorKind::CommBuffer)).collect();
        let idle = |op: &Op| match &op.kind {
            OpKind::Call { block, .. } => empty[*block as usize],
            OpKind::Compute { .. } | OpKind::Collective { .. } => op.writes().all(|buf| match buf.of {
                TensorRef::Tensor(id) => passing[id as usize] && !read.contains(&id),
                TensorRef::Formal(_) => false,
            }),
            _ => false,
        };
        let mut any = false;
        for line in 0..lines {
            let ops = std::mem::take(self.line(line));
            let before = ops.len();
            let kept = renumbered(ops, |op| !idle(op));
            any |= kept.len() < before;
            *self.line(line) = kept;
        }
        any
    }
}

/// Tensors of the plan that are gradients of weights or sums of them, and formals of blocks that calls bind to these.
/// The plan says which tensors are its parameters' gradients and where their sums are kept; if one end of a sum over
/// ranks is such a tensor, so is the other.
struct Gradients {
    all: Bound,
    /// The formals that are marked because of a sum: whatever calls bind to them is marked as well.
    sums: Vec<BTreeSet<u32>>,
}

impl Gradients {
    fn of(plan: &Plan) -> Gradients {
        let loss = plan.feed.tokens().map(|inputs| inputs.loss);
        let all = plan.tensors.iter().enumerate();
        let kept = all.filter(|(_, t)| t.kind == TensorKind::Grad).map(|(id, _)| id as u32);
        let named = plan.params.iter().map(|param| param.grad);
        let shares = plan.masters.iter().map(|master| master.grad_share);
        let tensors = kept.chain(named).chain(shares).filter(|id| Some(*id) != loss).collect();
        let none = vec![BTreeSet::new(); plan.blocks.len()];
        let mut all = Gradients { all: Bound { tensors, formals: none.clone() }, sums: none };
        while all.spread(plan) {}
        all
    }

    /// Marks formals that calls bind to what is marked, both ends of sums, and what calls bind to these; returns
    /// whether any were new.
    fn spread(&mut self, plan: &Plan) -> bool {
        let mut any = false;
        let lines = plan.blocks.iter().map(|b| &b.ops).chain(plan.programs.iter().map(|p| &p.ops));
        for (line, op) in lines.enumerate().flat_map(|(line, ops)| ops.iter().map(move |op| (line, op))) {
            match &op.kind {
                OpKind::Call { block, args, .. } => {
                    for (formal, arg) in (0..).zip(args) {
                        if self.all.has(line, arg.of()) {
                            any |= self.all.formals[*block as usize].insert(formal);
                        }
                        if self.sums[*block as usize].contains(&formal) {
                            any |= self.mark(line, arg.of());
                        }
                    }
                }
                OpKind::Collective {
                    kind: CollectiveKind::AllReduce | CollectiveKind::ReduceScatter,
                    src,
                    dst,
                    ..
                } if self.all.has(line, src.of) || self.all.has(line, dst.of) => {
                    any |= self.mark(line, src.of);
                    any |= self.mark(line, dst.of);
                }
                _ => {}
            }
        }
        any
    }

    /// Marks an end of a sum; returns whether it was not marked yet.
    fn mark(&mut self, line: usize, of: TensorRef) -> bool {
        match of {
            TensorRef::Tensor(id) => self.all.tensors.insert(id),
            TensorRef::Formal(formal) => self.all.formals[line].insert(formal) | self.sums[line].insert(formal),
        }
    }
}

/// Some tensors, and the formals of blocks that calls bind to them.
struct Bound {
    tensors: BTreeSet<TensorId>,
    /// By block.
    formals: Vec<BTreeSet<u32>>,
}

impl Bound {
    /// Of all tensors of a kind.
    fn to(plan: &Plan, kind: TensorKind) -> Bound {
        let all = (0..).zip(&plan.tensors).filter(|(_, tensor)| tensor.kind == kind);
        let mut bound =
            Bound { tensors: all.map(|(id, _)| id).collect(), formals: vec![BTreeSet::new(); plan.blocks.len()] };
        let mut any = true;
        while std::mem::take(&mut any) {
            let lines = plan.blocks.iter().map(|b| &b.ops).chain(plan.programs.iter().map(|p| &p.ops));
            for (line, op) in lines.enumerate().flat_map(|(line, ops)| ops.iter().map(move |op| (line, op))) {
                let OpKind::Call { block, args, .. } = &op.kind else { continue };
                for (formal, _) in (0..).zip(args).filter(|(_, arg)| bound.has(line, arg.of())).collect::<Vec<_>>() {
                    any |= bound.formals[*block as usize].insert(formal);
                }
            }
        }
        bound
    }

    /// `line` counts the blocks, and behind them the programs.
    fn has(&self, line: usize, of: TensorRef) -> bool {
        match of {
            TensorRef::Tensor(id) => self.tensors.contains(&id),
            TensorRef::Formal(formal) => self.formals.get(line).is_some_and(|formals| formals.contains(&formal)),
        }
    }
}

/// The ops without those of gradients and of the optimizer, and without gradients among the operands of the others.
fn without(
    ops: Vec<Op>,
    gradient: impl Fn(TensorRef) -> bool,
    weight: impl Fn(TensorRef) -> bool,
    state: impl Fn(TensorRef) -> bool,
) -> Vec<Op> {
    let ops = ops.into_iter().map(|mut op| {
        if let OpKind::Compute { reads, writes, .. } = &mut op.kind {
            reads.retain(|buf| !gradient(buf.of));
            writes.retain(|buf| !gradient(buf.of));
        }
        op
    });
    let stays = |op: &Op| match &op.kind {
        // The optimizer, and copies of what it keeps.
        OpKind::Compute { reads, .. } if reads.iter().any(|buf| state(buf.of)) => false,
        OpKind::Compute { writes, .. } => !writes.is_empty(),
        // Weights that the optimizer wrote need not be gathered any more.
        OpKind::Collective { src, dst, .. } => !gradient(src.of) && !gradient(dst.of) && !weight(dst.of),
        OpKind::Copy { src, dst } => !gradient(src.of) && !gradient(dst.of) && !weight(dst.of),
        _ => true,
    };
    renumbered(ops.collect(), stays)
}

/// The ops that stay, with new numbers. An op that waited for one that is gone waits for what that one waited for.
fn renumbered(ops: Vec<Op>, stays: impl Fn(&Op) -> bool) -> Vec<Op> {
    let mut now: Vec<Vec<u32>> = Vec::with_capacity(ops.len());
    let mut kept: Vec<Op> = Vec::with_capacity(ops.len());
    for op in ops {
        let mut after: Vec<u32> = op.after.iter().flat_map(|earlier| now[*earlier as usize].clone()).collect();
        after.sort_unstable();
        after.dedup();
        if stays(&op) {
            let id = kept.len() as u32;
            now.push(vec![id]);
            kept.push(Op { id, after, ..op });
        } else {
            now.push(after);
        }
    }
    kept
}
