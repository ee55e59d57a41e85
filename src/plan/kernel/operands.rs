//! The size of every operand of a kernel.

use super::{FP8_BLOCK, Kernel};
use crate::plan::mesh::Mesh;

/// Elements of each operand, in the order in which the kernel reads and writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operands {
    pub reads: Vec<u64>,
    pub writes: Vec<u64>,
}

impl Kernel {
    /// The size that every operand has to have; [`check`](crate::plan::check) compares the plan's buffers with it.
    pub fn operands(&self, views: &[Mesh]) -> Operands {
        match self {
            Kernel::MatMul { m, n, k, accumulate, bias, .. } => {
                let mut reads = vec![m * k, k * n];
                reads.extend(accumulate.then_some(m * n));
                reads.extend(bias.then_some(*n));
                of(&reads, &[m * n])
            }
            Kernel::Attention(_)
            | Kernel::AttentionBwd(_)
            | Kernel::MergeLse(_)
            | Kernel::AttentionOnto(_)
            | Kernel::AttentionBwdOnto(..)
            | Kernel::AddLse(_)
            | Kernel::AddWeighted(_) => self.attention_operands(views),
            Kernel::Unfused { block, step } => step.operands(block, views),
            Kernel::AttentionDelta { rows, heads, head_dim } => {
                of(&[rows * heads * head_dim, rows * heads * head_dim], &[rows * heads])
            }
            Kernel::Norm { .. }
            | Kernel::NormBwd { .. }
            | Kernel::HeadNorm { .. }
            | Kernel::HeadNormBwd { .. }
            | Kernel::LatentNorm { .. }
            | Kernel::LatentNormBwd { .. }
            | Kernel::LayerNorm { .. }
            | Kernel::LayerNormBwd { .. } => self.norm_operands(),
            Kernel::LatentRope { segs, batch, heads, nope, rope, v, backward, .. } => {
                let n = batch * segs.len(views);
                let q = n * heads * (nope + rope);
                let (apart, heads) = ([q, n * heads * (nope + v), n * rope], [q, q + n * heads * v]);
                if *backward { of(&heads, &apart) } else { of(&apart, &heads) }
            }
            Kernel::BiasBwd { rows, cols } => of(&[rows * cols, *cols], &[*cols]),
            Kernel::Residual { rows, cols, biases, dropout } => {
                let mut reads = vec![rows * cols; 2];
                reads.extend(vec![*cols; *biases as usize]);
                let writes = if dropout.is_some() { 2 } else { 1 };
                of(&reads, &vec![rows * cols; writes])
            }
            Kernel::Positions { rows, cols, max, backward, .. } => {
                of(&[rows * cols, max * cols], &[if *backward { max * cols } else { rows * cols }])
            }
            Kernel::Gelu { elems } | Kernel::Relu2 { elems } | Kernel::Cast { elems } => of(&[*elems], &[*elems]),
            Kernel::GeluBwd { elems } | Kernel::Relu2Bwd { elems } => of(&[*elems; 2], &[*elems]),
            Kernel::DropoutBwd { elems, .. } | Kernel::Add { elems, .. } => of(&[*elems; 2], &[*elems]),
            Kernel::Ssm(kernel) => kernel.operands(),
            Kernel::Rope { segs, batch, heads, kv_heads, head_dim, backward, .. } => {
                let n = batch * segs.len(views) * head_dim;
                let (q, kv) = (n * heads, 2 * n * kv_heads);
                if *backward { of(&[q, kv], &[q + kv]) } else { of(&[q + kv], &[q, kv]) }
            }
            Kernel::SwiGlu { rows, cols } => of(&[2 * rows * cols], &[rows * cols]),
            Kernel::SwiGluBwd { rows, cols } => of(&[2 * rows * cols, rows * cols], &[2 * rows * cols]),
            Kernel::Permute(permute) => permute.operands(),
            Kernel::Reorder { segs, batch, cols, .. } => of(&[batch * segs.seq * cols], &[batch * segs.seq * cols]),
            Kernel::OwnRows { rows, cols, ranks, .. } => of(&[ranks * rows * cols], &[rows * cols]),
            Kernel::Quantise { rows, cols } => of(&[rows * cols], &coded(*rows, *cols)),
            Kernel::Dequantise { rows, cols } => of(&coded(*rows, *cols), &[rows * cols]),
            Kernel::Fill { elems } => of(&[], &[*elems]),
            Kernel::Wait { reads, writes, .. } => of(reads, writes),
            Kernel::Embed { rows, cols, vocab, .. } => of(&[*rows, vocab * cols], &[rows * cols]),
            Kernel::EmbedBwd { rows, cols, vocab, .. } => of(&[*rows, rows * cols, vocab * cols], &[vocab * cols]),
            Kernel::CrossEntropy { rows, vocab, .. } => of(&[rows * vocab, *rows, 1], &[rows * vocab, 1]),
            Kernel::LogSoftmax { rows, vocab } => of(&[rows * vocab], &[rows * vocab]),
            Kernel::Nll { rows, vocab, .. } => of(&[rows * vocab, *rows, 1], &[rows * vocab, 1]),
            Kernel::LogSoftmaxBwd { rows, vocab } => of(&[rows * vocab; 2], &[rows * vocab]),
            Kernel::VocabStats(p) => of(&[p.rows * p.cols, p.rows], &[2 * p.rows]),
            Kernel::VocabCrossEntropy { part: p, ranks, .. } => {
                of(&[p.rows * p.cols, p.rows, 2 * ranks * p.rows, 1], &[p.rows * p.cols, 1])
            }
            // The cast copy is the only optional operand; `check` allows for it.
            Kernel::Adam { elems, .. } => of(&[*elems; 4], &[*elems; 3]),
            Kernel::Foreach(kernel) => kernel.operands(),
            Kernel::Muon(kernel) => kernel.operands(),
            Kernel::Sparse(kernel) => kernel.operands(views),
            Kernel::Expert(kernel) => kernel.operands(),
        }
    }

