//! The Plan: ops, buffers, lanes, and what they mean together. The files in the order of reading:
//!
//! * `op`: the words of a plan: tensors, buffers, lanes, ops.
//! * `program`: the plan as a whole, what it is fed, and what it was made for.
//! * `builder`: writes a plan op by op, for strategies.
//! * `mesh`: ranks along named axes, and the groups that axes define.
//! * `segs`: which positions of the sequence a rank holds.
//! * `share`: which rows of a microbatch a rank has where ranks share them.
//! * `kernel`: every kernel with its operands, FLOPs and bytes.
//! * `expert`, `foreach`, `muon`, `sparse`, `unfused`: the kernels of experts, of PyTorch's Adam, of Muon, of chosen keys, of
//!   scores in memory.
//! * `dropout`, `optimizer`: which elements are dropped; the constants of Adam.
//! * `visible`: what a mask leaves of a block of attention.
//! * `route`: which rows of a mixture-of-experts layer go where.
//! * `rows`: in which order those rows stand in buffers.
//! * `link`: what a plan means: calls spliced, buffers resolved, edges derived.
//! * `matching`: which send meets which receive, and which collectives are one.
//! * `order`: an order in which every op of every rank can start, or who waits in a circle.
//! * `check`: proves that a plan is sound before anyone interprets it.
//! * `turns`: in which order ranks that share a device compute.
//! * `segment`: runs of ops between calls, linked once and met again under other bindings.
//! * `crew`: programs side by side, and what passes between them.
//! * `memory`: when every slot lives, and where it lies.
//! * `lasting`: which tensors live from step to step.
//! * `structure`: a number for all of a plan but its sizes.
//! * `print`: the notes by which plans of sizes alone are told apart.
//! * `halves`: a layer's backward pass cut in two, for pipelines.
//! * `frozen`: a plan whose weights stay as they are, for fine-tuning.

pub mod builder;
pub mod check;
pub mod crew;
pub mod dropout;
pub mod expert;
pub mod foreach;
pub mod frozen;
pub mod halves;
pub mod kernel;
pub mod lasting;
pub mod link;
pub mod matching;
pub mod memory;
pub mod mesh;
pub mod muon;
pub mod op;
pub mod optimizer;
pub mod order;
pub mod print;
pub mod program;
pub mod route;
pub mod rows;
pub mod segment;
pub mod segs;
pub mod share;
pub mod sparse;
pub mod structure;
pub mod turns;
pub mod unfused;
pub mod visible;
pub mod wire;

pub use builder::{Builder, Via, each};
pub use dropout::Dropout;
pub use halves::Halves;
pub use kernel::{
    ALIGNMENT, AttnBlock, Exchange, HeadPad, HeadPart, HeadPermute, Kernel, Packing, Pairs, Side, VocabPart, Work,
    WorkClass,
};
pub use mesh::{Axis, Group, Mesh};
pub use op::*;
pub use optimizer::Adam;
pub use program::{
    About, AttentionFeed, Block, Feed, Held, Inputs, Master, Operand, Param, Plan, Program, RoleMap, Shard,
};
pub use route::{Counts, ExchangeAlgo, Phase, Route};
pub use rows::{Landing, Layout};
pub use segs::{Segs, Span, Split};
pub use share::Share;
pub use unfused::{HeadDropout, ScoreStep};
pub use visible::BlockShape;
pub use wire::Wire;
