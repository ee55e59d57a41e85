//! What the kernels of a rank take that is alone on a GPU, its messages being waits of the predicted length: at the clocks that
//! power leaves it.

use crate::act::work_of;
use crate::device::clocks::Clocks;
use crate::error::Result;
use crate::plan::link::{AtomTable, Line};
use crate::plan::{OpKind, Plan, Work};
use crate::timeline::{Span, Timeline};
use crate::units::Seconds;
use std::collections::HashMap;

/// The timeline of a rank alone, behind a rest: its kernels take as long as clocks let them, by what the rank has done
/// and how long it has waited. Kernels start where they did: of a rank alone only how long they take is looked at.
pub fn held_down(plan: &Plan, rank: u32, mut timeline: Timeline, mut clocks: Clocks) -> Result<Timeline> {
    let known = kernels(plan, rank)?;
    for class in timeline.classes.iter_mut().filter(|class| class.rank == rank) {
        let mut kernels: Vec<(&Work, &mut Span)> =
            class.spans.iter_mut().filter_map(|span| Some((known.get(&span.path)?, span))).collect();
        kernels.sort_by(|a, b| a.1.start.value().total_cmp(&b.1.start.value()));
        let mut done = Seconds::ZERO;
        for (work, span) in kernels {
            clocks.idle((span.start - done).value().max(0.0));
            done = span.end;
            let seconds = span.duration().value();
            let load = clocks.load(work, seconds);
            span.end = span.start + Seconds::new(clocks.alone(load, seconds));
        }
    }
    Ok(timeline)
}

/// The work of a rank's kernels, by path.
fn kernels(plan: &Plan, rank: u32) -> Result<HashMap<String, Work>> {
    let atoms = AtomTable::new(plan)?;
    let line = Line::program(plan, &atoms, plan.program_of(rank))?;
    let compute = |node: &usize| matches!(line.nodes[*node].op.kind, OpKind::Compute { .. });
    let work = |node: usize| Some((line.path(node), work_of(plan, &line, node, rank)?.0));
    Ok((0..line.nodes.len()).filter(compute).filter_map(work).collect())
}
