//! Steps that are timed: what they compute on, and when they rest.

use crate::cuda_double::Double;
use crate::step::{experts, none, plan};
use foretrain::exec::cuda::device::Device;
use foretrain::exec::cuda::run::{Rest, Square, Timing, time_steps};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::{OpKind, Plan, memory::Layout};
use foretrain::spec::{Parallelism, Recompute};

/// One rank of four, by itself: the same kernels, and nothing of the others.
#[test]
fn one_rank_of_many_runs_alone() {
    for par in [Parallelism { ring: 4, ..none() }, Parallelism { tp: 2, dp: 2, ..none() }] {
        let plan = plan(par, 1);
        let mut double = Double::new(1, 8 << 30, 1);
        let mut runs = vec![];
        let ops = plan.ops().count();
        let waits = vec![1e-6; 4 * ops];
        for waits in [None, Some(&waits[..])] {
            runs.clear();
            let timing = Timing { steps: 2, solo: Some(2), waits, graphs: 2, ..Timing::default() };
            let graphs = time_steps(&mut double, &plan, &[0; 4], timing, &mut |run, _| {
                runs.push(run);
                Ok(())
            });
            assert!(graphs.unwrap().into_iter().all(|seconds| seconds > 0.0));
            if waits.is_none() {
                double.clear().unwrap();
            }
        }
        assert_eq!(runs.len(), 2);
        let spans: Vec<usize> = runs[1].timeline.classes.iter().map(|c| c.spans.len()).collect();
        let atoms = AtomTable::new(&plan).unwrap();
        let line = Line::program(&plan, &atoms, plan.program_of(2)).unwrap();
        assert_eq!(spans, [0, 0, line.nodes.len(), 0]);
        // Each of its ops that communicate was waited for, in both steps, and nothing else.
        let talks = line.nodes.iter().filter(|node| !matches!(node.op.kind, OpKind::Compute { .. })).count();
        assert!(talks > 3 && double.rests == vec![1e-6; 2 * talks], "{talks}: {:?}", double.rests);
        let layout = Layout::new(&plan, &atoms, plan.program_of(2)).unwrap().bytes;
        let taken = (8 << 30) - double.free(0);
        assert!(taken >= layout && taken < 2 * layout, "{taken} for one rank of {layout}");
    }
}

/// A GPU's power, and so its clocks, depends on what is multiplied: nobody looks at what a timed step computes, but numbers it
/// must be, with weights of either sign, and no zeros. What others would have sent a rank that is alone is among them.
#[test]
fn timed_steps_multiply_numbers() {
    let ways = [
        none(),
        Parallelism { ring: 4, recompute: Recompute::Full, ..none() },
        Parallelism { ulysses: 2, dp: 2, zero: 1, ..none() },
        Parallelism { tp: 2, dp: 2, zero: 3, ..none() },
        Parallelism { dp: 2, pp: 2, ..none() },
    ];
    let mut plans: Vec<Plan> = ways.map(|par| plan(par, u64::from(par.pp))).into();
    plans.push(experts("default", 2));
    for plan in plans {
        let waits = vec![1e-6; 4 * plan.ops().count()];
        let alone = Timing { solo: Some(plan.ranks() - 1), waits: Some(&waits), ..Timing::default() };
        for timing in [alone, Timing::default()] {
            let mut double = Double::new(1, 8 << 30, 1);
            let timing = Timing { steps: 3, ..timing };
            time_steps(&mut double, &plan, &vec![0; plan.ranks() as usize], timing, &mut |_, _| Ok(())).unwrap();
            let [all, without, empty] = double.products;
            let what = (&plan.about.strategy, plan.about.par.zero, timing.solo);
            assert!(all > 10 && without == 0, "{what:?}: {without} of {all} products are not of numbers");
            assert!(empty == 0, "{what:?}: {empty} of {all} products are of zeros");
        }
    }
}

/// Behind so much work a GPU rests for as long within each step, too, but in the first, which says how long ops take.
#[test]
fn long_steps_have_rests_within_them() {
    let plan = plan(Parallelism { tp: 2, ..none() }, 1);
    let mut double = Double::new(1, 8 << 30, 1);
    let mut work = vec![];
    let mut with = |double: &mut Double, steps, rest| {
        let timing = Timing { steps, in_line: true, rest, graphs: 1, ..Timing::default() };
        time_steps(double, &plan, &[0; 2], timing, &mut |run, _| {
            let spans = run.timeline.classes.iter().flat_map(|class| &class.spans);
            work.push(spans.map(|span| span.duration().value()).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
        double.clear().unwrap();
    };
    with(&mut double, 2, Rest::BetweenSteps);
    assert!(double.rests.is_empty());
    let most = 20e-6;
    with(&mut double, 3, Rest::Within(most));
    let (first, longest) = (&work[2][..], work[2].iter().copied().fold(0.0, f64::max));
    // As many in the second step as in the third, none in the first and in the graph.
    let [second, third] = [0, 1].map(|i| double.rests.chunks(double.rests.len() / 2).nth(i).unwrap());
    assert!(second.len() > 4 && second == third, "{:?}", double.rests);
    // Before the step for the host's sake, then for what was done.
    let within = &second[1..];
    assert!(second[0] > 1e-3 && within.iter().all(|rest| *rest <= most.max(longest)), "{second:?}");
    let [all, rested] = [first, within].map(|of| of.iter().sum::<f64>());
    assert!(rested < all && rested + most.max(longest) > all, "{rested} of {all}");
}

/// The product that keeps a GPU busy can be handed over again while nothing is made anew.
#[test]
fn a_product_is_done_again_and_again() {
    let mut double = Double::new(1, 8 << 30, 1);
    let mut square = Square::new(&mut double, 64, 3).unwrap();
    for _ in 0..3 {
        square.hand_over(&mut double).unwrap();
        assert!(square.seconds(&mut double, 1).unwrap() > 0.0);
    }
}
