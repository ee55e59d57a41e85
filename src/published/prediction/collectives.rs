//! Predicts one collective: cluster and library follow from what its table says of GPU, link and nodes.

use crate::cluster::Cluster;
use crate::collective::{Comm, Shared, collective, p2p};
use crate::plan::CollectiveKind;
use crate::published::Shipped;
use crate::published::machine::{Stated, narrow};
use crate::published::outcome::verdict::Prediction;
use crate::published::row::case::Collective;
use crate::published::row::words::{squeezed, tokens};
use crate::published::software::stacks::Stacks;
use crate::spec::{ClusterSpec, StackSpec};
use crate::units::{Bytes, BytesPerSec};

/// What a collective of torch.distributed takes beside NCCL's own time where a source times its calls one by one: 20.6 us of
/// 32 KiB on eight B200 and 21 us of eight bytes on eight H100 (github:stas00/ml-engineering@744d01e network/README.md;
/// a3high_8_ar of traces/published/blind_network_4.json).
const TORCH_CALL: f64 = 20e-6;

/// Predicts one row, in us.
pub fn predict(row: &Collective, shipped: &Shipped) -> Prediction {
    let mut found = Prediction { measured: row.time_us, unit: "us".into(), ..Prediction::default() };
    match predicted(row, shipped) {
        Ok((us, cluster, stack)) => {
            (found.predicted, found.cluster, found.stack) = (Some(us), cluster, stack);
            found.split = format!("{} of {} B over {} GPUs", row.op, row.bytes.unwrap_or(0), row.gpus.unwrap_or(0));
        }
        Err(why) => found.why.push(why),
    }
    found
}

fn predicted(row: &Collective, shipped: &Shipped) -> Result<(f64, String, String), String> {
    let bytes = row.bytes.ok_or("bytes: not stated")?;
    let (cluster, said) = cluster_of(row, shipped)?;
    let stack = shipped.stacks.with_kernel(&["fa2", "fa3", "cudnn", "fa4"], &cluster.gpu)?;
    let older = has_slow_trees(&row.note).then(|| shipped.stacks.with_slow_trees(stack)).transpose()?;
    let rings = is_ring(&squeezed(&row.note)).then(|| Stacks::without_trees(stack));
    let stack = rings.as_ref().or(older.as_ref()).unwrap_or(stack);
    let torch = tokens(&row.note).iter().any(|word| word == "pytorch" || word.starts_with("torch"));
    let time = time(row, &cluster, stack, Bytes::new(bytes as f64))? + if torch { TORCH_CALL } else { 0.0 };
    Ok((time * 1e6, said, stack.name.clone()))
}

/// Whether NCCL was told to take rings.
fn is_ring(words: &str) -> bool {
    words.contains("algo=ring")
}

/// Whether a table is of NCCL 2.11 or before (models/stack/nccl-unfused.json, `tree_rate`).
fn has_slow_trees(note: &str) -> bool {
    let words = tokens(note);
    words.windows(3).any(|at| {
        let minor = || at[2].parse::<u32>();
        at[0] == "nccl" && at[1] == "2" && minor().is_ok_and(|minor| minor < 12)
    })
}

fn time(row: &Collective, cluster: &Cluster, stack: &StackSpec, bytes: Bytes) -> Result<f64, String> {
    let members: Vec<u32> = (0..cluster.gpus()).collect();
    let op = squeezed(&row.op).replace('_', "");
    let kind = match op.as_str() {
        "allreduce" => CollectiveKind::AllReduce,
        "allgather" => CollectiveKind::AllGather,
        "reducescatter" => CollectiveKind::ReduceScatter,
        // Of parts that are alike.
        "alltoall" | "alltoallv" => CollectiveKind::AllToAll,
        // Every rank sends to the next; all wait for the slowest pair.
        "sendrecv" => {
            let size = cluster.gpus();
            let comm = Comm { size, nodes: cluster.on_nodes(&members).len() as u32 };
            let pairs = members.iter().map(|&a| [a, (a + 1) % size]);
            let leaving = cluster.leaving(pairs.clone());
            let send = |pair| {
                let shared = Shared { flows: 1.0, uplinks: cluster.uplink_share_of_send(pair, &leaving) };
                p2p(cluster, stack, bytes, pair, comm, shared).total().value()
            };
            return Ok(pairs.map(send).fold(0.0, f64::max));
        }
        _ => return Err(format!("op: {:?} is none that is known", row.op)),
    };
    Ok(collective(cluster, stack, kind, &members, bytes).total().value())
}

