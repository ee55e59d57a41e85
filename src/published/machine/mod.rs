//! Which cluster: the shipped one whose GPU, node and network come closest to what the source states.
//!
//! The words of a row mean a GPU ([`names`]) and a network ([`network`]); of the clusters that have the GPU the nearest is
//! taken, and then given the network, the links and the transport ([`transport`]) that are stated.

mod names;
mod network;
mod transport;

use crate::cluster::Cluster;
use crate::error::Result;
use crate::published::row::words::{number_before, squeezed, tokens};
use crate::spec::{Architecture, ClusterSpec, GpuSpec, Transport, shipped};
use crate::units::BytesPerSec;
use names::{generation, has_peak, likeness, other_name, sized};
use network::{Network, links};
use transport::{by_sockets, names_verbs, set_sockets, set_transport};

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

/// Whether words name a GPU that ships, and not this one, which does too: "NVIDIA H100 80GB HBM3" is any H100. What a file of
/// one's own calls its GPU is no other's name.
pub fn is_another(words: &str, gpu: &GpuSpec) -> Result<bool> {
    let named = |gpu: &GpuSpec| likeness(words, gpu).is_some();
    let others = shipped("gpu").map(GpuSpec::find).collect::<Result<Vec<_>>>()?;
    let ships = others.iter().any(|other| other.name == gpu.name);
    Ok(ships && !named(gpu) && others.iter().any(named))
}

/// A cluster, and in words how it was found.
#[derive(Debug, Clone)]
pub struct Chosen {
    pub cluster: Cluster,
    pub said: String,
    /// What is to be known of it beside its name.
    pub why: Vec<String>,
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
        let (words, taken) = names::with_form(stated.gpu, stated.interconnect);
        let alike = self.with_gpu(&words)?;
        let network = Network::of(stated.interconnect, stated.gpus_per_node.unwrap_or(8));
        // A generation or a peak alone may be a card's or a board's.
        let card = names::is_card(&tokens(&words));
        let of_bus = |spec: &ClusterSpec| if card == squeezed(&spec.name).contains("pcie") { 0.0 } else { 5.0 };
        let far = |spec: &ClusterSpec| distance(spec, stated, network) + of_bus(spec);
        let (spec, gpu) =
            alike.into_iter().min_by(|a, b| far(&a.0).total_cmp(&far(&b.0))).expect("at least one cluster has the GPU");
        let (mut spec, mut gpu) = (spec.clone(), gpu.clone());
        let mut why: Vec<String> = taken.into_iter().collect();
        why.extend(names::other_form(&words, &gpu, &spec));
        why.extend(names::set_memory(&mut gpu, &words));
        why.extend(names::bridges(stated.interconnect, &spec));
        let gpu = &gpu;
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
        let set = set_transport(&mut spec, gpu.architecture, stated.interconnect).map_err(|e| e.to_string())?;
        said.push_str(set);
        said.push_str(set_sockets(&mut spec, stated, network));
        if let Some(total) = links(stated.interconnect) {
            said.push_str(&set_links(&mut spec, gpu, total));
        }
        let cluster = Cluster::new(&spec, gpu, stated.gpus).map_err(|e| e.to_string())?;
        Ok(Chosen { cluster, said, why })
    }

    /// Boxes that ship as one alone are joined by what others of their kind have: a NIC of 100 Gb/s each.
    fn lend_network(&self, spec: &mut ClusterSpec, gpus: u32) {
        spec.scale_out =
            self.all.iter().find(|(other, _)| other.name == "l40-pcie").and_then(|(l40, _)| l40.scale_out.clone());
        spec.nodes = gpus;
    }

    /// Where nothing is known of the CPUs, they are those of others: of a Grace Hopper beside each Grace Blackwell, else
    /// those of a DGX H100, as old or new as the GPUs may be. Only what is kept there asks for it.
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
        let words = match names::whole_name(words) {
            Some(None) => return Err(self.unknown(words)),
            Some(Some(meant)) => meant,
            None => words,
        };
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
            return Err(self.unknown(words));
        }
        Ok(by_peak)
    }

    fn unknown(&self, words: &str) -> String {
        let known: std::collections::BTreeSet<_> = self.all.iter().map(|(_, gpu)| gpu.name.as_str()).collect();
        let known: Vec<_> = known.into_iter().collect();
        format!("gpu: no shipped cluster has {words:?}; known GPUs: {}", known.join(", "))
    }
}

