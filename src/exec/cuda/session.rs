//! A plan's ranks on GPUs: their memories, and one step after the other.
//!
//! Ranks that share a GPU have their kernels take turns and their messages copied inside its memory: what is measured
//! of such a transfer is that copy, never a link.

mod acquaint;
mod fill;
mod held;
mod notes;

use super::calls::{Call, Communicator};
use super::device::{Device, EventId, StreamId};
use super::exchange::Between;
use super::lower::{Launch, Where, lower};
use super::prepare::{OpAt, Prepared, Ready, Spans, Tables, changes, lower_op, named, resolve};
use super::script::{Command, Linked, Region, Script};
use crate::error::{Cause, Error, Result};
use crate::exec::arena::{Data, Peak};
use crate::exec::outputs;
use crate::exec::rank::Done;
use crate::plan::link::Place;
use crate::plan::memory::{Life, SlotId, lives};
use crate::plan::{Kernel, OpKind, order};
pub use acquaint::connect;
pub use held::OnGpus;
use notes::Notes;
use rustc_hash::FxHashMap;
use std::time::{Duration, Instant};

/// What a step keeps besides the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Keep {
    /// Whether gradients, weights and hidden states are kept.
    pub all: bool,
    pub logits: bool,
}

/// An op between this process and others.
struct Talk {
    lane: Communicator,
    /// The deeds of an exchange that pack its rows before the calls; those of `unpack` add up what came, after them.
    pack: Vec<Ready>,
    calls: Vec<Call>,
    unpack: Vec<Ready>,
    /// Bytes that the rank sends.
    sent: u64,
}

pub struct Session<'a, 'p, D: Device> {
    device: &'a mut D,
    linked: Linked<'p>,
    script: &'a Script,
    /// The device of each rank, and where the rank's memory begins.
    gpus: Vec<u32>,
    bases: Vec<u64>,
    /// Scratch memory and constants of each device.
    scratch: Vec<u64>,
    tables: Vec<Tables>,
    zeros: Vec<EventId>,
    streams: Vec<StreamId>,
    events: Vec<EventId>,
    ready: FxHashMap<OpAt, Vec<Ready>>,
    /// Ops whose launches differ from step to step.
    changing: Vec<OpAt>,
    adds: FxHashMap<[Region; 2], Vec<Ready>>,
    /// The ops between this process and others, by op of the rank that is here.
    talks: FxHashMap<u32, Talk>,
    between: Vec<(u32, Between)>,
    /// Addresses, by lane, at which exchanges pack what goes and want what comes.
    rooms: FxHashMap<Communicator, [u64; 2]>,
    lives: Vec<Vec<Vec<Vec<Life>>>>,
    /// Whether to wait after each command, so that a failure is that command's.
    one_by_one: bool,
    keep: Keep,
    /// Whether every command may be waited for: not where a rank in another process waits for a later one.
    may_wait: bool,
    notes: Notes,
    sent: Vec<u64>,
    /// The bytes that each pull takes from other ranks, by sender. They follow from the route, which takes long to go
    /// through.
    pulled: FxHashMap<OpAt, Vec<(u32, u64)>>,
    /// Seconds to rest before a step; and within it, by the event before each rest.
    lead: f64,
    breaks: FxHashMap<EventId, f64>,
    /// How long the host took to hand over the last step.
    handed_over: Duration,
}

impl<'a, 'p, D: Device> Session<'a, 'p, D> {
    /// A session of ranks on `gpus`, of which there are `count`. Errors: too little memory, before any is asked for;
    /// products in FP8 on a GPU that has none.
    pub fn new(
        device: &'a mut D,
        linked: Linked<'p>,
        script: &'a Script,
        gpus: &[u32],
        count: u32,
    ) -> Result<Session<'a, 'p, D>> {
        let prepared = Prepared::new(linked, gpus, count as usize)?;
        Session::of(device, linked, script, gpus, prepared)
    }

