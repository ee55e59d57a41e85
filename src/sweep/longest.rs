//! How long a sequence may be: of each way, and with each set of measures, the longest that fits, and its step.
//!
//! What a rank needs grows with the sequence, so the longest is between one that fits and one that does not: lengths are doubled
//! until they do not fit, and then halved in between. Only plans' memory is looked at until the longest is known; where its step
//! takes longer than is told, it is the longest nevertheless, without times.

use super::asked::{trained, usual_ep};
use super::store::{Store, written};
use super::{Case, Point};
use crate::error::{Cause, Error, Reason, Result};
use crate::report::Row;
use crate::spec::{Dtype, KvPath, LlmSpec, Options, Parallelism, Recompute};
use crate::strategy::lengths::{PART, bisect, grain};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// How GPUs share the sequences of a step; dp is what is left of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Way {
    pub gpus: u32,
    pub ulysses: u32,
    pub ring: u32,
    pub tp: u32,
    pub pp: u32,
    pub ep: u32,
}

/// What was asked: the contents of study.json. `ways` are crossed with `measures`; each replica has one sequence.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Question {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub dtype: Dtype,
    pub zero: u32,
    pub recompute: Recompute,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_mtp: bool,
    pub ways: Vec<Way>,
    pub measures: Vec<Options>,
}

/// The longest sequence of a way, or its shortest where not even that one fits. A row that fits and has no times says why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Longest {
    pub row: Row,
    /// Why no longer one; nothing where no plan may be longer.
    pub beyond: Reason,
}

impl Question {
    pub fn spec(&self) -> Result<LlmSpec> {
        trained(&self.model, self.no_mtp)
    }

    /// No split, a ring over all GPUs, Ulysses over as many as there are KV heads (or heads, of which KV heads are copied) and
    /// a ring over the rest of them. Where state-space heads do not come out even over all GPUs, over as many as they do.
    pub fn default_ways(model: &LlmSpec, gpus: u32, per_node: u32) -> Vec<Way> {
        let ranks = most_sharing(model, gpus);
        let shares = |n: &u32| ranks.is_multiple_of(*n) && model.heads.is_multiple_of(u64::from(*n));
        let most = |limit: u32| (1..=limit.min(ranks)).rev().find(shares).unwrap_or(1);
        let heads = u32::try_from(model.heads).unwrap_or(u32::MAX);
        let (near, far) = (most(per_node.min(heads)), most(heads));
        // Keys that an indexer chooses are gathered, by a ring alone.
        let all = match model.indexer {
            Some(_) => vec![[1, 1], [1, ranks]],
            None => vec![[1, 1], [1, ranks], [near, ranks / near], [far, ranks / far]],
        };
        let ep = usual_ep(model, gpus, &[1], per_node);
        let way = |[ulysses, ring]: [u32; 2]| Way { gpus, ulysses, ring, tp: 1, pp: 1, ep };
        let mut known = BTreeSet::new();
        all.into_iter().filter(|split| known.insert(*split)).map(way).collect()
    }

    /// What makes sequences longer, one measure after the other: logits, networks and inputs of layers take less and less, then
    /// the optimizer nothing, and at last layers go through chunks of the sequence. `has_host`: what copies to the CPUs' memory
    /// take is known of the cluster.
    pub fn default_measures(model: &LlmSpec, has_host: bool) -> Vec<Options> {
        let dense = model.moe.is_none() && model.pattern.is_empty() && !model.parallel_block;
        let chunked = dense && model.mla.is_none();
        let away = "offload-activations+offload-optimizer";
        let tiled = if dense { "loss-chunks-16+mlp-chunks-16" } else { "loss-chunks-16" };
        let words = [
            ("default".to_string(), true),
            ("loss-chunks-16".into(), true),
            (tiled.into(), dense),
            (format!("{tiled}+offload-activations"), has_host),
            (format!("{tiled}+{away}"), has_host),
            (format!("fpdt-16+{away}"), has_host && chunked),
        ];
        let given = words.into_iter().filter(|(_, is)| *is);
        given.map(|(words, _)| words.parse().expect("words of the table of options")).collect()
    }

