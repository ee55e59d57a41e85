//! The rows of a picture: the effective training time ratio over what one can choose.

use super::Run;
use super::checkpoint::Checkpoint;
use super::expected::{best_interval, ettr};
use crate::error::{Error, Result};
use crate::spec::{FleetSpec, StorageSpec};
use crate::units::Seconds;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What is asked about.
pub struct Question<'a> {
    /// In words, for the picture.
    pub run: String,
    pub fleet: &'a FleetSpec,
    pub storage: &'a StorageSpec,
    pub state_bytes: f64,
    pub step: Seconds,
    pub gpus: u32,
}

/// A point of a curve.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    pub panel: &'static str,
    pub series: &'static str,
    pub x: f64,
    /// Effective training time in percent.
    pub y: f64,
    pub ettr: f64,
    pub gpus: u32,
    pub interval_s: f64,
    pub run: String,
    pub fleet: String,
    pub storage: String,
}

/// What is changed of a run to see what it is worth.
pub type Change = fn(&Run) -> Run;

/// The levers: what each of them would bring if it were pulled alone.
pub const LEVERS: [(&str, Change); 4] = [
    ("half the failures", |run| Run {
        failures_with_node: run.failures_with_node / 2.0,
        failures_without: run.failures_without / 2.0,
        ..run.clone()
    }),
    ("noticed in half the time", |run| Run { detect_s: run.detect_s / 2.0, ..run.clone() }),
    ("restarted and loaded in half the time", |run| {
        let checkpoint = Checkpoint { load_s: run.checkpoint.load_s / 2.0, ..run.checkpoint };
        Run { restart_s: run.restart_s / 2.0, checkpoint, ..run.clone() }
    }),
    ("saved in half the time", |run| {
        let Checkpoint { stall_s, save_s, .. } = run.checkpoint;
        let checkpoint = Checkpoint { stall_s: stall_s / 2.0, save_s: save_s / 2.0, ..run.checkpoint };
        Run { checkpoint, ..run.clone() }
    }),
];

/// With a lever pulled, and the interval that is then best.
pub fn pulled(run: &Run, change: Change) -> Run {
    let run = change(run);
    Run { interval_s: best_interval(&run), ..run }
}

/// Writes rows.csv into the folder.
pub fn study(question: &Question, dir: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let path = dir.join("rows.csv");
    let failed = |e: csv::Error| Error::spec(path.display(), "rows", e.to_string());
    let mut csv = csv::Writer::from_path(&path).map_err(failed)?;
    for row in over_interval(question)?.into_iter().chain(over_gpus(question)?) {
        csv.serialize(row).map_err(failed)?;
    }
    csv.flush().map_err(Error::io(&path))?;
    Ok(path)
}

impl Question<'_> {
    fn run(&self, gpus: u32) -> Result<Run> {
        let run = Run::new(self.fleet, gpus, Checkpoint::new(self.state_bytes, gpus, self.fleet, self.storage))?;
        Ok(run.in_steps(self.step))
    }

    fn point(&self, panel: &'static str, series: &'static str, x: f64, gpus: u32, run: &Run) -> Point {
        let ettr = ettr(run);
        Point {
            panel,
            series,
            x,
            y: 100.0 * ettr,
            ettr,
            gpus,
            interval_s: run.interval_s,
            run: self.run.clone(),
            fleet: self.fleet.name.clone(),
            storage: self.storage.name.clone(),
        }
    }
}

/// From the shortest interval that a save allows, at least half a minute and a step, to a day.
fn over_interval(question: &Question) -> Result<Vec<Point>> {
    let run = question.run(question.gpus)?;
    let shortest = (run.checkpoint.shortest_interval_s().max(run.step_s) / 60.0).max(0.5).log2().ceil() as i32;
    // Of quarter doublings, so that the curve is smooth; the ticks are at whole ones.
    let longest = (shortest + 4).max(10);
    let minutes = (4 * shortest..=4 * longest).map(|quarter| 2f64.powf(f64::from(quarter) / 4.0));
    let series: [(&str, Change); 3] = [("as it is", Run::clone), LEVERS[0], LEVERS[2]];
    let curve = |(name, change): (&'static str, Change)| {
        let run = change(&run);
        let point = move |x: f64| (x, Run { interval_s: 60.0 * x, ..run.clone() });
        minutes.clone().map(point).map(move |(x, run)| question.point("interval", name, x, question.gpus, &run))
    };
    // Of a run that hardly fails it may be years.
    let minutes_at_best = run.interval_s / 60.0;
    let best = (minutes_at_best <= 2f64.powi(longest))
        .then(|| question.point("interval", "best interval", minutes_at_best, question.gpus, &run));
    Ok(series.into_iter().flat_map(curve).chain(best).collect())
}

/// From 256 GPUs, or the run's where it has fewer, to 262,144, each at its best interval.
fn over_gpus(question: &Question) -> Result<Vec<Point>> {
    let mut rows = vec![];
    let asis: (&'static str, Change) = ("as it is", Run::clone);
    for (name, change) in std::iter::once(asis).chain(LEVERS) {
        for gpus in (question.gpus.max(1).ilog2().min(8)..=18).map(|log| 1u32 << log) {
            let run = pulled(&question.run(gpus)?, change);
            rows.push(question.point("gpus", name, f64::from(gpus), gpus, &run));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The curve of a run of 8 GPUs began at 256.
    #[test]
    fn a_small_run_is_on_its_curve() {
        let (fleet, storage) = (FleetSpec::find("llama-3-405b").unwrap(), StorageSpec::find("tectonic").unwrap());
        let least = |gpus| {
            let run = String::new();
            let question =
                Question { run, fleet: &fleet, storage: &storage, state_bytes: 1e12, step: Seconds::new(5.0), gpus };
            over_gpus(&question).unwrap().iter().map(|point| point.gpus).min()
        };
        assert_eq!([8, 16_384].map(least), [Some(8), Some(256)]);
    }

    /// A curve whose top is flat does not show where it is.
    #[test]
    fn the_best_interval_is_marked_above_the_curve() {
        let (mut fleet, storage) = (FleetSpec::find("llama-3-405b").unwrap(), StorageSpec::find("tectonic").unwrap());
        let rows = |fleet: &FleetSpec| {
            let (run, step) = (String::new(), Seconds::new(5.0));
            let question = Question { run, fleet, storage: &storage, state_bytes: 1e12, step, gpus: 768 };
            over_interval(&question).unwrap()
        };
        let points = rows(&fleet);
        let best = points.iter().find(|p| p.series == "best interval").unwrap();
        assert!((best.x * 60.0 - best.interval_s).abs() < 1e-9 && best.interval_s % 5.0 < 1e-6);
        let top = points.iter().filter(|p| p.series == "as it is").map(|p| p.y).fold(0.0, f64::max);
        assert!(best.y > top - 0.01, "{} {top}", best.y);
        // What never fails is best saved never.
        fleet.causes.iter_mut().for_each(|cause| cause.count = 0.0);
        assert!(rows(&fleet).iter().all(|p| p.series != "best interval"));
    }
}
