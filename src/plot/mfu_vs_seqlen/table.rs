//! The table under the axis: what each family reaches at each length, and how, or why it does not.

use super::super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, PAPER, Point, fitting_size, ramp, short};
use super::frame::{Frame, LEFT, LINE, RIGHT};
use super::{Group, Top};
use plotters::style::RGBColor;
use std::collections::BTreeSet;

/// Letters that can be read.
const LEAST: f64 = 9.5;
/// More lengths than this are not named one by one.
const MOST_NAMED: usize = 12;

/// A line for each family, a column for each length; the best of a column stands on a tint of its colour.
/// `stages`: how many stages of ZeRO there are; `batches`: lengths that have several batches.
pub(super) fn table(frame: &Frame, groups: &[Group], stages: usize, batches: &BTreeSet<u64>) -> Vec<Mark> {
    let mut marks: Vec<Mark> = left_out(frame).into_iter().collect();
    let width = frame.cell();
    for (place, group) in groups.iter().enumerate() {
        let (top, middle) = (frame.line(place), frame.line(place) + LINE / 2.0);
        marks.push(Mark::line(&[(20.0, top), (RIGHT, top)], GRID, 1.0));
        marks.push(Mark::text((LEFT - 12.0, middle), group.family.name(), 16.0, group.family.look().1, Align::Right));
        for &length in &frame.columns {
            let x = frame.x(length);
            if is_best(groups, place, length) {
                let color = ramp(&[group.family.look().1, PAPER], 0.82);
                let half = width / 2.0 - 3.0;
                marks.push(Mark::Rect { from: (x - half, top + 2.0), to: (x + half, top + LINE - 2.0), color });
            }
            let at = (x, top);
            match group.top(length) {
                Some(best) => marks.extend(entry(group, &best, at, width, [stages > 1, batches.contains(&length)])),
                None => {
                    let why = group.reason(length).map_or("-", |kind| &kind.word);
                    marks.push(Mark::text((x, middle), why, 14.0, FAINT, Align::Middle));
                }
            }
        }
    }
    marks
}

/// Below the table: lengths that stand in the picture alone.
fn left_out(frame: &Frame) -> Option<Mark> {
    let left: Vec<String> =
        frame.lengths.iter().filter(|length| !frame.columns.contains(length)).map(|length| short(*length)).collect();
    let words = match left.len() {
        0 => return None,
        n if n > MOST_NAMED => format!("{} and {} more", left[..MOST_NAMED].join(", "), n - MOST_NAMED),
        _ => left.join(", "),
    };
    let words = format!("without room in the table, markers and lines alone: {words}");
    let at = ((LEFT + RIGHT) / 2.0, f64::from(HEIGHT) - 42.0);
    Some(Mark::text(at, words, 13.0, FAINT, Align::Middle))
}

/// Of equals the first.
pub(super) fn is_best(groups: &[Group], place: usize, length: u64) -> bool {
    let reached = |g: &Group| g.top(length).map(|top| top.mfu);
    let Some(mine) = reached(&groups[place]) else { return false };
    let beaten = |(i, g): (usize, &Group)| reached(g).is_some_and(|other| other > mine || (other == mine && i < place));
    !groups.iter().enumerate().any(beaten)
}

/// What a family reaches and how; with the stage of ZeRO and the batch where there are several of them.
fn entry(group: &Group, best: &Top, (x, top): Point, width: f64, [zero, batch]: [bool; 2]) -> Vec<Mark> {
    let mut how = best.way.degrees();
    if zero {
        how.push_str(&format!(", ZeRO {}", best.zero));
    }
    if batch {
        how.push_str(&format!(", batch {}", best.global_batch));
    }
    if best.full_recompute {
        how.push_str(", full");
    }
    let fitting = |words: &str| fitting_size(words, width).min(13.0);
    let color = group.family.look().1;
    let mut lines = vec![(how, INK)];
    if !best.way.words.is_empty() {
        lines.push((legible(&best.way.words, width), FAINT));
    } else if fitting(&lines[0].0) < LEAST {
        // Degrees of more kinds than one line has room for.
        let all: Vec<&str> = lines[0].0.split(", ").collect();
        lines = all.chunks(all.len().div_ceil(2)).map(|part| (part.join(", "), INK)).collect();
    }
    let mark = |(y, (text, color)): (f64, (String, RGBColor))| {
        Mark::text((x, top + y), &text, fitting(&text), color, Align::Middle)
    };
    let reached = Mark::text((x, top + 11.0), format!("{:.1} %", best.mfu * 100.0), 16.0, color, Align::Middle);
    [reached].into_iter().chain([26.0, 39.0].into_iter().zip(lines).map(mark)).collect()
}

/// As many words of options as can be read there; that there are more, which the rows have, dots say.
fn legible(words: &str, width: f64) -> String {
    let parts: Vec<&str> = words.split('+').collect();
    let first = |n: usize| if n == parts.len() { words.into() } else { format!("{}+\u{2026}", parts[..n].join("+")) };
    let fits = |n: &usize| fitting_size(&first(*n), width) >= LEAST;
    first((1..=parts.len()).rev().find(fits).unwrap_or(1))
}
