//! Layers of several kinds in one model, run for real: state-space layers, attention, networks and experts, each alone
//! behind a norm, give the dense f64 reference, whose states go by their recurrence, on every layout; bytes and peaks are
//! those of the plan.

mod dense;

use foretrain::exec::Run;
use foretrain::plan::{Dtype, Engine, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Recompute, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build_routed, feasible};

struct Case {
    pattern: &'static str,
    par: Parallelism,
    seq_len: u64,
    micro_batch: u64,
    microbatches: u64,
    dtype: Dtype,
}

fn case(pattern: &'static str, par: Parallelism) -> Case {
    // Chunks of 4: the last one is cut short.
    Case { pattern, par, seq_len: 10, micro_batch: 1, microbatches: 1, dtype: Dtype::F64 }
}

fn model(pattern: &str) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "nemotron_h", "hidden_size": 12, "hybrid_override_pattern": pattern,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 3, "ssm_state_size": 5, "n_groups": 2, "conv_kernel": 3,
        "chunk_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 6, "moe_latent_size": 7,
        "routed_scaling_factor": 2.5, "vocab_size": 29, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": false,
    });
    LlmSpec::parse("test", "hybrid", &json.to_string()).expect("a sound model")
}

impl Case {
    fn work(&self) -> Workload {
        Workload {
            seq_len: self.seq_len,
            global_batch: self.micro_batch * self.microbatches * u64::from(self.par.dp),
            micro_batch: self.micro_batch,
            dtype: self.dtype,
            documents: Default::default(),
        }
    }

    fn plan(&self) -> Plan {
        let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } };
        let (model, work) = (model(self.pattern), self.work());
        let route = Routing::Uniform { seed: 3 }.route(&model, &work, &self.par, 2).expect("a feasible case");
        build_routed(&model, &work, &self.par, engines, route).expect("a feasible case")
    }
}

fn holds(case: &Case, tolerance: f64) -> Run {
    dense::holds(&case.plan(), tolerance)
}

const ALL: &str = "MEM*-E";

#[test]
fn every_kind_of_layer_on_one_rank() {
    for pattern in ["M", "*", "-", "E", "MM-", ALL] {
        holds(&case(pattern, Parallelism::default()), 1e-10);
    }
    let more = Case { micro_batch: 2, microbatches: 2, ..case(ALL, Parallelism::default()) };
    holds(&more, 1e-10);
    holds(&Case { par: Parallelism { recompute: Recompute::Full, ..more.par }, ..more }, 1e-10);
}

#[test]
fn inputs_of_layers_wait_in_the_hosts_memory() {
    let options = "offload-activations".parse().unwrap();
    for pattern in ["M-MM*", ALL] {
        let par = Parallelism { recompute: Recompute::Full, options, ..Parallelism::default() };
        holds(&Case { microbatches: 2, ..case(pattern, par) }, 1e-10);
    }
}

#[test]
fn heads_and_groups_are_cut_over_tensor_parallel_ranks() {
    for words in ["default", "tp-overlap"] {
        let par = Parallelism { tp: 2, options: words.parse().unwrap(), ..Parallelism::default() };
        holds(&Case { seq_len: 16, micro_batch: 2, ..case("M*-M", par) }, 1e-10);
    }
    let whole = Parallelism { tp: 2, options: "no-sp".parse().unwrap(), ..Parallelism::default() };
    holds(&case("M*-M", whole), 1e-10);
    holds(&case(ALL, Parallelism { tp: 2, ep: 2, ..Parallelism::default() }), 1e-10);
    // Rows in turns: experts see others of them than whoever has a share in one piece.
    let options = "tp-overlap".parse().unwrap();
    for (ep, dp) in [(1, 1), (2, 1), (4, 2)] {
        let par = Parallelism { tp: 2, ep, dp, options, ..Parallelism::default() };
        holds(&Case { seq_len: 16, microbatches: 2, ..case(ALL, par) }, 1e-10);
    }
}

#[test]
fn replicas_share_their_gradients_and_their_experts() {
    for (zero, ep) in [(0, 1), (1, 2), (2, 1), (3, 1), (3, 2)] {
        let par = Parallelism { dp: 2, ep, zero, ..Parallelism::default() };
        holds(&Case { microbatches: 2, ..case(ALL, par) }, 1e-10);
    }
    let options = "no-overlap-grad+dispatch-hybrid-ep+overlap-shared".parse().unwrap();
    holds(&case(ALL, Parallelism { dp: 4, ep: 4, options, ..Parallelism::default() }), 1e-10);
}

