//! What a run found, step by step, and what the plan says about it.

use super::kept::Told;
use super::machine::{self, On};
use crate::collective::count::sent_by;
use crate::error::{Error, Result};
use crate::exec::source::Source;
use crate::exec::{Options, Run, reference, routing};
use crate::plan::link::{AtomTable, Line};
use crate::plan::memory::Layout;
use crate::plan::{Dtype, OpKind, Plan};
use crate::report::human::{Table, bytes, counted, decimal, percent, seconds};
use serde::Serialize;

/// One step of training. Also a line of `--out rows.csv`.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    pub step: u64,
    /// Mean over the tokens of the global batch, in nats.
    pub loss: f64,
    pub step_time_s: f64,
    pub tokens_per_s: f64,
    /// Of the best matrix product on as many cores.
    pub mfu: f64,
    pub sent_bytes: Vec<u64>,
    pub peak_bytes: Vec<u64>,
    /// Of the host's memory.
    pub host_peak_bytes: Vec<u64>,
}

/// What the plan says of every step, rank by rank.
pub struct Planned {
    pub sent_bytes: Vec<u64>,
    pub peak_bytes: Vec<u64>,
    pub host_peak_bytes: Vec<u64>,
    on: On,
    /// Between memories of one process rows of an exchange do not go the ways of its algorithm.
    exchanges: bool,
}

impl Planned {
    pub fn new(plan: &Plan, on: On) -> Result<Planned> {
        let atoms = AtomTable::new(plan)?;
        let programs = 0..plan.programs.len() as u32;
        let lines: Vec<Line> = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<_>>()?;
        let layouts: Vec<Layout> = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<_>>()?;
        let program = |rank| plan.program_of(rank) as usize;
        Ok(Planned {
            sent_bytes: (0..plan.ranks()).map(|r| sent_by(plan, &lines[program(r)], r)).collect(),
            peak_bytes: (0..plan.ranks()).map(|r| layouts[program(r)].bytes).collect(),
            host_peak_bytes: (0..plan.ranks()).map(|r| layouts[program(r)].host_bytes).collect(),
            on,
            exchanges: plan.ops().any(|(_, op)| matches!(op.kind, OpKind::Exchange { .. })),
        })
    }

    /// What a step did otherwise than planned.
    pub fn wrong(&self, step: &Step) -> Option<Error> {
        let memory = ("bytes of memory", &step.peak_bytes, &self.peak_bytes);
        let sent = ("bytes sent", &step.sent_bytes, &self.sent_bytes);
        if self.on == On::Cuda {
            let [counted, planned] = [&step.sent_bytes, &self.sent_bytes].map(|all| all.iter().sum::<u64>());
            if counted != planned && !self.exchanges {
                let why =
                    format!("{counted} bytes went from rank to rank in step {}, the plan says {planned}", step.step);
                return Some(Error::device("all ranks", why));
            }
        }
        let host = ("bytes of the host's memory", &step.host_peak_bytes, &self.host_peak_bytes);
        for (what, counted, planned) in [memory, host].into_iter().chain((self.on == On::Cpu).then_some(sent)) {
            if let Some(rank) = (0..planned.len()).find(|&r| counted.get(r) != Some(&planned[r])) {
                let why = format!(
                    "{:?} {what} were counted in step {}, the plan says {}",
                    counted.get(rank),
                    step.step,
                    planned[rank]
                );
                return Some(Error::device(format!("rank {rank}"), why));
            }
        }
        None
    }
}

/// What one step brought, by the machine's own yardstick.
pub fn step(plan: &Plan, number: u64, run: &Run, best_flops_per_s: f64) -> Step {
    let time = run.timeline.step.value();
    Step {
        step: number,
        loss: run.loss,
        step_time_s: time,
        tokens_per_s: (plan.about.global_batch * plan.about.seq_len) as f64 / time,
        mfu: plan.about.model_flops / time / best_flops_per_s,
        sent_bytes: run.sent_bytes.clone(),
        peak_bytes: run.peak_bytes.clone(),
        host_peak_bytes: run.host_peak_bytes.clone(),
    }
}

