//! FasterMoE's shadowing: a hot expert's weights go to everyone, and its tokens stay at home (shadow_policy.py).

use super::Trace;
use crate::error::{Error, Result};
use crate::plan::route::{Counts, DROPPED, Route};

/// What the rule weighs: widths and rates of the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Width of a token, and of the hidden layer over it.
    pub width: f64,
    pub widening: f64,
    /// Bytes of an element.
    pub element: f64,
    /// Flops and bytes per second of a rank.
    pub flops: f64,
    pub bandwidth: f64,
}

/// The slots to shadow, hottest first: as long as the slowest rank gains more than another broadcast costs.
/// A layer takes 3 computations and 4 transfers of the busiest rank's rows, forward and backward.
pub fn shadowed(route: &Route, costs: &Costs) -> Vec<u32> {
    let Costs { width, widening, element, flops, bandwidth } = *costs;
    let row = 3.0 * 4.0 * widening * width * width / flops + 4.0 * width * element / bandwidth;
    let send = 2.0 * widening * width * width * element / bandwidth;
    let mut loads: Vec<f64> = (0..route.ranks).map(|r| route.expanded_rows(r)).collect();
    let mut hottest: Vec<u32> = (0..route.experts).collect();
    hottest.sort_by(|a, b| route.rows_of_expert(*b).total_cmp(&route.rows_of_expert(*a)));
    let busiest = |loads: &[f64]| loads.iter().copied().fold(0.0, f64::max) * row;
    let (mut chosen, mut best) = (vec![], busiest(&loads));
    for slot in hottest {
        loads[route.rank_of(slot) as usize] -= route.rows_of_expert(slot);
        (0..route.ranks).for_each(|src| loads[src as usize] += route.copies(src, slot));
        let now = busiest(&loads) + send * (chosen.len() + 1) as f64;
        if now >= best {
            break;
        }
        best = now;
        chosen.push(slot);
    }
    chosen
}

/// The `n` experts that most tokens choose, hottest first.
pub fn hottest(trace: &Trace, n: u32) -> Vec<u32> {
    let loads = trace.loads();
    let mut all: Vec<u32> = (0..trace.experts).collect();
    all.sort_by_key(|expert| std::cmp::Reverse(loads[*expert as usize]));
    all.truncate(n as usize);
    all
}

/// The route of a trace over `ranks`, `node` to a node, where every rank computes `experts` for itself: slots of its own,
/// shadowed ones first, and behind them one for each shadowed expert, owner after owner.
pub fn route(trace: &Trace, experts: &[u32], [ranks, node]: [u32; 2]) -> Result<Route> {
    let bad = |why: String| Err(Error::spec("routing", "shadow", why));
    if ranks == 0 || !trace.experts.is_multiple_of(ranks) {
        return bad(format!("{} experts do not divide over {ranks} ranks; use a divisor", trace.experts));
    }
    if trace.tokens.len() != ranks as usize {
        return bad(format!("{} sources for {ranks} ranks; spread the trace", trace.tokens.len()));
    }
    let own = trace.experts / ranks;
    let mut holds = vec![];
    let mut shadowed = experts.to_vec();
    shadowed.sort_unstable();
    shadowed.dedup();
    for rank in 0..ranks {
        let mut mine: Vec<u32> = (rank * own..(rank + 1) * own).collect();
        mine.sort_by_key(|expert| shadowed.binary_search(expert).is_err());
        holds.extend(mine.into_iter().chain(shadowed.iter().copied()));
    }
    let local = own + shadowed.len() as u32;
    let mut home = vec![0; trace.experts as usize];
    for (slot, &expert) in (0..).zip(&holds).filter(|(slot, _)| slot % local < own) {
        home[expert as usize] = slot;
    }
    let mut choices = Vec::with_capacity(trace.choices.len());
    let mut rest = trace.choices.as_slice();
    for (src, &tokens) in (0..).zip(&trace.tokens) {
        let (mine, after) = rest.split_at(tokens as usize * trace.topk as usize);
        rest = after;
        choices.extend(mine.iter().map(|&expert| match shadowed.binary_search(&expert) {
            _ if expert == DROPPED => DROPPED,
            Ok(at) => src * local + own + at as u32,
            Err(_) => home[expert as usize],
        }));
    }
    let counts = Counts::Listed { tokens: trace.tokens.clone(), choices };
    let route = Route::new([ranks, node], ranks * local, trace.topk, counts)?;
    if shadowed.is_empty() { Ok(route) } else { route.holding(holds)?.shadowing(shadowed.len() as u32) }
}