/// Layers of experts run again, those of other mixers do not; what is kept is less.
#[test]
fn experts_alone_run_again() {
    let options = "recompute-moe".parse().unwrap();
    for (pattern, dp, ep, pp, zero) in
        [(ALL, 1, 1, 1, 0), (ALL, 2, 2, 1, 1), ("MEM*-EM", 2, 2, 3, 1), ("ME*ME-", 2, 1, 1, 3)]
    {
        let par = Parallelism { dp, ep, pp, zero, options, ..Parallelism::default() };
        let again = holds(&Case { microbatches: 4, ..case(pattern, par) }, 1e-10);
        let kept = Parallelism { options: Default::default(), ..par };
        let kept = holds(&Case { microbatches: 4, ..case(pattern, kept) }, 1e-10);
        assert!(again.peak_bytes.iter().sum::<u64>() <= kept.peak_bytes.iter().sum(), "{pattern}");
        // Rows travel once more.
        let sent = [&again, &kept].map(|run| run.sent_bytes.iter().sum::<u64>());
        assert_eq!(sent[0] > sent[1], ep > 1, "{pattern}: {sent:?}");
    }
    for (words, pp) in [("recompute-moe+zb-h1", 2), ("recompute-moe+dispatch-allgather", 1)] {
        let par = Parallelism { dp: 2, ep: 2, pp, options: words.parse().unwrap(), ..Parallelism::default() };
        holds(&Case { microbatches: 4, ..case("ME*ME-", par) }, 1e-10);
    }
    // Backward units in two halves, all of them or some, in a stage that keeps what other layers need.
    for words in ["dualpipe-v", "zb-v", "v-half", "v-min"] {
        let options = format!("recompute-moe+{words}").parse().unwrap();
        let par = Parallelism { dp: 2, ep: 2, pp: 2, vp: 2, zero: 1, options, ..Parallelism::default() };
        let again = holds(&Case { microbatches: 5, ..case("MEM*-EME", par) }, 1e-10);
        let kept = Parallelism { options: words.parse().unwrap(), ..par };
        let kept = holds(&Case { microbatches: 5, ..case("MEM*-EME", kept) }, 1e-10);
        assert!(again.sent_bytes.iter().sum::<u64>() > kept.sent_bytes.iter().sum(), "{words}: rows travel once more");
    }
    let of = |pattern, par: Parallelism| {
        feasible::check(&model(pattern), &case(pattern, par).work(), &par).unwrap_err().to_string()
    };
    let one = Parallelism { options, ..Parallelism::default() };
    assert!(of("M*", one).contains("no experts; leave it out"));
    assert!(of(ALL, Parallelism { recompute: Recompute::Full, ..one }).contains("leave it out"));
}

#[test]
fn stages_have_layers_of_several_kinds_in_turns() {
    for (pattern, pp, vp) in [("M-M*", 2, 1), ("MEM*-EM", 3, 1), ("MEM*-EME", 2, 2)] {
        for recompute in [Recompute::None, Recompute::Full] {
            let par = Parallelism { pp, vp, recompute, ..Parallelism::default() };
            holds(&Case { microbatches: 4, ..case(pattern, par) }, 1e-10);
        }
    }
    let options = "dualpipe-v".parse().unwrap();
    let folded = Parallelism { pp: 2, vp: 2, options, ..Parallelism::default() };
    holds(&Case { microbatches: 5, ..case("MEM*-EME", folded) }, 1e-10);
    for zero in 1..=3 {
        let all = Parallelism { pp: 2, tp: 2, dp: 2, ep: 2, zero, ..Parallelism::default() };
        holds(&Case { microbatches: 2, ..case("ME*ME-", all) }, 1e-10);
    }
}

/// A forward and a backward unit side by side, whose layers are of other kinds.
#[test]
fn pairs_of_microbatches_take_turns() {
    let options = "overlap-exchange".parse().unwrap();
    for (pattern, pp) in [(ALL, 1), ("ME*ME-", 2)] {
        let par = Parallelism { dp: 2, ep: 2, pp, options, ..Parallelism::default() };
        holds(&Case { microbatches: 4, ..case(pattern, par) }, 1e-10);
    }
}

#[test]
fn single_precision_is_close() {
    let par = Parallelism { dp: 2, tp: 2, ep: 2, ..Parallelism::default() };
    holds(&Case { dtype: Dtype::F32, seq_len: 16, ..case(ALL, par) }, 2e-3);
}