/// How far a cluster is from what is stated, in powers of two of the node's network, or of its size.
fn distance(spec: &ClusterSpec, stated: &Stated, network: Option<Network>) -> f64 {
    let text = squeezed(stated.interconnect);
    // A domain of NVLink across trays is named by its size; a node of it is counted by its trays.
    let racks = text.contains("nvl72") == (spec.gpus_per_node > 8);
    let size = stated.gpus_per_node.map_or(0.0, |n| (f64::from(n) / f64::from(spec.gpus_per_node)).log2().abs());
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
    let named = -0.5 * named_alike(&format!("{} {}", stated.interconnect, stated.gpu), &spec.name) as f64;
    let of_rack = if racks { 0.0 } else { 10.0 };
    // Amazon's network is no InfiniBand, and none is Amazon's.
    let amazons = spec.scale_out.as_ref().is_some_and(|out| out.transport == Transport::Efa);
    let of_transport = if amazons && names_verbs(stated.interconnect) { 10.0 } else { 0.0 };
    of_rack + of_transport + if racks && spec.gpus_per_node > 8 { 0.0 } else { size } + rate + room + narrow + named
}

/// What sources say of cards that do not write to each other, for which NCCL's name is shared memory.
const BY_MEMORY: &[&str] = &["nop2p", "withoutp2p", "p2pdisable", "hostmemory", "cpu'smemory", "shm"];

