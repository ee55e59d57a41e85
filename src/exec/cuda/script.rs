//! A plan as commands to streams: what a GPU's driver is told, in order, for all ranks of one process.
//!
//! Pure data, so that it is tested without a GPU: whatever order streams and events leave open has to bring the same
//! numbers. An event is waited for only after the command that records it was handed over, so a single thread can
//! hand over everything and none of it can deadlock.
//!
//! Streams: one for the kernels of each device, since ranks that share a device take turns in a declared order, and
//! one for each communicator lane of each rank. Messages between ranks are copies that the receiver's stream does once
//! both ends have started; a send ends on delivery.

#[cfg(test)]
mod tests;

use super::device::{EventId, StreamId};
use super::fused::Fused;
use super::incoming::Incoming;
use super::lower::LEAST_SHARED;
use crate::collective;
use crate::error::{Error, Result};
use crate::plan::link::{Line, Place};
use crate::plan::matching::{LegAt, Matching};
use crate::plan::memory::{Layout, SlotId};
use crate::plan::order::{self, Moment};
use crate::plan::*;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// A range of bytes of a rank's memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Region {
    pub rank: u32,
    pub bytes: Range<u64>,
    pub dtype: Dtype,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Wait {
        stream: StreamId,
        event: EventId,
    },
    Record {
        stream: StreamId,
        event: EventId,
    },
    /// The kernel of `node` in the rank's line.
    Kernel {
        stream: StreamId,
        rank: u32,
        node: u32,
    },
    Copy {
        stream: StreamId,
        from: Region,
        to: Region,
    },
    /// `to` += `from`, in their dtype.
    Add {
        stream: StreamId,
        from: Region,
        to: Region,
    },
    /// Takes the rows that an exchange leaves on the rank out of the memories of all its members.
    Pull {
        stream: StreamId,
        rank: u32,
        node: u32,
    },
    /// The rank's part of a transfer or collective with other processes.
    Call {
        stream: StreamId,
        rank: u32,
        node: u32,
    },
    /// Waits for as long as an op with absent ranks takes.
    Idle {
        stream: StreamId,
        rank: u32,
        node: u32,
    },
    /// Notes what a watched slot holds after `node` has written it.
    Keep {
        stream: StreamId,
        rank: u32,
        node: u32,
        slot: SlotId,
    },
}

impl Region {
    #[cfg(test)]
    fn part(&self) -> super::super::arena::Part {
        super::super::arena::Part {
            bytes: self.bytes.start as usize..self.bytes.end as usize,
            dtype: self.dtype,
            host: false,
        }
    }
}

impl Command {
    pub fn stream(&self) -> StreamId {
        match self {
            Command::Wait { stream, .. }
            | Command::Record { stream, .. }
            | Command::Kernel { stream, .. }
            | Command::Copy { stream, .. }
            | Command::Add { stream, .. }
            | Command::Pull { stream, .. }
            | Command::Call { stream, .. }
            | Command::Idle { stream, .. }
            | Command::Keep { stream, .. } => *stream,
        }
    }
}

/// The events around an op: when its turn on its stream came, and when it had ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Around {
    pub start: EventId,
    pub end: EventId,
}

/// Everything that is handed over for one step.
#[derive(Debug, Clone)]
pub struct Script {
    pub commands: Vec<Command>,
    /// The device of each stream, and of each event.
    pub streams: Vec<u32>,
    pub events: Vec<u32>,
    /// The events around each op, by rank and node.
    pub around: Vec<Vec<Around>>,
}

/// The plan that is turned into commands, and what of its surroundings decides them.
#[derive(Clone, Copy)]
pub struct Linked<'p> {
    pub plan: &'p Plan,
    pub lines: &'p [Line<'p>],
    pub matching: &'p Matching,
    /// The layout of memory of each program.
    pub layouts: &'p [Layout],
    /// The one rank that is there, all others being made up for by copies inside its memory, for times of its kernels;
    /// `None`: all ranks are.
    pub solo: Option<u32>,
    /// Whether the others are there after all, in processes of their own.
    pub joined: bool,
    /// Seconds that each communicating op of a rank alone takes, by op; `None`: as long as a copy of as many of its own
    /// bytes.
    pub waits: Option<&'p [f64]>,
    /// What would come to a rank alone; `None`: nothing is kept apart for it.
    pub incoming: Option<&'p Incoming>,
    /// Bytes of shared memory that a block of threads may have on every GPU here.
    pub shared: u64,
    /// The library that does attention there; `None`: the project's own kernels do.
    pub fused: Option<&'p dyn Fused>,
    /// Whether everything on a GPU is done one after the other, on one stream: for times of kernels that nothing ran beside.
    pub in_line: bool,
}

