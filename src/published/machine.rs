//! Which cluster: the shipped one whose GPU, node and network come closest to what the source states.

use super::network::{Network, links};
use super::words::{number_before, squeezed, tokens};
use crate::cluster::Cluster;
use crate::error::Result;
use crate::spec::{Architecture, ClusterSpec, GpuSpec, Transport, shipped};
use crate::units::{BytesPerSec, Seconds};

/// What a source says about the machine.
#[derive(Debug, Clone, Default)]
pub struct Stated<'a> {
    pub gpu: &'a str,
    pub gpus: u32,
    pub gpus_per_node: Option<u32>,
    /// They are all that a node has, and not those of it that a test took.
    pub whole_nodes: bool,
    pub interconnect: &'a str,
}

/// A cluster, and in words how it was found.
#[derive(Debug, Clone)]
pub struct Chosen {
    pub cluster: Cluster,
    pub said: String,
}

/// Shipped clusters and their GPUs: read once for all cases.
pub struct Fleet {
    all: Vec<(ClusterSpec, GpuSpec)>,
}

impl Fleet {
    pub fn shipped() -> Result<Fleet> {
        let read = |name| {
            let cluster = ClusterSpec::find(name)?;
            let gpu = GpuSpec::find(&cluster.gpu)?;
            Ok((cluster, gpu))
        };
        Ok(Fleet { all: shipped("cluster").map(read).collect::<Result<_>>()? })
    }

    /// The cluster for a case, or why there is none.
    pub fn choose(&self, stated: &Stated) -> std::result::Result<Chosen, String> {
        let alike = self.with_gpu(stated.gpu)?;
        let network = Network::of(stated.interconnect, stated.gpus_per_node.unwrap_or(8));
        let (spec, gpu) = alike
            .into_iter()
            .min_by(|a, b| distance(&a.0, stated, network).total_cmp(&distance(&b.0, stated, network)))
            .expect("at least one cluster has the GPU");
        let mut spec = spec.clone();
        let mut said = spec.name.clone();
        // Nodes may be said to have fewer GPUs than the shipped ones.
        let several = stated.gpus > stated.gpus_per_node.map_or(spec.gpus_per_node, |n| n.min(spec.gpus_per_node));
        if several && spec.scale_out.is_none() && squeezed(&spec.name).contains("pcie") {
            self.lend_network(&mut spec, stated.gpus);
            said.push_str(" between whose nodes is what is usual");
        }
        if stated.gpus > spec.gpus_per_node && spec.scale_out.is_none() && spec.gpu.starts_with("tpu") {
            self.join_pods(&mut spec, stated.gpus);
            said.push_str(" beside others, over the data centre's network");
        }
        self.lend_host(&mut spec);
        if let Some(node) = fewer_a_node(&spec, stated) {
            narrow(&mut spec, node, stated.gpus);
            said.push_str(&format!(", {node} GPUs a node"));
        }
        if Cluster::new(&spec, gpu, stated.gpus).is_err() {
            fill_nodes(&mut spec, stated.gpus);
        }
        if let Some(network) =
            network.filter(|_| stated.gpus > spec.gpus_per_node || several && by_sockets(stated.interconnect))
        {
            said.push_str(&set_network(&mut spec, network, stated.gpus_per_node));
        }
        set_transport(&mut spec, stated.interconnect);
        said.push_str(set_sockets(&mut spec, stated, network));
        if let Some(total) = links(stated.interconnect) {
            said.push_str(&set_links(&mut spec, gpu, total));
        }
        let cluster = Cluster::new(&spec, gpu, stated.gpus).map_err(|e| e.to_string())?;
        Ok(Chosen { cluster, said })
    }

    /// Boxes that ship as one alone are joined by what others of their kind have: a NIC of 100 Gb/s each.
    fn lend_network(&self, spec: &mut ClusterSpec, gpus: u32) {
        spec.scale_out =
            self.all.iter().find(|(other, _)| other.name == "l40-pcie").and_then(|(l40, _)| l40.scale_out.clone());
        spec.nodes = gpus;
    }