    /// A session of ranks whose launches have been prepared.
    pub fn of(
        device: &'a mut D,
        linked: Linked<'p>,
        script: &'a Script,
        gpus: &[u32],
        prepared: Prepared,
    ) -> Result<Session<'a, 'p, D>> {
        fits(device, linked, gpus, &prepared)?;
        prepared.in_fp8().try_for_each(|(rank, node)| {
            let taken = device.multiplies_fp8(gpus[rank as usize]);
            taken.map_err(|e| Error::device(named(linked, rank, node), e))
        })?;
        let count = prepared.scratch.len() as u32;
        let bytes = |rank: u32| linked.layouts[linked.plan.program_of(rank) as usize].bytes;
        // Ranks that are not there have no memory.
        let mut bases = vec![0; linked.plan.ranks() as usize];
        for rank in linked.ranks() {
            bases[rank as usize] = device.allocate(gpus[rank as usize], bytes(rank))?;
        }
        let (mut scratch, mut tables, mut zeros) = (vec![], vec![], vec![]);
        for gpu in 0..count {
            let (own, constants) = (prepared.scratch[gpu as usize], prepared.tables[gpu as usize]);
            scratch.push(device.allocate(gpu, own)?);
            tables.push(Tables::new(device.allocate(gpu, constants)?, constants));
            zeros.push(device.event(gpu)?);
        }
        let mut rooms = FxHashMap::default();
        let mut wanted: Vec<_> = prepared.rooms(linked).into_iter().collect();
        wanted.sort_unstable();
        for (lane, [goes, comes]) in wanted {
            rooms.insert(lane, [device.allocate(0, goes)?, device.allocate(0, comes)?]);
        }
        let streams = script.streams.iter().map(|&gpu| device.stream(gpu)).collect::<Result<_>>()?;
        let events = script.events.iter().map(|&gpu| device.event(gpu)).collect::<Result<_>>()?;
        let changing = prepared.ops.iter().map(|op| op.0).filter(|&op| changes(linked, op)).collect();
        let mut session = Session {
            device,
            linked,
            script,
            gpus: gpus.to_vec(),
            bases,
            scratch,
            tables,
            zeros,
            streams,
            events,
            ready: FxHashMap::default(),
            changing,
            adds: FxHashMap::default(),
            talks: FxHashMap::default(),
            between: prepared.between,
            rooms,
            lives: linked.lines.iter().map(|line| lives(linked.plan, line)).collect(),
            one_by_one: false,
            may_wait: !linked.joined || order::in_step(linked.plan, linked.lines, linked.matching),
            keep: Keep::default(),
            notes: Notes::default(),
            sent: vec![],
            pulled: FxHashMap::default(),
            lead: 0.0,
            breaks: FxHashMap::default(),
            handed_over: Duration::ZERO,
        };
        if !session.may_wait {
            never_one_by_one()?;
        }
        session.one_by_one(false);
        for gpu in 0..count {
            let here = prepared.ops.iter().filter(|(op, _)| gpus[op.0 as usize] == gpu);
            let launches: Vec<&Launch> = here.flat_map(|(_, lowered)| lowered.launches()).collect();
            session.device.compile(gpu, &launches);
        }
        for (op, lowered) in &prepared.ops {
            let ready = session.resolved(*op, lowered).map_err(|e| Error::device(named(linked, op.0, op.1), e))?;
            session.ready.insert(*op, ready);
        }
        Ok(session)
    }

    fn resolved(&mut self, (rank, node): OpAt, lowered: &super::lower::Lowered) -> Result<Vec<Ready>> {
        let line = self.linked.line(rank);
        let span = |place: &Place| self.address(&self.linked.region(rank, place));
        // An exchange reads what all its members have.
        let reads = match line.nodes[node as usize].op.kind {
            OpKind::Exchange { .. } => self.offered(rank, node)?,
            _ => {
                let read = |i| self.address(&self.linked.read_region(rank, node, i));
                (0..line.reads(node as usize).len()).map(read).collect()
            }
        };
        let writes = line.writes(node as usize).iter().map(span).collect();
        let gpu = self.gpus[rank as usize];
        let spans = Spans { reads, writes, scratch: self.scratch[gpu as usize] };
        resolve(self.device, gpu, &mut self.tables[gpu as usize], lowered, &spans)
    }

