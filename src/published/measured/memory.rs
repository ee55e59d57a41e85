//! What of a GPU's memory a source counts.

use crate::spec::StackSpec;

/// What a number of bytes is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// What the program has asked its allocator for, at the fullest moment (`torch.cuda.max_memory_allocated`).
    Allocated,
    /// What the allocator has taken of the device (`torch.cuda.max_memory_reserved`): as much, and what lies idle in it, of
    /// which no plan knows.
    Reserved,
    /// All that is taken of the device, as nvidia-smi has it: what the driver and libraries hold besides, too.
    Device,
}

impl Counted {
    pub const WORDS: &str = "allocated, reserved and device";

    pub fn find(word: &str) -> Option<Counted> {
        match word {
            "allocated" => Some(Counted::Allocated),
            "reserved" => Some(Counted::Reserved),
            "device" => Some(Counted::Device),
            _ => None,
        }
    }

    /// GiB that a plan of `bytes` shows.
    pub fn gib(self, bytes: f64, stack: &StackSpec) -> f64 {
        let beside = match self {
            Counted::Allocated | Counted::Reserved => 0.0,
            Counted::Device => stack.reserved_memory.value.value(),
        };
        (bytes + beside) / f64::from(1 << 30)
    }
}
