//! DeepSeek Sparse Attention (DeepSeek-V3.2-Exp; github:deepseek-ai/DeepSeek-V3.2-Exp): a lightning indexer scores all keys that a
//! query may see, and latent attention sees the ones with the highest scores, in its absorbed form: one key for all heads, the
//! compressed row and the part that is turned, whose first columns are the value.
//!
//! Legend: n queries of a microbatch on this rank, s keys of a sequence, a heads, kl the compressed width of keys and values, dn, dr
//! and dv a head's elements that are not turned, that are, and of its value; i and di heads of the indexer and their elements, t
//! the keys that a query sees at most.
//!
//! A query sees as many of the chosen keys as it would in a window of t: areas are those of that window.

use super::kernel::{AttnBlock, Operands, Pairs, Work, WorkClass};
use super::mesh::Mesh;
use super::segs::Segs;
use super::visible::BlockShape;
use crate::spec::{Documents, RopeScaling};
use serde::{Deserialize, Serialize};

/// Times that the choice reads a score after it was written: once to count where the t-th highest lies, once to take
/// those above it. Assumed; a radix select may read once more.
pub const READS_OF_SCORES: u64 = 2;

/// Bytes of a score, which are f32 whatever queries and keys are.
const SCORE_BYTES: u64 = 4;

/// The part of each head that turns with its row's position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    pub segs: Segs,
    #[serde(default, skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
    pub batch: u64,
    pub heads: u64,
    /// Elements of a head that go through, then those that turn, then others behind them.
    pub before: u64,
    pub rope: u64,
    pub behind: u64,
    pub theta: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RopeScaling>,
    /// Whether neighbouring elements turn together, rather than the halves of what turns.
    pub interleaved: bool,
}

impl Turn {
    fn width(&self) -> u64 {
        self.before + self.rope + self.behind
    }
}

/// The half of a head's matrix that is multiplied with: keys' `[dn, kl]`, or values' `[dv, kl]` behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Half {
    Key,
    Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Product {
    Forward,
    Dx,
    Dw,
}

/// A product of every head with its own matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadProduct {
    pub rows: u64,
    pub heads: u64,
    pub lora: u64,
    pub nope: u64,
    pub rope: u64,
    pub v: u64,
    pub half: Half,
    pub product: Product,
}

impl HeadProduct {
    /// Elements of the narrow and of the wide side, with what goes through beside the product.
    fn sides(&self) -> [u64; 2] {
        let n = self.rows * self.heads;
        match self.half {
            Half::Key => [n * (self.nope + self.rope), n * (self.lora + self.rope)],
            Half::Value => [n * self.v, n * self.lora],
        }
    }

    /// The narrow side of a head's matrix, in elements.
    pub fn narrow(&self) -> u64 {
        match self.half {
            Half::Key => self.nope,
            Half::Value => self.v,
        }
    }

    fn weights(&self) -> u64 {
        self.heads * (self.nope + self.v) * self.lora
    }

    fn operands(&self) -> Operands {
        let ([narrow, wide], w) = (self.sides(), self.weights());
        let (reads, writes) = match (self.half, self.product) {
            (_, Product::Dw) => (vec![narrow, wide, w], w),
            (Half::Key, Product::Forward) | (Half::Value, Product::Dx) => (vec![narrow, w], wide),
            (Half::Key, Product::Dx) | (Half::Value, Product::Forward) => (vec![wide, w], narrow),
        };
        Operands { reads, writes: vec![writes] }
    }

    /// The work: the products of all heads are one tall product, as in one call of a library for batches of them.
    fn work(&self, reads: &[u64], writes: &[u64]) -> Work {
        let (rows, narrow, lora) = (self.rows * self.heads, self.narrow(), self.lora);
        let of_weights = |bytes: u64| bytes * narrow / (self.nope + self.v);
        let (m, n, k, bytes, result) = match (self.half, self.product) {
            (_, Product::Dw) => {
                let bytes = reads[0] + reads[1] + of_weights(reads[2] + writes[0]);
                (self.heads * narrow, lora, self.rows, bytes, 2 * writes[0] / self.weights().max(1))
            }
            (Half::Key, Product::Forward) | (Half::Value, Product::Dx) => {
                (rows, lora, narrow, reads[0] + of_weights(reads[1]) + writes[0], writes[0] / (rows * lora).max(1))
            }
            _ => (rows, narrow, lora, reads[0] + of_weights(reads[1]) + writes[0], writes[0] / (rows * narrow).max(1)),
        };
        let of_weights = self.product == Product::Dw;
        let class = WorkClass::Gemm { m, n, k, cast: 0, result, groups: 1, unaligned: false, of_weights };
        Work { flops: 2 * m * n * k, bytes, class }
    }
}

