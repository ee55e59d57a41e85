//! Training runs in tables of libraries, which state what a table of runs does under other names.

use crate::published::row::case::{Experts, Training};
use crate::published::row::words::{number_before, squeezed};
use serde_json::{Map, Value};

/// A case for each number of a row that is a step's; none of rows that only remark.
pub fn numbers(table: &Value, row: &Map<String, Value>) -> Vec<(String, Training)> {
    let at = |name: &str| {
        row.get(name).or_else(|| table.get("setup")?.get(name)).or_else(|| table.get("hardware")?.get(name))
    };
    let text = |name: &str| at(name).and_then(Value::as_str).unwrap_or_default().to_string();
    let count = |names: &[&str]| names.iter().find_map(|name| at(name)?.as_u64());
    let degree = |names: &[&str]| count(names).and_then(|n| u32::try_from(n).ok());
    let system = format!(
        "{} {} {} {}",
        table.get("system").and_then(Value::as_str).unwrap_or_default(),
        text("impl"),
        text("dispatcher"),
        text("method")
    );
    let gpu = text("gpu");
    // A trace says it of its kernels.
    let narrow = row.keys().any(|name| name.contains("gemm_fp8"));
    let precision = if narrow { "fp8".into() } else { text("precision") };
    // "128 H100", "32 H200 (4x p5en)".
    let leading = gpu.find(' ').and_then(|space| number_before(&gpu, space)).map(|n| n as u32);
    let model = format!("{} {}", text("model"), system);
    let experts = (count(&["experts"]).is_some()).then(|| Experts {
        n: count(&["experts"]),
        top_k: count(&["topk"]),
        shared: count(&["shared"]),
        ffn: count(&["moe_inter", "ffn"]),
        dense_layers: count(&["dense_layers"]),
        q_lora: count(&["q_lora"]),
        kv_lora: count(&["kv_lora"]),
        ..Experts::default()
    });
    let run = Training {
        gpu: gpu.clone(),
        gpus: degree(&["gpus", "world_size"]).or(leading),
        gpus_per_node: degree(&["gpus_per_node"]).or(squeezed(&gpu).starts_with("gb").then_some(4)),
        interconnect: if squeezed(&gpu).contains("gb") { "NVL72".into() } else { text("nic") },
        model: known(&model).map(String::from).unwrap_or(model),
        layers: count(&["layers"]),
        hidden: count(&["hidden"]),
        heads: count(&["heads"]),
        vocab: count(&["vocab"]),
        ffn: count(&["dense_inter", "ffn"]),
        gated_ffn: Some(true),
        experts,
        seq: count(&["seq"]),
        // Two microbatches make a pair.
        global_batch: count(&["gbs", "global_batch_seqs"]).or(count(&["world_size"]).map(|ranks| 2 * ranks)),
        micro_batch: count(&["mbs"]),
        tp: degree(&["tp"]),
        pp: degree(&["pp"]),
        vp: degree(&["vpp"]),
        cp: degree(&["cp"]),
        ep: degree(&["ep"]),
        zero: "distributed-optimizer".into(),
        precision,
        system,
        ..Training::default()
    };
    if let Some(metric) = row.get("metric").and_then(Value::as_str) {
        let columns = row.iter().filter_map(|(name, value)| Some((name, value.as_f64()?)));
        return columns.filter_map(|(name, v)| Some((name.clone(), metered(metric, v, &run)?))).collect();
    }
    let flat = row.iter().flat_map(|(name, value)| match value {
        Value::Object(inner) => inner.iter().map(|(n, v)| (n.clone(), v.clone())).collect(),
        other => vec![(name.clone(), other.clone())],
    });
    flat.filter_map(|(name, value)| Some((name.clone(), measured(&name, value.as_f64()?, &run)?))).collect()
}

/// The run with the number as what it is.
fn measured(name: &str, value: f64, run: &Training) -> Option<Training> {
    let run = run.clone();
    Some(match name {
        "step_s" | "nccl_step_s" => Training { iteration_s: Some(value), ..run },
        "tok_s_gpu" | "tokens_per_s_per_gpu" => Training { tokens_per_s_per_gpu: Some(value), ..run },
        "span_us" => Training { pair_s: Some(value * 1e-6), ..run },
        "tflops" => Training { tflops_per_gpu: Some(value), flops_convention: CAUSAL.into(), ..run },
        _ => return None,
    })
}

