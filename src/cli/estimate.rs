//! `foretrain estimate`: one configuration, explained.

use super::config::{CLUSTER, Config};
use super::flags::value::trained_tokens;
use super::flags::{JsonFile, Output, PlanFile};
use super::progress::Clock;
use super::{Answer, software};
use crate::error::{Error, Result};
use crate::report::{Beside, Report, Training};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(after_help = "Example: foretrain estimate\n         \
                        foretrain estimate --model llama-3-8b --gpus 64 --seq-len 128K --ulysses 8 --recompute full\n         \
                        foretrain estimate --model llama-3-70b --cluster dgx-h100 --gpus 512 --tp 8 --pp 4 --global-batch 1024 --tokens 15T\n         \
                        foretrain estimate --plan plan.json --cluster local-cpu --json\n         \
                        foretrain estimate --gpus 64 --seq-len 64K --ring 8 --out ring.json\n         \
                        foretrain estimate --gpus 64 --seq-len 64K --ulysses 8 --beside ring.json\n\n\
Where nothing is said of the split (no degree, --zero, --recompute or --options) and the default does not fit, the\n\
fastest of a few simple ways that fit is taken, and a note says which. So it is in simulate, plan and goodput.")]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    /// Tokens of the whole training, e.g. 300B or 15.6T: how long that takes, and how many GPU-hours
    #[arg(long, value_name = "N", value_parser = trained_tokens)]
    tokens: Option<f64>,
    /// Say what differs from the answer that an earlier estimate wrote with --out, part by part
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    file: JsonFile,
}

/// An answer, and what differs from an earlier one.
#[derive(Serialize)]
struct Compared {
    #[serde(flatten)]
    report: Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    beside: Option<Beside>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let chosen = flags.config.choose(flags.plan.path(), CLUSTER)?;
    let _clock = Clock::start(format!("costing {} ranks", chosen.case.cluster.gpus()));
    let plan = match chosen.plan() {
        Ok(plan) => plan,
        Err(Error::Infeasible(why)) => return chosen.refused(why).also_to(flags.file.path()),
        Err(other) => return Err(other),
    };
    let layout = chosen.case.layout(&plan)?;
    let timeline = chosen.case.cost(&plan)?;
    let notes = chosen.notes().into_iter().chain(software::notes(&chosen.case, &plan, &timeline)?).collect();
    let report = chosen.case.costed(&plan, &layout, &timeline).report();
    let training = flags.tokens.and_then(|tokens| Training::of(tokens, &report.row));
    let report = Report { notes, training, row: chosen.remedied(report.row)?, ..report };
    let error = (!report.row.feasible).then(|| Error::Infeasible(report.row.why.clone()));
    let beside = flags.beside.as_deref().map(|file| Beside::of(&report, file)).transpose()?;
    let text = report.render() + &beside.as_ref().map_or(String::new(), |beside| format!("\n{}", beside.render()));
    Answer::with_error(text, &Compared { report, beside }, error).also_to(flags.file.path())
}
