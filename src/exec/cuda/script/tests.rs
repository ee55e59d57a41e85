//! Commands obeyed by a double, kernels by the CPU: in whatever order is left open, the same weights.

use super::super::super::arena::{Arena, Data};
use super::super::super::source::Source;
use super::super::super::{Options, execute, inputs};
use super::*;
use crate::plan::lasting::that_last;
use crate::plan::link::AtomTable;
use crate::spec::{LlmSpec, Parallelism, Recompute, Workload};
use crate::strategy::{Engines, build};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A device that does what streams and events leave open in an order of its own, kernels by the CPU.
struct Double<'p> {
    linked: Linked<'p>,
    arenas: Vec<Arena<'p>>,
    passed: Vec<bool>,
}

impl Double<'_> {
    /// Takes a random stream's next command until none is left.
    fn run(&mut self, script: &Script, rng: &mut ChaCha8Rng) {
        let mut queues: Vec<Vec<&Command>> = vec![vec![]; script.streams.len()];
        script.commands.iter().rev().for_each(|c| queues[c.stream() as usize].push(c));
        let mut left = script.commands.len();
        while left > 0 {
            let can = |queue: &&mut Vec<&Command>| match queue.last() {
                Some(Command::Wait { event, .. }) => self.passed[*event as usize],
                other => other.is_some(),
            };
            let mut ready: Vec<_> = queues.iter_mut().filter(can).collect();
            assert!(!ready.is_empty(), "streams wait for each other");
            let pick = rng.random_range(0..ready.len());
            let command = ready[pick].pop().expect("a stream that can go on has a command");
            self.obey(command);
            left -= 1;
        }
    }

    fn obey(&mut self, command: &Command) {
        match command {
            Command::Wait { .. } | Command::Keep { .. } => {}
            Command::Record { event, .. } => self.passed[*event as usize] = true,
            Command::Kernel { rank, node, .. } => self.kernel(*rank, *node),
            Command::Pull { .. } => panic!("these plans exchange no rows"),
            Command::Call { .. } | Command::Idle { .. } => panic!("all ranks are here"),
            Command::Copy { from, to, .. } => self.put(to, &self.data(from)),
            Command::Add { from, to, .. } => {
                let mut sum = self.data(to);
                sum.add(&self.data(from));
                self.put(to, &sum);
            }
        }
    }

    fn kernel(&mut self, rank: u32, node: u32) {
        let (line, views) = (self.linked.line(rank), &self.linked.plan.views);
        let OpKind::Compute { kernel, .. } = &line.nodes[node as usize].op.kind else {
            panic!("only computing ops are kernels")
        };
        if kernel.mask().is_none_or(|m| m.shape(views, rank).area > 0) {
            let (reads, writes) = (line.reads(node as usize), line.writes(node as usize));
            self.arenas[rank as usize].run::<f32>(kernel, (rank, 1), reads, writes);
        }
    }

    fn data(&self, region: &Region) -> Data {
        self.arenas[region.rank as usize].read(&region.part())
    }

    fn put(&mut self, region: &Region, data: &Data) {
        self.arenas[region.rank as usize].write(&region.part(), data).unwrap();
    }
}

/// What persists after a step, by rank and slot, with a double that goes by `seed`.
fn weights(plan: &Plan, seed: u64, spoil: impl Fn(&mut Script)) -> Vec<Vec<Vec<f64>>> {
    weights_of(plan, false, seed, spoil)
}

fn weights_of(plan: &Plan, in_line: bool, seed: u64, spoil: impl Fn(&mut Script)) -> Vec<Vec<Vec<f64>>> {
    let atoms = AtomTable::new(plan).unwrap();
    let programs = 0..plan.programs.len() as u32;
    let lines: Vec<Line> = programs.clone().map(|p| Line::program(plan, &atoms, p).unwrap()).collect();
    let layouts: Vec<Layout> = programs.map(|p| Layout::new(plan, &atoms, p).unwrap()).collect();
    let matching = Matching::new(plan, &lines);
    let linked = Linked { in_line, ..Linked::new(plan, &lines, &matching, &layouts) };
    let devices = vec![0; plan.ranks() as usize];
    let mut script = script(linked, &devices, &[]).unwrap();
    spoil(&mut script);
    let source = Source::seeded(1);
    let given = inputs::shared(plan, 1);
    let arenas = (0..plan.ranks()).map(|rank| {
        let mut arena = Arena::new(plan, &layouts[plan.program_of(rank) as usize]);
        inputs::fill(plan, &atoms, rank, &source, &mut arena);
        inputs::feed(plan, &atoms, rank, (&source, 1), &given, &mut arena);
        arena
    });
    let mut double = Double { linked, arenas: arenas.collect(), passed: vec![false; script.events.len()] };
    double.run(&script, &mut ChaCha8Rng::seed_from_u64(seed));
    let of = |arena: &Arena, at: &SlotId| {
        let place = inputs::slot(plan, &atoms, at.tensor, at.slot);
        arena.read(&arena.whole(&place)).to_f64()
    };
    let of_rank =
        |arena: &Arena| persisting(plan).iter().filter(|at| arena.holds(**at)).map(|at| of(arena, at)).collect();
    double.arenas.iter().map(of_rank).collect()
}

