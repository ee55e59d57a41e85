//! Every way of running a step gives the dense single-rank f64 reference: loss, outputs, every gradient,
//! and the weights after the optimizer.

use foretrain::collective::count::sent_by;
use foretrain::exec::reference::{DenseConfig, StepResult, muon, step};
use foretrain::exec::source::Source;
use foretrain::exec::{Options, Run, execute};
use foretrain::plan::{
    Dtype, Engine, Plan,
    link::{AtomTable, Line},
    memory::Layout,
};
use foretrain::spec::{LlmSpec, MlaSpec, Mlp, Norm, Parallelism, Positions, Recompute, Workload};
use foretrain::strategy::{Engines, build, feasible};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone)]
struct Case {
    layers: u64,
    kv_heads: u64,
    group: u64,
    head_dim: u64,
    ffn: u64,
    tie: bool,
    seq_units: u64,
    batch: u64,
    microbatches: u64,
    par: Parallelism,
    dtype: Dtype,
    /// Makes another model of a Llama.
    family: fn(&mut LlmSpec),
    window: Option<u64>,
    /// Where documents end, as shares of the sequence.
    cuts: Vec<f64>,
}

impl Case {
    fn model(&self) -> LlmSpec {
        let heads = self.kv_heads * self.group;
        let json = serde_json::json!({
            "model_type": "llama", "hidden_size": 12, "num_hidden_layers": self.layers,
            "num_attention_heads": heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.ffn, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
            "tie_word_embeddings": self.tie, "torch_dtype": "float32", "hidden_act": "silu",
        });
        let mut model = LlmSpec::parse("test", "random", &json.to_string()).expect("a sound model");
        (self.family)(&mut model);
        model.window = self.window;
        model
    }

    fn work(&self) -> Workload {
        let unit = 2 * u64::from(self.par.ring) * u64::from(self.par.ulysses) * u64::from(self.par.tp);
        let seq_len = unit * self.seq_units;
        Workload {
            seq_len,
            global_batch: self.batch * self.microbatches * u64::from(self.par.dp),
            micro_batch: self.batch,
            dtype: self.dtype,
            documents: self.documents(seq_len).into(),
        }
    }

    /// Lengths of documents; none where there is but one.
    fn documents(&self, seq_len: u64) -> Vec<u64> {
        let ends: BTreeSet<u64> = self.cuts.iter().map(|cut| (cut * seq_len as f64) as u64).chain([seq_len]).collect();
        let ends: Vec<u64> = ends.into_iter().filter(|end| *end > 0).collect();
        let starts = std::iter::once(&0).chain(&ends);
        let lengths = ends.iter().zip(starts).map(|(end, start)| end - start);
        // Learned positions go on through documents, which is refused.
        let learned = matches!(self.model().positions, Positions::Learned { .. });
        if ends.len() > 1 && !learned { lengths.collect() } else { vec![] }
    }

    fn plan(&self) -> Plan {
        let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } };
        build(&self.model(), &self.work(), &self.par, engines).expect("a feasible case")
    }
}

fn run(plan: &Plan) -> Run {
    // Two devices for all ranks: turns are taken wherever there are more than two.
    let devices = (0..plan.ranks()).map(|r| r % 2).collect();
    execute(plan, &Options::new(7, devices, true)).expect("the plan runs")
}

fn reference(plan: &Plan) -> StepResult {
    let documents = plan.about.documents.lengths().into_iter().map(|n| n as usize).collect();
    let mut cfg = DenseConfig {
        documents,
        muon: muon::pieces(plan),
        ..DenseConfig::from(plan.model().expect("a step has a model"))
    };
    if plan.about.par.options.unfused {
        cfg.blocks.attention_dropout = cfg.blocks.dropout;
    }
    let (tokens, targets) = Source::seeded(7).batch(plan, 1);
    step(&cfg, &Source::seeded(7).weights(plan), &tokens, &targets, &plan.optimizer().expect("a step ends with Adam"))
}

/// Largest of some values.
fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m: f64, x| m.max(x.abs()))
}

/// Largest difference, relative to the largest value, or to `least` where all are smaller.
fn error(got: &[f64], want: &[f64], least: f64) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = largest(want).max(least).max(1e-6);
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs());
    // A NaN is the largest error there is: it means that something unwritten was read.
    worst.fold(0.0, |m: f64, e| if e.is_nan() || m.is_nan() { f64::NAN } else { m.max(e) }) / scale
}

fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_closer(what, got, want, 0.0, tolerance);
}

fn assert_closer(what: &str, got: &[f64], want: &[f64], least: f64, tolerance: f64) {
    let e = error(got, want, least);
    assert!(e <= tolerance, "{what}: error {e:.3e} exceeds {tolerance:.0e}, values to {:.1e}", largest(want));
}

fn assert_all_close(got: &BTreeMap<String, Vec<f64>>, want: &BTreeMap<String, Vec<f64>>, tolerance: f64) {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    for (name, want) in want {
        assert_close(name, &got[name], want, tolerance);
    }
}

/// How far one rank by itself is from the reference, at worst: what rounding does to this model, whoever computes it.
fn rounding(case: &Case) -> f64 {
    let mut par = Parallelism::default();
    par.options.unfused = case.par.options.unfused;
    let microbatches = case.microbatches * u64::from(case.par.dp);
    let seq_units = case.work().seq_len / 2;
    let plan = Case { par, microbatches, seq_units, ..case.clone() }.plan();
    let (got, want) = (run(&plan), reference(&plan));
    let least = least(&want);
    want.grads.iter().map(|(name, want)| error(&got.grads[name], want, least)).fold(0.0, f64::max)
}

/// What passes a norm over two or four numbers all but cancels: rounding in f32 is of the size of the terms, and those of
/// the largest gradients show it.
fn least(want: &StepResult) -> f64 {
    0.02 * want.grads.values().map(|grad| largest(grad)).fold(0.0, f64::max)
}

fn holds(case: &Case, tolerance: f64) {
    let plan = case.plan();
    let (got, want) = (run(&plan), reference(&plan));
    assert_close("loss", &[got.loss], &[want.loss], tolerance);
    for (i, (got, want)) in got.hidden.iter().zip(&want.hidden).enumerate() {
        assert_close(&format!("hidden states of sequence {i}"), got, want, tolerance);
    }
    assert_eq!(got.hidden.len(), want.hidden.len());
    let least = if case.dtype == Dtype::F32 { least(&want) } else { 0.0 };
    assert_eq!(got.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, want) in &want.grads {
        assert_closer(name, &got.grads[name], want, least, tolerance);
    }
    if case.dtype == Dtype::F64 {
        assert_all_close(&got.weights, &want.new_params, 1e-7);
    }
    let atoms = AtomTable::new(&plan).unwrap();
    let programs = 0..plan.programs.len() as u32;
    let lines: Vec<Line> = programs.clone().map(|p| Line::program(&plan, &atoms, p).unwrap()).collect();
    let of = |rank: u32| plan.program_of(rank) as usize;
    let planned: Vec<u64> = (0..plan.ranks()).map(|rank| sent_by(&plan, &lines[of(rank)], rank)).collect();
    assert_eq!(got.sent_bytes, planned, "bytes counted in the transport, and planned");
    let layouts: Vec<Layout> = programs.map(|p| Layout::new(&plan, &atoms, p).unwrap()).collect();
    let planned: Vec<u64> = (0..plan.ranks()).map(|rank| layouts[of(rank)].bytes).collect();
    assert_eq!(got.peak_bytes, planned, "bytes counted at the allocator, and planned");
}

type Family = fn(&mut LlmSpec);

fn llama(_: &mut LlmSpec) {}

