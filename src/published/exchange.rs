//! Exchanges of mixture-of-experts layers: tables of libraries, and the tables of others that measured them.

use super::Shipped;
use super::case::{Case, Facts};
use super::machine::Stated;
use super::verdict::Prediction;
use super::words::squeezed;
use crate::cluster::Cluster;
use crate::collective::exchange::{Traffic, deepep_v2, time, traffic};
use crate::error::{Error, Result};
use crate::plan::route::{ExchangeAlgo, Phase, Route, Rows, Wire};
use crate::routing::{Request, Routing};
use serde_json::{Map, Value};

/// One exchange, one way.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Exchanged {
    /// The library, as the source words it.
    pub library: String,
    pub gpu: String,
    pub ranks: Option<u32>,
    /// Ranks that reach each other over links.
    pub node: Option<u32>,
    pub network: String,
    pub tokens: Option<u64>,
    pub hidden: Option<u64>,
    pub topk: Option<u32>,
    pub experts: Option<u32>,
    /// Nodes that a token reaches at most.
    pub node_limit: Option<u32>,
    pub combine: bool,
    pub fp8: bool,
    pub sms: Option<u16>,
    pub measured: f64,
    pub unit: Unit,
    /// Why it is no exchange at all.
    pub other: String,
}

/// What a source reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unit {
    #[default]
    Microseconds,
    /// GB/s of all rows, own ones as well: over the network where rows leave the node, over links where they do not.
    Logical,
    /// The number of SMs that a formula gives.
    Sms,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Microseconds => "us",
            Unit::Logical => "GB/s logical",
            Unit::Sms => "SMs",
        }
    }
}

/// Whether the cases of a file are of this kind: they have a category.
pub fn is_library(cases: &[Value]) -> bool {
    cases.iter().any(|case| case.get("category").is_some())
}

/// Tables of libraries: a case for each number of a row that is an exchange's.
pub fn library(file: &str, tables: &[Value]) -> Result<Vec<Case>> {
    let mut cases = vec![];
    for (at, table) in tables.iter().enumerate() {
        let wrong = |what: &str| Error::spec(file, format!("case {}", at + 1), what.to_string());
        let id = table.get("id").and_then(Value::as_str).ok_or_else(|| wrong("has no id; name the table"))?;
        let results = table.get("results").ok_or_else(|| wrong("has no results; write its rows"))?;
        // One row may stand alone.
        let rows = results.as_array().map_or(std::slice::from_ref(results), Vec::as_slice);
        for (n, row) in rows.iter().enumerate() {
            let row = row.as_object().ok_or_else(|| wrong("has a result that is no object"))?;
            let found = numbers(table, row);
            let alone = found.len() == 1;
            for (name, facts) in found {
                let id = if alone { format!("{id}#{n}") } else { format!("{id}#{n}:{name}") };
                let group = table["id"].as_str().unwrap_or_default().to_string();
                cases.push(Case { id, group, facts: Facts::Exchange(Box::new(facts)) });
            }
        }
    }
    Ok(cases)
}

/// Every word that a table, a row of it and its surroundings say, for rules that look for a few.
fn words(table: &Value, row: &Map<String, Value>) -> String {
    let text = |field: &str| table.get(field).map(Value::to_string).unwrap_or_default();
    squeezed(&format!("{}{}{}", text("system"), text("hardware"), Value::Object(row.clone())))
}

fn number(row: &Map<String, Value>, setup: &Value, names: &[&str]) -> Option<f64> {
    let stated = |name: &&str| row.get(*name).or_else(|| setup.get(*name));
    names.iter().filter_map(stated).find_map(Value::as_f64)
}