    /// Where nothing is known of the CPUs, they are those of others: of a Grace Hopper beside each Grace Blackwell, else those of a DGX H100, as
    /// old or new as the GPUs may be. Only what is kept there asks for it.
    fn lend_host(&self, spec: &mut ClusterSpec) {
        let lender = if spec.gpu.starts_with("gb") { "alps-gh200" } else { "dgx-h100" };
        let Some((lender, _)) = self.all.iter().find(|(other, _)| other.name == lender) else { return };
        let mut host = lender.host.clone();
        let nodes = f64::from(spec.gpus_per_node) / f64::from(lender.gpus_per_node);
        host.iter_mut().for_each(|host| host.bandwidth.value = host.bandwidth.value * nodes);
        spec.host = spec.host.take().or(host);
    }

    /// Pods of TPUs are joined by the NICs of their hosts (Multislice): 4 x 200 Gb/s to eight chips of v6e, 2 x 100 to
    /// eight of v5e, which others are taken to have, too (cloud.google.com/tpu/docs/v6e, "Per-host NIC configuration").
    /// Inside, each is taken as one switch then.
    fn join_pods(&self, spec: &mut ClusterSpec, gpus: u32) {
        self.lend_network(spec, gpus.div_ceil(spec.gpus_per_node));
        let rate = if spec.gpu.contains("v6e") { 12.5e9 } else { 3.125e9 };
        spec.graph = None;
        let Some(out) = spec.scale_out.as_mut() else { return };
        let of_wire = |part: BytesPerSec, raw: BytesPerSec| BytesPerSec::new(rate * (part.value() / raw.value()));
        let raw = out.raw.value;
        out.achieved.value = of_wire(out.achieved.value, raw);
        out.p2p.value = of_wire(out.p2p.value, raw);
        out.raw.value = BytesPerSec::new(rate);
        out.nics_per_node = spec.gpus_per_node;
    }

    /// Clusters of the GPU that the words mean.
    fn with_gpu(&self, words: &str) -> std::result::Result<Vec<&(ClusterSpec, GpuSpec)>, String> {
        let best = self.all.iter().filter_map(|(_, gpu)| likeness(words, gpu)).max();
        let named: Vec<_> = self.all.iter().filter(|(_, gpu)| best.is_some() && likeness(words, gpu) == best).collect();
        if !named.is_empty() {
            return Ok(named);
        }
        if let Some(meant) = other_name(words) {
            return self.with_gpu(meant);
        }
        // A chip without a name may come with its peak.
        let peak = words.find("TFLOP").and_then(|at| number_before(words, at));
        let by_peak: Vec<_> = self.all.iter().filter(|(_, gpu)| peak.is_some_and(|p| has_peak(gpu, p))).collect();
        let family = generation(words).filter(|_| by_peak.is_empty());
        if let Some(family) = family {
            let all = || self.all.iter().filter(|(_, gpu)| gpu.architecture == family);
            let size = sized(&tokens(words));
            let as_large = |gpu: &GpuSpec| size.is_some() && size == sized(&tokens(&gpu.name));
            let fitting: Vec<_> = all().filter(|(_, gpu)| as_large(gpu)).collect();
            return Ok(if fitting.is_empty() { all().collect() } else { fitting });
        }
        if words.trim().is_empty() {
            return Err("gpu: not stated; name one, as in \"H100\"".into());
        }
        if by_peak.is_empty() {
            let known: std::collections::BTreeSet<_> = self.all.iter().map(|(_, gpu)| gpu.name.as_str()).collect();
            let known: Vec<_> = known.into_iter().collect();
            return Err(format!("gpu: no shipped cluster has {words:?}; known GPUs: {}", known.join(", ")));
        }
        Ok(by_peak)
    }
}

/// The generation of which a source says that the GPU is one, and no more; of several the one named first.
fn generation(words: &str) -> Option<Architecture> {
    let named = |word: &String| match word.as_str() {
        "volta" => Some(Architecture::Volta),
        "turing" => Some(Architecture::Turing),
        "ampere" => Some(Architecture::Ampere),
        "ada" => Some(Architecture::Ada),
        "hopper" => Some(Architecture::Hopper),
        "blackwell" => Some(Architecture::Blackwell),
        _ => None,
    };
    tokens(words).iter().find_map(named)
}

