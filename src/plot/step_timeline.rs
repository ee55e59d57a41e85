//! One step as it was simulated: what the lanes of a rank of each class do when, and where the critical path runs.

use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, PAPER, ramp, save};
use crate::error::Result;
use crate::report::human::{percent, seconds};
use crate::timeline::{Class, Span, Timeline};

/// Part of the critical path: on which rank, from when, for how long, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Critical {
    pub rank: u32,
    pub from: f64,
    pub seconds: f64,
}

/// What the page says of the run beside what the timeline shows.
#[derive(Debug, Clone, Default)]
pub struct Words {
    /// What was asked for.
    pub asked: Vec<String>,
    /// What is not as usual: faults, and that it does not fit.
    pub unusual: Vec<String>,
    /// Names of the timeline's lanes.
    pub lanes: Vec<String>,
}

/// Writes `<stem>.svg` and `.png`. The timeline has spans.
pub fn step_timeline(
    timeline: &Timeline,
    critical: &[Critical],
    words: &Words,
    dir: &Path,
    stem: &str,
) -> Result<Vec<PathBuf>> {
    save(&figure(timeline, critical, words), dir, stem)
}

/// What a bar is, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Forward,
    ForwardAttention,
    Backward,
    BackwardAttention,
    Head,
    Other,
    Stages,
    Data,
    Ring,
    Ulysses,
    Tensor,
    Experts,
}

const KINDS: [(Kind, &str, RGBColor); 12] = [
    (Kind::Forward, "forward", RGBColor(108, 146, 190)),
    (Kind::ForwardAttention, "its attention", RGBColor(38, 70, 120)),
    (Kind::Backward, "backward", RGBColor(150, 190, 120)),
    (Kind::BackwardAttention, "its attention", RGBColor(58, 110, 48)),
    (Kind::Head, "head and loss", RGBColor(170, 130, 190)),
    (Kind::Other, "optimizer and the rest", RGBColor(246, 200, 110)),
    (Kind::Stages, "between stages", RGBColor(120, 90, 70)),
    (Kind::Data, "gradients and weights", RGBColor(0, 140, 120)),
    (Kind::Ring, "ring", RGBColor(232, 89, 12)),
    (Kind::Ulysses, "Ulysses", RGBColor(30, 130, 220)),
    (Kind::Tensor, "tensor", RGBColor(214, 60, 130)),
    (Kind::Experts, "experts", RGBColor(110, 60, 190)),
];

/// How labels of ops of the head begin, where these are in no block of their own.
const HEAD: [&str; 6] = ["lm_head", "final_norm", "cross_entropy", "logits_", "log_softmax", "nll_loss"];

impl Kind {
    fn of(span: &Span, lane: &str) -> Kind {
        let Some(comm) = lane.strip_prefix("comm.") else {
            let attends = span.what.starts_with("attention");
            let both = is_backward_of_two(&span.path);
            let passes = |part: &str| if both && part == "fwd" { "bwd" } else { part }.to_string();
            let parts = || span.path.split('/').map(|part| passes(part.split(['.', '[']).next().unwrap_or(part)));
            let head = |part: &str| part == "head" || HEAD.iter().any(|h| part.starts_with(h));
            return match () {
                _ if parts().any(|part| head(&part)) => Kind::Head,
                _ if parts().any(|part| part == "bwd") && attends => Kind::BackwardAttention,
                _ if parts().any(|part| ["bwd", "weights", "embed_bwd"].contains(&part.as_str())) => Kind::Backward,
                _ if parts().any(|part| part == "fwd") && attends => Kind::ForwardAttention,
                _ if parts().any(|part| part == "fwd" || part == "embed") => Kind::Forward,
                _ => Kind::Other,
            };
        };
        let axis = comm.split(['.', '+']).next().unwrap_or(comm);
        match axis {
            "pp" => Kind::Stages,
            "cp" => Kind::Ring,
            "up" => Kind::Ulysses,
            "tp" => Kind::Tensor,
            "ep" => Kind::Experts,
            _ => Kind::Data,
        }
    }

