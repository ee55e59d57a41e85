//! The longest sequences that fit: a line for each way, on it a dot for each set of measures.

use super::notes::Notes;
use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, Shape, fitting_size, ramp, save, short};
use crate::act::stamp::Stamp;
use crate::error::{Cause, Reason, Result};
use plotters::style::RGBColor;
use std::cmp::Reverse;
use std::path::{Path, PathBuf};

const LEFT: f64 = 330.0;
const RIGHT: f64 = 1290.0;
const TOP: f64 = 170.0;
/// A line of the legend.
const WORDS: f64 = 28.0;
/// Between lines, at most and at least.
const LINES: (f64, f64) = (54.0, 17.0);
/// From what saves nothing to what saves most.
const RAMP: [RGBColor; 4] =
    [RGBColor(38, 70, 120), RGBColor(64, 150, 190), RGBColor(238, 160, 50), RGBColor(196, 60, 40)];

/// A way, and what it comes to with each set of measures.
struct Way {
    gpus: u32,
    name: String,
    /// Number of the measures, and tokens.
    lengths: Vec<(usize, u64)>,
    /// What is said of the longest: its MFU, or why it has none; where there is no length, that.
    said: String,
}

impl Way {
    /// Of a measure with which no length runs: want of memory is said first.
    fn never(&mut self, why: Cause) {
        if self.lengths.is_empty() && (self.said.is_empty() || why.is_memory()) {
            self.said = if why.is_memory() { "does not fit" } else { "does not run" }.into();
        }
    }
}

/// Writes `longest.svg` and `.png`; nothing where nothing fits.
pub fn longest(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let sheet = Sheet::read(rows_csv)?;
    let (mut ways, mut measures, mut first): (Vec<Way>, Vec<String>, Option<Line>) = (vec![], vec![], None);
    for line in sheet.lines() {
        let gpus = line.value("gpus", "a count of GPUs of at least 1", |n: &u32| *n > 0)?;
        let (name, words) = (name_of(&line)?, line.text("options")?);
        let at = measures.iter().position(|known| known == words).unwrap_or(measures.len());
        if at == measures.len() {
            measures.push(words.into());
        }
        if !ways.last().is_some_and(|way| way.gpus == gpus && way.name == name) {
            ways.push(Way { gpus, name, lengths: vec![], said: String::new() });
        }
        if line.value("feasible", "true or false", |_: &bool| true)? {
            let way = ways.last_mut().expect("one was put there");
            let length = line.value("seq_len", "a count of tokens of at least 1", |n: &u64| *n > 0)?;
            if way.lengths.iter().all(|(_, known)| *known < length) {
                way.said = said(&line)?;
            }
            way.lengths.push((at, length));
        } else {
            ways.last_mut().expect("one was put there").never(cause(&line)?);
        }
        first.get_or_insert(line);
    }
    let Some(line) = first.filter(|_| ways.iter().any(|way| !way.lengths.is_empty())) else { return Ok(vec![]) };
    let mut marks = titles(&line, &Notes::beside(rows_csv)?)?;
    marks.extend(figure(&ways, &measures));
    save(&marks, out_dir, "longest")
}

/// The MFU of a line, or of a step that is too long to tell how long it takes at least.
fn said(line: &Line) -> Result<String> {
    let mfu: Option<f64> = line.maybe("mfu", "a share above 0", |v: &f64| *v > 0.0 && v.is_finite())?;
    Ok(match mfu {
        Some(mfu) => format!("MFU {:.1} %", 100.0 * mfu),
        None if cause(line)? == Cause::Time => format!("a step over {} h", Stamp::HOURS),
        None => String::new(),
    })
}

fn cause(line: &Line) -> Result<Cause> {
    Ok(Reason::from(line.text("why")?).cause)
}

/// What shares a sequence, and the experts.
fn name_of(line: &Line) -> Result<String> {
    let mut said = vec![];
    for degree in ["ulysses", "ring", "tp", "pp"] {
        let n = line.value(degree, "a degree", |n: &u32| *n > 0)?;
        said.extend((n > 1).then(|| format!("{degree} {n}")));
    }
    let said = if said.is_empty() { "one GPU a sequence".into() } else { said.join(" x ") };
    // Older rows have no such column.
    let ep = line.maybe("ep", "a degree", |n: &u32| *n > 0).ok().flatten().unwrap_or(1);
    Ok(if ep > 1 { format!("{said}, ep {ep}") } else { said })
}

fn titles(line: &Line, notes: &Notes) -> Result<Vec<Mark>> {
    let title = notes.text("title").unwrap_or_else(|| "The longest sequence that fits".into());
    let about = format!(
        "{} on {}, {}, zero {}, recompute {}, a sequence on each replica",
        line.text("model")?,
        line.text("cluster")?,
        line.text("stack")?,
        line.text("zero")?,
        line.text("recompute")?
    );
    Ok(vec![
        Mark::fitting((60.0, 42.0), title, 30.0, INK),
        Mark::fitting((60.0, 84.0), about, 19.0, FAINT),
        Mark::text(
            (60.0, 116.0),
            "By what shares a sequence (lines) and by what saves memory (dots); to the right the longest and its MFU",
            16.0,
            FAINT,
            Align::Left,
        ),
    ])
}

