//! How long NCCL takes: point to point by its channel rule, collectives as the best of its algorithms and
//! protocols. Constants and rules are those of NCCL 2.30.7 (src/graph/tuning.cc, src/graph/topo.h,
//! src/enqueue.cc, src/graph/paths.cc); bandwidths are those that clusters were measured to reach.
//!
//! * `sends`: the channel rule, a send alone and one to every peer.
//! * `shape`: where the members of a group are.
//! * `tuner`: rings, trees, parallel aggregated trees and switches by the tuner's formulas.
//!
//! Not here: what switches of the network add up (CollNet, SHARP), which takes a plugin.
//! * `fitted`: what was fitted on tables of measurements.

mod fitted;
mod sends;
mod shape;
mod tuner;

use super::{Algorithm, Operation, Protocol, rounds, wires};
use crate::cluster::Cluster;
use crate::plan::CollectiveKind;
use crate::spec::{Architecture, CollectiveOp, Origin, Provenance, ScaleOut, StackSpec};
use crate::units::{Bytes, Seconds};
pub use fitted::{FITTED, Fitted, Inside, ProtocolFit};
pub use sends::{Comm, Shared};
use shape::Shape;
pub use shape::tree_uplinks;
use tuner::{Course, Tuner};

/// A duration, split into what does not depend on the bytes and what does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkTime {
    pub latency: Seconds,
    pub transfer: Seconds,
    /// The part of its ports that the transfer fills while nothing else does: less than 1 where something else holds it
    /// up, as the channel of a send between nodes.
    pub fills: f64,
    pub provenance: Provenance,
    /// Relative standard deviation of the whole.
    pub rel_sd: f64,
}

impl LinkTime {
    pub fn total(&self) -> Seconds {
        self.latency + self.transfer
    }

    /// The time of a message between nodes beside others to the same peer in one group, all of them `times` as large as
    /// it. NCCL has one message after the other on the channels of a peer (src/enqueue.cc: a batch of a channel has no two
    /// of them), and two channels between nodes: together they take, and fill, what one as large as all does.
    pub fn in_turns(self, times: f64) -> LinkTime {
        LinkTime { transfer: self.transfer * times, fills: self.fills / times, ..self }
    }

    fn nothing() -> LinkTime {
        let (latency, transfer) = (Seconds::ZERO, Seconds::ZERO);
        LinkTime { latency, transfer, fills: 1.0, provenance: Provenance::Measured, rel_sd: 0.0 }
    }
}

/// Relative standard deviations: root mean squares of the errors that tests/links.rs finds.
const SPREAD_INSIDE: f64 = 0.12;
const SPREAD_BETWEEN: f64 = 0.25;
const SPREAD_SENDS: f64 = 0.2;

fn provenance(origin: Origin) -> Provenance {
    match origin {
        Origin::Measured | Origin::Published => Provenance::Interpolated,
        Origin::Derived => Provenance::Extrapolated,
        Origin::Assumed => Provenance::Assumed,
    }
}

/// A send and the receive that meets it, between two ranks of a communicator.
pub fn p2p(cluster: &Cluster, stack: &StackSpec, bytes: Bytes, pair: [u32; 2], comm: Comm, shared: Shared) -> LinkTime {
    Nccl::new(cluster, stack).p2p(bytes, pair, comm, shared)
}

/// One way to do an operation, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    pub algorithm: Algorithm,
    pub protocol: Protocol,
    pub time: LinkTime,
}

/// Every way that NCCL has, and the hierarchical one that it has not, which stands last; `bytes` are those of the full
/// buffer. Empty for a member alone.
pub fn choices(cluster: &Cluster, stack: &StackSpec, op: Operation, members: &[u32], bytes: Bytes) -> Vec<Choice> {
    Nccl::new(cluster, stack).choices(op, members, bytes)
}

/// A collective of `members`; `bytes` are those of the full buffer, as for [`super::sent_bytes`].
pub fn collective(
    cluster: &Cluster,
    stack: &StackSpec,
    kind: CollectiveKind,
    members: &[u32],
    bytes: Bytes,
) -> LinkTime {
    Nccl::new(cluster, stack).collective(kind, members, bytes)
}

/// As [`collective`], and by which algorithm.
pub fn collective_by(
    cluster: &Cluster,
    stack: &StackSpec,
    kind: CollectiveKind,
    members: &[u32],
    bytes: Bytes,
) -> (LinkTime, Algorithm) {
    Nccl::new(cluster, stack).collective_by(kind, members, bytes)
}