/// A row of a table that names what it measures, with a column for each way to run the same: "time/step (s)".
fn metered(metric: &str, value: f64, run: &Training) -> Option<Training> {
    let (run, text) = (run.clone(), squeezed(metric));
    let flops_convention = metric.to_string();
    let gpus = f64::from(run.gpus?);
    Some(match () {
        _ if text.starts_with("tokens/day(b)") => {
            Training { tokens_per_s_per_gpu: Some(value * 1e9 / 86400.0 / gpus), ..run }
        }
        _ if text.starts_with("time/step(s)") => Training { iteration_s: Some(value), ..run },
        _ if text.starts_with("tflops") => Training { tflops_per_gpu: Some(value), flops_convention, ..run },
        _ if text.starts_with("mfu") => Training { mfu: Some(value), flops_convention, ..run },
        _ => return None,
    })
}

/// The set-up of a table of a run that states none: that of another table of the same model on as many of the same GPUs.
pub fn with_setup(table: &Value, tables: &[Value]) -> Option<Value> {
    let text = |table: &Value, field: &str| Some(table.get(field)?.as_str()?.to_string());
    let gpu = |table: &Value| table.get("hardware")?.get("gpu")?.as_str().map(String::from);
    let stated = |table: &Value| table.get("setup").and_then(Value::as_object).is_some_and(|setup| !setup.is_empty());
    let model = |table: &Value| known(&text(table, "system")?);
    let run = |table: &Value| text(table, "category").filter(|category| category == "training_e2e");
    if stated(table) || run(table).is_none() {
        return None;
    }
    let (model_of, gpu_of) = (model(table)?, gpu(table)?);
    let other = tables.iter().find(|other| {
        let alike = model(other) == Some(model_of) && gpu(other).as_ref() == Some(&gpu_of);
        alike && run(other).is_some() && stated(other)
    })?;
    let mut whole = table.clone();
    whole["setup"] = other.get("setup")?.clone();
    whole["system"] = other.get("system")?.clone();
    Some(whole)
}

/// Megatron-Core counts causal attention half, and nothing twice.
const CAUSAL: &str = "model FLOPs, CAUSAL attention, no recompute";

/// Models of a name that begins as one that is shipped does.
fn known(words: &str) -> Option<&'static str> {
    let text = squeezed(words);
    let names = [
        ("deepseekv3", "deepseek-v3"),
        ("qwen3235b", "qwen3-235b-a22b"),
        ("qwen330b", "qwen3-30b-a3b"),
        ("qwen3next80b", "qwen3-next-80b-a3b"),
        ("mixtral8x22b", "mixtral-8x22b"),
        ("mixtral8x7b", "mixtral-8x7b"),
    ];
    names.iter().find(|(word, _)| text.contains(word)).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_without_a_set_up_has_that_of_its_run() {
        let table = |system: &str, gpu: &str, setup: Value| json!({"category": "training_e2e", "system": system, "hardware": {"gpu": gpu}, "setup": setup});
        let run = table("DeepSeek-V3 pretraining", "2048 H800", json!({"pp": 16, "seq": 4096}));
        let bare = |gpu: &str| table("DeepSeek-V3 metrics", gpu, json!({}));
        let lent = with_setup(&bare("2048 H800"), std::slice::from_ref(&run)).unwrap();
        assert_eq!((&lent["setup"], &lent["system"]), (&run["setup"], &run["system"]));
        assert_eq!(with_setup(&bare("64 H800"), std::slice::from_ref(&run)), None);
        assert_eq!(with_setup(&run, std::slice::from_ref(&run)), None);
        let row = |metric: &str| {
            let row = json!({"metric": metric, "mpft": 2.0, "mrft": 4.0});
            numbers(&lent, row.as_object().unwrap())
        };
        assert_eq!(
            row("time/step (s)").iter().map(|(_, run)| run.iteration_s).collect::<Vec<_>>(),
            [Some(2.0), Some(4.0)]
        );
        let each = row("tokens/day (B)")[0].1.tokens_per_s_per_gpu.unwrap();
        assert!((each - 2e9 / 86400.0 / 2048.0).abs() < 1e-9);
        assert_eq!(row("MFU causal")[1].1.mfu, Some(4.0));
        assert!(row("bubble (s)").is_empty());
    }
}
