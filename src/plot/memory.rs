//! What a GPU's memory holds at its fullest moment, by kind, and what there is.

use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::notes::Notes;
use super::sheet::Sheet;
use super::stacked::{Bar, Part, Picture, figure, read, shown};
use super::style::save;
use crate::error::Result;
use crate::report::human;

const PARTS: &[Part] = &[
    Part { column: "mem_params_bytes", name: "weights", color: RGBColor(38, 70, 120) },
    Part { column: "mem_grads_bytes", name: "gradients", color: RGBColor(64, 120, 190) },
    Part { column: "mem_optimizer_bytes", name: "optimizer state", color: RGBColor(140, 184, 224) },
    Part { column: "mem_activations_bytes", name: "saved activations", color: RGBColor(238, 140, 50) },
    Part { column: "mem_workspace_bytes", name: "workspace", color: RGBColor(246, 200, 110) },
    Part { column: "mem_comm_bytes", name: "communication", color: RGBColor(0, 140, 120) },
    Part { column: "mem_gaps_bytes", name: "gaps of placement", color: RGBColor(190, 194, 198) },
];

/// Bars below this part of the memory that there is are drawn on a scale of their own.
const SMALL: f64 = 0.05;

/// Writes `memory.svg` and `.png`.
pub fn memory(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut bars = read(rows_csv, PARTS, |_| Ok(1.0))?;
    let room = room(rows_csv)?;
    let (unit, name) = unit(&bars, room);
    bars.iter_mut().flat_map(|bar| &mut bar.parts).for_each(|part| *part /= unit);
    let room = room.map(|room| (room / unit, format!("{} are there", human::bytes(room))));
    save(&figure(&bars, &picture(&bars, name, room, &Notes::beside(rows_csv)?)), out_dir, "memory")
}

/// Bytes that a plan may need: the same in all rows that say it.
fn room(rows_csv: &Path) -> Result<Option<f64>> {
    let sheet = Sheet::read(rows_csv)?;
    for line in sheet.lines() {
        if let Some(bytes) = line.maybe("mem_room_bytes", "bytes", |b: &f64| *b > 0.0)? {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// The height of the highest bar.
fn highest(bars: &[Bar]) -> f64 {
    bars.iter().map(|b| b.parts.iter().sum()).fold(0.0, f64::max)
}

/// Of the axis, in bytes: GiB, or less where a page in GiB would have every bar at 0.
fn unit(bars: &[Bar], room: Option<f64>) -> (f64, &'static str) {
    let top = match room {
        Some(room) if highest(bars) >= SMALL * room => room,
        _ => highest(bars),
    };
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")].map(|(bytes, name)| (bytes as f64, name));
    units.into_iter().find(|(bytes, _)| top >= *bytes).unwrap_or(units[0])
}

fn picture(bars: &[Bar], unit: &str, room: Option<(f64, String)>, notes: &Notes) -> Picture {
    let highest = highest(bars);
    let top = match &room {
        Some((room, _)) if highest >= SMALL * room => highest.min(room * 1.3).max(room * 1.05),
        _ => highest,
    };
    let top = top.max(1.0);
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].into_iter().find(|s| top / s < 12.0).unwrap_or(100.0);
    Picture {
        title: "Memory of a GPU, by sequence length".into(),
        subtitle: bars[0].row.subtitle(shown(bars), notes),
        y_label: format!("Memory at its fullest moment ({unit})"),
        parts: PARTS,
        top: (top / step).ceil() * step,
        step,
        limit: room,
        remarks: &[
            "A bar: the fastest configuration",
            "of its family at that length; if",
            "none fits, the smallest one.",
            "The line: the GPU's memory less",
            "what CUDA and NCCL reserve.",
            "\"full\": with full recomputation.",
        ],
    }
}
