//! The oracle: one training step of a dense Llama or GPT, on one rank, in f64, with none of the machinery that
//! it judges. Nothing here is fast; every line is meant to be seen to be right.
//!
//! Legend: s tokens of one sequence, h hidden, a heads, k KV heads, d head dim, f feed-forward width,
//! v vocabulary. Weights are [out, in], as Hugging Face stores them.

use crate::plan::{Adam, Operand, dropout};
use crate::spec::{AttentionSpec, Gate, LlmSpec, Mlp, Norm, Positions, Score};
use ndarray::{Array1, Array2, Axis, s};
use std::collections::BTreeMap;

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
    /// The lm head is the embedding.
    pub tie: bool,
    pub blocks: Blocks,
    /// A query sees so many keys at most, the last ones.
    pub window: Option<usize>,
    /// Lengths of the documents of a sequence; none: it is one.
    pub documents: Vec<usize>,
    pub experts: Option<Experts>,
}

/// Experts in place of one network.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    pub count: usize,
    pub top_k: usize,
    pub ffn: usize,
    /// Of what every token visits besides; 0: nothing.
    pub shared: usize,
    pub gate: Gate,
    /// By sequence, [s, top_k]: the experts of each token, in every layer; beyond their number: none.
    pub choices: Vec<Vec<u32>>,
}

/// What the layers of a GPT have otherwise than those of a Llama.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blocks {
    pub layer_norm: bool,
    pub gelu: bool,
    /// Of every projection of a layer, and of layer norms.
    pub bias: bool,
    pub qkv_bias: bool,
    /// Attention and network beside each other, on one norm or on one each.
    pub parallel: bool,
    pub own_norms: bool,
    /// Elements of a head that turn, at most all.
    pub rotary: usize,
    /// Each head of q and of k has a norm before it turns.
    pub qk_norm: bool,
    /// Rows of a table of learned positions; 0: there is none.
    pub positions: usize,
    pub dropout: f64,
    /// Of probabilities, where attention is not fused.
    pub attention_dropout: f64,
}

impl Blocks {
    pub const LLAMA: Blocks = Blocks {
        layer_norm: false,
        gelu: false,
        bias: false,
        qkv_bias: false,
        parallel: false,
        own_norms: false,
        rotary: usize::MAX,
        qk_norm: false,
        positions: 0,
        dropout: 0.0,
        attention_dropout: 0.0,
    };
}

impl From<&LlmSpec> for Blocks {
    fn from(m: &LlmSpec) -> Blocks {
        Blocks {
            layer_norm: m.norm == Norm::Layer,
            gelu: m.mlp == Mlp::Gelu,
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
            dropout: m.dropout,
            attention_dropout: 0.0,
        }
    }
}

impl From<&LlmSpec> for DenseConfig {
    fn from(m: &LlmSpec) -> DenseConfig {
        DenseConfig {
            layers: m.layers as usize,
            hidden: m.hidden as usize,
            heads: m.heads as usize,
            kv_heads: m.kv_heads as usize,
            head_dim: m.head_dim as usize,
            ffn: m.ffn as usize,
            vocab: m.vocab as usize,
            eps: m.rms_eps,
            theta: m.rope_theta,
            tie: m.tie_embeddings,
            blocks: m.into(),
            window: m.window.map(|w| w as usize),
            documents: vec![],
            experts: m.moe.map(|moe| Experts {
                count: moe.experts as usize,
                top_k: moe.top_k as usize,
                ffn: moe.ffn as usize,
                shared: moe.shared_ffn as usize,
                gate: moe.gate,
                choices: vec![],
            }),
        }
    }
}

pub struct StepResult {
    /// Mean over all tokens of the batch.
    pub loss: f64,
    /// Per sequence, [s, h]: what the last layer hands to the final norm.
    pub hidden: Vec<Vec<f64>>,
    pub grads: BTreeMap<String, Vec<f64>>,
    /// After the step of the optimizer.
    pub new_params: BTreeMap<String, Vec<f64>>,
}

/// The sequences of a step: tokens, and the targets that belong to them.
pub type Batch = (Vec<Vec<u32>>, Vec<Vec<u32>>);

/// Steps of training one after the other, each on its own batch.
pub fn train(
    cfg: &DenseConfig,
    params: &BTreeMap<String, Vec<f64>>,
    batches: impl IntoIterator<Item = Batch>,
    adam: &Adam,
) -> Vec<StepResult> {
    let mut moments = BTreeMap::new();
    let mut all: Vec<StepResult> = vec![];
    for (i, (tokens, targets)) in (1..).zip(batches) {
        let params = all.last().map_or(params, |last| &last.new_params);
        let mut result = step(cfg, params, &tokens, &targets, adam);
        for (name, new) in &mut result.new_params {
            *new = adam_step(&params[name], &result.grads[name], moments.entry(name.clone()).or_default(), i, adam);
        }
        all.push(result);
    }
    all
}

