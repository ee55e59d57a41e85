//! What a way takes at least, before its plan is built: of a plan without a pipeline, which many ways share.
//!
//! The probe of a way has the same degrees but for the pipeline, one microbatch a replica and then two. The difference
//! is what a microbatch takes: its kernels, and what they wait for between them. A stage of a pipeline has its share of
//! that, `m` microbatches go through it, and 1F1B and interleaving leave a bubble of (p - 1) / v microbatches of a stage
//! (Narayanan et al., arXiv:2104.04473, section 2.2). Stages that are not alike only add to it, as do gradients, the
//! optimizer and what stages send each other, so that no way is faster than its bound. The search counts whether any was.
//!
//! Of memory a stage has a p-th of weights and gradients, all of the sharded optimizer state that the probe has (a p-th,
//! shared by a p-th of the ranks), and activations of the microbatches that are under way.

use crate::error::{Error, Result};
use crate::plan::{Axis, TensorKind};
use crate::spec::{Fold, LlmSpec, Options, Parallelism, Recompute, Schedule};
use crate::sweep::{Case, Point};
use crate::timeline::{Timeline, Usage};

/// A microbatch of a whole model, and the memory of the rank that has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probe {
    /// Steps with one microbatch and with two, s.
    steps: [f64; 2],
    /// Products of the output matrix at the GPU's peak, s: they take no less.
    head: f64,
    /// Busy time of kernels, by themselves, s.
    kernels: f64,
    /// Waiting for ranks that share layers or the sequence, s.
    waits: f64,
    /// Waiting for rows of experts, s.
    rows: f64,
    /// Bytes: all that the probe needs, and what of that is of a kind.
    bytes: f64,
    params: f64,
    grads: f64,
    state: f64,
    activations: f64,
}

/// What of a microbatch's activations the fullest stage keeps for certain.
const KEPT: f64 = 0.9;
/// What more microbatches may save of a plan's memory: nothing but gaps between buffers.
const KEPT_WHOLE: f64 = 0.98;
/// What is sure of a sum of times that another plan has: kernels of other plans may be cut differently.
const SURE: f64 = 0.98;
/// Output matrix, loss and embedding take no longer than so many times the output matrix at the GPU's peak.
const HEAD: f64 = 3.0;
/// What of a microbatch's time a forward pass takes at least, with everything computed again.
const FORWARD: f64 = 0.24;
/// What of a bubble is left where a stage computes again while it waits: that is a quarter of its time.
const NOT_AGAIN: f64 = 0.7;
/// The bubble of DualPipeV in microbatches of a stage: (p - 1) (F + 2 B - 3 W) of a chunk, which is half a stage, and W,
/// the gradients of weights, no more than half of B (DeepSeek-AI, github.com/deepseek-ai/DualPipe, README). 1 / 3, less
/// what kernels differ.
const DUALPIPE: f64 = 0.3;

/// Bytes of weights and gradients that a rank holds at least, by their number: what needs no plan.
pub fn held(case: &Case, point: &Point) -> f64 {
    let (model, par) = (&case.model, &point.par);
    if par.zero > 1 {
        return 0.0;
    }
    let experts = model
        .moe
        .map_or(0.0, |moe| model.chosen_flops_per_token() / 6.0 * moe.experts as f64 / moe.top_k.max(1) as f64);
    let rest = (model.params() as f64 - experts).max(0.0);
    let size = case.dtype.size() as f64;
    let each = size + if par.options.bf16_grads { size } else { size.max(4.0) };
    (experts / f64::from(par.ep) + rest / f64::from(par.tp)) / f64::from(par.pp) * each
}

impl Probe {
    /// The way whose plan the probe of another looks at, with `batches` microbatches. Ways that share it share the probe.
    pub fn of(point: &Point, batches: u64) -> Point {
        let par = point.par;
        let options = Options {
            fold: Fold::None,
            zb_h1: false,
            short_ends: false,
            uneven: false,
            first_stage: None,
            last_stage: None,
            no_overlap_p2p: false,
            scatter_p2p: false,
            overlap_exchange: false,
            ..par.options
        };
        let dp = par.dp * par.pp;
        let par = Parallelism { dp, pp: 1, vp: 1, zero: par.zero.min(1), options, ..par };
        Point { global_batch: u64::from(dp) * point.micro_batch * batches, par, ..*point }
    }

