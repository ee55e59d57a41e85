//! What of a GPU's memory a source counts.

use super::case::Training;
use crate::spec::StackSpec;

/// What a number of bytes is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// What the program has asked its allocator for, at the fullest moment (`torch.cuda.max_memory_allocated`).
    Allocated,
    /// All that is taken of the device, as nvidia-smi has it: what the driver and libraries hold besides, too.
    Device,
}

impl Counted {
    /// As the source says; what it does not say is what frameworks print, the allocator's.
    pub fn of(run: &Training) -> Counted {
        match run.mem_kind.as_str() {
            "device" => Counted::Device,
            _ => Counted::Allocated,
        }
    }

    /// GiB that a plan of `bytes` shows.
    pub fn gib(self, bytes: f64, stack: &StackSpec) -> f64 {
        let beside = match self {
            Counted::Allocated => 0.0,
            Counted::Device => stack.reserved_memory.value.value(),
        };
        (bytes + beside) / f64::from(1 << 30)
    }
}
