//! Qwen3-Next: three layers of four have linear attention (the gated delta rule, arXiv:2412.06464), the fourth softmax
//! attention; behind each stand experts.
//!
//! A layer is two mixers, each behind a norm and beside a residual, as the layers of a hybrid are. The gated delta rule has
//! the projections, the convolution and the states of a Mamba-2 mixer: queries and keys in place of C and B, values in place
//! of x.

use super::mixtures::qwen_experts;
use super::{Config, llama_like, placed, turned};
use crate::error::Result;
use crate::spec::{LlmSpec, MambaSpec, Mixer, MoeSpec};
use serde_json::Value;

/// Tokens that the kernels of flash-linear-attention take at a time.
const CHUNK: u64 = 64;

pub fn read(config: &Config) -> Result<LlmSpec> {
    let like = llama_like(config)?;
    let moe = qwen_experts(config)?;
    if moe.every > 1 {
        let why = format!("{}: only experts in every layer are modelled here; use 1", moe.every);
        return Err(config.wrong("decoder_sparse_step", why));
    }
    let [key_dim, value_dim] = [config.count("linear_key_head_dim")?, config.count("linear_value_head_dim")?];
    let [groups, heads] = [config.count("linear_num_key_heads")?, config.count("linear_num_value_heads")?];
    if !heads.is_multiple_of(groups) {
        let why = format!("{groups} does not divide the {heads} of linear_num_value_heads; use a divisor of {heads}");
        return Err(config.wrong("linear_num_key_heads", why));
    }
    let conv = config.optional_count("linear_conv_kernel_dim")?.unwrap_or(4);
    let dense_at = placed::layers(config, "mlp_only_layers", like.layers)?;
    let behind = |layer: u64| if dense_at.contains(&layer) { Mixer::Mlp } else { Mixer::Experts };
    let mixers = (0..).zip(layers(config, like.layers)?);
    let pattern: Vec<Mixer> = mixers.flat_map(|(layer, mixer)| [mixer, behind(layer)]).collect();
    let attending = pattern.iter().filter(|mixer| **mixer == Mixer::Attention).count() as u64;
    let gate = attending * like.hidden * like.heads * like.head_dim;
    let notes = vec![
        "linear_attention: the gated delta rule is costed as a Mamba-2 mixer of as many heads and states; what it multiplies \
         within chunks beyond that is left out"
            .into(),
        format!(
            "qwen3_next: the output gate of attention is left out: {:.0} million weights, each in a product for every token; \
             so are the norms of its heads and the gate of the shared expert, which are small; a layer counts as two, a mixer \
             and its experts",
            gate as f64 * 1e-6
        ),
    ];
    Ok(LlmSpec {
        layers: pattern.len() as u64,
        pattern,
        mamba: Some(MambaSpec { heads, head_dim: value_dim, groups, state: key_dim, conv, chunk: CHUNK }),
        moe: Some(MoeSpec { every: 0, ..moe }),
        mtp: None,
        rotary_dim: turned(config.rotary_share(0.25)?, like.head_dim),
        notes,
        ..like
    })
}

/// What each of `count` layers has before its experts: a list of words, or softmax attention in each so-manieth.
fn layers(config: &Config, count: u64) -> Result<Vec<Mixer>> {
    if let Some(words) = config.value("layer_types").and_then(Value::as_array) {
        let mixer = |word: &Value| match word.as_str() {
            Some("linear_attention") => Ok(Mixer::Mamba),
            Some("full_attention") => Ok(Mixer::Attention),
            _ => {
                let why = format!("{word} is no layer of this model type; use linear_attention or full_attention");
                Err(config.wrong("layer_types", why))
            }
        };
        let all = words.iter().map(mixer).collect::<Result<Vec<Mixer>>>()?;
        if all.len() as u64 != count {
            let why = format!("{} layers, but num_hidden_layers is {count}; correct one of them", all.len());
            return Err(config.wrong("layer_types", why));
        }
        return Ok(all);
    }
    let every = config.optional_count("full_attention_interval")?.unwrap_or(4);
    let of = |layer: u64| if layer.is_multiple_of(every) { Mixer::Attention } else { Mixer::Mamba };
    Ok((1..=count).map(of).collect())
}
