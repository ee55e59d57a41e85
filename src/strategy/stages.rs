//! The programs of a pipeline's stages: each stage's [`flow`](super::pipeline::Pipeline::flow), written out.
//!
//! A stage keeps, for every microbatch in flight through a chunk, the chunk's input and what its layers keep.
//! The gradient of a layer is summed over the data-parallel ranks behind its last microbatch. An embedding
//! that serves as output matrix too is on the first and the last stage, which add up its gradients.

use super::pipeline::{Act, Flow, Pipeline, Unit};
use super::step::Step;
use crate::plan::*;
use crate::spec::Recompute;
use std::collections::BTreeMap;

/// What a chunk of so many layers calls.
#[derive(Clone, Copy)]
struct Chunk {
    forward: BlockId,
    backward: BlockId,
    /// With the sums of the gradients.
    last: BlockId,
}

/// A step being written stage by stage.
pub struct Staged<'s, 'a> {
    step: &'s mut Step<'a>,
    flows: Vec<Flow>,
    chunks: BTreeMap<u32, Chunk>,
    fill: BlockId,
    embed: [BlockId; 2],
    head: BlockId,
    /// Inputs of chunks, and those of the other layers of a chunk, by microbatch in flight.
    input: Buf,
    inner: Buf,
    /// Outputs of chunks on their way to the next stage.
    output: Buf,
    /// Pairs of gradients.
    dx: Buf,
    /// Layers of the longest chunk.
    longest: u32,
}

impl Pipeline {
    /// Slots for what layers keep where nothing is computed again.
    pub fn saved_slots(&self) -> u32 {
        match self.stages {
            1 => self.layers.iter().sum(),
            _ => (0..self.stages).map(|s| self.flow(s).kept).max().unwrap_or(1) * self.longest(),
        }
    }

    /// Layers of the longest chunk.
    fn longest(&self) -> u32 {
        self.layers.iter().copied().max().unwrap_or(1)
    }
}

impl<'s, 'a> Staged<'s, 'a> {
    pub fn new(step: &'s mut Step<'a>) -> Staged<'s, 'a> {
        let flows: Vec<Flow> = (0..step.pipe.stages).map(|s| step.pipe.flow(s)).collect();
        let most = |of: fn(&Flow) -> u32| flows.iter().map(of).max().unwrap_or(1);
        let shape = [step.layer.residual_rows(), step.model.hidden];
        let (dtype, longest) = (step.work.dtype, step.pipe.longest());
        let inner_slots = (most(|f| f.kept) * (longest - 1)).max(1);
        let mut tensor = |name, kind, slots| step.b.tensor(name, &shape, dtype, kind, slots);
        let input = tensor("x_in", TensorKind::Activation, most(|f| f.inputs));
        let inner = tensor("x", TensorKind::Activation, inner_slots);
        let output = tensor("x_out", TensorKind::CommBuffer, 2);
        let hidden = tensor("hidden", TensorKind::Activation, 1);
        let dx = tensor("dx", TensorKind::Workspace, 2 * most(|f| f.gradients));
        step.x = hidden;
        step.dx = dx;
        step.layer_fwd = step.layer_fwd_block();
        step.layer_bwd = step.layer_bwd_block();
        step.layer_bwd_last = step.layer_bwd_last_block();
        let fill = step.fill_block();
        let embed = [embed_block(step, true), embed_block(step, false)];
        let head = head_block(step);
        let mut staged =
            Staged { step, flows, chunks: BTreeMap::new(), fill, embed, head, input, inner, output, dx, longest };
        for layers in staged.step.pipe.layers.clone() {
            if !staged.chunks.contains_key(&layers) {
                let (forward, backward) = (staged.chunk_fwd(layers), staged.chunk_bwd(layers, false));
                let chunk = Chunk { forward, backward, last: staged.chunk_bwd(layers, true) };
                staged.chunks.insert(layers, chunk);
            }
        }
        staged
    }

    pub fn programs(mut self) -> Vec<Program> {
        (0..self.step.pipe.stages).map(|stage| self.stage(stage)).collect()
    }

    fn stage(&mut self, stage: u32) -> Program {
        let pipe = &self.step.pipe;
        let (layers, first, last) = (pipe.held(stage), stage == 0, stage + 1 == pipe.stages);
        let tied = self.step.model.tie_embeddings;
        let embed = first || (last && tied);
        self.step.zero_grad(self.fill, layers, embed, last);
        for act in self.flows[stage as usize].acts.clone() {
            match act {
                Act::Receive { unit, slot } => self.receive(stage, unit, slot),
                Act::Forward { unit, input, kept, output } => self.forward(stage, unit, input, kept, output),
                Act::Backward { unit, input, kept, gradient } => self.backward(stage, unit, input, kept, gradient),
            }
        }
        if embed {
            if tied {
                self.sum_tied();
            }
            self.step.sync_embed();
        }
        if last {
            let (loss, acc) = (self.step.loss, self.step.acc);
            self.step.dp.sum_scalar(&mut self.step.b, "loss_sum", loss, acc);
        }
        self.step.optimizer(layers, embed, last);
        Program { name: format!("stage.{stage}"), ops: self.step.b.finish() }
    }

