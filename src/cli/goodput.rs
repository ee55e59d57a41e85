//! `foretrain goodput`: what failures and checkpoints leave of a run.

use super::config::{CLUSTER, Config};
use super::flags::value::trained_tokens;
use super::flags::{Output, PlanFile, Seed};
use super::progress::Clock;
use super::{Answer, list_of, software};
use crate::error::{Error, Result};
use crate::goodput::Run;
use crate::goodput::checkpoint::{Checkpoint, state_bytes};
use crate::goodput::expected::{ettr, young};
use crate::goodput::play::{Played, Spent, play};
use crate::goodput::study::{Change, LEVERS, Question, pulled, study};
use crate::plan::Plan;
use crate::plot;
use crate::report::human::{Table, counted, decimal, long, notes, percent, seconds};
use crate::report::record;
use crate::sim::fault::WATCHDOG_S;
use crate::spec::{Cause, ClusterSpec, FleetSpec, Origin, Sourced, StorageSpec};
use crate::sweep::Case;
use crate::units::{Bytes, BytesPerSec, Seconds};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain goodput --model llama-3.1-405b --cluster h100-24k-roce --gpus 16384 --tp 8 --pp 16 --vp 8 --options short-ends+recompute-norm --global-batch 2048\n         \
                        foretrain goodput --model llama-3-70b --gpus 512 --tp 8 --pp 4 --global-batch 1024 --tokens 15T\n         \
                        foretrain goodput --gpus 12288 --step-time 6.34s --state 2.45TB --fleet meta-rsc-1 --spares 32\n         \
                        foretrain goodput --gpus 1024 --step-time 5s --state 1TB --mtbf 7.9h --recover 10min --store-rate 20GB/s\n         \
                        foretrain goodput --gpus 16384 --step-time 5s --state 5.67TB --out results/goodput"
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    /// Of one step, e.g. 6.34s [default: what `estimate` says of the flags above]
    #[arg(long, value_name = "TIME")]
    step_time: Option<Seconds>,
    /// Bytes of a checkpoint, e.g. 5.67TB [default: the model's weights and Adam's state]
    #[arg(long, value_name = "BYTES")]
    state: Option<Bytes>,
    /// A shipped fleet, or the path of its JSON file: how often what fails, how soon it is seen
    #[arg(long, value_name = "NAME", default_value = "llama-3-405b")]
    fleet: String,
    /// A shipped store, or the path of its JSON file: how fast checkpoints are saved and loaded
    #[arg(long, value_name = "NAME", default_value = "tectonic")]
    storage: String,
    /// Mean time between failures of this run, e.g. 7.9h [default: the fleet's rate a node, times the nodes]
    #[arg(long, value_name = "TIME")]
    mtbf: Option<Seconds>,
    /// From a failure until processes stand again and load, e.g. 10min [default: the fleet's]
    #[arg(long, value_name = "TIME")]
    recover: Option<Seconds>,
    /// What the store takes and gives to all nodes together, e.g. 100MB/s [default: the store's, and its limit of a node]
    #[arg(long, value_name = "RATE")]
    store_rate: Option<BytesPerSec>,
    /// Training between two checkpoints, e.g. 30min [default: what wastes least]
    #[arg(long, value_name = "TIME")]
    every: Option<Seconds>,
    /// Nodes that stand by [default: as many as it takes]
    #[arg(long, value_name = "N")]
    spares: Option<u32>,
    /// How long the training takes if nothing ever fails, e.g. 54d
    #[arg(long, value_name = "TIME", default_value = "30d")]
    work: Seconds,
    /// Tokens of the whole training in place of --work, e.g. 300B or 15.6T
    #[arg(long, value_name = "N", value_parser = trained_tokens, conflicts_with = "work")]
    tokens: Option<f64>,
    /// Runs that are played, for what luck does
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    #[command(flatten)]
    seed: Seed,
    /// Write rows.csv and a picture into this folder: over the interval, and over the number of GPUs
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// The step, and what is saved of it.
struct Step {
    /// In words.
    what: String,
    gpus: u32,
    time_s: f64,
    /// Where it was costed.
    mfu: Option<f64>,
    state_bytes: f64,
    /// Of the model, where it was costed.
    notes: Vec<String>,
    /// Of one step, where that is known.
    tokens: Option<f64>,
}

