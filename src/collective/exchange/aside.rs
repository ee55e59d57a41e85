//! What a library that exchanges rows asks of a machine: GPUs that it exists for, limits that it keeps, and memory that it
//! sets aside on every rank, outside the tensors of a plan.

use super::{Buffers, ExchangeAlgo, buffers};
use crate::error::{Error, Result};
use crate::plan::route::{Phase, Route, Wire, of_tokens};
use crate::plan::{OpKind, Plan};
use crate::spec::{Architecture, GpuSpec};

/// Memory of a rank that a library has for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aside {
    /// Empty where there is none.
    pub library: &'static str,
    pub buffers: Buffers,
}

/// What one rank sets aside for exchanges of `hidden` columns, `row_bytes` on the wire of a dispatch; an error with the
/// remedy where the library would stop, or does not exist for the GPU.
pub fn aside(route: &Route, algo: ExchangeAlgo, hidden: u64, row_bytes: u64, gpu: &GpuSpec) -> Result<Aside> {
    runs_on(algo, gpu)?;
    let buffers = buffers(route, algo, hidden, row_bytes)?;
    Ok(Aside { library: name(algo).unwrap_or_default(), buffers })
}

/// The same of all exchanges of a plan, which share one buffer: of the largest. On CPUs this program carries rows itself.
pub fn aside_of_plan(plan: &Plan, gpu: &GpuSpec) -> Result<Aside> {
    let mut most = Aside::default();
    if gpu.architecture == Architecture::Cpu {
        return Ok(most);
    }
    for (algo, wire) in dispatches(plan) {
        let model = plan.model()?;
        let hidden = model.moe.map_or(model.hidden, |moe| moe.width(model.hidden));
        for route in of_tokens(&plan.routes) {
            let one = aside(route, algo, hidden, wire.row_bytes(hidden), gpu)?;
            most = if one.buffers.total() > most.buffers.total() { one } else { most };
        }
    }
    Ok(most)
}

/// How rows of a plan are sent by a library of its own; each way once.
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

/// The library that has buffers of its own; none where the framework's tensors are all.
fn name(algo: ExchangeAlgo) -> Option<&'static str> {
    match algo {
        ExchangeAlgo::Nccl | ExchangeAlgo::AllGather | ExchangeAlgo::Broadcast | ExchangeAlgo::Hierarchical => None,
        ExchangeAlgo::DeepepNormal { .. } => Some("DeepEP V1"),
        ExchangeAlgo::DeepepLowLatency { .. } => Some("DeepEP low latency"),
        ExchangeAlgo::DeepepV2Hybrid { .. } | ExchangeAlgo::DeepepV2Direct { .. } => Some("DeepEP V2"),
        ExchangeAlgo::HybridEp { .. } => Some("Hybrid-EP"),
    }
}

/// Whether the library's kernels exist for a GPU. DeepEP V1 wants Ampere (README.md, requirements); V2 and Hybrid-EP copy
/// by TMA, which Hopper was the first to have.
pub fn runs_on(algo: ExchangeAlgo, gpu: &GpuSpec) -> Result<()> {
    let Some(name) = name(algo) else { return Ok(()) };
    let old = matches!(algo, ExchangeAlgo::DeepepNormal { .. } | ExchangeAlgo::DeepepLowLatency { .. });
    let fits = match gpu.architecture {
        Architecture::Hopper | Architecture::Blackwell => true,
        Architecture::Ampere | Architecture::Ada => old,
        _ => false,
    };
    if fits {
        return Ok(());
    }
    let least = if old { "Ampere" } else { "Hopper" };
    let why = format!(
        "dispatch: {name} runs on NVIDIA's GPUs from {least} on, which {} is not; use nccl, allgather or hierarchical",
        gpu.name
    );
    Err(Error::infeasible(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::route::Counts;

    fn gpu(name: &str) -> GpuSpec {
        GpuSpec::find(name).unwrap()
    }

    #[test]
    fn libraries_exist_for_the_gpus_that_their_makers_name() {
        let v1 = [ExchangeAlgo::DeepepNormal { sms: 20 }, ExchangeAlgo::DeepepLowLatency { hook: false, slots: 128 }];
        let by_tma = [ExchangeAlgo::HybridEp { sms: 16 }, ExchangeAlgo::DeepepV2Hybrid { sms: 12 }];
        for name in ["tpu-v5p", "gaudi2", "ascend910b", "v100-sxm2-32gb", "t4", "mi300x"] {
            for algo in v1.into_iter().chain(by_tma) {
                let why = runs_on(algo, &gpu(name)).unwrap_err().to_string();
                assert!(why.contains(name) && why.contains("use nccl, allgather or hierarchical"), "{why}");
            }
            assert!(runs_on(ExchangeAlgo::Nccl, &gpu(name)).is_ok());
        }
        assert!(v1.iter().all(|algo| runs_on(*algo, &gpu("a100-sxm4-80gb")).is_ok()));
        let why = runs_on(by_tma[0], &gpu("a100-sxm4-80gb")).unwrap_err().to_string();
        assert!(why.contains("Hybrid-EP runs on NVIDIA's GPUs from Hopper on"), "{why}");
        assert!(v1.iter().chain(&by_tma).all(|algo| runs_on(*algo, &gpu("b200-sxm")).is_ok()));
    }

    #[test]
    fn what_a_library_sets_aside_bears_its_name() {
        let route = Route::new([16, 8], 256, 8, Counts::Balanced { tokens: 4096 }).unwrap();
        let of = |algo| aside(&route, algo, 7168, 14336, &gpu("h100-sxm5")).unwrap();
        let v2 = of(ExchangeAlgo::DeepepV2Hybrid { sms: 12 });
        assert_eq!((v2.library, v2.buffers.total()), ("DeepEP V2", 1_218_445_312));
        assert_eq!(of(ExchangeAlgo::Nccl), Aside::default());
    }
}
