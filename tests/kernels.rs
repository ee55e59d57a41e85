//! Predicted kernels against published rates (traces/published/attention.json and gemm.json): the calibration
//! sets of the curves in models/gpu. Bounds are the errors as they are today.

use foretrain::device::{KernelTime, Roofline, gemm};
use foretrain::plan::{Dtype, Pairs, Work, WorkClass};
use foretrain::spec::{GpuSpec, StackSpec};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    set: String,
    gpu: String,
    kernel: String,
    pass: String,
    head_dim: u64,
    causal: bool,
    seq_heads_tflops: Vec<(u64, u64, f64)>,
}

#[derive(Deserialize)]
struct Table {
    cases: Vec<Case>,
}

fn predict(case: &Case, roofline: &Roofline, s: u64, batch_heads: u64) -> f64 {
    let area = if case.causal { s * (s + 1) / 2 } else { s * s };
    let pass = |backward: bool| {
        let class = WorkClass::Attention {
            q_rows: s,
            kv_rows: s,
            area,
            batch_heads,
            dims: [case.head_dim; 2],
            backward,
            pairs: Pairs::Masked,
        };
        let products = if backward { 5 } else { 2 };
        let operands = if backward { 8 } else { 4 };
        let row = 2 * case.head_dim * batch_heads;
        let work = Work { flops: 2 * products * area * batch_heads * case.head_dim, bytes: operands * s * row, class };
        roofline.time(&work, Dtype::Bf16).seconds.value()
    };
    match case.pass.as_str() {
        "forward" => pass(false),
        "backward" => pass(true),
        _ => pass(false) + pass(true),
    }
}

/// The time the published rate stands for, in the sources' own count of FLOPs.
fn measured(case: &Case, s: u64, batch_heads: u64, tflops: f64) -> f64 {
    let mask = if case.causal { 0.5 } else { 1.0 };
    let forward = 4.0 * mask * (s * s * batch_heads * case.head_dim) as f64;
    let passes = match case.pass.as_str() {
        "forward" => 1.0,
        "backward" => 2.5,
        _ => 3.5,
    };
    forward * passes / (tflops * 1e12)
}

/// Holds (median, worst, root mean square) of the relative errors of one kernel on one GPU.
fn hold(gpu: &str, kernel: &str, bound: (f64, f64, f64)) {
    let text = std::fs::read_to_string("traces/published/attention.json").unwrap();
    let cases = serde_json::from_str::<Table>(&text).unwrap().cases;
    let stack = StackSpec::find(&format!("nccl-{kernel}")).unwrap();
    let roofline = Roofline::new(&GpuSpec::find(gpu).unwrap(), &stack).unwrap().alone();
    let mut all = Vec::new();
    for case in cases.iter().filter(|c| c.gpu == gpu && c.kernel == kernel) {
        let error =
            |&(s, bh, rate): &(u64, u64, f64)| predict(case, &roofline, s, bh) / measured(case, s, bh, rate) - 1.0;
        let errors: Vec<f64> = case.seq_heads_tflops.iter().map(error).collect();
        let shown: Vec<_> = errors.iter().map(|e| format!("{e:+.2}")).collect();
        println!("\n{} {gpu} {kernel} {} d{} {}: {}", case.set, case.pass, case.head_dim, case.causal, shown.join(" "));
        all.extend(errors);
    }
    within(&format!("{gpu} {kernel}"), all, bound);
}

#[test]
fn flash_attention_3_on_h100() {
    hold("h100-sxm5", "fa3", (0.03, 0.24, 0.06));
}

#[test]
fn flash_attention_2_on_h100() {
    hold("h100-sxm5", "fa2", (0.02, 0.27, 0.06));
}

#[test]
fn flash_attention_2_on_a100() {
    hold("a100-sxm4-80gb", "fa2", (0.01, 0.045, 0.02));
}

#[test]
fn cudnn_on_h100() {
    hold("h100-sxm5", "cudnn", (0.05, 0.25, 0.08));
}

#[test]
fn flash_attention_4_on_b200() {
    hold("b200-sxm", "fa4", (0.03, 0.10, 0.05));
}

#[test]
fn cudnn_on_b200() {
    hold("b200-sxm", "cudnn", (0.03, 0.05, 0.04));
}

#[test]
fn any_kernel_on_h20() {
    for kernel in ["fa2", "fa3", "cudnn"] {
        hold("h20-sxm5", kernel, (0.03, 0.04, 0.03));
    }
}

#[derive(Deserialize)]
struct GemmCase {
    set: String,
    gpu: String,
    dtype: String,
    fitted: bool,
    mnk_us: Vec<(u64, u64, u64, f64)>,
}

#[derive(Deserialize)]
struct Gemms {
    cases: Vec<GemmCase>,
}

