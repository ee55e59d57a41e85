//! An order in which every op of every rank can start: proof that nobody waits in a circle.
//!
//! A communicating op has two moments. It *starts* when its local edges hold; it *ends* when everyone it
//! meets has started too. So the end of a receive hangs on the start, not the end, of a send.

use super::link::Line;
use super::matching::{LegAt, Matching, group_sizes};
use super::op::*;
use super::program::Plan;
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A moment of an op on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    pub node: u32,
    pub rank: u32,
    pub end: bool,
}

/// The ranks and ops that `node` of `rank` meets: partners of its legs, members of its collective.
pub fn meets(plan: &Plan, lines: &[Line], matching: &Matching, rank: u32, node: u32) -> Vec<(u32, u32)> {
    let own = plan.program_of(rank);
    let n = &lines[own as usize].nodes[node as usize];
    let Lane::Comm(group, _) = &plan.lanes[n.lane as usize] else { return vec![] };
    match &n.op.kind {
        OpKind::Transfer { legs, .. } => legs
            .iter()
            .enumerate()
            .filter_map(|(l, leg)| {
                let peer = group.neighbour(&plan.views, rank, leg.by);
                let at = LegAt { node, leg: l as u16 };
                matching.partner(own, plan.program_of(peer), n.lane, leg, at).map(|met| (peer, met.node))
            })
            .collect(),
        OpKind::Collective { .. } | OpKind::Exchange { .. } => group
            .members(&plan.views, rank)
            .into_iter()
            .filter(|&m| m != rank)
            .filter_map(|m| matching.same_collective(own, plan.program_of(m), n.lane, node).map(|node| (m, node)))
            .collect(),
        _ => vec![],
    }
}

/// Whether every op meets only itself on other ranks, judged by the ops as written: all ranks run one
/// program, and each transfer receives what it sends.
pub fn meets_itself(plan: &Plan) -> bool {
    let sizes = group_sizes(plan);
    plan.programs.len() == 1 && plan.ops().all(|(_, op)| receives_what_it_sends(op, &sizes))
}

pub fn receives_what_it_sends(op: &Op, group_sizes: &[u32]) -> bool {
    let (OpKind::Transfer { legs, .. }, Some(lane)) = (&op.kind, op.lane) else { return true };
    let size = group_sizes[lane as usize] as i32;
    let distances = |dir: Direction| {
        let mut all: Vec<i32> = legs
            .iter()
            .filter(|leg| leg.dir == dir)
            .map(|leg| if dir == Direction::Send { leg.by } else { leg.by.wrapping_neg() }.rem_euclid(size))
            .collect();
        all.sort_unstable();
        all
    };
    distances(Direction::Send) == distances(Direction::Recv)
}

/// Whether every meeting is between one op of one program and itself: then program order is an order for all ranks at
/// once, and there is nothing to search.
pub fn in_step(plan: &Plan, lines: &[Line], matching: &Matching) -> bool {
    plan.programs.len() == 1
        && (0..lines[0].nodes.len() as u32)
            .all(|node| meets(plan, lines, matching, 0, node).iter().all(|m| m.1 == node))
}

/// An order of all starts and ends. Errors: the ranks and ops that wait for each other in a circle.
pub fn of_all_ranks(plan: &Plan, lines: &[Line], matching: &Matching) -> Result<Vec<Moment>> {
    if in_step(plan, lines, matching) {
        return Ok(vec![]);
    }
    of_ranks(plan, lines, matching, &(0..plan.ranks()).collect::<Vec<u32>>())
}

/// [`of_all_ranks`] for some ranks, which must meet only each other. Errors: those of [`of_all_ranks`].
pub fn of_ranks(plan: &Plan, lines: &[Line], matching: &Matching, ranks: &[u32]) -> Result<Vec<Moment>> {
    let line = |rank: u32| &lines[plan.program_of(rank) as usize];
    let nodes: Vec<usize> = ranks.iter().map(|&r| line(r).nodes.len()).collect();
    let index = |rank: u32| ranks.binary_search(&rank).expect("ranks meet only each other");
    // Moment -> moments that wait for it; counts of what each moment still waits for.
    let mut next: Vec<Vec<Vec<Moment>>> = nodes.iter().map(|&n| vec![vec![]; 2 * n]).collect();
    let mut open: Vec<Vec<u32>> = nodes.iter().map(|&n| vec![0; 2 * n]).collect();
    let slot = |m: &Moment| 2 * m.node as usize + usize::from(m.end);
    for (r, &rank) in ranks.iter().enumerate() {
        for node in 0..nodes[r] as u32 {
            let (start, end) = (Moment { node, rank, end: false }, Moment { node, rank, end: true });
            let mut edge = |from: Moment, to: Moment| {
                next[index(from.rank)][slot(&from)].push(to);
                open[r][slot(&to)] += 1;
            };
            for &pred in line(rank).preds(node as usize) {
                edge(Moment { node: pred, rank, end: true }, start);
            }
            edge(start, end);
            for (peer, met) in meets(plan, lines, matching, rank, node) {
                edge(Moment { node: met, rank: peer, end: false }, end);
            }
        }
    }
    let mut ready: BinaryHeap<Reverse<Moment>> = BinaryHeap::new();
    for (r, &rank) in ranks.iter().enumerate() {
        let free = (0..nodes[r]).filter(|&n| open[r][2 * n] == 0);
        ready.extend(free.map(|n| Reverse(Moment { node: n as u32, rank, end: false })));
    }
    let mut order = Vec::with_capacity(2 * nodes.iter().sum::<usize>());
    while let Some(Reverse(m)) = ready.pop() {
        order.push(m);
        for &then in &next[index(m.rank)][slot(&m)] {
            let left = &mut open[index(then.rank)][slot(&then)];
            *left -= 1;
            if *left == 0 {
                ready.push(Reverse(then));
            }
        }
    }
    if order.len() == 2 * nodes.iter().sum::<usize>() {
        return Ok(order);
    }
    Err(deadlock(plan, lines, matching, ranks, &open))
}

