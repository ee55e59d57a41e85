//! Rings, trees and switches by the formulas of NCCL's tuner (src/graph/tuning.cc, src/graph/topo.h): what steps there are,
//! and what each protocol leaves of the bandwidth. What a step takes is not the tuner's, whose figures are the same for all
//! GPUs and NICs: a step inside a node is so many latencies of its links, one between nodes so many of the wire.

use super::fitted::{Fitted, Inside, ProtocolFit};
use super::shape::Shape;
use super::{Choice, LinkTime, SPREAD_BETWEEN, SPREAD_INSIDE, provenance};
use crate::cluster::{Block, Cluster};
use crate::collective::{Algorithm, Protocol};
use crate::plan::CollectiveKind;
use crate::spec::gpu::Maker;
use crate::spec::{Architecture, Provenance, StackSpec};
use crate::units::{Bytes, BytesPerSec, Seconds};

/// The way around a ring.
pub struct Course {
    steps: f64,
    /// Steps between nodes.
    between: f64,
    /// What a member sends over the full buffer.
    volume: f64,
    /// Sums on the way to every member, then goes around again.
    twice: bool,
}

impl Course {
    pub fn of(kind: CollectiveKind, shape: &Shape) -> Course {
        let twice = kind == CollectiveKind::AllReduce;
        let passes = if twice { 2.0 } else { 1.0 };
        let (n, nodes) = (f64::from(shape.n), f64::from(shape.nodes));
        // On a torus all axes are gone along at once, both ways.
        let steps = passes * shape.block.as_ref().map_or(n - 1.0, Block::hops);
        Course { steps, between: passes * (nodes - 1.0), volume: passes * (n - 1.0) / n, twice }
    }

    pub fn broadcast(shape: &Shape) -> Course {
        let (n, nodes) = (f64::from(shape.n), f64::from(shape.nodes));
        let steps = shape.block.as_ref().map_or(n - 1.0, Block::hops);
        Course { steps, between: nodes - 1.0, volume: 1.0, twice: false }
    }
}

/// What the formulas of the tuner need to know of a group.
pub struct Tuner<'a> {
    n: f64,
    nodes: f64,
    per_node: f64,
    /// Bus bandwidth of a ring inside a node, and of a ring over all members, GB/s.
    intra: f64,
    bus: f64,
    /// All NICs that the group may use on one node, GB/s: of a ring, and of trees.
    nics: f64,
    tree_nics: f64,
    /// Bus bandwidth of a tree whose flags come with whole chunks, at most.
    tree_most: f64,
    /// Algorithm bandwidth of parallel aggregated trees, GB/s; none where the library has none or does not take them.
    pat: Option<f64>,
    /// Algorithm bandwidth where the switch adds up, GB/s.
    switch: Option<f64>,
    /// Bytes of which filling the switch's pipeline takes as long as moving them.
    ramp: f64,
    ll_max: f64,
    /// Until all members are there.
    start: Seconds,
    /// A step inside a node, and from NIC to NIC, before the protocol makes more of them.
    step: Seconds,
    wire: Seconds,
    provenance: Provenance,
    /// The port of a chip is its links.
    chips: bool,
    fitted: &'a Fitted,
}

/// Of parallel aggregated trees: part of the NICs' bandwidth that they have, hops that are under way at once, and what each
/// member takes (src/graph/tuning.cc: bandwidth x 0.75, latency log2(nodes) x inter / 3.5 + 2.8 us x ranks).
const PAT_RATE: f64 = 0.75;
const PAT_HOPS_AT_ONCE: f64 = 3.5;
const PAT_MEMBER: f64 = 2.8e-6;

/// Whether RCCL finds no more than one ring: on five to seven GPUs of a mesh of eight. All-reduces and all-gathers of them
/// have 35 to 39 GB/s with RCCL 2.22.3 and 45 to 47 with ROCm 7.2 on MI355X, where a link has 52 and four GPUs reach 160 to
/// 169 (two users' sweeps over 2 to 8 GPUs).
fn lone_ring(cluster: &Cluster, members: u32) -> bool {
    cluster.gpu.architecture.maker() == Maker::Amd && cluster.spec.gpus_per_node == 8 && (5..8).contains(&members)
}

