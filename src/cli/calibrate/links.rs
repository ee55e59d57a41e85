//! `foretrain calibrate --from-nccl-tests`: logs of collectives, made into the links of a cluster.

use crate::calibrate::links::{Fit, fit};
use crate::cli::cluster::group;
use crate::cli::{Answer, write_file};
use crate::error::{Error, Result, text};
use crate::import::nccl_tests::{Log, kind_of, parse};
use crate::published::is_another;
use crate::spec::{ClusterSpec, CollectiveOp, GpuSpec};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(Args)]
#[group(id = "links")]
pub struct Flags {
    /// Logs of nccl-tests or rccl-tests, text or what -J writes
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["on", "quick"])]
    pub from_nccl_tests: Vec<PathBuf>,
    /// The cluster they were measured on: a shipped one or a file
    #[arg(long, value_name = "NAME", default_value = "dgx-h100")]
    cluster: String,
    /// The operation, where a log does not name it (all_reduce, all_gather, reduce_scatter, alltoall)
    #[arg(long, value_name = "OP")]
    op: Option<String>,
    /// GPUs, where a log does not list them
    #[arg(long, value_name = "N")]
    gpus: Option<u32>,
    /// Nodes, where a log does not list them
    #[arg(long, value_name = "N")]
    nodes: Option<u32>,
}

/// No bus bandwidth is beyond what a GPU's faster links carry both ways together: a ring has one way, and where a switch adds up
/// what comes down makes up for what does not go up.
const BOTH_WAYS: f64 = 2.0;

/// One log, fitted.
#[derive(Serialize)]
struct Fitted {
    file: String,
    op: String,
    gpus: u32,
    nodes: u32,
    rows: usize,
    lines: Vec<crate::spec::Line>,
    rel_sd: f64,
    /// 95 % of rows are within this part of their prediction.
    interval: f64,
    worst: f64,
    residuals: Vec<Residual>,
}

#[derive(Serialize)]
struct Residual {
    bytes: u64,
    measured_us: f64,
    fitted_us: f64,
}

#[derive(Serialize)]
struct Found {
    cluster: String,
    fits: Vec<Fitted>,
    /// The groups that what was measured counts for, of these logs and of those before them.
    counts_for: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<PathBuf>,
}

/// Fits every log; writes the cluster with what was measured to `out`.
pub fn run(flags: &Flags, out: Option<&Path>) -> Result<Answer> {
    let mut cluster = ClusterSpec::find(&flags.cluster)?;
    let mut fits = Vec::new();
    for file in &flags.from_nccl_tests {
        let text = text::data(file)?;
        let name = file.display().to_string();
        let log = parse(&name, &text)?;
        fits.push(flags.fit(file, &name, &log, &mut cluster)?);
    }
    if let Some(out) = out {
        cluster.name = out.file_stem().map_or(cluster.name.clone(), |stem| stem.to_string_lossy().into_owned());
        let scattered = "the times scatter too much for a line; measure again, with more iterations";
        cluster.check(&out.display().to_string()).map_err(|e| e.and(scattered))?;
        let json = serde_json::to_string_pretty(&cluster).expect("JSON from plain data");
        write_file(out, json.as_bytes())?;
    }
    let counts_for = cluster.measured.iter().map(group).collect();
    let found = Found { cluster: flags.cluster.clone(), fits, counts_for, out: out.map(Path::to_path_buf) };
    Ok(Answer::new(found.render(), &found))
}

impl Flags {
    fn fit(&self, file: &Path, name: &str, log: &Log, cluster: &mut ClusterSpec) -> Result<Fitted> {
        let said = |field: &str, flag| Error::spec(name, field, format!("the log does not say; give it as {flag}"));
        let op = log.op.clone().or_else(|| self.op.clone()).ok_or_else(|| said("op", "--op"))?;
        let kind = kind_of(&op).ok_or_else(|| {
            Error::spec(
                name,
                "op",
                format!("{op} is none that a plan has; use all_reduce, all_gather, reduce_scatter or alltoall"),
            )
        })?;
        for (flag, given, logged) in [("--gpus", self.gpus, log.gpus), ("--nodes", self.nodes, log.nodes)] {
            if let (Some(given), Some(logged)) = (given, logged)
                && given != logged
            {
                let why = format!("{given}, but the log lists {logged}; leave it out");
                return Err(Error::spec(name, flag, why));
            }
        }
        let gpus = self.gpus.or(log.gpus).ok_or_else(|| said("gpus", "--gpus"))?;
        let nodes = self.nodes.or(log.nodes).ok_or_else(|| said("nodes", "--nodes"))?;
        same_gpus(name, log, cluster)?;
        let (bus, most) = (bus_factor(kind, gpus), most(cluster, gpus));
        log.check(name, (bus, most), &cluster.name)?;
        let rows: Vec<(f64, f64)> =
            log.rows.iter().filter(|r| r.bytes > 0).map(|r| (r.bytes as f64, r.time_us * 1e-6)).collect();
        let found = fit(&rows)
            .ok_or_else(|| Error::spec(name, "rows", "fewer than two sizes; measure a range (-b 8 -e 8G -f 2)"))?;
        let Some(rate) = found.bandwidth() else {
            let why = "larger sizes take no longer than smaller ones, and have no bandwidth; measure larger ones (-b 8 -e 8G -f 2)";
            return Err(Error::spec(name, "rows", why));
        };
        if bus * rate > most {
            let why = format!(
                "fitted at {:.0} GB/s of bus bandwidth, which links of {} are not for; measure larger sizes (-b 8 -e 8G -f 2), or name another \
                 --cluster",
                bus * rate / 1e9,
                cluster.name
            );
            return Err(Error::spec(name, "rows", why));
        }
        let source = file.file_name().map_or(name.to_string(), |n| n.to_string_lossy().into_owned());
        cluster.measured.retain(|m| (m.op, m.gpus, m.nodes) != (kind, gpus, nodes));
        cluster.measured.push(found.measured(kind, gpus, nodes, &source));
        Ok(fitted(name, op, (gpus, nodes), &rows, found))
    }
}

