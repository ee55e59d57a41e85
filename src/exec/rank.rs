//! One rank: runs its program's ops as their edges allow, lane by lane, when its worker looks after it.

use super::arena::{Arena, Data, Peak};
use super::copied::{Copied, How, Log};
use super::exchange::Exchange;
use super::gather::Gather;
use super::inject::Fault;
use super::inputs;
use super::kernels::Scalar;
use super::shared::Shared;
use super::transport::Key;
use super::turns;
use crate::error::{Error, Result};
use crate::plan::link::{Line, Place};
use crate::plan::matching::LegAt;
use crate::plan::memory::{Life, SlotId};
use crate::plan::*;
use cpu_time::ThreadTime;
use rustc_hash::FxHashMap;
use std::time::Instant;

/// An op's start and end, in seconds since the step began.
pub type Times = Vec<(f64, f64)>;

/// What a rank has when it is done.
#[derive(Default)]
pub struct Done {
    pub times: Times,
    /// Seconds that each op had a core: kernels and exchanges of rows; 0 for other ops.
    pub on_core: Vec<f64>,
    pub copied: Vec<Copied>,
    pub peak: Peak,
    /// Contents of watched slots at the end of each of their lives, in order.
    pub seen: FxHashMap<SlotId, Vec<Data>>,
    /// Contents of the slots that are kept at the end of the step.
    pub kept: FxHashMap<SlotId, Data>,
    /// This rank's columns of the logits, of each microbatch in turn; empty where they were not asked for.
    pub logits: Vec<Data>,
}

/// A communicating op under way.
enum Flight {
    Transfer { node: u32, open: Vec<(LegAt, Leg, Place, Key)> },
    Collective(Gather),
    Exchange(Box<Exchange>),
}

pub struct Rank<'a, 'p> {
    shared: &'a Shared<'p>,
    rank: u32,
    line: &'p Line<'p>,
    pub arena: Arena<'p>,
    /// The number of edges that each op still waits for.
    open: Vec<u32>,
    /// The op at the head of each lane; `None` while it cannot start.
    ready: Vec<Option<u32>>,
    flights: Vec<Flight>,
    times: Times,
    on_core: Vec<f64>,
    copied: Log,
    left: usize,
    /// The op begun last.
    last: u32,
    /// The number of uses that each life of each slot still has.
    uses: FxHashMap<(SlotId, u32), u32>,
    seen: FxHashMap<SlotId, Vec<Data>>,
    logits: Vec<Data>,
    /// Whether the rank fell silent, on purpose.
    dead: bool,
}

impl<'a, 'p> Rank<'a, 'p> {
    pub fn new(shared: &'a Shared<'p>, rank: u32, arena: Arena<'p>) -> Rank<'a, 'p> {
        let line = &shared.lines[shared.plan.program_of(rank) as usize];
        let n = line.nodes.len();
        let mut ready = vec![None; line.lanes];
        let open: Vec<u32> = (0..n).map(|i| line.preds(i).len() as u32).collect();
        for (i, node) in line.nodes.iter().enumerate().filter(|(i, _)| open[*i] == 0) {
            ready[node.lane as usize] = Some(i as u32);
        }
        Rank {
            shared,
            rank,
            line,
            arena,
            open,
            ready,
            flights: vec![],
            times: vec![(0.0, 0.0); n],
            on_core: vec![0.0; n],
            copied: Log::default(),
            left: n,
            last: 0,
            uses: FxHashMap::default(),
            seen: FxHashMap::default(),
            logits: vec![],
            dead: false,
        }
    }

    /// Tells the hub the hash of this rank's plan. Errors: another rank has come with another plan.
    pub fn agree(&self) -> Result<()> {
        self.shared.hub.agree(self.rank, &self.own_hash())
    }

    pub fn number(&self) -> u32 {
        self.rank
    }

    /// Whether its program has ended.
    pub fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Starts and moves on whatever communicates; returns whether anything moved.
    pub fn communicate(&mut self) -> Result<bool> {
        if self.left <= self.times.len() / 2 {
            self.strike();
        }
        if self.dead {
            return Ok(false);
        }
        let posted = self.post_all()?;
        Ok(self.poll_all()? || posted)
    }

    fn is_hit(&self, fault: Fault) -> bool {
        self.shared.inject.is_some_and(|inject| inject.is(fault, self.rank))
    }

