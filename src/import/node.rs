//! What a machine says of itself, and the cluster made of such nodes.

use super::peer_links::PeerLinks;
use crate::error::{Error, Result};
use crate::spec::{ClusterSpec, Origin, ScaleOut, Sourced};
use crate::units::BytesPerSec;

/// A network port.
#[derive(Debug, Clone, PartialEq)]
pub struct Nic {
    pub name: String,
    /// Bytes per second and direction, where the machine says it.
    pub rate: Option<f64>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Node {
    pub gpus: u32,
    /// Compute capability of the GPUs, times ten.
    pub sm: Option<u32>,
    /// Their maker and their device id on PCI.
    pub pci: Option<(u32, u32)>,
    /// Links of the GPU that has the fewest.
    pub links: u32,
    /// They lead to a switch.
    pub switched: bool,
    /// Bridges join some GPUs and not others: so many groups have no such link between them. 0 or 1 otherwise.
    pub islands: u32,
    /// Links from GPU to GPU, where there is no switch.
    pub peer_links: PeerLinks,
    pub nics: Vec<Nic>,
    /// CPUs that the GPUs hang on.
    pub sockets: u32,
}

/// Who makes GPUs, by the number on PCI.
const NVIDIA: u32 = 0x10de;

/// Device ids on PCI of NVIDIA's GPUs, and the shipped cluster that has them. Ids are those of the table "Compatible GPUs" in the
/// README of github:NVIDIA/open-gpu-kernel-modules: of 015742d3, and for Blackwell of driver 610.43.03. GPUs that no shipped
/// cluster has are left out, as the A100 PCIe of 40 GB (0x20f1), the H800 PCIe (0x2322) and the H20 of 141 GB (0x232c).
const DEVICES: &[(u32, &str)] = &[
    (0x20b0, "a100-40gb-8x200"),
    (0x20b2, "dgx-a100"),
    (0x20b5, "a100-pcie"),
    (0x20b7, "a30-pcie"),
    (0x20f3, "a800-8x200"),
    (0x2204, "rtx3090-pcie"),
    (0x2230, "rtxa6000-pcie"),
    (0x2235, "a40-pcie"),
    (0x2236, "a10-pcie"),
    (0x2237, "a10g-pcie"),
    (0x2321, "h100-nvl-pcie"),
    (0x2324, "h800-8x400"),
    (0x2329, "h20-8x400"),
    (0x2330, "dgx-h100"),
    (0x2331, "h100-pcie"),
    (0x2335, "dgx-h200"),
    (0x2342, "alps-gh200"),
    (0x2684, "rtx4090-pcie"),
    (0x26b1, "rtx6000-ada-pcie"),
    (0x26b5, "l40-pcie"),
    (0x26b9, "l40s-pcie"),
    (0x26ba, "l20-pcie"),
    (0x27b8, "l4-pcie"),
    (0x2901, "dgx-b200"),
    (0x2941, "gb200-nvl72"),
    (0x2b85, "rtx5090-pcie"),
    (0x2bb1, "rtxpro6000-pcie"),
    (0x2bb5, "rtxpro6000-pcie"),
    (0x2e12, "dgx-spark"),
    (0x3182, "dgx-b300"),
    (0x31c2, "gb300-nvl72"),
    (0x31c3, "gb300-nvl72"),
];

/// What a note says to whoever knows better.
const BETTER: &str = "if another cluster is more alike, name it with --like";

/// What a note says of bridges between some GPUs only.
const ISLANDS: &str = "groups of GPUs with NVLink bridges inside and none between them; a ring over all of them goes \
                       over PCIe, and so is everything taken to go";

/// What a note says of NICs that nothing is known of.
const UNKNOWN_NICS: &str = "are left out: the file does not state their rates, and the cluster that rates are taken from has no \
                            network; name one that has with --like, or take NCCL's file";

/// Shipped boxes with networks of 100, 200 and 400 Gb/s, to take one from where a box has none.
const NETWORKS: [&str; 3] = ["l40-pcie", "dgx-a100", "dgx-h100"];

/// That of [`NETWORKS`] whose NICs are as fast as this, bytes a second, or come nearest.
fn network_like(rate: f64) -> Result<(String, ScaleOut)> {
    let find = |name: &str| ClusterSpec::find(name).map(|spec| Some((spec.name, spec.scale_out?)));
    let all = NETWORKS.into_iter().filter_map(|name| find(name).transpose()).collect::<Result<Vec<_>>>()?;
    let off = |(_, out): &(String, ScaleOut)| (out.raw.value.value() / rate).ln().abs();
    let nearest = all.into_iter().min_by(|a, b| off(a).total_cmp(&off(b)));
    nearest.ok_or_else(|| Error::spec("models/cluster", "scale_out", "is missing of all boxes with a network"))
}

impl Node {
    /// The shipped cluster whose nodes are most alike, and what to say of that choice: what a machine does not say of itself is
    /// taken from there. Many GPUs share a compute capability, which decides where their id is not known.
    pub fn like(&self, file: &str) -> Result<(ClusterSpec, Option<String>)> {
        let known = self.by_id().map(ClusterSpec::find).transpose()?;
        if let Some(known) = known.as_ref().filter(|known| self.check_links(known, file).is_ok()) {
            return Ok((known.clone(), self.part_of(known)));
        }
        let by_sm = self.by_sm(file).and_then(ClusterSpec::find);
        match (known, by_sm) {
            // That its links are others is said when the cluster is made.
            (Some(known), Err(_)) => Ok((known, None)),
            (Some(known), Ok(base)) => {
                let ClusterSpec { name, gpu, .. } = known;
                let note = format!(
                    "GPUs are {gpu}, and their links are not those of {name}: rates are those of {}; {BETTER}",
                    base.name
                );
                Ok((ClusterSpec { gpu, ..base }, Some(note)))
            }
            (None, by_sm) => by_sm.map(|base| {
                let note = self.taken_for(&base);
                (base, Some(note))
            }),
        }
    }

