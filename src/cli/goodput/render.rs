//! What is found of a run, in words and tables.

use super::found::{Found, Interruptions, Spares};
use super::step::Step;
use crate::goodput::Run;
use crate::goodput::checkpoint::Checkpoint;
use crate::goodput::play::Spent;
use crate::report::human::{Table, decimal, long, notes, percent, seconds};
use crate::sim::fault::WATCHDOG_S;

pub fn render(step: &Step, found: &Found) -> String {
    let Found { run, played, .. } = found;
    let mut text = format!(
        "{}, fleet {}, storage {}\nstep {}; {} of training{}, played {} times\n\n",
        step.what,
        found.fleet,
        found.storage,
        seconds(step.time_s),
        long(found.work_s),
        found.tokens.map_or(String::new(), |tokens| format!(", {} tokens", decimal(tokens, "").trim_end())),
        played.runs
    );
    text.push_str(&notes(&found.notes));
    let mut facts = Table::new("<<<");
    let mut fact = |name: &str, value: String, more: String| facts.row([name.to_string(), value, more]);
    let luck = format!("5 to 95 % of runs: {} to {}", percent(played.ettr_p5), percent(played.ettr_p95));
    let expected = percent(found.ettr_expected);
    match found.ettr_expected_leaves_out {
        None => fact("ETTR", percent(played.ettr), format!("{luck}; in the long run {expected}")),
        Some(what) => {
            fact("ETTR", percent(played.ettr), luck);
            fact("", expected, format!("in the long run, leaving out {what}"));
        }
    }
    if let (Some(mfu), Some(goodput)) = (found.mfu, found.goodput_mfu) {
        fact("MFU", percent(goodput), format!("of the whole time; {} of a step", percent(mfu)));
    }
    fact("time", long(found.wall_s), found.gpu_hours.said());
    if let Some(mtbi) = found.mtbi_s {
        let spent = &played.spent;
        fact(
            "between",
            long(mtbi),
            format!("two interruptions; {} failures, {} planned stops", count(spent.failures), count(spent.stops)),
        );
    }
    let young = found.young_s.map_or(String::new(), |s| format!("; Young's rule says {}", long(s)));
    fact("save every", long(run.interval_s), format!("{}{young}", steps(found.interval_steps)));
    let spares = run.spares.map_or("as many as it takes".into(), |n| format!("{n} nodes"));
    let ready =
        format!("{:.1} are in repair at a time; {} are enough 99 % of the time", found.in_repair, found.spares_99);
    fact("stand by", spares, ready);
    let Checkpoint { bytes, bytes_per_gpu, stall_s, save_s, load_s, reshard_s } = run.checkpoint;
    fact("checkpoint", decimal(bytes, "B"), format!("{} a GPU", decimal(bytes_per_gpu, "B")));
    let other = reshard_s.map_or(String::new(), |s| format!(", into another layout in {}", seconds(s)));
    let times = format!("of standing still, safe after {}, loaded in {}{other}", seconds(save_s), seconds(load_s));
    fact("", seconds(stall_s), times);
    text.push_str(&facts.render("  "));
    text.push_str(&where_time_goes(&played.spent));
    text.push_str(&with_more_spares(&found.more_spares));
    text.push_str("\nwhat would help, in the long run and with a node for every one that fails\n");
    let mut table = Table::new("<>>");
    for lever in &found.levers {
        let gain = 100.0 * (lever.ettr - found.ettr_expected);
        table.row([lever.what.to_string(), percent(lever.ettr), format!("{gain:+.1} points")]);
    }
    text.push_str(&table.render("  "));
    let mut causes: Vec<&Interruptions> = found.interruptions.iter().filter(|i| i.count > 0.0).collect();
    causes.sort_by(|a, b| b.count.total_cmp(&a.count));
    text.push_str("\ninterruptions to expect\n");
    let mut table = Table::new("<>");
    causes.iter().for_each(|i| table.row([i.cause.clone(), format!("{:.1}", i.count)]));
    text.push_str(&table.render("  "));
    if !found.assumed.is_empty() {
        text.push_str(&format!("\nassumed, not measured: {}\n", listed(&found.assumed, run)));
    }
    text
}

/// `simulate` has another time until a failure is noticed.
fn listed(assumed: &[String], run: &Run) -> String {
    let noticed = long(run.detect_s);
    let other = "--recover or a --fleet changes it, and `simulate --dead` waits for its --watchdog instead";
    let said = |field: &String| match field.ends_with(".detect") {
        true => format!("{field} ({noticed}; {other}, {WATCHDOG_S} s)"),
        false => field.clone(),
    };
    assumed.iter().map(said).collect::<Vec<_>>().join(", ")
}

fn where_time_goes(spent: &Spent) -> String {
    let mut table = Table::new("<>>");
    for (what, s) in [
        ("training", spent.training),
        ("standing still to save", spent.stalled),
        ("lost since the last save", spent.lost),
        ("noticing and finding it", spent.detecting),
        ("waiting for a node", spent.waiting),
        ("restarting", spent.restarting),
        ("loading", spent.loading),
    ] {
        table.row([what.to_string(), long(s), percent(s / spent.wall())]);
    }
    format!("\nwhere the time goes\n{}", table.render("  "))
}

fn steps(count: f64) -> String {
    format!("{count:.0} step{}", if count < 1.5 { "" } else { "s" })
}

fn with_more_spares(more: &[Spares]) -> String {
    if more.is_empty() {
        return String::new();
    }
    let with = |more: &Spares| format!("with {} ETTR is {}", more.spares, percent(more.ettr));
    let all: Vec<String> = more.iter().map(with).collect();
    format!("\nmore nodes that stand by: {}\n", all.join(", "))
}

/// A mean of whole numbers: of few, with a decimal.
fn count(mean: f64) -> String {
    if mean < 10.0 { format!("{mean:.1}") } else { format!("{mean:.0}") }
}
