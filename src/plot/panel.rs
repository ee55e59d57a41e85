//! Panels of curves: the sheet's columns `panel`, `series`, `x` and `y` say what goes where.

use super::sheet::Sheet;
use super::style::{Align, FAINT, GRID, INK, Mark, Point};
use crate::error::Result;
use plotters::style::RGBColor;

/// One set of axes, and where it stands on the page.
pub struct Panel {
    /// As the column `panel` has it.
    pub name: &'static str,
    pub title: &'static str,
    pub x_label: &'static str,
    pub y_label: &'static str,
    /// x doubles from tick to tick.
    pub doubles: bool,
    /// Top left.
    pub corner: Point,
    /// Width and height of what lies inside the axes.
    pub size: (f64, f64),
    /// Where the first name stands, from the top left: where no curve is.
    pub legend: (f64, f64),
}

const COLORS: [RGBColor; 7] = [
    RGBColor(30, 110, 200),
    RGBColor(232, 89, 12),
    RGBColor(0, 140, 120),
    RGBColor(142, 84, 180),
    RGBColor(200, 40, 80),
    RGBColor(150, 156, 162),
    RGBColor(46, 125, 50),
];

/// A curve of a panel.
struct Series {
    name: String,
    points: Vec<Point>,
}

/// The marks of all panels; a name has one colour in all of them.
pub fn draw(sheet: &Sheet, panels: &[Panel]) -> Result<Vec<Mark>> {
    let all: Vec<Vec<Series>> = panels.iter().map(|p| series(sheet, p.name)).collect::<Result<_>>()?;
    let mut names: Vec<String> = vec![];
    for series in all.iter().flatten() {
        if !names.contains(&series.name) {
            names.push(series.name.clone());
        }
    }
    Ok(panels.iter().zip(&all).flat_map(|(panel, series)| curves(panel, series, &names)).collect())
}

fn series(sheet: &Sheet, panel: &str) -> Result<Vec<Series>> {
    let mut all: Vec<Series> = vec![];
    for line in sheet.lines() {
        if line.text("panel")? != panel {
            continue;
        }
        let finite = |v: &f64| v.is_finite() && *v >= 0.0;
        let at = (line.value("x", "a number", finite)?, line.value("y", "a number", finite)?);
        let name = line.text("series")?;
        match all.iter_mut().find(|s| s.name == name) {
            Some(series) => series.points.push(at),
            None => all.push(Series { name: name.into(), points: vec![at] }),
        }
    }
    Ok(all)
}

/// From values to the page.
struct Scale {
    corner: Point,
    size: (f64, f64),
    x: (f64, f64),
    top: f64,
    doubles: bool,
}

impl Scale {
    fn along(&self, x: f64) -> f64 {
        let of = |v: f64| if self.doubles { v.log2() } else { v };
        let (from, to) = (of(self.x.0), of(self.x.1));
        self.corner.0 + self.size.0 * if to > from { (of(x) - from) / (to - from) } else { 0.5 }
    }

    fn at(&self, (x, y): Point) -> Point {
        (self.along(x), self.corner.1 + self.size.1 * (1.0 - y / self.top))
    }
}

fn curves(panel: &Panel, series: &[Series], names: &[String]) -> Vec<Mark> {
    let ((left, top), (wide, high)) = (panel.corner, panel.size);
    let mut marks = vec![Mark::text((left, top - 24.0), panel.title, 21.0, INK, Align::Left)];
    let points = || series.iter().flat_map(|s| s.points.iter().copied());
    if points().next().is_none() {
        marks.push(Mark::text((left + wide / 2.0, top + high / 2.0), "no rows", 18.0, FAINT, Align::Middle));
        return marks;
    }
    let (first, last) = points().fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), p| (l.min(p.0), h.max(p.0)));
    let (step, highest) = step(points().map(|p| p.1).fold(0.0, f64::max));
    let scale =
        Scale { corner: panel.corner, size: panel.size, x: (first, last), top: highest, doubles: panel.doubles };
    marks.extend(axes(panel, &scale, step, &mut points().map(|p| p.0).collect()));
    for one in series {
        let color = COLORS[names.iter().position(|n| *n == one.name).unwrap_or(0) % COLORS.len()];
        let line: Vec<Point> = one.points.iter().map(|p| scale.at(*p)).collect();
        marks.push(Mark::line(&line, color, 3.0));
    }
    marks.extend(legend(panel, series, names));
    marks
}

fn legend(panel: &Panel, series: &[Series], names: &[String]) -> Vec<Mark> {
    let line = |(i, one): (usize, &Series)| {
        let color = COLORS[names.iter().position(|n| *n == one.name).unwrap_or(0) % COLORS.len()];
        let x = panel.corner.0 + panel.legend.0;
        let y = panel.corner.1 + panel.legend.1 + 22.0 * i as f64;
        [Mark::line(&[(x, y), (x + 28.0, y)], color, 4.0), Mark::text((x + 38.0, y), &one.name, 16.0, INK, Align::Left)]
    };
    series.iter().enumerate().flat_map(line).collect()
}

/// A round step with at most six of them, and the top that they reach.
fn step(highest: f64) -> (f64, f64) {
    let highest = highest.max(1e-9);
    let unit = 10f64.powf((highest / 6.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * unit).into_iter().find(|s| highest / s <= 6.0).unwrap_or(unit * 10.0);
    (step, ((highest / step).floor() + 1.0) * step)
}

fn axes(panel: &Panel, scale: &Scale, step: f64, xs: &mut Vec<f64>) -> Vec<Mark> {
    let ((left, top), (wide, high)) = (panel.corner, panel.size);
    let bottom = top + high;
    let mut marks = vec![];
    for i in 0..=(scale.top / step).round() as usize {
        let value = i as f64 * step;
        let y = scale.at((scale.x.0, value)).1;
        marks.push(Mark::line(&[(left, y), (left + wide, y)], GRID, 1.0));
        let places = usize::from(step < 1.0) + usize::from(step < 0.1);
        marks.push(Mark::text((left - 10.0, y), format!("{value:.places$}"), 15.0, FAINT, Align::Right));
    }
    xs.sort_by(f64::total_cmp);
    xs.dedup_by(|a, b| (*a - *b).abs() < 1e-9);
    if panel.doubles {
        // Points between whole doublings are there for the curve's sake.
        xs.retain(|x| (x.log2() - x.log2().round()).abs() < 1e-6);
    }
    let every = xs.len().div_ceil(9);
    for &x in xs.iter().step_by(every) {
        let label = if (x * 10.0).fract() == 0.0 { format!("{x}") } else { format!("{x:.2}") };
        marks.push(Mark::text((scale.along(x), bottom + 18.0), label, 15.0, FAINT, Align::Middle));
    }
    marks.push(Mark::text((left + wide / 2.0, bottom + 44.0), panel.x_label, 17.0, INK, Align::Middle));
    marks.push(Mark::Text {
        at: (left - 64.0, top + high / 2.0),
        text: panel.y_label.into(),
        size: 17.0,
        color: INK,
        align: Align::Middle,
        upright: true,
    });
    marks
}
