//! The discrete-event interpreter: what shares a link, who waits for whom, and what a slow or dead part costs.
//!
//! It means what [`cost`](crate::cost) means, op by op, and takes its durations from the same place,
//! [`act`](crate::act): with nothing shared between ranks the two agree to the picosecond. What only time order
//! can tell is found here: an event is the end of a kernel, or of the bytes of a meeting.
//!
//! * `script`: a program with all calls spliced, its edges both ways, and what each distinct op does.
//! * `engine`: the loop. An op begins when the last thing it waits for has ended; time is u64 picoseconds, and
//!   events of one moment are taken in the order in which they were found, so that runs repeat exactly.
//! * `meet`: those who communicate wait for each other, and their bytes go.
//! * `ports`, `posting`: transfers that share a port of a rank, and which of them count as posted first.
//! * [`links`]: meetings of different ranks that share a link: a NIC, the uplinks of a pod, a bridge, a wire.
//! * `blocks`, `block_times`: kernels that nothing can happen between, as one, and what was measured of such.
//! * [`fault`], `hang`: what is wrong with the machine, and who waits for ever because of it.
//! * `jitter`: kernels that take a little more or less each time, of ranks that are folded all the same.
//! * `threads`: ranks that are threads of one machine and share its cores, by a profile.
//! * [`why`]: the chain of ops and waits that makes the step as long as it is.

mod account;
mod block_times;
mod blocks;
pub mod collective;
mod engine;
pub mod fault;
pub mod flap;
mod hang;
mod jitter;
pub mod links;
mod meet;
mod meeting;
mod pace;
mod ports;
mod posting;
mod recent;
mod run;
mod script;
pub mod share;
mod threads;
pub mod why;

pub use crate::act::Machine;
use crate::act::stamp::{Stamp, in_time};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::fold::{self, Fold};
use crate::plan::Plan;
use crate::timeline::{Arrow, Timeline};
pub use block_times::{BlockTime, BlockTimes};
use fault::Health;
pub use fault::{Fault, Faults};
pub use hang::Hang;
pub use links::SharedLink;
use links::{Links, census::Census, footprint::any_shared};
use rustc_hash::FxHasher;
use script::Script;
use std::hash::{Hash, Hasher};
pub use why::Why;

/// How much work to spare, and what to keep; the answer is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Follow one rank of each class of equal ranks.
    pub fold: bool,
    /// Keep every op's start and end.
    pub spans: bool,
    /// Say why the step takes as long as it does, unless there are more than [`MOST_KEPT`] ops on all classes.
    pub why: bool,
    /// Let meetings of different ranks slow each other down where they share a link.
    pub shared: bool,
    /// Go block by block, kernels that nothing can happen between being one. That is exact except where communication
    /// takes SMs from kernels, or the CPU is late.
    pub blocks: bool,
    /// Play ranks that are threads of one machine each alone on a core, with messages on links, so that ops have slack.
    /// See [`plays_threads`].
    pub apart: bool,
    /// Seed of everything that is random.
    pub seed: u64,
    /// How long a library lets an op that communicates take, its waiting counted, before it ends the step, in ps.
    /// Threads of one machine have no such library.
    pub watchdog: u64,
}

impl Effort {
    pub const SUMS: Effort = Effort {
        fold: true,
        spans: false,
        why: false,
        shared: true,
        blocks: false,
        apart: false,
        seed: 0,
        watchdog: u64::MAX,
    };
    pub const SPANS: Effort = Effort { spans: true, why: true, ..Effort::SUMS };
}

/// Ops of all classes beyond which they are not kept only to say why.
pub const MOST_KEPT: usize = 8_000_000;

