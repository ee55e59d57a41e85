//! `foretrain compare`: where the prediction is wrong, op by op.

use super::config::Config;
use super::flags::{JsonFile, Output, PlanFile};
use super::run::Machine;
use super::{Answer, trace};
use crate::compare::{Comparison, Sum, compare};
use crate::cost::{Effort, cost};
use crate::error::Result;
use crate::report::human::{Table, seconds};
use clap::Args;
use serde::Serialize;

#[derive(Args)]
#[command(after_help = "Example: foretrain compare --model tiny --seq-len 256 --ring 2 --trace trace.json\n         \
                        foretrain compare --plan plan.json --on cpu")]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    #[command(flatten)]
    machine: Machine,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    file: JsonFile,
}

/// Ops of the table of the largest differences.
const SHOWN: usize = 12;

#[derive(Serialize)]
struct Found<'a> {
    plan: String,
    devices: u32,
    loss: f64,
    #[serde(flatten)]
    comparison: &'a Comparison,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    flags.machine.is_there()?;
    let mut chosen = flags.config.choose(flags.plan.path(), flags.machine.defaults())?;
    flags.machine.slow_down(&mut chosen)?;
    let plan = chosen.plan()?;
    let options = flags.machine.options_by(&plan, false, flags.config.profile())?;
    let machine = crate::cost::Machine { devices: Some(&options.devices), ..chosen.case.machine() };
    let predicted = cost(&plan, machine, Effort::ALL_SPANS)?;
    let run = flags.machine.execute(&plan, &options)?;
    let comparison = compare(&predicted, &run.timeline);
    let cores = options.devices.iter().max().map_or(0, |d| d + 1);
    let mut text = format!(
        "{}, {} on {} threads over {cores} cores of {}\n\n{}",
        plan.about.model,
        plan.about.strategy,
        plan.ranks(),
        chosen.case.cluster.gpu.name,
        render(&comparison)
    );
    if let Some(path) = flags.machine.trace.path() {
        trace(path, &[("predicted", &predicted), ("measured", &run.timeline)])?;
        text.push_str(&format!("\nwrote {}\n", path.display()));
    }
    let found = Found { plan: plan.hash(), devices: cores, loss: run.loss, comparison: &comparison };
    Answer::new(text, &found).also_to(flags.file.path())
}

fn render(c: &Comparison) -> String {
    let mut table = Table::new("<>>>>");
    table.row(["time, mean of the ranks", "ops", "predicted", "measured", "ratio"]);
    let step = Sum { name: "step".into(), ops: 1.0, predicted_s: c.predicted_step_s, measured_s: c.measured_step_s };
    table.row(cells(&step, String::new()));
    for sum in &c.by_what {
        table.row(cells(sum, format!("{:.0}", sum.ops)));
    }
    let mut worst = Table::new("<>>>>");
    worst.row(["largest differences", "ranks", "predicted", "measured", "ratio"]);
    for sum in c.by_path.iter().take(SHOWN) {
        worst.row(cells(sum, format!("{:.0}", sum.ops * f64::from(c.ranks))));
    }
    format!(
        "{}\n{}\n{} ops joined, {} only predicted, {} only measured; a transfer's time has its waiting in it\n",
        table.render(""),
        worst.render(""),
        c.pairs.len(),
        c.only_predicted.len(),
        c.only_measured.len()
    )
}

fn cells(sum: &Sum, count: String) -> [String; 5] {
    let ratio = sum.ratio().map_or("-".into(), |r| format!("{r:.2}"));
    [format!("  {}", sum.name), count, seconds(sum.predicted_s), seconds(sum.measured_s), ratio]
}
