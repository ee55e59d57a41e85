//! A scan over the tokens of several ranks, each of which goes through all of them with some of the heads: Megatron-LM's
//! `MambaContextParallel`.
//!
//! ```text
//! in_proj -> [pack | all-to-all of z, x, B, C, dt | unpack] -> conv -> scan -> times silu(z)
//!         -> [pack | all-to-all of y | unpack] -> norm by group -> out_proj
//! ```
//! With fewer groups than ranks, those whose heads read a group's B and C are each sent a copy, and the gradients of copies
//! are summed where they come back. Convolution and scan take their heads' part of weights that every rank has, and leave
//! the gradients of that part alone: the sum over replicas, which goes over these ranks as well, joins them.
//!
//! Exchanged tokens come rank after rank; they are put in the order of the sequence, in which a ring may have cut them
//! another way (`_undo_attention_load_balancing`).

use super::super::super::head_exchange::{HeadExchange, Parcel, Way};
use super::super::super::step::Engines;
use super::super::super::weights::Rows;
use super::super::Flats;
use super::{Mamba, Saved};
use crate::plan::kernel::{HeadRanks, SsmKernel, SsmOp};
use crate::plan::{Axis, Buf, Builder, Dtype, HeadPart, Kernel, Segs, TensorKind};
use crate::spec::{MambaSpec, Parallelism};

pub struct Spread {
    by: HeadRanks,
    exchange: HeadExchange,
    /// Whether z, x, B, C and dt travel in an all-to-all each.
    separate: bool,
}

pub struct Scratch {
    /// The first projection's output for the tokens of this rank, and its gradient.
    pub proj: Buf,
    pub d_proj: Buf,
    /// The output of the scan times the gate for all tokens, and the gradient of that.
    gated: Buf,
    d_gated: Buf,
    /// The gradient of the norm's input.
    d_gated_local: Buf,
    to_heads: Parcel,
    to_tokens: Parcel,
    /// The convolution's weights and the heads' parameters of this rank's heads, and their gradients.
    own: [Buf; 2],
    d_own: [Buf; 2],
}

impl Spread {
    /// The exchange around a scan; `None` where a rank has whole sequences. `segs`: the positions of its tokens.
    pub fn new(
        par: &Parallelism,
        [batch, seq]: [u64; 2],
        segs: &Segs,
        dtype: Dtype,
        engines: Engines,
    ) -> Option<Spread> {
        let by = HeadRanks { ring: par.ring, ulysses: par.ulysses };
        let both = [(par.ring, Axis::Cp), (par.ulysses, Axis::Up)];
        let axes = both.into_iter().filter(|(degree, _)| *degree > 1).map(|(_, axis)| axis).collect();
        // With consecutive parts the rank order is that of the sequence.
        let order = (par.ring > 1).then(|| segs.clone());
        let exchange = HeadExchange { ranks: by.all(), axes, batch, seq, order, dtype, engine: engines.collective };
        (by.all() > 1).then_some(Spread { by, exchange, separate: par.options.a2a_separate })
    }

    pub fn ranks(&self) -> u64 {
        self.by.all()
    }
}

/// Columns of the first projection as they travel.
fn parts(m: &MambaSpec) -> [HeadPart; 3] {
    [HeadPart::new(2, m.heads, m.head_dim), HeadPart::new(2, m.groups, m.state), HeadPart::new(1, m.heads, 1)]
}

/// Elements of the convolution's weights, and of the heads' parameters.
fn own_elems(here: &MambaSpec) -> [u64; 2] {
    [here.conv_cols() * (here.conv + 1), 3 * here.heads]
}

impl Mamba {
    pub(super) fn spread_scratch(&self, b: &mut Builder, spread: &Spread) -> Scratch {
        let (n, m, (seq, here)) = (self.tokens(), self.spec, self.scanned());
        let wires: &[&str] = if spread.separate { &["z", "x", "b", "c", "dt"] } else { &["zxbcdt"] };
        let to_heads = spread.exchange.joined(b, "zxbcdt", &parts(&m), wires);
        let to_tokens = spread.exchange.parcel(b, "y", &[HeadPart::new(1, m.heads, m.head_dim)], &["y"]);
        let mut work = |name, dtype, n, row| b.tensor(name, &[n, row], dtype, TensorKind::Workspace, 1);
        let [conv, heads] = own_elems(&here);
        Scratch {
            proj: work("ssm_proj_local", self.dtype, n, m.proj_cols()),
            d_proj: work("d_ssm_proj_local", self.dtype, n, m.proj_cols()),
            gated: work("ssm_gated_all", self.dtype, self.batch * seq, here.inner()),
            d_gated: work("d_ssm_gated_all", self.dtype, self.batch * seq, here.inner()),
            d_gated_local: work("d_ssm_gated", self.dtype, n, m.inner()),
            to_heads,
            to_tokens,
            own: [work("ssm_conv_own", self.dtype, 1, conv), work("ssm_heads_own", self.dtype, 1, heads)],
            d_own: [work("d_ssm_conv_own", self.grads, 1, conv), work("d_ssm_heads_own", self.grads, 1, heads)],
        }
    }

