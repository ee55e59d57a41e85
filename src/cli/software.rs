//! What whoever plans by the time of a step has to know beside it: what it is with other software than its stack has, and how
//! steps of published runs like it came out.

use super::{grouped, issued};
use crate::error::Result;
use crate::plan::Plan;
use crate::report::Row;
use crate::report::record::{self, Kind, Line, Quantity};
use crate::sweep::{Case, Point};
use crate::timeline::Timeline;

/// A line for each way in which other software would make much of a difference. `timeline`: of `plan`, as costed.
pub fn notes(case: &Case, plan: &Plan, timeline: &Timeline) -> Result<Vec<String>> {
    let all = [grouped::note(case, plan, timeline)?, issued::note(case, plan, timeline)?];
    Ok(all.into_iter().flatten().collect())
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
