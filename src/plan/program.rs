//! The plan as a whole: tensors, lanes, blocks, programs, and which rank runs which program.

use super::check;
use super::kernel::Kernel;
use super::mesh::{Axis, Group, Mesh};
use super::op::*;
use super::route::Route;
use super::rows::{replica_of, replicas};
use super::segs::Segs;
use super::share::Share;
use crate::error::{self, Error, Result};
use crate::spec::{AttentionSpec, Documents, LlmSpec, Parallelism, Pass};
use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};
use std::hash::Hasher;
use std::path::Path;

/// The file format's version; a plan of another version is refused.
pub const VERSION: u32 = 3;

/// A straight line of ops with formal buffers: what a [`OpKind::Call`] splices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    pub name: String,
    /// Names of the formals, in the order in which calls bind them.
    pub formals: Vec<String>,
    pub ops: Vec<Op>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    pub name: String,
    pub ops: Vec<Op>,
}

/// Maps the coordinates of a rank on `axes` (row-major) to a program: never a list of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoleMap {
    pub view: u8,
    pub axes: Vec<Axis>,
    pub table: Vec<u32>,
}

/// A weight cut over the ranks of an axis. Rows (dim 0) or columns (dim 1) come in blocks, fused weights
/// one behind the other (q, k, v), and each block is cut in equal parts: a rank has its part of every block.
/// Where a block does not come out even the last ranks have room for more than there is, filled with zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub axis: Axis,
    pub dim: u8,
    /// Sizes along `dim`; they add up to the whole.
    pub blocks: Vec<u64>,
    /// How many neighbouring ranks have the same part of each block, where some have (a KV head that several
    /// tensor-parallel ranks need); empty: each part is on one rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<u64>,
    /// In place of blocks cut over the ranks: the whole, cut into equal pieces, and which of them stands in each of
    /// the places of all ranks, rank after rank. A piece may stand in several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<u32>,
}

impl Shard {
    /// Size along `dim` on each of `ranks`.
    pub fn local(&self, ranks: u64) -> u64 {
        if !self.holds.is_empty() {
            return self.piece() * (self.holds.len() as u64 / ranks);
        }
        self.parts(ranks).map(|(block, parts, _)| block.div_ceil(parts)).sum()
    }

    /// The same of each block.
    pub fn locals(&self, ranks: u64) -> Vec<u64> {
        self.parts(ranks).map(|(block, parts, _)| block.div_ceil(parts)).collect()
    }

    /// Of each block its size, the parts that it is cut into, and the ranks that have the same part.
    fn parts(&self, ranks: u64) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        let copies = self.copies.iter().copied().chain(std::iter::repeat(1));
        self.blocks.iter().zip(copies).map(move |(&block, copies)| (block, ranks / copies, copies))
    }

    /// Where the places along `dim` of the rank at `at` stand in the whole; `None`: beyond the end.
    pub fn places(&self, at: u64, ranks: u64) -> Vec<Option<u64>> {
        if !self.holds.is_empty() {
            let (piece, own) = (self.piece(), self.holds.len() / ranks as usize);
            let held = self.holds.iter().skip(at as usize * own).take(own);
            return held.flat_map(|&n| (0..piece).map(move |i| Some(u64::from(n) * piece + i))).collect();
        }
        let mut places = vec![];
        let mut first = 0;
        for (block, parts, copies) in self.parts(ranks) {
            let (part, at) = (block.div_ceil(parts), at / copies);
            places.extend((at * part..(at + 1) * part).map(|i| (i < block).then_some(first + i)));
            first += block;
        }
        places
    }

    /// Size along `dim` of one of the pieces that ranks hold.
    fn piece(&self) -> u64 {
        let pieces = self.holds.iter().max().map_or(1, |n| u64::from(*n) + 1);
        self.blocks.iter().sum::<u64>() / pieces
    }
}

