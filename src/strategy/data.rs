//! Data parallelism: gradients are summed over every rank that holds the same weights, which are the
//! data and the sequence ranks alike. ZeRO (Rajbhandari et al., arXiv:1910.02054) shares out among them
//!
//! 1. the optimizer state: the sum is scattered, each rank runs Adam on its share and gathers the new weights
//!    (with `all-reduce-grads` every rank has the sum whole, as in DeepSpeed's pipelines, and takes its share of it);
//! 2. the gradients too: what a layer's backward pass adds up is scattered at once, in every microbatch, and
//!    added to the share;
//! 3. the weights too: a layer's are gathered before its forward and again before its backward pass, one layer
//!    ahead of compute, as PyTorch's FSDP does (arXiv:2304.11277). A bucket is a layer.
//!
//! In a pipeline 2 and 3 do so for every microbatch that passes a stage, as FSDP does where it is told to reshard
//! always. Megatron-LM's distributed optimizer and DeepSpeed's pipelines are stage 1 there (DeepSpeed's engine refuses
//! the others). PyTorch's pipeline schedules, and TorchTitan by default, keep weights gathered and gradients whole from
//! the first microbatch to the last: they send and hold what stage 1 does. With `no-sync` gradients alone add up whole
//! until the last microbatch, as under FSDP's `no_sync`.
//! Experts are shared out in the same way among the ranks that hold the same ones.
//!
//! Each of them may be among `shard-N` neighbouring ranks only (hybrid sharding: FSDP's HYBRID_SHARD; MiCS, Zhang et al.,
//! arXiv:2205.00119, whose two-hop sums these are): weights are gathered and gradients scattered in a group of N in every
//! microbatch, and a share's sum goes on over the groups once a step, as soon as it is whole.
//!
//! With any of them the optimizer state may be in the host's memory (ZeRO-Offload, Ren et al., arXiv:2101.06840): summed
//! gradients are copied there, the CPU runs Adam once it has all of them, as it would where it clips them, and every new
//! weight is copied back as it is there.

mod adam;

pub use adam::Sweep;

use super::weights::Rows;
use crate::plan::muon::{Matrices, Part};
use crate::plan::rows::EXPERT_VIEW;
use crate::plan::{
    Axis, Buf, Builder, CollectiveKind, Dtype, Engine, Group, Kernel, Master, TensorKind, Toward, Via, Wire,
};

/// A flat tensor of weights (a slot a layer) with what the optimizer keeps for it.
#[derive(Clone, Copy)]
pub struct FlatWeights {
    pub weight: Buf,
    pub grad: Buf,
    /// This rank's share of the summed gradient; the gradient itself without sharding.
    grad_share: Buf,
    /// The copy that the optimizer updates in place of the weights: in fp32, of the rank's share of them, where they
    /// are of fewer bits or sharded; without master copies, the share itself. `None`: the optimizer updates the
    /// weights.
    master: Option<Buf>,
    m: Buf,
    /// Second moments; `None` where Muon updates and nothing is left to Adam.
    v: Option<Buf>,
    /// What Adam divides by, where it goes operation by operation through all weights; `None`: it is in one kernel.
    divisor: Option<Buf>,
    /// The share of the new weights, which is sent to everyone; with ZeRO 3 it is all that a rank keeps of them.
    weight_share: Option<Buf>,
    /// The sum of one microbatch, to be added to the share; `None`: it lands in the share at once.
    partial: Option<Buf>,
    /// Where gathered weights come in, to be copied from there; and where gradients are copied to, to leave from there.
    /// `None`: they come in and leave where kernels use them.
    pub landing: Option<Buf>,
    pub leaving: Option<Buf>,
    /// The format in which it is gathered.
    wire: Wire,
    /// The summed gradient, and the new weights, in the host's memory; `None` where the optimizer is on the device.
    away: Option<[Buf; 2]>,
    /// Elements of a slot, padded to the ranks that share it.
    pub elems: u64,
    share: u64,
    slots: u32,
}

