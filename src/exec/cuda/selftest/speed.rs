//! How fast the kernels are that decide a step: attention, products, what memory bounds, copies.

use super::super::device::Size;
use super::super::device::{Device, EventId, StreamId};
use super::super::lower::{Launch, Where, beside, lower};
use super::super::prepare::{Ready, Spans, Tables, resolve};
use super::super::run::random_bf16;
use super::hand_over;
use crate::error::Result;
use crate::plan::kernel::Operands;
use crate::plan::memory::ALIGN;
use crate::plan::{AttnBlock, Axis, Dtype, Kernel, Mesh, Segs, Split};
use crate::spec::{Factor, Mask};
use serde::Serialize;

/// A kernel whose time is wanted.
#[derive(Debug, Clone)]
pub struct Timed {
    pub name: String,
    pub kernel: Kernel,
    pub reads: Vec<Dtype>,
    pub writes: Vec<Dtype>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Speed {
    pub name: String,
    /// Median seconds of the launches, and half the distance between their quartiles.
    pub seconds: f64,
    pub spread: f64,
    /// Median seconds where other data went through the GPU's cache before each launch.
    pub cold_seconds: f64,
    /// FLOPs as the plan counts them, a second: causal attention at half of the square.
    pub flops_per_s: f64,
    /// Bytes a second, each operand being read or written once.
    pub bytes_per_s: f64,
}

fn attention(seq: u64, heads: u64, kv_heads: u64, head_dim: u64, causal: bool) -> AttnBlock {
    let q = Segs::new(seq, &[(Axis::Cp, Split::Contiguous)]);
    AttnBlock {
        kv: q.clone(),
        q,
        batch: 1,
        heads,
        kv_heads,
        head_dim,
        v_dim: None,
        mask: Mask::new(causal),
        factor: Factor::ONE,
    }
}

/// The kernels that are timed: those of layers of Llama 3 8B at 16K tokens, and attention at other lengths.
pub fn all() -> Vec<Timed> {
    let (bf16, f32) = (Dtype::Bf16, Dtype::F32);
    let timed = |name: &str, kernel, reads: &[Dtype], writes: &[Dtype]| Timed {
        name: name.into(),
        kernel,
        reads: reads.to_vec(),
        writes: writes.to_vec(),
    };
    let mut all = vec![];
    for (seq, head_dim, causal) in
        [(16384, 128, true), (16384, 128, false), (4096, 128, true), (32768, 128, true), (16384, 64, true)]
    {
        let heads = 4096 / head_dim;
        let block = attention(seq, heads, heads / 4, head_dim, causal);
        let what = format!("{} {seq} d{head_dim}", if causal { "causal" } else { "full" });
        let name = format!("attention forward {what}");
        all.push(timed(&name, Kernel::Attention(block.clone()), &[bf16; 2], &[bf16, f32]));
        let reads = [bf16, bf16, bf16, f32, f32];
        let name = format!("attention backward {what}");
        all.push(timed(&name, Kernel::AttentionBwd(block), &reads, &[f32, f32]));
    }
    let product =
        |m, n, k| Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8: false, bias: false };
    for (m, n, k) in
        [(8192, 8192, 8192), (16384, 6144, 4096), (16384, 28672, 4096), (16384, 4096, 14336), (256, 4096, 4096)]
    {
        all.push(timed(&format!("product {m} x {n} x {k}"), product(m, n, k), &[bf16; 2], &[bf16]));
    }
    let (rows, cols) = (16384, 4096);
    all.push(timed("norm", Kernel::Norm { rows, cols, eps: 1e-5 }, &[bf16; 2], &[bf16]));
    all.push(timed(
        "norm backward",
        Kernel::NormBwd { rows, cols, eps: 1e-5 },
        &[bf16, bf16, bf16, bf16, f32],
        &[bf16, f32],
    ));
    all.push(timed("swiglu", Kernel::SwiGlu { rows, cols: 14336 }, &[bf16], &[bf16]));
    all.push(timed("swiglu backward", Kernel::SwiGluBwd { rows, cols: 14336 }, &[bf16; 2], &[bf16]));
    all.push(timed("add", Kernel::Add { elems: rows * cols, trim: None }, &[bf16; 2], &[bf16]));
    let adam = Kernel::Adam { elems: 1 << 28, lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    all.push(timed("adam", adam, &[f32; 4], &[f32, f32, f32, bf16]));
    all.push(timed(
        "cross_entropy",
        Kernel::CrossEntropy { rows: 4096, vocab: 128256, scale: 1e-4 },
        &[bf16, Dtype::U32, f32],
        &[bf16, f32],
    ));
    let (rows, vocab) = (4096, 128256);
    all.push(timed("log_softmax", Kernel::LogSoftmax { rows, vocab }, &[f32], &[f32]));
    all.push(timed("nll", Kernel::Nll { rows, vocab, scale: 1e-4 }, &[f32, Dtype::U32, f32], &[f32, f32]));
    all.push(timed("log_softmax backward", Kernel::LogSoftmaxBwd { rows, vocab }, &[f32; 2], &[f32]));
    all
}

const WARM_UP: usize = 3;

/// A kernel on random numbers, ready to be launched.
struct Loaded {
    ready: Vec<Ready>,
    flops: u64,
    bytes: u64,
}

fn load<D: Device>(device: &mut D, timed: &Timed) -> Result<Loaded> {
    let views = [Mesh::new(&[(Axis::Cp, 1)])];
    let Operands { reads, mut writes } = timed.kernel.operands(&views);
    writes.resize(timed.writes.len(), writes[0]);
    let fused = device.fused();
    let on = Where { views: &views, route: None, rank: 0, shared: device.shared(0), fused: fused.as_deref() };
    let lowered = lower(&timed.kernel, on, &timed.reads, &timed.writes, 1)?;
    let mut place = |n: u64, dtype: Dtype| -> Result<(u64, u64)> {
        let at = device.allocate(0, n * dtype.size())?;
        let mut block = match dtype {
            // Ids below any vocabulary.
            Dtype::U32 => vec![0; (n * 4) as usize],
            _ => random_bf16((n * dtype.size() / 2).min(1 << 22), n),
        };
        // No optimizer has the root of a negative number to take, which is slow.
        if matches!(timed.kernel, Kernel::Adam { .. }) {
            block.iter_mut().skip(1).step_by(2).for_each(|high| *high &= 0x7f);
        }
        for skip in (0..n * dtype.size()).step_by(block.len().max(1)) {
            let left = (n * dtype.size() - skip).min(block.len() as u64);
            device.write(0, at + skip, &block[..left as usize])?;
        }
        Ok((at, n * dtype.size()))
    };
    let reads: Vec<(u64, u64)> = reads.iter().zip(&timed.reads).map(|(&n, &d)| place(n, d)).collect::<Result<_>>()?;
    let writes: Vec<(u64, u64)> =
        writes.iter().zip(&timed.writes).map(|(&n, &d)| place(n, d)).collect::<Result<_>>()?;
    let bytes = reads.iter().chain(&writes).map(|r| r.1).sum::<u64>();
    let [in_bytes, out_bytes] = [&reads, &writes].map(|all| all.iter().map(|r| r.1).collect::<Vec<_>>());
    let flops = timed.kernel.work(&views, 0, &in_bytes, &out_bytes).map_or(0, |work| work.flops);
    let scratch = device.allocate(0, lowered.scratch.iter().map(|n| n.next_multiple_of(ALIGN)).sum())?;
    let room = 16 << 20;
    let mut tables = Tables::new(device.allocate(0, room)?, room);
    let ready = resolve(device, 0, &mut tables, &lowered, &Spans { reads, writes, scratch })?;
    Ok(Loaded { ready, flops, bytes })
}

/// Times one kernel, on random numbers, `times` launches.
pub fn time<D: Device>(device: &mut D, timed: &Timed, times: usize) -> Result<Speed> {
    let loaded = load(device, timed)?;
    let (seconds, spread) = median(device, &loaded.ready, times)?;
    let cold = cold(device, &loaded.ready, times)?;
    Ok(Speed { cold_seconds: cold.0, ..loaded.speed(timed, seconds, spread) })
}

/// The means by which a copy runs beside a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copier {
    /// The driver's copy inside of a GPU's memory, whatever it is done with.
    Driver,
    /// A kernel of this number of blocks of threads, which is the number of channels that NCCL has.
    Blocks(u32),
}

