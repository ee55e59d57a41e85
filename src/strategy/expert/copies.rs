//! Experts that several slots hold: their gradients become one before they are summed over the ranks that hold the same
//! slots. `grad_home` brings the gradient of every copy to one of them, `grad_out` the total back to all.

use super::Experts;
use super::buffers::Scratch;
use crate::plan::expert::{ExpertKernel, ExpertOp, Values};
use crate::plan::rows::{EXPERT_VIEW, Landing};
use crate::plan::{Axis, Buf, Builder, ExchangeAlgo, Group, Kernel, Layout, OpKind, Phase, Wire};

/// The way in which gradients of experts that several slots hold become one: by the plan's last route.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    pub(super) route: u32,
    /// Slots of such experts, which are the first ones of a rank; and rows that leave for other slots.
    pub(super) slots: u64,
    pub(super) copies: u64,
}

/// The buffers of that way: rows as they land, and copies of slots.
#[derive(Clone, Copy)]
pub(super) struct SumRows {
    pub(super) landed: Buf,
    pub(super) copies: Buf,
    pub(super) total: Buf,
}

impl Experts {
    /// Makes the gradients of copies of an expert one, in all of them.
    pub fn sum_copies(&self, b: &mut Builder, s: &Scratch, g: Buf) {
        let (Some(sums), Some(buffers)) = (self.sums, s.sums) else { return };
        let group = Group::Axes { view: EXPERT_VIEW, axes: vec![Axis::Ep] };
        let pairs = Layout::Landed(Landing::Pairs);
        let parts = [("up", self.gate_up), ("down", self.down)];
        for ((name, rows), at) in parts.into_iter().zip(buffers) {
            let cols = self.of_slot(rows);
            let own = g.rows(rows[0], rows[0] + sums.slots * cols);
            let put = |b: &mut Builder, what: &str, [from, to]: [Layout; 2], x: Buf, y: Buf| {
                let rows = [from, to].map(|layout| if layout == Layout::Copies { sums.copies } else { sums.slots });
                let op = ExpertOp::Rows { from, to, rows, values: Values::Row { cols }, backward: true };
                let kernel = Kernel::Expert(ExpertKernel { route: sums.route, op });
                b.compute(&format!("{what}_{name}"), kernel, &[x], &[y]);
            };
            let exchange = |b: &mut Builder, what: &str, phase: Phase, src: Buf, dst: Buf| {
                let (route, wire, acc, engine) = (sums.route, Wire::Plain(self.grads), self.grads, self.engine);
                let (src, dst, algo) = (vec![src], vec![dst], ExchangeAlgo::Nccl);
                let kind = OpKind::Exchange { route, src, dst, algo, phase, wire, acc, engine };
                b.exchange(&format!("{what}_{name}"), &group, 1, kind);
            };
            put(b, "grad_slots", [Layout::Experts, pairs], own, at.landed);
            exchange(b, "grad_home", Phase::Combine, at.landed, at.copies);
            put(b, "grad_total", [Layout::Copies, Layout::Tokens], at.copies, at.total);
            put(b, "grad_copies", [Layout::Tokens, Layout::Copies], at.total, at.copies);
            exchange(b, "grad_out", Phase::CachedDispatch, at.copies, at.landed);
            put(b, "grad_same", [pairs, Layout::Experts], at.landed, own);
        }
    }
}
