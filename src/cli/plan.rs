//! `foretrain plan`: a plan as a file.

use super::config::{CLUSTER, Config};
use super::flags::Output;
use super::progress::Clock;
use super::{Answer, write_file};
use crate::error::Result;
use crate::plan::link::{AtomTable, Line};
use crate::plan::{Plan, check};
use crate::report::human::{Table, bytes, weighed};
use clap::Args;
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Args)]
#[command(after_help = "Example: foretrain plan --model tiny --cluster local-cpu --ulysses 2 --ring 2 --out plan.json")]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    output: Output,
    /// Write the plan to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let chosen = flags.config.choose(None, CLUSTER)?;
    let _clock = Clock::start("building a plan");
    let plan = chosen.plan()?;
    check::check(&plan)?;
    let layout = chosen.case.layout(&plan)?;
    if let Some(path) = &flags.out {
        save(&plan, path)?;
    }
    let row = {
        let mut row = crate::report::Row::asked(&plan.about, &chosen.case.cluster, &chosen.case.stack);
        row.set_layout(&layout, &chosen.case.place(&chosen.case.aside(&plan)));
        chosen.remedied(row)?
    };
    let atoms = AtomTable::new(&plan)?;
    let written = plan.ops().count();
    let linked = Line::short(&plan, &atoms, 0)?.nodes.len();
    let (weights, active_weights) = chosen.case.model.trained_params();
    let mut table = Table::new("<<");
    table.row(["plan", &plan.hash()]);
    table.row(["model", &weighed(&plan.about.model, Some((weights, active_weights)))]);
    table.row(["what", &row.what()]);
    table.row(["ranks", &plan.ranks().to_string()]);
    table.row(["lanes", &plan.lanes.iter().map(|l| l.label()).collect::<Vec<_>>().join(", ")]);
    table.row(["ops", &format!("{written} written, {linked} once spliced (equal microbatches thrice)")]);
    table.row(["memory", &format!("{} a rank", bytes(layout.bytes as f64))]);
    if layout.host_bytes > 0 {
        table.row(["host memory", &format!("{} a rank", bytes(layout.host_bytes as f64))]);
    }
    if !row.feasible {
        table.row(["does not fit", &row.why.to_string()]);
    }
    chosen.notes().iter().for_each(|note| table.row(["note", note]));
    match &flags.out {
        Some(path) => table.row(["written to", &path.display().to_string()]),
        None => table.row(["not written", "give --out FILE"]),
    }
    let json = json!({
        "plan": plan.hash(),
        "model": plan.about.model,
        "weights": weights,
        "active_weights": active_weights,
        "strategy": plan.about.strategy,
        "ranks": plan.ranks(),
        "lanes": plan.lanes.iter().map(|l| l.label()).collect::<Vec<_>>(),
        "ops_written": written,
        "ops_linked": linked,
        "peak_mem_bytes": layout.bytes,
        "host_mem_bytes": layout.host_bytes,
        "fits": row.feasible,
        "why": row.why,
        "notes": chosen.notes(),
        "out": flags.out,
    });
    Ok(Answer::new(table.render(""), &json))
}

fn save(plan: &Plan, path: &Path) -> Result<()> {
    // The folder is made as for every other output.
    write_file(path, b"")?;
    plan.save(path)
}
