//! Layers that are made alike: where their weights and gradients are, what they keep, and the blocks that run them.
//!
//! Most models have one kind. A model whose first layers have a dense network, and the others experts, has two
//! (DeepSeek-V3), one behind the other; a model some of whose layers see a window has two in turns (Gemma), and a hybrid
//! has several (Nemotron-H).

mod ahead;
mod muon;
mod update;

use super::data::{DataParallel, FlatWeights};
use super::layers::{Layers, Stretch};
use super::pipeline::Pipeline;
use super::residual::{Residual, come_back, leave};
use super::transformer::{Flats, Layer, Saved, Scratch};
use crate::plan::muon::Part;
use crate::plan::{self, Arg, BlockId, Buf, Builder, Kernel, TensorKind, each};
use crate::spec::{LlmSpec, Mixer, Parallelism, Recompute};

pub struct Kind {
    /// The beginning of the names of its tensors, blocks and calls; empty for the only kind, or for that of most
    /// layers.
    pub prefix: String,
    /// The layers of the model that are of this kind.
    pub layers: Layers,
    /// The most layers of this kind in a chunk of a stage.
    pub longest: u32,
    pub layer: Layer,
    pub recompute: Recompute,
    pub flat: FlatWeights,
    /// The weights of experts; `None` without experts.
    pub experts: Option<FlatWeights>,
    pub saved: Saved,
    /// Whether every layer has slots of its own for what it keeps; else all share one, since they are computed again.
    pub keeps: bool,
    /// Buffers for what was computed again, between the halves of a backward pass, as many slots as `left` has; `None`
    /// where nothing is.
    pub again: Option<Saved>,
    pub scratch: Scratch,
    /// The workspace of the forward pass where it runs beside a backward pass; `None`: both use `scratch`.
    pub scratch_ahead: Option<Scratch>,
    /// The blocks of a layer: one entry for all microbatches, or one for each where their rows go other ways.
    pub blocks: Vec<Blocks>,
    /// Buffers that the first half of a backward pass leaves for the second, and their slots, where passes are cut in
    /// two.
    pub left: Vec<Buf>,
    pub left_slots: u32,
    /// The block that sums the gradient of one layer, where that is not beside the backward pass.
    pub sums: BlockId,
    /// The block that sets a layer's gradient to zero.
    pub fill: BlockId,
    /// The block that gathers the weights of one layer ahead of a step, where a step begins with that.
    pub ahead: BlockId,
    /// The blocks that run Adam on the weights of one layer, one for each of its sweeps, where the device runs it.
    pub update: Vec<BlockId>,
    /// Where matrices stand in a rank's part of the weights, and in that of the experts', with the block that makes
    /// them orthogonal; `None` where Muon does not update them.
    pub parts: [Option<(Part, BlockId)>; 2],
}

/// The blocks of a layer.
#[derive(Clone, Copy)]
pub struct Blocks {
    pub fwd: BlockId,
    pub bwd: BlockId,
    /// The backward pass with the sums of the gradients behind it.
    pub bwd_last: BlockId,
    /// The blocks for layers whose inputs leave for the host's memory; `None` where they stay.
    pub away: Option<Away>,
    /// The halves of the backward pass, where all passes are cut in two and `bwd` is the first half, or some are and
    /// `bwd` is whole; `None` where none is.
    pub halves: Option<Halves>,
}

/// The blocks of a backward pass in two.
#[derive(Clone, Copy)]
pub struct Halves {
    /// The gradients of inputs.
    pub inputs: BlockId,
    /// The gradients of weights.
    pub weights: BlockId,
    /// The gradients of weights, with their sums behind them.
    pub weights_last: BlockId,
}

/// The blocks of a layer while its input leaves for the host, or that of the layer below comes back.
#[derive(Clone, Copy)]
pub struct Away {
    pub fwd: BlockId,
    pub bwd: BlockId,
    pub bwd_last: BlockId,
}

