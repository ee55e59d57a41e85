//! MFU against sequence length, a line for each way to split the sequence.
//!
//! Where a way runs in several configurations (microbatch, recompute), its line takes the best; where it runs in none,
//! a cross under the axis says so and why.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::notes::Notes;
use super::rows::{self, Row};
use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, Point, Shape, ramp, save, short};
use super::ways::{Best, Family, best, meaning};
use crate::error::Result;

/// Writes `mfu_vs_seqlen.svg` and `.png`, or one pair for each model, cluster, stack and size where the study has more.
pub fn mfu_vs_seqlen(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut machines: BTreeMap<(String, String, String, u64), Vec<Row>> = BTreeMap::new();
    for row in rows::read(rows_csv)? {
        let key = (row.model.clone(), row.cluster.clone(), row.stack.clone(), row.gpus);
        machines.entry(key).or_default().push(row);
    }
    let notes = Notes::beside(rows_csv)?;
    let one = machines.len() == 1;
    let mut written = Vec::new();
    for ((model, cluster, stack, gpus), rows) in &machines {
        let stem = match one {
            true => "mfu_vs_seqlen".to_string(),
            false => plain(&format!("mfu_vs_seqlen.{model}.{gpus}x{cluster}.{stack}")),
        };
        written.extend(save(&figure(rows, &notes), out_dir, &stem)?);
    }
    Ok(written)
}

/// Letters that every file system takes.
fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' }).collect()
}

/// Light for a low degree, dark for a high one.
const NO_SPLITS: [RGBColor; 1] = [RGBColor(110, 110, 110)];
const BLUES: [RGBColor; 3] = [RGBColor(116, 188, 240), RGBColor(30, 110, 200), RGBColor(8, 38, 100)];
const REDS: [RGBColor; 3] = [RGBColor(253, 176, 80), RGBColor(232, 89, 12), RGBColor(128, 10, 20)];
const GREENS: [RGBColor; 4] =
    [RGBColor(176, 206, 60), RGBColor(60, 165, 70), RGBColor(0, 140, 120), RGBColor(0, 66, 58)];
/// Hybrids of one degree are of nearly one shade: their dashes differ.
const DASHES: [(f64, f64); 4] = [(12.0, 4.0), (6.0, 4.0), (3.0, 3.0), (18.0, 6.0)];

impl Family {
    fn look(self) -> (Shape, &'static [RGBColor]) {
        match self {
            Family::NoSplit => (Shape::Triangle, &NO_SPLITS),
            Family::Ulysses => (Shape::Circle, &BLUES),
            Family::Ring => (Shape::Square, &REDS),
            Family::Usp => (Shape::Diamond, &GREENS),
        }
    }
}

struct Series {
    label: String,
    /// The label below its family's heading.
    short: String,
    family: Family,
    color: RGBColor,
    dash: Option<(f64, f64)>,
    points: BTreeMap<u64, Best>,
}

impl Series {
    fn shape(&self) -> Shape {
        self.family.look().0
    }

    fn runs(&self) -> bool {
        self.points.values().any(|p| matches!(p, Best::Mfu { .. }))
    }
}

/// Ways in the order of the legend, each with a colour: the shade is its place in its family.
fn series(rows: &[Row]) -> Vec<Series> {
    let all = best(rows);
    let mut sizes: BTreeMap<Family, usize> = BTreeMap::new();
    all.keys().for_each(|way| *sizes.entry(way.family).or_default() += 1);
    let mut seen: BTreeMap<Family, usize> = BTreeMap::new();
    let of_label = |label: &str| all.keys().filter(|w| w.label() == label).count();
    let mut list = Vec::new();
    for (way, points) in &all {
        let place = seen.entry(way.family).or_default();
        let color = ramp(way.family.look().1, (*place as f64 + 0.5) / sizes[&way.family] as f64);
        let mut label = way.label();
        if of_label(&label) > 1 {
            label = format!("{label}, {}", way.strategy);
        }
        let short =
            ["Ulysses ", "Ring ", "USP "].iter().find_map(|family| label.strip_prefix(family)).unwrap_or(&label);
        let short = short.replace(" (zigzag)", "");
        let dash = (way.family == Family::Usp).then_some(DASHES[*place % DASHES.len()]);
        list.push(Series { label, short, family: way.family, color, dash, points: points.clone() });
        *place += 1;
    }
    list
}

