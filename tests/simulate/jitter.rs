//! Ranks that take a little more or less each time.

use crate::played::{sim, step, two_nodes};
use foretrain::sim::{Effort, Fault, simulate};

/// Many ranks that each take a little more or less wait for their slowest; a class of them knows as much.
#[test]
fn jitter_is_folded_within_a_bound() {
    let (plan, host) = two_nodes();
    let well = step(&sim(&plan, &host, true));
    for sd in [0.05, 0.2] {
        let mean = |fold: bool| {
            let of = |seed| {
                let effort = Effort { fold, seed, ..Effort::SUMS };
                step(
                    &simulate(&plan, host.machine(), &[Fault::jitter(&format!("normal:{sd}")).unwrap()], effort)
                        .unwrap(),
                )
            };
            (0..40).map(of).sum::<f64>() / 40.0
        };
        let (few, all) = (mean(true), mean(false));
        assert!(all > well, "{all} {well}");
        // Of what jitter adds, and of the step; means of forty steps are as far off by lot: 0.06 to 0.22, and to 0.0075.
        let (error, added) = ((few - all).abs(), all - well);
        assert!(error < 0.3 * added && error < 0.01 * well, "sd {sd}: {few} folded, {all} unfolded, {well} without");
        let effort = Effort { seed: 3, ..Effort::SUMS };
        let again =
            || simulate(&plan, host.machine(), &[Fault::jitter(&format!("normal:{sd}")).unwrap()], effort).unwrap();
        assert_eq!(again(), again(), "the same seed, the same step");
    }
}

/// Jitter of one rank is its own: others wait for it, and of an exponential one everybody only waits longer.
#[test]
fn ranks_have_jitter_of_their_own() {
    let (plan, host) = two_nodes();
    let well = step(&sim(&plan, &host, true));
    let mean = |word: &str| {
        let fault = [Fault::jitter(word).unwrap()];
        let of = |seed| {
            let effort = Effort { seed, ..Effort::SUMS };
            step(&simulate(&plan, host.machine(), &fault, effort).unwrap()) / well - 1.0
        };
        (0..20).map(of).sum::<f64>() / 20.0
    };
    let (one, all) = (mean("5:normal:0.2"), mean("normal:0.2"));
    assert!(0.0 < one && one < all, "{one} {all}");
    let (tail, late) = (mean("lognormal:0.2"), mean("exponential:0.2"));
    assert!(tail > 0.0 && late > all, "{tail} {late} {all}");
}
