//! What a gap of the compute lane is charged to, where only stamps tell what was waited for.
//!
//! A kernel waits for an op of another lane, that one for others who take part, or for an op before it, and so on. Time
//! in which bytes were under way is charged to their lane. Time in which someone who takes part had not come yet is
//! charged to what made that one late: kernels of other ranks, or communication of theirs, as when a slow link holds up
//! all of a ring.

use super::stamp::Stamp;

/// Waiting for other ranks is charged to the first lane, the compute lane.
pub const OTHERS: usize = 0;

/// A path back from a moment: the lanes whose ops led there, one stretch of time behind the other, the last first.
/// Entry n is the end of a stretch and its lane; the stretch begins where entry n + 1 ends. Zeros follow the stretch
/// that goes back to the beginning of the step, or as far as was asked. Kernels, and other ranks, count as the first
/// lane. Where several ranks are the last to launch at the same moment, the greatest path stands for all, whichever
/// rank's it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path([Stamp; Path::LONG]);

impl Path {
    /// The most stretches of a path; of a path with that many it is not known when the last one began.
    pub const LONG: usize = 8;

    /// A path of which nothing is known but its end.
    pub fn from(at: Stamp) -> Path {
        let mut path = Path::default();
        path.0[0] = at;
        path
    }

    /// The end of the last stretch.
    pub fn end(&self) -> Stamp {
        self.0[0]
    }

    /// The path and, behind it, a stretch up to `at` on its lane.
    pub fn on_to(&self, at: Stamp) -> Path {
        let mut path = *self;
        if at.ps() > self.end().ps() {
            if at.lane() != self.end().lane() {
                path.0.copy_within(..Path::LONG - 1, 1);
            }
            path.0[0] = at;
        }
        path
    }

    /// Moves the end of the last stretch to `at`.
    pub fn until(&mut self, at: Stamp) {
        self.0[0] = at;
    }

    /// Writes the end of the stretch before the first `stretches` of them; there is room for [`Path::LONG`].
    #[inline]
    pub fn behind(&mut self, stretches: usize, at: Stamp) {
        self.0[stretches] = at;
    }

    /// The path without the stretches that ended at `since` or before.
    pub fn back_to(&self, since: u64) -> Path {
        Path(self.0.map(|at| if at.ps() > since { at } else { Stamp::default() }))
    }

    /// The stretches, the last first: when each began (`None`: not known), when it was over, ps, and its lane.
    fn stretches(&self) -> impl Iterator<Item = (Option<u64>, u64, usize)> {
        let from = self.0[1..].iter().map(|at| Some(at.ps())).chain([None]);
        let all = self.0.iter().zip(from).map(|(to, from)| (from, to.ps(), to.lane() as usize));
        all.take_while(|(_, to, _)| *to > 0)
    }

    /// Charges the time from `free` to the end of the path to lanes: picoseconds are added to `waited`, which has an
    /// entry for each lane and one for the CPU behind them.
    pub fn charge(&self, waited: &mut [u64], free: u64) {
        let mut all = self.0.iter().take_while(|at| at.ps() > free).peekable();
        while let Some(until) = all.next() {
            waited[until.lane() as usize] += until.ps().saturating_sub(all.peek().map_or(free, |at| at.ps()));
        }
    }

    /// The lane that has made late whoever launched at the end of this path, when others have waited since `since`: the
    /// one on which more than half of the time since went, as far as that is known. Where there is none, other ranks'
    /// work as a whole, which is the first lane.
    ///
    /// It is not the lane that was waited for last: a rank that comes a second late has lost it a little at a time, as
    /// when the rows of its experts cross a network, and those of the others do not.
    pub fn made_late(&self, since: u64) -> u16 {
        let count = self.0.iter().take_while(|at| at.ps() > since).count();
        // Where a path has as many stretches as it can, nothing is known of how long the last one was.
        let known = count.min(Path::LONG - 1);
        let from = self.0[known].ps().max(since);
        let all = self.end().ps().saturating_sub(from);
        // Nobody has waited: the lane of the last stretch.
        if all == 0 {
            return self.end().lane();
        }
        let took = |n: usize| self.0[n].ps() - self.0[n + 1].ps().max(since);
        // Mostly that lane has more than half of the time.
        if 2 * took(0) > all {
            return self.end().lane();
        }
        let on = |lane: u16| (0..known).filter(|&n| self.0[n].lane() == lane).map(took).sum::<u64>();
        let most = (0..known).map(|n| self.0[n].lane()).find(|&lane| 2 * on(lane) > all);
        most.unwrap_or(OTHERS as u16)
    }

