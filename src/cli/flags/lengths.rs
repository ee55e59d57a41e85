//! Lengths of sequences that a study is over.

use super::value::count;
use crate::sweep::Grid;
use clap::Args;

#[derive(Args)]
pub struct Lengths {
    /// Tokens of a sequence [default: 8K,16K,..,1M]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    seq_len: Vec<u64>,
}

impl Lengths {
    /// As the flag says, or the usual ones.
    pub fn tokens(&self) -> Vec<u64> {
        if self.seq_len.is_empty() { Grid::default_seq_len() } else { self.seq_len.clone() }
    }
}
