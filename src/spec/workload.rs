//! What is trained and how it is cut: the numbers a user types.

use super::{Documents, Fold, KvPath, Options, RingLayout};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F64,
    F32,
    Bf16,
    U32,
    /// A yes or a no.
    U8,
}

impl Dtype {
    /// As flags and files have it.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::U32 => "u32",
            Dtype::U8 => "u8",
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::Bf16 => 2,
            Dtype::U8 => 1,
        }
    }
}

/// One optimizer step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Packed into every sequence: a token attends within its document, and positions begin anew in each. The last
    /// token of a document predicts the first of the next, as packed training without a loss mask has it.
    #[serde(default, skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
}

/// What the backward pass computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    None,
    /// Keeps what is dear to compute, not what is dear to keep (Korthikanti et al., arXiv:2205.05198): the scores of
    /// attention are made again. A fused kernel keeps none, and yet runs again, as in Megatron-LM
    /// (`--recompute-activations`), for nothing.
    Selective,
    /// Keeps the input of every layer and runs the layer's forward pass again.
    Full,
}

impl Recompute {
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];

    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
        }
    }

    pub fn named(name: &str) -> Option<Recompute> {
        Recompute::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// How a step is cut over ranks. The default is one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parallelism {
    pub dp: u32,
    /// Pipeline stages, and virtual stages of each.
    pub pp: u32,
    pub vp: u32,
    /// Ring (context-parallel) degree.
    pub ring: u32,
    pub ulysses: u32,
    /// Tensor-parallel degree, the innermost axis.
    pub tp: u32,
    pub ep: u32,
    /// 0: every rank keeps all optimizer state. 1: it is sharded over the ranks that hold the same weights;
    /// 2: gradients too; 3: weights too.
    pub zero: u32,
    pub recompute: Recompute,
    pub options: Options,
}

impl Default for Parallelism {
    fn default() -> Parallelism {
        Parallelism {
            dp: 1,
            pp: 1,
            vp: 1,
            ring: 1,
            ulysses: 1,
            tp: 1,
            ep: 1,
            zero: 0,
            recompute: Recompute::None,
            options: Options::default(),
        }
    }
}

impl Parallelism {
    /// Ranks in all. Experts are spread over ranks that the other degrees have made.
    pub fn ranks(&self) -> u32 {
        self.dp * self.model_ranks()
    }

    /// What tables and pictures call who carries rows to experts.
    pub fn carrier(&self) -> &'static str {
        if self.ep > 1 { self.options.dispatch.name() } else { "nothing travels" }
    }

    /// Some backward units of a pipeline make gradients of weights apart from those of inputs, and later: those that
    /// have nothing to compute again.
    pub fn cuts_some(&self) -> bool {
        self.options.fold == Fold::DualPipe && self.recompute != Recompute::Full
    }

    /// All of them do.
    pub fn cuts_all(&self) -> bool {
        self.options.zb_h1 || self.options.fold.halves()
    }

    /// Ranks that work on one sequence.
    pub fn model_ranks(&self) -> u32 {
        self.pp * self.ring * self.ulysses * self.tp
    }

    /// The name of the way the sequence is split; where it is not, of the kind of model: a `mixture` of experts or none.
    pub fn strategy(&self, mixture: bool) -> &'static str {
        let gathers = self.options.kv != KvPath::Ring;
        match (self.ring, self.ulysses) {
            (1, 1) if mixture => "moe",
            (1, 1) => "dense",
            (1, _) => "ulysses",
            (_, 1) if gathers => "allgather-kv",
            _ if gathers => "ulysses+allgather-kv",
            (_, 1) => match self.options.layout {
                RingLayout::Zigzag => "ring-zigzag",
                RingLayout::Contiguous => "ring-contiguous",
                RingLayout::Stripe => "ring-stripe",
            },
            _ => "usp",
        }
    }
}
