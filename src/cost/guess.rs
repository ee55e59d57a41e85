//! The part of the past that can be forgotten: what was over before anything that is likely to come.

/// A guess of the time before which nobody will ask for anything any more: the start of the last few lines, or of an op
/// that was posted and has not ended, if that is earlier. Whoever asks for an earlier time after all is `missed`, and
/// the walk begins again and forgets nothing.
#[derive(Debug, Default)]
pub struct Guess {
    /// The earliest start of what was posted and has not ended, ps, by class; empty where nothing is ever posted, since
    /// there is one program.
    pub posted: Vec<u64>,
    /// The earliest start of each of the last lines, ps, the last one first.
    pub began: [u64; LINES],
}

/// Lines that are looked back: a transfer is posted in the line that it is for, or a few before it.
const LINES: usize = 4;

impl Guess {
    /// The earliest time that a class is likely to ask for.
    pub fn soonest(&self, class: usize) -> u64 {
        let posted = self.posted.get(class).copied().unwrap_or(u64::MAX);
        self.began.iter().fold(posted, |least, &began| least.min(began))
    }

    /// Moves the starts of the last lines `by` ps on.
    pub fn later(&mut self, by: u64) {
        self.began.iter_mut().filter(|began| **began < u64::MAX).for_each(|began| *began += by);
    }
}
