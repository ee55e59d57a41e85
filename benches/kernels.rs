//! How fast the CPU's kernels are, as shares of the rate of a plain product.
//!
//! The baseline is `product`: 1024 x 1024 x 256 in f32 by matrixmultiply, neither operand transposed. All
//! kernels are timed in turns and by their fastest run, in time that they had a core, so that whatever else the
//! machine does hits them alike.

use cpu_time::ThreadTime;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use foretrain::exec::kernels::run;
use foretrain::plan::{AttnBlock, Axis, Kernel, Mesh, Segs, Side};
use foretrain::spec::{Factor, Mask};
use std::time::{Duration, Instant};

/// A kernel with its operands.
struct Case {
    name: String,
    kernel: Kernel,
    flops: u64,
    reads: Vec<Vec<f32>>,
    writes: Vec<Vec<f32>>,
}

impl Case {
    fn new(name: impl Into<String>, kernel: Kernel) -> Case {
        let sizes = kernel.operands(&views());
        let fill = |sizes: &[u64]| sizes.iter().map(|&n| vec![0.01; n as usize]).collect::<Vec<Vec<f32>>>();
        let (reads, writes) = (fill(&sizes.reads), fill(&sizes.writes));
        let bytes = |sizes: &[u64]| sizes.iter().map(|n| 4 * n).collect::<Vec<u64>>();
        let work = kernel.work(&views(), 0, &bytes(&sizes.reads), &bytes(&sizes.writes)).expect("some is visible");
        Case { name: name.into(), kernel, flops: work.flops, reads, writes }
    }

    fn run(&mut self) {
        let reads: Vec<Option<&[f32]>> = self.reads.iter().map(|x| Some(&x[..])).collect();
        let mut writes: Vec<&mut [f32]> = self.writes.iter_mut().map(|x| &mut x[..]).collect();
        run(&self.kernel, &views(), 0, 1, &reads, &mut writes);
    }

    fn gflops(&mut self) -> f64 {
        let begun = ThreadTime::now();
        self.run();
        self.flops as f64 / begun.elapsed().as_secs_f64() * 1e-9
    }
}

fn views() -> Vec<Mesh> {
    vec![Mesh::new(&[(Axis::Cp, 1)])]
}

fn product(name: &str, [m, n, k]: [u64; 3], a_t: bool, b_t: bool, accumulate: bool) -> Case {
    Case::new(name, Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8: false, bias: false })
}

fn attention(seq: u64, head_dim: u64, causal: bool) -> AttnBlock {
    let all = || Segs::new(seq, &[]);
    AttnBlock {
        q: all(),
        kv: all(),
        batch: 1,
        heads: 4,
        kv_heads: 2,
        head_dim,
        v_dim: None,
        mask: Mask::new(causal),
        factor: Factor::ONE,
    }
}

fn cases() -> Vec<Case> {
    let mut all = vec![
        product("product", [1024, 1024, 256], false, false, false),
        product("forward 512x1536x512", [512, 1536, 512], false, true, false),
        product("grad input 512x512x1536", [512, 512, 1536], false, false, false),
        product("grad weight 1536x512x512, added", [1536, 512, 512], true, false, true),
        product("thin 16x1024x1024", [16, 1024, 1024], false, true, false),
    ];
    for (seq, head_dim, causal) in [(512, 64, true), (2048, 64, true), (2048, 64, false), (2048, 128, true)] {
        let (block, mask) = (attention(seq, head_dim, causal), if causal { "causal" } else { "full" });
        let name = |pass: &str| format!("attention {pass} {seq} x {head_dim}, {mask}");
        all.push(Case::new(name("forward"), Kernel::Attention(block.clone())));
        all.push(Case::new(name("backward"), Kernel::AttentionBwd(block.clone())));
        all.push(Case::new(name("onto"), Kernel::AttentionBwdOnto(block, Side::Q)));
    }
    all
}

fn ratios() {
    let mut all = cases();
    let mut best = vec![0.0f64; all.len()];
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(10) {
        best.iter_mut().zip(&mut all).for_each(|(best, case)| *best = best.max(case.gflops()));
    }
    println!("{:42} {:>8} {:>10}", "f32, one core, fastest of interleaved runs", "GFLOP/s", "of product");
    for (case, rate) in all.iter().zip(&best) {
        println!("{:42} {rate:>8.1} {:>10.2}", case.name, rate / best[0]);
    }
}

fn kernels(c: &mut Criterion) {
    ratios();
    let mut group = c.benchmark_group("kernels");
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1)).sample_size(10);
    for mut case in cases() {
        group.throughput(Throughput::Elements(case.flops));
        group.bench_function(case.name.clone(), |b| b.iter(|| case.run()));
    }
    group.finish();
}

criterion_group!(benches, kernels);
criterion_main!(benches);
