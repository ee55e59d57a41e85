//! `foretrain validate`: a profile's prediction of a plan against the plan as it runs.

mod gpu;

use super::chosen::Chosen;
use super::config::{Config, LOCAL};
use super::flags::{JsonFile, Output, PlanFile};
use super::interrupt::Interrupt;
use super::run::{Machine, On};
use super::{Answer, trace, will_hold};
use crate::act::{cold_bytes, sharing, work_of};
use crate::calibrate::anchors::Anchors;
use crate::calibrate::machine::{Others, Shares};
use crate::calibrate::shapes;
use crate::compare::validation::{OpCheck, Trial, Validation, validate};
use crate::cost::{Effort, cost};
use crate::device::speed::{Slower, Speed};
use crate::device::{KernelTime, Profile};
use crate::error::{Error, Result};
use crate::exec::source::Source;
use crate::exec::{Job, Options, train};
use crate::plan::link::{AtomTable, Line};
use crate::plan::{OpKind, Plan};
use crate::plot;
use crate::report::human::{Table, counted, seconds};
use crate::spec::Provenance;
use crate::timeline::Timeline;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain validate --on cpu --profile profile.json --seed 7 --trace trace.json\n         \
                        foretrain validate --profile profile.json --model tiny --seq-len 512 --ring 4 --repeat 9\n         \
                        foretrain validate --profile profile.json --ring 2 --seq-len 1024 --throttle 0.2,100\n         \
                        foretrain validate --on cuda --profile h200.json --seed 5 --ranks 4 --devices 0\n         \
                        foretrain validate --on cuda --profile h200.json --plan plan.json --solo 5\n\n\
    Without a plan, or flags that say one, it draws a model, a length and a way to split them by --seed: shapes that no\n\
    calibration has run.\n\n\
    A machine that others share is not as fast in every hour. So calibrate notes how fast it was, by a product, passes\n\
    over cache and memory, a copy and a wake-up, and validate looks again before and after its runs. predicted, the errors of\n\
    ops, end_to_end_error and median_op_error are those of the profile at the speed of now: what the prediction has\n\
    wrong. end_to_end_error_raw and median_op_error_raw are those of the profile as it is; speed says how many times\n\
    longer things take now, where products and passes agree on it, else 1; what the looks say is in speed_now. noise is how far the runs spread: an error\n\
    inside of it is said to be so. others has the shares of the cores' time that other programs had meanwhile.\n\n\
    A GPU's kernels take longer when they draw more power than it may: where the profile has what they draw, steps of ranks that\n\
    share it, and kernels of one that is alone, are predicted at the clocks that this leaves, from full ones behind a rest on."
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    #[command(flatten)]
    machine: Machine,
    /// Runs that count; one more before them warms up
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Ranks of a drawn plan [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Option<u32>,
    /// Run this rank of the plan alone, on cuda: its messages are waits of the predicted length, and only
    /// its kernels are held to the prediction
    #[arg(long, value_name = "RANK")]
    solo: Option<u32>,
    /// Draw predicted against measured ops into this folder
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    file: JsonFile,
}

