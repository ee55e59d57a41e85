//! Pipeline parallelism: 1F1B (PipeDream-Flush, arXiv:2006.09503) and its interleaved form, in which a rank
//! has several stretches of layers, its *chunks* (Megatron-LM, arXiv:2104.04473, section 2.2).
//!
//! ```text
//! stage s   warm-up: w forwards | steady: 1 forward, 1 backward, .. | cool-down: w backwards
//! w = p-1-s, or 2(p-1-s) + (v-1)p interleaved, and never more than there are forwards
//! in pairs  w = 2(p-1-s) + (v-1)p + 1, steady: a forward beside a backward of an earlier microbatch
//! split     1F1B, and behind the k-th backward unit the gradients of weights of the (k-s)-th
//! ```
//! Split (ZB-H1 of Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1), a backward unit makes the gradients
//! of inputs alone, and the stage before has them the earlier: the bubble is (p-1)(F+B-W) in place of (p-1)(F+B+W).
//! Stage s puts those of weights off by s microbatches, so that each stage has as many in flight as the first.
//!
//! Folded pipelines are in `folded`, and the orders of those that halve every backward unit in `in_v` and `controllable`.
//! Else virtual stage c*p + s is chunk c of stage s. What a stage receives next is asked for one unit ahead, and what it
//! has computed is sent while the next unit runs: sending and receiving are decoupled from compute (MegaScale,
//! arXiv:2402.15627, section 3.2), for lanes give that by themselves; [`Passing`] has what older software does. Transfers
//! are the work of NICs and copy engines here: the one or two SMs that a waiting NCCL kernel sits on are not counted.

mod controllable;
mod folded;
mod in_v;
mod shortest;

pub use folded::Next;
pub use shortest::{Shortest, UnitTimes};

use super::feasible;
use super::layers::Layers;
use crate::error::Result;
use crate::plan::{Axis, Group};
use crate::spec::{Fold, LlmSpec, Parallelism};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::OnceLock;

/// One microbatch through one chunk, forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unit {
    pub forward: bool,
    pub chunk: u32,
    pub microbatch: u32,
}

/// An act of a stage; acts stand in program order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Asks for the input of a forward unit into a slot of inputs, or for the gradient of a backward unit's
    /// output into a pair of gradients.
    Receive { unit: Unit, slot: u32 },
    /// Runs a forward unit, into one of two outputs, or into the input of the unit behind it on the same stage.
    Forward(Pass),
    /// Runs a backward unit, or its first half, from and to a pair of gradients that layers write by turns.
    Backward(Pass),
    /// Runs a forward and a backward unit of different microbatches, layer by layer by turns.
    Pair { forward: Pass, backward: Pass },
    /// Makes the gradients of weights of a backward unit that was cut in two.
    Weights(Pass),
    /// Sends the results of the units since the last such act.
    Send,
    /// Waits for what was sent and asked for since the last such act.
    Await,
}

/// The time at which stages pass on their results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passing {
    /// While others compute: what a stage receives is asked for one unit ahead.
    Ahead,
    /// Between two units.
    Between,
    /// Interleaved, without overlap: behind a forward and a backward unit, both ways at once
    /// (`send_forward_backward_recv_forward_backward` of Megatron-LM's schedules).
    Together,
}

/// A unit with its slots: of its input, of kept activations, and of its output or the first of its gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    pub unit: Unit,
    pub input: u32,
    pub kept: u32,
    pub to: u32,
    /// Whether a backward unit is cut in two: every layer's gradient then has a slot of its own, for they are wanted
    /// again.
    pub halved: bool,
    /// Slot of what the first half of a backward unit leaves for the second.
    pub left: u32,
}

impl Pass {
    /// The slot, counted from the first, that has the gradient when `layers` layers are done.
    pub fn done(&self, layers: u32) -> u32 {
        if self.halved { layers } else { layers % 2 }
    }
}

/// How a model is cut into stages, and how many microbatches pass through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    pub stages: u32,
    pub chunks: u32,
    pub microbatches: u32,
    /// Layers of each virtual stage.
    pub layers: Vec<u32>,
    pub passing: Passing,
    /// Whether forward and backward units go in pairs. Then no unit of a pair needs the other, nor another stage's of
    /// the same moment: each stage is one pair further ahead of the next, as DualPipe's are, and interleaved ones one
    /// unit.
    pub pairs: bool,
    /// Whether backward units are cut in two; in a folded pipeline, some of them.
    pub split: bool,
    /// How the row of chunks is folded in the middle, each stage having the two chunks that lie on one another, if it
    /// is.
    pub fold: Fold,
    /// The orders of all stages, where one follows from the others; made when first asked for.
    pub orders: OnceLock<Vec<Vec<Next>>>,
    pub tables: OnceLock<Tables>,
}

