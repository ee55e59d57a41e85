//! A Llama-style transformer layer, forward and backward, op by op. How attention talks to other ranks
//! is [`ulysses`]'s and [`attention`]'s affair.
//!
//! Legend: n tokens of a microbatch on this rank, h hidden, a heads, k KV heads, d head dim, f
//! feed-forward width.

use super::attention::{self, Core};
use super::ulysses::{self, Ulysses};
use crate::plan::{Buf, Builder, Dtype, Kernel, Segs, TensorKind};
use crate::spec::LlmSpec;

/// Everything a layer's ops need to know.
pub struct Layer {
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub ffn: u64,
    pub eps: f64,
    pub theta: f64,
    pub batch: u64,
    /// Tokens of one sequence on this rank.
    pub seq: u64,
    /// Where those tokens stand in the sequence.
    pub segs: Segs,
    pub core: Core,
    /// `None` when the Ulysses degree is 1.
    pub ulysses: Option<Ulysses>,
    pub dtype: Dtype,
}

/// Rows of the flat weight tensor of a layer.
pub struct WeightRows {
    pub norm1: [u64; 2],
    pub qkv: [u64; 2],
    pub o: [u64; 2],
    pub norm2: [u64; 2],
    pub gate_up: [u64; 2],
    pub down: [u64; 2],
}

/// Activations kept for the backward pass, as buffers or as formals of a block.
#[derive(Clone, Copy)]
pub struct Saved {
    pub normed1: Buf,
    /// As attention sees them: after the Ulysses exchange where there is one.
    pub attn: attention::Saved,
    /// The output of attention for my tokens, all heads; the same as `attn.o` without Ulysses.
    pub o: Buf,
    pub mid: Buf,
    pub normed2: Buf,
    pub gate_up: Buf,
    pub act: Buf,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    pub attn: attention::Scratch,
    pub ulysses: Option<ulysses::Scratch>,
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
}

/// y[n, out] = x[n, in] W^T, W stored [out, in] as checkpoints have it.
pub fn linear(m: u64, n: u64, k: u64) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false }
}

/// dx[n, in] = dy[n, out] W.
pub fn linear_dx(m: u64, n: u64, k: u64) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: false, accumulate: false }
}

/// dW[out, in] += dy^T x.
pub fn linear_dw(m: u64, n: u64, k: u64) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: true, b_t: false, accumulate: true }
}

impl Layer {
    pub fn new(model: &LlmSpec, batch: u64, seq: u64, segs: Segs, core: Core, ulysses: Option<Ulysses>) -> Layer {
        Layer {
            hidden: model.hidden,
            heads: model.heads,
            kv_heads: model.kv_heads,
            head_dim: model.head_dim,
            ffn: model.ffn,
            eps: model.rms_eps,
            theta: model.rope_theta,
            batch,
            seq,
            segs,
            dtype: core.shape().dtype,
            core,
            ulysses,
        }
    }

