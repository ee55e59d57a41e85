//! What gaps between the kernels of ranks are charged to, where every op of every rank has a start and an end.

use crate::plan::link::Line;
use crate::plan::matching::{LegAt, Matching};
use crate::plan::{OpKind, Plan};
use crate::timeline::Usage;

/// Start and end of every op of a rank, in s.
pub type Times = [(f64, f64)];

/// When all who take part in an op of a rank had come, s: of every rank and op. Of a kernel or a copy that is its start, as
/// it is of everything where the times of some ranks are not there.
pub fn readiness(plan: &Plan, lines: &[Line], matching: &Matching, times: &[&Times]) -> Vec<Vec<f64>> {
    let all = times.len() == plan.ranks() as usize;
    let of = |(rank, own): (usize, &&Times)| {
        let starts = own.iter().map(|t| t.0).enumerate();
        let ready = |(node, start)| if all { ready(plan, lines, matching, times, (rank as u32, node), start) } else { start };
        starts.map(ready).collect()
    };
    times.iter().enumerate().map(of).collect()
}

fn ready(
    plan: &Plan,
    lines: &[Line],
    matching: &Matching,
    times: &[&Times],
    (rank, node): (u32, usize),
    start: f64,
) -> f64 {
    let own = plan.program_of(rank);
    let spliced = &lines[own as usize].nodes[node];
    let Some(group) = plan.lanes[spliced.lane as usize].group() else { return start };
    let peer_start = |peer: u32, node: Option<u32>| {
        node.and_then(|node| times[peer as usize].get(node as usize)).map_or(start, |times| times.0)
    };
    match &spliced.op.kind {
        OpKind::Transfer { legs, .. } => (0..).zip(legs).fold(start, |latest, (leg, way)| {
            let (peer, at) = (group.neighbour(&plan.views, rank, way.by), LegAt { node: node as u32, leg });
            let met = matching.partner(own, plan.program_of(peer), spliced.lane, way, at);
            latest.max(peer_start(peer, met.map(|met| met.node)))
        }),
        OpKind::Collective { .. } | OpKind::Exchange { .. } => {
            group.members(&plan.views, rank).into_iter().fold(start, |latest, peer| {
                let same = matching.same_collective(own, plan.program_of(peer), spliced.lane, node as u32);
                latest.max(peer_start(peer, same))
            })
        }
        _ => start,
    }
}

/// Charges every gap between the kernels of a rank, and the one behind the last, up to `step`, to what was waited for: the
/// lane of an op while its bytes were under way, other ranks while one that takes part had not come, and what the op had
/// waited for itself where that was still to come. Returns how long the kernels ran.
pub fn charge(plan: &Plan, line: &Line, times: &Times, ready: &[f64], step: f64, usage: &mut Usage) -> f64 {
    let computes = |node: usize| plan.lanes[line.nodes[node].lane as usize].computes();
    let latest = |a: &u32, b: &u32| times[*a as usize].1.total_cmp(&times[*b as usize].1);
    let mut gap = |free: f64, mut until: f64, mut last: Option<u32>| {
        while let Some(node) = last.map(|n| n as usize).filter(|&n| until > free && !computes(n)) {
            let lane = &plan.lanes[line.nodes[node].lane as usize];
            let start = times[node].0.clamp(free, until);
            let went = ready[node].clamp(start, until);
            usage.waited(lane, until - went);
            usage.turns += went - start;
            (until, last) = (start, line.preds(node).iter().copied().max_by(latest));
        }
        usage.turns += (until - free).max(0.0);
    };
    let (mut free, mut busy) = (0.0, 0.0);
    for node in (0..times.len()).filter(|&node| computes(node)) {
        let (start, end) = times[node];
        gap(free, start, line.preds(node).iter().copied().max_by(latest));
        free = end;
        busy += end - start;
    }
    gap(free, step, (0..times.len() as u32).max_by(latest));
    busy
}
