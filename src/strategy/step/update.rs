//! Before and behind the passes of a step: weights come whole, gradients begin at zero, and the optimizer runs.

use super::super::data::{DataParallel, FlatWeights};
use super::super::kind::Kind;
use super::super::layers::Stretch;
use super::super::pipeline::Pipeline;
use super::Step;
use crate::plan::*;
use std::ops::Range;

impl Step<'_> {
    /// Gathers the weights that the optimizer has left in shares, of a rank that has the layers of a stage, and maybe the
    /// embedding and the head: in the order in which the first microbatch wants them.
    pub(in crate::strategy) fn gather_ahead(&mut self, stage: u32, embed: bool, head: bool) {
        let Step { b, dp, edp, kinds, modules, pipe, .. } = self;
        let (dp, edp): (&DataParallel, &DataParallel) = (dp, edp);
        let whole = |b: &mut Builder, dp: &DataParallel, name: &str, w: &FlatWeights| {
            if let Some([kept, share]) = dp.gathered_ahead(w) {
                dp.gather_ahead(b, &format!(".{name}"), w, [kept, share, w.weight]);
            }
        };
        if embed {
            whole(b, dp, "embed", &self.embed);
        }
        for (kind, slots) in runs_of(kinds, pipe, stage) {
            kind.call_ahead(b, [dp, edp], slots, pipe.held(stage, &kind.layers));
        }
        if head {
            whole(b, dp, "head", &self.head);
            for (dp, name, w) in modules.iter().flat_map(|m| m.flats([dp, edp])) {
                whole(b, dp, &name, w);
            }
        }
    }

    /// Sets the gradients to zero of a rank that has `counts` layers of each kind, and maybe the embedding and the
    /// head.
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

    /// Runs Adam on the weights of a rank that has `counts` layers of each kind, and maybe the embedding and the head,
    /// in the order in which their gradients are there.
    pub(in crate::strategy) fn optimizer(&mut self, counts: &[u32], embed: bool, head: bool) {
        let adam = Adam::default();
        let Step { b, dp, edp, kinds, modules, muon, .. } = self;
        let (dp, edp): (&DataParallel, &DataParallel) = (dp, edp);
        let mut first: Vec<Flat> = vec![];
        if head {
            first.push((dp, "head".into(), &self.head, 0));
            let modules = modules.iter().flat_map(|m| m.flats([dp, edp]));
            first.extend(modules.map(|(dp, name, w)| (dp, name, w, 0)));
        }
        let kinds = || kinds.iter().zip(counts).rev();
        let layers: Vec<Flat> = kinds().flat_map(|(kind, &layers)| flats_of(b, kind, [dp, edp], layers)).collect();
        let last: Vec<Flat> = embed.then(|| (dp, "embed".into(), &self.embed, 0)).into_iter().collect();
        let all = || first.iter().chain(&layers).chain(&last);
        all().for_each(|(dp, name, w, slot)| dp.sum_across(b, name, w, *slot));
        if dp.offload {
            let sent = all().map(|(dp, name, w, slot)| dp.send(b, name, w, *slot)).last().flatten();
            for (at, (dp, name, w, slot)) in all().enumerate() {
                dp.update_on_host(b, name, w, *slot, adam, sent.filter(|_| at == 0));
            }
            return;
        }
        for &sweep in dp.sweeps() {
            first.iter().for_each(|(dp, name, w, slot)| dp.update(b, name, w, *slot, adam, sweep));
            kinds().for_each(|(kind, &layers)| match *muon {
                Some(room) => kind.update_by_muon(b, [dp, edp], room, layers),
                None => kind.call_update(b, [dp, edp], layers, sweep),
            });
            last.iter().for_each(|(dp, name, w, slot)| dp.update(b, name, w, *slot, adam, sweep));
        }
    }
}

/// The layers of a stage in their order, those of a kind that stand in slots one behind the other as one.
fn runs_of<'k>(kinds: &'k [Kind], pipe: &Pipeline, stage: u32) -> Vec<(&'k Kind, Range<u32>)> {
    let mut runs: Vec<(usize, Range<u32>)> = vec![];
    for chunk in 0..pipe.chunks {
        for of in Stretch::all(kinds.iter().map(|kind| &kind.layers), &pipe.range(stage, chunk)) {
            let first = pipe.offset(stage, chunk, &kinds[of.kind].layers) + of.first;
            match runs.last_mut() {
                Some((kind, slots)) if *kind == of.kind && slots.end == first => slots.end += of.count(),
                _ => runs.push((of.kind, first..first + of.count())),
            }
        }
    }
    runs.into_iter().map(|(kind, slots)| (&kinds[kind], slots)).collect()
}

/// Flat weights: the ranks that hold the same, their name, their buffers, and a slot of them.
type Flat<'s> = (&'s DataParallel, String, &'s FlatWeights, u32);

/// The flat weights of the layers of one kind, those of the last layer first.
fn flats_of<'s>(b: &Builder, kind: &'s Kind, [dp, edp]: [&'s DataParallel; 2], layers: u32) -> Vec<Flat<'s>> {
    let mut all: Vec<Flat> = vec![];
    for l in (0..layers).rev() {
        let name = if b.keeps_names() { format!("{}layer.{l}", kind.prefix) } else { String::new() };
        all.push((dp, name, &kind.flat, l));
        if let Some(experts) = &kind.experts {
            all.push((edp, format!("experts.{l}"), experts, l));
        }
    }
    all
}