/// Forward, backward and the first optimizer step. `params` are those that [`DenseConfig::shapes`] lists.
///
/// # Panics
/// Where a parameter is missing or has another size, or a token is outside the vocabulary.
pub fn step(
    cfg: &DenseConfig,
    params: &BTreeMap<String, Vec<f64>>,
    tokens: &[Vec<u32>],
    targets: &[Vec<u32>],
    adam: &Adam,
) -> StepResult {
    let weights: Tensors = cfg.shapes().into_iter().map(|(name, shape)| load(params, name, shape)).collect();
    let grads = weights.iter().map(|(name, w)| (name.clone(), Array2::zeros(w.raw_dim()))).collect();
    let count = tokens.iter().map(Vec::len).sum::<usize>() as f64;
    let mut model = Model { cfg, weights: &weights, grads, loss: 0.0, count };
    let numbered = tokens.iter().zip(targets).enumerate();
    let hidden = numbered.map(|(i, (t, y))| model.sequence(i, t, y).into_raw_vec_and_offset().0).collect();
    let loss = model.loss;
    let grads: BTreeMap<_, _> = model.grads.into_iter().map(|(n, g)| (n, g.into_raw_vec_and_offset().0)).collect();
    let first =
        |(name, g): (&String, &Vec<f64>)| (name.clone(), adam_step(&params[name], g, &mut Moments::default(), 1, adam));
    let new_params = grads.iter().map(first).collect();
    StepResult { loss, hidden, grads, new_params }
}

impl DenseConfig {
    /// Every parameter with its shape; a vector of n is [1, n].
    pub fn shapes(&self) -> BTreeMap<String, (usize, usize)> {
        let (h, f, q) = (self.hidden, self.ffn, self.heads * self.head_dim);
        let (qkv, wide) = (q + 2 * self.kv_heads * self.head_dim, if self.blocks.gelu { f } else { 2 * f });
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
        for i in 0..self.layers {
            norm(&mut shapes, &layer(i, IN_NORM));
            if !self.blocks.parallel || self.blocks.own_norms {
                norm(&mut shapes, &layer(i, POST_NORM));
            }
            if self.blocks.qk_norm {
                shapes.insert(layer(i, Q_NORM), (1, self.head_dim));
                shapes.insert(layer(i, K_NORM), (1, self.head_dim));
            }
            if let Some(e) = &self.experts {
                let mut add = |name: &str, shape| _ = shapes.insert(layer(i, name), shape);
                add(ROUTER, (e.count, h));
                add(EXPERTS_UP, (e.count * 2 * e.ffn, h));
                add(EXPERTS_DOWN, (e.count * h, e.ffn));
                if e.shared > 0 {
                    add(SHARED_UP, (2 * e.shared, h));
                    add(SHARED_DOWN, (h, e.shared));
                }
            }
            let network = if self.experts.is_some() { vec![] } else { vec![(self.up(), wide, h), (DOWN, h, f)] };
            for (name, out, inp) in [(QKV, qkv, h), (OUT, h, q)].into_iter().chain(network) {
                shapes.insert(layer(i, name), (out, inp));
                if self.blocks.bias || (name == QKV && self.blocks.qkv_bias) {
                    shapes.insert(bias_of(&layer(i, name)), (1, out));
                }
            }
        }
        shapes
    }

    /// Where the document of a position begins.
    fn document_start(&self, position: usize) -> usize {
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

    /// What stands before the activation.
    fn up(&self) -> &'static str {
        if self.blocks.gelu { UP } else { GATE_UP }
    }

    /// Elements of a head that turn.
    fn rotary(&self) -> usize {
        self.blocks.rotary.min(self.head_dim)
    }

    fn head_weight(&self) -> &'static str {
        if self.tie { EMBED } else { LM_HEAD }
    }
}

const EMBED: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";
const LM_HEAD: &str = "lm_head.weight";
const IN_NORM: &str = "input_layernorm.weight";
const QKV: &str = "self_attn.qkv_proj.weight";
const Q_NORM: &str = "self_attn.q_norm.weight";
const K_NORM: &str = "self_attn.k_norm.weight";
const OUT: &str = "self_attn.o_proj.weight";
const POST_NORM: &str = "post_attention_layernorm.weight";
const UP: &str = "mlp.up_proj.weight";
const POSITIONS: &str = "model.embed_positions.weight";
const GATE_UP: &str = "mlp.gate_up_proj.weight";
const DOWN: &str = "mlp.down_proj.weight";
const ROUTER: &str = "mlp.gate.weight";
const EXPERTS_UP: &str = "mlp.experts.gate_up_proj.weight";
const EXPERTS_DOWN: &str = "mlp.experts.down_proj.weight";
const SHARED_UP: &str = "mlp.shared_experts.gate_up_proj.weight";
const SHARED_DOWN: &str = "mlp.shared_experts.down_proj.weight";

/// The bias that belongs to a weight.
fn bias_of(name: &str) -> String {
    name.replace(".weight", ".bias")
}

fn layer(i: usize, name: &str) -> String {
    format!("model.layers.{i}.{name}")
}

type Mat = Array2<f64>;
type Tensors = BTreeMap<String, Mat>;

fn load(params: &BTreeMap<String, Vec<f64>>, name: String, shape: (usize, usize)) -> (String, Mat) {
    let given = params.get(&name).unwrap_or_else(|| panic!("the parameter {name} is missing"));
    let weight = Array2::from_shape_vec(shape, given.clone());
    let weight = weight.unwrap_or_else(|_| panic!("{name} has {} elements, not {shape:?}", given.len()));
    (name, weight)
}

/// The running means of a gradient and of its square; none before the first step.
#[derive(Default)]
struct Moments {
    m: Vec<f64>,
    v: Vec<f64>,
}

