//! Tables of libraries, a case for each number of a row that is an exchange's, a product's or a step's.

use super::runs;
use crate::error::Error;
use crate::published::row::case::{Case, Element, Exchanged, Facts, Part, Product, Unit};
use crate::published::row::words::{squeezed, tokens};
use serde_json::{Map, Value};

/// Whether the cases of a file are of this kind: they have a category.
pub fn is_library(cases: &[Value]) -> bool {
    cases.iter().any(|case| case.get("category").is_some())
}

/// Tables of libraries: a case for each number of a row that can be predicted.
pub fn library(file: &str, tables: &[Value]) -> Vec<Case> {
    let mut cases = vec![];
    for (at, table) in tables.iter().enumerate() {
        let place = format!("table-{}", at + 1);
        let id = table.get("id").and_then(Value::as_str).unwrap_or(&place);
        let wrong = |what: &str| Error::spec(file, format!("case {id}"), what.to_string());
        let lent = runs::with_setup(table, tables);
        let table = lent.as_ref().unwrap_or(table);
        let Some(results) = table.get("results") else {
            cases.push(Case::unread(id.into(), wrong("has no results; write its rows")));
            continue;
        };
        // One row may stand alone.
        let rows = results.as_array().map_or(std::slice::from_ref(results), Vec::as_slice);
        for (n, row) in rows.iter().enumerate() {
            let Some(row) = row.as_object() else {
                cases.push(Case::unread(format!("{id}#{n}"), wrong("has a result that is no object")));
                continue;
            };
            let found = facts(table, row);
            let alone = found.len() == 1;
            for (name, facts) in found {
                let id = if alone { format!("{id}#{n}") } else { format!("{id}#{n}:{name}") };
                let group = table.get("id").and_then(Value::as_str).unwrap_or(&place).to_string();
                cases.push(Case { id, group, facts });
            }
        }
    }
    cases
}

/// The numbers of a row by their names, of whichever kind its table is.
fn facts(table: &Value, row: &Map<String, Value>) -> Vec<(String, Facts)> {
    let text = |field: &str| table.get(field).and_then(Value::as_str).unwrap_or_default();
    let hardware = table.get("hardware").cloned().unwrap_or(Value::Null);
    let found: Vec<(String, Facts)> = match text("category") {
        "gemm" => {
            let all = products(text("system"), &hardware, row).into_iter();
            all.map(|(name, product)| (name, Facts::Product(Box::new(product)))).collect()
        }
        "training_e2e" | "training_trace" => {
            let all = runs::numbers(table, row).into_iter();
            all.map(|(name, run)| (name, Facts::Training(Box::new(run)))).collect()
        }
        _ => vec![],
    };
    if !found.is_empty() {
        return found;
    }
    numbers(table, row).into_iter().map(|(name, facts)| (name, Facts::Exchange(Box::new(facts)))).collect()
}

/// The rates of matrix products of a row, by their names.
fn products(system: &str, hardware: &Value, row: &Map<String, Value>) -> Vec<(String, Product)> {
    let count = |name: &str| row.get(name).and_then(Value::as_u64);
    let (Some(m), Some(n), Some(k)) = (count("m"), count("n"), count("k")) else { return vec![] };
    let gpu = hardware.get("gpu").and_then(Value::as_str).unwrap_or_default().to_string();
    let fp8 = system.to_lowercase().contains("fp8");
    let one = |(name, value): (&String, &Value)| {
        let measured = value.as_f64().filter(|_| name.starts_with("tflops"))?;
        Some((name.clone(), Product { gpu: gpu.clone(), groups: count("groups").unwrap_or(1), m, n, k, fp8, measured }))
    };
    row.iter().filter_map(one).collect()
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
    let common = common(table, row);
    let nothing = |other: String| vec![("row".into(), Exchanged { other, ..common.clone() })];
    let category = table.get("category").and_then(Value::as_str).unwrap_or_default();
    let golden = row.contains_key("num_sms");
    if category != "ep_microbench" && !golden {
        return nothing(format!("{category}: no exchange by itself"));
    }
    let found: Vec<_> = flattened(row).into_iter().filter_map(|number| one(table, row, &common, number)).collect();
    // Rates that a source computes from times beside them say nothing new.
    let times = found.iter().any(|(_, f)| f.unit == Unit::Microseconds);
    let kept: Vec<_> = found.into_iter().filter(|(_, f)| !times || f.unit == Unit::Microseconds).collect();
    match kept.is_empty() {
        true => nothing("no time and no rate that is an exchange's".into()),
        false => kept,
    }
}

