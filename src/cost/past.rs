//! What led to each op that is over, for a walk that comes to ops in the order in which they are posted, and not in
//! that of time: an op that is launched may have waited for one that was over long ago, as sums of gradients do that
//! are posted behind all layers.

use crate::act::stamp::Stamp;
use crate::act::waits::{OTHERS, Path};

/// An op of a lane beside the compute lane, joined with the ops right before it on the lane that led to it; or kernels
/// with no gap between them. `start`: when it was launched, and the lane it had waited for. `ready`: when all who take
/// part had come, and the lane that had made the last of them late. `end`: when it was over, ps.
#[derive(Debug, Clone, Copy)]
struct Over {
    start: Stamp,
    ready: Stamp,
    end: u64,
}

/// Iterations that were taken in one stride: what was over after `floor` in the last one that was walked was over again
/// in each, `d` later every time, `by` later in the last. All in ps.
#[derive(Debug, Clone, Copy)]
struct Stride {
    floor: u64,
    by: u64,
    d: u64,
}

/// The ops of a class that took time, lane by lane, and the strides that were taken.
#[derive(Debug, Clone, Default)]
pub struct Past {
    lanes: Vec<Vec<Over>>,
    strides: Vec<Stride>,
}

impl Past {
    /// Ops known of each lane, at least. Further back an op counts as having waited for its own lane alone.
    const MANY: usize = 1024;
    /// Ops looked at one by one, from the last on, before the others are searched by halving.
    const FEW: usize = 6;

    pub fn new(lanes: usize) -> Past {
        Past { lanes: vec![vec![]; lanes], strides: vec![] }
    }

    /// Notes an op of `lane` that was launched at `start`, went on when all who take part were `ready`, and is over at
    /// `end`. The lane of `ready` is what made the last of them late.
    #[inline]
    pub fn note(&mut self, lane: u16, start: Stamp, ready: Stamp, end: u64) {
        if end <= start.ps() {
            return;
        }
        let all = &mut self.lanes[lane as usize];
        let goes_on = start.lane() == lane && (ready.ps() <= start.ps() || ready.lane() == lane);
        let led = match all.last() {
            Some(last) if goes_on && last.end == start.ps() => Over { end, ..*last },
            _ => Over { start, ready: ready.max(start), end },
        };
        push(all, led);
    }

    /// Notes a kernel that was launched at `start` and is over at `end`.
    #[inline]
    pub fn note_kernel(&mut self, start: Stamp, end: u64) {
        let all = &mut self.lanes[OTHERS];
        match all.last_mut() {
            Some(last) if last.end == start.ps() => last.end = end,
            _ if end > start.ps() => push(all, Over { start, ready: start, end }),
            _ => {}
        }
    }

    /// Notes a stride: what was over after `floor` came once more and again, each time `d` later, until it was `by`
    /// later. An op that had gone on for longer than an iteration has gone on since it began.
    pub fn later(&mut self, floor: u64, by: u64, d: u64) {
        if by == 0 {
            return;
        }
        for over in self.lanes.iter_mut().flat_map(|all| all.iter_mut().rev().take_while(|over| over.end > floor)) {
            let goes_on = |from: Stamp, to: u64| from.ps() < floor && to - from.ps() > d;
            let (ready, end) = (over.ready.ps(), over.end);
            let whole = goes_on(over.ready, end);
            if !whole {
                over.ready = over.ready.later(by);
            }
            if !whole && !goes_on(over.start, ready) {
                over.start = over.start.later(by);
            }
            over.end += by;
        }
        self.strides.iter_mut().filter(|stride| stride.floor >= floor).for_each(|stride| stride.floor += by);
        push(&mut self.strides, Stride { floor, by, d });
    }

    /// The path that led to `at`, back to `since`: which lane each stretch of time went to. Of kernels: those that ran
    /// until then or longer.
    pub fn path(&self, at: Stamp, since: u64) -> Path {
        let mut path = Path::default();
        self.lead(at, since, &mut path);
        path
    }

    /// [`path`](Past::path), written to where it is kept, which has to be empty. To return a path copies it in wider
    /// words than it was just written in, and a CPU waits for the stores then.
    pub fn lead(&self, at: Stamp, since: u64, path: &mut Path) {
        let mut stretches = 0;
        self.back(at, since, |at| {
            path.behind(stretches, at);
            stretches += 1;
        });
    }