/// The way that NCCL would choose; none for a member alone.
pub fn chosen(
    cluster: &Cluster,
    stack: &StackSpec,
    kind: CollectiveKind,
    members: &[u32],
    bytes: Bytes,
) -> Option<Choice> {
    Nccl::new(cluster, stack).chosen(kind, members, bytes)
}

/// Whether a ring of `members` has less inside nodes than their NICs carry.
pub fn is_narrow_inside(cluster: &Cluster, stack: &StackSpec, members: &[u32]) -> bool {
    let library = Nccl::new(cluster, stack);
    Tuner::new(cluster, stack, library.fitted, &Shape::of(cluster, members)).is_narrow_inside()
}

/// Thread blocks that a collective over several nodes has at most, a channel each: every ring leaves a node by a NIC of
/// its own, and has two channels, or four of a NIC of more than 45 GB/s (src/graph/connect.cc; 2 with one NIC for eight
/// GPUs: github issue NVIDIA/nccl-tests#133). Said of nodes whose GPUs share NICs: where each has its own that would be 16, and
/// what kernels lose beside collectives there is measured, see `collective_ctas` of a stack. All-to-alls are sends.
pub fn channels_between(cluster: &Cluster, kind: CollectiveKind, nodes: usize) -> u16 {
    let rings = nodes > 1 && kind != CollectiveKind::AllToAll;
    let shared = |out: &&ScaleOut| rings && out.nics_per_node < cluster.spec.gpus_per_node;
    let Some(out) = cluster.spec.scale_out.as_ref().filter(shared) else { return u16::MAX };
    let each = if out.raw.value.value() > 45e9 { 4 } else { 2 };
    (each * out.nics_per_node).min(u32::from(u16::MAX)) as u16
}

/// The library on a cluster.
#[derive(Clone, Copy)]
pub struct Nccl<'a> {
    pub cluster: &'a Cluster,
    pub stack: &'a StackSpec,
    pub fitted: &'a Fitted,
}