const LEFT: f64 = 128.0;
const RIGHT: f64 = 1276.0;
const TOP: f64 = 172.0;
const LEGEND: f64 = 1314.0;
const RADIUS: f64 = 6.0;
const CROSS: f64 = 4.0;

/// The part of the page inside the axes, and the strips of crosses below it.
struct Frame {
    lengths: BTreeSet<u64>,
    /// Of log2 of the length.
    x_range: (f64, f64),
    y_max: f64,
    bottom: f64,
    lanes: Vec<Lane>,
}

/// A strip of crosses of one reason.
struct Lane {
    reason: String,
    /// Rows of crosses in it, and crosses in a row.
    rows: usize,
    per_row: usize,
    top: f64,
}

const LANE_ROW: f64 = 15.0;
const LANE_PAD: f64 = 13.0;

impl Lane {
    fn height(&self) -> f64 {
        self.rows as f64 * LANE_ROW + LANE_PAD
    }
}

impl Frame {
    fn new(series: &[Series]) -> Frame {
        let lengths: BTreeSet<u64> = series.iter().flat_map(|s| s.points.keys().copied()).collect();
        let log = |length: Option<&u64>| length.map_or(0.0, |&l| (l as f64).log2());
        let x_range = (log(lengths.first()) - 0.5, log(lengths.last()) + 0.5);
        let octave = (RIGHT - LEFT) / (x_range.1 - x_range.0);
        let mut lanes = lanes(series, &lengths, (octave * 0.86 / (2.0 * CROSS + 4.0)) as usize);
        let mut top = f64::from(HEIGHT) - 48.0 - lanes.iter().map(Lane::height).sum::<f64>();
        let bottom = top - 44.0;
        for lane in &mut lanes {
            lane.top = top;
            top += lane.height();
        }
        let highest = series.iter().flat_map(|s| s.points.values()).filter_map(mfu).fold(0.0, f64::max);
        // Seven tenths is what a very good run reaches; every picture has it, so that pictures compare.
        let y_max = ((highest + 0.02) * 10.0).ceil().clamp(7.0, 10.0) / 10.0;
        Frame { lengths, x_range, y_max, bottom, lanes }
    }

    fn x(&self, length: u64) -> f64 {
        let (low, high) = self.x_range;
        LEFT + (RIGHT - LEFT) * ((length as f64).log2() - low) / (high - low)
    }

    fn y(&self, mfu: f64) -> f64 {
        self.bottom - (self.bottom - TOP) * mfu / self.y_max
    }
}

fn mfu(point: &Best) -> Option<f64> {
    match point {
        Best::Mfu { mfu, .. } => Some(*mfu),
        Best::Never(_) => None,
    }
}

/// The ways that fail at a length for a reason.
fn failing<'a>(series: &'a [Series], length: u64, reason: &'a str) -> impl Iterator<Item = &'a Series> {
    series.iter().filter(move |s| matches!(s.points.get(&length), Some(Best::Never(r)) if r == reason))
}

fn lanes(series: &[Series], lengths: &BTreeSet<u64>, per_row: usize) -> Vec<Lane> {
    let reasons: BTreeSet<&String> = series
        .iter()
        .flat_map(|s| s.points.values())
        .filter_map(|p| if let Best::Never(r) = p { Some(r) } else { None })
        .collect();
    let per_row = per_row.max(1);
    let lane = |reason: &String| {
        let most = lengths.iter().map(|&l| failing(series, l, reason).count()).max().unwrap_or(0);
        Lane { reason: reason.clone(), rows: most.div_ceil(per_row), per_row, top: 0.0 }
    };
    let mut lanes: Vec<Lane> = reasons.into_iter().map(lane).collect();
    // Memory is what one can do something about: it stands next to the axis.
    lanes.sort_by_key(|l| l.reason != "memory");
    lanes
}

fn figure(rows: &[Row], notes: &Notes) -> Vec<Mark> {
    let series = series(rows);
    let frame = Frame::new(&series);
    let mut marks = titles(rows, notes);
    marks.extend(axes(&frame));
    marks.extend(winners(&frame, &series));
    marks.extend(series.iter().flat_map(|s| lines(&frame, s)));
    // Markers stand above all lines.
    marks.extend((0..series.len()).flat_map(|i| markers(&frame, &series, i)));
    marks.extend(frame.lanes.iter().flat_map(|lane| crosses(&frame, lane, &series)));
    marks.extend(legend(&frame, &series));
    marks
}

