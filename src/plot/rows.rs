//! The rows of a study, as far as pictures need them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::notes::Notes;
use super::sheet::{Line, Sheet};
use super::style::short;
use crate::error::{Reason, Result};
use crate::report::human::counted;

/// One configuration of a sweep. The names are those of the columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub gpus: u64,
    pub seq_len: u64,
    pub global_batch: u64,
    pub tp: u32,
    pub pp: u32,
    pub vp: u32,
    pub ulysses: u32,
    pub ring: u32,
    pub ep: u32,
    pub zero: u32,
    pub options: String,
    pub strategy: String,
    pub recompute: String,
    /// The MFU in 0..=1, or why there is none.
    pub mfu: std::result::Result<f64, Reason>,
}

/// Reads a rows.csv. Columns that no picture needs may be missing.
pub fn read(path: &Path) -> Result<Vec<Row>> {
    Sheet::read(path)?.lines().map(|line| Row::of(&line)).collect()
}

/// Tokens of a step: as they were asked for, or from the fewest to the most of the rows that run, if any does. (A row whose
/// sequences do not make as many as were asked for does not run, and has fewer.)
pub(super) fn tokens_per_step(rows: &[&Row], notes: &Notes) -> String {
    if let Some(asked) = notes.within("batch", "tokens_per_step") {
        return format!("{} tokens a step", short(asked));
    }
    let runs = rows.iter().any(|row| row.mfu.is_ok());
    let told = rows.iter().filter(|row| row.mfu.is_ok() == runs);
    let steps: BTreeSet<u64> = told.map(|r| r.seq_len * r.global_batch).collect();
    match (steps.first(), steps.last()) {
        (Some(a), Some(b)) if a != b => format!("{} to {} tokens a step", short(*a), short(*b)),
        (Some(a), _) => format!("{} tokens a step", short(*a)),
        _ => String::new(),
    }
}

impl Row {
    /// Pictures show rows of one machine.
    pub fn machine(&self) -> (&str, &str, &str, u64) {
        (&self.model, &self.cluster, &self.stack, self.gpus)
    }

    /// What all rows of a study have in common, as far as the first of them tells; `shown`: those that a picture has.
    pub(super) fn subtitle<'a>(&self, shown: impl Iterator<Item = &'a Row>, notes: &Notes) -> Vec<String> {
        let shown: Vec<&Row> = shown.collect();
        let mut parts: Vec<String> = notes.unfinished().into_iter().collect();
        parts.extend([self.model.clone(), format!("{} of {}", counted(self.gpus, "GPU"), self.cluster)]);
        parts.push(tokens_per_step(&shown, notes));
        parts.extend(notes.text("dtype"));
        parts.push(stages(shown.into_iter()).join(" or "));
        parts.push(format!("stack {}", self.stack));
        parts
    }

    pub(super) fn of(line: &Line) -> Result<Row> {
        Ok(Row {
            model: line.text("model")?.into(),
            cluster: line.text("cluster")?.into(),
            stack: line.text("stack")?.into(),
            gpus: line.value("gpus", "a count of GPUs of at least 1", |&n: &u64| n > 0)?,
            seq_len: line.value("seq_len", "a count of tokens of at least 1", |&n: &u64| n > 0)?,
            global_batch: line.value("global_batch", "a count of sequences of at least 1", |&n: &u64| n > 0)?,
            tp: line.value("tp", "a degree of at least 1", |&n: &u32| n > 0)?,
            pp: line.value("pp", "a count of stages of at least 1", |&n: &u32| n > 0)?,
            vp: line
                .maybe("vp", "a count of virtual stages of at least 1", |&n: &u32| n > 0)
                .ok()
                .flatten()
                .unwrap_or(1),
            ulysses: line.value("ulysses", "a degree of at least 1", |&n: &u32| n > 0)?,
            ring: line.value("ring", "a degree of at least 1", |&n: &u32| n > 0)?,
            ep: line.maybe("ep", "a degree of at least 1", |&n: &u32| n > 0).ok().flatten().unwrap_or(1),
            zero: line.value("zero", "a ZeRO stage of 0..=3", |&n: &u32| n <= 3)?,
            options: line.text("options")?.into(),
            strategy: line.text("strategy")?.into(),
            recompute: line.text("recompute")?.into(),
            mfu: mfu(line)?,
        })
    }
}

