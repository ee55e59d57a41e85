//! Whole training steps as GPUs are told to do them, without a GPU: a double of the device obeys the commands in any
//! order that streams and events allow, its kernels run by the emulator. Losses, gradients and bytes are held to the
//! dense f64 reference and to the plan. What is not tested here is the driver, and how long anything takes.

mod calibration;
#[path = "../checkpoint_states/mod.rs"]
mod checkpoint_states;
#[path = "../cuda_double/mod.rs"]
mod cuda_double;
#[path = "../cuda_emulator/mod.rs"]
mod cuda_emulator;
#[path = "../dense/mod.rs"]
mod dense;
mod layouts;
mod models;
mod refusals;
mod step;
mod timing;
mod training;