    /// Every way with every set of measures.
    fn all(&self) -> Result<Vec<(u32, Parallelism)>> {
        let sparse = self.spec()?.indexer.is_some();
        let mut all = vec![];
        for way in &self.ways {
            let split = [way.ulysses, way.ring, way.tp, way.pp].iter().map(|n| u64::from(*n)).product::<u64>();
            if split == 0 || !u64::from(way.gpus).is_multiple_of(split) {
                let Way { gpus, ulysses, ring, tp, pp, .. } = way;
                let why = format!("ulysses {ulysses} x ring {ring} x tp {tp} x pp {pp} does not divide gpus {gpus}");
                return Err(Cause::Degrees.infeasible(format!("{why}; change one of them")));
            }
            all.extend(self.measures.iter().map(|&options| {
                // A ring of a sparse model gathers, whatever else is said.
                let kv = if sparse && way.ring > 1 { KvPath::Gather } else { options.kv };
                let options = Options { kv, ..options };
                let par = Parallelism {
                    dp: (u64::from(way.gpus) / split) as u32,
                    pp: way.pp,
                    ring: way.ring,
                    ulysses: way.ulysses,
                    tp: way.tp,
                    ep: way.ep,
                    zero: self.zero,
                    recompute: self.recompute,
                    options,
                    ..Parallelism::default()
                };
                (way.gpus, par)
            }));
        }
        Ok(all)
    }

    fn cases(&self) -> Result<BTreeMap<u32, Case>> {
        let sizes: BTreeSet<u32> = self.ways.iter().map(|way| way.gpus).collect();
        let case = |gpus| Ok((gpus, Case::new(self.spec()?, &self.cluster, &self.stack, gpus, Some(self.dtype))?));
        sizes.into_iter().map(case).collect()
    }
}