/// The kinds of a model's layers, each as a model of its own, and which layers they are. Where the rows of every layer
/// go other ways (`apart`), a layer with experts is a kind of its own.
pub fn kinds_of(model: &LlmSpec, apart: bool) -> Vec<(String, LlmSpec, Layers)> {
    if !model.pattern.is_empty() {
        return Mixer::ALL.into_iter().flat_map(|mixer| of_mixer(model, mixer, apart)).collect();
    }
    let kind = |experts: bool, window| LlmSpec {
        moe: model.moe.filter(|_| experts),
        window,
        windowed: vec![],
        dense_at: vec![],
        ..model.clone()
    };
    let windows = if model.windowed.is_empty() { vec![model.window] } else { vec![model.window, None] };
    let mixed = model.dense_layers() > 0 && model.dense_layers() < model.layers;
    let mut kinds = vec![];
    for (experts, window) in [false, true].into_iter().flat_map(|e| windows.iter().map(move |w| (e, *w))) {
        let same = |l: &u64| model.has_experts(*l) == experts && model.window_of(*l) == window;
        let layers: Vec<u32> = (0..model.layers).filter(same).map(|l| l as u32).collect();
        let together = !(apart && experts);
        if together && !layers.is_empty() {
            let network = if mixed && !experts { "dense_" } else { "" };
            let near = if windows.len() > 1 && window.is_some() { "local_" } else { "" };
            kinds.push((format!("{network}{near}"), kind(experts, window), layers.into_iter().collect()));
        }
    }
    let alone = (0..model.layers).filter(|l| apart && model.has_experts(*l));
    kinds.extend(
        alone.map(|l| (format!("layer{l}_"), kind(true, model.window_of(l)), (l as u32..l as u32 + 1).collect())),
    );
    kinds
}

/// What is computed again in layers that are a model of their own.
fn recompute_of(layers: &LlmSpec, par: &Parallelism) -> Recompute {
    let alone = layers.pattern.first() == Some(&Mixer::Experts);
    if par.options.recompute_moe && alone { Recompute::Full } else { par.recompute }
}

/// The kinds of a hybrid's layers that are of one mixer.
fn of_mixer(model: &LlmSpec, mixer: Mixer, apart: bool) -> Vec<(String, LlmSpec, Layers)> {
    let layers: Vec<u32> = (0..).zip(&model.pattern).filter(|(_, of)| **of == mixer).map(|(l, _)| l).collect();
    if layers.is_empty() {
        return vec![];
    }
    let alone = |layers: &[u32]| LlmSpec {
        layers: layers.len() as u64,
        pattern: vec![mixer; layers.len()],
        moe: model.moe.filter(|_| mixer == Mixer::Experts),
        ffn: if mixer == Mixer::Mlp { model.ffn } else { 0 },
        ..model.clone()
    };
    let prefix = |layers: &[u32]| match (mixer, apart) {
        (Mixer::Experts, true) => format!("layer{}_", layers[0]),
        _ => format!("{}_", mixer.word()),
    };
    let each = if mixer == Mixer::Experts && apart { 1 } else { layers.len() };
    layers.chunks(each).map(|of| (prefix(of), alone(of), of.iter().copied().collect())).collect()
}

impl Kind {
    /// Declares the weights of as many layers as a rank has at most, with room for some that are whole only for a
    /// while.
    pub fn weights_of(
        b: &mut Builder,
        prefix: &str,
        layer: &Layer,
        [dp, edp]: [&DataParallel; 2],
        room: [u32; 2],
        muon: bool,
    ) -> (FlatWeights, Option<FlatWeights>) {
        let parts = if muon { muon::parts_of(layer, [dp, edp]) } else { [None, None] };
        let others = parts.map(|part| part.map(|part| part.others));
        let rows = layer.weights.in_fp8();
        let flat = dp.weights_of(b, &format!("{prefix}layers"), layer.elems(), room, others[0], &rows);
        let experts = (layer.experts.as_ref())
            .map(|e| edp.weights_of(b, "experts", e.elems(), room, others[1], &e.weights.in_fp8()));
        (flat, experts)
    }