/// Lengths at which rows have more than one batch.
pub(super) fn several_batches<'a>(rows: impl Iterator<Item = &'a Row>) -> BTreeSet<u64> {
    let mut batches: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    for row in rows {
        batches.entry(row.seq_len).or_default().insert(row.global_batch);
    }
    batches.into_iter().filter(|(_, batches)| batches.len() > 1).map(|(length, _)| length).collect()
}

/// The stages of ZeRO that rows have, in words.
pub(super) fn stages<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<String> {
    let stages: BTreeSet<u32> = rows.map(|row| row.zero).collect();
    stages.into_iter().map(|stage| format!("ZeRO {stage}")).collect()
}

fn mfu(line: &Line) -> Result<std::result::Result<f64, Reason>> {
    let ratio = |mfu: &f64| (0.0..=1.0).contains(mfu);
    if line.value("feasible", "true or false", |_: &bool| true)? {
        line.value("mfu", "a ratio in 0..=1 where feasible is true", ratio).map(Ok)
    } else {
        // Error::Infeasible puts the word before its reason.
        let why = line.text("why")?;
        Ok(Err(why.strip_prefix("infeasible:").unwrap_or(why).trim().into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const HEAD: &str = "model,cluster,stack,gpus,seq_len,global_batch,tp,pp,ulysses,ring,zero,recompute,options,strategy,feasible,why,mfu";
    const GOOD: &str = "m,c,s,64,8192,512,1,1,8,1,1,none,default,ulysses,true,,0.5";

    fn read_text(text: &str) -> Result<Vec<Row>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    fn message(text: &str) -> String {
        read_text(text).unwrap_err().to_string()
    }

    #[test]
    fn a_row_says_its_mfu_or_why_there_is_none() {
        let bad = GOOD.replace("true,,0.5", "false,\"infeasible: memory: 90 GiB, there are 80\",");
        let rows = read_text(&format!("{HEAD}\n{GOOD}\n{bad}\n")).unwrap();
        assert_eq!(rows[0].mfu, Ok(0.5));
        assert_eq!(rows[1].mfu, Err("memory: 90 GiB, there are 80".into()));
        assert_eq!((rows[0].gpus, rows[0].seq_len, rows[0].ulysses), (64, 8192, 8));
    }

    /// Where 4M were asked for, rows of 4032K are those whose sequences do not make them.
    #[test]
    fn a_step_has_the_tokens_that_were_asked_for() {
        let bad = GOOD.replace("8192,512", "9216,448").replace("true,,0.5", "false,batch: uneven,");
        let rows = read_text(&format!("{HEAD}\n{GOOD}\n{bad}\n")).unwrap();
        let rows: Vec<&Row> = rows.iter().collect();
        assert_eq!(tokens_per_step(&rows, &Notes::none()), "4M tokens a step");
        assert_eq!(tokens_per_step(&rows[1..], &Notes::none()), "4032K tokens a step");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("study.json");
        std::fs::write(&path, r#"{"batch": {"tokens_per_step": 4194304}}"#).unwrap();
        assert_eq!(tokens_per_step(&rows[1..], &Notes::beside(&path).unwrap()), "4M tokens a step");
    }

    #[test]
    fn a_missing_column_is_named() {
        for column in HEAD.split(',').filter(|&c| c != "why") {
            let text = message(&format!("{}\n{GOOD}\n", HEAD.replace(column, "other")));
            assert!(text.contains("rows.csv") && text.contains(&format!("{column}: the column is missing")), "{text}");
        }
    }

    #[test]
    fn a_bad_value_is_named_with_its_line_and_the_remedy() {
        for (good, bad, column) in
            [(",64,", ",many,", "gpus"), ("0.5", "1.5", "mfu"), ("0.5", "NaN", "mfu"), ("true", "yes", "feasible")]
        {
            let text = message(&format!("{HEAD}\n{GOOD}\n{}\n", GOOD.replace(good, bad)));
            let value = bad.trim_matches(',');
            assert!(
                text.contains(&format!("{column}: line 3 has {value:?}")) && text.contains("run the sweep again"),
                "{text}"
            );
        }
    }

    #[test]
    fn empty_and_torn_files_are_errors() {
        assert!(message("").contains("0 rows"));
        assert!(message(&format!("{HEAD}\n")).contains("0 rows"));
        assert!(message(&format!("{HEAD}\nm,c,s\n")).contains("not a CSV file"));
        assert!(matches!(read(Path::new("/nowhere/rows.csv")), Err(Error::Io { .. })));
    }
}
