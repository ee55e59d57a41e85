//! DeepSeek Sparse Attention between the projections (DeepSeek-V3.2-Exp): an indexer chooses keys, latent attention sees them, and
//! the indexer learns what attention made of them.
//!
//! ```text
//! index keys of all | score, choose | attend to what was chosen
//!                     keys of all, on their way
//! ```
//! Ranks that share a sequence gather what is compressed of all keys, and the index keys, and bring their gradients home in the
//! model's dtype, as [`allgather_kv`](super::allgather_kv) does with keys and values: which keys a query will choose is not known
//! before all are scored. Each scores and attends with its own queries, and nothing is merged.
//!
//! The indexer's inputs are detached: its gradient ends at its own weights, and none of attention's goes through the choice.

use super::attention::{Saved, Shape, delta};
use crate::plan::sparse::{Chosen, Indexer, SparseKernel};
use crate::plan::*;
use crate::spec::{IndexerSpec, LlmSpec, Mask, MlaSpec, Parallelism, Recompute, Workload};

/// Latent attention to the keys that an indexer chooses.
#[derive(Debug, Clone)]
pub struct Sparse {
    /// The sizes of attention: absorbed queries of this rank against the one key of the whole sequence.
    pub shape: Shape,
    indexer: IndexerSpec,
    ranks: u32,
    engine: Engine,
    /// Factor of products of queries and keys.
    scale: f64,
    /// The weight of one query's divergence in the indexer's loss.
    part: f64,
    fp8: bool,
    /// Whether the choice is kept, where attention runs again.
    keeps_choice: bool,
}

/// The buffers that the indexer is given and makes, kept for the backward pass.
#[derive(Clone, Copy)]
pub struct Index {
    pub q: Buf,
    pub k: Buf,
    /// Weights of the indexer's heads.
    pub w: Buf,
    pub chosen: Buf,
}

impl Index {
    pub fn bufs_mut(&mut self) -> [(&'static str, &mut Buf); 4] {
        let Index { q, k, w, chosen } = self;
        [(INDEX_Q, q), ("index_k", k), ("index_w", w), ("chosen", chosen)]
    }
}

/// The name of the tensor of index queries.
pub const INDEX_Q: &str = "index_q";

/// Rows of all ranks: as they come, and in the order of the sequence if that is another.
struct Gathered {
    apart: Buf,
    ordered: Option<Buf>,
    cols: u64,
    name: &'static str,
}

/// Gradients of the rows of all ranks: in the order of the sequence, and as they go home if that is another.
struct Home {
    all: Buf,
    apart: Option<Buf>,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    delta: Buf,
    /// Probabilities, a mean over heads.
    p: Buf,
    dq: Buf,
    dkv: Buf,
    /// Gradients of index queries, keys and weights.
    pub d_index: [Buf; 3],
    others: Option<([Gathered; 2], [Home; 2])>,
}

impl Sparse {
    /// Attention to the keys of all ranks; `shape`, of heads that are not absorbed, says which queries the rank has.
    pub fn new(
        shape: &Shape,
        (mla, indexer): (MlaSpec, IndexerSpec),
        model: &LlmSpec,
        work: &Workload,
        par: &Parallelism,
        engine: Engine,
    ) -> Sparse {
        let own = &shape.block;
        let block = AttnBlock {
            q: own.q.clone(),
            kv: Segs::new(work.seq_len, &[]),
            batch: own.batch,
            heads: own.heads,
            kv_heads: 1,
            head_dim: mla.kv_lora + mla.rope_dim,
            v_dim: Some(mla.kv_lora),
            mask: Mask { window: Some(indexer.top_k), ..own.mask.clone() },
            factor: Default::default(),
        };
        let scale = model.score_factor().0 / (model.qk_dim() as f64).sqrt();
        let part = 1.0 / (work.global_batch * work.seq_len) as f64;
        let keeps_choice = par.recompute == Recompute::Selective;
        let shape = Shape { block, ..shape.clone() };
        Sparse { shape, indexer, ranks: par.ring, engine, scale, part, fp8: par.options.fp8, keeps_choice }
    }

    /// Elements of a token's keys, whose values are part of them.
    pub fn kv_row(&self) -> u64 {
        self.shape.block.head_dim
    }