/// What a simulation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulated {
    pub timeline: Timeline,
    /// Number of events that were gone through.
    pub events: u64,
    /// Number of transfers that others on a port or a link slowed down.
    pub slowed: u64,
    /// Links between ranks that were too narrow for all at some time.
    pub shared: Vec<SharedLink>,
    /// The class in the timeline of each rank.
    pub class_of: Vec<u32>,
    /// Messages between ranks of different classes; with spans only.
    pub arrows: Vec<Arrow>,
    /// Who waits for ever, or for longer than the watchdog lets it; then the step is never over, and the timeline ends
    /// where nothing moves any more, or with the job. `None`: nobody does.
    pub hang: Option<Hang>,
    /// Why the step takes as long as it does, if that was asked for.
    pub why: Option<Why>,
}

/// Plays a plan event by event. Errors: a fault that cannot be, a plan that deadlocks, a copy to a host's memory that
/// the cluster says nothing of, an exchange that its library or the cluster refuses, a step longer than can be told.
///
/// Panics where the device has no peak for a dtype of the plan: check them with `Roofline::peak` before.
pub fn simulate(plan: &Plan, machine: Machine, faults: &[Fault], effort: Effort) -> Result<Simulated> {
    simulate_measured(plan, machine, faults, effort, &BlockTimes::default())
}

/// [`simulate`] with blocks that take what was measured. Errors: those of [`simulate`]; measured blocks where the step
/// is played op by op, or that the plan does not have.
pub fn simulate_measured(
    plan: &Plan,
    machine: Machine,
    faults: &[Fault],
    effort: Effort,
    times: &BlockTimes,
) -> Result<Simulated> {
    let times = times.lookup();
    if !effort.blocks && !times.is_empty() {
        return Err(Error::spec("--block-times", "fidelity", "op by op there are no blocks; add --fidelity block"));
    }
    let blocks = effort.blocks.then_some(&times);
    if machine.devices.is_some() {
        return Err(Error::plan("ranks that share a device are costed, not simulated; give each a device of its own"));
    }
    for fault in faults {
        check_fault(plan, machine, fault, effort).map_err(|(field, why)| Error::spec("faults", field, why))?;
    }
    if let Some(threads) = machine.kernels.threads().filter(|_| plays_threads(plan, machine, faults, effort)) {
        return threads::run(plan, machine, threads, faults, effort);
    }
    if effort.blocks && faults.iter().any(|fault| matches!(fault, Fault::Jitter { .. })) {
        return Err(Error::spec("--fidelity", "fidelity", "a block has no kernels to jitter; simulate op by op"));
    }
    let marks = marks(plan, faults);
    let mut fold =
        if effort.fold { fold::refine_marked(plan, machine.cluster, &marks) } else { fold::trivial(plan.ranks()) };
    let scripts = script::write(plan, machine, &fold, blocks)?;
    times.check()?;
    let census = if effort.shared && any_shared(machine.cluster) {
        Census::take(plan, machine, &fold, &scripts)
    } else {
        Census::default()
    };
    if effort.fold && !census.is_empty() {
        drop(scripts);
        fold = census.refine(plan, machine.cluster, fold, &marks);
        return play(plan, machine, &fold, &script::write(plan, machine, &fold, blocks)?, &census, faults, effort);
    }
    play(plan, machine, &fold, &scripts, &census, faults, effort)
}

/// Whether ranks are played as threads that share cores. They are with a profile of such threads, unless there is a
/// core for each rank and something is asked for that threads do not have: blocks, slack, faults of links, or dead
/// ranks. Then each rank is played as a device of its own, as any other machine's are.
pub fn plays_threads(plan: &Plan, machine: Machine, faults: &[Fault], effort: Effort) -> bool {
    let Some(threads) = machine.kernels.threads() else { return false };
    let beyond = effort.apart || effort.blocks || threads::beyond(faults).is_some();
    !beyond || plan.ranks() > threads.cores
}

/// Number of networks beside each other; 1 where they are not told apart.
fn planes(cluster: &Cluster) -> u32 {
    cluster.spec.scale_out.as_ref().map_or(1, |out| out.planes)
}