    /// The shipped cluster that has these GPUs, if one has.
    fn by_id(&self) -> Option<&'static str> {
        let id = self.pci.filter(|(maker, _)| *maker == NVIDIA).map(|(_, id)| id)?;
        DEVICES.iter().find(|(known, _)| *known == id).map(|(_, name)| *name)
    }

    /// What a note says of GPUs that are told by their compute capability.
    fn taken_for(&self, base: &ClusterSpec) -> String {
        let unknown = match self.pci {
            Some((maker, id)) => format!("no shipped cluster has GPUs of PCI id {maker:04x}:{id:04x}"),
            None => "the file does not give the GPUs' PCI id".into(),
        };
        let sm = self.sm.unwrap_or_default();
        format!(
            "{unknown}: by sm {sm} they are taken for {}, and what the file does not say is as of {}; {BETTER}",
            base.gpu, base.name
        )
    }

    /// What a note says of a part of the GPUs that NVLink joins in a rack: a job on one tray sees no others.
    fn part_of(&self, known: &ClusterSpec) -> Option<String> {
        let (own, all) = (self.gpus, known.gpus_per_node);
        (known.tray.is_some() && own < all).then(|| {
            format!(
                "{own} of the {all} GPUs that NVLink joins in {}: no more are taken to be joined; let a job over all of \
                 them write the file",
                known.name
            )
        })
    }