/// Tables that depend on the number of stages alone, and that every unit of every stage asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    /// The first layer of each virtual stage.
    firsts: Vec<u32>,
    /// Links between stages, by colour.
    links: [Group; 3],
}

/// Slots that are taken and given back; the one that was free for the longest is taken first.
#[derive(Default)]
struct Slots {
    free: VecDeque<u32>,
    count: u32,
}

impl Slots {
    fn take(&mut self) -> u32 {
        self.free.pop_front().unwrap_or_else(|| {
            self.count += 1;
            self.count - 1
        })
    }

    fn give_back(&mut self, slot: u32) {
        self.free.push_back(slot);
    }
}

/// The acts of one stage, and how many slots they need.
pub struct Flow {
    pub acts: Vec<Act>,
    pub inputs: u32,
    pub kept: u32,
    /// Slots of the gradients that layers pass on.
    pub gradients: u32,
    /// Slots of what backward units leave between their halves.
    pub left: u32,
}

impl Pipeline {
    /// The pipeline of a model. Errors: layers that cannot be spread over the stages as the options ask.
    pub fn new(model: &LlmSpec, par: &Parallelism, microbatches: u32) -> Result<Pipeline> {
        Ok(Pipeline {
            stages: par.pp,
            chunks: par.vp,
            microbatches,
            layers: feasible::layers_of_stages(model, par)?,
            passing: match par.options.no_overlap_p2p {
                true if par.vp == 1 => Passing::Between,
                // Where a forward unit goes beside a backward one only the CPU waits, so that passing stays ahead.
                true if !par.options.overlap_exchange => Passing::Together,
                _ => Passing::Ahead,
            },
            pairs: par.options.overlap_exchange,
            split: par.cuts_all() || par.cuts_some(),
            fold: par.options.fold,
            orders: OnceLock::new(),
            tables: OnceLock::new(),
        })
    }

    /// Whether units are written out one by one: there are several stages, or pairs.
    pub fn is_staged(&self) -> bool {
        self.stages > 1 || self.pairs
    }

    pub fn is_folded(&self) -> bool {
        self.fold != Fold::None
    }

    pub fn is_first(&self, stage: u32, chunk: u32) -> bool {
        stage == 0 && chunk == 0
    }

    pub fn is_last(&self, stage: u32, chunk: u32) -> bool {
        stage == self.last_stage() && chunk + 1 == self.chunks
    }

    /// The stage that has the last layers, and the head.
    pub fn last_stage(&self) -> u32 {
        if self.is_folded() { 0 } else { self.stages - 1 }
    }

    /// Slots for the gradients of a backward unit's layers: two that layers take in turns, or one for each layer where
    /// the gradients are wanted again.
    fn passes(&self) -> u32 {
        if self.split { self.layers.iter().max().map_or(0, |l| l + 1) } else { 2 }
    }

    /// The layers of the model that a chunk of a stage has.
    pub fn range(&self, stage: u32, chunk: u32) -> Range<u32> {
        let at = self.virtual_stage(stage, chunk) as usize;
        let first = self.tables().firsts[at];
        first..first + self.layers[at]
    }

    fn tables(&self) -> &Tables {
        self.tables.get_or_init(|| {
            let first = |sum: &mut u32, layers: &u32| {
                *sum += layers;
                Some(*sum - layers)
            };
            Tables {
                firsts: self.layers.iter().scan(0, first).collect(),
                links: [0, 1, 2].map(|colour| self.links_of(colour)),
            }
        })
    }

    fn virtual_stage(&self, stage: u32, chunk: u32) -> u32 {
        if self.is_folded() && chunk > 0 { 2 * self.stages - 1 - stage } else { chunk * self.stages + stage }
    }

    /// Number of the layers `of` of the model that a chunk of a stage has.
    pub fn count(&self, stage: u32, chunk: u32, of: &Layers) -> u32 {
        of.within(&self.range(stage, chunk))
    }

    /// Number of the layers `of` that a stage has in the chunks before `chunk`.
    pub fn offset(&self, stage: u32, chunk: u32, of: &Layers) -> u32 {
        (0..chunk).map(|c| self.count(stage, c, of)).sum()
    }

    /// Number of the layers `of` that a stage has.
    pub fn held(&self, stage: u32, of: &Layers) -> u32 {
        self.offset(stage, self.chunks, of)
    }

