//! Predicted durations of NCCL operations against published tables: nccl-tests of many clusters
//! (traces/published/network.json), and the tables of a newer NCCL inside a node (traces/published/nccl.json).
//!
//! The bounds are the errors as they are today: a change that makes one worse has to say so here. With the
//! tuner's latencies as they are, no time to start, a tree that was held to the rate of a ring between two
//! nodes, and sends as fast as rings, the first errors (median, worst) were 0.15, 0.70 inside a node, 0.36,
//! 0.83 between nodes of any kind, 0.05, 0.30 point to point.
//!
//! Before a start and a latency of each system, and regimes of rings inside a node, they were 0.08, 0.41 inside a
//! node, 0.98, 4.1 on the newer tables, and 0.14, 1.05 for all-to-all.
//!
//! With steps between nodes that count latencies of the links and of the wire, in place of the tuner's, all sizes of all
//! tables are predicted to 0.097 instead of 0.110, and those of clusters left out to 0.144 instead of 0.235
//! (tests/left_out.rs); messages of 1 MiB and more on the three clusters here went from 0.13, 0.39 to 0.15, 0.38 between
//! nodes, and from 0.48 to 0.51 on other transports.
//!
//! What stays wrong: NCCL 2.10 takes twice as long for 1 to 4 MiB as 2.27 on the same A100, which is what the start
//! is fitted on; the A100 nodes of the fwyc0573 tables reach 125 GB/s between nodes with NCCL 2.10,
//! where eight such NICs give 188; and rings of two A100 are slower than larger ones.

use foretrain::cluster::Cluster;
use foretrain::collective::{Comm, Shared, collective, p2p};
use foretrain::plan::CollectiveKind;
use foretrain::spec::{ClusterSpec, GpuSpec, StackSpec};
use foretrain::units::{Bytes, BytesPerSec};
use serde::Deserialize;

#[derive(Deserialize)]
struct Network {
    nics_per_node: u32,
    raw: BytesPerSec,
    achieved: BytesPerSec,
}

#[derive(Deserialize)]
struct Case {
    id: String,
    op: String,
    cluster: String,
    gpus: u32,
    nodes: u32,
    #[serde(default)]
    ring_only: bool,
    links: Option<u32>,
    bandwidth: Option<BytesPerSec>,
    network: Option<Network>,
    /// Why no shipped cluster can be expected to predict it.
    apart: Option<String>,
    bytes_time_us: Vec<(u64, f64)>,
}

#[derive(Deserialize)]
struct Table {
    cases: Vec<Case>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string("traces/published/network.json").unwrap();
    serde_json::from_str::<Table>(&text).unwrap().cases
}

fn cluster_of(case: &Case) -> Cluster {
    let mut spec = ClusterSpec::find(&case.cluster).unwrap();
    if case.ring_only {
        spec.scale_up.switch_reduce = None;
    }
    if let Some(links) = case.links {
        spec.scale_up.links = links;
    }
    if let Some(bandwidth) = case.bandwidth {
        spec.scale_up.bandwidth.value = bandwidth;
        spec.scale_up.p2p.value = bandwidth;
    }
    if let (Some(out), Some(network)) = (&mut spec.scale_out, &case.network) {
        out.nics_per_node = network.nics_per_node;
        out.raw.value = network.raw;
        out.achieved.value = network.achieved;
    }
    Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), case.gpus).unwrap()
}

fn predict(case: &Case, cluster: &Cluster, bytes: u64) -> f64 {
    operation(&case.op, cluster, bytes, case.gpus)
}

fn operation(op: &str, cluster: &Cluster, bytes: u64, gpus: u32) -> f64 {
    let stack = StackSpec::find("nccl-fa2").unwrap();
    let bytes = Bytes::new(bytes as f64);
    let kind = match op {
        "all_reduce" => CollectiveKind::AllReduce,
        "all_gather" => CollectiveKind::AllGather,
        "reduce_scatter" => CollectiveKind::ReduceScatter,
        "all_to_all" => CollectiveKind::AllToAll,
        "send_recv" => {
            let comm = Comm { size: gpus, nodes: cluster.nodes() };
            return p2p(cluster, &stack, bytes, [0, 1], comm, Shared::ALONE).total().value();
        }
        other => panic!("{other}"),
    };
    let members: Vec<u32> = (0..gpus).collect();
    collective(cluster, &stack, kind, &members, bytes).total().value()
}

/// (median, worst) of |predicted / measured - 1| over the rows of the cases that `select` picks.
fn errors(group: &str, select: impl Fn(&Case) -> bool) -> (f64, f64) {
    let mut all = Vec::new();
    for case in cases().iter().filter(|c| select(c)) {
        let cluster = cluster_of(case);
        let error = |&(bytes, us): &(u64, f64)| predict(case, &cluster, bytes) / (us * 1e-6) - 1.0;
        let errors: Vec<f64> = case.bytes_time_us.iter().map(error).collect();
        let shown: Vec<_> = errors.iter().map(|e| format!("{e:+.2}")).collect();
        println!("\n{group} {}: {}", case.id, shown.join(" "));
        all.extend(errors.iter().map(|e| e.abs()));
    }
    all.sort_by(f64::total_cmp);
    let (median, worst) = (all[all.len() / 2], all[all.len() - 1]);
    println!("\n{group}: {} rows, median {median:.3}, worst {worst:.3}", all.len());
    (median, worst)
}

#[derive(Deserialize)]
struct Inside {
    cluster: String,
    op: String,
    gpus: u32,
    bytes_time_us: Vec<(u64, f64)>,
}

