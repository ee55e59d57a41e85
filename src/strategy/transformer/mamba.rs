//! A Mamba-2 mixer (arXiv:2405.21060, section 8), cut over tensor-parallel ranks by heads and groups as Megatron-LM's
//! `MambaMixer` is: every rank has whole groups and their heads, with their columns of the first projection, of the
//! convolution and of the norm, so that nothing is exchanged before the sums behind the last projection.
//!
//! ```text
//! in_proj -> z | x | B | C | dt;  x, B, C -> conv -> scan with dt -> norm by group, times silu(z) -> out_proj
//! ```
//! Kept for the backward pass are the first projection's output, the scan's and the norm's; the convolution is computed
//! again (`mamba_split_conv1d_scan_combined`).
//!
//! Where ranks share a sequence, be it in a ring or as Ulysses does, a scan wants all of it: what the first projection makes
//! of the tokens here is exchanged for that of all tokens and some of the heads, and the gated output of the scan goes back
//! (`MambaContextParallel`, [`spread`]).

mod spread;

pub use spread::Spread;

use super::super::weights::{Rows, Weights};
use super::Flats;
use crate::plan::kernel::{SsmKernel, SsmOp};
use crate::plan::{Buf, Builder, Dtype, Kernel, TensorKind};
use crate::spec::{LlmSpec, MambaSpec, Workload};

/// The places of the weights among the rows of the flat weight tensor.
pub struct WeightRows {
    pub in_proj: Rows,
    /// Taps of the convolution, and its bias behind them.
    conv: Rows,
    /// dt's bias, A and D.
    heads: Rows,
    norm: Rows,
    pub out_proj: Rows,
}

impl WeightRows {
    pub fn new(w: &mut Weights, m: &MambaSpec, h: u64) -> WeightRows {
        let (d, bc, conv) = (m.inner(), m.bc_cols(), m.conv_cols());
        let in_proj = w.cut("mixer.in_proj.weight", &[m.proj_cols(), h], 0, &[d, d, bc, bc, m.heads]);
        let taps = w.cut("mixer.conv1d.weight", &[conv, m.conv], 0, &[d, bc, bc]);
        let bias = w.cut("mixer.conv1d.bias", &[conv], 0, &[d, bc, bc]);
        let dt = w.cut("mixer.dt_bias", &[m.heads], 0, &[m.heads]);
        w.cut("mixer.A_log", &[m.heads], 0, &[m.heads]);
        let skip = w.cut("mixer.D", &[m.heads], 0, &[m.heads]);
        let norm = w.cut("mixer.norm.weight", &[d], 0, &[d]);
        let out_proj = w.cut("mixer.out_proj.weight", &[h, d], 1, &[d]);
        WeightRows { in_proj, conv: [taps[0], bias[1]], heads: [dt[0], skip[1]], norm, out_proj }
    }
}

pub struct Mamba {
    /// The mixer with this tensor-parallel rank's heads and groups.
    pub spec: MambaSpec,
    pub rows: WeightRows,
    pub batch: u64,
    /// Tokens of one sequence on this rank.
    pub seq: u64,
    pub eps: f64,
    pub dtype: Dtype,
    /// Dtype of the gradients of weights.
    pub grads: Dtype,
    /// The exchange around the scan where ranks share a sequence; else `None`.
    pub spread: Option<Spread>,
}

#[derive(Clone, Copy)]
pub struct Saved {
    /// The first projection's output as the scan sees it: after the exchange where there is one.
    proj: Buf,
    y: Buf,
    /// The gated output of the scan, where the norm does not stand beside the gate; else `None`.
    gated: Option<Buf>,
    /// The input of the last projection.
    pub normed: Buf,
}

impl Saved {
    pub fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![("ssm_proj", &mut self.proj), ("ssm_y", &mut self.y), ("ssm_normed", &mut self.normed)];
        all.extend(self.gated.as_mut().map(|gated| ("ssm_gated", gated)));
        all
    }
}

pub struct Scratch {
    xbc: Buf,
    d_xbc: Buf,
    d_y: Buf,
    /// The gradient of the last projection's input.
    pub d_normed: Buf,
    d_proj: Buf,
    spread: Option<spread::Scratch>,
}

impl Mamba {
    /// A mixer whose heads `tp` ranks share. `seq`: tokens of one sequence on this rank.
    pub fn new(
        (spec, rows): (MambaSpec, WeightRows),
        model: &LlmSpec,
        work: &Workload,
        tp: u64,
        seq: u64,
        grads: Dtype,
        spread: Option<Spread>,
    ) -> Mamba {
        let (batch, eps, dtype) = (work.micro_batch, model.rms_eps, work.dtype);
        Mamba { spec: spec.part(tp), rows, batch, seq, eps, dtype, grads, spread }
    }

    fn tokens(&self) -> u64 {
        self.batch * self.seq
    }

