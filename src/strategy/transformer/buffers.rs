//! What a layer keeps for its backward pass, and what every layer of a rank works in.

use super::super::attention;
use super::super::expert;
use super::super::ulysses;
use super::super::unfused::Probs;
use super::{Layer, latent};
use crate::plan::{Buf, Builder, Dtype, TensorKind};

/// Activations kept for the backward pass, as buffers or as formals of a block.
#[derive(Clone, Copy)]
pub struct Saved {
    /// As attention sees them: after the Ulysses exchange where there is one.
    pub(super) attn: attention::Saved,
    pub(super) normed1: Buf,
    /// Queries and keys before their norms, where they have some.
    pub(super) raw_qk: Option<Buf>,
    /// Between the halves of a layer, unless they stand beside each other.
    pub(super) mid: Option<Buf>,
    pub(super) latent: Option<latent::Saved>,
    /// Where the second half has a norm of its own.
    pub(super) normed2: Option<Buf>,
    /// Where there is a network that every token visits.
    pub(super) gate_up: Option<Buf>,
    pub(super) act: Option<Buf>,
    pub(super) experts: Option<expert::Saved>,
    /// What dropout left of each branch; in a parallel block of both together.
    pub(super) stays: [Option<Buf>; 2],
    /// The output of attention for my tokens, all heads; `None`: it is `attn.o`, without Ulysses.
    pub(super) o: Option<Buf>,
}

impl Saved {
    /// Every buffer with its name, always in the same order.
    fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![
            ("q", &mut self.attn.q),
            ("kv", &mut self.attn.kv),
            ("attn_o", &mut self.attn.o),
            ("normed1", &mut self.normed1),
        ];
        all.extend(self.attn.lse.as_mut().map(|lse| ("lse", lse)));
        all.extend(self.attn.kv_last.as_mut().map(|kv| ("kv_last", kv)));
        if let Some(Probs { probs, dropped }) = &mut self.attn.probs {
            all.push(("probs", probs));
            let names = ["probs_left", "probs_stay"].into_iter();
            all.extend(names.zip(dropped.iter_mut().flatten()));
        }
        let [stays1, stays2] = &mut self.stays;
        let some = [
            ("raw_qk", &mut self.raw_qk),
            ("gate_up", &mut self.gate_up),
            ("act", &mut self.act),
            ("o", &mut self.o),
            ("mid", &mut self.mid),
            ("normed2", &mut self.normed2),
            ("stays1", stays1),
            ("stays2", stays2),
        ];
        all.extend(some.into_iter().filter_map(|(name, buf)| Some((name, buf.as_mut()?))));
        all.extend(self.latent.iter_mut().flat_map(|saved| saved.bufs_mut()));
        all.extend(self.experts.iter_mut().flat_map(|saved| saved.bufs_mut()));
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

    /// Before and behind the activation of the network that every token visits.
    pub(super) fn network(&self) -> (Buf, Buf) {
        (self.gate_up.expect("there is a network"), self.act.expect("there is a network"))
    }

    pub(super) fn output(&self) -> Buf {
        self.o.unwrap_or(self.attn.o)
    }
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    pub(super) attn: attention::Scratch,
    pub(super) ulysses: Option<ulysses::Scratch>,
    pub(super) qkv: Buf,
    pub(super) q_local: Buf,
    pub(super) kv_local: Buf,
    pub(super) branch: Buf,
    pub(super) d_act: Option<Buf>,
    pub(super) d_gate_up: Option<Buf>,
    pub(super) latent: Option<latent::Scratch>,
    pub(super) experts: Option<expert::Scratch>,
    /// What the experts that every token visits add, beside the others.
    pub(super) shared: Option<Buf>,
    pub(super) d_normed: Buf,
    pub(super) d_mid: Buf,
    /// The gradient of a branch, where dropout makes it another than that of the sum.
    pub(super) d_branch: Option<Buf>,
    pub(super) d_o: Buf,
    pub(super) d_qkv: Buf,
    /// Rooms for all tokens' rows, where a rank has a share of them: of a product's input, of the gradient of
    /// its output, and of partial sums.
    pub(super) input: Option<Buf>,
    pub(super) d_output: Option<Buf>,
    pub(super) partial: Option<Buf>,
    /// The largest gradient of a weight, where it is not added to the sum at once.
    pub(super) dw: Option<Buf>,
}

impl Scratch {
    /// The gradients behind and before the activation.
    pub(super) fn network(&self) -> (Buf, Buf) {
        (self.d_act.expect("there is a network"), self.d_gate_up.expect("there is a network"))
    }
}

