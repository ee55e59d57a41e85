//! Nodes of GPUs, the links inside them and between them.

use super::{
    Found, Sourced, check_latency, check_positive, check_rate, check_spread, find, is_path, meant, read, shipped,
};
use crate::error::{Error, Result, text};
use crate::units::{Bytes, BytesPerSec, Seconds};
use serde::{Deserialize, Serialize};
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    pub name: String,
    pub gpu: String,
    pub gpus_per_node: u32,
    /// How many nodes there are where nothing else is asked for.
    pub nodes: u32,
    /// A job takes so many GPUs of a node at least, and a multiple of them: those of one chassis where a
    /// node is a rack. Absent where a node is taken whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tray: Option<u32>,
    pub scale_up: ScaleUp,
    /// Absent where all devices share a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_out: Option<ScaleOut>,
    /// Absent where nothing is known of it: then nothing is kept there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// What narrows above the nodes, from the inside out. Empty where the network is not blocking.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<Pod>,
    /// The network link by link, where it is no tree of pods; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<Graph>,
    /// Collectives that were measured on this very cluster: what they say counts before what the links say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<MeasuredCollective>,
}

/// Durations of a collective by the bytes of its full buffer: the lowest of its lines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCollective {
    pub op: CollectiveOp,
    pub gpus: u32,
    pub nodes: u32,
    pub lines: Vec<Line>,
    /// Relative standard deviation of the lines from what was measured.
    pub rel_sd: f64,
    pub source: String,
}

/// latency + bytes / bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    pub latency: Seconds,
    pub bandwidth: BytesPerSec,
}

/// Which collective was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveOp {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl MeasuredCollective {
    /// Seconds of so many bytes.
    pub fn at(&self, bytes: f64) -> f64 {
        let line = |l: &Line| l.latency.value() + bytes / l.bandwidth.value();
        self.lines.iter().map(line).fold(f64::INFINITY, f64::min)
    }

    fn check(&self, file: &str) -> Result<()> {
        check_positive(file, "measured.gpus", f64::from(self.gpus))?;
        check_positive(file, "measured.nodes", f64::from(self.nodes))?;
        if self.lines.is_empty() {
            return Err(Error::spec(file, "measured.lines", "empty; give at least one latency and bandwidth"));
        }
        check_spread(file, "measured.rel_sd", self.rel_sd)?;
        self.lines.iter().try_for_each(|l| check_rate(file, "measured.lines.bandwidth", l.bandwidth.value()))
    }
}

/// A network that is no tree. Its hosts are the nodes; those of a cluster of one node are its GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graph {
    pub shape: GraphShape,
    /// Of one link and direction.
    pub bandwidth: Sourced<BytesPerSec>,
    /// Of one link.
    pub latency: Sourced<Seconds>,
}

/// Which links there are, and by which of them a message goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum GraphShape {
    /// Rings along every dim, the last one fastest; dimension by dimension, the shorter way around.
    Torus(Vec<u32>),
    /// The same without the links that close the rings.
    Mesh(Vec<u32>),
    /// Groups of routers that are all linked, one link between every two groups; minimal paths (Kim et al., ISCA 2008).
    Dragonfly { groups: u32, routers: u32, hosts: u32 },
    /// Any: vertices 0.. of which the first are the hosts, links both ways; fewest links, then the lowest numbers.
    Links(Vec<[u32; 2]>),
}

/// How a NIC is told to send.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Verbs, of InfiniBand or RoCE: a GPU can post to its NIC itself.
    #[default]
    Verbs,
    /// AWS's Elastic Fabric Adapter: the CPU posts, and messages keep no order.
    Efa,
}

/// How flows are spread over the uplinks of a switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Routing {
    /// Packet by packet over all of them.
    #[default]
    Spray,
    /// Moved away from links that are full: as good as sprayed, once a flow lasts.
    Adaptive,
    /// By hash, every flow cut into so many sub-flows (queue pairs).
    Ecmp { subflows: u32 },
    /// Planned for the job: nothing collides.
    Static,
}

