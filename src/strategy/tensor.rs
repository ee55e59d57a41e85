//! Tensor parallelism (Megatron-LM, arXiv:1909.08053): the matrices of a layer are cut over ranks, first by
//! their rows and then by their columns, so that a token's partial sums meet once an attention and once a
//! feed-forward network. With sequence parallelism (Korthikanti et al., arXiv:2205.05198) the residual stream
//! between them is cut over tokens: an all-gather before the one product and a reduce-scatter after the other
//! take the place of an all-reduce, and norms and residuals are no longer done by every rank.
//!
//! Where there are fewer KV heads than ranks, neighbours have the same one, and their gradients of it are summed.
//!
//! A rank's share of a microbatch's rows (b*s of them) are those of its coordinate, in rank order. With overlap the
//! rows are cut into chunks, and each chunk into shares: while one chunk is gathered, or its partial sums are
//! scattered, the product of another runs (userbuffers of NVIDIA's Transformer Engine).

use crate::plan::{Axis, Buf, Builder, CollectiveKind, Dtype, Engine, Group, Kernel, Share, TensorKind, Via};
use crate::spec::Parallelism;

/// Chunks in which products are scattered: `num_splits` of NeMo's configurations; gathering goes in as many chunks as
/// there are ranks there.
pub const CHUNKS: u64 = 4;

/// The engine of a gather beside a product: userbuffers gather with 1 or 2 SMs, and scatter with as many as NCCL
/// (`num_sm` of NeMo's configurations, say for H100 and a 405B model at tp 8).
const GATHER_BESIDE: Engine = Engine::Sm { ctas: 2 };

#[derive(Debug, Clone, Copy)]
pub struct TensorParallel {
    pub ranks: u64,
    /// Whether every rank has all tokens everywhere, which is so without sequence parallelism.
    pub whole: bool,
    /// All rows of a microbatch, and the chunks that they are gathered and summed in.
    tokens: u64,
    chunks: u64,
    pub dtype: Dtype,
    pub engine: Engine,
}

/// Rows of a microbatch that a product is made for at a time.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    rows: [u64; 2],
    /// Number of the chunk; `None`: it has all rows.
    index: Option<u64>,
}

impl Chunk {
    /// The chunk of all rows, of buffers that have `rows` of them.
    pub fn whole(rows: u64) -> Chunk {
        Chunk { rows: [0, rows], index: None }
    }

    /// Number of rows in the chunk.
    pub fn count(&self) -> u64 {
        self.rows[1] - self.rows[0]
    }

    pub fn label(&self, what: &str) -> String {
        self.index.map_or(what.into(), |j| format!("{what}.{j}"))
    }

    /// The rows of the chunk in a buffer with all rows.
    pub fn of(&self, all: Buf) -> Buf {
        if self.index.is_none() { all } else { all.at(self.rows) }
    }

    /// The part of the chunk that is in a rank's share of all rows.
    fn part(&self, share: Buf, ranks: u64) -> Buf {
        if self.index.is_none() { share } else { share.rows(self.rows[0] / ranks, self.rows[1] / ranks) }
    }
}

impl TensorParallel {
    /// Tensor parallelism for microbatches of `tokens` tokens.
    pub fn new(par: &Parallelism, tokens: u64, dtype: Dtype, engine: Engine) -> TensorParallel {
        let (ranks, whole) = (u64::from(par.tp), par.options.whole_activations);
        let chunks = if par.options.tp_overlap { CHUNKS } else { 1 };
        TensorParallel { ranks, whole, tokens, chunks, dtype, engine }
    }

    /// The rows of the residual stream that a rank has; `None` where it has all of them.
    pub fn rows(&self) -> Option<Share> {
        self.cuts_rows().then_some(Share { axis: Axis::Tp, parts: self.chunks })
    }

    /// The chunk of all rows.
    pub fn all(&self) -> Chunk {
        Chunk::whole(self.tokens)
    }

    fn chunks(&self) -> Vec<Chunk> {
        let each = self.tokens / self.chunks;
        let chunk = |j| Chunk { rows: [j * each, (j + 1) * each], index: Some(j) };
        if self.chunks == 1 { vec![self.all()] } else { (0..self.chunks).map(chunk).collect() }
    }

    /// Whether the residual stream is cut over the ranks.
    fn cuts_rows(&self) -> bool {
        self.ranks > 1 && !self.whole
    }

    /// Tokens that a rank has between the products, of `tokens`.
    pub fn share(&self, tokens: u64) -> u64 {
        if self.cuts_rows() { tokens / self.ranks } else { tokens }
    }

    /// Declares room for `tokens` whole rows; `None` where a rank has all rows anyway.
    pub fn room(&self, b: &mut Builder, name: &str, tokens: u64, row: u64) -> Option<Buf> {
        self.cuts_rows().then(|| b.tensor(name, &[tokens, row], self.dtype, TensorKind::CommBuffer, 1))
    }

    /// Gathers all rows that the ranks have shares of, in `room`; without a room they are there already.
    pub fn gather(&self, b: &mut Builder, label: &str, share: Buf, room: Option<Buf>) -> Buf {
        self.gathered(b, label, share, room, |_, _, _| ())
    }

