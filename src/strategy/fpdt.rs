//! FPDT, or Ulysses-Offload (Yao et al., arXiv:2408.16978; DeepSpeed, `deepspeed/sequence/fpdt_layer.py`): a layer works
//! on one of `chunks` parts of the sequence after the other, and what attention needs of the others waits in the host's
//! memory.
//!
//! ```text
//! forward   chunk i   q, k, v | all-to-all | k, v to the host | attention with chunk i, then with chunks 0..i that come
//!                     back one ahead, in two slots | merged by log-sum-exps | all-to-all | projection, network
//! backward  chunk i   the same again, q to the host as well | the network's and the projection's gradients |
//!                     all-to-all of do, to the host
//!           chunk j   k, v from the host; for every chunk i from j on: q, do and the sum of dq come, one ahead;
//!                     dq goes back, dk and dv are summed here | all-to-all of dq, dk, dv of chunk j, which are whole
//! ```
//! A causal chunk needs no later one, so that a whole layer goes chunk by chunk and everything in it is as large as a
//! chunk, but for its input, its output and their gradients. Every rank has an equal part of every chunk. DeepSpeed's
//! layer differs in two ways: outputs of attention and log-sum-exps wait in the host's memory too, where here the
//! former are used up at once (as rowsum(dO * O)) and the latter stay; and its network is computed three times.

use super::attention::{Saved, Shape, delta};
use crate::plan::{AttnBlock, Axis, Buf, Builder, Kernel, Mesh, Side, TensorKind, Toward};

/// Attention of one chunk.
#[derive(Debug, Clone)]
pub struct Chunked {
    /// The sizes of a chunk's attention, whose tokens are all here for this rank's heads.
    pub shape: Shape,
    pub at: u32,
    pub chunks: u32,
}

/// Buffers that every layer and chunk of a rank reuses.
#[derive(Clone, Copy)]
pub struct Scratch {
    /// Queries, keys and values of every chunk, in the host's memory.
    q_host: Buf,
    kv_host: Buf,
    do_host: Buf,
    dq_host: Buf,
    /// Log-sum-exps and deltas of every chunk, on the device.
    lse: Buf,
    delta: Buf,
    /// What comes back from the host: two slots of each, taken in turns.
    q: Buf,
    kv: Buf,
    d_o: Buf,
    /// Sums of dq under way, two slots taken in turns.
    dq_sum: Buf,
    dkv_sum: Buf,
    /// The running output, and the output of a block.
    o_sum: Buf,
    o_block: Buf,
    lse_block: Buf,
    /// The gradients of a block; later those of a chunk.
    dq: Buf,
    dkv: Buf,
    dq_out: Buf,
}