#[derive(Serialize)]
struct Found<'a> {
    plan: String,
    what: &'a str,
    machine: &'a crate::device::measured::MachineName,
    profile_date: &'a str,
    devices: u32,
    seed: u64,
    #[serde(flatten)]
    validation: &'a Validation,
    /// Of the profile as it is, whatever the machine's speed was then and is now.
    predicted_step_raw_s: f64,
    end_to_end_error_raw: f64,
    median_op_error_raw: f64,
    p90_op_error_raw: f64,
    /// How many times longer things take than when the profile was measured; none where it did not look.
    speed: Option<Slower>,
    speed_then: Option<Speed>,
    speed_now: Option<Speed>,
    /// Shares of the cores' time that others had meanwhile.
    others: Option<Shares>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    flags.machine.is_there()?;
    flags.machine.trace.path().map_or(Ok(()), will_hold)?;
    if flags.machine.on() == On::Cuda {
        return gpu::run(flags);
    }
    if flags.solo.is_some() {
        let why = "runs one rank of a plan on a GPU; give --on cuda, or leave it out";
        return Err(Error::spec("validate", "--solo", why));
    }
    let Some(file) = flags.config.profile() else {
        let why = "is missing; write one with `foretrain calibrate --on cpu --out profile.json` and give it";
        return Err(Error::spec("validate", "--profile", why));
    };
    let profile = Profile::load(file)?;
    let (plan, mut chosen) = chosen(flags)?;
    flags.machine.slow_down(&mut chosen)?;
    let options = flags.machine.options(&plan, false)?;
    let predict = |chosen: &Chosen| {
        let machine = crate::cost::Machine { devices: Some(&options.devices), ..chosen.case.machine() };
        cost(&plan, machine, Effort::ALL_SPANS)
    };
    let raw = predict(&chosen)?;
    let Measured { runs, now, others } = measured(&plan, &options, flags.repeat, profile.machine.cores)?;
    let slower = profile.speed().zip(now.as_ref()).map(|(then, now)| Slower::between(then, now));
    if let Some(slower) = &slower {
        chosen.case.profile = chosen.case.profile.as_ref().map(|profile| profile.at(slower));
    }
    let predicted = predict(&chosen)?;
    let interrupted = |what: String| Error::device("validate", what);
    let Some((_, runs)) = runs.split_first().filter(|(_, counted)| !counted.is_empty()) else {
        return Err(interrupted("interrupted before a run that counts".into()));
    };
    let cut = (runs.len() < flags.repeat as usize)
        .then(|| interrupted(format!("interrupted: the figures are those of {} of {} runs", runs.len(), flags.repeat)));
    let known = known(&plan, &profile, &options.devices, None)?;
    let devices = options.devices.iter().max().map_or(0, |d| d + 1);
    let own_cores = devices <= profile.machine.cores;
    let known = |rank: u32, node: usize| known[rank as usize][node];
    let validation = validate(&predicted, runs, &known, own_cores);
    let as_it_is = validate(&raw, runs, &known, own_cores);
    let what = what(&plan);
    let mut text = format!(
        "{what}, {} over {devices} of {}, {}\n\n{}",
        counted(plan.ranks(), "thread"),
        counted(profile.machine.cores, "core"),
        counted(runs.len() as u64, "run"),
        render(&validation)
    );
    text.push_str(&hours(slower.as_ref(), &as_it_is));
    text.push_str(&company(others, own_cores && validation.lost_to_others > BUSY));
    text.push_str(&aside(flags, &what, &predicted, runs, &validation)?);
    let found = Found {
        plan: plan.hash(),
        what: &what,
        machine: &profile.machine,
        profile_date: &profile.date,
        devices,
        seed: flags.machine.seed(),
        validation: &validation,
        predicted_step_raw_s: as_it_is.predicted_step_s,
        end_to_end_error_raw: as_it_is.end_to_end_error,
        median_op_error_raw: as_it_is.median_op_error,
        p90_op_error_raw: as_it_is.p90_op_error,
        speed: slower,
        speed_then: profile.speed().copied(),
        speed_now: now,
        others,
    };
    Answer::with_error(text, &found, cut).also_to(flags.file.path())
}

/// Runs of a plan, the first of which warms up; how fast the machine was around them, and what others had of it.
struct Measured {
    runs: Vec<Trial>,
    now: Option<Speed>,
    others: Option<Shares>,
}

