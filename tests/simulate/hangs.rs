//! Steps that do not end: who waits for whom, and for how long.

use crate::plans::{Host, by_hand};
use crate::played::{sim, step, two_nodes, with};
use foretrain::plan::*;
use foretrain::sim::fault::Port;
use foretrain::sim::{Effort, Fault, simulate};

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
    let hang = found.hang.unwrap();
    assert_eq!(hang.down.iter().map(|down| (down.rank, down.link)).collect::<Vec<_>>(), [(3, "between nodes")]);
    assert!(hang.dead.is_empty() && hang.over_s.is_none(), "{hang:?}");
    // Sums of gradients go over all NICs, and nothing else does.
    assert!(hang.waiting.iter().all(|w| w.path.contains("grad_sum")), "{hang:?}");
    assert_eq!(hang.waiting.iter().map(|w| w.ranks).sum::<u32>(), 16, "{hang:?}");
    let back = Fault::SlowLink { rank: 3, port: Port::Nic, factor: 0.0, from_s: 0.0, to_s: Some(2.0) };
    let found = with(&plan, &host, true, &[back]);
    assert!(found.hang.is_none() && step(&found) > 2.0);
}

/// A link that comes back after two seconds, a GPU that is a thousand times as slow: the step would be over in the end, but a
/// library that lets nobody wait so long has ended it before.
#[test]
fn who_waits_longer_than_the_watchdog_is_ended() {
    let (plan, host) = two_nodes();
    let back = Fault::SlowLink { rank: 3, port: Port::Nic, factor: 0.0, from_s: 0.0, to_s: Some(2.0) };
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

/// Receives before sends on one lane of a ring: nobody ever sends.
#[test]
fn cyclic_waits_are_an_error_that_names_ranks() {
    let mut plan = by_hand(|b, via| {
        let t = b.tensor("t", &[16], Dtype::F32, TensorKind::CommBuffer, 2);
        b.compute("fill", Kernel::Fill { elems: 16 }, &[], &[t]);
        b.hop("recv", via, 1, t, t.slot(1), 0);
        b.hop("send", via, 1, t, t.slot(1), 0);
    });
    for (op, dir) in plan.programs[0].ops.iter_mut().skip(1).zip([Direction::Recv, Direction::Send]) {
        if let OpKind::Transfer { legs, .. } = &mut op.kind {
            legs.retain(|leg| leg.dir == dir);
        }
    }
    let host = Host::of(&plan, 1.0);
    let why = simulate(&plan, host.machine(), &[], Effort::SUMS).unwrap_err().to_string();
    assert!(why.contains("deadlock: rank 0 waits in recv for rank"), "{why}");
}
