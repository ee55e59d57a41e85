//! GPTs whose positions are slopes on distances (ALiBi, arXiv:2108.12409): BLOOM (arXiv:2211.05100) and MPT.

use super::Config;
use crate::error::Result;
use crate::spec::{LlmSpec, Mlp, Norm, Positions};
use serde_json::Value;

/// The norm behind the embedding, 2 x hidden weights once a model, is left out of counts and plans.
pub fn bloom(config: &Config) -> Result<LlmSpec> {
    config.is_off("apply_residual_connection_post_layernorm")?;
    // Checkpoints say one or the other.
    let either = |old: &str, new: &str| config.optional_count(old)?.map_or_else(|| config.count(new), Ok);
    let (hidden, heads) = (either("n_embed", "hidden_size")?, either("num_attention_heads", "n_head")?);
    Ok(LlmSpec {
        hidden,
        layers: either("num_hidden_layers", "n_layer")?,
        heads,
        kv_heads: heads,
        head_dim: config.head_dim_of(hidden, heads, "hidden_size", "n_head")?,
        ffn: 4 * hidden,
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        norm: Norm::Layer,
        mlp: Mlp::Gelu,
        positions: Positions::Alibi,
        bias: true,
        dropout: config.probability("hidden_dropout")?.unwrap_or(0.0),
        ..LlmSpec::default()
    })
}

/// What `attn_config` does not state is as Transformers has it: slopes up to 8, learned positions where there are none.
pub fn mpt(config: &Config) -> Result<LlmSpec> {
    let (hidden, heads) = (config.count("d_model")?, config.count("n_heads")?);
    let none = Value::Object(serde_json::Map::new());
    let attention = Config::new(config.file, config.value("attn_config").unwrap_or(&none));
    for part in ["qk_ln", "prefix_lm"] {
        attention.is_off(part)?;
    }
    if let Some(most) = attention.number("alibi_bias_max")?.filter(|most| *most != 8.0) {
        return Err(
            config.wrong("attn_config.alibi_bias_max", format!("{most}: only slopes up to 8 are modelled; use 8"))
        );
    }
    let kv_heads = attention.optional_count("kv_n_heads")?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let why = format!("{kv_heads} does not divide the {heads} of n_heads; use a divisor of {heads}");
        return Err(config.wrong("attn_config.kv_n_heads", why));
    }
    let positions = match attention.flag_or("alibi", true)? {
        true => Positions::Alibi,
        false => Positions::Learned { max: config.optional_count("max_seq_len")?.unwrap_or(2048) },
    };
    Ok(LlmSpec {
        hidden,
        layers: config.count("n_layers")?,
        heads,
        kv_heads,
        head_dim: config.head_dim_of(hidden, heads, "d_model", "n_heads")?,
        ffn: config.optional_count("expansion_ratio")?.unwrap_or(4) * hidden,
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        norm: Norm::Layer,
        mlp: Mlp::Gelu,
        positions,
        bias: !config.flag_or("no_bias", true)?,
        dropout: config.probability("resid_pdrop")?.unwrap_or(0.0),
        ..LlmSpec::default()
    })
}

#[cfg(test)]
mod tests {
    use crate::spec::{LlmSpec, Positions};

    fn read(json: serde_json::Value) -> crate::error::Result<LlmSpec> {
        LlmSpec::parse("test", "test", &json.to_string())
    }

    /// The config of bigscience/bloom, and of mosaicml/mpt-7b, as they stand but for keys that say nothing of sizes.
    /// Both papers' counts are within a percent: 176.2 and 6.65 billion.
    #[test]
    fn bloom_and_mpt_as_they_stand() {
        let bloom = serde_json::json!({
            "model_type": "bloom", "n_layer": 70, "num_attention_heads": 112, "n_embed": 14336, "vocab_size": 250880,
            "apply_residual_connection_post_layernorm": false, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5,
            "masked_softmax_fusion": true, "slow_but_exact": false, "attention_softmax_in_fp32": true,
        });
        let bloom = read(bloom).unwrap();
        assert_eq!(
            (bloom.positions, bloom.head_dim, bloom.bias, bloom.tie_embeddings),
            (Positions::Alibi, 128, true, true)
        );
        assert!((bloom.params() as f64 / 176.247e9 - 1.0).abs() < 1e-3, "{}", bloom.params());
        let mpt = serde_json::json!({
            "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "vocab_size": 50432,
            "max_seq_len": 2048, "no_bias": true, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
            "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_type": "multihead_attention", "qk_ln": false,
                "clip_qkv": null, "prefix_lm": false},
        });
        let mpt = read(mpt).unwrap();
        assert_eq!((mpt.positions, mpt.bias, mpt.dropout), (Positions::Alibi, false, 0.0));
        assert!((mpt.params() as f64 / 6.649e9 - 1.0).abs() < 1e-3, "{}", mpt.params());
    }

    #[test]
    fn other_slopes_and_norms_are_refused() {
        let with = |more: serde_json::Value| {
            let mut all =
                serde_json::json!({"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 32});
            all["attn_config"] = more;
            read(all).map(|_| ()).unwrap_err().to_string()
        };
        assert!(with(serde_json::json!({"alibi_bias_max": 16})).contains("use 8"));
        assert!(with(serde_json::json!({"qk_ln": true})).contains("qk_ln"));
        assert!(with(serde_json::json!({"kv_n_heads": 3})).contains("divisor of 4"));
    }
}