impl Copier {
    fn ready<D: Device>(self, device: &mut D, [from, to]: [u64; 2]) -> Result<Ready> {
        match self {
            Copier::Driver => Ok(Ready::Copy { to, from, bytes: COPIED }),
            Copier::Blocks(blocks) => {
                let launch = beside::few_copy(blocks, COPIED);
                let function = device.load(0, &launch)?;
                let Launch { grid, threads, shared, .. } = launch;
                Ok(Ready::Launch { function, size: Size { grid, threads, shared }, words: vec![from, to, COPIED] })
            }
        }
    }
}

/// Times a kernel as [`time`] does, while another stream copies all the time.
pub fn beside_copies<D: Device>(device: &mut D, timed: &Timed, by: Copier, times: usize) -> Result<Speed> {
    let loaded = load(device, timed)?;
    let [from, to] = [device.allocate(0, COPIED)?, device.allocate(0, COPIED)?];
    let (alone, _) = median(device, &loaded.ready, 3)?;
    let copying = by.ready(device, [from, to])?;
    let (copy, _) = median(device, std::slice::from_ref(&copying), 3)?;
    let busy = device.stream(0)?;
    // Copies for as long as all launches take, and half as long again.
    let copies = (1.5 * alone * (times + WARM_UP) as f64 / copy.max(1e-9)).ceil().min(1e5) as usize + 1;
    for _ in 0..copies {
        hand_over(device, busy, &copying)?;
    }
    let (seconds, spread) = median(device, &loaded.ready, times)?;
    Ok(loaded.speed(timed, seconds, spread))
}

const COPIED: u64 = 256 << 20;

