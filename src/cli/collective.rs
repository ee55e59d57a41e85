//! `foretrain collective`: a table as nccl-tests prints it, analytic beside simulated.

use super::Answer;
use super::flags::Output;
use crate::cluster::Cluster;
use crate::collective::{Algorithm, Choice, LinkTime, Operation, choices, collective};
use crate::error::{Error, Result};
use crate::plan::CollectiveKind;
use crate::sim::collective::simulated;
use crate::spec::gpu::Maker;
use crate::spec::{ClusterSpec, GpuSpec, Provenance, StackSpec};
use crate::units::{Bytes, Seconds};
use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Args)]
#[command(after_help = "Example: foretrain collective\n         \
    foretrain collective --op all_reduce --gpus 16 --cluster dgx-h100 --bytes 1k..8g\n         \
    foretrain collective --op all_to_all --gpus 64 --bytes 256m --json\n\n\
    Bytes are those of the full buffer, as nccl-tests counts them (k, m, g: powers of 1024). NCCL's own choice of\n\
    algorithm and protocol unless --algo says otherwise. Simulated: the same flows over the cluster's links, which\n\
    they share; it differs where a link is too narrow for all of them. What was measured on the cluster stands in both\n\
    columns.")]
pub struct Flags {
    /// What moves
    #[arg(long, value_name = "OP", default_value = "all_reduce")]
    op: Op,
    /// GPUs that take part, node after node [default: those of two nodes, or of all there are]
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,
    /// A shipped cluster or a file
    #[arg(long, value_name = "NAME", default_value = "dgx-h100")]
    cluster: String,
    /// A shipped software stack or a file; the maker's library unless said
    #[arg(long, value_name = "NAME")]
    stack: Option<String>,
    /// One size, a list, or a range by powers of two: 64m, 1m,16m,1g or 1k..8g
    #[arg(long, value_name = "SIZES", default_value = "1k..8g")]
    bytes: String,
    /// Do it this way
    #[arg(long, value_name = "ALGO")]
    algo: Option<Algo>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    #[value(alias = "alltoall")]
    AllToAll,
    Broadcast,
    Sendrecv,
}

impl Op {
    fn operation(self) -> Operation {
        match self {
            Op::AllReduce => Operation::Whole(CollectiveKind::AllReduce),
            Op::AllGather => Operation::Whole(CollectiveKind::AllGather),
            Op::ReduceScatter => Operation::Whole(CollectiveKind::ReduceScatter),
            Op::AllToAll => Operation::Whole(CollectiveKind::AllToAll),
            Op::Broadcast => Operation::Broadcast,
            Op::Sendrecv => Operation::SendRecv,
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Algo {
    Ring,
    Tree,
    Nvls,
    NvlsTree,
    Pairwise,
    Pat,
    Hierarchical,
}

impl Algo {
    fn algorithm(self) -> Algorithm {
        match self {
            Algo::Ring => Algorithm::Ring,
            Algo::Tree => Algorithm::Tree,
            Algo::Nvls => Algorithm::Nvls,
            Algo::NvlsTree => Algorithm::NvlsTree,
            Algo::Pairwise => Algorithm::Pairwise,
            Algo::Pat => Algorithm::Pat,
            Algo::Hierarchical => Algorithm::Hierarchical,
        }
    }
}

/// A line of the table.
#[derive(Serialize)]
struct Row {
    bytes: u64,
    time_us: f64,
    /// GB/s.
    algbw: f64,
    busbw: f64,
    algorithm: &'static str,
    protocol: &'static str,
    simulated_us: f64,
    simulated_busbw: f64,
    /// Of the analytic time.
    rel_sd: f64,
    provenance: Provenance,
}

#[derive(Serialize)]
struct Table<'a> {
    op: String,
    gpus: u32,
    nodes: u32,
    cluster: &'a str,
    stack: &'a str,
    rows: Vec<Row>,
}

/// More take memory and time out of all proportion, and no such machine is there.
const MOST_GPUS: u32 = 1 << 17;

pub fn run(flags: &Flags) -> Result<Answer> {
    let spec = ClusterSpec::find(&flags.cluster)?;
    let gpus = flags.gpus.unwrap_or(spec.gpus_per_node.saturating_mul(spec.nodes.min(2)));
    if gpus > MOST_GPUS {
        let why = format!("{gpus} GPUs are more than the {MOST_GPUS} that this version predicts; use fewer");
        return Err(Error::spec("--gpus", "gpus", why));
    }
    let gpu = GpuSpec::find(&spec.gpu)?;
    let cluster = Cluster::new(&spec, &gpu, gpus)?;
    if gpus < 2 {
        return Err(Error::spec("--gpus", "gpus", "1 sends nothing to anyone; use 2 or more"));
    }
    let stack = StackSpec::find_for(flags.stack.as_deref().unwrap_or_else(|| library(&gpu)), &gpu)?;
    let bench = Bench { cluster: &cluster, stack: &stack, op: flags.op.operation(), algo: flags.algo };
    let rows = sizes(&flags.bytes)?.into_iter().map(|bytes| bench.row(bytes)).collect::<Result<_>>()?;
    let op = flags.op.to_possible_value().map(|v| v.get_name().to_string()).unwrap_or_default();
    let table = Table { op, gpus, nodes: cluster.nodes(), cluster: &spec.name, stack: &stack.name, rows };
    Ok(Answer::new(table.render(), &table))
}

/// The stack of the maker's library.
fn library(gpu: &GpuSpec) -> &'static str {
    match gpu.architecture.maker() {
        Maker::Nvidia => "nccl-fa2",
        Maker::Amd => "rccl-fa2",
        Maker::Google => "tpu",
        Maker::Npu => "hccl-fa2",
        Maker::Cpu => "cpu",
    }
}

struct Bench<'a> {
    cluster: &'a Cluster,
    stack: &'a StackSpec,
    op: Operation,
    algo: Option<Algo>,
}