    /// Tokens that a scan goes through, and the mixer with the heads and groups that it has there.
    fn scanned(&self) -> (u64, MambaSpec) {
        let ranks = self.spread.as_ref().map_or(1, Spread::ranks);
        (self.seq * ranks, self.spec.share(ranks))
    }

    pub fn saved(&self, keep: &mut dyn FnMut(&str, u64, u64, Dtype) -> Buf) -> Saved {
        let (n, inner, dtype) = (self.tokens(), self.spec.inner(), self.dtype);
        let (seq, here) = self.scanned();
        Saved {
            proj: keep("ssm_proj", self.batch * seq, here.proj_cols(), dtype),
            y: keep("ssm_y", self.batch * seq, here.inner(), dtype),
            normed: keep("ssm_normed", n, inner, dtype),
            gated: self.spread.as_ref().map(|_| keep("ssm_gated", n, inner, dtype)),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (n, (seq, here)) = (self.tokens(), self.scanned());
        let mut work = |name, n, row| b.tensor(name, &[n, row], self.dtype, TensorKind::Workspace, 1);
        let all = self.batch * seq;
        Scratch {
            xbc: work("ssm_xbc", all, here.conv_cols()),
            d_xbc: work("d_ssm_xbc", all, here.conv_cols()),
            d_y: work("d_ssm_y", all, here.inner()),
            d_normed: work("d_ssm_normed", n, self.spec.inner()),
            d_proj: work("d_ssm_proj", all, here.proj_cols()),
            spread: self.spread.as_ref().map(|spread| self.spread_scratch(b, spread)),
        }
    }

    fn kernel(&self, op: SsmOp) -> Kernel {
        let (seq, mamba) = self.scanned();
        Kernel::Ssm(SsmKernel { batch: self.batch, seq, mamba, op })
    }

    /// The first projection's output for the tokens of this rank.
    pub fn proj(&self, s: &Scratch, keep: &Saved) -> Buf {
        s.spread.as_ref().map_or(keep.proj, |s| s.proj)
    }

    /// The gradient of the first projection's output.
    pub fn d_proj(&self, s: &Scratch) -> Buf {
        s.spread.as_ref().map_or(s.d_proj, |s| s.d_proj)
    }

    /// Goes from [`proj`](Mamba::proj) to `keep.normed`.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Flats, keep: &Saved) {
        if let (Some(spread), Some(spread_s)) = (&self.spread, &s.spread) {
            return self.forward_spread(b, s, w, keep, (spread, spread_s));
        }
        b.compute("conv", self.kernel(SsmOp::Conv), &[keep.proj, w.at(self.rows.conv)], &[s.xbc]);
        b.compute("scan", self.kernel(SsmOp::Scan), &[s.xbc, keep.proj, w.at(self.rows.heads)], &[keep.y]);
        let norm = self.kernel(SsmOp::Norm { eps: self.eps });
        b.compute("gated_norm", norm, &[keep.y, keep.proj, w.at(self.rows.norm)], &[keep.normed]);
    }

    /// Goes from `s.d_normed` to [`d_proj`](Mamba::d_proj), and adds the weights' gradients to `g`; returns the last
    /// op.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, [w, g]: [Flats; 2], keep: &Saved) -> u32 {
        if let (Some(spread), Some(spread_s)) = (&self.spread, &s.spread) {
            return self.backward_spread(b, s, [w, g], keep, (spread, spread_s));
        }
        let both = |r: Rows| [w, g].map(|flat| flat.at(r));
        let [conv, d_conv] = both(self.rows.conv);
        b.compute("conv_again", self.kernel(SsmOp::Conv), &[keep.proj, conv], &[s.xbc]);
        let [norm, d_norm] = both(self.rows.norm);
        let kernel = self.kernel(SsmOp::NormBwd { eps: self.eps });
        let reads = [keep.y, keep.proj, norm, s.d_normed, d_norm];
        b.compute("gated_norm_bwd", kernel, &reads, &[s.d_y, s.d_proj, d_norm]);
        self.scan_bwd(b, s, keep, [conv, d_conv], both(self.rows.heads))
    }

    /// Goes from `s.d_y` to `s.d_proj` without its z, and adds the gradients of weights.
    fn scan_bwd(
        &self,
        b: &mut Builder,
        s: &Scratch,
        keep: &Saved,
        [conv, d_conv]: [Buf; 2],
        [heads, d_heads]: [Buf; 2],
    ) -> u32 {
        let reads = [s.d_proj, s.xbc, keep.proj, heads, s.d_y, d_heads];
        b.compute("scan_bwd", self.kernel(SsmOp::ScanBwd), &reads, &[s.d_proj, s.d_xbc, d_heads]);
        let reads = [s.d_proj, keep.proj, s.d_xbc, conv, d_conv];
        b.compute("conv_bwd", self.kernel(SsmOp::ConvBwd), &reads, &[s.d_proj, d_conv])
    }
}
