//! Training on GPUs: the CPU executor's job, done by a [`Device`].
//!
//! Steps are held to the dense f64 reference, by a double that obeys the same commands on the CPU (`tests/cuda_run/`) and on an
//! H100 and an H200, where one and four ranks were right (`traces/measured`).

use super::device::{Device, EventId, Operands, StreamId};
use super::driver::{self, Cuda};
use super::fused::{Attention, said};
use super::incoming::Incoming;
use super::lower::{Factors, Gemm, LEAST_SHARED};
use super::prepare::OpAt;
use super::script::{Linked, script};
use super::session::{Keep, OnGpus, Session};
use crate::error::{Error, Result};
use crate::exec::arena::Arena;
use crate::exec::source::Source;
use crate::exec::state::{Memory, Watch};
use crate::exec::transport::Hub;
use crate::exec::{Job, Options, Run, inputs, one_step, outputs};
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::Layout;
use crate::plan::{Dtype, Kernel, Plan, check};
use crate::timeline::Timeline;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Where ranks live: the GPUs by their numbers on this machine, and for each rank which of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    pub ordinals: Vec<u32>,
    pub of_rank: Vec<u32>,
}

impl Placement {
    /// The placement of ranks on `devices`: the GPU of each, by its number on this machine.
    pub fn new(devices: &[u32]) -> Placement {
        let mut ordinals = devices.to_vec();
        ordinals.sort_unstable();
        ordinals.dedup();
        let of = |d: &u32| ordinals.iter().position(|o| o == d).expect("taken from the same list") as u32;
        Placement { of_rank: devices.iter().map(of).collect(), ordinals }
    }
}

/// Trains for the steps of `job` on this machine's GPUs, [`Options::devices`] being the GPU of each rank. `each` is given
/// every step as it ends, with its number in [`Job::numbers`]. Errors: no driver, no such GPU, too little memory, a
/// dtype that no kernel takes.
pub fn train(plan: &Plan, options: &Options, job: &Job, each: &mut dyn FnMut(u64, Run) -> Result<()>) -> Result<()> {
    driver::count()?;
    check::check(plan)?;
    let placement = Placement::new(&options.devices);
    let mut cuda = Cuda::open(&placement.ordinals, options.attention)?;
    train_on(&mut cuda, plan, options, job, each)
}

/// Trains as [`train`] does, on any device that has as many GPUs as `options.devices` names.
pub fn train_on<D: Device>(
    device: &mut D,
    plan: &Plan,
    options: &Options,
    job: &Job,
    each: &mut dyn FnMut(u64, Run) -> Result<()>,
) -> Result<()> {
    takes(plan)?;
    let Placement { ordinals, of_rank } = Placement::new(&options.devices);
    if of_rank.len() != plan.ranks() as usize {
        let why = format!("{} GPUs are given for {} ranks; give one for each", of_rank.len(), plan.ranks());
        return Err(Error::device("cuda", why));
    }
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let layouts = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let matching = Matching::new(plan, &lines);
    let (shared, fused) = (least_shared(device, ordinals.len()), device.fused());
    let linked = Linked { shared, fused: fused.as_deref(), ..Linked::new(plan, &lines, &matching, &layouts) };
    let watched = if options.keep || job.keep_last { outputs::watched(plan) } else { vec![] };
    let script = script(linked, &of_rank, &watched)?;

    let mut session = Session::new(device, linked, &script, &of_rank, ordinals.len() as u32)?;
    for rank in 0..plan.ranks() {
        let mut arena = Arena::new(plan, &layouts[plan.program_of(rank) as usize]);
        inputs::fill(plan, &atoms, rank, job.source, &mut arena);
        session.fill(rank, arena.bytes())?;
    }
    let (given, hash) = (inputs::shared(plan, job.source.seed), plan.hash());
    let see = |session: &mut Session<D>, look: &dyn Fn(&dyn Watch, &mut Memory) -> Result<()>| {
        let Some(watch) = job.watch else { return Ok(()) };
        let held = &mut OnGpus(RefCell::new(session));
        look(watch, &mut Memory { plan, atoms: &atoms, hash: &hash, held })
    };
    see(&mut session, &|watch, memory| watch.begin(memory))?;
    let (first, last) = (*job.numbers().start(), *job.numbers().end());
    for step in job.numbers() {
        // What is wrong shows in the first step, and is named there; those after it are not held up.
        session.one_by_one(step == first && job.steps > 1);
        for rank in 0..plan.ranks() {
            for (at, values) in inputs::fed(plan, rank, (job.source, step), &given) {
                session.put(rank, at, &values)?;
            }
        }
        let logits = job.keep_last && step == last;
        session.step(step, Keep { all: options.keep || logits, logits })?;
        let done = session.done()?;
        let mut run = outputs::gather(plan, &lines, &Hub::new(&vec![0; plan.ranks() as usize], None), done)?;
        run.sent_bytes = session.sent().to_vec();
        run.attention = Some(said(linked.fused));
        each(step, run)?;
        see(&mut session, &|watch, memory| watch.after(step, memory))?;
    }
    Ok(())
}

