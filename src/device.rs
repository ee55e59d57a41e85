//! How long a kernel takes: a roofline whose roof depends on the shape.
//!
//! t = max(flops / (peak * efficiency(shape)), bytes / (bandwidth * fraction)) + launch

pub mod curve;
pub mod gemm;
pub mod measured;
pub mod speed;

use crate::error::{Error, Result};
use crate::plan::{Dtype, Work, WorkClass};
use crate::spec::gpu::PassCurve;
use crate::spec::{AttentionCurve, GpuSpec, Options, Origin, Sourced, StackSpec};
use crate::units::{Bytes, Flops, FlopsPerSec, Seconds};
use std::collections::BTreeMap;

pub use crate::spec::Provenance;
pub use measured::{Profile, Threads};

/// The duration of a kernel alone on its device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    pub seconds: Seconds,
    /// Slows down when SMs are taken away.
    pub sm_bound: bool,
    pub provenance: Provenance,
    /// Relative standard deviation.
    pub rel_sd: f64,
}

pub trait KernelTime {
    fn time(&self, work: &Work, dtype: Dtype) -> Estimate;

    /// The same for whoever knows which kernels behave alike: a [`Kernel::curve`](crate::plan::Kernel::curve).
    fn time_as(&self, _curve: &str, work: &Work, dtype: Dtype) -> Estimate {
        self.time(work, dtype)
    }

    /// The same, when so many bytes of its operands are not in a core's caches ([`cold_bytes`](crate::act::cold_bytes)).
    fn time_cold(&self, curve: &str, work: &Work, dtype: Dtype, _cold: u64) -> Estimate {
        self.time_as(curve, work, dtype)
    }

    /// How many times longer such a kernel takes while every core of the machine runs the same.
    fn beside(&self, _curve: &str, _work: &Work, _dtype: Dtype, _cold: u64) -> f64 {
        1.0
    }

    /// What ranks share that are threads of one machine; none where each has a device of its own.
    fn threads(&self) -> Option<&Threads> {
        None
    }
}

/// Names as the `peak` table of a GPU has them.
fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F64 => "f64",
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
        Dtype::U32 => "u32",
        Dtype::U8 => "u8",
    }
}

/// The lengths that the attention curves were fitted on; beyond them they are extrapolated.
const CALIBRATED_ROWS: std::ops::RangeInclusive<u64> = 512..=131072;

/// Products of queries, keys and values where attention is not fused.
const OF_HEADS: [&str; 5] = ["scores", "values", "probs_bwd", "q_bwd", "kv_bwd"];

/// Operands of tensor cores are read so many bytes at a time (NVIDIA, Matrix Multiplication Background User's Guide).
const TENSOR_CORE_BYTES: u64 = 16;

#[derive(Debug, Clone)]
pub struct Roofline {
    gpu: GpuSpec,
    /// `None`: attention is not fused, and its kernels are products and passes over memory like others.
    attention: Option<AttentionCurve>,
    /// Of each further matrix of a grouped product.
    group_start: Option<Sourced<Seconds>>,
    /// How many kernels an op is, on average.
    kernels: f64,
    stack: String,
    /// What kernels of a scan reach of the rate of those that memory bounds.
    scan: f64,
    /// What kernels that a framework does not fuse move, over what one fused kernel moves.
    unfused: BTreeMap<String, f64>,
    /// All SMs, over those that products have.
    kept: f64,
    /// How many times longer than the GPU's curves say: rounding to FP8, and the products that gradients of weights are.
    cast: f64,
    weight_grad_fp8: f64,
    /// Likewise products that are not in FP8, by the name of their curve.
    slower: BTreeMap<String, f64>,
}

/// A part of the time: seconds, and what they rest on.
struct Part {
    seconds: Seconds,
    provenance: Provenance,
    rel_sd: f64,
}

