//! What a library that exchanges rows asks of a machine: GPUs that it exists for, limits that it keeps, and memory that it
//! sets aside on every rank, outside the tensors of a plan.

use super::{Buffers, ExchangeAlgo, buffers};
use crate::cluster::Cluster;
use crate::error::{Cause, Result};
use crate::plan::Wire;
use crate::plan::route::{Phase, Route, of_tokens};
use crate::plan::{OpKind, Plan};
use crate::spec::{Architecture, Transport};

/// Memory of a rank that a library has for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aside {
    /// Name of the library; empty where there is none.
    pub library: &'static str,
    pub buffers: Buffers,
}

/// The memory that one rank sets aside for exchanges of `hidden` columns, `row_bytes` on the wire of a dispatch.
/// Errors: the library would stop, or does not exist for the cluster; with the remedy.
pub fn aside(route: &Route, algo: ExchangeAlgo, hidden: u64, row_bytes: u64, cluster: &Cluster) -> Result<Aside> {
    runs_on(algo, cluster, route.nodes())?;
    let buffers = buffers(route, algo, hidden, row_bytes)?;
    Ok(Aside { library: name(algo).unwrap_or_default(), buffers })
}

/// The memory set aside for all exchanges of a plan, which share one buffer: that of the largest. On CPUs this program
/// carries rows itself, and sets nothing aside. Errors: those of [`aside`].
pub fn aside_of_plan(plan: &Plan, cluster: &Cluster) -> Result<Aside> {
    let mut most = Aside::default();
    if cluster.gpu.architecture == Architecture::Cpu {
        return Ok(most);
    }
    for (algo, wire) in dispatches(plan) {
        let model = plan.model()?;
        let hidden = model.moe.map_or(model.hidden, |moe| moe.width(model.hidden));
        for route in of_tokens(&plan.routes) {
            let one = aside(route, algo, hidden, wire.row_bytes(hidden), cluster)?;
            most = if one.buffers.total() > most.buffers.total() { one } else { most };
        }
    }
    Ok(most)
}

/// The algorithms, and the formats on the wire, by which a plan's dispatches are sent; each combination once.
fn dispatches(plan: &Plan) -> Vec<(ExchangeAlgo, Wire)> {
    let mut all = vec![];
    for (_, op) in plan.ops() {
        let OpKind::Exchange { algo, phase, wire, .. } = &op.kind else { continue };
        let way = (*algo, *wire);
        if name(*algo).is_some() && *phase != Phase::Combine && !all.contains(&way) {
            all.push(way);
        }
    }
    all
}

/// The library that has buffers of its own; `None` where the framework's tensors are all.
fn name(algo: ExchangeAlgo) -> Option<&'static str> {
    match algo {
        ExchangeAlgo::Nccl | ExchangeAlgo::AllGather | ExchangeAlgo::Broadcast | ExchangeAlgo::Hierarchical => None,
        ExchangeAlgo::DeepepNormal { .. } => Some("DeepEP V1"),
        ExchangeAlgo::DeepepLowLatency { .. } => Some("DeepEP low latency"),
        ExchangeAlgo::DeepepV2Hybrid { .. } | ExchangeAlgo::DeepepV2Direct { .. } => Some("DeepEP V2"),
        ExchangeAlgo::HybridEp { .. } => Some("Hybrid-EP"),
    }
}

