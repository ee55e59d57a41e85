//! Folded pipelines whose backward units are all cut in two: ZB-V (Zero Bubble Pipeline Parallelism, arXiv:2401.10241,
//! section 6; in the order of PyTorch's `ScheduleZBVZeroBubble`, but that gradients of weights keep the order of those of
//! inputs to the end), V-Half and V-Min (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362).
//!
//! Where F, B (gradients of inputs) and W (of weights) of a chunk take one unit of time each, 1F1B over p stages idles
//! 6(p-1) units and keeps p microbatches on its first stage. The schedules here idle and keep, on every stage:
//!
//! ```text
//! ZB-V     (p-1)            p             1/6 of the bubble is left: the last stage waits for its first input
//! V-Half  3(p-1) at most    p/2 + 1       rounded down
//! V-Min   4(p-1) at most    (p+2)/3       rounded up
//! ```
//! The orders of the last two are made in [`controllable`].

use super::folded::Next;
use super::{Fold, Pipeline, controllable};
use std::collections::VecDeque;

impl Pipeline {
    pub(super) fn order_in_v(&self, stage: u32) -> Vec<Next> {
        match self.fold {
            Fold::ZeroBubble => zero_bubble(self.stages, self.microbatches, stage),
            _ => self.orders.get_or_init(|| controllable::orders(self.fold, self.stages, self.microbatches))
                [stage as usize]
                .clone(),
        }
    }
}

/// The order of a stage: forward units of both chunks until the first comes back, then each of the six by turns, and at
/// the end what comes late. With fewer microbatches than fill the V, the units that there are.
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
    // Forward units of the second chunk are left when there are none of the first.
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

#[cfg(test)]
mod tests {
    use super::super::{Act, Passing, Unit};
    use super::controllable::INTERVAL;
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

    /// The idle time of a step whose passes take one unit of time each.
    fn idle(pipe: &Pipeline) -> u32 {
        took(pipe, [1; 3]) - INTERVAL * pipe.microbatches
    }

    /// How long a step takes whose passes take so long each, forward, backward to inputs and to weights, found by following
    /// who waits for whom.
    fn took(pipe: &Pipeline, [forward, inputs, weights]: [u32; 3]) -> u32 {
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
                    let takes = match act {
                        Act::Forward(_) => forward,
                        Act::Weights(_) => weights,
                        _ => inputs,
                    };
                    if !matches!(act, Act::Receive { .. }) {
                        *clock = given.max(*clock) + takes;
                    }
                    if let Act::Forward(pass) | Act::Backward(pass) = act {
                        over.insert((s, pass.unit), *clock);
                    }
                }
            }
            assert_ne!(before, at, "stages wait for one another");
        }
        clock.into_iter().max().unwrap()
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
                let least = if fold == Fold::ZeroBubble { 1 } else { bubble / 3 };
                assert!((least..=bubble).contains(&idle), "{fold:?} p {p}: idle {idle} of {bubble}");
                let kept: Vec<u32> = (0..p).map(|stage| pipe.flow(stage).kept).collect();
                assert_eq!(kept.iter().max(), Some(&most), "{fold:?} p {p}: {kept:?}");
            }
        }
    }
    /// Steps over those without a bubble, of orders found by a transcription of the authors' algorithm into another language
    /// (github:sail-sg/zero-bubble-pipeline-parallelism @064369d, zbv_greedy.py).
    #[test]
    fn passes_of_other_lengths_take_what_the_authors_orders_take() {
        let cases = [
            (8, 32, [10, 10, 10], [1.089, 1.141]),
            (8, 32, [12, 16, 10], [1.126, 1.408]),
            (8, 8, [12, 16, 10], [1.546, 1.842]),
            (6, 32, [12, 16, 10], [1.085, 1.353]),
            (5, 32, [12, 16, 10], [1.078, 1.339]),
            (4, 32, [12, 16, 10], [1.044, 1.320]),
            (3, 32, [12, 16, 10], [1.037, 1.284]),
        ];
        for (p, m, cost, [half, min]) in cases {
            let steps =
                |fold| f64::from(took(&pipeline(p, m, fold), cost)) / f64::from(2 * m * cost.iter().sum::<u32>());
            for (fold, want) in [(Fold::Half, half), (Fold::Min, min)] {
                let got = steps(fold);
                assert!((got - want).abs() < 1e-3, "{fold:?} p {p} m {m} {cost:?}: {got}, {want}");
            }
        }
    }
}
