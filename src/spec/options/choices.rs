//! Choices of several ways: of rings, of who carries rows of experts, of how many an expert takes.

use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Which positions of the sequence the ranks of a ring hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum RingLayout {
    /// Rank r has chunks r and 2R-1-r of 2R: causal work is the same everywhere.
    #[default]
    Zigzag,
    /// Rank r has part r of R: the last rank has nearly twice the mean of causal work.
    Contiguous,
    /// Rank r has tokens r, r + R and so on: causal work is equal but for the diagonal, in tiles that are
    /// all cut by it.
    Stripe,
}

/// How a context-parallel rank comes by the keys and values of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum KvPath {
    /// They circulate.
    #[default]
    Ring,
    /// All are gathered before attention begins.
    Gather,
    /// One KV head is gathered after the other, the next while attention runs on one.
    GatherByHead,
}

/// How the outputs of a ring's blocks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum RingMerge {
    /// Each is merged into a running one when it is there.
    #[default]
    EachStep,
    /// All are kept, and summed at the end (TransformerEngine).
    AtEnd,
    /// Kernels go on from a running one.
    InKernel,
}

/// What becomes of logits of 16 bits in the loss, which is taken in the dtype of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum WideLoss {
    /// The loss reads them as they are, and writes their gradient over them.
    #[default]
    Never,
    /// They are copied, the gradient is written over the copy, and that is copied back.
    InPlace,
    /// PyTorch's without a compiler: log-probabilities of the copy, the loss and the gradient of those, and the gradient
    /// of the copy, by a kernel each; three buffers as wide as the copy at a time. Where the vocabulary is shared out,
    /// one kernel, with a gradient beside the copy.
    Copied,
}

/// What travels in a ring's backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum RingBackward {
    /// KV, and behind it dKV in the dtype of sums, which takes P hops to come home (zhuzilin/ring-flash-attention).
    #[default]
    Follow,
    /// KV and dKV in one message of the model's dtype, against the direction of the forward pass: P-1 hops
    /// (TransformerEngine).
    Reverse,
    /// What belongs to queries; K and V stay (BurstAttention).
    Burst,
}

/// How the row of a pipeline's chunks is folded, so that each stage has two of them that lie on one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Fold {
    /// It is not.
    #[default]
    None,
    /// Forward and backward units of both chunks side by side, some gradients of weights put off (DualPipeV).
    DualPipe,
    /// Gradients of weights fill the bubble, with as many activations as 1F1B has on its first stage (ZB-V).
    ZeroBubble,
    /// Half as many activations, and half of 1F1B's bubble (V-Half).
    Half,
    /// A third of the activations, and two thirds of the bubble (V-Min).
    Min,
}

impl Fold {
    /// Whether every backward unit is cut in two.
    pub fn halves(self) -> bool {
        matches!(self, Fold::ZeroBubble | Fold::Half | Fold::Min)
    }
}

/// Who carries the rows of a mixture-of-experts layer to their experts and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Dispatch {
    /// A row for each token and expert in one group of NCCL sends (Megatron-LM's `alltoall`).
    #[default]
    Nccl,
    /// All rows to everyone, and sums scattered back (Megatron-LM's `allgather`).
    AllGather,
    /// DeepEP V1's normal kernels: a row once to a node, from there once to a rank.
    DeepepNormal,
    /// DeepEP V1's low-latency kernels: a message for each token and expert.
    DeepepLowLatency,
    /// DeepEP V2's hybrid kernels: a row once to a node, from there once to a rank.
    DeepepV2,
    /// Its direct ones: a row straight to every rank that it has to reach.
    DeepepV2Direct,
    /// NVIDIA's Hybrid-EP: rows take DeepEP's way, streamed by TMA.
    HybridEp,
    /// Two all-to-alls, between nodes and within (Tutel).
    Hierarchical,
}

impl Dispatch {
    pub const ALL: [Dispatch; 8] = [
        Dispatch::Nccl,
        Dispatch::AllGather,
        Dispatch::DeepepNormal,
        Dispatch::DeepepLowLatency,
        Dispatch::DeepepV2,
        Dispatch::DeepepV2Direct,
        Dispatch::HybridEp,
        Dispatch::Hierarchical,
    ];

