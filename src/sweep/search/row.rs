//! Rows of a search: memory is not looked at where a way is too slow anyway.

use crate::error::{Cause, Error, Reason, Result};
use crate::plan::Plan;
use crate::plan::route::dropped;
use crate::report::Row;
use crate::sweep::played::step;
use crate::sweep::{Case, Point};

/// The row of a point: the row that a sweep has, unless it takes `limit` or longer.
pub(super) fn row(case: &Case, point: &Point, limit: f64) -> Result<Row> {
    let costed = || -> Result<Row> {
        let plan: Plan = case.plan(point)?;
        let timeline = case.cost(&plan)?;
        let mut row = Row::asked(&plan.about, &case.cluster, &case.stack);
        row.set_time(&timeline, plan.about.model_flops, case.peak().value());
        row.set_dropped(dropped(&plan.routes));
        if timeline.step.value() < limit { laid_out(case, &plan, row) } else { Ok(slow(row)) }
    };
    match costed() {
        Err(Error::Infeasible(why)) => Ok(case.infeasible(point, why)),
        other => other,
    }
}

/// The row of a way that was slow, as it is for a limit that it is below: its time is known.
pub(super) fn looked_at(case: &Case, row: Row) -> Result<Row> {
    let point = Point::of_row(&row);
    match case.plan(&point).and_then(|plan| laid_out(case, &plan, row)) {
        Err(Error::Infeasible(why)) => Ok(case.infeasible(&point, why)),
        other => other,
    }
}

/// The row with its memory.
fn laid_out(case: &Case, plan: &Plan, mut row: Row) -> Result<Row> {
    let footprint = case.footprint_within(plan, case.room() as u64)?;
    row.set_layout(&footprint, &case.place(&case.aside(plan)));
    if row.why.cause == Cause::Memory {
        // Other stages were not looked at.
        row.why.said = row.why.said.replacen("needs", "needs at least", 1);
    }
    Ok(row)
}

/// The row without what was not looked at.
pub(super) fn slow(row: Row) -> Row {
    Row {
        feasible: false,
        why: Reason::new(Cause::Search, "slower than the best; its memory was not looked at"),
        peak_mem_bytes: None,
        mem_params_bytes: None,
        mem_grads_bytes: None,
        mem_optimizer_bytes: None,
        mem_activations_bytes: None,
        mem_workspace_bytes: None,
        mem_comm_bytes: None,
        mem_gaps_bytes: None,
        mem_room_bytes: None,
        host_mem_bytes: None,
        ..row
    }
}

/// Whether its memory was not looked at.
pub(super) fn is_slow(row: &Row) -> bool {
    row.why.cause == Cause::Search
}

/// Those that fit, the fastest first.
pub(super) fn fastest(rows: &[Row]) -> Vec<&Row> {
    let mut fit: Vec<&Row> = rows.iter().filter(|row| row.feasible).collect();
    fit.sort_by(|a, b| step(a).total_cmp(&step(b)).then_with(|| Point::of_row(a).cmp(&Point::of_row(b))));
    fit
}
