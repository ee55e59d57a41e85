//! A collective under way on one rank: the rounds of [`collective::rounds`], hop by hop.

use super::arena::{Arena, Data, Part};
use super::copied::{How, Log};
use super::packed::Packed;
use super::shared::Shared;
use super::transport::Key;
use crate::collective::{self, Hop};
use crate::error::{Error, Result};
use crate::plan::link::Line;
use crate::plan::{CollectiveKind, Group, OpKind, Wire};
use rustc_hash::FxHashMap;
use std::time::Instant;

pub struct Gather {
    pub node: u32,
    path: String,
    rank: u32,
    kind: CollectiveKind,
    members: Vec<u32>,
    /// The number of this collective's op in each member's line.
    nodes: Vec<u32>,
    here: usize,
    rounds: Vec<Vec<Hop>>,
    /// Rounds done; the current one's messages are sent once `sent` is.
    round: usize,
    sent: bool,
    running: bool,
    /// Parts of the sources and of the destination that hops name.
    src: Vec<Part>,
    dst: Vec<Part>,
    /// Partial sums on their way, by the part they are of.
    sums: FxHashMap<usize, Data>,
    /// The messages of a gather in FP8; `None`: values travel as they are.
    packed: Option<Box<Packed>>,
}

impl Gather {
    pub fn start(
        shared: &Shared,
        rank: u32,
        line: &Line,
        node: u32,
        group: &Group,
        arena: &mut Arena,
    ) -> Result<Gather> {
        let OpKind::Collective { kind, wire, acc, .. } = &line.nodes[node as usize].op.kind else {
            unreachable!("only collectives gather")
        };
        let plan = shared.plan;
        let members = group.members(&plan.views, rank);
        let here = group.place(&plan.views, rank) as usize;
        let (src, dst) = (line.reads(node as usize)[0], line.writes(node as usize)[0]);
        let path = line.path(node as usize);
        let moved = if let Wire::Plain(dtype) = *wire { dtype } else { *acc };
        if [src.dtype(plan), dst.dtype(plan), *acc] != [moved; 3] {
            let why = "the CPU executor moves and adds in the buffers' own dtype; wire, acc, src and dst must agree";
            return Err(Error::device(format!("rank {rank}, {path}"), why));
        }
        let (own, lane) = (plan.program_of(rank), line.nodes[node as usize].lane);
        let op_of = |&m: &u32| shared.matching.same_collective(own, plan.program_of(m), lane, node);
        let nodes: Option<Vec<u32>> = members.iter().map(op_of).collect();
        let nodes = nodes.ok_or_else(|| Error::plan(format!("rank {rank}, {path}: a member does not take part")))?;
        let n = members.len();
        let parts = |arena: &Arena, p: &crate::plan::link::Place, whole: bool| -> Vec<Part> {
            match whole {
                true => (0..n).map(|i| arena.part(p, collective::part(p.elems(plan), i, n))).collect(),
                false => vec![arena.whole(p)],
            }
        };
        let gather = Gather {
            node,
            path,
            rank,
            kind: *kind,
            here,
            rounds: collective::rounds(*kind, n),
            round: 0,
            sent: false,
            running: false,
            src: parts(arena, &src, *kind != CollectiveKind::AllGather),
            dst: parts(arena, &dst, *kind != CollectiveKind::ReduceScatter),
            sums: FxHashMap::default(),
            packed: (*wire == Wire::Fp8).then(|| Box::new(Packed::new(&plan.tensors[dst.tensor as usize], n))),
            members,
            nodes,
        };
        shared.hub.start(gather.meeting(), rank, &gather.members);
        Ok(gather)
    }

    /// The name of this collective at the hub: its first member, and that member's op.
    fn meeting(&self) -> (u32, u32) {
        (self.members[0], self.nodes[0])
    }

    pub fn done(&self) -> bool {
        self.running && self.round == self.rounds.len()
    }

    pub fn waits_for(&self, shared: &Shared) -> String {
        if !self.running {
            return format!("{} to start {}", shared.hub.missing(self.meeting(), &self.members), self.kind.name());
        }
        let from = self.rounds[self.round].iter().find(|h| h.to == self.here);
        format!("round {} from rank {}", self.round, from.map_or(self.rank, |h| self.members[h.from]))
    }

    /// Moves the collective on as far as messages allow; returns whether it moved.
    pub fn poll(&mut self, shared: &Shared, arena: &mut Arena, log: &mut Log) -> Result<bool> {
        let mut moved = false;
        if !self.running {
            if shared.hub.started(self.meeting()) < self.members.len() as u32 {
                return Ok(false);
            }
            self.running = true;
            let begun = Instant::now();
            let bytes = self.own_part(arena)?;
            if bytes > 0 {
                log.note(How::Take, bytes, begun);
            }
            moved = true;
        }
        while self.round < self.rounds.len() {
            if !self.sent {
                self.send(shared, arena, log);
                self.sent = true;
                moved = true;
            }
            if !self.receive(shared, arena, log)? {
                break;
            }
            (self.round, self.sent, moved) = (self.round + 1, false, true);
        }
        if self.round == self.rounds.len() && self.kind == CollectiveKind::ReduceScatter {
            self.land_sum(shared, arena, log)?;
        }
        Ok(moved)
    }

