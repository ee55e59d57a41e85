//! A layer's forward pass.

use super::super::expert::{self, Experts};
use super::super::tensor::Chunk;
use super::super::weights::Rows;
use super::buffers::{Saved, Scratch};
use super::codes::Coded;
use super::{Flats, Layer, latent, linear, with};
use crate::plan::{Buf, Builder, Dropout, Kernel};
use crate::spec::Mlp;

impl Layer {
    /// x_out = layer(x), keeping the buffers of `keep`; `again`: it is run once more for the backward pass.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Flats, xs: [Buf; 2], keep: &Saved, again: bool) {
        let pass = Forward { layer: self, s, w, keep: &keep.with_again(s), again };
        if self.is_chunked() { pass.chunks(b, xs) } else { pass.run(b, xs) }
    }

    /// Runs the activation on `n` rows.
    pub(super) fn activation(&self, b: &mut Builder, n: u64, (gate_up, act): (Buf, Buf), which: &str) {
        let (label, kernel) = match self.mlp {
            Mlp::SwiGlu => ("swiglu", Kernel::SwiGlu { rows: n, cols: self.ffn }),
            Mlp::Gelu => ("gelu", Kernel::Gelu { elems: n * self.ffn }),
            Mlp::Relu2 => ("relu2", Kernel::Relu2 { elems: n * self.ffn }),
        };
        b.compute(&format!("{label}{which}"), kernel, &[gate_up], &[act]);
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

    /// y = x + branch + biases; notes which elements of the branch dropout left.
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

    /// The latent attention of a layer in a pass; `None` without it.
    pub(super) fn latent<'a>(&'a self, s: &'a Scratch, w: Flats, keep: &'a Saved) -> Option<latent::Pass<'a>> {
        let (latent, ls, saved) = (self.latent.as_ref()?, s.latent.as_ref()?, keep.latent.as_ref()?);
        Some(latent::Pass { latent, s: ls, w, keep: saved, input: (keep.normed1(), s.input) })
    }
}

/// One layer's forward pass under way.
#[derive(Clone, Copy)]
pub(super) struct Forward<'a> {
    pub(super) layer: &'a Layer,
    pub(super) s: &'a Scratch,
    pub(super) w: Flats,
    pub(super) keep: &'a Saved,
    /// Whether it is run once more for the backward pass.
    pub(super) again: bool,
}

