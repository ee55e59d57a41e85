//! How long NCCL takes: point to point by its channel rule, collectives as the best of its algorithms and
//! protocols. Constants and rules are those of NCCL 2.30.7 (src/graph/tuning.cc, src/graph/topo.h,
//! src/enqueue.cc, src/graph/paths.cc); bandwidths are those that clusters were measured to reach.

use super::{Algorithm, Mark, Operation, rounds, tree};
use crate::cluster::{Cluster, Tier};
use crate::plan::CollectiveKind;
use crate::spec::{Architecture, CollectiveOp, Origin, Pod, Provenance, StackSpec};
use crate::units::{Bytes, BytesPerSec, Seconds};
use std::collections::BTreeMap;

/// A duration, split into what does not depend on the bytes and what does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkTime {
    pub latency: Seconds,
    pub transfer: Seconds,
    pub provenance: Provenance,
    /// Relative standard deviation of the whole.
    pub rel_sd: f64,
}

impl LinkTime {
    pub fn total(&self) -> Seconds {
        self.latency + self.transfer
    }

    fn nothing() -> LinkTime {
        LinkTime { latency: Seconds::ZERO, transfer: Seconds::ZERO, provenance: Provenance::Measured, rel_sd: 0.0 }
    }
}

/// Relative standard deviations: root mean squares of the errors that tests/links.rs finds.
const SPREAD_INSIDE: f64 = 0.12;
const SPREAD_BETWEEN: f64 = 0.25;
const SPREAD_SENDS: f64 = 0.2;

/// A message above so much a channel is announced before it is sent (NCCL: Simple in place of LL) ..
const ANNOUNCED: f64 = 16.0 * KIB;
/// .. which takes this long: sends of 8 to 512 KiB between two, four and eight H100, A100 and B200
/// (traces/published/nccl.json).
const ANNOUNCEMENT: f64 = 5e-6;

/// What it takes to post one more send to another node, behind the first: small all-to-alls of 16 B200 on two nodes take
/// 37 us, a send alone 14.5 (traces/published/collectives.json).
const POSTING: f64 = 3.2e-6;

const KIB: f64 = 1024.0;
/// A channel gets at least this much of a message ..
const MIN_PART: f64 = 64.0 * KIB;
/// .. and, as long as there are more channels, at most this much.
const MAX_PART: f64 = 16.0 * KIB * KIB;

fn provenance(origin: Origin) -> Provenance {
    match origin {
        Origin::Measured | Origin::Published => Provenance::Interpolated,
        Origin::Derived => Provenance::Extrapolated,
        Origin::Assumed => Provenance::Assumed,
    }
}

/// Thread blocks that one send inside a node gets. Few for all but huge messages, and the fewer the more
/// ranks the communicator has: a channel is kept for each of them.
fn channels(cluster: &Cluster, stack: &StackSpec, bytes: f64, comm_size: u32) -> u32 {
    let all = (2 * cluster.spec.scale_up.links).next_power_of_two().min(stack.p2p_ctas.value);
    let mut few = all;
    while few > 1 && few * comm_size > all {
        few /= 2;
    }
    let wanted = (bytes / MIN_PART).ceil().max(1.0);
    let mut n = if wanted < f64::from(few) { wanted as u32 } else { few };
    while bytes / f64::from(n) > MAX_PART && n <= all / 2 {
        n *= 2;
    }
    n
}

/// From the start of both ends to the first byte, of `bytes` on `channels`.
fn send_latency(cluster: &Cluster, stack: &StackSpec, bytes: f64, channels: u32) -> Seconds {
    let announced = cluster.gpu.architecture != Architecture::Cpu && bytes > f64::from(channels) * ANNOUNCED;
    let start = cluster.spec.scale_up.start.value + stack.p2p_latency.value;
    if announced { start + Seconds::new(ANNOUNCEMENT) } else { start }
}

