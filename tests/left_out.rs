//! Whole tables of nccl-tests (traces/published/collectives.json), predicted from the rates of links and from other
//! clusters alone.
//!
//! For each cluster in turn everything that was ever fitted on a table is fitted anew on the tables of all others, those of
//! traces/published/nccl.json among them: what links reach of their rates, starts and latencies, and the constants of the
//! library. The fit begins at what NCCL's tuner and data sheets have, never at the shipped constants. What it is told of the
//! cluster left out is how many links and NICs a node has, and the rate of each.
//!
//! The bound is the median error of today, 0.235, which is above the goal of 0.15. What the rates of links do not tell is
//! what is far off: Amazon's transport, whose wire is longer than the one that is fitted for all (`aws`, `efa`, 0.73),
//! sockets in place of Slingshot (`cscs_.._tcp`, 0.84), a cluster reported as slow (`h100`, 0.68), AMD's links, of which no
//! other cluster tells what they reach (`mi355x_8_a2a`, 0.66).

use foretrain::cluster::Cluster;
use foretrain::collective::Operation;
use foretrain::collective::nccl::{Fitted, Inside, Nccl};
use foretrain::plan::CollectiveKind;
use foretrain::spec::{ClusterSpec, GpuSpec, StackSpec};
use foretrain::units::{Bytes, BytesPerSec, Seconds};
use serde::Deserialize;
use std::collections::BTreeMap;

/// What data sheets say of a cluster: GB/s a direction.
struct Links {
    /// A shipped cluster with such GPUs.
    like: &'static str,
    gpus_per_node: u32,
    /// Of a GPU to all others of its node, and to one where it has links of its own.
    up: f64,
    peer: Option<f64>,
    links: u32,
    /// The switch can add up, and was let.
    sums: bool,
    nics: u32,
    nic: f64,
}

const A100: Links =
    Links { like: "dgx-a100", gpus_per_node: 8, up: 300.0, peer: None, links: 12, sums: false, nics: 8, nic: 25.0 };
const H100: Links =
    Links { like: "dgx-h100", gpus_per_node: 8, up: 450.0, peer: None, links: 18, sums: true, nics: 8, nic: 50.0 };
const B200: Links = Links { like: "dgx-b200", up: 900.0, ..H100 };
const GH200: Links =
    Links { like: "alps-gh200", gpus_per_node: 4, peer: Some(150.0), sums: false, nics: 4, nic: 25.0, ..H100 };
const MI355X: Links =
    Links { like: "mi355x-8x400", up: 535.5, peer: Some(76.5), links: 7, sums: false, nics: 8, nic: 50.0, ..H100 };

/// Clusters by the beginnings of their tables' names.
const CLUSTERS: &[(&str, Links)] = &[
    ("aws_p4de", Links { nics: 4, nic: 12.5, ..A100 }),
    ("efa_p4d", Links { nics: 4, nic: 12.5, ..A100 }),
    ("ndv4", A100),
    ("cscs_gh200_2gpu", Links { gpus_per_node: 1, nics: 1, ..GH200 }),
    ("cscs", GH200),
    ("gcp_a4", B200),
    ("gke_a4", B200),
    ("gcp_a3mega", Links { nic: 25.0, ..H100 }),
    ("gcp_a3high", Links { nics: 4, nic: 25.0, ..H100 }),
    ("lambda", B200),
    ("mi355x", MI355X),
    ("h100_16_ar_ring", Links { sums: false, ..H100 }),
    ("h20", Links { like: "h20-8x400", gpus_per_node: 2, nics: 2, ..H100 }),
    ("b200v", B200),
    ("a100_leonardo", Links { gpus_per_node: 2, up: 100.0, links: 4, ..A100 }),
    ("stas_b200", B200),
    ("dgx-a100", A100),
    ("dgx-h100", H100),
    ("dgx-h200", Links { like: "dgx-h200", ..H100 }),
    ("dgx-b200", B200),
    ("gb200", Links { like: "gb200-nvl72", gpus_per_node: 4, nics: 4, ..B200 }),
];

/// Tables of one owner, by the same beginnings: left out together.
fn owner(name: &str) -> &str {
    let start = name.split(['_', '-']).next().unwrap_or(name);
    match start {
        "gke" => "gcp",
        "dgx" => name,
        _ => start,
    }
}

struct Table {
    name: String,
    op: Operation,
    links: &'static Links,
    cluster: Cluster,
    /// Bytes and seconds.
    rows: Vec<(f64, f64)>,
    /// One of those to be predicted.
    given: bool,
}

