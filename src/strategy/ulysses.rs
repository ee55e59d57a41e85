//! DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all turns "my tokens, all heads" into "all tokens,
//! my heads" before attention, and another turns it back.
//!
//! ```text
//! packed:    pack q, k, v | one all-to-all | unpack
//! separate:  pack q | all-to-all of q | ..  of k | .. of v       (DeepSpeed, TransformerEngine)
//!                   | pack k, v       | unpack q |         | unpack k, v
//! ```
//! With fewer KV heads than ranks, `copies` = ranks / kv_heads ranks need the same KV head. Either each is
//! sent the head whole, as if KV heads had been repeated before the exchange (ALST, arXiv:2506.13996), and
//! the gradients of the copies are summed where they come back; or each is sent a slice of the head's
//! elements, so that the head travels once, and the copies, which are neighbours, gather the slices. The
//! bytes are about the same, but with copies inside a node only one of them crosses the network. Backward a
//! reduce-scatter among the copies sums their gradients before the exchange.
//!
//! Heads that the ranks do not divide can be padded with heads of zeros, as some frameworks do. Whole groups
//! or the query heads of every group are added, whatever makes fewer heads, so that a query head still reads
//! the KV head it always read. DeepSpeed's uneven exchange gives ranks ceil or floor of the heads instead:
//! the fullest rank decides the time, and it has no more heads with padding, but zeros travel.
//!
//! What runs between the exchanges is a [`Core`](super::attention::Core): plain attention, or a ring over
//! another axis (the hybrid of Fang and Zhao, USP, arXiv:2405.07719).

use super::head_exchange::{HeadExchange, Parcel, Way};
use crate::plan::{
    Axis, Buf, Builder, CollectiveKind, Dtype, Engine, Exchange, Group, HeadPad, HeadPart, HeadPermute, Kernel,
    Packing, TensorKind, Via,
};

pub struct Ulysses {
    pub ranks: u32,
    pub batch: u64,
    /// Tokens of one sequence on a rank outside the exchange.
    pub seq: u64,
    pub heads: u64,
    pub kv_heads: u64,
    /// Heads and KV heads with those of zeros, see [`padded`].
    pub padded: [u64; 2],
    pub head_dim: u64,
    /// Elements of a head's value.
    pub v_dim: u64,
    /// Whether q, k and v travel in an all-to-all each.
    pub separate: bool,
    /// Whether a KV head that several ranks need travels once, and is gathered by them.
    pub replicate_after: bool,
    pub dtype: Dtype,
    pub engine: Engine,
}

/// The fewest heads and KV heads, no fewer than `heads` and `kv_heads`, that `ranks` can share: each rank has
/// as many heads as any other, and they read its own KV heads.
pub fn padded(heads: u64, kv_heads: u64, ranks: u64) -> [u64; 2] {
    let group = heads / kv_heads;
    let fits = |k: &u64| k.is_multiple_of(ranks) || ranks.is_multiple_of(*k);
    let all = (kv_heads..=kv_heads.next_multiple_of(ranks)).filter(fits);
    // More query heads in every group, until the ranks divide them.
    let to_heads = |k: u64| (group..group + ranks).map(|g| k * g).find(|a| a.is_multiple_of(ranks));
    all.filter_map(|k| Some([to_heads(k)?, k])).min().unwrap_or([heads, kv_heads])
}

/// The buffers in which copies of a KV head are gathered and scattered.
struct Copies {
    /// A rank's slice of its KV head, for all tokens.
    slice: Buf,
    /// The slices of all copies.
    slices: Buf,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    qkv: Vec<Parcel>,
    o: Parcel,
    copies: Option<Copies>,
    /// The gradient of the output after its exchange: all tokens, my heads.
    pub do_full: Buf,
    dq: Buf,
    dkv: Buf,
}

impl Ulysses {
    fn q(&self) -> HeadPart {
        let [group, to_group] = [self.heads / self.kv_heads, self.padded[0] / self.padded[1]];
        let pad = HeadPad { group, to_group, to_heads: self.padded[0] };
        HeadPart { pad: (self.padded[0] > self.heads).then_some(pad), ..HeadPart::new(1, self.heads, self.head_dim) }
    }

    /// The part that outputs are, which are as wide as values.
    fn o(&self) -> HeadPart {
        HeadPart { head_dim: self.v_dim, ..self.q() }
    }

    /// The part that keys and values are: whole KV heads, or their slices if copies gather them.
    fn kv(&self) -> HeadPart {
        let slices = if self.gathers() { self.copies() } else { 1 };
        let pad = HeadPad { group: 1, to_group: 1, to_heads: self.padded[1] * slices };
        let pad = (self.padded[1] > self.kv_heads).then_some(pad);
        HeadPart { pad, ..HeadPart::kv(self.kv_heads * slices, self.head_dim / slices, self.v_dim / slices) }
    }

    /// The part that the slices of one KV head are.
    fn slices(&self) -> HeadPart {
        HeadPart::kv(self.copies(), self.head_dim / self.copies(), self.v_dim / self.copies())
    }

    /// Number of ranks that need the same KV head.
    fn copies(&self) -> u64 {
        (u64::from(self.ranks) / self.padded[1]).max(1)
    }

    fn gathers(&self) -> bool {
        self.replicate_after && self.copies() > 1
    }

