//! What is trained and how it is cut: the numbers a user types.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F64,
    F32,
    Bf16,
    U32,
}

impl Dtype {
    /// As flags and files have it.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::U32 => "u32",
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::Bf16 => 2,
        }
    }
}

/// One optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Tokens of one sequence.
    pub seq_len: u64,
    /// Sequences of one step, over all ranks.
    pub global_batch: u64,
    /// Sequences that a data-parallel replica handles at a time.
    pub micro_batch: u64,
    /// Of weights and activations. Gradients and optimizer state are at least F32.
    pub dtype: Dtype,
}

/// What the backward pass computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    None,
    /// Keeps the input of every layer and runs the layer's forward pass again.
    Full,
}

impl Recompute {
    pub const ALL: [Recompute; 2] = [Recompute::None, Recompute::Full];

    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Full => "full",
        }
    }
}

/// The degrees of every parallel axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parallelism {
    pub dp: u32,
    /// Ring (context-parallel) degree.
    pub ring: u32,
    /// Ulysses degree, the innermost axis.
    pub ulysses: u32,
    /// 0: every rank keeps all optimizer state. 1: sharded over data and sequence ranks.
    pub zero: u32,
    pub recompute: Recompute,
}

impl Parallelism {
    pub fn ranks(&self) -> u32 {
        self.dp * self.ring * self.ulysses
    }

    /// The name of the way the sequence is split.
    pub fn strategy(&self) -> &'static str {
        match (self.ring, self.ulysses) {
            (1, 1) => "dense",
            (_, 1) => "ring-zigzag",
            (1, _) => "ulysses",
            _ => "usp",
        }
    }
}
