//! A study in a table: the best way at every length, and why others do not run.

use super::{Case, Point, Said};
use crate::error::Result;
use crate::report::Row;
use crate::report::human::{Table, percent, seconds, tokens};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The best of one length.
#[derive(Debug, Clone, Serialize)]
pub struct Best {
    pub seq_len: u64,
    pub points: usize,
    /// None where nothing runs.
    pub row: Option<Row>,
    /// Points that do not run, by the kind of their reason.
    pub infeasible: BTreeMap<String, usize>,
}

/// By length, ascending.
pub fn best(rows: &[Row]) -> Vec<Best> {
    let mut all: BTreeMap<u64, Best> = BTreeMap::new();
    for row in rows {
        let empty = Best { seq_len: row.seq_len, points: 0, row: None, infeasible: BTreeMap::new() };
        let best = all.entry(row.seq_len).or_insert(empty);
        best.points += 1;
        if !row.feasible {
            *best.infeasible.entry(row.why.parts().0.to_string()).or_default() += 1;
        } else if best.row.as_ref().is_none_or(|old| row.mfu > old.mfu) {
            best.row = Some(row.clone());
        }
    }
    all.into_values().collect()
}

/// Where no point runs at all: the one that comes nearest, and what would make it fit. Of those that lack memory it is the one
/// that lacks least; where none does, the first.
pub fn nothing_runs(case: &Case, rows: &[Row]) -> Result<Option<String>> {
    if rows.iter().any(|row| row.feasible) {
        return Ok(None);
    }
    let lacks = |row: &Row| row.over().filter(|over| *over > 0.0).unwrap_or(f64::INFINITY);
    let Some(row) = rows.iter().min_by(|a, b| lacks(a).total_cmp(&lacks(b))) else { return Ok(None) };
    // How many sequences a step has is asked for: no remedy is to say it again.
    let row = case.with_remedies(&Point::of_row(row), row.clone(), Said { batch: true, dp: false })?;
    let Row { seq_len, recompute, why, .. } = &row;
    Ok(Some(format!("{}, {}, recompute {recompute}: {why}", tokens(*seq_len), way(&row))))
}

/// All of a way that has no column of its own: with it, and the columns, a point can be asked for again. What `estimate` takes
/// where nothing is said is left out.
fn way(row: &Row) -> String {
    let named = [("zero", u64::from(row.zero)), ("micro_batch", row.micro_batch)];
    let other = named.into_iter().filter(|(_, n)| *n != 1).map(|(name, n)| format!(", {name} {n}"));
    row.way() + &other.collect::<String>()
}

/// A line for each length, and what the infeasible points add up to.
pub fn render(rows: &[Row]) -> String {
    let all = best(rows);
    let mut table = Table::new(">><<>>><<");
    table.row([
        "seq_len",
        "batch",
        "best way",
        "recompute",
        "MFU",
        "step",
        "memory",
        "most time goes to",
        "do not run",
    ]);
    for best in &all {
        let mut cells = vec![tokens(best.seq_len)];
        match &best.row {
            Some(row) => cells.extend([
                row.global_batch.to_string(),
                way(row),
                row.recompute.clone(),
                percent(row.mfu.unwrap_or(f64::NAN)),
                seconds(row.step_time_s.unwrap_or(f64::NAN)),
                row.memory(),
                row.limit.clone(),
            ]),
            None => cells.extend(["-", "nothing runs", "", "", "", "", ""].map(String::from)),
        }
        let why: Vec<String> = best.infeasible.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
        let none: usize = best.infeasible.values().sum();
        cells.push(if why.is_empty() { "-".into() } else { format!("{none} of {}: {}", best.points, why.join(", ")) });
        table.row(cells);
    }
    table.render("") + &examples(rows)
}

