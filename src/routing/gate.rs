//! From a router's scores to its choices: softmax or sigmoid, groups of experts, a bias that only selects.

use crate::error::{Error, Result};
pub use crate::spec::GroupScore;
use crate::spec::Groups;

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    Softmax,
    Sigmoid,
}

/// Choices from `limit` of `groups` equal groups only: with a group a node, a token reaches so many nodes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupLimit {
    pub groups: u32,
    pub limit: u32,
    pub score: GroupScore,
}

impl From<Groups> for GroupLimit {
    fn from(Groups { count, kept, score }: Groups) -> GroupLimit {
        GroupLimit { groups: count as u32, limit: kept as u32, score }
    }
}

impl GroupLimit {
    /// An error where a token could not choose `topk` different experts.
    pub fn check(&self, experts: u32, topk: u32) -> Result<()> {
        let (groups, limit) = (self.groups, self.limit);
        let bad = |why: String| Err(Error::spec("routing", "node-limit", why));
        if groups == 0 || !experts.is_multiple_of(groups) {
            return bad(format!("{experts} experts do not divide into {groups} groups"));
        }
        if limit == 0 || limit > groups {
            return bad(format!("{limit} of {groups} groups; choose 1 to {groups}"));
        }
        if limit * (experts / groups) < topk {
            let enough = topk.div_ceil(experts / groups);
            return bad(format!("{limit} groups of {} experts have no {topk}; use {enough} or more", experts / groups));
        }
        Ok(())
    }
}

pub fn scores(gate: Gate, logits: &[f64]) -> Vec<f64> {
    match gate {
        Gate::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Gate::Softmax => {
            let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let parts: Vec<f64> = logits.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = parts.iter().sum();
            parts.into_iter().map(|p| p / sum).collect()
        }
    }
}

/// The experts of one token, best first, and their weights: unbiased scores that add up to 1. `bias`, empty or one
/// for each expert, takes part in the selection alone (auxiliary-loss-free balancing).
pub fn choose(scores: &[f64], bias: &[f64], topk: usize, limit: Option<GroupLimit>) -> (Vec<u32>, Vec<f32>) {
    let biased = |e: usize| scores[e] + bias.get(e).copied().unwrap_or(0.0);
    let keys: Vec<f64> = (0..scores.len()).map(biased).collect();
    let open: Vec<u32> = match limit {
        Some(limit) => open_experts(&keys, limit),
        None => (0..keys.len() as u32).collect(),
    };
    let chosen = best(&keys, open, topk);
    let sum: f64 = chosen.iter().map(|e| scores[*e as usize]).sum();
    let weight = |e: &u32| if sum > 0.0 { (scores[*e as usize] / sum) as f32 } else { 1.0 / chosen.len() as f32 };
    let weights = chosen.iter().map(weight).collect();
    (chosen, weights)
}

/// The experts of the groups that are chosen from.
fn open_experts(keys: &[f64], limit: GroupLimit) -> Vec<u32> {
    let size = keys.len() / limit.groups as usize;
    let score = |group: &[f64]| {
        let (mut first, mut second) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
        for &key in group {
            if key > first {
                (first, second) = (key, first);
            } else if key > second {
                second = key;
            }
        }
        match limit.score {
            GroupScore::Best => first,
            GroupScore::TwoBest => first + second.max(if size > 1 { second } else { 0.0 }),
        }
    };
    let groups: Vec<f64> = keys.chunks(size).map(score).collect();
    let open = best(&groups, (0..limit.groups).collect(), limit.limit as usize);
    open.into_iter().flat_map(|g| g * size as u32..(g + 1) * size as u32).collect()
}

/// The `n` of `among` with the largest keys, largest first; of equals the one with the lower number.
fn best(keys: &[f64], mut among: Vec<u32>, n: usize) -> Vec<u32> {
    let order = |a: &u32, b: &u32| keys[*b as usize].total_cmp(&keys[*a as usize]).then(a.cmp(b));
    if n < among.len() && n > 0 {
        among.select_nth_unstable_by(n - 1, order);
    }
    among.truncate(n);
    among.sort_unstable_by(order);
    among
}
