//! Where weights and tokens come from: the seed, or files. The same whatever the parallel layout, since they
//! depend on names and positions alone.

use super::arena::Data;
use crate::plan::{Param, Plan};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustc_hash::FxHasher;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// The tokens of a sequence, and for each the one that follows it.
pub type Sequence = (Vec<u32>, Vec<u32>);

/// What a run starts from and is fed.
#[derive(Debug, Clone, Default)]
pub struct Source {
    /// The seed of every weight and token that is not given.
    pub seed: u64,
    /// The weights that are given, by the plan's names, in its shapes; beside them what routers add to their scores,
    /// where they choose by more than the scores. `None`: seeded.
    pub weights: Option<BTreeMap<String, Vec<f32>>>,
    /// The sequences that are given. One has one token more than the plan's: the last is only a target. `None`: seeded.
    pub tokens: Option<Vec<Vec<u32>>>,
    /// What was done before the first step.
    pub before: Before,
}

/// What a run goes on from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    pub steps: u64,
    /// Sequences that earlier steps were fed, whose global batch may have been another.
    pub sequences: u64,
}

impl Source {
    pub fn seeded(seed: u64) -> Source {
        Source { seed, ..Source::default() }
    }

    /// A weight's values, rounded to the dtype it is stored in.
    pub fn weight(&self, plan: &Plan, param: &Param) -> Vec<f64> {
        let values = match self.weights.as_ref().and_then(|all| all.get(&param.name)) {
            Some(given) => given.iter().map(|&x| f64::from(x)).collect(),
            None => seeded_weight(param, self.seed),
        };
        Data::from_f64(&values, plan.tensors[param.weight as usize].dtype).to_f64()
    }

    /// The given tensors that are none of the plan's weights.
    pub fn beside(&self, plan: &Plan) -> BTreeMap<String, Vec<f64>> {
        let given = self.weights.iter().flatten().filter(|(name, _)| plan.params.iter().all(|p| p.name != **name));
        given.map(|(name, values)| (name.clone(), values.iter().map(|&x| f64::from(x)).collect())).collect()
    }

    /// Every weight by name.
    pub fn weights(&self, plan: &Plan) -> BTreeMap<String, Vec<f64>> {
        plan.params.iter().map(|p| (p.name.clone(), self.weight(plan, p))).collect()
    }

    /// Sequence `index` of the global batch of a step, counted from 1. Every step has new ones.
    ///
    /// # Panics
    /// For a plan that is no training step.
    pub fn sequence(&self, plan: &Plan, step: u64, index: u64) -> Sequence {
        let inputs = plan.feed.tokens().expect("a training step is fed tokens");
        let at = self.before.sequences + (step - self.before.steps - 1) * plan.about.global_batch + index;
        let ids = match &self.tokens {
            Some(given) => given[at as usize].clone(),
            None => {
                let mut rng = stream(self.seed, &("tokens", at));
                (0..=inputs.segs.seq).map(|_| rng.random_range(0..inputs.vocab as u32)).collect()
            }
        };
        (ids[..ids.len() - 1].to_vec(), ids[1..].to_vec())
    }

    /// The global batch of a step: tokens of every sequence, and targets.
    pub fn batch(&self, plan: &Plan, step: u64) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        (0..plan.about.global_batch).map(|index| self.sequence(plan, step, index)).unzip()
    }
}

/// The ids that stand `by` tokens further than each of `ids`; beyond the end the last of them again, as there is
/// nothing further.
pub fn further(ids: &[u32], by: usize) -> Vec<u32> {
    (0..ids.len()).map(|i| ids[(i + by).min(ids.len() - 1)]).collect()
}

/// Seeded values of a weight. Norms are near one; matrices are uniform with the variance 1 / columns that keeps
/// activations of order one.
fn seeded_weight(param: &Param, seed: u64) -> Vec<f64> {
    let mut rng = stream(seed, &param.name);
    let n: u64 = param.shape.iter().product();
    let (centre, spread) = match param.shape[..] {
        [_, cols] => (0.0, (3.0 / cols as f64).sqrt()),
        _ if param.name.ends_with(".bias") => (0.0, 0.2),
        _ => (1.0, 0.2),
    };
    (0..n).map(|_| centre + spread * (2.0 * rng.random::<f64>() - 1.0)).collect()
}

/// A stream of random numbers for each thing that needs one.
pub fn stream(seed: u64, what: &impl Hash) -> ChaCha8Rng {
    let mut h = FxHasher::default();
    (seed, what).hash(&mut h);
    ChaCha8Rng::seed_from_u64(h.finish())
}
