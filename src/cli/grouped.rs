//! What a step takes where products of experts are issued in another way than the stack has them: one kernel for all experts of
//! a rank, or one product after the other.

use crate::error::Result;
use crate::plan::Plan;
use crate::report::human::seconds;
use crate::spec::{Architecture, GpuSpec, StackSpec};
use crate::sweep::Case;
use crate::timeline::Timeline;

/// The shipped stack that has a product for each expert.
const ONE_BY_ONE: &str = "nccl-cudnn";
/// Shipped stacks that have one kernel for all experts of a rank.
const AT_ONCE: [&str; 4] = ["nccl-fa3", "nccl-cudnn-grouped", "nccl-fa4", "nccl-fa2"];
/// A step that differs by less is no news.
const NEWS: f64 = 0.05;

/// That the step would be another, if it would be by much: stacks of two GPUs may differ in it, and then their steps do.
pub fn note(case: &Case, plan: &Plan, timeline: &Timeline) -> Result<Option<String>> {
    let ep = u64::from(plan.about.par.ep);
    let nvidia = [Architecture::Ampere, Architecture::Ada, Architecture::Hopper, Architecture::Blackwell];
    let several = case.model.moe.is_some_and(|moe| moe.experts > ep);
    if !several || case.profile.is_some() || !nvidia.contains(&case.cluster.gpu.architecture) {
        return Ok(None);
    }
    let own = &case.stack;
    let other = match own.group_start {
        Some(_) => None,
        None => StackSpec::find(ONE_BY_ONE)?.group_start,
    };
    let [step, otherwise] = [
        timeline.step.value(),
        case.with_stack(StackSpec { group_start: other, ..own.clone() })?.cost(plan)?.step.value(),
    ];
    if (otherwise / step - 1.0).abs() < NEWS {
        return Ok(None);
    }
    let (name, step) = (&own.name, seconds(otherwise));
    Ok(Some(match own.group_start {
        Some(_) => format!(
            "experts: stack {name} multiplies by the weights of one expert after the other, as Transformer Engine does; with one \
             kernel for all of a rank{}, the step is {step}",
            on(&case.cluster.gpu, &AT_ONCE)?
        ),
        None => format!(
            "experts: stack {name} multiplies by the weights of all experts of a rank in one kernel; one after the other, as \
             Transformer Engine does it{}, the step is {step}",
            on(&case.cluster.gpu, &[ONE_BY_ONE])?
        ),
    }))
}

/// Where that is to be had: the first of these stacks that runs on the GPU, if one does.
fn on(gpu: &GpuSpec, names: &[&str]) -> Result<String> {
    for name in names {
        if gpu.attention.contains_key(&StackSpec::find(name)?.attention_kernel.value) {
            return Ok(format!(" (as stack {name} has it)"));
        }
    }
    Ok(String::new())
}