/// GPT-2's block, GPT-3's and BLOOM's but for where they have their positions from.
fn gpt2(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.positions) = (Norm::Layer, Mlp::Gelu, true, Positions::Learned { max: 400 });
}

/// The same in training.
fn gpt2_dropping(m: &mut LlmSpec) {
    gpt2(m);
    m.dropout = 0.2;
}

/// A quarter of a head turns, or two elements at least.
fn neox(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.parallel_block, m.own_norms, m.rotary_dim) =
        (Norm::Layer, Mlp::Gelu, true, true, true, Some(2));
}

/// BLOOM's block.
fn bloom(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.positions) = (Norm::Layer, Mlp::Gelu, true, Positions::Alibi);
}

/// MPT's.
fn mpt(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.positions) = (Norm::Layer, Mlp::Gelu, Positions::Alibi);
}

fn megascale(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.parallel_block, m.positions) = (Norm::Layer, Mlp::Gelu, true, true, Positions::None);
}

fn qwen2(m: &mut LlmSpec) {
    m.qkv_bias = true;
}

/// DeepSeek's attention: heads of 4 + 2 elements, values of 3.
fn latent(m: &mut LlmSpec) {
    m.kv_heads = m.heads;
    m.head_dim = 6;
    m.mla = Some(MlaSpec { q_lora: Some(7), kv_lora: 5, rope_dim: 2, nope_dim: 4, v_dim: 3 });
}

/// The same with queries projected at once.
fn latent_keys(m: &mut LlmSpec) {
    latent(m);
    m.mla = m.mla.map(|mla| MlaSpec { q_lora: None, ..mla });
}

fn qwen3(m: &mut LlmSpec) {
    m.qk_norm = true;
}

/// One norm, SwiGLU and no bias beside each other, as PaLM has it; layer norms without biases, as MPT; dropped.
fn palm(m: &mut LlmSpec) {
    (m.parallel_block, m.norm, m.dropout) = (true, Norm::Layer, 0.1);
}

fn case() -> Case {
    let par = Parallelism::default();
    Case {
        layers: 2,
        kv_heads: 2,
        group: 2,
        head_dim: 4,
        ffn: 10,
        tie: false,
        seq_units: 4,
        batch: 1,
        microbatches: 1,
        par,
        dtype: Dtype::F64,
        family: llama,
        window: None,
        cuts: vec![],
    }
}

#[test]
fn one_rank() {
    holds(&case(), 1e-10);
}

/// Rows gathered and summed in chunks, whatever knows where a row of a share stands.
#[test]
fn tensor_parallel_in_chunks() {
    for (family, tp) in [(llama, 2), (gpt2_dropping, 2), (palm, 3), (neox, 4)] as [(Family, _); 4] {
        let par = Parallelism { tp, options: "tp-overlap".parse().unwrap(), ..case().par };
        let of = Case { family, kv_heads: u64::from(tp), ffn: 12, seq_units: 4, par, ..case() };
        holds(&Case { batch: 2, microbatches: 2, ..of.clone() }, 1e-10);
        let recompute = Recompute::Full;
        holds(&Case { par: Parallelism { dp: 2, ring: 2, zero: 1, recompute, ..par }, ..of.clone() }, 1e-10);
        holds(&Case { par: Parallelism { pp: 2, ..par }, microbatches: 2, ..of }, 1e-10);
    }
}

/// Scores in memory, kept or computed again, whatever shares out the heads and whatever masks.
#[test]
fn unfused_attention() {
    let ways = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)];
    for (family, recompute) in [(llama, Recompute::None), (gpt2_dropping, Recompute::Selective)] as [(Family, _); 2] {
        for (tp, ulysses, dp) in ways {
            let par = Parallelism { tp, ulysses, dp, recompute, ..said("unfused", 1, 1).par };
            let case = Case { family, kv_heads: 4, microbatches: 2, par, ..case() };
            holds(&Case { batch: 2, ..case.clone() }, 1e-10);
            holds(&Case { window: Some(3), ..case.clone() }, 1e-10);
            holds(&Case { cuts: vec![0.3, 0.7], kv_heads: 2 * u64::from(tp), ..case }, 1e-10);
        }
    }
    for recompute in Recompute::ALL {
        let par = Parallelism { recompute, pp: 2, ..said("unfused", 1, 1).par };
        holds(&Case { family: gpt2_dropping, microbatches: 3, par, ..case() }, 1e-10);
    }
}

/// A fused kernel of attention may run again as well, for nothing, however its keys are reached.
#[test]
fn fused_attention_again() {
    let par = |words: &str, [tp, ring, ulysses, pp]: [u32; 4]| Parallelism {
        recompute: Recompute::Selective,
        options: words.parse().unwrap(),
        ..Parallelism { tp, ring, ulysses, pp, ..Parallelism::default() }
    };
    for par in [
        par("default", [2, 1, 2, 1]),
        par("default", [1, 3, 1, 2]),
        par("gather-kv", [1, 2, 1, 1]),
        par("dkv-model", [1, 3, 1, 1]),
        Parallelism { dp: 2, zero: 3, ..par("default", [1, 1, 1, 1]) },
        par("zb-h1", [1, 1, 1, 2]),
    ] {
        holds(&Case { kv_heads: 4, microbatches: 2, batch: 2, par, ..case() }, 1e-10);
    }
}

#[test]
fn ring_of_three() {
    holds(&Case { par: Parallelism { ring: 3, ..case().par }, ..case() }, 1e-10);
}

#[test]
fn a_window_of_packed_documents_on_a_ring_and_on_ulysses() {
    for (ring, ulysses) in [(1, 1), (3, 1), (1, 2), (2, 2)] {
        let par = Parallelism { ring, ulysses, ..case().par };
        holds(&Case { par, window: Some(5), ..case() }, 1e-10);
        holds(&Case { par, cuts: vec![0.1, 0.35, 0.8], ..case() }, 1e-10);
        holds(&Case { par, window: Some(3), cuts: vec![0.4], batch: 2, ..case() }, 1e-10);
    }
    // Every document is shared by all of the ring.
    for (words, ring, ulysses) in
        [("per-document", 3, 1), ("per-document+stripe", 2, 2), ("per-document+gather-kv", 2, 1)]
    {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..case().par };
        // Halves and quarters of eight parts for each rank of the ring.
        let seq_units = 8;
        holds(&Case { par, seq_units, cuts: vec![0.25, 0.5], window: Some(9), ..case() }, 1e-10);
    }
    // Rings that stop where nobody sees further back.
    for words in ["contiguous", "contiguous+dkv-model", "contiguous+burst", "contiguous+merge-at-end"] {
        let par = Parallelism { ring: 3, options: words.parse().unwrap(), ..case().par };
        for (window, microbatches) in [(1, 1), (3, 2), (9, 1)] {
            holds(&Case { par, window: Some(window), microbatches, ..case() }, 1e-10);
        }
    }
}

#[test]
fn ulysses_with_more_ranks_than_kv_heads() {
    let par = Parallelism { ulysses: 8, ..case().par };
    holds(&Case { group: 4, batch: 2, par, ..case() }, 1e-10);
}

#[test]
fn a_ring_of_consecutive_parts() {
    let par = Parallelism { ring: 3, options: "contiguous".parse().unwrap(), ..case().par };
    holds(&Case { batch: 2, par, ..case() }, 1e-10);
}

#[test]
fn rings_of_tokens_in_turn() {
    for (words, ring, ulysses) in [("stripe", 3, 1), ("stripe", 2, 2), ("stripe+gather-kv", 3, 1)] {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..case().par };
        holds(&Case { batch: 2, par, ..case() }, 1e-10);
    }
}

