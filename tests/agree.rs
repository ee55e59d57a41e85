//! Strides and folding spare work, not truth: `cost` with both equals a walk over every op of every rank,
//! to the picosecond, and what it counts adds up.

mod plans;

use foretrain::cost::{Effort, cost};
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::strategy::Engines;
use foretrain::timeline::{Timeline, Usage};
use plans::{COPY, Host, SM, model, way, work};
use proptest::prelude::*;
use std::collections::BTreeMap;

const FLAT: Effort = Effort { fold: false, stride: false, spans: false };

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-12)
}

fn same_map<K: Ord + std::fmt::Debug>(what: &str, a: &BTreeMap<K, f64>, b: &BTreeMap<K, f64>) {
    let known = |m: &BTreeMap<K, f64>, k: &K| m.get(k).copied().unwrap_or(0.0);
    for key in a.keys().chain(b.keys()) {
        assert!(close(known(a, key), known(b, key)), "{what} {key:?}: {} is not {}", known(a, key), known(b, key));
    }
}

fn same_usage(a: &Usage, b: &Usage) {
    same_map("exposed", &a.exposed, &b.exposed);
    same_map("kernel", &a.by_kernel, &b.by_kernel);
    same_map("comm", &a.comm, &b.comm);
    same_map("provenance", &a.by_provenance, &b.by_provenance);
    let sums = |u: &Usage| [u.compute, u.flops, u.bytes_scale_up, u.bytes_scale_out, u.sd];
    assert!(sums(a).iter().zip(sums(b)).all(|(a, b)| close(*a, b)), "{:?} is not {:?}", sums(a), sums(b));
}

/// `few` has a rank of each class of `all`.
fn same(few: &Timeline, all: &Timeline) {
    assert_eq!(few.step, all.step);
    for class in &few.classes {
        same_usage(&class.usage, &all.classes[class.rank as usize].usage);
    }
    same_usage(&few.mean(), &all.mean());
}

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
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shortcuts_are_exact_on_any_mesh(case in cases()) {
        let plan = plans::plan(&case.model, &case.par, &case.work, case.engines);
        agree(&plan, &Host::new(plan.ranks(), case.per_node, case.slower));
    }
}
