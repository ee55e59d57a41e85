//! What is found of a run: what its time goes to, what interrupts it, and what would help.

use super::Flags;
use super::step::Step;
use super::told::MOST_SPARES;
use crate::error::{Cause, Error, Result};
use crate::goodput::Run;
use crate::goodput::checkpoint::Checkpoint;
use crate::goodput::expected::{ettr, young};
use crate::goodput::play::{Played, play};
use crate::goodput::study::{Change, LEVERS, pulled};
use crate::report::human::{decimal, percent, seconds};
use crate::spec::{FleetSpec, InterruptionKind, StorageSpec};
use serde::Serialize;

/// What `--json` prints.
#[derive(Serialize)]
pub struct Found {
    pub gpus: u32,
    pub fleet: String,
    pub storage: String,
    pub step_time_s: f64,
    /// Of training, if nothing fails.
    pub work_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<f64>,
    pub mfu: Option<f64>,
    pub run: Run,
    pub interval_steps: f64,
    /// Young's rule, to the first order.
    pub young_s: Option<f64>,
    /// Mean time between interruptions, planned or not.
    pub mtbi_s: Option<f64>,
    /// In the long run, and with a node for every one that fails.
    pub ettr_expected: f64,
    /// What of this run that leaves out, where it leaves out something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ettr_expected_leaves_out: Option<&'static str>,
    pub played: Played,
    /// MFU times the effective training time ratio.
    pub goodput_mfu: Option<f64>,
    pub wall_s: f64,
    pub gpu_hours: GpuHours,
    /// Nodes in repair at a time, and spares of which one is ready for a failed node 99 % of the time.
    pub in_repair: f64,
    pub spares_99: u32,
    /// By cause, in the time that a run takes.
    pub interruptions: Vec<Interruptions>,
    /// The ratio with more nodes that stand by, as played, where the run waits for nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more_spares: Vec<Spares>,
    /// The ratio with one thing better, at its best interval or, where one was asked for, at that.
    pub levers: Vec<Lever>,
    /// Fields of the fleet and of the store that rest on no measurement.
    pub assumed: Vec<String>,
    pub notes: Vec<String>,
    pub files: Vec<String>,
}

impl Found {
    /// Plays the run. Errors: it comes to no end.
    pub fn new(
        flags: &Flags,
        step: &Step,
        work_s: f64,
        run: Run,
        (fleet, storage): (&FleetSpec, &StorageSpec),
    ) -> Result<Found> {
        let played = play(&run, work_s, flags.runs as usize, flags.seed.number);
        if played.hopeless {
            return Err(hopeless(&run));
        }
        let wall_s = played.spent.wall();
        let all = run.failures() + run.planned;
        Ok(Found {
            gpus: step.gpus,
            fleet: fleet.name.clone(),
            storage: storage.name.clone(),
            step_time_s: step.time_s,
            work_s,
            tokens: flags.tokens,
            mfu: step.mfu,
            interval_steps: (run.interval_s / step.time_s).round(),
            young_s: Some(young(&run)).filter(|s| s.is_finite()),
            mtbi_s: (all > 0.0).then(|| 1.0 / all),
            ettr_expected: ettr(&run),
            ettr_expected_leaves_out: run.spares.map(|_| NO_WAITING),
            goodput_mfu: step.mfu.map(|mfu| mfu * played.ettr),
            wall_s,
            gpu_hours: GpuHours::new(wall_s, step.gpus, &run, fleet),
            interruptions: interruptions(fleet, &run, &played),
            in_repair: run.in_repair(),
            spares_99: run.spares_for(0.99),
            more_spares: more_spares(&run, &played, work_s, flags),
            levers: levers(&run, flags.every.is_some()),
            assumed: assumed(fleet, storage),
            notes: step.notes.iter().cloned().chain(spares_left(step, fleet, &run, work_s, flags)).collect(),
            run,
            played,
            files: vec![],
        })
    }
}

/// Of GPUs that are kept from the first step to the last.
#[derive(Serialize)]
pub struct GpuHours {
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

    pub fn said(&self) -> String {
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
pub struct Interruptions {
    pub cause: String,
    pub count: f64,
}

#[derive(Serialize)]
pub struct Spares {
    pub spares: u32,
    pub ettr: f64,
}

#[derive(Serialize)]
pub struct Lever {
    pub what: &'static str,
    pub ettr: f64,
}

/// How often to expect each cause.
fn interruptions(fleet: &FleetSpec, run: &Run, played: &Played) -> Vec<Interruptions> {
    // Nobody plans a stop of a run that is down.
    let node_days = |planned: bool| {
        let s = if planned { played.spent.up(run) } else { played.spent.wall() };
        f64::from(run.nodes) * s / 86_400.0
    };
    let each = |c: &InterruptionKind| Interruptions {
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
        Spares { spares, ettr: play(&run, work, flags.runs as usize, flags.seed.number).ettr }
    };
    let enough = run.spares_for(0.99);
    std::iter::once(now + 1).chain((enough > now + 1).then_some(enough)).map(with).collect()
}

/// What is said where the cluster's file has fewer nodes to spare than the run takes: how many, and what they leave. A file with
/// fewer nodes than the run has is no list of them; its network is taken to go on.
fn spares_left(step: &Step, fleet: &FleetSpec, run: &Run, work: f64, flags: &Flags) -> Option<String> {
    let cluster = step.cluster.as_ref()?;
    let each = u64::from(fleet.gpus_per_node);
    let all = u64::from(cluster.nodes) * u64::from(cluster.gpus_per_node) / each;
    let left = u32::try_from(all.checked_sub(u64::from(run.nodes))?).ok()?;
    if left >= run.spares.unwrap_or_else(|| run.spares_for(0.99)) {
        return None;
    }
    let taken = run.spares.map_or("as many that stand by as it takes".into(), |n| format!("{n} that stand by"));
    let played = play(&Run { spares: Some(left), ..run.clone() }, work, flags.runs as usize, flags.seed.number);
    let ettr =
        if played.hopeless { "the run comes to no end".into() } else { format!("ETTR is {}", percent(played.ettr)) };
    Some(format!(
        "spares: the file of {} has {all} nodes of {each} GPUs, and the run uses {}; what follows has {taken}, with the {left} \
         that are left {ettr} (--spares {left})",
        cluster.name, run.nodes
    ))
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
    Cause::Other.infeasible(if short {
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
             for that; {} or take fewer GPUs",
            seconds(1.0 / run.failures()),
            seconds(run.interval_s),
            seconds(run.recover_s()),
            faster(run)
        )
    })
}

/// What would help a run that comes to no end: what takes half of the time between failures or more. No save is over sooner than
/// the store lets it.
fn faster(run: &Run) -> String {
    let Checkpoint { save_s, load_s, .. } = run.checkpoint;
    let is_long = |s: f64| 2.0 * s * run.failures() > 1.0;
    let rarely = run.interval_s > 2.0 * run.checkpoint.shortest_interval_s().max(run.step_s);
    let store =
        format!("name a faster --storage or --store-rate ({} to save, {} to load)", seconds(save_s), seconds(load_s));
    let all = [
        (rarely, "save more often".to_string()),
        (is_long(run.recover_s() - load_s), "recover faster".into()),
        (is_long(save_s.max(load_s)), store),
    ];
    let helps: Vec<String> = all.into_iter().filter(|(does, _)| *does).map(|(_, what)| what).collect();
    if helps.is_empty() { "recover faster".into() } else { helps.join(", ") }
}
