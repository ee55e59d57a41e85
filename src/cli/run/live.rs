//! A step a line while a run goes on: on the screen, and in a file that is whole whenever the run ends.

use super::found::Step;
use crate::cli::to_stdout;
use crate::error::{Error, Result};
use crate::report::human::{decimal, percent, seconds};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// A line of rows.csv: of the bytes, those of the rank that has most.
#[derive(Serialize, Deserialize)]
struct Row {
    step: u64,
    loss: f64,
    step_time_s: f64,
    tokens_per_s: f64,
    mfu: f64,
    sent_bytes: u64,
    peak_bytes: u64,
}

pub struct Live {
    bar: ProgressBar,
    /// Steps are printed as they end: there is more than one, and people read.
    prints: bool,
    rows: Option<csv::Writer<File>>,
}

impl Live {
    /// `rows`: where to write a line a step, and behind which step, if the run goes on from one.
    pub fn new(steps: u64, json: bool, rows: Option<(&Path, Option<u64>)>) -> Result<Live> {
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len} {eta} left").ok();
        let bar = ProgressBar::new(steps).with_style(style.unwrap_or_else(ProgressStyle::default_bar));
        bar.enable_steady_tick(Duration::from_millis(500));
        let open = |(path, before): (&Path, Option<u64>)| match before.filter(|_| path.exists()) {
            Some(step) => behind(path, step),
            None => csv::Writer::from_path(path).map_err(|e| Error::io(path)(e.into())),
        };
        Ok(Live { bar, prints: steps > 1 && !json, rows: rows.map(open).transpose()? })
    }

    pub fn step(&mut self, step: &Step) -> Result<()> {
        if self.prints {
            // What comes behind the steps cannot be printed either, and that is said then.
            let _ = self.bar.suspend(|| to_stdout(&line(step)));
        }
        self.bar.inc(1);
        let most = |all: &[u64]| all.iter().copied().max().unwrap_or(0);
        let Some(rows) = &mut self.rows else { return Ok(()) };
        let row = Row {
            step: step.step,
            loss: step.loss,
            step_time_s: step.step_time_s,
            tokens_per_s: step.tokens_per_s,
            mfu: step.mfu,
            sent_bytes: most(&step.sent_bytes),
            peak_bytes: most(&step.peak_bytes),
        };
        // A run may be interrupted at any time: what is done is in the file.
        let written = rows.serialize(row).map_err(std::io::Error::from).and_then(|()| rows.flush());
        written.map_err(Error::io("rows"))
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// A table that is there, to write on behind `step`. Errors: it ends elsewhere, or is no table of a run.
fn behind(path: &Path, step: u64) -> Result<csv::Writer<File>> {
    let last = last_step(path)?;
    if last.is_some_and(|last| last != step) {
        let why = format!(
            "its last row is of step {}, and --load goes on behind step {step}; give another --out, or leave its rows up to \
             step {step} alone",
            last.unwrap_or(0)
        );
        return Err(Error::spec(path.display(), "step", why));
    }
    let file = File::options().append(last.is_some()).write(true).truncate(last.is_none()).open(path);
    let file = file.map_err(Error::io(path))?;
    Ok(csv::WriterBuilder::new().has_headers(last.is_none()).from_writer(file))
}

/// Of the last row; none of a table without rows.
fn last_step(path: &Path) -> Result<Option<u64>> {
    let wrong = |e: csv::Error| {
        let why = format!("{e}; it is no whole table of `run --out`, give another --out");
        Error::spec(path.display(), "rows", why)
    };
    let mut rows = csv::Reader::from_path(path).map_err(wrong)?;
    let mut last = None;
    for row in rows.deserialize() {
        let Row { step, .. } = row.map_err(wrong)?;
        last = Some(step);
    }
    Ok(last)
}

fn line(step: &Step) -> String {
    format!(
        "step {:>4}   loss {:<9.6}  {:>8}  {:>10} tokens/s  MFU {}\n",
        step.step,
        step.loss,
        seconds(step.step_time_s),
        decimal(step.tokens_per_s, ""),
        percent(step.mfu)
    )
}
