//! Nemotron-H and Nemotron 3 (arXiv:2504.03624; arXiv:2512.20848): layers of one mixer each, by a pattern of letters.

use super::Config;
use crate::error::Result;
use crate::spec::{Gate, LlmSpec, MambaSpec, Mixer, Mlp, MoeSpec, MtpSpec, Positions, Score};
use serde_json::Value;

pub fn read(config: &Config) -> Result<LlmSpec> {
    let hidden = config.count("hidden_size")?;
    let pattern = pattern(config)?;
    let has = |mixer| pattern.contains(&mixer);
    let heads = config.count("num_attention_heads")?;
    let kv_heads = config.optional_count("num_key_value_heads")?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let why = format!("{kv_heads} does not divide the {heads} of num_attention_heads; use a divisor of {heads}");
        return Err(config.wrong("num_key_value_heads", why));
    }
    config.is_act("mlp_hidden_act", "relu2")?;
    config.is_act("mamba_hidden_act", "silu")?;
    for bias in ["attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"] {
        config.is_off(bias)?;
    }
    if !config.flag_or("use_conv_bias", true)? {
        return Err(config.wrong("use_conv_bias", "false: only a convolution with a bias is modelled; use true"));
    }
    // Older configs have the one name, newer ones the other.
    let head_dim = match config.optional_count("attention_head_dim")? {
        Some(dim) => dim,
        None => config.head_dim(hidden, heads)?,
    };
    let moe = if has(Mixer::Experts) { Some(experts(config)?) } else { None };
    let ffn = if has(Mixer::Mlp) { config.count("intermediate_size")? } else { 0 };
    Ok(LlmSpec {
        hidden,
        layers: pattern.len() as u64,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab: config.count("vocab_size")?,
        rms_eps: eps(config)?,
        tie_embeddings: config.flag("tie_word_embeddings")?,
        mlp: Mlp::Relu2,
        // What order there is, the states know.
        positions: Positions::None,
        moe,
        mamba: if has(Mixer::Mamba) { Some(mamba(config)?) } else { None },
        mtp: mtp(config, &pattern)?,
        pattern,
        ..LlmSpec::default()
    })
}

fn eps(config: &Config) -> Result<f64> {
    for name in ["layer_norm_epsilon", "norm_eps", "rms_norm_eps"] {
        if let Some(eps) = config.number(name)? {
            return Ok(eps);
        }
    }
    Ok(1e-5)
}

/// Modules of multi-token prediction have a pattern of their own, of mixers that the model has too.
fn mtp(config: &Config, pattern: &[Mixer]) -> Result<Option<MtpSpec>> {
    let field = "mtp_hybrid_override_pattern";
    let letters = config.value(field).and_then(Value::as_str).unwrap_or("*E");
    let of = |letter| Mixer::ALL.into_iter().find(|m| m.letter() == letter && pattern.contains(m)).ok_or(letter);
    let own = letters.chars().map(of).collect::<std::result::Result<Vec<_>, _>>();
    let found = config.mtp(own.clone().unwrap_or_default())?;
    match (own, &found) {
        (Err(letter), Some(_)) => {
            let why = format!("{letter} is no layer of hybrid_override_pattern; use letters that it has");
            Err(config.wrong(field, why))
        }
        (Ok(own), Some(_)) if own.is_empty() => Err(config.wrong(field, "no layer; at least one is needed")),
        _ => Ok(found),
    }
}

/// A string of letters, or a list of words.
fn pattern(config: &Config) -> Result<Vec<Mixer>> {
    let (field, all) = match (config.value("hybrid_override_pattern"), config.value("layers_block_type")) {
        (Some(Value::String(letters)), _) => {
            let mixer = |letter| Mixer::ALL.into_iter().find(|m| m.letter() == letter).ok_or(letter.to_string());
            ("hybrid_override_pattern", letters.chars().map(mixer).collect::<std::result::Result<Vec<_>, _>>())
        }
        (None, Some(Value::Array(words))) => {
            let mixer =
                |word: &Value| Mixer::ALL.into_iter().find(|m| word.as_str() == Some(m.word())).ok_or(word.to_string());
            ("layers_block_type", words.iter().map(mixer).collect())
        }
        _ => {
            let why = "missing, or no string; state it with M (Mamba-2), * (attention), - (MLP) and E (experts), a letter a layer";
            return Err(config.wrong("hybrid_override_pattern", why));
        }
    };
    let all = all.map_err(|what| {
        config.wrong(field, format!("{what} is no layer that is modelled; only Mamba-2 (M, mamba), attention (*), an MLP (-, mlp) and experts (E, moe) are"))
    })?;
    match config.optional_count("num_hidden_layers")? {
        Some(layers) if layers != all.len() as u64 => {
            let why = format!("{} layers, but num_hidden_layers is {layers}; correct one of them", all.len());
            Err(config.wrong(field, why))
        }
        _ if all.is_empty() => Err(config.wrong(field, "no layer; at least one is needed")),
        _ => Ok(all),
    }
}

