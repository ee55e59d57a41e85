//! What a GPU's power does to training that does not rest: a step again and again, beside the same step with rests within it.
//! Products alone would say too much, and gradients of attention too little. Products and attention of these steps take 1.16 times
//! as long after half a minute on an H200 (`traces/measured/README.md`).

use super::gpu::LEFT_OUT;
use super::{Effort, shapes};
use crate::act::work_of;
use crate::compare::stats::quantile;
use crate::device::measured::Condition;
use crate::error::Result;
use crate::exec::cuda::device::Device;
use crate::exec::cuda::run::{Rest, Timing, time_steps};
use crate::plan::link::{AtomTable, Line};
use crate::plan::{Plan, WorkClass};
use std::time::Duration;

/// Clocks and temperature, where NVML tells them.
pub fn condition<D: Device>(device: &mut D, when: &str) -> Option<Condition> {
    device.conditions(0).map(|says| Condition { when: when.into(), says })
}

/// How many times as long what clocks decide takes in steps without rest, where that could be found out.
pub struct Loaded {
    pub factor: Option<f64>,
    pub condition: Option<Condition>,
}

/// How long a GPU is kept busy until its clocks are those of a long run.
const LOAD: Duration = Duration::from_secs(30);
/// Where there is less time: power holds clocks down at once, heat only later.
const QUICK_LOAD: Duration = Duration::from_secs(10);
/// Steps with rests, and those of the load that are looked at: its last.
const LOOKED_AT: usize = 8;
/// So long may a GPU work that then rests for as long, and all kernels are at full clocks. Without rest an H200 held them down
/// after 10 to 80 ms, by kernel and machine.
pub const FULL_CLOCKS_S: f64 = 0.015;

/// A layer of Llama 3 8B at 16K tokens, on a device that has nothing else to do.
pub fn sustained<D: Device>(device: &mut D, effort: Effort) -> Result<Loaded> {
    let plan = if effort.tiny { shapes::gpu_tiny() } else { shapes::gpu_loaded() }.plan()?;
    let load = match effort.tiny {
        true => Duration::ZERO,
        false if effort.drawn > Effort::QUICK.drawn => LOAD,
        false => QUICK_LOAD,
    };
    let found = steps(device, &plan, LOOKED_AT, Rest::Within(FULL_CLOCKS_S)).and_then(|rested| {
        let count = LOOKED_AT + (load.as_secs_f64() / median(&rested, |step| step.all)) as usize;
        Ok([rested, steps(device, &plan, count, Rest::Never)?])
    });
    device.clear()?;
    let when = format!("after {} s of steps without rest", load.as_secs());
    Ok(match found {
        Ok([rested, loaded]) => {
            let last = &loaded[loaded.len() - LOOKED_AT..];
            let [loaded, rested] = [last, &rested].map(|steps| median(steps, |step| step.by_clocks));
            Loaded { factor: Some(loaded / rested), condition: condition(device, &when) }
        }
        Err(error) => {
            let condition = Condition { when: format!("{when} {LEFT_OUT}"), says: error.to_string() };
            Loaded { factor: None, condition: Some(condition) }
        }
    })
}

/// Seconds of a step's ops, without rests between them, and of what clocks decide in it: products, attention, scans.
struct Step {
    all: f64,
    by_clocks: f64,
}

fn median(steps: &[Step], of: impl Fn(&Step) -> f64) -> f64 {
    quantile(&steps.iter().map(of).collect::<Vec<_>>(), 0.5)
}

fn steps<D: Device>(device: &mut D, plan: &Plan, count: usize, rest: Rest) -> Result<Vec<Step>> {
    let atoms = AtomTable::new(plan)?;
    let line = Line::program(plan, &atoms, 0)?;
    let by_clocks =
        |node: &usize| work_of(plan, &line, *node, 0).is_some_and(|(work, _)| !matches!(work.class, WorkClass::Memory));
    let nodes: Vec<usize> = (0..line.nodes.len()).filter(by_clocks).collect();
    let mut found = vec![];
    let timing = Timing { steps: count as u64 + 1, rest, ..Timing::default() };
    time_steps(device, plan, &[0], timing, &mut |run, _| {
        let spans = &run.timeline.classes[0].spans;
        let by_clocks = nodes.iter().map(|&node| spans[node].duration().value()).sum();
        let all = spans.iter().map(|span| span.duration().value()).sum();
        found.push(Step { all, by_clocks });
        Ok(())
    })?;
    device.clear()?;
    // The first is for what comes up once.
    Ok(found.split_off(1))
}
