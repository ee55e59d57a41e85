//! A training step on one GPU: every rank of the plan in its own memory there, a stream for each communicator lane.
//!
//! **Unverified: nothing here has run on a GPU yet.** The commands it hands over are tested without one
//! ([`script`]), and so are the kernels ([`lower`]).
//!
//! Ranks share the GPU, so their kernels take turns and their messages are copies inside its memory: what is measured
//! of a transfer is that copy, never a link.

use super::blas::{Blas, Operands};
use super::driver::{Event, Function, Gpu, Memory, Stream};
use super::lower::{Action, Arg, Gemm, Launch, Lowered, Where, lower};
use super::script::{Command, Linked, Region, Script, script};
use crate::error::{Error, Result};
use crate::exec::arena::{Arena, Data};
use crate::exec::rank::Done;
use crate::exec::source::Source;
use crate::exec::transport::Hub;
use crate::exec::{Run, inputs, outputs};
use crate::plan::link::{AtomTable, Line, Place};
use crate::plan::matching::Matching;
use crate::plan::memory::{Layout, SlotId, lives};
use crate::plan::{Dtype, OpKind, Plan, check};
use rustc_hash::FxHashMap;

/// How to run a plan on a GPU.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which of the machine's GPUs.
    pub device: usize,
    pub seed: u64,
    /// Steps before the one that is measured: kernels are compiled and clocks rise in them.
    pub warm_up: u32,
    /// Keep gradients, new weights and hidden states.
    pub keep: bool,
}

/// Address and bytes of each operand.
type Spans = Vec<(u64, u64)>;

/// A kernel of an op, ready to be launched: parameters as words.
enum Ready {
    Launch { function: Function, grid: [u32; 3], threads: u32, shared: u32, words: Vec<u64> },
    Gemm { gemm: Gemm, at: Operands },
    Copy { to: u64, from: u64, bytes: u64 },
}

/// Runs one training step of `plan` with all its ranks on one GPU, and measures it. Errors: no GPU, too little memory
/// on it, a kernel that does not take the plan's dtypes.
pub fn execute(plan: &Plan, options: &Options) -> Result<Run> {
    check::check(plan)?;
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let layouts = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let matching = Matching::new(plan, &lines);
    let linked = Linked { plan, lines: &lines, matching: &matching, layouts: &layouts };
    let watched = if options.keep { outputs::watched(plan) } else { vec![] };
    let script = script(linked, &vec![0; plan.ranks() as usize], &watched)?;

    let gpu = Gpu::new(options.device)?;
    fits(&gpu, linked)?;
    let arenas = host_arenas(linked, &atoms, options.seed);
    let mut session = Session::new(linked, gpu, &script, arenas)?;
    session.prepare()?;
    for _ in 0..options.warm_up {
        session.step(&script)?;
        session.upload()?;
    }
    session.step(&script)?;
    session.outputs(&script, options.keep)
}

/// What every rank starts from, as the CPU executor fills it.
fn host_arenas<'p>(linked: Linked<'p>, atoms: &AtomTable, seed: u64) -> Vec<Arena<'p>> {
    let (plan, source) = (linked.plan, Source::seeded(seed));
    let given = inputs::shared(plan, seed);
    let of_rank = |rank| {
        let mut arena = Arena::new(plan, &linked.layouts[plan.program_of(rank) as usize]);
        inputs::fill(plan, atoms, rank, &source, &mut arena);
        inputs::feed(plan, atoms, rank, (&source, 1), &given, &mut arena);
        arena
    };
    (0..plan.ranks()).map(of_rank).collect()
}

/// Refuses what the GPU's memory cannot hold, before it is asked for.
fn fits(gpu: &Gpu, linked: Linked) -> Result<()> {
    let bytes = |rank: u32| linked.layouts[linked.plan.program_of(rank) as usize].bytes;
    let need: u64 = (0..linked.plan.ranks()).map(bytes).sum();
    let (free, _) = gpu.memory()?;
    if need > free / 100 * 95 {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        return Err(Error::infeasible(format!(
            "memory: {} ranks need {:.1} GiB together, {} has {:.1} GiB free; use fewer ranks, a smaller model or seq_len",
            linked.plan.ranks(),
            gib(need),
            gpu.name,
            gib(free)
        )));
    }
    Ok(())
}