/// The words with every rate spelt out: "4x100Gb" is in Gb/s, and what is more than any port has is a node's.
fn rates(link: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in link.split_whitespace() {
        let bare = word.trim_end_matches([',', ';', ')']);
        let end = &word[bare.len()..];
        let Some(number) = bare.strip_suffix("Gb") else {
            words.push(word.into());
            continue;
        };
        let more = number.parse::<f64>().is_ok_and(|gbits| gbits > 800.0);
        words.push(format!("{number}Gb/s{}{end}", if more { " per node" } else { "" }));
    }
    words.join(" ")
}

/// Channels a peer between nodes where a source has tuned them, over those by default: two to four where there is one, as
/// the library's maintainers advise (github issue NVIDIA/nccl-tests#321), the least of them.
const TUNED: f64 = 2.0;

/// GPUs with fewer links to each other than behind a switch, which sources call NV4 and the like.
fn without_switch(spec: &mut ClusterSpec, link: &str) -> String {
    let links = |word: &String| word.strip_prefix("nv")?.parse::<u32>().ok();
    let peers = spec.gpus_per_node.saturating_sub(1).max(1);
    let up = &mut spec.scale_up;
    let Some(links) = tokens(link).iter().find_map(links).filter(|n| (1..up.links).contains(n)) else {
        return String::new();
    };
    // Where each pair has links of its own, nvidia-smi counts those of a pair, and a GPU has them to every other.
    if up.per_peer.is_some() && links * peers == up.links {
        return String::new();
    }
    let part = f64::from(links) / f64::from(up.links);
    (up.bandwidth.value, up.p2p.value) = (up.bandwidth.value * part, up.p2p.value * part);
    (up.links, up.switch_reduce) = (links, None);
    format!(", {links} links a GPU")
}

/// What two GPUs with PCIe have that a bridge joins by twelve NVLinks of 25 GB/s: as much of them as two A100 of a switch,
/// 206 GB/s (ndv4_a100_2gpu_ar of traces/published/collectives.json; 208 of two with a bridge, github issue
/// NVIDIA/nccl-tests#178; two H100 PCIe are reported at 115, and as slow, in #194).
const BRIDGE: f64 = 206e9;

/// Two GPUs of a box with PCIe, where a source says that NVLink joins them.
fn bridged(spec: &mut ClusterSpec, row: &Collective) -> &'static str {
    let twelve = ["a100-pcie", "h100-pcie", "h100-nvl", "a800-pcie"].iter().any(|gpu| spec.gpu.starts_with(gpu));
    let pair = row.gpus == Some(2) && row.nodes.unwrap_or(1) == 1;
    if !(twelve && pair && squeezed(&row.link).contains("nvlink")) {
        return "";
    }
    let up = &mut spec.scale_up;
    (up.bandwidth.value, up.p2p.value) = (BytesPerSec::new(BRIDGE), BytesPerSec::new(BRIDGE));
    (up.links, up.sockets) = (12, None);
    ", a bridge of NVLink"
}

