//! Ranks on devices: which node each is in, and what lies between two of them.

mod block;
mod ecmp;
mod graph;
mod leaving;
mod path;
mod ports;
mod slice;

pub use block::Block;
pub use ecmp::fullest;
pub use leaving::Leaving;
pub use path::{Link, LinkClass, Path};
pub use ports::Ports;

use crate::error::{Error, Result};
use crate::spec::{ClusterSpec, GpuSpec, Pod, is_path};
use crate::units::BytesPerSec;
use std::collections::BTreeSet;

/// What the bytes between two ranks cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// No link: both ranks are on one device.
    Local,
    /// The links inside a node.
    ScaleUp,
    /// The network between nodes.
    ScaleOut,
}

/// A cluster with one rank on each GPU; ranks fill node after node.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    pub spec: ClusterSpec,
    pub gpu: GpuSpec,
    gpus: u32,
    /// GPUs used of each node.
    per_node: u32,
    neighbours: graph::Neighbours,
}

impl Cluster {
    /// The first `gpus` GPUs of a cluster. Errors: the cluster has another GPU, fewer of them, or nodes that they do
    /// not fill; a graph that does not link all its hosts.
    pub fn new(spec: &ClusterSpec, gpu: &GpuSpec, gpus: u32) -> Result<Cluster> {
        let per_node = spec.gpus_per_node;
        // Where the file names a GPU by the path of another file, the GPU has a name of its own.
        if gpu.name != spec.gpu && !is_path(&spec.gpu) {
            let why = format!("the cluster has {}, not {}; choose one of the two again", spec.gpu, gpu.name);
            return Err(Error::spec(&spec.name, "gpu", why));
        }
        if gpus == 0 {
            return Err(Error::spec(&spec.name, "gpus", "0; at least 1 is needed"));
        }
        if gpus > per_node && spec.scale_out.is_none() {
            let why = format!("{gpus} is more than the {per_node} of its only node; use {per_node} or fewer");
            return Err(Error::spec(&spec.name, "gpus", why));
        }
        let Some(used) = used_of_a_node(spec, gpus) else {
            let fills = |gpus: &u32| used_of_a_node(spec, *gpus).is_some();
            let below = (1..gpus).rev().find(fills);
            let above = (gpus..=gpus.saturating_add(per_node)).find(fills);
            let near: Vec<String> = below.into_iter().chain(above).map(|n| n.to_string()).collect();
            let why = format!("{gpus} does not fill nodes of {per_node}; use {}", near.join(" or "));
            return Err(Error::spec(&spec.name, "gpus", why));
        };
        let mut spec = spec.clone();
        if let Some(block) =
            spec.graph.as_ref().filter(|_| spec.scale_out.is_none()).and_then(|g| slice::slice(g, gpus))
        {
            spec.graph = Some(block);
        }
        let listed = spec.graph.as_ref().map(|g| graph::neighbours(g, spec.hosts())).transpose();
        let neighbours = listed.map_err(|why| Error::spec(&spec.name, "graph.shape", why))?.unwrap_or_default();
        Ok(Cluster { spec, gpu: gpu.clone(), gpus, per_node: used, neighbours })
    }

    pub fn gpus(&self) -> u32 {
        self.gpus
    }

    pub fn nodes(&self) -> u32 {
        self.gpus.div_ceil(self.per_node)
    }

    pub fn node_of(&self, rank: u32) -> u32 {
        assert!(rank < self.gpus, "rank {rank} of {} GPUs", self.gpus);
        rank / self.per_node
    }

    /// GPUs used of each node.
    pub fn per_node(&self) -> u32 {
        self.per_node
    }

    /// Of a group of `group` neighbouring ranks, how many neighbours lie in one node wherever the group begins: all of it
    /// where nodes hold whole groups, and where they do not, the largest equal parts that no node cuts.
    pub fn together(&self, group: u32) -> u32 {
        let (mut a, mut b) = (group, if self.nodes() > 1 { self.per_node } else { group });
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    }

