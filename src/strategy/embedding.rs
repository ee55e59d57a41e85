//! The first thing a token meets: its row of a table, whose rows tensor-parallel ranks share out, and where
//! positions are learned the row of its position in another, which every rank has.

use super::tensor::TensorParallel;
use super::transformer::Layer;
use super::weights::{Rows, Weight, Weights};
use crate::plan::{Axis, Buf, Builder, Dtype, Kernel, Segs};
use crate::spec::{self, LlmSpec};

/// A table of learned positions.
struct Positions {
    segs: Segs,
    /// Tokens whose residual stream is on this rank.
    rows: u64,
    max: u64,
    at: Rows,
}

pub struct Embedding {
    tokens: u64,
    hidden: u64,
    /// Rows of the table on one rank.
    vocab: u64,
    tp: TensorParallel,
    /// Dtype of gradients.
    acc: Dtype,
    weights: Weights,
    table: Rows,
    positions: Option<Positions>,
    /// Room for all tokens' rows; `None` where a rank has all of them anyway.
    room: Option<Buf>,
}

impl Embedding {
    pub fn new(b: &mut Builder, model: &LlmSpec, layer: &Layer) -> Embedding {
        let (tp, tokens, hidden) = (layer.tp, layer.tokens(), model.hidden);
        let mut weights = Weights::new(&tp);
        let positions = match model.positions {
            spec::Positions::Learned { max } => {
                let at = weights.whole("model.embed_positions.weight", &[max, hidden]);
                Some(Positions { segs: layer.segs.clone(), rows: layer.residual_rows(), max, at })
            }
            _ => None,
        };
        let table = weights.cut("model.embed_tokens.weight", &[model.vocab, hidden], 0, &[model.vocab]);
        let room = tp.room(b, "tp_embed", tokens, hidden);
        Embedding {
            tokens,
            hidden,
            vocab: model.vocab.div_ceil(tp.ranks),
            tp,
            acc: layer.grads,
            weights,
            table,
            positions,
            room,
        }
    }

    /// Elements of the weights on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    /// The table within a flat tensor of the weights, or of their gradients.
    pub fn table(&self, flat: Buf) -> Buf {
        flat.at(self.table)
    }

    fn shard(&self) -> Option<Axis> {
        (self.tp.ranks > 1).then_some(Axis::Tp)
    }

    /// x from token ids. A rank looks up the ids of its part; the rows of others are zero, so that the sum over ranks
    /// is the row.
    pub fn forward(&self, b: &mut Builder, w: Buf, ids: Buf, x: Buf) {
        let kernel = Kernel::Embed { rows: self.tokens, cols: self.hidden, vocab: self.vocab, shard: self.shard() };
        let sums = self.room.unwrap_or(x);
        b.compute("embed", kernel, &[ids, self.table(w)], &[sums]);
        self.tp.reduce(b, "embed_reduce", sums, x);
        if let Some(p) = &self.positions {
            b.compute("positions", self.place(p, false), &[x, w.at(p.at)], &[x]);
        }
    }

    fn place(&self, p: &Positions, backward: bool) -> Kernel {
        let (segs, share) = (p.segs.clone(), self.tp.rows());
        Kernel::Positions { segs, rows: p.rows, cols: self.hidden, max: p.max, share, backward }
    }

    /// Adds to the table's gradient, from the gradient of x.
    pub fn backward(&self, b: &mut Builder, g: Buf, ids: Buf, dx: Buf) {
        let kernel = Kernel::EmbedBwd { rows: self.tokens, cols: self.hidden, vocab: self.vocab, shard: self.shard() };
        if let Some(p) = &self.positions {
            let grad = g.at(p.at);
            b.compute("positions_bwd", self.place(p, true), &[dx, grad], &[grad]);
        }
        let dx = self.tp.gather(b, "embed_bwd_gather", dx, self.room);
        let grad = self.table(g);
        b.compute("embed_bwd", kernel, &[ids, dx, grad], &[grad]);
    }

    /// Sums the part of the gradient that tensor-parallel ranks have to add up before it is whole.
    pub fn sum_shared(&self, b: &mut Builder, g: Buf) {
        let [from, to] = self.weights.shared();
        if to > from {
            self.tp.sum_shared(b, "shared_grad_sum.embed", g.rows(from, to), self.acc);
        }
    }
}
