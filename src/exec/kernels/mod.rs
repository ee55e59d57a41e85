//! Every kernel on the CPU, generic over the element type.
//!
//! One call is one kernel on one rank, on one thread: ranks are what runs in parallel. Shapes and the
//! order of operands are those of [`Kernel`]; rows are tokens, b * len + position in the rank's order.

mod attention;
mod attention_bwd;
pub(in crate::exec) mod exchange;
pub mod expert;
pub mod fp8;
mod gemm;
mod head_norm;
mod latent;
mod layer_norm;
mod loss;
pub(in crate::exec) mod mask;
mod muon;
mod norm;
mod pointwise;
pub(in crate::exec) mod reorder;
mod rope;
mod scalar;
mod shapes;
mod sparse;
pub(in crate::exec) mod ssm;
#[cfg(test)]
mod testing;
mod unfused;
#[cfg(test)]
mod whole;

pub use scalar::Scalar;

use crate::plan::expert::{ExpertKernel, ExpertOp, Pass};
use crate::plan::foreach::ForeachKernel;
use crate::plan::kernel::SsmOp;
use crate::plan::muon::MuonKernel;
use crate::plan::sparse::{HeadProduct, Product, SparseKernel};
use crate::plan::{Adam, Kernel, Mesh, Plan, ScoreStep, Segs, Side, dropout};
use crate::spec::{Documents, Turning};

/// Runs `kernel` as `rank` does, in optimizer step `step`, counted from 1.
///
/// `reads[i]` is None where operand i is the very same buffer as one of the writes, which then holds the
/// old values. Only the operands a kernel accumulates into may be so.
///
/// # Panics
/// Where the operands are not those the kernel's documentation lists: the plan is unsound.
pub fn run<T: Scalar>(
    kernel: &Kernel,
    views: &[Mesh],
    rank: u32,
    step: u64,
    reads: &[Option<&[T]>],
    writes: &mut [&mut [T]],
) {
    begin(kernel, views, reads, writes);
    let call = Call { kernel, views, rank, reads };
    let read = |i| call.read(i);
    match kernel {
        &Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8, bias } => {
            let [c] = outputs(writes);
            let product = if fp8 { gemm::matmul_fp8 } else { gemm::matmul };
            product([m, n, k].map(|x| x as usize), [a_t, b_t], accumulate, read(0), read(1), c);
            if bias {
                pointwise::add_rows(n as usize, read(reads.len() - 1), c);
            }
        }
        Kernel::BiasBwd { .. }
        | Kernel::Residual { .. }
        | Kernel::DropoutBwd { .. }
        | Kernel::Gelu { .. }
        | Kernel::GeluBwd { .. }
        | Kernel::Relu2 { .. }
        | Kernel::Relu2Bwd { .. }
        | Kernel::SwiGlu { .. }
        | Kernel::SwiGluBwd { .. }
        | Kernel::Cast { .. }
        | Kernel::Quantise { .. }
        | Kernel::Dequantise { .. }
        | Kernel::Add { .. }
        | Kernel::Fill { .. } => call.pointwise(writes),
        Kernel::LayerNorm { .. }
        | Kernel::LayerNormBwd { .. }
        | Kernel::Norm { .. }
        | Kernel::NormBwd { .. }
        | Kernel::HeadNorm { .. }
        | Kernel::HeadNormBwd { .. }
        | Kernel::LatentNorm { .. }
        | Kernel::LatentNormBwd { .. } => call.norms(writes),
        Kernel::LatentRope { .. } | Kernel::Rope { .. } | Kernel::Positions { .. } => call.positions(writes),
        Kernel::Attention(_)
        | Kernel::Unfused { .. }
        | Kernel::AttentionOnto(_)
        | Kernel::AddLse(_)
        | Kernel::AddWeighted(_)
        | Kernel::AttentionDelta { .. }
        | Kernel::AttentionBwd(_)
        | Kernel::AttentionBwdOnto(..)
        | Kernel::MergeLse(_) => call.attention(writes),
        Kernel::Embed { .. }
        | Kernel::EmbedBwd { .. }
        | Kernel::VocabStats(_)
        | Kernel::VocabCrossEntropy { .. }
        | Kernel::CrossEntropy { .. }
        | Kernel::LogSoftmax { .. }
        | Kernel::Nll { .. }
        | Kernel::LogSoftmaxBwd { .. } => call.vocabulary(writes),
        Kernel::Ssm(kernel) => ssm::run(kernel, views, rank, reads, writes),
        Kernel::Muon(kernel) => muon::run(kernel, (views, rank, step), reads, writes),
        Kernel::Sparse(kernel) => sparse::run(kernel, views, rank, reads, writes),
        Kernel::Permute(_) | Kernel::Reorder { .. } | Kernel::OwnRows { .. } => call.rows(writes),
        // Ops run where they stand: what this waits for is over.
        Kernel::Wait { .. } => {}
        Kernel::Expert(_) => panic!("{}: a route says which rows it has", kernel.name()),
        Kernel::Adam { .. } | Kernel::Foreach(_) => call.adam(step, writes),
    }
}

