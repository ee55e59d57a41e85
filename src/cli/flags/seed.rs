//! What is random.

use clap::Args;

#[derive(Args)]
pub struct Seed {
    /// For what is random
    #[arg(long = "seed", value_name = "N", default_value_t = 0)]
    pub number: u64,
}
