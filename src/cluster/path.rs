//! What a message between two ranks crosses, link by link.

use super::Cluster;
use super::ecmp::fullest;
use super::graph;
use crate::spec::{Pod, Routing};
use crate::units::{BytesPerSec, Seconds};

/// Flows of an uplink beyond which collisions are not counted: with so many hashed flows the fullest of 64 uplinks has
/// 4 % more than the mean.
const MANY: f64 = 4096.0;

/// A link that flows share, in one direction. Its name is all that is kept of it: a cluster of 100,000 GPUs has no list
/// of links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// From a GPU to the links inside its node.
    Out(u32),
    /// From the links inside its node to a GPU.
    In(u32),
    /// From a GPU to another of its node, over a link of their own.
    Peer(u32, u32),
    /// From a socket of a node to the others.
    Bridge { node: u32, socket: u32 },
    /// Out of a node by a NIC.
    NicOut { node: u32, nic: u32 },
    /// Into a node by a NIC.
    NicIn { node: u32, nic: u32 },
    /// Out of a pod of a tier (0: the innermost), on a rail (0: there are none).
    Up { tier: u32, pod: u32, rail: u32 },
    /// Into a pod of a tier, likewise.
    Down { tier: u32, pod: u32, rail: u32 },
    /// Between two vertices of a graph.
    Wire { from: u32, to: u32 },
}

/// The kind of a link: utilisation is told by these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkClass {
    ScaleUp,
    Bridge,
    Nic,
    /// Uplinks of a tier of pods.
    Uplink(u32),
    Wire,
}

impl Link {
    /// Whether the link is of the network between nodes, whose planes it is spread over; wires inside the only node of
    /// a cluster are not.
    pub fn is_between_nodes(self) -> bool {
        matches!(self.class(), LinkClass::Nic | LinkClass::Uplink(_) | LinkClass::Wire)
    }

    pub fn class(self) -> LinkClass {
        match self {
            Link::Out(_) | Link::In(_) | Link::Peer(..) => LinkClass::ScaleUp,
            Link::Bridge { .. } => LinkClass::Bridge,
            Link::NicOut { .. } | Link::NicIn { .. } => LinkClass::Nic,
            Link::Up { tier, .. } | Link::Down { tier, .. } => LinkClass::Uplink(tier),
            Link::Wire { .. } => LinkClass::Wire,
        }
    }
}

/// The links from one rank to another in their order, and how long the first byte takes over them.
#[derive(Debug, Clone, PartialEq)]
pub struct Path {
    pub links: Vec<Link>,
    pub latency: Seconds,
}

impl Cluster {
    /// The way from `a` to `b`: over scale-up links inside a node, over NICs and the tiers above them between nodes.
    pub fn path(&self, a: u32, b: u32) -> Path {
        if a == b {
            return Path { links: vec![], latency: Seconds::ZERO };
        }
        let mut links = Vec::with_capacity(4);
        let latency = match self.node_of(a) == self.node_of(b) {
            true => self.inside(a, b, &mut links),
            false => self.between(a, b, &mut links),
        };
        Path { links, latency }
    }

    fn inside(&self, a: u32, b: u32, links: &mut Vec<Link>) -> Seconds {
        let up = &self.spec.scale_up;
        if let (Some(graph), None) = (&self.spec.graph, &self.spec.scale_out) {
            graph::way(graph, &self.neighbours, a, b, links);
            return graph.latency.value * links.len() as f64;
        }
        links.push(Link::Out(a));
        if up.per_peer.is_some() {
            links.push(Link::Peer(a, b));
        }
        let socket = |rank: u32| up.sockets.as_ref().map(|s| (rank % self.per_node) / s.gpus);
        if socket(a) != socket(b) {
            links.push(Link::Bridge { node: self.node_of(a), socket: socket(a).unwrap_or(0) });
        }
        links.push(Link::In(b));
        up.latency.value
    }

    fn between(&self, a: u32, b: u32, links: &mut Vec<Link>) -> Seconds {
        let out = self.spec.scale_out.as_ref().expect("a cluster of several nodes has a network");
        let (from, to) = (self.node_of(a), self.node_of(b));
        let (mut rail, far) = (self.nic_of(a), self.nic_of(b));
        let mut latency = out.latency.value;
        if out.rails && out.pxn && rail != far {
            // First to the GPU of this node that is on the rail of the other end.
            let proxy = self.ranks_on(from).find(|&r| self.nic_of(r) == far).unwrap_or(a);
            links.extend([Link::Out(a), Link::In(proxy)]);
            latency += self.spec.scale_up.latency.value;
            rail = self.nic_of(proxy);
        }
        links.push(Link::NicOut { node: from, nic: rail });
        match &self.spec.graph {
            Some(graph) => {
                let before = links.len();
                graph::way(graph, &self.neighbours, from, to, links);
                latency += graph.latency.value * (links.len() - before) as f64;
            }
            None => latency += self.tiers((a, rail), (b, far), out.rails, links),
        }
        links.push(Link::NicIn { node: to, nic: far });
        latency
    }

    /// Adds the links up through the tiers, as far as the two ends have no pod in common, and down again; returns their
    /// latency.
    fn tiers(&self, a: (u32, u32), b: (u32, u32), rails: bool, links: &mut Vec<Link>) -> Seconds {
        let rail = |at: usize, rail: u32| if rails && at == 0 { rail } else { 0 };
        let mut down = Vec::new();
        let mut latency = Seconds::ZERO;
        for (at, pod) in self.spec.pods.iter().enumerate() {
            let (mine, its) = ((a.0 / pod.gpus, rail(at, a.1)), (b.0 / pod.gpus, rail(at, b.1)));
            if mine == its {
                break;
            }
            let tier = at as u32;
            links.push(Link::Up { tier, pod: mine.0, rail: mine.1 });
            down.push(Link::Down { tier, pod: its.0, rail: its.1 });
            latency += pod.latency.as_ref().map_or(Seconds::ZERO, |l| l.value);
        }
        links.extend(down.into_iter().rev());
        latency
    }

