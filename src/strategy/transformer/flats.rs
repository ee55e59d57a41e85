//! The flat tensors that a layer's weights, or their gradients, stand in.

use super::super::weights::Rows;
use crate::plan::{Arg, Buf, Builder};

/// The flat tensors of a layer: what every rank of the sequence has, and its own experts.
#[derive(Clone, Copy)]
pub struct Flats {
    pub dense: Buf,
    pub experts: Option<Buf>,
}

impl Flats {
    /// The tensors as formals of the block being written.
    pub fn formals(self, b: &mut Builder, name: &str) -> Flats {
        let dense = b.formal(name);
        Flats { dense, experts: self.experts.map(|_| b.formal(&format!("{name}_experts"))) }
    }

    pub fn bufs(self) -> impl Iterator<Item = Buf> {
        std::iter::once(self.dense).chain(self.experts)
    }

    /// The arguments that a call binds to those formals.
    pub fn args(self, arg: impl Fn(Buf) -> Arg) -> Vec<Arg> {
        self.bufs().map(arg).collect()
    }

    pub fn slot(self, slot: u32) -> Flats {
        Flats { dense: self.dense.slot(slot), experts: self.experts.map(|buf| buf.slot(slot)) }
    }

    /// Rows of the tensor that every rank of the sequence has.
    pub(super) fn at(&self, rows: Rows) -> Buf {
        self.dense.at(rows)
    }
}
