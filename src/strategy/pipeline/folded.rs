//! DualPipeV: a row of 2p chunks folded in the middle, so that stage s has chunks s and 2p-1-s (github:deepseek-ai/DualPipe
//! @3da1bbe, dualpipev.py; DualPipe's schedule of both directions, arXiv:2412.19437, section 3.2.1, with one copy of the
//! weights).
//!
//! ```text
//! 2(p-1-s) x  F0             warm-up
//!    (s+1) x  F0 F1
//!  (p-1-s) x  I1 W F1        I: the gradients of inputs, W: those of weights that were put off first
//! (m-2p+s+1)  F0 B1, F1 B0   each two side by side
//!  (p-1-s) x  B1, F1 B0
//!    (s+1) x  B1 B0          the second half of these in halves
//!  (p-1-s) x  W I0
//!    (s+1) x  W
//! ```
//! Digits are chunks: 0 goes from the first stage to the last, 1 on from there and back. The last stage hands over to
//! itself, and the first has both the embedding and the head. The bubble is (p-1)(F&B + B - 3W), F and B being those of
//! one chunk, where 1F1B over as many stages has (p-1)(F+B) of two (the table of DualPipe's README).

use super::{Act, Flow, Pass, Pipeline, Slots, Unit};
use std::collections::{BTreeMap, VecDeque};

/// The next thing that a stage does, with the chunk; microbatches go through each chunk in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Forward(u32),
    Backward(u32),
    /// The first half of a backward unit.
    Inputs(u32),
    /// The second half of the backward unit that has waited for the longest.
    Weights,
    /// A forward unit, and beside it a backward unit of the other chunk.
    Pair(u32),
}

/// A unit in its place in the order: cut in two or whole, alone or beside the one behind it.
#[derive(Clone, Copy)]
struct Turn {
    unit: Unit,
    halved: bool,
    paired: bool,
}

/// The turns of a stage; `None`: the second half of a backward unit.
type Turns = Vec<Option<Turn>>;

impl Pipeline {
    /// Whether a unit's result stays on its stage, as it does where the row of chunks is folded.
    pub fn stays(&self, stage: u32, unit: Unit) -> bool {
        self.is_folded() && stage + 1 == self.stages && unit.forward == (unit.chunk == 0)
    }

    /// Whether a unit's input was made on its own stage.
    pub(super) fn is_handed(&self, stage: u32, unit: Unit) -> bool {
        self.is_folded() && stage + 1 == self.stages && unit.forward != (unit.chunk == 0)
    }

    /// Whether the input and the result of a unit go toward later stages.
    pub fn rises(&self, unit: Unit) -> bool {
        !self.is_folded() && unit.forward || self.is_folded() && unit.forward == (unit.chunk == 0)
    }

    fn folded_order(&self, stage: u32) -> Vec<Next> {
        use Next::*;
        if self.fold.halves() {
            return self.order_in_v(stage);
        }
        let (p, m) = (self.stages, self.microbatches);
        let (after, here) = (p - 1 - stage, stage + 1);
        let steady = m - 2 * p + here;
        let first_half = |chunk| if self.split { Inputs(chunk) } else { Backward(chunk) };
        let mut all: Vec<Next> = vec![];
        let mut times = |n: u32, of: &[Next]| (0..n).for_each(|_| all.extend(of));
        times(2 * after, &[Forward(0)]);
        times(here, &[Forward(0), Forward(1)]);
        times(after, &[first_half(1), Weights, Forward(1)]);
        for k in 0..steady {
            // The first two units of the last stage are of one microbatch: they cannot be side by side.
            let apart = k == 0 && after == 0;
            times(1, if apart { &[Forward(0), Backward(1)] } else { &[Pair(0)] });
            times(1, &[Pair(1)]);
        }
        times(after, &[Backward(1), Pair(1)]);
        for k in 0..here {
            let late = |chunk: u32| k > here / 2 || (k == here / 2 && (chunk == 0 || stage % 2 == 1));
            let of = |chunk| if late(chunk) { first_half(chunk) } else { Backward(chunk) };
            times(1, &[of(1), of(0)]);
        }
        times(after, &[Weights, first_half(0)]);
        times(here, &[Weights]);
        all.into_iter().filter(|next| self.split || *next != Weights).collect()
    }

