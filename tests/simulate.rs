//! The simulator agrees with the analytic cost to the picosecond where ranks share no link.

mod plans;

use foretrain::cost::cost;
use foretrain::plan::*;
use foretrain::sim::{Effort, Fault, Faults, Simulated, simulate};
use foretrain::spec::*;
use plans::{COPY, FLAT, Host, SM, model, same, way, work};

fn sim(plan: &Plan, host: &Host, fold: bool) -> Simulated {
    with(plan, host, fold, &[])
}

fn with(plan: &Plan, host: &Host, fold: bool, faults: &[Fault]) -> Simulated {
    simulate(plan, host.machine(), faults, Effort { fold, ..Effort::SUMS }).unwrap()
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

/// Two nodes of eight; rings and Ulysses inside, replicas across.
fn two_nodes() -> (Plan, Host) {
    let par = way(4, 2, 2);
    let plan = plans::plan(&model(4, 4, false), &par, &work(&par, 4096, 1, 2), SM);
    let host = Host::new(16, 8, 1.0);
    (plan, host)
}

fn step(found: &Simulated) -> f64 {
    found.timeline.step.value()
}

/// What is wrong with one rank tells ranks apart, and no more than it has to.
#[test]
fn folded_equals_unfolded_whatever_is_wrong() {
    let (plan, host) = two_nodes();
    let cases: [&[Fault]; 5] = [
        &[Fault::slow_gpu("5:1.3").unwrap()],
        &[Fault::slow_link("3:0.25").unwrap(), Fault::slow_gpu("12:1.1").unwrap()],
        &[Fault::slow_link("0:nvlink:0.1").unwrap()],
        &[Fault::flapping("9:0.0001:0.0001").unwrap()],
        &[Fault::slow_gpu("0:1.2").unwrap(), Fault::slow_gpu("1:1.2").unwrap()],
    ];
    let well = step(&sim(&plan, &host, true));
    for faults in cases {
        let (few, all) = (with(&plan, &host, true, faults), with(&plan, &host, false, faults));
        assert_eq!(few.timeline.step, all.timeline.step, "{faults:?}");
        assert!(few.timeline.classes.len() < 16, "{faults:?}: {} classes", few.timeline.classes.len());
        assert!(step(&few) > 1.001 * well, "{faults:?}: {} is not slower than {well}", step(&few));
    }
}

/// One slow GPU slows everyone: what it computes is on the critical path.
#[test]
fn a_straggler_sets_the_pace() {
    let (plan, host) = two_nodes();
    let fault = [Fault::slow_gpu("5:1.5").unwrap()];
    let found = simulate(&plan, host.machine(), &fault, Effort::SPANS).unwrap();
    let why = found.why.as_ref().unwrap();
    let of_rank_5: f64 = why.critical_path.iter().filter(|s| s.rank == 5).map(|s| s.seconds).sum();
    assert!(of_rank_5 > 0.5 * step(&found), "{of_rank_5} of {}", step(&found));
}

#[test]
fn the_critical_path_is_as_long_as_the_step() {
    for (plan, host) in [two_nodes(), pipeline()] {
        let found = simulate(&plan, host.machine(), &[], Effort::SPANS).unwrap();
        let why = found.why.as_ref().unwrap();
        let sum: f64 = why.critical_path.iter().map(|s| s.seconds).sum();
        assert!(plans::close(sum, step(&found)), "{sum} is not {}", step(&found));
        let mut at = 0.0;
        for s in &why.critical_path {
            assert!(plans::close(s.from_s, at), "a gap before {s:?}");
            at = s.from_s + s.seconds;
        }
        let shares: f64 = why.parts.iter().map(|p| p.share).sum();
        assert!(plans::close(shares, 1.0));
        assert!(!why.next.is_empty() && why.next.iter().all(|s| s.seconds > 0.0 && s.seconds < step(&found)));
        assert!(
            why.utilisation.iter().all(|u| u.over_time.iter().all(|x| (0.0..=1.0).contains(x))),
            "{:?}",
            why.utilisation
        );
    }
}

/// Four stages, six microbatches.
fn pipeline() -> (Plan, Host) {
    let par = Parallelism { pp: 4, zero: 0, ..Parallelism::default() };
    let plan = plans::plan(&model(8, 4, false), &par, &work(&par, 960, 1, 6), COPY);
    let host = Host::of(&plan, 1.0);
    (plan, host)
}

#[test]
fn a_dead_rank_shows_who_waits_for_it() {
    let (plan, host) = two_nodes();
    let half = 0.5 * step(&sim(&plan, &host, true));
    let found = with(&plan, &host, true, &[Fault::Dead { rank: 5, at_s: half }]);
    let hang = found.hang.as_ref().unwrap();
    assert_eq!(hang.dead, [5]);
    assert!(hang.at_s >= half && hang.at_s < 2.0 * half);
    assert!(hang.waiting.iter().any(|w| w.waits_for.contains(&5)), "{hang:?}");
    let waiting: u32 = hang.waiting.iter().map(|w| w.ranks).sum();
    assert_eq!(waiting, 15, "everyone else waits in the end: {hang:?}");
}

#[test]
fn a_link_that_is_down_hangs_those_who_need_it() {
    let (plan, host) = two_nodes();
    let found = with(&plan, &host, true, &[Fault::slow_link("3:0").unwrap()]);
    assert!(found.hang.is_some());
    let back =
        Fault::SlowLink { rank: 3, port: foretrain::sim::fault::Port::Nic, factor: 0.0, from_s: 0.0, to_s: Some(2.0) };
    let found = with(&plan, &host, true, &[back]);
    assert!(found.hang.is_none() && step(&found) > 2.0);
}

/// Many ranks that each take a little more or less wait for their slowest; a class of them knows as much.
#[test]
fn jitter_is_folded_within_a_bound() {
    let (plan, host) = two_nodes();
    let well = step(&sim(&plan, &host, true));
    for sd in [0.05, 0.2] {
        let mean = |fold: bool| {
            let of = |seed| {
                let effort = Effort { fold, seed, ..Effort::SUMS };
                step(&simulate(&plan, host.machine(), &[Fault::Jitter { sd }], effort).unwrap())
            };
            (0..40).map(of).sum::<f64>() / 40.0
        };
        let (few, all) = (mean(true), mean(false));
        assert!(all > well, "{all} {well}");
        // Of what jitter adds, and of the step.
        let (error, added) = ((few - all).abs(), all - well);
        assert!(error < 0.3 * added && error < 0.01 * well, "sd {sd}: {few} folded, {all} unfolded, {well} without");
        let effort = Effort { seed: 3, ..Effort::SUMS };
        let again = || simulate(&plan, host.machine(), &[Fault::Jitter { sd }], effort).unwrap();
        assert_eq!(again(), again(), "the same seed, the same step");
    }
}

/// Receives before sends on one lane of a ring: nobody ever sends.
#[test]
fn cyclic_waits_are_an_error_that_names_ranks() {
    let par = way(1, 2, 1);
    let mut plan = plans::plan(&model(1, 4, false), &par, &work(&par, 16, 1, 1), COPY);
    let mut b = builder::Builder::new();
    let group = Group::axes(&[Axis::Cp]);
    let via = builder::Via { group: &group, index: 0, engine: Engine::CopyEngine };
    let t = b.tensor("t", &[16], Dtype::F32, TensorKind::CommBuffer, 2);
    b.compute("fill", Kernel::Fill { elems: 16 }, &[], &[t]);
    b.hop("recv", via, 1, t, t.slot(1), 0);
    b.hop("send", via, 1, t, t.slot(1), 0);
    let mut ops = b.finish();
    for (op, dir) in ops.iter_mut().skip(1).zip([Direction::Recv, Direction::Send]) {
        if let OpKind::Transfer { legs, .. } = &mut op.kind {
            legs.retain(|leg| leg.dir == dir);
        }
    }
    plan.programs = vec![Program { name: "hand".into(), ops }];
    (plan.lanes, plan.tensors, plan.blocks) = (b.lanes, b.tensors, b.blocks);
    let host = Host::of(&plan, 1.0);
    let why = simulate(&plan, host.machine(), &[], Effort::SUMS).unwrap_err().to_string();
    assert!(why.contains("deadlock: rank 0 waits in recv for rank"), "{why}");
}

#[test]
fn shipped_faults_can_be_read_and_nonsense_is_told_by_file_and_place() {
    for file in std::fs::read_dir("traces/failures").unwrap() {
        let faults = Faults::load(&file.unwrap().path()).unwrap();
        assert!(!faults.source.is_empty() && !faults.faults.is_empty());
    }
    let dir = tempfile::tempdir().unwrap();
    for (text, part) in [
        (r#"{"faults": [{"kind": "slow_gpu", "rank": 1, "factor": 0.5}]}"#, "faults[0]: a factor of 0.5"),
        (r#"{"faults": [{"kind": "slow_gpu", "rank": 1, "factor": NaN}]}"#, "line 1 column"),
        (r#"{"faults": [{"kind": "melted", "rank": 1}]}"#, "melted"),
        (r#"{"watchdog_s": -1}"#, "watchdog_s: -1 is not a time"),
    ] {
        let path = dir.path().join("faults.json");
        std::fs::write(&path, text).unwrap();
        let why = Faults::load(&path).unwrap_err().to_string();
        assert!(why.contains("faults.json") && why.contains(part), "{why}");
    }
}

/// A trace as Perfetto reads it: ops of a lane do not overlap, and each arrow has both ends within ops.
#[test]
fn a_trace_has_messages_as_arrows_between_ops() {
    let (plan, host) = pipeline();
    let found = simulate(&plan, host.machine(), &[], Effort::SPANS).unwrap();
    let mut bytes = vec![];
    foretrain::export::chrome::write_with(&mut bytes, &[("simulated", &found.timeline)], &found.arrows).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
    let time = |e: &serde_json::Value, key: &str| e[key].as_f64().unwrap();
    let (ops, begins, ends) = (of("X"), of("s"), of("f"));
    // Three links between four stages, six microbatches, there and back.
    assert!(begins.len() >= 36 && begins.len() == ends.len(), "{} {}", begins.len(), ends.len());
    let inside = |e: &&serde_json::Value| {
        let same = |x: &&&serde_json::Value| x["pid"] == e["pid"] && x["tid"] == e["tid"];
        let around =
            |x: &serde_json::Value| time(x, "ts") <= time(e, "ts") && time(e, "ts") <= time(x, "ts") + time(x, "dur");
        ops.iter().filter(same).any(|x| around(x) && x["cat"] == "transfer")
    };
    assert!(begins.iter().chain(&ends).all(inside));
    for (s, f) in begins.iter().zip(&ends) {
        assert!(s["id"] == f["id"] && s["pid"] != f["pid"] && time(s, "ts") <= time(f, "ts"), "{s} {f}");
    }
    let mut lanes: std::collections::BTreeMap<String, Vec<(f64, f64)>> = Default::default();
    for x in &ops {
        let lane = format!("{} {}", x["pid"], x["tid"]);
        lanes.entry(lane).or_default().push((time(x, "ts"), time(x, "ts") + time(x, "dur")));
    }
    for (lane, mut spans) in lanes {
        spans.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert!(spans.windows(2).all(|w| w[1].0 >= w[0].1 - 1e-6), "{lane} overlaps");
    }
}