/// Every choice of a ring, and two of them together, where ranks are odd, KV heads few and blocks masked.
#[test]
fn every_word_of_a_ring() {
    let words = "dkv-model burst kv-in-two merge-at-end merge-in-kernel dkv-model+merge-at-end+contiguous \
                 dkv-model+merge-in-kernel+stripe burst+merge-in-kernel burst+contiguous burst+merge-at-end+stripe \
                 kv-in-two+merge-at-end";
    for options in words.split_whitespace().map(|words| words.parse().unwrap()) {
        for (ring, ulysses) in [(2, 1), (3, 1), (5, 1), (2, 2)] {
            let par = Parallelism { ring, ulysses, options, ..case().par };
            holds(&Case { batch: 2, kv_heads: 1, group: 4, par, ..case() }, 1e-10);
        }
    }
}

/// Inner rings of an outer one, in windows of 2 and 4, two windows and three.
#[test]
fn double_rings() {
    for (words, ring, ulysses) in [
        ("double-ring-2", 4, 1),
        ("double-ring-2+stripe", 6, 1),
        ("double-ring-4+contiguous", 8, 1),
        ("double-ring-2+merge-in-kernel", 4, 2),
        ("double-ring-2+merge-at-end+kv-in-two", 4, 1),
        ("double-ring-2+ring-inside+one-comm", 6, 2),
    ] {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..case().par };
        holds(&Case { batch: 2, par, ..case() }, 1e-10);
    }
}

/// Sums in fp32 and within kernels lose no more than a few places of bf16; TransformerEngine's sums in bf16, more.
#[test]
fn bf16_rings_are_near_the_reference() {
    for (words, tolerance) in [("merge-in-kernel", 0.08), ("dkv-model+merge-at-end", 0.12), ("burst", 0.1)] {
        let par = Parallelism { ring: 4, options: words.parse().unwrap(), ..case().par };
        let plan = Case { dtype: Dtype::Bf16, batch: 2, par, ..case() }.plan();
        let (got, want) = (run(&plan), reference(&plan));
        for (name, want) in &want.grads {
            assert_close(&format!("{words}: {name}"), &got.grads[name], want, tolerance);
        }
    }
}

#[test]
fn a_ring_inside_of_ulysses() {
    let par = Parallelism { dp: 2, ring: 3, ulysses: 2, options: "ring-inside".parse().unwrap(), ..case().par };
    holds(&Case { batch: 2, par, ..case() }, 1e-10);
}

/// The case with some words.
fn said(words: &str, ring: u32, ulysses: u32) -> Case {
    let options = words.parse().unwrap();
    Case { par: Parallelism { ring, ulysses, options, ..Parallelism::default() }, ..case() }
}

#[test]
fn all_kv_gathered_in_any_layout() {
    let orders = ["", "+contiguous", "+stripe"];
    for words in ["gather-kv", "gather-kv-prefetch"].iter().flat_map(|w| orders.map(|order| format!("{w}{order}"))) {
        for (batch, ring, ulysses) in [(1, 2, 1), (2, 3, 1), (1, 4, 1), (2, 2, 2)] {
            // Of KV heads there are 3 a rank.
            let model = Case { kv_heads: 3 * u64::from(ulysses), batch, ..said(&words, ring, ulysses) };
            holds(&model, 1e-10);
            let recompute = Recompute::Full;
            let par = Parallelism { dp: 2, zero: 1, recompute, ..model.par };
            holds(&Case { microbatches: 2, dtype: Dtype::F32, par, ..model }, 2e-4);
        }
    }
}

#[test]
fn everything_at_once() {
    let par = Parallelism { dp: 2, ring: 3, ulysses: 2, zero: 1, recompute: Recompute::Full, ..Parallelism::default() };
    holds(&Case { layers: 3, batch: 2, microbatches: 3, par, ..case() }, 1e-10);
}

#[test]
fn blocks_of_every_family() {
    for family in [gpt2, gpt2_dropping, neox, megascale, qwen2, qwen3, palm] {
        for (tp, words) in [(1, "default"), (2, "default"), (2, "no-sp")] {
            let par = Parallelism { tp, options: words.parse().unwrap(), ..case().par };
            holds(&Case { family, tie: tp == 1, batch: 2, microbatches: 2, par, ..case() }, 1e-10);
        }
        let (recompute, rest) = (Recompute::Full, Parallelism::default());
        let par = Parallelism { dp: 2, ring: 2, ulysses: 2, tp: 2, zero: 1, recompute, ..rest };
        holds(&Case { family, kv_heads: 4, par, ..case() }, 1e-10);
    }
}

/// The vocabulary of 29 comes out even over no number of ranks.
#[test]
fn tensor_parallel() {
    for (tp, words) in [(2, "default"), (2, "no-sp"), (3, "default")] {
        for tie in [false, true] {
            let par = Parallelism { tp, options: words.parse().unwrap(), ..case().par };
            holds(&Case { kv_heads: u64::from(tp), ffn: 6, tie, batch: 2, microbatches: 2, par, ..case() }, 1e-10);
        }
    }
}

#[test]
fn tensor_parallel_inside_everything_else() {
    let (recompute, rest) = (Recompute::Full, Parallelism::default());
    for words in ["default", "no-sp"] {
        let options = words.parse().unwrap();
        let par = Parallelism { dp: 2, ring: 2, ulysses: 2, tp: 2, zero: 1, recompute, options, ..rest };
        holds(&Case { kv_heads: 4, batch: 2, microbatches: 2, par, ..case() }, 1e-10);
    }
}

/// Words of a ring, at most one of each row in a case.
const RING_WORDS: &[&[&str]] = &[
    &["default", "contiguous", "stripe"],
    &["default", "dkv-model", "burst"],
    &["default", "default", "kv-in-two", "one-comm"],
    &["default", "merge-at-end", "merge-in-kernel"],
];

/// The words that `draws` pick, or none where the ring cannot have them.
fn ring_words(draws: &[usize], par: Parallelism) -> Parallelism {
    let words: Vec<&str> = RING_WORDS.iter().zip(draws).map(|(row, draw)| row[draw % row.len()]).collect();
    let said = Parallelism { options: words.join("+").parse().unwrap(), ..par };
    let (work, model) = (Case { par, ..case() }.work(), case().model());
    if feasible::check(&model, &work, &Parallelism { ulysses: 1, ..said }).is_ok() { said } else { par }
}

#[test]
fn sums_behind_the_backward_pass() {
    for (zero, dp, ring, microbatches) in [(0, 3, 1, 2), (1, 2, 2, 3), (1, 4, 1, 1)] {
        let options = "no-overlap-grad+wait-passes".parse().unwrap();
        let par = Parallelism { dp, ring, zero, options, ..case().par };
        holds(&Case { layers: 3, microbatches, tie: true, par, ..case() }, 1e-10);
    }
}

