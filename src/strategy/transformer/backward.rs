//! A layer's backward pass.

use super::super::expert::Experts;
use super::super::tensor::Chunk;
use super::super::weights::Rows;
use super::buffers::{Saved, Scratch};
use super::codes::Coded;
use super::forward::Forward;
use super::{Flats, Layer, latent, linear_dw, linear_dx, weight_grad, with};
use crate::plan::{Buf, Builder, Kernel};
use crate::spec::Mlp;

impl Layer {
    /// dx from x and dy, which are `xs`; adds the gradients of the layer's weights to `g`.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, [w, g]: [Flats; 2], xs: [Buf; 3], keep: &Saved) {
        let sums = s.partial.unwrap_or(s.d_normed);
        let back = Backward { layer: self, s, w, g, keep: &keep.with_again(s), sums };
        if self.is_chunked() { back.chunks(b, xs) } else { back.run(b, xs) }
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
#[derive(Clone, Copy)]
pub(super) struct Backward<'a> {
    pub(super) layer: &'a Layer,
    pub(super) s: &'a Scratch,
    pub(super) w: Flats,
    pub(super) g: Flats,
    pub(super) keep: &'a Saved,
    /// The buffer in which gradients of a product's input are summed up.
    pub(super) sums: Buf,
}

impl<'a> Backward<'a> {
    /// The forward pass, for what is made again.
    pub(super) fn again(&self) -> Forward<'a> {
        let Backward { layer, s, w, keep, .. } = *self;
        Forward { layer, s, w, keep, again: true }
    }
}