    /// The shipped cluster whose GPUs have this compute capability.
    fn by_sm(&self, file: &str) -> Result<&'static str> {
        match (self.sm, self.joined()) {
            (Some(80..=85), 1..) => Ok("dgx-a100"),
            (Some(80..=85), 0) => Ok("a100-pcie"),
            (Some(89), _) => Ok("l40s-pcie"),
            (Some(90), 1..) => Ok("dgx-h100"),
            (Some(90), 0) => Ok("h100-pcie"),
            // As HIP numbers gfx942 and gfx950.
            (Some(94), _) => Ok("mi300x-8x400"),
            (Some(95), _) => Ok("mi355x-8x400"),
            (Some(103), _) if self.gpus > 8 => Ok("gb300-nvl72"),
            (Some(103), _) => Ok("dgx-b300"),
            (Some(100..=109), _) if self.gpus > 8 => Ok("gb200-nvl72"),
            (Some(100..=109), _) => Ok("dgx-b200"),
            (sm, _) => {
                let why = match sm {
                    Some(sm) => format!("sm {sm} is that of no shipped cluster; name one that is alike with --like"),
                    None => "the file does not say which; name a cluster that is alike with --like".into(),
                };
                Err(Error::spec(file, "gpu", why))
            }
        }
    }

    /// Links of a GPU that lead to all others; none where bridges join only some.
    fn joined(&self) -> u32 {
        if self.islands > 1 { 0 } else { self.links }
    }

    /// What the cluster made of it leaves out.
    pub fn notes(&self, made: &ClusterSpec) -> Vec<String> {
        let islands = (self.islands > 1).then(|| format!("{} {ISLANDS}", self.islands));
        let unknown = (!self.nics.is_empty() && made.scale_out.is_none())
            .then(|| format!("NICs, {} of them, {UNKNOWN_NICS}", self.nics.len()));
        let led = (self.joined() > 0).then(|| self.peer_links.note(&made.scale_up)).flatten();
        islands.into_iter().chain(unknown).chain(led).chain(self.left_out()).collect()
    }

    /// Bytes a second of the fastest NIC; 0 where no rate is known.
    fn fastest(&self) -> f64 {
        self.nics.iter().filter_map(|n| n.rate).fold(0.0, f64::max)
    }

    /// Whether a NIC is for jobs: ports much slower than the fastest are for storage and logins.
    fn of_jobs(&self, nic: &Nic) -> bool {
        nic.rate.is_none_or(|rate| rate >= 0.9 * self.fastest())
    }

    /// What a note says of NICs that are not for jobs.
    fn left_out(&self) -> Option<String> {
        let slow = self.nics.iter().filter(|nic| !self.of_jobs(nic));
        let named =
            slow.map(|n| format!("{} ({})", n.name, BytesPerSec::new(n.rate.unwrap_or(0.0)))).collect::<Vec<_>>();
        (!named.is_empty()).then(|| {
            format!(
                "NICs slower than the fastest, {}, are left out: {}; they are taken to be for storage and logins",
                BytesPerSec::new(self.fastest()),
                named.join(", ")
            )
        })
    }

    /// Errors: links of another kind than those whose rates are taken over. One GPU sends over none.
    fn check_links(&self, base: &ClusterSpec, file: &str) -> Result<()> {
        let (own, theirs) = (self.joined(), base.scale_up.links);
        let why = match (own, theirs) {
            _ if self.gpus == 1 => return Ok(()),
            (0, 2..) => format!(
                "no NVLink that joins all GPUs, and the rates of {} are those of {theirs} links; name a box of PCIe \
                 with --like, as h100-pcie (`nvidia-smi topo -mp` leaves links out: take `topo -m`)",
                base.name
            ),
            (2.., 0..=1) => format!(
                "{own} links a GPU, and the rates of {} are those of PCIe; name a cluster with such links with --like",
                base.name
            ),
            _ => return Ok(()),
        };
        Err(Error::spec(file, "links", why))
    }

    /// A cluster of such nodes: counts and rates as read, what is not said as `base` has it.
    pub fn cluster(&self, name: &str, base: &ClusterSpec, file: &str) -> Result<ClusterSpec> {
        self.check_links(base, file)?;
        let mut spec = ClusterSpec { name: name.into(), gpus_per_node: self.gpus, tray: None, ..base.clone() };
        spec.pods.clear();
        // Where links go by way of the CPUs, those of this machine count.
        spec.scale_up.sockets = spec.scale_up.sockets.filter(|_| self.sockets > 1);
        spec.scale_up.sockets.iter_mut().for_each(|sockets| sockets.gpus = self.gpus.div_ceil(self.sockets));
        let read = |why: &str| format!("{why}: read from {file}");
        if self.gpus > 1 && self.joined() > 0 && self.links != base.scale_up.links {
            let ratio = f64::from(self.links) / f64::from(base.scale_up.links);
            let scaled = |rate: &mut Sourced<BytesPerSec>| {
                *rate = derived(
                    rate.value * ratio,
                    read(&format!("{} links of the {} of {}", self.links, base.scale_up.links, base.name)),
                );
            };
            scaled(&mut spec.scale_up.bandwidth);
            scaled(&mut spec.scale_up.p2p);
            spec.scale_up.switch_reduce.iter_mut().for_each(scaled);
            spec.scale_up.links = self.links;
        }
        if !self.switched {
            spec.scale_up.switch_reduce = None;
        }
        if self.switched {
            (spec.scale_up.per_peer, spec.scale_up.package) = (None, None);
        } else if self.peer_links != PeerLinks::default() && self.joined() > 0 {
            self.peer_links.share(&mut spec, base, read);
        }
        spec.scale_up.package = spec.scale_up.package.filter(|package| self.gpus.is_multiple_of(package.gpus));
        self.network(&mut spec, read)?;
        spec.check(file)?;
        Ok(spec)
    }

    fn network(&self, spec: &mut ClusterSpec, read: impl Fn(&str) -> String) -> Result<()> {
        if self.nics.is_empty() {
            (spec.scale_out, spec.nodes) = (None, 1);
            return Ok(());
        }
        let fastest = self.fastest();
        let mut reached = "of which as much is reached".to_string();
        if spec.scale_out.is_none() && fastest > 0.0 {
            let (name, network) = network_like(fastest)?;
            reached.push_str(&format!(" as on {name}"));
            spec.scale_out = Some(network);
        }
        let Some(out) = &mut spec.scale_out else { return Ok(()) };
        out.nics_per_node = self.nics.iter().filter(|nic| self.of_jobs(nic)).count() as u32;
        if fastest > 0.0 {
            let ratio = fastest / out.raw.value.value();
            out.raw = Sourced {
                provenance: Origin::Measured,
                ..derived(BytesPerSec::new(fastest), read("speed of the NICs"))
            };
            out.achieved = derived(out.achieved.value * ratio, read(&format!("speed of the NICs, {reached}")));
        }
        let most = out.of_gpu(out.achieved.value, self.gpus);
        let sends = [Some(&mut out.p2p), out.several.as_mut()].into_iter().flatten();
        for rate in sends.filter(|rate| rate.value > most) {
            *rate = derived(most, rate.source.clone());
        }
        Ok(())
    }
}

