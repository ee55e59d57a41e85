//! Runs a plan.

pub mod kernels;
pub mod reference;
