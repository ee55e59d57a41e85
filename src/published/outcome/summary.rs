//! How wrong the predictions of a group are, and how often they put two ways in the right order.

use super::verdict::Verdict;
use crate::compare::stats::quantile;
use crate::published::row::case::{Case, Facts};
use crate::published::software::release;
use serde::Serialize;
use std::collections::BTreeMap;

/// Errors of a group of cases.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct Errors {
    pub group: String,
    /// Cases with a measurement.
    pub cases: usize,
    pub predicted: usize,
    /// Of |relative error|; a missing prediction counts as 100 %.
    pub median: f64,
    pub p90: f64,
    /// Median of the relative error with its sign, where predicted: above 0, predictions are too high.
    pub bias: f64,
}

/// Pairs of ways within one published set-up.
#[derive(Debug, Clone, Copy, Serialize, PartialEq, Default)]
pub struct Ordering {
    pub pairs: usize,
    /// Put in the right order; a missing prediction puts nothing in order.
    pub right: usize,
    pub share: Option<f64>,
}

#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct Summary {
    pub groups: Vec<Errors>,
    pub overall: Errors,
    /// Cases of which nothing could be read; they are in no group.
    pub unread: usize,
    pub ordering: Ordering,
    /// The same of the fullest GPU's memory, where sources state it: the groups, and then all.
    pub memory: Vec<Errors>,
}

impl Summary {
    /// `cases` and `verdicts` stand in the same order.
    pub fn of(cases: &[Case], verdicts: &[Verdict]) -> Summary {
        let mut groups = by_group(verdicts, |v| v.measured.map(|_| v.rel_error));
        let overall = groups.pop().unwrap_or_else(|| errors(ALL, &[]));
        let memory = by_group(verdicts, |v| v.mem_measured_gib.map(|_| v.mem_rel_error));
        let unread = cases.iter().filter(|case| matches!(case.facts, Facts::Unread(_))).count();
        Summary { groups, overall, unread, ordering: ordering(cases, verdicts), memory }
    }
}

/// The name of the line that is about every group.
const ALL: &str = "all";

/// Errors by group, and then of all, of those cases of which `of` finds something measured; none where there are none.
fn by_group(verdicts: &[Verdict], of: impl Fn(&Verdict) -> Option<Option<f64>>) -> Vec<Errors> {
    let mut groups: BTreeMap<&str, Vec<Option<f64>>> = BTreeMap::new();
    for (verdict, error) in verdicts.iter().filter_map(|v| Some((v, of(v)?))) {
        groups.entry(&verdict.group).or_default().push(error);
    }
    let all: Vec<Option<f64>> = groups.values().flatten().copied().collect();
    let mut found: Vec<Errors> = groups.iter().map(|(name, group)| errors(name, group)).collect();
    found.extend((!all.is_empty()).then(|| errors(ALL, &all)));
    found
}

/// `group`: relative errors with their signs; none, for a missing prediction, is wholly wrong.
fn errors(name: &str, group: &[Option<f64>]) -> Errors {
    let mut absolute: Vec<f64> = group.iter().map(|error| error.map_or(1.0, f64::abs)).collect();
    absolute.sort_by(f64::total_cmp);
    let mut signed: Vec<f64> = group.iter().copied().flatten().collect();
    signed.sort_by(f64::total_cmp);
    Errors {
        group: name.into(),
        cases: group.len(),
        predicted: signed.len(),
        median: quantile(&absolute, 0.5),
        p90: quantile(&absolute, 0.9),
        bias: quantile(&signed, 0.5),
    }
}

fn ordering(cases: &[Case], verdicts: &[Verdict]) -> Ordering {
    let mut setups: BTreeMap<String, Vec<(Way, &Verdict)>> = BTreeMap::new();
    for (case, verdict) in cases.iter().zip(verdicts).filter(|(_, v)| v.measured.is_some()) {
        let (setup, way) = setup_and_way(case, &verdict.unit);
        setups.entry(setup).or_default().push((way, verdict));
    }
    let mut found = Ordering::default();
    for members in setups.values() {
        for (i, a) in members.iter().enumerate() {
            members[i + 1..].iter().for_each(|b| count_pair(a, b, &mut found));
        }
    }
    found.share = (found.pairs > 0).then(|| found.right as f64 / found.pairs as f64);
    found
}

/// What distinguishes two ways in one set-up, and what a step of each is for: times of different batches are
/// compared a sequence.
struct Way {
    name: String,
    scale: f64,
}

fn count_pair(a: &(Way, &Verdict), b: &(Way, &Verdict), found: &mut Ordering) {
    let of = |v: Option<f64>, way: &Way| v.map(|v| v / way.scale);
    let (Some(ma), Some(mb)) = (of(a.1.measured, &a.0), of(b.1.measured, &b.0)) else { return };
    // Equal ones have no order.
    if a.0.name == b.0.name || ma == mb {
        return;
    }
    found.pairs += 1;
    let predicted = of(a.1.predicted, &a.0).zip(of(b.1.predicted, &b.0));
    found.right += usize::from(predicted.is_some_and(|(pa, pb)| (pa < pb) == (ma < mb) && pa != pb));
}

