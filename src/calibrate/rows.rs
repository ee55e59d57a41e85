//! What was timed, kept in a file as it is timed: a calibration that was stopped goes on where it was.

use super::samples::Samples;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

/// A line of the file: the times of one curve and size in what was run at once.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What was run.
    pub plan: String,
    pub curve: String,
    pub size: Vec<u64>,
    pub seconds: Vec<f64>,
    /// Of a run that warmed up: counts only where there is no other.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// In what company it was timed.
    #[serde(default)]
    pub company: Company,
    /// Of a GPU: which, and whose attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<On>,
}

/// What times of a GPU are of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct On {
    pub gpu: String,
    /// Whose kernels did attention.
    pub attention: String,
}

/// What was busy meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Company {
    /// One core, with one rank.
    #[default]
    Alone,
    /// All cores.
    Beside,
}

/// Times by their company.
pub type All = [Samples; 2];

/// What an earlier run has left, and the names of what it ran. Nothing, if there is no file.
pub fn kept(path: &Path) -> Result<(All, BTreeSet<String>)> {
    let mut samples = All::default();
    let done = read(path, |row| samples[row.company as usize].take(row))?;
    Ok((samples, done))
}

/// The same of a GPU, which runs one kernel at a time. Errors: what is there is of another GPU, or of another's attention.
pub fn kept_of_gpu(path: &Path, on: &On) -> Result<(Samples, BTreeSet<String>)> {
    let (mut samples, mut other) = (Samples::of_gpu(), None);
    let done = read(path, |mut row| match row.on.take() {
        Some(its) if its == *on => samples.take(row),
        its => other = other.take().or(Some((row.plan, its))),
    })?;
    match other {
        None => Ok((samples, done)),
        Some((plan, its)) => Err(mixed(path, &plan, its.as_ref(), on)),
    }
}

/// Rows that are not of what is measured now.
fn mixed(path: &Path, plan: &str, its: Option<&On>, on: &On) -> Error {
    let anew = "or remove the file to measure anew";
    let (field, why) = match its {
        None => ("on", format!("rows of {plan:?} do not say whose attention they are of; remove the file")),
        Some(its) if its.gpu != on.gpu => (
            "gpu",
            format!("rows of {plan:?} are of {:?}, and this is {:?}; give another --out, {anew}", its.gpu, on.gpu),
        ),
        Some(its) => (
            "attention",
            format!(
                "rows of {plan:?} are of attention by {:?}, and now it is by {:?}; give --attention as then, {anew}",
                its.attention, on.attention
            ),
        ),
    };
    Error::spec(path.display().to_string(), field, why)
}

fn read(path: &Path, mut take: impl FnMut(Row)) -> Result<BTreeSet<String>> {
    let mut done = BTreeSet::new();
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut lines: Vec<&str> = text.lines().collect();
    // Lines of a run are written at once; only the last may be torn, and then its other times still count.
    let whole = |line: &&str| serde_json::from_str::<Row>(line).is_ok();
    if lines.last().is_some_and(|line| !whole(line)) {
        lines.pop();
    }
    for line in lines {
        let row: Row = serde_json::from_str(line).map_err(Error::json(path.display()))?;
        done.insert(row.plan.clone());
        take(row);
    }
    Ok(done)
}

/// Appends what was run, `on` a GPU.
pub fn keep(path: &Path, plan: &str, on: Option<&On>, samples: &[(Company, Samples)]) -> Result<()> {
    let line = |row: Row| serde_json::to_string(&row).expect("JSON from plain data") + "\n";
    let of = |(company, samples): &(Company, Samples)| -> String {
        samples.rows(plan).map(|row| line(Row { company: *company, on: on.cloned(), ..row })).collect()
    };
    let text: String = samples.iter().map(of).collect();
    let file = std::fs::File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(Error::io(path))
}
