//! Published measurements against what was predicted for them: every case on the left, every group on the right.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, GRID, INK, Mark, Point, Shape, WIDTH, break_of, fitting_size, save};
use crate::compare::stats::quantile;
use crate::error::Result;

/// What is held against what was measured.
struct Quantity {
    /// Columns of what was measured, and of what was predicted for it.
    columns: [&'static str; 2],
    title: &'static str,
    /// Along the axis.
    measured: &'static str,
}

const REPORTED: Quantity = Quantity {
    columns: ["measured", "predicted"],
    title: "Predicted against measured, by whoever published it",
    measured: "measured, in the unit of its source: s, ms, TFLOP/s, iterations/s, share of peak",
};

const MEMORY: Quantity = Quantity {
    columns: ["mem_measured_gib", "mem_predicted_gib"],
    title: "Peak memory of a GPU: predicted against measured, by whoever published it",
    measured: "measured GiB, as the source counts them: allocated, reserved or of the device",
};

/// Writes `published.svg` and `.png`.
pub fn published(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    save(&figure(&rows(&Sheet::read(rows_csv)?, &REPORTED)?, &REPORTED), out_dir, "published")
}

/// Writes `published_memory.svg` and `.png`, where a case has its memory measured.
pub fn published_memory(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let sheet = Sheet::read(rows_csv)?;
    if !MEMORY.columns.iter().all(|column| sheet.has(column)) {
        return Ok(vec![]);
    }
    let rows = rows(&sheet, &MEMORY)?;
    match rows.iter().any(|row| row.measured.is_some()) {
        true => save(&figure(&rows, &MEMORY), out_dir, "published_memory"),
        false => Ok(vec![]),
    }
}

fn rows(sheet: &Sheet, of: &Quantity) -> Result<Vec<Row>> {
    sheet.lines().map(|line| Row::of(&line, of)).collect()
}

/// A case, as far as the picture needs it.
struct Row {
    group: String,
    measured: Option<f64>,
    predicted: Option<f64>,
}

impl Row {
    fn of(line: &Line, of: &Quantity) -> Result<Row> {
        let value = |column| line.maybe(column, "a number above 0, or nothing", |&v: &f64| v > 0.0 && v.is_finite());
        let [measured, predicted] = of.columns;
        Ok(Row { group: line.text("group")?.into(), measured: value(measured)?, predicted: value(predicted)? })
    }

    fn both(&self) -> Option<Point> {
        self.measured.zip(self.predicted)
    }

    /// A missing prediction is wholly wrong.
    fn error(&self) -> f64 {
        self.both().map_or(1.0, |(m, p)| (p / m - 1.0).abs())
    }
}

/// The cases of a group with a measurement.
struct Group<'a> {
    name: &'a str,
    rows: Vec<&'a Row>,
    color: RGBColor,
    shape: Shape,
}

const COLORS: [RGBColor; 8] = [
    RGBColor(18, 98, 180),
    RGBColor(214, 84, 10),
    RGBColor(24, 140, 84),
    RGBColor(150, 60, 170),
    RGBColor(200, 150, 0),
    RGBColor(0, 150, 170),
    RGBColor(200, 40, 90),
    RGBColor(110, 90, 70),
];
const SHAPES: [Shape; 4] = [Shape::Circle, Shape::Square, Shape::Diamond, Shape::Triangle];

/// The square of the left panel, and the bars of the right one.
const LEFT: f64 = 100.0;
const TOP: f64 = 120.0;
const SIDE: f64 = 780.0;
const NAMES: f64 = 1220.0;
const RIGHT: f64 = 1480.0;
/// Where the scale of errors ends; longer bars and lines are cut there and say their value.
const WORST: f64 = 0.6;

/// The largest groups get a bar of their own; what is left shares one.
const MOST_GROUPS: usize = 34;

fn groups(rows: &[Row]) -> Vec<Group<'_>> {
    let mut by_name: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows.iter().filter(|r| r.measured.is_some()) {
        by_name.entry(&row.group).or_default().push(row);
    }
    let mut all: Vec<(&str, Vec<&Row>)> = by_name.into_iter().collect();
    all.sort_by_key(|(_, rows)| std::cmp::Reverse(rows.len()));
    if all.len() > MOST_GROUPS {
        let rest: Vec<&Row> = all.split_off(MOST_GROUPS - 1).into_iter().flat_map(|(_, rows)| rows).collect();
        all.push(("others", rest));
    }
    let marked = |(at, (name, rows)): (usize, (_, _))| Group {
        name,
        rows,
        color: COLORS[at % COLORS.len()],
        shape: SHAPES[at / COLORS.len() % SHAPES.len()],
    };
    all.into_iter().enumerate().map(marked).collect()
}

fn figure(rows: &[Row], of: &Quantity) -> Vec<Mark> {
    let groups = groups(rows);
    let scale = Scale::of(rows);
    let mut marks = titles(rows, of);
    marks.extend(scale.frame(of));
    for group in groups.iter().rev() {
        marks.extend(group.rows.iter().filter_map(|r| r.both()).map(|at| Mark::Marker {
            shape: group.shape,
            at: scale.at(at),
            radius: 4.0,
            color: group.color,
            filled: true,
        }));
    }
    marks.extend(bars(&groups));
    marks
}

