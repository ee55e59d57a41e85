//! What of the ranks' memories lasts from step to step, for whoever saves it or puts it back.

use super::arena::{Arena, Data};
use super::inputs;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::plan::link::{AtomTable, Place};
use crate::plan::memory::SlotId;
use std::ops::Range;

/// Where ranks have their memories: threads in arenas, others on GPUs.
pub(super) trait Holds {
    /// Elements of a whole slot that is at `at`.
    fn read(&self, rank: u32, at: &Place, elems: Range<u64>) -> Result<Data>;
    fn write(&mut self, rank: u32, at: &Place, elems: Range<u64>, values: &Data) -> Result<()>;
}

/// The memories of all ranks between two steps.
pub struct Memory<'a, 'p> {
    pub(super) plan: &'p Plan,
    pub(super) atoms: &'p AtomTable,
    pub(super) hash: &'a str,
    pub(super) held: &'a mut dyn Holds,
}

/// Looks at the ranks' memories before the first step and after each.
pub trait Watch {
    fn begin(&self, memory: &mut Memory) -> Result<()>;
    fn after(&self, step: u64, memory: &Memory) -> Result<()>;
}

impl<'p> Memory<'_, 'p> {
    pub fn plan(&self) -> &'p Plan {
        self.plan
    }

    pub fn atoms(&self) -> &'p AtomTable {
        self.atoms
    }

    /// The hash of the plan.
    pub fn hash(&self) -> &str {
        self.hash
    }

    /// Elements of a slot. Errors: what holds it says why it cannot be read.
    ///
    /// # Panics
    /// Where the rank has no such slot, or not so many elements in it.
    pub(crate) fn read(&self, rank: u32, at: SlotId, elems: Range<u64>) -> Result<Data> {
        self.held.read(rank, &inputs::slot(self.plan, self.atoms, at.tensor, at.slot), elems)
    }

    /// Stores values, rounded to the slot's dtype.
    pub fn write(&mut self, rank: u32, at: SlotId, elems: Range<u64>, values: &[f64]) -> Result<()> {
        let dtype = self.plan.tensors[at.tensor as usize].dtype;
        let place = inputs::slot(self.plan, self.atoms, at.tensor, at.slot);
        let written = self.held.write(rank, &place, elems, &Data::from_f64(values, dtype));
        written.map_err(|why| Error::device(format!("rank {rank}"), why))
    }
}

/// The memories of ranks that are threads.
pub(super) struct Arenas<'a, 'p>(pub &'a mut [Arena<'p>]);

impl Holds for Arenas<'_, '_> {
    fn read(&self, rank: u32, at: &Place, elems: Range<u64>) -> Result<Data> {
        let arena = &self.0[rank as usize];
        Ok(arena.read(&arena.part(at, elems)))
    }

    fn write(&mut self, rank: u32, at: &Place, elems: Range<u64>, values: &Data) -> Result<()> {
        let arena = &mut self.0[rank as usize];
        let part = arena.part(at, elems);
        arena.write(&part, values).map_err(|why| Error::device("memory", why))
    }
}
