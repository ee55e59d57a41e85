//! How long a kernel takes: a roofline whose roof depends on the shape.
//!
//! t = max(flops / (peak * efficiency(shape)), bytes / (bandwidth * fraction)) + launch

pub mod clocks;
pub mod curve;
pub mod gemm;
mod grouped;
pub mod measured;
mod sparse;
pub mod speed;
#[cfg(test)]
mod tests;

use crate::error::{Cause, Error, Result};
use crate::plan::kernel::Family;
use crate::plan::{ALIGNMENT, Dtype, Pairs, Work, WorkClass};
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
    pub on_sms: OnSms,
    pub provenance: Provenance,
    /// Relative standard deviation.
    pub rel_sd: f64,
}

/// What of a kernel's time hangs on the SMs that it has. It lasts until they have computed, and as long as memory takes at
/// the least; launches, and kernels that round its operands, come on top.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OnSms {
    /// Shares of the time alone: in which SMs compute, and on top.
    pub computes: f32,
    pub on_top: f32,
}

impl OnSms {
    /// Memory alone decides.
    pub const NONE: OnSms = OnSms { computes: 0.0, on_top: 0.0 };

    /// Whether the kernel would take longer with any SM less: memory does not take longer than they.
    pub fn decide(self) -> bool {
        self.computes > 0.0 && self.computes + self.on_top > 1.0 - 1e-6
    }

