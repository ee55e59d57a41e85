use super::full::{Flow, max_min};
use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000_000;

fn ends(share: &mut Share) -> Vec<(u64, Vec<u64>)> {
    let mut all = Vec::new();
    let mut tags = Vec::new();
    while let Some(at) = share.complete(&mut tags) {
        all.push((at, std::mem::take(&mut tags)));
    }
    all
}

/// One link of capacity C, flows of 1 and 3 units that could take all of it alone.
///   y1 = y2 = C/2 until the first is done at 2/C; the second has 2 left, and all of C: done at 2/C + 2/C.
#[test]
fn a_link_is_halved_and_then_whole_again() {
    let mut share = Share::new();
    let link = share.resource(1000.0);
    share.add(&Demand::flow(1.0, 1e9, &[(link, 1.0)], 1));
    share.add(&Demand::flow(3.0, 1e9, &[(link, 1.0)], 2));
    assert_eq!(share.load(link), 1000.0);
    assert_eq!(ends(&mut share), [(2 * MS, vec![1]), (4 * MS, vec![2])]);
    assert_eq!(share.carried(link), 4.0);
}

/// The parking lot: one long flow over links 1..n, and one short flow on each. With C on every link but the first, which
/// has C/2, the long one and the first short one have C/4, the other short ones what it leaves, 3C/4.
#[test]
fn a_parking_lot() {
    let mut share = Share::new();
    let links: Vec<Resource> = (0..4).map(|i| share.resource(if i == 0 { 500.0 } else { 1000.0 })).collect();
    let all: Vec<_> = links.iter().map(|&l| (l, 1.0)).collect();
    let long = share.add(&Demand::flow(1.0, 1e9, &all, 0));
    let short: Vec<_> = all.iter().map(|&l| share.add(&Demand::flow(1.0, 1e9, &[l], 1))).collect();
    assert_eq!(share.rate(long), Some(250.0));
    let rates: Vec<_> = short.iter().map(|&s| share.rate(s).unwrap()).collect();
    assert_eq!(rates, [250.0, 750.0, 750.0, 750.0]);
    assert_eq!([share.bottleneck(long), share.bottleneck(short[2])], [Some(links[0]), Some(links[2])]);
}

/// Weights 2 and 1 share C as 2C/3 and C/3; a cap below its share leaves the rest to the other.
#[test]
fn weights_and_caps() {
    let mut share = Share::new();
    let link = share.resource(900.0);
    let uses = [(link, 1.0)];
    let heavy = share.add(&Demand { weight: 2.0, ..Demand::flow(1.0, 1e9, &uses, 0) });
    let light = share.add(&Demand::flow(1.0, 1e9, &uses, 0));
    assert_eq!((share.rate(heavy), share.rate(light)), (Some(600.0), Some(300.0)));
    let capped = share.add(&Demand::flow(1.0, 90.0, &uses, 0));
    assert_eq!((share.rate(heavy), share.rate(light), share.rate(capped)), (Some(540.0), Some(270.0), Some(90.0)));
    assert_eq!(share.bottleneck(capped), None);
}

/// Nothing shared: an activity ends after work / cap, rounded once to a picosecond, whatever else comes and goes.
#[test]
fn alone_is_exact() {
    let mut share = Share::new();
    let wide = share.resource(1e12);
    let works: Vec<f64> = (1..200).map(|i| 1e-3 / f64::from(i)).collect();
    for (tag, &work) in works.iter().enumerate() {
        // An op that uses a thousandth of a resource: seconds of work at a rate of 1.
        share.add(&Demand { work, cap: 1.0, weight: 1.0, uses: &[(wide, 1e9)], tag: tag as u64 });
    }
    let all = ends(&mut share);
    assert_eq!(all.len(), works.len());
    for (at, tags) in all {
        assert_eq!(at, (works[tags[0] as usize] * 1e12).round() as u64);
    }
    let later = share.add(&Demand::flow(1.0, 3.0, &[], 7));
    assert_eq!(share.rate(later), Some(3.0));
    assert_eq!(ends(&mut share), [(MS + (1e12f64 / 3.0).round() as u64, vec![7])]);
}