/// Seconds of a product; FP8 by its curve, as no plan asks a roofline for a product of one dtype alone.
fn product(gpu: &GpuSpec, dtype: &str, (m, n, k): (u64, u64, u64)) -> f64 {
    let element = if dtype == "fp8" { 1 } else { 2 };
    let bytes = element * (m * k + k * n) + 2 * m * n;
    if dtype == "bf16" {
        let stack = StackSpec::find("nccl-fa2").unwrap();
        let work = Work {
            flops: 2 * m * n * k,
            bytes,
            class: WorkClass::Gemm { m, n, k, cast: 0, result: 2, groups: 1, unaligned: false, of_weights: false },
        };
        return Roofline::new(gpu, &stack).unwrap().alone().time(&work, Dtype::Bf16).seconds.value();
    }
    let rate = gpu.peak[dtype].value * gpu.gemm.ceiling_of(dtype).value;
    let tiled = gemm::time(gpu, gemm::Product { m, n, k, element, result: 2 }, rate).value();
    let streamed = bytes as f64 / (gpu.memory_bandwidth.value.value() * gpu.gemm.stream.value);
    tiled.max(streamed) + gpu.launch.value.value()
}

/// Holds (median, worst, root mean square) of the relative errors of matrix products.
fn hold_products(gpus: &[&str], dtype: &str, bound: (f64, f64, f64)) {
    let text = std::fs::read_to_string("traces/published/gemm.json").unwrap();
    let mut all = Vec::new();
    for case in serde_json::from_str::<Gemms>(&text).unwrap().cases {
        if !gpus.contains(&&*case.gpu) || case.dtype != dtype {
            continue;
        }
        let mut gpu = GpuSpec::find(&case.gpu).unwrap();
        // One product alone is over before the power limit lowers the clock.
        gpu.gemm.sustained.clear();
        let error = |&(m, n, k, us): &(u64, u64, u64, f64)| product(&gpu, dtype, (m, n, k)) / (us * 1e-6) - 1.0;
        let errors: Vec<f64> = case.mnk_us.iter().map(error).collect();
        let shown: Vec<_> = errors.iter().map(|e| format!("{e:+.2}")).collect();
        println!("\n{} {} {dtype} fitted {}: {}", case.set, case.gpu, case.fitted, shown.join(" "));
        all.extend(errors.into_iter().filter(|_| case.fitted));
    }
    within(&format!("{gpus:?} {dtype}"), all, bound);
}

fn within(what: &str, mut all: Vec<f64>, bound: (f64, f64, f64)) {
    let rms = (all.iter().map(|e| e * e).sum::<f64>() / all.len() as f64).sqrt();
    all.iter_mut().for_each(|e| *e = e.abs());
    all.sort_by(f64::total_cmp);
    let (median, worst) = (all[all.len() / 2], all[all.len() - 1]);
    println!("\n{what}: {} rows, median {median:.3}, worst {worst:.3}, rms {rms:.3}", all.len());
    assert!(median <= bound.0 && worst <= bound.1 && rms <= bound.2, "{median} {worst} {rms} beyond {bound:?}");
}

#[test]
fn products_on_h100() {
    hold_products(&["h100-sxm5"], "bf16", (0.03, 0.11, 0.05));
}

#[test]
fn products_on_b200() {
    hold_products(&["b200-sxm"], "bf16", (0.10, 0.22, 0.12));
}

#[test]
fn products_on_a100() {
    hold_products(&["a100-sxm4-80gb", "a100-pcie-80gb"], "bf16", (0.10, 0.16, 0.10));
}

#[test]
fn products_on_cards_of_less_power() {
    hold_products(&["h100-pcie", "h20-sxm5", "l20", "rtx4090"], "bf16", (0.04, 0.05, 0.03));
}

#[test]
fn products_in_fp8() {
    hold_products(&["h100-sxm5", "h800-sxm5"], "fp8", (0.11, 0.50, 0.20));
    hold_products(&["b200-sxm"], "fp8", (0.06, 0.10, 0.07));
}

#[test]
fn an_op_of_several_kernels_waits_between_them() {
    let gpu = GpuSpec::find("a100-sxm4-80gb").unwrap();
    let with = |kernels: f64| {
        let mut stack = StackSpec::find("nccl-unfused").unwrap();
        stack.kernels_per_op.as_mut().unwrap().value = kernels;
        let work = Work { flops: 0, bytes: 1 << 20, class: WorkClass::Memory };
        Roofline::new(&gpu, &stack).unwrap().time(&work, Dtype::Bf16).seconds.value()
    };
    assert!((with(5.0) - with(1.0) - 4.0 * gpu.launch.value.value()).abs() < 1e-12);
}
