//! Hugging Face configs with the spellings of published models: weights as they were counted, layers as they are, notes for
//! what no plan has; and models of their make, run for real, against the dense f64 reference.

mod dense;

use foretrain::plan::{Dtype, Engine};
use foretrain::spec::{LlmSpec, Mixer, Parallelism, Recompute, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build_routed};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Published {
    name: String,
    source: String,
    params: f64,
    /// Of these, what is no part of the language model.
    #[serde(default)]
    beside: f64,
    /// How far the shapes of its layers are from that, where it is more than 1 %.
    within: Option<f64>,
    /// With the embedding.
    active: Option<f64>,
    config: Value,
}

fn published() -> Vec<Published> {
    serde_json::from_str(include_str!("huggingface/models.json")).expect("a list of models")
}

fn read(name: &str) -> LlmSpec {
    let found = published().into_iter().find(|m| m.name == name).expect("a model of the list");
    LlmSpec::parse("config.json", name, &found.config.to_string()).expect("a config that is read")
}

#[test]
fn weights_are_those_that_were_published() {
    for model in published() {
        let spec =
            LlmSpec::parse("config.json", &model.name, &model.config.to_string()).expect("a config that is read");
        // The module of GLM-4.5 has an embedding and a head of its own in the checkpoint.
        let tables = (2 * spec.vocab * spec.hidden) as f64;
        let counted = match model.name.starts_with("GLM-4.5") {
            true => (spec.params() + spec.mtp_params()) as f64 + tables,
            false => spec.params() as f64 + model.beside,
        };
        let off = counted / model.params - 1.0;
        assert!(
            off.abs() < model.within.unwrap_or(0.01),
            "{}: {counted:.4e} of {:.4e} ({})",
            model.name,
            model.params,
            model.source
        );
        if let Some(active) = model.active {
            let off = spec.active_params() as f64 / active - 1.0;
            assert!(off.abs() < 0.03, "{}: {:.3e} of {active:.3e} active", model.name, spec.active_params() as f64);
        }
        let unread = spec.notes.iter().find(|note| note.contains("not read"));
        assert_eq!(unread, None, "{}", model.name);
    }
}

#[test]
fn layers_see_windows_where_the_models_have_them() {
    for (name, window, near) in [
        ("Gemma-2-9B", 4096, 21),
        ("Gemma-3-27B", 1024, 52),
        ("gpt-oss-120b", 128, 18),
        ("Llama-4-Scout-17B-16E", 8192, 36),
        ("Phi-3-mini-4k", 2047, 32),
    ] {
        let m = read(name);
        let windowed = (0..m.layers).filter(|l| m.window_of(*l) == Some(window)).count();
        assert_eq!((m.window, windowed), (Some(window), near), "{name}");
    }
    // In Gemma the sixth, in gpt-oss the second sees all.
    let far = |name: &str| (0..8).filter(|l| read(name).window_of(*l).is_none()).collect::<Vec<u64>>();
    assert_eq!((far("Gemma-3-27B"), far("gpt-oss-20b")), (vec![5], vec![1, 3, 5, 7]));
    assert_eq!((read("Qwen2.5-7B").window, read("Mistral-7B-v0.3").window), (None, None));
    let maverick = read("Llama-4-Maverick-17B-128E");
    assert_eq!((maverick.count(Mixer::Experts), maverick.has_experts(0), maverick.has_experts(1)), (24, false, true));
    let next = read("Qwen3-Next-80B-A3B");
    assert_eq!(
        [Mixer::Mamba, Mixer::Attention, Mixer::Experts].map(|mixer| next.count(mixer)),
        [36, 12, 48],
        "three layers of four have linear attention"
    );
    assert_eq!(&next.pattern[4..8], [Mixer::Mamba, Mixer::Experts, Mixer::Attention, Mixer::Experts]);
}

