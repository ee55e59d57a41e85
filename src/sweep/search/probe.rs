//! What a way takes at least, before its plan is built: of a plan without a pipeline, which many ways share.
//!
//! The probe of a way has the same degrees but for the pipeline, one microbatch a replica and then two. The difference
//! is what a microbatch takes: its kernels, and what they wait for between them. A layer has its share of that, and the units
//! of a way's pipeline come in their order, as long as their layers are ([`Shortest`]). Gradients, the optimizer and what
//! stages send each other only add to it, so that no way is faster than its bound. The search counts whether any was.
//!
//! Of memory a stage has a p-th of weights and gradients, all of the sharded optimizer state that the probe has (a p-th,
//! shared by a p-th of the ranks), and activations of the microbatches that are under way.

use crate::error::{Error, Result};
use crate::plan::kernel::Family;
use crate::plan::{Axis, TensorKind};
use crate::spec::{Depth, Fold, LlmSpec, Options, Parallelism, Recompute, Schedule};
use crate::strategy::pipeline::{Pipeline, Shortest, UnitTimes};
use crate::sweep::{Case, Point};
use crate::timeline::Usage;

/// A microbatch of a whole model, and the memory of the rank that has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probe {
    times: Times,
    /// Products of the output matrix at the GPU's peak, s: they take no less.
    head: f64,
    /// Bytes: all that the probe needs, and what of that is of a kind.
    bytes: f64,
    params: f64,
    grads: f64,
    state: f64,
    activations: f64,
}

/// Times of the probe, in s; those below the first are of one microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Times {
    /// Step with one microbatch.
    one: f64,
    /// What the second adds.
    more: f64,
    /// Busy time of kernels, by themselves, and what of it attention has, forward and backward.
    kernels: f64,
    attention: [f64; 2],
    /// What kernels take longer beside messages that occupy SMs.
    lost: f64,
    /// Waiting for ranks that share layers or the sequence.
    waits: f64,
    /// Waiting for rows of experts.
    rows: f64,
}

/// A model of as few turns of its layers as tell what a turn takes, twice.
pub struct Short {
    few: Case,
    more: Case,
    /// Turns of the whole model beyond the few, by those that `more` has beyond them.
    times: f64,
}

/// What the order of a pipeline's units hangs on, which many ways share: degrees, microbatches, words, and whether layers are
/// computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    pp: u32,
    vp: u32,
    microbatches: u32,
    words: Options,
    recompute: Recompute,
}

impl Shape {
    /// None where there is no pipeline.
    pub fn of(point: &Point) -> Option<Shape> {
        let Parallelism { pp, vp, recompute, options, .. } = point.par;
        let Options { fold, zb_h1, uneven, short_ends, first_stage, last_stage, stages, overlap_exchange, .. } =
            options;
        let plain = Options::default();
        let words =
            Options { fold, zb_h1, uneven, short_ends, first_stage, last_stage, stages, overlap_exchange, ..plain };
        let microbatches = microbatches(point) as u32;
        (pp > 1).then_some(Shape { pp, vp, microbatches, words, recompute })
    }

    /// None where the model does not come in such stages.
    pub fn shortest(&self, model: &LlmSpec) -> Option<Shortest> {
        let Shape { pp, vp, microbatches, words: options, recompute } = *self;
        let par = Parallelism { pp, vp, recompute, options, ..Parallelism::default() };
        Pipeline::new(model, &par, microbatches).ok().map(Shortest::of)
    }
}

/// Microbatches of a replica.
fn microbatches(point: &Point) -> u64 {
    point.global_batch / (u64::from(point.par.dp) * point.micro_batch).max(1)
}

/// Layers that a short model has at least behind those that are none of a turn.
const FEW_LAYERS: u64 = 1;

/// What of a microbatch's activations the fullest stage keeps for certain.
const KEPT: f64 = 0.9;
/// What more microbatches may save of a plan's memory: nothing but gaps between buffers.
const KEPT_WHOLE: f64 = 0.98;
/// What is sure of a sum of times that another plan has: kernels of other plans may be cut differently.
const SURE: f64 = 0.98;
/// What is sure of the SMs that messages take from kernels: those of other plans meet others.
const LOST: f64 = 0.9;
/// Output matrix, loss and embedding take no longer than so many times the output matrix at the GPU's peak.
const HEAD: f64 = 3.0;

