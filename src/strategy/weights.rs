//! The weights of a part of the model, one behind the other in a flat tensor.

use super::tensor::TensorParallel;
use crate::plan::muon::Matrices;
use crate::plan::{Axis, Shard};

/// Rows of a flat tensor, as [`Buf::rows`](crate::plan::Buf::rows) takes them.
pub type Rows = [u64; 2];

#[derive(Debug, Clone)]
pub struct Weight {
    /// The Hugging Face name (q, k, v and gate, up fused), without what stands before a layer's own.
    pub name: &'static str,
    pub rows: Rows,
    /// The shape over all ranks.
    pub shape: Vec<u64>,
    pub shard: Option<Shard>,
    /// Whether every rank has it, but uses it on its own heads alone.
    pub by_heads: bool,
    /// Rows of the matrices that stand in it one behind the other, over all ranks, repeated until all of it is told;
    /// empty: it is no matrix.
    pub matrices: Vec<u64>,
}

impl Weight {
    /// The parts of its matrices that each of `ranks` ranks has, in the rows of the flat tensor.
    pub fn matrices(&self, ranks: u64) -> Vec<Matrices> {
        let [sizes @ .., _] = &self.matrices[..] else { return vec![] };
        let [all, width] = self.shape[..] else { return vec![] };
        let elems = self.rows[1] - self.rows[0];
        let cols = match &self.shard {
            Some(shard) if shard.dim == 1 => shard.local(ranks),
            _ => width,
        };
        let local = elems / cols;
        let each = self.matrices[0];
        let one = |from: u64, count: u64, rows: u64, whole: u64| Matrices {
            from,
            count,
            rows,
            cols,
            longer: whole.max(width),
        };
        match &self.shard {
            // There are as many matrices as blocks, and a rank has its part of each.
            _ if !sizes.is_empty() => {
                let mut from = self.rows[0];
                let parts = self.shard.as_ref().map_or(self.matrices.clone(), |shard| shard.locals(ranks));
                let of = |(&whole, rows): (&u64, u64)| {
                    let next = one(from, 1, rows, whole);
                    from = next.range()[1];
                    next
                };
                self.matrices.iter().zip(parts).map(of).collect()
            }
            // The rank has whole matrices, or a part of a single one.
            _ if each < all => vec![one(self.rows[0], local / each, each, each)],
            _ => vec![one(self.rows[0], 1, local, all)],
        }
    }
}

/// Rows of the matrices of a weight. Queries, keys and values are matrices of their own, gate and up as well; the taps
/// of a convolution are no matrices.
fn matrices_of(name: &str, shape: &[u64], blocks: &[u64]) -> Vec<u64> {
    let fused = ["qkv_proj.weight", "gate_up_proj.weight"].iter().any(|end| name.ends_with(end));
    match shape {
        [_, _] if name.contains("conv1d") => vec![],
        [_, _] if fused => blocks.to_vec(),
        [rows, _] => vec![*rows],
        _ => vec![],
    }
}

/// Lays weights out in a flat tensor: those that every rank has stand before those that are cut.
#[derive(Debug, Clone)]
pub struct Weights {
    axis: Axis,
    ranks: u64,
    pub all: Vec<Weight>,
}

impl Weights {
    pub fn new(tp: &TensorParallel) -> Weights {
        Weights { axis: Axis::Tp, ranks: tp.ranks, all: vec![] }
    }

    /// Weights that are cut over the ranks of another axis.
    pub fn over(axis: Axis, ranks: u64) -> Weights {
        Weights { axis, ranks, all: vec![] }
    }

    /// Number of ranks that a weight is cut over.
    pub fn ranks(&self) -> u64 {
        self.ranks
    }

    /// Says that the weight that came last is matrices of `rows` rows each.
    pub fn each_of(&mut self, rows: u64) {
        self.all.last_mut().expect("a weight came before").matrices = vec![rows];
    }

    /// Elements on one rank.
    pub fn elems(&self) -> u64 {
        self.all.last().map_or(0, |w| w.rows[1])
    }

