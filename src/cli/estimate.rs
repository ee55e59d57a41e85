//! `foretrain estimate`: one configuration, explained.

use super::config::{CLUSTER, Config};
use super::flags::value::trained_tokens;
use super::flags::{JsonFile, Output, PlanFile};
use super::progress::Clock;
use super::{Answer, software};
use crate::error::{Error, Result};
use crate::report::{Beside, Report, Training};
use crate::sim::SharedLink;
use crate::sweep::{Played, played};
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
fastest of a few simple ways that fit is taken, and a note says which. So it is in simulate, plan and goodput.\n\n\
Where GPUs share the NICs of a node, or the bridge between its sockets, ranks get in each other's way, which the walk of\n\
one rank does not tell. There the step is simulated, too, if that takes no longer than about a second, and a note says so\n\
where it is another answer (`simulated_s` in --json).")]
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
    /// The step as it is played event by event, s, where GPUs share links and that takes about a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    simulated_s: Option<f64>,
    /// The link between ranks that delayed most, where any did.
    #[serde(skip_serializing_if = "Option::is_none")]
    shared_link: Option<SharedLink>,
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
    let report = chosen.case.costed(&plan, &layout, &timeline).report();
    let played = played::beside(&chosen.case, &plan, report.row.clone());
    let crowded = played.as_ref().and_then(Played::beside_cost);
    let notes = chosen.notes().into_iter().chain(software::notes(&chosen.case, &plan, &timeline)?);
    let notes = notes.chain(crowded).collect();
    let (simulated_s, shared_link) = played.map_or((None, None), |played| (played.simulated_s, played.shared_link));
    let training = flags.tokens.and_then(|tokens| Training::of(tokens, &report.row));
    let report = Report { notes, training, row: chosen.remedied(report.row)?, ..report };
    let error = (!report.row.feasible).then(|| Error::Infeasible(report.row.why.clone()));
    let beside = flags.beside.as_deref().map(|file| Beside::of(&report, file)).transpose()?;
    let text = report.render() + &beside.as_ref().map_or(String::new(), |beside| format!("\n{}", beside.render()));
    let compared = Compared { report, simulated_s, shared_link, beside };
    Answer::with_error(text, &compared, error).also_to(flags.file.path())
}
