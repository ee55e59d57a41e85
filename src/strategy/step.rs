//! A whole training step: embedding, layers, head and loss, backward, gradient sums, Adam.
//!
//! ```text
//! Weights gathered, with overlap-gather; gradients filled with zeros
//! microbatch x (M-1)        embed | layer_fwd x L | head | layer_bwd x L | embed_bwd
//! last microbatch           the same, with each layer's gradient sum sent off behind its backward
//! Adam, weights gathered unless the next step does
//! ```

mod declare;
mod finish;
mod update;

use super::data::{DataParallel, FlatWeights};
use super::embedding::Embedding;
use super::expert;
use super::feasible;
use super::head::{Head, HeadWeights};
use super::kind::Kind;
use super::layers::Stretch;
use super::mtp::Modules;
use super::pipeline::Pipeline;
use super::residual::Residual;
use super::sharded;
use super::sizes::Sizes;
use super::stages::Staged;
use super::transformer::{Flats, Layer};
use crate::error::Result;
use crate::plan::print::Print;
use crate::plan::*;
use crate::spec::{ClusterSpec, LlmSpec, Parallelism, StackSpec, Workload};

/// Who moves the bytes of point-to-point transfers and of collectives.
#[derive(Debug, Clone, Copy)]
pub struct Engines {
    pub p2p: Engine,
    pub collective: Engine,
}