impl Chunked {
    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (s, u) = (&self.shape, self.chunks);
        let (q, kv, o, heads) = (s.q_row(), s.kv_row(), s.o_row(), s.block.heads);
        let mut host = |name, row, dtype| b.host_tensor(name, &[s.rows(), row], dtype, TensorKind::Activation, u);
        let (q_host, kv_host, do_host, dq_host) = (
            host("q_host", q, s.dtype),
            host("kv_host", kv, s.dtype),
            host("do_host", o, s.dtype),
            host("dq_host", q, s.acc),
        );
        let mut work = |name, row, dtype, slots| b.tensor(name, &[s.rows(), row], dtype, TensorKind::Workspace, slots);
        Scratch {
            q_host,
            kv_host,
            do_host,
            dq_host,
            lse: work("lse", heads, s.acc, u),
            delta: work("delta", heads, s.acc, u),
            q: work("q_chunk", q, s.dtype, 2),
            kv: work("kv_chunk", kv, s.dtype, 2),
            d_o: work("do_chunk", o, s.dtype, 2),
            dq_sum: work("dq_sum", q, s.acc, 2),
            dkv_sum: work("dkv_sum", kv, s.acc, 1),
            o_sum: work("o_sum", o, s.acc, 1),
            o_block: work("o_block", o, s.dtype, 1),
            lse_block: work("lse_block", heads, s.acc, 1),
            dq: work("dq", q, s.dtype, 1),
            dkv: work("dkv", kv, s.dtype, 1),
            dq_out: work("dq_out", q, s.dtype, 1),
        }
    }

    /// The block of the queries of chunk `i` against the keys of chunk `j`.
    fn block(&self, i: u32, j: u32) -> AttnBlock {
        let own = &self.shape.block;
        AttnBlock { q: own.q.of_part(i), kv: own.kv.of_part(j), ..own.clone() }
    }

    /// Whether the mask leaves anything of that block: all ranks have all tokens of a chunk.
    fn sees(&self, i: u32, j: u32) -> bool {
        self.block(i, j).shape(&[Mesh::new(&[(Axis::Cp, 1), (Axis::Up, 1)])], 0).area > 0
    }

    /// The chunks before `i` that chunk `i` sees.
    fn before(&self, i: u32) -> Vec<u32> {
        (0..i).filter(|&j| self.sees(i, j)).collect()
    }

    /// The chunks from `j` on that see chunk `j`.
    fn after(&self, j: u32) -> Vec<u32> {
        (j..self.chunks).filter(|&i| self.sees(i, j)).collect()
    }

    /// Copies the KV of a chunk from the host into the slot whose turn it is.
    fn fetch_kv(&self, b: &mut Builder, s: &Scratch, j: u32, turn: usize) {
        b.copy(&format!("kv_fetch.{}.{j}", self.at), Toward::Device, s.kv_host.slot(j), s.kv.slot(turn as u32 % 2));
    }

    /// Makes the output of this chunk. Its keys and values are sent to the host for later chunks; when it is computed
    /// `again`, its queries too, for the backward pass.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved, again: bool) {
        let (i, before) = (self.at, self.before(self.at));
        if let Some(&first) = before.first() {
            self.fetch_kv(b, s, first, 0);
        }
        if again || i + 1 < self.chunks {
            b.copy(&format!("kv_store.{i}"), Toward::Host, io.kv, s.kv_host.slot(i));
        }
        if again {
            b.copy(&format!("q_store.{i}"), Toward::Host, io.q, s.q_host.slot(i));
        }
        let running = [s.o_sum, s.lse.slot(i)];
        b.compute(&format!("attention.{i}.{i}"), Kernel::Attention(self.block(i, i)), &[io.q, io.kv], &running);
        for (turn, &j) in before.iter().enumerate() {
            if let Some(&next) = before.get(turn + 1) {
                self.fetch_kv(b, s, next, turn + 1);
            }
            let (block, part) = (self.block(i, j), [s.o_block, s.lse_block]);
            let kv = s.kv.slot(turn as u32 % 2);
            b.compute(&format!("attention.{i}.{j}"), Kernel::Attention(block.clone()), &[io.q, kv], &part);
            let reads = [running[0], running[1], part[0], part[1]];
            b.compute(&format!("merge.{i}.{j}"), Kernel::MergeLse(block), &reads, &running);
        }
        let elems = self.shape.rows() * self.shape.o_row();
        b.compute(&format!("o_cast.{i}"), Kernel::Cast { elems }, &[s.o_sum], &[io.o]);
    }

    /// Notes what the backward pass needs of the output and its gradient, while the output is still here.
    pub fn keep_gradient(&self, b: &mut Builder, s: &Scratch, o: Buf, d_o: Buf) {
        delta(b, &self.shape, o, d_o, s.delta.slot(self.at));
        b.copy(&format!("do_store.{}", self.at), Toward::Host, d_o, s.do_host.slot(self.at));
    }

    /// Copies what a pair of chunks needs of its queries' side from the host into the slots whose turn it is.
    fn fetch_q(&self, b: &mut Builder, s: &Scratch, i: u32, turn: u32) {
        let (name, slot) = (|what: &str| format!("{what}_fetch.{}.{i}", self.at), turn % 2);
        b.copy(&name("q"), Toward::Device, s.q_host.slot(i), s.q.slot(slot));
        b.copy(&name("do"), Toward::Device, s.do_host.slot(i), s.d_o.slot(slot));
        if self.continues(i) {
            b.copy(&name("dq"), Toward::Device, s.dq_host.slot(i), s.dq_sum.slot(slot));
        }
    }

    /// Whether queries of chunk `i` have met keys of a chunk before this one.
    fn continues(&self, i: u32) -> bool {
        self.before(i).first().is_some_and(|&first| first < self.at)
    }

    /// dq and dkv of this chunk, all chunks before it being done. `turn` counts pairs of chunks of the layer so far.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, turn: &mut u32) -> (Buf, Buf) {
        let (sh, j, after) = (&self.shape, self.at, self.after(self.at));
        let (q, kv) = (sh.rows() * sh.q_row(), sh.rows() * sh.kv_row());
        self.fetch_kv(b, s, j, j as usize);
        b.compute(&format!("dkv_zero.{j}"), Kernel::Fill { elems: kv }, &[], &[s.dkv_sum]);
        for (at, &i) in after.iter().enumerate() {
            if at == 0 {
                self.fetch_q(b, s, i, *turn);
            }
            if let Some(&next) = after.get(at + 1) {
                self.fetch_q(b, s, next, *turn + 1);
            }
            let (block, slot, name) = (self.block(i, j), *turn % 2, |what: &str| format!("{what}.{j}.{i}"));
            let sum = s.dq_sum.slot(slot);
            if !self.continues(i) {
                b.compute(&name("dq_zero"), Kernel::Fill { elems: q }, &[], &[sum]);
            }
            let reads = [s.q.slot(slot), s.kv.slot(j % 2), s.d_o.slot(slot), s.lse.slot(i), s.delta.slot(i)];
            b.compute(&name("attention_bwd"), Kernel::AttentionBwd(block.clone()), &reads, &[s.dq, s.dkv]);
            let add = |elems, side| Kernel::Add { elems, trim: Some((block.clone(), side)) };
            b.compute(&name("dq_add"), add(q, Side::Q), &[sum, s.dq], &[sum]);
            b.compute(&name("dkv_add"), add(kv, Side::Kv), &[s.dkv_sum, s.dkv], &[s.dkv_sum]);
            match i == j {
                true => drop(b.compute(&name("dq_cast"), Kernel::Cast { elems: q }, &[sum], &[s.dq_out])),
                false => drop(b.copy(&name("dq_store"), Toward::Host, sum, s.dq_host.slot(i))),
            }
            *turn += 1;
        }
        b.compute(&format!("dkv_cast.{j}"), Kernel::Cast { elems: kv }, &[s.dkv_sum], &[s.dkv]);
        (s.dq_out, s.dkv)
    }
}
