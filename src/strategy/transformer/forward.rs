//! A layer's forward pass.

use super::super::expert::{self, Experts};
use super::super::tensor::Chunk;
use super::buffers::{Saved, Scratch};
use super::{Flats, Layer, linear, with};
use crate::plan::{Buf, Builder, Dropout, Kernel};
use crate::spec::Mlp;

impl Layer {
    /// x_out = layer(x), keeping the buffers of `keep`; `again`: it is run once more for the backward pass.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Flats, xs: [Buf; 2], keep: &Saved, again: bool) {
        if self.is_chunked() {
            return self.forward_chunks(b, s, w, xs, keep);
        }
        self.forward_at_once(b, s, w, xs, keep, again);
    }

    /// [`forward`](Layer::forward) of all rows at once, not chunk by chunk.
    pub(super) fn forward_at_once(
        &self,
        b: &mut Builder,
        s: &Scratch,
        w: Flats,
        [x, x_out]: [Buf; 2],
        keep: &Saved,
        again: bool,
    ) {
        let keep = &keep.with_again(s);
        if let Some(mixer) = self.alone {
            return self.forward_alone(b, s, w, [x, x_out], keep, again, mixer);
        }
        // These are sums over a rank's share of the columns, before they are summed over the ranks.
        let sums = s.partial.unwrap_or(s.branch);
        let rows = &self.rows;
        self.norms.forward(b, "norm1", x, w.at(rows.norm1), keep.normed1());
        let input = self.attention_forward(b, s, w, keep, again);
        let Some(mid) = keep.mid else {
            self.mlp_in(b, s, w, x, keep, input);
            self.linear_out(b, "o_proj", [keep.output(), w.at(rows.o)], self.o_row(), false, sums, self.tp.all());
            self.tp.scattered(b, "block_reduce", sums, s.branch, |b, chunk| {
                self.linear_out(b, "down", [keep.network().1, w.at(rows.down)], self.ffn, true, sums, chunk);
            });
            let biases = [rows.o_bias, rows.down_bias].map(|rows| rows.map(|r| w.at(r)));
            return self.residual(b, "residual", x, s.branch, biases, [Some(x_out), keep.stays[0]]);
        };
        self.tp.scattered(b, "o_reduce", sums, s.branch, |b, chunk| {
            self.linear_out(b, "o_proj", [keep.output(), w.at(rows.o)], self.o_row(), false, sums, chunk);
        });
        self.residual(b, "residual1", x, s.branch, [rows.o_bias.map(|r| w.at(r)), None], [Some(mid), keep.stays[0]]);
        match &self.experts {
            Some(experts) => self.experts_forward(b, s, w, mid, keep, experts),
            None if self.is_tiled() => self.tiled_forward(b, s, w, mid, keep, sums),
            None => {
                self.mlp_in(b, s, w, mid, keep, input);
                self.tp.scattered(b, "down_reduce", sums, s.branch, |b, chunk| {
                    self.linear_out(b, "down", [keep.network().1, w.at(rows.down)], self.ffn, false, sums, chunk);
                });
            }
        }
        self.residual(
            b,
            "residual2",
            mid,
            s.branch,
            [rows.down_bias.map(|r| w.at(r)), None],
            [Some(x_out), keep.stays[1]],
        );
    }

    /// Runs the feed-forward network up to its activation, from a norm of `x`, or where there is none from `first`,
    /// attention's input.
    pub(super) fn mlp_in(&self, b: &mut Builder, s: &Scratch, w: Flats, x: Buf, keep: &Saved, first: Buf) {
        match (self.rows.norm2, keep.normed2) {
            (Some(norm), Some(normed)) => {
                self.norms.forward(b, "norm2", x, w.at(norm), normed);
                self.gathered_mlp_in(b, s, w, keep, normed);
            }
            _ => {
                self.gate_up(b, w, keep, first, self.tp.all());
                self.activation(b, keep, "");
            }
        }
    }

    /// Runs it up to its activation from a rank's share of its input.
    fn gathered_mlp_in(&self, b: &mut Builder, s: &Scratch, w: Flats, keep: &Saved, normed: Buf) {
        let up = |b: &mut Builder, input, chunk| self.gate_up(b, w, keep, input, chunk);
        self.tp.gathered(b, "gate_up_gather", normed, s.input, up);
        self.activation(b, keep, "");
    }

    fn gate_up(&self, b: &mut Builder, w: Flats, keep: &Saved, input: Buf, chunk: Chunk) {
        let (weight, bias) = (w.at(self.rows.gate_up), self.rows.up_bias.map(|r| w.at(r)));
        self.linear_in(b, "gate_up", [input, weight], bias, self.wide, keep.network().0, chunk);
    }

    pub(super) fn activation(&self, b: &mut Builder, keep: &Saved, which: &str) {
        self.activation_of(b, self.tokens(), keep.network(), which);
    }

    /// Runs the activation on `n` rows.
    pub(super) fn activation_of(&self, b: &mut Builder, n: u64, (gate_up, act): (Buf, Buf), which: &str) {
        let (label, kernel) = match self.mlp {
            Mlp::SwiGlu => ("swiglu", Kernel::SwiGlu { rows: n, cols: self.ffn }),
            Mlp::Gelu => ("gelu", Kernel::Gelu { elems: n * self.ffn }),
            Mlp::Relu2 => ("relu2", Kernel::Relu2 { elems: n * self.ffn }),
        };
        b.compute(&format!("{label}{which}"), kernel, &[gate_up], &[act]);
    }

    /// Runs the experts' half of a layer, into `s.branch`: the experts that every token visits come before the others,
    /// or beside their rows on their way (Megatron-LM's `--moe-shared-expert-overlap`).
    pub(super) fn experts_forward(
        &self,
        b: &mut Builder,
        s: &Scratch,
        w: Flats,
        mid: Buf,
        keep: &Saved,
        experts: &Experts,
    ) {
        let (norm, normed) = (self.rows.norm2.expect("a norm before each half"), keep.normed2.expect("likewise"));
        self.norms.forward(b, "norm2", mid, w.at(norm), normed);
        self.experts_of(b, s, w, normed, keep, experts);
    }

    /// Runs the experts' half from the norm's output.
    pub(super) fn experts_of(
        &self,
        b: &mut Builder,
        s: &Scratch,
        w: Flats,
        normed: Buf,
        keep: &Saved,
        experts: &Experts,
    ) {
        let (saved, scratch) = (keep.experts.as_ref().expect("kept"), s.experts.as_ref().expect("declared"));
        let mut first = |b: &mut Builder| {
            if self.ffn > 0 {
                self.gathered_mlp_in(b, s, w, keep, normed);
            }
        };
        let mut second = |b: &mut Builder| {
            let Some(shared) = s.shared else { return };
            let (sums, down) = (s.partial.unwrap_or(shared), w.at(self.rows.down));
            self.tp.scattered(b, "down_reduce", sums, shared, |b, chunk| {
                self.linear_out(b, "down", [keep.network().1, down], self.ffn, false, sums, chunk);
            });
        };
        let parts = self.parts(w);
        if self.overlap_shared {
            experts.forward(b, scratch, parts, normed, s.branch, saved, [&mut first, &mut second]);
        } else {
            first(b);
            second(b);
            experts.forward(b, scratch, parts, normed, s.branch, saved, [&mut |_| {}, &mut |_| {}]);
        }
        self.add_shared(b, "shared_add", s, s.branch);
    }

    pub(super) fn parts(&self, flats: Flats) -> expert::Parts {
        let router = self.rows.router.expect("experts have a router");
        expert::Parts {
            router: flats.at(router),
            squeezed: self.rows.squeezed.map(|both| both.map(|r| flats.at(r))),
            experts: flats.experts.expect("experts have weights"),
        }
    }

    pub(super) fn add_shared(&self, b: &mut Builder, label: &str, s: &Scratch, to: Buf) {
        let Some(shared) = s.shared else { return };
        b.compute(label, Kernel::Add { elems: self.residual_rows() * self.hidden, trim: None }, &[to, shared], &[to]);
    }

    /// Projects rows of the residual stream to `cols` columns.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn linear_in(
        &self,
        b: &mut Builder,
        label: &str,
        [x, w]: [Buf; 2],
        bias: Option<Buf>,
        cols: u64,
        y: Buf,
        rows: Chunk,
    ) {
        let kernel = with(linear(rows.count(), cols, self.hidden, self.fp8), false, bias.is_some());
        let reads: Vec<Buf> = [rows.of(x), w].into_iter().chain(bias).collect();
        b.compute(&rows.label(label), kernel, &reads, &[rows.of(y)]);
    }

    /// Projects rows of `cols` columns to the residual stream, as sums that other ranks' sums may be added to.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn linear_out(
        &self,
        b: &mut Builder,
        label: &str,
        [x, w]: [Buf; 2],
        cols: u64,
        adds: bool,
        sums: Buf,
        rows: Chunk,
    ) {
        let kernel = with(linear(rows.count(), self.hidden, cols, self.fp8), adds, false);
        let reads: Vec<Buf> = [rows.of(x), w].into_iter().chain(adds.then_some(rows.of(sums))).collect();
        b.compute(&rows.label(label), kernel, &reads, &[rows.of(sums)]);
    }

    /// y = x + branch + biases; notes which elements of the branch dropout left.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn residual(
        &self,
        b: &mut Builder,
        label: &str,
        x: Buf,
        branch: Buf,
        biases: [Option<Buf>; 2],
        writes: [Option<Buf>; 2],
    ) {
        let (rows, cols) = (self.residual_rows(), self.hidden);
        let reads: Vec<Buf> = [x, branch].into_iter().chain(biases.into_iter().flatten()).collect();
        let writes: Vec<Buf> = writes.into_iter().flatten().collect();
        let kernel = match (reads.len() as u64 - 2, writes.len()) {
            (0, 1) => Kernel::Add { elems: rows * cols, trim: None },
            (biases, 1) => Kernel::Residual { rows, cols, biases, dropout: None },
            (biases, _) => Kernel::Residual { rows, cols, biases, dropout: Some(self.dropout_of(label)) },
        };
        b.compute(label, kernel, &reads, &writes);
    }

    fn dropout_of(&self, label: &str) -> Dropout {
        let share = self.tp.rows();
        let salt = u64::from(label == "residual2");
        Dropout { probability: self.dropout, salt, segs: self.segs.clone(), share }
    }

    /// Runs attention from the first norm's output; returns the input of the projection, all rows of it.
    pub(super) fn attention_forward(&self, b: &mut Builder, s: &Scratch, w: Flats, keep: &Saved, again: bool) -> Buf {
        let (attn, room) = (keep.attn(), s.heads());
        let (Some(ulysses), Some(us), Some(o)) = (&self.ulysses, &room.ulysses, keep.o) else {
            let input = self.qkv_forward(b, s, w, keep, [attn.q, attn.kv]);
            self.attend(b, s, keep, again);
            if let (Some(latent), Some(o)) = (&self.latent, keep.o) {
                latent.values(b, w, attn.o, o);
            }
            return input;
        };
        let input = self.qkv_forward(b, s, w, keep, [room.q_local, room.kv_local]);
        ulysses.scatter_qkv(b, us, [room.q_local, room.kv_local], [attn.q, attn.kv]);
        self.attend(b, s, keep, again);
        ulysses.gather_o(b, us, attn.o, o);
        input
    }

    /// o, lse from q and kv; a kept output is there by now.
    fn attend(&self, b: &mut Builder, s: &Scratch, keep: &Saved, again: bool) {
        if !(again && self.keeps_attention) {
            self.core.forward(b, &s.heads().attn, keep.attn(), again);
        }
    }

    /// Makes queries, keys and values of my tokens.
    fn qkv_forward(&self, b: &mut Builder, s: &Scratch, w: Flats, keep: &Saved, to: [Buf; 2]) -> Buf {
        let rows = &self.rows;
        if let (Some(latent), Some(ls), Some(saved)) = (&self.latent, &s.latent, &keep.latent) {
            latent.forward(b, ls, w, (keep.normed1(), s.input), saved, to, keep.attn().index, false);
            return keep.normed1();
        }
        let room = s.heads().qkv;
        let (qkv, bias) = (w.at(rows.qkv), rows.qkv_bias.map(|r| w.at(r)));
        let input = self.tp.gathered(b, "qkv_gather", keep.normed1(), s.input, |b, input, chunk| {
            self.linear_in(b, "qkv", [input, qkv], bias, self.qkv_row(), room, chunk);
        });
        if let (Some(norms), Some(raw)) = (rows.head_norms, keep.raw_qk) {
            b.compute("qk_norm", self.head_norm(false), &[room, w.at(norms)], &[room, raw]);
        }
        b.compute("rope", self.rope(false), &[room], &to);
        input
    }
}
