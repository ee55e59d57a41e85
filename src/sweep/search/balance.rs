//! Stages of unequal depth: embedding, head and the modules behind it weigh as much as several layers, and layers are divided
//! so that all stages of a pipeline have as much to do.
//!
//! What is to be done is read off the timeline of a way that was costed: how long each stage is busy, of which layers have parts
//! by their FLOPs, and the first and the last virtual stage what is left. Divisions are candidates as words are: the whole plan
//! says whether they fit, and are faster.

use crate::error::Result;
use crate::plan::{Axis, Plan};
use crate::spec::{Fold, LlmSpec, Options};
use crate::strategy::pipeline::Pipeline;
use crate::sweep::{Case, Point};
use crate::timeline::{Timeline, Usage};
use std::ops::Range;

/// A sum of such powers hangs on the longest alone, and of equally long ones on how even the others are.
const POWER: i32 = 16;
/// What is less by a smaller part is as much.
const SAME: f64 = 1e-9;

/// The way with divisions of its layers whose longest stage is shorter; none where that gains nothing.
pub fn divisions(case: &Case, point: &Point) -> Result<Vec<Point>> {
    let par = point.par;
    if par.pp == 1 {
        return Ok(vec![]);
    }
    let now = Pipeline::new(&case.model, &par, 1)?.layers;
    let plan = case.plan(point)?;
    let busy = busy(&plan, &case.cost(&plan)?, par.pp);
    let work = Work::of(&busy, &now, &flops(&case.model, point.seq_len), par.options.fold != Fold::None);
    // Folded pipelines, and units that go in pairs, have a layer in every chunk.
    let least = usize::from(work.folded || par.options.overlap_exchange);
    let mut all: Vec<Vec<u32>> = work.divided(&now, least);
    all.retain(|layers| work.longest(layers) < (1.0 - SAME) * work.longest(&now));
    Ok(all.iter().filter_map(|layers| with_stages(point, layers)).collect())
}

/// The way with so many layers on each virtual stage; `None` if they go up and down too often to be written out.
fn with_stages(point: &Point, layers: &[u32]) -> Option<Point> {
    let written: Vec<String> = layers.iter().map(u32::to_string).collect();
    let stages = written.join(".").parse().ok()?;
    let said = Options { short_ends: false, uneven: false, first_stage: None, last_stage: None, ..point.par.options };
    let mut with = *point;
    with.par.options = Options { stages, ..said };
    Some(with)
}

/// What each stage does in a step, s: all but waiting for other stages and replicas.
fn busy(plan: &Plan, timeline: &Timeline, stages: u32) -> Vec<f64> {
    let does = |usage: &Usage| {
        let within = [Axis::Tp, Axis::Up, Axis::Cp, Axis::Ep].iter().filter_map(|axis| usage.exposed.get(axis));
        usage.compute + usage.offload + usage.host + within.sum::<f64>()
    };
    let mut all = vec![0.0f64; stages as usize];
    for class in &timeline.classes {
        let stage = &mut all[plan.views[0].coord(class.rank, Axis::Pp) as usize];
        *stage = stage.max(does(&class.usage));
    }
    all
}

/// FLOPs of a token in each layer.
fn flops(model: &LlmSpec, seq_len: u64) -> Vec<f64> {
    let model = LlmSpec { mtp: None, ..model.clone() };
    let head = 6.0 * (model.vocab * model.hidden) as f64;
    let first = |n: u64| if n == 0 { head } else { model.shortened(n).flops_per_token(seq_len) };
    (0..model.layers).map(|n| first(n + 1) - first(n)).collect()
}

/// What the stages of a pipeline do in a step, s.
struct Work {
    stages: usize,
    folded: bool,
    /// Of the layers before each, and of all of them.
    before: Vec<f64>,
    /// What the first and the last virtual stage do beside their layers.
    ends: [f64; 2],
}

