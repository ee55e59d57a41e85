//! A network that goes through a microbatch piece by piece, and again in the backward pass: of what stands between its
//! products there is a piece at a time (TiledMLP of Arctic Long Sequence Training, arXiv:2506.13996).
//!
//! Legend as for the layer: n tokens, f feed-forward width. In p pieces, gate and up, the activation and their
//! gradients take n/p rows in place of n, for one more product to gate and up (4nhf FLOPs of SwiGLU) in the backward pass.

use super::super::tensor::Chunk;
use super::backward::Backward;
use super::forward::Forward;
use super::{Layer, linear_dx};
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
}

impl Forward<'_> {
    /// Makes the network's output in `s.branch`, from a norm of `mid`.
    pub(super) fn tiled(&self, b: &mut Builder, mid: Buf) {
        let (l, s, sums) = (self.layer, self.s, self.sums());
        let down = self.at(l.rows.down);
        self.norm2(b, mid);
        let input = l.tp.gather(b, "gate_up_gather", self.keep.normed2(), s.input);
        for (i, piece) in l.pieces() {
            b.labelled(format!(".{i}"), |b| {
                let act = self.piece_in(b, &piece, input, "");
                self.linear_out(b, "down", [act, down, piece.of(sums)], l.ffn, false, Chunk::whole(piece.count()));
            });
        }
        l.tp.reduce(b, "down_reduce", sums, s.branch);
    }

    /// Runs a piece of the network up to its activation, whose output it returns.
    fn piece_in(&self, b: &mut Builder, piece: &Piece, input: Buf, which: &str) -> Buf {
        let (l, (gate_up, act)) = (self.layer, self.keep.network());
        let (gate_up, act) = (piece.room(gate_up), piece.room(act));
        let (label, rows) = (format!("gate_up{which}"), Chunk::whole(piece.count()));
        let to = [piece.of(input), self.at(l.rows.gate_up), gate_up];
        self.linear_in(b, &label, to, l.rows.up_bias, l.wide, rows);
        l.activation(b, piece.count(), (gate_up, act), which);
        act
    }
}

impl Backward<'_> {
    /// Goes from the gradient of the network's output to that of its input, in `d_normed`.
    pub(super) fn tiled(&self, b: &mut Builder, d_branch: Buf) {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (h, f) = (l.hidden, l.ffn);
        let d_output = l.tp.gather(b, "down_bwd_gather", d_branch, s.d_output);
        let input = l.tp.gather(b, "gate_up_regather", keep.normed2(), s.input);
        self.bias(b, "down_bias_bwd", l.rows.down_bias, l.norms.rows, d_branch);
        for (i, piece) in l.pieces() {
            b.labelled(format!(".{i}"), |b| {
                let n = piece.count();
                let act = self.again().piece_in(b, &piece, input, "_again");
                let (d_act, d_gate_up) = s.network();
                let (d_act, d_gate_up) = (piece.room(d_act), piece.room(d_gate_up));
                let [x, d, dx] = [input, d_output, self.sums].map(|all| piece.of(all));
                self.out_dx(b, "down_dx", [d, self.at(l.rows.down), d_act], f, Chunk::whole(n));
                self.dw_of(b, "down_dw", [h, f, n], [d, act], l.rows.down);
                self.activation(b, n, [piece.room(keep.network().0), d_act, d_gate_up]);
                self.bias(b, "up_bias_bwd", l.rows.up_bias, n, d_gate_up);
                let kernel = linear_dx(n, h, l.wide, l.fp8);
                b.compute("gate_up_dx", kernel, &[d_gate_up, self.at(l.rows.gate_up)], &[dx]);
                self.dw_of(b, "gate_up_dw", [l.wide, h, n], [d_gate_up, x], l.rows.gate_up);
            });
        }
        l.tp.reduce(b, "gate_up_bwd_reduce", self.sums, s.d_normed);
    }
}