    /// Lets the injected fault happen: called half way through the program.
    fn strike(&mut self) {
        if self.is_hit(Fault::Panic) {
            panic!("as it was asked to by --inject");
        }
        self.dead |= self.is_hit(Fault::DeadRank);
    }

    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Whether the rank, by an injected fault, starts nothing that its peers wait for.
    fn holds_back(&self) -> bool {
        self.is_hit(Fault::Deadlock)
    }

    /// The hash of the plan that the rank says it has come with.
    fn own_hash(&self) -> String {
        if self.is_hit(Fault::OtherPlan) {
            let mut other = self.shared.plan.clone();
            other.about.global_batch += 1;
            return other.hash();
        }
        self.shared.hash.to_string()
    }

    /// What the rank has when it has run, and its memory for the next step.
    pub fn done(self) -> (Done, Arena<'p>) {
        let shared = self.shared;
        let contents = |at: &SlotId| {
            let place = inputs::slot(shared.plan, shared.atoms, at.tensor, at.slot);
            (*at, self.arena.read(&self.arena.whole(&place)))
        };
        let kept = shared.kept.iter().filter(|at| self.arena.holds(**at)).map(contents).collect();
        let (peak, times, on_core, seen) = (self.arena.peak(), self.times, self.on_core, self.seen);
        let copied = self.copied.0;
        (Done { kept, peak, times, on_core, copied, seen, logits: self.logits }, self.arena)
    }

    /// The op that was running when the rank stopped for good.
    pub fn running(&self) -> String {
        self.line.path(self.last as usize)
    }

    fn now(&self) -> f64 {
        self.shared.zero.get().expect("the step has begun").elapsed().as_secs_f64()
    }

    /// What the rank is waiting for, for whoever has to be told.
    pub fn blocked(&self) -> String {
        let flight = self.flights.first().map(|f| match f {
            Flight::Transfer { node, open } => {
                let peers: Vec<String> = open
                    .iter()
                    .map(|(_, leg, _, key)| match leg.dir {
                        Direction::Send => format!("rank {} to take it", key.to),
                        Direction::Recv => format!("rank {} to send", key.from),
                    })
                    .collect();
                (*node, peers.join(" and "))
            }
            Flight::Collective(g) => (g.node, g.waits_for(self.shared)),
            Flight::Exchange(e) => (e.node, e.waits_for(self.shared)),
        });
        if let Some((node, what)) = flight {
            return format!("{} for {what}", self.line.path(node as usize));
        }
        let mut ready = self.ready.iter().flatten();
        match ready.find(|&&node| self.holds_back() && !self.is_compute(node)).or(self.ready.iter().flatten().next()) {
            Some(&node) if !self.is_compute(node) => {
                format!("{}, which it is to start after its peers have ended theirs", self.line.path(node as usize))
            }
            Some(&node) => format!("{} for its turn on a shared device", self.line.path(node as usize)),
            None => "no op that could start".into(),
        }
    }

    fn is_compute(&self, node: u32) -> bool {
        matches!(self.line.nodes[node as usize].op.kind, OpKind::Compute { .. })
    }

    /// Copies between the two memories of the rank, on its own thread.
    fn copy(&mut self, node: u32) -> Result<()> {
        self.begin_lives(node);
        let (from, to) = (self.line.reads(node as usize)[0], self.line.writes(node as usize)[0]);
        let (data, part) = (self.arena.read(&self.arena.whole(&from)), self.arena.whole(&to));
        let path = || format!("rank {}, {}", self.rank, self.line.path(node as usize));
        self.arena.write(&part, &data).map_err(|why| Error::device(path(), why))?;
        self.end(node);
        Ok(())
    }

    /// Starts every communicating op that can start.
    fn post_all(&mut self) -> Result<bool> {
        let mut moved = false;
        for lane in 0..self.ready.len() {
            let Some(node) = self.ready[lane].filter(|&n| !self.is_compute(n) && !self.holds_back()) else { continue };
            self.ready[lane] = None;
            self.times[node as usize].0 = self.now();
            moved = true;
            if let OpKind::Copy { .. } = self.line.nodes[node as usize].op.kind {
                self.copy(node)?;
                continue;
            }
            let flight = self.post(node)?;
            self.flights.push(flight);
        }
        Ok(moved)
    }

