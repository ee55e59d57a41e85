//! Every kernel a plan can name: its operands, its floating-point operations, its bytes.
//!
//! One multiply-accumulate is two FLOP, here and in the files of kernels beside (`expert`, `muon`, `sparse`, `unfused`).
//! Only matrix products count FLOPs: what a memory-bound kernel computes is never what limits it. Bytes are the least a
//! kernel must move: every operand once, trimmed to the rows a mask leaves.
//!
//! Legend of shapes: n tokens of a microbatch on this rank (batch b times s), h hidden, a heads, k KV
//! heads, d head dim, f feed-forward width, v vocabulary. Tensors are row-major, a row is a token.

mod attention;
mod heads;
mod names;
mod operands;
mod ssm;

pub use attention::{AttnBlock, Side};
pub use heads::{Exchange, HeadPad, HeadPart, HeadPermute, Packing};
pub use names::Family;
pub use operands::Operands;
pub use ssm::{HeadRanks, SsmKernel, SsmOp};

use super::dropout::Dropout;
use super::expert::ExpertKernel;
use super::foreach::ForeachKernel;
use super::mesh::{Axis, Group, Mesh};
use super::muon::MuonKernel;
use super::segs::Segs;
use super::share::Share;
use super::sparse::SparseKernel;
use super::unfused::ScoreStep;
use crate::spec::{Documents, RopeScaling};
use serde::{Deserialize, Serialize};

/// Elements along the reduced dim that share a scale when they are rounded to FP8 (DeepSeek-V3,
/// arXiv:2412.19437, section 3.3.2).
pub const FP8_BLOCK: u64 = 128;

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Logits of a part of the vocabulary: each rank has `cols` columns, by its coordinate on `axis`. The last ranks may
/// have more columns than there are ids left; those count for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabPart {
    pub rows: u64,
    pub cols: u64,
    /// Ids of the whole vocabulary.
    pub vocab: u64,
    pub axis: Axis,
}