/// Runs a kernel whose rows a route of the plan lists, or any other.
pub fn run_routed<T: Scalar>(
    kernel: &Kernel,
    plan: &Plan,
    (rank, step): (u32, u64),
    reads: &[Option<&[T]>],
    writes: &mut [&mut [T]],
) {
    let Some(routed) = kernel.routed() else { return run(kernel, &plan.views, rank, step, reads, writes) };
    begin(kernel, &plan.views, reads, writes);
    expert::run(routed, plan.route_of(routed.route, rank), &plan.views, rank, reads, writes);
}

/// Sees that the operands are those of the kernel, and lets what it accumulates into start as it was read.
fn begin<T: Scalar>(kernel: &Kernel, views: &[Mesh], reads: &[Option<&[T]>], writes: &mut [&mut [T]]) {
    shapes::check(kernel, views, reads, writes);
    for &(from, to) in in_place(kernel) {
        if let Some(old) = reads[from] {
            writes[to].copy_from_slice(old);
        }
    }
}

/// A kernel as one rank runs it, but for what it writes.
struct Call<'a, T> {
    kernel: &'a Kernel,
    views: &'a [Mesh],
    rank: u32,
    reads: &'a [Option<&'a [T]>],
}

/// Kernels by families; [`run`] says which is whose.
impl<'a, T: Scalar> Call<'a, T> {
    fn read(&self, i: usize) -> &'a [T] {
        self.reads[i].unwrap_or_else(|| panic!("{}: operand {i} cannot be one of its results", self.kernel.name()))
    }

    /// Adam, in one kernel or operation by operation, in optimizer step `step`.
    fn adam(&self, step: u64, writes: &mut [&mut [T]]) {
        let read = |i| self.read(i);
        match self.kernel {
            &Kernel::Adam { lr, beta1, beta2, eps, weight_decay, .. } => {
                let (state, cast) = writes.split_at_mut(3);
                let [w, m, v] = outputs(state);
                let adam = Adam { lr, beta1, beta2, eps, weight_decay };
                pointwise::adam(&adam, step, read(0), [w, m, v]);
                if let [cast] = cast {
                    cast.copy_from_slice(w);
                }
            }
            Kernel::Foreach(ForeachKernel::Moments { adam, .. }) => {
                let [m, v, d] = outputs(writes);
                pointwise::adam_moments(adam, step, read(0), [m, v, d]);
            }
            Kernel::Foreach(ForeachKernel::Move { adam, .. }) => {
                let (w, cast) = writes.split_at_mut(1);
                pointwise::adam_move(adam, step, [read(1), read(2)], &mut *w[0]);
                if let [cast] = cast {
                    cast.copy_from_slice(w[0]);
                }
            }
            other => unreachable!("{}: no Adam", other.name()),
        }
    }

    /// Kernels that make each element, or each row, by itself.
    fn pointwise(&self, writes: &mut [&mut [T]]) {
        let &Call { kernel, views, rank, reads } = self;
        let read = |i| self.read(i);
        match kernel {
            &Kernel::BiasBwd { cols, .. } => {
                let [db] = outputs(writes);
                pointwise::bias_bwd(cols as usize, read(0), db);
            }
            Kernel::Residual { rows, cols, dropout, .. } => {
                let (y, stays) = writes.split_at_mut(1);
                let y = &mut *y[0];
                y.copy_from_slice(read(1));
                (2..reads.len()).for_each(|i| pointwise::add_rows(*cols as usize, read(i), y));
                if let (Some(d), [stays]) = (dropout, stays) {
                    pointwise::drop_some(d, &d.positions(views, rank, *rows), *cols as usize, y, stays);
                }
                pointwise::add(None, [Some(read(0)), None], y);
            }
            &Kernel::DropoutBwd { probability, .. } => {
                let [dx] = outputs(writes);
                pointwise::dropout_bwd(probability, read(0), read(1), dx);
            }
            Kernel::Gelu { .. } => {
                let [y] = outputs(writes);
                pointwise::gelu(read(0), y);
            }
            Kernel::GeluBwd { .. } => {
                let [dx] = outputs(writes);
                pointwise::gelu_bwd(read(0), read(1), dx);
            }
            Kernel::Relu2 { .. } => {
                let [y] = outputs(writes);
                pointwise::relu2(read(0), y);
            }
            Kernel::Relu2Bwd { .. } => {
                let [dx] = outputs(writes);
                pointwise::relu2_bwd(read(0), read(1), dx);
            }
            &Kernel::SwiGlu { cols, .. } => {
                let [y] = outputs(writes);
                pointwise::swiglu(cols as usize, read(0), y);
            }
            &Kernel::SwiGluBwd { cols, .. } => {
                let [dx] = outputs(writes);
                pointwise::swiglu_bwd(cols as usize, read(0), read(1), dx);
            }
            Kernel::Cast { .. } => {
                let [y] = outputs(writes);
                y.copy_from_slice(read(0));
            }
            &Kernel::Quantise { cols, .. } => {
                let [codes, scales] = outputs(writes);
                fp8::encode(read(0), cols as usize, codes, scales);
            }
            &Kernel::Dequantise { cols, .. } => {
                let [x] = outputs(writes);
                x.copy_from_slice(&fp8::decoded(read(0), read(1), cols as usize));
            }
            Kernel::Add { trim, .. } => {
                let [sum] = outputs(writes);
                let trim = trim.as_ref().map(|(block, side)| pointwise::Trim::new(block, *side, views, rank));
                pointwise::add(trim, [reads[0], reads[1]], sum);
            }
            Kernel::Fill { .. } => {
                let [x] = outputs(writes);
                x.fill(T::zero());
            }
            other => unreachable!("{} is not pointwise", other.name()),
        }
    }

    /// RMS and layer norms, of whole rows and of parts of them.
    fn norms(&self, writes: &mut [&mut [T]]) {
        let read = |i| self.read(i);
        match self.kernel {
            &Kernel::LayerNorm { cols, eps, .. } => {
                let [y] = outputs(writes);
                layer_norm::forward(cols as usize, eps, read(0), read(1), y);
            }
            &Kernel::LayerNormBwd { cols, eps, .. } => {
                let [dx, dw] = outputs(writes);
                layer_norm::backward(cols as usize, eps, [0, 1, 2].map(read), dx, dw);
            }
            &Kernel::Norm { cols, eps, .. } => {
                let [y] = outputs(writes);
                norm::forward(cols as usize, eps, read(0), read(1), y);
            }
            &Kernel::NormBwd { cols, eps, .. } => {
                let [dx, dw] = outputs(writes);
                norm::backward(cols as usize, eps, [0, 1, 2].map(read), dx, dw);
            }
            &Kernel::HeadNorm { heads, kv_heads, head_dim, eps, .. } => {
                let [qkv, before] = outputs(writes);
                let heads = head_norm::Heads::new([heads, kv_heads, head_dim], eps);
                heads.forward(read(1), qkv, before);
            }
            &Kernel::HeadNormBwd { heads, kv_heads, head_dim, eps, .. } => {
                let [d_qkv, dw] = outputs(writes);
                let heads = head_norm::Heads::new([heads, kv_heads, head_dim], eps);
                heads.backward([read(1), read(2)], d_qkv, dw);
            }
            &Kernel::LatentNorm { cols, rest, eps, .. } => {
                let (y, behind) = writes.split_at_mut(1);
                let behind: &mut [T] = behind.first_mut().map_or(&mut [], |behind| behind);
                latent::norm_forward([cols, cols + rest].map(|n| n as usize), eps, read(0), read(1), y[0], behind);
            }
            &Kernel::LatentNormBwd { cols, rest, eps, .. } => {
                let [dx, dw] = outputs(writes);
                let behind = if rest > 0 { read(4) } else { &[] };
                let reads = [read(0), read(1), read(3), behind];
                latent::norm_backward([cols, cols + rest].map(|n| n as usize), eps, reads, dx, dw);
            }
            other => unreachable!("{} is no norm", other.name()),
        }
    }

    /// Kernels that tell positions apart: turned queries and keys, and rows of positions that are added.
    fn positions(&self, writes: &mut [&mut [T]]) {
        let &Call { kernel, views, rank, .. } = self;
        let read = |i| self.read(i);
        match kernel {
            Kernel::LatentRope { segs, documents, heads, nope, rope, v, theta, backward, scaling, .. } => {
                let positions = turned(segs, documents, views, rank);
                let sizes = [heads, nope, rope, v].map(|n| *n as usize);
                let turning = Turning::new(*theta, scaling.as_ref(), *rope, documents.longest(segs.seq));
                let latent = latent::Heads::new(&positions, sizes, &turning);
                if *backward {
                    let [d_q, d_kv, d_k] = outputs(writes);
                    latent.backward([read(0), read(1)], d_q, d_kv, d_k);
                } else {
                    let [q, kv] = outputs(writes);
                    latent.forward([0, 1, 2].map(read), q, kv);
                }
            }
            Kernel::Rope { segs, documents, heads, kv_heads, head_dim, theta, backward, rotary, scaling, .. } => {
                let rotary = rotary.unwrap_or(*head_dim);
                let turning = Turning::new(*theta, scaling.as_ref(), rotary, documents.longest(segs.seq));
                let [heads, kv_heads, head_dim] = [heads, kv_heads, head_dim].map(|x| *x as usize);
                let positions = turned(segs, documents, views, rank);
                let rope = rope::Rope::new(&positions, [heads, kv_heads, head_dim], &turning);
                if *backward {
                    let [dqkv] = outputs(writes);
                    rope.backward(read(0), read(1), dqkv);
                } else {
                    let [q, kv] = outputs(writes);
                    rope.forward(read(0), q, kv);
                }
            }
            Kernel::Positions { segs, rows, cols, share, backward, .. } => {
                let positions = dropout::positions(segs, *share, views, rank, *rows);
                let at = loss::Places { positions, cols: *cols as usize };
                let [out] = outputs(writes);
                if *backward { at.backward(read(0), out) } else { at.forward(read(1), out) }
            }
            other => unreachable!("{} is not of positions", other.name()),
        }
    }

    /// Kernels of attention: its blocks, and how their results are joined.
    fn attention(&self, writes: &mut [&mut [T]]) {
        let &Call { kernel, views, rank, reads } = self;
        let read = |i| self.read(i);
        match kernel {
            Kernel::Attention(block) => {
                let [o, lse] = outputs(writes);
                attention::forward(block, views, rank, [read(0), read(1)], o, lse, false);
            }
            Kernel::Unfused { block, step } => {
                let matrices = unfused::Matrices::new(block, views, rank);
                let reads: Vec<&[T]> = match step {
                    // Its second operand may be its result.
                    ScoreStep::SoftmaxBwd => vec![read(0)],
                    _ => (0..reads.len()).map(read).collect(),
                };
                matrices.run(step, &reads, writes);
            }
            Kernel::AttentionOnto(block) => {
                let [o, lse] = outputs(writes);
                attention::forward(block, views, rank, [read(0), read(1)], o, lse, true);
            }
            Kernel::AddLse(block) => {
                let [lse] = outputs(writes);
                attention::add_lse(block, views, rank, read(1), lse);
            }
            Kernel::AddWeighted(block) => {
                let [o] = outputs(writes);
                attention::add_weighted(block, views, rank, [1, 2, 3].map(read), o);
            }
            &Kernel::AttentionDelta { head_dim, .. } => {
                let [delta] = outputs(writes);
                attention_bwd::delta(head_dim as usize, read(0), read(1), delta);
            }
            Kernel::AttentionBwd(block) => {
                let [dq, dkv] = outputs(writes);
                attention_bwd::backward(block, views, rank, [0, 1, 2, 3, 4].map(read), dq, dkv, None);
            }
            Kernel::AttentionBwdOnto(block, onto) => {
                let [dq, dkv] = outputs(writes);
                attention_bwd::backward(block, views, rank, [0, 1, 2, 3, 4].map(read), dq, dkv, Some(*onto));
            }
            Kernel::MergeLse(block) => {
                let [o, lse] = outputs(writes);
                attention::merge(block, views, rank, [read(2), read(3)], o, lse);
            }
            other => unreachable!("{} is no attention", other.name()),
        }
    }

    /// Kernels that put rows, or parts of them, in other places.
    fn rows(&self, writes: &mut [&mut [T]]) {
        let &Call { kernel, views, rank, reads } = self;
        let read = |i| self.read(i);
        match kernel {
            Kernel::Permute(permute) => {
                let reads: Vec<&[T]> = (0..reads.len()).map(read).collect();
                exchange::Layout::new(permute, views, rank).permute(&reads, writes);
            }
            Kernel::Reorder { segs, batch, cols, inverse } => {
                let [y] = outputs(writes);
                let pieces = reorder::Pieces::new(segs, views, rank, *batch as usize, *cols as usize);
                if *inverse { pieces.cut(read(0), y) } else { pieces.join(read(0), y) }
            }
            Kernel::OwnRows { rows, cols, group, .. } => {
                let [y] = outputs(writes);
                let here = group.place(views, rank) as usize * (rows * cols) as usize;
                y.copy_from_slice(&read(0)[here..][..(rows * cols) as usize]);
            }
            other => unreachable!("{} puts nothing elsewhere", other.name()),
        }
    }

    /// Kernels at the ends of the model: from ids of tokens to rows, and from rows of logits to a loss.
    fn vocabulary(&self, writes: &mut [&mut [T]]) {
        let &Call { kernel, views, rank, .. } = self;
        let read = |i| self.read(i);
        let part = |axis, rows: u64| (u64::from(views[0].coord(rank, axis)) * rows, rows);
        match kernel {
            &Kernel::Embed { cols, vocab, shard, .. } => {
                let [x] = outputs(writes);
                loss::embed(cols as usize, shard.map(|axis| part(axis, vocab)), read(0), read(1), x);
            }
            &Kernel::EmbedBwd { cols, vocab, shard, .. } => {
                let [dtable] = outputs(writes);
                loss::embed_bwd(cols as usize, shard.map(|axis| part(axis, vocab)), read(0), read(1), dtable);
            }
            Kernel::VocabStats(part) => {
                let [stats] = outputs(writes);
                loss::vocab_stats(part.cols as usize, part.ids(views, rank), read(0), read(1), stats);
            }
            &Kernel::VocabCrossEntropy { part, scale, .. } => {
                let [logits, loss] = outputs(writes);
                let ids = part.ids(views, rank);
                loss::vocab_cross_entropy(part.cols as usize, ids, scale, [read(1), read(2)], logits, loss);
            }
            &Kernel::CrossEntropy { vocab, scale, .. } => {
                let [logits, loss] = outputs(writes);
                loss::cross_entropy(vocab as usize, scale, read(1), logits, loss);
            }
            &Kernel::LogSoftmax { vocab, .. } => {
                let [log_probs] = outputs(writes);
                loss::log_softmax(vocab as usize, read(0), log_probs);
            }
            &Kernel::Nll { vocab, scale, .. } => {
                let [d_log_probs, loss] = outputs(writes);
                loss::nll(vocab as usize, scale, [read(0), read(1)], d_log_probs, loss);
            }
            &Kernel::LogSoftmaxBwd { vocab, .. } => {
                let [d_logits] = outputs(writes);
                loss::log_softmax_bwd(vocab as usize, [read(0), read(1)], d_logits);
            }
            other => unreachable!("{} is not of the vocabulary", other.name()),
        }
    }
}

