//! Layers that are made alike: where their weights and gradients are, what they keep, and the blocks that run them.
//!
//! Most models have one kind. A model whose first layers have a dense network, and the others experts, has two
//! (DeepSeek-V3); the layers of a kind stand one behind the other.

use super::data::{DataParallel, FlatWeights};
use super::transformer::{Flats, Layer, Saved, Scratch};
use crate::plan::{Arg, BlockId, Buf, Builder, Kernel, TensorKind, each};
use crate::spec::{LlmSpec, Recompute};
use std::ops::Range;

pub struct Kind {
    /// Before the names of tensors, blocks and calls; empty where one kind is all there is, or what most layers are.
    pub prefix: String,
    /// Which layers of the model.
    pub layers: Range<u32>,
    pub layer: Layer,
    pub flat: FlatWeights,
    /// Of the experts.
    pub experts: Option<FlatWeights>,
    pub saved: Saved,
    /// Every layer has slots of its own for what it keeps; else one serves all, as they are computed again.
    pub keeps: bool,
    pub scratch: Scratch,
    /// What the forward pass works in, where it runs beside a backward pass.
    pub scratch_ahead: Option<Scratch>,
    /// One of each for all microbatches, or one for every one where their rows go other ways.
    pub blocks: Vec<Blocks>,
    /// The block that sums the gradient of one layer, where that is not beside the backward pass.
    pub sums: BlockId,
    /// The block that sets a layer's gradient to zero.
    pub fill: BlockId,
}

/// The blocks of a layer.
#[derive(Clone, Copy)]
pub struct Blocks {
    pub fwd: BlockId,
    pub bwd: BlockId,
    /// With the sums of the gradients.
    pub bwd_last: BlockId,
}

/// The kinds of a model's layers, each as a model of its own, and which layers they are. Where the rows of every layer
/// go other ways (`apart`), a layer with experts is a kind of its own.
pub fn kinds_of(model: &LlmSpec, apart: bool) -> Vec<(String, LlmSpec, Range<u32>)> {
    let all = model.layers as u32;
    let dense = if model.moe.is_some() { model.dense_layers() as u32 } else { all };
    let mut kinds = vec![];
    if dense > 0 {
        let prefix = if dense < all { "dense_" } else { "" };
        kinds.push((prefix.into(), LlmSpec { moe: None, ..model.clone() }, 0..dense));
    }
    match apart {
        true => kinds.extend((dense..all).map(|l| (format!("layer{l}_"), model.clone(), l..l + 1))),
        false if dense < all => kinds.push((String::new(), model.clone(), dense..all)),
        false => {}
    }
    kinds
}

/// How many layers of `part` are of a kind's `layers`.
pub fn common(layers: &Range<u32>, part: &Range<u32>) -> u32 {
    layers.end.min(part.end).saturating_sub(layers.start.max(part.start))
}

impl Kind {
    /// Declares the weights of as many layers as a rank has at most, `held`.
    pub fn weights_of(
        b: &mut Builder,
        prefix: &str,
        layer: &Layer,
        [dp, edp]: [&DataParallel; 2],
        held: u32,
        whole: u32,
    ) -> (FlatWeights, Option<FlatWeights>) {
        let flat = dp.weights(b, &format!("{prefix}layers"), layer.elems(), held, whole);
        let experts = layer.experts.as_ref().map(|e| e.elems());
        (flat, experts.map(|elems| edp.weights(b, "experts", elems, held, whole)))
    }

    /// What layers keep, `slots` of it, and what they work in.
    pub fn buffers_of(b: &mut Builder, layer: &Layer, recompute: Recompute, slots: u32) -> (Saved, Scratch) {
        let saved = match recompute {
            Recompute::Full => layer.saved(b, TensorKind::Workspace, 1),
            _ => layer.saved(b, TensorKind::Activation, slots),
        };
        (saved, layer.scratch(b))
    }

    /// Layers of this kind.
    pub fn count(&self) -> u32 {
        self.layers.len() as u32
    }

    pub fn weights(&self) -> Flats {
        Flats { dense: self.flat.weight, experts: self.experts.map(|e| e.weight) }
    }

    pub fn gradients(&self) -> Flats {
        Flats { dense: self.flat.grad, experts: self.experts.map(|e| e.grad) }
    }

    /// Where a rank's shares of summed gradients land.
    pub fn shares(&self, [dp, edp]: [&DataParallel; 2]) -> Flats {
        Flats { dense: dp.share_of(&self.flat), experts: self.experts.map(|e| edp.share_of(&e)) }
    }

    /// Weights and gradients of a layer as formals, in this order.
    pub fn formal_weights(&self, b: &mut Builder) -> (Flats, Flats) {
        (self.weights().formals(b, "w"), self.gradients().formals(b, "g"))
    }

    /// What iteration i of a walk over this kind's layers keeps: a slot a layer, or the one there is.
    pub fn saved_each(&self, first: i32, step: i32) -> Vec<Arg> {
        let of = self.count();
        let arg = |buf| if self.keeps { each(buf, first, step, of) } else { Arg::from(buf) };
        self.saved.bufs().into_iter().map(arg).collect()
    }

    /// The blocks of a microbatch.
    pub fn of(&self, microbatch: u32) -> Blocks {
        self.blocks[(microbatch as usize).min(self.blocks.len() - 1)]
    }

    /// Writes the blocks of a layer, which name `route`. Its gradient is summed beside the backward pass of the layers
    /// below, or by itself.
    pub fn write(
        &mut self,
        b: &mut Builder,
        ranks: [&DataParallel; 2],
        recompute: Recompute,
        route: u32,
        beside: bool,
    ) {
        if let Some(experts) = &mut self.layer.experts {
            experts.route = route;
        }
        let fwd = self.forward(b);
        let bwd = self.backward(b, recompute, fwd);
        let bwd_last = if beside { self.backward_and_sums(b, ranks, bwd) } else { bwd };
        if !beside && self.blocks.is_empty() {
            self.sums = self.sums_alone(b, ranks);
        }
        self.blocks.push(Blocks { fwd, bwd, bwd_last });
    }

