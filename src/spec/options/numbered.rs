//! Every option that ends in a number of the user's.

use super::{Capacity, Options};

/// A choice whose word is a beginning and what the user puts behind it.
pub struct Numbered {
    pub start: &'static str,
    /// What stands behind the beginning, for help texts.
    pub ends_in: &'static str,
    pub about: &'static str,
    /// Takes what stands behind the beginning. Errors: it is no such number, with the remedy.
    pub(super) set: fn(&mut Options, &str) -> Result<(), String>,
    /// What stands behind the beginning; `None` where the choice is as the default has it.
    pub(super) said: fn(&Options) -> Option<String>,
}

/// A number above `least` of what `of` says, else an error that writes `word` for an example.
fn above(least: u32, n: &str, of: &str, word: &str) -> Result<u32, String> {
    let wrong = || format!("{n:?} is no number of {of} above {least}; write {word}");
    n.parse().ok().filter(|n| *n > least).ok_or_else(wrong)
}

fn layers(n: &str, word: &str) -> Result<Option<u16>, String> {
    n.parse().map(Some).map_err(|_| format!("{n:?} is no number of layers; write {word}"))
}

fn unless_zero(n: u32) -> Option<String> {
    (n > 0).then(|| n.to_string())
}

/// Every such choice, in the order in which a set of options is written.
pub const NUMBERED: &[Numbered] = &[
    Numbered {
        start: "replicas-",
        ends_in: "N",
        about: "N slots of experts beyond one for each, which EPLB gives to those with most rows; as --replicas",
        set: |o, n| above(0, n, "slots", "replicas-32").map(|n| o.replicas = n),
        said: |o| unless_zero(o.replicas),
    },
    Numbered {
        start: "shard-",
        ends_in: "N",
        about: "ZeRO among N neighbouring ranks that hold the same weights, sums going on to the other groups of N (hybrid sharding: FSDP's HYBRID_SHARD, MiCS, Megatron-LM's num-distributed-optimizer-instances)",
        set: |o, n| above(1, n, "ranks", "shard-8").map(|n| o.shard = n),
        said: |o| unless_zero(o.shard),
    },
    Numbered {
        start: "first-stage-",
        ends_in: "N",
        about: "pipeline: N layers on the first stage, the others sharing the rest (Megatron-LM's decoder-first-pipeline-num-layers); of a pipeline in a V those of its first chunk",
        set: |o, n| layers(n, "first-stage-5").map(|n| o.first_stage = n),
        said: |o| o.first_stage.map(|n| n.to_string()),
    },
    Numbered {
        start: "last-stage-",
        ends_in: "N",
        about: "the same of the last stage; of a pipeline in a V of its last chunk, which the first stage has as well",
        set: |o, n| layers(n, "last-stage-5").map(|n| o.last_stage = n),
        said: |o| o.last_stage.map(|n| n.to_string()),
    },
    Numbered {
        start: "stages-",
        ends_in: "N",
        about: "pipeline: layers of every stage, as stages-2.2.3.3.4.4.4.2, or stages-2x10.3x20.2x2 for 10 stages of 2 layers, 20 of 3 and 2 of 2 (Yuan 2.0); with vp of every chunk, the first of every stage before the second of any",
        set: |o, layers| layers.parse().map(|layers| o.stages = layers),
        said: |o| (!o.stages.is_empty()).then(|| o.stages.to_string()),
    },
    Numbered {
        start: "capacity-",
        ends_in: "HOW",
        about: "what an expert takes of a rank's tokens: 1.25, pad:1.25, tutel:1.25 or tutel:0; as --capacity",
        set: |o, how| how.parse().map(|how| o.capacity = how),
        said: |o| (o.capacity != Capacity::Unlimited).then(|| o.capacity.to_string()),
    },
    Numbered {
        start: "shadow-",
        ends_in: "N",
        about: "every rank computes the N hottest experts for itself, their weights being broadcast; as --shadow",
        set: |o, n| above(0, n, "experts", "shadow-2").map(|n| o.shadow = n),
        said: |o| unless_zero(o.shadow),
    },
    Numbered {
        start: "loss-chunks-",
        ends_in: "N",
        about: "head and loss in N pieces of a microbatch: logits and their gradient are those of one piece at a time (Liger's fused linear cross-entropy, torchtune's chunked loss)",
        set: |o, n| above(1, n, "pieces", "loss-chunks-8").map(|n| o.loss_chunks = n),
        said: |o| unless_zero(o.loss_chunks),
    },
    Numbered {
        start: "mlp-chunks-",
        ends_in: "N",
        about: "feed-forward networks in N pieces of a microbatch, each made again in the backward pass: gate, up and activation are those of one piece at a time (Arctic's TiledMLP)",
        set: |o, n| above(1, n, "pieces", "mlp-chunks-8").map(|n| o.mlp_chunks = n),
        said: |o| unless_zero(o.mlp_chunks),
    },
];
