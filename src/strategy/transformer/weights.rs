//! The weights of a layer, one behind the other.

use super::super::norm::Norms;
use super::super::tensor::TensorParallel;
use super::super::weights::{Rows, Weights};
use super::{latent, mamba, width};
use crate::spec::{LlmSpec, Mixer, Mlp};

/// The places of a layer's weights among the rows of its flat weight tensor.
#[derive(Default)]
pub(super) struct WeightRows {
    pub norm1: Rows,
    /// The second norm; `None`: attention's norm serves for it, in a parallel block.
    pub norm2: Option<Rows>,
    pub o_bias: Option<Rows>,
    pub down_bias: Option<Rows>,
    pub qkv: Rows,
    pub qkv_bias: Option<Rows>,
    pub o: Rows,
    pub gate_up: Rows,
    pub up_bias: Option<Rows>,
    pub down: Rows,
    pub router: Option<Rows>,
    /// Norms of queries and keys, head by head; `None` without such norms.
    pub head_norms: Option<Rows>,
    /// The weights of latent attention in place of `qkv`; `None` without it.
    pub latent: Option<latent::WeightRows>,
    /// Projections for experts that work on fewer columns: to these, and back; else `None`.
    pub squeezed: Option<[Rows; 2]>,
    pub mamba: Option<mamba::WeightRows>,
}

impl WeightRows {
    pub fn norm2(&self) -> Rows {
        self.norm2.expect("there is a norm before the second half")
    }
}

/// The weights of a layer of one mixer alone.
fn alone(model: &LlmSpec, tp: &TensorParallel, norms: &Norms, mixer: Mixer) -> (WeightRows, Weights) {
    let (h, f, q, kv) = (model.hidden, width(model), model.q_cols(), model.kv_cols());
    let mut w = Weights::new(tp);
    let norm = norms.weights(&mut w, "norm.weight", "norm.bias");
    let mut rows = WeightRows { norm1: norm, norm2: Some(norm), ..WeightRows::default() };
    match (mixer, &model.mamba) {
        (Mixer::Mamba, Some(mamba)) => rows.mamba = Some(mamba::WeightRows::new(&mut w, mamba, h)),
        (Mixer::Attention, _) => {
            rows.qkv =
                w.cut_in_copies("self_attn.qkv_proj.weight", &[q + 2 * kv, h], 0, &[q, kv, kv], &copies(model, tp));
            rows.o = w.cut("self_attn.o_proj.weight", &[h, q], 1, &[q]);
        }
        _ => {
            if let Some(moe) = model.moe {
                rows.router = Some(w.whole("mlp.gate.weight", &[moe.experts, h]));
                rows.squeezed = (moe.latent > 0).then(|| {
                    let down = w.whole("mlp.fc1_latent_proj.weight", &[moe.latent, h]);
                    [down, w.whole("mlp.fc2_latent_proj.weight", &[h, moe.latent])]
                });
            }
            let [up, down] = network(model);
            let wide = vec![f; if model.mlp == Mlp::SwiGlu { 2 } else { 1 }];
            if f > 0 {
                rows.gate_up = w.cut(up, &[wide.iter().sum(), h], 0, &wide);
                rows.down = w.cut(down, &[h, f], 1, &[f]);
            }
        }
    }
    (rows, w)
}

/// Number of ranks that have the same part of q, of k and of v.
fn copies(model: &LlmSpec, tp: &TensorParallel) -> [u64; 3] {
    let (_, copies) = tp.kv_heads(model.attended_kv_heads());
    [1, copies, copies]
}

/// The names of the weights of the network that every token visits.
fn network(model: &LlmSpec) -> [&'static str; 2] {
    let up = match (model.mlp == Mlp::SwiGlu, model.moe) {
        (true, Some(_)) => "mlp.shared_experts.gate_up_proj.weight",
        (false, Some(_)) => "mlp.shared_experts.up_proj.weight",
        (true, None) => "mlp.gate_up_proj.weight",
        (false, None) => "mlp.up_proj.weight",
    };
    [up, if model.moe.is_some() { "mlp.shared_experts.down_proj.weight" } else { "mlp.down_proj.weight" }]
}

/// The weights of a layer, in the order of its flat tensor.
pub(super) fn weights(model: &LlmSpec, tp: &TensorParallel, norms: &Norms) -> (WeightRows, Weights) {
    if let Some(&mixer) = model.pattern.first() {
        return alone(model, tp, norms, mixer);
    }
    let (h, f, q, kv) = (model.hidden, width(model), model.q_cols(), model.kv_cols());
    let o = model.mla.map_or(q, |mla| model.heads * mla.v_dim);
    let swiglu = model.mlp == Mlp::SwiGlu;
    let [up, down] = network(model);
    let wide = vec![f; if swiglu { 2 } else { 1 }];
    let up_bias = if swiglu { "mlp.gate_up_proj.bias" } else { "mlp.up_proj.bias" };
    let wide_cols: u64 = wide.iter().sum();
    let mut w = Weights::new(tp);
    let one_norm = model.parallel_block && !model.own_norms;
    let mut rows = WeightRows {
        norm1: norms.weights(&mut w, "input_layernorm.weight", "input_layernorm.bias"),
        norm2: (!one_norm)
            .then(|| norms.weights(&mut w, "post_attention_layernorm.weight", "post_attention_layernorm.bias")),
        router: model.moe.map(|moe| w.whole("mlp.gate.weight", &[moe.experts, h])),
        o_bias: model.bias.then(|| w.whole("self_attn.o_proj.bias", &[h])),
        down_bias: model.bias.then(|| w.whole("mlp.down_proj.bias", &[h])),
        head_norms: model.qk_norm.then(|| {
            let q = w.whole_by_heads("self_attn.q_norm.weight", &[model.head_dim]);
            let k = w.whole_by_heads("self_attn.k_norm.weight", &[model.head_dim]);
            [q[0], k[1]]
        }),
        ..WeightRows::default()
    };
    match &model.mla {
        Some(mla) => {
            let whole = latent::Whole::weights(&mut w, model, mla);
            rows.latent = Some(whole.and_cut(&mut w, model, mla));
        }
        None => {
            let (blocks, copies) = ([q, kv, kv], copies(model, tp));
            rows.qkv = w.cut_in_copies("self_attn.qkv_proj.weight", &[q + 2 * kv, h], 0, &blocks, &copies);
            rows.qkv_bias = (model.biased_qkv())
                .then(|| w.cut_in_copies("self_attn.qkv_proj.bias", &[q + 2 * kv], 0, &blocks, &copies));
        }
    }
    rows.o = w.cut("self_attn.o_proj.weight", &[h, o], 1, &[o]);
    rows.gate_up = if f > 0 { w.cut(up, &[wide_cols, h], 0, &wide) } else { [0, 0] };
    rows.up_bias = model.bias.then(|| w.cut(up_bias, &[wide_cols], 0, &wide));
    rows.down = if f > 0 { w.cut(down, &[h, f], 1, &[f]) } else { [0, 0] };
    (rows, w)
}