/// What norms and activations leave made again for the backward pass, and logits a few tokens at a time: to the bit what is
/// kept, but for the order in which a table's gradient is summed.
#[test]
fn what_is_made_again_or_piece_by_piece() {
    let (none, selective) = (Recompute::None, Recompute::Selective);
    for (family, words, recompute, par) in [
        (llama as Family, "recompute-act", none, Parallelism { dp: 2, zero: 3, ..Parallelism::default() }),
        (llama, "recompute-norm", none, Parallelism { ring: 2, ulysses: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm", none, Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm+tp-overlap", selective, Parallelism { tp: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm+zb-h1", none, Parallelism { pp: 2, dp: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm+v-half", none, Parallelism { pp: 2, vp: 2, ..Parallelism::default() }),
        (gpt2, "recompute-act+recompute-norm+no-sp", none, Parallelism { tp: 3, ..Parallelism::default() }),
        (palm, "recompute-act+recompute-norm", none, Parallelism { tp: 2, zero: 1, ..Parallelism::default() }),
        (neox, "recompute-norm+recompute-act", none, Parallelism { tp: 2, ..Parallelism::default() }),
        (latent, "recompute-norm+recompute-mla-up", none, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
    ] {
        let of = |words: &str| {
            let par = Parallelism { options: words.parse().unwrap(), recompute, ..par };
            let layers = 2 * u64::from(par.pp * par.vp);
            Case { family, kv_heads: 6, group: 1, ffn: 12, layers, batch: 2, microbatches: 3, par, ..case() }
        };
        holds(&of(words), 1e-10);
        let rest = words.split('+').filter(|word| !["recompute-act", "recompute-norm"].contains(word));
        let rest: Vec<&str> = rest.collect();
        let [kept, again] = [&rest.join("+"), words].map(|words| run(&Case { dtype: Dtype::F32, ..of(words) }.plan()));
        assert_eq!((kept.loss, kept.grads), (again.loss, again.grads), "{words}");
    }
    for (words, tie, par) in [
        ("loss-chunks-2", false, Parallelism { dp: 2, zero: 1, ..Parallelism::default() }),
        ("loss-chunks-5", true, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
        ("loss-chunks-7+wide-loss+add-grads+no-sp", false, Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        ("loss-chunks-3+zb-h1", true, Parallelism { pp: 2, ..Parallelism::default() }),
        ("loss-chunks-10000", false, Parallelism { ulysses: 2, zero: 3, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let layers = 2 * u64::from(par.pp);
        holds(&Case { layers, microbatches: 2, kv_heads: 2, tie, par, ..case() }, 1e-10);
    }
}

/// Networks piece by piece: against the dense reference, with pieces that do not come out even and more of them than rows.
#[test]
fn networks_in_pieces() {
    let (none, full) = (Recompute::None, Recompute::Full);
    for (family, words, recompute, par) in [
        (llama as Family, "mlp-chunks-2", none, Parallelism { dp: 2, zero: 1, ..Parallelism::default() }),
        (llama, "mlp-chunks-5+add-grads", none, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
        (llama, "mlp-chunks-3+no-sp", full, Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        (llama, "mlp-chunks-3+loss-chunks-3", full, Parallelism { ulysses: 2, zero: 3, ..Parallelism::default() }),
        (llama, "mlp-chunks-10000+recompute-act", none, Parallelism { ulysses: 2, dp: 2, ..Parallelism::default() }),
        (llama, "mlp-chunks-4+recompute-norm", none, Parallelism { ring: 3, zero: 2, ..Parallelism::default() }),
        (gpt2, "mlp-chunks-3", none, Parallelism { tp: 2, ..Parallelism::default() }),
        (latent, "mlp-chunks-3", full, Parallelism { tp: 2, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), recompute, ..par };
        let layers = 2 * u64::from(par.pp);
        holds(
            &Case { family, kv_heads: 6, group: 1, ffn: 12, layers, batch: 2, microbatches: 2, par, ..case() },
            1e-10,
        );
    }
}

/// Attention whose output is kept where layers are computed again: to the bit what it is where attention runs twice.
#[test]
fn attention_that_runs_once() {
    let full = Recompute::Full;
    for (family, words, par) in [
        (llama as Family, "", Parallelism { dp: 2, zero: 3, ..Parallelism::default() }),
        (llama, "", Parallelism { ring: 2, ulysses: 2, ..Parallelism::default() }),
        (llama, "burst+merge-at-end", Parallelism { ring: 3, zero: 1, dp: 2, ..Parallelism::default() }),
        (llama, "merge-in-kernel", Parallelism { ring: 4, ..Parallelism::default() }),
        (llama, "gather-kv-prefetch", Parallelism { ring: 2, tp: 2, ..Parallelism::default() }),
        (llama, "", Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        (llama, "dualpipe-v", Parallelism { pp: 2, vp: 2, ..Parallelism::default() }),
        (llama, "", Parallelism { pp: 2, vp: 2, ..Parallelism::default() }),
        (gpt2, "", Parallelism { ulysses: 2, ..Parallelism::default() }),
        (palm, "", Parallelism { tp: 2, ..Parallelism::default() }),
        (latent, "", Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
    ] {
        let of = |more: &str| {
            let words = format!("{words}{}{more}", if words.is_empty() || more.is_empty() { "" } else { "+" });
            let par = Parallelism { options: words.parse().unwrap(), recompute: full, ..par };
            let layers = 2 * u64::from(par.pp * par.vp);
            Case { family, kv_heads: 6, group: 1, ffn: 12, layers, batch: 2, microbatches: 4, par, ..case() }
        };
        holds(&of("keep-attention"), 1e-10);
        let [twice, once] = ["", "keep-attention"].map(|more| run(&Case { dtype: Dtype::F32, ..of(more) }.plan()));
        assert_eq!((twice.loss, twice.grads), (once.loss, once.grads), "{words} {par:?}");
    }
}

/// What frameworks leave to kernels of their own: the sum of a weight's gradients, and the copy of logits for the loss.
#[test]
fn sums_and_losses_of_kernels_of_their_own() {
    for (zero, dp, tp, pp, words, tie) in [
        (0, 1, 1, 1, "add-grads", false),
        (1, 2, 2, 1, "add-grads+wide-loss+no-sp", true),
        (1, 2, 2, 2, "add-grads+wide-loss", false),
        (3, 2, 1, 1, "add-grads+wide-loss", true),
    ] {
        let par = Parallelism { dp, tp, pp, zero, options: words.parse().unwrap(), ..case().par };
        holds(&Case { layers: 2, microbatches: 3, kv_heads: 2, tie, par, ..case() }, 1e-10);
    }
}

#[test]
fn gradients_and_weights_in_shares() {
    let words = [(2, ""), (2, "no-prefetch"), (2, "copy-shards"), (3, ""), (3, "no-prefetch"), (3, "copy-shards")];
    for (zero, words) in words {
        for (layers, microbatches, dp, ring, recompute, tie) in [
            (1, 1, 2, 1, Recompute::None, false),
            (2, 3, 3, 1, Recompute::None, true),
            (3, 1, 1, 2, Recompute::Full, false),
            (5, 2, 2, 2, Recompute::Full, true),
        ] {
            let par = Parallelism { dp, ring, zero, recompute, options: words.parse().unwrap(), ..case().par };
            holds(&Case { layers, microbatches, tie, par, ..case() }, 1e-10);
        }
    }
}

/// The same in stages, of which each gathers and scatters what passes it, and where gradients wait whole.
#[test]
fn gradients_and_weights_in_shares_of_stages() {
    for (zero, words) in [
        (2, ""),
        (2, "no-prefetch"),
        (2, "copy-shards"),
        (3, ""),
        (3, "no-prefetch"),
        (3, "no-sync"),
        (3, "no-sync+no-prefetch"),
        (3, "copy-shards+no-prefetch"),
        (3, "copy-shards+no-sync"),
    ] {
        for (pp, vp, layers, microbatches, dp, tp, recompute, tie) in [
            (1, 1, 3, 2, 3, 1, Recompute::None, true),
            (2, 1, 2, 1, 2, 1, Recompute::None, false),
            (2, 1, 6, 4, 2, 2, Recompute::None, true),
            (3, 1, 9, 2, 2, 1, Recompute::Full, true),
            (2, 2, 12, 4, 2, 1, Recompute::None, false),
        ] {
            let par = Parallelism { pp, vp, dp, tp, zero, recompute, options: words.parse().unwrap(), ..case().par };
            holds(&Case { layers, microbatches, tie, par, ..case() }, 1e-10);
        }
    }
    // Embedding and head in stages of their own, without layers.
    let par = Parallelism { pp: 3, dp: 2, zero: 3, options: "short-ends".parse().unwrap(), ..case().par };
    holds(&Case { layers: 1, microbatches: 4, par, tie: true, ..case() }, 1e-10);
    let options = "no-overlap-p2p+short-ends".parse().unwrap();
    let par = Parallelism { pp: 2, dp: 2, ring: 2, ulysses: 2, zero: 3, options, ..case().par };
    holds(&Case { layers: 4, microbatches: 3, batch: 2, par, tie: true, ..case() }, 1e-10);
}

/// Every rank has the sums whole and takes its share, wherever it stands among those with the same weights.
#[test]
fn gradients_whole_on_every_rank() {
    for (dp, ring, ulysses, tp, pp, vp, microbatches, words) in [
        (3, 1, 1, 1, 1, 1, 1, "all-reduce-grads"),
        (2, 2, 2, 1, 1, 1, 2, "all-reduce-grads+no-overlap-grad"),
        (2, 1, 1, 2, 2, 1, 3, "all-reduce-grads+no-sp"),
        (1, 3, 2, 1, 2, 1, 2, "all-reduce-grads"),
        (2, 2, 1, 1, 2, 2, 2, "all-reduce-grads+no-overlap-grad"),
        (2, 1, 1, 1, 1, 1, 2, "all-reduce-grads+wait-passes+add-grads"),
    ] {
        let options = words.parse().unwrap();
        let par = Parallelism { dp, ring, ulysses, tp, pp, vp, zero: 1, options, ..case().par };
        holds(&Case { layers: 4, microbatches, tie: true, par, ..case() }, 1e-10);
        holds(&Case { layers: 4, microbatches, par, ..case() }, 1e-10);
    }
}

/// Shares in groups of neighbours, sums over the groups.
#[test]
fn shares_in_groups_of_ranks() {
    for (zero, shard, dp, ring, pp, microbatches, words) in [
        (1, 2, 4, 1, 1, 2, ""),
        (2, 2, 6, 1, 1, 1, ""),
        (3, 3, 2, 3, 1, 3, ""),
        (3, 2, 2, 2, 2, 3, ""),
        (2, 2, 4, 1, 2, 2, "no-prefetch"),
        (3, 2, 4, 1, 2, 2, "no-sync"),
        (3, 2, 4, 1, 1, 2, "copy-shards+muon"),
        (3, 2, 4, 1, 1, 2, "offload-optimizer"),
    ] {
        let options = format!("{words}+shard-{shard}").parse().unwrap();
        let par = Parallelism { dp, ring, pp, zero, options, ..case().par };
        holds(&Case { layers: 4, microbatches, tie: true, par, ..case() }, 1e-10);
        let par = Parallelism { tp: 2, ..par };
        holds(&Case { layers: 4, microbatches, par, ..case() }, 1e-10);
    }
}

/// A slope of its own for every head, wherever the head and its keys are; heads that are no power of two.
#[test]
fn slopes_on_distances() {
    let one = case().par;
    for (family, words, kv_heads, group, par) in [
        (bloom, "default", 3, 1, one),
        (mpt, "default", 2, 2, Parallelism { ring: 3, ulysses: 2, ..one }),
        (bloom, "stripe+merge-in-kernel", 6, 1, Parallelism { ring: 2, tp: 2, ..one }),
        (mpt, "dkv-model", 2, 3, Parallelism { ring: 3, dp: 2, zero: 1, ..one }),
        (bloom, "gather-kv", 4, 1, Parallelism { ring: 2, ulysses: 2, zero: 3, ..one }),
        (mpt, "a2a-separate+replicate-after", 1, 4, Parallelism { ulysses: 4, ..one }),
        (bloom, "burst", 4, 1, Parallelism { ring: 4, ..one }),
        (bloom, "unfused", 6, 1, Parallelism { tp: 2, ulysses: 3, pp: 2, recompute: Recompute::Selective, ..one }),
        (mpt, "no-sp", 2, 2, Parallelism { tp: 4, pp: 2, recompute: Recompute::Full, ..one }),
        (bloom, "fpdt-2", 4, 1, Parallelism { ulysses: 2, recompute: Recompute::Full, ..one }),
    ] as [(Family, _, _, _, _); 10]
    {
        let options: foretrain::spec::Options = words.parse().unwrap();
        let (par, batch) = (Parallelism { options, ..par }, if options.chunks > 0 { 1 } else { 2 });
        let case = Case { family, kv_heads, group, ffn: 12, batch, microbatches: 2, par, ..case() };
        holds(&case, 1e-10);
        holds(&Case { window: Some(5), cuts: vec![0.4], ..case.clone() }, 1e-10);
        holds(&Case { dtype: Dtype::F32, ..case }, 2e-4);
    }
}

/// Fewer KV heads than tensor-parallel ranks: neighbours have the same one, and sum what they found for it.
#[test]
fn kv_heads_on_several_tensor_parallel_ranks() {
    let one = case().par;
    for (family, words, tp, kv_heads, group, par) in [
        (llama, "default", 2, 1, 2, one),
        (qwen2, "no-sp", 4, 2, 2, Parallelism { dp: 2, ..one }),
        (qwen3, "tp-overlap", 4, 1, 8, Parallelism { dp: 2, zero: 1, ..one }),
        (gpt2_dropping, "default", 4, 2, 4, Parallelism { zero: 2, dp: 2, ..one }),
        (neox, "default", 6, 2, 3, Parallelism { pp: 2, recompute: Recompute::Full, ..one }),
        (qwen2, "default", 4, 2, 4, Parallelism { zero: 3, dp: 2, pp: 2, ..one }),
        (llama, "a2a-separate", 4, 2, 4, Parallelism { ulysses: 2, ring: 2, zero: 1, ..one }),
        (megascale, "add-grads+no-overlap-grad", 4, 2, 2, Parallelism { dp: 2, zero: 1, ..one }),
    ] as [(Family, _, _, _, _, _); 8]
    {
        let par = Parallelism { tp, options: words.parse().unwrap(), ..par };
        let case = Case { family, kv_heads, group, ffn: 12, microbatches: 2, par, ..case() };
        holds(&case, 1e-10);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case }, 2e-4);
    }
}

/// Gradients of weights made apart from those of inputs, and later (ZB-H1), of every block and beside every degree.
#[test]
fn gradients_of_weights_come_later() {
    let one = case().par;
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "default", false, 2, 1, Parallelism { pp: 2, ..one }),
        (llama, "default", true, 6, 5, Parallelism { pp: 3, dp: 2, zero: 1, ..one }),
        (llama, "no-overlap-grad+no-overlap-p2p", true, 4, 3, Parallelism { pp: 4, ..one }),
        (gpt2_dropping, "unfused", false, 4, 3, Parallelism { pp: 2, recompute: Recompute::Selective, ..one }),
        (qwen3, "default", false, 4, 4, Parallelism { pp: 2, tp: 2, dp: 2, ..one }),
        (palm, "tp-overlap", false, 4, 3, Parallelism { pp: 2, tp: 2, ..one }),
        (neox, "no-sp+add-grads", true, 4, 3, Parallelism { pp: 2, tp: 2, ..one }),
        (megascale, "add-grads", false, 4, 3, Parallelism { pp: 4, zero: 1, dp: 2, ..one }),
        (bloom, "default", false, 3, 4, Parallelism { pp: 3, ulysses: 2, ring: 2, ..one }),
        (latent, "default", false, 4, 4, Parallelism { pp: 2, ring: 2, dp: 2, zero: 1, ..one }),
        (latent_keys, "default", true, 6, 3, Parallelism { pp: 3, ulysses: 2, tp: 2, ..one }),
        (qwen2, "short-ends", false, 4, 5, Parallelism { pp: 3, tp: 2, ..one }),
        (mpt, "first-stage-0+last-stage-0", true, 4, 4, Parallelism { pp: 3, ..one }),
    ] as [(Family, _, _, _, _, _); 13]
    {
        let options = format!("{words}+zb-h1").parse().unwrap();
        let par = Parallelism { options, ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case, 1e-10);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case }, 2e-4);
    }
}

/// Two chunks a stage, folded in the middle: some gradients of weights come later, and the last stage hands over to itself.
#[test]
fn a_pipeline_that_is_folded() {
    let one = Parallelism { vp: 2, ..case().par };
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "default", true, 4, 4, Parallelism { pp: 2, ..one }),
        (qwen3, "default", false, 8, 5, Parallelism { pp: 2, tp: 2, dp: 2, zero: 1, ..one }),
        (llama, "no-overlap-grad+uneven", true, 8, 7, Parallelism { pp: 3, ..one }),
        (latent, "uneven", false, 9, 6, Parallelism { pp: 3, ring: 2, ..one }),
        (gpt2_dropping, "unfused", false, 4, 4, Parallelism { pp: 2, recompute: Recompute::Selective, ..one }),
        (bloom, "short-ends", false, 10, 6, Parallelism { pp: 3, ulysses: 2, dp: 2, ..one }),
        (llama, "default", false, 8, 9, Parallelism { pp: 4, recompute: Recompute::Full, ..one }),
        (llama, "first-stage-1+last-stage-3", true, 8, 5, Parallelism { pp: 2, dp: 2, ..one }),
    ] as [(Family, _, _, _, _, _); 8]
    {
        let options = format!("{words}+dualpipe-v").parse().unwrap();
        let par = Parallelism { options, ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case, 1e-10);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case }, 2e-4);
    }
}

/// Two chunks a stage in a V, every backward pass in two halves, with fewer microbatches than fill it, and with more.
#[test]
fn pipelines_in_a_v() {
    let one = Parallelism { vp: 2, ..case().par };
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "zb-v", true, 4, 1, Parallelism { pp: 2, ..one }),
        (qwen3, "zb-v", false, 8, 5, Parallelism { pp: 2, tp: 2, dp: 2, zero: 1, ..one }),
        (gpt2_dropping, "zb-v+unfused", false, 6, 4, Parallelism { pp: 3, recompute: Recompute::Selective, ..one }),
        (llama, "v-half+no-overlap-grad+uneven", true, 9, 7, Parallelism { pp: 3, ..one }),
        (latent, "v-half+uneven", false, 9, 6, Parallelism { pp: 4, ring: 2, ..one }),
        (bloom, "v-half+short-ends", false, 10, 6, Parallelism { pp: 3, ulysses: 2, dp: 2, ..one }),
        (neox, "v-min", false, 4, 3, Parallelism { pp: 2, ..one }),
        (megascale, "v-min+add-grads", false, 8, 9, Parallelism { pp: 4, zero: 1, dp: 2, ..one }),
        (llama, "v-min", true, 8, 5, Parallelism { pp: 4, recompute: Recompute::Full, ..one }),
        (qwen3, "zb-v+first-stage-3+last-stage-1", false, 8, 5, Parallelism { pp: 2, tp: 2, ..one }),
        (llama, "dualpipe-v+tp-overlap", false, 4, 5, Parallelism { pp: 2, tp: 2, ..one }),
        (llama, "v-half+tp-overlap", false, 4, 4, Parallelism { pp: 2, tp: 2, ..one }),
    ] as [(Family, _, _, _, _, _); 12]
    {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case, 1e-10);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case }, 2e-4);
    }
}