    /// Copies into the result what a member has of it before anything arrives. Returns the bytes that were copied: none
    /// where both are one place.
    fn own_part(&mut self, arena: &mut Arena) -> Result<u64> {
        match self.kind {
            CollectiveKind::AllGather if self.packed.is_some() => self.pack_own(arena),
            CollectiveKind::AllReduce => (0..self.src.len()).map(|i| self.copy(arena, i, i)).sum(),
            CollectiveKind::AllGather => self.copy(arena, 0, self.here),
            CollectiveKind::AllToAll => self.copy(arena, self.here, self.here),
            CollectiveKind::ReduceScatter => Ok(0),
        }
    }

    /// Packs the own part, and has of it what all others will have.
    fn pack_own(&mut self, arena: &mut Arena) -> Result<u64> {
        let values = arena.read(&self.src[0]);
        let message = self.packed.as_ref().expect("it is gathered in FP8").pack(self.here, &values);
        self.land_packed(arena, self.here, message)?;
        Ok(values.bytes())
    }

    /// Stores what a packed message says, and keeps the message to be passed on.
    fn land_packed(&mut self, arena: &mut Arena, part: usize, message: Data) -> Result<()> {
        let packed = self.packed.as_mut().expect("it is gathered in FP8");
        let values = packed.take(part, message);
        let values = values.map_err(|why| Error::device(format!("rank {}, {}", self.rank, self.path), why))?;
        self.write(arena, &self.dst[part], &values)
    }

    fn copy(&self, arena: &mut Arena, from: usize, to: usize) -> Result<u64> {
        let (from, to) = (&self.src[from], &self.dst[to]);
        let copied = arena.copy(from, to);
        copied.map_err(|why| Error::device(format!("rank {}, {}", self.rank, self.path), why))?;
        Ok(if from.bytes == to.bytes { 0 } else { from.bytes.len() as u64 })
    }

    fn write(&self, arena: &mut Arena, part: &Part, data: &Data) -> Result<()> {
        arena.write(part, data).map_err(|why| Error::device(format!("rank {}, {}", self.rank, self.path), why))
    }

    /// Adds what arrived to a part of memory.
    fn add(&self, arena: &mut Arena, part: &Part, data: &Data) -> Result<()> {
        if (data.bytes(), data.dtype()) != (part.bytes.len() as u64, part.dtype) {
            let why = format!("{} bytes arrive to be added to {}", data.bytes(), part.bytes.len());
            return Err(Error::device(format!("rank {}, {}", self.rank, self.path), why));
        }
        arena.add(part, data);
        Ok(())
    }

    fn hop(&self, ours: impl Fn(&Hop) -> bool) -> Option<Hop> {
        self.rounds[self.round].iter().copied().find(ours)
    }

    fn send(&mut self, shared: &Shared, arena: &Arena, log: &mut Log) {
        let Some(hop) = self.hop(|h| h.from == self.here) else { return };
        let (begun, handed_on) = (Instant::now(), self.sums.contains_key(&hop.part));
        let data = match (self.kind, &self.packed) {
            (CollectiveKind::AllGather, Some(packed)) => packed.message(hop.part),
            (CollectiveKind::AllReduce | CollectiveKind::AllGather, _) => shared.message(arena, &self.dst[hop.part]),
            (CollectiveKind::AllToAll, _) => shared.message(arena, &self.src[hop.part]),
            (CollectiveKind::ReduceScatter, _) => {
                self.sums.remove(&hop.part).unwrap_or_else(|| shared.message(arena, &self.src[hop.part]))
            }
        };
        let bytes = data.bytes();
        shared.hub.send(self.key(self.here, hop.to), data, hop.part as u32);
        if !handed_on {
            log.note(How::Post, bytes, begun);
        }
    }

    fn key(&self, from: usize, to: usize) -> Key {
        // Legs of transfers count from 0; the rounds of a collective are another op's, so they may too.
        Key { from: self.members[from], to: self.members[to], node: self.nodes[from], part: self.round as u32 }
    }

    fn receive(&mut self, shared: &Shared, arena: &mut Arena, log: &mut Log) -> Result<bool> {
        let Some(hop) = self.hop(|h| h.to == self.here) else { return Ok(true) };
        let begun = Instant::now();
        let Some((mut data, _)) = shared.hub.receive(self.key(hop.from, self.here), false) else { return Ok(false) };
        match (self.kind, hop.reduce) {
            (CollectiveKind::ReduceScatter, _) => {
                arena.add_to(&mut data, &self.src[hop.part]);
                log.note(How::Add, data.bytes(), begun);
                self.sums.insert(hop.part, data);
                return Ok(true);
            }
            _ if self.packed.is_some() => {
                let bytes = data.bytes();
                self.land_packed(arena, hop.part, data)?;
                log.note(How::Take, bytes, begun);
                return Ok(true);
            }
            (_, true) => self.add(arena, &self.dst[hop.part], &data)?,
            (CollectiveKind::AllToAll, _) => self.write(arena, &self.dst[hop.from], &data)?,
            _ => self.write(arena, &self.dst[hop.part], &data)?,
        }
        log.note(if hop.reduce { How::Add } else { How::Take }, data.bytes(), begun);
        shared.spares.put(data);
        Ok(true)
    }

    /// The finished sum of the own part, or the source itself where there is only one member.
    fn land_sum(&mut self, shared: &Shared, arena: &mut Arena, log: &mut Log) -> Result<()> {
        let begun = Instant::now();
        let Some(sum) = self.sums.remove(&self.here) else { return self.copy(arena, self.here, 0).map(|_| ()) };
        self.write(arena, &self.dst[0], &sum)?;
        log.note(How::Take, sum.bytes(), begun);
        shared.spares.put(sum);
        Ok(())
    }
}
