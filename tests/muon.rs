//! Muon: whatever shares the weights out, matrices move by the orthogonal factors of their momentum; and what that takes.

mod dense;
mod plans;

use dense::{error, runs, wanted};
use foretrain::collective::count::sent_by;
use foretrain::cost::{Effort, cost};
use foretrain::exec::source::Source;
use foretrain::exec::{Options, execute};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::Layout;
use foretrain::plan::*;
use foretrain::sim::{self, simulate};
use foretrain::spec::*;
use foretrain::strategy::build_routed;
use foretrain::strategy::expert::Routing;
use plans::{FLAT, Host, SM, close, way};

const STEPS: u64 = 3;

/// A config of a few numbers, as Hugging Face has it.
fn config_of(text: &str) -> LlmSpec {
    LlmSpec::parse("test", "test", text).unwrap()
}

/// Heads in groups, biases beside matrices.
fn llama() -> LlmSpec {
    LlmSpec { layers: 3, kv_heads: 2, qkv_bias: true, ..LlmSpec::find("tiny").unwrap() }
}

/// Latent attention, a dense layer, experts and what every token visits.
fn deepseek() -> LlmSpec {
    config_of(
        r#"{"model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "hidden_act": "silu",
        "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "norm_topk_prob": true, "num_nextn_predict_layers": 0}"#,
    )
}

fn plan(model: &LlmSpec, words: &str, par: Parallelism) -> Plan {
    let par = Parallelism { options: words.parse().unwrap(), ..par };
    let batches = if par.pp > 1 { 2 } else { 1 };
    let global_batch = u64::from(par.dp) * batches;
    let documents = Default::default();
    let work = Workload { seq_len: 24, global_batch, micro_batch: 1, dtype: Dtype::F64, documents };
    let route = Routing::Uniform { seed: 5 }.route(model, &work, &par, 8).unwrap();
    build_routed(model, &work, &par, SM, route).unwrap()
}

/// Three steps, so that momenta count: the losses of all, and the weights after the last.
fn holds(plan: &Plan) {
    let source = Source::seeded(5);
    let (got, want) = (runs(plan, &source, STEPS, true), wanted(plan, &source, STEPS));
    for (got, want) in got.iter().zip(&want) {
        assert!((got.loss - want.loss).abs() < 1e-10, "{:?}: {} for {}", plan.about.par, got.loss, want.loss);
    }
    let (last, want) = (got.into_iter().last().unwrap(), &want.last().unwrap().new_params);
    for (name, want) in want {
        let e = error(&last.weights[name], want);
        assert!(e < 1e-9, "{:?}: {name} is off by {e:.1e}", plan.about.par);
    }
}

/// Fewer ranks than layers, as many, and more; shares of all kinds; ranks that have parts of matrices, layers or experts.
#[test]
fn every_layout_equals_the_reference() {
    let one = Parallelism { zero: 0, ..Parallelism::default() };
    let dense = [
        ("muon", one),
        ("muon", Parallelism { dp: 2, ..one }),
        ("muon", Parallelism { dp: 2, zero: 1, ..one }),
        ("muon+overlap-gather", Parallelism { dp: 2, zero: 1, ..one }),
        ("muon+all-reduce-grads", Parallelism { dp: 3, zero: 1, ..one }),
        ("muon", Parallelism { dp: 5, zero: 2, ..one }),
        ("muon", Parallelism { dp: 2, ring: 2, zero: 3, recompute: Recompute::Full, ..one }),
        ("muon+shard-2", Parallelism { dp: 4, zero: 3, ..one }),
        ("muon", Parallelism { tp: 2, ..one }),
        // Two ranks have each KV head.
        ("muon", Parallelism { tp: 4, dp: 2, zero: 1, ..one }),
        ("muon+uneven", Parallelism { pp: 2, dp: 2, zero: 1, ..one }),
    ];
    dense.into_iter().for_each(|(words, par)| holds(&plan(&llama(), words, par)));
    let experts = [
        ("muon", Parallelism { dp: 2, zero: 1, ..one }),
        ("muon", Parallelism { dp: 4, ep: 2, zero: 1, ..one }),
        ("muon", Parallelism { dp: 2, tp: 2, ep: 2, zero: 3, ..one }),
        // A rank may have an expert twice.
        ("muon+replicas-4", Parallelism { dp: 4, ep: 2, zero: 1, ..one }),
    ];
    experts.into_iter().for_each(|(words, par)| holds(&plan(&deepseek(), words, par)));
}

/// What is no matrix goes on by Adam, to the bit, and no matrix does.
#[test]
fn vectors_and_tables_go_by_adam() {
    let par = Parallelism { dp: 2, zero: 1, ..Parallelism::default() };
    let of = |words: &str| execute(&plan(&llama(), words, par), &Options::new(5, vec![0, 1], true)).unwrap().weights;
    let (by_muon, by_adam) = (of("muon"), of("default"));
    for (name, muon) in &by_muon {
        let is_matrix = name.ends_with("proj.weight");
        assert_eq!(muon == &by_adam[name], !is_matrix, "{name}");
    }
}

