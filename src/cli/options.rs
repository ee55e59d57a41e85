//! `foretrain options`: the words that `--options` takes.

use super::Answer;
use super::flags::Output;
use crate::error::Result;
use crate::spec::options::{NUMBERED, WORDS};
use clap::Args;
use serde_json::json;

#[derive(Args)]
#[command(after_help = "Example: foretrain options\n         foretrain estimate --tp 8 --options no-sp")]
pub struct Flags {
    #[command(flatten)]
    output: Output,
}

pub fn run(_: &Flags) -> Result<Answer> {
    let numbered = || NUMBERED.iter().map(|w| (format!("{}{}", w.start, w.ends_in), w.about));
    let all = || WORDS.iter().map(|w| (w.name.to_string(), w.about)).chain(numbered());
    let widest = all().map(|(name, _)| name.len()).max().unwrap_or(0);
    let text: String = all().map(|(name, about)| format!("{name:widest$}  {about}\n")).collect();
    let words: Vec<_> = all().map(|(name, about)| json!({"name": name, "about": about})).collect();
    Ok(Answer::new(text, &json!({"options": words})))
}
