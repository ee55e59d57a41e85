//! Which parallelism is fastest? A search over all ways of a space, the most promising first.
//!
//! Every way has a bound of its step and of its memory from a probe, a plan that many ways share. Ways are costed in the
//! order of their bounds, each by its own plan, until no bound that is left is below the slowest of the best so far: what
//! was not costed cannot be among them. Then words that leave degrees alone, and stages of unequal depth, are tried on the
//! best, and words that save memory on ways that lack nothing else and may be faster. The best with and without words are
//! played event by event at last, and stand in that order. Rows are written as they are found, and a search that was stopped
//! goes on.

mod balance;
mod candidates;
mod found;
mod nearest;
mod numerics;
mod probe;
mod question;
mod refine;
mod row;
mod space;
mod spare;
mod values;

pub use found::{Counts, Found};
pub use nearest::Nearest;
pub use numerics::Numerics;
pub use question::Question;
pub use space::{Space, ends};
pub use values::{CEILING, Value};

use super::played::{Played, played, step};
use super::store::{self, Store};
use super::{Case, Point};
use crate::error::{Cause, Error, Result};
use crate::report::Row;
use candidates::{Candidate, Probes};
use rayon::prelude::*;
use row::{fastest, is_slow, looked_at, row, slow};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Ways that are costed before it is looked again which are still worth it. The same whatever the number of cores, so
/// that the same question gives the same rows.
const ROUND: usize = 16;
/// The same where one way is looked for.
const FEW: usize = 4;
/// Ops that the best are played with.
const MOST_OPS: f64 = 4e6;

/// What is looked for among candidates.
#[derive(Clone, Copy)]
struct Wanted {
    /// So many of the fastest.
    ways: usize,
    /// Of those that take less, s.
    within: f64,
    /// Part of its own step that a way which is not costed may be faster by.
    slack: f64,
    /// Whether the folder keeps their rows.
    keep: bool,
}

/// Hears (what is being done, how much of it is done, of how much).
pub type Progress<'p> = &'p (dyn Fn(&'static str, usize, usize) + Sync);

/// Whether to stop at the next good place.
pub type Stop<'p> = &'p (dyn Fn() -> bool + Sync);

/// A search under way.
struct Search<'s> {
    case: &'s Case,
    question: &'s Question,
    store: Option<Store>,
    rows: BTreeMap<Point, Row>,
    progress: Progress<'s>,
    stop: Stop<'s>,
}

/// Searches at every length. With a folder, rows are kept there and taken from there. Told to stop, it brings what it has.
pub fn search(
    question: &Question,
    dir: Option<&Path>,
    fresh: bool,
    (progress, stop): (Progress, Stop),
) -> Result<(Vec<Found>, Vec<PathBuf>)> {
    let case = question.case()?;
    let mut store = dir.map(|dir| Store::open(question, None, dir, fresh)).transpose()?;
    if let Some(store) = store.as_mut().filter(|store| !still_right(&case, store.rows())) {
        store.clear()?;
    }
    let rows = store.iter().flat_map(Store::rows).map(|row| (Point::of_row(row), row.clone())).collect();
    let mut search = Search { case: &case, question, store, rows, progress, stop };
    let mut all = vec![];
    for &seq_len in &question.seq_len {
        for global_batch in question.batch.of(seq_len) {
            if all.is_empty() || !stop() {
                all.push(search.length(seq_len, global_batch)?);
            }
        }
    }
    let mut files = vec![];
    if let Some(store) = search.store {
        let mut points: Vec<Point> = store.rows().iter().map(Point::of_row).collect();
        points.sort_unstable();
        files = store.finish(&points)?.1;
    }
    if let Some(dir) = dir {
        files.push(write_rows(dir, "refined.csv", all.iter().flat_map(|found| &found.refined).map(|way| &way.row))?);
        let with_others = all.iter().flat_map(|found| &found.numerics).map(|other| &other.row);
        files.push(write_rows(dir, "numerics.csv", with_others)?);
        files.push(write_played(dir, all.iter().flat_map(|found| found.best.iter().chain(&found.refined)))?);
        let path = dir.join("choices.csv");
        std::fs::write(&path, values::csv(&all)?).map_err(Error::io(&path))?;
        files.push(path);
    }
    Ok((all, files))
}

/// Whether this program finds what the first row that has a time says: rows of another version must not be mixed with new
/// ones.
fn still_right(case: &Case, rows: &[Row]) -> bool {
    let Some(known) = rows.iter().find(|row| row.step_time_s.is_some()) else { return true };
    row(case, &Point::of_row(known), 0.0).is_ok_and(|again| again == slow(known.clone()))
}

/// Ways with words of their own stand apart: in rows.csv all ways are plain, and can be compared.
fn write_rows<'r>(dir: &Path, name: &str, rows: impl Iterator<Item = &'r Row>) -> Result<PathBuf> {
    let path = dir.join(name);
    let bytes: Vec<u8> = store::names().into_iter().chain(rows.flat_map(store::written)).collect();
    std::fs::write(&path, bytes).map_err(Error::io(&path))?;
    Ok(path)
}

