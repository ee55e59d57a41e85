//! A study of exchanges: over ranks, over imbalance, over choices, and what replicas do to the load of ranks.

use crate::cluster::Cluster;
use crate::collective::exchange::{Setting, runs_on, time};
use crate::error::{Error, Result};
use crate::plan::Wire;
use crate::plan::route::{ExchangeAlgo, Phase, Route};
use crate::routing::{Request, Routing, imbalance};
use crate::spec::{ClusterSpec, GpuSpec, StackSpec};
use crate::strategy::expert::DEEPEP_SMS;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// What stays the same.
#[derive(Debug, Clone)]
pub struct Question {
    pub cluster: ClusterSpec,
    pub gpu: GpuSpec,
    pub stack: StackSpec,
    /// Tokens of a rank, and their width.
    pub tokens: u64,
    pub hidden: u64,
    pub topk: u32,
    pub experts: u32,
    pub dispatch: Wire,
    pub seed: u64,
}

/// One point of one curve.
#[derive(Debug, Clone, Serialize)]
pub struct ExchangeRow {
    /// ep, imbalance, topk or load.
    pub panel: &'static str,
    pub series: String,
    pub x: f64,
    /// Both ways together, ms; for loads the rows of a rank over the mean.
    pub y: f64,
    pub dispatch_s: Option<f64>,
    pub combine_s: Option<f64>,
    pub limiter: String,
    pub ep: u32,
    pub topk: u32,
    pub imbalance: f64,
    pub cluster: String,
    pub tokens: u64,
    pub hidden: u64,
    pub experts: u32,
    /// Of rows on their way to experts.
    pub dtype: &'static str,
}

const RANKS: [u32; 5] = [8, 16, 32, 64, 128];
const RATIOS: [f64; 6] = [1.0, 1.25, 1.5, 2.0, 2.5, 3.0];
/// Ranks of the panels that are about something else.
const MIDDLE: u32 = 32;

/// Writes rows.csv into the folder, each row as it is there.
pub fn study(question: &Question, dir: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let path = dir.join("rows.csv");
    let failed = |e: csv::Error| Error::spec(path.display(), "rows", e.to_string());
    let mut csv = csv::Writer::from_path(&path).map_err(failed)?;
    for part in [over_ranks, over_imbalance, over_choices, loads] {
        for row in part(question)? {
            csv.serialize(row).map_err(failed)?;
        }
        csv.flush().map_err(Error::io(&path))?;
    }
    Ok(path)
}

impl Question {
    fn request(&self, ranks: u32, routing: Routing) -> Result<Request> {
        // Of a rack of 72 no more are used than share the ranks evenly.
        let node = Cluster::new(&self.cluster, &self.gpu, ranks)?.per_node();
        Ok(Request {
            routing,
            ranks,
            node: ranks.min(node),
            experts: self.experts,
            topk: self.topk,
            tokens: self.tokens,
            replicas: (ranks - self.experts % ranks) % ranks,
            node_limit: None,
            groups: None,
            seed: self.seed,
            step: 0,
        })
    }

    /// The ways that the GPU has.
    fn ways(&self, route: &Route) -> Vec<(&'static str, ExchangeAlgo)> {
        let mut ways = vec![
            ("NCCL all-to-all", ExchangeAlgo::Nccl),
            ("all-gather", ExchangeAlgo::AllGather),
            ("hierarchical", ExchangeAlgo::Hierarchical),
            ("DeepEP V1", ExchangeAlgo::DeepepNormal { sms: DEEPEP_SMS }),
            ("DeepEP V2", ExchangeAlgo::DeepepV2Hybrid { sms: None }),
        ];
        let cluster = Cluster::new(&self.cluster, &self.gpu, route.ranks);
        ways.retain(|(_, algo)| cluster.as_ref().is_ok_and(|at| runs_on(*algo, at, route).is_ok()));
        ways
    }