/// Interrupted, it brings the runs that there were.
fn measured(plan: &Plan, options: &Options, repeat: u32, cores: u32) -> Result<Measured> {
    let interrupt = Interrupt::watch()?;
    let (mut runs, mut anchors, others) = (vec![], Anchors::default(), Others::watch());
    (0..LOOKS).for_each(|_| anchors.sample());
    let job =
        Job { source: &Source::seeded(options.seed), steps: u64::from(repeat) + 1, keep_last: false, watch: None };
    let ran = train(plan, options, &job, &mut |_, run| {
        if interrupt.asked() {
            return Err(Error::device("validate", "interrupted"));
        }
        runs.push(Trial { timeline: run.timeline, on_core: run.on_core });
        Ok(())
    });
    if !interrupt.asked() {
        ran?;
    }
    (0..LOOKS).for_each(|_| anchors.sample());
    Ok(Measured { runs, now: anchors.speed(), others: others.shares(cores) })
}

/// Who else was on the machine, and whether that says to repeat it.
fn company(others: Option<Shares>, lost: bool) -> String {
    let mut text = String::new();
    if let Some(Shares { programs, stolen }) = others {
        text.push_str(&format!(
            "of the cores' time other programs had {}, other machines of the same host {}\n",
            percent(programs),
            percent(stolen)
        ));
    }
    if lost || others.is_some_and(|o| o.programs + o.stolen > BUSY) {
        text.push_str("other programs are busy on this machine: repeat it when they are not\n");
    }
    text
}

/// Writes the trace and the picture that were asked for, and says where they are.
fn aside(flags: &Flags, what: &str, predicted: &Timeline, runs: &[Trial], validation: &Validation) -> Result<String> {
    let mut text = String::new();
    if let Some(path) = flags.machine.trace.path() {
        trace(path, &[("predicted", predicted), ("measured", typical(runs, validation.measured_step_s))])?;
        text.push_str(&format!("\nwrote {}\n", path.display()));
    }
    if let Some(dir) = &flags.plot {
        let files = plot::validation(validation, what, dir, "validation")?;
        files.iter().for_each(|file| text.push_str(&format!("\nwrote {}", file.display())));
        text.push('\n');
    }
    Ok(text)
}