    /// Declares buffers for what the indexer is given and makes; `declare` is told name, rows, elements of a row and
    /// dtype.
    pub fn index(&self, mut declare: impl FnMut(&str, u64, u64, Dtype) -> Buf) -> Index {
        let (n, i, dtype) = (self.shape.rows(), self.indexer, self.shape.dtype);
        Index {
            q: declare(INDEX_Q, n, i.heads * i.head_dim, dtype),
            k: declare("index_k", n, i.head_dim, dtype),
            w: declare("index_w", n, i.heads, dtype),
            chosen: declare("chosen", n, i.top_k, Dtype::U32),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (sh, i) = (&self.shape, self.indexer);
        let n = sh.rows();
        let mut work = |name, row, dtype| b.tensor(name, &[n, row], dtype, TensorKind::Workspace, 1);
        let scratch = Scratch {
            delta: work("delta", sh.block.heads, sh.acc),
            p: work("mean_probs", i.top_k, sh.acc),
            dq: work("dq", sh.q_row(), sh.dtype),
            dkv: work("dkv", self.kv_row(), sh.dtype),
            d_index: [
                work("d_index_q", i.heads * i.head_dim, sh.dtype),
                work("d_index_k", i.head_dim, sh.dtype),
                work("d_index_w", i.heads, sh.dtype),
            ],
            others: None,
        };
        let others = (self.ranks > 1).then(|| {
            let cols = [("kv", self.kv_row()), ("index", i.head_dim)];
            (cols.map(|(name, cols)| self.gathered(b, name, cols)), cols.map(|(name, cols)| self.home(b, name, cols)))
        });
        Scratch { others, ..scratch }
    }

    /// Whether rows of all ranks come in another order than that of the sequence.
    fn out_of_order(&self) -> bool {
        let q = &self.shape.block.q;
        let split = q.order.iter().any(|(_, split)| *split != Split::Contiguous);
        self.shape.block.batch > 1 || split || !q.documents.is_empty()
    }

    fn gathered(&self, b: &mut Builder, name: &'static str, cols: u64) -> Gathered {
        let (sh, ranks) = (&self.shape, u64::from(self.ranks));
        let apart = [ranks, sh.rows() * cols];
        let apart = b.tensor(&format!("{name}_gathered"), &apart, sh.dtype, TensorKind::CommBuffer, 1);
        let rows = [ranks * sh.rows(), cols];
        let mut ordered = || b.tensor(&format!("{name}_ordered"), &rows, sh.dtype, TensorKind::Workspace, 1);
        Gathered { apart, ordered: self.out_of_order().then(&mut ordered), cols, name }
    }

    fn home(&self, b: &mut Builder, name: &str, cols: u64) -> Home {
        let (sh, ranks) = (&self.shape, u64::from(self.ranks));
        let rows = [ranks * sh.rows(), cols];
        let all = b.tensor(&format!("d_{name}_all"), &rows, sh.dtype, TensorKind::Workspace, 1);
        let apart = [ranks, sh.rows() * cols];
        let mut wire = || b.tensor(&format!("d_{name}_gathered"), &apart, sh.dtype, TensorKind::CommBuffer, 1);
        Home { all, apart: self.out_of_order().then(&mut wire) }
    }

    fn score(&self, backward: bool) -> Indexer {
        let (own, i) = (&self.shape.block, self.indexer);
        let window = if backward { Some(i.top_k) } else { None };
        let mask = Mask { window, ..own.mask.clone() };
        let block = AttnBlock { heads: i.heads, head_dim: i.head_dim, v_dim: None, mask, ..own.clone() };
        Indexer { block, top_k: i.top_k, fp8: self.fp8 }
    }

    fn chosen(&self) -> Chosen {
        Chosen { block: self.shape.block.clone(), top_k: self.indexer.top_k, scale: self.scale }
    }

    fn collective(&self, b: &mut Builder, label: &str, kind: CollectiveKind, src: Buf, dst: Buf) {
        let group = Group::axes(&[Axis::Cp]);
        b.collective(label, Via { group: &group, index: 0, engine: self.engine }, kind, src, dst, self.shape.dtype);
    }

    fn reorder(&self, b: &mut Builder, label: &str, cols: u64, inverse: bool, [from, to]: [Buf; 2]) {
        let (segs, batch) = (self.shape.block.q.clone(), self.shape.block.batch);
        b.compute(label, Kernel::Reorder { segs, batch, cols, inverse }, &[from], &[to]);
    }

    fn gather(&self, b: &mut Builder, to: &Gathered, own: Buf) {
        self.collective(b, &format!("{}_gather", to.name), CollectiveKind::AllGather, own, to.apart);
    }

    /// The rows that were gathered, in the order of the sequence.
    fn ordered(&self, b: &mut Builder, of: &Gathered) -> Buf {
        let Some(ordered) = of.ordered else { return of.apart };
        self.reorder(b, &format!("{}_reorder", of.name), of.cols, false, [of.apart, ordered]);
        ordered
    }

    /// Sums the gradients of a rank's own rows over the ranks.
    fn send_home(&self, b: &mut Builder, (name, cols): (&str, u64), from: &Home, own: Buf) {
        if let Some(apart) = from.apart {
            self.reorder(b, &format!("d_{name}_reorder"), cols, true, [from.all, apart]);
        }
        let src = from.apart.unwrap_or(from.all);
        self.collective(b, &format!("d_{name}_scatter"), CollectiveKind::ReduceScatter, src, own);
    }

    /// Makes o and lse from q and kv, and chooses the keys; `again`: it is run once more for the backward pass.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved, again: bool) {
        let index = io.index();
        let chooses = !(again && self.keeps_choice);
        if let Some(([kv, keys], _)) = &s.others {
            // Keys of attention are on their way while those of the indexer are scored.
            if chooses {
                self.gather(b, keys, index.k);
            }
            self.gather(b, kv, io.kv);
        }
        if chooses {
            let keys = s.others.as_ref().map_or(index.k, |([_, keys], _)| self.ordered(b, keys));
            let kernel = Kernel::Sparse(SparseKernel::Score(self.score(false)));
            b.compute("lightning_index", kernel, &[index.q, keys, index.w], &[index.chosen]);
        }
        let kv = s.others.as_ref().map_or(io.kv, |([kv, _], _)| self.ordered(b, kv));
        let kernel = Kernel::Sparse(SparseKernel::Attend(self.chosen()));
        b.compute("sparse_attention", kernel, &[io.q, kv, index.chosen], &[io.o, io.lse()]);
    }