/// The ranks that hold the same weights, and how they share the work of keeping them.
pub struct DataParallel {
    pub group: Group,
    pub ranks: u64,
    /// The groups of ranks within which weights and gradients are shared out, the groups having copies of each other;
    /// `None`: all ranks share out among themselves.
    pub hybrid: Option<Hybrid>,
    pub zero: u32,
    /// Whether a step has several microbatches.
    pub accumulate: bool,
    /// Whether gradients add up whole, and are shared out only behind the last microbatch.
    pub no_sync: bool,
    /// Whether gathered weights come in, and gradients leave, by buffers of their own, to and from which they are
    /// copied.
    pub copies: bool,
    /// Whether weights of products in FP8 are gathered as such.
    pub gather_fp8: bool,
    /// Whether, with stage 1, gradients are summed whole on every rank.
    pub all_reduce: bool,
    /// Whether, with stage 1, new weights are gathered before the next step needs them, and not behind the optimizer.
    pub gathers_ahead: bool,
    /// Whether the CPU runs the optimizer.
    pub offload: bool,
    /// Whether Adam goes operation by operation through all weights.
    pub foreach: bool,
    pub dtype: Dtype,
    /// Dtype of optimizer state.
    pub acc: Dtype,
    /// Dtype of gradients, and of their sums over the ranks.
    pub grads: Dtype,
    /// Dtype of Adam's moments.
    pub moments: Dtype,
    /// Whether weights are updated as they are kept, without a master copy.
    pub no_master: bool,
    pub engine: Engine,
}

/// Groups of ranks that share weights and gradients out among themselves.
pub struct Hybrid {
    pub within: Group,
    pub ranks: u64,
    /// The ranks that have the same share, one in each group.
    pub across: Group,
}

impl Hybrid {
    /// Groups in a view whose axes are stages, groups, ranks of a group and whatever else there is.
    pub fn of_view(view: u8, ranks: u32) -> Hybrid {
        let axes = |axis| Group::Axes { view, axes: vec![axis] };
        Hybrid { within: axes(Axis::Shard), ranks: ranks.into(), across: axes(Axis::Dp) }
    }
}

impl DataParallel {
    /// The ranks that hold the same weights outside of experts.
    pub fn replicas() -> Group {
        Group::axes(&[Axis::Dp, Axis::Cp, Axis::Up])
    }

    /// The ranks that hold the same experts.
    pub fn expert_replicas() -> Group {
        Group::Axes { view: EXPERT_VIEW, axes: vec![Axis::Edp] }
    }

    fn sharded(&self) -> bool {
        self.zero >= 1 && self.sharing() > 1
    }

    /// Number of ranks that share something out among themselves.
    fn sharing(&self) -> u64 {
        self.hybrid.as_ref().map_or(self.ranks, |hybrid| hybrid.ranks)
    }

    fn within(&self) -> &Group {
        self.hybrid.as_ref().map_or(&self.group, |hybrid| &hybrid.within)
    }

    /// Whether gradients are whole only while a layer's backward pass adds to them.
    pub fn shares_gradients(&self) -> bool {
        self.sharded() && self.zero >= 2 && !self.no_sync
    }

    /// Whether every rank has the summed gradients whole, and takes its share of them for the optimizer.
    fn sums_whole(&self) -> bool {
        self.sharded() && self.all_reduce
    }

    /// Whether weights are whole only while they are used.
    pub fn shares_weights(&self) -> bool {
        self.sharded() && self.zero >= 3
    }

    /// Whether what a rank keeps of the weights from step to step is its share of them.
    fn keeps_share(&self) -> bool {
        self.shares_weights() || self.sharded() && self.gathers_ahead
    }

    /// Whether a rank's share of the weights is made of its master copy, ahead of a step, and is no more once they are gathered: as
    /// Megatron has its share within the whole. Without a copy of it on the device the share is kept.
    fn casts_ahead(&self) -> bool {
        self.sharded() && self.gathers_ahead && !self.shares_weights() && !self.no_master && !self.offload
    }