/// The numbers of a row that are times or rates of an exchange, by their names.
fn numbers(table: &Value, row: &Map<String, Value>) -> Vec<(String, Exchanged)> {
    let of = |field| table.get(field).cloned().unwrap_or(Value::Null);
    let (hardware, setup) = (of("hardware"), of("setup"));
    let text = |from: &Value, field: &str| from.get(field).and_then(Value::as_str).unwrap_or_default().to_string();
    let count = |names: &[&str]| number(row, &setup, names).map(|n| n as u32);
    let common = Exchanged {
        library: match row.get("impl").and_then(Value::as_str) {
            Some(name) => name.into(),
            None => text(table, "system"),
        },
        gpu: gpu(row, &hardware),
        ranks: ranks(row, &setup).or_else(|| hardware.get("ranks").and_then(Value::as_u64).map(|n| n as u32)),
        node: node(&words(table, row), &hardware),
        network: text(&hardware, "nic"),
        tokens: number(row, &setup, &["tokens_per_rank", "seq"]).map(|n| n as u64),
        hidden: number(row, &setup, &["hidden"]).map(|n| n as u64),
        topk: count(&["topk"]),
        sms: count(&["sms"]).map(|n| n as u16),
        ..Exchanged::default()
    };
    let local = count(&["local_experts"]);
    let experts = count(&["experts", "E"]).or(local.zip(common.ranks).map(|(l, r)| l * r));
    // Where the source gives a default in words, or none at all.
    let stated = setup.get("experts").and_then(Value::as_str).and_then(|t| t.split_whitespace().next()?.parse().ok());
    let experts = experts.or(stated).or(Some(256));
    let nodes = common.ranks.zip(common.node).map(|(r, n)| r.div_ceil(n.max(1)));
    let limit = setup.get("topk_groups").and(Some(4)).filter(|limit| nodes.is_some_and(|n| n > *limit));
    let common = Exchanged { experts, node_limit: limit, ..common };
    let one = |(name, value): (&String, &Value)| {
        let unit = unit_of(name, row)?;
        let combine = squeezed(name).contains("comb") || row.get("op").is_some_and(|op| op == "combine");
        let said = setup.get("dispatch").and_then(Value::as_str).unwrap_or("fp8");
        let fp8 = !combine && !name.contains("bf16") && (name.contains("fp8") || !said.starts_with("bf16"));
        Some((name.clone(), Exchanged { combine, fp8, unit, measured: value.as_f64()?, ..common.clone() }))
    };
    let category = text(table, "category");
    let golden = row.contains_key("num_sms");
    if category != "ep_microbench" && !golden {
        let other = format!("{category}: no exchange by itself");
        return vec![("row".into(), Exchanged { other, ..common })];
    }
    let found: Vec<_> = row.iter().filter_map(one).collect();
    // Rates that a source computes from times beside them say nothing new.
    let times = found.iter().any(|(_, f)| f.unit == Unit::Microseconds);
    let kept: Vec<_> = found.into_iter().filter(|(_, f)| !times || f.unit == Unit::Microseconds).collect();
    match kept.is_empty() {
        true => vec![("row".into(), Exchanged { other: "no time and no rate that is an exchange's".into(), ..common })],
        false => kept,
    }
}

/// The unit of a number by its name; none where it is no time and no rate.
fn unit_of(name: &str, row: &Map<String, Value>) -> Option<Unit> {
    if name == "num_sms" {
        return Some(Unit::Sms);
    }
    let exchange = ["disp", "comb"].iter().any(|word| name.contains(word));
    let bandwidth = name == "bw_gbs" && row.contains_key("op");
    let times = name.ends_with("_us") || ["_pplx", "_deepep"].iter().any(|word| name.contains(word));
    (exchange || bandwidth).then_some(if times { Unit::Microseconds } else { Unit::Logical })
}

/// The GPU: of the row, of the table, or before its topology ("SM90 8x2").
fn gpu(row: &Map<String, Value>, hardware: &Value) -> String {
    let named = [row.get("arch"), row.get("hw"), hardware.get("gpu")];
    let named = named.into_iter().flatten().find_map(Value::as_str);
    let topology = row.get("topo").and_then(Value::as_str).and_then(|t| t.split(' ').next());
    named.or(topology).unwrap_or_default().to_string()
}

/// Ranks: said, or as GPUs of a node times nodes ("8x2").
fn ranks(row: &Map<String, Value>, setup: &Value) -> Option<u32> {
    if let Some(ranks) = number(row, setup, &["ep", "ranks"]) {
        return Some(ranks as u32);
    }
    if let Some(nodes) = number(row, setup, &["nodes"]) {
        return Some(8 * nodes as u32);
    }
    let topology = row.get("topo")?.as_str()?.rsplit(' ').next()?.to_lowercase();
    let mut parts = topology.trim_start_matches("ep").split('x').map(|n| n.parse::<u32>().ok());
    let first = parts.next()??;
    Some(first * parts.next().unwrap_or(Some(1))?)
}