/// A send and the receive that meets it, between two ranks of a communicator of `comm_size`. `sharing` is
/// how many such flows leave the node at once, or share the port of a rank inside it, at least 1.
pub fn p2p(
    cluster: &Cluster,
    stack: &StackSpec,
    bytes: Bytes,
    from: u32,
    to: u32,
    comm_size: u32,
    sharing: f64,
) -> LinkTime {
    let up = &cluster.spec.scale_up;
    let gpu = &cluster.gpu;
    match cluster.tier(from, to) {
        Tier::Local => LinkTime {
            latency: gpu.launch.value,
            // Read and written.
            transfer: bytes * 2.0 / (gpu.memory_bandwidth.value * gpu.memory_bound.fraction.value),
            provenance: provenance(gpu.memory_bound.fraction.provenance),
            rel_sd: gpu.memory_bound.rel_sd.value,
        },
        Tier::ScaleUp => {
            let channels = channels(cluster, stack, bytes.value(), comm_size);
            let ctas = f64::from(channels);
            let port = [Some(up.p2p.value), up.per_peer.as_ref().map(|p| p.value), cluster.bridge(&[from, to])];
            let port = port.into_iter().flatten().fold(up.p2p.value, BytesPerSec::min);
            let rate = (up.p2p_per_cta.value * ctas).min(port * (1.0 / sharing));
            LinkTime {
                latency: send_latency(cluster, stack, bytes.value(), channels) + up.latency.value,
                transfer: bytes / rate,
                provenance: provenance(up.p2p_per_cta.provenance),
                rel_sd: SPREAD_SENDS,
            }
        }
        Tier::ScaleOut => {
            let out = cluster.spec.scale_out.as_ref().expect("a cluster of several nodes has a network");
            let share = cluster.nic_share(sharing) * cluster.uplink_share(&[from, to]);
            let rate = out.p2p.value.min(out.achieved.value * share);
            LinkTime {
                latency: send_latency(cluster, stack, bytes.value(), 2) + out.latency.value,
                transfer: bytes / rate,
                provenance: provenance(out.p2p.provenance),
                rel_sd: SPREAD_BETWEEN,
            }
        }
    }
}

/// Where the members of a group are: how many nodes, and the fewest and most of them on one.
struct Shape {
    n: u32,
    nodes: u32,
    fewest: u32,
    most: u32,
    /// What pods leave of a NIC to a ring.
    uplink: f64,
    /// What pods leave to two trees, bytes of the full buffer a second.
    tree: f64,
    /// Peers in other pods, each counted as often as the uplinks are narrower than the NICs.
    beyond: f64,
    /// What a ring has between sockets.
    bridge: Option<BytesPerSec>,
}