    /// Declares the buffers that its layers keep from forward to backward, and the workspace of a layer in use. Blocks,
    /// sums and updates come once there are ops.
    pub fn new(
        b: &mut Builder,
        pipe: &Pipeline,
        par: &Parallelism,
        (prefix, model, layers): (String, LlmSpec, Layers),
        layer: Layer,
        (flat, experts): (FlatWeights, Option<FlatWeights>),
    ) -> Kind {
        let recompute = recompute_of(&model, par);
        let left_slots = pipe.left_slots(&layers);
        let saved = match recompute {
            Recompute::Full => {
                let attention = layer.keeps_attention.then(|| pipe.saved_slots(&layers));
                layer.saved(b, TensorKind::Workspace, 1, attention)
            }
            _ => layer.saved(b, TensorKind::Activation, pipe.saved_slots(&layers), None),
        };
        let scratch = layer.scratch(b);
        // DualPipe cuts no unit in two that is computed again as a whole, but does cut those in which only a hybrid's
        // experts are.
        let again = (par.cuts_all() || par.cuts_some()) && recompute == Recompute::Full;
        let again = again.then(|| layer.saved(b, TensorKind::Activation, left_slots, None));
        let scratch_ahead = pipe.pairs.then(|| layer.scratch(b));
        Kind {
            prefix,
            longest: pipe.longest(&layers),
            layers,
            layer,
            recompute,
            flat,
            experts,
            saved,
            keeps: recompute != Recompute::Full,
            again,
            scratch,
            scratch_ahead,
            blocks: vec![],
            left: vec![],
            left_slots,
            sums: 0,
            fill: 0,
            ahead: 0,
            update: vec![],
            parts: [None, None],
        }
    }

    /// Number of layers of this kind.
    pub fn count(&self) -> u32 {
        self.layers.count()
    }

    /// The name of a call on a stretch of these layers; with the place of its first layer if the kind has layers
    /// outside it.
    pub fn label(&self, what: &str, stretch: &Stretch) -> String {
        let more = stretch.count() < self.count();
        let at = if more { format!(".{}", stretch.start) } else { String::new() };
        format!("{}{what}{at}", self.prefix)
    }

    pub fn weights(&self) -> Flats {
        Flats { dense: self.flat.weight, experts: self.experts.map(|e| e.weight) }
    }

    pub fn gradients(&self) -> Flats {
        Flats { dense: self.flat.grad, experts: self.experts.map(|e| e.grad) }
    }

    /// The buffers in which a rank's shares of summed gradients land.
    pub fn shares(&self, [dp, edp]: [&DataParallel; 2]) -> Flats {
        Flats { dense: dp.share_of(&self.flat), experts: self.experts.map(|e| edp.share_of(&e)) }
    }

    /// The buffers that layers are given their weights in, and those that a rank keeps of its gradients between microbatches.
    pub fn kept(&self, [dp, edp]: [&DataParallel; 2]) -> [Flats; 2] {
        let weights = Flats { dense: dp.given(&self.flat), experts: self.experts.map(|e| edp.given(&e)) };
        let gradients =
            Flats { dense: dp.kept_gradient(&self.flat), experts: self.experts.map(|e| edp.kept_gradient(&e)) };
        [weights, gradients]
    }

    /// The weights and the gradients of a layer as formals, in this order.
    pub fn formal_weights(&self, b: &mut Builder) -> (Flats, Flats) {
        (self.weights().formals(b, "w"), self.gradients().formals(b, "g"))
    }

    /// Whether every layer has slots of its own, for each of the buffers that are saved.
    pub fn keeps_each(&self) -> Vec<bool> {
        self.saved.outlasts().into_iter().map(|outlasts| self.keeps || outlasts).collect()
    }

