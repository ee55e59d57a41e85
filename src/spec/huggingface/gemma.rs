//! Gemma (arXiv:2403.08295): Llama's layers with GELU for SiLU. Gemma 2 and 3 (arXiv:2408.00118, arXiv:2503.19786): norms on
//! both sides of attention and network, too, and windows in most layers.

use super::{Config, llama_sizes};
use crate::error::Result;
use crate::spec::LlmSpec;

const COSTED: &str = "gemma: gated GELU is costed as SwiGLU, which moves as many bytes; the norms behind attention and \
    network are left out (about 1 % of a layer)";

/// Its first configs have `hidden_act` alone, also where the code has the GELU of `hidden_activation`.
pub fn gemma(config: &Config) -> Result<LlmSpec> {
    let field = if config.value("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    config.is_act(field, "gelu")?;
    let like = llama_sizes(config)?;
    let head_dim = config.optional_count("head_dim")?.unwrap_or(256);
    let tie_embeddings = config.flag_or("tie_word_embeddings", true)?;
    let notes = vec!["gemma: gated GELU is costed as SwiGLU, which moves as many bytes".into()];
    Ok(LlmSpec { head_dim, tie_embeddings, notes, ..like })
}

pub fn gemma2(config: &Config) -> Result<LlmSpec> {
    config.is_act("hidden_activation", "gelu")?;
    let like = llama_sizes(config)?;
    let head_dim = config.optional_count("head_dim")?.unwrap_or(256);
    let window = Some(config.optional_count("sliding_window")?.unwrap_or(4096));
    let tie_embeddings = config.flag_or("tie_word_embeddings", true)?;
    Ok(LlmSpec { head_dim, window, tie_embeddings, notes: vec![COSTED.into()], ..like })
}

/// Configs of models that see, too, leave out what is as in the 4B one.
pub fn gemma3(config: &Config) -> Result<LlmSpec> {
    config.is_act("hidden_activation", "gelu")?;
    let or =
        |field: &str, default: u64| Ok::<u64, crate::error::Error>(config.optional_count(field)?.unwrap_or(default));
    let heads = or("num_attention_heads", 8)?;
    let kv_heads = or("num_key_value_heads", 4)?;
    if !heads.is_multiple_of(kv_heads) {
        let why = format!("{kv_heads} does not divide the {heads} of num_attention_heads; use a divisor of {heads}");
        return Err(config.wrong("num_key_value_heads", why));
    }
    Ok(LlmSpec {
        hidden: config.count("hidden_size")?,
        layers: config.count("num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim: or("head_dim", 256)?,
        ffn: config.count("intermediate_size")?,
        vocab: or("vocab_size", 262_208)?,
        rms_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: config.number("rope_theta")?.unwrap_or(1e6),
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        qk_norm: true,
        window: Some(or("sliding_window", 4096)?),
        notes: vec![COSTED.into()],
        ..LlmSpec::default()
    })
}
