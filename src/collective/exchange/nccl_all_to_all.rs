//! NCCL sends and receives in one group, as Megatron's `alltoall` dispatcher, Tutel and FastMoE do it. A token goes
//! to a rank as often as it chose slots there. The counts go round first, and the host waits for them.

use super::{Estimate, Hop, Limiter, RankTime, Setting, Traffic, nccl, via};
use crate::plan::CollectiveKind;
use crate::plan::route::{Phase, Route};
use crate::units::{Bytes, Seconds};

pub fn hops(route: &Route, rank: u32) -> Vec<Hop> {
    let hop = |to| Hop { stage: 0, via: via(route, rank, to), from: rank, to, rows: route.copies_to_rank(rank, to) };
    (0..route.ranks).map(hop).collect()
}

/// The traffic of each rank by the nodes that its members lie in, which may be larger than those of the route: rows go
/// straight to their ranks.
pub fn where_ranks_are(at: &Setting) -> Vec<Traffic> {
    let rows = |from, to| match at.phase {
        Phase::Combine => at.route.copies_to_rank(to, from),
        Phase::Dispatch | Phase::CachedDispatch => at.route.copies_to_rank(from, to),
    };
    let place = |rank: u32| at.cluster.node_of(at.members[rank as usize]);
    let of = |rank: u32| {
        let mut all = Traffic::default();
        for other in 0..at.route.ranks {
            let flow = if place(rank) == place(other) { &mut all.links } else { &mut all.network };
            match other == rank {
                true => flow.kept += rows(rank, rank),
                false => {
                    flow.sent += rows(rank, other);
                    flow.received += rows(other, rank);
                }
            }
        }
        all
    };
    (0..at.route.ranks).map(of).collect()
}

/// The time before a dispatch: an all-gather of the counts of all slots, and the host that reads them before it can
/// send.
pub(super) fn counts(at: &Setting) -> Seconds {
    if at.phase != Phase::Dispatch {
        return Seconds::ZERO;
    }
    let bytes = Bytes::new(8.0 * f64::from(at.route.experts) * f64::from(at.route.ranks));
    let gather = nccl::collective(at.cluster, at.stack, CollectiveKind::AllGather, at.members, bytes);
    // The host issues the all-gather, copies the counts, and waits for them.
    gather.total() + at.cluster.spec.issued_in(at.stack.host_launch.value) * 2.0
}

/// How long the exchange takes: for every rank, the busier of its two directions, spread over its peers.
pub(super) fn time(at: &Setting, all: &[Traffic]) -> Estimate {
    let notify = counts(at);
    let peers = f64::from(at.route.ranks);
    let crossing = (peers - 1.0).max(1.0);
    let rows = |t: &Traffic| (t.links.sent + t.network.sent).max(t.links.received + t.network.received);
    let bytes = |t: &Traffic| Bytes::new(rows(t) * at.row_bytes as f64 * peers / crossing);
    let one = |t: &Traffic| nccl::collective(at.cluster, at.stack, CollectiveKind::AllToAll, at.members, bytes(t));
    let slower = if at.route.nodes() > 1 { Limiter::Network } else { Limiter::Links };
    let ranks = all.iter().map(|t| rank_time(one(t), notify, slower)).collect();
    let any = one(&all[0]);
    let sms = at.stack.p2p_ctas.value;
    Estimate { ranks, sms, provenance: any.provenance, rel_sd: any.rel_sd }
}

pub(super) fn rank_time(time: nccl::LinkTime, notify: Seconds, limiter: Limiter) -> RankTime {
    let rows = RankTime { start: time.latency, notify, ..RankTime::default() };
    match limiter {
        Limiter::Network => RankTime { network: time.transfer, ..rows },
        _ => RankTime { links: time.transfer, ..rows },
    }
}
