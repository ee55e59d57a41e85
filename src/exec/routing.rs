//! The choices of every token of the global batch, put together from the route of a plan: what the dense reference
//! needs to know of it.

use super::inputs::sequences_of;
use crate::plan::route::DROPPED;
use crate::plan::rows::place_of;
use crate::plan::{Axis, Inputs, Plan};

/// By sequence, `[s, k]`; [`DROPPED`] where a token has no choice. Empty for a plan without routes.
pub fn choices(plan: &Plan) -> Vec<Vec<u32>> {
    let (Some(route), Some(inputs)) = (plan.routes.first(), plan.feed.tokens()) else { return vec![] };
    let per_sequence = (inputs.segs.seq * u64::from(route.topk)) as usize;
    let mut all = vec![vec![DROPPED; per_sequence]; plan.about.global_batch as usize];
    for rank in 0..plan.ranks() {
        let own = route.choices(place_of(&plan.views, rank)).unwrap_or_default();
        for microbatch in 0..inputs.microbatches {
            let rows = rows(plan, inputs, rank, microbatch);
            for ((sequence, position), choices) in rows.zip(own.chunks(route.topk as usize)) {
                all[sequence][position * choices.len()..][..choices.len()].copy_from_slice(choices);
            }
        }
    }
    all
}

/// Sequence and position of each row between the products of a layer.
fn rows(plan: &Plan, inputs: &Inputs, rank: u32, microbatch: u32) -> impl Iterator<Item = (usize, usize)> {
    let positions = inputs.segs.positions(&plan.views, rank);
    let first = sequences_of(plan, inputs, rank, microbatch).start;
    let all = positions.len() as u64 * inputs.batch;
    // Tensor-parallel ranks have a share of the rows each.
    let share = all / u64::from(plan.views[0].degree(Axis::Tp));
    let from = u64::from(plan.views[0].coord(rank, Axis::Tp)) * share;
    (from..from + share).map(move |row| {
        let (sequence, token) = (row / positions.len() as u64, row as usize % positions.len());
        ((first + sequence) as usize, positions[token] as usize)
    })
}
