//! `foretrain simulate`: one configuration, event by event.

mod explain;
mod picture;

use super::chosen::Chosen;
use super::config::{CLUSTER, Config};
use super::flags::{JsonFile, Output, PlanFile, Seed, TraceFile};
use super::progress::Clock;
use super::{Answer, list_of, software, trace_with, write_file};
use crate::act::picoseconds;
use crate::error::{Error, Result};
use crate::export::chakra;
use crate::plan::Plan;
use crate::report::Report;
use crate::report::human::{Table, seconds};
use crate::sim::fault::WATCHDOG_S;
use crate::sim::flap::step_of_a_run;
use crate::sim::why::{Part, Slack, Stretch, Utilisation};
use crate::sim::{BlockTime, BlockTimes, Effort, Fault, Faults, Hang, Machine, SharedLink, Simulated};
use crate::sim::{check_fault, plays_threads, simulate_measured};
use crate::units::Seconds;
use clap::{Args, ValueEnum};
use explain::{WhatIf, explain};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain simulate --model llama-3-8b --gpus 64 --seq-len 128K --ulysses 8 --recompute full\n         \
                        foretrain simulate --gpus 64 --pp 8 --global-batch 128 --slow-gpu 5:1.1 --explain\n         \
                        foretrain simulate --plan plan.json --cluster dgx-h100 --dead 3@0.5 --trace trace.json\n         \
                        foretrain simulate --gpus 64 --pp 8 --timeline step.svg --slack slack.csv --chakra traces\n         \
                        foretrain simulate --gpus 64 --tp 8 --write-blocks blocks.json\n         \
                        foretrain simulate --gpus 64 --tp 8 --fidelity block --block-times blocks.json"
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    wrong: Wrong,
    #[command(flatten)]
    file: JsonFile,
    #[command(flatten)]
    trace: TraceFile,
    /// Draw the step to this file (.svg or .png; the other is written beside it): lanes of ranks, and the critical path
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Write MLCommons Chakra execution traces to this folder, a file a rank, as ASTRA-sim reads them
    #[arg(long, value_name = "DIR")]
    chakra: Option<PathBuf>,
    /// Write to this file, as CSV, how much later every op could end and the step be as long
    #[arg(long, value_name = "FILE")]
    slack: Option<PathBuf>,
    /// Say in words what the step goes to, and what would help: simulates it again with other hardware
    #[arg(long)]
    explain: bool,
    /// Play every op, or blocks of kernels that nothing can happen between as one
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Fidelity::Op)]
    fidelity: Fidelity,
    /// With --fidelity block: what was measured of blocks, as --write-blocks writes it
    #[arg(long, value_name = "FILE")]
    block_times: Option<PathBuf>,
    /// Write the names of the plan's blocks, with what they are predicted to take, to this file: a form for measurements
    #[arg(long, value_name = "FILE")]
    write_blocks: Option<PathBuf>,
    #[command(flatten)]
    seed: Seed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Fidelity {
    Op,
    Block,
}

impl Flags {
    /// Whether the step is played block by block. Errors: files that need every op.
    fn blocks(&self) -> Result<bool> {
        let blocks = self.fidelity == Fidelity::Block;
        if blocks && self.chakra.is_some() {
            let why = "Chakra traces have every op; leave --fidelity block out";
            return Err(Error::spec("--chakra", "fidelity", why));
        }
        Ok(blocks)
    }

    /// Threads of one machine have slack only where each has a core of its own.
    fn apart(&self, chosen: &Chosen) -> bool {
        self.slack.is_some() && chosen.case.machine().kernels.threads().is_some()
    }

    /// Errors: a file that cannot be; what was measured on this machine, and a question about others.
    fn times(&self) -> Result<BlockTimes> {
        let Some(path) = &self.block_times else { return Ok(BlockTimes::default()) };
        if self.explain {
            let why = "measured blocks do not tell what other hardware would save; leave --explain out";
            return Err(Error::spec("--block-times", "explain", why));
        }
        BlockTimes::load(path)
    }
}

