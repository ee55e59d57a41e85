//! What a search found: for each choice the fastest way with each of its values, beside the fastest of all.

use super::notes::Notes;
use super::sheet::{Line, Sheet};
use super::style::{Align, FAINT, GRID, HEIGHT, INK, Mark, PAPER, ramp, save, short};
use crate::error::{Result, text};
use crate::report::human::counted;
use crate::spec::{Options, Parallelism, Schedule};
use plotters::style::RGBColor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A choice: what its value is read from, and what the picture calls it.
const CHOICES: [(&str, &str); 13] = [
    ("tp", "tensor parallel"),
    ("pp", "pipeline stages"),
    ("vp", "virtual stages"),
    ("schedule", "schedule"),
    ("ulysses", "Ulysses"),
    ("ring", "ring"),
    ("ep", "expert parallel"),
    ("dispatch", "dispatch"),
    ("overlap-exchange", "exchange overlaps"),
    ("micro_batch", "microbatch"),
    ("zero", "ZeRO stage"),
    ("recompute", "recomputation"),
    ("options", "options"),
];

/// Those that are no columns of their own, and `options`, which say them.
const WORDS: [&str; 4] = ["schedule", "dispatch", "overlap-exchange", "options"];

/// What is this much slower has the darkest cell.
const DARKEST: f64 = 0.5;
const RAMP: [RGBColor; 3] = [RGBColor(232, 244, 236), RGBColor(252, 226, 176), RGBColor(214, 90, 49)];
const LEFT: f64 = 250.0;
const TOP: f64 = 190.0;
const CELL: (f64, f64) = (118.0, 72.0);
/// Between two choices.
const GAP: f64 = 14.0;
/// Where the cells of a row end at the latest.
const RIGHT: f64 = 1560.0;
/// Between two cells.
const APART: f64 = 4.0;
/// The words of more values of one choice than this could not be read beside each other.
const MOST: usize = 24;

/// The fastest way of each value of a column.
type Best = BTreeMap<(u64, String), Fastest>;

/// How fast it is, in s, or why there is none.
#[derive(Debug, Clone, PartialEq)]
enum Fastest {
    Step(f64),
    /// One that was not costed may be faster.
    AtMost(f64),
    Never(String),
}

impl Fastest {
    /// Those that there are not come last.
    fn step(&self) -> f64 {
        match self {
            Fastest::Step(step) | Fastest::AtMost(step) => *step,
            Fastest::Never(_) => f64::INFINITY,
        }
    }
}

/// Writes `choices.svg` and `.png`: of the first length that runs, and of its first batch, since steps of others do not compare.
pub fn choices(rows_csv: &Path, out_dir: &Path) -> Result<Vec<PathBuf>> {
    let sheet = Sheet::read(rows_csv)?;
    let mut runs = vec![];
    for line in sheet.lines() {
        if line.value("feasible", "true or false", |_: &bool| true)? {
            runs.push(line);
        }
    }
    let seconds = |line: &Line| line.value("step_time_s", "a time above 0", |s: &f64| *s > 0.0 && s.is_finite());
    let work = runs.iter().map(work_of).collect::<Result<BTreeSet<_>>>()?;
    let Some(first) = work.first() else { return Ok(vec![]) };
    let mut fastest: Option<(f64, &Line)> = None;
    let mut tables: Vec<Best> = vec![Best::new(); CHOICES.len()];
    for line in &runs {
        if work_of(line)? != *first {
            continue;
        }
        let step = seconds(line)?;
        if fastest.is_none_or(|(least, _)| step < least) {
            fastest = Some((step, line));
        }
        for ((choice, _), best) in CHOICES.iter().zip(&mut tables) {
            let value = value(line, choice)?;
            let least = best.entry((value.parse().unwrap_or(0), value)).or_insert(Fastest::Step(step));
            *least = Fastest::Step(least.step().min(step));
        }
    }
    for Said { choice, value, why } in said(rows_csv, *first)? {
        let Some(at) = CHOICES.iter().position(|(name, _)| *name == choice) else { continue };
        let key = (value.parse().unwrap_or(0), value);
        match why {
            Some(why) => drop(tables[at].entry(key).or_insert(Fastest::Never(why))),
            None => drop(tables[at].entry(key).and_modify(|found| *found = Fastest::AtMost(found.step()))),
        }
    }
    let Some((step, line)) = fastest else { return Ok(vec![]) };
    let refined = refined(rows_csv, *first)?.filter(|refined| *refined < step);
    let mut marks = titles(line, (step, refined), work.len() - 1, &Notes::beside(rows_csv)?)?;
    let open: Vec<_> = CHOICES.iter().zip(&tables).filter(|(_, best)| best.len() > 1).collect();
    // Of a mixture more choices may be open than have room in full height.
    let all = (f64::from(HEIGHT) - TOP - GAP) / open.len().max(1) as f64;
    let high = (all - GAP).min(CELL.1);
    for (at, ((_, name), best)) in open.into_iter().enumerate() {
        marks.extend(row((TOP + at as f64 * (high + GAP), high), name, best, step));
    }
    save(&marks, out_dir, "choices")
}

