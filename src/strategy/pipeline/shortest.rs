//! The least that a pipeline takes: its units in the order that its stages have them, each as long as it is by itself, and
//! no time between stages.
//!
//! No step of these units is shorter, whatever travels: an end is a maximum of ends plus a length, and what is left out
//! only makes ends later. So it bounds a way before its plan is built.

use super::{Act, Pass, Pipeline};

/// The least time that units take, s.
#[derive(Debug, Clone, Copy)]
pub struct UnitTimes {
    /// A layer forward; and backward, with what is computed again.
    pub forward: f64,
    pub backward: f64,
    /// The part of the backward time that is for gradients of weights, where these are cut off.
    pub weights: f64,
    /// The time of a backward unit, at most, before it needs the gradient of its output: a layer, computed again.
    pub again: f64,
    /// The output matrix, forward and backward.
    pub head: [f64; 2],
}

/// The units of all stages, each behind those that it waits for.
pub struct Shortest {
    turns: Vec<Turn>,
    /// Layers of each virtual stage.
    layers: Vec<u32>,
    /// The stage that has each virtual stage.
    stage_of: Vec<usize>,
    stages: usize,
    microbatches: usize,
    /// Microbatches that are not gone through: each adds the work of the stage that has most.
    more: u32,
}

/// Microbatches for each stage that are gone through, at most: by then a pipeline is filled, and every further one adds
/// the same.
const MOST: u32 = 2;

struct Turn {
    stage: u32,
    work: Work,
}

#[derive(Clone, Copy)]
enum Work {
    Forward(At),
    Backward {
        at: At,
        halved: bool,
    },
    /// A forward and a backward unit at once, layer by layer.
    Pair {
        forward: At,
        backward: At,
    },
    Weights(At),
}

/// A microbatch in a virtual stage.
#[derive(Clone, Copy)]
struct At {
    part: usize,
    microbatch: usize,
}

impl Shortest {
    pub fn of(pipe: Pipeline) -> Shortest {
        let most = MOST * pipe.stages;
        let more = pipe.microbatches.saturating_sub(most);
        let pipe = &Pipeline { microbatches: pipe.microbatches - more, ..pipe };
        let mut left: Vec<Vec<Work>> = (0..pipe.stages).map(|stage| works(pipe, stage)).collect();
        left.iter_mut().for_each(|works| works.reverse());
        let (parts, microbatches) = (pipe.layers.len(), pipe.microbatches as usize);
        let mut stage_of = vec![0; parts];
        for (stage, chunk) in (0..pipe.stages).flat_map(|stage| (0..pipe.chunks).map(move |chunk| (stage, chunk))) {
            stage_of[pipe.virtual_stage(stage, chunk) as usize] = stage as usize;
        }
        let (turns, layers, stages) = (vec![], pipe.layers.clone(), left.len());
        let mut all = Shortest { turns, layers, stage_of, stages, microbatches, more };
        // Whether each microbatch has gone forward, and backward, through each part.
        let mut done = [vec![false; parts * microbatches], vec![false; parts * microbatches]];
        loop {
            let before = all.turns.len();
            for (stage, works) in left.iter_mut().enumerate() {
                while let Some(&work) = works.last().filter(|work| all.may_run(work, &done)) {
                    all.ends(&work, |forward, cell| done[usize::from(!forward)][cell] = true);
                    all.turns.push(Turn { stage: stage as u32, work });
                    works.pop();
                }
            }
            if all.turns.len() == before {
                break;
            }
        }
        assert!(left.iter().all(Vec::is_empty), "a pipeline of {} stages does not come to its end", all.stages);
        all
    }

    fn cell(&self, at: At) -> usize {
        at.part * self.microbatches + at.microbatch
    }