impl<'p> Linked<'p> {
    /// A plan with all ranks in one process, where nothing is said of the GPUs that they are on.
    pub fn new(plan: &'p Plan, lines: &'p [Line<'p>], matching: &'p Matching, layouts: &'p [Layout]) -> Linked<'p> {
        let (solo, joined, waits, incoming, fused, in_line) = (None, false, None, None, None, false);
        Linked { plan, lines, matching, layouts, solo, joined, waits, incoming, shared: LEAST_SHARED, fused, in_line }
    }

    /// The ranks that are there.
    pub fn ranks(&self) -> Range<u32> {
        self.solo.map_or(0..self.plan.ranks(), |rank| rank..rank + 1)
    }

    pub fn line(&self, rank: u32) -> &'p Line<'p> {
        &self.lines[self.plan.program_of(rank) as usize]
    }

    /// Elements `part` of `parts` equal parts of a place, in the memory of a rank.
    fn part(&self, rank: u32, place: &Place, part: usize, parts: usize) -> Region {
        let tensor = &self.plan.tensors[place.tensor as usize];
        let layout = &self.layouts[self.plan.program_of(rank) as usize];
        let base = layout.offset(SlotId { tensor: place.tensor, slot: place.slot });
        let base = base.unwrap_or_else(|| panic!("{:?} has no place in memory", tensor.name));
        self.part_from(base, rank, place, [part, parts])
    }

    /// Part `part` of `parts` equal parts of a place in a slot that begins at `base`.
    fn part_from(&self, base: u64, rank: u32, place: &Place, [part, parts]: [usize; 2]) -> Region {
        let tensor = &self.plan.tensors[place.tensor as usize];
        let row = tensor.row_len() * tensor.dtype.size();
        let elems = collective::part(place.elems(self.plan), part, parts);
        let (at, size) = (base + place.rows[0] * row, tensor.dtype.size());
        Region { rank, bytes: at + elems.start * size..at + elems.end * size, dtype: tensor.dtype }
    }

    pub fn group(self, rank: u32, node: u32) -> &'p Group {
        let lane = self.line(rank).nodes[node as usize].lane;
        match &self.plan.lanes[lane as usize] {
            Lane::Comm(group, _) => group,
            _ => unreachable!("`check` has kept communication off other lanes"),
        }
    }

    /// The members of a collective: each rank, with its own op.
    pub fn members(&self, rank: u32, node: u32) -> Result<Vec<(u32, u32)>> {
        let Linked { plan, matching, .. } = *self;
        let (own, lane) = (plan.program_of(rank), self.line(rank).nodes[node as usize].lane);
        let of = |m: u32| matching.same_collective(own, plan.program_of(m), lane, node).map(|node| (m, node));
        let all: Option<Vec<_>> = self.group(rank, node).members(&plan.views, rank).into_iter().map(of).collect();
        all.ok_or_else(|| {
            let path = self.line(rank).path(node as usize);
            Error::plan(format!("rank {rank}, {path}: a member does not take part"))
        })
    }

    /// The region that a leg of a rank sends from, or that it receives into.
    pub fn leg_region(&self, rank: u32, at: LegAt) -> Region {
        let line = self.line(rank);
        let OpKind::Transfer { legs, .. } = &line.nodes[at.node as usize].op.kind else {
            unreachable!("only transfers have legs")
        };
        let leg = &legs[at.leg as usize];
        let places = match leg.dir {
            Direction::Send => line.reads(at.node as usize),
            Direction::Recv => line.writes(at.node as usize),
        };
        let place = places.iter().find(|p| p.named == leg.buf).expect("a leg's buffer is among its op's places");
        self.region(rank, place)
    }

    /// Part `part` of `parts` of a member's source or, with `dst`, of its destination.
    pub fn side(&self, (rank, node): (u32, u32), dst: bool, part: usize, parts: usize) -> Region {
        let line = self.line(rank);
        let places = if dst { line.writes(node as usize) } else { line.reads(node as usize) };
        self.part(rank, &places[0], part, parts)
    }

    /// The region of an operand that an op of a rank reads.
    pub fn read_region(&self, rank: u32, node: u32, read: usize) -> Region {
        let place = &self.line(rank).reads(node as usize)[read];
        let slot = SlotId { tensor: place.tensor, slot: place.slot };
        let come = self.incoming.and_then(|incoming| incoming.at((node, read as u32), slot));
        come.map_or_else(|| self.region(rank, place), |base| self.part_from(base, rank, place, [0, 1]))
    }

    /// The region of a whole place.
    pub fn region(&self, rank: u32, place: &Place) -> Region {
        self.part(rank, place, 0, 1)
    }
}

/// The commands of one step, the ranks on `devices`; `watched` slots are noted whenever they are written. Errors: ranks
/// that wait for each other.
pub fn script(linked: Linked, devices: &[u32], watched: &[SlotId]) -> Result<Script> {
    let mut writer = Writer::new(linked, devices, watched);
    for moment in moments(linked)? {
        if moment.end { writer.end(moment)? } else { writer.start(moment) }
    }
    Ok(Script {
        commands: writer.commands,
        streams: writer.stream_devices,
        events: writer.events,
        around: writer.around,
    })
}

/// Every start and end of an op, in an order in which all of them can come.
fn moments(linked: Linked) -> Result<Vec<Moment>> {
    let Linked { plan, lines, matching, .. } = linked;
    if let Some(rank) = linked.solo {
        let at = |node| [false, true].map(|end| Moment { node, rank, end });
        return Ok((0..linked.line(rank).nodes.len() as u32).flat_map(at).collect());
    }
    if !order::in_step(plan, lines, matching) {
        return order::of_all_ranks(plan, lines, matching);
    }
    let at = |node| [false, true].into_iter().flat_map(move |end| ranks_at(node, end, plan.ranks()));
    Ok((0..lines[0].nodes.len() as u32).flat_map(at).collect())
}

fn ranks_at(node: u32, end: bool, ranks: u32) -> impl Iterator<Item = Moment> {
    (0..ranks).map(move |rank| Moment { node, rank, end })
}

/// What a stream is for: the kernels of a device, or a communicator lane of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Use {
    Device(u32),
    Lane { rank: u32, lane: u16 },
}