/// What rows do not say of a value.
struct Said {
    choice: String,
    value: String,
    /// Why nothing was found with it. None: something was, and ways that were not costed may be faster.
    why: Option<String>,
}

/// A file beside the rows; none where there is none, or but a heading, as of a search that leaves no choice.
fn beside(rows_csv: &Path, name: &str) -> Result<Option<Sheet>> {
    let path = rows_csv.with_file_name(name);
    if !path.exists() || text::data(&path)?.lines().count() < 2 {
        return Ok(None);
    }
    Sheet::read(&path).map(Some)
}

/// The step of the fastest way that a search has refined, of a length and a batch, s.
fn refined(rows_csv: &Path, work: (u64, u64)) -> Result<Option<f64>> {
    let mut least: Option<f64> = None;
    for line in beside(rows_csv, "refined.csv")?.iter().flat_map(Sheet::lines) {
        if work_of(&line)? == work {
            let step: f64 = line.value("step_time_s", "a time above 0", |s| *s > 0.0)?;
            least = Some(least.map_or(step, |least| least.min(step)));
        }
    }
    Ok(least)
}

/// What a search says of values, of a length and a batch: from its choices.csv, which older ones lack.
fn said(rows_csv: &Path, work: (u64, u64)) -> Result<Vec<Said>> {
    let Some(sheet) = beside(rows_csv, "choices.csv")? else { return Ok(vec![]) };
    let mut all = vec![];
    for line in sheet.lines() {
        let times = |column| line.maybe::<f64>(column, "how many times as long as the best", |v| *v >= 1.0);
        if work_of(&line)? != work {
            continue;
        }
        let percent = |times: f64| format!("+{:.0} %", 100.0 * (times - 1.0));
        let why = match (times("over_best")?, times("at_least")?, times("ceiling")?) {
            (Some(_), None, _) => continue,
            (Some(_), Some(_), _) => None,
            (None, Some(least), _) => Some(format!("over {}", percent(least))),
            (None, None, ceiling) => Some(format!("none in {}", percent(ceiling.unwrap_or(1.0)))),
        };
        all.push(Said { choice: line.text("choice")?.into(), value: line.text("value")?.into(), why });
    }
    Ok(all)
}

/// The length of a sequence and the sequences of a step: what ways are compared at.
fn work_of(line: &Line) -> Result<(u64, u64)> {
    let count = |column, want| line.value::<u64>(column, want, |n| *n > 0);
    Ok((
        count("seq_len", "a count of tokens of at least 1")?,
        count("global_batch", "a count of sequences of at least 1")?,
    ))
}

/// What a line has of a choice, in the words of `search`: recomputation with what options make again besides.
fn value(line: &Line, choice: &str) -> Result<String> {
    let options: Options = line.value("options", "words of `foretrain options`", |_| true)?;
    let degree = |column: &str| line.value::<u32>(column, "a degree", |n| *n > 0);
    let par =
        Parallelism { pp: degree("pp")?, vp: degree("vp")?, ep: degree("ep")?, options, ..Parallelism::default() };
    Ok(match choice {
        "schedule" => Schedule::name_of(&par).into(),
        "dispatch" => par.carrier().into(),
        "overlap-exchange" => if options.overlap_exchange { "yes" } else { "no" }.into(),
        "recompute" => line.text("recompute")?.to_string() + &options.made_again(),
        "options" => options.unchosen().to_string(),
        column => line.text(column)?.to_string(),
    })
}

