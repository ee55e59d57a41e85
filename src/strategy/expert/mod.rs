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
//! Experts that are hot (`shadow`) are computed by every rank for its own tokens.
//!
//! Legend: r tokens of this rank, k choices of each, E experts, h columns of a row, f width of an expert; C copies that leave, U
//! rows that land, P rows that the rank's experts compute.

mod buffers;
mod choose;
mod copies;
mod shadow;
mod way;

pub use buffers::{Saved, Scratch};
pub use choose::{Routing, node_of, tokens};

use super::step::Engines;
use super::transformer::{linear, linear_dw, linear_dx};
use super::weights::{Rows, Weight, Weights};
use crate::plan::expert::{ExpertKernel, ExpertOp, Pass, Values};
use crate::plan::{Axis, Buf, Builder, Dtype, Engine, ExchangeAlgo, Kernel, Layout, Phase, Route};
use crate::spec::{Dispatch, Fold, Gate, LlmSpec, Mlp, Options, Parallelism};
use copies::Sums;
use shadow::Shadow;

/// The part that a rank has of a layer's experts, and how its rows reach the others.
pub struct Experts {
    /// Number of the first route that ops name.
    pub route: u32,
    ranks: u32,
    algo: ExchangeAlgo,
    engine: Engine,
    /// Engine of NCCL's kernels, for sums of gradients.
    sums_engine: Engine,
    fp8_rows: bool,
    fp8: bool,
    tokens: u64,
    /// Tokens of a sequence, where masks over them pick its rows; else 0.
    span: u64,
    /// Rows that buffers have room for, of copies that leave and of rows that land.
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
    /// Dtype of the gradients of weights.
    grads: Dtype,
    pub(in crate::strategy) weights: Weights,
    gate_up: Rows,
    down: Rows,
    sums: Option<Sums>,
    shadow: Option<Shadow>,
    /// Whether the experts, being the second half of a layer, keep their input alone and run again in the backward
    /// pass.
    pub again: bool,
    /// Whether the activation's output is made again for the backward pass.
    act_again: bool,
    /// Whether the codes are kept of rows that travel in FP8.
    keeps_codes: bool,
    /// Whether the activation's input is kept in FP8.
    rounds_gate_up: bool,
    /// Whether the pipeline makes gradients of weights apart from those of inputs.
    is_halved: bool,
}

/// The buffers of the router's weight, which every rank has, and of the experts' weights; or of their gradients.
#[derive(Clone, Copy)]
pub struct Parts {
    pub router: Buf,
    /// Projections to the columns that experts work on, and back; `None` if these are the hidden states'.
    pub squeezed: Option<[Buf; 2]>,
    pub experts: Buf,
}

/// Writers of compute that may stand beside a dispatch, and beside a combine.
pub type Beside<'a> = [&'a mut dyn FnMut(&mut Builder); 2];

/// The orders of rows before and behind a kernel that moves them, and whether they move in the backward pass.
#[derive(Clone, Copy)]
struct Ends {
    from: Layout,
    to: Layout,
    backward: bool,
}

/// SMs of DeepEP's V1 kernels where nobody says: the default of its buffers (github:deepseek-ai/DeepEP, `Buffer.num_sms`).
pub const DEEPEP_SMS: u16 = 20;
/// SMs of Hybrid-EP, as in the performance recipes of Megatron-Bridge.
pub const HYBRID_EP_SMS: u16 = 32;

/// The algorithm that the option `dispatch` means.
fn algo(options: &Options, tokens: u64) -> ExchangeAlgo {
    match options.dispatch {
        Dispatch::Nccl => ExchangeAlgo::Nccl,
        Dispatch::AllGather => ExchangeAlgo::AllGather,
        Dispatch::DeepepNormal => ExchangeAlgo::DeepepNormal { sms: DEEPEP_SMS },
        Dispatch::DeepepLowLatency => {
            ExchangeAlgo::DeepepLowLatency { hook: options.deepep_hook, slots: tokens as u32 }
        }
        Dispatch::DeepepV2 => ExchangeAlgo::DeepepV2Hybrid { sms: None },
        Dispatch::DeepepV2Direct => ExchangeAlgo::DeepepV2Direct { sms: None },
        Dispatch::HybridEp => ExchangeAlgo::HybridEp { sms: HYBRID_EP_SMS },
        Dispatch::Hierarchical => ExchangeAlgo::Hierarchical,
    }
}