    /// The operands of a norm, be it of rows or of parts of them.
    fn norm_operands(&self) -> Operands {
        match self {
            Kernel::Norm { rows, cols, .. } => of(&[rows * cols, *cols], &[rows * cols]),
            Kernel::NormBwd { rows, cols, .. } => {
                let x = rows * cols;
                of(&[x, *cols, x, x, *cols], &[x, *cols])
            }
            Kernel::HeadNorm { rows, heads, kv_heads, head_dim, .. } => {
                let (qk, v) = (rows * (heads + kv_heads) * head_dim, rows * kv_heads * head_dim);
                of(&[qk + v, 2 * head_dim], &[qk + v, qk])
            }
            Kernel::HeadNormBwd { rows, heads, kv_heads, head_dim, .. } => {
                let (qk, v, w) = (rows * (heads + kv_heads) * head_dim, rows * kv_heads * head_dim, 2 * head_dim);
                of(&[qk + v, qk, w, w], &[qk + v, w])
            }
            Kernel::LatentNorm { rows, cols, rest, .. } => {
                let mut writes = vec![rows * cols];
                writes.extend((*rest > 0).then_some(rows * rest));
                of(&[rows * (cols + rest), *cols], &writes)
            }
            Kernel::LatentNormBwd { rows, cols, rest, .. } => {
                let mut reads = vec![rows * (cols + rest), *cols, *cols, rows * cols];
                reads.extend((*rest > 0).then_some(rows * rest));
                of(&reads, &[rows * (cols + rest), *cols])
            }
            Kernel::LayerNorm { rows, cols, bias, .. } => of(&[rows * cols, with_bias(*cols, *bias)], &[rows * cols]),
            Kernel::LayerNormBwd { rows, cols, bias, .. } => {
                let (x, w) = (rows * cols, with_bias(*cols, *bias));
                of(&[x, w, x, x, w], &[x, w])
            }
            other => unreachable!("{} is no norm", other.name()),
        }
    }
}

fn of(reads: &[u64], writes: &[u64]) -> Operands {
    Operands { reads: reads.to_vec(), writes: writes.to_vec() }
}

/// Codes of rows, and their scales.
fn coded(rows: u64, cols: u64) -> [u64; 2] {
    [rows * cols, rows * cols.div_ceil(FP8_BLOCK)]
}

/// Elements of a norm's weight, its bias behind it.
fn with_bias(cols: u64, bias: bool) -> u64 {
    if bias { 2 * cols } else { cols }
}
