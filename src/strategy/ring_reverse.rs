//! A ring's backward pass as in TransformerEngine: it begins with the KV that the forward pass received last
//! and walks the ring backwards, so that the last dKV arrives where it belongs just before the diagonal. It does so from
//! wherever the ring is cut.
//!
//! ```text
//! step i:  [KV of step i, dKV of step i-1] to the previous rank  |  gradients of the block with the KV of rank r+1+i
//! ```
//! KV and dKV travel in one message in the model's dtype: P-1 hops of each, half the bytes of fp32, nothing exposed
//! at the end. dQ and dKV are summed in that dtype too.

use super::attention::{Saved, delta};
use super::ring::Ring;
use crate::plan::{Buf, Builder, Kernel, Side, TensorKind};

pub struct Scratch {
    delta: Buf,
    dq_block: Buf,
    dkv_block: Buf,
    dq: Buf,
    /// Buffers of a message: KV, then dKV.
    wire: Buf,
    /// The dKV of the rank's own KV.
    dkv: Buf,
}

impl Scratch {
    pub fn new(ring: &Ring, b: &mut Builder) -> Scratch {
        let (sh, part) = (&ring.shape, ring.block_dtype());
        let (q, kv) = (ring.q_shape(), ring.kv_shape());
        let mut work = |name, shape: &[u64], dtype| b.tensor(name, shape, dtype, TensorKind::Workspace, 1);
        Scratch {
            delta: work("delta", &ring.lse_shape(), sh.acc),
            dq_block: work("dq_block", &q, part),
            dkv_block: work("dkv_block", &kv, part),
            dq: work("dq", &q, sh.dtype),
            wire: b.tensor("kv_dkv", &[2 * kv[0], kv[1]], sh.dtype, TensorKind::CommBuffer, 2),
            dkv: b.tensor("dkv", &kv, sh.dtype, TensorKind::CommBuffer, 1),
        }
    }

    /// The buffer of the KV of step `i`.
    fn kv(&self, ring: &Ring, io: Saved, i: u32) -> Buf {
        match i {
            // That is the rank's own KV where a ring is cut behind the diagonal.
            0 => io.kv_last.unwrap_or(io.kv),
            _ => self.wire.slot(i % 2).rows(0, ring.shape.rows()),
        }
    }

    /// The buffer in which dKV of the KV of step `i` is summed: where it is received, beside the KV of the next step.
    fn dkv(&self, ring: &Ring, i: u32) -> Buf {
        let n = ring.shape.rows();
        if i + 1 == ring.steps { self.dkv } else { self.wire.slot((i + 1) % 2).rows(n, 2 * n) }
    }

    /// Passes on the message of step `i`: KV alone at first, and dKV alone at last.
    fn hop(&self, ring: &Ring, b: &mut Builder, io: Saved, i: u32) {
        let whole = |i: u32| self.wire.slot(i % 2);
        let (what, pair) = match i {
            0 => ("kv_hop", (self.kv(ring, io, 0), self.kv(ring, io, 1))),
            _ if i + 1 == ring.steps => ("dkv_hop", (self.dkv(ring, i - 1), self.dkv(ring, i))),
            _ => ("kv_dkv_hop", (whole(i), whole(i + 1))),
        };
        ring.hop(b, &format!("{what}.{i}"), 0, -1, &[pair], i);
    }

    /// dq, dkv in the model's dtype.
    pub fn backward(&self, ring: &Ring, b: &mut Builder, io: Saved, d_o: Buf) -> (Buf, Buf) {
        delta(b, &ring.shape, io.o, d_o, self.delta);
        let [q, kv] = [ring.q_shape(), ring.kv_shape()].map(|[rows, row]| rows * row);
        // The first block may leave rows out.
        b.compute("dq_zero", Kernel::Fill { elems: q }, &[], &[self.dq]);
        let steps = ring.steps;
        match steps {
            1 => b.compute("dkv_zero", Kernel::Fill { elems: kv }, &[], &[self.dkv]),
            _ => b.compute("dkv_zero", Kernel::Fill { elems: 2 * kv }, &[], &[self.wire.slot(1)]),
        };
        for i in 0..steps {
            if steps > 1 {
                self.hop(ring, b, io, i);
            }
            let block = ring.block(0, (steps - 1 - i) as i32 - ring.ranks as i32);
            let reads = [io.q, self.kv(ring, io, i), d_o, io.lse(), self.delta];
            let in_kernel = ring.in_kernel();
            let part = [if in_kernel { self.dq } else { self.dq_block }, self.dkv_block];
            ring.block_bwd(b, i, block.clone(), &reads, part, in_kernel.then_some(Side::Q));
            if !in_kernel {
                ring.add(b, i, &block, Side::Q, self.dq, self.dq_block);
            }
            ring.add(b, i, &block, Side::Kv, self.dkv(ring, i), self.dkv_block);
        }
        (self.dq, self.dkv)
    }
}