/// The engine that carries the rows: a library's own kernels, or NCCL's.
fn engine(algo: ExchangeAlgo, engines: Engines) -> Engine {
    match algo {
        ExchangeAlgo::DeepepNormal { sms } | ExchangeAlgo::HybridEp { sms } => Engine::Sm { ctas: sms },
        // Their number is for whoever knows the machine to say; 0 leaves it open.
        ExchangeAlgo::DeepepV2Hybrid { sms } | ExchangeAlgo::DeepepV2Direct { sms } => {
            Engine::Sm { ctas: sms.unwrap_or(0) }
        }
        _ => engines.collective,
    }
}

/// The routes of tokens, apart from the one that stands behind them: that of gradients of experts that several slots
/// hold, or of weights of shadowed ones.
fn apart(routes: &[Route]) -> (&[Route], Option<Sums>, Option<Shadow>) {
    match routes {
        [tokens, way] if tokens.shadows > 0 => {
            let shadow = Shadow { route: 1, slots: u64::from(tokens.shadows), owned: way.most_tokens() };
            (&routes[..1], None, Some(shadow))
        }
        [tokens, sums] if !tokens.holds.is_empty() => {
            let [slots, copies] = [Layout::Tokens, Layout::Copies].map(|layout| layout.capacity(sums));
            (&routes[..1], Some(Sums { route: 1, slots, copies }), None)
        }
        _ => (routes, None, None),
    }
}

impl Experts {
    /// The experts of a layer, for as many tokens of so many sequences; `None` for a model without experts.
    pub fn new(
        model: &LlmSpec,
        par: &Parallelism,
        engines: Engines,
        routes: &[Route],
        [dtype, acc, grads]: [Dtype; 3],
        [tokens, sequences]: [u64; 2],
    ) -> Option<Experts> {
        let (moe, route) = (model.moe?, routes.first()?);
        let (routes, sums, shadow) = apart(routes);
        let most = |layout: Layout| routes.iter().map(|route| layout.capacity(route)).max().unwrap_or(0);
        let (h, f, slots) = (moe.width(model.hidden), moe.ffn, u64::from(route.own_slots()));
        let (up, wide) = match model.mlp {
            Mlp::SwiGlu => ("mlp.experts.gate_up_proj.weight", 2 * f),
            Mlp::Gelu | Mlp::Relu2 => ("mlp.experts.up_proj.weight", f),
        };
        let mut weights = Weights::over(Axis::Ep, u64::from(route.ranks));
        let wide = moe.experts * wide;
        let mut part = |name, shape: [u64; 2], each| {
            let rows = match route.holds.is_empty() {
                true => weights.cut(name, &shape, 0, &[shape[0]]),
                false => weights.held(name, &shape, &route.owned()),
            };
            weights.each_of(each);
            rows
        };
        let gate_up = part(up, [wide, h], f);
        let down = part("mlp.experts.down_proj.weight", [moe.experts * h, f], h);
        let algo = algo(&par.options, tokens);
        let again = par.options.recompute_moe && model.pattern.is_empty();
        Some(Experts {
            route: 0,
            ranks: route.ranks,
            algo,
            engine: engine(algo, engines),
            sums_engine: engines.collective,
            fp8_rows: par.options.dispatch_fp8 && route.ranks > 1,
            fp8: par.options.fp8,
            tokens,
            span: if par.options.mask_rows { tokens / sequences.max(1) } else { 0 },
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
            grads,
            weights,
            gate_up,
            down,
            sums,
            shadow,
            again,
            // With `again` all of it is made again anyway.
            act_again: par.options.recompute_act && !again,
            keeps_codes: par.options.keep_fp8_rows && route.ranks > 1 && !again,
            rounds_gate_up: par.options.keep_fp8_gate_up && !again,
            is_halved: par.options.zb_h1 || par.options.fold != Fold::None,
        })
    }

