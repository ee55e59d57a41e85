//! Forward and backward through the layers and the ends of the model.

use super::Tensors;
use super::attention::{Attention, rotate};
use super::config::*;
use super::indexer::Index;
use super::latent::Latent;
use super::math::{Mat, centred, gelu, gelu_slope, rms_norm, rms_norm_backward, softmax, swiglu, swiglu_backward};
use super::mixers as alone;
use crate::plan::dropout;
use ndarray::{Axis, concatenate, s};

pub struct Model<'w> {
    pub cfg: &'w DenseConfig,
    pub weights: &'w Tensors,
    pub grads: Tensors,
    pub loss: f64,
    /// The divergence of the scores of all indexers from what attention made of the keys that they chose, a mean over
    /// tokens.
    pub divergence: f64,
    /// Tokens of the whole batch, over which the loss is a mean.
    pub count: f64,
}

/// What the backward pass of one layer needs of the forward pass.
pub struct Saved {
    /// Input of the layer, and of its second half.
    x: Mat,
    x_mid: Mat,
    /// What attention and network were given: outputs of the norms.
    n1: Mat,
    n2: Mat,
    projection: Projection,
    index: Option<Index>,
    attn: Attention,
    network: Network,
}

/// What the backward pass of a layer needs, of either make: attention and network, or one mixer alone.
pub enum Kept {
    Both(Box<Saved>),
    Alone(Box<alone::Saved>),
}

/// How the first norm's output became q, k and v.
enum Projection {
    /// One product for q, k and v together; here is what it gave, before the norms of heads.
    Fused(Mat),
    Latent(Latent),
}

/// What became of the second norm's output.
enum Network {
    Dense {
        gate_up: Mat,
        act: Mat,
    },
    /// Experts, with the number of the sequence.
    Experts {
        sequence: usize,
    },
}