    /// The first and the last stage add up what each has of the gradient of the one embedding.
    fn sum_tied(&mut self) {
        let step = &mut *self.step;
        let group = Group::subset(Axis::Pp, vec![vec![0, step.pipe.stages - 1]]);
        let via = Via { group: &group, index: 2, engine: step.dp.engine };
        let grad = step.embed.grad;
        step.b.collective("tied_grad_sum", via, CollectiveKind::AllReduce, grad, grad, step.acc);
    }

    /// Names what passes between virtual stages: a microbatch and the virtual stage that it comes to.
    fn tag(&self, stage: u32, unit: Unit) -> u32 {
        let pipe = &self.step.pipe;
        (unit.microbatch * pipe.chunks + unit.chunk) * pipe.stages + stage
    }

    fn receive(&mut self, stage: u32, unit: Unit, slot: u32) {
        let before = (stage + self.step.pipe.stages - 1) % self.step.pipe.stages;
        let (what, index, link, by, dst) = match unit.forward {
            true => ("x", 0, before, -1, self.input.slot(slot)),
            false => ("dx", 1, stage, 1, self.dx.slot(2 * slot)),
        };
        let (tag, group) = (self.tag(stage, unit), self.step.pipe.link(link));
        let via = Via { group: &group, index, engine: Engine::CopyEngine };
        self.step.b.recv(&format!("recv_{what}.{}.{}", unit.chunk, unit.microbatch), via, by, dst, tag);
    }

    /// Sends the result of a unit to the stage that runs the next one of its microbatch.
    fn send(&mut self, stage: u32, unit: Unit, src: Buf) {
        let p = self.step.pipe.stages;
        let (what, index, link, by, to) = match unit.forward {
            true => ("x", 0, stage, 1, (stage + 1) % p),
            false => ("dx", 1, (stage + p - 1) % p, -1, (stage + p - 1) % p),
        };
        let chunk = match (unit.forward, to) {
            (true, 0) => unit.chunk + 1,
            (false, to) if to + 1 == p => unit.chunk - 1,
            _ => unit.chunk,
        };
        let (tag, group) = (self.tag(to, Unit { chunk, ..unit }), self.step.pipe.link(link));
        let via = Via { group: &group, index, engine: Engine::CopyEngine };
        self.step.b.send(&format!("send_{what}.{}.{}", unit.chunk, unit.microbatch), via, by, src, tag);
    }

    fn forward(&mut self, stage: u32, unit: Unit, input: u32, kept: u32, output: u32) {
        let (first, last) = (self.step.pipe.is_first(stage, unit.chunk), self.step.pipe.is_last(stage, unit.chunk));
        let name = format!("{}.{}", unit.chunk, unit.microbatch);
        let (input, out) = (self.input.slot(input), if last { self.step.x } else { self.output.slot(output) });
        if first {
            let tokens = self.step.tokens.slot(unit.microbatch);
            self.step.b.call(&format!("embed.{name}"), self.embed[0], 1, &[tokens.into(), input.into()]);
        }
        let (at, layers) = (self.step.pipe.offset(stage, unit.chunk), self.step.pipe.layers_of(stage, unit.chunk));
        let mut args = self.step.weights().slot(at).args(Arg::from);
        args.extend([input, self.inner_of(kept), out].map(Arg::from));
        args.extend(self.saved_of(kept));
        self.step.b.call(&format!("fwd.{name}"), self.chunks[&layers].forward, 1, &args);
        if !last {
            self.send(stage, unit, out);
        }
    }

    fn backward(&mut self, stage: u32, unit: Unit, input: u32, kept: u32, gradient: u32) {
        let (first, last) = (self.step.pipe.is_first(stage, unit.chunk), self.step.pipe.is_last(stage, unit.chunk));
        let name = format!("{}.{}", unit.chunk, unit.microbatch);
        let (dx, ends) = (self.dx.slot(2 * gradient), unit.microbatch + 1 == self.step.pipe.microbatches);
        if last {
            let targets = self.step.targets.slot(unit.microbatch);
            let args = [targets, self.step.x, dx].map(Arg::from);
            self.step.b.call(&format!("head.{name}"), self.head, 1, &args);
            if ends {
                self.step.sync_head();
            }
        }
        let (at, layers) = (self.step.pipe.offset(stage, unit.chunk), self.step.pipe.layers_of(stage, unit.chunk));
        let mut args = self.step.weights().slot(at).args(Arg::from);
        args.extend(self.step.gradients().slot(at).args(Arg::from));
        args.extend([self.input.slot(input), self.inner_of(kept), dx].map(Arg::from));
        args.extend(self.saved_of(kept));
        let chunk = self.chunks[&layers];
        if ends {
            args.extend(self.step.shares().slot(at).args(Arg::from));
        }
        let block = if ends { chunk.last } else { chunk.backward };
        self.step.b.call(&format!("bwd.{name}"), block, 1, &args);
        let out = self.dx.slot(2 * gradient + layers % 2);
        if first {
            let tokens = self.step.tokens.slot(unit.microbatch);
            self.step.b.call(&format!("embed_bwd.{name}"), self.embed[1], 1, &[tokens.into(), out.into()]);
        } else {
            self.send(stage, unit, out);
        }
    }