/// The scores of an indexer, and the keys that they choose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Indexer {
    /// The indexer's heads and their elements. The mask is that of all keys that a query may see where it scores, and
    /// has a window of `top_k` in the backward pass.
    pub block: AttnBlock,
    pub top_k: u64,
    /// Whether queries and keys are rounded to E4M3 for the scores, a head at a time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fp8: bool,
}

impl Indexer {
    /// The factor of heads' weights: i^-1/2 di^-1/2.
    pub fn scale(&self) -> f64 {
        1.0 / ((self.block.heads * self.block.head_dim) as f64).sqrt()
    }
}

/// Latent attention, absorbed, to chosen keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chosen {
    /// One key for all heads, kl + dr wide, of which the value is the first kl columns. The mask has a window of as many keys as
    /// are chosen.
    pub block: AttnBlock,
    /// Keys that a query sees at most.
    pub top_k: u64,
    /// The factor of products of queries and keys.
    pub scale: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SparseKernel {
    /// Rotary embedding of a part of every head. Reads x [n, heads * (before + rope + behind)], which may be its result; writes x.
    Turn { turn: Turn, backward: bool },
    /// Compressed rows and the part of the keys that is turned, one behind the other. Reads [n, before], [n, rope]; writes
    /// [n, before + rope]. Backward reads its gradient and writes those of both.
    Join { turn: Turn, backward: bool },
    /// Queries of heads to the compressed width (W_uk), [n, a*(dn + dr)] to [n, a*(kl + dr)], or outcomes from it to values (W_uv),
    /// [n, a*kl] to [n, a*dv]; what turns goes through. Reads x, w [a*(dn + dv), kl]; writes y. Dx reads dy, w; writes dx. Dw
    /// reads the narrow side and the wide one, dw; writes dw, accumulated.
    Product(HeadProduct),
    /// I of t and s, the sum over heads h of w_th relu(q_th k_s), of all visible keys, and for each query the places of the
    /// `top_k` highest in their sequence, ascending; s stands for none. Of equal scores the earlier key is chosen. Reads
    /// q [n, i*di], k [b*s, di], w [n, i]; writes [n, t].
    Score(Indexer),
    /// The gradient of KL(p || softmax of I over chosen keys), times `part`, where p are the probabilities of attention, a mean over
    /// heads. Reads q, k, w, the chosen [n, t], p [n, t]; writes dq, dk, dw. Scores are not rounded here.
    ScoreBwd { of: Indexer, part: f64 },
    /// Reads q [n, a*(kl + dr)], keys [b*s, kl + dr], the chosen [n, t]; writes o [n, a*kl], lse [n, a].
    Attend(Chosen),
    /// Reads q, keys, do, lse, delta, the chosen; writes dq, the gradient of keys, and the probabilities, a mean over heads, [n, t].
    AttendBwd(Chosen),
}

