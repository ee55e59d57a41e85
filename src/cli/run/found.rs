//! What a run found, step by step, and what the plan says about it.

use super::check::Check;
use super::kept::Told;
use super::machine::{self, On};
use crate::collective::count::sent_by;
use crate::error::{Error, Result};
use crate::exec::{Options, Run};
use crate::plan::link::{AtomTable, Line};
use crate::plan::memory::Layout;
use crate::plan::{OpKind, Plan};
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
        self.steps.iter().find_map(diverged).or_else(|| self.check.as_ref().and_then(Check::wrong))
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
        self.check.iter().for_each(|check| check.rows(&mut table, self.steps.len()));
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