/// Checks that there is what a fault is about. Errors: the field of the fault, and why: a rank that the plan has not, a
/// plane that the network has not, or its only one.
pub fn check_fault(
    plan: &Plan,
    machine: Machine,
    fault: &Fault,
    effort: Effort,
) -> std::result::Result<(), (&'static str, String)> {
    fault.check(Some(plan.ranks())).map_err(|why| ("rank", why))?;
    // Threads have no network, and refuse such faults themselves.
    if plays_threads(plan, machine, std::slice::from_ref(fault), effort) {
        return Ok(());
    }
    let (cluster, all) = (machine.cluster, planes(machine.cluster));
    match *fault {
        Fault::DeadPlane { plane, .. } if all < 2 => Err((
            "plane",
            format!(
                "plane {plane}; {} is one network (scale_out.planes of the cluster): leave the fault out, or take a \
                 cluster of several, as alibaba-hpn-15k",
                cluster.spec.name
            ),
        )),
        Fault::DeadPlane { plane, .. } if plane >= all => {
            let why = format!("plane {plane}; {} has planes 0 to {}: take one of them", cluster.spec.name, all - 1);
            Err(("plane", why))
        }
        _ => Ok(()),
    }
}

/// A mark for each rank, by which ranks with faults are told apart from others.
fn marks(plan: &Plan, faults: &[Fault]) -> Vec<u64> {
    let mut marks = vec![0; plan.ranks() as usize];
    for fault in faults {
        if let Some(rank) = fault.rank() {
            let (mark, mut h) = (&mut marks[rank as usize], FxHasher::default());
            let (one, some) = (format!("rank: {rank},"), format!("rank: Some({rank}),"));
            (*mark, format!("{fault:?}").replace(&one, "").replace(&some, "")).hash(&mut h);
            *mark = h.finish();
        }
    }
    marks
}

fn play<'p>(
    plan: &'p Plan,
    machine: Machine<'p>,
    fold: &'p Fold,
    scripts: &'p [Script<'p>],
    census: &Census,
    faults: &[Fault],
    effort: Effort,
) -> Result<Simulated> {
    let planes = fault::of_planes(faults, planes(machine.cluster));
    let health: Vec<_> = fold.representatives.iter().map(|&rank| Health::of(faults, rank, &planes)).collect();
    let ops: usize = scripts.iter().map(|s| s.len() as usize * s.deeds.classes.len()).sum();
    let why = effort.why && ops <= MOST_KEPT;
    let keep = effort.spans || why;
    let played = |until| {
        let jitter = jitter::Jitter::of(faults, effort.seed, &fold.representatives);
        let mut engine = engine::Engine::new(plan, machine, fold, scripts, &health, jitter, keep);
        engine.links = (!census.is_empty()).then(|| Links::new(census, machine, fold, scripts, planes.clone(), keep));
        (engine.watchdog, engine.until) = (effort.watchdog, until);
        engine.run();
        engine
    };
    let mut engine = played(u64::MAX);
    let (mut hang, told) = (Hang::of(&engine), in_time(engine.latest));
    if let Some(hang) = hang.as_ref().filter(|_| faults.is_empty() && told.is_ok()) {
        return Err(hang.deadlock());
    }
    let ends = if told.is_ok() { engine.overdue } else { engine.overdue.min(engine.first_due()) };
    let sooner = |hang: &Hang| told.is_err() || ends < hang.ends(effort.watchdog);
    if ends < Stamp::LIMIT && hang.as_ref().is_none_or(sooner) {
        let over = hang.is_none().then(|| engine.last());
        engine = played(ends);
        hang = Some(Hang::overdue(&engine, over));
    } else {
        told?;
    }
    let why = (why && hang.is_none()).then(|| Why::of(&engine, machine));
    let timeline = account::timeline(&engine, effort.spans);
    let arrows = if effort.spans { std::mem::take(&mut engine.arrows) } else { vec![] };
    let rails = machine.cluster.spec.scale_out.as_ref().is_some_and(|out| out.rails);
    let shared = engine.links.as_ref().map(|links| links.told(engine.now, rails)).unwrap_or_default();
    Ok(Simulated {
        timeline,
        events: engine.events,
        slowed: engine.slowed,
        shared,
        class_of: fold.class_of.clone(),
        arrows,
        hang,
        why,
    })
}
