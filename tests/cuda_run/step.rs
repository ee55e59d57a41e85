//! Small plans, and their steps on a double of the device, held to the dense reference.

use crate::cuda_double::Double;
use crate::dense::{SEED, assert_close, config, near, planned, reference};
use foretrain::exec::cuda::run::train_on;
use foretrain::exec::source::Source;
use foretrain::exec::{Job, Options, Run};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::{Dtype, Engine, Plan};
use foretrain::spec::{LlmSpec, MoeSpec, Parallelism, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build, build_routed};
use std::sync::LazyLock;

/// Heads 32 wide: the narrowest that the kernels of attention take.
pub fn model(layers: u64, kv_heads: u64) -> LlmSpec {
    let (heads, head_dim) = (4, 32);
    LlmSpec { hidden: 64, layers, heads, kv_heads, head_dim, ffn: 96, vocab: 64, ..LlmSpec::find("tiny").unwrap() }
}

pub const ENGINES: Engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 8 } };

pub fn none() -> Parallelism {
    Parallelism::default()
}

pub fn plan(par: Parallelism, batches: u64) -> Plan {
    let global_batch = u64::from(par.dp) * batches;
    let documents = Default::default();
    let work = Workload { seq_len: 128, global_batch, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let layers = if par.pp > 1 { 2 } else { 1 };
    build(&model(layers, 4), &work, &par, ENGINES).unwrap()
}

static MIXTRAL: LazyLock<LlmSpec> = LazyLock::new(|| LlmSpec::find("mixtral-8x7b").unwrap());

/// A mixture of experts, its tokens routed by a seed.
pub fn experts(options: &str, ep: u32) -> Plan {
    let moe = MoeSpec { experts: 4, top_k: 2, ffn: 32, shared_ffn: 0, ..MIXTRAL.moe.unwrap() };
    let model = LlmSpec { moe: Some(moe), ..model(1, 4) };
    let documents = Default::default();
    let work = Workload { seq_len: 64, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let par = Parallelism { dp: 2, ep, zero: 0, options: options.parse().unwrap(), ..none() };
    let route = Routing::Uniform { seed: 5 }.route(&model, &work, &par, 2).unwrap();
    build_routed(&model, &work, &par, ENGINES, route).unwrap()
}

pub fn options(plan: &Plan, devices: &[u32]) -> Options {
    let of = |rank: u32| devices[rank as usize % devices.len()];
    Options::new(SEED, (0..plan.ranks()).map(of).collect(), true)
}

/// Steps on a double that goes by `seed`.
pub fn steps(plan: &Plan, devices: &[u32], count: u64, seed: u64) -> Vec<Run> {
    let mut runs = vec![];
    let job = Job { source: &Source::seeded(SEED), steps: count, keep_last: false, watch: None };
    let mut double = Double::new(devices.iter().max().unwrap() + 1, 8 << 30, seed);
    train_on(&mut double, plan, &options(plan, devices), &job, &mut |_, run| {
        runs.push(run);
        Ok(())
    })
    .unwrap();
    runs
}

/// bf16 keeps 8 bits, and a gradient is behind some dozen roundings of it: 0.025 at worst, of state spaces 0.05.
const TOLERANCE: f64 = 0.06;

/// Roundings of single logits, 2^-9 each, leave next to nothing of themselves in a mean over all tokens: 2e-4 at worst.
pub const OF_A_LOSS: f64 = 0.001;

#[track_caller]
pub fn hold(plan: &Plan, devices: &[u32]) {
    let run = steps(plan, devices, 1, 1).remove(0);
    let want = reference(plan, &config(plan));
    assert_close("loss", &[run.loss], &[want.loss], OF_A_LOSS);
    near(&run, &want, TOLERANCE, 0.0);
    bytes(plan, &run);
}

/// As the plan says: what a rank's memory is, and what goes from one to another.
fn bytes(plan: &Plan, run: &Run) {
    let (sent, peaks) = planned(plan);
    // Rows of an exchange are taken from where they are, whatever their algorithm sends along.
    if plan.routes.is_empty() {
        assert_eq!(run.sent_bytes.iter().sum::<u64>(), sent.iter().sum::<u64>());
    }
    assert_eq!(run.peak_bytes, peaks);
    let atoms = AtomTable::new(plan).unwrap();
    let line = |rank| Line::program(plan, &atoms, plan.program_of(rank)).unwrap();
    for (rank, class) in run.timeline.classes.iter().enumerate() {
        assert_eq!(class.spans.len(), line(rank as u32).nodes.len());
        assert!(class.spans.iter().all(|s| s.end >= s.start && s.start.value() >= 0.0), "times go forward");
    }
}