/// What is to be known of a step that was costed: other software, and how published runs came out.
fn predicted(case: &Case, plan: &Plan) -> Result<Vec<String>> {
    let said = record::sentence(&software::record(case)).trim_end().to_string();
    let said = (!said.is_empty()).then_some(said);
    Ok(software::notes(case, plan, &case.cost(plan)?)?.into_iter().chain(said).collect())
}

impl Flags {
    /// As costed, or as told.
    fn step(&self, fleet: &FleetSpec) -> Result<Step> {
        if let (Some(time), Some(state)) = (self.step_time, self.state) {
            self.only_gpus()?;
            let gpus = self.config.gpus().ok_or_else(|| {
                Error::spec("--gpus", "gpus", "is missing; with --step-time and --state, say how many GPUs there are")
            })?;
            let what = format!("{gpus} GPUs, {} of state", decimal(state.value(), "B"));
            return Ok(Step {
                what,
                gpus,
                time_s: time.value(),
                mfu: None,
                state_bytes: state.value(),
                notes: vec![],
                tokens: None,
            });
        }
        let chosen = self.config.choose(self.plan.path(), CLUSTER)?;
        let plan = chosen.plan()?;
        let row = chosen.case.row_of(&plan)?;
        let (time_s, costed) = match (self.step_time, row.feasible, row.step_time_s) {
            (None, true, Some(costed)) => (costed, costed),
            // Whoever has timed the step knows that it runs.
            (Some(time), _, costed) => (time.value(), costed.unwrap_or(f64::NAN)),
            _ => return Err(Error::infeasible(chosen.remedied(row)?.why)),
        };
        let options = &chosen.point.par.options;
        let state =
            self.state.map_or_else(|| state_bytes(&chosen.case.model, chosen.case.dtype, options), Bytes::value);
        // Of a step that was timed they say nothing.
        let otherwise = match self.step_time {
            None => predicted(&chosen.case, &plan)?,
            Some(_) => vec![],
        };
        let nodes = other_nodes(&chosen.case.cluster.spec, fleet);
        Ok(Step {
            what: format!("{} on {} of {}", row.model, counted(row.gpus, "GPU"), row.cluster),
            gpus: row.gpus,
            time_s,
            // A step that takes longer than costed uses the GPUs less.
            mfu: row.mfu.map(|mfu| mfu * costed / time_s).filter(|mfu| mfu.is_finite()),
            state_bytes: state,
            notes: chosen.notes().into_iter().chain(nodes).chain(otherwise).collect(),
            tokens: Some(row.global_batch as f64 * row.seq_len as f64),
        })
    }

    /// Where step and state are told, nothing is costed. Errors: flags that only a costed step has a use for.
    fn only_gpus(&self) -> Result<()> {
        if self.plan.path().is_none() && !self.config.says_more_than_gpus() {
            return Ok(());
        }
        let why = "with --step-time and --state no step is costed: of the flags of a configuration only --gpus is used; leave \
                   the others (--model, --tp, --seq-len, --plan ..) out, or leave --step-time or --state out";
        Err(Error::spec("the command line", "configuration", why))
    }

    /// What a picture says of the numbers that were told in place of the fleet's and the store's.
    fn in_place(&self) -> String {
        let mtbf = self.mtbf.map(|s| format!(", a failure every {}", long(s.value())));
        let recover = self.recover.map(|s| format!(", {} to recover", long(s.value())));
        let rate = self.store_rate.map(|rate| format!(", {rate} to the store"));
        mtbf.into_iter().chain(recover).chain(rate).collect()
    }

    /// How long the training takes if nothing fails, s.
    fn work(&self, step: &Step) -> Result<f64> {
        let work = match (self.tokens, step.tokens) {
            (None, _) => self.work.value(),
            (Some(tokens), Some(of_a_step)) => (tokens / of_a_step).ceil() * step.time_s,
            (Some(_), None) => {
                let why =
                    "with --step-time and --state alone nothing is known of a step's tokens; say --work in its place";
                return Err(Error::spec("the command line", "--tokens", why));
            }
        };
        sensible(if self.tokens.is_some() { "--tokens" } else { "--work" }, Some(work), LONGEST)?;
        Ok(work)
    }

