//! A Llama-style transformer layer, forward and backward, op by op. How attention talks to other ranks
//! is [`ulysses`]'s and [`attention`]'s affair, how the ranks share a product [`tensor`](super::tensor)'s.
//!
//! Legend: n tokens of a microbatch on this rank, h hidden, a heads, k KV heads, d head dim, f feed-forward
//! width; a, k and f are this tensor-parallel rank's share. Between the products a rank has r of the n tokens.

use super::attention::{self, Core, Way};
use super::step::Engines;
use super::tensor::TensorParallel;
use super::ulysses::{self, Ulysses};
use super::weights::{Rows, Weight, Weights};
use crate::plan::{Buf, Builder, Dtype, Kernel, Segs, TensorKind};
use crate::spec::{AttentionSpec, LlmSpec, Parallelism, Workload};

/// Everything a layer's ops need to know.
pub struct Layer {
    pub hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ffn: u64,
    eps: f64,
    theta: f64,
    batch: u64,
    /// Tokens of one sequence on this rank.
    seq: u64,
    /// Where those tokens stand in the sequence.
    pub segs: Segs,
    pub core: Core,
    /// `None` when the Ulysses degree is 1.
    ulysses: Option<Ulysses>,
    dtype: Dtype,
    pub tp: TensorParallel,
    fp8: bool,
    rows: WeightRows,
    weights: Weights,
}

/// Rows of the flat weight tensor of a layer.
struct WeightRows {
    norm1: Rows,
    norm2: Rows,
    qkv: Rows,
    o: Rows,
    gate_up: Rows,
    down: Rows,
}

/// Activations kept for the backward pass, as buffers or as formals of a block.
#[derive(Clone, Copy)]
pub struct Saved {
    /// As attention sees them: after the Ulysses exchange where there is one.
    attn: attention::Saved,
    normed1: Buf,
    mid: Buf,
    normed2: Buf,
    gate_up: Buf,
    act: Buf,
    /// The output of attention for my tokens, all heads; `None`: it is `attn.o`, without Ulysses.
    o: Option<Buf>,
}

impl Saved {
    /// Every buffer with its name, always in the same order.
    fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![
            ("q", &mut self.attn.q),
            ("kv", &mut self.attn.kv),
            ("attn_o", &mut self.attn.o),
            ("lse", &mut self.attn.lse),
            ("normed1", &mut self.normed1),
            ("mid", &mut self.mid),
            ("normed2", &mut self.normed2),
            ("gate_up", &mut self.gate_up),
            ("act", &mut self.act),
        ];
        all.extend(self.attn.kv_last.as_mut().map(|kv| ("kv_last", kv)));
        all.extend(self.o.as_mut().map(|o| ("o", o)));
        all
    }

    pub fn bufs(mut self) -> Vec<Buf> {
        self.bufs_mut().into_iter().map(|(_, buf)| *buf).collect()
    }

    /// The same as formals of the block being written, in the order of [`bufs`](Saved::bufs).
    pub fn formals(mut self, b: &mut Builder) -> Saved {
        self.bufs_mut().into_iter().for_each(|(name, buf)| *buf = b.formal(name));
        self
    }

    fn output(&self) -> Buf {
        self.o.unwrap_or(self.attn.o)
    }
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    attn: attention::Scratch,
    ulysses: Option<ulysses::Scratch>,
    qkv: Buf,
    q_local: Buf,
    kv_local: Buf,
    branch: Buf,
    d_act: Buf,
    d_gate_up: Buf,
    d_normed: Buf,
    d_mid: Buf,
    d_o: Buf,
    d_qkv: Buf,
    /// Rooms for all tokens' rows, where a rank has a share of them: of a product's input, of the gradient of
    /// its output, and of partial sums.
    input: Option<Buf>,
    d_output: Option<Buf>,
    partial: Option<Buf>,
}

/// y[n, out] = x[n, in] W^T, W stored [out, in] as checkpoints have it.
pub fn linear(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8 }
}

/// dx[n, in] = dy[n, out] W.
pub fn linear_dx(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: false, accumulate: false, fp8 }
}