/// What is said where a profile of threads is not played thread by thread.
const ALONE: &str = "\neach rank alone on a core, and its messages on links: threads that see to their own messages, as without \
    --slack, --fidelity block, dead ranks and faults of links, may take longer\n";

/// What is wrong with the machine.
#[derive(Args)]
struct Wrong {
    /// Faults of this file, as in traces/failures
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// A rank whose kernels take FACTOR times as long, as in 5:1.1
    #[arg(long, value_name = "RANK:FACTOR", value_parser = Fault::slow_gpu)]
    slow_gpu: Vec<Fault>,
    /// A rank whose NIC has FACTOR of its speed, or its link in the node as in 5:nvlink:0.5; 0 is down
    #[arg(long, value_name = "RANK:FACTOR", value_parser = Fault::slow_link)]
    slow_link: Vec<Fault>,
    /// A rank whose NIC is up for some seconds and down for others, in turns, as in 5:10:3
    #[arg(long, value_name = "RANK:UP:DOWN", value_parser = Fault::flapping)]
    flap: Vec<Fault>,
    /// A rank that does nothing any more after some seconds, as in 5@0.3
    #[arg(long, value_name = "RANK@TIME", value_parser = Fault::dead)]
    dead: Vec<Fault>,
    /// A plane of the network that is down, from the start or from a time on, as in 0@0.3: the others carry all
    #[arg(long, value_name = "PLANE[@TIME]", value_parser = Fault::dead_plane)]
    dead_plane: Vec<Fault>,
    /// Kernels that take another time each time: normal, lognormal or exponential, of all ranks or one, as in 5:normal:0.02
    #[arg(long, value_name = "[RANK:]SHAPE:SD", value_parser = Fault::jitter)]
    jitter: Vec<Fault>,
    /// Seconds that the library lets an op that communicates take, from its launch, before it ends the job [default: 600, as
    /// PyTorch has it]
    #[arg(long, value_name = "SECONDS")]
    watchdog: Option<f64>,
}

impl Wrong {
    fn file(&self) -> Result<Faults> {
        Ok(self.faults.as_deref().map(Faults::load).transpose()?.unwrap_or_default())
    }

    /// Errors: a fault of the file that the plan and its machine cannot have.
    fn check_file(&self, plan: &Plan, machine: Machine, effort: Effort) -> Result<()> {
        let name = self.faults.as_ref().map_or(String::new(), |path| path.display().to_string());
        for (at, fault) in self.file()?.faults.iter().enumerate() {
            check_fault(plan, machine, fault, effort)
                .map_err(|(field, why)| Error::spec(&name, format!("faults[{at}].{field}"), why))?;
        }
        Ok(())
    }

    fn all(&self) -> Result<(Vec<Fault>, f64)> {
        let file = self.file()?;
        let words = [&self.slow_gpu, &self.slow_link, &self.flap, &self.dead, &self.dead_plane, &self.jitter];
        let faults = file.faults.into_iter().chain(words.into_iter().flatten().cloned()).collect();
        let watchdog = self.watchdog.or(file.watchdog_s).unwrap_or(WATCHDOG_S);
        if !(watchdog > 0.0 && watchdog.is_finite()) {
            return Err(Error::spec(
                "--watchdog",
                "seconds",
                format!("{watchdog} is not a time above 0 s; PyTorch's is {WATCHDOG_S}"),
            ));
        }
        Ok((faults, watchdog))
    }
}