/// Nodes whose switches lead upwards with less than they lead down to the NICs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// What it is called: leaf, pod, data hall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// GPUs of one.
    pub gpus: u32,
    /// Bandwidth of all its NICs over that of its uplinks; below 1 where there is more above than below.
    pub oversubscription: Sourced<f64>,
    /// Uplinks of one of its switches: what hashed flows collide on. Absent where they do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplinks: Option<Sourced<u32>>,
    /// What a message takes longer that leaves it; absent where `scale_out.latency` counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Sourced<Seconds>>,
}

/// The links inside a node. Bandwidths are per direction and per GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleUp {
    /// Links of one GPU: NCCL counts its channels by them.
    pub links: u32,
    /// What a ring reaches with large messages.
    pub bandwidth: Sourced<BytesPerSec>,
    /// Bus bandwidth of an all-reduce that the switch adds up, with all GPUs of a node, beside what `switch_ramp` takes;
    /// absent where the switch cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch_reduce: Option<Sourced<BytesPerSec>>,
    /// Message of which filling the pipeline of such an all-reduce takes as long as moving it, with all GPUs of a node: of
    /// other sizes it goes with the square root, as where pieces are cut as short as pays, of fewer GPUs with their number.
    /// Absent: it takes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch_ramp: Option<Sourced<Bytes>>,
    /// What a send and receive reaches with a huge message.
    pub p2p: Sourced<BytesPerSec>,
    /// What one thread block moves in a send and receive.
    pub p2p_per_cta: Sourced<BytesPerSec>,
    /// What goes to one peer at most, where each peer has a link of its own; absent behind a switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_peer: Option<Sourced<BytesPerSec>>,
    /// Absent where a GPU has as many links to one peer as to the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<Package>,
    /// What the sends of a GPU to several peers at once reach together, times the number of peers: root complexes of
    /// CPUs, which every such send crosses, switch one stream well and many badly. Absent where switches link GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub several: Option<Sourced<BytesPerSec>>,
    /// Absent where the links do not go by way of the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sockets: Option<Sockets>,
    /// From the start of the slowest member to the first byte of a small message.
    pub start: Sourced<Seconds>,
    /// From one GPU to its neighbour in a ring, of a small message.
    pub latency: Sourced<Seconds>,
}

/// The memory of a node's CPUs, and the way there from its GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Of a node; absent where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Sourced<Bytes>>,
    /// What all CPUs of a node together read and write of it in a second.
    pub bandwidth: Sourced<BytesPerSec>,
    /// What one GPU copies from or to pinned memory, per direction, while no other does.
    pub copy: Sourced<BytesPerSec>,
    /// GPUs that share such a link on their way to the CPU, behind a PCIe switch; 1: each has its own.
    pub gpus_per_link: Sourced<u32>,
    /// Of a copy, however small.
    pub latency: Sourced<Seconds>,
    /// What the kernels of the CPU move for one rank, where it has fewer threads than its share of the memory's bandwidth
    /// would keep busy; none: that share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<Sourced<BytesPerSec>>,
    /// How many times as long its CPUs take to issue an op as those of x86 servers, which a stack's `host_launch` is of; none:
    /// as long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<Sourced<f64>>,
}

/// GPUs of a package, as the dies of an MI250X, which stand side by side and have more links to each other than to others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    pub gpus: u32,
    /// What goes from one to another of them at most.
    pub per_peer: Sourced<BytesPerSec>,
}

/// GPUs on PCIe under several CPUs: what one socket's send to the other's shares a bridge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sockets {
    /// GPUs of a socket.
    pub gpus: u32,
    /// Between two sockets, per direction.
    pub bridge: Sourced<BytesPerSec>,
}

