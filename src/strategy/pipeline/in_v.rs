//! Folded pipelines whose backward units are all cut in two: ZB-V (Zero Bubble Pipeline Parallelism, arXiv:2401.10241,
//! section 6; in the order of PyTorch's `ScheduleZBVZeroBubble`, but that gradients of weights keep the order of those of
//! inputs to the end), V-Half and V-Min (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362).
//!
//! Where F, B (gradients of inputs) and W (of weights) of a chunk take one unit of time each, 1F1B over p stages idles 6(p-1)
//! units and keeps p microbatches on its first stage. These idle and keep, whichever the stage:
//!
//! ```text
//! ZB-V     (p-1)            p             1/6 of the bubble is left: the last stage waits for its first input
//! V-Half  3(p-1) at most    p/2 + 1       rounded down
//! V-Min   4(p-1) at most    (p+2)/3       rounded up
//! ```
//! V-Half and V-Min repeat one microbatch's six passes every six units. How long they wait from stage to stage is what keeps
//! activations few: a chunk's live until it has come back. From the steady state so given, the order of every stage follows by
//! playing all of them: what stands first there goes first as soon as it can, a forward unit only where its activations still
//! fit, and gradients of weights fill what is left. It is fixed then, whatever the passes really take.

use super::folded::Next;
use super::{Fold, Pipeline};
use std::collections::VecDeque;

/// Units of time from one microbatch to the next: two forward passes, two backward ones in halves.
const INTERVAL: u32 = 6;

impl Pipeline {
    pub(super) fn order_in_v(&self, stage: u32) -> Vec<Next> {
        match self.fold {
            Fold::ZeroBubble => zero_bubble(self.stages, self.microbatches, stage),
            _ => self.orders.get_or_init(|| self.played())[stage as usize].clone(),
        }
    }

    fn played(&self) -> Vec<Vec<Next>> {
        let steady = Steady::of(self.fold, self.stages);
        let mut all: Vec<Stage> = (0..self.stages).map(|_| Stage::default()).collect();
        let units = 2 * 3 * self.microbatches as usize;
        let mut now = 0;
        while all.iter().any(|stage| stage.order.len() < units) {
            let picks: Vec<Option<Next>> =
                (0..self.stages).map(|stage| steady.pick(&all, stage, self.microbatches, now)).collect();
            // What could go on a unit later could go on now: if nobody does, nobody ever will.
            assert!(picks.iter().any(Option::is_some), "{:?} over {} stages: all wait", self.fold, self.stages);
            all.iter_mut().zip(picks).for_each(|(stage, pick)| stage.run(pick, now));
            now += 1;
        }
        all.into_iter().map(|stage| stage.order).collect()
    }
}

/// The order of a stage: forward units of both chunks until the first comes back, then each of the six by turns, what comes
/// late in the end. Of fewer microbatches than fill the V, those that there are.
fn zero_bubble(stages: u32, microbatches: u32, stage: u32) -> Vec<Next> {
    use Next::*;
    let (after, m) = (stages - stage, microbatches.max(2 * stages - 1));
    let mut all: Vec<Next> = vec![];
    let mut times = |n: u32, of: &[Next]| (0..n).for_each(|_| all.extend(of));
    times(2 * after - 1, &[Forward(0)]);
    times(stage, &[Forward(1), Forward(0)]);
    times(after, &[Forward(1), Inputs(1), Weights]);
    let ahead = stages + after - 1;
    times(m - ahead, &[Forward(0), Inputs(0), Weights, Forward(1), Inputs(1), Weights]);
    // Forward units of the second chunk that are left when there are none of the first.
    times(after - 1, &[Inputs(0), Weights, Forward(1), Inputs(1), Weights]);
    times(stage, &[Inputs(0), Inputs(1)]);
    times(after, &[Inputs(0), Weights]);
    times(2 * stage, &[Weights]);
    within(all, microbatches)
}

/// An order without the microbatches from `microbatches` on.
fn within(all: Vec<Next>, microbatches: u32) -> Vec<Next> {
    let (mut forward, mut inputs) = ([0; 2], [0; 2]);
    let mut waiting = VecDeque::new();
    let mut keeps = |next: &Next| {
        let count = |of: &mut u32| {
            *of += 1;
            *of <= microbatches
        };
        match next {
            Next::Forward(chunk) => count(&mut forward[*chunk as usize]),
            Next::Inputs(chunk) => {
                let keeps = count(&mut inputs[*chunk as usize]);
                waiting.push_back(keeps);
                keeps
            }
            _ => waiting.pop_front().expect("gradients of weights stand behind those of inputs"),
        }
    };
    all.into_iter().filter(|next| keeps(next)).collect()
}

/// When each stage does what of the first microbatch in the steady state, and how many chunks' activations it keeps.
struct Steady {
    stages: u32,
    /// By chunk: forward and backward, of each stage.
    at: [[Vec<u32>; 2]; 2],
    most: usize,
}

