//! Ring attention (Liu et al., arXiv:2310.01889): queries stay, KV blocks circulate, partial outputs are
//! merged by their log-sum-exps.
//!
//! ```text
//! step i:  KV hop to the next rank  |  attention of my queries with the KV of rank r-i, merge
//! ```
//! How the outputs of the blocks become one is [`ring_merge`], and each way for the gradients to travel has a file:
//! [`ring_follow`], [`ring_reverse`], [`ring_burst`]; [`double_ring`] is a ring of rings. All of them work for any
//! layout of the sequence: blocks that the mask empties are skipped, and KV that only passes through a rank is still
//! passed on. Where a window leaves nobody anything to see so far back, the ring stops ([`Ring::is_cut`]); documents do
//! not stop it: they are others in every step, and libraries send all the way round
//! (github:zhuzilin/ring-flash-attention, `ring_flash_attn_varlen.py`).

use super::attention::{Saved, Shape};
use super::{double_ring, ring_burst, ring_follow, ring_merge, ring_reverse};
use crate::plan::{AttnBlock, Axis, Buf, Builder, Dtype, Engine, Group, Kernel, Side, TensorKind, Via};
use crate::spec::{Options, RingBackward, RingLayout, RingMerge};

/// Attention over everybody's KV.
#[derive(Debug, Clone)]
pub struct Ring {
    pub shape: Shape,
    /// Ranks of the ring, at least 2.
    pub ranks: u32,
    /// Steps in which some rank sees keys: no more than `ranks`.
    pub steps: u32,
    pub engine: Engine,
    pub options: Options,
}

/// Steps of a ring in which some rank may see keys. They are as many as ranks, but fewer where each rank has one run of
/// the sequence and a window ends before the ring does: a query at the start of its run then sees keys of some runs
/// before it. In zigzag and stripe layouts the nearest keys are on both sides of the ring, or everywhere; and a ring of
/// rings is not cut.
fn steps(shape: &Shape, ranks: u32, options: Options) -> u32 {
    let (mask, run) = (&shape.block.mask, shape.seq.max(1));
    let whole = options.layout == RingLayout::Contiguous && !options.per_document;
    if !mask.causal || !whole || options.window().is_some() {
        return ranks;
    }
    let all = u64::from(ranks) - 1;
    // The nearest key of the run i runs back is (i - 1) run + 1 tokens back, the furthest that is seen w - 1.
    let window = mask.window.map_or(all, |w| w.saturating_sub(1).div_ceil(run));
    1 + all.min(window) as u32
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    /// KV of other ranks.
    pub kv: Buf,
    merge: ring_merge::Scratch,
    /// Buffers of the backward pass; for two rings, of both passes.
    grads: Grads,
}

enum Grads {
    Double(double_ring::Scratch),
    Follow(ring_follow::Scratch),
    Reverse(ring_reverse::Scratch),
    Burst(ring_burst::Scratch),
}

impl Ring {
    pub fn new(shape: Shape, ranks: u32, engine: Engine, options: Options) -> Ring {
        Ring { steps: steps(&shape, ranks, options), shape, ranks, engine, options }
    }

    /// Whether the ring is cut: nobody sees keys from further back, and gradients come home in one hop.
    pub fn is_cut(&self) -> bool {
        self.steps < self.ranks
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        // Where every block output is kept until the end every KV block has a buffer of its own, so that no hop
        // waits for a kernel. (TransformerEngine holds all of them to the end; here outputs may take the place of
        // those that have been used.)
        let slots = if self.options.merge == RingMerge::AtEnd { self.steps } else { 2 };
        Scratch {
            merge: ring_merge::Scratch::new(self, b),
            grads: match self.options.ring_backward {
                _ if self.options.window().is_some() => Grads::Double(double_ring::Scratch::new(self, b)),
                RingBackward::Follow => Grads::Follow(ring_follow::Scratch::new(self, b)),
                RingBackward::Reverse => Grads::Reverse(ring_reverse::Scratch::new(self, b)),
                RingBackward::Burst => Grads::Burst(ring_burst::Scratch::new(self, b)),
            },
            kv: b.tensor("kv_ring", &self.kv_shape(), self.shape.dtype, TensorKind::CommBuffer, slots),
        }
    }

    pub fn q_shape(&self) -> [u64; 2] {
        [self.shape.rows(), self.shape.q_row()]
    }

