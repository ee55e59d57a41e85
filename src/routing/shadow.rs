//! FasterMoE's shadowing: a hot expert's weights go to everyone, and its tokens stay at home (shadow_policy.py).

use crate::plan::route::Route;

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
