//! The buffers that a layer keeps for its backward pass, and those that every layer of a rank works in.

use super::super::attention;
use super::super::expert;
use super::super::sparse::INDEX_Q;
use super::super::ulysses;
use super::super::unfused::Probs;
use super::codes::{Coded, Codes};
use super::latent::MADE_AGAIN;
use super::{Layer, latent, mamba};
use crate::plan::{Buf, Builder, Dtype, TensorKind};

/// Activations kept for the backward pass, as buffers or as formals of a block.
#[derive(Clone, Copy)]
pub struct Saved {
    /// Attention's operands as it sees them: after the Ulysses exchange where there is one; `None` without attention.
    pub(super) attn: Option<attention::Saved>,
    /// The first norm's output; `None` where no mixer of tokens stands behind it, or where it is made again.
    pub(super) normed1: Option<Buf>,
    /// Queries and keys before their norms; `None` where they have none.
    pub(super) raw_qk: Option<Buf>,
    /// The residual stream between the halves of a layer; `None` where they stand beside each other.
    pub(super) mid: Option<Buf>,
    pub(super) latent: Option<latent::Saved>,
    pub(super) mamba: Option<mamba::Saved>,
    /// The second norm's output; `None` where the second half has no norm of its own, or where it is made again.
    pub(super) normed2: Option<Buf>,
    /// The input and the output of the activation of the network that every token visits; `None` without such a network
    /// or where it is made again, all of it or piece by piece, `act` also by itself.
    pub(super) gate_up: Option<Buf>,
    pub(super) act: Option<Buf>,
    pub(super) experts: Option<expert::Saved>,
    /// Codes in place of what norms and the activation leave.
    pub(super) codes: Codes,
    /// The elements of each branch that dropout left; in a parallel block of both branches together.
    pub(super) stays: [Option<Buf>; 2],
    /// The output of attention for my tokens, all heads; `None`: it is `attn.o`, without Ulysses.
    pub(super) o: Option<Buf>,
    /// Whether attention's output is kept where the rest is computed again.
    pub(super) keeps_attention: bool,
    /// Whether the experts' half is made again for the backward pass; all layers then share its buffers.
    pub(super) experts_again: bool,
}

/// Names of the buffers of attention's output.
const OF_ATTENTION: [&str; 2] = ["attn_o", "lse"];

/// Whether a buffer of this name is one that the experts' half keeps besides its input.
fn is_of_experts(name: &str) -> bool {
    let some = ["gate_up", "act", "router_logits", "shadow_up", "shadow_down"];
    some.contains(&name) || name.starts_with("expert_")
}

impl Saved {
    /// Every buffer with its name, always in the same order.
    fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![];
        let again = self.latent.is_some_and(|latent| latent.again);
        if let Some(attn) = &mut self.attn {
            if !again {
                all.extend([("q", &mut attn.q), ("kv", &mut attn.kv)]);
            }
            all.push(("attn_o", &mut attn.o));
            let index = attn.index.iter_mut().flat_map(|index| index.bufs_mut());
            all.extend(index.filter(|(name, _)| !(again && *name == INDEX_Q)));
            all.extend(self.normed1.as_mut().map(|normed| ("normed1", normed)));
            all.extend(attn.lse.as_mut().map(|lse| ("lse", lse)));
            all.extend(attn.kv_last.as_mut().map(|kv| ("kv_last", kv)));
            if let Some(Probs { probs, dropped }) = &mut attn.probs {
                all.push(("probs", probs));
                let names = ["probs_left", "probs_stay"].into_iter();
                all.extend(names.zip(dropped.iter_mut().flatten()));
            }
        } else {
            all.extend(self.normed1.as_mut().map(|normed| ("normed1", normed)));
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
        all.extend(self.codes.bufs_mut());
        all.extend(self.latent.iter_mut().flat_map(|saved| saved.bufs_mut()));
        all.extend(self.experts.iter_mut().flat_map(|saved| saved.bufs_mut()));
        all.extend(self.mamba.iter_mut().flat_map(|saved| saved.bufs_mut()));
        all.retain(|(name, _)| !(self.experts_again && is_of_experts(name)));
        all
    }