/// What holds for every number of a row.
fn common(table: &Value, row: &Map<String, Value>) -> Exchanged {
    let of = |field| table.get(field).cloned().unwrap_or(Value::Null);
    let (hardware, setup) = (of("hardware"), of("setup"));
    let text = |from: &Value, field: &str| from.get(field).and_then(Value::as_str).unwrap_or_default().to_string();
    let count = |names: &[&str]| number(row, &setup, names).map(|n| n as u32);
    let ranks = ranks(row, &setup).or_else(|| hardware.get("ranks").and_then(Value::as_u64).map(|n| n as u32));
    let node = node(&words(table, row), &hardware);
    let local = count(&["local_experts"]);
    let experts = count(&["experts", "E"]).or(local.zip(ranks).map(|(l, r)| l * r));
    // Where the source gives a default in words, or none at all.
    let stated = setup.get("experts").and_then(Value::as_str).and_then(|t| t.split_whitespace().next()?.parse().ok());
    let nodes = ranks.zip(node).map(|(r, n)| r.div_ceil(n.max(1)));
    Exchanged {
        library: match row.get("impl").and_then(Value::as_str) {
            Some(name) => name.into(),
            None => text(table, "system"),
        },
        gpu: gpu(row, &hardware),
        ranks,
        node,
        // Where each row is of another machine, it says what joins its nodes.
        network: match row.get("hw").and_then(Value::as_str) {
            Some(words) if text(&hardware, "nic").is_empty() => words.into(),
            _ => text(&hardware, "nic"),
        },
        tokens: number(row, &setup, &["tokens_per_rank", "tokens", "num_tokens", "seq"]).map(|n| n as u64),
        hidden: number(row, &setup, &["hidden"]).map(|n| n as u64),
        topk: count(&["topk"]),
        experts: experts.or(stated).or(Some(256)),
        node_limit: setup.get("topk_groups").and(Some(4)).filter(|limit| nodes.is_some_and(|n| n > *limit)),
        sms: count(&["sms"]).or_else(|| sms(&text(&setup, "kernel"))).map(|n| n as u16),
        queue_pairs: count(&["num_qps_per_rank", "num_qps", "qps", "qps_per_rank", "queue_pairs"]).or_else(|| {
            queue_pairs(&format!("{} {} {}", text(&setup, "kernel"), text(table, "system"), text(table, "notes")))
        }),
        ..Exchanged::default()
    }
}

/// SMs of a kernel, as remarks tell them: "V2, 24 SMs".
fn sms(words: &str) -> Option<u32> {
    let all = tokens(words);
    let at = all.iter().position(|word| word == "sms")?;
    all[at.checked_sub(1)?].parse().ok()
}

/// Queue pairs of a rank, as remarks tell them: "1 queue pair", "num_qps 1", "2 QPs per rank".
fn queue_pairs(words: &str) -> Option<u32> {
    let all = tokens(words);
    let number = |word: &String| if word == "one" { Some(1) } else { word.parse().ok() };
    let at = all.iter().position(|word| ["qp", "qps", "queue"].contains(&&word[..]))?;
    let behind = all[at] != "queue";
    let before = at.checked_sub(1).map(|before| &all[before]).and_then(number);
    let pair = behind || all.get(at + 1).is_some_and(|word| word.starts_with("pair"));
    before.or_else(|| all[at + 1..].iter().take(3).find_map(number).filter(|_| behind)).filter(|_| pair)
}

/// One number of a row, with the SMs that are stated beside it; none where it is neither a time nor a rate.
fn one(
    table: &Value,
    row: &Map<String, Value>,
    common: &Exchanged,
    (name, value, sms): (String, f64, Option<u16>),
) -> Option<(String, Exchanged)> {
    let text = |field: &str| row.get(field).and_then(Value::as_str);
    let (ranks, unit) = (ranks_of(&name), unit_of(&name, row)?);
    let op = text("op").unwrap_or_default();
    let says = |what: &str| name.contains(what) || op.contains(what);
    let part = match (says("disp"), says("comb")) {
        (true, true) if unit == Unit::Microseconds => Part::Both,
        (_, true) => Part::Combine,
        _ => Part::Dispatch,
    };
    let dispatched = table.get("setup").and_then(|setup| setup.get("dispatch"));
    let said = row.get("dtype").or(dispatched).and_then(Value::as_str);
    let said = said.unwrap_or(if beside_nccl(table) { "bf16" } else { "fp8" });
    let named = name.contains("fp8") || !said.starts_with("bf16");
    let fp8 = part != Part::Combine && !name.contains("bf16") && named;
    let facts = Exchanged {
        library: library_of(&name, op, common),
        part,
        element: if fp8 { Element::Fp8Blocks } else { Element::Bf16 },
        unit,
        called: name.starts_with("torch") || text("measure").is_some_and(|how| how.to_lowercase().contains("api")),
        before: name.starts_with("before"),
        ranks: ranks.or(common.ranks),
        sms: sms.or(common.sms),
        measured: if name.ends_with("_ms") { 1e3 * value } else { value },
        ..common.clone()
    };
    Some((name, facts))
}

