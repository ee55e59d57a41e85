//! Words that save memory, tried on ways that lack nothing else: those that were refused for their memory, and whose bound, as
//! if the words cost nothing, is below the best way's step.

use super::candidates::{Candidate, Probed, Probes, TooLarge};
use super::nearest::both;
use super::refine::climbed;
use super::{Counts, Search, Wanted, fastest, step};
use crate::error::{Cause, Result};
use crate::report::Row;
use crate::spec::{Options, Recompute};
use crate::sweep::{Case, Point};
use std::collections::{BTreeMap, BTreeSet};

/// Ways whose words are bounded before it is looked again which are still worth it.
const AT_A_TIME: usize = 16;
/// In how many pieces a head or a network is gone through.
const PIECES: u32 = 8;

/// Ways that memory alone refuses, and that may take less than `within` s, the most promising first.
pub fn refused(search: &Search, too_large: &[TooLarge], costed: &[Row], within: f64) -> Vec<Candidate> {
    let model = &search.case.model;
    // What needs no order of a pipeline's units first: most are too slow by that.
    let may_be = |(probe, point): &Probed| probe.is_some_and(|probe| probe.seconds(model, point, None) < within);
    let ways = too_large.iter().filter(|way| way.probe.is_some()).map(|way| (way.probe, way.point));
    let mut all = search.bounded(ways.filter(may_be).collect());
    let lacks = costed.iter().filter(|row| row.why.cause == Cause::Memory);
    all.extend(lacks.map(|row| Candidate::bounded(Point::of_row(row), step(row))));
    all.retain(|way| way.bound < within);
    all.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.point.cmp(&b.point)));
    all
}

/// The fastest way found that takes less than `within` s with words that save memory, and with what makes it faster still.
/// `refused`: ways that memory alone refuses, by their bounds.
pub fn spare(
    search: &mut Search,
    probes: &mut Probes,
    refused: &[Candidate],
    within: f64,
    counts: &mut Counts,
) -> Result<Option<Row>> {
    let mut found: Vec<Row> = vec![];
    for some in refused.chunks(AT_A_TIME) {
        let wanted = Wanted {
            ways: 1,
            within: fastest(&found).first().map_or(within, |row| step(row)),
            slack: 0.0,
            keep: false,
        };
        if some[0].bound >= wanted.within || (search.stop)() {
            break;
        }
        let some: Vec<Candidate> = some.iter().filter(|way| way.bound < wanted.within).copied().collect();
        let ways = light_enough(search, probes, &some, wanted)?;
        search.best_first(&ways, wanted, &mut found, counts)?;
    }
    let best = fastest(&found).first().map(|row| (*row).clone());
    best.map(|row| climbed(search, &row)).transpose()
}

/// Of ways those with words that they may fit with and be fast enough, the most promising first.
fn light_enough(
    search: &mut Search,
    probes: &mut Probes,
    ways: &[Candidate],
    wanted: Wanted,
) -> Result<Vec<Candidate>> {
    let mut with: Vec<(Candidate, Vec<Point>)> =
        ways.iter().map(|way| (*way, with_words(search.case, &way.point))).collect();
    // What is too large with all of its words is with any.
    let most: Vec<Point> = with.iter().filter_map(|(_, with)| with.last().copied()).collect();
    let fit: BTreeSet<Point> = search.probed(&most, probes)?.0.into_iter().map(|(_, point)| point).collect();
    with.retain(|(_, with)| with.last().is_some_and(|most| fit.contains(most)));
    let of: BTreeMap<Point, Candidate> =
        with.into_iter().flat_map(|(way, with)| with.into_iter().map(move |point| (point, way))).collect();
    let all: Vec<Point> = of.keys().copied().collect();
    let mut all = search.bounded(search.probed(&all, probes)?.0);
    all.retain(|with| with.bound.max(of[&with.point].bound) < wanted.within);
    // Nor is any faster with words than without, and one plan tells of all sets of them.
    let plain: BTreeSet<Point> = all.iter().map(|with| of[&with.point].point).collect();
    let plain: Vec<Point> = plain.into_iter().collect();
    let rows = search.cost(&plain, 0.0, false)?;
    let steps: BTreeMap<Point, f64> =
        plain.iter().zip(&rows).filter_map(|(point, row)| Some((*point, row.as_ref()?.step_time_s?))).collect();
    for with in &mut all {
        let way = of[&with.point];
        with.bound = with.bound.max(way.bound).max(steps.get(&way.point).copied().unwrap_or(0.0));
    }
    all.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.point.cmp(&b.point)));
    Ok(all)
}

