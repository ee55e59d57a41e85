//! What tests of whole steps share: the dense f64 reference of a plan, and a run held to it.
#![allow(dead_code)]

use foretrain::collective::count::sent_by;
use foretrain::exec::reference::{self, DenseConfig, Experts, StepResult, muon, step};
use foretrain::exec::source::Source;
use foretrain::exec::{Job, Options, Run, execute, routing, train};
use foretrain::plan::Plan;
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::Layout;

/// Of weights and tokens.
pub const SEED: u64 = 7;

/// The plan's model and documents, its tokens choosing the experts that the plan's routes say, and its scores dropped where
/// they are in memory.
pub fn config(plan: &Plan) -> DenseConfig {
    let mut cfg = DenseConfig::from(plan.model().expect("a step has a model"));
    cfg.experts = cfg.experts.map(|e| Experts { choices: routing::choices(plan), ..e });
    cfg.documents = plan.about.documents.lengths().into_iter().map(|n| n as usize).collect();
    cfg.muon = muon::pieces(plan);
    if plan.about.par.options.unfused {
        cfg.blocks.attention_dropout = cfg.blocks.dropout;
    }
    cfg
}

pub fn reference(plan: &Plan, cfg: &DenseConfig) -> StepResult {
    let (tokens, targets) = Source::seeded(SEED).batch(plan, 1);
    step(cfg, &Source::seeded(SEED).weights(plan), &tokens, &targets, &plan.optimizer().expect("a step ends with Adam"))
}

/// So many steps of the plan on two cores, each with everything that it computed if `keep`, else the last one.
pub fn runs(plan: &Plan, source: &Source, steps: u64, keep: bool) -> Vec<Run> {
    let options = Options::new(5, (0..plan.ranks()).map(|r| r % 2).collect(), keep);
    let mut all = vec![];
    let job = Job { source, steps, keep_last: true, watch: None };
    let mut keep = |number, run| {
        assert_eq!(number, all.len() as u64 + 1);
        all.push(run);
        Ok(())
    };
    train(plan, &options, &job, &mut keep).expect("the plan runs");
    all
}

/// What the reference makes of them.
pub fn wanted(plan: &Plan, source: &Source, steps: u64) -> Vec<StepResult> {
    let batches = (1..=steps).map(|step| source.batch(plan, step));
    reference::train(&config(plan), &source.weights(plan), batches, &plan.optimizer().unwrap())
}

/// The plan on two cores, with everything that it computed: turns are taken wherever there are more than two ranks.
pub fn run(plan: &Plan) -> Run {
    let devices = (0..plan.ranks()).map(|r| r % 2).collect();
    execute(plan, &Options::new(SEED, devices, true)).expect("the plan runs")
}

/// The plan's run, and what the reference makes of it.
pub fn both(plan: &Plan) -> (Run, StepResult) {
    (run(plan), reference(plan, &config(plan)))
}

pub fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |m: f64, x| m.max(x.abs()))
}

/// Largest difference, relative to the largest value; NaN where something unwritten was read.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    error_beside(got, want, 0.0)
}

/// The same, relative to `least` where all values are smaller.
pub fn error_beside(got: &[f64], want: &[f64], least: f64) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = largest(want).max(least).max(1e-6);
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs());
    worst.fold(0.0, |m: f64, e| if e.is_nan() || m.is_nan() { f64::NAN } else { m.max(e) }) / scale
}

#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_close_beside(what, got, want, tolerance, 0.0);
}

#[track_caller]
fn assert_close_beside(what: &str, got: &[f64], want: &[f64], tolerance: f64, least: f64) {
    let e = error_beside(got, want, least);
    assert!(e <= tolerance, "{what}: error {e:.3e} exceeds {tolerance:.0e}, values to {:.1e}", largest(want));
}

/// Hidden states and every gradient are the reference's, gradients relative to `least` at least.
#[track_caller]
pub fn near(got: &Run, want: &StepResult, tolerance: f64, least: f64) {
    assert_eq!(got.hidden.len(), want.hidden.len());
    for (i, (got, want)) in got.hidden.iter().zip(&want.hidden).enumerate() {
        assert_close(&format!("hidden states of sequence {i}"), got, want, tolerance);
    }
    assert_eq!(got.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, want) in &want.grads {
        assert_close_beside(&format!("gradient of {name}"), &got.grads[name], want, tolerance, least);
    }
}

/// Runs the plan: loss, hidden states and every gradient are the reference's, where the tolerance is one of f64 the new
/// weights too; bytes sent and peaks of memory are the plan's.
#[track_caller]
pub fn holds(plan: &Plan, tolerance: f64) -> Run {
    holds_beside(plan, tolerance, |_| 0.0)
}

/// The same, gradients relative to at least what `least` makes of the reference's.
#[track_caller]
pub fn holds_beside(plan: &Plan, tolerance: f64, least: impl Fn(&StepResult) -> f64) -> Run {
    let (got, want) = both(plan);
    assert_close("loss", &[got.loss], &[want.loss], tolerance);
    near(&got, &want, tolerance, least(&want));
    if tolerance < 1e-6 {
        assert_eq!(got.weights.keys().collect::<Vec<_>>(), want.new_params.keys().collect::<Vec<_>>());
        // Adam divides a gradient by its size and 1e-8: of one that is nothing but rounding, as a key's bias has it, more is left.
        for (name, want) in &want.new_params {
            assert_close(name, &got.weights[name], want, 1e-9);
        }
    }
    counted(plan, &got);
    got
}

/// Bytes that the transport and the allocator counted are those that the plan says.
#[track_caller]
pub fn counted(plan: &Plan, got: &Run) {
    let (sent, peaks) = planned(plan);
    assert_eq!(got.sent_bytes, sent, "{:?}: bytes counted in the transport, and planned", plan.about.par);
    assert_eq!(got.peak_bytes, peaks, "{:?}: bytes counted at the allocator, and planned", plan.about.par);
}

/// Bytes that every rank sends, and its peak of memory, as the plan says.
pub fn planned(plan: &Plan) -> (Vec<u64>, Vec<u64>) {
    let atoms = AtomTable::new(plan).unwrap();
    let programs = 0..plan.programs.len() as u32;
    let lines: Vec<Line> = programs.clone().map(|p| Line::program(plan, &atoms, p).unwrap()).collect();
    let peaks: Vec<u64> = programs.map(|p| Layout::new(plan, &atoms, p).unwrap().bytes).collect();
    let of = |rank: u32| plan.program_of(rank) as usize;
    (0..plan.ranks()).map(|rank| (sent_by(plan, &lines[of(rank)], rank), peaks[of(rank)])).unzip()
}
