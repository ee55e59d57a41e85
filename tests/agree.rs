//! Strides and folding spare work, not truth: `cost` with both equals a walk over every op of every rank,
//! to the picosecond, and what it counts adds up.

mod plans;

use foretrain::cost::{Effort, cost};
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::strategy::Engines;
use foretrain::timeline::Timeline;
use plans::{COPY, FLAT, Host, SM, close, model, same, way, work};
use proptest::prelude::*;

/// What holds of any timeline.
fn adds_up(t: &Timeline) {
    for class in &t.classes {
        let (u, step) = (&class.usage, t.step.value());
        assert!(close(u.compute + u.exposed_total(), step), "rank {}: {u:?} in {step}", class.rank);
        assert!(u.by_kernel.values().sum::<f64>() <= u.compute * (1.0 + 1e-9), "kernels fit in the time they took");
        assert!(u.exposed.values().all(|t| *t >= 0.0));
    }
}

fn agree(plan: &Plan, host: &Host) {
    let all = cost(plan, host.machine(), FLAT).unwrap();
    adds_up(&all);
    for (fold, stride) in [(true, true), (false, true), (true, false)] {
        same(&cost(plan, host.machine(), Effort { fold, stride, spans: false }).unwrap(), &all);
    }
}

#[test]
fn shortcuts_are_exact_on_a_grid() {
    for (dp, ring, ulysses, micro, batches) in
        [(8, 1, 1, 2, 1), (1, 8, 1, 1, 1), (1, 1, 8, 1, 9), (2, 4, 1, 1, 5), (2, 2, 4, 1, 2), (3, 5, 1, 1, 6)]
    {
        for recompute in Recompute::ALL {
            let par = Parallelism { recompute, ..way(dp, ring, ulysses) };
            for (engines, slower) in [(SM, 1.0), (SM, 300.0), (COPY, 3000.0)] {
                let plan = plans::plan(&model(9, 4, false), &par, &work(&par, 480, micro, batches), engines);
                agree(&plan, &Host::of(&plan, slower));
            }
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    par: Parallelism,
    model: LlmSpec,
    work: Workload,
    engines: Engines,
    /// GPUs of a node: all, or a part that divides them.
    per_node: u32,
    slower: f64,
}

fn cases() -> impl Strategy<Value = Case> {
    let ranks = (1..=3u32, 1..=5u32, prop::sample::select(vec![1u32, 2, 4, 8]), 0..2u32, any::<bool>());
    let shape = (1..=14u64, prop::sample::select(vec![1u64, 2, 4, 8]), any::<bool>());
    let load = (1..=6u64, 1..=2u64, 1..=9u64);
    let machine = (any::<bool>(), any::<prop::sample::Index>(), 0.0..4.0f64);
    (ranks, shape, load, machine).prop_map(|((dp, ring, ulysses, zero, again), shape, load, machine)| {
        let recompute = if again { Recompute::Full } else { Recompute::None };
        let par = Parallelism { dp, ring, ulysses, zero, recompute };
        let seq = 2 * u64::from(ring * ulysses) * load.0.pow(3);
        let whole = par.ranks();
        let widths: Vec<u32> = (1..=whole).filter(|w| whole.is_multiple_of(*w)).collect();
        Case {
            par,
            model: model(shape.0, shape.1, shape.2),
            work: work(&par, seq, load.1, load.2),
            engines: if machine.0 { SM } else { COPY },
            per_node: *machine.1.get(&widths),
            slower: 10f64.powf(machine.2),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shortcuts_are_exact_on_any_mesh(case in cases()) {
        let plan = plans::plan(&case.model, &case.par, &case.work, case.engines);
        agree(&plan, &Host::new(plan.ranks(), case.per_node, case.slower));
    }
}

/// Bytes that ranks send over a step by the ops of their lines, and those that they receive.
fn sent_and_received(plan: &Plan) -> (u64, u64) {
    let atoms = link::AtomTable::new(plan).unwrap();
    let line = link::Line::program(plan, &atoms, 0).unwrap();
    let bytes = |p: &link::Place| {
        let tensor = &plan.tensors[p.tensor as usize];
        (p.rows[1] - p.rows[0]) * tensor.row_len() * tensor.dtype.size()
    };
    let all = |i: usize, transfers: &[link::Place]| match line.nodes[i].op.kind {
        OpKind::Transfer { .. } => transfers.iter().map(bytes).sum(),
        _ => 0,
    };
    let nodes = 0..line.nodes.len();
    let sums: Vec<(u64, u64)> = nodes.map(|i| (all(i, line.reads(i)), all(i, line.writes(i)))).collect();
    sums.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

#[test]
fn what_is_sent_is_received_and_counted() {
    let par = way(2, 5, 1);
    let plan = plans::plan(&model(3, 4, false), &par, &work(&par, 480, 1, 3), SM);
    let (sent, received) = sent_and_received(&plan);
    assert_eq!(sent, received);
    let usage = cost(&plan, Host::new(10, 5, 1.0).machine(), Effort::SUMS).unwrap().mean();
    let elems = |kind| plan.tensors.iter().filter(move |t| t.kind == kind).map(|t| t.elems() * u64::from(t.slots));
    let (grads, params): (u64, u64) = (elems(TensorKind::Grad).sum::<u64>() - 1, elems(TensorKind::Param).sum());
    // Reduce-scatter of fp32 gradients, all-gather of bf16 weights, all-reduce of the loss.
    let collectives = 0.9 * (4 * grads + 2 * params + 2 * 4) as f64;
    assert!(close(usage.bytes_scale_up + usage.bytes_scale_out, sent as f64 + collectives));
}

#[test]
fn ranks_on_one_device_take_turns() {
    let par = way(2, 2, 1);
    let plan = plans::plan(&model(5, 4, false), &par, &work(&par, 96, 1, 4), COPY);
    let host = Host::of(&plan, 1.0);
    let devices = [0, 1, 0, 1];
    let machine = foretrain::cost::Machine { devices: Some(&devices), ..host.machine() };
    let (all, few) = (cost(&plan, machine, FLAT).unwrap(), cost(&plan, machine, Effort::SUMS).unwrap());
    same(&few, &all);
    let alone = cost(&plan, host.machine(), FLAT).unwrap();
    let busy = |t: &Timeline| t.classes.iter().map(|c| c.usage.compute).fold(0.0, f64::max);
    assert!(all.step.value() >= 2.0 * busy(&alone), "two ranks' kernels, one after the other");
}