impl Forward<'_> {
    pub(super) fn at(&self, r: Rows) -> Buf {
        self.w.at(r)
    }

    /// Goes through all rows at once, not chunk by chunk.
    pub(super) fn run(&self, b: &mut Builder, [x, x_out]: [Buf; 2]) {
        let Forward { layer: l, s, keep, .. } = *self;
        if let Some(mixer) = l.alone {
            return self.alone(b, [x, x_out], mixer);
        }
        let [o_bias, down_bias] = [l.rows.o_bias, l.rows.down_bias].map(|rows| rows.map(|r| self.at(r)));
        self.norm1(b, x);
        let input = self.attention(b);
        let Some(mid) = keep.mid else {
            self.mlp_in(b, x, input);
            let sums = self.sums();
            self.linear_out(b, "o_proj", [keep.output(), self.at(l.rows.o), sums], l.o_row(), false, l.tp.all());
            l.tp.scattered(b, "block_reduce", sums, s.branch, |b, chunk| {
                self.linear_out(b, "down", [keep.network().1, self.at(l.rows.down), sums], l.ffn, true, chunk);
            });
            return l.residual(b, "residual", x, s.branch, [o_bias, down_bias], [Some(x_out), keep.stays[0]]);
        };
        self.o_proj(b);
        l.residual(b, "residual1", x, s.branch, [o_bias, None], [Some(mid), keep.stays[0]]);
        match &l.experts {
            Some(experts) => {
                self.norm2(b, mid);
                self.experts(b, experts);
            }
            None if l.is_tiled() => self.tiled(b, mid),
            None => {
                self.mlp_in(b, mid, input);
                self.down(b, s.branch);
            }
        }
        l.residual(b, "residual2", mid, s.branch, [down_bias, None], [Some(x_out), keep.stays[1]]);
    }

    /// Where a branch is summed up over a rank's share of the columns, before it is summed over the ranks.
    pub(super) fn sums(&self) -> Buf {
        self.s.partial.unwrap_or(self.s.branch)
    }

    pub(super) fn norm1(&self, b: &mut Builder, x: Buf) {
        self.layer.norms.forward(b, "norm1", x, self.at(self.layer.rows.norm1), self.keep.normed1());
        self.quantise(b, Coded::Norm1);
    }

    pub(super) fn norm2(&self, b: &mut Builder, x: Buf) {
        self.layer.norms.forward(b, "norm2", x, self.at(self.layer.rows.norm2()), self.keep.normed2());
        self.quantise(b, Coded::Norm2);
    }

    /// Runs the feed-forward network up to its activation, from a norm of `x`, or where there is none from `first`,
    /// attention's input.
    pub(super) fn mlp_in(&self, b: &mut Builder, x: Buf, first: Buf) {
        if self.layer.rows.norm2.is_some() {
            self.norm2(b, x);
            return self.gathered_mlp_in(b);
        }
        self.gate_up(b, first, self.layer.tp.all());
        self.activation(b, "");
    }

    /// Runs it up to its activation from a rank's share of its input.
    pub(super) fn gathered_mlp_in(&self, b: &mut Builder) {
        let up = |b: &mut Builder, input, chunk| self.gate_up(b, input, chunk);
        self.layer.tp.gathered(b, "gate_up_gather", self.keep.normed2(), self.s.input, up);
        self.activation(b, "");
    }

    fn gate_up(&self, b: &mut Builder, input: Buf, chunk: Chunk) {
        let l = self.layer;
        let to = [input, self.at(l.rows.gate_up), self.keep.network().0];
        self.linear_in(b, "gate_up", to, l.rows.up_bias, l.wide, chunk);
    }

    pub(super) fn activation(&self, b: &mut Builder, which: &str) {
        self.layer.activation(b, self.layer.tokens(), self.keep.network(), which);
        self.quantise(b, Coded::Act);
    }

    /// Runs the experts' half of a layer from its norm's output, into `s.branch`: the experts that every token visits
    /// come before the others, or beside their rows on their way (Megatron-LM's `--moe-shared-expert-overlap`).
    pub(super) fn experts(&self, b: &mut Builder, experts: &Experts) {
        let Forward { layer: l, s, keep, .. } = *self;
        let (saved, scratch) = (keep.experts.as_ref().expect("kept"), s.experts.as_ref().expect("declared"));
        let mut first = |b: &mut Builder| {
            if l.ffn > 0 {
                self.gathered_mlp_in(b);
            }
        };
        let mut second = |b: &mut Builder| {
            if let Some(shared) = s.shared {
                self.down(b, shared);
            }
        };
        let (parts, xs) = (l.parts(self.w), [keep.normed2(), s.branch]);
        if l.overlap_shared {
            experts.forward(b, scratch, parts, xs, saved, [&mut first, &mut second]);
        } else {
            first(b);
            second(b);
            experts.forward(b, scratch, parts, xs, saved, [&mut |_| {}, &mut |_| {}]);
        }
        l.add_shared(b, "shared_add", s, s.branch);
    }

    pub(super) fn o_proj(&self, b: &mut Builder) {
        let l = self.layer;
        self.project_out(b, ["o_proj", "o_reduce"], self.keep.output(), l.rows.o, l.o_row(), self.s.branch);
    }

    /// Makes the output of the network that every token visits.
    pub(super) fn down(&self, b: &mut Builder, to: Buf) {
        let l = self.layer;
        self.project_out(b, ["down", "down_reduce"], self.keep.network().1, l.rows.down, l.ffn, to);
    }

    /// Projects `cols` columns of all rows to the residual stream, and sums over the ranks to `to`.
    pub(super) fn project_out(&self, b: &mut Builder, labels: [&str; 2], x: Buf, w: Rows, cols: u64, to: Buf) {
        let ([label, reduce], sums) = (labels, self.s.partial.unwrap_or(to));
        self.layer.tp.scattered(b, reduce, sums, to, |b, chunk| {
            self.linear_out(b, label, [x, self.at(w), sums], cols, false, chunk);
        });
    }

    /// Projects rows of the residual stream to `cols` columns.
    pub(super) fn linear_in(
        &self,
        b: &mut Builder,
        label: &str,
        [x, w, y]: [Buf; 3],
        bias: Option<Rows>,
        cols: u64,
        rows: Chunk,
    ) {
        let l = self.layer;
        let kernel = with(linear(rows.count(), cols, l.hidden, l.fp8), false, bias.is_some());
        let reads: Vec<Buf> = [rows.of(x), w].into_iter().chain(bias.map(|r| self.at(r))).collect();
        b.compute(&rows.label(label), kernel, &reads, &[rows.of(y)]);
    }

    /// Projects rows of `cols` columns to the residual stream, as sums that other ranks' sums may be added to.
    pub(super) fn linear_out(
        &self,
        b: &mut Builder,
        label: &str,
        [x, w, sums]: [Buf; 3],
        cols: u64,
        adds: bool,
        rows: Chunk,
    ) {
        let l = self.layer;
        let kernel = with(linear(rows.count(), l.hidden, cols, l.fp8), adds, false);
        let reads: Vec<Buf> = [rows.of(x), w].into_iter().chain(adds.then_some(rows.of(sums))).collect();
        b.compute(&rows.label(label), kernel, &reads, &[rows.of(sums)]);
    }

    /// Runs attention from the first norm's output; returns the input of the projection, all rows of it.
    pub(super) fn attention(&self, b: &mut Builder) -> Buf {
        let Forward { layer: l, s, keep, .. } = *self;
        let (attn, room) = (keep.attn(), s.heads());
        let (Some(ulysses), Some(us), Some(o)) = (&l.ulysses, &room.ulysses, keep.o) else {
            let input = self.qkv(b, [attn.q, attn.kv]);
            self.attend(b);
            if let (Some(latent), Some(o)) = (l.latent(s, self.w, keep), keep.o) {
                latent.values(b, attn.o, o);
            }
            return input;
        };
        let input = self.qkv(b, [room.q_local, room.kv_local]);
        ulysses.scatter_qkv(b, us, [room.q_local, room.kv_local], [attn.q, attn.kv]);
        self.attend(b);
        ulysses.gather_o(b, us, attn.o, o);
        input
    }

    /// o, lse from q and kv; a kept output is there by now.
    fn attend(&self, b: &mut Builder) {
        if !(self.again && self.layer.keeps_attention) {
            self.layer.core.forward(b, &self.s.heads().attn, self.keep.attn(), self.again);
        }
    }

    /// Makes queries, keys and values of my tokens.
    fn qkv(&self, b: &mut Builder, to: [Buf; 2]) -> Buf {
        let Forward { layer: l, s, keep, .. } = *self;
        if let Some(latent) = l.latent(s, self.w, keep) {
            latent.forward(b, to, keep.attn().index, false);
            return keep.normed1();
        }
        let room = s.heads().qkv;
        let input = l.tp.gathered(b, "qkv_gather", keep.normed1(), s.input, |b, input, chunk| {
            let to = [input, self.at(l.rows.qkv), room];
            self.linear_in(b, "qkv", to, l.rows.qkv_bias, l.qkv_row(), chunk);
        });
        if let (Some(norms), Some(raw)) = (l.rows.head_norms, keep.raw_qk) {
            b.compute("qk_norm", l.head_norm(false), &[room, self.at(norms)], &[room, raw]);
        }
        b.compute("rope", l.rope(false), &[room], &to);
        input
    }
}
