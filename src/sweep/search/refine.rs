//! Words that leave degrees alone, tried on the best ways: one after the other, whatever helps stays.

use super::space::words;
use super::{Search, fastest, step};
use crate::error::Result;
use crate::report::Row;
use crate::spec::{Options, Parallelism};
use crate::sweep::Point;

/// Of so many ways.
const WAYS: usize = 3;

/// The best ways with words that make them faster, the fastest first; none where no word does.
pub fn refine(search: &mut Search, best: &[Row]) -> Result<Vec<Row>> {
    let mut found = vec![];
    for row in best.iter().take(WAYS) {
        let mut now = row.clone();
        while let Some(faster) = step_from(search, &now)? {
            now = faster;
        }
        if step(&now) < step(row) {
            found.push(now);
        }
    }
    Ok(fastest(&found).into_iter().cloned().collect())
}

/// The fastest way that has one word more.
fn step_from(search: &mut Search, row: &Row) -> Result<Option<Row>> {
    let point = Point::of_row(row);
    let with = |word: &&str| -> Option<Point> {
        let options: Options = format!("{}+{word}", point.par.options).parse().ok()?;
        (options != point.par.options).then_some(Point { par: Parallelism { options, ..point.par }, ..point })
    };
    let points: Vec<Point> = words(&point.par).iter().filter_map(with).collect();
    let rows = search.cost(&points, step(row), false)?;
    Ok(fastest(&rows).first().filter(|other| step(other) < step(row)).map(|row| (*row).clone()))
}