/// Everything that is fitted, all above zero.
const NAMES: [&str; 21] = [
    "ring / link",
    "switch / link",
    "send / link",
    "GB/s of a block",
    "start",
    "step",
    "ring / NIC",
    "send / NIC",
    "wire",
    "latencies of the tuner",
    "announcement",
    "posting",
    "fill LL128",
    "fill Simple",
    "fill of the switch",
    "rate of LL128",
    "rate of LL inside",
    "set-up inside",
    "steps inside",
    "two, one pass",
    "set-up of the switch",
];

/// What the tuner (src/graph/tuning.cc, topo.h of NCCL) and data sheets have, and round numbers where they are silent.
const BEGIN: [f64; NAMES.len()] = [
    0.8, 1.0, 0.8, 20.0, 5e-6, 1e-6, 0.95, 0.5, 5e-6, 1.0, 2e-6, 1e-6, 10e-6, 100e-6, 50e-6, 0.92, 0.5, 5e-6, 2.0, 0.9,
    25e-6,
];

fn library(theta: &[f64]) -> Fitted {
    Fitted {
        announcement: theta[10],
        posting: theta[11],
        fill_ll128: theta[12],
        fill_simple: theta[13],
        fill_switch: theta[14],
        rate_ll128: theta[15],
        inside: [
            Inside { setup: 0.0, steps: 1.0, rate: theta[16] },
            Inside { setup: theta[17], steps: theta[18], rate: 1.0 },
        ],
        pair: [theta[19], theta[19].sqrt()],
        setup_switch: theta[20],
    }
}

/// The cluster as the rates of its links and `theta` have it.
fn reach(cluster: &mut Cluster, links: &Links, theta: &[f64]) {
    let rate = |giga: f64| BytesPerSec::new(giga * 1e9);
    let up = &mut cluster.spec.scale_up;
    up.bandwidth.value = rate(links.up * theta[0]);
    up.switch_reduce.iter_mut().for_each(|sums| sums.value = rate(links.up * theta[1]));
    up.p2p.value = rate(links.up * theta[2]);
    up.per_peer.iter_mut().for_each(|peer| peer.value = rate(links.peer.unwrap_or(links.up) * theta[2]));
    up.p2p_per_cta.value = rate(theta[3]);
    up.start.value = Seconds::new(theta[4]);
    up.latency.value = Seconds::new(theta[5]);
    if let Some(out) = &mut cluster.spec.scale_out {
        out.achieved.value = rate(links.nic * theta[6].min(1.0));
        out.p2p.value = rate(links.nic * theta[7].min(theta[6]).min(1.0));
        out.latency.value = Seconds::new(theta[8]);
    }
}

fn seconds(table: &Table, stack: &StackSpec, fitted: &Fitted, bytes: f64) -> f64 {
    let nccl = Nccl { cluster: &table.cluster, stack, fitted };
    let members: Vec<u32> = (0..table.cluster.gpus()).collect();
    let ways = nccl.choices(table.op, &members, Bytes::new(bytes));
    let ours = ways.into_iter().filter(|way| way.algorithm.name() != "hierarchical");
    ours.map(|way| way.time.total().value()).fold(f64::INFINITY, f64::min)
}

struct Model {
    theta: [f64; NAMES.len()],
    stack: StackSpec,
}

impl Model {
    /// Mean over the tables of the mean |ln(predicted / measured)| of every `each`-th row.
    fn loss(&mut self, tables: &mut [&mut Table], each: usize) -> f64 {
        let all: f64 = tables
            .iter_mut()
            .map(|table| {
                self.errors(table, each).iter().map(|e| e.abs()).sum::<f64>()
                    / table.rows.iter().step_by(each).count() as f64
            })
            .sum();
        all / tables.len() as f64
    }

    /// ln(predicted / measured) of every `each`-th row.
    fn errors(&mut self, table: &mut Table, each: usize) -> Vec<f64> {
        reach(&mut table.cluster, table.links, &self.theta);
        self.stack.collective_latency.value = self.theta[9];
        let fitted = library(&self.theta);
        let rows: Vec<_> = table.rows.iter().step_by(each).copied().collect();
        rows.iter().map(|&(bytes, s)| (seconds(table, &self.stack, &fitted, bytes) / s).ln()).collect()
    }

    /// One constant after the other, by smaller and smaller factors.
    fn fit(tables: &mut [&mut Table]) -> Model {
        let mut model = Model { theta: BEGIN, stack: StackSpec::find("nccl-fa2").unwrap() };
        let mut best = model.loss(tables, 3);
        for step in [0.5f64, 0.3, 0.15, 0.05] {
            for _ in 0..2 {
                for at in 0..NAMES.len() {
                    for factor in [step.exp(), (-step).exp()] {
                        let before = model.theta[at];
                        model.theta[at] *= factor;
                        let loss = model.loss(tables, 3);
                        if loss < best {
                            best = loss;
                            break;
                        }
                        model.theta[at] = before;
                    }
                }
            }
        }
        model
    }
}