impl<'a> Nccl<'a> {
    pub fn new(cluster: &'a Cluster, stack: &'a StackSpec) -> Nccl<'a> {
        Nccl { cluster, stack, fitted: &FITTED }
    }

    /// As [`p2p`].
    pub fn p2p(&self, bytes: Bytes, pair: [u32; 2], comm: Comm, shared: Shared) -> LinkTime {
        sends::p2p(self, bytes, pair, comm, shared)
    }

    /// As [`choices`].
    pub fn choices(&self, op: Operation, members: &[u32], bytes: Bytes) -> Vec<Choice> {
        self.choices_of(op, members, &Shape::of(self.cluster, members), bytes)
    }

    fn choices_of(&self, op: Operation, members: &[u32], shape: &Shape, bytes: Bytes) -> Vec<Choice> {
        let mut all = self.choices_by_nics(op, members, shape, bytes);
        for Choice { algorithm, time, .. } in all.iter_mut().filter(|_| shape.nodes > 1) {
            time.transfer = time.transfer.max(wires::busy(self.cluster, op, *algorithm, members, bytes));
        }
        all
    }

    /// The same where nothing lies between the NICs of two nodes.
    fn choices_by_nics(&self, op: Operation, members: &[u32], shape: &Shape, bytes: Bytes) -> Vec<Choice> {
        let Nccl { cluster, stack, fitted } = *self;
        if shape.n <= 1 {
            return vec![];
        }
        let tuner = Tuner::new(cluster, stack, fitted, shape);
        let one = |algorithm, protocol| move |time| Choice { algorithm, protocol, time };
        if let (Operation::Whole(kind), Architecture::Cpu) = (op, cluster.gpu.architecture) {
            let algorithm = if kind == CollectiveKind::AllToAll { Algorithm::Pairwise } else { Algorithm::Ring };
            return vec![one(algorithm, Protocol::Simple)(in_rounds(cluster, stack, kind, shape.n, bytes))];
        }
        match op {
            Operation::SendRecv => {
                let n = members.len();
                let comm = Comm { size: shape.n, nodes: shape.nodes };
                let pair = |i: usize| [members[i], members[(i + 1) % n]];
                let leaving = cluster.leaving((0..n).map(pair));
                let send = |pair: [u32; 2]| {
                    let uplinks = cluster.uplink_share_of_send(pair, &leaving);
                    self.p2p(bytes, pair, comm, Shared { flows: 1.0, uplinks })
                };
                let slowest = (0..n).map(pair).map(send).max_by(|a, b| a.total().value().total_cmp(&b.total().value()));
                slowest.map(one(Algorithm::Pairwise, Protocol::Simple)).into_iter().collect()
            }
            Operation::Whole(CollectiveKind::AllToAll) => {
                vec![one(Algorithm::Pairwise, Protocol::Simple)(sends::all_to_all(self, shape, bytes))]
            }
            Operation::Broadcast => tuner.ring(&Course::broadcast(shape), bytes),
            Operation::Whole(kind) => {
                let mut all = tuner.ring(&Course::of(kind, shape), bytes);
                if kind == CollectiveKind::AllReduce {
                    all.extend(tuner.tree(bytes));
                    let switch = if shape.nodes > 1 { Algorithm::NvlsTree } else { Algorithm::Nvls };
                    all.extend(tuner.switch(bytes).map(one(switch, Protocol::Simple)));
                    all.extend(tuner.hierarchical(bytes).map(one(Algorithm::Hierarchical, Protocol::Simple)));
                } else {
                    all.extend(tuner.pat(bytes).map(one(Algorithm::Pat, Protocol::Simple)));
                }
                all
            }
        }
    }

    /// As [`collective`].
    pub fn collective(&self, kind: CollectiveKind, members: &[u32], bytes: Bytes) -> LinkTime {
        self.collective_by(kind, members, bytes).0
    }

    /// As [`collective_by`].
    pub fn collective_by(&self, kind: CollectiveKind, members: &[u32], bytes: Bytes) -> (LinkTime, Algorithm) {
        let shape = Shape::of(self.cluster, members);
        let Some(best) = self.chosen_of(kind, members, &shape, bytes) else {
            return (LinkTime::nothing(), Algorithm::Ring);
        };
        (measured(self.cluster, kind, &shape, bytes).unwrap_or(best.time), best.algorithm)
    }

    /// As [`chosen`].
    pub fn chosen(&self, kind: CollectiveKind, members: &[u32], bytes: Bytes) -> Option<Choice> {
        self.chosen_of(kind, members, &Shape::of(self.cluster, members), bytes)
    }

    fn chosen_of(&self, kind: CollectiveKind, members: &[u32], shape: &Shape, bytes: Bytes) -> Option<Choice> {
        let op = Operation::Whole(kind);
        let mut best = fastest(self.choices_by_nics(op, members, shape, bytes))?;
        if shape.nodes > 1 {
            let busy = wires::busy(self.cluster, op, best.algorithm, members, bytes);
            best.time.transfer = best.time.transfer.max(busy);
        }
        Some(best)
    }
}

/// The fastest of the ways that NCCL has itself.
fn fastest(ways: Vec<Choice>) -> Option<Choice> {
    let own = ways.into_iter().filter(|way| way.algorithm != Algorithm::Hierarchical);
    own.min_by(|a, b| a.time.total().value().total_cmp(&b.time.total().value()))
}

/// What was measured on this cluster of this collective among as many members on as many nodes, if it was.
fn measured(cluster: &Cluster, kind: CollectiveKind, shape: &Shape, bytes: Bytes) -> Option<LinkTime> {
    let op = match kind {
        CollectiveKind::AllReduce => CollectiveOp::AllReduce,
        CollectiveKind::AllGather => CollectiveOp::AllGather,
        CollectiveKind::ReduceScatter => CollectiveOp::ReduceScatter,
        CollectiveKind::AllToAll => CollectiveOp::AllToAll,
    };
    let mut known = cluster.spec.measured.iter();
    let found = known.find(|m| (m.op, m.gpus, m.nodes) == (op, shape.n, shape.nodes))?;
    let total = Seconds::new(found.at(bytes.value()));
    let latency = found.lines.iter().map(|l| l.latency).fold(total, Seconds::min);
    let provenance = Provenance::Measured;
    Some(LinkTime { latency, transfer: total - latency, fills: 1.0, provenance, rel_sd: found.rel_sd })
}

