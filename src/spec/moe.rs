//! Experts of a mixture: how many there are, how wide, and how a router chooses among them.

use super::model::is_zero;
use serde::{Deserialize, Serialize};

/// How a router makes weights of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Over all experts.
    #[default]
    Softmax,
    /// Each by itself (DeepSeek-V3, arXiv:2412.19437, equation 15).
    Sigmoid,
}

/// What a token's experts weigh: the scores of its choices, as they are or made to add up to `scale`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    pub score: Score,
    pub normalise: bool,
    pub scale: f64,
}

impl Default for Gate {
    fn default() -> Gate {
        Gate { score: Score::Softmax, normalise: true, scale: 1.0 }
    }
}

/// Layers whose feed-forward network is many experts, of which a token visits a few.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeSpec {
    pub experts: u64,
    /// Experts that a token visits.
    pub top_k: u64,
    /// Width of one expert.
    pub ffn: u64,
    /// Width of the experts that every token visits, together; 0: there are none.
    #[serde(default)]
    pub shared_ffn: u64,
    /// The first layers have a dense network, as wide as the model's `ffn`.
    #[serde(default)]
    pub dense_layers: u64,
    /// Of the others only every so-manieth has experts, the last of each group, and the rest a dense network, too
    /// (Llama 4 Maverick: 2); 0 and 1: all of them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub every: u64,
    #[serde(default)]
    pub gate: Gate,
    /// Where a token may not choose among all experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Groups>,
    /// Columns that tokens are projected to before they travel, and back from behind their experts, which work on so
    /// many (LatentMoE, Nemotron 3); 0: experts work on hidden states.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub latent: u64,
}

impl MoeSpec {
    /// Columns of what experts are given, and return.
    pub fn width(&self, hidden: u64) -> u64 {
        if self.latent > 0 { self.latent } else { hidden }
    }

    /// Weights of both projections to and from them, where there are any.
    pub(super) fn latent_matmul(&self, hidden: u64) -> u64 {
        2 * hidden * self.latent
    }
}

/// What a group of experts is ranked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScore {
    /// Its best expert: DeepSeek-V2 (arXiv:2405.04434, section 2.2.2), and the tests of DeepEP.
    Best,
    /// The sum of its two best: DeepSeek-V3.
    #[default]
    TwoBest,
}

impl GroupScore {
    fn is_usual(&self) -> bool {
        *self == GroupScore::default()
    }

    /// How many scores of a group are added up.
    pub fn scores(self) -> usize {
        match self {
            GroupScore::Best => 1,
            GroupScore::TwoBest => 2,
        }
    }
}

/// Experts stand in so many equal groups, and a token's choices in no more than `kept` of them, those that score most
/// (node-limited routing, DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Groups {
    pub count: u64,
    pub kept: u64,
    #[serde(default, skip_serializing_if = "GroupScore::is_usual")]
    pub score: GroupScore,
}