/// How many groups of `n` are joined by no pair.
pub fn islands(n: usize, pairs: impl Iterator<Item = (usize, usize)>) -> u32 {
    let mut group: Vec<usize> = (0..n).collect();
    for (a, b) in pairs {
        let (from, to) = (group[a], group[b]);
        group.iter_mut().filter(|g| **g == from).for_each(|g| *g = to);
    }
    group.sort_unstable();
    group.dedup();
    group.len() as u32
}

/// To a MB/s: more digits than that no machine has.
fn derived(value: BytesPerSec, source: String) -> Sourced<BytesPerSec> {
    let value = BytesPerSec::new((value.value() / 1e6).round().max(1.0) * 1e6);
    Sourced { value, source, provenance: Origin::Derived }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_becomes_a_cluster() {
        let nic = |rate| Nic { name: "storage".into(), rate: Some(rate) };
        let nics = vec![nic(25e9), nic(25e9), nic(25e9), nic(25e9), nic(1.25e9)];
        let node =
            Node { gpus: 4, sm: Some(90), links: 18, switched: true, nics, sockets: 2, islands: 1, ..Node::default() };
        let (base, _) = node.like("x").unwrap();
        let spec = node.cluster("mine", &base, "x").unwrap();
        let out = spec.scale_out.as_ref().unwrap();
        assert_eq!((spec.gpus_per_node, out.nics_per_node, out.raw.value.value()), (4, 4, 25e9));
        assert!(out.achieved.value < out.raw.value && spec.scale_up == base.scale_up);
        let left_out = node.notes(&spec);
        assert!(left_out.len() == 1 && left_out[0].contains("storage (1.25 GB/s)"), "{left_out:?}");
        // Sends to many peers reach 37 GB/s of the 50 of the others.
        assert_eq!(out.several.as_ref().unwrap().value, out.achieved.value);
        let alone = Node { nics: vec![], links: 9, switched: false, ..node };
        let spec = alone.cluster("mine", &base, "x").unwrap();
        assert!(spec.scale_out.is_none() && spec.nodes == 1 && spec.scale_up.switch_reduce.is_none());
        assert!(
            (spec.scale_up.bandwidth.value.value() * 2.0 / base.scale_up.bandwidth.value.value() - 1.0).abs() < 1e-9
        );
        let why = Node { sm: None, ..alone }.like("t.txt").unwrap_err().to_string();
        assert!(why.contains("--like"), "{why}");
    }

    fn of(id: u32, gpus: u32, sm: u32, links: u32) -> Node {
        let pci = Some((NVIDIA, id));
        Node { gpus, sm: Some(sm), pci, links, switched: links > 0, sockets: 2, islands: 1, ..Node::default() }
    }

    /// An H20 has a seventh of the FLOPs of the H100, and the same compute capability.
    #[test]
    fn gpus_are_known_by_their_ids() {
        for (at, (id, name)) in DEVICES.iter().enumerate() {
            ClusterSpec::find(name).unwrap();
            assert!(DEVICES[..at].iter().all(|(other, _)| other < id), "{id:x}");
        }
        for (node, name, gpu) in [
            (of(0x2329, 8, 90, 18), "h20-8x400", "h20-sxm5"),
            (of(0x2335, 8, 90, 18), "dgx-h200", "h200-sxm5"),
            (of(0x2324, 8, 90, 8), "h800-8x400", "h800-sxm5"),
            (of(0x2342, 4, 90, 18), "alps-gh200", "gh200-96gb"),
            (of(0x20b0, 8, 80, 12), "a100-40gb-8x200", "a100-sxm4-40gb"),
            (of(0x27b8, 2, 89, 0), "l4-pcie", "l4"),
            (of(0x2b85, 4, 120, 0), "rtx5090-pcie", "rtx5090"),
            (of(0x3182, 8, 103, 18), "dgx-b300", "b300-sxm"),
            (of(0x31c2, 72, 103, 18), "gb300-nvl72", "gb300"),
            // One GPU has nobody to be linked with.
            (of(0x2335, 1, 90, 0), "dgx-h200", "h200-sxm5"),
        ] {
            let (base, note) = node.like("x").unwrap();
            assert_eq!((base.name.as_str(), note), (name, None));
            assert_eq!(node.cluster("mine", &base, "x").unwrap().gpu, gpu);
        }
        let tray = of(0x2941, 4, 100, 18).like("x").unwrap();
        assert_eq!(tray.0.name, "gb200-nvl72");
        assert!(tray.1.unwrap().contains("4 of the 72 GPUs"));
    }

    #[test]
    fn gpus_that_no_shipped_cluster_has_are_told_by_their_capability() {
        let said = |node: &Node| {
            let (base, note) = node.like("x").unwrap();
            let note = note.unwrap();
            assert!(note.contains(&base.name) && note.contains("--like"), "{note}");
            (base.name, base.gpu, note)
        };
        let (name, _, note) = said(&of(0x2322, 8, 90, 0));
        assert!(name == "h100-pcie" && note.contains("10de:2322: by sm 90 they are taken for h100-pcie"), "{note}");
        let mute = |gpus, sm| Node { pci: None, ..of(0, gpus, sm, 18) };
        for (gpus, sm, name) in [
            (8, 103, "dgx-b300"),
            (72, 103, "gb300-nvl72"),
            (8, 100, "dgx-b200"),
            (72, 100, "gb200-nvl72"),
            (8, 90, "dgx-h100"),
        ] {
            let (found, _, note) = said(&mute(gpus, sm));
            assert!(found == name && note.contains("does not give"), "{found}: {note}");
        }
        // Where its NVLink is out of use, an H100 SXM has the links of PCIe and is no H100 PCIe.
        let (name, gpu, note) = said(&of(0x2330, 8, 90, 0));
        assert!((name.as_str(), gpu.as_str()) == ("h100-pcie", "h100-sxm5") && note.contains("dgx-h100"), "{note}");
        // Bridges of such GPUs no shipped cluster has.
        let node = of(0x2204, 2, 86, 4);
        let why = node.cluster("mine", &node.like("x").unwrap().0, "x").unwrap_err().to_string();
        assert!(why.contains("4 links") && why.contains("rtx3090-pcie") && why.contains("--like"), "{why}");
    }

    #[test]
    fn rates_of_other_links_are_not_taken_over() {
        let find = |name| ClusterSpec::find(name).unwrap();
        let node = Node { gpus: 4, sm: Some(90), sockets: 2, ..Node::default() };
        let why = node.cluster("mine", &find("dgx-h100"), "t.txt").unwrap_err().to_string();
        assert!(why.contains("no NVLink") && why.contains("--like"), "{why}");
        let bridged = Node { links: 12, islands: 2, ..node.clone() };
        assert_eq!(bridged.like("t.txt").unwrap().0.name, "h100-pcie");
        let base = find("rtx4090-pcie");
        assert!(bridged.notes(&base)[0].contains("2 groups") && node.notes(&base).is_empty());
        let spec = bridged.cluster("mine", &base, "t.txt").unwrap();
        assert_eq!((spec.scale_up.links, spec.scale_up.sockets.unwrap().gpus), (base.scale_up.links, 2));
        let linked = Node { islands: 1, ..bridged.clone() };
        let why = linked.cluster("mine", &base, "t.txt").unwrap_err().to_string();
        assert!(why.contains("12 links") && why.contains("PCIe"), "{why}");
        // A box without a network has that of another, at the rates that were read; where none were, that is said.
        let nic = |rate| vec![Nic { name: String::new(), rate }; 2];
        let networked = Node { nics: nic(Some(25e9)), ..bridged.clone() };
        let spec = networked.cluster("mine", &base, "t.txt").unwrap();
        let out = spec.scale_out.as_ref().unwrap();
        assert_eq!((out.nics_per_node, out.raw.value.value(), out.achieved.value.value()), (2, 25e9, 23.5e9));
        assert!(out.achieved.source.contains("dgx-a100") && networked.notes(&spec).len() == 1);
        let unknown = Node { nics: nic(None), ..bridged.clone() };
        let spec = unknown.cluster("mine", &base, "t.txt").unwrap();
        assert!(spec.scale_out.is_none() && unknown.notes(&spec)[1].contains("NICs, 2 of them, are left out"));
        // What no file of a cluster may have is not written into one.
        let fast = Node { nics: nic(Some(1.25e23)), ..bridged };
        let why = fast.cluster("mine", &base, "t.txt").unwrap_err().to_string();
        assert!(why.contains("t.txt: scale_out") && why.contains("correct its unit"), "{why}");
    }
}
