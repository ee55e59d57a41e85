//! The way of rows to their experts and back: put in order, exchanged, put in order again.

use super::buffers::Scratch;
use super::{Ends, Experts};
use crate::plan::expert::{ExpertOp, Values};
use crate::plan::rows::EXPERT_VIEW;
use crate::plan::{Axis, Buf, Builder, Group, Layout, OpKind, Phase, Wire};

impl Experts {
    pub(super) fn exchange(&self, b: &mut Builder, label: &str, phase: Phase, src: &[Buf], dst: &[Buf]) {
        let wire = if self.fp8_rows && phase != Phase::Combine { Wire::Fp8 } else { Wire::Plain(self.dtype) };
        let (src, dst) = (src.to_vec(), dst.to_vec());
        let (algo, acc, engine) = (self.algo, self.acc, self.engine);
        let group = Group::Axes { view: EXPERT_VIEW, axes: vec![Axis::Ep] };
        b.exchange(label, &group, 0, OpKind::Exchange { route: self.route, src, dst, algo, phase, wire, acc, engine });
    }

    /// Brings rows of tokens, with `choices` also a number for each of their choices, to the experts that they chose;
    /// `landed_codes`: where rows that travel in FP8 arrive.
    pub(super) fn to_experts(
        &self,
        b: &mut Builder,
        s: &Scratch,
        phase: Phase,
        from: (Buf, Option<Buf>),
        (to, landed_codes): ((Buf, Buf), Option<[Buf; 2]>),
        beside: &mut dyn FnMut(&mut Builder),
    ) {
        // A dispatch whose layout is known is that of a backward pass.
        let backward = phase == Phase::CachedDispatch;
        let [name, label] = if backward { ["bwd_", "dispatch_bwd"] } else { ["", "dispatch"] };
        let (row, number) = (Values::Row { cols: self.hidden }, Values::Choice { topk: self.topk });
        let Some(landed) = s.landed else {
            let ends = Ends { from: Layout::Tokens, to: Layout::Experts, backward };
            self.pick(b, &format!("{name}expand"), ends, phase, from.0, to.0);
            if let Some(choices) = from.1 {
                self.put(b, &format!("{name}expand_weighs"), ends, number, &[choices], to.1);
            }
            return beside(b);
        };
        let (mut rows, mut choices) = from;
        if let Some(leaving) = s.leaving {
            let ends = Ends { from: Layout::Tokens, to: Layout::Copies, backward };
            self.pick(b, &format!("{name}copies"), ends, phase, rows, leaving.rows);
            if let Some(given) = choices {
                self.put(b, &format!("{name}copies_weighs"), ends, number, &[given], leaving.choices);
                choices = Some(leaving.choices);
            }
            rows = leaving.rows;
        }
        let (mut src, mut dst) = (vec![rows], vec![landed.rows]);
        if let (Some(codes), Some(landed)) = (s.codes, landed_codes) {
            let (layout, leaving, cols) = (self.algo.source(), self.leaving(), self.hidden);
            let op = ExpertOp::Quantise { layout, rows: leaving, cols, backward };
            self.kernel(b, &format!("{name}quantise"), op, &[rows], &codes);
            (src, dst) = (codes.to_vec(), landed.to_vec());
        }
        if let Some(choices) = choices {
            src.push(choices);
            dst.push(landed.choices);
        }
        self.exchange(b, label, phase, &src, &dst);
        beside(b);
        let ends = Ends { from: self.algo.landed(), to: Layout::Experts, backward };
        match landed_codes {
            Some(codes) => {
                let values = Values::Scaled { cols: self.hidden };
                self.put(b, &format!("{name}expand"), ends, values, &codes, to.0);
            }
            None => self.put(b, &format!("{name}expand"), ends, row, &[landed.rows], to.0),
        }
        if choices.is_some() {
            self.put(b, &format!("{name}expand_weighs"), ends, number, &[landed.choices], to.1);
        }
    }

    /// Brings rows of experts back to their tokens, where they are added up, and numbers of choices beside them.
    pub(super) fn to_tokens(
        &self,
        b: &mut Builder,
        s: &Scratch,
        backward: bool,
        from: (Buf, Option<Buf>),
        to: (Buf, Buf),
        beside: &mut dyn FnMut(&mut Builder),
    ) {
        let [name, label] = if backward { ["bwd_", "combine_bwd"] } else { ["", "combine"] };
        let (row, number) = (Values::Row { cols: self.hidden }, Values::Choice { topk: self.topk });
        let Some(landed) = s.landed else {
            let ends = Ends { from: Layout::Experts, to: Layout::Tokens, backward };
            self.pick(b, &format!("{name}sum"), ends, Phase::Combine, from.0, to.0);
            if let Some(choices) = from.1 {
                self.put(b, &format!("{name}sum_weighs"), ends, number, &[choices], to.1);
            }
            return beside(b);
        };
        let (rows, choices) = from;
        let ends = Ends { from: Layout::Experts, to: self.algo.landed(), backward };
        self.put(b, &format!("{name}gather"), ends, row, &[rows], landed.rows);
        let (mut src, mut dst) = (vec![landed.rows], vec![s.leaving.map_or(to.0, |leaving| leaving.rows)]);
        if let Some(given) = choices {
            self.put(b, &format!("{name}gather_weighs"), ends, number, &[given], landed.choices);
            src.push(landed.choices);
            dst.push(s.leaving.map_or(to.1, |leaving| leaving.choices));
        }
        self.exchange(b, label, Phase::Combine, &src, &dst);
        beside(b);
        if let Some(leaving) = s.leaving {
            let ends = Ends { from: Layout::Copies, to: Layout::Tokens, backward };
            self.pick(b, &format!("{name}sum"), ends, Phase::Combine, leaving.rows, to.0);
            if choices.is_some() {
                self.put(b, &format!("{name}sum_weighs"), ends, number, &[leaving.choices], to.1);
            }
        }
    }
}