impl VocabPart {
    /// The ids of the rank's columns.
    pub fn ids(&self, views: &[Mesh], rank: u32) -> std::ops::Range<u64> {
        let first = u64::from(views[0].coord(rank, self.axis)) * self.cols;
        first.min(self.vocab)..(first + self.cols).min(self.vocab)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Kernel {
    /// `C[m,n] (+)= A[m,k] B[k,n]`; `a_t`: A is stored `[k,m]`; `b_t`: B is stored `[n,k]`.
    /// `fp8`: A and B are first rounded to E4M3, every [`FP8_BLOCK`] elements along k by a scale of their own.
    /// Reads A, B (and C when it accumulates, and with `bias` a row `[n]` that every row of C gets), writes C.
    MatMul {
        m: u64,
        n: u64,
        k: u64,
        a_t: bool,
        b_t: bool,
        accumulate: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        fp8: bool,
        #[serde(default, skip_serializing_if = "is_false")]
        bias: bool,
    },
    /// Flash attention with log-sum-exp. Reads q [b*sq, a*d], kv [b*sk, (K: k*d | V: k*v)], v being d unless the block
    /// says otherwise; writes o [b*sq, a*v], lse [b*sq, a]. Rows that see no key are left as they are.
    Attention(AttnBlock),
    /// A kernel of attention whose scores are in memory.
    Unfused { block: AttnBlock, step: ScoreStep },
    /// delta = rowsum(dO * O) by head, of `head_dim` elements. Reads o, do; writes delta [rows, a].
    AttentionDelta { rows: u64, heads: u64, head_dim: u64 },
    /// Gradients of one block, given the final lse and delta. Reads q, kv, do, lse, delta; writes dq, dkv
    /// of this block alone. Rows outside the mask are left as they are.
    AttentionBwd(AttnBlock),
    /// [`Attention`](Kernel::Attention) that goes on from a running output: no merge, no output of the block alone.
    /// Reads q, kv, o, lse; writes o, lse.
    AttentionOnto(AttnBlock),
    /// [`AttentionBwd`](Kernel::AttentionBwd) that adds the gradients of one side to a sum. Reads q, kv, do, lse,
    /// delta, the sum; writes dq, dkv.
    AttentionBwdOnto(AttnBlock, Side),
    /// Adds a block's log-sum-exp to a running one. Reads lse, lse_block; writes lse; only the rows that saw a key
    /// of the block.
    AddLse(AttnBlock),
    /// Adds a block's normalised output to a sum, weighed by its log-sum-exp against the final one. Reads o,
    /// o_block, lse_block, lse; writes o; only the rows that saw a key of the block.
    AddWeighted(AttnBlock),
    /// Adds a block's normalised output to a running one by their log-sum-exps. Reads o, lse, o_block,
    /// lse_block; writes o, lse; only the rows that saw a key of the block.
    MergeLse(AttnBlock),
    /// RMSNorm. Reads x, w; writes y.
    Norm { rows: u64, cols: u64, eps: f64 },
    /// Reads x, w, dy, residual, dw; writes dx = residual + the norm's gradient, and dw, accumulated.
    NormBwd { rows: u64, cols: u64, eps: f64 },
    /// RMSNorm of every head of q and of k by itself (Qwen3). Reads qkv [n, (a+2k)*d], which may be its result, w
    /// `[q's d | k's d]`; writes qkv, v as it was, and q and k as they were, [n, (a+k)*d].
    HeadNorm { rows: u64, heads: u64, kv_heads: u64, head_dim: u64, eps: f64 },
    /// Reads d_qkv, which may be its result, q and k as they were, w, dw; writes d_qkv, that of v as it was, and dw,
    /// accumulated.
    HeadNormBwd { rows: u64, heads: u64, kv_heads: u64, head_dim: u64, eps: f64 },
    /// RMSNorm of the first `cols` columns of a row, the `rest` going through (the compressed keys and values of
    /// DeepSeek-V2's latent attention, and the keys beside them). Reads x `[rows, cols + rest]`, w `[cols]`; writes
    /// y `[rows, cols]` and, where there is a rest, `[rows, rest]`.
    LatentNorm { rows: u64, cols: u64, rest: u64, eps: f64 },
    /// Reads x, w, dw, dy and, where there is a rest, its gradient; writes dx and dw, accumulated.
    LatentNormBwd { rows: u64, cols: u64, rest: u64, eps: f64 },
    /// Heads of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.3), put together and turned. Reads q
    /// [n, a*(nope + rope)], the last `rope` of a head to be turned; kv [n, a*(nope + v)], a key's and a value's
    /// elements; k [n, rope], to be turned, which all heads share. Writes q, and (K: a*(nope + rope) | V: a*v).
    /// Backward reads dq, dkv; writes the gradients of the three, that of the shared keys summed over the heads here.
    LatentRope {
        segs: Segs,
        #[serde(default, skip_serializing_if = "Documents::is_empty")]
        documents: Documents,
        batch: u64,
        heads: u64,
        nope: u64,
        rope: u64,
        v: u64,
        theta: f64,
        backward: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scaling: Option<RopeScaling>,
    },
    /// LayerNorm. Reads x, w `[cols]`, or with `bias` `[weight | bias]`; writes y.
    LayerNorm { rows: u64, cols: u64, eps: f64, bias: bool },
    /// The gradient of LayerNorm, with the operands of [`NormBwd`](Kernel::NormBwd); dw is laid out as w is.
    LayerNormBwd { rows: u64, cols: u64, eps: f64, bias: bool },
    /// Reads dy, db; writes db = db + the sum of the rows of dy.
    BiasBwd { rows: u64, cols: u64 },
    /// Reads x, a branch and `biases` rows `[cols]`; writes x + branch + each of them, with `dropout` x + what it
    /// leaves of the rest, divided by the share that it leaves, and a second result, 1 where an element stayed.
    Residual {
        rows: u64,
        cols: u64,
        biases: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dropout: Option<Dropout>,
    },
    /// Reads dy and what stayed; writes the gradient of the branch.
    DropoutBwd { elems: u64, probability: f64 },
    /// Learned positions, a table `[max, cols]`. Forward reads x, table, writes x + the rows of its positions;
    /// backward reads dx, dtable, writes dtable, accumulated. `rows` are those of all positions, or of the
    /// rank's share of them.
    Positions {
        segs: Segs,
        rows: u64,
        cols: u64,
        max: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        share: Option<Share>,
        backward: bool,
    },
    /// gelu in its tanh form. Reads x; writes gelu(x).
    Gelu { elems: u64 },
    /// Reads x, dy; writes dx.
    GeluBwd { elems: u64 },
    /// The square of a ReLU. Reads x; writes the square of x, and 0 where x is negative.
    Relu2 { elems: u64 },
    /// Reads x, dy; writes dx.
    Relu2Bwd { elems: u64 },
    /// A kernel of a Mamba-2 mixer.
    Ssm(SsmKernel),
    /// Rotary embedding, halves rotated; with `rotary` of the first so many elements of a head alone, the rest
    /// goes through. Forward reads qkv [n, (a+2k)*d], writes q and kv; backward reads
    /// dq, dkv, writes dqkv. Positions begin anew in every document; frequencies are powers of `theta`, `scaling` changes
    /// them (see [`Turning`](crate::spec::Turning)).
    Rope {
        segs: Segs,
        #[serde(default, skip_serializing_if = "Documents::is_empty")]
        documents: Documents,
        batch: u64,
        heads: u64,
        kv_heads: u64,
        head_dim: u64,
        theta: f64,
        backward: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rotary: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        scaling: Option<RopeScaling>,
    },
    /// Reads [gate | up] [rows, 2*cols]; writes silu(gate) * up.
    SwiGlu { rows: u64, cols: u64 },
    /// Reads [gate | up], d_out; writes [d_gate | d_up].
    SwiGluBwd { rows: u64, cols: u64 },
    /// Reads one buffer a part and writes the packed ones, or the reverse.
    Permute(HeadPermute),
    /// Puts rows as an all-gather along the one axis of `segs` brings them, `[rank][batch][len]`, each of `cols`
    /// elements, into the order of the sequence, `[batch][position]`; with `inverse` the other way.
    Reorder { segs: Segs, batch: u64, cols: u64, inverse: bool },
    /// Takes a rank's own rows out of the rows that all `ranks` of a group have: the share of its place in the group,
    /// in their order. Reads `[ranks * rows, cols]`; writes `[rows, cols]`.
    OwnRows { rows: u64, cols: u64, ranks: u64, group: Group },
    /// Reads x, writes the same values in the other dtype.
    Cast { elems: u64 },
    /// Rounds rows to E4M3, every [`FP8_BLOCK`] elements by a scale of their own. Reads x `[rows, cols]`; writes codes, and
    /// scales `[rows, cols / 128]`.
    Quantise { rows: u64, cols: u64 },
    /// Reads codes and scales; writes the numbers that they stand for, `[rows, cols]`.
    Dequantise { rows: u64, cols: u64 },
    /// Adds its two reads into its write; with `trim` only the rows that the block's mask leaves.
    Add { elems: u64, trim: Option<(AttnBlock, Side)> },
    /// Writes zeros.
    Fill { elems: u64 },
    /// Nothing but waiting: the CPU issues no op behind it before all that it reads has come and all that it writes
    /// is free again (`torch.cuda.synchronize`). Elements of its operands. With `stream` the lane alone waits, and the CPU
    /// goes on (`cudaStreamWaitEvent`).
    Wait {
        reads: Vec<u64>,
        writes: Vec<u64>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        stream: bool,
    },
    /// Reads token ids `[rows]`, table `[vocab, cols]`; writes x. With `shard` the table is the part of the
    /// rank's coordinate on the axis, and an id that stands in another part gives zeros.
    Embed {
        rows: u64,
        cols: u64,
        vocab: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shard: Option<Axis>,
    },
    /// Reads token ids, dx, dtable; writes dtable, accumulated.
    EmbedBwd {
        rows: u64,
        cols: u64,
        vocab: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        shard: Option<Axis>,
    },
    /// Softmax cross-entropy. Reads logits, target ids, loss; writes scale * (softmax - onehot) over the
    /// logits, and adds scale * the sum of the token losses to loss.
    CrossEntropy { rows: u64, vocab: u64, scale: f64 },
    /// Reads logits `[rows, vocab]`; writes their log-probabilities.
    LogSoftmax { rows: u64, vocab: u64 },
    /// The negative log-likelihood of targets. Reads log-probabilities `[rows, vocab]`, target ids, loss; writes the
    /// gradient of the log-probabilities, -scale at the targets and 0 elsewhere, and adds scale * the sum of the token
    /// losses to loss.
    Nll { rows: u64, vocab: u64, scale: f64 },
    /// Reads log-probabilities `[rows, vocab]` and their gradient; writes that of the logits.
    LogSoftmaxBwd { rows: u64, vocab: u64 },
    /// What a rank's part of the logits says of the whole: reads logits `[rows, cols]`, target ids; writes
    /// `[rows, 2]`, the log-sum-exp of its columns and the target's logit, 0 where the target is not among them.
    VocabStats(VocabPart),
    /// Softmax cross-entropy of a part. Reads logits, target ids, `[ranks, rows, 2]` of all parts, loss; writes
    /// as [`CrossEntropy`](Kernel::CrossEntropy) does, the loss that of the whole.
    VocabCrossEntropy { part: VocabPart, ranks: u64, scale: f64 },
    /// Reads grad, weight, m, v; writes weight, m, v and, where there is a fourth, the weight cast.
    /// Constants as [`Adam`](super::Adam) has them.
    Adam {
        elems: u64,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        #[serde(default, skip_serializing_if = "is_zero")]
        weight_decay: f64,
    },
    /// A kernel of Adam in two.
    Foreach(ForeachKernel),
    /// A kernel of the optimizer Muon.
    Muon(MuonKernel),
    /// A kernel of latent attention to chosen keys.
    Sparse(SparseKernel),
    /// A kernel of experts, whose rows a route counts.
    Expert(ExpertKernel),
}

/// Bytes that a library wants rows of matrices to begin at multiples of (NVIDIA, Matrix Multiplication Background User's
/// Guide).
pub const ALIGNMENT: u64 = 16;

/// Which efficiency curve a kernel's time follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkClass {
    Gemm {
        m: u64,
        n: u64,
        k: u64,
        /// Bytes moved before the product starts, to round its operands to FP8; 0: they are taken as they are.
        cast: u64,
        /// Bytes read and written for each element of the result: more than its own size where the result is added to
        /// something.
        result: u64,
        /// Matrices that rows are multiplied with, a group of rows each; 1 except in the products of experts.
        groups: u64,
        /// Whether rows of an operand, or of the result, begin at addresses that are no multiples of 16 bytes.
        unaligned: bool,
        /// Whether the result is a gradient of weights: its sum runs over the tokens, along which neither operand was
        /// rounded for the forward pass.
        of_weights: bool,
    },
    /// `q_rows` x `kv_rows` is the trimmed rectangle; `area` of it is visible.
    Attention {
        q_rows: u64,
        kv_rows: u64,
        area: u64,
        batch_heads: u64,
        /// How wide a head's keys and values are.
        dims: [u64; 2],
        backward: bool,
        pairs: Pairs,
    },
    /// Small products whose operands pass through memory: it takes as long as the bytes, or as the FLOPs at the rate of
    /// a product if those take longer.
    Scan {
        /// Bytes of states among the bytes of the work; they pass by as in kernels that memory bounds.
        states: u64,
    },
    Memory,
}

/// Which pairs of queries and keys a kernel of attention goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pairs {
    /// The pairs that a mask leaves.
    Masked,
    /// The pairs that were chosen, one by one.
    Chosen,
    /// The pairs that a mask leaves, scored to choose among them, in FP8 or not; `moved`: bytes of scores on their way.
    Scored { fp8: bool, moved: u64 },
}

