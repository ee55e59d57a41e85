//! What the oracle is told of a model, and the names and shapes of its parameters.

use super::muon::Piece;
use crate::spec::{Gate, IndexerSpec, LlmSpec, MambaSpec, Mixer, MlaSpec, Mlp, Norm, Positions, RopeScaling, Turning};
use std::collections::BTreeMap;

#[derive(Debug, Clone)]
pub struct DenseConfig {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub eps: f64,
    pub theta: f64,
    pub scaling: Option<RopeScaling>,
    /// The factor of attention scores beside 1 / sqrt(d).
    pub score_factor: f64,
    /// Whether the lm head is the embedding.
    pub tie: bool,
    pub blocks: Blocks,
    /// Keys that a query sees at most, the last ones up to itself; `None`: all before it.
    pub window: Option<usize>,
    /// Whether the window holds, by layer; empty: in all layers.
    pub windowed: Vec<bool>,
    /// Lengths of the documents of a sequence; empty: it is one document.
    pub documents: Vec<usize>,
    pub mla: Option<Mla>,
    /// The indexer that chooses keys of latent attention; `None`: none are chosen.
    pub indexer: Option<IndexerSpec>,
    pub experts: Option<Experts>,
    /// Number of first layers with a dense network where the others have experts.
    pub dense_layers: usize,
    /// Layers from one with experts to the next, behind the first dense ones: only those whose number, counted from 1,
    /// is a multiple of it have experts, the rest a dense network; 0 or 1: all have experts.
    pub every: usize,
    /// Layers, by number from 0, that have a dense network besides.
    pub dense_at: Vec<usize>,
    /// The mixer of each layer that is one mixer alone, by layer; empty: attention and a network in every one.
    pub pattern: Vec<Mixer>,
    pub mamba: Option<MambaSpec>,
    pub mtp: Mtp,
    /// Parameters that Muon updates, and not Adam, by their matrices.
    pub muon: BTreeMap<String, Vec<Piece>>,
}

/// Modules of multi-token prediction; their layers go on counting, and stand behind the others in a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Mtp {
    pub depth: usize,
    /// Layers of a module.
    pub layers: usize,
    /// The factor of one module's loss.
    pub part: f64,
}

/// Multi-head latent attention: the compressed widths, and elements of a head that turn, that do not, and of its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mla {
    pub q_lora: Option<usize>,
    pub kv_lora: usize,
    pub rope: usize,
    pub nope: usize,
    pub v: usize,
}

impl From<MlaSpec> for Mla {
    fn from(m: MlaSpec) -> Mla {
        let [kv_lora, rope, nope, v] = [m.kv_lora, m.rope_dim, m.nope_dim, m.v_dim].map(|n| n as usize);
        Mla { q_lora: m.q_lora.map(|n| n as usize), kv_lora, rope, nope, v }
    }
}

/// Experts in place of one network.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    pub count: usize,
    pub top_k: usize,
    pub ffn: usize,
    /// Width of the expert that every token visits besides; 0: there is no such expert.
    pub shared: usize,
    /// Columns that tokens are projected to before their experts, and back from; 0: they are not projected.
    pub latent: usize,
    pub gate: Gate,
    /// Equal groups of experts: how many there are, how many of them a token may choose from, and how many of a group's
    /// highest scores are summed up to choose groups. `None`: a token chooses from all experts.
    pub groups: Option<[usize; 3]>,
    /// Whether rows travel to experts in FP8, tokens forward and their gradients backward.
    pub fp8_rows: bool,
    /// The experts of each token, by sequence, [s, top_k], of every layer that has experts, or of one layer for all of
    /// them; a number beyond the experts': no expert. Empty: the router chooses, though no gradient knows of that.
    pub choices: Vec<Vec<Vec<u32>>>,
}

