//! Layers whose gradients (ZeRO 2) or weights too (ZeRO 3) are whole only while they are used.
//!
//! ```text
//! forward   gather layer i+1   | layer i
//! backward  gather layer i-1   | layer i, its gradient scattered behind it | the sum of layer i+1 added
//! ```
//! The layers of a body are given as [`Run`]s: those of a whole model in a [`microbatch`](self::microbatch), those of a
//! chunk in a stage of a pipeline. The sum of a layer is added one layer later, when it has come; adding that of the
//! last layer of a pass is left to the caller.
//!
//! With `copy-shards` gathered weights land in a buffer of their own, from which the layer copies them before all else,
//! and a gradient is copied to the buffer that it is scattered from.

mod microbatch;

use super::data::{DataParallel, FlatWeights};
use super::kind::Kind;
use super::residual::{come_back, leave};
use super::transformer::Flats;
use crate::plan::{Arg, BlockId, Buf, Builder, each};
use std::collections::BTreeMap;

/// Layers of one kind, one behind the other in the order of a pass.
pub struct Run {
    pub kind: usize,
    pub label: String,
    /// The first layer of the pass among those of its kind that the body has; how many follow it, itself included; and
    /// how many of the kind the body has.
    pub at: u32,
    pub count: u32,
    pub of: u32,
    /// Arguments of their blocks besides weights and gradients.
    pub rest: Vec<Arg>,
    /// Arguments of the copies, where inputs travel between the device and the host; else empty.
    pub hosts: Vec<Arg>,
}

/// The buffers that a rank keeps of the layers of a kind, as tensors or as formals of a body.
#[derive(Clone, Copy)]
pub struct Sites {
    pub weights: Flats,
    pub gradients: Flats,
    /// The buffers in which sums behind the last microbatch land; `None` where gradients are not summed there.
    pub sums: Option<Flats>,
}

/// The tasks of a layer's block besides the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Variant {
    kind: usize,
    microbatch: u32,
    forward: bool,
    /// Whether it gathers the weights of the layer that comes next in the pass.
    gathers: bool,
    /// Whether it adds the sum of the layer before to the share.
    adds: bool,
    /// Whether an input leaves for the host's memory, or comes back.
    travels: bool,
    /// Whether gradients are whole behind it, and shared out.
    sums: bool,
}

/// The blocks that were written, by their tasks.
pub type Blocks = BTreeMap<Variant, BlockId>;

/// A pass through layers, being written.
pub struct Passing<'s> {
    pub b: &'s mut Builder,
    pub kinds: &'s [Kind],
    pub ranks: [&'s DataParallel; 2],
    pub blocks: &'s mut Blocks,
    /// The buffers of each kind's layers; `None` for a kind that the body has no layers of.
    pub sites: Vec<Option<Sites>>,
    /// Layers whose weights, or gradients, there is room for while they are whole.
    pub room: u32,
    pub microbatch: u32,
    /// Whether gradients that have added up whole are shared out in this pass.
    pub sums: bool,
}

/// One of a layer's flat tensors, and the buffers of its parts.
struct Part<'s> {
    ranks: &'s DataParallel,
    flat: &'s FlatWeights,
    prefix: &'static str,
    weight: Buf,
    gradient: Buf,
    sum: Option<Buf>,
}

