//! Ranks that wait for ever, or for longer than a watchdog lets them: in which op, and for whom.

use super::engine::Engine;
use super::meeting::Key;
use super::pace::Pace;
use super::run::Run;
use super::script::Script;
use crate::act::{Deed, Way, picoseconds, seconds};
use crate::error::Error;
use crate::plan::{Direction, Lane};
use crate::units::Seconds;
use serde::Serialize;
use std::collections::BTreeMap;

/// Ranks that do the same, and wait for the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Waiting {
    pub rank: u32,
    /// How many ranks there are like it, itself included.
    pub ranks: u32,
    /// Path of the op that it waits in.
    pub path: String,
    pub since_s: f64,
    /// Ranks that have not come, one of each class; empty: the op's bytes never arrive, or the op has never begun.
    pub waits_for: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hang {
    /// When anything moved last, or when a watchdog ends the step, s.
    pub at_s: f64,
    /// Whether a watchdog ends a step that would go on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub overdue: bool,
    /// When the step would be over if nothing ended it, s; `None`: never, or later than can be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_s: Option<f64>,
    /// Ranks that died.
    pub dead: Vec<u32>,
    /// Links that are down for good, or are down when a watchdog ends the step.
    pub down: Vec<Down>,
    /// Who waits, those first who began to wait first.
    pub waiting: Vec<Waiting>,
}

/// A link of a rank that is down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Down {
    pub rank: u32,
    /// Which of its links: inside its node, or between nodes.
    pub link: &'static str,
}

impl Hang {
    pub fn of(engine: &Engine) -> Option<Hang> {
        if engine.runs.iter().all(|run| run.left == 0) {
            return None;
        }
        let rank = |class: usize| engine.fold.representatives[class];
        let runs = || engine.runs.iter().enumerate().filter(|(_, run)| run.left > 0);
        let dead = runs().filter(|(_, run)| run.health.dead <= engine.now).map(|(class, _)| rank(class)).collect();
        let alive = runs().filter(|(_, run)| run.health.dead > engine.now);
        let mut waiting: Vec<Waiting> = alive.filter_map(|(class, run)| waiting(engine, class, run)).collect();
        let never = |link: &Pace| link.speed(engine.now) == 0.0 && link.next(engine.now) == u64::MAX;
        let down = down(engine, never);
        by_time(&mut waiting);
        Some(Hang { at_s: seconds(engine.now).value(), overdue: false, over_s: None, dead, down, waiting })
    }

    /// The hang of an engine that was stopped when an op had taken longer than the watchdog lets it: who waits in ops
    /// that communicate. `over`: when the step would have been over, ps.
    pub fn overdue(engine: &Engine, over: Option<u64>) -> Hang {
        let mut longest: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
        for (class, op) in engine.meetings.parties() {
            if let Some(since) = engine.runs[class as usize].since(op) {
                let of_class = longest.entry(class).or_insert((since, op));
                *of_class = (*of_class).min((since, op));
            }
        }
        let run = |class: &u32| &engine.runs[*class as usize];
        let dead = |class: &u32| run(class).left > 0 && run(class).health.dead <= engine.now;
        let (gone, alive): (Vec<u32>, Vec<u32>) = (0..engine.runs.len() as u32).partition(dead);
        let of = |class: u32| Some(since(engine, class as usize, *longest.get(&class)?));
        let mut waiting: Vec<Waiting> = alive.into_iter().filter_map(of).collect();
        by_time(&mut waiting);
        Hang {
            at_s: seconds(engine.now).value(),
            overdue: true,
            over_s: over.map(|over| seconds(over).value()),
            dead: gone.into_iter().map(|class| engine.fold.representatives[class as usize]).collect(),
            down: down(engine, |link| link.speed(engine.now) == 0.0),
            waiting,
        }
    }

    /// When whoever waited first has waited for `watchdog` ps, in ps.
    pub fn ends(&self, watchdog: u64) -> u64 {
        let first = self.waiting.first().map_or(self.at_s, |w| w.since_s);
        picoseconds(Seconds::new(first)).saturating_add(watchdog)
    }

