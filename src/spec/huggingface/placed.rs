//! Lists of layers, and mixtures whose dense layers stand where a list puts them.

use super::Config;
use crate::error::Result;
use crate::spec::{LlmSpec, Mixer};
use serde_json::Value;

/// The layers that `field` lists, ascending and each once; none where it is missing. Errors: what is no layer of a model of
/// `count`.
pub fn layers(config: &Config, field: &str, count: u64) -> Result<Vec<u64>> {
    let Some(value) = config.value(field) else { return Ok(vec![]) };
    let Some(list) = value.as_array() else {
        return Err(config.wrong(field, format!("{value} is no list of layers; write numbers as in [0, 1], or []")));
    };
    let layer = |value: &Value| match value.as_u64().filter(|layer| *layer < count) {
        Some(layer) => Ok(layer),
        None => {
            let why = format!("{value} is no layer of the {count}; use numbers from 0 to {}", count.saturating_sub(1));
            Err(config.wrong(field, why))
        }
    };
    let mut all = list.iter().map(layer).collect::<Result<Vec<u64>>>()?;
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// A mixture with Qwen's `mlp_only_layers`, unless they leave no layer that has experts.
pub fn with_experts(config: &Config, spec: LlmSpec) -> Result<LlmSpec> {
    if !spec.dense_at.is_empty() && spec.count(Mixer::Experts) == 0 {
        let why = "no layer is left that has experts; leave one of them out, or use model_type qwen3";
        return Err(config.wrong("mlp_only_layers", why));
    }
    Ok(spec)
}
