//! A feed-forward network of experts, cut over ranks (GShard, arXiv:2006.16668): every rank has some experts whole, and
//! the rows of its tokens travel to whoever has the experts that a token chose, and back.
//!
//! ```text
//! forward    router | dispatch | gate_up, swiglu x weight, down of the rank's experts | combine
//! backward   cached dispatch | down, swiglu, gate_up backward | combine | router backward
//! ```
//! What a choice weighs is multiplied in behind the activation, as Megatron-LM does, so that what travels back only
//! has to be added up; its gradient travels back beside the rows'. Experts may work on fewer columns than the hidden
//! states have: then tokens are projected to them before they travel, and back behind their sum (LatentMoE, Nemotron 3);
//! routers and the experts that every token visits see hidden states.
//!
//! Experts that several slots hold (`replicas`) have their gradients made one before they are summed over the ranks that
//! hold the same slots: `grad_home` brings every copy's to one, `grad_out` the total back to all.
//!
//! Legend: r tokens of this rank, k choices of each, E experts, h columns of a row, f width of an expert; C copies that leave, U
//! rows that land, P rows that the rank's experts compute.

use super::feasible;
use super::step::Engines;
use super::transformer::{linear, linear_dw, linear_dx};
use super::weights::{Rows, Weight, Weights};
use crate::error::{Error, Result};
use crate::plan::Counts;
use crate::plan::expert::{ExpertKernel, ExpertOp, Pass, Values};
use crate::plan::kernel::FP8_BLOCK;
use crate::plan::rows::{EXPERT_VIEW, Landing};
use crate::plan::{
    Axis, Buf, Builder, Dtype, Engine, ExchangeAlgo, Group, Kernel, Layout, OpKind, Phase, Route, TensorKind, Wire,
};
use crate::routing;
use crate::routing::{Placement, Trace, capacity};
use crate::spec::{Capacity, Dispatch, Gate, Groups, LlmSpec, Mlp, MoeSpec, Options, Parallelism, Workload};

use rand::SeedableRng;
use rand::seq::index::sample;
use rand_chacha::ChaCha8Rng;

/// What a rank has of the experts of a layer, and how its rows reach the others.
pub struct Experts {
    /// The first route that ops name.
    pub route: u32,
    ranks: u32,
    algo: ExchangeAlgo,
    engine: Engine,
    fp8_rows: bool,
    fp8: bool,
    tokens: u64,
    /// Rows of each order that buffers have room for.
    copies: u64,
    landed: u64,
    rows: u64,
    /// Columns of a row on its way, and of the hidden states.
    hidden: u64,
    whole: u64,
    ffn: u64,
    mlp: Mlp,
    experts: u64,
    slots: u64,
    topk: u64,
    gate: Gate,
    dtype: Dtype,
    acc: Dtype,
    weights: Weights,
    gate_up: Rows,
    down: Rows,
    sums: Option<Sums>,
}

/// How gradients of experts that several slots hold become one: by the plan's last route.
#[derive(Clone, Copy)]
struct Sums {
    route: u32,
    /// Slots of such experts, the first ones of a rank, and rows that leave.
    slots: u64,
    copies: u64,
}

/// The rows of its way, as slots and as copies of them.
#[derive(Clone, Copy)]
struct SumRows {
    landed: Buf,
    copies: Buf,
    total: Buf,
}

/// Kept for the backward pass.
#[derive(Clone, Copy)]
pub struct Saved {
    logits: Buf,
    /// Rows of the experts, what each weighs, and what became of them.
    x: Buf,
    weighs: Buf,
    gate_up: Buf,
    act: Buf,
    /// The sum of a token's experts, where it is projected back.
    sum: Option<Buf>,
}

impl Saved {
    pub fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![
            ("router_logits", &mut self.logits),
            ("expert_x", &mut self.x),
            ("expert_weighs", &mut self.weighs),
            ("expert_gate_up", &mut self.gate_up),
            ("expert_act", &mut self.act),
        ];
        all.extend(self.sum.as_mut().map(|sum| ("expert_sum", sum)));
        all
    }
}

/// Values on their way: rows, and numbers of choices.
#[derive(Clone, Copy)]
struct Station {
    rows: Buf,
    choices: Buf,
}