/// What no plan of a hybrid has is refused, with what to do instead.
#[test]
fn refusals_name_a_remedy() {
    let one = Parallelism::default();
    for (par, part) in [
        (Parallelism { ring: 3, ..one }, "not shared by ring 3 x ulysses 1; use a product of 2 or 4"),
        (Parallelism { ring: 2, ulysses: 4, ..one }, "of 2 or 4"),
        (Parallelism { ulysses: 4, tp: 2, ..one }, "the 2 state-space heads in 1 groups of a rank"),
        (Parallelism { tp: 4, ..one }, "tp"),
    ] {
        let work = Workload { seq_len: 48, ..case("M*", par).work() };
        let why = feasible::check(&model("M*"), &work, &par).unwrap_err().to_string();
        assert!(why.contains(part), "{why}");
    }
    let documents = Workload { documents: vec![4, 6].into(), ..case("M*", one).work() };
    let why = feasible::check(&model("M*"), &documents, &one).unwrap_err().to_string();
    assert!(why.contains("a state goes on"), "{why}");
}

/// Ranks that share a sequence exchange tokens for heads around a scan: as many groups as ranks, more, and fewer, of which
/// copies travel; tokens in the order in which Ulysses and each kind of ring cut them.
#[test]
fn scans_go_through_the_tokens_of_all_ranks_with_some_of_the_heads() {
    for (ring, ulysses, words) in [
        (1, 2, "default"),
        (1, 4, "default"),
        (1, 2, "a2a-separate"),
        (1, 4, "a2a-separate"),
        (2, 1, "default"),
        (4, 1, "default"),
        (2, 1, "stripe"),
        (2, 1, "contiguous"),
        (2, 2, "default"),
        (2, 2, "stripe+a2a-separate"),
        (2, 2, "gather-kv"),
        (2, 2, "ring-inside"),
        (2, 2, "ring-inside+stripe"),
        (2, 2, "ring-inside+gather-kv"),
    ] {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..Parallelism::default() };
        holds(&Case { seq_len: 16, micro_batch: 2, ..case("M*-M", par) }, 1e-10);
    }
    let one = Parallelism::default();
    for par in [
        Parallelism { ulysses: 2, tp: 2, ..one },
        Parallelism { ulysses: 2, recompute: Recompute::Full, ..one },
        Parallelism { ulysses: 2, dp: 2, ep: 4, zero: 1, ..one },
        Parallelism { ring: 2, dp: 2, zero: 3, ..one },
        Parallelism { ring: 2, pp: 2, recompute: Recompute::Full, ..one },
        Parallelism { ulysses: 2, options: "offload-activations".parse().unwrap(), recompute: Recompute::Full, ..one },
    ] {
        holds(&Case { seq_len: 16, microbatches: 4, ..case("ME*ME-", par) }, 1e-10);
    }
    let single = Case { dtype: Dtype::F32, seq_len: 16, ..case(ALL, Parallelism { ulysses: 2, ring: 2, ..one }) };
    holds(&single, 2e-3);
}

/// What goes out of a rank for a scan, by hand: z, x, B, C and dt there, y back, and the same backward; of a group that two
/// ranks share two copies.
#[test]
fn bytes_of_an_exchange_around_a_scan() {
    let sent = |ulysses: u32| {
        let par = Parallelism { ulysses, ..Parallelism::default() };
        let run = |pattern| holds(&Case { seq_len: 16, ..case(pattern, par) }, 1e-10).sent_bytes[0];
        // Another layer of the same kind, so that what ends and sums over replicas send is left out, but for its weights.
        run("MM") - run("M")
    };
    let (inner, heads, state, hidden) = (12, 4, 5, 12);
    let weights = |own: u64| 8 * 2 * own;
    for (ranks, groups) in [(2u64, 2u64), (4, 4)] {
        let (there, back) = (2 * inner + 2 * groups * state + heads, inner);
        // Tokens here, elements of a token, to all others.
        let exchanged = 2 * 8 * (16 / ranks) * (there + back) * (ranks - 1) / ranks;
        let columns = 2 * inner + 2 * 2 * state + heads;
        let convolved = inner + 2 * 2 * state;
        let all = columns * hidden + convolved * 4 + 3 * heads + inner + hidden * inner + hidden;
        let gathered = sent(ranks as u32) - exchanged;
        let whole = weights(all) * (ranks - 1) / ranks;
        assert!(gathered.abs_diff(whole) <= 64 * ranks, "{ranks}: {gathered} beyond the exchange, {whole} of weights");
    }
}
