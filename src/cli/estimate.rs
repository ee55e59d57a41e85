//! `foretrain estimate`: one configuration, explained.

use super::config::{CLUSTER, Config, PlanFile};
use super::{Answer, Output};
use crate::error::{Error, Result};
use crate::report::Report;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain estimate --model llama-3-8b --gpus 64 --seq-len 128K --ulysses 8 --recompute full\n         \
                        foretrain estimate --plan plan.json --cluster local-cpu --json"
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
    let timeline = chosen.case.cost(&plan)?;
    let report = chosen.case.costed(&plan, &layout, &timeline).report();
    let error = (!report.row.feasible).then(|| Error::infeasible(&report.row.why));
    let left_out = chosen.case.model.left_out();
    let note = left_out.as_ref().map_or(String::new(), |what| format!("\nleft out of the plan: {what}\n"));
    Answer::with_error(report.render() + &note, &Noted { report: &report, left_out }, error)
        .also_to(flags.out.as_deref())
}

/// A report, and what the model has and the plan has not.
#[derive(Serialize)]
struct Noted<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<String>,
}
