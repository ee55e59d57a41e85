//! Who carries the rows, by what a source calls it: the way that rows take, and whose constants say how fast.

use crate::cluster::Cluster;
use crate::collective::exchange::library;
use crate::plan::route::{ExchangeAlgo, Route};
use crate::published::row::case::Exchanged;
use crate::published::row::words::squeezed;
use crate::spec::ExchangeSpec;

/// SMs of DeepEP V1 in its own tests, and of kernels made after them.
const V1_SMS: u16 = 24;
/// Of Hybrid-EP, where nobody says.
const HYBRID_EP_SMS: u16 = 16;

/// Rows and constants; none of the latter where the algorithm has its own.
pub type Carrier = (ExchangeAlgo, Option<&'static ExchangeSpec>);

pub fn carrier(row: &Exchanged, route: &Route, cluster: &Cluster) -> Result<Carrier, String> {
    let words = squeezed(&row.library);
    let has = |word: &str| words.contains(word);
    let sms = |default: u16| row.sms.unwrap_or(default);
    let normal = ExchangeAlgo::DeepepNormal { sms: sms(V1_SMS) };
    let low_latency = ExchangeAlgo::DeepepLowLatency { hook: false, slots: route.most_tokens().max(1) as u32 };
    // Where a table names several networks, DeepEP's columns are of the one it was made for.
    let network = squeezed(&row.network);
    let efa = network.contains("efa") && !network.contains("cx7");
    // A table of one library alone may name it beside the GPU.
    let uccl_efa = has("uccl") && (efa || squeezed(&row.gpu).contains("efa"));
    let slow = has("lowlatency") || has("epll") || row.library.split_whitespace().any(|word| word == "LL");
    // Straight to every rank that has a slot of a token's, once.
    let direct = ExchangeAlgo::DeepepV2Direct { sms: Some(sms(cluster.gpu.sms.value as u16)) };
    Ok(match () {
        _ if has("ncclep") || (has("zerocopy") && !has("deepep")) || has("liteep") => {
            return Err(format!("{}: a library that is not modelled", row.library));
        }
        // A pull request of October 2025. Rows then go by TMA and pass no queues, as Hybrid-EP's.
        _ if has("deepep") && has("zerocopy") && row.before => (normal, Some(library("deepep-v1-normal-2025-11"))),
        _ if has("deepep") && has("zerocopy") => (normal, Some(library("hybrid-ep"))),
        _ if has("onesided") => (direct, Some(library("trtllm-one-sided"))),
        _ if has("twosided") && has("lowprecision") => (direct, Some(library("trtllm-two-sided-fp4"))),
        _ if has("twosided") => (direct, Some(library("trtllm-two-sided"))),
        // EFA keeps no order of messages, which its proxy on the CPU has to make.
        _ if uccl_efa && !slow => (normal, Some(library("uccl-ep-efa"))),
        _ if has("uccl") && !slow => (normal, Some(library("uccl-ep"))),
        _ if uccl_efa => (low_latency, Some(library("uccl-ep-ll-efa"))),
        // Its low latency too sends a token once to a node, whose ranks pass it on.
        _ if has("mori") && slow => (normal, Some(library("mori-ep-ll"))),
        _ if has("mori") => (normal, Some(library("mori-ep"))),
        // One put for each choice, posted by the GPU or by a thread of the CPU.
        _ if has("pplxkernels") && has("ibrc") => (low_latency, Some(library("pplx-kernels-ibrc"))),
        _ if has("pplxkernels") => (low_latency, Some(library("pplx-kernels-ibgda"))),
        // A row for each choice, in bulk to every rank.
        _ if has("pplx") && has("efa") => (low_latency, Some(library("pplx-fabric-efa"))),
        _ if has("pplx") => (low_latency, Some(library("pplx-fabric"))),
        _ if has("hybrid") && !has("deepepv1") => (ExchangeAlgo::HybridEp { sms: sms(HYBRID_EP_SMS) }, None),
        // Without IBGDA a thread of the CPU posts every message.
        _ if slow && efa => (low_latency, Some(library("deepep-v1-ll-efa"))),
        _ if slow || has("nvshmem") => (low_latency, None),
        _ if has("deepepv2") && efa => (ExchangeAlgo::DeepepV2Hybrid { sms: row.sms }, Some(library("deepep-v2-efa"))),
        _ if has("deepepv2") => (ExchangeAlgo::DeepepV2Hybrid { sms: row.sms }, None),
        // What SGLang brings is younger than the tables of DeepEP's own README.
        _ if has("deepep") && has("sglang") => (normal, Some(library("deepep-v1-normal-2025-11"))),
        _ if has("deepep") && network.contains("roce") => (normal, Some(library("deepep-v1-normal-roce"))),
        _ if has("deepep") => (normal, None),
        // Send and receive to every peer, whichever library's.
        _ if ["nccl", "rccl", "hccl", "alltoall", "a2a", "fastermoe"].iter().any(|name| has(name)) => {
            (ExchangeAlgo::Nccl, None)
        }
        // Two all-to-alls from two nodes on, within and between (arXiv:2206.03382, section 3.2).
        _ if has("tutel") => (ExchangeAlgo::Hierarchical, None),
        _ => return Err(format!("{}: a library that is not modelled", row.library)),
    })
}