struct Session<'p> {
    linked: Linked<'p>,
    /// Everything that lives on the GPU goes before the GPU does: fields are dropped in this order.
    memories: Vec<Memory>,
    tables: Vec<Memory>,
    scratch: Memory,
    streams: Vec<Stream>,
    events: Vec<Event>,
    blas: Blas,
    /// What each kernel op of each rank launches.
    ready: FxHashMap<(u32, u32), Vec<Ready>>,
    /// What watched slots held, by rank, slot and life.
    seen: FxHashMap<(u32, SlotId), Vec<(u32, Data)>>,
    gpu: Gpu,
    arenas: Vec<Arena<'p>>,
}

impl<'p> Session<'p> {
    fn new(linked: Linked<'p>, gpu: Gpu, script: &Script, arenas: Vec<Arena<'p>>) -> Result<Session<'p>> {
        let memories = arenas.iter().map(|arena| Memory::of(arena.bytes())).collect::<Result<_>>()?;
        Ok(Session {
            linked,
            memories,
            tables: vec![],
            scratch: Memory::poisoned(0)?,
            streams: (0..script.streams).map(|_| Stream::new()).collect::<Result<_>>()?,
            events: (0..script.events).map(|_| Event::new()).collect::<Result<_>>()?,
            blas: Blas::new()?,
            ready: FxHashMap::default(),
            seen: FxHashMap::default(),
            gpu,
            arenas,
        })
    }

    /// Weights and tokens as at the beginning.
    fn upload(&self) -> Result<()> {
        self.memories.iter().zip(&self.arenas).try_for_each(|(memory, arena)| memory.write(0, arena.bytes()))
    }

    /// Lowers every kernel of every rank, compiles what is new, and works out its parameters.
    fn prepare(&mut self) -> Result<()> {
        let linked = self.linked;
        let mut lowered = vec![];
        for rank in 0..linked.plan.ranks() {
            let line = linked.line(rank);
            for node in 0..line.nodes.len() as u32 {
                let OpKind::Compute { kernel, .. } = &line.nodes[node as usize].op.kind else { continue };
                let dtypes = |places: &[Place]| -> Vec<Dtype> {
                    places.iter().map(|p| linked.plan.tensors[p.tensor as usize].dtype).collect()
                };
                let (reads, writes) = (dtypes(line.reads(node as usize)), dtypes(line.writes(node as usize)));
                let on = Where { views: &linked.plan.views, rank };
                lowered.push(((rank, node), lower(kernel, on, &reads, &writes, 1)?));
            }
        }
        // Kernels take turns on one stream, so that one piece of scratch memory serves them all.
        let most = lowered.iter().map(|(_, l)| l.scratch.iter().map(|n| aligned(*n)).sum()).max().unwrap_or(0);
        self.scratch = Memory::poisoned(most)?;
        let mut tables = FxHashMap::default();
        for ((rank, node), lowered) in lowered {
            let ready = self.ready_of(rank, node, &lowered, &mut tables)?;
            self.ready.insert((rank, node), ready);
        }
        Ok(())
    }

    fn ready_of(
        &mut self,
        rank: u32,
        node: u32,
        lowered: &Lowered,
        tables: &mut FxHashMap<Vec<u8>, u64>,
    ) -> Result<Vec<Ready>> {
        let line = self.linked.line(rank);
        let address = |places: &[Place], i: usize| {
            let region = self.linked.region(rank, &places[i]);
            (self.memories[rank as usize].address(region.bytes.start), region.bytes.end - region.bytes.start)
        };
        let (reads, writes) = (line.reads(node as usize), line.writes(node as usize));
        let places: (Vec<_>, Vec<_>) = (
            (0..reads.len()).map(|i| address(reads, i)).collect(),
            (0..writes.len()).map(|i| address(writes, i)).collect(),
        );
        let mut scratch = vec![0];
        lowered.scratch.iter().for_each(|n| scratch.push(scratch[scratch.len() - 1] + aligned(*n)));
        let mut ready = vec![];
        for action in &lowered.actions {
            match action {
                Action::Copy { read, write } if places.0[*read].0 == places.1[*write].0 => {}
                Action::Copy { read, write } => {
                    let ((from, bytes), (to, _)) = (places.0[*read], places.1[*write]);
                    ready.push(Ready::Copy { to, from, bytes });
                }
                Action::Gemm(gemm) => {
                    let bias = gemm.bias.then(|| places.0[places.0.len() - 1].0);
                    let at = Operands { a: places.0[0].0, b: places.0[1].0, c: places.1[0].0, bias };
                    ready.push(Ready::Gemm { gemm: gemm.clone(), at });
                }
                Action::Launch(launch) => ready.push(self.launch(launch, &places, &scratch, tables)?),
            }
        }
        Ok(ready)
    }

    fn launch(
        &mut self,
        launch: &Launch,
        (reads, writes): &(Spans, Spans),
        scratch: &[u64],
        tables: &mut FxHashMap<Vec<u8>, u64>,
    ) -> Result<Ready> {
        let function = self.gpu.function(launch.source, launch.kernel, &launch.defines, launch.shared)?;
        let mut words = vec![];
        for arg in &launch.args {
            words.push(match arg {
                Arg::Read(i) => reads[*i].0,
                Arg::Write(i) => writes[*i].0,
                Arg::Scratch(i) => self.scratch.address(scratch[*i]),
                Arg::Null => 0,
                Arg::Int(n) => *n as u64,
                Arg::Real(x) => x.to_bits(),
                Arg::Table(bytes) => match tables.get(&bytes[..]) {
                    Some(&at) => at,
                    None => {
                        let table = Memory::of(bytes)?;
                        let at = table.address(0);
                        self.tables.push(table);
                        tables.insert(bytes.to_vec(), at);
                        at
                    }
                },
            });
        }
        let Launch { grid, threads, shared, .. } = *launch;
        Ok(Ready::Launch { function, grid, threads, shared, words })
    }

    /// Hands over one step and waits for its end.
    fn step(&mut self, script: &Script) -> Result<()> {
        self.seen.clear();
        for command in &script.commands {
            let done = self.obey(command);
            done.map_err(|e| self.named(command, e))?;
        }
        self.gpu.synchronize()
    }

    fn named(&self, command: &Command, error: Error) -> Error {
        match command {
            Command::Kernel { rank, node, stream } => {
                let path = self.linked.line(*rank).path(*node as usize);
                Error::device(format!("rank {rank}, {path}, stream {stream}"), error.to_string())
            }
            other => Error::device(format!("{other:?}"), error.to_string()),
        }
    }

    fn address(&self, region: &Region) -> (u64, u64) {
        (self.memories[region.rank as usize].address(region.bytes.start), region.bytes.end - region.bytes.start)
    }

    fn obey(&mut self, command: &Command) -> Result<()> {
        match command {
            Command::Wait { stream, event } => self.streams[*stream as usize].wait(&self.events[*event as usize]),
            Command::Record { stream, event } => self.streams[*stream as usize].record(&self.events[*event as usize]),
            Command::Copy { stream, from, to } => {
                let ((from, bytes), (to, _)) = (self.address(from), self.address(to));
                self.streams[*stream as usize].copy(to, from, bytes)
            }
            Command::Add { stream, from, to } => self.add(*stream, from, to),
            Command::Keep { rank, node, slot, .. } => self.keep(*rank, *node, *slot),
            Command::Kernel { stream, rank, node } => {
                let Some(ready) = self.ready.get(&(*rank, *node)) else { return Ok(()) };
                let stream = &self.streams[*stream as usize];
                ready.iter().try_for_each(|one| match one {
                    Ready::Launch { function, grid, threads, shared, words } => {
                        stream.launch(*function, *grid, *threads, *shared, words)
                    }
                    Ready::Gemm { gemm, at } => self.blas.run(gemm, *at, stream),
                    Ready::Copy { to, from, bytes } => stream.copy(*to, *from, *bytes),
                })
            }
        }
    }

    /// `to` += `from`, by the same kernel that plans add with.
    fn add(&mut self, stream: u32, from: &Region, to: &Region) -> Result<()> {
        let types = [from.dtype, to.dtype];
        let elems = (to.bytes.end - to.bytes.start) / to.dtype.size();
        let kernel = crate::plan::Kernel::Add { elems, trim: None };
        let on = Where { views: &self.linked.plan.views, rank: to.rank };
        let lowered = lower(&kernel, on, &types, &[to.dtype], 1)?;
        let places = (vec![self.address(from), self.address(to)], vec![self.address(to)]);
        for action in &lowered.actions {
            if let Action::Launch(launch) = action {
                let ready = self.launch(launch, &places, &[0], &mut FxHashMap::default())?;
                let Ready::Launch { function, grid, threads, shared, words } = ready else { continue };
                self.streams[stream as usize].launch(function, grid, threads, shared, &words)?;
            }
        }
        Ok(())
    }

    /// Stops everything to look: only asked for where outputs are kept, and timings do not matter.
    fn keep(&mut self, rank: u32, node: u32, slot: SlotId) -> Result<()> {
        self.gpu.synchronize()?;
        let lives = lives(self.linked.plan, self.linked.line(rank));
        let life = lives[slot.tensor as usize][slot.slot as usize].partition_point(|l| l.first <= node) as u32;
        let data = self.contents(rank, slot)?;
        let seen = self.seen.entry((rank, slot)).or_default();
        match seen.last_mut() {
            Some(last) if last.0 == life => last.1 = data,
            _ => seen.push((life, data)),
        }
        Ok(())
    }

    fn contents(&self, rank: u32, at: SlotId) -> Result<Data> {
        let tensor = &self.linked.plan.tensors[at.tensor as usize];
        let layout = &self.linked.layouts[self.linked.plan.program_of(rank) as usize];
        let offset =
            layout.offset(at).ok_or_else(|| Error::device("cuda", format!("{:?} has no place", tensor.name)))?;
        let bytes = self.memories[rank as usize].read(offset, tensor.bytes())?;
        Ok(Data::from_bytes(&bytes, tensor.dtype))
    }

    /// The timeline by events, and what is kept.
    fn outputs(&self, script: &Script, keep: bool) -> Result<Run> {
        let plan = self.linked.plan;
        let zero = &self.events[0];
        let mut done = vec![];
        for rank in 0..plan.ranks() {
            let mut times = vec![];
            for around in &script.around[rank as usize] {
                let at = |event: u32| self.events[event as usize].since(zero);
                times.push((at(around.start)?, at(around.end)?));
            }
            let layout = &self.linked.layouts[plan.program_of(rank) as usize];
            let mut kept = FxHashMap::default();
            for slot in outputs::kept(plan, keep).into_iter().filter(|slot| layout.offset(*slot).is_some()) {
                kept.insert(slot, self.contents(rank, slot)?);
            }
            let of_rank = self.seen.iter().filter(|((r, _), _)| *r == rank);
            let seen =
                of_rank.map(|((_, slot), all)| (*slot, all.iter().map(|(_, data)| data.clone()).collect())).collect();
            // Nobody asks for the logits of a GPU, nor which of its cores a kernel was on.
            let (logits, on_core) = Default::default();
            done.push(Done { times, peak: layout.bytes, seen, kept, logits, on_core });
        }
        outputs::gather(plan, self.linked.lines, &Hub::new(plan.ranks(), 1, None), done)
    }
}

fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(crate::plan::memory::ALIGN)
}
