//! What a search brings.

use super::{Nearest, Numerics, Value};
use crate::error::Reason;
use crate::sweep::played::{Played, fastest};
use serde::Serialize;
use std::collections::BTreeMap;

/// What came of one length.
#[derive(Debug, Clone, Serialize)]
pub struct Found {
    pub seq_len: u64,
    pub global_batch: u64,
    pub counts: Counts,
    /// The fastest that fit, of the plain ways; as many as were asked for, in the order in which they are when they are played.
    pub best: Vec<Played>,
    /// The best of these with words that leave their degrees alone, where any helps, and a faster way that fits with words
    /// that save memory, where there is one. In order as the others.
    pub refined: Vec<Played>,
    /// The fastest of all with words that change its numerics.
    pub numerics: Vec<Numerics>,
    /// What it costs to choose otherwise: the fastest way found with each value of each choice, by the walk of one rank.
    pub values: Vec<Value>,
    /// Where nothing fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearest: Option<Nearest>,
}

impl Found {
    /// The fastest of all, with words or without: of two that were played by what is played.
    pub fn fastest(&self) -> Option<&Played> {
        fastest(&self.best, &self.refined)
    }
}

/// Ways by what became of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Combinations that cannot be built, by the kind of reason.
    pub refused: BTreeMap<String, usize>,
    /// Why the first of the kind that most are of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_why: Option<Reason>,
    pub ways: usize,
    /// Plans that their bounds rest on.
    pub probes: usize,
    /// Not costed, since weights and activations that are certain do not fit.
    pub too_large: usize,
    /// Not costed, since no way is faster than its bound.
    pub too_slow: usize,
    pub costed: usize,
    /// Costed, but not to be had: memory.
    pub do_not_fit: usize,
    /// Not costed after all: more ops than are laid out.
    pub too_long: usize,
    /// Why the first of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub too_long_why: Option<Reason>,
    /// Not looked at: it was told to stop.
    #[serde(skip_serializing_if = "is_none")]
    pub left: usize,
    /// Costed besides, to say what each value of each choice costs; known ones among them.
    pub beside: usize,
    /// Costed with words that save memory, where nothing else was lacking.
    pub spared: usize,
    /// The least that a costed way took, as a multiple of its bound: below 1 a bound was wrong.
    pub nearest_bound: Option<f64>,
}

fn is_none(n: &usize) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::super::tests::{dense, found};
    use super::super::{Question, Space, step};
    use crate::spec::{Recompute, Schedule};
    use crate::sweep::played::tests::one_nic;

    /// A pipeline over four nodes, in rounds of chunks or not.
    fn question(cluster: &str) -> Question {
        let space = Space {
            tp: vec![2],
            pp: vec![4],
            ulysses: vec![1],
            ring: vec![1],
            zero: vec![1],
            recompute: vec![Recompute::Full],
            schedules: vec![Schedule::OneF1B, Schedule::Interleaved],
            ..dense().space
        };
        Question { cluster: cluster.into(), gpus: 32, space, ..dense() }
    }

    /// Chunks have twice as much to send; the search took them for the faster way, and they are not.
    #[test]
    fn on_a_shared_nic_the_best_is_what_is_best_when_played() {
        let dir = tempfile::tempdir().unwrap();
        let got = found(&question(&one_nic(dir.path())), None);
        let first = &got.best[0];
        let second = got.best.iter().min_by(|a, b| step(a).total_cmp(&step(b))).unwrap();
        assert_eq!((first.vp, second.vp), (1, 2));
        assert!(step(first) > step(second) && first.time() < second.time(), "{first:?} {second:?}");
        let link = second.shared_link.as_ref().unwrap();
        assert!(second.apart().is_some_and(|over| over > 0.05) && link.link.starts_with("NIC 0"), "{link:?}");
        let fastest = got.fastest().unwrap();
        assert!(got.best.iter().chain(&got.refined).all(|way| fastest.time() <= way.time()));
        assert!(got.refined.windows(2).all(|two| two[0].time() <= two[1].time()), "{:?}", got.refined);
    }

    #[test]
    fn with_a_nic_for_each_gpu_nothing_changes() {
        let got = found(&question("dgx-h100"), None);
        assert!(got.best.len() > 1 && !got.refined.is_empty());
        for ways in [&got.best, &got.refined] {
            assert!(ways.iter().all(|way| way.simulated_s.is_some() && way.apart().is_none()), "{ways:?}");
            assert!(ways.windows(2).all(|two| step(&two[0]) <= step(&two[1])), "{ways:?}");
        }
        assert_eq!(got.fastest(), got.refined.first());
    }
}