    /// Whether a group of `group` neighbouring ranks that fits into a node may lie across two.
    pub fn splits(&self, group: u32) -> bool {
        self.nodes() > 1 && (1..=self.per_node).contains(&group) && !self.per_node.is_multiple_of(group)
    }

    /// The number of GPUs to take so that no such group would lie across two; `None` if no group does now, or any number
    /// leaves some.
    pub fn unsplit(&self, group: u32) -> Option<u32> {
        let fewer = |used: &u32| {
            let gpus = used * self.nodes();
            used_of_a_node(&self.spec, gpus) == Some(*used)
        };
        if !self.splits(group) {
            return None;
        }
        (1..=self.per_node / group).rev().map(|n| n * group).find(fewer).map(|used| used * self.nodes())
    }

    /// The ranks of a node.
    pub fn ranks_on(&self, node: u32) -> std::ops::Range<u32> {
        let first = node * self.per_node;
        first..(first + self.per_node).min(self.gpus)
    }

    pub fn tier(&self, a: u32, b: u32) -> Tier {
        match (a == b, self.node_of(a) == self.node_of(b)) {
            (true, _) => Tier::Local,
            (_, true) => Tier::ScaleUp,
            _ => Tier::ScaleOut,
        }
    }

    /// The share of its NICs' bandwidth that a group gets where it spans pods, while all other ranks do the same in
    /// groups of their own. A ring leaves a pod once, however many of its members are inside; there are as many rings
    /// as the group has members on a node, each with a NIC of its own.
    pub fn uplink_share(&self, members: &[u32]) -> f64 {
        let share = |(tier, pod): (usize, &Pod)| match self.inside_pods(members, pod) {
            Some(inside) => {
                let rings = self.fewest_on_a_node(members);
                inside / (rings * pod.oversubscription.value * self.collide_all(tier, rings, inside))
            }
            None => 1.0,
        };
        self.spec.pods.iter().enumerate().map(share).fold(1.0, f64::min)
    }

    /// Bytes a second that a group has out of each of its pods of a tier, all other ranks being in groups like it;
    /// `None` where it stays in one pod.
    pub fn uplinks_of(&self, members: &[u32], tier: usize) -> Option<BytesPerSec> {
        let (pod, nics) = (&self.spec.pods[tier], self.nics_per_rank()?);
        let inside = self.inside_pods(members, pod)?;
        let lost = pod.oversubscription.value * self.collide_all(tier, self.fewest_on_a_node(members), inside);
        Some(self.spec.scale_out.as_ref()?.achieved.value * (nics * inside / lost))
    }

    /// Members in each pod, in the mean; `None` if all are in one pod.
    fn inside_pods(&self, members: &[u32], pod: &Pod) -> Option<f64> {
        let pods: BTreeSet<u32> = members.iter().map(|m| m / pod.gpus).collect();
        (pods.len() > 1).then(|| members.len() as f64 / pods.len() as f64)
    }

    fn fewest_on_a_node(&self, members: &[u32]) -> f64 {
        f64::from(self.on_nodes(members).into_iter().map(|(_, on)| on).min().unwrap_or(1))
    }

    /// The nodes that some ranks are on, the first node first, each with how many of the ranks it has.
    pub fn on_nodes(&self, members: &[u32]) -> Vec<(u32, u32)> {
        let mut nodes: Vec<u32> = members.iter().map(|&m| self.node_of(m)).collect();
        nodes.sort_unstable();
        nodes.chunk_by(|a, b| a == b).map(|on| (on[0], on.len() as u32)).collect()
    }

    /// Peers of a member that are in other pods, times the factor by which the uplinks there are too narrow.
    pub fn beyond_pods(&self, members: &[u32]) -> f64 {
        let beyond = |(tier, pod): (usize, &Pod)| {
            let pods: BTreeSet<u32> = members.iter().map(|m| m / pod.gpus).collect();
            let n = members.len() as f64;
            let (inside, beyond) = (n / pods.len() as f64, n - n / pods.len() as f64);
            beyond * pod.oversubscription.value * self.collide_all(tier, inside * beyond, inside)
        };
        self.spec.pods.iter().enumerate().map(beyond).fold(0.0, f64::max)
    }