/// Layers that are computed again before the first half of their backward pass, and kept for the second.
#[test]
fn gradients_of_weights_come_later_of_what_is_computed_again() {
    let one = Parallelism { recompute: Recompute::Full, ..case().par };
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "zb-h1", true, 6, 5, Parallelism { pp: 3, dp: 2, zero: 1, ..one }),
        (gpt2_dropping, "zb-h1+unfused", false, 4, 3, Parallelism { pp: 2, ..one }),
        (qwen3, "zb-h1", false, 4, 4, Parallelism { pp: 2, tp: 2, dp: 2, ..one }),
        (latent, "zb-h1", false, 4, 4, Parallelism { pp: 2, ring: 2, ..one }),
        (bloom, "zb-v", false, 6, 4, Parallelism { pp: 3, vp: 2, ulysses: 2, ..one }),
        (palm, "v-half+tp-overlap", false, 4, 5, Parallelism { pp: 2, vp: 2, tp: 2, ..one }),
        (llama, "zb-h1+tp-overlap", false, 4, 3, Parallelism { pp: 2, tp: 2, ..one }),
    ] as [(Family, _, _, _, _, _); 7]
    {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case, 1e-10);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case }, 2e-4);
    }
}

#[test]
fn a_pipeline_of_stages() {
    for (pp, vp, layers, microbatches, zero, recompute, tie) in [
        (2, 1, 2, 1, 0, Recompute::None, false),
        (2, 1, 4, 5, 0, Recompute::None, true),
        (3, 1, 6, 4, 0, Recompute::Full, false),
        (4, 1, 12, 3, 1, Recompute::None, true),
        (2, 2, 4, 4, 0, Recompute::None, false),
        (3, 2, 12, 6, 1, Recompute::Full, true),
        (2, 3, 18, 4, 1, Recompute::None, true),
    ] {
        let par = Parallelism { pp, vp, zero, recompute, ..case().par };
        holds(&Case { layers, microbatches, tie, par, ..case() }, 1e-10);
    }
}

