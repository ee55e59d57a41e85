//! Ulysses or ring: a map of which is faster by how much. Columns: KV heads; rows: links; in a panel, sequence
//! length to the right and ranks upward.

use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::notes::Notes;
use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, GRID, INK, Mark, PAPER, Point, ramp, save, short, with_room};
use crate::error::Result;

/// Writes `crossover.svg` and `.png`.
pub fn crossover(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let cells = Sheet::read(rows_csv)?.lines().map(|line| Cell::of(&line)).collect::<Result<Vec<_>>>()?;
    save(&figure(&cells, &Notes::beside(rows_csv)?), out_dir, "crossover")
}

/// A row of the study. The names are those of the columns.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    links: String,
    heads: u64,
    kv_heads: u64,
    seq_len: u64,
    ranks: u32,
    ulysses_time_s: Option<f64>,
    ring_time_s: Option<f64>,
}

impl Cell {
    fn of(line: &Line) -> Result<Cell> {
        let count = |column| line.value(column, "a count of at least 1", |&n: &u64| n > 0);
        let time = |column| line.maybe(column, "a time above 0, or nothing", |&t: &f64| t > 0.0 && t.is_finite());
        Ok(Cell {
            links: line.text("links")?.into(),
            heads: count("heads")?,
            kv_heads: count("kv_heads")?,
            seq_len: count("seq_len")?,
            ranks: line.value("ranks", "a count of GPUs of at least 1", |&n: &u32| n > 0)?,
            ulysses_time_s: time("ulysses_time_s")?,
            ring_time_s: time("ring_time_s")?,
        })
    }

