//! What a gap of the compute lane is charged to, where only stamps tell what was waited for.
//!
//! A kernel waits for an op of another lane, that one for others who take part, or for an op before it, and so on. Time in
//! which bytes were under way is their lane's. Time in which someone who takes part had not come yet is charged to what made
//! him late: kernels of other ranks, or communication of theirs, as when a slow link holds up all of a ring.

use super::stamp::Stamp;

/// An op of a lane beside the compute lane, or kernels there with no gap between them; over at `end`.
#[derive(Debug, Clone, Copy, Default)]
struct Over {
    /// When it was launched, and what that had waited for.
    start: Stamp,
    /// When all who take part had come, and what had made the last of them late.
    ready: Stamp,
    end: u64,
}

/// The last few ops of every lane: a kernel hardly ever waits for one from further back, and if it does, all of the gap is
/// charged to that lane.
#[derive(Debug, Clone, Default)]
pub struct Recent {
    lanes: Vec<[Over; Recent::FEW]>,
    /// Of each lane, where the next one goes.
    next: Vec<u8>,
}

impl Recent {
    const FEW: usize = 16;
    /// Waiting for other ranks is charged to the first lane, the compute lane.
    pub const OTHERS: usize = 0;

    pub fn new(lanes: usize) -> Recent {
        Recent { lanes: vec![[Over::default(); Recent::FEW]; lanes], next: vec![0; lanes] }
    }

    /// An op of `lane` was launched at `start`, went on when all who take part were `ready`, and is over at `end`. The lane
    /// of `ready` is what made the last of them late.
    pub fn note(&mut self, lane: u16, start: Stamp, ready: Stamp, end: u64) {
        let (lane, next) = (lane as usize, &mut self.next[lane as usize]);
        self.lanes[lane][*next as usize] = Over { start, ready, end };
        *next = (*next + 1) % Self::FEW as u8;
    }

    /// A kernel was launched at `start`, and is over at `end`.
    pub fn note_kernel(&mut self, start: Stamp, end: u64) {
        let last = self.last_kernels();
        let last = &mut self.lanes[Self::OTHERS][last];
        if last.end == start.ps() && last.end > 0 {
            last.end = end;
        } else if end > start.ps() {
            self.note(Self::OTHERS as u16, start, start, end);
        }
    }

    /// What began at `floor` did so once more, and again, until all of it is `by` later. What came before that is like what
    /// comes before the last time; but for kernels that have run since before it, with no gap.
    pub fn later(&mut self, floor: u64, by: u64) {
        let last = self.last_kernels();
        let goes_on = self.lanes.get(Self::OTHERS).map_or(Stamp::LAST, |kernels| kernels[last].start);
        for over in self.lanes.iter_mut().flatten().filter(|over| over.end > 0) {
            *over = Over { start: over.start.later(by), ready: over.ready.later(by), end: over.end + by };
        }
        if goes_on.ps() < floor {
            let kernels = &mut self.lanes[Self::OTHERS][last];
            (kernels.start, kernels.ready) = (goes_on, goes_on);
        }
    }

    /// Where the last kernels are on their lane.
    fn last_kernels(&self) -> usize {
        let next = self.next.first().map_or(0, |next| *next as usize);
        (next + Self::FEW - 1) % Self::FEW
    }

    /// What was over at that moment, and no moment of it was before; of kernels, those that ran until then.
    fn over_at(&self, at: Stamp) -> Option<&Over> {
        let lane = at.lane() as usize;
        let (newer, older) = self.lanes.get(lane)?.split_at(self.next[lane] as usize);
        // The last ones first: mostly it is one of these.
        let mut own = newer.iter().rev().chain(older.iter().rev());
        match lane == Self::OTHERS {
            true => own.find(|kernels| kernels.start.ps() < at.ps() && at.ps() <= kernels.end),
            false => own.find(|over| over.end == at.ps() && over.start < at),
        }
    }

