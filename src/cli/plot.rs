//! `foretrain plot`: pictures from rows.csv alone.

use super::{Answer, Output, list_of};
use crate::error::Result;
use crate::plot::draw;
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
    let files = draw(&flags.study.join("rows.csv"), out)?;
    let text = files.iter().map(|f| format!("wrote {}\n", f.display())).collect();
    Ok(Answer::new(text, &json!({"files": list_of(&files)})))
}
