//! Memory read off the plan: who lives when, and where everything is put.
//!
//! A *life* of a slot runs from an op that writes it without reading it to its last use. Two slots may
//! share bytes only where edges of the plan order every life of one before or after every life of the
//! other, so that placing memory never changes timing. The executor allocates by this very placement.

mod bound;
mod conflicts;
mod families;
mod footprint;
mod gaps;
mod kept;
mod walk;

pub use bound::Bounds;
pub use conflicts::Conflicts;
pub use footprint::Footprint;
pub use kept::with_kept;
pub use walk::lives;

use super::link::AtomTable;
use super::op::*;
use super::program::Plan;
use crate::error::{Cause, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// Every place is a multiple of this, as CUDA's allocator has it.
pub const ALIGN: u64 = 256;

/// A slot of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId {
    pub tensor: TensorId,
    pub slot: u32,
}

/// One life of a slot: ops in program order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    pub first: u32,
    pub last: u32,
    /// Ops that touch it.
    pub uses: u32,
}

/// Where one rank keeps everything.
#[derive(Debug, Clone)]
pub struct Layout {
    pub footprint: Footprint,
    offsets: Vec<Vec<Option<u64>>>,
}

impl Deref for Layout {
    type Target = Footprint;

    fn deref(&self) -> &Footprint {
        &self.footprint
    }
}

impl Layout {
    /// The layout of a program.
    pub fn new(plan: &Plan, atoms: &AtomTable, program: u32) -> Result<Layout> {
        Layout::of(plan, &Conflicts::of(plan, atoms, program)?)
    }

    /// The layout of a program whose conflicts are known.
    pub fn of(plan: &Plan, conflicts: &Conflicts) -> Result<Layout> {
        let bytes = sizes(plan, conflicts)?;
        let mut offsets: Vec<Vec<Option<u64>>> = plan.tensors.iter().map(|t| vec![None; t.slots as usize]).collect();
        let mut bottom = 0;
        for at in inputs(plan, conflicts) {
            offsets[at.tensor as usize][at.slot as usize] = Some(bottom);
            bottom += size(plan, at);
        }
        let (device, host) = split(plan, conflicts, &bytes);
        let (placed, peak) = place(conflicts, &device, bottom);
        let (beside, host_bytes) =
            if host.iter().any(|&bytes| bytes > 0) { place(conflicts, &host, 0) } else { (vec![], 0) };
        for (i, at) in conflicts.slots.iter().enumerate() {
            let offset = if plan.tensors[at.tensor as usize].host { beside[i] } else { placed[i] };
            offsets[at.tensor as usize][at.slot as usize] = Some(offset);
        }
        let live_by_kind = fullest_moment(plan, conflicts, &device);
        let live: u64 = live_by_kind.iter().map(|(_, bytes)| bytes).sum();
        let footprint = Footprint { bytes: peak, host_bytes, live_by_kind, gaps: peak - live };
        Ok(Layout { footprint, offsets })
    }

    /// The layout with some slots behind all others, where nothing else is ever written to.
    pub fn apart(mut self, plan: &Plan, slots: &BTreeSet<SlotId>) -> Layout {
        for at in slots.iter().filter(|at| !plan.tensors[at.tensor as usize].host) {
            if let Some(offset) = &mut self.offsets[at.tensor as usize][at.slot as usize] {
                *offset = self.footprint.bytes;
                self.footprint.bytes += size(plan, *at);
            }
        }
        self
    }

    /// Room behind all others for as much as each of these slots: where it begins.
    pub fn beside<'a>(&mut self, plan: &Plan, slots: impl Iterator<Item = &'a SlotId>) -> BTreeMap<SlotId, u64> {
        let room = |&at: &SlotId| {
            let begins = self.footprint.bytes;
            self.footprint.bytes += size(plan, at);
            (at, begins)
        };
        slots.filter(|at| !plan.tensors[at.tensor as usize].host).map(room).collect()
    }

    /// Byte offset of a slot in the arena that its tensor is in; none for a slot that no op touches.
    pub fn offset(&self, at: SlotId) -> Option<u64> {
        self.offsets[at.tensor as usize][at.slot as usize]
    }
}

/// Every slot of the inputs that the program reads.
fn inputs(plan: &Plan, conflicts: &Conflicts) -> impl Iterator<Item = SlotId> {
    let slots = |&tensor: &TensorId| (0..plan.tensors[tensor as usize].slots).map(move |slot| SlotId { tensor, slot });
    conflicts.inputs.iter().flat_map(slots)
}

/// Bytes that a slot takes.
fn size(plan: &Plan, at: SlotId) -> u64 {
    plan.tensors[at.tensor as usize].bytes().next_multiple_of(ALIGN)
}

