//! What a sweep was asked for: the contents of study.json.

use super::asked::{Asked, above_zero, least, trained};
use super::frames::Frames;
use super::{Case, Point};
use crate::error::{Cause, Error, Reason, Result};
use crate::report::Row;
use crate::spec::{Documents, Dtype, LlmSpec, Options, Parallelism, Recompute};
use serde::Serialize;

/// Lists are crossed with each other; `ways` are pairs [ulysses, ring], and dp is what is left of the GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Grid {
    /// Above the picture.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub gpus: u32,
    pub dtype: Dtype,
    pub seq_len: Vec<u64>,
    pub batch: Batch,
    pub micro_batch: Vec<u64>,
    pub ways: Vec<[u32; 2]>,
    pub tp: Vec<u32>,
    pub pp: Vec<u32>,
    pub vp: Vec<u32>,
    pub ep: Vec<u32>,
    pub zero: Vec<u32>,
    pub recompute: Vec<Recompute>,
    pub options: Vec<Options>,
    /// How tokens choose experts, in the words of `--routing`; none: evenly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing: Option<String>,
    /// Packed into every sequence, again and again until it is full. None: a sequence is one document.
    #[serde(skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
    /// Trained without the model's modules of multi-token prediction.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_mtp: bool,
    /// Ways beside those of the lists.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Also>,
}

/// A way with degrees and options of its own; crossed with `seq_len`, `batch`, `micro_batch`, `vp`, `ep`, `zero` and `recompute`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Also {
    pub ulysses: u32,
    pub ring: u32,
    pub tp: u32,
    pub pp: u32,
    pub options: Options,
}

/// How many sequences a step has.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Batch {
    /// As many as make so many tokens.
    TokensPerStep(u64),
    GlobalBatch(Vec<u64>),
}

/// Ranks that share a sequence in the default study.
const DEGREES: [u32; 6] = [2, 4, 8, 16, 32, 64];

/// More points than anyone would wait for.
const MOST_POINTS: usize = 1_000_000;

impl Grid {
    /// No split, rings, Ulysses and all hybrids of both, each over the same numbers of ranks, as far as they fit into
    /// `gpus`: families are compared by their best, and none is to lose for want of a degree.
    pub fn default_ways(gpus: u32) -> Vec<[u32; 2]> {
        let degrees = || DEGREES.into_iter().filter(|&n| n <= gpus);
        let rings = degrees().map(|ring| [1, ring]);
        let ulysses = degrees().map(|ulysses| [ulysses, 1]);
        let hybrids = degrees().flat_map(|u| degrees().map(move |r| [u, r]));
        let all = [[1, 1]].into_iter().chain(rings).chain(ulysses).chain(hybrids);
        all.filter(|[u, r]| u * r <= gpus.min(DEGREES[DEGREES.len() - 1])).collect()
    }