    /// Whether weights or gradients come and go layer by layer.
    pub fn by_layers(&self) -> bool {
        self.shares_gradients() || self.shares_weights()
    }

    /// Whether sums of several microbatches are added up in the shares.
    pub fn accumulates(&self) -> bool {
        self.shares_gradients() && self.accumulate
    }

    /// Dtype of a gradient's share: sums of microbatches are added up in the optimizer's dtype, whatever they travel in
    /// (PyTorch's FSDP2 casts what its reduce-scatter gives before it adds it).
    pub fn of_share(&self) -> Dtype {
        if self.accumulates() { self.acc } else { self.grads }
    }

    /// Declares `slots` flat weights of `elems` elements, their gradients and their optimizer state; for weights or
    /// gradients that are whole only for a while there is room for `whole` of them.
    pub fn weights(&self, b: &mut Builder, name: &str, elems: u64, slots: u32, whole: u32) -> FlatWeights {
        self.weights_of(b, name, elems, [slots, whole], None, &[])
    }

    /// Number of ranks that optimizer state is shared out to.
    pub fn parts(&self) -> u64 {
        if self.sharded() { self.sharing() } else { 1 }
    }

    /// The part that a rank has of the optimizer of weights in which `matrices` stand.
    pub fn part(&self, elems: u64, matrices: Vec<Matrices>) -> Part {
        let share = elems.next_multiple_of(self.sharing()) / self.parts();
        Part::new(share, self.parts(), self.sharded().then(|| self.within().clone()), matrices)
    }

    /// What weights are gathered as into `whole`, of which products in FP8 read the rows `in_fp8`.
    fn wire(&self, b: &mut Builder, whole: Buf, in_fp8: &[Rows]) -> Wire {
        if !self.gather_fp8 || !self.sharded() || in_fp8.is_empty() {
            return self.dtype.into();
        }
        b.in_fp8(whole, in_fp8);
        Wire::Fp8
    }

    /// [`weights`](DataParallel::weights) with `[slots, whole]`. `others`: elements of a rank's share that have second
    /// moments; `None`: all. `in_fp8`: rows that products in FP8 read.
    pub fn weights_of(
        &self,
        b: &mut Builder,
        name: &str,
        elems: u64,
        [slots, whole]: [u32; 2],
        others: Option<u64>,
        in_fp8: &[Rows],
    ) -> FlatWeights {
        let elems = elems.next_multiple_of(self.sharing());
        let share = elems / self.parts();
        let mut some = |what: &str, elems, dtype, kind, slots| {
            let name = if b.keeps_names() { format!("{what}.{name}") } else { String::new() };
            b.tensor(&name, &[elems], dtype, kind, slots)
        };
        let used = self.in_use(whole);
        let weight = match self.shares_weights() {
            true => some("w", elems, self.dtype, TensorKind::CommBuffer, used),
            false => some("w", elems, self.dtype, TensorKind::Param, slots),
        };
        let grad = match self.shares_gradients() {
            true => some("g", elems, self.grads, TensorKind::Workspace, used),
            false => some("g", elems, self.grads, TensorKind::Grad, slots),
        };
        let mut between = |what, has: bool, dtype| {
            (self.copies && has).then(|| some(what, elems, dtype, TensorKind::CommBuffer, whole))
        };
        let landing = between("w_in", self.shares_weights(), self.dtype);
        let leaving = between("g_out", self.shares_gradients(), self.grads);
        let partial =
            self.accumulates().then(|| some("g_part", share, self.grads, TensorKind::CommBuffer, slots.min(2)));
        let wire = self.wire(b, landing.unwrap_or(weight), in_fp8);
        let mut state = |what: &str, elems, dtype| match self.offload {
            true => b.host_tensor(&format!("{what}.{name}"), &[elems], dtype, TensorKind::OptState, slots),
            false => b.tensor(&format!("{what}.{name}"), &[elems], dtype, TensorKind::OptState, slots),
        };
        let (first, second) = if others.is_some() { ("muon_m", "muon_v") } else { ("adam_m", "adam_v") };
        let m = state(first, share, self.moments);
        let others = others.unwrap_or(share);
        let v = (others > 0).then(|| state(second, others, self.moments));
        let keeps_master = !self.no_master && (self.sharded() || self.dtype != self.acc || self.offload);
        let master = keeps_master.then(|| state("master", share, self.acc));
        let away = self.offload.then(|| {
            let grad = b.host_tensor(&format!("g_host.{name}"), &[share], self.of_share(), TensorKind::Grad, slots);
            // One of two slots is copied back while the CPU writes the other.
            let kind = TensorKind::CommBuffer;
            [grad, b.host_tensor(&format!("w_host.{name}"), &[share], self.dtype, kind, slots.min(2))]
        });
        let mut flat =
            |what: &str, elems, dtype, kind| b.tensor(&format!("{what}.{name}"), &[elems], dtype, kind, slots);
        let kept = |keeps, kind| if keeps { kind } else { TensorKind::CommBuffer };
        let (grad_kind, weight_kind) = (
            kept(self.shares_gradients(), TensorKind::Grad),
            kept(self.keeps_share() && !self.casts_ahead(), TensorKind::Param),
        );
        let grad_share = if self.sharded() { flat("g_share", share, self.of_share(), grad_kind) } else { grad };
        // Without a master copy a rank keeps its share from step to step, and sends what it has updated.
        let weight_kind = if self.no_master { TensorKind::Param } else { weight_kind };
        let weight_share = self.sharded().then(|| flat("w_share", share, self.dtype, weight_kind));
        let master = if self.no_master { weight_share } else { master };
        let divisor = self.foreach.then(|| flat("adam_d", share, self.moments, TensorKind::Workspace));
        FlatWeights {
            weight,
            grad,
            grad_share,
            master,
            m,
            v,
            divisor,
            weight_share,
            partial,
            landing,
            leaving,
            wire,
            away,
            elems,
            share,
            slots,
        }
    }