    /// How long a kernel lasts that takes `alone` with all SMs, where so much computing takes as long as `stretched` says.
    #[inline]
    pub fn lasts(self, alone: u64, stretched: impl FnOnce(u64) -> u64) -> u64 {
        if self.computes == 0.0 {
            return alone;
        }
        let part = |share: f32| (alone as f64 * f64::from(share)) as u64;
        let work = part(self.computes);
        match stretched(work) {
            // Shares are rounded.
            takes if takes <= work => alone,
            takes => alone.max(takes + part(self.on_top)),
        }
    }
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

/// The lengths that the attention curves were fitted on; beyond them they are extrapolated.
const CALIBRATED_ROWS: std::ops::RangeInclusive<u64> = 512..=131072;

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
    /// The largest head dim of its attention.
    widest_head: Option<u64>,
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
        stack.check_maker(&stack.name, gpu)?;
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
            widest_head: stack.widest_head.as_ref().map(|widest| widest.value),
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
                "stack {} runs `{kernel}`, which {} has no curve for (it has {}); choose another stack, or add a curve",
                stack.name,
                gpu.name,
                if known.is_empty() { "none".into() } else { known.join(", ") }
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
        let name = dtype.name();
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
            let why = format!("{} has no peak for it; leave out the option fp8, or use another GPU", self.gpu.name);
            return Err(Cause::Fp8.infeasible(why));
        };
        Ok(peak.value / self.peak(dtype)?)
    }

    /// Whether GPU and stack have kernels for what the options ask for, with such heads. Check it before asking for times.
    pub fn runs(&self, options: Options, dtype: Dtype, head_dim: u64) -> Result<()> {
        if let Some(widest) = self.widest_head.filter(|&widest| head_dim > widest && !options.unfused) {
            let why = format!(
                "{head_dim} is more than the {widest} that attention of stack {} is written for; \
                 add the option unfused, with a ring of 1, or use another stack",
                self.stack
            );
            return Err(Cause::HeadDim.infeasible(why));
        }
        if self.attention.is_none() && !options.unfused {
            let why = format!(
                "stack {} has no fused kernel for it; add the option unfused, with a ring of 1, or use another stack",
                self.stack
            );
            return Err(Cause::Attention.infeasible(why));
        }
        if options.fp8 { self.fp8(dtype).map(drop) } else { Ok(()) }
    }

    /// Time at a rate of peak * ceiling, had the kernel `flops` to do.
    fn at_rate(&self, flops: f64, dtype: Dtype, ceiling: f64) -> Seconds {
        let peak = self.peak(dtype).expect("the dtypes of a plan are checked before it is timed");
        Flops::new(flops) / (peak * ceiling)
    }

    /// The best tiling, or the memory if that takes longer; and what SMs compute of that. Rounding of operands is not in it.
    ///
    /// Panics if `work` is not of a product.
    fn gemm(&self, work: &Work, dtype: Dtype) -> (Part, Seconds) {
        let WorkClass::Gemm { m, n, k, cast, result, unaligned, of_weights, .. } = work.class else {
            unreachable!("asked for products only")
        };
        let fp8 = cast > 0;
        let curve = &self.gpu.gemm;
        let (name, element) = if fp8 { ("fp8", 1) } else { (dtype.name(), dtype.size()) };
        let ceiling = curve.ceiling_of(name);
        let faster = if fp8 { self.fp8(dtype).expect("whoever asks for fp8 checks it") } else { 1.0 };
        let peak = self.peak(dtype).expect("the dtypes of a plan are checked before it is timed") * faster;
        let tiled = gemm::time(
            &self.gpu,
            gemm::Product { m, n, k, element, result },
            peak * ceiling.value * curve.sustained_of(name),
        );
        let tiled = tiled * curve.unaligned.as_ref().filter(|_| unaligned).map_or(1.0, |part| 1.0 / part.value);
        let of_weights = if fp8 && of_weights { self.weight_grad_fp8 } else { 1.0 };
        let tiled = tiled * (self.kept * of_weights);
        let streamed = Bytes::new((work.bytes - cast) as f64) / (self.gpu.memory_bandwidth.value * curve.stream.value);
        let provenance = worst([&ceiling.provenance, &curve.operands.provenance, &curve.stream.provenance]);
        let part = Part { seconds: tiled.max(streamed), provenance, rel_sd: curve.rel_sd.value };
        // Nothing more is lost to those whose SMs products are kept off.
        (part, if self.kept == 1.0 { tiled } else { Seconds::ZERO })
    }

    /// What starting so many products takes beyond one, where each has kernels of its own.
    fn starts_of(&self, groups: u64) -> Seconds {
        self.group_start.as_ref().map_or(Seconds::ZERO, |start| start.value * groups.saturating_sub(1) as f64)
    }

    /// A product of so many groups of rows.
    fn one_by_one(&self, whole: Part, groups: u64) -> Part {
        let Some(start) = self.group_start.as_ref().filter(|_| groups > 1) else { return whole };
        Part {
            seconds: whole.seconds + self.starts_of(groups),
            provenance: whole.provenance.max(worst([&start.provenance])),
            rel_sd: whole.rel_sd,
        }
    }

    fn attention(&self, work: &Work, dtype: Dtype) -> Part {
        let WorkClass::Attention { q_rows, kv_rows, area, batch_heads, dims, backward, pairs } = work.class else {
            unreachable!("asked for attention only")
        };
        match pairs {
            Pairs::Chosen => return self.to_chosen_keys(work.flops, dtype, backward),
            Pairs::Scored { fp8, moved } => return self.scores_of_keys(work.flops, dtype, fp8, moved),
            Pairs::Masked => {}
        }
        let kernel = self.attention.as_ref().expect("whoever asks for fused attention checks that there is one");
        // Forward, a thread block owns query rows and walks keys; backward it is the reverse.
        let (curve, rows) = if backward { (&kernel.backward, kv_rows) } else { (&kernel.forward, q_rows) };
        let (area, rectangle) = (area as f64, q_rows as f64 * kv_rows as f64);
        let masked = if area < rectangle { curve.diagonal.value * q_rows.min(kv_rows) as f64 } else { 0.0 };
        let walk = (area + masked).min(rectangle) / rows as f64 + curve.half.value;
        // As for a product: tiles are whole, and so are waves; of unequal tiles the last wave is half empty.
        let tiles = batch_heads * rows.div_ceil(kernel.tile_rows);
        let [d, v] = dims.map(|dim| kernel.written_for(dim));
        // Curves were measured with values as wide as keys: the width between the two stands for both.
        let (head_dim, wider) = (d.midpoint(v), (d + v) as f64 / dims.iter().sum::<u64>().max(1) as f64);
        let held = curve.resident.iter().flat_map(|r| &r.value).find(|(widest, _)| head_dim <= *widest);
        let at_once = u64::from(self.gpu.sms.value) * held.map_or(1, |(_, blocks)| *blocks);
        let unequal = held.is_some() && area < rectangle;
        let slots = if unequal { tiles + at_once } else { self.in_waves(tiles, at_once) } * kernel.tile_rows;
        let walked = walk * slots as f64 / batch_heads as f64;
        let (ceiling, dim_known) = ceiling_at(curve, head_dim);
        let left = |part: &Option<Sourced<f64>>| part.as_ref().map_or(1.0, |part| part.value);
        let ceiling = ceiling * left(&curve.sustained) * if area < rectangle { left(&curve.masked) } else { 1.0 };
        let known = dim_known && CALIBRATED_ROWS.contains(&q_rows) && CALIBRATED_ROWS.contains(&kv_rows);
        let fitted = worst([&curve.ceiling.provenance, &curve.half.provenance, &curve.diagonal.provenance]);
        let beyond = if known { Provenance::Interpolated } else { Provenance::Extrapolated };
        Part {
            seconds: self.at_rate(work.flops as f64 * wider * walked / area, dtype, ceiling),
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
        let ceiling = self.gpu.gemm.ceiling_of(dtype.name());
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
        let odd = |width: u64| !(width * dtype.size()).is_multiple_of(ALIGNMENT);
        let without = Family::of(curve) == Family::HeadProduct
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
        let (part, computes) = match work.class {
            WorkClass::Gemm { groups, .. } => {
                let (part, computes) = self.gemm(work, dtype);
                (self.one_by_one(part, groups), computes)
            }
            WorkClass::Attention { .. } => {
                let (memory, compute) = (self.memory(work.bytes), self.attention(work, dtype));
                slower(compute, memory)
            }
            WorkClass::Scan { states } => {
                let (moved, states) = (self.memory(work.bytes.saturating_sub(states)), self.memory(states));
                let memory = Part { seconds: moved.seconds * (1.0 / self.scan) + states.seconds, ..moved };
                let products = self.products(work.flops, dtype);
                slower(products, memory)
            }
            WorkClass::Memory => (self.memory(work.bytes), Seconds::ZERO),
        };
        let streams = match work.class {
            WorkClass::Gemm { groups, .. } => part.seconds - self.starts_of(groups),
            _ => part.seconds,
        };
        let gaps = self.gpu.launch.value * self.kernels;
        let seconds = part.seconds + self.memory(cast).seconds * self.cast + gaps;
        // The launch counts only where it is a good part of the whole.
        let launch = if gaps / seconds > 0.1 { worst([&self.gpu.launch.provenance]) } else { Provenance::Measured };
        let share = |part: Seconds| (part / seconds) as f32;
        let on_sms = match computes > Seconds::ZERO {
            true => OnSms { computes: share(computes), on_top: share(seconds - streams) },
            false => OnSms::NONE,
        };
        Estimate { seconds, on_sms, provenance: part.provenance.max(launch), rel_sd: part.rel_sd }
    }
}

/// Whichever takes longer, and what SMs compute of it.
fn slower(compute: Part, memory: Part) -> (Part, Seconds) {
    let computes = compute.seconds;
    (if computes > memory.seconds { compute } else { memory }, computes)
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
