//! What whoever plans by the time of a step has to know beside it: what it is with other software than its stack has, what its
//! software is not made for, and how steps of published runs like it came out.

use super::{grouped, issued};
use crate::collective::exchange;
use crate::error::Result;
use crate::plan::{OpKind, Plan};
use crate::report::Row;
use crate::report::record::{self, Kind, Line, Quantity};
use crate::spec::Architecture;
use crate::sweep::{Case, Point};
use crate::timeline::Timeline;

/// A line for each way in which other software would make much of a difference, and for what the plan's is not made for.
/// `timeline`: of `plan`, as costed.
pub fn notes(case: &Case, plan: &Plan, timeline: &Timeline) -> Result<Vec<String>> {
    let all = [grouped::note(case, plan, timeline)?, issued::note(case, plan, timeline)?, unmeant(case, plan)];
    Ok(all.into_iter().flatten().collect())
}

/// On CPUs this program carries the rows itself.
fn unmeant(case: &Case, plan: &Plan) -> Option<String> {
    let of = |kind: &OpKind| match kind {
        OpKind::Exchange { algo, .. } => exchange::unmeant(*algo),
        _ => None,
    };
    (case.cluster.gpu.architecture != Architecture::Cpu).then(|| plan.ops().find_map(|(_, op)| of(&op.kind)))?
}

/// The same of a row of a study, whose plan is made anew.
pub fn notes_of(case: &Case, row: &Row) -> Result<Vec<String>> {
    let plan = case.plan(&Point::of_row(row))?;
    notes(case, &plan, &case.cost(&plan)?)
}

/// How steps of published runs of such models came out on such devices, and their peaks of memory.
pub fn record(case: &Case) -> [Vec<Line>; 2] {
    let of = |quantity| record::of(quantity, case.cluster.gpu.architecture, Some(Kind::of(&case.model)));
    [of(Quantity::Step), of(Quantity::Memory)]
}