    /// The arguments for the saved buffers in a walk over this kind's layers: a slot for each layer, or the only one.
    pub fn saved_each(&self, first: i32, step: i32) -> Vec<Arg> {
        let of = self.count();
        let arg = |(buf, keeps)| if keeps { each(buf, first, step, of) } else { Arg::from(buf) };
        self.saved.bufs().into_iter().zip(self.keeps_each()).map(arg).collect()
    }

    /// The blocks of a microbatch.
    pub fn of(&self, microbatch: u32) -> Blocks {
        self.blocks[(microbatch as usize).min(self.blocks.len() - 1)]
    }

    /// Writes the blocks of a layer, which name `route`. Its gradient is summed beside the backward pass of the layers
    /// below, or by itself.
    pub fn write(&mut self, b: &mut Builder, ranks: [&DataParallel; 2], par: &Parallelism, route: u32, beside: bool) {
        if let Some(experts) = &mut self.layer.experts {
            experts.route = route;
        }
        let fwd = self.forward(b, false);
        let again = if self.layer.keeps_attention { self.forward(b, true) } else { fwd };
        let cut = par.cuts_all() && self.again.is_some();
        let bwd = self.backward(b, if cut { Recompute::None } else { self.recompute }, again);
        // Layers that come and go have blocks of their own, with their sums.
        let [beside, alone] = [beside, !beside].map(|sums| sums && !ranks.iter().any(|ranks| ranks.by_layers()));
        let halves = match (par.cuts_all(), par.cuts_some()) {
            (false, false) => None,
            (all, _) => {
                let recompute = if self.again.is_some() { Recompute::None } else { self.recompute };
                let bwd = if all { bwd } else { self.backward(b, recompute, fwd) };
                let halves = self.halves(b, ranks, bwd, beside);
                let inputs = if self.again.is_some() { self.again_and_inputs(b, [fwd, bwd]) } else { bwd };
                Some(Halves { inputs, ..halves })
            }
        };
        let whole = beside && !par.cuts_all();
        let bwd_last = if whole { self.backward_and_sums(b, ranks, bwd) } else { bwd };
        if alone && self.blocks.is_empty() {
            self.sums = self.sums_alone(b, ranks);
        }
        let away = par.options.offload_activations.then(|| self.away(b, [fwd, bwd, bwd_last], ranks, beside));
        self.blocks.push(Blocks { fwd, bwd, bwd_last, away, halves });
    }

    /// Cuts the backward pass `bwd` in two; buffers that one half leaves for the other stand behind the formals of
    /// both.
    fn halves(&mut self, b: &mut Builder, ranks: [&DataParallel; 2], bwd: BlockId, sums: bool) -> Halves {
        let (first, of) = (self.weights().bufs().count() as u32, self.gradients().bufs().count() as u32);
        let plan::Halves { weights, kept } = b.halve(bwd, &Vec::from_iter(first..first + of));
        if self.left.is_empty() {
            let slots = self.left_slots;
            let left = kept.iter().map(|work| b.tensor_like(&format!("{}left", self.prefix), *work, slots));
            self.left = left.collect();
        }
        assert_eq!(self.left.len(), kept.len(), "the layers of one kind leave the same");
        let weights_last = if sums { self.weights_and_sums(b, ranks, weights) } else { weights };
        Halves { inputs: bwd, weights, weights_last }
    }

    /// Writes a block with the layer's forward pass, run again, and the first half of its backward pass behind it.
    fn again_and_inputs(&self, b: &mut Builder, [fwd, inputs]: [BlockId; 2]) -> BlockId {
        b.open(&format!("{}layer_bwd_again", self.prefix));
        let (w, g) = self.formal_weights(b);
        let [x, dy, dx] = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = self.saved.formals(b).bufs();
        let left = self.formal_left(b);
        // The output is not needed again, and the gradient of the input is not there yet.
        let again: Vec<Arg> = w.bufs().chain([x, dx]).chain(keep.iter().copied()).map(Arg::from).collect();
        b.call("again", fwd, 1, &again);
        let bufs = w.bufs().chain(g.bufs()).chain([x, dy, dx]).chain(keep).chain(left);
        let args: Vec<Arg> = bufs.map(Arg::from).collect();
        b.call("inputs", inputs, 1, &args);
        b.close()
    }

