//! Runs a plan for real, on CPU threads: one thread a rank, each with private memory, lanes and slots.
//!
//! A rank starts an op when the plan's edges hold, the same edges that the predictors walk. Messages are
//! handed over, never shared; bytes are counted where they are delivered and the peak where memory is
//! touched, so that both can be held against what the plan says. A slot is NaN until something is written
//! and, where results are kept, again after its last use. Kernels compute in f32, or in f64 for a plan whose dtype is f64; bf16
//! buffers hold two bytes and are rounded as they are written.

mod arena;
pub mod attention_io;
pub mod cuda;
mod gather;
pub mod inputs;
pub mod kernels;
mod outputs;
pub mod probe;
mod rank;
pub mod reference;
mod shared;
mod transport;
mod turns;

use crate::error::{Error, Result};
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::{Layout, lives};
use crate::plan::{Dtype, Plan, check};
use crate::timeline::Timeline;
use arena::Arena;
use kernels::Scalar;
use rank::{Done, Rank};
use shared::Shared;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Instant;
use transport::{Hub, few};
use turns::Turns;

/// More threads than this are refused.
const MOST_RANKS: u32 = 512;

/// How to run a plan on CPU threads.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seeds weights and tokens.
    pub seed: u64,
    /// Device of each rank: ranks of one device take turns to compute.
    pub devices: Vec<u32>,
    /// Keep gradients, new weights and hidden states (they are large), and fill every slot with NaN after its last
    /// use: for a run whose numbers are looked at. Otherwise it is the times that count.
    pub keep: bool,
}

/// What a run brought.
#[derive(Debug, Clone)]
pub struct Run {
    /// Measured, a class a rank, with every op's span.
    pub timeline: Timeline,
    /// Mean over the tokens of the global batch; NaN for a plan that has none.
    pub loss: f64,
    /// Bytes that each rank sent, counted in the transport.
    pub sent_bytes: Vec<u64>,
    /// Most bytes that each rank had in use, counted at its allocator.
    pub peak_bytes: Vec<u64>,
    /// By weight name, summed over ranks as the plan does it.
    pub grads: BTreeMap<String, Vec<f64>>,
    /// Weights after the optimizer step, by name, from rank 0.
    pub weights: BTreeMap<String, Vec<f64>>,
    /// Final hidden states [seq * hidden] of every sequence of the global batch.
    pub hidden: Vec<Vec<f64>>,
    /// Of an attention-only plan: what it was run for, by operand, in the order of the sequence.
    pub tensors: BTreeMap<String, Vec<f64>>,
}

/// Runs one training step of `plan`, a thread a rank. Errors name the rank and the op.
pub fn execute(plan: &Plan, options: &Options) -> Result<Run> {
    check::check(plan)?;
    if plan.tensors.iter().any(|t| t.dtype == Dtype::F64) {
        run::<f64>(plan, options)
    } else {
        run::<f32>(plan, options)
    }
}

fn run<T: Scalar>(plan: &Plan, options: &Options) -> Result<Run> {
    let ranks = plan.ranks();
    if ranks > MOST_RANKS || options.devices.len() != ranks as usize {
        let why = format!("{ranks} ranks on {} devices; at most {MOST_RANKS} ranks run here", options.devices.len());
        return Err(Error::device("run", why));
    }
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let layouts = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    fits_in_memory(plan, &layouts)?;
    let matching = Matching::new(plan, &lines);
    let next: Vec<Vec<Vec<u32>>> = lines.iter().map(successors).collect();
    let lives: Vec<_> = lines.iter().map(|l| lives(plan, l)).collect();
    let turns = Turns::new(plan, &lines, &matching, &options.devices)?;
    let hub = Hub::new(ranks, options.devices.iter().max().map_or(0, |d| d + 1));
    let watched = if options.keep { outputs::watched(plan) } else { vec![] };
    let kept = outputs::kept(plan, options.keep);

    let given = inputs::shared(plan, options.seed);
    let mut arenas: Vec<Option<Arena>> = (0..ranks)
        .map(|rank| {
            let mut arena = Arena::new(plan, &layouts[plan.program_of(rank) as usize]);
            inputs::fill(plan, &atoms, rank, options.seed, &given, &mut arena);
            Some(arena)
        })
        .collect();
    let shared = Shared {
        plan,
        lines: &lines,
        matching: &matching,
        next: &next,
        lives: &lives,
        turns: &turns,
        hub: &hub,
        zero: Instant::now(),
        watched: &watched,
        kept: &kept,
        poison: options.keep,
        atoms: &atoms,
    };
    let ends: Vec<Mutex<Option<End>>> = (0..ranks).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for (rank, arena) in arenas.iter_mut().enumerate() {
            let (shared, end, arena) = (&shared, &ends[rank], arena.take().expect("filled above"));
            scope.spawn(move || {
                let outcome = thread::<T>(shared, rank as u32, arena);
                *end.lock().unwrap_or_else(|p| p.into_inner()) = Some(outcome);
            });
        }
    });
    let ends: Vec<End> = ends.into_iter().filter_map(|e| e.into_inner().unwrap_or_else(|p| p.into_inner())).collect();
    let done = all_done(&hub, ends)?;
    outputs::gather(plan, &lines, &hub, done)
}

/// How a rank's thread ended: with what it did, or waiting for something when everybody was stopped.
enum End {
    Done(Box<Done>),
    Stopped(Option<String>),
}

