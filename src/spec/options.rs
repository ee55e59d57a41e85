//! Choices of an implementation: what changes bytes, overlap or memory while every degree stays the same.
//!
//! A choice is written as a word, and a set of them as words joined by `+`, in files, flags and columns
//! alike: `stripe+dkv-model`. What is not named is as the default has it, whose name is `default`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
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
    DeepepV2,
    /// NVIDIA's Hybrid-EP: rows take DeepEP's way, streamed by TMA.
    HybridEp,
    /// Two all-to-alls, between nodes and within (Tutel).
    Hierarchical,
}

impl Dispatch {
    pub const ALL: [Dispatch; 7] = [
        Dispatch::Nccl,
        Dispatch::AllGather,
        Dispatch::DeepepNormal,
        Dispatch::DeepepLowLatency,
        Dispatch::DeepepV2,
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
            Dispatch::HybridEp => "hybrid-ep",
            Dispatch::Hierarchical => "hierarchical",
        }
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

/// Everything that [`WORDS`] can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Options {
    pub layout: RingLayout,
    pub kv: KvPath,
    /// Tensor-parallel ranks keep whole activations between their products, instead of the sequence
    /// parallelism of Korthikanti et al. (arXiv:2205.05198).
    pub whole_activations: bool,
    pub merge: RingMerge,
    pub ring_backward: RingBackward,
    /// A ring sends K and V as two messages.
    pub kv_in_two: bool,
    /// A ring's gradients take turns with KV on one communicator.
    pub one_comm: bool,
    /// Ranks of an inner ring, in a ring of such rings (LoongTrain); 0: one ring.
    pub double_ring: u32,
    /// In the hybrid of both, neighbouring ranks make a ring and Ulysses exchanges across rings; by default
    /// neighbouring ranks exchange, as TransformerEngine's `a2a+p2p` and USP's `use_ulysses_low` have it.
    pub ring_inside: bool,
    /// The products of a layer take operands rounded to FP8; everything else stays as it is.
    pub fp8: bool,
    /// Ulysses exchanges q, k and v one after the other, in place of one message.
    pub a2a_separate: bool,
    /// A KV head that several Ulysses ranks need travels once, and they gather it.
    pub replicate_after: bool,
    /// Heads of zeros make up what Ulysses cannot divide.
    pub pad_heads: bool,
    /// The first and the last stage of a pipeline have one layer less, beside embedding and head, as Llama-3 has.
    pub short_ends: bool,
    /// Tensor-parallel ranks gather and sum the residual stream in chunks of rows, beside the products.
    pub tp_overlap: bool,
    /// Attention writes its scores to memory, as before FlashAttention.
    pub unfused: bool,
    /// ZeRO 2 and 3 have room for one layer's whole weights and gradient, not for the next one's beside it.
    pub no_prefetch: bool,
    /// ZeRO shares out among so many neighbouring ranks, and other groups of as many have copies; 0: among all.
    pub shard: u32,
    /// ZeRO 3: gradients add up whole, and are scattered behind the last microbatch.
    pub no_sync: bool,
    /// Gradients are summed over the replicas when all of the backward pass is over, and not layer by layer behind it.
    pub no_overlap_grad: bool,
    /// CPU and GPU wait for what passes between stages of a pipeline.
    pub no_overlap_p2p: bool,
    /// The CPU waits for the GPU behind every forward and every backward pass of a microbatch.
    pub wait_passes: bool,
    /// The gradient of a weight is a product of its own, which another kernel adds to the sum over microbatches.
    pub add_grads: bool,
    /// Logits are copied to the dtype of sums for the loss, and their gradient is copied back.
    pub wide_loss: bool,
    pub dispatch: Dispatch,
    /// Rows travel to their experts in FP8, with a scale every 128 elements; back they travel as they are.
    pub dispatch_fp8: bool,
    /// Experts that every token visits compute while rows travel.
    pub overlap_shared: bool,
    /// Rows of one microbatch travel beside the compute of another.
    pub overlap_exchange: bool,
    /// Low-latency kernels send, return, and receive when asked.
    pub deepep_hook: bool,
    /// Inputs of layers that are kept to compute them again are kept in the host's memory.
    pub offload_activations: bool,
    /// Optimizer state is in the host's memory, and the CPU runs Adam.
    pub offload_optimizer: bool,
    /// Layers go through the sequence in so many chunks, keys and values waiting in the host's memory (FPDT); 0: at once.
    pub chunks: u32,
    /// Slots of experts beyond one for each, placed and given out by EPLB.
    pub replicas: u32,
    pub capacity: Capacity,
}

