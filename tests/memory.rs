//! Memory read off the plan: what shares bytes is never alive at once, by the edges of the whole plan.

mod plans;

use foretrain::plan::lasting::lasting;
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::{ALIGN, Conflicts, Footprint, Layout, SlotId, lives};
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
    let (mut whole, lasting) = (0, lasting(plan));
    for (a, ops_a) in &users {
        whole += plan.tensors[a.tensor as usize].bytes();
        let here = range(a);
        assert!(here.end <= layout.bytes);
        for (b, ops_b) in users.range(a..).skip(1) {
            let there = range(b);
            if here.end <= there.start || there.end <= here.start {
                continue;
            }
            assert!(!lasting[a.tensor as usize] && !lasting[b.tensor as usize]);
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
            for zero in [0, 1, 2, 3] {
                let par = Parallelism { recompute, zero, ..way(dp, ring, ulysses) };
                let plan = plans::plan(&model(layers, 4, zero == 0), &par, &work(&par, 96, 2, batches), SM);
                let (bytes, whole) = shared_bytes_are_safe(&plan);
                assert!(bytes < whole, "scratch shares bytes");
            }
        }
    }
}

/// Every slot that shares bytes at the lowest offset where it touches none it conflicts with, searched from the
/// bottom, the largest first.
fn placed_simply(plan: &Plan, conflicts: &Conflicts, bottom: u64) -> Vec<(usize, u64)> {
    let size = |i: usize| plan.tensors[conflicts.slots[i].tensor as usize].bytes().next_multiple_of(ALIGN);
    let mut order: Vec<usize> = (conflicts.always..conflicts.slots.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(size(i)), i));
    let mut placed: Vec<(usize, u64)> = vec![];
    for item in order {
        let ends = placed.iter().map(|&(other, at)| at + size(other));
        let free = |from: &u64| {
            let clear = |&(other, at): &(usize, u64)| {
                !conflicts.between(item, other) || at >= from + size(item) || at + size(other) <= *from
            };
            placed.iter().all(clear)
        };
        let at = std::iter::once(bottom).chain(ends).filter(free).min().unwrap();
        placed.push((item, at));
    }
    placed
}

#[test]
fn placing_what_is_alike_in_one_go_changes_nothing() {
    for (ring, ulysses, words) in [(1, 1, "default"), (4, 1, "merge-at-end"), (2, 2, "burst"), (4, 1, "gather-kv")] {
        for recompute in [Recompute::None, Recompute::Full] {
            let par = Parallelism { recompute, options: words.parse().unwrap(), ..way(2, ring, ulysses) };
            let plan = plans::plan(&model(6, 4, false), &par, &work(&par, 96, 2, 3), SM);
            let atoms = AtomTable::new(&plan).unwrap();
            let (conflicts, layout) =
                (Conflicts::of(&plan, &atoms, 0).unwrap(), Layout::new(&plan, &atoms, 0).unwrap());
            let end = |at: &SlotId| layout.offset(*at).unwrap() + plan.tensors[at.tensor as usize].bytes();
            let bottom = conflicts.slots[..conflicts.always].iter().map(end).max().unwrap().next_multiple_of(ALIGN);
            for (item, at) in placed_simply(&plan, &conflicts, bottom) {
                assert_eq!(layout.offset(conflicts.slots[item]), Some(at), "{words} {:?}", conflicts.slots[item]);
            }
        }
    }
}

#[test]
fn a_footprint_is_that_of_the_whole_layout() {
    let words = ["default", "merge-at-end", "burst", "gather-kv", "double-ring-2"];
    for (words, (ring, ulysses)) in words.into_iter().zip([(1, 2), (4, 1), (2, 2), (4, 1), (4, 1)]) {
        for (zero, recompute) in
            [(0, Recompute::None), (1, Recompute::Full), (2, Recompute::Full), (3, Recompute::None)]
        {
            let par = Parallelism { recompute, zero, options: words.parse().unwrap(), ..way(2, ring, ulysses) };
            let mut plan = plans::plan(&model(6, 4, false), &par, &work(&par, 96, 2, 3), SM);
            let conflicts = Conflicts::of(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
            let mut distinct = std::collections::BTreeSet::new();
            // The plan's own sizes, then others: few different ones, so that tensors are equally large, and many.
            for round in 0..40u64 {
                let layout = Layout::of(&plan, &conflicts).unwrap();
                assert_eq!(Footprint::of(&plan, &conflicts).unwrap(), layout.footprint, "{words} {par:?} {round}");
                distinct.insert(layout.bytes);
                let most = if round % 2 == 0 { 4 } else { 1000 };
                for (t, tensor) in (1u64..).zip(&mut plan.tensors) {
                    let drawn = (t * 1_000_003 + round * 7_919).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
                    tensor.shape = vec![64 * (drawn % most)];
                }
            }
            assert!(distinct.len() > 20);
        }
    }
}

/// Bytes of everything but inputs at the fullest moment, by the lives of the whole line.
fn fullest(plan: &Plan, conflicts: &Conflicts, lives: &[Vec<Vec<memory::Life>>]) -> u64 {
    let size = |at: &SlotId| plan.tensors[at.tensor as usize].bytes().next_multiple_of(ALIGN);
    let (always, others) = conflicts.slots.split_at(conflicts.always);
    let of = |at: &SlotId| &lives[at.tensor as usize][at.slot as usize];
    let alive = |op: u32| {
        let now = others.iter().filter(|at| of(at).iter().any(|life| life.first <= op && op <= life.last));
        now.map(size).sum::<u64>()
    };
    let begins = others.iter().flat_map(|at| of(at).iter().map(|life| life.first));
    always.iter().map(size).sum::<u64>() + begins.map(alive).max().unwrap_or(0)
}

#[test]
fn moments_that_are_left_out_are_not_the_fullest() {
    for (ring, recompute) in [(1, Recompute::None), (1, Recompute::Full), (4, Recompute::None), (4, Recompute::Full)] {
        let par = Parallelism { recompute, ..way(1, ring, 1) };
        let plan = plans::plan(&model(5, 4, false), &par, &work(&par, 96, 2, 3), SM);
        let atoms = AtomTable::new(&plan).unwrap();
        let (conflicts, layout) = (Conflicts::of(&plan, &atoms, 0).unwrap(), Layout::new(&plan, &atoms, 0).unwrap());
        let line = Line::program(&plan, &atoms, 0).unwrap();
        let inputs = conflicts.inputs.iter().map(|&t| &plan.tensors[t as usize]);
        let inputs: u64 = inputs.map(|t| t.bytes().next_multiple_of(ALIGN) * u64::from(t.slots)).sum();
        assert_eq!(layout.bytes - layout.gaps, inputs + fullest(&plan, &conflicts, &lives(&plan, &line)));
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
