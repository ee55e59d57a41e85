//! The optimizer that a plan ends with: AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2), which without
//! weight decay is Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1). Moments are corrected for having started at
//! zero; every weight decays, norms and biases as well.

use super::muon::MuonKernel;
use super::op::OpKind;
use super::program::Plan;
use super::{Kernel, Op};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The optimizer's constants. The default is what the GPT and Llama papers set, without weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// The share of itself that a weight loses in a step, times the learning rate.
    pub weight_decay: f64,
}

impl fmt::Display for Adam {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Adam { lr, beta1, beta2, eps, weight_decay } = self;
        write!(f, "lr {lr}, beta1 {beta1}, beta2 {beta2}, eps {eps:e}, weight decay {weight_decay}")
    }
}

impl Default for Adam {
    fn default() -> Adam {
        Adam { lr: 3e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl Plan {
    /// The optimizer's constants; `None` for a plan that updates no weights.
    pub fn optimizer(&self) -> Option<Adam> {
        self.kernels().find_map(|kernel| match kernel {
            &Kernel::Adam { lr, beta1, beta2, eps, weight_decay, .. } => {
                Some(Adam { lr, beta1, beta2, eps, weight_decay })
            }
            Kernel::Muon(MuonKernel::Update { adam, .. }) => Some(*adam),
            Kernel::Foreach(kernel) => Some(*kernel.adam()),
            _ => None,
        })
    }

    /// The plan with other constants of the optimizer.
    pub fn with_optimizer(mut self, adam: Adam) -> Plan {
        let blocks = self.blocks.iter_mut().map(|b| &mut b.ops);
        blocks.chain(self.programs.iter_mut().map(|p| &mut p.ops)).flatten().for_each(|op| set(op, adam));
        self
    }
}

fn set(op: &mut Op, to: Adam) {
    let OpKind::Compute { kernel, .. } = &mut op.kind else { return };
    match kernel {
        Kernel::Adam { lr, beta1, beta2, eps, weight_decay, .. } => {
            (*lr, *beta1, *beta2, *eps, *weight_decay) = (to.lr, to.beta1, to.beta2, to.eps, to.weight_decay);
        }
        Kernel::Muon(MuonKernel::Update { adam, .. }) => *adam = to,
        Kernel::Foreach(kernel) => *kernel.adam_mut() = to,
        _ => {}
    }
}
