//! Where the time of each class went.

use super::engine::Engine;
use super::run::{Kept, Run};
use crate::act::seconds;
use crate::plan::{Lane, Plan};
use crate::timeline::{Class, Span, Timeline, Usage, lane_labels};

pub fn timeline(engine: &Engine, keep: bool) -> Timeline {
    let end = engine.runs.iter().map(|run| run.last().ps()).max().unwrap_or(0);
    let class = |(class, run): (usize, &Run)| Class {
        rank: engine.fold.representatives[class],
        multiplicity: engine.fold.multiplicity[class],
        usage: usage(engine.plan, run, &engine.scripts[run.program].deeds.usages[run.local], end),
        spans: if keep { spans(engine, run) } else { vec![] },
    };
    let classes = engine.runs.iter().enumerate().map(class).collect();
    Timeline { step: seconds(end), classes, lanes: lane_labels(engine.plan) }
}

fn usage(plan: &Plan, run: &Run, counted: &Usage, end: u64) -> Usage {
    let (mut usage, mut waited) = (counted.clone(), run.waited.clone());
    // After its last kernel a rank waits for its own last transfer, and then for the others.
    let own = run.last().ps().max(run.compute_end);
    waited[run.last().lane() as usize] += own - run.compute_end;
    waited[0] += end - own;
    let idle: u64 = waited.iter().sum();
    usage.compute = (end - idle) as f64 * 1e-12;
    usage.host = waited[plan.lanes.len()] as f64 * 1e-12;
    for (lane, &ps) in plan.lanes.iter().zip(&waited) {
        let waited = ps as f64 * 1e-12;
        match lane {
            Lane::Comm(group, _) => *usage.exposed.entry(group.charged_axis()).or_default() += waited,
            Lane::Compute(_) => usage.turns += waited,
        }
    }
    usage
}

fn spans(engine: &Engine, run: &Run) -> Vec<Span> {
    let script = &engine.scripts[run.program];
    let span = |(op, kept): (usize, &Kept)| Span {
        path: script.line.path(op),
        what: script.what(op as u32),
        lane: script.lane(op as u32),
        start: seconds(kept.start),
        end: seconds(kept.end),
    };
    // What never ended is no span.
    run.kept.iter().enumerate().filter(|(_, kept)| kept.end < u64::MAX).map(span).collect()
}
