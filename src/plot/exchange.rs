//! Exchanges of a mixture-of-experts layer: four panels of curves, by ranks, imbalance, choices, and load.

use super::panel::{self, Panel};
use super::sheet::{Line, Sheet};
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
        from_zero: true,
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
        from_zero: true,
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
        from_zero: true,
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
        from_zero: true,
        corner: (910.0, 590.0),
        size: SIZE,
        legend: (340.0, 16.0),
    },
];

/// Writes `exchange.svg` and `.png`.
pub fn exchange(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let sheet = Sheet::read(rows_csv)?;
    let about = about(&sheet.lines().next().expect("a sheet has rows"))?;
    let mut marks = vec![
        Mark::text(
            (60.0, 42.0),
            "Expert all-to-all: which library, how many ranks, how uneven",
            30.0,
            INK,
            Align::Left,
        ),
        Mark::fitting((60.0, 82.0), about, 19.0, FAINT),
    ];
    marks.extend(panel::draw(&sheet, &PANELS)?);
    save(&marks, out_dir, "exchange")
}

/// What stays the same, of the first row. Older rows know less of it.
fn about(first: &Line) -> Result<String> {
    let mut parts = vec![format!("{} tokens a rank, hidden {}", first.text("tokens")?, first.text("hidden")?)];
    let experts = first.text("experts").map_or(String::new(), |n| format!(" of {n} experts"));
    parts.extend(first.text("topk").map(|topk| format!("top {topk}{experts}")));
    parts.extend(first.text("dtype").map(|dtype| format!("dispatched in {dtype}")));
    Ok(format!("{}, on {}; predicted", parts.join(", "), first.text("cluster")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heading_has_what_an_exchange_depends_on() {
        let dir = tempfile::tempdir().unwrap();
        let csv = dir.path().join("rows.csv");
        std::fs::write(&csv, "tokens,hidden,topk,experts,dtype,cluster\n4096,7168,8,256,fp8,dgx\n").unwrap();
        let sheet = Sheet::read(&csv).unwrap();
        let said = about(&sheet.lines().next().unwrap()).unwrap();
        assert_eq!(said, "4096 tokens a rank, hidden 7168, top 8 of 256 experts, dispatched in fp8, on dgx; predicted");
    }
}
