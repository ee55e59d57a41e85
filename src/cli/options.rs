//! `foretrain options`: the words that `--options` takes.

use super::{Answer, Output};
use crate::error::Result;
use crate::spec::options::WORDS;
use clap::Args;
use serde_json::json;

#[derive(Args)]
#[command(after_help = "Example: foretrain options\n         foretrain estimate --ring 8 --options no-sp")]
pub struct Flags {
    #[command(flatten)]
    output: Output,
}

pub fn run(_: &Flags) -> Result<Answer> {
    let widest = WORDS.iter().map(|w| w.name.len()).max().unwrap_or(0);
    let text: String = WORDS.iter().map(|w| format!("{:widest$}  {}\n", w.name, w.about)).collect();
    let words: Vec<_> = WORDS.iter().map(|w| json!({"name": w.name, "about": w.about})).collect();
    Ok(Answer::new(text, &json!({"options": words})))
}