#[derive(Serialize)]
struct Found {
    #[serde(flatten)]
    report: Report,
    /// Ends of kernels and meetings that were gone through.
    events: u64,
    /// Transfers that others on a port or a link slowed down.
    slowed: u64,
    /// Time the simulation itself took.
    wall_s: f64,
    /// Of ranks that do the same at the same time.
    classes: usize,
    fidelity: String,
    /// With --fidelity block: the plan's blocks and what they take, as measured or as their kernels are predicted to
    /// together; none op by op.
    blocks: Vec<BlockTime>,
    critical_path: Vec<Stretch>,
    critical_parts: Vec<Part>,
    utilisation: Vec<Utilisation>,
    nearly_critical: Vec<Slack>,
    /// By axis and tier.
    exposed_s: BTreeMap<String, f64>,
    /// The mean of a run's steps, s, where links flap: how each begins hangs on the one before.
    #[serde(skip_serializing_if = "Option::is_none")]
    run_step_s: Option<f64>,
    /// Links between ranks that were too narrow for all at some time, the worst first.
    shared_links: Vec<SharedLink>,
    #[serde(skip_serializing_if = "Option::is_none")]
    what_if: Option<Vec<WhatIf>>,
}

/// What is told of a step that is never over, or that the library ends.
#[derive(Serialize)]
struct Hung {
    plan: String,
    gpus: u32,
    hang: Hang,
    watchdog_s: f64,
    /// When the library ends the job.
    ends_s: f64,
    /// GPU time from the last progress to the end.
    lost_gpu_s: f64,
    events: u64,
    wall_s: f64,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let (faults, watchdog) = flags.wrong.all()?;
    let chosen = flags.config.choose(flags.plan.path(), CLUSTER)?;
    let plan = match chosen.plan() {
        Ok(plan) => plan,
        Err(Error::Infeasible(why)) => return chosen.refused(why).also_to(flags.file.path()),
        Err(other) => return Err(other),
    };
    let begun = Instant::now();
    let _clock = Clock::start(format!("simulating {} ranks", plan.ranks()));
    let files = [&flags.slack, &flags.timeline, &flags.chakra];
    let spans = flags.trace.path().is_some() || files.iter().any(|file| file.is_some());
    let (blocks, apart) = (flags.blocks()?, flags.apart(&chosen));
    let (seed, watchdog_ps) = (flags.seed.number, picoseconds(Seconds::new(watchdog)));
    let effort = Effort { spans, why: true, blocks, apart, seed, watchdog: watchdog_ps, ..Effort::SUMS };
    flags.wrong.check_file(&plan, chosen.case.machine(), effort)?;
    let times = flags.times()?;
    if !times.blocks.is_empty() {
        times.check(&BlockTimes::predicted(&plan, chosen.case.machine())?)?;
    }
    let mut found = simulate_measured(&plan, chosen.case.machine(), &faults, effort, &times)?;
    let wall_s = begun.elapsed().as_secs_f64();
    let mut tail = String::new();
    let machine = chosen.case.machine();
    if machine.kernels.threads().is_some() && !plays_threads(&plan, machine, &faults, effort) {
        tail.push_str(ALONE);
    }
    if let Some(path) = &flags.write_blocks {
        let text = serde_json::to_string_pretty(&BlockTimes::predicted(&plan, chosen.case.machine())?);
        write_file(path, text.map_err(Error::json("blocks"))?.as_bytes())?;
        tail.push_str(&format!("\nwrote {}\n", path.display()));
    }
    if let Some(path) = flags.trace.path() {
        trace_with(path, &[("simulated", &found.timeline)], &found.arrows)?;
        tail.push_str(&format!("\nwrote {}\n", path.display()));
    }
    if let Some(path) = &flags.timeline {
        let written = picture::draw(path, &chosen, (&plan, faults.as_slice()), &found)?;
        tail.push_str(&format!("\nwrote {}\n", list_of(&written).join(", ")));
    }
    if let Some(dir) = &flags.chakra {
        let written = chakra::write(dir, &plan, &found.timeline, &found.class_of)?;
        tail.push_str(&format!("\nwrote {} files to {}\n", written.len(), dir.display()));
    }
    if let Some(path) = &flags.slack {
        write_slack(path, &found)?;
        tail.push_str(&format!("\nwrote {}\n", path.display()));
    }
    let answer = match found.hang.take() {
        Some(hang) => hung(&plan, hang, watchdog, found.events, wall_s),
        None => over(flags, &chosen, &plan, &faults, found, wall_s)?,
    };
    Answer { text: answer.text + &tail, ..answer }.also_to(flags.file.path())
}

