//! Exchanges of a mixture-of-experts layer: four panels of curves, by ranks, imbalance, choices, and load.

use super::panel::{self, Panel};
use super::sheet::Sheet;
use super::style::{Align, FAINT, INK, Mark, save};
use crate::error::Result;
use std::path::{Path, PathBuf};

const SIZE: (f64, f64) = (600.0, 300.0);

const PANELS: [Panel; 4] = [
    Panel {
        name: "ep",
        title: "More ranks",
        x_label: "Ranks that share the experts",
        y_label: "Dispatch + combine (ms)",
        doubles: true,
        corner: (110.0, 150.0),
        size: SIZE,
        legend: (16.0, 16.0),
    },
    Panel {
        name: "imbalance",
        title: "The fullest rank sets the pace",
        x_label: "Rows of the fullest rank over the mean",
        y_label: "Dispatch + combine (ms)",
        doubles: false,
        corner: (910.0, 150.0),
        size: SIZE,
        legend: (16.0, 16.0),
    },
    Panel {
        name: "topk",
        title: "All-gather where tokens go nearly everywhere: 8 ranks",
        x_label: "Experts that a token goes to",
        y_label: "Dispatch + combine (ms)",
        doubles: false,
        corner: (110.0, 590.0),
        size: SIZE,
        legend: (16.0, 16.0),
    },
    Panel {
        name: "load",
        title: "Load of each rank, Zipf 0.6",
        x_label: "Ranks, the fullest first",
        y_label: "Rows over the mean",
        doubles: false,
        corner: (910.0, 590.0),
        size: SIZE,
        legend: (340.0, 16.0),
    },
];

/// Writes `exchange.svg` and `.png`.
pub fn exchange(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let sheet = Sheet::read(rows_csv)?;
    let first = sheet.lines().next().expect("a sheet has rows");
    let about = format!(
        "{} tokens a rank, hidden {}, on {}; predicted",
        first.text("tokens")?,
        first.text("hidden")?,
        first.text("cluster")?
    );
    let mut marks = vec![
        Mark::text(
            (60.0, 42.0),
            "Expert all-to-all: which library, how many ranks, how uneven",
            30.0,
            INK,
            Align::Left,
        ),
        Mark::text((60.0, 82.0), about, 19.0, FAINT, Align::Left),
    ];
    marks.extend(panel::draw(&sheet, &PANELS)?);
    save(&marks, out_dir, "exchange")
}