/// How the layers of a GPT differ from those of a Llama.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blocks {
    pub layer_norm: bool,
    pub gelu: bool,
    /// Whether the activation is the square of a ReLU, of experts too.
    pub relu2: bool,
    /// Whether every projection of a layer has a bias, and every layer norm.
    pub bias: bool,
    pub qkv_bias: bool,
    /// Whether attention and network stand beside each other, on one norm or, with `own_norms`, on one each.
    pub parallel: bool,
    pub own_norms: bool,
    /// Elements of a head that turn, at most all.
    pub rotary: usize,
    /// Whether each head of q and of k has a norm before it turns.
    pub qk_norm: bool,
    /// Rows of a table of learned positions; 0: there is none.
    pub positions: usize,
    /// Whether scores lean on the distance of query and key.
    pub alibi: bool,
    pub dropout: f64,
    /// Dropout of attention's probabilities, where attention is not fused.
    pub attention_dropout: f64,
}

impl Blocks {
    pub const LLAMA: Blocks = Blocks {
        layer_norm: false,
        gelu: false,
        relu2: false,
        bias: false,
        qkv_bias: false,
        parallel: false,
        own_norms: false,
        rotary: usize::MAX,
        qk_norm: false,
        positions: 0,
        alibi: false,
        dropout: 0.0,
        attention_dropout: 0.0,
    };
}

impl From<&LlmSpec> for Blocks {
    fn from(m: &LlmSpec) -> Blocks {
        Blocks {
            layer_norm: m.norm == Norm::Layer,
            gelu: m.mlp == Mlp::Gelu,
            relu2: m.mlp == Mlp::Relu2,
            bias: m.bias,
            qkv_bias: m.biased_qkv(),
            parallel: m.parallel_block,
            own_norms: m.own_norms,
            rotary: match m.positions {
                Positions::Rope => m.rotary_dim.map_or(usize::MAX, |dim| dim as usize),
                _ => 0,
            },
            qk_norm: m.qk_norm,
            positions: if let Positions::Learned { max } = m.positions { max as usize } else { 0 },
            alibi: m.positions == Positions::Alibi,
            dropout: m.dropout,
            attention_dropout: 0.0,
        }
    }
}

impl From<&LlmSpec> for DenseConfig {
    fn from(m: &LlmSpec) -> DenseConfig {
        let ahead = m.mtp.as_ref().map_or(vec![], |mtp| vec![mtp.pattern.clone(); mtp.depth as usize]);
        DenseConfig {
            layers: m.layers as usize,
            hidden: m.hidden as usize,
            heads: m.heads as usize,
            kv_heads: m.attended_kv_heads() as usize,
            head_dim: m.qk_dim() as usize,
            ffn: m.ffn as usize,
            vocab: m.vocab as usize,
            eps: m.rms_eps,
            theta: m.rope_theta,
            scaling: m.rope_scaling.clone(),
            score_factor: m.score_factor().0,
            tie: m.tie_embeddings,
            blocks: m.into(),
            window: m.window.map(|w| w as usize),
            windowed: m.windowed.clone(),
            documents: vec![],
            mla: m.mla.map(Mla::from),
            indexer: m.indexer,
            pattern: m.pattern.iter().chain(ahead.iter().flatten()).copied().collect(),
            mamba: m.mamba,
            mtp: m.mtp.as_ref().map_or(Mtp::default(), |mtp| Mtp {
                depth: mtp.depth as usize,
                layers: mtp.layers() as usize,
                part: mtp.part(),
            }),
            dense_layers: m.moe.map_or(0, |moe| moe.dense_layers.min(m.layers) as usize),
            every: m.moe.map_or(0, |moe| moe.every as usize),
            dense_at: m.dense_at.iter().map(|layer| *layer as usize).collect(),
            muon: BTreeMap::new(),
            experts: m.moe.map(|moe| Experts {
                count: moe.experts as usize,
                top_k: moe.top_k as usize,
                ffn: moe.ffn as usize,
                shared: moe.shared_ffn as usize,
                latent: moe.latent as usize,
                gate: moe.gate,
                groups: moe.groups.map(|g| [g.count as usize, g.kept as usize, g.score.scores()]),
                fp8_rows: false,
                choices: vec![],
            }),
        }
    }
}

