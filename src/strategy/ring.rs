//! Zigzag ring attention (Liu et al., arXiv:2310.01889; the causal balance of zigzag as in
//! zhuzilin/ring-flash-attention): queries stay, KV blocks circulate, partial outputs are merged by
//! their log-sum-exps.
//!
//! ```text
//! step i:  KV hop to the next rank  |  attention of my queries with the KV of rank r-i, merge
//! ```
//! Backward: the same KV hops, while dK and dV travel one step behind them in fp32 on a second
//! communicator and come home after P hops.

use super::attention::{Saved, Shape, delta};
use crate::plan::{AttnBlock, Axis, Buf, Builder, Engine, Group, Kernel, Side, TensorKind, Via};

/// Attention over everybody's KV.
#[derive(Debug, Clone)]
pub struct Ring {
    pub shape: Shape,
    /// At least 2.
    pub ranks: u32,
    pub engine: Engine,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    kv: Buf,
    o_acc: Buf,
    o_block: Buf,
    lse_block: Buf,
    dq_block: Buf,
    dkv_block: Buf,
    delta: Buf,
    dq: Buf,
    dkv: Buf,
}

impl Ring {
    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let sh = &self.shape;
        let (q, kv, a) = ([sh.rows(), sh.q_row()], [sh.rows(), sh.kv_row()], [sh.rows(), sh.block.heads]);
        let mut work = |name, shape: &[u64], dtype| b.tensor(name, shape, dtype, TensorKind::Workspace, 1);
        Scratch {
            o_acc: work("o_acc", &q, sh.acc),
            o_block: work("o_block", &q, sh.dtype),
            lse_block: work("lse_block", &a, sh.acc),
            dq_block: work("dq_block", &q, sh.dtype),
            dkv_block: work("dkv_block", &kv, sh.dtype),
            delta: work("delta", &a, sh.acc),
            dq: work("dq", &q, sh.acc),
            dkv: b.tensor("dkv", &kv, sh.acc, TensorKind::CommBuffer, 2),
            kv: b.tensor("kv_ring", &kv, sh.dtype, TensorKind::CommBuffer, 2),
        }
    }

    /// KV and dKV travel on communicators of their own, since they are under way at the same time.
    fn hop(&self, b: &mut Builder, label: &str, index: u8, from: Buf, to: Buf, step: u32) {
        let group = Group::axes(&[Axis::Cp]);
        b.hop(label, Via { group: &group, index, engine: self.engine }, 1, from, to, step);
    }

    /// The block of step `i`: the same queries, the KV that started `i` ranks back.
    fn step(&self, i: u32) -> AttnBlock {
        AttnBlock { kv: self.shape.block.kv.shifted(Axis::Cp, -(i as i32)), ..self.shape.block.clone() }
    }

    /// The KV that is here in step `i`: hop 0 sends the rank's own, so that no copy of it is made.
    fn kv_of_step(s: &Scratch, own: Buf, i: u32) -> Buf {
        if i == 0 { own } else { s.kv.slot(i % 2) }
    }

    /// Passes the KV of step `i` on, unless it was the last.
    fn pass_kv(&self, b: &mut Builder, s: &Scratch, own: Buf, i: u32) {
        if i + 1 < self.ranks {
            let (here, next) = (Self::kv_of_step(s, own, i), s.kv.slot((i + 1) % 2));
            self.hop(b, &format!("kv_hop.{i}"), 0, here, next, i);
        }
    }

    /// o, lse = attention(q, kv) over the whole ring.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved) {
        for i in 0..self.ranks {
            self.pass_kv(b, s, io.kv, i);
            let (block, kv) = (self.step(i), Self::kv_of_step(s, io.kv, i));
            if i == 0 {
                b.compute("attention.0", Kernel::Attention(block), &[io.q, kv], &[s.o_acc, io.lse]);
                continue;
            }
            let (running, part) = ([s.o_acc, io.lse], [s.o_block, s.lse_block]);
            b.compute(&format!("attention.{i}"), Kernel::Attention(block.clone()), &[io.q, kv], &part);
            let reads = [running[0], running[1], part[0], part[1]];
            b.compute(&format!("merge.{i}"), Kernel::MergeLse(block), &reads, &running);
        }
        b.compute("o_cast", Kernel::Cast { elems: self.shape.rows() * self.shape.q_row() }, &[s.o_acc], &[io.o]);
    }

    /// dq, dkv from the gradient of o, in `acc` dtype.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        delta(b, &self.shape, io.o, d_o, s.delta);
        let operands = |kv| [io.q, kv, d_o, io.lse, s.delta];
        for i in 0..self.ranks {
            self.pass_kv(b, s, io.kv, i);
            let block = self.step(i);
            let part = [s.dq_block, s.dkv_block];
            let reads = operands(Self::kv_of_step(s, io.kv, i));
            b.compute(&format!("attention_bwd.{i}"), Kernel::AttentionBwd(block.clone()), &reads, &part);
            let dkv = s.dkv.slot(i % 2);
            self.accumulate(b, i, "dq", &block, Side::Q, s.dq, s.dq_block);
            self.accumulate(b, i, "dkv", &block, Side::Kv, dkv, s.dkv_block);
            // One step behind the KV it belongs to, and one hop more: dKV has to come home.
            let next = s.dkv.slot((i + 1) % 2);
            self.hop(b, &format!("dkv_hop.{i}"), 1, dkv, next, i);
        }
        (s.dq, s.dkv.slot(self.ranks % 2))
    }

    /// sum += part. The first part, whole because it is the diagonal, starts the sum.
    #[allow(clippy::too_many_arguments)]
    fn accumulate(&self, b: &mut Builder, i: u32, what: &str, block: &AttnBlock, side: Side, sum: Buf, part: Buf) {
        let row = if side == Side::Q { self.shape.q_row() } else { self.shape.kv_row() };
        let elems = self.shape.rows() * row;
        if i == 0 {
            b.compute(&format!("{what}_cast"), Kernel::Cast { elems }, &[part], &[sum]);
        } else {
            let kernel = Kernel::Add { elems, trim: Some((block.clone(), side)) };
            b.compute(&format!("{what}_add.{i}"), kernel, &[sum, part], &[sum]);
        }
    }
}
