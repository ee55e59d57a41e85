//! Matrix products by themselves, one or a group of them in one launch.

use super::Shipped;
use super::machine::Stated;
use super::verdict::Prediction;
use crate::device::{KernelTime, Roofline};
use crate::plan::{Dtype, Work, WorkClass};
use serde_json::{Map, Value};

/// Products of m x k and k x n in FP8, summed up to bf16; `groups` of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Product {
    pub gpu: String,
    pub groups: u64,
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub fp8: bool,
    /// TFLOP/s.
    pub measured: f64,
}

/// A case for each rate of a row.
pub fn numbers(system: &str, hardware: &Value, row: &Map<String, Value>) -> Vec<(String, Product)> {
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

pub fn predict(row: &Product, shipped: &Shipped) -> Prediction {
    let mut found = Prediction { measured: Some(row.measured), unit: "TFLOP/s".into(), ..Prediction::default() };
    match predicted(row, shipped, &mut found) {
        Ok(rate) => found.predicted = Some(rate),
        Err(why) => found.why.push(why),
    }
    found
}

fn predicted(row: &Product, shipped: &Shipped, found: &mut Prediction) -> Result<f64, String> {
    let machine = shipped.fleet.choose(&Stated { gpu: &row.gpu, gpus: 1, ..Stated::default() })?;
    let stack = shipped.stacks.with_kernel(&["fa3", "fa2", "cudnn", "fa4"], &machine.cluster.gpu)?;
    (found.cluster, found.stack) = (machine.said.clone(), stack.name.clone());
    found.split = format!("{} x {} x {} x {}", row.groups, row.m, row.n, row.k);
    let kernels = Roofline::new(&machine.cluster.gpu, stack).map_err(|e| e.to_string())?.alone();
    kernels
        .peak(Dtype::Bf16)
        .and(if row.fp8 { kernels.fp8(Dtype::Bf16) } else { Ok(1.0) })
        .map_err(|e| e.to_string())?;
    let (all, element) = (row.groups * row.m, if row.fp8 { 1 } else { 2 });
    let flops = 2 * all * row.n * row.k;
    // Operands are narrow already: one byte says so, and takes no time.
    let cast = u64::from(row.fp8);
    let bytes = (all * row.k + row.groups * row.n * row.k) * element + 2 * all * row.n + cast;
    let work = Work {
        flops,
        bytes,
        class: WorkClass::Gemm {
            m: all,
            n: row.n,
            k: row.k,
            cast,
            result: 2,
            groups: 1,
            unaligned: false,
            of_weights: false,
        },
    };
    Ok(flops as f64 / kernels.time(&work, Dtype::Bf16).seconds.value() / 1e12)
}
