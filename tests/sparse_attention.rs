//! DeepSeek Sparse Attention: whatever shares the work out, every step is the plain reference's, which scores all keys and masks
//! those that are not chosen, without absorbing anything; and what that takes.

mod dense;
mod plans;

use dense::{error, runs, wanted};
use foretrain::cost::{Effort, cost};
use foretrain::error::Error;
use foretrain::exec::source::Source;
use foretrain::plan::sparse::SparseKernel;
use foretrain::plan::*;
use foretrain::sim::{self, simulate};
use foretrain::spec::*;
use foretrain::strategy::build_routed;
use foretrain::strategy::expert::Routing;
use foretrain::strategy::feasible;
use plans::{FLAT, Host, SM, close};
use std::collections::BTreeMap;

const STEPS: u64 = 3;
const SEQ: u64 = 24;
const TOP_K: u64 = 6;

/// A dense layer, experts and what every token visits; two heads of the indexer of 8, six keys a query; `more` fields.
fn deepseek(more: &str) -> LlmSpec {
    let text = r#"{"model_type": "deepseek_v32", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_group": 1, "topk_group": 1, "hidden_act": "silu",
        "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "norm_topk_prob": true, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 6, MORE}"#;
    LlmSpec::parse("test", "test", &text.replace("MORE", more)).unwrap()
}

