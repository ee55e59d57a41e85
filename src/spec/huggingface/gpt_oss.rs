//! gpt-oss (arXiv:2508.10925): experts in every layer, a window in every second, a learned sink beside the scores of each
//! head.

use super::{Config, llama_like};
use crate::error::Result;
use crate::spec::{LlmSpec, MoeSpec};

pub fn read(config: &Config) -> Result<LlmSpec> {
    let like = llama_like(config)?;
    // Both names are there, of one number.
    let other = config.optional_count("experts_per_token")?;
    let moe = MoeSpec {
        experts: config.count("num_local_experts")?,
        top_k: config.optional_count("num_experts_per_tok")?.or(other).unwrap_or(4),
        ffn: config.count("intermediate_size")?,
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    let notes = vec![
        "gpt_oss: sinks of attention (a number a head), biases of experts, router and output projection, and the clamp of \
         SwiGLU are left out (less than 0.1 % of the weights); on GPUs the time of the experts' biases and clamp is not"
            .into(),
    ];
    Ok(LlmSpec {
        moe: Some(moe),
        clamped_experts: true,
        qkv_bias: config.flag_or("attention_bias", true)?,
        window: Some(config.optional_count("sliding_window")?.unwrap_or(128)),
        notes,
        ..like
    })
}
