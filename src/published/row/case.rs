//! What a source states about one measurement. `None`: it does not say.

use crate::published::measured::Measured;
use crate::published::measured::memory::Counted;

/// One published measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    pub id: String,
    pub group: String,
    pub facts: Facts,
}

impl Case {
    /// A row that cannot be read, with what is wrong.
    pub fn unread(id: String, why: crate::error::Error) -> Case {
        Case { id, group: "not read".into(), facts: Facts::Unread(why.to_string()) }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Facts {
    Training(Box<Training>),
    Attention(Box<Attention>),
    Collective(Box<Collective>),
    Exchange(Box<Exchanged>),
    Product(Box<Product>),
    /// Why a row could not be read.
    Unread(String),
}

impl Facts {
    /// Whether they have a number to predict, or say why they cannot be read.
    pub fn measure(&self) -> bool {
        match self {
            Facts::Training(run) => Measured::of(run, false).is_some() || run.mem_gib.is_some(),
            Facts::Attention(row) => row.value.is_some(),
            Facts::Collective(row) => row.time_us.is_some(),
            Facts::Exchange(_) | Facts::Product(_) | Facts::Unread(_) => true,
        }
    }
}

/// A training run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Training {
    pub system: String,
    pub gpu: String,
    pub gpus: Option<u32>,
    pub gpus_per_node: Option<u32>,
    pub interconnect: String,
    pub model: String,
    /// Weights, in billions.
    pub params_b: Option<f64>,
    pub layers: Option<u64>,
    pub hidden: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    /// Width of a head, where it is no equal part of the width of the model.
    pub head_dim: Option<u64>,
    pub ffn: Option<u64>,
    pub gated_ffn: Option<bool>,
    pub vocab: Option<u64>,
    pub experts: Option<Experts>,
    pub seq: Option<u64>,
    pub global_batch: Option<u64>,
    pub micro_batch: Option<u64>,
    pub tp: Option<u32>,
    pub pp: Option<u32>,
    pub vp: Option<u32>,
    /// Ranks that share a sequence, whichever way.
    pub cp: Option<u32>,
    pub ulysses: Option<u32>,
    pub ring: Option<u32>,
    pub ep: Option<u32>,
    pub dp: Option<u32>,
    pub zero: String,
    pub seq_parallel: Option<bool>,
    pub recompute: String,
    pub precision: String,
    pub iteration_s: Option<f64>,
    pub tokens_per_s_per_gpu: Option<f64>,
    pub tflops_per_gpu: Option<f64>,
    pub flops_convention: String,
    pub mfu: Option<f64>,
    pub hfu: Option<f64>,
    /// Seconds of a forward and a backward chunk side by side, each of all layers that are stated.
    pub pair_s: Option<f64>,
    /// Of the longest sequence that ran.
    pub max_tokens: Option<f64>,
    /// The fullest moment of a GPU's memory, in GiB.
    pub mem_gib: Option<f64>,
    /// The stage of the pipeline, counted from 1, that it is of; none: the fullest.
    pub mem_stage: Option<u32>,
    /// What that counts.
    pub mem_kind: Option<Counted>,
    /// Remarks, which may name what was switched on.
    pub notes: String,
    /// What of the row could not be read, in words.
    pub left_out: Vec<String>,
}

/// The experts of a mixture.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Experts {
    pub n: Option<u64>,
    pub top_k: Option<u64>,
    /// Experts that every token visits.
    pub shared: Option<u64>,
    /// Width of all of those together, where they are not as wide as others.
    pub shared_ffn: Option<u64>,
    /// Every so manieth layer has experts.
    pub every: Option<u64>,
    /// Width of one expert.
    pub ffn: Option<u64>,
    pub dense_layers: Option<u64>,
    /// Rows that an expert takes, over the even share.
    pub capacity: Option<f64>,
    pub head_dim: Option<u64>,
    /// Kind of attention, where it is not grouped queries.
    pub attn: String,
    pub q_lora: Option<u64>,
    pub kv_lora: Option<u64>,
    /// Tokens that a token sees at most.
    pub window: Option<u64>,
}