#[test]
fn a_pipeline_with_every_other_degree() {
    for (pp, vp, layers, microbatches, words) in [
        (2, 1, 4, 3, ""),
        (2, 1, 4, 3, "no-overlap-p2p+no-overlap-grad"),
        (2, 2, 8, 2, "no-overlap-p2p"),
        (2, 2, 8, 2, ""),
        (2, 1, 4, 2, "short-ends"),
        (2, 2, 10, 2, "short-ends"),
        // Embedding and head in chunks of their own, beside layers on the same stage and without any.
        (2, 2, 2, 4, "short-ends"),
        (3, 1, 1, 4, "short-ends+no-overlap-grad"),
        (4, 1, 2, 3, "short-ends+no-overlap-p2p"),
        (3, 1, 4, 2, "uneven"),
        (2, 2, 7, 2, "uneven+short-ends"),
        (3, 1, 5, 4, "first-stage-1+last-stage-1"),
        (2, 2, 6, 2, "last-stage-2"),
    ] {
        let options: foretrain::spec::Options = words.parse().unwrap();
        let par = Parallelism { pp, vp, dp: 2, ring: 2, ulysses: 2, zero: 1, options, ..case().par };
        holds(&Case { layers, microbatches, batch: 2, par, tie: true, ..case() }, 1e-10);
    }
}

