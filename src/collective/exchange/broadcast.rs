//! Few rows that are large, as the weights of shadowed experts are: one after the other goes round from its source in
//! chunks, and on the way back its sum does. The hops are those of [`allgather`](super::allgather), whose ring it is.

use super::{Estimate, Setting, allgather::limiter, nccl, nccl_all_to_all::rank_time};
use crate::collective::Operation;
use crate::plan::CollectiveKind;
use crate::spec::Architecture;
use crate::units::{Bytes, Seconds};

/// The time of a broadcast for each row, one behind the other; a reduce takes as long.
pub(super) fn time(at: &Setting) -> Estimate {
    let rows: f64 = (0..at.route.ranks).map(|src| at.route.tokens(src) as f64).sum();
    let row = Bytes::new(at.row_bytes as f64);
    let ways = match at.cluster.gpu.architecture {
        Architecture::Cpu => vec![],
        _ => nccl::choices(at.cluster, at.stack, Operation::Broadcast, at.members, row),
    };
    let best = ways.into_iter().min_by(|a, b| a.time.total().value().total_cmp(&b.time.total().value()));
    // Threads pass rows on as they gather them.
    let gathered = || nccl::collective(at.cluster, at.stack, CollectiveKind::AllGather, at.members, row);
    let mut one = best.map_or_else(gathered, |way| way.time);
    (one.latency, one.transfer) = (one.latency * rows, one.transfer * rows);
    let ranks = vec![rank_time(one, Seconds::ZERO, limiter(at))];
    Estimate { ranks, sms: at.stack.collective_ctas.value, provenance: one.provenance, rel_sd: one.rel_sd }
}