impl Work {
    /// `busy`: of each stage; `now`: layers of each virtual stage; `flops`: of each layer.
    fn of(busy: &[f64], now: &[u32], flops: &[f64], folded: bool) -> Work {
        let sum = |before: f64, flops: &f64| before + flops;
        let before: Vec<f64> = (0..=flops.len()).map(|n| flops[..n].iter().fold(0.0, sum)).collect();
        let plain = Work { stages: busy.len(), folded, before, ends: [0.0; 2] };
        let layers = plain.of_stages(&plain.of_parts(now));
        let last = plain.stage_of(now.len() - 1);
        // What stages between the ends take has neither embedding nor head; where there are none, an embedding is little.
        let between: Vec<usize> = (0..busy.len()).filter(|stage| ![0, last].contains(stage)).collect();
        let told = if between.is_empty() { vec![0] } else { between };
        let of = |all: &[f64]| told.iter().map(|stage| all[*stage]).sum::<f64>();
        let each = of(busy) / of(&layers).max(f64::MIN_POSITIVE);
        let left = |stage: usize| busy[stage] - each * layers[stage];
        let ends = if last == 0 { [0.0, left(0)] } else { [left(0), left(last)] };
        Work { before: plain.before.iter().map(|flops| each * flops).collect(), ends, ..plain }
    }

    fn stage_of(&self, part: usize) -> usize {
        if self.folded && part >= self.stages { 2 * self.stages - 1 - part } else { part % self.stages }
    }

    /// What a virtual stage of so many does that has these layers.
    fn part(&self, at: usize, parts: usize, layers: Range<usize>) -> f64 {
        let [first, last] = self.ends;
        let ends = if at == 0 { first } else { 0.0 } + if at + 1 == parts { last } else { 0.0 };
        (self.before[layers.end] - self.before[layers.start] + ends).max(0.0)
    }

    /// What virtual stages with so many layers do.
    fn of_parts(&self, layers: &[u32]) -> Vec<f64> {
        let ends = layers.iter().scan(0, |sum, n| {
            *sum += *n as usize;
            Some(*sum)
        });
        let part = |(at, (n, end)): (usize, (&u32, usize))| self.part(at, layers.len(), end - *n as usize..end);
        layers.iter().zip(ends).enumerate().map(part).collect()
    }

    fn of_stages(&self, parts: &[f64]) -> Vec<f64> {
        let mut all = vec![0.0; self.stages];
        parts.iter().enumerate().for_each(|(part, s)| all[self.stage_of(part)] += s);
        all
    }

    /// The longest stage, s.
    fn longest(&self, layers: &[u32]) -> f64 {
        self.of_stages(&self.of_parts(layers)).into_iter().fold(0.0, f64::max)
    }