fn has_peak(gpu: &GpuSpec, tflops: f64) -> bool {
    gpu.peak.get("bf16").is_some_and(|peak| (peak.value.value() / (tflops * 1e12) - 1.0).abs() < 0.01)
}

/// What GPUs are called for short.
const SHORT: &[(&str, &str)] = &[
    ("mi300", "mi300x"),
    ("mi325", "mi325x"),
    ("mi350", "mi350x"),
    ("mi355", "mi355x"),
    ("a6000", "rtxa6000"),
    ("3090", "rtx3090"),
    ("4090", "rtx4090"),
    ("5090", "rtx5090"),
    ("rtx4090d", "rtx4090"),
    ("v5litepod", "v5e"),
    ("trillium", "v6e"),
    ("910b", "ascend910b"),
    ("910b1", "ascend910b"),
    ("910b2", "ascend910b"),
    ("910b3", "ascend910b"),
    ("ascend910b2", "ascend910b"),
    ("ascend910b3", "ascend910b"),
    ("hpu", "gaudi2"),
];

/// GPUs by names that are none of theirs: of a generation's kinds, and of the machines that clouds let
/// (docs.aws.amazon.com, instance types; cloud.google.com, accelerator-optimized machines).
const OTHER_NAMES: &[(&[&str], &str)] = &[
    (&["grace", "blackwell", "ultra"], "GB300"),
    (&["blackwell", "ultra"], "B300"),
    (&["grace", "blackwell"], "GB200"),
    (&["grace", "hopper"], "GH200"),
    (&["trillium"], "TPU v6e"),
    (&["v5p"], "TPU v5p"),
    (&["v5litepod"], "TPU v5e"),
    (&["v5", "lite"], "TPU v5e"),
    (&["ndm", "a100", "v4"], "A100-SXM-80GB"),
    (&["ndv4"], "A100-SXM-40GB"),
    (&["ndv5"], "H100-SXM-80GB"),
    (&["p4de"], "A100-SXM-80GB"),
    (&["p4d"], "A100-SXM-40GB"),
    (&["p5en"], "H200"),
    (&["p5e"], "H200"),
    (&["p5"], "H100-SXM-80GB"),
    (&["p6"], "B200"),
    (&["a4x"], "GB200"),
    (&["a4"], "B200"),
    (&["a3", "ultragpu"], "H200"),
    (&["a3", "ultra"], "H200"),
    (&["a3"], "H100-SXM-80GB"),
    (&["a2", "ultragpu"], "A100-SXM-80GB"),
    (&["a2"], "A100-SXM-40GB"),
];

fn other_name(words: &str) -> Option<&'static str> {
    let said = tokens(words);
    let all = |names: &[&str]| names.iter().all(|name| said.iter().any(|word| word == name));
    OTHER_NAMES.iter().find(|(names, _)| all(names)).map(|(_, gpu)| *gpu)
}

