//! From measurements to the numbers that predictions rest on: links from the logs of others (`links`), and this machine.
//!
//! Measures a machine: kernels as the executor runs them, messages as its transport sends them, and what threads
//! that share cores do to each other. What comes out is a [`Profile`].
//!
//! Kernels are timed inside of real training steps, one at a time, because that is where they are predicted: with
//! the caches as the op before left them. Steps of all shapes take turns, so that a disturbance hits all alike, and
//! of the times of one shape the median counts: a step is the sum of its ops, and its median about that of theirs.
//! Each shape runs on one core, and then on all of them at once: what cores that share memory do to each other is
//! in the difference, kernel by kernel and size by size.
//! Between them the machine's own speed is sampled ([`anchors`]): what it was is in the profile.

pub mod anchors;
pub mod gpu;
pub mod links;
pub mod machine;
mod messages;
mod rows;
mod samples;
pub mod shapes;

use crate::device::measured::{Beside, FORMAT};
use crate::device::{Profile, Threads};
use crate::error::{Error, Result};
use crate::exec::source::Source;
use crate::exec::transport::AWAKE;
use crate::exec::{Job, Options, Run, train};
use crate::plan::Plan;
use anchors::Anchors;
use samples::Samples;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Shapes drawn at random besides the fixed ones.
    pub drawn: usize,
    /// Rounds over all shapes, while there is time, and steps of each that count.
    pub rounds: usize,
    pub steps: u64,
    pub budget: Duration,
    /// The longest message, in bytes.
    pub longest_message: u64,
    /// Only the smallest of the fixed shapes: for tests.
    pub tiny: bool,
}

impl Effort {
    pub const FULL: Effort = Effort {
        drawn: 36,
        rounds: 6,
        steps: 2,
        budget: Duration::from_secs(140),
        longest_message: 32 << 20,
        tiny: false,
    };
    pub const QUICK: Effort = Effort {
        drawn: 4,
        rounds: 3,
        steps: 1,
        budget: Duration::from_secs(12),
        longest_message: 4 << 20,
        tiny: false,
    };
    pub const TINY: Effort =
        Effort { drawn: 0, rounds: 2, steps: 1, budget: Duration::from_secs(5), longest_message: 1 << 14, tiny: true };
}

/// Asked whether to stop.
pub type Stop<'a> = &'a dyn Fn() -> bool;

/// Told how much is done, 0 to 1, and what is next.
pub type Progress<'a> = &'a dyn Fn(f64, &'static str);

/// Measures this machine's CPU. `command` is kept in the profile.
pub fn cpu(effort: Effort, command: &str, progress: Progress) -> Result<Profile> {
    Ok(cpu_until(effort, command, progress, &|| false, None)?.0)
}

/// The same, until somebody asks to stop: then with what was measured so far, and true. That is an error before every
/// shape was timed once. What is timed is kept in the file `rows` as it is timed, and not timed again if the file is
/// there from an earlier run.
pub fn cpu_until(
    effort: Effort,
    command: &str,
    progress: Progress,
    stop: Stop,
    rows: Option<&Path>,
) -> Result<(Profile, bool)> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    progress(0.0, "messages");
    let messages = messages::measure(effort);
    let plans = shapes::ladder(effort).iter().map(shapes::Shape::plan).collect::<Result<Vec<Plan>>>()?;
    let mut anchors = Anchors::default();
    anchors.sample();
    let [samples, beside] = steps(&plans, (effort, cores), &mut anchors, (progress, stop), rows)?;
    let stopped = stop();
    if samples.is_empty() {
        return Err(Error::device("calibrate", "not one kernel was timed"));
    }
    let profile = Profile {
        foretrain_profile: FORMAT,
        machine: machine::name(cores),
        date: machine::today(),
        command: command.into(),
        provenance: format!("{PROVENANCE}{}", if stopped { INTERRUPTED } else { "" }),
        threads: Some(Threads {
            cores,
            op_s: samples.gap(),
            notice_s: messages.notice_s,
            wake_s: messages.wake_s,
            awake_s: AWAKE.as_secs_f64(),
            alone: messages.alone,
            exchanges: samples.exchanges(),
            beside: Beside { copies: messages.beside, exchanges: beside.exchanges(), kernels: beside.curves() },
            speed: anchors.speed(),
            throttle: None,
        }),
        gpu: None,
        kernels: samples.curves(),
    };
    Ok((profile, stopped))
}