impl Model<'_> {
    pub fn w(&self, name: &str) -> &Mat {
        &self.weights[name]
    }

    pub fn add_grad(&mut self, name: &str, grad: Mat) {
        *self.grads.get_mut(name).expect("every weight has a gradient") += &grad;
    }

    /// Loss and gradients of one sequence; returns what the final norm was given.
    pub fn sequence(&mut self, number: usize, tokens: &[u32], targets: &[u32]) -> Mat {
        let rows: Vec<usize> = tokens.iter().map(|&t| t as usize).collect();
        let mut x = self.embedded(&rows);
        let mut saved = Vec::new();
        for i in 0..self.cfg.layers {
            let (y, kept) = self.any_forward(i, number, x);
            saved.push(kept);
            x = y;
        }
        let mut dx = self.head(&x, targets, FINAL_NORM, 1.0);
        if self.cfg.mtp.depth > 0 {
            dx += &self.module(0, number, &x, targets);
        }
        for (i, kept) in saved.iter().enumerate().rev() {
            dx = self.any_backward(i, kept, dx);
        }
        if self.cfg.blocks.positions > 0 {
            let d_positions = self.grads.get_mut(POSITIONS).expect("every weight has a gradient");
            let mut used = d_positions.slice_mut(s![..rows.len(), ..]);
            used += &dx;
        }
        self.add_embedded_grad(&rows, &dx);
        x
    }

    pub fn add_embedded_grad(&mut self, rows: &[usize], dx: &Mat) {
        let d_embed = self.grads.get_mut(EMBED).expect("every weight has a gradient");
        rows.iter().zip(dx.rows()).for_each(|(&row, dx)| d_embed.row_mut(row).zip_mut_with(&dx, |e, d| *e += d));
    }

    pub fn any_backward(&mut self, i: usize, kept: &Kept, dy: Mat) -> Mat {
        match kept {
            Kept::Both(kept) => self.layer_backward(i, kept, dy),
            Kept::Alone(kept) => self.alone_backward(i, kept, dy),
        }
    }

    fn embedded(&self, rows: &[usize]) -> Mat {
        let mut x = self.w(EMBED).select(Axis(0), rows);
        if self.cfg.blocks.positions > 0 {
            x += &self.w(POSITIONS).slice(s![..rows.len(), ..]);
        }
        x
    }

    /// What the routers of a sequence choose, [s, top_k] in every layer with experts.
    pub fn route(&self, number: usize, tokens: &[u32]) -> Vec<Vec<u32>> {
        let rows: Vec<usize> = tokens.iter().map(|&t| t as usize).collect();
        let (mut x, mut all) = (self.embedded(&rows), vec![]);
        for i in 0..self.cfg.layers {
            let (y, kept) = self.any_forward(i, number, x);
            if let Some(experts) = self.cfg.experts_of(i) {
                let normed = match &kept {
                    Kept::Both(kept) => &kept.n2,
                    Kept::Alone(kept) => &kept.normed,
                };
                all.push(self.highest(i, experts, normed));
            }
            x = y;
        }
        all
    }

    /// What dropout leaves of a branch, and of its gradient likewise.
    fn dropped(&self, salt: u64, x: &Mat) -> Mat {
        let p = self.cfg.blocks.dropout;
        let stays = |(at, column): (usize, usize)| dropout::keeps(p, salt, at as u64, column as u64);
        Mat::from_shape_fn(x.raw_dim(), |at| if stays(at) { x[at] / (1.0 - p) } else { 0.0 })
    }

    /// The name of the norm that stands before the network.
    fn second_norm(&self) -> &'static str {
        if self.cfg.blocks.parallel && !self.cfg.blocks.own_norms { IN_NORM } else { POST_NORM }
    }

    pub fn any_forward(&self, i: usize, sequence: usize, x: Mat) -> (Mat, Kept) {
        if let Some(&mixer) = self.cfg.pattern.get(i) {
            let (y, kept) = self.alone_forward(i, mixer, sequence, x);
            return (y, Kept::Alone(Box::new(kept)));
        }
        let (y, kept) = self.layer_forward(i, sequence, x);
        (y, Kept::Both(Box::new(kept)))
    }

    fn layer_forward(&self, i: usize, sequence: usize, x: Mat) -> (Mat, Saved) {
        let n1 = self.norm(&layer(i, IN_NORM), &x);
        let (projection, heads) = match &self.cfg.mla {
            Some(mla) => {
                let (saved, heads) = self.latent(i, mla, &n1);
                (Projection::Latent(saved), heads)
            }
            None => {
                let qkv = self.linear(&layer(i, QKV), &n1);
                let mut turned = self.norm_heads(i, &qkv);
                rotate(self.cfg, &mut turned, 1.0);
                (Projection::Fused(qkv), self.apart(&turned))
            }
        };
        let index = match (&self.cfg.indexer, &projection) {
            (Some(of), Projection::Latent(latent)) => Some(self.index(i, of, &n1, latent.queries())),
            _ => None,
        };
        let attn = Attention::new(self.cfg, i, heads, index.as_ref().map(|index| &index.chosen));
        let branch = self.linear(&layer(i, OUT), &attn.o);
        let x_mid = if self.cfg.blocks.parallel { x.clone() } else { &x + &self.dropped(0, &branch) };
        let n2 = self.norm(&layer(i, self.second_norm()), &x_mid);
        let (out, network) = match self.cfg.experts_of(i) {
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
        (y, Saved { x, x_mid, n1, n2, projection, index, attn, network })
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
        let d_heads = saved.attn.backward(self.cfg, &d_o);
        if let (Some(of), Some(index), Projection::Latent(latent)) = (self.cfg.indexer, &saved.index, &saved.projection)
        {
            self.index_backward(i, &of, [&saved.n1, latent.queries()], index, &saved.attn.mean_probs());
        }
        let dn1 = match (&saved.projection, self.cfg.mla) {
            (Projection::Latent(latent), Some(mla)) => self.latent_backward(i, &mla, &saved.n1, latent, d_heads),
            (Projection::Fused(qkv), _) => {
                let mut d_qkv = concatenate(Axis(1), &d_heads.each_ref().map(|d| d.view())).expect("equally long");
                rotate(self.cfg, &mut d_qkv, -1.0);
                let d_qkv = self.norm_heads_backward(i, qkv, d_qkv);
                self.linear_backward(&layer(i, QKV), &saved.n1, &d_qkv)
            }
            _ => unreachable!("a model is of one kind"),
        };
        dx_mid + self.norm_backward(&layer(i, IN_NORM), &saved.x, &dn1)
    }

    /// The end of the model: norm, lm head and loss, which counts with the factor `part`; returns the gradient of `x`.
    pub fn head(&mut self, x: &Mat, targets: &[u32], norm: &str, part: f64) -> Mat {
        let n = self.norm(norm, x);
        let mut logits = self.linear(self.cfg.head_weight(), &n);
        for (mut row, &target) in logits.rows_mut().into_iter().zip(targets) {
            softmax(row.as_slice_mut().expect("rows are contiguous"));
            self.loss -= part * row[target as usize].ln() / self.count;
            row[target as usize] -= 1.0;
        }
        let d_logits = logits * (part / self.count);
        let dn = self.linear_backward(self.cfg.head_weight(), &n, &d_logits);
        self.norm_backward(norm, x, &dn)
    }

    /// y = x Wᵀ, and a bias where there is one.
    pub fn linear(&self, name: &str, x: &Mat) -> Mat {
        let y = x.dot(&self.w(name).t());
        self.weights.get(&bias_of(name)).map_or(y.clone(), |b| &y + b)
    }

    pub fn norm(&self, name: &str, x: &Mat) -> Mat {
        if !self.cfg.blocks.layer_norm {
            return rms_norm(x, self.w(name), self.cfg.eps);
        }
        let y = rms_norm(&centred(x), self.w(name), self.cfg.eps);
        self.weights.get(&bias_of(name)).map_or(y.clone(), |b| &y + b)
    }

    /// y = x Wᵀ: dW = dyᵀ x is kept, dx = dy W returned.
    pub fn linear_backward(&mut self, name: &str, x: &Mat, dy: &Mat) -> Mat {
        self.add_grad(name, dy.t().dot(x));
        self.add_bias_grad(name, dy);
        dy.dot(self.w(name))
    }

    fn add_bias_grad(&mut self, name: &str, dy: &Mat) {
        if let Some(db) = self.grads.get_mut(&bias_of(name)) {
            *db += &dy.sum_axis(Axis(0)).insert_axis(Axis(0));
        }
    }

    /// The names of the norms of q's and k's heads, each with the columns that it is of.
    fn head_norms(&self, i: usize) -> Vec<(String, std::ops::Range<usize>)> {
        if !self.cfg.blocks.qk_norm {
            return vec![];
        }
        let name = |head| layer(i, if head < self.cfg.heads { Q_NORM } else { K_NORM });
        let d = self.cfg.head_dim;
        (0..self.cfg.heads + self.cfg.kv_heads).map(|head| (name(head), head * d..(head + 1) * d)).collect()
    }

    /// Columns of q, of k and of v.
    pub fn apart(&self, qkv: &Mat) -> [Mat; 3] {
        let (q, k) = (self.cfg.heads * self.cfg.head_dim, self.cfg.kv_heads * self.cfg.head_dim);
        [0..q, q..q + k, q + k..q + 2 * k].map(|columns| qkv.slice(s![.., columns]).to_owned())
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

    pub fn norm_backward(&mut self, name: &str, x: &Mat, dy: &Mat) -> Mat {
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
