//! The choices of every token of the global batch, and the routes of a plan: what the dense reference needs to know of
//! the one, and what routers chose put into the other.

use super::inputs::sequences_of;
use crate::error::Result;
use crate::plan::route::{Counts, DROPPED};
use crate::plan::rows::{place_of, replica_of, replicas};
use crate::plan::{Axis, Inputs, Plan, Route};

/// The choices of a layer: by sequence, `[s, k]`; [`DROPPED`] where a token has none.
pub type Choices = Vec<Vec<u32>>;

/// The choices that the routes of a plan stand for: an entry for each layer with experts, or one for all of them. Empty
/// without routes.
pub fn choices(plan: &Plan) -> Vec<Choices> {
    let Some(inputs) = plan.feed.tokens() else { return vec![] };
    let each = if plan.routes_by_replica { inputs.microbatches * replicas(&plan.views) } else { 1 };
    // Where all layers are routed alike, the first route is that of tokens; gradients of copies have another.
    let layers = if plan.routes_by_replica { plan.routes.len() as u32 / each } else { plan.routes.len().min(1) as u32 };
    (0..layers).map(|layer| of_layer(plan, inputs, layer)).collect()
}

/// The first route of a layer in a microbatch.
fn first(plan: &Plan, inputs: &Inputs, layer: u32, microbatch: u32) -> u32 {
    if plan.routes_by_replica { (layer * inputs.microbatches + microbatch) * replicas(&plan.views) } else { 0 }
}

fn of_layer(plan: &Plan, inputs: &Inputs, layer: u32) -> Choices {
    let topk = plan.routes[0].topk as usize;
    let mut all = vec![vec![DROPPED; inputs.segs.seq as usize * topk]; plan.about.global_batch as usize];
    for (rank, microbatch) in (0..plan.ranks()).flat_map(|r| (0..inputs.microbatches).map(move |m| (r, m))) {
        let route = plan.route_of(first(plan, inputs, layer, microbatch), rank);
        let own = route.choices(place_of(&plan.views, rank)).unwrap_or_default();
        for ((sequence, position), choices) in rows(plan, inputs, rank, microbatch).zip(own.chunks(topk)) {
            let experts = choices.iter().map(|slot| route.expert_in(*slot));
            all[sequence][position * topk..][..topk].iter_mut().zip(experts).for_each(|(to, expert)| *to = expert);
        }
    }
    all
}

/// The routes of a plan laid out as `plan` is, in which every token goes where `choices` say, layer by layer; as
/// [`build_by_layer`](crate::strategy::build_by_layer) takes them. Errors: a plan that is no training step; those of
/// [`Route::new`].
pub fn routes(plan: &Plan, choices: &[Choices]) -> Result<Vec<Route>> {
    let (inputs, like) = (plan.inputs()?, &plan.routes[0]);
    let topk = like.topk as usize;
    let mut all = vec![];
    for (layer, microbatch) in choices.iter().flat_map(|l| (0..inputs.microbatches).map(move |m| (l, m))) {
        for replica in 0..replicas(&plan.views) {
            let mut by_place = vec![vec![]; like.ranks as usize];
            // Every stage has the same tokens.
            let first_stage = (0..plan.ranks()).filter(|&rank| plan.views[0].coord(rank, Axis::Pp) == 0);
            for rank in first_stage.filter(|&rank| replica_of(&plan.views, rank) == replica) {
                by_place[place_of(&plan.views, rank) as usize] = rows(plan, inputs, rank, microbatch)
                    .flat_map(|(sequence, position)| layer[sequence][position * topk..][..topk].iter().copied())
                    .collect();
            }
            let tokens = by_place.iter().map(|choices| (choices.len() / topk) as u64).collect();
            let counts = Counts::Listed { tokens, choices: by_place.concat() };
            all.push(Route::new([like.ranks, like.node], like.experts, like.topk, counts)?);
        }
    }
    Ok(all)
}

/// Sequence and position of each row between the products of a layer.
fn rows(plan: &Plan, inputs: &Inputs, rank: u32, microbatch: u32) -> impl Iterator<Item = (usize, usize)> {
    let positions = inputs.segs.positions(&plan.views, rank);
    let first = sequences_of(plan, inputs, rank, microbatch).start;
    let all = positions.len() as u64 * inputs.batch;
    let own = inputs.share.map_or(all, |share| all / u64::from(plan.views[0].degree(share.axis)));
    let row = move |i| inputs.share.map_or(i, |share| share.row(&plan.views, rank, own, i));
    (0..own).map(row).map(move |row| {
        let (sequence, token) = (row / positions.len() as u64, row as usize % positions.len());
        ((first + sequence) as usize, positions[token] as usize)
    })
}
