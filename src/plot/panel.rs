//! Panels of curves: the sheet's columns `panel`, `series`, `x` and `y` say what goes where.

use super::sheet::Sheet;
use super::style::{Align, FAINT, GRID, INK, Mark, Point, Shape};
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
    /// y begins at 0; else where curves do, and the label says so, unless they reach down to half of the highest.
    pub from_zero: bool,
    /// Top left.
    pub corner: Point,
    /// Width and height of what lies inside the axes.
    pub size: (f64, f64),
    /// Where the first name stands, from the top left, if no curve is there.
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
    bottom: f64,
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
        (self.along(x), self.corner.1 + self.size.1 * (self.top - y) / (self.top - self.bottom))
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
    let (low, high_y) = points().fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), p| (l.min(p.1), h.max(p.1)));
    let cut = !panel.from_zero && low > high_y / 2.0;
    let (step, bottom, highest) = steps(if cut { low } else { 0.0 }, high_y);
    let Panel { corner, size, doubles, .. } = *panel;
    let mut scale = Scale { corner, size, x: (first, last), bottom, top: highest, doubles };
    // Where curves are everywhere the axis grows until the names have room above them.
    let mut names_at = room(panel, series, &scale);
    while names_at.is_none() && scale.top - bottom < 4.0 * (highest - bottom) {
        scale.top += step;
        names_at = room(panel, series, &scale);
    }
    marks.extend(axes(panel, &scale, step, &mut points().map(|p| p.0).collect()));
    for (at, one) in series.iter().enumerate() {
        marks.extend(curve(one, &series[..at], &scale, color(one, names)));
    }
    marks.extend(legend(series, names, names_at.unwrap_or(panel.legend), panel.corner));
    marks
}

/// As a line of the page.
fn drawn(series: &Series, scale: &Scale) -> Vec<Point> {
    series.points.iter().map(|p| scale.at(*p)).collect()
}

/// A curve, dashed where it lies on earlier ones: they show in the gaps.
fn curve(one: &Series, before: &[Series], scale: &Scale, color: RGBColor) -> Vec<Mark> {
    let on = |other: &Series, &(x, y): &Point| {
        let near = |p: &&Point| p.0 == x && (scale.at(**p).1 - scale.at((x, y)).1).abs() < 2.0;
        other.points.iter().any(|p| near(&p))
    };
    let below = |pair: &[Point]| before.iter().filter(|other| pair.iter().all(|p| on(other, p))).count();
    let counts: Vec<usize> = one.points.windows(2).map(below).collect();
    let (line, mut at) = (drawn(one, scale), 0);
    let mut marks: Vec<Mark> = line.iter().filter(|_| line.len() == 1).map(|p| point(*p, color)).collect();
    for run in counts.chunk_by(|a, b| a == b) {
        // Of several that lie on each other each has gaps for those before it.
        let dash = (run[0] > 0).then(|| (10.0, 10.0 * run[0] as f64));
        marks.push(Mark::Line { points: line[at..=at + run.len()].to_vec(), color, width: 3.0, dash });
        at += run.len();
    }
    marks
}

/// Of a curve that is no more than a point.
fn point(at: Point, color: RGBColor) -> Mark {
    Mark::Marker { shape: Shape::Circle, at, radius: 5.0, color, filled: true }
}

fn color(series: &Series, names: &[String]) -> RGBColor {
    COLORS[names.iter().position(|n| *n == series.name).unwrap_or(0) % COLORS.len()]
}

/// Between two names.
const LINE: f64 = 22.0;
/// Of a name.
const SIZE: f64 = 16.0;

/// Where names stand and no curve is: where the panel wants them, or in a corner, or at the middle of an edge.
fn room(panel: &Panel, series: &[Series], scale: &Scale) -> Option<Point> {
    let letters = series.iter().map(|s| s.name.chars().count()).max().unwrap_or(0);
    let (wide, high) = (38.0 + 0.6 * SIZE * letters as f64, LINE * series.len() as f64);
    let xs = [16.0, panel.size.0 - wide - 8.0, (panel.size.0 - wide) / 2.0];
    let ys = [16.0, panel.size.1 - high, (panel.size.1 - high) / 2.0];
    let free = |&(x, y): &Point| {
        let (from, to) = ((x - 6.0, y - LINE / 2.0), (x + wide, y - LINE / 2.0 + high));
        let inside = |p: Point| {
            let (x, y) = (p.0 - panel.corner.0, p.1 - panel.corner.1);
            from.0 < x && x < to.0 && from.1 < y && y < to.1
        };
        !series.iter().any(|one| passes(&drawn(one, scale), inside))
    };
    let places = ys.into_iter().flat_map(|y| xs.into_iter().map(move |x| (x, y)));
    [panel.legend].into_iter().chain(places).find(free)
}