    fn post(&mut self, node: u32) -> Result<Flight> {
        let (shared, line) = (self.shared, self.line);
        let n = &line.nodes[node as usize];
        let Lane::Comm(group, _) = &shared.plan.lanes[n.lane as usize] else {
            return Err(Error::plan(format!("{} communicates on a compute lane", line.path(node as usize))));
        };
        self.begin_lives(node);
        match &n.op.kind {
            OpKind::Transfer { legs, .. } => {
                let mut open = vec![];
                for (l, leg) in legs.iter().enumerate() {
                    let at = LegAt { node, leg: l as u16 };
                    let peer = group.neighbour(&shared.plan.views, self.rank, leg.by);
                    let key = self.key(n.lane, leg, at, peer)?;
                    let place = self.leg_place(node, leg);
                    if leg.dir == Direction::Send {
                        let (begun, part) = (Instant::now(), self.arena.whole(&place));
                        shared.hub.send(key, shared.message(&self.arena, &part), leg.tag);
                        self.copied.note(How::Post, part.bytes.len() as u64, begun);
                    }
                    open.push((at, *leg, place, key));
                }
                Ok(Flight::Transfer { node, open })
            }
            OpKind::Exchange { .. } => {
                let core = ThreadTime::now();
                let exchange = Exchange::start(shared, self.rank, line, node, group, &self.arena)?;
                self.on_core[node as usize] = core.elapsed().as_secs_f64();
                Ok(Flight::Exchange(Box::new(exchange)))
            }
            _ => Ok(Flight::Collective(Gather::start(shared, self.rank, line, node, group, &mut self.arena)?)),
        }
    }

    /// The name of a message, by its sender's op and leg.
    fn key(&self, lane: u16, leg: &Leg, at: LegAt, peer: u32) -> Result<Key> {
        let (plan, matching) = (self.shared.plan, self.shared.matching);
        if leg.dir == Direction::Send {
            return Ok(Key { from: self.rank, to: peer, node: at.node, part: u32::from(at.leg) });
        }
        let met = matching.partner(plan.program_of(self.rank), plan.program_of(peer), lane, leg, at);
        let met = met.ok_or_else(|| {
            Error::plan(format!("rank {}, {}: rank {peer} never sends it", self.rank, self.line.path(at.node as usize)))
        })?;
        Ok(Key { from: peer, to: self.rank, node: met.node, part: u32::from(met.leg) })
    }

    fn leg_place(&self, node: u32, leg: &Leg) -> Place {
        let places = match leg.dir {
            Direction::Send => self.line.reads(node as usize),
            Direction::Recv => self.line.writes(node as usize),
        };
        *places.iter().find(|p| p.named == leg.buf).expect("a leg's buffer is among its op's places")
    }

    /// Moves every communicating op on as far as it goes.
    fn poll_all(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut flights = std::mem::take(&mut self.flights);
        let mut ended = vec![];
        for flight in &mut flights {
            let (node, done, progress) = match flight {
                Flight::Transfer { node, open } => {
                    let before = open.len();
                    self.poll_legs(*node, open)?;
                    (*node, open.is_empty(), open.len() < before)
                }
                Flight::Collective(gather) => {
                    let progress = gather.poll(self.shared, &mut self.arena, &mut self.copied)?;
                    (gather.node, gather.done(), progress)
                }
                Flight::Exchange(exchange) => {
                    let core = ThreadTime::now();
                    let progress = exchange.poll(self.shared, &mut self.arena)?;
                    if progress {
                        self.on_core[exchange.node as usize] += core.elapsed().as_secs_f64();
                    }
                    (exchange.node, exchange.done(), progress)
                }
            };
            moved |= progress;
            if done {
                ended.push(node);
            }
        }
        flights.retain(|f| match f {
            Flight::Transfer { open, .. } => !open.is_empty(),
            Flight::Collective(g) => !g.done(),
            Flight::Exchange(e) => !e.done(),
        });
        self.flights = flights;
        for node in ended {
            self.end(node);
        }
        Ok(moved)
    }

    fn poll_legs(&mut self, node: u32, open: &mut Vec<(LegAt, Leg, Place, Key)>) -> Result<()> {
        let mut left = vec![];
        for (at, leg, place, key) in open.drain(..) {
            let done = match leg.dir {
                Direction::Send => self.shared.hub.delivered(key),
                Direction::Recv => {
                    let begun = Instant::now();
                    match self.shared.hub.receive(key, true) {
                        Some((data, tag)) => {
                            self.store(node, &leg, &place, &data, tag)?;
                            self.copied.note(How::Take, data.bytes(), begun);
                            self.shared.spares.put(data);
                            true
                        }
                        None => false,
                    }
                }
            };
            if !done {
                left.push((at, leg, place, key));
            }
        }
        *open = left;
        Ok(())
    }

