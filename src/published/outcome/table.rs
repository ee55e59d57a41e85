//! The table and the summary, for people.

use super::summary::{Errors, Summary};
use super::verdict::Verdict;

/// One line a case, then one a group.
pub fn render(verdicts: &[Verdict], summary: &Summary) -> String {
    let mut text = cases(verdicts);
    text.push('\n');
    text.push_str(&groups(summary));
    text
}

fn cases(verdicts: &[Verdict]) -> String {
    let wide = |of: fn(&Verdict) -> usize| verdicts.iter().map(of).max().unwrap_or(0);
    let (id, group) = (wide(|v| v.id.len()).max(4), wide(|v| v.group.len()).max(5));
    let mut text = format!(
        "{:id$}  {:group$}  {:>10}  {:>10}  {:12}  {:>7}  cluster, stack; split; why\n",
        "case", "group", "measured", "predicted", "unit", "error"
    );
    for v in verdicts {
        let error = v.rel_error.map_or("-".into(), |e| format!("{:+.1}%", e * 100.0));
        let notes = [chosen(v), v.split.clone(), memory(v), v.why.clone()];
        let notes: Vec<_> = notes.into_iter().filter(|n| !n.is_empty()).collect();
        text.push_str(&format!(
            "{:id$}  {:group$}  {:>10}  {:>10}  {:12}  {error:>7}  {}\n",
            v.id,
            v.group,
            number(v.measured),
            number(v.predicted),
            v.unit,
            notes.join("; ")
        ));
    }
    text
}

fn chosen(v: &Verdict) -> String {
    if v.stack.is_empty() { v.cluster.clone() } else { format!("{}, {}", v.cluster, v.stack) }
}

/// The fullest GPU's memory, where it was measured.
fn memory(v: &Verdict) -> String {
    let Some(measured) = v.mem_measured_gib else { return String::new() };
    let predicted = v.mem_predicted_gib.zip(v.mem_rel_error);
    let said = predicted.map_or("not predicted".into(), |(gib, e)| format!("{gib:.1} predicted, {:+.0}%", 100.0 * e));
    format!("memory {measured:.1} GiB, {said}")
}

/// Four significant digits.
fn number(value: Option<f64>) -> String {
    let Some(v) = value else { return "-".into() };
    let digits = (3.0 - v.abs().log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{v:.digits$}")
}

/// |relative error| by group, and the order of ways.
pub fn groups(summary: &Summary) -> String {
    let wide = summary.groups.iter().map(|g| g.group.len()).max().unwrap_or(0).max(5);
    let mut text = format!(
        "{:wide$}  {:>5}  {:>9}  {:>7}  {:>7}  {:>7}\n",
        "group", "cases", "predicted", "median", "90 %", "bias"
    );
    for g in summary.groups.iter().chain([&summary.overall]) {
        text.push_str(&line(g, wide));
    }
    if summary.unread > 0 {
        text.push_str(&format!(
            "{} not read, in no group: the table of cases, without --summary, says why\n",
            summary.unread
        ));
    }
    if !summary.memory.is_empty() {
        text.push_str("\nmemory of the fullest GPU, where it is stated\n");
        summary.memory.iter().for_each(|g| text.push_str(&line(g, wide)));
    }
    let order = &summary.ordering;
    if let Some(share) = order.share {
        text.push_str(&format!(
            "\norder of ways within a set-up: {} of {} pairs right ({:.0} %)\n",
            order.right,
            order.pairs,
            share * 100.0
        ));
    }
    text
}

fn line(g: &Errors, wide: usize) -> String {
    let percent = |v: f64| format!("{:.1}%", v * 100.0);
    format!(
        "{:wide$}  {:>5}  {:>9}  {:>7}  {:>7}  {:>7}\n",
        g.group,
        g.cases,
        g.predicted,
        percent(g.median),
        percent(g.p90),
        format!("{:+.1}%", g.bias * 100.0)
    )
}
