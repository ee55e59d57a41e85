//! What an interpreter returns: when every op of every rank started and ended, and what that adds up to.

use crate::plan::link::Line;
use crate::plan::{Axis, Lane, Plan};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// An op of a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Names the op on its rank; timelines are joined on (rank, path).
    pub path: String,
    /// Kernel, transfer or collective.
    pub what: &'static str,
    pub lane: u16,
    pub start: Seconds,
    pub end: Seconds,
}

impl Span {
    /// The op at `node` of a rank's line.
    pub fn of(line: &Line, node: usize, start: Seconds, end: Seconds) -> Span {
        let spliced = &line.nodes[node];
        Span { path: line.path(node), what: spliced.op.kind.name(), lane: spliced.lane, start, end }
    }

    pub fn duration(&self) -> Seconds {
        self.end - self.start
    }
}

/// Where the time of a rank went. `compute` + everything exposed + `offload` + `turns` + `host` = the step, exactly.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Usage {
    /// Time the compute lane was busy.
    pub compute: f64,
    /// Time the compute lane stood still while bytes were under way that it waited for, or another rank that takes part
    /// in what it waited for, by the axis of their communication.
    pub exposed: BTreeMap<Axis, f64>,
    /// Time the compute lane stood still for copies to or from the host's memory, or for the CPU's own kernels.
    pub offload: f64,
    /// Time the compute lane stood still for other ranks: because one that takes part in what it waited for was computing
    /// (a pipeline's bubble, work unevenly shared out), on a shared device, or when others ended the step later.
    pub turns: f64,
    /// Time the compute lane stood still because the CPU had not issued the next op yet.
    pub host: f64,
    /// Busy time of the compute lane by kernel.
    pub by_kernel: BTreeMap<&'static str, f64>,
    /// Busy time of communication lanes by axis.
    pub comm: BTreeMap<Axis, f64>,
    /// Busy time of the copy engines and of the CPU's kernels.
    pub aside: f64,
    /// FLOPs that the kernels execute.
    pub flops: f64,
    /// Bytes sent inside a node and between nodes.
    pub bytes_scale_up: f64,
    pub bytes_scale_out: f64,
    /// Bytes copied to and from the host's memory.
    pub bytes_host: f64,
    /// Time of kernels and transfers by how its number is known.
    pub by_provenance: BTreeMap<&'static str, f64>,
    /// Standard deviation of the kernels' time from the spread of their calibration, in s, all kernels erring
    /// together.
    pub sd: f64,
    /// The same of all communication, hidden or not.
    pub comm_sd: f64,
}

impl Usage {
    pub fn exposed_total(&self) -> f64 {
        self.exposed.values().sum()
    }

    /// Notes `s` seconds for which a lane other than the compute lane was busy.
    pub fn busy(&mut self, lane: &Lane, s: f64) {
        match lane {
            Lane::Comm(group, _) => *self.comm.entry(group.charged_axis()).or_default() += s,
            Lane::Copy(_) | Lane::Host => self.aside += s,
            Lane::Compute(_) => {}
        }
    }

    /// Notes `s` seconds for which the compute lane stood still, waiting for `lane`.
    pub fn waited(&mut self, lane: &Lane, s: f64) {
        match lane {
            Lane::Comm(group, _) => *self.exposed.entry(group.charged_axis()).or_default() += s,
            Lane::Copy(_) | Lane::Host => self.offload += s,
            Lane::Compute(_) => self.turns += s,
        }
    }

    /// Standard deviation of the step: kernels err together, so do links, the two apart. Only what is exposed of
    /// the communication counts.
    pub fn spread(&self) -> f64 {
        let busy: f64 = self.comm.values().sum();
        let exposed = if busy > 0.0 { (self.exposed_total() / busy).min(1.0) } else { 0.0 };
        self.sd.hypot(self.comm_sd * exposed)
    }

    /// Adds `share` of another usage: a mean over ranks is a sum of shares.
    pub fn add(&mut self, other: &Usage, share: f64) {
        let add_map = |into: &mut BTreeMap<Axis, f64>, from: &BTreeMap<Axis, f64>| {
            from.iter().for_each(|(k, v)| *into.entry(*k).or_default() += v * share);
        };
        add_map(&mut self.exposed, &other.exposed);
        add_map(&mut self.comm, &other.comm);
        other.by_kernel.iter().for_each(|(k, v)| *self.by_kernel.entry(k).or_default() += v * share);
        other.by_provenance.iter().for_each(|(k, v)| *self.by_provenance.entry(k).or_default() += v * share);
        self.compute += other.compute * share;
        self.turns += other.turns * share;
        self.offload += other.offload * share;
        self.aside += other.aside * share;
        self.host += other.host * share;
        self.flops += other.flops * share;
        self.bytes_scale_up += other.bytes_scale_up * share;
        self.bytes_scale_out += other.bytes_scale_out * share;
        self.bytes_host += other.bytes_host * share;
        self.sd += other.sd * share;
        self.comm_sd += other.comm_sd * share;
    }
}

/// Ranks that do the same at the same time, by one of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    pub rank: u32,
    pub multiplicity: u32,
    pub usage: Usage,
    /// Empty where only the sums were asked for.
    pub spans: Vec<Span>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// From the first start to the last end.
    pub step: Seconds,
    pub classes: Vec<Class>,
    /// Labels of the plan's lanes.
    pub lanes: Vec<String>,
}

impl Timeline {
    /// The mean over all ranks.
    pub fn mean(&self) -> Usage {
        let ranks: u32 = self.classes.iter().map(|c| c.multiplicity).sum();
        let mut mean = Usage::default();
        for class in &self.classes {
            mean.add(&class.usage, f64::from(class.multiplicity) / f64::from(ranks));
        }
        mean
    }
}

/// A message from one rank's op to another's: an arrow of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arrow {
    pub from: ArrowEnd,
    pub to: ArrowEnd,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArrowEnd {
    pub rank: u32,
    pub lane: u16,
    pub at: Seconds,
}

/// Labels of a plan's lanes, in order.
pub fn lane_labels(plan: &Plan) -> Vec<String> {
    plan.lanes.iter().map(Lane::label).collect()
}
