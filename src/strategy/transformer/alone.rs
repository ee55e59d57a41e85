//! A layer of one mixer alone behind one norm: y = x + mixer(norm x), the mixer being attention, a feed-forward network,
//! experts or a state-space model (Nemotron-H, arXiv:2504.03624).

use super::backward::Backward;
use super::buffers::{Saved, Scratch};
use super::{Flats, Layer, linear, linear_dx, mamba};
use crate::plan::{Buf, Builder};
use crate::spec::Mixer;

impl Layer {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn forward_alone(
        &self,
        b: &mut Builder,
        s: &Scratch,
        w: Flats,
        [x, x_out]: [Buf; 2],
        keep: &Saved,
        again: bool,
        mixer: Mixer,
    ) {
        let sums = s.partial.unwrap_or(s.branch);
        match mixer {
            Mixer::Attention => {
                self.norms.forward(b, "norm1", x, w.at(self.rows.norm1), keep.normed1());
                self.attention_forward(b, s, w, keep, again);
                self.tp.scattered(b, "o_reduce", sums, s.branch, |b, chunk| {
                    self.linear_out(b, "o_proj", [keep.output(), w.at(self.rows.o)], self.o_row(), false, sums, chunk);
                });
            }
            Mixer::Mamba => {
                self.norms.forward(b, "norm1", x, w.at(self.rows.norm1), keep.normed1());
                let (mamba, ms, saved) = self.mamba(s, keep);
                let (weight, proj) = (w.at(mamba.rows.in_proj), mamba.proj(ms, saved));
                self.tp.gathered(b, "in_proj_gather", keep.normed1(), s.input, |b, input, rows| {
                    let kernel = linear(rows.count(), mamba.spec.proj_cols(), self.hidden, self.fp8);
                    b.compute(&rows.label("in_proj"), kernel, &[rows.of(input), weight], &[rows.of(proj)]);
                });
                mamba.forward(b, ms, w, saved);
                let (out, cols) = (w.at(mamba.rows.out_proj), mamba.spec.inner());
                self.tp.scattered(b, "out_proj_reduce", sums, s.branch, |b, chunk| {
                    self.linear_out(b, "out_proj", [saved.normed, out], cols, false, sums, chunk);
                });
            }
            Mixer::Mlp => {
                self.mlp_in(b, s, w, x, keep, x);
                self.tp.scattered(b, "down_reduce", sums, s.branch, |b, chunk| {
                    self.linear_out(b, "down", [keep.network().1, w.at(self.rows.down)], self.ffn, false, sums, chunk);
                });
            }
            Mixer::Experts => self.experts_forward(b, s, w, x, keep, self.experts.as_ref().expect("it has experts")),
        }
        self.residual(b, "residual1", x, s.branch, [None, None], [Some(x_out), keep.stays[0]]);
    }

    /// The weights, the workspace and the kept buffers of a state-space layer.
    fn mamba<'a>(
        &'a self,
        s: &'a Scratch,
        keep: &'a Saved,
    ) -> (&'a mamba::Mamba, &'a mamba::Scratch, &'a mamba::Saved) {
        let all = (self.mamba.as_ref(), s.mamba.as_ref(), keep.mamba.as_ref());
        let (Some(mamba), Some(scratch), Some(saved)) = all else { unreachable!("a layer of states") };
        (mamba, scratch, saved)
    }

    pub(super) fn backward_alone(&self, b: &mut Builder, back: &Backward, x: Buf, [dy, dx]: [Buf; 2], mixer: Mixer) {
        let (s, keep, tp) = (back.s, back.keep, &self.tp);
        let d_branch = back.dropout(b, "dropout1_bwd", keep.stays[0], dy);
        let norm2 = || self.rows.norm2.expect("a norm before the network");
        back.norm1_again(b, x);
        back.norm2_again(b, x);
        match mixer {
            Mixer::Attention => {
                let (d_o, o) = (s.heads().d_o, back.at(self.rows.o));
                let d_output = tp.gathered(b, "o_bwd_gather", d_branch, s.d_output, |b, d, rows| {
                    back.out_dx(b, "o_proj_dx", [d, o, d_o], self.o_row(), rows);
                });
                let last = back.attention(b, d_output);
                let input = tp.gather_beside(b, "qkv_regather", keep.normed1(), s.input, last);
                back.qkv_dx(b, false);
                tp.reduce(b, "qkv_bwd_reduce", back.sums, s.d_normed);
                back.dw(b, "qkv_dw", self.qkv_row(), self.hidden, s.heads().d_qkv, input, self.rows.qkv);
                back.norm(b, "norm1_bwd", x, self.rows.norm1, dy, dx);
            }
            Mixer::Mamba => {
                let (mamba, ms, saved) = self.mamba(s, keep);
                let (out, cols) = (mamba.rows.out_proj, mamba.spec.inner());
                let d_output = tp.gathered(b, "out_proj_bwd_gather", d_branch, s.d_output, |b, d, rows| {
                    back.out_dx(b, "out_proj_dx", [d, back.at(out), ms.d_normed], cols, rows);
                });
                back.dw(b, "out_proj_dw", self.hidden, cols, d_output, saved.normed, out);
                let last = mamba.backward(b, ms, [back.w, back.g], saved);
                let input = tp.gather_beside(b, "in_proj_regather", keep.normed1(), s.input, last);
                let (cols, d_proj) = (mamba.spec.proj_cols(), mamba.d_proj(ms));
                let kernel = linear_dx(self.tokens(), self.hidden, cols, self.fp8);
                b.compute("in_proj_dx", kernel, &[d_proj, back.at(mamba.rows.in_proj)], &[back.sums]);
                tp.reduce(b, "in_proj_bwd_reduce", back.sums, s.d_normed);
                back.dw(b, "in_proj_dw", cols, self.hidden, d_proj, input, mamba.rows.in_proj);
                back.norm(b, "norm1_bwd", x, self.rows.norm1, dy, dx);
            }
            Mixer::Mlp => {
                let d_output = back.down_dx(b, d_branch);
                let last = back.mlp(b, d_output);
                back.mlp_input(b, last, s.d_normed);
                back.norm(b, "norm2_bwd", x, norm2(), dy, dx);
            }
            Mixer::Experts => {
                back.experts(b, self.experts.as_ref().expect("it has experts"), d_branch);
                back.norm(b, "norm2_bwd", x, norm2(), dy, dx);
            }
        }
    }
}
