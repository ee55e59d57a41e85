//! The programs of a pipeline's stages: each stage's [`flow`](super::pipeline::Pipeline::flow), written out.
//!
//! A stage keeps, for every microbatch in flight through a chunk, the chunk's input and what its layers keep.
//! The gradient of a layer is summed over the data-parallel ranks behind its last microbatch, or, where it is shared
//! out (ZeRO 2 and 3), behind every one; then the sum of a unit's last layer is added before the next unit goes
//! backward, when it has come. An embedding that serves as output matrix too is on the first and the last stage, which
//! add up its gradients.

mod chunk;
mod pair;
mod parts;
mod sums;

use super::data::DataParallel;
use super::kind::{Halves, Kind};
use super::layers::{Layers, Stretch};
use super::pipeline::{Act, Flow, Pass, Passing, Pipeline, Unit};
use super::residual::Residual;
use super::step::Step;
use super::transformer::Flats;
use crate::plan::*;
use crate::spec::Recompute;
use chunk::{embed_block, has_come, head_block};
use pair::{Key, Pairs};
use parts::Parts;
use std::collections::BTreeMap;

/// The layers of a chunk, in stretches of one kind each.
type Chain = Vec<Stretch>;

/// The blocks of a chunk.
#[derive(Clone, Copy)]
struct Chunk {
    forward: BlockId,
    backward: BlockId,
    /// The backward pass with the sums of the gradients behind it.
    last: BlockId,
    halves: Option<Halves>,
}

/// A step being written stage by stage.
pub struct Staged<'s, 'a> {
    step: &'s mut Step<'a>,
    flows: Vec<Flow>,
    /// The blocks of chunks, by the layers that they have, and by the microbatch where the rows of each go other ways.
    chunks: BTreeMap<Key, Chunk>,
    pairs: Pairs,
    embed: [BlockId; 2],
    head: BlockId,
    /// Inputs of chunks, and inputs of the other layers of a chunk, by microbatch in flight.
    input: Buf,
    inner: Buf,
    /// Outputs of chunks on their way to the next stage.
    output: Buf,
    /// Gradients of the inputs and of the outputs of layers, by unit.
    dx: Buf,
    /// Layers of the longest chunk.
    longest: u32,
    /// The buffers with which a tensor-parallel rank passes on its own rows alone; `None` where it passes on all rows.
    parts: Option<Parts>,
    /// Buffers that were sent since the unit before.
    sent: Vec<Buf>,
    /// A block behind which the GPU computes nothing before the gradient that it is called with has come, where layers
    /// are computed again; else `None`.
    has_come: Option<BlockId>,
    /// Results that are made and not sent, and buffers that are asked for and not waited for, where stages pass on
    /// [`Passing::Together`].
    made: Vec<(Unit, Buf)>,
    coming: Vec<Buf>,
    /// The unit whose last sums are not added to their shares yet.
    to_add: Option<Unit>,
}

impl Pipeline {
    /// Slots for what the layers `of` keep where nothing is computed again.
    pub fn saved_slots(&self, of: &Layers) -> u32 {
        if !self.is_staged() {
            return of.count();
        }
        let holds = |stage: &u32| self.held(*stage, of) > 0;
        (0..self.stages).filter(holds).map(|s| self.flow(s).kept).max().unwrap_or(1) * self.longest(of)
    }

    /// Slots for what the layers `of` leave between the halves of a backward pass.
    pub fn left_slots(&self, of: &Layers) -> u32 {
        let holds = |stage: &u32| self.split && self.held(*stage, of) > 0;
        (0..self.stages).filter(holds).map(|s| self.flow(s).left).max().unwrap_or(0) * self.longest(of)
    }
}