/// Whose exchange a number is of: a column for each of several libraries says so (disp_pplx_efa), and an operation says who
/// posts the messages ("IBRC dispatch").
fn library_of(name: &str, op: &str, common: &Exchanged) -> String {
    match ["pplx_efa", "pplx", "deepep"].iter().find(|who| name.contains(*who)) {
        Some(&"deepep") if common.tokens.is_some_and(|tokens| tokens <= 512) => "DeepEP low latency".into(),
        Some(who) => (*who).into(),
        None => match op.split_once(' ') {
            Some((by @ ("IBGDA" | "IBRC"), _)) => format!("{} {by}", common.library),
            _ => common.library.clone(),
        },
    }
}

/// Whether one of a table's rows is NCCL's own all-to-all, which makes no rows smaller: others beside it are compared as they
/// come, in 16 bits, unless it says more.
fn beside_nccl(table: &Value) -> bool {
    let rows = table.get("results").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let named = |row: &Value| row.get("impl").and_then(Value::as_str).map(squeezed);
    rows.iter().filter_map(named).any(|name| name.starts_with("nccl") && !name.starts_with("ncclep"))
}

/// The numbers of a row, those inside of "before" and "after" and of pairs as well; a pair is of the network and of
/// the links. With the SMs that are stated beside them.
fn flattened(row: &Map<String, Value>) -> Vec<(String, f64, Option<u16>)> {
    let mut flat = vec![];
    for (name, value) in row {
        match value {
            Value::Object(inner) => {
                let sms = inner.get("sms").and_then(Value::as_u64).map(|n| n as u16);
                flat.extend(flattened(inner).into_iter().map(|(of, v, _)| (format!("{name}.{of}"), v, sms)));
            }
            Value::Array(pair) => {
                let of = ["", "_nvlink"].iter().zip(pair);
                flat.extend(of.filter_map(|(link, v)| Some((format!("{name}{link}"), v.as_f64()?, None))));
            }
            other => flat.extend(other.as_f64().map(|v| (name.clone(), v, None))),
        }
    }
    flat
}

/// The 64 of a column that is named EP64.
fn ranks_of(name: &str) -> Option<u32> {
    name.strip_prefix("EP")?.parse().ok()
}

/// The unit of a number by its name; none where it is no time and no rate.
fn unit_of(name: &str, row: &Map<String, Value>) -> Option<Unit> {
    if name == "num_sms" {
        return Some(Unit::Sms);
    }
    let op = row.get("op").and_then(Value::as_str).unwrap_or_default();
    // Times of an exchange by the ranks, and those of a row that is one as a whole.
    let timed = ranks_of(name).is_some()
        || ["us", "time_us", "latency_us", "total_us", "avg_us", "ms", "time_ms", "latency_ms"].contains(&name);
    let op = &op.to_lowercase();
    let whole = timed && ["dispatch", "combine"].iter().any(|word| op.contains(word));
    if whole || ["before_us", "after_us"].contains(&name) {
        return Some(Unit::Microseconds);
    }
    let exchange = ["disp", "comb"].iter().any(|word| name.contains(word));
    let bandwidth = name == "bw_gbs" && row.contains_key("op");
    let times =
        name.ends_with("_us") || name.ends_with("_ms") || ["_pplx", "_deepep"].iter().any(|word| name.contains(word));
    let links = name.contains("xgmi") || name.contains("nvlink");
    let rate = if links { Unit::LinksLogical } else { Unit::Logical };
    (exchange || bandwidth).then_some(if times { Unit::Microseconds } else { rate })
}

/// The GPU: of the row, of the table, or before its topology ("SM90 8x2").
fn gpu(row: &Map<String, Value>, hardware: &Value) -> String {
    let named = [row.get("arch"), row.get("hw"), hardware.get("gpu")];
    let named = named.into_iter().flatten().find_map(Value::as_str);
    let topology = row.get("topo").and_then(Value::as_str).and_then(|t| t.split(' ').next());
    let named = named.or(topology).unwrap_or_default();
    several(named).map_or(named, |(_, gpu)| gpu).to_string()
}

