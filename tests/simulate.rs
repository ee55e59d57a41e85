//! The simulator agrees with the analytic cost to the picosecond where ranks share no link.

mod plans;

use foretrain::cost::cost;
use foretrain::plan::*;
use foretrain::sim::{Effort, Simulated, simulate};
use foretrain::spec::*;
use plans::{COPY, FLAT, Host, SM, model, same, way, work};

fn sim(plan: &Plan, host: &Host, fold: bool) -> Simulated {
    simulate(plan, host.machine(), Effort { fold, spans: false }).unwrap()
}

/// Folded or not, the simulator says what the walk over every op of every rank says.
fn agree(plan: &Plan, host: &Host) {
    let all = cost(plan, host.machine(), FLAT).unwrap();
    let each = sim(plan, host, false);
    if each.slowed == 0 {
        same(&each.timeline, &all);
    } else {
        // A shared port is if anything too fast in the walk, which forgets holders that are over when an op that
        // was posted later starts earlier.
        let (sim, cost) = (each.timeline.step.value(), all.step.value());
        assert!(cost <= sim && sim <= 1.05 * cost, "{cost} {sim}");
    }
    same(&sim(plan, host, true).timeline, &each.timeline);
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
                agree(&plan, &Host::of(&plan, slower).issuing(60e-6));
            }
        }
    }
}

#[test]
fn agrees_on_pipelines_whose_ports_are_never_shared() {
    for (pp, vp, batches) in [(2, 1, 3), (4, 1, 9), (4, 2, 8), (3, 3, 6)] {
        let par = Parallelism { pp, vp, zero: 0, ..Parallelism::default() };
        let plan = plans::plan(&model(2 * u64::from(pp * vp), 4, false), &par, &work(&par, 240, 1, batches), COPY);
        for slower in [1e-9, 1.0] {
            agree(&plan, &Host::of(&plan, slower));
        }
    }
}