    /// Divisions of which one is best: virtual stages as even as can be, also if the first, which has most microbatches under
    /// way, gets no longer than it is `now`; and where a stage has several, stages, and the longest of each round of chunks.
    fn divided(&self, now: &[u32], least: usize) -> Vec<Vec<u32>> {
        let parts = now.len();
        let mut all: Vec<Vec<u32>> =
            [u32::MAX, now[0]].iter().filter_map(|most| self.even(parts, least, *most as usize)).collect();
        if let Some(even) = all.first().cloned().filter(|_| parts > self.stages) {
            let mean = (self.before.last().unwrap_or(&0.0) + self.ends[0] + self.ends[1]) / parts as f64;
            let power = |s: &f64| (s / mean).powi(POWER);
            let stages = |parts: &[f64]| self.of_stages(parts).iter().map(power).sum::<f64>();
            let longest = |round: &[f64]| round.iter().map(power).sum::<f64>().powf(1.0 / f64::from(POWER));
            let rounds = |parts: &[f64]| parts.chunks(self.stages).map(longest).sum::<f64>();
            all.push(self.shifted(&even, least, &stages));
            all.push(self.shifted(&even, least, &rounds));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The division over so many virtual stages with the least sum of powers, each having `least` layers or more and the first
    /// no more than `most`: part after part, of all numbers of layers that it and those before it may have.
    fn even(&self, parts: usize, least: usize, most: usize) -> Option<Vec<u32>> {
        let layers = self.before.len() - 1;
        let mean = (self.before[layers] + self.ends[0] + self.ends[1]) / parts as f64;
        let mut sums: Vec<f64> = (0..=layers).map(|n| if n == 0 { 0.0 } else { f64::INFINITY }).collect();
        let mut begins: Vec<Vec<usize>> = vec![];
        for at in 0..parts {
            let best = |end: usize| {
                let mut best = (f64::INFINITY, 0);
                for begin in (0..=layers).take_while(|begin| begin + least <= end) {
                    let power = (self.part(at, parts, begin..end) / mean).powi(POWER);
                    let sum = if at == 0 && end > most { f64::INFINITY } else { sums[begin] + power };
                    // Of equals those with fewer layers in front, where more microbatches are under way.
                    if sum < (1.0 - SAME) * best.0 {
                        best = (sum, begin);
                    }
                }
                best
            };
            let (next, begin): (Vec<f64>, Vec<usize>) = (0..=layers).map(best).unzip();
            sums = next;
            begins.push(begin);
        }
        let mut end = layers;
        let mut all: Vec<u32> = vec![];
        for begin in begins.iter().rev() {
            all.push((end - begin[end]) as u32);
            end = begin[end];
        }
        all.reverse();
        sums[layers].is_finite().then_some(all)
    }

    /// The division with layers handed from one virtual stage to another, one at a time, as long as a sum of their times falls.
    fn shifted(&self, division: &[u32], least: usize, sum: &dyn Fn(&[f64]) -> f64) -> Vec<u32> {
        let mut layers = division.to_vec();
        let mut now = sum(&self.of_parts(&layers));
        loop {
            let mut best: Option<(f64, usize, usize)> = None;
            for from in (0..layers.len()).filter(|from| division.len() > 1 && layers[*from] as usize > least) {
                for to in (0..layers.len()).filter(|to| *to != from) {
                    let mut with = layers.clone();
                    (with[from], with[to]) = (with[from] - 1, with[to] + 1);
                    let less = sum(&self.of_parts(&with));
                    if less < (1.0 - SAME) * best.map_or(now, |best| best.0) {
                        best = Some((less, from, to));
                    }
                }
            }
            let Some((less, from, to)) = best else { return layers };
            (layers[from], layers[to], now) = (layers[from] - 1, layers[to] + 1, less);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{dense, found};
    use super::super::{Played, Question, Space, step};
    use super::*;
    use crate::spec::{Parallelism, Recompute, Schedule};

    /// Every division of so many layers.
    fn all(layers: u32, parts: usize) -> Vec<Vec<u32>> {
        if parts == 1 {
            return vec![vec![layers]];
        }
        let first = |n: u32| all(layers - n, parts - 1).into_iter().map(move |rest| [vec![n], rest].concat());
        (0..=layers).flat_map(first).collect()
    }

    fn of_layers(layers: &[f64], stages: usize, folded: bool, ends: [f64; 2]) -> Work {
        let before = (0..=layers.len()).map(|n| layers[..n].iter().sum()).collect();
        Work { stages, folded, before, ends }
    }

    #[test]
    fn no_division_has_a_shorter_longest_stage() {
        let turns: Vec<f64> = (0..11).map(|l| if l % 3 == 0 { 3.0 } else { 1.0 }).collect();
        for (layers, parts, stages, folded, ends) in [
            (vec![1.0; 12], 4, 4, false, [0.25, 3.0]),
            (vec![1.0; 12], 3, 3, false, [0.0, 9.0]),
            (turns.clone(), 4, 4, false, [0.5, 2.5]),
            (turns, 4, 2, true, [0.0, 2.0]),
            (vec![1.0; 12], 6, 3, true, [0.0, 2.5]),
            (vec![1.0; 12], 4, 2, false, [0.5, 2.5]),
        ] {
            let work = of_layers(&layers, stages, folded, ends);
            let divided = work.divided(&all(layers.len() as u32, parts)[0], 0);
            let least = |all: &[Vec<u32>]| all.iter().map(|n| work.longest(n)).fold(f64::INFINITY, f64::min);
            assert_eq!(least(&divided), least(&all(layers.len() as u32, parts)), "{divided:?}");
            assert!(divided.iter().all(|n| n.iter().sum::<u32>() as usize == layers.len() && n.len() == parts));
        }
    }

    /// 48 layers, and five more behind the last: of the eight chunks of a folded pipeline the last has least.
    #[test]
    fn what_stands_behind_the_last_layer_counts_as_layers() {
        let (now, flops) = ([6; 8], [1.0; 48]);
        let work = Work::of(&[17.0, 12.0, 12.0, 12.0], &now, &flops, true);
        assert_eq!(work.ends, [0.0, 5.0]);
        assert_eq!((work.longest(&now), work.longest(&[7, 7, 6, 6, 6, 7, 7, 2])), (17.0, 14.0));
        let divided = work.divided(&now, 1);
        assert!(divided.iter().all(|n| work.longest(n) == 14.0 && n[7] == 2), "{divided:?}");
        // With the first chunk no longer than it is.
        assert!(divided.iter().any(|n| n[0] == 6), "{divided:?}");
        // The ends of one that is not folded are on stages of their own; of two stages the first tells.
        assert_eq!(Work::of(&[6.5, 6.0, 6.0, 11.0], &[6; 4], &[1.0; 24], false).ends, [0.5, 5.0]);
        assert_eq!(Work::of(&[6.0, 9.0], &[3; 2], &[2.0; 6], false).ends, [0.0, 3.0]);
    }

    fn question() -> Question {
        let space = Space {
            tp: vec![1],
            pp: vec![4],
            ulysses: vec![1],
            ring: vec![1],
            zero: vec![1],
            recompute: vec![Recompute::Full],
            schedules: vec![Schedule::OneF1B, Schedule::Interleaved, Schedule::DualpipeV],
            ..dense().space
        };
        Question { space, best: 3, gpus: 8, ..dense() }
    }

    /// The output matrix of Llama 3 8B has the weights of two and a half layers.
    #[test]
    fn a_search_divides_layers_so_that_the_head_counts() {
        let got = found(&question(), None);
        assert_eq!(got.best.len(), 3);
        for plain in &got.best {
            let of = |row: &&Played| (row.vp, row.options.contains("dualpipe"));
            let refined = got.refined.iter().find(|row| of(row) == of(&plain)).expect("each is made faster");
            assert!(refined.options.contains("stages-"), "{}", refined.options);
            assert!(step(refined) < 0.97 * step(plain), "{} {}", refined.options, step(refined) / step(plain));
        }
    }

    /// Whoever says how many layers a stage has wants them.
    #[test]
    fn stages_that_are_said_are_left_alone() {
        let options = vec!["first-stage-5".parse().unwrap(), "stages-9.8.8.7".parse().unwrap()];
        let space = Space { options, schedules: vec![Schedule::OneF1B], ..question().space };
        let got = found(&Question { space, ..question() }, None);
        assert!(!got.best.is_empty());
        let said = |row: &Played| ["first-stage-5", "stages-9.8x2.7"].iter().any(|w| row.options.contains(w));
        assert!(got.best.iter().chain(&got.refined).all(said), "{:?}", got.refined);
    }

    #[test]
    fn even_stages_with_a_small_head_stay() {
        let case = question().case().unwrap();
        let case = case.with_model(LlmSpec { vocab: 1024, ..case.model.clone() });
        let par = Parallelism { dp: 2, pp: 4, zero: 1, recompute: Recompute::Full, ..Parallelism::default() };
        let point = Point { seq_len: 8192, global_batch: 64, micro_batch: 1, par };
        assert_eq!(divisions(&case, &point).unwrap(), []);
        assert_eq!(divisions(&case, &Point { par: Parallelism { dp: 8, pp: 1, ..par }, ..point }).unwrap(), []);
    }
}