    /// [`gather`](TensorParallel::gather) with a product on each chunk that is there while the next is gathered.
    pub fn gathered(
        &self,
        b: &mut Builder,
        label: &str,
        share: Buf,
        room: Option<Buf>,
        mut product: impl FnMut(&mut Builder, Buf, Chunk),
    ) -> Buf {
        let all = room.unwrap_or(share);
        for chunk in self.chunks() {
            if room.is_some() {
                self.gather_chunk(b, label, share, all, chunk);
            }
            product(b, all, chunk);
        }
        all
    }

    fn gather_chunk(&self, b: &mut Builder, label: &str, share: Buf, all: Buf, chunk: Chunk) -> u32 {
        let part = chunk.part(share, self.ranks);
        let engine = if chunk.index.is_some() { GATHER_BESIDE } else { self.engine };
        let tp = TensorParallel { engine, ..*self };
        tp.collective(b, &chunk.label(label), CollectiveKind::AllGather, part, chunk.of(all))
    }

    /// As [`gather`](TensorParallel::gather), no earlier than the kernel issued last has ended: a framework
    /// starts it beside the product that comes next.
    pub fn gather_beside(&self, b: &mut Builder, label: &str, share: Buf, room: Option<Buf>, last: u32) -> Buf {
        let Some(all) = room else { return share };
        for chunk in self.chunks() {
            let op = self.gather_chunk(b, label, share, all, chunk);
            b.after(op, last);
        }
        all
    }

    /// Takes the rank's own part out of rows that all have, into `part`: it is passed on where each rank passes on its
    /// own.
    pub fn own(&self, b: &mut Builder, label: &str, all: Buf, part: Buf, cols: u64) {
        let rows = self.tokens / self.ranks;
        b.compute(
            label,
            Kernel::OwnRows { rows, cols, ranks: self.ranks, group: Group::axes(&[Axis::Tp]) },
            &[all],
            &[part],
        );
    }

    /// Gathers all rows, of the parts that the ranks were given.
    pub fn join(&self, b: &mut Builder, label: &str, part: Buf, all: Buf) {
        self.collective(b, label, CollectiveKind::AllGather, part, all);
    }

    /// Sums the ranks' partial sums: into `share`, where they are in a room of their own, or in place.
    pub fn reduce(&self, b: &mut Builder, label: &str, partial: Buf, share: Buf) {
        self.scattered(b, label, partial, share, |_, _| ());
    }

    /// [`reduce`](TensorParallel::reduce) for sums that a product leaves chunk by chunk, the next being computed while
    /// one is summed.
    pub fn scattered(
        &self,
        b: &mut Builder,
        label: &str,
        partial: Buf,
        share: Buf,
        mut product: impl FnMut(&mut Builder, Chunk),
    ) {
        for chunk in self.chunks() {
            product(b, chunk);
            let (label, sums) = (chunk.label(label), chunk.of(partial));
            match (self.ranks, self.cuts_rows()) {
                (1, _) => {}
                (_, true) => {
                    let to = chunk.part(share, self.ranks);
                    self.collective(b, &label, CollectiveKind::ReduceScatter, sums, to);
                }
                (_, false) => drop(self.collective(b, &label, CollectiveKind::AllReduce, sums, sums)),
            }
        }
    }

    /// Sums the gradient of weights that every rank has, but has used on its own tokens alone.
    pub fn sum_shared(&self, b: &mut Builder, label: &str, grad: Buf, acc: Dtype) {
        if self.cuts_rows() {
            TensorParallel { dtype: acc, ..*self }.collective(b, label, CollectiveKind::AllReduce, grad, grad);
        }
    }

    /// Sums the gradient of weights that every rank has, but has used on its own heads alone.
    pub fn sum_by_heads(&self, b: &mut Builder, label: &str, grad: Buf, acc: Dtype) {
        if self.ranks > 1 && !self.cuts_rows() {
            TensorParallel { dtype: acc, ..*self }.collective(b, label, CollectiveKind::AllReduce, grad, grad);
        }
    }

    /// KV heads on a rank, and the neighbouring ranks that have the same ones: with fewer KV heads than ranks each is
    /// on several, which project it and attend to it with query heads of their own, as vLLM has it. (Megatron-LM cuts
    /// its projection evenly all the same and gathers the result: activations travel, and no gradient has copies.)
    pub fn kv_heads(&self, all: u64) -> (u64, u64) {
        if all < self.ranks { (1, self.ranks / all) } else { (all / self.ranks, 1) }
    }

    /// Sums the gradient of weights that `copies` neighbouring ranks have, each from its own query heads.
    pub fn sum_copies(&self, b: &mut Builder, label: &str, grad: Buf, acc: Dtype, copies: u64) {
        if copies > 1 {
            let (ranks, copies) = (self.ranks as u32, copies as u32);
            let sets = (0..ranks / copies).map(|set| (set * copies..(set + 1) * copies).collect()).collect();
            let via = Via { group: &Group::subset(Axis::Tp, sets), index: 0, engine: self.engine };
            b.collective(label, via, CollectiveKind::AllReduce, grad, grad, acc);
        }
    }

    fn collective(&self, b: &mut Builder, label: &str, kind: CollectiveKind, src: Buf, dst: Buf) -> u32 {
        let group = Group::axes(&[Axis::Tp]);
        b.collective(label, Via { group: &group, index: 0, engine: self.engine }, kind, src, dst, self.dtype)
    }
}