    pub fn o_shape(&self) -> [u64; 2] {
        [self.shape.rows(), self.shape.o_row()]
    }

    pub fn kv_shape(&self) -> [u64; 2] {
        [self.shape.rows(), self.shape.kv_row()]
    }

    pub fn lse_shape(&self) -> [u64; 2] {
        [self.shape.rows(), self.shape.block.heads]
    }

    /// What step `i` attends to: the KV that started `i` ranks back, or where two rings have brought it from.
    pub fn block_of_step(&self, i: u32) -> AttnBlock {
        match self.options.window() {
            None => self.block(0, i as i32),
            Some(window) => double_ring::block(self, window, i),
        }
    }

    /// Dtype of a kernel's block output: an output that is added to within a kernel is not rounded before.
    pub fn block_dtype(&self) -> Dtype {
        if self.in_kernel() { self.shape.acc } else { self.shape.dtype }
    }

    /// Whether kernels add to running sums themselves.
    pub fn in_kernel(&self) -> bool {
        self.options.merge == RingMerge::InKernel
    }

    /// The queries that started `q` ranks back against the KV that started `kv` ranks back.
    pub fn block(&self, q: i32, kv: i32) -> AttnBlock {
        let own = &self.shape.block;
        AttnBlock { q: own.q.shifted(Axis::Cp, -q), kv: own.kv.shifted(Axis::Cp, -kv), ..own.clone() }
    }

    /// Sends the first of each pair `by` ranks on and receives the second, all in one group of messages. Messages that
    /// are under way at the same time need a communicator each, told apart by `index`.
    pub fn hop(&self, b: &mut Builder, label: &str, index: u8, by: i32, pairs: &[(Buf, Buf)], step: u32) {
        self.hop_in(b, label, (&Group::axes(&[Axis::Cp]), index), by, pairs, step);
    }

    /// [`hop`](Ring::hop) along any group of the ring's ranks.
    pub fn hop_in(&self, b: &mut Builder, label: &str, on: (&Group, u8), by: i32, pairs: &[(Buf, Buf)], step: u32) {
        let (group, index) = if self.options.one_comm { (on.0, 0) } else { on };
        b.hops(label, Via { group, index, engine: self.engine }, by, pairs, step);
    }

    /// The messages in which KV, or its gradient, travels. K and V lie token by token here, so that two messages are
    /// the halves of the tokens: as many, and as large, as K and V apart.
    pub fn messages(&self, from: Buf, to: Buf) -> Vec<(Buf, Buf)> {
        let (half, all) = (self.shape.rows() / 2, self.shape.rows());
        match self.options.kv_in_two {
            true => [(0, half), (half, all)].map(|(x, y)| (from.rows(x, y), to.rows(x, y))).to_vec(),
            false => vec![(from, to)],
        }
    }

    /// Passes the KV of step `i` on to the next rank, unless it was the last step.
    pub fn pass_kv(&self, b: &mut Builder, i: u32, held: impl Fn(u32) -> Buf) {
        if i + 1 < self.steps {
            self.hop(b, &format!("kv_hop.{i}"), 0, 1, &self.messages(held(i), held(i + 1)), i);
        }
    }

    /// The buffer of the KV that is here in step `i` of the forward pass. Hop 0 sends the rank's own KV, so that no
    /// copy of it is made; the KV that comes last may be what the backward pass begins with.
    fn held(&self, s: &Scratch, io: Saved, i: u32) -> Buf {
        match io.kv_last {
            _ if i == 0 => io.kv,
            Some(last) if i + 1 == self.steps => last,
            _ if self.options.merge == RingMerge::AtEnd => s.kv.slot(i),
            _ => s.kv.slot(i % 2),
        }
    }

