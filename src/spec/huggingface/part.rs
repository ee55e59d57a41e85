//! The language model of a config that has others beside it, of images or sound.

use super::Config;
use crate::error::Result;
use serde_json::Value;

/// Fields of the language model that may stand beside its `text_config`. Since version 5 transformers keeps there whether the
/// output projection is the embedding table: with the class that has both. Of others that it keeps there none is read of a
/// language model: `dtype` is what --dtype says, and `quantization_config` is [looked for](super::notes) in both places.
const OUTSIDE: &[&str] = &["tie_word_embeddings"];

impl<'a> Config<'a> {
    /// The language model of one that sees or hears, too; `None`: it is one alone. Its fields stand in `text_config`,
    /// whose type may go without saying.
    pub(super) fn text_alone(&self) -> Result<Option<Config<'a>>> {
        let Some(inner) = self.json.get("text_config").filter(|inner| inner.is_object()) else { return Ok(None) };
        match inner.get("model_type").is_some_and(Value::is_string) {
            true => Ok(Some(Config { outer: Some(self.json), ..Config::new(self.file, inner) })),
            false => {
                let why = "missing; state the type of the language model, e.g. \"gemma3_text\"";
                Err(self.wrong("text_config.model_type", why))
            }
        }
    }

    /// What stands beside the language model of a field of its own.
    pub(super) fn outside(&self, field: &str) -> Option<&Value> {
        let outer = self.outer.filter(|_| OUTSIDE.contains(&field))?;
        outer.get(field).filter(|v| !v.is_null())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::LlmSpec;
    use serde_json::json;

    /// Qwen2.5-VL 3B has 3.086 billion weights in its language model; with a head of its own they were 3.397.
    #[test]
    fn what_stands_beside_the_language_model_counts_where_it_says_nothing() {
        let of = |outer: Value, inner: Value| {
            let text = json!({
                "model_type": "qwen2_5_vl_text", "hidden_size": 2048, "intermediate_size": 11008, "hidden_act": "silu",
                "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
                "tie_word_embeddings": inner,
            });
            let whole = json!({
                "model_type": "qwen2_5_vl", "text_config": text, "tie_word_embeddings": outer, "dtype": "bfloat16",
                "hidden_size": 1280, "vision_config": {"depth": 32},
            });
            LlmSpec::parse("c.json", "c", &whole.to_string())
        };
        let (tied, apart) = (3_085_938_688, 3_085_938_688 + 151936 * 2048);
        for (outer, inner, params) in [
            (json!(true), Value::Null, tied),
            (json!(false), Value::Null, apart),
            (Value::Null, Value::Null, apart),
            (Value::Null, json!(true), tied),
            (json!(false), json!(true), tied),
            (json!(true), json!(false), apart),
        ] {
            let model = of(outer.clone(), inner.clone()).unwrap();
            assert_eq!(model.params(), params, "{outer} outside, {inner} inside");
            assert!(model.hidden == 2048 && model.notes.len() == 1, "{:?}", model.notes);
        }
        let why = of(json!("yes"), Value::Null).unwrap_err().to_string();
        assert!(why.starts_with("c.json: tie_word_embeddings: \"yes\" is neither"), "{why}");
    }
}