/// `step`, `refined`: of the best, and of the fastest with what makes it faster still; `others`: lengths and batches that the
/// rows have besides.
fn titles(best: &Line, (step, refined): (f64, Option<f64>), others: usize, notes: &Notes) -> Result<Vec<Mark>> {
    let title = notes.text("title").unwrap_or_else(|| "What it costs to choose otherwise".into());
    let columns = CHOICES.iter().filter(|(choice, _)| !WORDS.contains(choice));
    let way = columns.map(|(column, _)| Ok((*column, best.text(column)?))).collect::<Result<Vec<_>>>()?;
    let words = way.iter().filter(|(_, value)| *value != "1").map(|(column, value)| format!("{column} {value}"));
    let words: Vec<String> = words.chain([best.text("options")?.to_string()]).collect();
    let refined = refined.map_or(String::new(), |s| format!("; {s:.3} s refined (refined.csv)"));
    let (seq_len, global_batch) = work_of(best)?;
    let others = match others {
        0 => String::new(),
        1 => " (rows.csv has one more length or batch)".into(),
        n => format!(" (rows.csv has {n} more lengths and batches)"),
    };
    let about = format!(
        "{} on {} of {}, {global_batch} {} of {} tokens a step{others}",
        best.text("model")?,
        counted(best.value::<u64>("gpus", "a count of GPUs of at least 1", |n| *n > 0)?, "GPU"),
        best.text("cluster")?,
        if global_batch == 1 { "sequence" } else { "sequences" },
        short(seq_len)
    );
    Ok(vec![
        Mark::fitting((60.0, 42.0), title, 30.0, INK),
        Mark::fitting((60.0, 84.0), about, 19.0, FAINT),
        Mark::fitting((60.0, 120.0), format!("fastest: {step:.3} s with {}{refined}", words.join(", ")), 19.0, INK),
        Mark::text(
            (60.0, 152.0),
            "A cell: the fastest way found that has this value and fits, all else being free; \
             ≤: one that was not costed may be faster; grey: none was found",
            16.0,
            FAINT,
            Align::Left,
        ),
    ])
}

