//! `foretrain run`: a plan on threads of this machine.

use super::config::{Config, LOCAL, PlanFile};
use super::{Answer, Output, trace};
use crate::collective::count::sent_by;
use crate::error::{Error, Result};
use crate::exec::{Options, Run, execute, inputs, reference};
use crate::plan::link::{AtomTable, Line};
use crate::plan::memory::Layout;
use crate::plan::{Dtype, Plan};
use crate::report::human::{Table, bytes, decimal, seconds};
use crate::sweep::guard;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum On {
    Cpu,
}

/// How to run, for `run` and `compare`.
#[derive(Args)]
pub struct Machine {
    /// What to run on
    #[arg(long, value_enum, default_value = "cpu")]
    on: On,
    /// Cores that the ranks share, taking turns [default: all there are]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    devices: Option<u32>,
    /// Seeds weights and tokens
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write a Chrome trace to this file: open it in ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

impl Machine {
    /// How to run a plan: what is asked for, unless nobody would wait for it.
    pub fn options(&self, plan: &Plan, keep: bool) -> Result<Options> {
        let On::Cpu = self.on;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let devices = self.devices.unwrap_or(cores).clamp(1, plan.ranks());
        let wait = rough_seconds(plan, cores.min(devices));
        if wait > LONGEST_S {
            let why = format!(
                "size: the run would take about {:.0} minutes on this machine, more than {:.0}; use a smaller model, \
                 seq_len or global_batch, or fewer ranks",
                wait / 60.0,
                LONGEST_S / 60.0
            );
            return Err(Error::infeasible(why));
        }
        Ok(Options { seed: self.seed, devices: (0..plan.ranks()).map(|rank| rank % devices).collect(), keep })
    }
}

/// A longer run is taken for a mistake.
const LONGEST_S: f64 = 300.0;

/// Within a factor of a few: arithmetic at some 10 GFLOP/s a core, and the hand-over between threads, in
/// which every op of a rank wakes the others up.
fn rough_seconds(plan: &Plan, cores: u32) -> f64 {
    let (ranks, ops) = (f64::from(plan.ranks()), guard::ops_of_a_rank(plan));
    plan.about.model_flops / (1e10 * f64::from(cores)) + ops * ranks * (8e-6 + 1e-6 * ranks)
}

#[derive(Args)]
#[command(
    after_help = "Example: foretrain run --model tiny --seq-len 128 --ulysses 2 --ring 2 --global-batch 2 --check\n         \
                        foretrain run --plan plan.json --on cpu --trace trace.json"
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    #[command(flatten)]
    machine: Machine,
    /// Hold loss and gradients against one dense rank in f64 (small models)
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    output: Output,
    /// Write the JSON to this file, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let plan = flags.config.plan(flags.plan.plan.as_deref(), LOCAL)?;
    if flags.check {
        small_enough(&plan)?;
    }
    let options = flags.machine.options(&plan, flags.check)?;
    let run = execute(&plan, &options)?;
    if let Some(path) = &flags.machine.trace {
        trace(path, &[("measured", &run.timeline)])?;
    }
    let found = Found::new(&plan, &options, &run, flags.check)?;
    let mut text = found.render(&plan);
    if let Some(path) = &flags.machine.trace {
        text.push_str(&format!("\nwrote {}\n", path.display()));
    }
    Answer::with_error(text, &found, found.wrong()).also_to(flags.out.as_deref())
}

/// What a run found, and what the plan says about it.
#[derive(Serialize)]
struct Found {
    plan: String,
    ranks: u32,
    devices: u32,
    seed: u64,
    loss: f64,
    step_time_s: f64,
    sent_bytes: Vec<u64>,
    planned_sent_bytes: Vec<u64>,
    peak_bytes: Vec<u64>,
    planned_peak_bytes: Vec<u64>,
    check: Option<Check>,
}

/// Errors relative to the largest value of the dense reference.
#[derive(Serialize)]
struct Check {
    reference_loss: f64,
    loss_error: f64,
    worst_gradient: String,
    gradient_error: f64,
    allowed: f64,
}

impl Found {
    fn new(plan: &Plan, options: &Options, run: &Run, check: bool) -> Result<Found> {
        let atoms = AtomTable::new(plan)?;
        let programs = 0..plan.programs.len() as u32;
        let lines: Vec<Line> = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<_>>()?;
        let layouts: Vec<Layout> = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<_>>()?;
        let program = |rank| plan.program_of(rank) as usize;
        Ok(Found {
            plan: plan.hash(),
            ranks: plan.ranks(),
            devices: options.devices.iter().max().map_or(0, |d| d + 1),
            seed: options.seed,
            loss: run.loss,
            step_time_s: run.timeline.step.value(),
            sent_bytes: run.sent_bytes.clone(),
            planned_sent_bytes: (0..plan.ranks()).map(|r| sent_by(plan, &lines[program(r)], r)).collect(),
            peak_bytes: run.peak_bytes.clone(),
            planned_peak_bytes: (0..plan.ranks()).map(|r| layouts[program(r)].bytes).collect(),
            check: check.then(|| Check::new(plan, options.seed, run)).transpose()?,
        })
    }