/// Where a named weight lives: rows of a slot of a flat tensor, and the shape they stand for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// The Hugging Face name.
    pub name: String,
    pub weight: TensorId,
    pub grad: TensorId,
    pub slot: u32,
    pub rows: [u64; 2],
    /// Of the whole weight, over all ranks.
    pub shape: Vec<u64>,
    /// None: a rank that has it has all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<Shard>,
    /// The pipeline stages that have it; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<u32>,
    /// Rows of the matrices that stand in it one behind the other, again and again until all of it is told, where Muon makes their
    /// momentum orthogonal: a rank the part that it has. Empty: it is Adam's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matrices: Vec<u64>,
}

/// The full-precision copy of a weight tensor, or of one rank's share of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Master {
    pub weight: TensorId,
    pub master: TensorId,
    /// Where a rank's share of the summed gradient lands.
    pub grad_share: TensorId,
    /// The ranks that share the tensor in equal parts, in group order; none: everyone has all of it.
    pub group: Option<Group>,
    /// The weight tensor itself holds only a rank's part; rows of weights are those of the parts put together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
}

/// How tokens reach the ranks. Sequence (microbatch * dp + dp coordinate) * batch + b of the global
/// batch, at the positions `segs` gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    pub tokens: TensorId,
    pub targets: TensorId,
    /// The tokens that stand one further than the targets, two further, and so on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ahead: Vec<TensorId>,
    pub segs: Segs,
    /// Where ranks share the rows of the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
    pub batch: u64,
    pub vocab: u64,
    pub microbatches: u32,
    /// Scalar, summed over all ranks at the end of the step.
    pub loss: TensorId,
    /// The final hidden states: microbatch m has them in slot `hidden_slot + m % hidden_turns`.
    pub hidden: TensorId,
    pub hidden_slot: u32,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub hidden_turns: u32,
}

fn one() -> u32 {
    1
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

/// A tensor of an attention operation, over all its ranks: `[batch, seq, lanes * heads * width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    Q,
    /// Two lanes: keys, then values.
    Kv,
    O,
    Lse,
    DO,
    Dq,
    Dkv,
}

impl Operand {
    pub fn name(self) -> &'static str {
        match self {
            Operand::Q => "q",
            Operand::Kv => "kv",
            Operand::O => "o",
            Operand::Lse => "lse",
            Operand::DO => "do",
            Operand::Dq => "dq",
            Operand::Dkv => "dkv",
        }
    }

    /// Lanes, heads of a lane, and elements of a head, of one token.
    pub fn row(self, of: &AttentionSpec) -> [u64; 3] {
        match self {
            Operand::Kv | Operand::Dkv => [2, of.kv_heads, of.head_dim],
            Operand::Lse => [1, of.heads, 1],
            _ => [1, of.heads, of.head_dim],
        }
    }
}

/// The part of an [`Operand`] that a rank has: some positions of every sequence, some heads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    pub what: Operand,
    pub tensor: TensorId,
    pub slot: u32,
    pub segs: Segs,
    /// The axis whose ranks share the heads in equal runs; with more ranks than heads, each head is on
    /// ranks / heads of them. None: a rank has all heads.
    pub heads_over: Option<Axis>,
}

impl Held {
    /// The first head that `rank` has, and how many from there on.
    pub fn heads(&self, of: &AttentionSpec, views: &[Mesh], rank: u32) -> (u64, u64) {
        let [_, heads, _] = self.what.row(of);
        let Some(axis) = self.heads_over else { return (0, heads) };
        let mesh = &views[self.segs.view as usize];
        let (ranks, at) = (u64::from(mesh.degree(axis)), u64::from(mesh.coord(rank, axis)));
        (at * heads / ranks, (heads / ranks).max(1))
    }

    /// Elements of a rank's part.
    pub fn elems(&self, of: &AttentionSpec, views: &[Mesh]) -> u64 {
        let [lanes, _, width] = self.what.row(of);
        of.batch * self.segs.len(views) * lanes * self.heads(of, views, 0).1 * width
    }
}

