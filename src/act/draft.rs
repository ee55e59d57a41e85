//! A sheet being written.

use super::kernels::Timed;
use super::picoseconds;
use super::sheet::{Act, End, Meeting, Sheet, issued, order};
use super::tallies::Tallies;
use crate::collective::LinkTime;
use crate::plan::link::Line;
use crate::plan::matching::Matching;

/// In place of a meeting: none yet.
const NONE: u32 = u32::MAX;

/// A sheet being written.
pub(super) struct Draft<'a> {
    pub(super) matching: &'a Matching,
    pub(super) classes: usize,
    pub(super) acts: Vec<Act>,
    pub(super) launches: Vec<u32>,
    pub(super) meetings: Vec<Meeting>,
    pub(super) ends: Vec<End>,
    pub(super) met: Vec<u32>,
    /// The meeting of each sent leg, class after class.
    pub(super) sent: Vec<u32>,
    pub(super) tallies: Tallies,
}

impl<'a> Draft<'a> {
    /// An empty sheet. `lanes`, `kernels`: how many of them tallies tell apart.
    pub(super) fn new(
        lanes: usize,
        lines: &[Line],
        matching: &'a Matching,
        classes: usize,
        kernels: usize,
    ) -> Draft<'a> {
        let width = lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        let legs = (0..lines.len() as u32).map(|p| matching.leg_count(p)).max().unwrap_or(0);
        Draft {
            matching,
            classes,
            acts: vec![Act::Skip; width * classes],
            launches: vec![1; width * classes],
            meetings: vec![],
            ends: vec![],
            met: vec![],
            sent: vec![NONE; legs * classes],
            tallies: Tallies::new(kernels, lanes, classes),
        }
    }

    pub(super) fn act(&mut self, node: usize, class: usize, act: Act) {
        self.acts[node * self.classes + class] = act;
    }

    /// Notes how long the CPU takes to issue an op, in `host_launch`es.
    pub(super) fn launches(&mut self, node: usize, classes: &[usize], launches: u32) {
        classes.iter().for_each(|class| self.launches[node * self.classes + class] = launches);
    }

    pub(super) fn compute(&mut self, node: usize, class: usize, kernel: u16, flops: u64, timed: Timed) {
        self.tallies.kernel(class, kernel, flops, timed);
        self.act(node, class, timed.act());
    }

    pub(super) fn meeting(&mut self, time: &LinkTime, ends: impl IntoIterator<Item = End>) -> u32 {
        let first = self.ends.len() as u32;
        self.ends.extend(ends);
        let (latency, transfer) = (picoseconds(time.latency), picoseconds(time.transfer));
        self.meetings.push(Meeting { latency, transfer, fills: time.fills, ends: first..self.ends.len() as u32 });
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
        let Draft { classes, acts, launches, meetings, ends, met, tallies, .. } = self;
        let issued = issued(&acts, &launches, classes);
        let (order, launches) = (order(&acts, classes, &met, meetings.len()).into(), launches.into());
        let (ends, met, tallies) = (ends.into(), met.into(), tallies.into());
        Sheet { classes, acts, meetings, ends, met, order, launches, issued, tallies }
    }
}
