//! `foretrain validate --on cuda`.

use super::super::Answer;
use super::super::chosen::Chosen;
use super::{Flags, aside, known, render, what};
use crate::calibrate::shapes;
use crate::cli::config::GPUS;
use crate::cluster::Cluster;
use crate::compare::validation::{Trial, Validation, validate};
use crate::cost::{Effort, Machine, cost};
use crate::device::Profile;
use crate::device::clocks::Clocks;
use crate::device::measured::GpuSide;
use crate::error::{Error, Result};
use crate::exec::cuda::alone::held_down;
use crate::exec::cuda::contention;
use crate::exec::cuda::device::Device;
use crate::exec::cuda::driver::Cuda;
use crate::exec::cuda::fused::said;
use crate::exec::cuda::run::{Placement, Rest, Timing, time_steps};
use crate::plan::Plan;
use crate::plan::link::{AtomTable, Line};
use crate::report::human::{counted, seconds};
use crate::spec::{ClusterSpec, StackSpec};
use crate::timeline::Timeline;
use crate::units::{BytesPerSec, Seconds};
use serde::Serialize;
use std::collections::HashMap;

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
    /// Whose kernels did attention.
    attention: String,
    /// The step as one CUDA graph, the median; none for ranks on several GPUs.
    graph_step_s: Option<f64>,
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
    let mut cuda = Cuda::open(&placement.ordinals, flags.machine.attention(Some(gpu)))?;
    let attention = said(cuda.fused().as_deref());
    let waits = flags.solo.map(|rank| lasting(&plan, rank, &predicted)).transpose()?;
    let predicted = match (flags.solo, gpu.power.as_ref().and_then(Clocks::new)) {
        (Some(rank), Some(clocks)) => held_down(&plan, rank, predicted, clocks)?,
        _ => predicted,
    };
    let (steps, graphs) = (u64::from(flags.repeat) + 1, u64::from(flags.repeat));
    let timing =
        Timing { steps, solo: flags.solo, waits: waits.as_deref(), graphs, rest: Rest::BetweenSteps, in_line: false };
    let mut as_graph = time_steps(&mut cuda, &plan, &devices, timing, &mut |run, _| {
        runs.push(Trial { timeline: run.timeline, on_core: run.on_core });
        Ok(())
    })?;
    as_graph.sort_by(f64::total_cmp);
    let graph_step_s = as_graph.get(as_graph.len() / 2).copied();
    let runs = &runs[1..];
    let known = known(&plan, &profile, &devices, flags.solo)?;
    let mut validation = validate(&predicted, runs, &|rank, node| known[rank as usize][node], true);
    let emulated = match flags.solo {
        Some(_) => Some("all ranks but one: its messages are waits of the predicted length, and not counted"),
        None if shared => Some("links: ranks share a GPU, and their messages are copies inside its memory"),
        None => None,
    };
    if flags.solo.is_some() {
        validation = validation.of_kernels();
    }
    let what = what(&plan);
    let mut text = format!(
        "{what}, {} on {} ({}), {}\n{}{}\n{}",
        counted(if flags.solo.is_some() { 1 } else { plan.ranks() }, "rank"),
        counted(placement.ordinals.len() as u64, "GPU"),
        gpu.name,
        counted(flags.repeat, "run"),
        emulated.map_or(String::new(), |e| format!("emulated: {e}\n")),
        graph_step_s.map_or(String::new(), |s| format!("the step as one CUDA graph: {}\n", seconds(s))),
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
        attention,
        graph_step_s,
        validation: &validation,
    };
    Answer::new(text, &found).also_to(flags.file.path())
}

/// The plan that is asked for, or a drawn one.
fn chosen(flags: &Flags) -> Result<(Plan, Chosen)> {
    if flags.plan.path().is_some() || !flags.config.says_nothing() {
        let chosen = flags.config.choose(flags.plan.path(), GPUS)?;
        return Ok((chosen.plan()?, chosen));
    }
    let plan = shapes::gpu_fresh(flags.machine.seed(), flags.ranks.unwrap_or(1)).plan()?;
    let chosen = flags.config.of_plan(plan.clone(), GPUS, "the drawn plan")?;
    Ok((plan, chosen))
}

/// How long each op of a rank is predicted to take, in its program's order; what is skipped takes nothing.
fn lasting(plan: &Plan, rank: u32, predicted: &Timeline) -> Result<Vec<f64>> {
    let atoms = AtomTable::new(plan)?;
    let line = Line::program(plan, &atoms, plan.program_of(rank))?;
    let spans = predicted.classes.iter().find(|class| class.rank == rank).map_or(&[][..], |class| &class.spans);
    let known: HashMap<&str, f64> = spans.iter().map(|s| (s.path.as_str(), s.duration().value())).collect();
    Ok((0..line.nodes.len()).map(|node| known.get(line.path(node).as_str()).copied().unwrap_or(0.0)).collect())
}

/// The timeline of the ranks that will be run.
fn predicted(
    plan: &Plan,
    chosen: &Chosen,
    profile: &Profile,
    solo: Option<u32>,
    (gpu, shared, of_rank): (&GpuSide, bool, &[u32]),
) -> Result<Timeline> {
    // One thread hands over the ops of all ranks, to one GPU that they share.
    if solo.is_none() && of_rank.iter().all(|gpu| *gpu == 0) {
        return contention::play(plan, profile, gpu);
    }
    let case = chosen.case.machine();
    let spec = if shared && solo.is_none() { inside(&case.cluster.spec, gpu) } else { case.cluster.spec.clone() };
    let cluster = Cluster::new(&spec, &case.cluster.gpu, plan.ranks())?;
    let mut stack: StackSpec = case.stack.clone();
    // One thread hands over the ops of all ranks.
    let issuing = if solo.is_some() { 1.0 } else { f64::from(plan.ranks()) };
    (stack.host_launch.value, stack.forward_launches) = (Seconds::new(gpu.host_launch_s * issuing), None);
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
