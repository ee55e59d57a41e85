//! The memory that these libraries set aside for an exchange, by their own formulas, and what they refuse.

use super::ExchangeAlgo;
use crate::error::{Cause, Result};
use crate::plan::route::Route;

/// Bytes that a rank sets aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Buffers {
    /// Bytes that peers of the node write to.
    pub links: u64,
    /// Bytes that peers of other nodes write to.
    pub network: u64,
}

impl Buffers {
    pub fn total(&self) -> u64 {
        self.links + self.network
    }
}

/// The bytes that one rank sets aside for tokens of `hidden` bf16 elements, `row_bytes` on the wire of a dispatch.
/// Errors: the library would stop; with the remedy.
pub fn buffers(route: &Route, algo: ExchangeAlgo, hidden: u64, row_bytes: u64) -> Result<Buffers> {
    match algo {
        // These copy what comes in and what goes out in buffers that the framework allocates.
        ExchangeAlgo::Nccl | ExchangeAlgo::AllGather | ExchangeAlgo::Broadcast | ExchangeAlgo::Hierarchical => {
            Ok(Buffers::default())
        }
        ExchangeAlgo::DeepepNormal { sms } => normal(route, hidden, row_bytes, sms),
        ExchangeAlgo::DeepepLowLatency { slots, .. } => low_latency(route, hidden, slots),
        ExchangeAlgo::DeepepV2Hybrid { .. } => v2(route, hidden, row_bytes, true),
        ExchangeAlgo::DeepepV2Direct { .. } => v2(route, hidden, row_bytes, false),
        ExchangeAlgo::HybridEp { .. } => Ok(hybrid_ep(route, hidden)),
    }
}

/// Tokens of a queue of NVLink by the most ranks that have it, and of one of RDMA (deep_ep/buffers/legacy.py,
/// `get_dispatch_config`; those of combine are no larger).
const LINKS_QUEUES: [(u32, u64); 5] = [(8, 256), (64, 288), (96, 480), (128, 560), (160, 720)];
const NETWORK_QUEUE: u64 = 128;
/// Choices, and scales in fp32, that a row of a queue has room for at most.
const MOST_CHOICES: u64 = 128;
const MOST_SCALES: u64 = 128;
/// Bytes in front of a row that say where it is from.
const SOURCE_META: u64 = 8;

/// Hybrid-EP (docs/README_Hybrid-EP.md): room for the tokens of all ranks, and for the weights of their choices among a
/// node's experts.
fn hybrid_ep(route: &Route, hidden: u64) -> Buffers {
    let all = route.most_tokens() * u64::from(route.ranks);
    let weights = u64::from(route.local_experts()) * u64::from(route.node) * 4;
    Buffers { links: all * (2 * hidden + weights), network: 0 }
}

/// DeepEP's normal kernels: csrc/config.hpp, `get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint`.
fn normal(route: &Route, hidden: u64, row_bytes: u64, sms: u16) -> Result<Buffers> {
    let refuse = |why: String| Err(Cause::Dispatch.infeasible(format!("DeepEP V1 {why}")));
    if sms == 0 || sms % 2 == 1 {
        return refuse(format!("pairs SMs that send and receive; {sms} is odd or none, use 20"));
    }
    let Some((_, links_queue)) = LINKS_QUEUES.iter().find(|(most, _)| route.ranks <= *most) else {
        return refuse(format!("has queues for up to 160 ranks, not {}; use deepep-v2", route.ranks));
    };
    // Of a warp each thread has a choice (csrc/kernels/intranode.cu).
    if route.topk > 32 {
        return refuse(format!("takes at most 32 choices of a token, not {}; use nccl", route.topk));
    }
    // Rows are copied by 16 bytes: those of a dispatch without their scales, and those of a combine, in bf16.
    let element = if row_bytes < 2 * hidden { 1 } else { 2 };
    if !(element * hidden).is_multiple_of(16) {
        let fits = 16 / element;
        return refuse(format!("copies rows by 16 bytes; hidden {hidden} is no multiple of {fits}: use one, or nccl"));
    }
    let (channels, node, nodes) = (u64::from(sms) / 2, u64::from(route.node), u64::from(route.nodes()));
    let bytes = 2 * hidden;
    let choices = MOST_CHOICES * 8 + MOST_CHOICES * 4 + MOST_SCALES * 4;
    let links = channels * node * ((2 * nodes + 3) * 4 + links_queue * (bytes + SOURCE_META + choices));
    let network = match nodes {
        1 => 0,
        _ => {
            let queue = bytes + SOURCE_META + choices + 16;
            channels * nodes * ((2 * node + 2) * 2 * 4 + 2 * NETWORK_QUEUE * queue)
        }
    };
    let all = Buffers { links: links.next_multiple_of(128), network: network.next_multiple_of(128) };
    if all.links.max(all.network) > i32::MAX as u64 {
        let most = all.links.max(all.network);
        return refuse(format!("counts buffers in 31 bits; {most} B is more, use fewer SMs"));
    }
    Ok(all)
}

