use super::*;
use crate::plan::Kernel;
use crate::plan::kernel::{Operands, SsmOp};

fn roofline(gpu: &str, stack: &str) -> Roofline {
    Roofline::new(&GpuSpec::find(gpu).unwrap(), &StackSpec::find(stack).unwrap()).unwrap()
}

fn gemm(m: u64, n: u64, k: u64) -> Work {
    Work {
        flops: 2 * m * n * k,
        bytes: 2 * (m * k + k * n + m * n),
        class: WorkClass::Gemm { m, n, k, cast: 0, result: 2, groups: 1, unaligned: false, of_weights: false },
    }
}

fn attention(q_rows: u64, kv_rows: u64, area: u64, backward: bool) -> Work {
    let products = if backward { 5 } else { 2 };
    let class =
        WorkClass::Attention { q_rows, kv_rows, area, batch_heads: 32, dims: [128; 2], backward, pairs: Pairs::Masked };
    Work { flops: 2 * products * area * 32 * 128, bytes: 2 * 128 * 32 * (2 * q_rows + 2 * kv_rows), class }
}

#[test]
fn blocks_without_a_mask_are_faster_where_a_gpu_says_so() {
    let rate = |gpu: &str, area: u64, backward: bool| {
        let work = attention(1 << 16, 1 << 16, area, backward);
        work.flops as f64 / roofline(gpu, "nccl-cudnn").time(&work, Dtype::Bf16).seconds.value()
    };
    let (whole, causal) = (1 << 32, ((1 << 32) + (1 << 16)) / 2);
    let gain = |gpu: &str, backward| rate(gpu, whole, backward) / rate(gpu, causal, backward);
    assert!((1.1..1.2).contains(&gain("b200-sxm", true)) && gain("b200-sxm", false) < 1.05);
    assert!(gain("h100-sxm5", true) < 1.05);
}

/// The three products of an output matrix have the vocabulary in a row of theirs; rows of odd number cost nothing.
#[test]
fn a_vocabulary_that_is_not_filled_up_is_slow() {
    let (h100, tpu) = (roofline("h100-sxm5", "nccl-fa3"), roofline("tpu-v5p", "tpu"));
    let of = |roofline: &Roofline, tokens: u64, vocab: u64| {
        let (h, product) = (4096, |m, n, k, a_t, b_t| Kernel::MatMul {
            m,
            n,
            k,
            a_t,
            b_t,
            accumulate: false,
            fp8: false,
            bias: false,
        });
        [(tokens, vocab, h, false, true), (tokens, h, vocab, false, false), (vocab, h, tokens, true, false)].map(
            |(m, n, k, a_t, b_t)| {
                let work = product(m, n, k, a_t, b_t).work(&[], 0, &[2 * m * k, 2 * k * n], &[2 * m * n]).unwrap();
                roofline.time_as("matmul", &work, Dtype::Bf16).seconds.value()
            },
        )
    };
    let [even, odd, odd_rows] = [(8192, 50304), (8192, 50257), (8191, 50304)].map(|(t, v)| of(&h100, t, v));
    let part = GpuSpec::find("h100-sxm5").unwrap().gemm.unaligned.unwrap().value;
    for ((even, odd), rows) in even.into_iter().zip(odd).zip(odd_rows) {
        assert!((even / odd / part - 1.0).abs() < 0.01 && (even / rows - 1.0).abs() < 0.01, "{even} {odd} {rows}");
    }
    // A compiler fills matrices up.
    let [even, odd] = [50304, 50257].map(|vocab| of(&tpu, 8192, vocab).iter().sum::<f64>());
    assert!((odd / even - 1.0).abs() < 0.01);
}

#[test]
fn heads_that_do_not_come_out_even_go_without_tensor_cores() {
    let a100 = roofline("a100-sxm4-80gb", "nccl-unfused");
    let rate = |curve: &str, width: u64| {
        let work = gemm(1 << 15, 2048, width);
        work.flops as f64 / a100.time_as(curve, &work, Dtype::Bf16).seconds.value()
    };
    assert!(rate("scores", 108) < 19.5e12 && rate("scores", 104) > 60e12);
    assert!(rate("matmul_nn", 108) > 60e12, "a weight's product is padded");
}