fn titles(rows: &[Row], notes: &Notes) -> Vec<Mark> {
    let Row { model, cluster, stack, gpus, .. } = &rows[0];
    let title = match notes.text("title") {
        Some(title) => title,
        None => format!("MFU against sequence length: {model} on {gpus} GPUs of {cluster}"),
    };
    let stages: BTreeSet<String> = rows.iter().map(|r| format!("ZeRO {}", r.zero)).collect();
    let stages: Vec<String> = stages.into_iter().collect();
    let mut parts = vec![format!("{gpus} GPUs"), tokens_per_step(rows)];
    parts.extend(notes.text("dtype"));
    parts.push(stages.join(" or "));
    parts.push(format!("stack {stack}"));
    parts.push("the best microbatch and recomputation of each way".into());
    parts.push("model FLOPs, causal half, no recomputation".into());
    vec![
        Mark::text((LEFT, 42.0), title, 31.0, INK, Align::Left),
        Mark::text((LEFT, 82.0), parts.join("  \u{b7}  "), 17.0, FAINT, Align::Left),
    ]
}

fn tokens_per_step(rows: &[Row]) -> String {
    let steps: BTreeSet<u64> = rows.iter().map(|r| r.seq_len * r.global_batch).collect();
    match (steps.first(), steps.last()) {
        (Some(a), Some(b)) if a != b => format!("{} to {} tokens a step", short(*a), short(*b)),
        (Some(a), _) => format!("{} tokens a step", short(*a)),
        _ => String::new(),
    }
}

fn axes(frame: &Frame) -> Vec<Mark> {
    let mut marks = Vec::new();
    for tenth in 0..=(frame.y_max * 10.0).round() as u32 {
        let y = frame.y(f64::from(tenth) / 10.0);
        marks.push(Mark::line(&[(LEFT, y), (RIGHT, y)], GRID, 1.0));
        marks.push(Mark::text((LEFT - 12.0, y), format!("{} %", tenth * 10), 19.0, INK, Align::Right));
    }
    for power in frame.x_range.0.ceil() as u32..=frame.x_range.1.floor() as u32 {
        let x = frame.x(1 << power);
        marks.push(Mark::line(&[(x, TOP), (x, frame.bottom)], GRID, 1.0));
        marks.push(Mark::line(&[(x, frame.bottom), (x, frame.bottom + 7.0)], INK, 1.5));
        marks.push(Mark::text((x, frame.bottom + 24.0), short(1 << power), 20.0, INK, Align::Middle));
    }
    marks.push(Mark::line(&[(LEFT, TOP), (LEFT, frame.bottom), (RIGHT, frame.bottom)], INK, 1.5));
    let middle = (LEFT + RIGHT) / 2.0;
    let words = "Sequence length (tokens, 1K = 1024)";
    marks.push(Mark::text((middle, f64::from(HEIGHT) - 24.0), words, 19.0, INK, Align::Middle));
    marks.push(Mark::Text {
        at: (30.0, (TOP + frame.bottom) / 2.0),
        text: "MFU (of the dense bf16 peak)".into(),
        size: 19.0,
        color: INK,
        align: Align::Middle,
        upright: true,
    });
    marks
}

/// Above the axes: which way is best at each length, and what it reaches.
fn winners(frame: &Frame, series: &[Series]) -> Vec<Mark> {
    let mut marks = vec![Mark::text((LEFT - 12.0, 138.0), "best", 17.0, FAINT, Align::Right)];
    let mut free_from = LEFT - 20.0;
    for &length in &frame.lengths {
        let reached = |s: &Series| s.points.get(&length).and_then(mfu);
        // Of equals, the first: max_by takes the last.
        let best = series.iter().rev().filter_map(|s| Some((reached(s)?, s))).max_by(|a, b| a.0.total_cmp(&b.0));
        let x = frame.x(length);
        if x - 60.0 < free_from {
            continue;
        }
        free_from = x + 60.0;
        let (top, below, color) = match best {
            Some((mfu, s)) => (format!("{:.1} %", mfu * 100.0), s.label.replace(" (zigzag)", ""), s.color),
            None => ("none".into(), "fits".into(), FAINT),
        };
        marks.push(Mark::text((x, 126.0), top, 20.0, color, Align::Middle));
        marks.push(Mark::text((x, 150.0), below, 16.0, color, Align::Middle));
    }
    marks
}

