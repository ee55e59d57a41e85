//! How long kernels take.

use super::sheet::Act;
use super::{Acts, picoseconds};
use crate::device::OnSms;
use crate::plan::link::Line;
use crate::plan::*;
use crate::spec::Provenance;

/// A kernel's time, as it is remembered; the duration in ps.
#[derive(Clone, Copy)]
pub(super) struct Timed {
    pub(super) duration: u64,
    pub(super) on_sms: OnSms,
    pub(super) provenance: Provenance,
    pub(super) rel_sd: f64,
}

impl Timed {
    pub(super) fn act(self) -> Act {
        Act::Compute { duration: self.duration, on_sms: self.on_sms }
    }
}

/// Bytes of an op's operands, kept off the heap unless there are many of them, for there are millions of ops.
pub(super) struct Sizes {
    few: [u64; Self::FEW],
    /// The bytes of all operands where there are more than `FEW`, else empty: KV gathered head by head is a buffer for
    /// each head.
    many: Vec<u64>,
    reads: usize,
    count: usize,
}

impl Sizes {
    const FEW: usize = 12;

    /// The bytes of `count` operands, the first `reads` of which are read.
    pub(super) fn new(reads: usize, count: usize, each: impl Iterator<Item = u64>) -> Sizes {
        let mut sizes = Sizes { few: [0; Self::FEW], many: vec![], reads, count };
        if count > Self::FEW {
            sizes.many.extend(each);
        } else {
            sizes.few.iter_mut().zip(each).for_each(|(size, bytes)| *size = bytes);
        }
        sizes
    }

    /// The bytes of the operands that are read, and of those that are written.
    pub(super) fn split(&self) -> (&[u64], &[u64]) {
        let all = if self.many.is_empty() { &self.few[..self.count] } else { &self.many };
        all.split_at(self.reads)
    }
}

/// The operands' sizes, and the dtype that the kernel computes in: that of the narrowest operand, which is what
/// the tensor cores are fed.
pub(super) fn operands(plan: &Plan, line: &Line, node: usize) -> (Sizes, Dtype) {
    let (reads, writes) = (line.reads(node), line.writes(node));
    let places = || reads.iter().chain(writes);
    let sizes = Sizes::new(reads.len(), reads.len() + writes.len(), places().map(|place| place.bytes(plan)));
    (sizes, narrowest(plan, places().map(|place| place.tensor)))
}

/// The narrowest dtype of tensors of numbers: ids and codes do not count.
pub(super) fn narrowest(plan: &Plan, tensors: impl Iterator<Item = TensorId>) -> Dtype {
    let dtypes = tensors.map(|tensor| plan.tensors[tensor as usize].dtype);
    let numbers = dtypes.filter(|dtype| !matches!(dtype, Dtype::U32 | Dtype::U8));
    numbers.fold(Dtype::F64, |least, own| if own.size() < least.size() { own } else { least })
}

/// The work of a kernel on `rank`, and the dtype that it computes in; `None` for an op that is no kernel, or that the
/// mask leaves nothing of.
pub fn work_of(plan: &Plan, line: &Line, node: usize, rank: u32) -> Option<(Work, Dtype)> {
    let OpKind::Compute { kernel, .. } = &line.nodes[node].op.kind else { return None };
    let (sizes, dtype) = operands(plan, line, node);
    let (reads, writes) = sizes.split();
    if let Some(routed) = kernel.routed() {
        let route = plan.route_of(routed.route, rank);
        return Some((routed.work(route, &plan.views, rank, reads, writes), dtype));
    }
    Some((kernel.work(&plan.views, rank, reads, writes)?, dtype))
}

impl Acts<'_> {
    /// Tells `each` of every class its FLOPs and time of a kernel, except for classes whose mask leaves nothing.
    pub(super) fn kernel(
        &mut self,
        line: &Line,
        node: usize,
        kernel: &Kernel,
        classes: &[usize],
        mut each: impl FnMut(usize, u64, Timed),
    ) {
        let (sizes, dtype) = operands(self.plan, line, node);
        let (reads, writes) = sizes.split();
        let views = &self.plan.views;
        if let Some(routed) = kernel.routed() {
            // Each class has other rows.
            for &class in classes {
                let rank = self.fold.representatives[class];
                let work = routed.work(self.plan.route_of(routed.route, rank), views, rank, reads, writes);
                let timed = self.timed(kernel.curve(), work, dtype);
                each(class, work.flops, timed);
            }
            return;
        }
        let Some(block) = kernel.mask() else {
            let Some(&first) = classes.first() else { return };
            let work = kernel.work(views, self.fold.representatives[first], reads, writes);
            let timed = self.timed(kernel.curve(), work.expect("only a mask leaves nothing"), dtype);
            classes.iter().for_each(|&class| each(class, work.map_or(0, |w| w.flops), timed));
            return;
        };
        let shapes = self.positions.shapes(block, views, &self.fold.representatives);
        for &class in classes.iter().filter(|&&c| shapes[c].area > 0) {
            let work = kernel.masked_work(block, shapes[class], views, reads, writes);
            let timed = self.timed(kernel.curve(), work, dtype);
            each(class, work.flops, timed);
        }
    }

    pub(super) fn timed(&mut self, curve: &'static str, work: Work, dtype: Dtype) -> Timed {
        let kernels = self.machine.kernels;
        *self.known.kernels.entry((curve, work, dtype)).or_insert_with(|| {
            let t = kernels.time_as(curve, &work, dtype);
            let duration = picoseconds(t.seconds);
            Timed { duration, on_sms: t.on_sms, provenance: t.provenance, rel_sd: t.rel_sd }
        })
    }
}