    /// The NIC of a rank in its node; several NICs that a rank has to itself count as one.
    pub fn nic_of(&self, rank: u32) -> u32 {
        let nics = self.nics_apart();
        ((rank % self.per_node) * nics / self.spec.gpus_per_node).min(nics.saturating_sub(1))
    }

    /// NICs of a node, all NICs of one GPU counted as one.
    pub fn nics_apart(&self) -> u32 {
        self.spec.scale_out.as_ref().map_or(0, |out| out.nics_per_node.min(self.spec.gpus_per_node))
    }

    /// Bytes a second that a link carries in its direction; all uplinks of a switch count as one link. Hashed flows
    /// that collide there get less: see [`collisions`](Cluster::collisions).
    pub fn capacity(&self, link: Link) -> BytesPerSec {
        let up = &self.spec.scale_up;
        match link {
            Link::Out(_) | Link::In(_) => up.bandwidth.value.max(up.p2p.value),
            // Rings over all peers get more out of a link than a send alone.
            Link::Peer(a, b) => self.peer(a, b).map_or(up.p2p.value, |peer| {
                peer.max(up.bandwidth.value * (1.0 / f64::from(self.spec.gpus_per_node.saturating_sub(1).max(1))))
            }),
            Link::Bridge { .. } => up.sockets.as_ref().map_or(up.bandwidth.value, |s| s.bridge.value),
            Link::NicOut { .. } | Link::NicIn { .. } => self.nic_rate(),
            Link::Up { tier, .. } | Link::Down { tier, .. } => self.uplinks(tier as usize),
            Link::Wire { .. } => self.spec.graph.as_ref().expect("only graphs have wires").bandwidth.value,
        }
    }

    /// Bytes a second of all links of a rank inside its node, and of its part of the node's NICs; infinity without a
    /// network.
    pub fn rates_of_a_rank(&self) -> [f64; 2] {
        let network = self.spec.scale_out.as_ref().zip(self.nics_per_rank());
        let outside = network.map_or(f64::INFINITY, |(out, nics)| out.achieved.value.value() * nics);
        [self.capacity(Link::Out(0)).value(), outside]
    }

    /// Links of the graph between nodes or chips, each direction one; 0 where there is no graph.
    pub fn wires(&self) -> u64 {
        self.spec.graph.as_ref().map_or(0, graph::wires)
    }

    fn nic_rate(&self) -> BytesPerSec {
        let out = self.spec.scale_out.as_ref().expect("only networks have NICs");
        out.achieved.value * (f64::from(out.nics_per_node) / f64::from(self.nics_apart()))
    }

    fn uplinks(&self, tier: usize) -> BytesPerSec {
        let (pod, out) = (&self.spec.pods[tier], self.spec.scale_out.as_ref().expect("pods are of a network"));
        let nics = f64::from(pod.gpus) * f64::from(out.nics_per_node) / f64::from(self.spec.gpus_per_node);
        out.achieved.value * (nics / self.switches(tier) / pod.oversubscription.value)
    }

    /// The factor by which the last of some hashed flows takes longer over an uplink than all of them would if they
    /// were spread evenly; 1 for any other link. `flows`: the flows of everyone over the uplinks of the switch. A flow
    /// that has few others beside it is taken to fill an uplink, as a NIC of the same rate does.
    pub fn collisions(&self, link: Link, flows: f64) -> f64 {
        match link {
            Link::Up { tier, .. } | Link::Down { tier, .. } => self.collide(&self.spec.pods[tier as usize], flows),
            _ => 1.0,
        }
    }

    /// [`collisions`](Cluster::collisions) on the uplinks of a switch below `pod`.
    fn collide(&self, pod: &Pod, flows: f64) -> f64 {
        match (self.spec.scale_out.as_ref().map(|out| out.routing), &pod.uplinks) {
            (Some(Routing::Ecmp { subflows }), Some(uplinks)) => {
                let on_each = (flows / f64::from(uplinks.value)).clamp(1.0, MANY);
                fullest(uplinks.value, (on_each * f64::from(subflows)).round() as u32)
            }
            _ => 1.0,
        }
    }

    /// [`collisions`](Cluster::collisions) of a tier where `flows` flows leave for every `inside` GPUs of a pod.
    pub(super) fn collide_all(&self, tier: usize, flows: f64, inside: f64) -> f64 {
        let pod = &self.spec.pods[tier];
        self.collide(pod, flows * f64::from(pod.gpus) / inside / self.switches(tier))
    }

    /// GPUs below the switch that an uplink belongs to: those of them that are among `members`, and all of them. `None`
    /// for a link that is no uplink.
    pub fn below(&self, link: Link, members: &[u32]) -> Option<[f64; 2]> {
        let (Link::Up { tier, pod, rail } | Link::Down { tier, pod, rail }) = link else { return None };
        let (gpus, rails) = (self.spec.pods[tier as usize].gpus, self.switches(tier as usize));
        let is_below = |&&m: &&u32| m / gpus == pod && (rails < 2.0 || self.nic_of(m) == rail);
        Some([members.iter().filter(is_below).count() as f64, f64::from(gpus) / rails])
    }

    /// Switches of a pod: in the innermost tier one for every rail, else one.
    fn switches(&self, tier: usize) -> f64 {
        let rails = tier == 0 && self.spec.scale_out.as_ref().is_some_and(|out| out.rails);
        if rails { f64::from(self.nics_apart()) } else { 1.0 }
    }
}
