//! All-gather of KV (the context parallelism of Llama 3, arXiv:2407.21783; `cp_comm_type: all_gather` of
//! TransformerEngine; `llama3` of zhuzilin/ring-flash-attention): every rank gathers the KV of all, and
//! attends to it with its own queries as if it were alone. Nothing is merged.
//!
//! ```text
//! whole:     gather KV, exposed | attention of all heads
//! by heads:  gather KV heads g+1 | attention of KV heads g and the query heads that read them
//! ```
//! Backward gathers again, and a reduce-scatter in the model's dtype brings dK and dV home. What is
//! gathered comes rank after rank; unless that is the order of the sequence, a copy puts it in order, as
//! TransformerEngine's index_select does. There, two kernels attend, one for each chunk of a zigzag rank;
//! here one does, which skips what is masked.
//!
//! By heads, operands are packed head group after head group first, so that every kernel and collective
//! has a group's rows to itself (ring-flash-attention copies KV and the output, and reads q with a stride).

use super::attention::{Saved, Shape, delta};
use crate::plan::*;

/// Attention over everybody's KV.
#[derive(Debug, Clone)]
pub struct GatherKv {
    pub shape: Shape,
    /// Ranks that gather from each other, at least 2.
    pub ranks: u32,
    /// Whether KV heads are gathered one after the other, the next while one computes; else all at once.
    pub by_head: bool,
    pub engine: Engine,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    /// Gathered KV, rank after rank; two slots in turns where the next is fetched ahead.
    kv_gathered: Buf,
    kv_ordered: Option<Buf>,
    delta: Buf,
    dkv_block: Buf,
    dkv_sum: Buf,
    dkv_gathered: Option<Buf>,
    dq: Buf,
    dkv: Buf,
    groups: Option<Groups>,
}

/// The operands of attention by head group, a slot for each group.
struct Groups {
    q: Buf,
    kv: Buf,
    o: Buf,
    lse: Buf,
    d_o: Buf,
    delta: Buf,
    dq: Buf,
    dkv: Buf,
}

/// The operands that the kernels of one head group work on.
#[derive(Clone, Copy)]
struct Operands {
    q: Buf,
    kv: Buf,
    o: Buf,
    lse: Buf,
}

impl GatherKv {
    /// Number of head groups: KV heads gathered one by one, or all together.
    fn groups(&self) -> u64 {
        if self.by_head { self.shape.block.kv_heads } else { 1 }
    }

    /// One group's queries against the KV of the whole sequence.
    fn block(&self) -> AttnBlock {
        let own = &self.shape.block;
        let kv = Segs { order: vec![], ..own.kv.clone() };
        AttnBlock { kv, heads: own.heads / self.groups(), kv_heads: own.kv_heads / self.groups(), ..own.clone() }
    }

    /// Elements of the KV of one group on one rank.
    fn kv_elems(&self) -> u64 {
        self.shape.rows() * self.kv_cols()
    }

    fn kv_cols(&self) -> u64 {
        self.shape.kv_row() / self.groups()
    }

    /// Whether gathered KV comes in another order than that of the sequence.
    fn out_of_order(&self) -> bool {
        let block = &self.shape.block;
        let split = block.kv.order.iter().any(|(_, split)| *split != Split::Contiguous);
        block.batch > 1 || split || !block.kv.documents.is_empty()
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (sh, block, ranks) = (&self.shape, self.block(), u64::from(self.ranks));
        let (q, kv, a) = ([sh.rows(), sh.q_row()], [sh.rows(), sh.kv_row()], [sh.rows(), sh.block.heads]);
        let rank_by_rank = [ranks, self.kv_elems()];
        let ordered = [ranks * sh.rows(), self.kv_cols()];
        let mut new = |name, shape: &[u64], dtype, kind, slots| b.tensor(name, shape, dtype, kind, slots);
        let ahead = if self.groups() > 1 { 2 } else { 1 };
        let kv_gathered = new("kv_gathered", &rank_by_rank, sh.dtype, TensorKind::CommBuffer, ahead);
        let mut work = |name, shape: &[u64], dtype| new(name, shape, dtype, TensorKind::Workspace, 1);
        let scratch = Scratch {
            kv_gathered,
            kv_ordered: self.out_of_order().then(|| work("kv_ordered", &ordered, sh.dtype)),
            delta: work("delta", &a, sh.acc),
            dkv_block: work("dkv_block", &ordered, sh.dtype),
            dkv_sum: work("dkv_sum", &ordered, sh.dtype),
            dkv_gathered: None,
            dq: work("dq", &q, sh.dtype),
            dkv: work("dkv", &kv, sh.dtype),
            groups: None,
        };
        let wire = |b: &mut Builder| b.tensor("dkv_gathered", &rank_by_rank, sh.dtype, TensorKind::CommBuffer, 1);
        let dkv_gathered = self.out_of_order().then(|| wire(b));
        let groups = (self.groups() > 1).then(|| self.group_buffers(b, &block));
        Scratch { dkv_gathered, groups, ..scratch }
    }

