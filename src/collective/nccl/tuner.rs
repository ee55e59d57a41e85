//! Rings, trees and switches by the formulas of NCCL's tuner (src/graph/tuning.cc, src/graph/topo.h).

use super::fitted::{Fitted, Inside};
use super::shape::Shape;
use super::{Choice, LinkTime, SPREAD_BETWEEN, SPREAD_INSIDE, provenance};
use crate::cluster::Cluster;
use crate::collective::{Algorithm, Mark};
use crate::plan::CollectiveKind;
use crate::spec::{Architecture, Provenance, StackSpec};
use crate::units::{Bytes, BytesPerSec, Seconds};

/// One of NCCL's protocols: us, as in its tables.
struct Protocol {
    ring_base: f64,
    tree_base: f64,
    ring_intra: f64,
    tree_intra: f64,
    ring_inter: f64,
    tree_inter: f64,
}

/// LL: a flag with every 8 bytes. LL128: a flag with every 128. Simple: a flag with every chunk.
const LL: Protocol =
    Protocol { ring_base: 6.6, tree_base: 6.8, ring_intra: 0.6, tree_intra: 0.6, ring_inter: 2.7, tree_inter: 5.0 };
const LL128: Protocol =
    Protocol { ring_base: 14.0, tree_base: 14.0, ring_intra: 1.9, tree_intra: 1.25, ring_inter: 4.0, tree_inter: 8.5 };
const SIMPLE: Protocol =
    Protocol { ring_base: 8.4, tree_base: 8.4, ring_intra: 3.4, tree_intra: 4.0, ring_inter: 14.0, tree_inter: 14.0 };

/// What the tuner's latencies between nodes count for the wire, InfiniBand's; slower transports add to every step.
const WIRE: f64 = 5e-6;