/// Products of experts on AMD: forward 1165 TFLOP/s, backward less (github pull request AMD-AGI/Primus-Turbo#252).
#[test]
fn products_of_experts_on_amd() {
    let mi355x = roofline("mi355x", "rccl-fa2");
    let (m, n, k) = (16 * 4096, 4096, 7168);
    let class = WorkClass::Gemm { m, n, k, cast: 0, result: 2, groups: 16, unaligned: false, of_weights: false };
    let work = Work { flops: 2 * m * n * k, bytes: 2 * (m * k + 16 * k * n + m * n), class };
    let rate = |curve| 1e-12 * work.flops as f64 / mi355x.time_as(curve, &work, Dtype::Bf16).seconds.value();
    assert!((rate("grouped_matmul") / 1165.0 - 1.0).abs() < 0.05, "{}", rate("grouped_matmul"));
    let backward = [rate("grouped_matmul_dx"), rate("grouped_matmul_dw")];
    assert!(backward.iter().all(|rate| (626.0..860.0).contains(rate)), "{backward:?}");
    assert!(rate("matmul_nn") > 1400.0, "other products are as they were");
}

/// DeepSeek's own software: products on 112 of 132 SMs, and slower kernels that round and that make gradients of weights.
#[test]
fn products_keep_off_sms() {
    let [usual, own] = ["nccl-fa3", "hai-llm"].map(|stack| roofline("h800-sxm5", stack));
    let ratio = |work: &Work| {
        let [usual, own] = [&usual, &own].map(|r| r.time(work, Dtype::Bf16));
        (own.seconds / usual.seconds, usual.on_sms.decide(), own.on_sms.decide())
    };
    let product = |cast, of_weights| {
        let (m, n, k) = (32768, 4096, 7168);
        let bytes = m * k + k * n + m * n * 4 + cast;
        let class = WorkClass::Gemm { m, n, k, cast, result: 4, groups: 4, unaligned: false, of_weights };
        Work { flops: 2 * m * n * k, bytes, class }
    };
    let (slower, before, behind) = ratio(&product(0, true));
    assert!((slower - 132.0 / 112.0).abs() < 1e-3 && before && !behind, "{slower}");
    assert!((ratio(&product(1, true)).0 - 132.0 / 112.0 * 1.27).abs() < 2e-3, "rounding takes no time to speak of");
    assert!((ratio(&product(1, false)).0 - 132.0 / 112.0).abs() < 1e-3);
    assert_eq!(ratio(&attention(4096, 4096, 4096 * 2048, true)), (1.0, true, true));
    let mut stack = StackSpec::find("hai-llm").unwrap();
    stack.kept_sms.as_mut().unwrap().value = 132;
    let why = Roofline::new(&GpuSpec::find("h800-sxm5").unwrap(), &stack).unwrap_err().to_string();
    assert!(why.contains("kept_sms") && why.contains("132 of the 132 SMs"), "{why}");
}

#[test]
fn what_is_not_fused_moves_more() {
    let [fused, eager] = ["nccl-fa2", "torch-eager"].map(|stack| roofline("h100-sxm5", stack));
    let work = Work { flops: 0, bytes: 1 << 30, class: WorkClass::Memory };
    let ratio = |curve: &str| {
        let time = |r: &Roofline| r.time_as(curve, &work, Dtype::Bf16).seconds.value();
        time(&eager) / time(&fused)
    };
    assert!((ratio("norm") - 9.0).abs() < 0.1 && (ratio("add") - 1.0).abs() < 1e-9, "{}", ratio("norm"));
}

#[test]
fn one_tile_more_than_a_wave_takes_two_waves() {
    let mut gpu = GpuSpec::find("h100-sxm5").unwrap();
    gpu.gemm.tiles = vec![[128, 256]];
    let time = |tiles: u64| time_of(&gpu, tiles);
    assert!((time(132) / time(131) - 1.0).abs() < 1e-9);
    assert!((time(133) / time(132) - 2.0).abs() < 1e-9);
    assert!(time(33) < time(67) * 0.5, "where tiles are few, k is split");
    // Smaller tiles fill the second wave better.
    gpu.gemm.tiles.push([128, 128]);
    assert!(time_of(&gpu, 133) < time_of(&gpu, 132) * 1.9);
}