/// The whole run; the fields of a step are those of the last one.
#[derive(Serialize)]
pub struct Found {
    pub plan: String,
    pub on: &'static str,
    /// Whether ranks share a GPU: their messages are then copies inside its memory, and no link was there.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub emulated_links: bool,
    /// Whose kernels did attention, on GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
    pub ranks: u32,
    pub devices: u32,
    pub seed: u64,
    pub loss: f64,
    pub step_time_s: f64,
    pub sent_bytes: Vec<u64>,
    pub planned_sent_bytes: Vec<u64>,
    pub peak_bytes: Vec<u64>,
    pub planned_peak_bytes: Vec<u64>,
    pub host_peak_bytes: Vec<u64>,
    pub planned_host_peak_bytes: Vec<u64>,
    /// The best matrix product on one core, and on all that the ranks share.
    pub gemm_flops_per_s: f64,
    pub best_flops_per_s: f64,
    pub steps: Vec<Step>,
    /// What the model's file states that no plan has.
    pub notes: Vec<String>,
    #[serde(flatten)]
    pub checkpoints: Told,
    pub check: Option<Check>,
}

/// Errors relative to the largest value of the dense reference.
#[derive(Serialize)]
pub struct Check {
    pub reference_loss: f64,
    /// The worst of all steps.
    loss_error: f64,
    first_loss_error: f64,
    worst_gradient: String,
    /// Of the first step: later ones start from weights that the optimizer's division has set apart.
    gradient_error: f64,
    #[serde(flatten)]
    allowed: Allowed,
    /// What rounding may be all that is wrong, where only gradients are.
    #[serde(skip)]
    hint: &'static str,
}

/// Rounding alone separates a right run from the reference.
#[derive(Clone, Copy, Serialize)]
struct Allowed {
    /// Of gradients, and of the losses of later steps.
    allowed: f64,
    /// Of the first step's loss.
    allowed_loss: f64,
    /// A gradient smaller than this share of the model's largest is held against that share: where one is nothing, as of scores
    /// of a single key, what is left of it is rounding.
    #[serde(skip)]
    least: f64,
}

impl Found {
    pub fn new(plan: &Plan, options: &Options, planned: Planned, steps: Vec<Step>, gemm_flops_per_s: f64) -> Found {
        let last = steps.last().expect("a run has a step").clone();
        let devices = machine::count(&options.devices);
        Found {
            on: if planned.on == On::Cuda { "cuda" } else { "cpu" },
            emulated_links: planned.on == On::Cuda && devices < plan.ranks(),
            attention: None,
            plan: plan.hash(),
            ranks: plan.ranks(),
            devices,
            seed: options.seed,
            loss: last.loss,
            step_time_s: last.step_time_s,
            sent_bytes: last.sent_bytes,
            planned_sent_bytes: planned.sent_bytes,
            peak_bytes: last.peak_bytes,
            planned_peak_bytes: planned.peak_bytes,
            host_peak_bytes: last.host_peak_bytes,
            planned_host_peak_bytes: planned.host_peak_bytes,
            gemm_flops_per_s,
            best_flops_per_s: gemm_flops_per_s * f64::from(devices),
            steps,
            notes: plan.about.model_spec.as_ref().map_or(vec![], |model| model.notes.clone()),
            checkpoints: Told { loaded: None, saved: vec![] },
            check: None,
        }
    }

    /// What is wrong with what came out.
    pub fn wrong(&self) -> Option<Error> {
        self.steps.iter().find_map(diverged).or_else(|| self.beside_the_reference())
    }