/// How steps are timed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing<'a> {
    /// Steps to do. The first is for what comes up once, and is slow.
    pub steps: u64,
    /// The one rank that is there, its messages and collectives replaced by waits, or by copies inside its own memory;
    /// `None`: all ranks are.
    pub solo: Option<u32>,
    /// Seconds that each communicating op of the rank alone waits, by op; `None`: it copies.
    pub waits: Option<&'a [f64]>,
    /// How often to repeat the step as one CUDA graph; a step with waits is not repeated so, as the host ends them.
    pub graphs: u64,
    /// Whether everything runs one after the other: see [`Linked::in_line`].
    pub in_line: bool,
    pub rest: Rest,
}

/// When a GPU rests, for as long as it has worked: its power holds its clocks down only where it works for longer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Rest {
    #[default]
    Never,
    /// Between steps: small steps are at full clocks, large ones in their first tens of milliseconds.
    BetweenSteps,
    /// Between steps, and within them behind this many seconds of work at most, or one op: all kernels are at full
    /// clocks, those at the end of a long step too. How long ops take is told by a step behind the first, which counts
    /// for nothing.
    Within(f64),
}

/// Steps of a plan whose memory is filled with random numbers as training has them: for times, never for what they compute.
/// `each` is given a step and the seconds that the host took to hand it over. Brings seconds of the step as one graph,
/// where that was asked for and all ranks are on one GPU.
pub fn time_steps<D: Device>(
    device: &mut D,
    plan: &Plan,
    devices: &[u32],
    Timing { steps, solo, waits, graphs, in_line, rest }: Timing,
    each: &mut dyn FnMut(Run, f64) -> Result<()>,
) -> Result<Vec<f64>> {
    takes(plan)?;
    let Placement { ordinals, of_rank } = Placement::new(devices);
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let mut layouts = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let incoming = solo.filter(|_| waits.is_some()).map(|rank| {
        let program = plan.program_of(rank) as usize;
        Incoming::new(plan, &lines[program], &mut layouts[program])
    });
    let matching = Matching::new(plan, &lines);
    let (shared, fused) = (least_shared(device, ordinals.len()), device.fused());
    let fused = fused.as_deref();
    let incoming = incoming.as_ref();
    let linked =
        Linked { solo, in_line, waits, incoming, shared, fused, ..Linked::new(plan, &lines, &matching, &layouts) };
    let script = script(linked, &of_rank, &[])?;
    let mut session = Session::new(device, linked, &script, &of_rank, ordinals.len() as u32)?;
    let source = Source::seeded(1);
    let given = inputs::shared(plan, 1);
    for rank in linked.ranks() {
        session.fill_as_in_training(rank)?;
        for (at, values) in inputs::fed(plan, rank, (&source, 1), &given) {
            session.put(rank, at, &values)?;
        }
    }
    let gathered = |done| outputs::gather(plan, &lines, &Hub::new(&vec![0; plan.ranks() as usize], None), done);
    for step in 1..=steps {
        // The first step is for what comes up once, and names what fails.
        session.one_by_one(step == 1 && steps > 1);
        let begun = Instant::now();
        session.step(step, Keep::default())?;
        let (took, host) = (begun.elapsed(), session.handed_over().as_secs_f64());
        let done = session.done()?;
        each(gathered(done)?, host)?;
        if let (1, Rest::Within(most)) = (step, rest) {
            session.one_by_one(false);
            session.step(step, Keep::default())?;
            let work = gathered(session.done()?)?.timeline;
            session.rest_before(LEAD.as_secs_f64());
            breaks(&work, most).into_iter().for_each(|(op, seconds)| session.rest_after(op, seconds));
        }
        std::thread::sleep(match rest {
            _ if step == steps && graphs == 0 => Duration::ZERO,
            Rest::Never => Duration::ZERO,
            // The GPU has rested within the step, but in the first.
            Rest::Within(most) if step > 1 => took.min(Duration::from_secs_f64(most)),
            Rest::Within(_) | Rest::BetweenSteps => took.min(LONG_ENOUGH),
        });
    }
    if graphs > 0 && ordinals.len() == 1 && waits.is_none() { session.as_graph(graphs) } else { Ok(vec![]) }
}