/// How often the words name the cluster: by parts of its name that are no GPU and no number of bits. Short ones (`efa`, `opa`,
/// `dgx`) are words of their own.
fn named_alike(words: &str, name: &str) -> usize {
    let (mut text, mut said) = (squeezed(words), tokens(words));
    // Boards with NVLink that are said to have PCIe alone are those of a machine that hides their peers.
    let hidden = text.contains("sxm") && text.contains("pcie") && !text.contains("nvlink");
    let by_memory = hidden || BY_MEMORY.iter().any(|word| text.contains(word));
    text.push_str(if by_memory { " sharedmemory" } else { "" });
    said.extend(text.contains("omnipath").then(|| "opa".into()));
    let named = |part: &&String| match part.len() {
        3 => said.iter().any(|word| word.starts_with(*part)),
        len => len > 3 && text.contains(*part),
    };
    tokens(name).iter().filter(|part| part.chars().all(char::is_alphabetic)).filter(named).count()
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

    use transport::OF_WIRE_TCPX;

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
    fn what_gpus_call_themselves_tells_one_from_another() {
        let another = |words: &str, gpu: &str| is_another(words, &GpuSpec::find(gpu).unwrap()).unwrap();
        for (words, own, other) in [
            ("NVIDIA H100 80GB HBM3", "h100-sxm5", "a100-sxm4-80gb"),
            ("NVIDIA H20", "h20-sxm5", "h200-sxm5"),
            ("NVIDIA A100-SXM4-40GB", "a100-sxm4-80gb", "h100-sxm5"),
            ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb", "t4"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada", "rtxpro6000"),
            ("AMD Instinct MI300X OAM", "mi300x", "mi355x"),
        ] {
            assert!(!another(words, own) && another(words, other), "{words}");
        }
        assert!(!another("Orin", "h100-sxm5"));
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
            ("g5.48xlarge", "a10g"),
            ("g6e.48xlarge", "l40s"),
            ("DGX Spark", "gb10"),
            ("DGX-1", "v100-sxm2-32gb"),
            ("DGX-2", "v100-sxm3-32gb"),
            ("Frontier", "mi250x-gcd"),
            ("Alps", "gh200-96gb"),
            ("Atlas 800T A2", "ascend910b"),
            ("RTX 6000 Pro (Blackwell)", "rtxpro6000"),
            ("RTX 6000 Ada Generation", "rtx6000-ada"),
        ] {
            let found = choose(words, 4, 4, "").unwrap().cluster.gpu.name;
            assert!(found.starts_with(&name[..4]), "{words}: {found}");
        }
        // Parts of other names are none.
        for words in ["A2", "Atlas 900 A3", "BI-V100", "Quadro RTX 6000"] {
            assert!(choose(words, 8, 8, "").is_err(), "{words}");
        }
    }

    /// Which form a card has decides before its memory does.
    #[test]
    fn cards_of_pcie_are_no_boxes_with_switches() {
        for (gpu, interconnect, name, memory) in [
            ("A100-PCIE-40GB", "", "a100-pcie", 40.0),
            ("A100 80GB", "PCIe Gen4 x16", "a100-pcie", 80.0),
            ("A100", "PCIe Gen4, no NVLink + 4x100Gb/s IB", "a100-pcie", 80.0),
            ("A100", "PCIe, P2P disabled", "a100-sharedmemory-pcie", 80.0),
            ("A100-80GB PCIe (title: A100-SXM4-80GB PCIe)", "PCIe", "a100-sharedmemory-pcie", 80.0),
            ("A100 PCIe", "PCIe + NVLink bridges (pairs)", "a100-pcie", 80.0),
            ("A800 PCIe 80GB", "", "a100-pcie", 80.0),
            ("H800 PCIe", "", "h100-pcie", 80.0),
            ("H100 NVL 94GB", "", "h100-nvl-pcie", 94.0),
            ("H100 NVL", "PCIe Gen5", "h100-nvl-pcie", 94.0),
            ("H100 PCIe 80GB", "", "h100-pcie", 80.0),
            ("V100-PCIE-16GB", "", "v100-pcie", 16.0),
            ("A100 80GB", "NVLink3 + 8x200Gb/s IB (PCIe Gen4)", "dgx-a100", 80.0),
            ("H100", "8x400Gb/s ConnectX-7 (PCIe Gen5)", "dgx-h100", 80.0),
            ("H100-SXM-80GB", "PCIe to the host", "dgx-h100", 80.0),
        ] {
            let found = choose(gpu, 8, 8, interconnect).unwrap();
            assert_eq!(found.cluster.spec.name, name, "{gpu}, {interconnect}");
            let has = found.cluster.gpu.memory.value.value() / f64::from(1 << 30);
            assert!((has / memory - 1.0).abs() < 0.01, "{gpu}: {has}");
            let bridged = interconnect.contains("bridges") || gpu.contains("NVL");
            assert_eq!(found.why.iter().any(|why| why.contains("bridges")), bridged, "{gpu}");
        }
        assert!(choose("H800 PCIe", 8, 8, "").unwrap().why.iter().any(|why| why.contains("H100")));
        assert!(choose("B200", 8, 8, "PCIe Gen5").unwrap().why.iter().any(|why| why.contains("PCIe")));
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
        let latency = |gpu: &str, words: &str| {
            let out = choose(gpu, 16, 8, words).unwrap().cluster.spec.scale_out.unwrap();
            (out.latency.value.value() * 1e6).round()
        };
        assert_eq!([latency("H100", "EFA"), latency("A10G", "25Gb/s EFA per node")], [20.0, 65.0]);
        assert!(tcpxo.0 > 5.0 * verbs.0 && tcpxo.1 > 0.7 && tcpx.0 == tcpxo.0 && tcpx.1 == OF_WIRE_TCPX);
    }

    #[test]
    fn of_two_machines_the_one_whose_parts_are_named() {
        let name = |words: &str| choose("L20", 8, 8, words).unwrap().cluster.spec.name;
        assert_eq!(name("PCIe"), "l20-pcie");
        assert_eq!(name("PCIe (two sockets, PCIe switch + QPI)"), "l20-sockets-pcie");
        for (gpu, words, found) in [
            ("H100-SXM-80GB", "NVLink + EFA", "h100-8x400-efa"),
            ("H200", "NVLink + EFA 3200 Gb/s per node", "h200-16x200-efa"),
            ("B200", "NVLink5; 8x400 Gb/s EFA per node", "b200-8x400-efa"),
            ("B300", "NVLink5; 16x400 Gb/s EFA per node", "b300-16x400-efa"),
            ("H100-SXM-80GB", "NVLink + IB", "dgx-h100"),
            ("A100-SXM4-40GB", "NVLink + 4x100Gb/s EFA", "a100-40gb-4x100-efa"),
            ("A100-SXM4-40GB", "NVLink + 4x100Gb/s IB", "a100-40gb-8x200"),
            ("A100-SXM4-80GB", "NVLink + 4x100Gb/s Omni-Path", "a100-4x100-opa"),
        ] {
            let chosen = choose(gpu, 64, 8, words).unwrap();
            let efa = chosen.cluster.spec.scale_out.as_ref().unwrap().transport == Transport::Efa;
            assert_eq!((chosen.cluster.spec.name.as_str(), efa), (found, words.contains("EFA")), "{gpu}, {words}");
        }
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
