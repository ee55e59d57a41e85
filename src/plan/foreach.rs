//! Adam as PyTorch's optimizers run it on GPUs unless they are told `fused=True`: operation by operation, each of them through all
//! weights before the next (`foreach`, the default since PyTorch 2.0; `_multi_tensor_adamw` of github:pytorch/pytorch@002d2f0
//! torch/optim/adamw.py). Every operation reads its operands and writes its result, and what weights are divided by, a number for
//! each of them, is there from the square root to the division.
//!
//! The seven operations are two kernels here, one on each side of that: six make the moments and the divisor, the last one moves
//! the weights.

use super::kernel::{Operands, Work, WorkClass};
use super::optimizer::Adam;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ForeachKernel {
    /// m and v take up the gradient; d = sqrt(v) + eps, v corrected for having started at zero. Reads g, m, v; writes m, v, d.
    Moments { elems: u64, adam: Adam },
    /// w moves by m / d. Reads w, m, d; writes w and, where there is a second, the weights cast.
    Move { elems: u64, adam: Adam },
}

impl ForeachKernel {
    pub fn name(&self) -> &'static str {
        match self {
            ForeachKernel::Moments { .. } => "adam_moments",
            ForeachKernel::Move { .. } => "adam_move",
        }
    }

    pub fn adam(&self) -> &Adam {
        let (ForeachKernel::Moments { adam, .. } | ForeachKernel::Move { adam, .. }) = self;
        adam
    }

    pub fn adam_mut(&mut self) -> &mut Adam {
        let (ForeachKernel::Moments { adam, .. } | ForeachKernel::Move { adam, .. }) = self;
        adam
    }

    pub fn operands(&self) -> Operands {
        let of = |elems: u64, writes| Operands { reads: vec![elems; 3], writes: vec![elems; writes] };
        match *self {
            ForeachKernel::Moments { elems, .. } => of(elems, 3),
            // The cast copy is optional; `check` allows for it.
            ForeachKernel::Move { elems, .. } => of(elems, 1),
        }
    }

    /// The work, given the bytes of each operand.
    pub fn work(&self, reads: &[u64], writes: &[u64]) -> Work {
        let bytes = match self {
            // lerp of m by g; mul of v; addcmul of v, g and g, which is read once for both; sqrt of v to d; div and add of d.
            ForeachKernel::Moments { .. } => {
                let ([g, m, v], d) = ([reads[0], reads[1], reads[2]], writes[2]);
                (2 * m + g) + 2 * v + (2 * v + g) + (v + d) + 2 * d + 2 * d
            }
            // addcdiv and, where weights decay, mul of w before it.
            ForeachKernel::Move { adam, .. } => {
                let decay = if adam.weight_decay == 0.0 { 0 } else { reads[0] + writes[0] };
                reads.iter().chain(writes).sum::<u64>() + decay
            }
        };
        Work { flops: 0, bytes, class: WorkClass::Memory }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By operation, in fp32: lerp 12, mul 8, addcmul 12, sqrt 8, div 8, add 8, addcdiv 16; mul by what decay leaves, 8.
    #[test]
    fn every_operation_reads_and_writes_all_weights() {
        for (weight_decay, bytes) in [(0.0, 72), (0.1, 80)] {
            let adam = Adam { weight_decay, ..Adam::default() };
            let of = |kernel: ForeachKernel| {
                let Operands { reads, writes } = kernel.operands();
                let [reads, writes] = [reads, writes].map(|all| all.iter().map(|elems| 4 * elems).collect::<Vec<_>>());
                kernel.work(&reads, &writes).bytes
            };
            let all = of(ForeachKernel::Moments { elems: 10, adam }) + of(ForeachKernel::Move { elems: 10, adam });
            assert_eq!(all, 10 * bytes);
        }
    }
}