    /// What does not fit the reference.
    fn beside_the_reference(&self) -> Option<Error> {
        let check = self.check.as_ref()?;
        let Allowed { allowed, allowed_loss, .. } = check.allowed;
        let hint = match check.fine() {
            [true, true] => return None,
            [true, false] => check.hint,
            _ => "",
        };
        let why = format!(
            "the loss is off by {:.1e} in the first step, where {allowed_loss:.0e} is allowed, and by {:.1e} in all, the gradient of \
             {} by {:.1e}; {allowed:.0e} is allowed{hint}",
            check.first_loss_error, check.loss_error, check.worst_gradient, check.gradient_error
        );
        Some(Error::device("check", why))
    }

    pub fn where_to(&self) -> String {
        match self.on {
            "cuda" => {
                let attention = self.attention.as_ref().map_or(String::new(), |by| format!(", attention by {by}"));
                format!("{} over {}{attention}", counted(self.ranks, "rank"), counted(self.devices, "GPU"))
            }
            _ => format!("{} over {}", counted(self.ranks, "thread"), counted(self.devices, "core")),
        }
    }

    pub fn render(&self) -> String {
        let says = |counted: &[u64], planned: &[u64]| {
            if counted == planned { "as the plan says" } else { "NOT as the plan says" }
        };
        let one = if self.on == "cuda" { "GPU" } else { "core" };
        let most = |all: &[u64]| all.iter().copied().max().unwrap_or(0) as f64;
        let last = self.steps.last().expect("a run has a step");
        let mut table = Table::new("<<<");
        table.row(["loss", &format!("{:.6}", self.loss), "mean over the tokens"]);
        table.row(["step", &seconds(self.step_time_s), "first start to last end"]);
        table.row(["speed", &decimal(last.tokens_per_s, ""), "tokens a second"]);
        let best = decimal(self.best_flops_per_s, "FLOP/s");
        table.row(["MFU", &percent(last.mfu), &format!("of the {best} of a product on every {one}")]);
        let sent = match self.on {
            // All together: a sum is read from everyone at once, where hops hand it on.
            "cuda" => "copied from one rank's memory to another's",
            _ => says(&self.sent_bytes, &self.planned_sent_bytes),
        };
        table.row([
            "sent",
            &decimal(most(&self.sent_bytes), "B"),
            &format!("a rank, counted in the transport: {sent}"),
        ]);
        let peak = says(&self.peak_bytes, &self.planned_peak_bytes);
        table.row(["memory", &bytes(most(&self.peak_bytes)), &format!("a rank, counted at the allocator: {peak}")]);
        if most(&self.host_peak_bytes) > 0.0 {
            let peak = says(&self.host_peak_bytes, &self.planned_host_peak_bytes);
            let note = format!("a rank, of the host's, counted likewise: {peak}");
            table.row(["host memory", &bytes(most(&self.host_peak_bytes)), &note]);
        }
        self.checkpoints.rows(&mut table);
        if let Some(from) = self.checkpoints.loaded.as_ref().filter(|from| from.seed != self.seed) {
            let note = format!("the checkpoint's tokens came from seed {}: --seed {0} goes on with them", from.seed);
            table.row(["tokens", &format!("seed {}", self.seed), &note]);
        }
        if let Some(check) = &self.check {
            let error = |e: f64| format!("{e:.1e}");
            let Allowed { allowed, allowed_loss, .. } = check.allowed;
            let dense = match self.steps.len() {
                1 => format!("off the dense f64 reference; {allowed_loss:.0e} is allowed"),
                _ => format!(
                    "off the dense f64 reference; {allowed_loss:.0e} is allowed in the first step, {allowed:.0e} later"
                ),
            };
            table.row(["loss error", &error(check.loss_error), &dense]);
            let worst = format!("at worst, {}; {allowed:.0e} is allowed", check.worst_gradient);
            table.row(["gradients", &error(check.gradient_error), &worst]);
        }
        if self.emulated_links {
            table.row(["links", "emulated", "ranks share a GPU: their messages are copies inside its memory"]);
        }
        table.render("  ")
    }
}

