//! One layer on one GPU, forward and backward: what its lanes do when, way by way on one scale.

use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::notes::Notes;
use super::rows;
use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, PAPER, Point, save, short};
use crate::error::Result;
use crate::plan::kernel::Family;

/// Writes `block_timeline.svg` and `.png` if the study has a spans.csv.
pub fn block_timeline(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let spans_csv = rows_csv.with_file_name("spans.csv");
    if !spans_csv.exists() {
        return Ok(vec![]);
    }
    let spans = Sheet::read(&spans_csv)?.lines().map(|line| Span::of(&line)).collect::<Result<Vec<_>>>()?;
    let rows = rows::read(rows_csv)?;
    let mut words = rows[0].subtitle(rows.iter(), &Notes::beside(rows_csv)?);
    // A layer has one microbatch, whatever a step has.
    words.retain(|w| !w.contains("tokens a step"));
    save(&figure(&spans, &words), out_dir, "block_timeline")
}

/// A line of spans.csv.
#[derive(Debug, Clone, PartialEq)]
struct Span {
    way: String,
    seq_len: u64,
    recompute: String,
    forward: bool,
    lane: String,
    what: String,
    start_s: f64,
    end_s: f64,
}

impl Span {
    fn of(line: &Line) -> Result<Span> {
        let time = |column| line.value(column, "a time in seconds", |t: &f64| t.is_finite());
        Ok(Span {
            way: line.text("way")?.into(),
            seq_len: line.value("seq_len", "a count of tokens of at least 1", |&n: &u64| n > 0)?,
            recompute: line.text("recompute")?.into(),
            forward: line.text("pass")? == "fwd",
            lane: line.text("lane")?.into(),
            what: line.text("what")?.into(),
            start_s: time("start_s")?,
            end_s: time("end_s")?,
        })
    }

    fn computes(&self) -> bool {
        self.lane.starts_with("compute")
    }
}

/// What a bar is, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Attention,
    Product,
    Other,
    Ring,
    Ulysses,
    Experts,
    Tensor,
    Data,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Product,
        Kind::Attention,
        Kind::Other,
        Kind::Ring,
        Kind::Ulysses,
        Kind::Experts,
        Kind::Tensor,
        Kind::Data,
    ];

    fn of(span: &Span) -> Kind {
        match (span.computes(), span.what.as_str()) {
            (true, "attention" | "attention_bwd" | "attention_onto" | "attention_bwd_onto") => Kind::Attention,
            (true, what) if Family::of(what).is_product() => Kind::Product,
            (true, _) => Kind::Other,
            _ if span.lane.contains("dp") => Kind::Data,
            _ if span.lane.contains("up") => Kind::Ulysses,
            _ if span.lane.contains("ep") => Kind::Experts,
            _ if span.lane.contains("tp") => Kind::Tensor,
            _ => Kind::Ring,
        }
    }

    fn color(self) -> RGBColor {
        match self {
            Kind::Product => RGBColor(108, 146, 190),
            Kind::Attention => RGBColor(38, 70, 120),
            Kind::Other => RGBColor(246, 200, 110),
            Kind::Ring => RGBColor(232, 89, 12),
            Kind::Ulysses => RGBColor(30, 130, 220),
            Kind::Experts => RGBColor(150, 60, 160),
            Kind::Tensor => RGBColor(150, 104, 30),
            Kind::Data => RGBColor(0, 140, 120),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Product => "matrix products",
            Kind::Attention => "attention",
            Kind::Other => "norms, packing, merging",
            Kind::Ring => "ring: KV and gradients",
            Kind::Ulysses => "Ulysses: all-to-all",
            Kind::Experts => "rows of experts",
            Kind::Tensor => "tensor parallelism",
            Kind::Data => "gradients and weights",
        }
    }
}

/// Time in which no kernel runs.
const WAIT: RGBColor = RGBColor(252, 214, 214);
const WAIT_EDGE: RGBColor = RGBColor(200, 30, 40);

const LEFT: f64 = 176.0;
const RIGHT: f64 = 1566.0;
/// Where the legend begins.
const LEGEND: f64 = 34.0;
const TOP: f64 = 118.0;
/// How far a half goes on for what runs behind the layer, if it does so long, in times of the longest layer.
const BEHIND: f64 = 1.15;
/// Between forward and backward.
const GAP: f64 = 40.0;

