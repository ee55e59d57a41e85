//! Who saves what: every element once, by one of the ranks that hold it, and all ranks about as much.

use super::extent::{Held, Run};
use crate::plan::Param;
use std::collections::BTreeMap;

/// A part of a parameter that one rank saves.
#[derive(Debug, Clone)]
pub struct Task<'h, 'p> {
    pub held: &'h Held<'p>,
    pub runs: Vec<Run>,
}

/// Shares out what ranks hold: a list of tasks for each. What the same ranks hold alike goes to the one of them that
/// has least to save so far, the largest parts first.
pub fn share<'h, 'p>(held: &'h [Vec<Held<'p>>]) -> Vec<Vec<Task<'h, 'p>>> {
    let mut by_param: BTreeMap<&str, Vec<(u32, &'h Held<'p>)>> = BTreeMap::new();
    for (rank, all) in (0..).zip(held) {
        for one in all {
            by_param.entry(&one.param.name).or_default().push((rank, one));
        }
    }
    let mut parts: Vec<Part<'h, 'p>> = by_param.values().flat_map(|holders| parts(holders)).collect();
    // A stable sort: what is equally large stays in the order of names.
    parts.sort_by_key(|part| std::cmp::Reverse(part.elems()));
    let mut load = vec![0; held.len()];
    let mut tasks: Vec<Vec<Task>> = held.iter().map(|_| vec![]).collect();
    for part in parts {
        let elems = part.elems();
        let first = part.held.iter().min_by_key(|(rank, _)| (load[*rank as usize], *rank));
        let &(rank, held) = first.expect("somebody holds it");
        load[rank as usize] += elems;
        tasks[rank as usize].push(Task { held, runs: local(&held.runs, &part.whole) });
    }
    tasks
}

/// Elements of a parameter that the same ranks hold.
struct Part<'h, 'p> {
    held: Vec<(u32, &'h Held<'p>)>,
    /// Ranges in the whole, in order.
    whole: Vec<(u64, u64)>,
}

impl Part<'_, '_> {
    fn elems(&self) -> u64 {
        self.whole.iter().map(|(from, to)| to - from).sum()
    }
}

/// Cuts a parameter wherever somebody's part of it begins or ends, and puts together what the same ranks hold.
fn parts<'h, 'p>(holders: &[(u32, &'h Held<'p>)]) -> Vec<Part<'h, 'p>> {
    let mut edges: Vec<(u64, bool, usize)> = vec![];
    for (i, (_, held)) in holders.iter().enumerate() {
        edges.extend(held.runs.iter().flat_map(|run| [(run.whole, true, i), (run.whole + run.len, false, i)]));
    }
    // What ends somewhere ends before the next begins.
    edges.sort_unstable();
    let mut parts: BTreeMap<Vec<usize>, Vec<(u64, u64)>> = BTreeMap::new();
    let (mut inside, mut from): (Vec<usize>, u64) = (vec![], 0);
    // A rank may hold an element twice: in two copies of an expert.
    let mut times = vec![0; holders.len()];
    for (at, begins, who) in edges {
        if at > from && !inside.is_empty() {
            let ranges = parts.entry(inside.clone()).or_default();
            match ranges.last_mut() {
                Some(last) if last.1 == from => last.1 = at,
                _ => ranges.push((from, at)),
            }
        }
        from = at;
        times[who] = if begins { times[who] + 1 } else { times[who] - 1 };
        match inside.binary_search(&who) {
            Ok(i) if times[who] == 0 => drop(inside.remove(i)),
            Err(i) if times[who] > 0 => inside.insert(i, who),
            _ => {}
        }
    }
    let part = |(who, whole): (Vec<usize>, _)| Part { held: who.iter().map(|&i| holders[i]).collect(), whole };
    parts.into_iter().map(part).collect()
}

/// Ranges of the whole, in order, where a rank has them. Its own runs are in the order of its memory: copies of experts stand in
/// any order.
///
/// # Panics
/// Where it has not all of a range.
fn local(runs: &[Run], ranges: &[(u64, u64)]) -> Vec<Run> {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|run| run.whole);
    let mut runs = runs.into_iter().peekable();
    let mut all = vec![];
    for &(mut from, to) in ranges {
        while from < to {
            // The first that ends behind it began before any other that has it.
            while runs.next_if(|run| run.whole + run.len <= from).is_some() {}
            let run = runs.peek().filter(|run| run.whole <= from).expect("the rank has the range");
            let len = to.min(run.whole + run.len) - from;
            all.push(Run { local: run.local + from - run.whole, whole: from, len });
            from += len;
        }
    }
    all
}

/// Elements of a parameter that nobody saves.
pub fn missing(param: &Param, runs: impl Iterator<Item = Run>) -> u64 {
    let all: u64 = param.shape.iter().product();
    all - runs.map(|run| run.len).sum::<u64>().min(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::memory::SlotId;
    use proptest::prelude::*;

    fn param(elems: u64) -> Param {
        let name = "w".into();
        Param {
            name,
            weight: 0,
            grad: 1,
            slot: 0,
            rows: [0, elems],
            shape: vec![elems],
            shard: None,
            stages: vec![],
            matrices: vec![],
        }
    }

    fn held(param: &Param, runs: Vec<Run>) -> Vec<Held<'_>> {
        let slot = SlotId { tensor: 0, slot: 0 };
        vec![Held::whole(param, slot, runs)]
    }

    #[test]
    fn ranks_that_hold_the_same_take_turns() {
        let (a, b) = (param(8), Param { name: "x".into(), ..param(8) });
        let all = Run { local: 0, whole: 0, len: 8 };
        let both = || [held(&a, vec![all]), held(&b, vec![all])].concat();
        let tasks = share(&[both(), both()]).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(tasks, [1, 1]);
    }

    proptest! {
        /// Whatever ranks hold, in whatever order and however often, each element that somebody holds is saved once, from where
        /// that rank has it.
        #[test]
        fn every_element_is_saved_once(
            ranks in prop::collection::vec(prop::collection::vec((0u64..40, 1u64..40), 1..4), 1..8)
        ) {
            let param = param(80);
            let runs = |cuts: &Vec<(u64, u64)>| {
                let mut local = 3;
                let run = |&(whole, len): &(u64, u64)| {
                    local += len;
                    Run { local: local - len, whole, len }
                };
                cuts.iter().map(run).collect::<Vec<Run>>()
            };
            let held: Vec<Vec<Held>> = ranks.iter().map(|cuts| held(&param, runs(cuts))).collect();
            let mut saved = [0; 80];
            for (rank, tasks) in share(&held).iter().enumerate() {
                for run in tasks.iter().flat_map(|task| &task.runs) {
                    let is_own = |own: &Run| {
                        let inside = run.whole >= own.whole && run.whole + run.len <= own.whole + own.len;
                        inside && run.local + own.whole == run.whole + own.local
                    };
                    prop_assert!(held[rank][0].runs.iter().any(is_own), "{run:?} of rank {rank}");
                    (run.whole..run.whole + run.len).for_each(|at| saved[at as usize] += 1);
                }
            }
            for at in 0..80 {
                let somebody = ranks.iter().flatten().any(|&(from, len)| (from..from + len).contains(&at));
                prop_assert_eq!(saved[at as usize], u32::from(somebody));
            }
        }
    }
}