/// Ranks that links join: those of a node, of a rack, or none where all goes over the NICs.
fn node(words: &str, hardware: &Value) -> Option<u32> {
    if words.contains("purerdma") || words.contains("nvlinkdisabled") {
        return Some(1);
    }
    if words.contains("nvl72") {
        return Some(72);
    }
    Some(hardware.get("gpus_per_node").and_then(Value::as_u64).unwrap_or(8) as u32)
}

/// Whether a table of operators is one of exchanges.
pub fn is_exchange(table: &Map<String, Value>) -> bool {
    let columns = table.get("columns").and_then(Value::as_array);
    columns.is_some_and(|c| ["num_topk", "topk"].iter().any(|name| c.iter().any(|column| column == name)))
}

/// A table of operators: a case for each time of a row. Nodes that have no column count up block by block, 1, 2, 4, 8:
/// a block ends where the number of tokens falls.
pub fn operator_table(file: &str, name: &str, table: &Map<String, Value>) -> Result<Vec<Case>> {
    let wrong = |why: &str| Error::spec(file, format!("table {name}"), why.to_string());
    let list = |field: &str| table.get(field).and_then(Value::as_array);
    let columns = list("columns").ok_or_else(|| wrong("has no columns"))?;
    let rows = list("rows").ok_or_else(|| wrong("has no rows"))?;
    let gpu = name.split('/').next().unwrap_or_default().replace('_', " ");
    let mut before = 0.0;
    let (mut nodes, mut cases) = (1, vec![]);
    for (n, row) in rows.iter().enumerate() {
        let at = |column: &str| columns.iter().position(|c| c == column).and_then(|i| row.get(i));
        let value = |column: &str| at(column).and_then(Value::as_f64);
        let tokens =
            value("num_token").or(value("num_tokens")).ok_or_else(|| wrong(&format!("row {n} has no tokens")))?;
        if tokens < before {
            nodes *= 2;
        }
        before = tokens;
        let ranks = value("moe_ep_size").unwrap_or(8.0 * value("node_num").unwrap_or(f64::from(nodes)));
        let common = Exchanged {
            library: if name.contains("deepep_ll") {
                "DeepEP V1 low-latency".into()
            } else if name.contains("deepep_normal") {
                "DeepEP V1 normal".into()
            } else {
                name.into()
            },
            gpu: gpu.clone(),
            ranks: Some(ranks as u32),
            node: Some(if value("moe_ep_size").is_some() { 72 } else { 8 }),
            tokens: Some(tokens as u64),
            hidden: value("hidden_size").map(|h| h as u64),
            topk: value("num_topk").or(value("topk")).map(|k| k as u32),
            experts: value("num_experts").map(|e| e as u32),
            fp8: true,
            ..Exchanged::default()
        };
        for (column, scale, combine, sms) in [
            ("dispatch_transmit_us", 1.0, false, "dispatch_sms"),
            ("combine_transmit_us", 1.0, true, "combine_sms"),
            ("dispatch_avg_t_us", 1.0, false, ""),
            ("combine_avg_t_us", 1.0, true, ""),
            ("latency", 1e3, false, ""),
        ] {
            let Some(measured) = value(column).filter(|v| *v > 0.0) else { continue };
            let way = if combine { "combine" } else { "dispatch" };
            let id = if column == "latency" { format!("{name}#{n}") } else { format!("{name}#{n}:{way}") };
            let sms = value(sms).map(|s| s as u16);
            let facts = Exchanged { combine, fp8: !combine, sms, measured: measured * scale, ..common.clone() };
            cases.push(Case { id, group: name.into(), facts: Facts::Exchange(Box::new(facts)) });
        }
    }
    Ok(cases)
}

pub fn predict(row: &Exchanged, shipped: &Shipped) -> Prediction {
    let mut found = Prediction { measured: Some(row.measured), unit: row.unit.name().into(), ..Prediction::default() };
    if !row.other.is_empty() {
        found.measured = None;
        found.why.push(row.other.clone());
        return found;
    }
    match predicted(row, shipped) {
        Ok(it) => (found.predicted, found.cluster, found.stack, found.split) = (Some(it.0), it.1, it.2, it.3),
        Err(why) => found.why.push(why),
    }
    found
}

type Said = (f64, String, String, String);

