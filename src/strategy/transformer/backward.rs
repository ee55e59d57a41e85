//! A layer's backward pass.

use super::super::expert::Experts;
use super::super::tensor::Chunk;
use super::super::weights::Rows;
use super::buffers::{Saved, Scratch};
use super::{Flats, Layer, linear_dw, linear_dx, weight_grad, with};
use crate::plan::{Buf, Builder, Kernel};
use crate::spec::Mlp;

impl Layer {
    /// dx from dy; adds the gradients of the layer's weights to `g`.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(&self, b: &mut Builder, s: &Scratch, [w, g]: [Flats; 2], x: Buf, keep: &Saved, dy: Buf, dx: Buf) {
        if self.is_chunked() {
            return self.backward_chunks(b, s, [w, g], keep, [x, dy, dx]);
        }
        let keep = &keep.with_again(s);
        let back = Backward { layer: self, s, w, g, keep, sums: s.partial.unwrap_or(s.d_normed) };
        if let Some(mixer) = self.alone {
            return self.backward_alone(b, &back, x, [dy, dx], mixer);
        }
        let d_branch = back.dropout(b, "dropout2_bwd", keep.stays[usize::from(!self.parallel)], dy);
        back.norm2_again(b, keep.mid.unwrap_or(x));
        let mid = match (&self.experts, keep.mid) {
            (Some(experts), Some(mid)) => {
                if self.experts_again {
                    let normed = keep.normed2.expect("a norm before each half");
                    b.labelled("_again".into(), |b| self.experts_of(b, s, w, normed, keep, experts));
                }
                back.experts(b, experts, d_branch);
                mid
            }
            (_, Some(mid)) if self.is_tiled() => {
                back.tiled_network(b, d_branch);
                mid
            }
            (_, mid) => {
                let d_output = back.down_dx(b, d_branch);
                back.bias(b, "down_bias_bwd", self.rows.down_bias, self.norms.rows, d_branch);
                let last = back.mlp(b, d_output);
                let Some(mid) = mid else { return back.beside(b, x, [dy, d_branch, d_output], dx) };
                back.mlp_input(b, last, s.d_normed);
                mid
            }
        };
        back.norm(b, "norm2_bwd", mid, self.rows.norm2.expect("a norm before each half"), dy, s.d_mid);
        let d_branch = back.dropout(b, "dropout1_bwd", keep.stays[0], s.d_mid);
        let d_output = self.tp.gathered(b, "o_bwd_gather", d_branch, s.d_output, |b, d, rows| {
            back.out_dx(b, "o_proj_dx", [d, back.at(self.rows.o), s.heads().d_o], self.o_row(), rows);
        });
        back.bias(b, "o_bias_bwd", self.rows.o_bias, self.norms.rows, d_branch);
        back.norm1_again(b, x);
        if let (Some(latent), Some(ls), Some(saved)) = (&self.latent, &s.latent, &keep.latent) {
            back.dw(b, "o_proj_dw", self.hidden, self.o_row(), d_output, keep.output(), self.rows.o);
            let input = (keep.normed1(), s.input);
            if latent.again {
                let attn = keep.attn();
                latent.forward(b, ls, w, input, saved, [attn.q, attn.kv], attn.index, true);
            }
            let d_o = latent.values_backward(b, ls, [w, g], keep.attn().o, s.heads().d_o);
            let (dq, dkv) = self.core_backward(b, s, keep, d_o);
            latent.backward(b, ls, [w, g], input, saved, [dq, dkv], (s.d_normed, back.sums));
            if let Some(d_index) = s.heads().attn.d_index() {
                latent.index_backward(b, ls, [w, g], keep.normed1(), saved, d_index);
            }
            return back.norm(b, "norm1_bwd", x, self.rows.norm1, s.d_mid, dx);
        }
        let last = back.attention(b, d_output);
        let input = self.tp.gather_beside(b, "qkv_regather", keep.normed1(), s.input, last);
        back.qkv_dx(b, false);
        self.tp.reduce(b, "qkv_bwd_reduce", back.sums, s.d_normed);
        back.dw(b, "qkv_dw", self.qkv_row(), self.hidden, s.heads().d_qkv, input, self.rows.qkv);
        back.norm(b, "norm1_bwd", x, self.rows.norm1, s.d_mid, dx);
    }

    /// dq and dkv of my tokens from d_o.
    fn core_backward(&self, b: &mut Builder, s: &Scratch, keep: &Saved, d_o: Buf) -> (Buf, Buf) {
        if self.attends_again {
            // It goes into the kept buffers: a checkpoint around a fused kernel saves no memory but the output's, which
            // others need.
            self.core.forward(b, &s.heads().attn, keep.attn(), true);
        }
        match (&self.ulysses, &s.heads().ulysses) {
            (Some(ulysses), Some(us)) => {
                let d_o = ulysses.scatter_do(b, us, d_o);
                let grads = self.core.backward(b, &s.heads().attn, keep.attn(), d_o);
                ulysses.gather_dqkv(b, us, grads)
            }
            _ => self.core.backward(b, &s.heads().attn, keep.attn(), d_o),
        }
    }

    /// d_qkv from d_o; returns the last op.
    fn attention_backward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) -> u32 {
        let (dq, dkv) = self.core_backward(b, s, keep, s.heads().d_o);
        b.compute("rope_bwd", self.rope(true), &[dq, dkv], &[s.heads().d_qkv])
    }

    /// Sums the part of a layer's gradient that tensor-parallel ranks have to add up before it is whole.
    pub fn sum_shared(&self, b: &mut Builder, g: Buf) {
        let [from, to] = self.weights.shared();
        let acc = self.grads;
        self.tp.sum_shared(b, "shared_grad_sum", g.rows(from, to), acc);
        // Weights used by heads are among them; where all tokens are everywhere, only these are left.
        let [from, to] = self.weights.by_heads();
        if to > from {
            self.tp.sum_by_heads(b, "head_grad_sum", g.rows(from, to), acc);
        }
        // K and V stand behind the rank's own queries.
        let own = self.q_row();
        let kv =
            [(Some(self.rows.qkv), "kv_grad_sum", own * self.hidden), (self.rows.qkv_bias, "kv_bias_grad_sum", own)];
        for (rows, label, queries) in kv {
            if let Some([from, to]) = rows.filter(|_| self.attends() && self.latent.is_none()) {
                self.tp.sum_copies(b, label, g.rows(from + queries, to), acc, self.kv_copies);
            }
        }
    }

    /// Makes the gradients of copies of experts one, before they are summed over the ranks that hold the same slots.
    pub fn sum_copies(&self, b: &mut Builder, s: &Scratch, g: Buf) {
        if let (Some(experts), Some(scratch)) = (&self.experts, &s.experts) {
            experts.sum_copies(b, scratch, g);
        }
    }
}

