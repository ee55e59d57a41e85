use super::{Answer, Output};
use crate::error::Result;
use clap::Args;
#[derive(Args)]
pub struct Flags {
    #[command(flatten)]
    output: Output,
}
pub fn run(_: &Flags) -> Result<Answer> {
    todo!()
}
