//! Two all-to-all, one after the other: over the nodes to the same place, then within the node. Nothing is
//! deduplicated; messages are as many times longer as a node has ranks.

use super::{Estimate, Hop, RankTime, Setting, Traffic, Via, nccl, nccl_all_to_all, same_place};
use crate::plan::CollectiveKind;
use crate::plan::route::{Route, Rows};
use crate::units::Bytes;

fn copies_to_node(route: &Route, src: u32, node: u32) -> Rows {
    let first = node * route.node;
    (first..first + route.node).map(|dst| route.copies_to_rank(src, dst)).sum()
}

pub fn hops(route: &Route, rank: u32) -> Vec<Hop> {
    if route.nodes() == 1 {
        return nccl_all_to_all::hops(route, rank);
    }
    let over = (0..route.nodes()).map(|node| {
        let to = same_place(route, rank, node);
        Hop { stage: 0, via: Via::Network, from: rank, to, rows: copies_to_node(route, rank, node) }
    });
    let own = route.node_of(rank) * route.node;
    let within = (own..own + route.node).map(|to| {
        let rows = (0..route.nodes()).map(|node| route.copies_to_rank(same_place(route, rank, node), to)).sum();
        Hop { stage: 1, via: Via::Links, from: rank, to, rows }
    });
    over.chain(within).collect()
}

/// The time of two calls, one after the other: their times add up.
pub(super) fn time(at: &Setting, all: &[Traffic]) -> Estimate {
    if at.route.nodes() == 1 {
        return nccl_all_to_all::time(at, all);
    }
    let notify = nccl_all_to_all::counts(at);
    let over: Vec<u32> = at.members.iter().copied().step_by(at.route.node as usize).collect();
    let within = &at.members[..at.route.node as usize];
    let bytes = |rows: Rows, n: usize| {
        let n = n as f64;
        Bytes::new(rows * at.row_bytes as f64 * n / (n - 1.0).max(1.0))
    };
    let call = |members: &[u32], rows: Rows| {
        nccl::collective(at.cluster, at.stack, CollectiveKind::AllToAll, members, bytes(rows, members.len()))
    };
    let calls = |t: &Traffic| (call(&over, t.network.busier()), call(within, t.links.busier()));
    let ranks = all.iter().map(|t| {
        let (first, then) = calls(t);
        let start = first.latency + then.latency;
        RankTime { start, notify, network: first.transfer, links: then.transfer, in_turn: true, ..RankTime::default() }
    });
    let (first, _) = calls(&all[0]);
    let sms = at.stack.p2p_ctas.value;
    Estimate { ranks: ranks.collect(), sms, provenance: first.provenance, rel_sd: first.rel_sd }
}