/// A line breaks where the way does not run.
fn lines(frame: &Frame, series: &Series) -> Vec<Mark> {
    let mut pieces: Vec<Vec<Point>> = vec![Vec::new()];
    for &length in &frame.lengths {
        match series.points.get(&length) {
            Some(Best::Mfu { mfu, .. }) => {
                pieces.last_mut().expect("never empty").push((frame.x(length), frame.y(*mfu)));
            }
            Some(Best::Never(_)) => pieces.push(Vec::new()),
            // Not asked for is not infeasible: the line goes on.
            None => {}
        }
    }
    pieces.retain(|piece| piece.len() > 1);
    let Series { color, dash, .. } = *series;
    pieces.into_iter().map(|points| Mark::Line { points, color, width: 2.5, dash }).collect()
}

/// The markers of one of `all`. Where a later one lies on it, it is larger, so that its rim shows.
fn markers(frame: &Frame, all: &[Series], this: usize) -> Vec<Mark> {
    let series = &all[this];
    let mut marks = Vec::new();
    for (&length, point) in &series.points {
        let Best::Mfu { mfu: mine, full_recompute } = point else { continue };
        let y = frame.y(*mine);
        let hides =
            |s: &&Series| s.points.get(&length).and_then(mfu).is_some_and(|other| (frame.y(other) - y).abs() < 1.0);
        let hidden = all[this + 1..].iter().filter(hides).count().min(3);
        let (at, radius) = ((frame.x(length), y), RADIUS + 2.5 * hidden as f64);
        let (shape, color) = (series.shape(), series.color);
        marks.push(Mark::Marker { shape, at, radius, color, filled: !full_recompute });
    }
    marks
}

fn crosses(frame: &Frame, lane: &Lane, series: &[Series]) -> Vec<Mark> {
    let middle = lane.top + lane.height() / 2.0;
    let mut marks = vec![Mark::line(&[(LEFT, lane.top), (RIGHT, lane.top)], GRID, 1.0)];
    marks.push(Mark::text((LEFT - 12.0, middle), &lane.reason, 17.0, INK, Align::Right));
    let step = 2.0 * CROSS + 4.0;
    for &length in &frame.lengths {
        let failing: Vec<&Series> = failing(series, length, &lane.reason).collect();
        let rows: Vec<&[&Series]> = failing.chunks(lane.per_row).collect();
        for (i, row) in rows.iter().enumerate() {
            let y = middle + (i as f64 - (rows.len() - 1) as f64 / 2.0) * LANE_ROW;
            let left = frame.x(length) - (row.len() - 1) as f64 * step / 2.0;
            let at = |j: usize| (left + j as f64 * step, y);
            marks.extend(row.iter().enumerate().map(|(j, s)| Mark::Marker {
                shape: Shape::Cross,
                at: at(j),
                radius: CROSS,
                color: s.color,
                filled: true,
            }));
        }
    }
    marks
}

/// Lines by family, what a marker means, what a cross means; spaced to fit the page.
fn legend(frame: &Frame, series: &[Series]) -> Vec<Mark> {
    let families: BTreeSet<Family> = series.iter().map(|s| s.family).collect();
    let blocks: Vec<Block> = families.into_iter().map(|f| Block::new(f, series)).collect();
    // A family costs a heading and half a line of gap.
    let lines: f64 = blocks.iter().map(|b| b.lines() as f64 + 1.5).sum();
    let step = ((frame.bottom - TOP - 40.0) / lines).clamp(12.0, 27.0);
    let mut y = TOP - 46.0;
    let mut marks = Vec::new();
    for block in &blocks {
        marks.extend(block.marks(y, step));
        y += (block.lines() as f64 + 1.5) * step;
    }
    marks.extend(marker_notes(y + 6.0));
    if !frame.lanes.is_empty() {
        // Beside the crosses that it explains, unless the legend reaches as far.
        marks.extend(cross_notes(&frame.lanes, (y + 70.0).max(frame.bottom + 18.0)));
    }
    marks
}