    fn point(&self, panel: &'static str, name: &str, x: f64, algo: ExchangeAlgo, route: &Route) -> Result<ExchangeRow> {
        let cluster = Cluster::new(&self.cluster, &self.gpu, route.ranks)?;
        let members: Vec<u32> = (0..route.ranks).collect();
        let pass = |phase, wire: Wire| {
            let (row_bytes, members, cluster, stack) = (wire.row_bytes(self.hidden), &members, &cluster, &self.stack);
            time(&Setting { route, phase, row_bytes, members, cluster, stack, library: None }, algo)
        };
        let (there, back) = (pass(Phase::Dispatch, self.dispatch)?, pass(Phase::Combine, Wire::BF16)?);
        let (dispatch, combine) = (there.slowest().total().value(), back.slowest().total().value());
        let loads: Vec<f64> = (0..route.ranks).map(|r| route.expanded_rows(r)).collect();
        Ok(ExchangeRow {
            panel,
            series: name.into(),
            x,
            y: (dispatch + combine) * 1e3,
            dispatch_s: Some(dispatch),
            combine_s: Some(combine),
            limiter: there.slowest().limiter().name().into(),
            ep: route.ranks,
            topk: route.topk,
            imbalance: imbalance(&loads),
            cluster: self.cluster.name.clone(),
            tokens: self.tokens,
            hidden: self.hidden,
            experts: self.experts,
            dtype: self.dispatch.name(),
        })
    }
}

fn fits(question: &Question, ranks: u32) -> bool {
    Cluster::new(&question.cluster, &question.gpu, ranks).is_ok()
}

fn over_ranks(question: &Question) -> Result<Vec<ExchangeRow>> {
    let mut rows = vec![];
    for ranks in RANKS.into_iter().filter(|n| fits(question, *n)) {
        let route = question.request(ranks, Routing::Balanced)?.route()?;
        for (name, algo) in question.ways(&route) {
            rows.push(question.point("ep", name, f64::from(ranks), algo, &route)?);
        }
    }
    Ok(rows)
}

fn over_imbalance(question: &Question) -> Result<Vec<ExchangeRow>> {
    let ranks = if fits(question, MIDDLE) { MIDDLE } else { RANKS[0] };
    let mut rows = vec![];
    for ratio in RATIOS {
        let routing = if ratio > 1.0 { Routing::Lognormal(ratio) } else { Routing::Uniform };
        let route = question.request(ranks, routing)?.route()?;
        for (name, algo) in question.ways(&route) {
            let mut row = question.point("imbalance", name, ratio, algo, &route)?;
            row.x = row.imbalance;
            rows.push(row);
        }
    }
    Ok(rows)
}

fn over_choices(question: &Question) -> Result<Vec<ExchangeRow>> {
    let mut rows = vec![];
    for topk in 1..=16.min(question.experts) {
        let route = Request { topk, ..question.request(RANKS[0], Routing::Balanced)? }.route()?;
        for (name, algo) in question.ways(&route).into_iter().filter(|(_, a)| *a != ExchangeAlgo::Hierarchical) {
            rows.push(question.point("topk", name, f64::from(topk), algo, &route)?);
        }
    }
    Ok(rows)
}

/// Rows of each rank over the mean, the fullest first.
fn loads(question: &Question) -> Result<Vec<ExchangeRow>> {
    let ranks = if fits(question, MIDDLE) { MIDDLE } else { RANKS[0] };
    let mut rows = vec![];
    for (name, replicas) in [("experts in order", 0), ("EPLB, a replica a rank", ranks)] {
        let mut request = question.request(ranks, Routing::Zipf(0.6))?;
        request.replicas += replicas;
        let route = request.route()?;
        let mut of: Vec<f64> = (0..ranks).map(|r| route.expanded_rows(r)).collect();
        let mean = of.iter().sum::<f64>() / f64::from(ranks);
        of.sort_by(|a, b| b.total_cmp(a));
        for (rank, load) in of.iter().enumerate() {
            let row = question.point("load", name, rank as f64 + 1.0, ExchangeAlgo::Nccl, &route)?;
            rows.push(ExchangeRow { y: load / mean, dispatch_s: None, combine_s: None, ..row });
        }
    }
    Ok(rows)
}