impl DenseConfig {
    /// Every parameter with its shape; a vector of n is [1, n].
    pub fn shapes(&self) -> BTreeMap<String, (usize, usize)> {
        let (h, f, q) = (self.hidden, self.ffn, self.heads * self.head_dim);
        let o = self.heads * self.v_dim();
        let (qkv, wide) = (q + 2 * self.kv_heads * self.head_dim, if self.gated() { 2 * f } else { f });
        let mut shapes = BTreeMap::from([(EMBED.to_string(), (self.vocab, h))]);
        let norm = |shapes: &mut BTreeMap<String, (usize, usize)>, name: &str| {
            shapes.insert(name.into(), (1, h));
            if self.norm_bias() {
                shapes.insert(bias_of(name), (1, h));
            }
        };
        norm(&mut shapes, FINAL_NORM);
        if !self.tie {
            shapes.insert(LM_HEAD.to_string(), (self.vocab, h));
        }
        if self.blocks.positions > 0 {
            shapes.insert(POSITIONS.to_string(), (self.blocks.positions, h));
        }
        for (i, &mixer) in self.pattern.iter().enumerate() {
            norm(&mut shapes, &layer(i, NORM));
            let weights = self.alone_shapes(mixer).into_iter();
            shapes.extend(weights.map(|(name, rows, cols)| (layer(i, name), (rows, cols))));
        }
        for k in 0..self.mtp.depth {
            let own = |name| layer(self.layers + k * self.mtp.layers, name);
            for name in [TOKEN_NORM, HIDDEN_NORM, AHEAD_NORM] {
                norm(&mut shapes, &own(name));
            }
            shapes.extend([TOKEN_PROJ, HIDDEN_PROJ].map(|name| (own(name), (h, h))));
        }
        let all = self.layers + self.mtp.depth * self.mtp.layers;
        for i in if self.pattern.is_empty() { 0..all } else { 0..0 } {
            norm(&mut shapes, &layer(i, IN_NORM));
            if !self.blocks.parallel || self.blocks.own_norms {
                norm(&mut shapes, &layer(i, POST_NORM));
            }
            if self.blocks.qk_norm {
                shapes.insert(layer(i, Q_NORM), (1, self.head_dim));
                shapes.insert(layer(i, K_NORM), (1, self.head_dim));
            }
            if let Some(e) = self.experts_of(i) {
                let mut add = |name: &str, shape| _ = shapes.insert(layer(i, name), shape);
                add(ROUTER, (e.count, h));
                add(EXPERTS_UP, (e.count * 2 * e.ffn, h));
                add(EXPERTS_DOWN, (e.count * h, e.ffn));
                if e.shared > 0 {
                    add(SHARED_UP, (2 * e.shared, h));
                    add(SHARED_DOWN, (h, e.shared));
                }
            }
            let network = if self.experts_of(i).is_some() { vec![] } else { vec![(self.up(), wide, h), (DOWN, h, f)] };
            let projections = match self.mla {
                None => vec![(QKV, qkv, h)],
                Some(mla) => self.latent_shapes(&mla),
            };
            for (name, out, inp) in projections.into_iter().chain([(OUT, h, o)]).chain(network) {
                shapes.insert(layer(i, name), (out, inp));
                if self.blocks.bias || (name == QKV && self.blocks.qkv_bias) {
                    shapes.insert(bias_of(&layer(i, name)), (1, out));
                }
            }
        }
        shapes
    }