    /// Writes a block with the second half and, behind it, the sum of the layer's gradient over the ranks.
    fn weights_and_sums(&self, b: &mut Builder, ranks: [&DataParallel; 2], weights: BlockId) -> BlockId {
        b.open(&format!("{}layer_weights_last", self.prefix));
        let (w, g) = self.formal_weights(b);
        let xs = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = self.saved.formals(b).bufs();
        let left = self.formal_left(b);
        let share = self.shares(ranks).formals(b, "g_share");
        let bufs = w.bufs().chain(g.bufs()).chain(xs).chain(keep).chain(left);
        let args: Vec<Arg> = bufs.map(Arg::from).collect();
        b.call("weights", weights, 1, &args);
        self.sum(b, ranks, g, share);
        b.close()
    }

    /// The buffers that one half leaves for the other, as formals.
    pub fn formal_left(&self, b: &mut Builder) -> Vec<Buf> {
        self.left.iter().map(|_| b.formal("left")).collect()
    }

    fn forward(&self, b: &mut Builder, again: bool) -> BlockId {
        b.open(&format!("{}layer_fwd{}", self.prefix, if again { "_again" } else { "" }));
        let w = self.weights().formals(b, "w");
        let [x, x_out] = ["x", "x_out"].map(|name| b.formal(name));
        let keep = self.saved.formals(b);
        self.layer.forward(b, self.scratch_ahead.as_ref().unwrap_or(&self.scratch), w, [x, x_out], &keep, again);
        b.close()
    }

    fn backward(&self, b: &mut Builder, recompute: Recompute, fwd: BlockId) -> BlockId {
        b.open(&format!("{}layer_bwd", self.prefix));
        let (w, g) = self.formal_weights(b);
        let xs = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = self.saved.formals(b);
        if recompute == Recompute::Full && !self.layer.goes_by_chunks() {
            // The output is not needed again; it goes where the next layer's gradient will be written.
            let mut args: Vec<Arg> = w.bufs().chain([xs[0], xs[2]]).map(Arg::from).collect();
            args.extend(keep.bufs().into_iter().map(Arg::from));
            b.call("again", fwd, 1, &args);
        }
        self.layer.backward(b, &self.scratch, [w, g], xs, &keep);
        b.close()
    }

    /// Writes a block with a layer's backward pass and, behind it, the sum of its gradient over the ranks.
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

    /// Writes the blocks of a layer while inputs travel between the device and the host.
    fn away(&self, b: &mut Builder, [fwd, bwd, last]: [BlockId; 3], ranks: [&DataParallel; 2], beside: bool) -> Away {
        b.open(&format!("{}layer_fwd_away", self.prefix));
        let w = self.weights().formals(b, "w");
        let [x, x_out] = ["x", "x_out"].map(|name| b.formal(name));
        let keep = self.saved.formals(b).bufs();
        leave(b, x);
        let args: Vec<Arg> = w.bufs().chain([x, x_out]).chain(keep).map(Arg::from).collect();
        b.call("fwd", fwd, 1, &args);
        let fwd = b.close();
        let bwd = self.backward_away(b, bwd, None);
        Away { fwd, bwd, bwd_last: if beside { self.backward_away(b, last, Some(ranks)) } else { bwd } }
    }

