//! What gaps between the kernels of ranks are charged to, where every op of every rank has a start and an end.

use crate::plan::link::Line;
use crate::plan::matching::{LegAt, Matching};
use crate::plan::{Leg, OpKind, Plan};
use crate::timeline::Usage;

/// Start and end of every op of a rank, in s.
pub type Times = [(f64, f64)];

/// When all who take part in an op had come, s, and the lane of what the last of them had waited for; between stages of a
/// pipeline the compute lane, as their wait is the bubble.
pub type Ready = (f64, u16);

/// Of every rank and op who came last. Of a kernel or a copy that is the rank itself, as it is of everything where the times
/// of some ranks are not there.
pub fn readiness(plan: &Plan, lines: &[Line], matching: &Matching, times: &[&Times]) -> Vec<Vec<Ready>> {
    let all = times.len() == plan.ranks() as usize;
    let of = |(rank, own): (usize, &&Times)| {
        let ready = |node| {
            let (rank, node) = match all {
                true => last_to_come(plan, lines, matching, times, (rank as u32, node)),
                false => (rank as u32, node),
            };
            let line = &lines[plan.program_of(rank) as usize];
            let lane = match plan.lanes[line.nodes[node].lane as usize].joins_stages() {
                true => 0,
                false => last_of(times[rank as usize], line.preds(node)).map_or(0, |n| line.nodes[n].lane),
            };
            (times[rank as usize][node].0, lane)
        };
        (0..own.len()).map(ready).collect()
    };
    times.iter().enumerate().map(of).collect()
}

/// Of some ops of a rank the one that ended last.
fn last_of(times: &Times, nodes: &[u32]) -> Option<usize> {
    nodes.iter().map(|&n| n as usize).max_by(|&a, &b| times[a].1.total_cmp(&times[b].1))
}

/// The rank that took part in an op last, and which of its ops that is.
fn last_to_come(
    plan: &Plan,
    lines: &[Line],
    matching: &Matching,
    times: &[&Times],
    (rank, node): (u32, usize),
) -> (u32, usize) {
    let own = plan.program_of(rank);
    let spliced = &lines[own as usize].nodes[node];
    let Some(group) = plan.lanes[spliced.lane as usize].group() else { return (rank, node) };
    let peers: Vec<(u32, Option<u32>)> = match &spliced.op.kind {
        OpKind::Transfer { legs, .. } => {
            let met = |(leg, way): (u16, &Leg)| {
                let (peer, at) = (group.neighbour(&plan.views, rank, way.by), LegAt { node: node as u32, leg });
                let met = matching.partner(own, plan.program_of(peer), spliced.lane, way, at);
                (peer, met.map(|met| met.node))
            };
            (0..).zip(legs).map(met).collect()
        }
        OpKind::Collective { .. } | OpKind::Exchange { .. } => {
            let same = |peer| matching.same_collective(own, plan.program_of(peer), spliced.lane, node as u32);
            group.members(&plan.views, rank).into_iter().map(|peer| (peer, same(peer))).collect()
        }
        _ => vec![],
    };
    let there = |(peer, node): (u32, Option<u32>)| Some((peer, node? as usize));
    let all = peers.into_iter().filter_map(there).filter(|&(peer, node)| node < times[peer as usize].len());
    all.fold((rank, node), |last, next| {
        let start = |(rank, node): (u32, usize)| times[rank as usize][node].0;
        if start(next) > start(last) { next } else { last }
    })
}

/// Charges every gap between the kernels of a rank, and the one behind the last, up to `step`, to what was waited for: the
/// lane of an op while its bytes were under way, what the last of those who take part had waited for while he had not come,
/// and what the op had waited for itself where that was still to come. Returns how long the kernels ran.
pub fn charge(plan: &Plan, line: &Line, times: &Times, ready: &[Ready], step: f64, usage: &mut Usage) -> f64 {
    let computes = |node: usize| plan.lanes[line.nodes[node].lane as usize].computes();
    let mut gap = |free: f64, mut until: f64, mut last: Option<usize>| {
        while let Some(node) = last.filter(|&n| until > free && !computes(n)) {
            let start = times[node].0.clamp(free, until);
            let went = ready[node].0.clamp(start, until);
            usage.waited(&plan.lanes[line.nodes[node].lane as usize], until - went);
            usage.waited(&plan.lanes[ready[node].1 as usize], went - start);
            (until, last) = (start, last_of(times, line.preds(node)));
        }
        usage.turns += (until - free).max(0.0);
    };
    let (mut free, mut busy) = (0.0, 0.0);
    for node in (0..times.len()).filter(|&node| computes(node)) {
        let (start, end) = times[node];
        gap(free, start, last_of(times, line.preds(node)));
        free = end;
        busy += end - start;
    }
    let all: Vec<u32> = (0..times.len() as u32).collect();
    gap(free, step, last_of(times, &all));
    busy
}
