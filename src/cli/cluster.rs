//! `foretrain cluster`: draws a cluster, or makes one of what a machine says of itself.

use super::flags::Output;
use super::{Answer, write_file};
use crate::cluster::fullest;
use crate::error::{Error, Result, text};
use crate::import::{nccl_topo, node::Node, nvidia_smi};
use crate::report::human::{Table, counted};
use crate::spec::{ClusterSpec, CollectiveOp, GraphShape, MeasuredCollective, Pod, Routing, ScaleOut, shipped};
use clap::{ArgGroup, Args};
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["show", "from_nccl_topo", "from_nvidia_smi", "list"]))]
#[command(after_help = "Example: foretrain cluster --show h100-24k-roce\n         \
    NCCL_TOPO_DUMP_FILE=topo.xml all_reduce_perf -g 8; foretrain cluster --from-nccl-topo topo.xml --out mine.json\n         \
    nvidia-smi topo -m > topo.txt; foretrain cluster --from-nvidia-smi topo.txt --like dgx-h100 --out mine.json\n\n\
    What a machine does not say of itself, the rates of its links above all, is taken from the shipped cluster that is\n\
    most alike: of the GPU whose PCI id NCCL's file has, or else of its compute capability; measure it with `calibrate`.\n\
    Of a cluster with measured collectives --show lists the groups that they count for.")]
pub struct Flags {
    /// Draw a shipped cluster or a file
    #[arg(long, value_name = "NAME")]
    show: Option<String>,
    /// The XML that NCCL writes where NCCL_TOPO_DUMP_FILE is set
    #[arg(long, value_name = "FILE")]
    from_nccl_topo: Option<PathBuf>,
    /// What `nvidia-smi topo -m` prints
    #[arg(long, value_name = "FILE")]
    from_nvidia_smi: Option<PathBuf>,
    /// Name the shipped clusters
    #[arg(long)]
    list: bool,
    /// The cluster that is most alike, where it cannot be told
    #[arg(long, value_name = "NAME")]
    like: Option<String>,
    /// Write the cluster to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

#[derive(Serialize)]
struct Names {
    clusters: Vec<&'static str>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    if flags.list {
        let clusters: Vec<_> = shipped("cluster").collect();
        return Ok(Answer::new(clusters.join("\n") + "\n", &Names { clusters }));
    }
    let (spec, notes) = match (&flags.show, &flags.from_nccl_topo, &flags.from_nvidia_smi) {
        (Some(name), ..) => (ClusterSpec::find(name)?, vec![]),
        (_, Some(file), _) => flags.made(file, nccl_topo::parse)?,
        (.., Some(file)) => flags.made(file, nvidia_smi::parse)?,
        _ => return Err(Error::spec("cluster", "flags", "nothing to show; give --show NAME")),
    };
    let mut text = draw(&spec);
    text.extend(notes.iter().map(|note| format!("\nnote: {note}\n")));
    if let Some(out) = &flags.out {
        write_file(out, (serde_json::to_string_pretty(&spec).expect("JSON from plain data") + "\n").as_bytes())?;
        text.push_str(&format!("\nwrote {0}; use it as --cluster {0}\n", out.display()));
    }
    Ok(Answer::new(text, &spec))
}

impl Flags {
    fn made(&self, file: &Path, parse: fn(&str, &str) -> Result<Node>) -> Result<(ClusterSpec, Vec<String>)> {
        let text = text::data(file)?;
        let name = file.display().to_string();
        let node = parse(&name, &text)?;
        let (like, chosen) = match &self.like {
            Some(like) => (ClusterSpec::find(like)?, None),
            None => node.like(&name)?,
        };
        let stem = |path: &Path| path.file_stem().map_or("mine".into(), |s| s.to_string_lossy().into_owned());
        let called = stem(self.out.as_deref().unwrap_or(file));
        let source = file.file_name().map_or(name.clone(), |n| n.to_string_lossy().into_owned());
        let made = node.cluster(&called, &like, &source)?;
        let notes = chosen.into_iter().chain(node.notes(&made)).collect();
        Ok((made, notes))
    }
}

/// From the core down to a GPU, a level a line: how many of it one of the level above has.
fn draw(spec: &ClusterSpec) -> String {
    let gpus = u64::from(spec.nodes) * u64::from(spec.gpus_per_node);
    let (all, nodes) = (counted(gpus, "GPU"), counted(spec.nodes, "node"));
    let mut text = format!("{}: {all}, {nodes} of {} x {}\n\n", spec.name, spec.gpus_per_node, spec.gpu);
    // GPUs of one of the level above.
    let mut above = gpus;
    let mut depth = 0;
    let mut level = |line: String| {
        let indent = if depth == 0 { String::new() } else { format!("{}└─ ", "   ".repeat(depth - 1)) };
        let _ = writeln!(text, "{indent}{line}");
        depth += 1;
    };
    if let Some(out) = &spec.scale_out {
        level(format!("network: {}", network(out)));
        if let Some(graph) = &spec.graph {
            level(format!("{}, links of {} and {}", shape(&graph.shape), graph.bandwidth.value, graph.latency.value));
        }
        for (at, pod) in spec.pods.iter().enumerate().rev() {
            level(tier(at, pod, out, above.div_ceil(u64::from(pod.gpus))));
            above = above.min(u64::from(pod.gpus));
        }
    }
    let nodes = above.div_ceil(u64::from(spec.gpus_per_node));
    level(format!("{nodes} x node of {}{}", counted(spec.gpus_per_node, "GPU"), of_node(spec)));
    level(format!("{} x GPU: {}", spec.gpus_per_node, scale_up(spec)));
    text + &measured(&spec.measured)
}