/// A rank from start to end; whatever goes wrong in it stops all the others.
fn thread<T: Scalar>(shared: &Shared, rank: u32, arena: Arena) -> End {
    let mut here = Rank::new(shared, rank, arena);
    let outcome = catch_unwind(AssertUnwindSafe(|| here.run::<T>()));
    match outcome {
        Ok(Ok(())) => {
            shared.hub.finish();
            End::Done(Box::new(here.done()))
        }
        Ok(Err(error)) => {
            shared.hub.stop(error.to_string());
            End::Stopped(Some(format!("rank {rank} waits in {}", here.blocked())))
        }
        Err(panic) => {
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
            shared.hub.stop(format!("rank {rank} panicked in {}: {said}", here.running()));
            End::Stopped(None)
        }
    }
}

/// What every rank brought, or why they stopped and who was waiting for what.
fn all_done(hub: &Hub, ends: Vec<End>) -> Result<Vec<Done>> {
    let Some(why) = hub.stopped() else {
        return Ok(ends
            .into_iter()
            .filter_map(|e| match e {
                End::Done(done) => Some(*done),
                End::Stopped(_) => None,
            })
            .collect());
    };
    let waiting: Vec<String> = ends
        .into_iter()
        .filter_map(|e| match e {
            End::Stopped(waiting) => waiting,
            End::Done(_) => None,
        })
        .collect();
    // A deadlock already names everyone.
    let tail =
        if why.contains("deadlock") || waiting.is_empty() { String::new() } else { format!("; then {}", few(waiting)) };
    Err(Error::device("run", why + &tail))
}

/// The ops that wait for each op of a line.
fn successors(line: &Line) -> Vec<Vec<u32>> {
    let mut next = vec![vec![]; line.nodes.len()];
    for node in 0..line.nodes.len() {
        for &pred in line.preds(node) {
            next[pred as usize].push(node as u32);
        }
    }
    next
}

/// Refuses what this machine's memory cannot hold, before it is asked for.
fn fits_in_memory(plan: &Plan, layouts: &[Layout]) -> Result<()> {
    let bytes = |rank: u32| layouts[plan.program_of(rank) as usize].bytes;
    let need: u128 = (0..plan.ranks()).map(|r| u128::from(bytes(r))).sum();
    let Ok(info) = std::fs::read_to_string("/proc/meminfo") else { return Ok(()) };
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let Some(kib) = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u128>().ok()) else { return Ok(()) };
    if need > kib * 1024 * 9 / 10 {
        return Err(Error::infeasible(format!(
            "memory: {} ranks need {:.1} GiB together, this machine has {:.1} GiB free; use a smaller model, seq_len or batch",
            plan.ranks(),
            need as f64 / (1u64 << 30) as f64,
            kib as f64 / (1u64 << 20) as f64
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Direction, Engine, Feed, OpKind};
    use crate::spec::{LlmSpec, Parallelism, Workload};
    use crate::strategy::{Engines, build};

    fn ring_plan() -> Plan {
        let model = LlmSpec::find("tiny").unwrap();
        let work =
            Workload { seq_len: 32, global_batch: 1, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
        let par = Parallelism { ring: 4, ..Parallelism::default() };
        let engine = Engine::Sm { ctas: 1 };
        build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap()
    }

    fn options(plan: &Plan) -> Options {
        Options { seed: 1, devices: (0..plan.ranks()).collect(), keep: false }
    }

    /// `check` refuses such a plan; the executor alone has to find out too, and not hang.
    #[test]
    fn a_lost_message_ends_with_the_waiting_ranks_named() {
        let mut plan = ring_plan();
        let lost = plan.blocks.iter_mut().flat_map(|b| &mut b.ops).find(|op| op.label == "kv_hop.1").unwrap();
        let OpKind::Transfer { legs, .. } = &mut lost.kind else { panic!("a hop is a transfer") };
        legs.iter_mut().filter(|l| l.dir == Direction::Send).for_each(|l| l.by = 2);
        assert!(check::check(&plan).unwrap_err().to_string().contains("kv_hop"));
        let error = run::<f32>(&plan, &options(&plan)).unwrap_err().to_string();
        assert!(error.contains("never sends it") || error.contains("deadlock"), "{error}");
        assert!(error.contains("rank") && error.contains("kv_hop.1"), "{error}");
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let mut plan = ring_plan();
        for op in plan.blocks.iter_mut().flat_map(|b| &mut b.ops).filter(|op| op.label.starts_with("kv_hop")) {
            // Every rank now waits for its own receive to be over before it sends.
            let OpKind::Transfer { legs, .. } = &mut op.kind else { continue };
            legs.retain(|l| l.dir == Direction::Recv);
        }
        let error = run::<f32>(&plan, &options(&plan)).unwrap_err().to_string();
        assert!(error.contains("rank 0") && error.contains("kv_hop"), "{error}");
    }

    #[test]
    fn a_rank_that_panics_stops_the_others_and_is_named() {
        let mut plan = ring_plan();
        let Feed::Tokens(inputs) = &mut plan.feed else { panic!("a step is fed tokens") };
        inputs.vocab = 100_000;
        let error = run::<f32>(&plan, &options(&plan)).unwrap_err().to_string();
        assert!(error.contains("panicked in") && error.contains("embed"), "{error}");
    }

    #[test]
    fn a_plan_larger_than_the_machine_is_refused_before_it_is_tried() {
        let mut plan = ring_plan();
        let big = plan.tensors.iter_mut().find(|t| t.name == "logits").unwrap();
        big.shape[0] *= 1 << 32;
        let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0);
        let error = layout.and_then(|l| fits_in_memory(&plan, &[l])).unwrap_err().to_string();
        assert!(error.contains("memory"), "{error}");
    }
}