/// Widths that its kernels are compiled for (csrc/kernels/launch.cuh, `SWITCH_HIDDEN`).
const LOW_LATENCY_HIDDEN: [u64; 8] = [2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192];

/// DeepEP's low latency: csrc/config.hpp, `LowLatencyLayout`: two of everything, room for all tokens of all sources in
/// every slot.
fn low_latency(route: &Route, hidden: u64, slots: u32) -> Result<Buffers> {
    let refuse = |why: String| Err(Cause::Dispatch.infeasible(format!("DeepEP low latency: {why}")));
    if !LOW_LATENCY_HIDDEN.contains(&hidden) {
        let known = LOW_LATENCY_HIDDEN.map(|n| n.to_string()).join(", ");
        return refuse(format!("its kernels are for hidden {known}, not {hidden}; use deepep-v1-normal"));
    }
    if route.topk > 11 {
        return refuse(format!("{} choices a token, at most 11; use deepep-v1-normal", route.topk));
    }
    if route.most_tokens() > u64::from(slots) {
        let most = route.most_tokens();
        return refuse(format!("{most} tokens of a source in buffers for {slots}; make room for {most}"));
    }
    let (slots, experts) = (u64::from(slots), u64::from(route.experts));
    let scales = hidden / 128 * 4;
    let dispatch = 16 + (2 * hidden).max(hidden + scales);
    let combine = scales + 2 * hidden;
    let send = (slots * dispatch).max(experts * slots * combine);
    let receive = experts * slots * dispatch.max(combine);
    let signal = experts * 4;
    Ok(Buffers { links: 0, network: (2 * (send + receive + signal)).next_multiple_of(128) })
}

/// Alignment of TMA copies, and of allocated memory, in bytes.
const TMA: u64 = 32;
const PAGE: u64 = 2 << 20;
/// Channels at most: 8 on each of 160 SMs.
const MOST_CHANNELS: u64 = 1280;

/// DeepEP V2: csrc/elastic/buffer.hpp, `calculate_buffer_size` with several reductions allowed: dispatch and combine
/// share the larger of their two buffers.
fn v2(route: &Route, hidden: u64, row_bytes: u64, hybrid: bool) -> Result<Buffers> {
    if route.topk > 32 {
        return Err(Cause::Dispatch.infeasible(format!("DeepEP V2: {} choices a token, at most 32", route.topk)));
    }
    let (tokens, choices) = (route.most_tokens(), u64::from(route.topk));
    let (nodes, node) = match hybrid {
        true => (u64::from(route.nodes()), u64::from(route.node)),
        false => (1, u64::from(route.ranks)),
    };
    let align = |bytes: u64| bytes.next_multiple_of(TMA);
    let payload = if row_bytes < 2 * hidden { align(hidden) + align(row_bytes - hidden) } else { align(row_bytes) };
    let to = payload + align(choices * 8 + (1 + choices) * 4);
    let back = align(2 * hidden) + align(choices * 8);
    let through_network = u64::from(!hybrid && route.nodes() > 1);
    let (dispatch, combine) = if nodes == 1 {
        let ranks = node;
        let sent_back = through_network * ranks;
        (to * (ranks + through_network) * tokens, back * (ranks.min(choices) + sent_back) * tokens)
    } else {
        let staged = nodes * (tokens + MOST_CHANNELS);
        let summed = (node.min(choices) * nodes + nodes.min(choices)) * tokens;
        (to * (node * nodes * tokens + tokens + staged), back * (summed + staged))
    };
    Ok(Buffers { links: 0, network: dispatch.max(combine).next_multiple_of(PAGE) })
}
