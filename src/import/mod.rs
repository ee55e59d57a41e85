//! What other programs have written.

pub mod nccl_tests;
pub mod nccl_topo;
pub mod node;
pub mod nvidia_smi;
pub mod peer_links;
