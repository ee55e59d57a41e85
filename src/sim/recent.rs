//! What led to each op that is over, for an interpreter that goes through ops in the order of time: an op that is
//! launched has waited for one that was over just now.
//!
//! An op is told what led to it when it is launched, and keeps that. By the time it is over much else may be over, some
//! of it long ago.

use crate::act::stamp::Stamp;
use crate::act::waits::{OTHERS, Path};

/// The paths that led to the last few ops of every lane that took time, and to the end of kernels with no gap between
/// them.
#[derive(Debug, Clone)]
pub struct Recent {
    lanes: Vec<[Path; Recent::FEW]>,
    /// Where the next path of each lane goes.
    next: Vec<u8>,
}

impl Recent {
    const FEW: usize = 4;

    pub fn new(lanes: usize) -> Recent {
        Recent { lanes: vec![[Path::default(); Recent::FEW]; lanes], next: vec![0; lanes] }
    }

    /// Notes an op of `lane`: the path `launched` led to its launch, it went on when all who take part were `ready`,
    /// and it is over at `end`. The lane of `ready` is what made the last of them late.
    pub fn note(&mut self, lane: u16, launched: &Path, ready: Stamp, end: u64) {
        if end > launched.end().ps() {
            let next = &mut self.next[lane as usize];
            self.lanes[lane as usize][*next as usize] = launched.on_to(ready).on_to(Stamp::new(end, lane));
            *next = (*next + 1) % Self::FEW as u8;
        }
    }

    /// Notes a kernel: the path `launched` led to its launch, and it is over at `end`.
    pub fn note_kernel(&mut self, launched: &Path, end: u64) {
        let last = (self.next[OTHERS] as usize + Self::FEW - 1) % Self::FEW;
        let last = &mut self.lanes[OTHERS][last];
        match last.end().ps() == launched.end().ps() && last.end().ps() > 0 {
            true => last.until(Stamp::new(end, OTHERS as u16)),
            false => self.note(OTHERS as u16, launched, launched.end(), end),
        }
    }

    /// The path that led to the op that is over at `at`.
    pub fn path(&self, at: Stamp) -> Path {
        let known = self.lanes.get(at.lane() as usize).and_then(|own| own.iter().find(|path| path.end() == at));
        known.copied().unwrap_or_else(|| Path::from(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes between an op's launch and its end does not change what led to it.
    #[test]
    fn an_op_keeps_what_led_to_it() {
        let mut recent = Recent::new(3);
        let at = |ps, lane| Stamp::new(ps, lane);
        recent.note_kernel(&Path::default(), 10);
        recent.note(1, &recent.path(at(10, 0)).clone(), at(10, 0), 40);
        let launched = recent.path(at(40, 1));
        for n in 0..100 {
            let kernel = recent.path(at(40 + 10 * n, u16::from(n == 0)));
            recent.note_kernel(&kernel, 50 + 10 * n);
            recent.note(1, &recent.path(at(50 + 10 * n, 0)).clone(), at(50 + 10 * n, 0), 55 + 10 * n);
        }
        recent.note(2, &launched, at(60, 1), 1100);
        let wanted = Path::default().on_to(at(10, 0)).on_to(at(60, 1)).on_to(at(1100, 2));
        assert_eq!(recent.path(at(1100, 2)), wanted);
        // Kernels with no gap between them are one stretch.
        assert_eq!(recent.path(at(1040, 0)), Path::default().on_to(at(10, 0)).on_to(at(40, 1)).on_to(at(1040, 0)));
        assert_eq!(recent.path(at(1041, 0)), Path::from(at(1041, 0)), "nothing was over then");
    }
}
