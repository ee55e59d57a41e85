//! Plans and machines for tests: small models, networks from idle to choked, nodes of any width.
#![allow(dead_code)]

use foretrain::cluster::Cluster;
use foretrain::cost::{Effort, Machine};
use foretrain::device::Roofline;
use foretrain::plan::builder::Via;
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::strategy::{Engines, build};
use foretrain::timeline::{Timeline, Usage};
use foretrain::units::Seconds;
use std::collections::BTreeMap;

pub const SM: Engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 24 } };
pub const COPY: Engines = Engines { p2p: Engine::CopyEngine, collective: Engine::CopyEngine };

/// A model small enough to walk op by op, with everything a large one has.
pub fn model(layers: u64, kv_heads: u64, tie: bool) -> LlmSpec {
    LlmSpec { layers, kv_heads, tie_embeddings: tie, ..LlmSpec::find("tiny").unwrap() }
}

pub fn way(dp: u32, ring: u32, ulysses: u32) -> Parallelism {
    Parallelism { dp, ring, ulysses, zero: 1, ..Parallelism::default() }
}

/// `batches` microbatches a replica, of `micro` sequences each.
pub fn work(par: &Parallelism, seq_len: u64, micro: u64, batches: u64) -> Workload {
    let global_batch = u64::from(par.dp) * micro * batches;
    Workload { seq_len, global_batch, micro_batch: micro, dtype: Dtype::Bf16, documents: Default::default() }
}

pub fn plan(model: &LlmSpec, par: &Parallelism, work: &Workload, engines: Engines) -> Plan {
    let plan = build(model, work, par, engines).unwrap();
    check::check(&plan).unwrap();
    plan
}

/// Two ranks of a ring, and a program of their own: `write` has the communicator by which they pass things on.
pub fn by_hand(write: impl FnOnce(&mut Builder, Via)) -> Plan {
    let par = way(1, 2, 1);
    let mut plan = plan(&model(1, 4, false), &par, &work(&par, 16, 1, 1), SM);
    let (mut b, group) = (Builder::new(), Group::axes(&[Axis::Cp]));
    write(&mut b, Via { group: &group, index: 0, engine: Engine::CopyEngine });
    plan.programs = vec![Program { name: "hand".into(), ops: b.finish() }];
    (plan.lanes, plan.tensors, plan.blocks) = (b.lanes, b.tensors, b.blocks);
    plan
}

/// What [`Machine`] borrows.
pub struct Host {
    pub cluster: Cluster,
    pub stack: StackSpec,
    pub kernels: Roofline,
}

impl Host {
    /// The same with NICs, one of a rank at most, that carry no more than a send does: no channel holds one up.
    pub fn filling(self) -> Host {
        let (mut spec, ranks) = (self.cluster.spec.clone(), self.cluster.gpus());
        if let Some(out) = &mut spec.scale_out {
            (out.achieved, out.several) = (out.p2p.clone(), None);
            out.nics_per_node = out.nics_per_node.min(spec.gpus_per_node);
        }
        Host { cluster: Cluster::new(&spec, &self.cluster.gpu, ranks).unwrap(), ..self }
    }

    /// `gpus` H100s in nodes of `per_node`, links `slower` times slower than theirs.
    pub fn new(gpus: u32, per_node: u32, slower: f64) -> Host {
        let gpu = GpuSpec::find("h100-sxm5").unwrap();
        let stack = StackSpec::find("nccl-fa3").unwrap();
        let mut spec = ClusterSpec { gpus_per_node: per_node, ..ClusterSpec::find("dgx-h100").unwrap() };
        let up = &mut spec.scale_up;
        for rate in [&mut up.bandwidth, &mut up.p2p, &mut up.p2p_per_cta] {
            rate.value = rate.value * (1.0 / slower);
        }
        let out = spec.scale_out.as_mut().unwrap();
        for rate in [&mut out.raw, &mut out.achieved, &mut out.p2p] {
            rate.value = rate.value * (1.0 / slower);
        }
        let kernels = Roofline::new(&gpu, &stack).unwrap();
        Host { cluster: Cluster::new(&spec, &gpu, gpus).unwrap(), stack, kernels }
    }

