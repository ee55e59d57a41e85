//! What other programs have written.

pub mod mesh;
pub mod nccl_tests;
pub mod nccl_topo;
pub mod node;
pub mod nvidia_smi;
