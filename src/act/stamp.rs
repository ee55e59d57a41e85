//! When something was over, and what brought it about.

use crate::error::{Cause, Result};

/// A moment in picoseconds and the lane whose op brought it about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Stamp(u64);

impl Stamp {
    const LANE_BITS: u32 = 8;
    /// The latest moment, 2^56 ps (20 hours): later ones count as this, and no step that takes so long is told
    /// ([`in_time`]).
    pub const LIMIT: u64 = (1 << (64 - Self::LANE_BITS)) - 1;
    /// The latest moment in whole hours.
    pub const HOURS: u64 = Self::LIMIT / 1_000_000_000_000 / 3600;
    /// Later than all others.
    pub const LAST: Stamp = Stamp(u64::MAX);

    #[inline]
    pub fn new(ps: u64, lane: u16) -> Stamp {
        Stamp(ps.min(Self::LIMIT) << Self::LANE_BITS | u64::from(lane))
    }

    #[inline]
    pub fn ps(self) -> u64 {
        self.0 >> Self::LANE_BITS
    }

    #[inline]
    pub fn lane(self) -> u16 {
        (self.0 & ((1 << Self::LANE_BITS) - 1)) as u16
    }

    /// The end, at `ps`, of an op of `lane` that was launched at this stamp: an op that took no time has made nobody
    /// wait, and leaves the stamp as it is.
    #[inline]
    pub fn or_later(self, ps: u64, lane: u16) -> Stamp {
        if ps > self.ps() { Stamp::new(ps, lane) } else { self }
    }

    #[inline]
    pub fn later(self, by: u64) -> Stamp {
        Stamp::new(self.ps().saturating_add(by), self.lane())
    }
}

/// Refuses a step that is longer than can be told. Errors: `ps` is at [`Stamp::LIMIT`] or beyond.
pub fn in_time(ps: u64) -> Result<()> {
    if ps < Stamp::LIMIT {
        return Ok(());
    }
    Err(Cause::Time.infeasible(format!(
        "a step of more than {} hours; use a smaller global_batch, shorter sequences or more GPUs",
        Stamp::HOURS
    )))
}