fn figure(ways: &[Way], measures: &[String]) -> Vec<Mark> {
    let bottom = f64::from(HEIGHT) - 72.0 - WORDS * measures.len() as f64;
    let groups = ways.chunk_by(|a, b| a.gpus == b.gpus).count();
    // A group has half a line before it.
    let room = (bottom - TOP) / (ways.len() as f64 + 0.5 * groups as f64);
    let high = room.clamp(LINES.1, LINES.0);
    let fits = ((bottom - TOP) / high) as usize;
    let lengths = || ways.iter().flat_map(|way| &way.lengths).map(|(_, n)| (*n as f64).log2());
    let low = lengths().fold(f64::INFINITY, f64::min).floor();
    let top = lengths().fold(0.0, f64::max).ceil().max(low + 1.0);
    let x = |log: f64| LEFT + (RIGHT - LEFT) * (log - low) / (top - low);
    let color = |at: usize| ramp(&RAMP, at as f64 / (measures.len().max(2) - 1) as f64);
    let mut marks = vec![];
    let end = TOP + (room.min(high) * (ways.len() as f64 + 0.5 * groups as f64)).min(bottom - TOP);
    for log in low as u32..=top as u32 {
        let at = x(f64::from(log));
        marks.push(Mark::line(&[(at, TOP - 12.0), (at, end)], GRID, 1.0));
        marks.push(Mark::text((at, end + 16.0), short(1 << log), 15.0, FAINT, Align::Middle));
    }
    marks.push(Mark::text(((LEFT + RIGHT) / 2.0, end + 40.0), "Tokens of a sequence", 16.0, FAINT, Align::Middle));
    let mut y = TOP;
    for of_gpus in ways[..ways.len().min(fits)].chunk_by(|a, b| a.gpus == b.gpus) {
        y += high / 2.0;
        let count = if of_gpus[0].gpus == 1 { "1 GPU".into() } else { format!("{} GPUs", of_gpus[0].gpus) };
        marks.push(Mark::text((24.0, y), count, 17.0, INK, Align::Left));
        for way in of_gpus {
            marks.extend(line((y, high), way, &x, &color));
            y += high;
        }
    }
    if let Some(left) = ways.len().checked_sub(fits).filter(|left| *left > 0) {
        let said = format!("{left} more ways are in rows.csv");
        marks.push(Mark::text((24.0, end + 40.0), said, 15.0, FAINT, Align::Left));
    }
    let first = end + 68.0;
    for (at, words) in measures.iter().enumerate() {
        let y = first + WORDS * at as f64;
        marks.push(Mark::Marker { shape: Shape::Circle, at: (LEFT, y), radius: 7.0, color: color(at), filled: true });
        marks.push(Mark::fitting((LEFT + 20.0, y), words, 16.0, INK));
    }
    marks
}

fn line((y, high): (f64, f64), way: &Way, x: &dyn Fn(f64) -> f64, color: &dyn Fn(usize) -> RGBColor) -> Vec<Mark> {
    let size = 16.0f64.min(0.9 * high).min(fitting_size(&way.name, 220.0));
    let mut marks = vec![Mark::text((LEFT - 20.0, y), &way.name, size, INK, Align::Right)];
    let longest = way.lengths.iter().map(|(_, n)| *n).max();
    let Some(longest) = longest else {
        marks.push(Mark::text((RIGHT + 20.0, y), &way.said, size, FAINT, Align::Left));
        return marks;
    };
    let least = way.lengths.iter().map(|(_, n)| *n).min().unwrap_or(longest);
    let at = |n: u64| x((n as f64).log2());
    marks.push(Mark::line(&[(at(least), y), (at(longest), y)], GRID, 4.0));
    let radius = (high / 4.0).clamp(3.0, 8.0);
    // The longest stands on top, and of equal ones what came first: of measures that bring nothing the least is seen.
    let mut dots = way.lengths.clone();
    dots.sort_by_key(|&(number, n)| (n, Reverse(number)));
    for (number, n) in dots {
        let (at, color) = ((at(n), y), color(number));
        marks.push(Mark::Marker { shape: Shape::Circle, at, radius, color, filled: true });
    }
    let more = if way.said.is_empty() { String::new() } else { format!(", {}", way.said) };
    marks.push(Mark::text((RIGHT + 20.0, y), format!("{}{more}", counted(longest)), size, INK, Align::Left));
    marks
}