fn predicted(row: &Exchanged, shipped: &Shipped) -> std::result::Result<Said, String> {
    let stated = |what: Option<u64>, name: &str| what.ok_or(format!("{name}: not stated"));
    let ranks = stated(row.ranks.map(u64::from), "ranks")? as u32;
    // The number of SMs depends on no width.
    let hidden = if row.unit == Unit::Sms { 7168 } else { stated(row.hidden, "hidden")? };
    let topk = stated(row.topk.map(u64::from), "topk")? as u32;
    let experts = row.experts.unwrap_or(256);
    let tokens = if row.unit == Unit::Sms { 4096 } else { stated(row.tokens, "tokens of a rank")? };
    let links = row.node.unwrap_or(8).clamp(1, ranks);
    let (cluster, said) = cluster(row, ranks, links, shipped)?;
    let stack = shipped.stacks.with_kernel(&["fa2", "fa3", "cudnn", "fa4"], &cluster.gpu)?;
    let request = Request {
        // Expected values, unless a limit on nodes binds: then as the libraries' own tests draw it.
        routing: if row.node_limit.is_some() { Routing::Uniform } else { Routing::Balanced },
        ranks,
        node: links,
        experts,
        topk,
        tokens,
        replicas: (ranks - experts % ranks) % ranks,
        node_limit: row.node_limit,
        seed: 1,
        step: 0,
    };
    let route = request.route().map_err(|e| e.to_string())?;
    let algo = algorithm(row, &route, &cluster)?;
    let split =
        format!("{algo:?}, {ranks} ranks of which {links} share links, {tokens} tokens, top {topk} of {experts}");
    if row.unit == Unit::Sms {
        let sms = deepep_v2::theoretical_sms(&route, cluster.gpu.architecture).map_err(|e| e.to_string())?;
        return Ok((f64::from(sms), said, stack.name.clone(), split));
    }
    // Libraries time the kernels with the layout known.
    let phase = if row.combine { Phase::Combine } else { Phase::CachedDispatch };
    let wire = if row.fp8 { Wire::Fp8 } else { Wire::BF16 };
    let bytes = wire.row_bytes(hidden);
    let members: Vec<u32> = (0..ranks).collect();
    let estimate = time(&route, algo, phase, bytes, &members, &cluster, stack).map_err(|e| e.to_string())?;
    let seconds = estimate.mean().value();
    let value = match row.unit {
        Unit::Logical => logical(&route, algo, phase) * bytes as f64 / seconds / 1e9,
        _ => seconds * 1e6,
    };
    Ok((value, said, stack.name.clone(), split))
}

/// Rows that a library counts: those over the network where there are any, else those over links; mean over ranks.
fn logical(route: &Route, algo: ExchangeAlgo, phase: Phase) -> Rows {
    let all = traffic(route, algo, phase);
    let flow = |t: &Traffic| if route.nodes() > 1 { t.network.logical() } else { t.links.logical() };
    all.iter().map(flow).sum::<Rows>() / all.len() as f64
}

/// SMs of DeepEP V1 in its own tests.
const V1_SMS: u16 = 24;

fn algorithm(row: &Exchanged, route: &Route, cluster: &Cluster) -> std::result::Result<ExchangeAlgo, String> {
    let words = squeezed(&row.library);
    let v2 = || match row.sms {
        Some(sms) => Ok(sms),
        None => deepep_v2::theoretical_sms(route, cluster.gpu.architecture).map_err(|e| e.to_string()),
    };
    let has = |word: &str| words.contains(word);
    if has("ncclep")
        || has("uccl")
        || has("mori")
        || has("pplx")
        || has("hybrid") && !has("deepepv1")
        || has("zerocopy")
    {
        return Err(format!("{}: a library that is not modelled", row.library));
    }
    if has("lowlatency") {
        return Ok(ExchangeAlgo::DeepepLowLatency { hook: false, slots: route.most_tokens().max(1) as u32 });
    }
    if has("deepepv2") {
        return Ok(ExchangeAlgo::DeepepV2Hybrid { sms: v2()? });
    }
    if has("deepep") {
        return Ok(ExchangeAlgo::DeepepNormal { sms: row.sms.unwrap_or(V1_SMS) });
    }
    if has("nccl") {
        return Ok(ExchangeAlgo::Nccl);
    }
    Err(format!("{}: a library that is not modelled", row.library))
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
    let gpu = gpu_of(&row.gpu);
    let node = if links == 72 || links == ranks { None } else { Some(8) };
    let stated = Stated { gpu: &gpu, gpus: ranks, gpus_per_node: node, interconnect: &row.network };
    let chosen = shipped.fleet.choose(&stated)?;
    Ok((chosen.cluster, chosen.said))
}
