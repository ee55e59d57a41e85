//! What lasts from step to step, between the GPUs' memories and whoever saves it or puts it back.

use super::super::device::Device;
use super::Session;
use crate::error::Result;
use crate::exec::arena::Data;
use crate::exec::state::Holds;
use crate::plan::link::Place;
use crate::plan::memory::SlotId;
use std::cell::RefCell;
use std::ops::Range;

/// The memories of a session's ranks, no step being under way.
pub struct OnGpus<'s, 'a, 'p, D: Device>(pub RefCell<&'s mut Session<'a, 'p, D>>);

impl<D: Device> Session<'_, '_, D> {
    /// GPU, address and bytes of elements of a slot. Errors: the rank has no place for it.
    fn elements(&self, rank: u32, at: &Place, elems: &Range<u64>) -> Result<(u32, u64, u64)> {
        let size = self.linked.plan.tensors[at.tensor as usize].dtype.size();
        let offset = self.offset(rank, SlotId { tensor: at.tensor, slot: at.slot })?;
        let begins = self.bases[rank as usize] + offset + elems.start * size;
        Ok((self.gpus[rank as usize], begins, (elems.end - elems.start) * size))
    }
}

impl<D: Device> Holds for OnGpus<'_, '_, '_, D> {
    fn read(&self, rank: u32, at: &Place, elems: Range<u64>) -> Result<Data> {
        let session = &mut **self.0.borrow_mut();
        let (gpu, address, bytes) = session.elements(rank, at, &elems)?;
        let held = session.device.read(gpu, address, bytes)?;
        Ok(Data::from_bytes(&held, session.linked.plan.tensors[at.tensor as usize].dtype))
    }

    fn write(&mut self, rank: u32, at: &Place, elems: Range<u64>, values: &Data) -> Result<()> {
        let session = &mut **self.0.get_mut();
        let (gpu, address, _) = session.elements(rank, at, &elems)?;
        session.device.write(gpu, address, values.to_bytes())
    }
}
