//! Mixtures of Llama's make, by what they call their experts and how these are chosen.

use super::{Config, glm, llama, llama_like, placed, qwen2, qwen3, turned};
use crate::error::Result;
use crate::spec::{Gate, LlmSpec, MoeSpec, Score};

/// Qwen1.5 and Qwen2 (arXiv:2407.10671): an expert that every token visits, behind a gate of its own.
pub fn qwen2_moe(config: &Config) -> Result<LlmSpec> {
    let like = qwen2(config)?;
    let dense_at = placed::layers(config, "mlp_only_layers", like.layers)?;
    let qkv_bias = config.flag_or("qkv_bias", true)?;
    let notes = vec!["qwen2_moe: the gate of the shared expert is left out (a column)".into()];
    placed::with_experts(config, LlmSpec { moe: Some(qwen_experts(config)?), dense_at, qkv_bias, notes, ..like })
}

/// Qwen3 (arXiv:2505.09388): every layer a mixture but those that are named.
pub fn qwen3_moe(config: &Config) -> Result<LlmSpec> {
    let like = qwen3(config)?;
    let dense_at = placed::layers(config, "mlp_only_layers", like.layers)?;
    placed::with_experts(config, LlmSpec { moe: Some(qwen_experts(config)?), dense_at, ..like })
}

/// What the mixtures of Qwen3 state of their experts.
pub fn qwen_experts(config: &Config) -> Result<MoeSpec> {
    // Qwen3's heads have norms whether a config says so or not.
    config.flag("use_qk_norm")?;
    // Transformers 5 writes the second.
    let experts = match config.optional_count("num_local_experts")? {
        Some(experts) if config.value("num_experts").is_none() => experts,
        _ => config.count("num_experts")?,
    };
    let moe = MoeSpec {
        experts,
        top_k: config.count("num_experts_per_tok")?,
        ffn: config.count("moe_intermediate_size")?,
        shared_ffn: config.whole("shared_expert_intermediate_size")?.unwrap_or(0),
        every: config.optional_count("decoder_sparse_step")?.unwrap_or(1),
        // Transformers' default; the published checkpoints of Qwen3 say true.
        gate: Gate { normalise: config.flag("norm_topk_prob")?, ..Gate::default() },
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    Ok(moe)
}

/// OLMoE (arXiv:2409.02060).
pub fn olmoe(config: &Config) -> Result<LlmSpec> {
    let moe = MoeSpec {
        experts: config.count("num_experts")?,
        top_k: config.optional_count("num_experts_per_tok")?.unwrap_or(8),
        ffn: config.count("intermediate_size")?,
        gate: Gate { normalise: config.flag("norm_topk_prob")?, ..Gate::default() },
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    let mut notes = vec!["olmoe: the norms of queries and keys are costed a head at a time: as many bytes".into()];
    if config.value("clip_qkv").is_some() {
        notes.push("clip_qkv: clips of queries, keys and values take no time here".into());
    }
    Ok(LlmSpec { moe: Some(moe), qk_norm: true, notes, ..llama_like(config)? })
}

/// Granite 3 and 4: Llama's layers whose values are scaled, with experts, and one that every token visits where its width is
/// stated.
pub fn granite(config: &Config) -> Result<LlmSpec> {
    let moe = MoeSpec {
        experts: config.count("num_local_experts")?,
        top_k: config.optional_count("num_experts_per_tok")?.unwrap_or(2),
        ffn: config.count("intermediate_size")?,
        shared_ffn: config.whole("shared_intermediate_size")?.unwrap_or(0),
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    Ok(LlmSpec { moe: Some(moe), ..llama(config)? })
}

/// ERNIE 4.5: dense layers first, shared experts.
pub fn ernie(config: &Config) -> Result<LlmSpec> {
    config.is_one("moe_layer_interval")?;
    let like = super::kin::ernie(config)?;
    let width = config.count("moe_intermediate_size")?;
    let first = config.whole("moe_layer_start_index")?.unwrap_or(1);
    if first >= like.layers {
        let why = format!("{first} leaves none of the {} layers with experts; use less", like.layers);
        return Err(config.wrong("moe_layer_start_index", why));
    }
    // -1 is the last layer.
    let last = config.value("moe_layer_end_index").and_then(serde_json::Value::as_u64).unwrap_or(like.layers - 1);
    if last < first {
        let why = format!("{last} is before the first layer with experts, {first}; use that or more, or -1");
        return Err(config.wrong("moe_layer_end_index", why));
    }
    let moe = MoeSpec {
        experts: config.count("moe_num_experts")?,
        top_k: config.count("moe_k")?,
        ffn: width,
        shared_ffn: width * config.whole("moe_num_shared_experts")?.unwrap_or(2),
        dense_layers: first,
        ..MoeSpec::default()
    };
    if moe.top_k > moe.experts {
        let why = format!("{} is more than the {} experts there are; use fewer", moe.top_k, moe.experts);
        return Err(config.wrong("moe_k", why));
    }
    for values_alone in ["moe_norm_min", "moe_use_aux_free", "moe_capacity", "moe_gate", "moe_layer_interval"] {
        config.value(values_alone);
    }
    let dense_at = (last + 1..like.layers).collect();
    Ok(LlmSpec { moe: Some(moe), dense_at, mtp: config.mtp(vec![])?, ..like })
}

/// MiniMax M2: sigmoid scores, norms of queries and keys, of whose heads a part turns, modules of multi-token prediction.
pub fn minimax_m2(config: &Config) -> Result<LlmSpec> {
    let like = llama_like(config)?;
    let softmax = |kinds: &[serde_json::Value]| kinds.iter().all(|kind| kind.as_u64() == Some(1));
    if config.value("attn_type_list").and_then(|kinds| kinds.as_array()).is_some_and(|kinds| !softmax(kinds)) {
        let why = "a layer other than 1, with linear attention: not modelled in this model type; only 1 is read";
        return Err(config.wrong("attn_type_list", why));
    }
    let moe = MoeSpec {
        experts: config.count("num_local_experts")?,
        top_k: config.optional_count("num_experts_per_tok")?.unwrap_or(8),
        ffn: config.count("intermediate_size")?,
        shared_ffn: config.whole("shared_intermediate_size")?.unwrap_or(0),
        gate: Gate { score: config.score(Score::Sigmoid)?, normalise: true, scale: 1.0 },
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    for values_alone in [
        "use_routing_bias",
        "qk_norm_type",
        "shared_moe_mode",
        "layernorm_full_attention_beta",
        "layernorm_linear_attention_beta",
        "layernorm_mlp_beta",
        "mtp_transformer_layers",
    ] {
        config.value(values_alone);
    }
    let (modules, trained) = (config.mtp(vec![])?, config.flag_or("use_mtp", true)?);
    let part = config.optional_count("rotary_dim")?.filter(|dim| *dim < like.head_dim);
    Ok(LlmSpec {
        moe: Some(moe),
        mtp: modules.filter(|_| trained),
        qk_norm: config.flag_or("use_qk_norm", true)?,
        rotary_dim: part.or(turned(config.rotary_share(1.0)?, like.head_dim)),
        ..like
    })
}

/// dots.llm1 (arXiv:2506.05767): as GLM-4.5, whole heads turning, with norms.
pub fn dots1(config: &Config) -> Result<LlmSpec> {
    // Always sigmoids, whatever name a config has for the rule.
    config.value("scoring_func");
    Ok(LlmSpec { rotary_dim: None, qk_norm: true, ..glm::read(config)? })
}
