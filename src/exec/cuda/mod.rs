//! Plans on NVIDIA GPUs.
//!
//! * [`source`]: the kernels, compiled by [`nvrtc`] where they run and kept on disk;
//! * [`lower`], [`exchange`]: what is launched for each op of a plan, [`prepare`]: with which addresses;
//! * [`script`]: a plan as commands to streams, for all ranks of a process;
//! * [`session`], [`run`]: steps of training on a [`device`], [`incoming`]: what others would have sent a rank alone;
//! * [`nvml`]: clocks while something is measured;
//! * [`selftest`]: every kernel against the CPU's, where it runs;
//! * [`process`], [`meeting`], [`wire`]: processes that find each other, and notice when one fails;
//! * [`joined`], [`calls`], [`nccl`]: a rank a process, over nodes;
//! * [`driver`], [`blas`]: the GPU itself, and matrix products;
//! * [`fused`], [`cudnn`]: attention by a library, where there is one that takes it;
//! * [`libraries`]: where NVIDIA's libraries are;
//! * [`contention`], [`alone`]: what ranks that share a GPU, or one that is alone there, take, predicted.
//!
//! Without a GPU the kernels are run by an emulator of CUDA's execution model and held against the CPU's
//! (`tests/cuda_kernels.rs`), compiled for every architecture (`tests/cuda.rs`), and whole steps are run by a double of
//! the device, which obeys commands in whatever order streams and events allow (`tests/cuda_run/`). [`driver`], [`blas`]
//! and [`nvrtc`] run in `tests/cuda_ffi.rs` against libraries that stand for NVIDIA's.
//!
//! What has run on an H100 and an H200 and what has not, `traces/measured/README.md` says: more than one GPU, more than one process, other
//! architectures than sm_90a, checkpoints of ranks on GPUs, `calibrate --plan`, Muon's kernels and several products in one
//! call are unverified.

pub mod alone;
pub mod blas;
pub mod calls;
pub mod contention;
pub mod cudnn;
pub mod device;
pub mod driver;
pub mod exchange;
pub mod fused;
pub mod incoming;
pub mod joined;
pub mod libraries;
pub mod lower;
pub mod meeting;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod prepare;
pub mod process;
pub mod run;
pub mod script;
pub mod selftest;
pub mod session;
pub mod source;
pub mod wire;