/// The network between nodes. Bandwidths are per NIC and direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleOut {
    pub nics_per_node: u32,
    pub raw: Sourced<BytesPerSec>,
    /// What a ring reaches with large messages.
    pub achieved: Sourced<BytesPerSec>,
    /// What sends to one peer reach with the library's default number of channels.
    pub p2p: Sourced<BytesPerSec>,
    /// What sends to many peers at once reach together, each on channels of its own; absent: no more than sends to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub several: Option<Sourced<BytesPerSec>>,
    /// Of the wire and the switches, without the library's own.
    pub latency: Sourced<Seconds>,
    /// NICs of one place in their nodes share a leaf switch, so that equal ranks of nodes are one switch apart.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rails: bool,
    /// What changes rails goes over the scale-up links to the GPU on the right rail first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pxn: bool,
    /// Networks beside each other that every NIC has a port on, as in Alibaba's HPN: 1 where they are not told apart. Of these
    /// any carries a NIC's traffic, and where one is down the others carry all. Planes that a NIC is in one of, as in DeepSeek's
    /// multi-plane fat tree, are none of these: they are `rails`, and from one to another it goes by way of a GPU beside (`pxn`).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub planes: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub routing: Routing,
    #[serde(default, skip_serializing_if = "is_default")]
    pub transport: Transport,
}

