//! DeepSeek-V2 and V3 (arXiv:2405.04434, arXiv:2412.19437) and what is of their make: latent attention, dense layers first,
//! shared experts, groups of experts, modules of multi-token prediction. Kimi K2 has their fields. V3.2 and GLM-5 choose the keys
//! that attention sees.

use super::{Config, llama_like};
use crate::error::Result;
use crate::spec::{Gate, IndexerSpec, LlmSpec, MlaSpec, MoeSpec, Score};

/// V2 chooses by softmax, and keeps its scores as they are.
pub fn v2(config: &Config) -> Result<LlmSpec> {
    let default = Gate { score: Score::Softmax, normalise: false, scale: 1.0 };
    read(config, default)
}

pub fn v3(config: &Config) -> Result<LlmSpec> {
    read(config, Gate { score: Score::Sigmoid, normalise: true, scale: 2.5 })
}

/// V3.2 adds an indexer to V3 (DeepSeek-V3.2-Exp). It turns halves, as its authors' code does since November 2025.
pub fn v32(config: &Config) -> Result<LlmSpec> {
    indexed(config, false)
}

/// GLM-5 has V3.2's layers, and its indexer turns neighbours (transformers' `GlmMoeDsaIndexer`).
pub fn glm(config: &Config) -> Result<LlmSpec> {
    indexed(config, true)
}

fn indexed(config: &Config, interleaved: bool) -> Result<LlmSpec> {
    let model = v3(config)?;
    let Some(mla) = model.mla.filter(|mla| mla.q_lora.is_some()) else {
        let why = "is missing, but index queries are made of compressed ones; state it";
        return Err(config.wrong("q_lora_rank", why));
    };
    let indexer = IndexerSpec {
        heads: config.count("index_n_heads")?,
        head_dim: config.count("index_head_dim")?,
        top_k: config.count("index_topk")?,
        interleaved: config.flag_or("indexer_rope_interleave", interleaved)?,
    };
    if indexer.head_dim < mla.rope_dim {
        let why = format!("{} is less than the {} of qk_rope_head_dim that turn", indexer.head_dim, mla.rope_dim);
        return Err(config.wrong("index_head_dim", why + "; use as many or more"));
    }
    Ok(LlmSpec { indexer: Some(indexer), ..model })
}

/// `default` is what a router does where nothing is said.
fn read(config: &Config, default: Gate) -> Result<LlmSpec> {
    config.is_one("moe_layer_freq")?;
    if !config.flag_or("rope_interleave", true)? {
        let why = "false: only neighbours that turn together are modelled, as in DeepSeek's checkpoints; use true";
        return Err(config.wrong("rope_interleave", why));
    }
    let mla = MlaSpec {
        q_lora: config.optional_count("q_lora_rank")?,
        kv_lora: config.count("kv_lora_rank")?,
        rope_dim: config.count("qk_rope_head_dim")?,
        nope_dim: config.count("qk_nope_head_dim")?,
        v_dim: config.count("v_head_dim")?,
    };
    let width = config.count("moe_intermediate_size")?;
    let moe = MoeSpec {
        groups: config.groups()?,
        experts: config.count("n_routed_experts")?,
        top_k: config.count("num_experts_per_tok")?,
        ffn: width,
        shared_ffn: width * config.whole("n_shared_experts")?.unwrap_or(0),
        dense_layers: config.dense_layers()?,
        gate: Gate {
            score: config.score(default.score)?,
            normalise: config.flag_or("norm_topk_prob", default.normalise)?,
            scale: config.number("routed_scaling_factor")?.unwrap_or(default.scale),
        },
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    // Of a head's query and key; a value is v_dim wide.
    let head_dim = mla.nope_dim + mla.rope_dim;
    // Transformers 5 writes the sum, too.
    if let Some(sum) = config.optional_count("qk_head_dim")?.filter(|sum| *sum != head_dim) {
        let why = format!("{sum} is not qk_nope_head_dim + qk_rope_head_dim, {head_dim}; use that or leave it out");
        return Err(config.wrong("qk_head_dim", why));
    }
    let like = llama_like(config)?;
    let mtp = config.mtp(vec![])?;
    Ok(LlmSpec { head_dim, kv_heads: like.heads, moe: Some(moe), mla: Some(mla), mtp, ..like })
}