/// Of 16 tokens each sees 8.5 on average, in a window of 4 3.625.
#[test]
fn model_flops_count_windows_layer_by_layer() {
    let with = |windowed: Vec<bool>| LlmSpec { window: Some(4), windowed, ..small("llama", json!({})) };
    let flops = |windowed| with(windowed).flops_per_token(16);
    let (all, none) = (flops(vec![]), LlmSpec { window: None, ..with(vec![]) }.flops_per_token(16));
    assert_eq!(flops(vec![true, false, true, false]), (all + none) / 2.0);
    assert_eq!(none - all, 12.0 * 16.0 * 4.0 * (8.5 - 3.625), "12 FLOPs, 16 columns, 4 layers");
}

#[test]
fn what_no_plan_has_is_said() {
    for (name, parts) in [
        ("Llama-3.1-8B", &[][..]),
        ("Qwen3-8B", &[]),
        ("Phi-4", &[]),
        ("DeepSeek-V3", &["quantization_config: the checkpoint is quantised (fp8)"]),
        ("DeepSeek-V3.2", &["quantization_config"]),
        ("gpt-oss-120b", &["sinks of attention", "(mxfp4)"]),
        ("Gemma-2-27B", &["gated GELU", "attn_logit_softcapping and final_logit_softcapping"]),
        ("Gemma-7B", &["gated GELU"]),
        ("Gemma-3-4B", &["gated GELU", "vision_config"]),
        ("Llama-4-Scout-17B-16E", &["attention_chunk_size 8192", "use_qk_norm", "vision_config"]),
        ("Qwen3-Next-80B-A3B", &["linear_attention", "output gate of attention is left out: 101 million weights"]),
        ("OLMo-2-7B", &["olmo2: norms"]),
    ] {
        let notes = read(name).notes;
        assert_eq!(notes.len(), parts.len(), "{name}: {notes:?}");
        assert!(parts.iter().all(|part| notes.iter().any(|note| note.contains(part))), "{name}: {notes:?}");
    }
    let more = small("llama", json!({"num_nextn_predict_layers": 1, "altup_num_inputs": 4, "new_kind_of_cache": true}));
    assert!(more.notes[0].contains("num_nextn_predict_layers"), "{:?}", more.notes);
    assert!(more.notes[1].ends_with("altup_num_inputs, new_kind_of_cache"), "{:?}", more.notes);
    let biased = small("mistral", json!({"attention_bias": true}));
    assert!(biased.notes[0].starts_with("attention_bias true"), "{:?}", biased.notes);
}

/// A window that no layer gets is said, unless the config says itself that none has it.
#[test]
fn windows_that_are_left_out_are_said() {
    let neox = json!({"sliding_window": 1024, "hidden_act": "gelu", "num_key_value_heads": null});
    let plain = json!({"sliding_window": 1024});
    let asked = json!({"sliding_window": 1024, "use_sliding_window": true});
    for (kind, changes) in [("llama", plain.clone()), ("gpt_neox", neox), ("smollm3", asked)] {
        let model = small(kind, changes);
        assert_eq!(model.window, None, "{kind}");
        let note = "sliding_window 1024: windows are left out for this model type";
        let told: Vec<&String> = model.notes.iter().filter(|said| said.contains("sliding_window")).collect();
        assert!(told.len() == 1 && told[0].starts_with(note), "{kind}: {:?}", model.notes);
    }
    let size = small("llama", json!({"sliding_window_size": 512, "use_sliding_window": true}));
    assert!(size.notes.len() == 1 && size.notes[0].starts_with("sliding_window_size 512:"), "{:?}", size.notes);
    let all = json!(["full_attention", "full_attention", "full_attention", "full_attention"]);
    for (kind, changes) in [
        ("llama", json!({"sliding_window": 1024, "use_sliding_window": false})),
        ("llama", json!({"sliding_window": null})),
        ("llama", json!({"sliding_window": 1024, "layer_types": all})),
        // By default these have none.
        ("qwen2", plain.clone()),
        ("qwen3", json!({"sliding_window": 1024, "use_sliding_window": true, "max_window_layers": 4})),
        // And these have it.
        ("mistral", plain.clone()),
        ("qwen2", json!({"sliding_window": 1024, "use_sliding_window": true, "max_window_layers": 2})),
    ] {
        let notes = small(kind, changes.clone()).notes;
        assert!(notes.is_empty(), "{kind} {changes}: {notes:?}");
    }
    // Blocks side by side are read of GPT-NeoX, whose they are, and told where nothing reads them.
    let side_by_side = |kind: &str, act: &str| {
        small(kind, json!({"use_parallel_residual": true, "hidden_act": act, "num_key_value_heads": null}))
    };
    let (neox, llama) = (side_by_side("gpt_neox", "gelu"), side_by_side("llama", "silu"));
    assert!(neox.parallel_block && neox.notes.is_empty(), "{:?}", neox.notes);
    assert!(llama.notes.len() == 1 && llama.notes[0].ends_with(": use_parallel_residual"), "{:?}", llama.notes);
}