#[test]
fn a_pipeline_of_tensor_parallel_stages() {
    for (pp, vp, words) in [
        (2, 1, "default"),
        (2, 2, "default"),
        (3, 1, "no-sp"),
        (3, 1, "no-sp+scatter-p2p"),
        (2, 2, "no-sp+scatter-p2p+no-overlap-p2p"),
        (4, 1, "no-sp+scatter-p2p+no-overlap-p2p+short-ends+uneven"),
        (2, 2, "no-sp+scatter-p2p+dualpipe-v"),
        (2, 1, "no-sp+scatter-p2p+zb-h1"),
    ] {
        let par = Parallelism { pp, vp, tp: 2, dp: 2, zero: 1, options: words.parse().unwrap(), ..case().par };
        let layers = 2 * u64::from(pp * vp);
        holds(&Case { layers, ffn: 6, microbatches: 4, batch: 2, tie: true, par, ..case() }, 1e-10);
    }
}

fn cases() -> impl Strategy<Value = Case> {
    // The degree of tensor parallelism, and without sequence parallelism.
    let tensor = prop_oneof![3 => Just((1, false)), 1 => Just((2, false)), 1 => Just((3, false)), 1 => Just((2, true))];
    let draws = prop::collection::vec(0usize..60, RING_WORDS.len());
    let par = (1u32..=2, 1u32..=5, 0usize..4, 0u32..=3, any::<bool>(), draws, tensor);
    let par = par.prop_map(|(dp, ring, u, zero, full, draws, (tp, whole))| {
        let recompute = if full { Recompute::Full } else { Recompute::None };
        let par = Parallelism { dp, ring, ulysses: [1, 2, 3, 4][u], zero, recompute, ..Parallelism::default() };
        let mut par = Parallelism { tp, ..ring_words(&draws, par) };
        par.options.whole_activations = whole;
        par
    });
    let model = (1u64..=3, 1u64..=4, 1u64..=4, 1u64..=2, 1u64..=7, any::<bool>());
    let work = (1u64..=3, 1u64..=2, 1u64..=3);
    let family = prop_oneof![4 => Just(llama as Family), 1 => Just(gpt2_dropping as Family), 1 => Just(neox as Family), 1 => Just(megascale as Family), 1 => Just(qwen2 as Family), 1 => Just(qwen3 as Family), 1 => Just(latent as Family)];
    let feasible = |c: &Case| {
        let (k, u) = (c.kv_heads / u64::from(c.par.tp), u64::from(c.par.ulysses));
        let heads = k * c.group;
        heads.is_multiple_of(u) && (k.is_multiple_of(u) || u.is_multiple_of(k)) && c.par.ranks() <= 12
    };
    let masks = (prop::option::weighted(0.3, 1u64..20), prop::collection::vec(0.0..1.0, 0..4));
    (par, model, work, (family, masks))
        .prop_map(|(par, (layers, kv_heads, group, d, ffn, tie), (seq_units, batch, microbatches), (family, masks))| {
            Case {
                layers,
                kv_heads: kv_heads * u64::from(par.tp),
                group,
                head_dim: 2 * d,
                ffn: ffn * u64::from(par.tp),
                tie,
                seq_units,
                batch,
                microbatches,
                par,
                dtype: Dtype::F64,
                family,
                window: masks.0,
                cuts: masks.1,
            }
        })
        .prop_flat_map(|case| (Just(case), prop::sample::select(vec![(1, 1), (1, 1), (2, 1), (3, 1), (2, 2), (2, 3)])))
        .prop_map(|(case, (pp, vp))| Case {
            layers: case.layers * u64::from(pp * vp),
            microbatches: case.microbatches * if vp > 1 { u64::from(pp) } else { 1 },
            par: Parallelism { pp, vp, ..case.par },
            ..case
        })
        .prop_filter("feasible", feasible)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 40, ..ProptestConfig::default() })]

    /// The whole pipeline in f64, where a logic error cannot hide behind rounding.
    #[test]
    fn any_layout_equals_the_reference(case in cases()) {
        holds(&case, 1e-9);
    }

    /// The real kernels in f32: rounding alone separates them from the reference. The bound grows with the
    /// depth of sums, at most some hundred terms here; some models, of a dozen layers with heads of two numbers, make more of
    /// rounding, and of those any layout stays within a few times what one rank is off.
    #[test]
    fn any_layout_is_close_in_f32(case in cases()) {
        let case = Case { dtype: Dtype::F32, ..case };
        holds(&case, f64::max(2e-4, 4.0 * rounding(&case)));
    }
}

/// Gradients that are kept and sent in bf16 are near the reference's, under every way to share them out, and as many bytes
/// as the plan says; sums of microbatches in bf16 lose more than those in fp32.
#[test]
fn gradients_in_bf16_are_near_the_reference() {
    let worst = |words: &str, zero: u32, microbatches: u64| {
        let par = Parallelism { dp: 2, ring: 2, tp: 2, zero, options: words.parse().unwrap(), ..case().par };
        let plan = Case { dtype: Dtype::Bf16, batch: 2, microbatches, tie: true, par, ..case() }.plan();
        let (got, want) = (run(&plan), reference(&plan));
        let atoms = AtomTable::new(&plan).unwrap();
        let line = Line::program(&plan, &atoms, 0).unwrap();
        assert_eq!(got.sent_bytes[0], sent_by(&plan, &line, 0), "{words}, ZeRO {zero}");
        assert_eq!(got.peak_bytes[0], Layout::new(&plan, &atoms, 0).unwrap().bytes, "{words}, ZeRO {zero}");
        let least = least(&want);
        let of = |(name, want): (&String, &Vec<f64>)| error(&got.grads[name], want, least);
        (want.grads.iter().map(of).fold(0.0, f64::max), got.sent_bytes[0], got.peak_bytes[0])
    };
    for (zero, words) in [
        (0, ""),
        (1, ""),
        (1, "add-grads"),
        (2, ""),
        (3, ""),
        (3, "no-sync"),
        (1, "offload-optimizer"),
        (1, "all-reduce-grads"),
    ] {
        for microbatches in [1, 4] {
            let halved = if words.is_empty() { "bf16-grads".into() } else { format!("{words}+bf16-grads") };
            let words = if words.is_empty() { "default" } else { words };
            let (wide, narrow) = (worst(words, zero, microbatches), worst(&halved, zero, microbatches));
            assert!(narrow.0 < 0.2, "{halved}, ZeRO {zero}: {}", narrow.0);
            assert!(narrow.1 < wide.1 && narrow.2 < wide.2, "{halved}, ZeRO {zero}: {narrow:?}, {wide:?}");
        }
    }
    let (wide, narrow) = (worst("default", 1, 16).0, worst("bf16-grads", 1, 16).0);
    assert!(narrow > wide, "16 microbatches: {narrow} in bf16, {wide} in fp32");
}

/// bf16 keeps 8 bits: the errors of two layers, ring merges in fp32, stay within a few of its last places.
#[test]
fn bf16_is_near_the_reference() {
    let par = Parallelism { ring: 2, ulysses: 2, zero: 1, ..case().par };
    let plan = Case { dtype: Dtype::Bf16, batch: 2, par, ..case() }.plan();
    let (got, want) = (run(&plan), reference(&plan));
    assert_close("loss", &[got.loss], &[want.loss], 1e-2);
    for (name, want) in &want.grads {
        assert_close(name, &got.grads[name], want, 0.08);
    }
}

