//! A sheet being written, and what each class adds up to.

use super::kernels::Timed;
use super::picoseconds;
use super::sheet::{Act, End, Meeting, Sheet, issued, order};
use crate::cluster::Tier;
use crate::collective::LinkTime;
use crate::plan::link::Line;
use crate::plan::matching::Matching;
use crate::plan::*;
use crate::timeline::Usage;

/// No meeting yet.
const NONE: u32 = u32::MAX;

/// A sheet being written.
pub(super) struct Draft<'a> {
    pub(super) plan: &'a Plan,
    pub(super) matching: &'a Matching,
    pub(super) classes: usize,
    pub(super) acts: Vec<Act>,
    pub(super) meetings: Vec<Meeting>,
    pub(super) ends: Vec<End>,
    pub(super) met: Vec<u32>,
    /// The meeting of each sent leg, class after class.
    pub(super) sent: Vec<u32>,
    /// Names of the kernels that tallies count.
    pub(super) kernels: Vec<&'static str>,
    pub(super) tallies: Vec<Tally>,
}

/// What one class counts, by number rather than by name.
#[derive(Clone)]
pub(super) struct Tally {
    pub(super) kernels: Vec<f64>,
    /// By lane.
    pub(super) comm: Vec<f64>,
    pub(super) provenance: [f64; PROVENANCES.len()],
    pub(super) flops: f64,
    pub(super) bytes_up: f64,
    pub(super) bytes_out: f64,
    pub(super) bytes_host: f64,
    pub(super) sd: f64,
    pub(super) comm_sd: f64,
}

pub const PROVENANCES: [&str; 4] = ["measured", "interpolated", "extrapolated", "assumed"];

impl Tally {
    pub(super) fn sent(&mut self, tier: Tier, bytes: f64) {
        match tier {
            Tier::ScaleOut => self.bytes_out += bytes,
            Tier::ScaleUp | Tier::Local => self.bytes_up += bytes,
        }
    }
}

impl<'a> Draft<'a> {
    pub(super) fn new(plan: &'a Plan, lines: &[Line], matching: &'a Matching, classes: usize) -> Draft<'a> {
        let width = lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        let legs = (0..lines.len() as u32).map(|p| matching.leg_count(p)).max().unwrap_or(0);
        let comm = vec![0.0; plan.lanes.len()];
        let (kernels, provenance, flops, bytes_up, bytes_out, bytes_host, sd, comm_sd) = Default::default();
        let tally = Tally { kernels, comm, provenance, flops, bytes_up, bytes_out, bytes_host, sd, comm_sd };
        Draft {
            plan,
            matching,
            classes,
            acts: vec![Act::Skip; width * classes],
            meetings: vec![],
            ends: vec![],
            met: vec![],
            sent: vec![NONE; legs * classes],
            kernels: vec![],
            tallies: vec![tally; classes],
        }
    }

    /// The number of a kernel's name.
    pub(super) fn kernel(&mut self, name: &'static str) -> usize {
        self.kernels.iter().position(|k| *k == name).unwrap_or_else(|| {
            self.kernels.push(name);
            self.tallies.iter_mut().for_each(|t| t.kernels.push(0.0));
            self.kernels.len() - 1
        })
    }

    pub(super) fn act(&mut self, node: usize, class: usize, act: Act) {
        self.acts[node * self.classes + class] = act;
    }

    pub(super) fn compute(&mut self, node: usize, class: usize, kernel: usize, flops: u64, timed: Timed) {
        let Timed { duration, sm_bound, provenance, rel_sd } = timed;
        let (tally, s) = (&mut self.tallies[class], duration as f64 * 1e-12);
        tally.kernels[kernel] += s;
        tally.provenance[provenance as usize] += s;
        tally.sd += rel_sd * s;
        tally.flops += flops as f64;
        self.act(node, class, Act::Compute { duration, sm_bound });
    }

    /// Notes that a class communicates for `time`.
    pub(super) fn count(&mut self, class: usize, lane: u16, time: &LinkTime) {
        let s = time.total().value();
        self.tallies[class].comm[lane as usize] += s;
        self.tallies[class].provenance[time.provenance as usize] += s;
        self.tallies[class].comm_sd += time.rel_sd * s;
    }

    pub(super) fn meeting(&mut self, time: &LinkTime, ends: impl IntoIterator<Item = End>) -> u32 {
        let first = self.ends.len() as u32;
        self.ends.extend(ends);
        let (latency, transfer) = (picoseconds(time.latency), picoseconds(time.transfer));
        self.meetings.push(Meeting { latency, transfer, ends: first..self.ends.len() as u32 });
        self.meetings.len() as u32 - 1
    }

    /// One meeting for all of `ends`.
    pub(super) fn gather(&mut self, time: &LinkTime, ends: Vec<End>, ctas: u16) {
        let first = self.met.len() as u32;
        for end in &ends {
            self.act(end.node as usize, end.class as usize, Act::Meet { first, count: 1, ctas });
        }
        let meeting = self.meeting(time, ends);
        self.met.push(meeting);
    }

    pub(super) fn finish(self) -> Sheet {
        let usages = self.tallies.iter().map(|t| self.usage(t)).collect();
        let Draft { classes, acts, meetings, ends, met, .. } = self;
        let (issued, order) = (issued(&acts, classes), order(&acts, classes, &met, meetings.len()).into());
        Sheet { classes, acts, meetings, ends: ends.into(), met: met.into(), order, issued, usages }
    }

    pub(super) fn usage(&self, tally: &Tally) -> Usage {
        let mut usage = Usage {
            flops: tally.flops,
            bytes_scale_up: tally.bytes_up,
            bytes_scale_out: tally.bytes_out,
            bytes_host: tally.bytes_host,
            sd: tally.sd,
            comm_sd: tally.comm_sd,
            ..Usage::default()
        };
        usage.by_kernel.extend(self.kernels.iter().zip(&tally.kernels).filter(|(_, s)| **s > 0.0));
        usage.by_provenance.extend(PROVENANCES.iter().zip(&tally.provenance).filter(|(_, s)| **s > 0.0));
        for (lane, s) in self.plan.lanes.iter().zip(&tally.comm).filter(|(_, s)| **s > 0.0) {
            usage.busy(lane, *s);
        }
        usage
    }
}