pub struct Scratch {
    gates: Buf,
    d_gates: Buf,
    d_logits: Buf,
    /// Before a dispatch; none where tokens leave as they are.
    leaving: Option<Station>,
    codes: Option<[Buf; 2]>,
    /// Behind a dispatch, and before a combine; none without other ranks or where rows land at their experts.
    landed: Option<Station>,
    landed_codes: Option<[Buf; 2]>,
    y: Buf,
    d_act: Buf,
    d_gate_up: Buf,
    d_weighs: Buf,
    /// Rows before they travel, or their gradients, where they are projected; and the gradients behind.
    squeezed: Option<[Buf; 2]>,
    /// Of gate and up, and of down.
    sums: Option<[SumRows; 2]>,
}

/// The router's weight, which every rank has, and the experts'; or their gradients.
#[derive(Clone, Copy)]
pub struct Parts {
    pub router: Buf,
    /// To the columns that experts work on, and back.
    pub squeezed: Option<[Buf; 2]>,
    pub experts: Buf,
}

/// Compute that may stand beside a dispatch, and beside a combine.
pub type Beside<'a> = [&'a mut dyn FnMut(&mut Builder); 2];

/// Tokens of one rank: those between the products of a layer.
pub fn tokens(work: &Workload, par: &Parallelism) -> u64 {
    work.micro_batch * work.seq_len / (u64::from(par.ring) * u64::from(par.ulysses) * u64::from(par.tp))
}

/// How tokens choose their experts.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Routing {
    /// Every expert equally popular, in closed form.
    #[default]
    Balanced,
    /// The same by lot, token by token.
    Uniform { seed: u64 },
    /// As a router's log has it, or a generator of [`routing`].
    Traced { routing: routing::Routing, seed: u64 },
}

impl std::str::FromStr for Routing {
    type Err = Error;

    /// The words of `--routing`; what is drawn is drawn from seed 1.
    fn from_str(text: &str) -> Result<Routing> {
        Ok(match text.parse()? {
            routing::Routing::Balanced => Routing::Balanced,
            routing::Routing::Uniform => Routing::Uniform { seed: 1 },
            routing => Routing::Traced { routing, seed: 1 },
        })
    }
}

impl Routing {
    /// The route of a step's layers; none without experts. `node` is how many ranks share the fast links.
    pub fn route(&self, model: &LlmSpec, work: &Workload, par: &Parallelism, node: u32) -> Result<Option<Route>> {
        let Some(moe) = model.moe else { return Ok(None) };
        feasible::check(model, work, par)?;
        let (tokens, ranks) = (tokens(work, par), par.ep);
        let node = node_of(ranks, node);
        let groups = moe.groups.map(|groups| [groups.count as u32, groups.kept as u32]);
        let o = par.options;
        if let Routing::Traced { routing: routing::Routing::Spread, .. } = self
            && (o.replicas, o.capacity, groups) == (0, Capacity::Unlimited, None)
        {
            let counts = Counts::Spread { tokens };
            return Route::new([ranks, node], moe.experts as u32, moe.top_k as u32, counts).map(Some);
        }
        let Some(mut trace) = self.trace([tokens, u64::from(ranks), u64::from(node)], &moe, &model.name)? else {
            return even(tokens, [ranks, node], &moe, par).map(Some);
        };
        let room = capacity::limit(&mut trace, o.capacity);
        let placement = match o.replicas {
            0 => Placement::contiguous(moe.experts as u32, ranks)?,
            n => Placement::balanced(&trace.loads(), n, 1, 1, ranks)?.shared_first(),
        };
        let route = trace.route(&placement, node)?;
        let route = match (o.replicas, groups) {
            (0, None) => route,
            (0, Some(groups)) => route.limited(groups)?,
            _ => route.holding(placement.of_slot)?,
        };
        padded(route, room).map(Some)
    }

    /// What the router chose, by experts; none where rows are expected values.
    fn trace(&self, [tokens, ranks, node]: [u64; 3], moe: &MoeSpec, model: &str) -> Result<Option<Trace>> {
        let (ranks, experts, topk) = (ranks as u32, moe.experts as u32, moe.top_k as u32);
        match self {
            Routing::Balanced => Ok(None),
            Routing::Traced { routing, .. }
                if moe.groups.is_some() && !matches!(routing, routing::Routing::File(_)) =>
            {
                let why = format!(
                    "routing: tokens of {model} choose among groups of experts, which {routing:?} knows nothing of; use \
                     balanced, uniform or a file of what its router chose"
                );
                Err(Error::infeasible(why))
            }
            Routing::Traced { routing, seed } => {
                let request = routing::Request {
                    routing: routing.clone(),
                    ranks,
                    node: node as u32,
                    experts,
                    topk,
                    tokens,
                    replicas: 0,
                    node_limit: None,
                    seed: *seed,
                    step: 0,
                };
                request.trace().map(Some)
            }
            Routing::Uniform { seed } => {
                let mut rng = ChaCha8Rng::seed_from_u64(*seed);
                let mut choose = || one_by_lot(&mut rng, moe);
                let choices = (0..tokens * u64::from(ranks)).flat_map(|_| choose()).map(|e| e as u32).collect();
                Ok(Some(Trace { experts, topk, tokens: vec![tokens; ranks as usize], choices, weights: vec![] }))
            }
        }
    }
}