    fn outcome(&self) -> Outcome {
        match (self.ulysses_time_s, self.ring_time_s) {
            (Some(u), Some(r)) => Outcome::Both((u / r).log2()),
            (Some(_), None) => Outcome::OnlyUlysses,
            (None, Some(_)) => Outcome::OnlyRing,
            (None, None) => Outcome::Neither,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Outcome {
    /// log2 of Ulysses' time over the ring's.
    Both(f64),
    OnlyUlysses,
    OnlyRing,
    Neither,
}

impl Outcome {
    /// They are on two sides of the border. Where both are even there is none: it would follow noise.
    fn differs(self, other: Outcome) -> bool {
        let even = |o: Outcome| matches!(o, Outcome::Both(log) if log.abs() < EVEN.ln_1p() / 2f64.ln());
        match (self.ring_is_ahead(), other.ring_is_ahead()) {
            (Some(a), Some(b)) => a != b && !(even(self) && even(other)),
            _ => false,
        }
    }

    /// None where nothing runs.
    fn ring_is_ahead(self) -> Option<bool> {
        match self {
            Outcome::Both(log) => Some(log > 0.0),
            Outcome::OnlyUlysses => Some(false),
            Outcome::OnlyRing => Some(true),
            Outcome::Neither => None,
        }
    }
}

/// Ulysses twice as fast and more, even, the ring twice as fast and more.
const SCALE: [RGBColor; 5] = [
    RGBColor(18, 78, 160),
    RGBColor(128, 184, 232),
    RGBColor(250, 249, 246),
    RGBColor(250, 172, 104),
    RGBColor(196, 66, 10),
];
const ONLY_ULYSSES: RGBColor = RGBColor(196, 220, 242);
const ONLY_RING: RGBColor = RGBColor(252, 220, 190);
/// Nearer than this is a draw, and no figure is written: the constants are not known any better.
const EVEN: f64 = 0.02;

const LEFT: f64 = 206.0;
const RIGHT: f64 = 1346.0;
const TOP: f64 = 164.0;
const BOTTOM: f64 = 908.0;
const GAP: Point = (16.0, 14.0);
const LEGEND: f64 = 1376.0;

/// What the axes have, in the order of the picture.
struct Axes {
    links: Vec<String>,
    /// Falling: the ratio of heads to KV heads grows to the right.
    kv_heads: Vec<u64>,
    seq_len: Vec<u64>,
    ranks: Vec<u32>,
}

impl Axes {
    fn new(cells: &[Cell]) -> Axes {
        let mut axes = Axes {
            links: vec![],
            kv_heads: cells.iter().map(|c| c.kv_heads).collect(),
            seq_len: cells.iter().map(|c| c.seq_len).collect(),
            ranks: cells.iter().map(|c| c.ranks).collect(),
        };
        for cell in cells {
            if !axes.links.contains(&cell.links) {
                axes.links.push(cell.links.clone());
            }
        }
        axes.kv_heads.sort_unstable_by(|a, b| b.cmp(a));
        axes.seq_len.sort_unstable();
        axes.ranks.sort_unstable();
        axes.kv_heads.dedup();
        axes.seq_len.dedup();
        axes.ranks.dedup();
        axes
    }

    fn panel(&self, column: usize, row: usize) -> Panel {
        let size = |whole: f64, count: usize, gap: f64| (whole - (count - 1) as f64 * gap) / count as f64;
        let (w, h) = (size(RIGHT - LEFT, self.kv_heads.len(), GAP.0), size(BOTTOM - TOP, self.links.len(), GAP.1));
        let at = (LEFT + column as f64 * (w + GAP.0), TOP + row as f64 * (h + GAP.1));
        Panel { at, cell: (w / self.seq_len.len() as f64, h / self.ranks.len() as f64), rows: self.ranks.len() }
    }
}

/// A rectangle of cells: lengths to the right, ranks upward.
struct Panel {
    at: Point,
    cell: Point,
    rows: usize,
}

impl Panel {
    /// The upper left corner of a cell.
    fn corner(&self, x: usize, y: usize) -> Point {
        (self.at.0 + x as f64 * self.cell.0, self.at.1 + (self.rows - 1 - y) as f64 * self.cell.1)
    }

    fn middle(&self, x: usize, y: usize) -> Point {
        let (left, top) = self.corner(x, y);
        (left + self.cell.0 / 2.0, top + self.cell.1 / 2.0)
    }
}

fn figure(cells: &[Cell], notes: &Notes) -> Vec<Mark> {
    let axes = Axes::new(cells);
    let mut marks = titles(cells, notes);
    for (row, links) in axes.links.iter().enumerate() {
        for (column, &kv_heads) in axes.kv_heads.iter().enumerate() {
            let here = |c: &&Cell| c.links == *links && c.kv_heads == kv_heads;
            let grid = Grid::new(&axes, cells.iter().filter(here));
            marks.extend(grid.marks(&axes.panel(column, row)));
        }
    }
    marks.extend(column_heads(&axes, cells[0].heads));
    marks.extend(row_heads(&axes));
    marks.extend(ticks(&axes));
    marks.extend(legend(cells));
    marks
}

fn titles(cells: &[Cell], notes: &Notes) -> Vec<Mark> {
    let heads = cells[0].heads;
    let of = notes.text("model").map_or(String::new(), |m| format!(", {m}"));
    let title = format!("Ulysses or ring attention: which is faster, and by how much{of}");
    let window = notes.number("window");
    let what =
        window.map_or("one causal attention".into(), |w| format!("causal attention, mean of layers (window {w})"));
    let mut parts = vec![what + ", forward and backward", "1 sequence".into()];
    parts.push(match notes.number("head_dim") {
        Some(dim) => format!("{heads} heads of {dim}"),
        None => format!("{heads} heads"),
    });
    parts.extend(notes.text("dtype"));
    parts.extend(notes.text("cluster").map(|c| format!("GPUs of {c}")));
    parts.extend(notes.text("stack").map(|s| format!("stack {s}")));
    parts.push("zigzag ring".into());
    if window.is_none() {
        parts.push("the rest of a layer is the same both ways".into());
    }
    vec![
        Mark::fitting((34.0, 40.0), title, 29.0, INK),
        Mark::fitting((34.0, 78.0), parts.join("  \u{b7}  "), 16.5, FAINT),
    ]
}

/// The outcomes of a panel, by length and ranks.
struct Grid {
    columns: usize,
    rows: usize,
    all: Vec<Option<Outcome>>,
}

impl Grid {
    fn new<'a>(axes: &Axes, cells: impl Iterator<Item = &'a Cell>) -> Grid {
        let (columns, rows) = (axes.seq_len.len(), axes.ranks.len());
        let mut all = vec![None; columns * rows];
        for cell in cells {
            let x = axes.seq_len.iter().position(|&s| s == cell.seq_len).expect("an axis has every value");
            let y = axes.ranks.iter().position(|&r| r == cell.ranks).expect("an axis has every value");
            all[y * columns + x] = Some(cell.outcome());
        }
        Grid { columns, rows, all }
    }

    /// None beyond the edges, and where nothing was asked.
    fn get(&self, x: usize, y: usize) -> Option<Outcome> {
        if x < self.columns && y < self.rows { self.all[y * self.columns + x] } else { None }
    }

    fn places(&self) -> impl Iterator<Item = (usize, usize, Outcome)> + '_ {
        let at = |i: usize| (i % self.columns, i / self.columns);
        self.all.iter().enumerate().filter_map(move |(i, o)| o.map(|o| (at(i).0, at(i).1, o)))
    }

    fn marks(&self, panel: &Panel) -> Vec<Mark> {
        let (w, h) = panel.cell;
        let mut marks = Vec::new();
        for (x, y, outcome) in self.places() {
            let (left, top) = panel.corner(x, y);
            marks.extend(cell_marks((left, top), (left + w, top + h), outcome));
        }
        marks.extend(self.places().filter_map(|(x, y, outcome)| figure_of(outcome, panel.middle(x, y), h)));
        marks.extend(self.border(panel));
        let (right, bottom) = (panel.at.0 + w * self.columns as f64, panel.at.1 + h * self.rows as f64);
        let (left, top) = panel.at;
        let frame = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
        marks.push(Mark::line(&frame, FAINT, 1.0));
        marks
    }

    /// Along the edges of cells, between those where Ulysses is ahead and those where the ring is.
    fn border(&self, panel: &Panel) -> Vec<Mark> {
        let (w, h) = panel.cell;
        let differ = |a: Outcome, b: Option<Outcome>| b.is_some_and(|b| a.differs(b));
        let mut marks = Vec::new();
        for (x, y, here) in self.places() {
            let (left, top) = panel.corner(x, y);
            if differ(here, self.get(x + 1, y)) {
                marks.push(Mark::line(&[(left + w, top), (left + w, top + h)], INK, 2.5));
            }
            if differ(here, self.get(x, y + 1)) {
                marks.push(Mark::line(&[(left, top), (left + w, top)], INK, 2.5));
            }
        }
        marks
    }
}

fn cell_marks(from: Point, to: Point, outcome: Outcome) -> Vec<Mark> {
    let fill = |color| Mark::Rect { from, to, color };
    match outcome {
        Outcome::Both(log) => vec![fill(ramp(&SCALE, 0.5 + 0.5 * log))],
        Outcome::OnlyUlysses => hatched(from, to, ONLY_ULYSSES, SCALE[0]),
        Outcome::OnlyRing => hatched(from, to, ONLY_RING, SCALE[4]),
        Outcome::Neither => vec![fill(GRID)],
    }
}

/// How many times faster the winner is.
fn figure_of(outcome: Outcome, at: Point, height: f64) -> Option<Mark> {
    let Outcome::Both(log) = outcome else { return None };
    let (times, size) = (log.abs().exp2(), (height * 0.52).min(12.5));
    let dark = log.abs() > 0.62;
    let text = match times {
        t if t < 1.0 + EVEN => "=".to_string(),
        t if t < 1.095 => format!("{t:.2}"),
        t if t < 9.95 => format!("{t:.1}"),
        t => format!("{t:.0}"),
    };
    Some(Mark::text(at, text, size, if dark { PAPER } else { INK }, Align::Middle))
}

/// Lines from lower left to upper right over a light fill, cut at the edges.
fn hatched(from: Point, to: Point, fill: RGBColor, ink: RGBColor) -> Vec<Mark> {
    const STEP: f64 = 9.0;
    let mut marks = vec![Mark::Rect { from, to, color: fill }];
    // A line is where x + y is a multiple of the step, so that neighbours meet.
    let (low, high) = (from.0 + from.1, to.0 + to.1);
    let mut sum = (low / STEP).ceil() * STEP;
    while sum < high {
        let left = (sum - to.1).max(from.0);
        let right = (sum - from.1).min(to.0);
        marks.push(Mark::line(&[(left, sum - left), (right, sum - right)], ink, 1.0));
        sum += STEP;
    }
    marks
}

fn column_heads(axes: &Axes, heads: u64) -> Vec<Mark> {
    let head = |(column, &kv_heads): (usize, &u64)| {
        let panel = axes.panel(column, 0);
        let x = panel.at.0 + panel.cell.0 * axes.seq_len.len() as f64 / 2.0;
        let ratio = heads / kv_heads;
        let title = format!("{kv_heads} KV head{}", if kv_heads == 1 { "" } else { "s" });
        let words = match ratio {
            1 => "each head has its own".to_string(),
            _ => format!("{ratio} heads share one"),
        };
        [
            Mark::text((x, TOP - 40.0), title, 18.0, INK, Align::Middle),
            Mark::text((x, TOP - 18.0), words, 15.0, FAINT, Align::Middle),
        ]
    };
    axes.kv_heads.iter().enumerate().flat_map(head).collect()
}

/// What the words of the `links` column mean: a heading and a line below it.
fn meaning(links: &str) -> [String; 3] {
    let [first, second, third] = match links.split_once(':') {
        Some(("node", rate)) => ["one node".into(), format!("{rate} GB/s"), "all on one switch".to_string()],
        Some(("net", rate)) => ["network".into(), format!("{rate} GB/s"), "one GPU a node".into()],
        _ if links == "cluster" => ["the cluster".into(), "as it stands".into(), "node after node".into()],
        _ => [links.to_string(), String::new(), String::new()],
    };
    [first, second, third]
}

fn row_heads(axes: &Axes) -> Vec<Mark> {
    let head = |(row, links): (usize, &String)| {
        let panel = axes.panel(0, row);
        let y = panel.at.1 + panel.cell.1 * axes.ranks.len() as f64 / 2.0;
        let [first, second, third] = meaning(links);
        [
            Mark::text((34.0, y - 24.0), first, 17.0, INK, Align::Left),
            Mark::text((34.0, y), second, 17.0, INK, Align::Left),
            Mark::text((34.0, y + 23.0), third, 12.5, FAINT, Align::Left),
        ]
    };
    axes.links.iter().enumerate().flat_map(head).collect()
}

/// Ranks at the left of each row, lengths under the last.
fn ticks(axes: &Axes) -> Vec<Mark> {
    let mut marks = Vec::new();
    for row in 0..axes.links.len() {
        let panel = axes.panel(0, row);
        for (y, ranks) in axes.ranks.iter().enumerate() {
            let at = (LEFT - 8.0, panel.middle(0, y).1);
            marks.push(Mark::text(at, ranks, 13.0, INK, Align::Right));
        }
    }
    for column in 0..axes.kv_heads.len() {
        let panel = axes.panel(column, axes.links.len() - 1);
        let places: Vec<(u64, f64)> = (0..).zip(&axes.seq_len).map(|(x, &n)| (n, panel.middle(x, 0).0)).collect();
        let (named, size) = with_room(&places, 13.0);
        for (length, x) in places.into_iter().filter(|(length, _)| named.contains(length)) {
            marks.push(Mark::text((x, BOTTOM + 15.0), short(length), size, INK, Align::Middle));
        }
    }
    let words = "sequence length (tokens, 1K = 1024), all ranks together";
    marks.push(Mark::text(((LEFT + RIGHT) / 2.0, BOTTOM + 44.0), words, 17.0, INK, Align::Middle));
    marks.push(Mark::text((LEFT - 8.0, TOP - 14.0), "ranks", 14.0, INK, Align::Right));
    marks
}

/// The colours, then the signs that the map has, then how to read it.
fn legend(cells: &[Cell]) -> Vec<Mark> {
    let mut marks = vec![Mark::text((LEGEND, TOP - 40.0), "How many times faster", 17.0, INK, Align::Left)];
    marks.extend(color_bar(TOP - 8.0));
    let mut y = TOP + 300.0;
    for sign in Sign::ALL.into_iter().filter(|sign| sign.occurs(cells)) {
        marks.extend(sign.marks(y));
        y += 18.0 * sign.words().len() as f64 + 14.0;
    }
    marks.extend(reading(y + 16.0));
    marks
}

/// What a mark on the map means.
#[derive(Clone, Copy)]
enum Sign {
    Border,
    Even,
    OnlyRing,
    OnlyUlysses,
    Neither,
}

impl Sign {
    const ALL: [Sign; 5] = [Sign::Border, Sign::Even, Sign::OnlyRing, Sign::OnlyUlysses, Sign::Neither];