/// How an attention-only plan is fed: whole tensors go in, whole tensors come out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionFeed {
    pub spec: AttentionSpec,
    pub pass: Pass,
    /// There before the program begins.
    pub given: Vec<Held>,
    /// What it was run for.
    pub taken: Vec<Held>,
}

/// What is there before a program begins besides weights, and what is taken from it at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feed {
    /// A training step: tokens in, a loss out.
    Tokens(Inputs),
    Attention(AttentionFeed),
}

impl Feed {
    pub fn tokens(&self) -> Option<&Inputs> {
        match self {
            Feed::Tokens(inputs) => Some(inputs),
            Feed::Attention(_) => None,
        }
    }

    /// Tensors that are there before the program begins.
    pub fn given(&self) -> Vec<TensorId> {
        match self {
            Feed::Tokens(inputs) => [inputs.tokens, inputs.targets].iter().chain(&inputs.ahead).copied().collect(),
            Feed::Attention(feed) => feed.given.iter().map(|held| held.tensor).collect(),
        }
    }

    /// Tensors that are there, or wanted, when no op needs them: they never share their bytes.
    pub fn stays(&self, tensor: TensorId) -> bool {
        match self {
            Feed::Tokens(_) => false,
            Feed::Attention(feed) => feed.given.iter().chain(&feed.taken).any(|held| held.tensor == tensor),
        }
    }

    /// Every split of the sequence that it names.
    pub fn segs(&self) -> Vec<&Segs> {
        match self {
            Feed::Tokens(inputs) => vec![&inputs.segs],
            Feed::Attention(feed) => feed.given.iter().chain(&feed.taken).map(|held| &held.segs).collect(),
        }
    }
}

/// What the plan was made for: labels of reports, never read by an interpreter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct About {
    pub model: String,
    pub strategy: String,
    pub seq_len: u64,
    pub global_batch: u64,
    pub micro_batch: u64,
    /// Packed into every sequence.
    #[serde(default, skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
    pub par: Parallelism,
    pub dtype: String,
    /// FLOPs of one step on all ranks without any recomputation, causal attention counted half.
    pub model_flops: f64,
    /// The model the plan was built from, for the single-rank reference; none for an attention alone.
    pub model_spec: Option<LlmSpec>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub version: u32,
    pub about: About,
    /// Several arrangements of the same ranks; `views[0]` is the attention view.
    pub views: Vec<Mesh>,
    pub lanes: Vec<Lane>,
    pub tensors: Vec<Tensor>,
    pub blocks: Vec<Block>,
    pub programs: Vec<Program>,
    pub role_of: RoleMap,
    pub params: Vec<Param>,
    pub masters: Vec<Master>,
    pub feed: Feed,
    /// Which rows of mixture-of-experts layers go where.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// An op names the first of several routes, one behind the other: one for each rank that holds the same experts.
    /// Ops of every layer and microbatch name others then: layer after layer, in each microbatch after microbatch.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub routes_by_replica: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    foretrain_plan: u32,
    hash: String,
    plan: serde_json::Value,
}

impl Plan {
    /// The model of a training step.
    pub fn model(&self) -> Result<&LlmSpec> {
        self.about.model_spec.as_ref().ok_or_else(|| {
            Error::plan("it is one attention operation, not a training step; `foretrain attention` is about those")
        })
    }

    /// How tokens reach the ranks of a training step.
    pub fn inputs(&self) -> Result<&Inputs> {
        self.model()?;
        self.feed.tokens().ok_or_else(|| Error::plan("a training step without tokens"))
    }

    pub fn ranks(&self) -> u32 {
        self.views[0].size()
    }

    /// The route that an op names, for `rank`.
    pub fn route_of(&self, route: u32, rank: u32) -> &Route {
        &self.routes[self.route_number(route, rank) as usize]
    }