    /// A kernel on the tokens of this rank, or on all weights.
    fn local(&self, op: SsmOp) -> Kernel {
        Kernel::Ssm(SsmKernel { batch: self.batch, seq: self.seq, mamba: self.spec, op })
    }

    /// Takes this rank's part out of the weights.
    fn own(&self, b: &mut Builder, label: &str, w: Flats, (spread, ss): (&Spread, &Scratch)) {
        b.compute(label, self.local(SsmOp::Own(spread.by)), &[w.at(self.rows.conv), w.at(self.rows.heads)], &ss.own);
    }

    pub(super) fn forward_spread(
        &self,
        b: &mut Builder,
        s: &super::Scratch,
        w: Flats,
        keep: &Saved,
        (spread, ss): (&Spread, &Scratch),
    ) {
        let one = std::slice::from_ref;
        spread.exchange.run(b, false, one(&ss.to_heads), Way::There, &[ss.proj], &[keep.proj]);
        self.own(b, "own_heads", w, (spread, ss));
        b.compute("conv", self.kernel(SsmOp::Conv), &[keep.proj, ss.own[0]], &[s.xbc]);
        b.compute("scan", self.kernel(SsmOp::Scan), &[s.xbc, keep.proj, ss.own[1]], &[keep.y]);
        b.compute("gate", self.kernel(SsmOp::Gate), &[keep.y, keep.proj], &[ss.gated]);
        let gated = keep.gated.expect("the norm stands behind the exchange");
        spread.exchange.run(b, false, one(&ss.to_tokens), Way::Back, &[ss.gated], &[gated]);
        let norm = w.at(self.rows.norm);
        b.compute("group_norm", self.local(SsmOp::GroupNorm { eps: self.eps }), &[gated, norm], &[keep.normed]);
    }

    pub(super) fn backward_spread(
        &self,
        b: &mut Builder,
        s: &super::Scratch,
        [w, g]: [Flats; 2],
        keep: &Saved,
        (spread, ss): (&Spread, &Scratch),
    ) -> u32 {
        let one = std::slice::from_ref;
        let both = |r: Rows| [w, g].map(|flat| flat.at(r));
        let ([norm, d_norm], gated) = (both(self.rows.norm), keep.gated.expect("the norm stands behind the exchange"));
        let kernel = self.local(SsmOp::GroupNormBwd { eps: self.eps });
        b.compute("group_norm_bwd", kernel, &[gated, norm, s.d_normed, d_norm], &[ss.d_gated_local, d_norm]);
        spread.exchange.run(b, true, one(&ss.to_tokens), Way::There, &[ss.d_gated_local], &[ss.d_gated]);
        self.own(b, "own_heads_again", w, (spread, ss));
        b.compute("conv_again", self.kernel(SsmOp::Conv), &[keep.proj, ss.own[0]], &[s.xbc]);
        b.compute("gate_bwd", self.kernel(SsmOp::GateBwd), &[keep.y, keep.proj, ss.d_gated], &[s.d_y, s.d_proj]);
        let parts = ["d_conv_own", "d_heads_own"].into_iter().zip(own_elems(&self.scanned().1)).zip(ss.d_own);
        for ((label, elems), part) in parts {
            b.compute(label, Kernel::Fill { elems }, &[], &[part]);
        }
        self.scan_bwd(b, s, keep, [ss.own[0], ss.d_own[0]], [ss.own[1], ss.d_own[1]]);
        let [d_conv, d_heads] = [self.rows.conv, self.rows.heads].map(|r| g.at(r));
        let reads = [ss.d_own[0], ss.d_own[1], d_conv, d_heads];
        b.compute("own_heads_bwd", self.local(SsmOp::OwnBwd(spread.by)), &reads, &[d_conv, d_heads]);
        spread.exchange.run(b, true, one(&ss.to_heads), Way::Back, &[s.d_proj], &[ss.d_proj])
    }
}
