//! Every way of running a step gives the dense single-rank f64 reference: loss, outputs, every gradient,
//! and the weights after the optimizer.

mod case;
#[path = "../dense/mod.rs"]
mod dense;
mod layouts;
mod low_precision;
mod models;
mod pipelines;
mod recomputation;
mod rings;
mod shares;
mod tensor_parallel;
mod ulysses;
