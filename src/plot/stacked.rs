//! Stacked bars over sequence lengths, a panel for each family of ways, each bar the family's best configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use plotters::style::RGBColor;

use super::rows::{Row, several_batches, stages};
use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, PAPER, break_of, short, with_room};
use super::ways::{Family, Kind, Way, why_none};
use crate::error::{Error, Result};

/// A configuration with the columns that a picture stacks.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    pub row: Row,
    /// In the order of the parts; all 0 where the configuration has none.
    pub parts: Vec<f64>,
}

impl Bar {
    fn total(&self) -> f64 {
        self.parts.iter().sum()
    }
}

/// A column, what it means, its colour.
pub struct Part {
    pub column: &'static str,
    pub name: &'static str,
    pub color: RGBColor,
}

/// What is stacked, and how it is said.
pub struct Picture {
    pub title: String,
    pub subtitle: Vec<String>,
    pub y_label: String,
    pub parts: &'static [Part],
    /// Of the y axis.
    pub top: f64,
    /// Between labels of the y axis.
    pub step: f64,
    /// Drawn as a line where it is no higher than the page; else in words alone.
    pub limit: Option<(f64, String)>,
    /// Below the legend.
    pub remarks: &'static [&'static str],
}

/// The rows of a file, each with its parts; `scale` multiplies them. Rows of more than one model, cluster, stack or
/// size do not belong into one picture: only the first of them are taken.
pub fn read(path: &Path, parts: &[Part], scale: impl Fn(&Line) -> Result<f64>) -> Result<Vec<Bar>> {
    let mut bars: Vec<Bar> = Vec::new();
    for line in Sheet::read(path)?.lines() {
        let row = Row::of(&line)?;
        if bars.first().is_some_and(|first| first.row.machine() != row.machine()) {
            continue;
        }
        let known = !line.text(parts[0].column)?.is_empty();
        let scale = if known { scale(&line)? } else { 0.0 };
        let part = |part: &Part| match known {
            true => line.value(part.column, "a number of at least 0", |v: &f64| *v >= 0.0).map(|v| v * scale),
            false => line.text(part.column).map(|_| 0.0),
        };
        let parts = parts.iter().map(part).collect::<Result<Vec<f64>>>()?;
        bars.push(Bar { row, parts });
    }
    match bars.is_empty() {
        true => Err(Error::spec(path.display(), "rows", "there are 0 rows; run the sweep again")),
        false => Ok(bars),
    }
}

/// The rows that have a bar; where none has, all.
pub fn shown(bars: &[Bar]) -> impl Iterator<Item = &Row> {
    let with: Vec<&Row> = chosen(bars).into_values().flat_map(|of| of.into_values().map(|bar| &bar.row)).collect();
    let with = if with.is_empty() { bars.iter().map(|bar| &bar.row).collect() } else { with };
    with.into_iter()
}

/// For each family and length the fastest configuration; where none runs, the one of the smallest total, if any has one.
pub fn chosen(bars: &[Bar]) -> BTreeMap<Family, BTreeMap<u64, &Bar>> {
    let mut all: BTreeMap<Family, BTreeMap<u64, &Bar>> = BTreeMap::new();
    for bar in bars.iter().filter(|b| b.total() > 0.0 || b.row.mfu.is_ok()) {
        let of_family = all.entry(Way::of(&bar.row).family).or_default();
        let old = of_family.entry(bar.row.seq_len).or_insert(bar);
        let better = match (&bar.row.mfu, &old.row.mfu) {
            (Ok(a), Ok(b)) => a > b,
            (Ok(_), Err(_)) => true,
            (Err(_), Ok(_)) => false,
            (Err(_), Err(_)) => bar.total() < old.total(),
        };
        if better {
            *old = bar;
        }
    }
    all
}

const LEFT: f64 = 96.0;
const RIGHT: f64 = 1330.0;
const TOP: f64 = 156.0;
const BOTTOM: f64 = HEIGHT as f64 - 130.0;
const GAP: f64 = 20.0;
const LEGEND: f64 = 1356.0;

/// The page: panels side by side on one scale.
struct Frame<'a> {
    picture: &'a Picture,
    lengths: Vec<u64>,
    panels: usize,
    /// How many stages of ZeRO the bars have.
    stages: usize,
    /// Lengths that have several batches.
    batches: BTreeSet<u64>,
}