impl Backward<'_> {
    pub(super) fn at(&self, r: Rows) -> Buf {
        self.w.at(r)
    }

    /// Goes through all rows at once, not chunk by chunk.
    fn run(&self, b: &mut Builder, [x, dy, dx]: [Buf; 3]) {
        let Backward { layer: l, s, keep, .. } = *self;
        if let Some(mixer) = l.alone {
            return self.alone(b, [x, dy, dx], mixer);
        }
        let d_branch = self.dropout(b, "dropout2_bwd", keep.stays[usize::from(!l.parallel)], dy);
        self.norm2_again(b, keep.mid.unwrap_or(x));
        let mid = match (&l.experts, keep.mid) {
            (Some(experts), Some(mid)) => {
                if l.experts_again {
                    b.labelled("_again".into(), |b| self.again().experts(b, experts));
                }
                self.experts(b, experts, d_branch);
                mid
            }
            (_, Some(mid)) if l.is_tiled() => {
                self.tiled(b, d_branch);
                mid
            }
            (_, mid) => {
                let d_output = self.down_dx(b, d_branch);
                self.bias(b, "down_bias_bwd", l.rows.down_bias, l.norms.rows, d_branch);
                let last = self.mlp(b, d_output);
                let Some(mid) = mid else { return self.beside(b, x, [dy, d_branch, d_output], dx) };
                self.mlp_input(b, last, s.d_normed);
                mid
            }
        };
        self.norm(b, "norm2_bwd", mid, l.rows.norm2(), dy, s.d_mid);
        let d_branch = self.dropout(b, "dropout1_bwd", keep.stays[0], s.d_mid);
        let d_output = self.o_proj_dx(b, d_branch);
        self.bias(b, "o_bias_bwd", l.rows.o_bias, l.norms.rows, d_branch);
        self.norm1_again(b, x);
        if let Some(latent) = l.latent(s, self.w, keep) {
            self.latent(b, latent, d_output);
        } else {
            let last = self.attention(b, d_output);
            self.qkv(b, last);
        }
        self.norm(b, "norm1_bwd", x, l.rows.norm1, s.d_mid, dx);
    }

    /// dq and dkv of my tokens from d_o.
    fn core(&self, b: &mut Builder, d_o: Buf) -> (Buf, Buf) {
        let (l, attn, room) = (self.layer, self.keep.attn(), self.s.heads());
        if l.attends_again {
            // It goes into the kept buffers: a checkpoint around a fused kernel saves no memory but the output's, which
            // others need.
            l.core.forward(b, &room.attn, attn, true);
        }
        match (&l.ulysses, &room.ulysses) {
            (Some(ulysses), Some(us)) => {
                let d_o = ulysses.scatter_do(b, us, d_o);
                let grads = l.core.backward(b, &room.attn, attn, d_o);
                ulysses.gather_dqkv(b, us, grads)
            }
            _ => l.core.backward(b, &room.attn, attn, d_o),
        }
    }

    /// Adds to the gradient of a weight of `out` times `inp`, from all rows of the gradient of its product, and of its
    /// input.
    pub(super) fn dw(&self, b: &mut Builder, label: &str, [out, inp]: [u64; 2], reads: [Buf; 2], r: Rows) {
        self.dw_of(b, label, [out, inp, self.layer.tokens()], reads, r);
    }

    /// [`dw`](Backward::dw) of `n` rows.
    pub(super) fn dw_of(&self, b: &mut Builder, label: &str, [out, inp, n]: [u64; 3], reads: [Buf; 2], r: Rows) {
        weight_grad(b, label, linear_dw(out, inp, n, self.layer.fp8), reads, self.g.at(r), self.s.dw);
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
        let n = l.tokens();
        let ((gate_up, act), (d_act, d_gate_up)) = (keep.network(), s.network());
        if l.mlp_again {
            b.labelled("_again".into(), |b| self.again().gathered_mlp_in(b));
        } else if !self.dequantise(b, Coded::Act) && l.act_again {
            self.again().activation(b, "_again");
        }
        self.dw(b, "down_dw", [l.hidden, l.ffn], [d_output, act], l.rows.down);
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
        let input = l.tp.gather_beside(b, "gate_up_regather", self.keep.normed2(), s.input, last);
        self.gate_up_dx(b);
        l.tp.reduce(b, "gate_up_bwd_reduce", self.sums, to);
        self.dw(b, "gate_up_dw", [l.wide, l.hidden], [s.network().1, input], l.rows.gate_up);
    }

    /// Goes from the gradient of the experts' output to that of their input, in `d_normed`.
    pub(super) fn experts(&self, b: &mut Builder, experts: &Experts, d_branch: Buf) {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (saved, scratch) = (keep.experts.as_ref().expect("kept"), s.experts.as_ref().expect("declared"));
        let sums = s.partial.or(s.shared).unwrap_or(self.sums);
        let shared = Backward { sums, ..*self };
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
        let (parts, bufs) = ([self.w, self.g].map(|f| l.parts(f)), [keep.normed2(), d_branch, s.d_normed]);
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
        self.o_proj_dw(b, d_output);
        let (dq, dkv) = self.core(b, s.heads().d_o);
        let mut last = b.compute("rope_bwd", l.rope(true), &[dq, dkv], &[s.heads().d_qkv]);
        if let (Some(norms), Some(raw)) = (l.rows.head_norms, keep.raw_qk) {
            let grad = self.g.at(norms);
            let reads = [s.heads().d_qkv, raw, self.at(norms), grad];
            last = b.compute("qk_norm_bwd", l.head_norm(true), &reads, &[s.heads().d_qkv, grad]);
        }
        self.bias(b, "qkv_bias_bwd", l.rows.qkv_bias, l.tokens(), s.heads().d_qkv);
        last
    }

    /// Makes the gradient of attention's output, from a rank's share of that of its projection; returns the latter whole.
    pub(super) fn o_proj_dx(&self, b: &mut Builder, d_branch: Buf) -> Buf {
        let (l, s) = (self.layer, self.s);
        let (o, d_o) = (self.at(l.rows.o), s.heads().d_o);
        l.tp.gathered(b, "o_bwd_gather", d_branch, s.d_output, |b, d, rows| {
            self.out_dx(b, "o_proj_dx", [d, o, d_o], l.o_row(), rows);
        })
    }

    pub(super) fn o_proj_dw(&self, b: &mut Builder, d_output: Buf) {
        let l = self.layer;
        self.dw(b, "o_proj_dw", [l.hidden, l.o_row()], [d_output, self.keep.output()], l.rows.o);
    }

    /// Goes from the gradients of latent attention's output, projected and not, to that of its input, in `d_normed`.
    fn latent(&self, b: &mut Builder, pass: latent::Pass, d_output: Buf) {
        let (s, attn) = (self.s, self.keep.attn());
        self.o_proj_dw(b, d_output);
        if pass.latent.again {
            pass.forward(b, [attn.q, attn.kv], attn.index, true);
        }
        let back = latent::Backward { pass, g: self.g };
        let d_o = back.values(b, attn.o, s.heads().d_o);
        let (dq, dkv) = self.core(b, d_o);
        back.run(b, [dq, dkv], [s.d_normed, self.sums]);
        if let Some(d_index) = s.heads().attn.d_index() {
            back.index(b, d_index);
        }
    }

    /// Goes from the gradients of q, k and v to that of their input, in `d_normed`; `last` is the op before.
    pub(super) fn qkv(&self, b: &mut Builder, last: u32) {
        let (l, s) = (self.layer, self.s);
        let input = l.tp.gather_beside(b, "qkv_regather", self.keep.normed1(), s.input, last);
        self.qkv_dx(b, false);
        l.tp.reduce(b, "qkv_bwd_reduce", self.sums, s.d_normed);
        self.dw(b, "qkv_dw", [l.qkv_row(), l.hidden], [s.heads().d_qkv, input], l.rows.qkv);
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
        if self.dequantise(b, Coded::Norm1) {
            return;
        }
        if let Some(normed) = self.s.again.normed1 {
            self.layer.norms.forward(b, "norm1_again", x, self.at(self.layer.rows.norm1), normed);
        }
    }

    /// Makes the output of the second norm, of `x`, again where it is not kept.
    pub(super) fn norm2_again(&self, b: &mut Builder, x: Buf) {
        if self.dequantise(b, Coded::Norm2) {
            return;
        }
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
            self.dw(b, "gate_up_dw", [l.wide, l.hidden], [s.network().1, input], l.rows.gate_up);
            self.norm(b, "norm2_bwd", x, norm2, dy, s.d_mid);
            residual = s.d_mid;
        }
        let input = tp.gather_beside(b, "qkv_regather", keep.normed1(), s.input, last);
        self.qkv_dx(b, keep.normed2.is_none());
        tp.reduce(b, "qkv_bwd_reduce", self.sums, s.d_normed);
        self.dw(b, "qkv_dw", [l.qkv_row(), l.hidden], [s.heads().d_qkv, input], l.rows.qkv);
        if keep.normed2.is_none() {
            self.dw(b, "gate_up_dw", [l.wide, l.hidden], [s.network().1, input], l.rows.gate_up);
        }
        self.norm(b, "norm1_bwd", x, l.rows.norm1, residual, dx);
    }

    pub(super) fn norm(&self, b: &mut Builder, label: &str, x: Buf, r: Rows, residual: Buf, dx: Buf) {
        let weights = [self.at(r), self.g.at(r)];
        self.layer.norms.backward(b, label, x, weights, [self.s.d_normed, residual], dx);
    }
}
