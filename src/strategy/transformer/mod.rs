//! A transformer layer, Llama's or GPT's, forward and backward, op by op. How attention talks to other ranks
//! is [`ulysses`](super::ulysses)'s and [`attention`](super::attention)'s affair, how the ranks share a product
//! [`tensor`](super::tensor)'s.
//!
//! Legend: n tokens of a microbatch on this rank, h hidden, a heads, k KV heads, d head dim, f feed-forward
//! width; a, k and f are this tensor-parallel rank's share. Between the products a rank has r of the n tokens.

mod alone;
mod backward;
mod buffers;
mod chunked;
mod codes;
mod flats;
mod forward;
mod indexer;
mod latent;
mod mamba;
mod tiled;
mod weights;

pub use buffers::{Saved, Scratch};
pub use flats::Flats;

use super::attention::{Core, Way};
use super::expert::Experts;
use super::norm::Norms;
use super::sparse::Sparse;
use super::step::Engines;
use super::tensor::TensorParallel;
use super::ulysses::Ulysses;
use super::weights::{Weight, Weights};
use crate::plan::{Buf, Builder, Dtype, Kernel, Route, Segs};
use crate::spec::{
    AttentionSpec, LlmSpec, Mixer, Mlp, Parallelism, Positions, Recompute, RopeScaling, WideLoss, Workload,
};
use latent::Latent;
use mamba::{Mamba, Spread};
use weights::WeightRows;

/// Everything a layer's ops need to know.
pub struct Layer {
    /// The layer of each chunk of the sequence, where it goes chunk by chunk; else empty.
    chunks: Vec<Layer>,
    pub hidden: u64,
    heads: u64,
    kv_heads: u64,
    /// Tensor-parallel ranks that have the same KV heads.
    kv_copies: u64,
    head_dim: u64,
    /// Elements of a head's value.
    v_dim: u64,
    ffn: u64,
    /// Columns of the product before the activation: gate and up, or one of them.
    wide: u64,
    mlp: Mlp,
    norms: Norms,
    theta: f64,
    scaling: Option<RopeScaling>,
    rotary: Option<u64>,
    parallel: bool,
    /// The one mixer of a hybrid's single-mixer layer; `None`: the layer has attention and an MLP.
    alone: Option<Mixer>,
    dropout: f64,
    batch: u64,
    /// Tokens of one sequence on this rank.
    seq: u64,
    /// Where those tokens stand in the sequence.
    pub segs: Segs,
    pub core: Core,
    /// Whether the backward pass begins with the kernel of attention run again (see [`Recompute::Selective`]).
    attends_again: bool,
    /// Whether attention's output is kept, and attention not run again, where the rest of the layer is computed again.
    pub keeps_attention: bool,
    /// The exchange around attention; `None` when the Ulysses degree is 1.
    ulysses: Option<Ulysses>,
    /// Latent attention in place of one projection to q, k and v; `None`: that projection.
    latent: Option<Latent>,
    mamba: Option<Mamba>,
    dtype: Dtype,
    /// Dtype of the gradients of weights.
    pub grads: Dtype,
    pub tp: TensorParallel,
    fp8: bool,
    rows: WeightRows,
    pub(in crate::strategy) weights: Weights,
    /// The experts; the network beside them is then the experts that every token visits. `None` without experts.
    pub experts: Option<Experts>,
    overlap_shared: bool,
    pub add_grads: bool,
    pub wide_loss: WideLoss,
    /// Pieces of a microbatch that the loss goes through; 0: all at once.
    pub loss_chunks: u64,
    /// Pieces of a microbatch that the network goes through, and again in the backward pass; `None`: all at once.
    mlp_chunks: Option<u64>,
    /// Whether the output of the activation is made again for the backward pass, and the outputs of norms.
    act_again: bool,
    norms_again: bool,
    /// Whether a dense network keeps its input alone, and is made again for the backward pass up to its activation's output.
    mlp_again: bool,
    /// Whether of what norms and activations leave for products in FP8 codes are kept.
    keeps_codes: bool,
    /// Whether the experts' half keeps its input alone, and runs again in the backward pass.
    experts_again: bool,
}

