//! The Plan: ops, buffers, lanes, and what they mean together.

pub mod builder;
pub mod kernel;
pub mod mesh;
pub mod op;
pub mod program;
pub mod segs;

pub use builder::{Builder, each};
pub use kernel::{AttnBlock, Exchange, HeadPart, Kernel, Side, Work, WorkClass};
pub use mesh::{Axis, Group, Mesh};
pub use op::*;
pub use program::{About, Block, Inputs, Param, Plan, Program, RoleMap};
pub use segs::{BlockShape, Segs, Split};