impl<'s, 'a> Staged<'s, 'a> {
    pub fn new(step: &'s mut Step<'a>) -> Staged<'s, 'a> {
        let flows: Vec<Flow> = (0..step.pipe.stages).map(|s| step.pipe.flow(s)).collect();
        let most = |of: fn(&Flow) -> u32| flows.iter().map(of).max().unwrap_or(1);
        let shape = [step.layer().residual_rows(), step.model.hidden];
        let (dtype, longest) = (step.work.dtype, step.pipe.longest(&(0..step.layer_count()).collect()));
        let inner_slots = (most(|f| f.kept) * (longest - 1)).max(1);
        let turns = step.hidden_turns();
        let mut tensor = |name, kind, slots| step.b.tensor(name, &shape, dtype, kind, slots);
        let input = tensor("x_in", TensorKind::Activation, most(|f| f.inputs));
        let inner = tensor("x", TensorKind::Activation, inner_slots);
        let output = tensor("x_out", TensorKind::CommBuffer, 2);
        let hidden = tensor("hidden", TensorKind::Activation, turns);
        let dx = tensor("dx", TensorKind::Workspace, most(|f| f.gradients));
        let parts = Parts::new(step, [most(|f| f.inputs), most(|f| f.gradients)]);
        step.x = Residual::of_last_stage(hidden);
        step.dx = dx;
        step.write_kinds();
        step.write_updates();
        let embed = [embed_block(step, true), embed_block(step, false)];
        let head = head_block(step);
        // A framework has a unit's gradient before it begins the unit, and so before it computes its layers again
        // (Megatron-LM's schedules wait for the receive, then call backward).
        let again = step.par.recompute == Recompute::Full;
        let ranks = if parts.is_some() { step.layer().tp.ranks } else { 1 };
        let waits = again && step.pipe.passing == Passing::Ahead && !step.par.options.no_overlap_p2p;
        let has_come = waits.then(|| has_come(step, ranks));
        let mut staged = Staged {
            step,
            flows,
            chunks: BTreeMap::new(),
            pairs: Pairs::default(),
            embed,
            head,
            has_come,
            input,
            inner,
            output,
            dx,
            longest,
            parts,
            sent: vec![],
            made: vec![],
            coming: vec![],
            to_add: None,
        };
        let (stages, chunks) = (staged.step.pipe.stages, staged.step.pipe.chunks);
        for (chunk, stage) in (0..chunks).flat_map(|chunk| (0..stages).map(move |stage| (chunk, stage))) {
            let chain = staged.chain(stage, chunk);
            if chain.is_empty() {
                continue;
            }
            for microbatch in 0..staged.step.variants() {
                let key = (chain.clone(), microbatch);
                if !staged.chunks.contains_key(&key) {
                    let chunk = staged.chunk(&key);
                    staged.chunks.insert(key, chunk);
                }
            }
        }
        staged
    }

    fn chunk(&mut self, key: &Key) -> Chunk {
        let beside = !self.step.par.options.no_overlap_grad;
        let forward = self.chunk_fwd(key);
        let halves = self.step.pipe.split.then(|| {
            let [inputs, weights] = [Part::Inputs, Part::Weights].map(|part| self.chunk_bwd(key, part, false));
            let weights_last = if beside { self.chunk_bwd(key, Part::Weights, true) } else { weights };
            Halves { inputs, weights, weights_last }
        });
        if let Some(Halves { inputs: backward, .. }) = halves.filter(|_| self.step.par.cuts_all()) {
            return Chunk { forward, backward, last: backward, halves };
        }
        let backward = self.chunk_bwd(key, Part::Whole, false);
        let last = if beside { self.chunk_bwd(key, Part::Whole, true) } else { backward };
        Chunk { forward, backward, last, halves }
    }

    fn chain(&self, stage: u32, chunk: u32) -> Chain {
        Stretch::all(self.step.kinds.iter().map(|kind| &kind.layers), &self.step.pipe.range(stage, chunk))
    }

    fn key(&self, stage: u32, unit: Unit) -> Key {
        (self.chain(stage, unit.chunk), unit.microbatch.min(self.step.variants() - 1))
    }

    /// The arguments that `of` names for each kind that a chunk has layers of, from the first of these on.
    fn args(&self, stage: u32, chunk: u32, of: impl Fn(&Kind) -> Flats) -> Vec<Arg> {
        let pipe = &self.step.pipe;
        let kinds = self.step.kinds.iter().filter(|kind| pipe.count(stage, chunk, &kind.layers) > 0);
        kinds.flat_map(|kind| of(kind).slot(pipe.offset(stage, chunk, &kind.layers)).args(Arg::from)).collect()
    }

    pub fn programs(mut self) -> Vec<Program> {
        (0..self.step.pipe.stages).map(|stage| self.stage(stage)).collect()
    }

