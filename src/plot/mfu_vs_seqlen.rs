//! MFU against sequence length: a thick line for each family of ways to split the sequence, its best at every length,
//! and a thin one for each of its ways. A table under the axis says which way that best is, or why there is none.

mod frame;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::notes::Notes;
use super::rows::{self, Row, several_batches, stages, tokens_per_step};
use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, PAPER, Point, Shape, ramp, save, short};
use super::ways::{Best, Family, Kind, Way, best, why_none};
use crate::error::Result;
use crate::report::human::counted;
use frame::{Frame, LEFT, LEGEND, RADIUS, RIGHT, TICK, TOP};
use table::table;

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

type Points = BTreeMap<u64, Best>;

/// The ways of a family, and the best of them at each length.
struct Group {
    family: Family,
    ways: Vec<(Way, Points)>,
    /// Why none of them runs, of lengths at which that is so.
    never: BTreeMap<u64, Kind>,
}

/// What a family reaches at a length, and how.
struct Top<'a> {
    way: &'a Way,
    mfu: f64,
    full_recompute: bool,
    zero: u32,
    global_batch: u64,
}

impl Group {
    /// Families in the order of the legend.
    fn all(rows: &[Row]) -> Vec<Group> {
        let mut groups: BTreeMap<Family, Vec<(Way, Points)>> = BTreeMap::new();
        for (way, points) in best(rows) {
            groups.entry(way.family).or_default().push((way, points));
        }
        let mut cells: BTreeMap<(Family, u64), Vec<&Row>> = BTreeMap::new();
        rows.iter().for_each(|row| cells.entry((Way::of(row).family, row.seq_len)).or_default().push(row));
        let never = |family| {
            let mine = cells.range((family, 0)..=(family, u64::MAX));
            mine.filter_map(|((_, length), rows)| Some((*length, why_none(rows.iter().copied())?))).collect()
        };
        groups.into_iter().map(|(family, ways)| Group { family, ways, never: never(family) }).collect()
    }

    /// Of equals the first, which has the lower degree.
    fn top(&self, length: u64) -> Option<Top<'_>> {
        let reached = |points: &Points| match points.get(&length) {
            Some(&Best::Mfu { mfu, full_recompute, zero, global_batch }) => {
                Some((mfu, full_recompute, zero, global_batch))
            }
            _ => None,
        };
        // max_by takes the last.
        let all = self.ways.iter().rev().filter_map(|(way, points)| Some((way, reached(points)?)));
        let (way, (mfu, full_recompute, zero, global_batch)) = all.max_by(|a, b| a.1.0.total_cmp(&b.1.0))?;
        Some(Top { way, mfu, full_recompute, zero, global_batch })
    }

    fn reason(&self, length: u64) -> Option<&Kind> {
        self.never.get(&length)
    }
}

fn mfu(point: &Best) -> Option<f64> {
    match point {
        Best::Mfu { mfu, .. } => Some(*mfu),
        Best::Never(_) => None,
    }
}

fn figure(rows: &[Row], notes: &Notes) -> Vec<Mark> {
    let groups = Group::all(rows);
    let frame = Frame::new(&groups);
    let mut marks = titles(rows, notes);
    marks.extend(axes(&frame, notes));
    marks.extend(groups.iter().flat_map(|g| thin(&frame, g)));
    marks.extend(groups.iter().flat_map(|g| thick(&frame, g)));
    // Markers stand above all lines.
    marks.extend(groups.iter().enumerate().flat_map(|(i, g)| markers(&frame, g, &groups[i + 1..])));
    let batches = several_batches(rows.iter());
    marks.extend(table(&frame, &groups, stages(rows.iter()).len(), &batches));
    marks.extend(legend(&frame, &groups));
    marks
}

