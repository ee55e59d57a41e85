//! Values as people write them: a number in quotes, a list of one, words that say that nothing is stated, names of
//! fields as other tables have them.

use serde_json::Value;

/// Words that state nothing.
const NOTHING: &[&str] =
    &["", "-", "?", "n/a", "na", "none", "null", "nan", "unknown", "unstated", "notstated", "tbd", "auto"];

/// Other names of a field.
const NAMES: &[(&str, &[&str])] = &[
    ("gpu", &["gpu_type", "gpu_name", "device", "accelerator", "hardware"]),
    ("gpus", &["num_gpus", "n_gpus", "ngpus", "gpu_count", "world_size"]),
    ("system", &["framework", "software", "library"]),
    ("seq", &["seq_len", "seqlen", "sequence_length", "context_length"]),
    ("global_batch", &["global_batch_size", "gbs"]),
    ("micro_batch", &["micro_batch_size", "microbatch", "mbs"]),
    ("tp", &["tensor_parallel", "tensor_parallel_size"]),
    ("pp", &["pipeline_parallel", "pipeline_parallel_size"]),
    ("dp", &["data_parallel", "data_parallel_size"]),
    ("cp", &["context_parallel", "context_parallel_size"]),
    ("ep", &["expert_parallel", "expert_parallel_size"]),
    ("precision", &["dtype"]),
    ("recompute", &["activation_checkpointing", "recomputation"]),
    ("iteration_s", &["step_time_s", "step_s", "iteration_time_s", "seconds_per_step"]),
    ("iteration_ms", &["step_time_ms", "step_ms", "iteration_time_ms", "ms_per_step"]),
    ("samples_per_s", &["samples_per_sec", "sequences_per_s"]),
    ("tokens_per_s_per_gpu", &["tokens_per_sec_per_gpu", "tok_s_gpu", "tokens_per_gpu_per_s", "tgs"]),
    ("tokens_per_s", &["tokens_per_sec", "tokens_per_second"]),
    ("mfu", &["mfu_pct", "mfu_percent"]),
    ("tflops_per_gpu", &["tflops", "model_tflops_per_gpu"]),
];

/// Other names that a field goes by.
pub fn names(field: &str) -> &'static [&'static str] {
    NAMES.iter().find(|(name, _)| *name == field).map_or(&[], |(_, others)| others)
}

/// What a value states; `None`: nothing. A list of one states what is in it.
pub fn stated(value: &Value) -> Option<&Value> {
    match value {
        Value::Null => None,
        Value::Array(list) if list.len() == 1 => stated(&list[0]),
        Value::Array(list) if list.is_empty() => None,
        Value::String(text) if says_nothing(text) => None,
        other => Some(other),
    }
}

fn says_nothing(text: &str) -> bool {
    let word: String = text.chars().filter(|c| !c.is_whitespace()).flat_map(char::to_lowercase).collect();
    NOTHING.contains(&word.as_str())
}

/// What a number may count, behind it.
const COUNTED: &[&str] = &["tokens", "gpus", "layers", "heads", "s", "sec", "seconds", "sequences", "samples"];

/// A number, also one in quotes: with separators of thousands, a sign of about, a `K` of 1024 or an `M` of its square, a percent
/// sign, or what it counts.
pub fn number(value: &Value) -> Option<f64> {
    let Value::String(text) = value else { return value.as_f64() };
    let text = text.trim().trim_start_matches(['~', '\u{2248}']).trim().replace([',', '_'], "");
    let digits = text.chars().take_while(|c| c.is_ascii_digit() || *c == '.').count();
    let (head, unit) = text.split_at(digits);
    let of: f64 = head.parse().ok()?;
    match unit.trim() {
        "" => Some(of),
        "%" => Some(of / 100.0),
        "k" | "K" => Some(of * 1024.0),
        "m" | "M" => Some(of * 1024.0 * 1024.0),
        word if COUNTED.contains(&word.to_lowercase().as_str()) => Some(of),
        _ => None,
    }
}

/// Yes or no.
pub fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        Value::String(text) => match text.trim().to_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        },
        other => other.as_u64().filter(|n| *n < 2).map(|n| n == 1),
    }
}

/// Text, also of a number or a few words in a list.
pub fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        Value::Array(list) => list.iter().map(text).collect::<Option<Vec<_>>>().map(|words| words.join(" ")),
        _ => None,
    }
}

/// JSON without the words that Python writes for numbers that are none: `null` stands for them.
pub fn without_nan(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let (mut quoted, mut escaped, mut rest) = (false, false, json);
    while let Some(c) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].iter().find(|word| !quoted && rest.starts_with(**word));
        if let Some(word) = word {
            out.push_str("null");
            rest = &rest[word.len()..];
            continue;
        }
        quoted ^= c == '"' && !escaped;
        escaped = quoted && c == '\\' && !escaped;
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_as_people_write_them() {
        for (value, is) in [
            (json!("8"), Some(8.0)),
            (json!("1,024"), Some(1024.0)),
            (json!("~12.5"), Some(12.5)),
            (json!("4K"), Some(4096.0)),
            (json!("45%"), Some(0.45)),
            (json!("1M"), Some(1048576.0)),
            (json!("4096 tokens"), Some(4096.0)),
            (json!("12.3 s"), Some(12.3)),
            (json!("eight"), None),
            (json!("8 or 16"), None),
            (json!({}), None),
        ] {
            assert_eq!(number(&value), is, "{value}");
        }
        assert_eq!((flag(&json!("yes")), flag(&json!(0)), flag(&json!("maybe"))), (Some(true), Some(false), None));
        assert_eq!((text(&json!(["a", 1])), text(&json!({}))), (Some("a 1".into()), None));
        assert!([json!(null), json!("N/A"), json!([]), json!(["unknown"])].iter().all(|v| stated(v).is_none()));
        assert_eq!(stated(&json!([8])), Some(&json!(8)));
    }

    #[test]
    fn what_is_no_number_is_null_outside_of_quotes() {
        assert_eq!(
            without_nan(r#"{"a": NaN, "NaN": -Infinity, "b": "\"NaN"}"#),
            r#"{"a": null, "NaN": null, "b": "\"NaN"}"#
        );
    }
}