/// The work of a kernel on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Work {
    pub flops: u64,
    pub bytes: u64,
    pub class: WorkClass,
}

impl Kernel {
    /// The block whose mask decides what this kernel does, so that its work differs between ranks; `None` without a
    /// mask.
    pub fn mask(&self) -> Option<&AttnBlock> {
        match self {
            Kernel::Attention(b) | Kernel::AttentionBwd(b) | Kernel::MergeLse(b) => Some(b),
            Kernel::AttentionOnto(b) | Kernel::AttentionBwdOnto(b, _) => Some(b),
            Kernel::AddLse(b) | Kernel::AddWeighted(b) => Some(b),
            Kernel::Add { trim: Some((b, _)), .. } => Some(b),
            Kernel::Sparse(kernel) => kernel.mask(),
            _ => None,
        }
    }

    /// The kernel of experts that this is, whose rows a route counts, so that its work differs between ranks; `None`
    /// for others.
    pub fn routed(&self) -> Option<&ExpertKernel> {
        match self {
            Kernel::Expert(kernel) => Some(kernel),
            _ => None,
        }
    }

    /// The work on `rank`, given the bytes of each operand; `None` where the mask leaves nothing and the kernel is
    /// skipped. For a [`routed`](Kernel::routed) kernel this takes its buffers as full; ask [`ExpertKernel::work`]
    /// instead.
    pub fn work(&self, views: &[Mesh], rank: u32, reads: &[u64], writes: &[u64]) -> Option<Work> {
        let all: u64 = reads.iter().chain(writes).sum();
        let memory = |bytes| Some(Work { flops: 0, bytes, class: WorkClass::Memory });
        if let Some(block) = self.mask() {
            let shape = block.shape(views, rank);
            return (shape.area > 0).then(|| self.masked_work(block, shape, views, reads, writes));
        }
        if let Kernel::Unfused { block, step } = self {
            return Some(step.work(block, views, rank, reads, writes));
        }
        match *self {
            Kernel::MatMul { m, n, k, a_t, b_t, fp8, .. } => {
                let given = reads[0] + reads[1];
                let fed = if fp8 { fp8_bytes(m * k) + fp8_bytes(k * n) } else { given };
                let cast = match (fp8, a_t) {
                    (false, _) => 0,
                    // Weights are rounded for the first microbatch and then kept (Transformer Engine's
                    // `is_first_microbatch`); only the gradient of weights is a product of two activations.
                    (true, false) => reads[0] + fp8_bytes(m * k),
                    (true, true) => given + fed,
                };
                let bytes = cast + fed + all - given;
                let result = (all - given) / (m * n).max(1);
                let [a, b] = [reads[0] / (m * k).max(1), reads[1] / (k * n).max(1)];
                let rows = [a * if a_t { m } else { k }, b * if b_t { k } else { n }, a.min(b) * n];
                let unaligned = !rows.iter().all(|bytes| bytes.is_multiple_of(ALIGNMENT));
                let class = WorkClass::Gemm { m, n, k, cast, result, groups: 1, unaligned, of_weights: a_t };
                Some(Work { flops: 2 * m * n * k, bytes, class })
            }
            Kernel::Wait { .. } => memory(0),
            // A product that rounds its operand reads it for that, and a gradient's reads it to round it anew: codes are one
            // more thing to write beside the one, and to read by the other.
            Kernel::Quantise { .. } => memory(writes.iter().sum()),
            Kernel::Dequantise { .. } => memory(reads.iter().sum()),
            // The table is far larger than the rows taken from it.
            Kernel::Embed { rows, .. } => memory(4 * rows + 2 * writes[0]),
            Kernel::EmbedBwd { rows, vocab, .. } => memory(4 * rows + reads[1] + 2 * rows * (reads[2] / vocab.max(1))),
            Kernel::OwnRows { .. } => memory(2 * writes[0]),
            // Rows of the table are read, and added to, as often as their positions occur.
            Kernel::Positions { backward: false, .. } => memory(2 * reads[0] + writes[0]),
            Kernel::Positions { rows, max, .. } => memory(reads[0] + 2 * rows * (reads[1] / max.max(1))),
            Kernel::Ssm(kernel) => Some(kernel.work(reads, writes)),
            Kernel::Foreach(kernel) => Some(kernel.work(reads, writes)),
            Kernel::Muon(ref kernel) => Some(kernel.work(reads, writes)),
            Kernel::Sparse(ref kernel) => Some(kernel.work(reads, writes)),
            // V stays where it is, and so do the old q and k: only their new values are written.
            Kernel::HeadNorm { .. } => memory(reads[1] + 2 * writes[1]),
            // Frozen weights have no gradient to read or to write.
            Kernel::HeadNormBwd { .. } => {
                let weights: u64 = reads[2..].iter().chain(&writes[1..]).sum();
                memory(weights + 3 * reads[1])
            }
            // Two passes: one for the maximum and the sum, one that writes the gradient.
            Kernel::CrossEntropy { .. } => memory(all + reads[0]),
            // As PyTorch's kernels go over rows that a block's shared memory does not hold, which are those of vocabularies: a
            // pass for the maximum, one for the sum, one that writes (ATen's SoftMax.cu, cunn_SoftMaxForward).
            Kernel::LogSoftmax { .. } => memory(all + 2 * reads[0]),
            // Of a row of log-probabilities the target's alone is read.
            Kernel::Nll { vocab, .. } => memory(all - reads[0] + reads[0] / vocab.max(1)),
            // A pass over the gradient for its sum, one over both (cunn_SoftMaxBackward).
            Kernel::LogSoftmaxBwd { .. } => memory(all + reads[1]),
            _ => memory(all),
        }
    }
}

/// Bytes of `elems` elements in FP8: one an element, and four for each scale.
pub fn fp8_bytes(elems: u64) -> u64 {
    elems + 4 * elems.div_ceil(FP8_BLOCK)
}