/// What was measured on the cluster; nothing where nothing was.
fn measured(all: &[MeasuredCollective]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut table = Table::new("<>><");
    table.row(["operation", "GPUs", "nodes", "measured in"]);
    for m in all {
        table.row([op(m.op), &m.gpus.to_string(), &m.nodes.to_string(), &m.source]);
    }
    let what = "measured collectives, each for just so many GPUs on so many nodes; others are as the links have them";
    format!("\n{what}\n{}", table.render("  "))
}

/// The only groups that a measured collective counts for.
pub fn group(m: &MeasuredCollective) -> String {
    format!("{} among {} on {}", op(m.op), counted(m.gpus, "GPU"), counted(m.nodes, "node"))
}

fn op(op: CollectiveOp) -> &'static str {
    match op {
        CollectiveOp::AllReduce => "all_reduce",
        CollectiveOp::AllGather => "all_gather",
        CollectiveOp::ReduceScatter => "reduce_scatter",
        CollectiveOp::AllToAll => "all_to_all",
    }
}

fn network(out: &ScaleOut) -> String {
    let planes = if out.planes > 1 { format!(", {} planes", out.planes) } else { String::new() };
    let rails = match (out.rails, out.pxn) {
        (true, true) => ", rails with PXN",
        (true, false) => ", rails",
        _ => "",
    };
    let routing = match out.routing {
        Routing::Spray => "packets sprayed".to_string(),
        Routing::Adaptive => "routed adaptively".to_string(),
        Routing::Static => "planned routes".to_string(),
        Routing::Ecmp { subflows } => format!("hashed, {subflows} sub-flows each"),
    };
    format!("{routing}{rails}{planes}, {} from NIC to NIC", out.latency.value)
}

fn tier(at: usize, pod: &Pod, out: &ScaleOut, number: u64) -> String {
    let name = pod.name.clone().unwrap_or_else(|| format!("pod of tier {at}"));
    let collide = match (out.routing, &pod.uplinks) {
        (Routing::Ecmp { subflows }, Some(up)) => {
            format!(
                ", {} uplinks, of whose few flows the fullest has {:.2} times the mean",
                up.value,
                fullest(up.value, subflows)
            )
        }
        (_, Some(up)) => format!(", {} uplinks a switch", up.value),
        _ => String::new(),
    };
    format!("{number} x {name}: {}, {} : 1 upwards{collide}", counted(pod.gpus, "GPU"), pod.oversubscription.value)
}

fn of_node(spec: &ClusterSpec) -> String {
    let Some(out) = &spec.scale_out else { return ", no network".into() };
    format!(", {} of {} ({} reached)", counted(out.nics_per_node, "NIC"), out.raw.value, out.achieved.value)
}

fn scale_up(spec: &ClusterSpec) -> String {
    let up = &spec.scale_up;
    let links = counted(up.links, "link");
    let mut text = format!("{links}, {} a direction, {} to the next", up.bandwidth.value, up.latency.value);
    if let (Some(graph), None) = (&spec.graph, &spec.scale_out) {
        text.push_str(&format!("; {}, links of {}", shape(&graph.shape), graph.bandwidth.value));
    }
    if let Some(reduce) = &up.switch_reduce {
        text.push_str(&format!("; the switch adds up, bus bandwidth {}", reduce.value));
    }
    if let Some(peer) = &up.per_peer {
        text.push_str(&format!("; {} to each peer", peer.value));
    }
    if let Some(package) = &up.package {
        text.push_str(&format!(", {} in a package of {}", package.per_peer.value, package.gpus));
    }
    if let Some(several) = &up.several {
        text.push_str(&format!("; to several peers at once {} over their number", several.value));
    }
    if let Some(sockets) = &up.sockets {
        text.push_str(&format!("; {} a socket, {} between sockets", sockets.gpus, sockets.bridge.value));
    }
    text
}

fn shape(shape: &GraphShape) -> String {
    let by = |dims: &[u32]| dims.iter().map(u32::to_string).collect::<Vec<_>>().join(" x ");
    match shape {
        GraphShape::Torus(dims) => format!("torus of {}", by(dims)),
        GraphShape::Mesh(dims) => format!("mesh of {}", by(dims)),
        GraphShape::Dragonfly { groups, routers, hosts } => {
            format!("dragonfly of {groups} groups of {routers} routers of {hosts} hosts")
        }
        GraphShape::Links(links) => format!("graph of {} links", links.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of each level one of the level above has.
    fn counts(spec: &ClusterSpec) -> Vec<u64> {
        let of_line = |line: &str| line.trim_start_matches([' ', '└', '─']).split_once(" x ")?.0.parse().ok();
        draw(spec).lines().skip(2).filter_map(of_line).collect()
    }

    /// A pod of 3,072 GPUs was drawn with all 3,072 nodes of its cluster in it.
    #[test]
    fn what_a_level_has_is_what_one_of_the_level_above_has() {
        let roce = ClusterSpec::find("h100-24k-roce").unwrap();
        assert_eq!(counts(&roce), [8, 384, 8]);
        let pod = roce.pods[0].clone();
        let tiers = [Pod { gpus: 256, ..pod.clone() }, pod.clone(), Pod { gpus: 12_288, ..pod }];
        assert_eq!(counts(&ClusterSpec { pods: tiers.to_vec(), ..roce.clone() }), [2, 4, 12, 32, 8]);
        // Of a cluster that is smaller than its pod there is one, with all nodes.
        assert_eq!(counts(&ClusterSpec { nodes: 4, ..roce }), [1, 4, 8]);
        for name in shipped("cluster") {
            let spec = ClusterSpec::find(name).unwrap();
            let all = u64::from(spec.nodes) * u64::from(spec.gpus_per_node);
            assert_eq!(counts(&spec).iter().product::<u64>(), all, "{name}");
        }
    }
}
