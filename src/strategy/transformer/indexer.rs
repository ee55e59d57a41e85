//! The projections of a lightning indexer (DeepSeek-V3.2-Exp, section 1), and the gradients of its weights.
//!
//! ```text
//! compressed queries -> q up, turned             -> index queries of its heads
//! x -> k down -> LayerNorm, turned               -> one index key
//! x -> weights of its heads
//! ```
//! Both inputs are detached: nothing goes back to them. DeepSeek's Hadamard transform of queries and keys is left out, which changes
//! no product of them before they are rounded.

use super::super::sparse::Index;
use super::super::weights::{Rows, Weights};
use super::{Flats, linear, linear_dw};
use crate::plan::sparse::{SparseKernel, Turn};
use crate::plan::{Buf, Builder, Dtype, Kernel, TensorKind};
use crate::spec::{IndexerSpec, LlmSpec};

/// The places of the indexer's weights among the rows of the flat weight tensor.
#[derive(Clone, Copy)]
pub struct WeightRows {
    q: Rows,
    k: Rows,
    /// Weight and bias of the norm.
    norm: Rows,
    heads: Rows,
}

impl WeightRows {
    pub fn new(w: &mut Weights, model: &LlmSpec, indexer: &IndexerSpec, q_lora: u64) -> WeightRows {
        let (h, IndexerSpec { heads, head_dim, .. }) = (model.hidden, *indexer);
        WeightRows {
            q: w.whole("self_attn.indexer.wq_b.weight", &[heads * head_dim, q_lora]),
            k: w.whole("self_attn.indexer.wk.weight", &[head_dim, h]),
            norm: {
                let weight = w.whole("self_attn.indexer.k_norm.weight", &[head_dim]);
                [weight[0], w.whole("self_attn.indexer.k_norm.bias", &[head_dim])[1]]
            },
            heads: w.whole("self_attn.indexer.weights_proj.weight", &[heads, h]),
        }
    }
}

pub struct Indexer {
    pub spec: IndexerSpec,
    pub rows: WeightRows,
    pub q_lora: u64,
    pub hidden: u64,
    pub tokens: u64,
    /// How a head of its queries turns; keys have one head.
    pub turn: Turn,
    pub dtype: Dtype,
    pub fp8: bool,
}

/// The keys before their norm, kept for the backward pass.
#[derive(Clone, Copy)]
pub struct Saved {
    down: Buf,
}

impl Saved {
    pub fn buf_mut(&mut self) -> (&'static str, &mut Buf) {
        ("index_k_down", &mut self.down)
    }
}

pub struct Scratch {
    d_down: Buf,
}

impl Indexer {
    pub fn saved(&self, keep: &mut dyn FnMut(&str, u64, u64, Dtype) -> Buf) -> Saved {
        Saved { down: keep("index_k_down", self.tokens, self.spec.head_dim, self.dtype) }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let shape = [self.tokens, self.spec.head_dim];
        Scratch { d_down: b.tensor("d_index_k_down", &shape, self.dtype, TensorKind::Workspace, 1) }
    }

    fn turned(&self, b: &mut Builder, label: &str, heads: u64, x: Buf, backward: bool) {
        let turn = Turn { heads, ..self.turn.clone() };
        b.compute(label, Kernel::Sparse(SparseKernel::Turn { turn, backward }), &[x], &[x]);
    }

    /// Makes index queries, keys and weights from the layer's normed input and the compressed queries; with `again`
    /// only the queries.
    pub fn forward(&self, b: &mut Builder, w: Flats, [x, latent]: [Buf; 2], keep: &Saved, to: Index, again: bool) {
        let (n, h, IndexerSpec { heads, head_dim: d, .. }) = (self.tokens, self.hidden, self.spec);
        b.compute("index_q", linear(n, heads * d, self.q_lora, self.fp8), &[latent, w.at(self.rows.q)], &[to.q]);
        self.turned(b, "index_q_rope", heads, to.q, false);
        if again {
            return;
        }
        b.compute("index_k", linear(n, d, h, self.fp8), &[x, w.at(self.rows.k)], &[keep.down]);
        let norm = Kernel::LayerNorm { rows: n, cols: d, eps: IndexerSpec::NORM_EPS, bias: true };
        b.compute("index_k_norm", norm, &[keep.down, w.at(self.rows.norm)], &[to.k]);
        self.turned(b, "index_k_rope", 1, to.k, false);
        b.compute("index_w", linear(n, heads, h, false), &[x, w.at(self.rows.heads)], &[to.w]);
    }

    /// Adds the gradients of the indexer's weights to `g`, from those of its queries, keys and weights of heads.
    pub fn backward(
        &self,
        b: &mut Builder,
        s: &Scratch,
        [w, g]: [Flats; 2],
        [x, latent]: [Buf; 2],
        keep: &Saved,
        [d_q, d_k, d_w]: [Buf; 3],
    ) {
        let (n, h, IndexerSpec { heads, head_dim: d, .. }) = (self.tokens, self.hidden, self.spec);
        let dw = |b: &mut Builder, label: &str, [out, inp]: [u64; 2], fp8, [dy, x]: [Buf; 2], at: Rows| {
            b.compute(label, linear_dw(out, inp, n, fp8), &[dy, x, g.at(at)], &[g.at(at)]);
        };
        self.turned(b, "index_q_rope_bwd", heads, d_q, true);
        dw(b, "index_q_dw", [heads * d, self.q_lora], self.fp8, [d_q, latent], self.rows.q);
        self.turned(b, "index_k_rope_bwd", 1, d_k, true);
        // A norm adds its gradient to that of a branch beside it, of which there is none here.
        b.compute("index_k_zero", Kernel::Fill { elems: n * d }, &[], &[s.d_down]);
        let norm = Kernel::LayerNormBwd { rows: n, cols: d, eps: IndexerSpec::NORM_EPS, bias: true };
        let [weight, grad] = [w, g].map(|flat| flat.at(self.rows.norm));
        b.compute("index_k_norm_bwd", norm, &[keep.down, weight, d_k, s.d_down, grad], &[s.d_down, grad]);
        dw(b, "index_k_dw", [d, h], self.fp8, [s.d_down, x], self.rows.k);
        dw(b, "index_w_dw", [heads, h], false, [d_w, x], self.rows.heads);
    }
}