impl Layer {
    /// Declares what the backward pass keeps, `slots` of each: one a layer, or one in all when it is
    /// computed again.
    pub fn saved(&self, b: &mut Builder, kind: TensorKind, slots: u32) -> Saved {
        if let Some(chunk) = self.chunks.first() {
            // Queries and keys of a chunk are on their way to the host while those of the next are computed.
            let mut saved = chunk.saved(b, kind, 1);
            let shape = chunk.core.shape();
            let mut two = |name, row| b.tensor(name, &[shape.rows(), row], shape.dtype, kind, 2);
            (saved.attn.q, saved.attn.kv) = (two("q", shape.q_row()), two("kv", shape.kv_row()));
            return saved;
        }
        let (n, r) = (self.tokens(), self.residual_rows());
        let mut keep = |name: &str, rows, row, dtype| b.tensor(name, &[rows, row], dtype, kind, slots);
        let (core, dtype) = (self.core.shape(), self.dtype);
        let (lse, probs) = self.core.keeps(&mut keep);
        let attn = attention::Saved {
            q: keep("q", core.rows(), core.q_row(), dtype),
            kv: keep("kv", core.rows(), core.kv_row(), dtype),
            kv_last: self.core.keeps_last().then(|| keep("kv_last", core.rows(), core.kv_row(), dtype)),
            o: keep("attn_o", core.rows(), core.o_row(), dtype),
            lse,
            probs,
        };
        Saved {
            normed1: keep("normed1", r, self.hidden, dtype),
            raw_qk: self.rows.head_norms.map(|_| keep("raw_qk", n, self.qk_row(), dtype)),
            attn,
            o: self.ulysses.is_some().then(|| keep("o", n, self.o_row(), dtype)),
            mid: (!self.parallel).then(|| keep("mid", r, self.hidden, dtype)),
            stays: [(1, "stays1"), (2, "stays2")].map(|(branch, name)| {
                let there = self.dropout > 0.0 && (branch == 1 || !self.parallel);
                there.then(|| keep(name, r, self.hidden, Dtype::U8))
            }),
            normed2: self.rows.norm2.map(|_| keep("normed2", r, self.hidden, dtype)),
            gate_up: (self.ffn > 0).then(|| keep("gate_up", n, self.wide, dtype)),
            act: (self.ffn > 0).then(|| keep("act", n, self.ffn, dtype)),
            latent: self.latent.as_ref().map(|latent| latent.saved(&mut keep)),
            experts: self.experts.as_ref().map(|experts| experts.saved(&mut keep)),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        if let Some(chunk) = self.chunks.first() {
            let whole = b.tensor("d_mid", &[self.residual_rows(), self.hidden], self.dtype, TensorKind::Workspace, 1);
            return Scratch { d_mid: whole, ..chunk.scratch(b) };
        }
        let (n, r, h) = (self.tokens(), self.residual_rows(), self.hidden);
        let attn = self.core.scratch(b);
        let ulysses = self.ulysses.as_ref().map(|u| u.scratch(b));
        let experts = self.experts.as_ref().map(|experts| experts.scratch(b));
        let latent = self.latent.as_ref().map(|latent| latent.scratch(b));
        let largest = self.hidden * self.qkv_row().max(self.o_row()).max(self.wide).max(self.ffn);
        let dw = self.add_grads.then(|| b.tensor("dw", &[largest], self.dtype, TensorKind::Workspace, 1));
        let mut work = |name, rows, row| b.tensor(name, &[rows, row], self.dtype, TensorKind::Workspace, 1);
        Scratch {
            qkv: work("qkv", n, self.qkv_row()),
            q_local: work("q_local", n, self.q_row()),
            kv_local: work("kv_local", n, self.kv_row()),
            branch: work("branch", r, h),
            d_act: (self.ffn > 0).then(|| work("d_act", n, self.ffn)),
            d_gate_up: (self.ffn > 0).then(|| work("d_gate_up", n, self.wide)),
            shared: (self.ffn > 0 && experts.is_some()).then(|| work("shared", r, h)),
            latent,
            experts,
            d_normed: work("d_normed", r, h),
            d_mid: work("d_mid", r, h),
            d_branch: (self.dropout > 0.0).then(|| work("d_branch", r, h)),
            d_o: work("d_o", n, self.o_row()),
            d_qkv: work("d_qkv", n, self.qkv_row()),
            input: self.tp.room(b, "tp_input", n, h),
            d_output: self.tp.room(b, "tp_d_output", n, h),
            partial: self.tp.room(b, "tp_partial", n, h),
            attn,
            ulysses,
            dw,
        }
    }
}