/// Ops after which ranks that share a stream have worked for `most` seconds, or would have with the next, and for how long they
/// have.
fn breaks(timeline: &Timeline, most: f64) -> Vec<(OpAt, f64)> {
    let spans =
        timeline.classes.iter().flat_map(|class| (0..).zip(&class.spans).map(|(node, s)| ((class.rank, node), s)));
    let mut ops: Vec<(f64, OpAt, f64)> =
        spans.map(|(op, span)| (span.end.value(), op, span.duration().value())).collect();
    ops.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut found, mut worked) = (vec![], 0.0);
    for pair in ops.windows(2) {
        worked += pair[0].2;
        if worked + pair[1].2 > most {
            found.push((pair[0].1, worked));
            worked = 0.0;
        }
    }
    found
}

/// How long the GPU waits at the start of a step in which it rests, so that all of the step is there when it begins:
/// behind a pause the host is slow, and takes up to a tenth of a millisecond for its first command.
const LEAD: Duration = Duration::from_millis(5);

/// The longest rest, behind which clocks are full again whatever was before: power is looked at over tens of
/// milliseconds.
const LONG_ENOUGH: Duration = Duration::from_secs(1);

/// One step of seeded weights and tokens. Errors: those of [`train`].
pub fn execute(plan: &Plan, options: &Options) -> Result<Run> {
    one_step(options.seed, |job, each| train(plan, options, job, &mut |_, done| each(done)))
}

/// Bytes of shared memory that a block may have on all of the GPUs: ranks that run one program launch the same.
pub(super) fn least_shared<D: Device>(device: &D, gpus: usize) -> u64 {
    (0..gpus as u32).map(|gpu| device.shared(gpu)).min().unwrap_or(LEAST_SHARED)
}

/// Errors: a plan with operands that no kernel here takes, said before anything is worked out.
pub(super) fn takes(plan: &Plan) -> Result<()> {
    if let Some(tensor) = plan.tensors.iter().find(|t| t.host) {
        let why = format!(
            "{:?} is in the host's memory, which runs on GPUs do not use yet; leave out the options that offload, or run \
             it --on cpu",
            tensor.name
        );
        return Err(Error::device("cuda", why));
    }
    if plan.tensors.iter().any(|t| !t.in_fp8.is_empty()) {
        let why = "options: weights are not gathered in FP8 on GPUs yet; leave gather-fp8 out, or run it --on cpu";
        return Err(Error::device("cuda", why));
    }
    if plan.kernels().any(|kernel| matches!(kernel, Kernel::Sparse(_))) {
        let why = "model: no kernels of sparse attention run on GPUs yet; use a model that sees all keys (deepseek-v3 for \
                   deepseek-v3.2), or run it --on cpu";
        return Err(Error::device("cuda", why));
    }
    let inputs = plan.feed.tokens();
    let compute = inputs.map_or(Dtype::Bf16, |inputs| plan.tensors[inputs.hidden as usize].dtype);
    if compute != Dtype::Bf16 {
        let why = format!("its activations are {}; kernels of GPUs take bf16: give --dtype bf16", compute.name());
        return Err(Error::device("cuda", why));
    }
    Ok(())
}

