//! Flags that several commands have, each in a group that a command flattens where it means the same to it.
//!
//! Where the default or the meaning is another the command has a flag of its own, so that its help says what differs.

mod batch;
mod documents;
mod experts;
mod implementation;
mod lengths;
mod model;
mod output;
mod plan;
mod platform;
mod precision;
mod seed;
mod study;
pub mod value;

pub use batch::BatchSize;
pub use documents::{Packing, documents};
pub use experts::{Experts, agree, of_experts};
pub use implementation::Implementation;
pub use lengths::Lengths;
pub use model::{Model, Mtp};
pub use output::{JsonFile, Output, TraceFile};
pub use plan::PlanFile;
pub use platform::{Platform, Stack};
pub use precision::Precision;
pub use seed::Seed;
pub use study::{Fresh, Title};
