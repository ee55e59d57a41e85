//! Before and behind the passes of a step: gradients begin at zero, and the optimizer runs.

use super::super::data::{DataParallel, FlatWeights};
use super::Step;
use crate::plan::*;

impl Step<'_> {
    /// Gradients of a rank that has so many layers of each kind, and maybe the embedding and the head, begin at zero.
    pub(in crate::strategy) fn zero_grad(&mut self, counts: &[u32], embed: bool, head: bool) {
        for (kind, &layers) in self.kinds.iter().zip(counts) {
            kind.call_fill(&mut self.b, [&self.dp, &self.edp], layers);
        }
        for (label, w, has) in [("embed", self.embed, embed), ("head", self.head, head)] {
            if let Some(elems) = self.dp.begins_at_zero(&w).filter(|_| has) {
                let gradient = self.dp.kept_gradient(&w);
                self.b.compute(&format!("zero_grad.{label}"), Kernel::Fill { elems }, &[], &[gradient]);
            }
        }
        for (dp, name, w) in self.modules.iter().filter(|_| head).flat_map(|m| m.flats([&self.dp, &self.edp])) {
            if let Some(elems) = dp.begins_at_zero(w) {
                let gradient = dp.kept_gradient(w);
                self.b.compute(&format!("zero_grad.{name}"), Kernel::Fill { elems }, &[], &[gradient]);
            }
        }
        if head {
            self.b.compute("zero_loss", Kernel::Fill { elems: 1 }, &[], &[self.loss]);
        }
    }

    /// Adam on the weights of a rank that has so many layers of each kind, and maybe the embedding and the head.
    pub(in crate::strategy) fn optimizer(&mut self, counts: &[u32], embed: bool, head: bool) {
        let (adam, names) = (Adam::default(), self.b.keeps_names());
        // In the order in which their gradients are there.
        let mut all: Vec<(&DataParallel, String, &FlatWeights, u32)> = vec![];
        if head {
            all.push((&self.dp, "head".into(), &self.head, 0));
            let modules = self.modules.iter().flat_map(|m| m.flats([&self.dp, &self.edp]));
            all.extend(modules.map(|(dp, name, w)| (dp, name, w, 0)));
        }
        for (kind, &layers) in self.kinds.iter().zip(counts).rev() {
            for l in (0..layers).rev() {
                let name = if names { format!("{}layer.{l}", kind.prefix) } else { String::new() };
                all.push((&self.dp, name, &kind.flat, l));
                if let Some(experts) = &kind.experts {
                    all.push((&self.edp, format!("experts.{l}"), experts, l));
                }
            }
        }
        if embed {
            all.push((&self.dp, "embed".into(), &self.embed, 0));
        }
        let b = &mut self.b;
        all.iter().for_each(|(dp, name, w, slot)| dp.sum_across(b, name, w, *slot));
        let sent = all.iter().map(|(dp, name, w, slot)| dp.send(b, name, w, *slot)).last().flatten();
        for (at, (dp, name, w, slot)) in all.into_iter().enumerate() {
            dp.update(b, &name, w, slot, adam, sent.filter(|_| at == 0));
        }
    }
}
