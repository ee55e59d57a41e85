//! How fast a configuration is built, checked, laid out and costed.
//!
//! Throughput is in linked ops: those of the program with every call spliced, times ranks. `flat` walks every
//! one of them and is the baseline; `cost` gives the same answer by folding and strides, and `sizes` and `frame`
//! once more what a sweep does for every further configuration of a way, whose structure it knows.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use foretrain::cluster::Cluster;
use foretrain::cost::{Effort, Frame, Machine, cost, cost_on};
use foretrain::device::Roofline;
use foretrain::fold;
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::Layout;
use foretrain::plan::{Engine, Plan, check::check};
use foretrain::spec::*;
use foretrain::strategy::{Engines, build, sizes};
use std::time::Duration;

const FLAT: Effort = Effort { fold: false, stride: false, spans: false };

struct Case {
    name: &'static str,
    par: Parallelism,
    seq_len: u64,
    /// Microbatches.
    batches: u64,
    /// Walked flat, too.
    flat: bool,
}

fn cases() -> [Case; 5] {
    let way =
        |dp, ring, ulysses, recompute| Parallelism { dp, ring, ulysses, zero: 1, recompute, ..Parallelism::default() };
    [
        Case { name: "ring8", par: way(8, 8, 1, Recompute::None), seq_len: 65536, batches: 8, flat: true },
        Case { name: "ulysses8", par: way(8, 1, 8, Recompute::Full), seq_len: 65536, batches: 8, flat: true },
        Case { name: "usp2x8", par: way(4, 2, 8, Recompute::None), seq_len: 131072, batches: 8, flat: false },
        Case { name: "ring64", par: way(1, 64, 1, Recompute::Full), seq_len: 1 << 20, batches: 1, flat: false },
        Case { name: "ring64x16", par: way(1, 64, 1, Recompute::Full), seq_len: 1 << 18, batches: 16, flat: false },
    ]
}

const ENGINES: Engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 24 } };

fn work(case: &Case) -> (LlmSpec, Workload) {
    let work = Workload {
        seq_len: case.seq_len,
        global_batch: case.batches * u64::from(case.par.dp),
        micro_batch: 1,
        dtype: Dtype::Bf16,
        documents: Default::default(),
    };
    (LlmSpec::find("llama-3-8b").unwrap(), work)
}

fn plan(case: &Case) -> Plan {
    let (model, work) = work(case);
    build(&model, &work, &case.par, ENGINES).unwrap()
}

fn configurations(c: &mut Criterion) {
    let gpu = GpuSpec::find("h100-sxm5").unwrap();
    let cluster = Cluster::new(&ClusterSpec::find("dgx-h100").unwrap(), &gpu, 64).unwrap();
    let stack = StackSpec::find("nccl-fa3").unwrap();
    let kernels = Roofline::new(&gpu, &stack).unwrap();
    let machine = Machine { cluster: &cluster, stack: &stack, kernels: &kernels, devices: None };
    let mut group = c.benchmark_group("configuration");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for case in &cases() {
        let plan = plan(case);
        let atoms = AtomTable::new(&plan).unwrap();
        let ops = Line::program(&plan, &atoms, 0).unwrap().nodes.len() as u64;
        group.throughput(Throughput::Elements(ops * u64::from(plan.ranks())));
        let mut bench = |what: &str, run: &mut dyn FnMut()| {
            group.bench_function(BenchmarkId::new(what, case.name), |b| b.iter(&mut *run));
        };
        bench("build", &mut || drop(self::plan(case)));
        bench("check", &mut || check(&plan).unwrap());
        bench("memory", &mut || drop(Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap()));
        let (model, work) = work(case);
        let frame = Frame::new(&plan, &atoms, machine, fold::refine(&plan, &cluster)).unwrap();
        let lean = sizes(&model, &work, &case.par, ENGINES).unwrap().plan;
        bench("sizes", &mut || drop(sizes(&model, &work, &case.par, ENGINES).unwrap()));
        bench("frame", &mut || drop(cost_on(&frame, &lean, machine).unwrap().unwrap()));
        bench("cost", &mut || drop(cost(&plan, machine, Effort::SUMS).unwrap()));
        if case.flat {
            bench("flat", &mut || drop(cost(&plan, machine, FLAT).unwrap()));
        }
    }
}

/// A step of a mixture of experts, whose rows go evenly to all of them. `flat` is the baseline: every op of every rank.
fn experts(c: &mut Criterion) {
    let gpu = GpuSpec::find("h100-sxm5").unwrap();
    let cluster = Cluster::new(&ClusterSpec::find("dgx-h100").unwrap(), &gpu, 64).unwrap();
    let stack = StackSpec::find("nccl-fa3").unwrap();
    let kernels = Roofline::new(&gpu, &stack).unwrap();
    let machine = Machine { cluster: &cluster, stack: &stack, kernels: &kernels, devices: None };
    let mut group = c.benchmark_group("experts");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for (name, model, ep, words) in [
        ("mixtral-8x7b", "mixtral-8x7b", 8, "default"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b", 64, "default"),
        ("qwen3-30b-a3b, 64 copies", "qwen3-30b-a3b", 64, "replicas-64"),
    ] {
        let options = words.parse().unwrap();
        let par = Parallelism { dp: 64, ep, zero: 1, recompute: Recompute::Full, options, ..Parallelism::default() };
        let work = Workload {
            seq_len: 4096,
            global_batch: 64,
            micro_batch: 1,
            dtype: Dtype::Bf16,
            documents: Default::default(),
        };
        let model = LlmSpec::find(model).unwrap();
        let plan = build(&model, &work, &par, ENGINES).unwrap();
        group.bench_function(BenchmarkId::new("build", name), |b| {
            b.iter(|| drop(build(&model, &work, &par, ENGINES).unwrap()));
        });
        group.bench_function(BenchmarkId::new("cost", name), |b| {
            b.iter(|| drop(cost(&plan, machine, Effort::SUMS).unwrap()));
        });
        if words == "default" {
            group.bench_function(BenchmarkId::new("flat", name), |b| {
                b.iter(|| drop(cost(&plan, machine, FLAT).unwrap()));
            });
        }
    }
}

criterion_group!(benches, configurations, experts);
criterion_main!(benches);