/// The legend of a family: a heading, and its ways in one or two columns.
struct Block<'a> {
    family: Family,
    ways: Vec<&'a Series>,
    columns: usize,
}

impl<'a> Block<'a> {
    fn new(family: Family, series: &'a [Series]) -> Block<'a> {
        let ways: Vec<&Series> = series.iter().filter(|s| s.family == family).collect();
        let narrow = ways.iter().all(|s| s.short.len() < 12);
        Block { family, columns: if narrow && ways.len() > 2 { 2 } else { 1 }, ways }
    }

    fn lines(&self) -> usize {
        self.ways.len().div_ceil(self.columns)
    }

    fn marks(&self, top: f64, step: f64) -> Vec<Mark> {
        let size = (step * 0.8).min(17.0);
        let name = match self.family {
            Family::NoSplit => "Sequence not split",
            Family::Ulysses => "Ulysses",
            Family::Ring if self.ways.iter().all(|s| s.label.ends_with("(zigzag)")) => "Ring attention (zigzag)",
            Family::Ring => "Ring attention",
            Family::Usp => "USP (Ulysses x ring)",
        };
        let mut marks = vec![Mark::text((LEGEND, top), name, size + 1.0, INK, Align::Left)];
        for (i, way) in self.ways.iter().enumerate() {
            let (column, line) = (i / self.lines(), i % self.lines());
            let at = (LEGEND + 4.0 + column as f64 * 138.0, top + (line as f64 + 1.1) * step);
            marks.extend(legend_line(way, at, size));
        }
        marks
    }
}

fn legend_line(series: &Series, (x, y): Point, size: f64) -> Vec<Mark> {
    let color = series.color;
    let mut marks = vec![Mark::text((x + 44.0, y), &series.short, size, INK, Align::Left)];
    let at = (x + 18.0, y);
    if series.runs() {
        marks.push(Mark::Line { points: vec![(x, y), (x + 36.0, y)], color, width: 2.5, dash: series.dash });
        marks.push(Mark::Marker { shape: series.shape(), at, radius: RADIUS, color, filled: true });
    } else {
        marks.push(Mark::Marker { shape: Shape::Cross, at, radius: CROSS, color, filled: true });
    }
    marks
}

fn marker_notes(top: f64) -> Vec<Mark> {
    let note = |i: usize, filled: bool, words: &str| {
        let y = top + i as f64 * 24.0;
        let marker =
            Mark::Marker { shape: Shape::Circle, at: (LEGEND + 22.0, y), radius: RADIUS, color: FAINT, filled };
        [marker, Mark::text((LEGEND + 48.0, y), words, 16.0, INK, Align::Left)]
    };
    [note(0, true, "without recomputation"), note(1, false, "with full recomputation")].concat()
}

fn cross_notes(lanes: &[Lane], top: f64) -> Vec<Mark> {
    let at = (LEGEND + 22.0, top);
    let mut marks = vec![
        Mark::Marker { shape: Shape::Cross, at, radius: CROSS, color: INK, filled: true },
        Mark::text((LEGEND + 48.0, top), "does not run:", 16.0, INK, Align::Left),
    ];
    for (i, lane) in lanes.iter().enumerate() {
        let words = format!("{}: {}", lane.reason, meaning(&lane.reason));
        marks.push(Mark::text((LEGEND, top + (i + 1) as f64 * 21.0), words, 14.5, FAINT, Align::Left));
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::super::style::WIDTH;
    use super::super::ways::reason;
    use super::*;

    fn row(seq_len: u64, (ulysses, ring): (u32, u32), recompute: &str, mfu: std::result::Result<f64, &str>) -> Row {
        let word = |s: &str| s.to_string();
        let strategy = word(match (ulysses > 1, ring > 1) {
            (false, false) => "none",
            (true, false) => "ulysses",
            (false, true) => "ring",
            (true, true) => "usp",
        });
        let (model, cluster, stack) = (word("llama-3-8b"), word("a-cluster"), word("a-stack"));
        let (recompute, mfu) = (word(recompute), mfu.map_err(word));
        let global_batch = (1 << 22) / seq_len;
        Row { model, cluster, stack, gpus: 64, seq_len, global_batch, ulysses, ring, zero: 1, strategy, recompute, mfu }
    }

    fn study() -> Vec<Row> {
        let mut rows = Vec::new();
        for length in (13..=20).map(|p| 1 << p) {
            for degrees in [(1, 1), (8, 1), (32, 1), (64, 1), (1, 16), (8, 2), (4, 16)] {
                let fits = length / u64::from(degrees.0 * degrees.1) <= 1 << 15;
                let result = match (degrees.0, fits) {
                    (64, _) => Err("heads: heads 32 is not divisible by ulysses 64; use 2, 4, 8, 16 or 32"),
                    (_, false) => Err("memory: 103 GiB at the peak, there are 80"),
                    (..) => Ok(0.5 - 0.002 * f64::from(degrees.0 + 2 * degrees.1)),
                };
                rows.push(row(length, degrees, "none", result));
                rows.push(row(length, degrees, "full", result.map(|mfu| mfu * 0.8)));
            }
        }
        rows
    }

    fn csv_of(rows: &[Row]) -> String {
        let head =
            "model,cluster,stack,gpus,seq_len,global_batch,ulysses,ring,zero,recompute,strategy,feasible,why,mfu";
        let line = |r: &Row| {
            let (why, mfu) =
                (r.mfu.clone().err().unwrap_or_default(), r.mfu.clone().map_or(String::new(), |m| m.to_string()));
            let front = format!("{},{},{},{},{},{}", r.model, r.cluster, r.stack, r.gpus, r.seq_len, r.global_batch);
            let back = format!("{},{},\"{why}\",{mfu}", r.strategy, r.mfu.is_ok());
            format!("\n{front},{},{},{},{},{back}", r.ulysses, r.ring, r.zero, r.recompute)
        };
        rows.iter().map(line).fold(head.to_string(), |all, line| all + &line)
    }

    fn written(rows: &[Row]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        std::fs::write(&path, csv_of(rows)).unwrap();
        let files = mfu_vs_seqlen(&path, dir.path()).unwrap();
        (dir, files)
    }

    fn best_of(rows: &[Row]) -> Best {
        let all = best(rows);
        assert_eq!(all.len(), 1);
        all.values().next().unwrap()[&8192].clone()
    }

    #[test]
    fn a_line_takes_the_best_that_fits() {
        let at = |recompute, mfu| row(8192, (8, 1), recompute, mfu);
        let no_room = Err("memory: 90 GiB at the peak, there are 80");
        let both = [at("none", Ok(0.5)), at("full", Ok(0.4)), at("none", Ok(0.3))];
        assert_eq!(best_of(&both), Best::Mfu { mfu: 0.5, full_recompute: false });
        let full = [at("none", no_room), at("full", Ok(0.4))];
        assert_eq!(best_of(&full), Best::Mfu { mfu: 0.4, full_recompute: true });
        let never = [at("none", Err("batch: 1 is less than 2")), at("full", no_room)];
        assert_eq!(best_of(&never), Best::Never("memory".into()));
    }

    #[test]
    fn a_reason_is_the_word_before_the_colon_or_the_first_words() {
        assert_eq!(reason("memory: 90 GiB at the peak"), "memory");
        assert_eq!(reason("too many ranks for this"), "too many");
        assert_eq!(reason(""), "unsaid");
    }

    #[test]
    fn ways_are_named_and_ordered_by_family_and_degree() {
        let degrees = [(8, 4), (1, 16), (16, 1), (1, 1), (8, 1), (1, 2)];
        let mut rows = degrees.map(|d| row(8192, d, "none", Ok(0.4))).to_vec();
        let labels = |rows: &[Row]| series(rows).into_iter().map(|s| s.label).collect::<Vec<_>>();
        let all = ["no split", "Ulysses 8", "Ulysses 16", "Ring 2 (zigzag)", "Ring 16 (zigzag)", "USP 8 x 4"];
        assert_eq!(labels(&rows), all);
        rows.truncate(1);
        rows.push(Row { strategy: "other".into(), ..rows[0].clone() });
        assert_eq!(labels(&rows), ["USP 8 x 4, other", "USP 8 x 4, usp"]);
    }

    #[test]
    fn every_point_is_a_marker_or_a_cross() {
        let rows = study();
        let series = series(&rows);
        let frame = Frame::new(&series);
        let count = |marks: Vec<Mark>| marks.iter().filter(|m| matches!(m, Mark::Marker { .. })).count();
        let points: usize = (0..series.len()).map(|i| count(markers(&frame, &series, i))).sum();
        let crossed: usize = frame.lanes.iter().map(|lane| count(crosses(&frame, lane, &series))).sum();
        assert_eq!(points + crossed, 8 * 7);
        assert!(points > 20 && crossed > 8, "{points} {crossed}");
        let reasons: Vec<&str> = frame.lanes.iter().map(|l| l.reason.as_str()).collect();
        assert_eq!(reasons, ["memory", "heads"]);
    }

    #[test]
    fn of_equals_the_lower_degree_wins() {
        let series = series(&[row(8192, (2, 1), "none", Ok(0.5)), row(8192, (8, 1), "none", Ok(0.5))]);
        let said = format!("{:?}", winners(&Frame::new(&series), &series));
        assert!(said.contains("Ulysses 2") && !said.contains("Ulysses 8"), "{said}");
    }

    #[test]
    fn a_marker_under_another_shows_its_rim() {
        let rows = [
            row(8192, (8, 1), "none", Ok(0.5)),
            row(8192, (1, 8), "none", Ok(0.5)),
            row(8192, (4, 4), "none", Ok(0.3)),
        ];
        let series = series(&rows);
        let frame = Frame::new(&series);
        let radius = |i| match &markers(&frame, &series, i)[..] {
            [Mark::Marker { radius, .. }] => *radius,
            other => panic!("{other:?}"),
        };
        assert_eq!([radius(0), radius(1), radius(2)], [RADIUS + 2.5, RADIUS, RADIUS]);
    }

    #[test]
    fn marks_stay_on_the_page() {
        let inside = |&(x, y): &Point| (0.0..=f64::from(WIDTH)).contains(&x) && (0.0..=f64::from(HEIGHT)).contains(&y);
        for mark in figure(&study(), &Notes::none()) {
            let fits = match &mark {
                Mark::Line { points, .. } => points.iter().all(inside),
                Mark::Rect { from, to, .. } => inside(from) && inside(to),
                Mark::Marker { at, .. } | Mark::Text { at, .. } => inside(at),
            };
            assert!(fits, "{mark:?}");
        }
    }

    #[test]
    fn both_files_are_written_and_show_something() {
        let (dir, files) = written(&study());
        assert_eq!(files, ["svg", "png"].map(|e| dir.path().join(format!("mfu_vs_seqlen.{e}"))));
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        for words in [
            "MFU against sequence length: llama-3-8b on 64 GPUs of a-cluster",
            "4M tokens a step",
            "512K",
            "memory",
            "4 x 16",
        ] {
            assert!(svg.contains(words), "{words} is not in the SVG");
        }
        let png = std::fs::read(&files[1]).unwrap();
        let number = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
        // Width and height stand in the first chunk, after the signature and the chunk's head.
        assert_eq!((&png[1..4], number(16), number(20)), (&b"PNG"[..], 1600, 1000));
        assert!(png.len() > 50_000, "{} bytes", png.len());
    }

    #[test]
    fn two_machines_are_two_pictures() {
        let one = row(8192, (8, 1), "none", Ok(0.5));
        let (_dir, files) = written(&[one.clone(), Row { gpus: 128, model: "a/b".into(), ..one }]);
        let names: Vec<_> = files.iter().map(|f| f.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names[0], "mfu_vs_seqlen.a-b.128xa-cluster.a-stack.svg");
        assert_eq!(names[3], "mfu_vs_seqlen.llama-3-8b.64xa-cluster.a-stack.png");
    }

    #[test]
    fn a_study_where_nothing_fits_is_still_drawn() {
        let (_dir, files) = written(&[row(12_000, (8, 1), "none", Err("no colon here"))]);
        assert!(std::fs::read_to_string(&files[0]).unwrap().contains("no colon"));
    }

    #[test]
    fn study_json_gives_title_and_dtype() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("study.json");
        std::fs::write(&path, r#"{"title": "Mine", "dtype": "bf16", "more": 1}"#).unwrap();
        let svg_of = |notes: &Notes| format!("{:?}", titles(&study(), notes));
        let text = svg_of(&Notes::beside(&path).unwrap());
        assert!(text.contains("Mine") && text.contains("bf16"), "{text}");
        std::fs::write(&path, "{").unwrap();
        assert!(Notes::beside(&path).is_err_and(|e| e.to_string().contains("study.json")));
    }
}