/// What is wrong with a step whose loss is no number.
pub fn diverged(step: &Step) -> Option<Error> {
    let why = format!(
        "the loss is {}, and what follows from it says nothing; lower --lr, or begin with other weights",
        step.loss
    );
    (!step.loss.is_finite()).then(|| Error::device(format!("step {}", step.step), why))
}

impl Check {
    /// Losses, and gradients. A NaN is no small error.
    fn fine(&self) -> [bool; 2] {
        let Allowed { allowed, allowed_loss, .. } = self.allowed;
        let losses = self.first_loss_error <= allowed_loss && self.loss_error <= allowed.max(allowed_loss);
        [losses, self.gradient_error <= allowed]
    }

    /// Holds the losses of all steps and the gradients of the first one against dense training in f64.
    /// `chosen` has the experts that tokens visited, step by step.
    pub fn new(
        plan: &Plan,
        source: &Source,
        first: &Run,
        losses: &[f64],
        chosen: Vec<Vec<routing::Choices>>,
    ) -> Result<Check> {
        let documents = plan.about.documents.lengths().into_iter().map(|n| n as usize).collect();
        let mut config = reference::DenseConfig { documents, ..reference::DenseConfig::from(plan.model()?) };
        if plan.about.par.options.unfused {
            config.blocks.attention_dropout = config.blocks.dropout;
        }
        let steps = (1..).zip(chosen).map(|(step, choices)| {
            let fp8_rows = plan.about.par.options.dispatch_fp8;
            let experts = config.experts.clone().map(|e| reference::Experts { choices, fp8_rows, ..e });
            (reference::DenseConfig { experts, ..config.clone() }, source.batch(plan, step))
        });
        let adam = plan.optimizer().unwrap_or_default();
        let want = reference::train_anew(&source.weights(plan), steps, &adam);
        let off = |(got, want): (&f64, &reference::StepResult)| error(Some(&vec![*got]), &[want.loss], 1e-6);
        let allowed = allowed(plan);
        let largest = want[0].grads.values().flatten().fold(f64::MIN_POSITIVE, |most, g| most.max(g.abs()));
        let off_grad = |name, want| error(first.grads.get(name), want, allowed.least * largest);
        let errors = want[0].grads.iter().map(|(name, want)| (name, off_grad(name, want)));
        let losses: Vec<f64> = losses.iter().zip(&want).map(off).collect();
        let worst = errors.max_by(|a, b| a.1.total_cmp(&b.1));
        Ok(Check {
            reference_loss: want.last().expect("a run has a step").loss,
            loss_error: losses.iter().copied().fold(0.0, worse),
            first_loss_error: losses[0],
            worst_gradient: worst.map_or(String::new(), |w| w.0.clone()),
            gradient_error: worst.map_or(0.0, |w| w.1),
            allowed,
            hint: hint(plan),
        })
    }
}

/// The reference is written to be seen to be right, not to be fast.
pub fn small_enough(plan: &Plan, steps: u64) -> Result<()> {
    let model = plan.model()?;
    let tokens = plan.about.global_batch.saturating_mul(plan.about.seq_len).saturating_mul(steps);
    let work = model.flops_per_token(plan.about.seq_len) * tokens as f64;
    if work > 1e11 {
        let why = format!(
            "size: --check computes {} again on one thread, {work:.0e} FLOPs of it; use a smaller model, seq_len or global_batch",
            model.name
        );
        return Err(Error::infeasible(why));
    }
    Ok(())
}

