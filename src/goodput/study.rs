//! The rows of a picture: the effective training time ratio over what one can choose.

use super::Run;
use super::checkpoint::Checkpoint;
use super::expected::{best_interval, ettr};
use super::play::play;
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
    /// As it was played, with the nodes that stand by.
    pub answer: &'a Run,
    /// Its interval was asked for.
    pub asked: bool,
    pub play: Play,
}

/// How runs are played that wait for nodes.
#[derive(Debug, Clone, Copy)]
pub struct Play {
    pub work_s: f64,
    pub runs: usize,
    pub seed: u64,
    /// Of the answer.
    pub ettr: f64,
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
    /// Nodes that stand by; none for as many as it takes.
    pub spares: Option<u32>,
    pub run: String,
    pub fleet: String,
    pub storage: String,
}

/// The curve of the run that was asked about.
const AS_IT_IS: &str = "as it is";

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

    /// A point as expected in the long run, with a node for every one that fails.
    fn point(&self, panel: &'static str, series: &'static str, x: f64, gpus: u32, run: &Run) -> Point {
        self.at(panel, series, x, gpus, run, ettr(run))
    }

    /// The same with the nodes that stand by, as played; none of a run that comes to no end, or that has as many as it takes.
    fn waiting(&self, panel: &'static str, x: f64, gpus: u32, run: &Run) -> Option<Point> {
        let run = Run { spares: Some(self.answer.spares?), ..run.clone() };
        let played = play(&run, self.play.work_s, self.play.runs, self.play.seed);
        (!played.hopeless).then(|| self.at(panel, AS_IT_IS, x, gpus, &run, played.ettr))
    }

    /// What curves are called that no lever is pulled of, and that leave out waiting for nodes.
    fn without_waiting(&self) -> &'static str {
        if self.answer.spares.is_some() { "a node for every one that fails" } else { AS_IT_IS }
    }

    fn at(&self, panel: &'static str, series: &'static str, x: f64, gpus: u32, run: &Run, ettr: f64) -> Point {
        Point {
            panel,
            series,
            x,
            y: 100.0 * ettr,
            ettr,
            gpus,
            interval_s: run.interval_s,
            spares: run.spares,
            run: self.run.clone(),
            fleet: self.fleet.name.clone(),
            storage: self.storage.name.clone(),
        }
    }
}

/// From the shortest interval that a save allows, at least half a minute and a step, to a day; the answer is a point.
fn over_interval(question: &Question) -> Result<Vec<Point>> {
    let (answer, gpus) = (question.answer, question.gpus);
    let run = question.run(gpus)?;
    let shortest = (run.checkpoint.shortest_interval_s().max(run.step_s) / 60.0).max(0.5).log2().ceil() as i32;
    let minutes_of_answer = answer.interval_s / 60.0;
    // Of a run that hardly fails the best interval may be years; what was asked for is shown however long it is.
    let asked = if question.asked { minutes_of_answer.log2().ceil() as i32 } else { shortest };
    // Of quarter doublings, so that the curve is smooth; the ticks are at whole ones.
    let longest = (shortest + 4).max(10).max(asked);
    let minutes = (4 * shortest..=4 * longest).map(|quarter| 2f64.powf(f64::from(quarter) / 4.0));
    let series: [(&str, Change); 3] = [(question.without_waiting(), Run::clone), LEVERS[0], LEVERS[2]];
    let curve = |(name, change): (&'static str, Change)| {
        let run = change(&run);
        let point = move |x: f64| (x, Run { interval_s: 60.0 * x, ..run.clone() });
        minutes.clone().map(point).map(move |(x, run)| question.point("interval", name, x, gpus, &run))
    };
    let waiting = |x: f64| question.waiting("interval", x, gpus, &Run { interval_s: 60.0 * x, ..run.clone() });
    let name = if question.asked { "interval asked for" } else { "best interval" };
    let ettr = if answer.spares.is_some() { question.play.ettr } else { ettr(answer) };
    let point = (minutes_of_answer <= 2f64.powi(longest))
        .then(|| question.at("interval", name, minutes_of_answer, gpus, answer, ettr));
    Ok(minutes.clone().filter_map(waiting).chain(series.into_iter().flat_map(curve)).chain(point).collect())
}