impl Shape {
    fn of(cluster: &Cluster, members: &[u32]) -> Shape {
        let mut on = BTreeMap::new();
        for &rank in members {
            *on.entry(cluster.node_of(rank)).or_insert(0u32) += 1;
        }
        Shape {
            n: members.len() as u32,
            nodes: on.len() as u32,
            fewest: on.values().copied().min().unwrap_or(0),
            most: on.values().copied().max().unwrap_or(0),
            uplink: cluster.uplink_share(members),
            tree: tree_uplinks(cluster, members),
            beyond: cluster.beyond_pods(members),
            bridge: cluster.bridge(members),
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
    let limit = |pod: &Pod| {
        let Some(uplinks) = cluster.uplinks_of(members, pod) else { return f64::INFINITY };
        let mut leave: BTreeMap<u32, u32> = BTreeMap::new();
        for parents in [tree::first(nodes.len()), tree::second(nodes.len())] {
            let edges = parents.into_iter().enumerate().filter_map(|(child, parent)| Some([child, parent?]));
            let pods = edges.map(|edge| edge.map(|node| nodes[node] / pod.gpus)).filter(|[a, b]| a != b);
            pods.flatten().for_each(|pod| *leave.entry(pod).or_default() += 1);
        }
        // Half of the bytes over every edge, each way.
        leave.into_values().max().map_or(f64::INFINITY, |edges| uplinks.value() * 2.0 / f64::from(edges))
    };
    cluster.spec.pods.iter().map(limit).fold(f64::INFINITY, f64::min)
}

/// One way to do an operation, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    pub algorithm: Algorithm,
    pub mark: Mark,
    pub time: LinkTime,
}

/// Every way that NCCL has, and the hierarchical one that it has not, which stands last; `bytes` are those of the full
/// buffer. Empty for a member alone.
pub fn choices(cluster: &Cluster, stack: &StackSpec, op: Operation, members: &[u32], bytes: Bytes) -> Vec<Choice> {
    let shape = Shape::of(cluster, members);
    if shape.n <= 1 {
        return vec![];
    }
    let tuner = Tuner::new(cluster, stack, &shape);
    let one = |algorithm, mark| move |time| Choice { algorithm, mark, time };
    if let (Operation::Whole(kind), Architecture::Cpu) = (op, cluster.gpu.architecture) {
        let algorithm = if kind == CollectiveKind::AllToAll { Algorithm::Pairwise } else { Algorithm::Ring };
        return vec![one(algorithm, Mark::Simple)(in_rounds(cluster, stack, kind, shape.n, bytes))];
    }
    match op {
        Operation::SendRecv => {
            let n = members.len();
            let pair = |i: usize| p2p(cluster, stack, bytes, members[i], members[(i + 1) % n], shape.n, 1.0);
            let slowest = (0..n).map(pair).max_by(|a, b| a.total().value().total_cmp(&b.total().value()));
            slowest.map(one(Algorithm::Pairwise, Mark::Simple)).into_iter().collect()
        }
        Operation::Whole(CollectiveKind::AllToAll) => {
            vec![one(Algorithm::Pairwise, Mark::Simple)(all_to_all(cluster, stack, &shape, bytes))]
        }
        Operation::Broadcast => tuner.ring(&Course::broadcast(&shape), bytes),
        Operation::Whole(kind) => {
            let mut all = tuner.ring(&Course::of(kind, &shape), bytes);
            if kind == CollectiveKind::AllReduce {
                all.extend(tuner.tree(bytes));
                let switch = if shape.nodes > 1 { Algorithm::NvlsTree } else { Algorithm::Nvls };
                all.extend(tuner.switch(bytes).map(one(switch, Mark::Simple)));
                all.extend(tuner.hierarchical(bytes).map(one(Algorithm::Hierarchical, Mark::Simple)));
            }
            all
        }
    }
}

/// A collective of `members`; `bytes` are those of the full buffer, as for [`super::sent_bytes`].
pub fn collective(
    cluster: &Cluster,
    stack: &StackSpec,
    kind: CollectiveKind,
    members: &[u32],
    bytes: Bytes,
) -> LinkTime {
    let shape = Shape::of(cluster, members);
    if shape.n <= 1 {
        return LinkTime::nothing();
    }
    if cluster.gpu.architecture == Architecture::Cpu {
        return in_rounds(cluster, stack, kind, shape.n, bytes);
    }
    let best = chosen(cluster, stack, kind, members, bytes).expect("a ring is always possible");
    measured(cluster, kind, &shape, bytes).unwrap_or(best.time)
}

/// The way that NCCL would choose; none for a member alone.
pub fn chosen(
    cluster: &Cluster,
    stack: &StackSpec,
    kind: CollectiveKind,
    members: &[u32],
    bytes: Bytes,
) -> Option<Choice> {
    let ways = choices(cluster, stack, Operation::Whole(kind), members, bytes);
    let ours = ways.into_iter().filter(|way| way.algorithm != Algorithm::Hierarchical);
    ours.min_by(|a, b| a.time.total().value().total_cmp(&b.time.total().value()))
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
    Some(LinkTime { latency, transfer: total - latency, provenance, rel_sd: found.rel_sd })
}

/// Threads play the rounds one by one.
fn in_rounds(cluster: &Cluster, stack: &StackSpec, kind: CollectiveKind, n: u32, bytes: Bytes) -> LinkTime {
    let up = &cluster.spec.scale_up;
    let rounds = rounds(kind, n as usize).len() as f64;
    LinkTime {
        latency: (stack.p2p_latency.value + up.latency.value) * rounds,
        transfer: bytes * (rounds / f64::from(n)) / up.bandwidth.value,
        provenance: provenance(up.bandwidth.provenance),
        rel_sd: SPREAD_INSIDE,
    }
}

/// All peers at once, each by the rule of a send: what goes over the switch beside what goes over the NIC.
fn all_to_all(cluster: &Cluster, stack: &StackSpec, shape: &Shape, bytes: Bytes) -> LinkTime {
    let up = &cluster.spec.scale_up;
    let one = bytes * (1.0 / f64::from(shape.n));
    let near = f64::from(shape.most - 1);
    let each = channels(cluster, stack, one.value(), shape.n);
    let ctas = near * f64::from(each);
    // Where each peer has a link of its own, all of them are busy.
    let port = up.per_peer.as_ref().map_or(up.p2p.value, |peer| up.p2p.value.min(peer.value * near.max(1.0)));
    let rate = (up.p2p_per_cta.value * ctas.clamp(1.0, f64::from(stack.p2p_ctas.value))).min(port);
    let mut inside = one * near / rate;
    if let (Some(bridge), Some(sockets)) = (shape.bridge, &up.sockets) {
        // From every GPU of one socket to every one of the other.
        let across = f64::from(shape.most.min(2 * sockets.gpus)) / 2.0;
        inside = inside.max(one * (across * across) / bridge);
    }
    let start = send_latency(cluster, stack, one.value(), each);
    let mut time = LinkTime {
        latency: start + up.latency.value,
        transfer: inside,
        provenance: provenance(up.p2p_per_cta.provenance),
        rel_sd: SPREAD_SENDS,
    };
    if shape.nodes > 1 {
        let out = cluster.spec.scale_out.as_ref().expect("a cluster of several nodes has a network");
        let nic = out.achieved.value * cluster.nics_per_rank().unwrap_or(1.0);
        // Sends to many peers fill a NIC no better than sends to one: see the source of `p2p`.
        let outside = one * f64::from(shape.n - shape.fewest) / out.p2p.value.min(nic);
        let outside = outside.max(one * shape.beyond / nic);
        let others = f64::from(shape.n - shape.fewest - 1);
        time.latency = start + out.latency.value + Seconds::new(POSTING * others);
        time.rel_sd = SPREAD_BETWEEN;
        if outside > inside {
            time.transfer = outside;
            time.provenance = provenance(out.p2p.provenance);
        }
    }
    time
}

/// One of NCCL's protocols: us, as in its tables.
struct Protocol {
    /// Until the pipeline between nodes is full, beyond the latency of its steps: slots of 512 KiB on every channel
    /// where flags mark chunks. Fitted, with the rate of LL128 and the stack's `collective_latency`, on ten tables of two to
    /// sixteen nodes of A100 and B200 with InfiniBand and RoCE (traces/published/collectives.json).
    fill: f64,
    ring_base: f64,
    tree_base: f64,
    ring_intra: f64,
    tree_intra: f64,
    ring_inter: f64,
    tree_inter: f64,
}

/// LL: a flag with every 8 bytes. LL128: a flag with every 128. Simple: a flag with every chunk.
const LL: Protocol = Protocol {
    fill: 0.0,
    ring_base: 6.6,
    tree_base: 6.8,
    ring_intra: 0.6,
    tree_intra: 0.6,
    ring_inter: 2.7,
    tree_inter: 5.0,
};
const LL128: Protocol = Protocol {
    fill: 30.0,
    ring_base: 14.0,
    tree_base: 14.0,
    ring_intra: 1.9,
    tree_intra: 1.25,
    ring_inter: 4.0,
    tree_inter: 8.5,
};
const SIMPLE: Protocol = Protocol {
    fill: 250.0,
    ring_base: 8.4,
    tree_base: 8.4,
    ring_intra: 3.4,
    tree_intra: 4.0,
    ring_inter: 14.0,
    tree_inter: 14.0,
};
const PROTOCOLS: [(&Protocol, Mark); 3] = [(&LL, Mark::Ll), (&LL128, Mark::Ll128), (&SIMPLE, Mark::Simple)];

/// Part of a ring's bandwidth that LL128 reaches between nodes: fitted, as `fill`; the tuner has 0.92.
const LL128_RATE: f64 = 0.64;
/// As `fill`, where switches add up: us.
const SWITCH_FILL: f64 = 150.0;
/// What the tuner's latencies between nodes count for the wire, InfiniBand's; slower transports add to every step.
const WIRE: f64 = 5e-6;

/// A regime of a ring inside a node, fitted on the tables of traces/published/nccl.json (H100, H200, A100, B200,
/// GB200, 2 to 8 GPUs) with a start, a latency and a bandwidth of each system.
struct Inside {
    /// Beyond the start of the links, us.
    setup: f64,
    /// A step in latencies of the links.
    steps: f64,
    /// Part of the bandwidth of the ring.
    rate: f64,
}

/// Flags beside the data, and flags of whole chunks: less to wait for, or more to send.
const INSIDE: [Inside; 2] =
    [Inside { setup: 0.0, steps: 1.0, rate: 0.4 }, Inside { setup: 13.8, steps: 1.94, rate: 1.0 }];
/// Rings of two reach less, one pass and two: each GPU uses one direction of half its links at a time.
const PAIR: [f64; 2] = [0.75, 0.88];
/// Until the switch adds up, us.
const SWITCH_SETUP: f64 = 70.0;

const SWITCH_INTRA: f64 = 25.0;
const SWITCH_TREE_INTER: f64 = 20.9;

/// The way around a ring.
struct Course {
    steps: f64,
    /// Steps between nodes.
    between: f64,
    /// What a member sends over the full buffer.
    volume: f64,
    /// Sums on the way to every member, then goes around again.
    twice: bool,
}

impl Course {
    fn of(kind: CollectiveKind, shape: &Shape) -> Course {
        let twice = kind == CollectiveKind::AllReduce;
        let passes = if twice { 2.0 } else { 1.0 };
        let (n, nodes) = (f64::from(shape.n), f64::from(shape.nodes));
        let steps = passes * (n - 1.0);
        Course { steps, between: passes * (nodes - 1.0), volume: steps / n, twice }
    }