impl Frame<'_> {
    fn width(&self) -> f64 {
        (RIGHT - LEFT - GAP * (self.panels - 1) as f64) / self.panels as f64
    }

    fn left(&self, panel: usize) -> f64 {
        LEFT + panel as f64 * (self.width() + GAP)
    }

    /// The middle of a bar.
    fn x(&self, panel: usize, length: u64) -> f64 {
        let place = self.lengths.iter().position(|&l| l == length).expect("every length has a place");
        self.left(panel) + self.width() * (place as f64 + 0.5) / self.lengths.len() as f64
    }

    fn bar_width(&self) -> f64 {
        0.74 * self.width() / self.lengths.len() as f64
    }

    fn y(&self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * (value / self.picture.top).clamp(0.0, 1.0)
    }
}

pub fn figure(bars: &[Bar], picture: &Picture) -> Vec<Mark> {
    let chosen = panels(bars);
    let lengths: BTreeSet<u64> = bars.iter().map(|b| b.row.seq_len).collect();
    let stages = stages(shown(bars)).len();
    let batches = several_batches(bars.iter().map(|bar| &bar.row));
    let frame = Frame { picture, lengths: lengths.into_iter().collect(), panels: chosen.len(), stages, batches };
    let mut marks = vec![
        Mark::fitting((34.0, 42.0), &picture.title, 29.0, INK),
        Mark::fitting((34.0, 82.0), picture.subtitle.join("  \u{b7}  "), 16.5, FAINT),
    ];
    marks.extend(grid(&frame));
    for (panel, (family, of_family)) in chosen.iter().enumerate() {
        let middle = frame.left(panel) + frame.width() / 2.0;
        marks.push(Mark::text((middle, TOP - 26.0), family.title(), 18.0, INK, Align::Middle));
        marks.extend(of_family.values().flat_map(|bar| bar_marks(&frame, panel, bar)));
        let missing = frame.lengths.iter().filter(|length| !of_family.contains_key(length));
        marks.extend(missing.map(|&length| nothing(&frame, panel, length, bars, *family)));
        marks.extend(ticks(&frame, panel, of_family));
    }
    marks.extend(limit(&frame));
    for (panel, of_family) in chosen.values().enumerate() {
        marks.extend(of_family.values().flat_map(|bar| number(&frame, panel, bar)));
    }
    match chosen.values().all(BTreeMap::is_empty) {
        true => marks.extend(nothing_at_all(bars)),
        false => marks.extend(legend(&frame, &chosen)),
    }
    marks
}

/// The families that have bars; where none has, all, so that they say why.
fn panels(bars: &[Bar]) -> BTreeMap<Family, BTreeMap<u64, &Bar>> {
    let chosen = chosen(bars);
    if !chosen.is_empty() {
        return chosen;
    }
    bars.iter().map(|bar| (Way::of(&bar.row).family, BTreeMap::new())).collect()
}

/// In place of the legend.
fn nothing_at_all(bars: &[Bar]) -> Vec<Mark> {
    let whys: BTreeSet<Kind> = bars.iter().filter_map(|bar| why_none([&bar.row].into_iter())).collect();
    let words = whys.iter().flat_map(|why| [format!("{}:", why.word), format!("  {}", why.meaning())]);
    let line = |(i, words): (usize, String)| {
        Mark::text((LEGEND, TOP + 40.0 + 19.0 * i as f64), words, 13.5, FAINT, Align::Left)
    };
    let head = Mark::text((LEGEND, TOP + 10.0), "Nothing runs", 18.0, INK, Align::Left);
    [head].into_iter().chain(words.enumerate().map(line)).collect()
}