/// y[n, out] = x[n, in] W^T, W stored [out, in] as checkpoints have it.
pub fn linear(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8, bias: false }
}

/// dx[n, in] = dy[n, out] W.
pub fn linear_dx(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: false, accumulate: false, fp8, bias: false }
}

/// dW[out, in] += dy^T x.
pub fn linear_dw(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: true, b_t: false, accumulate: true, fp8, bias: false }
}

/// Adds the product of `reads` to a weight's gradient: at once, or by way of a room of its own.
pub fn weight_grad(b: &mut Builder, label: &str, product: Kernel, reads: [Buf; 2], grad: Buf, room: Option<Buf>) {
    let (&Kernel::MatMul { m, n, k, a_t, b_t, fp8, bias, .. }, Some(room)) = (&product, room) else {
        b.compute(label, product, &[reads[0], reads[1], grad], &[grad]);
        return;
    };
    let (elems, room) = (m * n, room.rows(0, m * n));
    let alone = Kernel::MatMul { m, n, k, a_t, b_t, accumulate: false, fp8, bias };
    b.compute(label, alone, &reads, &[room]);
    b.compute(&format!("{label}_add"), Kernel::Add { elems, trim: None }, &[grad, room], &[grad]);
}

/// Columns of the network that every token visits; 0: there is none.
pub fn width(model: &LlmSpec) -> u64 {
    model.moe.map_or(model.ffn, |moe| moe.shared_ffn)
}

/// A product with one more operand: a bias, or sums that it adds to.
fn with(kernel: Kernel, adds: bool, biased: bool) -> Kernel {
    match kernel {
        Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8, .. } => {
            Kernel::MatMul { m, n, k, a_t, b_t, accumulate: accumulate || adds, fp8, bias: biased }
        }
        other => other,
    }
}

/// The attention of a microbatch's whole sequences, with this tensor-parallel rank's heads.
fn attention(model: &LlmSpec, work: &Workload, tp: &TensorParallel) -> AttentionSpec {
    AttentionSpec {
        batch: work.micro_batch,
        seq_len: work.seq_len,
        heads: model.heads / tp.ranks,
        kv_heads: tp.kv_heads(model.attended_kv_heads()).0,
        head_dim: model.qk_dim(),
        mask: model.mask(&work.documents),
        dtype: work.dtype,
    }
}

impl Layer {
    pub fn new(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines, routes: &[Route]) -> Layer {
        let of = |chunk| Layer::of_chunk(model, work, par, engines, routes, chunk);
        Layer { chunks: (0..par.options.chunks).map(|chunk| of(Some(chunk))).collect(), ..of(None) }
    }

