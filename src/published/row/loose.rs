//! Values as people write them: a number in quotes, a list of one, words that say that nothing is stated, names of
//! fields as other tables have them.

use serde_json::Value;

/// Words that state nothing.
const NOTHING: &[&str] =
    &["", "-", "?", "n/a", "na", "none", "null", "nan", "unknown", "unstated", "notstated", "tbd", "auto"];

/// Other names of a field: of tables of libraries, of the flags of Megatron-LM, DeepSpeed and torchtitan, and of Hugging Face's
/// configs.
const NAMES: &[(&str, &[&str])] = &[
    ("gpu", &["gpu_type", "gpu_name", "gpu_model", "device", "accelerator", "hardware"]),
    (
        "gpus",
        &["num_gpus", "n_gpus", "ngpus", "gpu_count", "world_size", "total_gpus", "num_devices", "num_chips", "chips"],
    ),
    ("gpus_per_node", &["num_gpus_per_node", "n_gpus_per_node", "devices_per_node", "gpus_per_host", "nproc_per_node"]),
    ("nodes", &["num_nodes", "n_nodes", "nnodes", "node_count", "hosts"]),
    ("interconnect", &["network", "fabric", "link"]),
    ("system", &["framework", "software", "library"]),
    ("model", &["model_name"]),
    ("params_b", &["num_params_b", "parameters_b", "params_billion", "model_size_b"]),
    ("layers", &["num_layers", "n_layers", "n_layer", "num_hidden_layers"]),
    ("hidden", &["hidden_size", "d_model", "n_embd", "hidden_dim"]),
    ("heads", &["num_heads", "n_heads", "n_head", "num_attention_heads"]),
    ("kv_heads", &["num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"]),
    ("head_dim", &["head_size", "kv_channels"]),
    ("ffn", &["ffn_hidden_size", "intermediate_size", "ffn_size", "d_ff", "ffn_dim", "n_inner"]),
    ("gated_ffn", &["swiglu", "gated_mlp"]),
    ("vocab", &["vocab_size", "vocabulary", "padded_vocab_size"]),
    ("n", &["num_experts", "n_experts", "num_local_experts", "n_routed_experts"]),
    ("topk", &["top_k", "moe_router_topk", "num_experts_per_tok", "experts_per_token"]),
    ("shared", &["n_shared_experts", "num_shared_experts"]),
    ("shared_ffn", &["moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"]),
    ("every", &["interleave_moe_layer_step", "moe_layer_freq"]),
    ("moe_ffn", &["moe_ffn_hidden_size", "moe_intermediate_size", "expert_ffn"]),
    ("dense_layers", &["first_k_dense_replace", "num_dense_layers"]),
    (
        "seq",
        &[
            "seq_len",
            "seqlen",
            "seq_length",
            "sequence_length",
            "max_seq_len",
            "max_seq_length",
            "context_length",
            "context_len",
        ],
    ),
    ("global_batch", &["global_batch_size", "gbs", "batch_size", "train_batch_size", "global_bs"]),
    ("global_batch_tokens", &["tokens_per_batch", "batch_tokens", "tokens_per_step", "batch_size_tokens"]),
    (
        "grad_accum",
        &["gradient_accumulation_steps", "gradient_accumulation", "grad_acc", "num_microbatches", "num_micro_batches"],
    ),
    (
        "micro_batch",
        &[
            "micro_batch_size",
            "microbatch",
            "mbs",
            "train_micro_batch_size_per_gpu",
            "per_device_train_batch_size",
            "local_batch_size",
        ],
    ),
    (
        "tp",
        &["tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_degree", "tp_size"],
    ),
    (
        "pp",
        &[
            "pipeline_parallel",
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
            "pipeline_parallel_degree",
            "pp_size",
        ],
    ),
    (
        "vp",
        &[
            "vpp",
            "virtual_pipeline",
            "virtual_pipeline_parallel",
            "virtual_pipeline_model_parallel_size",
            "virtual_stages",
            "interleave",
        ],
    ),
    ("dp", &["data_parallel", "data_parallel_size", "data_parallel_degree", "dp_size"]),
    ("cp", &["context_parallel", "context_parallel_size", "context_parallel_degree", "cp_size"]),
    ("ulysses", &["ulysses_degree", "ulysses_size", "sequence_parallel_size", "sp_size"]),
    ("ring", &["ring_degree", "ring_size"]),
    (
        "ep",
        &["expert_parallel", "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree", "ep_size"],
    ),
    ("zero", &["zero_stage", "sharding"]),
    ("seq_parallel", &["sequence_parallel"]),
    ("precision", &["dtype", "data_type", "compute_dtype", "mixed_precision"]),
    (
        "recompute",
        &[
            "activation_checkpointing",
            "recomputation",
            "activation_recompute",
            "activation_recomputation",
            "gradient_checkpointing",
            "recompute_granularity",
        ],
    ),
    (
        "iteration_s",
        &[
            "step_time_s",
            "step_s",
            "iteration_time_s",
            "seconds_per_step",
            "seconds_per_iteration",
            "step_time",
            "iteration_time",
        ],
    ),
    (
        "iteration_ms",
        &[
            "step_time_ms",
            "step_ms",
            "iteration_time_ms",
            "ms_per_step",
            "ms_per_iteration",
            "elapsed_time_per_iteration_ms",
        ],
    ),
    ("samples_per_s", &["samples_per_sec", "samples_per_second", "sequences_per_s", "sequences_per_second"]),
    (
        "tokens_per_s_per_gpu",
        &[
            "tokens_per_sec_per_gpu",
            "tokens_per_second_per_gpu",
            "tok_s_gpu",
            "tokens_per_gpu_per_s",
            "tokens_per_gpu_per_second",
            "tgs",
        ],
    ),
    ("tokens_per_s", &["tokens_per_sec", "tokens_per_second"]),
    ("mfu", &["mfu_pct", "mfu_percent"]),
    ("hfu", &["hfu_pct", "hfu_percent"]),
    ("tflops_per_gpu", &["tflops", "model_tflops_per_gpu", "tflops_per_device", "achieved_tflops"]),
    ("mem_gib", &["peak_memory_gib", "max_memory_gib", "peak_mem_gib", "memory_gib"]),
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

/// The number of a field, also one in quotes: with separators of thousands, a sign of about, a `K` of 1024 or an `M` of its
/// square, a percent sign, or the field's unit.
pub fn number(field: &str, value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => super::quantity::of_field(field, text),
        other => other.as_f64(),
    }
}

/// Whether a value says something that a plan could depend on: no number of one or none, no `false`, and nothing empty.
pub fn says_something(value: &Value) -> bool {
    stated(value).is_some_and(|value| match value {
        Value::Bool(is) => *is,
        Value::Object(inner) => inner.values().any(|value| stated(value).is_some()),
        Value::Array(_) => true,
        other => number("", other).is_none_or(|n| n != 0.0 && n != 1.0),
    })
}

/// Text of no more than a line.
pub fn clipped(text: &str) -> String {
    const MOST: usize = 80;
    if text.chars().count() <= MOST {
        return text.into();
    }
    text.chars().take(MOST).chain("..".chars()).collect()
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
            assert_eq!(number("", &value), is, "{value}");
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