    /// The buffer that layers are given their weights in: whole, or the share that they are gathered from one by one.
    pub fn given(&self, w: &FlatWeights) -> Buf {
        w.weight_share.filter(|_| self.shares_weights()).unwrap_or(w.weight)
    }

    /// The buffer in which a rank keeps the weights from step to step: whole, or its share of them.
    pub fn stored(&self, w: &FlatWeights) -> Buf {
        let share = if self.casts_ahead() { w.master } else { w.weight_share };
        share.filter(|_| self.keeps_share()).unwrap_or(w.weight)
    }

    /// Layers whose weights, or gradients, are whole where kernels use them, of `whole` that there is room for: one
    /// where they are copied there, the others being in the buffers by which they come and go.
    pub fn in_use(&self, whole: u32) -> u32 {
        if self.copies { 1 } else { whole }
    }

    /// Copies gathered weights to where kernels read them, if they came elsewhere: `foreach_all_gather_copy_out` of PyTorch's
    /// torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, in the stream of compute.
    pub fn copy_out(&self, b: &mut Builder, label: &str, w: &FlatWeights, landing: Buf, whole: Buf) {
        b.compute(label, Kernel::Cast { elems: w.elems }, &[landing], &[whole]);
    }

    /// Sums a gradient over the ranks, out of the buffer that it leaves from if it does not leave from where it is
    /// (`foreach_reduce_scatter_copy_in`, there).
    pub fn scatter(
        &self,
        b: &mut Builder,
        label: &str,
        w: &FlatWeights,
        [grad, share]: [Buf; 2],
        leaving: Option<Buf>,
    ) {
        if let Some(leaving) = leaving {
            let name = if b.keeps_names() { format!("copy_in.{label}") } else { String::new() };
            b.compute(&name, Kernel::Cast { elems: w.elems }, &[grad], &[leaving]);
        }
        self.sync(b, label, leaving.unwrap_or(grad), share);
    }