/// The operands a kernel accumulates into, as (read, write): the write starts as the read was.
pub(in crate::exec) fn in_place(kernel: &Kernel) -> &'static [(usize, usize)] {
    match kernel {
        Kernel::MatMul { accumulate: true, .. } => &[(2, 0)],
        Kernel::Expert(ExpertKernel { op: ExpertOp::MatMul { pass: Pass::Dw, .. }, .. }) => &[(2, 0)],
        Kernel::Expert(ExpertKernel { op: ExpertOp::MatMul { first: 1.., .. }, .. }) => &[(2, 0)],
        Kernel::MergeLse(_) => &[(0, 0), (1, 1)],
        Kernel::Unfused { step: ScoreStep::SoftmaxBwd, .. } => &[(1, 0)],
        Kernel::AttentionOnto(_) => &[(2, 0), (3, 1)],
        Kernel::AttentionBwdOnto(_, Side::Q) => &[(5, 0)],
        Kernel::AttentionBwdOnto(_, Side::Kv) => &[(5, 1)],
        Kernel::AddLse(_) | Kernel::AddWeighted(_) => &[(0, 0)],
        // The residual is added to, so it may be the very buffer of dx.
        Kernel::NormBwd { .. } | Kernel::LayerNormBwd { .. } => &[(3, 0), (4, 1)],
        Kernel::HeadNorm { .. } => &[(0, 0)],
        Kernel::Ssm(kernel) => match kernel.op {
            SsmOp::ConvBwd => &[(0, 0), (4, 1)],
            SsmOp::ScanBwd => &[(0, 0), (5, 2)],
            SsmOp::NormBwd { .. } => &[(4, 2)],
            SsmOp::GroupNormBwd { .. } => &[(3, 1)],
            SsmOp::OwnBwd(_) => &[(2, 0), (3, 1)],
            SsmOp::Conv | SsmOp::Scan | SsmOp::Norm { .. } | SsmOp::GroupNorm { .. } => &[],
            SsmOp::Gate | SsmOp::GateBwd | SsmOp::Own(_) => &[],
        },
        Kernel::LatentNormBwd { .. } => &[(2, 1)],
        Kernel::HeadNormBwd { .. } => &[(0, 0), (3, 1)],
        Kernel::BiasBwd { .. } | Kernel::Positions { backward: true, .. } => &[(1, 0)],
        Kernel::Positions { .. } => &[(0, 0)],
        Kernel::EmbedBwd { .. } => &[(2, 0)],
        Kernel::CrossEntropy { .. } => &[(0, 0), (2, 1)],
        Kernel::VocabCrossEntropy { .. } => &[(0, 0), (3, 1)],
        Kernel::Nll { .. } => &[(2, 1)],
        Kernel::Adam { .. } => &[(1, 0), (2, 1), (3, 2)],
        Kernel::Foreach(ForeachKernel::Moments { .. }) => &[(1, 0), (2, 1)],
        Kernel::Foreach(ForeachKernel::Move { .. }) => &[(0, 0)],
        Kernel::Muon(MuonKernel::Momentum { .. }) => &[(1, 0)],
        Kernel::Sparse(SparseKernel::Turn { .. }) => &[(0, 0)],
        Kernel::Sparse(SparseKernel::Product(HeadProduct { product: Product::Dw, .. })) => &[(2, 0)],
        Kernel::Muon(MuonKernel::Update { part, .. }) if part.others > 0 => &[(2, 0), (3, 1), (4, 2)],
        Kernel::Muon(MuonKernel::Update { .. }) => &[(2, 0), (3, 1)],
        _ => &[],
    }
}

/// The positions of a rank's rows within their documents.
fn turned(segs: &Segs, documents: &Documents, views: &[Mesh], rank: u32) -> Vec<u64> {
    segs.positions(views, rank).into_iter().map(|at| at - documents.around(at).start).collect()
}

/// The writes as an array; [`shapes::check`] has counted them.
fn outputs<'w, 'b, T, const N: usize>(writes: &'w mut [&'b mut [T]]) -> &'w mut [&'b mut [T]; N] {
    writes.try_into().expect("the number of writes is that of the kernel")
}
