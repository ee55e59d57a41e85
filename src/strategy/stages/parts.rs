//! Messages between stages where tensor-parallel ranks have all rows each: every rank sends its own part of the rows
//! alone, and the ranks of the next stage gather the parts inside their node. A link between nodes then carries each
//! row once and not once a rank (Megatron-LM's scatter and gather, arXiv:2104.04473, section 4.1; `pipe_partitioned`
//! and `grad_partitioned` of DeepSpeed's engine of pipelines, on by default).

use crate::plan::{Buf, TensorKind};
use crate::strategy::step::Step;

pub struct Parts {
    /// Parts of rows as they come, by the slot of a unit's input, and of the gradient of its output.
    coming: [Buf; 2],
    /// Parts of rows on their way to the next stage, two slots in turns.
    leaving: [Buf; 2],
    turns: [u32; 2],
    cols: u64,
}

impl Parts {
    /// Buffers for units with `slots` slots for what they are given, forward and backward; `None` where whole rows
    /// pass.
    pub fn new(step: &mut Step, slots: [u32; 2]) -> Option<Parts> {
        let tp = step.layer().tp;
        if !step.par.options.scatter_p2p {
            return None;
        }
        let (shape, dtype, cols) =
            ([step.layer().residual_rows() / tp.ranks, step.model.hidden], step.work.dtype, step.model.hidden);
        let mut tensor = |name, slots| step.b.tensor(name, &shape, dtype, TensorKind::CommBuffer, slots);
        let coming = [tensor("x_part", slots[0]), tensor("dx_part", slots[1])];
        let leaving = [tensor("x_part_out", 2), tensor("dx_part_out", 2)];
        Some(Parts { coming, leaving, turns: [0; 2], cols })
    }

    /// The buffer that receives the rank's part of the rows that a unit is given.
    pub fn coming(&self, forward: bool, slot: u32) -> Buf {
        self.coming[usize::from(!forward)].slot(slot)
    }

    /// Takes the part that the rank sends out of the rows of `all`.
    pub fn cut(&mut self, step: &mut Step, name: &str, forward: bool, all: Buf) -> Buf {
        let at = usize::from(!forward);
        let part = self.leaving[at].slot(self.turns[at] % 2);
        self.turns[at] += 1;
        let tp = step.layer().tp;
        tp.own(&mut step.b, &format!("cut_{name}"), all, part, self.cols);
        part
    }
}
