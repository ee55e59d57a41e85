//! What the commands of ranks that share one GPU take, by a profile of it: streams, events, and kernels and copies that
//! share its multiprocessors and its memory.
//!
//! A GPU does as much work in a second whoever's it is. What runs side by side divides it: each by a weight, which is what
//! calibration has found kernels to keep beside a copy (`beside_copies`: a kernel that takes f times as long there keeps
//! 1/f of the GPU, the copy the rest). So memory-bound kernels, collectives' sums among them, get about as much as a copy
//! does, and nearly nothing beside a product, which holds all multiprocessors.

use super::exchange;
use super::run::takes;
use super::script::{Command, Linked, script};
use crate::act::work_of;
use crate::device::Profile;
use crate::device::clocks::{Clocks, Load};
use crate::device::measured::{Crowded, GpuSide, key};
use crate::error::{Error, Result};
use crate::exec::outputs;
use crate::exec::rank::Done;
use crate::exec::transport::Hub;
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::Layout;
use crate::plan::{Dtype, OpKind, Plan, Work, WorkClass};
use crate::timeline::Timeline;
use std::collections::VecDeque;

/// The timeline of a plan whose ranks are all on the GPU of a profile, commands being handed over by one thread. Errors: a
/// plan that cannot be run there.
pub fn play(plan: &Plan, profile: &Profile, gpu: &GpuSide) -> Result<Timeline> {
    takes(plan)?;
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let layouts = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let matching = Matching::new(plan, &lines);
    let linked = Linked::new(plan, &lines, &matching, &layouts);
    let script = script(linked, &vec![0; plan.ranks() as usize], &[])?;
    let clocks = gpu.power.as_ref().and_then(Clocks::new);
    let costs = Costs { linked, profile, gpu, clocks: clocks.as_ref() };
    let ops: usize = (0..plan.ranks()).map(|rank| linked.line(rank).nodes.len()).sum();
    let each = gpu.host_launch_s * ops as f64 / script.commands.len().max(1) as f64;
    let mut streams = vec![Stream::default(); script.streams.len()];
    for (i, command) in script.commands.iter().enumerate() {
        let issued = i as f64 * each;
        streams[command.stream() as usize].waiting.push_back((issued, command, costs.task(command)?));
    }
    let events = vec![f64::NAN; script.events.len()];
    let times = Player { streams, events, now: 0.0, gap: gpu.gap(), clocks }.run()?;
    let of = |rank: u32| {
        let around = &script.around[rank as usize];
        let times: Vec<(f64, f64)> = around.iter().map(|a| (times[a.start as usize], times[a.end as usize])).collect();
        Done { on_core: times.iter().map(|t| t.1 - t.0).collect(), times, ..Done::default() }
    };
    let hub = Hub::new(&vec![0; plan.ranks() as usize], None);
    Ok(outputs::gather(plan, &lines, &hub, (0..plan.ranks()).map(of).collect())?.timeline)
}

/// What a command has to do, and how much of the GPU it gets beside others.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Task {
    /// Seconds alone, at full clocks.
    seconds: f64,
    weight: f64,
    load: Load,
}

struct Costs<'a, 'p> {
    linked: Linked<'p>,
    profile: &'a Profile,
    gpu: &'a GpuSide,
    clocks: Option<&'a Clocks>,
}

/// The weight of a copy by the driver: all other weights are relative to it.
const COPY: f64 = 1.0;

/// The weight of a kernel that takes `slower` times as long beside a copy.
fn weight(slower: f64) -> f64 {
    COPY / (slower - 1.0).max(0.02)
}

/// The work of a pass over memory: bytes read and written.
fn passes(bytes: u64) -> Work {
    Work { flops: 0, bytes, class: WorkClass::Memory }
}