/// Expected values, of slots that are all chosen alike.
fn even(tokens: u64, [ranks, node]: [u32; 2], moe: &MoeSpec, par: &Parallelism) -> Result<Route> {
    let Options { replicas, capacity: most, .. } = par.options;
    let (experts, topk) = (moe.experts as u32, moe.top_k as u32);
    let share = tokens as f64 * f64::from(topk) / f64::from(experts);
    let hundredths = |n: u32| f64::from(n) / 100.0;
    let room = match most {
        Capacity::Unlimited => None,
        Capacity::Drop(n) => Some((capacity::capacity(tokens, topk, experts, hundredths(n)), false)),
        Capacity::Pad(n) => Some((capacity::capacity(tokens, topk, experts, hundredths(n)), true)),
        Capacity::Tutel(n) => Some((capacity::tutel(tokens, topk, experts, hundredths(n), 0), true)),
        Capacity::Dynamic(n) => {
            let fullest = share.ceil() as u64;
            Some((capacity::tutel(tokens, topk, experts, -n.map_or(0.0, hundredths), fullest), true))
        }
    };
    if let Some((room, _)) = room.filter(|(room, _)| (*room as f64) < share) {
        let why =
            format!("capacity: {room} tokens of {share:.1} for an expert of a rank, and balanced rows are no tokens");
        return Err(Error::infeasible(format!("{why} that could be dropped; use --routing uniform, or more room")));
    }
    let route = Route::new([ranks, node], experts + replicas, topk, Counts::Balanced { tokens })?;
    let route = match (replicas, moe.groups) {
        (0, None) => route,
        (0, Some(groups)) => route.limited([groups.count as u32, groups.kept as u32])?,
        (n, None) => {
            let placement = Placement::balanced(&vec![1; experts as usize], n, 1, 1, ranks)?;
            route.holding(placement.shared_first().of_slot)?
        }
        (_, Some(_)) => {
            let why = "replicas: of experts in groups, where rows are expected values; use --routing uniform";
            return Err(Error::infeasible(why));
        }
    };
    padded(route, room.filter(|(_, pads)| *pads).map(|(room, _)| room))
}

/// As much room for every slot, where what is left is filled up.
fn padded(route: Route, room: Option<u64>) -> Result<Route> {
    let Some(room) = room else { return Ok(route) };
    let rows = u32::try_from(room).map_err(|_| Error::infeasible(format!("capacity: {room} rows; use less")))?;
    route.padded(rows)
}

/// The experts of a token: any, in any of the groups that it may choose from.
fn one_by_lot(rng: &mut ChaCha8Rng, moe: &MoeSpec) -> Vec<usize> {
    let (experts, top_k) = (moe.experts as usize, moe.top_k as usize);
    let Some(Groups { count, kept }) = moe.groups else { return sample(rng, experts, top_k).into_vec() };
    let (group, kept) = (experts / count as usize, kept as usize);
    let groups = sample(rng, count as usize, kept).into_vec();
    let chosen = sample(rng, kept * group, top_k).into_vec();
    chosen.into_iter().map(|i| groups[i / group] * group + i % group).collect()
}

/// Ranks of a node among `ranks` consecutive ones: all, where they fit.
pub fn node_of(ranks: u32, node: u32) -> u32 {
    (1..=node.min(ranks).max(1)).rev().find(|n| ranks.is_multiple_of(*n)).unwrap_or(1)
}

/// SMs of DeepEP's kernels: the default of its V1 buffers, and what its V2 settles on between nodes of eight.
const DEEPEP_SMS: u16 = 20;
const DEEPEP_V2_SMS: u16 = 12;
/// Of the performance recipes of Megatron-Bridge.
const HYBRID_EP_SMS: u16 = 32;

