//! model x workload x mesh -> Plan. One parallel algorithm a file; [`step`] composes them.

pub mod allgather_kv;
pub mod attention;
pub mod attention_pass;
pub mod data;
pub mod feasible;
pub mod ring;
pub mod step;
pub mod transformer;
pub mod ulysses;

pub use step::{Engines, build};