impl Bench<'_> {
    fn row(&self, bytes: u64) -> Result<Row> {
        let members: Vec<u32> = (0..self.cluster.gpus()).collect();
        let (choice, time) = self.choose(&members, Bytes::new(bytes as f64))?;
        let (way, alone) = (choice.algorithm, time.transfer);
        let simulated = match time.provenance {
            // By whatever way it went, its flows had the links to themselves: the way that would be chosen here may be another.
            Provenance::Measured => time.total(),
            _ => time.latency + simulated(self.cluster, way, self.op, &members, bytes as f64, alone),
        };
        let factor = self.op.bus_factor(f64::from(self.cluster.gpus()));
        let algbw = |time: Seconds| bytes as f64 / time.value() / 1e9;
        Ok(Row {
            bytes,
            time_us: time.total().value() * 1e6,
            algbw: algbw(time.total()),
            busbw: algbw(time.total()) * factor,
            algorithm: choice.algorithm.name(),
            protocol: choice.protocol.name(),
            simulated_us: simulated.value() * 1e6,
            simulated_busbw: algbw(simulated) * factor,
            rel_sd: time.rel_sd,
            provenance: time.provenance,
        })
    }

    /// The way, and its time: what was measured on the cluster itself goes before the model's.
    fn choose(&self, members: &[u32], bytes: Bytes) -> Result<(Choice, LinkTime)> {
        let all = choices(self.cluster, self.stack, self.op, members, bytes);
        let wanted = |choice: &&Choice| match self.algo {
            Some(algo) => choice.algorithm == algo.algorithm(),
            None => choice.algorithm != Algorithm::Hierarchical,
        };
        let total = |choice: &Choice| choice.time.total().value();
        let best = all.iter().filter(wanted).min_by(|a, b| total(a).total_cmp(&total(b)));
        let Some(best) = best.copied() else {
            let mut known: Vec<_> = all.iter().map(|c| c.algorithm.name()).collect();
            known.dedup();
            let why = format!("not possible for this operation here; use {}", known.join(", "));
            return Err(Error::spec("--algo", "algo", why));
        };
        let time = match (self.op, self.algo) {
            (Operation::Whole(kind), None) => collective(self.cluster, self.stack, kind, members, bytes),
            _ => best.time,
        };
        Ok((best, time))
    }
}

/// `64m`, `1k,2k`, `1k..8g`.
fn sizes(text: &str) -> Result<Vec<u64>> {
    let wrong = |why: String| Error::spec("--bytes", "bytes", format!("{why}; write 64m, 1m,1g or 1k..8g"));
    if let Some((from, to)) = text.split_once("..") {
        let (from, to) = (size(from).map_err(wrong)?, size(to).map_err(wrong)?);
        if from > to {
            return Err(wrong(format!("{from} B is more than {to} B")));
        }
        return Ok(std::iter::successors(Some(from), |b| b.checked_mul(2)).take_while(|b| *b <= to).collect());
    }
    text.split(',').map(|part| size(part).map_err(wrong)).collect()
}

fn size(text: &str) -> std::result::Result<u64, String> {
    let text = text.trim().to_lowercase();
    let number = text.trim_end_matches('b').trim_end_matches('i');
    let (number, scale) = match number.char_indices().last() {
        Some((at, 'k')) => (&number[..at], 1u64 << 10),
        Some((at, 'm')) => (&number[..at], 1 << 20),
        Some((at, 'g')) => (&number[..at], 1 << 30),
        _ => (number, 1),
    };
    let bytes = number.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(scale)).filter(|n| *n > 0);
    bytes.filter(|n| *n < 1 << 50).ok_or_else(|| format!("{text:?} is no number of bytes above 0 and below 2^50"))
}

impl Table<'_> {
    fn render(&self) -> String {
        let mut text = format!(
            "{} over {} GPUs on {} node{} of {}, {}\n\n{:>12} {:>12} {:>9} {:>9}  {:<20} {:>12} {:>9}\n{:>12} {:>12} {:>9} {:>9}  {:<20} {:>12} {:>9}\n",
            self.op,
            self.gpus,
            self.nodes,
            if self.nodes == 1 { "" } else { "s" },
            self.cluster,
            self.stack,
            "bytes",
            "time",
            "algbw",
            "busbw",
            "chosen",
            "simulated",
            "busbw",
            "(B)",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "",
            "(us)",
            "(GB/s)",
        );
        for r in &self.rows {
            let chosen = format!("{} {}", r.algorithm, r.protocol);
            text.push_str(&format!(
                "{:>12} {:>12.2} {:>9.2} {:>9.2}  {:<20} {:>12.2} {:>9.2}\n",
                r.bytes, r.time_us, r.algbw, r.busbw, chosen, r.simulated_us, r.simulated_busbw
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        assert_eq!(sizes("1k..8k").unwrap(), [1024, 2048, 4096, 8192]);
        assert_eq!(sizes("3, 2MiB,1G").unwrap(), [3, 2 << 20, 1 << 30]);
        for (text, part) in [("8k..1k", "more than"), ("0", "above 0"), ("x", "no number"), ("99999999g", "below")] {
            assert!(sizes(text).unwrap_err().to_string().contains(part), "{text}");
        }
    }
}