impl Times {
    fn of(case: &Case, point: &Point) -> Result<Times> {
        let of = |batches| case.plan(&Probe::of(point, batches)).and_then(|plan| case.cost(&plan));
        let both = [of(1)?, of(2)?];
        let [one, two] = [0, 1].map(|i: usize| both[i].mean());
        let kernels = |usage: &Usage| usage.by_kernel.values().sum::<f64>();
        let waits = |usage: &Usage, axes: &[Axis]| axes.iter().filter_map(|axis| usage.exposed.get(axis)).sum::<f64>();
        let more = |of: &dyn Fn(&Usage) -> f64| (of(&two) - of(&one)).max(0.0);
        Ok(Times {
            one: both[0].step.value(),
            more: both[1].step.value() - both[0].step.value(),
            kernels: more(&kernels),
            attention: [Family::Attention, Family::AttentionBwd].map(|family| {
                let of = |kernel: &str| Family::of(kernel) == family;
                more(&|usage| usage.by_kernel.iter().filter(|(kernel, _)| of(kernel)).map(|(_, s)| s).sum())
            }),
            lost: more(&|usage| usage.compute - kernels(usage)),
            waits: more(&|usage| waits(usage, &[Axis::Tp, Axis::Up, Axis::Cp])),
            rows: more(&|usage| waits(usage, &[Axis::Ep])),
        })
    }
}

impl Short {
    /// None where the model is not much deeper.
    pub fn of(case: &Case) -> Option<Short> {
        let depth = Depth::of(&case.model);
        let few = FEW_LAYERS.div_ceil(depth.turn);
        if 3 * depth.layers(2 * few) > 2 * case.model.layers {
            return None;
        }
        let of = |turns| case.with_model(case.model.shortened(depth.layers(turns)));
        Some(Short { few: of(few), more: of(2 * few), times: (depth.turns - few) as f64 / few as f64 })
    }

    fn times(&self, point: &Point) -> Result<Times> {
        let (few, more) = (Times::of(&self.few, point)?, Times::of(&self.more, point)?);
        let of = |of: fn(&Times) -> f64| of(&few) + self.times * (of(&more) - of(&few)).max(0.0);
        Ok(Times {
            one: of(|t| t.one),
            more: of(|t| t.more),
            kernels: of(|t| t.kernels),
            attention: [of(|t| t.attention[0]), of(|t| t.attention[1])],
            lost: of(|t| t.lost),
            waits: of(|t| t.waits),
            rows: of(|t| t.rows),
        })
    }
}