fn setup_and_way(case: &Case, unit: &str) -> (String, Way) {
    match &case.facts {
        Facts::Training(t) => {
            let setup = format!(
                "{:?}",
                (&t.gpu, t.gpus, &t.interconnect, (&t.model, t.layers, t.hidden, t.heads), t.seq, &t.precision, unit)
            );
            let name = format!(
                "{:?}",
                (
                    // A later release of a system is no other way to do the same, nor is what was measured on another day.
                    release::without(&t.system),
                    (t.tp, t.pp, t.vp, t.cp),
                    (t.ulysses, t.ring),
                    (&t.zero, &t.recompute),
                    t.micro_batch
                )
            );
            let scale = if unit == "s" { t.global_batch.unwrap_or(1) as f64 } else { 1.0 };
            (setup, Way { name, scale })
        }
        Facts::Attention(a) => {
            let model = (&a.model, a.batch, a.seq, a.heads, a.kv_heads, a.head_dim, &a.documents);
            let setup = format!("{:?}", (&a.gpu, a.gpus, a.nodes, &a.link, model, a.causal, &a.pass, unit));
            let name =
                format!("{:?}", (&a.family, &a.variant, (a.ulysses, a.ring), &a.packing, &a.implementation, &a.kernel));
            (setup, Way { name, scale: 1.0 })
        }
        // Rows of a table differ by their bytes; none is another way to do the same.
        Facts::Collective(c) => {
            (format!("{:?}", (&c.op, &c.gpu, c.gpus, c.bytes)), Way { name: String::new(), scale: 1.0 })
        }
        // Shapes differ; none is another way to do the same.
        Facts::Product(p) => (format!("{p:?}"), Way { name: String::new(), scale: 1.0 }),
        Facts::Unread(_) => (case.id.clone(), Way { name: String::new(), scale: 1.0 }),
        // Two libraries are two ways to do the same.
        Facts::Exchange(x) => {
            let setup = format!(
                "{:?}",
                (&x.gpu, (x.ranks, x.node), (x.tokens, x.hidden, x.topk, x.experts), (x.part, x.element), x.unit)
            );
            (setup, Way { name: format!("{} {:?}", x.library, x.sms), scale: 1.0 })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::row::case::Training;

    fn pair(batch: u64, tp: u32, measured: f64, predicted: Option<f64>) -> (Case, Verdict) {
        let run = Training { global_batch: Some(batch), tp: Some(tp), ..Training::default() };
        let case = Case { id: String::new(), group: "g".into(), facts: Facts::Training(Box::new(run)) };
        let found = crate::published::outcome::verdict::Prediction {
            measured: Some(measured),
            predicted,
            unit: "s".into(),
            ..Default::default()
        };
        let verdict = Verdict::of(&case, found);
        (case, verdict)
    }

    #[test]
    fn a_missing_prediction_is_wholly_wrong() {
        let (cases, verdicts): (Vec<_>, Vec<_>) =
            [pair(1, 1, 1.0, Some(1.1)), pair(1, 2, 2.0, Some(1.8)), pair(1, 4, 3.0, None)].into_iter().unzip();
        let found = Summary::of(&cases, &verdicts);
        assert!((found.overall.median - 0.1).abs() < 1e-12 && found.overall.p90 > 0.8);
        assert_eq!((found.overall.cases, found.overall.predicted), (3, 2));
        // 1 before 2 is right; nobody knows about 3.
        assert_eq!((found.ordering.pairs, found.ordering.right), (3, 1));
    }

    #[test]
    fn steps_of_different_batches_are_compared_a_sequence() {
        let (cases, verdicts): (Vec<_>, Vec<_>) =
            [pair(8, 1, 4.0, Some(4.0)), pair(1, 2, 1.0, Some(0.6))].into_iter().unzip();
        let found = Summary::of(&cases, &verdicts).ordering;
        assert_eq!((found.pairs, found.right), (1, 1));
    }

    #[test]
    fn releases_of_a_system_are_one_way() {
        let of = |system: &str, tp: u32| {
            let (mut case, verdict) = pair(1, tp, f64::from(tp), Some(1.0));
            if let Facts::Training(run) = &mut case.facts {
                run.system = system.into();
            }
            (case, verdict)
        };
        let rows = [of("NeMo 26.02", 1), of("NeMo 26.04.01", 1), of("NeMo 26.04.01", 2), of("another 1.1", 1)];
        let (cases, verdicts): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        // Each of the first two beside the third; the fourth, another system, took as long as the first two.
        assert_eq!(Summary::of(&cases, &verdicts).ordering.pairs, 3);
    }
}
