//! Blocks of attention: their sizes, their work and their operands.

use super::{Kernel, Operands, Pairs, Work, WorkClass};
use crate::plan::mesh::{Axis, Mesh};
use crate::plan::segs::Segs;
use crate::plan::visible::{self, BlockShape, LiveRows, block_shape};
use crate::spec::{Factor, Mask};
use serde::{Deserialize, Serialize};

/// A block of attention: queries and keys by the global positions their rows stand for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttnBlock {
    pub q: Segs,
    pub kv: Segs,
    /// Sequences in the microbatch; a row is b * len + position.
    pub batch: u64,
    pub heads: u64,
    pub kv_heads: u64,
    /// Elements of a head's query and key.
    pub head_dim: u64,
    /// Elements of a head's value and output; `None`: as many as of a key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v_dim: Option<u64>,
    pub mask: Mask,
    /// Factor of the scores beside 1 / sqrt(head_dim).
    #[serde(default, skip_serializing_if = "Factor::is_one")]
    pub factor: Factor,
}

impl AttnBlock {
    pub fn v_dim(&self) -> u64 {
        self.v_dim.unwrap_or(self.head_dim)
    }

    /// Factor of the products of queries and keys.
    pub fn scale(&self) -> f64 {
        self.factor.0 / (self.head_dim as f64).sqrt()
    }

    /// Elements of a token's queries.
    pub fn q_row(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Elements of a token's keys and values.
    pub fn kv_row(&self) -> u64 {
        self.kv_heads * (self.head_dim + self.v_dim())
    }

    /// Elements of a token's outputs.
    pub fn o_row(&self) -> u64 {
        self.heads * self.v_dim()
    }

    /// How much the scores of each head on `rank` lose with distance, a slope for each head; empty where they lose
    /// nothing. The heads of tensor-parallel ranks, and of their Ulysses ranks, stand one behind the other.
    pub fn slopes(&self, views: &[Mesh], rank: u32) -> Vec<f64> {
        let at = |axis| u64::from(views[0].coord(rank, axis));
        let first = (at(Axis::Tp) * u64::from(views[0].degree(Axis::Up)) + at(Axis::Up)) * self.heads;
        (first..first + self.heads).filter_map(|head| self.mask.slope(head)).collect()
    }

    /// The part of the block that the mask leaves on `rank`, for one sequence.
    pub fn shape(&self, views: &[Mesh], rank: u32) -> BlockShape {
        block_shape(&self.q.spans(views, rank), &self.kv.spans(views, rank), &self.mask)
    }

    /// The rows of a sequence that take part in the block on `rank`.
    pub fn live_rows(&self, views: &[Mesh], rank: u32) -> LiveRows {
        visible::live_rows(&self.q.spans(views, rank), &self.kv.spans(views, rank), &self.mask)
    }
}

/// The operand whose rows a trimmed kernel walks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Q,
    Kv,
}

impl Kernel {
    /// The work of a kernel whose mask leaves `shape` of its block `b`.
    pub fn masked_work(&self, b: &AttnBlock, shape: BlockShape, views: &[Mesh], reads: &[u64], writes: &[u64]) -> Work {
        let part = |bytes: u64, rows: u64, of: u64| (bytes as u128 * u128::from(rows) / u128::from(of.max(1))) as u64;
        let q = |bytes: u64| part(bytes, shape.q_rows, b.q.len(views));
        let kv = |bytes: u64| part(bytes, shape.kv_rows, b.kv.len(views));
        let product = |cols: u64| 2 * b.batch * shape.area * b.heads * cols;
        let (d, v) = (b.head_dim, b.v_dim());
        let class = |backward| WorkClass::Attention {
            q_rows: shape.q_rows,
            kv_rows: shape.kv_rows,
            area: shape.area,
            batch_heads: b.batch * b.heads,
            dims: [d, v],
            backward,
            pairs: Pairs::Masked,
        };
        match self {
            Kernel::Sparse(kernel) => kernel.masked_work(shape, reads, writes),
            Kernel::Attention(_) => Work {
                flops: product(d + v),
                bytes: q(reads[0]) + kv(reads[1]) + q(writes[0]) + q(writes[1]),
                class: class(false),
            },
            Kernel::AttentionOnto(_) => Work {
                flops: product(d + v),
                bytes: q(reads[0] + reads[2] + reads[3] + writes[0] + writes[1]) + kv(reads[1]),
                class: class(false),
            },
            // Five products where the forward pass has two: S again, dQ and dK; dP and dV.
            Kernel::AttentionBwd(_) | Kernel::AttentionBwdOnto(..) => {
                let sum = match self {
                    Kernel::AttentionBwdOnto(_, Side::Q) => q(reads[5]),
                    Kernel::AttentionBwdOnto(_, Side::Kv) => kv(reads[5]),
                    _ => 0,
                };
                let own = q(reads[0] + reads[2] + reads[3] + reads[4] + writes[0]) + kv(reads[1] + writes[1]);
                Work { flops: product(3 * d + 2 * v), bytes: own + sum, class: class(true) }
            }
            Kernel::Add { trim: Some((_, Side::Kv)), .. } => {
                let bytes = kv(reads.iter().chain(writes).sum());
                Work { flops: 0, bytes, class: WorkClass::Memory }
            }
            _ => Work { flops: 0, bytes: q(reads.iter().chain(writes).sum()), class: WorkClass::Memory },
        }
    }

    pub(super) fn attention_operands(&self, views: &[Mesh]) -> Operands {
        let b = self.mask().expect("attention kernels carry a block");
        let (nq, nk) = (b.batch * b.q.len(views), b.batch * b.kv.len(views));
        let (q, kv, o, lse) = (nq * b.q_row(), nk * b.kv_row(), nq * b.o_row(), nq * b.heads);
        let (reads, writes) = match self {
            Kernel::AttentionBwd(_) => (vec![q, kv, o, lse, lse], vec![q, kv]),
            Kernel::AttentionBwdOnto(_, Side::Q) => (vec![q, kv, o, lse, lse, q], vec![q, kv]),
            Kernel::AttentionBwdOnto(_, Side::Kv) => (vec![q, kv, o, lse, lse, kv], vec![q, kv]),
            Kernel::AttentionOnto(_) => (vec![q, kv, o, lse], vec![o, lse]),
            Kernel::AddLse(_) => (vec![lse, lse], vec![lse]),
            Kernel::AddWeighted(_) => (vec![o, o, lse, lse], vec![o]),
            Kernel::MergeLse(_) => (vec![o, lse, o, lse], vec![o, lse]),
            _ => (vec![q, kv], vec![o, lse]),
        };
        Operands { reads, writes }
    }
}
