//! Ops as predicted and as measured on one machine: every op on the left, every kind of op on the right.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::style::{Align, FAINT, GRID, INK, Mark, Point, Shape, break_of, save};
use crate::compare::validation::{OpCheck, Validation};
use crate::error::Result;
use crate::plan::kernel::Family;
use crate::report::human::{counted, seconds};

/// Writes `<stem>.svg` and `.png`.
pub fn validation(v: &Validation, title: &str, dir: &Path, stem: &str) -> Result<Vec<PathBuf>> {
    save(&figure(v, title), dir, stem)
}

const KINDS: [(&str, RGBColor, Shape); 4] = [
    ("products", RGBColor(18, 98, 180), Shape::Circle),
    ("attention", RGBColor(214, 84, 10), Shape::Square),
    ("memory-bound kernels", RGBColor(24, 140, 84), Shape::Diamond),
    ("communication, with its waiting", RGBColor(150, 60, 170), Shape::Triangle),
];

fn kind(op: &OpCheck) -> usize {
    match op.what {
        what if Family::of(what).is_product() => 0,
        "attention" | "attention_bwd" | "attention_onto" | "attention_bwd_onto" => 1,
        _ if op.provenance.is_some() => 2,
        _ => 3,
    }
}

/// The square of the left panel, and the bars of the right one.
const LEFT: f64 = 110.0;
const TOP: f64 = 158.0;
const SIDE: f64 = 740.0;
const NAMES: f64 = 1190.0;
const RIGHT: f64 = 1500.0;
/// Where the scale of errors ends; longer bars are cut there and say their value.
const WORST: f64 = 0.5;

fn figure(v: &Validation, title: &str) -> Vec<Mark> {
    let scale = Scale::of(v);
    let mut marks = titles(v, title);
    marks.extend(scale.frame());
    // What there is most of lies below.
    for wanted in [2, 3, 0, 1] {
        let (_, color, shape) = KINDS[wanted];
        let of_kind = v.ops.iter().filter(|op| kind(op) == wanted);
        marks.extend(of_kind.map(|op| Mark::Marker {
            shape,
            at: scale.at((op.measured_s, op.predicted_s)),
            radius: 3.5,
            color,
            filled: true,
        }));
    }
    marks.extend(key());
    marks.extend(bars(v));
    marks
}

fn titles(v: &Validation, title: &str) -> Vec<Mark> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let inside = if v.within_noise { ", within the noise of the runs and what others took of the cores" } else { "" };
    let step = format!(
        "step {} predicted, {} measured: {} off{inside}",
        seconds(v.predicted_step_s),
        seconds(v.measured_step_s),
        percent(v.end_to_end_error),
    );
    let ops = format!(
        "ops: median {}, 90th percentile {}; {} spread by {}; kernels' time on their cores: median {}",
        percent(v.median_op_error),
        percent(v.p90_op_error),
        counted(v.repeats as u64, "run"),
        percent(v.noise),
        percent(v.median_kernel_error_on_core),
    );
    vec![
        Mark::fitting((34.0, 40.0), format!("Predicted against measured: {title}"), 27.0, INK),
        Mark::fitting((34.0, 76.0), step, 16.5, FAINT),
        Mark::fitting((34.0, 102.0), ops, 16.5, FAINT),
    ]
}

fn key() -> Vec<Mark> {
    let row = |(i, (name, color, shape)): (usize, &(&str, RGBColor, Shape))| {
        let y = TOP + 22.0 + 26.0 * i as f64;
        let at = (LEFT + 22.0, y);
        [
            Mark::Marker { shape: *shape, at, radius: 5.0, color: *color, filled: true },
            Mark::text((LEFT + 38.0, y), *name, 15.0, INK, Align::Left),
        ]
    };
    KINDS.iter().enumerate().flat_map(row).collect()
}

/// Decades of the left panel, the same both ways.
struct Scale {
    from: f64,
    to: f64,
}