fn time_of(gpu: &GpuSpec, tiles: u64) -> Seconds {
    let product = gemm::Product { m: 128 * tiles, n: 256, k: 8192, element: 2, result: 2 };
    gemm::time(gpu, product, FlopsPerSec::new(8e14))
}

#[test]
fn fp8_pays_less_than_twofold_and_only_where_there_is_some() {
    let r = roofline("h100-sxm5", "nccl-fa3");
    let time = |m: u64, k: u64, fp8| {
        let kernel = Kernel::MatMul { m, n: 8192, k, a_t: false, b_t: true, accumulate: false, fp8, bias: false };
        let work = kernel.work(&[], 0, &[2 * m * k, 2 * 8192 * k], &[2 * m * 8192]).unwrap();
        r.time(&work, Dtype::Bf16).seconds
    };
    let gain = time(16384, 8192, false) / time(16384, 8192, true);
    assert!(gain > 1.25 && gain < 2.0, "the peak doubles, but operands have to be rounded first: {gain}");
    let thin = time(64, 8192, false) / time(64, 8192, true);
    assert!(thin > 1.0 && thin < 2.0, "weights that were rounded before are half the bytes: {thin}");
    let a100 = roofline("a100-sxm4-80gb", "nccl-fa2").fp8(Dtype::Bf16).unwrap_err().to_string();
    assert!(a100.contains("leave out the option fp8"), "{a100}");
}

#[test]
fn adding_to_a_gradient_takes_longer_than_writing_it_and_less_than_a_kernel_of_its_own() {
    let r = roofline("a100-sxm4-80gb", "nccl-fa2");
    let time = |work: Work| r.time(&work, Dtype::Bf16).seconds;
    let (m, n, k) = (8192, 8192, 2048);
    let product = |accumulate, dtype: u64| {
        let kernel = Kernel::MatMul { m, n, k, a_t: true, b_t: false, accumulate, fp8: false, bias: false };
        let sums = dtype * m * n;
        let reads = if accumulate { vec![2 * m * k, 2 * n * k, sums] } else { vec![2 * m * k, 2 * n * k] };
        time(kernel.work(&[], 0, &reads, &[sums]).unwrap())
    };
    let (added, written) = (product(true, 4), product(false, 2));
    let kernel = time(Work { flops: 0, bytes: 10 * m * n, class: WorkClass::Memory });
    assert!(added > written && added < written + kernel, "{added} {written} {kernel}");
}

#[test]
fn experts_one_by_one_take_longer_than_all_in_one_kernel() {
    let time = |stack: &str, groups: u64| {
        let class = WorkClass::Gemm {
            m: 32768,
            n: 1536,
            k: 2048,
            cast: 0,
            result: 2,
            groups,
            unaligned: false,
            of_weights: false,
        };
        let work = Work { class, ..gemm(32768, 1536, 2048) };
        roofline("b200-sxm", stack).time(&work, Dtype::Bf16).seconds
    };
    let start = StackSpec::find("nccl-cudnn").unwrap().group_start.unwrap().value;
    let more = time("nccl-cudnn", 16) - time("nccl-cudnn", 1);
    assert!((more / (start * 15.0) - 1.0).abs() < 1e-9, "{more}");
    assert_eq!(time("nccl-fa4", 16), time("nccl-fa4", 1));
}

#[test]
fn more_work_never_takes_less_time() {
    let r = roofline("h100-sxm5", "nccl-fa3");
    let mut last = Seconds::ZERO;
    for m in (64..20000).step_by(64) {
        let t = r.time(&gemm(m, 4096, 4096), Dtype::Bf16).seconds;
        assert!(t >= last, "{m}");
        last = t;
    }
    for backward in [false, true] {
        last = Seconds::ZERO;
        for s in (128..20000).step_by(128) {
            let t = r.time(&attention(s, s, s * (s + 1) / 2, backward), Dtype::Bf16).seconds;
            assert!(t > last, "{s}");
            last = t;
        }
    }
}

#[test]
fn efficiency_stays_below_the_ceiling() {
    let r = roofline("h100-sxm5", "nccl-fa3");
    let w = gemm(16384, 16384, 8192);
    let rate = Flops::new(w.flops as f64) / r.time(&w, Dtype::Bf16).seconds / r.peak(Dtype::Bf16).unwrap();
    assert!(rate > 0.8 * 0.65 && rate < 0.8 * 0.811, "{rate}");
}

