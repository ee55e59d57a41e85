//! Sums of gradients in a stage: the units they stand behind, and when the sums that have come are added.

use super::Staged;
use crate::plan::*;
use crate::strategy::pipeline::Unit;

impl Staged<'_, '_> {
    /// Has the first and the last stage add up what each has of the gradient of the one embedding.
    pub(super) fn sum_tied(&mut self) {
        let step = &mut *self.step;
        let group = Group::subset(Axis::Pp, vec![vec![0, step.pipe.stages - 1]]);
        let via = Via { group: &group, index: 2, engine: step.dp.engine };
        let grad = step.dp.kept_gradient(&step.embed);
        step.b.collective("tied_grad_sum", via, CollectiveKind::AllReduce, grad, grad, step.dp.of_share());
    }

    /// Whether gradients are whole behind a backward unit, and summed there.
    pub(super) fn sums(&self, unit: Unit) -> bool {
        let beside = !self.step.par.options.no_overlap_grad && self.step.sums_last();
        beside && unit.microbatch + 1 == self.step.pipe.microbatches
    }

    /// Adds to their shares the sums that have come of the last backward unit: of its lowest layer, and of embedding
    /// and head.
    pub(super) fn add_sums(&mut self, stage: u32) {
        let Some(unit) = self.to_add.take() else { return };
        let pipe = &self.step.pipe;
        let (first, last) = (pipe.is_first(stage, unit.chunk), pipe.is_last(stage, unit.chunk));
        if last {
            self.step.add("add.head", self.step.head);
        }
        self.add_lowest(stage, unit);
        if first || (last && self.step.has_table_at_both_ends()) {
            self.step.add("add.embed", self.step.embed);
        }
    }

    fn add_lowest(&mut self, stage: u32, unit: Unit) {
        let Some(lowest) = self.chain(stage, unit.chunk).into_iter().next() else { return };
        let (ranks, kind) = ([&self.step.dp, &self.step.edp], &self.step.kinds[lowest.kind]);
        let at = self.step.pipe.offset(stage, unit.chunk, &kind.layers) + lowest.first;
        let experts = kind.experts.as_ref();
        for ((what, flat), ranks) in [("", Some(&kind.flat)), ("expert_", experts)].into_iter().zip(ranks) {
            if let Some((flat, (partial, slots))) = flat.and_then(|flat| Some((flat, ranks.partials(flat)?))) {
                let (label, share) = (format!("{}{what}add", kind.prefix), ranks.kept_gradient(flat).slot(at));
                ranks.add(&mut self.step.b, &label, flat, partial.slot(lowest.first % slots), share);
            }
        }
    }
}
