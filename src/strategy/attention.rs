//! Attention between the projections, whichever way the keys and values of other ranks are reached: the
//! boundary between a layer and the algorithms of context parallelism.
//!
//! A layer hands over q and kv of the tokens and heads that this rank has, and gets o back; backward it
//! hands over the gradient of o and gets those of q and kv. Ulysses exchanges heads for tokens around it.

use super::allgather_kv::{self, GatherKv};
use super::fpdt::{self, Chunked};
use super::ring::{self, Ring};
use super::sparse::{self, Index, Sparse};
use super::step::Engines;
use super::ulysses::{self, Ulysses};
use super::unfused::{self, Probs, Unfused};
use crate::plan::{AttnBlock, Axis, Buf, Builder, Dtype, Kernel, Segs, Split, TensorKind};
use crate::spec::{AttentionSpec, Documents, Factor, KvPath, Parallelism, Recompute, RingBackward, RingLayout};

/// How the ranks share an attention: what one of them has, and how it reaches the keys of the others.
pub struct Way {
    /// Where the tokens of a rank stand in the sequence, outside a Ulysses exchange.
    pub segs: Segs,
    /// Tokens of one sequence on a rank, outside a Ulysses exchange.
    pub seq: u64,
    pub core: Core,
    /// `None` when the Ulysses degree is 1.
    pub ulysses: Option<Ulysses>,
}

impl Way {
    /// How the ranks share the attention `p`. `latent`: elements of a head's value where they are not those of its key,
    /// and a further factor of scores. `dropout`: that of the probabilities, where they are in memory; a fused kernel
    /// drops none here.
    pub fn new(
        p: &AttentionSpec,
        latent: Option<(u64, Factor)>,
        dropout: f64,
        par: &Parallelism,
        engines: Engines,
    ) -> Way {
        Way::of_chunk(p, latent, dropout, par, engines, None)
    }

    /// How the ranks share one chunk of the sequence, where attention goes chunk by chunk.
    pub fn of_chunk(
        p: &AttentionSpec,
        latent: Option<(u64, Factor)>,
        dropout: f64,
        par: &Parallelism,
        engines: Engines,
        chunk: Option<u32>,
    ) -> Way {
        let (v_dim, factor) = latent.map_or((None, Factor::ONE), |(v_dim, factor)| (Some(v_dim), factor));
        let chunks = par.options.chunks;
        let part = chunk.map(|at| (at, chunks));
        let (ring, up) = (u64::from(par.ring), u64::from(par.ulysses));
        let seq = p.seq_len / (ring * up) / part.map_or(1, |(_, of)| u64::from(of));
        let split = match par.options.layout {
            RingLayout::Zigzag => Split::Zigzag,
            RingLayout::Contiguous => Split::Contiguous,
            RingLayout::Stripe => Split::Stripe,
        };
        let shares = if chunks > 0 && chunk.is_none() { Split::Chunks(chunks) } else { Split::Contiguous };
        let each = if par.options.per_document { p.mask.documents.clone() } else { Documents::default() };
        let cut = |order: &[(Axis, Split)]| Segs { part, ..Segs::new(p.seq_len, order) }.of_each(&each);
        let (inner, segs) = (cut(&[(Axis::Cp, split)]), cut(&[(Axis::Cp, split), (Axis::Up, shares)]));
        let ulysses = (par.ulysses > 1).then_some(Ulysses {
            ranks: par.ulysses,
            batch: p.batch,
            seq,
            heads: p.heads,
            kv_heads: p.kv_heads,
            padded: match par.options.pad_heads {
                true => ulysses::padded(p.heads, p.kv_heads, up),
                false => [p.heads, p.kv_heads],
            },
            head_dim: p.head_dim,
            v_dim: v_dim.unwrap_or(p.head_dim),
            separate: par.options.a2a_separate,
            replicate_after: par.options.replicate_after,
            dtype: p.dtype,
            engine: engines.collective,
        });
        let (heads, kv_heads) = ulysses.as_ref().map_or((p.heads, p.kv_heads), Ulysses::local_heads);
        let (batch, head_dim, mask) = (p.batch, p.head_dim, p.mask.clone());
        let block = AttnBlock { q: inner.clone(), kv: inner, batch, heads, kv_heads, head_dim, v_dim, mask, factor };
        let shape = Shape { block, seq: seq * up, dtype: p.dtype, acc: p.acc() };
        let gather =
            |shape, by_head| Core::GatherKv(GatherKv { shape, ranks: par.ring, by_head, engine: engines.collective });
        let core = match (par.ring, par.options.kv) {
            _ if part.is_some() => Core::Chunked(Chunked { shape, at: chunk.unwrap_or(0), chunks }),
            (1, _) if par.options.unfused => {
                Core::Unfused(Unfused { shape, dropout, again: par.recompute == Recompute::Selective })
            }
            (1, _) => Core::Local(Local { shape }),
            (ranks, KvPath::Ring) => Core::Ring(Ring::new(shape, ranks, engines.p2p, par.options)),
            (_, KvPath::Gather) => gather(shape, false),
            (_, KvPath::GatherByHead) => gather(shape, true),
        };
        Way { segs, seq, core, ulysses }
    }
}

