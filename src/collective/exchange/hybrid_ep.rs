//! NVIDIA's Hybrid-EP (branch hybrid-ep of DeepEP): a map of all tokens' choices is gathered first, then TMA streams rows
//! the way of DeepEP: over the network to the same place of a node, over the links to each rank once, summed inside
//! the node on the way back. Ranks of one NVLink domain, be it a rack, are one node.

use super::streamed::{Library, streamed};
use super::{Estimate, Hop, Setting, Traffic, deepep_normal};
use crate::plan::route::Route;

pub fn hops(route: &Route, rank: u32) -> Vec<Hop> {
    deepep_normal::hops(route, rank)
}

pub(super) fn time(at: &Setting, all: &[Traffic], sms: u16) -> Estimate {
    let library = Library { spec: at.library("hybrid-ep"), sms: u32::from(sms), held: u32::from(sms) };
    streamed(at, all, &library, deepep_normal::wire_row(at.row_bytes, at.route.topk))
}