impl Steady {
    /// Offsets from stage to stage: forward and back again, and the same backward. Between the four legs there is as much
    /// time as keeps passes of different microbatches from falling on each other. V-Min's are those of the paper's authors
    /// (github:sail-sg/zero-bubble-pipeline-parallelism @064369d, zbv_greedy.py), but for the time between forward and
    /// backward where 3 does not divide p, 3 here and 1 there; V-Half's, found by a search, are theirs the other way round
    /// (2 a stage down and 1 up), with the same activations, and bubbles within two units of theirs.
    fn of(fold: Fold, p: u32) -> Steady {
        let (steps, gaps, most) = match (fold, p % 2) {
            (Fold::Min, _) => ([1, 1, 1, 1], [1, 3, 1], (p + 2).div_ceil(3)),
            (_, 0) => ([1, 2, 1, 2], [1, 1, 5], p / 2 + 1),
            _ => ([1, 2, 1, 2], [1, 3, 1], p / 2 + 1),
        };
        let leg = |start: u32, step: u32, rises: bool| -> Vec<u32> {
            (0..p).map(|s| start + step * if rises { s } else { p - 1 - s }).collect()
        };
        let down = leg(0, steps[0], true);
        let up = leg(down[p as usize - 1] + gaps[0], steps[1], false);
        let back = leg(up[0] + gaps[1], steps[2], true);
        let home = leg(back[p as usize - 1] + gaps[2], steps[3], false);
        Steady { stages: p, at: [[down, home], [up, back]], most: 2 * most as usize }
    }

    /// What a stage begins at a time: of what could, that which comes first in the steady state.
    fn pick(&self, all: &[Stage], stage: u32, microbatches: u32, now: u32) -> Option<Next> {
        let here = &all[stage as usize];
        let due = |forward: bool, chunk: u32| {
            let microbatch = here.done[chunk as usize][usize::from(!forward)].len() as u32;
            let at = self.at[chunk as usize][usize::from(!forward)][stage as usize] + INTERVAL * microbatch;
            (microbatch < microbatches).then_some((at, forward, chunk, microbatch))
        };
        // Forward units keep their order, or those of one chunk would take the room of the other's.
        let forward = (0..2).filter_map(|chunk| due(true, chunk)).min().filter(|_| here.kept < self.most);
        let backward = (0..2).filter_map(|chunk| due(false, chunk));
        let can = |(_, forward, chunk, microbatch): &(u32, bool, u32, u32)| {
            self.is_given(all, stage, (*forward, *chunk), *microbatch as usize, now)
        };
        match forward.into_iter().chain(backward).filter(can).min() {
            Some((_, true, chunk, _)) => Some(Next::Forward(chunk)),
            Some((_, false, chunk, _)) => Some(Next::Inputs(chunk)),
            None => (here.waiting > 0).then_some(Next::Weights),
        }
    }

    /// Whether what a pass needs was over before `now`.
    fn is_given(&self, all: &[Stage], stage: u32, (forward, chunk): (bool, u32), microbatch: usize, now: u32) -> bool {
        let over = |stage: u32, chunk: usize, backward: usize| {
            all[stage as usize].done[chunk][backward].get(microbatch).is_some_and(|at| *at < now)
        };
        let (last, way) = (self.stages - 1, usize::from(!forward));
        let own = forward || over(stage, chunk as usize, 0);
        own && match (forward, chunk) {
            (true, 0) => stage == 0 || over(stage - 1, 0, way),
            (true, _) if stage == last => over(stage, 0, way),
            (true, _) => over(stage + 1, 1, way),
            (false, 1) => stage == 0 || over(stage - 1, 1, way),
            (false, _) if stage == last => over(stage, 1, way),
            (false, _) => over(stage + 1, 0, way),
        }
    }
}

/// A stage as it is played.
#[derive(Default)]
struct Stage {
    order: Vec<Next>,
    /// By chunk: when forward and backward passes ran.
    done: [[Vec<u32>; 2]; 2],
    /// Chunks whose activations are kept, and those of them that have gradients of weights to be made.
    kept: usize,
    waiting: usize,
}

impl Stage {
    fn run(&mut self, pick: Option<Next>, now: u32) {
        match pick {
            Some(Next::Forward(chunk)) => {
                self.done[chunk as usize][0].push(now);
                self.kept += 1;
            }
            Some(Next::Inputs(chunk)) => {
                self.done[chunk as usize][1].push(now);
                self.waiting += 1;
            }
            Some(_) => (self.kept, self.waiting) = (self.kept - 1, self.waiting - 1),
            None => {}
        }
        self.order.extend(pick);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Act, Passing, Unit};
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::OnceLock;

