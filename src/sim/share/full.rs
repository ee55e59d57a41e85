//! Max-min fair rates from nothing: the definition, step by step. Slow, and the oracle of what is incremental.

/// An activity: its cap, its weight, and what it uses.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    pub cap: f64,
    pub weight: f64,
    /// (resource, what a rate of 1 takes of it)
    pub uses: Vec<(usize, f64)>,
}

/// Rates of all flows: the level of those that can still grow is raised until a cap or a resource stops some of them;
/// they are fixed, and so on (Bertsekas and Gallager, Data Networks, section 6.5.2). Rounds times flows times uses.
pub fn max_min(capacities: &[f64], flows: &[Flow]) -> Vec<f64> {
    let mut rates: Vec<Option<f64>> = vec![None; flows.len()];
    let mut left = capacities.to_vec();
    loop {
        let mut weights = vec![0.0; left.len()];
        for (flow, _) in flows.iter().zip(&rates).filter(|(_, rate)| rate.is_none()) {
            flow.uses.iter().for_each(|&(r, takes)| weights[r] += takes * flow.weight);
        }
        let level_of = |r: usize| left[r].max(0.0) / weights[r];
        let stop = |flow: &Flow| flow.uses.iter().map(|u| level_of(u.0)).fold(flow.cap / flow.weight, f64::min);
        let open = || flows.iter().zip(&rates).filter(|(_, rate)| rate.is_none()).map(|(flow, _)| flow);
        let Some(level) = open().map(stop).min_by(f64::total_cmp) else {
            return rates.into_iter().flatten().collect();
        };
        let stopped: Vec<usize> =
            (0..flows.len()).filter(|&i| rates[i].is_none() && stop(&flows[i]) <= level * (1.0 + 1e-12)).collect();
        for i in stopped {
            let rate = (level * flows[i].weight).min(flows[i].cap);
            rates[i] = Some(rate);
            flows[i].uses.iter().for_each(|&(r, takes)| left[r] -= takes * rate);
        }
    }
}