/// A choice other than the default.
pub struct Word {
    pub name: &'static str,
    /// For help texts.
    pub about: &'static str,
    set: fn(&mut Options),
    is_set: fn(&Options) -> bool,
}

/// Every word that is understood.
pub const WORDS: &[Word] = &[
    Word {
        name: "no-sp",
        about: "tensor parallelism without sequence parallelism: all-reduce, whole activations",
        set: |o| o.whole_activations = true,
        is_set: |o| o.whole_activations,
    },
    Word {
        name: "tp-overlap",
        about: "tensor parallelism gathers and sums rows in chunks beside the products (Transformer Engine's userbuffers)",
        set: |o| o.tp_overlap = true,
        is_set: |o| o.tp_overlap,
    },
    Word {
        name: "contiguous",
        about: "context-parallel ranks hold consecutive parts of the sequence, not zigzag's two chunks",
        set: |o| o.layout = RingLayout::Contiguous,
        is_set: |o| o.layout == RingLayout::Contiguous,
    },
    Word {
        name: "gather-kv",
        about: "context-parallel ranks gather all KV before attention, in place of a ring",
        set: |o| o.kv = KvPath::Gather,
        is_set: |o| o.kv == KvPath::Gather,
    },
    Word {
        name: "gather-kv-prefetch",
        about: "the same, KV head by KV head, the next being gathered while attention runs on one",
        set: |o| o.kv = KvPath::GatherByHead,
        is_set: |o| o.kv == KvPath::GatherByHead,
    },
    Word {
        name: "stripe",
        about: "context-parallel ranks take the tokens of the sequence in turn (Striped Attention)",
        set: |o| o.layout = RingLayout::Stripe,
        is_set: |o| o.layout == RingLayout::Stripe,
    },
    Word {
        name: "dkv-model",
        about: "a ring's dKV travels in the model's dtype, in one message with KV, over P-1 hops (TransformerEngine)",
        set: |o| o.ring_backward = RingBackward::Reverse,
        is_set: |o| o.ring_backward == RingBackward::Reverse,
    },
    Word {
        name: "burst",
        about: "backward, KV stay and q, do, lse and delta travel round the ring, dq behind them (BurstAttention)",
        set: |o| o.ring_backward = RingBackward::Burst,
        is_set: |o| o.ring_backward == RingBackward::Burst,
    },
    Word {
        name: "kv-in-two",
        about: "a ring sends KV, and dKV, as two messages of one group",
        set: |o| o.kv_in_two = true,
        is_set: |o| o.kv_in_two,
    },
    Word {
        name: "one-comm",
        about: "a ring's KV and its gradients take turns on one communicator (as in ring-flash-attention)",
        set: |o| o.one_comm = true,
        is_set: |o| o.one_comm,
    },
    Word {
        name: "merge-at-end",
        about: "a ring keeps every block's output and sums them at the end (TransformerEngine, which keeps every KV too)",
        set: |o| o.merge = RingMerge::AtEnd,
        is_set: |o| o.merge == RingMerge::AtEnd,
    },
    Word {
        name: "merge-in-kernel",
        about: "a ring's kernels go on from running sums: nothing is merged or rounded between blocks",
        set: |o| o.merge = RingMerge::InKernel,
        is_set: |o| o.merge == RingMerge::InKernel,
    },
    Word {
        name: "double-ring-2",
        about: "a ring of rings of 2 ranks: KV goes round a window of ranks while that of the next comes (LoongTrain)",
        set: |o| o.double_ring = 2,
        is_set: |o| o.double_ring == 2,
    },
    Word {
        name: "double-ring-4",
        about: "the same with rings of 4 ranks",
        set: |o| o.double_ring = 4,
        is_set: |o| o.double_ring == 4,
    },
    Word {
        name: "double-ring-8",
        about: "the same with rings of 8 ranks",
        set: |o| o.double_ring = 8,
        is_set: |o| o.double_ring == 8,
    },
    Word {
        name: "ring-inside",
        about: "ring and Ulysses together: neighbouring ranks make the ring, Ulysses goes across nodes",
        set: |o| o.ring_inside = true,
        is_set: |o| o.ring_inside,
    },
    Word {
        name: "fp8",
        about: "products of the layers on operands rounded to FP8 (E4M3, a scale every 128)",
        set: |o| o.fp8 = true,
        is_set: |o| o.fp8,
    },
    Word {
        name: "a2a-separate",
        about: "Ulysses exchanges q, k and v in an all-to-all each, the next being packed meanwhile",
        set: |o| o.a2a_separate = true,
        is_set: |o| o.a2a_separate,
    },
    Word {
        name: "replicate-after",
        about: "a KV head that several Ulysses ranks need travels once, and is gathered by these neighbours",
        set: |o| o.replicate_after = true,
        is_set: |o| o.replicate_after,
    },
    Word {
        name: "pad-heads",
        about: "heads of zeros are added where Ulysses does not divide the heads",
        set: |o| o.pad_heads = true,
        is_set: |o| o.pad_heads,
    },
    Word {
        name: "short-ends",
        about: "pipeline: the first and the last stage have one layer less than the others",
        set: |o| o.short_ends = true,
        is_set: |o| o.short_ends,
    },
    Word {
        name: "unfused",
        about: "attention as products and a softmax on matrices of scores in memory, as before FlashAttention",
        set: |o| o.unfused = true,
        is_set: |o| o.unfused,
    },
    Word {
        name: "no-prefetch",
        about: "ZeRO 2 and 3: one layer's gathered weights and gradient at a time, none ahead or behind",
        set: |o| o.no_prefetch = true,
        is_set: |o| o.no_prefetch,
    },
    Word {
        name: "no-sync",
        about: "ZeRO 3: gradients add up whole over microbatches and are scattered behind the last (PyTorch FSDP's no_sync, as its pipeline schedules use it)",
        set: |o| o.no_sync = true,
        is_set: |o| o.no_sync,
    },
    Word {
        name: "no-overlap-grad",
        about: "gradients are summed behind the whole backward pass (Megatron-LM without overlap-grad-reduce)",
        set: |o| o.no_overlap_grad = true,
        is_set: |o| o.no_overlap_grad,
    },
    Word {
        name: "no-overlap-p2p",
        about: "pipeline: CPU and GPU wait for what a stage sends and receives, interleaved the CPU for what it receives (Megatron-LM without overlap-p2p)",
        set: |o| o.no_overlap_p2p = true,
        is_set: |o| o.no_overlap_p2p,
    },
    Word {
        name: "wait-passes",
        about: "the CPU waits for the GPU behind every pass of a microbatch (Megatron-LM's timers until 2022)",
        set: |o| o.wait_passes = true,
        is_set: |o| o.wait_passes,
    },
    Word {
        name: "add-grads",
        about: "a weight's gradient is written by its product, and added to those of other microbatches by another kernel (Megatron-LM without gradient-accumulation-fusion)",
        set: |o| o.add_grads = true,
        is_set: |o| o.add_grads,
    },
    Word {
        name: "wide-loss",
        about: "logits are made fp32 before the loss, and their gradient is made bf16 again behind it (`logits.float()`)",
        set: |o| o.wide_loss = true,
        is_set: |o| o.wide_loss,
    },
    Word {
        name: "dispatch-allgather",
        about: "experts: all rows are gathered everywhere, sums are scattered back (Megatron's allgather)",
        set: |o| o.dispatch = Dispatch::AllGather,
        is_set: |o| o.dispatch == Dispatch::AllGather,
    },
    Word {
        name: "dispatch-deepep-v1-normal",
        about: "experts: a row goes once to a node, from there once to a rank; summed in the node (DeepEP V1)",
        set: |o| o.dispatch = Dispatch::DeepepNormal,
        is_set: |o| o.dispatch == Dispatch::DeepepNormal,
    },
    Word {
        name: "dispatch-deepep-v1-ll",
        about: "experts: a message for each token and expert (DeepEP V1, low latency)",
        set: |o| o.dispatch = Dispatch::DeepepLowLatency,
        is_set: |o| o.dispatch == Dispatch::DeepepLowLatency,
    },
    Word {
        name: "deepep-hook",
        about: "experts: DeepEP's low-latency kernels leave the SMs to others while rows travel (return_recv_hook)",
        set: |o| o.deepep_hook = true,
        is_set: |o| o.deepep_hook,
    },
    Word {
        name: "dispatch-deepep-v2",
        about: "experts: DeepEP V2, hybrid over scale-out and scale-up",
        set: |o| o.dispatch = Dispatch::DeepepV2,
        is_set: |o| o.dispatch == Dispatch::DeepepV2,
    },
    Word {
        name: "dispatch-hybrid-ep",
        about: "experts: a row once to a node, from there once to a rank, streamed by TMA (NVIDIA's Hybrid-EP)",
        set: |o| o.dispatch = Dispatch::HybridEp,
        is_set: |o| o.dispatch == Dispatch::HybridEp,
    },
    Word {
        name: "dispatch-hierarchical",
        about: "experts: two all-to-alls, between nodes and within (Tutel's 2DH)",
        set: |o| o.dispatch = Dispatch::Hierarchical,
        is_set: |o| o.dispatch == Dispatch::Hierarchical,
    },
    Word {
        name: "dispatch-fp8",
        about: "experts: rows travel there in FP8 with a scale every 128 elements",
        set: |o| o.dispatch_fp8 = true,
        is_set: |o| o.dispatch_fp8,
    },
    Word {
        name: "overlap-shared",
        about: "experts that every token visits compute while rows travel to the others and back",
        set: |o| o.overlap_shared = true,
        is_set: |o| o.overlap_shared,
    },
    Word {
        name: "overlap-exchange",
        about: "experts: a layer forward in one microbatch and one backward in another by turns, so that rows travel beside compute (DualPipe, Megatron Core's 1F1B overlap)",
        set: |o| o.overlap_exchange = true,
        is_set: |o| o.overlap_exchange,
    },
    Word {
        name: "offload-activations",
        about: "with full recomputation, the inputs of layers wait in the CPUs' memory and come back one layer ahead",
        set: |o| o.offload_activations = true,
        is_set: |o| o.offload_activations,
    },
    Word {
        name: "offload-optimizer",
        about: "optimizer state in the CPUs' memory: gradients go there, the CPU runs Adam, weights come back (ZeRO-Offload)",
        set: |o| o.offload_optimizer = true,
        is_set: |o| o.offload_optimizer,
    },
    Word {
        name: "fpdt-2",
        about: "layers go through the sequence in 2 chunks, keys and values waiting in the CPUs' memory (FPDT, Ulysses-Offload)",
        set: |o| o.chunks = 2,
        is_set: |o| o.chunks == 2,
    },
    Word { name: "fpdt-4", about: "the same in 4 chunks", set: |o| o.chunks = 4, is_set: |o| o.chunks == 4 },
    Word { name: "fpdt-8", about: "the same in 8 chunks", set: |o| o.chunks = 8, is_set: |o| o.chunks == 8 },
    Word { name: "fpdt-16", about: "the same in 16 chunks", set: |o| o.chunks = 16, is_set: |o| o.chunks == 16 },
    Word { name: "fpdt-32", about: "the same in 32 chunks", set: |o| o.chunks = 32, is_set: |o| o.chunks == 32 },
    Word { name: "fpdt-64", about: "the same in 64 chunks", set: |o| o.chunks = 64, is_set: |o| o.chunks == 64 },
];

