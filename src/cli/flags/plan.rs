//! A plan that was written before.

use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Args, Debug, Clone)]
pub struct PlanFile {
    /// Take the plan of this file; flags may not contradict it
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
}

impl PlanFile {
    pub fn path(&self) -> Option<&Path> {
        self.plan.as_deref()
    }
}
