//! What a rank does with its share of a run, by the words of its source: in which numbers it computes ([`precision`]) and adds up
//! ([`gradients`]), what it makes again ([`recompute`]), goes through piece by piece or keeps in the host's memory ([`savings`]), and
//! which weights it leaves as they are ([`tuning`]). Most become words of options of the split.

pub mod gradients;
pub mod precision;
pub mod recompute;
pub mod savings;
pub mod tuning;