    /// Gathers a slot of weights, which makes it whole.
    pub fn gather(&self, b: &mut Builder, label: &str, w: &FlatWeights, [share, whole]: [Buf; 2]) {
        b.gather(label, self.via(self.within()), share, whole, w.wire, self.dtype);
    }

    /// Sets a gradient to zero that is whole only for a while.
    pub fn clear(&self, b: &mut Builder, label: &str, w: &FlatWeights, grad: Buf) {
        b.compute(label, Kernel::Fill { elems: w.elems }, &[], &[grad]);
    }

    /// The buffer that a rank keeps of a gradient from one microbatch to the next.
    pub fn kept_gradient(&self, w: &FlatWeights) -> Buf {
        if self.shares_gradients() { w.grad_share } else { w.grad }
    }

    /// Elements of a slot of the kept gradient, to be set to zero; `None`: it is written once, and needs no zeros.
    pub fn begins_at_zero(&self, w: &FlatWeights) -> Option<u64> {
        match (self.shares_gradients(), self.accumulate) {
            (false, _) => Some(w.elems),
            (true, true) => Some(w.share),
            (true, false) => None,
        }
    }

    /// Adds the sum of a microbatch to the share.
    pub fn add(&self, b: &mut Builder, label: &str, w: &FlatWeights, partial: Buf, share: Buf) {
        b.compute(label, Kernel::Add { elems: w.share, trim: None }, &[share, partial], &[share]);
    }

    /// The buffer that receives the sum of one microbatch: the share itself where there is only one.
    pub fn partial_of(&self, w: &FlatWeights) -> Buf {
        w.partial.unwrap_or(w.grad_share)
    }

    /// The buffer that receives a layer's sum of one microbatch, and the slots that layers take in turns; `None`: every
    /// layer has a share of its own for it.
    pub fn partials(&self, w: &FlatWeights) -> Option<(Buf, u32)> {
        w.partial.map(|partial| (partial, w.slots.min(2)))
    }

    /// The master copies as the executor needs them to fill them.
    pub fn masters(&self, all: &[FlatWeights]) -> Vec<Master> {
        let group = self.sharded().then(|| self.within().clone());
        all.iter()
            .filter_map(|w| Some((w, w.master?)))
            .map(|(w, m)| Master {
                weight: self.stored(w).tensor(),
                master: m.tensor(),
                grad_share: w.grad_share.tensor(),
                group: group.clone(),
                shared: self.keeps_share(),
            })
            .collect()
    }

    /// Sums the gradient of one slot over the ranks that share its weights.
    pub fn sync(&self, b: &mut Builder, label: &str, grad: Buf, share: Buf) {
        if self.ranks == 1 {
            return;
        }
        let (group, kind, dst) = match self.sharded() && !self.sums_whole() {
            true => (self.within(), CollectiveKind::ReduceScatter, share),
            false => (&self.group, CollectiveKind::AllReduce, grad),
        };
        b.collective(label, self.via(group), kind, grad, dst, self.grads);
    }

    /// Sums a share of a gradient over the groups that have it, when it is the sum within a group.
    pub fn sum_across(&self, b: &mut Builder, label: &str, w: &FlatWeights, slot: u32) {
        if let Some(hybrid) = self.hybrid.as_ref().filter(|_| self.sharded()) {
            let share = w.grad_share.slot(slot);
            let name = if b.keeps_names() { format!("grad_sum_across.{label}") } else { String::new() };
            b.collective(&name, self.via(&hybrid.across), CollectiveKind::AllReduce, share, share, self.of_share());
        }
    }

    /// The buffer that receives this rank's share of a gradient sum.
    pub fn share_of(&self, w: &FlatWeights) -> Buf {
        w.grad_share
    }

    /// Sends the summed gradient of one slot to the host, where the CPU runs the optimizer; returns the op, or `None`.
    pub fn send(&self, b: &mut Builder, label: &str, w: &FlatWeights, slot: u32) -> Option<u32> {
        let [grad, _] = w.away?;
        let name = if b.keeps_names() { format!("g_to_host.{label}") } else { String::new() };
        Some(b.copy(&name, Toward::Host, w.grad_share.slot(slot), grad.slot(slot)))
    }

