//! The best ways once more, event by event: ranks that share a link get in each other's way there, which the walk of one
//! rank, all that it sends at full rate, does not tell.

use super::{Found, Search, step};
use crate::error::Result;
use crate::fold;
use crate::report::Row;
use crate::sim::{Effort, SharedLink, simulate};
use crate::strategy::guard::ops_of_a_rank;
use crate::sweep::{Case, Point};
use rayon::prelude::*;
use serde::Serialize;
use std::ops::Deref;

/// Ops that ways of a list are played with, one rank of each class counted: a core goes through a million in a second or two.
const MOST_OPS: f64 = 4e6;
/// Part of a step that is rounding: stages of a pipeline come to a port in another order here than there.
const ROUNDING: f64 = 2e-3;
/// Part of a step from which on what is played is another answer.
const APART: f64 = 0.05;

/// A way, and what its step takes when it is played event by event.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Played {
    #[serde(flatten)]
    pub row: Row,
    /// The step, s. None where it was not played.
    pub simulated_s: Option<f64>,
    /// Why it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_simulated: Option<String>,
    /// The link between ranks that delayed most, where any did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_link: Option<SharedLink>,
}

impl Deref for Played {
    type Target = Row;

    fn deref(&self) -> &Row {
        &self.row
    }
}

impl Played {
    fn new(row: Row) -> Played {
        Played { row, simulated_s: None, not_simulated: None, shared_link: None }
    }

    /// The step as it is played, over what one rank's walk says, less one; none where they are the same but for rounding.
    fn beyond(&self) -> Option<f64> {
        self.simulated_s.map(|s| s / step(self) - 1.0).filter(|over| over.abs() > ROUNDING)
    }

    /// The same where that is another answer.
    pub fn apart(&self) -> Option<f64> {
        self.beyond().filter(|over| over.abs() > APART)
    }

    /// What the way is told from others by, s.
    fn time(&self) -> f64 {
        step(self) * (1.0 + self.beyond().unwrap_or(0.0))
    }
}

impl Found {
    /// The fastest of all, with words or without: of two that were played by what is played.
    pub fn fastest(&self) -> Option<&Played> {
        fastest(&self.best, &self.refined)
    }
}

/// See [`Found::fastest`].
pub(super) fn fastest<'w>(best: &'w [Played], refined: &'w [Played]) -> Option<&'w Played> {
    let faster = |plain: &Played, with: &Played| match (plain.simulated_s, with.simulated_s) {
        (Some(_), Some(_)) => plain.time() < with.time(),
        _ => step(plain) < step(with),
    };
    let plain = best.first().filter(|plain| refined.first().is_none_or(|with| faster(plain, with)));
    plain.or(refined.first())
}

/// Plays ways, the fastest first, until they have more ops than are played: those are left out. The ways that were played
/// change places among each other.
pub(super) fn played(search: &Search, rows: Vec<Row>) -> Vec<Played> {
    let case = search.case;
    let ops: Vec<Result<f64>> = rows.par_iter().map(|row| ops(case, row)).collect();
    let mut left = MOST_OPS;
    let room = |ops: Result<f64>| match ops {
        Ok(ops) if ops > left => Err(format!("{ops:.1e} ops of its kinds of ranks are more than are simulated here")),
        Ok(ops) => {
            left -= ops;
            Ok(())
        }
        Err(why) => Err(why.to_string()),
    };
    let room: Vec<std::result::Result<(), String>> = ops.into_iter().map(room).collect();
    let all = rows.into_par_iter().zip(room).map(|(row, room)| match room {
        _ if (search.stop)() => Played::new(row),
        Ok(()) => play(case, row),
        Err(why) => Played { not_simulated: Some(why), ..Played::new(row) },
    });
    in_order(all.collect())
}

fn in_order(mut all: Vec<Played>) -> Vec<Played> {
    let mut known: Vec<Played> = all.iter().filter(|way| way.simulated_s.is_some()).cloned().collect();
    known.sort_by(|a, b| a.time().total_cmp(&b.time()));
    let places = all.iter_mut().filter(|way| way.simulated_s.is_some());
    places.zip(known).for_each(|(place, way)| *place = way);
    all
}

/// Ops of a rank of each class, as many as the longest has.
fn ops(case: &Case, row: &Row) -> Result<f64> {
    let plan = case.plan(&Point::of_row(row))?;
    Ok(ops_of_a_rank(&plan) * fold::refine(&plan, &case.cluster).representatives.len() as f64)
}

fn play(case: &Case, row: Row) -> Played {
    let effort = Effort { why: true, ..Effort::SUMS };
    let found = case.plan(&Point::of_row(&row)).and_then(|plan| simulate(&plan, case.machine(), &[], effort));
    match found {
        Ok(found) => Played {
            simulated_s: Some(found.timeline.step.value()),
            shared_link: found.shared.into_iter().next(),
            ..Played::new(row)
        },
        // It has a time all the same: such a plan is costed, and not simulated.
        Err(why) => Played { not_simulated: Some(why.to_string()), ..Played::new(row) },
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{dense, found};
    use super::super::{Question, Space};
    use super::*;
    use crate::spec::{Recompute, Schedule};
    use serde_json::Value;
    use std::path::Path;
    use std::slice::from_ref;

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

    /// The eight GPUs of a node share one NIC of 64 Gb/s.
    fn one_nic(dir: &Path) -> String {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/models/cluster/dgx-h100.json");
        let mut spec: Value = serde_json::from_str(&std::fs::read_to_string(shipped).unwrap()).unwrap();
        let out = spec["scale_out"].as_object_mut().unwrap();
        out.insert("nics_per_node".into(), 1.into());
        out.remove("several");
        for (rate, value) in [("raw", "8 GB/s"), ("achieved", "7.52 GB/s"), ("p2p", "7.2 GB/s")] {
            out[rate]["value"] = value.into();
        }
        let path = dir.join("one-nic.json");
        std::fs::write(&path, spec.to_string()).unwrap();
        path.display().to_string()
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

    /// What was not played stays where it is, and others go round it.
    #[test]
    fn what_is_too_long_to_be_played_keeps_its_place() {
        let way = |s: f64, simulated_s: Option<f64>| {
            let row = Row { step_time_s: Some(s), ..Row::default() };
            Played { simulated_s, ..Played::new(row) }
        };
        let all = [way(1.0, Some(2.0)), way(1.1, None), way(1.2, Some(1.4)), way(1.3, Some(1.3001))];
        let steps: Vec<f64> = in_order(all.to_vec()).iter().map(|way| step(way)).collect();
        assert_eq!(steps, [1.3, 1.1, 1.2, 1.0]);
        let of_two = |plain: &Played, with: &Played| step(fastest(from_ref(plain), from_ref(with)).unwrap());
        assert_eq!((of_two(&all[2], &all[0]), of_two(&all[1], &all[0]), of_two(&all[3], &all[2])), (1.2, 1.0, 1.3));
        assert!(fastest(&[], &[]).is_none());
    }
}