/// Bytes of each slot of `conflicts`.
fn sizes(plan: &Plan, conflicts: &Conflicts) -> Result<Vec<u64>> {
    let mut total: u64 = 0;
    for at in inputs(plan, conflicts).chain(conflicts.slots.iter().copied()) {
        total = total.checked_add(size(plan, at)).filter(|t| *t < 1 << 60).ok_or_else(|| {
            let name = &plan.tensors[at.tensor as usize].name;
            Cause::Memory.infeasible(format!("the tensors of one rank, {name:?} among them, pass an exabyte"))
        })?;
    }
    Ok(conflicts.slots.iter().map(|&at| size(plan, at)).collect())
}

/// Bytes of each slot of `conflicts` on the device, and on the host: nothing of the one is in the other's way.
fn split(plan: &Plan, conflicts: &Conflicts, bytes: &[u64]) -> (Vec<u64>, Vec<u64>) {
    let of = |host: bool| {
        let own = |(at, &bytes): (&SlotId, &u64)| if plan.tensors[at.tensor as usize].host == host { bytes } else { 0 };
        conflicts.slots.iter().zip(bytes).map(own).collect()
    };
    (of(false), of(true))
}

/// The offset of each slot, and the end of the last: largest first, each at the lowest offset where it touches
/// nothing it conflicts with. Nothing lies below `bottom`.
fn place(conflicts: &Conflicts, bytes: &[u64], mut bottom: u64) -> (Vec<u64>, u64) {
    let mut offsets = Vec::with_capacity(bytes.len());
    // What lives throughout lies one behind the other.
    for bytes in &bytes[..conflicts.always] {
        offsets.push(bottom);
        bottom += bytes;
    }
    offsets.resize(bytes.len(), 0);
    // What is in the other memory has no bytes here.
    let mut others: Vec<usize> = (conflicts.always..bytes.len()).filter(|&i| bytes[i] > 0).collect();
    others.sort_by_key(|&i| (std::cmp::Reverse(bytes[i]), i));
    // (offset, end, slot), always in order of offset.
    let mut placed: Vec<(u64, u64, usize)> = Vec::with_capacity(others.len());
    let mut peak = bottom;
    let mut before = Before::new(conflicts);
    for item in others {
        // Where the slot before it is as large and touches the same, no place below that one's is free.
        let mut offset = before.alike(item, bytes).map_or(bottom, |other| match conflicts.between(item, other) {
            true => offsets[other] + bytes[other],
            false => offsets[other],
        });
        // What reaches over that place from below it does not conflict with the slot before, nor with this one.
        let below = if offset == bottom { 0 } else { placed.partition_point(|p| p.0 < offset) };
        before.place(item);
        for &(from, end, other) in &placed[below..] {
            if from >= offset + bytes[item] {
                break;
            }
            if end > offset && conflicts.between(item, other) {
                offset = end;
            }
        }
        offsets[item] = offset;
        peak = peak.max(offset + bytes[item]);
        placed.insert(placed.partition_point(|p| p.0 <= offset), (offset, offset + bytes[item], item));
    }
    (offsets, peak)
}

/// The slot placed last, and all those placed before it.
struct Before<'c> {
    conflicts: &'c Conflicts,
    last: Option<usize>,
    earlier: Vec<u64>,
}

impl<'c> Before<'c> {
    fn new(conflicts: &'c Conflicts) -> Before<'c> {
        Before { conflicts, last: None, earlier: vec![0; conflicts.words()] }
    }

    /// The slot placed last, if `item` is as large and conflicts with the same of those placed before it.
    fn alike(&self, item: usize, bytes: &[u64]) -> Option<usize> {
        self.last.filter(|&last| bytes[last] == bytes[item] && self.conflicts.same_among(&self.earlier, last, item))
    }

    fn place(&mut self, item: usize) {
        if let Some(last) = self.last.replace(item) {
            self.conflicts.add_to(&mut self.earlier, last);
        }
    }
}

/// Bytes by kind at the moment of program order at which most are alive.
fn fullest_moment(plan: &Plan, conflicts: &Conflicts, bytes: &[u64]) -> Vec<(TensorKind, u64)> {
    // How many changes have come about when most is alive.
    let (mut now, mut most, mut moment) = (0, 0, 0);
    for (at, &(slot, begins)) in conflicts.changes.iter().enumerate() {
        if begins {
            now += bytes[slot as usize];
        } else {
            if now > most {
                (most, moment) = (now, at);
            }
            now -= bytes[slot as usize];
        }
    }
    let mut alive = vec![0u32; bytes.len()];
    alive[..conflicts.always].fill(1);
    for &(slot, begins) in &conflicts.changes[..moment] {
        alive[slot as usize] = u32::from(begins);
    }
    let mut by_kind = TensorKind::ALL.map(|kind| (kind, 0));
    for ((at, bytes), alive) in conflicts.slots.iter().zip(bytes).zip(&alive) {
        if *alive > 0 {
            by_kind[plan.tensors[at.tensor as usize].kind as usize].1 += bytes;
        }
    }
    for at in inputs(plan, conflicts) {
        by_kind[plan.tensors[at.tensor as usize].kind as usize].1 += size(plan, at);
    }
    by_kind.to_vec()
}
