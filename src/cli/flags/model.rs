//! The model that is trained.

use crate::error::Result;
use crate::spec::LlmSpec;
use crate::sweep::trained;
use clap::Args;

/// The model of a study.
#[derive(Args)]
pub struct Model {
    /// A shipped model, or the path of a Hugging Face config.json
    #[arg(long = "model", value_name = "NAME", default_value = "llama-3-8b")]
    pub name: String,
}

/// Multi-token prediction.
#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Mtp {
    /// Train without the modules of multi-token prediction that the model has
    #[arg(long)]
    pub no_mtp: bool,
}

impl Mtp {
    /// The model of a name, without the modules where the flag leaves them out.
    pub fn trained(&self, model: &str) -> Result<LlmSpec> {
        trained(model, self.no_mtp)
    }
}