    /// KV gathered instead of a ring, and tensor parallelism, over the same numbers of ranks; variants of rings and of
    /// hybrids. As far as they fit into `gpus`. Every way with attention computed once, too, lest some families have that
    /// and others do not.
    pub fn default_also(gpus: u32) -> Vec<Also> {
        let of = |[ulysses, ring, tp]: [u32; 3], words: &str| {
            let options = words.parse().expect("words of the table of options");
            Also { ulysses, ring, tp, pp: 1, options }
        };
        let crossed = |words: &[&'static str], rings: &[u32]| -> Vec<([u32; 3], &'static str)> {
            words.iter().flat_map(|&word| rings.iter().map(move |&ring| ([1, ring, 1], word))).collect()
        };
        let rings = crossed(&["stripe", "dkv-model", "burst", "merge-in-kernel", "dkv-model+merge-at-end"], &[8, 16]);
        let double = crossed(&["double-ring-8"], &[16]);
        let gathered = crossed(&["gather-kv", "gather-kv-prefetch"], &DEGREES);
        let hybrids = [[2, 8, 1], [4, 8, 1], [8, 8, 1]].map(|split| (split, "ring-inside"));
        let tensor = [[1, 1, 2], [1, 1, 4], [1, 1, 8], [1, 2, 8], [1, 4, 8], [1, 8, 8], [2, 1, 4], [4, 1, 2]];
        let tensor = tensor.map(|split| (split, ""));
        let changed: Vec<([u32; 3], &str)> =
            rings.into_iter().chain(double).chain(gathered).chain(hybrids).chain(tensor).collect();
        let plain = Grid::default_ways(gpus).into_iter().map(|[ulysses, ring]| ([ulysses, ring, 1], ""));
        // A ring whose dK and dV go round in the model's type has no backward pass of attention of its own.
        let keeps = |words: &str| !words.contains("dkv-model");
        let kept = plain.chain(changed.iter().copied()).filter(|(_, words)| keeps(words));
        let kept = kept.map(|(split, words)| match words {
            "" => of(split, "keep-attention"),
            words => of(split, &format!("{words}+keep-attention")),
        });
        let changed = changed.iter().map(|&(split, words)| of(split, if words.is_empty() { "default" } else { words }));
        changed.chain(kept).filter(|also| also.ranks() <= gpus).collect()
    }

    /// 8 K to 1 M.
    pub fn default_seq_len() -> Vec<u64> {
        (13..=20).map(|log| 1 << log).collect()
    }

    /// The model that is trained.
    pub fn spec(&self) -> Result<LlmSpec> {
        trained(&self.model, self.no_mtp)
    }

    pub fn case(&self) -> Result<Case> {
        let Grid { cluster, stack, gpus, dtype, documents, routing, .. } = self;
        let (model, routing) = (self.spec()?, routing.as_deref());
        Asked { model, cluster, stack, gpus: *gpus, dtype: *dtype, documents, routing }.case()
    }

    /// Every point once, in the order of rows.csv.
    pub fn points(&self) -> Result<Vec<Point>> {
        self.check()?;
        let mut points = Vec::new();
        for &seq_len in &self.seq_len {
            for global_batch in self.batch.of(seq_len) {
                self.add_points(seq_len, global_batch, &mut points);
                self.also.iter().for_each(|way| way.points(self, seq_len, global_batch, &mut points));
            }
        }
        points.sort_unstable();
        points.dedup();
        Ok(points)
    }

    /// The row of one of the points.
    pub fn row(&self, case: &Case, point: &Point) -> Result<Row> {
        self.row_among(&mut Frames::new(case), case, point)
    }

    /// The row of one of several points of a way.
    pub fn row_among(&self, frames: &mut Frames, case: &Case, point: &Point) -> Result<Row> {
        match self.batch {
            Batch::TokensPerStep(tokens) if !tokens.is_multiple_of(point.seq_len) => {
                let seq_len = point.seq_len;
                let near = tokens.div_ceil(seq_len) * seq_len;
                let why =
                    format!("{tokens} tokens a step are no whole number of sequences of {seq_len}; e.g. {near} are");
                Ok(case.infeasible(point, Reason::new(Cause::Batch, why)))
            }
            _ => frames.row(point),
        }
    }

    fn add_points(&self, seq_len: u64, global_batch: u64, points: &mut Vec<Point>) {
        for (&[ulysses, ring], &micro_batch) in cross(&self.ways, &self.micro_batch) {
            for (&tp, &pp) in cross(&self.tp, &self.pp) {
                for (&vp, &ep) in cross(&self.vp, &self.ep) {
                    let split = [ulysses, ring, tp, pp].iter().fold(1u32, |n, &d| n.saturating_mul(d));
                    let dp = (self.gpus / split.max(1)).max(1);
                    let rest =
                        cross(&self.zero, &self.recompute).flat_map(|how| self.options.iter().map(move |o| (how, o)));
                    points.extend(rest.map(|((&zero, &recompute), &options)| {
                        let par = Parallelism { dp, pp, vp, ring, ulysses, tp, ep, zero, recompute, options };
                        Point { seq_len, global_batch, micro_batch, par }
                    }));
                }
            }
        }
    }

