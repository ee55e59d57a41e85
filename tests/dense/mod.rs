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
const SEED: u64 = 7;

/// The plan's model and documents, its tokens choosing the experts that the plan's routes say.
pub fn config(plan: &Plan) -> DenseConfig {
    let cfg = DenseConfig::from(plan.model().expect("a step has a model"));
    let experts = cfg.experts.clone().map(|e| Experts { choices: routing::choices(plan), ..e });
    let documents = plan.about.documents.lengths().into_iter().map(|n| n as usize).collect();
    DenseConfig { experts, documents, muon: muon::pieces(plan), ..cfg }
}

pub fn reference(plan: &Plan, cfg: &DenseConfig) -> StepResult {
    let (tokens, targets) = Source::seeded(SEED).batch(plan, 1);
    step(cfg, &Source::seeded(SEED).weights(plan), &tokens, &targets, &plan.optimizer().expect("a step ends with Adam"))
}

/// So many steps of the plan on two cores, each with everything that it computed.
pub fn runs(plan: &Plan, source: &Source, steps: u64) -> Vec<Run> {
    let options = Options::new(5, (0..plan.ranks()).map(|r| r % 2).collect(), true);
    let mut all = vec![];
    let job = Job { source, steps, keep_last: true, watch: None };
    let mut keep = |_, run| {
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

/// The plan on two cores, with everything that it computed.
pub fn run(plan: &Plan) -> Run {
    let devices = (0..plan.ranks()).map(|r| r % 2).collect();
    execute(plan, &Options::new(SEED, devices, true)).expect("the plan runs")
}

/// Largest difference, relative to the largest value; NaN where something unwritten was read.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-6, |m: f64, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs());
    worst.fold(0.0, |m: f64, e| if e.is_nan() || m.is_nan() { f64::NAN } else { m.max(e) }) / scale
}

#[track_caller]
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let e = error(got, want);
    assert!(e <= tolerance, "{what}: error {e:.3e} exceeds {tolerance:.0e}");
}

/// Runs the plan: loss, hidden states and every gradient are the reference's, where the tolerance is one of f64 the new
/// weights too; bytes sent and peaks of memory are the plan's.
#[track_caller]
pub fn holds(plan: &Plan, tolerance: f64) -> Run {
    let (got, want) = (run(plan), reference(plan, &config(plan)));
    assert_close("loss", &[got.loss], &[want.loss], tolerance);
    for (got, want) in got.hidden.iter().zip(&want.hidden) {
        assert_close("hidden states", got, want, tolerance);
    }
    assert_eq!(got.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, want) in &want.grads {
        assert_close(name, &got.grads[name], want, tolerance);
    }
    if tolerance < 1e-6 {
        for (name, want) in &want.new_params {
            assert_close(name, &got.weights[name], want, 1e-7);
        }
    }
    counted(plan, &got);
    got
}

/// Bytes that the transport and the allocator counted are those that the plan says.
#[track_caller]
fn counted(plan: &Plan, got: &Run) {
    let atoms = AtomTable::new(plan).unwrap();
    let programs = 0..plan.programs.len() as u32;
    let lines: Vec<Line> = programs.clone().map(|p| Line::program(plan, &atoms, p).unwrap()).collect();
    let of = |rank: u32| plan.program_of(rank) as usize;
    let planned: Vec<u64> = (0..plan.ranks()).map(|rank| sent_by(plan, &lines[of(rank)], rank)).collect();
    assert_eq!(got.sent_bytes, planned, "bytes counted in the transport, and planned");
    let layouts: Vec<Layout> = programs.map(|p| Layout::new(plan, &atoms, p).unwrap()).collect();
    let planned: Vec<u64> = (0..plan.ranks()).map(|rank| layouts[of(rank)].bytes).collect();
    assert_eq!(got.peak_bytes, planned, "bytes counted at the allocator, and planned");
}
