//! The bytes that an all-to-all puts on every link, counted and not listed: 100,000 members make 10^10 flows.
//!
//! The slow twin is [`streams`](super::streams) with a flow for every two members.

use crate::cluster::{Cluster, Link};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Bytes over each link where every member sends `each` bytes to every other.
pub fn loads(cluster: &Cluster, members: &[u32], each: f64) -> BTreeMap<Link, f64> {
    let mut pairs = Pairs::new(cluster, members);
    pairs.inside();
    if pairs.on_node.len() > 1 {
        pairs.nics();
        if cluster.spec.graph.is_some() { pairs.wires() } else { pairs.pods() }
    }
    pairs
        .crossing
        .into_iter()
        .filter(|(_, pairs)| *pairs > 0)
        .map(|(link, pairs)| (link, pairs as f64 * each))
        .collect()
}

type Counts<K> = FxHashMap<K, u64>;

struct Pairs<'a> {
    cluster: &'a Cluster,
    members: &'a [u32],
    /// Members by node, by NIC of a node, and by rail.
    on_node: BTreeMap<u32, Vec<u32>>,
    on_nic: Counts<(u32, u32)>,
    on_rail: BTreeMap<u32, u64>,
    /// Whether a message changes rails inside the node, see [`Cluster::path`].
    detours: bool,
    /// Ordered pairs of members whose way crosses each link.
    crossing: Counts<Link>,
}