/// Weights, gradients and what the optimizer keeps.
fn persisting(plan: &Plan) -> Vec<SlotId> {
    let kept = that_last(plan).map(|t| (t, &plan.tensors[t as usize]));
    kept.flat_map(|(tensor, t)| (0..t.slots).map(move |slot| SlotId { tensor, slot })).collect()
}

fn plan(par: Parallelism) -> Plan {
    let model = LlmSpec::find("tiny").unwrap();
    let work =
        Workload { seq_len: 64, global_batch: 4, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
    let engine = Engine::Sm { ctas: 1 };
    build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap()
}

fn layouts() -> Vec<Parallelism> {
    let none = Parallelism::default;
    vec![
        Parallelism { ring: 4, ..none() },
        Parallelism { ulysses: 2, ring: 2, dp: 2, zero: 1, ..none() },
        Parallelism { tp: 2, dp: 2, recompute: Recompute::Full, ..none() },
        Parallelism { pp: 2, dp: 2, ..none() },
        Parallelism { dp: 4, zero: 3, ..none() },
    ]
}

#[test]
fn every_order_that_streams_and_events_allow_brings_the_same_weights() {
    for par in layouts() {
        let plan = plan(par);
        let first = weights(&plan, 0, |_| {});
        assert!(first.iter().flatten().flatten().all(|w| w.is_finite()));
        for seed in 1..4 {
            assert_eq!(weights(&plan, seed, |_| {}), first);
        }
    }
}

/// In the order in which commands are handed over nothing has to wait for another stream.
#[test]
fn one_stream_brings_the_same_weights() {
    for par in layouts() {
        let plan = plan(par);
        let one = |script: &mut Script| assert_eq!(script.streams, [0]);
        assert_eq!(weights_of(&plan, true, 1, one), weights(&plan, 0, |_| {}));
    }
}

#[test]
fn the_weights_are_those_of_the_cpu_executor() {
    let plan = plan(Parallelism { dp: 2, ring: 2, ..Parallelism::default() });
    let run = execute(&plan, &Options::new(1, (0..4).collect(), true)).unwrap();
    let mine = weights(&plan, 5, |_| {});
    // A step touches all of them, so that a rank's list is the whole one.
    let slots = persisting(&plan);
    assert_eq!(mine[0].len(), slots.len());
    let of = |p: &Param| {
        let at = slots.iter().position(|at| (at.tensor, at.slot) == (p.weight, p.slot)).expect("weights persist");
        &mine[0][at][p.rows[0] as usize..p.rows[1] as usize]
    };
    let off = |p: &Param| {
        let want = &run.weights[&p.name];
        assert_eq!(want.len(), of(p).len(), "{}", p.name);
        // The order of additions differs, and the first step of Adam shows the sign of a gradient near zero.
        want.iter().zip(of(p)).filter(|(a, b)| (*a - *b).abs() > 1e-4).count()
    };
    let (all, off): (usize, usize) =
        plan.params.iter().map(|p| (run.weights[&p.name].len(), off(p))).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
    assert!(off * 100 < all, "{off} of {all}");
}

/// What the orders above prove: where a stream does not wait, some order reads too early.
#[test]
fn a_stream_that_does_not_wait_is_found() {
    let plan = plan(Parallelism { ring: 4, ..Parallelism::default() });
    let first = weights(&plan, 0, |_| {});
    // The first stream is the device's; the others are communicators'.
    for hasty in 0..3 {
        let without = |seed| {
            weights(&plan, seed, |script| {
                script.commands.retain(|c| !matches!(c, Command::Wait { stream, .. } if *stream == hasty));
            })
        };
        assert!((0..8).any(|seed| without(seed) != first), "stream {hasty}");
    }
}