    pub fn tokens(&self) -> u64 {
        self.batch * self.seq
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

    pub fn weight_rows(&self) -> WeightRows {
        let (h, f) = (self.hidden, self.ffn);
        let sizes = [h, self.qkv_row() * h, self.q_row() * h, h, 2 * f * h, f * h];
        let mut at = 0;
        let mut next = |size: u64| {
            at += size;
            [at - size, at]
        };
        let [norm1, qkv, o, norm2, gate_up, down] = sizes.map(&mut next);
        WeightRows { norm1, qkv, o, norm2, gate_up, down }
    }

    /// Weights of a layer by Hugging Face name (q, k, v and gate, up fused), rows of the flat tensor, shape.
    pub fn params(&self) -> Vec<(&'static str, [u64; 2], Vec<u64>)> {
        let (rows, h, f) = (self.weight_rows(), self.hidden, self.ffn);
        vec![
            ("input_layernorm.weight", rows.norm1, vec![h]),
            ("self_attn.qkv_proj.weight", rows.qkv, vec![self.qkv_row(), h]),
            ("self_attn.o_proj.weight", rows.o, vec![h, self.q_row()]),
            ("post_attention_layernorm.weight", rows.norm2, vec![h]),
            ("mlp.gate_up_proj.weight", rows.gate_up, vec![2 * f, h]),
            ("mlp.down_proj.weight", rows.down, vec![h, f]),
        ]
    }

    /// Declares what the backward pass keeps, `slots` of each: one a layer, or one in all when it is
    /// computed again.
    pub fn saved(&self, b: &mut Builder, kind: TensorKind, slots: u32) -> Saved {
        let n = self.tokens();
        let mut keep = |name, rows, row, dtype| b.tensor(name, &[rows, row], dtype, kind, slots);
        let (core, dtype) = (self.core.shape(), self.dtype);
        let attn = attention::Saved {
            q: keep("q", core.rows(), core.q_row(), dtype),
            kv: keep("kv", core.rows(), core.kv_row(), dtype),
            o: keep("attn_o", core.rows(), core.q_row(), dtype),
            lse: keep("lse", core.rows(), core.block.heads, core.acc),
        };
        Saved {
            normed1: keep("normed1", n, self.hidden, dtype),
            attn,
            o: if self.ulysses.is_some() { keep("o", n, self.q_row(), dtype) } else { attn.o },
            mid: keep("mid", n, self.hidden, dtype),
            normed2: keep("normed2", n, self.hidden, dtype),
            gate_up: keep("gate_up", n, 2 * self.ffn, dtype),
            act: keep("act", n, self.ffn, dtype),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let n = self.tokens();
        let attn = self.core.scratch(b);
        let ulysses = self.ulysses.as_ref().map(|u| u.scratch(b));
        let mut work = |name, row| b.tensor(name, &[n, row], self.dtype, TensorKind::Workspace, 1);
        Scratch {
            qkv: work("qkv", self.qkv_row()),
            q_local: work("q_local", self.q_row()),
            kv_local: work("kv_local", self.kv_row()),
            branch: work("branch", self.hidden),
            d_act: work("d_act", self.ffn),
            d_gate_up: work("d_gate_up", 2 * self.ffn),
            d_normed: work("d_normed", self.hidden),
            d_mid: work("d_mid", self.hidden),
            d_o: work("d_o", self.q_row()),
            d_qkv: work("d_qkv", self.qkv_row()),
            attn,
            ulysses,
        }
    }

    fn rope(&self, backward: bool) -> Kernel {
        let (batch, heads, kv_heads, head_dim) = (self.batch, self.heads, self.kv_heads, self.head_dim);
        Kernel::Rope { segs: self.segs.clone(), batch, heads, kv_heads, head_dim, theta: self.theta, backward }
    }

    fn norm(&self) -> Kernel {
        Kernel::Norm { rows: self.tokens(), cols: self.hidden, eps: self.eps }
    }

    fn norm_bwd(&self) -> Kernel {
        Kernel::NormBwd { rows: self.tokens(), cols: self.hidden, eps: self.eps }
    }

    /// x_out = layer(x), keeping what `keep` names.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Buf, x: Buf, x_out: Buf, keep: &Saved) {
        let (n, h, f) = (self.tokens(), self.hidden, self.ffn);
        let rows = self.weight_rows();
        let weight = |r: [u64; 2]| w.rows(r[0], r[1]);
        b.compute("norm1", self.norm(), &[x, weight(rows.norm1)], &[keep.normed1]);
        b.compute("qkv", linear(n, self.qkv_row(), h), &[keep.normed1, weight(rows.qkv)], &[s.qkv]);
        self.attention_forward(b, s, keep);
        b.compute("o_proj", linear(n, h, self.q_row()), &[keep.o, weight(rows.o)], &[s.branch]);
        let add = Kernel::Add { elems: n * h, trim: None };
        b.compute("residual1", add.clone(), &[x, s.branch], &[keep.mid]);
        b.compute("norm2", self.norm(), &[keep.mid, weight(rows.norm2)], &[keep.normed2]);
        b.compute("gate_up", linear(n, 2 * f, h), &[keep.normed2, weight(rows.gate_up)], &[keep.gate_up]);
        b.compute("swiglu", Kernel::SwiGlu { rows: n, cols: f }, &[keep.gate_up], &[keep.act]);
        b.compute("down", linear(n, h, f), &[keep.act, weight(rows.down)], &[s.branch]);
        b.compute("residual2", add, &[keep.mid, s.branch], &[x_out]);
    }

    fn attention_forward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) {
        let attn = keep.attn;
        let (Some(ulysses), Some(us)) = (&self.ulysses, &s.ulysses) else {
            b.compute("rope", self.rope(false), &[s.qkv], &[attn.q, attn.kv]);
            return self.core.forward(b, &s.attn, attn);
        };
        b.compute("rope", self.rope(false), &[s.qkv], &[s.q_local, s.kv_local]);
        ulysses.scatter_qkv(b, us, [s.q_local, s.kv_local], [attn.q, attn.kv]);
        self.core.forward(b, &s.attn, attn);
        ulysses.gather_o(b, us, attn.o, keep.o);
    }

