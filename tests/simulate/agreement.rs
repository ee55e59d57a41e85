//! Folded or not, the simulator says what the walk over every op of every rank says.

use crate::plans::{self, COPY, FLAT, Host, SM, model, same, way, work};
use crate::played::sim;
use foretrain::act::gaps;
use foretrain::cost::cost;
use foretrain::plan::*;
use foretrain::sim::{Effort, simulate};
use foretrain::spec::*;
use foretrain::timeline::{Class, Usage};

/// Folded or not, the simulator says what the walk over every op of every rank says.
fn agree(plan: &Plan, host: &Host) {
    let all = cost(plan, host.machine(), FLAT).unwrap();
    let each = sim(plan, host, false);
    same(&each.timeline, &all);
    same(&sim(plan, host, true).timeline, &each.timeline);
}

/// What is charged to whom is found again in the times of all ops alone, as of a plan that ran.
fn charged_again(plan: &Plan, host: &Host) {
    let found = simulate(plan, host.machine(), &[], Effort { fold: false, ..Effort::SPANS }).unwrap().timeline;
    let atoms = link::AtomTable::new(plan).unwrap();
    let lines = (0..plan.programs.len() as u32).map(|p| link::Line::program(plan, &atoms, p).unwrap());
    let lines: Vec<link::Line> = lines.collect();
    let matching = matching::Matching::new(plan, &lines);
    let times = |class: &Class| class.spans.iter().map(|s| (s.start.value(), s.end.value())).collect();
    let times: Vec<Vec<(f64, f64)>> = found.classes.iter().map(times).collect();
    let times: Vec<&gaps::Times> = times.iter().map(Vec::as_slice).collect();
    for (class, again) in found.classes.iter().zip(gaps::charge(plan, &lines, &matching, &times)) {
        let all = |of: &Usage| [of.compute, of.bubble, of.offload, of.exposed_total()];
        let axes = class.usage.exposed.iter().map(|(axis, s)| [*s, again.exposed.get(axis).copied().unwrap_or(0.0)]);
        let sums = all(&class.usage).into_iter().zip(all(&again)).map(|(a, b)| [a, b]);
        let off = |[a, b]: [f64; 2]| (a - b).abs() > 1e-9 * found.step.value();
        assert!(!axes.chain(sums).any(off), "rank {}: {:?} is {again:?}", class.rank, class.usage);
    }
}

#[test]
fn agrees_on_a_grid() {
    for (dp, ring, ulysses, micro, batches) in
        [(8, 1, 1, 2, 1), (1, 8, 1, 1, 1), (1, 1, 8, 1, 9), (2, 4, 1, 1, 5), (2, 2, 4, 1, 2), (3, 5, 1, 1, 6)]
    {
        for recompute in [Recompute::None, Recompute::Full] {
            let par = Parallelism { recompute, ..way(dp, ring, ulysses) };
            for (engines, slower) in [(SM, 1.0), (SM, 300.0), (COPY, 3000.0)] {
                let plan = plans::plan(&model(9, 4, false), &par, &work(&par, 480, micro, batches), engines);
                agree(&plan, &Host::of(&plan, slower));
                charged_again(&plan, &Host::of(&plan, slower).issuing(0.0));
                agree(&plan, &Host::of(&plan, slower).issuing(60e-6));
            }
        }
    }
}

#[test]
fn agrees_on_pipelines_whose_ports_are_never_shared() {
    for (pp, vp, batches, words) in [
        (2, 1, 3, "default"),
        (4, 1, 9, "default"),
        (4, 2, 8, "default"),
        (3, 3, 6, "default"),
        (4, 1, 9, "zb-h1"),
        (4, 2, 9, "dualpipe-v"),
        (4, 2, 9, "zb-v"),
        (4, 2, 9, "v-half"),
        (3, 2, 7, "v-min"),
    ] {
        let par = Parallelism { pp, vp, zero: 0, options: words.parse().unwrap(), ..Parallelism::default() };
        let plan = plans::plan(&model(2 * u64::from(pp * vp), 4, false), &par, &work(&par, 240, 1, batches), COPY);
        for slower in [1e-9, 1.0] {
            agree(&plan, &Host::of(&plan, slower));
            charged_again(&plan, &Host::of(&plan, slower).issuing(0.0));
        }
    }
}

/// A CPU that waits for passes, or for what passes between stages, and sums that nobody overlaps.
#[test]
fn agrees_where_the_cpu_waits() {
    for (pp, vp, dp, tp, batches, words) in [
        (1, 1, 4, 1, 3, "wait-passes+no-overlap-grad"),
        (4, 1, 1, 1, 9, "no-overlap-p2p"),
        (4, 2, 1, 1, 8, "no-overlap-p2p"),
        (4, 1, 1, 2, 9, "no-sp+scatter-p2p+no-overlap-p2p"),
        (2, 2, 2, 2, 8, "no-sp+scatter-p2p"),
    ] {
        let par = Parallelism { pp, vp, dp, tp, zero: 0, options: words.parse().unwrap(), ..Parallelism::default() };
        let plan = plans::plan(&model(2 * u64::from(pp * vp), 4, false), &par, &work(&par, 240, 1, batches), COPY);
        for launch in [0.0, 5e-6, 60e-6] {
            agree(&plan, &Host::of(&plan, 1.0).issuing(launch));
            agree(&plan, &Host::of(&plan, 1.0).issuing(launch).in_python(3));
        }
    }
}
