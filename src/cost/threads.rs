//! Ranks that are threads of one machine, as the CPU executor runs them: each thread posts what it can send, takes
//! what has arrived, runs a kernel, and sleeps when there is nothing to do. So a copy keeps its thread, a message is
//! taken between two kernels and not before, and nothing but a throttled link moves bytes on its own.
//!
//! The cores are shared: with k threads busy on c cores everyone is slowed down by what measured neighbours do to
//! each other, and beyond c each has c/k of a core. Ranks that share a device take turns at it besides.

mod exchange;
mod flight;
mod hub;
mod job;
mod rank;

use crate::act::{Acts, Machine, Sheet};
use crate::collective::forward::Round;
use crate::device::Threads;
use crate::error::{Error, Result};
use crate::fold;
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::turns::Turns;
use crate::plan::{ExchangeAlgo, OpKind, Phase, Plan};
use crate::timeline::{Class, Span, Timeline, Usage, lane_labels};
use crate::units::Seconds;
use hub::Hub;
use job::slowdown;
use rank::{Rank, State};
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::rc::Rc;

type Rounds = FxHashMap<(u32, ExchangeAlgo, Phase), Rc<Vec<Round>>>;

/// What all ranks share and nobody changes.
struct Shared<'a> {
    plan: &'a Plan,
    lines: &'a [Line<'a>],
    matching: &'a Matching,
    sheet: &'a Sheet,
    turns: &'a Turns,
    threads: &'a Threads,
    devices: usize,
    /// The messages of exchanges, by the number of their route.
    rounds: RefCell<Rounds>,
}

impl<'a> Shared<'a> {
    fn line(&self, rank: u32) -> &'a Line<'a> {
        &self.lines[self.plan.program_of(rank) as usize]
    }
}

/// Costs a plan on the threads of one machine.
pub fn run(plan: &Plan, machine: Machine, threads: &Threads) -> Result<Timeline> {
    if plan.tensors.iter().any(|t| t.host) {
        let why = "copies to the host's memory are not predicted by the profile of a machine; leave --profile out";
        return Err(Error::infeasible(why));
    }
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<Line>>>()?;
    let matching = Matching::new(plan, &lines);
    let fold = fold::trivial(plan.ranks());
    let sheet = Acts::new(plan, machine, &fold).sheet(&lines, &matching)?;
    let own: Vec<u32> = (0..plan.ranks()).map(|rank| rank % threads.cores.clamp(1, plan.ranks())).collect();
    let turns = Turns::new(plan, &lines, &matching, machine.devices.unwrap_or(&own))?;
    let devices = machine.devices.unwrap_or(&own).iter().max().map_or(0, |d| *d as usize + 1);
    let shared = Shared {
        plan,
        lines: &lines,
        matching: &matching,
        sheet: &sheet,
        turns: &turns,
        threads,
        devices,
        rounds: RefCell::default(),
    };
    let ranks = play(&shared)?;
    Ok(timeline(&shared, &ranks))
}

/// Lets the ranks go on until all are done.
fn play(shared: &Shared) -> Result<Vec<Rank>> {
    let mut ranks: Vec<Rank> = (0..shared.plan.ranks()).map(|rank| Rank::new(shared, rank)).collect();
    let mut hub = Hub::new(ranks.len(), shared.devices, shared.threads);
    let mut now = 0.0;
    loop {
        for rank in &mut ranks {
            while rank.is_free(now) {
                rank.step(shared, &mut hub, now)?;
            }
        }
        hub.wake(&mut ranks, now);
        if ranks.iter().all(|r| matches!(r.state, State::Done)) {
            return Ok(ranks);
        }
        now = advance(shared, &mut ranks, &hub, now)?;
        for rank in &mut ranks {
            rank.complete(shared, &mut hub, now);
        }
    }
}

/// Moves time on to whatever happens next, and every busy thread with it.
fn advance(shared: &Shared, ranks: &mut [Rank], hub: &Hub, now: f64) -> Result<f64> {
    let busy = ranks.iter().filter(|r| matches!(r.state, State::Busy(_))).count();
    let slow = |crowded: f64| slowdown(busy, shared.threads.cores, crowded);
    let next = ranks.iter().filter_map(|r| match &r.state {
        State::Busy(job) => Some(now + job.left * slow(job.crowded)),
        State::Free(at) => Some(at.max(now)),
        _ => None,
    });
    let next = next.chain(hub.next_arrival(now)).fold(f64::INFINITY, f64::min);
    if next == f64::INFINITY {
        let waiting = ranks.iter().find(|r| matches!(r.state, State::Waiting)).map_or(0, |r| r.rank);
        return Err(Error::plan(format!("deadlock: rank {waiting} waits and nobody is left to bring it anything")));
    }
    for rank in ranks {
        if let State::Busy(job) = &mut rank.state {
            // What is left of a rounding error is nothing.
            let left = job.left - (next - now) / slow(job.crowded);
            job.left = if left < 1e-12 { 0.0 } else { left };
        }
    }
    Ok(next)
}

fn timeline(shared: &Shared, ranks: &[Rank]) -> Timeline {
    let step = ranks.iter().flat_map(|r| r.times.iter().map(|t| t.1)).fold(0.0, f64::max);
    let class = |r: &Rank| Class {
        rank: r.rank,
        multiplicity: 1,
        usage: usage(shared, r, step),
        spans: spans(shared.line(r.rank), &r.times),
    };
    Timeline { step: Seconds::new(step), classes: ranks.iter().map(class).collect(), lanes: lane_labels(shared.plan) }
}

fn spans(line: &Line, times: &[(f64, f64)]) -> Vec<Span> {
    let what = |node: usize| match &line.nodes[node].op.kind {
        OpKind::Compute { kernel, .. } => kernel.name(),
        OpKind::Collective { kind, .. } => kind.name(),
        OpKind::Exchange { phase, .. } => phase.name(),
        _ => "transfer",
    };
    let span = |(i, t): (usize, &(f64, f64))| Span {
        path: line.path(i),
        what: what(i),
        lane: line.nodes[i].lane,
        start: Seconds::new(t.0),
        end: Seconds::new(t.1),
    };
    times.iter().enumerate().map(span).collect()
}

/// What a rank did, and where its kernels stood still: a gap is charged to what ended last before it.
fn usage(shared: &Shared, rank: &Rank, step: f64) -> Usage {
    let (line, times) = (shared.line(rank.rank), &rank.times);
    let mut usage = shared.sheet.usages[rank.rank as usize].clone();
    let mut wait = |lane: u16, time: f64| usage.waited(&shared.plan.lanes[lane as usize], time);
    let last = |nodes: &mut dyn Iterator<Item = u32>| {
        let last = nodes.max_by(|a, b| times[*a as usize].1.total_cmp(&times[*b as usize].1));
        last.map_or(0, |n| line.nodes[n as usize].lane)
    };
    let (mut free, mut busy) = (0.0, 0.0);
    let kernels = (0..line.nodes.len()).filter(|&i| matches!(line.nodes[i].op.kind, OpKind::Compute { .. }));
    for i in kernels {
        wait(last(&mut line.preds(i).iter().copied()), times[i].0 - free);
        free = times[i].1;
        busy += times[i].1 - times[i].0;
    }
    wait(last(&mut (0..times.len() as u32)), step - free);
    usage.compute = busy;
    usage
}