/// Bytes of the probe with two microbatches: all, weights, gradients, optimizer state and activations.
fn held_by_kind(case: &Case, point: &Point) -> Result<[f64; 5]> {
    let layout = case.layout(&case.plan(&Probe::of(point, 2))?)?;
    let of = |wanted: TensorKind| {
        let found = layout.live_by_kind.iter().filter(|(kind, _)| *kind == wanted);
        found.map(|(_, bytes)| *bytes as f64).sum()
    };
    let [params, grads, state, activations] =
        [TensorKind::Param, TensorKind::Grad, TensorKind::OptState, TensorKind::Activation].map(of);
    Ok([layout.bytes as f64, params, grads, state, activations])
}

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
            stages: Default::default(),
            no_overlap_p2p: false,
            scatter_p2p: false,
            overlap_exchange: false,
            ..par.options
        };
        let dp = par.dp * par.pp;
        let par = Parallelism { dp, pp: 1, vp: 1, zero: par.zero.min(1), options, ..par };
        Point { global_batch: u64::from(dp) * point.micro_batch * batches, par, ..*point }
    }

    /// None where the probe has no plan. `short`: the case's model with few layers, where it is deep.
    pub fn new(case: &Case, short: Option<&Short>, point: &Point) -> Result<Option<Probe>> {
        let both = || -> Result<(Times, [f64; 5])> {
            let times = match short {
                Some(short) => short.times(point)?,
                None => Times::of(case, point)?,
            };
            Ok((times, held_by_kind(case, point)?))
        };
        let (times, [bytes, params, grads, state, activations]) = match both() {
            Ok(found) => found,
            Err(Error::Infeasible(_)) => return Ok(None),
            Err(other) => return Err(other),
        };
        let tokens =
            (point.micro_batch * point.seq_len) as f64 / (f64::from(point.par.ring) * f64::from(point.par.ulysses));
        let head = 6.0 * tokens * (case.model.vocab * case.model.hidden) as f64 / f64::from(point.par.tp);
        let head = head / case.peak().value();
        Ok(Some(Probe { times, head, bytes, params, grads, state, activations }))
    }

    /// The step that the way takes at least, in s. `shortest`: of its [`Shape`].
    pub fn seconds(&self, model: &LlmSpec, point: &Point, shortest: Option<&Shortest>) -> f64 {
        let (par, microbatches) = (&point.par, microbatches(point) as f64);
        let Times { one, more, kernels, lost, waits, rows, .. } = self.times;
        // The plan is the probe's, with more microbatches.
        if par.pp == 1 && par.zero < 2 && !par.options.overlap_exchange {
            return SURE * (one + (microbatches - 1.0) * more);
        }
        // Rows of one microbatch travel beside the compute of another.
        let rows = if par.options.overlap_exchange { 0.0 } else { rows };
        let whole = kernels + LOST * lost + waits + rows;
        if par.pp == 1 {
            return SURE * microbatches * whole;
        }
        let staged = shortest.map_or(0.0, |shortest| shortest.seconds(&self.units(whole, model, par)));
        SURE * staged.max(microbatches * whole / f64::from(par.pp))
    }

    /// What units of a pipeline take at least, of a microbatch that takes so long as a `whole`.
    fn units(&self, whole: f64, model: &LlmSpec, par: &Parallelism) -> UnitTimes {
        let Times { kernels, attention: [ahead, back], .. } = self.times;
        let modules = model.mtp.as_ref().map_or(0, |mtp| mtp.depth);
        let layer = (whole - HEAD * self.head).max(0.0) / (model.layers + modules) as f64;
        let again = par.recompute != Recompute::None || !par.options.made_again().is_empty();
        // Attention goes forward twice unless it is kept; of the rest a forward pass is a third, or a fourth if it comes again.
        let kept = par.recompute == Recompute::None || par.options.keep_attention;
        let rest = (kernels - ahead - back).max(0.0);
        let (first, rest_forward) = (if kept { ahead } else { ahead / 2.0 }, rest / if again { 4.0 } else { 3.0 });
        let of_kernels = |s: f64| layer * s / kernels.max(f64::MIN_POSITIVE);
        let forward = of_kernels(first + rest_forward);
        UnitTimes {
            forward,
            backward: layer - forward,
            // As much as a forward pass: attention has no weights.
            weights: of_kernels(rest_forward),
            again: if again { forward } else { 0.0 },
            head: [self.head / 3.0, self.head * 2.0 / 3.0],
        }
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
        let microbatches = microbatches(point) as f64;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Dispatch;

    type Part = fn(&Times) -> f64;

    /// Of a dense model, of a mixture whose first layer is dense, and of one with a window in every second layer.
    #[test]
    fn a_few_layers_tell_what_all_of_them_take() {
        for (model, ep) in [("llama-3-8b", 1), ("deepseek-v2-lite", 4), ("gpt-oss-20b", 4)] {
            let case = Case::new(LlmSpec::find(model).unwrap(), "dgx-h100", "nccl-fa3", 16, None).unwrap();
            let short = Short::of(&case).expect("a deep model");
            assert!(short.more.model.layers < case.model.layers / 3);
            for (ulysses, ring) in [(1, 1), (2, 2), (1, 8)] {
                let options = Options { dispatch: Dispatch::DeepepNormal, ..Options::default() };
                let options = if ep > 1 { options } else { Options::default() };
                let dp = 16 / (ulysses * ring);
                let par = Parallelism { dp, ulysses, ring, ep, zero: 1, options, ..Parallelism::default() };
                let point = Point { seq_len: 16_384, global_batch: u64::from(dp), micro_batch: 1, par };
                let (few, all) = (short.times(&point).unwrap(), Times::of(&case, &point).unwrap());
                // What a step waits for at its end, as gradients, is hidden less where there are more layers.
                let of: [(&str, f64, Part); 4] = [
                    ("kernels", 0.99, |t| t.kernels),
                    ("a microbatch more", 0.97, |t| t.more),
                    ("kernels and what they wait for", 0.97, |t| t.kernels + t.lost + t.waits),
                    ("a step", 0.85, |t| t.one),
                ];
                for (what, least, of) in of {
                    let over = of(&few) / of(&all);
                    assert!((least..SURE.recip()).contains(&over), "{model} {ulysses} x {ring}: {what}: {over}");
                }
            }
        }
    }
}
