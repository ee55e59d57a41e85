//! GLM-4.5 to 4.7 (arXiv:2508.06471): grouped queries of which half turns, dense layers first, shared experts, a module of
//! multi-token prediction.

use super::{Config, llama_like, turned};
use crate::error::Result;
use crate::spec::{Gate, LlmSpec, MoeSpec, Score};

pub fn read(config: &Config) -> Result<LlmSpec> {
    let like = llama_like(config)?;
    let width = config.count("moe_intermediate_size")?;
    let moe = MoeSpec {
        experts: config.count("n_routed_experts")?,
        top_k: config.count("num_experts_per_tok")?,
        ffn: width,
        shared_ffn: width * config.whole("n_shared_experts")?.unwrap_or(0),
        dense_layers: config.dense_layers()?,
        gate: Gate {
            score: Score::Sigmoid,
            normalise: config.flag_or("norm_topk_prob", true)?,
            scale: config.number("routed_scaling_factor")?.unwrap_or(1.0),
        },
        groups: config.groups()?,
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    Ok(LlmSpec {
        moe: Some(moe),
        mtp: config.mtp(vec![])?,
        // Of queries, keys and values; the projection back has none.
        qkv_bias: config.flag("attention_bias")?,
        qk_norm: config.flag("use_qk_norm")?,
        rotary_dim: turned(config.rotary_share(0.5)?, like.head_dim),
        ..like
    })
}
