//! DeepEP V2 (2026-04, NCCL Gin in place of NVSHMEM): hybrid goes by way of the same place of the other node as V1
//! does, direct goes straight to every rank. The number of SMs follows from the traffic.

use super::streamed::{Library, library, streamed};
use super::{Estimate, Hop, Setting, Traffic, deepep_normal, via};
use crate::error::{Cause, Result};
use crate::plan::route::{Route, expected_unique};
use crate::spec::{Architecture, ExchangeSpec};

pub fn hybrid(route: &Route, rank: u32) -> Vec<Hop> {
    deepep_normal::hops(route, rank)
}

pub fn direct(route: &Route, rank: u32) -> Vec<Hop> {
    let hop = |to| Hop { stage: 0, via: via(route, rank, to), from: rank, to, rows: route.unique_to_rank(rank, to) };
    (0..route.ranks).map(hop).collect()
}

/// How long the exchange takes. Errors: `sms` is `None`, and the library has no rule for the GPU.
pub(super) fn time(at: &Setting, all: &[Traffic], sms: Option<u16>) -> Result<Estimate> {
    let gpu = &at.cluster.gpu;
    let sms = match sms {
        Some(sms) => u32::from(sms),
        // On CPUs this program carries the rows itself, with all cores that a rank has.
        None if gpu.architecture == Architecture::Cpu => gpu.sms.value,
        None => u32::from(theoretical_sms(at.route, gpu.architecture)?),
    };
    let library = Library { spec: at.library("deepep-v2"), sms, held: sms };
    Ok(streamed(at, all, &library, deepep_normal::wire_row(at.row_bytes, at.route.topk)))
}

/// SMs that read and write fast enough for the slower of network and links, the choices balanced and compute beside
/// them (`get_theoretical_num_sms` of deep_ep/buffers/elastic.py). Errors: an architecture that the library has no rule
/// for.
pub fn theoretical_sms(route: &Route, architecture: Architecture) -> Result<u16> {
    let raw = raw_sms(library("deepep-v2"), route, architecture)?;
    let margin = library("deepep-v2").sm_rule.as_ref().map_or(1.0, |rule| rule.margin.value);
    Ok(((raw * margin).ceil().max(4.0) as u16).next_multiple_of(2))
}

/// [`theoretical_sms`] before the margin and the rounding.
fn raw_sms(spec: &ExchangeSpec, route: &Route, architecture: Architecture) -> Result<f64> {
    let rule = spec.sm_rule.as_ref().expect("the shipped library has a rule");
    let Some(links) = rule.links.get(&architecture) else {
        let known: Vec<_> = rule.links.keys().map(|known| known.name()).collect();
        let why = format!("DeepEP V2 has no rule of SMs for {}; it knows {}", architecture.name(), known.join(", "));
        return Err(Cause::Dispatch.infeasible(why));
    };
    if route.ranks == 1 {
        // Nothing travels.
        return Ok(0.0);
    }
    let (nodes, of_node) = (f64::from(route.nodes()), f64::from(route.node));
    let unique = |parts| expected_unique(route.experts, route.topk, parts);
    let ranks = unique(route.ranks);
    // Rows written and read, for each row that a rank of the group gets.
    let (read, write, network) = if route.nodes() > 1 {
        let reached = unique(route.nodes()) / ranks;
        let over = reached * (1.0 - 1.0 / nodes);
        (1.0 / ranks + reached, 1.0 / ranks + reached / nodes + 1.0, rule.network.value.value() / over)
    } else {
        (1.0 / ranks, 1.0, f64::INFINITY)
    };
    let inside = links.value.value() / (1.0 - 1.0 / of_node);
    let rows = network.min(inside);
    Ok((rows * read / rule.read.value.value()).max(rows * write / rule.write.value.value()))
}