    /// Addresses and bytes of an exchange's buffers, member after member.
    fn offered(&self, rank: u32, node: u32) -> Result<Vec<(u64, u64)>> {
        let of = |(member, node): (u32, u32)| {
            let places = self.linked.line(member).reads(node as usize);
            // A rank alone reads its own in place of the others'.
            let member = self.linked.solo.unwrap_or(member);
            places.iter().map(move |place| self.address(&self.linked.region(member, place)))
        };
        Ok(self.linked.members(rank, node)?.into_iter().flat_map(of).collect())
    }

    /// Address and bytes of a region.
    fn address(&self, region: &Region) -> (u64, u64) {
        (self.bases[region.rank as usize] + region.bytes.start, region.bytes.end - region.bytes.start)
    }

    /// Writes a rank's memory.
    pub fn fill(&mut self, rank: u32, bytes: &[u8]) -> Result<()> {
        self.device.write(self.gpus[rank as usize], self.bases[rank as usize], bytes)
    }

    /// Writes one slot of a rank, if it has a place.
    pub fn put(&mut self, rank: u32, at: SlotId, values: &[f64]) -> Result<()> {
        let layout = &self.linked.layouts[self.linked.plan.program_of(rank) as usize];
        let Some(offset) = layout.offset(at) else { return Ok(()) };
        let data = Data::from_f64(values, self.linked.plan.tensors[at.tensor as usize].dtype);
        self.device.write(self.gpus[rank as usize], self.bases[rank as usize] + offset, data.to_bytes())
    }

    /// Sets whether to wait after each command from now on: a command that fails is named then, and times are longer.
    pub fn one_by_one(&mut self, yes: bool) {
        self.one_by_one = self.may_wait && (yes || std::env::var_os(ONE_BY_ONE).is_some());
    }

    /// Has every GPU rest for `seconds` before every step from now on.
    pub fn rest_before(&mut self, seconds: f64) {
        self.lead = seconds;
    }

    /// Has the stream of an op rest after it for `seconds`, in every step from now on.
    pub fn rest_after(&mut self, (rank, node): OpAt, seconds: f64) {
        self.breaks.insert(self.script.around[rank as usize][node as usize].end, seconds);
    }

    /// Hands over one step, counted from 1, and waits for its end.
    pub fn step(&mut self, step: u64, keep: Keep) -> Result<()> {
        let ranks = self.linked.plan.ranks() as usize;
        (self.keep, self.sent) = (keep, vec![0; ranks]);
        self.make_room()?;
        for op in self.changing.clone() {
            let lowered = lower_op(self.linked, op, step)?.unwrap_or_default();
            let ready = self.resolved(op, &lowered)?;
            self.ready.insert(op, ready);
        }
        let begun = Instant::now();
        self.begin()?;
        for command in &self.script.commands {
            let mut done = self.obey(command);
            if self.one_by_one {
                done = done.and_then(|()| self.device.synchronize());
            }
            done.map_err(|e| self.named(command, e))?;
        }
        self.handed_over = begun.elapsed();
        self.device.synchronize().map_err(|e| {
            let why =
                format!("{e}; it came up only at the end: {ONE_BY_ONE}=1 waits after each command and names the op");
            Error::device("a command of the step", why)
        })
    }