    fn inner_of(&self, kept: u32) -> Buf {
        self.inner.slot(kept * (self.longest - 1))
    }

    fn keeps(&self) -> bool {
        self.step.par.recompute != Recompute::Full
    }

    fn saved_of(&self, kept: u32) -> Vec<Arg> {
        let slot = if self.keeps() { kept * self.longest } else { 0 };
        self.step.saved.bufs().into_iter().map(|buf| buf.slot(slot).into()).collect()
    }

    /// The layers of a chunk: the first reads the chunk's input, the last writes its output.
    fn chunk_fwd(&mut self, l: u32) -> BlockId {
        let keeps = self.keeps();
        let step = &mut *self.step;
        step.b.open(&format!("fwd_{l}"));
        let w = step.weights().formals(&mut step.b, "w");
        let [x_in, x, x_out] = ["x_in", "x", "x_out"].map(|name| step.b.formal(name));
        let saved = step.saved.formals(&mut step.b).bufs();
        let mut call = |label: &str, repeat, args: [Arg; 2], keep: &dyn Fn(Buf) -> Arg| {
            let mut args: Vec<Arg> = w.args(keep).into_iter().chain(args).collect();
            args.extend(saved.iter().map(|&buf| if keeps { keep(buf) } else { buf.into() }));
            step.b.call(label, step.layer_fwd, repeat, &args);
        };
        match l {
            1 => call("layer", 1, [x_in, x_out].map(Arg::from), &Arg::from),
            _ => {
                call("first", 1, [x_in, x].map(Arg::from), &Arg::from);
                if l > 2 {
                    let walks = [each(x, 0, 1, l - 1), each(x, 1, 1, l - 1)];
                    call("layers", l - 2, walks, &|buf| each(buf, 1, 1, l));
                }
                let last = [x.slot(l - 2), x_out].map(Arg::from);
                call("last", 1, last, &|buf| buf.slot(l - 1).into());
            }
        }
        step.b.close()
    }

    fn chunk_bwd(&mut self, l: u32, sums: bool) -> BlockId {
        let keeps = self.keeps();
        let step = &mut *self.step;
        step.b.open(&format!("bwd_{l}{}", if sums { "_last" } else { "" }));
        let (w, g) = step.formal_weights();
        let [x_in, x, dx] = ["x_in", "x", "dx"].map(|name| step.b.formal(name));
        let saved = step.saved.formals(&mut step.b).bufs();
        let share = sums.then(|| step.shares().formals(&mut step.b, "g_share"));
        let block = if sums { step.layer_bwd_last } else { step.layer_bwd };
        let mut call = |label: &str, repeat, args: [Arg; 3], keep: &dyn Fn(Buf) -> Arg| {
            let mut args: Vec<Arg> = w.args(keep).into_iter().chain(g.args(keep)).chain(args).collect();
            args.extend(saved.iter().map(|&buf| if keeps { keep(buf) } else { buf.into() }));
            args.extend(share.into_iter().flat_map(|share| share.args(keep)));
            step.b.call(label, block, repeat, &args);
        };
        let top = l as i32 - 1;
        if l > 1 {
            let down = |buf| each(buf, top, -1, l);
            let walks = [each(x, top - 1, -1, l - 1), each(dx, 0, 1, 2), each(dx, 1, 1, 2)];
            call("layers", l - 1, walks, &down);
        }
        let first = [x_in, dx.slot((l - 1) % 2), dx.slot(l % 2)].map(Arg::from);
        call("first", 1, first, &Arg::from);
        step.b.close()
    }
}

fn embed_block(step: &mut Step, forward: bool) -> BlockId {
    step.b.open(if forward { "embed" } else { "embed_bwd" });
    let [tokens, x] = ["tokens", "x"].map(|name| step.b.formal(name));
    if forward {
        step.embed_forward(tokens, x)
    } else {
        step.embed_backward(tokens, x)
    }
    step.b.close()
}

fn head_block(step: &mut Step) -> BlockId {
    step.b.open("head");
    let [targets, x, dx] = ["targets", "x", "dx"].map(|name| step.b.formal(name));
    step.head(targets, x, dx);
    step.b.close()
}