fn titles(rows: &[Row], notes: &Notes) -> Vec<Mark> {
    let Row { model, cluster, stack, gpus, .. } = &rows[0];
    let (gpus, all) = (counted(*gpus, "GPU"), rows.iter().collect::<Vec<_>>());
    let title = match notes.text("title") {
        Some(title) => title,
        None => format!("MFU against sequence length: {model} on {gpus} of {cluster}"),
    };
    let mut parts: Vec<String> = notes.unfinished().into_iter().collect();
    parts.extend([gpus, tokens_per_step(&all, notes)]);
    parts.extend(notes.text("dtype"));
    parts.push(stages(rows.iter()).join(" or "));
    parts.push(format!("stack {stack}"));
    let batch = if several_batches(rows.iter()).is_empty() { "" } else { "batch, " };
    parts.push(format!("the best {batch}microbatch and recomputation of each way"));
    parts.push("model FLOPs, causal half, no recomputation".into());
    vec![
        Mark::fitting((LEFT, 42.0), title, 31.0, INK),
        Mark::fitting((LEFT, 82.0), parts.join("  \u{b7}  "), 17.0, FAINT),
    ]
}

fn axes(frame: &Frame, notes: &Notes) -> Vec<Mark> {
    let mut marks = Vec::new();
    for tenth in 0..=(frame.y_max * 10.0).round() as u32 {
        let y = frame.y(f64::from(tenth) / 10.0);
        marks.push(Mark::line(&[(LEFT, y), (RIGHT, y)], GRID, 1.0));
        marks.push(Mark::text((LEFT - 12.0, y), format!("{} %", tenth * 10), 18.0, INK, Align::Right));
    }
    for power in frame.powers() {
        let x = frame.x(power);
        marks.push(Mark::line(&[(x, TOP), (x, frame.bottom)], GRID, 1.0));
    }
    for tick in frame.ticks() {
        let x = frame.x(tick);
        marks.push(Mark::line(&[(x, frame.bottom), (x, frame.bottom + 7.0)], INK, 1.5));
        marks.push(Mark::text((x, frame.bottom + 23.0), short(tick), 19.0, INK, Align::Middle));
    }
    marks.push(Mark::line(&[(LEFT, TOP), (LEFT, frame.bottom), (RIGHT, frame.bottom)], INK, 1.5));
    let middle = (LEFT + RIGHT) / 2.0;
    let words = "Sequence length (tokens, 1K = 1024), and below it the best of each family: MFU, degree, options";
    marks.push(Mark::text((middle, f64::from(HEIGHT) - 22.0), words, 17.0, INK, Align::Middle));
    let dtype = notes.text("dtype").map_or(String::new(), |dtype| dtype + " ");
    marks.push(Mark::Text {
        at: (30.0, (TOP + frame.bottom) / 2.0),
        text: format!("MFU (of the dense {dtype}peak)"),
        size: 18.0,
        color: INK,
        align: Align::Middle,
        upright: true,
    });
    marks
}