/// Errors: a log of GPUs that are others than the cluster's. A name that no shipped GPU has says nothing.
fn same_gpus(file: &str, log: &Log, cluster: &ClusterSpec) -> Result<()> {
    let gpu = GpuSpec::find(&cluster.gpu)?;
    for device in &log.devices {
        if is_another(device, &gpu)? {
            let why = format!(
                "lists {device}, and {} has {}; name the cluster that the log is of with --cluster",
                cluster.name, gpu.name
            );
            return Err(Error::spec(file, "devices", why));
        }
    }
    Ok(())
}

/// Bus bandwidth over that of the full buffer.
fn bus_factor(kind: CollectiveOp, gpus: u32) -> f64 {
    let others = f64::from(gpus.saturating_sub(1)) / f64::from(gpus.max(1));
    if kind == CollectiveOp::AllReduce { 2.0 * others } else { others }
}

/// Bus bandwidth, bytes a second, beyond which something is wrong. What one GPU does alone goes over no link.
fn most(cluster: &ClusterSpec, gpus: u32) -> f64 {
    let (inside, between) = (&cluster.scale_up, cluster.scale_out.as_ref().map(|out| out.raw.value));
    let reduced = inside.switch_reduce.as_ref().map(|rate| rate.value);
    let rates = [inside.bandwidth.value, inside.p2p.value].into_iter().chain(reduced).chain(between);
    if gpus == 1 { f64::INFINITY } else { BOTH_WAYS * rates.map(|rate| rate.value()).fold(0.0, f64::max) }
}

fn fitted(file: &str, op: String, (gpus, nodes): (u32, u32), rows: &[(f64, f64)], found: Fit) -> Fitted {
    let row = |(&(bytes, t), r): (&(f64, f64), &f64)| Residual {
        bytes: bytes as u64,
        measured_us: t * 1e6,
        fitted_us: t * r.exp() * 1e6,
    };
    Fitted {
        file: file.into(),
        op,
        gpus,
        nodes,
        rows: rows.len(),
        rel_sd: found.rel_sd,
        interval: 1.96 * found.rel_sd,
        worst: found.residuals.iter().map(|r| r.exp_m1().abs()).fold(0.0, f64::max),
        residuals: rows.iter().zip(&found.residuals).map(row).collect(),
        lines: found.lines,
    }
}

impl Found {
    fn render(&self) -> String {
        let mut text = String::new();
        for f in &self.fits {
            text.push_str(&format!(
                "{}: {} among {} GPUs on {} nodes, {} rows\n",
                f.file, f.op, f.gpus, f.nodes, f.rows
            ));
            for line in &f.lines {
                let (us, gbs) = (line.latency.value() * 1e6, line.bandwidth.value() / 1e9);
                text.push_str(&format!("  {us:>10.2} us + bytes / {gbs:.2} GB/s\n"));
            }
            text.push_str(&format!(
                "  the lowest of them; 95 % of rows within {:.1} %, the worst {:.1} % off\n",
                f.interval * 100.0,
                f.worst * 100.0
            ));
            for r in &f.residuals {
                let off = (r.fitted_us / r.measured_us - 1.0) * 100.0;
                text.push_str(&format!(
                    "  {:>12} B {:>12.2} us {:>12.2} us {off:>+7.1} %\n",
                    r.bytes, r.measured_us, r.fitted_us
                ));
            }
        }
        if let Some(out) = &self.out {
            text.push_str(&format!("\nwrote {0}; use it as --cluster {0}\n", out.display()));
        }
        let groups = self.counts_for.join(", ");
        text.push_str(&format!(
            "\nwhat was measured counts for {groups} alone; other operations, and groups of more or fewer GPUs or nodes, are as \
             the links have them\n"
        ));
        text
    }
}
