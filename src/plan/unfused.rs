//! Attention whose scores are matrices in memory, as it was computed before FlashAttention (arXiv:2205.14135):
//! a product, a softmax that masks, dropout, another product, and the same backward.
//!
//! Of every head all queries meet all keys: a mask saves products of no row. Its softmax reads what the mask leaves
//! and writes zeros elsewhere (Megatron-LM's `scaled_upper_triang_masked_softmax`). Matrices of scores are
//! `[batch * heads * queries, keys]`, in that order.

use super::kernel::{AttnBlock, Operands, Work, WorkClass};
use super::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};

/// A kernel of unfused attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ScoreStep {
    /// Reads q, kv; writes q k^T / sqrt(d).
    Scores,
    /// Reads scores; writes the probabilities of each row, 0 where the mask is.
    Softmax,
    /// Reads probabilities; writes what dropout leaves of them, divided by the share that it leaves, and 1 where an
    /// element stayed.
    Drop(HeadDropout),
    /// Reads probabilities, kv; writes o.
    Values,
    /// Reads do, kv; writes do v^T.
    ProbsBwd,
    /// Reads probabilities and their gradient; writes that of the scores.
    SoftmaxBwd,
    /// Reads the gradient of the scores, kv; writes dq.
    QBwd,
    /// Two products in one op, since K and V are one tensor: reads the gradient of the scores, q, probabilities as the
    /// values met them, do; writes dkv.
    KvBwd,
}

/// Matrices of scores that the fused softmax takes at a time (`FusedScaleMaskSoftmax.is_kernel_available` in
/// github:NVIDIA/Megatron-LM: batch times heads of a rank, `attn_batches`, must come out even).
pub const AT_A_TIME: u64 = 4;

/// Calls of a framework for a softmax that the fused kernel does not take: to fp32, scale, mask, softmax, and back; and
/// likewise backward.
const APART: u32 = 5;

impl ScoreStep {
    /// Whether this step is a softmax of scores that the fused kernel does not take.
    pub fn is_apart(&self, b: &AttnBlock) -> bool {
        matches!(self, ScoreStep::Softmax | ScoreStep::SoftmaxBwd) && !(b.batch * b.heads).is_multiple_of(AT_A_TIME)
    }