/// One way: its spans, its lanes.
struct Track<'a> {
    way: &'a str,
    spans: Vec<&'a Span>,
    /// The compute lane first.
    lanes: Vec<&'a str>,
}

impl<'a> Track<'a> {
    fn all(spans: &'a [Span]) -> Vec<Track<'a>> {
        let mut tracks: Vec<Track> = Vec::new();
        for span in spans {
            match tracks.iter_mut().find(|t| t.way == span.way) {
                Some(track) => track.spans.push(span),
                None => tracks.push(Track { way: &span.way, spans: vec![span], lanes: vec![] }),
            }
        }
        for track in &mut tracks {
            track.lanes = track.spans.iter().map(|s| s.lane.as_str()).collect();
            track.lanes.sort_unstable_by_key(|lane| (!lane.starts_with("compute"), *lane));
            track.lanes.dedup();
        }
        tracks
    }

    fn pass(&self, forward: bool) -> impl Iterator<Item = &'a Span> + '_ {
        self.spans.iter().copied().filter(move |s| s.forward == forward)
    }

    /// When the last kernel of a pass ends; what communication goes on behind the layer is no part of it.
    fn end(&self, forward: bool) -> f64 {
        self.pass(forward).filter(|s| s.computes()).map(|s| s.end_s).fold(0.0, f64::max)
    }

    /// Gaps between the kernels of a pass.
    fn waits(&self, forward: bool) -> Vec<(f64, f64)> {
        let mut kernels: Vec<(f64, f64)> =
            self.pass(forward).filter(|s| s.computes()).map(|s| (s.start_s, s.end_s)).collect();
        kernels.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut gaps = Vec::new();
        let mut until = 0.0;
        for (start, end) in kernels {
            if start > until {
                gaps.push((until, start));
            }
            until = end.max(until);
        }
        gaps
    }

    /// How long before the backward pass of the layer the first transfer for it begins, if any ends before it, too: it is
    /// not in the picture.
    fn early(&self) -> Option<f64> {
        let before = self.pass(false).filter(|s| s.end_s <= 0.0);
        before.map(|s| -s.start_s).max_by(f64::total_cmp)
    }

    fn waited(&self) -> f64 {
        [true, false].iter().flat_map(|&f| self.waits(f)).map(|(from, to)| to - from).sum()
    }
}

/// Seconds to places: backward stands behind the longest forward pass.
struct Scale {
    per_second: f64,
    ends: [f64; 2],
}

impl Scale {
    fn new(tracks: &[Track]) -> Scale {
        let longest = |forward| {
            let kernels = tracks.iter().map(|t| t.end(forward)).fold(1e-9, f64::max);
            let last = tracks.iter().flat_map(|t| t.pass(forward)).map(|s| s.end_s).fold(kernels, f64::max);
            last.min(BEHIND * kernels)
        };
        let ends = [longest(true), longest(false)];
        Scale { per_second: (RIGHT - LEFT - GAP) / (ends[0] + ends[1]), ends }
    }

    fn origin(&self, forward: bool) -> f64 {
        if forward { LEFT } else { LEFT + self.ends[0] * self.per_second + GAP }
    }