    /// Which of the plan's routes that is.
    pub fn route_number(&self, route: u32, rank: u32) -> u32 {
        route + if self.routes_by_replica { replica_of(&self.views, rank) } else { 0 }
    }

    /// How many routes an op names.
    pub fn routes_at_once(&self) -> u32 {
        if self.routes_by_replica { replicas(&self.views) } else { 1 }
    }

    /// The program that `rank` runs.
    pub fn program_of(&self, rank: u32) -> u32 {
        let mesh = &self.views[self.role_of.view as usize];
        let at = self.role_of.axes.iter().fold(0, |at, &axis| at * mesh.degree(axis) + mesh.coord(rank, axis));
        self.role_of.table[at as usize]
    }

    /// Equal plans have equal hashes: ranks compare them before they start.
    pub fn hash(&self) -> String {
        hash_of(&serde_json::to_string(self).expect("a plan is plain data"))
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        let plan = serde_json::to_value(self).expect("a plan is plain data");
        let file = PlanFile { foretrain_plan: VERSION, hash: self.hash(), plan };
        let text = serde_json::to_string(&file).expect("a plan is plain data");
        std::fs::write(path, text).map_err(Error::io(path))
    }

    /// Reads a plan, refusing another version, a changed file and anything unsound.
    pub fn load(path: &Path) -> Result<Plan> {
        let name = &path.display().to_string();
        let text = error::text::data(path)?;
        let raw: serde_json::Value = error::json::parse(name, &text)?;
        match raw.get("foretrain_plan").and_then(|v| v.as_u64()) {
            Some(v) if v == u64::from(VERSION) => {}
            Some(v) => {
                let why = format!(
                    "the plan has format {v}, this program reads format {VERSION}; write it again with `foretrain plan`"
                );
                return Err(Error::spec(name, "foretrain_plan", why));
            }
            None => {
                let why = "missing: this is not a plan file; `foretrain plan --out FILE` writes one";
                return Err(Error::spec(name, "foretrain_plan", why));
            }
        }
        let file: PlanFile = serde_json::from_value(raw).map_err(Error::json(name))?;
        let plan: Plan = serde_json::from_value(file.plan).map_err(Error::json(name))?;
        if plan.hash() != file.hash {
            let why = format!(
                "the file says {}, its contents have {}: it was edited or damaged; write it again with `foretrain plan`",
                file.hash,
                plan.hash()
            );
            return Err(Error::spec(name, "hash", why));
        }
        check::check(&plan).map_err(|e| Error::spec(name, "plan", e))?;
        Ok(plan)
    }

    /// All ops as written, calls not spliced: (where they stand, op).
    pub fn ops(&self) -> impl Iterator<Item = (&str, &Op)> {
        let blocks = self.blocks.iter().flat_map(|b| b.ops.iter().map(|op| (b.name.as_str(), op)));
        let programs = self.programs.iter().flat_map(|p| p.ops.iter().map(|op| (p.name.as_str(), op)));
        blocks.chain(programs)
    }

    /// The first view that has an axis, or the first of all.
    pub fn view_of(&self, axis: Axis) -> &Mesh {
        self.views.iter().find(|v| v.axes.iter().any(|a| a.0 == axis)).unwrap_or(&self.views[0])
    }

    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.ops().filter_map(|(_, op)| match &op.kind {
            OpKind::Compute { kernel, .. } => Some(kernel),
            _ => None,
        })
    }
}

fn hash_of(text: &str) -> String {
    // Two passes with different seeds: 128 bits are enough to tell plans apart by chance.
    let half = |seed: u64| {
        let mut h = FxHasher::default();
        h.write_u64(seed);
        h.write(text.as_bytes());
        h.finish()
    };
    format!("{:016x}{:016x}", half(0x9e37_79b9_7f4a_7c15), half(0xc2b2_ae3d_27d4_eb4f))
}
