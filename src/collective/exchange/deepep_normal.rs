//! DeepEP V1, normal kernels: a token goes once to each node, over the network to the rank of the same place, which
//! forwards it once to each rank of the node that has a slot of its (csrc/kernels/internode.cu). On the way back the
//! same rank sums up what its node brings and sends one row. Half of the SMs send or forward, half receive.

use super::streamed::{Library, streamed};
use super::{Estimate, Hop, Setting, Traffic, Via, same_place};
use crate::plan::route::Route;

pub fn hops(route: &Route, rank: u32) -> Vec<Hop> {
    let mut all = vec![];
    if route.nodes() > 1 {
        all.extend((0..route.nodes()).map(|node| {
            let to = same_place(route, rank, node);
            Hop { stage: 0, via: Via::Network, from: rank, to, rows: route.unique_to_node(rank, node) }
        }));
    }
    let stage = u8::from(route.nodes() > 1);
    let own = route.node_of(rank) * route.node;
    all.extend((own..own + route.node).map(|to| {
        let rows = (0..route.nodes()).map(|node| route.unique_to_rank(same_place(route, rank, node), to)).sum();
        Hop { stage, via: Via::Links, from: rank, to, rows }
    }));
    all
}

/// Bytes of a row over the network: it brings where it is from and its choices with their weights, in whole 16 bytes
/// (internode.cu: SourceMeta of 8 bytes, 4 k of indices, 4 k of weights).
pub fn wire_row(row_bytes: u64, topk: u32) -> u64 {
    (row_bytes + 8 + 8 * u64::from(topk)).next_multiple_of(16)
}

pub(super) fn time(at: &Setting, all: &[Traffic], sms: u16) -> Estimate {
    let library = Library { spec: at.library("deepep-v1-normal"), sms: u32::from(sms), held: u32::from(sms) };
    streamed(at, all, &library, wire_row(at.row_bytes, at.route.topk))
}