    /// The most layers `of` that a chunk has.
    pub fn longest(&self, of: &Layers) -> u32 {
        let all = (0..self.stages).flat_map(|stage| (0..self.chunks).map(move |chunk| (stage, chunk)));
        all.map(|(stage, chunk)| self.count(stage, chunk, of)).max().unwrap_or(1)
    }

    /// The stage that has a layer, and the layer's place among the layers `of` of that stage.
    pub fn home(&self, layer: u32, of: &Layers) -> (u32, u32) {
        let mut all = (0..self.chunks).flat_map(|chunk| (0..self.stages).map(move |stage| (stage, chunk)));
        let (stage, chunk) = all.find(|&(s, c)| self.range(s, c).contains(&layer)).expect("every layer is in a stage");
        let before = of.within(&(self.range(stage, chunk).start..layer));
        (stage, self.offset(stage, chunk, of) + before)
    }

    /// Number of forward units before the first backward unit.
    fn warm_up(&self, stage: u32) -> u32 {
        let after = self.stages - 1 - stage;
        let all = self.microbatches * self.chunks;
        all.min(match (self.chunks, self.pairs) {
            (1, false) => after,
            (chunks, pairs) => 2 * after + (chunks - 1) * self.stages + u32::from(pairs),
        })
    }

    /// The k-th forward or backward unit: p microbatches go through a chunk before the next p do, or the next chunk
    /// does.
    fn unit(&self, forward: bool, k: u32) -> Unit {
        if self.chunks == 1 {
            return Unit { forward, chunk: 0, microbatch: k };
        }
        let (p, v) = (self.stages, self.chunks);
        let (group, within) = (k / (p * v), k % (p * v));
        let chunk = within / p;
        let chunk = if forward { chunk } else { v - 1 - chunk };
        Unit { forward, chunk, microbatch: group * p + within % p }
    }

    /// The units of a stage in their order.
    pub fn schedule(&self, stage: u32) -> Vec<Unit> {
        let (all, warm) = (self.microbatches * self.chunks, self.warm_up(stage));
        let mut units: Vec<Unit> = (0..warm).map(|k| self.unit(true, k)).collect();
        for k in 0..all {
            units.extend((warm + k < all).then(|| self.unit(true, warm + k)));
            units.push(self.unit(false, k));
        }
        units
    }

    /// Whether the u-th unit of a stage is the first behind a [`Passing::Together`]: every unit of warm-up and
    /// cool-down is, and in between every forward unit.
    fn begins_turn(&self, stage: u32, u: usize) -> bool {
        let (all, warm) = (self.microbatches * self.chunks, self.warm_up(stage));
        let steady = (warm as usize)..(2 * all - warm) as usize;
        !steady.contains(&u) || (u - steady.start).is_multiple_of(2)
    }

    /// Whether a unit's input comes from another stage.
    pub fn receives(&self, stage: u32, unit: Unit) -> bool {
        let ends = if unit.forward { self.is_first(stage, unit.chunk) } else { self.is_last(stage, unit.chunk) };
        !ends && !self.is_handed(stage, unit)
    }

    /// The units whose inputs are asked for before the u-th runs: that unit itself and, with inputs passed ahead, the
    /// unit behind it and the next of its direction.
    fn asked_for(&self, stage: u32, units: &[Unit], u: usize) -> impl Iterator<Item = usize> + use<> {
        let after = Some(u + 1).filter(|&a| a < units.len());
        let next = (u + 1..units.len()).find(|&a| units[a].forward == units[u].forward);
        let early = match self.passing {
            Passing::Ahead => [after, next],
            Passing::Between => [None, None],
            Passing::Together => [after.filter(|&a| !self.begins_turn(stage, a)), None],
        };
        [Some(u)].into_iter().chain(early).flatten()
    }