/// The sizes of a rank's attention, before any other rank's keys are counted.
#[derive(Debug, Clone)]
pub struct Shape {
    /// The diagonal block: queries against the rank's own KV.
    pub block: AttnBlock,
    /// Tokens of one sequence that the rank holds.
    pub seq: u64,
    /// Dtype of activations, and of KV on the wire.
    pub dtype: Dtype,
    /// Dtype of running sums.
    pub acc: Dtype,
}

impl Shape {
    pub fn rows(&self) -> u64 {
        self.block.batch * self.seq
    }

    /// Elements of a token's queries.
    pub fn q_row(&self) -> u64 {
        self.block.q_row()
    }

    /// Elements of a token's keys and values.
    pub fn kv_row(&self) -> u64 {
        self.block.kv_row()
    }

    /// Elements of a token's outputs.
    pub fn o_row(&self) -> u64 {
        self.block.o_row()
    }
}

/// The buffers that the forward pass leaves for the backward pass.
#[derive(Clone, Copy)]
pub struct Saved {
    pub q: Buf,
    pub kv: Buf,
    pub o: Buf,
    /// Log-sum-exps of fused kernels; `None` for unfused ones.
    pub lse: Option<Buf>,
    /// The KV that came last, where the backward pass begins with it ([`Core::keeps_last`]); else `None`.
    pub kv_last: Option<Buf>,
    /// Probabilities of unfused kernels; `None` for fused ones, or where they are computed again.
    pub probs: Option<Probs>,
    /// What an indexer is given and makes; `None` where no keys are chosen.
    pub index: Option<Index>,
}

impl Saved {
    /// The log-sum-exps, which fused kernels write beside the output.
    pub fn lse(&self) -> Buf {
        self.lse.expect("fused attention keeps log-sum-exps")
    }

    pub fn index(&self) -> Index {
        self.index.expect("chosen keys have an indexer")
    }
}

/// How a rank reaches the keys and values of other ranks.
#[derive(Debug, Clone)]
pub enum Core {
    /// All keys are here, for a fused kernel.
    Local(Local),
    /// All keys are here, and the scores are in memory.
    Unfused(Unfused),
    Ring(Ring),
    GatherKv(GatherKv),
    /// Keys come from the host's memory, chunk by chunk.
    Chunked(Chunked),
    /// Keys are chosen by an indexer.
    Sparse(Sparse),
}

/// Buffers that every layer of a rank reuses.
pub enum Scratch {
    Local(LocalScratch),
    Unfused(unfused::Scratch),
    Ring(ring::Scratch),
    GatherKv(allgather_kv::Scratch),
    Chunked(fpdt::Scratch),
    Sparse(sparse::Scratch),
}

impl Scratch {
    /// Gradients of index queries, keys and weights, behind the backward pass; `None` without an indexer.
    pub fn d_index(&self) -> Option<[Buf; 3]> {
        if let Scratch::Sparse(s) = self { Some(s.d_index) } else { None }
    }
}

impl Core {
    pub fn shape(&self) -> &Shape {
        match self {
            Core::Local(c) => &c.shape,
            Core::Unfused(c) => &c.shape,
            Core::Ring(c) => &c.shape,
            Core::GatherKv(c) => &c.shape,
            Core::Chunked(c) => &c.shape,
            Core::Sparse(c) => &c.shape,
        }
    }

    /// Elements of a token's keys and values.
    pub fn kv_row(&self) -> u64 {
        if let Core::Sparse(c) = self { c.kv_row() } else { self.shape().kv_row() }
    }

    /// Declares buffers for what an indexer is given and makes, where there is one; `declare` is told name, rows,
    /// elements of a row and dtype.
    pub fn index(&self, declare: impl FnMut(&str, u64, u64, Dtype) -> Buf) -> Option<Index> {
        if let Core::Sparse(c) = self { Some(c.index(declare)) } else { None }
    }

    /// Whether the backward pass begins with the KV that the forward pass received last.
    pub fn keeps_last(&self) -> bool {
        matches!(self, Core::Ring(ring) if ring.options.ring_backward == RingBackward::Reverse && ring.steps > 1)
    }