impl Costs<'_, '_> {
    fn task(&self, command: &Command) -> Result<Option<Task>> {
        let Crowded { gemm, attention, memory } = self.gpu.beside_copies;
        let copy = |bytes: u64| {
            let seconds = self.gpu.copy.at(&[bytes.max(1) as f64]).0;
            Task { seconds, weight: COPY, load: self.load(&passes(2 * bytes), seconds) }
        };
        let task = match command {
            Command::Wait { .. } | Command::Record { .. } | Command::Keep { .. } => return Ok(None),
            Command::Kernel { rank, node, .. } => {
                let (plan, line) = (self.linked.plan, self.linked.line(*rank));
                let Some((work, dtype)) = work_of(plan, line, *node as usize, *rank) else { return Ok(None) };
                let OpKind::Compute { kernel, .. } = &line.nodes[*node as usize].op.kind else { return Ok(None) };
                let slower = match work.class {
                    WorkClass::Gemm { .. } | WorkClass::Scan { .. } => gemm,
                    WorkClass::Attention { .. } => attention,
                    WorkClass::Memory => memory,
                };
                let seconds = self.seconds(kernel.curve(), &work, dtype);
                Task { seconds, weight: weight(slower), load: self.load(&work, seconds) }
            }
            Command::Copy { from, .. } => copy(from.bytes.end - from.bytes.start),
            // Two are read and one is written.
            Command::Add { to, .. } => {
                let bytes = 3 * (to.bytes.end - to.bytes.start);
                let work = passes(bytes);
                let known = self.profile.kernels.contains_key(&key("add", to.dtype));
                let dtype = if known { to.dtype } else { Dtype::Bf16 };
                let seconds = self.seconds("add", &work, dtype);
                Task { seconds, weight: weight(memory), load: self.load(&work, seconds) }
            }
            Command::Pull { rank, node, .. } => {
                let others: u64 = exchange::taken(self.linked, *rank, *node)?.iter().map(|taken| taken.1).sum();
                let members = self.linked.members(*rank, *node)?.len() as u64;
                // Kernels carry the rows, its own among them.
                let task = copy(others * members / (members - 1).max(1));
                Task { weight: weight(memory), ..task }
            }
            Command::Call { .. } | Command::Idle { .. } => {
                return Err(Error::device("cuda", "what other processes or absent ranks do shares no GPU"));
            }
        };
        Ok(Some(task))
    }

    fn load(&self, work: &Work, seconds: f64) -> Load {
        self.clocks.map_or(Load::NONE, |clocks| clocks.load(work, seconds))
    }

    fn seconds(&self, curve: &str, work: &Work, dtype: Dtype) -> f64 {
        use crate::device::KernelTime;
        self.profile.time_as(curve, work, dtype).seconds.value()
    }
}

#[derive(Clone, Default)]
struct Stream<'a> {
    /// Commands that have not begun: when each was handed over, what it is, and what work it is, if it takes any.
    waiting: VecDeque<(f64, &'a Command, Option<Task>)>,
    /// The command under way, with what is left of it; `None`: the stream stands still.
    running: Option<Task>,
    /// Until when the stream's front end is busy, s.
    free: f64,
}

struct Player<'a> {
    streams: Vec<Stream<'a>>,
    /// When each event was recorded, s; NaN before.
    events: Vec<f64>,
    now: f64,
    /// Seconds from the end of a kernel to the start of the next.
    gap: f64,
    /// The clocks; `None` where power holds nothing down.
    clocks: Option<Clocks>,
}

impl Player<'_> {
    /// Plays all commands. Returns when each event was recorded, s.
    fn run(mut self) -> Result<Vec<f64>> {
        loop {
            while (0..self.streams.len()).map(|s| self.advance(s)).fold(false, |any, moved| any | moved) {}
            let all: f64 = self.streams.iter().filter_map(|s| s.running).map(|task| task.weight).sum();
            let clocks = self.clocks.clone();
            // Seconds of its work in a second.
            let pace = |task: &Task| task.weight / all / clocks.as_ref().map_or(1.0, |clocks| clocks.slower(task.load));
            let ends = self.streams.iter().filter_map(|s| s.running.map(|t| self.now + t.seconds / pace(&t)));
            let begins = self.streams.iter().filter(|s| s.running.is_none()).filter_map(|s| s.begins(self.now));
            let Some(mut next) = ends.chain(begins).reduce(f64::min) else { break };
            let running: Vec<(Load, f64)> =
                self.streams.iter().filter_map(|s| s.running.map(|t| (t.load, pace(&t)))).collect();
            if let Some(clocks) = &mut self.clocks {
                next = next.min(self.now + clocks.left());
                let passed = next - self.now;
                clocks.pass(passed, running.iter().map(|(load, pace)| (*load, passed * pace)));
            }
            let passed = next - self.now;
            for stream in &mut self.streams {
                if let Some(task) = &mut stream.running {
                    task.seconds -= passed * pace(task);
                }
            }
            self.now = next;
        }
        if self.streams.iter().any(|s| !s.waiting.is_empty()) {
            return Err(Error::device("cuda", "streams wait for each other"));
        }
        Ok(self.events)
    }

    /// Lets a stream do what takes no time, and begin or end what does; whether anything came of it.
    fn advance(&mut self, s: usize) -> bool {
        let (now, gap) = (self.now, self.gap);
        let stream = &mut self.streams[s];
        let mut moved = false;
        if stream.running.is_some_and(|task| task.seconds <= 1e-12) {
            stream.running = None;
            stream.free = now + gap;
            moved = true;
            // An event right behind a kernel marks the kernel's end, before the gap.
            if let Some(&(issued, Command::Record { event, .. }, _)) = stream.waiting.front()
                && issued <= now
            {
                self.events[*event as usize] = now;
                stream.waiting.pop_front();
            }
        }
        while stream.running.is_none() && stream.free <= now {
            let Some(&(issued, command, task)) = stream.waiting.front() else { break };
            if issued > now {
                break;
            }
            match command {
                Command::Wait { event, .. } if self.events[*event as usize].is_nan() => break,
                Command::Record { event, .. } => self.events[*event as usize] = now,
                _ => {}
            }
            stream.running = task;
            stream.waiting.pop_front();
            moved = true;
        }
        moved
    }
}

