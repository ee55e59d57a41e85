//! The flows that a collective sends over links in its steady state, for whoever lets them share the links.
//!
//! A chunked collective keeps all its hops busy at once, so what counts for bandwidth is how much goes over each link in
//! all; what it takes to fill the pipeline is the latency of the analytic model.

use super::{Algorithm, Operation, pat, tree};
use crate::cluster::{Cluster, Link};
use crate::plan::CollectiveKind;
use std::collections::BTreeMap;

/// Bytes that flow over a chain of links.
#[derive(Debug, Clone, PartialEq)]
pub struct Stream {
    pub links: Vec<Link>,
    pub bytes: f64,
}

/// The flows of a collective of `bytes` (of the full buffer) among the members.
pub fn streams(cluster: &Cluster, algorithm: Algorithm, op: Operation, members: &[u32], bytes: f64) -> Vec<Stream> {
    let flows = Flows { cluster, members, sent: BTreeMap::new(), extra: vec![] };
    let n = members.len() as f64;
    let sent = match op {
        Operation::Whole(CollectiveKind::AllReduce) => 2.0 * bytes * (n - 1.0) / n,
        Operation::Whole(_) => bytes * (n - 1.0) / n,
        Operation::Broadcast | Operation::SendRecv => bytes,
    };
    if let (Algorithm::Ring, Some(block)) = (algorithm, cluster.block(members)) {
        let flows = block.streams(members, sent);
        return flows.into_iter().map(|(links, bytes)| Stream { links, bytes }).collect();
    }
    match (algorithm, op) {
        (_, Operation::SendRecv) => flows.cyclic(bytes),
        (Algorithm::Pairwise, _) => flows.pairwise(bytes / n),
        (Algorithm::Tree, _) => flows.trees(bytes),
        (Algorithm::Nvls | Algorithm::NvlsTree, _) => flows.switch(bytes),
        (Algorithm::Pat, _) => flows.pat(bytes / n),
        (Algorithm::Hierarchical, _) => flows.hierarchical(bytes),
        (Algorithm::Ring, _) => flows.rings(sent, op == Operation::Broadcast),
    }
}

struct Flows<'a> {
    cluster: &'a Cluster,
    members: &'a [u32],
    sent: BTreeMap<(u32, u32), f64>,
    extra: Vec<Stream>,
}

