//! Folding: ranks of one class do the same at the same time. The partition in which every rank is alone is
//! the oracle.

mod plans;

use foretrain::cost::{Effort, cost};
use foretrain::fold::{Fold, refine, trivial};
use foretrain::plan::*;
use foretrain::spec::Parallelism;
use plans::{FLAT, Host, SM, model, same, way, work};
use proptest::prelude::*;

fn plan(dp: u32, ring: u32, ulysses: u32) -> Plan {
    let par = way(dp, ring, ulysses);
    plans::plan(&model(2, 4, false), &par, &work(&par, 48 * u64::from(ring * ulysses), 1, 2), SM)
}

fn is_sound(fold: &Fold, ranks: u32) {
    assert_eq!(fold.multiplicity.iter().sum::<u32>(), ranks);
    assert_eq!(fold.class_of.len(), ranks as usize);
    for (class, &rank) in fold.representatives.iter().enumerate() {
        assert_eq!(fold.class_of[rank as usize] as usize, class);
        assert!(!fold.class_of[..rank as usize].contains(&(class as u32)), "the first of its class");
    }
}

fn agrees(plan: &Plan, host: &Host) {
    let fold = refine(plan, &host.cluster);
    is_sound(&fold, plan.ranks());
    let few = cost(plan, host.machine(), Effort { fold: true, ..FLAT }).unwrap();
    assert_eq!(few.classes.len(), fold.representatives.len());
    let all = cost(plan, host.machine(), FLAT).unwrap();
    same(&few, &all);
    // Not only the representatives: every rank is like its class.
    for (rank, class) in all.classes.iter().zip(&fold.class_of) {
        plans::same_usage(&rank.usage, &few.classes[*class as usize].usage);
    }
}

#[test]
fn replicas_fold_away() {
    let classes = |dp, ring, ulysses, gpus| {
        refine(&plan(dp, ring, ulysses), &Host::new(gpus, 8, 1.0).cluster).representatives.len()
    };
    assert_eq!(classes(64, 1, 1, 64), 1, "data parallel ranks are all alike");
    assert_eq!(classes(8, 1, 8, 64), 1, "so are those of Ulysses");
    assert_eq!(classes(8, 8, 1, 64), 8, "a mask tells the ranks of a ring apart, not the rings");
    assert_eq!(classes(8, 2, 4, 64), 2);
    assert_eq!(classes(4, 16, 1, 64), 16);
    assert_eq!(classes(16, 4, 1, 64), 4);
}

#[test]
fn alone_is_alone() {
    let fold = trivial(5);
    is_sound(&fold, 5);
    assert_eq!(fold.representatives.len(), 5);
}

#[test]
fn nodes_that_cut_groups_unevenly_are_told_apart() {
    for (dp, ring, ulysses, per_node) in
        [(2, 3, 1, 2), (4, 3, 1, 4), (3, 5, 1, 3), (2, 1, 8, 4), (3, 2, 2, 6), (4, 5, 1, 10)]
    {
        let plan = plan(dp, ring, ulysses);
        agrees(&plan, &Host::new(plan.ranks(), per_node, 30.0));
    }
}

#[test]
fn stages_of_a_pipeline_are_told_apart_and_their_ranks_are_not() {
    for (pp, vp, dp, ring, per_node) in [(2, 1, 4, 1, 8), (4, 2, 2, 1, 4), (2, 2, 2, 3, 6), (3, 1, 2, 1, 2)] {
        let par = Parallelism { pp, vp, ..way(dp, ring, 1) };
        let layers = u64::from(pp * vp);
        let plan = plans::plan(&model(layers, 4, true), &par, &work(&par, 48 * u64::from(ring), 1, 12), SM);
        let host = Host::new(plan.ranks(), per_node, 30.0);
        agrees(&plan, &host);
        let classes = refine(&plan, &host.cluster).representatives.len() as u32;
        assert!(classes >= pp && classes <= pp * ring * per_node.min(dp), "{classes} classes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Axes in any order: replicas inside nodes, sequences across them, and everything between.
    #[test]
    fn folded_equals_unfolded(
        (dp, ring, ulysses) in (1..=4u32, 1..=4u32, prop::sample::select(vec![1u32, 2, 4])),
        order in Just([Axis::Dp, Axis::Cp, Axis::Up]).prop_shuffle(),
        width in any::<prop::sample::Index>(),
        slower in 0.0..4.0f64,
    ) {
        let mut plan = plan(dp, ring, ulysses);
        plan.views[0].axes.sort_by_key(|(axis, _)| order.iter().position(|o| o == axis));
        check::check(&plan).unwrap();
        let widths: Vec<u32> = (1..=plan.ranks()).filter(|w| plan.ranks().is_multiple_of(*w)).collect();
        agrees(&plan, &Host::new(plan.ranks(), *width.get(&widths), 10f64.powf(slower)));
    }
}
