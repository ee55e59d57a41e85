//! What a config states that changes what its model computes, costs nothing, and is not computed here: no figure is wrong by it,
//! but weights from elsewhere would make another model.

use super::Config;
use super::notes::says;
use serde_json::Value;

/// Model types whose layers are computed to the last term, so that weights from elsewhere make their model.
pub const COMPUTED: &[&str] = &[
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "kimi_k2",
    "gpt2",
];

/// Factors, of which 1 changes nothing, and other fields that change values of one model type or another.
const CHANGES: &[&str] = &[
    "attention_multiplier",
    "attn_scale",
    "attn_temperature_tuning",
    "embedding_multiplier",
    "floor_scale",
    "logit_scale",
    "logits_scaling",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_local_base_freq",
    "swiglu_limit",
];

/// The GELU that is computed, by tanh, under the names that transformers has for it; plain "gelu" is that by erf.
const BY_TANH: &[&str] = &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"];

/// Each as `FIELD VALUE`.
pub fn uncomputed(config: &Config) -> Vec<String> {
    let field = |name: &str| config.json.get(name).filter(|value| !value.is_null());
    let told = |name: &str, value: &Value| format!("{name} {value}");
    let kind = field("model_type").and_then(Value::as_str).unwrap_or_default();
    let mut all = vec![];
    if !COMPUTED.contains(&kind) {
        all.push(format!("model_type {kind}"));
    }
    let changes = |value: &&Value| says(value) && value.as_f64() != Some(1.0);
    all.extend(CHANGES.iter().filter_map(|name| Some(told(name, field(name).filter(changes)?))));
    for name in ["rope_scaling", "rope_parameters"] {
        let turned = field(name).and_then(|rope| rope.get("partial_rotary_factor"));
        all.extend(turned.filter(changes).map(|value| told(&format!("{name}.partial_rotary_factor"), value)));
    }
    if kind == "gpt2" {
        let off = field("scale_attn_weights").filter(|value| value.as_bool() == Some(false));
        all.extend(off.map(|value| told("scale_attn_weights", value)));
        let act = field("activation_function").filter(|act| !act.as_str().is_some_and(|act| BY_TANH.contains(&act)));
        all.extend(act.map(|value| told("activation_function", value)));
    }
    all
}

#[cfg(test)]
mod tests {
    use crate::spec::{LlmSpec, find};
    use serde_json::{Value, json};

    fn with(mut config: Value, more: Value) -> Vec<String> {
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        LlmSpec::parse("config.json", "m", &config.to_string()).unwrap().uncomputed
    }

    #[test]
    fn what_changes_values_alone_is_kept() {
        let llama = || serde_json::from_str::<Value>(&find("llm", "tiny").unwrap().text).unwrap();
        let gpt2 = || json!({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 29});
        assert!(with(llama(), json!({"residual_multiplier": 1.0, "attention_dropout": 0.1})).is_empty());
        assert!(with(gpt2(), json!({"activation_function": "gelu_new", "scale_attn_weights": true})).is_empty());
        for (config, more, says) in [
            (llama(), json!({"model_type": "granite"}), "model_type granite"),
            (llama(), json!({"residual_multiplier": 0.22}), "residual_multiplier 0.22"),
            (llama(), json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
            (gpt2(), json!({"activation_function": "gelu"}), "activation_function \"gelu\""),
            (gpt2(), json!({"scale_attn_weights": false}), "scale_attn_weights false"),
        ] {
            assert_eq!(with(config, more), [says]);
        }
    }
}