    fn group_buffers(&self, b: &mut Builder, block: &AttnBlock) -> Groups {
        let (sh, slots) = (&self.shape, self.groups() as u32);
        let (q_cols, o_cols) = (block.q_row(), block.o_row());
        let mut of = |name: &str, cols, dtype| {
            b.tensor(&format!("{name}_by_head"), &[sh.rows(), cols], dtype, TensorKind::Workspace, slots)
        };
        Groups {
            q: of("q", q_cols, sh.dtype),
            kv: of("kv", self.kv_cols(), sh.dtype),
            o: of("o", o_cols, sh.dtype),
            lse: of("lse", block.heads, sh.acc),
            d_o: of("do", o_cols, sh.dtype),
            delta: of("delta", block.heads, sh.acc),
            dq: of("dq", q_cols, sh.dtype),
            dkv: of("dkv", self.kv_cols(), sh.dtype),
        }
    }

    /// Copies between rows of all heads and a slot for each group, forward or backward.
    fn regroup(
        &self,
        b: &mut Builder,
        what: &str,
        part: HeadPart,
        (exchange, backward): (Exchange, bool),
        [whole, slots]: [Buf; 2],
    ) {
        let (batch, seq, ranks) = (self.shape.block.batch, self.shape.seq, self.groups());
        let permute = HeadPermute::new(exchange, Packing::ByRank, [ranks, batch, seq], vec![part]);
        let kernel = Kernel::Permute(HeadPermute { backward, ..permute });
        let apart: Vec<Buf> = (0..ranks as u32).map(|g| slots.slot(g)).collect();
        match exchange {
            Exchange::PackHeads => b.compute(&format!("{what}_by_head"), kernel, &[whole], &apart),
            _ => b.compute(&format!("{what}_together"), kernel, &apart, &[whole]),
        };
    }

    fn q_part(&self) -> HeadPart {
        HeadPart::new(1, self.shape.block.heads, self.shape.block.head_dim)
    }

    fn o_part(&self) -> HeadPart {
        HeadPart { head_dim: self.shape.block.v_dim(), ..self.q_part() }
    }

    fn kv_part(&self) -> HeadPart {
        HeadPart::kv(self.shape.block.kv_heads, self.shape.block.head_dim, self.shape.block.v_dim())
    }

    /// The part that lse and delta are: a number for each head.
    fn scalar_part(&self) -> HeadPart {
        HeadPart { head_dim: 1, ..self.q_part() }
    }

    fn collective(&self, b: &mut Builder, label: &str, kind: CollectiveKind, src: Buf, dst: Buf) {
        let group = Group::axes(&[Axis::Cp]);
        b.collective(label, Via { group: &group, index: 0, engine: self.engine }, kind, src, dst, self.shape.dtype);
    }

    fn gather(&self, b: &mut Builder, s: &Scratch, g: u32, kv: Buf) {
        self.collective(b, &format!("kv_gather.{g}"), CollectiveKind::AllGather, kv, s.kv_gathered.slot(g % 2));
    }

    fn reorder(&self, b: &mut Builder, label: &str, inverse: bool, from: Buf, to: Buf) {
        let (segs, batch, cols) = (self.shape.block.kv.clone(), self.shape.block.batch, self.kv_cols());
        b.compute(label, Kernel::Reorder { segs, batch, cols, inverse }, &[from], &[to]);
    }

    /// The KV of group `g` that was gathered, in the order of the sequence.
    fn ordered(&self, b: &mut Builder, s: &Scratch, g: u32) -> Buf {
        let gathered = s.kv_gathered.slot(g % 2);
        let Some(ordered) = s.kv_ordered else { return gathered };
        self.reorder(b, &format!("kv_reorder.{g}"), false, gathered, ordered);
        ordered
    }