fn cluster_of(row: &Collective, shipped: &Shipped) -> Result<(Cluster, String), String> {
    let gpus = row.gpus.ok_or("gpus: not stated")?;
    let link = rates(&row.link);
    // Of several GPUs that a source names, the first; what it remarks about one is not its name.
    let gpu = row.gpu.split(['/', '(']).next().unwrap_or_default();
    // Nodes have eight GPUs where nobody says, but those of a rack or a torus, which are one.
    let one = ["gb200", "gb300", "nvl72", "tpu"].iter().any(|word| squeezed(&format!("{gpu} {link}")).contains(word));
    let nodes = row.nodes.unwrap_or(if one { 1 } else { gpus.div_ceil(8) }).max(1);
    let stated =
        Stated { gpu, gpus, gpus_per_node: Some(gpus.div_ceil(nodes)), whole_nodes: false, interconnect: &link };
    let chosen = shipped.fleet.choose(&stated)?;
    let (mut spec, mut said) = (chosen.cluster.spec.clone(), chosen.said);
    let per_node = gpus.div_ceil(nodes);
    // Trays of a rack are counted as nodes; they share its links all the same.
    if nodes > 1 && per_node < spec.gpus_per_node && spec.tray.is_none() && gpus.is_multiple_of(per_node) {
        narrow(&mut spec, per_node, gpus);
        said.push_str(&format!(", {per_node} GPUs a node"));
    }
    let words = squeezed(&format!("{} {}", row.link, row.note));
    // A word of its own: "default" is no "efa".
    let said_word = |word: &str| tokens(&row.link).iter().chain(&tokens(&row.note)).any(|w| w == word);
    said.push_str(&without_switch(&mut spec, &row.link));
    said.push_str(bridged(&mut spec, row));
    if let (true, Some(out)) = (said_word("tuned"), &mut spec.scale_out) {
        out.p2p.value = (out.p2p.value * TUNED).min(out.achieved.value);
        said.push_str(", more channels a peer");
    }
    let ring = is_ring(&words) || tokens(&row.link).iter().any(|word| word == "ring");
    if words.contains("nvlsoff") || ring {
        spec.scale_up.switch_reduce = None;
        said.push_str(", the switch adds nothing up");
    }
    let cluster = Cluster::new(&spec, &chosen.cluster.gpu, gpus).map_err(|e| e.to_string())?;
    Ok((cluster, said))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::row::case::Facts;
    use crate::published::row::read::parse;

    const TABLE: &str = r#"[{"id": "t", "op": "all_reduce", "gpus": 16, "nodes": 8, "gpu": "A800-SXM4-80GB",
        "link": "2 GPU/node over RoCE/IB", "rows": [{"bytes": 8589934592, "time_us": 7}, {"bytes": 8, "time_us": 9.5}]}]"#;

    #[test]
    fn a_row_is_a_case() {
        let cases = parse("c.json", TABLE).unwrap();
        assert_eq!([cases[0].id.as_str(), &cases[1].id, &cases[1].group], ["t#0", "t#1", "t"]);
        let Facts::Collective(row) = &cases[0].facts else { panic!("no collective") };
        let (cluster, _) = cluster_of(row, &Shipped::new().unwrap()).unwrap();
        assert_eq!((cluster.nodes(), cluster.per_node(), cluster.gpu.name.as_str()), (8, 2, "a800-sxm4-80gb"));
        let cases = parse("c.json", &TABLE.replace("9.5", "-1")).unwrap();
        let Facts::Unread(why) = &cases[1].facts else { panic!("read") };
        assert!(why.contains("time_us: -1"), "{why}");
    }

    #[test]
    fn libraries_with_slow_trees_are_known_by_their_release() {
        let older = ["NCCL 2.10.3; small sizes may be CPU-launch bound", "nccl 2.8"];
        let newer = ["NCCL 2.12.7", "PyTorch over NCCL 2.22.3", "NCCL_ALGO=Tree", "4x NCCL", ""];
        assert!(older.iter().all(|note| has_slow_trees(note)));
        assert!(!newer.iter().any(|note| has_slow_trees(note)));
        let table = TABLE.replace("\"nodes\": 8", "\"nodes\": 2").replace("2 GPU/node over", "4x 200Gb");
        let table = table.replace("A800", "A100");
        let shipped = Shipped::new().unwrap();
        let time = |note: &str| {
            let noted = table.replace("\"op\"", &format!("\"note\": \"{note}\", \"op\""));
            let cases = parse("c.json", &noted).unwrap();
            let Facts::Collective(row) = &cases[0].facts else { panic!("no collective") };
            predict(row, &shipped).predicted.unwrap()
        };
        assert!(time(older[0]) > 1.1 * time(newer[0]));
        // Between two nodes trees carry each byte once, and rings nearly twice.
        assert!(time("NCCL 2.29.7, NCCL_ALGO=RING") > 1.2 * time("NCCL 2.29.7"));
    }

    #[test]
    fn a_bridge_joins_two() {
        let at = |gpus: u32, link: &str| {
            let (gpu, link) = ("A100-PCIE-80GB".into(), link.into());
            let row = Collective { op: "all_reduce".into(), gpu, gpus: Some(gpus), link, ..Collective::default() };
            cluster_of(&row, &Shipped::new().unwrap()).unwrap().0.spec.scale_up.bandwidth.value.value()
        };
        assert_eq!(at(2, "NVLink3 NV12 bridge between the two"), BRIDGE);
        assert!(at(2, "PCIe 4 x16") < 30e9 && at(4, "NVLink bridges between pairs") < 30e9);
    }

    /// 8 GiB among so many MI355X of one node: 381, 38.6 and 169 GB/s of bus bandwidth on eight, five and four are published.
    #[test]
    fn part_of_a_mesh_has_one_ring() {
        let shipped = Shipped::new().unwrap();
        let us = |gpus: u32, note: &str| {
            let (op, gpu, note) = ("all_reduce".into(), "MI355X".into(), note.into());
            let row = Collective { op, gpu, note, gpus: Some(gpus), bytes: Some(8 << 30), ..Collective::default() };
            predict(&row, &shipped).predicted.unwrap()
        };
        let bus = |gpus: u32| 2.0 * f64::from(gpus - 1) / f64::from(gpus) * (8u64 << 30) as f64 / 1e3 / us(gpus, "");
        let [four, five, seven, eight] = [4, 5, 7, 8].map(bus);
        assert!((five / seven - 1.0).abs() < 0.01 && five < four / 2.5 && five < eight / 6.0, "{four} {five} {eight}");
        // What times the calls of torch.distributed times them, too.
        assert!((us(8, "timed by PyTorch") - us(8, "") - TORCH_CALL * 1e6).abs() < 1e-6);
    }
}