/// The algorithm that a word means.
fn algo(options: &Options, tokens: u64) -> ExchangeAlgo {
    match options.dispatch {
        Dispatch::Nccl => ExchangeAlgo::Nccl,
        Dispatch::AllGather => ExchangeAlgo::AllGather,
        Dispatch::DeepepNormal => ExchangeAlgo::DeepepNormal { sms: DEEPEP_SMS },
        Dispatch::DeepepLowLatency => {
            ExchangeAlgo::DeepepLowLatency { hook: options.deepep_hook, slots: tokens as u32 }
        }
        Dispatch::DeepepV2 => ExchangeAlgo::DeepepV2Hybrid { sms: DEEPEP_V2_SMS },
        Dispatch::HybridEp => ExchangeAlgo::HybridEp { sms: HYBRID_EP_SMS },
        Dispatch::Hierarchical => ExchangeAlgo::Hierarchical,
    }
}

impl Experts {
    /// None for a model without experts.
    pub fn new(
        model: &LlmSpec,
        par: &Parallelism,
        engines: Engines,
        routes: &[Route],
        [dtype, acc]: [Dtype; 2],
        tokens: u64,
    ) -> Option<Experts> {
        let (moe, route) = (model.moe?, routes.first()?);
        // With copies of experts, the route of their gradients stands behind that of all tokens.
        let (routes, sums) = match &routes[1..] {
            [sums] if !route.holds.is_empty() => {
                let capacity = |layout: Layout| layout.capacity(sums);
                let [slots, copies] = [Layout::Tokens, Layout::Copies].map(capacity);
                (&routes[..1], Some(Sums { route: 1, slots, copies }))
            }
            _ => (routes, None),
        };
        let most = |layout: Layout| routes.iter().map(|route| layout.capacity(route)).max().unwrap_or(0);
        let (h, f, slots) = (moe.width(model.hidden), moe.ffn, u64::from(route.local_experts()));
        let (up, wide) = match model.mlp {
            Mlp::SwiGlu => ("mlp.experts.gate_up_proj.weight", 2 * f),
            Mlp::Gelu | Mlp::Relu2 => ("mlp.experts.up_proj.weight", f),
        };
        let mut weights = Weights::over(Axis::Ep, u64::from(route.ranks));
        let wide = moe.experts * wide;
        let mut part = |name, shape: [u64; 2]| match route.holds.is_empty() {
            true => weights.cut(name, &shape, 0, &[shape[0]]),
            false => weights.held(name, &shape, &route.holds),
        };
        let gate_up = part(up, [wide, h]);
        let down = part("mlp.experts.down_proj.weight", [moe.experts * h, f]);
        let algo = algo(&par.options, tokens);
        let engine = match algo {
            ExchangeAlgo::DeepepNormal { sms }
            | ExchangeAlgo::DeepepV2Hybrid { sms }
            | ExchangeAlgo::HybridEp { sms }
            | ExchangeAlgo::DeepepV2Direct { sms } => Engine::Sm { ctas: sms },
            _ => engines.collective,
        };
        Some(Experts {
            route: 0,
            ranks: route.ranks,
            algo,
            engine,
            fp8_rows: par.options.dispatch_fp8 && route.ranks > 1,
            fp8: par.options.fp8,
            tokens,
            copies: most(algo.source()),
            landed: most(algo.landed()),
            rows: most(Layout::Experts),
            hidden: h,
            whole: model.hidden,
            ffn: f,
            mlp: model.mlp,
            experts: moe.experts,
            slots,
            topk: moe.top_k,
            gate: moe.gate,
            dtype,
            acc,
            weights,
            gate_up,
            down,
            sums,
        })
    }

    /// Elements of a layer's experts on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    /// The rows of the order in which they leave.
    fn leaving(&self) -> u64 {
        if self.algo.source() == Layout::Tokens { self.tokens } else { self.copies }
    }

    fn lands_at_experts(&self) -> bool {
        self.algo.landed() == Layout::Experts
    }

    /// Columns before the activation.
    fn wide(&self) -> u64 {
        if self.mlp == Mlp::SwiGlu { 2 * self.ffn } else { self.ffn }
    }

    /// Rows are projected before they travel.
    fn squeezes(&self) -> bool {
        self.hidden != self.whole
    }

