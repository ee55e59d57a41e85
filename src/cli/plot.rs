//! `foretrain plot`: pictures from rows.csv alone.

use super::flags::Output;
use super::{Answer, list_of};
use crate::error::Result;
use crate::plot::{draw, unfinished};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args)]
#[command(after_help = "Example: foretrain plot results/default")]
pub struct Flags {
    /// The folder of a study, with its rows.csv
    #[arg(value_name = "DIR")]
    study: PathBuf,
    /// Write the pictures to this folder instead
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let out = flags.out.as_deref().unwrap_or(&flags.study);
    let rows = flags.study.join("rows.csv");
    let files = draw(&rows, out)?;
    let unfinished = unfinished(&rows)?;
    let note = unfinished.iter().map(|said| format!("note: {said}; start the study again to go on with it\n"));
    let text = note.chain(files.iter().map(|f| format!("wrote {}\n", f.display()))).collect();
    Ok(Answer::new(text, &json!({"files": list_of(&files), "unfinished": unfinished})))
}
