//! How far ahead of everything that is still to come the ranks are: what is over before that can be forgotten.

use super::ranks::Stamps;
use crate::act::stamp::Stamp;
use std::ops::Range;

/// An op that uses a communicator, the first of its line to do so.
#[derive(Debug, Clone)]
pub struct Mover {
    pub lane: u16,
    /// It waits for a kernel of its line on the compute lane.
    pub led: bool,
    /// Atoms that it waits for from before its line: of each, those of all slots, and one is meant.
    pub touches: Vec<(Range<u32>, usize)>,
}

/// Of every class a time before which no bytes that it is yet to move set off: an op waits for the last one of its
/// lane, for whoever wrote what it touches, for the CPU. None of these times ever becomes an earlier one, so that one
/// of a while ago is right too, if less use.
#[derive(Debug, Clone, Default)]
pub struct Ahead {
    /// Whatever uses a communicator first in a line; empty if that is not known.
    movers: Vec<Mover>,
    pub soonest: Vec<u64>,
    /// Nothing has happened since it was last looked.
    fresh: bool,
    // Room to work in.
    least: Vec<Stamp>,
    next: Vec<Stamp>,
    when: Vec<Stamp>,
}

impl Ahead {
    pub fn new(classes: usize, movers: Vec<Mover>) -> Ahead {
        let none = vec![Stamp::default(); classes];
        let (least, next, when) = (none.clone(), none.clone(), none);
        Ahead { movers, soonest: vec![0; classes], fresh: false, least, next, when }
    }

    /// Something has happened.
    pub fn moved(&mut self) {
        self.fresh = false;
    }

    /// Looks at where the ranks are, all classes side by side.
    pub fn look(&mut self, stamps: &Stamps, host: &[u64]) {
        // Programs side by side take up what they posted when the others have come to it, and the CPU is far ahead.
        if self.movers.is_empty() || std::mem::replace(&mut self.fresh, true) {
            return;
        }
        let classes = self.soonest.len();
        let of = |thing: usize| thing * classes..(thing + 1) * classes;
        self.least.fill(Stamp::LAST);
        for mover in &self.movers {
            self.next.copy_from_slice(&stamps.lanes[of(mover.lane.into())]);
            if mover.led {
                each(&mut self.next, &stamps.lanes[of(0)], Stamp::max);
            }
            for (slots, per_slot) in &mover.touches {
                if self.next.iter().zip(&self.least).all(|(next, least)| next >= least) {
                    break;
                }
                // Which of the slots it will be is not known yet.
                self.when.fill(Stamp::LAST);
                for atom in slots.clone().step_by(*per_slot) {
                    each(&mut self.when, &stamps.written[of(atom as usize)], Stamp::min);
                }
                if !slots.is_empty() {
                    each(&mut self.next, &self.when, Stamp::max);
                }
            }
            each(&mut self.least, &self.next, Stamp::min);
        }
        let least = self.least.iter().zip(host);
        self.soonest.iter_mut().zip(least).for_each(|(soonest, (least, &host))| *soonest = host.max(least.ps()));
    }
}

fn each(all: &mut [Stamp], with: &[Stamp], f: impl Fn(Stamp, Stamp) -> Stamp) {
    all.iter_mut().zip(with).for_each(|(a, &b)| *a = f(*a, b));
}
