//! Ranks on the threads of one machine, as the CPU executor runs them: each thread has the ranks of a device, posts
//! what they can send, takes what has arrived for them, runs a kernel, and waits when there is nothing to do. So a copy
//! keeps its thread busy, a message is taken between two kernels and not before, and nothing but a throttled link moves
//! bytes on its own.
//!
//! The cores are shared: with k threads busy on c cores everyone is slowed down by what measured neighbours do to
//! each other, and beyond c each has c/k of a core.
//!
//! It goes event by event in any case, so `cost` and `sim` both take it from here.

mod exchange;
mod flight;
mod hub;
mod job;
mod rank;
mod worker;

use crate::act::{Acts, Machine, Sheet, cold_bytes, gaps, sharing};
use crate::collective::forward::Round;
use crate::device::{KernelTime, Threads};
use crate::error::{Cause, Error, Result};
use crate::fold;
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::turns::Turns;
use crate::plan::{ExchangeAlgo, Phase, Plan};
use crate::timeline::{Class, Timeline, Usage, lane_labels};
use crate::units::Seconds;
use hub::Hub;
use job::slowdown;
use rank::Rank;
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::rc::Rc;
pub use worker::Piece;
use worker::{State, Worker};

type Rounds = FxHashMap<(u32, ExchangeAlgo, Phase), Rc<Vec<Round>>>;

/// What all ranks share and nobody changes.
struct Shared<'a> {
    plan: &'a Plan,
    lines: &'a [Line<'a>],
    matching: &'a Matching,
    sheet: &'a Sheet,
    /// Names of the kernels that the sheet counts, by number.
    names: &'a [&'static str],
    turns: &'a Turns,
    threads: &'a Threads,
    kernels: &'a dyn KernelTime,
    /// Bytes of each op's operands that its core's caches no longer have, by program and op.
    cold: Vec<Vec<u64>>,
    /// The thread of each rank.
    devices: Vec<u32>,
    /// The messages of exchanges, by the number of their route.
    rounds: RefCell<Rounds>,
    /// Seconds that a kernel of a rank takes alone on its core, given those of the profile.
    takes: RefCell<Takes<'a>>,
}

/// Given a rank and the seconds that the profile says one of its kernels takes, says how many it takes: more for a rank
/// that is not well.
pub type Takes<'a> = &'a mut dyn FnMut(u32, f64) -> f64;

/// A step that was played.
pub struct Played {
    /// A class for each rank, with the span of every op.
    pub timeline: Timeline,
    /// The pieces of work that each thread did, in order.
    pub pieces: Vec<Vec<Piece>>,
}

impl<'a> Shared<'a> {
    fn line(&self, rank: u32) -> &'a Line<'a> {
        &self.lines[self.plan.program_of(rank) as usize]
    }
}

/// Plays a plan on the threads of one machine. Errors: copies to the host's memory, a plan that deadlocks, an exchange
/// that the profile has not timed.
pub fn play(plan: &Plan, machine: Machine, threads: &Threads, takes: Takes) -> Result<Played> {
    if plan.tensors.iter().any(|t| t.host) {
        let why = "copies to the host's memory are not predicted by the profile of a machine; leave --profile out";
        return Err(Cause::Other.infeasible(why));
    }
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<Line>>>()?;
    let matching = Matching::new(plan, &lines);
    let fold = fold::trivial(plan.ranks());
    let mut acts = Acts::new(plan, machine, &fold);
    let sheet = acts.sheet(&lines, &matching)?;
    let own: Vec<u32> = (0..plan.ranks()).map(|rank| rank % threads.cores.clamp(1, plan.ranks())).collect();
    let devices = machine.devices.map_or(own, |devices| devices.to_vec());
    let cold = cold_bytes(plan, &atoms, &lines, sharing(&devices))?;
    let turns = Turns::new(plan, &lines, &matching, &devices)?;
    let shared = Shared {
        plan,
        lines: &lines,
        matching: &matching,
        sheet: &sheet,
        names: acts.kernel_names(),
        turns: &turns,
        threads,
        kernels: machine.kernels,
        cold,
        devices,
        rounds: RefCell::default(),
        takes: RefCell::new(takes),
    };
    let (ranks, workers) = go(&shared)?;
    let pieces = workers.into_iter().map(|w| w.pieces).collect();
    Ok(Played { timeline: timeline(&shared, &ranks), pieces })
}

