//! Tables of operators that are exchanges.

use crate::error::{Error, Result};
use crate::published::row::case::{Case, Element, Exchanged, Facts, Part};
use serde_json::{Map, Value};

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
        let text = |column: &str| at(column).and_then(Value::as_str).unwrap_or_default();
        let tokens =
            value("num_token").or(value("num_tokens")).ok_or_else(|| wrong(&format!("row {n} has no tokens")))?;
        if tokens < before {
            nodes = u32::saturating_mul(nodes, 2);
        }
        before = tokens;
        let ranks = value("moe_ep_size").unwrap_or(8.0 * value("node_num").unwrap_or(f64::from(nodes)));
        let common = Exchanged {
            library: if name.contains("deepep_ll") {
                "DeepEP V1 low-latency".into()
            } else if name.contains("deepep_normal") {
                format!("DeepEP V1 normal of {}", name.split('/').nth(2).unwrap_or_default())
            } else {
                format!("{name} {} {}", text("kernel_source"), text("op_name"))
            },
            gpu: gpu.clone(),
            ranks: Some(ranks as u32),
            node: Some(if value("moe_ep_size").is_some() { 72 } else { 8 }),
            tokens: Some(tokens as u64),
            hidden: value("hidden_size").map(|h| h as u64),
            topk: value("num_topk").or(value("topk")).map(|k| k as u32),
            experts: value("num_experts").map(|e| e as u32),
            spread: text("distribution") == "balanced",
            ..Exchanged::default()
        };
        let named = match text("op_name") {
            op if op.contains("combine") => Part::Combine,
            op if op.contains("prepare") => Part::Prepare,
            _ => Part::Dispatch,
        };
        for (column, scale, part, sms) in [
            ("dispatch_transmit_us", 1.0, Part::Dispatch, "dispatch_sms"),
            ("combine_transmit_us", 1.0, Part::Combine, "combine_sms"),
            ("dispatch_avg_t_us", 1.0, Part::Dispatch, ""),
            ("combine_avg_t_us", 1.0, Part::Combine, ""),
            ("latency", 1e3, named, ""),
        ] {
            let Some(measured) = value(column).filter(|v| *v > 0.0) else { continue };
            let way = if part == Part::Combine { "combine" } else { "dispatch" };
            let element = element(part, text("op_name"), text("moe_dtype"));
            let id = if column == "latency" { format!("{name}#{n}") } else { format!("{name}#{n}:{way}") };
            let sms = value(sms).map(|s| s as u16);
            let facts = Exchanged { part, element, sms, measured: measured * scale, ..common.clone() };
            cases.push(Case { id, group: name.into(), facts: Facts::Exchange(Box::new(facts)) });
        }
    }
    Ok(cases)
}

/// Rows go out as the experts take them, and come back in bf16 unless they are made narrow for the way.
fn element(part: Part, op: &str, dtype: &str) -> Element {
    let dtype = if part == Part::Combine && !op.contains("low_precision") { "bfloat16" } else { dtype };
    match (part, dtype) {
        (_, "bfloat16") => Element::Bf16,
        (_, "fp8") => Element::Fp8,
        (_, "nvfp4") => Element::Fp4,
        (Part::Combine, _) => Element::Bf16,
        _ => Element::Fp8Blocks,
    }
}
