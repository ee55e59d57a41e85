//! Experts that every rank computes for its own tokens (FasterMoE's shadowing, PPoPP 2022): in every forward pass their
//! weights are broadcast, in every backward pass the gradients of all ranks are summed at home.
//!
//! ```text
//! forward    lend: weights out     | dispatch .. products of own slots, products of shadows .. combine
//! backward   dispatch .. gradients of shadows | take_home: sums of them | combine
//! ```
//! Both go on a communicator of their own, beside rows and products. Weights stay until the backward pass has used them.

use super::Experts;
use super::buffers::{Saved, Scratch};
use crate::plan::expert::{ExpertKernel, ExpertOp, Pass, Values};
use crate::plan::rows::EXPERT_VIEW;
use crate::plan::{Axis, Buf, Builder, Dtype, ExchangeAlgo, Group, Kernel, Layout, OpKind, Phase, TensorKind, Wire};

/// The way in which weights and gradients of shadowed experts travel: by the plan's last route.
#[derive(Clone, Copy)]
pub(super) struct Shadow {
    pub(super) route: u32,
    /// Shadowed experts, and how many of them a rank has the weights of at most.
    pub(super) slots: u64,
    pub(super) owned: u64,
}

/// Buffers for gate and up, and for down: weights on their way out, gradients of the shadows, and their sum at home.
pub struct Room {
    leaving: [Buf; 2],
    pub(super) grads: [Buf; 2],
    home: [Buf; 2],
}

const PARTS: [&str; 2] = ["up", "down"];

impl Experts {
    /// Elements of a slot, of gate and up and of down.
    fn widths(&self) -> [u64; 2] {
        [self.gate_up, self.down].map(|rows| self.of_slot(rows))
    }

    pub(super) fn saved_shadows(&self, keep: &mut dyn FnMut(&'static str, u64, u64, Dtype) -> Buf) -> Option<[Buf; 2]> {
        let Shadow { slots, .. } = self.shadow?;
        let [up, down] = self.widths();
        Some([keep("shadow_up", slots, up, self.dtype), keep("shadow_down", slots, down, self.dtype)])
    }

    pub(super) fn shadow_room(&self, b: &mut Builder) -> Option<Room> {
        let Shadow { slots, owned, .. } = self.shadow?;
        let widths = self.widths();
        let mut both = |what: &str, rows: u64, dtype: Dtype, kind: TensorKind| {
            [0, 1].map(|i| b.tensor(&format!("shadow_{what}_{}", PARTS[i]), &[rows, widths[i]], dtype, kind, 1))
        };
        Some(Room {
            leaving: both("leaving", owned, self.dtype, TensorKind::CommBuffer),
            grads: both("grad", slots, self.grads, TensorKind::Workspace),
            home: both("home", owned, self.grads, TensorKind::CommBuffer),
        })
    }

    fn exchange_shadows(&self, b: &mut Builder, label: String, phase: Phase, dtype: Dtype, [src, dst]: [Buf; 2]) {
        let Some(Shadow { route, .. }) = self.shadow else { return };
        let group = Group::Axes { view: EXPERT_VIEW, axes: vec![Axis::Ep] };
        let (wire, acc, engine, algo) = (Wire::Plain(dtype), self.grads, self.sums_engine, ExchangeAlgo::Broadcast);
        let (src, dst) = (vec![src], vec![dst]);
        b.exchange(&label, &group, 1, OpKind::Exchange { route, src, dst, algo, phase, wire, acc, engine });
    }

    /// Brings the weights of shadowed experts, the first of their owners' slots, to everyone.
    pub(super) fn lend(&self, b: &mut Builder, s: &Scratch, weights: Buf, keep: &Saved) {
        let (Some(shadow), Some(room), Some(kept)) = (self.shadow, &s.shadow, keep.shadow) else { return };
        for (i, (rows, cols)) in [self.gate_up, self.down].into_iter().zip(self.widths()).enumerate() {
            let own = weights.rows(rows[0], rows[0] + shadow.owned * cols);
            let ([from, to], rows, values) = ([Layout::Tokens; 2], [shadow.owned; 2], Values::Row { cols });
            let op = ExpertOp::Rows { from, to, rows, values, backward: false };
            let kernel = Kernel::Expert(ExpertKernel { route: shadow.route, op });
            b.compute(&format!("shadow_{}", PARTS[i]), kernel, &[own], &[room.leaving[i]]);
            let label = format!("shadow_out_{}", PARTS[i]);
            self.exchange_shadows(b, label, Phase::CachedDispatch, self.dtype, [room.leaving[i], kept[i]]);
        }
    }

    /// A product with part 0 (gate and up) or 1 (down) of the shadows.
    fn shadow_product(&self, shadow: Shadow, pass: Pass, i: usize) -> ExpertOp {
        let [n, k] = [[self.wide(), self.hidden], [self.hidden, self.ffn]][i];
        ExpertOp::MatMul { pass, rows: self.rows, slots: shadow.slots, first: self.slots, n, k, fp8: self.fp8 }
    }

    /// Multiplies with the weights of the shadows, of part 0 or 1.
    pub(super) fn shadow_matmul(&self, b: &mut Builder, pass: Pass, i: usize, keep: &Saved, [x, y]: [Buf; 2]) {
        let (Some(shadow), Some(weights)) = (self.shadow, keep.shadow) else { return };
        let label = format!("shadow_{}{}", ["gate_up", "down"][i], if pass == Pass::Dx { "_dx" } else { "" });
        self.kernel(b, &label, self.shadow_product(shadow, pass, i), &[x, weights[i], y], &[y]);
    }

    /// Makes the gradient of part 0 or 1 of the shadows, and sends it home.
    pub(super) fn shadow_dw(&self, b: &mut Builder, s: &Scratch, i: usize, [dy, x]: [Buf; 2]) {
        let (Some(shadow), Some(room)) = (self.shadow, &s.shadow) else { return };
        let (grad, name) = (room.grads[i], PARTS[i]);
        let elems = shadow.slots * self.widths()[i];
        b.compute(&format!("zero_shadow_{name}"), Kernel::Fill { elems }, &[], &[grad]);
        let op = self.shadow_product(shadow, Pass::Dw, i);
        self.kernel(b, &format!("shadow_{name}_dw"), op, &[dy, x, grad], &[grad]);
        self.exchange_shadows(b, format!("shadow_home_{name}"), Phase::Combine, self.grads, [grad, room.home[i]]);
    }

    /// Adds the sums that came home to the gradients of the owners' slots.
    pub(super) fn take_home(&self, b: &mut Builder, s: &Scratch, grads: Buf) {
        let (Some(shadow), Some(room)) = (self.shadow, &s.shadow) else { return };
        for (i, (rows, cols)) in [self.gate_up, self.down].into_iter().zip(self.widths()).enumerate().rev() {
            let elems = shadow.owned * cols;
            let own = grads.rows(rows[0], rows[0] + elems);
            b.compute(
                &format!("add_shadow_{}", PARTS[i]),
                Kernel::Add { elems, trim: None },
                &[own, room.home[i]],
                &[own],
            );
        }
    }
}
