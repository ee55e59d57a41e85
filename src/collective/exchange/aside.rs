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
    runs_on(algo, cluster, route)?;
    let buffers = buffers(route, algo, hidden, row_bytes)?;
    Ok(Aside { library: name(algo).unwrap_or_default(), buffers })
}

/// Tokens of a rank from which on DeepEP's README advises against low latency.
const MANY_TOKENS: u32 = 256;
/// Entries of its queues where the environment says nothing, of which it wants two for each token and two more
/// (deep_ep/buffer.py, `nvshmem_qp_depth`).
const QUEUE: u32 = 1024;

/// That an exchange is of more than its library is made for; `None` where it is not.
pub fn unmeant(algo: ExchangeAlgo) -> Option<String> {
    let ExchangeAlgo::DeepepLowLatency { slots, .. } = algo else { return None };
    let depth = 2 * (u64::from(slots) + 1);
    let stops = match depth > u64::from(QUEUE) {
        true => format!(", and it stops unless NVSHMEM_QP_DEPTH is {depth} or more ({QUEUE} where nothing is said)"),
        false => String::new(),
    };
    (slots >= MANY_TOKENS).then(|| {
        format!(
            "dispatch: {slots} tokens a rank, where DeepEP's README recommends fewer than {MANY_TOKENS} for low latency: buffers have \
             room for all tokens of every rank in each slot{stops}"
        )
    })
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

/// Checks that the library's kernels exist for a cluster, and for the ranks of a route on its nodes. All of them move
/// rows inside nodes by NVLink. DeepEP V1 has kernels for Ampere that stay in a node and have no low latency (its setup.py
/// leaves the others out where SM90 is disabled); V2 and Hybrid-EP copy by TMA, which Hopper was the first to have.
/// Between nodes Hybrid-EP's GPUs post to the NIC themselves, which EFA has no way for. Errors: they do not exist
/// there.
pub fn runs_on(algo: ExchangeAlgo, cluster: &Cluster, route: &Route) -> Result<()> {
    let (Some(name), gpu, spec, nodes) = (name(algo), &cluster.gpu, &cluster.spec, route.nodes()) else {
        return Ok(());
    };
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
        return of_ranks(algo, name, route);
    };
    Err(Cause::Dispatch.infeasible(format!("{name} {why}; use nccl, allgather or hierarchical")))
}

/// Ranks of DeepEP V1 that share links, where they do not go over nodes of eight (csrc/kernels/launch.cuh, `SWITCH_RANKS`;
/// csrc/kernels/configs.cuh, `NUM_MAX_NVL_PEERS`).
const V1_PEERS: [u32; 3] = [2, 4, 8];
/// Such nodes (`SWITCH_RDMA_RANKS`; deep_ep/buffer.py, `get_dispatch_config`).
const V1_NODES: [u32; 9] = [2, 3, 4, 6, 8, 12, 16, 18, 20];
const V1_NODE: u32 = 8;