/// Said where nothing is told of the critical path.
const NO_PATH: &str = "no critical path, slack or use of links: the step has too many ops to keep them all; fewer \
                       layers or microbatches have them";

/// A fault that was played; and if the step was over before it began.
fn told(fault: &Fault, step: f64) -> String {
    let late = if fault.begins_s() > step { "; the step is over before, and feels nothing of it" } else { "" };
    format!("fault: {}{late}", fault.said())
}

fn over(
    flags: &Flags,
    chosen: &Chosen,
    plan: &Plan,
    faults: &[Fault],
    found: Simulated,
    wall_s: f64,
) -> Result<Answer> {
    let Simulated { timeline, events, slowed, shared, why, .. } = found;
    let layout = chosen.case.layout(plan)?;
    let report = chosen.case.costed(plan, &layout, &timeline).report();
    let mut notes = chosen.notes();
    notes.extend(faults.iter().map(|fault| told(fault, timeline.step.value())));
    let effort =
        Effort { seed: flags.seed.number, blocks: flags.blocks()?, apart: flags.apart(chosen), ..Effort::SUMS };
    let run_step_s = mean_of_a_run(flags, chosen, plan, faults, effort)?;
    notes.extend(
        run_step_s
            .map(|s| format!("over a run, a step takes {} in the mean: links flap on from step to step", seconds(s))),
    );
    notes.extend(why.is_none().then(|| NO_PATH.to_string()));
    notes.extend(software::notes(&chosen.case, plan, &chosen.case.cost(plan)?)?);
    let report = Report { notes, row: chosen.remedied(report.row)?, ..report };
    let mut text = report.render();
    let classes = timeline.classes.len();
    let what_if = flags.explain.then(|| explain::what_if(&chosen.case, plan, faults, effort)).transpose()?;
    let blocks = match effort.blocks {
        true => flags.times()?.beside(BlockTimes::predicted(plan, chosen.case.machine())?),
        false => vec![],
    };
    if let Some(why) = &why {
        text.push_str(&format!("\n{}", explain(why, timeline.step.value(), &shared, what_if.as_deref())));
    }
    let took = seconds(wall_s);
    text.push_str(&format!(
        "\n{events} events of {classes} classes of ranks in {took}, {slowed} transfers slowed by others\n"
    ));
    let error = (!report.row.feasible).then(|| Error::Infeasible(report.row.why.clone()));
    let (critical_path, critical_parts, utilisation, nearly_critical, exposed_s) =
        why.map_or_else(Default::default, |w| (w.critical_path, w.parts, w.utilisation, w.next, w.exposed));
    let found = Found {
        report,
        events,
        slowed,
        wall_s,
        classes,
        fidelity: if effort.blocks { "block" } else { "op" }.into(),
        blocks,
        critical_path,
        critical_parts,
        utilisation,
        nearly_critical,
        exposed_s,
        run_step_s,
        shared_links: shared,
        what_if,
    };
    Ok(Answer::with_error(text, &found, error))
}

/// The mean of a run's steps where links flap, s.
fn mean_of_a_run(flags: &Flags, chosen: &Chosen, plan: &Plan, faults: &[Fault], effort: Effort) -> Result<Option<f64>> {
    let effort = Effort { watchdog: picoseconds(Seconds::new(flags.wrong.all()?.1)), ..effort };
    let times = flags.times()?;
    step_of_a_run(faults, |faults| {
        let found = simulate_measured(plan, chosen.case.machine(), faults, effort, &times)?;
        Ok(found.hang.is_none().then(|| found.timeline.step.value()))
    })
}

