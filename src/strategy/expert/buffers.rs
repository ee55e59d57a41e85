//! The buffers that a layer of experts keeps for its backward pass, and those that it works in.

use super::Experts;
use super::copies::{SumRows, Sums};
use super::shadow;
use crate::plan::kernel::FP8_BLOCK;
use crate::plan::{Buf, Builder, Dtype, Layout, TensorKind};

/// The buffers that a layer of experts keeps for the backward pass; `None` for what is made again.
#[derive(Clone, Copy)]
pub struct Saved {
    pub(super) logits: Buf,
    /// The rows that experts are given; or the codes and scales that they came as, of which the rows are made again.
    pub(super) x: Option<Buf>,
    pub(super) codes: Option<[Buf; 2]>,
    /// The weight of each row, which is that of its choice.
    pub(super) weighs: Buf,
    /// The rows before the activation; or codes and scales of these.
    pub(super) gate_up: Option<Buf>,
    pub(super) gate_up_codes: Option<[Buf; 2]>,
    /// The rows behind the activation; `None` where they are made again.
    pub(super) act: Option<Buf>,
    /// The sum of a token's experts; `None` unless it is projected back.
    pub(super) sum: Option<Buf>,
    /// The weights of shadowed experts; `None` where none are shadowed.
    pub(super) shadow: Option<[Buf; 2]>,
}

impl Saved {
    /// The kept buffers, completed by those of `s` for what is made again.
    pub fn with_again(&self, s: &Scratch) -> Saved {
        Saved { x: self.x.or(s.x), gate_up: self.gate_up.or(s.gate_up), act: self.act.or(s.act), ..*self }
    }

    pub(super) fn x(&self) -> Buf {
        self.x.expect("kept, or made again")
    }

    pub(super) fn gate_up(&self) -> Buf {
        self.gate_up.expect("kept, or made again")
    }

    pub(super) fn act(&self) -> Buf {
        self.act.expect("kept, or made again")
    }

    pub fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![("router_logits", &mut self.logits), ("expert_weighs", &mut self.weighs)];
        all.extend(self.x.as_mut().map(|x| ("expert_x", x)));
        all.extend(self.codes.iter_mut().flat_map(|both| ["expert_codes", "expert_scales"].into_iter().zip(both)));
        all.extend(self.gate_up.as_mut().map(|gate_up| ("expert_gate_up", gate_up)));
        let codes = self.gate_up_codes.iter_mut();
        all.extend(codes.flat_map(|both| ["expert_gate_up_codes", "expert_gate_up_scales"].into_iter().zip(both)));
        all.extend(self.act.as_mut().map(|act| ("expert_act", act)));
        all.extend(self.sum.as_mut().map(|sum| ("expert_sum", sum)));
        all.extend(self.shadow.iter_mut().flat_map(|both| ["shadow_up", "shadow_down"].into_iter().zip(both)));
        all
    }
}

/// The buffers of rows on their way: the rows, and the numbers of their choices.
#[derive(Clone, Copy)]
pub(super) struct Station {
    pub(super) rows: Buf,
    pub(super) choices: Buf,
}

pub struct Scratch {
    pub(super) gates: Buf,
    pub(super) d_gates: Buf,
    pub(super) d_logits: Buf,
    /// Rows before a dispatch; `None` where tokens leave as they are.
    pub(super) leaving: Option<Station>,
    pub(super) codes: Option<[Buf; 2]>,
    /// Rows behind a dispatch, and before a combine; `None` without other ranks.
    pub(super) landed: Option<Station>,
    pub(super) landed_codes: Option<[Buf; 2]>,
    /// The rows of experts, and those behind the first product and behind the activation, where they are made again.
    pub(super) x: Option<Buf>,
    pub(super) gate_up: Option<Buf>,
    pub(super) act: Option<Buf>,
    pub(super) y: Buf,
    pub(super) d_act: Buf,
    pub(super) d_gate_up: Buf,
    pub(super) d_weighs: Buf,
    /// Rows before they travel, or their gradients, where they are projected; and the gradients behind the projection
    /// back.
    pub(super) squeezed: Option<[Buf; 2]>,
    /// Room to sum the gradients of copies: of gate and up, and of down.
    pub(super) sums: Option<[SumRows; 2]>,
    pub(super) shadow: Option<shadow::Room>,
}

