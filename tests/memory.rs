//! Memory read off the plan: what shares bytes is never alive at once, by the edges of the whole plan.

mod plans;

use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::{Layout, SlotId, lives};
use foretrain::plan::*;
use foretrain::spec::*;
use plans::{SM, model, way, work};
use std::collections::BTreeMap;

/// For each op, lane by lane, one past the last op that has surely ended before it.
fn ended_before(line: &Line) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    for node in 0..line.nodes.len() {
        let mut known = vec![0; line.lanes];
        for &pred in line.preds(node) {
            let pred = pred as usize;
            known.iter_mut().zip(&all[pred]).for_each(|(known, other)| *known = (*known).max(*other));
            let lane = line.nodes[pred].lane as usize;
            known[lane] = known[lane].max(pred + 1);
        }
        all.push(known);
    }
    all
}

/// Ops that touch each slot, in program order.
fn users(line: &Line) -> BTreeMap<SlotId, Vec<usize>> {
    let mut all: BTreeMap<SlotId, Vec<usize>> = BTreeMap::new();
    for node in 0..line.nodes.len() {
        for place in line.reads(node).iter().chain(line.writes(node)) {
            all.entry(SlotId { tensor: place.tensor, slot: place.slot }).or_default().push(node);
        }
    }
    all
}

fn shared_bytes_are_safe(plan: &Plan) -> (u64, u64) {
    let atoms = AtomTable::new(plan).unwrap();
    let layout = Layout::new(plan, &atoms, 0).unwrap();
    let line = Line::program(plan, &atoms, 0).unwrap();
    let (before, users) = (ended_before(&line), users(&line));
    let range = |at: &SlotId| {
        let from = layout.offset(*at).unwrap();
        from..from + plan.tensors[at.tensor as usize].bytes()
    };
    let mut whole = 0;
    for (a, ops_a) in &users {
        whole += plan.tensors[a.tensor as usize].bytes();
        let (here, kind) = (range(a), plan.tensors[a.tensor as usize].kind);
        assert!(here.end <= layout.bytes);
        for (b, ops_b) in users.range(a..).skip(1) {
            let there = range(b);
            if here.end <= there.start || there.end <= here.start {
                continue;
            }
            assert!(!kind.persists() && !plan.tensors[b.tensor as usize].kind.persists());
            // Two ops that touch the same bytes by different names follow one another.
            for (first, second) in ops_a.iter().flat_map(|u| ops_b.iter().map(move |v| (*u.min(v), *u.max(v)))) {
                let lane = line.nodes[first].lane as usize;
                assert!(before[second][lane] > first, "{} and {}", line.path(first), line.path(second));
            }
        }
    }
    // The executor frees by the lives of the whole line: each has to be in use where it is said to be.
    let lives = lives(plan, &line);
    for (at, ops) in &users {
        let lives = &lives[at.tensor as usize][at.slot as usize];
        assert!(lives.windows(2).all(|w| w[0].last < w[1].first));
        assert_eq!(lives.last().unwrap().last as usize, *ops.last().unwrap());
    }
    let live: u64 = layout.live_by_kind.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(layout.bytes, live + layout.gaps);
    (layout.bytes, whole)
}

#[test]
fn shared_bytes_are_never_alive_at_once() {
    for (dp, ring, ulysses, layers, batches) in [(2, 1, 1, 3, 5), (1, 3, 1, 4, 4), (1, 1, 4, 5, 2), (1, 2, 2, 3, 6)] {
        for recompute in [Recompute::None, Recompute::Full] {
            for zero in [0, 1] {
                let par = Parallelism { recompute, zero, ..way(dp, ring, ulysses) };
                let plan = plans::plan(&model(layers, 4, zero == 0), &par, &work(&par, 96, 2, batches), SM);
                let (bytes, whole) = shared_bytes_are_safe(&plan);
                assert!(bytes < whole, "scratch shares bytes");
            }
        }
    }
}

#[test]
fn iterations_that_are_not_walked_change_nothing() {
    for recompute in [Recompute::None, Recompute::Full] {
        let layout = |batches| {
            let par = Parallelism { recompute, ..way(1, 2, 2) };
            let plan = plans::plan(&model(3, 4, false), &par, &work(&par, 96, 1, batches), SM);
            Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap()
        };
        // A microbatch more is its tokens and targets more.
        let (three, nine) = (layout(3), layout(9));
        assert_eq!(nine.bytes, three.bytes + 6 * 2 * 256);
        assert_eq!(nine.gaps, three.gaps);
    }
}
