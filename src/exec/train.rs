//! Steps one after the other: what is the same in all of them is made once, and memory goes from step to step.

use super::arena::Arena;
use super::attention_io::Tensors;
use super::inject::{Fault, Injection};
use super::kernels::Scalar;
use super::rank::Done;
use super::shared::{Rounds, Shared, rounds};
use super::source::Source;
use super::spares::Spares;
use super::state::{Arenas, Memory};
use super::transport::{Hub, few};
use super::turns::Turns;
use super::worker::{self, End, Ended};
use super::{Job, Options, Run, inputs, memory, outputs};
use crate::error::{Cause, Error, Result};
use crate::plan::Plan;
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::{Layout, Life, lives};
use std::sync::{Barrier, Mutex, OnceLock};

/// More ranks than this are refused.
const MOST_RANKS: u32 = 512;

/// What follows from the plan alone, by program.
pub(super) struct Fixed<'p> {
    lines: Vec<Line<'p>>,
    layouts: Vec<Layout>,
    matching: Matching,
    /// The ops that wait for each op, by program.
    next: Vec<Vec<Vec<u32>>>,
    lives: Vec<Vec<Vec<Vec<Life>>>>,
    turns: Turns,
    rounds: Rounds,
    hash: String,
    /// Memory of delivered messages, which goes from step to step like the ranks' own.
    spares: Spares,
}

impl<'p> Fixed<'p> {
    pub(super) fn new(plan: &'p Plan, atoms: &AtomTable, options: &Options) -> Result<Fixed<'p>> {
        let (ranks, devices) = (plan.ranks(), &options.devices);
        if ranks > MOST_RANKS || devices.len() != ranks as usize {
            let why = format!("{ranks} ranks on {} devices; at most {MOST_RANKS} ranks run here", devices.len());
            return Err(Error::device("run", why));
        }
        if plan.routes.iter().any(|route| !route.is_listed()) {
            let why = "it says how many rows go where and not which; to run it give --routing uniform, or another \
                       that is drawn or read";
            return Err(Cause::Routing.infeasible(why));
        }
        options.inject.map_or(Ok(()), |inject| inject.check(plan))?;
        let programs = 0..plan.programs.len() as u32;
        let lines = programs.clone().map(|p| Line::program(plan, atoms, p)).collect::<Result<Vec<_>>>()?;
        let layouts = programs.map(|p| Layout::new(plan, atoms, p)).collect::<Result<Vec<_>>>()?;
        memory::fits(plan, &layouts)?;
        let matching = Matching::new(plan, &lines);
        let turns = Turns::new(plan, &lines, &matching, devices)?;
        let next = lines.iter().map(successors).collect();
        let lives = lines.iter().map(|l| lives(plan, l)).collect();
        let (hash, rounds) = (plan.hash(), rounds(plan, &lines));
        Ok(Fixed { hash, rounds, lines, layouts, matching, next, lives, turns, spares: Spares::default() })
    }
}

impl<'p> Fixed<'p> {
    /// The memory of every rank, with its weights in it.
    pub(super) fn arenas(&'p self, plan: &'p Plan, atoms: &AtomTable, source: &Source) -> Vec<Arena<'p>> {
        let filled = |rank| {
            let mut arena = Arena::new(plan, &self.layouts[plan.program_of(rank) as usize]);
            inputs::fill(plan, atoms, rank, source, &mut arena);
            arena
        };
        (0..plan.ranks()).map(filled).collect()
    }
}

/// Runs all steps of a job and hands each over as it is done.
pub(super) fn run<T: Scalar>(
    plan: &Plan,
    options: &Options,
    job: &Job,
    each: &mut dyn FnMut(u64, Run) -> Result<()>,
) -> Result<()> {
    let atoms = AtomTable::new(plan)?;
    let fixed = Fixed::new(plan, &atoms, options)?;
    let given = inputs::shared(plan, job.source.seed);
    let mut arenas = fixed.arenas(plan, &atoms, job.source);
    let last = *job.numbers().end();
    watched(plan, &atoms, &fixed, &mut arenas, |memory| job.watch.map_or(Ok(()), |watch| watch.begin(memory)))?;
    for step in job.numbers() {
        let logits = job.keep_last && step == last;
        let keep = Keep { all: options.keep || logits, logits, weights: false };
        let options = Options { inject: options.inject.filter(|_| step == last), ..options.clone() };
        let outcome = one_step::<T>(plan, &atoms, &fixed, &options, (job.source, step, keep), &given, arenas)?;
        arenas = outcome.1;
        each(step, outcome.0)?;
        let see = |memory: &mut Memory| job.watch.map_or(Ok(()), |watch| watch.after(step, memory));
        watched(plan, &atoms, &fixed, &mut arenas, see)?;
    }
    Ok(())
}