/// Threads play the rounds one by one.
fn in_rounds(cluster: &Cluster, stack: &StackSpec, kind: CollectiveKind, n: u32, bytes: Bytes) -> LinkTime {
    let up = &cluster.spec.scale_up;
    let rounds = rounds(kind, n as usize).len() as f64;
    LinkTime {
        latency: (stack.p2p_latency.value + up.latency.value) * rounds,
        transfer: bytes * (rounds / f64::from(n)) / up.bandwidth.value,
        fills: 1.0,
        provenance: provenance(up.bandwidth.provenance),
        rel_sd: SPREAD_INSIDE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ClusterSpec, GpuSpec};

    pub fn at(name: &str, gpus: u32) -> (Cluster, StackSpec) {
        let stack = if name == "local-cpu" { "cpu" } else { "nccl-fa2" };
        (Cluster::shipped(name, gpus), StackSpec::find(stack).unwrap())
    }

    pub const MIB: f64 = 1024.0 * 1024.0;

    #[test]
    fn a_nic_that_gpus_share_has_two_channels() {
        let of = |name: &str, kind, nodes| channels_between(&at(name, 16).0, kind, nodes);
        let (ring, sends, all) = (CollectiveKind::AllReduce, CollectiveKind::AllToAll, u16::MAX);
        assert_eq!([of("a10-pcie", ring, 2), of("a100-4x200", ring, 2)], [2, 8]);
        assert_eq!([of("a100-4x200", ring, 1), of("a100-4x200", sends, 2), of("dgx-a100", ring, 2)], [all; 3]);
        let mut wide = ClusterSpec::find("dgx-h100").unwrap();
        wide.scale_out.as_mut().unwrap().nics_per_node = 1;
        let wide = Cluster::new(&wide, &GpuSpec::find("h100-sxm5").unwrap(), 16).unwrap();
        assert_eq!(channels_between(&wide, ring, 2), 4);
    }

    #[test]
    fn alone_costs_nothing_and_groups_cost_more_with_distance() {
        let (c, s) = at("dgx-h200", 16);
        let t = |members: &[u32]| {
            let t = collective(&c, &s, CollectiveKind::AllGather, members, Bytes::new(4096.0 * MIB));
            t.total().value()
        };
        assert_eq!(t(&[5]), 0.0);
        let all: Vec<u32> = (0..16).collect();
        assert!(t(&[0, 1]) < t(&[0, 8]));
        // Eight NICs carry what NVLink does, once a pipeline between nodes is full; one carries an eighth.
        assert!(t(&all[..8]) * 1.3 > t(&all) && t(&[0, 8]) > 4.0 * t(&[0, 1]));
    }

    /// Of GH200, 6 of 18 links lead to each peer: 124 GB/s, of which a ring of two reaches three quarters as elsewhere. Behind
    /// switches a pair has all links.
    #[test]
    fn a_part_of_a_mesh_has_the_links_between_its_members() {
        let rate = |name: &str, n: u32| {
            let (mut c, s) = at(name, 8);
            if name == "alps-gh200" {
                // What rings by way of all peers carry, not the less that training reached.
                c.spec.scale_up.bandwidth.value = crate::units::BytesPerSec::new(355e9);
            }
            let members: Vec<u32> = (0..n).collect();
            let bytes = Bytes::new(16384.0 * MIB);
            let time = collective(&c, &s, CollectiveKind::AllGather, &members, bytes).total();
            bytes.value() * f64::from(n - 1) / f64::from(n) / time.value() / 1e9
        };
        let [pair, three, all] = [2, 3, 4].map(|n| rate("alps-gh200", n));
        assert!(pair < 124.0 && pair > 80.0, "{pair}");
        assert!(three < 248.0 && three > 1.8 * pair && all > three, "{three} {all}");
        assert!(rate("mi300x-8x400", 2) < 43.0 && rate("dgx-h100", 2) > 0.6 * rate("dgx-h100", 4));
    }

    /// 16 GiB over two nodes of eight A100 with 8 NICs of 200 Gb/s: NCCL 2.29.3 has 189 GB/s by a tree, 2.10.3 127 by a ring, as
    /// over four nodes (traces/published/network.json). With two of the NICs it has more than these carry.
    #[test]
    fn trees_were_slower() {
        let unfused = StackSpec::find("nccl-unfused").unwrap();
        let rate = |s: &StackSpec, n: u32, nics: u32| {
            let mut spec = ClusterSpec::find("azure-ndv4-a100").unwrap();
            spec.scale_out.as_mut().unwrap().nics_per_node = nics;
            let c = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), n).unwrap();
            let (members, bytes): (Vec<u32>, _) = ((0..n).collect(), Bytes::new(16384.0 * MIB));
            let time = collective(&c, s, CollectiveKind::AllReduce, &members, bytes).total();
            bytes.value() * 2.0 * f64::from(n - 1) / f64::from(n) / time.value() / 1e9
        };
        let newer = StackSpec { tree_rate: None, ..unfused.clone() };
        assert!((rate(&newer, 16, 8) / 189.0 - 1.0).abs() < 0.05 && (rate(&unfused, 16, 8) / 127.0 - 1.0).abs() < 0.05);
        assert_eq!((rate(&newer, 8, 8), rate(&newer, 32, 8)), (rate(&unfused, 8, 8), rate(&unfused, 32, 8)));
        assert!(rate(&unfused, 16, 2) > 50.0 && rate(&unfused, 32, 2) < 50.0);
    }

    /// 475, 737 and 919 GB/s of 128 MiB, 1 GiB and 32 GiB on 72 GB200 (traces/published/blind_network_6.json). Of eight in such a
    /// domain, as of eight B200, whose switch reaches 816 of its 834 GB/s with 2 GiB, filling takes a ninth of the time.
    #[test]
    fn a_large_domain_fills_slowly() {
        let rate = |n: u32, mib: f64| {
            let (c, s) = at("gb200-nvl72", n);
            let (members, bytes): (Vec<u32>, _) = ((0..n).collect(), Bytes::new(mib * MIB));
            let time = collective(&c, &s, CollectiveKind::AllReduce, &members, bytes).total();
            bytes.value() * 2.0 * f64::from(n - 1) / f64::from(n) / time.value() / 1e9
        };
        for (mib, measured) in [(128.0, 474.9), (1024.0, 737.2), (32768.0, 918.7)] {
            assert!((rate(72, mib) / measured - 1.0).abs() < 0.06, "{mib}: {}", rate(72, mib));
        }
        let (small, large) = (rate(8, 2048.0) / rate(8, 32768.0), rate(72, 2048.0) / rate(72, 32768.0));
        assert!(small > 0.95 && large < 0.9, "{small} {large}");
    }

    /// One GPU of each of 64 nodes gathers 16 MiB in a few long hops; a ring would go over 63. Of large buffers a ring has more
    /// of the NIC, and older libraries have nothing else. By hand, of 64 MiB among 256: 8 hops of 5 us x 5.1 / 3.5, 2.8 us for
    /// each, and 0.75 of 48.5 GB/s.
    #[test]
    fn gpus_of_different_nodes_gather_by_aggregated_trees() {
        let (c, newer) = at("dgx-h100", 2048);
        let older = StackSpec::find("nccl-unfused").unwrap();
        let of = |s: &StackSpec, n: u32, mib: f64| {
            let members: Vec<u32> = (0..n).map(|m| 8 * m).collect();
            chosen(&c, s, CollectiveKind::AllGather, &members, Bytes::new(mib * MIB)).unwrap()
        };
        let (pat, ring) = (of(&newer, 64, 16.0), of(&older, 64, 16.0));
        assert_eq!(
            [pat.algorithm, ring.algorithm, of(&newer, 64, 4096.0).algorithm].map(Algorithm::name),
            ["pat", "ring", "ring"]
        );
        assert!(pat.time.total() < ring.time.total() * 0.7);
        let all = of(&newer, 256, 64.0).time;
        let out = c.spec.scale_out.as_ref().unwrap();
        let by_hand =
            c.spec.scale_up.start.value.value() + 8.0 * out.latency.value.value() * 5.1 / 3.5 + 256.0 * 2.8e-6;
        assert!((all.latency.value() / by_hand - 1.0).abs() < 1e-9);
        let rate = 64.0 * MIB * 255.0 / 256.0 / all.transfer.value();
        assert!((rate / (0.75 * out.achieved.value.value()) - 1.0).abs() < 1e-9, "{rate}");
        // Two GPUs a node have rings alone.
        let pairs: Vec<u32> = (0..64).flat_map(|m| [8 * m, 8 * m + 1]).collect();
        let both = chosen(&c, &newer, CollectiveKind::ReduceScatter, &pairs, Bytes::new(MIB)).unwrap();
        assert_eq!(both.algorithm, Algorithm::Ring);
    }

    #[test]
    fn messages_to_one_peer_take_turns_and_to_others_do_not() {
        let (c, s) = at("dgx-h100", 16);
        let comm = Comm { size: 2, nodes: 2 };
        let send = |bytes: f64| p2p(&c, &s, Bytes::new(bytes), [0, 8], comm, Shared::ALONE);
        let (half, all) = (send(32.0 * MIB), send(64.0 * MIB));
        assert!(half.fills < 0.7, "a channel holds it up, not the NIC: {}", half.fills);
        let beside = half.in_turns(2.0);
        // Two halves at once take as long as the whole, and fill of the NIC what it fills.
        assert!((beside.transfer / all.transfer - 1.0).abs() < 1e-9);
        assert!((2.0 * beside.fills / all.fills - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_block_of_keys_and_values_hops_slowly() {
        // 16 MiB among 8 ranks go over 4 channels, far below what the links carry.
        let (c, s) = at("dgx-h100", 8);
        let t = p2p(&c, &s, Bytes::new(16.0 * MIB), [0, 1], Comm { size: 8, nodes: 1 }, Shared::ALONE);
        let rate = Bytes::new(16.0 * MIB) / t.transfer;
        assert_eq!((rate.value() / 1e9).round(), 68.0);
        assert_eq!(t.provenance, Provenance::Extrapolated);
        let by = |flows| {
            let (bytes, shared) = (Bytes::new(4096.0 * MIB), Shared { flows, ..Shared::ALONE });
            p2p(&c, &s, bytes, [0, 1], Comm { size: 8, nodes: 1 }, shared).transfer
        };
        assert!((by(2.0) / by(1.0) - 2.0).abs() < 1e-9);
    }

    /// CPUs switch between two GPUs as well as a switch does, and worse the more peers there are; a ring has two.
    #[test]
    fn several_peers_by_way_of_cpus_share_less_than_a_port() {
        let (cpus, s) = at("l20-sockets-pcie", 8);
        let (ports, _) = at("l20-pcie", 8);
        let bytes = Bytes::new(64.0 * MIB);
        let time = |c: &Cluster, n: u32, kind| {
            let members: Vec<u32> = (0..n).collect();
            collective(c, &s, kind, &members, bytes).transfer.value()
        };
        let longer = |n, kind| time(&cpus, n, kind) / time(&ports, n, kind);
        assert_eq!(longer(2, CollectiveKind::AllToAll), 1.0);
        // 10 GB/s over three peers, where the port has 25.6 and three blocks 36.
        assert!((longer(4, CollectiveKind::AllToAll) / (25.6 / (10.0 / 3.0)) - 1.0).abs() < 1e-9);
        assert!(longer(8, CollectiveKind::AllToAll) > longer(4, CollectiveKind::AllToAll) * 0.5);
        // A ring of all has two peers, and waits for the bridge alone: 22 GB/s there, 40 here, where the port's 25.6 are less.
        assert!((longer(8, CollectiveKind::AllGather) / (25.6 / 22.0) - 1.0).abs() < 1e-9);
    }

    /// Of a ring of all eight GPUs one send crosses the bridge at a time; of four rings of two all do.
    #[test]
    fn rings_share_the_bridge_by_their_number() {
        let (c, s) = at("l40s-pcie", 8);
        let rate = |a, b, size| {
            let bytes = Bytes::new(4096.0 * MIB);
            (bytes / p2p(&c, &s, bytes, [a, b], Comm { size, nodes: 1 }, Shared::ALONE).transfer).value() / 1e9
        };
        assert!((rate(0, 4, 2) - 5.5).abs() < 1e-9 && (rate(2, 4, 4) - 11.0).abs() < 1e-9);
        assert!((rate(3, 4, 8) - 22.0).abs() < 1e-9 && rate(2, 3, 8) > 22.0);
    }

    #[test]
    fn time_grows_with_bytes() {
        for (name, gpus) in [("dgx-a100", 32), ("dgx-h100", 32), ("local-cpu", 4)] {
            let (c, s) = at(name, gpus);
            let members: Vec<u32> = (0..gpus).collect();
            for kind in [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::AllToAll] {
                let mut last = 0.0;
                for log in 0..34 {
                    let bytes = Bytes::new(2f64.powi(log));
                    let t = collective(&c, &s, kind, &members, bytes).total().value();
                    // Equal where more channels make up for more bytes.
                    assert!(t >= last, "{name} {kind:?} {bytes}");
                    last = t;
                }
            }
        }
    }
}