    /// What runs on behind the layer is cut at the edge of its half.
    fn x(&self, forward: bool, seconds: f64) -> f64 {
        let end = self.ends[usize::from(!forward)];
        self.origin(forward) + seconds.clamp(0.0, end) * self.per_second
    }
}

fn figure(spans: &[Span], words: &[String]) -> Vec<Mark> {
    let tracks = Track::all(spans);
    let scale = Scale::new(&tracks);
    let lanes: usize = tracks.iter().map(|t| t.lanes.len()).sum();
    let bottom = f64::from(HEIGHT) - 150.0;
    let heading = 40.0;
    let lane = ((bottom - TOP - heading * tracks.len() as f64) / lanes as f64).min(60.0);
    let mut marks = titles(spans, words);
    let mut y = TOP;
    for track in &tracks {
        marks.extend(track_marks(track, &scale, (y, heading, lane)));
        y += heading + lane * track.lanes.len() as f64;
    }
    marks.extend(time_axis(&scale, y + 10.0));
    marks.extend(legend(spans, y + 84.0));
    marks
}

fn titles(spans: &[Span], words: &[String]) -> Vec<Mark> {
    let length = short(spans[0].seq_len);
    let title = format!("One layer on one GPU, {length} tokens a sequence: what runs when");
    let mut parts = words.to_vec();
    parts.push(match spans[0].recompute.as_str() {
        "none" => "no recomputation".into(),
        how => format!("{how} recomputation"),
    });
    parts.push("one microbatch, the middle one of three layers, all ways on one scale".into());
    vec![
        Mark::text((34.0, 42.0), title, 29.0, INK, Align::Left),
        Mark::text((34.0, 82.0), parts.join("  \u{b7}  "), 16.5, FAINT, Align::Left),
    ]
}

fn track_marks(track: &Track, scale: &Scale, (top, heading, lane): (f64, f64, f64)) -> Vec<Mark> {
    let ms = |s: f64| format!("{:.2} ms", s * 1e3);
    let (forward, backward) = (track.end(true), track.end(false));
    let share = 100.0 * track.waited() / (forward + backward);
    let words = format!(
        "forward {}, backward {}; without a kernel for {} of it ({share:.0} %){}",
        ms(forward),
        ms(backward),
        ms(track.waited()),
        track
            .early()
            .map_or(String::new(), |s| format!("; its first transfer of the backward pass begins {} before", ms(s)))
    );
    let y = top + heading / 2.0 + 3.0;
    let mut marks = vec![
        Mark::text((34.0, y), track.way, 19.0, INK, Align::Left),
        Mark::text((LEFT, y), words, 16.0, FAINT, Align::Left),
    ];
    for (place, name) in track.lanes.iter().enumerate() {
        let (from, to) = (top + heading + place as f64 * lane + 2.0, top + heading + (place + 1) as f64 * lane - 2.0);
        marks.push(Mark::text((LEFT - 10.0, (from + to) / 2.0), lane_name(name), 14.0, INK, Align::Right));
        for half in [true, false] {
            let (left, right) = (scale.x(half, 0.0), scale.x(half, f64::INFINITY));
            marks.push(Mark::line(&[(left, to + 2.0), (right, to + 2.0)], GRID, 1.0));
            if place == 0 {
                let wait = |(a, b): (f64, f64)| wait_marks((scale.x(half, a), from), (scale.x(half, b), to));
                marks.extend(track.waits(half).into_iter().flat_map(wait));
            }
            let of_lane = track.pass(half).filter(|s| s.lane == *name);
            marks.extend(of_lane.flat_map(|s| bar(s, scale, from, to)));
        }
    }
    marks
}

/// `comm.cp.1` is the second communicator of the ring.
fn lane_name(lane: &str) -> String {
    let parts: Vec<&str> = lane.split('.').collect();
    match parts[..] {
        ["compute", _] => "kernels".into(),
        ["comm", "cp", "0"] => "ring".into(),
        ["comm", "cp", _] => "ring, gradients".into(),
        ["comm", "up", _] => "all-to-all".into(),
        // Weights of experts have fewer copies, and a communicator of their own.
        ["comm", group, _] if group.contains("edp") => "experts' gradients".into(),
        ["comm", group, _] if group.contains("dp") => "gradients".into(),
        ["comm", "ep", _] => "rows of experts".into(),
        ["comm", group, _] => group.into(),
        _ => lane.into(),
    }
}

fn bar(span: &Span, scale: &Scale, top: f64, bottom: f64) -> Vec<Mark> {
    let (from, to) = (scale.x(span.forward, span.start_s), scale.x(span.forward, span.end_s));
    if to - from < 0.05 {
        return vec![];
    }
    let color = Kind::of(span).color();
    let mut marks = vec![Mark::Rect { from: (from, top), to: (to.max(from + 1.0), bottom), color }];
    // Neighbours are told apart where there is room for it.
    if to - from > 5.0 {
        marks.push(Mark::line(&[(to, top), (to, bottom)], PAPER, 1.0));
    }
    marks
}

fn wait_marks(from: Point, to: Point) -> Vec<Mark> {
    if to.0 - from.0 < 0.5 {
        return vec![];
    }
    let middle = (from.1 + to.1) / 2.0;
    vec![Mark::Rect { from, to, color: WAIT }, Mark::line(&[(from.0, middle), (to.0, middle)], WAIT_EDGE, 1.5)]
}

fn time_axis(scale: &Scale, y: f64) -> Vec<Mark> {
    let mut marks = Vec::new();
    let whole = scale.ends[0] + scale.ends[1];
    let raw = whole / 12.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= raw).unwrap_or(raw);
    for (forward, name) in [(true, "forward"), (false, "backward")] {
        let (left, right) = (scale.x(forward, 0.0), scale.x(forward, f64::INFINITY));
        marks.push(Mark::line(&[(left, y), (right, y)], INK, 1.5));
        let ticks = (scale.ends[usize::from(!forward)] / step) as u32;
        for tick in 0..=ticks {
            let x = scale.x(forward, f64::from(tick) * step);
            marks.push(Mark::line(&[(x, y), (x, y + 6.0)], INK, 1.5));
            let text = (f64::from(tick) * step * 1e6).round() / 1e3;
            marks.push(Mark::text((x, y + 20.0), text, 15.0, INK, Align::Middle));
        }
        let words = format!("{name} (ms)");
        marks.push(Mark::text(((left + right) / 2.0, y + 44.0), words, 16.0, INK, Align::Middle));
    }
    marks
}