    /// Bytes a second that a group gets of the bridge between two sockets, all groups of the node crossing it alike;
    /// `None` where it stays on one socket.
    pub fn bridge(&self, members: &[u32]) -> Option<BytesPerSec> {
        let sockets = self.spec.scale_up.sockets.as_ref()?;
        let on = |m: &u32| (self.node_of(*m), (m % self.per_node) / sockets.gpus);
        let used: BTreeSet<_> = members.iter().map(on).collect();
        let nodes: BTreeSet<_> = members.iter().map(|m| self.node_of(*m)).collect();
        let inside = members.len() as f64 / used.len() as f64;
        let share = (inside / f64::from(sockets.gpus)).min(1.0);
        (used.len() > nodes.len()).then(|| sockets.bridge.value * share)
    }

    /// Bytes a second that a send between neighbours of a communicator of `size` gets of the bridge, all groups of the
    /// node being rings like it: the fewer there are, the fewer cross at a time. `None` where it stays on one socket.
    pub fn bridge_of_ring(&self, pair: &[u32; 2], size: u32) -> Option<BytesPerSec> {
        let sockets = self.spec.scale_up.sockets.as_ref()?;
        let rings = (f64::from(self.per_node) / f64::from(size.max(1))).clamp(1.0, f64::from(sockets.gpus));
        self.bridge(pair).map(|_| sockets.bridge.value * (1.0 / rings))
    }

    /// Bytes a second from a GPU to another of its node at most; `None` behind a switch.
    pub fn peer(&self, a: u32, b: u32) -> Option<BytesPerSec> {
        let up = &self.spec.scale_up;
        let of = |rank: u32, gpus: u32| (self.node_of(rank), rank % self.per_node / gpus);
        let package = up.package.as_ref().filter(|package| of(a, package.gpus) == of(b, package.gpus));
        package.map(|package| &package.per_peer).or(up.per_peer.as_ref()).map(|rate| rate.value)
    }

    /// The least that goes from one to another of the members that share a node; `None` behind a switch.
    pub fn slowest_peer(&self, members: &[u32]) -> Option<BytesPerSec> {
        let near = members.windows(2).filter(|pair| self.node_of(pair[0]) == self.node_of(pair[1]));
        let known = self.spec.scale_up.package.as_ref().and_then(|_| {
            // Members are in ascending order, so that neighbours are of two packages if any are.
            near.filter_map(|pair| self.peer(pair[0], pair[1])).reduce(BytesPerSec::min)
        });
        known.or(self.spec.scale_up.per_peer.as_ref().map(|rate| rate.value))
    }

    /// NICs that one of `flows` out of a node has: those of the node shared out, but no more than a rank has of its
    /// own, or one where ranks share. 1 without a network.
    pub fn nic_share(&self, flows: f64) -> f64 {
        let Some(out) = self.spec.scale_out.as_ref() else { return 1.0 };
        let (nics, gpus) = (f64::from(out.nics_per_node), f64::from(self.spec.gpus_per_node));
        (nics / flows).min((nics / gpus).max(1.0))
    }

    /// NICs that a rank has of its own, below 1 where GPUs share one; `None` without a network.
    pub fn nics_per_rank(&self) -> Option<f64> {
        let out = self.spec.scale_out.as_ref()?;
        Some(f64::from(out.nics_per_node) / f64::from(self.spec.gpus_per_node))
    }
}

/// GPUs used of each node: nodes are taken whole, or as evenly as their trays allow; `None` where they cannot be.
fn used_of_a_node(spec: &ClusterSpec, gpus: u32) -> Option<u32> {
    if gpus <= spec.gpus_per_node {
        return Some(spec.gpus_per_node);
    }
    let tray = spec.tray.unwrap_or(spec.gpus_per_node);
    let trays = gpus / tray;
    let of_each = (1..=spec.gpus_per_node / tray).rev().find(|n| trays.is_multiple_of(*n))?;
    gpus.is_multiple_of(tray).then_some(of_each * tray)
}