/// Four bits of a number are left in the products of a layer: its outputs move by some percent.
#[test]
fn fp8_is_near_the_reference_and_not_bf16() {
    let words = |text: &str| Parallelism { ring: 2, zero: 1, options: text.parse().unwrap(), ..case().par };
    let plan = |text| Case { dtype: Dtype::Bf16, batch: 2, par: words(text), ..case() }.plan();
    let (got, wide) = (run(&plan("fp8")), run(&plan("default")));
    let want = reference(&plan("fp8"));
    assert_close("loss", &[got.loss], &[want.loss], 0.03);
    // Over all gradients together: single ones of a model this small may be off by half their size.
    let squares = |x: f64| x * x;
    let off = |run: &Run| -> f64 {
        let of = |(name, want): (&String, &Vec<f64>)| -> f64 {
            run.grads[name].iter().zip(want).map(|(g, w)| squares(g - w)).sum()
        };
        want.grads.iter().map(of).sum::<f64>().sqrt()
    };
    let size = want.grads.values().flatten().map(|&w| squares(w)).sum::<f64>().sqrt();
    let [got, wide] = [off(&got), off(&wide)];
    assert!(got > 4.0 * wide && got < 0.5 * size, "{got} of {size}, in bf16 {wide}");
}

#[test]
fn every_way_to_exchange_heads() {
    // (words, ulysses, KV heads, query heads of each)
    let ways = [
        ("a2a-separate", 4, 4, 2),
        ("a2a-separate", 4, 1, 4),
        ("replicate-after", 4, 2, 2),
        ("replicate-after+a2a-separate", 4, 1, 8),
        ("pad-heads", 4, 3, 1),
        ("pad-heads", 4, 2, 3),
        ("pad-heads+replicate-after+a2a-separate", 8, 3, 3),
        ("pad-heads+gather-kv-prefetch", 2, 3, 1),
        ("a2a-separate+replicate-after+ring-inside", 2, 1, 2),
    ];
    for (i, (words, ulysses, kv_heads, group)) in ways.into_iter().enumerate() {
        let ring = if words.contains("gather") || words.contains("ring") { 2 } else { 1 };
        let batch = 1 + i as u64 % 2;
        let model = Case { kv_heads, group, batch, ..said(words, ring, ulysses) };
        holds(&model, 1e-10);
        let par = Parallelism { zero: 1, recompute: Recompute::Full, ..model.par };
        holds(&Case { microbatches: 2, dtype: Dtype::F32, par, ..model.clone() }, 2e-4);
        // Tensor-parallel ranks have as many heads each.
        let par = Parallelism { tp: 2, ..model.par };
        holds(&Case { kv_heads: 2 * kv_heads, ffn: 4, par, ..model }, 1e-10);
    }
}

/// Ulysses runs the same kernel on the same rows, so its hidden states are the single rank's to the bit.
#[test]
fn ulysses_is_bit_identical_to_one_rank() {
    let alone = run(&Case { seq_units: 4, dtype: Dtype::F32, ..case() }.plan());
    for words in ["default", "a2a-separate"] {
        let split = run(&Case { seq_units: 2, dtype: Dtype::F32, ..said(words, 1, 2) }.plan());
        assert_eq!(alone.hidden, split.hidden, "{words}");
    }
    for words in ["default", "replicate-after", "replicate-after+a2a-separate"] {
        let split = run(&Case { seq_units: 1, dtype: Dtype::F32, ..said(words, 1, 4) }.plan());
        assert_eq!(alone.hidden, split.hidden, "{words}, two ranks a KV head");
    }
    let odd = Case { kv_heads: 3, dtype: Dtype::F32, ..case() };
    let padded = Case { seq_units: 1, par: said("pad-heads", 1, 4).par, ..odd.clone() };
    assert_eq!(run(&odd.plan()).hidden, run(&padded.plan()).hidden, "zeros change nothing");
}

#[test]
fn equal_seeds_give_equal_bits() {
    let par = Parallelism { dp: 2, ring: 2, zero: 1, ..case().par };
    let plan = Case { dtype: Dtype::F32, par, ..case() }.plan();
    let (a, b) = (run(&plan), run(&plan));
    assert_eq!((a.loss, a.grads, a.weights), (b.loss, b.grads, b.weights));
}

/// Latent attention in every layout of the sequence and of the heads, in stages, in shares.
#[test]
fn latent_attention() {
    let one = Parallelism::default();
    for (words, par) in [
        ("default", one),
        ("default", Parallelism { ring: 3, ulysses: 2, ..one }),
        ("kv-in-two+merge-at-end", Parallelism { ring: 2, recompute: Recompute::Full, zero: 3, ..one }),
        ("burst+merge-in-kernel", Parallelism { ring: 3, dp: 2, zero: 1, ..one }),
        ("dkv-model", Parallelism { ring: 2, tp: 2, ..one }),
        ("double-ring-2", Parallelism { ring: 4, ..one }),
        ("gather-kv", Parallelism { ring: 2, ulysses: 2, zero: 2, ..one }),
        ("gather-kv-prefetch+contiguous", Parallelism { ring: 3, ..one }),
        ("a2a-separate", Parallelism { ulysses: 4, ..one }),
        ("pad-heads", Parallelism { ulysses: 3, ..one }),
        ("default", Parallelism { tp: 2, ulysses: 2, ..one }),
        ("no-sp", Parallelism { tp: 2, dp: 2, zero: 1, ..one }),
        ("tp-overlap", Parallelism { tp: 4, ..one }),
        ("default", Parallelism { tp: 2, pp: 2, vp: 2, zero: 1, recompute: Recompute::Full, ..one }),
        ("recompute-mla-up", Parallelism { zero: 3, dp: 2, ..one }),
        ("recompute-mla-up+tp-overlap", Parallelism { tp: 4, pp: 2, ..one }),
        ("recompute-mla-up+burst", Parallelism { ring: 3, tp: 2, ..one }),
        ("recompute-mla-up+gather-kv-prefetch+contiguous", Parallelism { ring: 2, ..one }),
        ("recompute-mla-up+zb-h1", Parallelism { pp: 2, ring: 2, ..one }),
    ] {
        for family in [latent, latent_keys] {
            let par = Parallelism { options: words.parse().unwrap(), ..par };
            let layers = 2 * u64::from(par.pp * par.vp);
            let case =
                Case { family, kv_heads: 4, group: 1, ffn: 12, layers, batch: 2, microbatches: 2, par, ..case() };
            holds(&case, 1e-10);
            holds(&Case { window: Some(5), cuts: vec![0.4], batch: 1, dtype: Dtype::F32, ..case }, 2e-4);
        }
    }
}

/// Norms of heads in every layout of the sequence, in stages, in shares, and where all tokens are everywhere.
#[test]
fn norms_of_queries_and_keys() {
    for (words, par) in [
        ("default", Parallelism { ring: 3, ulysses: 2, ..Parallelism::default() }),
        ("gather-kv", Parallelism { ring: 2, recompute: Recompute::Full, zero: 3, ..Parallelism::default() }),
        ("no-sp", Parallelism { tp: 2, dp: 2, zero: 2, ..Parallelism::default() }),
        ("tp-overlap", Parallelism { tp: 2, ..Parallelism::default() }),
        ("no-sp", Parallelism { tp: 2, pp: 2, zero: 1, ..Parallelism::default() }),
        ("unfused", Parallelism { pp: 2, vp: 2, recompute: Recompute::Selective, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let layers = 2 * u64::from(par.pp * par.vp);
        holds(&Case { family: qwen3, kv_heads: 4, layers, batch: 2, microbatches: 2, par, ..case() }, 1e-10);
    }
}

/// Weights that every tensor-parallel rank has whole, learned positions among them, are summed over these ranks
/// before the data ranks share the sum out.
#[test]
fn shared_weights_under_every_stage_of_zero() {
    for zero in 0..=3 {
        let par = Parallelism { tp: 3, ulysses: 2, zero, recompute: Recompute::Full, ..Parallelism::default() };
        holds(&Case { family: gpt2, kv_heads: 6, ffn: 21, par, ..case() }, 1e-10);
    }
}