    /// The acts of a stage: the schedule with what it asks for, one unit of each direction ahead.
    pub fn flow(&self, stage: u32) -> Flow {
        if self.is_folded() {
            return self.folded_flow(stage);
        }
        let (units, passes) = (self.schedule(stage), self.passes());
        let mut acts = vec![];
        let [mut inputs, mut kept, mut gradients, mut left] = [(); 4].map(|()| Slots::default());
        let mut put_off: VecDeque<Pass> = VecDeque::new();
        let mut held: BTreeMap<(u32, u32), (u32, u32)> = BTreeMap::new();
        let mut asked: BTreeMap<Unit, u32> = BTreeMap::new();
        let (mut turn, mut forward) = (0, None);
        // Gradients that were made and leave for the stage before.
        let mut leaving = vec![];
        for (u, &unit) in units.iter().enumerate() {
            if self.passing == Passing::Together && self.begins_turn(stage, u) {
                acts.push(Act::Send);
            }
            for ahead in self.asked_for(stage, &units, u) {
                let unit = units[ahead];
                if !asked.contains_key(&unit) && self.receives(stage, unit) {
                    let slot = if unit.forward { inputs.take() } else { passes * gradients.take() };
                    asked.insert(unit, slot);
                    acts.push(Act::Receive { unit, slot });
                }
            }
            if self.passing == Passing::Together && self.begins_turn(stage, u) {
                acts.push(Act::Await);
                leaving.drain(..).for_each(|pair| gradients.give_back(pair));
            }
            let (key, slot) = ((unit.chunk, unit.microbatch), asked.remove(&unit));
            if unit.forward {
                let (input, slot) = (slot.unwrap_or_else(|| inputs.take()), kept.take());
                held.insert(key, (input, slot));
                let pass = Pass { unit, input, kept: slot, to: turn, halved: false, left: 0 };
                turn = 1 - turn;
                if self.pairs && u as u32 >= self.warm_up(stage) {
                    forward = Some(pass);
                } else {
                    acts.push(Act::Forward(pass));
                }
            } else {
                let ((input, kept_in), gradient) = (held[&key], slot.unwrap_or_else(|| passes * gradients.take()));
                let slot = if self.split { left.take() } else { 0 };
                let backward = Pass { unit, input, kept: kept_in, to: gradient, halved: self.split, left: slot };
                acts.push(match forward.take() {
                    Some(forward) => Act::Pair { forward, backward },
                    None => Act::Backward(backward),
                });
                put_off.push_back(backward);
                // Behind the last backward unit the gradients of weights have nothing left to wait for.
                let most = if !self.split || u + 1 == units.len() { 0 } else { stage as usize };
                while put_off.len() > most {
                    let over = put_off.pop_front().expect("there are more than none");
                    if self.split {
                        acts.push(Act::Weights(over));
                        left.give_back(over.left);
                    }
                    inputs.give_back(over.input);
                    kept.give_back(over.kept);
                    match self.passing {
                        Passing::Together => leaving.push(over.to / passes),
                        _ => gradients.give_back(over.to / passes),
                    }
                }
            }
        }
        if self.passing == Passing::Together {
            acts.extend([Act::Send, Act::Await]);
        }
        let [inputs, kept, gradients, left] = [inputs, kept, gradients, left].map(|slots| slots.count);
        Flow { acts, inputs, kept, gradients: passes * gradients, left }
    }

    /// The ranks at both ends of the link from `stage` to the next, among other links that share no rank with
    /// it: every pair is a communicator of its own.
    pub fn link(&self, stage: u32) -> &Group {
        &self.tables().links[self.colour(stage) as usize]
    }

    fn colour(&self, stage: u32) -> u32 {
        if stage + 1 == self.stages && self.stages % 2 == 1 { 2 } else { stage % 2 }
    }