    fn folded_turns(&self, stage: u32) -> Turns {
        let mut done: BTreeMap<(bool, u32), u32> = BTreeMap::new();
        let mut turn = |forward: bool, chunk: u32, halved: bool, paired: bool| {
            let microbatch = done.entry((forward, chunk)).or_default();
            let unit = Unit { forward, chunk, microbatch: *microbatch };
            *microbatch += 1;
            Some(Turn { unit, halved, paired })
        };
        let mut turns = vec![];
        for next in self.folded_order(stage) {
            match next {
                Next::Forward(chunk) => turns.push(turn(true, chunk, false, false)),
                Next::Backward(chunk) => turns.push(turn(false, chunk, false, false)),
                Next::Inputs(chunk) => turns.push(turn(false, chunk, true, false)),
                Next::Weights => turns.push(None),
                Next::Pair(chunk) => {
                    turns.push(turn(true, chunk, false, self.pairs));
                    turns.push(turn(false, 1 - chunk, false, false));
                }
            }
        }
        turns
    }

    /// Slots of gradients of a unit, and behind them of the one that it hands over to.
    fn folded_passes(&self) -> u32 {
        self.passes() + if self.split { self.passes() - 1 } else { 1 }
    }

    pub(super) fn folded_flow(&self, stage: u32) -> Flow {
        let (turns, passes) = (self.folded_turns(stage), self.folded_passes());
        let mut flow = Folded { pipe: self, stage, passes, ..Folded::default_of(self) };
        let units: Vec<Unit> = turns.iter().flatten().map(|turn| turn.unit).collect();
        let mut at = 0;
        for turn in turns {
            match turn {
                None => flow.weights(),
                Some(turn) => {
                    // The unit itself, the one behind it, and the next of its direction through its chunk.
                    let alike = |other: &Unit| (other.forward, other.chunk) == (turn.unit.forward, turn.unit.chunk);
                    let next = units[at + 1..].iter().find(|other| alike(other));
                    [units.get(at), units.get(at + 1), next].into_iter().flatten().for_each(|unit| flow.ask(*unit));
                    flow.run(turn);
                    at += 1;
                }
            }
        }
        let [inputs, kept, left] = [flow.inputs, flow.kept, flow.left].map(|slots| slots.count);
        Flow { acts: flow.acts, inputs, kept, gradients: passes * flow.gradients.count, left }
    }
}

/// A stage's acts as they are written, with the slots that they hold.
struct Folded<'p> {
    pipe: &'p Pipeline,
    stage: u32,
    passes: u32,
    acts: Vec<Act>,
    inputs: Slots,
    kept: Slots,
    gradients: Slots,
    left: Slots,
    /// Slots of the units whose input has come, or is on its way.
    asked: BTreeMap<Unit, u32>,
    /// Slots of the input and of what is kept, by chunk and microbatch.
    held: BTreeMap<(u32, u32), (u32, u32)>,
    /// Backward units that still use each lot of gradients.
    users: BTreeMap<u32, u32>,
    put_off: VecDeque<Pass>,
    /// The forward unit of a pair; `None` outside of one.
    forward: Option<Pass>,
    turn: u32,
}