/// Lets the threads go on until all are done.
fn go(shared: &Shared) -> Result<(Vec<Rank>, Vec<Worker>)> {
    let mut ranks: Vec<Rank> = (0..shared.plan.ranks()).map(|rank| Rank::new(shared, rank)).collect();
    let mut workers = Worker::all(&shared.devices);
    let devices = shared.devices.iter().max().map_or(0, |d| *d as usize + 1);
    let mut hub = Hub::new(ranks.len(), devices, shared.threads);
    let mut now = 0.0;
    loop {
        for worker in &mut workers {
            while worker.is_free(now) {
                worker.step(shared, &mut ranks, &mut hub, now)?;
            }
        }
        hub.wake(&mut workers, now);
        if workers.iter().all(|w| matches!(w.state, State::Done)) {
            return Ok((ranks, workers));
        }
        now = advance(shared, &mut workers, &hub, now)?;
        for worker in &mut workers {
            worker.complete(shared, &mut ranks, &mut hub, now);
        }
    }
}

/// Moves time on to whatever happens next, and every busy thread with it.
fn advance(shared: &Shared, workers: &mut [Worker], hub: &Hub, now: f64) -> Result<f64> {
    let slow: Vec<f64> = (0..workers.len()).map(|own| slow(shared, workers, own)).collect();
    let next = workers.iter().zip(&slow).filter_map(|(w, slow)| match &w.state {
        State::Busy(_, job) => Some(now + job.left * slow),
        State::Free(at) => Some(at.max(now)),
        _ => None,
    });
    let next = next.chain(hub.next_arrival(now)).fold(f64::INFINITY, f64::min);
    if next == f64::INFINITY {
        let waits = |w: &&Worker| matches!(w.state, State::Waiting(_));
        let waiting = workers.iter().find(waits).map_or(0, |w| w.ranks[0]);
        return Err(Error::plan(format!("deadlock: rank {waiting} waits and nobody is left to bring it anything")));
    }
    for (worker, slow) in workers.iter_mut().zip(slow) {
        if let State::Busy(_, job) = &mut worker.state {
            // What is left of a rounding error is nothing.
            let left = job.left - (next - now) / slow;
            job.left = if left < 1e-12 { 0.0 } else { left };
        }
    }
    Ok(next)
}

/// How many times longer a thread's job takes now.
fn slow(shared: &Shared, workers: &[Worker], own: usize) -> f64 {
    let others: Vec<f64> =
        workers.iter().enumerate().filter(|(i, _)| *i != own).filter_map(|(_, w)| w.crowded()).collect();
    slowdown(workers[own].crowded().unwrap_or(1.0), &others, shared.threads.cores)
}

fn timeline(shared: &Shared, ranks: &[Rank]) -> Timeline {
    let step = ranks.iter().flat_map(|r| r.times.iter().map(|t| t.1)).fold(0.0, f64::max);
    let times: Vec<&gaps::Times> = ranks.iter().map(|r| r.times.as_slice()).collect();
    let gaps = gaps::charge(shared.plan, shared.lines, shared.matching, &times);
    let class = |(r, gaps): (&Rank, Usage)| {
        // What the rank's tallies count, and where its kernels stood still.
        let mut usage = shared.sheet.tallies.usage(r.rank as usize, shared.names, &shared.plan.lanes);
        usage.add(&gaps, 1.0);
        Class { rank: r.rank, multiplicity: 1, usage, spans: gaps::spans(shared.line(r.rank), &r.times) }
    };
    let classes = ranks.iter().zip(gaps).map(class).collect();
    Timeline { step: Seconds::new(step), classes, lanes: lane_labels(shared.plan) }
}