impl Part<'_> {
    fn scatters(&self, sums: bool) -> bool {
        scatters(self.ranks, sums)
    }

    /// The argument for the weights where kernels read them, in a walk from a layer on.
    fn whole(&self, room: u32, at: i32, step: i32, of: u32) -> Arg {
        match self.ranks.shares_weights() {
            true => each(self.flat.weight, at, step, self.ranks.in_use(room)),
            false => each(self.weight, at, step, of),
        }
    }

    /// The argument for the buffers in which gathered weights come in, in a walk from a layer on.
    fn comes_in(&self, room: u32, at: i32, step: i32) -> Arg {
        each(self.flat.landing.unwrap_or(self.flat.weight), at, step, room)
    }

    /// The argument for the gradient where kernels add to it.
    fn adds_up(&self, room: u32, at: i32, step: i32, of: u32) -> Arg {
        match self.ranks.shares_gradients() {
            true => each(self.flat.grad, at, step, self.ranks.in_use(room)),
            false => each(self.gradient, at, step, of),
        }
    }

    /// The argument for the buffers in which the sum over the ranks lands.
    fn lands(&self, at: i32, step: i32, of: u32) -> Arg {
        match (self.ranks.shares_gradients(), self.ranks.partials(self.flat)) {
            (true, Some((partial, slots))) => each(partial, at, step, slots),
            (true, None) => each(self.gradient, at, step, of),
            (false, _) => each(self.sum.unwrap_or(self.gradient), at, step, of),
        }
    }
}

impl Run {
    /// The arguments of its blocks, from the layer `skip` behind its first on.
    fn rest(&self, skip: u32) -> impl Iterator<Item = Arg> + '_ {
        self.rest.iter().map(move |arg| shifted(arg, skip))
    }

    fn hosts(&self, skip: u32) -> impl Iterator<Item = Arg> + '_ {
        self.hosts.iter().map(move |arg| shifted(arg, skip))
    }
}

/// The argument whose first iteration binds what `arg` binds in iteration `by`.
fn shifted(arg: &Arg, by: u32) -> Arg {
    match *arg {
        Arg::Each { tensor, first, step, of } => Arg::Each { tensor, first: first + by as i32 * step, step, of },
        other => other,
    }
}

/// Some layers of a run that one call goes through.
#[derive(Clone, Copy)]
struct Piece {
    /// Layers of the run before the first one.
    skip: u32,
    count: u32,
    gathers: bool,
    adds: bool,
}

