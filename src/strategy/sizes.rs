//! Plans of which only sizes are kept, and how further microbatches change them.

use super::step::flops_of;
use crate::plan::print::Prints;
use crate::plan::structure::is_of_microbatches;
use crate::plan::*;
use crate::spec::{LlmSpec, Workload};

/// A plan of which only sizes were kept, and numbers for everything else about it.
pub struct Sizes {
    /// Every tensor and every op, but no names, no weights by name, and kernels without their buffers.
    pub plan: Plan,
    pub prints: Prints,
}

impl Sizes {
    /// Number of its microbatches that are alike: all but the last, where one block stands for them and the call has no
    /// others beside it. `None` where the plan has microbatches in another way.
    pub fn alike(&mut self) -> Option<u32> {
        self.microbatches().map(|(_, repeat)| *repeat)
    }

    /// Makes the sizes those of a plan with `more` microbatches, whose workload is `work`: there are slots for more
    /// inputs, and one call has more iterations. Nothing else of a plan depends on their number once three are alike.
    ///
    /// Panics if fewer are alike.
    pub fn lengthen(&mut self, model: &LlmSpec, work: &Workload, more: u32) {
        let (args, repeat) = self.microbatches().filter(|(_, repeat)| **repeat > 2).expect("three alike");
        *repeat += more;
        for arg in args {
            if let Arg::Each { of, .. } = arg {
                *of += more;
            }
        }
        if let Feed::Tokens(inputs) = &mut self.plan.feed {
            inputs.microbatches += more;
            for tensor in [inputs.tokens, inputs.targets] {
                self.plan.tensors[tensor as usize].slots += more;
            }
        }
        self.plan.about.global_batch = work.global_batch;
        self.plan.about.model_flops = flops_of(model, work);
    }

    /// The program's call of the microbatches that are all alike: its arguments, and how often it repeats.
    fn microbatches(&mut self) -> Option<(&mut [Arg], &mut u32)> {
        let given = self.plan.feed.given();
        let [program] = &mut self.plan.programs[..] else { return None };
        let mut calls = program.ops.iter_mut().filter_map(|op| match &mut op.kind {
            OpKind::Call { args, repeat, .. } if is_of_microbatches(&given, args) => Some((&mut args[..], repeat)),
            _ => None,
        });
        calls.next().filter(|_| calls.next().is_none())
    }
}
