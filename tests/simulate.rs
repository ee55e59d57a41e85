//! The simulator agrees with the analytic cost to the picosecond where ranks share no link.

mod plans;

use foretrain::act::gaps;
use foretrain::cost::cost;
use foretrain::plan::*;
use foretrain::sim::{Effort, Fault, Faults, Simulated, simulate};
use foretrain::spec::*;
use foretrain::timeline::{Class, Usage};
use plans::{COPY, FLAT, Host, SM, model, pods, same, way, work};

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

/// A link that comes back after two seconds, a GPU that is a thousand times as slow: the step would be over in the end, but a
/// library that lets nobody wait so long has ended it before.
#[test]
fn who_waits_longer_than_the_watchdog_is_ended() {
    let (plan, host) = two_nodes();
    let nic = foretrain::sim::fault::Port::Nic;
    let back = Fault::SlowLink { rank: 3, port: nic, factor: 0.0, from_s: 0.0, to_s: Some(2.0) };
    for (fault, link) in [(back, true), (Fault::slow_gpu("5:1000").unwrap(), false)] {
        let faults = [fault];
        let whole = step(&with(&plan, &host, true, &faults));
        let ended = |fold, watchdog: f64| {
            let effort = Effort { fold, watchdog: (watchdog * 1e12) as u64, ..Effort::SUMS };
            simulate(&plan, host.machine(), &faults, effort).unwrap()
        };
        assert!(ended(true, whole).hang.is_none(), "{faults:?}");
        let short = if link { 1.0 } else { 0.01 * whole };
        let found = ended(true, short);
        let hang = found.hang.as_ref().unwrap();
        assert_eq!(hang.at_s, ended(false, short).hang.unwrap().at_s);
        assert!(hang.overdue && hang.over_s == Some(whole) && hang.at_s < whole, "{hang:?}");
        assert!((hang.waiting[0].since_s + short - hang.at_s).abs() < 1e-9, "{hang:?}");
        assert!(link == hang.down.iter().any(|down| down.rank == 3), "{hang:?}");
        assert!(link || hang.waiting.iter().any(|w| w.waits_for.contains(&5)), "{hang:?}");
        assert!(step(&found) <= hang.at_s);
    }
}

/// What takes longer than time can be told is no deadlock.
#[test]
fn ops_of_many_days_are_an_error_that_says_so() {
    let (plan, _) = two_nodes();
    let why = simulate(&plan, Host::new(16, 8, 1e16).machine(), &[], Effort::SUMS).unwrap_err().to_string();
    assert!(why.contains("takes longer than 11 days"), "{why}");
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
                step(
                    &simulate(&plan, host.machine(), &[Fault::jitter(&format!("normal:{sd}")).unwrap()], effort)
                        .unwrap(),
                )
            };
            (0..40).map(of).sum::<f64>() / 40.0
        };
        let (few, all) = (mean(true), mean(false));
        assert!(all > well, "{all} {well}");
        // Of what jitter adds, and of the step.
        let (error, added) = ((few - all).abs(), all - well);
        assert!(error < 0.3 * added && error < 0.01 * well, "sd {sd}: {few} folded, {all} unfolded, {well} without");
        let effort = Effort { seed: 3, ..Effort::SUMS };
        let again =
            || simulate(&plan, host.machine(), &[Fault::jitter(&format!("normal:{sd}")).unwrap()], effort).unwrap();
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
        assert!(spans.windows(2).all(|w| w[1].0 >= w[0].1), "{lane} overlaps");
    }
}

/// Layers large enough for their gradients to fill a network.
fn large(layers: u64) -> LlmSpec {
    LlmSpec { layers, ..LlmSpec::find("llama-3-8b").unwrap() }
}

