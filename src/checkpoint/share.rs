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
        let runs = part.whole.iter().map(|&(from, to)| local(&held.runs, from, to)).collect();
        tasks[rank as usize].push(Task { held, runs });
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
    for (at, begins, who) in edges {
        if at > from && !inside.is_empty() {
            let ranges = parts.entry(inside.clone()).or_default();
            match ranges.last_mut() {
                Some(last) if last.1 == from => last.1 = at,
                _ => ranges.push((from, at)),
            }
        }
        from = at;
        match inside.binary_search(&who) {
            Ok(i) if !begins => drop(inside.remove(i)),
            Err(i) if begins => inside.insert(i, who),
            _ => {}
        }
    }
    let part = |(who, whole): (Vec<usize>, _)| Part { held: who.iter().map(|&i| holders[i]).collect(), whole };
    parts.into_iter().map(part).collect()
}

/// A range of the whole, where a rank has it.
fn local(runs: &[Run], from: u64, to: u64) -> Run {
    // In a rank's memory and in the whole, elements stand in the same order.
    let run = runs[runs.partition_point(|run| run.whole <= from) - 1];
    debug_assert!(to <= run.whole + run.len, "a run covers the range");
    Run { local: run.local + from - run.whole, whole: from, len: to - from }
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
        vec![Held { param, states: [slot; 3], runs, working: None }]
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
        /// Whatever ranks hold, each element that somebody holds is saved once, from where that rank has it.
        #[test]
        fn every_element_is_saved_once(cuts in prop::collection::vec((0u64..40, 1u64..40, 0u64..5), 1..8)) {
            let param = param(80);
            let run = |&(from, len, pad): &(u64, u64, u64)| Run { local: pad, whole: from, len };
            let ranks: Vec<Vec<Held>> = cuts.iter().map(|cut| held(&param, vec![run(cut)])).collect();
            let mut saved = [0; 80];
            for (rank, tasks) in share(&ranks).iter().enumerate() {
                for run in tasks.iter().flat_map(|task| &task.runs) {
                    let own = ranks[rank][0].runs[0];
                    prop_assert_eq!(run.local - own.local, run.whole - own.whole);
                    prop_assert!(run.whole >= own.whole && run.whole + run.len <= own.whole + own.len);
                    (run.whole..run.whole + run.len).for_each(|at| saved[at as usize] += 1);
                }
            }
            for at in 0..80 {
                let somebody = cuts.iter().any(|&(from, len, _)| (from..from + len).contains(&at));
                prop_assert_eq!(saved[at as usize], u32::from(somebody));
            }
        }
    }
}
