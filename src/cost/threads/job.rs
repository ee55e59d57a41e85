//! What a thread does at a time, and how much slower it is in company.

use crate::device::Threads;
use crate::plan::expert::ExpertOp;
use crate::plan::{Kernel, OpKind};

/// Something a thread is busy with.
#[derive(Debug, Clone)]
pub struct Job {
    /// Seconds that are left of it, were the thread alone.
    pub left: f64,
    /// How many times longer it takes while all cores are busy.
    pub crowded: f64,
    pub then: Then,
}

/// What has come about when a job is done.
#[derive(Debug, Clone, Copy)]
pub enum Then {
    Kernel(u32),
    /// Of one of the rank's communicating ops, by number.
    Flight {
        flight: usize,
        what: What,
    },
}

#[derive(Debug, Clone, Copy)]
pub enum What {
    /// A leg of a transfer, or the round of a collective, is sent.
    Sent(usize),
    Taken(usize),
    /// A collective has its own part in place.
    Begun,
    /// A reduce-scatter has put its sum, an exchange its rows, where they belong.
    Landed,
}

/// How many times longer a job takes while `busy` threads run on `cores`. Up to all cores in proportion, beyond
/// them each thread has its share of a core.
pub fn slowdown(busy: usize, cores: u32, crowded: f64) -> f64 {
    let (busy, cores) = (busy as f64, f64::from(cores));
    if busy > cores {
        return crowded * busy / cores;
    }
    if cores > 1.0 { 1.0 + (crowded - 1.0) * (busy - 1.0).max(0.0) / (cores - 1.0) } else { 1.0 }
}

/// How much company hurts a kernel.
pub fn crowded(kind: &OpKind, threads: &Threads) -> f64 {
    let OpKind::Compute { kernel, .. } = kind else { return threads.crowded.memory };
    match kernel {
        Kernel::MatMul { .. } => threads.crowded.gemm,
        Kernel::Expert(expert) if matches!(expert.op, ExpertOp::MatMul { .. }) => threads.crowded.gemm,
        Kernel::Attention(_) | Kernel::AttentionBwd(_) | Kernel::AttentionOnto(_) | Kernel::AttentionBwdOnto(..) => {
            threads.crowded.attention
        }
        _ => threads.crowded.memory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_the_cores_there_are() {
        assert_eq!(slowdown(1, 2, 1.2), 1.0);
        assert_eq!(slowdown(2, 2, 1.2), 1.2);
        assert_eq!(slowdown(4, 2, 1.2), 2.4);
        assert_eq!(slowdown(3, 1, 1.0), 3.0);
        assert!((slowdown(2, 3, 1.2) - 1.1).abs() < 1e-12);
    }
}