    /// Seconds of the step as one graph, `times` over: the host hands over one command for each. All ranks are on one
    /// GPU.
    pub fn as_graph(&mut self, times: u64) -> Result<Vec<f64>> {
        let Some(&first) = self.streams.first() else { return Ok(vec![]) };
        self.keep = Keep::default();
        self.lead = 0.0;
        self.breaks.clear();
        let around = [self.device.event(0)?, self.device.event(0)?];
        let ends = (1..self.streams.len()).map(|_| self.device.event(0)).collect::<Result<Vec<_>>>()?;
        self.device.capture(first)?;
        self.begin()?;
        for command in &self.script.commands {
            self.obey(command).map_err(|e| self.named(command, e))?;
        }
        for (&stream, end) in self.streams[1..].iter().zip(ends) {
            self.device.record(stream, end)?;
            self.device.wait(first, end)?;
        }
        let graph = self.device.captured(first)?;
        let mut seconds = vec![];
        // The first replay is for what comes up once.
        for turn in 0..=times {
            self.device.record(first, around[0])?;
            self.device.replay(first, graph)?;
            self.device.record(first, around[1])?;
            self.device.synchronize()?;
            if turn > 0 {
                seconds.push(self.device.seconds(around[0], around[1])?);
            }
        }
        Ok(seconds)
    }

    /// A step's time begins on each device when its first stream comes to it.
    fn begin(&mut self) -> Result<()> {
        for gpu in 0..self.zeros.len() as u32 {
            let own =
                || (0..).zip(&self.script.streams).filter(|(_, of)| **of == gpu).map(|(stream, _)| stream as usize);
            let Some(first) = own().next() else { continue };
            if self.lead > 0.0 {
                self.device.rest(self.streams[first], self.lead)?;
            }
            self.device.record(self.streams[first], self.zeros[gpu as usize])?;
            for stream in own().filter(|&s| s != first) {
                self.device.wait(self.streams[stream], self.zeros[gpu as usize])?;
            }
        }
        Ok(())
    }

    fn named(&self, command: &Command, error: Error) -> Error {
        match command {
            Command::Kernel { rank, node, stream }
            | Command::Pull { rank, node, stream }
            | Command::Call { rank, node, stream } => {
                Error::device(format!("{}, stream {stream}", named(self.linked, *rank, *node)), error)
            }
            other => Error::device(format!("{other:?}"), error),
        }
    }

    fn obey(&mut self, command: &Command) -> Result<()> {
        let stream = self.streams[command.stream() as usize];
        match command {
            Command::Wait { event, .. } => self.device.wait(stream, self.events[*event as usize]),
            Command::Record { event, .. } => {
                self.device.record(stream, self.events[*event as usize])?;
                self.breaks.get(event).map_or(Ok(()), |&seconds| self.device.rest(stream, seconds))
            }
            Command::Copy { from, to, .. } => {
                self.count(from, to);
                let ((from, bytes), (to, _)) = (self.address(from), self.address(to));
                self.device.copy(stream, to, from, bytes)
            }
            Command::Add { from, to, .. } => {
                self.count(from, to);
                let ready = self.add(from, to)?;
                self.hand_over(stream, &ready)
            }
            Command::Call { rank, node, .. } => {
                let talk = self.talks.remove(node).expect("made before the first step");
                self.sent[*rank as usize] += talk.sent;
                let done = self.talk(stream, &talk);
                self.talks.insert(*node, talk);
                done
            }
            Command::Idle { node, .. } => match self.linked.waits.map_or(0.0, |waits| waits[*node as usize]) {
                0.0 => Ok(()),
                seconds => self.device.rest(stream, seconds),
            },
            Command::Keep { rank, node, slot, .. } => self.note(stream, (*rank, *node), *slot),
            Command::Kernel { rank, node, .. } => {
                self.note_logits(stream, (*rank, *node))?;
                let ready = self.ready.remove(&(*rank, *node)).unwrap_or_default();
                let done = self.hand_over(stream, &ready);
                self.ready.insert((*rank, *node), ready);
                done
            }
            Command::Pull { rank, node, .. } => {
                self.count_pull(*rank, *node)?;
                let ready = self.ready.get(&(*rank, *node)).cloned().unwrap_or_default();
                self.hand_over(stream, &ready)
            }
        }
    }