    fn stage(&mut self, stage: u32) -> Program {
        let pipe = &self.step.pipe;
        let (first, last) = (stage == 0, stage == pipe.last_stage());
        let layers: Vec<u32> = self.step.kinds.iter().map(|kind| pipe.held(stage, &kind.layers)).collect();
        let tied = self.step.has_table_at_both_ends();
        let embed = first || (last && tied);
        self.step.gather_ahead(stage, embed, last);
        self.step.zero_grad(&layers, embed, last);
        self.sent.clear();
        for act in self.flows[stage as usize].acts.clone() {
            match act {
                Act::Receive { unit, slot } => self.receive(stage, unit, slot),
                Act::Forward(pass) => self.forward(stage, pass),
                Act::Backward(pass) => self.backward(stage, pass),
                // Sums of gradients are for a backward pass alone, and no schedule has one of these in a pair.
                Act::Pair { forward, backward }
                    if self.sums(backward.unit)
                        || self.is_empty(stage, forward.unit)
                        || self.is_empty(stage, backward.unit) =>
                {
                    self.forward(stage, forward);
                    self.backward(stage, backward);
                }
                Act::Pair { forward, backward } => self.pair(stage, forward, backward),
                Act::Weights(pass) => self.weights(stage, pass),
                Act::Send => {
                    for (unit, src) in std::mem::take(&mut self.made) {
                        self.send(stage, unit, src);
                    }
                }
                Act::Await => {
                    let [come, gone] = [&mut self.coming, &mut self.sent].map(std::mem::take);
                    if !come.is_empty() || !gone.is_empty() {
                        self.wait_for(come, gone);
                    }
                }
            }
        }
        if self.step.par.options.no_overlap_grad {
            self.step.sum_gradients(&layers);
            if last {
                self.step.sync_head();
            }
        }
        self.add_sums(stage);
        if embed {
            if tied && !(first && last) {
                self.sum_tied();
            }
            if !self.step.dp.shares_gradients() {
                self.step.sync_embed();
            }
        }
        if last {
            let (loss, acc) = (self.step.loss, self.step.acc);
            self.step.dp.sum_scalar(&mut self.step.b, "loss_sum", loss, acc);
        }
        self.step.optimizer(&layers, embed, last);
        Program { name: format!("stage.{stage}"), ops: self.step.b.finish() }
    }

    /// The tag of a message between virtual stages: a microbatch and the virtual stage that it comes to.
    fn tag(&self, stage: u32, unit: Unit) -> u32 {
        let pipe = &self.step.pipe;
        (unit.microbatch * pipe.chunks + unit.chunk) * pipe.stages + stage
    }

    /// The communicator of a unit's result on its link: one for each chunk and direction where stages are folded.
    fn lane_of(&self, unit: Unit) -> (&'static str, u8) {
        let chunk = if self.step.pipe.is_folded() { unit.chunk as u8 } else { 0 };
        if unit.forward { ("x", 3 * chunk) } else { ("dx", 3 * chunk + 1) }
    }

    fn receive(&mut self, stage: u32, unit: Unit, slot: u32) {
        let before = (stage + self.step.pipe.stages - 1) % self.step.pipe.stages;
        let (what, index) = self.lane_of(unit);
        let (link, by) = if self.step.pipe.rises(unit) { (before, -1) } else { (stage, 1) };
        let dst = match &self.parts {
            Some(parts) => parts.coming(unit.forward, slot),
            None if unit.forward => self.input_of(stage, unit, slot),
            None => self.dx.slot(slot),
        };
        let (tag, group) = (self.tag(stage, unit), self.step.pipe.link(link));
        let via = Via { group, index, engine: Engine::CopyEngine };
        self.step.b.recv(&format!("recv_{what}.{}.{}", unit.chunk, unit.microbatch), via, by, dst, tag);
        if self.step.pipe.passing == Passing::Together {
            self.coming.push(dst);
        }
    }

    /// Passes on the result of a unit: now, or with what else there is to pass on.
    fn pass_on(&mut self, stage: u32, unit: Unit, src: Buf) {
        match self.step.pipe.passing {
            Passing::Together => self.made.push((unit, src)),
            _ => self.send(stage, unit, src),
        }
    }

