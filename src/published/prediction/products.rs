//! Predicts matrix products by themselves, one or a group of them in one launch.

use crate::device::{KernelTime, Roofline};
use crate::plan::{Dtype, Work, WorkClass};
use crate::published::Shipped;
use crate::published::machine::Stated;
use crate::published::outcome::verdict::Prediction;
use crate::published::row::case::Product;

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
