//! The best ways once more, event by event: ranks that share a link get in each other's way there, which the walk of one
//! rank, all that it sends at full rate, does not tell.

use super::{Case, Point};
use crate::cluster::Cluster;
use crate::error::Result;
use crate::fold;
use crate::plan::Plan;
use crate::report::Row;
use crate::report::human::{percent, seconds};
use crate::sim::{Effort, SharedLink, simulate};
use crate::strategy::guard::ops_of_a_rank;
use rayon::prelude::*;
use serde::Serialize;
use std::ops::Deref;

/// Ops, one rank of each class counted, that one plan is played with beside its cost: a core goes through a million in a second
/// or a few.
const FEW_OPS: f64 = 2.5e5;
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
    pub fn new(row: Row) -> Played {
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

    /// How much longer the step is than by the walk of one rank, of which `that` is to be known, and on which link ranks meet
    /// most; none where it is no other answer.
    pub fn crowded(&self, that: &str) -> Option<String> {
        let over = self.apart()?;
        let link = self.shared_link.as_ref().map(|shared| {
            let others = if shared.links > 1 { format!(" and {} like it", shared.links - 1) } else { String::new() };
            format!(": ranks get in each other's way, most on {}{others}", shared.link)
        });
        Some(format!(
            "{} {} than by the walk of one rank, {that}{}; `foretrain simulate --explain` of it says where",
            percent(over.abs()),
            if over > 0.0 { "more" } else { "less" },
            link.unwrap_or_default()
        ))
    }

    /// The same of a step whose cost is told, or that nobody knows.
    pub fn beside_cost(&self) -> Option<String> {
        if let Some(why) = &self.not_simulated {
            return Some(format!(
                "GPUs share links, on which ranks may get in each other's way, and the step is told by the walk of one rank: {why}; \
                 `foretrain simulate` says more"
            ));
        }
        let over = self.crowded("which is what is told here")?;
        Some(format!("simulated, the step takes {}, {over}", seconds(self.simulated_s?)))
    }

    /// What the way is told from others by, s.
    pub(super) fn time(&self) -> f64 {
        step(self) * (1.0 + self.beyond().unwrap_or(0.0))
    }
}

/// What is known of a way's step.
pub(super) fn step(row: &Row) -> f64 {
    row.step_time_s.unwrap_or(f64::INFINITY)
}

/// The fastest of all, with words or without: of two that were played by what is played.
pub(super) fn fastest<'w>(best: &'w [Played], refined: &'w [Played]) -> Option<&'w Played> {
    let faster = |plain: &Played, with: &Played| match (plain.simulated_s, with.simulated_s) {
        (Some(_), Some(_)) => plain.time() < with.time(),
        _ => step(plain) < step(with),
    };
    let plain = best.first().filter(|plain| refined.first().is_none_or(|with| faster(plain, with)));
    plain.or(refined.first())
}

/// Plays ways, the fastest first, until they have more than `most` ops, one rank of each class counted: those are left out. The
/// ways that were played change places among each other.
pub(super) fn played(case: &Case, stop: &(dyn Fn() -> bool + Sync), most: f64, rows: Vec<Row>) -> Vec<Played> {
    let ops: Vec<Result<f64>> = rows.par_iter().map(|row| ops(case, row)).collect();
    let mut left = most;
    let room = |ops: Result<f64>| match ops {
        Ok(ops) if ops > left => Err(too_many(ops)),
        Ok(ops) => {
            left -= ops;
            Ok(())
        }
        Err(why) => Err(why.to_string()),
    };
    let room: Vec<std::result::Result<(), String>> = ops.into_iter().map(room).collect();
    let all = rows.into_par_iter().zip(room).map(|(row, room)| match room {
        _ if stop() => Played::new(row),
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
    Ok(ops_of(case, &case.plan(&Point::of_row(row))?))
}

fn ops_of(case: &Case, plan: &Plan) -> f64 {
    ops_of_a_rank(plan) * fold::refine(plan, &case.cluster).representatives.len() as f64
}

/// Whether GPUs share the NICs of their node, or the bridge between its sockets: there the walk of one rank can be another
/// answer. Uplinks of pods are in the analytic times as far as groups alike share them.
pub(super) fn share_links(cluster: &Cluster) -> bool {
    let nics = cluster.nodes() > 1 && cluster.nics_per_rank().is_some_and(|nics| nics < 1.0);
    nics || cluster.spec.scale_up.sockets.as_ref().is_some_and(|sockets| cluster.per_node() > sockets.gpus)
}

/// The plan of a row that was costed, where GPUs share links: played, if that takes no longer than about a second.
pub fn beside(case: &Case, plan: &Plan, row: Row) -> Option<Played> {
    if row.step_time_s.is_none() || !share_links(&case.cluster) {
        return None;
    }
    let ops = ops_of(case, plan);
    if ops > FEW_OPS {
        return Some(Played { not_simulated: Some(too_many(ops)), ..Played::new(row) });
    }
    Some(of_plan(case, plan, row))
}

fn too_many(ops: f64) -> String {
    format!("{ops:.1e} ops of its kinds of ranks are more than are simulated here")
}

fn play(case: &Case, row: Row) -> Played {
    match case.plan(&Point::of_row(&row)) {
        Ok(plan) => of_plan(case, &plan, row),
        Err(why) => Played { not_simulated: Some(why.to_string()), ..Played::new(row) },
    }
}

fn of_plan(case: &Case, plan: &Plan, row: Row) -> Played {
    let effort = Effort { why: true, ..Effort::SUMS };
    match simulate(plan, case.machine(), &[], effort) {
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
pub mod tests {
    use super::*;
    use crate::spec::{LlmSpec, Parallelism};
    use serde_json::Value;
    use std::path::Path;

    /// The eight GPUs of a node share one NIC of 64 Gb/s.
    pub fn one_nic(dir: &Path) -> String {
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

    /// A pipeline whose stages are a node each: activations go one way by the NIC while gradients go the other.
    pub fn stages(cluster: &str) -> (Case, Point) {
        let case = Case::new(LlmSpec::find("llama-3-8b").unwrap(), cluster, "nccl-fa3", 64, None).unwrap();
        let par = Parallelism { pp: 8, dp: 8, zero: 1, ..Parallelism::default() };
        (case, Point { seq_len: 8192, global_batch: 128, micro_batch: 1, par })
    }

    /// Costed alone, the step was said to be up to a third shorter than it is played.
    #[test]
    fn where_gpus_share_a_nic_a_step_is_played_beside_its_cost() {
        let dir = tempfile::tempdir().unwrap();
        let of = |cluster: &str| {
            let (case, point) = stages(cluster);
            beside(&case, &case.plan(&point).unwrap(), case.row(&point).unwrap())
        };
        let played = of(&one_nic(dir.path())).unwrap();
        assert!(played.apart().is_some_and(|over| over > APART), "{:?} for {:?}", played.simulated_s, step(&played));
        let said = played.beside_cost().unwrap();
        assert!(said.starts_with("simulated, the step takes ") && said.contains("most on NIC 0 "), "{said}");
        assert_eq!(of("dgx-h100"), None);
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
        let of_two = |plain: &Played, with: &Played| {
            step(fastest(std::slice::from_ref(plain), std::slice::from_ref(with)).unwrap())
        };
        assert_eq!((of_two(&all[2], &all[0]), of_two(&all[1], &all[0]), of_two(&all[3], &all[2])), (1.2, 1.0, 1.3));
        assert!(fastest(&[], &[]).is_none());
    }
}