const INTERRUPTED: &str = "; interrupted, so of fewer runs than the command makes";

const PROVENANCE: &str = "measured by foretrain: kernels inside of training steps, one at a time and on all cores at \
                          once; the median of interleaved runs";

/// Plans between two looks at the machine's speed.
const ANCHORED: usize = 6;

/// Runs every plan in turn, again and again while there is time, one kernel at a time and then one on each core.
fn steps(
    plans: &[Plan],
    (effort, cores): (Effort, u32),
    anchors: &mut Anchors,
    (progress, stop): (Progress, Stop),
    file: Option<&Path>,
) -> Result<[Samples; 2]> {
    let (mut samples, done) = file.map_or(Ok(Default::default()), rows::kept)?;
    let begun = Instant::now();
    let total = (plans.len() * effort.rounds) as f64;
    for round in 0..effort.rounds {
        for (i, plan) in plans.iter().enumerate() {
            // The first round is finished whatever it takes.
            if round > 0 && (begun.elapsed() > effort.budget || stop()) {
                return Ok(samples);
            }
            if stop() {
                let left = file.map_or(String::new(), |path| {
                    format!("; their times are kept in {}: start it again, and it goes on from there", path.display())
                });
                let why =
                    format!("interrupted when {i} of {} shapes were timed: no profile is written{left}", plans.len());
                return Err(Error::device("calibrate", why));
            }
            let about = &plan.about;
            let name = format!("{i} {} seq {} {} round {round}", about.model, about.seq_len, about.strategy);
            if done.contains(&name) {
                continue;
            }
            if i % ANCHORED == 0 {
                anchors.sample();
            }
            let found = [once(plan, 1, effort)?, once(plan, cores, effort)?];
            file.map_or(Ok(()), |path| rows::keep(path, &name, &found))?;
            for (all, of) in samples.iter_mut().zip(&found) {
                of.rows(&name).for_each(|row| all.take(row));
            }
            let done = (round * plans.len() + i) as f64 / total;
            progress(0.05 + 0.9 * done.max(begun.elapsed().div_duration_f64(effort.budget).min(1.0) * 0.99), "kernels");
        }
    }
    Ok(samples)
}

/// Some steps of a plan, all its ranks on one core, and the same on so many cores at once. The first step warms up:
/// it counts only where no other follows.
fn once(plan: &Plan, cores: u32, effort: Effort) -> Result<Samples> {
    let together = Arc::new(Barrier::new(cores as usize));
    let run = || -> Result<Vec<Run>> {
        let options =
            Options { beside: Some(together.clone()), ..Options::new(1, vec![0; plan.ranks() as usize], false) };
        let (mut runs, source) = (vec![], Source::seeded(1));
        let job = Job { source: &source, steps: effort.steps + 1, keep_last: false, watch: None };
        train(plan, &options, &job, &mut |_, run| {
            runs.push(run);
            Ok(())
        })?;
        Ok(runs)
    };
    let all: Vec<Result<Vec<Run>>> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(run)).collect();
        let own = run();
        let ended = |other: std::thread::ScopedJoinHandle<Result<Vec<Run>>>| {
            other.join().unwrap_or_else(|_| Err(Error::device("calibrate", "a thread panicked")))
        };
        std::iter::once(own).chain(others.into_iter().map(ended)).collect()
    });
    let mut samples = Samples::default();
    for runs in all {
        for (step, run) in runs?.iter().enumerate() {
            samples.add(plan, run, step == 0)?;
        }
    }
    Ok(samples)
}