/// Words that end in a number of the user's, for help texts.
pub const NUMBERED: &[(&str, &str)] = &[
    ("replicas-N", "N slots of experts beyond one for each, which EPLB gives to those with most rows; as --replicas"),
    (
        "shard-N",
        "ZeRO among N neighbouring ranks that hold the same weights, sums going on to the other groups of N (hybrid sharding: FSDP's HYBRID_SHARD, MiCS, Megatron-LM's num-distributed-optimizer-instances)",
    ),
    ("capacity-HOW", "what an expert takes of a rank's tokens: 1.25, pad:1.25, tutel:1.25 or tutel:0; as --capacity"),
];

fn is_numbered(name: &str) -> bool {
    ["replicas-", "shard-", "capacity-"].iter().any(|start| name.starts_with(start))
}

impl Options {
    /// Takes a word with a number, if it is one.
    fn numbered(&mut self, name: &str) -> Result<bool, String> {
        if let Some(n) = name.strip_prefix("replicas-") {
            let wrong = || format!("{name:?}: {n:?} is no number of slots above 0; write replicas-32");
            self.replicas = n.parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
            return Ok(true);
        }
        if let Some(n) = name.strip_prefix("shard-") {
            let wrong = || format!("{name:?}: {n:?} is no number of ranks above 1; write shard-8");
            self.shard = n.parse().ok().filter(|n| *n > 1).ok_or_else(wrong)?;
            return Ok(true);
        }
        let Some(how) = name.strip_prefix("capacity-") else { return Ok(false) };
        self.capacity = how.parse()?;
        Ok(true)
    }

