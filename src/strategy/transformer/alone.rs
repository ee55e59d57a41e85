//! A layer of one mixer alone behind one norm: y = x + mixer(norm x), the mixer being attention, a feed-forward network,
//! experts or a state-space model (Nemotron-H, arXiv:2504.03624).

use super::backward::Backward;
use super::buffers::{Saved, Scratch};
use super::forward::Forward;
use super::{Layer, linear, linear_dx, mamba};
use crate::plan::{Buf, Builder};
use crate::spec::Mixer;

impl Layer {
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
}

impl Forward<'_> {
    pub(super) fn alone(&self, b: &mut Builder, [x, x_out]: [Buf; 2], mixer: Mixer) {
        let Forward { layer: l, s, keep, .. } = *self;
        match mixer {
            Mixer::Attention => {
                self.norm1(b, x);
                self.attention(b);
                self.o_proj(b);
            }
            Mixer::Mamba => {
                self.norm1(b, x);
                let (mamba, ms, saved) = l.mamba(s, keep);
                let (weight, proj) = (self.at(mamba.rows.in_proj), mamba.proj(ms, saved));
                l.tp.gathered(b, "in_proj_gather", keep.normed1(), s.input, |b, input, rows| {
                    let kernel = linear(rows.count(), mamba.spec.proj_cols(), l.hidden, l.fp8);
                    b.compute(&rows.label("in_proj"), kernel, &[rows.of(input), weight], &[rows.of(proj)]);
                });
                mamba.forward(b, ms, self.w, saved);
                let (labels, out) = (["out_proj", "out_proj_reduce"], mamba.rows.out_proj);
                self.project_out(b, labels, saved.normed, out, mamba.spec.inner(), s.branch);
            }
            Mixer::Mlp => {
                self.mlp_in(b, x, x);
                self.down(b, s.branch);
            }
            Mixer::Experts => {
                self.norm2(b, x);
                self.experts(b, l.experts.as_ref().expect("it has experts"));
            }
        }
        l.residual(b, "residual1", x, s.branch, [None, None], [Some(x_out), keep.stays[0]]);
    }
}

impl Backward<'_> {
    pub(super) fn alone(&self, b: &mut Builder, [x, dy, dx]: [Buf; 3], mixer: Mixer) {
        let Backward { layer: l, s, keep, .. } = *self;
        let d_branch = self.dropout(b, "dropout1_bwd", keep.stays[0], dy);
        self.norm1_again(b, x);
        self.norm2_again(b, x);
        match mixer {
            Mixer::Attention => {
                let d_output = self.o_proj_dx(b, d_branch);
                let last = self.attention(b, d_output);
                self.qkv(b, last);
                self.norm(b, "norm1_bwd", x, l.rows.norm1, dy, dx);
            }
            Mixer::Mamba => {
                let (mamba, ms, saved) = l.mamba(s, keep);
                let (out, cols) = (mamba.rows.out_proj, mamba.spec.inner());
                let d_output = l.tp.gathered(b, "out_proj_bwd_gather", d_branch, s.d_output, |b, d, rows| {
                    self.out_dx(b, "out_proj_dx", [d, self.at(out), ms.d_normed], cols, rows);
                });
                self.dw(b, "out_proj_dw", [l.hidden, cols], [d_output, saved.normed], out);
                let last = mamba.backward(b, ms, [self.w, self.g], saved);
                let input = l.tp.gather_beside(b, "in_proj_regather", keep.normed1(), s.input, last);
                let (cols, d_proj) = (mamba.spec.proj_cols(), mamba.d_proj(ms));
                let kernel = linear_dx(l.tokens(), l.hidden, cols, l.fp8);
                b.compute("in_proj_dx", kernel, &[d_proj, self.at(mamba.rows.in_proj)], &[self.sums]);
                l.tp.reduce(b, "in_proj_bwd_reduce", self.sums, s.d_normed);
                self.dw(b, "in_proj_dw", [cols, l.hidden], [d_proj, input], mamba.rows.in_proj);
                self.norm(b, "norm1_bwd", x, l.rows.norm1, dy, dx);
            }
            Mixer::Mlp => {
                let d_output = self.down_dx(b, d_branch);
                let last = self.mlp(b, d_output);
                self.mlp_input(b, last, s.d_normed);
                self.norm(b, "norm2_bwd", x, l.rows.norm2(), dy, dx);
            }
            Mixer::Experts => {
                self.experts(b, l.experts.as_ref().expect("it has experts"), d_branch);
                self.norm(b, "norm2_bwd", x, l.rows.norm2(), dy, dx);
            }
        }
    }
}