/// Shows the ranks' memories to somebody.
fn watched<'p>(
    plan: &'p Plan,
    atoms: &'p AtomTable,
    fixed: &Fixed,
    arenas: &mut [Arena<'p>],
    see: impl FnOnce(&mut Memory) -> Result<()>,
) -> Result<()> {
    see(&mut Memory { plan, atoms, hash: &fixed.hash, held: &mut Arenas(arenas) })
}

/// What is kept of a step.
#[derive(Clone, Copy)]
pub(super) struct Keep {
    pub all: bool,
    pub logits: bool,
    /// The new weights, even where nothing else is kept.
    pub weights: bool,
}

/// A step on the memory that the one before has left.
pub(super) fn one_step<'p, T: Scalar>(
    plan: &'p Plan,
    atoms: &'p AtomTable,
    fixed: &'p Fixed<'p>,
    options: &Options,
    (source, step, keep): (&Source, u64, Keep),
    given: &Tensors,
    mut arenas: Vec<Arena<'p>>,
) -> Result<(Run, Vec<Arena<'p>>)> {
    for (rank, arena) in (0..).zip(&mut arenas) {
        inputs::feed(plan, atoms, rank, (source, step), given, arena);
    }
    let hub = Hub::new(&options.devices, options.throttle);
    if let Some(Injection { fault: Fault::LostMessage, rank }) = options.inject {
        hub.lose_one(rank);
    }
    let shared = Shared {
        plan,
        lines: &fixed.lines,
        matching: &fixed.matching,
        next: &fixed.next,
        lives: &fixed.lives,
        turns: &fixed.turns,
        hub,
        step,
        spares: &fixed.spares,
        zero: OnceLock::new(),
        watched: if keep.all { outputs::watched(plan) } else { vec![] },
        kept: outputs::kept(plan, keep.all || keep.weights),
        poison: keep.all,
        logits: keep.logits,
        inject: options.inject,
        beside: options.beside.clone(),
        hash: &fixed.hash,
        rounds: &fixed.rounds,
        atoms,
    };
    let (done, arenas): (Vec<Done>, Vec<Arena>) =
        all_ranks::<T>(&shared, &options.devices, arenas)?.into_iter().unzip();
    let mut run = outputs::gather(plan, &fixed.lines, &shared.hub, done)?;
    if !keep.all {
        // The sums of gradients over the ranks were not looked at.
        run.grads.clear();
    }
    Ok((run, arenas))
}

/// A thread a device, until all have ended.
fn all_ranks<'p, T: Scalar>(shared: &Shared<'p>, devices: &[u32], arenas: Vec<Arena<'p>>) -> Result<Vec<Ended<'p>>> {
    let mut crews: Vec<Vec<(u32, Arena)>> = vec![];
    crews.resize_with(devices.iter().max().map_or(0, |d| *d as usize + 1), Vec::new);
    for ((rank, arena), device) in (0..).zip(arenas).zip(devices) {
        crews[*device as usize].push((rank, arena));
    }
    let crews: Vec<(u32, Vec<(u32, Arena)>)> = (0..).zip(crews).filter(|(_, crew)| !crew.is_empty()).collect();
    let (all_here, ends) = (Barrier::new(crews.len()), Mutex::new(vec![]));
    std::thread::scope(|scope| {
        for (number, crew) in crews {
            let (all_here, ends) = (&all_here, &ends);
            scope.spawn(move || {
                let done = worker::run::<T>(shared, number, crew, all_here);
                ends.lock().unwrap_or_else(|p| p.into_inner()).extend(done);
            });
        }
    });
    let mut ends = ends.into_inner().unwrap_or_else(|p| p.into_inner());
    ends.sort_by_key(|(rank, _)| *rank);
    all_done(&shared.hub, ends.into_iter().map(|(_, end)| end).collect())
}

/// What every rank brought, or why they stopped and who was waiting for what.
fn all_done<'p>(hub: &Hub, ends: Vec<End<'p>>) -> Result<Vec<Ended<'p>>> {
    let (mut done, mut waiting) = (vec![], vec![]);
    for end in ends {
        match end {
            End::Done(ended) => done.push(*ended),
            End::Stopped(what) => waiting.extend(what),
        }
    }
    let Some(why) = hub.stopped() else { return Ok(done) };
    // A deadlock already names everyone.
    let tail =
        if why.contains("deadlock") || waiting.is_empty() { String::new() } else { format!("; then {}", few(waiting)) };
    Err(Error::device("run", why + &tail))
}

/// The ops that wait for each op of a line.
fn successors(line: &Line) -> Vec<Vec<u32>> {
    let mut next = vec![vec![]; line.nodes.len()];
    for node in 0..line.nodes.len() {
        for &pred in line.preds(node) {
            next[pred as usize].push(node as u32);
        }
    }
    next
}