    /// None where the probe has no plan.
    pub fn new(case: &Case, point: &Point) -> Result<Option<Probe>> {
        let usage = |batches| -> Result<(Timeline, [f64; 5])> {
            let plan = case.plan(&Probe::of(point, batches))?;
            let layout = if batches > 1 { Some(case.layout(&plan)?) } else { None };
            let bytes = |wanted: TensorKind| {
                let all = layout.iter().flat_map(|layout| &layout.live_by_kind);
                all.filter(|(kind, _)| *kind == wanted).map(|(_, bytes)| *bytes as f64).sum()
            };
            let [params, grads, state, activations] =
                [TensorKind::Param, TensorKind::Grad, TensorKind::OptState, TensorKind::Activation].map(bytes);
            let all = layout.as_ref().map_or(0.0, |layout| layout.bytes as f64);
            Ok((case.cost(&plan)?, [all, params, grads, state, activations]))
        };
        let both = || Ok((usage(1)?, usage(2)?));
        let ((one, _), (two, [bytes, params, grads, state, activations])) = match both() {
            Ok(found) => found,
            Err(Error::Infeasible(_)) => return Ok(None),
            Err(other) => return Err(other),
        };
        let steps = [&one, &two].map(|timeline| timeline.step.value());
        let (one, two) = (one.mean(), two.mean());
        let tokens =
            (point.micro_batch * point.seq_len) as f64 / (f64::from(point.par.ring) * f64::from(point.par.ulysses));
        let head = 6.0 * tokens * (case.model.vocab * case.model.hidden) as f64 / f64::from(point.par.tp);
        let kernels = |usage: &Usage| usage.by_kernel.values().sum::<f64>();
        let waits = |usage: &Usage, axes: &[Axis]| axes.iter().filter_map(|axis| usage.exposed.get(axis)).sum::<f64>();
        let more = |of: &dyn Fn(&Usage) -> f64| (of(&two) - of(&one)).max(0.0);
        Ok(Some(Probe {
            steps,
            head: head / case.peak().value(),
            kernels: more(&kernels),
            waits: more(&|usage| waits(usage, &[Axis::Tp, Axis::Up, Axis::Cp])),
            rows: more(&|usage| waits(usage, &[Axis::Ep, Axis::Etp])),
            bytes,
            params,
            grads,
            state,
            activations,
        }))
    }

    /// The step that the way takes at least, in s.
    pub fn seconds(&self, model: &LlmSpec, point: &Point) -> f64 {
        let par = &point.par;
        let microbatches = (point.global_batch / (u64::from(par.dp) * point.micro_batch).max(1)) as f64;
        let [one, two] = self.steps;
        // The plan is the probe's, with more microbatches.
        if par.pp == 1 && par.zero < 2 && !par.options.overlap_exchange {
            return SURE * (one + (microbatches - 1.0) * (two - one));
        }
        // Folded pipelines and pairs of microbatches have others' compute beside the rows.
        let rows = if par.options.overlap_exchange || par.options.fold != Fold::None { 0.0 } else { self.rows };
        let whole = self.kernels + self.waits + rows;
        if par.pp == 1 {
            return SURE * microbatches * whole;
        }
        let (pp, vp) = (f64::from(par.pp), f64::from(par.vp));
        let layers = (whole - HEAD * self.head).max(0.0) / model.layers as f64;
        let parts = u64::from(par.pp) * u64::from(par.vp);
        // Of a stage with as few layers as any, and of the one that has the output matrix besides.
        let [least, last] = match par.options.first_stage.or(par.options.last_stage).is_some() || par.options.short_ends
        {
            true => [0.0, 0.0],
            false => [layers * (model.layers / parts) as f64 * vp; 2],
        };
        let last = last + self.head;
        let waits = if par.recompute == Recompute::Full { NOT_AGAIN } else { 1.0 };
        let bubble = waits
            * match Schedule::of(par) {
                Some(Schedule::OneF1B | Schedule::Interleaved) => (pp - 1.0) / vp,
                // The stage where all others have been before begins behind their forward passes.
                Some(Schedule::ZbH1) => FORWARD * (pp - 1.0),
                Some(Schedule::DualpipeV) => DUALPIPE * (pp - 1.0),
                _ => FORWARD * (pp - 1.0) / 2.0,
            };
        let fullest = match par.options.fold {
            Fold::None => microbatches * last + bubble * least,
            _ => (microbatches * last).max((microbatches + bubble) * least),
        };
        SURE * fullest.max(microbatches * whole / pp)
    }

    /// Bytes that a rank of the way needs at least.
    pub fn bytes(&self, point: &Point) -> f64 {
        let par = &point.par;
        if par.pp == 1 && par.zero < 2 && !par.options.overlap_exchange {
            return KEPT_WHOLE * self.bytes;
        }
        let pp = f64::from(par.pp);
        let [params, grads] = match par.zero {
            0 | 1 => [self.params, self.grads],
            2 => [self.params, 0.0],
            _ => [0.0, 0.0],
        };
        let microbatches = point.global_batch as f64 / (f64::from(par.dp) * point.micro_batch as f64);
        let under_way = match Schedule::of(par) {
            None => 1.0,
            Some(Schedule::Interleaved) => (1.0 + (pp - 1.0) / (pp * f64::from(par.vp))).min(microbatches / pp),
            Some(Schedule::VHalf) => (0.5f64).min(microbatches / pp),
            Some(Schedule::VMin) => (1.0f64 / 3.0).min(microbatches / pp),
            Some(_) => (1.0f64).min(microbatches / pp),
        };
        // An optimizer in the host's memory takes none here.
        let state = if par.options.offload_optimizer { 0.0 } else { self.state };
        (params + grads) / pp + state + KEPT * self.activations * under_way
    }
}
