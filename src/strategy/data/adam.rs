//! Adam on flat weights: in one kernel for each, on the device or by the CPU, or operation by operation through all of them
//! (see [`crate::plan::foreach`]).

use super::{DataParallel, FlatWeights};
use crate::plan::foreach::ForeachKernel;
use crate::plan::{Adam, Buf, Builder, Kernel, Toward};

/// What Adam does on its way through all weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    Whole,
    /// Moments, and what weights are divided by.
    Moments,
    /// The weights, once that is there for all of them.
    Move,
}

impl DataParallel {
    /// How often Adam goes through all weights, one sweep behind the other.
    pub fn sweeps(&self) -> &'static [Sweep] {
        if self.foreach { &[Sweep::Moments, Sweep::Move] } else { &[Sweep::Whole] }
    }

    /// The buffers that a sweep touches in a slot of the weights, by name, one after the other; not for an optimizer on the
    /// CPU.
    pub fn updated(&self, w: &FlatWeights, sweep: Sweep) -> Vec<(&'static str, Buf)> {
        let (makes, moves) = (sweep != Sweep::Move, sweep != Sweep::Moments);
        let mut all = vec![];
        all.extend(makes.then_some(("g_share", w.grad_share)));
        all.push(("adam_m", w.m));
        all.extend(w.v.filter(|_| makes).map(|v| ("adam_v", v)));
        all.extend(w.divisor.map(|divisor| ("adam_d", divisor)));
        all.extend((makes && self.sums_whole()).then_some(("g", w.grad)));
        if moves {
            all.extend(w.master.filter(|_| !self.no_master).map(|master| ("master", master)));
            all.extend(w.weight_share.filter(|_| !self.casts_ahead()).map(|share| ("w_share", share)));
            if w.weight_share.is_none() || !self.keeps_share() {
                all.push(("w", w.weight));
            }
        }
        all
    }

    /// Does a sweep's part of Adam on one slot, and gathers what it wrote unless the next step does; the ops are named after `label`
    /// unless that is empty.
    pub fn update(&self, b: &mut Builder, label: &str, w: &FlatWeights, slot: u32, adam: Adam, sweep: Sweep) {
        let at = |buf: Buf| buf.slot(slot);
        let [m, v] = moments(w).map(at);
        if sweep != Sweep::Move {
            self.own_gradient(b, &named(b, "own_grad", label), w, slot);
        }
        let gradient = at(w.grad_share);
        let divisor = || at(w.divisor.expect("Adam in two kernels has what it divides by between them"));
        let [old, new] = self.updated_weight(w).map(at);
        // Weights that the optimizer updates itself have no other copy to be written.
        let cast = (new != old).then_some(new);
        let (kernel, reads, mut writes) = match sweep {
            Sweep::Whole => (whole(w, adam), vec![gradient, old, m, v], vec![old, m, v]),
            Sweep::Moments => {
                let kernel = Kernel::Foreach(ForeachKernel::Moments { elems: w.share, adam });
                (kernel, vec![gradient, m, v], vec![m, v, divisor()])
            }
            Sweep::Move => {
                let kernel = Kernel::Foreach(ForeachKernel::Move { elems: w.share, adam });
                (kernel, vec![old, m, divisor()], vec![old])
            }
        };
        writes.extend(cast.filter(|_| sweep != Sweep::Moments));
        let name = named(b, kernel.name(), label);
        b.compute(&name, kernel, &reads, &writes);
        if sweep != Sweep::Moments {
            self.gather_new(b, &named(b, "all_gather", label), w, slot);
        }
    }

    /// Has the CPU run Adam on one slot behind the op `after`, and gathers what it wrote.
    pub fn update_on_host(
        &self,
        b: &mut Builder,
        label: &str,
        w: &FlatWeights,
        slot: u32,
        adam: Adam,
        after: Option<u32>,
    ) {
        let Some([grad, weight]) = w.away else { return };
        let at = |buf: Buf| buf.slot(slot);
        let ([m, v], [old, new], weight) = (moments(w).map(at), self.updated_weight(w).map(at), weight.slot(slot % 2));
        self.own_gradient(b, &named(b, "own_grad", label), w, slot);
        let name = named(b, "adam", label);
        let op = b.host_compute(&name, whole(w, adam), &[at(grad), old, m, v], &[old, m, v, weight]);
        after.into_iter().for_each(|earlier| b.after(op, earlier));
        b.copy(&named(b, "w_from_host", label), Toward::Device, weight, new);
        self.gather_new(b, &named(b, "all_gather", label), w, slot);
    }

    /// The weights that the optimizer updates, and those that it writes them to for others; the same where it leaves that to the
    /// next step.
    pub(super) fn updated_weight(&self, w: &FlatWeights) -> [Buf; 2] {
        let updated = w.master.unwrap_or(w.weight);
        [updated, if self.casts_ahead() { updated } else { w.weight_share.unwrap_or(w.weight) }]
    }
}

/// Adam in one kernel.
fn whole(w: &FlatWeights, adam: Adam) -> Kernel {
    let Adam { lr, beta1, beta2, eps, weight_decay } = adam;
    Kernel::Adam { elems: w.share, lr, beta1, beta2, eps, weight_decay }
}

fn moments(w: &FlatWeights) -> [Buf; 2] {
    [w.m, w.v.expect("Adam keeps second moments of all")]
}

fn named(b: &Builder, what: &str, label: &str) -> String {
    match (b.keeps_names(), label) {
        (false, _) => String::new(),
        (true, "") => what.into(),
        (true, label) => format!("{what}.{label}"),
    }
}