    /// Sends the result of a unit to the stage that runs the next one of its microbatch.
    fn send(&mut self, stage: u32, unit: Unit, src: Buf) {
        let (p, folded) = (self.step.pipe.stages, self.step.pipe.is_folded());
        let (what, index) = self.lane_of(unit);
        let name = format!("{what}.{}.{}", unit.chunk, unit.microbatch);
        let src = match &mut self.parts {
            Some(parts) => parts.cut(self.step, &name, unit.forward, src),
            None => src,
        };
        let before = (stage + p - 1) % p;
        let (link, by, to) =
            if self.step.pipe.rises(unit) { (stage, 1, (stage + 1) % p) } else { (before, -1, before) };
        let chunk = match (unit.forward, to) {
            _ if folded => unit.chunk,
            (true, 0) => unit.chunk + 1,
            (false, to) if to + 1 == p => unit.chunk - 1,
            _ => unit.chunk,
        };
        let (tag, group) = (self.tag(to, Unit { chunk, ..unit }), self.step.pipe.link(link));
        let via = Via { group, index, engine: Engine::CopyEngine };
        self.step.b.send(&format!("send_{name}"), via, by, src, tag);
        self.sent.push(src);
    }

    /// Waits before a unit begins: where nobody computes meanwhile, what was sent to the unit has come, and what was
    /// sent before it has gone; and all rows of its input are in `input`, slot `slot`.
    fn passed(&mut self, stage: u32, unit: Unit, slot: u32, input: Buf) {
        let receives = self.step.pipe.receives(stage, unit);
        let coming = self.parts.as_ref().map_or(input, |parts| parts.coming(unit.forward, slot));
        let come = if receives { vec![coming] } else { vec![] };
        match self.step.pipe.passing {
            Passing::Between => {
                let sent = std::mem::take(&mut self.sent);
                self.wait_for(come, sent);
            }
            Passing::Ahead => {
                self.sent.clear();
                if self.step.par.options.no_overlap_p2p {
                    self.wait_for(come, vec![]);
                } else if let Some(block) = self.has_come.filter(|_| receives && !unit.forward) {
                    let name = format!("has_come.{}.{}", unit.chunk, unit.microbatch);
                    self.step.b.call(&name, block, 1, &[coming.into()]);
                }
            }
            Passing::Together => {}
        }
        if self.parts.is_some() && receives {
            let tp = self.step.layer().tp;
            let what = self.lane_of(unit).0;
            tp.join(&mut self.step.b, &format!("join_{what}.{}.{}", unit.chunk, unit.microbatch), coming, input);
        }
    }

    /// Has GPU and CPU wait until `come` has come and `gone` has gone.
    fn wait_for(&mut self, come: Vec<Buf>, gone: Vec<Buf>) {
        self.step.wait("passed", come, gone, self.parts_of_rows());
    }

    /// Number of ranks that each pass on a part of the rows.
    fn parts_of_rows(&self) -> u64 {
        if self.parts.is_some() { self.step.layer().tp.ranks } else { 1 }
    }

    fn forward(&mut self, stage: u32, pass: Pass) {
        self.passed(stage, pass.unit, pass.input, self.input_of(stage, pass.unit, pass.input));
        self.begin_forward(stage, pass);
        if !self.is_empty(stage, pass.unit) {
            let (block, args) = (self.chunks[&self.key(stage, pass.unit)].forward, self.forward_args(stage, pass));
            let Unit { chunk, microbatch, .. } = pass.unit;
            self.step.b.call(&format!("fwd.{chunk}.{microbatch}"), block, 1, &args);
        }
        self.end_forward(stage, pass);
    }

    fn begin_forward(&mut self, stage: u32, Pass { unit, input, .. }: Pass) {
        if self.step.pipe.is_first(stage, unit.chunk) {
            let args = [self.step.tokens.slot(unit.microbatch).into(), self.input.slot(input).into()];
            self.step.b.call(&format!("embed.{}.{}", unit.chunk, unit.microbatch), self.embed[0], 1, &args);
        }
    }

    fn forward_args(&self, stage: u32, pass: Pass) -> Vec<Arg> {
        let Pass { unit, input, kept, .. } = pass;
        let mut args = self.args(stage, unit.chunk, |kind| kind.kept([&self.step.dp, &self.step.edp])[0]);
        args.extend([self.input.slot(input), self.inner_of(kept), self.out_of(stage, pass)].map(Arg::from));
        args.extend(self.saved_of(&self.chain(stage, unit.chunk), kept, None));
        args
    }