#[derive(Deserialize)]
struct Tables {
    cases: Vec<Inside>,
}

/// As [`errors`], of the tables of a newer NCCL (traces/published/nccl.json).
fn table_errors(group: &str, select: impl Fn(&Inside) -> bool) -> (f64, f64) {
    let text = std::fs::read_to_string("traces/published/nccl.json").unwrap();
    let mut all = Vec::new();
    for case in serde_json::from_str::<Tables>(&text).unwrap().cases.iter().filter(|c| select(c)) {
        let spec = ClusterSpec::find(&case.cluster).unwrap();
        let cluster = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), case.gpus).unwrap();
        let error = |&(bytes, us): &(u64, f64)| operation(&case.op, &cluster, bytes, case.gpus) / (us * 1e-6) - 1.0;
        let errors: Vec<f64> = case.bytes_time_us.iter().map(error).collect();
        let shown: Vec<_> = errors.iter().map(|e| format!("{e:+.2}")).collect();
        println!("\n{group} {} {} {}: {}", case.cluster, case.op, case.gpus, shown.join(" "));
        all.extend(errors.iter().map(|e| e.abs()));
    }
    all.sort_by(f64::total_cmp);
    let rms = (all.iter().map(|e| e * e).sum::<f64>() / all.len() as f64).sqrt();
    let (median, worst) = (all[all.len() / 2], all[all.len() - 1]);
    println!("\n{group}: {} rows, median {median:.3}, worst {worst:.3}, rms {rms:.3}", all.len());
    (median, worst)
}

fn hold((median, worst): (f64, f64), bound: (f64, f64)) {
    assert!(median <= bound.0 && worst <= bound.1, "{median:.3}, {worst:.3} beyond {bound:?}");
}

#[test]
fn inside_a_node() {
    let inside = |c: &Case| c.nodes == 1 && c.op != "send_recv";
    hold(errors("inside", inside), (0.08, 0.64));
}

#[test]
fn between_nodes() {
    hold(errors("between", |c| c.nodes > 1 && c.apart.is_none()), (0.15, 0.38));
}

#[test]
fn between_nodes_of_another_kind() {
    hold(errors("apart", |c| c.apart.is_some()), (0.52, 0.76));
}

#[test]
fn point_to_point() {
    hold(errors("p2p", |c| c.op == "send_recv"), (0.02, 0.26));
}

#[test]
fn collectives_of_a_newer_library() {
    hold(table_errors("tables", |c| c.op != "all_to_all"), (0.06, 0.41));
}

#[test]
fn all_to_all_inside_a_node() {
    hold(table_errors("all-to-all", |c| c.op == "all_to_all"), (0.09, 0.61));
}

#[derive(Deserialize)]
struct Log {
    id: String,
    rows: Vec<LogRow>,
}

#[derive(Deserialize)]
struct LogRow {
    bytes: u64,
    time_us: f64,
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Every second row of a table predicts the others: what `calibrate` makes of a log is good between its sizes.
#[test]
fn half_of_a_table_predicts_the_other_half() {
    let text = std::fs::read_to_string("traces/published/collectives.json").unwrap();
    let (mut all, mut tables) = (Vec::new(), 0);
    for log in serde_json::from_str::<Vec<Log>>(&text).unwrap() {
        let mut rows: Vec<(f64, f64)> = log.rows.iter().map(|r| (r.bytes as f64, r.time_us * 1e-6)).collect();
        rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        let half: Vec<_> = rows.iter().step_by(2).copied().collect();
        let fitted = foretrain::calibrate::links::fit(&half).unwrap();
        let kept = fitted.measured(foretrain::spec::CollectiveOp::AllReduce, 2, 1, &log.id);
        let errors: Vec<f64> = rows.iter().skip(1).step_by(2).map(|&(x, t)| (kept.at(x) / t - 1.0).abs()).collect();
        println!("{} {:.3}", log.id, median(errors.clone()));
        all.extend(errors);
        tables += 1;
    }
    let found = median(all);
    println!("{tables} tables: {found:.4}");
    assert!(tables > 30 && found <= 0.08, "{found}");
}

/// Tables that constants are read off: start, latency and NICs of NDv4 nodes, sends of RCCL, what it takes to post a send.
const READ_OFF: [&str; 5] =
    ["ndv4_a100_2gpu_ar", "ndv4_a100_8gpu_ar", "ndv4_a100_32gpu_ar", "mi355x_8_a2a", "b200v_16_a2a_v2"];

/// Whole tables of nccl-tests from the data of links alone, by the rules of `published`; what has no shipped GPU counts
/// as wholly wrong. Tables that constants are read off are left out of the second figure. The bounds are the errors as
/// they are.
#[test]
fn whole_tables_are_predicted_from_links() {
    let mut cases = foretrain::published::load("traces/published/collectives.json").unwrap();
    let mut found = |keep: &dyn Fn(&str) -> bool| {
        cases.retain(|case| keep(&case.group));
        let verdicts = foretrain::published::predict(&cases, &|_| ()).unwrap();
        let summary = foretrain::published::Summary::of(&cases, &verdicts);
        summary.groups.iter().for_each(|g| println!("{:28} {:.3} {:+.3}", g.group, g.median, g.bias));
        println!("{} cases: {:.4} {:.4}", cases.len(), summary.overall.median, summary.overall.p90);
        summary.overall.median
    };
    let all = found(&|_| true);
    let left_out = found(&|group| !READ_OFF.contains(&group));
    assert!(all <= 0.15 && left_out <= 0.15, "{all} {left_out}");
}