    /// What the user knows of failures, of recovery and of the store, in place of what the files say. Errors: a time
    /// between failures for a fleet whose file counts none.
    fn told(&self, gpus: u32, fleet: &mut FleetSpec, storage: &mut StorageSpec) -> Result<()> {
        if let Some(mtbf) = self.mtbf {
            let failures: f64 = fleet.causes.iter().filter(|c| !c.planned).map(|c| c.count).sum();
            if failures <= 0.0 {
                let why =
                    format!("{} counts no failures that it could be shared among; give another --fleet", fleet.name);
                return Err(Error::spec("--mtbf", "value", why));
            }
            let nodes = f64::from(gpus.div_ceil(fleet.gpus_per_node));
            // Planned stops are as frequent as they were: those of the file, over the new days.
            let node_days = failures * nodes * mtbf.value() / 86_400.0;
            let share = node_days / fleet.node_days.value;
            fleet.causes.iter_mut().filter(|c| c.planned).for_each(|c| c.count *= share);
            fleet.node_days = told("--mtbf", node_days);
        }
        if let Some(recover) = self.recover {
            fleet.detect = told("--recover", Seconds::new(0.0));
            fleet.restart = told("--recover", recover);
        }
        if let Some(rate) = self.store_rate {
            for field in
                [&mut storage.write, &mut storage.read, &mut storage.write_per_node, &mut storage.read_per_node]
            {
                *field = told("--store-rate", rate);
            }
        }
        Ok(())
    }
}

/// What fails with one, stands by and is repaired is what the fleet calls a node.
fn other_nodes(cluster: &ClusterSpec, fleet: &FleetSpec) -> Option<String> {
    let [own, of_fleet] = [cluster.gpus_per_node, fleet.gpus_per_node];
    (own != of_fleet).then(|| {
        format!(
            "nodes: failures, spares and repairs are counted by {of_fleet} GPUs, as fleet {} has them, where {} has {own} to a \
             node; if more go down with one, give a --fleet of its own",
            fleet.name, cluster.name
        )
    })
}

