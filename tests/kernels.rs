//! Predicted attention kernels against published rates (traces/published/attention.json): the calibration
//! set of the curves in models/gpu. Bounds are the errors as they are today.

use foretrain::device::{KernelTime, Roofline};
use foretrain::plan::{Dtype, Work, WorkClass};
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
        let class =
            WorkClass::Attention { q_rows: s, kv_rows: s, area, batch_heads, head_dim: case.head_dim, backward };
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
    let roofline = Roofline::new(&GpuSpec::find(gpu).unwrap(), &stack).unwrap();
    let mut all = Vec::new();
    for case in cases.iter().filter(|c| c.gpu == gpu && c.kernel == kernel) {
        let error =
            |&(s, bh, rate): &(u64, u64, f64)| predict(case, &roofline, s, bh) / measured(case, s, bh, rate) - 1.0;
        let errors: Vec<f64> = case.seq_heads_tflops.iter().map(error).collect();
        let shown: Vec<_> = errors.iter().map(|e| format!("{e:+.2}")).collect();
        println!("\n{} {gpu} {kernel} {} d{} {}: {}", case.set, case.pass, case.head_dim, case.causal, shown.join(" "));
        all.extend(errors);
    }
    let rms = (all.iter().map(|e| e * e).sum::<f64>() / all.len() as f64).sqrt();
    all.iter_mut().for_each(|e| *e = e.abs());
    all.sort_by(f64::total_cmp);
    let (median, worst) = (all[all.len() / 2], all[all.len() - 1]);
    println!("\n{gpu} {kernel}: {} rows, median {median:.3}, worst {worst:.3}, rms {rms:.3}", all.len());
    assert!(median <= bound.0 && worst <= bound.1 && rms <= bound.2, "{median} {worst} {rms} beyond {bound:?}");
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
    hold("a100-sxm4-80gb", "fa2", (0.01, 0.04, 0.02));
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
