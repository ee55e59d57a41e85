//! model x workload x mesh -> Plan. One parallel algorithm a file; [`step`] composes them.

pub mod allgather_kv;
pub mod attention;
pub mod attention_pass;
pub mod data;
pub mod double_ring;
pub mod embedding;
pub mod expert;
pub mod feasible;
pub mod fpdt;
pub mod guard;
pub mod head;
pub mod head_exchange;
pub mod kind;
pub mod layers;
pub mod lengths;
mod mtp;
mod muon;
pub mod norm;
pub mod pipeline;
pub mod residual;
pub mod ring;
pub mod ring_burst;
pub mod ring_follow;
pub mod ring_merge;
pub mod ring_reverse;
mod sharded;
mod sizes;
mod stages;
pub mod step;
pub mod tensor;
pub mod transformer;
pub mod ulysses;
pub mod unfused;
pub mod weights;

pub use sizes::Sizes;
pub use step::{Engines, build, build_by_layer, build_routed, sizes};
