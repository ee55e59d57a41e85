//! In words: what the step goes to, and what other hardware would make of it.

use crate::cluster::Cluster;
use crate::device::Roofline;
use crate::error::Result;
use crate::plan::Plan;
use crate::report::human::{Table, percent, seconds};
use crate::sim::why::Why;
use crate::sim::{Effort, Fault, Machine, SharedLink, plays_threads, simulate};
use crate::spec::{ClusterSpec, GpuSpec, StackSpec};
use crate::sweep::Case;
use crate::units::Seconds;
use serde::Serialize;

/// The same step on another machine.
#[derive(Debug, Clone, Serialize)]
pub struct WhatIf {
    pub change: String,
    pub step_s: f64,
}

/// Parts of the chain that are told of one by one.
const PARTS: usize = 8;
/// Stretches of the chain that are shown.
const STRETCHES: usize = 10;

pub fn explain(why: &Why, step_s: f64, shared: &[SharedLink], what_if: Option<&[WhatIf]>) -> String {
    let mut table = Table::new("<>>");
    table.row(["the chain that makes the step as long as it is", "time", "share"]);
    for part in why.parts.iter().take(PARTS) {
        table.row([format!("  {}", told(&part.what)), seconds(part.seconds), percent(part.share)]);
    }
    let rest = why.parts.iter().skip(PARTS).fold((0.0, 0.0), |sum, p| (sum.0 + p.seconds, sum.1 + p.share));
    if rest.0 > 0.0 {
        table.row(["  the rest".to_string(), seconds(rest.0), percent(rest.1)]);
    }
    let mut text = table.render("");
    for used in &why.utilisation {
        let most = used.over_time.iter().copied().fold(0.0, f64::max);
        let link = class(&used.link);
        text.push_str(&format!("{link} are {} busy over the step, {} at most\n", percent(used.mean), percent(most)));
    }
    let waits: Vec<String> = why
        .exposed
        .iter()
        .filter(|(_, s)| **s > 0.0)
        .map(|(what, s)| format!("{} {}", told(what), seconds(*s)))
        .collect();
    if !waits.is_empty() {
        text.push_str(&format!("ranks wait for {}\n", waits.join(", ")));
    }
    if !shared.is_empty() {
        text.push_str(&format!("\n{}", narrow(shared, what_if.is_some())));
    }
    if let Some(what_if) = what_if {
        if !why.utilisation.is_empty() {
            text.push_str(&format!("\n{}", over_time(why)));
        }
        text.push_str(&format!("\n{}\n{}", chain(why), in_words(why, step_s, what_if)));
    }
    text
}

/// Kinds of links as people say them.
fn class(link: &str) -> String {
    match link {
        "scale_up" => "links inside nodes".into(),
        "scale_out" => "NICs".into(),
        "bridge" => "bridges between sockets".into(),
        "wire" => "wires".into(),
        other => format!("uplinks of pods of tier {}", other.trim_start_matches("uplink_")),
    }
}

/// Links that are told of one by one.
const NARROW: usize = 3;

fn narrow(shared: &[SharedLink], all: bool) -> String {
    let mut table = Table::new("<>>>>>");
    table.row(["links that ranks shared", "links", "carries", "busy", "full", "delayed others by"]);
    for link in shared.iter().take(if all { 4 * NARROW } else { NARROW }) {
        let delayed = format!("{} x {}", link.slowed, seconds(link.delay_s / link.slowed.max(1) as f64));
        let carries = format!("{:.1}", crate::units::BytesPerSec::new(link.capacity));
        let row = [
            format!("  {}", link.link),
            link.links.to_string(),
            carries,
            percent(link.busy),
            percent(link.full),
            delayed,
        ];
        table.row(row);
    }
    table.render("")
}

/// How busy links are over the step: a digit for each of its times, tenths of what they carry.
fn over_time(why: &Why) -> String {
    let mut text = String::from("tenths of what links carry, from the beginning of the step to its end\n");
    for used in &why.utilisation {
        let digit = |x: &f64| match (x * 10.0) as u32 {
            0 if *x <= 0.0 => '.',
            tenths => char::from_digit(tenths.min(9), 10).unwrap_or('9'),
        };
        let line: String = used.over_time.iter().map(digit).collect();
        text.push_str(&format!("  {line}  {}\n", class(&used.link)));
    }
    text
}

fn chain(why: &Why) -> String {
    let mut table = Table::new(">><>>");
    table.row(["from", "rank", "what", "ops", "takes"]);
    let mut longest: Vec<_> = why.critical_path.iter().collect();
    longest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    longest.truncate(STRETCHES);
    longest.sort_by(|a, b| a.from_s.total_cmp(&b.from_s));
    for s in longest {
        let what = format!("{}: {}", told(&s.what), s.longest);
        table.row([seconds(s.from_s), s.rank.to_string(), what, s.ops.to_string(), seconds(s.seconds)]);
    }
    format!("its longest stretches, {} in all\n{}", why.critical_path.len(), table.render(""))
}

