//! A layer chunk by chunk ([`fpdt`](super::super::fpdt)): the layers of the chunks, on rows of the residual stream.

use super::super::attention::{self, Core};
use super::super::fpdt::{Chunked, Scratch as Waiting};
use super::Layer;
use super::backward::Backward;
use super::buffers::{Saved, Scratch};
use super::forward::Forward;
use crate::plan::{Buf, Builder, Kernel};

impl Layer {
    pub(super) fn is_chunked(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Whether the backward pass computes what it needs again by itself, chunk by chunk.
    pub fn goes_by_chunks(&self) -> bool {
        self.is_chunked()
    }

    /// Rows of the residual stream that a chunk has.
    fn rows_of(&self, chunk: usize, x: Buf) -> Buf {
        let rows = self.residual_rows() / self.chunks.len() as u64;
        x.rows(chunk as u64 * rows, (chunk as u64 + 1) * rows)
    }

    /// Sets all rows at once to zero before chunks write theirs; what was there is not needed any more. (DeepSpeed's
    /// zeros.)
    fn begin(&self, b: &mut Builder, label: &str, to: Buf) {
        b.compute(label, Kernel::Fill { elems: self.residual_rows() * self.hidden }, &[], &[to]);
    }

    fn chunked<'a>(&'a self, s: &'a Scratch) -> (&'a Chunked, &'a Waiting) {
        match (&self.core, &s.heads().attn) {
            (Core::Chunked(core), attention::Scratch::Chunked(waiting)) => (core, waiting),
            _ => unreachable!("the layer of a chunk has the attention of one"),
        }
    }
}

impl Forward<'_> {
    pub(super) fn chunks(&self, b: &mut Builder, [x, x_out]: [Buf; 2]) {
        let l = self.layer;
        l.begin(b, "x_begin", x_out);
        for (at, layer) in l.chunks.iter().enumerate() {
            let (keep, xs) = (&self.keep.in_turn(at), [x, x_out].map(|x| l.rows_of(at, x)));
            b.labelled(format!(".{at}"), |b| Forward { layer, keep, again: false, ..*self }.run(b, xs));
        }
    }
}

impl Backward<'_> {
    /// Runs the backward pass chunk by chunk; `dx` is used first for the outputs that are computed again.
    pub(super) fn chunks(&self, b: &mut Builder, [x, dy, dx]: [Buf; 3]) {
        let (l, d_mid) = (self.layer, self.s.d_mid);
        l.begin(b, "dx_begin", dx);
        l.begin(b, "d_mid_begin", d_mid);
        for (at, layer) in l.chunks.iter().enumerate() {
            let (keep, [x, dy, dx, d_mid]) = (&self.keep.in_turn(at), [x, dy, dx, d_mid].map(|x| l.rows_of(at, x)));
            let back = Backward { layer, keep, ..*self };
            b.labelled(format!(".{at}"), |b| {
                back.again().run(b, [x, dx]);
                back.above_attention(b, dy, d_mid);
            });
        }
        let mut turn = 0;
        for (at, layer) in l.chunks.iter().enumerate() {
            let xs = [x, d_mid, dx].map(|x| l.rows_of(at, x));
            b.labelled(format!(".{at}"), |b| Backward { layer, ..*self }.below_attention(b, &mut turn, xs));
        }
    }

    /// Goes from the gradient of a chunk's output to that of its attention's output, which waits in the host's memory.
    fn above_attention(&self, b: &mut Builder, dy: Buf, d_mid: Buf) {
        let Backward { layer: l, s, keep, .. } = *self;
        let d_branch = self.dropout(b, "dropout2_bwd", keep.stays[1], dy);
        let d_output = self.down_dx(b, d_branch);
        self.bias(b, "down_bias_bwd", l.rows.down_bias, l.norms.rows, d_branch);
        let last = self.mlp(b, d_output);
        self.mlp_input(b, last, s.d_normed);
        let mid = keep.mid.expect("halves one behind the other");
        self.norm(b, "norm2_bwd", mid, l.rows.norm2(), dy, d_mid);
        let d_branch = self.dropout(b, "dropout1_bwd", keep.stays[0], d_mid);
        self.out_dx(b, "o_proj_dx", [d_branch, self.at(l.rows.o), s.heads().d_o], l.o_row(), l.tp.all());
        self.bias(b, "o_bias_bwd", l.rows.o_bias, l.norms.rows, d_branch);
        self.o_proj_dw(b, d_branch);
        let d_o = match (&l.ulysses, &s.heads().ulysses) {
            (Some(ulysses), Some(us)) => ulysses.scatter_do(b, us, s.heads().d_o),
            _ => s.heads().d_o,
        };
        let (core, waiting) = l.chunked(s);
        core.keep_gradient(b, waiting, keep.attn().o, d_o);
    }

    /// Goes from the gradients of a chunk's queries, keys and values to that of its input.
    fn below_attention(&self, b: &mut Builder, turn: &mut u32, [x, d_mid, dx]: [Buf; 3]) {
        let Backward { layer: l, s, keep, .. } = *self;
        let (core, waiting) = l.chunked(s);
        let grads = core.backward(b, waiting, turn);
        let (dq, dkv) = match (&l.ulysses, &s.heads().ulysses) {
            (Some(ulysses), Some(us)) => ulysses.gather_dqkv(b, us, grads),
            _ => grads,
        };
        b.compute("rope_bwd", l.rope(true), &[dq, dkv], &[s.heads().d_qkv]);
        self.bias(b, "qkv_bias_bwd", l.rows.qkv_bias, l.tokens(), s.heads().d_qkv);
        l.norms.forward(b, "norm1_again", x, self.at(l.rows.norm1), keep.normed1());
        self.qkv_dx(b, false);
        self.dw(b, "qkv_dw", [l.qkv_row(), l.hidden], [s.heads().d_qkv, keep.normed1()], l.rows.qkv);
        self.norm(b, "norm1_bwd", x, l.rows.norm1, d_mid, dx);
    }
}

impl Saved {
    /// The kept buffers with the queries and keys of a chunk in the slot whose turn it is.
    fn in_turn(&self, chunk: usize) -> Saved {
        let (mut own, slot) = (*self, chunk as u32 % 2);
        own.attn = own.attn.map(|a| attention::Saved { q: a.q.slot(slot), kv: a.kv.slot(slot), ..a });
        own
    }
}