    /// The error of a plan that hangs on a machine without faults.
    pub fn deadlock(&self) -> Error {
        let said = self.waiting.iter().take(8).map(|w| {
            let for_: Vec<String> = w.waits_for.iter().map(u32::to_string).collect();
            let whom = if for_.is_empty() { "an op before it".into() } else { format!("rank {}", for_.join(", ")) };
            format!("rank {} waits in {} for {whom}", w.rank, w.path)
        });
        let more = self.waiting.len().saturating_sub(8);
        let tail = if more > 0 { format!("; and {more} more classes of ranks") } else { String::new() };
        Error::plan(format!("deadlock: {}{tail}", said.collect::<Vec<_>>().join("; ")))
    }
}

fn by_time(waiting: &mut [Waiting]) {
    waiting.sort_by(|a, b| a.since_s.total_cmp(&b.since_s).then(a.rank.cmp(&b.rank)));
}

/// The links whose speed is as `so` says.
fn down(engine: &Engine, so: impl Fn(&Pace) -> bool) -> Vec<Down> {
    let of = |(class, run): (usize, &Run)| {
        let names = run.health.links.clone().into_iter().zip(["inside nodes", "between nodes"]);
        let rank = engine.fold.representatives[class];
        names.filter(|(link, _)| so(link)).map(|(_, link)| Down { rank, link }).collect::<Vec<_>>()
    };
    engine.runs.iter().enumerate().flat_map(of).collect()
}

/// A class that waits in an op since `start`, ps.
fn since(engine: &Engine, class: usize, (start, op): (u64, u32)) -> Waiting {
    let run = &engine.runs[class];
    let script = &engine.scripts[run.program];
    Waiting {
        rank: engine.fold.representatives[class],
        ranks: engine.fold.multiplicity[class],
        path: script.path(op),
        since_s: seconds(start).value(),
        waits_for: missing(engine, class, run, script, op),
    }
}

/// The op that a class waits in: the first that has begun and not ended, or else the first that has not begun; `None`
/// if all have ended.
fn waiting(engine: &Engine, class: usize, run: &Run) -> Option<Waiting> {
    let script = &engine.scripts[run.program];
    let begun = |op: u32| !missing(engine, class, run, script, op).is_empty();
    let (op, cell) = run.open().find(|&(op, _)| begun(op)).or_else(|| run.open().next())?;
    Some(since(engine, class, (cell.start.ps(), op)))
}

/// Ranks that have not come to the meetings that an op has begun.
fn missing(engine: &Engine, class: usize, run: &Run, script: &Script, op: u32) -> Vec<u32> {
    let (own, rank, lane) = (class as u32, engine.fold.representatives[class], script.lane(op));
    // The classes that are at a meeting already, if this class is one of them.
    let present = |key: Key| engine.meetings.present(&key).filter(|present| present.contains(&own));
    match script.deed(op, run.local) {
        Deed::Skip | Deed::Kernel { .. } | Deed::Aside { .. } => vec![],
        Deed::Legs { first, count, .. } => {
            let Lane::Comm(group, _) = &engine.plan.lanes[lane as usize] else { return vec![] };
            let peer = |(leg, way): (usize, &Way)| {
                present((lane, Some(way.by), way.sender, script.turn(op, leg)))?;
                let by = if way.dir == Direction::Send { way.by as i32 } else { -(way.by as i32) };
                Some(group.neighbour(&engine.plan.views, rank, by))
            };
            // Several legs may wait for one rank.
            let mut whom: Vec<u32> = script.deeds.legs(first, count).iter().enumerate().filter_map(peer).collect();
            whom.sort_unstable();
            whom.dedup();
            whom
        }
        Deed::Whole { at, .. } => {
            let classes = &script.deeds.wholes[at as usize].gang.classes;
            let there = present((lane, None, classes[0], script.turn(op, 0)));
            let absent = |c: &&u32| there.as_ref().is_some_and(|there| !there.contains(c));
            classes.iter().filter(absent).map(|&c| engine.fold.representatives[c as usize]).collect()
        }
    }
}