    /// Makes dq and dkv from the gradient of o; the gradients of the indexer are in [`Scratch::d_index`].
    pub fn backward(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        let index = io.index();
        if let Some(([kv, keys], _)) = &s.others {
            self.gather(b, kv, io.kv);
            self.gather(b, keys, index.k);
        }
        delta(b, &self.shape, io.o, d_o, s.delta);
        let kv = s.others.as_ref().map_or(io.kv, |([kv, _], _)| self.ordered(b, kv));
        let d_kv = s.others.as_ref().map_or(s.dkv, |(_, [d_kv, _])| d_kv.all);
        let reads = [io.q, kv, d_o, io.lse(), s.delta, index.chosen];
        let kernel = Kernel::Sparse(SparseKernel::AttendBwd(self.chosen()));
        b.compute("sparse_attention_bwd", kernel, &reads, &[s.dq, d_kv, s.p]);
        if let Some((_, [d_kv, _])) = &s.others {
            self.send_home(b, ("kv", self.kv_row()), d_kv, s.dkv);
        }
        let keys = s.others.as_ref().map_or(index.k, |([_, keys], _)| self.ordered(b, keys));
        let [d_q, own, d_w] = s.d_index;
        let d_keys = s.others.as_ref().map_or(own, |(_, [_, d_keys])| d_keys.all);
        let kernel = Kernel::Sparse(SparseKernel::ScoreBwd { of: self.score(true), part: self.part });
        b.compute("lightning_index_bwd", kernel, &[index.q, keys, index.w, index.chosen, s.p], &[d_q, d_keys, d_w]);
        if let Some((_, [_, d_keys])) = &s.others {
            self.send_home(b, ("index", self.indexer.head_dim), d_keys, own);
        }
        (s.dq, s.dkv)
    }
}