    fn color(self) -> RGBColor {
        KINDS[self as usize].2
    }
}

/// Whether an op of two chunks side by side, `fwd.1.15+bwd.2.0[0]/layers[0]/rope_bwd`, is of the one that goes backward, which
/// its name says.
fn is_backward_of_two(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).split('[').next().unwrap_or(path);
    let ends = ["_dx", "_dw", "_again"].iter().any(|end| name.ends_with(end));
    path.contains("+bwd.") && (name.contains("bwd") || ends || name == "delta")
}

/// More ranks than this do not fit.
const MOST: usize = 16;
/// Nor do more lanes than this, in rows of which a rank's name takes a part of one: their names would cover each other.
const ROWS: f64 = 62.0;
const HEADING: f64 = 0.9;
const LEFT: f64 = 176.0;
const RIGHT: f64 = 1566.0;
/// Where the legend begins.
const LEGEND: f64 = 34.0;
const TOP: f64 = 126.0;
const BOTTOM: f64 = HEIGHT as f64 - 130.0;
/// Columns that a lane is cut into: each is what takes most of its time, the paler the less of it that is.
const COLUMNS: usize = 2780;
/// Tints of a column. The palest is half of the colour: an op that takes a tenth of a column is there, and is seen.
const TINTS: [f64; 3] = [0.5, 0.75, 1.0];
const CRITICAL: RGBColor = RGBColor(20, 20, 20);

fn figure(timeline: &Timeline, critical: &[Critical], words: &Words) -> Vec<Mark> {
    let step = timeline.step.value().max(1e-12);
    let shown = shown(timeline, critical);
    let lanes: Vec<Vec<u16>> = shown.iter().map(|class| lanes(class, timeline)).collect();
    let rows: usize = lanes.iter().map(Vec::len).sum();
    let height = ((BOTTOM - TOP) / (rows as f64 + HEADING * shown.len() as f64)).min(60.0);
    let mut marks = titles(timeline, &shown, words);
    let (mut y, mut used) = (TOP, vec![]);
    for (class, lanes) in shown.iter().zip(&lanes) {
        let size = (0.7 * height).clamp(9.0, 15.0);
        let like = if class.multiplicity > 1 { format!(", {} ranks", class.multiplicity) } else { String::new() };
        let name = format!("rank {}{like}", class.rank);
        marks.push(Mark::text((34.0, y + HEADING * height / 2.0), name, size, INK, Align::Left));
        let mine = critical.iter().filter(|c| c.rank == class.rank);
        let x = |s: f64| LEFT + (s / step).clamp(0.0, 1.0) * (RIGHT - LEFT);
        let (from, to) = (y + 0.55 * HEADING * height, y + 0.85 * HEADING * height);
        marks.extend(mine.map(|c| Mark::Rect {
            from: (x(c.from), from),
            to: (x(c.from + c.seconds).max(x(c.from) + 0.5), to),
            color: CRITICAL,
        }));
        y += HEADING * height;
        for &lane in lanes {
            let (from, to) = (y + 0.06 * height, y + 0.94 * height);
            let label = &timeline.lanes[lane as usize];
            let name = short(words.lanes.get(lane as usize).unwrap_or(label));
            marks.push(Mark::text((LEFT - 8.0, (from + to) / 2.0), name, size, FAINT, Align::Right));
            marks.push(Mark::line(&[(LEFT, to), (RIGHT, to)], GRID, 1.0));
            marks.extend(bars(class, lane, label, step, (from, to), &mut used));
            y += height;
        }
    }
    marks.extend(axis(step, y + 8.0));
    marks.extend(legend(&mut used, y + 76.0));
    marks
}