fn in_words(why: &Why, step_s: f64, what_if: &[WhatIf]) -> String {
    let mut text = String::new();
    if let Some(most) = why.parts.first() {
        let next = why.parts.get(1).map(|p| format!(", {} is {}", percent(p.share), told(&p.what)));
        text = format!(
            "{} of the critical path is {}{}. ",
            percent(most.share),
            told(&most.what),
            next.unwrap_or_default()
        );
    }
    let mut said: Vec<String> = vec![];
    for other in what_if {
        let saved = 1.0 - other.step_s / step_s;
        match saved {
            s if s >= 0.0005 => said.push(format!("{} would save {}", other.change, percent(s))),
            s if s <= -0.0005 => said.push(format!("{} would cost {}", other.change, percent(-s))),
            _ => said.push(format!("{} would change nothing", other.change)),
        }
    }
    let mut said = said.join("; ");
    let Some(first) = said.get_mut(..1) else { return format!("{}\n", text.trim_end()) };
    first.make_ascii_uppercase();
    format!("{text}{said}.\n")
}

/// Names of parts as people say them.
fn told(what: &str) -> String {
    match what.split_once(' ') {
        Some((axis, "scale_out")) => format!("{axis} communication between nodes"),
        Some((axis, "scale_up")) => format!("{axis} communication inside nodes"),
        Some((axis, _)) => format!("{axis} copies on the device"),
        None if what == "host" => "waiting for the CPU".into(),
        None => what.into(),
    }
}

/// A machine that is being changed.
struct Changed {
    spec: ClusterSpec,
    gpu: GpuSpec,
    stack: StackSpec,
}

/// What is better, and how a machine becomes so.
type Change = (&'static str, fn(&mut Changed));

/// The step on machines that are better in one thing each. A profile of a machine's threads tells of no other machine:
/// there it is only that machine without its faults.
pub fn what_if(case: &Case, plan: &Plan, faults: &[Fault], effort: Effort) -> Result<Vec<WhatIf>> {
    if case.machine().kernels.threads().is_some() {
        // As the step that it is held against was played.
        let effort = Effort { apart: !plays_threads(plan, case.machine(), faults, effort), ..effort };
        let repaired = (!faults.is_empty()).then(|| simulate(plan, case.machine(), &[], effort));
        let step = repaired.transpose()?.map(|found| found.timeline.step.value());
        return Ok(step.map(|step_s| WhatIf { change: "repairing all faults".into(), step_s }).into_iter().collect());
    }
    let mut changes: Vec<Change> = vec![];
    if case.cluster.nodes() > 1 {
        changes.push(("doubling NIC bandwidth", |m| m.spec.scale_nics(2.0)));
    }
    if plan.ranks() > 1 {
        changes.push(("doubling the bandwidth inside nodes", |m| m.spec.scale_inside(2.0)));
    }
    // Whoever doubles the tensor cores feeds them.
    changes.push(("doubling peak FLOP/s, and what feeds them", |m| {
        m.gpu.peak.values_mut().for_each(|peak| peak.value = peak.value * 2.0);
        m.gpu.gemm.operands.value = m.gpu.gemm.operands.value * 2.0;
    }));
    changes.push(("doubling memory bandwidth", |m| {
        m.gpu.memory_bandwidth.value = m.gpu.memory_bandwidth.value * 2.0;
    }));
    if case.stack.host_launch.value > Seconds::ZERO {
        changes.push(("a CPU that issues ops in no time", |m| m.stack.host_launch.value = Seconds::ZERO));
    }
    let mut all = vec![];
    for (change, how) in changes {
        let step_s = step_on(case, plan, faults, effort, how)?;
        all.push(WhatIf { change: change.into(), step_s });
    }
    let alone = step_on(case, plan, faults, Effort { shared: false, ..effort }, |_| {})?;
    let together = step_on(case, plan, faults, effort, |_| {})?;
    if alone != together {
        all.push(WhatIf { change: "a network on which ranks do not get in each other's way".into(), step_s: alone });
    }
    if !faults.is_empty() {
        let step_s = step_on(case, plan, &[], effort, |_| {})?;
        all.push(WhatIf { change: "repairing all faults".into(), step_s });
    }
    Ok(all)
}

fn step_on(case: &Case, plan: &Plan, faults: &[Fault], effort: Effort, change: fn(&mut Changed)) -> Result<f64> {
    let mut changed =
        Changed { spec: case.cluster.spec.clone(), gpu: case.cluster.gpu.clone(), stack: case.stack.clone() };
    change(&mut changed);
    let cluster = Cluster::new(&changed.spec, &changed.gpu, case.cluster.gpus())?;
    let kernels = Roofline::new(&changed.gpu, &changed.stack)?;
    let machine = Machine { cluster: &cluster, stack: &changed.stack, kernels: &kernels, devices: None };
    Ok(simulate(plan, machine, faults, effort)?.timeline.step.value())
}