impl Experts {
    pub fn saved(&self, keep: &mut dyn FnMut(&'static str, u64, u64, Dtype) -> Buf) -> Saved {
        Saved {
            logits: keep("router_logits", self.tokens, self.experts, self.acc),
            x: (!self.keeps_codes).then(|| keep("expert_x", self.rows, self.hidden, self.dtype)),
            codes: self.keeps_codes.then(|| {
                let scales = self.hidden.div_ceil(FP8_BLOCK);
                let codes = keep("expert_codes", self.landed, self.hidden, Dtype::U8);
                [codes, keep("expert_scales", self.landed, scales, Dtype::F32)]
            }),
            weighs: keep("expert_weighs", self.rows, 1, self.acc),
            gate_up: (!self.rounds_gate_up).then(|| keep("expert_gate_up", self.rows, self.wide(), self.dtype)),
            gate_up_codes: self.rounds_gate_up.then(|| {
                let codes = keep("expert_gate_up_codes", self.rows, self.wide(), Dtype::U8);
                [codes, keep("expert_gate_up_scales", self.rows, self.wide().div_ceil(FP8_BLOCK), Dtype::F32)]
            }),
            act: (!self.act_again).then(|| keep("expert_act", self.rows, self.ffn, self.dtype)),
            sum: self.squeezes().then(|| keep("expert_sum", self.tokens, self.hidden, self.dtype)),
            shadow: self.saved_shadows(keep),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let shadow = self.shadow_room(b);
        let (h, away) = (self.hidden, self.ranks > 1);
        let mut some = |name: &str, rows, row, dtype, kind| b.tensor(name, &[rows, row], dtype, kind, 1);
        let (work, comm) = (TensorKind::Workspace, TensorKind::CommBuffer);
        let mut codes = |name: &str, rows: u64, there: bool| {
            there.then(|| {
                let scales = h.div_ceil(FP8_BLOCK);
                let codes = some(&format!("{name}_codes"), rows, h, Dtype::U8, comm);
                [codes, some(&format!("{name}_scales"), rows, scales, Dtype::F32, comm)]
            })
        };
        let leaving_codes = codes("leaving", self.leaving(), self.fp8_rows);
        let landed_codes = codes("landed", self.landed, self.fp8_rows);
        let station =
            |some: &mut dyn FnMut(&str, u64, u64, Dtype, TensorKind) -> Buf, name: &str, rows, layout: Layout| {
                let width = if layout.by_choice() { 1 } else { self.topk };
                Station {
                    rows: some(&format!("{name}_rows"), rows, h, self.dtype, comm),
                    choices: some(&format!("{name}_choices"), rows, width, self.acc, comm),
                }
            };
        let copied = away && self.algo.source() == Layout::Copies;
        let leaving = copied.then(|| station(&mut some, "leaving", self.copies, Layout::Copies));
        let landed = away.then(|| station(&mut some, "landed", self.landed, self.algo.landed()));
        let (acc, widths) = (self.grads, [self.gate_up, self.down].map(|rows| self.of_slot(rows)));
        let sums = self.sums.map(|Sums { slots, copies, .. }| {
            [("up", widths[0]), ("down", widths[1])].map(|(name, width)| SumRows {
                landed: some(&format!("grad_slots_{name}"), slots, width, acc, comm),
                copies: some(&format!("grad_copies_{name}"), copies, width, acc, comm),
                total: some(&format!("grad_total_{name}"), slots, width, acc, work),
            })
        });
        Scratch {
            sums,
            shadow,
            gates: some("gates", self.tokens, self.topk, self.acc, work),
            d_gates: some("d_gates", self.tokens, self.topk, self.acc, work),
            d_logits: some("d_logits", self.tokens, self.experts, self.acc, work),
            leaving,
            codes: leaving_codes,
            landed,
            landed_codes,
            x: self.keeps_codes.then(|| some("expert_x", self.rows, h, self.dtype, work)),
            gate_up: self.rounds_gate_up.then(|| some("expert_gate_up", self.rows, self.wide(), self.dtype, work)),
            act: self.act_again.then(|| some("expert_act", self.rows, self.ffn, self.dtype, work)),
            y: some("expert_y", self.rows, h, self.dtype, work),
            d_act: some("expert_d_act", self.rows, self.ffn, self.dtype, work),
            d_gate_up: some("expert_d_gate_up", self.rows, self.wide(), self.dtype, work),
            d_weighs: some("expert_d_weighs", self.rows, 1, self.acc, work),
            squeezed: self.squeezes().then(|| {
                let mut room = |name: &str| some(name, self.tokens, h, self.dtype, work);
                [room("squeezed"), room("d_squeezed")]
            }),
        }
    }
}
