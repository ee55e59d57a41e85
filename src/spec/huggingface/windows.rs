//! Which layers of a model see all that is before a token, and which a window of it: a list of words, one a layer, in newer
//! configs; in older ones a rule of the model type.

use super::Config;
use crate::error::Result;
use crate::spec::LlmSpec;
use serde_json::Value;

/// Sets the window of `spec`, and the layers that have it. Errors: layers of a kind that is not modelled, or not as many as
/// the model has.
pub fn read(config: &Config, spec: &mut LlmSpec) -> Result<()> {
    // What the layers of a hybrid are, its reader knows.
    if !spec.pattern.is_empty() {
        return Ok(());
    }
    let near = match config.value("layer_types").and_then(Value::as_array) {
        Some(words) => listed(config, spec, words)?,
        None => match by_rule(config, spec)? {
            Some(near) => near,
            None => return Ok(()),
        },
    };
    if near.contains(&true) && spec.window.is_none() {
        let chunks = config.optional_count("attention_chunk_size")?;
        spec.window = config.optional_count("sliding_window")?.or(chunks);
        if spec.window.is_none() {
            return Err(config.wrong("sliding_window", "missing; layers that see a window need its size in tokens"));
        }
    }
    if !near.contains(&true) {
        spec.window = None;
    }
    spec.windowed = if near.contains(&true) && near.contains(&false) { near } else { vec![] };
    Ok(())
}

/// From the words of `layer_types`.
fn listed(config: &Config, spec: &mut LlmSpec, words: &[Value]) -> Result<Vec<bool>> {
    if words.len() as u64 != spec.layers {
        let why = format!("{} layers, but num_hidden_layers is {}; correct one of them", words.len(), spec.layers);
        return Err(config.wrong("layer_types", why));
    }
    let near = |word: &Value| match word.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention" | "chunked_attention") => Ok(true),
        _ => {
            let why = format!(
                "{word} is no layer that is modelled in this model type; use full_attention, sliding_attention or \
                 chunked_attention"
            );
            Err(config.wrong("layer_types", why))
        }
    };
    words.iter().map(near).collect()
}

/// As Transformers makes the list where a config has none; `None`: layers are alike.
fn by_rule(config: &Config, spec: &LlmSpec) -> Result<Option<Vec<bool>>> {
    let kind = config.value("model_type").and_then(Value::as_str).unwrap_or("");
    let layers = 0..spec.layers;
    // Of each so many layers the last one sees all.
    let every = |n: u64| Some(layers.clone().map(|l| !(l + 1).is_multiple_of(n)).collect());
    Ok(match kind {
        "gemma2" | "gpt_oss" => every(2),
        "olmo3" => every(4),
        "cohere2" => every(config.optional_count("sliding_window_pattern")?.unwrap_or(4)),
        "qwen2_moe" => {
            let (last, near) = (config.whole("max_window_layers")?.unwrap_or(28), config.flag("use_sliding_window")?);
            Some(layers.map(|l| near && l < last && (l + 1) % 2 == 1).collect())
        }
        "gemma3_text" => {
            let old = config.optional_count("sliding_window_pattern")?;
            every(old.or(config.optional_count("_sliding_window_pattern")?).unwrap_or(6))
        }
        "llama4_text" => match config.value("no_rope_layers").and_then(Value::as_array) {
            Some(turns) if turns.len() as u64 == spec.layers => {
                Some(turns.iter().map(|turns| turns.as_u64() != Some(0)).collect())
            }
            _ => every(config.optional_count("no_rope_layer_interval")?.unwrap_or(4)),
        },
        "smollm3" => Some(layers.map(|_| false).collect()),
        kind if kind.starts_with("qwen") => {
            let first = config.whole("max_window_layers")?.unwrap_or(28);
            let near = config.flag("use_sliding_window")? && config.value("sliding_window").is_some();
            Some(layers.map(|l| near && l >= first).collect())
        }
        _ => None,
    })
}