    /// Whether a chunk has no layers: an embedding or a head of its own, as those of Llama 3 405B
    /// (arXiv:2407.21783, section 3.3.2).
    fn is_empty(&self, stage: u32, unit: Unit) -> bool {
        self.step.pipe.range(stage, unit.chunk).is_empty()
    }

    /// The input of a forward unit; where nothing but the head is left, hidden states by turns.
    fn input_of(&self, stage: u32, unit: Unit, slot: u32) -> Buf {
        match self.is_empty(stage, unit) && self.step.pipe.is_last(stage, unit.chunk) {
            true => self.step.x.last().slot(unit.microbatch % self.step.hidden_turns()),
            false => self.input.slot(slot),
        }
    }

    /// The output of the last layer of a forward unit; without any layers, the unit's input.
    fn out_of(&self, stage: u32, Pass { unit, input, to, .. }: Pass) -> Buf {
        if self.step.pipe.stays(stage, unit) {
            return self.input.slot(to);
        }
        match (self.is_empty(stage, unit), self.step.pipe.is_last(stage, unit.chunk)) {
            (true, _) => self.input_of(stage, unit, input),
            (_, true) => self.step.x.last(),
            _ => self.output.slot(to),
        }
    }

    fn end_forward(&mut self, stage: u32, pass: Pass) {
        let ends = self.step.pipe.is_last(stage, pass.unit.chunk) || self.step.pipe.stays(stage, pass.unit);
        if !ends {
            self.pass_on(stage, pass.unit, self.out_of(stage, pass));
        }
    }

    fn backward(&mut self, stage: u32, pass: Pass) {
        let (unit, sums) = (pass.unit, self.sums(pass.unit));
        self.add_sums(stage);
        self.passed(stage, unit, pass.to, self.dx.slot(pass.to));
        self.begin_backward(stage, pass);
        if !self.is_empty(stage, unit) {
            let (chunk, mut args) = (self.chunks[&self.key(stage, unit)], self.backward_args(stage, pass));
            if sums && !pass.halved {
                args.extend(self.args(stage, unit.chunk, |kind| self.step.shares(kind)));
            }
            let block = match chunk.halves {
                Some(halves) if pass.halved => halves.inputs,
                _ if sums => chunk.last,
                _ => chunk.backward,
            };
            self.step.b.call(&format!("bwd.{}.{}", unit.chunk, unit.microbatch), block, 1, &args);
        }
        self.end_backward(stage, pass);
        self.to_add = Some(unit).filter(|_| self.step.sharers().any(DataParallel::accumulates));
    }

    /// Runs the second half of a backward unit.
    fn weights(&mut self, stage: u32, pass: Pass) {
        let (unit, sums) = (pass.unit, self.sums(pass.unit));
        if self.is_empty(stage, unit) {
            return;
        }
        let halves = self.chunks[&self.key(stage, unit)].halves.expect("backward units are cut in two");
        let mut args = self.backward_args(stage, pass);
        if sums {
            args.extend(self.args(stage, unit.chunk, |kind| self.step.shares(kind)));
        }
        let block = if sums { halves.weights_last } else { halves.weights };
        self.step.b.call(&format!("weights.{}.{}", unit.chunk, unit.microbatch), block, 1, &args);
    }

    fn begin_backward(&mut self, stage: u32, pass: Pass) {
        let unit = pass.unit;
        if self.step.pipe.is_last(stage, unit.chunk) {
            let mut args = self.step.target_args(unit.microbatch);
            args.extend([self.out_of(stage, pass), self.dx.slot(pass.to)].map(Arg::from));
            self.step.b.call(&format!("head.{}.{}", unit.chunk, unit.microbatch), self.head, 1, &args);
            if self.sums(unit) && !self.step.dp.shares_gradients() {
                self.step.sync_head();
            }
        }
    }

    fn backward_args(&self, stage: u32, Pass { unit, input, kept, to, left, halved }: Pass) -> Vec<Arg> {
        let ranks = [&self.step.dp, &self.step.edp];
        let mut args = self.args(stage, unit.chunk, |kind| kind.kept(ranks)[0]);
        args.extend(self.args(stage, unit.chunk, |kind| kind.kept(ranks)[1]));
        args.extend([self.input.slot(input), self.inner_of(kept), self.dx.slot(to)].map(Arg::from));
        let chain = self.chain(stage, unit.chunk);
        args.extend(self.saved_of(&chain, kept, halved.then_some(left)));
        if halved {
            args.extend(self.left_of(&chain, left));
        }
        args
    }