    /// The cell of the unit that a forward or a backward unit waits for on another stage; `None` if it waits for none.
    fn before(&self, forward: bool, at: At) -> Option<usize> {
        let part = if forward { at.part.checked_sub(1) } else { Some(at.part + 1).filter(|p| *p < self.layers.len()) };
        part.map(|part| self.cell(At { part, ..at }))
    }

    fn may_run(&self, work: &Work, done: &[Vec<bool>; 2]) -> bool {
        let may = |forward: bool, at: At| self.before(forward, at).is_none_or(|cell| done[usize::from(!forward)][cell]);
        match *work {
            Work::Forward(at) => may(true, at),
            Work::Backward { at, .. } => may(false, at),
            Work::Pair { forward, backward } => may(true, forward) && may(false, backward),
            Work::Weights(_) => true,
        }
    }

    fn ends(&self, work: &Work, mut each: impl FnMut(bool, usize)) {
        match *work {
            Work::Forward(at) => each(true, self.cell(at)),
            Work::Backward { at, .. } => each(false, self.cell(at)),
            Work::Pair { forward, backward } => {
                each(true, self.cell(forward));
                each(false, self.cell(backward));
            }
            Work::Weights(_) => {}
        }
    }

    /// When the last stage is done, s.
    pub fn seconds(&self, times: &UnitTimes) -> f64 {
        let layers = |at: At| f64::from(self.layers[at.part]);
        let head = |at: At, n: usize| if at.part + 1 == self.layers.len() { times.head[n] } else { 0.0 };
        let forward = |at: At| layers(at) * times.forward + head(at, 0);
        let backward = |at: At| layers(at) * times.backward + head(at, 1);
        let cells = self.layers.len() * self.microbatches;
        let (mut free, mut done) = (vec![0.0f64; self.stages], [vec![0.0f64; cells], vec![0.0f64; cells]]);
        for Turn { stage, work } in &self.turns {
            let free = &mut free[*stage as usize];
            let came =
                |forward: bool, at: At| self.before(forward, at).map_or(0.0, |cell| done[usize::from(!forward)][cell]);
            match *work {
                Work::Forward(at) => {
                    *free = free.max(came(true, at)) + forward(at);
                    done[0][self.cell(at)] = *free;
                }
                Work::Backward { at, halved } => {
                    let long = backward(at) - if halved { layers(at) * times.weights } else { 0.0 };
                    *free = free.max(came(false, at) - times.again.min(long)) + long;
                    done[1][self.cell(at)] = *free;
                }
                Work::Pair { forward: up, backward: down } => {
                    let (f, b) = (forward(up), backward(down));
                    let start = free.max(came(true, up)).max(came(false, down) - times.again.min(b));
                    // The direction with fewer layers is done before the other.
                    let beside = |own: At, other: At| ((layers(own) - 1.0) / layers(other)).clamp(0.0, 1.0);
                    // Beside the last microbatch's sums of gradients the two go one behind the other.
                    let apart = down.microbatch + 1 == self.microbatches || layers(up) * layers(down) == 0.0;
                    let [up_beside, down_beside] = if apart { [0.0; 2] } else { [beside(up, down), beside(down, up)] };
                    done[0][self.cell(up)] = start + f + b * up_beside;
                    done[1][self.cell(down)] = start + b + f * down_beside;
                    *free = start + f + b;
                }
                Work::Weights(at) => *free += layers(at) * times.weights,
            }
        }
        let mut work = vec![0.0; self.stages];
        for (part, &stage) in self.stage_of.iter().enumerate() {
            let at = At { part, microbatch: 0 };
            work[stage] += forward(at) + backward(at);
        }
        let most = |all: Vec<f64>| all.into_iter().fold(0.0, f64::max);
        most(free) + f64::from(self.more) * most(work)
    }
}

