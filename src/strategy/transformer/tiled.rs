//! A network that goes through a microbatch piece by piece, and again in the backward pass: of what stands between its
//! products there is a piece at a time (TiledMLP of Arctic Long Sequence Training, arXiv:2506.13996).
//!
//! Legend as for the layer: n tokens, f feed-forward width. In p pieces, gate and up, the activation and their
//! gradients take n/p rows in place of n, for one more product to gate and up (4nhf FLOPs of SwiGLU) in the backward pass.

use super::super::tensor::Chunk;
use super::backward::Backward;
use super::buffers::{Saved, Scratch};
use super::{Flats, Layer, linear_dw, linear_dx, weight_grad};
use crate::plan::{Buf, Builder};

/// Rows of one piece: in buffers that have all tokens' rows, and in a room that is as large as a piece.
struct Piece {
    rows: [u64; 2],
    is_all: bool,
    is_full: bool,
}

impl Piece {
    fn count(&self) -> u64 {
        self.rows[1] - self.rows[0]
    }

    fn of(&self, all: Buf) -> Buf {
        if self.is_all { all } else { all.at(self.rows) }
    }

    fn room(&self, room: Buf) -> Buf {
        if self.is_full { room } else { room.rows(0, self.count()) }
    }
}

impl Layer {
    pub(super) fn is_tiled(&self) -> bool {
        self.mlp_chunks.is_some()
    }

    /// Rows of the largest piece; all rows where there is one piece.
    pub(super) fn piece_rows(&self) -> u64 {
        self.tokens().div_ceil(self.mlp_chunks.unwrap_or(1))
    }

    fn pieces(&self) -> impl Iterator<Item = (u64, Piece)> + use<> {
        let (n, each) = (self.tokens(), self.piece_rows());
        (0..n.div_ceil(each)).map(move |i| {
            let rows = [i * each, n.min((i + 1) * each)];
            (i, Piece { rows, is_all: rows == [0, n], is_full: rows[1] - rows[0] == each })
        })
    }

    /// Makes the network's output in `s.branch`, from a norm of `mid`.
    pub(super) fn tiled_forward(&self, b: &mut Builder, s: &Scratch, w: Flats, mid: Buf, keep: &Saved, sums: Buf) {
        let (norm, normed) = (self.rows.norm2.expect("a norm before each half"), keep.normed2.expect("likewise"));
        let down = w.at(self.rows.down);
        self.norms.forward(b, "norm2", mid, w.at(norm), normed);
        let input = self.tp.gather(b, "gate_up_gather", normed, s.input);
        for (i, piece) in self.pieces() {
            b.labelled(format!(".{i}"), |b| {
                let act = self.piece_in(b, w, keep, &piece, input, "");
                self.linear_out(b, "down", [act, down], self.ffn, false, piece.of(sums), Chunk::whole(piece.count()));
            });
        }
        self.tp.reduce(b, "down_reduce", sums, s.branch);
    }

    /// Runs a piece of the network up to its activation, whose output it returns.
    fn piece_in(&self, b: &mut Builder, w: Flats, keep: &Saved, piece: &Piece, input: Buf, which: &str) -> Buf {
        let (gate_up, act) = keep.network();
        let (gate_up, act) = (piece.room(gate_up), piece.room(act));
        let weight = w.at(self.rows.gate_up);
        let bias = self.rows.up_bias.map(|r| w.at(r));
        let (label, rows) = (format!("gate_up{which}"), Chunk::whole(piece.count()));
        self.linear_in(b, &label, [piece.of(input), weight], bias, self.wide, gate_up, rows);
        self.activation_of(b, piece.count(), (gate_up, act), which);
        act
    }
}

impl Backward<'_> {
    /// Goes from the gradient of the network's output to that of its input, in `d_normed`.
    pub(super) fn tiled_network(&self, b: &mut Builder, d_branch: Buf) {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (h, f) = (l.hidden, l.ffn);
        let d_output = l.tp.gather(b, "down_bwd_gather", d_branch, s.d_output);
        let input = l.tp.gather(b, "gate_up_regather", keep.normed2.expect("a norm before each half"), s.input);
        self.bias(b, "down_bias_bwd", l.rows.down_bias, l.norms.rows, d_branch);
        for (i, piece) in l.pieces() {
            b.labelled(format!(".{i}"), |b| {
                let n = piece.count();
                let act = l.piece_in(b, self.w, keep, &piece, input, "_again");
                let (d_act, d_gate_up) = s.network();
                let (d_act, d_gate_up) = (piece.room(d_act), piece.room(d_gate_up));
                let [x, d, dx] = [input, d_output, self.sums].map(|all| piece.of(all));
                self.out_dx(b, "down_dx", [d, self.at(l.rows.down), d_act], f, Chunk::whole(n));
                self.piece_dw(b, "down_dw", [h, f, n], [d, act], l.rows.down);
                self.activation(b, n, [piece.room(keep.network().0), d_act, d_gate_up]);
                self.bias(b, "up_bias_bwd", l.rows.up_bias, n, d_gate_up);
                let kernel = linear_dx(n, h, l.wide, l.fp8);
                b.compute("gate_up_dx", kernel, &[d_gate_up, self.at(l.rows.gate_up)], &[dx]);
                self.piece_dw(b, "gate_up_dw", [l.wide, h, n], [d_gate_up, x], l.rows.gate_up);
            });
        }
        l.tp.reduce(b, "gate_up_bwd_reduce", self.sums, s.d_normed);
    }

    /// Adds a piece's product to the gradient of a weight of `out` times `inp`.
    fn piece_dw(&self, b: &mut Builder, label: &str, [out, inp, n]: [u64; 3], reads: [Buf; 2], rows: [u64; 2]) {
        let grad = self.g.at(rows);
        weight_grad(b, label, linear_dw(out, inp, n, self.layer.fp8), reads, grad, self.s.dw);
    }
}