/// How well words fit the name of a GPU: its family must be there (a100, never a100x); memory, form factor and
/// the like count as they agree. Higher is better.
fn likeness(words: &str, gpu: &GpuSpec) -> Option<i32> {
    let (mut said, name) = (tokens(words), tokens(&gpu.name));
    said.iter_mut().for_each(|word| *word = of_one(without_count(word)).into());
    // "TPUv4" is one word where ours are two, "RTX 4090" are two where ours is one, and "MI300" leaves the X out.
    let joined = name.get(1).map(|second| format!("{}{second}", name[0]));
    let apart = (2..4).any(|n| said.windows(n).any(|run| run.concat() == name[0]));
    // Of chips that all have one name, that of the generation is the name.
    let family = name[0] == "tpu";
    let is = |word: &String| *word == name[0] && !family || Some(word) == joined.as_ref();
    let short = said.iter().any(|word| SHORT.contains(&(word, &name[0])));
    let both = family && said.contains(&name[0]) && name.get(1).is_some_and(|second| said.contains(second));
    if !(said.iter().any(is) || apart || short || both) {
        return None;
    }
    let pcie = |tokens: &[String]| {
        tokens.iter().any(|t| t == "pcie") || tokens.windows(2).any(|two| two[0] == "pci" && two[1] == "e")
    };
    let mut score = 0;
    score += match (sized(&said), sized(&name)) {
        // What is free of a memory is told as often as all of it.
        (Some(a), Some(b)) if (a / b - 1.0).abs() < 0.05 => 1,
        (Some(a), Some(b)) if (a / b - 1.0).abs() < 0.3 => -1,
        (Some(_), Some(_)) => -2,
        // "A100" alone is the larger one, which came to stay, and "H100" the one that everybody has.
        (None, Some(b)) if b == 40.0 || b == 16.0 || name[0] == "h100" => -1,
        _ => 0,
    };
    // Of boards of one chip that are told apart so.
    let third = |tokens: &[String]| tokens.iter().any(|t| t == "sxm3");
    score -= i32::from(third(&said) != third(&name));
    score += if pcie(&said) == pcie(&name) { 3 } else { 0 };
    Some(score)
}

/// Gigabytes of a GPU's memory, where words say them, of eight where that many are more than any has.
fn sized(tokens: &[String]) -> Option<f64> {
    let number = |word: &String| word.parse::<f64>().ok();
    let joined = |word: &String| word.strip_suffix("gb").or(word.strip_suffix('g'))?.parse::<f64>().ok();
    let apart = || tokens.windows(2).filter(|two| two[1] == "gb" || two[1] == "g").find_map(|two| number(&two[0]));
    let size = tokens.iter().find_map(joined).or_else(apart)?;
    Some(if size >= 320.0 { size / 8.0 } else { size })
}

/// The "h100" of "h100s", of "h100x8" and of "dgxh100".
fn of_one(word: &str) -> &str {
    let word = word.strip_suffix('s').filter(|one| one.ends_with("00")).unwrap_or(word);
    let named = ["dgx", "hgx"].iter().find_map(|box_| word.strip_prefix(box_)).filter(|rest| !rest.is_empty());
    let word = named.unwrap_or(word);
    let several = word.rsplit_once('x').filter(|(one, n)| one.ends_with("00") && n.parse::<u32>().is_ok());
    several.map_or(word, |(one, _)| one)
}

/// The "b200" of "8xb200".
fn without_count(word: &str) -> &str {
    let behind = word.trim_start_matches(|c: char| c.is_ascii_digit());
    if behind.len() == word.len() { word } else { behind.strip_prefix('x').filter(|w| !w.is_empty()).unwrap_or(word) }
}

/// How far a cluster is from what is stated, in powers of two of the node's network, or of its size.
fn distance(spec: &ClusterSpec, stated: &Stated, network: Option<Network>) -> f64 {
    let text = squeezed(stated.interconnect);
    // A domain of NVLink across trays is named by its size; a node of it is counted by its trays.
    let racks = text.contains("nvl72") == (spec.gpus_per_node > 8);
    let size = stated.gpus_per_node.map_or(0.0, |n| (f64::from(n) / f64::from(spec.gpus_per_node)).log2().abs());
    let pcie = text.contains("pcie") == squeezed(&spec.name).contains("pcie");
    let rate = match (network, &spec.scale_out) {
        (Some(network), Some(out)) => {
            let per_gpu = network.per_node() / f64::from(stated.gpus_per_node.unwrap_or(8));
            let has = f64::from(out.nics_per_node) * out.raw.value.value() / f64::from(spec.gpus_per_node);
            (per_gpu / has).log2().abs()
        }
        _ => 0.0,
    };
    // Between equals, the network that belongs to the machine, a NIC a GPU; and the smallest that holds the job.
    let own = spec.scale_out.as_ref().map_or(0, |out| out.nics_per_node.abs_diff(spec.gpus_per_node));
    let holds = spec.nodes.saturating_mul(spec.gpus_per_node) >= stated.gpus;
    let room = f64::from(own) * 1e-3 + if holds { 0.0 } else { 1e-3 } + f64::from(spec.nodes) * 1e-8;
    let narrow = if text.contains("oversubscri") == spec.pods.is_empty() { 0.25 } else { 0.0 };
    let named = -0.5 * named_alike(&text, &spec.name) as f64;
    let of_rack = if racks { 0.0 } else { 10.0 };
    let of_bus = if pcie { 0.0 } else { 5.0 };
    of_rack + of_bus + if racks && spec.gpus_per_node > 8 { 0.0 } else { size } + rate + room + narrow + named
}