    fn backward_away(&self, b: &mut Builder, block: BlockId, ranks: Option<[&DataParallel; 2]>) -> BlockId {
        b.open(&format!("{}layer_bwd_away{}", self.prefix, if ranks.is_some() { "_last" } else { "" }));
        let (w, g) = self.formal_weights(b);
        let xs = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = self.saved.formals(b).bufs();
        let shares = ranks.map(|ranks| self.shares(ranks).formals(b, "g_share"));
        come_back(b);
        let mut args: Vec<Arg> = w.bufs().chain(g.bufs()).chain(xs).chain(keep).map(Arg::from).collect();
        args.extend(shares.into_iter().flat_map(|shares| shares.args(Arg::from)));
        b.call("bwd", block, 1, &args);
        b.close()
    }

    fn sums_alone(&self, b: &mut Builder, [dp, edp]: [&DataParallel; 2]) -> BlockId {
        b.open(&format!("{}grad_sum", self.prefix));
        let g = self.gradients().formals(b, "g");
        let share = self.shares([dp, edp]).formals(b, "g_share");
        self.sum(b, [dp, edp], g, share);
        b.close()
    }

    pub fn sum(&self, b: &mut Builder, [dp, edp]: [&DataParallel; 2], g: Flats, share: Flats) {
        self.layer.sum_shared(b, g.dense);
        dp.sync(b, "grad_sum", g.dense, share.dense);
        if let (Some(g), Some(share)) = (g.experts, share.experts) {
            self.layer.sum_copies(b, &self.scratch, g);
            edp.sync(b, "expert_grad_sum", g, share);
        }
    }

    /// Calls one more layer of this kind, with weights of its own, forward.
    pub fn call_one_forward(&self, b: &mut Builder, microbatch: u32, w: Flats, xs: [Buf; 2], saved: &Saved) {
        let args: Vec<Arg> = w.bufs().chain(xs).chain(saved.bufs()).map(Arg::from).collect();
        b.call(&format!("{}fwd", self.prefix), self.of(microbatch).fwd, 1, &args);
    }

    /// Calls such a layer backward: from the gradient of its output in `xs[1]` to that of its input `xs[0]` in `xs[2]`.
    pub fn call_one_backward(&self, b: &mut Builder, m: u32, [w, g]: [Flats; 2], xs: [Buf; 3], saved: &Saved) {
        let args: Vec<Arg> = w.bufs().chain(g.bufs()).chain(xs).chain(saved.bufs()).map(Arg::from).collect();
        b.call(&format!("{}bwd", self.prefix), self.of(m).bwd, 1, &args);
    }

    /// Sums the gradients of `layers` layers, those of the last layer first.
    pub fn call_sums(&self, b: &mut Builder, layers: u32, shares: Flats) {
        let down = |buf| each(buf, layers as i32 - 1, -1, layers);
        let mut args = self.gradients().args(down);
        args.extend(shares.args(down));
        b.call(&format!("{}grad_sum", self.prefix), self.sums, layers, &args);
    }

    /// Writes the block that sets the gradient of one layer to zero.
    pub fn write_fill(&mut self, b: &mut Builder, ranks: [&DataParallel; 2]) {
        b.open(&format!("{}zero_grad", self.prefix));
        for (label, elems, _) in self.begins_at_zero(ranks) {
            let g = b.formal(if label == "fill" { "g" } else { "g_experts" });
            b.compute(label, Kernel::Fill { elems }, &[], &[g]);
        }
        self.fill = b.close();
    }

    /// Sets the gradients of `layers` layers to zero.
    pub fn call_fill(&self, b: &mut Builder, ranks: [&DataParallel; 2], layers: u32) {
        let args: Vec<Arg> = self.begins_at_zero(ranks).map(|(_, _, buf)| each(buf, 0, 1, layers)).collect();
        if layers > 0 && !args.is_empty() {
            b.call(&format!("{}zero_grad", self.prefix), self.fill, layers, &args);
        }
    }

