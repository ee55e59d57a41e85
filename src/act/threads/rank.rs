//! One rank: its program's ops as their edges allow, in the executor's order.

use super::Shared;
use super::exchange::Exchange;
use super::flight::{Flight, Next};
use super::hub::{Hub, Key};
use super::job::{Job, Then};
use crate::act::{Act, work_of};
use crate::error::{Error, Result};
use crate::plan::matching::LegAt;
use crate::plan::{Direction, Dtype, Leg, OpKind, Work};

pub struct Rank {
    pub rank: u32,
    /// Start and end of every op.
    pub times: Vec<(f64, f64)>,
    /// Edges each op still waits for.
    open: Vec<u32>,
    next: Vec<Vec<u32>>,
    /// The op at the head of each lane once it can start; `None` before.
    ready: Vec<Option<u32>>,
    flights: Vec<Flight>,
    left: usize,
}

impl Rank {
    pub fn new(shared: &Shared, rank: u32) -> Rank {
        let line = shared.line(rank);
        let n = line.nodes.len();
        let mut next = vec![vec![]; n];
        (0..n).for_each(|i| line.preds(i).iter().for_each(|&p| next[p as usize].push(i as u32)));
        let open: Vec<u32> = (0..n).map(|i| line.preds(i).len() as u32).collect();
        let mut ready = vec![None; line.lanes];
        for (i, node) in line.nodes.iter().enumerate().filter(|(i, _)| open[*i] == 0) {
            ready[node.lane as usize] = Some(i as u32);
        }
        Rank { rank, times: vec![(0.0, 0.0); n], open, next, ready, flights: vec![], left: n }
    }

    pub fn is_over(&self) -> bool {
        self.left == 0
    }

    fn is_compute(&self, shared: &Shared, node: u32) -> bool {
        matches!(shared.line(self.rank).nodes[node as usize].op.kind, OpKind::Compute { .. })
    }

    /// Whether an op could be started now: one that became ready while the others were looked at.
    pub fn could_go_on(&self, shared: &Shared, hub: &Hub) -> bool {
        let can = |&node: &u32| !self.is_compute(shared, node) || self.is_mine(shared, hub, node);
        self.ready.iter().flatten().any(can)
    }

    fn is_mine(&self, shared: &Shared, hub: &Hub, node: u32) -> bool {
        shared.turns.of(self.rank, node).is_none_or(|(device, turn)| hub.turn(device) == turn)
    }

    pub fn post_all(&mut self, shared: &Shared, hub: &mut Hub, now: f64) -> Result<()> {
        for lane in 0..self.ready.len() {
            let Some(node) = self.ready[lane].filter(|&n| !self.is_compute(shared, n)) else { continue };
            self.ready[lane] = None;
            self.times[node as usize].0 = now;
            let flight = self.flight(shared, node)?;
            if let Flight::Collective(c) = &flight {
                hub.start(c.meeting(), &c.members);
            }
            self.flights.push(flight);
        }
        Ok(())
    }

    fn flight(&self, shared: &Shared, node: u32) -> Result<Flight> {
        let line = shared.line(self.rank);
        let legs = match &line.nodes[node as usize].op.kind {
            OpKind::Transfer { legs, .. } => legs,
            OpKind::Exchange { .. } => return Exchange::start(shared, self.rank, node),
            _ => return Flight::collective(shared, self.rank, node),
        };
        let open = legs.iter().enumerate().map(|(l, leg)| {
            let at = LegAt { node, leg: l as u16 };
            let (key, bytes) = self.message(shared, leg, at)?;
            Ok((leg.dir, key, bytes))
        });
        Ok(Flight::transfer(node, open.collect::<Result<Vec<_>>>()?))
    }

    /// A message is named by its sender's op and leg.
    fn message(&self, shared: &Shared, leg: &Leg, at: LegAt) -> Result<(Key, u64)> {
        let (plan, line) = (shared.plan, shared.line(self.rank));
        let lane = line.nodes[at.node as usize].lane;
        let crate::plan::Lane::Comm(group, _) = &plan.lanes[lane as usize] else {
            return Err(Error::plan(format!("{} communicates on a compute lane", line.path(at.node as usize))));
        };
        let peer = group.neighbour(&plan.views, self.rank, leg.by);
        let places =
            if leg.dir == Direction::Send { line.reads(at.node as usize) } else { line.writes(at.node as usize) };
        let place = places.iter().find(|p| p.named == leg.buf).expect("a leg's buffer is among its op's places");
        let bytes = place.bytes(plan);
        if leg.dir == Direction::Send {
            return Ok((Key { from: self.rank, to: peer, node: at.node, part: u32::from(at.leg) }, bytes));
        }
        let met = shared.matching.partner(plan.program_of(self.rank), plan.program_of(peer), lane, leg, at);
        let met = met.ok_or_else(|| {
            Error::plan(format!("rank {}, {}: rank {peer} never sends it", self.rank, line.path(at.node as usize)))
        })?;
        Ok((Key { from: peer, to: self.rank, node: met.node, part: u32::from(met.leg) }, bytes))
    }