/// Step `t`, counted from 1: m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², each divided by its
/// bias 1 - beta^t; the weight first loses the share lr * decay of itself.
fn adam_step(param: &[f64], grad: &[f64], moments: &mut Moments, t: i32, adam: &Adam) -> Vec<f64> {
    moments.m.resize(grad.len(), 0.0);
    moments.v.resize(grad.len(), 0.0);
    let updated = (0..grad.len()).map(|i| {
        let (g, m, v) = (grad[i], &mut moments.m[i], &mut moments.v[i]);
        *m = adam.beta1 * *m + (1.0 - adam.beta1) * g;
        *v = adam.beta2 * *v + (1.0 - adam.beta2) * g * g;
        let (m_hat, v_hat) = (*m / (1.0 - adam.beta1.powi(t)), *v / (1.0 - adam.beta2.powi(t)));
        param[i] - adam.lr * adam.weight_decay * param[i] - adam.lr * m_hat / (v_hat.sqrt() + adam.eps)
    });
    updated.collect()
}

struct Model<'w> {
    cfg: &'w DenseConfig,
    weights: &'w Tensors,
    grads: Tensors,
    loss: f64,
    /// Tokens of the whole batch, over which the loss is a mean.
    count: f64,
}

/// What the backward pass of one layer needs of the forward pass.
struct Saved {
    /// Input of the layer, and of its second half.
    x: Mat,
    x_mid: Mat,
    /// What attention and network were given: outputs of the norms.
    n1: Mat,
    n2: Mat,
    /// q, k and v before the norms of heads.
    qkv: Mat,
    attn: Attention,
    network: Network,
}

/// What became of the second norm's output.
enum Network {
    Dense {
        gate_up: Mat,
        act: Mat,
    },
    /// Of the sequence of this number.
    Experts {
        sequence: usize,
    },
}