    /// What does not fit the plan or the reference.
    fn wrong(&self) -> Option<Error> {
        for (what, counted, planned) in [
            ("bytes sent", &self.sent_bytes, &self.planned_sent_bytes),
            ("bytes of memory", &self.peak_bytes, &self.planned_peak_bytes),
        ] {
            if let Some(rank) = (0..planned.len()).find(|&r| counted.get(r) != Some(&planned[r])) {
                let why = format!("{:?} {what} were counted, the plan says {}", counted.get(rank), planned[rank]);
                return Some(Error::device(format!("rank {rank}"), why));
            }
        }
        let check = self.check.as_ref()?;
        // A NaN is no small error.
        let fine = |error: f64| error <= check.allowed;
        if fine(check.loss_error) && fine(check.gradient_error) {
            return None;
        }
        let why = format!(
            "the loss is off by {:.1e} and the gradient of {} by {:.1e}; {:.0e} is allowed",
            check.loss_error, check.worst_gradient, check.gradient_error, check.allowed
        );
        Some(Error::device("check", why))
    }

    fn render(&self, plan: &Plan) -> String {
        let about = &plan.about;
        let mut text = format!(
            "{}, {} on {} threads over {} cores: seq_len {}, global_batch {}, {}\n\n",
            about.model, about.strategy, self.ranks, self.devices, about.seq_len, about.global_batch, about.dtype
        );
        let says = |counted: &[u64], planned: &[u64]| {
            if counted == planned { "as the plan says" } else { "NOT as the plan says" }
        };
        let most = |all: &[u64]| all.iter().copied().max().unwrap_or(0) as f64;
        let mut table = Table::new("<<<");
        table.row(["loss", &format!("{:.6}", self.loss), "mean over the tokens"]);
        table.row(["step", &seconds(self.step_time_s), "first start to last end"]);
        let sent = says(&self.sent_bytes, &self.planned_sent_bytes);
        table.row([
            "sent",
            &decimal(most(&self.sent_bytes), "B"),
            &format!("a rank, counted in the transport: {sent}"),
        ]);
        let peak = says(&self.peak_bytes, &self.planned_peak_bytes);
        table.row(["memory", &bytes(most(&self.peak_bytes)), &format!("a rank, counted at the allocator: {peak}")]);
        if let Some(check) = &self.check {
            let error = |e: f64| format!("{e:.1e}");
            let dense = format!("off the dense f64 reference; {:.0e} is allowed", check.allowed);
            table.row(["loss error", &error(check.loss_error), &dense]);
            table.row(["gradients", &error(check.gradient_error), &format!("at worst, {}", check.worst_gradient)]);
        }
        text.push_str(&table.render("  "));
        text
    }
}

/// The reference is written to be seen to be right, not to be fast.
fn small_enough(plan: &Plan) -> Result<()> {
    let model = plan.model()?;
    let tokens = plan.about.global_batch.saturating_mul(plan.about.seq_len);
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

impl Check {
    fn new(plan: &Plan, seed: u64, run: &Run) -> Result<Check> {
        let documents = plan.about.documents.lengths().into_iter().map(|n| n as usize).collect();
        let mut config = reference::DenseConfig { documents, ..reference::DenseConfig::from(plan.model()?) };
        if plan.about.par.options.unfused {
            config.blocks.attention_dropout = config.blocks.dropout;
        }
        let (tokens, targets): (Vec<_>, Vec<_>) =
            (0..plan.about.global_batch).map(|i| inputs::sequence(plan, seed, i)).unzip();
        // Of the optimizer nothing is compared.
        let adam = reference::AdamConfig { lr: 3e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
        let want = reference::step(&config, &inputs::weights(plan, seed), &tokens, &targets, &adam);
        let errors = want.grads.iter().map(|(name, want)| (name, error(run.grads.get(name), want)));
        let worst = errors.max_by(|a, b| a.1.total_cmp(&b.1));
        Ok(Check {
            reference_loss: want.loss,
            loss_error: error(Some(&vec![run.loss]), &[want.loss]),
            worst_gradient: worst.map_or(String::new(), |w| w.0.clone()),
            gradient_error: worst.map_or(0.0, |w| w.1),
            allowed: allowed(plan),
        })
    }
}

/// Rounding alone separates a right run from the reference: of the dtype, over the depth of sums.
fn allowed(plan: &Plan) -> f64 {
    let has = |dtype| plan.tensors.iter().any(|t| t.dtype == dtype);
    match (has(Dtype::Bf16), has(Dtype::F64)) {
        (true, _) => 0.1,
        (_, true) => 1e-9,
        _ => 1e-3,
    }
}

/// The largest difference, relative to the largest value. NaN where something unwritten was read.
fn error(got: Option<&Vec<f64>>, want: &[f64]) -> f64 {
    let Some(got) = got.filter(|got| got.len() == want.len()) else { return f64::NAN };
    let scale = want.iter().fold(1e-6, |m: f64, x| m.max(x.abs()));
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs());
    worst.fold(0.0, |m: f64, e| if e.is_nan() || m.is_nan() { f64::NAN } else { m.max(e) }) / scale
}