    /// The distance along the ring of the rank whose KV the forward pass received last: 1 where the ring is not cut, 0
    /// without a ring.
    pub fn last_from(&self) -> i32 {
        match self {
            Core::Ring(ring) => (ring.ranks - (ring.steps - 1)) as i32,
            _ => 0,
        }
    }

    /// Declares buffers for what the backward pass finds the probabilities by, log-sum-exps or the probabilities
    /// themselves; `declare` is told name, rows, elements of a row and dtype.
    pub fn keeps(&self, mut declare: impl FnMut(&str, u64, u64, Dtype) -> Buf) -> (Option<Buf>, Option<Probs>) {
        match self {
            Core::Unfused(c) => (None, (!c.again).then(|| c.probs(declare))),
            // The log-sum-exps of all chunks are among the buffers that layers reuse.
            Core::Chunked(_) => (None, None),
            _ => (Some(declare("lse", self.shape().rows(), self.shape().block.heads, self.shape().acc)), None),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        match self {
            Core::Local(c) => Scratch::Local(c.scratch(b)),
            Core::Unfused(c) => Scratch::Unfused(c.scratch(b)),
            Core::Ring(c) => Scratch::Ring(c.scratch(b)),
            Core::GatherKv(c) => Scratch::GatherKv(c.scratch(b)),
            Core::Chunked(c) => Scratch::Chunked(c.scratch(b)),
            Core::Sparse(c) => Scratch::Sparse(c.scratch(b)),
        }
    }

    /// o, lse = attention(q, kv) over every rank's KV; `again`: it is run once more for the backward pass.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved, again: bool) {
        match (self, s) {
            (Core::Chunked(c), Scratch::Chunked(s)) => c.forward(b, s, io, again),
            (Core::Local(c), Scratch::Local(_)) => c.forward(b, io),
            (Core::Unfused(c), Scratch::Unfused(s)) => c.forward(b, s, io),
            (Core::Ring(c), Scratch::Ring(s)) => c.forward(b, s, io),
            (Core::GatherKv(c), Scratch::GatherKv(s)) => c.forward(b, s, io),
            (Core::Sparse(c), Scratch::Sparse(s)) => c.forward(b, s, io, again),
            _ => unreachable!("scratch is made by the same core"),
        }
    }

    /// dq, dkv from the gradient of o.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        match (self, s) {
            (Core::Local(c), Scratch::Local(s)) => c.backward(b, s, io, d_o),
            (Core::Unfused(c), Scratch::Unfused(s)) => c.backward(b, s, io, d_o),
            (Core::Ring(c), Scratch::Ring(s)) => c.backward(b, s, io, d_o),
            (Core::GatherKv(c), Scratch::GatherKv(s)) => c.backward(b, s, io, d_o),
            (Core::Sparse(c), Scratch::Sparse(s)) => c.backward(b, s, io, d_o),
            _ => unreachable!("scratch is made by the same core"),
        }
    }
}

/// Flash attention on one rank (Dao, arXiv:2307.08691).
#[derive(Debug, Clone)]
pub struct Local {
    pub shape: Shape,
}

pub struct LocalScratch {
    delta: Buf,
    dq: Buf,
    dkv: Buf,
}

impl Local {
    fn scratch(&self, b: &mut Builder) -> LocalScratch {
        let s = &self.shape;
        let mut work = |name, row, dtype| b.tensor(name, &[s.rows(), row], dtype, TensorKind::Workspace, 1);
        LocalScratch {
            delta: work("delta", s.block.heads, s.acc),
            dq: work("dq", s.q_row(), s.dtype),
            dkv: work("dkv", s.kv_row(), s.dtype),
        }
    }

    fn forward(&self, b: &mut Builder, io: Saved) {
        b.compute("attention", Kernel::Attention(self.shape.block.clone()), &[io.q, io.kv], &[io.o, io.lse()]);
    }

    fn backward(&self, b: &mut Builder, s: &LocalScratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        delta(b, &self.shape, io.o, d_o, s.delta);
        let reads = [io.q, io.kv, d_o, io.lse(), s.delta];
        b.compute("attention_bwd", Kernel::AttentionBwd(self.shape.block.clone()), &reads, &[s.dq, s.dkv]);
        (s.dq, s.dkv)
    }
}

/// delta = rowsum(dO * O), once for all blocks of the backward pass.
pub fn delta(b: &mut Builder, shape: &Shape, o: Buf, d_o: Buf, to: Buf) {
    let (rows, heads, head_dim) = (shape.rows(), shape.block.heads, shape.block.v_dim());
    b.compute("delta", Kernel::AttentionDelta { rows, heads, head_dim }, &[o, d_o], &[to]);
}