#[test]
fn what_cannot_be_read_names_file_field_value_and_remedy() {
    let refused = |changes: Value| tiny(changes).map(|_| ()).unwrap_err().to_string();
    let linear = json!(["linear_attention", "full_attention", "full_attention", "full_attention"]);
    for (changes, parts) in [
        (json!({"model_type": "mamba"}), &["config.json: model_type: \"mamba\"", "llama", "write that name"][..]),
        (json!({"text_config": {"hidden_size": 8}}), &["text_config.model_type: missing", "gemma3_text"]),
        (json!({"layer_types": linear}), &["layer_types: \"linear_attention\"", "use full_attention"]),
        (json!({"layer_types": ["full_attention"]}), &["layer_types: 1 layers", "num_hidden_layers is 4"]),
        (
            json!({"layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"]}),
            &["sliding_window: missing", "tokens"],
        ),
        (
            json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                "mlp_only_layers": [0, 4]}),
            &["mlp_only_layers: 4 is no layer of the 4", "0 to 3"],
        ),
        (
            json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                "decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}),
            &["mlp_only_layers: no layer is left", "leave one of them out"],
        ),
        (
            json!({"model_type": "llama4_text", "num_local_experts": 4, "moe_layers": "all"}),
            &["moe_layers: \"all\" is no list of layers", "[0, 1]"],
        ),
    ] {
        let why = refused(changes.clone());
        assert!(why.starts_with("config.json: ") && parts.iter().all(|part| why.contains(part)), "{changes}: {why}");
    }
}

/// What leaves no experts, or more choices than there are experts, is said of the field that has it.
#[test]
fn counts_of_experts_that_cannot_be_are_named() {
    for name in ["DeepSeek-V3", "Kimi-K2", "GLM-4.5"] {
        for (field, value, part) in
            [("first_k_dense_replace", 100, "leaves none of the"), ("num_experts_per_tok", 500, "500 is more than the")]
        {
            let mut config = published().into_iter().find(|m| m.name == name).expect("a model of the list").config;
            config[field] = value.into();
            let why = LlmSpec::parse("config.json", name, &config.to_string()).unwrap_err().to_string();
            assert!(why.starts_with(&format!("config.json: {field}: ")) && why.contains(part), "{name}: {why}");
        }
    }
}

/// What transformers 5 writes of the same models: another name for the number of experts, and the width of a head as a sum.
#[test]
fn newer_spellings_are_read() {
    let qwen = |field: &str| {
        let mut config = json!({"model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 8});
        config[field] = 6.into();
        tiny(config).expect("a sound model")
    };
    assert_eq!(qwen("num_local_experts"), qwen("num_experts"));
    let deepseek = |sum: u64| {
        let mut config = published().into_iter().find(|m| m.name == "DeepSeek-V3").expect("a model of the list").config;
        config["qk_head_dim"] = sum.into();
        LlmSpec::parse("config.json", "DeepSeek-V3", &config.to_string())
    };
    assert_eq!(deepseek(192).expect("the sum of both parts"), read("DeepSeek-V3"));
    let why = deepseek(190).unwrap_err().to_string();
    assert!(why.starts_with("config.json: qk_head_dim: 190 is not") && why.contains("192; use that"), "{why}");
}

/// Modules of multi-token prediction are no loop: ten thousand of them ended the program.
#[test]
fn modules_without_end_are_refused() {
    let mut config = published().into_iter().find(|m| m.name == "DeepSeek-V3").expect("a model of the list").config;
    config["num_nextn_predict_layers"] = 10_000.into();
    let why = LlmSpec::parse("config.json", "DeepSeek-V3", &config.to_string()).unwrap_err().to_string();
    assert!(why.starts_with("config.json: num_nextn_predict_layers: 10000 modules; at most 64"), "{why}");
}

fn tiny(changes: Value) -> foretrain::error::Result<LlmSpec> {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "vocab_size": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false,
    });
    changes.as_object().expect("fields").iter().for_each(|(field, value)| config[field] = value.clone());
    LlmSpec::parse("config.json", "tiny", &config.to_string())
}

