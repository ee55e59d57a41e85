//! What the ops of a line wait for, and what they leave behind.

use crate::plan::link::{Csr, Line};
use crate::plan::*;

/// The edges of a line, apart from the plan that it came from. What the line waits for from before it began, and what
/// it leaves behind, are atoms by number, to be looked up among the atoms of the moment.
#[derive(Debug, Clone)]
pub struct Track {
    pub lane: Vec<u16>,
    pub is_kernel: Vec<bool>,
    /// Whether the CPU issues nothing behind the op before it is over.
    pub is_wait: Vec<bool>,
    pub any_wait: bool,
    pub preds: Csr,
    /// Lanes whose last op from before the line an op waits for.
    pub after_lanes: Csr,
    /// Atoms whose last write the op waits for, by op; and atoms whose last reads it waits for.
    pub after_write: Csr,
    pub after_reads: Csr,
    pub last_on_lane: Vec<(u16, u32)>,
    pub last_write: Vec<(u32, u32)>,
    pub last_reads: Vec<(u32, u32)>,
}

impl Track {
    pub fn of(plan: &Plan, line: &Line) -> Track {
        let outer = &line.outer;
        let (mut after_write, mut waits) = (Csr::default(), vec![]);
        for node in 0..line.nodes.len() {
            waits.clear();
            waits.extend_from_slice(outer.reads.of(node));
            waits.extend(outer.writes.of(node).iter().filter(|atom| !outer.reads.of(node).contains(atom)));
            after_write.push(&waits);
        }
        Track {
            lane: line.nodes.iter().map(|n| n.lane).collect(),
            is_kernel: line.nodes.iter().map(|n| plan.lanes[n.lane as usize].computes()).collect(),
            is_wait: (0..line.nodes.len()).map(|n| line.is_wait(n)).collect(),
            any_wait: (0..line.nodes.len()).any(|n| line.is_wait(n)),
            preds: line.all_preds().clone(),
            after_lanes: outer.lanes.clone(),
            after_write,
            after_reads: outer.writes.clone(),
            last_on_lane: outer.last_on_lane.clone(),
            last_write: outer.last_write.clone(),
            last_reads: outer.last_reads.clone(),
        }
    }

    pub fn width(&self) -> usize {
        self.lane.len()
    }

    /// The atoms that the line looks up or leaves stamps of, some of them more than once.
    pub fn atoms(&self) -> impl Iterator<Item = u32> {
        let waits = self.after_write.items.iter().chain(&self.after_reads.items);
        let left = self.last_write.iter().chain(&self.last_reads);
        waits.copied().chain(left.map(|&(atom, _)| atom))
    }

    /// Gives other numbers to the atoms from before the line and after it.
    pub fn renumber(&mut self, number: &dyn Fn(u32) -> u32) {
        self.after_write.items.iter_mut().chain(&mut self.after_reads.items).for_each(|atom| *atom = number(*atom));
        self.last_write.iter_mut().chain(&mut self.last_reads).for_each(|(atom, _)| *atom = number(*atom));
    }
}