    /// Points of the lists and of what stands beside them, those that are the same more than once.
    fn count(&self) -> f64 {
        let work = [self.seq_len.len(), self.batch.len(), self.micro_batch.len()];
        let how = [self.vp.len(), self.ep.len(), self.zero.len(), self.recompute.len()];
        let each: f64 = work.iter().chain(&how).map(|&n| n as f64).product();
        let ways = [self.ways.len(), self.tp.len(), self.pp.len(), self.options.len()];
        each * (ways.map(|n| n as f64).iter().product::<f64>() + self.also.len() as f64)
    }

    fn check(&self) -> Result<()> {
        let wrong = |field: &str, why: &str| Err(Error::spec("sweep", field, why));
        let smallest = [
            ("seq_len", least(&self.seq_len)),
            ("micro_batch", least(&self.micro_batch)),
            ("ulysses and ring", least(self.ways.as_flattened())),
            ("batch", self.batch.smallest()),
            ("tp", least(&self.tp)),
            ("pp", least(&self.pp)),
            ("vp", least(&self.vp)),
            ("ep", least(&self.ep)),
        ];
        above_zero("sweep", &smallest)?;
        if self.also.iter().any(|way| [way.ulysses, way.ring, way.tp, way.pp].contains(&0)) {
            return wrong("also", "a degree is 0; the least is 1");
        }
        if [self.zero.len(), self.recompute.len(), self.options.len()].contains(&0) {
            return wrong("zero, recompute, options", "a list is empty; give at least one value");
        }
        let count = self.count();
        if count > MOST_POINTS as f64 {
            return wrong("the grid", &format!("has {count:.1e} points, more than {MOST_POINTS}; shorten the lists"));
        }
        Ok(())
    }
}

impl Also {
    fn ranks(&self) -> u32 {
        [self.ulysses, self.ring, self.tp, self.pp].iter().fold(1, |n, &d| n.saturating_mul(d))
    }

    fn points(&self, grid: &Grid, seq_len: u64, global_batch: u64, points: &mut Vec<Point>) {
        let Also { ulysses, ring, tp, pp, options } = *self;
        let dp = (grid.gpus / self.ranks().max(1)).max(1);
        // What is kept where all else is computed again has no meaning elsewhere.
        let means = |how: &(_, &Recompute)| !options.keep_attention || *how.1 == Recompute::Full;
        for &micro_batch in &grid.micro_batch {
            for (&vp, &ep) in cross(&grid.vp, &grid.ep) {
                points.extend(cross(&grid.zero, &grid.recompute).filter(means).map(|(&zero, &recompute)| {
                    let par = Parallelism { dp, pp, vp, ring, ulysses, tp, ep, zero, recompute, options };
                    Point { seq_len, global_batch, micro_batch, par }
                }));
            }
        }
    }
}

impl Batch {
    /// Global batches at a length. Tokens that are no whole number of sequences are rounded down, and the
    /// row is infeasible: see [`Grid::row`].
    pub(super) fn of(&self, seq_len: u64) -> Vec<u64> {
        match self {
            Batch::TokensPerStep(tokens) => vec![(tokens / seq_len).max(1)],
            Batch::GlobalBatch(list) => list.clone(),
        }
    }

    pub(super) fn smallest(&self) -> Option<u64> {
        match self {
            Batch::TokensPerStep(tokens) => Some(*tokens),
            Batch::GlobalBatch(list) => list.iter().min().copied(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Batch::TokensPerStep(_) => 1,
            Batch::GlobalBatch(list) => list.len(),
        }
    }
}

/// Every pair of one of each, the second of them running fastest.
pub fn cross<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    a.iter().flat_map(move |x| b.iter().map(move |y| (x, y)))
}