impl<'a> Pairs<'a> {
    fn new(cluster: &'a Cluster, members: &'a [u32]) -> Pairs<'a> {
        let (mut on_node, mut on_nic, mut on_rail) = (BTreeMap::new(), Counts::default(), BTreeMap::new());
        for &m in members {
            let (node, nic) = (cluster.node_of(m), cluster.nic_of(m));
            on_node.entry(node).or_insert_with(Vec::new).push(m);
            *on_nic.entry((node, nic)).or_default() += 1;
            *on_rail.entry(nic).or_default() += 1;
        }
        let detours = cluster.spec.scale_out.as_ref().is_some_and(|out| out.rails && out.pxn);
        Pairs { cluster, members, on_node, on_nic, on_rail, detours, crossing: Counts::default() }
    }

    fn add(&mut self, link: Link, pairs: u64) {
        *self.crossing.entry(link).or_default() += pairs;
    }

    fn total(&self) -> u64 {
        self.members.len() as u64
    }

    /// Members on other nodes.
    fn away(&self, node: u32) -> u64 {
        self.total() - self.on_node[&node].len() as u64
    }

    /// Members on other nodes, on a rail.
    fn away_on(&self, node: u32, rail: u32) -> u64 {
        self.on_rail[&rail] - self.on_nic.get(&(node, rail)).copied().unwrap_or(0)
    }

    fn inside(&mut self) {
        for node in self.on_node.values().cloned().collect::<Vec<_>>() {
            for (&a, &b) in node.iter().flat_map(|a| node.iter().map(move |b| (a, b))) {
                self.cluster.path(a, b).links.into_iter().for_each(|link| self.add(link, 1));
            }
        }
    }

    /// Counts the links out of nodes and into them, and those to the GPU on the right rail before that.
    fn nics(&mut self) {
        let rails: Vec<u32> = self.on_rail.keys().copied().collect();
        for (node, here) in self.on_node.clone() {
            let away = self.away(node);
            for &m in &here {
                let nic = self.cluster.nic_of(m);
                self.add(Link::NicIn { node, nic }, away);
                if !self.detours {
                    self.add(Link::NicOut { node, nic }, away);
                    continue;
                }
                for &rail in &rails {
                    let to = self.away_on(node, rail);
                    self.add(Link::NicOut { node, nic: rail }, to);
                    if rail != nic {
                        let proxy = self.cluster.ranks_on(node).find(|&r| self.cluster.nic_of(r) == rail).unwrap_or(m);
                        self.add(Link::Out(m), to);
                        self.add(Link::In(proxy), to);
                    }
                }
            }
        }
    }

    /// Counts the uplinks of pods: a pair crosses those of a tier unless both ends are in one pod, and on one rail
    /// where the tier has rails.
    fn pods(&mut self) {
        let rails = self.cluster.spec.scale_out.as_ref().is_some_and(|out| out.rails);
        for (tier, pod) in (0u32..).zip(&self.cluster.spec.pods) {
            let split = rails && tier == 0;
            // A message that changes rails inside the node leaves it on the rail of the other end.
            let apart = split && !self.detours;
            let key = |m: u32| (m / pod.gpus, if apart { self.cluster.nic_of(m) } else { 0 });
            let (mut in_pod, mut near) = (Counts::default(), Counts::default());
            for &m in self.members {
                *in_pod.entry(key(m)).or_default() += 1u64;
                *near.entry((self.cluster.node_of(m), key(m))).or_default() += 1u64;
            }
            let mut beyond: Vec<(Link, Link, u64)> = vec![];
            for &m in self.members {
                let (node, at) = (self.cluster.node_of(m), key(m));
                let others = self.away(node) - (in_pod[&at] - near[&(node, at)]);
                let rail = if split { self.cluster.nic_of(m) } else { 0 };
                let down = Link::Down { tier, pod: at.0, rail };
                beyond.push((Link::Up { tier, pod: at.0, rail }, down, others));
            }
            for (up, down, pairs) in beyond {
                self.add(down, pairs);
                if !(split && self.detours) {
                    self.add(up, pairs);
                }
            }
            if split && self.detours {
                self.rails_up(pod.gpus);
            }
        }
    }

    /// Counts the links out of the pods of the first tier, each pair on the rail of its receiver.
    fn rails_up(&mut self, gpus: u32) {
        let (mut in_pod, mut near) = (Counts::default(), Counts::default());
        for &m in self.members {
            let at = (m / gpus, self.cluster.nic_of(m));
            *in_pod.entry(at).or_default() += 1u64;
            *near.entry((self.cluster.node_of(m), at)).or_default() += 1u64;
        }
        let rails: Vec<u32> = self.on_rail.keys().copied().collect();
        for (&m, &rail) in self.members.iter().flat_map(|m| rails.iter().map(move |r| (m, r))) {
            let (node, pod) = (self.cluster.node_of(m), m / gpus);
            let here = near.get(&(node, (pod, rail))).copied().unwrap_or(0);
            let inside = in_pod.get(&(pod, rail)).copied().unwrap_or(0) - here;
            self.add(Link::Up { tier: 0, pod, rail }, self.away_on(node, rail) - inside);
        }
    }

    /// Counts the wires of a graph between nodes: all pairs of two nodes go the same way.
    fn wires(&mut self) {
        let nodes: Vec<(u32, u64)> = self.on_node.values().map(|here| (here[0], here.len() as u64)).collect();
        for (&(a, from), &(b, to)) in
            nodes.iter().flat_map(|a| nodes.iter().map(move |b| (a, b))).filter(|(a, b)| a != b)
        {
            for link in self.cluster.path(a, b).links {
                if let Link::Wire { .. } = link {
                    self.add(link, from * to);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::streams::{loads as listed, streams};
    use crate::collective::{Algorithm, Operation};
    use crate::plan::CollectiveKind;
    use crate::spec::{ClusterSpec, GpuSpec, GraphShape};

    /// Every link carries as much as a flow for every two members puts there: trees of pods with rails and without, NICs
    /// that are shared, sockets, rails that are changed inside nodes, racks that are used in part, and graphs.
    #[test]
    fn counted_as_listed() {
        let mut rails = ClusterSpec::find("alibaba-hpn-15k").unwrap();
        rails.pods[0].gpus = 16;
        let mut direct = rails.clone();
        direct.scale_out.as_mut().unwrap().pxn = false;
        let mut three = ClusterSpec::find("h100-100k").unwrap();
        three.pods = [16, 32, 64].map(|gpus| crate::spec::Pod { gpus, ..three.pods[0].clone() }).into();
        let torus = ClusterSpec::find("tpu-v4-pod").unwrap();
        let mut dragonfly =
            ClusterSpec { graph: torus.graph.clone(), nodes: 8, ..ClusterSpec::find("dgx-h100").unwrap() };
        dragonfly.graph.as_mut().unwrap().shape = GraphShape::Dragonfly { groups: 4, routers: 2, hosts: 1 };
        let named = ["dgx-h100", "a100-4x200", "l20-pcie", "gb200-nvl72"].map(|n| ClusterSpec::find(n).unwrap());
        let named = named.into_iter().zip([32, 16, 8, 144]);
        for (spec, gpus) in named.chain([(rails, 64), (direct, 64), (three, 128), (torus, 96), (dragonfly, 64)]) {
            let cluster = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), gpus).unwrap();
            let all: Vec<u32> = (0..gpus).collect();
            let some: Vec<u32> = all.iter().copied().filter(|m| m % 3 != 1 && m % 8 != 5).collect();
            for members in [all, some] {
                let op = Operation::Whole(CollectiveKind::AllToAll);
                let n = members.len() as f64;
                let slow = listed(&streams(&cluster, Algorithm::Pairwise, op, &members, n));
                let fast = loads(&cluster, &members, 1.0);
                assert_eq!(fast, slow, "{} {gpus}", spec.name);
            }
        }
    }
}