/// A number of the command line: whoever typed it knows it of the run, so that nothing of it is assumed here.
fn told<T>(flag: &str, value: T) -> Sourced<T> {
    Sourced { value, source: flag.into(), provenance: Origin::Measured }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Found {
    gpus: u32,
    fleet: String,
    storage: String,
    step_time_s: f64,
    /// Of training, if nothing fails.
    work_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<f64>,
    mfu: Option<f64>,
    run: Run,
    interval_steps: f64,
    /// Young's rule, to the first order.
    young_s: Option<f64>,
    /// Mean time between interruptions, planned or not.
    mtbi_s: Option<f64>,
    /// In the long run, and with a node for every one that fails.
    ettr_expected: f64,
    /// What of this run that leaves out, where it leaves out something.
    #[serde(skip_serializing_if = "Option::is_none")]
    ettr_expected_leaves_out: Option<&'static str>,
    played: Played,
    /// MFU times the effective training time ratio.
    goodput_mfu: Option<f64>,
    wall_s: f64,
    gpu_hours: GpuHours,
    /// Nodes in repair at a time, and spares of which one is ready for a failed node 99 % of the time.
    in_repair: f64,
    spares_99: u32,
    /// By cause, in the time that a run takes.
    interruptions: Vec<Interruptions>,
    /// The ratio with more nodes that stand by, as played, where the run waits for nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    more_spares: Vec<Spares>,
    /// The ratio with one thing better, at its best interval or, where one was asked for, at that.
    levers: Vec<Lever>,
    /// Fields of the fleet and of the store that rest on no measurement.
    assumed: Vec<String>,
    notes: Vec<String>,
    files: Vec<String>,
}

/// Of GPUs that are kept from the first step to the last.
#[derive(Serialize)]
struct GpuHours {
    training: f64,
    /// Of those that stand by; `None` where there are as many as it takes.
    standing_by: Option<f64>,
}

impl GpuHours {
    fn new(wall_s: f64, gpus: u32, run: &Run, fleet: &FleetSpec) -> GpuHours {
        let hours = wall_s / 3600.0;
        let spare = |nodes: u32| hours * f64::from(nodes) * f64::from(fleet.gpus_per_node);
        GpuHours { training: hours * f64::from(gpus), standing_by: run.spares.map(spare) }
    }

    fn said(&self) -> String {
        let of = |hours: f64| decimal(hours, "").trim_end().to_string();
        let training = of(self.training);
        match self.standing_by {
            None => format!("{training} GPU-hours, without nodes that stand by"),
            Some(0.0) => format!("{training} GPU-hours"),
            Some(more) => format!("{training} GPU-hours, {} with the nodes that stand by", of(self.training + more)),
        }
    }
}

#[derive(Serialize)]
struct Interruptions {
    cause: String,
    count: f64,
}

#[derive(Serialize)]
struct Spares {
    spares: u32,
    ettr: f64,
}

#[derive(Serialize)]
struct Lever {
    what: &'static str,
    ettr: f64,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let (mut fleet, mut storage) = (FleetSpec::find(&flags.fleet)?, StorageSpec::find(&flags.storage)?);
    if let Some(spares) = flags.spares.filter(|spares| *spares > MOST_SPARES) {
        let why = format!("{spares} is more than {MOST_SPARES}; leave it out for as many as it takes");
        return Err(Error::spec("--spares", "nodes", why));
    }
    sensible("--mtbf", flags.mtbf.map(Seconds::value), LONGEST)?;
    sensible("--recover", flags.recover.map(Seconds::value), LONGEST)?;
    sensible("--store-rate", flags.store_rate.map(BytesPerSec::value), LARGEST)?;
    sensible("--step-time", flags.step_time.map(Seconds::value), LONGEST)?;
    sensible("--state", flags.state.map(Bytes::value), LARGEST)?;
    let clock = Clock::start("costing a step");
    let step = flags.step(&fleet)?;
    drop(clock);
    let work = flags.work(&step)?;
    flags.told(step.gpus, &mut fleet, &mut storage)?;
    let run = Run::new(&fleet, step.gpus, Checkpoint::new(step.state_bytes, step.gpus, &fleet, &storage))?;
    let mut run = Run { spares: flags.spares, ..run.in_steps(Seconds::new(step.time_s)) };
    if let Some(every) = flags.every {
        run = run.every(every)?;
    }
    let played = play(&run, work, flags.runs as usize, flags.seed.seed);
    if played.hopeless {
        return Err(hopeless(&run));
    }
    let wall_s = played.spent.wall();
    let all = run.failures() + run.planned;
    let mut found = Found {
        gpus: step.gpus,
        fleet: fleet.name.clone(),
        storage: storage.name.clone(),
        step_time_s: step.time_s,
        work_s: work,
        tokens: flags.tokens,
        mfu: step.mfu,
        interval_steps: (run.interval_s / step.time_s).round(),
        young_s: Some(young(&run)).filter(|s| s.is_finite()),
        mtbi_s: (all > 0.0).then(|| 1.0 / all),
        ettr_expected: ettr(&run),
        ettr_expected_leaves_out: run.spares.map(|_| NO_WAITING),
        goodput_mfu: step.mfu.map(|mfu| mfu * played.ettr),
        wall_s,
        gpu_hours: GpuHours::new(wall_s, step.gpus, &run, &fleet),
        interruptions: interruptions(&fleet, &run, &played),
        in_repair: run.in_repair(),
        spares_99: run.spares_for(0.99),
        more_spares: more_spares(&run, &played, work, flags),
        levers: levers(&run, flags.every.is_some()),
        assumed: assumed(&fleet, &storage),
        notes: step.notes.clone(),
        run,
        played,
        files: vec![],
    };
    let mut text = render(&step, &found);
    if let Some(dir) = &flags.out {
        let question = Question {
            run: step.what + &flags.in_place(),
            fleet: &fleet,
            storage: &storage,
            state_bytes: step.state_bytes,
            step: Seconds::new(step.time_s),
            gpus: step.gpus,
        };
        let rows = study(&question, dir)?;
        let files: Vec<PathBuf> = std::iter::once(rows.clone()).chain(plot::draw(&rows, dir)?).collect();
        text.push('\n');
        files.iter().for_each(|f| text.push_str(&format!("wrote {}\n", f.display())));
        found.files = list_of(&files);
    }
    Ok(Answer::new(text, &found))
}

/// How often to expect each cause.
fn interruptions(fleet: &FleetSpec, run: &Run, played: &Played) -> Vec<Interruptions> {
    // Nobody plans a stop of a run that is down.
    let node_days = |planned: bool| {
        let s = if planned { played.spent.up(run) } else { played.spent.wall() };
        f64::from(run.nodes) * s / 86_400.0
    };
    let each = |c: &Cause| Interruptions {
        cause: c.cause.clone(),
        count: c.count / fleet.node_days.value * node_days(c.planned),
    };
    fleet.causes.iter().map(each).collect()
}

/// The formula has no number of nodes that stand by.
const NO_WAITING: &str = "waiting for a node where none stands by: that hangs on how many are in repair at the time, which \
                          runs that are played count";

/// A run that waits for this share of its time is asked what more nodes would do.
const WAITS: f64 = 0.005;

/// One more that stands by, and as many as are enough nearly always.
fn more_spares(run: &Run, played: &Played, work: f64, flags: &Flags) -> Vec<Spares> {
    let waits = played.spent.waiting > WAITS * played.spent.wall();
    let Some(now) = run.spares.filter(|_| waits) else { return vec![] };
    let with = |spares: u32| {
        let run = Run { spares: Some(spares), ..run.clone() };
        Spares { spares, ettr: play(&run, work, flags.runs as usize, flags.seed.seed).ettr }
    };
    let enough = run.spares_for(0.99);
    std::iter::once(now + 1).chain((enough > now + 1).then_some(enough)).map(with).collect()
}

/// What would help. Where the interval was asked for it stays, and another one is a way to help.
fn levers(run: &Run, asked: bool) -> Vec<Lever> {
    let at = |change: Change| if asked { change(run) } else { pulled(run, change) };
    let of = |&(what, change): &(&'static str, Change)| Lever { what, ettr: ettr(&at(change)) };
    let best = asked.then(|| Lever { what: "saved as often as wastes least", ettr: ettr(&pulled(run, Run::clone)) });
    best.into_iter().chain(LEVERS.iter().map(of)).collect()
}

fn assumed(fleet: &FleetSpec, storage: &StorageSpec) -> Vec<String> {
    let of = |name: &str, fields: Vec<&str>| fields.into_iter().map(|f| format!("{name}.{f}")).collect::<Vec<_>>();
    [of(&fleet.name, fleet.assumed()), of(&storage.name, storage.assumed())].concat()
}

/// Why a run does not end.
fn hopeless(run: &Run) -> Error {
    let short = run.spares.is_some_and(|spares| f64::from(spares) < run.in_repair());
    Error::infeasible(if short {
        let enough = run.spares_for(0.99);
        let remedy = match enough <= MOST_SPARES {
            true => format!("give --spares {enough}"),
            false => format!("no more than {MOST_SPARES} can; take fewer GPUs, or a longer --mtbf"),
        };
        format!(
            "{:.0} nodes are in repair at a time and fewer stand by: the run waits for nodes; {remedy}",
            run.in_repair()
        )
    } else {
        format!(
            "the run comes to no end: failures come every {}, and {} between checkpoints and {} to recover are too long \
             for that; save more often, recover faster or take fewer GPUs",
            seconds(1.0 / run.failures()),
            seconds(run.interval_s),
            seconds(run.recover_s())
        )
    })
}

/// More nodes stand by nowhere.
const MOST_SPARES: u32 = 1 << 20;

/// Seconds and bytes beyond which somebody has mistaken a unit: three hundred years, a thousand exabytes.
const LONGEST: f64 = 1e10;
const LARGEST: f64 = 1e21;

fn sensible(flag: &str, value: Option<f64>, most: f64) -> Result<()> {
    match value {
        Some(v) if v <= 0.0 => Err(Error::spec(flag, "value", format!("{v} is not above zero"))),
        Some(v) if v > most => Err(Error::spec(
            flag,
            "value",
            format!("{v:e} is more than {most:e} of its unit (s or B); correct the unit"),
        )),
        _ => Ok(()),
    }
}

fn render(step: &Step, found: &Found) -> String {
    let Found { run, played, .. } = found;
    let mut text = format!(
        "{}, fleet {}, storage {}\nstep {}; {} of training{}, played {} times\n\n",
        step.what,
        found.fleet,
        found.storage,
        seconds(step.time_s),
        long(found.work_s),
        found.tokens.map_or(String::new(), |tokens| format!(", {} tokens", decimal(tokens, "").trim_end())),
        played.runs
    );
    text.push_str(&notes(&step.notes));
    let mut facts = Table::new("<<<");
    let mut fact = |name: &str, value: String, more: String| facts.row([name.to_string(), value, more]);
    let luck = format!("5 to 95 % of runs: {} to {}", percent(played.ettr_p5), percent(played.ettr_p95));
    let expected = percent(found.ettr_expected);
    match found.ettr_expected_leaves_out {
        None => fact("ETTR", percent(played.ettr), format!("{luck}; in the long run {expected}")),
        Some(what) => {
            fact("ETTR", percent(played.ettr), luck);
            fact("", expected, format!("in the long run, leaving out {what}"));
        }
    }
    if let (Some(mfu), Some(goodput)) = (found.mfu, found.goodput_mfu) {
        fact("MFU", percent(goodput), format!("of the whole time; {} of a step", percent(mfu)));
    }
    fact("time", long(found.wall_s), found.gpu_hours.said());
    if let Some(mtbi) = found.mtbi_s {
        let spent = &played.spent;
        fact(
            "between",
            long(mtbi),
            format!("two interruptions; {} failures, {} planned stops", count(spent.failures), count(spent.stops)),
        );
    }
    let young = found.young_s.map_or(String::new(), |s| format!("; Young's rule says {}", long(s)));
    fact("save every", long(run.interval_s), format!("{}{young}", steps(found.interval_steps)));
    let spares = run.spares.map_or("as many as it takes".into(), |n| format!("{n} nodes"));
    let ready =
        format!("{:.1} are in repair at a time; {} are enough 99 % of the time", found.in_repair, found.spares_99);
    fact("stand by", spares, ready);
    let Checkpoint { bytes, bytes_per_gpu, stall_s, save_s, load_s, reshard_s } = run.checkpoint;
    fact("checkpoint", decimal(bytes, "B"), format!("{} a GPU", decimal(bytes_per_gpu, "B")));
    let other = reshard_s.map_or(String::new(), |s| format!(", into another layout in {}", seconds(s)));
    let times = format!("of standing still, safe after {}, loaded in {}{other}", seconds(save_s), seconds(load_s));
    fact("", seconds(stall_s), times);
    text.push_str(&facts.render("  "));
    text.push_str(&where_time_goes(&played.spent));
    text.push_str(&with_more_spares(&found.more_spares));
    text.push_str("\nwhat would help, in the long run and with a node for every one that fails\n");
    let mut table = Table::new("<>>");
    for lever in &found.levers {
        let gain = 100.0 * (lever.ettr - found.ettr_expected);
        table.row([lever.what.to_string(), percent(lever.ettr), format!("{gain:+.1} points")]);
    }
    text.push_str(&table.render("  "));
    let mut causes: Vec<&Interruptions> = found.interruptions.iter().filter(|i| i.count > 0.0).collect();
    causes.sort_by(|a, b| b.count.total_cmp(&a.count));
    text.push_str("\ninterruptions to expect\n");
    let mut table = Table::new("<>");
    causes.iter().for_each(|i| table.row([i.cause.clone(), format!("{:.1}", i.count)]));
    text.push_str(&table.render("  "));
    if !found.assumed.is_empty() {
        text.push_str(&format!("\nassumed, not measured: {}\n", listed(&found.assumed, run)));
    }
    text
}

/// `simulate` has another time until a failure is noticed.
fn listed(assumed: &[String], run: &Run) -> String {
    let noticed = long(run.detect_s);
    let other = "--recover or a --fleet changes it, and `simulate --dead` waits for its --watchdog instead";
    let said = |field: &String| match field.ends_with(".detect") {
        true => format!("{field} ({noticed}; {other}, {WATCHDOG_S} s)"),
        false => field.clone(),
    };
    assumed.iter().map(said).collect::<Vec<_>>().join(", ")
}

fn where_time_goes(spent: &Spent) -> String {
    let mut table = Table::new("<>>");
    for (what, s) in [
        ("training", spent.training),
        ("standing still to save", spent.stalled),
        ("lost since the last save", spent.lost),
        ("noticing and finding it", spent.detecting),
        ("waiting for a node", spent.waiting),
        ("restarting", spent.restarting),
        ("loading", spent.loading),
    ] {
        table.row([what.to_string(), long(s), percent(s / spent.wall())]);
    }
    format!("\nwhere the time goes\n{}", table.render("  "))
}

fn steps(count: f64) -> String {
    format!("{count:.0} step{}", if count < 1.5 { "" } else { "s" })
}

fn with_more_spares(more: &[Spares]) -> String {
    if more.is_empty() {
        return String::new();
    }
    let with = |more: &Spares| format!("with {} ETTR is {}", more.spares, percent(more.ettr));
    let all: Vec<String> = more.iter().map(with).collect();
    format!("\nmore nodes that stand by: {}\n", all.join(", "))
}

/// A mean of whole numbers: of few, with a decimal.
fn count(mean: f64) -> String {
    if mean < 10.0 { format!("{mean:.1}") } else { format!("{mean:.0}") }
}
