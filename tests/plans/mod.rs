//! Plans and machines for tests: small models, networks from idle to choked, nodes of any width.
#![allow(dead_code)]

use foretrain::cluster::Cluster;
use foretrain::cost::Machine;
use foretrain::device::Roofline;
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::strategy::{Engines, build};

pub const SM: Engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 24 } };
pub const COPY: Engines = Engines { p2p: Engine::CopyEngine, collective: Engine::CopyEngine };

/// A model small enough to walk op by op, with everything a large one has.
pub fn model(layers: u64, kv_heads: u64, tie: bool) -> LlmSpec {
    LlmSpec { layers, kv_heads, tie_embeddings: tie, ..LlmSpec::find("tiny").unwrap() }
}

pub fn way(dp: u32, ring: u32, ulysses: u32) -> Parallelism {
    Parallelism { dp, ring, ulysses, zero: 1, recompute: Recompute::None }
}

/// `batches` microbatches a replica, of `micro` sequences each.
pub fn work(par: &Parallelism, seq_len: u64, micro: u64, batches: u64) -> Workload {
    let global_batch = u64::from(par.dp) * micro * batches;
    Workload { seq_len, global_batch, micro_batch: micro, dtype: Dtype::Bf16 }
}

pub fn plan(model: &LlmSpec, par: &Parallelism, work: &Workload, engines: Engines) -> Plan {
    let plan = build(model, work, par, engines).unwrap();
    check::check(&plan).unwrap();
    plan
}

/// What [`Machine`] borrows.
pub struct Host {
    pub cluster: Cluster,
    pub stack: StackSpec,
    pub kernels: Roofline,
}

impl Host {
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

    pub fn machine(&self) -> Machine<'_> {
        Machine { cluster: &self.cluster, stack: &self.stack, kernels: &self.kernels, devices: None }
    }
}
