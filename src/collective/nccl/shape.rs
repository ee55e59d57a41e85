//! Where the members of a group are, and what is narrow between them.

use crate::cluster::{Block, Cluster};
use crate::collective::{pat, tree};
use crate::spec::Pod;
use crate::units::BytesPerSec;
use std::collections::BTreeMap;

/// Where the members of a group are: how many nodes, and the fewest and most of them on one.
pub struct Shape {
    pub n: u32,
    pub nodes: u32,
    pub fewest: u32,
    pub most: u32,
    /// What pods leave of a NIC to a ring.
    pub uplink: f64,
    /// What pods leave to two trees, bytes of the full buffer a second.
    pub tree: f64,
    /// The same to parallel aggregated trees.
    pub pat: f64,
    /// Peers in other pods, each counted as often as the uplinks are narrower than the NICs.
    pub beyond: f64,
    /// What a ring has between sockets.
    pub bridge: Option<BytesPerSec>,
    /// What goes from one to another of a node at most; `None` behind a switch.
    pub peer: Option<BytesPerSec>,
    /// Where they lie on a torus of chips.
    pub block: Option<Block>,
}

impl Shape {
    pub fn of(cluster: &Cluster, members: &[u32]) -> Shape {
        let on = cluster.on_nodes(members);
        Shape {
            n: members.len() as u32,
            nodes: on.len() as u32,
            fewest: on.iter().map(|node| node.1).min().unwrap_or(0),
            most: on.iter().map(|node| node.1).max().unwrap_or(0),
            uplink: cluster.uplink_share(members),
            tree: tree_uplinks(cluster, members),
            pat: pat_uplinks(cluster, members),
            beyond: cluster.beyond_pods(members),
            bridge: cluster.bridge(members),
            peer: cluster.slowest_peer(members),
            block: cluster.block(members),
        }
    }
}

/// Bytes of the full buffer a second that the uplinks of pods leave to two trees between the nodes of a group, each of
/// which has half of them; infinite where no edge leaves a pod.
pub fn tree_uplinks(cluster: &Cluster, members: &[u32]) -> f64 {
    if cluster.spec.pods.is_empty() {
        return f64::INFINITY;
    }
    let first_of: BTreeMap<u32, u32> = members.iter().rev().map(|&m| (cluster.node_of(m), m)).collect();
    let nodes: Vec<u32> = first_of.into_values().collect();
    let limit = |(tier, pod): (usize, &Pod)| {
        let Some(uplinks) = cluster.uplinks_of(members, tier) else { return f64::INFINITY };
        let mut leave: BTreeMap<u32, u32> = BTreeMap::new();
        for parents in [tree::first(nodes.len()), tree::second(nodes.len())] {
            let edges = parents.into_iter().enumerate().filter_map(|(child, parent)| Some([child, parent?]));
            let pods = edges.map(|edge| edge.map(|node| nodes[node] / pod.gpus)).filter(|[a, b]| a != b);
            pods.flatten().for_each(|pod| *leave.entry(pod).or_default() += 1);
        }
        // Half of the bytes over every edge, each way.
        leave.into_values().max().map_or(f64::INFINITY, |edges| uplinks.value() * 2.0 / f64::from(edges))
    };
    cluster.spec.pods.iter().enumerate().map(limit).fold(f64::INFINITY, f64::min)
}

/// Bytes of the full buffer a second that the uplinks of pods leave to members that stand side by side, as many in each,
/// who send to those that are powers of two further on; infinite where none leaves a pod.
fn pat_uplinks(cluster: &Cluster, members: &[u32]) -> f64 {
    let limit = |(tier, pod): (usize, &Pod)| {
        let Some(uplinks) = cluster.uplinks_of(members, tier) else { return f64::INFINITY };
        let inside = members.iter().filter(|&m| m / pod.gpus == members[0] / pod.gpus).count();
        uplinks.value() / pat::leaving(members.len(), inside)
    };
    cluster.spec.pods.iter().enumerate().map(limit).fold(f64::INFINITY, f64::min)
}