#[derive(Deserialize)]
struct Log {
    id: String,
    op: String,
    gpus: u32,
    rows: Vec<LogRow>,
}

#[derive(Deserialize)]
struct LogRow {
    bytes: f64,
    time_us: f64,
}

#[derive(Deserialize)]
struct Inner {
    cases: Vec<InnerCase>,
}

#[derive(Deserialize)]
struct InnerCase {
    cluster: String,
    op: String,
    gpus: u32,
    bytes_time_us: Vec<(f64, f64)>,
}

fn table(name: &str, op: &str, gpus: u32, rows: Vec<(f64, f64)>, given: bool) -> Option<Table> {
    let links = &CLUSTERS.iter().find(|(start, _)| name.starts_with(start))?.1;
    let mut spec = ClusterSpec::find(links.like).unwrap();
    (spec.gpus_per_node, spec.nodes, spec.tray, spec.graph) = (links.gpus_per_node, 64, None, None);
    (spec.pods, spec.measured, spec.scale_up.sockets) = (vec![], vec![], None);
    spec.scale_up.links = links.links;
    let base = spec.scale_up.bandwidth.clone();
    spec.scale_up.switch_reduce = links.sums.then(|| base.clone());
    spec.scale_up.per_peer = links.peer.map(|_| base);
    let out = spec.scale_out.as_mut().expect("a network");
    (out.nics_per_node, out.raw.value) = (links.nics, BytesPerSec::new(links.nic * 1e9));
    let op = match op {
        "all_reduce" => Operation::Whole(CollectiveKind::AllReduce),
        "all_gather" => Operation::Whole(CollectiveKind::AllGather),
        "reduce_scatter" => Operation::Whole(CollectiveKind::ReduceScatter),
        "alltoall" | "all_to_all" => Operation::Whole(CollectiveKind::AllToAll),
        "sendrecv" => Operation::SendRecv,
        other => panic!("{other}"),
    };
    let cluster = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), gpus).unwrap();
    Some(Table { name: name.into(), op, links, cluster, rows, given })
}

/// All tables, and how many rows have no cluster that is known.
fn tables() -> (Vec<Table>, usize) {
    let read = |file: &str| std::fs::read_to_string(format!("traces/published/{file}")).unwrap();
    let (mut all, mut unknown) = (vec![], 0);
    for log in serde_json::from_str::<Vec<Log>>(&read("collectives.json")).unwrap() {
        let rows: Vec<_> = log.rows.iter().map(|row| (row.bytes, row.time_us * 1e-6)).collect();
        let count = rows.len();
        match table(&log.id, &log.op, log.gpus, rows, true) {
            Some(table) => all.push(table),
            None => unknown += count,
        }
    }
    for case in serde_json::from_str::<Inner>(&read("nccl.json")).unwrap().cases {
        let rows = case.bytes_time_us.iter().map(|&(bytes, us)| (bytes, us * 1e-6)).collect();
        all.extend(table(&case.cluster, &case.op, case.gpus, rows, false));
    }
    (all, unknown)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

#[test]
fn tables_of_a_cluster_left_out_are_predicted() {
    let (mut all, unknown) = tables();
    let mut owners: Vec<String> = all.iter().filter(|t| t.given).map(|t| owner(&t.name).to_string()).collect();
    owners.sort();
    owners.dedup();
    let mut errors: Vec<f64> = vec![1.0; unknown];
    let mut of_tables: BTreeMap<String, f64> = BTreeMap::new();
    for left_out in &owners {
        let (mut out, mut others): (Vec<_>, Vec<_>) = all.iter_mut().partition(|t| owner(&t.name) == left_out);
        let mut model = Model::fit(&mut others);
        let fitted: Vec<String> = NAMES.iter().zip(model.theta).map(|(n, v)| format!("{n} {v:.3e}")).collect();
        println!("without {left_out}: {}", fitted.join(", "));
        for table in out.iter_mut().filter(|t| t.given) {
            let own: Vec<f64> = model.errors(table, 1).iter().map(|e| (e.exp() - 1.0).abs()).collect();
            of_tables.insert(table.name.clone(), median(own.clone()));
            errors.extend(own);
        }
    }
    of_tables.iter().for_each(|(name, error)| println!("{name:28} {error:.3}"));
    let (rows, of_rows, of_tables) = (errors.len(), median(errors), median(of_tables.into_values().collect()));
    println!("{rows} rows: {of_rows:.4}; median of the tables' {of_tables:.4}");
    assert!(of_rows <= 0.24, "{of_rows}");
}
