//! Plans on NVIDIA GPUs.
//!
//! So far: the kernels' sources, and [`lower`], which says for every kernel of a plan what is launched for it. Both are
//! held against the CPU's kernels on every change, by an emulator of CUDA's execution model (`tests/cuda_kernels.rs`).
//! **Nothing here has run on a GPU yet**; streams, transfers and the driver are not here.

pub mod lower;
pub mod source;
