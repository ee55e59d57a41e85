//! What an interpreter returns: when every op of every rank started and ended, and what that adds up to.

use crate::plan::link::Line;
use crate::plan::{Axis, Lane, Plan};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// An op of a rank, with its start and end.
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

/// Where the time of a rank went, in s. `compute` + everything `exposed` + `offload` + `bubble` + `host` = the step,
/// exactly.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Usage {
    /// Compute lane busy, s.
    pub compute: f64,
    /// Compute lane idle, s, while bytes that it needed were under way, or bytes that held up a peer; by their axis.
    pub exposed: BTreeMap<Axis, f64>,
    /// Compute lane idle, s, for copies to or from the host's memory, or for the CPU's own kernels.
    pub offload: f64,
    /// Compute lane idle, s, for other ranks: peers that compute (a bubble, uneven work), a shared device, a later last
    /// end.
    pub bubble: f64,
    /// Compute lane idle, s, because the CPU had not issued the next op yet.
    pub host: f64,
    /// Kernels of the compute lane, s, by name: as measured; predicted ones as long as each takes alone.
    pub by_kernel: BTreeMap<&'static str, f64>,
    /// Ops of communication lanes, s, by axis: predicted ones as long as each takes alone; empty where a plan ran.
    pub comm: BTreeMap<Axis, f64>,
    /// Copies to and from the host and the CPU's kernels, s, as long as each takes alone.
    pub aside: f64,
    /// FLOPs that the kernels execute.
    pub flops: f64,
    /// Bytes that the rank sends to others in its node.
    pub bytes_scale_up: f64,
    /// Bytes that the rank sends to ranks on other nodes.
    pub bytes_scale_out: f64,
    /// Bytes copied to and from the host's memory.
    pub bytes_host: f64,
    /// Kernels and communication, s, by how their times are known (the words of `act::PROVENANCES`).
    pub by_provenance: BTreeMap<&'static str, f64>,
    /// Standard deviation of the kernels' time, s, from the spread of their calibration, all kernels erring together.
    pub sd: f64,
    /// Standard deviation of the time of all communication, s, hidden or not, all links erring together.
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
            Lane::Compute(_) => self.bubble += s,
        }
    }

    /// Standard deviation of the step: kernels err together, so do links, the two apart. Only what is exposed of
    /// the communication counts.
    pub fn spread(&self) -> f64 {
        let busy: f64 = self.comm.values().sum();
        let exposed = if busy > 0.0 { (self.exposed_total() / busy).min(1.0) } else { 0.0 };
        self.sd.hypot(self.comm_sd * exposed)
    }

    /// Adds `share` of another rank's usage: a mean over ranks is a sum of shares.
    pub fn add(&mut self, other: &Usage, share: f64) {
        let add_map = |into: &mut BTreeMap<Axis, f64>, from: &BTreeMap<Axis, f64>| {
            from.iter().for_each(|(k, v)| *into.entry(*k).or_default() += v * share);
        };
        add_map(&mut self.exposed, &other.exposed);
        add_map(&mut self.comm, &other.comm);
        other.by_kernel.iter().for_each(|(k, v)| *self.by_kernel.entry(k).or_default() += v * share);
        other.by_provenance.iter().for_each(|(k, v)| *self.by_provenance.entry(k).or_default() += v * share);
        self.compute += other.compute * share;
        self.bubble += other.bubble * share;
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

/// Ranks that do the same at the same time, told by one of them.
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
