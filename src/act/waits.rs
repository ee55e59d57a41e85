//! What a gap of the compute lane is charged to, where only stamps tell what was waited for.
//!
//! A kernel waits for an op of another lane, that one for others who take part, or for an op before it, and so on. Time in
//! which bytes were under way is their lane's. Time in which someone who takes part had not come yet is charged to what he
//! had waited for: kernels of other ranks, or communication of theirs, as when a slow link holds up all of a ring.

use super::stamp::Stamp;

/// An op of a lane beside the compute lane, over at `end`.
#[derive(Debug, Clone, Copy, Default)]
struct Over {
    /// When it was launched, and what that had waited for.
    start: Stamp,
    /// When all who take part had come, and what the last of them had waited for.
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
    const FEW: usize = 8;
    /// Waiting for other ranks' kernels is charged to the first lane, the compute lane.
    pub const OTHERS: usize = 0;

    pub fn new(lanes: usize) -> Recent {
        Recent { lanes: vec![Default::default(); lanes], next: vec![0; lanes] }
    }

    /// An op of `lane` was launched at `start`, went on when all who take part were `ready`, and is over at `end`.
    pub fn note(&mut self, lane: u16, start: Stamp, ready: Stamp, end: u64) {
        let (lane, next) = (lane as usize, &mut self.next[lane as usize]);
        self.lanes[lane][*next as usize] = Over { start, ready, end };
        *next = (*next + 1) % Self::FEW as u8;
    }

    /// Everything that ended at `floor` or later did so `by` later.
    pub fn later(&mut self, floor: u64, by: u64) {
        for over in self.lanes.iter_mut().flatten().filter(|over| over.end >= floor) {
            *over = Over { start: over.start.later(by), ready: over.ready.later(by), end: over.end + by };
        }
    }

    /// Charges the gap from `free` until `at` to what was waited for: picoseconds by lane are added to `waited`, behind
    /// those of the lanes the CPU's.
    pub fn charge(&self, waited: &mut [u64], free: u64, mut at: Stamp) {
        while at.ps() > free {
            let (lane, until) = (at.lane() as usize, at.ps());
            let known = self.lanes.get(lane).and_then(|all| all.iter().find(|o| o.end == until && o.start < at));
            let Some(over) = known else {
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
}
