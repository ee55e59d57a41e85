//! Multi-token prediction, run for real: losses, hidden states, every gradient and the new weights are those of the dense f64
//! reference on every layout; bytes and peaks are those of the plan.

mod dense;

use dense::{assert_close, config, error, reference};
use foretrain::exec::reference::{DenseConfig, Mtp};
use foretrain::exec::{Options, Run, execute};
use foretrain::plan::{Dtype, Engine, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Recompute, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build, build_routed};

struct Case {
    model: LlmSpec,
    par: Parallelism,
    microbatches: u64,
    dtype: Dtype,
}

fn case(par: Parallelism) -> Case {
    Case { model: latent(1), par, microbatches: 2, dtype: Dtype::F64 }
}

/// Of DeepSeek-V3's make: latent attention, a dense layer, layers with experts, and modules.
fn latent(modules: u64) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "deepseek_v3", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 24, "vocab_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "hidden_act": "silu",
        "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": true, "scoring_func": "sigmoid",
        "tie_word_embeddings": false, "num_nextn_predict_layers": modules, "mtp_loss_scaling_factor": 0.3,
    });
    LlmSpec::parse("test", "latent", &json.to_string()).expect("a sound model")
}

fn hybrid(pattern: &str) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "nemotron_h", "hidden_size": 12, "hybrid_override_pattern": "M*E-", "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 3,
        "ssm_state_size": 5, "n_groups": 2, "conv_kernel": 3, "chunk_size": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 5, "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 6, "vocab_size": 29, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": false, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": pattern,
    });
    LlmSpec::parse("test", "hybrid", &json.to_string()).expect("a sound model")
}

fn engines() -> Engines {
    Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } }
}

impl Case {
    fn work(&self) -> Workload {
        Workload {
            seq_len: 16,
            global_batch: self.microbatches * u64::from(self.par.dp),
            micro_batch: 1,
            dtype: self.dtype,
            documents: Default::default(),
        }
    }

    fn plan(&self) -> Plan {
        let work = self.work();
        let route = Routing::Uniform { seed: 3 }.route(&self.model, &work, &self.par, 2).expect("a feasible case");
        build_routed(&self.model, &work, &self.par, engines(), route).expect("a feasible case")
    }
}

fn holds(case: &Case, tolerance: f64) -> Run {
    dense::holds(&case.plan(), tolerance)
}

#[test]
fn one_module_and_several_on_one_rank() {
    for modules in [1, 2, 3] {
        holds(&Case { model: latent(modules), ..case(Parallelism::default()) }, 1e-9);
    }
    holds(&case(Parallelism { recompute: Recompute::Full, ..Parallelism::default() }), 1e-9);
    // Eight bits of a mantissa leave the loss to a hundredth; single gradients of so small a model less.
    let plan = Case { dtype: Dtype::Bf16, ..case(Parallelism::default()) }.plan();
    let got = execute(&plan, &Options::new(7, vec![0], true)).expect("the plan runs");
    assert_close("loss", &[got.loss], &[reference(&plan, &config(&plan)).loss], 0.01);
}

#[test]
fn modules_of_hybrids_have_layers_of_their_own_pattern() {
    for pattern in ["*E", "M", "-*"] {
        holds(&Case { model: hybrid(pattern), ..case(Parallelism::default()) }, 1e-9);
    }
    let pp = Parallelism { pp: 2, ..Parallelism::default() };
    holds(&Case { model: hybrid("*E"), ..case(pp) }, 1e-9);
}

#[test]
fn replicas_sequence_tensor_and_expert_ranks() {
    for (tp, ring, ulysses, dp, ep, zero) in [
        (1, 1, 1, 2, 1, 0),
        (1, 1, 1, 2, 2, 1),
        (2, 1, 1, 1, 1, 0),
        (2, 1, 1, 2, 4, 1),
        (1, 2, 1, 1, 2, 0),
        (1, 1, 2, 1, 1, 1),
    ] {
        holds(&case(Parallelism { tp, ring, ulysses, dp, ep, zero, ..Parallelism::default() }), 1e-9);
    }
    let whole = "no-sp".parse().unwrap();
    let dense = LlmSpec { moe: None, ..latent(1) };
    holds(&Case { model: dense, ..case(Parallelism { tp: 2, options: whole, ..Parallelism::default() }) }, 1e-9);
    let late = "no-overlap-grad".parse().unwrap();
    holds(&case(Parallelism { dp: 2, options: late, ..Parallelism::default() }), 1e-9);
}

/// The embedding is on the first and the last stage, which add up its gradients.
#[test]
fn modules_stand_on_the_last_stage() {
    holds(&case(Parallelism { pp: 3, ..Parallelism::default() }), 1e-9);
    let more = LlmSpec { layers: 4, ..latent(2) };
    let interleaved = Parallelism { pp: 2, vp: 2, ..Parallelism::default() };
    holds(&Case { model: more.clone(), ..case(interleaved) }, 1e-9);
    let words = "overlap-exchange+overlap-gather".parse().unwrap();
    let beside = Parallelism { dp: 2, ep: 2, zero: 1, options: words, ..interleaved };
    holds(&Case { model: more.clone(), microbatches: 4, ..case(beside) }, 1e-9);
    // Folded, the first stage is the last one, too.
    for words in ["dualpipe-v", "dualpipe-v+overlap-exchange"] {
        let folded = Parallelism { options: words.parse().unwrap(), ..beside };
        holds(&Case { model: more.clone(), microbatches: 5, ..case(folded) }, 1e-9);
    }
    let full = Parallelism { pp: 3, recompute: Recompute::Full, ..Parallelism::default() };
    holds(&case(full), 1e-9);
}

/// Each of these is another step: a check that would not see it sees nothing.
#[test]
fn a_module_that_does_something_else_is_seen() {
    let case = case(Parallelism::default());
    let plan = case.plan();
    let got = execute(&plan, &Options::new(7, vec![0], true)).unwrap();
    let cfg = config(&plan);
    let other = |mtp: Mtp| {
        let want = reference(&plan, &DenseConfig { mtp, ..cfg.clone() });
        let of = |name: &str| error(&got.grads[name], &want.grads[name]);
        (error(&[got.loss], &[want.loss]), of("model.embed_tokens.weight"), of("lm_head.weight"))
    };
    let (loss, table, head) = other(cfg.mtp);
    assert!(loss < 1e-9 && table < 1e-9 && head < 1e-9);
    let (loss, table, head) = other(Mtp { part: 0.2, ..cfg.mtp });
    assert!(loss > 1e-3 && table > 1e-3 && head > 1e-3, "{loss} {table} {head}");
    let without = reference(&plan, &DenseConfig { mtp: Mtp::default(), ..cfg });
    assert!(error(&[got.loss], &[without.loss]) > 1e-3);
}

#[test]
fn what_modules_do_not_go_with_is_said() {
    let (model, work) = (latent(1), case(Parallelism { dp: 2, ..Parallelism::default() }).work());
    for par in [
        Parallelism { dp: 2, zero: 2, ..Parallelism::default() },
        Parallelism { dp: 2, zero: 3, ..Parallelism::default() },
    ] {
        let dense = LlmSpec { moe: None, ..model.clone() };
        let why = build(&dense, &work, &par, engines()).unwrap_err().to_string();
        assert!(why.contains("mtp") && why.contains("use zero 1, or train without them (--no-mtp)"), "{why}");
    }
}