    pub fn saved(&self, keep: &mut dyn FnMut(&'static str, u64, u64, Dtype) -> Buf) -> Saved {
        Saved {
            logits: keep("router_logits", self.tokens, self.experts, self.acc),
            x: keep("expert_x", self.rows, self.hidden, self.dtype),
            weighs: keep("expert_weighs", self.rows, 1, self.acc),
            gate_up: keep("expert_gate_up", self.rows, self.wide(), self.dtype),
            act: keep("expert_act", self.rows, self.ffn, self.dtype),
            sum: self.squeezes().then(|| keep("expert_sum", self.tokens, self.hidden, self.dtype)),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (h, away) = (self.hidden, self.ranks > 1);
        let mut some = |name: &str, rows, row, dtype, kind| b.tensor(name, &[rows, row], dtype, kind, 1);
        let (work, comm) = (TensorKind::Workspace, TensorKind::CommBuffer);
        let mut codes = |name: &str, rows: u64, there: bool| {
            there.then(|| {
                let scales = h.div_ceil(FP8_BLOCK);
                let codes = some(&format!("{name}_codes"), rows, h, Dtype::U8, comm);
                [codes, some(&format!("{name}_scales"), rows, scales, Dtype::F32, comm)]
            })
        };
        let leaving_codes = codes("leaving", self.leaving(), self.fp8_rows);
        let landed_codes = codes("landed", self.landed, self.fp8_rows);
        let station =
            |some: &mut dyn FnMut(&str, u64, u64, Dtype, TensorKind) -> Buf, name: &str, rows, layout: Layout| {
                let width = if layout.by_choice() { 1 } else { self.topk };
                Station {
                    rows: some(&format!("{name}_rows"), rows, h, self.dtype, comm),
                    choices: some(&format!("{name}_choices"), rows, width, self.acc, comm),
                }
            };
        let copied = away && self.algo.source() == Layout::Copies;
        let leaving = copied.then(|| station(&mut some, "leaving", self.copies, Layout::Copies));
        let landed =
            (away && !self.lands_at_experts()).then(|| station(&mut some, "landed", self.landed, self.algo.landed()));
        let (acc, widths) = (self.acc, [self.gate_up, self.down].map(|rows| self.of_slot(rows)));
        let sums = self.sums.map(|Sums { slots, copies, .. }| {
            [("up", widths[0]), ("down", widths[1])].map(|(name, width)| SumRows {
                landed: some(&format!("grad_slots_{name}"), slots, width, acc, comm),
                copies: some(&format!("grad_copies_{name}"), copies, width, acc, comm),
                total: some(&format!("grad_total_{name}"), slots, width, acc, work),
            })
        });
        Scratch {
            sums,
            gates: some("gates", self.tokens, self.topk, self.acc, work),
            d_gates: some("d_gates", self.tokens, self.topk, self.acc, work),
            d_logits: some("d_logits", self.tokens, self.experts, self.acc, work),
            leaving,
            codes: leaving_codes,
            landed,
            landed_codes,
            y: some("expert_y", self.rows, h, self.dtype, work),
            d_act: some("expert_d_act", self.rows, self.ffn, self.dtype, work),
            d_gate_up: some("expert_d_gate_up", self.rows, self.wide(), self.dtype, work),
            d_weighs: some("expert_d_weighs", self.rows, 1, self.acc, work),
            squeezed: self.squeezes().then(|| {
                let mut room = |name: &str| some(name, self.tokens, h, self.dtype, work);
                [room("squeezed"), room("d_squeezed")]
            }),
        }
    }

    fn kernel(&self, b: &mut Builder, label: &str, op: ExpertOp, reads: &[Buf], writes: &[Buf]) {
        b.compute(label, Kernel::Expert(ExpertKernel { route: self.route, op }), reads, writes);
    }

    fn capacity(&self, layout: Layout) -> u64 {
        match layout {
            Layout::Tokens => self.tokens,
            Layout::Copies => self.copies,
            Layout::Landed(_) => self.landed,
            Layout::Experts => self.rows,
        }
    }

    fn put(&self, b: &mut Builder, label: &str, [from, to]: [Layout; 2], values: Values, reads: &[Buf], y: Buf) {
        let rows = [self.capacity(from), self.capacity(to)];
        self.kernel(b, label, ExpertOp::Rows { from, to, rows, values }, reads, &[y]);
    }

    fn exchange(&self, b: &mut Builder, label: &str, phase: Phase, src: &[Buf], dst: &[Buf]) {
        let wire = if self.fp8_rows && phase != Phase::Combine { Wire::Fp8 } else { Wire::Plain(self.dtype) };
        let (src, dst) = (src.to_vec(), dst.to_vec());
        let (algo, acc, engine) = (self.algo, self.acc, self.engine);
        let group = Group::Axes { view: EXPERT_VIEW, axes: vec![Axis::Ep] };
        b.exchange(label, &group, 0, OpKind::Exchange { route: self.route, src, dst, algo, phase, wire, acc, engine });
    }

    /// Rows of tokens, and with `choices` a number for each of their choices, to the experts that they chose.
    #[allow(clippy::too_many_arguments)]
    fn to_experts(
        &self,
        b: &mut Builder,
        s: &Scratch,
        [name, label]: [&str; 2],
        phase: Phase,
        from: (Buf, Option<Buf>),
        to: (Buf, Buf),
        beside: &mut dyn FnMut(&mut Builder),
    ) {
        let (row, number) = (Values::Row { cols: self.hidden }, Values::Choice { topk: self.topk });
        if self.ranks == 1 {
            let ends = [Layout::Tokens, Layout::Experts];
            self.put(b, &format!("{name}expand"), ends, row, &[from.0], to.0);
            if let Some(choices) = from.1 {
                self.put(b, &format!("{name}expand_weighs"), ends, number, &[choices], to.1);
            }
            return beside(b);
        }
        let (mut rows, mut choices) = from;
        if let Some(leaving) = s.leaving {
            let ends = [Layout::Tokens, Layout::Copies];
            self.put(b, &format!("{name}copies"), ends, row, &[rows], leaving.rows);
            if let Some(given) = choices {
                self.put(b, &format!("{name}copies_weighs"), ends, number, &[given], leaving.choices);
                choices = Some(leaving.choices);
            }
            rows = leaving.rows;
        }
        let (mut src, mut dst) = (vec![rows], vec![s.landed.map_or(to.0, |landed| landed.rows)]);
        if let (Some(codes), Some(landed)) = (s.codes, s.landed_codes) {
            let op = ExpertOp::Quantise { layout: self.algo.source(), rows: self.leaving(), cols: self.hidden };
            self.kernel(b, &format!("{name}quantise"), op, &[rows], &codes);
            (src, dst) = (codes.to_vec(), landed.to_vec());
        }
        if let Some(choices) = choices {
            src.push(choices);
            dst.push(s.landed.map_or(to.1, |landed| landed.choices));
        }
        self.exchange(b, label, phase, &src, &dst);
        beside(b);
        let ends = [self.algo.landed(), Layout::Experts];
        match (s.landed_codes, s.landed) {
            (Some(codes), _) => {
                let values = Values::Scaled { cols: self.hidden };
                self.put(b, &format!("{name}expand"), ends, values, &codes, to.0);
            }
            (None, Some(landed)) => self.put(b, &format!("{name}expand"), ends, row, &[landed.rows], to.0),
            (None, None) => {}
        }
        if let (Some(_), Some(landed)) = (choices, s.landed) {
            self.put(b, &format!("{name}expand_weighs"), ends, number, &[landed.choices], to.1);
        }
    }

    /// Rows of experts back to their tokens, added up, and numbers of choices beside them.
    #[allow(clippy::too_many_arguments)]
    fn to_tokens(
        &self,
        b: &mut Builder,
        s: &Scratch,
        [name, label]: [&str; 2],
        from: (Buf, Option<Buf>),
        to: (Buf, Buf),
        beside: &mut dyn FnMut(&mut Builder),
    ) {
        let (row, number) = (Values::Row { cols: self.hidden }, Values::Choice { topk: self.topk });
        if self.ranks == 1 {
            let ends = [Layout::Experts, Layout::Tokens];
            self.put(b, &format!("{name}sum"), ends, row, &[from.0], to.0);
            if let Some(choices) = from.1 {
                self.put(b, &format!("{name}sum_weighs"), ends, number, &[choices], to.1);
            }
            return beside(b);
        }
        let (mut rows, mut choices) = from;
        if let Some(landed) = s.landed {
            let ends = [Layout::Experts, self.algo.landed()];
            self.put(b, &format!("{name}gather"), ends, row, &[rows], landed.rows);
            if let Some(given) = choices {
                self.put(b, &format!("{name}gather_weighs"), ends, number, &[given], landed.choices);
                choices = Some(landed.choices);
            }
            rows = landed.rows;
        }
        let (src, mut dst) = ([Some(rows), choices], vec![s.leaving.map_or(to.0, |leaving| leaving.rows)]);
        let src: Vec<Buf> = src.into_iter().flatten().collect();
        dst.extend(choices.map(|_| s.leaving.map_or(to.1, |leaving| leaving.choices)));
        self.exchange(b, label, Phase::Combine, &src, &dst);
        beside(b);
        if let Some(leaving) = s.leaving {
            let ends = [Layout::Copies, Layout::Tokens];
            self.put(b, &format!("{name}sum"), ends, row, &[leaving.rows], to.0);
            if choices.is_some() {
                self.put(b, &format!("{name}sum_weighs"), ends, number, &[leaving.choices], to.1);
            }
        }
    }

    fn matmul(&self, b: &mut Builder, label: &str, pass: Pass, [n, k]: [u64; 2], reads: &[Buf], y: Buf) {
        let (rows, slots, fp8) = (self.rows, self.slots, self.fp8);
        self.kernel(b, label, ExpertOp::MatMul { pass, rows, slots, n, k, fp8 }, reads, &[y]);
    }

    fn at(flat: Buf, rows: Rows) -> Buf {
        flat.rows(rows[0], rows[1])
    }

    fn router(&self) -> [ExpertOp; 2] {
        let (rows, experts, topk, gate) = (self.tokens, self.experts, self.topk, self.gate);
        [ExpertOp::Router { rows, experts, topk, gate }, ExpertOp::RouterBwd { rows, experts, topk, gate }]
    }

    fn activation(&self) -> [ExpertOp; 2] {
        let (rows, cols) = (self.rows, self.ffn);
        match self.mlp {
            Mlp::Relu2 => [ExpertOp::Relu2 { rows, cols }, ExpertOp::Relu2Bwd { rows, cols }],
            Mlp::SwiGlu | Mlp::Gelu => [ExpertOp::SwiGlu { rows, cols }, ExpertOp::SwiGluBwd { rows, cols }],
        }
    }

    /// What the activation is called.
    fn act(&self) -> &'static str {
        if self.mlp == Mlp::Relu2 { "experts_relu2" } else { "experts_swiglu" }
    }

    /// Elements of one slot of a weight.
    fn of_slot(&self, rows: Rows) -> u64 {
        (rows[1] - rows[0]) / self.slots
    }

    /// Makes the gradients of copies of an expert one, in all of them.
    pub fn sum_copies(&self, b: &mut Builder, s: &Scratch, g: Buf) {
        let (Some(sums), Some(buffers)) = (self.sums, s.sums) else { return };
        let group = Group::Axes { view: EXPERT_VIEW, axes: vec![Axis::Ep] };
        let pairs = Layout::Landed(Landing::Pairs);
        let parts = [("up", self.gate_up), ("down", self.down)];
        for ((name, rows), at) in parts.into_iter().zip(buffers) {
            let cols = self.of_slot(rows);
            let own = g.rows(rows[0], rows[0] + sums.slots * cols);
            let put = |b: &mut Builder, what: &str, [from, to]: [Layout; 2], x: Buf, y: Buf| {
                let rows = [from, to].map(|layout| if layout == Layout::Copies { sums.copies } else { sums.slots });
                let op = ExpertOp::Rows { from, to, rows, values: Values::Row { cols } };
                let kernel = Kernel::Expert(ExpertKernel { route: sums.route, op });
                b.compute(&format!("{what}_{name}"), kernel, &[x], &[y]);
            };
            let exchange = |b: &mut Builder, what: &str, phase: Phase, src: Buf, dst: Buf| {
                let (route, wire, acc, engine) = (sums.route, Wire::Plain(self.acc), self.acc, self.engine);
                let (src, dst, algo) = (vec![src], vec![dst], ExchangeAlgo::Nccl);
                let kind = OpKind::Exchange { route, src, dst, algo, phase, wire, acc, engine };
                b.exchange(&format!("{what}_{name}"), &group, 1, kind);
            };
            put(b, "grad_slots", [Layout::Experts, pairs], own, at.landed);
            exchange(b, "grad_home", Phase::Combine, at.landed, at.copies);
            put(b, "grad_total", [Layout::Copies, Layout::Tokens], at.copies, at.total);
            put(b, "grad_copies", [Layout::Tokens, Layout::Copies], at.total, at.copies);
            exchange(b, "grad_out", Phase::CachedDispatch, at.copies, at.landed);
            put(b, "grad_same", [pairs, Layout::Experts], at.landed, own);
        }
    }

    /// out = the weighted sum of what each token's experts make of it.
    #[allow(clippy::too_many_arguments)]
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Parts, x: Buf, out: Buf, keep: &Saved, beside: Beside) {
        let (h, f, wide) = (self.hidden, self.ffn, self.wide());
        let [beside_dispatch, beside_combine] = beside;
        b.compute("router", linear(self.tokens, self.experts, self.whole, false), &[x, w.router], &[keep.logits]);
        self.kernel(b, "router_gates", self.router()[0], &[keep.logits], &[s.gates]);
        let (mut rows, mut sum) = (x, out);
        if let (Some([down, _]), Some([squeezed, _]), Some(kept)) = (w.squeezed, s.squeezed, keep.sum) {
            b.compute("squeeze", linear(self.tokens, h, self.whole, self.fp8), &[x, down], &[squeezed]);
            (rows, sum) = (squeezed, kept);
        }
        let to = (keep.x, keep.weighs);
        self.to_experts(b, s, ["", "dispatch"], Phase::Dispatch, (rows, Some(s.gates)), to, beside_dispatch);
        let [gate_up, down] = [self.gate_up, self.down].map(|rows| Self::at(w.experts, rows));
        self.matmul(b, "experts_gate_up", Pass::Forward, [wide, h], &[keep.x, gate_up], keep.gate_up);
        self.kernel(b, self.act(), self.activation()[0], &[keep.gate_up, keep.weighs], &[keep.act]);
        self.matmul(b, "experts_down", Pass::Forward, [h, f], &[keep.act, down], s.y);
        self.to_tokens(b, s, ["", "combine"], (s.y, None), (sum, s.d_gates), beside_combine);
        if let Some([_, up]) = w.squeezed {
            b.compute("unsqueeze", linear(self.tokens, self.whole, h, self.fp8), &[sum, up], &[out]);
        }
    }