impl Model<'_> {
    fn w(&self, name: &str) -> &Mat {
        &self.weights[name]
    }

    fn add_grad(&mut self, name: &str, grad: Mat) {
        *self.grads.get_mut(name).expect("every weight has a gradient") += &grad;
    }

    /// Loss and gradients of one sequence; returns what the final norm was given.
    fn sequence(&mut self, number: usize, tokens: &[u32], targets: &[u32]) -> Mat {
        let rows: Vec<usize> = tokens.iter().map(|&t| t as usize).collect();
        let mut x = self.w(EMBED).select(Axis(0), &rows);
        if self.cfg.blocks.positions > 0 {
            x += &self.w(POSITIONS).slice(s![..rows.len(), ..]);
        }
        let mut saved = Vec::new();
        for i in 0..self.cfg.layers {
            let (y, kept) = self.layer_forward(i, number, x);
            saved.push(kept);
            x = y;
        }
        let mut dx = self.head(&x, targets);
        for (i, kept) in saved.iter().enumerate().rev() {
            dx = self.layer_backward(i, kept, dx);
        }
        if self.cfg.blocks.positions > 0 {
            let d_positions = self.grads.get_mut(POSITIONS).expect("every weight has a gradient");
            let mut used = d_positions.slice_mut(s![..rows.len(), ..]);
            used += &dx;
        }
        let d_embed = self.grads.get_mut(EMBED).expect("every weight has a gradient");
        rows.iter().zip(dx.rows()).for_each(|(&row, dx)| d_embed.row_mut(row).zip_mut_with(&dx, |e, d| *e += d));
        x
    }

    /// What dropout leaves of a branch, and of its gradient likewise.
    fn dropped(&self, salt: u64, x: &Mat) -> Mat {
        let p = self.cfg.blocks.dropout;
        let stays = |(at, column): (usize, usize)| dropout::keeps(p, salt, at as u64, column as u64);
        Mat::from_shape_fn(x.raw_dim(), |at| if stays(at) { x[at] / (1.0 - p) } else { 0.0 })
    }

    /// The norm that stands before the network.
    fn second_norm(&self) -> &'static str {
        if self.cfg.blocks.parallel && !self.cfg.blocks.own_norms { IN_NORM } else { POST_NORM }
    }

    fn layer_forward(&self, i: usize, sequence: usize, x: Mat) -> (Mat, Saved) {
        let n1 = self.norm(&layer(i, IN_NORM), &x);
        let qkv = self.linear(&layer(i, QKV), &n1);
        let attn = Attention::new(self.cfg, self.norm_heads(i, &qkv));
        let branch = self.linear(&layer(i, OUT), &attn.o);
        let x_mid = if self.cfg.blocks.parallel { x.clone() } else { &x + &self.dropped(0, &branch) };
        let n2 = self.norm(&layer(i, self.second_norm()), &x_mid);
        let (out, network) = match &self.cfg.experts {
            Some(experts) => (self.experts(i, experts, sequence, &n2), Network::Experts { sequence }),
            None => {
                let gate_up = self.linear(&layer(i, self.cfg.up()), &n2);
                let act = if self.cfg.blocks.gelu { gate_up.mapv(gelu) } else { swiglu(&gate_up, self.cfg.ffn) };
                (self.linear(&layer(i, DOWN), &act), Network::Dense { gate_up, act })
            }
        };
        let y = match self.cfg.blocks.parallel {
            true => &x + &self.dropped(0, &(branch + out)),
            false => &x_mid + &self.dropped(1, &out),
        };
        (y, Saved { x, x_mid, n1, n2, qkv, attn, network })
    }

    fn layer_backward(&mut self, i: usize, saved: &Saved, dy: Mat) -> Mat {
        let parallel = self.cfg.blocks.parallel;
        // The feed-forward half, beside its residual.
        let d_out = self.dropped(if parallel { 0 } else { 1 }, &dy);
        let dn2 = match &saved.network {
            Network::Experts { sequence } => self.experts_backward(i, *sequence, &saved.n2, &d_out),
            Network::Dense { gate_up, act } => {
                let d_act = self.linear_backward(&layer(i, DOWN), act, &d_out);
                let d_gate_up = match self.cfg.blocks.gelu {
                    true => d_act * gate_up.mapv(gelu_slope),
                    false => swiglu_backward(gate_up, &d_act),
                };
                self.linear_backward(&layer(i, self.cfg.up()), &saved.n2, &d_gate_up)
            }
        };
        let dx_mid = &dy + &self.norm_backward(&layer(i, self.second_norm()), &saved.x_mid, &dn2);
        // The attention half, beside its own; in a parallel block it has the block's output for its own.
        let d_branch = self.dropped(0, if parallel { &dy } else { &dx_mid });
        let d_o = self.linear_backward(&layer(i, OUT), &saved.attn.o, &d_branch);
        let d_qkv = saved.attn.backward(self.cfg, &d_o);
        let d_qkv = self.norm_heads_backward(i, &saved.qkv, d_qkv);
        let dn1 = self.linear_backward(&layer(i, QKV), &saved.n1, &d_qkv);
        dx_mid + self.norm_backward(&layer(i, IN_NORM), &saved.x, &dn1)
    }

    /// Final norm, lm head and loss; returns the gradient of `x`.
    fn head(&mut self, x: &Mat, targets: &[u32]) -> Mat {
        let n = self.norm(FINAL_NORM, x);
        let mut logits = self.linear(self.cfg.head_weight(), &n);
        for (mut row, &target) in logits.rows_mut().into_iter().zip(targets) {
            softmax(row.as_slice_mut().expect("rows are contiguous"));
            self.loss -= row[target as usize].ln() / self.count;
            row[target as usize] -= 1.0;
        }
        let d_logits = logits / self.count;
        let dn = self.linear_backward(self.cfg.head_weight(), &n, &d_logits);
        self.norm_backward(FINAL_NORM, x, &dn)
    }

    /// y = x Wᵀ, and a bias where there is one.
    fn linear(&self, name: &str, x: &Mat) -> Mat {
        let y = x.dot(&self.w(name).t());
        self.weights.get(&bias_of(name)).map_or(y.clone(), |b| &y + b)
    }

    fn norm(&self, name: &str, x: &Mat) -> Mat {
        if !self.cfg.blocks.layer_norm {
            return rms_norm(x, self.w(name), self.cfg.eps);
        }
        let y = rms_norm(&centred(x), self.w(name), self.cfg.eps);
        self.weights.get(&bias_of(name)).map_or(y.clone(), |b| &y + b)
    }

    /// y = x Wᵀ: dW = dyᵀ x is kept, dx = dy W returned.
    fn linear_backward(&mut self, name: &str, x: &Mat, dy: &Mat) -> Mat {
        self.add_grad(name, dy.t().dot(x));
        self.add_bias_grad(name, dy);
        dy.dot(self.w(name))
    }

    fn add_bias_grad(&mut self, name: &str, dy: &Mat) {
        if let Some(db) = self.grads.get_mut(&bias_of(name)) {
            *db += &dy.sum_axis(Axis(0)).insert_axis(Axis(0));
        }
    }

    /// The norm of each head of q and k, with the columns it stands in.
    fn head_norms(&self, i: usize) -> Vec<(String, std::ops::Range<usize>)> {
        if !self.cfg.blocks.qk_norm {
            return vec![];
        }
        let name = |head| layer(i, if head < self.cfg.heads { Q_NORM } else { K_NORM });
        let d = self.cfg.head_dim;
        (0..self.cfg.heads + self.cfg.kv_heads).map(|head| (name(head), head * d..(head + 1) * d)).collect()
    }

    fn norm_heads(&self, i: usize, qkv: &Mat) -> Mat {
        let mut normed = qkv.clone();
        for (name, columns) in self.head_norms(i) {
            let head = rms_norm(&qkv.slice(s![.., columns.clone()]).to_owned(), self.w(&name), self.cfg.eps);
            normed.slice_mut(s![.., columns]).assign(&head);
        }
        normed
    }

    fn norm_heads_backward(&mut self, i: usize, qkv: &Mat, mut d_qkv: Mat) -> Mat {
        for (name, columns) in self.head_norms(i) {
            let [x, dy] = [qkv, &d_qkv].map(|m| m.slice(s![.., columns.clone()]).to_owned());
            let (dx, dw) = rms_norm_backward(&x, self.w(&name), &dy, self.cfg.eps);
            self.add_grad(&name, dw);
            d_qkv.slice_mut(s![.., columns]).assign(&dx);
        }
        d_qkv
    }

    fn norm_backward(&mut self, name: &str, x: &Mat, dy: &Mat) -> Mat {
        let layer_norm = self.cfg.blocks.layer_norm;
        let centre = |x: &Mat| if layer_norm { centred(x) } else { x.clone() };
        // A layer norm is an RMS norm of what is left when the mean is taken away, which is its own transpose.
        let (dx, dw) = rms_norm_backward(&centre(x), self.w(name), dy, self.cfg.eps);
        self.add_grad(name, dw);
        if layer_norm {
            self.add_bias_grad(name, dy);
        }
        centre(&dx)
    }
}