/// One attention operation, over all the ranks that share it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Attention {
    pub gpu: String,
    pub gpus: Option<u32>,
    pub nodes: Option<u32>,
    pub link: String,
    pub batch: Option<u64>,
    /// Tokens of a whole sequence.
    pub seq: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    pub head_dim: Option<u64>,
    /// Sets of document boundaries, one set a run; to be multiplied by the ranks.
    pub documents: Vec<Vec<u64>>,
    pub causal: Option<bool>,
    /// fwd, bwd or fwd+bwd, as the source has it.
    pub pass: String,
    pub dtype: String,
    /// The name of the mask, where the source has one.
    pub mask: String,
    /// Keys that a query sees at most.
    pub window: Option<u64>,
    /// The name of a whole model, where the row is no bare operation.
    pub model: String,
    /// A remark on the sizes, which may name the script that has them.
    pub note: String,
    /// What is remarked of the row.
    pub notes: String,
    pub family: String,
    pub variant: String,
    /// Whose implementation.
    pub implementation: String,
    /// Kernel inside a distributed algorithm.
    pub kernel: String,
    /// Whether q, k and v travel in one message.
    pub packing: String,
    pub ulysses: Option<u32>,
    pub ring: Option<u32>,
    /// End-to-end rows state their split here.
    pub tp: Option<u32>,
    pub pp: Option<u32>,
    pub dp: Option<u32>,
    pub cp: Option<u32>,
    pub global_batch: Option<u64>,
    pub value: Option<f64>,
    pub unit: String,
    /// What of the row could not be read, in words.
    pub left_out: Vec<String>,
}

/// One duration of a collective.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Collective {
    /// As nccl-tests names it.
    pub op: String,
    pub gpu: String,
    pub gpus: Option<u32>,
    pub nodes: Option<u32>,
    pub link: String,
    pub note: String,
    /// Of the full buffer.
    pub bytes: Option<u64>,
    pub time_us: Option<f64>,
}

/// One exchange, one way or there and back.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Exchanged {
    /// The library, as the source words it.
    pub library: String,
    pub gpu: String,
    pub ranks: Option<u32>,
    /// Ranks that reach each other over links.
    pub node: Option<u32>,
    pub network: String,
    pub tokens: Option<u64>,
    pub hidden: Option<u64>,
    pub topk: Option<u32>,
    pub experts: Option<u32>,
    /// Nodes that a token reaches at most.
    pub node_limit: Option<u32>,
    pub part: Part,
    pub element: Element,
    /// Choices an equal stride apart, not by lot.
    pub spread: bool,
    /// The call from Python was timed, not its kernels.
    pub called: bool,
    /// Measured before the change that the library's name tells of.
    pub before: bool,
    pub sms: Option<u16>,
    /// Queue pairs that a rank has to another.
    pub queue_pairs: Option<u32>,
    pub measured: f64,
    pub unit: Unit,
    /// Why it is no exchange at all.
    pub other: String,
}

/// Which part of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// What comes before the rows: counts, and who gets what.
    Prepare,
    #[default]
    Dispatch,
    Combine,
    /// There and back, timed as one; rows come back in 16 bits.
    Both,
}

/// What an element of a row is on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Element {
    Bf16,
    /// With a scale in fp32 for each 128.
    #[default]
    Fp8Blocks,
    Fp8,
    /// Four bits, with a scale of eight for each 16.
    Fp4,
}

/// What a source reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unit {
    #[default]
    Microseconds,
    /// GB/s of all rows, own ones as well: over the network where rows leave the node, over links where they do not.
    Logical,
    /// The same of the links, wherever rows go besides.
    LinksLogical,
    /// The number of SMs that a formula gives.
    Sms,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::Microseconds => "us",
            Unit::Logical => "GB/s logical",
            Unit::LinksLogical => "GB/s logical over links",
            Unit::Sms => "SMs",
        }
    }
}

/// Products of m x k and k x n in FP8, summed up to bf16; `groups` of them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Product {
    pub gpu: String,
    pub groups: u64,
    pub m: u64,
    pub n: u64,
    pub k: u64,
    pub fp8: bool,
    /// TFLOP/s.
    pub measured: f64,
}