    /// dx from dy, and the gradients of the layer's weights added to `g`.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(&self, b: &mut Builder, s: &Scratch, w: Buf, g: Buf, x: Buf, keep: &Saved, dy: Buf, dx: Buf) {
        let (n, h, f) = (self.tokens(), self.hidden, self.ffn);
        let rows = self.weight_rows();
        let weight = |r: [u64; 2]| w.rows(r[0], r[1]);
        let grad = |r: [u64; 2]| g.rows(r[0], r[1]);
        let dw = |b: &mut Builder, label: &str, out, inp, d: Buf, x: Buf, r| {
            b.compute(label, linear_dw(out, inp, n), &[d, x, grad(r)], &[grad(r)]);
        };
        b.compute("down_dx", linear_dx(n, f, h), &[dy, weight(rows.down)], &[s.d_act]);
        dw(b, "down_dw", h, f, dy, keep.act, rows.down);
        b.compute("swiglu_bwd", Kernel::SwiGluBwd { rows: n, cols: f }, &[keep.gate_up, s.d_act], &[s.d_gate_up]);
        b.compute("gate_up_dx", linear_dx(n, h, 2 * f), &[s.d_gate_up, weight(rows.gate_up)], &[s.d_normed]);
        dw(b, "gate_up_dw", 2 * f, h, s.d_gate_up, keep.normed2, rows.gate_up);
        let norm2 = [keep.mid, weight(rows.norm2), s.d_normed, dy, grad(rows.norm2)];
        b.compute("norm2_bwd", self.norm_bwd(), &norm2, &[s.d_mid, grad(rows.norm2)]);
        b.compute("o_proj_dx", linear_dx(n, self.q_row(), h), &[s.d_mid, weight(rows.o)], &[s.d_o]);
        dw(b, "o_proj_dw", h, self.q_row(), s.d_mid, keep.o, rows.o);
        self.attention_backward(b, s, keep);
        b.compute("qkv_dx", linear_dx(n, h, self.qkv_row()), &[s.d_qkv, weight(rows.qkv)], &[s.d_normed]);
        dw(b, "qkv_dw", self.qkv_row(), h, s.d_qkv, keep.normed1, rows.qkv);
        let norm1 = [x, weight(rows.norm1), s.d_normed, s.d_mid, grad(rows.norm1)];
        b.compute("norm1_bwd", self.norm_bwd(), &norm1, &[dx, grad(rows.norm1)]);
    }

    /// d_qkv from d_o.
    fn attention_backward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) {
        let (dq, dkv) = match (&self.ulysses, &s.ulysses) {
            (Some(ulysses), Some(us)) => {
                let d_o = ulysses.scatter_do(b, us, s.d_o);
                let grads = self.core.backward(b, &s.attn, keep.attn, d_o);
                ulysses.gather_dqkv(b, us, grads)
            }
            _ => self.core.backward(b, &s.attn, keep.attn, s.d_o),
        };
        b.compute("rope_bwd", self.rope(true), &[dq, dkv], &[s.d_qkv]);
    }
}
