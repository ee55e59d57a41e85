//! Which logical expert each physical slot holds.

use super::eplb;
use crate::error::{Error, Result};

/// Slots in rank order, as many on each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub ranks: u32,
    /// The logical expert of each slot.
    pub of_slot: Vec<u32>,
}

impl Placement {
    /// Expert after expert over the ranks, one slot each.
    pub fn contiguous(experts: u32, ranks: u32) -> Result<Placement> {
        if ranks == 0 || !experts.is_multiple_of(ranks) {
            let remedy = match u64::from(experts).checked_next_multiple_of(ranks.into()) {
                Some(even) => format!("add {} replicas", even - u64::from(experts)),
                None => "use 1 rank or more".to_string(),
            };
            let why = format!("{experts} experts do not divide over {ranks} ranks; {remedy}");
            return Err(Error::spec("placement", "experts", why));
        }
        Ok(Placement { ranks, of_slot: (0..experts).collect() })
    }

    /// By EPLB from the load of each expert, with `replicas` slots more than experts. Groups of experts stay on a
    /// node where they divide over the nodes.
    pub fn balanced(loads: &[u64], replicas: u32, groups: u32, nodes: u32, ranks: u32) -> Result<Placement> {
        let loads: Vec<f64> = loads.iter().map(|l| *l as f64).collect();
        let slots = loads.len() as u32 + replicas;
        Ok(Placement { ranks, of_slot: eplb::rebalance(&loads, slots, groups, nodes, ranks)? })
    }

    /// The same slots on every rank, those of experts that have several before the others.
    pub fn shared_first(mut self) -> Placement {
        let mut count = vec![0u32; self.of_slot.iter().max().map_or(0, |e| *e as usize + 1)];
        self.of_slot.iter().for_each(|e| count[*e as usize] += 1);
        let local = (self.of_slot.len() / self.ranks.max(1) as usize).max(1);
        self.of_slot.chunks_mut(local).for_each(|own| own.sort_by_key(|e| count[*e as usize] == 1));
        self
    }

    /// Slots of all ranks.
    pub fn experts(&self) -> u32 {
        self.of_slot.len() as u32
    }

    /// The slots of each logical expert.
    pub fn slots_of(&self, experts: u32) -> Result<Vec<Vec<u32>>> {
        let mut slots = vec![vec![]; experts as usize];
        for (slot, &expert) in (0u32..).zip(&self.of_slot) {
            let Some(own) = slots.get_mut(expert as usize) else {
                let why = format!("slot {slot} holds expert {expert} of {experts}");
                return Err(Error::spec("placement", "of_slot", why));
            };
            own.push(slot);
        }
        match slots.iter().position(Vec::is_empty) {
            Some(expert) => Err(Error::spec("placement", "of_slot", format!("expert {expert} has no slot"))),
            None => Ok(slots),
        }
    }
}