    pub fn bufs(mut self) -> Vec<Buf> {
        self.bufs_mut().into_iter().map(|(_, buf)| *buf).collect()
    }

    /// Which of [`bufs`](Saved::bufs) are kept where the others are computed again.
    pub fn outlasts(mut self) -> Vec<bool> {
        let some = self.keeps_attention;
        self.bufs_mut().into_iter().map(|(name, _)| some && OF_ATTENTION.contains(&name)).collect()
    }

    /// The buffers as formals of the block being written, in the order of [`bufs`](Saved::bufs).
    pub fn formals(mut self, b: &mut Builder) -> Saved {
        self.bufs_mut().into_iter().for_each(|(name, buf)| *buf = b.formal(name));
        self
    }

    /// The buffers before and behind the activation of the network that every token visits.
    pub(super) fn network(&self) -> (Buf, Buf) {
        (self.gate_up.expect("there is a network"), self.act.expect("there is a network"))
    }

    /// The kept buffers, completed by those of `s` for what is made again.
    pub(super) fn with_again(&self, s: &Scratch) -> Saved {
        let experts = self.experts.zip(s.experts.as_ref()).map(|(saved, s)| saved.with_again(s));
        Saved {
            normed1: self.normed1.or(s.again.normed1),
            normed2: self.normed2.or(s.again.normed2),
            gate_up: self.gate_up.or(s.again.gate_up),
            act: self.act.or(s.again.act),
            experts,
            ..*self
        }
    }

    pub(super) fn output(&self) -> Buf {
        self.o.unwrap_or(self.attn().o)
    }

    pub(super) fn attn(&self) -> attention::Saved {
        self.attn.expect("there is attention")
    }

    pub(super) fn normed1(&self) -> Buf {
        self.normed1.expect("there is a norm before a mixer of tokens")
    }

    pub(super) fn normed2(&self) -> Buf {
        self.normed2.expect("there is a norm before the second half")
    }
}

/// The buffers that attention works in.
pub struct Heads {
    pub(super) attn: attention::Scratch,
    pub(super) ulysses: Option<ulysses::Scratch>,
    pub(super) qkv: Buf,
    pub(super) q_local: Buf,
    pub(super) kv_local: Buf,
    pub(super) d_o: Buf,
    pub(super) d_qkv: Buf,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    pub(super) heads: Option<Heads>,
    pub(super) mamba: Option<mamba::Scratch>,
    pub(super) branch: Buf,
    pub(super) d_act: Option<Buf>,
    pub(super) d_gate_up: Option<Buf>,
    pub(super) latent: Option<latent::Scratch>,
    pub(super) experts: Option<expert::Scratch>,
    /// The output of the experts that every token visits, to be added to the others'; `None` without any.
    pub(super) shared: Option<Buf>,
    pub(super) d_normed: Buf,
    pub(super) d_mid: Buf,
    /// The gradient of a branch, where dropout makes it differ from that of the sum; else `None`.
    pub(super) d_branch: Option<Buf>,
    /// Rooms for all tokens' rows where a rank has a share of them: of a product's input, of the gradient of its
    /// output, and of partial sums; `None` where it has all rows anyway.
    pub(super) input: Option<Buf>,
    pub(super) d_output: Option<Buf>,
    pub(super) partial: Option<Buf>,
    /// Room for the largest gradient of a weight; `None` where gradients are added to the sum at once.
    pub(super) dw: Option<Buf>,
    pub(super) again: Again,
}

/// Buffers for what is made again for the backward pass, or of its codes, in place of those that [`Saved`] has not.
#[derive(Clone, Copy)]
pub struct Again {
    pub(super) normed1: Option<Buf>,
    pub(super) normed2: Option<Buf>,
    /// The input and the output of the activation, of as many rows as a piece of the network has.
    pub(super) gate_up: Option<Buf>,
    pub(super) act: Option<Buf>,
}

impl Scratch {
    pub(super) fn heads(&self) -> &Heads {
        self.heads.as_ref().expect("there is attention")
    }