/// Checks that the library's kernels exist for a cluster, where the ranks are on `nodes` nodes. All of them move rows
/// inside nodes by NVLink. DeepEP V1 has kernels for Ampere that stay in a node and have no low latency (its setup.py
/// leaves the others out where SM90 is disabled); V2 and Hybrid-EP copy by TMA, which Hopper was the first to have.
/// Between nodes Hybrid-EP's GPUs post to the NIC themselves, which EFA has no way for. Errors: they do not exist
/// there.
pub fn runs_on(algo: ExchangeAlgo, cluster: &Cluster, nodes: u32) -> Result<()> {
    let (Some(name), gpu, spec) = (name(algo), &cluster.gpu, &cluster.spec) else { return Ok(()) };
    let fits = match gpu.architecture {
        Architecture::Hopper | Architecture::Blackwell => true,
        Architecture::Ampere | Architecture::Ada => matches!(algo, ExchangeAlgo::DeepepNormal { .. }),
        _ => false,
    };
    let hybrid = matches!(algo, ExchangeAlgo::HybridEp { .. });
    let efa = spec.scale_out.as_ref().is_some_and(|out| out.transport == Transport::Efa);
    let why = if !fits {
        let least = if matches!(algo, ExchangeAlgo::DeepepNormal { .. }) { "Ampere" } else { "Hopper" };
        format!("runs on NVIDIA's GPUs from {least} on, which {} is not", gpu.name)
    } else if spec.scale_up.sockets.is_some() {
        format!("moves rows inside nodes by NVLink, which {} does not have", spec.name)
    } else if !matches!(gpu.architecture, Architecture::Hopper | Architecture::Blackwell) && nodes > 1 {
        format!("stays in one node on GPUs before Hopper, and these ranks are on {nodes} of {}", gpu.name)
    } else if hybrid && efa && nodes > 1 {
        format!("has GPUs post to their NICs, for which {} over EFA has no way", spec.name)
    } else {
        return Ok(());
    };
    Err(Cause::Dispatch.infeasible(format!("{name} {why}; use nccl, allgather or hierarchical")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::route::Counts;
    use crate::spec::{ClusterSpec, GpuSpec};

    /// Two nodes of DGX H100 with other GPUs.
    fn with(gpu: &str) -> Cluster {
        let spec = ClusterSpec { gpu: gpu.into(), ..ClusterSpec::find("dgx-h100").unwrap() };
        Cluster::new(&spec, &GpuSpec::find(gpu).unwrap(), 16).unwrap()
    }

    #[test]
    fn libraries_exist_for_the_gpus_that_their_makers_name() {
        let v1 = [ExchangeAlgo::DeepepNormal { sms: 20 }, ExchangeAlgo::DeepepLowLatency { hook: false, slots: 128 }];
        let by_tma = [ExchangeAlgo::HybridEp { sms: 16 }, ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) }];
        for name in ["tpu-v5p", "gaudi2", "ascend910b", "v100-sxm2-32gb", "t4", "mi300x"] {
            for algo in v1.into_iter().chain(by_tma) {
                let why = runs_on(algo, &with(name), 1).unwrap_err().to_string();
                assert!(why.contains(name) && why.contains("use nccl, allgather or hierarchical"), "{why}");
            }
            assert!(runs_on(ExchangeAlgo::Nccl, &with(name), 2).is_ok());
        }
        let a100 = with("a100-sxm4-80gb");
        let refused = |algo, cluster: &Cluster, nodes| runs_on(algo, cluster, nodes).unwrap_err().to_string();
        assert!(runs_on(v1[0], &a100, 1).is_ok());
        assert!(refused(v1[0], &a100, 2).contains("stays in one node on GPUs before Hopper"));
        for algo in [v1[1], by_tma[0]] {
            assert!(refused(algo, &a100, 1).contains("runs on NVIDIA's GPUs from Hopper on"));
        }
        assert!(v1.iter().chain(&by_tma).all(|algo| runs_on(*algo, &with("b200-sxm"), 2).is_ok()));
        assert!(
            v1.iter()
                .chain(&by_tma)
                .all(|algo| refused(*algo, &Cluster::shipped("h100-pcie", 8), 1).contains("by NVLink"))
        );
        let efa = Cluster::shipped("h100-8x400-efa", 16);
        assert!(v1.iter().all(|algo| runs_on(*algo, &efa, 2).is_ok()) && runs_on(by_tma[0], &efa, 1).is_ok());
        assert!(refused(by_tma[0], &efa, 2).contains("over EFA"));
    }

    #[test]
    fn what_a_library_sets_aside_bears_its_name() {
        let route = Route::new([16, 8], 256, 8, Counts::Balanced { tokens: 4096 }).unwrap();
        let of = |algo| aside(&route, algo, 7168, 14336, &with("h100-sxm5")).unwrap();
        let v2 = of(ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) });
        assert_eq!((v2.library, v2.buffers.total()), ("DeepEP V2", 1_218_445_312));
        assert_eq!(of(ExchangeAlgo::Nccl), Aside::default());
    }
}