/// Rows, columns and inner dim of the product that stands for the best that a GPU does; and how often it is timed.
const SIDE: u64 = 8192;
const TIMES: usize = 10;

/// FLOP/s of a bf16 product of GPU `ordinal`, the median of ten: the yardstick of an MFU here.
pub fn best_gemm(ordinal: u32) -> Result<f64> {
    driver::count()?;
    let mut cuda = Cuda::open(&[ordinal], Attention::Own)?;
    Ok(2.0 * (SIDE as f64).powi(3) / gemm_seconds(&mut cuda, SIDE, TIMES)?)
}

/// Median seconds of a square bf16 product, of random numbers: zeros would be faster than work is.
pub fn gemm_seconds<D: Device>(device: &mut D, side: u64, times: usize) -> Result<f64> {
    // Three products more before those: the first chooses an algorithm, and clocks rise.
    let mut square = Square::new(device, side, times + 3)?;
    square.hand_over(device)?;
    square.seconds(device, 3)
}

/// A square bf16 product that is done again and again.
pub struct Square {
    gemm: Gemm,
    operands: Operands,
    stream: StreamId,
    /// The events before and after each product of a round.
    events: Vec<[EventId; 2]>,
}

impl Square {
    /// A product of random numbers, `times` products a round.
    pub fn new<D: Device>(device: &mut D, side: u64, times: usize) -> Result<Square> {
        let bytes = 2 * side * side;
        let [a, b, c] = [device.allocate(0, bytes)?, device.allocate(0, bytes)?, device.allocate(0, bytes)?];
        for (seed, operand) in [(1, a), (2, b)] {
            device.write(0, operand, &random_bf16(side * side, seed))?;
        }
        device.multiplies(0)?;
        let dtypes = [Dtype::Bf16; 3];
        let gemm =
            Gemm { count: 1, shape: [side; 3], transposed: [false, true], accumulate: false, bias: false, dtypes };
        let operands = Operands { factors: Factors::ONE, a, b, c, bias: None, scales: None };
        let stream = device.stream(0)?;
        let events = (0..times).map(|_| Ok([device.event(0)?, device.event(0)?])).collect::<Result<_>>()?;
        Ok(Square { gemm, operands, stream, events })
    }

    /// Hands over one round. It is under way when this returns.
    pub fn hand_over<D: Device>(&mut self, device: &mut D) -> Result<()> {
        for [from, to] in &self.events {
            device.record(self.stream, *from)?;
            device.gemm(self.stream, &self.gemm, self.operands)?;
            device.record(self.stream, *to)?;
        }
        Ok(())
    }

    /// Waits for the round; the median of its products without the first few.
    pub fn seconds<D: Device>(&mut self, device: &mut D, skip: usize) -> Result<f64> {
        device.synchronize()?;
        let counted = self.events[skip..].iter();
        let mut seconds = counted.map(|&[from, to]| device.seconds(from, to)).collect::<Result<Vec<f64>>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }
}

/// Numbers between -1 and 1 by a linear congruence (Knuth's MMIX): many, fast, and like data to a GPU's power.
pub fn random_bf16(elems: u64, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        crate::exec::arena::to_bf16(x).to_le_bytes()
    };
    (0..elems).flat_map(|_| next()).collect()
}
