//! Who waits for ever, in which op, and whom for.

use super::engine::Engine;
use super::meeting::Key;
use super::pace::Pace;
use super::run::Run;
use super::script::Script;
use crate::act::{Deed, Way, seconds};
use crate::error::Error;
use crate::plan::{Direction, Lane};
use serde::Serialize;

/// Ranks that do the same and wait for the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Waiting {
    pub rank: u32,
    /// How many ranks are like it.
    pub ranks: u32,
    /// The op.
    pub path: String,
    pub since_s: f64,
    /// Ranks that have not come, one of each class; none: the op's bytes never arrive, or it has never begun.
    pub waits_for: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Hang {
    /// When anything moved last.
    pub at_s: f64,
    /// Ranks that died.
    pub dead: Vec<u32>,
    /// Links that are down and stay so.
    pub down: Vec<Down>,
    /// By time, the first to wait first.
    pub waiting: Vec<Waiting>,
}

/// A link of a rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Down {
    pub rank: u32,
    /// Inside its node or between nodes.
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
        let of = |(class, run): (usize, &Run)| {
            let names = run.health.links.clone().into_iter().zip(["inside nodes", "between nodes"]);
            names.filter(|(link, _)| never(link)).map(|(_, link)| Down { rank: rank(class), link }).collect::<Vec<_>>()
        };
        let down = engine.runs.iter().enumerate().flat_map(of).collect();
        waiting.sort_by(|a, b| a.since_s.total_cmp(&b.since_s).then(a.rank.cmp(&b.rank)));
        Some(Hang { at_s: seconds(engine.now).value(), dead, down, waiting })
    }

    /// What is wrong with a plan that hangs on a machine that is well.
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

/// What a class waits in: the first op that has begun and not ended, or else the first that has not begun.
fn waiting(engine: &Engine, class: usize, run: &Run) -> Option<Waiting> {
    let script = &engine.scripts[run.program];
    let begun = |op: u32| !missing(engine, class, run, script, op).is_empty();
    let (op, cell) = run.open().find(|&(op, _)| begun(op)).or_else(|| run.open().next())?;
    Some(Waiting {
        rank: engine.fold.representatives[class],
        ranks: engine.fold.multiplicity[class],
        path: script.path(op),
        since_s: seconds(cell.start.ps()).value(),
        waits_for: missing(engine, class, run, script, op),
    })
}

/// Ranks that have not come to what an op has begun.
fn missing(engine: &Engine, class: usize, run: &Run, script: &Script, op: u32) -> Vec<u32> {
    let (own, rank, lane) = (class as u32, engine.fold.representatives[class], script.lane(op));
    // Those who are there already, if this class is one of them.
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
            // Several legs may wait for one.
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
