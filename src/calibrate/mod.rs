//! From measurements to the numbers that predictions rest on: links from the logs of others (`links`), and this machine.
//!
//! Measures a machine: kernels as the executor runs them, messages as its transport sends them, and what threads
//! that share cores do to each other. What comes out is a [`Profile`].
//!
//! Kernels are timed inside of real training steps, one at a time, because that is where they are predicted: with
//! the caches as the op before left them. Steps of all shapes take turns, so that a disturbance hits all alike, and
//! of the times of one shape the lower quartile counts: a run that others disturbed says nothing about the machine.
//! Between them the machine's own speed is sampled ([`anchors`]): what it was is in the profile.

pub mod anchors;
pub mod gpu;
pub mod links;
pub mod machine;
mod messages;
mod rows;
mod samples;
pub mod shapes;

use crate::device::measured::{Crowded, FORMAT};
use crate::device::{Profile, Threads};
use crate::error::{Error, Result};
use crate::exec::{Options, execute};
use crate::plan::Plan;
use anchors::Anchors;
use samples::Samples;
use std::path::Path;
use std::time::{Duration, Instant};

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Shapes drawn at random besides the fixed ones.
    pub drawn: usize,
    /// Rounds over all shapes, while there is time.
    pub rounds: usize,
    pub budget: Duration,
    /// The longest message, in bytes.
    pub longest_message: u64,
    /// Only the smallest of the fixed shapes: for tests.
    pub tiny: bool,
}

impl Effort {
    pub const FULL: Effort =
        Effort { drawn: 36, rounds: 6, budget: Duration::from_secs(140), longest_message: 32 << 20, tiny: false };
    pub const QUICK: Effort =
        Effort { drawn: 4, rounds: 3, budget: Duration::from_secs(12), longest_message: 4 << 20, tiny: false };
    pub const TINY: Effort =
        Effort { drawn: 0, rounds: 2, budget: Duration::from_secs(5), longest_message: 1 << 14, tiny: true };
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
    let samples = steps(&plans, effort, &mut anchors, (progress, stop), rows)?;
    progress(0.95, "shared cores");
    let crowded = crowded(effort, cores, stop)?;
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
            wake_s: messages.wake_s,
            post: messages.post,
            take: messages.take,
            add: messages.add,
            exchanges: samples.exchanges(),
            crowded,
            speed: anchors.speed(),
            throttle: None,
        }),
        gpu: None,
        kernels: samples.curves(),
    };
    Ok((profile, stopped))
}

const INTERRUPTED: &str = "; interrupted, so of fewer runs than the command makes";

const PROVENANCE: &str = "measured by foretrain: kernels inside of training steps, one at a time; the lower quartile \
                          of interleaved runs";

/// Plans between two looks at the machine's speed.
const ANCHORED: usize = 6;

/// Runs every plan in turn, again and again while there is time, one kernel at a time.
fn steps(
    plans: &[Plan],
    effort: Effort,
    anchors: &mut Anchors,
    (progress, stop): (Progress, Stop),
    file: Option<&Path>,
) -> Result<Samples> {
    let (mut samples, done) = file.map_or(Ok(Default::default()), |path| rows::kept(path, Samples::default()))?;
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
            let run = execute(plan, &options(plan, 1))?;
            // The first round warms up: it counts only where no other follows.
            let mut of = Samples::default();
            of.add(plan, &run, round == 0)?;
            file.map_or(Ok(()), |path| rows::keep(path, &name, &of))?;
            of.rows(&name).for_each(|row| samples.take(row));
            let done = (round * plans.len() + i) as f64 / total;
            progress(0.05 + 0.9 * done.max(begun.elapsed().div_duration_f64(effort.budget).min(1.0) * 0.99), "kernels");
        }
    }
    Ok(samples)
}

/// All ranks on so many devices.
fn options(plan: &Plan, devices: u32) -> Options {
    Options::new(1, (0..plan.ranks()).map(|rank| rank % devices).collect(), false)
}

/// The same steps with one thread busy and with a thread a core, kernel by kernel.
fn crowded(effort: Effort, cores: u32, stop: Stop) -> Result<Crowded> {
    let one = Crowded { gemm: 1.0, attention: 1.0, memory: 1.0 };
    if cores < 2 {
        return Ok(one);
    }
    let plans = shapes::replicas(effort, cores).iter().map(shapes::Shape::plan).collect::<Result<Vec<Plan>>>()?;
    let (mut alone, mut together) = (Samples::default(), Samples::default());
    for _ in 0..effort.rounds.max(3) {
        for plan in &plans {
            if stop() {
                break;
            }
            let run = |devices, into: &mut Samples| -> Result<()> {
                let run = execute(plan, &options(plan, devices))?;
                into.add(plan, &run, false)
            };
            run(1, &mut alone)?;
            run(cores, &mut together)?;
        }
    }
    let ratio = |class: samples::Class| together.ratio(&alone, class).max(1.0);
    Ok(Crowded {
        gemm: ratio(samples::Class::Gemm),
        attention: ratio(samples::Class::Attention),
        memory: ratio(samples::Class::Memory),
    })
}