/// One layer's backward pass under way.
pub(super) struct Backward<'a> {
    pub(super) layer: &'a Layer,
    pub(super) s: &'a Scratch,
    pub(super) w: Flats,
    pub(super) g: Flats,
    pub(super) keep: &'a Saved,
    /// The buffer in which gradients of a product's input are summed up.
    pub(super) sums: Buf,
}

impl Backward<'_> {
    pub(super) fn at(&self, r: Rows) -> Buf {
        self.w.at(r)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn dw(&self, b: &mut Builder, label: &str, out: u64, inp: u64, d: Buf, x: Buf, r: Rows) {
        let grad = self.g.at(r);
        let product = linear_dw(out, inp, self.layer.tokens(), self.layer.fp8);
        weight_grad(b, label, product, [d, x], grad, self.s.dw);
    }

    /// Adds to the gradient of a bias, if there is one, from `rows` rows of the gradient of what it was added to.
    pub(super) fn bias(&self, b: &mut Builder, label: &str, at: Option<Rows>, rows: u64, d: Buf) {
        let Some(r) = at else { return };
        let grad = self.g.at(r);
        b.compute(label, Kernel::BiasBwd { rows, cols: r[1] - r[0] }, &[d, grad], &[grad]);
    }

    /// The gradient of a branch, from the gradient of the sum that the branch was added to.
    pub(super) fn dropout(&self, b: &mut Builder, label: &str, stays: Option<Buf>, dy: Buf) -> Buf {
        let (Some(stays), Some(d_branch)) = (stays, self.s.d_branch) else { return dy };
        let (elems, probability) = (self.layer.norms.rows * self.layer.hidden, self.layer.dropout);
        b.compute(label, Kernel::DropoutBwd { elems, probability }, &[dy, stays], &[d_branch]);
        d_branch
    }

    /// Makes rows of the gradient of a projection's input, of `cols` columns, from the gradient of its output.
    pub(super) fn out_dx(&self, b: &mut Builder, label: &str, [d, w, to]: [Buf; 3], cols: u64, rows: Chunk) {
        let kernel = linear_dx(rows.count(), cols, self.layer.hidden, self.layer.fp8);
        b.compute(&rows.label(label), kernel, &[rows.of(d), w], &[rows.of(to)]);
    }

    /// Makes the gradient of the network's activation, from a rank's share of the gradient of its output; returns the
    /// latter whole.
    pub(super) fn down_dx(&self, b: &mut Builder, d_branch: Buf) -> Buf {
        let (l, s) = (self.layer, self.s);
        let (down, d_act) = (self.at(l.rows.down), s.network().0);
        l.tp.gathered(b, "down_bwd_gather", d_branch, s.d_output, |b, d, rows| {
            self.out_dx(b, "down_dx", [d, down, d_act], l.ffn, rows);
        })
    }

    /// Goes from the gradients of the network's output and of its activation to the gradient of the activation's input;
    /// returns the last op.
    pub(super) fn mlp(&self, b: &mut Builder, d_output: Buf) -> u32 {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (n, h, f) = (l.tokens(), l.hidden, l.ffn);
        let ((gate_up, act), (d_act, d_gate_up)) = (keep.network(), s.network());
        if l.act_again {
            l.activation(b, keep, "_again");
        }
        self.dw(b, "down_dw", h, f, d_output, act, l.rows.down);
        let last = self.activation(b, n, [gate_up, d_act, d_gate_up]);
        self.bias(b, "up_bias_bwd", l.rows.up_bias, n, d_gate_up);
        last
    }

    /// Goes from the gradient of the activation's output to that of its input, `n` rows of each; returns the op.
    pub(super) fn activation(&self, b: &mut Builder, n: u64, [gate_up, d_act, d_gate_up]: [Buf; 3]) -> u32 {
        let f = self.layer.ffn;
        let (label, kernel) = match self.layer.mlp {
            Mlp::SwiGlu => ("swiglu_bwd", Kernel::SwiGluBwd { rows: n, cols: f }),
            Mlp::Gelu => ("gelu_bwd", Kernel::GeluBwd { elems: n * f }),
            Mlp::Relu2 => ("relu2_bwd", Kernel::Relu2Bwd { elems: n * f }),
        };
        b.compute(label, kernel, &[gate_up, d_act], &[d_gate_up])
    }

    /// Goes from the gradient of the activation's input to that of the network's, in `to`; `last` is the op before.
    pub(super) fn mlp_input(&self, b: &mut Builder, last: u32, to: Buf) {
        let (l, s) = (self.layer, self.s);
        let input = self.keep.normed2.expect("a norm before each half");
        let input = l.tp.gather_beside(b, "gate_up_regather", input, s.input, last);
        self.gate_up_dx(b);
        l.tp.reduce(b, "gate_up_bwd_reduce", self.sums, to);
        self.dw(b, "gate_up_dw", l.wide, l.hidden, s.network().1, input, l.rows.gate_up);
    }

    /// Goes from the gradient of the experts' output to that of their input, in `d_normed`.
    pub(super) fn experts(&self, b: &mut Builder, experts: &Experts, d_branch: Buf) {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (saved, scratch) = (keep.experts.as_ref().expect("kept"), s.experts.as_ref().expect("declared"));
        let sums = s.partial.or(s.shared).unwrap_or(self.sums);
        let shared = Backward { layer: l, s, w: self.w, g: self.g, keep, sums };
        let last = std::cell::Cell::new(0);
        let mut first = |b: &mut Builder| {
            if l.ffn > 0 {
                let d_output = shared.down_dx(b, d_branch);
                last.set(shared.mlp(b, d_output));
            }
        };
        let mut second = |b: &mut Builder| {
            if let Some(to) = s.shared {
                shared.mlp_input(b, last.get(), to);
            }
        };
        let (parts, bufs) = ([self.w, self.g].map(|f| l.parts(f)), [keep.normed2.expect("kept"), d_branch, s.d_normed]);
        if l.overlap_shared {
            experts.backward(b, scratch, parts, bufs, saved, [&mut first, &mut second]);
        } else {
            first(b);
            second(b);
            experts.backward(b, scratch, parts, bufs, saved, [&mut |_| {}, &mut |_| {}]);
        }
        l.add_shared(b, "shared_bwd_add", s, s.d_normed);
    }

    fn gate_up_dx(&self, b: &mut Builder) {
        let l = self.layer;
        let kernel = linear_dx(l.tokens(), l.hidden, l.wide, l.fp8);
        b.compute("gate_up_dx", kernel, &[self.s.network().1, self.at(l.rows.gate_up)], &[self.sums]);
    }

    /// Goes from the gradients of attention's output, projected and not, to those of q, k and v; returns the last op.
    pub(super) fn attention(&self, b: &mut Builder, d_output: Buf) -> u32 {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (n, h, o) = (l.tokens(), l.hidden, l.o_row());
        self.dw(b, "o_proj_dw", h, o, d_output, keep.output(), l.rows.o);
        let mut last = l.attention_backward(b, s, keep);
        if let (Some(norms), Some(raw)) = (l.rows.head_norms, keep.raw_qk) {
            let grad = self.g.at(norms);
            let reads = [s.heads().d_qkv, raw, self.at(norms), grad];
            last = b.compute("qk_norm_bwd", l.head_norm(true), &reads, &[s.heads().d_qkv, grad]);
        }
        self.bias(b, "qkv_bias_bwd", l.rows.qkv_bias, n, s.heads().d_qkv);
        last
    }

    /// Makes the gradient of the input of q, k and v; `adds`: to the network's gradient, where both have the same
    /// input.
    pub(super) fn qkv_dx(&self, b: &mut Builder, adds: bool) {
        let l = self.layer;
        let kernel = with(linear_dx(l.tokens(), l.hidden, l.qkv_row(), l.fp8), adds, false);
        let reads = [self.s.heads().d_qkv, self.at(l.rows.qkv)].into_iter().chain(adds.then_some(self.sums));
        b.compute("qkv_dx", kernel, &reads.collect::<Vec<_>>(), &[self.sums]);
    }

    /// Makes the output of the first norm, of `x`, again where it is not kept.
    pub(super) fn norm1_again(&self, b: &mut Builder, x: Buf) {
        if let Some(normed) = self.s.again.normed1 {
            self.layer.norms.forward(b, "norm1_again", x, self.at(self.layer.rows.norm1), normed);
        }
    }

    /// Makes the output of the second norm, of `x`, again where it is not kept.
    pub(super) fn norm2_again(&self, b: &mut Builder, x: Buf) {
        if let (Some(normed), Some(norm)) = (self.s.again.normed2, self.layer.rows.norm2) {
            self.layer.norms.forward(b, "norm2_again", x, self.at(norm), normed);
        }
    }

    /// Ends the backward pass of a parallel block, where both halves have the gradient of its output.
    fn beside(&self, b: &mut Builder, x: Buf, [dy, d_branch, d_output]: [Buf; 3], dx: Buf) {
        let (l, s, keep, tp) = (self.layer, self.s, self.keep, &self.layer.tp);
        self.bias(b, "o_bias_bwd", l.rows.o_bias, l.norms.rows, d_branch);
        self.norm1_again(b, x);
        self.out_dx(b, "o_proj_dx", [d_output, self.at(l.rows.o), s.heads().d_o], l.o_row(), tp.all());
        let last = self.attention(b, d_output);
        self.gate_up_dx(b);
        let mut residual = dy;
        if let (Some(norm2), Some(normed2)) = (l.rows.norm2, keep.normed2) {
            let input = tp.gather_beside(b, "gate_up_regather", normed2, s.input, last);
            tp.reduce(b, "gate_up_bwd_reduce", self.sums, s.d_normed);
            self.dw(b, "gate_up_dw", l.wide, l.hidden, s.network().1, input, l.rows.gate_up);
            self.norm(b, "norm2_bwd", x, norm2, dy, s.d_mid);
            residual = s.d_mid;
        }
        let input = tp.gather_beside(b, "qkv_regather", keep.normed1(), s.input, last);
        self.qkv_dx(b, keep.normed2.is_none());
        tp.reduce(b, "qkv_bwd_reduce", self.sums, s.d_normed);
        self.dw(b, "qkv_dw", l.qkv_row(), l.hidden, s.heads().d_qkv, input, l.rows.qkv);
        if keep.normed2.is_none() {
            self.dw(b, "gate_up_dw", l.wide, l.hidden, s.network().1, input, l.rows.gate_up);
        }
        self.norm(b, "norm1_bwd", x, l.rows.norm1, residual, dx);
    }

    pub(super) fn norm(&self, b: &mut Builder, label: &str, x: Buf, r: Rows, residual: Buf, dx: Buf) {
        let weights = [self.at(r), self.g.at(r)];
        self.layer.norms.backward(b, label, x, weights, self.s.d_normed, residual, dx);
    }
}