    /// What a rank keeps of weights that are made whole ahead of a step, and the share that they are gathered from; `None`: they
    /// are whole already, or come layer by layer.
    pub fn gathered_ahead(&self, w: &FlatWeights) -> Option<[Buf; 2]> {
        let share = w.weight_share.filter(|_| self.keeps_share() && !self.shares_weights());
        share.map(|share| [self.stored(w), share])
    }

    /// Makes a slot of weights whole ahead of a step.
    pub fn gather_ahead(&self, b: &mut Builder, label: &str, w: &FlatWeights, [kept, share, whole]: [Buf; 3]) {
        if kept != share {
            let name = if b.keeps_names() { format!("cast_share{label}") } else { String::new() };
            b.compute(&name, Kernel::Cast { elems: w.share }, &[kept], &[share]);
        }
        self.gather(b, &format!("all_gather{label}"), w, [share, whole]);
    }

    /// The weights with other buffers: `of` says which one stands for each that an update may touch.
    pub fn renamed(w: &FlatWeights, of: impl Fn(Buf) -> Buf) -> FlatWeights {
        FlatWeights {
            weight: of(w.weight),
            grad: of(w.grad),
            grad_share: of(w.grad_share),
            m: of(w.m),
            v: w.v.map(&of),
            divisor: w.divisor.map(&of),
            master: w.master.map(&of),
            weight_share: w.weight_share.map(&of),
            ..*w
        }
    }

    /// Takes the rank's share out of a gradient that was summed whole.
    pub fn own_gradient(&self, b: &mut Builder, label: &str, w: &FlatWeights, slot: u32) {
        if self.sums_whole() {
            let own = Kernel::OwnRows { rows: w.share, cols: 1, ranks: self.ranks, group: self.group.clone() };
            b.compute(label, own, &[w.grad.slot(slot)], &[w.grad_share.slot(slot)]);
        }
    }

    /// Gathers the shares of new weights where ranks keep them whole.
    pub fn gather_new(&self, b: &mut Builder, label: &str, w: &FlatWeights, slot: u32) {
        if let Some(share) = w.weight_share.filter(|_| !self.keeps_share()) {
            self.gather(b, label, w, [share.slot(slot), w.weight.slot(slot)]);
        }
    }

    /// The summed gradient and the momentum of a slot.
    pub fn momentum_of(&self, w: &FlatWeights, slot: u32) -> [Buf; 2] {
        [w.grad_share, w.m].map(|buf| buf.slot(slot))
    }

    /// Updates a slot by `kernel`, which is told `by` what matrices move.
    pub fn move_by(&self, b: &mut Builder, label: &str, w: &FlatWeights, slot: u32, kernel: Kernel, by: Buf) {
        let at = |buf: Buf| buf.slot(slot);
        let [old, new] = self.updated_weight(w).map(at);
        let mut writes = vec![old, at(w.m)];
        writes.extend(w.v.map(at));
        let reads: Vec<Buf> = [at(w.grad_share), by].into_iter().chain(writes.iter().copied()).collect();
        if new != old {
            writes.push(new);
        }
        b.compute(label, kernel, &reads, &writes);
    }

    /// Exchanges slices of as many slots as there are ranks for one whole slot, or back.
    pub fn exchange(&self, b: &mut Builder, label: &str, src: Buf, dst: Buf) {
        b.collective(label, self.via(self.within()), CollectiveKind::AllToAll, src, dst, self.dtype);
    }

    fn via<'g>(&self, group: &'g Group) -> Via<'g> {
        Via { group, index: 0, engine: self.engine }
    }

    /// Sums a scalar over all ranks.
    pub fn sum_scalar(&self, b: &mut Builder, label: &str, scalar: Buf, dtype: Dtype) {
        if self.ranks > 1 {
            b.collective(label, self.via(&self.group), CollectiveKind::AllReduce, scalar, scalar, dtype);
        }
    }
}
