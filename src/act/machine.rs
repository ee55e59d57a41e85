//! What a plan is interpreted on, and how time is rounded there.

use crate::cluster::Cluster;
use crate::device::KernelTime;
use crate::plan::{Kernel, Op, OpKind};
use crate::spec::StackSpec;
use crate::units::Seconds;

/// The machine a plan is costed or simulated on.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    pub cluster: &'a Cluster,
    pub stack: &'a StackSpec,
    pub kernels: &'a dyn KernelTime,
    /// Device of each rank, where ranks share devices; `None`: each has one of its own.
    pub devices: Option<&'a [u32]>,
}

impl Machine<'_> {
    /// How long the CPU takes to issue one call of the stack: one `host_launch`.
    pub fn host_launch(&self) -> Seconds {
        self.cluster.spec.issued_in(self.stack.host_launch.value)
    }

    /// How long the CPU takes to issue an op, in `host_launch`es.
    pub fn launches(&self, op: &Op) -> u32 {
        let times = self.stack.forward_launches.as_ref().map_or(1, |times| times.value);
        match &op.kind {
            // A product's call rounds what it multiplies.
            OpKind::Compute { kernel: Kernel::Quantise { .. } | Kernel::Dequantise { .. }, .. } => 0,
            OpKind::Compute { kernel, .. } => {
                let calls = if self.stack.is_unfused(kernel.curve()) { kernel.calls() } else { 1 };
                calls * if kernel.is_forward() { times } else { 1 }
            }
            OpKind::Transfer { .. } | OpKind::Collective { .. } | OpKind::Exchange { .. } => times,
            _ => 1,
        }
    }
}

/// Picoseconds to seconds.
pub fn seconds(ps: u64) -> Seconds {
    Seconds::new(ps as f64 * 1e-12)
}

/// Seconds to picoseconds, rounded once.
pub fn picoseconds(t: Seconds) -> u64 {
    (t.value() * 1e12).round() as u64
}
