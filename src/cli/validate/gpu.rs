//! `foretrain validate --on cuda`.

use super::super::Answer;
use super::super::config::Chosen;
use super::{Flags, aside, known, render, what};
use crate::calibrate::shapes;
use crate::cli::config::GPUS;
use crate::cluster::Cluster;
use crate::compare::validation::{Trial, Validation, validate};
use crate::cost::{Effort, Machine, cost};
use crate::device::Profile;
use crate::device::measured::GpuSide;
use crate::error::{Error, Result};
use crate::exec::cuda::driver::Cuda;
use crate::exec::cuda::run::{Placement, time_steps};
use crate::plan::Plan;
use crate::spec::{ClusterSpec, StackSpec};
use crate::timeline::Timeline;
use crate::units::{BytesPerSec, Seconds};
use serde::Serialize;

#[derive(Serialize)]
struct Found<'a> {
    plan: String,
    what: &'a str,
    gpu: &'a GpuSide,
    profile_date: &'a str,
    devices: &'a [u32],
    seed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    solo: Option<u32>,
    /// What was not real.
    emulated: Option<&'static str>,
    #[serde(flatten)]
    validation: &'a Validation,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let Some(file) = flags.config.profile() else {
        let why = "is missing; write one with `foretrain calibrate --on cuda --out gpu.json` and give it";
        return Err(Error::spec("validate", "--profile", why));
    };
    let profile = Profile::load(file)?;
    let Some(gpu) = &profile.gpu else {
        let why = "is a CPU's; write one with `foretrain calibrate --on cuda --out gpu.json`";
        return Err(Error::spec(file.display(), "gpu", why));
    };
    let (plan, chosen) = chosen(flags)?;
    if let Some(rank) = flags.solo.filter(|rank| *rank >= plan.ranks()) {
        let why = format!("rank {rank} is not one of the plan's {}; give one below", plan.ranks());
        return Err(Error::spec("validate", "--solo", why));
    }
    let devices = match flags.solo {
        Some(_) => vec![0; plan.ranks() as usize],
        None => flags.machine.options(&plan, false)?.devices,
    };
    let placement = Placement::new(&devices);
    let shared = placement.ordinals.len() < plan.ranks() as usize;
    let predicted = predicted(&plan, &chosen, &profile, flags.solo, (gpu, shared, &placement.of_rank))?;
    let mut runs: Vec<Trial> = vec![];
    let mut cuda = Cuda::open(&placement.ordinals)?;
    time_steps(&mut cuda, &plan, &devices, (u64::from(flags.repeat) + 1, flags.solo), &mut |run, _| {
        runs.push(Trial { timeline: run.timeline, on_core: run.on_core });
        Ok(())
    })?;
    let runs = &runs[1..];
    let known = known(&plan, &profile)?;
    let mut validation = validate(&predicted, runs, &|rank, node| known[rank as usize][node], true);
    let emulated = match flags.solo {
        Some(_) => Some("all ranks but one: its messages are copies inside its own memory, and not counted"),
        None if shared => Some("links: ranks share a GPU, and their messages are copies inside its memory"),
        None => None,
    };
    if flags.solo.is_some() {
        validation = validation.of_kernels();
    }
    let what = what(&plan);
    let mut text = format!(
        "{what}, {} ranks on {} GPUs ({}), {} runs\n{}\n{}",
        if flags.solo.is_some() { 1 } else { plan.ranks() },
        placement.ordinals.len(),
        gpu.name,
        flags.repeat,
        emulated.map_or(String::new(), |e| format!("emulated: {e}\n")),
        render(&validation)
    );
    text.push_str(&aside(flags, &what, &predicted, runs, &validation)?);
    let found = Found {
        plan: plan.hash(),
        what: &what,
        gpu,
        profile_date: &profile.date,
        devices: &devices[..if flags.solo.is_some() { 1 } else { devices.len() }],
        seed: flags.machine.seed(),
        solo: flags.solo,
        emulated,
        validation: &validation,
    };
    Answer::new(text, &found).also_to(flags.out.as_deref())
}

/// The plan that is asked for, or a drawn one.
fn chosen(flags: &Flags) -> Result<(Plan, Chosen)> {
    if flags.plan.plan.is_some() || !flags.config.says_nothing() {
        let chosen = flags.config.choose(flags.plan.plan.as_deref(), GPUS)?;
        return Ok((chosen.plan()?, chosen));
    }
    let plan = shapes::gpu_fresh(flags.machine.seed(), flags.ranks.unwrap_or(1)).plan()?;
    let chosen = flags.config.of_plan(plan.clone(), GPUS, "the drawn plan")?;
    Ok((plan, chosen))
}

/// The timeline of the ranks that will be run.
fn predicted(
    plan: &Plan,
    chosen: &Chosen,
    profile: &Profile,
    solo: Option<u32>,
    (gpu, shared, of_rank): (&GpuSide, bool, &[u32]),
) -> Result<Timeline> {
    let case = chosen.case.machine();
    let spec = if shared && solo.is_none() { inside(&case.cluster.spec, gpu) } else { case.cluster.spec.clone() };
    let cluster = Cluster::new(&spec, &case.cluster.gpu, plan.ranks())?;
    let mut stack: StackSpec = case.stack.clone();
    // One thread hands over the ops of all ranks.
    let issuing = if solo.is_some() { 1.0 } else { f64::from(plan.ranks()) };
    stack.host_launch.value = Seconds::new(gpu.host_launch_s * issuing);
    let devices = solo.is_none().then_some(of_rank);
    let machine = Machine { cluster: &cluster, stack: &stack, kernels: profile, devices };
    let mut timeline = cost(plan, machine, Effort::ALL_SPANS)?;
    if let Some(rank) = solo {
        timeline.classes.retain(|class| class.rank == rank);
    }
    Ok(timeline)
}

/// A cluster whose links are copies inside a GPU's memory.
fn inside(spec: &ClusterSpec, gpu: &GpuSide) -> ClusterSpec {
    let mut spec = spec.clone();
    let bytes = f64::from(64 << 20);
    let rate = BytesPerSec::new(bytes / gpu.copy.at(&[bytes]).0);
    let up = &mut spec.scale_up;
    (up.bandwidth.value, up.p2p.value, up.p2p_per_cta.value) = (rate, rate, rate);
    up.latency.value = Seconds::new(gpu.copy.at(&[4096.0]).0);
    up.start.value = Seconds::ZERO;
    spec
}