fn plain() -> LlmSpec {
    deepseek(r#""num_nextn_predict_layers": 0"#)
}

fn plan_of(model: &LlmSpec, words: &str, par: Parallelism, micro_batch: u64, documents: Vec<u64>) -> Plan {
    let par = Parallelism { options: words.parse().unwrap(), ..par };
    let batches = if par.pp > 1 || par.options.overlap_exchange { 4 } else { 1 };
    let global_batch = u64::from(par.dp) * batches * micro_batch;
    let work = Workload { seq_len: SEQ, global_batch, micro_batch, dtype: Dtype::F64, documents: documents.into() };
    let route = Routing::Uniform { seed: 5 }.route(model, &work, &par, 8).unwrap();
    build_routed(model, &work, &par, SM, route).unwrap()
}

fn plan(model: &LlmSpec, words: &str, par: Parallelism) -> Plan {
    plan_of(model, words, par, 1, vec![])
}

/// Losses of three steps and the weights behind them, and of one step every gradient, bytes and peaks.
#[track_caller]
fn holds(plan: &Plan) {
    dense::holds(plan, 1e-9);
    let source = Source::seeded(5);
    let (got, want) = (runs(plan, &source, STEPS, true), wanted(plan, &source, STEPS));
    for (got, want) in got.iter().zip(&want) {
        assert!((got.loss - want.loss).abs() < 1e-9, "{:?}: {} for {}", plan.about.par, got.loss, want.loss);
    }
    let (last, want) = (got.into_iter().last().unwrap(), &want.last().unwrap().new_params);
    for (name, want) in want {
        let e = error(&last.weights[name], want);
        assert!(e < 1e-6, "{:?}: {name} is off by {e:e}", plan.about.par);
    }
}

fn one() -> Parallelism {
    Parallelism { recompute: Recompute::None, ..Parallelism::default() }
}

#[test]
fn one_rank_and_ranks_with_sequences_of_their_own_are_the_reference() {
    let model = plain();
    for (words, par) in [
        ("default", one()),
        ("recompute-mla-up", one()),
        ("recompute-norm+recompute-act", one()),
        ("default", Parallelism { recompute: Recompute::Selective, ..one() }),
        ("default", Parallelism { dp: 2, zero: 1, recompute: Recompute::Full, ..one() }),
        ("default", Parallelism { dp: 2, zero: 2, ..one() }),
        ("default", Parallelism { dp: 2, ep: 2, zero: 3, recompute: Recompute::Full, ..one() }),
        ("muon", Parallelism { dp: 2, zero: 1, ..one() }),
    ] {
        holds(&plan(&model, words, par));
    }
}

#[test]
fn ranks_that_share_a_sequence_are_the_reference() {
    let model = plain();
    for (words, par) in [
        ("gather-kv", Parallelism { ring: 2, ..one() }),
        ("gather-kv+recompute-mla-up", Parallelism { ring: 3, dp: 2, zero: 1, ..one() }),
        ("gather-kv+contiguous", Parallelism { ring: 2, recompute: Recompute::Selective, ..one() }),
        ("gather-kv", Parallelism { ring: 2, dp: 2, ep: 2, zero: 3, recompute: Recompute::Full, ..one() }),
    ] {
        holds(&plan(&model, words, par));
    }
    // Two sequences a microbatch, of two documents each.
    holds(&plan_of(&model, "gather-kv", Parallelism { ring: 2, ..one() }, 2, vec![9, 15]));
}

#[test]
fn pipelines_and_modules_are_the_reference() {
    let two = Parallelism { pp: 2, ..one() };
    holds(&plan(&plain(), "uneven", two));
    holds(&plan(&plain(), "uneven+zb-h1", two));
    holds(&plan(&plain(), "uneven+gather-kv", Parallelism { ring: 2, ..two }));
    holds(&plan(&deepseek(r#""num_nextn_predict_layers": 1"#), "default", one()));
    // GLM-5's indexer turns neighbours.
    let glm = deepseek(r#""num_nextn_predict_layers": 0, "indexer_rope_interleave": true"#);
    assert!(glm.indexer.unwrap().interleaved && !plain().indexer.unwrap().interleaved);
    holds(&plan(&glm, "default", one()));
    holds(&plan_of(&plain(), "default", one(), 2, vec![9, 15]));
}

/// Halves of layers one beside another, and gradients of weights that are put off.
#[test]
fn layers_in_halves_are_the_reference() {
    let model = LlmSpec { layers: 4, ..plain() };
    let two = Parallelism { pp: 2, vp: 2, ..one() };
    for words in ["default", "dualpipe-v", "zb-v", "v-half", "v-min"] {
        holds(&plan(&model, words, two));
    }
    holds(&plan(&model, "overlap-exchange", Parallelism { dp: 2, ep: 2, zero: 1, ..one() }));
    holds(&plan(&model, "recompute-moe", Parallelism { dp: 2, ep: 2, zero: 1, ..one() }));
}

/// A query that sees no more keys than may be chosen sees all: the same losses as without an indexer.
#[test]
fn short_sequences_are_dense_ones() {
    let wide = |indexer: Option<IndexerSpec>| LlmSpec { indexer, ..plain() };
    let all = plain().indexer.map(|of| IndexerSpec { top_k: SEQ, ..of });
    let loss = |model: &LlmSpec| {
        let plan = plan(model, "default", one());
        // Weights are drawn by name.
        dense::run(&plan).loss
    };
    let (sparse, full, few) = (loss(&wide(all)), loss(&wide(None)), loss(&plain()));
    assert!((sparse - full).abs() < 1e-12 && (few - full).abs() > 1e-9, "{sparse} {few} {full}");
}

/// The indexer's weights move, by what attention did, and attention's do not know of it.
#[test]
fn indexers_learn_by_themselves() {
    let plan = plan(&plain(), "default", one());
    let of = |part: f64| {
        let mut plan = plan.clone();
        for op in plan.blocks.iter_mut().flat_map(|block| &mut block.ops) {
            if let OpKind::Compute { kernel: Kernel::Sparse(SparseKernel::ScoreBwd { part: of, .. }), .. } =
                &mut op.kind
            {
                *of *= part;
            }
        }
        dense::run(&plan).grads
    };
    let (once, thrice) = (of(1.0), of(3.0));
    for (name, grad) in &once {
        let times = if name.contains(".indexer.") { 3.0 } else { 1.0 };
        let want: Vec<f64> = grad.iter().map(|x| times * x).collect();
        assert!(error(&thrice[name], &want) < 1e-12, "{name}");
        assert!(grad.iter().any(|x| *x != 0.0), "{name} has no gradient");
    }
}

/// A plan from elsewhere whose keys are a rank's own cannot choose among all.
#[test]
fn keys_of_a_part_of_the_sequence_are_refused() {
    let mut plan = plan(&plain(), "gather-kv", Parallelism { ring: 2, ..one() });
    check::check(&plan).unwrap();
    for op in plan.blocks.iter_mut().flat_map(|block| &mut block.ops) {
        if let OpKind::Compute { kernel: Kernel::Sparse(SparseKernel::Score(of)), .. } = &mut op.kind {
            of.block.kv = of.block.q.clone();
        }
    }
    let why = check::check(&plan).unwrap_err().to_string();
    assert!(why.contains("chosen keys are those of the whole sequence"), "{why}");
}

/// FLOPs of each kernel of attention on a rank, by name, by the kernel's own formulas.
fn flops_by_kernel(plan: &Plan, rank: u32) -> BTreeMap<&'static str, u64> {
    let mut all = BTreeMap::new();
    let mut seen: Vec<&Kernel> = vec![];
    for kernel in plan.kernels().filter(|kernel| matches!(kernel, Kernel::Sparse(_))) {
        // Of one layer: kinds of layers have the same kernels.
        if seen.contains(&kernel) {
            continue;
        }
        seen.push(kernel);
        let sizes = kernel.operands(&plan.views);
        let [reads, writes] = [sizes.reads, sizes.writes].map(|all| all.iter().map(|n| 2 * n).collect::<Vec<u64>>());
        let work = kernel.work(&plan.views, rank, &reads, &writes).unwrap();
        *all.entry(kernel.name()).or_default() += work.flops;
    }
    all
}

/// Of 24 tokens the first six see 1 to 6 keys, the others 6: 129 chosen pairs of 300. A pair and head of attention takes 2 (kl + dr)
/// + 2 kl forward and five products backward, a score 2 di, and its gradient three products of chosen pairs.
#[test]
fn kernels_have_the_flops_of_the_paper() {
    let (visible, chosen) = (SEQ * (SEQ + 1) / 2, TOP_K * (TOP_K + 1) / 2 + (SEQ - TOP_K) * TOP_K);
    let want = [
        ("lightning_index", 2 * visible * 2 * 8),
        ("lightning_index_bwd", 3 * 2 * chosen * 2 * 8),
        ("sparse_attention", chosen * 4 * (2 * (8 + 4) + 2 * 8)),
        ("sparse_attention_bwd", chosen * 4 * (3 * 2 * (8 + 4) + 2 * 2 * 8)),
        // Up to the compressed width and back from it as the usual projection up: three products of each.
        ("head_matmul", 3 * 2 * SEQ * 4 * (8 + 6) * 8),
    ];
    let alone = flops_by_kernel(&plan(&plain(), "default", one()), 0);
    // Two ranks have as many between them, whatever each has.
    let plan = plan(&plain(), "gather-kv", Parallelism { ring: 2, ..one() });
    let two = [0, 1].map(|rank| flops_by_kernel(&plan, rank));
    for (name, flops) in want {
        assert_eq!((alone[name], two[0][name] + two[1][name]), (flops, flops), "{name}");
    }
    assert!(two[0]["sparse_attention"] != two[1]["sparse_attention"], "the first keys are few");
}

/// DeepSeek-V3.2 is V3 with an indexer in each layer; a token's FLOPs at 128K by the arithmetic of the paper.
#[test]
fn shipped_models_have_their_weights_and_flops() {
    let [v3, v32] = ["deepseek-v3", "deepseek-v3.2"].map(|name| LlmSpec::find(name).unwrap());
    // Of its module of multi-token prediction alone.
    assert!(v32.notes.iter().all(|note| note.starts_with(MtpSpec::TRAINED)), "{:?}", v32.notes);
    let products = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64;
    assert_eq!(v32.params() - v3.params(), 61 * (products + 2 * 128));
    let s = 131072.0;
    let (visible, chosen) = ((s + 1.0) / 2.0, 2048.0 - 2048.0 * 2047.0 / 2.0 / s);
    let indexer = 62.0 * (4.0 * products as f64 + 2.0 * 64.0 * 128.0 * (visible + 2.0 * chosen));
    let attention = 62.0 * 3.0 * 128.0 * 2.0 * chosen * (576.0 + 512.0);
    let dense = 62.0 * 3.0 * 128.0 * 2.0 * visible * (192.0 + 128.0);
    let want = v3.flops_per_token(131072) - dense + attention + indexer;
    let got = v32.flops_per_token(131072);
    assert!((got / want - 1.0).abs() < 1e-9, "{got} is not {want}");
    let own = v32.indexer_flops_per_token(131072) * 62.0 / 61.0;
    assert!((own / indexer - 1.0).abs() < 1e-9, "{own} is not {indexer}");
    // 744 B weights (its README), of which the module of multi-token prediction is one layer.
    let glm = LlmSpec::find("glm-5").unwrap();
    let billions = glm.params() as f64 / 1e9;
    assert!((billions - 744.0).abs() < 1.5, "{billions}");
}

/// What waits for the backward pass: absorbed queries and those before, one key of all heads, what attention leaves and its
/// values, places of u32; with recompute-mla-up neither queries nor keys.
#[test]
fn activations_are_those_of_the_absorbed_form() {
    let tensor = |plan: &Plan, name: &str| {
        let found = plan.tensors.iter().find(|t| t.name.ends_with(name) && t.kind == TensorKind::Activation);
        found.map(|t| (t.elems() / SEQ, t.dtype))
    };
    let kept = plan(&plain(), "default", one());
    for (name, cols, dtype) in [
        ("chosen", TOP_K, Dtype::U32),
        (".q", 4 * (8 + 4), Dtype::F64),
        (".kv", 8 + 4, Dtype::F64),
        ("q_heads", 4 * (8 + 4), Dtype::F64),
        ("attn_o", 4 * 8, Dtype::F64),
        (".o", 4 * 6, Dtype::F64),
        ("index_q", 2 * 8, Dtype::F64),
        ("index_k", 8, Dtype::F64),
        ("index_w", 2, Dtype::F64),
    ] {
        let bare = name.trim_start_matches('.');
        let found = tensor(&kept, name).or_else(|| {
            let of = kept.tensors.iter().find(|t| t.name == bare && t.kind == TensorKind::Activation);
            of.map(|t| (t.elems() / SEQ, t.dtype))
        });
        assert_eq!(found, Some((cols, dtype)), "{name}");
    }
    let again = plan(&plain(), "recompute-mla-up", one());
    assert!(["q_heads", "index_q"].iter().all(|name| tensor(&again, name).is_none()));
    assert!(["chosen", "index_k", "attn_o"].iter().all(|name| tensor(&again, name).is_some()));
    // A rank of two gathers what is compressed of all keys, and all index keys, and no more.
    let two = plan(&plain(), "gather-kv", Parallelism { ring: 2, ..one() });
    let wire = |name: &str| two.tensors.iter().find(|t| t.name == name).map(|t| t.elems());
    assert_eq!([wire("kv_gathered"), wire("index_gathered")], [Some(SEQ * 12), Some(SEQ * 8)]);
}

/// Analytic with layers and ranks folded and without, and event by event.
#[test]
fn interpreters_agree() {
    for (words, par) in [
        ("default", Parallelism { dp: 2, zero: 1, ..one() }),
        ("gather-kv", Parallelism { dp: 2, ring: 4, zero: 3, recompute: Recompute::Full, ..one() }),
        ("gather-kv+uneven", Parallelism { dp: 2, ring: 2, pp: 2, ep: 2, zero: 1, ..one() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let model = LlmSpec { indexer: plain().indexer.map(|of| IndexerSpec { top_k: 64, ..of }), ..plain() };
        let costed = plans::plan(&model, &par, &plans::work(&par, 4096, 1, 4), SM);
        let host = Host::of(&costed, 1.0);
        let flat = cost(&costed, host.machine(), FLAT).unwrap();
        plans::same(&cost(&costed, host.machine(), Effort { fold: true, stride: true, spans: false }).unwrap(), &flat);
        let played = simulate(&costed, host.machine(), &[], sim::Effort { fold: false, ..sim::Effort::SUMS }).unwrap();
        let played = played.timeline.step.value();
        assert!(close(played, flat.step.value()), "{played} is not {}", flat.step.value());
    }
}

/// Longer sequences take a dense model's square, and a sparse one the scores' alone.
#[test]
fn long_sequences_take_less() {
    let step = |name: &str, seq_len: u64| {
        let model = LlmSpec { layers: 4, ..LlmSpec::find(name).unwrap() }.without_mtp().unwrap();
        let par = Parallelism { dp: 8, ep: 8, zero: 3, recompute: Recompute::Full, ..one() };
        let costed = plans::plan(&model, &par, &plans::work(&par, seq_len, 1, 1), SM);
        let host = Host::of(&costed, 1.0);
        cost(&costed, host.machine(), Effort { fold: true, stride: true, spans: false }).unwrap().step.value()
    };
    let of = |name| [4096, 131072].map(|s| step(name, s));
    let ([short, long], [sparse_short, sparse_long]) = (of("deepseek-v3"), of("deepseek-v3.2"));
    assert!(sparse_short > short && sparse_long < long, "{sparse_short} > {short}, {sparse_long} < {long}");
}

#[test]
fn what_it_does_not_go_with_is_refused_with_what_to_use() {
    let refused = |words: &str, par: Parallelism| {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let work = Workload {
            seq_len: 48,
            global_batch: u64::from(par.dp),
            micro_batch: 1,
            dtype: Dtype::Bf16,
            documents: Default::default(),
        };
        match feasible::check(&plain(), &work, &par) {
            Err(Error::Infeasible(why)) => why.to_string(),
            other => panic!("{words}: {other:?}"),
        }
    };
    for (words, par, parts) in [
        ("default", Parallelism { tp: 2, ..one() }, ["tp above 1", "gather-kv"]),
        ("default", Parallelism { ulysses: 2, ..one() }, ["ulysses above 1", "gather-kv"]),
        ("gather-kv", Parallelism { ulysses: 2, ring: 2, ..one() }, ["ulysses above 1", "gather-kv"]),
        ("default", Parallelism { ring: 2, ..one() }, ["a ring whose KV circulate", "use gather-kv"]),
        ("double-ring-2", Parallelism { ring: 4, ..one() }, ["double-ring", "use gather-kv"]),
        ("gather-kv-prefetch", Parallelism { ring: 2, ..one() }, ["one key is of all heads", "use gather-kv"]),
        ("gather-kv+stripe", Parallelism { ring: 2, ..one() }, ["stripe", "use zigzag"]),
        ("keep-attention", Parallelism { recompute: Recompute::Full, ..one() }, ["keep-attention", "leave it out"]),
    ] {
        let why = refused(words, par);
        assert!(parts.iter().all(|part| why.contains(part)), "{words}: {why}");
    }
    let without = LlmSpec::parse("test", "test", r#"{"model_type": "deepseek_v32"}"#).unwrap_err().to_string();
    assert!(!without.is_empty());
}