    /// Elements of a layer's experts on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    /// Rows of the order in which they leave their source.
    fn leaving(&self) -> u64 {
        if self.algo.source() == Layout::Tokens { self.tokens } else { self.copies }
    }

    /// Columns before the activation: gate and up, or one of them.
    fn wide(&self) -> u64 {
        if self.mlp == Mlp::SwiGlu { 2 * self.ffn } else { self.ffn }
    }

    /// Whether rows are projected to fewer columns before they travel.
    fn squeezes(&self) -> bool {
        self.hidden != self.whole
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

    fn put(&self, b: &mut Builder, label: &str, ends: Ends, values: Values, reads: &[Buf], y: Buf) {
        let Ends { from, to, backward } = ends;
        let rows = [self.capacity(from), self.capacity(to)];
        self.kernel(b, label, ExpertOp::Rows { from, to, rows, values, backward }, reads, &[y]);
    }

    /// Puts rows of tokens at their choices, or adds up those of choices for their tokens.
    fn pick(&self, b: &mut Builder, label: &str, ends: Ends, phase: Phase, x: Buf, y: Buf) {
        let cols = self.hidden;
        if self.span == 0 {
            return self.put(b, label, ends, Values::Row { cols }, &[x], y);
        }
        let Ends { from, to, backward } = ends;
        // Masks that weigh the sum of a token's rows have a gradient, too.
        let products = if phase == Phase::CachedDispatch { 2 } else { 1 };
        let rows = [self.capacity(from), self.capacity(to)];
        let op = ExpertOp::Masked { from, to, rows, cols, span: self.span, products, backward };
        self.kernel(b, label, op, &[x], &[y]);
    }

    fn matmul(&self, b: &mut Builder, label: &str, pass: Pass, [n, k]: [u64; 2], reads: &[Buf], y: Buf) {
        let (rows, slots, fp8) = (self.rows, self.slots, self.fp8);
        self.kernel(b, label, ExpertOp::MatMul { pass, rows, slots, first: 0, n, k, fp8 }, reads, &[y]);
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

    /// The name of the activation in labels.
    fn act(&self) -> &'static str {
        if self.mlp == Mlp::Relu2 { "experts_relu2" } else { "experts_swiglu" }
    }

    /// Elements of one slot of a weight.
    fn of_slot(&self, rows: Rows) -> u64 {
        (rows[1] - rows[0]) / self.slots
    }

    /// out = the weighted sum of the outputs of each token's experts.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Parts, [x, out]: [Buf; 2], keep: &Saved, beside: Beside) {
        let (h, f, wide) = (self.hidden, self.ffn, self.wide());
        let [beside_dispatch, beside_combine] = beside;
        self.lend(b, s, w.experts, keep);
        b.compute("router", linear(self.tokens, self.experts, self.whole, false), &[x, w.router], &[keep.logits]);
        self.kernel(b, "router_gates", self.router()[0], &[keep.logits], &[s.gates]);
        let (mut rows, mut sum) = (x, out);
        if let (Some([down, _]), Some([squeezed, _]), Some(kept)) = (w.squeezed, s.squeezed, keep.sum) {
            b.compute("squeeze", linear(self.tokens, h, self.whole, self.fp8), &[x, down], &[squeezed]);
            (rows, sum) = (squeezed, kept);
        }
        let (to, landed) = ((keep.x(), keep.weighs), keep.codes.or(s.landed_codes));
        let from = (rows, Some(s.gates));
        self.to_experts(b, s, Phase::Dispatch, from, (to, landed), beside_dispatch);
        let [gate_up, down] = [self.gate_up, self.down].map(|rows| w.experts.at(rows));
        self.matmul(b, "experts_gate_up", Pass::Forward, [wide, h], &[keep.x(), gate_up], keep.gate_up());
        self.shadow_matmul(b, Pass::Forward, 0, keep, [keep.x(), keep.gate_up()]);
        self.kernel(b, self.act(), self.activation()[0], &[keep.gate_up(), keep.weighs], &[keep.act()]);
        if let Some(codes) = keep.gate_up_codes {
            let op = ExpertOp::Quantise { layout: Layout::Experts, rows: self.rows, cols: wide, backward: false };
            self.kernel(b, "gate_up_quantise", op, &[keep.gate_up()], &codes);
        }
        self.matmul(b, "experts_down", Pass::Forward, [h, f], &[keep.act(), down], s.y);
        self.shadow_matmul(b, Pass::Forward, 1, keep, [keep.act(), s.y]);
        self.to_tokens(b, s, false, (s.y, None), (sum, s.d_gates), beside_combine);
        if let Some([_, up]) = w.squeezed {
            b.compute("unsqueeze", linear(self.tokens, self.whole, h, self.fp8), &[sum, up], &[out]);
        }
    }