/// Time of a pass of the scan of Mamba-2 over `seq` tokens of one sequence: heads of 64, a group of states of 128, chunks of 256.
fn scan(gpu: &str, stack: &str, heads: u64, seq: u64, op: SsmOp) -> f64 {
    let mamba = crate::spec::MambaSpec { heads, head_dim: 64, groups: 1, state: 128, conv: 4, chunk: 256 };
    let kernel = Kernel::Ssm(crate::plan::kernel::SsmKernel { batch: 1, seq, mamba, op });
    let Operands { reads, writes } = kernel.operands(&[]);
    let bytes = |elems: Vec<u64>| elems.into_iter().map(|n| 2 * n).collect::<Vec<_>>();
    let work = kernel.work(&[], 0, &bytes(reads), &bytes(writes)).unwrap();
    roofline(gpu, stack).time_as(kernel.curve(), &work, Dtype::Bf16).seconds.value()
}

/// 12.6 million tokens a second at 8192 of them, 10.8 at 262144 (github pull request vllm-project/vllm#27299).
#[test]
fn a_scan_takes_what_was_measured() {
    let rate = |seq: u64| seq as f64 / scan("h100-sxm5", "nccl-fa3", 128, seq, SsmOp::Scan);
    for (seq, measured) in [(8192, 12.62e6), (16384, 12.92e6), (65536, 11.07e6), (262144, 10.82e6)] {
        let ratio = rate(seq) / measured;
        assert!((ratio - 1.0).abs() < 0.15, "{seq}: {ratio}");
    }
}

/// Mamba-2 of 1.4 billion parameters takes 1.35, 0.58 and 0.38 s for 16,384 tokens on A100, H200 and GB200, of which both
/// passes of 48 layers' scans are about 0.57, 0.27 and 0.23: what is left by products and by what Mamba-3 takes besides its own
/// kernels (github issue state-spaces/mamba#904). Nemotron 3 Nano wants a backward pass that is a fifth faster.
#[test]
fn both_passes_of_a_scan_go_as_sms_do() {
    let both = |gpu: &str, stack: &str| -> f64 {
        let pass = |op| 4.0 * 48.0 * scan(gpu, stack, 64, 4096, op);
        pass(SsmOp::Scan) + pass(SsmOp::ScanBwd)
    };
    let [a100, h200, gb200] =
        [both("a100-sxm4-80gb", "nccl-fa2"), both("h200-sxm5", "nccl-fa3"), both("gb200", "nccl-cudnn")];
    for (time, measured) in [(a100, 0.57), (h200, 0.27), (gb200, 0.225)] {
        assert!((0.8..1.0).contains(&(time / measured)), "{time} of {measured}");
    }
    assert!((a100 / h200 / (0.57 / 0.27) - 1.0).abs() < 0.1 && (h200 / gb200 / (0.27 / 0.225) - 1.0).abs() < 0.1);
}

/// 40 heads of 64 tiles fill the 216 places of an A100 eleven times and 184 of them once more; of five heads a
/// second wave has 104 tiles, one an SM, and under a causal mask SMs wait for the longest.
#[test]
fn few_tiles_leave_places_empty() {
    let r = roofline("a800-sxm4-80gb", "nccl-fa2");
    let rate = |heads: u64, causal: bool| {
        let n = 8192u64;
        let area = if causal { n * (n + 1) / 2 } else { n * n };
        let class = WorkClass::Attention {
            q_rows: n,
            kv_rows: n,
            area,
            batch_heads: heads,
            dims: [128; 2],
            backward: false,
            pairs: Pairs::Masked,
        };
        let work = Work { flops: 4 * area * heads * 128, bytes: 0, class };
        work.flops as f64 / r.time(&work, Dtype::Bf16).seconds.value()
    };
    let full = rate(5, false) / rate(40, false);
    assert!((full / ((320.0 / 360.0) / (2560.0 / 2592.0)) - 1.0).abs() < 0.02, "{full}");
    let causal = rate(5, true) / rate(40, true);
    assert!((causal / ((1.0 + 216.0 / 2560.0) / (1.0 + 216.0 / 320.0)) - 1.0).abs() < 0.05, "{causal}");
}