fn grid(frame: &Frame) -> Vec<Mark> {
    let mut marks = Vec::new();
    let steps = (frame.picture.top / frame.picture.step + 1e-9) as u32;
    for step in 0..=steps {
        let value = f64::from(step) * frame.picture.step;
        let y = frame.y(value);
        for panel in 0..frame.panels {
            let left = frame.left(panel);
            marks.push(Mark::line(&[(left, y), (left + frame.width(), y)], GRID, 1.0));
        }
        marks.push(Mark::text((LEFT - 10.0, y), value, 16.0, INK, Align::Right));
    }
    marks.push(Mark::Text {
        at: (30.0, (TOP + BOTTOM) / 2.0),
        text: frame.picture.y_label.clone(),
        size: 18.0,
        color: INK,
        align: Align::Middle,
        upright: true,
    });
    let words = "Sequence length (tokens, 1K = 1024), and below it the degree of the best configuration";
    marks.push(Mark::text(((LEFT + RIGHT) / 2.0, f64::from(HEIGHT) - 26.0), words, 16.5, INK, Align::Middle));
    marks
}

/// What does not run is pale; what is higher than the page is cut, with its number.
fn bar_marks(frame: &Frame, panel: usize, bar: &Bar) -> Vec<Mark> {
    let (x, half) = (frame.x(panel, bar.row.seq_len), frame.bar_width() / 2.0);
    let runs = bar.row.mfu.is_ok();
    let mut marks = Vec::new();
    let mut below = 0.0;
    for (part, value) in frame.picture.parts.iter().zip(&bar.parts).filter(|(_, v)| **v > 0.0) {
        let (from, to) = ((x - half, frame.y(below + value)), (x + half, frame.y(below)));
        below += value;
        let color = if runs { part.color } else { pale(part.color) };
        if to.1 - from.1 > 0.05 {
            marks.push(Mark::Rect { from, to, color });
        }
    }
    if below > frame.picture.top {
        marks.extend(break_of((x, TOP + 16.0), half + 3.0, true));
    }
    marks
}

/// What a bar comes to, above it, and above the line of the limit.
fn number(frame: &Frame, panel: usize, bar: &Bar) -> Vec<Mark> {
    let (x, half) = (frame.x(panel, bar.row.seq_len), frame.bar_width() / 2.0);
    let (size, all) = ((half * 0.75).clamp(9.0, 13.5), bar.total());
    let (text, y) = match all > frame.picture.top {
        true => (format!("{all:.0}"), TOP - 8.0),
        false => (figure_of(all), frame.y(all) - 9.0),
    };
    let crossed = frame.picture.limit.as_ref().is_some_and(|(limit, _)| (frame.y(*limit) - y).abs() < 0.75 * size);
    let wide = 0.32 * size * text.len() as f64 + 1.5;
    let (from, to) = ((x - wide, y - 0.6 * size), (x + wide, y + 0.5 * size));
    let behind = crossed.then_some(Mark::Rect { from, to, color: PAPER });
    let color = if bar.row.mfu.is_ok() { INK } else { FAINT };
    behind.into_iter().chain([Mark::text((x, y), text, size, color, Align::Middle)]).collect()
}