impl<'s> Passing<'s> {
    fn parts(&self, kind: usize) -> Vec<Part<'s>> {
        let sites = self.sites[kind].as_ref().expect("a body knows the layers that it has");
        let (of, ranks) = (&self.kinds[kind], self.ranks);
        let flats = [Some(&of.flat), of.experts.as_ref()];
        let kept = |flats: Flats| [Some(flats.dense), flats.experts];
        let (weights, gradients) = (kept(sites.weights), kept(sites.gradients));
        let sums = sites.sums.map_or([None, None], kept);
        let part = |i: usize| {
            let (weight, gradient) = (weights[i]?, gradients[i]?);
            let prefix = ["", "expert_"][i];
            Some(Part { ranks: ranks[i], flat: flats[i]?, prefix, weight, gradient, sum: sums[i] })
        };
        (0..2).filter_map(part).collect()
    }

    /// Whether weights come and go, of experts or of the rest.
    fn gathers(&self) -> bool {
        self.ranks.iter().any(|ranks| ranks.shares_weights())
    }

    /// Layers that are gathered ahead: 1 where the next layer's weights come while one is computed, else 0.
    fn ahead(&self) -> u32 {
        u32::from(self.room > 1)
    }

    /// Gathers the weights of one layer of a run.
    fn gather(&mut self, run: &Run, skip: u32, forward: bool) {
        let at = if forward { run.at + skip } else { run.at - skip };
        let (what, kind) = (if forward { "gather" } else { "regather" }, &self.kinds[run.kind].prefix);
        for p in self.parts(run.kind).iter().filter(|p| p.ranks.shares_weights()) {
            let whole = p.flat.landing.unwrap_or(p.flat.weight).slot(at % self.room);
            p.ranks.gather(self.b, &format!("{kind}{}{what}.{at}", p.prefix), p.flat, [shift(p.weight, at), whole]);
        }
    }

    /// Writes the way forward through layers whose weights come and go; ops that `last` writes stand before the last
    /// layer.
    pub fn forward(&mut self, runs: &[Run], mut last: impl FnMut(&mut Builder)) {
        let ahead = self.ahead();
        if ahead > 0 {
            self.gather(&runs[0], 0, true);
        }
        for (i, run) in runs.iter().enumerate() {
            let inner = run.count - 1;
            if inner > 0 {
                self.call(run, true, Piece { skip: 0, count: inner, gathers: true, adds: false });
            }
            match runs.get(i + 1) {
                Some(next) if ahead > 0 => self.gather(next, 0, true),
                Some(_) => {}
                None => last(self.b),
            }
            if ahead == 0 {
                self.gather(run, inner, true);
            }
            self.call(run, true, Piece { skip: inner, count: 1, gathers: false, adds: false });
        }
    }

    /// Writes the way back. The sum of the last layer is left to be added.
    pub fn backward(&mut self, runs: &[Run]) {
        let (gathers, ahead) = (self.gathers(), self.ahead());
        if gathers && ahead > 0 {
            self.gather(&runs[0], 0, false);
        }
        for (i, run) in runs.iter().enumerate() {
            for piece in self.pieces(run) {
                if gathers && !piece.gathers {
                    match runs.get(i + 1) {
                        _ if ahead == 0 => self.gather(run, piece.skip, false),
                        Some(next) => self.gather(next, 0, false),
                        None => {}
                    }
                }
                self.call(run, false, piece);
                if piece.skip == 0 && i > 0 {
                    self.add_last(&runs[i - 1]);
                }
            }
        }
    }

    /// Cuts a run into pieces: its first layer adds nothing, and its last one gathers nothing.
    fn pieces(&self, run: &Run) -> Vec<Piece> {
        let (gathers, adds) = (self.gathers(), self.ranks.iter().any(|ranks| ranks.accumulates()));
        let mut pieces: Vec<Piece> = vec![];
        for skip in 0..run.count {
            let gathers = gathers && skip + 1 < run.count;
            let adds = adds && skip > 0;
            match pieces.last_mut() {
                Some(piece) if (piece.gathers, piece.adds) == (gathers, adds) => piece.count += 1,
                _ => pieces.push(Piece { skip, count: 1, gathers, adds }),
            }
        }
        pieces
    }

    /// Adds the sum of the last layer of a run to its share.
    pub fn add_last(&mut self, run: &Run) {
        let at = run.at + 1 - run.count;
        let kind = &self.kinds[run.kind].prefix;
        for p in self.parts(run.kind) {
            if let Some((partial, slots)) = p.ranks.partials(p.flat) {
                let label = format!("{kind}{}add.{at}", p.prefix);
                p.ranks.add(self.b, &label, p.flat, partial.slot(at % slots), shift(p.gradient, at));
            }
        }
    }

    fn call(&mut self, run: &Run, forward: bool, piece: Piece) {
        let Piece { skip, count, gathers, adds } = piece;
        let travels = !run.hosts.is_empty();
        let (kind, microbatch, sums) = (run.kind, self.microbatch, self.sums && !forward);
        let variant = Variant { kind, microbatch, forward, gathers, adds, travels, sums };
        let block = self.block(variant);
        let (step, of, room, ahead) = (if forward { 1 } else { -1 }, run.of, self.room, self.ahead() as i32);
        let at = run.at as i32 + step * skip as i32;
        let parts = self.parts(run.kind);
        let mut args: Vec<Arg> = parts.iter().map(|p| p.whole(room, at, step, of)).collect();
        if !forward {
            args.extend(parts.iter().map(|p| p.adds_up(room, at, step, of)));
        }
        args.extend(run.rest(skip));
        if !forward {
            args.extend(parts.iter().filter(|p| p.scatters(sums)).map(|p| p.lands(at, step, of)));
        }
        args.extend(parts.iter().filter(|p| p.flat.landing.is_some()).map(|p| p.comes_in(room, at, step)));
        if !forward {
            let leave = parts.iter().filter_map(|p| p.flat.leaving);
            args.extend(leave.map(|leaving| each(leaving, at, step, room)));
        }
        if gathers {
            let next = at + step * ahead;
            let shared = parts.iter().filter(|p| p.ranks.shares_weights());
            args.extend(shared.flat_map(|p| [each(p.weight, next, step, of), p.comes_in(room, next, step)]));
        }
        args.extend(run.hosts(skip));
        if adds {
            let behind = at - step;
            let adding = parts.iter().filter(|p| p.ranks.partials(p.flat).is_some());
            args.extend(adding.flat_map(|p| [p.lands(behind, step, of), each(p.gradient, behind, step, of)]));
        }
        let label = match (forward, gathers, adds) {
            (true, false, _) | (false, false, true) => format!("{}.last", run.label),
            (false, _, false) => format!("{}.first", run.label),
            _ => run.label.clone(),
        };
        self.b.call(&label, block, count, &args);
    }

    fn block(&mut self, variant: Variant) -> BlockId {
        if let Some(&block) = self.blocks.get(&variant) {
            return block;
        }
        let Variant { kind, microbatch, forward, gathers, travels, .. } = variant;
        let own = self.kinds[kind].of(microbatch);
        let before = (gathers || self.ranks[0].copies) && !shared_parts(self.ranks, &self.kinds[kind]).is_empty();
        let block = match (forward, before, travels) {
            (true, false, false) => own.fwd,
            (true, false, true) => own.away.expect("inputs leave").fwd,
            (true, true, _) => self.forward_block(variant, own.fwd),
            (false, ..) => self.backward_block(variant, own.bwd),
        };
        self.blocks.insert(variant, block);
        block
    }

    /// Writes a block with a layer's forward pass while another's weights are gathered, behind the copy of its own
    /// weights if they came in elsewhere.
    fn forward_block(&mut self, of: Variant, layer: BlockId) -> BlockId {
        let kind = &self.kinds[of.kind];
        let shared = shared_parts(self.ranks, kind);
        let b = &mut *self.b;
        b.open(&format!("{}layer_fwd{}", kind.prefix, if of.gathers { "_next" } else { "_copied" }));
        let w = kind.weights().formals(b, "w");
        let [x, x_out] = ["x", "x_out"].map(|name| b.formal(name));
        let keep = kind.saved.formals(b).bufs();
        let landings = formal_landings(b, &shared);
        if of.gathers {
            gather_next(b, &shared);
        }
        copy_out(b, &shared, &landings, w);
        if of.travels {
            leave(b, x);
        }
        let args: Vec<Arg> = w.bufs().chain([x, x_out]).chain(keep).map(Arg::from).collect();
        b.call("fwd", layer, 1, &args);
        b.close()
    }

    /// Writes a block with a layer's backward pass: first it asks for the weights of the layer before it, last it
    /// scatters its gradient and adds the sum of the layer behind it, which has come.
    fn backward_block(&mut self, of: Variant, layer: BlockId) -> BlockId {
        let kind = &self.kinds[of.kind];
        let shared = shared_parts(self.ranks, kind);
        let b = &mut *self.b;
        let words = [(of.gathers, "_next"), (of.travels, "_away"), (of.adds, "_add"), (of.sums, "_last")];
        let words: String = words.iter().filter(|(has, _)| *has).map(|(_, word)| *word).collect();
        b.open(&format!("{}layer_bwd_shared{words}", kind.prefix));
        let (w, g) = kind.formal_weights(b);
        let xs = ["x", "dy", "dx"].map(|name| b.formal(name));
        let keep = kind.saved.formals(b).bufs();
        let all: Vec<(&str, &DataParallel, &FlatWeights, Buf)> =
            [("", Some(&kind.flat)), ("expert_", kind.experts.as_ref())]
                .into_iter()
                .zip(self.ranks)
                .zip([Some(g.dense), g.experts])
                .filter_map(|(((prefix, flat), ranks), g)| Some((prefix, ranks, flat?, g?)))
                .collect();
        let scattered: Vec<_> = all.into_iter().filter(|(_, ranks, ..)| scatters(ranks, of.sums)).collect();
        let lands: Vec<Buf> = scattered.iter().map(|(prefix, ..)| b.formal(&format!("{prefix}g_part"))).collect();
        let landings = formal_landings(b, &shared);
        let leaving: Vec<Option<Buf>> = (scattered.iter())
            .map(|(prefix, _, flat, _)| flat.leaving.map(|_| b.formal(&format!("{prefix}g_out"))))
            .collect();
        if of.gathers {
            gather_next(b, &shared);
        }
        copy_out(b, &shared, &landings, w);
        if of.travels {
            come_back(b);
        }
        for (prefix, ranks, flat, g) in scattered.iter().filter(|(_, ranks, ..)| ranks.shares_gradients()) {
            ranks.clear(b, &format!("{prefix}clear"), flat, *g);
        }
        let args: Vec<Arg> = w.bufs().chain(g.bufs()).chain(xs).chain(keep).map(Arg::from).collect();
        b.call("bwd", layer, 1, &args);
        if of.sums && !scatters(self.ranks[0], true) {
            kind.layer.sum_shared(b, g.dense);
        }
        for (((prefix, ranks, flat, g), &land), leaving) in scattered.iter().zip(&lands).zip(leaving) {
            match prefix.is_empty() {
                true => kind.layer.sum_shared(b, *g),
                false => kind.layer.sum_copies(b, &kind.scratch, *g),
            }
            ranks.scatter(b, &format!("{prefix}grad_sum"), flat, [*g, land], leaving);
        }
        if of.adds {
            for (prefix, ranks, flat, _) in
                scattered.iter().filter(|(_, ranks, flat, _)| ranks.partials(flat).is_some())
            {
                let [behind, share] = ["behind_part", "behind_share"].map(|name| b.formal(&format!("{prefix}{name}")));
                ranks.add(b, &format!("{prefix}add_behind"), flat, behind, share);
            }
        }
        b.close()
    }
}

