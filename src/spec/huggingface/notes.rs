//! What a config states that no plan has, said in lines: fields that are known to change memory or time, and by name every
//! other field that nobody asked for.

use super::Config;
use crate::spec::LlmSpec;
use serde_json::Value;

/// Fields that say nothing of memory or time: of tokens, of files, of how weights begin, of inference, or of values alone, which
/// [`values`](super::values) are for.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_name_or_path",
    "activation",
    "add_bos_token",
    "architectures",
    "attention_dropout",
    "attention_multiplier",
    "attention_softmax_in_fp32",
    "attn_implementation",
    "attn_pdrop",
    "attn_scale",
    "attn_temperature_tuning",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "cache_implementation",
    "chat_template",
    "classifier_dropout",
    "decoder_start_token_id",
    "dtype",
    "embd_pdrop",
    "embed_pdrop",
    "embedding_dropout",
    "embedding_multiplier",
    "eos_token_id",
    "ep_size",
    "floor_scale",
    "full_attn_mod",
    "gradient_checkpointing",
    "hidden_act",
    "id2label",
    "image_token_id",
    "image_token_index",
    "initial_context_length",
    "initializer_range",
    "interpolate_factor",
    "intermediate_size",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "logit_scale",
    "logits_scaling",
    "logits_to_keep",
    "masked_softmax_fusion",
    "max_position_embeddings",
    "max_seq_len",
    "max_window_layers",
    "model_max_length",
    "model_type",
    "n_ctx",
    "n_positions",
    "norm_type",
    "offset_alibi",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "partial_rotary_factor",
    "pretraining_tp",
    "query_pre_attn_scalar",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "residual_multiplier",
    "resid_pdrop",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scale_attn_weights",
    "seq_aux",
    "seq_length",
    "seq_length_training",
    "slow_but_exact",
    "source",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "swiglu_limit",
    "task_specific_params",
    "topk_method",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "use_mem_eff_path",
    "use_mamba_kernels",
    "dropout",
    "hidden_dropout",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
];

/// Adds the notes of a model that `config` states, a part of `whole` where it sees or hears, too.
pub fn add(whole: &Config, config: &Config, spec: &mut LlmSpec) {
    let seen = ["vision_config", "audio_config"].into_iter().filter(|part| whole.json.get(*part).is_some_and(says));
    let parts: Vec<&str> = seen.collect();
    if !parts.is_empty() {
        let which = parts.join(" and ");
        spec.notes.push(format!("{which}: only the language model is costed, without what reads images or sound"));
    }
    let quantised = [config, whole].into_iter().find_map(|c| c.json.get("quantization_config").filter(|v| says(v)));
    if let Some(how) = quantised {
        let method = how.get("quant_method").and_then(Value::as_str).unwrap_or("of some kind");
        spec.notes.push(format!(
            "quantization_config: the checkpoint is quantised ({method}); weights here are of --dtype, and products too \
             unless --options fp8"
        ));
    }
    let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
    let capped: Vec<&str> = caps.into_iter().filter(|cap| config.json.get(*cap).is_some_and(says)).collect();
    if !capped.is_empty() {
        spec.notes.push(format!("{}: caps on scores take no time here", capped.join(" and ")));
    }
    if spec.indexer.is_none() && config.json.get("index_topk").is_some_and(says) {
        let what =
            "index_topk: each token sees all keys here, not those that an indexer chooses; the indexer is left out";
        spec.notes.push(what.into());
    }
    if spec.indexer.is_some() && shares_choices(config) {
        let what = "index_topk_freq, index_topk_pattern or indexer_types: layers that see what another's indexer chose have \
                    an indexer of their own here";
        spec.notes.push(what.into());
    }
    if spec.mtp.is_none() && config.json.get("num_nextn_predict_layers").is_some_and(says) && spec.pattern.is_empty() {
        let what = "num_nextn_predict_layers: modules of multi-token prediction are left out for this model type";
        spec.notes.push(what.into());
    }
    if config.json.get("attention_bias").and_then(Value::as_bool) == Some(true) && !spec.biased_qkv() {
        spec.notes.push("attention_bias true: biases of attention are left out for this model type".into());
    }
    let dropped = |field: &str| config.json.get(field).and_then(Value::as_f64);
    if let (Some(attention), Some(rest)) = (dropped("attn_pdrop"), dropped("resid_pdrop"))
        && attention != rest
    {
        let what =
            format!("attn_pdrop {attention}: dropout is resid_pdrop's {rest} everywhere here, that of attention too");
        spec.notes.push(what);
    }
    spec.notes.extend(window_left_out(config, spec));
    let said = ["quantization_config", "index_topk", "indexer_types", "num_nextn_predict_layers", "attention_bias"];
    let said: Vec<&str> = said.into_iter().chain(caps).chain(WINDOW).collect();
    let unread = unread(config, &said);
    if !unread.is_empty() {
        let names = unread.join(", ");
        spec.notes.push(format!("fields that are not read, whatever they change: {names}"));
    }
}

/// Whether some layers have no indexer and take what another chose.
fn shares_choices(config: &Config) -> bool {
    let field = |name: &str| config.json.get(name).filter(|value| says(value));
    let shared = |types: &Value| types.as_array().is_some_and(|all| all.iter().any(|of| of.as_str() == Some("shared")));
    field("index_topk_freq").and_then(Value::as_u64).is_some_and(|every| every > 1)
        || field("index_topk_pattern").is_some()
        || field("indexer_types").is_some_and(shared)
}

/// Fields that state a window, and whether there is one.
const WINDOW: [&str; 3] = ["sliding_window", "sliding_window_size", "use_sliding_window"];

/// A window that the config states and the model has not, unless the config says, too, that no layer has it.
fn window_left_out(config: &Config, spec: &LlmSpec) -> Option<String> {
    let stated = WINDOW.into_iter().find_map(|field| Some((field, config.json.get(field).filter(|v| says(v))?)));
    let off = config.json.get("use_sliding_window").and_then(Value::as_bool) == Some(false);
    // Some families have a window only where that is said, and words for layers say which have it.
    let read = config.read.borrow();
    let listed = config.json.get("layer_types").is_some_and(Value::is_array) && spec.pattern.is_empty();
    let settled = off || listed || read.contains("use_sliding_window");
    let (field, value) = stated.filter(|_| spec.window.is_none() && !settled)?;
    Some(format!("{field} {value}: windows are left out for this model type; every token sees all before it"))
}

/// Whether a value is any: neither null, nor false, zero or empty.
pub(super) fn says(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(n) => n.as_f64() != Some(0.0),
        Value::String(s) => !s.is_empty(),
        Value::Array(all) => !all.is_empty(),
        Value::Object(all) => !all.is_empty(),
        Value::Bool(true) => true,
    }
}

fn unread(config: &Config, said: &[&str]) -> Vec<String> {
    let read = config.read.borrow();
    let Some(fields) = config.json.as_object() else { return vec![] };
    let known = |field: &String| {
        read.contains(field)
            || HARMLESS.contains(&field.as_str())
            || said.contains(&field.as_str())
            || field.starts_with("index_")
    };
    fields.iter().filter(|(field, value)| says(value) && !known(field)).map(|(field, _)| field.clone()).collect()
}
