//! When something was over, and what brought it about.

/// A moment in picoseconds and the lane whose op brought it about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Stamp(u64);

impl Stamp {
    /// 2^56 ps are 20 hours: no step takes longer.
    const LANE_BITS: u32 = 8;
    /// Later than all others.
    pub const LAST: Stamp = Stamp(u64::MAX);

    #[inline]
    pub fn new(ps: u64, lane: u16) -> Stamp {
        Stamp(ps << Self::LANE_BITS | u64::from(lane))
    }

    #[inline]
    pub fn ps(self) -> u64 {
        self.0 >> Self::LANE_BITS
    }

    #[inline]
    pub fn lane(self) -> u16 {
        (self.0 & ((1 << Self::LANE_BITS) - 1)) as u16
    }

    #[inline]
    pub fn later(self, by: u64) -> Stamp {
        Stamp(self.0 + (by << Self::LANE_BITS))
    }
}
