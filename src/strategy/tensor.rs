//! Tensor parallelism (Megatron-LM, arXiv:1909.08053): the matrices of a layer are cut over ranks, first by
//! their rows and then by their columns, so that a token's partial sums meet once an attention and once a
//! feed-forward network. With sequence parallelism (Korthikanti et al., arXiv:2205.05198) the residual stream
//! between them is cut over tokens: an all-gather before the one product and a reduce-scatter after the other
//! take the place of an all-reduce, and norms and residuals are no longer done by every rank.
//!
//! A rank's share of a microbatch's rows (b*s of them) are those of its coordinate, in rank order.

use crate::plan::{Axis, Buf, Builder, CollectiveKind, Dtype, Engine, Group, TensorKind, Via};
use crate::spec::Parallelism;

#[derive(Debug, Clone, Copy)]
pub struct TensorParallel {
    pub ranks: u64,
    /// Without sequence parallelism every rank has all tokens everywhere.
    pub whole: bool,
    pub dtype: Dtype,
    pub engine: Engine,
}

/// Where whole rows stand beside a rank's share of them.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Rows as they are gathered, and partial sums before they are scattered.
    pub gathered: Buf,
    pub partial: Buf,
}

impl TensorParallel {
    pub fn new(par: &Parallelism, dtype: Dtype, engine: Engine) -> TensorParallel {
        TensorParallel { ranks: u64::from(par.tp), whole: par.options.whole_activations, dtype, engine }
    }

    /// The residual stream is cut over the ranks.
    pub fn cuts_rows(&self) -> bool {
        self.ranks > 1 && !self.whole
    }

    /// Of `tokens`, those that a rank has between the products.
    pub fn share(&self, tokens: u64) -> u64 {
        if self.cuts_rows() { tokens / self.ranks } else { tokens }
    }

    /// Room for `tokens` whole rows, where a rank has a share of them alone.
    pub fn room(&self, b: &mut Builder, name: &str, tokens: u64, row: u64) -> Option<Buf> {
        self.cuts_rows().then(|| b.tensor(name, &[tokens, row], self.dtype, TensorKind::CommBuffer, 1))
    }

    /// All rows of what the ranks have shares of, in `room`; where there is none, they are there already.
    pub fn gather(&self, b: &mut Builder, label: &str, share: Buf, room: Option<Buf>) -> Buf {
        let Some(all) = room else { return share };
        self.collective(b, label, CollectiveKind::AllGather, share, all);
        all
    }

    /// As [`gather`](TensorParallel::gather), no earlier than the kernel issued last has ended: a framework
    /// starts it beside the product that comes next.
    pub fn gather_beside(&self, b: &mut Builder, label: &str, share: Buf, room: Option<Buf>, last: u32) -> Buf {
        let Some(all) = room else { return share };
        let op = self.collective(b, label, CollectiveKind::AllGather, share, all);
        b.after(op, last);
        all
    }

    /// Sums the ranks' partial sums: into `share`, where they are in a room of their own, or in place.
    pub fn reduce(&self, b: &mut Builder, label: &str, partial: Buf, share: Buf) {
        match (self.ranks, self.cuts_rows()) {
            (1, _) => {}
            (_, true) => drop(self.collective(b, label, CollectiveKind::ReduceScatter, partial, share)),
            (_, false) => drop(self.collective(b, label, CollectiveKind::AllReduce, partial, partial)),
        }
    }

    /// Sums the gradient of weights that every rank has, but has used on its own tokens alone.
    pub fn sum_shared(&self, b: &mut Builder, label: &str, grad: Buf, acc: Dtype) {
        if self.cuts_rows() {
            TensorParallel { dtype: acc, ..*self }.collective(b, label, CollectiveKind::AllReduce, grad, grad);
        }
    }

    fn collective(&self, b: &mut Builder, label: &str, kind: CollectiveKind, src: Buf, dst: Buf) -> u32 {
        let group = Group::axes(&[Axis::Tp]);
        b.collective(label, Via { group: &group, index: 0, engine: self.engine }, kind, src, dst, self.dtype)
    }
}