    /// Ranks of an inner ring, where there are two rings.
    pub fn window(&self) -> Option<u32> {
        (self.double_ring > 0).then_some(self.double_ring)
    }

    /// The words of what differs from the default, but for those with a number of the user's.
    pub fn words(&self) -> Vec<&'static str> {
        WORDS.iter().filter(|w| (w.is_set)(self)).map(|w| w.name).collect()
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut words: Vec<String> = self.words().into_iter().map(String::from).collect();
        words.extend((self.replicas > 0).then(|| format!("replicas-{}", self.replicas)));
        words.extend((self.shard > 0).then(|| format!("shard-{}", self.shard)));
        words.extend((self.capacity != Capacity::Unlimited).then(|| format!("capacity-{}", self.capacity)));
        f.write_str(&if words.is_empty() { "default".into() } else { words.join("+") })
    }
}

impl FromStr for Options {
    type Err = String;

    fn from_str(text: &str) -> Result<Options, String> {
        let mut options = Options::default();
        for name in text.split('+').map(str::trim).filter(|name| !["", "default"].contains(name)) {
            if options.numbered(name)? {
                continue;
            }
            let Some(word) = WORDS.iter().find(|w| w.name == name) else {
                let known: Vec<_> = WORDS.iter().map(|w| w.name).collect();
                return Err(format!("{name:?} is no option; known are default and {}", known.join(", ")));
            };
            (word.set)(&mut options);
        }
        // A later word may have undone an earlier one.
        let said = |name: &str| options.words().contains(&name) || is_numbered(name);
        match text.split('+').map(str::trim).find(|name| !["", "default"].contains(name) && !said(name)) {
            Some(undone) => Err(format!("{undone:?} contradicts another word of {text:?}; leave one of them out")),
            None => Ok(options),
        }
    }
}

impl Serialize for Options {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Options, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_there_and_back() {
        assert_eq!(Options::default().to_string(), "default");
        for word in WORDS {
            let options: Options = word.name.parse().unwrap();
            assert_ne!(options, Options::default(), "{} changes nothing", word.name);
            assert_eq!(options.to_string(), word.name);
        }
        assert!("zigzga".parse::<Options>().unwrap_err().contains("known are default"));
        for words in ["replicas-32", "stripe+replicas-8+shard-4+capacity-1.25", "capacity-pad:2", "capacity-tutel:-1.5"]
        {
            assert_eq!(words.parse::<Options>().unwrap().to_string(), words);
        }
        for (words, why) in [
            ("replicas-0", "above 0"),
            ("replicas-x", "replicas-32"),
            ("shard-1", "above 1"),
            ("capacity-1.255", "two decimals"),
            ("capacity--1", "not above 0"),
            ("capacity-half:1", "no rule"),
            ("capacity-pad:", "no number"),
        ] {
            let said = words.parse::<Options>().unwrap_err();
            assert!(said.contains(why), "{words}: {said}");
        }
    }

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
