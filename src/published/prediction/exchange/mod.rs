//! Predicts one exchange of a mixture-of-experts layer: its way and its constants by the name of the library.

mod carrier;

use crate::cluster::Cluster;
use crate::collective::exchange::{self, Setting, Traffic, deepep_v2, time, traffic};
use crate::plan::Wire;
use crate::plan::route::{ExchangeAlgo, Phase, Route, Rows};
use crate::published::Shipped;
use crate::published::machine::Stated;
use crate::published::outcome::verdict::Prediction;
use crate::published::row::case::{Element, Exchanged, Part, Unit};
use crate::routing::{Request, Routing};
use carrier::carrier;

/// What is not stated is as in the libraries' own benchmarks, which have the layer of DeepSeek-V3: tests/ of DeepEP and
/// Hybrid-EP, benchmarks/bench_all_to_all.py of pplx-garden.
struct Defaults {
    hidden: u64,
    topk: u32,
    experts: u32,
}

/// Of a benchmark that says nothing of it: what most of them ran on.
const DEFAULT_GPU: &str = "H100";

const DEFAULT: Defaults = Defaults { hidden: 7168, topk: 8, experts: 256 };

/// What normal kernels of DeepEP reach over the NICs by one queue pair, of what they reach by two or four: 25.9, 26.0 and 30.3 GB/s
/// over 64 H100 with one, 50.7, 47.7 and 49.4 with four (bf16, FP8, combine; a note of a user, `spine-ep64-qp1` and `-qp4` of
/// traces/published/blind_exchange_8.json, which it is fitted on). A NIC works on a message of a queue pair at a time, in their order.
const ONE_QUEUE_PAIR: f64 = 0.55;

pub fn predict(row: &Exchanged, shipped: &Shipped) -> Prediction {
    let mut found = Prediction { measured: Some(row.measured), unit: row.unit.name().into(), ..Prediction::default() };
    if !row.other.is_empty() {
        found.measured = None;
        found.why.push(row.other.clone());
        return found;
    }
    match predicted(row, shipped) {
        Ok(it) => {
            (found.predicted, found.cluster, found.stack, found.split) = (Some(it.0), it.1, it.2, it.3);
            found.why.extend(it.4);
        }
        Err(why) => found.why.push(why),
    }
    found
}

/// The value, the cluster, the stack, the exchange, and what is to be said of it.
type Said = (f64, String, String, String, Option<String>);