    /// Heads and KV heads a rank works on between the exchanges.
    pub fn local_heads(&self) -> (u64, u64) {
        let ranks = u64::from(self.ranks);
        (self.padded[0] / ranks, (self.padded[1] / ranks).max(1))
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (ranks, n) = (u64::from(self.ranks), self.batch * self.seq);
        let exchange = self.exchange();
        let qkv = match self.separate {
            false => vec![exchange.parcel(b, "qkv", &[self.q(), self.kv()], &["qkv"])],
            true => {
                vec![exchange.parcel(b, "q", &[self.q()], &["q"]), exchange.parcel(b, "kv", &[self.kv()], &["k", "v"])]
            }
        };
        let o = exchange.parcel(b, "o", &[self.o()], &["o"]);
        let copies = self.gathers().then(|| self.copies_scratch(b));
        let mut work = |name, shape: [u64; 2]| b.tensor(name, &shape, self.dtype, TensorKind::Workspace, 1);
        Scratch {
            qkv,
            o,
            copies,
            do_full: work("do_full", [n * ranks, self.o().local_row(ranks)]),
            dq: work("dq_local", [n, self.heads * self.head_dim]),
            dkv: work("dkv_local", [n, self.kv_heads * (self.head_dim + self.v_dim)]),
        }
    }

    fn exchange(&self) -> HeadExchange {
        let Ulysses { ranks, batch, seq, dtype, engine, .. } = *self;
        HeadExchange { ranks: u64::from(ranks), axes: vec![Axis::Up], batch, seq, order: None, dtype, engine }
    }

    fn copies_scratch(&self, b: &mut Builder) -> Copies {
        let (n, row) = (self.batch * self.seq * u64::from(self.ranks), self.slices().local_row(self.copies()));
        let mut comm = |name, shape: &[u64]| b.tensor(name, shape, self.dtype, TensorKind::CommBuffer, 1);
        Copies { slice: comm("kv_slice", &[n, row]), slices: comm("kv_slices", &[self.copies(), n * row]) }
    }

    /// q and kv of my tokens -> q and kv of all tokens, for my heads.
    pub fn scatter_qkv(&self, b: &mut Builder, s: &Scratch, from: [Buf; 2], to: [Buf; 2]) {
        let kv = s.copies.as_ref().map_or(to[1], |copies| copies.slice);
        self.exchange().run(b, false, &s.qkv, Way::There, &from, &[to[0], kv]);
        if let Some(copies) = &s.copies {
            self.among_copies(b, "kv_gather", CollectiveKind::AllGather, copies.slice, copies.slices);
            let kernel = self.between_slices(Exchange::UnpackHeads, false);
            b.compute("kv_expand", kernel, &[copies.slices], &[to[1]]);
        }
    }

    /// The output for my heads -> the output of my tokens.
    pub fn gather_o(&self, b: &mut Builder, s: &Scratch, from: Buf, to: Buf) {
        self.exchange().run(b, false, std::slice::from_ref(&s.o), Way::Back, &[from], &[to]);
    }

    /// The gradient of the output of my tokens -> that of all tokens, for my heads.
    pub fn scatter_do(&self, b: &mut Builder, s: &Scratch, from: Buf) -> Buf {
        self.exchange().run(b, true, std::slice::from_ref(&s.o), Way::There, &[from], &[s.do_full]);
        s.do_full
    }

    /// dq and dkv for my heads -> those of my tokens, copies of a KV head summed.
    pub fn gather_dqkv(&self, b: &mut Builder, s: &Scratch, (dq, mut dkv): (Buf, Buf)) -> (Buf, Buf) {
        if let Some(copies) = &s.copies {
            let kernel = self.between_slices(Exchange::PackHeads, true);
            b.compute("dkv_cut", kernel, &[dkv], &[copies.slices]);
            self.among_copies(b, "dkv_scatter", CollectiveKind::ReduceScatter, copies.slices, copies.slice);
            dkv = copies.slice;
        }
        self.exchange().run(b, true, &s.qkv, Way::Back, &[dq, dkv], &[s.dq, s.dkv]);
        (s.dq, s.dkv)
    }

    /// A kernel between a KV head of all tokens and its slices.
    fn between_slices(&self, exchange: Exchange, backward: bool) -> Kernel {
        let shape = [self.copies(), self.batch, self.seq * u64::from(self.ranks)];
        let permute = HeadPermute::new(exchange, Packing::Together, shape, vec![self.slices()]);
        Kernel::Permute(HeadPermute { backward, ..permute })
    }

    fn among_copies(&self, b: &mut Builder, label: &str, kind: CollectiveKind, src: Buf, dst: Buf) {
        let copies = self.copies() as u32;
        let sets = (0..self.ranks / copies).map(|head| (head * copies..(head + 1) * copies).collect());
        let group = Group::subset(Axis::Up, sets.collect());
        b.collective(label, Via { group: &group, index: 0, engine: self.engine }, kind, src, dst, self.dtype);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_adds_the_fewest_heads() {
        assert_eq!(padded(32, 8, 16), [32, 8], "nothing to add");
        assert_eq!(padded(40, 8, 16), [48, 8], "a query head to each of eight groups, not eight groups");
        assert_eq!(padded(28, 4, 8), [32, 4]);
        assert_eq!(padded(7, 7, 4), [8, 8], "whole groups");
        assert_eq!(padded(12, 6, 4), [16, 8]);
        assert_eq!(padded(3, 1, 2), [4, 1]);
    }

    #[test]
    fn no_padding_is_smaller_than_the_smallest_of_all() {
        for (k, g, ranks) in (1..=6).flat_map(|k| (1..=4).flat_map(move |g| (2..=9).map(move |ranks| (k, g, ranks)))) {
            let fits = |a: u64, k: u64| a.is_multiple_of(ranks) && (k.is_multiple_of(ranks) || ranks.is_multiple_of(k));
            let all = (k..60).flat_map(|k| (g..60).map(move |g| (k * g, k)));
            let least = all.filter(|&(a, k)| fits(a, k)).map(|(a, _)| a).min();
            assert_eq!(Some(padded(k * g, k, ranks)[0]), least, "{k} x {g} over {ranks}");
        }
    }
}