/// Experts: y_t = sum over its choices j of w_tj FFN_j(x_t), token by token.
impl Model<'_> {
    /// The experts of a token, by number, that there are.
    fn chosen(experts: &Experts, sequence: usize, t: usize) -> Vec<usize> {
        let of = &experts.choices[sequence][t * experts.top_k..][..experts.top_k];
        of.iter().map(|&e| e as usize).filter(|&e| e < experts.count).collect()
    }

    /// Rows of the stacked matrices that are one expert's.
    fn expert(&self, i: usize, e: usize) -> [Mat; 2] {
        let cfg = self.cfg.experts.as_ref().expect("experts");
        let (up, h) = (2 * cfg.ffn, self.cfg.hidden);
        let rows = |name, rows| self.w(&layer(i, name)).slice(s![e * rows..(e + 1) * rows, ..]).to_owned();
        [rows(EXPERTS_UP, up), rows(EXPERTS_DOWN, h)]
    }

    fn experts(&self, i: usize, experts: &Experts, sequence: usize, x: &Mat) -> Mat {
        let logits = self.linear(&layer(i, ROUTER), x);
        let mut y = Mat::zeros((x.nrows(), self.cfg.hidden));
        for (t, row) in x.axis_chunks_iter(Axis(0), 1).enumerate() {
            let chosen = Self::chosen(experts, sequence, t);
            let weighs = gates(&experts.gate, &logits.row(t).to_vec(), &chosen);
            for (e, weigh) in chosen.into_iter().zip(weighs) {
                let [up, down] = self.expert(i, e);
                let out = swiglu(&row.dot(&up.t()), experts.ffn).dot(&down.t()) * weigh;
                y.slice_mut(s![t..t + 1, ..]).zip_mut_with(&out, |y, out| *y += out);
            }
        }
        if experts.shared > 0 {
            let act = swiglu(&self.linear(&layer(i, SHARED_UP), x), experts.shared);
            y += &self.linear(&layer(i, SHARED_DOWN), &act);
        }
        y
    }

    fn experts_backward(&mut self, i: usize, sequence: usize, x: &Mat, dy: &Mat) -> Mat {
        let experts = self.cfg.experts.as_ref().expect("experts");
        let logits = self.linear(&layer(i, ROUTER), x);
        let (mut dx, mut d_logits) = (Mat::zeros(x.raw_dim()), Mat::zeros(logits.raw_dim()));
        for t in 0..x.nrows() {
            let (row, d_row) = (x.slice(s![t..t + 1, ..]), dy.slice(s![t..t + 1, ..]));
            let chosen = Self::chosen(experts, sequence, t);
            let weighs = gates(&experts.gate, &logits.row(t).to_vec(), &chosen);
            let mut d_weighs = vec![];
            for (&e, weigh) in chosen.iter().zip(&weighs) {
                let [up, down] = self.expert(i, e);
                let gate_up = row.dot(&up.t());
                let act = swiglu(&gate_up, experts.ffn);
                d_weighs.push((&act.dot(&down.t()) * &d_row).sum());
                let d_out = &d_row * *weigh;
                let d_gate_up = swiglu_backward(&gate_up, &d_out.dot(&down));
                self.add_to_rows(&layer(i, EXPERTS_DOWN), e, d_out.t().dot(&act));
                self.add_to_rows(&layer(i, EXPERTS_UP), e, d_gate_up.t().dot(&row));
                dx.slice_mut(s![t..t + 1, ..]).zip_mut_with(&d_gate_up.dot(&up), |x, d| *x += d);
            }
            let d = gates_backward(&experts.gate, &logits.row(t).to_vec(), &chosen, &d_weighs);
            d_logits.row_mut(t).assign(&Array1::from(d));
        }
        if experts.shared > 0 {
            let gate_up = self.linear(&layer(i, SHARED_UP), x);
            let act = swiglu(&gate_up, experts.shared);
            let d_gate_up = swiglu_backward(&gate_up, &self.linear_backward(&layer(i, SHARED_DOWN), &act, dy));
            dx += &self.linear_backward(&layer(i, SHARED_UP), x, &d_gate_up);
        }
        dx + self.linear_backward(&layer(i, ROUTER), x, &d_logits)
    }

    /// Adds the gradient of one expert's matrix.
    fn add_to_rows(&mut self, name: &str, e: usize, grad: Mat) {
        let whole = self.grads.get_mut(name).expect("every weight has a gradient");
        let mut rows = whole.slice_mut(s![e * grad.nrows()..(e + 1) * grad.nrows(), ..]);
        rows += &grad;
    }
}

/// The score of every expert.
fn scores(gate: &Gate, logits: &[f64]) -> Vec<f64> {
    let mut all = logits.to_vec();
    match gate.score {
        Score::Softmax => softmax(&mut all),
        Score::Sigmoid => all.iter_mut().for_each(|x| *x = sigmoid(*x)),
    }
    all
}

/// What the chosen experts weigh.
fn gates(gate: &Gate, logits: &[f64], chosen: &[usize]) -> Vec<f64> {
    let scores = scores(gate, logits);
    let total: f64 = if gate.normalise { chosen.iter().map(|&e| scores[e]).sum() } else { 1.0 };
    chosen.iter().map(|&e| gate.scale * scores[e] / total).collect()
}

