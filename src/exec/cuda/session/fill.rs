//! What memory holds where a step is timed and nobody looks at what it computes. A GPU's power, and by it the clocks, depends
//! on the numbers that are multiplied: zeros, or rows that are all alike, are faster than work is.

use super::super::device::{Device, StreamId};
use super::super::run::random_bf16;
use super::Session;
use crate::error::Result;
use crate::exec::arena::Data;
use crate::exec::inputs;
use crate::plan::link::{Line, Place};
use crate::plan::memory::SlotId;
use crate::plan::{CollectiveKind, Dtype, OpKind, Plan, TensorId, TensorKind};
use std::collections::BTreeSet;
use std::ops::Range;

impl<D: Device> Session<'_, '_, D> {
    /// Fills a rank's memory with random numbers of the size that they have in training, at its start: what others would
    /// send is between -1 and 1, weights and the optimizer's copies of them have a standard deviation of 0.018, scales of
    /// norms are one, moments are positive. Were weights of one sign, as moments are, columns of a product would be nearly
    /// alike: forward products of an H200 took 6 % less time then in the median, and up to 14 %.
    pub fn fill_as_in_training(&mut self, rank: u32) -> Result<()> {
        let plan = self.linked.plan;
        let layout = &self.linked.layouts[plan.program_of(rank) as usize];
        let [numbers, weights, sixteenths] = {
            let random = random_bf16(BLOCK, u64::from(rank) + 1);
            [random.clone(), smaller(random.clone(), 5), smaller(random, 4)]
        };
        let positive: Vec<u8> = sixteenths.chunks(2).flat_map(|b| [b[0], b[1] & 0x7f]).collect();
        // Codes of E4M3 without the two that are no number, in either byte.
        let codes: Vec<u8> = numbers.iter().map(|byte| byte & 0xf7).collect();
        let (gpu, base) = (self.gpus[rank as usize], self.bases[rank as usize]);
        let stream = self.device.stream(gpu)?;
        self.repeat((gpu, stream), base..base + layout.bytes, &numbers)?;
        let is_master = |t: u32| plan.masters.iter().any(|m| m.master == t);
        let (incoming, gathered) = (self.linked.incoming, gathered(plan, self.linked.line(rank)));
        for (t, tensor) in (0..).zip(&plan.tensors) {
            let with = match tensor.kind {
                TensorKind::OptState if !is_master(t) => &positive,
                TensorKind::OptState | TensorKind::Param => &weights,
                _ if gathered.contains(&t) => &weights,
                _ if tensor.dtype == Dtype::U8 => &codes,
                _ => continue,
            };
            let come = |at: SlotId| incoming.and_then(|incoming| incoming.places.get(&at).copied());
            let slots = (0..tensor.slots).map(|slot| SlotId { tensor: t, slot });
            for at in slots.flat_map(|at| [layout.offset(at), come(at)]).flatten() {
                self.repeat((gpu, stream), base + at..base + at + tensor.bytes(), with)?;
            }
        }
        for (at, elems) in inputs::scales_of_norms(plan, rank) {
            let Some(offset) = layout.offset(at) else { continue };
            let dtype = plan.tensors[at.tensor as usize].dtype;
            let ones = Data::from_f64(&vec![1.0; (elems.end - elems.start) as usize], dtype);
            self.device.write(gpu, base + offset + elems.start * dtype.size(), ones.to_bytes())?;
        }
        Ok(())
    }

    /// Fills memory with `block` again and again; all copies but the first are made on the GPU, of the first.
    fn repeat(&mut self, (gpu, stream): (u32, StreamId), at: Range<u64>, block: &[u8]) -> Result<()> {
        let bytes = at.end - at.start;
        let mut done = bytes.min(block.len() as u64);
        self.device.write(gpu, at.start, &block[..done as usize])?;
        while done < bytes {
            let more = done.min(bytes - done);
            self.device.copy(stream, at.start + done, at.start, more)?;
            done += more;
        }
        self.device.synchronize()
    }
}

/// Tensors that other ranks' weights are gathered into.
fn gathered(plan: &Plan, line: &Line) -> BTreeSet<TensorId> {
    let is_param = |place: &Place| plan.tensors[place.tensor as usize].kind == TensorKind::Param;
    let nodes = (0..line.nodes.len()).filter(|&node| {
        matches!(line.nodes[node].op.kind, OpKind::Collective { kind: CollectiveKind::AllGather, .. })
            && line.reads(node).iter().all(is_param)
    });
    nodes.flat_map(|node| line.writes(node)).map(|place| place.tensor).collect()
}

/// bf16 numbers divided by a power of two: the exponent of each is lowered by `halvings`; what is too small becomes 0.
fn smaller(mut bf16: Vec<u8>, halvings: u16) -> Vec<u8> {
    for pair in bf16.chunks_exact_mut(2) {
        let bits = u16::from_le_bytes([pair[0], pair[1]]);
        let less = if bits & 0x7f80 > halvings << 7 { bits - (halvings << 7) } else { 0 };
        pair.copy_from_slice(&less.to_le_bytes());
    }
    bf16
}

/// Bytes of random numbers that memory is filled with again and again.
const BLOCK: u64 = 4 << 20;
