//! Ranks that share a device compute in turns: in one order of all their kernels that respects every edge,
//! ties by op and rank. One rank after the other would deadlock a ring.

use super::link::Line;
use super::matching::Matching;
use super::{Plan, order};
use crate::error::Result;

/// The turn of each kernel of each rank on its device; empty for a rank that has a device to itself.
pub struct Turns {
    device: Vec<u32>,
    turn: Vec<Vec<u32>>,
    /// The rank of each turn of each device.
    order: Vec<Vec<u32>>,
}

/// In place of the number of a turn: the op takes no turn.
const NONE: u32 = u32::MAX;

impl Turns {
    /// The turns of ranks that share a device, `devices` being the device of each rank. Errors: ranks that wait for
    /// each other in a circle.
    pub fn new(plan: &Plan, lines: &[Line], matching: &Matching, devices: &[u32]) -> Result<Turns> {
        let ranks = plan.ranks();
        let sharers = |d: u32| devices.iter().filter(|&&x| x == d).count();
        let line = |rank: u32| &lines[plan.program_of(rank) as usize];
        let mut turn: Vec<Vec<u32>> = vec![vec![]; ranks as usize];
        let shared: Vec<bool> = devices.iter().map(|&d| sharers(d) > 1).collect();
        for rank in (0..ranks).filter(|&r| shared[r as usize]) {
            turn[rank as usize] = vec![NONE; line(rank).nodes.len()];
        }
        let mut order: Vec<Vec<u32>> = vec![vec![]; devices.iter().max().map_or(0, |d| *d as usize + 1)];
        if !shared.contains(&true) {
            return Ok(Turns { device: devices.to_vec(), turn, order });
        }
        let mut take = |rank: u32, node: u32| {
            let compute = plan.lanes[line(rank).nodes[node as usize].lane as usize].computes();
            if shared[rank as usize] && compute {
                let d = devices[rank as usize] as usize;
                turn[rank as usize][node as usize] = order[d].len() as u32;
                order[d].push(rank);
            }
        };
        if order::in_step(plan, lines, matching) {
            for node in 0..lines[0].nodes.len() as u32 {
                (0..ranks).for_each(|rank| take(rank, node));
            }
        } else {
            for moment in order::of_all_ranks(plan, lines, matching)?.iter().filter(|m| !m.end) {
                take(moment.rank, moment.node);
            }
        }
        Ok(Turns { device: devices.to_vec(), turn, order })
    }

    /// The device that a kernel waits for, and its turn there; `None` for a rank that has a device to itself, and for
    /// an op that is no kernel of a device.
    pub fn of(&self, rank: u32, node: u32) -> Option<(u32, u32)> {
        let turn = self.turn[rank as usize].get(node as usize)?;
        (*turn != NONE).then_some((self.device[rank as usize], *turn))
    }

    /// The rank that has a turn of a device; `None` behind the last turn.
    pub fn rank(&self, device: u32, turn: u32) -> Option<u32> {
        self.order[device as usize].get(turn as usize).copied()
    }
}