impl Roofline {
    pub fn new(gpu: &GpuSpec, stack: &StackSpec) -> Result<Roofline> {
        let scan = gpu.memory_bound.scan.as_ref().or(stack.scan.as_ref()).map_or(1.0, |scan| scan.value);
        let kernel = &stack.attention_kernel.value;
        let (gpu_copy, group_start) = (gpu.clone(), stack.group_start.clone());
        let unfused = stack.unfused.as_ref().map(|unfused| unfused.value.clone()).unwrap_or_default();
        let (sms, kept) = (gpu.sms.value, stack.kept_sms.as_ref().map_or(0, |kept| kept.value));
        if kept >= sms {
            let why = format!("{kept} of the {sms} SMs of {}; leave products some", gpu.name);
            return Err(Error::spec(&stack.name, "kept_sms", why));
        }
        let slower = |kernel: &str| *stack.slower.iter().find_map(|slower| slower.value.get(kernel)).unwrap_or(&1.0);
        let roofline = Roofline {
            gpu: gpu_copy,
            attention: None,
            group_start,
            kernels: stack.kernels_of_op(),
            stack: stack.name.clone(),
            scan,
            unfused,
            kept: f64::from(sms) / f64::from(sms - kept),
            cast: slower("cast"),
            weight_grad_fp8: slower("weight_grad_fp8"),
            slower: stack.slower.as_ref().map(|slower| slower.value.clone()).unwrap_or_default(),
        };
        if !stack.fuses_attention() {
            return Ok(Roofline { attention: None, ..roofline });
        }
        let Some(curve) = gpu.attention.get(kernel) else {
            let known: Vec<_> = gpu.attention.keys().map(String::as_str).collect();
            let why = format!(
                "stack {} runs `{kernel}`, which {} has no curve for (it has: {}); choose another stack, or add a curve",
                stack.name,
                gpu.name,
                known.join(", ")
            );
            return Err(Error::spec(&gpu.name, "attention", why));
        };
        Ok(Roofline { attention: Some(curve.clone()), ..roofline })
    }

    /// The same for a kernel alone on one GPU, for a moment: no power limit has lowered the clock yet.
    pub fn alone(mut self) -> Roofline {
        self.gpu.gemm.sustained.clear();
        self.attention.iter_mut().flat_map(|a| [&mut a.forward, &mut a.backward]).for_each(|p| p.sustained = None);
        self
    }

    /// Dense peak of matrix products. Check every dtype of a plan with it before asking for times.
    pub fn peak(&self, dtype: Dtype) -> Result<FlopsPerSec> {
        let name = dtype_name(dtype);
        self.gpu.peak.get(name).map(|p| p.value).ok_or_else(|| {
            let known: Vec<_> = self.gpu.peak.keys().map(String::as_str).collect();
            let why = format!("no peak is given for {name}; compute in one of: {}", known.join(", "));
            Error::spec(&self.gpu.name, "peak", why)
        })
    }

    /// How much faster products are in FP8 than in `dtype`. Check it before asking for times of a plan that
    /// rounds to FP8.
    pub fn fp8(&self, dtype: Dtype) -> Result<f64> {
        let Some(peak) = self.gpu.peak.get("fp8") else {
            let why =
                format!("fp8: {} has no peak for it; leave out the option fp8, or use another GPU", self.gpu.name);
            return Err(Error::infeasible(why));
        };
        Ok(peak.value / self.peak(dtype)?)
    }

    /// Whether GPU and stack have kernels for what the options ask for. Check it before asking for times.
    pub fn runs(&self, options: Options, dtype: Dtype) -> Result<()> {
        if self.attention.is_none() && !options.unfused {
            let why = format!(
                "attention: stack {} has no fused kernel for it; add the option unfused, or use another stack",
                self.stack
            );
            return Err(Error::infeasible(why));
        }
        if options.fp8 { self.fp8(dtype).map(drop) } else { Ok(()) }
    }

    /// Time at a rate of peak * ceiling, had the kernel `flops` to do.
    fn at_rate(&self, flops: f64, dtype: Dtype, ceiling: f64) -> Seconds {
        let peak = self.peak(dtype).expect("the dtypes of a plan are checked before it is timed");
        Flops::new(flops) / (peak * ceiling)
    }