/// The plan that is asked for, or a drawn one; and what it is costed on.
fn chosen(flags: &Flags) -> Result<(Plan, Chosen)> {
    if flags.plan.path().is_some() || !flags.config.says_nothing() {
        let chosen = flags.config.choose(flags.plan.path(), LOCAL)?;
        return Ok((chosen.plan()?, chosen));
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let plan = shapes::fresh(flags.machine.seed(), flags.ranks.unwrap_or(cores)).plan()?;
    let chosen = flags.config.of_plan(plan.clone(), LOCAL, "the drawn plan")?;
    Ok((plan, chosen))
}

fn what(plan: &Plan) -> String {
    format!("{}, seq_len {}, {}", plan.about.model, plan.about.seq_len, plan.about.strategy)
}

/// How the time of every op of every rank, or of one alone, is known; none for what is no kernel.
fn known(plan: &Plan, profile: &Profile, devices: &[u32], solo: Option<u32>) -> Result<Vec<Vec<Option<Provenance>>>> {
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<Line>>>()?;
    // Curves of GPUs do not ask.
    let cold = if profile.gpu.is_some() { vec![] } else { cold_bytes(plan, &atoms, &lines, sharing(devices))? };
    let of_op = |rank: u32, line: &Line, node: usize| {
        let OpKind::Compute { kernel, .. } = &line.nodes[node].op.kind else { return None };
        // What the mask leaves nothing of takes no time, and that is known.
        let Some((work, dtype)) = work_of(plan, line, node, rank) else { return Some(Provenance::Measured) };
        let cold = cold.get(plan.program_of(rank) as usize).map_or(0, |cold| cold[node]);
        Some(profile.time_cold(kernel.curve(), &work, dtype, cold).provenance)
    };
    let of_rank = |rank: u32| {
        let line = &lines[plan.program_of(rank) as usize];
        (0..line.nodes.len()).map(|node| of_op(rank, line, node)).collect()
    };
    let there = |rank: &u32| solo.is_none_or(|solo| solo == *rank);
    Ok((0..plan.ranks()).map(|rank| Some(rank).filter(there).map(of_rank).unwrap_or_default()).collect())
}

/// The run whose step is nearest to what counts as measured.
fn typical(runs: &[Trial], step_s: f64) -> &Timeline {
    let off = |t: &&Timeline| (t.step.value() - step_s).abs();
    runs.iter().map(|r| &r.timeline).min_by(|a, b| off(a).total_cmp(&off(b))).expect("at least one run")
}

/// What the machine's own speed has to do with it.
fn hours(slower: Option<&Slower>, raw: &Validation) -> String {
    let Some(slower) = slower else {
        return "the profile says nothing of the machine's speed when it was measured: if that was another, it is in the \
                errors; calibrate anew\n"
            .into();
    };
    let parts = [("products and passes in cache", slower.clock), ("passes over memory", slower.memory)];
    let parts: Vec<String> = parts.iter().map(|(what, times)| format!("{what} {times:.2}")).collect();
    format!(
        "time that things take now for one when the profile was measured, where samples tell: {}\n\
         predicted is the profile at the speed of now; as it is, it predicts {}: end-to-end error {}, ops: median {}\n",
        parts.join(", "),
        seconds(raw.predicted_step_s),
        percent(raw.end_to_end_error),
        percent(raw.median_op_error),
    )
}

/// How often the machine's speed is looked at before the runs, and after them. Not between them: that would leave their
/// caches to others' data.
const LOOKS: u32 = 4;

const WORST: usize = 10;

/// A machine that gives more of its cores away than this is no place to judge a prediction by.
const BUSY: f64 = 0.05;

fn percent(x: f64) -> String {
    format!("{:.1} %", 100.0 * x)
}

fn render(v: &Validation) -> String {
    let mut table = Table::new("<>>>>");
    table.row(["all ranks together", "ops", "predicted", "measured", "error"]);
    table.row([
        "step".into(),
        String::new(),
        seconds(v.predicted_step_s),
        seconds(v.measured_step_s),
        percent(v.end_to_end_error),
    ]);
    for kind in &v.by_kind {
        table.row([
            format!("  {}", kind.what),
            kind.ops.to_string(),
            seconds(kind.predicted_s),
            seconds(kind.measured_s),
            percent(kind.median_error),
        ]);
    }
    let mut comm = Table::new("<>>>");
    comm.row(["communication, all ranks together", "under way", "of it exposed", "hidden by kernels"]);
    for (what, overlap) in [("predicted", &v.predicted_overlap), ("measured", &v.measured_overlap)] {
        let times = [overlap.under_way_s, overlap.exposed_s].map(seconds);
        comm.row([&format!("  {what}"), &times[0], &times[1], &percent(overlap.hidden())]);
    }
    let comm = if v.measured_overlap.under_way_s > 0.0 { comm.render("  ") + "\n" } else { String::new() };
    let inside = match v.within_noise {
        true if v.end_to_end_error <= v.noise => ": the error is within the noise",
        true => "; the error is no larger than that and what other programs took of the cores, together",
        false => "",
    };
    format!(
        "{}\n  the error of a step is that of its time, of a kind the median of its ops'\n\n{comm}{}\n\
         end-to-end error {}, ops: median {}, 90th percentile {}; the runs spread by {}{inside}\n\
         of the kernels' time, {} their cores were with other threads; of the time on their cores the median error is {}\n",
        table.render("  "),
        worst(&v.worst(WORST)),
        percent(v.end_to_end_error),
        percent(v.median_op_error),
        percent(v.p90_op_error),
        percent(v.noise),
        percent(v.lost_to_others),
        percent(v.median_kernel_error_on_core),
    )
}

fn worst(ops: &[&OpCheck]) -> String {
    let mut table = Table::new("<>>>><");
    table.row(["most seconds off", "rank", "predicted", "measured", "runs spread by", "why"]);
    for op in ops {
        table.row([
            format!("{} {}", op.path, op.what),
            op.rank.to_string(),
            seconds(op.predicted_s),
            seconds(op.measured_s),
            percent(op.spread),
            op.reason.says().into(),
        ]);
    }
    table.render("  ")
}