fn legend(spans: &[Span], y: f64) -> Vec<Mark> {
    const WAITING: &str = "waiting: no kernel runs";
    let present = Kind::ALL.into_iter().filter(|kind| spans.iter().any(|s| Kind::of(s) == *kind));
    let wide = |name: &str| 54.0 + 8.0 * name.len() as f64;
    let all: f64 = present.clone().map(|kind| wide(kind.name())).chain([wide(WAITING)]).sum();
    // As large as there is room for.
    let by = ((RIGHT - LEGEND) / all).min(1.0);
    let (mut marks, mut x) = (Vec::new(), LEGEND);
    for (color, name) in present.map(|k| (k.color(), k.name())) {
        marks.push(Mark::Rect { from: (x, y - 8.0), to: (x + 22.0 * by, y + 8.0), color });
        marks.push(Mark::text((x + 30.0 * by, y), name, 15.0 * by, INK, Align::Left));
        x += wide(name) * by;
    }
    marks.extend(wait_marks((x, y - 8.0), (x + 22.0 * by, y + 8.0)));
    marks.push(Mark::text((x + 30.0 * by, y), WAITING, 15.0 * by, INK, Align::Left));
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(way: &str, forward: bool, lane: &str, (start_s, end_s): (f64, f64)) -> Span {
        let what = if lane.starts_with("compute") { "attention" } else { "transfer" }.to_string();
        let (way, lane, recompute) = (way.into(), lane.into(), "none".into());
        Span { way, seq_len: 65_536, recompute, forward, lane, what, start_s, end_s }
    }

    fn layer() -> Vec<Span> {
        vec![
            span("ring 8", true, "comm.cp.0", (0.0, 3e-3)),
            span("ring 8", true, "compute.0", (0.0, 1e-3)),
            span("ring 8", true, "compute.0", (3e-3, 4e-3)),
            span("ring 8", false, "compute.0", (0.0, 2e-3)),
            span("ulysses 8", true, "comm.up.0", (0.0, 1e-3)),
            span("ulysses 8", true, "compute.0", (1e-3, 2e-3)),
            span("ulysses 8", false, "compute.0", (0.0, 4e-3)),
        ]
    }

    #[test]
    fn gaps_between_kernels_are_waits() {
        let spans = layer();
        let tracks = Track::all(&spans);
        assert_eq!(tracks[0].waits(true), [(1e-3, 3e-3)]);
        assert_eq!((tracks[0].end(true), tracks[0].waits(false).len()), (4e-3, 0));
        assert_eq!(tracks[1].waits(true), [(0.0, 1e-3)]);
        assert_eq!(tracks[0].lanes, ["compute.0", "comm.cp.0"]);
    }

    #[test]
    fn all_ways_share_one_scale_inside_the_page() {
        let spans = layer();
        let scale = Scale::new(&Track::all(&spans));
        assert_eq!(scale.ends, [4e-3, 4e-3]);
        assert!((scale.x(false, 1.0) - RIGHT).abs() < 1e-9 && scale.x(true, 0.0) == LEFT);
        let said = format!("{:?}", figure(&spans, &[]));
        for words in ["ring 8", "ulysses 8", "forward 4.00 ms", "(33 %)", "all-to-all"] {
            assert!(said.contains(words), "{words}");
        }
    }

    #[test]
    fn a_study_without_spans_has_no_such_picture() {
        let dir = tempfile::tempdir().unwrap();
        assert!(block_timeline(&dir.path().join("rows.csv"), dir.path()).unwrap().is_empty());
    }
}
