//! A forward and a backward unit of different microbatches in one: DualPipe's forward-backward chunk
//! (arXiv:2412.19437, section 3.2.1), and Megatron Core's `overlap-moe-expert-parallel-comm`.
//!
//! ```text
//! compute  experts' gradients packed | attention | experts backward | experts    | attention backward | residual
//! rows     ------------------------- dispatch' -- dispatch ----------- combine' -- combine -------------
//! ```
//! The top layer that is left to go backward goes with the next layer to go forward; `'` marks the backward pass. Each
//! side goes on while the rows of the other travel, on the one communicator that both have.

use super::{Chain, Here, Staged, each};
use crate::plan::*;
use crate::strategy::kind::Kind;
use crate::strategy::layers::Stretch;
use crate::strategy::pipeline::Pass;
use crate::strategy::transformer::Flats;
use std::collections::BTreeMap;

/// Names a chunk by its layers, and by the microbatch where the rows of each go other ways.
pub(super) type Key = (Chain, u32);

/// Blocks that were written of two others, by these two.
#[derive(Default)]
pub(super) struct Pairs {
    chunks: BTreeMap<[Key; 2], BlockId>,
    layers: BTreeMap<[BlockId; 2], BlockId>,
}

/// A chunk going backward, or forward, as a side of a pair: its formals, and its layers.
struct Side<'k> {
    here: Vec<Here<'k>>,
    chain: Chain,
    microbatch: u32,
    w: Vec<Flats>,
    g: Vec<Flats>,
    x_in: Buf,
    x: Buf,
    /// The output of the last layer forward; or, backward, the gradients in turn.
    out: Buf,
    saved: Vec<Vec<Buf>>,
}

impl<'k> Side<'k> {
    fn new(b: &mut Builder, kinds: &'k [Kind], (chain, microbatch): &Key, backward: bool) -> Side<'k> {
        let here: Vec<Here> = Here::of(kinds, chain);
        let w = here.iter().map(|h| h.kind.weights().formals(b, "w")).collect();
        let gradients = here.iter().filter(|_| backward);
        let g = gradients.map(|h| h.kind.gradients().formals(b, "g")).collect();
        let [x_in, x, out] = ["x_in", "x", if backward { "dx" } else { "x_out" }].map(|name| b.formal(name));
        let saved = here.iter().map(|h| h.kind.saved.formals(b).bufs()).collect();
        Side { here, chain: chain.clone(), microbatch: *microbatch, w, g, x_in, x, out, saved }
    }

    fn layers(&self) -> u32 {
        super::length(&self.chain)
    }

    /// The stretch that a layer of the chunk is in, its kind, and the place of that among the kinds of the chunk.
    fn stretch(&self, layer: u32) -> (usize, &Here<'k>, &Stretch) {
        let of = self.chain.iter().find(|of| (of.start..of.end).contains(&layer));
        let of = of.expect("every layer of a chunk is of a kind");
        let (i, here) = Here::at(&self.here, of);
        (i, here, of)
    }

    /// The block of a layer.
    fn block(&self, layer: u32) -> BlockId {
        let blocks = self.stretch(layer).1.kind.of(self.microbatch);
        if self.g.is_empty() { blocks.fwd } else { blocks.bwd }
    }

    /// The arguments of that block for `layer`, and for `repeat` - 1 layers that follow: those above it forward, those
    /// below it backward. Several layers have to be of one kind, and none of them at an end of the chunk.
    fn args(&self, layer: u32, repeat: u32) -> Vec<Arg> {
        let ((i, h, of), l) = (self.stretch(layer), self.layers());
        let backward = !self.g.is_empty();
        let step = if backward { -1 } else { 1 };
        let walk = |buf: Buf, at: u32, of: u32| match repeat {
            1 => buf.slot(at % of.max(1)).into(),
            _ => each(buf, at as i32, step, of),
        };
        let keep = |buf: Buf| walk(buf, of.first + layer - of.start, h.count);
        let input = if layer == 0 { self.x_in.into() } else { walk(self.x, layer - 1, l - 1) };
        let mut args = self.w[i].args(keep);
        if backward {
            args.extend(self.g[i].args(keep));
            let done = l - 1 - layer;
            let turn =
                |at: u32| if repeat == 1 { self.out.slot(at % 2).into() } else { each(self.out, at as i32, 1, 2) };
            args.extend([input, turn(done), turn(done + 1)]);
        } else {
            let out = if layer + 1 == l { self.out.into() } else { walk(self.x, layer, l - 1) };
            args.extend([input, out]);
        }
        let saved = self.saved[i].iter().zip(h.kind.keeps_each());
        args.extend(saved.map(|(&buf, keeps)| if keeps { keep(buf) } else { buf.into() }));
        args
    }
}

impl Staged<'_, '_> {
    /// Runs both units of a pair, the backward one first where they take turns.
    pub(super) fn pair(&mut self, stage: u32, forward: Pass, backward: Pass) {
        self.passed(stage, forward.unit, forward.input, self.input.slot(forward.input));
        self.begin_forward(stage, forward);
        self.passed(stage, backward.unit, backward.to, self.dx.slot(backward.to));
        self.begin_backward(stage, backward);
        let keys = [backward, forward].map(|pass| self.key(stage, pass.unit));
        let block = match self.pairs.chunks.get(&keys) {
            Some(&block) => block,
            None => self.chunk_pair(keys),
        };
        let mut args = self.backward_args(stage, backward);
        args.extend(self.forward_args(stage, forward));
        let name = |pass: Pass| format!("{}.{}", pass.unit.chunk, pass.unit.microbatch);
        self.step.b.call(&format!("fwd.{}+bwd.{}", name(forward), name(backward)), block, 1, &args);
        self.end_forward(stage, forward);
        self.end_backward(stage, backward);
    }