/// Those that hold the critical path longest first, then by rank; all of them if they fit.
fn shown<'a>(timeline: &'a Timeline, critical: &[Critical]) -> Vec<&'a Class> {
    let mut all: Vec<&Class> = timeline.classes.iter().collect();
    let holds = |class: &Class| critical.iter().filter(|c| c.rank == class.rank).map(|c| c.seconds).sum::<f64>();
    all.sort_by(|a, b| holds(b).total_cmp(&holds(a)).then(a.rank.cmp(&b.rank)));
    let mut rows = 0.0;
    let fits = |class: &&&Class| {
        rows += lanes(class, timeline).len() as f64 + HEADING;
        rows <= ROWS
    };
    let most = all.iter().take_while(fits).count().clamp(1, MOST);
    all.truncate(most);
    all.sort_by_key(|class| class.rank);
    all
}

/// Lanes on which something happens.
fn lanes(class: &Class, timeline: &Timeline) -> Vec<u16> {
    let mut used = vec![false; timeline.lanes.len()];
    class.spans.iter().filter(|s| s.duration().value() > 0.0).for_each(|s| used[s.lane as usize] = true);
    (0..timeline.lanes.len() as u16).filter(|&lane| used[lane as usize]).collect()
}

/// `comm.pp.0-1...1` is a link between stages.
fn short(lane: &str) -> String {
    match lane.strip_prefix("compute") {
        Some(_) => "kernels".into(),
        None => lane.trim_start_matches("comm.").replace("...", " ").replace("..", " "),
    }
}

/// Runs of columns that the same kind of op takes most of, in the tint of how much of a column is taken at all.
fn bars(class: &Class, lane: u16, label: &str, step: f64, (from, to): (f64, f64), used: &mut Vec<Kind>) -> Vec<Mark> {
    let mut columns = vec![[0.0f64; KINDS.len()]; COLUMNS];
    let width = step / COLUMNS as f64;
    for span in class.spans.iter().filter(|s| s.lane == lane) {
        let (start, end) = (span.start.value(), span.end.value());
        let kind = Kind::of(span, label) as usize;
        let last = ((end / width) as usize).min(COLUMNS - 1);
        for (at, column) in columns.iter_mut().enumerate().take(last + 1).skip((start / width) as usize) {
            column[kind] += (end.min((at + 1) as f64 * width) - start.max(at as f64 * width)).max(0.0);
        }
    }
    // Less is rounding, of an op that ends where a column does.
    let least = 1e-9 * width;
    let most = |column: &[f64; KINDS.len()]| {
        let busy: f64 = column.iter().sum();
        let top = KINDS.iter().max_by(|a, b| column[a.0 as usize].total_cmp(&column[b.0 as usize]))?;
        let tint = TINTS.iter().position(|tint| busy <= (tint + 1e-6) * width).unwrap_or(TINTS.len() - 1);
        (busy > least).then_some((top.0, tint))
    };
    let kinds: Vec<Option<(Kind, usize)>> = columns.iter().map(most).collect();
    let (mut marks, mut at) = (vec![], 0);
    let x = |column: usize| LEFT + column as f64 / COLUMNS as f64 * (RIGHT - LEFT);
    for run in kinds.chunk_by(|a, b| a == b) {
        if let Some((kind, tint)) = run[0] {
            let color = ramp(&[PAPER, kind.color()], TINTS[tint]);
            marks.push(Mark::Rect { from: (x(at), from), to: (x(at + run.len()), to), color });
            used.push(kind);
        }
        at += run.len();
    }
    marks
}

/// What was asked for, and below it what came of it.
fn titles(timeline: &Timeline, shown: &[&Class], words: &Words) -> Vec<Mark> {
    let ranks: u32 = timeline.classes.iter().map(|c| c.multiplicity).sum();
    let title = format!("One step of {ranks} GPUs, {}: what runs when", seconds(timeline.step.value()));
    let mut parts = words.unusual.clone();
    let busy = timeline.mean().compute / timeline.step.value().max(1e-12);
    parts.push(format!("kernels run {} of the time", percent(busy)));
    parts.push("transfers from when they are posted".into());
    let classes = timeline.classes.len();
    parts.push(match shown.len() {
        n if n < classes => format!("{n} of {classes} ranks that differ"),
        _ => "a rank of each kind".into(),
    });
    let line = |y, parts: &[String]| Mark::fitting((34.0, y), parts.join("  \u{b7}  "), 16.5, FAINT);
    vec![Mark::text((34.0, 38.0), title, 29.0, INK, Align::Left), line(74.0, &words.asked), line(100.0, &parts)]
}