    fn talk(&mut self, stream: StreamId, talk: &Talk) -> Result<()> {
        self.hand_over(stream, &talk.pack)?;
        if !talk.calls.is_empty() {
            self.device.call(stream, talk.lane, &talk.calls)?;
        }
        self.hand_over(stream, &talk.unpack)
    }

    fn hand_over(&mut self, stream: StreamId, ready: &[Ready]) -> Result<()> {
        ready.iter().try_for_each(|one| match one {
            Ready::Launch { function, size, words } => self.device.launch(stream, *function, *size, words),
            Ready::Gemm { gemm, at } => self.device.gemm(stream, gemm, *at),
            Ready::Copy { to, from, bytes } => self.device.copy(stream, *to, *from, *bytes),
            Ready::Fused { sdpa, at, workspace } => self.device.attend(stream, sdpa, at, *workspace),
        })
    }

    /// Counts the bytes that go from one rank's memory to another's as sent.
    fn count(&mut self, from: &Region, to: &Region) {
        if from.rank != to.rank {
            self.sent[from.rank as usize] += from.bytes.end - from.bytes.start;
        }
    }

    fn count_pull(&mut self, rank: u32, node: u32) -> Result<()> {
        if !self.pulled.contains_key(&(rank, node)) {
            self.pulled.insert((rank, node), super::exchange::taken(self.linked, rank, node)?);
        }
        for &(sender, bytes) in &self.pulled[&(rank, node)] {
            self.sent[sender as usize] += bytes;
        }
        Ok(())
    }

    /// The deeds of `to` += `from`, by the kernel that plans add with.
    fn add(&mut self, from: &Region, to: &Region) -> Result<Vec<Ready>> {
        let key = [from.clone(), to.clone()];
        if let Some(known) = self.adds.get(&key) {
            return Ok(known.clone());
        }
        let elems = (to.bytes.end - to.bytes.start) / to.dtype.size();
        let on = Where {
            views: &self.linked.plan.views,
            route: None,
            rank: to.rank,
            shared: self.linked.shared,
            fused: None,
        };
        let lowered = lower(&Kernel::Add { elems, trim: None }, on, &[from.dtype, to.dtype], &[to.dtype], 1)?;
        let reads = vec![self.address(from), self.address(to)];
        let spans = Spans { reads, writes: vec![self.address(to)], scratch: 0 };
        let gpu = self.gpus[to.rank as usize];
        let ready = resolve(self.device, gpu, &mut self.tables[gpu as usize], &lowered, &spans)?;
        self.adds.insert(key, ready.clone());
        Ok(ready)
    }

    fn offset(&self, rank: u32, at: SlotId) -> Result<u64> {
        let layout = &self.linked.layouts[self.linked.plan.program_of(rank) as usize];
        let name = &self.linked.plan.tensors[at.tensor as usize].name;
        layout.offset(at).ok_or_else(|| Error::device("cuda", format!("{name:?} has no place")))
    }

    fn held(&mut self, region: &Region) -> Result<Data> {
        let (at, bytes) = self.address(region);
        let bytes = self.device.read(self.gpus[region.rank as usize], at, bytes)?;
        Ok(Data::from_bytes(&bytes, region.dtype))
    }

    fn contents(&mut self, rank: u32, at: SlotId) -> Result<Data> {
        let tensor = &self.linked.plan.tensors[at.tensor as usize];
        let offset = self.offset(rank, at)?;
        self.held(&Region { rank, bytes: offset..offset + tensor.bytes(), dtype: tensor.dtype })
    }

    /// The results of each rank when a step is done: times by events, and what is kept.
    pub fn done(&mut self) -> Result<Vec<Done>> {
        let here = self.linked.ranks();
        (0..self.linked.plan.ranks())
            .map(|r| if here.contains(&r) { self.done_by(r) } else { Ok(Done::default()) })
            .collect()
    }

