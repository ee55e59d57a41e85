//! A GPU's profile: its kernels inside of training steps, copies, launches, and what each does to the other.
//!
//! Generic over the device, so that all of it is tested without a GPU. An H100 and an H200 have been measured
//! by it (`traces/measured`).

use super::load::{Loaded, condition};
use super::rows::{Company, On, keep, kept_of_gpu};
use super::samples::Samples;
use super::shapes;
use super::{Effort, Progress, attention, load, machine, power};
use crate::device::Profile;
use crate::device::curve::{Curve, Point};
use crate::device::measured::{BesideBlocks, Condition, Crowded, FORMAT, GpuSide, MachineName};
use crate::error::{Error, Result};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::fused::Attention;
use crate::exec::cuda::run::{Rest, Timing, time_steps};
use crate::exec::cuda::selftest::speed::{self, Copier, Timed};
use crate::plan::link::{AtomTable, Line};
use crate::plan::{Dtype, Kernel, Plan};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

/// What to measure, and where to keep what is done.
#[derive(Debug, Clone)]
pub struct Job {
    pub effort: Effort,
    /// Kept in the profile.
    pub command: String,
    /// `sm_90a`
    pub arch: String,
    /// A line a curve and size of each plan, as plans end.
    pub rows: PathBuf,
    /// Whose kernels do attention.
    pub attention: Attention,
    /// Steps whose kernels are timed at their own shapes, too: of a rank alone, the first and the last that do something else.
    pub plans: Vec<Plan>,
}

const PROVENANCE: &str = "measured by foretrain: kernels inside of training steps on one GPU, between CUDA events, \
                          memory filled with random numbers as training has them, and the GPU at rest for as long as it has worked, after each \
                          step and within it; the median of the steps after the first";

/// Measures the first GPU of a device.
pub fn measure<D: Device>(device: &mut D, job: &Job, progress: Progress) -> Result<Profile> {
    let mut conditions = vec![condition(device, "before")];
    progress(0.0, "attention");
    let attention = attention::choose(device, job)?;
    let on = On { gpu: device.name(0), attention: attention.by.clone() };
    let kept = kept_of_gpu(&job.rows, &on)?;
    progress(0.0, "copies and launches");
    let copy = copies(device, job.effort)?;
    let launch_s = launches(device)?;
    let beside_copies = beside(device, Copier::Driver, job.effort)?;
    let beside_blocks = BesideBlocks { blocks: BLOCKS, factors: beside(device, Copier::Blocks(BLOCKS), job.effort)? };
    let Steps { samples, host_launch_s, left_out } = steps(device, job, (&on, kept), progress)?;
    conditions.push(condition(device, "after"));
    conditions.extend(left_out.into_iter().map(Some));
    progress(1.0, "steps without rest");
    let Loaded { factor: sustained, condition: loaded } = load::sustained(device, job.effort)?;
    conditions.push(loaded);
    progress(1.0, "power");
    let power = power::power(device, job.effort)?;
    let name = device.name(0);
    Ok(Profile {
        foretrain_profile: FORMAT,
        machine: MachineName { cpu: name.clone(), cores: 1, system: job.arch.clone() },
        date: machine::today(),
        command: job.command.clone(),
        provenance: PROVENANCE.into(),
        threads: None,
        gpu: Some(GpuSide {
            name,
            arch: job.arch.clone(),
            attention: Some(attention),
            copy,
            launch_s,
            host_launch_s,
            op_gap_s: Some(samples.gap()),
            sustained,
            power,
            beside_copies,
            beside_blocks: Some(beside_blocks),
            conditions: conditions.into_iter().flatten().collect(),
        }),
        kernels: samples.curves(),
    })
}

/// What the plans brought.
struct Steps {
    samples: Samples,
    host_launch_s: f64,
    /// Plans that could not be run, and why.
    left_out: Vec<Condition>,
}

/// Every plan in turn; what an earlier run has left is not measured again, and one that cannot be run holds up no other.
fn steps<D: Device>(
    device: &mut D,
    job: &Job,
    (on, (mut samples, done)): (&On, (Samples, BTreeSet<String>)),
    progress: Progress,
) -> Result<Steps> {
    let shapes = if job.effort.tiny { vec![shapes::gpu_tiny()] } else { shapes::gpu_ladder(job.effort) };
    let asked: Vec<(&Plan, u32)> = job.plans.iter().flat_map(|plan| ends(plan).map(move |rank| (plan, rank))).collect();
    let count = shapes.len() + asked.len();
    let (begun, mut host, mut left_out) = (Instant::now(), vec![], vec![]);
    let mut take = |device: &mut D, i: usize, name: String, plan: &Plan, solo: Option<u32>| -> Result<()> {
        if done.contains(&name) {
            return Ok(());
        }
        progress(0.1 + 0.9 * i as f64 / count as f64, "kernels");
        let of = match one(device, (plan, solo), job.effort, &mut host) {
            Ok(of) => [(Company::Alone, of)],
            Err(error) => {
                // What no wait succeeds on is lost for all others, too.
                device.clear().map_err(|_| Error::device(&name, &error))?;
                left_out.push(Condition { when: format!("{name} {LEFT_OUT}"), says: error.to_string() });
                return Ok(());
            }
        };
        keep(&job.rows, &name, Some(on), &of)?;
        of[0].1.rows(&name).for_each(|row| samples.take(row));
        Ok(())
    };
    // What is asked for comes first, and whatever it takes.
    for (i, (plan, rank)) in asked.iter().enumerate() {
        take(device, i, format!("{} rank {rank} alone, {}", plan.about.model, plan.hash()), plan, Some(*rank))?;
    }
    for (i, shape) in shapes.iter().enumerate() {
        // The first plan is finished whatever it takes.
        if i > 0 && begun.elapsed() > job.effort.budget * LONGER {
            break;
        }
        let plan = shape.plan()?;
        let name = format!("{} seq {} {}", shape.model.name, shape.seq_len, plan.about.strategy);
        take(device, asked.len() + i, name, &plan, None)?;
    }
    if samples.is_empty() {
        let why =
            left_out.first().map_or_else(String::new, |first: &Condition| format!("; {}: {}", first.when, first.says));
        return Err(Error::device("calibrate", format!("not one kernel was timed{why}")));
    }
    host.sort_by(f64::total_cmp);
    Ok(Steps { samples, host_launch_s: host.first().copied().unwrap_or(HOST_LAUNCH), left_out })
}

