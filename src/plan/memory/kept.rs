//! What a framework without fusion keeps from the forward to the backward pass beside what a plan keeps: autograd holds on
//! to whatever an operator reads for its gradient, and where a plan has one kernel, frameworks have several.
//!
//! It is told by kernel, over the bytes that the kernel writes, which are kept as long. So what a kernel writes is taken to
//! be as much larger, in every place that it has: of a layer that is run again only that one layer's.

use crate::error::Result;
use crate::plan::link::{AtomTable, Line};
use crate::plan::{OpKind, Plan, TensorId, TensorKind};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// The plan with tensors as large as they are together with what is `kept` beside them; for sizes alone.
pub fn with_kept(plan: &Plan, kept: &BTreeMap<String, f64>) -> Result<Plan> {
    let mut plan_kept = plan.clone();
    for (tensor, times) in written(plan, kept)? {
        let tensor = &mut plan_kept.tensors[tensor as usize];
        let rows = tensor.rows() as f64;
        if let Some(first) = tensor.shape.first_mut() {
            *first = (rows * (1.0 + times)).ceil() as u64;
        }
    }
    Ok(plan_kept)
}

/// What these kernels write, and the most that is kept beside each.
fn written(plan: &Plan, kept: &BTreeMap<String, f64>) -> Result<FxHashMap<TensorId, f64>> {
    let (atoms, mut all) = (AtomTable::new(plan)?, FxHashMap::default());
    for program in 0..plan.programs.len() as u32 {
        let line = Line::short(plan, &atoms, program)?;
        for (i, node) in line.nodes.iter().enumerate() {
            let OpKind::Compute { kernel, .. } = &node.op.kind else { continue };
            let Some((&times, to)) = kept.get(kernel.name()).zip(line.writes(i).first()) else { continue };
            let kind = plan.tensors[to.tensor as usize].kind;
            if matches!(kind, TensorKind::Activation | TensorKind::Workspace) {
                let most = all.entry(to.tensor).or_insert(times);
                *most = times.max(*most);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::memory::Layout;
    use crate::spec::{Dtype, LlmSpec, Parallelism, Recompute, StackSpec, Workload};
    use crate::strategy::{Engines, build};

    /// Bytes of one rank, without and with what is kept.
    fn bytes(recompute: Recompute, kept: &[(&str, f64)]) -> [u64; 2] {
        let model = LlmSpec { layers: 8, ..LlmSpec::find("llama-3-8b").unwrap() };
        let (dtype, documents) = (Dtype::Bf16, Default::default());
        let work = Workload { seq_len: 4096, global_batch: 1, micro_batch: 1, dtype, documents };
        let par = Parallelism { recompute, ..Parallelism::default() };
        let cluster = crate::spec::ClusterSpec::find("dgx-h100").unwrap();
        let plan = build(&model, &work, &par, Engines::of(&StackSpec::find("nccl-fa3").unwrap(), &cluster)).unwrap();
        let kept = kept.iter().map(|(kernel, times)| (kernel.to_string(), *times)).collect();
        let of = |plan: &Plan| Layout::new(plan, &AtomTable::new(plan).unwrap(), 0).unwrap().bytes;
        [of(&plan), of(&with_kept(&plan, &kept).unwrap())]
    }

    /// Of 8 layers the gate's output, 14336 numbers of two bytes a token, and two norms' of 4096.
    #[test]
    fn as_much_is_kept_as_is_said_of_every_layer() {
        let [plain, same] = bytes(Recompute::None, &[]);
        assert_eq!(plain, same);
        let [_, gates] = bytes(Recompute::None, &[("swiglu", 1.0)]);
        assert_eq!(gates - plain, 8 * 4096 * 14336 * 2);
        let [_, norms] = bytes(Recompute::None, &[("norm", 2.0)]);
        let (least, most) = (8 * 2 * 2 * 4096 * 4096 * 2, 9 * 2 * 2 * 4096 * 4096 * 2);
        assert!((least..=most).contains(&(norms - plain)), "{} of {least}", norms - plain);
    }

    /// Layers that are run again have it one at a time.
    #[test]
    fn what_is_made_again_is_kept_of_one_layer() {
        let [plain, gates] = bytes(Recompute::Full, &[("swiglu", 1.0)]);
        assert!(gates - plain <= 4096 * 14336 * 2, "{}", gates - plain);
    }
}