fn one() -> u32 {
    1
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ScaleUp {
    /// What a ring of so many of the `gpus` of a node reaches, `slowest` being what goes from one to another at most. A GPU's
    /// links to those outside of the group are of no use to it. Where every peer has as many links as the next, or packages
    /// tell who has more, the ring has its part of what all have, or what sends reach if more; else what sends reach.
    pub fn ring(&self, gpus: u32, members: u32, slowest: Option<BytesPerSec>) -> BytesPerSec {
        let all = self.bandwidth.value;
        let peers = gpus.saturating_sub(1).max(1);
        let told = self.links.is_multiple_of(peers) || self.package.is_some();
        match slowest {
            Some(one) if members > 1 && !(told && members >= gpus) => {
                let each = if told { one.max(all * (1.0 / f64::from(peers))) } else { one };
                all.min(each * f64::from(members - 1))
            }
            _ => all,
        }
    }
}

impl ClusterSpec {
    /// What its CPUs take for what takes one of an x86 server so long.
    pub fn issued_in(&self, call: Seconds) -> Seconds {
        let times = self.host.as_ref().and_then(|host| host.calls.as_ref());
        call * times.map_or(1.0, |times| times.value)
    }

    /// What whoever reads a figure of so many GPUs should know, if the file has fewer.
    pub fn beyond(&self, gpus: u32) -> Option<String> {
        let has = u64::from(self.nodes) * u64::from(self.gpus_per_node);
        let name = &self.name;
        (u64::from(gpus) > has).then(|| {
            format!("cluster: {name} has {has} GPUs by its file; for {gpus} its network is taken to go on as it is")
        })
    }

    /// A shipped cluster by name, or a file by path.
    pub fn find(name: &str) -> Result<ClusterSpec> {
        ClusterSpec::from_found(&find("cluster", name)?)
    }

    pub fn load(path: impl AsRef<Path>) -> Result<ClusterSpec> {
        let path = path.as_ref();
        let text = text::spec(path)?;
        ClusterSpec::from_found(&Found { kind: "cluster", file: path.display().to_string(), text })
    }

    fn from_found(found: &Found) -> Result<ClusterSpec> {
        let mut spec: ClusterSpec = read(found)?;
        spec.check(&found.file)?;
        // A GPU's file stands beside that of its cluster, or where the program was started.
        let beside = Path::new(&found.file).with_file_name(&spec.gpu);
        if is_path(&spec.gpu) && !Path::new(&spec.gpu).is_file() && beside.is_file() {
            spec.gpu = beside.display().to_string();
        }
        let known: Vec<&str> = shipped("gpu").collect();
        if !is_path(&spec.gpu) && !known.contains(&spec.gpu.as_str()) {
            let (meant, all) = (meant(&spec.gpu, &known), known.join(", "));
            let why = format!("there is no gpu {:?}{meant}; known: {all}; or give the path of a JSON file", spec.gpu);
            return Err(Error::spec(&found.file, "gpu", why));
        }
        Ok(spec)
    }

    /// Errors: what no cluster has; `file` is what errors call it.
    pub fn check(&self, file: &str) -> Result<()> {
        check_positive(file, "gpus_per_node", f64::from(self.gpus_per_node))?;
        check_positive(file, "nodes", f64::from(self.nodes))?;
        check_positive(file, "scale_up.links", f64::from(self.scale_up.links))?;
        check_rate(file, "scale_up.bandwidth", self.scale_up.bandwidth.value.value())?;
        check_rate(file, "scale_up.p2p", self.scale_up.p2p.value.value())?;
        check_rate(file, "scale_up.p2p_per_cta", self.scale_up.p2p_per_cta.value.value())?;
        check_latency(file, "scale_up.start", self.scale_up.start.value.value())?;
        check_latency(file, "scale_up.latency", self.scale_up.latency.value.value())?;
        if let Some(peer) = &self.scale_up.per_peer {
            check_rate(file, "scale_up.per_peer", peer.value.value())?;
        }
        if let Some(package) = &self.scale_up.package {
            check_rate(file, "scale_up.package.per_peer", package.per_peer.value.value())?;
            let why = match (package.gpus, &self.scale_up.per_peer) {
                (gpus, _) if gpus < 2 || !self.gpus_per_node.is_multiple_of(gpus) => {
                    format!(
                        "packages of {gpus} are no parts of nodes of {}; give a divisor above 1",
                        self.gpus_per_node
                    )
                }
                (_, None) => "there is no scale_up.per_peer for those outside of a package; give one".into(),
                _ => String::new(),
            };
            if !why.is_empty() {
                return Err(Error::spec(file, "scale_up.package", why));
            }
        }
        if let Some(several) = &self.scale_up.several {
            check_rate(file, "scale_up.several", several.value.value())?;
        }
        if let Some(sockets) = &self.scale_up.sockets {
            check_positive(file, "scale_up.sockets.gpus", f64::from(sockets.gpus))?;
            check_rate(file, "scale_up.sockets.bridge", sockets.bridge.value.value())?;
        }
        if let Some(host) = &self.host {
            check_positive(file, "host.memory", host.memory.as_ref().map_or(1.0, |memory| memory.value.value()))?;
            check_latency(file, "host.latency", host.latency.value.value())?;
            check_positive(file, "host.bandwidth", host.bandwidth.value.value())?;
            check_positive(file, "host.copy", host.copy.value.value())?;
            check_positive(file, "host.kernels", host.kernels.as_ref().map_or(1.0, |rate| rate.value.value()))?;
            check_positive(file, "host.calls", host.calls.as_ref().map_or(1.0, |times| times.value))?;
            check_positive(file, "host.gpus_per_link", f64::from(host.gpus_per_link.value))?;
        }
        self.check_shape(file)?;
        self.measured.iter().try_for_each(|m| m.check(file))?;
        if let Some(reduce) = &self.scale_up.switch_reduce {
            check_rate(file, "scale_up.switch_reduce", reduce.value.value())?;
        }
        if let Some(ramp) = &self.scale_up.switch_ramp {
            check_positive(file, "scale_up.switch_ramp", ramp.value.value())?;
        }
        match &self.scale_out {
            None if self.nodes > 1 => {
                let why =
                    format!("missing, but there are {} nodes; describe the network or set nodes to 1", self.nodes);
                Err(Error::spec(file, "scale_out", why))
            }
            None => Ok(()),
            Some(out) => out.check(file, self.gpus_per_node),
        }
    }

    /// Trays fill nodes, nodes fill pods, pods fill larger pods.
    fn check_shape(&self, file: &str) -> Result<()> {
        if let Some(tray) = self.tray
            && (tray == 0 || !self.gpus_per_node.is_multiple_of(tray))
        {
            let why = format!("{tray} does not divide the {} GPUs of a node", self.gpus_per_node);
            return Err(Error::spec(file, "tray", why));
        }
        let mut inner = self.gpus_per_node;
        for pod in &self.pods {
            if pod.gpus <= inner || !pod.gpus.is_multiple_of(inner) {
                let why = format!("{} is no multiple of {inner}, of which it is made", pod.gpus);
                return Err(Error::spec(file, "pods.gpus", why));
            }
            let over = pod.oversubscription.value;
            if !(over > 0.0 && over.is_finite()) {
                let why = format!("{over} is not above zero; write 1 where the uplinks carry all");
                return Err(Error::spec(file, "pods.oversubscription", why));
            }
            if pod.uplinks.as_ref().is_some_and(|u| u.value == 0) {
                return Err(Error::spec(file, "pods.uplinks", "0; leave it out where flows do not collide"));
            }
            check_latency(file, "pods.latency", pod.latency.as_ref().map_or(0.0, |l| l.value.value()))?;
            inner = pod.gpus;
        }
        self.graph.as_ref().map_or(Ok(()), |graph| graph.check(file, self.hosts()))
    }

    /// End points of a graph: nodes, or the GPUs of the only one.
    pub fn hosts(&self) -> u32 {
        if self.scale_out.is_some() { self.nodes } else { self.gpus_per_node }
    }
}

/// Vertices of a graph are listed.
const MOST_VERTICES: u64 = 1 << 24;

impl Graph {
    fn check(&self, file: &str, hosts: u32) -> Result<()> {
        check_rate(file, "graph.bandwidth", self.bandwidth.value.value())?;
        check_latency(file, "graph.latency", self.latency.value.value())?;
        let wrong = |why: String| Err(Error::spec(file, "graph.shape", why));
        let room = match &self.shape {
            GraphShape::Torus(dims) | GraphShape::Mesh(dims) => {
                dims.iter().fold(1, |all: u64, &d| all.saturating_mul(u64::from(d)))
            }
            GraphShape::Dragonfly { groups, routers, hosts } => {
                u64::from(*groups).saturating_mul(u64::from(*routers)).saturating_mul(u64::from(*hosts))
            }
            GraphShape::Links(links) if links.iter().any(|[a, b]| a == b) => {
                return wrong("a link leads from a vertex to itself; remove it".into());
            }
            GraphShape::Links(links) => links.iter().map(|[a, b]| u64::from(*a.max(b)) + 1).max().unwrap_or(0),
        };
        if room > MOST_VERTICES {
            return wrong(format!("has {room} vertices; the most is {MOST_VERTICES}"));
        }
        if room < u64::from(hosts) {
            return wrong(format!("has room for {room} hosts, and there are {hosts}; make it larger"));
        }
        Ok(())
    }
}

impl ScaleOut {
    /// Among so many `gpus` of a node.
    fn check(&self, file: &str, gpus: u32) -> Result<()> {
        check_positive(file, "scale_out.nics_per_node", f64::from(self.nics_per_node))?;
        check_positive(file, "scale_out.planes", f64::from(self.planes))?;
        if self.routing == (Routing::Ecmp { subflows: 0 }) {
            return Err(Error::spec(file, "scale_out.routing.ecmp.subflows", "0; a flow is at least one"));
        }
        check_latency(file, "scale_out.latency", self.latency.value.value())?;
        let wire = self.raw.value;
        let rates = [
            ("achieved", Some(&self.achieved), wire),
            ("p2p", Some(&self.p2p), self.of_gpu(wire, gpus)),
            ("several", self.several.as_ref(), self.of_gpu(wire, gpus)),
        ];
        for (field, rate, most) in rates {
            let Some(rate) = rate.map(|rate| rate.value) else { continue };
            let field = format!("scale_out.{field}");
            check_rate(file, &field, rate.value())?;
            if rate > most {
                let whose = if most > wire { "wires of a GPU together" } else { "wire" };
                let why = format!("{rate} is more than the {most} of the {whose}; one of the two is wrong");
                return Err(Error::spec(file, field, why));
            }
        }
        Ok(())
    }

    /// What sends of one of so many `gpus` of a node have, a NIC having `rate`: all NICs that are its own, or one that it shares.
    pub fn of_gpu(&self, rate: BytesPerSec, gpus: u32) -> BytesPerSec {
        rate * (f64::from(self.nics_per_node) / f64::from(gpus)).max(1.0)
    }
}
