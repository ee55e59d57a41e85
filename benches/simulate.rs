//! How fast a step is played event by event: folded against every rank on its own, and at scale.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use foretrain::cluster::Cluster;
use foretrain::device::Roofline;
use foretrain::plan::{Engine, Plan};
use foretrain::sim::{Effort, Fault, Machine, simulate};
use foretrain::spec::*;
use foretrain::strategy::{Engines, build};
use std::time::Duration;

struct Case {
    name: &'static str,
    model: &'static str,
    cluster: &'static str,
    stack: &'static str,
    par: Parallelism,
    seq_len: u64,
    /// Microbatches.
    batches: u64,
    faults: Vec<Fault>,
    /// Every rank on its own, too: what folding spares.
    each: bool,
}

fn cases() -> [Case; 4] {
    let way = |pp, vp, dp, tp| Parallelism { pp, vp, dp, tp, zero: 1, ..Parallelism::default() };
    let wrong = vec![Fault::slow_gpu("5:1.1").unwrap(), Fault::slow_link("4097:0.5").unwrap()];
    [
        // As ASTRA-sim, SimAI and SimuMax were timed: 64 GPUs, 64 microbatches.
        Case {
            name: "64x64",
            model: "llama-3-8b",
            cluster: "dgx-h100",
            stack: "nccl-fa3",
            par: way(8, 1, 8, 1),
            seq_len: 8192,
            batches: 64,
            faults: vec![],
            each: true,
        },
        // MegaScale's largest run.
        Case {
            name: "megascale-12288",
            model: "megascale-175b",
            cluster: "a100-8x200-12k",
            stack: "nccl-fa2",
            par: way(8, 6, 192, 8),
            seq_len: 2048,
            batches: 32,
            faults: vec![],
            each: false,
        },
        // Stages of a pod and a third of Llama 3's cluster: replicas and stages meet on the uplinks of the pods.
        Case {
            name: "24k-shared-core",
            model: "llama-3.1-405b",
            cluster: "h100-24k-roce",
            stack: "nccl-fa3",
            par: way(6, 1, 512, 8),
            seq_len: 8192,
            batches: 16,
            faults: vec![],
            each: false,
        },
        // 100,352 GPUs, one straggler and one link at half its speed.
        Case {
            name: "100k-two-faults",
            model: "llama-3.1-405b",
            cluster: "h100-100k",
            stack: "nccl-fa3",
            par: way(14, 1, 896, 8),
            seq_len: 8192,
            batches: 16,
            faults: wrong,
            each: false,
        },
    ]
}

fn plan(case: &Case) -> Plan {
    let work = Workload {
        seq_len: case.seq_len,
        global_batch: case.batches * u64::from(case.par.dp),
        micro_batch: 1,
        dtype: Dtype::Bf16,
        documents: Default::default(),
    };
    let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 24 } };
    build(&LlmSpec::find(case.model).unwrap(), &work, &case.par, engines).unwrap()
}

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("simulate");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(5));
    for case in cases() {
        let (plan, spec) = (plan(&case), ClusterSpec::find(case.cluster).unwrap());
        let (gpu, stack) = (GpuSpec::find(&spec.gpu).unwrap(), StackSpec::find(case.stack).unwrap());
        let cluster = Cluster::new(&spec, &gpu, plan.ranks()).unwrap();
        let kernels = Roofline::new(&gpu, &stack).unwrap();
        let machine = Machine { cluster: &cluster, stack: &stack, kernels: &kernels, devices: None };
        let run = |fold| simulate(&plan, machine, &case.faults, Effort { fold, ..Effort::SUMS }).unwrap();
        let found = run(true);
        eprintln!("{}: {} events of {} classes", case.name, found.events, found.timeline.classes.len());
        group.throughput(Throughput::Elements(found.events));
        group.bench_function(format!("{}/folded", case.name), |b| b.iter(|| run(true)));
        if case.each {
            group.bench_function(format!("{}/each", case.name), |b| b.iter(|| run(false)));
        }
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