/// A way with each set of words that it can have and that saves memory, all of them last.
fn with_words(case: &Case, point: &Point) -> Vec<Point> {
    let with = |words: Options| {
        let mut with = *point;
        with.par.options = both(point.par.options, words);
        (with != *point && case.workload(&with).is_ok()).then_some(with)
    };
    let has_host = case.cluster.spec.host.is_some();
    let full = point.par.recompute == Recompute::Full;
    let words = [
        (true, Options { loss_chunks: PIECES, ..Options::default() }),
        (true, Options { mlp_chunks: PIECES, ..Options::default() }),
        (has_host && full, Options { offload_activations: true, ..Options::default() }),
        (has_host, Options { offload_optimizer: true, ..Options::default() }),
    ];
    let words = words.into_iter().filter(|(is, word)| *is && with(*word).is_some());
    let mut sets = vec![Options::default()];
    for (_, word) in words {
        sets.extend(sets.clone().into_iter().map(|set| both(set, word)));
    }
    sets.into_iter().filter_map(with).collect()
}

#[cfg(test)]
mod tests {
    use super::super::row::row;
    use super::super::tests::{dense, found};
    use super::super::{Question, Space};
    use super::*;
    use crate::sweep::Batch;

    fn points(question: &Question) -> (Case, Vec<Point>) {
        let case = question.case().unwrap();
        let (points, _) = question.space.points(&case, question.seq_len[0], 64).unwrap();
        (case, points)
    }

    /// Such words were tried on the best ways alone, which need none: 95.6 s here, where there is a step of 93.9.
    #[test]
    fn a_way_that_memory_alone_refuses_is_tried_with_words_that_save_some() {
        let space =
            Space { tp: vec![1], pp: vec![1], ulysses: vec![8], ring: vec![1, 2], zero: vec![3], ..dense().space };
        let batch = Batch::GlobalBatch(vec![64]);
        let question =
            Question { model: "llama-3-70b".into(), gpus: 512, seq_len: vec![256 << 10], batch, space, ..dense() };
        let dir = tempfile::tempdir().unwrap();
        let got = found(&question, Some(dir.path()));
        assert_eq!((got.best[0].ring, got.best[0].options.as_str()), (2, "keep-attention"));
        let first = &got.refined[0];
        assert_eq!((first.ring, first.options.as_str()), (1, "keep-attention+offload-activations"));
        assert!(got.counts.spared > 0 && step(first) < step(&got.refined[1]));
        // The slow way: every way with every set of words.
        let (case, points) = points(&question);
        let with = points.iter().flat_map(|point| with_words(&case, point));
        let rows: Vec<Row> = with.map(|point| row(&case, &point, f64::INFINITY).unwrap()).collect();
        assert!(step(first) <= step(fastest(&rows)[0]));
        // What is compared there is plain.
        let rows = std::fs::read_to_string(dir.path().join("rows.csv")).unwrap();
        assert!(rows.lines().count() > 1 && !rows.contains("offload-activations"));
    }

    #[test]
    fn words_that_save_memory_cost_time() {
        let space = Space { tp: vec![2], ulysses: vec![1], ring: vec![2], ..dense().space };
        let (case, points) = points(&Question { space, ..dense() });
        let mut tried = 0;
        for point in points.iter().step_by(3) {
            let plain = step(&row(&case, point, 0.0).unwrap());
            for with in with_words(&case, point) {
                let over = step(&row(&case, &with, 0.0).unwrap()) / plain;
                assert!(over >= 1.0, "{over} {with:?}");
                tried += 1;
            }
        }
        assert!(tried > 10, "{tried}");
    }
}