/// From 256 GPUs, or the run's where it has fewer, to 262,144, each at its best interval.
fn over_gpus(question: &Question) -> Result<Vec<Point>> {
    let sizes = || (question.gpus.max(1).ilog2().min(8)..=18).map(|log| 1u32 << log);
    let mut rows = vec![];
    for gpus in sizes().filter(|_| question.answer.spares.is_some()) {
        rows.extend(question.waiting("gpus", f64::from(gpus), gpus, &question.run(gpus)?));
    }
    let asis: (&'static str, Change) = (question.without_waiting(), Run::clone);
    for (name, change) in std::iter::once(asis).chain(LEVERS) {
        for gpus in sizes() {
            let run = pulled(&question.run(gpus)?, change);
            rows.push(question.point("gpus", name, f64::from(gpus), gpus, &run));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `points` has of a run of so many GPUs, of which `set` makes the answer.
    fn rows(
        fleet: &FleetSpec,
        gpus: u32,
        set: impl Fn(Run) -> Run,
        points: fn(&Question) -> Result<Vec<Point>>,
    ) -> Vec<Point> {
        let storage = StorageSpec::find("tectonic").unwrap();
        let (state_bytes, step) = (1e12, Seconds::new(5.0));
        let run = Run::new(fleet, gpus, Checkpoint::new(state_bytes, gpus, fleet, &storage)).unwrap().in_steps(step);
        let (answer, best) = (set(run.clone()), run.interval_s);
        let (work_s, runs, seed) = (30.0 * 86_400.0, 20, 1);
        let play = Play { work_s, runs, seed, ettr: play(&answer, work_s, runs, seed).ettr };
        let (run, asked) = (String::new(), answer.interval_s != best);
        let question =
            Question { run, fleet, storage: &storage, state_bytes, step, gpus, answer: &answer, asked, play };
        points(&question).unwrap()
    }

    fn llama() -> FleetSpec {
        FleetSpec::find("llama-3-405b").unwrap()
    }

    /// The curve of a run of 8 GPUs began at 256.
    #[test]
    fn a_small_run_is_on_its_curve() {
        let least = |gpus| rows(&llama(), gpus, |run| run, over_gpus).iter().map(|point| point.gpus).min();
        assert_eq!([8, 16_384].map(least), [Some(8), Some(256)]);
    }

    /// A curve whose top is flat does not show where it is.
    #[test]
    fn the_best_interval_is_marked_above_the_curve() {
        let mut fleet = llama();
        let points = rows(&fleet, 768, |run| run, over_interval);
        let best = points.iter().find(|p| p.series == "best interval").unwrap();
        assert!((best.x * 60.0 - best.interval_s).abs() < 1e-9 && best.interval_s % 5.0 < 1e-6);
        let top = points.iter().filter(|p| p.series == "as it is").map(|p| p.y).fold(0.0, f64::max);
        assert!(best.y > top - 0.01, "{} {top}", best.y);
        // What never fails is best saved never.
        fleet.causes.iter_mut().for_each(|cause| cause.count = 0.0);
        assert!(rows(&fleet, 768, |run| run, over_interval).iter().all(|p| p.series != "best interval"));
    }

    /// The curve of a run that waits for nodes was that of one that does not, and its point, too.
    #[test]
    fn nodes_that_stand_by_and_intervals_asked_for_are_seen() {
        let few = |run: Run| Run { spares: Some(12), ..run };
        let points = rows(&llama(), 16_384, few, over_interval);
        let near = |series: &str, x: f64| {
            let of_series = points.iter().filter(|p| p.series == series);
            of_series.min_by(|a, b| (a.x - x).abs().total_cmp(&(b.x - x).abs())).unwrap().clone()
        };
        let best = points.iter().find(|p| p.series == "best interval").unwrap();
        let (asis, unlimited) = (near("as it is", best.x), near("a node for every one that fails", best.x));
        assert!((best.y - asis.y).abs() < 6.0 && best.y < unlimited.y - 10.0, "{best:?} {asis:?} {unlimited:?}");
        assert_eq!([best, &asis, &unlimited].map(|p| p.spares), [Some(12), Some(12), None]);
        let sizes = rows(&llama(), 16_384, few, over_gpus);
        assert!(sizes.iter().any(|p| p.series == "as it is" && p.gpus == 256 && p.spares == Some(12)));
        // Three days: longer than the curve was.
        let asked = |run: Run| Run { interval_s: 3.0 * 86_400.0, ..run };
        let points = rows(&llama(), 16_384, asked, over_interval);
        let point = points.iter().find(|p| p.series == "interval asked for").unwrap();
        assert!(point.x == 4320.0 && points.iter().any(|p| p.series == "as it is" && p.x > point.x), "{point:?}");
        assert!(points.iter().all(|p| p.series != "best interval"));
    }
}