/// How often the words name the cluster: by parts of its name that are no GPU and no number of bits.
fn named_alike(text: &str, name: &str) -> usize {
    let named = |part: &&String| part.len() > 3 && part.chars().all(char::is_alphabetic) && text.contains(*part);
    tokens(name).iter().filter(named).count()
}

/// GPUs of a node, where a source says that they are fewer than the shipped ones' and the job has several such nodes. Trays of a
/// rack are counted as nodes; they share its links all the same.
fn fewer_a_node(spec: &ClusterSpec, stated: &Stated) -> Option<u32> {
    let whole = spec.tray.is_none() && spec.graph.is_none() && !spec.gpu.starts_with("tpu");
    let several = |node: &u32| *node < spec.gpus_per_node && stated.gpus > *node && stated.gpus.is_multiple_of(*node);
    stated.gpus_per_node.filter(several).filter(|_| whole && stated.whole_nodes)
}

/// Nodes of `node` GPUs, with their part of the NICs.
pub fn narrow(spec: &mut ClusterSpec, node: u32, gpus: u32) {
    if let Some(out) = &mut spec.scale_out {
        out.nics_per_node = (out.nics_per_node * node).div_ceil(spec.gpus_per_node);
    }
    spec.gpus_per_node = node;
    spec.nodes = spec.nodes.max(gpus.div_ceil(node));
}

/// A job that does not fill its nodes uses an equal part of each.
fn fill_nodes(spec: &mut ClusterSpec, gpus: u32) {
    let whole = spec.gpus_per_node;
    if gpus > whole {
        narrow(spec, (1..=whole).rev().find(|n| gpus.is_multiple_of(*n)).unwrap_or(1), gpus);
    }
}

/// Gives the cluster the stated network, if it differs by more than a tenth. What its transports reach of the
/// wire stays in proportion.
fn set_network(spec: &mut ClusterSpec, network: Network, stated_node: Option<u32>) -> String {
    let node = spec.gpus_per_node;
    let Some(out) = &mut spec.scale_out else { return String::new() };
    let per_gpu = network.per_node() / f64::from(stated_node.unwrap_or(node));
    let has = f64::from(out.nics_per_node) * out.raw.value.value() / f64::from(node);
    if (per_gpu / has - 1.0).abs() < 0.1 {
        return String::new();
    }
    let of_wire = |rate: BytesPerSec| rate * (network.raw / out.raw.value.value());
    let (achieved, p2p) = (of_wire(out.achieved.value), out.p2p.value.min(of_wire(out.achieved.value)));
    out.achieved.value = achieved;
    out.p2p.value = p2p;
    out.raw.value = BytesPerSec::new(network.raw);
    out.nics_per_node = ((per_gpu * f64::from(node) / network.raw).round() as u32).max(1);
    format!(" with {} x {:.0} Gb/s a node", out.nics_per_node, network.raw * 8e-9)
}

/// What a step between nodes takes over Google's transports, GPUDirect-TCPX and TCPXO, which go by way of the host in place
/// of verbs: between what an all-gather of 8 MiB and an all-reduce of 8 bytes over two A3 Mega say (20 and 47 us,
/// traces/published/collectives.json and blind_network.json).
const BY_HOST: f64 = 40e-6;

/// What TCPX, which is TCP, reaches of the wire: 50 of 100 GB/s over two A3 High (traces/published/collectives.json).
const OF_WIRE_TCPX: f64 = 0.5;

