//! Experts of a mixture.

use super::value::degree;
use crate::error::{Error, Result};
use crate::spec::LlmSpec;
use crate::sweep::usual_ep;
use clap::Args;

#[derive(Args)]
pub struct Experts {
    /// Ranks that share the experts of a layer [default: as many as divide them, within a node]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    pub ep: Vec<u32>,
}

impl Experts {
    /// As the flag says, or as many as is usual on `gpus` GPUs, of which a node has `per_node`, with each degree of `pp`.
    pub fn or_usual(&self, model: &LlmSpec, gpus: u32, pp: &[u32], per_node: u32) -> Vec<u32> {
        if self.ep.is_empty() { vec![usual_ep(model, gpus, pp, per_node)] } else { self.ep.clone() }
    }
}

/// A word of `--options` that says another thing than a flag would else go by without a word. `each`: a flag, what it says,
/// what the words say, and what they say where nobody says anything.
pub fn agree(each: &[(&str, Vec<String>, String, String)]) -> Result<()> {
    let wrong = |(_, asked, word, usual): &&(&str, Vec<String>, String, String)| {
        word != usual && asked.iter().any(|asked| asked != word)
    };
    let Some((flag, asked, word, _)) = each.iter().find(wrong) else { return Ok(()) };
    let why = format!("--{flag} {} contradicts --options, which says {word}; leave one of them out", asked.join(","));
    Err(Error::spec("the command line", *flag, why))
}

/// What is said of experts would else go by without a word where there are none. `said`: flags, and whether they were given.
pub fn of_experts(model: &LlmSpec, said: &[(&str, bool)]) -> Result<()> {
    match said.iter().find(|(_, said)| *said && model.moe.is_none()) {
        Some((flag, _)) => {
            Err(Error::spec("the command line", flag, format!("{} has no experts; leave it out", model.name)))
        }
        None => Ok(()),
    }
}