    fn links_of(&self, colour: u32) -> Group {
        let p = self.stages;
        let links = if self.chunks > 1 && !self.is_folded() { p } else { p - 1 };
        let sets = (0..links).filter(|&s| self.colour(s) == colour).map(|s| vec![s, (s + 1) % p]).collect();
        Group::subset(Axis::Pp, sets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipeline(stages: u32, chunks: u32, microbatches: u32) -> Pipeline {
        let layers = vec![1; (stages * chunks) as usize];
        Pipeline {
            stages,
            chunks,
            microbatches,
            layers,
            passing: Passing::Ahead,
            pairs: false,
            split: false,
            fold: Fold::None,
            orders: OnceLock::new(),
            tables: OnceLock::new(),
        }
    }

    #[test]
    fn every_unit_runs_once_and_backward_after_forward() {
        for (p, v, m) in [(1, 1, 3), (2, 1, 1), (4, 1, 8), (5, 1, 3), (2, 2, 4), (4, 3, 8), (3, 2, 3)] {
            let pipe = pipeline(p, v, m);
            for stage in 0..p {
                let units = pipe.schedule(stage);
                let mut sorted = units.clone();
                sorted.sort();
                sorted.dedup();
                assert_eq!((units.len(), sorted.len()), (2 * (v * m) as usize, 2 * (v * m) as usize));
                for (at, unit) in units.iter().enumerate().filter(|(_, u)| !u.forward) {
                    assert!(units[..at].contains(&Unit { forward: true, ..*unit }), "stage {stage}: {unit:?}");
                }
            }
        }
    }

    /// Megatron-LM, arXiv:2104.04473: at most p microbatches in flight, on the first stage; and interleaved
    /// the activations of (1 + (p-1)/(p v)) p microbatches of a whole stage.
    #[test]
    fn microbatches_in_flight() {
        for (p, m) in [(1, 1), (4, 2), (4, 16), (8, 32)] {
            let pipe = pipeline(p, 1, m);
            let kept: Vec<u32> = (0..p).map(|s| pipe.flow(s).kept).collect();
            assert_eq!(kept, (0..p).map(|s| m.min(p - s)).collect::<Vec<u32>>());
        }
        for (p, v, m) in [(4, 2, 16), (8, 3, 32)] {
            assert_eq!(pipeline(p, v, m).flow(0).kept, p * v + p - 1);
        }
    }

    /// ZB-H1, arXiv:2401.10241, section 2.1: as many microbatches in flight on every stage as 1F1B has on the first.
    #[test]
    fn gradients_of_weights_are_put_off_by_the_stage() {
        for (p, m) in [(2, 1), (4, 2), (4, 16), (8, 32)] {
            let pipe = Pipeline { split: true, ..pipeline(p, 1, m) };
            for stage in 0..p {
                let flow = pipe.flow(stage);
                assert_eq!((flow.kept, flow.left), (m.min(p), m.min(stage + 1)), "p {p} m {m} stage {stage}");
                let at = |want: &dyn Fn(&Act) -> bool| flow.acts.iter().position(want).unwrap();
                for k in 0..m {
                    let unit = Unit { forward: false, chunk: 0, microbatch: k };
                    let weights = at(&|act| matches!(act, Act::Weights(pass) if pass.unit == unit));
                    let last = Unit { microbatch: (k + stage).min(m - 1), ..unit };
                    let behind = at(&|act| matches!(act, Act::Backward(pass) if pass.unit == last));
                    assert!(weights > behind, "p {p} m {m} stage {stage} microbatch {k}");
                }
                let weights = flow.acts.iter().filter(|act| matches!(act, Act::Weights(_)));
                assert_eq!(weights.count() as u32, m);
            }
        }
    }

    /// What Megatron-LM's interleaved schedule without overlap sends behind a turn of one stage, the next stage has asked
    /// for behind its turn before: nobody waits for somebody who waits.
    #[test]
    fn together_each_turn_meets_the_next_stages_turn_before() {
        for (p, v, m) in [(2, 2, 2), (4, 2, 8), (4, 3, 4), (8, 6, 64)] {
            let pipe = Pipeline { passing: Passing::Together, ..pipeline(p, v, m) };
            // Of each stage, in which of its waits a unit's input comes, and in which its result leaves.
            let of = |stage: u32| {
                let (mut come, mut gone, mut wait) = (BTreeMap::new(), BTreeMap::new(), 0);
                let mut made = vec![];
                for act in pipe.flow(stage).acts {
                    match act {
                        Act::Receive { unit, .. } => come.extend([(unit, wait)]),
                        Act::Send => gone.extend(made.drain(..).map(|unit| (unit, wait))),
                        Act::Await => wait += 1,
                        Act::Forward(pass) | Act::Backward(pass) => {
                            assert!(come.get(&pass.unit).is_none_or(|asked| *asked < wait));
                            made.push(pass.unit);
                        }
                        _ => unreachable!("neither pairs nor halves"),
                    }
                }
                assert!(made.is_empty(), "all is sent in the end");
                (come, gone)
            };
            let steady = p * (v + 1) < m * v;
            for stage in (0..p - 1).filter(|_| steady) {
                let (here, there) = (of(stage), of(stage + 1));
                there.0.iter().filter(|(unit, _)| unit.forward).for_each(|(unit, at)| assert_eq!(here.1[unit], at + 1));
                here.0
                    .iter()
                    .filter(|(unit, _)| !unit.forward)
                    .for_each(|(unit, at)| assert_eq!(there.1[unit], at - 1));
            }
        }
    }

    #[test]
    fn the_links_of_a_group_share_no_stage() {
        for (p, v) in [(2, 1), (2, 2), (3, 1), (3, 2), (7, 2), (8, 2), (38, 1)] {
            let pipe = pipeline(p, v, p);
            let views = [crate::plan::Mesh::new(&[(Axis::Pp, p)])];
            for stage in 0..if v > 1 { p } else { p - 1 } {
                let link = pipe.link(stage);
                assert_eq!(link.fault(&views), None, "p {p} v {v}");
                assert_eq!(link.neighbour(&views, stage, 1), (stage + 1) % p);
            }
        }
    }
}