fn axis(step: f64, y: f64) -> Vec<Mark> {
    let raw = step / 12.0;
    let power = 10f64.powf(raw.log10().floor());
    let each = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw).unwrap_or(raw);
    let (unit, scale) = if step >= 1.0 { ("s", 1.0) } else { ("ms", 1e3) };
    let mut marks = vec![Mark::line(&[(LEFT, y), (RIGHT, y)], INK, 1.5)];
    for tick in 0..=(step / each) as u32 {
        let s = f64::from(tick) * each;
        let x = LEFT + s / step * (RIGHT - LEFT);
        marks.push(Mark::line(&[(x, y), (x, y + 6.0)], INK, 1.5));
        marks.push(Mark::text((x, y + 20.0), (s * scale * 1e6).round() / 1e6, 15.0, INK, Align::Middle));
    }
    marks.push(Mark::text(((LEFT + RIGHT) / 2.0, y + 42.0), format!("time ({unit})"), 16.0, INK, Align::Middle));
    marks
}

fn legend(used: &mut Vec<Kind>, y: f64) -> Vec<Mark> {
    used.sort_unstable();
    used.dedup();
    let bar = (CRITICAL, "critical path");
    let entries = used.iter().map(|&kind| (kind.color(), KINDS[kind as usize].1)).chain([bar]);
    let wide = |name: &str| 46.0 + 8.2 * name.len() as f64;
    let all: f64 = entries.clone().map(|(_, name)| wide(name)).sum();
    // As large as there is room for.
    let by = ((RIGHT - LEGEND) / all).min(1.0);
    let (mut marks, mut x) = (vec![], LEGEND);
    for (color, name) in entries {
        marks.push(Mark::Rect { from: (x, y - 8.0), to: (x + 22.0 * by, y + 8.0), color });
        marks.push(Mark::text((x + 29.0 * by, y), name, 15.0 * by, INK, Align::Left));
        x += wide(name) * by;
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::Usage;
    use crate::units::Seconds;

    fn span(path: &str, what: &'static str, lane: u16, (start, end): (f64, f64)) -> Span {
        Span { path: path.into(), what, lane, start: Seconds::new(start), end: Seconds::new(end) }
    }

    fn step() -> Timeline {
        let spans = vec![
            span("fwd.0.0[0]/layers[0]/qkv", "matmul", 0, (0.0, 0.25)),
            span("fwd.0.0[0]/layers[0]/attention", "attention", 0, (0.25, 0.5)),
            span("bwd.0.0[0]/layers[0]/attention_bwd", "attention_bwd", 0, (0.75, 1.0)),
            span("send", "transfer", 1, (0.5, 0.75)),
        ];
        let class = |rank, spans| Class { rank, multiplicity: 2, usage: Usage::default(), spans };
        let lanes = vec!["compute.0".into(), "comm.pp.0-1...0".into()];
        Timeline { step: Seconds::new(1.0), classes: vec![class(0, spans.clone()), class(2, spans)], lanes }
    }

    #[test]
    fn ops_are_known_by_their_paths_with_and_without_a_pipeline() {
        for (path, what, kind) in [
            ("fwd.0.4[0]/layers[1]/qkv", "matmul", Kind::Forward),
            ("last[0]/fwd[3]/attention", "attention", Kind::ForwardAttention),
            ("last[0]/bwd[3]/bwd[0]/again[0]/down", "matmul", Kind::Backward),
            ("last[0]/lm_head_dx", "matmul", Kind::Head),
            ("head.0.6[0]/final_norm_bwd", "norm_bwd", Kind::Head),
            ("adam.layer.3", "adam", Kind::Other),
            ("fwd.1.15+bwd.2.0[0]/layers[0]/rope", "rope", Kind::Forward),
            ("fwd.1.15+bwd.2.0[0]/layers[0]/rope_bwd", "rope_bwd", Kind::Backward),
            ("fwd.1.15+bwd.2.0[0]/layers[0]/experts_down_dw", "grouped_matmul_dw", Kind::Backward),
            ("fwd.1.15+bwd.2.0[0]/layers[0]/attention", "attention", Kind::ForwardAttention),
            ("fwd.1.15+bwd.2.0[0]/layers[0]/attention_bwd", "attention_bwd", Kind::BackwardAttention),
        ] {
            assert_eq!(Kind::of(&span(path, what, 0, (0.0, 1.0)), "compute.0"), kind, "{path}");
        }
    }

    /// Where not all fit, the rank that makes the step long is shown, whatever its number.
    #[test]
    fn ranks_that_hold_the_critical_path_are_shown() {
        let one = &step().classes[0];
        let classes = (0..40)
            .map(|rank| Class { rank, multiplicity: 1, usage: Usage::default(), spans: one.spans.clone() })
            .collect();
        let timeline = Timeline { classes, ..step() };
        let brief = |rank| Critical { rank, from: 0.0, seconds: 0.01 };
        let critical: Vec<Critical> =
            (0..39).map(brief).chain([Critical { rank: 39, from: 0.5, seconds: 0.5 }]).collect();
        let shown = shown(&timeline, &critical);
        assert!(shown.len() < 40 && shown.iter().any(|class| class.rank == 39));
    }

    #[test]
    fn bars_are_as_long_as_what_they_show() {
        let timeline = step();
        let mut used = vec![];
        let marks = bars(&timeline.classes[0], 0, "compute.0", 1.0, (0.0, 1.0), &mut used);
        assert_eq!(used, [Kind::Forward, Kind::ForwardAttention, Kind::BackwardAttention]);
        let ends: Vec<(f64, f64)> = marks
            .iter()
            .map(|mark| match mark {
                Mark::Rect { from, to, .. } => (from.0, to.0),
                other => panic!("{other:?}"),
            })
            .collect();
        let x = |part: f64| LEFT + part * (RIGHT - LEFT);
        for (found, wanted) in ends.iter().zip([(0.0, 0.25), (0.25, 0.5), (0.75, 1.0)]) {
            assert!((found.0 - x(wanted.0)).abs() < 1.0 && (found.1 - x(wanted.1)).abs() < 1.0, "{found:?}");
        }
    }

    /// 200 transfers of a twentieth of a column each: of 1,400 columns one in seven has one.
    #[test]
    fn ops_that_are_shorter_than_a_column_are_seen() {
        let width = 1.0 / COLUMNS as f64;
        let short = |at: usize| (7.0 * at as f64 + 0.3) * width;
        let spans = (0..200).map(|at| span("send", "transfer", 0, (short(at), short(at) + 0.05 * width))).collect();
        let class = Class { rank: 0, multiplicity: 1, usage: Usage::default(), spans };
        let marks = bars(&class, 0, "comm.tp.0", 1.0, (0.0, 1.0), &mut vec![]);
        let pale = ramp(&[PAPER, Kind::Tensor.color()], TINTS[0]);
        assert_eq!(marks.len(), 200);
        assert!(marks.iter().all(|mark| matches!(mark, Mark::Rect { color, .. } if *color == pale)));
    }

    #[test]
    fn the_page_names_ranks_lanes_and_the_critical_path() {
        let critical = [Critical { rank: 2, from: 0.0, seconds: 0.5 }];
        let one = |words: &str| vec![words.to_string()];
        let words = Words { asked: one("llama"), unusual: one("does not fit"), lanes: vec![] };
        let said = format!("{:?}", figure(&step(), &critical, &words));
        for words in [
            "rank 0, 2 ranks",
            "rank 2, 2 ranks",
            "kernels",
            "pp.0-1 0",
            "critical path",
            "between stages",
            "llama",
            "does not fit",
        ] {
            assert!(said.contains(words), "{words}");
        }
        let named = Words { lanes: vec!["compute.0".into(), "comm.dp.0".into()], ..words };
        assert!(format!("{:?}", figure(&step(), &critical, &named)).contains("\"dp.0\""));
    }
}