/// Whether a line goes there, looked at every other point of the page.
fn passes(line: &[Point], there: impl Fn(Point) -> bool) -> bool {
    let between = |a: Point, b: Point| {
        let steps = ((b.0 - a.0).abs().max((b.1 - a.1).abs()) / 2.0).ceil().max(1.0);
        let at = move |i: u32| {
            let t = f64::from(i) / steps;
            (a.0 + (b.0 - a.0) * t, a.1 + (b.1 - a.1) * t)
        };
        (0..=steps as u32).map(at)
    };
    line.len() == 1 && there(line[0]) || line.windows(2).any(|w| between(w[0], w[1]).any(&there))
}

fn legend(series: &[Series], names: &[String], (x, y): Point, corner: Point) -> Vec<Mark> {
    let line = |(i, one): (usize, &Series)| {
        let (x, y) = (corner.0 + x, corner.1 + y + LINE * i as f64);
        let color = color(one, names);
        let sign = match one.points.len() {
            1 => point((x + 14.0, y), color),
            _ => Mark::line(&[(x, y), (x + 28.0, y)], color, 4.0),
        };
        [sign, Mark::text((x + 38.0, y), &one.name, SIZE, INK, Align::Left)]
    };
    series.iter().enumerate().flat_map(line).collect()
}