    /// Weights of a layer that is one mixer, beside its norm.
    fn alone_shapes(&self, mixer: Mixer) -> Vec<(&'static str, usize, usize)> {
        let (h, q, kv) = (self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match (mixer, self.mamba, &self.experts) {
            (Mixer::Mamba, Some(m), _) => {
                let [inner, conv, proj, heads, taps] =
                    [m.inner(), m.conv_cols(), m.proj_cols(), m.heads, m.conv].map(|n| n as usize);
                vec![
                    (IN_PROJ, proj, h),
                    (CONV, conv, taps),
                    (CONV_BIAS, 1, conv),
                    (DT_BIAS, 1, heads),
                    (A_LOG, 1, heads),
                    (SKIP, 1, heads),
                    (GATED_NORM, 1, inner),
                    (OUT_PROJ, h, inner),
                ]
            }
            (Mixer::Attention, ..) => vec![(QKV, q + 2 * kv, h), (OUT, h, q)],
            (Mixer::Mlp, ..) => vec![(UP, self.ffn, h), (DOWN, h, self.ffn)],
            (Mixer::Experts, _, Some(e)) => {
                let width = if e.latent > 0 { e.latent } else { h };
                // Whether the network has a gate beside what goes up.
                let (up, shared_up, wide) =
                    if self.gated() { (EXPERTS_UP, SHARED_UP, 2) } else { (ONE_UP, SHARED_ONE_UP, 1) };
                let mut all = vec![
                    (ROUTER, e.count, h),
                    (up, e.count * wide * e.ffn, width),
                    (EXPERTS_DOWN, e.count * width, e.ffn),
                ];
                if e.latent > 0 {
                    all.extend([(SQUEEZE, e.latent, h), (UNSQUEEZE, h, e.latent)]);
                }
                if e.shared > 0 {
                    all.extend([(shared_up, wide * e.shared, h), (SHARED_DOWN, h, e.shared)]);
                }
                all
            }
            _ => panic!("the pattern has {mixer:?}, whose sizes are missing"),
        }
    }

    /// Whether the network has a gate beside what goes up.
    pub fn gated(&self) -> bool {
        !(self.blocks.gelu || self.blocks.relu2)
    }

    /// The number of layers with experts before `layer`.
    pub fn experts_before(&self, layer: usize) -> usize {
        (0..layer).filter(|i| self.experts_of(*i).is_some()).count()
    }

    /// Keys that a query of a layer sees at most; `None`: all before it.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|_| self.windowed.is_empty() || self.windowed.get(layer) == Some(&true))
    }

    /// Elements of a head's value.
    pub fn v_dim(&self) -> usize {
        self.mla.map_or(self.head_dim, |mla| mla.v)
    }

    /// The experts of a layer; `None`: it has a dense network, or is another mixer.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        // Modules of multi-token prediction stand behind the last layer, and have experts where the model has.
        let out_of_turn = self.every > 1 && layer < self.layers && !(layer + 1).is_multiple_of(self.every);
        let skipped = out_of_turn || self.dense_at.contains(&layer);
        let has = self.pattern.get(layer).map_or(layer >= self.dense_layers && !skipped, |of| *of == Mixer::Experts);
        self.experts.as_ref().filter(|_| has)
    }

    fn latent_shapes(&self, mla: &Mla) -> Vec<(&'static str, usize, usize)> {
        let (a, h) = (self.heads, self.hidden);
        let mut all = vec![
            (KV_DOWN, mla.kv_lora + mla.rope, h),
            (KV_NORM, 1, mla.kv_lora),
            (KV_UP, a * (mla.nope + mla.v), mla.kv_lora),
        ];
        match mla.q_lora {
            Some(ql) => all.extend([(Q_DOWN, ql, h), (Q_LATENT_NORM, 1, ql), (Q_UP, a * (mla.nope + mla.rope), ql)]),
            None => all.push((Q_DIRECT, a * (mla.nope + mla.rope), h)),
        }
        if let (Some(indexer), Some(ql)) = (&self.indexer, mla.q_lora) {
            let (heads, d) = (indexer.heads as usize, indexer.head_dim as usize);
            let norm = [(INDEX_K_NORM, 1, d), (INDEX_K_BIAS, 1, d)];
            all.extend([(INDEX_Q, heads * d, ql), (INDEX_K, d, h), (INDEX_HEADS, heads, h)].into_iter().chain(norm));
        }
        all
    }

    /// Where the document of a position begins.
    pub fn document_start(&self, position: usize) -> usize {
        let mut start = 0;
        for length in &self.documents {
            if position < start + length {
                break;
            }
            start += length;
        }
        start
    }

    fn norm_bias(&self) -> bool {
        self.blocks.layer_norm && self.blocks.bias
    }

    /// The name of the projection before the activation.
    pub fn up(&self) -> &'static str {
        if self.gated() { GATE_UP } else { UP }
    }

    /// Elements of a head that turn.
    pub fn rotary(&self) -> usize {
        self.blocks.rotary.min(self.head_dim)
    }

    /// How the pairs of `dims` elements turn in sequences of `len` tokens. The frequencies are the kernels' own, which
    /// tests hold to those of transformers.
    pub fn turning(&self, dims: usize, len: usize) -> Turning {
        let longest = self.documents.iter().copied().max().unwrap_or(len);
        Turning::new(self.theta, self.scaling.as_ref(), dims as u64, longest as u64)
    }

    /// The factor that products of queries and keys are multiplied with.
    pub fn score_scale(&self) -> f64 {
        self.score_factor / (self.head_dim as f64).sqrt()
    }

    pub fn head_weight(&self) -> &'static str {
        if self.tie { EMBED } else { LM_HEAD }
    }
}