    /// The next job of the rank's communicating ops; `None` if none has any at `now`. Ops that are over end here.
    pub fn fly(&mut self, shared: &Shared, hub: &mut Hub, now: f64) -> Option<Job> {
        let mut at = 0;
        while at < self.flights.len() {
            match self.flights[at].next(at, shared, hub, now) {
                Next::Job(job) => return Some(job),
                Next::Over => {
                    let node = self.flights.remove(at).node();
                    self.end(shared, node, now);
                }
                Next::Nothing => at += 1,
            }
        }
        None
    }

    /// The next kernel, if one can start. What a mask leaves nothing of ends at once.
    pub fn compute(&mut self, shared: &Shared, hub: &mut Hub, now: f64) -> Option<Job> {
        for lane in 0..self.ready.len() {
            let Some(node) = self.ready[lane].filter(|&n| self.is_compute(shared, n)) else { continue };
            if !self.is_mine(shared, hub, node) {
                continue;
            }
            self.ready[lane] = None;
            let begun = now + shared.threads.op_s;
            self.times[node as usize].0 = begun;
            let work = match shared.sheet.act(node as usize, self.rank as usize) {
                Act::Compute { .. } => self.kernel_s(shared, node),
                _ => 0.0,
            };
            let left = (shared.takes.borrow_mut())(self.rank, work) + shared.threads.op_s;
            return Some(Job { left, crowded: self.crowded(shared, node), then: Then::Kernel(node) });
        }
        None
    }

    /// Seconds that a kernel takes with its caches as the ops before it leave them.
    fn kernel_s(&self, shared: &Shared, node: u32) -> f64 {
        let time = |curve: &'static str, work: &Work, dtype, cold| {
            shared.kernels.time_cold(curve, work, dtype, cold).seconds.value()
        };
        self.of_kernel(shared, node, time).unwrap_or(0.0)
    }

    /// How many times longer a kernel takes while all cores run the same.
    fn crowded(&self, shared: &Shared, node: u32) -> f64 {
        let slower = |curve: &'static str, work: &Work, dtype, cold| shared.kernels.beside(curve, work, dtype, cold);
        self.of_kernel(shared, node, slower).unwrap_or(1.0)
    }

    fn of_kernel(
        &self,
        shared: &Shared,
        node: u32,
        of: impl FnOnce(&'static str, &Work, Dtype, u64) -> f64,
    ) -> Option<f64> {
        let (line, cold) = (shared.line(self.rank), &shared.cold[shared.plan.program_of(self.rank) as usize]);
        let OpKind::Compute { kernel, .. } = &line.nodes[node as usize].op.kind else { return None };
        let (work, dtype) = work_of(shared.plan, line, node as usize, self.rank)?;
        Some(of(kernel.curve(), &work, dtype, cold[node as usize]))
    }

    /// The op that a job is of.
    pub fn node_of(&self, then: Then) -> u32 {
        match then {
            Then::Kernel(node) => node,
            Then::Flight { flight, .. } => self.flights[flight].node(),
        }
    }

    /// Notes that a job of this rank is done.
    pub fn done(&mut self, shared: &Shared, hub: &mut Hub, then: Then, now: f64) {
        match then {
            Then::Kernel(node) => {
                self.end(shared, node, now);
                if let Some((device, turn)) = shared.turns.of(self.rank, node) {
                    hub.end_turn(device, shared.turns.rank(device, turn + 1));
                }
            }
            Then::Flight { flight, what } => self.flights[flight].done(what, hub, now),
        }
    }

    fn end(&mut self, shared: &Shared, node: u32, now: f64) {
        let times = &mut self.times[node as usize];
        times.1 = now.max(times.0);
        self.left -= 1;
        let line = shared.line(self.rank);
        for i in 0..self.next[node as usize].len() {
            let then = self.next[node as usize][i];
            self.open[then as usize] -= 1;
            if self.open[then as usize] == 0 {
                self.ready[line.nodes[then as usize].lane as usize] = Some(then);
            }
        }
    }
}