#[test]
fn a_scan_on_blackwell_gains_as_little_as_its_instructions_are_old() {
    let scan = |gpu: &str| {
        let work = Work { flops: 0, bytes: 1 << 30, class: WorkClass::Scan { states: 0 } };
        roofline(gpu, "nccl-cudnn").time(&work, Dtype::Bf16).seconds.value()
    };
    let ratio = scan("h100-sxm5") / scan("b200-sxm");
    assert!((1.05..1.25).contains(&ratio), "{ratio}");
}

#[test]
fn a_diagonal_block_is_less_efficient_than_a_full_one() {
    let r = roofline("h100-sxm5", "nccl-fa3");
    let rate = |w: &Work| w.flops as f64 / r.time(w, Dtype::Bf16).seconds.value();
    let (full, masked) = (attention(4096, 4096, 4096 * 4096, false), attention(4096, 4096, 4096 * 4097 / 2, false));
    assert!(rate(&full) > rate(&masked));
}

#[test]
fn small_kernels_are_bound_by_memory_or_launch() {
    let r = roofline("h200-sxm5", "nccl-fa3");
    let e = r.time(&Work { flops: 0, bytes: 1 << 30, class: WorkClass::Memory }, Dtype::F32);
    assert!(!e.on_sms.decide() && e.seconds > Bytes::new((1u64 << 30) as f64) / r.gpu.memory_bandwidth.value);
    let e = r.time(&gemm(1, 4096, 4096), Dtype::Bf16);
    assert!(e.seconds >= r.gpu.launch.value && !e.on_sms.decide() && e.provenance == Provenance::Interpolated);
}

#[test]
fn what_a_device_cannot_do_is_an_error() {
    let cpu = roofline("cpu-core", "cpu");
    let err = cpu.peak(Dtype::Bf16).unwrap_err().to_string();
    assert!(err.contains("no peak is given for bf16") && err.contains("f32, f64"), "{err}");
    let (a100, fa3) = (GpuSpec::find("a100-sxm4-80gb").unwrap(), StackSpec::find("nccl-fa3").unwrap());
    let err = Roofline::new(&a100, &fa3).unwrap_err().to_string();
    assert!(err.contains("`fa3`") && err.contains("fa2"), "{err}");
}

/// The twelve products of a layer of 4096 by 16,384 on a B300, 15,872 rows at a time, on which nothing was fitted: 12.8 and 13.1 ms
/// in bf16; in FP8, rounded before, 6.8 with a scale for each matrix and 7.2 with one for each 32 elements (Transformer Engine's
/// docs/examples/gemm_profiling/gemm_profiling.rst@8f2e635).
#[test]
fn products_of_a_layer_take_what_was_measured_on_b300() {
    let r = roofline("b300-sxm", "nccl-cudnn");
    let rows = 15872;
    let layer = |fp8: bool| -> f64 {
        let product = |m: u64, n: u64, k: u64| {
            let cast = if fp8 { 2 * m * k + m * k } else { 0 };
            let bytes = if fp8 { m * k + k * n } else { 2 * (m * k + k * n) } + 2 * m * n + cast;
            let class = WorkClass::Gemm { m, n, k, cast, result: 2, groups: 1, unaligned: false, of_weights: false };
            let all = r.time(&Work { flops: 2 * m * n * k, bytes, class }, Dtype::Bf16).seconds;
            (all - r.memory(cast).seconds * r.cast).value()
        };
        let linear = |&(k, n): &(u64, u64)| product(rows, n, k) + product(rows, k, n) + product(k, n, rows);
        1e3 * [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)].iter().map(linear).sum::<f64>()
    };
    let (bf16, fp8) = (layer(false), layer(true));
    assert!((bf16 / 12.93 - 1.0).abs() < 0.04 && (fp8 / 6.99 - 1.0).abs() < 0.06, "{bf16} {fp8}");
}

