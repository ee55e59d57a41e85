//! A communicating op under way on one thread: a transfer leg by leg, a collective round by round.

use super::Shared;
use super::exchange::Exchange;
use super::hub::{Hub, Key};
use super::job::{Job, Then, What};
use crate::collective::{self, Hop};
use crate::device::Threads;
use crate::device::curve::Curve;
use crate::device::measured::{Copies, slower};
use crate::error::{Error, Result};
use crate::plan::{CollectiveKind, Direction, Lane, OpKind};

/// What a flight wants of its thread.
pub enum Next {
    Job(Job),
    Nothing,
    Over,
}

pub enum Flight {
    Transfer { node: u32, legs: Vec<LegUnderWay> },
    Collective(Collective),
    Exchange(Exchange),
}

pub struct LegUnderWay {
    dir: Direction,
    key: Key,
    bytes: u64,
    phase: Phase,
}

#[derive(PartialEq)]
enum Phase {
    /// A send that has not been copied out yet.
    Unsent,
    UnderWay,
    Over,
}

/// What a thread is busy with for a while: seconds alone, and how many times longer while all cores do it.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    pub alone: f64,
    pub crowded: f64,
}

impl Work {
    /// The work of copying `bytes`, by a curve of the profile.
    fn copies(threads: &Threads, bytes: u64, curve: fn(&Copies) -> &Curve) -> Work {
        let size = [bytes.max(1) as f64];
        let (alone, beside) = (curve(&threads.alone), curve(&threads.beside.copies));
        Work { alone: alone.at(&size).0, crowded: slower(beside, alone, &size) }
    }

    fn post(threads: &Threads, bytes: u64) -> Work {
        Work::copies(threads, bytes, |c| &c.post)
    }

    fn take(threads: &Threads, bytes: u64) -> Work {
        Work::copies(threads, bytes, |c| &c.take)
    }

    fn add(threads: &Threads, bytes: u64) -> Work {
        Work::copies(threads, bytes, |c| &c.add)
    }

    /// The work of an op that does nothing.
    fn nothing(threads: &Threads) -> Work {
        Work { alone: threads.op_s, crowded: 1.0 }
    }
}

pub fn job(flight: usize, what: What, work: Work) -> Next {
    Next::Job(Job { left: work.alone, crowded: work.crowded, then: Then::Flight { flight, what } })
}

impl Flight {
    pub fn transfer(node: u32, legs: Vec<(Direction, Key, u64)>) -> Flight {
        let begin = |(dir, key, bytes)| {
            let phase = if dir == Direction::Send { Phase::Unsent } else { Phase::UnderWay };
            LegUnderWay { dir, key, bytes, phase }
        };
        Flight::Transfer { node, legs: legs.into_iter().map(begin).collect() }
    }

    pub fn node(&self) -> u32 {
        match self {
            Flight::Transfer { node, .. } => *node,
            Flight::Collective(c) => c.node,
            Flight::Exchange(e) => e.node,
        }
    }

    /// The next job of this flight, which is number `at` of its rank.
    pub fn next(&mut self, at: usize, shared: &Shared, hub: &mut Hub, now: f64) -> Next {
        let legs = match self {
            Flight::Collective(c) => return c.next(at, shared.threads, hub, now),
            Flight::Exchange(e) => return e.next(at, shared.threads, hub, now),
            Flight::Transfer { legs, .. } => legs,
        };
        let threads = shared.threads;
        if let Some((l, leg)) = legs.iter().enumerate().find(|(_, leg)| leg.phase == Phase::Unsent) {
            return job(at, What::Sent(l), Work::post(threads, leg.bytes));
        }
        for (l, leg) in legs.iter_mut().enumerate().filter(|(_, leg)| leg.phase == Phase::UnderWay) {
            if leg.dir == Direction::Recv && hub.has(leg.key, now) {
                hub.take(leg.key, true);
                return job(at, What::Taken(l), Work::take(threads, leg.bytes));
            }
            if leg.dir == Direction::Send && hub.was_taken(leg.key) {
                leg.phase = Phase::Over;
            }
        }
        if legs.iter().all(|leg| leg.phase == Phase::Over) { Next::Over } else { Next::Nothing }
    }

    /// Notes that a job of this flight is done.
    pub fn done(&mut self, what: What, hub: &mut Hub, now: f64) {
        match (self, what) {
            (Flight::Transfer { legs, .. }, What::Sent(l)) => {
                legs[l].phase = Phase::UnderWay;
                hub.send(legs[l].key, legs[l].bytes, now);
            }
            (Flight::Transfer { legs, .. }, What::Taken(l)) => legs[l].phase = Phase::Over,
            (Flight::Transfer { .. }, _) => unreachable!("a transfer sends and takes"),
            (Flight::Collective(c), what) => c.done(what, hub, now),
            (Flight::Exchange(e), what) => e.done(what, hub, now),
        }
    }
}

pub struct Collective {
    node: u32,
    kind: CollectiveKind,
    pub members: Vec<u32>,
    /// The op of this collective on each member, by node.
    nodes: Vec<u32>,
    here: usize,
    rounds: Vec<Vec<Hop>>,
    round: usize,
    sent: bool,
    stage: Stage,
    bytes: u64,
    in_place: bool,
}

