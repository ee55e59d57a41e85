//! What can be forgotten: what was over before anything that is likely to come.

/// A guess of what nobody will ask for any more: before the last few lines began, and before what was posted and has not
/// ended. Whoever goes on to ask for it sees `missed`, and goes back to forget nothing.
#[derive(Debug, Default)]
pub struct Guess {
    /// By class, the earliest start of what was posted; empty where nothing is, since there is one program.
    pub posted: Vec<u64>,
    /// The earliest start of each of the last lines, the last first.
    pub began: [u64; LINES],
}

/// Ops of so many lines ago are hardly waited for: a transfer is posted in the line that it is for, or a few before it.
const LINES: usize = 4;

impl Guess {
    /// The earliest time that a class is likely to ask for.
    pub fn soonest(&self, class: usize) -> u64 {
        let posted = self.posted.get(class).copied().unwrap_or(u64::MAX);
        self.began.iter().fold(posted, |least, &began| least.min(began))
    }

    /// All of it is so much later.
    pub fn later(&mut self, by: u64) {
        self.began.iter_mut().filter(|began| **began < u64::MAX).for_each(|began| *began += by);
    }
}