    /// Nodes of 8, or one node of fewer, or of all where 8 do not divide them.
    pub fn of(plan: &Plan, slower: f64) -> Host {
        let n = plan.ranks();
        Host::new(n, if n.is_multiple_of(8) { 8 } else { n }, slower)
    }

    /// With a CPU that takes `launch` seconds to issue an op.
    pub fn issuing(mut self, launch: f64) -> Host {
        self.stack.host_launch.value = Seconds::new(launch);
        self
    }

    /// With a CPU that takes so many times as long for ops that are written in Python.
    pub fn in_python(mut self, times: u32) -> Host {
        let source = "a test".to_string();
        self.stack.forward_launches = Some(Sourced { value: times, source, provenance: Origin::Assumed });
        self
    }

    pub fn machine(&self) -> Machine<'_> {
        Machine { cluster: &self.cluster, stack: &self.stack, kernels: &self.kernels, devices: None }
    }
}

/// Pods of so many GPUs whose uplinks are `over` times narrower than their NICs.
pub fn pods(gpus: u32, over: f64, uplinks: Option<u32>) -> Vec<Pod> {
    let uplinks = uplinks.map_or(String::new(), |n| {
        format!(r#", "uplinks": {{"value": {n}, "source": "test", "provenance": "assumed"}}"#)
    });
    let over = format!(r#""oversubscription": {{"value": {over}, "source": "test", "provenance": "assumed"}}"#);
    vec![serde_json::from_str::<Pod>(&format!(r#"{{"gpus": {gpus}, {over}{uplinks}}}"#)).unwrap()]
}

/// Every op of every rank, one by one: the oracle.
pub const FLAT: Effort = Effort { fold: false, stride: false, spans: false };

pub fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-12)
}

fn same_map<K: Ord + std::fmt::Debug>(what: &str, a: &BTreeMap<K, f64>, b: &BTreeMap<K, f64>) {
    let known = |m: &BTreeMap<K, f64>, k: &K| m.get(k).copied().unwrap_or(0.0);
    for key in a.keys().chain(b.keys()) {
        assert!(close(known(a, key), known(b, key)), "{what} {key:?}: {} is not {}", known(a, key), known(b, key));
    }
}

/// All of the waiting is the same, and what it is charged to.
fn same_waits(a: &Usage, b: &Usage) {
    same_map("exposed", &a.exposed, &b.exposed);
    assert!(close(a.bubble, b.bubble), "{} of turns is not {}: {:?}, {:?}", a.bubble, b.bubble, a.exposed, b.exposed);
}

pub fn same_usage(a: &Usage, b: &Usage) {
    same_waits(a, b);
    same_map("kernel", &a.by_kernel, &b.by_kernel);
    same_map("comm", &a.comm, &b.comm);
    same_map("provenance", &a.by_provenance, &b.by_provenance);
    let sums = |u: &Usage| {
        let bytes = [u.bytes_scale_up, u.bytes_scale_out, u.bytes_host];
        [&bytes[..], &[u.compute, u.host, u.offload, u.aside, u.flops, u.sd]].concat()
    };
    assert!(sums(a).iter().zip(sums(b)).all(|(a, b)| close(*a, b)), "{:?} is not {:?}", sums(a), sums(b));
}

/// `few` has a rank of each class of ranks; `all` has them all.
pub fn same(few: &Timeline, all: &Timeline) {
    assert_eq!(few.step, all.step);
    for class in &few.classes {
        same_usage(&class.usage, &all.classes[class.rank as usize].usage);
    }
    same_usage(&few.mean(), &all.mean());
}