struct Writer<'p> {
    linked: Linked<'p>,
    devices: Vec<u32>,
    commands: Vec<Command>,
    streams: FxHashMap<Use, StreamId>,
    stream_devices: Vec<u32>,
    /// The device of each event.
    events: Vec<u32>,
    around: Vec<Vec<Around>>,
    /// The event after the copy of a leg, by the receiving rank and its leg.
    delivered: FxHashMap<(u32, LegAt), EventId>,
    /// Collectives whose copies have been written, by first member and its node.
    gathered: FxHashSet<(u32, u32)>,
    /// Slots whose contents are wanted, as they are after every write.
    watched: Vec<SlotId>,
}

/// An event that nothing has recorded yet.
const UNRECORDED: EventId = EventId::MAX;

impl<'p> Writer<'p> {
    fn new(linked: Linked<'p>, devices: &[u32], watched: &[SlotId]) -> Writer<'p> {
        let none = Around { start: UNRECORDED, end: UNRECORDED };
        let around = (0..linked.plan.ranks()).map(|rank| vec![none; linked.line(rank).nodes.len()]).collect();
        Writer {
            linked,
            devices: devices.to_vec(),
            commands: vec![],
            streams: FxHashMap::default(),
            stream_devices: vec![],
            events: vec![],
            around,
            delivered: FxHashMap::default(),
            gathered: FxHashSet::default(),
            watched: watched.to_vec(),
        }
    }

    fn stream(&mut self, rank: u32, node: u32) -> StreamId {
        let lane = self.linked.line(rank).nodes[node as usize].lane;
        let kind = match self.linked.plan.lanes[lane as usize] {
            _ if self.linked.in_line => Use::Device(self.devices[rank as usize]),
            Lane::Comm(..) => Use::Lane { rank, lane },
            Lane::Compute(_) => Use::Device(self.devices[rank as usize]),
            Lane::Copy(_) | Lane::Host => unreachable!("plans that use the host's memory are refused"),
        };
        if let Some(&known) = self.streams.get(&kind) {
            return known;
        }
        let next = self.streams.len() as StreamId;
        self.streams.insert(kind, next);
        self.stream_devices.push(self.devices[rank as usize]);
        next
    }

    fn record(&mut self, stream: StreamId) -> EventId {
        let event = self.events.len() as EventId;
        self.events.push(self.stream_devices[stream as usize]);
        self.commands.push(Command::Record { stream, event });
        event
    }

    fn wait(&mut self, stream: StreamId, event: EventId) {
        assert_ne!(event, UNRECORDED, "an event is waited for before its recording was handed over");
        self.commands.push(Command::Wait { stream, event });
    }

    /// Starts an op whose edges hold; a kernel runs at once.
    fn start(&mut self, Moment { rank, node, .. }: Moment) {
        let stream = self.stream(rank, node);
        for &pred in self.linked.line(rank).preds(node as usize) {
            // An op on the same stream is in order already.
            if self.stream(rank, pred) != stream {
                let end = self.around[rank as usize][pred as usize].end;
                self.wait(stream, end);
            }
        }
        self.around[rank as usize][node as usize].start = self.record(stream);
        if let OpKind::Compute { .. } = self.linked.line(rank).nodes[node as usize].op.kind {
            self.commands.push(Command::Kernel { stream, rank, node });
            self.keep(stream, rank, node);
            self.around[rank as usize][node as usize].end = self.record(stream);
        }
    }

    /// Ends an op, once everyone that it meets has started.
    fn end(&mut self, Moment { rank, node, .. }: Moment) -> Result<()> {
        match &self.linked.line(rank).nodes[node as usize].op.kind {
            OpKind::Compute { .. } => return Ok(()),
            _ if self.linked.joined => {
                let stream = self.stream(rank, node);
                self.commands.push(Command::Call { stream, rank, node });
            }
            _ if self.linked.solo.is_some() => self.alone(rank, node),
            OpKind::Transfer { legs, .. } => self.transfer(rank, node, legs)?,
            OpKind::Collective { kind, .. } => self.collective(rank, node, *kind)?,
            OpKind::Exchange { .. } => self.exchange(rank, node)?,
            _ => {
                let path = self.linked.line(rank).path(node as usize);
                return Err(Error::device(path, "this kind of op is not turned into commands yet"));
            }
        }
        let stream = self.stream(rank, node);
        self.keep(stream, rank, node);
        self.around[rank as usize][node as usize].end = self.record(stream);
        Ok(())
    }

    /// Puts a wait, or copies of as many bytes of the rank's own, in place of what comes from others.
    fn alone(&mut self, rank: u32, node: u32) {
        let stream = self.stream(rank, node);
        if self.linked.waits.is_some() {
            return self.commands.push(Command::Idle { stream, rank, node });
        }
        let line = self.linked.line(rank);
        if let OpKind::Exchange { .. } = line.nodes[node as usize].op.kind {
            return self.commands.push(Command::Pull { stream, rank, node });
        }
        let sources = line.reads(node as usize);
        for (i, to) in line.writes(node as usize).iter().enumerate() {
            let mut to = self.linked.region(rank, to);
            let Some(from) = sources.get(i).or(sources.first()) else { continue };
            let mut from = self.linked.region(rank, from);
            let bytes = (from.bytes.end - from.bytes.start).min(to.bytes.end - to.bytes.start);
            (from.bytes.end, to.bytes.end) = (from.bytes.start + bytes, to.bytes.start + bytes);
            if from.bytes.end <= to.bytes.start || to.bytes.end <= from.bytes.start {
                self.commands.push(Command::Copy { stream, from, to });
            }
        }
    }

    fn keep(&mut self, stream: StreamId, rank: u32, node: u32) {
        for place in self.linked.line(rank).writes(node as usize) {
            let slot = SlotId { tensor: place.tensor, slot: place.slot };
            if self.watched.contains(&slot) {
                self.commands.push(Command::Keep { stream, rank, node, slot });
            }
        }
    }

    fn transfer(&mut self, rank: u32, node: u32, legs: &'p [Leg]) -> Result<()> {
        let stream = self.stream(rank, node);
        for (l, leg) in legs.iter().enumerate() {
            let delivered = self.deliver(rank, LegAt { node, leg: l as u16 }, leg)?;
            if leg.dir == Direction::Send {
                self.wait(stream, delivered);
            }
        }
        Ok(())
    }

    /// Writes the copy that a leg of `rank` is one end of, once for both ends. Returns the event after it.
    fn deliver(&mut self, rank: u32, at: LegAt, leg: &Leg) -> Result<EventId> {
        let Linked { plan, matching, .. } = self.linked;
        let peer = self.linked.group(rank, at.node).neighbour(&plan.views, rank, leg.by);
        let lane = self.linked.line(rank).nodes[at.node as usize].lane;
        let met = matching.partner(plan.program_of(rank), plan.program_of(peer), lane, leg, at);
        let met = met.ok_or_else(|| {
            let path = self.linked.line(rank).path(at.node as usize);
            Error::plan(format!("rank {rank}, {path}: rank {peer} has no other half of it"))
        })?;
        let ((sender, sends), (receiver, receives)) =
            if leg.dir == Direction::Send { ((rank, at), (peer, met)) } else { ((peer, met), (rank, at)) };
        if let Some(&event) = self.delivered.get(&(receiver, receives)) {
            return Ok(event);
        }
        let stream = self.stream(receiver, receives.node);
        let started = self.around[sender as usize][sends.node as usize].start;
        self.wait(stream, started);
        let (from, to) = (self.linked.leg_region(sender, sends), self.linked.leg_region(receiver, receives));
        self.commands.push(Command::Copy { stream, from, to });
        let event = self.record(stream);
        self.delivered.insert((receiver, receives), event);
        Ok(event)
    }

    /// Writes a collective whole, on the streams of all members, when the first of them comes to its end.
    fn collective(&mut self, rank: u32, node: u32, kind: CollectiveKind) -> Result<()> {
        let members = self.linked.members(rank, node)?;
        if !self.gathered.insert(members[0]) {
            return Ok(());
        }
        let starts: Vec<EventId> =
            members.iter().map(|&(m, node)| self.around[m as usize][node as usize].start).collect();
        let streams: Vec<StreamId> = members.iter().map(|&(m, node)| self.stream(m, node)).collect();
        self.everyone(&streams, &starts);
        let reduces = matches!(kind, CollectiveKind::AllReduce | CollectiveKind::ReduceScatter);
        (0..members.len())
            .for_each(|i| if reduces { self.sum(&members, i, kind) } else { self.pull(&members, i, kind) });
        if kind == CollectiveKind::AllReduce {
            let summed: Vec<EventId> = streams.iter().map(|&stream| self.record(stream)).collect();
            self.everyone(&streams, &summed);
            (0..members.len()).for_each(|i| self.pull(&members, i, kind));
        }
        // Nobody goes on before everyone has read what it offers.
        let done: Vec<EventId> = streams.iter().map(|&stream| self.record(stream)).collect();
        self.everyone(&streams, &done);
        Ok(())
    }

    /// Writes an exchange: every member takes its rows once all have started, and goes on once all have what they take.
    fn exchange(&mut self, rank: u32, node: u32) -> Result<()> {
        let members = self.linked.members(rank, node)?;
        if !self.gathered.insert(members[0]) {
            return Ok(());
        }
        let streams: Vec<StreamId> = members.iter().map(|&(m, node)| self.stream(m, node)).collect();
        let starts: Vec<EventId> =
            members.iter().map(|&(m, node)| self.around[m as usize][node as usize].start).collect();
        self.everyone(&streams, &starts);
        for (&(rank, node), &stream) in members.iter().zip(&streams) {
            self.commands.push(Command::Pull { stream, rank, node });
        }
        let done: Vec<EventId> = streams.iter().map(|&stream| self.record(stream)).collect();
        self.everyone(&streams, &done);
        Ok(())
    }

    /// Has each of the streams wait for the events of all others.
    fn everyone(&mut self, streams: &[StreamId], events: &[EventId]) {
        for (i, &stream) in streams.iter().enumerate() {
            let others = events.iter().enumerate().filter(|(j, _)| *j != i);
            others.for_each(|(_, &event)| self.wait(stream, event));
        }
    }

    /// Has member `i` add up its part of everyone's source: its own is copied to where the sum goes, and the others'
    /// are added in the order of the group.
    fn sum(&mut self, members: &[(u32, u32)], i: usize, kind: CollectiveKind) {
        let (n, stream) = (members.len(), self.stream(members[i].0, members[i].1));
        let to = match kind {
            CollectiveKind::AllReduce => self.linked.side(members[i], true, i, n),
            _ => self.linked.side(members[i], true, 0, 1),
        };
        // Its own part first: source and sum may be one buffer.
        for j in std::iter::once(i).chain((0..n).filter(|j| *j != i)) {
            let (from, to) = (self.linked.side(members[j], false, i, n), to.clone());
            // Where the sum goes is where its own part is.
            if from == to {
                continue;
            }
            self.commands.push(if j == i {
                Command::Copy { stream, from, to }
            } else {
                Command::Add { stream, from, to }
            });
        }
    }

    /// Has member `i` copy the parts that it is to have.
    fn pull(&mut self, members: &[(u32, u32)], i: usize, kind: CollectiveKind) {
        let (n, stream) = (members.len(), self.stream(members[i].0, members[i].1));
        for j in 0..n {
            let from = match kind {
                CollectiveKind::AllGather => self.linked.side(members[j], false, 0, 1),
                CollectiveKind::AllToAll => self.linked.side(members[j], false, i, n),
                _ if j == i => continue,
                _ => self.linked.side(members[j], true, j, n),
            };
            let to = self.linked.side(members[i], true, j, n);
            if from != to {
                self.commands.push(Command::Copy { stream, from, to });
            }
        }
    }
}
