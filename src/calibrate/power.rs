//! Kernels again and again without rest: the power that each draws, and how much longer it takes for it when the GPU's limit
//! holds its clocks down, from the first milliseconds on.

use super::Effort;
use crate::device::clocks::KINDS;
use crate::device::measured::{Power, Pressed};
use crate::error::Result;
use crate::exec::cuda::device::Device;
use crate::exec::cuda::selftest::speed::{self, Timed};
use crate::plan::{Dtype, Kernel};
use std::time::{Duration, Instant};

/// Those that are timed of each of [`KINDS`], by how their names begin.
const KERNELS: [&str; 4] =
    ["product 8192", "attention forward causal 16384 d128", "attention backward causal 16384 d128", "norm"];

struct Long {
    rest: Duration,
    /// How long each is repeated, and the part of it at the end by which power is told: the driver's counter of energy is a few
    /// tens of milliseconds behind.
    load: Duration,
    told: Duration,
    /// What is handed over at once.
    batch_s: f64,
    /// A kernel's time is told of groups of at least so long.
    group_s: f64,
}

const LONG: Long = Long {
    rest: Duration::from_millis(1000),
    load: Duration::from_millis(2500),
    told: Duration::from_millis(1500),
    batch_s: 0.04,
    group_s: 2e-3,
};
const LONG_IF_TINY: Long =
    Long { rest: Duration::from_millis(1), load: Duration::ZERO, told: Duration::ZERO, batch_s: 0.0, group_s: 0.0 };
/// Ends of what the beginning is told by.
const BINS_S: [f64; 14] = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5];

/// None where nobody says what energy the GPU has taken.
pub fn power<D: Device>(device: &mut D, effort: Effort) -> Result<Option<Power>> {
    let long = if effort.tiny { LONG_IF_TINY } else { LONG };
    let begun = Instant::now();
    let Some(before) = device.energy(0) else { return Ok(None) };
    std::thread::sleep(long.rest);
    let idle_w = (device.energy(0).unwrap_or(before) - before) / begun.elapsed().as_secs_f64();
    let all = if effort.tiny { vec![tiny()] } else { speed::all() };
    let mut pressed = vec![];
    for (kind, name) in KINDS.into_iter().zip(KERNELS) {
        let Some(timed) = all.iter().find(|t| t.name.starts_with(name)) else { continue };
        // Cool, as at the start of a step behind a rest.
        std::thread::sleep(long.rest);
        pressed.extend(press(device, kind, timed, &long)?);
        device.clear()?;
    }
    Ok(Some(Power { limit_w: device.power_limit(0), idle_w, pressed }).filter(|power| power.idle_w > 0.0))
}

/// What stands for all kernels where nothing is to take long.
fn tiny() -> Timed {
    let kernel = Kernel::Norm { rows: 16, cols: 64, eps: 1e-5 };
    Timed { name: "norm".into(), kernel, reads: vec![Dtype::Bf16; 2], writes: vec![Dtype::Bf16] }
}

/// None where the counter of energy stood still meanwhile.
fn press<D: Device>(device: &mut D, kind: &str, timed: &Timed, long: &Long) -> Result<Option<Pressed>> {
    let mut again = speed::Again::new(device, timed, long.batch_s, long.group_s)?;
    let (begun, mut told, mut times, mut says) = (Instant::now(), None, vec![], None);
    let watts = loop {
        let at = begun.elapsed();
        if told.is_none() && at + long.told >= long.load {
            told = device.energy(0).map(|joules| (at, joules));
        }
        let mut end = at.as_secs_f64();
        for seconds in again.batch(device, |device| says = device.conditions(0))? {
            end += seconds * again.group() as f64;
            times.push((end, seconds));
        }
        let now = begun.elapsed();
        if now < long.load {
            continue;
        }
        break match (told, device.energy(0)) {
            (Some((from, joules)), Some(all)) => (all - joules) / (now - from).as_secs_f64(),
            _ => f64::NAN,
        };
    };
    let mut ramp = vec![];
    let mut from = 0.0;
    for to in BINS_S {
        let mut within: Vec<f64> = times.iter().filter(|t| t.0 > from && t.0 <= to).map(|t| t.1).collect();
        within.sort_by(f64::total_cmp);
        if let Some(&median) = within.get(within.len() / 2) {
            ramp.push([to, median]);
        }
        from = to;
    }
    let [flops, bytes] = again.work();
    let work = if kind == "memory" { bytes } else { flops };
    let rate = ramp.first().map(|[_, seconds]| work as f64 / seconds);
    let pressed = Pressed { what: kind.into(), kernel: timed.name.clone(), watts, rate, ramp, says };
    Ok(Some(pressed).filter(|pressed| pressed.watts > 0.0))
}
