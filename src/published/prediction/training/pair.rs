//! A forward and a backward chunk of different microbatches side by side, cut out of a step.

use crate::cost::{Effort, Machine, cost};
use crate::plan::Plan;
use crate::published::prediction::said;

/// Seconds from the first op of the first pair of `plan` to its last, on whichever rank.
pub fn pair(plan: &Plan, machine: Machine) -> Result<f64, String> {
    let labels = plan.programs.iter().flat_map(|program| program.ops.iter().map(|op| op.label.as_str()));
    let paired = |label: &&str| label.starts_with("fwd.") && label.contains("+bwd.");
    let label = labels.into_iter().find(paired).ok_or("pair: the plan has no two microbatches side by side")?;
    let found = cost(plan, machine, Effort { fold: true, stride: false, spans: true }).map_err(said)?;
    let within = format!("{label}[");
    let spans = found.classes.iter().flat_map(|class| &class.spans).filter(|span| span.path.starts_with(&within));
    let ends = spans.fold([f64::INFINITY, 0.0], |[first, last]: [f64; 2], span| {
        [first.min(span.start.value()), last.max(span.end.value())]
    });
    Ok(ends[1] - ends[0])
}