/// dW[out, in] += dy^T x.
pub fn linear_dw(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: true, b_t: false, accumulate: true, fp8 }
}

/// The weights of a layer, in the order of its flat tensor.
fn weights(model: &LlmSpec, tp: &TensorParallel) -> (WeightRows, Weights) {
    let (h, f, q, kv) = (model.hidden, model.ffn, model.q_cols(), model.kv_cols());
    let mut w = Weights::new(tp);
    let rows = WeightRows {
        norm1: w.whole("input_layernorm.weight", &[h]),
        norm2: w.whole("post_attention_layernorm.weight", &[h]),
        qkv: w.cut("self_attn.qkv_proj.weight", &[q + 2 * kv, h], 0, &[q, kv, kv]),
        o: w.cut("self_attn.o_proj.weight", &[h, q], 1, &[q]),
        gate_up: w.cut("mlp.gate_up_proj.weight", &[2 * f, h], 0, &[f, f]),
        down: w.cut("mlp.down_proj.weight", &[h, f], 1, &[f]),
    };
    (rows, w)
}

impl Layer {
    pub fn new(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines) -> Layer {
        let tp = TensorParallel::new(par, work.dtype, engines.collective);
        let (heads, kv_heads) = (model.heads / tp.ranks, model.kv_heads / tp.ranks);
        let attention = AttentionSpec {
            batch: work.micro_batch,
            seq_len: work.seq_len,
            heads,
            kv_heads,
            head_dim: model.head_dim,
            causal: true,
            dtype: work.dtype,
        };
        let Way { segs, seq, core, ulysses } = Way::new(&attention, par, engines);
        let (rows, weights) = weights(model, &tp);
        Layer {
            hidden: model.hidden,
            heads,
            kv_heads,
            head_dim: model.head_dim,
            ffn: model.ffn / tp.ranks,
            eps: model.rms_eps,
            theta: model.rope_theta,
            batch: work.micro_batch,
            seq,
            segs,
            core,
            ulysses,
            dtype: work.dtype,
            tp,
            fp8: par.options.fp8,
            rows,
            weights,
        }
    }

    /// Tokens of a microbatch that this rank and its tensor-parallel peers work on.
    pub fn tokens(&self) -> u64 {
        self.batch * self.seq
    }

    /// Of those, the ones that this rank has between the products.
    pub fn residual_rows(&self) -> u64 {
        self.tp.share(self.tokens())
    }

    fn q_row(&self) -> u64 {
        self.heads * self.head_dim
    }

    fn kv_row(&self) -> u64 {
        2 * self.kv_heads * self.head_dim
    }

    fn qkv_row(&self) -> u64 {
        self.q_row() + self.kv_row()
    }

