//! The ways in which the outputs of a ring's blocks become one, by their log-sum-exps.
//!
//! * each step: a block's output in the model's dtype is merged into a running one (zhuzilin/ring-flash-attention)
//! * at the end: every block's output is kept; log-sum-exps are summed on the way (TransformerEngine)
//! * in the kernel: attention goes on from the running output (MagiAttention's FFA)

use super::attention::Saved;
use super::ring::Ring;
use crate::plan::{AttnBlock, Buf, Builder, Kernel, TensorKind};
use crate::spec::RingMerge;

pub struct Scratch {
    /// The running output.
    o_acc: Buf,
    o_block: Buf,
    lse_block: Buf,
}

impl Scratch {
    pub fn new(ring: &Ring, b: &mut Builder) -> Scratch {
        let (sh, at_end) = (&ring.shape, ring.options.merge == RingMerge::AtEnd);
        let slots = if at_end { ring.steps } else { 1 };
        Scratch {
            o_acc: b.tensor("o_acc", &ring.o_shape(), sh.acc, TensorKind::Workspace, 1),
            o_block: b.tensor("o_block", &ring.o_shape(), sh.dtype, TensorKind::Workspace, slots),
            lse_block: b.tensor("lse_block", &ring.lse_shape(), sh.acc, TensorKind::Workspace, slots),
        }
    }

    /// Runs the attention of step `i`, with the merging that comes at once.
    pub fn step(&self, ring: &Ring, b: &mut Builder, io: Saved, kv: Buf, i: u32) {
        let block = ring.block_of_step(i);
        let running = [self.o_acc, io.lse()];
        let label = format!("attention.{i}");
        match ring.options.merge {
            RingMerge::AtEnd => self.keep(ring, b, io, kv, i),
            _ if i == 0 => drop(b.compute(&label, Kernel::Attention(block), &[io.q, kv], &running)),
            RingMerge::InKernel => {
                b.compute(&label, Kernel::AttentionOnto(block), &[io.q, kv, self.o_acc, io.lse()], &running);
            }
            RingMerge::EachStep => {
                let part = [self.o_block, self.lse_block];
                b.compute(&label, Kernel::Attention(block.clone()), &[io.q, kv], &part);
                let reads = [running[0], running[1], part[0], part[1]];
                b.compute(&format!("merge.{i}"), Kernel::MergeLse(block), &reads, &running);
            }
        }
    }

    /// Keeps the output of step `i`, and sums its log-sum-exp.
    fn keep(&self, ring: &Ring, b: &mut Builder, io: Saved, kv: Buf, i: u32) {
        let (block, [rows, heads]) = (ring.block_of_step(i), ring.lse_shape());
        let part = [self.o_block.slot(i), self.lse_block.slot(i)];
        b.compute(&format!("attention.{i}"), Kernel::Attention(block.clone()), &[io.q, kv], &part);
        if i == 0 {
            b.compute("lse_copy", Kernel::Cast { elems: rows * heads }, &[part[1]], &[io.lse()]);
        } else {
            b.compute(&format!("lse_add.{i}"), Kernel::AddLse(block), &[io.lse(), part[1]], &[io.lse()]);
        }
    }

    /// Makes the output of the running one, or of all block outputs that were kept.
    pub fn finish(&self, ring: &Ring, b: &mut Builder, io: Saved) {
        let [rows, row] = ring.o_shape();
        if ring.options.merge != RingMerge::AtEnd {
            b.compute("o_cast", Kernel::Cast { elems: rows * row }, &[self.o_acc], &[io.o]);
            return;
        }
        // In the model's dtype throughout, as TransformerEngine sums unless it computes in fp8.
        b.compute("o_zero", Kernel::Fill { elems: rows * row }, &[], &[io.o]);
        for i in 0..ring.steps {
            let block: AttnBlock = ring.block_of_step(i);
            let reads = [io.o, self.o_block.slot(i), self.lse_block.slot(i), io.lse()];
            b.compute(&format!("merge.{i}"), Kernel::AddWeighted(block), &reads, &[io.o]);
        }
    }
}