#[cfg(test)]
impl Cluster {
    /// One that is shipped, for the tests of whatever sees clusters.
    pub fn shipped(name: &str, gpus: u32) -> Cluster {
        let spec = ClusterSpec::find(name).unwrap();
        Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), gpus).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dgx(gpus: u32) -> Result<Cluster> {
        Cluster::new(&ClusterSpec::find("dgx-h100").unwrap(), &GpuSpec::find("h100-sxm5").unwrap(), gpus)
    }

    #[test]
    fn groups_that_nodes_split() {
        let racks = |gpus: u32| Cluster::shipped("gb200-nvl72", gpus);
        // 64 of each rack are used, and all 72.
        assert_eq!([128, 144].map(|gpus| racks(gpus).unsplit(16)), [None, Some(128)]);
        assert_eq!([8, 64, 72, 144].map(|group| racks(144).unsplit(group)), [None, Some(128), None, None]);
        assert_eq!(racks(72).unsplit(16), None);
        // What no degree is, is refused elsewhere.
        assert_eq!([0, 1000].map(|group| racks(144).unsplit(group)), [None; 2]);
        // Nodes of 8 are taken whole: no other number of them keeps groups of 3 inside.
        let dgx = dgx(64).unwrap();
        assert_eq!((dgx.splits(3), dgx.unsplit(3), dgx.splits(4), dgx.splits(16)), (true, None, false, false));
    }

    #[test]
    fn what_of_a_group_no_node_cuts() {
        let racks = |gpus: u32| Cluster::shipped("gb200-nvl72", gpus);
        // Groups of 64 over racks of which 64 are used, over a whole one, and over whole ones: 64 and 8, 56 and 16, ..
        assert_eq!([512, 72, 576].map(|gpus| racks(gpus).together(64)), [64, 64, 8]);
        assert_eq!([8, 16, 144].map(|group| racks(576).together(group)), [8, 8, 72]);
        assert_eq!([1, 6, 64].map(|group| dgx(64).unwrap().together(group)), [1, 2, 8]);
    }

    #[test]
    fn a_gpu_of_ones_own_stands_beside_its_cluster() {
        let dir = tempfile::tempdir().unwrap();
        let [cluster, gpu] = [crate::spec::find("cluster", "dgx-h100"), crate::spec::find("gpu", "h100-sxm5")]
            .map(|found| found.unwrap().text);
        let own = cluster.replace("\"h100-sxm5\"", "\"own.json\"");
        assert_ne!(own, cluster);
        std::fs::write(dir.path().join("box.json"), own).unwrap();
        std::fs::write(dir.path().join("own.json"), gpu).unwrap();
        let spec = ClusterSpec::find(&dir.path().join("box.json").display().to_string()).unwrap();
        let gpu = GpuSpec::find(&spec.gpu).unwrap();
        assert_eq!(Cluster::new(&spec, &gpu, 8).unwrap().gpus(), 8);
    }

    #[test]
    fn flows_out_of_a_node_share_its_nics_and_have_no_more_than_one_each() {
        let mut c = dgx(16).unwrap();
        let shares = |c: &Cluster| [1.0, 2.0, 8.0, 16.0].map(|flows| c.nic_share(flows));
        assert_eq!(shares(&c), [1.0, 1.0, 1.0, 0.5]);
        c.spec.scale_out.as_mut().unwrap().nics_per_node = 1;
        assert_eq!(shares(&c), [1.0, 0.5, 0.125, 0.0625]);
        c.spec.scale_out.as_mut().unwrap().nics_per_node = 16;
        assert_eq!(shares(&c), [2.0, 2.0, 2.0, 1.0]);
    }

    #[test]
    fn ranks_fill_node_after_node() {
        let c = dgx(16).unwrap();
        assert_eq!((c.nodes(), c.node_of(7), c.node_of(8)), (2, 0, 1));
        assert_eq!([c.tier(3, 3), c.tier(0, 7), c.tier(7, 8)], [Tier::Local, Tier::ScaleUp, Tier::ScaleOut]);
        assert_eq!(c.nics_per_rank(), Some(1.0));
        assert_eq!(dgx(3).unwrap().nodes(), 1);
    }

    #[test]
    fn a_job_takes_racks_as_evenly_as_trays_allow() {
        let shape =
            |gpus| (Cluster::shipped("gb200-nvl72", gpus).nodes(), Cluster::shipped("gb200-nvl72", gpus).per_node());
        assert_eq!([shape(8), shape(72)], [(1, 72), (1, 72)]);
        assert_eq!([shape(128), shape(144), shape(256), shape(512)], [(2, 64), (2, 72), (4, 64), (8, 64)]);
    }

    /// A node by itself whose file has pods, and no network: nothing leaves them.
    #[test]
    fn pods_without_a_network_are_left_by_nobody() {
        let mut spec = ClusterSpec::find("h100-24k-roce").unwrap();
        (spec.scale_out, spec.nodes) = (None, 1);
        let c = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), 8).unwrap();
        let all: Vec<u32> = (0..8).collect();
        assert_eq!((c.uplink_share(&all), c.beyond_pods(&all)), (1.0, 0.0));
    }

    #[test]
    fn pods_narrow_what_leaves_them() {
        let c = Cluster::shipped("h100-24k-roce", 16384);
        let pod = 3072;
        assert_eq!(c.uplink_share(&[0, pod - 1]), 1.0);
        assert_eq!(c.uplink_share(&[0, pod]), 1.0 / 7.0);
        // A ring of seven members a pod leaves it once, which the uplinks carry.
        let ring: Vec<u32> = (0..14).map(|i| if i < 7 { 8 * i } else { pod + 8 * i }).collect();
        assert_eq!(c.uplink_share(&ring), 1.0);
        assert_eq!([c.beyond_pods(&[0, 8]), c.beyond_pods(&ring)], [0.0, 49.0]);
        // Eight rings, where whole nodes are members.
        let nodes: Vec<u32> = (0..56).chain(pod..pod + 56).collect();
        assert_eq!(c.uplink_share(&nodes), 1.0);
        assert_eq!(c.uplink_share(&[&nodes[..8], &nodes[56..64]].concat()), 1.0 / 7.0);
    }

    #[test]
    fn sockets_share_a_bridge() {
        let c = Cluster::shipped("l40s-pcie", 8);
        let rate = |members: &[u32]| c.bridge(members).map(|b| b.value() / 1e9);
        assert_eq!([rate(&[0, 3]), rate(&[0, 4])], [None, Some(5.5)]);
        assert_eq!(rate(&[0, 1, 2, 3, 4, 5, 6, 7]), Some(22.0));
    }

    #[test]
    fn dies_of_a_package_have_more_links() {
        let c = Cluster::shipped("frontier", 16);
        let rate = |members: &[u32]| c.slowest_peer(members).map(|rate| rate.value() / 1e9);
        assert_eq!(
            [rate(&[0, 1]), rate(&[1, 2]), rate(&[0, 1, 2]), rate(&[6, 7, 8, 9])].map(Option::unwrap),
            [148.0, 37.0, 37.0, 148.0]
        );
        assert_eq!([(2, 3), (3, 4)].map(|(a, b)| c.capacity(Link::Peer(a, b)).value()), [148e9, 37e9]);
        assert_eq!(Cluster::shipped("dgx-h100", 8).slowest_peer(&[0, 1]), None);
        let mut spec = c.spec.clone();
        spec.scale_up.package.as_mut().unwrap().gpus = 3;
        let why = spec.check("own.json").unwrap_err().to_string();
        assert!(why.contains("own.json: scale_up.package") && why.contains("packages of 3"), "{why}");
    }

    /// Two GPUs of a DGX-1 had the 128 GB/s of all six links between them, whatever the file said of one peer.
    #[test]
    fn a_ring_has_no_more_than_joins_its_members() {
        let c = Cluster::shipped("v100-dgx1", 8);
        let ring = |members: &[u32]| {
            let up = &c.spec.scale_up;
            up.ring(8, members.len() as u32, c.slowest_peer(members)).value() / 1e9
        };
        let found = [&[0, 1][..], &[0, 1, 2, 3], &[0, 1, 2, 3, 4, 5, 6, 7]].map(ring);
        assert!(found.iter().zip([28.4, 85.2, 128.0]).all(|(a, b)| (a - b).abs() < 1e-9), "{found:?}");
        // Across the quads a seventh of what rings of all eight have.
        assert!((ring(&[0, 4]) - 128.0 / 7.0).abs() < 1e-9 && c.peer(0, 4).unwrap().value() == 8e9);
        // No packages, and links that are no multiple of the peers.
        let mut up = c.spec.scale_up.clone();
        up.package = None;
        let plain = |gpus, members| up.ring(gpus, members, Some(BytesPerSec::new(10e9))).value() / 1e9;
        assert_eq!([plain(8, 2), plain(8, 4), plain(5, 5)], [10.0, 30.0, 40.0]);
    }

    #[test]
    fn paths_go_as_high_as_they_have_to() {
        let c = Cluster::shipped("h100-24k-roce", 16384);
        let nic = |node, nic| (Link::NicOut { node, nic }, Link::NicIn { node, nic });
        assert_eq!(c.path(3, 3).links, []);
        assert_eq!(c.path(0, 7).links, [Link::Out(0), Link::In(7)]);
        assert_eq!(c.path(0, 13).links, [nic(0, 0).0, nic(1, 5).1]);
        let far = c.path(0, 3072 + 5).links;
        let (up, down) = (Link::Up { tier: 0, pod: 0, rail: 0 }, Link::Down { tier: 0, pod: 1, rail: 0 });
        assert_eq!(far, [nic(0, 0).0, up, down, nic(384, 5).1]);
        assert!((c.capacity(up).value() - 3072.0 * 48.5e9 / 7.0).abs() < 1.0);
        assert_eq!(c.path(0, 13).latency, c.spec.scale_out.as_ref().unwrap().latency.value);
        // Two GPUs of the A100 nodes with four NICs share one.
        let shared = Cluster::shipped("a100-4x200", 16);
        assert_eq!([shared.nic_of(0), shared.nic_of(1), shared.nic_of(2), shared.nic_of(15)], [0, 0, 1, 3]);
        let bridged = Cluster::shipped("l20-pcie", 8);
        assert!(bridged.path(0, 4).links.contains(&Link::Bridge { node: 0, socket: 0 }));
        assert!(!bridged.path(4, 5).links.iter().any(|l| l.class() == LinkClass::Bridge));
    }

    #[test]
    fn rails_change_inside_the_node() {
        let mut c = Cluster::shipped("dgx-h100", 16);
        let out = c.spec.scale_out.as_mut().unwrap();
        (out.rails, out.pxn) = (true, true);
        let links = c.path(1, 12).links;
        let rail = [Link::NicOut { node: 0, nic: 4 }, Link::NicIn { node: 1, nic: 4 }];
        assert_eq!(links, [Link::Out(1), Link::In(4), rail[0], rail[1]]);
        assert_eq!(c.path(4, 12).links, rail);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_a_remedy() {
        assert!(dgx(0).unwrap_err().to_string().contains("at least 1"));
        assert!(dgx(20).unwrap_err().to_string().contains("use 16 or 24"));
        let (cpu, core) = (ClusterSpec::find("local-cpu").unwrap(), GpuSpec::find("cpu-core").unwrap());
        assert!(Cluster::new(&cpu, &core, 257).unwrap_err().to_string().contains("256 or fewer"));
        let h200 = GpuSpec::find("h200-sxm5").unwrap();
        assert!(Cluster::new(&cpu, &h200, 1).unwrap_err().to_string().contains("cpu-core, not h200-sxm5"));
    }
}
