//! A whole training step: embedding, layers, head and loss, backward, gradient sums, Adam.
//!
//! ```text
//! Fill gradients
//! microbatch x (M-1)        embed | layer_fwd x L | head | layer_bwd x L | embed_bwd
//! last microbatch           the same, with each layer's gradient sum sent off behind its backward
//! Adam, weights gathered
//! ```

use super::data::{DataParallel, FlatWeights};
use super::embedding::Embedding;
use super::expert;
use super::feasible;
use super::head::{Head, HeadWeights};
use super::pipeline::Pipeline;
use super::stages::Staged;
use super::transformer::{Flats, Layer, Saved, Scratch};
use super::weights::Weight;
use crate::error::Result;
use crate::plan::program::VERSION;
use crate::plan::structure::Print;
use crate::plan::*;
use crate::spec::{LlmSpec, Parallelism, Recompute, StackSpec, Workload};

/// Who moves the bytes of point-to-point transfers and of collectives.
#[derive(Debug, Clone, Copy)]
pub struct Engines {
    pub p2p: Engine,
    pub collective: Engine,
}

impl Engines {
    /// As the stack has it: communication kernels on so many thread blocks.
    pub fn of(stack: &StackSpec) -> Engines {
        let sm = |n: u32| Engine::Sm { ctas: n.min(u32::from(u16::MAX)) as u16 };
        Engines { p2p: sm(stack.p2p_ctas.value), collective: sm(stack.collective_ctas.value) }
    }
}

/// Builds the plan of one training step, or says why it cannot be.
pub fn build(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines) -> Result<Plan> {
    let route = expert::Routing::Balanced.route(model, work, par, NODE)?;
    build_routed(model, work, par, engines, route)
}

/// Ranks that share the fast links where nobody says.
const NODE: u32 = 8;

/// The same with a route for the rows of its experts, where it has any.
pub fn build_routed(
    model: &LlmSpec,
    work: &Workload,
    par: &Parallelism,
    engines: Engines,
    route: Option<Route>,
) -> Result<Plan> {
    feasible::check(model, work, par)?;
    Ok(write(Builder::new(), model, work, par, engines, route)?.0)
}

/// A plan of which only sizes were kept, and a number for all the rest of it.
pub struct Sizes {
    /// Every tensor and every op, but no names, no weights by name, and kernels without their buffers.
    pub plan: Plan,
    pub structure: (u64, u64),
}

/// Sizes of the plan of one training step. Whoever has [`build`] a plan of the same model, degrees and structure
/// knows all about this one, and has it several times as fast.
pub fn sizes(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines) -> Result<Sizes> {
    let route = expert::Routing::Balanced.route(model, work, par, NODE)?;
    feasible::check(model, work, par)?;
    let (plan, print) = write(Builder::of_sizes(), model, work, par, engines, route)?;
    let structure = print.expect("a builder of sizes makes a print").of(&plan);
    Ok(Sizes { plan, structure })
}

fn write(
    b: Builder,
    model: &LlmSpec,
    work: &Workload,
    par: &Parallelism,
    engines: Engines,
    route: Option<Route>,
) -> Result<(Plan, Option<Print>)> {
    if let Some(route) = &route {
        feasible::route(model, work, par, route)?;
    }
    let mut step = Step::new(b, model, work, par, engines, route)?;
    if step.pipe.stages > 1 {
        let programs = Staged::new(&mut step).programs();
        return Ok(step.finish(programs));
    }
    step.blocks();
    step.program();
    let ops = step.b.finish();
    Ok(step.finish(vec![Program { name: "rank".into(), ops }]))
}