#[derive(PartialEq)]
enum Stage {
    /// Waits until all members have started.
    Meeting,
    Rounds,
    /// Its sum is where it belongs.
    Landed,
}

impl Flight {
    pub fn collective(shared: &Shared, rank: u32, node: u32) -> Result<Flight> {
        let (plan, line) = (shared.plan, shared.line(rank));
        let spliced = &line.nodes[node as usize];
        let (Lane::Comm(group, _), OpKind::Collective { kind, .. }) =
            (&plan.lanes[spliced.lane as usize], &spliced.op.kind)
        else {
            return Err(Error::plan(format!("{} communicates on a compute lane", line.path(node as usize))));
        };
        let members = group.members(&plan.views, rank);
        let own = plan.program_of(rank);
        let op_of = |&m: &u32| shared.matching.same_collective(own, plan.program_of(m), spliced.lane, node);
        let nodes: Option<Vec<u32>> = members.iter().map(op_of).collect();
        let nodes = nodes.ok_or_else(|| {
            Error::plan(format!("rank {rank}, {}: a member does not take part", line.path(node as usize)))
        })?;
        let (from, to) = (line.reads(node as usize)[0], line.writes(node as usize)[0]);
        let whole =
            if *kind == CollectiveKind::AllGather { line.writes(node as usize) } else { line.reads(node as usize) };
        Ok(Flight::Collective(Collective {
            node,
            kind: *kind,
            here: group.place(&plan.views, rank) as usize,
            rounds: collective::rounds(*kind, members.len()),
            round: 0,
            sent: false,
            stage: Stage::Meeting,
            bytes: whole[0].bytes(plan),
            in_place: (from.tensor, from.slot, from.rows) == (to.tensor, to.slot, to.rows),
            members,
            nodes,
        }))
    }
}

impl Collective {
    /// A collective is named by its first member and that member's op.
    pub fn meeting(&self) -> (u32, u32) {
        (self.members[0], self.nodes[0])
    }

    fn part(&self) -> u64 {
        self.bytes / self.members.len() as u64
    }

    fn hop(&self, ours: impl Fn(&Hop) -> bool) -> Option<Hop> {
        self.rounds[self.round].iter().copied().find(ours)
    }

    fn key(&self, from: usize, to: usize) -> Key {
        Key { from: self.members[from], to: self.members[to], node: self.nodes[from], part: self.round as u32 }
    }

    fn next(&mut self, at: usize, threads: &Threads, hub: &mut Hub, now: f64) -> Next {
        if self.stage == Stage::Meeting {
            if hub.started(self.meeting()) < self.members.len() as u32 {
                return Next::Nothing;
            }
            return job(at, What::Begun, self.own_part(threads));
        }
        while self.round < self.rounds.len() {
            if !self.sent && self.hop(|h| h.from == self.here).is_some() {
                return job(at, What::Sent(self.round), self.send(threads));
            }
            let Some(hop) = self.hop(|h| h.to == self.here) else {
                (self.round, self.sent) = (self.round + 1, false);
                continue;
            };
            let key = self.key(hop.from, self.here);
            if !hub.has(key, now) {
                return Next::Nothing;
            }
            hub.take(key, false);
            let adds = hop.reduce || self.kind == CollectiveKind::ReduceScatter;
            let work = if adds { Work::add(threads, self.part()) } else { Work::take(threads, self.part()) };
            return job(at, What::Taken(self.round), work);
        }
        if self.kind == CollectiveKind::ReduceScatter && self.stage != Stage::Landed {
            return job(at, What::Landed, Work::take(threads, self.part()));
        }
        Next::Over
    }

    /// The work of copying a member's own part before anything arrives, if it is not in place.
    fn own_part(&self, threads: &Threads) -> Work {
        match self.kind {
            _ if self.in_place => Work::nothing(threads),
            CollectiveKind::AllReduce => Work::take(threads, self.bytes),
            CollectiveKind::AllGather | CollectiveKind::AllToAll => Work::take(threads, self.part()),
            CollectiveKind::ReduceScatter => Work::nothing(threads),
        }
    }

    /// The work of sending a part: a sum on its way is handed on as it is, everything else is copied out first.
    fn send(&self, threads: &Threads) -> Work {
        match self.kind {
            CollectiveKind::ReduceScatter if self.round > 0 => Work::nothing(threads),
            _ => Work::post(threads, self.part()),
        }
    }

    fn done(&mut self, what: What, hub: &mut Hub, now: f64) {
        match what {
            What::Begun => self.stage = Stage::Rounds,
            What::Landed => self.stage = Stage::Landed,
            What::Taken(_) => (self.round, self.sent) = (self.round + 1, false),
            What::Sent(_) => {
                let hop = self.hop(|h| h.from == self.here).expect("a hop was sent");
                hub.send(self.key(hop.from, hop.to), self.part(), now);
                self.sent = true;
            }
        }
    }
}