    fn forward(&self, b: &mut Builder) -> BlockId {
        b.open(&format!("{}layer_fwd", self.prefix));
        let w = self.weights().formals(b, "w");
        let [x, x_out] = ["x", "x_out"].map(|name| b.formal(name));
        let keep = self.saved.formals(b);
        self.layer.forward(b, self.scratch_ahead.as_ref().unwrap_or(&self.scratch), w, x, x_out, &keep);
        b.close()
    }

    fn backward(&self, b: &mut Builder, recompute: Recompute, fwd: BlockId) -> BlockId {
        b.open(&format!("{}layer_bwd", self.prefix));
        let (w, g) = self.formal_weights(b);
        let [x, dy, dx] = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = self.saved.formals(b);
        if recompute == Recompute::Full {
            // The output is not needed again; it goes where the next layer's gradient will be written.
            let mut args: Vec<Arg> = w.bufs().chain([x, dx]).map(Arg::from).collect();
            args.extend(keep.bufs().into_iter().map(Arg::from));
            b.call("again", fwd, 1, &args);
        }
        self.layer.backward(b, &self.scratch, [w, g], x, &keep, dy, dx);
        b.close()
    }

    /// A layer's backward pass and, behind it, the sum of its gradient over the ranks.
    fn backward_and_sums(&self, b: &mut Builder, [dp, edp]: [&DataParallel; 2], bwd: BlockId) -> BlockId {
        b.open(&format!("{}layer_bwd_last", self.prefix));
        let (w, g) = self.formal_weights(b);
        let [x, dy, dx] = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = self.saved.formals(b);
        let share = self.shares([dp, edp]).formals(b, "g_share");
        let mut args: Vec<Arg> = w.bufs().chain(g.bufs()).chain([x, dy, dx]).map(Arg::from).collect();
        args.extend(keep.bufs().into_iter().map(Arg::from));
        b.call("bwd", bwd, 1, &args);
        self.sum(b, [dp, edp], g, share);
        b.close()
    }

    fn sums_alone(&self, b: &mut Builder, [dp, edp]: [&DataParallel; 2]) -> BlockId {
        b.open(&format!("{}grad_sum", self.prefix));
        let g = self.gradients().formals(b, "g");
        let share = self.shares([dp, edp]).formals(b, "g_share");
        self.sum(b, [dp, edp], g, share);
        b.close()
    }

    fn sum(&self, b: &mut Builder, [dp, edp]: [&DataParallel; 2], g: Flats, share: Flats) {
        self.layer.sum_shared(b, g.dense);
        dp.sync(b, "grad_sum", g.dense, share.dense);
        if let (Some(g), Some(share)) = (g.experts, share.experts) {
            edp.sync(b, "expert_grad_sum", g, share);
        }
    }

    /// Sums the gradients of so many layers, those of the last first.
    pub fn call_sums(&self, b: &mut Builder, layers: u32, shares: Flats) {
        let down = |buf| each(buf, layers as i32 - 1, -1, layers);
        let mut args = self.gradients().args(down);
        args.extend(shares.args(down));
        b.call(&format!("{}grad_sum", self.prefix), self.sums, layers, &args);
    }

    /// Writes the block that sets the gradient of one layer to zero.
    pub fn write_fill(&mut self, b: &mut Builder) {
        b.open(&format!("{}zero_grad", self.prefix));
        let g = self.gradients().formals(b, "g");
        b.compute("fill", Kernel::Fill { elems: self.flat.elems }, &[], &[g.dense]);
        if let (Some(g), Some(experts)) = (g.experts, self.experts) {
            b.compute("fill_experts", Kernel::Fill { elems: experts.elems }, &[], &[g]);
        }
        self.fill = b.close();
    }

    /// All layers of this kind forward, in a microbatch; slot l of `x` is the input of the model's layer l, of `all`.
    pub fn call_forward(&self, b: &mut Builder, microbatch: u32, x: Buf, all: u32) {
        let (n, at) = (self.count(), self.layers.start as i32);
        let mut args = self.weights().args(|buf| each(buf, 0, 1, n));
        args.extend([each(x, at, 1, all + 1), each(x, at + 1, 1, all + 1)]);
        args.extend(self.saved_each(0, 1));
        b.call(&format!("{}fwd", self.prefix), self.of(microbatch).fwd, n, &args);
    }

    /// And backward, with the sums of their gradients if `shares` say where those go. The two slots of `dx` take turns.
    pub fn call_backward(&self, b: &mut Builder, microbatch: u32, [x, dx]: [Buf; 2], all: u32, shares: Option<Flats>) {
        let (n, top, turn) = (self.count(), self.count() as i32 - 1, (all - self.layers.end) as i32);
        let down = |buf| each(buf, top, -1, n);
        let mut args = self.weights().args(down);
        args.extend(self.gradients().args(down));
        let x_top = self.layers.end as i32 - 1;
        args.extend([each(x, x_top, -1, all + 1), each(dx, turn % 2, 1, 2), each(dx, turn % 2 + 1, 1, 2)]);
        args.extend(self.saved_each(top, -1));
        args.extend(shares.into_iter().flat_map(|shares| shares.args(down)));
        let Blocks { bwd, bwd_last, .. } = self.of(microbatch);
        let block = if shares.is_some() { bwd_last } else { bwd };
        b.call(&format!("{}bwd", self.prefix), block, n, &args);
    }
}
