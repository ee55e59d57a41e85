//! Who meets whom: per lane and ordered pair of ranks the k-th send meets the k-th receive, and the k-th
//! collective of a communicator is the k-th of all its members.

use super::link::Line;
use super::op::*;
use super::program::Plan;
use rustc_hash::FxHashMap;

/// A leg of a spliced op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LegAt {
    pub node: u32,
    pub leg: u16,
}

/// (lane, direction, distance along the lane's group)
type Queue = (u16, Direction, u32);

/// The sends, receives and collectives of one line in program order.
#[derive(Debug, Clone, Default)]
struct Queues {
    legs: FxHashMap<Queue, Vec<LegAt>>,
    /// Position of each leg in its queue.
    ordinal: FxHashMap<LegAt, u32>,
    collectives: FxHashMap<u16, Vec<u32>>,
    /// Position of each collective among those of its lane.
    turn: FxHashMap<u32, u32>,
}

/// The queues of every program's line.
#[derive(Debug, Clone)]
pub struct Matching {
    queues: Vec<Queues>,
    /// Ranks of each lane's group; 1 for a lane that is no communicator.
    pub group_size: Vec<u32>,
}

impl Matching {
    pub fn new(plan: &Plan, lines: &[Line]) -> Matching {
        let size = |lane: &Lane| match lane {
            Lane::Comm(group, _) => group.members(&plan.views, 0).len() as u32,
            Lane::Compute(_) => 1,
        };
        let group_size: Vec<u32> = plan.lanes.iter().map(size).collect();
        let queues = lines.iter().map(|line| Queues::of(line, &group_size)).collect();
        Matching { queues, group_size }
    }

    fn around(&self, lane: u16, by: i32) -> u32 {
        by.rem_euclid(self.group_size[lane as usize] as i32) as u32
    }

    /// The leg in a rank of program `peer` that meets `at` of a rank of program `own`.
    pub fn partner(&self, own: u32, peer: u32, lane: u16, leg: &Leg, at: LegAt) -> Option<LegAt> {
        let k = self.queues[own as usize].ordinal[&at];
        let queue = (lane, leg.dir.other(), self.around(lane, -leg.by));
        self.queues[peer as usize].legs.get(&queue)?.get(k as usize).copied()
    }

    /// The collective in a rank of program `peer` that is one with `node` of a rank of program `own`.
    pub fn same_collective(&self, own: u32, peer: u32, lane: u16, node: u32) -> Option<u32> {
        if own == peer {
            return Some(node);
        }
        let k = self.queues[own as usize].turn[&node];
        self.queues[peer as usize].collectives.get(&lane)?.get(k as usize).copied()
    }

    /// Every leg of a program's line, with what it is.
    pub fn legs<'a>(&'a self, program: u32, line: &'a Line) -> impl Iterator<Item = (LegAt, u16, Leg)> + 'a {
        self.queues[program as usize].ordinal.keys().map(|&at| {
            let node = &line.nodes[at.node as usize];
            let OpKind::Transfer { legs, .. } = &node.op.kind else { unreachable!("only transfers have legs") };
            (at, node.lane, legs[at.leg as usize])
        })
    }
}

impl Queues {
    fn of(line: &Line, group_size: &[u32]) -> Queues {
        let mut q = Queues::default();
        for (i, node) in line.nodes.iter().enumerate() {
            let (i, lane) = (i as u32, node.lane);
            match &node.op.kind {
                OpKind::Transfer { legs, .. } => {
                    for (l, leg) in legs.iter().enumerate() {
                        let by = leg.by.rem_euclid(group_size[lane as usize] as i32) as u32;
                        let at = LegAt { node: i, leg: l as u16 };
                        let queue = q.legs.entry((lane, leg.dir, by)).or_default();
                        q.ordinal.insert(at, queue.len() as u32);
                        queue.push(at);
                    }
                }
                OpKind::Collective { .. } => {
                    let queue = q.collectives.entry(lane).or_default();
                    q.turn.insert(i, queue.len() as u32);
                    queue.push(i);
                }
                _ => {}
            }
        }
        q
    }
}