    /// Elements of a layer's weights on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    /// Declares what the backward pass keeps, `slots` of each: one a layer, or one in all when it is
    /// computed again.
    pub fn saved(&self, b: &mut Builder, kind: TensorKind, slots: u32) -> Saved {
        let (n, r) = (self.tokens(), self.residual_rows());
        let mut keep = |name, rows, row, dtype| b.tensor(name, &[rows, row], dtype, kind, slots);
        let (core, dtype) = (self.core.shape(), self.dtype);
        let attn = attention::Saved {
            q: keep("q", core.rows(), core.q_row(), dtype),
            kv: keep("kv", core.rows(), core.kv_row(), dtype),
            kv_last: self.core.keeps_last().then(|| keep("kv_last", core.rows(), core.kv_row(), dtype)),
            o: keep("attn_o", core.rows(), core.q_row(), dtype),
            lse: keep("lse", core.rows(), core.block.heads, core.acc),
        };
        Saved {
            normed1: keep("normed1", r, self.hidden, dtype),
            attn,
            o: self.ulysses.is_some().then(|| keep("o", n, self.q_row(), dtype)),
            mid: keep("mid", r, self.hidden, dtype),
            normed2: keep("normed2", r, self.hidden, dtype),
            gate_up: keep("gate_up", n, 2 * self.ffn, dtype),
            act: keep("act", n, self.ffn, dtype),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (n, r, h) = (self.tokens(), self.residual_rows(), self.hidden);
        let attn = self.core.scratch(b);
        let ulysses = self.ulysses.as_ref().map(|u| u.scratch(b));
        let mut work = |name, rows, row| b.tensor(name, &[rows, row], self.dtype, TensorKind::Workspace, 1);
        Scratch {
            qkv: work("qkv", n, self.qkv_row()),
            q_local: work("q_local", n, self.q_row()),
            kv_local: work("kv_local", n, self.kv_row()),
            branch: work("branch", r, h),
            d_act: work("d_act", n, self.ffn),
            d_gate_up: work("d_gate_up", n, 2 * self.ffn),
            d_normed: work("d_normed", r, h),
            d_mid: work("d_mid", r, h),
            d_o: work("d_o", n, self.q_row()),
            d_qkv: work("d_qkv", n, self.qkv_row()),
            input: self.tp.room(b, "tp_input", n, h),
            d_output: self.tp.room(b, "tp_d_output", n, h),
            partial: self.tp.room(b, "tp_partial", n, h),
            attn,
            ulysses,
        }
    }

    fn rope(&self, backward: bool) -> Kernel {
        let (batch, heads, kv_heads, head_dim) = (self.batch, self.heads, self.kv_heads, self.head_dim);
        Kernel::Rope { segs: self.segs.clone(), batch, heads, kv_heads, head_dim, theta: self.theta, backward }
    }

    fn norm(&self) -> Kernel {
        Kernel::Norm { rows: self.residual_rows(), cols: self.hidden, eps: self.eps }
    }

    fn norm_bwd(&self) -> Kernel {
        Kernel::NormBwd { rows: self.residual_rows(), cols: self.hidden, eps: self.eps }
    }

    /// x_out = layer(x), keeping what `keep` names.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Buf, x: Buf, x_out: Buf, keep: &Saved) {
        let (n, h, f, tp, fp8) = (self.tokens(), self.hidden, self.ffn, &self.tp, self.fp8);
        let rows = &self.rows;
        let weight = |r: Rows| w.rows(r[0], r[1]);
        // Sums over a rank's share of the columns, before they are summed over the ranks.
        let sums = s.partial.unwrap_or(s.branch);
        b.compute("norm1", self.norm(), &[x, weight(rows.norm1)], &[keep.normed1]);
        let input = tp.gather(b, "qkv_gather", keep.normed1, s.input);
        b.compute("qkv", linear(n, self.qkv_row(), h, fp8), &[input, weight(rows.qkv)], &[s.qkv]);
        self.attention_forward(b, s, keep);
        b.compute("o_proj", linear(n, h, self.q_row(), fp8), &[keep.output(), weight(rows.o)], &[sums]);
        tp.reduce(b, "o_reduce", sums, s.branch);
        let add = Kernel::Add { elems: self.residual_rows() * h, trim: None };
        b.compute("residual1", add.clone(), &[x, s.branch], &[keep.mid]);
        b.compute("norm2", self.norm(), &[keep.mid, weight(rows.norm2)], &[keep.normed2]);
        let input = tp.gather(b, "gate_up_gather", keep.normed2, s.input);
        b.compute("gate_up", linear(n, 2 * f, h, fp8), &[input, weight(rows.gate_up)], &[keep.gate_up]);
        b.compute("swiglu", Kernel::SwiGlu { rows: n, cols: f }, &[keep.gate_up], &[keep.act]);
        b.compute("down", linear(n, h, f, fp8), &[keep.act, weight(rows.down)], &[sums]);
        tp.reduce(b, "down_reduce", sums, s.branch);
        b.compute("residual2", add, &[keep.mid, s.branch], &[x_out]);
    }

