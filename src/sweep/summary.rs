//! A study in a table: the best way at every length, and why others do not run.

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
            *best.infeasible.entry(kind(&row.why)).or_default() += 1;
        } else if best.row.as_ref().is_none_or(|old| row.mfu > old.mfu) {
            best.row = Some(row.clone());
        }
    }
    all.into_values().collect()
}

/// The word before the colon.
fn kind(why: &str) -> String {
    why.split(':').next().unwrap_or(why).to_string()
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
    let mut kinds: BTreeMap<String, BTreeMap<&str, Vec<&Row>>> = BTreeMap::new();
    for row in rows.iter().filter(|row| !row.feasible) {
        kinds.entry(kind(&row.why)).or_default().entry(&row.why).or_default().push(row);
    }
    let mut table = Table::new("<><");
    for (kind, whys) in &kinds {
        let example = whys.values().min_by_key(|rows| (rows[0].peak_mem_bytes, Reverse(rows.len())));
        let (row, count) = (example.expect("a kind was met")[0], whys.values().map(Vec::len).sum::<usize>());
        let why = row.why.strip_prefix(kind.as_str()).unwrap_or(&row.why).trim_start_matches([':', ' ']);
        let said = format!("{}, {}, recompute {}: {why}", tokens(row.seq_len), way(row), row.recompute);
        table.row([kind.clone(), count.to_string(), said]);
    }
    if kinds.is_empty() { String::new() } else { format!("\ndo not run, for example\n{}", table.render("  ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
