//! A language model: its sizes, what its blocks are made of, its weights and its FLOPs.

use super::indexer::twice_seen;
use super::{Documents, Factor, IndexerSpec, MambaSpec, Mask, Mixer, MoeSpec, MtpSpec, RopeScaling, find, huggingface};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Norm {
    /// RMSNorm: a weight.
    #[default]
    Rms,
    /// LayerNorm: a weight, and a bias where the model has biases.
    Layer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mlp {
    /// Three matrices: silu(gate) * up, then down.
    #[default]
    SwiGlu,
    /// Two matrices.
    Gelu,
    /// Two matrices, the square of a ReLU between them (Primer, arXiv:2109.08668).
    Relu2,
}

/// How a token knows where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    #[default]
    Rope,
    /// A table of `max` rows is added to the embedding.
    Learned {
        max: u64,
    },
    /// A slope a head on the distance of query and key (Press et al., arXiv:2108.12409).
    Alibi,
    None,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlaSpec {
    /// Width of the compressed queries; `None`: they are projected at once.
    #[serde(default)]
    pub q_lora: Option<u64>,
    /// Width of the compressed keys and values.
    pub kv_lora: u64,
    /// Elements of a head's query and key that are turned by their position, and that are not.
    pub rope_dim: u64,
    pub nope_dim: u64,
    /// Elements of a head's value.
    pub v_dim: u64,
}

impl MlaSpec {
    /// Of the norms of what is compressed, whatever `rms_norm_eps` says of the others: DeepSeek's modeling_deepseek.py and
    /// transformers make both by `DeepseekV3RMSNorm(rank)`, whose eps is this unless stated.
    pub const NORM_EPS: f64 = 1e-6;
}

/// A decoder-only transformer. Whatever a file does not state is as in Llama; the default has no sizes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlmSpec {
    pub name: String,
    pub hidden: u64,
    pub layers: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    /// Width of the feed-forward network.
    pub ffn: u64,
    pub vocab: u64,
    /// Of either kind of norm.
    pub rms_eps: f64,
    pub rope_theta: f64,
    /// The config scales the rotary frequencies. Costs are the same, values are not.
    pub rope_scaled: bool,
    /// How, where that is computed: plans turn by these frequencies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// The output projection is the embedding table.
    pub tie_embeddings: bool,
    #[serde(default)]
    pub norm: Norm,
    #[serde(default)]
    pub mlp: Mlp,
    #[serde(default)]
    pub positions: Positions,
    /// Elements of a head that rotary embedding turns, the first ones; `None`: all.
    #[serde(default)]
    pub rotary_dim: Option<u64>,
    /// Every projection of a layer has a bias, and so has a [`Norm::Layer`].
    #[serde(default)]
    pub bias: bool,
    /// The projection to q, k and v has one, whatever the others have (Qwen2).
    #[serde(default)]
    pub qkv_bias: bool,
    /// An RMSNorm over each head's query and key, before they are turned (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// Attention and feed-forward network stand beside each other: y = x + attn(norm x) + mlp(norm x)
    /// (GPT-J, MegaScale's parallel transformer block).
    #[serde(default)]
    pub parallel_block: bool,
    /// In a parallel block, each of the two has a norm of its own (GPT-NeoX).
    #[serde(default)]
    pub own_norms: bool,
    /// A token sees itself and the window - 1 tokens before it.
    #[serde(default)]
    pub window: Option<u64>,
    /// Whether each layer has that window, where others see all that is before a token (Gemma 3: one layer in six); none:
    /// all layers are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windowed: Vec<bool>,
    /// Probability to drop an element of a branch before it is added to the residual; 0: none is.
    #[serde(default)]
    pub dropout: f64,
    /// Localized filtering before queries and keys: two convolutions over two tokens, to half the width and
    /// back (Yuan 2.0, arXiv:2311.15786).
    #[serde(default)]
    pub lfa: bool,
    #[serde(default)]
    pub moe: Option<MoeSpec>,
    /// Layers, ascending, that have a dense network wherever `moe` puts experts (Qwen's `mlp_only_layers`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dense_at: Vec<u64>,
    /// Experts have biases, and their gate a clamp before it (gpt-oss). Counts of weights leave the biases out; what both move
    /// through memory is in costs, see [`StackSpec::for_model`](super::StackSpec::for_model).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub clamped_experts: bool,
    #[serde(default)]
    pub mla: Option<MlaSpec>,
    /// Latent attention sees the keys that it chooses; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexer: Option<IndexerSpec>,
    /// What each layer is, where a layer is one mixer alone behind one norm (Nemotron-H); none: attention and a
    /// network in every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pattern: Vec<Mixer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mamba: Option<MambaSpec>,
    /// Counts of weights leave it out; FLOPs and plans have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtp: Option<MtpSpec>,
    /// What its file states that changes values, at no cost, and that nothing here computes: weights from elsewhere would make
    /// another model of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uncomputed: Vec<String>,
    /// What its file states that no plan has, and what is costed in its place; and what its modules of multi-token prediction
    /// are of it: a line each, for whoever reads a figure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

pub(super) fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl LlmSpec {
    /// A shipped model by name, or a config.json by path.
    pub fn find(name: &str) -> Result<LlmSpec> {
        let found = find("llm", name)?;
        let file = Path::new(name).file_name().and_then(|s| s.to_str()).unwrap_or(name);
        // Only the ending of a file is none of the name: llama-3.1-405b has a dot of its own.
        let stem = file.strip_suffix(".json").unwrap_or(file);
        // A folder of a model is better known by its own name than by "config".
        let folder = Path::new(&found.file).parent().and_then(|p| p.file_name()).and_then(|s| s.to_str());
        let name = if found.file.ends_with("config.json") { folder.unwrap_or(stem) } else { stem };
        Ok(LlmSpec::parse(&found.file, name, &found.text)?.with_mtp_told())
    }

    pub fn load(path: impl AsRef<Path>) -> Result<LlmSpec> {
        let path = path.as_ref().display().to_string();
        // With a slash it is a path even where a shipped model has the name.
        LlmSpec::find(&if path.contains('/') { path } else { format!("./{path}") })
    }

    /// Reads the text of a config.json; `file` is what errors call it.
    pub fn parse(file: &str, name: &str, text: &str) -> Result<LlmSpec> {
        huggingface::read(file, name, text)
    }

    /// Elements of a head's query and key.
    pub fn qk_dim(&self) -> u64 {
        self.mla.map_or(self.head_dim, |mla| mla.nope_dim + mla.rope_dim)
    }

    /// Elements of a head that rotary embedding turns.
    pub fn turned_dims(&self) -> u64 {
        self.mla.map_or(self.rotary_dim.unwrap_or(self.head_dim), |mla| mla.rope_dim)
    }

    /// What scores are multiplied with beside 1 / sqrt(d).
    pub fn score_factor(&self) -> Factor {
        let scaling = self.rope_scaling.as_ref().filter(|_| self.mla.is_some());
        scaling.map_or(Factor::ONE, RopeScaling::score_factor)
    }

    /// Heads of keys and values in attention: latent ones are brought up for every head.
    pub fn attended_kv_heads(&self) -> u64 {
        if self.mla.is_some() { self.heads } else { self.kv_heads }
    }

    /// Columns of the queries.
    pub fn q_cols(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Columns of the keys, and of the values.
    pub fn kv_cols(&self) -> u64 {
        self.kv_heads * self.head_dim
    }

    /// The projection to q, k and v has a bias.
    pub fn biased_qkv(&self) -> bool {
        self.bias || self.qkv_bias
    }

    /// Matrices of a feed-forward network.
    fn mlp_matrices(&self) -> u64 {
        match self.mlp {
            Mlp::SwiGlu => 3,
            Mlp::Gelu | Mlp::Relu2 => 2,
        }
    }

    /// Weights of a feed-forward network of width `ffn` that take part in products.
    fn mlp_matmul(&self, ffn: u64) -> u64 {
        self.mlp_matrices() * self.hidden * ffn
    }

    fn attention_matmul(&self) -> u64 {
        let h = self.hidden;
        let lfa = if self.lfa { 2 * h * h } else { 0 };
        let Some(mla) = &self.mla else { return h * (2 * self.q_cols() + 2 * self.kv_cols()) + lfa };
        let qk = self.heads * (mla.nope_dim + mla.rope_dim);
        let q = mla.q_lora.map_or(h * qk, |rank| h * rank + rank * qk);
        let kv = h * (mla.kv_lora + mla.rope_dim) + mla.kv_lora * self.heads * (mla.nope_dim + mla.v_dim);
        q + kv + self.heads * mla.v_dim * h + lfa + self.indexer_matmul()
    }

    /// Layers whose feed-forward network is dense.
    pub fn dense_layers(&self) -> u64 {
        self.count(Mixer::Mlp)
    }

    /// Layers that have such a mixer, alone or beside others.
    pub fn count(&self, mixer: Mixer) -> u64 {
        if !self.pattern.is_empty() {
            return self.pattern.iter().filter(|of| **of == mixer).count() as u64;
        }
        let experts = (0..self.layers).filter(|layer| self.has_experts(*layer)).count() as u64;
        match mixer {
            Mixer::Mamba => 0,
            Mixer::Attention => self.layers,
            Mixer::Mlp => self.layers - experts,
            Mixer::Experts => experts,
        }
    }

    /// Whether a layer has experts where others have a dense network.
    pub fn has_experts(&self, layer: u64) -> bool {
        match self.pattern.get(layer as usize) {
            Some(mixer) => *mixer == Mixer::Experts,
            None => self.moe.is_some_and(|moe| {
                let in_turn = moe.every < 2 || (layer + 1).is_multiple_of(moe.every);
                layer >= moe.dense_layers && in_turn && !self.dense_at.contains(&layer)
            }),
        }
    }

    /// Keys that a token of a layer sees at most; `None`: all that are before it.
    pub fn window_of(&self, layer: u64) -> Option<u64> {
        self.window.filter(|_| self.windowed.is_empty() || self.windowed.get(layer as usize) == Some(&true))
    }

    /// Weights of all layers that take part in products of a token that visits `visited` experts of a layer.
    pub(super) fn layers_matmul(&self, visited: impl Fn(&MoeSpec) -> u64) -> u64 {
        let dense = self.dense_layers() * self.mlp_matmul(self.ffn);
        let moe = self.moe.map_or(0, |moe| {
            let experts = self.mlp_matrices() * moe.width(self.hidden) * visited(&moe) * moe.ffn;
            let shared = self.mlp_matmul(moe.shared_ffn) + moe.latent_matmul(self.hidden);
            self.count(Mixer::Experts) * (self.hidden * moe.experts + experts + shared)
        });
        let mamba = self.mamba.map_or(0, |mamba| mamba.matmul(self.hidden));
        self.count(Mixer::Attention) * self.attention_matmul() + self.count(Mixer::Mamba) * mamba + dense + moe
    }

    /// Weights of all layers beside those of products: norms and biases. Experts have no bias.
    pub(super) fn layers_vectors(&self) -> u64 {
        if !self.pattern.is_empty() {
            let mamba = self.mamba.map_or(0, |mamba| mamba.vectors());
            return self.layers * self.norm_params() + self.count(Mixer::Mamba) * mamba;
        }
        let (h, bias) = (self.hidden, u64::from(self.bias));
        let norms = if self.parallel_block && !self.own_norms { 1 } else { 2 };
        let latent = self.mla.map_or(0, |mla| mla.kv_lora + mla.q_lora.unwrap_or(0));
        let index_norm = self.indexer.map_or(0, |indexer| 2 * indexer.head_dim);
        let per_head = if self.qk_norm { 2 * self.head_dim } else { 0 };
        let qkv = if self.biased_qkv() { self.q_cols() + 2 * self.kv_cols() } else { 0 };
        let mlp = (self.mlp_matrices() - 1) * self.ffn + h;
        self.layers * (norms * self.norm_params() + latent + index_norm + per_head + qkv + bias * (h + mlp))
    }

    /// Weights of one norm of the hidden states.
    pub fn norm_params(&self) -> u64 {
        match self.norm {
            Norm::Layer if self.bias => 2 * self.hidden,
            _ => self.hidden,
        }
    }

    /// Weights that every token meets, whatever experts it visits, and those of the experts it visits.
    fn params_with(&self, visited: impl Fn(&MoeSpec) -> u64) -> u64 {
        let tables = if self.tie_embeddings { 1 } else { 2 };
        let positions = if let Positions::Learned { max } = self.positions { max } else { 0 };
        let outside = self.norm_params() + (tables * self.vocab + positions) * self.hidden;
        self.layers_matmul(visited) + self.layers_vectors() + outside
    }

    /// Weights of matrices in layers, which Muon may update.
    pub fn matrix_params(&self) -> u64 {
        self.layers_matmul(|moe| moe.experts)
    }

    /// All weights. A tied output projection counts once.
    pub fn params(&self) -> u64 {
        self.params_with(|moe| moe.experts)
    }

    /// Weights that one token meets.
    pub fn active_params(&self) -> u64 {
        self.params_with(|moe| moe.top_k)
    }

    /// Columns that the scores and the values of attention have together, halved. Where keys are chosen, scores and values
    /// are those of what is compressed, with one key for all heads (DeepSeek-V3.2-Exp, appendix A: its MQA mode).
    fn attention_cols(&self) -> f64 {
        match &self.mla {
            None => self.q_cols() as f64,
            Some(mla) if self.indexer.is_some() => (self.heads * (2 * mla.kv_lora + mla.rope_dim)) as f64 / 2.0,
            Some(mla) => (self.heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)) as f64 / 2.0,
        }
    }

    /// What hides keys from the queries of this model.
    pub fn mask(&self, documents: &Documents) -> Mask {
        let alibi = (self.positions == Positions::Alibi).then_some(self.heads);
        Mask { causal: true, window: self.window, documents: documents.clone(), alibi }
    }

    /// Model FLOPs of one token of packed sequences, as [`flops_per_token`](LlmSpec::flops_per_token) has them of
    /// whole ones: what a document does not have to see is none of the model's work.
    pub fn packed_flops_per_token(&self, seq_len: u64, documents: &Documents) -> f64 {
        let lengths = documents.lengths();
        let share = |n: &u64| self.flops_per_token(*n) * *n as f64 / seq_len as f64;
        if lengths.is_empty() { self.flops_per_token(seq_len) } else { lengths.iter().map(share).sum() }
    }

    /// Twice the keys that a token sees on average, added up over the layers that have attention: s + 1 in each, or less
    /// in a window.
    fn twice_seen(&self, seq_len: u64) -> f64 {
        let of = |window: Option<u64>| twice_seen(window, seq_len);
        // A query sees as many keys of those that are chosen as of a window of so many.
        if let Some(indexer) = self.indexer {
            return self.count(Mixer::Attention) as f64 * of(Some(indexer.top_k));
        }
        match self.windowed.is_empty() {
            true => self.count(Mixer::Attention) as f64 * of(self.window),
            false => (0..self.layers).map(|layer| of(self.window_of(layer))).sum(),
        }
    }

    /// Model FLOPs of one token, forward and backward, nothing computed twice: six for each weight of a
    /// matrix product that it meets (the lookup in the embedding table is none), causal attention, of which a
    /// token sees (s + 1) / 2 keys on average, and three times the [scan](MambaSpec::scan_flops) of its states. With
    /// the modules of multi-token prediction, as Megatron counts; DeepSeek's own figures leave them out.
    pub fn flops_per_token(&self, seq_len: u64) -> f64 {
        let matmul = self.layers_matmul(|moe| moe.top_k) + self.vocab * self.hidden;
        let attention = 6.0 * self.attention_cols() * self.twice_seen(seq_len);
        let scan = 3 * self.count(Mixer::Mamba) * self.mamba.map_or(0, |mamba| mamba.scan_flops());
        let indexers = self.count(Mixer::Attention) * self.indexer_matmul();
        let main = 6.0 * (matmul - indexers) as f64 + attention + scan as f64;
        main + self.indexer_flops_per_token(seq_len) + self.mtp_flops_per_token(seq_len)
    }

    /// Of these, those of the experts that a token chooses, in its layers and in modules of multi-token prediction.
    pub fn chosen_flops_per_token(&self) -> f64 {
        let of = |model: &LlmSpec| model.layers_matmul(|moe| moe.top_k) - model.layers_matmul(|_| 0);
        let modules = self.mtp.as_ref().zip(self.mtp_module()).map_or(0, |(mtp, module)| mtp.depth * of(&module));
        6.0 * (of(self) + modules) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_has_the_published_sizes() {
        let m = LlmSpec::find("llama-3-8b").unwrap();
        assert_eq!(m.params(), 8_030_261_248);
        assert_eq!((m.head_dim, m.kv_cols(), m.rope_theta), (128, 1024, 500000.0));
        assert_eq!(LlmSpec::find("llama-3-70b").unwrap().params(), 70_553_706_496);
    }

    #[test]
    fn flops_of_a_token_by_hand() {
        let m = LlmSpec::find("tiny").unwrap();
        let layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128;
        let attention = 3 * (4 * 64 * 2) * (16 + 1) / 2;
        assert_eq!(m.flops_per_token(16), (6 * (2 * layer + 256 * 64) + attention) as f64);
    }

    #[test]
    fn flops_of_chosen_experts_by_hand() {
        assert_eq!(LlmSpec::find("tiny").unwrap().chosen_flops_per_token(), 0.0);
        // Three matrices of 7168 x 2048, of 8 experts in each of 58 layers and one module.
        let experts = |layers: u64| (6 * layers * 8 * 3 * 7168 * 2048) as f64;
        let m = LlmSpec::find("deepseek-v3").unwrap();
        assert_eq!(m.chosen_flops_per_token(), experts(58 + 1));
        assert_eq!(LlmSpec { mtp: None, ..m }.chosen_flops_per_token(), experts(58));
    }

    #[test]
    fn a_folder_is_a_model_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("my-model");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("config.json"), find("llm", "tiny").unwrap().text).unwrap();
        let by_folder = LlmSpec::find(path.to_str().unwrap()).unwrap();
        assert_eq!(by_folder.name, "my-model");
        assert_eq!(LlmSpec::load(path.join("config.json")).unwrap(), by_folder);
    }

    /// Weights that papers and model cards state, in billions and to the digits they state.
    #[test]
    fn shipped_models_have_the_published_weights() {
        for (name, billions, digits) in [
            ("llama-2-7b", 6.74, 2),
            ("llama-2-70b", 69.0, 0),
            ("llama-2-13b", 13.016, 3),
            ("llama-3.1-8b", 8.03, 2),
            ("llama-3.1-70b", 70.6, 1),
            ("llama-3.1-405b", 405.9, 1),
            ("llama-3.2-1b", 1.236, 3),
            ("llama-3.2-3b", 3.213, 3),
            ("mistral-7b", 7.248, 3),
            ("qwen2.5-7b", 7.616, 3),
            ("qwen2.5-32b", 32.76, 2),
            ("qwen2.5-72b", 72.71, 2),
            ("qwen3-8b", 8.19, 2),
            ("qwen3-14b", 14.77, 2),
            ("qwen3-32b", 32.76, 2),
            ("gpt3-175b", 174.6, 1),
            ("megascale-530b", 529.6, 0),
            ("mixtral-8x7b", 46.7, 1),
            ("mixtral-8x22b", 140.6, 1),
            ("qwen3-30b-a3b", 30.5, 1),
            ("qwen3-235b-a22b", 235.1, 1),
            ("deepseek-v3", 671.0, 1),
            // The indexers of its layers, beside V3's.
            ("deepseek-v3.2", 671.9, 1),
            ("yuan2-2b", 2.1, 1),
            ("yuan2-51b", 51.9, 1),
            ("yuan2-102b", 102.6, 1),
            ("nemotron-h-8b", 8.1, 1),
            ("nemotron-h-47b", 46.8, 1),
            ("nemotron-h-56b", 56.3, 1),
            ("nemotron-3-nano-30b-a3b", 31.6, 1),
            ("deepseek-v2", 236.0, 0),
            ("deepseek-v2-lite", 15.7, 1),
            ("gpt-oss-20b", 20.9, 1),
            ("gpt-oss-120b", 116.8, 1),
            ("kimi-k2", 1026.0, 0),
            ("llama-4-scout", 107.8, 1),
            ("llama-4-maverick", 400.7, 1),
            // 79.7 with its output gates, see its notes.
            ("qwen3-next-80b-a3b", 79.5, 0),
        ] {
            let params = LlmSpec::find(name).unwrap().params() as f64 / 1e9;
            assert!((params - billions).abs() <= 0.6 * 0.1f64.powi(digits), "{name}: {params} of {billions}");
        }
        let active = |name: &str| LlmSpec::find(name).unwrap().active_params() as f64 / 1e9;
        assert!((active("qwen3-235b-a22b") - 22.0).abs() < 0.5 && (active("mixtral-8x22b") - 39.0).abs() < 0.5);
        // Without the embedding, as its card has them: 3.2 of Nano's, 12 of Super's 120 (which is 1 % more).
        assert!((active("nemotron-3-nano-30b-a3b") - 3.2 - 0.352).abs() < 0.05);
        assert!((active("nemotron-3-super-120b-a12b") - 12.0 - 0.537).abs() < 0.5);
        let total = LlmSpec::find("nemotron-3-super-120b-a12b").unwrap().params() as f64 / 1e9;
        assert!((total / 120.0 - 1.0).abs() < 0.01, "{total}");
    }

    /// What a published model is made of, without its config.
    fn model(hidden: u64, layers: u64, heads: u64, kv_heads: u64, ffn: u64, vocab: u64) -> LlmSpec {
        let head_dim = hidden / heads;
        LlmSpec { hidden, layers, heads, kv_heads, head_dim, ffn, vocab, ..LlmSpec::default() }
    }

    /// Counts of the checkpoints as their model cards and safetensors indices have them.
    #[test]
    fn weights_are_those_of_the_published_checkpoints() {
        let gpt = |m: LlmSpec, max: u64| LlmSpec {
            norm: Norm::Layer,
            mlp: Mlp::Gelu,
            positions: Positions::Learned { max },
            bias: true,
            tie_embeddings: true,
            ..m
        };
        let gpt2 = gpt(model(768, 12, 12, 12, 3072, 50257), 1024);
        assert_eq!(gpt2.params(), 124_439_808, "GPT-2");
        // Two norms beside each other, no table of positions, embeddings apart.
        let pythia = LlmSpec { parallel_block: true, own_norms: true, tie_embeddings: false, ..gpt2.clone() };
        let pythia = LlmSpec { positions: Positions::Rope, vocab: 50304, ..pythia };
        assert_eq!(pythia.params(), 162_322_944, "Pythia-160M");
        let qwen2 = LlmSpec { qkv_bias: true, ..model(3584, 28, 28, 4, 18944, 152064) };
        assert_eq!(qwen2.params(), 7_615_616_512, "Qwen2-7B");
        let qwen3 = LlmSpec { qk_norm: true, ..model(4096, 36, 32, 8, 12288, 151936) };
        assert_eq!(qwen3.params(), 8_190_735_360, "Qwen3-8B");
        let moe = MoeSpec { experts: 8, top_k: 2, ffn: 14336, ..MoeSpec::default() };
        let mixtral = LlmSpec { moe: Some(moe), ..model(4096, 32, 32, 8, 14336, 32000) };
        assert_eq!((mixtral.params(), mixtral.active_params()), (46_702_792_704, 12_879_925_248), "Mixtral-8x7B");
        let moe = MoeSpec { experts: 128, top_k: 8, ffn: 768, ..MoeSpec::default() };
        let qwen3_moe =
            LlmSpec { qk_norm: true, head_dim: 128, moe: Some(moe), ..model(2048, 48, 32, 4, 6144, 151936) };
        assert_eq!(qwen3_moe.params(), 30_532_122_624, "Qwen3-30B-A3B");
    }

    /// 671 B weights, 37 B of them active (arXiv:2412.19437). The checkpoint's index says 671026419200 without the
    /// layer that predicts one token more, of which 58 * 256 are the offsets that balance the experts.
    #[test]
    fn deepseek_v3_has_671_billion_weights() {
        let moe =
            MoeSpec { experts: 256, top_k: 8, ffn: 2048, shared_ffn: 2048, dense_layers: 3, ..MoeSpec::default() };
        let mla = MlaSpec { q_lora: Some(1536), kv_lora: 512, rope_dim: 64, nope_dim: 128, v_dim: 128 };
        let m = LlmSpec { moe: Some(moe), mla: Some(mla), ..model(7168, 61, 128, 128, 18432, 129280) };
        assert_eq!(m.params() + 58 * 256, 671_026_419_200);
        assert_eq!((m.active_params() as f64 / 1e9).round(), 38.0, "37 with the embedding left out");
    }

    /// Each weight of a product counts six FLOPs, and six more for each pair of a head's element and a key.
    #[test]
    fn flops_of_a_token_follow_the_weights_it_meets() {
        let dense = model(64, 2, 4, 4, 128, 256);
        let base = dense.flops_per_token(16);
        let more = |m: LlmSpec| m.flops_per_token(16) - base;
        assert_eq!(more(LlmSpec { mlp: Mlp::Gelu, ..dense.clone() }), -(6 * 2 * 64 * 128) as f64);
        assert_eq!(more(LlmSpec { bias: true, norm: Norm::Layer, qk_norm: true, ..dense.clone() }), 0.0);
        assert_eq!(more(LlmSpec { lfa: true, ..dense.clone() }), (6 * 2 * 2 * 64 * 64) as f64);
        // Of 16 tokens the first sees 1, the second 2, and so on, up to 4: 58 pairs instead of 136.
        assert_eq!(more(LlmSpec { window: Some(4), ..dense.clone() }), -(12 * 2 * 64 * (136 - 58)) as f64 / 16.0);
        assert_eq!(more(LlmSpec { window: Some(16), ..dense.clone() }), 0.0);
        let moe = MoeSpec { experts: 8, top_k: 2, ffn: 32, shared_ffn: 64, dense_layers: 1, ..MoeSpec::default() };
        assert_eq!(
            more(LlmSpec { moe: Some(moe), ..dense }),
            (6 * 64 * 8) as f64,
            "the router alone: 2 x 32 + 64 is 128"
        );
    }
}