/// What one thread of the CPU moves through TCP sockets: of x86, NCCL's 4 to 6 GB/s over one port of 100 Gb/s, and of Grace,
/// all-reduces of 8 MiB and more over four of 200 Gb/s, each with a CPU of its own (github issue NVIDIA/nccl#450;
/// github:eth-cscs/cscs-docs@80abed1 docs/software/communication/nccl.md).
const TCP_THREAD: f64 = 5e9;
const TCP_THREAD_GRACE: f64 = 0.9e9;

/// Threads that NCCL gives a connection on Google's virtual NIC; it has one on others that are not Amazon's
/// (github:NVIDIA/nccl@5067397c src/transport/net_socket.cc).
const TCP_THREADS_GVNIC: f64 = 4.0;

/// What TCP leaves of an Ethernet port to its payload, with frames of 1,500 bytes.
const OF_WIRE_TCP: f64 = 0.949;

/// A step between nodes through the kernel's sockets, twice: all-reduces of up to 256 bytes between two nodes of GH200 take 51
/// us (the same table, 18 over their own transport).
const TCP_LATENCY: f64 = 16e-6;

/// Whether words say that messages go through sockets; those of a mainboard hold CPUs.
fn by_sockets(words: &str) -> bool {
    let said = tokens(words);
    let says = |word: &str| said.iter().any(|said| said == word);
    says("tcp") || says("sockets") && !says("pcie")
}

/// Sockets of TCP, where a source says that the library has no RDMA: through the host's memory, by threads of its CPU. A node
/// has one port for them unless the words give it more, nodes of Grace one for each superchip.
fn set_sockets(spec: &mut ClusterSpec, stated: &Stated, network: Option<Network>) -> &'static str {
    let said = tokens(stated.interconnect);
    let says = |word: &str| said.iter().any(|said| said == word);
    let grace = ["gh", "gb2", "gb3"].iter().any(|chip| spec.gpu.starts_with(chip));
    let (node, part) = (spec.gpus_per_node, stated.gpus_per_node.unwrap_or(spec.gpus_per_node));
    let Some(out) = spec.scale_out.as_mut().filter(|_| by_sockets(stated.interconnect)) else { return "" };
    if network.is_none() && !grace {
        (out.nics_per_node, out.raw.value) = (1, BytesPerSec::new(12.5e9));
    }
    let threads = if ["gvnic", "gcp", "google"].iter().any(|cloud| says(cloud)) { TCP_THREADS_GVNIC } else { 1.0 };
    let thread = if grace { TCP_THREAD_GRACE } else { TCP_THREAD };
    // Threads belong to the node's one connection, however many NICs its rate is counted in.
    let ports = if grace { 1.0 } else { f64::from((out.nics_per_node * part.min(node)).div_ceil(node)) };
    let rate = (out.raw.value * OF_WIRE_TCP).min(BytesPerSec::new(threads * thread / ports));
    (out.achieved.value, out.p2p.value, out.several) = (rate, rate, None);
    out.latency.value = Seconds::new(TCP_LATENCY);
    ", TCP sockets"
}

/// Gives the network the transport that the words name.
fn set_transport(spec: &mut ClusterSpec, words: &str) {
    let text = squeezed(words).replace("notcpx", "").replace("withouttcpx", "");
    // Where a table names several networks, columns of what needs InfiniBand are of that.
    let efa = tokens(words).iter().any(|word| word == "efa");
    let other = ["cx7", "connectx", "infiniband"].iter().any(|word| text.contains(word));
    if let (true, Some(out)) = (efa && !other, &mut spec.scale_out) {
        out.transport = Transport::Efa;
    }
    let Some(out) = spec.scale_out.as_mut().filter(|_| text.contains("tcpx")) else { return };
    let part = if text.contains("tcpxo") { 1.0 } else { OF_WIRE_TCPX };
    out.latency.value = Seconds::new(BY_HOST);
    let most = out.raw.value * part;
    out.achieved.value = out.achieved.value.min(most);
    out.p2p.value = out.p2p.value.min(most);
}

/// Both directions of an NVLink of the third and fourth generation, and of the fifth (makers' data sheets: 600 GB/s of
/// twelve, 900 of eighteen, 1800 of eighteen).
const LINK: f64 = 50e9;
const LINK_5: f64 = 100e9;

