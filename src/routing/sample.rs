//! Different experts drawn by weight: the law of Gumbel top-k, drawn one after the other.
//!
//! The k largest of log w + Gumbel noise are, in order, k draws in proportion to w without replacement. To draw and
//! to draw again what was there already is the same law, and costs k draws in place of one for every expert.

use crate::plan::route::DROPPED;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Draws in proportion to weights in constant time (Walker's alias method).
pub struct Sampler {
    /// Logarithms of the weights.
    logs: Vec<f64>,
    /// Of each expert: below which of 2^32 numbers its cell is its own, and whose the rest is.
    cells: Vec<(u64, u32)>,
    possible: usize,
    alike: bool,
}

/// A cell that is all its own.
const OWN: u64 = 1 << 32;

/// So many draws of what was there already, then the noise itself.
const PATIENCE: u32 = 64;

impl Sampler {
    /// Weights are not negative; those of 0 are never drawn.
    pub fn new(weights: Vec<f64>) -> Sampler {
        let logs = weights.iter().map(|w| w.ln()).collect();
        Sampler::with(weights, logs)
    }

    /// By logarithms of weights, one of which may be beyond all multiples of another: those that are too small beside the largest
    /// are drawn by noise alone, once there is nothing else.
    pub fn of_logs(logs: Vec<f64>) -> Sampler {
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Sampler::with(logs.iter().map(|log| (log - most).exp()).collect(), logs)
    }

    fn with(weights: Vec<f64>, logs: Vec<f64>) -> Sampler {
        let sum: f64 = weights.iter().sum();
        let n = weights.len();
        let mut part: Vec<f64> = weights.iter().map(|w| w / sum * n as f64).collect();
        let mut cells = vec![(OWN, 0); n];
        let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..n).partition(|i| part[*i] < 1.0);
        while let (Some(s), Some(&l)) = (small.pop(), large.last()) {
            cells[s] = ((part[s] * 4_294_967_295.0) as u64 + 1, l as u32);
            part[l] -= 1.0 - part[s];
            if part[l] < 1.0 {
                small.extend(large.pop());
            }
        }
        // What rounding left over is whole.
        small.into_iter().chain(large).for_each(|i| cells[i] = (OWN, i as u32));
        // Never drawn, not even by the one number that rounding leaves.
        cells.iter_mut().zip(&weights).filter(|(_, w)| **w <= 0.0).for_each(|(cell, _)| cell.0 = 0);
        let possible = logs.iter().filter(|log| **log > f64::NEG_INFINITY).count();
        let alike = logs.iter().all(|log| *log == logs[0] && *log > f64::NEG_INFINITY);
        Sampler { logs, cells, possible, alike }
    }

    fn one(&self, rng: &mut ChaCha8Rng) -> u32 {
        let bits: u64 = rng.random();
        let cell = (((bits >> 32) * self.cells.len() as u64) >> 32) as u32;
        let (own, other) = self.cells[cell as usize];
        if bits & (OWN - 1) < own { cell } else { other }
    }

    /// Fills `row` with different experts; where fewer are possible, the rest is dropped.
    pub fn draw(&self, rng: &mut ChaCha8Rng, row: &mut [u32]) {
        let k = row.len().min(self.possible);
        row[k..].fill(DROPPED);
        let mut patience = PATIENCE;
        let mut at = 0;
        while at < k {
            let expert = self.one(rng);
            if row[..at].contains(&expert) {
                patience -= 1;
                if patience == 0 {
                    return self.by_noise(rng, &mut row[..k]);
                }
                continue;
            }
            row[at] = expert;
            at += 1;
        }
    }

    /// The k largest of log w + Gumbel.
    fn by_noise(&self, rng: &mut ChaCha8Rng, row: &mut [u32]) {
        let mut keys: Vec<(f64, u32)> = self.keys(rng).into_iter().zip(0..).collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        row.iter_mut().zip(keys).for_each(|(to, (_, expert))| *to = expert);
    }

    /// Scores of one token, whose order is that of log w + Gumbel: where all weights are alike, any noise will do.
    pub fn keys(&self, rng: &mut ChaCha8Rng) -> Vec<f64> {
        if self.alike {
            return self.logs.iter().map(|_| f64::from(rng.random::<u32>())).collect();
        }
        let mut key = |log: &f64| log - (-rng.random::<f64>().max(f64::MIN_POSITIVE).ln()).ln();
        self.logs.iter().map(&mut key).collect()
    }
}