    fn end_backward(&mut self, stage: u32, pass: Pass) {
        let unit = pass.unit;
        let out = self.dx.slot(pass.to + pass.done(length(&self.chain(stage, unit.chunk))));
        if self.step.pipe.stays(stage, unit) {
            return;
        }
        if self.step.pipe.is_first(stage, unit.chunk) {
            let args = [self.step.tokens.slot(unit.microbatch).into(), out.into()];
            self.step.b.call(&format!("embed_bwd.{}.{}", unit.chunk, unit.microbatch), self.embed[1], 1, &args);
        } else {
            self.pass_on(stage, unit, out);
        }
    }

    fn inner_of(&self, kept: u32) -> Buf {
        self.inner.slot(kept * (self.longest - 1))
    }

    /// The buffers that the layers of a chunk leave between the halves of a backward pass.
    fn left_of(&self, chain: &Chain, left: u32) -> Vec<Arg> {
        let of = |kind: &Kind| {
            let slot = left * kind.longest;
            kind.left.iter().map(move |buf| buf.slot(slot).into()).collect::<Vec<Arg>>()
        };
        Here::of(&self.step.kinds, chain).iter().flat_map(|h| of(h.kind)).collect()
    }

    /// The buffers that the layers of a chunk keep, kind by kind, of a microbatch in flight; of one that is computed
    /// again, the buffers kept from one half of its backward unit to the other.
    fn saved_of(&self, chain: &Chain, kept: u32, left: Option<u32>) -> Vec<Arg> {
        let of = |kind: &Kind| -> Vec<Arg> {
            if let (Some(again), Some(left)) = (kind.again, left) {
                return again.bufs().into_iter().map(|buf| buf.slot(left * kind.longest).into()).collect();
            }
            let at = |(buf, keeps): (Buf, bool)| buf.slot(if keeps { kept * kind.longest } else { 0 }).into();
            kind.saved.bufs().into_iter().zip(kind.keeps_each()).map(at).collect()
        };
        Here::of(&self.step.kinds, chain).iter().flat_map(|h| of(h.kind)).collect()
    }
}

/// A part of a backward pass, or all of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Whole,
    /// The gradients of inputs.
    Inputs,
    /// The gradients of weights.
    Weights,
}

/// A kind that a chunk has layers of, and how many.
struct Here<'k> {
    number: usize,
    kind: &'k Kind,
    count: u32,
}

impl<'k> Here<'k> {
    /// The kinds that a chunk has layers of.
    fn of(kinds: &'k [Kind], chain: &Chain) -> Vec<Here<'k>> {
        let count = |number| chain.iter().filter(|of| of.kind == number).map(Stretch::count).sum();
        let here = kinds.iter().enumerate().map(|(number, kind)| Here { number, kind, count: count(number) });
        here.filter(|h| h.count > 0).collect()
    }

    /// The kind of a stretch, and its place among the kinds of the chunk.
    fn at<'h>(here: &'h [Here<'k>], of: &Stretch) -> (usize, &'h Here<'k>) {
        let found = here.iter().enumerate().find(|(_, h)| h.number == of.kind);
        found.expect("every layer of a chunk is of a kind")
    }

    /// The name of a call on a stretch; with the place of its first layer if the chunk has layers of the kind outside
    /// it.
    fn label(&self, what: &str, of: &Stretch) -> String {
        let at = if of.count() < self.count { format!(".{}", of.start) } else { String::new() };
        format!("{}{what}{at}", self.kind.prefix)
    }
}

fn length(chain: &Chain) -> u32 {
    chain.last().map_or(0, |of| of.end)
}

/// The name of a chain: the number of layers of each kind where the layers of a kind stand together; else stretch by
/// stretch.
fn name_of(kinds: usize, chain: &Chain) -> String {
    let count = |kind: usize| chain.iter().filter(|of| of.kind == kind).map(Stretch::count).sum::<u32>();
    let together = chain.windows(2).all(|pair| pair[0].kind < pair[1].kind);
    let words: Vec<String> = match together {
        true => (0..kinds).map(|kind| count(kind).to_string()).collect(),
        false => chain.iter().map(|of| format!("{}x{}", of.count(), of.kind)).collect(),
    };
    words.join("_")
}