/// A round step with at most six of them from the lowest to the highest, and the bottom and the top that they reach.
fn steps(lowest: f64, highest: f64) -> (f64, f64, f64) {
    let span = if highest > lowest { highest - lowest } else { highest };
    if span <= 0.0 {
        return (1.0, 0.0, 1.0);
    }
    let unit = 10f64.powf((span / 6.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * unit).into_iter().find(|s| span / s <= 6.0).unwrap_or(unit * 10.0);
    (step, (lowest / step).floor() * step, ((highest / step).floor() + 1.0) * step)
}

/// With as many decimals as tell it from its neighbours a step away.
fn number(value: f64, step: f64) -> String {
    if step < 1e-4 {
        return if value == 0.0 { "0".into() } else { format!("{value:.1e}") };
    }
    let places = (-step.log10().floor()).max(0.0) as usize;
    format!("{value:.places$}")
}

fn axes(panel: &Panel, scale: &Scale, step: f64, xs: &mut Vec<f64>) -> Vec<Mark> {
    let ((left, top), (wide, high)) = (panel.corner, panel.size);
    let bottom = top + high;
    let mut marks = vec![];
    for i in 0..=((scale.top - scale.bottom) / step).round() as usize {
        let value = scale.bottom + i as f64 * step;
        let y = scale.at((scale.x.0, value)).1;
        marks.push(Mark::line(&[(left, y), (left + wide, y)], GRID, 1.0));
        marks.push(Mark::text((left - 10.0, y), number(value, step), 15.0, FAINT, Align::Right));
    }
    xs.sort_by(f64::total_cmp);
    xs.dedup_by(|a, b| (*a - *b).abs() < 1e-9);
    if panel.doubles {
        // Points between whole doublings are there for the curve's sake, unless there are no others.
        let whole: Vec<f64> = xs.iter().copied().filter(|x| (x.log2() - x.log2().round()).abs() < 1e-6).collect();
        if !whole.is_empty() {
            *xs = whole;
        }
    }
    let every = xs.len().div_ceil(9).max(1);
    for &x in xs.iter().step_by(every) {
        let label = if (x * 10.0).fract() == 0.0 { format!("{x}") } else { format!("{x:.2}") };
        marks.push(Mark::text((scale.along(x), bottom + 18.0), label, 15.0, FAINT, Align::Middle));
    }
    marks.push(Mark::text((left + wide / 2.0, bottom + 44.0), panel.x_label, 17.0, INK, Align::Middle));
    marks.push(Mark::Text {
        at: (left - 64.0, top + high / 2.0),
        text: match scale.bottom > 0.0 {
            true => format!("{}, from {} up", panel.y_label, number(scale.bottom, step)),
            false => panel.y_label.into(),
        },
        size: 17.0,
        color: INK,
        align: Align::Middle,
        upright: true,
    });
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    const PANEL: Panel = Panel {
        name: "p",
        title: "P",
        x_label: "x",
        y_label: "y",
        doubles: false,
        from_zero: true,
        corner: (100.0, 100.0),
        size: (600.0, 300.0),
        legend: (16.0, 16.0),
    };

    fn one(name: &str, points: &[Point]) -> Series {
        Series { name: name.into(), points: points.to_vec() }
    }

    /// All labels of an axis up to 0.005 were 0.00.
    #[test]
    fn labels_of_an_axis_differ() {
        for highest in [3e-9, 0.004, 0.03, 0.6, 2.0, 70.0, 12_345.0] {
            let (step, bottom, top) = steps(0.0, highest);
            assert_eq!(bottom, 0.0);
            let labels: Vec<String> =
                (0..=(top / step).round() as usize).map(|i| number(i as f64 * step, step)).collect();
            let mut distinct = labels.clone();
            distinct.dedup();
            assert_eq!(labels, distinct, "{highest}");
            assert!(top >= highest && labels.iter().all(|label| label.len() < 8), "{labels:?}");
        }
        assert_eq!(steps(0.0, 0.0), (1.0, 0.0, 1.0));
    }

    /// Curves between 98 and 99.5 % were a flat line under the top of an axis from 0.
    #[test]
    fn an_axis_may_begin_where_curves_do_and_says_so() {
        let labels = |panel: Panel, lowest: f64| {
            let marks = curves(&panel, &[one("a", &[(1.0, lowest), (2.0, 99.5)])], &["a".to_string()]);
            let line = |m: &Mark| match m {
                Mark::Line { points, width, .. } if *width == 3.0 => Some((points[0].1 - points[1].1).abs()),
                _ => None,
            };
            let text = |m: &Mark| match m {
                Mark::Text { text, .. } => Some(text.clone()),
                _ => None,
            };
            (marks.iter().filter_map(text).collect::<Vec<_>>(), marks.iter().find_map(line).unwrap())
        };
        let cut = || Panel { from_zero: false, ..PANEL };
        let (words, high) = labels(cut(), 98.1);
        assert!(words.contains(&"y, from 98.0 up".into()) && !words.contains(&"0".into()) && high > 150.0, "{words:?}");
        // Where curves go far down, or the panel wants it, 0 is there.
        for (words, _) in [labels(cut(), 40.0), labels(PANEL, 98.1)] {
            assert!(words.contains(&"y".into()) && words.contains(&"0".into()), "{words:?}");
        }
        assert_eq!(steps(5.0, 5.0), (1.0, 5.0, 6.0));
    }

    /// Where there are, only whole doublings have labels.
    #[test]
    fn an_axis_that_doubles_has_labels_without_whole_doublings() {
        let labels = |xs: &[f64]| {
            let panel = Panel { doubles: true, ..PANEL };
            let points: Vec<Point> = xs.iter().map(|x| (*x, 1.0)).collect();
            let marks = curves(&panel, &[one("a", &points)], &["a".to_string()]);
            let text = |m: &Mark| match m {
                Mark::Text { text, .. } => text.parse().ok(),
                _ => None,
            };
            let found: Vec<f64> = marks.iter().filter_map(text).collect();
            xs.iter().filter(|x| found.contains(x)).copied().collect::<Vec<f64>>()
        };
        assert_eq!(labels(&[300.0, 600.0]), [300.0, 600.0]);
        assert_eq!(labels(&[256.0, 300.0, 512.0]), [256.0, 512.0]);
    }

    /// Curves ran through their names.
    #[test]
    fn names_stand_where_no_curve_is() {
        let falls = [one("a curve", &[(1.0, 10.0), (9.0, 1.0)]), one("another", &[(1.0, 9.0), (9.0, 0.5)])];
        // Zigzags over the whole panel leave no room but above them.
        let zigzag: Vec<Point> = (0..40).map(|i| (f64::from(i), f64::from(i % 2) * 10.0)).collect();
        for series in [&falls[..], &[one("all over the place", &zigzag)]] {
            let names: Vec<String> = series.iter().map(|s| s.name.clone()).collect();
            let marks = curves(&PANEL, series, &names);
            let text = |name: &str| {
                marks.iter().find_map(|m| match m {
                    Mark::Text { at, text, .. } if text == name => Some(*at),
                    _ => None,
                })
            };
            let places: Vec<Point> = names.iter().map(|name| text(name).unwrap()).collect();
            let lines = marks.iter().filter_map(|m| match m {
                Mark::Line { points, width, .. } if *width == 3.0 => Some(points),
                _ => None,
            });
            for line in lines {
                let covered = |p: Point| {
                    let beside = |at: &Point| (0.0..150.0).contains(&(p.0 - at.0)) && (p.1 - at.1).abs() < 8.0;
                    places.iter().any(beside)
                };
                assert!(!passes(line, covered), "{places:?}");
            }
        }
    }

    /// NCCL was hidden where a hierarchical exchange in one node takes as long.
    #[test]
    fn a_curve_under_another_shows_between_its_dashes() {
        let a = one("a", &[(1.0, 2.0), (2.0, 3.0), (3.0, 3.0), (4.0, 1.0)]);
        let b = one("b", &[(1.0, 2.0), (2.0, 3.0), (3.0, 3.0), (4.0, 9.0)]);
        let c = one("c", &[(1.0, 1.0), (2.0, 3.0), (3.0, 3.0)]);
        let names = ["a", "b", "c"].map(String::from);
        let marks = curves(&PANEL, &[a, b, c], &names);
        let of = |at: usize| {
            let dashes = |m: &Mark| match m {
                Mark::Line { color, width, dash, points } if *color == COLORS[at] && *width == 3.0 => {
                    Some((points.len(), dash.map_or(0.0, |dash| dash.1)))
                }
                _ => None,
            };
            marks.iter().filter_map(dashes).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(4, 0.0)]);
        assert_eq!(of(1), [(3, 10.0), (2, 0.0)]);
        assert_eq!(of(2), [(2, 0.0), (2, 20.0)]);
    }
}