/// Checks that DeepEP V1 is compiled for the ranks of a route. Its branches for NVL72 (its issues 392 and 579) are no
/// release. Errors: it is not; a hook where SMs copy all rows themselves, as low latency does to whoever shares links
/// (csrc/kernels/internode_ll.cu, `nvshmemi_get_p2p_ptr`).
fn of_ranks(algo: ExchangeAlgo, name: &str, route: &Route) -> Result<()> {
    let (ranks, node, nodes) = (route.ranks, route.node, route.nodes());
    let refuse = |why: String| Err(Cause::Dispatch.infeasible(format!("{name} {why}")));
    match algo {
        ExchangeAlgo::DeepepNormal { .. } => {
            let (one, several) = (nodes == 1 && V1_PEERS.contains(&node), node == V1_NODE && V1_NODES.contains(&nodes));
            if one || several {
                return Ok(());
            }
            let here =
                if nodes == 1 { format!("{ranks} on one") } else { format!("{ranks} on {nodes} nodes of {node}") };
            let many = V1_NODES.map(|n| n.to_string()).join(", ");
            refuse(format!(
                "has kernels for 2, 4 or 8 ranks of a node or {many} nodes of {V1_NODE}, not for {here}; use deepep-v2, hybrid-ep \
                 or nccl"
            ))
        }
        ExchangeAlgo::DeepepLowLatency { hook, .. } => {
            if ranks > V1_NODE && !ranks.is_multiple_of(V1_NODE) {
                return refuse(format!(
                    "takes up to {V1_NODE} ranks or a multiple, not {ranks}; use deepep-v2 or nccl"
                ));
            }
            match hook && nodes == 1 {
                true => refuse("copies rows inside a node by SMs, with the hook or without; leave the hook out".into()),
                false => Ok(()),
            }
        }
        _ => Ok(()),
    }
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

    fn route([ranks, node]: [u32; 2]) -> Route {
        Route::new([ranks, node], 40 * ranks, 8, Counts::Balanced { tokens: 128 }).unwrap()
    }

    /// Launchers have cases for so many ranks of a node and so many nodes of eight, and no others.
    #[test]
    fn deepep_v1_has_kernels_for_some_numbers_of_ranks() {
        let h100 = with("h100-sxm5");
        let why = |algo, shape| runs_on(algo, &h100, &route(shape)).err().map(|e| e.to_string());
        let normal = ExchangeAlgo::DeepepNormal { sms: 20 };
        for shape in [[2, 2], [4, 4], [8, 8], [16, 8], [24, 8], [32, 8], [48, 8], [64, 8], [96, 8], [128, 8], [160, 8]]
        {
            assert_eq!(why(normal, shape), None);
        }
        for (shape, here) in [
            ([5, 5], "5 on one"),
            ([6, 6], "6 on one"),
            ([64, 64], "64 on one"),
            ([16, 4], "16 on 4 nodes of 4"),
            ([40, 8], "40 on 5 nodes of 8"),
            ([256, 8], "256 on 32 nodes of 8"),
        ] {
            let said = why(normal, shape).unwrap();
            assert!(said.contains(&format!("not for {here}; use deepep-v2, hybrid-ep or nccl")), "{said}");
            assert_eq!(why(ExchangeAlgo::DeepepV2Hybrid { sms: None }, shape), None);
        }
        let low_latency = |hook| ExchangeAlgo::DeepepLowLatency { hook, slots: 128 };
        assert_eq!([[6, 6], [8, 8], [320, 8]].map(|shape| why(low_latency(false), shape)), [None, None, None]);
        assert!(why(low_latency(false), [12, 4]).unwrap().contains("up to 8 ranks or a multiple, not 12"));
        assert_eq!(why(low_latency(true), [16, 8]), None);
        assert!(why(low_latency(true), [8, 8]).unwrap().contains("by SMs, with the hook or without"));
    }

    #[test]
    fn libraries_exist_for_the_gpus_that_their_makers_name() {
        let [one, two] = [[8, 8], [16, 8]].map(route);
        let v1 = [ExchangeAlgo::DeepepNormal { sms: 20 }, ExchangeAlgo::DeepepLowLatency { hook: false, slots: 128 }];
        let by_tma = [ExchangeAlgo::HybridEp { sms: 16 }, ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) }];
        for name in ["tpu-v5p", "gaudi2", "ascend910b", "v100-sxm2-32gb", "t4", "mi300x"] {
            for algo in v1.into_iter().chain(by_tma) {
                let why = runs_on(algo, &with(name), &one).unwrap_err().to_string();
                assert!(why.contains(name) && why.contains("use nccl, allgather or hierarchical"), "{why}");
            }
            assert!(runs_on(ExchangeAlgo::Nccl, &with(name), &two).is_ok());
        }
        let a100 = with("a100-sxm4-80gb");
        let refused = |algo, cluster: &Cluster, route| runs_on(algo, cluster, route).unwrap_err().to_string();
        assert!(runs_on(v1[0], &a100, &one).is_ok());
        assert!(refused(v1[0], &a100, &two).contains("stays in one node on GPUs before Hopper"));
        for algo in [v1[1], by_tma[0]] {
            assert!(refused(algo, &a100, &one).contains("runs on NVIDIA's GPUs from Hopper on"));
        }
        assert!(v1.iter().chain(&by_tma).all(|algo| runs_on(*algo, &with("b200-sxm"), &two).is_ok()));
        assert!(
            v1.iter()
                .chain(&by_tma)
                .all(|algo| refused(*algo, &Cluster::shipped("h100-pcie", 8), &one).contains("by NVLink"))
        );
        let efa = Cluster::shipped("h100-8x400-efa", 16);
        assert!(v1.iter().all(|algo| runs_on(*algo, &efa, &two).is_ok()) && runs_on(by_tma[0], &efa, &one).is_ok());
        assert!(refused(by_tma[0], &efa, &two).contains("over EFA"));
    }

    #[test]
    fn more_tokens_than_low_latency_is_made_for_are_told_of() {
        let said = |slots| unmeant(ExchangeAlgo::DeepepLowLatency { hook: false, slots });
        assert!(said(255).is_none() && unmeant(ExchangeAlgo::DeepepNormal { sms: 20 }).is_none());
        // Of 511 tokens two entries each, and two more, are all of the queue.
        assert!(!said(511).unwrap().contains("stops"));
        assert!(
            said(512)
                .unwrap()
                .contains("it stops unless NVSHMEM_QP_DEPTH is 1026 or more (1024 where nothing is said)")
        );
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
