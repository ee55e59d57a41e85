//! Sequences of a step, whatever their length.

use super::value::count;
use crate::sweep::Batch;
use clap::Args;

/// Sequences of one step have this many tokens together, as in Llama's pretraining.
const TOKENS_PER_STEP: u64 = 4 << 20;

/// In tokens or in sequences.
#[derive(Args)]
pub struct BatchSize {
    /// Tokens of a step, whatever the length of a sequence [default: 4M]
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "global_batch")]
    pub tokens_per_step: Option<u64>,
    /// Sequences of a step, instead of --tokens-per-step
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    global_batch: Vec<u64>,
}

impl BatchSize {
    pub fn batch(&self) -> Batch {
        match self.global_batch.is_empty() {
            true => Batch::TokensPerStep(self.tokens_per_step.unwrap_or(TOKENS_PER_STEP)),
            false => Batch::GlobalBatch(self.global_batch.clone()),
        }
    }
}
