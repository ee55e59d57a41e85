//! A prediction beside a measurement of the same plan: joined op by op on (rank, path).

pub mod overlap;
pub mod stats;
pub mod validation;

use crate::timeline::{Span, Timeline};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// An op that both timelines have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pair {
    pub rank: u32,
    pub path: String,
    pub what: &'static str,
    pub predicted_s: f64,
    pub measured_s: f64,
}

/// Sums over some ops, as a mean of the ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sum {
    pub name: String,
    /// Ops of one rank.
    pub ops: f64,
    pub predicted_s: f64,
    pub measured_s: f64,
}

impl Sum {
    /// Measured over predicted; none where nothing was predicted.
    pub fn ratio(&self) -> Option<f64> {
        (self.predicted_s > 0.0).then(|| self.measured_s / self.predicted_s)
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    pub ranks: u32,
    pub predicted_step_s: f64,
    pub measured_step_s: f64,
    /// By kernel, transfer or collective, the longest measured first.
    pub by_what: Vec<Sum>,
    /// By path, those that differ most first.
    pub by_path: Vec<Sum>,
    pub only_predicted: Vec<(u32, String)>,
    pub only_measured: Vec<(u32, String)>,
    #[serde(skip)]
    pub pairs: Vec<Pair>,
}

/// Joins two timelines that have every rank's spans.
pub fn compare(predicted: &Timeline, measured: &Timeline) -> Comparison {
    let mut there: HashMap<(u32, &str), &Span> = spans(measured).map(|(r, s)| ((r, s.path.as_str()), s)).collect();
    let (mut pairs, mut only_predicted) = (vec![], vec![]);
    for (rank, span) in spans(predicted) {
        match there.remove(&(rank, span.path.as_str())) {
            Some(other) => pairs.push(Pair {
                rank,
                path: span.path.clone(),
                what: span.what,
                predicted_s: span.duration().value(),
                measured_s: other.duration().value(),
            }),
            None => only_predicted.push((rank, span.path.clone())),
        }
    }
    let mut only_measured: Vec<(u32, String)> = there.into_keys().map(|(rank, path)| (rank, path.into())).collect();
    only_measured.sort();
    let ranks = predicted.classes.len().max(measured.classes.len()) as u32;
    let mut by_what = sums(&pairs, ranks, |p| p.what);
    by_what.sort_by(|a, b| b.measured_s.total_cmp(&a.measured_s));
    let mut by_path = sums(&pairs, ranks, |p| &p.path);
    let off = |s: &Sum| (s.measured_s - s.predicted_s).abs();
    by_path.sort_by(|a, b| off(b).total_cmp(&off(a)));
    Comparison {
        ranks,
        predicted_step_s: predicted.step.value(),
        measured_step_s: measured.step.value(),
        by_what,
        by_path,
        only_predicted,
        only_measured,
        pairs,
    }
}

fn spans(timeline: &Timeline) -> impl Iterator<Item = (u32, &Span)> {
    timeline.classes.iter().flat_map(|class| class.spans.iter().map(|span| (class.rank, span)))
}

fn sums<'a>(pairs: &'a [Pair], ranks: u32, name: impl Fn(&'a Pair) -> &'a str) -> Vec<Sum> {
    let mut all: BTreeMap<&str, Sum> = BTreeMap::new();
    let share = 1.0 / f64::from(ranks.max(1));
    for pair in pairs {
        let key = name(pair);
        let empty = Sum { name: key.into(), ops: 0.0, predicted_s: 0.0, measured_s: 0.0 };
        let sum = all.entry(key).or_insert(empty);
        sum.ops += share;
        sum.predicted_s += pair.predicted_s * share;
        sum.measured_s += pair.measured_s * share;
    }
    all.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Class, Usage};
    use crate::units::Seconds;

    fn timeline(ranks: &[&[(&str, &'static str, f64)]]) -> Timeline {
        let span = |&(path, what, s): &(&str, &'static str, f64)| Span {
            path: path.into(),
            what,
            lane: 0,
            start: Seconds::new(1.0),
            end: Seconds::new(1.0 + s),
        };
        let class = |(rank, spans): (usize, &&[(&str, &'static str, f64)])| Class {
            rank: rank as u32,
            multiplicity: 1,
            usage: Usage::default(),
            spans: spans.iter().map(span).collect(),
        };
        Timeline { step: Seconds::new(8.0), classes: ranks.iter().enumerate().map(class).collect(), lanes: vec![] }
    }

    #[test]
    fn ops_are_joined_by_rank_and_path() {
        let predicted = timeline(&[
            &[("a", "matmul", 1.0), ("b", "norm", 2.0), ("c", "add", 0.0)],
            &[("a", "matmul", 3.0), ("x", "norm", 1.0)],
        ]);
        let measured = timeline(&[
            &[("a", "matmul", 2.0), ("b", "norm", 2.0), ("c", "add", 0.5)],
            &[("a", "matmul", 6.0), ("y", "norm", 1.0)],
        ]);
        let c = compare(&predicted, &measured);
        assert_eq!((c.pairs.len(), c.ranks), (4, 2));
        assert_eq!(c.only_predicted, [(1, "x".to_string())]);
        assert_eq!(c.only_measured, [(1, "y".to_string())]);
        let first = &c.by_what[0];
        assert_eq!((first.name.as_str(), first.ops, first.ratio()), ("matmul", 1.0, Some(2.0)));
        assert_eq!(c.by_path[0].name, "a");
        assert_eq!(c.by_what.iter().find(|s| s.name == "add").unwrap().ratio(), None);
    }
}
