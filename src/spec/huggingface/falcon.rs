//! Falcon (arXiv:2311.16867): attention and network beside each other, one KV head or a few, no biases.

use super::Config;
use crate::error::Result;
use crate::spec::{LlmSpec, Mlp, Norm, Positions};

pub fn read(config: &Config) -> Result<LlmSpec> {
    // Checkpoints say one or the other.
    let either = |old: &str, new: &str| config.optional_count(old)?.map_or_else(|| config.count(new), Ok);
    let (hidden, heads) = (either("n_embed", "hidden_size")?, either("n_head", "num_attention_heads")?);
    let newer = config.flag("new_decoder_architecture")?;
    let stated = match config.optional_count("num_kv_heads")? {
        Some(kv) => Some(kv),
        None => config.optional_count("n_head_kv")?,
    };
    let kv_heads = match (newer, config.flag_or("multi_query", true)?) {
        (true, _) => stated.unwrap_or(heads),
        (false, true) => 1,
        (false, false) => heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        let why = format!("{kv_heads} does not divide the {heads} heads; use a divisor of {heads}");
        return Err(config.wrong("num_kv_heads", why));
    }
    let parallel = config.flag_or("parallel_attn", true)? || newer;
    let one_norm = config.optional_count("num_ln_in_parallel_attn")? == Some(1);
    Ok(LlmSpec {
        hidden,
        layers: either("n_layer", "num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim: config.head_dim_of(hidden, heads, "hidden_size", "num_attention_heads")?,
        ffn: config.optional_count("ffn_hidden_size")?.unwrap_or(4 * hidden),
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        rope_theta: config.rope_theta()?,
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        norm: Norm::Layer,
        mlp: Mlp::Gelu,
        positions: if config.flag("alibi")? { Positions::Alibi } else { Positions::Rope },
        bias: config.flag("bias")?,
        parallel_block: parallel,
        own_norms: newer && !one_norm,
        dropout: config.probability("hidden_dropout")?.unwrap_or(0.0),
        notes: vec!["falcon: biases of norms are left out (two numbers a column)".into()],
        ..LlmSpec::default()
    })
}