impl Flows<'_> {
    fn send(&mut self, from: u32, to: u32, bytes: f64) {
        if from != to && bytes > 0.0 {
            *self.sent.entry((from, to)).or_insert(0.0) += bytes;
        }
    }

    /// Adds a flow to the next member of a chain or ring on `node`. Where every peer has links of its own, other rings
    /// have other neighbours, and together they go over all of them.
    fn onward(&mut self, node: &[u32], [from, to]: [u32; 2], bytes: f64) {
        match self.cluster.spec.scale_up.per_peer {
            None => self.send(from, to, bytes),
            Some(_) => {
                let each = bytes / (node.len() as f64 - 1.0);
                node.iter().for_each(|&peer| self.send(from, peer, each));
            }
        }
    }

    fn done(self) -> Vec<Stream> {
        let stream =
            |(&(from, to), &bytes): (&(u32, u32), &f64)| Stream { links: self.cluster.path(from, to).links, bytes };
        self.sent.iter().map(stream).chain(self.extra.iter().cloned()).collect()
    }

    /// The members of each node, node by node.
    fn nodes(&self) -> Vec<Vec<u32>> {
        let mut nodes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        self.members.iter().for_each(|&m| nodes.entry(self.cluster.node_of(m)).or_default().push(m));
        nodes.into_values().collect()
    }

    /// Number of channels that leave nodes by different NICs: as many as the smallest node has members.
    fn channels(nodes: &[Vec<u32>]) -> usize {
        if nodes.len() < 2 { 1 } else { nodes.iter().map(Vec::len).min().unwrap_or(1) }
    }

    /// The order in which a channel goes through a node. Every second node is walked backwards, so that a ring enters a
    /// node on the rail on which it left the one before.
    fn walk(node: &[u32], at: usize, channel: usize) -> Vec<u32> {
        let n = node.len();
        let mut order: Vec<u32> = (0..n).map(|i| node[(channel + i) % n]).collect();
        if at % 2 == 1 {
            order.reverse();
        }
        order
    }

    /// Rings: every member sends `bytes` to the next. An open ring ends before it would close.
    fn rings(mut self, bytes: f64, open: bool) -> Vec<Stream> {
        let nodes = self.nodes();
        let channels = Self::channels(&nodes);
        let of_node: BTreeMap<u32, &Vec<u32>> = nodes.iter().map(|n| (self.cluster.node_of(n[0]), n)).collect();
        for channel in 0..channels {
            let order: Vec<u32> = nodes.iter().enumerate().flat_map(|(at, n)| Self::walk(n, at, channel)).collect();
            let hops = if open { order.len() - 1 } else { order.len() };
            for pair in (0..hops).map(|i| [order[i], order[(i + 1) % order.len()]]) {
                let [from, to] = pair.map(|rank| self.cluster.node_of(rank));
                match of_node.get(&from).filter(|_| from == to) {
                    Some(node) => self.onward(node, pair, bytes / channels as f64),
                    None => self.send(pair[0], pair[1], bytes / channels as f64),
                }
            }
        }
        self.done()
    }

    /// PAT: every member sends parts of `part` bytes to the members that are powers of two further on.
    fn pat(mut self, part: f64) -> Vec<Stream> {
        let n = self.members.len();
        for (apart, parts) in pat::sends(n) {
            (0..n).for_each(|i| self.send(self.members[i], self.members[(i + apart) % n], part * parts as f64));
        }
        self.done()
    }

    fn cyclic(mut self, bytes: f64) -> Vec<Stream> {
        let n = self.members.len();
        (0..n).for_each(|i| self.send(self.members[i], self.members[(i + 1) % n], bytes));
        self.done()
    }

    fn pairwise(mut self, bytes: f64) -> Vec<Stream> {
        for &from in self.members {
            self.members.iter().for_each(|&to| self.send(from, to, bytes));
        }
        self.done()
    }

    /// Chains inside nodes, and two trees between their heads; all that goes up comes down.
    fn trees(mut self, bytes: f64) -> Vec<Stream> {
        let nodes = self.nodes();
        let channels = Self::channels(&nodes);
        let share = bytes / channels as f64;
        for channel in 0..channels {
            let chains: Vec<Vec<u32>> = nodes.iter().map(|n| Self::walk(n, 0, channel)).collect();
            for (chain, pair) in chains.iter().flat_map(|chain| chain.windows(2).map(move |pair| (chain, pair))) {
                self.onward(chain, [pair[1], pair[0]], share);
                self.onward(chain, [pair[0], pair[1]], share);
            }
            for parents in [tree::first(nodes.len()), tree::second(nodes.len())] {
                for (child, parent) in parents.iter().enumerate().filter_map(|(c, p)| Some((c, (*p)?))) {
                    self.send(chains[child][0], chains[parent][0], share / 2.0);
                    self.send(chains[parent][0], chains[child][0], share / 2.0);
                }
            }
        }
        self.done()
    }

    /// The switch adds up: a member hands it its whole buffer and gets the sum of its part; hands it that, and gets all.
    /// Between nodes, trees of the parts.
    fn switch(mut self, bytes: f64) -> Vec<Stream> {
        let nodes = self.nodes();
        for node in &nodes {
            let port = bytes * (1.0 + 1.0 / node.len() as f64);
            let both = |&m: &u32| [Link::Out(m), Link::In(m)].map(|link| Stream { links: vec![link], bytes: port });
            self.extra.extend(node.iter().flat_map(both));
        }
        let rails = nodes.iter().map(Vec::len).min().unwrap_or(1);
        let share = bytes / rails as f64;
        for rail in 0..rails {
            for parents in [tree::first(nodes.len()), tree::second(nodes.len())] {
                for (child, parent) in parents.iter().enumerate().filter_map(|(c, p)| Some((c, (*p)?))) {
                    self.send(nodes[child][rail], nodes[parent][rail], share / 2.0);
                    self.send(nodes[parent][rail], nodes[child][rail], share / 2.0);
                }
            }
        }
        self.done()
    }

    /// Reduce-scatter inside nodes, all-reduce of the parts between nodes, all-gather inside: rings all of them.
    fn hierarchical(mut self, bytes: f64) -> Vec<Stream> {
        let nodes = self.nodes();
        for node in &nodes {
            let g = node.len();
            let inside = 2.0 * bytes * (g as f64 - 1.0) / g as f64;
            (0..g).for_each(|i| self.onward(node, [node[i], node[(i + 1) % g]], inside));
        }
        let (k, rails) = (nodes.len(), nodes.iter().map(Vec::len).min().unwrap_or(1));
        let between = 2.0 * bytes / rails as f64 * (k as f64 - 1.0) / k as f64;
        for (rail, i) in (0..rails).flat_map(|rail| (0..k).map(move |i| (rail, i))) {
            self.send(nodes[i][rail], nodes[(i + 1) % k][rail], between);
        }
        self.done()
    }
}