impl SparseKernel {
    pub fn name(&self) -> &'static str {
        match self {
            SparseKernel::Turn { .. } => "partial_rope",
            SparseKernel::Join { .. } => "join_keys",
            SparseKernel::Product(_) => "head_matmul",
            SparseKernel::Score(_) => "lightning_index",
            SparseKernel::ScoreBwd { .. } => "lightning_index_bwd",
            SparseKernel::Attend(_) => "sparse_attention",
            SparseKernel::AttendBwd(_) => "sparse_attention_bwd",
        }
    }

    /// The curve of measured times that the kernel is on; products share the curves of products that every profile has.
    pub fn curve(&self) -> &'static str {
        match self {
            SparseKernel::Turn { backward: true, .. } => "partial_rope_bwd",
            SparseKernel::Join { backward: true, .. } => "join_keys_bwd",
            SparseKernel::Product(HeadProduct { product: Product::Dw, .. }) => "matmul_tn_onto",
            SparseKernel::Product(HeadProduct { half: Half::Value, product: Product::Forward, .. })
            | SparseKernel::Product(HeadProduct { half: Half::Key, product: Product::Dx, .. }) => "matmul_nt",
            SparseKernel::Product(_) => "matmul_nn",
            other => other.name(),
        }
    }

    /// Whether a framework runs the kernel in the forward pass.
    pub fn is_forward(&self) -> bool {
        match self {
            SparseKernel::Product(of) => of.product == Product::Forward,
            SparseKernel::Turn { backward, .. } | SparseKernel::Join { backward, .. } => !backward,
            SparseKernel::Score(_) | SparseKernel::Attend(_) => true,
            SparseKernel::ScoreBwd { .. } | SparseKernel::AttendBwd(_) => false,
        }
    }

    pub fn mask(&self) -> Option<&AttnBlock> {
        match self {
            SparseKernel::Score(of) | SparseKernel::ScoreBwd { of, .. } => Some(&of.block),
            SparseKernel::Attend(of) | SparseKernel::AttendBwd(of) => Some(&of.block),
            SparseKernel::Turn { .. } | SparseKernel::Join { .. } | SparseKernel::Product(_) => None,
        }
    }

    /// The positions of a kernel's rows, for a kernel without a mask that knows them; `None` for others.
    pub fn segs(&self) -> Option<&Segs> {
        match self {
            SparseKernel::Turn { turn, .. } | SparseKernel::Join { turn, .. } => Some(&turn.segs),
            _ => None,
        }
    }

    pub fn operands(&self, views: &[Mesh]) -> Operands {
        let of = |reads: &[u64], writes: &[u64]| Operands { reads: reads.to_vec(), writes: writes.to_vec() };
        let rows = |b: &AttnBlock| [b.batch * b.q.len(views), b.batch * b.kv.len(views)];
        match self {
            SparseKernel::Turn { turn, .. } => {
                let x = turn.batch * turn.segs.len(views) * turn.heads * turn.width();
                of(&[x], &[x])
            }
            SparseKernel::Join { turn, backward } => {
                let n = turn.batch * turn.segs.len(views);
                let (apart, joined) = ([n * turn.before, n * turn.rope], [n * (turn.before + turn.rope)]);
                if *backward { of(&joined, &apart) } else { of(&apart, &joined) }
            }
            SparseKernel::Product(product) => product.operands(),
            SparseKernel::Score(Indexer { block: b, top_k, .. }) => {
                let [n, s] = rows(b);
                of(&[n * b.q_row(), s * b.head_dim, n * b.heads], &[n * top_k])
            }
            SparseKernel::ScoreBwd { of: Indexer { block: b, top_k, .. }, .. } => {
                let [n, s] = rows(b);
                let each = [n * b.q_row(), s * b.head_dim, n * b.heads];
                of(&[each[0], each[1], each[2], n * top_k, n * top_k], &each)
            }
            SparseKernel::Attend(c) => {
                let ([n, s], b) = (rows(&c.block), &c.block);
                of(&[n * b.q_row(), s * b.head_dim, n * c.top_k], &[n * b.o_row(), n * b.heads])
            }
            SparseKernel::AttendBwd(c) => {
                let ([n, s], b) = (rows(&c.block), &c.block);
                let (q, keys, lse, chosen) = (n * b.q_row(), s * b.head_dim, n * b.heads, n * c.top_k);
                of(&[q, keys, n * b.o_row(), lse, lse, chosen], &[q, keys, chosen])
            }
        }
    }

    /// The work of a kernel without a mask, given the bytes of each operand.
    pub fn work(&self, reads: &[u64], writes: &[u64]) -> Work {
        let bytes = match self {
            SparseKernel::Product(product) => return product.work(reads, writes),
            // Elements that do not turn stay where they are.
            SparseKernel::Turn { turn, .. } => 2 * writes[0] * turn.rope / turn.width().max(1),
            _ => reads.iter().chain(writes).sum(),
        };
        Work { flops: 0, bytes, class: WorkClass::Memory }
    }

    /// The work of a kernel whose mask leaves `shape` of its block. Every operand passes by once: keys that several
    /// queries choose come from a cache, or the kernel's measured rate accounts for it.
    pub fn masked_work(&self, shape: BlockShape, reads: &[u64], writes: &[u64]) -> Work {
        let b = self.mask().expect("asked for kernels with a mask only");
        let bytes = reads.iter().chain(writes).sum();
        let product = |cols: u64| 2 * b.batch * shape.area * b.heads * cols;
        let (d, v) = (b.head_dim, b.v_dim());
        let (flops, pairs, backward) = match self {
            // Scores are written, and read by the kernel that chooses.
            SparseKernel::Score(of) => {
                let moved = (1 + READS_OF_SCORES) * SCORE_BYTES * b.batch * shape.area;
                (product(d), Pairs::Scored { fp8: of.fp8, moved }, false)
            }
            // Three products: the scores again, dQ and dK.
            SparseKernel::ScoreBwd { .. } => (product(3 * d), Pairs::Chosen, true),
            SparseKernel::AttendBwd(_) => (product(3 * d + 2 * v), Pairs::Chosen, true),
            _ => (product(d + v), Pairs::Chosen, false),
        };
        let class = WorkClass::Attention {
            q_rows: shape.q_rows,
            kv_rows: shape.kv_rows,
            area: shape.area,
            batch_heads: b.batch * b.heads,
            dims: [d, v],
            backward,
            pairs,
        };
        Work { flops, bytes, class }
    }
}
