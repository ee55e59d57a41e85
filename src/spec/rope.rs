//! How fast the pairs of a rotary embedding turn: by the powers of its base (Su et al., arXiv:2104.09864), or scaled so that a
//! model takes longer sequences than those it began with. Formulas and defaults are those of Hugging Face's transformers
//! (`modeling_rope_utils.py`), whose checkpoints these are.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;
use std::hash::{Hash, Hasher};

/// A kind of scaling, with all that it needs. `original`: tokens of the sequences before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Positions divided by the factor (Chen et al., arXiv:2306.15595).
    Linear { factor: f64 },
    /// A larger base for sequences longer than `original`, the larger the longer they are ("dynamic NTK").
    Dynamic { factor: f64, original: u64 },
    /// Pairs that turn fewer than `low` times within `original` are slowed by the factor, those that turn more than `high`
    /// times are left, those between are slowed in part (Llama 3.1).
    Llama3 { factor: f64, low: f64, high: f64, original: u64 },
    /// The same by a ramp over the pairs (YaRN, Peng et al., arXiv:2309.00071, section 3).
    Yarn {
        factor: f64,
        /// Turns within `original` of the first pair that is slowed in part, and of the first that is slowed by all of it.
        beta_fast: f64,
        beta_slow: f64,
        original: u64,
        /// The ends of the ramp are whole pairs.
        truncate: bool,
        /// What cosines and sines are multiplied with.
        attention_factor: f64,
        /// Of DeepSeek's latent attention, see [`score_factor`](RopeScaling::score_factor); 0: none.
        #[serde(default, skip_serializing_if = "is_zero")]
        mscale_all_dim: f64,
    },
    /// A divisor for every pair: one of `long` for sequences longer than `original`, else one of `short` (Ding et al.,
    /// arXiv:2402.13753).
    #[serde(rename = "longrope")]
    LongRope { short: Vec<f64>, long: Vec<f64>, original: u64, attention_factor: f64 },
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

impl RopeScaling {
    /// What cosines and sines are multiplied with, and so the scores of the part of a head that turns, squared.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                *attention_factor
            }
            _ => 1.0,
        }
    }

    /// What DeepSeek's latent attention multiplies all scores with: the square of YaRN's factor of `mscale_all_dim`
    /// (`yarn_apply_mscale` of transformers, and DeepSeek's own modeling_deepseek.py).
    pub fn score_factor(&self) -> Factor {
        match self {
            RopeScaling::Yarn { factor, mscale_all_dim, .. } => Factor(yarn_mscale(*factor, *mscale_all_dim).powi(2)),
            _ => Factor::ONE,
        }
    }

    /// Radians that each pair of `dims` elements turns from one position to the next; `plain` are those without scaling,
    /// to the base `theta`.
    fn scaled(&self, plain: Vec<f64>, theta: f64, dims: u64, longest: u64) -> Vec<f64> {
        match self {
            RopeScaling::Linear { factor } => plain.iter().map(|speed| speed / factor).collect(),
            RopeScaling::Dynamic { factor, original } => {
                let (d, longer) = (dims as f64, longest.max(*original) as f64 / *original as f64);
                powers(theta * (factor * longer - (factor - 1.0)).powf(d / (d - 2.0)), dims)
            }
            RopeScaling::Llama3 { factor, low, high, original } => {
                let of = |speed: f64| {
                    let turns = *original as f64 * speed / (2.0 * PI);
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - kept) * speed / factor + kept * speed
                };
                plain.into_iter().map(of).collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, .. } => {
                let [from, to] = ramp([*beta_fast, *beta_slow], theta, dims as f64, *original as f64, *truncate);
                let of = |(i, speed): (usize, f64)| {
                    let slowed = ((i as f64 - from) / (to - from)).clamp(0.0, 1.0);
                    speed / factor * slowed + speed * (1.0 - slowed)
                };
                plain.into_iter().enumerate().map(of).collect()
            }
            RopeScaling::LongRope { short, long, original, .. } => {
                let by = if longest > *original { long } else { short };
                plain.iter().zip(by).map(|(speed, by)| speed / by).collect()
            }
        }
    }
}

/// YaRN's factor of scores for sequences `longer` times as long (section 3.4 of the paper, where `mscale` is 1).
pub fn yarn_mscale(longer: f64, mscale: f64) -> f64 {
    if longer <= 1.0 { 1.0 } else { 0.1 * mscale * longer.ln() + 1.0 }
}

/// The pairs between which YaRN slows the more the later one comes: those that turn so many times within `original`.
fn ramp(turns: [f64; 2], theta: f64, dims: f64, original: f64, truncate: bool) -> [f64; 2] {
    let pair = |turns: f64| dims * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let [from, to] = turns.map(pair);
    let [from, to] = if truncate { [from.floor(), to.ceil()] } else { [from, to] };
    let [from, to] = [from.max(0.0), to.min(dims - 1.0)];
    // No division by nothing, as there.
    if from == to { [from, to + 0.001] } else { [from, to] }
}

fn powers(theta: f64, dims: u64) -> Vec<f64> {
    (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect()
}

/// How the pairs of a head turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Turning {
    /// Radians from one position to the next, of each pair.
    pub speeds: Vec<f64>,
    /// What cosines and sines are multiplied with.
    pub factor: f64,
}

impl Turning {
    /// Of the pairs of `dims` elements, to the base `theta`. `longest`: tokens of the longest document, which is what some
    /// kinds of scaling go by.
    pub fn new(theta: f64, scaling: Option<&RopeScaling>, dims: u64, longest: u64) -> Turning {
        let plain = powers(theta, dims);
        match scaling {
            None => Turning { speeds: plain, factor: 1.0 },
            Some(scaling) => {
                Turning { speeds: scaling.scaled(plain, theta, dims, longest), factor: scaling.attention_factor() }
            }
        }
    }
}

/// A factor that is part of what makes two kernels the same: compared and hashed by its bits.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Factor(pub f64);

impl Factor {
    pub const ONE: Factor = Factor(1.0);

    pub fn is_one(&self) -> bool {
        *self == Factor::ONE
    }
}

impl Default for Factor {
    fn default() -> Factor {
        Factor::ONE
    }
}

impl PartialEq for Factor {
    fn eq(&self, other: &Factor) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Factor {}

impl Hash for Factor {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}
