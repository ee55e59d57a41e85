//! What a step takes with other software than its stack has: what whoever plans by the number has to know beside it.

use super::{grouped, issued};
use crate::error::Result;
use crate::plan::Plan;
use crate::report::Row;
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
