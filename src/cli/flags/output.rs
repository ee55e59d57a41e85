//! Where answers go.

use clap::Args;
use std::path::{Path, PathBuf};

/// What every command has.
#[derive(Args, Debug, Clone)]
pub struct Output {
    /// Print machine-readable output only.
    #[arg(long)]
    pub json: bool,
}

/// A file for what `--json` prints.
#[derive(Args)]
pub struct JsonFile {
    /// Write the JSON to this file, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl JsonFile {
    pub fn path(&self) -> Option<&Path> {
        self.out.as_deref()
    }
}

/// A file for a timeline.
#[derive(Args)]
pub struct TraceFile {
    /// Write a Chrome trace to this file: open it in ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl TraceFile {
    pub fn path(&self) -> Option<&Path> {
        self.trace.as_deref()
    }
}
