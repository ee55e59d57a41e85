//! The lightning indexer of DeepSeek Sparse Attention: its sizes, its weights and its FLOPs.

use super::{LlmSpec, Mixer};
use serde::{Deserialize, Serialize};

/// DeepSeek Sparse Attention's lightning indexer (DeepSeek-V3.2-Exp, section 1): index queries of several heads, from the
/// compressed ones, score index keys of one head, and a query of attention sees the keys with the highest scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerSpec {
    pub heads: u64,
    pub head_dim: u64,
    /// Keys that a query of attention sees at most.
    pub top_k: u64,
    /// Neighbours turn together, as in attention (GLM-5); else the halves of what turns (DeepSeek-V3.2).
    #[serde(default)]
    pub interleaved: bool,
}

impl IndexerSpec {
    /// Of the LayerNorm of index keys, in DeepSeek's code and in transformers'.
    pub const NORM_EPS: f64 = 1e-6;

    /// Weights of its products: from compressed queries, and from hidden states to a key and to a weight a head.
    pub fn matmul(&self, q_lora: u64, hidden: u64) -> u64 {
        self.heads * self.head_dim * q_lora + (self.head_dim + self.heads) * hidden
    }

    /// FLOPs of the scores of a query forward, that meets `visible` keys, and backward, of which `chosen` have a gradient.
    fn score_flops(&self, visible: f64, chosen: f64) -> f64 {
        2.0 * (self.heads * self.head_dim) as f64 * (visible + 2.0 * chosen)
    }
}

impl LlmSpec {
    /// Weights of products of a layer's indexer; 0: there is none.
    pub(super) fn indexer_matmul(&self) -> u64 {
        let q_lora = self.mla.and_then(|mla| mla.q_lora).unwrap_or(0);
        self.indexer.map_or(0, |indexer| indexer.matmul(q_lora, self.hidden))
    }

    /// Of [`flops_per_token`](LlmSpec::flops_per_token) those of the indexers of all layers. No gradient goes on from their
    /// inputs: four for each weight, and of scores those of all pairs that are visible, and twice those that are chosen.
    pub fn indexer_flops_per_token(&self, seq_len: u64) -> f64 {
        let Some(indexer) = self.indexer else { return 0.0 };
        let [visible, chosen] = [None, Some(indexer.top_k)].map(|top_k| twice_seen(top_k, seq_len) / 2.0);
        let layer = (4 * self.indexer_matmul()) as f64 + indexer.score_flops(visible, chosen);
        self.count(Mixer::Attention) as f64 * layer
    }
}

/// Twice the keys that a token sees on average, s + 1, or less where it sees a window at most.
pub(super) fn twice_seen(window: Option<u64>, seq_len: u64) -> f64 {
    let (s, w) = (seq_len as f64, window.unwrap_or(seq_len).min(seq_len) as f64);
    if w == s { s + 1.0 } else { (w * (w + 1.0) + 2.0 * (s - w) * w) / s }
}