fn predicted(row: &Exchanged, shipped: &Shipped) -> std::result::Result<Said, String> {
    let stated = |what: Option<u64>, name: &str| what.ok_or(format!("{name}: not stated"));
    let ranks = stated(row.ranks.map(u64::from), "ranks")? as u32;
    let hidden = row.hidden.unwrap_or(DEFAULT.hidden);
    let topk = row.topk.unwrap_or(DEFAULT.topk);
    let experts = row.experts.unwrap_or(DEFAULT.experts);
    let tokens = if row.unit == Unit::Sms { 4096 } else { stated(row.tokens, "tokens of a rank")? };
    let links = row.node.unwrap_or(8).clamp(1, ranks);
    let (mut cluster, said) = cluster(row, ranks, links, shipped)?;
    let stack = shipped.stacks.with_kernel(&["fa2", "fa3", "cudnn", "fa4"], &cluster.gpu)?;
    let request = Request {
        // Expected values, unless a limit on nodes binds: then as the libraries' own tests draw it.
        routing: match row.node_limit {
            Some(_) => Routing::Uniform,
            None if row.spread => Routing::Spread,
            None => Routing::Balanced,
        },
        ranks,
        node: links,
        experts,
        topk,
        tokens,
        replicas: (ranks - experts % ranks) % ranks,
        node_limit: row.node_limit,
        groups: None,
        seed: 1,
        step: 0,
    };
    let route = request.route().map_err(|e| e.to_string())?;
    let (algo, library) = carrier(row, &route, &cluster)?;
    let split =
        format!("{algo:?}, {ranks} ranks of which {links} share links, {tokens} tokens, top {topk} of {experts}");
    if row.unit == Unit::Sms {
        let sms = deepep_v2::theoretical_sms(&route, cluster.gpu.architecture).map_err(|e| e.to_string())?;
        return Ok((f64::from(sms), said, stack.name.clone(), split, None));
    }
    let alone = row.queue_pairs == Some(1) && route.nodes() > 1;
    let is_known = matches!(algo, ExchangeAlgo::DeepepNormal { .. }) && library.is_none();
    if let (true, Some(out)) = (alone && is_known, cluster.spec.scale_out.as_mut()) {
        out.raw.value = out.raw.value * ONE_QUEUE_PAIR;
    }
    let queues = alone.then(|| match is_known {
        true => format!("one queue pair: {ONE_QUEUE_PAIR} of what several reach over the network"),
        false => "one queue pair: not known what it costs such an exchange; taken as several".into(),
    });
    // Libraries time the kernels with the layout known.
    let phase = match row.part {
        Part::Prepare => Phase::Dispatch,
        Part::Dispatch | Part::Both => Phase::CachedDispatch,
        Part::Combine => Phase::Combine,
    };
    let bytes = row_bytes(row.element, hidden);
    let members: Vec<u32> = (0..ranks).collect();
    let seconds = |phase: Phase, row_bytes: u64| {
        let at = Setting { route: &route, phase, row_bytes, members: &members, cluster: &cluster, stack, library };
        let estimate = time(&at, algo).map_err(|e| e.to_string())?;
        Ok::<_, String>(match row.part {
            Part::Prepare => estimate.slowest().notify.value(),
            _ => estimate.mean().value() + if row.called { call(algo, phase) } else { 0.0 },
        })
    };
    let back = match row.part {
        Part::Both => seconds(Phase::Combine, row_bytes(Element::Bf16, hidden))?,
        _ => 0.0,
    };
    let seconds = seconds(phase, bytes)? + back;
    let gigabytes = bytes as f64 / seconds / 1e9;
    let value = match row.unit {
        Unit::Logical => logical(&route, algo, phase, route.nodes() > 1) * gigabytes,
        Unit::LinksLogical => logical(&route, algo, phase, false) * gigabytes,
        _ => seconds * 1e6,
    };
    Ok((value, said, stack.name.clone(), split, queues))
}

/// Bytes of a row of `hidden` elements.
fn row_bytes(element: Element, hidden: u64) -> u64 {
    match element {
        Element::Bf16 => Wire::BF16.row_bytes(hidden),
        Element::Fp8Blocks => Wire::Fp8.row_bytes(hidden),
        Element::Fp8 => hidden,
        Element::Fp4 => hidden.div_ceil(2) + hidden.div_ceil(16),
    }
}

/// Seconds around the kernels.
fn call(algo: ExchangeAlgo, phase: Phase) -> f64 {
    let ExchangeAlgo::HybridEp { .. } = algo else { return 0.0 };
    let spec = exchange::library("hybrid-ep");
    let pass = if phase == Phase::Combine { &spec.combine } else { &spec.dispatch };
    pass.call.as_ref().map_or(0.0, |call| call.value.value())
}

/// Rows that a library counts: those over the `network`, or those over links; mean over ranks.
fn logical(route: &Route, algo: ExchangeAlgo, phase: Phase, network: bool) -> Rows {
    let all = traffic(route, algo, phase);
    let flow = |t: &Traffic| if network { t.network.logical() } else { t.links.logical() };
    all.iter().map(flow).sum::<Rows>() / all.len() as f64
}

/// SM90 and SM100 are what the makers of kernels call H100 and B200.
fn gpu_of(words: &str) -> String {
    let name = words.replace("SM100", "B200").replace("SM90", "H100");
    name.split(['/', ',', '+']).next().unwrap_or_default().trim().to_string()
}

fn cluster(
    row: &Exchanged,
    ranks: u32,
    links: u32,
    shipped: &Shipped,
) -> std::result::Result<(Cluster, String), String> {
    let gpu = if row.gpu.is_empty() { DEFAULT_GPU.into() } else { gpu_of(&row.gpu) };
    let node = match links {
        72 => None,
        _ if links == ranks => None,
        // Without links nothing tells how many share a node.
        1 => Some(8),
        _ => Some(links),
    };
    let stated = Stated { gpu: &gpu, gpus: ranks, gpus_per_node: node, whole_nodes: false, interconnect: &row.network };
    let chosen = shipped.fleet.choose(&stated)?;
    Ok((chosen.cluster, chosen.said))
}