impl Stream<'_> {
    /// When a stream can go on by itself, having waited for the host or for its front end, s; `None`: it has no
    /// commands left, or is not held up by these.
    fn begins(&self, now: f64) -> Option<f64> {
        let &(issued, ..) = self.waiting.front()?;
        Some(issued.max(self.free)).filter(|at| *at > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRODUCT: Task = Task { seconds: 1.0, weight: 10.0, load: Load::NONE };
    const COPIES: Task = Task { seconds: 1.0, weight: COPY, load: Load::NONE };

    /// When each event is recorded, where every command is issued at once.
    fn play_all(streams: &[Vec<(Command, Option<Task>)>], events: usize, gap: f64) -> Result<Vec<f64>> {
        fn stream(commands: &[(Command, Option<Task>)]) -> Stream<'_> {
            let waiting = commands.iter().map(|(command, task)| (0.0, command, *task)).collect();
            Stream { waiting, ..Stream::default() }
        }
        let streams = streams.iter().map(|commands| stream(commands)).collect();
        Player { streams, events: vec![f64::NAN; events], now: 0.0, gap, clocks: None }.run()
    }

    fn played(streams: &[Vec<(Command, Option<Task>)>], events: usize, gap: f64) -> Vec<f64> {
        play_all(streams, events, gap).unwrap()
    }

    fn does(task: Task) -> (Command, Option<Task>) {
        (Command::Kernel { stream: 0, rank: 0, node: 0 }, Some(task))
    }

    fn record(event: u32) -> (Command, Option<Task>) {
        (Command::Record { stream: 0, event }, None)
    }

    fn wait(event: u32) -> (Command, Option<Task>) {
        (Command::Wait { stream: 0, event }, None)
    }

    #[track_caller]
    fn near(got: &[f64], want: &[f64]) {
        assert!(got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-9), "{got:?} {want:?}");
    }

    #[test]
    fn copies_side_by_side_take_as_long_as_one_after_the_other() {
        near(&played(&[vec![does(COPIES), record(0)], vec![does(COPIES), record(1)]], 2, 0.0), &[2.0, 2.0]);
    }

    /// A product that takes 1.1 times as long beside a copy, and a copy that gets the rest.
    #[test]
    fn a_product_keeps_most_of_the_gpu_and_nothing_is_lost() {
        assert!((weight(1.1) - 10.0).abs() < 1e-9);
        near(&played(&[vec![does(PRODUCT), record(0)], vec![does(COPIES), record(1)]], 2, 0.0), &[1.1, 2.0]);
    }

    #[test]
    fn who_waits_takes_nothing_from_others_and_a_gap_is_before_the_next() {
        let first = vec![does(PRODUCT), record(0), record(1), does(PRODUCT), record(2)];
        let second = vec![wait(2), record(3), does(COPIES), record(4)];
        near(&played(&[first, second], 5, 0.1), &[1.0, 1.1, 2.1, 2.1, 3.1]);
    }

    #[test]
    fn streams_that_wait_for_each_other_are_an_error() {
        assert!(play_all(&[vec![wait(1), record(0)], vec![wait(0), record(1)]], 2, 0.0).is_err());
    }
}
