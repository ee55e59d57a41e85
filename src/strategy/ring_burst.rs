//! A ring's backward pass as in BurstAttention (Sun et al., arXiv:2403.09347): K and V stay, and the queries' side
//! travels: q, the gradient of its output, log-sum-exp and delta. dQ follows one step behind in the model's dtype and
//! comes home after P hops; dK and dV are summed where they are.
//!
//! A ring that is cut turns the other way: queries go to the keys before them, and dQ home in one hop.
//!
//! Fewer bytes than circulating KV with as many KV heads as heads, more with few.

use super::attention::{Saved, delta};
use super::ring::Ring;
use super::ring_follow::{first, onward};
use crate::plan::{Buf, Builder, Side, TensorKind};

pub struct Scratch {
    delta: Buf,
    /// q, do, lse and delta of other ranks.
    bundle: [Buf; 4],
    dq_block: Buf,
    dkv_block: Buf,
    dq: Buf,
    dkv: Buf,
}

impl Scratch {
    pub fn new(ring: &Ring, b: &mut Builder) -> Scratch {
        let (sh, part) = (&ring.shape, ring.block_dtype());
        let (q, kv, lse) = (ring.q_shape(), ring.kv_shape(), ring.lse_shape());
        let mut wire = |name, shape: &[u64], dtype| b.tensor(name, shape, dtype, TensorKind::CommBuffer, 2);
        let bundle = [
            wire("q_ring", &q, sh.dtype),
            wire("do_ring", &ring.o_shape(), sh.dtype),
            wire("lse_ring", &lse, sh.acc),
            wire("delta_ring", &lse, sh.acc),
        ];
        let dq = wire("dq", &q, sh.dtype);
        let mut work = |name, shape: &[u64], dtype| b.tensor(name, shape, dtype, TensorKind::Workspace, 1);
        Scratch {
            bundle,
            dq,
            delta: work("delta", &lse, sh.acc),
            dq_block: work("dq_block", &q, part),
            dkv_block: work("dkv_block", &kv, part),
            dkv: work("dkv", &kv, sh.acc),
        }
    }

    /// dq in the model's dtype, dkv in that of sums.
    pub fn backward(&self, ring: &Ring, b: &mut Builder, io: Saved, d_o: Buf) -> (Buf, Buf) {
        delta(b, &ring.shape, io.o, d_o, self.delta);
        let own = [io.q, d_o, io.lse(), self.delta];
        let held = |i: u32| if i == 0 { own } else { self.bundle.map(|buf| buf.slot(i % 2)) };
        let (steps, way) = (ring.steps, if ring.is_cut() { -1 } else { 1 });
        for i in 0..steps {
            if i + 1 < steps {
                let pairs: Vec<(Buf, Buf)> = held(i).into_iter().zip(held(i + 1)).collect();
                ring.hop(b, &format!("q_hop.{i}"), 0, way, &pairs, i);
            }
            let [q, d_o, lse, delta] = held(i);
            self.step(ring, b, (i, way), &[q, io.kv, d_o, lse, delta]);
            let [here, next] = [i, i + 1].map(|i| self.dq.slot(i % 2));
            if let Some(by) = onward(ring, i) {
                ring.hop(b, &format!("dq_hop.{i}"), 1, way * by, &[(here, next)], i);
            }
        }
        (self.dq.slot(if steps == 1 { 0 } else { steps % 2 }), self.dkv)
    }

    /// Adds the gradients of the block of step `i` to the sums, queries having come that `way`. The first block, whole
    /// because it is the diagonal, starts the sums.
    fn step(&self, ring: &Ring, b: &mut Builder, (i, way): (u32, i32), reads: &[Buf; 5]) {
        let (block, dq) = (ring.block(way * i as i32, 0), self.dq.slot(i % 2));
        let dkv_part = if ring.in_kernel() { self.dkv } else { self.dkv_block };
        let part = [if i == 0 { dq } else { self.dq_block }, dkv_part];
        ring.block_bwd(b, i, block.clone(), reads, part, (ring.in_kernel() && i > 0).then_some(Side::Kv));
        if i > 0 {
            ring.add(b, i, &block, Side::Q, dq, self.dq_block);
        }
        match i {
            _ if ring.in_kernel() => {}
            0 => first(ring, b, Side::Kv, self.dkv_block, self.dkv),
            _ => ring.add(b, i, &block, Side::Kv, self.dkv, self.dkv_block),
        }
    }
}