fn small(kind: &str, mut changes: Value) -> LlmSpec {
    changes["model_type"] = kind.into();
    tiny(changes).expect("a sound model")
}

fn holds(model: LlmSpec, par: Parallelism) {
    let work = Workload {
        seq_len: 16,
        global_batch: 2 * u64::from(par.dp),
        micro_batch: 1,
        dtype: Dtype::F64,
        documents: Default::default(),
    };
    let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } };
    let route = Routing::Uniform { seed: 3 }.route(&model, &work, &par, 2).expect("a feasible case");
    let plan = build_routed(&model, &work, &par, engines, route).expect("a feasible case");
    dense::holds(&plan, 1e-9);
}

#[test]
fn windows_in_some_layers_run() {
    let gemma = || {
        small(
            "gemma3_text",
            json!({"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 3, "sliding_window_pattern": 2}),
        )
    };
    let par = Parallelism::default();
    holds(gemma(), par);
    holds(gemma(), Parallelism { recompute: Recompute::Full, ..par });
    for (tp, ring, ulysses, dp, pp, zero) in [
        (2, 1, 1, 1, 1, 0),
        (1, 2, 1, 1, 1, 0),
        (1, 1, 2, 2, 1, 1),
        (1, 1, 1, 2, 1, 3),
        (1, 1, 1, 1, 2, 1),
        (1, 1, 1, 1, 3, 0),
    ] {
        holds(gemma(), Parallelism { tp, ring, ulysses, dp, pp, zero, ..par });
    }
    // One layer in three, and none behind it.
    let types = json!(["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]);
    holds(small("mistral", json!({"layer_types": types, "sliding_window": 5})), par);
}

#[test]
fn experts_in_every_second_layer_run_with_windows_and_without() {
    let llama4 = small(
        "llama4_text",
        json!({"num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "intermediate_size": 8,
            "intermediate_size_mlp": 24, "attention_chunk_size": 5, "use_qk_norm": false}),
    );
    let qwen = small(
        "qwen3_moe",
        json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 2,
            "norm_topk_prob": true}),
    );
    let oss = small(
        "gpt_oss",
        json!({"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": true, "sliding_window": 3}),
    );
    // Dense layers at the places of a list.
    let placed = small(
        "qwen3_moe",
        json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [2, 0],
            "norm_topk_prob": true}),
    );
    assert_eq!((0..4).map(|l| placed.has_experts(l)).collect::<Vec<_>>(), [false, true, false, true]);
    let listed = small(
        "llama4_text",
        json!({"num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "moe_layers": [3, 2],
            "intermediate_size": 8, "intermediate_size_mlp": 24, "use_qk_norm": false}),
    );
    assert_eq!(listed.dense_at, [0, 1]);
    for model in [llama4, qwen, oss, placed, listed] {
        for (tp, dp, ep, pp, zero) in
            [(1, 1, 1, 1, 0), (2, 1, 1, 1, 0), (1, 2, 2, 1, 1), (1, 2, 1, 1, 3), (1, 1, 1, 2, 1)]
        {
            holds(model.clone(), Parallelism { tp, dp, ep, pp, zero, ..Parallelism::default() });
        }
    }
}

#[test]
fn linear_attention_runs_as_its_stand_in() {
    let next = small(
        "qwen3_next",
        json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "norm_topk_prob": true, "full_attention_interval": 2, "linear_key_head_dim": 3, "linear_value_head_dim": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    );
    for (tp, dp, ep, pp) in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2)] {
        holds(next.clone(), Parallelism { tp, dp, ep, pp, ..Parallelism::default() });
    }
}

