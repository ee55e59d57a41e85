//! From measurements to the numbers that predictions rest on: links from the logs of others (`links`), and this machine.
//!
//! Measures a machine: kernels as the executor runs them, messages as its transport sends them, and what threads
//! that share cores do to each other. What comes out is a [`Profile`].
//!
//! Kernels are timed inside of real training steps, one at a time, because that is where they are predicted: with
//! the caches as the op before left them. Steps of all shapes take turns, so that a disturbance hits all alike, and
//! of the times of one shape the median counts: a step is the sum of its ops, and its median about that of theirs.
//! Steps of one rank run on one core, and then on all of them at once: what cores that share memory do to each other is
//! in the difference, kernel by kernel and size by size. Steps of several ranks run with a core for each, as they will
//! run later: there a kernel finds in its caches what it will find, and copies of messages are timed in the same steps.
//! Between them the machine's own speed is sampled ([`anchors`]): what it was is in the profile. Passes over memory are
//! told apart by what of their bytes the caches no longer have ([`crate::act::cold_bytes`]).

pub mod anchors;
mod attention;
pub mod gpu;
pub mod links;
mod load;
pub mod machine;
mod messages;
mod power;
mod rows;
mod samples;
pub mod shapes;

use crate::device::curve::Curve;
use crate::device::measured::{Beside, FORMAT};
use crate::device::{Profile, Threads};
use crate::error::{Error, Result};
use crate::exec::source::Source;
use crate::exec::transport::AWAKE;
use crate::exec::{Job, Options, Run, train};
use crate::plan::Plan;
use anchors::Anchors;
use rows::{All, Company};
use samples::Samples;
use std::collections::BTreeMap;
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
        rounds: 8,
        steps: 2,
        budget: Duration::from_secs(140),
        longest_message: 32 << 20,
        tiny: false,
    };
    pub const QUICK: Effort = Effort {
        drawn: 4,
        rounds: 3,
        steps: 2,
        budget: Duration::from_secs(11),
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
    let messages = messages.in_steps(if beside.is_empty() { &samples } else { &beside });
    let (crowd, rows) = (beside.curves(), beside.exchanges());
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
            exchanges: or(samples.exchanges(), &rows),
            beside: Beside { copies: messages.beside, exchanges: rows, kernels: crowd.clone() },
            speed: anchors.speed(),
            throttle: None,
        }),
        gpu: None,
        // What only several ranks do is never done alone.
        kernels: or(samples.curves(), &crowd),
    };
    Ok((profile, stopped))
}

const INTERRUPTED: &str = "; interrupted, so of fewer runs than the command makes";

const PROVENANCE: &str = "measured by foretrain: kernels and copies inside of training steps, of one rank, and of \
                          ranks on all cores; the median of interleaved runs";

/// Plans between two looks at the machine's speed.
const ANCHORED: usize = 6;

/// Runs every plan in turn, again and again while there is time, in every seating.
fn steps(
    plans: &[Plan],
    (effort, cores): (Effort, u32),
    anchors: &mut Anchors,
    (progress, stop): (Progress, Stop),
    file: Option<&Path>,
) -> Result<All> {
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
            let seated = seatings(plan.ranks(), cores).into_iter();
            let found: Vec<(Company, Samples)> =
                seated.map(|seating| Ok((seating.company, once(plan, seating, effort)?))).collect::<Result<_>>()?;
            file.map_or(Ok(()), |path| rows::keep(path, &name, None, &found))?;
            for (company, of) in &found {
                of.rows(&name).for_each(|row| samples[*company as usize].take(row));
            }
            let done = (round * plans.len() + i) as f64 / total;
            progress(0.05 + 0.9 * done.max(begun.elapsed().div_duration_f64(effort.budget).min(1.0) * 0.99), "kernels");
        }
    }
    Ok(samples)
}

/// How the ranks of a plan are put on cores.
#[derive(Debug, Clone, Copy)]
struct Seating {
    company: Company,
    /// Cores that a run of the plan has.
    devices: u32,
    /// Runs of it at once.
    runs: u32,
}

/// Each way that says something about a plan: a rank by itself, and on each core; several as they run on the cores there
/// are. (In turns on one core, the other way to run several, each finds the others' data in its caches, which says little
/// of how they run with a core each.)
fn seatings(ranks: u32, cores: u32) -> Vec<Seating> {
    let own = ranks.min(cores);
    let apart = Seating { company: Company::Alone, devices: 1, runs: 1 };
    let beside = Seating { company: Company::Beside, devices: own, runs: cores / own };
    match ranks {
        _ if cores == 1 => vec![apart],
        1 => vec![apart, beside],
        _ => vec![beside],
    }
}

/// Some steps of a plan, as often at once as its seating says. The first step warms up: it counts only where no other
/// follows.
fn once(plan: &Plan, seating: Seating, effort: Effort) -> Result<Samples> {
    let devices: Vec<u32> = (0..plan.ranks()).map(|rank| rank % seating.devices).collect();
    let together = Arc::new(Barrier::new((seating.runs * seating.devices) as usize));
    let run = || -> Result<Vec<Run>> {
        let options = Options { beside: Some(together.clone()), ..Options::new(1, devices.clone(), false) };
        let (mut runs, source) = (vec![], Source::seeded(1));
        let job = Job { source: &source, steps: effort.steps + 1, keep_last: false, watch: None };
        train(plan, &options, &job, &mut |_, run| {
            runs.push(run);
            Ok(())
        })?;
        Ok(runs)
    };
    let all: Vec<Result<Vec<Run>>> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..seating.runs).map(|_| scope.spawn(run)).collect();
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

/// What `first` has, and of `next` what it has not.
fn or(mut first: BTreeMap<String, Curve>, next: &BTreeMap<String, Curve>) -> BTreeMap<String, Curve> {
    for (name, curve) in next {
        first.entry(name.clone()).or_insert_with(|| curve.clone());
    }
    first
}
