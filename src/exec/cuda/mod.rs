//! Plans on NVIDIA GPUs.
//!
//! * [`source`]: the kernels, compiled by [`nvrtc`] where they run;
//! * [`lower`]: what is launched for each kernel of a plan;
//! * [`script`]: a plan as commands to streams, for all ranks of a process;
//! * [`driver`], [`blas`], [`run`]: the GPU itself, matrix products, a training step.
//!
//! Without a GPU the kernels are run by an emulator of CUDA's execution model and held against the CPU's
//! (`tests/cuda_kernels.rs`), compiled for every architecture (`tests/cuda.rs`), and the commands are obeyed by a double
//! in whatever order streams and events allow. **The last three modules have not run on a GPU yet.**

pub mod blas;
pub mod driver;
pub mod lower;
pub mod nvrtc;
pub mod run;
pub mod script;
pub mod source;