/// Seconds of `count` launches one after the other, with nothing between them.
pub fn together<D: Device>(device: &mut D, timed: &Timed, count: usize) -> Result<f64> {
    let loaded = load(device, timed)?;
    let many: Vec<Ready> = (0..count).flat_map(|_| loaded.ready.clone()).collect();
    Ok(median(device, &many, 5)?.0)
}

/// A kernel that is launched again and again.
pub struct Again {
    loaded: Loaded,
    stream: StreamId,
    /// The events before and after each group of launches.
    events: Vec<EventId>,
    group: usize,
}

impl Again {
    /// A kernel in batches of about `batch_s` seconds, timed in groups of at least `group_s`.
    pub fn new<D: Device>(device: &mut D, timed: &Timed, batch_s: f64, group_s: f64) -> Result<Again> {
        let loaded = load(device, timed)?;
        let one = median(device, &loaded.ready, 3)?.0.max(1e-7);
        let group = (group_s / one).ceil().max(1.0) as usize;
        let groups = (batch_s / (one * group as f64)).ceil().max(1.0) as usize;
        let events = (0..=groups).map(|_| device.event(0)).collect::<Result<_>>()?;
        Ok(Again { loaded, stream: device.stream(0)?, events, group })
    }

    /// FLOPs and bytes of a launch, as [`Speed`] counts them.
    pub fn work(&self) -> [u64; 2] {
        [self.loaded.flops, self.loaded.bytes]
    }

    /// The number of launches of a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Seconds of a launch in each group of another batch; `meanwhile` is done while the GPU is at it.
    pub fn batch<D: Device>(&mut self, device: &mut D, meanwhile: impl FnOnce(&mut D)) -> Result<Vec<f64>> {
        for (i, &event) in self.events.iter().enumerate() {
            for _ in 0..if i > 0 { self.group } else { 0 } {
                self.loaded.ready.iter().try_for_each(|one| hand_over(device, self.stream, one))?;
            }
            device.record(self.stream, event)?;
        }
        meanwhile(device);
        device.synchronize()?;
        let each = |pair: &[EventId]| device.seconds(pair[0], pair[1]).map(|all| all / self.group as f64);
        self.events.windows(2).map(each).collect()
    }
}

impl Loaded {
    fn speed(&self, timed: &Timed, seconds: f64, spread: f64) -> Speed {
        let name = timed.name.clone();
        let [flops_per_s, bytes_per_s] = [self.flops, self.bytes].map(|x| x as f64 / seconds);
        Speed { name, seconds, spread, cold_seconds: seconds, flops_per_s, bytes_per_s }
    }
}

/// Median seconds of launches, after some that warm up, and the spread of those that count.
pub fn median<D: Device>(device: &mut D, ready: &[Ready], times: usize) -> Result<(f64, f64)> {
    median_after(device, &[], ready, times)
}

/// Median seconds and spread where nothing of the operands is in the GPU's cache.
pub fn cold<D: Device>(device: &mut D, ready: &[Ready], times: usize) -> Result<(f64, f64)> {
    let bytes = 2 * device.cache(0);
    let [from, to] = [device.allocate(0, bytes)?, device.allocate(0, bytes)?];
    median_after(device, &[Ready::Copy { to, from, bytes }], ready, times)
}

/// Median seconds and spread of launches with `before` ahead of each, which is not counted.
fn median_after<D: Device>(device: &mut D, before: &[Ready], ready: &[Ready], times: usize) -> Result<(f64, f64)> {
    let stream = device.stream(0)?;
    let mut events: Vec<[EventId; 2]> = vec![];
    for _ in 0..times + WARM_UP {
        before.iter().try_for_each(|one| hand_over(device, stream, one))?;
        let around = [device.event(0)?, device.event(0)?];
        device.record(stream, around[0])?;
        ready.iter().try_for_each(|one| hand_over(device, stream, one))?;
        device.record(stream, around[1])?;
        events.push(around);
    }
    device.synchronize()?;
    let counted = events[WARM_UP..].iter();
    let mut seconds = counted.map(|&[from, to]| device.seconds(from, to)).collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    let at = |q: f64| seconds[((seconds.len() - 1) as f64 * q).round() as usize];
    Ok((at(0.5), (at(0.75) - at(0.25)) / 2.0))
}

pub fn copy_name(bytes: u64) -> String {
    format!("copy of {bytes} bytes")
}

/// Times a copy inside of a GPU's memory, of bytes that are not in its cache: a message was written long before it is
/// sent.
pub fn copy<D: Device>(device: &mut D, bytes: u64, times: usize) -> Result<Speed> {
    let [from, to] = [device.allocate(0, bytes)?, device.allocate(0, bytes)?];
    let (seconds, spread) = cold(device, &[Ready::Copy { to, from, bytes }], times)?;
    let name = copy_name(bytes);
    let bytes_per_s = 2.0 * bytes as f64 / seconds;
    Ok(Speed { name, seconds, spread, cold_seconds: seconds, flops_per_s: 0.0, bytes_per_s })
}