    /// The name of the step's curve, see [`Kernel::curve`](super::Kernel::curve).
    pub fn curve(&self, b: &AttnBlock) -> &'static str {
        match self {
            ScoreStep::Softmax if self.is_apart(b) => "softmax_apart",
            ScoreStep::SoftmaxBwd if self.is_apart(b) => "softmax_bwd_apart",
            _ => self.name(),
        }
    }

    /// Calls that a framework makes for the step, its fused softmax taking [`AT_A_TIME`] matrices at a time.
    pub fn calls(&self, b: &AttnBlock) -> u32 {
        if self.is_apart(b) { APART } else { 1 }
    }

    pub fn name(&self) -> &'static str {
        match self {
            ScoreStep::Scores => "scores",
            ScoreStep::Softmax => "softmax",
            ScoreStep::Drop(_) => "drop_probs",
            ScoreStep::Values => "values",
            ScoreStep::ProbsBwd => "probs_bwd",
            ScoreStep::SoftmaxBwd => "softmax_bwd",
            ScoreStep::QBwd => "q_bwd",
            ScoreStep::KvBwd => "kv_bwd",
        }
    }

    pub fn is_forward(&self) -> bool {
        match self {
            ScoreStep::Scores | ScoreStep::Softmax | ScoreStep::Drop(_) | ScoreStep::Values => true,
            ScoreStep::ProbsBwd | ScoreStep::SoftmaxBwd | ScoreStep::QBwd | ScoreStep::KvBwd => false,
        }
    }

    /// Elements of each operand.
    pub fn operands(&self, b: &AttnBlock, views: &[Mesh]) -> Operands {
        let [nq, nk] = [&b.q, &b.kv].map(|segs| b.batch * segs.len(views));
        let (q, kv) = (nq * b.heads * b.head_dim, 2 * nk * b.kv_heads * b.head_dim);
        let scores = nq * b.heads * b.kv.len(views);
        let (reads, writes) = match self {
            ScoreStep::Scores | ScoreStep::ProbsBwd => (vec![q, kv], vec![scores]),
            ScoreStep::Softmax => (vec![scores], vec![scores]),
            ScoreStep::Drop(_) => (vec![scores], vec![scores, scores]),
            ScoreStep::Values | ScoreStep::QBwd => (vec![scores, kv], vec![q]),
            ScoreStep::SoftmaxBwd => (vec![scores, scores], vec![scores]),
            ScoreStep::KvBwd => (vec![scores, q, scores, q], vec![kv]),
        };
        Operands { reads, writes }
    }

    /// The work of a rank, given the bytes of each operand. The products of all heads are one tall product: tiles are
    /// smaller than a head's matrix.
    pub fn work(&self, b: &AttnBlock, views: &[Mesh], rank: u32, reads: &[u64], writes: &[u64]) -> Work {
        let [sq, sk] = [&b.q, &b.kv].map(|segs| segs.len(views));
        let (maps, d) = (b.batch * b.heads, b.head_dim);
        let all: u64 = reads.iter().chain(writes).sum();
        let product = |m, n, k, bytes| {
            let class = WorkClass::Gemm { m, n, k, cast: 0, result: 2, groups: 1, unaligned: false, of_weights: false };
            Work { flops: 2 * m * n * k, bytes, class }
        };
        // Either keys or values are used, which is half of kv.
        let half_kv = |bytes: u64| bytes - reads[1] / 2;
        let memory = |bytes| Work { flops: 0, bytes, class: WorkClass::Memory };
        let seen = |bytes: u64| {
            let pairs = u128::from(sq) * u128::from(sk);
            (u128::from(bytes) * u128::from(b.shape(views, rank).area) / pairs.max(1)) as u64
        };
        match self {
            ScoreStep::Scores | ScoreStep::ProbsBwd => product(maps * sq, sk, d, half_kv(all)),
            ScoreStep::Values | ScoreStep::QBwd => product(maps * sq, d, sk, half_kv(all)),
            ScoreStep::KvBwd => product(2 * maps * sk, d, sq, all),
            ScoreStep::Softmax | ScoreStep::SoftmaxBwd => memory(seen(reads.iter().sum()) + writes[0]),
            ScoreStep::Drop(_) => memory(all),
        }
    }
}

/// Dropout of probabilities: the position of the query, the head of the model and the key decide, so that every way to
/// share out the heads drops the same ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadDropout {
    pub probability: f64,
    /// Axes that share out the heads, the outermost first.
    pub heads_over: Vec<Axis>,
}

impl HeadDropout {
    /// A number that tells it from the dropouts of the residual stream.
    pub const SALT: u64 = 2;

    /// The first of the rank's `heads` heads.
    pub fn first_head(&self, views: &[Mesh], rank: u32, heads: u64) -> u64 {
        let part =
            |at: u64, &axis: &Axis| at * u64::from(views[0].degree(axis)) + u64::from(views[0].coord(rank, axis));
        self.heads_over.iter().fold(0, part) * heads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Kernel, Segs};
    use crate::spec::{Factor, Mask};

    #[test]
    fn a_softmax_of_four_matrices_at_a_time_is_one_call() {
        let segs = Segs::new(64, &[]);
        let block = |batch, heads| AttnBlock {
            q: segs.clone(),
            kv: segs.clone(),
            batch,
            heads,
            kv_heads: heads,
            head_dim: 8,
            v_dim: None,
            mask: Mask::new(true),
            factor: Factor::ONE,
        };
        let curve = |batch, heads, step| Kernel::Unfused { block: block(batch, heads), step }.curve();
        assert_eq!(curve(1, 4, ScoreStep::Softmax), "softmax");
        assert_eq!(curve(2, 6, ScoreStep::SoftmaxBwd), "softmax_bwd");
        assert_eq!(curve(1, 6, ScoreStep::Softmax), "softmax_apart");
        assert_eq!(curve(3, 2, ScoreStep::SoftmaxBwd), "softmax_bwd_apart");
        assert_eq!(curve(1, 1, ScoreStep::Scores), "scores");
        assert_eq!([ScoreStep::Softmax.calls(&block(1, 2)), ScoreStep::Values.calls(&block(1, 2))], [5, 1]);
    }
}