/// The nodes of "4xH100" and what they have, where a source counts nodes.
fn several(words: &str) -> Option<(u32, &str)> {
    let (count, gpu) = words.split_once('x')?;
    Some((count.trim().parse().ok()?, gpu.trim()))
}

/// Ranks: said, or as GPUs of a node times nodes ("8x2").
fn ranks(row: &Map<String, Value>, setup: &Value) -> Option<u32> {
    if let Some(ranks) = number(row, setup, &["ep", "ranks", "gpus"]) {
        return Some(ranks as u32);
    }
    if let Some(nodes) = number(row, setup, &["nodes"]) {
        return Some(8 * nodes as u32);
    }
    if let Some((nodes, _)) = row.get("hw").and_then(Value::as_str).and_then(several) {
        return Some(8 * nodes);
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
    // Racks, whose trays of four are no nodes of links.
    if ["nvl72", "gb200", "gb300"].iter().any(|rack| words.contains(rack)) {
        return Some(72);
    }
    Some(hardware.get("gpus_per_node").and_then(Value::as_u64).unwrap_or(8) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::Shipped;
    use crate::published::prediction::exchange::predict;

    #[test]
    fn queue_pairs_and_sms_as_remarks_tell_them() {
        for (words, found) in [
            ("GPU inferred; 1 queue pair", Some(1)),
            ("one queue pair a rank", Some(1)),
            ("4 queue pairs", Some(4)),
            ("num_qps 1", Some(1)),
            ("2 QPs per rank", Some(2)),
            ("QPs per rank: 1", Some(1)),
            ("the queue of 1 GPU", None),
            ("normal V1 (24 SMs in test)", None),
        ] {
            assert_eq!(queue_pairs(words), found, "{words}");
        }
        let told = ["V2, 24 SMs", "normal V1 (20 SMs in test)", "low-latency V1", "SMs"].map(sms);
        assert_eq!(told, [Some(24), Some(20), None, None]);
    }

    /// Over the network, by DeepEP's normal kernels; of others it is told that nobody knows.
    #[test]
    fn one_queue_pair_has_about_half_of_the_rate_of_several() {
        let shipped = Shipped::new().unwrap();
        let of = |system: &str, ep: u32, notes: &str| {
            let table = serde_json::json!({
                "category": "ep_microbench", "system": system, "notes": notes,
                "hardware": {"gpu": "H100", "gpus_per_node": 8, "nic": "8x400Gb/s per node"},
                "setup": {"tokens_per_rank": 4096},
            });
            let row = serde_json::json!({"ep": ep, "disp_bf16": 1.0});
            let (_, facts) = numbers(&table, row.as_object().unwrap()).remove(0);
            let found = predict(&facts, &shipped);
            (found.predicted.unwrap(), found.why.len())
        };
        let part = |system: &str, ep: u32, notes: &str| {
            let (few, all) = (of(system, ep, notes), of(system, ep, ""));
            (few.0 / all.0, few.1 - all.1)
        };
        let (far, told) = part("DeepEP V1 normal", 64, "1 queue pair");
        assert!((0.5..0.6).contains(&far) && told == 1, "{far}");
        assert_eq!(part("DeepEP V1 normal", 64, "4 queue pairs"), (1.0, 0));
        assert_eq!(part("DeepEP V1 normal", 8, "1 queue pair"), (1.0, 0));
        assert_eq!(part("DeepEP V2", 64, "1 queue pair"), (1.0, 1));
    }

    /// Four NICs of a node with four GPUs are one a GPU.
    #[test]
    fn nodes_have_the_gpus_that_are_stated() {
        let hardware =
            serde_json::json!({"gpu": "GH200", "gpus_per_node": 4, "nic": "4x200Gb/s HPE Slingshot per node"});
        let table = serde_json::json!({
            "category": "ep_microbench", "system": "UCCL-EP", "hardware": hardware,
            "setup": {"tokens_per_rank": 4096, "hidden": 7168},
        });
        let row = serde_json::json!({"ep": 8, "disp_bf16": 1.0});
        let (_, facts) = numbers(&table, row.as_object().unwrap()).remove(0);
        assert_eq!(predict(&facts, &Shipped::new().unwrap()).cluster, "alps-gh200");
    }
}