/// Whether a gradient is shared out behind its layer.
fn scatters(ranks: &DataParallel, sums: bool) -> bool {
    ranks.shares_gradients() || (sums && ranks.ranks > 1)
}

/// A slot `by` slots behind the one that a buffer names.
fn shift(buf: Buf, by: u32) -> Buf {
    buf.slot(buf.slot + by)
}

/// The flat tensors of a kind whose weights no rank keeps whole.
fn shared_parts<'k>(ranks: [&'k DataParallel; 2], kind: &'k Kind) -> Vec<Shared<'k>> {
    let all = [("", Some(&kind.flat)), ("expert_", kind.experts.as_ref())];
    all.into_iter()
        .zip(ranks)
        .filter_map(|((prefix, flat), ranks)| Some((prefix, ranks, flat?)))
        .filter(|(_, ranks, _)| ranks.shares_weights())
        .collect()
}

/// A flat tensor: the prefix of its names, the ranks that share it out, and its buffers.
type Shared<'k> = (&'static str, &'k DataParallel, &'k FlatWeights);

/// Formals for the buffers in which the weights of the block's layer come in; `None` where they come in where kernels
/// read them.
fn formal_landings(b: &mut Builder, parts: &[Shared]) -> Vec<Option<Buf>> {
    parts.iter().map(|(prefix, _, flat)| flat.landing.map(|_| b.formal(&format!("{prefix}w_in")))).collect()
}

/// Copies weights from the buffers in which they came in to where kernels read them.
fn copy_out(b: &mut Builder, parts: &[Shared], landings: &[Option<Buf>], w: Flats) {
    for ((prefix, ranks, flat), landing) in parts.iter().zip(landings) {
        if let Some(landing) = *landing {
            let whole = if prefix.is_empty() { Some(w.dense) } else { w.experts };
            ranks.copy_out(b, &format!("{prefix}copy_out"), flat, landing, whole.expect("it is gathered"));
        }
    }
}

/// Gathers the weights of a layer, between formals of the block being written.
fn gather_next(b: &mut Builder, parts: &[Shared]) {
    for (prefix, ranks, flat) in parts {
        let ends = ["next_share", "next_w"].map(|name| b.formal(&format!("{prefix}{name}")));
        ranks.gather(b, &format!("{prefix}gather_next"), flat, ends);
    }
}