/// The tensors that the blocks and the program share.
pub(super) struct Step<'a> {
    pub(super) model: &'a LlmSpec,
    pub(super) work: &'a Workload,
    pub(super) par: &'a Parallelism,
    pub(super) b: Builder,
    pub(super) mesh: Mesh,
    pub(super) layer: Layer,
    pub(super) embedding: Embedding,
    pub(super) end: Head,
    pub(super) scratch: Scratch,
    pub(super) saved: Saved,
    pub(super) dp: DataParallel,
    /// Of experts.
    pub(super) edp: DataParallel,
    pub(super) acc: Dtype,
    pub(super) layers: FlatWeights,
    pub(super) experts: Option<FlatWeights>,
    routes: Vec<Route>,
    pub(super) embed: FlatWeights,
    /// The final norm, then the output matrix unless it is tied to the embedding.
    pub(super) head: FlatWeights,
    pub(super) tokens: Buf,
    pub(super) targets: Buf,
    pub(super) loss: Buf,
    /// Slot l is the input of layer l, the last the output of all.
    pub(super) x: Buf,
    /// Gradients of the layers' inputs, alternating.
    pub(super) dx: Buf,
    /// One stage where there is no pipeline.
    pub(super) pipe: Pipeline,
    pub(super) microbatches: u32,
    pub(super) layer_fwd: BlockId,
    pub(super) layer_bwd: BlockId,
    pub(super) layer_bwd_last: BlockId,
    /// With ZeRO 2 and 3: slots for what is whole only for a while.
    pub(super) whole: u32,
    pub(super) microbatch: BlockId,
    pub(super) last_microbatch: BlockId,
}

/// All ranks of a step, the axes that need the best links last.
pub fn mesh(par: &Parallelism) -> Mesh {
    let (cp, up) = ((Axis::Cp, par.ring), (Axis::Up, par.ulysses));
    let [outer, inner] = if par.options.ring_inside { [up, cp] } else { [cp, up] };
    Mesh::new(&[(Axis::Pp, par.pp), (Axis::Dp, par.dp), outer, inner, (Axis::Tp, par.tp)])
}

/// The same ranks by the experts that they hold: consecutive ranks of a stage hold different ones.
fn expert_mesh(par: &Parallelism) -> Mesh {
    let stage = par.ranks() / par.pp;
    Mesh::new(&[(Axis::Pp, par.pp), (Axis::Edp, stage / par.ep), (Axis::Ep, par.ep)])
}

impl<'a> Step<'a> {
    fn new(
        mut b: Builder,
        model: &'a LlmSpec,
        work: &'a Workload,
        par: &'a Parallelism,
        engines: Engines,
        route: Option<Route>,
    ) -> Result<Step<'a>> {
        let mesh = mesh(par);
        let layer = Layer::new(model, work, par, engines, route.as_ref());
        let acc = layer.core.shape().acc;
        // Tensor-parallel ranks and stages hold different weights.
        let ranks = u64::from(par.ranks() / (par.tp * par.pp));
        let microbatches = (work.global_batch / (u64::from(par.dp) * work.micro_batch)) as u32;
        let edp = DataParallel {
            group: DataParallel::expert_replicas(),
            ranks: u64::from(par.ranks() / (par.ep * par.pp)),
            zero: par.zero,
            accumulate: microbatches > 1,
            dtype: work.dtype,
            acc,
            engine: engines.collective,
        };
        let dp = DataParallel {
            group: DataParallel::replicas(),
            ranks,
            zero: par.zero,
            accumulate: microbatches > 1,
            dtype: work.dtype,
            acc,
            engine: engines.collective,
        };
        let (n, rows, h, l) = (layer.tokens(), layer.residual_rows(), model.hidden, model.layers as u32);