impl Scale {
    fn of(v: &Validation) -> Scale {
        let values = || v.ops.iter().flat_map(|op| [op.measured_s, op.predicted_s]).map(|s| s.max(1e-7).log10());
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        if low > high {
            return Scale { from: -6.0, to: 0.0 };
        }
        Scale { from: low.floor(), to: high.ceil().max(low.floor() + 1.0) }
    }

    fn along(&self, value: f64) -> f64 {
        (value.max(1e-7).log10() - self.from) / (self.to - self.from) * SIDE
    }

    fn at(&self, (measured, predicted): Point) -> Point {
        (LEFT + self.along(measured), TOP + SIDE - self.along(predicted))
    }

    fn frame(&self) -> Vec<Mark> {
        let (low, high) = (10f64.powf(self.from), 10f64.powf(self.to));
        let mut marks = Vec::new();
        for decade in self.from as i32..=self.to as i32 {
            let value = 10f64.powi(decade);
            marks.push(Mark::line(&[self.at((value, low)), self.at((value, high))], GRID, 1.0));
            marks.push(Mark::line(&[self.at((low, value)), self.at((high, value))], GRID, 1.0));
            let (x, y) = self.at((value, value));
            marks.push(Mark::text((x, TOP + SIDE + 18.0), seconds(value), 15.0, FAINT, Align::Middle));
            marks.push(Mark::text((LEFT - 10.0, y), seconds(value), 15.0, FAINT, Align::Right));
        }
        // By the measured time, as errors are counted.
        for factor in [1.0, 1.1, 0.9] {
            let (a, b) = (low.max(low / factor), high.min(high / factor));
            let points = vec![self.at((a, a * factor)), self.at((b, b * factor))];
            marks.push(Mark::Line { points, color: FAINT, width: 1.0, dash: (factor != 1.0).then_some((6.0, 5.0)) });
        }
        let corner = (LEFT + SIDE - 8.0, TOP + SIDE - 14.0);
        marks.push(Mark::text(corner, "dashed: 10 % off", 14.0, FAINT, Align::Right));
        let middle = (LEFT + SIDE / 2.0, TOP + SIDE + 48.0);
        marks.push(Mark::text(middle, "measured, median of the runs", 16.5, INK, Align::Middle));
        marks.push(Mark::Text {
            at: (30.0, TOP + SIDE / 2.0),
            text: "predicted".into(),
            size: 16.5,
            color: INK,
            align: Align::Middle,
            upright: true,
        });
        marks
    }
}

