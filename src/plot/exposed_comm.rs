//! The time of a step in which nothing is computed, by what the ranks wait for.

use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::notes::Notes;
use super::stacked::{Bar, Part, Picture, figure, read, shown};
use super::style::save;
use crate::error::Result;

const PARTS: &[Part] = &[
    Part { column: "exposed_cp_s", name: "ring: keys, values", color: RGBColor(232, 89, 12) },
    Part { column: "exposed_up_s", name: "Ulysses: all-to-all", color: RGBColor(30, 110, 200) },
    Part { column: "exposed_tp_s", name: "tensor parallel", color: RGBColor(142, 84, 180) },
    Part { column: "exposed_ep_s", name: "experts: rows", color: RGBColor(150, 100, 60) },
    Part { column: "exposed_dp_s", name: "gradients, weights", color: RGBColor(0, 140, 120) },
    Part { column: "exposed_pp_s", name: "pipeline: activations", color: RGBColor(200, 70, 120) },
    Part { column: "exposed_offload_s", name: "host: copies, kernels", color: RGBColor(90, 60, 40) },
    Part { column: "bubble_s", name: "other ranks' work", color: RGBColor(150, 156, 162) },
    Part { column: "host_s", name: "CPU issues too late", color: RGBColor(236, 190, 52) },
];

/// Writes `exposed_comm.svg` and `.png`.
pub fn exposed_comm(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let percent = |line: &super::sheet::Line| {
        let step: f64 = line.value("step_time_s", "a time above 0", |s: &f64| *s > 0.0 && s.is_finite())?;
        Ok(100.0 / step)
    };
    let bars = read(rows_csv, PARTS, percent)?;
    save(&figure(&bars, &picture(&bars, &Notes::beside(rows_csv)?)), out_dir, "exposed_comm")
}

fn picture(bars: &[Bar], notes: &Notes) -> Picture {
    let highest = super::stacked::chosen(bars)
        .values()
        .flat_map(|of| of.values())
        .map(|b| b.parts.iter().sum())
        .fold(0.0, f64::max);
    let step = [1.0, 2.0, 5.0, 10.0, 20.0].into_iter().find(|s| highest / s < 9.0).unwrap_or(20.0);
    Picture {
        title: "Communication that nothing hides, by sequence length".into(),
        subtitle: bars[0].row.subtitle(shown(bars), notes),
        y_label: "Part of the step in which a GPU waits (%)".into(),
        parts: PARTS,
        top: ((highest / step).floor() + 1.0) * step,
        step,
        limit: None,
        remarks: &[
            "A bar: the fastest configuration",
            "of its family at that length.",
            "Its height: what of the step a",
            "GPU waits, mean over all.",
            "Communication behind kernels",
            "costs nothing here.",
            "\"full\": with full recomputation.",
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bar is as high as its configuration waits: whatever rows have a column for is stacked.
    #[test]
    fn whatever_is_waited_for_is_stacked() {
        let columns = include_str!("../../tests/golden/columns.txt").lines();
        let waits: Vec<&str> = columns.filter(|c| c.starts_with("exposed_") && *c != "exposed_comm_s").collect();
        assert!(waits.len() > 6, "{waits:?}");
        for column in waits.into_iter().chain(["bubble_s", "host_s"]) {
            assert!(PARTS.iter().any(|part| part.column == column), "{column}");
        }
    }
}