        let embedding = Embedding::new(&mut b, model, &layer);
        let end = Head::new(&mut b, model, &layer, work.global_batch * work.seq_len);
        let pipe =
            Pipeline { stages: par.pp, chunks: par.vp, microbatches, layers: feasible::layers_of_stages(model, par)? };
        let held = (0..pipe.stages).map(|stage| pipe.held(stage)).max().unwrap_or(l);
        // One in use, one on its way.
        let whole = if par.options.no_prefetch { 1 } else { 2 };
        let layers = dp.weights(&mut b, "layers", layer.elems(), held, whole);
        let expert_elems = layer.experts.as_ref().map(|e| e.elems());
        let experts = expert_elems.map(|elems| edp.weights(&mut b, "experts", elems, held, whole));
        let embed = dp.weights(&mut b, "embed", embedding.elems(), 1, 1);
        let head = dp.weights(&mut b, "head", end.elems(), 1, 1);
        let mut act = |name, shape: &[u64], dtype, slots| b.tensor(name, shape, dtype, TensorKind::Activation, slots);
        let tokens = act("tokens", &[n], Dtype::U32, microbatches);
        let targets = act("targets", &[n], Dtype::U32, microbatches);
        // Stages keep theirs by microbatch in flight: `stages` declares them.
        let staged = pipe.stages > 1;
        let x = if staged { tokens } else { act("x", &[rows, h], work.dtype, l + 1) };
        let loss = b.tensor("loss", &[1], acc, TensorKind::Grad, 1);
        let dx = if staged { tokens } else { b.tensor("dx", &[rows, h], work.dtype, TensorKind::Workspace, 2) };
        let saved = match par.recompute {
            Recompute::Full => layer.saved(&mut b, TensorKind::Workspace, 1),
            _ => layer.saved(&mut b, TensorKind::Activation, pipe.saved_slots()),
        };
        let scratch = layer.scratch(&mut b);
        Ok(Step {
            model,
            work,
            par,
            b,
            mesh,
            layer,
            embedding,
            end,
            scratch,
            saved,
            dp,
            edp,
            acc,
            layers,
            experts,
            routes: route.into_iter().collect(),
            embed,
            head,
            tokens,
            targets,
            loss,
            x,
            dx,
            pipe,
            microbatches,
            layer_fwd: 0,
            layer_bwd: 0,
            layer_bwd_last: 0,
            whole,
            microbatch: 0,
            last_microbatch: 0,
        })
    }

    pub(super) fn layer_count(&self) -> u32 {
        self.model.layers as u32
    }

    fn blocks(&mut self) {
        self.layer_fwd = self.layer_fwd_block();
        self.layer_bwd = self.layer_bwd_block();
        self.layer_bwd_last = self.layer_bwd_last_block();
        if self.microbatches > 1 {
            self.microbatch = self.microbatch_block("microbatch", false);
        }
        self.last_microbatch = self.microbatch_block("last_microbatch", true);
    }

    pub(super) fn layer_fwd_block(&mut self) -> BlockId {
        self.b.open("layer_fwd");
        let w = self.weights().formals(&mut self.b, "w");
        let [x, x_out] = ["x", "x_out"].map(|name| self.b.formal(name));
        let keep = self.saved.formals(&mut self.b);
        self.layer.forward(&mut self.b, &self.scratch, w, x, x_out, &keep);
        self.b.close()
    }

    pub(super) fn layer_bwd_block(&mut self) -> BlockId {
        self.b.open("layer_bwd");
        let (w, g) = self.formal_weights();
        let [x, dy, dx] = ["x", "dy", "dx"].map(|name| self.b.formal(name));
        let keep = self.saved.formals(&mut self.b);
        if self.par.recompute == Recompute::Full {
            // The output is not needed again; it goes where the next layer's gradient will be written.
            let mut args: Vec<Arg> = w.bufs().chain([x, dx]).map(Arg::from).collect();
            args.extend(keep.bufs().into_iter().map(Arg::from));
            self.b.call("again", self.layer_fwd, 1, &args);
        }
        self.layer.backward(&mut self.b, &self.scratch, [w, g], x, &keep, dy, dx);
        self.b.close()
    }

    /// A layer's backward pass and, behind it, the sum of its gradient over the ranks.
    pub(super) fn layer_bwd_last_block(&mut self) -> BlockId {
        self.b.open("layer_bwd_last");
        let (w, g) = self.formal_weights();
        let [x, dy, dx] = ["x", "dy", "dx"].map(|name| self.b.formal(name));
        let keep = self.saved.formals(&mut self.b);
        let share = self.shares().formals(&mut self.b, "g_share");
        let mut args: Vec<Arg> = w.bufs().chain(g.bufs()).chain([x, dy, dx]).map(Arg::from).collect();
        args.extend(keep.bufs().into_iter().map(Arg::from));
        self.b.call("bwd", self.layer_bwd, 1, &args);
        self.layer.sum_shared(&mut self.b, g.dense);
        self.dp.sync(&mut self.b, "grad_sum", g.dense, share.dense);
        if let (Some(g), Some(share)) = (g.experts, share.experts) {
            self.edp.sync(&mut self.b, "expert_grad_sum", g, share);
        }
        self.b.close()
    }

    pub(super) fn weights(&self) -> Flats {
        Flats { dense: self.layers.weight, experts: self.experts.map(|e| e.weight) }
    }

    pub(super) fn gradients(&self) -> Flats {
        Flats { dense: self.layers.grad, experts: self.experts.map(|e| e.grad) }
    }

    /// Where a rank's shares of summed gradients land.
    pub(super) fn shares(&self) -> Flats {
        Flats { dense: self.dp.share_of(&self.layers), experts: self.experts.map(|e| self.edp.share_of(&e)) }
    }

    /// Weights and gradients of a layer as formals, in this order.
    pub(super) fn formal_weights(&mut self) -> (Flats, Flats) {
        let (w, g) = (self.weights(), self.gradients());
        (w.formals(&mut self.b, "w"), g.formals(&mut self.b, "g"))
    }

    pub(super) fn microbatch_block(&mut self, name: &str, last: bool) -> BlockId {
        if self.dp.shares_gradients() {
            return self.sharded_microbatch_block(name);
        }
        self.b.open(name);
        let [tokens, targets] = ["tokens", "targets"].map(|name| self.b.formal(name));
        let l = self.layer_count();
        self.embed_forward(tokens, self.x);
        self.call_forward();
        self.head(targets, self.x.slot(l), self.dx);
        if last {
            self.sync_head();
        }
        self.call_backward(last);
        self.embed_backward(tokens, self.dx.slot(l % 2));
        if last {
            self.sync_embed();
        }
        self.b.close()
    }

    /// x from token ids.
    pub(super) fn embed_forward(&mut self, tokens: Buf, x: Buf) {
        self.embedding.forward(&mut self.b, self.embed.weight, tokens, x);
    }

    /// The table's gradient, added to, from that of x.
    pub(super) fn embed_backward(&mut self, tokens: Buf, dx: Buf) {
        self.embedding.backward(&mut self.b, self.embed.grad, tokens, dx);
    }

    pub(super) fn sync_embed(&mut self) {
        self.embedding.sum_shared(&mut self.b, self.embed.grad);
        self.dp.sync(&mut self.b, "grad_sum.embed", self.embed.grad, self.dp.share_of(&self.embed));
    }

    pub(super) fn sync_head(&mut self) {
        self.end.sum_shared(&mut self.b, self.head.grad);
        self.dp.sync(&mut self.b, "grad_sum.head", self.head.grad, self.dp.share_of(&self.head));
    }

    /// One slot a layer where activations are kept, the same one where they are computed again.
    pub(super) fn saved_each(&self, first: i32, step: i32) -> Vec<Arg> {
        let of = self.layer_count();
        let kept = self.par.recompute != Recompute::Full;
        let arg = |buf| if kept { each(buf, first, step, of) } else { Arg::from(buf) };
        self.saved.bufs().into_iter().map(arg).collect()
    }

    pub(super) fn call_forward(&mut self) {
        let l = self.layer_count();
        let mut args = self.weights().args(|buf| each(buf, 0, 1, l));
        args.extend([each(self.x, 0, 1, l + 1), each(self.x, 1, 1, l + 1)]);
        args.extend(self.saved_each(0, 1));
        self.b.call("fwd", self.layer_fwd, l, &args);
    }

    fn call_backward(&mut self, last: bool) {
        let (l, top) = (self.layer_count(), self.layer_count() as i32 - 1);
        let down = |buf| each(buf, top, -1, l);
        let mut args = self.weights().args(down);
        args.extend(self.gradients().args(down));
        args.extend([each(self.x, top, -1, l + 1), each(self.dx, 0, 1, 2), each(self.dx, 1, 1, 2)]);
        args.extend(self.saved_each(top, -1));
        if last {
            args.extend(self.shares().args(down));
        }
        let block = if last { self.layer_bwd_last } else { self.layer_bwd };
        self.b.call("bwd", block, l, &args);
    }

    /// Final norm, logits, loss, and the gradient of the last layer's output in the first of the pair `dx`.
    pub(super) fn head(&mut self, targets: Buf, x: Buf, dx: Buf) {
        let own = [self.head.weight, self.head.grad];
        let tied = [self.embed.weight, self.embed.grad].map(|flat| self.embedding.table(flat));
        let table = own.map(|flat| self.end.table(flat));
        let table = if let [Some(w), Some(g)] = table { [w, g] } else { tied };
        let dx = [dx, dx.slot(dx.slot + 1)];
        self.end.run(&mut self.b, HeadWeights { own, table }, targets, x, self.loss, dx);
    }

    fn program(&mut self) {
        let (l, m) = (self.layer_count(), self.microbatches);
        let fill = self.fill_block();
        self.zero_grad(fill, l, true, true);
        if m > 1 {
            let args = [each(self.tokens, 0, 1, m), each(self.targets, 0, 1, m)];
            self.b.call("mb", self.microbatch, m - 1, &args);
        }
        let last = [self.tokens.slot(m - 1).into(), self.targets.slot(m - 1).into()];
        self.b.call("last", self.last_microbatch, 1, &last);
        self.dp.sum_scalar(&mut self.b, "loss_sum", self.loss, self.acc);
        self.optimizer(l, true, true);
    }

    /// Sets the gradient of one layer to zero.
    pub(super) fn fill_block(&mut self) -> BlockId {
        self.b.open("zero_grad");
        let g = self.gradients().formals(&mut self.b, "g");
        self.b.compute("fill", Kernel::Fill { elems: self.layers.elems }, &[], &[g.dense]);
        if let (Some(g), Some(experts)) = (g.experts, self.experts) {
            self.b.compute("fill_experts", Kernel::Fill { elems: experts.elems }, &[], &[g]);
        }
        self.b.close()
    }

    /// Gradients of a rank that has so many layers, and maybe the embedding and the head, begin at zero.
    pub(super) fn zero_grad(&mut self, fill: BlockId, layers: u32, embed: bool, head: bool) {
        if self.dp.shares_gradients() {
            return self.zero_shares(layers);
        }
        let args = self.gradients().args(|buf| each(buf, 0, 1, layers));
        self.b.call("zero_grad", fill, layers, &args);
        for (label, w, has) in [("embed", self.embed, embed), ("head", self.head, head)] {
            if has {
                self.b.compute(&format!("zero_grad.{label}"), Kernel::Fill { elems: w.elems }, &[], &[w.grad]);
            }
        }
        if head {
            self.b.compute("zero_loss", Kernel::Fill { elems: 1 }, &[], &[self.loss]);
        }
    }

    /// Adam on the weights of a rank that has so many layers, and maybe the embedding and the head.
    pub(super) fn optimizer(&mut self, layers: u32, embed: bool, head: bool) {
        let adam = Adam::default();
        if head {
            self.dp.update(&mut self.b, "head", &self.head, 0, adam);
        }
        for l in (0..layers).rev() {
            let name = if self.b.keeps_names() { format!("layer.{l}") } else { String::new() };
            self.dp.update(&mut self.b, &name, &self.layers, l, adam);
            if let Some(experts) = &self.experts {
                self.edp.update(&mut self.b, &format!("experts.{l}"), experts, l, adam);
            }
        }
        if embed {
            self.dp.update(&mut self.b, "embed", &self.embed, 0, adam);
        }
    }

    fn params(&self) -> Vec<Param> {
        let staged = self.pipe.stages > 1;
        let on = |stages: &[u32]| if staged { stages.to_vec() } else { vec![] };
        let last = self.pipe.stages - 1;
        let ends: &[u32] = if self.model.tie_embeddings { &[0, last] } else { &[0] };
        let param = |prefix: &str, weight: &Weight, flat: &FlatWeights, slot, stages: &[u32]| Param {
            name: format!("{prefix}{}", weight.name),
            weight: self.dp.stored(flat).tensor(),
            grad: flat.grad.tensor(),
            slot,
            rows: weight.rows,
            shape: weight.shape.clone(),
            shard: weight.shard.clone(),
            stages: on(stages),
        };
        let embed = self.embedding.weights().iter().map(|w| param("", w, &self.embed, 0, ends));
        let mut all: Vec<Param> =
            embed.chain(self.end.weights().iter().map(|w| param("", w, &self.head, 0, &[last]))).collect();
        for l in 0..self.layer_count() {
            let prefix = format!("model.layers.{l}.");
            let (stage, slot) = self.pipe.home(l);
            all.extend(self.layer.weights().iter().map(|w| param(&prefix, w, &self.layers, slot, &[stage])));
            if let (Some(experts), Some(flat)) = (&self.layer.experts, &self.experts) {
                all.extend(experts.weights().iter().map(|w| param(&prefix, w, flat, slot, &[stage])));
            }
        }
        all
    }

    fn about(&self) -> About {
        let (work, par) = (self.work, self.par);
        let tokens = (work.global_batch * work.seq_len) as f64;
        About {
            model: self.model.name.clone(),
            strategy: par.strategy().into(),
            seq_len: work.seq_len,
            global_batch: work.global_batch,
            micro_batch: work.micro_batch,
            documents: work.documents.clone(),
            par: *par,
            dtype: format!("{:?}", work.dtype).to_lowercase(),
            model_flops: self.model.packed_flops_per_token(work.seq_len, &work.documents) * tokens,
            model_spec: self.b.keeps_names().then(|| self.model.clone()),
        }
    }

    fn finish(mut self, programs: Vec<Program>) -> (Plan, Option<Print>) {
        let params = if self.b.keeps_names() { self.params() } else { vec![] };
        let mut masters = self.dp.masters(&[self.layers, self.embed, self.head]);
        masters.extend(self.experts.iter().flat_map(|experts| self.edp.masters(&[*experts])));
        let mut views = vec![self.mesh.clone()];
        if !self.routes.is_empty() {
            views.push(expert_mesh(self.par));
        }
        let about = self.about();
        let inputs = Inputs {
            tokens: self.tokens.tensor(),
            targets: self.targets.tensor(),
            segs: self.layer.segs.clone(),
            share: self.layer.tp.rows(),
            batch: self.work.micro_batch,
            vocab: self.model.vocab,
            microbatches: self.microbatches,
            loss: self.loss.tensor(),
            hidden: self.x.tensor(),
            hidden_slot: if self.pipe.stages > 1 { 0 } else { self.layer_count() },
        };
        let table = (0..self.pipe.stages).collect();
        let print = self.b.take_print();
        let plan = Plan {
            version: VERSION,
            about,
            views,
            lanes: self.b.lanes,
            tensors: self.b.tensors,
            blocks: self.b.blocks,
            programs,
            role_of: RoleMap { view: 0, axes: vec![Axis::Pp], table },
            params,
            masters,
            feed: Feed::Tokens(inputs),
            routes: self.routes,
        };
        (plan, print)
    }
}