    fn pipeline(stages: u32, microbatches: u32, fold: Fold) -> Pipeline {
        let layers = vec![1; 2 * stages as usize];
        let orders = OnceLock::new();
        Pipeline {
            stages,
            chunks: 2,
            microbatches,
            layers,
            passing: Passing::Ahead,
            pairs: false,
            split: true,
            fold,
            orders,
            tables: OnceLock::new(),
        }
    }

    /// The idle time of a step whose passes take one unit of time each, found by following who waits for whom.
    fn idle(pipe: &Pipeline) -> u32 {
        let acts: Vec<Vec<Act>> = (0..pipe.stages).map(|stage| pipe.flow(stage).acts).collect();
        let mut over: BTreeMap<(u32, Unit), u32> = BTreeMap::new();
        let (mut at, mut clock) = (vec![0; acts.len()], vec![0; acts.len()]);
        while (0..acts.len()).any(|stage| at[stage] < acts[stage].len()) {
            let before = at.clone();
            for (s, acts) in (0..).zip(&acts) {
                while let Some(act) = acts.get(at[s as usize]) {
                    let given = match act {
                        Act::Receive { .. } | Act::Weights(_) => Some(0),
                        Act::Forward(pass) | Act::Backward(pass) if pipe.receives(s, pass.unit) => {
                            over.get(&(if pipe.rises(pass.unit) { s - 1 } else { s + 1 }, pass.unit)).copied()
                        }
                        Act::Forward(_) | Act::Backward(_) => Some(0),
                        Act::Pair { .. } | Act::Send | Act::Await => panic!("not in a V"),
                    };
                    let Some(given) = given else { break };
                    at[s as usize] += 1;
                    let clock = &mut clock[s as usize];
                    if !matches!(act, Act::Receive { .. }) {
                        *clock = given.max(*clock) + 1;
                    }
                    if let Act::Forward(pass) | Act::Backward(pass) = act {
                        over.insert((s, pass.unit), *clock);
                    }
                }
            }
            assert_ne!(before, at, "stages wait for one another");
        }
        clock.iter().max().unwrap() - INTERVAL * pipe.microbatches
    }

    /// Each unit once in both halves, forward before backward, and stages receive in the order in which others send.
    #[test]
    fn every_unit_runs_once_and_no_stage_waits_for_ever() {
        for fold in [Fold::ZeroBubble, Fold::Half, Fold::Min] {
            for (p, m) in [(2, 1), (2, 5), (3, 2), (4, 3), (4, 12), (5, 20), (6, 7), (8, 32), (13, 40), (48, 9)] {
                let pipe = pipeline(p, m, fold);
                for stage in 0..p {
                    let acts = pipe.flow(stage).acts;
                    let of = |chunk: u32, want: fn(&Act) -> Option<Unit>| -> Vec<u32> {
                        let units = acts.iter().filter_map(want).filter(|unit| unit.chunk == chunk);
                        units.map(|unit| unit.microbatch).collect()
                    };
                    for chunk in 0..2 {
                        let forward = of(chunk, |act| match act {
                            Act::Forward(pass) => Some(pass.unit),
                            _ => None,
                        });
                        let backward = of(chunk, |act| match act {
                            Act::Backward(pass) if pass.halved => Some(pass.unit),
                            _ => None,
                        });
                        let weights = of(chunk, |act| match act {
                            Act::Weights(pass) => Some(pass.unit),
                            _ => None,
                        });
                        let all: Vec<u32> = (0..m).collect();
                        assert_eq!([&forward, &backward, &weights], [&all; 3], "{fold:?} p {p} m {m} stage {stage}");
                    }
                }
                idle(&pipe);
            }
        }
    }

    /// The tables of the papers (arXiv:2405.15362, table 1, and the README of github:sail-sg/zero-bubble-pipeline-parallelism):
    /// for passes of one length V-Half has half of 1F1B's bubble and V-Min two thirds; ZB-V has none but the wait for the
    /// first input. Activations of p, p/2 and p/3 microbatches, and some that do not grow with p.
    #[test]
    fn bubbles_and_activations_are_those_of_the_papers() {
        for p in 2..=32u32 {
            let m = 4 * p;
            let whole = 6 * (p - 1);
            for (fold, bubble, most) in [
                (Fold::ZeroBubble, p - 1, 2 * p),
                (Fold::Half, whole / 2, 2 * (p / 2 + 1)),
                (Fold::Min, whole * 2 / 3, 2 * (p + 2u32).div_ceil(3)),
            ] {
                let pipe = pipeline(p, m, fold);
                let idle = idle(&pipe);
                assert!(idle <= bubble && idle + p > bubble, "{fold:?} p {p}: idle {idle} of {bubble}");
                let kept: Vec<u32> = (0..p).map(|stage| pipe.flow(stage).kept).collect();
                assert_eq!(kept.iter().max(), Some(&most), "{fold:?} p {p}: {kept:?}");
            }
        }
    }
}
