//! Choices of the implementation.

use super::value::options;
use crate::spec::Options;
use clap::Args;

#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Implementation {
    /// Choices of the implementation, words joined by +, see `foretrain options` [default: default]
    #[arg(long, value_name = "WORDS", value_parser = options)]
    pub options: Option<Options>,
}
