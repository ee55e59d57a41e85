//! What a step takes where a CPU issues it op by op: frameworks without CUDA graphs, at few tokens a microbatch.

use crate::error::Result;
use crate::plan::Plan;
use crate::published::software::recipe::{Half, eager_call};
use crate::report::human::{percent, seconds};
use crate::spec::{Architecture, StackSpec};
use crate::sweep::Case;
use crate::timeline::Timeline;
use crate::units::Seconds;

/// The shipped stacks that issue op by op: without experts, and with them.
const EAGER: &str = "megatron-eager";
const EAGER_EXPERTS: &str = "megatron-eager-experts";
/// Ops of a layer and microbatch, forward, backward and again, and those of a step around a ring: none of this program's
/// plans has more of a chunk.
const MOST_OPS: f64 = 150.0;
const OPS_OF_A_STEP: f64 = 12.0;
/// A step that is longer by less is no news.
const LONGER: f64 = 1.05;

/// That the step would be longer, if it would be by much.
pub fn note(case: &Case, plan: &Plan, timeline: &Timeline) -> Result<Option<String>> {
    let about = &plan.about;
    let gpu = &case.cluster.gpu;
    let compiled = matches!(gpu.architecture, Architecture::Cpu | Architecture::Npu | Architecture::Tpu);
    let options = &about.par.options;
    let (half, name) = match case.model.moe {
        Some(moe) => (Half::Experts(moe.experts / u64::from(about.par.ep.max(1))), EAGER_EXPERTS),
        None => (Half::Dense, EAGER),
    };
    let eager = StackSpec::find(name)?;
    let mut launch = eager.host_launch.clone();
    launch.value = Seconds::new(eager_call(half, options.fp8, options.tp_overlap));
    let each = case.cluster.spec.issued_in(launch.value);
    let step = timeline.step.value();
    let microbatches = about.global_batch as f64 / (f64::from(about.par.dp) * about.micro_batch as f64).max(1.0);
    let of_layer = (MOST_OPS + OPS_OF_A_STEP * f64::from(about.par.ring)) * f64::from(options.chunks.max(1));
    let ops = of_layer * (case.model.layers as f64 / f64::from(about.par.pp)).max(1.0) * microbatches;
    if compiled || case.profile.is_some() || case.stack.host_launch.value >= launch.value || ops * each.value() < step {
        return Ok(None);
    }
    let runs = gpu.attention.contains_key(&eager.attention_kernel.value);
    let others = match (&eager.group_start, &case.stack.group_start) {
        (Some(_), None) => ", and multiplies by one expert's weights after the other",
        _ => "",
    };
    let see = match runs && case.stack.name != name {
        true => format!(
            "; stack {name} has {}{others}",
            seconds(case.cluster.spec.issued_in(eager.host_launch.value).value())
        ),
        false => String::new(),
    };
    let mut issued = case.with_model(case.model.clone());
    issued.stack = issued.stack.issuing(launch);
    let found = issued.cost(plan)?;
    let longer = found.step.value();
    Ok((longer > LONGER * step).then(|| {
        format!(
            "host: a CPU that takes {} an op, as Megatron without CUDA graphs does{}, makes the step {}, {} of it waiting for \
             that CPU; {} an op is what stack {} has{see}",
            seconds(each.value()),
            if options.fp8 { " in FP8" } else { "" },
            seconds(longer),
            percent(found.mean().host / longer),
            seconds(case.machine().host_launch().value()),
            case.stack.name,
        )
    }))
}