    /// Charges the time from `free` to `at` to lanes, along the path that led there: picoseconds are added to `waited`,
    /// which has an entry for each lane and one for the CPU behind them.
    #[inline]
    pub fn charge(&self, waited: &mut [u64], free: u64, at: Stamp) {
        let mut until = at;
        self.back(at, free, |began| {
            waited[until.lane() as usize] += until.ps() - began.ps();
            until = began;
        });
        waited[until.lane() as usize] += until.ps().saturating_sub(free);
    }

    /// Goes back from stretch to stretch, as far as is known, but no further than `since`. Gives `each` the end of
    /// every stretch: when it was over, and its lane.
    #[inline]
    fn back(&self, at: Stamp, since: u64, mut each: impl FnMut(Stamp)) {
        if at.ps() <= since {
            return;
        }
        each(at);
        let (mut at, mut lane, mut stretches) = (at, at.lane(), 1);
        while at.ps() > since {
            let known = self.known(at).map(|over| [over.ready, over.start]);
            let Some(began) = known.or_else(|| self.as_in_the_last(at)) else { return };
            for began in began {
                if began.ps() <= since {
                    return;
                }
                if began.lane() != lane {
                    if stretches == Path::LONG {
                        return;
                    }
                    each(began);
                    (lane, stretches) = (began.lane(), stretches + 1);
                }
            }
            at = began[1];
        }
    }

    /// When the op that was over at `at`, in an iteration that a stride skipped, was ready and when it was launched: as
    /// in the last iteration that was walked, earlier by whole periods. An op that has gone on since before the first
    /// iteration keeps its start. `None`: no stride covers that moment.
    fn as_in_the_last(&self, at: Stamp) -> Option<[Stamp; 2]> {
        // The CPU has no ops.
        self.lanes.get(at.lane() as usize)?;
        let (mut then, mut later) = (at, 0);
        for &Stride { floor, by, d } in self.strides.iter().rev() {
            if (floor..=floor + by).contains(&then.ps()) && d > 0 {
                let more = ((floor + by - then.ps()) / d + 1) * d;
                (then, later) = (then.later(more), later + more);
                if let Some(over) = self.known(then) {
                    let of = |at: Stamp| {
                        if at.ps() < floor { at } else { Stamp::new(at.ps().saturating_sub(later), at.lane()) }
                    };
                    return Some([over.ready, over.start].map(of));
                }
            }
        }
        None
    }

    #[inline]
    fn known(&self, at: Stamp) -> Option<&Over> {
        let (lane, ps) = (at.lane() as usize, at.ps());
        let all = self.lanes.get(lane)?;
        // Mostly it is one of the last ops.
        let mut first = all.len();
        while first > 0 && all[first - 1].end >= ps {
            first -= 1;
            if all.len() - first == Past::FEW {
                first = all[..first].partition_point(|over| over.end < ps);
                break;
            }
        }
        let over = all.get(first)?;
        let is_it = if lane == OTHERS { over.start.ps() < ps } else { over.end == ps };
        is_it.then_some(over)
    }
}