    fn occurs(self, cells: &[Cell]) -> bool {
        let any = |outcome| cells.iter().any(|c| c.outcome() == outcome);
        match self {
            Sign::Border | Sign::Even => true,
            Sign::OnlyRing => any(Outcome::OnlyRing),
            Sign::OnlyUlysses => any(Outcome::OnlyUlysses),
            Sign::Neither => any(Outcome::Neither),
        }
    }

    fn words(self) -> &'static [&'static str] {
        match self {
            Sign::Border => &["the faster changes"],
            Sign::Even => &["even, within 2 %"],
            Sign::OnlyRing => &["only the ring runs: Ulysses", "does not divide heads, or fit"],
            Sign::OnlyUlysses => &["only Ulysses runs: the ring", "does not fit into memory"],
            Sign::Neither => &["neither runs"],
        }
    }

    fn marks(self, y: f64) -> Vec<Mark> {
        let (from, to) = ((LEGEND, y - 9.0), (LEGEND + 30.0, y + 9.0));
        let mut marks = match self {
            Sign::Border => vec![Mark::line(&[(from.0, y), (to.0, y)], INK, 2.5)],
            Sign::Even => vec![Mark::text((LEGEND + 15.0, y), "=", 15.0, INK, Align::Middle)],
            Sign::OnlyRing => cell_marks(from, to, Outcome::OnlyRing),
            Sign::OnlyUlysses => cell_marks(from, to, Outcome::OnlyUlysses),
            Sign::Neither => cell_marks(from, to, Outcome::Neither),
        };
        let word = |(i, words)| Mark::text((LEGEND + 42.0, y + 18.0 * i as f64), words, 13.5, INK, Align::Left);
        marks.extend(self.words().iter().enumerate().map(word));
        marks
    }
}

