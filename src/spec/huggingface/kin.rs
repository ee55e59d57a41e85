//! Models of Llama's make that differ in a detail: which biases there are, which heads turn, where norms stand.

use super::{Config, Norm, llama, llama_like, olmo2, turned};
use crate::error::Result;
use crate::spec::{LlmSpec, Mlp};

/// SmolLM3: heads do not turn in every fourth layer.
pub fn smollm3(config: &Config) -> Result<LlmSpec> {
    let (listed, every) = (config.value("no_rope_layers").is_some(), config.optional_count("no_rope_layer_interval")?);
    let mut notes = vec![];
    if listed || every != Some(1) {
        notes.push("smollm3: all layers turn their heads here (less than 1 % of a layer)".into());
    }
    Ok(LlmSpec { tie_embeddings: config.flag_or("tie_word_embeddings", true)?, notes, ..llama(config)? })
}

/// Seed-OSS: biases of queries, keys and values alone.
pub fn seed_oss(config: &Config) -> Result<LlmSpec> {
    config.is_off("attention_out_bias")?;
    config.is_off("mlp_bias")?;
    Ok(LlmSpec {
        qkv_bias: config.flag_or("attention_bias", true)?,
        dropout: config.probability("residual_dropout")?.unwrap_or(0.1),
        ..llama_like(config)?
    })
}

/// The dense ones of ERNIE 4.5.
pub fn ernie(config: &Config) -> Result<LlmSpec> {
    let tie_embeddings = config.flag_or("tie_word_embeddings", true)?;
    Ok(LlmSpec { bias: config.flag("use_bias")?, tie_embeddings, ..llama_like(config)? })
}

/// OLMo 3: three layers of four see a window.
pub fn olmo3(config: &Config) -> Result<LlmSpec> {
    let window = Some(config.optional_count("sliding_window")?.unwrap_or(4096));
    Ok(LlmSpec { window, ..olmo2(config)? })
}

/// GLM-4 of 2025: half of a head turns, and norms stand on both sides of attention and network.
pub fn glm4(config: &Config) -> Result<LlmSpec> {
    let like = llama_like(config)?;
    let notes = vec!["glm4: the norms behind attention and network are left out (about 1 % of a layer)".into()];
    Ok(LlmSpec {
        qkv_bias: config.flag("attention_bias")?,
        rotary_dim: turned(config.rotary_share(0.5)?, like.head_dim),
        notes,
        ..like
    })
}

/// Command R: attention and network beside each other behind one LayerNorm without biases, the embedding table used twice.
pub fn cohere(config: &Config) -> Result<LlmSpec> {
    config.is_off("attention_bias")?;
    Ok(LlmSpec {
        rms_eps: config.number("layer_norm_eps")?.unwrap_or(1e-5),
        norm: Norm::Layer,
        parallel_block: true,
        qk_norm: config.flag("use_qk_norm")?,
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        ..llama_like(config)?
    })
}

/// Command R7B and A: three layers of four see a window.
pub fn cohere2(config: &Config) -> Result<LlmSpec> {
    let window = Some(config.optional_count("sliding_window")?.unwrap_or(4096));
    Ok(LlmSpec { window, ..cohere(config)? })
}

/// StarCoder2 (arXiv:2402.19173): GPT's network and norms with biases, grouped queries that turn, a window.
pub fn starcoder2(config: &Config) -> Result<LlmSpec> {
    config.is_act("hidden_act", "gelu")?;
    let like = super::llama_sizes(config)?;
    Ok(LlmSpec {
        rms_eps: config.number("norm_epsilon")?.unwrap_or(1e-5),
        norm: Norm::Layer,
        mlp: Mlp::Gelu,
        bias: config.flag_or("use_bias", true)?,
        window: config.optional_count("sliding_window")?,
        dropout: config.probability("residual_dropout")?.unwrap_or(0.0),
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        ..like
    })
}