    /// The best tiling, or the memory if that takes longer.
    fn gemm(&self, [m, n, k]: [u64; 3], [bytes, result]: [u64; 2], dtype: Dtype, fp8: bool) -> (Part, bool) {
        let curve = &self.gpu.gemm;
        let (name, element) = if fp8 { ("fp8", 1) } else { (dtype_name(dtype), dtype.size()) };
        let ceiling = curve.ceiling_of(name);
        let faster = if fp8 { self.fp8(dtype).expect("whoever asks for fp8 checks it") } else { 1.0 };
        let peak = self.peak(dtype).expect("the dtypes of a plan are checked before it is timed") * faster;
        let tiled = gemm::time(
            &self.gpu,
            gemm::Product { m, n, k, element, result },
            peak * ceiling.value * curve.sustained_of(name),
        );
        // What is added to in fp32 is the gradient of a weight.
        let of_weights = if fp8 && result > 2 * dtype.size() { self.weight_grad_fp8 } else { 1.0 };
        let tiled = tiled * (self.kept * of_weights);
        let streamed = Bytes::new(bytes as f64) / (self.gpu.memory_bandwidth.value * curve.stream.value);
        let provenance = worst([&ceiling.provenance, &curve.operands.provenance, &curve.stream.provenance]);
        let part = Part { seconds: tiled.max(streamed), provenance, rel_sd: curve.rel_sd.value };
        // Nothing more is lost to those whose SMs products are kept off.
        (part, tiled > streamed && self.kept == 1.0)
    }

    /// A product of so many groups of rows, where each has kernels of its own.
    fn one_by_one(&self, whole: Part, groups: u64) -> Part {
        let Some(start) = self.group_start.as_ref().filter(|_| groups > 1) else { return whole };
        Part {
            seconds: whole.seconds + start.value * (groups - 1) as f64,
            provenance: whole.provenance.max(worst([&start.provenance])),
            rel_sd: whole.rel_sd,
        }
    }

    fn attention(&self, work: &Work, dtype: Dtype) -> Part {
        let WorkClass::Attention { q_rows, kv_rows, area, batch_heads, head_dim, backward } = work.class else {
            unreachable!("asked for attention only")
        };
        let kernel = self.attention.as_ref().expect("whoever asks for fused attention checks that there is one");
        // Forward, a thread block owns query rows and walks keys; backward it is the reverse.
        let (curve, rows) = if backward { (&kernel.backward, kv_rows) } else { (&kernel.forward, q_rows) };
        let (area, rectangle) = (area as f64, q_rows as f64 * kv_rows as f64);
        let masked = if area < rectangle { curve.diagonal.value * q_rows.min(kv_rows) as f64 } else { 0.0 };
        let walk = (area + masked).min(rectangle) / rows as f64 + curve.half.value;
        // As for a product: tiles are whole, and so are waves; of unequal tiles the last wave is half empty.
        let tiles = batch_heads * rows.div_ceil(kernel.tile_rows);
        let held = curve.resident.iter().flat_map(|r| &r.value).find(|(widest, _)| head_dim <= *widest);
        let at_once = u64::from(self.gpu.sms.value) * held.map_or(1, |(_, blocks)| *blocks);
        let unequal = held.is_some() && area < rectangle;
        let slots = if unequal { tiles + at_once } else { self.in_waves(tiles, at_once) } * kernel.tile_rows;
        let walked = walk * slots as f64 / batch_heads as f64;
        let (ceiling, dim_known) = ceiling_at(curve, head_dim);
        let ceiling = ceiling * curve.sustained.as_ref().map_or(1.0, |part| part.value);
        let known = dim_known && CALIBRATED_ROWS.contains(&q_rows) && CALIBRATED_ROWS.contains(&kv_rows);
        let fitted = worst([&curve.ceiling.provenance, &curve.half.provenance, &curve.diagonal.provenance]);
        let beyond = if known { Provenance::Interpolated } else { Provenance::Extrapolated };
        Part {
            seconds: self.at_rate(work.flops as f64 * walked / area, dtype, ceiling),
            provenance: fitted.max(beyond),
            rel_sd: kernel.rel_sd.value,
        }
    }

    /// Equal tiles in waves of so many at once, as many as they take the time of. Those of a last wave that leaves each SM
    /// one where it could have more are done sooner: a tile alone has three quarters of an SM, two have half of it each
    /// (320 tiles on the 264 places of an H800: rings of five heads, traces/published/blind_attention_2.json).
    fn in_waves(&self, tiles: u64, at_once: u64) -> u64 {
        let (sms, left) = (u64::from(self.gpu.sms.value), tiles % at_once);
        let last = if left == 0 {
            0
        } else if at_once > sms && left <= sms {
            at_once * 2 / 3
        } else {
            at_once
        };
        tiles - left + last
    }

    /// At the rate of a large product: what small ones take at least.
    fn products(&self, flops: u64, dtype: Dtype) -> Part {
        let ceiling = self.gpu.gemm.ceiling_of(dtype_name(dtype));
        Part {
            seconds: self.at_rate(flops as f64, dtype, ceiling.value),
            provenance: Provenance::Assumed,
            rel_sd: self.gpu.gemm.rel_sd.value,
        }
    }

