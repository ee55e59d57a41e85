//! DeepEP V1, low latency: one message for each token and slot, straight into the place that the slot's rank keeps
//! for its source. No counts beforehand, no deduplication; nearly all SMs while it sends and while it receives, and
//! with the hook none between the two, while the NICs have the rows (csrc/kernels/internode_ll.cu).

use super::streamed::{Library, streamed};
use super::{Estimate, Hop, Setting, Traffic, nccl_all_to_all};
use crate::plan::route::{Phase, Route};

pub fn hops(route: &Route, rank: u32) -> Vec<Hop> {
    nccl_all_to_all::hops(route, rank)
}

/// Bytes of a row on the wire: a dispatched row brings 16 bytes that say whose it is; a combined one goes where it is
/// waited for.
pub fn wire_row(row_bytes: u64, phase: Phase) -> u64 {
    if phase == Phase::Combine { row_bytes } else { row_bytes + 16 }
}

/// Thread blocks of the kernels: each has as many slots as it takes for all slots to have a warp group at once.
pub fn sms(experts: u32, sms: u32) -> u32 {
    experts.div_ceil(experts.div_ceil(sms))
}

pub(super) fn time(at: &Setting, all: &[Traffic], hook: bool) -> Estimate {
    let sms = sms(at.route.experts, at.cluster.gpu.sms.value);
    // To whoever shares links SMs copy the rows, hook or not.
    let held = if hook && at.route.nodes() > 1 { 0 } else { sms };
    let library = Library { spec: at.library("deepep-v1-ll"), sms, held };
    streamed(at, all, &library, wire_row(at.row_bytes, at.phase))
}