    fn of_chunk(
        model: &LlmSpec,
        work: &Workload,
        par: &Parallelism,
        engines: Engines,
        routes: &[Route],
        chunk: Option<u32>,
    ) -> Layer {
        let parts = if chunk.is_some() { u64::from(par.options.chunks) } else { 1 };
        let tokens = work.micro_batch * work.seq_len / (u64::from(par.ring) * u64::from(par.ulysses)) / parts;
        let tp = TensorParallel::new(par, tokens, work.dtype, engines.collective);
        let attention = attention(model, work, &tp);
        let latent = model.mla.map(|mla| (mla.v_dim, model.score_factor()));
        let Way { segs, seq, core, ulysses } = Way::of_chunk(&attention, latent, model.dropout, par, engines, chunk);
        let v_dim = core.shape().block.v_dim();
        let core = match model.mla.zip(model.indexer) {
            Some(both) => Core::Sparse(Sparse::new(core.shape(), both, model, work, par, engines.collective)),
            None => core,
        };
        let norms = Norms::new(model, tp.share(work.micro_batch * seq));
        let (mut rows, weights) = weights::weights(model, &tp, &norms);
        let ffn = width(model) / tp.ranks;
        let acc = core.shape().acc;
        let grads = if par.options.bf16_grads { work.dtype } else { acc };
        let dtypes = [work.dtype, acc, grads];
        let experts = Experts::new(model, par, engines, routes, dtypes, [norms.rows, work.micro_batch]);
        let latent = model.mla.zip(rows.latent.take());
        let latent = latent.map(|own| Latent::new(own, model, work, par, tp, [seq, norms.rows], &segs));
        let alone = model.pattern.first().copied();
        let experts_again = experts.as_ref().is_some_and(|experts| experts.again);
        let attends = alone.is_none_or(|mixer| mixer == Mixer::Attention);
        let mamba = model.mamba.zip(rows.mamba.take()).map(|own| {
            let spread = Spread::new(par, [work.micro_batch, seq], &segs, work.dtype, engines);
            Mamba::new(own, model, work, tp.ranks, seq, grads, spread)
        });
        Layer {
            chunks: vec![],
            hidden: model.hidden,
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            kv_copies: tp.kv_heads(model.attended_kv_heads()).1,
            head_dim: attention.head_dim,
            v_dim,
            ffn,
            wide: if model.mlp == Mlp::SwiGlu { 2 * ffn } else { ffn },
            mlp: model.mlp,
            norms,
            theta: model.rope_theta,
            scaling: model.rope_scaling.clone(),
            rotary: if model.positions == Positions::Rope { model.rotary_dim } else { Some(0) },
            parallel: model.parallel_block,
            alone,
            dropout: model.dropout,
            batch: work.micro_batch,
            seq,
            segs,
            core,
            attends_again: par.recompute == Recompute::Selective && !par.options.unfused,
            keeps_attention: attends && par.options.keep_attention,
            ulysses,
            latent,
            mamba,
            dtype: work.dtype,
            grads,
            tp,
            fp8: par.options.fp8,
            rows,
            weights,
            experts,
            overlap_shared: par.options.overlap_shared,
            add_grads: par.options.add_grads,
            wide_loss: par.options.wide_loss,
            loss_chunks: u64::from(par.options.loss_chunks),
            mlp_chunks: Some(u64::from(par.options.mlp_chunks)).filter(|n| *n > 0),
            act_again: par.options.recompute_act && !experts_again,
            norms_again: par.options.recompute_norm,
            mlp_again: par.options.recompute_mlp,
            keeps_codes: par.options.keep_fp8,
            experts_again,
        }
    }

    /// Chunks of the sequence that the layer goes through one by one; 1: all at once.
    pub fn chunk_count(&self) -> u64 {
        self.chunks.len().max(1) as u64
    }

    /// Tokens of a microbatch that this rank and its tensor-parallel peers work on.
    pub fn tokens(&self) -> u64 {
        self.batch * self.seq
    }

    /// The number of tokens that this rank has between the products.
    pub fn residual_rows(&self) -> u64 {
        self.tp.share(self.tokens())
    }

    /// Whether the layer has attention.
    fn attends(&self) -> bool {
        self.alone.is_none_or(|mixer| mixer == Mixer::Attention)
    }

    fn q_row(&self) -> u64 {
        self.heads * self.head_dim
    }

    fn kv_row(&self) -> u64 {
        self.kv_heads * (self.head_dim + self.v_dim)
    }

    fn o_row(&self) -> u64 {
        self.heads * self.v_dim
    }

    fn qk_row(&self) -> u64 {
        (self.heads + self.kv_heads) * self.head_dim
    }

    fn qkv_row(&self) -> u64 {
        self.q_row() + self.kv_row()
    }

    /// Elements of a layer's weights on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    fn head_norm(&self, backward: bool) -> Kernel {
        let (rows, heads, kv_heads, head_dim) = (self.tokens(), self.heads, self.kv_heads, self.head_dim);
        match backward {
            false => Kernel::HeadNorm { rows, heads, kv_heads, head_dim, eps: self.norms.eps },
            true => Kernel::HeadNormBwd { rows, heads, kv_heads, head_dim, eps: self.norms.eps },
        }
    }

    fn rope(&self, backward: bool) -> Kernel {
        let (batch, heads, kv_heads, head_dim) = (self.batch, self.heads, self.kv_heads, self.head_dim);
        let (segs, theta, rotary, scaling) = (self.segs.clone(), self.theta, self.rotary, self.scaling.clone());
        let documents = self.core.shape().block.mask.documents.clone();
        Kernel::Rope { segs, documents, batch, heads, kv_heads, head_dim, theta, backward, rotary, scaling }
    }
}