pub const EMBED: &str = "model.embed_tokens.weight";
pub const FINAL_NORM: &str = "model.norm.weight";
pub const LM_HEAD: &str = "lm_head.weight";
pub const IN_NORM: &str = "input_layernorm.weight";
pub const QKV: &str = "self_attn.qkv_proj.weight";
pub const Q_NORM: &str = "self_attn.q_norm.weight";
pub const K_NORM: &str = "self_attn.k_norm.weight";
pub const Q_DIRECT: &str = "self_attn.q_proj.weight";
pub const Q_DOWN: &str = "self_attn.q_a_proj.weight";
pub const Q_LATENT_NORM: &str = "self_attn.q_a_layernorm.weight";
pub const Q_UP: &str = "self_attn.q_b_proj.weight";
pub const KV_DOWN: &str = "self_attn.kv_a_proj_with_mqa.weight";
pub const KV_NORM: &str = "self_attn.kv_a_layernorm.weight";
pub const KV_UP: &str = "self_attn.kv_b_proj.weight";
pub const OUT: &str = "self_attn.o_proj.weight";
pub const INDEX_Q: &str = "self_attn.indexer.wq_b.weight";
pub const INDEX_K: &str = "self_attn.indexer.wk.weight";
pub const INDEX_K_NORM: &str = "self_attn.indexer.k_norm.weight";
pub const INDEX_K_BIAS: &str = "self_attn.indexer.k_norm.bias";
pub const INDEX_HEADS: &str = "self_attn.indexer.weights_proj.weight";
pub const POST_NORM: &str = "post_attention_layernorm.weight";
pub const UP: &str = "mlp.up_proj.weight";
pub const POSITIONS: &str = "model.embed_positions.weight";
pub const GATE_UP: &str = "mlp.gate_up_proj.weight";
pub const DOWN: &str = "mlp.down_proj.weight";
pub const ROUTER: &str = "mlp.gate.weight";
/// The name of the numbers that are added to scores where a router chooses.
pub const ROUTER_BIAS: &str = "mlp.gate.e_score_correction_bias";
pub const EXPERTS_UP: &str = "mlp.experts.gate_up_proj.weight";
pub const EXPERTS_DOWN: &str = "mlp.experts.down_proj.weight";
pub const SHARED_UP: &str = "mlp.shared_experts.gate_up_proj.weight";
pub const SHARED_DOWN: &str = "mlp.shared_experts.down_proj.weight";

pub const TOKEN_NORM: &str = "enorm.weight";
pub const HIDDEN_NORM: &str = "hnorm.weight";
pub const AHEAD_NORM: &str = "shared_head.norm.weight";
/// The names of both halves of `eh_proj`.
pub const TOKEN_PROJ: &str = "eh_proj_e.weight";
pub const HIDDEN_PROJ: &str = "eh_proj_h.weight";

pub const NORM: &str = "norm.weight";
pub const IN_PROJ: &str = "mixer.in_proj.weight";
pub const CONV: &str = "mixer.conv1d.weight";
pub const CONV_BIAS: &str = "mixer.conv1d.bias";
pub const DT_BIAS: &str = "mixer.dt_bias";
pub const A_LOG: &str = "mixer.A_log";
pub const SKIP: &str = "mixer.D";
pub const GATED_NORM: &str = "mixer.norm.weight";
pub const OUT_PROJ: &str = "mixer.out_proj.weight";
pub const SQUEEZE: &str = "mlp.fc1_latent_proj.weight";
pub const UNSQUEEZE: &str = "mlp.fc2_latent_proj.weight";
pub const ONE_UP: &str = "mlp.experts.up_proj.weight";
pub const SHARED_ONE_UP: &str = "mlp.shared_experts.up_proj.weight";

/// The name of the bias that belongs to a weight.
pub fn bias_of(name: &str) -> String {
    name.replace(".weight", ".bias")
}

pub fn layer(i: usize, name: &str) -> String {
    format!("model.layers.{i}.{name}")
}
