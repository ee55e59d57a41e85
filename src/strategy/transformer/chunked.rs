//! A layer chunk by chunk ([`fpdt`](super::super::fpdt)): the layers of the chunks, on rows of the residual stream.

use super::super::attention::{self, Core};
use super::super::fpdt::{Chunked, Scratch as Waiting};
use super::backward::Backward;
use super::buffers::{Saved, Scratch};
use super::{Flats, Layer};
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

    pub(super) fn forward_chunks(&self, b: &mut Builder, s: &Scratch, w: Flats, [x, x_out]: [Buf; 2], keep: &Saved) {
        self.begin(b, "x_begin", x_out);
        for (at, chunk) in self.chunks.iter().enumerate() {
            let xs = [x, x_out].map(|x| self.rows_of(at, x));
            b.labelled(format!(".{at}"), |b| chunk.forward_at_once(b, s, w, xs, &keep.in_turn(at), false));
        }
    }

    /// Runs the backward pass chunk by chunk; `dx` is used first for the outputs that are computed again.
    pub(super) fn backward_chunks(
        &self,
        b: &mut Builder,
        s: &Scratch,
        [w, g]: [Flats; 2],
        keep: &Saved,
        [x, dy, dx]: [Buf; 3],
    ) {
        self.begin(b, "dx_begin", dx);
        self.begin(b, "d_mid_begin", s.d_mid);
        for (at, chunk) in self.chunks.iter().enumerate() {
            let (keep, [x, dy, dx, d_mid]) = (keep.in_turn(at), [x, dy, dx, s.d_mid].map(|x| self.rows_of(at, x)));
            b.labelled(format!(".{at}"), |b| {
                chunk.forward_at_once(b, s, w, [x, dx], &keep, true);
                let back = Backward { layer: chunk, s, w, g, keep: &keep, sums: s.d_normed };
                chunk.to_attention(b, &back, dy, d_mid);
            });
        }
        let mut turn = 0;
        for (at, chunk) in self.chunks.iter().enumerate() {
            let [x, dx, d_mid] = [x, dx, s.d_mid].map(|x| self.rows_of(at, x));
            let back = Backward { layer: chunk, s, w, g, keep, sums: s.d_normed };
            b.labelled(format!(".{at}"), |b| chunk.attention_back(b, &back, &mut turn, [x, d_mid, dx]));
        }
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

    /// Goes from the gradient of a chunk's output to that of its attention's output, which waits in the host's memory.
    fn to_attention(&self, b: &mut Builder, back: &Backward, dy: Buf, d_mid: Buf) {
        let (s, keep) = (back.s, back.keep);
        let d_branch = back.dropout(b, "dropout2_bwd", keep.stays[1], dy);
        let d_output = back.down_dx(b, d_branch);
        back.bias(b, "down_bias_bwd", self.rows.down_bias, self.norms.rows, d_branch);
        let last = back.mlp(b, d_output);
        back.mlp_input(b, last, s.d_normed);
        let mid = keep.mid.expect("halves one behind the other");
        back.norm(b, "norm2_bwd", mid, self.rows.norm2.expect("a norm before each half"), dy, d_mid);
        let d_branch = back.dropout(b, "dropout1_bwd", keep.stays[0], d_mid);
        back.out_dx(b, "o_proj_dx", [d_branch, back.at(self.rows.o), s.heads().d_o], self.o_row(), self.tp.all());
        back.bias(b, "o_bias_bwd", self.rows.o_bias, self.norms.rows, d_branch);
        back.dw(b, "o_proj_dw", self.hidden, self.o_row(), d_branch, keep.output(), self.rows.o);
        let d_o = match (&self.ulysses, &s.heads().ulysses) {
            (Some(ulysses), Some(us)) => ulysses.scatter_do(b, us, s.heads().d_o),
            _ => s.heads().d_o,
        };
        let (core, waiting) = self.chunked(s);
        core.keep_gradient(b, waiting, keep.attn().o, d_o);
    }

    /// Goes from the gradients of a chunk's queries, keys and values to that of its input.
    fn attention_back(&self, b: &mut Builder, back: &Backward, turn: &mut u32, [x, d_mid, dx]: [Buf; 3]) {
        let (s, keep) = (back.s, back.keep);
        let (core, waiting) = self.chunked(s);
        let grads = core.backward(b, waiting, turn);
        let (dq, dkv) = match (&self.ulysses, &s.heads().ulysses) {
            (Some(ulysses), Some(us)) => ulysses.gather_dqkv(b, us, grads),
            _ => grads,
        };
        b.compute("rope_bwd", self.rope(true), &[dq, dkv], &[s.heads().d_qkv]);
        back.bias(b, "qkv_bias_bwd", self.rows.qkv_bias, self.tokens(), s.heads().d_qkv);
        self.norms.forward(b, "norm1_again", x, back.at(self.rows.norm1), keep.normed1());
        back.qkv_dx(b, false);
        back.dw(b, "qkv_dw", self.qkv_row(), self.hidden, s.heads().d_qkv, keep.normed1(), self.rows.qkv);
        back.norm(b, "norm1_bwd", x, self.rows.norm1, d_mid, dx);
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