    fn broadcast(shape: &Shape) -> Course {
        let (n, nodes) = (f64::from(shape.n), f64::from(shape.nodes));
        Course { steps: n - 1.0, between: nodes - 1.0, volume: 1.0, twice: false }
    }
}

/// What the formulas of the tuner need to know of a group.
struct Tuner {
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
}

impl Tuner {
    fn new(cluster: &Cluster, stack: &StackSpec, shape: &Shape) -> Tuner {
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
    fn filled(&self, fill_us: f64, steps: f64, time: LinkTime) -> LinkTime {
        let slow = (self.wire.value() - WIRE).max(0.0) * steps;
        LinkTime { latency: time.latency + Seconds::new(fill_us * 1e-6 + slow), ..time }
    }

    fn ring_inside(&self, course: &Course, bytes: Bytes) -> Vec<Choice> {
        let bus = if self.n == 2.0 { self.bus * PAIR[usize::from(course.twice)] } else { self.bus };
        let regime = |r: &Inside| LinkTime {
            latency: self.start + Seconds::new(r.setup * 1e-6) + self.step * (course.steps * r.steps),
            ..self.regime(0.0, bytes, r.rate * bus / course.volume)
        };
        let marked = |(r, mark)| Choice { algorithm: Algorithm::Ring, mark, time: regime(r) };
        INSIDE.iter().zip([Mark::Ll, Mark::Simple]).map(marked).collect()
    }

    fn ring(&self, course: &Course, bytes: Bytes) -> Vec<Choice> {
        if self.nodes < 2.0 {
            return self.ring_inside(course, bytes);
        }
        let rates = [self.ll_max.min(0.5 * self.bus), LL128_RATE * self.bus, self.bus];
        let regime = |((p, mark), rate): ((&Protocol, Mark), f64)| {
            let latency = p.ring_base + (course.steps - course.between) * p.ring_intra + course.between * p.ring_inter;
            Choice {
                algorithm: Algorithm::Ring,
                mark,
                time: self.filled(p.fill, course.between, self.regime(latency, bytes, rate / course.volume)),
            }
        };
        PROTOCOLS.into_iter().zip(rates).map(regime).collect()
    }

    fn tree(&self, bytes: Bytes) -> Vec<Choice> {
        if self.nodes < 2.0 {
            return vec![];
        }
        // Half of it is algorithm bandwidth: what comes down the tree went up before.
        let bus = self.intra.min(2.0 * self.tree_nics);
        let rates = [self.ll_max.min(bus / 3.8), LL128_RATE * bus * 120.0 / 128.0, 0.92 * bus];
        let regime = |((p, mark), rate): ((&Protocol, Mark), f64)| {
            let hops = (self.per_node - 1.0) * p.tree_intra + self.nodes.log2() * p.tree_inter;
            let time = self.regime(p.tree_base + 2.0 * hops, bytes, 0.5 * rate);
            let time = self.filled(p.fill, 2.0 * self.nodes.log2(), time);
            Choice { algorithm: Algorithm::Tree, mark, time }
        };
        PROTOCOLS.into_iter().zip(rates).map(regime).collect()
    }

    /// The switch adds up inside a node, a tree between nodes.
    fn switch(&self, bytes: Bytes) -> Option<LinkTime> {
        let switch = self.switch?;
        if self.nodes < 2.0 {
            let latency = self.start + Seconds::new(SWITCH_SETUP * 1e-6);
            return Some(LinkTime { latency, ..self.regime(0.0, bytes, switch) });
        }
        let latency = SWITCH_INTRA + 2.0 * self.nodes.log2() * SWITCH_TREE_INTER;
        let time = self.regime(latency, bytes, switch.min(self.tree_nics));
        Some(self.filled(SWITCH_FILL, 2.0 * self.nodes.log2(), time))
    }

    /// Reduce-scatter inside nodes, all-reduce of the parts between them, all-gather inside, one after the other.
    fn hierarchical(&self, bytes: Bytes) -> Option<LinkTime> {
        if self.nodes < 2.0 || self.per_node < 2.0 {
            return None;
        }
        let (g, k, p) = (self.per_node, self.nodes, &SIMPLE);
        let latency = 3.0 * p.ring_base + 2.0 * (g - 1.0) * p.ring_intra + 2.0 * (k - 1.0) * p.ring_inter;
        let inverse = 2.0 * (g - 1.0) / g / self.intra + 2.0 * (k - 1.0) / k / self.nics;
        Some(self.filled(p.fill, 2.0 * (k - 1.0), self.regime(latency, bytes, 1.0 / inverse)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ClusterSpec, GpuSpec};

    fn at(name: &str, gpus: u32) -> (Cluster, StackSpec) {
        let spec = ClusterSpec::find(name).unwrap();
        let gpu = GpuSpec::find(&spec.gpu).unwrap();
        let stack = if name == "local-cpu" { "cpu" } else { "nccl-fa2" };
        (Cluster::new(&spec, &gpu, gpus).unwrap(), StackSpec::find(stack).unwrap())
    }

    const MIB: f64 = 1024.0 * 1024.0;

    #[test]
    fn channels_of_eight_ranks_climb_as_on_b200() {
        let (c, s) = at("dgx-h100", 8);
        let of = |mib: f64| channels(&c, &s, mib * MIB, 8);
        assert_eq!([of(0.01), of(0.125), of(1.0), of(64.0)], [1, 2, 4, 4]);
        assert_eq!([of(128.0), of(256.0), of(512.0), of(4096.0)], [8, 16, 32, 32]);
        let (c, s) = at("dgx-h100", 64);
        assert_eq!(channels(&c, &s, 8.0 * MIB, 64), 1);
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

    #[test]
    fn a_block_of_keys_and_values_hops_slowly() {
        // 16 MiB among 8 ranks go over 4 channels, far below what the links carry.
        let (c, s) = at("dgx-h100", 8);
        let t = p2p(&c, &s, Bytes::new(16.0 * MIB), 0, 1, 8, 1.0);
        let rate = Bytes::new(16.0 * MIB) / t.transfer;
        assert_eq!((rate.value() / 1e9).round(), 68.0);
        assert_eq!(t.provenance, Provenance::Extrapolated);
        let shared = |flows| p2p(&c, &s, Bytes::new(4096.0 * MIB), 0, 1, 8, flows).transfer;
        assert!((shared(2.0) / shared(1.0) - 2.0).abs() < 1e-9);
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