    fn memory(&self, bytes: u64) -> Part {
        let curve = &self.gpu.memory_bound;
        Part {
            seconds: Bytes::new(bytes as f64) / (self.gpu.memory_bandwidth.value * curve.fraction.value),
            provenance: worst([&curve.fraction.provenance]),
            rel_sd: curve.rel_sd.value,
        }
    }
}

impl KernelTime for Roofline {
    fn time_as(&self, curve: &str, work: &Work, dtype: Dtype) -> Estimate {
        let passes = self.unfused.get(curve).copied().unwrap_or(1.0);
        // Tensor cores take the matrices of heads by 16 bytes at a time; of heads that do not come out even, a library
        // has kernels without them (cuBLAS; the rows of BigScience's heads of 108 and 150 say so).
        let odd = |width: u64| !(width * dtype.size()).is_multiple_of(TENSOR_CORE_BYTES);
        let without = OF_HEADS.contains(&curve)
            && matches!(work.class, WorkClass::Gemm { n, k, .. } if odd(n) || odd(k))
            && self.gpu.peak.contains_key("f32");
        let dtype = if without { Dtype::F32 } else { dtype };
        let found = self.time(&Work { bytes: (work.bytes as f64 * passes) as u64, ..*work }, dtype);
        let narrow = matches!(work.class, WorkClass::Gemm { cast, .. } if cast > 0);
        let times = self.slower.get(curve).copied().filter(|_| !narrow).unwrap_or(1.0);
        Estimate { seconds: found.seconds * times, ..found }
    }

    fn time(&self, work: &Work, dtype: Dtype) -> Estimate {
        // Operands are rounded by a kernel of its own, before the product.
        let cast = if let WorkClass::Gemm { cast, .. } = work.class { cast } else { 0 };
        let (part, sm_bound) = match work.class {
            WorkClass::Gemm { m, n, k, result, groups, .. } => {
                let (part, sm_bound) = self.gemm([m, n, k], [work.bytes - cast, result], dtype, cast > 0);
                (self.one_by_one(part, groups), sm_bound)
            }
            WorkClass::Attention { .. } => {
                let (memory, compute) = (self.memory(work.bytes), self.attention(work, dtype));
                if compute.seconds > memory.seconds { (compute, true) } else { (memory, false) }
            }
            WorkClass::Scan => {
                let moved = self.memory(work.bytes);
                let memory = Part { seconds: moved.seconds * (1.0 / self.scan), ..moved };
                let products = self.products(work.flops, dtype);
                if products.seconds > memory.seconds { (products, true) } else { (memory, false) }
            }
            WorkClass::Memory => (self.memory(work.bytes), false),
        };
        let gaps = self.gpu.launch.value * self.kernels;
        let seconds = part.seconds + self.memory(cast).seconds * self.cast + gaps;
        // The launch counts only where it is a good part of the whole.
        let launch = if gaps / seconds > 0.1 { worst([&self.gpu.launch.provenance]) } else { Provenance::Measured };
        Estimate { seconds, sm_bound, provenance: part.provenance.max(launch), rel_sd: part.rel_sd }
    }
}

/// Efficiency of heads narrower than any measured. A score takes its products, in proportion to the head dim, and its
/// part of the softmax, which knows nothing of it: a line through the two narrowest that were measured.
fn narrow(points: &[(u64, f64)], head_dim: u64) -> f64 {
    let time = |(dim, ceiling): (u64, f64)| dim as f64 / ceiling;
    let (first, d) = (points[0], head_dim as f64);
    let Some(&second) = points.get(1) else { return first.1 * d / first.0 as f64 };
    let slope = (time(second) - time(first)) / (second.0 - first.0) as f64;
    let score = time(first) - slope * (first.0 as f64 - d);
    (d / score.max(time(first) * d / first.0 as f64)).min(first.1)
}

/// Efficiency at a head dim, and whether it lies among those that were measured.
fn ceiling_at(curve: &PassCurve, head_dim: u64) -> (f64, bool) {
    let points = &curve.ceiling.value;
    let (first, last) = (points[0], points[points.len() - 1]);
    match points.iter().position(|(dim, _)| *dim >= head_dim) {
        Some(0) => (narrow(points, head_dim), head_dim == first.0),
        Some(i) => {
            let ((d0, e0), (d1, e1)) = (points[i - 1], points[i]);
            let at = (head_dim - d0) as f64 / (d1 - d0) as f64;
            (e0 + at * (e1 - e0), head_dim == d1)
        }
        None => (last.1, false),
    }
}

