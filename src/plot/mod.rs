//! Pictures of a study. A plot reads `results/<study>/rows.csv` (and study.json beside it) and nothing else of the
//! program, so that it can be drawn again from a committed file, or from one that somebody sends. (A validation is no
//! study: it is drawn from what was just measured.)
//!
//! A new plot is one file here and one line of [`PLOTS`].

pub mod block_timeline;
pub mod choices;
pub mod crossover;
pub mod exchange;
pub mod exposed_comm;
pub mod goodput;
pub mod longest;
pub mod memory;
pub mod mfu_vs_seqlen;
mod notes;
mod panel;
pub mod published;
pub mod rows;
mod sheet;
mod stacked;
pub mod step_timeline;
pub mod style;
pub mod validation;
mod ways;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use notes::Notes;
use rayon::prelude::*;
use sheet::Sheet;

pub use mfu_vs_seqlen::mfu_vs_seqlen;
pub use validation::validation;

/// Reads a rows.csv, writes pictures into a directory, returns their paths.
pub type Draw = fn(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>>;

/// What a study's rows are: told by a column that no other kind has, or by what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Study {
    /// Configurations of whole training steps.
    Sweep,
    /// The ways that a search costed.
    Search,
    /// The longest sequences that fit.
    Longest,
    /// Points at which Ulysses and the ring were both costed.
    Crossover,
    /// Exchanges of mixture-of-experts layers.
    Exchange,
    /// What failures and checkpoints leave of a run.
    Goodput,
    /// Published measurements and their predictions.
    Published,
}

/// A picture.
pub struct Plot {
    /// Of the file it writes, too.
    pub name: &'static str,
    pub of: Study,
    pub draw: Draw,
}

pub const PLOTS: &[Plot] = &[
    Plot { name: "mfu_vs_seqlen", of: Study::Sweep, draw: mfu_vs_seqlen },
    Plot { name: "exposed_comm", of: Study::Sweep, draw: exposed_comm::exposed_comm },
    Plot { name: "memory", of: Study::Sweep, draw: memory::memory },
    Plot { name: "block_timeline", of: Study::Sweep, draw: block_timeline::block_timeline },
    Plot { name: "choices", of: Study::Search, draw: choices::choices },
    Plot { name: "longest", of: Study::Longest, draw: longest::longest },
    Plot { name: "crossover", of: Study::Crossover, draw: crossover::crossover },
    Plot { name: "exchange", of: Study::Exchange, draw: exchange::exchange },
    Plot { name: "goodput", of: Study::Goodput, draw: goodput::goodput },
    Plot { name: "published", of: Study::Published, draw: published::published },
    Plot { name: "published_memory", of: Study::Published, draw: published::published_memory },
];

/// The plot of that name.
pub fn find(name: &str) -> Result<&'static Plot> {
    PLOTS.iter().find(|plot| plot.name == name).ok_or_else(|| {
        let known: Vec<_> = PLOTS.iter().map(|plot| plot.name).collect();
        Error::spec("plot", "name", format!("there is no plot {name:?}; use one of: {}", known.join(", ")))
    })
}

/// Every plot has all rows in memory: of a larger file they are drawn in turn.
const SIDE_BY_SIDE: u64 = 4 << 20;

/// Every plot of the kind of study that `rows_csv` is.
pub fn draw(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let of = match study_of(&Sheet::read(rows_csv)?) {
        // Rows are those of a sweep; what was asked tells the two apart.
        Study::Sweep if Notes::beside(rows_csv)?.has("space") => Study::Search,
        Study::Sweep if Notes::beside(rows_csv)?.has("measures") => Study::Longest,
        of => of,
    };
    std::fs::create_dir_all(out_dir).map_err(Error::io(out_dir))?;
    let bytes = std::fs::metadata(rows_csv).map_err(Error::io(rows_csv))?.len();
    let plots: Vec<&Plot> = PLOTS.iter().filter(|plot| plot.of == of).collect();
    let draw = |plot: &&Plot| (plot.draw)(rows_csv, out_dir);
    let files: Vec<Vec<PathBuf>> = match bytes <= SIDE_BY_SIDE {
        true => plots.par_iter().map(draw).collect::<Result<_>>()?,
        false => plots.iter().map(draw).collect::<Result<_>>()?,
    };
    Ok(files.concat())
}

/// What is to be said of a study that was stopped before all of its rows were there.
pub fn unfinished(rows_csv: &Path) -> Result<Option<String>> {
    Ok(Notes::beside(rows_csv)?.unfinished())
}

fn study_of(sheet: &Sheet) -> Study {
    let told_by = [
        ("ulysses_over_ring", Study::Crossover),
        ("rel_error", Study::Published),
        ("dispatch_s", Study::Exchange),
        ("ettr", Study::Goodput),
    ];
    told_by.into_iter().find(|(column, _)| sheet.has(column)).map_or(Study::Sweep, |(_, study)| study)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_plot_is_answered_with_the_known_ones() {
        assert!(find("mfu_vs_seqlen").is_ok());
        let message = find("mfu").err().unwrap().to_string();
        assert!(message.contains("mfu_vs_seqlen, exposed_comm"), "{message}");
    }
}
