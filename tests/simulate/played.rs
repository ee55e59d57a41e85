//! Plans, and the machines that they are played on.

use crate::plans::{self, COPY, Host, SM, model, way, work};
use foretrain::cluster::Cluster;
use foretrain::plan::*;
use foretrain::sim::{Effort, Fault, Simulated, simulate};
use foretrain::spec::*;

pub fn sim(plan: &Plan, host: &Host, fold: bool) -> Simulated {
    with(plan, host, fold, &[])
}

pub fn with(plan: &Plan, host: &Host, fold: bool, faults: &[Fault]) -> Simulated {
    simulate(plan, host.machine(), faults, Effort { fold, ..Effort::SUMS }).unwrap()
}

pub fn step(found: &Simulated) -> f64 {
    found.timeline.step.value()
}

/// Two nodes of eight; rings and Ulysses inside, replicas across.
pub fn two_nodes() -> (Plan, Host) {
    let par = way(4, 2, 2);
    let plan = plans::plan(&model(4, 4, false), &par, &work(&par, 4096, 1, 2), SM);
    let host = Host::new(16, 8, 1.0);
    (plan, host)
}

/// Four stages, six microbatches.
pub fn pipeline() -> (Plan, Host) {
    let par = Parallelism { pp: 4, zero: 0, ..Parallelism::default() };
    let plan = plans::plan(&model(8, 4, false), &par, &work(&par, 960, 1, 6), COPY);
    let host = Host::of(&plan, 1.0);
    (plan, host)
}

/// Layers large enough for their gradients to fill a network.
pub fn large(layers: u64) -> LlmSpec {
    LlmSpec { layers, ..LlmSpec::find("llama-3-8b").unwrap() }
}

/// Nodes of eight, after a change of their cluster.
pub fn host(plan: &Plan, change: &dyn Fn(&mut ClusterSpec)) -> Host {
    let host = Host::new(plan.ranks(), 8, 4.0);
    let mut spec = host.cluster.spec.clone();
    change(&mut spec);
    let cluster = Cluster::new(&spec, &host.cluster.gpu, plan.ranks()).unwrap();
    Host { cluster, ..host }
}
