//! Pictures of a study. A plot reads `results/<study>/rows.csv` and nothing else of the program, so that it can be
//! drawn again from a committed file, or from one that somebody sends.
//!
//! A new plot is one file here and one line of [`PLOTS`].

pub mod mfu_vs_seqlen;
pub mod rows;
pub mod style;
mod ways;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

pub use mfu_vs_seqlen::mfu_vs_seqlen;

/// Reads a rows.csv, writes pictures into a directory, returns their paths.
pub type Plot = fn(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>>;

/// Every plot by name. The name is that of the file it writes, too.
pub const PLOTS: &[(&str, Plot)] = &[("mfu_vs_seqlen", mfu_vs_seqlen)];

/// The plot of that name.
pub fn find(name: &str) -> Result<Plot> {
    let found = PLOTS.iter().find(|(known, _)| *known == name).map(|(_, plot)| *plot);
    found.ok_or_else(|| {
        let known: Vec<_> = PLOTS.iter().map(|(known, _)| *known).collect();
        Error::spec("plot", "name", format!("there is no plot {name:?}; use one of: {}", known.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_plot_is_answered_with_the_known_ones() {
        assert!(find("mfu_vs_seqlen").is_ok());
        let message = find("mfu").unwrap_err().to_string();
        assert!(message.contains("mfu_vs_seqlen"), "{message}");
    }
}