const SWITCH_INTRA: f64 = 25.0;
const SWITCH_TREE_INTER: f64 = 20.9;

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
        let steps = passes * (n - 1.0);
        Course { steps, between: passes * (nodes - 1.0), volume: steps / n, twice }
    }

    pub fn broadcast(shape: &Shape) -> Course {
        let (n, nodes) = (f64::from(shape.n), f64::from(shape.nodes));
        Course { steps: n - 1.0, between: nodes - 1.0, volume: 1.0, twice: false }
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
    /// Algorithm bandwidth where the switch adds up, GB/s.
    switch: Option<f64>,
    ll_max: f64,
    /// Until all members are there; a step inside a node; what each us of the tuner's counts for.
    start: Seconds,
    /// From NIC to NIC.
    wire: Seconds,
    step: Seconds,
    latency_scale: f64,
    provenance: Provenance,
    fitted: &'a Fitted,
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
        let links = shape.bridge.map_or(up.bandwidth.value, |bridge| up.bandwidth.value.min(bridge));
        let intra = if shape.most > 1 { giga(links) } else { f64::INFINITY };
        let bound = match out {
            Some(out) if nics < intra => out.achieved.provenance,
            _ => up.bandwidth.provenance,
        };
        let full = f64::from(cluster.per_node());
        // NCCL leaves it to the ring up to four GPUs of a node.
        let reduce = up.switch_reduce.as_ref().filter(|_| shape.fewest > 4);
        Tuner {
            n: f64::from(shape.n),
            nodes: f64::from(shape.nodes),
            per_node: f64::from(shape.most),
            intra,
            bus: intra.min(nics),
            nics,
            tree_nics,
            switch: reduce.map(|r| giga(r.value) * full / (2.0 * (full - 1.0))),
            ll_max: ll_max(cluster.gpu.architecture, shape.nodes),
            start: out.map_or(up.start.value, |out| up.start.value + out.latency.value.min(Seconds::new(WIRE))),
            wire: out.map_or(Seconds::ZERO, |out| out.latency.value),
            step: up.latency.value,
            latency_scale: stack.collective_latency.value,
            provenance: provenance(bound),
            fitted,
        }
    }

    fn regime(&self, latency_us: f64, bytes: Bytes, algbw: f64) -> LinkTime {
        LinkTime {
            latency: self.start + Seconds::new(latency_us * self.latency_scale * 1e-6),
            transfer: bytes / BytesPerSec::new(algbw * 1e9),
            provenance: self.provenance,
            rel_sd: if self.nodes > 1.0 { SPREAD_BETWEEN } else { SPREAD_INSIDE },
        }
    }

    /// Between nodes: the pipeline has to fill, and every step takes as much longer as the wire is slower than usual.
    fn filled(&self, fill: f64, steps: f64, time: LinkTime) -> LinkTime {
        let slow = (self.wire.value() - WIRE).max(0.0) * steps;
        LinkTime { latency: time.latency + Seconds::new(fill + slow), ..time }
    }

    /// Each with what it takes until its pipeline between nodes is full.
    fn protocols(&self) -> [(&'static Protocol, Mark, f64); 3] {
        let Fitted { fill_ll128, fill_simple, .. } = *self.fitted;
        [(&LL, Mark::Ll, 0.0), (&LL128, Mark::Ll128, fill_ll128), (&SIMPLE, Mark::Simple, fill_simple)]
    }

    fn ring_inside(&self, course: &Course, bytes: Bytes) -> Vec<Choice> {
        let bus = if self.n == 2.0 { self.bus * self.fitted.pair[usize::from(course.twice)] } else { self.bus };
        let regime = |r: &Inside| LinkTime {
            latency: self.start + Seconds::new(r.setup) + self.step * (course.steps * r.steps),
            ..self.regime(0.0, bytes, r.rate * bus / course.volume)
        };
        let marked = |(r, mark)| Choice { algorithm: Algorithm::Ring, mark, time: regime(r) };
        self.fitted.inside.iter().zip([Mark::Ll, Mark::Simple]).map(marked).collect()
    }

    pub fn ring(&self, course: &Course, bytes: Bytes) -> Vec<Choice> {
        if self.nodes < 2.0 {
            return self.ring_inside(course, bytes);
        }
        let rates = [self.ll_max.min(0.5 * self.bus), self.fitted.rate_ll128 * self.bus, self.bus];
        let regime = |((p, mark, fill), rate): ((&Protocol, Mark, f64), f64)| {
            let latency = p.ring_base + (course.steps - course.between) * p.ring_intra + course.between * p.ring_inter;
            Choice {
                algorithm: Algorithm::Ring,
                mark,
                time: self.filled(fill, course.between, self.regime(latency, bytes, rate / course.volume)),
            }
        };
        self.protocols().into_iter().zip(rates).map(regime).collect()
    }

    pub fn tree(&self, bytes: Bytes) -> Vec<Choice> {
        if self.nodes < 2.0 {
            return vec![];
        }
        // Half of it is algorithm bandwidth: what comes down the tree went up before.
        let bus = self.intra.min(2.0 * self.tree_nics);
        let rates = [self.ll_max.min(bus / 3.8), self.fitted.rate_ll128 * bus * 120.0 / 128.0, 0.92 * bus];
        let regime = |((p, mark, fill), rate): ((&Protocol, Mark, f64), f64)| {
            let hops = (self.per_node - 1.0) * p.tree_intra + self.nodes.log2() * p.tree_inter;
            let time = self.regime(p.tree_base + 2.0 * hops, bytes, 0.5 * rate);
            let time = self.filled(fill, 2.0 * self.nodes.log2(), time);
            Choice { algorithm: Algorithm::Tree, mark, time }
        };
        self.protocols().into_iter().zip(rates).map(regime).collect()
    }

    /// The switch adds up inside a node, a tree between nodes.
    pub fn switch(&self, bytes: Bytes) -> Option<LinkTime> {
        let switch = self.switch?;
        if self.nodes < 2.0 {
            let latency = self.start + Seconds::new(self.fitted.setup_switch);
            return Some(LinkTime { latency, ..self.regime(0.0, bytes, switch) });
        }
        let latency = SWITCH_INTRA + 2.0 * self.nodes.log2() * SWITCH_TREE_INTER;
        let time = self.regime(latency, bytes, switch.min(self.tree_nics));
        Some(self.filled(self.fitted.fill_switch, 2.0 * self.nodes.log2(), time))
    }

    /// Reduce-scatter inside nodes, all-reduce of the parts between them, all-gather inside, one after the other.
    pub fn hierarchical(&self, bytes: Bytes) -> Option<LinkTime> {
        if self.nodes < 2.0 || self.per_node < 2.0 {
            return None;
        }
        let (g, k, p) = (self.per_node, self.nodes, &SIMPLE);
        let latency = 3.0 * p.ring_base + 2.0 * (g - 1.0) * p.ring_intra + 2.0 * (k - 1.0) * p.ring_inter;
        let inverse = 2.0 * (g - 1.0) / g / self.intra + 2.0 * (k - 1.0) / k / self.nics;
        Some(self.filled(self.fitted.fill_simple, 2.0 * (k - 1.0), self.regime(latency, bytes, 1.0 / inverse)))
    }
}

/// GB/s that LL can reach: by GPU inside a node, else by the CPU, Intel's beside Hopper, AMD's beside Ampere.
/// NCCL's tables end there; Ada and AMD's own library are taken for Ampere, Grace for an Intel CPU.
fn ll_max(architecture: Architecture, nodes: u32) -> f64 {
    let of_nodes = |row: [f64; 3]| row[nodes.clamp(1, 3) as usize - 1];
    match architecture {
        Architecture::Ampere | Architecture::Ada => of_nodes([87.7, 22.5, 19.0]),
        Architecture::Cdna2 | Architecture::Cdna3 | Architecture::Cdna4 => of_nodes([87.7, 22.5, 19.0]),
        Architecture::Hopper => of_nodes([141.0, 39.0, 20.4]),
        Architecture::Blackwell => of_nodes([282.0, 39.0, 20.4]),
        Architecture::Tpu | Architecture::Cpu => f64::INFINITY,
    }
}