/// The gradient of the logits: by the chain rule over w_j = scale s_j / S, one derivative after the other.
fn gates_backward(gate: &Gate, logits: &[f64], chosen: &[usize], d_weighs: &[f64]) -> Vec<f64> {
    let scores = scores(gate, logits);
    let total: f64 = chosen.iter().map(|&e| scores[e]).sum();
    let mut d_scores = vec![0.0; logits.len()];
    for (&j, d) in chosen.iter().zip(d_weighs) {
        for &i in chosen {
            let same = if i == j { 1.0 } else { 0.0 };
            let slope = if gate.normalise { same / total - scores[j] / (total * total) } else { same };
            d_scores[i] += d * gate.scale * slope;
        }
    }
    let jacobian = |a: usize, b: usize| match gate.score {
        Score::Sigmoid => {
            if a == b {
                scores[a] * (1.0 - scores[a])
            } else {
                0.0
            }
        }
        Score::Softmax => scores[a] * (if a == b { 1.0 } else { 0.0 } - scores[b]),
    };
    (0..logits.len()).map(|b| (0..logits.len()).map(|a| d_scores[a] * jacobian(a, b)).sum()).collect()
}

/// Every row less its mean.
fn centred(x: &Mat) -> Mat {
    x - &x.mean_axis(Axis(1)).expect("a row is not empty").insert_axis(Axis(1))
}

/// x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3).
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + gelu_tanh(x))
}

fn gelu_tanh(x: f64) -> f64 {
    ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()
}

fn gelu_slope(x: f64) -> f64 {
    let (t, du) = (gelu_tanh(x), (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x));
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du
}

