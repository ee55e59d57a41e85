//! What of the ranks' memories lasts from step to step, for whoever saves it or puts it back.

use super::arena::{Arena, Data};
use super::inputs;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::plan::link::AtomTable;
use crate::plan::memory::SlotId;
use std::ops::Range;

/// The memories of all ranks between two steps.
pub struct Memory<'a, 'p> {
    pub(super) plan: &'p Plan,
    pub(super) atoms: &'p AtomTable,
    pub(super) hash: &'a str,
    pub(super) arenas: &'a mut [Arena<'p>],
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

    /// The plan's.
    pub fn hash(&self) -> &str {
        self.hash
    }

    /// Elements of a slot.
    ///
    /// # Panics
    /// Where the rank has no such slot, or not so many elements in it.
    pub(crate) fn read(&self, rank: u32, at: SlotId, elems: Range<u64>) -> Data {
        let arena = &self.arenas[rank as usize];
        arena.read(&arena.part(&inputs::slot(self.plan, self.atoms, at.tensor, at.slot), elems))
    }

    /// Stores values, rounded to the slot's dtype.
    pub fn write(&mut self, rank: u32, at: SlotId, elems: Range<u64>, values: &[f64]) -> Result<()> {
        let dtype = self.plan.tensors[at.tensor as usize].dtype;
        let arena = &mut self.arenas[rank as usize];
        let part = arena.part(&inputs::slot(self.plan, self.atoms, at.tensor, at.slot), elems);
        let written = arena.write(&part, &Data::from_f64(values, dtype));
        written.map_err(|why| Error::device(format!("rank {rank}"), why))
    }
}
