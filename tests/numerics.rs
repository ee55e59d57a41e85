//! Every way of running a step gives the dense single-rank f64 reference: loss, outputs, every gradient,
//! and the weights after the optimizer.

use foretrain::exec::reference::{AdamConfig, DenseConfig, StepResult, step};
use foretrain::exec::{Options, Run, execute, inputs};
use foretrain::plan::{Dtype, Engine, Plan, link::AtomTable, memory::Layout};
use foretrain::spec::{LlmSpec, Parallelism, Recompute, Workload};
use foretrain::strategy::{Engines, build};
use proptest::prelude::*;
use std::collections::BTreeMap;

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
        LlmSpec::parse("test", "random", &json.to_string()).expect("a sound model")
    }

    fn plan(&self) -> Plan {
        let unit = 2 * u64::from(self.par.ring) * u64::from(self.par.ulysses);
        let work = Workload {
            seq_len: unit * self.seq_units,
            global_batch: self.batch * self.microbatches * u64::from(self.par.dp),
            micro_batch: self.batch,
            dtype: self.dtype,
        };
        let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } };
        build(&self.model(), &work, &self.par, engines).expect("a feasible case")
    }
}

fn run(plan: &Plan) -> Run {
    // Two devices for all ranks: turns are taken wherever there are more than two.
    let devices = (0..plan.ranks()).map(|r| r % 2).collect();
    execute(plan, &Options { seed: 7, devices, keep: true }).expect("the plan runs")
}

fn reference(plan: &Plan) -> StepResult {
    let m = &plan.about.model_spec;
    let cfg = DenseConfig {
        layers: m.layers as usize,
        hidden: m.hidden as usize,
        heads: m.heads as usize,
        kv_heads: m.kv_heads as usize,
        head_dim: m.head_dim as usize,
        ffn: m.ffn as usize,
        vocab: m.vocab as usize,
        eps: m.rms_eps,
        theta: m.rope_theta,
        tie: m.tie_embeddings,
    };
    let (tokens, targets): (Vec<_>, Vec<_>) =
        (0..plan.about.global_batch).map(|i| inputs::sequence(plan, 7, i)).unzip();
    let adam = AdamConfig { lr: 3e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    step(&cfg, &inputs::weights(plan, 7), &tokens, &targets, &adam)
}

/// Largest difference, relative to the largest value.
fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-6, |m: f64, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs());
    // A NaN is the largest error there is: it means that something unwritten was read.
    worst.fold(0.0, |m: f64, e| if e.is_nan() || m.is_nan() { f64::NAN } else { m.max(e) }) / scale
}

fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let e = error(got, want);
    assert!(e <= tolerance, "{what}: error {e:.3e} exceeds {tolerance:.0e}");
}

fn assert_all_close(got: &BTreeMap<String, Vec<f64>>, want: &BTreeMap<String, Vec<f64>>, tolerance: f64) {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    for (name, want) in want {
        assert_close(name, &got[name], want, tolerance);
    }
}

fn holds(case: &Case, tolerance: f64) {
    let plan = case.plan();
    let (got, want) = (run(&plan), reference(&plan));
    assert_close("loss", &[got.loss], &[want.loss], tolerance);
    for (i, (got, want)) in got.hidden.iter().zip(&want.hidden).enumerate() {
        assert_close(&format!("hidden states of sequence {i}"), got, want, tolerance);
    }
    assert_eq!(got.hidden.len(), want.hidden.len());
    assert_all_close(&got.grads, &want.grads, tolerance);
    if case.dtype == Dtype::F64 {
        assert_all_close(&got.weights, &want.new_params, 1e-7);
    }
    let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
    assert!(
        got.peak_bytes.iter().all(|&p| p == layout.bytes),
        "{:?} counted, {} planned",
        got.peak_bytes,
        layout.bytes
    );
}

fn case() -> Case {
    let par = Parallelism { dp: 1, ring: 1, ulysses: 1, zero: 0, recompute: Recompute::None };
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
    }
}

#[test]
fn one_rank() {
    holds(&case(), 1e-10);
}

#[test]
fn ring_of_three() {
    holds(&Case { par: Parallelism { ring: 3, ..case().par }, ..case() }, 1e-10);
}

#[test]
fn ulysses_with_more_ranks_than_kv_heads() {
    let par = Parallelism { ulysses: 8, ..case().par };
    holds(&Case { group: 4, batch: 2, par, ..case() }, 1e-10);
}

#[test]
fn everything_at_once() {
    let par = Parallelism { dp: 2, ring: 3, ulysses: 2, zero: 1, recompute: Recompute::Full };
    holds(&Case { layers: 3, batch: 2, microbatches: 3, par, ..case() }, 1e-10);
}