    /// Charges the gap from `free` until `at` to what was waited for: picoseconds by lane are added to `waited`, behind
    /// those of the lanes the CPU's.
    pub fn charge(&self, waited: &mut [u64], free: u64, mut at: Stamp) {
        while at.ps() > free {
            let (lane, until) = (at.lane() as usize, at.ps());
            let Some(over) = self.over_at(at) else {
                waited[lane] += until - free;
                return;
            };
            let start = over.start.ps().max(free);
            let ready = over.ready.ps().clamp(start, until);
            waited[lane] += until - ready;
            waited[over.ready.lane() as usize] += ready - start;
            at = over.start;
        }
    }

    /// What led to the launch of an op, back to `since`.
    pub fn path(&self, launched: Stamp, since: u64) -> Path {
        let mut path = Path::default();
        let mut at = launched;
        while at.ps() > since && path.room() > 1 {
            let Some(over) = self.over_at(at) else {
                // The CPU has no ops, and others are too long ago: it was that, as far as is known, if nothing else was.
                if path.count == 0 {
                    path.add(at.lane(), since, at.ps());
                }
                break;
            };
            let ready = over.ready.ps().clamp(over.start.ps(), at.ps());
            path.add(at.lane(), ready.max(since), at.ps());
            path.add(over.ready.lane(), over.start.ps().max(since), ready.max(since));
            at = over.start;
        }
        path
    }
}

/// The way back from the launch of an op: what it waited for, what that did, and so on, for a few stretches. Kernels are the
/// first lane's. Of several who launch at the same moment, the greatest stands for all, whoever that is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path {
    launched: u64,
    /// When each stretch began, the last first, and its lane.
    from: [u64; Path::LONG],
    lane: [u16; Path::LONG],
    count: u8,
}

impl Path {
    /// Fewer than [`Recent`] keeps: those that each walk finds are the same then, in whatever order it goes.
    const LONG: usize = 8;

    fn room(&self) -> usize {
        Path::LONG - self.count as usize
    }

    fn add(&mut self, lane: u16, from: u64, to: u64) {
        if to > from {
            self.launched = self.launched.max(to);
            (self.from[self.count as usize], self.lane[self.count as usize]) = (from, lane);
            self.count += 1;
        }
    }

    /// The same back to `since` alone.
    pub fn back_to(&self, since: u64) -> Path {
        let (mut path, mut to) = (Path::default(), self.launched);
        for at in 0..self.count as usize {
            path.add(self.lane[at], self.from[at].max(since), to);
            to = self.from[at];
        }
        path
    }

    /// The same `by` later.
    pub fn later(&mut self, by: u64) {
        let from = &mut self.from[..self.count as usize];
        std::iter::once(&mut self.launched).chain(from).for_each(|at| *at += by);
    }

