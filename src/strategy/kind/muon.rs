//! Layers of a kind whose matrices Muon updates.

use super::super::data::{DataParallel, FlatWeights};
use super::super::muon;
use super::super::transformer::Layer;
use super::Kind;
use crate::plan::muon::Part;
use crate::plan::{Adam, Builder};

/// Where matrices stand in the optimizer's part of a layer's weights, and of its experts'.
pub(super) fn parts_of(layer: &Layer, [dp, edp]: [&DataParallel; 2]) -> [Option<Part>; 2] {
    let dense = dp.part(layer.elems(), muon::matrices(&layer.weights));
    let experts = layer.experts.as_ref().map(|e| edp.part(e.elems(), muon::matrices(&e.weights)));
    [Some(dense), experts]
}

impl Kind {
    /// Writes the blocks that make the matrices of one layer orthogonal.
    pub fn write_chains(&mut self, b: &mut Builder, ranks: [&DataParallel; 2]) {
        let labels = ["orthogonalise", "orthogonalise_experts"].map(|what| format!("{}{what}", self.prefix));
        let [dense, experts] = parts_of(&self.layer, ranks);
        let mut write = |label: &str, part: Option<Part>| {
            let part = part?;
            let block = muon::write_chain(b, label, &part);
            Some((part, block))
        };
        self.parts = [write(&labels[0], dense), write(&labels[1], experts)];
    }

    /// Runs Muon on the weights of `layers` layers, those of the last layer first.
    pub fn update_by_muon(&self, b: &mut Builder, ranks: [&DataParallel; 2], room: muon::Room, layers: u32) {
        for ((label, dp, weights), part) in self.updates(ranks).zip(&self.parts) {
            let Some((part, chain)) = part else { continue };
            let of = muon::Layers { dp, weights, part, chain: *chain, room, adam: Adam::default() };
            let dot = if label.is_empty() { "layer." } else { "experts." };
            of.update(b, &format!("{}{dot}", self.prefix), layers);
        }
    }

    /// The weights that Muon needs room for, each with its ranks and its part.
    pub fn flats_by_part<'k>(
        &'k self,
        ranks: [&'k DataParallel; 2],
    ) -> impl Iterator<Item = (&'k DataParallel, &'k FlatWeights, Part)> {
        let parts = parts_of(&self.layer, ranks);
        self.updates(ranks).zip(parts).filter_map(|((_, dp, w), part)| Some((dp, w, part?)))
    }
}