#[test]
fn what_ends_together_is_one_batch() {
    let mut share = Share::new();
    let link = share.resource(1e9);
    for tag in 0..10 {
        share.add(&Demand::flow(1e6 * (1.0 + 1e-8 * tag as f64), 1e9, &[(link, 1.0)], tag));
    }
    let all = ends(&mut share);
    assert_eq!((all.len(), all[0].1.len()), (1, 10));
    assert!(share.is_empty());
}

#[test]
fn a_link_that_goes_down_stops_and_comes_back() {
    let mut share = Share::new();
    let link = share.resource(1000.0);
    let flow = share.add(&Demand::flow(2.0, 1e9, &[(link, 1.0)], 5));
    share.advance(MS);
    share.set_capacity(link, 0.0);
    assert_eq!((share.next_end(), share.rate(flow)), (None, Some(0.0)));
    share.advance(9 * MS);
    assert_eq!(share.remaining(flow), Some(1.0));
    share.set_capacity(link, 500.0);
    assert_eq!(ends(&mut share), [(11 * MS, vec![5])]);
    assert_eq!((share.remaining(flow), share.cancel(flow)), (None, false));
}

#[test]
fn cancelled_work_stays_done_and_makes_room() {
    let mut share = Share::new();
    let link = share.resource(1000.0);
    let uses = [(link, 1.0)];
    let first = share.add(&Demand::flow(9.0, 1e9, &uses, 0));
    let second = share.add(&Demand::flow(1.0, 1e9, &uses, 1));
    share.advance(MS);
    assert!(share.cancel(first));
    assert_eq!((share.carried(link), share.rate(second)), (0.5, Some(1000.0)));
    assert_eq!(ends(&mut share), [(MS + MS / 2, vec![1])]);
}

/// A random network, and what happens on it.
#[derive(Debug, Clone)]
enum Event {
    Add { uses: Vec<(usize, u32)>, work: u32, cap: u32, weight: u32 },
    Cancel(usize),
    Capacity(usize, u32),
    Complete,
}

fn event(resources: usize) -> impl Strategy<Value = Event> {
    let add = (prop::collection::vec((0..resources, 1..4u32), 1..4), 1..1000u32, 1..40u32, 1..4u32)
        .prop_map(|(uses, work, cap, weight)| Event::Add { uses, work, cap, weight });
    prop_oneof![
        6 => add,
        1 => (0..1000usize).prop_map(Event::Cancel),
        1 => (0..resources, 0..60u32).prop_map(|(r, c)| Event::Capacity(r, c)),
        3 => Just(Event::Complete),
    ]
}