    /// Makes the activation's input again, where codes of it are kept.
    fn gate_up_again(&self, b: &mut Builder, label: &str, keep: &Saved) {
        if let Some(codes) = keep.gate_up_codes {
            let values = Values::Scaled { cols: self.wide() };
            let ends = Ends { from: Layout::Experts, to: Layout::Experts, backward: true };
            self.put(b, label, ends, values, &codes, keep.gate_up());
        }
    }

    /// dx from the gradient of the output; adds the gradients of the weights to `g`.
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
        let to = ((s.y, s.d_weighs), s.landed_codes);
        self.to_experts(b, s, Phase::CachedDispatch, (d_rows, None), to, beside_dispatch);
        let [w_gate_up, w_down] = [self.gate_up, self.down].map(|rows| w.experts.at(rows));
        let [g_gate_up, g_down] = [self.gate_up, self.down].map(|rows| g.experts.at(rows));
        self.matmul(b, "experts_down_dx", Pass::Dx, [h, f], &[s.y, w_down], s.d_act);
        self.shadow_matmul(b, Pass::Dx, 1, keep, [s.y, s.d_act]);
        self.gate_up_again(b, "gate_up_again", keep);
        if self.act_again {
            let again = format!("{}_again", self.act());
            self.kernel(b, &again, self.activation()[0], &[keep.gate_up(), keep.weighs], &[keep.act()]);
        }
        self.shadow_dw(b, s, 1, [s.y, keep.act()]);
        self.matmul(b, "experts_down_dw", Pass::Dw, [h, f], &[s.y, keep.act(), g_down], g_down);
        let act = format!("{}_bwd", self.act());
        let reads = [keep.gate_up(), keep.weighs, s.d_act];
        if self.act_again && self.is_halved {
            // Each half of the pass makes its own, so that the codes wait for the second half rather than the numbers.
            self.gate_up_again(b, "gate_up_once_more", keep);
        }
        self.kernel(b, &act, self.activation()[1], &reads, &[s.d_gate_up, s.d_weighs]);
        if let Some(codes) = keep.codes {
            let ends = Ends { from: self.algo.landed(), to: Layout::Experts, backward: true };
            let values = Values::Scaled { cols: h };
            self.put(b, "expand_again", ends, values, &codes, keep.x());
        }
        self.shadow_dw(b, s, 0, [s.d_gate_up, keep.x()]);
        self.matmul(b, "experts_gate_up_dx", Pass::Dx, [wide, h], &[s.d_gate_up, w_gate_up], s.y);
        self.shadow_matmul(b, Pass::Dx, 0, keep, [s.d_gate_up, s.y]);
        self.matmul(b, "experts_gate_up_dw", Pass::Dw, [wide, h], &[s.d_gate_up, keep.x(), g_gate_up], g_gate_up);
        let from = (s.y, Some(s.d_weighs));
        self.to_tokens(b, s, true, from, (d_sum, s.d_gates), beside_combine);
        self.take_home(b, s, g.experts);
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