/// The values of one choice side by side, in order of value, in cells that begin at `y`, are so `high`, and as wide as lets all
/// of them fit. Of more than [`MOST`] the fastest ones, and how many are left out.
fn row((y, high): (f64, f64), name: &str, best: &Best, fastest: f64) -> Vec<Mark> {
    let mut slowest_kept: Vec<f64> = best.values().map(Fastest::step).collect();
    slowest_kept.sort_by(f64::total_cmp);
    let most = slowest_kept[slowest_kept.len().min(MOST) - 1];
    let kept: Vec<_> = best.iter().filter(|(_, of)| of.step() <= most).take(MOST).collect();
    let wide = CELL.0.min((RIGHT - LEFT + APART) / kept.len() as f64 - APART);
    let mut marks = vec![Mark::text((LEFT - 24.0, y + high / 2.0), name, 19.0, INK, Align::Right)];
    if kept.len() < best.len() {
        let more = format!("{} slower ones left out", best.len() - kept.len());
        marks.push(Mark::text((LEFT - 24.0, y + high * 0.85), more, 13.0, FAINT, Align::Right));
    }
    for (i, ((_, value), of)) in kept.into_iter().enumerate() {
        let over = of.step() / fastest - 1.0;
        let x = LEFT + i as f64 * (wide + APART);
        let (color, ink) = match of {
            Fastest::Never(_) => (GRID, FAINT),
            Fastest::Step(_) | Fastest::AtMost(_) => {
                (ramp(&RAMP, over / DARKEST), if over > 0.8 * DARKEST { PAPER } else { INK })
            }
        };
        marks.push(Mark::Rect { from: (x, y), to: (x + wide, y + high), color });
        let middle = x + wide / 2.0;
        // A cell of the usual width has room for eleven letters of this size, and for fourteen of 15.
        let size = |letters: usize, usual: f64| (1.77 * wide / letters.max(1) as f64).clamp(7.0, usual);
        marks.push(Mark::text((middle, y + high / 3.0), value, size(value.chars().count(), 19.0), ink, Align::Middle));
        let said = match of {
            Fastest::Never(why) => why.clone(),
            _ if over < 5e-4 => "fastest".into(),
            Fastest::Step(_) => format!("+{:.1} %", 100.0 * over),
            Fastest::AtMost(_) => format!("≤ +{:.1} %", 100.0 * over),
        };
        let small = size(said.chars().count(), 15.0);
        marks.push(Mark::text((middle, y + high * 0.7), said, small, ink, Align::Middle));
        if over < 5e-4 {
            let frame = [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high), (x, y)];
            marks.push(Mark::line(&frame, INK, 2.0));
        }
    }
    marks.push(Mark::line(&[(60.0, y + high + GAP / 2.0), (RIGHT, y + high + GAP / 2.0)], GRID, 1.0));
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step with one sequence is faster than any with 64, and no choice between them.
    #[test]
    fn cells_are_of_one_length_and_one_batch() {
        let dir = tempfile::tempdir().unwrap();
        let csv = dir.path().join("rows.csv");
        let head = "model,gpus,cluster,seq_len,global_batch,feasible,step_time_s,tp,pp,vp,ulysses,ring,ep,micro_batch,zero,recompute,options";
        let line = |batch: u64, step: f64, tp: u64| {
            format!("\nm,8,c,8192,{batch},true,{step},{tp},1,1,1,1,1,1,1,none,default")
        };
        let text =
            [(64, 6.0, 1), (64, 6.6, 2), (1, 0.2, 2), (1, 0.1, 4)].map(|(batch, step, tp)| line(batch, step, tp));
        std::fs::write(&csv, format!("{head}{}\n", text.concat())).unwrap();
        let svg = std::fs::read_to_string(&choices(&csv, dir.path()).unwrap()[0]).unwrap();
        for words in ["1 sequence of 8K tokens a step", "one more length or batch", "fastest: 0.100 s", "+100.0 %"] {
            assert!(svg.contains(words), "{words}");
        }
        assert!(!svg.contains("+5900.0 %"), "tp 1 runs with another batch alone");
        assert!(!svg.contains("refined"));
        // What makes ways faster still is told, of the same batch alone, and where it does.
        for (batch, step, told) in [(1, 0.09, true), (64, 0.05, false), (1, 0.11, false)] {
            std::fs::write(dir.path().join("refined.csv"), format!("{head}{}\n", line(batch, step, 4))).unwrap();
            let svg = std::fs::read_to_string(&choices(&csv, dir.path()).unwrap()[0]).unwrap();
            assert_eq!(svg.contains("; 0.090 s refined (refined.csv)"), told, "{batch} {step}");
        }
    }

    /// Of twelve values eleven were drawn, the last past the frame, and none said that the twelfth was missing.
    #[test]
    fn all_values_of_a_choice_fit_beside_each_other() {
        for (values, drawn) in [(2, 2), (11, 11), (12, 12), (MOST, MOST), (MOST + 3, MOST)] {
            let step = |i: usize| Fastest::Step(1.0 + 0.4 * i as f64);
            let best: Best = (0..values).map(|i| ((1 << i, (1u64 << i).to_string()), step(i))).collect();
            let marks = row((TOP, CELL.1), "pipeline stages", &best, 1.0);
            let cell = |m: &Mark| match m {
                Mark::Rect { from, to, .. } => Some((from.0, to.0)),
                _ => None,
            };
            let cells: Vec<(f64, f64)> = marks.iter().filter_map(cell).collect();
            assert_eq!(cells.len(), drawn);
            assert!(
                cells.iter().all(|(from, to)| *from >= LEFT && *to <= RIGHT + 1e-6 && to - from <= CELL.0),
                "{cells:?}"
            );
            assert!(cells.windows(2).all(|w| (w[1].0 - w[0].1 - APART).abs() < 1e-6), "{cells:?}");
            let left = |m: &Mark| matches!(m, Mark::Text { text, .. } if text == "3 slower ones left out");
            assert_eq!(marks.iter().any(left), values > drawn);
        }
    }

    /// Values that nothing was found with stood in the table alone, and options in neither.
    #[test]
    fn values_that_nothing_was_found_with_are_there_and_options_are_a_choice() {
        let dir = tempfile::tempdir().unwrap();
        let csv = dir.path().join("rows.csv");
        let head = "model,gpus,cluster,seq_len,global_batch,feasible,step_time_s,tp,pp,vp,ulysses,ring,ep,micro_batch,zero,recompute,options";
        let line = |step: f64, words: &str| format!("\nm,1,c,8192,64,true,{step},1,1,1,1,1,1,1,1,none,{words}");
        let rows = [(6.0, "fp8+recompute-norm"), (9.0, "recompute-act"), (12.0, "default")];
        let rows = rows.map(|(step, words)| line(step, words));
        std::fs::write(&csv, format!("{head}{}\n", rows.concat())).unwrap();
        let found = "seq_len,global_batch,choice,value,over_best,at_least,ceiling\n8192,64,ring,1,1,,1.5\n\
                     8192,64,ring,16,,1.5,1.5\n8192,64,pp,64,,,1.5\n4096,64,tp,8,,,1.5\n\
                     8192,64,options,default,2,1.2,1.5\n8192,64,options,fp8,1.0,,1.5\n";
        std::fs::write(dir.path().join("choices.csv"), found).unwrap();
        let svg = std::fs::read_to_string(&choices(&csv, dir.path()).unwrap()[0]).unwrap();
        for words in [
            "\nring\n",
            "\n16\n",
            "over +50 %",
            "\n64\n",
            "none in +50 %",
            "\nfp8\n",
            "\ndefault\n",
            "\n+50.0 %\n",
            "\n≤ +50.0 %\n",
            "m on 1 GPU of c",
        ] {
            assert!(svg.contains(words), "{words}");
        }
        assert!(!svg.contains("tensor parallel"), "another length's");
    }
}