/// A scan whose states are twice as many per chunk, as in Nemotron-H 56B over Nemotron 3 Nano's, takes less than in
/// proportion to its bytes: SMs bound the small products, memory the states.
#[test]
fn states_of_a_scan_pass_at_the_rate_of_memory() {
    let scan = |state: u64| {
        let mamba = crate::spec::MambaSpec { heads: 64, head_dim: 64, groups: 1, state, conv: 4, chunk: 128 };
        let kernel = Kernel::Ssm(crate::plan::kernel::SsmKernel { batch: 1, seq: 8192, mamba, op: SsmOp::ScanBwd });
        let Operands { reads, writes } = kernel.operands(&[]);
        let bytes = |elems: Vec<u64>| elems.into_iter().map(|n| 2 * n).collect::<Vec<_>>();
        let work = kernel.work(&[], 0, &bytes(reads), &bytes(writes)).unwrap();
        let seconds = roofline("b200-sxm", "nccl-cudnn").time_as(kernel.curve(), &work, Dtype::Bf16).seconds.value();
        (work.bytes as f64, seconds)
    };
    let (one, two) = (scan(128), scan(256));
    assert!(two.0 / one.0 > 1.45, "bytes {}", two.0 / one.0);
    assert!((1.05..1.25).contains(&(two.1 / one.1)), "time {}", two.1 / one.1);
}

/// SMs that are taken away stretch what they compute: not launches, and of what memory takes longer for only the part beyond.
#[test]
fn a_kernel_lasts_as_long_as_memory_and_as_its_slowed_sms() {
    let on_sms = OnSms { computes: 0.5, on_top: 0.25 };
    assert_eq!(on_sms.lasts(1000, |work| work), 1000);
    assert_eq!(on_sms.lasts(1000, |work| work * 5 / 4), 1000);
    assert_eq!(on_sms.lasts(1000, |work| work * 2), 1250);
    assert_eq!(OnSms::NONE.lasts(1000, |_| panic!("memory alone decides")), 1000);
    // Of a kernel that SMs decide, all but what comes on top is stretched, and a little more memory changes that little.
    let r = roofline("h100-sxm5", "nccl-fa3");
    let time = |bytes: f64| {
        let class = WorkClass::Gemm {
            m: 8192,
            n: 512,
            k: 8192,
            cast: 0,
            result: 2,
            groups: 1,
            unaligned: false,
            of_weights: false,
        };
        let work = Work { flops: 2 * 8192 * 512 * 8192, bytes: (bytes * 1e6) as u64, class };
        r.time(&work, Dtype::Bf16)
    };
    let slowed = |e: Estimate| e.on_sms.lasts((e.seconds.value() * 1e12) as u64, |work| work * 4 / 3) as f64;
    let all: Vec<f64> = (0..400).map(|i| slowed(time(f64::from(i)))).collect();
    assert!(time(1.0).on_sms.decide() && !time(399.0).on_sms.decide());
    assert!(all.windows(2).all(|pair| pair[0] <= pair[1] * (1.0 + 1e-6) && pair[1] < pair[0] * 1.02), "{all:?}");
}

/// A kernel that is written for some widths computes heads in the next of them; values have widths of their own.
#[test]
fn narrower_heads_take_as_long_as_those_that_the_kernel_is_written_for() {
    let n = 1 << 14;
    let time = |stack: &str, dims: [u64; 2], backward: bool| {
        let class = WorkClass::Attention {
            q_rows: n,
            kv_rows: n,
            area: n * n,
            batch_heads: 64,
            dims,
            backward,
            pairs: Pairs::Masked,
        };
        let work = Work { flops: 2 * n * n * 64 * dims.iter().sum::<u64>(), bytes: 0, class };
        roofline("h100-sxm5", stack).time(&work, Dtype::Bf16).seconds.value()
    };
    for backward in [false, true] {
        for (stack, narrow, wide) in
            [("nccl-fa3", [160; 2], [192; 2]), ("nccl-fa3", [80; 2], [96; 2]), ("nccl-fa2", [100; 2], [128; 2])]
        {
            let ratio = time(stack, narrow, backward) / time(stack, wide, backward);
            assert!((ratio - 1.0).abs() < 1e-9, "{stack} {narrow:?}: {ratio}");
        }
        // Latent attention's keys and values each fit; cuDNN's widths are not known.
        assert!(time("nccl-fa3", [192, 128], backward) < 0.9 * time("nccl-fa3", [192; 2], backward));
        assert!(time("nccl-cudnn", [80; 2], backward) < 0.97 * time("nccl-cudnn", [96; 2], backward));
    }
}
