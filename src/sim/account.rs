//! The account of each class: where its time went.

use super::engine::Engine;
use super::run::{Kept, Run};
use crate::act::waits::OTHERS;
use crate::act::{SCALE_OUT, numbers, seconds};
use crate::plan::Lane;
use crate::timeline::{Class, Span, Timeline, Usage, lane_labels};
use std::collections::BTreeMap;

pub fn timeline(engine: &Engine, keep: bool) -> Timeline {
    let end = engine.last();
    let class = |(class, run): (usize, &Run)| Class {
        rank: engine.fold.representatives[class],
        multiplicity: engine.fold.multiplicity[class],
        usage: usage(engine, run, end),
        spans: if keep { spans(engine, run) } else { vec![] },
    };
    let classes = engine.runs.iter().enumerate().map(class).collect();
    Timeline { step: seconds(end), classes, lanes: lane_labels(engine.plan) }
}

/// How long the compute lane stood still, ps, by the lane it waited for; the CPU is behind the lanes.
fn waits(run: &Run, end: u64) -> Vec<u64> {
    let mut waited = run.waited.clone();
    // After its last kernel a rank waits for its own last transfer, and then for the others.
    run.recent.path(run.last()).charge(&mut waited, run.compute_end);
    waited[OTHERS] += end - run.last().ps().max(run.compute_end);
    waited
}

/// Exposed communication by axis and by the outermost tier that a rank's ops of a lane cross, as in `dp scale_out`: s,
/// mean over the ranks.
pub fn exposed(engine: &Engine) -> BTreeMap<String, f64> {
    let end = engine.last();
    let ranks: u32 = engine.fold.multiplicity.iter().sum();
    let mut all = BTreeMap::new();
    for (run, &like) in engine.runs.iter().zip(&engine.fold.multiplicity) {
        let (script, mut ports) = (&engine.scripts[run.program], vec![0u8; engine.plan.lanes.len()]);
        for (op, lane) in script.distinct_lanes() {
            ports[lane as usize] |= script.deeds.ports(op, run.local);
        }
        let lanes = engine.plan.lanes.iter().zip(&ports);
        for ((lane, &ports), waited) in lanes.zip(waits(run, end)).filter(|(_, waited)| *waited > 0) {
            let name = match lane {
                Lane::Comm(group, _) => Some(format!("{} {}", group.charged_axis().name(), tier_of(ports))),
                Lane::Copy(_) | Lane::Host => Some(lane.label()),
                Lane::Compute(_) => None,
            };
            if let Some(name) = name {
                *all.entry(name).or_default() += waited as f64 * 1e-12 * f64::from(like) / f64::from(ranks);
            }
        }
    }
    all
}

/// The name of the outermost tier that is reached through these ports, a bit each.
pub fn tier_of(ports: u8) -> &'static str {
    match numbers(ports).max() {
        Some(port) if port >= SCALE_OUT => "scale_out",
        Some(_) => "scale_up",
        None => "local",
    }
}

fn usage(engine: &Engine, run: &Run, end: u64) -> Usage {
    let lanes = &engine.plan.lanes;
    let (mut usage, waited) = (engine.scripts[run.program].deeds.usage(run.local, lanes), waits(run, end));
    let idle: u64 = waited.iter().sum();
    usage.compute = (end - idle) as f64 * 1e-12;
    usage.host = waited[lanes.len()] as f64 * 1e-12;
    for (lane, &ps) in lanes.iter().zip(&waited) {
        usage.waited(lane, ps as f64 * 1e-12);
    }
    usage
}

fn spans(engine: &Engine, run: &Run) -> Vec<Span> {
    let script = &engine.scripts[run.program];
    let span = |(op, kept): (usize, &Kept)| Span {
        path: script.path(op as u32),
        what: script.what(op as u32),
        lane: script.lane(op as u32),
        start: seconds(kept.start),
        end: seconds(kept.end),
    };
    // An op that never ended has no span.
    run.kept.iter().enumerate().filter(|(_, kept)| kept.end < u64::MAX).map(span).collect()
}
