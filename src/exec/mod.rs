//! Runs a plan.

pub mod kernels;
pub mod reference;

use crate::error::Result;
use crate::plan::Plan;
use crate::timeline::Timeline;
use std::collections::BTreeMap;

/// How to run a plan on CPU threads.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seeds weights and tokens.
    pub seed: u64,
    /// Device of each rank: ranks of one device take turns to compute.
    pub devices: Vec<u32>,
    /// Keep gradients, new weights and hidden states (they are large).
    pub keep: bool,
}

/// What a run brought.
#[derive(Debug, Clone)]
pub struct Run {
    /// Measured, a class a rank, with every op's span.
    pub timeline: Timeline,
    /// Mean over the tokens of the global batch.
    pub loss: f64,
    /// Bytes that each rank sent, counted in the transport.
    pub sent_bytes: Vec<u64>,
    /// Most bytes that each rank had in use, counted at its allocator.
    pub peak_bytes: Vec<u64>,
    /// By weight name, from rank 0.
    pub grads: BTreeMap<String, Vec<f64>>,
    /// Weights after the optimizer step, by name, from rank 0.
    pub weights: BTreeMap<String, Vec<f64>>,
    /// Final hidden states [seq * hidden] of every sequence of the global batch.
    pub hidden: Vec<Vec<f64>>,
}

/// Runs one training step of `plan`, a thread a rank. Errors name the rank and the op.
pub fn execute(plan: &Plan, options: &Options) -> Result<Run> {
    let _ = (plan, options);
    Err(crate::error::Error::device("execute", "the executor is being written"))
}