    /// The rows of the weights that every rank has.
    pub fn shared(&self) -> Rows {
        [0, self.all.iter().filter(|w| w.shard.is_none()).map(|w| w.rows[1]).max().unwrap_or(0)]
    }

    /// The rows of those weights whose gradient is that of a rank's own heads alone.
    pub fn by_heads(&self) -> Rows {
        let mut of = self.all.iter().filter(|w| w.by_heads).map(|w| w.rows);
        let first = of.next().unwrap_or_default();
        of.fold(first, |[from, _], [_, to]| [from, to])
    }

    /// The rows that products in FP8 read, as few ranges as they make. Routers and the weights of an indexer's heads are
    /// matrices whose products are in the dtype of the weights, and so is what heads are absorbed by where an indexer
    /// chooses their keys.
    pub fn in_fp8(&self) -> Vec<Rows> {
        let chosen = "self_attn.indexer.weights_proj.weight";
        let absorbed = self.all.iter().any(|w| w.name == chosen).then_some("self_attn.kv_b_proj.weight");
        let plain = ["mlp.gate.weight", chosen, absorbed.unwrap_or_default()];
        let mut all: Vec<Rows> = vec![];
        for w in self.all.iter().filter(|w| !w.matrices.is_empty() && !plain.contains(&w.name)) {
            match all.last_mut() {
                Some(last) if last[1] == w.rows[0] => last[1] = w.rows[1],
                _ => all.push(w.rows),
            }
        }
        all
    }

    fn add(&mut self, name: &'static str, shape: &[u64], shard: Option<Shard>, elems: u64, blocks: &[u64]) -> Rows {
        let from = self.elems();
        let rows = [from, from + elems];
        let matrices = matrices_of(name, shape, blocks);
        self.all.push(Weight { name, rows, shape: shape.to_vec(), shard, by_heads: false, matrices });
        rows
    }

    /// Lays out a weight that every rank has whole.
    pub fn whole(&mut self, name: &'static str, shape: &[u64]) -> Rows {
        assert!(self.all.iter().all(|w| w.shard.is_none()), "{name} stands behind a weight that is cut");
        self.add(name, shape, None, shape.iter().product(), &[])
    }

    /// Lays out a weight that every rank has whole and uses head by head.
    pub fn whole_by_heads(&mut self, name: &'static str, shape: &[u64]) -> Rows {
        let rows = self.whole(name, shape);
        self.all.last_mut().expect("just added").by_heads = true;
        rows
    }

    /// Lays out a weight cut along `dim` over the ranks, each of `blocks` by itself.
    pub fn cut(&mut self, name: &'static str, shape: &[u64], dim: u8, blocks: &[u64]) -> Rows {
        self.cut_in_copies(name, shape, dim, blocks, &[])
    }

    /// [`cut`](Weights::cut) where neighbouring ranks have the same part of some blocks: as many ranks as `copies` says
    /// for each.
    pub fn cut_in_copies(
        &mut self,
        name: &'static str,
        shape: &[u64],
        dim: u8,
        blocks: &[u64],
        copies: &[u64],
    ) -> Rows {
        let elems: u64 = shape.iter().product();
        if self.ranks == 1 {
            return self.add(name, shape, None, elems, blocks);
        }
        let copies = if copies.iter().all(|&n| n == 1) { vec![] } else { copies.to_vec() };
        let shard = Shard { axis: self.axis, dim, blocks: blocks.to_vec(), copies, holds: vec![] };
        let local = elems / shape[dim as usize] * shard.local(self.ranks);
        self.add(name, shape, Some(shard), local, blocks)
    }

    /// Lays out a weight of equal pieces along its first dim; `holds`: the piece that each place of all ranks holds.
    pub fn held(&mut self, name: &'static str, shape: &[u64], holds: &[u32]) -> Rows {
        let shard = Shard { axis: self.axis, dim: 0, blocks: vec![shape[0]], copies: vec![], holds: holds.to_vec() };
        let local = shape.iter().product::<u64>() / shape[0] * shard.local(self.ranks);
        self.add(name, shape, Some(shard), local, &[])
    }
}
