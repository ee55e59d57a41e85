//! The mixer that the tests run.

use super::super::testing::launch;
use crate::plan::Kernel;
use crate::plan::kernel::{SsmKernel, SsmOp};
use crate::spec::MambaSpec;

// Two sequences of 7 tokens in chunks of 3; 4 heads of 3 in 2 groups, states of 5: columns 12 | 12 + 10 + 10 | 4.
pub const M: MambaSpec = MambaSpec { heads: 4, head_dim: 3, groups: 2, state: 5, conv: 3, chunk: 3 };
pub const ROWS: usize = 14;
pub const INNER: usize = 12;
pub const CONV: usize = 32;
pub const PROJ: usize = 48;
pub const EPS: f64 = 1e-3;

pub fn kernel(op: SsmOp) -> Kernel {
    Kernel::Ssm(SsmKernel { batch: 2, seq: 7, mamba: M, op })
}

pub fn of(op: SsmOp, reads: &[&[f64]], size: usize) -> Vec<f64> {
    let mut y = vec![f64::NAN; size];
    let reads: Vec<Option<&[f64]>> = reads.iter().map(|x| Some(*x)).collect();
    launch(&kernel(op), &reads, &mut [&mut y]);
    y
}

/// Some columns of every row of `x`.
pub fn columns(x: &[f64], row: usize, columns: std::ops::Range<usize>) -> Vec<f64> {
    x.chunks_exact(row).flat_map(|row| row[columns.clone()].to_vec()).collect()
}
