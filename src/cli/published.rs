//! `foretrain published`: measurements that others have published, predicted.

use super::Answer;
use super::flags::Output;
use super::progress::bar;
use crate::error::{Error, Result};
use crate::published::outcome::store::Store;
use crate::published::outcome::table;
use crate::published::{Summary, Verdict, load, predict};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

#[derive(Args)]
#[command(after_help = "Example: foretrain published --cases traces/published/training.json\n\n\
    Model, cluster, software and split of a case follow by rule from what its source states; what it leaves\n\
    unstated follows one rule for all cases. A prediction that is missing counts as an error of 100 %.")]
pub struct Flags {
    /// A file of cases, as in traces/published; may be given more than once
    #[arg(long, value_name = "FILE", required = true)]
    cases: Vec<PathBuf>,
    /// Write the table and its picture to this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the groups only
    #[arg(long)]
    summary: bool,
    #[command(flatten)]
    output: Output,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Found<'a> {
    cases: &'a [Verdict],
    summary: &'a Summary,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let mut cases = Vec::new();
    for file in &flags.cases {
        cases.extend(load(file)?);
    }
    let store = flags.out.as_deref().map(Store::create).transpose()?;
    let bar = bar(cases.len() as u64, "{pos}/{len} cases, {eta} left");
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let verdicts = predict(&cases, &|verdict| {
        bar.inc(1);
        if let Some(Err(e)) = store.as_ref().map(|s| s.append(verdict)) {
            failed.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(e);
        }
    })?;
    bar.finish_and_clear();
    if let Some(error) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        return Err(error);
    }
    let summary = Summary::of(&cases, &verdicts);
    if summary.unread == cases.len() {
        let why = verdicts.first().map(|verdict| verdict.why.clone()).unwrap_or_default();
        let files: Vec<_> = flags.cases.iter().map(|file| file.display().to_string()).collect();
        let why = format!("none of {} cases could be read, the first because of {why}", cases.len());
        return Err(Error::spec(files.join(", "), "contents", why));
    }
    let mut text = if flags.summary { table::groups(&summary) } else { table::render(&verdicts, &summary) };
    if let Some(store) = store {
        let rows = store.finish(&verdicts)?;
        let mut files = vec![rows.clone()];
        files.extend(crate::plot::draw(&rows, rows.parent().unwrap_or(Path::new(".")))?);
        text.push('\n');
        files.iter().for_each(|file| text.push_str(&format!("wrote {}\n", file.display())));
    }
    Ok(Answer::new(text, &Found { cases: &verdicts, summary: &summary }))
}