/// A network on which ranks meet, and a plan that makes them.
fn crowded() -> Vec<(&'static str, Plan, Host)> {
    let pipelined = |pp, dp, batches| {
        let par = Parallelism { pp, dp, zero: 1, ..Parallelism::default() };
        plans::plan(&large(2 * u64::from(pp)), &par, &work(&par, 4096, 1, batches), SM)
    };
    let ringed = |dp, ring, ulysses| {
        let par = way(dp, ring, ulysses);
        plans::plan(&large(4), &par, &work(&par, 8192, 1, 2), SM)
    };
    let nics = |n: u32| move |spec: &mut ClusterSpec| spec.scale_out.as_mut().unwrap().nics_per_node = n;
    let mut all = vec![];
    for (name, n, plan) in [
        ("one NIC, pipeline", 1, pipelined(2, 16, 4)),
        ("two NICs, rings", 2, ringed(2, 16, 1)),
        ("one NIC, hybrid", 1, ringed(4, 4, 2)),
    ] {
        let host = host(&plan, &nics(n));
        all.push((name, plan, host));
    }
    for (name, over, plan) in [
        ("core, pipeline", 7.0, pipelined(4, 8, 4)),
        ("core, hybrid", 3.5, ringed(4, 4, 2)),
        ("core, replicas", 7.0, ringed(32, 1, 1)),
        ("core, replicas of stages", 3.0, pipelined(2, 16, 4)),
    ] {
        let host = host(&plan, &|spec| spec.pods = pods(16, over, None));
        all.push((name, plan, host));
    }
    for (name, plan) in [("hashed, rings", ringed(2, 16, 1)), ("hashed, replicas", ringed(32, 1, 1))] {
        all.push((name, plan.clone(), hashed(&plan, 1)));
    }
    let plan = ringed(32, 1, 1);
    let rails = host(&plan, &|spec| {
        let out = spec.scale_out.as_mut().unwrap();
        (out.rails, out.pxn) = (true, true);
        spec.pods = pods(16, 2.0, None);
    });
    all.push(("rails with PXN", plan, rails));
    all
}

fn host(plan: &Plan, change: &dyn Fn(&mut ClusterSpec)) -> Host {
    let host = Host::new(plan.ranks(), 8, 4.0);
    let mut spec = host.cluster.spec.clone();
    change(&mut spec);
    let cluster = foretrain::cluster::Cluster::new(&spec, &host.cluster.gpu, plan.ranks()).unwrap();
    Host { cluster, ..host }
}

/// Pods of two nodes under switches of 32 uplinks, on which flows are hashed.
fn hashed(plan: &Plan, subflows: u32) -> Host {
    host(plan, &|spec| {
        spec.pods = pods(16, 1.0, Some(32));
        spec.scale_out.as_mut().unwrap().routing = Routing::Ecmp { subflows };
    })
}

/// Fewer sub-flows collide more; what groups alike lose to it is in the analytic times, and nobody shares a link beyond that.
#[test]
fn hashed_flows_collide_the_less_the_more_they_are() {
    let par = way(32, 1, 1);
    let plan = plans::plan(&large(4), &par, &work(&par, 8192, 1, 2), SM);
    let steps = [1, 2, 256].map(|subflows| {
        let host = hashed(&plan, subflows);
        let (found, costed) = (with(&plan, &host, true, &[]), cost(&plan, host.machine(), FLAT).unwrap());
        assert!(found.shared.is_empty(), "{subflows}: {:?}", found.shared);
        assert!((step(&found) / costed.step.value() - 1.0).abs() < 1e-6, "{subflows}: {} s", step(&found));
        step(&found)
    });
    assert!(steps[0] > steps[1] && steps[1] > steps[2], "{steps:?}");
}

