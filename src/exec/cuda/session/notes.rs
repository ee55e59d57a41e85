//! What is kept of a step, copied aside while it runs: gradients, hidden states and logits are overwritten before its end.

use super::super::device::{Device, StreamId};
use super::super::prepare::OpAt;
use super::super::script::Command;
use super::Session;
use crate::error::Result;
use crate::exec::arena::Data;
use crate::plan::OpKind;
use crate::plan::memory::SlotId;
use rustc_hash::FxHashMap;

/// Where what is kept of a step is copied to, by rank.
#[derive(Default)]
pub(super) struct Notes {
    /// Addresses of slots' contents, by rank, slot and life.
    slots: FxHashMap<(u32, SlotId, u32), u64>,
    /// Addresses of logits, by rank and the node of the loss.
    logits: FxHashMap<(u32, u32), u64>,
}

impl<D: Device> Session<'_, '_, D> {
    /// Asks for the memory of what is to be kept of the step, before its first command: later that could wait for the
    /// GPU.
    pub(super) fn make_room(&mut self) -> Result<()> {
        for command in &self.script.commands {
            match *command {
                Command::Keep { rank, node, slot, .. } if self.keep.all => {
                    let key = (rank, slot, self.life(rank, node, slot));
                    if !self.notes.slots.contains_key(&key) {
                        let bytes = self.linked.plan.tensors[slot.tensor as usize].bytes();
                        let at = self.device.allocate(self.gpus[rank as usize], bytes)?;
                        self.notes.slots.insert(key, at);
                    }
                }
                Command::Kernel { rank, node, .. } if self.keeps_logits(rank, node) => {
                    let region = self.linked.region(rank, &self.linked.line(rank).reads(node as usize)[0]);
                    let bytes = region.bytes.end - region.bytes.start;
                    let at = self.device.allocate(self.gpus[rank as usize], bytes)?;
                    self.notes.logits.insert((rank, node), at);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The number of the life of a slot that `node` writes in.
    fn life(&self, rank: u32, node: u32, slot: SlotId) -> u32 {
        let lives = &self.lives[self.linked.plan.program_of(rank) as usize];
        lives[slot.tensor as usize][slot.slot as usize].partition_point(|l| l.first <= node) as u32
    }

    /// Whether a kernel's logits are wanted and have no memory yet.
    fn keeps_logits(&self, rank: u32, node: u32) -> bool {
        self.keep.logits && !self.notes.logits.contains_key(&(rank, node)) && self.has_logits(rank, node)
    }

    fn has_logits(&self, rank: u32, node: u32) -> bool {
        let kind = &self.linked.line(rank).nodes[node as usize].op.kind;
        matches!(kind, OpKind::Compute { kernel, .. } if kernel.takes_logits())
    }

    /// Copies what `node` has written of a slot aside, in its stream's order: a host that waited here could keep ranks in
    /// other processes from what this one waits for.
    pub(super) fn note(&mut self, stream: StreamId, (rank, node): OpAt, slot: SlotId) -> Result<()> {
        if !self.keep.all {
            return Ok(());
        }
        let at = self.notes.slots[&(rank, slot, self.life(rank, node, slot))];
        let begin = self.bases[rank as usize] + self.offset(rank, slot)?;
        let line = self.linked.line(rank);
        for place in line.writes(node as usize).iter().filter(|p| (p.tensor, p.slot) == (slot.tensor, slot.slot)) {
            let (from, bytes) = self.address(&self.linked.region(rank, place));
            self.device.copy(stream, at + (from - begin), from, bytes)?;
        }
        Ok(())
    }

    /// Copies logits aside before they become their own gradient.
    pub(super) fn note_logits(&mut self, stream: StreamId, (rank, node): OpAt) -> Result<()> {
        if !self.keep.logits || !self.has_logits(rank, node) {
            return Ok(());
        }
        let region = self.linked.region(rank, &self.linked.line(rank).reads(node as usize)[0]);
        let (from, bytes) = self.address(&region);
        self.device.copy(stream, self.notes.logits[&(rank, node)], from, bytes)
    }

    /// The contents that were copied aside of a rank's slots, life after life.
    pub(super) fn noted(&mut self, rank: u32) -> Result<FxHashMap<SlotId, Vec<Data>>> {
        let mut seen: FxHashMap<SlotId, Vec<Data>> = FxHashMap::default();
        if !self.keep.all {
            return Ok(seen);
        }
        let mut own: Vec<_> =
            self.notes.slots.iter().filter(|(key, _)| key.0 == rank).map(|(k, at)| (*k, *at)).collect();
        own.sort_unstable_by_key(|((_, slot, life), _)| (slot.tensor, slot.slot, *life));
        for ((_, slot, _), at) in own {
            let tensor = &self.linked.plan.tensors[slot.tensor as usize];
            let bytes = self.device.read(self.gpus[rank as usize], at, tensor.bytes())?;
            seen.entry(slot).or_default().push(Data::from_bytes(&bytes, tensor.dtype));
        }
        Ok(seen)
    }

    pub(super) fn noted_logits(&mut self, rank: u32) -> Result<Vec<Data>> {
        if !self.keep.logits {
            return Ok(vec![]);
        }
        let mut own: Vec<_> =
            self.notes.logits.iter().filter(|(key, _)| key.0 == rank).map(|(k, at)| (k.1, *at)).collect();
        own.sort_unstable();
        let mut all = vec![];
        for (node, at) in own {
            let region = self.linked.region(rank, &self.linked.line(rank).reads(node as usize)[0]);
            let bytes = self.device.read(self.gpus[rank as usize], at, region.bytes.end - region.bytes.start)?;
            all.push(Data::from_bytes(&bytes, region.dtype));
        }
        Ok(all)
    }
}
