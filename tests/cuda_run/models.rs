//! Layers of other models.

use crate::step::{ENGINES, hold, model, none};
use foretrain::plan::Dtype;
use foretrain::spec::{Documents, LlmSpec, MlaSpec, Parallelism, Positions, RopeScaling, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{build, build_routed};

/// Norms of heads (Qwen3), and latent attention (DeepSeek-V2) with queries compressed and not, heads 32 + 32 wide.
#[test]
fn heads_of_other_models() {
    let documents = Documents::default();
    let work = Workload { seq_len: 64, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let mla = |q_lora| MlaSpec { q_lora, kv_lora: 24, rope_dim: 32, nope_dim: 32, v_dim: 32 };
    let latent = |q_lora| LlmSpec { mla: Some(mla(q_lora)), head_dim: 64, ..model(1, 4) };
    let plan = |model: &LlmSpec, par| build(model, &work, &par, ENGINES).unwrap();
    hold(&plan(&LlmSpec { qk_norm: true, ..model(1, 2) }, Parallelism { ring: 2, ..none() }), &[0]);
    hold(&plan(&latent(Some(40)), Parallelism { ring: 2, ..none() }), &[0]);
    hold(&plan(&latent(None), Parallelism { tp: 2, ..none() }), &[0, 1]);
}

/// Frequencies scaled as YaRN does it, with a factor of turned queries and keys and, of latent attention, one of all scores.
#[test]
fn heads_that_turn_by_scaled_frequencies() {
    let documents = Documents::default();
    let work = Workload { seq_len: 64, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let rope_scaling = Some(RopeScaling::Yarn {
        factor: 8.0,
        beta_fast: 2.0,
        beta_slow: 0.25,
        original: 16,
        truncate: true,
        attention_factor: 1.2,
        mscale_all_dim: 1.0,
    });
    let model = LlmSpec { rope_scaling, ..model(1, 4) };
    let mla = MlaSpec { q_lora: Some(40), kv_lora: 24, rope_dim: 32, nope_dim: 32, v_dim: 32 };
    let latent = LlmSpec { mla: Some(mla), head_dim: 64, ..model.clone() };
    hold(&build(&model, &work, &Parallelism { ring: 2, ..none() }, ENGINES).unwrap(), &[0]);
    hold(&build(&latent, &work, &Parallelism { ring: 2, ..none() }, ENGINES).unwrap(), &[0]);
}

/// Scores that lean on distance (ALiBi), by heads that are cut over ranks too.
#[test]
fn scores_that_lean_on_distance() {
    let model = LlmSpec { positions: Positions::Alibi, ..model(1, 4) };
    let work =
        Workload { seq_len: 128, global_batch: 1, micro_batch: 1, dtype: Dtype::Bf16, documents: Default::default() };
    for par in [Parallelism { ring: 2, ulysses: 2, ..none() }, Parallelism { tp: 2, ..none() }] {
        hold(&build(&model, &work, &par, ENGINES).unwrap(), &[0]);
    }
}

/// Few layers, each of one kind behind a norm (Nemotron-H): gradients of more of them are far off in bf16 on CPUs too.
fn layers(pattern: &str) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": pattern,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "chunk_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32, "vocab_size": 64,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": false,
    });
    LlmSpec::parse("test", pattern, &json.to_string()).unwrap()
}

/// State spaces, and networks and experts with squared ReLUs.
#[test]
fn layers_of_several_kinds() {
    let documents = Documents::default();
    let work = Workload { seq_len: 128, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let tp = Parallelism { tp: 2, ..none() };
    let ep = Parallelism { dp: 2, ep: 2, zero: 0, ..none() };
    // Two ranks to a group, in the order of a zigzag ring.
    let spread = Parallelism { ring: 2, ulysses: 2, ..none() };
    for (pattern, par) in [("M", &tp), ("-", &tp), ("ME", &ep), ("M", &spread)] {
        let route = Routing::Uniform { seed: 5 }.route(&layers(pattern), &work, par, 2).unwrap();
        hold(&build_routed(&layers(pattern), &work, par, ENGINES, route).unwrap(), &[0]);
    }
}
