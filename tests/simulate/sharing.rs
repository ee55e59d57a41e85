//! Links that several ranks share.

use crate::plans::{self, COPY, FLAT, Host, SM, pods, way, work};
use crate::played::{host, large, step, with};
use foretrain::cost::cost;
use foretrain::plan::builder::Via;
use foretrain::plan::*;
use foretrain::sim::{Effort, Fault, simulate};
use foretrain::spec::*;

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
        assert!(shared >= alone_s && alone_s == costed, "{name}: {shared} s, {alone_s} alone, {costed} costed");
        assert_eq!(shared, step(&all), "{name}: folded, and unfolded");
        assert_eq!(few.shared.is_empty(), few.slowed == alone.slowed && step(&few) == step(&alone), "{name}");
        if step(&few) > 1.0001 * step(&alone) {
            slowed.push(name);
        }
    }
    // What all groups alike leave of uplinks, hashed or not, is in the analytic times; NICs whose flows meet are not.
    assert_eq!(slowed, ["two NICs, rings"]);
}

/// Every event begins or ends something, and an edge in the speed of a link is none: a class of ranks has as many as on a
/// machine that is well, however fast a link flaps, and whatever else is on it.
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
        let most = classes * well.events as f64;
        assert!(found.events as f64 <= most, "{} events, {} of a machine that is well", found.events, well.events);
        assert!(found.hang.is_none() && step(&found) > step(&well));
    }
}

/// Eight ranks of a node send to the other by one NIC: two messages each, on two lanes, then a third behind the first. The NIC
/// is never empty, so the step is what it takes for all bytes. What a message lost to the other there its lane owed once more, and
/// the other waited for it when it had gone.
#[test]
fn what_is_lost_on_a_nic_is_lost_once() {
    let (par, elems) = (way(1, 2, 8), 1 << 28);
    let mut plan = plans::plan(&large(1), &par, &work(&par, 8192, 1, 1), COPY);
    let (mut b, group) = (Builder::new(), Group::axes(&[Axis::Cp]));
    let via = |index| Via { group: &group, index, engine: Engine::CopyEngine };
    for (at, index) in [0, 1, 0].into_iter().enumerate() {
        let sent = b.tensor(&format!("sent.{at}"), &[elems], Dtype::F32, TensorKind::CommBuffer, 2);
        b.hop(&format!("hop.{at}"), via(index), 1, sent, sent.slot(1), at as u32);
    }
    plan.programs = vec![Program { name: "hand".into(), ops: b.finish() }];
    (plan.lanes, plan.tensors, plan.blocks) = (b.lanes, b.tensors, b.blocks);
    let host = host(&plan, &|spec| {
        let out = spec.scale_out.as_mut().unwrap();
        (out.nics_per_node, out.p2p, out.several) = (1, out.achieved.clone(), None);
    });
    let nic = host.cluster.spec.scale_out.as_ref().unwrap().achieved.value.value();
    let all = 8.0 * 3.0 * 4.0 * elems as f64 / nic;
    for step in [step(&with(&plan, &host, true, &[])), cost(&plan, host.machine(), FLAT).unwrap().step.value()] {
        assert!((1.0..1.01).contains(&(step / all)), "{step} s, where the NIC takes {all}");
    }
}