    /// dx from the gradient of the output, and the gradients of the weights added to `g`.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        b: &mut Builder,
        s: &Scratch,
        [w, g]: [Parts; 2],
        [x, d_out, dx]: [Buf; 3],
        keep: &Saved,
        beside: Beside,
    ) {
        let (h, f, wide) = (self.hidden, self.ffn, self.wide());
        let [beside_dispatch, beside_combine] = beside;
        let (mut d_rows, mut d_sum) = (d_out, dx);
        if let (Some([_, up]), Some([_, d_up]), Some([before, behind]), Some(sum)) =
            (w.squeezed, g.squeezed, s.squeezed, keep.sum)
        {
            b.compute("unsqueeze_dx", linear_dx(self.tokens, h, self.whole, self.fp8), &[d_out, up], &[before]);
            let product = linear_dw(self.whole, h, self.tokens, self.fp8);
            b.compute("unsqueeze_dw", product, &[d_out, sum, d_up], &[d_up]);
            (d_rows, d_sum) = (before, behind);
        }
        // The rows of y are not needed again: its gradient takes their place.
        let to = (s.y, s.d_weighs);
        self.to_experts(b, s, ["bwd_", "dispatch_bwd"], Phase::CachedDispatch, (d_rows, None), to, beside_dispatch);
        let [w_gate_up, w_down] = [self.gate_up, self.down].map(|rows| Self::at(w.experts, rows));
        let [g_gate_up, g_down] = [self.gate_up, self.down].map(|rows| Self::at(g.experts, rows));
        self.matmul(b, "experts_down_dx", Pass::Dx, [h, f], &[s.y, w_down], s.d_act);
        self.matmul(b, "experts_down_dw", Pass::Dw, [h, f], &[s.y, keep.act, g_down], g_down);
        let act = format!("{}_bwd", self.act());
        let reads = [keep.gate_up, keep.weighs, s.d_act];
        self.kernel(b, &act, self.activation()[1], &reads, &[s.d_gate_up, s.d_weighs]);
        self.matmul(b, "experts_gate_up_dx", Pass::Dx, [wide, h], &[s.d_gate_up, w_gate_up], s.y);
        self.matmul(b, "experts_gate_up_dw", Pass::Dw, [wide, h], &[s.d_gate_up, keep.x, g_gate_up], g_gate_up);
        let from = (s.y, Some(s.d_weighs));
        self.to_tokens(b, s, ["bwd_", "combine_bwd"], from, (d_sum, s.d_gates), beside_combine);
        if let (Some([down, _]), Some([d_down, _])) = (w.squeezed, g.squeezed) {
            b.compute("squeeze_dx", linear_dx(self.tokens, self.whole, h, self.fp8), &[d_sum, down], &[dx]);
            let product = linear_dw(h, self.whole, self.tokens, self.fp8);
            b.compute("squeeze_dw", product, &[d_sum, x, d_down], &[d_down]);
        }
        self.kernel(b, "router_bwd", self.router()[1], &[keep.logits, s.d_gates], &[s.d_logits]);
        let product = linear_dw(self.experts, self.whole, self.tokens, false);
        b.compute("router_dw", product, &[s.d_logits, x, g.router], &[g.router]);
        let adds = match linear_dx(self.tokens, self.whole, self.experts, false) {
            Kernel::MatMul { m, n, k, a_t, b_t, fp8, bias, .. } => {
                Kernel::MatMul { m, n, k, a_t, b_t, accumulate: true, fp8, bias }
            }
            other => other,
        };
        b.compute("router_dx", adds, &[s.d_logits, w.router, dx], &[dx]);
    }
}