/// Median error of every kind of op, those that take most time first.
fn bars(v: &Validation) -> Vec<Mark> {
    let color: BTreeMap<&str, RGBColor> = v.ops.iter().map(|op| (op.what, KINDS[kind(op)].1)).collect();
    let step = (SIDE / v.by_kind.len().max(1) as f64).min(34.0);
    let x = |error: f64| NAMES + (error.min(WORST) / WORST) * (RIGHT - NAMES);
    let mut marks = vec![Mark::text((RIGHT, TOP - 36.0), "median error, by kind of op", 16.5, INK, Align::Right)];
    for percent in [0.0, 0.1, 0.25, 0.5] {
        let at = x(percent);
        marks.push(Mark::line(&[(at, TOP - 4.0), (at, TOP + step * v.by_kind.len() as f64)], GRID, 1.0));
        marks.push(Mark::text((at, TOP - 14.0), format!("{:.0} %", percent * 100.0), 14.0, FAINT, Align::Middle));
    }
    for (i, kind) in v.by_kind.iter().enumerate() {
        let y = TOP + step * (i as f64 + 0.5);
        let (half, size) = (step * 0.28, (step * 0.5).clamp(9.0, 15.0));
        let to = (x(kind.median_error), y + half);
        marks.push(Mark::Rect { from: (NAMES, y - half), to, color: color[kind.what] });
        let share = 100.0 * kind.measured_s / v.by_kind.iter().map(|k| k.measured_s).sum::<f64>().max(1e-12);
        let name = format!("{} ({}, {share:.0} % of the time)", kind.what, kind.ops);
        marks.push(Mark::text((NAMES - 10.0, y), name, size, INK, Align::Right));
        if kind.median_error > WORST {
            marks.extend(break_of((RIGHT - 18.0, y), half + 3.0, false));
        }
        let says = format!("{:.1} %", kind.median_error * 100.0);
        marks.push(Mark::text((to.0 + 6.0, y), says, size, FAINT, Align::Left));
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::super::style::{PAPER, WIDTH};
    use super::*;
    use crate::compare::validation::{KindCheck, Reason};

    fn checked(median_error: f64) -> Validation {
        let op = OpCheck {
            rank: 0,
            path: "a".into(),
            what: "matmul",
            predicted_s: 1e-3,
            measured_s: 1e-3,
            error: 0.0,
            on_core_s: None,
            runs_s: vec![],
            spread: 0.0,
            provenance: None,
            reason: Reason::Unknown,
        };
        let by_kind = vec![KindCheck { what: "matmul", ops: 2, predicted_s: 2e-3, measured_s: 2e-3, median_error }];
        Validation {
            ranks: 1,
            repeats: 1,
            predicted_step_s: 2e-3,
            measured_step_s: 2e-3,
            end_to_end_error: 0.0,
            median_op_error: 0.0,
            p90_op_error: 0.0,
            median_kernel_error_on_core: 0.0,
            noise: 0.0,
            lost_to_others: 0.0,
            within_noise: true,
            predicted_overlap: Default::default(),
            measured_overlap: Default::default(),
            by_kind,
            only_predicted: 0,
            only_measured: 0,
            ops: vec![op.clone(), OpCheck { predicted_s: 2e-2, ..op }],
        }
    }

    #[test]
    fn every_op_is_a_marker_and_a_right_one_lies_on_the_diagonal() {
        let v = checked(0.0);
        let (x, y) = Scale::of(&v).at((1e-3, 1e-3));
        assert!((x - LEFT - (TOP + SIDE - y)).abs() < 1e-9);
        let markers = figure(&v, "test").iter().filter(|m| matches!(m, Mark::Marker { .. })).count();
        assert_eq!(markers, v.ops.len() + KINDS.len());
    }

    /// Of what is 10 % too short the line was drawn at 9.1 %, of what is 88 % off the bar ended at 50 %.
    #[test]
    fn errors_are_of_what_was_measured_and_cut_bars_say_so() {
        let v = checked(0.88);
        let scale = Scale::of(&v);
        let at = |factor: f64| scale.at((1e-3, 1e-3 * factor)).1 - scale.at((1e-3, 1e-3)).1;
        let diagonals: Vec<f64> = scale
            .frame()
            .iter()
            .filter_map(|m| match m {
                Mark::Line { points, dash: Some(_), .. } => Some(points[0].1 - (LEFT + TOP + SIDE - points[0].0)),
                _ => None,
            })
            .collect();
        assert_eq!(diagonals.len(), 2);
        assert!((diagonals[0] - at(1.1)).abs() < 1e-6 && (diagonals[1] - at(0.9)).abs() < 1e-6, "{diagonals:?}");
        let gaps = |error| {
            bars(&checked(error)).iter().filter(|m| matches!(m, Mark::Line { color, .. } if *color == PAPER)).count()
        };
        assert_eq!([gaps(0.88), gaps(0.4)], [1, 0]);
    }

    #[test]
    fn what_is_said_ends_on_the_page() {
        let long = Validation { within_noise: true, repeats: 5, ..checked(0.0) };
        for mark in titles(&long, &"a plan of many words ".repeat(6)) {
            let Mark::Text { at, text, size, .. } = mark else { panic!("{mark:?}") };
            assert!(at.0 + 0.47 * size * text.chars().count() as f64 <= f64::from(WIDTH), "{text}");
            assert!(at.1 < TOP - 50.0);
        }
    }
}