/// Muon keeps 8 bytes an element of a matrix where Adam keeps 12 (arXiv:2502.16982, section 2.3), ranks share both out, and
/// send two slices of every layer more: 2 x 2 bytes an element.
#[test]
fn it_keeps_less_and_sends_two_slices_more() {
    // Every slot divides by the ranks, so that nothing is padded.
    let model = LlmSpec { layers: 4, kv_heads: 2, ..LlmSpec::find("tiny").unwrap() };
    let layer = {
        let (h, d, f) = (model.hidden, model.head_dim, model.ffn);
        h * (model.heads + 2 * model.kv_heads) * d + model.heads * d * h + 3 * h * f
    };
    assert_eq!(model.matrix_params(), model.layers * layer);
    for ranks in [2u64, 4] {
        let of = |words: &str| {
            let par = Parallelism { zero: 1, options: words.parse().unwrap(), ..way(ranks as u32, 1, 1) };
            let plan = plans::plan(&model, &par, &plans::work(&par, 64, 1, 1), SM);
            let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
            let state = plan.tensors.iter().filter(|t| t.kind == TensorKind::OptState);
            let state: u64 = state.map(|t| t.bytes() * u64::from(t.slots)).sum();
            (state, sent_by(&plan, &line, 0))
        };
        let ((adam, sent), (muon, sent_by_muon)) = (of("default"), of("muon"));
        let (matrices, vectors) = (model.layers * layer, model.layers * 2 * model.hidden);
        // A rank has room for as many second moments of vectors as stand in one rank's share: those of a whole layer.
        assert_eq!(adam - muon, 4 * (matrices + vectors) / ranks - 4 * vectors, "{ranks} ranks");
        let rounds = model.layers / ranks;
        assert_eq!(
            sent_by_muon - sent,
            rounds * 2 * 2 * (layer + 2 * model.hidden) / ranks * (ranks - 1),
            "{ranks} ranks"
        );
    }
}

/// Analytic with layers and ranks folded and without, and event by event; the executor has the plan's memory.
#[test]
fn interpreters_agree() {
    for (model, par) in [
        (llama(), Parallelism { dp: 2, zero: 1, ..Parallelism::default() }),
        (llama(), Parallelism { dp: 4, ring: 2, zero: 3, ..Parallelism::default() }),
        (deepseek(), Parallelism { dp: 4, ep: 2, zero: 1, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: "muon".parse().unwrap(), ..par };
        let costed = plans::plan(&model, &par, &plans::work(&par, 4096, 1, 2), SM);
        let host = Host::of(&costed, 1.0);
        let flat = cost(&costed, host.machine(), FLAT).unwrap();
        plans::same(&cost(&costed, host.machine(), Effort { fold: true, stride: true, spans: false }).unwrap(), &flat);
        let played = simulate(&costed, host.machine(), &[], sim::Effort { fold: false, ..sim::Effort::SUMS }).unwrap();
        let played = played.timeline.step.value();
        assert!(close(played, flat.step.value()), "{played} is not {}", flat.step.value());
        let run = plan(&model, "muon", par);
        let (atoms, last) = (AtomTable::new(&run).unwrap(), runs(&run, &Source::seeded(5), STEPS, true).pop().unwrap());
        for rank in 0..run.ranks() {
            let layout = Layout::new(&run, &atoms, run.program_of(rank)).unwrap();
            assert_eq!(last.peak_bytes[rank as usize], layout.bytes, "rank {rank}");
        }
    }
}

/// A CPU that takes longer over what is written in Python takes longer over the forward pass alone: not over gradients, nor
/// over rows and heads that go back, nor over the optimizer.
#[test]
fn python_issues_the_forward_pass() {
    let one = Parallelism { zero: 0, ..Parallelism::default() };
    let [rows, heads] = [
        plan(&deepseek(), "muon", Parallelism { dp: 2, ep: 2, ..one }),
        plan(&llama(), "muon", Parallelism { ulysses: 2, ..one }),
    ];
    let mut passes = [0, 0];
    for (_, op) in rows.ops().chain(heads.ops()) {
        let OpKind::Compute { kernel, .. } = &op.kind else { continue };
        let label = op.label.as_str();
        let backward = match kernel {
            Kernel::Expert(_) => label.contains("bwd") || label.ends_with("_dx") || label.ends_with("_dw"),
            Kernel::Permute(_) => label.starts_with('d'),
            Kernel::Muon(_) => true,
            _ => continue,
        };
        assert_eq!(kernel.is_forward(), !backward, "{label}: {kernel:?}");
        passes[usize::from(backward)] += 1;
    }
    assert!(passes[0] > 5 && passes[1] > 10, "{passes:?}");
}