fn swiglu(gate_up: &Mat, ffn: usize) -> Mat {
    let (gate, up) = gate_up.view().split_at(Axis(1), ffn);
    gate.mapv(|g| g * sigmoid(g)) * up
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn swiglu_backward(gate_up: &Mat, d_act: &Mat) -> Mat {
    let f = d_act.ncols();
    let mut d = Array2::zeros(gate_up.raw_dim());
    for ((t, j), &dy) in d_act.indexed_iter() {
        let (g, u) = (gate_up[[t, j]], gate_up[[t, f + j]]);
        let (sig, silu) = (sigmoid(g), g * sigmoid(g));
        d[[t, j]] = dy * u * (sig + silu * (1.0 - sig));
        d[[t, f + j]] = dy * silu;
    }
    d
}

fn softmax(row: &mut [f64]) {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// The root of the mean square of each row.
fn rms(x: &Mat, eps: f64) -> Array1<f64> {
    x.rows().into_iter().map(|x| (x.dot(&x) / x.len() as f64 + eps).sqrt()).collect()
}

fn rms_norm(x: &Mat, w: &Mat, eps: f64) -> Mat {
    x / &rms(x, eps).insert_axis(Axis(1)) * w
}

/// With n = x / rms: dx = (dn - n mean(n dn)) / rms, where dn = dy w; dw sums n dy.
fn rms_norm_backward(x: &Mat, w: &Mat, dy: &Mat, eps: f64) -> (Mat, Mat) {
    let rms = rms(x, eps).insert_axis(Axis(1));
    let n = x / &rms;
    let dn = dy * w;
    let mean = (&n * &dn).mean_axis(Axis(1)).expect("a row is not empty").insert_axis(Axis(1));
    let dw = (&n * dy).sum_axis(Axis(0)).insert_axis(Axis(0));
    ((dn - &n * &mean) / &rms, dw)
}

/// Causal attention over one sequence, kept for its backward pass.
struct Attention {
    /// Rotated queries and keys, and values, [s, (a+2k)*d].
    qkv: Mat,
    /// The probabilities of each head, [s, s].
    p: Vec<Mat>,
    /// What dropout multiplies them with.
    left: Vec<Mat>,
    /// [s, a*d].
    o: Mat,
}

impl Attention {
    fn new(cfg: &DenseConfig, mut qkv: Mat) -> Attention {
        rotate(cfg, &mut qkv, 1.0);
        let len = qkv.nrows();
        let mut o = Array2::zeros((len, cfg.heads * cfg.head_dim));
        let (mut p, mut left) = (Vec::new(), Vec::new());
        for head in 0..cfg.heads {
            let [q, k, v] = columns(cfg, head).map(|at| qkv.slice(s![.., at..at + cfg.head_dim]));
            let probs = masked_softmax(cfg, q.dot(&k.t()) / (cfg.head_dim as f64).sqrt());
            let drop = attention_dropout(cfg, head, len);
            head_of(&mut o, head * cfg.head_dim, &(&probs * &drop).dot(&v));
            p.push(probs);
            left.push(drop);
        }
        Attention { qkv, p, left, o }
    }

    /// The gradient of the unrotated qkv.
    fn backward(&self, cfg: &DenseConfig, d_o: &Mat) -> Mat {
        let mut d_qkv = Array2::zeros(self.qkv.raw_dim());
        for (head, (p, left)) in self.p.iter().zip(&self.left).enumerate() {
            let at = columns(cfg, head);
            let [q, k, v] = at.map(|at| self.qkv.slice(s![.., at..at + cfg.head_dim]));
            let d_o = d_o.slice(s![.., at[0]..at[0] + cfg.head_dim]);
            let ds = softmax_backward(p, d_o.dot(&v.t()) * left) / (cfg.head_dim as f64).sqrt();
            head_of(&mut d_qkv, at[0], &ds.dot(&k));
            head_of(&mut d_qkv, at[1], &ds.t().dot(&q));
            head_of(&mut d_qkv, at[2], &(p * left).t().dot(&d_o));
        }
        rotate(cfg, &mut d_qkv, -1.0);
        d_qkv
    }
}

/// Attention alone, over whole sequences: o, lse and the gradients dq, dkv. q, o, d_o are `[batch, s, a*d]`, kv
/// `[batch, s, (K: k*d | V: k*d)]`, lse `[batch, s, a]`.
pub fn attention(spec: &AttentionSpec, q: &[f64], kv: &[f64], d_o: &[f64]) -> BTreeMap<Operand, Vec<f64>> {
    let [s, a, k, d] = [spec.seq_len, spec.heads, spec.kv_heads, spec.head_dim].map(|n| n as usize);
    let mut all: BTreeMap<Operand, Vec<f64>> = BTreeMap::new();
    for b in 0..spec.batch as usize {
        let rows = |x: &[f64], row: usize| {
            Array2::from_shape_vec((s, row), x[b * s * row..][..s * row].to_vec()).expect("a whole sequence")
        };
        let (q, kv, d_o) = (rows(q, a * d), rows(kv, 2 * k * d), rows(d_o, a * d));
        let (mut o, mut lse) = (Mat::zeros((s, a * d)), Mat::zeros((s, a)));
        let (mut dq, mut dkv) = (Mat::zeros((s, a * d)), Mat::zeros((s, 2 * k * d)));
        for head in 0..a {
            let at = [head * d, head * k / a * d, (k + head * k / a) * d];
            let (q, d_o) = (q.slice(s![.., at[0]..at[0] + d]), d_o.slice(s![.., at[0]..at[0] + d]));
            let [key, value] = [at[1], at[2]].map(|at| kv.slice(s![.., at..at + d]));
            let mut scores = q.dot(&key.t()) / (d as f64).sqrt();
            scores
                .indexed_iter_mut()
                .for_each(|((i, j), x)| *x = if visible(spec, i, j) { *x } else { f64::NEG_INFINITY });
            for (i, row) in scores.rows().into_iter().enumerate() {
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                lse[[i, head]] = top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
            }
            scores.rows_mut().into_iter().for_each(|mut row| softmax(row.as_slice_mut().expect("rows are contiguous")));
            let p = scores;
            let ds = softmax_backward(&p, d_o.dot(&value.t())) / (d as f64).sqrt();
            head_of(&mut o, at[0], &p.dot(&value));
            head_of(&mut dq, at[0], &ds.dot(&key));
            head_of(&mut dkv, at[1], &ds.t().dot(&q));
            head_of(&mut dkv, at[2], &p.t().dot(&d_o));
        }
        for (what, x) in [(Operand::O, o), (Operand::Lse, lse), (Operand::Dq, dq), (Operand::Dkv, dkv)] {
            all.entry(what).or_default().extend(x);
        }
    }
    all
}

/// Whether query `i` sees key `j`.
fn visible(spec: &AttentionSpec, i: usize, j: usize) -> bool {
    let document = |at: usize| {
        let mut end = 0;
        spec.mask.documents.lengths().iter().position(|length| {
            end += *length as usize;
            at < end
        })
    };
    let near = spec.mask.window.is_none_or(|w| i < j + w as usize);
    document(i) == document(j) && (!spec.mask.causal || j <= i) && near
}

/// The first columns of a query head's q, k and v: a/k neighbouring query heads share one KV head.
fn columns(cfg: &DenseConfig, head: usize) -> [usize; 3] {
    let kv_head = head * cfg.kv_heads / cfg.heads;
    [head, cfg.heads + kv_head, cfg.heads + cfg.kv_heads + kv_head].map(|at| at * cfg.head_dim)
}

/// 0 where a probability is dropped, else what makes up for those.
fn attention_dropout(cfg: &DenseConfig, head: usize, len: usize) -> Mat {
    let p = cfg.blocks.attention_dropout;
    let stays = |(i, j)| dropout::keeps(p, 2, i as u64, (head * len + j) as u64);
    Mat::from_shape_fn((len, len), |at| if stays(at) { 1.0 / (1.0 - p) } else { 0.0 })
}

/// Adds `part` to the columns from `at` on.
fn head_of(whole: &mut Mat, at: usize, part: &Mat) {
    let mut columns = whole.slice_mut(s![.., at..at + part.ncols()]);
    columns += part;
}

/// Causal, within documents, and the last keys of a window.
fn masked_softmax(cfg: &DenseConfig, mut scores: Mat) -> Mat {
    for (i, mut row) in scores.rows_mut().into_iter().enumerate() {
        row.slice_mut(s![i + 1..]).fill(f64::NEG_INFINITY);
        let first = cfg.window.map_or(0, |w| (i + 1).saturating_sub(w)).max(cfg.document_start(i));
        row.slice_mut(s![..first]).fill(f64::NEG_INFINITY);
        softmax(row.as_slice_mut().expect("rows are contiguous"));
    }
    scores
}

/// ds = p (dp - sum of p dp over the row).
fn softmax_backward(p: &Mat, dp: Mat) -> Mat {
    let mean = (p * &dp).sum_axis(Axis(1)).insert_axis(Axis(1));
    p * &(dp - mean)
}

/// Rotates all query and key heads by their position; `direction` -1 turns back.
fn rotate(cfg: &DenseConfig, qkv: &mut Mat, direction: f64) {
    let (d, turned) = (cfg.head_dim, cfg.rotary());
    let half = turned / 2;
    for (position, mut row) in qkv.rows_mut().into_iter().enumerate() {
        for head in 0..cfg.heads + cfg.kv_heads {
            for i in 0..half {
                let angle =
                    (position - cfg.document_start(position)) as f64 * cfg.theta.powf(-2.0 * i as f64 / turned as f64);
                let (sin, cos) = (direction * angle.sin(), angle.cos());
                let (x, y) = (row[head * d + i], row[head * d + half + i]);
                row[head * d + i] = x * cos - y * sin;
                row[head * d + half + i] = y * cos + x * sin;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const ADAM: Adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };

    fn tiny(kv_heads: usize, tie: bool) -> DenseConfig {
        let (eps, theta) = (1e-5, 100.0);
        DenseConfig {
            layers: 2,
            hidden: 6,
            heads: 4,
            kv_heads,
            head_dim: 4,
            ffn: 5,
            vocab: 7,
            eps,
            theta,
            tie,
            blocks: Blocks::LLAMA,
            window: None,
            documents: vec![],
            experts: None,
        }
    }

    fn random_params(cfg: &DenseConfig) -> BTreeMap<String, Vec<f64>> {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut draw = |n: usize| (0..n).map(|_| rng.random_range(-1.0..1.0)).collect();
        cfg.shapes().into_iter().map(|(name, (rows, cols))| (name, draw(rows * cols))).collect()
    }

    fn batch() -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        (vec![vec![1, 5, 0, 5, 2], vec![6, 1, 3]], vec![vec![5, 0, 5, 2, 4], vec![1, 3, 3]])
    }

    fn run(cfg: &DenseConfig, params: &BTreeMap<String, Vec<f64>>) -> StepResult {
        let (tokens, targets) = batch();
        step(cfg, params, &tokens, &targets, &ADAM)
    }

    fn check_gradients(cfg: &DenseConfig) {
        const STEP: f64 = 1e-5;
        let params = random_params(cfg);
        let result = run(cfg, &params);
        for (name, i) in params.iter().flat_map(|(name, p)| (0..p.len()).map(move |i| (name, i))) {
            let loss = |by: f64| {
                let mut moved = params.clone();
                moved.get_mut(name).unwrap()[i] += by;
                run(cfg, &moved).loss
            };
            let slope = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
            let grad = result.grads[name][i];
            assert!((grad - slope).abs() < 1e-8 * (1.0 + slope.abs()), "{name}[{i}]: {grad}, slope {slope}");
        }
    }

    #[test]
    fn gradients_equal_finite_differences_with_grouped_queries() {
        check_gradients(&tiny(2, false));
    }

    #[test]
    fn gradients_equal_finite_differences_with_norms_of_heads() {
        check_gradients(&DenseConfig { blocks: Blocks { qk_norm: true, ..Blocks::LLAMA }, ..tiny(2, false) });
    }

    #[test]
    fn gradients_equal_finite_differences_with_experts() {
        let none = u32::MAX;
        let choices = vec![vec![0, 2, 2, 1, 1, 0, none, 2, none, none], vec![2, 0, 2, 1, 0, 2]];
        for (score, normalise, scale, shared) in
            [(Score::Softmax, true, 1.0, 0), (Score::Softmax, false, 1.0, 3), (Score::Sigmoid, true, 2.5, 2)]
        {
            let gate = Gate { score, normalise, scale };
            let experts = Experts { count: 3, top_k: 2, ffn: 4, shared, gate, choices: choices.clone() };
            check_gradients(&DenseConfig { experts: Some(experts), ..tiny(2, false) });
        }
    }

    #[test]
    fn gradients_equal_finite_differences_in_a_window_of_documents() {
        check_gradients(&DenseConfig { window: Some(2), documents: vec![2, 3], ..tiny(2, false) });
    }

    /// A packed sequence is its documents, one by one.
    #[test]
    fn documents_do_not_know_of_each_other() {
        let cfg = DenseConfig { documents: vec![2, 3], ..tiny(2, false) };
        let params = random_params(&cfg);
        let hidden = |cfg: &DenseConfig, tokens: &[u32]| {
            step(cfg, &params, &[tokens.to_vec()], &[tokens.to_vec()], &ADAM).hidden
        };
        let packed = hidden(&cfg, &[1, 5, 0, 5, 2]).concat();
        let apart = [hidden(&tiny(2, false), &[1, 5]), hidden(&tiny(2, false), &[0, 5, 2])].concat().concat();
        assert!(packed.iter().zip(&apart).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn gradients_equal_finite_differences_with_a_tied_head() {
        let cfg = tiny(4, true);
        assert!(!cfg.shapes().contains_key(LM_HEAD));
        check_gradients(&cfg);
    }

    #[test]
    fn a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary() {
        let cfg = tiny(1, false);
        let mut params = random_params(&cfg);
        params.get_mut(LM_HEAD).unwrap().fill(0.0);
        assert!((run(&cfg, &params).loss - 7f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn the_future_does_not_change_the_past() {
        let cfg = tiny(2, false);
        let params = random_params(&cfg);
        let (tokens, targets) = batch();
        let mut other = tokens.clone();
        other[0][3] = 6;
        let [a, b] = [tokens, other].map(|tokens| step(&cfg, &params, &tokens, &targets, &ADAM).hidden);
        assert_eq!(a[0][..3 * 6], b[0][..3 * 6]);
        assert_ne!(a[0][3 * 6..], b[0][3 * 6..]);
        assert_eq!(a[1], b[1]);
    }

    #[test]
    fn the_first_step_of_adam_moves_by_the_learning_rate_against_the_gradient() {
        let cfg = tiny(2, false);
        let params = random_params(&cfg);
        let result = run(&cfg, &params);
        for (name, old) in &params {
            for ((old, new), grad) in old.iter().zip(&result.new_params[name]).zip(&result.grads[name]) {
                let expected = 0.01 * grad / (grad.abs() + 1e-8);
                assert!((old - new - expected).abs() < 1e-12, "{name}: {old} {new} {grad}");
            }
        }
    }
}
