//! All rows to everyone, and on the way back a reduce-scatter of full-length sums: no counts, no permutation, and
//! more bytes than an all-to-all unless tokens choose about as many slots as there are ranks.

use super::{Estimate, Hop, Limiter, Setting, Via, nccl, nccl_all_to_all::rank_time, same_place};
use crate::plan::CollectiveKind;
use crate::plan::route::{Phase, Route};
use crate::units::{Bytes, Seconds};

/// The hops of `rank`: rows of every source enter each node once and are passed on inside it, as the rings of all
/// channels together do.
pub fn hops(route: &Route, rank: u32) -> Vec<Hop> {
    let mut all = vec![];
    if route.nodes() > 1 {
        all.extend((0..route.nodes()).map(|node| {
            let to = same_place(route, rank, node);
            Hop { stage: 0, via: Via::Network, from: rank, to, rows: route.tokens(rank) as f64 }
        }));
    }
    let stage = u8::from(route.nodes() > 1);
    let brought: u64 = (0..route.nodes()).map(|node| route.tokens(same_place(route, rank, node))).sum();
    let own = route.node_of(rank) * route.node;
    let hop = |to| Hop { stage, via: Via::Links, from: rank, to, rows: brought as f64 };
    all.extend((own..own + route.node).map(hop));
    all
}

/// What rows of a ring wait for: the links of a node that have less than its NICs, or the network.
pub(super) fn limiter(at: &Setting) -> Limiter {
    if nccl::is_narrow_inside(at.cluster, at.stack, at.members) { Limiter::Links } else { Limiter::Network }
}

/// The time of NCCL's collective of as many bytes; where parts are ragged, the longest part sets its pace.
pub(super) fn time(at: &Setting) -> Estimate {
    let longest = at.route.most_tokens() as f64 * f64::from(at.route.ranks);
    let bytes = Bytes::new(longest * at.row_bytes as f64);
    let kind = if at.phase == Phase::Combine { CollectiveKind::ReduceScatter } else { CollectiveKind::AllGather };
    let one = nccl::collective(at.cluster, at.stack, kind, at.members, bytes);
    let ranks = vec![rank_time(one, Seconds::ZERO, limiter(at))];
    Estimate { ranks, sms: at.stack.collective_ctas.value, provenance: one.provenance, rel_sd: one.rel_sd }
}