    fn begins_at_zero<'k>(
        &'k self,
        [dp, edp]: [&'k DataParallel; 2],
    ) -> impl Iterator<Item = (&'static str, u64, Buf)> + 'k {
        let parts = [("fill", dp, Some(&self.flat)), ("fill_experts", edp, self.experts.as_ref())];
        parts.into_iter().filter_map(|(label, ranks, flat)| {
            let elems = ranks.begins_at_zero(flat?)?;
            Some((label, elems, ranks.kept_gradient(flat?)))
        })
    }

    /// The arguments of a walk over layers of this kind, forward, from layer `at` of the model on, which is number
    /// `first` of the kind.
    fn forward_args(&self, stream: Residual, [at, first]: [i32; 2]) -> Vec<Arg> {
        let n = self.count();
        let mut args = self.weights().args(|buf| each(buf, first, 1, n));
        args.extend([stream.walk(at, 1), stream.walk(at + 1, 1)]);
        args.extend(self.saved_each(first, 1));
        args
    }

    /// Calls a stretch of layers of this kind forward, in a microbatch.
    pub fn call_forward(&self, b: &mut Builder, microbatch: u32, stream: Residual, of: &Stretch) {
        let (n, blocks) = (of.count(), self.of(microbatch));
        let (at, first) = (of.start as i32, of.first as i32);
        let mut args = self.forward_args(stream, [at, first]);
        let Some((away, hosts)) = blocks.away.zip(stream.hosts(at, 1)) else {
            b.call(&self.label("fwd", of), blocks.fwd, n, &args);
            return;
        };
        let is_top = of.end == stream.layers();
        let leave = if is_top { n - 1 } else { n };
        args.push(hosts);
        if leave > 0 {
            b.call(&self.label("fwd", of), away.fwd, leave, &args);
        }
        if is_top {
            let top = n as i32 - 1;
            let mut args = self.forward_args(stream, [at + top, first + top]);
            args[self.weights().bufs().count() + 1] = stream.last().into();
            b.call(&format!("{}fwd_top", self.prefix), blocks.fwd, 1, &args);
        }
    }

    /// The arguments of a walk down, from `from` layers below the top of a stretch on. The two slots of `dx` take
    /// turns.
    fn backward_args(&self, (stream, dx): (Residual, Buf), of: &Stretch, from: i32, shares: Option<Flats>) -> Vec<Arg> {
        let (n, top) = (self.count(), (of.first + of.count()) as i32 - 1 - from);
        let turn = ((stream.layers() - of.end) as i32 + from) % 2;
        let down = |buf| each(buf, top, -1, n);
        let mut args = self.weights().args(down);
        args.extend(self.gradients().args(down));
        let at = of.end as i32 - 1 - from;
        args.extend([stream.walk(at, -1), each(dx, turn, 1, 2), each(dx, turn + 1, 1, 2)]);
        args.extend(self.saved_each(top, -1));
        args.extend(shares.into_iter().flat_map(|shares| shares.args(down)));
        args
    }

    /// Calls a stretch of layers backward, with the sums of their gradients if `shares` say where those go.
    pub fn call_backward(
        &self,
        b: &mut Builder,
        microbatch: u32,
        (stream, dx): (Residual, Buf),
        of: &Stretch,
        shares: Option<Flats>,
    ) {
        let (n, blocks) = (of.count(), self.of(microbatch));
        let block = if shares.is_some() { blocks.bwd_last } else { blocks.bwd };
        let mut args = self.backward_args((stream, dx), of, 0, shares);
        let below = of.end as i32 - 2;
        let Some((away, hosts)) = blocks.away.zip(stream.hosts(below, -1)) else {
            b.call(&self.label("bwd", of), block, n, &args);
            return;
        };
        let is_lowest = of.start == 0;
        let bring = if is_lowest { n - 1 } else { n };
        args.extend([hosts, stream.walk(below, -1)]);
        if bring > 0 {
            let block = if shares.is_some() { away.bwd_last } else { away.bwd };
            b.call(&self.label("bwd", of), block, bring, &args);
        }
        if is_lowest {
            let args = self.backward_args((stream, dx), of, n as i32 - 1, shares);
            b.call(&format!("{}bwd_lowest", self.prefix), block, 1, &args);
        }
    }
}