/// Whoever shares a link is never faster for it, and ranks that fold do as they do one by one.
#[test]
fn ranks_that_share_links_are_never_faster_and_fold_exactly() {
    let mut slowed = vec![];
    for (name, plan, host) in crowded() {
        let run = |fold, shared| {
            simulate(&plan, host.machine(), &[], Effort { fold, shared, why: true, ..Effort::SUMS }).unwrap()
        };
        let (alone, few, all) = (run(true, false), run(true, true), run(false, true));
        let cost = cost(&plan, host.machine(), FLAT).unwrap();
        assert!(alone.shared.is_empty());
        let (shared, alone_s, costed) = (step(&few), step(&alone), cost.step.value());
        // Alone they have NICs to themselves that groups alike share in the analytic times.
        assert!(shared >= alone_s && alone_s >= 0.95 * costed, "{name}: {shared} s, {alone_s} alone, {costed} costed");
        assert!((step(&few) / step(&all) - 1.0).abs() < 1e-6, "{name}: {} folded, {} unfolded", step(&few), step(&all));
        assert_eq!(few.shared.is_empty(), few.slowed == alone.slowed && step(&few) == step(&alone), "{name}");
        if step(&few) > 1.0001 * step(&alone) {
            slowed.push(name);
        }
    }
    // What all groups alike leave of uplinks, hashed or not, is in the analytic times; NICs whose flows meet are not.
    assert_eq!(slowed, ["two NICs, rings"]);
}

/// Every event ends something or is an edge in the speed of a link: there cannot be more of them than that, however fast
/// a link flaps, and whatever else is on it.
#[test]
fn the_loop_does_not_turn_without_getting_on() {
    let par = way(32, 1, 1);
    let plan = plans::plan(&large(4), &par, &work(&par, 8192, 1, 2), SM);
    for host in [hashed(&plan, 1), Host::new(32, 8, 4.0)] {
        let well = with(&plan, &host, true, &[]);
        let (up, down) = (1e-6, 1e-6);
        let flapping = [Fault::flapping(&format!("3:{up}:{down}")).unwrap(), Fault::slow_link("9:0.3").unwrap()];
        let found = with(&plan, &host, true, &flapping);
        let classes = found.timeline.classes.len() as f64 / well.timeline.classes.len() as f64;
        // An edge on either port of the rank, for each transfer that is on it.
        let edges = 8.0 * step(&found) / (up + down);
        let most = 4.0 * classes * well.events as f64 + edges;
        assert!((found.events as f64) < most, "{} events, {} of a machine that is well", found.events, well.events);
        assert!(found.hang.is_none() && step(&found) > step(&well));
    }
}

