//! Effective training time: over the interval between checkpoints, and over the size of the cluster.

use super::panel::{self, Panel};
use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, INK, Mark, save};
use crate::error::Result;
use crate::report::human::long;
use std::path::{Path, PathBuf};

/// The series that are one point, of the panel over the interval, and what is said of it.
const POINTS: [(&str, &str); 2] = [("best interval", "best saved"), ("interval asked for", "saved, as asked for,")];

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
    let spares = |line: Line| line.text("spares").ok().filter(|n| !n.is_empty()).map(str::to_string);
    let waiting = sheet.lines().find_map(spares);
    let of = |(series, said): (&str, &'static str)| {
        let line = sheet.lines().find(|line| line.text("series").is_ok_and(|own| own == series))?;
        Some(
            line.value("interval_s", "a time above 0", |s: &f64| *s > 0.0)
                .map(|s| format!("; {said} every {}", long(s))),
        )
    };
    let about = format!(
        "{}, fleet {}, storage {}; expected in the long run{}{}",
        first.text("run")?,
        first.text("fleet")?,
        first.text("storage")?,
        waiting.map_or(String::new(), |n| format!(", as it is: played with {n} nodes that stand by")),
        POINTS.into_iter().find_map(of).transpose()?.unwrap_or_default()
    );
    let mut marks = vec![
        Mark::text((60.0, 42.0), "What failures and checkpoints leave of a training run", 30.0, INK, Align::Left),
        Mark::fitting((60.0, 82.0), about, 19.0, FAINT),
    ];
    marks.extend(panel::draw(&sheet, &PANELS)?);
    save(&marks, out_dir, "goodput")
}