fn titles(rows: &[Row], of: &Quantity) -> Vec<Mark> {
    let measured: Vec<&Row> = rows.iter().filter(|r| r.measured.is_some()).collect();
    let predicted = measured.iter().filter(|r| r.predicted.is_some()).count();
    let median = quantile(&measured.iter().map(|r| r.error()).collect::<Vec<_>>(), 0.5);
    let says = format!(
        "{predicted} of {} published cases predicted; median error of all {:.1} %, a missing prediction counted as 100 %",
        measured.len(),
        median * 100.0
    );
    vec![Mark::fitting((34.0, 40.0), of.title, 29.0, INK), Mark::fitting((34.0, 78.0), says, 16.5, FAINT)]
}

/// Decades of the left panel, the same both ways.
struct Scale {
    from: f64,
    to: f64,
}

impl Scale {
    fn of(rows: &[Row]) -> Scale {
        let values = || rows.iter().filter_map(Row::both).flat_map(|(m, p)| [m, p]).map(f64::log10);
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        if low > high {
            Scale { from: 0.0, to: 1.0 }
        } else {
            Scale { from: low.floor(), to: high.ceil().max(low.floor() + 1.0) }
        }
    }

    fn along(&self, value: f64) -> f64 {
        (value.log10() - self.from) / (self.to - self.from) * SIDE
    }

    fn at(&self, (measured, predicted): Point) -> Point {
        (LEFT + self.along(measured), TOP + SIDE - self.along(predicted))
    }

    fn frame(&self, of: &Quantity) -> Vec<Mark> {
        let mut marks = Vec::new();
        for decade in self.from as i32..=self.to as i32 {
            let value = 10f64.powi(decade);
            let (low, high) = (10f64.powf(self.from), 10f64.powf(self.to));
            marks.push(Mark::line(&[self.at((value, low)), self.at((value, high))], GRID, 1.0));
            marks.push(Mark::line(&[self.at((low, value)), self.at((high, value))], GRID, 1.0));
            let (x, y) = self.at((value, value));
            marks.push(Mark::text((x, TOP + SIDE + 18.0), decimal(decade), 15.0, FAINT, Align::Middle));
            marks.push(Mark::text((LEFT - 10.0, y), decimal(decade), 15.0, FAINT, Align::Right));
        }
        marks.extend(self.diagonals());
        let middle = LEFT + SIDE / 2.0;
        marks.push(Mark::text((middle, TOP + SIDE + 48.0), of.measured, 16.5, INK, Align::Middle));
        marks.push(Mark::Text {
            at: (34.0, TOP + SIDE / 2.0),
            text: "predicted, in the same unit".into(),
            size: 16.5,
            color: INK,
            align: Align::Middle,
            upright: true,
        });
        marks
    }

    /// Equal, and a quarter off either way.
    fn diagonals(&self) -> Vec<Mark> {
        let (low, high) = (10f64.powf(self.from), 10f64.powf(self.to));
        let off = |factor: f64| {
            let (a, b) = (low.max(low / factor), high.min(high / factor));
            let points = vec![self.at((a, a * factor)), self.at((b, b * factor))];
            Mark::Line { points, color: FAINT, width: 1.0, dash: (factor != 1.0).then_some((6.0, 5.0)) }
        };
        let corner = (LEFT + SIDE - 8.0, TOP + SIDE - 14.0);
        let label = Mark::text(corner, "dashed: 25 % off", 14.0, FAINT, Align::Right);
        // By what was measured, as errors are counted.
        vec![off(1.0), off(1.25), off(0.75), label]
    }
}

/// 0.001 to 1000 as such.
fn decimal(decade: i32) -> String {
    if decade < 0 {
        format!("{:.*}", -decade as usize, 10f64.powi(decade))
    } else {
        format!("{:.0}", 10f64.powi(decade))
    }
}

