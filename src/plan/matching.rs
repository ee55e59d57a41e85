//! Who meets whom: per lane and ordered pair of ranks the k-th send meets the k-th receive, and the k-th
//! collective of a communicator is the k-th of all its members.

use super::link::Line;
use super::op::*;
use super::program::Plan;

/// A leg of a spliced op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LegAt {
    pub node: u32,
    pub leg: u16,
}

/// Names a queue: lane, direction, distance along the lane's group.
type Queue = (u16, Direction, u32);

/// The sends, receives and collectives of one line in program order.
#[derive(Debug, Clone, Default)]
struct Queues {
    /// The legs of each queue in their order; there are few queues, since a lane has few distances.
    legs: Vec<(Queue, Vec<LegAt>)>,
    /// Legs of the line before each node.
    first_leg: Vec<u32>,
    /// The place of each leg in its queue.
    ordinal: Vec<u32>,
    /// The collectives of each lane, by node.
    collectives: Vec<Vec<u32>>,
    /// Collectives on the lane of each node before it.
    turn: Vec<u32>,
}

/// The queues of every program's line.
#[derive(Debug, Clone)]
pub struct Matching {
    queues: Vec<Queues>,
    /// Ranks of each lane's group; 1 for a lane that is no communicator.
    pub group_size: Vec<u32>,
}

/// Ranks of each lane's group; 1 for a lane that is no communicator.
pub fn group_sizes(plan: &Plan) -> Vec<u32> {
    let size = |lane: &Lane| match lane {
        Lane::Comm(group, _) => group.size(&plan.views),
        Lane::Compute(_) | Lane::Copy(_) | Lane::Host => 1,
    };
    plan.lanes.iter().map(size).collect()
}

impl Matching {
    pub fn new(plan: &Plan, lines: &[Line]) -> Matching {
        let group_size = group_sizes(plan);
        let queues = lines.iter().map(|line| Queues::of(line, &group_size)).collect();
        Matching { queues, group_size }
    }

    fn around(&self, lane: u16, by: i32) -> u32 {
        by.rem_euclid(self.group_size[lane as usize] as i32) as u32
    }

    /// The number of a leg among all legs of its program.
    pub fn leg(&self, program: u32, at: LegAt) -> usize {
        self.queues[program as usize].first_leg[at.node as usize] as usize + at.leg as usize
    }

    pub fn leg_count(&self, program: u32) -> usize {
        self.queues[program as usize].ordinal.len()
    }

    /// The leg of a rank of program `peer` that meets leg `at` of a rank of program `own`; `None`: it meets nothing.
    pub fn partner(&self, own: u32, peer: u32, lane: u16, leg: &Leg, at: LegAt) -> Option<LegAt> {
        let k = self.queues[own as usize].ordinal[self.leg(own, at)];
        let queue = (lane, leg.dir.other(), self.around(lane, -leg.by));
        self.queues[peer as usize].queue(queue)?.get(k as usize).copied()
    }

    /// The collective of a rank of program `peer` that is one with `node` of a rank of program `own`; `None`: there is
    /// no such collective.
    pub fn same_collective(&self, own: u32, peer: u32, lane: u16, node: u32) -> Option<u32> {
        if own == peer {
            return Some(node);
        }
        let k = self.queues[own as usize].turn[node as usize];
        self.queues[peer as usize].collectives[lane as usize].get(k as usize).copied()
    }

    /// Every leg of a program's line: where it is, its lane, and the leg.
    pub fn legs<'a>(&'a self, program: u32, line: &'a Line) -> impl Iterator<Item = (LegAt, u16, Leg)> + 'a {
        self.queues[program as usize].legs.iter().flat_map(|(_, queue)| queue).map(|&at| {
            let node = &line.nodes[at.node as usize];
            let OpKind::Transfer { legs, .. } = &node.op.kind else { unreachable!("only transfers have legs") };
            (at, node.lane, legs[at.leg as usize])
        })
    }
}

impl Queues {
    fn of(line: &Line, group_size: &[u32]) -> Queues {
        let mut q = Queues { collectives: vec![vec![]; group_size.len()], ..Queues::default() };
        for (i, node) in line.nodes.iter().enumerate() {
            let (i, lane) = (i as u32, node.lane);
            q.first_leg.push(q.ordinal.len() as u32);
            q.turn.push(q.collectives[lane as usize].len() as u32);
            match &node.op.kind {
                OpKind::Transfer { legs, .. } => {
                    for (l, leg) in legs.iter().enumerate() {
                        let by = leg.by.rem_euclid(group_size[lane as usize] as i32) as u32;
                        q.push((lane, leg.dir, by), LegAt { node: i, leg: l as u16 });
                    }
                }
                OpKind::Collective { .. } | OpKind::Exchange { .. } => q.collectives[lane as usize].push(i),
                _ => {}
            }
        }
        q
    }

    fn queue(&self, name: Queue) -> Option<&Vec<LegAt>> {
        self.legs.iter().find(|(known, _)| *known == name).map(|(_, queue)| queue)
    }

    fn push(&mut self, name: Queue, at: LegAt) {
        let found = self.legs.iter().position(|(known, _)| *known == name);
        let queue = found.unwrap_or_else(|| {
            self.legs.push((name, vec![]));
            self.legs.len() - 1
        });
        let queue = &mut self.legs[queue].1;
        self.ordinal.push(queue.len() as u32);
        queue.push(at);
    }
}
