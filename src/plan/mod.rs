//! The Plan: ops, buffers, lanes, and what they mean together.

pub mod builder;
pub mod check;
pub mod crew;
pub mod dropout;
pub mod expert;
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
pub use route::{Counts, ExchangeAlgo, Phase, Route, Wire};
pub use rows::{Landing, Layout};
pub use segs::{Segs, Span, Split};
pub use share::Share;
pub use unfused::{HeadDropout, ScoreStep};
pub use visible::BlockShape;