    /// Runs `group` for every head group on its KV of the whole sequence, the next gather being under way.
    fn each_group(&self, b: &mut Builder, s: &Scratch, kv: Buf, mut group: impl FnMut(&mut Builder, u32, Buf)) {
        let all = self.groups() as u32;
        self.gather(b, s, 0, kv);
        for g in 0..all {
            if g + 1 < all {
                self.gather(b, s, g + 1, kv.slot(g + 1));
            }
            let ordered = self.ordered(b, s, g);
            group(b, g, ordered);
        }
    }

    /// q and kv by head group, and where their results go: the operands themselves if there is one group.
    fn operands(&self, b: &mut Builder, s: &Scratch, io: Saved, backward: bool) -> Operands {
        let Some(by) = &s.groups else { return Operands { q: io.q, kv: io.kv, o: io.o, lse: io.lse() } };
        self.regroup(b, "kv", self.kv_part(), (Exchange::PackHeads, backward), [io.kv, by.kv]);
        self.regroup(b, "q", self.q_part(), (Exchange::PackHeads, backward), [io.q, by.q]);
        Operands { q: by.q, kv: by.kv, o: by.o, lse: by.lse }
    }

    /// o, lse = attention(q, kv) over the KV of all ranks.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved) {
        let by = self.operands(b, s, io, false);
        let kernel = Kernel::Attention(self.block());
        self.each_group(b, s, by.kv, |b, g, kv| {
            let results = [by.o.slot(g), by.lse.slot(g)];
            b.compute(&format!("attention.{g}"), kernel.clone(), &[by.q.slot(g), kv], &results);
        });
        if s.groups.is_some() {
            self.regroup(b, "o", self.o_part(), (Exchange::UnpackHeads, false), [io.o, by.o]);
            self.regroup(b, "lse", self.scalar_part(), (Exchange::UnpackHeads, false), [io.lse(), by.lse]);
        }
    }

    /// dq, dkv from the gradient of o.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        let by = self.operands(b, s, io, true);
        delta(b, &self.shape, io.o, d_o, s.delta);
        let (d_o, delta, dq, dkv) = self.gradients(b, s, io, d_o);
        let kernel = Kernel::AttentionBwd(self.block());
        self.each_group(b, s, by.kv, |b, g, kv| {
            let reads = [by.q.slot(g), kv, d_o.slot(g), by.lse.slot(g), delta.slot(g)];
            b.compute(&format!("attention_bwd.{g}"), kernel.clone(), &reads, &[dq.slot(g), s.dkv_block]);
            self.send_home(b, s, g, dkv.slot(g));
        });
        if s.groups.is_some() {
            self.regroup(b, "dq", self.q_part(), (Exchange::UnpackHeads, true), [s.dq, dq]);
            self.regroup(b, "dkv", self.kv_part(), (Exchange::UnpackHeads, true), [s.dkv, dkv]);
        }
        (s.dq, s.dkv)
    }

    /// d_o and delta by head group, and where dq and dkv of each go.
    fn gradients(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf, Buf, Buf) {
        let Some(by) = &s.groups else { return (d_o, s.delta, s.dq, s.dkv) };
        self.regroup(b, "do", self.o_part(), (Exchange::PackHeads, true), [d_o, by.d_o]);
        self.regroup(b, "lse", self.scalar_part(), (Exchange::PackHeads, true), [io.lse(), by.lse]);
        self.regroup(b, "delta", self.scalar_part(), (Exchange::PackHeads, true), [s.delta, by.delta]);
        (by.d_o, by.delta, by.dq, by.dkv)
    }

    /// Sums a group's dkv over the ranks. Rows that no query of this rank sees count as zeros.
    fn send_home(&self, b: &mut Builder, s: &Scratch, g: u32, dkv: Buf) {
        let elems = u64::from(self.ranks) * self.kv_elems();
        b.compute(&format!("dkv_zero.{g}"), Kernel::Fill { elems }, &[], &[s.dkv_sum]);
        let add = Kernel::Add { elems, trim: Some((self.block(), Side::Kv)) };
        b.compute(&format!("dkv_add.{g}"), add, &[s.dkv_sum, s.dkv_block], &[s.dkv_sum]);
        if let Some(gathered) = s.dkv_gathered {
            self.reorder(b, &format!("dkv_reorder.{g}"), true, s.dkv_sum, gathered);
        }
        let src = s.dkv_gathered.unwrap_or(s.dkv_sum);
        self.collective(b, &format!("dkv_scatter.{g}"), CollectiveKind::ReduceScatter, src, dkv);
    }
}