/// Ranks that a deadlock names, and ops of a circle, at most.
const NAMED: usize = 32;

/// Names each waiting rank, the first op it cannot finish and what that op waits for, and a circle of ops that wait for
/// each other.
fn deadlock(plan: &Plan, lines: &[Line], matching: &Matching, ranks: &[u32], open: &[Vec<u32>]) -> Error {
    let mut said = VecDeque::new();
    for (r, &rank) in ranks.iter().enumerate() {
        let line = &lines[plan.program_of(rank) as usize];
        let Some(node) = (0..line.nodes.len()).find(|&n| open[r][2 * n + 1] > 0) else { continue };
        let peers: Vec<String> =
            meets(plan, lines, matching, rank, node as u32).iter().map(|m| m.0.to_string()).collect();
        let what = if peers.is_empty() { "an op before it".into() } else { format!("rank {}", peers.join(", ")) };
        said.push_back(format!("rank {rank} waits in {} for {what}", line.path(node)));
    }
    let more = said.len().saturating_sub(NAMED);
    said.truncate(NAMED);
    let tail = if more > 0 { format!("; and {more} more ranks") } else { String::new() };
    let said = said.into_iter().collect::<Vec<_>>().join("; ");
    Error::plan(format!("deadlock: {said}{tail}{}", circle(plan, lines, matching, ranks, open)))
}

/// Goes back from an op that cannot go on to what it waits for, until it comes to one that it has seen.
fn circle(plan: &Plan, lines: &[Line], matching: &Matching, ranks: &[u32], open: &[Vec<u32>]) -> String {
    let line = |rank: u32| &lines[plan.program_of(rank) as usize];
    let stuck = |m: &Moment| {
        let of = &open[ranks.binary_search(&m.rank).expect("ranks meet only each other")];
        // A moment that waits for one that never comes never comes either: all of them are still open.
        of[2 * m.node as usize + usize::from(m.end)] > 0
    };
    let before = |m: &Moment| -> Option<Moment> {
        let start = Moment { end: false, ..*m };
        if !m.end {
            let ends = line(m.rank).preds(m.node as usize).iter();
            return ends.map(|&node| Moment { node, rank: m.rank, end: true }).find(stuck);
        }
        let met = meets(plan, lines, matching, m.rank, m.node).into_iter();
        let mut all = met.map(|(rank, node)| Moment { node, rank, end: false }).chain([start]);
        all.find(stuck)
    };
    let first = (0..).zip(open).find_map(|(r, of): (usize, _)| {
        let at = of.iter().position(|&n| n > 0)?;
        Some(Moment { node: at as u32 / 2, rank: ranks[r], end: at % 2 == 1 })
    });
    let mut way: Vec<Moment> = first.into_iter().collect();
    while let Some(next) = way.last().and_then(before) {
        if let Some(at) = way.iter().position(|m| *m == next) {
            way.drain(..at);
            break;
        }
        way.push(next);
    }
    let mut ops: Vec<(u32, u32)> = way.iter().map(|m| (m.rank, m.node)).collect();
    ops.dedup();
    if ops.len() > 1 && ops.first() == ops.last() {
        ops.pop();
    }
    let name = |&(rank, node): &(u32, u32)| format!("rank {rank}'s {}", line(rank).path(node as usize));
    let mut names: Vec<String> = ops.iter().take(NAMED).map(name).collect();
    names.extend((ops.len() > NAMED).then(|| format!("{} more", ops.len() - NAMED)));
    names.extend(ops.first().map(name));
    format!(". In a circle, each waits for the next: {}", names.join(", "))
}