/// A line, broken where `at` says that nothing runs; where nothing was asked for, it goes on. A point without neighbours is a
/// short stroke.
fn pieces(frame: &Frame, at: impl Fn(u64) -> Option<Option<f64>>) -> Vec<Vec<Point>> {
    let mut pieces: Vec<Vec<Point>> = vec![Vec::new()];
    for &length in &frame.lengths {
        match at(length) {
            Some(Some(mfu)) => pieces.last_mut().expect("never empty").push((frame.x(length), frame.y(mfu))),
            Some(None) => pieces.push(Vec::new()),
            None => {}
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    for piece in &mut pieces {
        if let [(x, y)] = piece[..] {
            *piece = vec![(x - TICK, y), (x + TICK, y)];
        }
    }
    pieces
}

fn thin(frame: &Frame, group: &Group) -> Vec<Mark> {
    let color = ramp(&[group.family.look().1, PAPER], 0.55);
    let of_way = |(_, points): &(Way, Points)| pieces(frame, |length| points.get(&length).map(mfu));
    group.ways.iter().flat_map(of_way).map(|points| Mark::line(&points, color, 1.0)).collect()
}

fn thick(frame: &Frame, group: &Group) -> Vec<Mark> {
    let at = |length| Some(group.top(length).map(|top| top.mfu));
    pieces(frame, at).into_iter().map(|points| Mark::line(&points, group.family.look().1, 3.2)).collect()
}

/// Where a marker of a later family lies on it, a marker is larger, so that its rim shows.
fn markers(frame: &Frame, group: &Group, later: &[Group]) -> Vec<Mark> {
    let (shape, color) = group.family.look();
    let mut marks = Vec::new();
    for &length in &frame.lengths {
        let Some(top) = group.top(length) else { continue };
        let (x, y) = (frame.x(length), frame.y(top.mfu));
        let hides = |g: &&Group| g.top(length).is_some_and(|other| (frame.y(other.mfu) - y).abs() < 1.5);
        let radius = RADIUS + 2.5 * later.iter().filter(hides).count().min(3) as f64;
        marks.push(Mark::Marker { shape, at: (x, y), radius, color, filled: !top.full_recompute });
    }
    marks
}

/// Families, what lines and markers mean, what a word in the table means.
fn legend(frame: &Frame, groups: &[Group]) -> Vec<Mark> {
    let mut marks = Vec::new();
    let mut y = TOP + 12.0;
    for group in groups {
        let (shape, color) = group.family.look();
        marks.push(Mark::line(&[(LEGEND, y), (LEGEND + 38.0, y)], color, 3.2));
        marks.push(Mark::Marker { shape, at: (LEGEND + 19.0, y), radius: RADIUS, color, filled: true });
        marks.push(Mark::text((LEGEND + 50.0, y - 9.0), group.family.title(), 16.0, INK, Align::Left));
        let count = match group.ways.len() {
            1 => "one way".to_string(),
            n => format!("the best of {n} ways"),
        };
        marks.push(Mark::text((LEGEND + 50.0, y + 10.0), count, 13.0, FAINT, Align::Left));
        y += 46.0;
    }
    y += 6.0;
    marks.push(Mark::line(&[(LEGEND, y), (LEGEND + 38.0, y)], ramp(&[INK, PAPER], 0.55), 1.0));
    marks.push(Mark::text((LEGEND + 50.0, y), "one way of a family", 14.0, INK, Align::Left));
    for (filled, words) in [(true, "without recomputation"), (false, "full recomputation")] {
        y += 25.0;
        let at = (LEGEND + 19.0, y);
        marks.push(Mark::Marker { shape: Shape::Circle, at, radius: RADIUS, color: FAINT, filled });
        marks.push(Mark::text((LEGEND + 50.0, y), words, 14.0, INK, Align::Left));
    }
    marks.extend(reasons(frame, groups));
    marks
}

/// Beside the table: what its words mean.
fn reasons(frame: &Frame, groups: &[Group]) -> Vec<Mark> {
    let cells = groups.iter().flat_map(|group| frame.lengths.iter().map(move |&length| (group, length)));
    let none = cells.filter(|(group, length)| group.top(*length).is_none());
    let all: BTreeSet<&Kind> = none.filter_map(|(group, length)| group.reason(length)).collect();
    let mut lines = vec![("tinted: the best of all".to_string(), INK), ("full: full recomputation".into(), INK)];
    if !all.is_empty() {
        lines.push(("nothing of the family runs:".into(), INK));
    }
    lines.extend(all.iter().map(|reason| (format!("{}: {}", reason.word, reason.meaning()), FAINT)));
    let mark = |(i, (words, color)): (usize, (String, _))| {
        Mark::text((LEGEND, frame.line(0) + 14.0 + 20.0 * i as f64), words, 13.5, color, Align::Left)
    };
    lines.into_iter().enumerate().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::super::style::WIDTH;
    use super::table::is_best;
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
        let (recompute, mfu) = (word(recompute), mfu.map_err(Into::into));
        let global_batch = (1 << 22) / seq_len;
        Row {
            model,
            cluster,
            stack,
            gpus: 64,
            seq_len,
            global_batch,
            tp: 1,
            pp: 1,
            vp: 1,
            ulysses,
            ring,
            ep: 1,
            zero: 1,
            options: word("default"),
            strategy,
            recompute,
            mfu,
        }
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
        let head = "model,cluster,stack,gpus,seq_len,global_batch,tp,pp,ulysses,ring,zero,recompute,options,strategy,feasible,why,mfu";
        let line = |r: &Row| {
            let (why, mfu) =
                (r.mfu.clone().err().unwrap_or_default(), r.mfu.clone().map_or(String::new(), |m| m.to_string()));
            let front = format!("{},{},{},{},{},{}", r.model, r.cluster, r.stack, r.gpus, r.seq_len, r.global_batch);
            let back = format!("{},{},\"{why}\",{mfu}", r.strategy, r.mfu.is_ok());
            format!(
                "\n{front},{},{},{},{},{},{},{},{back}",
                r.tp, r.pp, r.ulysses, r.ring, r.zero, r.recompute, r.options
            )
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
        assert_eq!(best_of(&both), Best::Mfu { mfu: 0.5, full_recompute: false, zero: 1, global_batch: 512 });
        let full = [at("none", no_room), at("full", Ok(0.4))];
        assert_eq!(best_of(&full), Best::Mfu { mfu: 0.4, full_recompute: true, zero: 1, global_batch: 512 });
        let never = [at("none", Err("batch: 1 is less than 2")), at("full", no_room)];
        assert_eq!(best_of(&never), Best::Never(Kind::of(&"memory: 90 GiB".into())));
    }

    #[test]
    fn a_reason_is_the_word_before_the_colon_or_the_first_words() {
        let word = |why: &str| Kind::of(&why.into()).word;
        assert_eq!(word("memory: 90 GiB at the peak"), "memory");
        assert_eq!(word("DeepEP low latency: 12 choices"), "DeepEP low lat");
        assert_eq!(word("too many ranks for this"), "too many");
        assert_eq!(word(""), "unsaid");
    }

    #[test]
    fn ways_are_grouped_by_family_and_ordered_by_degree() {
        let degrees = [(8, 4), (1, 16), (16, 1), (1, 1), (8, 1), (1, 2)];
        let mut rows = degrees.map(|d| row(8192, d, "none", Ok(0.4))).to_vec();
        rows.push(Row { tp: 8, ..row(8192, (1, 4), "none", Ok(0.4)) });
        rows.push(Row { strategy: "allgather-kv".into(), options: "gather-kv".into(), ..rows[1].clone() });
        rows.push(Row { options: "stripe+dkv-model".into(), ..rows[1].clone() });
        let groups = Group::all(&rows);
        let said: Vec<_> = groups.iter().map(|g| (g.family, g.ways.iter().map(|(w, _)| w.short()).collect())).collect();
        let of = |words: &[&str]| words.iter().map(|w| w.to_string()).collect::<Vec<_>>();
        let want = [
            (Family::NoSplit, of(&["1"])),
            (Family::Ulysses, of(&["8", "16"])),
            (Family::Ring, of(&["2", "16", "16 stripe+dkv-model"])),
            (Family::Gathered, of(&["16"])),
            (Family::Usp, of(&["8x4"])),
            (Family::Tensor, of(&["tp 8, ring 4"])),
        ];
        assert_eq!(said, want);
    }

    #[test]
    fn a_family_reaches_what_its_best_way_does_and_says_why_where_none_runs() {
        let no_room = Err("memory: 103 GiB");
        let rows = [
            row(8192, (2, 1), "none", Ok(0.5)),
            row(8192, (8, 1), "none", Ok(0.5)),
            row(8192, (16, 1), "none", Ok(0.4)),
            row(8192, (1, 8), "full", Ok(0.3)),
            row(16384, (2, 1), "none", no_room),
            row(16384, (8, 1), "none", Err("batch: few")),
        ];
        let groups = Group::all(&rows);
        let top = groups[0].top(8192).unwrap();
        assert_eq!((top.way.short().as_str(), top.mfu), ("2", 0.5), "of equals the lower degree");
        assert!(groups[0].top(16384).is_none() && groups[0].reason(16384).unwrap().word == "memory");
        assert!(is_best(&groups, 0, 8192) && !is_best(&groups, 1, 8192) && !is_best(&groups, 0, 16384));
        let said = format!("{:?}", figure(&rows, &Notes::none()));
        for words in ["50.0 %", "8, full", "memory: more than a GPU holds"] {
            assert!(said.contains(words), "{words}");
        }
    }

    #[test]
    fn a_marker_under_another_shows_its_rim() {
        let degrees = [((8, 1), 0.5), ((1, 8), 0.5), ((4, 4), 0.3)];
        let groups = Group::all(&degrees.map(|(d, mfu)| row(8192, d, "none", Ok(mfu))));
        let frame = Frame::new(&groups);
        let radius = |i: usize| match &markers(&frame, &groups[i], &groups[i + 1..])[..] {
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
    fn cells_stay_beside_the_names_of_their_lines() {
        let far = |length: u64| [13, 15, 17, 19].map(|log| 1 << log).contains(&length);
        let rows: Vec<Row> = study().into_iter().filter(|row| far(row.seq_len)).collect();
        let groups = Group::all(&rows);
        let frame = Frame::new(&groups);
        let cells: Vec<(f64, f64)> = table(&frame, &groups, 2, &BTreeSet::new())
            .into_iter()
            .filter_map(|mark| if let Mark::Rect { from, to, .. } = mark { Some((from.0, to.0)) } else { None })
            .collect();
        assert_eq!(cells.len(), 4);
        assert!(cells.iter().all(|&(from, to)| LEFT <= from && to <= RIGHT && to - from > 60.0), "{cells:?}");
    }

    /// At one length no way has a neighbour; of 70 none was drawn.
    #[test]
    fn a_point_without_neighbours_is_a_stroke() {
        let rows = [(8, 1), (16, 1), (1, 8)].map(|degrees| row(8192, degrees, "none", Ok(0.4)));
        let groups = Group::all(&rows);
        let frame = Frame::new(&groups);
        let strokes: Vec<Mark> = groups.iter().flat_map(|group| thin(&frame, group)).collect();
        let (x, y) = (frame.x(8192), frame.y(0.4));
        assert_eq!(strokes.len(), 3);
        let drawn =
            |mark: &Mark| matches!(mark, Mark::Line { points, .. } if *points == [(x - TICK, y), (x + TICK, y)]);
        assert!(strokes.iter().all(drawn), "{strokes:?}");
    }

    #[test]
    fn a_cell_says_which_of_several_batches_and_how_many_virtual_stages() {
        let piped = |mfu, batch| Row { pp: 4, vp: 2, ep: 8, global_batch: batch, ..row(8192, (1, 1), "none", Ok(mfu)) };
        let rows = [piped(0.4, 512), piped(0.5, 1024), row(16384, (1, 1), "none", Ok(0.3))];
        let said = format!("{:?}", figure(&rows, &Notes::none()));
        assert!(said.contains("pp 4, vp 2, ep 8") && said.contains("batch 1024"), "{said}");
        assert!(said.contains("the best batch, microbatch") && !said.contains("batch 256"), "{said}");
    }

    /// Of lengths that are too near each other the table takes the usual one, and says which it leaves out.
    #[test]
    fn the_table_says_which_lengths_it_leaves_out() {
        let odd = [7168, 12 << 10, 40 << 10].map(|length| row(length, (8, 1), "none", Ok(0.6)));
        let rows: Vec<Row> = study().into_iter().chain(odd).collect();
        let groups = Group::all(&rows);
        let frame = Frame::new(&groups);
        assert_eq!(frame.columns, (13..=20).map(|log| 1 << log).collect::<Vec<u64>>());
        let said = |rows: &[Row]| {
            let marks = figure(rows, &Notes::none());
            marks.into_iter().find_map(|mark| match mark {
                Mark::Text { text, .. } if text.contains("without room") => Some(text),
                _ => None,
            })
        };
        assert!(said(&rows).unwrap().ends_with(": 7K, 12K, 40K") && said(&study()).is_none());
        // A length at which nothing runs gives way, and one that is no power of two has its label.
        let few = [row(8192, (8, 1), "none", Err("memory: 90 GiB")), row(9216, (8, 1), "none", Ok(0.6))];
        let wide = [row(1 << 20, (8, 1), "none", Ok(0.5))];
        let frame = Frame::new(&Group::all(&few.into_iter().chain(wide).collect::<Vec<Row>>()));
        assert_eq!(frame.columns, [9216, 1 << 20]);
        assert!(frame.ticks().contains(&9216) && !frame.ticks().contains(&8192), "{:?}", frame.ticks());
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
            "4x16",
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
        let alone = format!("{:?}", titles(&[Row { gpus: 1, ..one.clone() }], &Notes::none()));
        assert!(alone.contains("on 1 GPU of"), "{alone}");
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
        std::fs::write(&path, r#"{"dtype": "f32"}"#).unwrap();
        let text = format!("{:?}", figure(&study(), &Notes::beside(&path).unwrap()));
        assert!(text.contains("MFU (of the dense f32 peak)") && !text.contains("bf16"), "{text}");
        std::fs::write(&path, "{").unwrap();
        assert!(Notes::beside(&path).is_err_and(|e| e.to_string().contains("study.json")));
    }
}