/// Finds the longest sequence of every way; `dir`: where rows are kept as they are found, and what is known is taken from.
/// `progress` hears (ways there, ways in all).
pub fn longest(
    question: &Question,
    dir: &Path,
    fresh: bool,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<(Vec<Longest>, Vec<PathBuf>)> {
    let (cases, all) = (question.cases()?, question.all()?);
    let mut store = Store::open(question, None, dir, fresh)?;
    let known: BTreeMap<Parallelism, Row> =
        store.rows().iter().map(|row| (Point::of_row(row).par, row.clone())).collect();
    // Rows of another version of the program, or of model files that changed since, must not be mixed with new ones.
    let still_right = known.values().next().is_none_or(|row| {
        let again = cases.get(&row.gpus).map(|case| case.told(&Point::of_row(row)));
        again.is_some_and(|again| again.is_ok_and(|again| again == *row))
    });
    let known = if still_right { known } else { BTreeMap::new() };
    if !still_right {
        store.clear()?;
    }
    let shared = Mutex::new((store, 0));
    let found = all.par_iter().map(|(gpus, par)| {
        let case = &cases[gpus];
        let found = match known.get(par) {
            Some(row) => case.beyond(row)?,
            None => case.longest(par)?,
        };
        let mut guard = shared.lock().unwrap_or_else(|e| e.into_inner());
        if !known.contains_key(par) {
            guard.0.append(found.row.clone(), &written(&found.row))?;
        }
        guard.1 += 1;
        progress(guard.1, all.len());
        Ok(found)
    });
    let found = found.collect::<Result<Vec<Longest>>>()?;
    let (store, _) = shared.into_inner().unwrap_or_else(|e| e.into_inner());
    let points: Vec<Point> = found.iter().map(|found| Point::of_row(&found.row)).collect();
    let (_, files) = store.finish(&points)?;
    Ok((found, files))
}

impl Case {
    /// The longest sequence that fits with one on each replica, and its step; where not even the shortest does, that one's row.
    pub fn longest(&self, par: &Parallelism) -> Result<Longest> {
        let grain = grain(par);
        let mut beyond = Reason::default();
        let longest = bisect(grain, |seq_len| {
            let row = self.laid_out(&one_each(par, seq_len))?;
            if !row.feasible {
                beyond = row.why;
            }
            Ok::<bool, Error>(row.feasible)
        })?;
        let row = match longest {
            Some(seq_len) => self.told(&one_each(par, seq_len))?,
            None => self.laid_out(&one_each(par, grain))?,
        };
        Ok(Longest { row, beyond })
    }

    /// The row of a point. Where it fits and its step cannot be told, it has no times, and says why.
    fn told(&self, point: &Point) -> Result<Row> {
        let row = self.row(point)?;
        if row.feasible {
            return Ok(row);
        }
        Ok(Row { why: row.why, ..self.laid_out(point)? })
    }

    /// What stands against a longer sequence than a row's, which is the longest.
    fn beyond(&self, row: &Row) -> Result<Longest> {
        let Point { seq_len, par, .. } = Point::of_row(row);
        let next = seq_len + (seq_len / PART).max(1).next_multiple_of(grain(&par));
        let beyond = if row.feasible { self.laid_out(&one_each(&par, next))?.why } else { row.why.clone() };
        Ok(Longest { row: row.clone(), beyond })
    }
}

/// As many of the GPUs as can share a sequence: all, or as many as the state-space heads of a hybrid come out even for.
fn most_sharing(model: &LlmSpec, gpus: u32) -> u32 {
    let states = |n: u32| model.mamba.is_none_or(|mamba| mamba.shares(u64::from(n)));
    (1..=gpus).rev().find(|n| gpus.is_multiple_of(*n) && states(*n)).unwrap_or(1)
}

/// A sequence on each replica.
fn one_each(par: &Parallelism, seq_len: u64) -> Point {
    Point { seq_len, global_batch: u64::from(par.dp) * u64::from(par.pp), micro_batch: 1, par: *par }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case() -> Case {
        Case::new(LlmSpec::find("llama-3-8b").unwrap(), "dgx-h100", "nccl-fa3", 8, None).unwrap()
    }

    fn way(ulysses: u32, ring: u32, words: &str) -> Parallelism {
        let options = words.parse().unwrap();
        let dp = 8 / (ulysses * ring);
        Parallelism { dp, ulysses, ring, zero: 3, recompute: Recompute::Full, options, ..Parallelism::default() }
    }

    #[test]
    fn sparse_models_gather_their_keys() {
        let model = LlmSpec::find("deepseek-v3.2").unwrap();
        let ways = Question::default_ways(&model, 64, 8);
        let question = Question {
            model: "deepseek-v3.2".into(),
            cluster: "dgx-h100".into(),
            stack: "nccl-fa3".into(),
            dtype: Dtype::Bf16,
            zero: 1,
            recompute: Recompute::Full,
            no_mtp: true,
            title: None,
            measures: Question::default_measures(&model, true),
            ways,
        };
        let all = question.all().unwrap();
        assert!(all.iter().all(|(_, par)| par.ulysses == 1 && (par.ring > 1) == (par.options.kv == KvPath::Gather)));
        assert!(all.iter().any(|(_, par)| par.ring == 64));
    }

    /// The longest fits, and what is a little longer does not, by the rows that `estimate` would have.
    #[test]
    fn a_little_longer_does_not_fit() {
        let case = case();
        for (ulysses, ring, words) in [(1, 1, "default"), (8, 1, "loss-chunks-16"), (2, 4, "offload-activations")] {
            let par = way(ulysses, ring, words);
            let found = case.longest(&par).unwrap();
            let seq_len = found.row.seq_len;
            assert!(found.row.feasible && found.row.step_time_s.is_some(), "{words}");
            let next = seq_len + (seq_len / PART).next_multiple_of(grain(&par));
            let row = case.row(&one_each(&par, next)).unwrap();
            assert!(!row.feasible && row.why.to_string().starts_with("memory: needs"), "{words}: {}", row.why);
            assert_eq!(found.beyond.cause, Cause::Memory, "{}", found.beyond);
            assert_eq!(case.beyond(&found.row).unwrap().row, found.row);
        }
    }

    /// Nothing that takes memory away makes sequences shorter.
    #[test]
    fn measures_add_up() {
        let case = case();
        let lengths: Vec<u64> = Question::default_measures(&case.model, true)
            .into_iter()
            .map(|options| case.longest(&Parallelism { options, ..way(8, 1, "default") }).unwrap().row.seq_len)
            .collect();
        assert!(lengths.is_sorted() && lengths[0] > 100_000 && lengths[5] > 4 * lengths[0], "{lengths:?}");
    }

    /// Where something else than memory ends it, that is said.
    #[test]
    fn positions_end_it_too() {
        let model = LlmSpec::find("gpt3-175b").unwrap();
        let case = Case::new(model, "dgx-h100", "nccl-fa3", 64, None).unwrap();
        let par = Parallelism { dp: 8, tp: 8, zero: 3, recompute: Recompute::Full, ..Parallelism::default() };
        let found = case.longest(&par).unwrap();
        assert!(found.row.feasible && found.row.seq_len == 2048, "{} {}", found.row.seq_len, found.beyond);
        assert!(found.beyond.cause == Cause::Positions, "{}", found.beyond);
        let none = case.longest(&Parallelism { dp: 64, tp: 1, zero: 0, ..par }).unwrap();
        assert!(!none.row.feasible && none.beyond.cause == Cause::Memory, "{}", none.beyond);
    }

    /// What fits is the longest, whether or not its step can be told; and what is known of it is believed again.
    #[test]
    fn a_step_that_is_too_long_to_tell_does_not_make_a_sequence_shorter() {
        let tiny = Case::new(LlmSpec::find("tiny").unwrap(), "local-cpu", "cpu", 8, None).unwrap();
        let par = Parallelism { dp: 8, zero: 3, recompute: Recompute::Full, ..Parallelism::default() };
        let found = tiny.longest(&par).unwrap();
        assert!(found.row.feasible && found.row.step_time_s.is_none() && found.row.mfu.is_none(), "{:?}", found.row);
        assert!([found.row.why.cause, found.beyond.cause] == [Cause::Time, Cause::Memory], "{found:?}");
        assert_eq!(tiny.told(&Point::of_row(&found.row)).unwrap(), found.row);
        let question = Question {
            title: None,
            model: "tiny".into(),
            cluster: "local-cpu".into(),
            stack: "cpu".into(),
            dtype: Dtype::F32,
            zero: 3,
            recompute: Recompute::Full,
            no_mtp: false,
            ways: vec![Way { gpus: 8, ulysses: 1, ring: 1, tp: 1, pp: 1, ep: 1 }],
            measures: vec![Options::default()],
        };
        let dir = tempfile::tempdir().unwrap();
        let run = || longest(&question, dir.path(), false, &|_, _| {}).unwrap().0;
        assert_eq!(run()[0], found);
        assert_eq!(run()[0].row, found.row);
    }

    #[test]
    fn ways_that_come_out_even() {
        let model = LlmSpec::find("llama-3-8b").unwrap();
        let split = |way: &Way| (way.ulysses, way.ring);
        let ways = |gpus| Question::default_ways(&model, gpus, 8).iter().map(split).collect::<Vec<_>>();
        assert_eq!(ways(1), [(1, 1)]);
        assert_eq!(ways(8), [(1, 1), (1, 8), (8, 1)]);
        assert_eq!(ways(64), [(1, 1), (1, 64), (8, 8), (32, 2)]);
        assert_eq!(ways(12), [(1, 1), (1, 12), (4, 3)]);
    }

    /// 64 ranks do not share 32 state-space heads: half of them do, and two replicas have a sequence each. All but one of the
    /// ways were refused, and the longest sequence was a 31st of what fits.
    #[test]
    fn state_space_heads_come_out_even_too() {
        let model = LlmSpec::find("qwen3-next-80b-a3b").unwrap();
        let case = Case::new(model, "dgx-h100", "nccl-fa3", 64, None).unwrap();
        let ways = Question::default_ways(&case.model, 64, 8);
        let splits: Vec<[u32; 3]> = ways.iter().map(|way| [way.ulysses, way.ring, way.ep]).collect();
        assert_eq!(splits, [[1, 1, 8], [1, 32, 8], [8, 4, 8], [16, 2, 8]]);
        for Way { ulysses, ring, ep, .. } in ways {
            let par = Parallelism { dp: 64 / (ulysses * ring), ep, ..way(ulysses, ring, "default") };
            let work = case.workload(&one_each(&par, grain(&par)));
            assert!(work.is_ok(), "{:?}", work.err());
        }
        // More groups and heads come out even over all of them.
        let nemotron = LlmSpec::find("nemotron-h-8b").unwrap();
        assert!(Question::default_ways(&nemotron, 64, 8).iter().any(|way| (way.ulysses, way.ring) == (1, 64)));
    }
}