    /// Moves the path to the end of a stride, `by` ps later, of iterations that are each `d` later than the one before.
    /// What led there in the last iteration that was walked moves on with it; a stretch that had gone on for longer
    /// than an iteration keeps its beginning.
    pub fn later(&mut self, by: u64, d: u64) {
        let goes_on = self.stretches().position(|(from, to, _)| from.is_some_and(|from| to - from > d));
        let those = goes_on.map_or(Path::LONG, |at| at + 1);
        self.0[..those].iter_mut().filter(|at| at.ps() > 0).for_each(|at| *at = at.later(by));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(stamps: &[(u64, u16)]) -> Path {
        stamps.iter().rev().fold(Path::default(), |path, &(ps, lane)| path.on_to(Stamp::new(ps, lane)))
    }

    /// From 100 on 30 ps of the second lane, 50 of kernels, 45 of the second, 20 of a kernel, 5 of the third: nothing has more
    /// than half of all that.
    #[test]
    fn what_made_somebody_late() {
        let late = path(&[(250, 2), (245, 0), (225, 1), (180, 0), (150, 0), (130, 1), (100, 0)]);
        assert_eq!([100, 170, 180, 215, 248].map(|since| late.made_late(since)), [0, 1, 1, 0, 2]);
        assert_eq!(late.made_late(250), 2);
        for since in [100, 170, 180, 215, 248] {
            assert_eq!(late.back_to(since).made_late(since), late.made_late(since));
        }
        // What nobody knows of is that lane's, and the CPU's.
        assert_eq!(Path::from(Stamp::new(60, 1)).made_late(10), 1);
        assert_eq!(Path::from(Stamp::new(60, 3)).made_late(10), 3);
        assert_eq!(Path::default().made_late(0), 0);
    }

    /// However long ago it is, a path is a few stretches, and of the last of them only its end is known.
    #[test]
    fn a_path_is_no_longer_than_is_known() {
        let all: Vec<(u64, u16)> = (1..40).rev().flat_map(|n| [(10 * n + 10, 1), (10 * n + 4, 0)]).collect();
        let path = path(&all);
        assert_eq!((path.stretches().count(), path.made_late(0), path.made_late(398)), (Path::LONG, 1, 1));
        assert_eq!(path.stretches().last(), Some((None, 364, 0)));
        // What is not known of is charged all the same.
        let mut waited = [0; 2];
        path.charge(&mut waited, 100);
        assert_eq!(waited, [4 * 3 + 264, 4 * 6]);
        // Told from its end, it is the same.
        let mut told = Path::default();
        all[..Path::LONG].iter().enumerate().for_each(|(n, &(ps, lane))| told.behind(n, Stamp::new(ps, lane)));
        assert_eq!(told, path);
    }

    /// Messages one behind the other are one stretch.
    #[test]
    fn what_goes_on_is_one_stretch() {
        let sent: Vec<(u64, u16)> = (10..30).rev().map(|n| (10 * n + 10, 2)).chain([(100, 0)]).collect();
        assert_eq!(path(&sent).stretches().collect::<Vec<_>>(), [(Some(100), 300, 2), (Some(0), 100, 0)]);
    }

    /// After a stride all is later, but for what has gone on for longer than an iteration, and what was before it.
    #[test]
    fn a_stride_leaves_what_goes_on() {
        let mut long = path(&[(100, 2), (95, 0), (20, 1)]);
        long.later(300, 30);
        assert_eq!(long, path(&[(400, 2), (395, 0), (20, 1)]));
        let mut short = path(&[(100, 2), (95, 0), (80, 1), (70, 0), (66, 2), (64, 0)]);
        short.later(300, 40);
        assert_eq!(short, path(&[(400, 2), (395, 0), (380, 1), (370, 0), (366, 2), (364, 0)]));
    }
}