impl<'a> Tuner<'a> {
    pub fn new(cluster: &Cluster, stack: &StackSpec, fitted: &'a Fitted, shape: &Shape) -> Tuner<'a> {
        let up = &cluster.spec.scale_up;
        let giga = |rate: BytesPerSec| rate.value() / 1e9;
        let out = cluster.spec.scale_out.as_ref().filter(|_| shape.nodes > 1);
        let all = out.map_or(f64::INFINITY, |out| {
            giga(out.achieved.value) * cluster.nics_per_rank().unwrap_or(1.0) * f64::from(shape.fewest)
        });
        let nics = all * shape.uplink;
        // Of two nodes each sends the other all data once; in a larger tree a node sends on average twice.
        let tree_nics = (if shape.nodes == 2 { all } else { 0.5 * all }).min(shape.tree / 1e9);
        // Between nodes, rings go through a node both ways.
        let ring = match shape.peer {
            _ if shape.nodes > 1 => up.bandwidth.value,
            Some(one) if lone_ring(cluster, shape.most) => one,
            peer => up.ring(cluster.spec.gpus_per_node, shape.most, peer),
        };
        let links = shape.bridge.map_or(ring, |bridge| ring.min(bridge));
        let links = shape.block.as_ref().map_or(links, Block::rate);
        let intra = if shape.most > 1 { giga(links) } else { f64::INFINITY };
        let bound = match out {
            Some(out) if nics < intra => out.achieved.provenance,
            _ => up.bandwidth.provenance,
        };
        let full = f64::from(cluster.per_node());
        // NCCL leaves it to the ring up to four GPUs of a node.
        let reduce = up.switch_reduce.as_ref().filter(|_| shape.fewest > 4);
        let part = f64::from(shape.most) / full;
        // Among nodes that have one member each, whatever else they have (ncclPatEnable).
        let pat = (stack.has_pat() && out.is_some() && shape.most == 1).then(|| {
            let n = f64::from(shape.n);
            (PAT_RATE * all * n / (n - 1.0)).min(shape.pat / 1e9)
        });
        Tuner {
            n: f64::from(shape.n),
            nodes: f64::from(shape.nodes),
            per_node: f64::from(shape.most),
            intra,
            bus: intra.min(nics),
            nics,
            tree_nics,
            tree_most: stack.tree_rate.as_ref().map_or(f64::INFINITY, |rate| giga(rate.value)),
            pat,
            switch: reduce.map(|r| giga(r.value) * full / (2.0 * (full - 1.0))),
            ramp: up.switch_ramp.as_ref().map_or(0.0, |ramp| ramp.value.value() * part * part),
            ll_max: ll_max(cluster.gpu.architecture, shape.nodes),
            start: up.start.value,
            step: up.latency.value * stack.collective_latency.value,
            wire: out.map_or(Seconds::ZERO, |out| out.latency.value * stack.collective_latency.value),
            provenance: provenance(bound),
            chips: shape.block.is_some(),
            fitted,
        }
    }

    /// Whether a ring has less inside nodes than between them.
    pub fn is_narrow_inside(&self) -> bool {
        self.intra <= self.nics
    }

    fn regime(&self, latency: Seconds, bytes: Bytes, algbw: f64) -> LinkTime {
        LinkTime {
            latency: self.start + latency,
            transfer: bytes / BytesPerSec::new(algbw * 1e9),
            fills: 1.0,
            provenance: self.provenance,
            rel_sd: if self.nodes > 1.0 { SPREAD_BETWEEN } else { SPREAD_INSIDE },
        }
    }

    /// How data is marked, and what that costs between nodes.
    fn protocols(&self) -> [(Protocol, ProtocolFit); 3] {
        let [ll, ll128, simple] = self.fitted.between;
        [(Protocol::Ll, ll), (Protocol::Ll128, ll128), (Protocol::Simple, simple)]
    }

    /// Steps inside nodes and between them, one after the other.
    fn steps(&self, fit: &ProtocolFit, inside: f64, between: f64) -> Seconds {
        let steps = self.step * (fit.inside * inside) + self.wire * (fit.between * between);
        steps + Seconds::new(fit.fill)
    }

    fn ring_inside(&self, course: &Course, bytes: Bytes) -> Vec<Choice> {
        let bus = if self.n == 2.0 && !self.chips {
            self.bus * self.fitted.pair[usize::from(course.twice)]
        } else {
            self.bus
        };
        let regime = |r: &Inside| LinkTime {
            latency: self.start + Seconds::new(r.setup) + self.step * (course.steps * r.steps),
            ..self.regime(Seconds::ZERO, bytes, r.rate * bus / course.volume)
        };
        let of = |(r, protocol)| Choice { algorithm: Algorithm::Ring, protocol, time: regime(r) };
        self.fitted.inside.iter().zip([Protocol::Ll, Protocol::Simple]).map(of).collect()
    }

    pub fn ring(&self, course: &Course, bytes: Bytes) -> Vec<Choice> {
        if self.nodes < 2.0 {
            return self.ring_inside(course, bytes);
        }
        let rates = [self.ll_max.min(0.5 * self.bus), self.fitted.rate_ll128 * self.bus, self.bus];
        let regime = |((protocol, fit), rate): ((Protocol, ProtocolFit), f64)| {
            let latency = self.steps(&fit, course.steps - course.between, course.between);
            Choice { algorithm: Algorithm::Ring, protocol, time: self.regime(latency, bytes, rate / course.volume) }
        };
        self.protocols().into_iter().zip(rates).map(regime).collect()
    }

    pub fn tree(&self, bytes: Bytes) -> Vec<Choice> {
        if self.nodes < 2.0 {
            return vec![];
        }
        // Half of it is algorithm bandwidth: what comes down the tree went up before.
        let bus = self.intra.min(2.0 * self.tree_nics);
        let simple = 0.92 * bus.min(self.tree_most);
        let rates = [self.ll_max.min(bus / 3.8), self.fitted.rate_ll128 * bus * 120.0 / 128.0, simple];
        let inside = 2.0 * (self.per_node - 1.0) * self.fitted.tree_step;
        let regime = |((protocol, fit), rate): ((Protocol, ProtocolFit), f64)| {
            let latency = self.steps(&fit, inside, self.up_and_down());
            Choice { algorithm: Algorithm::Tree, protocol, time: self.regime(latency, bytes, 0.5 * rate) }
        };
        self.protocols().into_iter().zip(rates).map(regime).collect()
    }

    /// An all-gather or reduce-scatter among nodes of which each has one member: a few long hops, and time for each of all
    /// members, by the figures of the tuner; no measurement was at hand.
    pub fn pat(&self, bytes: Bytes) -> Option<LinkTime> {
        let rate = self.pat?;
        let [.., simple] = self.fitted.between;
        let hops = self.wire * (simple.between / PAT_HOPS_AT_ONCE * self.nodes.log2());
        let time = self.regime(hops + Seconds::new(PAT_MEMBER * self.n), bytes, rate);
        Some(LinkTime { provenance: Provenance::Extrapolated, ..time })
    }

    /// Steps between nodes of a tree.
    fn up_and_down(&self) -> f64 {
        2.0 * self.nodes.log2()
    }

    /// The switch adds up inside a node, a tree between nodes.
    pub fn switch(&self, bytes: Bytes) -> Option<LinkTime> {
        let switch = self.switch?;
        let ramp = Seconds::new((bytes.value() * self.ramp).sqrt() / (switch * 1e9));
        if self.nodes < 2.0 {
            return Some(self.regime(Seconds::new(self.fitted.setup_switch) + ramp, bytes, switch));
        }
        let [.., simple] = self.fitted.between;
        let tree = ProtocolFit { fill: self.fitted.fill_switch, ..simple };
        let latency = self.steps(&tree, 0.0, self.up_and_down()) + ramp;
        Some(self.regime(latency, bytes, switch.min(self.tree_nics)))
    }

    /// Reduce-scatter inside nodes, all-reduce of the parts between them, all-gather inside, one after the other.
    pub fn hierarchical(&self, bytes: Bytes) -> Option<LinkTime> {
        if self.nodes < 2.0 || self.per_node < 2.0 {
            return None;
        }
        let (g, k) = (self.per_node, self.nodes);
        let [.., simple] = self.fitted.between;
        let latency = self.start * 2.0 + self.steps(&simple, 2.0 * (g - 1.0), 2.0 * (k - 1.0));
        let inverse = 2.0 * (g - 1.0) / g / self.intra + 2.0 * (k - 1.0) / k / self.nics;
        Some(self.regime(latency, bytes, 1.0 / inverse))
    }
}

/// GB/s that LL can reach: by GPU inside a node, else by the CPU, Intel's beside Hopper, AMD's beside Ampere.
/// NCCL's tables end there; Ada and other makers' libraries are taken for Ampere, Grace for an Intel CPU.
fn ll_max(architecture: Architecture, nodes: u32) -> f64 {
    let of_nodes = |row: [f64; 3]| row[nodes.clamp(1, 3) as usize - 1];
    match architecture {
        Architecture::Volta | Architecture::Turing => of_nodes([39.0, 39.0, 20.4]),
        Architecture::Ampere | Architecture::Ada => of_nodes([87.7, 22.5, 19.0]),
        Architecture::Cdna1 | Architecture::Cdna2 | Architecture::Cdna3 | Architecture::Cdna4 | Architecture::Npu => {
            of_nodes([87.7, 22.5, 19.0])
        }
        Architecture::Hopper => of_nodes([141.0, 39.0, 20.4]),
        Architecture::Blackwell => of_nodes([282.0, 39.0, 20.4]),
        Architecture::Tpu | Architecture::Cpu => f64::INFINITY,
    }
}