impl Engines {
    /// As the stack has it: communication kernels on so many thread blocks, of which the links inside a node feed two
    /// each. NCCL's rule (github:NVIDIA/nccl@5067397c, src/graph/paths.cc): a bus has two channels, where the switch of
    /// an A100 has 24; sends round up to a power of two.
    ///
    /// A send to another node has two channels, so two blocks, and yet kernels lose more beside it than two SMs: with two,
    /// rings between nodes come out faster, though they already are too fast (USP over 64 H100 6.6 % in place of 5.0, over 16
    /// B200 8.4 and 7.0; Llama 2 7B over a ring of 16 H100 nodes 9.5 % too fast, and 4.8 too slow; of 31 published rows that
    /// it moves the median error is 6.2 %, and 5.0). So much is known of 400 Gb/s a GPU. On slower networks, where a send
    /// lasts longer, this loss grows with it, which nobody has measured.
    pub fn of(stack: &StackSpec, cluster: &ClusterSpec) -> Engines {
        // A machine whose DMA engines move the bytes.
        if stack.collective_ctas.value == 0 {
            return Engines { p2p: Engine::CopyEngine, collective: Engine::CopyEngine };
        }
        let sm = |n: u32| Engine::Sm { ctas: n.min(u32::from(u16::MAX)) as u16 };
        let channels = 2 * cluster.scale_up.links.max(1);
        let sends = stack.p2p_ctas.value.min(channels.next_power_of_two());
        Engines { p2p: sm(sends), collective: sm(stack.collective_ctas.value.min(channels)) }
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
    Ok(write(Builder::new(), model, work, par, engines, Routes::Alike(route))?.0)
}

/// The same where the rows of every layer go other ways: routes for each layer with experts, in it for each microbatch,
/// and in that for each of the ranks that hold the same experts.
pub fn build_by_layer(
    model: &LlmSpec,
    work: &Workload,
    par: &Parallelism,
    engines: Engines,
    routes: Vec<Route>,
) -> Result<Plan> {
    // Nobody knows what routers of modules would choose: those of all layers are found before the plan.
    let model = &LlmSpec { mtp: None, ..model.clone() };
    feasible::check(model, work, par)?;
    feasible::chosen_by_layer(par)?;
    Ok(write(Builder::new(), model, work, par, engines, Routes::ByLayer(routes))?.0)
}

/// Where rows of experts go.
enum Routes {
    /// In every layer the same ways.
    Alike(Option<Route>),
    ByLayer(Vec<Route>),
}

/// Sizes of the plan of one training step. Whoever has [`build`] a plan of the same model, degrees and structure
/// knows all about this one, and has it several times as fast.
pub fn sizes(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines) -> Result<Sizes> {
    let route = expert::Routing::Balanced.route(model, work, par, NODE)?;
    feasible::check(model, work, par)?;
    let (plan, print) = write(Builder::of_sizes(), model, work, par, engines, Routes::Alike(route))?;
    let prints = print.expect("a builder of sizes makes a print").of(&plan);
    Ok(Sizes { plan, prints })
}

fn write(
    b: Builder,
    model: &LlmSpec,
    work: &Workload,
    par: &Parallelism,
    engines: Engines,
    routes: Routes,
) -> Result<(Plan, Option<Print>)> {
    let (routes, apart) = match routes {
        Routes::Alike(route) => {
            // Behind that of tokens the way of what belongs to experts that several slots compute: gradients of copies, or
            // weights of shadowed ones.
            let way = |route: &Route| if route.shadows > 0 { route.broadcast() } else { route.sums() };
            let others = route.as_ref().map_or(Ok(None), way)?;
            (route.into_iter().chain(others).collect::<Vec<Route>>(), false)
        }
        Routes::ByLayer(routes) => (routes, true),
    };
    // Of copies only the first route knows: that of tokens.
    for route in if apart { &routes[..] } else { &routes[..routes.len().min(1)] } {
        feasible::route(model, work, par, route)?;
    }
    let mut step = Step::new(b, model, work, par, engines, (routes, apart))?;
    if step.pipe.is_staged() {
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
    /// In the order of their layers.
    pub(super) kinds: Vec<Kind>,
    pub(super) embedding: Embedding,
    pub(super) end: Head,
    /// Of multi-token prediction.
    pub(super) modules: Option<Modules>,
    /// What Muon works in, where it is the optimizer.
    pub(super) muon: Option<super::muon::Room>,
    pub(super) dp: DataParallel,
    /// Of experts.
    pub(super) edp: DataParallel,
    pub(super) acc: Dtype,
    routes: Vec<Route>,
    /// Rows of every layer, microbatch and replica go ways of their own.
    apart: bool,
    pub(super) embed: FlatWeights,
    /// The final norm, then the output matrix unless it is tied to the embedding.
    pub(super) head: FlatWeights,
    pub(super) tokens: Buf,
    pub(super) targets: Buf,
    pub(super) loss: Buf,
    /// Between the layers.
    pub(super) x: Residual,
    /// Gradients of the layers' inputs, alternating.
    pub(super) dx: Buf,
    /// One stage where there is no pipeline.
    pub(super) pipe: Pipeline,
    pub(super) microbatches: u32,
    /// With ZeRO 2 and 3: slots for what is whole only for a while, and the blocks of layers of which it is.
    pub(super) whole: u32,
    pub(super) shared_blocks: sharded::Blocks,
    /// One for all but the last, or one for each of them.
    pub(super) microbatch: Vec<BlockId>,
    pub(super) last_microbatch: BlockId,
}

/// FLOPs that a step asks of all ranks together, whatever is computed again.
pub(super) fn flops_of(model: &LlmSpec, work: &Workload) -> f64 {
    let tokens = (work.global_batch * work.seq_len) as f64;
    model.packed_flops_per_token(work.seq_len, &work.documents) * tokens
}

/// All ranks of a step, the axes that need the best links last.
pub fn mesh(par: &Parallelism) -> Mesh {
    let (cp, up) = ((Axis::Cp, par.ring), (Axis::Up, par.ulysses));
    let [outer, inner] = if par.options.ring_inside { [up, cp] } else { [cp, up] };
    beside_stages(par, &[(Axis::Dp, par.dp)], &[outer, inner, (Axis::Tp, par.tp)])
}

/// The same ranks by the experts that they hold: consecutive ranks of a stage hold different ones.
fn expert_mesh(par: &Parallelism) -> Mesh {
    let stage = par.ranks() / par.pp;
    beside_stages(par, &[(Axis::Edp, stage / par.ep)], &[(Axis::Ep, par.ep)])
}

/// A mesh of the axes of a stage: `inner` ones, whose ranks are nearer to each other than stages are in any case, and
/// `outer` ones, which stages are nearer than with `pp-inside`. Views agree on who is in a stage where their inner axes have
/// as many ranks, which `feasible` asks of experts (`divided`) and of groups that share (`of_steps`).
fn beside_stages(par: &Parallelism, outer: &[(Axis, u32)], inner: &[(Axis, u32)]) -> Mesh {
    let stages = [(Axis::Pp, par.pp)];
    match par.options.pp_inside {
        true => Mesh::new(&[outer, &stages, inner].concat()),
        false => Mesh::new(&[&stages, outer, inner].concat()),
    }
}

/// Groups of ranks that share out among themselves what each has of the same weights, where they are several.
fn groups_of(par: &Parallelism) -> Option<u32> {
    let same = par.ranks() / (par.pp * par.tp);
    (par.options.shard > 0).then(|| same / par.options.shard)
}

/// The same ranks by these groups, and by those of the ranks that hold the same experts.
fn shard_meshes(par: &Parallelism) -> Vec<Mesh> {
    let Some(groups) = groups_of(par) else { return vec![] };
    let stage = par.ranks() / par.pp;
    let of = |inner: (Axis, u32)| {
        let ranks = stage / (groups * inner.1);
        beside_stages(par, &[(Axis::Dp, groups), (Axis::Shard, ranks)], &[inner])
    };
    vec![of((Axis::Tp, par.tp)), of((Axis::Ep, par.ep))]
}

impl<'a> Step<'a> {
    pub(super) fn layer_count(&self) -> u32 {
        self.model.layers as u32
    }

    /// What all kinds of layers have alike.
    pub(super) fn layer(&self) -> &Layer {
        &self.kinds.last().expect("a model has layers").layer
    }

    fn blocks(&mut self) {
        self.write_kinds();
        let last = self.variants() - 1;
        if self.microbatches > 1 {
            let name = |m: u32| if m > 0 { format!("microbatch.{m}") } else { "microbatch".into() };
            self.microbatch = (0..last.max(1)).map(|m| self.microbatch_block(&name(m), false, m)).collect();
        }
        self.last_microbatch = self.microbatch_block("last_microbatch", true, last);
    }

    /// How many microbatches have blocks of their own.
    pub(super) fn variants(&self) -> u32 {
        if self.apart { self.microbatches } else { 1 }
    }

    /// The blocks of a layer of each kind.
    pub(super) fn write_kinds(&mut self) {
        let (variants, replicas) = (self.variants(), self.edp.ranks as u32);
        let (mut route, beside) = (0, !self.par.options.no_overlap_grad);
        for kind in &mut self.kinds {
            for _ in 0..if kind.experts.is_some() { variants } else { 1 } {
                kind.write(&mut self.b, [&self.dp, &self.edp], self.par, route, beside);
                route += if kind.experts.is_some() && self.apart { replicas } else { 0 };
            }
        }
    }

    /// The ranks that share out weights outside of experts, and those that share out experts: tensor-parallel ranks may hold
    /// the same experts where no two hold the same of the rest.
    pub(super) fn sharers(&self) -> impl Iterator<Item = &DataParallel> {
        [&self.dp, &self.edp].into_iter()
    }

    /// Where a rank's shares of a kind's summed gradients land.
    pub(super) fn shares(&self, kind: &Kind) -> Flats {
        kind.shares([&self.dp, &self.edp])
    }

    fn microbatch_block(&mut self, name: &str, last: bool, m: u32) -> BlockId {
        if self.sharers().any(DataParallel::by_layers) {
            return self.sharded_microbatch_block(name, last, m);
        }
        self.b.open(name);
        let tokens = self.b.formal("tokens");
        let targets = self.formal_targets();
        let l = self.layer_count();
        let beside = last && !self.par.options.no_overlap_grad;
        self.embed_forward(tokens, self.x.first());
        self.call_forward(m);
        self.ends(&targets, self.x.last(), self.dx, m);
        self.pass_is_over();
        if beside {
            self.sync_head();
        }
        self.call_backward(beside, m);
        self.embed_backward(tokens, self.dx.slot(l % 2));
        self.pass_is_over();
        if last && !beside {
            let counts: Vec<u32> = self.kinds.iter().map(Kind::count).collect();
            self.sum_gradients(&counts);
            self.sync_head();
        }
        if last {
            self.sync_embed();
        }
        self.b.close()
    }

    /// The CPU waits for all that it has issued, where it is one that does.
    fn pass_is_over(&mut self) {
        if self.par.options.wait_passes {
            self.wait("wait", vec![], vec![], 1);
        }
    }

    /// Waits for `reads` to come and for `writes` to be free, of a rank's hidden states or one of `parts` of them each,
    /// and for every kernel before.
    pub(super) fn wait(&mut self, label: &str, reads: Vec<Buf>, writes: Vec<Buf>, parts: u64) {
        let elems = self.layer().residual_rows() * self.model.hidden / parts;
        let kernel = Kernel::Wait { reads: vec![elems; reads.len()], writes: vec![elems; writes.len()], stream: false };
        self.b.compute(label, kernel, &reads, &writes);
    }

    /// Sums the gradients of so many layers of each kind over the replicas, none before the whole backward pass is over.
    pub(super) fn sum_gradients(&mut self, counts: &[u32]) {
        self.wait("backward_is_over", vec![], vec![], 1);
        for (kind, &layers) in self.kinds.iter().zip(counts).rev().filter(|(_, layers)| **layers > 0) {
            kind.call_sums(&mut self.b, layers, kind.shares([&self.dp, &self.edp]));
        }
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
        if let Some(modules) = &self.modules {
            modules.sync(&mut self.b, &self.kinds, [&self.dp, &self.edp]);
        }
    }

    pub(super) fn call_forward(&mut self, m: u32) {
        for of in self.stretches() {
            self.kinds[of.kind].call_forward(&mut self.b, m, self.x, &of);
        }
    }

    /// All layers, those alike together.
    pub(super) fn stretches(&self) -> Vec<Stretch> {
        Stretch::all(self.kinds.iter().map(|kind| &kind.layers), &(0..self.layer_count()))
    }

    fn call_backward(&mut self, last: bool, m: u32) {
        for of in self.stretches().iter().rev() {
            let kind = &self.kinds[of.kind];
            let shares = last.then(|| kind.shares([&self.dp, &self.edp]));
            kind.call_backward(&mut self.b, m, (self.x, self.dx), of, shares);
        }
    }

    /// Final norm, logits, loss, and the gradient of the last layer's output in the first of the pair `dx`.
    pub(super) fn head(&mut self, targets: Buf, x: Buf, dx: Buf) {
        self.head_to(targets, x, [dx, dx.slot(dx.slot + 1)]);
    }

    /// The same with the pair in the order that is wanted.
    pub(super) fn head_to(&mut self, targets: Buf, x: Buf, dx: [Buf; 2]) {
        let (own, table) = ([self.head.weight, self.head.grad], self.head_table());
        self.end.run(&mut self.b, HeadWeights { own, table, part: 1.0 }, targets, x, self.loss, dx);
    }

    /// The output matrix and its gradient: the head's, or the embedding.
    pub(super) fn head_table(&self) -> [Buf; 2] {
        let tied = [self.embed.weight, self.embed.grad].map(|flat| self.embedding.table(flat));
        match [self.head.weight, self.head.grad].map(|flat| self.end.table(flat)) {
            [Some(w), Some(g)] => [w, g],
            _ => tied,
        }
    }

    /// Whether the last stage looks tokens up too, or has the table as its output matrix.
    pub(super) fn has_table_at_both_ends(&self) -> bool {
        self.model.tie_embeddings || self.modules.is_some()
    }

    /// Targets of the head, and of the modules behind it, a slot a microbatch.
    pub(in crate::strategy) fn all_targets(&self) -> impl Iterator<Item = Buf> + '_ {
        std::iter::once(self.targets).chain(self.modules.iter().flat_map(|modules| modules.targets.iter().copied()))
    }

    /// The same as formals of the block being written.
    pub(super) fn formal_targets(&mut self) -> Vec<Buf> {
        let name = |k: usize| if k > 0 { format!("targets.{k}") } else { "targets".into() };
        (0..self.all_targets().count()).map(|k| self.b.formal(&name(k))).collect()
    }

    /// And as the arguments of a microbatch.
    pub(super) fn target_args(&self, microbatch: u32) -> Vec<Arg> {
        self.all_targets().map(|targets| targets.slot(microbatch).into()).collect()
    }

    fn program(&mut self) {
        let m = self.microbatches;
        self.write_updates();
        let counts: Vec<u32> = self.kinds.iter().map(Kind::count).collect();
        self.gather_ahead(0, true, true);
        self.zero_grad(&counts, true, true);
        match self.microbatch[..] {
            [] => {}
            [block] => {
                let all = std::iter::once(self.tokens).chain(self.all_targets());
                let args: Vec<Arg> = all.map(|ids| each(ids, 0, 1, m)).collect();
                self.b.call("mb", block, m - 1, &args);
            }
            _ => {
                for (i, block) in (0..).zip(self.microbatch.clone()) {
                    let args = self.microbatch_args(i);
                    self.b.call(&format!("mb.{i}"), block, 1, &args);
                }
            }
        }
        let last = self.microbatch_args(m - 1);
        self.b.call("last", self.last_microbatch, 1, &last);
        self.dp.sum_scalar(&mut self.b, "loss_sum", self.loss, self.acc);
        self.optimizer(&counts, true, true);
    }

    fn microbatch_args(&self, m: u32) -> Vec<Arg> {
        let mut args = vec![self.tokens.slot(m).into()];
        args.extend(self.target_args(m));
        args
    }

    /// The blocks that set the gradient of one layer to zero, and those that update its weights.
    pub(super) fn write_updates(&mut self) {
        let Step { b, kinds, dp, edp, .. } = self;
        kinds.iter_mut().for_each(|kind| kind.write_fill(b, [dp, edp]));
        kinds.iter_mut().for_each(|kind| kind.write_ahead(b, [dp, edp]));
        if self.muon.is_some() {
            kinds.iter_mut().for_each(|kind| kind.write_chains(b, [dp, edp]));
        } else if !dp.offload {
            kinds.iter_mut().for_each(|kind| kind.write_updates(b, [dp, edp], Adam::default()));
        }
    }
}