    fn attention_forward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) {
        let attn = keep.attn;
        let (Some(ulysses), Some(us), Some(o)) = (&self.ulysses, &s.ulysses, keep.o) else {
            b.compute("rope", self.rope(false), &[s.qkv], &[attn.q, attn.kv]);
            return self.core.forward(b, &s.attn, attn);
        };
        b.compute("rope", self.rope(false), &[s.qkv], &[s.q_local, s.kv_local]);
        ulysses.scatter_qkv(b, us, [s.q_local, s.kv_local], [attn.q, attn.kv]);
        self.core.forward(b, &s.attn, attn);
        ulysses.gather_o(b, us, attn.o, o);
    }

    /// dx from dy, and the gradients of the layer's weights added to `g`.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(&self, b: &mut Builder, s: &Scratch, w: Buf, g: Buf, x: Buf, keep: &Saved, dy: Buf, dx: Buf) {
        let (n, h, f, tp, fp8) = (self.tokens(), self.hidden, self.ffn, &self.tp, self.fp8);
        let rows = &self.rows;
        let weight = |r: Rows| w.rows(r[0], r[1]);
        let grad = |r: Rows| g.rows(r[0], r[1]);
        let dw = |b: &mut Builder, label: &str, out, inp, d: Buf, x: Buf, r| {
            b.compute(label, linear_dw(out, inp, n, fp8), &[d, x, grad(r)], &[grad(r)]);
        };
        let sums = s.partial.unwrap_or(s.d_normed);
        let d_down = tp.gather(b, "down_bwd_gather", dy, s.d_output);
        b.compute("down_dx", linear_dx(n, f, h, fp8), &[d_down, weight(rows.down)], &[s.d_act]);
        dw(b, "down_dw", h, f, d_down, keep.act, rows.down);
        let swiglu = Kernel::SwiGluBwd { rows: n, cols: f };
        let last = b.compute("swiglu_bwd", swiglu, &[keep.gate_up, s.d_act], &[s.d_gate_up]);
        let input = tp.gather_beside(b, "gate_up_regather", keep.normed2, s.input, last);
        b.compute("gate_up_dx", linear_dx(n, h, 2 * f, fp8), &[s.d_gate_up, weight(rows.gate_up)], &[sums]);
        tp.reduce(b, "gate_up_bwd_reduce", sums, s.d_normed);
        dw(b, "gate_up_dw", 2 * f, h, s.d_gate_up, input, rows.gate_up);
        let norm2 = [keep.mid, weight(rows.norm2), s.d_normed, dy, grad(rows.norm2)];
        b.compute("norm2_bwd", self.norm_bwd(), &norm2, &[s.d_mid, grad(rows.norm2)]);
        let d_o = tp.gather(b, "o_bwd_gather", s.d_mid, s.d_output);
        b.compute("o_proj_dx", linear_dx(n, self.q_row(), h, fp8), &[d_o, weight(rows.o)], &[s.d_o]);
        dw(b, "o_proj_dw", h, self.q_row(), d_o, keep.output(), rows.o);
        let last = self.attention_backward(b, s, keep);
        let input = tp.gather_beside(b, "qkv_regather", keep.normed1, s.input, last);
        b.compute("qkv_dx", linear_dx(n, h, self.qkv_row(), fp8), &[s.d_qkv, weight(rows.qkv)], &[sums]);
        tp.reduce(b, "qkv_bwd_reduce", sums, s.d_normed);
        dw(b, "qkv_dw", self.qkv_row(), h, s.d_qkv, input, rows.qkv);
        let norm1 = [x, weight(rows.norm1), s.d_normed, s.d_mid, grad(rows.norm1)];
        b.compute("norm1_bwd", self.norm_bwd(), &norm1, &[dx, grad(rows.norm1)]);
    }

    /// d_qkv from d_o; returns the last op.
    fn attention_backward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) -> u32 {
        let (dq, dkv) = match (&self.ulysses, &s.ulysses) {
            (Some(ulysses), Some(us)) => {
                let d_o = ulysses.scatter_do(b, us, s.d_o);
                let grads = self.core.backward(b, &s.attn, keep.attn, d_o);
                ulysses.gather_dqkv(b, us, grads)
            }
            _ => self.core.backward(b, &s.attn, keep.attn, s.d_o),
        };
        b.compute("rope_bwd", self.rope(true), &[dq, dkv], &[s.d_qkv])
    }

    /// What tensor-parallel ranks have to add up of a layer's gradient before it is whole.
    pub fn sum_shared(&self, b: &mut Builder, g: Buf) {
        let [from, to] = self.weights.shared();
        self.tp.sum_shared(b, "shared_grad_sum", g.rows(from, to), self.core.shape().acc);
    }
}