    /// Writes the layers of one chunk backward, from the top, beside those of another forward, from the bottom.
    fn chunk_pair(&mut self, keys: [Key; 2]) -> BlockId {
        let [backward, forward] = &keys;
        self.braid_layers(backward, forward);
        let Staged { step, pairs, .. } = self;
        let (b, kinds) = (&mut step.b, &step.kinds);
        b.open(&format!(
            "bwd_{}_fwd_{}",
            super::name_of(kinds.len(), &backward.0),
            super::name_of(kinds.len(), &forward.0)
        ));
        let down = Side::new(b, kinds, backward, true);
        let up = Side::new(b, kinds, forward, false);
        let (left, ahead) = (down.layers(), up.layers());
        let both = left.min(ahead);
        let mut at = 0;
        while at < both {
            let top = left - 1 - at;
            let blocks = [down.block(top), up.block(at)];
            // Pairs of layers that are alike, as many as there are, none of them at an end.
            let inside = |i: u32| i > 0 && i + 1 < ahead && left - 1 - i > 0;
            let alike = |i: &u32| inside(*i) && [down.block(left - 1 - i), up.block(*i)] == blocks;
            let repeat = if inside(at) { (at..both).take_while(alike).count() as u32 } else { 1 };
            let mut args = down.args(top, repeat);
            args.extend(up.args(at, repeat));
            b.call("layers", pairs.layers[&blocks], repeat, &args);
            at += repeat;
        }
        for layer in (0..left - both).rev() {
            b.call("left", down.block(layer), 1, &down.args(layer, 1));
        }
        for layer in both..ahead {
            b.call("ahead", up.block(layer), 1, &up.args(layer, 1));
        }
        let block = b.close();
        pairs.chunks.insert(keys, block);
        block
    }

    /// Writes blocks of two layers each, for the layers that two chunks go through side by side.
    fn braid_layers(&mut self, backward: &Key, forward: &Key) {
        let Staged { step, pairs, .. } = self;
        let (kinds, b) = (&step.kinds, &mut step.b);
        let of = |key: &Key| -> Vec<[BlockId; 2]> {
            let layers = key.0.iter().flat_map(|of| vec![kinds[of.kind].of(key.1); of.count() as usize]);
            layers.map(|blocks| [blocks.fwd, blocks.bwd]).collect()
        };
        for (down, up) in of(backward).iter().rev().zip(&of(forward)) {
            let blocks = [down[1], up[0]];
            pairs.layers.entry(blocks).or_insert_with(|| b.braid("layer_bwd_fwd", blocks));
        }
    }
}