fn figure_of(value: f64) -> String {
    match value {
        v if v < 0.05 => "0".into(),
        v if v < 9.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

fn pale(color: RGBColor) -> RGBColor {
    super::style::ramp(&[color, PAPER], 0.68)
}

/// Where a family has no bar, why.
fn nothing(frame: &Frame, panel: usize, length: u64, bars: &[Bar], family: Family) -> Mark {
    let of_family = bars.iter().filter(|b| b.row.seq_len == length && Way::of(&b.row).family == family);
    let why = why_none(of_family.map(|bar| &bar.row)).map_or("-".into(), |kind| kind.word);
    let at = (frame.x(panel, length), BOTTOM - 8.0 - 4.0 * why.len() as f64);
    Mark::Text { at, text: why, size: 13.0, color: FAINT, align: Align::Middle, upright: true }
}

fn ticks(frame: &Frame, panel: usize, of_family: &BTreeMap<u64, &Bar>) -> Vec<Mark> {
    let size = (frame.bar_width() * 0.46).clamp(9.5, 14.0);
    let left = frame.left(panel);
    let mut marks = vec![Mark::line(&[(left, BOTTOM), (left + frame.width(), BOTTOM)], INK, 1.5)];
    let places: Vec<(u64, f64)> = frame.lengths.iter().map(|&length| (length, frame.x(panel, length))).collect();
    let (named, of_names) = with_room(&places, size);
    for &length in &frame.lengths {
        let x = frame.x(panel, length);
        if named.contains(&length) {
            marks.push(Mark::text((x, BOTTOM + 17.0), short(length), of_names, INK, Align::Middle));
        }
        let Some(bar) = of_family.get(&length) else { continue };
        let words = label(&bar.row, frame.stages, frame.batches.contains(&length));
        // A letter is about 0.6 of its size wide.
        let longest = words.iter().map(String::len).max().unwrap_or(0);
        if 0.6 * size * longest as f64 > frame.width() / frame.lengths.len() as f64 {
            marks.extend(standing(x, &words, frame.width() / frame.lengths.len() as f64));
            continue;
        }
        let apart = if words.len() > 2 { 16.0 } else { 20.0 };
        for (line, words) in words.into_iter().enumerate() {
            marks.push(Mark::text((x, BOTTOM + 40.0 + apart * line as f64), words, size, FAINT, Align::Middle));
        }
    }
    marks
}

/// How the work of a bar is split, with the stage of ZeRO where not all bars have one, its batch where there are several,
/// and what it computes again.
fn label(row: &Row, stages: usize, batches: bool) -> Vec<String> {
    let mut words = vec![Way::of(row).split()];
    words.extend((row.ep > 1).then(|| format!("ep {}", row.ep)));
    words.extend((stages > 1).then(|| format!("ZeRO {}", row.zero)));
    words.extend(batches.then(|| format!("batch {}", row.global_batch)));
    words.extend(match &row.recompute[..] {
        "none" => None,
        "full" => Some("full".into()),
        _ => Some("sel.".into()),
    });
    words
}

/// Words that have no room to lie: upright, side by side where they would run into the words below them.
fn standing(x: f64, words: &[String], room: f64) -> Vec<Mark> {
    const MOST: usize = 13;
    let mut columns: Vec<String> = vec![];
    for word in words.iter().flat_map(|words| words.split(", ")) {
        match columns.last_mut().filter(|column| column.len() + 2 + word.len() <= MOST) {
            Some(column) => *column = format!("{column}, {word}"),
            None => columns.push(word.into()),
        }
    }
    let middle = (columns.len() as f64 - 1.0) / 2.0;
    let apart = (room / columns.len() as f64).min(11.0);
    let mark = |(i, text): (usize, String)| {
        let at = (x + apart * (i as f64 - middle), BOTTOM + 28.0 + 2.65 * text.len() as f64);
        Mark::Text { at, text, size: (0.95 * apart).min(10.0), color: FAINT, align: Align::Middle, upright: true }
    };
    columns.into_iter().enumerate().map(mark).collect()
}

fn limit(frame: &Frame) -> Vec<Mark> {
    let Some((value, words)) = &frame.picture.limit else { return vec![] };
    let y = frame.y(*value);
    if *value > frame.picture.top {
        return vec![Mark::text((LEGEND - 18.0, y), format!("{words}, far above"), 14.0, INK, Align::Left)];
    }
    let line = |panel| {
        let left = frame.left(panel);
        let points = vec![(left, y), (left + frame.width(), y)];
        Mark::Line { points, color: INK, width: 2.0, dash: Some((9.0, 5.0)) }
    };
    let mut marks: Vec<Mark> = (0..frame.panels).map(line).collect();
    marks.push(Mark::text((LEGEND - 18.0, y), words, 14.0, INK, Align::Left));
    marks
}

/// The parts that occur, the topmost first, as they are stacked.
fn legend(frame: &Frame, chosen: &BTreeMap<Family, BTreeMap<u64, &Bar>>) -> Vec<Mark> {
    let bars = || chosen.values().flat_map(|of| of.values());
    let occurs = |i: usize| bars().any(|bar| bar.parts[i] > 0.0);
    let mut marks = Vec::new();
    let mut y = frame.picture.limit.as_ref().map_or(TOP + 30.0, |(value, _)| frame.y(*value) + 40.0);
    for (_, part) in frame.picture.parts.iter().enumerate().rev().filter(|(i, _)| occurs(*i)) {
        marks.push(Mark::Rect { from: (LEGEND, y - 8.0), to: (LEGEND + 24.0, y + 8.0), color: part.color });
        marks.push(Mark::text((LEGEND + 34.0, y), part.name, 15.0, INK, Align::Left));
        y += 27.0;
    }
    if bars().any(|bar| bar.row.mfu.is_err()) {
        let color = pale(frame.picture.parts[0].color);
        marks.push(Mark::Rect { from: (LEGEND, y - 8.0), to: (LEGEND + 24.0, y + 8.0), color });
        marks.push(Mark::text((LEGEND + 34.0, y), "pale: does not run", 15.0, INK, Align::Left));
        y += 27.0;
    }
    for (i, words) in frame.picture.remarks.iter().enumerate() {
        marks.push(Mark::text((LEGEND, y + 14.0 + 19.0 * i as f64), words, 13.5, FAINT, Align::Left));
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::super::style::Point;
    use super::*;

    const PARTS: &[Part] =
        &[Part { column: "a", name: "A", color: INK }, Part { column: "b", name: "B", color: RGBColor(200, 0, 0) }];

    fn bar(seq_len: u64, (ulysses, ring): (u32, u32), mfu: std::result::Result<f64, &str>, parts: [f64; 2]) -> Bar {
        let row = Row {
            model: "m".into(),
            cluster: "c".into(),
            stack: "s".into(),
            gpus: 64,
            seq_len,
            global_batch: 8,
            tp: 1,
            pp: 1,
            vp: 1,
            ulysses,
            ring,
            ep: 1,
            zero: 1,
            options: "default".into(),
            strategy: "x".into(),
            recompute: "none".into(),
            mfu: mfu.map_err(Into::into),
        };
        Bar { row, parts: parts.to_vec() }
    }

    fn picture(top: f64) -> Picture {
        let title = "T".to_string();
        Picture {
            title,
            subtitle: vec![],
            y_label: "y".into(),
            parts: PARTS,
            top,
            step: 1.0,
            limit: None,
            remarks: &[],
        }
    }

    #[test]
    fn the_fastest_of_a_family_is_chosen_and_the_smallest_where_none_runs() {
        let bars = [
            bar(8, (8, 1), Ok(0.3), [1.0, 1.0]),
            bar(8, (16, 1), Ok(0.4), [2.0, 2.0]),
            bar(8, (32, 1), Err("memory: much"), [0.1, 0.1]),
            bar(16, (8, 1), Err("memory: more"), [9.0, 9.0]),
            bar(16, (16, 1), Err("memory: much"), [8.0, 8.0]),
            bar(16, (1, 8), Err("batch: few"), [0.0, 0.0]),
        ];
        let all = chosen(&bars);
        assert_eq!(all.keys().collect::<Vec<_>>(), [&Family::Ulysses]);
        assert_eq!([all[&Family::Ulysses][&8], all[&Family::Ulysses][&16]], [&bars[1], &bars[4]]);
    }

    #[test]
    fn parts_stand_on_each_other_and_stay_on_the_page() {
        let bars = [bar(8, (8, 1), Ok(0.3), [1.0, 2.0]), bar(16, (8, 1), Ok(0.3), [3.0, 9.0])];
        let marks = figure(&bars, &picture(4.0));
        let rects = |color: RGBColor| {
            let of = |m: &Mark| match m {
                Mark::Rect { from, to, color: c } if *c == color && to.0 < LEGEND => Some((*from, *to)),
                _ => None,
            };
            marks.iter().filter_map(of).collect::<Vec<(Point, Point)>>()
        };
        let (lower, upper) = (rects(PARTS[0].color), rects(PARTS[1].color));
        assert_eq!(lower[0].1.1, BOTTOM);
        assert_eq!(upper[0].1.1, lower[0].0.1);
        let heights = [&lower[0], &upper[0]].map(|(from, to)| to.1 - from.1);
        assert!((heights[1] / heights[0] - 2.0).abs() < 1e-9);
        assert!((upper[1].0.1 - TOP).abs() < 1e-9, "what is too high is cut");
        assert!(marks.iter().any(|m| matches!(m, Mark::Text { text, .. } if text == "12")), "with its number");
        let gaps =
            |marks: &[Mark]| marks.iter().filter(|m| matches!(m, Mark::Line { color, .. } if *color == PAPER)).count();
        assert_eq!([gaps(&marks), gaps(&figure(&bars, &picture(20.0)))], [1, 0]);
    }

    fn texts(marks: &[Mark]) -> Vec<&str> {
        marks.iter().filter_map(|m| if let Mark::Text { text, .. } = m { Some(text.as_str()) } else { None }).collect()
    }

    #[test]
    fn where_nothing_runs_it_is_said_why() {
        let bars = [
            bar(8, (8, 1), Err("heads: odd"), [0.0, 0.0]),
            bar(8, (8, 1), Err("batch: few"), [0.0, 0.0]),
            bar(8, (16, 1), Err("heads: odd"), [0.0, 0.0]),
            bar(8, (1, 8), Err("batch: few"), [0.0, 0.0]),
        ];
        let marks = figure(&bars, &picture(4.0));
        let said = texts(&marks);
        for words in ["Nothing runs", "Ulysses", "heads", "ring attention", "batch", "  too few or uneven sequences"] {
            assert!(said.contains(&words), "{words}: {said:?}");
        }
        assert_eq!(shown(&bars).count(), 4);
    }

    /// The label was struck through.
    #[test]
    fn a_number_on_the_line_of_the_limit_is_read() {
        let bars = [bar(8, (8, 1), Ok(0.3), [3.9, 0.0]), bar(16, (8, 1), Ok(0.3), [1.0, 0.0])];
        let limit = Some((4.0, "4 are there".to_string()));
        let marks = figure(&bars, &Picture { limit, ..picture(6.0) });
        let at = |m: &Mark| matches!(m, Mark::Rect { color, .. } if *color == PAPER);
        assert_eq!(marks.iter().filter(|m| at(m)).count(), 1);
        let line = marks.iter().position(|m| matches!(m, Mark::Line { dash: Some(_), .. })).unwrap();
        assert!(line < marks.iter().position(at).unwrap(), "the line is drawn first");
    }

    #[test]
    fn names_of_lengths_do_not_run_together() {
        let lengths: Vec<u64> = (10..26).flat_map(|log| [1 << log, 3 << (log - 1)]).collect();
        let bars: Vec<Bar> = lengths.iter().map(|&length| bar(length, (8, 1), Ok(0.3), [1.0, 1.0])).collect();
        let names = |bars: &[Bar]| {
            let marks = figure(bars, &picture(4.0));
            let is_name = |text: &str| lengths.iter().any(|&length| short(length) == text);
            let at = |m: &Mark| match m {
                Mark::Text { at, text, size, .. } if is_name(text) => {
                    let half = 0.3 * size * text.len() as f64;
                    Some((at.0 - half, at.0 + half))
                }
                _ => None,
            };
            marks.iter().filter_map(at).collect::<Vec<(f64, f64)>>()
        };
        assert_eq!(names(&bars).len(), lengths.len());
        // The default study: six families, eight lengths.
        let six = [(1, 1), (8, 1), (1, 8), (8, 8), (9, 9), (9, 1)];
        let split = |n: usize, b: Bar| match n {
            4 => Bar { row: Row { tp: 2, ..b.row }, ..b },
            5 => Bar { row: Row { pp: 2, ..b.row }, ..b },
            _ => b,
        };
        let of_default = |(n, &way): (usize, &(u32, u32))| {
            (13..21).map(|log| split(n, bar(1 << log, way, Ok(0.3), [1.0, 1.0]))).collect::<Vec<Bar>>()
        };
        let default: Vec<Bar> = six.iter().enumerate().flat_map(of_default).collect();
        assert_eq!(names(&default).len(), 48);
        let four = [(8, 1), (1, 8), (8, 8), (1, 1)];
        let many: Vec<Bar> = four
            .iter()
            .flat_map(|&way| lengths.iter().map(move |&length| bar(length, way, Ok(0.3), [1.0, 1.0])))
            .collect();
        let found = names(&many);
        assert!((32..=64).contains(&found.len()), "{}", found.len());
        assert!(found.windows(2).all(|w| w[0].1 < w[1].0), "{found:?}");
    }

    #[test]
    fn a_bar_says_which_of_several_batches() {
        let other = bar(8, (8, 1), Ok(0.3), [1.0, 1.0]);
        let best = Bar { row: Row { global_batch: 16, mfu: Ok(0.4), ..other.row.clone() }, ..other.clone() };
        let marks = figure(&[other.clone(), best], &picture(4.0));
        assert!(texts(&marks).contains(&"batch 16"));
        assert!(!format!("{:?}", figure(&[other], &picture(4.0))).contains("batch"));
    }
}