/// A line for every op of a rank of each class. Errors: a step that is never over or has too many ops to keep has no
/// slack.
fn write_slack(path: &Path, found: &Simulated) -> Result<()> {
    let Some(why) = found.why.as_ref().filter(|why| !why.slack.is_empty()) else {
        let why = "the step is never over or has too many ops to keep; leave --slack out";
        return Err(Error::spec("--slack", "file", why));
    };
    let mut rows = csv::Writer::from_writer(vec![]);
    let failed = |e: csv::Error| Error::io(path)(e.into());
    rows.write_record(["rank", "ranks", "path", "what", "lane", "start_s", "end_s", "slack_s"]).map_err(failed)?;
    for (class, slack) in found.timeline.classes.iter().zip(&why.slack) {
        for (span, slack) in class.spans.iter().zip(slack) {
            let lane = &found.timeline.lanes[span.lane as usize];
            let times = [span.start.value(), span.end.value(), *slack].map(|s| format!("{s:.12}"));
            let [start, end, slack] = &times;
            let like = [class.rank, class.multiplicity].map(|n| n.to_string());
            let row = [&like[0], &like[1], &span.path, span.what, lane.as_str(), start, end, slack];
            rows.write_record(row).map_err(failed)?;
        }
    }
    let bytes = rows.into_inner().expect("a Vec takes all that is written");
    write_file(path, &bytes)
}

/// Rows of the table of those who wait.
const SHOWN: usize = 12;

fn hung(plan: &Plan, hang: Hang, watchdog_s: f64, events: u64, wall_s: f64) -> Answer {
    let first = hang.waiting.first().map_or(hang.at_s, |w| w.since_s);
    let (ends_s, ranks) = (first + watchdog_s, plan.ranks());
    let list = |ranks: &[u32]| ranks.iter().take(6).map(u32::to_string).collect::<Vec<_>>().join(", ");
    let dead = (!hang.dead.is_empty()).then(|| format!("rank {} is dead; ", list(&hang.dead)));
    let down = hang.down.iter().take(6).map(|down| format!("the link {} of rank {} is down; ", down.link, down.rank));
    let cause: String = dead.into_iter().chain(down).collect();
    let mut table = Table::new(">>><<");
    table.row(["rank", "ranks like it", "waits since", "for rank", "in"]);
    for w in hang.waiting.iter().take(SHOWN) {
        let whom = if w.waits_for.is_empty() { "-".into() } else { list(&w.waits_for) };
        table.row([w.rank.to_string(), w.ranks.to_string(), seconds(w.since_s), whom, w.path.clone()]);
    }
    let more = hang.waiting.len().saturating_sub(SHOWN);
    let tail = if more > 0 { format!("and {more} more classes of ranks\n") } else { String::new() };
    let lost_gpu_s = (ends_s - first) * f64::from(ranks);
    let what = match hang.waiting.first().filter(|_| hang.overdue) {
        Some(w) => {
            format!("the step is not over in time: {cause}rank {} is in {} since {}", w.rank, w.path, seconds(first))
        }
        None => format!("the step is never over: {cause}nothing moves after {}", seconds(hang.at_s)),
    };
    let else_over = hang
        .over_s
        .map_or(String::new(), |s| format!("; with a longer --watchdog the step would be over after {}", seconds(s)));
    let text = format!(
        "{what}\n\n{}{tail}\nthe watchdog ends the job {} after the first began to wait, at {}: {:.1} GPU hours \
         lost{else_over}; `goodput` does not wait for it (--watchdog), but counts the `detect` of its --fleet\n",
        table.render(""),
        seconds(watchdog_s),
        seconds(ends_s),
        lost_gpu_s / 3600.0
    );
    let found = Hung { plan: plan.hash(), gpus: ranks, hang, watchdog_s, ends_s, lost_gpu_s, events, wall_s };
    Answer::new(text, &found)
}