    /// The gradients behind and before the activation.
    pub(super) fn network(&self) -> (Buf, Buf) {
        (self.d_act.expect("there is a network"), self.d_gate_up.expect("there is a network"))
    }
}

impl Layer {
    /// `Some` if a mixer of tokens stands behind the first norm.
    pub(super) fn has_norm1(&self) -> Option<()> {
        (self.attends() || self.mamba.is_some()).then_some(())
    }

    /// Whether what a norm leaves is not kept as it is.
    fn lacks(&self, norm: Coded) -> bool {
        self.norms_again || self.codes_of(norm)
    }

    /// Which buffers of a dense network are not kept as they are: those before and behind its activation.
    fn lacks_network(&self) -> [bool; 2] {
        let whole = self.is_tiled() || self.mlp_again;
        [whole, whole || self.act_again || self.codes_of(Coded::Act)]
    }

    /// Whether attention's output becomes values of heads in a product of its own.
    fn values_apart(&self) -> bool {
        self.latent.as_ref().is_some_and(|latent| latent.indexer.is_some())
    }

    /// Declares the buffers that the backward pass needs, `slots` of each: one a layer, or one in all when it is
    /// computed again. `attention`: the slots for attention's output, where that is kept all the same.
    pub fn saved(&self, b: &mut Builder, kind: TensorKind, slots: u32, attention: Option<u32>) -> Saved {
        if let Some(chunk) = self.chunks.first() {
            // Queries and keys of a chunk are on their way to the host while those of the next are computed.
            let mut saved = chunk.saved(b, kind, 1, None);
            let shape = chunk.core.shape();
            let mut two = |name, row| b.tensor(name, &[shape.rows(), row], shape.dtype, kind, 2);
            let (q, kv) = (two("q", shape.q_row()), two("kv", shape.kv_row()));
            saved.attn = saved.attn.map(|attn| attention::Saved { q, kv, ..attn });
            return saved;
        }
        let (n, r) = (self.tokens(), self.residual_rows());
        let again = self.latent.as_ref().is_some_and(|latent| latent.again);
        let mut keep = |name: &str, rows, row, dtype| {
            let (kind, slots) = match attention.filter(|_| OF_ATTENTION.contains(&name)) {
                Some(slots) => (TensorKind::Activation, slots),
                None if again && MADE_AGAIN.contains(&name) => (TensorKind::Workspace, 1),
                None if self.experts_again && is_of_experts(name) => (TensorKind::Workspace, 1),
                None => (kind, slots),
            };
            b.tensor(name, &[rows, row], dtype, kind, slots)
        };
        let (core, dtype) = (self.core.shape(), self.dtype);
        let [lacks_gate_up, lacks_act] = self.lacks_network();
        let attn = self.attends().then(|| {
            let (lse, probs) = self.core.keeps(&mut keep);
            attention::Saved {
                q: keep("q", core.rows(), core.q_row(), dtype),
                kv: keep("kv", core.rows(), self.core.kv_row(), dtype),
                index: self.core.index(&mut keep),
                kv_last: self.core.keeps_last().then(|| keep("kv_last", core.rows(), core.kv_row(), dtype)),
                o: keep("attn_o", core.rows(), core.o_row(), dtype),
                lse,
                probs,
            }
        });
        Saved {
            normed1: self
                .has_norm1()
                .filter(|_| !self.lacks(Coded::Norm1))
                .map(|()| keep("normed1", r, self.hidden, dtype)),
            raw_qk: self.rows.head_norms.map(|_| keep("raw_qk", n, self.qk_row(), dtype)),
            attn,
            o: (self.attends() && (self.ulysses.is_some() || self.values_apart()))
                .then(|| keep("o", n, self.o_row(), dtype)),
            mid: (!self.parallel && self.alone.is_none()).then(|| keep("mid", r, self.hidden, dtype)),
            stays: [(1, "stays1"), (2, "stays2")].map(|(branch, name)| {
                let there = self.dropout > 0.0 && (branch == 1 || !(self.parallel || self.alone.is_some()));
                there.then(|| keep(name, r, self.hidden, Dtype::U8))
            }),
            normed2: self
                .rows
                .norm2
                .filter(|_| !self.lacks(Coded::Norm2))
                .map(|_| keep("normed2", r, self.hidden, dtype)),
            gate_up: (self.ffn > 0 && !lacks_gate_up).then(|| keep("gate_up", n, self.wide, dtype)),
            act: (self.ffn > 0 && !lacks_act).then(|| keep("act", n, self.ffn, dtype)),
            codes: self.codes(&mut keep),
            latent: self.latent.as_ref().map(|latent| latent.saved(&mut keep)),
            experts: self.experts.as_ref().map(|experts| experts.saved(&mut keep)),
            mamba: self.mamba.as_ref().map(|mamba| mamba.saved(&mut keep)),
            keeps_attention: attention.is_some(),
            experts_again: self.experts_again,
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        if let Some(chunk) = self.chunks.first() {
            let whole = b.tensor("d_mid", &[self.residual_rows(), self.hidden], self.dtype, TensorKind::Workspace, 1);
            return Scratch { d_mid: whole, ..chunk.scratch(b) };
        }
        let (n, r, h, piece) = (self.tokens(), self.residual_rows(), self.hidden, self.piece_rows());
        let attends = self.attends();
        let inner = attends.then(|| (self.core.scratch(b), self.ulysses.as_ref().map(|u| u.scratch(b))));
        let experts = self.experts.as_ref().map(|experts| experts.scratch(b));
        let latent = self.latent.as_ref().map(|latent| latent.scratch(b));
        let mamba = self.mamba.as_ref().map(|mamba| mamba.scratch(b));
        let projected = self.mamba.as_ref().map_or(0, |mamba| mamba.spec.proj_cols());
        let largest = h * self.qkv_row().max(self.o_row()).max(self.wide).max(self.ffn).max(projected);
        let dw = self.add_grads.then(|| b.tensor("dw", &[largest], self.dtype, TensorKind::Workspace, 1));
        let [lacks_gate_up, lacks_act] = self.lacks_network();
        let mut work = |name, rows, row| b.tensor(name, &[rows, row], self.dtype, TensorKind::Workspace, 1);
        let local = attends.then(|| {
            let [q, kv] = [self.q_row(), self.kv_row()];
            [work("qkv", n, self.qkv_row()), work("q_local", n, q), work("kv_local", n, kv)]
        });
        let again = Again {
            normed1: self.has_norm1().filter(|_| self.lacks(Coded::Norm1)).map(|()| work("normed1", r, h)),
            normed2: self.rows.norm2.filter(|_| self.lacks(Coded::Norm2)).map(|_| work("normed2", r, h)),
            gate_up: (self.ffn > 0 && lacks_gate_up).then(|| work("gate_up", piece, self.wide)),
            act: (self.ffn > 0 && lacks_act).then(|| work("act", piece, self.ffn)),
        };
        let branch = work("branch", r, h);
        let d_act = (self.ffn > 0).then(|| work("d_act", piece, self.ffn));
        let d_gate_up = (self.ffn > 0).then(|| work("d_gate_up", piece, self.wide));
        let shared = (self.ffn > 0 && experts.is_some()).then(|| work("shared", r, h));
        let (d_normed, d_mid) = (work("d_normed", r, h), work("d_mid", r, h));
        let d_branch = (self.dropout > 0.0).then(|| work("d_branch", r, h));
        let d_local = attends.then(|| [work("d_o", n, self.o_row()), work("d_qkv", n, self.qkv_row())]);
        let heads = inner.zip(local).zip(d_local).map(|(((attn, ulysses), [qkv, q_local, kv_local]), [d_o, d_qkv])| {
            Heads { attn, ulysses, qkv, q_local, kv_local, d_o, d_qkv }
        });
        Scratch {
            heads,
            mamba,
            branch,
            d_act,
            d_gate_up,
            latent,
            experts,
            shared,
            d_normed,
            d_mid,
            d_branch,
            input: self.tp.room(b, "tp_input", n, h),
            d_output: self.tp.room(b, "tp_d_output", n, h),
            partial: self.tp.room(b, "tp_partial", n, h),
            dw,
            again,
        }
    }
}