/// The work of a stage in its order, without messages.
fn works(pipe: &Pipeline, stage: u32) -> Vec<Work> {
    let at = |pass: Pass| At {
        part: pipe.virtual_stage(stage, pass.unit.chunk) as usize,
        microbatch: pass.unit.microbatch as usize,
    };
    let work = |act: &Act| match *act {
        Act::Forward(pass) => Some(Work::Forward(at(pass))),
        Act::Backward(pass) => Some(Work::Backward { at: at(pass), halved: pass.halved }),
        Act::Pair { forward, backward } => Some(Work::Pair { forward: at(forward), backward: at(backward) }),
        Act::Weights(pass) => Some(Work::Weights(at(pass))),
        Act::Receive { .. } | Act::Send | Act::Await => None,
    };
    pipe.flow(stage).acts.iter().filter_map(work).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{LlmSpec, Parallelism};

    /// So many stages with `vp` chunks of two layers, `m` microbatches: the step, in forward passes of a layer, a backward one
    /// being two, of which the gradients of weights are one.
    fn seconds(pp: u32, vp: u32, m: u32, words: &str) -> f64 {
        let layers = 2 * u64::from(pp * vp);
        let model = LlmSpec { layers, ..LlmSpec::find("llama-3-8b").unwrap() };
        let par = Parallelism { pp, vp, options: words.parse().unwrap(), ..Parallelism::default() };
        let pipe = Pipeline::new(&model, &par, m).unwrap();
        let times = UnitTimes { forward: 1.0, backward: 2.0, weights: 1.0, again: 0.0, head: [0.0; 2] };
        Shortest::of(pipe).seconds(&times)
    }

    /// m (F + B) of a stage, and the bubbles of Narayanan et al. (arXiv:2104.04473, section 2.2), Qi et al. (arXiv:2401.10241,
    /// table 1) and DualPipe's README.
    #[test]
    fn bubbles_are_those_of_the_papers() {
        for (pp, m) in [(2, 4), (2, 8), (4, 8), (4, 16), (4, 40), (8, 24), (8, 64)] {
            let (p, n) = (f64::from(pp), f64::from(m));
            // F + B of a stage of two layers.
            assert_eq!(seconds(pp, 1, m, "default"), (n + p - 1.0) * 6.0);
            for vp in [2, 4] {
                let stage = 6.0 * f64::from(vp);
                assert_eq!(
                    seconds(pp, vp, m, "default"),
                    n * stage + (p - 1.0) * stage / f64::from(vp),
                    "{pp} {vp} {m}"
                );
            }
            assert_eq!(seconds(pp, 1, m, "zb-h1"), n * 6.0 + (p - 1.0) * (2.0 + 4.0 - 2.0 * 2.0), "{pp} {m}");
            // F, B and W of a chunk. There a forward unit beside a backward one is done no sooner than that is.
            let (f, b, w) = (2.0, 4.0, 2.0);
            let readme = n * 2.0 * (f + b) + (p - 1.0) * (f + b + b - 3.0 * w);
            for words in ["dualpipe-v", "dualpipe-v+overlap-exchange"] {
                let over = seconds(pp, 2, m, words) / readme;
                assert!((0.93..=1.0).contains(&over), "{pp} {m} {words}: {over}");
            }
        }
    }

    #[test]
    fn what_waits_for_no_gradient_fills_bubbles() {
        let model = LlmSpec { layers: 16, ..LlmSpec::find("llama-3-8b").unwrap() };
        let pipe = Pipeline::new(&model, &Parallelism { pp: 4, ..Parallelism::default() }, 8).unwrap();
        let shortest = Shortest::of(pipe);
        let times = UnitTimes { forward: 1.0, backward: 3.0, weights: 0.0, again: 0.0, head: [0.5, 1.0] };
        let whole = shortest.seconds(&times);
        // The last stage has the head, and waits for the others' first pass and they for its last.
        assert_eq!(whole, 8.0 * (16.0 + 1.5) + 3.0 * 16.0);
        let less = shortest.seconds(&UnitTimes { again: 1.0, ..times });
        assert!(less < whole && less >= whole - 3.0, "{less} {whole}");
    }
}