    fn store(&mut self, node: u32, leg: &Leg, place: &Place, data: &Data, tag: u32) -> Result<()> {
        let path = format!("rank {}, {}", self.rank, self.line.path(node as usize));
        let fail = |why: String| Error::device(path, why);
        if tag != leg.tag {
            return Err(fail(format!("a message tagged {tag} arrives where {} is expected", leg.tag)));
        }
        let part = self.arena.whole(place);
        self.arena.write(&part, data).map_err(fail)
    }

    /// Runs a kernel, if one can start.
    pub fn compute_one<T: Scalar>(&mut self) -> bool {
        for lane in 0..self.ready.len() {
            let Some(node) = self.ready[lane].filter(|&n| self.is_compute(n)) else { continue };
            if !turns::is_mine(self.shared.turns, &self.shared.hub, self.rank, node) {
                continue;
            }
            self.ready[lane] = None;
            self.begin_lives(node);
            self.times[node as usize].0 = self.now();
            let OpKind::Compute { kernel, .. } = &self.line.nodes[node as usize].op.kind else { return false };
            let visible = kernel.mask().is_none_or(|m| m.shape(&self.shared.plan.views, self.rank).area > 0);
            if visible {
                let (reads, writes) = (self.line.reads(node as usize), self.line.writes(node as usize));
                if self.shared.logits && kernel.takes_logits() {
                    // Logits become their own gradient in place.
                    self.logits.push(self.arena.read(&self.arena.whole(&reads[0])));
                }
                self.shared.hub.sign(self.rank, true);
                let (at, core) = ((self.rank, self.shared.step), ThreadTime::now());
                self.arena.run::<T>(kernel, at, reads, writes);
                self.on_core[node as usize] = core.elapsed().as_secs_f64();
                self.shared.hub.sign(self.rank, false);
            }
            self.end(node);
            turns::end(self.shared.turns, &self.shared.hub, self.rank, node);
            return true;
        }
        false
    }

    /// The op has ended: notes the time, ends lives, and releases what waited for it.
    fn end(&mut self, node: u32) {
        self.times[node as usize].1 = self.now();
        self.end_lives(node);
        self.left -= 1;
        let next = &self.shared.next[self.shared.plan.program_of(self.rank) as usize];
        for &then in &next[node as usize] {
            self.open[then as usize] -= 1;
            if self.open[then as usize] == 0 {
                self.ready[self.line.nodes[then as usize].lane as usize] = Some(then);
            }
        }
    }

    /// The slots an op touches, each once.
    fn slots(&self, node: u32) -> Vec<SlotId> {
        let places = self.line.reads(node as usize).iter().chain(self.line.writes(node as usize));
        let mut slots: Vec<SlotId> = places.map(|p| SlotId { tensor: p.tensor, slot: p.slot }).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Which life of a slot an op belongs to.
    fn life(&self, at: SlotId, node: u32) -> (u32, &'p Life) {
        let lives = &self.shared.lives[self.shared.plan.program_of(self.rank) as usize];
        let lives = &lives[at.tensor as usize][at.slot as usize];
        let i = lives.partition_point(|l| l.first <= node) - 1;
        (i as u32, &lives[i])
    }

    fn begin_lives(&mut self, node: u32) {
        self.last = node;
        for at in self.slots(node) {
            self.arena.touch(at);
        }
    }

    /// After its last use a slot that does not persist is filled with NaN, in a run whose numbers are looked at.
    fn end_lives(&mut self, node: u32) {
        for at in self.slots(node) {
            let (i, life) = self.life(at, node);
            let left = self.uses.entry((at, i)).or_insert(life.uses);
            *left -= 1;
            if *left > 0 {
                continue;
            }
            if self.shared.watched.contains(&at) {
                let place = inputs::slot(self.shared.plan, self.shared.atoms, at.tensor, at.slot);
                let data = self.arena.read(&self.arena.whole(&place));
                self.seen.entry(at).or_default().push(data);
            }
            let plan = self.shared.plan;
            let poisoned = self.shared.poison && !plan.tensors[at.tensor as usize].kind.persists();
            if poisoned && !plan.feed.stays(at.tensor) {
                self.arena.poison(at);
            }
        }
    }
}