/// A link that carries nothing is a file that is wrong; one that nearly does is slow.
#[test]
fn networks_that_carry_nothing_are_refused_by_name() {
    let text = |from: &str, to: &str| {
        let text = std::fs::read_to_string("models/cluster/h100-24k-roce.json").unwrap();
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.json");
    let graph = |links: &str| {
        let of = |v: &str| format!(r#"{{"value": "{v}", "source": "test", "provenance": "assumed"}}"#);
        let (rate, time) = (of("10 GB/s"), of("1 us"));
        format!(r#""nodes": 4, "graph": {{"shape": {{"links": {links}}}, "bandwidth": {rate}, "latency": {time}}}"#)
    };
    for (text, part) in [
        (text("\"48.5 GB/s\"", "\"0 GB/s\""), "scale_out.achieved"),
        (text("\"48.5 GB/s\"", "\"NaN GB/s\""), "scale_out.achieved"),
        (text("\"355 GB/s\"", "\"-1 GB/s\""), "scale_up.bandwidth"),
        (text("\"355 GB/s\"", "\"1e-300 GB/s\""), "scale_up.bandwidth"),
        (text("\"5 us\"", "\"1e300 s\""), "scale_out.latency"),
        (text("7.0", "0"), "pods.oversubscription"),
        (text("7.0", "NaN"), "line"),
        (text("\"nodes\": 3072", &graph("[[0, 1], [2, 3]]")), "no way leads from host 0 to host 2"),
        (text("\"nodes\": 3072", &graph("[[0, 1], [1, 1]]")), "leads from a vertex to itself"),
        (text("\"nodes\": 3072", &graph("[[0, 1], [1, 4294967295]]")), "the most is 16777216"),
    ] {
        std::fs::write(&path, text).unwrap();
        let gpu = GpuSpec::find("h100-sxm5").unwrap();
        let made = ClusterSpec::load(&path).and_then(|spec| foretrain::cluster::Cluster::new(&spec, &gpu, 32));
        let why = made.unwrap_err().to_string();
        assert!(why.contains("mine.json") || why.contains("h100-24k"), "{why}");
        assert!(why.contains(part), "{why} does not say {part}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 400, ..Default::default() })]

    /// A cluster file with anything in the place of a number is an error or a cluster on which everything has a time.
    #[test]
    fn no_cluster_file_makes_it_panic(
        which in 0usize..6, place in 0usize..40,
        with in "(NaN|-1|0|1e308|1e-308|\"\"|\"0 GB/s\"|\"1e300 GB/s\"|\"1e-300 us\"|\"NaN us\"|\"GB/s\"|null|\\[\\]|4294967295|true|[0-9]{1,6})",
    ) {
        let name = ["h100-24k-roce", "alibaba-hpn-15k", "l20-pcie", "gb200-nvl72", "tpu-v4-pod", "mi300x-8x400"][which];
        let text = std::fs::read_to_string(format!("models/cluster/{name}.json")).unwrap();
        let places: Vec<usize> = text.match_indices(": ").map(|(at, _)| at + 2).collect();
        let from = places[place % places.len()];
        let rest = &text[from..];
        let end = rest.find(['\n', '{']).unwrap_or(rest.len()).min(rest.find(", ").unwrap_or(rest.len()));
        let changed = format!("{}{with}{}", &text[..from], &rest[end..]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.json");
        std::fs::write(&path, changed).unwrap();
        if let Ok(spec) = ClusterSpec::load(&path) {
            let Ok(gpu) = GpuSpec::find(&spec.gpu) else { return Ok(()) };
            let Ok(cluster) = foretrain::cluster::Cluster::new(&spec, &gpu, 16) else { return Ok(()) };
            let stack = StackSpec::find("nccl-fa3").unwrap();
            let members: Vec<u32> = (0..16).collect();
            let bytes = foretrain::units::Bytes::new(1e6);
            let time = foretrain::collective::collective(&cluster, &stack, CollectiveKind::AllReduce, &members, bytes);
            assert!(time.total().value() >= 0.0, "{time:?}");
            for to in 1..16 {
                cluster.path(0, to).links.iter().for_each(|&link| assert!(cluster.capacity(link).value() >= 0.0));
            }
        }
    }
}

/// Block by block a step takes as long as op by op, but for SMs that come and go inside a block.
#[test]
fn blocks_take_as_long_as_their_ops() {
    let run = |plan: &Plan, host: &Host, blocks| {
        simulate(plan, host.machine(), &[], Effort { blocks, why: false, ..Effort::SPANS }).unwrap()
    };
    for (dp, ring, ulysses, pp) in [(8, 1, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1), (2, 1, 1, 4)] {
        for (engines, bound) in [(COPY, 0.0), (SM, 0.02)] {
            let par = Parallelism { pp, ..way(dp, ring, ulysses) };
            let plan = plans::plan(&model(8, 4, false), &par, &work(&par, 960, 1, 3), engines);
            // A late CPU is another thing that blocks do not know inside themselves.
            let host = Host::of(&plan, 1.0).issuing(0.0);
            let (ops, blocks) = (run(&plan, &host, false), run(&plan, &host, true));
            assert!(blocks.events < ops.events, "{} events, {} op by op", blocks.events, ops.events);
            let off = (step(&blocks) / step(&ops) - 1.0).abs();
            assert!(off <= bound, "{dp} {ring} {ulysses} {pp}: {} in blocks, {} op by op", step(&blocks), step(&ops));
            // Work is the same, and so is what is on every lane.
            let (a, b) = (ops.timeline.mean(), blocks.timeline.mean());
            assert_eq!((a.flops, a.by_kernel, a.comm), (b.flops, b.by_kernel, b.comm));
        }
    }
    let (plan, host) = two_nodes();
    let jitter = [Fault::jitter("normal:0.1").unwrap()];
    let why = simulate(&plan, host.machine(), &jitter, Effort { blocks: true, ..Effort::SUMS }).unwrap_err();
    assert!(why.to_string().contains("op by op"), "{why}");
}

/// What was measured of blocks goes in place of what their kernels add up to: the predicted times change nothing, longer
/// ones do, and names that no block has are refused.
#[test]
fn measured_blocks_take_what_was_measured() {
    use foretrain::sim::{BlockTimes, simulate_measured};
    for par in [way(2, 2, 2), Parallelism { pp: 2, tp: 2, zero: 0, ..Parallelism::default() }] {
        let plan = plans::plan(&model(4, 4, false), &par, &work(&par, 4096, 1, 2), COPY);
        let host = Host::of(&plan, 1.0);
        let effort = Effort { blocks: true, ..Effort::SUMS };
        let run = |times: &BlockTimes| simulate_measured(&plan, host.machine(), &[], effort, times);
        let of = |times: &BlockTimes| run(times).unwrap().timeline.step;
        let predicted = BlockTimes::predicted(&plan, host.machine()).unwrap();
        assert!(predicted.blocks.len() > 10, "{predicted:?}");
        let alone = of(&BlockTimes::default());
        let same = of(&predicted).value() / alone.value() - 1.0;
        assert!(same.abs() < 1e-7, "{same}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blocks.json");
        let mut doubled = predicted.clone();
        doubled.blocks.iter_mut().for_each(|block| block.time_s *= 2.0);
        std::fs::write(&path, serde_json::to_string(&doubled).unwrap()).unwrap();
        let read = BlockTimes::load(&path).unwrap();
        let told = |times: &BlockTimes| times.blocks.iter().map(|b| b.block.clone()).collect::<Vec<_>>();
        assert_eq!(told(&read), told(&doubled));
        assert!(read.blocks.iter().zip(&doubled.blocks).all(|(a, b)| plans::close(a.time_s, b.time_s)));
        assert!(of(&read) > alone);
        // Kernels in a step of twice the GPU's are twice as long, whatever waits in between.
        let compute = |times: &BlockTimes| run(times).unwrap().timeline.mean().compute;
        assert!(plans::close((compute(&read) / compute(&predicted) * 1e6).round(), 2e6));
        let refused = |change: &dyn Fn(&mut BlockTimes)| {
            let mut times = predicted.clone();
            change(&mut times);
            std::fs::write(&path, serde_json::to_string(&times).unwrap()).unwrap();
            BlockTimes::load(&path).and_then(|times| run(&times)).unwrap_err().to_string()
        };
        let why = refused(&|times| times.blocks[0].block = "nowhere".into());
        assert!(why.contains("no block of this plan is called \"nowhere\""), "{why}");
        let why = refused(&|times| times.blocks[1].time_s = -1.0);
        assert!(why.contains("blocks.json") && why.contains("blocks[1].time_s: -1 is not"), "{why}");
        let why = refused(&|times| times.blocks[1].block = times.blocks[0].block.clone());
        assert!(why.contains("blocks[1].block") && why.contains("twice"), "{why}");
        let by_op = simulate_measured(&plan, host.machine(), &[], Effort::SUMS, &predicted).unwrap_err();
        assert!(by_op.to_string().contains("add --fidelity block"), "{by_op}");
    }
}

/// Half of the planes carry all at half the speed: as if every NIC and every link between nodes had half of it. Some of
/// the time is as much of the time; and only networks of several planes have one that can be dead.
#[test]
fn a_dead_plane_leaves_its_bytes_to_the_others() {
    let par = way(32, 1, 1);
    let plan = plans::plan(&large(4), &par, &work(&par, 8192, 1, 2), SM);
    let of = |planes: u32, factor: f64, narrow: bool| {
        host(&plan, &|spec| {
            spec.pods = if narrow { pods(16, 4.0, None) } else { vec![] };
            let out = spec.scale_out.as_mut().unwrap();
            // NICs far slower than what is inside nodes.
            (out.planes, out.achieved.value) = (planes, out.achieved.value * (0.125 * factor));
            out.p2p.value = out.achieved.value;
        })
    };
    let dead = |word: &str| Fault::dead_plane(word).unwrap();
    for narrow in [false, true] {
        let (two, one) = (of(2, 1.0, narrow), of(1, 0.5, narrow));
        let well = step(&with(&plan, &two, true, &[]));
        let half = step(&with(&plan, &two, true, &[dead("1")]));
        let wanted = step(&with(&plan, &one, true, &[]));
        // The library chooses its protocols as if all planes were there.
        assert!(half > 1.01 * well && (half / wanted - 1.0).abs() < 0.05, "{narrow}: {well} {half} {wanted}");
        let each = step(&with(&plan, &two, false, &[dead("1")]));
        assert!((each / half - 1.0).abs() < 1e-6, "{narrow}: {each} unfolded, {half} folded");
        let late = step(&with(&plan, &two, true, &[dead(&format!("1@{}", 0.5 * well))]));
        assert!(well < late && late < half, "{narrow}: {well} {late} {half}");
        assert!(with(&plan, &two, true, &[dead("0"), dead("1")]).hang.is_some());
        let why = simulate(&plan, one.machine(), &[dead("0")], Effort::SUMS).unwrap_err().to_string();
        assert!(why.contains("plane 0") && why.contains("is one network"), "{why}");
        let why = simulate(&plan, two.machine(), &[dead("2")], Effort::SUMS).unwrap_err().to_string();
        assert!(why.contains("has planes 0 to 1"), "{why}");
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

/// What is asked of threads that threads do not have they are asked of as devices, where there is a core for each; and
/// nothing is refused there that any other machine can.
#[test]
fn threads_with_a_core_each_have_slack_and_blocks_and_hang() {
    use foretrain::calibrate::shapes;
    use foretrain::cluster::Cluster;
    use foretrain::device::Profile;
    use foretrain::sim::{Machine, plays_threads};
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/measured/cpu/profile.json");
    let profile = Profile::load(&file).unwrap();
    let (gpu, stack) = (GpuSpec::find("cpu-core").unwrap(), StackSpec::find("cpu").unwrap());
    let dead = [Fault::dead("1@0").unwrap()];
    let slow = [Fault::slow_gpu("1:2").unwrap()];
    let spans = Effort::SPANS;
    for (seed, ranks) in [(1, 2), (2, 2), (11, 4)] {
        let plan = shapes::fresh(seed, ranks).plan().unwrap();
        let cluster = Cluster::new(&ClusterSpec::find("local-cpu").unwrap(), &gpu, plan.ranks()).unwrap();
        let machine = Machine { cluster: &cluster, stack: &stack, kernels: &profile, devices: None };
        let run = |faults: &[Fault], effort| simulate(&plan, machine, faults, effort);
        assert!(plays_threads(&plan, machine, &slow, spans), "threads may be slow");
        let beyond =
            [(&dead[..], spans), (&[], Effort { apart: true, ..spans }), (&[], Effort { blocks: true, ..spans })];
        if ranks > 2 {
            for (faults, effort) in beyond {
                let why = run(faults, effort).unwrap_err().to_string();
                assert!(why.contains("4 ranks on 2 cores") && why.contains("cores as ranks"), "{why}");
            }
            continue;
        }
        let [hung, apart, blocks] = beyond.map(|(faults, effort)| run(faults, effort).unwrap());
        let hang = hung.hang.expect("nobody comes past a dead rank");
        assert_eq!(hang.dead, [1]);
        assert!(hang.waiting.iter().any(|w| w.rank == 0 && w.waits_for == [1]), "{:?}", hang.waiting);
        // As of any other machine: some op has none, and none has less.
        let why = apart.why.unwrap();
        let all: Vec<f64> = why.slack.iter().flatten().copied().collect();
        assert_eq!(all.len(), apart.timeline.classes.iter().map(|c| c.spans.len()).sum::<usize>());
        assert!(all.iter().all(|s| *s >= 0.0) && all.contains(&0.0));
        // Blocks are the same kernels one after the other; a rank that is half as fast makes the step longer.
        let step = apart.timeline.step.value();
        assert!((blocks.timeline.step.value() / step - 1.0).abs() < 1e-6);
        let slower = run(&slow, Effort { apart: true, ..spans }).unwrap();
        assert!(slower.timeline.step.value() > step);
    }
}