/// `3.7M`, `160K`.
fn counted(n: u64) -> String {
    match n {
        n if n >= 1 << 20 => format!("{:.2}M", n as f64 / f64::from(1 << 20)),
        n => format!("{}K", n >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_is_too_long_to_tell_is_said_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let csv = dir.path().join("rows.csv");
        let head = "gpus,ulysses,ring,tp,pp,options,feasible,why,seq_len,mfu,model,cluster,stack,zero,recompute";
        let line = |why: &str, mfu: &str| format!("8,1,8,1,1,default,true,{why},1048576,{mfu},m,c,s,3,full");
        for (why, mfu, want) in [("time: long", "", "1.00M, a step over 20 h"), ("", "0.4", "1.00M, MFU 40.0 %")] {
            std::fs::write(&csv, format!("{head}\n{}\n", line(why, mfu))).unwrap();
            let svg = std::fs::read_to_string(&longest(&csv, dir.path()).unwrap()[0]).unwrap();
            assert!(svg.contains(want), "{want}");
        }
    }

    /// Ways that differ in who shares the experts were one, and a long title ended beyond the page.
    #[test]
    fn ways_are_told_apart_by_ep_and_titles_fit() {
        let dir = tempfile::tempdir().unwrap();
        let csv = dir.path().join("rows.csv");
        let head = "gpus,ulysses,ring,tp,pp,ep,options,feasible,why,seq_len,mfu,model,cluster,stack,zero,recompute";
        let line = |ep: u32, length: u64| format!("8,8,1,1,1,{ep},default,true,,{length},0.4,m,c,s,3,full\n");
        std::fs::write(&csv, format!("{head}\n{}{}", line(1, 1 << 20), line(8, 1 << 21))).unwrap();
        let title = "long ".repeat(40);
        std::fs::write(dir.path().join("study.json"), format!(r#"{{"title": "{title}"}}"#)).unwrap();
        let svg = std::fs::read_to_string(&longest(&csv, dir.path()).unwrap()[0]).unwrap();
        for words in ["ulysses 8\n", "ulysses 8, ep 8\n", "1.00M, MFU", "2.00M, MFU"] {
            assert!(svg.contains(words), "{words}");
        }
        let sheet = Sheet::read(&csv).unwrap();
        let marks = titles(&sheet.lines().next().unwrap(), &Notes::beside(&csv).unwrap()).unwrap();
        assert!(matches!(&marks[0], Mark::Text { text, size, .. } if *text == title && *size < 17.0), "{:?}", marks[0]);
    }

    /// A measure that brings less covered one that brings a little more.
    #[test]
    fn of_dots_that_overlap_the_longest_is_on_top() {
        let way =
            Way { gpus: 8, name: "ring 8".into(), lengths: vec![(0, 1000), (1, 1010), (2, 1010)], said: String::new() };
        let color = |at: usize| RGBColor(at as u8, 0, 0);
        let marks = line((100.0, 50.0), &way, &|log| log, &color);
        let of_dot = |m: &Mark| if let Mark::Marker { color, .. } = m { Some(color.0) } else { None };
        assert_eq!(marks.iter().filter_map(of_dot).collect::<Vec<_>>(), [0, 2, 1]);
    }

    /// Every dot lies between the axis' ends, longer ones further to the right; what does not fit says so.
    #[test]
    fn dots_stand_where_their_lengths_are() {
        let way = |lengths: &[(usize, u64)], gpus| Way {
            gpus,
            name: "ring 8".into(),
            lengths: lengths.to_vec(),
            said: if lengths.is_empty() { "does not fit" } else { "MFU 40.0 %" }.into(),
        };
        let ways = [way(&[(0, 65_536), (1, 262_144)], 8), way(&[], 8), way(&[(0, 1 << 22), (1, 1 << 22)], 16)];
        let marks = figure(&ways, &["default".into(), "mlp-chunks-8".into()]);
        let dots = || marks.iter().filter_map(|m| if let Mark::Marker { at, .. } = m { Some(*at) } else { None });
        // Two of each way that fits, and two of the legend.
        assert_eq!(dots().count(), 6);
        let on_lines: Vec<f64> = dots().take(4).map(|at| at.0).collect();
        assert!(on_lines[0] < on_lines[1] && on_lines[2] == on_lines[3] && on_lines[2] > on_lines[1], "{on_lines:?}");
        assert!(on_lines.iter().all(|x| (LEFT..=RIGHT).contains(x)));
        let said = |what: &str| marks.iter().any(|m| matches!(m, Mark::Text { text, .. } if text == what));
        assert!(said("does not fit") && said("256K, MFU 40.0 %") && said("4.00M, MFU 40.0 %") && said("16 GPUs"));
        let pages = marks.iter().all(|m| match m {
            Mark::Text { at, .. } | Mark::Marker { at, .. } => at.1 < f64::from(HEIGHT),
            _ => true,
        });
        assert!(pages, "something hangs below the page");
        // Of more ways than a page has lines it is said how many are left out.
        let many: Vec<Way> = (0..100).map(|_| way(&[(0, 65_536)], 8)).collect();
        let marks = figure(&many, &["default".into()]);
        let left =
            marks.iter().any(|m| matches!(m, Mark::Text { text, .. } if text.contains("more ways are in rows.csv")));
        assert!(left);
    }
}