/// Gives GPUs the stated links inside a node, if they differ by more than a tenth. What transports reach of them stays
/// in proportion.
fn set_links(spec: &mut ClusterSpec, gpu: &GpuSpec, total: f64) -> String {
    let up = &mut spec.scale_up;
    let link = if gpu.architecture == Architecture::Blackwell { LINK_5 } else { LINK };
    let part = total / (f64::from(up.links) * link);
    if up.links == 0 || (part - 1.0).abs() < 0.1 {
        return String::new();
    }
    for rate in [&mut up.bandwidth, &mut up.p2p].into_iter().chain(&mut up.switch_reduce) {
        rate.value = rate.value * part;
    }
    format!(" with links of {:.0} GB/s", total * 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(gpu: &str, gpus: u32, per_node: u32, interconnect: &str) -> std::result::Result<Chosen, String> {
        let stated = Stated { gpu, gpus, gpus_per_node: Some(per_node), whole_nodes: true, interconnect };
        Fleet::shipped().unwrap().choose(&stated)
    }

    #[test]
    fn gpu_and_network_decide() {
        let found = choose("A100-SXM-80GB (\"Ampere\")", 64, 8, "8x A100-class node; 8x200Gb/s NICs").unwrap();
        assert_eq!((found.cluster.gpu.name.as_str(), found.cluster.nodes()), ("a100-sxm4-80gb", 8));
        let slow = choose("A100-SXM-80GB", 64, 8, "NVLink3 node + 4x100Gb/s Omni-Path per node").unwrap();
        let out = slow.cluster.spec.scale_out.unwrap();
        assert!((f64::from(out.nics_per_node) * out.raw.value.value() / 50e9 - 1.0).abs() < 0.1, "{}", slow.said);
        assert!(out.achieved.value < out.raw.value && out.p2p.value <= out.achieved.value);
        assert_eq!(choose("H100 80GB SXM5", 8, 8, "").unwrap().cluster.gpu.name, "h100-sxm5");
        for (words, name) in
            [("8xB200", "b200-sxm"), ("H100s", "h100-sxm5"), ("RTX 4090", "rtx4090"), ("MI300", "mi300x")]
        {
            assert_eq!(choose(words, 8, 8, "").unwrap().cluster.gpu.name, name, "{words}");
        }
    }

    #[test]
    fn gpus_by_the_names_of_machines_that_have_them() {
        for (words, name) in [
            ("Grace Hopper superchip", "gh200-96gb"),
            ("NVIDIA Blackwell Ultra", "b300-sxm"),
            ("p5.48xlarge", "h100-sxm5"),
            ("H100x8", "h100-sxm5"),
            ("DGXH100", "h100-sxm5"),
            ("v5p-128", "tpu-v5p"),
            ("p4d.24xlarge", "a100-sxm4-40gb"),
            ("a3-ultragpu-8g", "h200-sxm"),
            ("Trillium", "tpu-v6e"),
        ] {
            let found = choose(words, 4, 4, "").unwrap().cluster.gpu.name;
            assert!(found.starts_with(&name[..4]), "{words}: {found}");
        }
    }

    #[test]
    fn memories_in_many_spellings() {
        for (words, name) in [
            ("A100 40G", "a100-sxm4-40gb"),
            ("A100-SXM4 40 GB", "a100-sxm4-40gb"),
            ("A100-SXM-64GB", "a100-sxm4-80gb"),
            ("DGX A100 (640GB)", "a100-sxm4-80gb"),
            ("A100 PCI-E 80GB", "a100-pcie-80gb"),
        ] {
            assert_eq!(choose(words, 8, 8, "").unwrap().cluster.gpu.name, name, "{words}");
        }
        // Of a generation, one of the stated size.
        assert!(choose("Ampere 80GB", 8, 8, "").unwrap().cluster.gpu.name.ends_with("80gb"));
    }

    #[test]
    fn nodes_have_as_many_gpus_as_are_stated() {
        let of = |per_node| choose("A100-SXM-80GB", 16, per_node, "10GbE").unwrap().cluster;
        assert_eq!([8, 4, 1].map(|node| of(node).spec.gpus_per_node), [8, 4, 1]);
        let rate = |per_node| {
            let out = of(per_node).spec.scale_out.unwrap();
            f64::from(out.nics_per_node) * out.raw.value.value() * 8e-9
        };
        assert_eq!([rate(8), rate(1)], [10.0; 2]);
    }

    /// Boxes with GPUs on PCIe ship alone; sources join them.
    #[test]
    fn boxes_without_a_network_get_one() {
        for gpu in ["L40S", "RTX 4090", "H100 PCIe", "A100 PCIe 80GB", "L20"] {
            let found = choose(gpu, 16, 8, "PCIe; 200Gb/s InfiniBand per node").unwrap().cluster;
            let out = found.spec.scale_out.as_ref().unwrap();
            let rate = f64::from(out.nics_per_node) * out.raw.value.value();
            assert!(found.nodes() == 2 && (rate / 25e9 - 1.0).abs() < 0.1, "{gpu}: {rate}");
        }
    }

    #[test]
    fn pods_beside_pods() {
        let found = choose("TPU v6e", 512, 256, "ICI").unwrap().cluster;
        assert_eq!((found.nodes(), found.spec.scale_out.unwrap().raw.value.value()), (2, 12.5e9));
        assert!(choose("TPU v6e", 256, 256, "ICI").unwrap().cluster.spec.graph.is_some());
    }

    #[test]
    fn a_transport_by_way_of_the_host_is_slower() {
        let out = |words: &str| {
            let found = choose("H100-SXM-80GB", 16, 8, words).unwrap().cluster.spec.scale_out.unwrap();
            (found.latency.value.value(), found.achieved.value.value() / found.raw.value.value())
        };
        let [verbs, tcpxo, tcpx] = ["8x200Gb", "8x200Gb TCPXO", "4x200Gb TCPX"].map(|w| out(&format!("NVLink4; {w}")));
        let transport = |words: &str| choose("B200", 16, 8, words).unwrap().cluster.spec.scale_out.unwrap().transport;
        assert_eq!(
            [transport("NVLink5 + EFA 3200 Gb/s per node"), transport("EFA / CX7")],
            [Transport::Efa, Transport::default()]
        );
        assert!(tcpxo.0 > 5.0 * verbs.0 && tcpxo.1 > 0.7 && tcpx.0 == tcpxo.0 && tcpx.1 == OF_WIRE_TCPX);
    }

    #[test]
    fn of_two_machines_the_one_whose_parts_are_named() {
        let name = |words: &str| choose("L20", 8, 8, words).unwrap().cluster.spec.name;
        assert_eq!(name("PCIe"), "l20-pcie");
        assert_eq!(name("PCIe (two sockets, PCIe switch + QPI)"), "l20-sockets-pcie");
    }

    #[test]
    fn stated_links_are_taken() {
        let reach = |words: &str| choose("A100", 8, 8, words).unwrap().cluster.spec.scale_up.bandwidth.value.value();
        assert!((reach("P2P 100 GB/s intra") / reach("") - 1.0 / 6.0).abs() < 1e-9);
        assert_eq!(reach("P2P 600 GB/s intra"), reach("NVLink"));
    }

    #[test]
    fn a_chip_without_a_name_is_known_by_its_peak() {
        assert!(choose("some chip of 312 TFLOP/s", 8, 8, "").unwrap().cluster.gpu.name.starts_with("a100"));
        let newest = choose("not stated (FA4 => Blackwell/Hopper)", 4, 8, "").unwrap();
        assert_eq!(newest.cluster.gpu.architecture, Architecture::Blackwell);
        let why = choose("WSE-3", 8, 8, "").unwrap_err();
        assert!(why.contains("WSE-3") && why.contains("h100-sxm5"), "{why}");
    }

    #[test]
    fn a_job_that_does_not_fill_its_nodes_uses_a_part_of_each() {
        let found = choose("H100-SXM-80GB", 12, 8, "8x400Gb/s IB").unwrap();
        assert_eq!((found.cluster.spec.gpus_per_node, found.cluster.nodes()), (6, 2));
    }
}