fn mamba(config: &Config) -> Result<MambaSpec> {
    let [heads, head_dim, state] =
        [config.count("mamba_num_heads")?, config.count("mamba_head_dim")?, config.count("ssm_state_size")?];
    let groups = config.count("n_groups")?;
    if !heads.is_multiple_of(groups) {
        let why = format!("{groups} does not divide the {heads} of mamba_num_heads; use a divisor of {heads}");
        return Err(config.wrong("n_groups", why));
    }
    let conv = config.optional_count("conv_kernel")?.unwrap_or(4);
    Ok(MambaSpec { heads, head_dim, groups, state, conv, chunk: config.optional_count("chunk_size")?.unwrap_or(128) })
}

fn experts(config: &Config) -> Result<MoeSpec> {
    let shared = config.whole("n_shared_experts")?.unwrap_or(0);
    let moe = MoeSpec {
        experts: config.count("n_routed_experts")?,
        top_k: config.count("num_experts_per_tok")?,
        ffn: config.count("moe_intermediate_size")?,
        shared_ffn: match shared {
            0 => 0,
            _ => config.count("moe_shared_expert_intermediate_size")?,
        },
        gate: Gate {
            score: Score::Sigmoid,
            normalise: config.flag_or("norm_topk_prob", true)?,
            scale: config.number("routed_scaling_factor")?.unwrap_or(1.0),
        },
        groups: config.groups()?,
        latent: config.whole("moe_latent_size")?.unwrap_or(0),
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    Ok(moe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(changes: Value) -> Result<LlmSpec> {
        let mut config: Value = serde_json::from_str(&crate::spec::find("llm", "tiny-hybrid").unwrap().text).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        LlmSpec::parse("c.json", "c", &config.to_string())
    }

    #[test]
    fn a_pattern_in_both_spellings() {
        let letters = with(json!({"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4})).unwrap();
        let listed = json!({
            "hybrid_override_pattern": null, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "num_hidden_layers": 4
        });
        assert_eq!(letters.pattern, [Mixer::Mamba, Mixer::Experts, Mixer::Attention, Mixer::Mlp]);
        assert_eq!(with(listed).unwrap().pattern, letters.pattern);
        // What no layer has is not asked for.
        let plain = json!({"hybrid_override_pattern": "M*", "num_hidden_layers": 2, "n_routed_experts": null});
        assert_eq!(with(plain).unwrap().moe, None);
    }

    #[test]
    fn contradictions_are_refused_by_field() {
        for (changes, field, part) in [
            (
                json!({"hybrid_override_pattern": "MX", "num_hidden_layers": 2}),
                "hybrid_override_pattern",
                "X is no layer",
            ),
            (json!({"num_hidden_layers": 3}), "hybrid_override_pattern", "num_hidden_layers is 3"),
            (json!({"hybrid_override_pattern": null}), "hybrid_override_pattern", "missing"),
            (
                json!({"hybrid_override_pattern": "", "num_hidden_layers": null}),
                "hybrid_override_pattern",
                "at least one",
            ),
            (json!({"n_groups": 3}), "n_groups", "3 does not divide the 8"),
            (json!({"mamba_num_heads": null}), "mamba_num_heads", "missing"),
            (json!({"mlp_hidden_act": "silu"}), "mlp_hidden_act", "relu2"),
            (json!({"mlp_bias": true}), "mlp_bias", "only false"),
            (json!({"use_conv_bias": false}), "use_conv_bias", "use true"),
            (json!({"num_experts_per_tok": 9}), "num_experts_per_tok", "9 is more than the 8 experts"),
            (
                json!({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}),
                "topk_group",
                "1 of 4 groups (n_group) of 8 experts do not hold 3 choices",
            ),
        ] {
            let err = with(changes.clone()).unwrap_err().to_string();
            assert!(err.starts_with(&format!("c.json: {field}: ")) && err.contains(part), "{changes}: {err}");
        }
    }
}