    fn done_by(&mut self, rank: u32) -> Result<Done> {
        let (plan, line) = (self.linked.plan, self.linked.line(rank));
        let zero = self.zeros[self.gpus[rank as usize] as usize];
        let (mut times, mut on_core) = (vec![], vec![]);
        for (around, node) in self.script.around[rank as usize].iter().zip(&line.nodes) {
            let [start, end] = [around.start, around.end].map(|event| self.events[event as usize]);
            let (start, end) = (self.device.seconds(zero, start)?, self.device.seconds(zero, end)?);
            times.push((start, end));
            // A kernel has the device to itself as far as kernels go.
            on_core.push(if matches!(node.op.kind, OpKind::Compute { .. }) { end - start } else { 0.0 });
        }
        let layout = &self.linked.layouts[plan.program_of(rank) as usize];
        let mut kept = FxHashMap::default();
        for slot in outputs::kept(plan, self.keep.all).into_iter().filter(|slot| layout.offset(*slot).is_some()) {
            kept.insert(slot, self.contents(rank, slot)?);
        }
        let seen = self.noted(rank)?.into_iter().collect();
        let logits = self.noted_logits(rank)?;
        Ok(Done { times, peak: Peak { device: layout.bytes, host: 0 }, seen, kept, logits, on_core, copied: vec![] })
    }

    /// How long the host took to hand over the last step, which the GPU may have been at meanwhile.
    pub fn handed_over(&self) -> Duration {
        self.handed_over
    }

    pub fn sent(&self) -> &[u64] {
        &self.sent
    }
}

/// The environment variable that has every command waited for.
const ONE_BY_ONE: &str = "FORETRAIN_ONE_BY_ONE";

/// Errors: [`ONE_BY_ONE`] is asked for where ranks would wait for each other for ever.
fn never_one_by_one() -> Result<()> {
    if std::env::var_os(ONE_BY_ONE).is_none() {
        return Ok(());
    }
    let why = "ranks of a pipeline wait for later commands of each other, which are not handed over meanwhile; \
               leave it out, or run all ranks in one process by --devices";
    Err(Error::spec("environment", ONE_BY_ONE, why))
}

/// Bytes that a GPU's context and libraries take besides, and the rounding of allocations.
const RESERVE: u64 = 512 << 20;

/// Errors: more memory than a GPU has, before it is asked for.
pub fn fits<D: Device>(device: &mut D, linked: Linked, gpus: &[u32], prepared: &Prepared) -> Result<()> {
    let bytes = |rank: usize| linked.layouts[linked.plan.program_of(rank as u32) as usize].bytes;
    for gpu in 0..prepared.scratch.len() as u32 {
        let ranks = linked.ranks();
        let here: Vec<usize> = (0..gpus.len()).filter(|&r| gpus[r] == gpu && ranks.contains(&(r as u32))).collect();
        let ranks: u64 = here.iter().map(|&rank| bytes(rank)).sum();
        let rooms: u64 = prepared.rooms(linked).into_values().flatten().sum();
        let more = prepared.scratch[gpu as usize] + prepared.tables[gpu as usize] + rooms + super::blas::WORKSPACE;
        let [free, _] = device.memory(gpu)?;
        if ranks + more + RESERVE > free {
            let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
            return Err(Cause::Memory.infeasible(format!(
                "{} ranks need {:.1} GiB on GPU {gpu} ({}), scratch memory and constants {:.1} GiB, and {:.1} GiB \
                 stay free for the libraries; {:.1} GiB are free there: use more GPUs, fewer ranks, a smaller model or seq_len",
                here.len(),
                gib(ranks),
                device.name(gpu),
                gib(more),
                gib(RESERVE),
                gib(free)
            )));
        }
    }
    Ok(())
}