/// Rounding alone separates a right run from the reference: of the dtype, over the depth of sums. Losses were off by 1e-7 in f32
/// and by 8e-5 in bf16, gradients by 4e-5 and 3e-2 (the latter on an H100 and an H200, traces/measured).
fn allowed(plan: &Plan) -> Allowed {
    let has = |dtype| plan.tensors.iter().any(|t| t.dtype == dtype);
    let fp8_rows = plan.about.par.options.dispatch_fp8;
    match (has(Dtype::F64), has(Dtype::Bf16)) {
        (true, _) => Allowed { allowed: 1e-9, allowed_loss: 1e-9, least: 1e-3 },
        // What has three bits of mantissa falls to the other side of a rounding where it comes a little otherwise: in two of five
        // runs in f32 something did, and gradients were off by up to 15 %, losses by 4e-4. In f64 nothing does.
        (_, bf16) if fp8_rows => Allowed { allowed: 0.3, allowed_loss: 5e-3, least: if bf16 { 1e-2 } else { 1e-3 } },
        (_, true) => Allowed { allowed: 0.1, allowed_loss: 5e-3, least: 1e-2 },
        // Gradients before a scan are sums over all that comes behind it, of either sign: some are small against their parts.
        _ if has_scan(plan) => Allowed { allowed: 5e-3, allowed_loss: 1e-5, least: 1e-3 },
        _ => Allowed { allowed: 1e-3, allowed_loss: 1e-5, least: 1e-3 },
    }
}

fn hint(plan: &Plan) -> &'static str {
    let has = |dtype| plan.tensors.iter().any(|t| t.dtype == dtype);
    match (has_scan(plan), plan.about.par.options.dispatch_fp8) {
        (true, _) if has(Dtype::Bf16) => {
            "; rounding to bf16 alone moves gradients of layers with a scan by as much: check the same --on cpu, in f32"
        }
        (_, true) if !has(Dtype::F64) => {
            "; rows in FP8 are rounded alike in f64 alone: check the same --on cpu --dtype f64"
        }
        _ => "",
    }
}

/// On CPU threads in f32, with the outputs of every kernel rounded to bf16 and nothing else, gradients of two layers (a scan, and
/// experts) were off by 15 %, and of six by more than their own size; with those of norms alone by 12 and 28 %.
fn has_scan(plan: &Plan) -> bool {
    plan.about.model_spec.as_ref().is_some_and(|model| model.mamba.is_some())
}

/// The larger; NaN where one is.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// The largest difference, relative to the largest value, or to `least`. NaN where something unwritten was read.
fn error(got: Option<&Vec<f64>>, want: &[f64], least: f64) -> f64 {
    let Some(got) = got.filter(|got| got.len() == want.len()) else { return f64::NAN };
    let scale = want.iter().fold(least, |m: f64, x| m.max(x.abs()));
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, worse) / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_held_more_tightly_than_gradients() {
        let allowed = Allowed { allowed: 1e-3, allowed_loss: 1e-5, least: 1e-3 };
        let of = |[first_loss_error, loss_error]: [f64; 2], gradient_error| {
            let worst_gradient = String::new();
            Check {
                reference_loss: 4.0,
                loss_error,
                first_loss_error,
                worst_gradient,
                gradient_error,
                allowed,
                hint: "",
            }
        };
        assert_eq!(of([5e-8; 2], 9e-4).fine(), [true, true]);
        assert_eq!(of([1e-4; 2], 2e-6).fine(), [false, true]);
        // Later steps are of weights that the optimizer's division has set apart.
        assert_eq!(of([5e-8, 1e-4], 2e-3).fine(), [true, false]);
        assert_eq!(of([f64::NAN; 2], f64::NAN).fine(), [false, false]);
    }

    #[test]
    fn small_gradients_are_held_against_the_least() {
        assert_eq!(error(Some(&vec![2e-8, 0.0]), &[0.0, 0.0], 1e-4), 2e-4);
        assert_eq!(error(Some(&vec![0.5, 1.0]), &[0.5, 2.0], 1e-4), 0.5);
        assert!(error(None, &[0.0], 1.0).is_nan() && error(Some(&vec![f64::NAN]), &[0.0], 1.0).is_nan());
    }
}
