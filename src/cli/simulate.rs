//! `foretrain simulate`: one configuration, event by event.

use super::config::{CLUSTER, Config, PlanFile};
use super::{Answer, Output, trace};
use crate::error::{Error, Result};
use crate::report::Report;
use crate::report::human::seconds;
use crate::sim::{Effort, Simulated, simulate};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain simulate --model llama-3-8b --gpus 64 --seq-len 128K --ulysses 8 --recompute full\n         \
                        foretrain simulate --plan plan.json --cluster dgx-h100 --trace trace.json"
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    #[command(flatten)]
    output: Output,
    /// Write the JSON to this file, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a Chrome trace to this file: open it in ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

#[derive(Serialize)]
struct Found {
    #[serde(flatten)]
    report: Report,
    /// Ends of kernels and meetings that were gone through.
    events: u64,
    /// Transfers that others on a port or a link slowed down.
    slowed: u64,
    /// Time the simulation itself took.
    wall_s: f64,
    /// Of ranks that do the same at the same time.
    classes: usize,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let chosen = flags.config.choose(flags.plan.plan.as_deref(), CLUSTER)?;
    let plan = match chosen.plan() {
        Ok(plan) => plan,
        Err(Error::Infeasible(why)) => {
            let row = chosen.case.infeasible(&chosen.point, why.clone());
            let error = Some(Error::Infeasible(why));
            return Answer::with_error(String::new(), &row, error).also_to(flags.out.as_deref());
        }
        Err(other) => return Err(other),
    };
    let layout = chosen.case.layout(&plan)?;
    let begun = Instant::now();
    let effort = Effort { fold: true, spans: flags.trace.is_some() };
    let Simulated { timeline, events, slowed } = simulate(&plan, chosen.case.machine(), effort)?;
    let wall_s = begun.elapsed().as_secs_f64();
    let report = chosen.case.costed(&plan, &layout, &timeline).report();
    let mut text = format!(
        "{}\n{events} events of {} classes of ranks in {}, {slowed} transfers slowed by others\n",
        report.render(),
        timeline.classes.len(),
        seconds(wall_s)
    );
    if let Some(path) = &flags.trace {
        trace(path, &[("simulated", &timeline)])?;
        text.push_str(&format!("wrote {}\n", path.display()));
    }
    let error = (!report.row.feasible).then(|| Error::infeasible(&report.row.why));
    let found = Found { report, events, slowed, wall_s, classes: timeline.classes.len() };
    Answer::with_error(text, &found, error).also_to(flags.out.as_deref())
}