/// One point of each kind that does not run, in full: of those that lack memory the one that lacks least, else the reason
/// met most often.
fn examples(rows: &[Row]) -> String {
    let mut kinds: BTreeMap<&str, BTreeMap<&str, Vec<&Row>>> = BTreeMap::new();
    for row in rows.iter().filter(|row| !row.feasible) {
        let (kind, why) = row.why.parts();
        kinds.entry(kind).or_default().entry(why).or_default().push(row);
    }
    let mut table = Table::new("<><");
    for (kind, whys) in &kinds {
        let example = whys.iter().min_by_key(|(_, rows)| (rows[0].peak_mem_bytes, Reverse(rows.len())));
        let (why, rows) = example.expect("a kind was met");
        let (row, count) = (rows[0], whys.values().map(Vec::len).sum::<usize>());
        let said = format!("{}, {}, recompute {}: {why}", tokens(row.seq_len), way(row), row.recompute);
        table.row([kind.to_string(), count.to_string(), said]);
    }
    if kinds.is_empty() { String::new() } else { format!("\ndo not run, for example\n{}", table.render("  ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{LlmSpec, Parallelism};

    /// Experts on one rank each do not fit; of two points the one that lacks less is named, with what helps.
    #[test]
    fn where_nothing_runs_the_nearest_is_told_what_would_make_it_fit() {
        let case = Case::new(LlmSpec::find("qwen3-30b-a3b").unwrap(), "dgx-h100", "nccl-fa3", 64, None).unwrap();
        let row = |zero, ep, ulysses| {
            let par = Parallelism { dp: 64 / ulysses, ulysses, zero, ep, ..Parallelism::default() };
            case.row(&Point { seq_len: 4096, global_batch: 64, micro_batch: 1, par }).unwrap()
        };
        let (near, far, odd, fits) = (row(1, 1, 1), row(0, 1, 1), row(1, 1, 64), row(1, 8, 1));
        assert!(fits.feasible && near.over() < far.over() && odd.over().is_none(), "{} {}", fits.why, odd.why);
        let said = |rows: &[Row]| nothing_runs(&case, rows).unwrap();
        let why = said(&[odd.clone(), far.clone(), near.clone()]).unwrap();
        assert!(
            why.starts_with("4 K, no split, recompute none: memory: needs ") && why.contains("; fits with "),
            "{why}"
        );
        assert_eq!(said(std::slice::from_ref(&odd)), Some(format!("4 K, ulysses 64, recompute none: {}", odd.why)));
        assert_eq!(said(&[near, fits]), None);
    }

    #[test]
    fn the_best_feasible_row_is_taken_and_reasons_are_counted() {
        let row = |seq_len, mfu, why: &str| Row {
            seq_len,
            mfu,
            why: why.into(),
            feasible: why.is_empty(),
            ring: 1,
            ulysses: 1,
            zero: 1,
            micro_batch: 1,
            ..Row::default()
        };
        let rows = [
            row(8192, Some(0.4), ""),
            row(8192, Some(0.5), ""),
            row(8192, None, "heads: 3"),
            row(16384, None, "memory: a"),
            row(16384, None, "memory: b"),
        ];
        let all = best(&rows);
        assert_eq!(all[0].row.as_ref().unwrap().mfu, Some(0.5));
        assert_eq!((all[0].points, all[0].infeasible["heads"]), (3, 1));
        assert!(all[1].row.is_none() && all[1].infeasible["memory"] == 2);
        let text = render(&rows);
        assert!(text.contains("16 K") && text.contains("nothing runs") && text.contains("2 of 2: 2 memory"), "{text}");
        // What is not the default is said of the best way, and of those that do not run.
        let other = rows.clone().map(|row| Row { zero: 3, micro_batch: 2, ..row });
        let text_of_others = render(&other);
        assert!(text_of_others.contains("no split, zero 3, micro_batch 2  "), "{text_of_others}");
        assert!(text_of_others.contains("16 K, no split, zero 3, micro_batch 2, recompute "), "{text_of_others}");
        assert!(!text.contains("zero") && !text.contains("micro_batch"), "{text}");
        let example = text.lines().find(|line| line.starts_with("  memory")).unwrap();
        assert!(example.contains(" 2 ") && example.ends_with("recompute : a"), "{text}");
    }
}