fn color_bar(top: f64) -> Vec<Mark> {
    const HEIGHT: f64 = 260.0;
    const STEPS: usize = 65;
    let step = HEIGHT / STEPS as f64;
    let mut marks = Vec::new();
    for i in 0..STEPS {
        let from = (LEGEND, top + i as f64 * step);
        let color = ramp(&SCALE, 1.0 - i as f64 / (STEPS - 1) as f64);
        marks.push(Mark::Rect { from, to: (LEGEND + 30.0, from.1 + step + 0.5), color });
    }
    let labels = ["ring 2 x and more", "ring 1.4 x", "equal", "Ulysses 1.4 x", "Ulysses 2 x and more"];
    for (i, words) in labels.iter().enumerate() {
        let y = top + HEIGHT * i as f64 / (labels.len() - 1) as f64;
        marks.push(Mark::line(&[(LEGEND + 30.0, y), (LEGEND + 36.0, y)], INK, 1.0));
        marks.push(Mark::text((LEGEND + 42.0, y), words, 14.0, INK, Align::Left));
    }
    marks
}

/// How both ways work, as far as it decides who wins.
fn reading(top: f64) -> Vec<Mark> {
    let lines = [
        ("The ring", true),
        ("passes keys and values on", false),
        ("P - 1 times, gradients back", false),
        ("in fp32. Long blocks and few", false),
        ("KV heads hide that behind", false),
        ("attention; short blocks fill", false),
        ("a GPU badly.", false),
        ("", false),
        ("Ulysses", true),
        ("waits for all-to-alls of Q, K,", false),
        ("V and O, shorter with more", false),
        ("ranks, then attends to the", false),
        ("whole sequence at once, a", false),
        ("few heads on each rank.", false),
    ];
    let mark = |(i, (words, strong)): (usize, &(&str, bool))| {
        let at = (LEGEND, top + i as f64 * 18.0);
        let (size, color) = if *strong { (15.0, INK) } else { (13.5, FAINT) };
        Mark::text(at, words, size, color, Align::Left)
    };
    lines.iter().enumerate().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "links,heads,kv_heads,seq_len,ranks,ulysses_time_s,ring_time_s,ulysses_over_ring";

    fn drawn(lines: &[&str]) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        std::fs::write(&path, format!("{HEAD}\n{}\n", lines.join("\n"))).unwrap();
        let files = crossover(&path, dir.path())?;
        Ok(std::fs::read_to_string(&files[0]).unwrap())
    }

    fn cell(times: (Option<f64>, Option<f64>), at: (u64, u32)) -> Cell {
        let (ulysses_time_s, ring_time_s) = times;
        Cell { links: "net:50".into(), heads: 8, kv_heads: 2, seq_len: at.0, ranks: at.1, ulysses_time_s, ring_time_s }
    }

    #[test]
    fn every_number_and_every_axis_is_on_the_page() {
        let svg = drawn(&["node:365,8,8,8192,2,1.0,3.0,0.33", "net:50,8,2,1048576,16,2.0,1.0,2.0"]).unwrap();
        for words in ["365 GB/s", "50 GB/s", "8 KV heads", "4 heads share one", "1M", "3.0", "2.0"] {
            assert!(svg.contains(words), "{words}");
        }
        assert!(!svg.contains("does not fit into memory"), "no such point, no such sign");
    }

    #[test]
    fn the_border_runs_between_the_two() {
        assert!(!Outcome::Both(0.01).differs(Outcome::Both(-0.01)) && Outcome::Both(0.01).differs(Outcome::Both(-0.1)));
        let cells = [cell((Some(1.0), Some(2.0)), (8, 2)), cell((Some(2.0), Some(1.0)), (16, 2))];
        let axes = Axes::new(&cells);
        let border = Grid::new(&axes, cells.iter()).border(&axes.panel(0, 0));
        let [Mark::Line { points, .. }] = &border[..] else { panic!("{border:?}") };
        assert_eq!(points[0].0, (LEFT + RIGHT) / 2.0);
        // What cannot run has lost: the border runs there, too, but not where nothing is known.
        let only = [cell((None, Some(2.0)), (8, 2)), cell((Some(1.0), Some(2.0)), (8, 4)), cell((None, None), (16, 4))];
        let axes = Axes::new(&only);
        assert_eq!(Grid::new(&axes, only.iter()).border(&axes.panel(0, 0)).len(), 1);
    }

    #[test]
    fn hatches_stay_in_their_cell() {
        for mark in hatched((10.0, 20.0), (50.0, 35.0), GRID, INK) {
            if let Mark::Line { points, .. } = mark {
                let inside = |p: &Point| (10.0..=50.0).contains(&p.0) && (20.0..=35.0).contains(&p.1);
                assert!(points.iter().all(inside), "{points:?}");
            }
        }
    }

    #[test]
    fn a_bad_time_is_named() {
        let error = drawn(&["net:50,8,2,8192,2,-1,1.0,2"]).unwrap_err().to_string();
        assert!(error.contains("ulysses_time_s: line 2 has \"-1\""), "{error}");
    }
}