    /// What has made late whoever launched, when others have waited since `since`: the lane on which more than half of the time
    /// since went, of what is known of it; where there is none, other ranks' work as a whole, which is the first lane's.
    ///
    /// Not what it waited for last: whoever comes a second late has lost it a little at a time, as when the rows of its
    /// experts cross a network, and those of the others do not.
    pub fn made_late(&self, since: u64) -> u16 {
        let count = self.count as usize;
        let ends = std::iter::once(&self.launched).chain(&self.from);
        let took = |at: usize| {
            let end = ends.clone().nth(at).map_or(0, |end| *end);
            end.saturating_sub(self.from[at].max(since))
        };
        let on = |lane: u16| (0..count).filter(|&at| self.lane[at] == lane).map(took).sum::<u64>();
        let all: u64 = (0..count).map(took).sum();
        // Nobody has waited: the last of what it did.
        if all == 0 {
            return if count > 0 { self.lane[0] } else { Recent::OTHERS as u16 };
        }
        (0..count).map(|at| self.lane[at]).find(|&lane| 2 * on(lane) > all).unwrap_or(Recent::OTHERS as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gather that waits for what a pipeline sends, which is sent late: 5 ps of the gather's bytes, 3 of the message's, and
    /// the others have let it wait since before.
    #[test]
    fn a_gap_is_charged_along_what_was_waited_for() {
        const GATHER: u16 = 1;
        const SENT: u16 = 2;
        let mut recent = Recent::new(3);
        recent.note(SENT, Stamp::new(40, 0), Stamp::new(112, 0), 115);
        recent.note(GATHER, Stamp::new(115, SENT), Stamp::new(115, SENT), 120);
        let mut waited = vec![0; 4];
        recent.charge(&mut waited, 100, Stamp::new(120, GATHER));
        assert_eq!(waited, [12, 5, 3, 0]);
        // The same a thousand later, as a stride leaves it.
        recent.later(100, 1000);
        let mut later = vec![0; 4];
        recent.charge(&mut later, 1100, Stamp::new(1120, GATHER));
        assert_eq!(waited, later);
        // What is not known is the lane's as a whole, and the CPU has no ops.
        recent.charge(&mut later, 1150, Stamp::new(1160, SENT));
        recent.charge(&mut later, 1160, Stamp::new(1161, 3));
        assert_eq!(later, [12, 5, 13, 1]);
        // The same message, late because of a gather where it comes from.
        recent.note(SENT, Stamp::new(40, 0), Stamp::new(112, GATHER), 115);
        let mut others = vec![0; 4];
        recent.charge(&mut others, 100, Stamp::new(115, SENT));
        assert_eq!(others, [0, 12, 3, 0]);
    }

    /// Whatever was waited for, all of the gap is charged.
    #[test]
    fn no_gap_is_lost() {
        let mut recent = Recent::new(3);
        let mut end = 0;
        for n in 0..40u64 {
            let start = Stamp::new(end.max(n * 7 % 50), (n % 3) as u16);
            end = start.ps() + n * 13 % 11;
            recent.note((n % 3) as u16, start, Stamp::new(start.ps() + n % 4, (n % 2) as u16), end);
        }
        for free in 0..end {
            for lane in 0..3 {
                let mut waited = vec![0; 4];
                recent.charge(&mut waited, free, Stamp::new(end, lane));
                assert_eq!(waited.iter().sum::<u64>(), end - free, "from {free} by {lane}: {waited:?}");
            }
        }
    }

    #[test]
    fn what_made_somebody_late() {
        let mut recent = Recent::new(3);
        // From 100 on 30 ps of the second lane, 50 of a kernel, 45 of the second, 20 of a kernel, 5 of the third: nothing has
        // more than half of all that.
        recent.note(1, Stamp::new(100, 0), Stamp::new(100, 0), 130);
        recent.note_kernel(Stamp::new(130, 1), 150);
        recent.note_kernel(Stamp::new(150, 0), 180);
        recent.note(1, Stamp::new(180, 0), Stamp::new(180, 0), 225);
        recent.note_kernel(Stamp::new(225, 1), 245);
        recent.note(2, Stamp::new(245, 0), Stamp::new(245, 0), 250);
        let path = recent.path(Stamp::new(250, 2), 0);
        assert_eq!([100, 170, 180, 215, 248].map(|since| path.made_late(since)), [0, 1, 1, 0, 2]);
        assert_eq!(path.made_late(250), 2);
        for since in [100, 170, 180, 215, 248] {
            let short = recent.path(Stamp::new(250, 2), since);
            assert_eq!((short.made_late(since), short), (path.made_late(since), path.back_to(since)));
        }
        // An op that was launched while kernels went on.
        assert_eq!(recent.path(Stamp::new(170, 0), 0).made_late(125), 0);
        // What nobody knows of is that lane's, and the CPU's.
        assert_eq!(recent.path(Stamp::new(60, 1), 0).made_late(10), 1);
        assert_eq!(recent.path(Stamp::new(60, 3), 0).made_late(10), 3);
        assert_eq!(Path::default().made_late(0), 0);
    }

    /// However long ago it is, a path is a few stretches.
    #[test]
    fn a_path_is_no_longer_than_is_known() {
        let mut recent = Recent::new(2);
        for n in 0..40 {
            recent.note_kernel(Stamp::new(10 * n, 1), 10 * n + 4);
            recent.note(1, Stamp::new(10 * n + 4, 0), Stamp::new(10 * n + 4, 0), 10 * n + 10);
        }
        let path = recent.path(Stamp::new(400, 1), 0);
        assert_eq!((path.count, path.made_late(0), path.made_late(398)), (7, 1, 1));
    }
}