impl<'p> Folded<'p> {
    fn default_of(pipe: &'p Pipeline) -> Folded<'p> {
        Folded {
            pipe,
            stage: 0,
            passes: 0,
            acts: vec![],
            inputs: Slots::default(),
            kept: Slots::default(),
            gradients: Slots::default(),
            left: Slots::default(),
            asked: BTreeMap::new(),
            held: BTreeMap::new(),
            users: BTreeMap::new(),
            put_off: VecDeque::new(),
            forward: None,
            turn: 0,
        }
    }

    fn ask(&mut self, unit: Unit) {
        if !self.asked.contains_key(&unit) && self.pipe.receives(self.stage, unit) {
            let slot = if unit.forward { self.inputs.take() } else { self.lot() };
            self.asked.insert(unit, slot);
            self.acts.push(Act::Receive { unit, slot });
        }
    }

    /// Takes a lot of gradients; returns its first slot.
    fn lot(&mut self) -> u32 {
        let lot = self.gradients.take();
        self.users.insert(lot, 1);
        lot * self.passes
    }

    fn run(&mut self, Turn { unit, halved, paired }: Turn) {
        let (key, slot) = ((unit.chunk, unit.microbatch), self.asked.remove(&unit));
        if unit.forward {
            let (input, kept) = (slot.unwrap_or_else(|| self.inputs.take()), self.kept.take());
            self.held.insert(key, (input, kept));
            let to = if self.pipe.stays(self.stage, unit) {
                let next = self.inputs.take();
                self.asked.insert(Unit { chunk: 1, ..unit }, next);
                next
            } else {
                self.turn = 1 - self.turn;
                self.turn
            };
            let pass = Pass { unit, input, kept, to, halved: false, left: 0 };
            match paired {
                true => self.forward = Some(pass),
                false => self.acts.push(Act::Forward(pass)),
            }
            return;
        }
        let ((input, kept), to) = (self.held[&key], slot.unwrap_or_else(|| self.lot()));
        let left = if halved { self.left.take() } else { 0 };
        let pass = Pass { unit, input, kept, to, halved, left };
        if self.pipe.stays(self.stage, unit) {
            let layers = self.pipe.range(self.stage, unit.chunk).len() as u32;
            self.asked.insert(Unit { chunk: 0, ..unit }, to + pass.done(layers));
            *self.users.get_mut(&(to / self.passes)).expect("a lot that was taken") += 1;
        }
        self.acts.push(match self.forward.take() {
            Some(forward) => Act::Pair { forward, backward: pass },
            None => Act::Backward(pass),
        });
        match halved {
            true => self.put_off.push_back(pass),
            false => self.give_back(pass),
        }
    }

    fn weights(&mut self) {
        let pass = self.put_off.pop_front().expect("as many second halves as first ones");
        self.acts.push(Act::Weights(pass));
        self.left.give_back(pass.left);
        self.give_back(pass);
    }

    fn give_back(&mut self, pass: Pass) {
        self.inputs.give_back(pass.input);
        self.kept.give_back(pass.kept);
        let lot = pass.to / self.passes;
        let users = self.users.get_mut(&lot).expect("a lot that was taken");
        *users -= 1;
        if *users == 0 {
            self.gradients.give_back(lot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Passing;
    use super::*;
    use crate::spec::Fold;
    use std::sync::OnceLock;

    fn pipeline(stages: u32, microbatches: u32, split: bool) -> Pipeline {
        let layers = vec![1; 2 * stages as usize];
        Pipeline {
            stages,
            chunks: 2,
            microbatches,
            layers,
            passing: Passing::Ahead,
            pairs: false,
            split,
            fold: Fold::DualPipe,
            orders: OnceLock::new(),
            tables: OnceLock::new(),
        }
    }

    /// Each unit once, forward before backward, and weights' gradients behind inputs'; what comes from another stage is
    /// asked for once, in the order in which that stage sends it.
    #[test]
    fn every_unit_runs_once_and_receives_what_is_sent() {
        for (p, m, split) in [(2, 4, true), (2, 7, false), (3, 6, true), (4, 8, true), (4, 13, true), (5, 10, false)] {
            let pipe = pipeline(p, m, split);
            let flows: Vec<Flow> = (0..p).map(|stage| pipe.flow(stage)).collect();
            let made = |stage: u32| -> Vec<Unit> {
                let acts = flows[stage as usize].acts.iter();
                let of = |act: &Act| match act {
                    Act::Forward(pass) | Act::Backward(pass) => Some(pass.unit),
                    _ => None,
                };
                acts.filter_map(of).collect()
            };
            for stage in 0..p {
                let (units, acts) = (made(stage), &flows[stage as usize].acts);
                let mut sorted = units.clone();
                sorted.sort();
                sorted.dedup();
                assert_eq!((units.len(), sorted.len()), (4 * m as usize, 4 * m as usize));
                for (at, unit) in units.iter().enumerate().filter(|(_, unit)| !unit.forward) {
                    assert!(units[..at].contains(&Unit { forward: true, ..*unit }), "p {p} m {m} stage {stage}");
                }
                let halved = acts.iter().filter(|act| matches!(act, Act::Backward(pass) if pass.halved)).count();
                let weights = acts.iter().filter(|act| matches!(act, Act::Weights(_))).count();
                assert_eq!(halved, weights);
                assert_eq!(weights as u32, if split { 2 * (p - 1 - stage) + stage + 1 } else { 0 });
                for (forward, chunk) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
                    let of = |unit: &Unit| (unit.forward, unit.chunk) == (forward, chunk);
                    let unit = Unit { forward, chunk, microbatch: 0 };
                    if !pipe.receives(stage, unit) {
                        continue;
                    }
                    let asked: Vec<Unit> = acts
                        .iter()
                        .filter_map(|act| match act {
                            Act::Receive { unit, .. } if of(unit) => Some(*unit),
                            _ => None,
                        })
                        .collect();
                    let from = if pipe.rises(unit) { stage - 1 } else { stage + 1 };
                    let sent: Vec<Unit> = made(from).into_iter().filter(of).collect();
                    assert_eq!(asked, sent, "p {p} m {m} stage {stage}");
                }
            }
        }
    }

    /// The table of DualPipe's README: activations of 2p + 1 chunks at most, whichever the stage.
    #[test]
    fn chunks_in_flight() {
        for (p, m) in [(2, 4), (4, 8), (4, 20), (8, 32)] {
            for stage in 0..p {
                let kept = pipeline(p, m, true).flow(stage).kept;
                assert!(kept <= 2 * p + 1, "p {p} m {m} stage {stage}: {kept}");
            }
            assert!((0..p).any(|stage| pipeline(p, m, true).flow(stage).kept >= 2 * p));
        }
    }
}