    /// o, lse = attention(q, kv) over the whole ring.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved) {
        if let Grads::Double(rings) = &s.grads {
            rings.forward(self, b, s.kv, &s.merge, io);
            return s.merge.finish(self, b, io);
        }
        for i in 0..self.steps {
            self.pass_kv(b, i, |i| self.held(s, io, i));
            s.merge.step(self, b, io, self.held(s, io, i), i);
        }
        s.merge.finish(self, b, io);
    }

    /// dq, dkv from the gradient of o.
    pub fn backward(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        match &s.grads {
            Grads::Double(rings) => rings.backward(self, b, s.kv, io, d_o),
            Grads::Follow(grads) => grads.backward(self, b, s.kv, io, d_o),
            Grads::Reverse(grads) => grads.backward(self, b, io, d_o),
            Grads::Burst(grads) => grads.backward(self, b, io, d_o),
        }
    }

    /// Makes the gradients of the block of step `i`, into `to`; with `onto` the gradients of that side are added there.
    pub fn block_bwd(
        &self,
        b: &mut Builder,
        i: u32,
        block: AttnBlock,
        reads: &[Buf; 5],
        to: [Buf; 2],
        onto: Option<Side>,
    ) {
        let label = format!("attention_bwd.{i}");
        let Some(side) = onto else {
            b.compute(&label, Kernel::AttentionBwd(block), reads, &to);
            return;
        };
        let sum = if side == Side::Q { to[0] } else { to[1] };
        let reads: Vec<Buf> = reads.iter().copied().chain([sum]).collect();
        b.compute(&label, Kernel::AttentionBwdOnto(block, side), &reads, &to);
    }

    /// sum += part, where the block's mask leaves rows.
    pub fn add(&self, b: &mut Builder, i: u32, block: &AttnBlock, side: Side, sum: Buf, part: Buf) {
        let (what, shape) = if side == Side::Q { ("dq", self.q_shape()) } else { ("dkv", self.kv_shape()) };
        let kernel = Kernel::Add { elems: shape[0] * shape[1], trim: Some((block.clone(), side)) };
        b.compute(&format!("{what}_add.{i}"), kernel, &[sum, part], &[sum]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::visible::block_shape;
    use crate::plan::{Mesh, Segs, Split};
    use crate::spec::{Documents, Factor, Mask};

    /// The last step in which the mask leaves anything to any rank, and one more.
    fn looked_at_one_by_one(ring: &Ring) -> u32 {
        let views = [Mesh::new(&[(Axis::Cp, ring.ranks)])];
        let sees = |rank: u32, i: u32| {
            let block = ring.block_of_step(i);
            block_shape(&block.q.spans(&views, rank), &block.kv.spans(&views, rank), &block.mask).area > 0
        };
        1 + (0..ring.ranks).rev().find(|i| (0..ring.ranks).any(|rank| sees(rank, *i))).unwrap()
    }

    #[test]
    fn a_ring_stops_where_nobody_sees_further_back() {
        let (seq_len, ranks) = (48, 6);
        let lengths: [&[u64]; 6] = [&[], &[48], &[8; 6], &[4, 12, 32], &[7, 10, 31], &[1, 46, 1]];
        let mut cut = 0;
        for (documents, layout) in
            lengths.into_iter().flat_map(|d| ["contiguous", "default", "stripe"].map(|layout| (d, layout)))
        {
            for window in (1..=seq_len).map(Some).chain([None]) {
                let mask = Mask { window, documents: Documents::from(documents.to_vec()), ..Mask::new(true) };
                let options: Options = layout.parse().unwrap();
                let split = match options.layout {
                    RingLayout::Zigzag => Split::Zigzag,
                    RingLayout::Contiguous => Split::Contiguous,
                    RingLayout::Stripe => Split::Stripe,
                };
                let own = Segs::new(seq_len, &[(Axis::Cp, split)]);
                let (batch, heads, kv_heads, head_dim, v_dim) = (1, 1, 1, 4, None);
                let block = AttnBlock {
                    q: own.clone(),
                    kv: own,
                    batch,
                    heads,
                    kv_heads,
                    head_dim,
                    v_dim,
                    mask,
                    factor: Factor::ONE,
                };
                let seq = seq_len / u64::from(ranks);
                let shape = Shape { block, seq, dtype: Dtype::F64, acc: Dtype::F64 };
                let ring = Ring::new(shape, ranks, Engine::CopyEngine, options);
                match layout {
                    // Documents leave less to see, and the ring as it is.
                    "contiguous" if documents.len() > 1 => assert!(ring.steps >= looked_at_one_by_one(&ring)),
                    "contiguous" => assert_eq!(ring.steps, looked_at_one_by_one(&ring), "{window:?} {documents:?}"),
                    _ => assert_eq!(ring.steps, ranks),
                }
                cut += u32::from(ring.is_cut());
            }
        }
        assert!(cut > 150, "{cut}");
    }
}
