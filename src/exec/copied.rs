//! What a rank's thread copies for its messages, timed where it happens: in a step, with the caches as they are there.

use std::time::Instant;

/// What becomes of the bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// Copied out of memory and handed over.
    Post,
    /// Taken and copied into memory. What a member of a collective has itself is copied as this, too.
    Take,
    /// Taken and added to what is there.
    Add,
}

#[derive(Debug, Clone, Copy)]
pub struct Copied {
    pub how: How,
    pub bytes: u64,
    pub seconds: f64,
}

/// Everything that a rank has copied in a step.
#[derive(Default)]
pub struct Log(pub Vec<Copied>);

impl Log {
    /// Notes a copy that began then and is over.
    pub fn note(&mut self, how: How, bytes: u64, begun: Instant) {
        self.0.push(Copied { how, bytes, seconds: begun.elapsed().as_secs_f64() });
    }
}