/// Against the definition and against the slow oracle, after every event:
///   o feasible: y_i <= cap_i, and sum_i d_ri y_i <= C_r
///   o max-min: i is at its cap, or uses a full r on which no level is above its own, so that it can only gain by
///     taking from one that has no more
///   o equal to filling from nothing; that solution is unique.
fn check(share: &mut Share, capacities: &[f64], alive: &[(Activity, Flow)]) -> Result<(), TestCaseError> {
    let rates: Vec<f64> = alive.iter().map(|(a, _)| share.rate(*a).unwrap()).collect();
    let flows: Vec<Flow> = alive.iter().map(|(_, f)| f.clone()).collect();
    let mut load = vec![0.0; capacities.len()];
    let mut highest = vec![0.0f64; capacities.len()];
    for (flow, rate) in flows.iter().zip(&rates) {
        for &(r, takes) in &flow.uses {
            load[r] += takes * rate;
            highest[r] = highest[r].max(rate / flow.weight);
        }
    }
    for (r, capacity) in capacities.iter().enumerate() {
        prop_assert!(load[r] <= capacity * (1.0 + 1e-6) + 1e-12, "resource {r}: {} of {capacity}", load[r]);
    }
    for (flow, &rate) in flows.iter().zip(&rates) {
        let at_cap = rate >= flow.cap * (1.0 - 1e-9);
        let full = |&(r, _): &(usize, f64)| {
            load[r] >= capacities[r] * (1.0 - 1e-6) && rate / flow.weight >= highest[r] * (1.0 - 1e-6)
        };
        prop_assert!(at_cap || flow.uses.iter().any(full), "{flow:?} at {rate} could have more");
    }
    for (found, right) in rates.iter().zip(max_min(capacities, &flows)) {
        prop_assert!((found - right).abs() <= 1e-6 * right + 1e-12, "{found}, not {right}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn incremental_is_max_min(
        mut capacities in prop::collection::vec(1..60u32, 1..9),
        events in prop::collection::vec(event(8), 1..60),
    ) {
        let mut share = Share::new();
        let rooms: Vec<Resource> = capacities.iter().map(|&c| share.resource(f64::from(c))).collect();
        let mut alive: Vec<(Activity, Flow)> = Vec::new();
        // By tag: uses times work. What is done has to be carried, no more and no less.
        let mut wanted = vec![0.0; rooms.len()];
        let mut cancelled = false;
        for event in events {
            match event {
                Event::Add { uses, work, cap, weight } => {
                    let mut merged: Vec<(usize, f64)> = Vec::new();
                    for (r, takes) in uses {
                        let r = r % rooms.len();
                        match merged.iter_mut().find(|u| u.0 == r) {
                            Some(u) => u.1 += f64::from(takes),
                            None => merged.push((r, f64::from(takes))),
                        }
                    }
                    let flow = Flow { cap: f64::from(cap), weight: f64::from(weight), uses: merged };
                    let uses: Vec<_> = flow.uses.iter().map(|&(r, takes)| (rooms[r], takes)).collect();
                    flow.uses.iter().for_each(|&(r, takes)| wanted[r] += takes * f64::from(work));
                    let demand =
                        Demand { work: f64::from(work), cap: flow.cap, weight: flow.weight, uses: &uses, tag: 0 };
                    alive.push((share.add(&demand), flow));
                }
                Event::Cancel(i) if !alive.is_empty() => {
                    cancelled = true;
                    prop_assert!(share.cancel(alive.swap_remove(i % alive.len()).0));
                }
                Event::Cancel(_) => {}
                Event::Capacity(r, c) => {
                    let r = r % rooms.len();
                    capacities[r] = c;
                    share.set_capacity(rooms[r], f64::from(c));
                }
                Event::Complete => {
                    let (before, mut tags) = (share.now(), Vec::new());
                    if let Some(at) = share.complete(&mut tags) {
                        prop_assert!(at >= before && !tags.is_empty());
                    }
                    alive.retain(|(a, _)| share.remaining(*a).is_some());
                }
            }
            let now: Vec<f64> = capacities.iter().map(|&c| f64::from(c)).collect();
            prop_assert_eq!(share.len(), alive.len());
            check(&mut share, &now, &alive)?;
        }
        // Whatever stands still runs on, and all ends.
        rooms.iter().for_each(|&room| share.set_capacity(room, 50.0));
        ends(&mut share);
        prop_assert!(share.is_empty());
        for (room, wanted) in rooms.iter().zip(wanted) {
            let carried = share.carried(*room);
            let lost = wanted - carried;
            prop_assert!(cancelled && lost >= -1e-9 || lost.abs() <= 1e-9 * wanted, "{carried} of {wanted}");
        }
    }
}

#[test]
fn the_same_events_give_the_same_bits() {
    let play = || {
        let mut share = Share::new();
        let rooms: Vec<Resource> = (0..50).map(|i| share.resource(1e9 + 1e7 * f64::from(i))).collect();
        for i in 0..400u64 {
            let pick = |k: u64| (rooms[(i * k % 50) as usize], 1.0);
            share.add(&Demand::flow(1e6 + (i * 7919 % 1000) as f64, 1e10, &[pick(13), pick(29)], i));
        }
        ends(&mut share)
    };
    assert_eq!(play(), play());
}