/// Median of |relative error| as a bar, the 90th percentile as a line beyond it. What is longer than the scale is cut.
fn bars(groups: &[Group]) -> Vec<Mark> {
    let step = (SIDE / groups.len().max(1) as f64).min(34.0);
    let x = |error: f64| NAMES + (error.min(WORST) / WORST) * (RIGHT - NAMES);
    let mut marks = Vec::new();
    for percent in [0.0, 0.1, 0.25, 0.5] {
        let at = x(percent);
        marks.push(Mark::line(&[(at, TOP - 8.0), (at, TOP + step * groups.len() as f64)], GRID, 1.0));
        marks.push(Mark::text((at, TOP - 20.0), format!("{:.0}%", percent * 100.0), 14.0, FAINT, Align::Middle));
    }
    let head = "median error (bar), 90th percentile (line; in brackets where it is cut)";
    marks.push(Mark::text((RIGHT + 100.0, TOP - 48.0), head, 15.0, INK, Align::Right));
    for (at, group) in groups.iter().enumerate() {
        let y = TOP + step * (at as f64 + 0.5);
        let error = |q| quantile(&group.rows.iter().map(|r| r.error()).collect::<Vec<_>>(), q);
        let (median, p90) = (error(0.5), error(0.9));
        let half = step * 0.28;
        marks.push(Mark::line(&[(NAMES, y), (x(p90), y)], group.color, 1.5));
        marks.push(Mark::Rect { from: (NAMES, y - half), to: (x(median), y + half), color: group.color });
        let name = format!("{} ({})", clipped(group.name), group.rows.len());
        let size = (step * 0.55).clamp(9.0, 15.0);
        marks.push(Mark::text((NAMES - 26.0, y), name, size, INK, Align::Right));
        let mark =
            Mark::Marker { shape: group.shape, at: (NAMES - 14.0, y), radius: 4.0, color: group.color, filled: true };
        marks.push(mark);
        let mut says = format!("{:.0}%", median * 100.0);
        if p90 > WORST {
            says.push_str(&format!(" ({:.0}%)", p90 * 100.0));
            marks.extend(break_of((RIGHT - 18.0, y), half + 3.0, false));
        }
        let at = x(p90).max(x(median)) + 6.0;
        let size = size.min(fitting_size(&says, f64::from(WIDTH) - 4.0 - at));
        marks.push(Mark::text((at, y), says, size, FAINT, Align::Left));
    }
    marks
}

fn clipped(name: &str) -> String {
    let short: String = name.chars().take(36).collect();
    if short.len() < name.len() { format!("{short}..") } else { short }
}

#[cfg(test)]
mod tests {
    use super::super::style::PAPER;
    use super::*;

    fn row(group: &str, measured: f64, predicted: Option<f64>) -> Row {
        Row { group: group.into(), measured: Some(measured), predicted }
    }

    #[test]
    fn equal_values_lie_on_the_diagonal_and_every_case_is_there() {
        let rows = [row("a", 10.0, Some(10.0)), row("a", 20.0, Some(30.0)), row("b", 5.0, None)];
        let scale = Scale::of(&rows);
        let (x, y) = scale.at((10.0, 10.0));
        // 25 % off is so of what was measured.
        let at = |factor: f64| scale.at((10.0, 10.0 * factor)).1 - y;
        let away = |m: &Mark| match m {
            Mark::Line { points, dash: Some(_), .. } => Some(points[0].1 - (LEFT + TOP + SIDE - points[0].0)),
            _ => None,
        };
        let off: Vec<f64> = scale.diagonals().iter().filter_map(away).collect();
        assert!((off[0] - at(1.25)).abs() < 1e-6 && (off[1] - at(0.75)).abs() < 1e-6, "{off:?}");
        assert!((x - LEFT - (TOP + SIDE - y)).abs() < 1e-9);
        let markers = figure(&rows, &REPORTED).iter().filter(|m| matches!(m, Mark::Marker { .. })).count();
        // Two cases, and a key for each of two groups.
        assert_eq!(markers, 4);
        assert!(figure(&[], &REPORTED).len() > 2);
    }

    /// Rows from before memory was predicted have no such columns, others no memory.
    #[test]
    fn memory_is_drawn_where_it_was_measured() {
        let dir = tempfile::tempdir().unwrap();
        let (csv, with) = (dir.path().join("rows.csv"), "group,rel_error,mem_measured_gib,mem_predicted_gib\n");
        for (text, files) in
            [("group,rel_error\na,0.1\n".into(), 0), (format!("{with}a,0.1,,\n"), 0), (format!("{with}a,,8,7\n"), 2)]
        {
            std::fs::write(&csv, text).unwrap();
            assert_eq!(published_memory(&csv, dir.path()).unwrap().len(), files);
        }
    }

    #[test]
    fn what_is_longer_than_the_scale_is_cut_and_says_how_long_it_is() {
        let said = |predicted: [f64; 2]| {
            let rows = predicted.map(|predicted| row("a", 1.0, Some(predicted)));
            let marks = bars(&groups(&rows));
            let cuts = marks.iter().filter(|m| matches!(m, Mark::Line { color, .. } if *color == PAPER)).count();
            let mut texts = marks.into_iter().rev();
            (cuts, texts.find_map(|m| if let Mark::Text { text, .. } = m { Some(text) } else { None }))
        };
        assert_eq!(said([1.1, 1.1]), (0, Some("10%".into())));
        assert_eq!(said([1.0, 3.0]), (1, Some("100% (180%)".into())));
        assert_eq!(said([9.42, 9.42]), (1, Some("842% (842%)".into())));
    }

    #[test]
    fn many_small_groups_share_a_bar() {
        let rows: Vec<Row> = (0..60).map(|i| row(&format!("g{i}"), 1.0, Some(1.0))).collect();
        let found = groups(&rows);
        assert_eq!((found.len(), found.last().unwrap().name), (MOST_GROUPS, "others"));
    }
}