/// The best ways with and without words, and behind their columns the step that was played.
fn write_played<'w>(dir: &Path, ways: impl Iterator<Item = &'w Played>) -> Result<PathBuf> {
    let path = dir.join("simulated.csv");
    let line = |mut row: Vec<u8>, last: String| {
        row.truncate(row.trim_ascii_end().len());
        row.extend(format!(",{last}\n").bytes());
        row
    };
    let seconds = |way: &Played| way.simulated_s.map_or(String::new(), |s| s.to_string());
    let mut bytes = line(store::names(), "simulated_s".into());
    ways.for_each(|way| bytes.extend(line(store::written(&way.row), seconds(way))));
    std::fs::write(&path, bytes).map_err(Error::io(&path))?;
    Ok(path)
}

impl Search<'_> {
    fn length(&mut self, seq_len: u64, global_batch: u64) -> Result<Found> {
        let (points, refused) = self.question.space.points(self.case, seq_len, global_batch)?;
        let refused_why = refused.0.values().max_by_key(|(n, _)| *n).map(|(_, why)| why.clone());
        let refused = refused.0.into_iter().map(|(kind, (n, _))| (kind, n)).collect();
        let mut counts = Counts { refused, refused_why, ways: points.len(), ..Counts::default() };
        let mut probes = Probes::new(self.case);
        let (fit, too_large) = self.probed(&points, &mut probes)?;
        (counts.probes, counts.too_large) = (probes.len(), too_large.len());
        counts.left = points.len() - fit.len() - too_large.len();
        let candidates = self.bounded(fit);
        let (mut costed, unbounded) = (vec![], counts.left);
        let all = Wanted { ways: self.question.best, within: f64::INFINITY, slack: self.question.slack, keep: true };
        self.best_first(&candidates, all, &mut costed, &mut counts)?;
        counts.too_slow = candidates.len() - costed.len() - (counts.left - unbounded);
        let best: Vec<Row> = fastest(&costed).into_iter().take(self.question.best).cloned().collect();
        let mut beside = Counts { nearest_bound: counts.nearest_bound, ..Counts::default() };
        let values = values::values(self, &candidates, &mut costed, &mut beside)?;
        (counts.beside, counts.nearest_bound) = (beside.costed, beside.nearest_bound);
        let least = best.first().map(step);
        let best = played(self.case, self.stop, MOST_OPS, best);
        let mut refined = refine::refine(self, &best)?;
        if let Some(least) = least {
            let refused = spare::refused(self, &too_large, &costed, least);
            let mut spared = Counts::default();
            refined.extend(spare::spare(self, &mut probes, &refused, least, &mut spared)?);
            refined = fastest(&refined).into_iter().cloned().collect();
            refined.dedup();
            counts.spared = spared.costed;
        }
        let refined = played(self.case, self.stop, MOST_OPS, refined);
        let numerics = match super::played::fastest(&best, &refined) {
            Some(fastest) => numerics::numerics(self, fastest)?,
            None => vec![],
        };
        let nothing_fits = best.is_empty() && counts.left == 0;
        let nearest = if nothing_fits { nearest::nearest(self, too_large, &costed)? } else { None };
        Ok(Found { seq_len, global_batch, counts, best, refined, numerics, values, nearest })
    }

    /// Costs candidates until none that is left can be among those wanted.
    fn best_first(
        &mut self,
        candidates: &[Candidate],
        wanted: Wanted,
        costed: &mut Vec<Row>,
        counts: &mut Counts,
    ) -> Result<()> {
        let each = if wanted.ways > 1 { ROUND } else { FEW };
        for (n, round) in candidates.chunks(each).enumerate() {
            let limit = fastest(costed).get(wanted.ways - 1).map_or(wanted.within, |row| step(row).min(wanted.within));
            let may_be = |candidate: &&Candidate| candidate.least() * (1.0 + wanted.slack) < limit;
            if (self.stop)() {
                counts.left += candidates[n * each..].iter().filter(may_be).count();
                break;
            }
            let round: Vec<&Candidate> = round.iter().filter(may_be).collect();
            if round.is_empty() {
                break;
            }
            let points: Vec<Point> = round.iter().map(|candidate| candidate.point).collect();
            let rows = self.cost(&points, limit, wanted.keep)?;
            for (candidate, row) in round.iter().zip(&rows) {
                let Some(row) = row else {
                    counts.left += 1;
                    continue;
                };
                counts.costed += 1;
                let long = row.why.cause == Cause::Size;
                counts.too_long += usize::from(long);
                counts.too_long_why = counts.too_long_why.take().or_else(|| long.then(|| row.why.clone()));
                counts.do_not_fit += usize::from(!row.feasible && !is_slow(row) && !long);
                if let Some(step) = row.step_time_s.filter(|_| candidate.bound > 0.0) {
                    let over = step / candidate.bound;
                    counts.nearest_bound = Some(counts.nearest_bound.map_or(over, |least| least.min(over)));
                }
            }
            costed.extend(rows.into_iter().flatten());
            (self.progress)("ways costed", costed.len(), candidates.len());
        }
        Ok(())
    }

    /// Rows of points, those that are known and those that are not, which the folder keeps where `keep` is set. Of a way
    /// that takes `limit` or longer, memory is not looked at: it costs most of the time. None of those that were not come to
    /// before the search was told to stop.
    fn cost(&mut self, points: &[Point], limit: f64, keep: bool) -> Result<Vec<Option<Row>>> {
        let (case, known, stop) = (self.case, &self.rows, self.stop);
        // What was too slow for one limit may not be for another, and the other way round: what is found hangs on the
        // limit alone, and not on what was looked at before.
        let rows = points.par_iter().map(|point| match known.get(point) {
            Some(row) if row.step_time_s.is_some() && step(row) >= limit => Ok(Some((slow(row.clone()), false))),
            Some(row) if !is_slow(row) => Ok(Some((row.clone(), false))),
            _ if stop() => Ok(None),
            Some(row) => Ok(Some((looked_at(case, row.clone())?, true))),
            None => Ok(Some((row(case, point, limit)?, true))),
        });
        let rows = rows.collect::<Result<Vec<Option<(Row, bool)>>>>()?;
        for (row, _) in rows.iter().flatten().filter(|(_, new)| *new) {
            if let Some(store) = self.store.as_mut().filter(|_| keep) {
                store.append(row.clone(), &store::written(row))?;
            }
            self.rows.insert(Point::of_row(row), row.clone());
        }
        Ok(rows.into_iter().map(|row| row.map(|(row, _)| row)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::probe::{Probe, Shape, Short};
    use super::*;
    use crate::error::Reason;
    use crate::spec::{Dispatch, Documents, Dtype, Options, Parallelism, Recompute, Schedule};
    use crate::sweep::Batch;
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(super) fn dense() -> Question {
        let space = Space {
            tp: vec![1, 2],
            pp: vec![1, 4],
            vp: vec![2],
            ulysses: vec![1, 2],
            ring: vec![1, 2],
            ep: vec![1],
            zero: vec![1, 3],
            micro_batch: vec![1],
            recompute: vec![Recompute::None, Recompute::Full],
            schedules: Schedule::ALL.to_vec(),
            dispatch: vec![Dispatch::Nccl],
            options: vec![Options::default()],
            least_tokens: 1024,
        };
        Question {
            model: "llama-3-8b".into(),
            cluster: "dgx-h100".into(),
            stack: "nccl-fa3".into(),
            gpus: 16,
            dtype: Dtype::Bf16,
            seq_len: vec![8192],
            batch: Batch::GlobalBatch(vec![64]),
            routing: None,
            documents: Documents::default(),
            no_mtp: false,
            best: 4,
            slack: 0.0,
            headroom: 0.0,
            space,
        }
    }

    pub(super) fn mixture() -> Question {
        let dispatch = vec![Dispatch::Nccl, Dispatch::DeepepNormal];
        let schedules = vec![Schedule::OneF1B, Schedule::Interleaved, Schedule::DualpipeV];
        let one = || vec![1];
        let space =
            Space { tp: one(), ulysses: one(), ring: one(), ep: vec![1, 4], schedules, dispatch, ..dense().space };
        Question { model: "deepseek-v2-lite".into(), space, ..dense() }
    }

    pub(super) fn found(question: &Question, dir: Option<&Path>) -> Found {
        search(question, dir, false, (&|_, _, _| {}, &|| false)).unwrap().0.remove(0)
    }

    /// The slow way: every way of the space, whole.
    fn all_rows(question: &Question) -> Vec<(Point, Row)> {
        let case = question.case().unwrap();
        let (points, _) = question.space.points(&case, question.seq_len[0], 64).unwrap();
        points.into_par_iter().map(|point| (point, row(&case, &point, f64::INFINITY).unwrap())).collect()
    }

    #[test]
    fn a_search_finds_what_costing_every_way_finds() {
        for question in [dense(), mixture()] {
            let rows: Vec<Row> = all_rows(&question).into_iter().map(|(_, row)| row).collect();
            let want: Vec<Row> = fastest(&rows).into_iter().take(question.best).cloned().collect();
            let got = found(&question, None);
            assert!(got.best.iter().map(|way| &way.row).eq(&want), "{:?}", got.best);
            let Counts { ways, too_large, too_slow, costed, .. } = got.counts;
            assert_eq!((ways, too_large + too_slow + costed), (rows.len(), rows.len()));
            assert!(costed < 3 * ways / 4, "{:?}", got.counts);
            assert!(got.counts.nearest_bound.unwrap() >= 1.0);
        }
    }

    /// Whoever is content with less certainty has it sooner, and what is promised holds.
    #[test]
    fn within_a_tenth_is_found_with_less() {
        let (sure, near) = (found(&dense(), None), found(&Question { slack: 0.1, ..dense() }, None));
        assert!(near.counts.costed < sure.counts.costed, "{:?} {:?}", near.counts, sure.counts);
        assert_eq!(near.best.len(), sure.best.len());
        assert!(near.best.iter().zip(&sure.best).all(|(near, sure)| step(near) <= 1.1 * step(sure)));
    }

    #[test]
    fn told_to_stop_it_brings_what_it_has_and_the_next_one_goes_on() {
        let (question, dir) = (dense(), tempfile::tempdir().unwrap());
        let whole = found(&question, None);
        let rounds = AtomicUsize::new(0);
        let progress = |what: &'static str, _, _| {
            rounds.fetch_add(usize::from(what == "ways costed"), Ordering::Relaxed);
        };
        let stop = || rounds.load(Ordering::Relaxed) > 0;
        let part = search(&question, Some(dir.path()), false, (&progress, &stop)).unwrap().0.remove(0);
        let Counts { ways, too_large, too_slow, costed, left, .. } = part.counts;
        assert_eq!(too_large + too_slow + costed + left, ways);
        assert!(left > 0 && (1..=ROUND).contains(&costed) && !part.best.is_empty(), "{:?}", part.counts);
        assert!(step(&part.best[0]) >= step(&whole.best[0]));
        // From the first, before anything is bounded.
        let none = search(&question, None, false, (&|_, _, _| {}, &|| true)).unwrap().0.remove(0);
        assert_eq!(none.counts.left + none.counts.too_large, ways);
        assert!(none.best.is_empty() && none.values.is_empty() && none.refined.is_empty());
        assert_eq!(found(&question, Some(dir.path())).best, whole.best);
    }

    #[test]
    fn no_way_is_faster_or_smaller_than_its_bound() {
        for question in [dense(), mixture()] {
            let case = question.case().unwrap();
            let short = Short::of(&case).expect("models of more than a few layers");
            let (mut tight, mut all) = (0, 0);
            for (point, row) in all_rows(&question) {
                let Some(probe) = Probe::new(&case, Some(&short), &point).unwrap() else {
                    panic!("{point:?} has no probe")
                };
                let shortest = Shape::of(&point).and_then(|shape| shape.shortest(&case.model));
                let (seconds, bytes) = (probe.seconds(&case.model, &point, shortest.as_ref()), probe.bytes(&point));
                let over = step(&row) / seconds;
                assert!(over >= 1.0, "{over} {point:?}");
                let needs = row.peak_mem_bytes.unwrap() as f64 / bytes;
                assert!(needs >= 1.0, "{needs} {point:?}");
                (tight, all) = (tight + usize::from(over < 1.3), all + 1);
            }
            // Else it would prune nothing.
            assert!(2 * tight > all, "{tight} of {all}");
        }
    }

    #[test]
    fn values_are_the_fastest_ways_that_have_them() {
        let question = dense();
        let rows: Vec<Row> = all_rows(&question).into_iter().map(|(_, row)| row).collect();
        let got = found(&question, None);
        let of = |choice: &str, value: &str| {
            got.values.iter().find(|v| v.choice == choice && v.value == value).expect("a value of the space")
        };
        for tp in [1, 2] {
            let best = fastest(&rows).into_iter().find(|row| row.tp == tp).unwrap();
            assert_eq!(of("tp", &tp.to_string()).row.as_ref().unwrap().step_time_s, best.step_time_s);
        }
        let best = got.values.iter().filter_map(|v| v.over_best).fold(f64::INFINITY, f64::min);
        assert_eq!(best, 1.0);
        // Where there is no choice there is no line.
        assert!(got.values.iter().all(|v| v.choice != "ep"), "{:?}", got.values);
    }

    /// Nobody says that a value is slow whose ways are fast and do not fit, nor that nothing is found of it where the plans
    /// of its ways have more ops than are laid out.
    #[test]
    fn a_value_that_does_not_fit_is_not_called_slow() {
        let question = dense();
        let case = question.case().unwrap();
        let par = Parallelism { dp: 16, ..Parallelism::default() };
        let fits = Point { seq_len: 8192, global_batch: 64, micro_batch: 1, par };
        let too_large = Point { par: Parallelism { dp: 8, tp: 2, ..par }, ..fits };
        let costed = |point: &Point| row(&case, point, f64::INFINITY).unwrap();
        let said = |why: &str, over: f64| {
            let rows = [
                Row { feasible: true, why: Reason::default(), ..costed(&fits) },
                Row { feasible: false, why: why.into(), ..costed(&too_large) },
            ];
            let best = step(&rows[0]);
            let candidates = [(fits, best), (too_large, over * best)].map(|(point, s)| Candidate::bounded(point, s));
            let (progress, stop): (Progress, Stop) = (&|_, _, _| {}, &|| false);
            let mut search =
                Search { case: &case, question: &question, store: None, rows: BTreeMap::new(), progress, stop };
            let mut costed = rows.to_vec();
            let found = values::values(&mut search, &candidates, &mut costed, &mut Counts::default()).unwrap();
            let of_two = found.into_iter().find(|value| (value.choice, value.value.as_str()) == ("tp", "2")).unwrap();
            assert!(of_two.row.is_none() && costed.len() == rows.len());
            of_two.at_least
        };
        let memory = "memory: needs at least 90 GiB";
        assert_eq!([said(memory, 1.1), said(memory, 1.6)], [None, Some(CEILING)]);
        let long = "size: 32 layers make 2000000 ops of a rank";
        assert!(said(long, 1.1).is_some_and(|least| (least - 1.1).abs() < 1e-9), "{:?}", said(long, 1.1));
    }

    /// Ways whose steps are known were cut behind ways that promised more, and slower ones were said to be the fastest.
    #[test]
    fn no_known_way_that_fits_is_faster_than_what_its_value_says() {
        let question = Question { space: Space { micro_batch: vec![1, 2], ..dense().space }, ..dense() };
        let case = question.case().unwrap();
        let rows: BTreeMap<Point, Row> = all_rows(&question).into_iter().collect();
        let whole: Vec<Row> = rows.values().cloned().collect();
        let best = fastest(&whole)[0].clone();
        // Every fourth way was too slow for its memory to be looked at; the others promise all.
        let mut costed: Vec<Row> = whole.iter().step_by(4).cloned().map(slow).collect();
        costed.retain(|row| Point::of_row(row) != Point::of_row(&best));
        costed.push(best.clone());
        let candidates: Vec<Candidate> = rows.keys().map(|point| Candidate::bounded(*point, step(&best))).collect();
        let (progress, stop): (Progress, Stop) = (&|_, _, _| {}, &|| false);
        let mut search = Search { case: &case, question: &question, store: None, rows: rows.clone(), progress, stop };
        let found = values::values(&mut search, &candidates, &mut costed, &mut Counts::default()).unwrap();
        let mut open = 0;
        for Value { choice, value, row, at_least, .. } in &found {
            let of: fn(&Row) -> u32 = match *choice {
                "tp" => |row| row.tp,
                "pp" => |row| row.pp,
                "ring" => |row| row.ring,
                "zero" => |row| row.zero,
                _ => continue,
            };
            let said = row.as_ref().map_or(CEILING * step(&best), step);
            let has = |row: &&Row| row.feasible && of(row).to_string() == *value && step(row) < said;
            let faster: Vec<Point> = rows.values().filter(has).map(Point::of_row).collect();
            assert!(costed.iter().all(|row| !faster.contains(&Point::of_row(row))), "{choice} {value}");
            // A faster one that was not costed is not ruled out.
            assert!(faster.is_empty() || row.is_none() || at_least.is_some(), "{choice} {value}");
            open += usize::from(at_least.is_some_and(|least| least == 1.0));
        }
        assert!(open > 0);
    }

    #[test]
    fn words_make_ways_faster_or_are_left() {
        let question = Question { space: Space { tp: vec![2], pp: vec![1], ..dense().space }, ..dense() };
        let got = found(&question, None);
        assert!(
            !got.refined.is_empty() && got.refined.iter().all(|row| row.options.contains("tp-overlap")),
            "{:?}",
            got.refined
        );
        assert!(step(&got.refined[0]) < step(&got.best[0]));
    }

    #[test]
    fn a_search_goes_on_where_it_was_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let question = Question { space: Space { tp: vec![1], ..dense().space }, ..dense() };
        let first = found(&question, Some(dir.path()));
        let whole = serde_json::to_string(&first).unwrap();
        let path = dir.path().join("rows.csv");
        // What is said is there, also where it was too slow for a first look at its memory.
        let kept: Vec<Row> = csv::Reader::from_path(&path).unwrap().deserialize().map(|row| row.unwrap()).collect();
        let said = first.values.iter().filter_map(|value| value.row.as_ref());
        let said: Vec<&Row> = said.chain(first.best.iter().map(|way| &way.row)).collect();
        assert!(said.len() > 10);
        for row in said {
            let same = |other: &&Row| Point::of_row(other) == Point::of_row(row);
            assert_eq!(kept.iter().find(same), Some(row));
        }
        let bytes = std::fs::read(&path).unwrap();
        for cut in [bytes.len() / 3, bytes.len() - 5, bytes.len()] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            assert_eq!(serde_json::to_string(&found(&question, Some(dir.path()))).unwrap(), whole);
            assert!(std::fs::read(&path).unwrap() == bytes, "cut at {cut}");
        }
        // Rows of another version are not believed.
        let (step, text) = (first.best[0].step_time_s.unwrap(), String::from_utf8(bytes.clone()).unwrap());
        let times: Vec<f64> = kept.iter().filter_map(|row| row.step_time_s).collect();
        let older =
            times.iter().fold(text.clone(), |text, s| text.replace(&format!(",{s},"), &format!(",{},", s / 2.0)));
        assert!(step > 0.0 && older != text);
        std::fs::write(&path, older).unwrap();
        assert_eq!(serde_json::to_string(&found(&question, Some(dir.path()))).unwrap(), whole);
        let other = Question { best: 2, ..question };
        let refused = search(&other, Some(dir.path()), false, (&|_, _, _| {}, &|| false)).err().unwrap().to_string();
        assert!(refused.contains("best is 4 there, 2 was asked for"), "{refused}");
    }
}
