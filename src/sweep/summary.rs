//! A study in a table: the best way at every length, and why others do not run.

use super::played::{Played, played, share_links};
use super::{Case, Point, Said};
use crate::error::Result;
use crate::report::Row;
use crate::report::human::{Table, percent, seconds, tokens};
use crate::sim::SharedLink;
use serde::Serialize;
use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

/// The best of one length.
#[derive(Debug, Clone, Serialize)]
pub struct Best {
    pub seq_len: u64,
    pub points: usize,
    /// None where nothing runs.
    pub row: Option<Row>,
    /// Its step as it is played event by event, s, where GPUs share links; then it is the best of a few that were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated_s: Option<f64>,
    /// The link between ranks that delayed most, where any did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_link: Option<SharedLink>,
    /// Points that do not run, by the kind of their reason.
    pub infeasible: BTreeMap<String, usize>,
}

/// By length, ascending.
pub fn best(rows: &[Row]) -> Vec<Best> {
    let mut all: BTreeMap<u64, Best> = BTreeMap::new();
    for row in rows {
        let empty = Best {
            seq_len: row.seq_len,
            points: 0,
            row: None,
            simulated_s: None,
            shared_link: None,
            infeasible: BTreeMap::new(),
        };
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

/// Rows of a length that are played, of as many ops, one rank of each class counted.
const PLAYED: usize = 5;
const MOST_OPS: f64 = 4e6;

/// Plays the fastest rows of each length where GPUs share links, and takes the one that is the best then. Rows stay as they
/// are.
pub fn play(case: &Case, rows: &[Row], all: &mut [Best]) {
    if !share_links(&case.cluster) {
        return;
    }
    for best in all {
        let mut few: Vec<Row> =
            rows.iter().filter(|row| row.feasible && row.seq_len == best.seq_len).cloned().collect();
        few.sort_by(|a, b| b.mfu.partial_cmp(&a.mfu).unwrap_or(Ordering::Equal));
        few.truncate(PLAYED);
        // Rows of a length may have more or fewer sequences a step.
        let rate = |way: &Played| way.mfu.unwrap_or(0.0) * way.step_time_s.unwrap_or(0.0) / way.time();
        let ways = played(case, &|| false, MOST_OPS, few).into_iter().filter(|way| way.simulated_s.is_some());
        // Of those that are as fast the first.
        if let Some(way) = ways.rev().max_by(|a, b| rate(a).total_cmp(&rate(b))) {
            let Played { row, simulated_s, shared_link, .. } = way;
            *best = Best { row: Some(row), simulated_s, shared_link, ..best.clone() };
        }
    }
}

/// That the best of some length takes another time when it is played: of the one that differs most.
pub fn crowded(all: &[Best]) -> Option<String> {
    let way = |best: &Best| {
        let (simulated_s, shared_link) = (best.simulated_s, best.shared_link.clone());
        let way = Played { simulated_s, shared_link, ..Played::new(best.row.clone()?) };
        way.apart().map(|over| (over.abs(), best.seq_len, way))
    };
    let (_, seq_len, way) = all.iter().filter_map(way).max_by(|a, b| a.0.total_cmp(&b.0))?;
    let over = way.crowded("by which rows are")?;
    Some(format!("simulated, the best way of {} takes {over}", tokens(seq_len)))
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
pub fn render(all: &[Best], rows: &[Row]) -> String {
    let plays = all.iter().any(|best| best.simulated_s.is_some());
    let mut table = Table::new(if plays { ">><<>>>><<" } else { ">><<>>><<" });
    let heads = ["seq_len", "batch", "best way", "recompute", "MFU", "step"];
    let simulated = plays.then_some("simulated");
    table.row(heads.into_iter().chain(simulated).chain(["memory", "most time goes to", "do not run"]));
    for best in all {
        let mut cells = vec![tokens(best.seq_len)];
        match &best.row {
            Some(row) => {
                cells.extend([
                    row.global_batch.to_string(),
                    way(row),
                    row.recompute.clone(),
                    percent(row.mfu.unwrap_or(f64::NAN)),
                    seconds(row.step_time_s.unwrap_or(f64::NAN)),
                ]);
                cells.extend(plays.then(|| best.simulated_s.map_or(String::new(), seconds)));
                cells.extend([row.memory(), row.limit.clone()]);
            }
            None => {
                cells.extend(["-", "nothing runs", "", "", "", "", ""].map(String::from));
                cells.extend(plays.then(String::new));
            }
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
    use super::super::played::tests::{one_nic, stages};
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
    fn where_gpus_share_a_nic_the_best_is_the_best_of_those_played() {
        let dir = tempfile::tempdir().unwrap();
        let of = |cluster: &str| {
            let (case, point) = stages(cluster);
            let other = Point { par: Parallelism { pp: 4, dp: 16, ..point.par }, ..point };
            let rows = [point, other].map(|point| case.row(&point).unwrap());
            let mut all = best(&rows);
            play(&case, &rows, &mut all);
            (all, rows)
        };
        let (all, rows) = of(&one_nic(dir.path()));
        let played = all[0].simulated_s.unwrap();
        assert!(rows.iter().any(|row| row.step_time_s < Some(played) && all[0].row.as_ref() == Some(row)), "{all:?}");
        assert!(render(&all, &rows).contains("step  simulated"), "{}", render(&all, &rows));
        let (all, rows) = of("dgx-h100");
        assert_eq!((all[0].simulated_s, crowded(&all)), (None, None));
        assert!(!render(&all, &rows).contains("simulated"));
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
        let text = render(&best(&rows), &rows);
        assert!(text.contains("16 K") && text.contains("nothing runs") && text.contains("2 of 2: 2 memory"), "{text}");
        // What is not the default is said of the best way, and of those that do not run.
        let other = rows.clone().map(|row| Row { zero: 3, micro_batch: 2, ..row });
        let text_of_others = render(&best(&other), &other);
        assert!(text_of_others.contains("no split, zero 3, micro_batch 2  "), "{text_of_others}");
        assert!(text_of_others.contains("16 K, no split, zero 3, micro_batch 2, recompute "), "{text_of_others}");
        assert!(!text.contains("zero") && !text.contains("micro_batch"), "{text}");
        let example = text.lines().find(|line| line.starts_with("  memory")).unwrap();
        assert!(example.contains(" 2 ") && example.ends_with("recompute : a"), "{text}");
    }
}