    /// As the flag has it.
    pub fn name(self) -> &'static str {
        match self {
            Dispatch::Nccl => "nccl",
            Dispatch::AllGather => "allgather",
            Dispatch::DeepepNormal => "deepep-v1-normal",
            Dispatch::DeepepLowLatency => "deepep-v1-ll",
            Dispatch::DeepepV2 => "deepep-v2",
            Dispatch::DeepepV2Direct => "deepep-v2-direct",
            Dispatch::HybridEp => "hybrid-ep",
            Dispatch::Hierarchical => "hierarchical",
        }
    }
}

impl Serialize for Dispatch {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

/// How many of a rank's tokens an expert takes, and what becomes of room that is left. Factors are hundredths of the
/// even share T k / E of a rank's T tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Capacity {
    /// All that choose it (dropless).
    #[default]
    Unlimited,
    /// ceil(T k / E factor); who comes later is dropped (Switch, Megatron Core's `moe-expert-capacity-factor`).
    Drop(u32),
    /// The same, and every expert gets as many rows of every rank, filled up with zeros
    /// (`moe-pad-expert-input-to-capacity`).
    Pad(u32),
    /// Tutel's k int(factor T / E), filled up.
    Tutel(u32),
    /// Tutel's factor 0: as many as the fullest expert has of any rank, and for a negative one no more than
    /// that factor's capacity; filled up.
    Dynamic(Option<u32>),
}

impl Capacity {
    /// Whether experts that are chosen less get rows of zeros.
    pub fn pads(self) -> bool {
        !matches!(self, Capacity::Unlimited | Capacity::Drop(_))
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let factor = |hundredths: u32| f64::from(hundredths) / 100.0;
        match *self {
            Capacity::Unlimited => f.write_str("none"),
            Capacity::Drop(n) => write!(f, "{}", factor(n)),
            Capacity::Pad(n) => write!(f, "pad:{}", factor(n)),
            Capacity::Tutel(n) => write!(f, "tutel:{}", factor(n)),
            Capacity::Dynamic(None) => f.write_str("tutel:0"),
            Capacity::Dynamic(Some(n)) => write!(f, "tutel:-{}", factor(n)),
        }
    }
}

impl FromStr for Capacity {
    type Err = String;

    fn from_str(text: &str) -> Result<Capacity, String> {
        let known = "write none, a factor of the even share as 1.25 (drop), pad:1.25 (drop and pad), tutel:1.25, tutel:0 \
                     (what the fullest needs) or tutel:-1.25 (the same, at most that factor)";
        let bad = |why: &str| format!("capacity {text:?} {why}; {known}");
        let (rule, number) = text.split_once(':').unwrap_or(("", text));
        if text == "none" {
            return Ok(Capacity::Unlimited);
        }
        let number: f64 = number.parse().map_err(|_| bad("has no number"))?;
        if number.is_nan() || number.abs() > 1000.0 {
            return Err(bad("is beyond 1000"));
        }
        let hundredths = (number.abs() * 100.0).round() as u32;
        if (f64::from(hundredths) / 100.0 - number.abs()).abs() > 1e-9 {
            return Err(bad("has more than two decimals"));
        }
        Ok(match rule {
            "tutel" if hundredths == 0 => Capacity::Dynamic(None),
            "tutel" if number < 0.0 => Capacity::Dynamic(Some(hundredths)),
            "tutel" => Capacity::Tutel(hundredths),
            _ if number <= 0.0 => return Err(bad("is not above 0")),
            "" => Capacity::Drop(hundredths),
            "pad" => Capacity::Pad(hundredths),
            _ => return Err(bad("is of no rule")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_is_what_it_says() {
        let of = |text: &str| text.parse::<Capacity>().unwrap();
        assert_eq!([of("tutel:0"), of("tutel:-1.25")], [Capacity::Dynamic(None), Capacity::Dynamic(Some(125))]);
        assert_eq!(
            [of("1"), of("none"), of("tutel:2")],
            [Capacity::Drop(100), Capacity::Unlimited, Capacity::Tutel(200)]
        );
        assert!(of("pad:1").pads() && !of("1").pads());
        assert!("inf".parse::<Capacity>().is_err() && "nan".parse::<Capacity>().is_err());
    }
}
