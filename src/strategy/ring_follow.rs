//! A ring's backward pass as in zhuzilin/ring-flash-attention: KV circulates as in the forward pass, while dK
//! and dV travel one step behind it in fp32 on a second communicator and come home after P hops. From where a ring is
//! cut they go home in one.

use super::attention::{Saved, delta};
use super::ring::Ring;
use crate::plan::{Buf, Builder, Kernel, Side, TensorKind};

pub struct Scratch {
    pub delta: Buf,
    dq_block: Buf,
    dkv_block: Buf,
    pub dq: Buf,
    /// dKV under way, two slots in turns; in a double ring windows take turns, too.
    pub dkv: Buf,
}

impl Scratch {
    pub fn new(ring: &Ring, b: &mut Builder) -> Scratch {
        let (sh, part) = (&ring.shape, ring.block_dtype());
        let (q, kv) = (ring.q_shape(), ring.kv_shape());
        let mut work = |name, shape: &[u64], dtype| b.tensor(name, shape, dtype, TensorKind::Workspace, 1);
        Scratch {
            dq_block: work("dq_block", &q, part),
            dkv_block: work("dkv_block", &kv, part),
            delta: work("delta", &ring.lse_shape(), sh.acc),
            dq: work("dq", &q, sh.acc),
            dkv: b.tensor(
                "dkv",
                &kv,
                sh.acc,
                TensorKind::CommBuffer,
                if ring.options.window().is_some() { 4 } else { 2 },
            ),
        }
    }

    /// dq, dkv in the dtype of sums.
    pub fn backward(&self, ring: &Ring, b: &mut Builder, kv: Buf, io: Saved, d_o: Buf) -> (Buf, Buf) {
        delta(b, &ring.shape, io.o, d_o, self.delta);
        let held = |i: u32| if i == 0 { io.kv } else { kv.slot(i % 2) };
        let steps = ring.steps;
        for i in 0..steps {
            ring.pass_kv(b, i, held);
            self.step(ring, b, i, self.dkv.slot(i % 2), &[io.q, held(i), d_o, io.lse(), self.delta]);
            // dKV goes one step behind the KV it belongs to, and one hop more: it has to come home.
            let [here, next] = [i, i + 1].map(|i| self.dkv.slot(i % 2));
            if let Some(by) = onward(ring, i) {
                ring.hop(b, &format!("dkv_hop.{i}"), 1, by, &ring.messages(here, next), i);
            }
        }
        (self.dq, self.dkv.slot(if steps == 1 { 0 } else { steps % 2 }))
    }

    /// Adds the gradients of the block of step `i` to the sums, `dkv` being that of its KV. The first block, whole
    /// because it is the diagonal, starts the sums.
    pub fn step(&self, ring: &Ring, b: &mut Builder, i: u32, dkv: Buf, reads: &[Buf; 5]) {
        let block = ring.block_of_step(i);
        let part = match (ring.in_kernel(), i) {
            (true, 0) => [self.dq, dkv],
            // dKV is still on its way, so that only dQ can be added to within the kernel.
            (true, _) => [self.dq, self.dkv_block],
            (false, _) => [self.dq_block, self.dkv_block],
        };
        let onto = (ring.in_kernel() && i > 0).then_some(Side::Q);
        ring.block_bwd(b, i, block.clone(), reads, part, onto);
        for (side, sum, part) in [(Side::Q, self.dq, part[0]), (Side::Kv, dkv, part[1])] {
            match i {
                _ if part == sum => {}
                0 => first(ring, b, side, part, sum),
                _ => ring.add(b, i, &block, side, sum, part),
            }
        }
    }
}

/// The distance that a sum goes on behind step `i`: to the next rank, and from the last step home; `None` where it
/// never left.
pub fn onward(ring: &Ring, i: u32) -> Option<i32> {
    let last = ring.steps - 1;
    match i == last {
        true if last == 0 => None,
        true if ring.is_cut() => Some(-(last as i32)),
        _ => Some(1),
    }
}

/// A sum begins as its first term.
pub fn first(ring: &Ring, b: &mut Builder, side: Side, part: Buf, sum: Buf) {
    let (what, shape) = if side == Side::Q { ("dq", ring.q_shape()) } else { ("dkv", ring.kv_shape()) };
    b.compute(&format!("{what}_cast"), Kernel::Cast { elems: shape[0] * shape[1] }, &[part], &[sum]);
}
