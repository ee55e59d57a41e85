//! What it costs to choose otherwise: the fastest way with each value of each choice.

use super::{Candidate, Counts, Found, Search, Wanted, fastest, is_slow, step};
use crate::error::{Cause, Error, Result};
use crate::report::Row;
use crate::spec::Schedule;
use crate::sweep::Point;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The fastest way found with one value of a choice.
#[derive(Debug, Clone, Serialize)]
pub struct Value {
    pub choice: &'static str,
    pub value: String,
    /// None where none is found.
    pub row: Option<Row>,
    /// How many times as long as the best of all.
    pub over_best: Option<f64>,
    /// Where none is found: all take this many times as long as the best of all or longer, by their bounds. None where
    /// some may take less, but the most promising do not, or do not fit. Where one is found: ways that were not costed,
    /// their plans having more ops than are laid out among others, may be faster, and take this many times as long as the
    /// best or longer. None where none of them can be.
    pub at_least: Option<f64>,
}

/// A choice: its name, and the value that a way has.
type Choice = (&'static str, fn(&Point) -> String);

/// In the order of the table.
const CHOICES: &[Choice] = &[
    ("tp", |p| p.par.tp.to_string()),
    ("pp", |p| p.par.pp.to_string()),
    ("vp", |p| p.par.vp.to_string()),
    ("schedule", |p| Schedule::name_of(&p.par).into()),
    ("ulysses", |p| p.par.ulysses.to_string()),
    ("ring", |p| p.par.ring.to_string()),
    ("ep", |p| p.par.ep.to_string()),
    ("dispatch", |p| p.par.carrier().into()),
    ("overlap-exchange", |p| if p.par.options.overlap_exchange { "yes".into() } else { "no".into() }),
    ("micro_batch", |p| p.micro_batch.to_string()),
    ("zero", |p| p.par.zero.to_string()),
    ("recompute", |p| format!("{}{}", p.par.recompute.name(), p.par.options.made_again())),
    ("options", |p| p.par.options.unchosen().to_string()),
];

/// Ways that are costed anew to find one with a value that fits.
const TRIES: usize = 32;
/// Nobody asks how much slower than this.
pub const CEILING: f64 = 1.5;

/// The table as a file for the picture, which is of rows alone otherwise: values that nothing was found with have none,
/// and rows do not say what was not costed.
pub fn csv(found: &[Found]) -> Result<Vec<u8>> {
    let mut csv = csv::Writer::from_writer(vec![]);
    let failed = |e: csv::Error| Error::spec("search", "choices.csv", e.to_string());
    csv.write_record(["seq_len", "global_batch", "choice", "value", "over_best", "at_least", "ceiling"])
        .map_err(failed)?;
    for found in found {
        for Value { choice, value, over_best, at_least, .. } in &found.values {
            let number = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
            let work = [found.seq_len, found.global_batch].map(|n| n.to_string());
            let numbers = [number(*over_best), number(*at_least), CEILING.to_string()];
            let line =
                work.iter().map(String::as_str).chain([*choice, value]).chain(numbers.iter().map(String::as_str));
            csv.write_record(line).map_err(failed)?;
        }
    }
    Ok(csv.into_inner().expect("a Vec takes all that is written"))
}

/// A value of a choice, before anything is said of it.
struct Asked {
    choice: &'static str,
    value_of: fn(&Point) -> String,
    value: String,
    /// Whether all that have it take as long as nobody asks for, by what is known of them.
    slow: bool,
}

impl Asked {
    fn has(&self, point: &Point) -> bool {
        (self.value_of)(point) == self.value
    }
}

/// Every choice that has more than one value, and of each value the fastest way found that fits. Of ways whose steps are
/// known none that fits is faster; of those that were not costed the most promising of each value are.
pub fn values(
    search: &mut Search,
    candidates: &[Candidate],
    costed: &mut Vec<Row>,
    counts: &mut Counts,
) -> Result<Vec<Value>> {
    let Some(best) = fastest(costed).first().map(|row| step(row)) else { return Ok(vec![]) };
    let wanted = Wanted { ways: 1, within: best * CEILING, slack: 0.0, keep: true };
    let mut all = vec![];
    for (choice, value_of) in CHOICES {
        let mut by_value: BTreeMap<(u64, String), Vec<Candidate>> = BTreeMap::new();
        for candidate in candidates {
            let value = value_of(&candidate.point);
            by_value.entry((value.parse().unwrap_or(0), value)).or_default().push(*candidate);
        }
        if by_value.len() < 2 {
            continue;
        }
        for ((_, value), with) in by_value {
            let with = as_costed(with, costed);
            let slow = with.iter().all(|way| way.least() >= wanted.within);
            let asked = Asked { choice, value_of: *value_of, value, slow };
            more_with(search, &known(&asked, costed), wanted, (&mut *costed, &mut *counts), &asked)?;
            more_with(search, &promising(with, costed), wanted, (&mut *costed, &mut *counts), &asked)?;
            all.push(asked);
        }
    }
    // What was costed for one choice may be the fastest way of another's value, and too slow for the first.
    for asked in &all {
        more_with(search, &known(asked, costed), wanted, (&mut *costed, &mut *counts), asked)?;
    }
    // Plans with more ops than are laid out have no step, and may be as fast as their bounds.
    let told = costed.iter().filter(|row| row.why.cause != Cause::Size);
    let costed_ways: BTreeSet<Point> = told.map(Point::of_row).collect();
    let too_long: BTreeSet<Point> =
        costed.iter().filter(|row| row.why.cause == Cause::Size).map(Point::of_row).collect();
    let open = candidates.iter().filter(|way| way.bound < wanted.within && !costed_ways.contains(&way.point));
    let open: Vec<&Candidate> = open.collect();
    let fastest = fastest(costed);
    let found = all.into_iter().map(|asked| {
        let row = fastest.iter().find(|row| asked.has(&Point::of_row(row))).map(|row| (*row).clone());
        let over_best = row.as_ref().map(|row| step(row) / best);
        let at_least = match over_best {
            None => {
                let long = open.iter().filter(|way| too_long.contains(&way.point) && asked.has(&way.point));
                let least = long.map(|way| (way.bound / best).max(1.0)).min_by(f64::total_cmp);
                least.or(asked.slow.then_some(CEILING))
            }
            Some(over) => {
                let open = open.iter().filter(|way| way.bound < over * best && asked.has(&way.point));
                open.map(|way| (way.bound / best).max(1.0)).min_by(f64::total_cmp)
            }
        };
        Value { choice: asked.choice, value: asked.value, row, over_best, at_least }
    });
    // Of one that was not come to nothing is known.
    let stopped = (search.stop)();
    Ok(found.filter(|value| !stopped || value.row.is_some() || value.at_least.is_some()).collect())
}

/// Those with a value, of which those that were costed, and found too slow for what was asked then, have their steps.
fn as_costed(mut with: Vec<Candidate>, costed: &[Row]) -> Vec<Candidate> {
    let slow = costed.iter().filter(|row| is_slow(row));
    let known: BTreeMap<Point, f64> = slow.map(|row| (Point::of_row(row), step(row))).collect();
    with.iter_mut().for_each(|candidate| candidate.step = known.get(&candidate.point).copied());
    with
}

/// Those whose steps are known and their memory is not, the fastest first.
fn known(asked: &Asked, costed: &[Row]) -> Vec<Candidate> {
    let mut steps: BTreeMap<Point, Option<f64>> = BTreeMap::new();
    for row in costed {
        let of_slow = steps.entry(Point::of_row(row)).or_insert(row.step_time_s);
        *of_slow = of_slow.filter(|_| is_slow(row));
    }
    let with = steps.into_iter().filter(|(point, _)| asked.has(point));
    // Their bounds were compared when they were costed.
    let ways = with.filter_map(|(point, step)| step.map(|step| Candidate { point, bound: 0.0, step: Some(step) }));
    let mut ways: Vec<Candidate> = ways.collect();
    ways.sort_by(|a, b| a.least().total_cmp(&b.least()).then(a.point.cmp(&b.point)));
    ways
}

/// The first few of those that were not costed, by their bounds.
fn promising(mut with: Vec<Candidate>, costed: &[Row]) -> Vec<Candidate> {
    let costed: BTreeSet<Point> = costed.iter().map(Point::of_row).collect();
    with.retain(|candidate| !costed.contains(&candidate.point));
    with.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.point.cmp(&b.point)));
    with.truncate(TRIES);
    with
}

/// Costs those that may be faster than any known way with the value.
fn more_with(
    search: &mut Search,
    ways: &[Candidate],
    wanted: Wanted,
    (costed, counts): (&mut Vec<Row>, &mut Counts),
    asked: &Asked,
) -> Result<()> {
    let found = fastest(costed).into_iter().find(|row| asked.has(&Point::of_row(row))).cloned();
    let mut found: Vec<Row> = found.into_iter().collect();
    let known = found.len();
    search.best_first(ways, wanted, &mut found, counts)?;
    costed.extend(found.drain(known..));
    Ok(())
}