#[test]
fn grouped_queries_with_shared_experts_and_a_module_run() {
    let glm = small(
        "glm4_moe",
        json!({"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "attention_bias": true, "use_qk_norm": true, "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5}),
    );
    for (tp, dp, ep, pp) in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2)] {
        holds(glm.clone(), Parallelism { tp, dp, ep, pp, ..Parallelism::default() });
    }
}

/// Models of Llama's make with details of their own, and mixtures by their own words.
#[test]
fn kin_of_llama_run() {
    let experts = |words: Value| {
        let mut all = json!({"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8});
        words.as_object().expect("fields").iter().for_each(|(field, value)| all[field] = value.clone());
        all
    };
    let types = json!(["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]);
    for (kind, changes) in [
        ("smollm3", json!({})),
        ("seed_oss", json!({"residual_dropout": 0.0})),
        ("ernie4_5", json!({"use_bias": true})),
        ("granite", json!({"residual_multiplier": 0.2})),
        ("olmo3", json!({"layer_types": types, "sliding_window": 3})),
        ("glm4", json!({"attention_bias": true})),
        ("cohere", json!({"layer_norm_eps": 1e-5})),
        ("cohere2", json!({"sliding_window": 3, "sliding_window_pattern": 2})),
        ("starcoder2", json!({"hidden_act": "gelu_pytorch_tanh", "sliding_window": 5})),
        ("qwen2_moe", experts(json!({"shared_expert_intermediate_size": 8, "norm_topk_prob": true}))),
        ("olmoe", experts(json!({}))),
        ("granitemoeshared", experts(json!({"shared_intermediate_size": 8}))),
        (
            "ernie4_5_moe",
            json!({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_end_index": 2}),
        ),
        ("minimax_m2", experts(json!({"rotary_dim": 2, "num_mtp_modules": 1}))),
        ("dots1", experts(json!({"n_shared_experts": 1, "first_k_dense_replace": 1}))),
    ] {
        let model = small(kind, changes);
        for (tp, ulysses, dp, pp) in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2)] {
            holds(model.clone(), Parallelism { tp, ulysses, dp, pp, ..Parallelism::default() });
        }
    }
}

#[test]
fn kin_of_llama_are_read_as_they_are() {
    let windowed = |name: &str| {
        let m = read(name);
        (0..m.layers).filter(|l| m.window_of(*l) == Some(4096)).count()
    };
    assert_eq!(["Olmo-3-7B", "Command-R7B", "StarCoder2-15B", "SmolLM3-3B"].map(windowed), [24, 24, 40, 0]);
    let (m2, dots) = (read("MiniMax-M2"), read("dots.llm1"));
    assert_eq!((m2.rotary_dim, m2.qk_norm, m2.mtp.as_ref().map(|mtp| mtp.depth)), (Some(64), true, Some(3)));
    assert_eq!((dots.rotary_dim, dots.qk_norm, dots.moe.map(|moe| moe.dense_layers)), (None, true, Some(1)));
    let ernie = small(
        "ernie4_5_moe",
        json!({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 1,
            "moe_layer_end_index": 2}),
    );
    assert_eq!((0..4).map(|l| ernie.has_experts(l)).collect::<Vec<_>>(), [false, true, true, false]);
    for (kind, changes, want) in [
        ("ernie4_5_moe", json!({"moe_num_experts": 4, "moe_k": 5, "moe_intermediate_size": 8}), "moe_k: 5 is more"),
        (
            "ernie4_5_moe",
            json!({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 4}),
            "moe_layer_start_index: 4 leaves none",
        ),
        (
            "minimax_m2",
            json!({"num_local_experts": 4, "attn_type_list": [0, 1, 1, 1]}),
            "attn_type_list: a layer other",
        ),
        ("seed_oss", json!({"mlp_bias": true}), "mlp_bias: true"),
    ] {
        let mut changes = changes;
        changes["model_type"] = kind.into();
        let why = tiny(changes).unwrap_err().to_string();
        assert!(why.contains(want), "{why}");
    }
}