/// A formula is as good as its worst number. None of them is a measurement of the op itself.
fn worst<const N: usize>(origins: [&Origin; N]) -> Provenance {
    match origins.into_iter().max() {
        Some(Origin::Assumed) => Provenance::Assumed,
        _ => Provenance::Interpolated,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Kernel;

    fn roofline(gpu: &str, stack: &str) -> Roofline {
        Roofline::new(&GpuSpec::find(gpu).unwrap(), &StackSpec::find(stack).unwrap()).unwrap()
    }

    fn gemm(m: u64, n: u64, k: u64) -> Work {
        Work {
            flops: 2 * m * n * k,
            bytes: 2 * (m * k + k * n + m * n),
            class: WorkClass::Gemm { m, n, k, cast: 0, result: 2, groups: 1 },
        }
    }

    fn attention(q_rows: u64, kv_rows: u64, area: u64, backward: bool) -> Work {
        let products = if backward { 5 } else { 2 };
        let class = WorkClass::Attention { q_rows, kv_rows, area, batch_heads: 32, head_dim: 128, backward };
        Work { flops: 2 * products * area * 32 * 128, bytes: 2 * 128 * 32 * (2 * q_rows + 2 * kv_rows), class }
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
        let class = WorkClass::Gemm { m, n, k, cast: 0, result: 2, groups: 16 };
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
            (own.seconds / usual.seconds, usual.sm_bound, own.sm_bound)
        };
        let product = |cast, result| {
            let (m, n, k) = (32768, 4096, 7168);
            let bytes = m * k + k * n + m * n * result + cast;
            let class = WorkClass::Gemm { m, n, k, cast, result, groups: 4 };
            Work { flops: 2 * m * n * k, bytes, class }
        };
        let (slower, before, behind) = ratio(&product(0, 2));
        assert!((slower - 132.0 / 112.0).abs() < 1e-3 && before && !behind, "{slower}");
        assert!((ratio(&product(1, 8)).0 - 132.0 / 112.0 * 1.27).abs() < 2e-3, "rounding takes no time to speak of");
        assert!((ratio(&product(1, 4)).0 - 132.0 / 112.0).abs() < 1e-3);
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
            let class = WorkClass::Gemm { m: 32768, n: 1536, k: 2048, cast: 0, result: 2, groups };
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

    /// 12.6 million tokens a second at 8192 of them, 10.8 at 262144 (github pull request vllm-project/vllm#27299).
    #[test]
    fn a_scan_takes_what_was_measured() {
        let mamba = crate::spec::MambaSpec { heads: 128, head_dim: 64, groups: 1, state: 128, conv: 4, chunk: 256 };
        let r = roofline("h100-sxm5", "nccl-fa3");
        let rate = |seq: u64| {
            let op = crate::plan::kernel::SsmOp::Scan;
            let kernel = Kernel::Ssm(crate::plan::kernel::SsmKernel { batch: 1, seq, mamba, op });
            let [cols, proj, inner] = [mamba.conv_cols(), mamba.proj_cols(), mamba.inner()].map(|n| 2 * n * seq);
            let work = kernel.work(&[], 0, &[cols, proj, 6 * 128], &[inner]).unwrap();
            seq as f64 / r.time(&work, Dtype::Bf16).seconds.value()
        };
        for (seq, measured) in [(8192, 12.62e6), (16384, 12.92e6), (65536, 11.07e6), (262144, 10.82e6)] {
            let ratio = rate(seq) / measured;
            assert!((ratio - 1.0).abs() < 0.15, "{seq}: {ratio}");
        }
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
                head_dim: 128,
                backward: false,
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
            let work = Work { flops: 0, bytes: 1 << 30, class: WorkClass::Scan };
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
        assert!(!e.sm_bound && e.seconds > Bytes::new((1u64 << 30) as f64) / r.gpu.memory_bandwidth.value);
        let e = r.time(&gemm(1, 4096, 4096), Dtype::Bf16);
        assert!(e.seconds >= r.gpu.launch.value && !e.sm_bound && e.provenance == Provenance::Interpolated);
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
}