/// Bytes over each link, all streams together.
pub fn loads(streams: &[Stream]) -> BTreeMap<Link, f64> {
    let mut loads = BTreeMap::new();
    for stream in streams {
        stream.links.iter().for_each(|&link| *loads.entry(link).or_insert(0.0) += stream.bytes);
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dgx(gpus: u32) -> Cluster {
        Cluster::shipped("dgx-h100", gpus)
    }

    fn of(gpus: u32, algorithm: Algorithm, op: Operation) -> BTreeMap<Link, f64> {
        let members: Vec<u32> = (0..gpus).collect();
        loads(&streams(&dgx(gpus), algorithm, op, &members, 1024.0))
    }

    const AR: Operation = Operation::Whole(CollectiveKind::AllReduce);

    /// 2 b (n - 1) / n over every port of a ring; over every NIC an eighth of it, the node's eight rings having one each.
    #[test]
    fn rings_load_every_port_alike() {
        let inside = of(8, Algorithm::Ring, AR);
        assert!(inside.values().all(|&b| (b - 2.0 * 1024.0 * 7.0 / 8.0).abs() < 1e-9) && inside.len() == 16);
        for gpus in [16, 32] {
            let n = f64::from(gpus);
            let nic = 2.0 * 1024.0 * (n - 1.0) / n / 8.0;
            let loads = of(gpus, Algorithm::Ring, AR);
            let nics: Vec<_> = loads.iter().filter(|(l, _)| matches!(l, Link::NicOut { .. })).collect();
            assert_eq!(nics.len(), gpus as usize);
            assert!(nics.iter().all(|(_, b)| (**b - nic).abs() < 1e-9));
        }
    }

    /// An inner vertex of a tree sends to one parent and two children half of the data: 3/2, of which a NIC has an eighth;
    /// as a leaf of the other tree 1/2 more.
    #[test]
    fn trees_load_a_nic_with_all_data_twice_at_most() {
        let loads = of(64, Algorithm::Tree, AR);
        let nic = |l: &Link| matches!(l, Link::NicOut { .. });
        let most = loads.iter().filter(|(l, _)| nic(l)).map(|(_, b)| *b).fold(0.0, f64::max);
        assert_eq!(most, 2.0 * 1024.0 / 8.0);
        // Two nodes: each has the other as parent or child, once in every tree.
        let two = of(16, Algorithm::Tree, AR);
        assert!(two.iter().filter(|(l, _)| nic(l)).all(|(_, b)| *b == 1024.0 / 8.0));
    }

    /// b (n - g) / n out of every NIC, b (g - 1) / n out of every port.
    #[test]
    fn all_to_all_sends_a_part_to_everyone() {
        let loads = of(32, Algorithm::Pairwise, Operation::Whole(CollectiveKind::AllToAll));
        assert_eq!(loads[&Link::NicOut { node: 2, nic: 3 }], 1024.0 * 24.0 / 32.0);
        assert_eq!(loads[&Link::Out(9)], 1024.0 * 7.0 / 32.0);
    }

    /// 2 (g - 1) / g b inside, 2 (k - 1) / k b / g between.
    #[test]
    fn hierarchical_sends_little_between_nodes() {
        let loads = of(32, Algorithm::Hierarchical, AR);
        assert_eq!(loads[&Link::Out(5)], 2.0 * 1024.0 * 7.0 / 8.0);
        assert_eq!(loads[&Link::NicOut { node: 1, nic: 5 }], 2.0 * 0.75 * 1024.0 / 8.0);
    }

    #[test]
    fn the_switch_takes_a_buffer_and_a_part() {
        assert_eq!(of(8, Algorithm::Nvls, AR)[&Link::Out(3)], 1024.0 * 9.0 / 8.0);
    }
}
