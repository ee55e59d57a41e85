//! What the predictions of published runs add to the record (`traces/published/record.csv`).

use super::verdict::Verdict;
use crate::published::row::case::{Case, Facts};
use crate::report::record::{Came, Quantity};

/// How a training run came out: its step and its memory, where they are stated and predicted. Anything else adds nothing,
/// nor does a longest sequence, which is neither.
pub fn came(case: &Case, verdict: &Verdict) -> Vec<Came> {
    let (Facts::Training(run), Some(like)) = (&case.facts, verdict.like) else { return vec![] };
    let step = run.max_tokens.is_none().then_some(verdict.rel_error).flatten();
    // A rate is the inverse of a time.
    let step = step.map(|error| if verdict.unit == "s" { 1.0 / (1.0 + error) } else { 1.0 + error });
    let memory = verdict.mem_rel_error.map(|error| 1.0 / (1.0 + error));
    let of = |(quantity, ratio): (Quantity, Option<f64>)| {
        let ratio = ratio.filter(|r| r.is_finite())?;
        let (software, generation, kind) = (like.software, like.generation, like.kind);
        // Four digits are more than anybody measures, and keep the file from changing for nothing.
        let ratio = (ratio * 1e4).round() / 1e4;
        Some(Came { quantity, software, generation, kind, source: case.group.clone(), ratio })
    };
    [(Quantity::Step, step), (Quantity::Memory, memory)].into_iter().filter_map(of).collect()
}
