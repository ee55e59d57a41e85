//! Kernels again and again without rest: the power that each draws, and how much longer it takes for it when the GPU's limit
//! holds its clocks down, from the first milliseconds on.

use super::Effort;
use crate::device::measured::{Power, Pressed};
use crate::error::Result;
use crate::exec::cuda::device::Device;
use crate::exec::cuda::selftest::speed::{self, Timed};
use std::time::{Duration, Instant};

/// By what holds them up: products, attention both ways, memory.
const KINDS: [(&str, &str); 4] = [
    ("matmul", "product 8192"),
    ("attention", "attention forward causal 16384 d128"),
    ("attention_bwd", "attention backward causal 16384 d128"),
    ("memory", "norm"),
];

/// How long each is repeated, and the part of it at the end by which power is told: the driver's counter of energy is a few
/// tens of milliseconds behind.
const LOAD: Duration = Duration::from_millis(2500);
const TOLD: Duration = Duration::from_millis(1500);
/// What is handed over at once.
const BATCH_S: f64 = 0.04;
/// A kernel's time is told of groups of at least so long.
const GROUP_S: f64 = 2e-3;
/// Ends of what the beginning is told by.
const BINS_S: [f64; 14] = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5];

/// None where nobody says what energy the GPU has taken.
pub fn power<D: Device>(device: &mut D, effort: Effort) -> Result<Option<Power>> {
    let tiny = effort.tiny;
    let idle_w = match device.energy(0) {
        Some(from) => {
            let rest = if tiny { Duration::from_millis(1) } else { Duration::from_millis(1500) };
            std::thread::sleep(rest);
            (device.energy(0).unwrap_or(from) - from) / rest.as_secs_f64()
        }
        None => return Ok(None),
    };
    let kinds = if tiny { &KINDS[3..] } else { &KINDS[..] };
    let mut pressed = vec![];
    for (kind, name) in kinds {
        let all = speed::all();
        let timed = all.iter().find(|t| t.name.starts_with(name)).expect("among those that are timed");
        let load = if tiny { Duration::ZERO } else { LOAD };
        // Cool, as at the start of a step behind a rest.
        std::thread::sleep(load / 3);
        pressed.push(press(device, kind, timed, load)?);
        device.clear()?;
    }
    Ok(Some(Power { limit_w: device.power_limit(0), idle_w, pressed }))
}

fn press<D: Device>(device: &mut D, kind: &str, timed: &Timed, load: Duration) -> Result<Pressed> {
    let mut again = speed::Again::new(device, timed, BATCH_S, GROUP_S)?;
    let (begun, mut told, mut times) = (Instant::now(), None, vec![]);
    let watts = loop {
        let at = begun.elapsed();
        if told.is_none() && at + TOLD >= load {
            told = device.energy(0).map(|joules| (at, joules));
        }
        let mut end = at.as_secs_f64();
        for seconds in again.batch(device)? {
            end += seconds * again.group() as f64;
            times.push((end, seconds));
        }
        let now = begun.elapsed();
        if now < load {
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
    Ok(Pressed { what: kind.into(), kernel: timed.name.clone(), watts: watts.max(0.0), rate, ramp })
}
