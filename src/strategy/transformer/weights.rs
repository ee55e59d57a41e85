//! The weights of a layer, one behind the other.

use super::super::norm::Norms;
use super::super::tensor::TensorParallel;
use super::super::weights::{Rows, Weights};
use super::{latent, width};
use crate::spec::{LlmSpec, Mlp};

/// Rows of the flat weight tensor of a layer.
#[derive(Default)]
pub(super) struct WeightRows {
    pub norm1: Rows,
    /// `None`: attention's serves, in a parallel block.
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
    /// Of queries and keys, head by head.
    pub head_norms: Option<Rows>,
    /// In place of `qkv`.
    pub latent: Option<latent::WeightRows>,
}

/// The weights of a layer, in the order of its flat tensor.
pub(super) fn weights(model: &LlmSpec, tp: &TensorParallel, norms: &Norms) -> (WeightRows, Weights) {
    let (h, f, q, kv) = (model.hidden, width(model), model.q_cols(), model.kv_cols());
    let o = model.mla.map_or(q, |mla| model.heads * mla.v_dim);
    let swiglu = model.mlp == Mlp::SwiGlu;
    let (up, wide) = match (swiglu, model.moe) {
        (_, Some(_)) => ("mlp.shared_experts.gate_up_proj.weight", vec![f, f]),
        (true, None) => ("mlp.gate_up_proj.weight", vec![f, f]),
        (false, None) => ("mlp.up_proj.weight", vec![f]),
    };
    let down = if model.moe.is_some() { "mlp.shared_experts.down_proj.weight" } else { "mlp.down_proj.weight" };
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
            rows.qkv = w.cut("self_attn.qkv_proj.weight", &[q + 2 * kv, h], 0, &[q, kv, kv]);
            rows.qkv_bias =
                model.biased_qkv().then(|| w.cut("self_attn.qkv_proj.bias", &[q + 2 * kv], 0, &[q, kv, kv]));
        }
    }
    rows.o = w.cut("self_attn.o_proj.weight", &[h, o], 1, &[o]);
    rows.gate_up = if f > 0 { w.cut(up, &[wide_cols, h], 0, &wide) } else { [0, 0] };
    rows.up_bias = model.bias.then(|| w.cut(up_bias, &[wide_cols], 0, &wide));
    rows.down = if f > 0 { w.cut(down, &[h, f], 1, &[f]) } else { [0, 0] };
    (rows, w)
}
