//! Words and choices that leave degrees alone, tried on the best ways: one after the other, whatever helps stays.

use super::balance::divisions;
use super::space::{moves, says_stages};
use super::{Played, Search, fastest, step};
use crate::error::Result;
use crate::report::Row;
use crate::sweep::Point;

/// Of so many ways.
const WAYS: usize = 3;

/// The best ways with what makes them faster, the fastest first; none where nothing does.
pub fn refine(search: &mut Search, best: &[Played]) -> Result<Vec<Row>> {
    let mut found = vec![];
    for row in best.iter().take(WAYS) {
        let now = climbed(search, row)?;
        if step(&now) < step(row) {
            found.push(now);
        }
    }
    Ok(fastest(&found).into_iter().cloned().collect())
}

/// The way with all that makes it faster.
pub fn climbed(search: &mut Search, row: &Row) -> Result<Row> {
    let mut now = row.clone();
    while let Some(faster) = step_from(search, &now)? {
        now = faster;
    }
    Ok(now)
}

/// The fastest way that differs in one of these.
fn step_from(search: &mut Search, row: &Row) -> Result<Option<Row>> {
    // Who gives one stage of ZeRO wants that.
    let zero = &search.question.space.zero;
    let open = |point: &Point| zero.len() > 1 || zero.contains(&point.par.zero);
    let mut points: Vec<Point> = moves(&Point::of_row(row)).into_iter().filter(open).collect();
    // So does who gives layers of stages.
    if !search.question.space.options.iter().all(says_stages) && !(search.stop)() {
        points.extend(divisions(search.case, &Point::of_row(row))?);
    }
    let rows: Vec<Row> = search.cost(&points, step(row), false)?.into_iter().flatten().collect();
    Ok(fastest(&rows).first().filter(|other| step(other) < step(row)).map(|row| (*row).clone()))
}