/// Adds an entry; forgets the first half of a list that has grown too long.
fn push<T>(all: &mut Vec<T>, one: T) {
    if all.len() >= 2 * Past::MANY {
        all.drain(..Past::MANY);
    }
    all.push(one);
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATHER: u16 = 1;
    const SENT: u16 = 2;

    fn at(ps: u64, lane: u16) -> Stamp {
        Stamp::new(ps, lane)
    }

    fn path(stamps: &[(u64, u16)]) -> Path {
        stamps.iter().rev().fold(Path::default(), |path, &(ps, lane)| path.on_to(at(ps, lane)))
    }

    /// A gather that waits for what a pipeline sends, which is sent late: 5 ps of the gather's bytes, 3 of the message's, and
    /// the others have let it wait since before.
    #[test]
    fn a_gap_is_charged_along_what_was_waited_for() {
        let mut past = Past::new(3);
        past.note(SENT, at(40, 0), at(112, 0), 115);
        past.note(GATHER, at(115, SENT), at(115, SENT), 120);
        let charge = |past: &Past, by: Stamp, free: u64| {
            let mut waited = [0; 4];
            past.charge(&mut waited, free, by);
            let mut same = [0; 4];
            past.path(by, free).charge(&mut same, free);
            assert_eq!(waited, same);
            waited
        };
        assert_eq!(charge(&past, at(120, GATHER), 100), [12, 5, 3, 0]);
        // The same a thousand later, as a stride leaves it.
        past.later(100, 1000, 100);
        assert_eq!(charge(&past, at(1120, GATHER), 1100), [12, 5, 3, 0]);
        // What is not known is the lane's as a whole, and the CPU has no ops.
        assert_eq!(charge(&past, at(1160, SENT), 1150), [0, 0, 10, 0]);
        assert_eq!(charge(&past, at(1161, 3), 1160), [0, 0, 0, 1]);
        // The same message, late because of a gather where it comes from.
        past.note(SENT, at(1240, 0), at(1312, GATHER), 1315);
        assert_eq!(charge(&past, at(1315, SENT), 1300), [0, 12, 3, 0]);
    }

    /// Whatever was waited for, all of the gap is charged.
    #[test]
    fn no_gap_is_lost() {
        let mut past = Past::new(3);
        let mut end = 0;
        for n in 0..40u64 {
            let start = at(end.max(n * 7 % 50), (n % 3) as u16);
            end = start.ps() + n % 4 + n * 13 % 11;
            past.note((n % 3) as u16, start, at(start.ps() + n % 4, (n % 2) as u16), end);
        }
        for free in 0..end {
            for lane in 0..3 {
                let mut waited = vec![0; 4];
                past.charge(&mut waited, free, at(end, lane));
                assert_eq!(waited.iter().sum::<u64>(), end - free, "from {free} by {lane}: {waited:?}");
            }
        }
    }

    #[test]
    fn what_was_over_long_ago_is_found() {
        let mut past = Past::new(3);
        for n in 0..500 {
            past.note_kernel(at(10 * n, if n > 0 { GATHER } else { 0 }), 10 * n + 4);
            past.note_kernel(at(10 * n + 4, 0), 10 * n + 6);
            past.note(GATHER, at(10 * n + 6, 0), at(10 * n + 6, 0), 10 * n + 10);
        }
        assert_eq!(past.path(at(106, 0), 88), path(&[(106, 0), (100, 1), (96, 0), (90, 1)]));
        // While kernels run.
        assert_eq!(past.path(at(103, 0), 98), path(&[(103, 0), (100, 1)]));
        // The first of more ops than fit are forgotten.
        for n in 500..5000 {
            past.note(SENT, at(10 * n, 0), at(10 * n, 0), 10 * n + 4);
        }
        assert_eq!(past.path(at(5004, SENT), 0), Path::from(at(5004, SENT)));
        assert_eq!(past.path(at(49_994, SENT), 49_990), Path::from(at(49_994, SENT)));
    }

    /// Messages one behind the other are one stretch, as far back as they go.
    #[test]
    fn what_goes_on_is_one_stretch() {
        let mut past = Past::new(3);
        past.note_kernel(at(0, 0), 100);
        for n in 10..5000 {
            let start = at(10 * n, if n == 10 { 0 } else { SENT });
            past.note(SENT, start, start, 10 * n + 10);
        }
        assert_eq!(past.path(at(50_000, SENT), 0), path(&[(50_000, SENT), (100, 0)]));
    }

    /// Iterations that nobody went through are found as if each had been told: those of a stride, of strides in the iterations
    /// of another, and what has gone on since before them.
    #[test]
    fn strides_are_what_they_stand_for() {
        // An iteration: four times a gather and a kernel, and a message of a lane of its own which is as long as the iteration.
        let inner = |past: &mut Past, t: u64| {
            past.note(GATHER, at(t, 0), at(t, 0), t + 3);
            past.note_kernel(at(t + 3, GATHER), t + 10);
        };
        let sent =
            |past: &mut Past, t: u64| past.note(SENT, at(t, if t == 1000 { 0 } else { SENT }), at(t, SENT), t + 50);
        let kernel = |past: &mut Past, t: u64| past.note_kernel(at(t + 40, 0), t + 50);
        let (mut all, mut few) = (Past::new(3), Past::new(3));
        [&mut all, &mut few].into_iter().for_each(|past| past.note_kernel(at(0, 0), 1000));
        for outer in 0..6 {
            let t = 1000 + 50 * outer;
            (0..4).for_each(|n| inner(&mut all, t + 10 * n));
            kernel(&mut all, t);
            sent(&mut all, t);
        }
        for outer in 0..2 {
            let t = 1000 + 50 * outer;
            inner(&mut few, t);
            few.later(t, 30, 10);
            kernel(&mut few, t);
            sent(&mut few, t);
        }
        few.later(1050, 200, 50);
        for ps in 1001..=1300 {
            for lane in [0, GATHER, SENT] {
                // Before the stride there is but one stretch of the kernels' that goes back that far.
                let since = if ps > 1100 { 1010 } else { 0 };
                let [few, all] = [&few, &all].map(|past| past.path(at(ps, lane), since));
                assert_eq!(few, all, "{ps} {lane}");
            }
        }
    }
}
