//! Reads the config.json of a Hugging Face model, in its old spellings and its new ones.

use super::LlmSpec;
use crate::error::{Error, Result};
use serde_json::Value;

/// The model types whose configs are understood.
const READ: &[&str] = &["llama", "mistral"];

/// The model that `text` states; `file` is what errors call it.
pub fn read(file: &str, name: &str, text: &str) -> Result<LlmSpec> {
    let json: Value = serde_json::from_str(text).map_err(Error::json(file))?;
    let config = Config { file, json: &json };
    config.check_type()?;
    let (hidden, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    let kv_heads = config.optional_count("num_key_value_heads")?.unwrap_or(heads);
    let spec = LlmSpec {
        name: name.into(),
        hidden,
        layers: config.count("num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim: config.head_dim(hidden, heads)?,
        ffn: config.count("intermediate_size")?,
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: config.rope_theta()?,
        rope_scaled: config.rope_scaled(),
        tie_embeddings: config.flag("tie_word_embeddings")?,
        ..LlmSpec::default()
    };
    if !heads.is_multiple_of(kv_heads) {
        let why = format!("{kv_heads} does not divide the {heads} of num_attention_heads; use a divisor of {heads}");
        return Err(config.wrong("num_key_value_heads", why));
    }
    config.check_variant()?;
    config.check_size(&spec)?;
    Ok(spec)
}

/// More than any model has; a typo is caught before it becomes an allocation.
fn most(field: &str) -> u64 {
    match field {
        "num_hidden_layers" | "num_attention_heads" | "num_key_value_heads" => 1_000_000,
        "head_dim" => 65_536,
        _ => 1 << 32,
    }
}

struct Config<'a> {
    file: &'a str,
    json: &'a Value,
}

impl Config<'_> {
    fn wrong(&self, field: &str, why: impl ToString) -> Error {
        Error::spec(self.file, field, why)
    }

    /// `null` is how a config says "not set".
    fn value(&self, field: &str) -> Option<&Value> {
        self.json.get(field).filter(|v| !v.is_null())
    }

    fn check_type(&self) -> Result<()> {
        let read = READ.join(", ");
        if !self.json.is_object() {
            return Err(self.wrong("the file", "not a JSON object; a Hugging Face config.json is wanted"));
        }
        match self.value("model_type").map(|v| v.as_str().ok_or(v)) {
            Some(Ok(t)) if READ.contains(&t) => Ok(()),
            Some(Ok(t)) => Err(self.wrong("model_type", format!("\"{t}\" is not understood yet; read are: {read}"))),
            Some(Err(v)) => Err(self.wrong("model_type", format!("{v} is not a string; read are: {read}"))),
            None => {
                Err(self.wrong("model_type", format!("missing; a Hugging Face config names one; read are: {read}")))
            }
        }
    }

    fn optional_count(&self, field: &str) -> Result<Option<u64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let whole =
            value.as_u64().or_else(|| value.as_f64().filter(|v| v.fract() == 0.0 && *v >= 0.0).map(|v| v as u64));
        match whole {
            Some(0) => Err(self.wrong(field, "0; at least 1 is needed")),
            Some(n) if n > most(field) => {
                Err(self
                    .wrong(field, format!("{n} is beyond any model (at most {}); check for extra digits", most(field))))
            }
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(field, format!("{value} is not a positive whole number; write it without quotes"))),
        }
    }

    fn count(&self, field: &str) -> Result<u64> {
        let missing = || self.wrong(field, "missing; the config of this model type must state it");
        self.optional_count(field)?.ok_or_else(missing)
    }

    fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v > 0.0 && v.is_finite() => Ok(Some(v)),
            _ => Err(self.wrong(field, format!("{value} is not a number above zero"))),
        }
    }

    fn flag(&self, field: &str) -> Result<bool> {
        match self.value(field) {
            None => Ok(false),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(field, format!("{v} is neither true nor false"))),
        }
    }

    fn head_dim(&self, hidden: u64, heads: u64) -> Result<u64> {
        let dim = match self.optional_count("head_dim")? {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let why = format!("{heads} does not divide hidden_size {hidden}; correct one, or state head_dim");
                return Err(self.wrong("num_attention_heads", why));
            }
        };
        if dim % 2 == 1 {
            let why = format!("{dim} is odd, but rotary embedding turns pairs; use an even head_dim");
            return Err(self.wrong("head_dim", why));
        }
        Ok(dim)
    }

    /// Newer configs keep it in `rope_parameters`.
    fn rope_theta(&self) -> Result<f64> {
        if let Some(theta) = self.number("rope_theta")? {
            return Ok(theta);
        }
        let Some(inner) = self.value("rope_parameters") else { return Ok(10000.0) };
        let inner = Config { file: self.file, json: inner };
        Ok(inner.number("rope_theta")?.unwrap_or(10000.0))
    }

    fn rope_scaled(&self) -> bool {
        let kind = self.value("rope_parameters").and_then(|p| p.get("rope_type")).and_then(Value::as_str);
        self.value("rope_scaling").is_some() || kind.is_some_and(|k| k != "default")
    }

    /// Refuses numbers that are each possible but make a model that is not, before a product overflows.
    fn check_size(&self, spec: &LlmSpec) -> Result<()> {
        let [hidden, layers, ffn, vocab] = [spec.hidden, spec.layers, spec.ffn, spec.vocab].map(|n| n as f64);
        let attention = (spec.heads + spec.kv_heads) as f64 * spec.head_dim as f64;
        let params = layers * hidden * (2.0 * attention + 3.0 * ffn) + 2.0 * hidden * vocab;
        if params <= 1e15 {
            return Ok(());
        }
        let why = format!("together with the other sizes it makes {params:.1e} weights; check for extra digits");
        Err(self.wrong("hidden_size", why))
    }

    /// Refuses what would be computed otherwise than the plan does.
    fn check_variant(&self) -> Result<()> {
        if let Some(window) = self.value("sliding_window") {
            let why = format!(
                "{window}: attention in a sliding window is not modelled; set it to null to use full causal attention"
            );
            return Err(self.wrong("sliding_window", why));
        }
        for field in ["attention_bias", "mlp_bias"] {
            if self.flag(field)? {
                return Err(self.wrong(field, "true: biases are not modelled; only false is read"));
            }
        }
        match self.value("hidden_act") {
            Some(act) if act.as_str() != Some("silu") => {
                Err(self.wrong("hidden_act", format!("{act} is not modelled; only \"silu\" is read")))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::find;
    use serde_json::json;

    fn tiny() -> Value {
        serde_json::from_str(&find("llm", "tiny").unwrap().text).unwrap()
    }

    fn with(changes: Value) -> Result<LlmSpec> {
        let mut config = tiny();
        for (key, value) in changes.as_object().unwrap() {
            match value.as_str() {
                Some("REMOVE") => drop(config.as_object_mut().unwrap().remove(key)),
                _ => config[key] = value.clone(),
            }
        }
        LlmSpec::parse("c.json", "c", &config.to_string())
    }

    #[test]
    fn defaults_follow_hugging_face() {
        let m = with(json!({"num_key_value_heads": "REMOVE", "rope_theta": "REMOVE", "head_dim": null})).unwrap();
        assert_eq!((m.kv_heads, m.rope_theta, m.head_dim), (8, 10000.0, 8));
        let new = json!({"rope_theta": "REMOVE", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}});
        let m = with(new).unwrap();
        assert_eq!((m.rope_theta, m.rope_scaled), (5e5, false));
        assert!(with(json!({"rope_scaling": {"factor": 8.0}})).unwrap().rope_scaled);
        assert_eq!(with(json!({"head_dim": 16})).unwrap().q_cols(), 128);
    }

    #[test]
    fn contradictions_are_refused_by_field() {
        for (changes, field, part) in [
            (json!({"model_type": "mixtral"}), "model_type", "llama, mistral"),
            (json!({"model_type": "REMOVE"}), "model_type", "missing"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads", "3 does not divide the 8"),
            (json!({"num_key_value_heads": 16}), "num_key_value_heads", "does not divide"),
            (json!({"hidden_size": 0}), "hidden_size", "at least 1"),
            (json!({"hidden_size": 63}), "num_attention_heads", "does not divide hidden_size 63"),
            (json!({"hidden_size": "64"}), "hidden_size", "without quotes"),
            (json!({"hidden_size": -64}), "hidden_size", "-64"),
            (json!({"hidden_size": 6.5}), "hidden_size", "6.5"),
            (json!({"hidden_size": "REMOVE"}), "hidden_size", "missing"),
            (json!({"num_hidden_layers": 2000000}), "num_hidden_layers", "extra digits"),
            (json!({"vocab_size": 1e300}), "vocab_size", "extra digits"),
            (json!({"hidden_size": 400000000, "intermediate_size": 400000000}), "hidden_size", "extra digits"),
            (json!({"head_dim": 7}), "head_dim", "odd"),
            (json!({"sliding_window": 4096}), "sliding_window", "4096"),
            (json!({"rope_theta": -1.0}), "rope_theta", "above zero"),
            (json!({"tie_word_embeddings": 1}), "tie_word_embeddings", "neither true nor false"),
            (json!({"hidden_act": "gelu"}), "hidden_act", "silu"),
            (json!({"mlp_bias": true}), "mlp_bias", "biases"),
        ] {
            let err = with(changes.clone()).unwrap_err().to_string();
            assert!(err.starts_with(&format!("c.json: {field}: ")) && err.contains(part), "{changes}: {err}");
        }
    }

    #[test]
    fn a_file_cut_off_says_so() {
        let text = tiny().to_string();
        let err = LlmSpec::parse("c.json", "c", &text[..40]).unwrap_err().to_string();
        assert!(err.contains("ends early"), "{err}");
        let err = LlmSpec::parse("c.json", "c", "[1, 2]").unwrap_err().to_string();
        assert!(err.contains("not a JSON object"), "{err}");
    }
}