/// Ends what is said of a plan that could not be run.
pub const LEFT_OUT: &str = "was left out";

/// The first ranks of a plan's first and last programs: of a pipeline's stages those with the embedding and the head.
fn ends(plan: &Plan) -> impl Iterator<Item = u32> + use<'_> {
    let last = plan.programs.len() as u32 - 1;
    let programs = [Some(0), Some(last).filter(|last| *last > 0)];
    programs.into_iter().flatten().filter_map(|program| (0..plan.ranks()).find(|r| plan.program_of(*r) == program))
}

/// A GPU's kernels are compiled first, and its memory is filled for each plan.
const LONGER: u32 = 3;

/// Where every plan was measured before, and how fast the host is was not kept.
const HOST_LAUNCH: f64 = 5e-6;

/// The kernels of one plan, with the GPU to themselves: beside copies those of ranks that share it would take up to two and
/// a half times as long, which is not the kernels' own time. `host` is given what the host takes for an op where the GPU
/// does not keep it waiting.
fn one<D: Device>(
    device: &mut D,
    (plan, solo): (&Plan, Option<u32>),
    effort: Effort,
    host: &mut Vec<f64>,
) -> Result<Samples> {
    let devices = vec![0; plan.ranks() as usize];
    let (mut samples, mut step) = (Samples::of_gpu(), 0);
    // A rank of a large plan does the same in each of its layers; its head is done twice behind the first step.
    let steps = if solo.is_some() { 3 } else { effort.rounds as u64 + 1 };
    // Nobody is waited for: what others would send is there.
    let none = solo.map(|rank| Ok(vec![0.0; ops_of(plan, rank)?])).transpose()?;
    let waits = none.as_deref();
    time_steps(
        device,
        plan,
        &devices,
        Timing { steps, solo, waits, in_line: true, rest: Rest::Within(load::FULL_CLOCKS_S), ..Timing::default() },
        &mut |run, seconds| {
            step += 1;
            let ops: usize = run.timeline.classes.iter().map(|c| c.spans.len()).sum();
            if step > 1 {
                host.push(seconds / ops.max(1) as f64);
            }
            samples.add(plan, &run, step == 1)
        },
    )?;
    device.clear()?;
    Ok(samples)
}

/// Ops of a rank in a step.
fn ops_of(plan: &Plan, rank: u32) -> Result<usize> {
    Ok(Line::program(plan, &AtomTable::new(plan)?, plan.program_of(rank))?.nodes.len())
}

/// Launches of what is timed by itself.
const TIMES: usize = 15;

fn copies<D: Device>(device: &mut D, effort: Effort) -> Result<Curve> {
    let mut points = vec![];
    let largest = if effort.tiny { 16 } else { 30 };
    for bits in (12..=largest).step_by(2) {
        let bytes = 1u64 << bits;
        let copy = speed::copy(device, bytes, TIMES)?;
        let (seconds, spread) = (copy.seconds.max(1e-9), copy.spread / copy.seconds.max(1e-9));
        points.push(Point { size: vec![bytes as f64], seconds, spread, runs: TIMES as u32 });
        device.clear()?;
    }
    Ok(Curve::new(points))
}

/// Seconds from one of many kernels with nothing to do to the next.
fn launches<D: Device>(device: &mut D) -> Result<f64> {
    let fill =
        Timed { name: "fill".into(), kernel: Kernel::Fill { elems: 8 }, reads: vec![], writes: vec![Dtype::F32] };
    let seconds = speed::together(device, &fill, 100)? / 100.0;
    device.clear()?;
    Ok(seconds.max(1e-9))
}

/// Channels of NCCL for messages between neighbours, and a few more for collectives.
const BLOCKS: u32 = 16;

/// The same kernels alone and while a stream beside theirs does nothing but copy.
fn beside<D: Device>(device: &mut D, by: Copier, effort: Effort) -> Result<Crowded> {
    let wanted = ["product 8192", "attention forward causal 16384 d128", "norm"];
    let mut factors = [1.0; 3];
    if effort.tiny {
        return Ok(Crowded { gemm: 1.0, attention: 1.0, memory: 1.0 });
    }
    for (name, factor) in wanted.iter().zip(&mut factors) {
        let all = speed::all();
        let timed = all.iter().find(|t| t.name.starts_with(name)).expect("among those that are timed");
        let alone = speed::time(device, timed, TIMES)?.seconds;
        device.clear()?;
        let beside = speed::beside_copies(device, timed, by, TIMES)?.seconds;
        device.clear()?;
        *factor = (beside / alone).max(1.0);
    }
    let [gemm, attention, memory] = factors;
    Ok(Crowded { gemm, attention, memory })
}
