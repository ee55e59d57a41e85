//! Effective training time: over the interval between checkpoints, and over the size of the cluster.

use super::panel::{self, Panel};
use super::sheet::Sheet;
use super::style::{Align, FAINT, INK, Mark, save};
use crate::error::Result;
use crate::report::human::long;
use std::path::{Path, PathBuf};

/// The series that is one point, of the panel over the interval.
const BEST: &str = "best interval";

const PANELS: [Panel; 2] = [
    Panel {
        name: "interval",
        title: "How often to save",
        x_label: "Minutes of training between checkpoints",
        y_label: "Effective training time (%)",
        doubles: true,
        from_zero: false,
        corner: (110.0, 170.0),
        size: (600.0, 660.0),
        legend: (16.0, 540.0),
    },
    Panel {
        name: "gpus",
        title: "What more GPUs leave, at the best interval",
        x_label: "GPUs",
        y_label: "Effective training time (%)",
        doubles: true,
        from_zero: false,
        corner: (910.0, 170.0),
        size: (600.0, 660.0),
        legend: (16.0, 540.0),
    },
];

/// Writes `goodput.svg` and `.png`.
pub fn goodput(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let sheet = Sheet::read(rows_csv)?;
    let first = sheet.lines().next().expect("a sheet has rows");
    let best = sheet.lines().find(|line| matches!(line.text("series"), Ok(BEST)));
    let best = best.map(|line| line.value("interval_s", "a time above 0", |s: &f64| *s > 0.0)).transpose()?;
    let about = format!(
        "{}, fleet {}, storage {}; expected in the long run{}",
        first.text("run")?,
        first.text("fleet")?,
        first.text("storage")?,
        best.map_or(String::new(), |s| format!("; best saved every {}", long(s)))
    );
    let mut marks = vec![
        Mark::text((60.0, 42.0), "What failures and checkpoints leave of a training run", 30.0, INK, Align::Left),
        Mark::fitting((60.0, 82.0), about, 19.0, FAINT),
    ];
    marks.extend(panel::draw(&sheet, &PANELS)?);
    save(&marks, out_dir, "goodput")
}
