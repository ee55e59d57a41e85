//! The step that is trained by, as costed or as told, and what is saved of it.

use super::Flags;
use crate::cli::config::CLUSTER;
use crate::cli::software;
use crate::error::{Error, Result};
use crate::goodput::checkpoint::state_bytes;
use crate::plan::Plan;
use crate::report::human::{counted, decimal};
use crate::report::{Row, record};
use crate::spec::{ClusterSpec, FleetSpec};
use crate::sweep::{Case, played};
use crate::units::Bytes;

/// The step, and what is saved of it.
pub struct Step {
    /// In words.
    pub what: String,
    pub gpus: u32,
    /// That it was costed on.
    pub cluster: Option<ClusterSpec>,
    pub time_s: f64,
    /// Where it was costed.
    pub mfu: Option<f64>,
    pub state_bytes: f64,
    /// Of the model, where it was costed.
    pub notes: Vec<String>,
    /// Of one step, where that is known.
    pub tokens: Option<f64>,
}

/// What is to be known of a step that was costed: other software, links that ranks share, and how published runs came out.
fn predicted(case: &Case, plan: &Plan) -> Result<Vec<String>> {
    let said = record::sentence(&software::record(case)[0]).trim_end().to_string();
    let said = (!said.is_empty()).then_some(said);
    let timeline = case.cost(plan)?;
    let row = Row { step_time_s: Some(timeline.step.value()), ..Row::default() };
    let crowded = played::beside(case, plan, row).and_then(|played| played.beside_cost());
    Ok(software::notes(case, plan, &timeline)?.into_iter().chain(crowded).chain(said).collect())
}

impl Flags {
    /// As costed, or as told.
    pub fn step(&self, fleet: &FleetSpec) -> Result<Step> {
        if let (Some(time), Some(state)) = (self.step_time, self.state) {
            self.only_gpus()?;
            let gpus = self.config.gpus().ok_or_else(|| {
                Error::spec("--gpus", "gpus", "is missing; with --step-time and --state, say how many GPUs there are")
            })?;
            let what = format!("{gpus} GPUs, {} of state", decimal(state.value(), "B"));
            return Ok(Step {
                what,
                gpus,
                cluster: None,
                time_s: time.value(),
                mfu: None,
                state_bytes: state.value(),
                notes: vec![],
                tokens: None,
            });
        }
        let chosen = self.config.choose(self.plan.path(), CLUSTER)?;
        let plan = chosen.plan()?;
        let row = chosen.case.row_of(&plan)?;
        let (time_s, costed) = match (self.step_time, row.feasible, row.step_time_s) {
            (None, true, Some(costed)) => (costed, costed),
            // Whoever has timed the step knows that it runs.
            (Some(time), _, costed) => (time.value(), costed.unwrap_or(f64::NAN)),
            _ => return Err(Error::Infeasible(chosen.remedied(row)?.why)),
        };
        let options = &chosen.point.par.options;
        let state =
            self.state.map_or_else(|| state_bytes(&chosen.case.model, chosen.case.dtype, options), Bytes::value);
        // Of a step that was timed they say nothing.
        let otherwise = match self.step_time {
            None => predicted(&chosen.case, &plan)?,
            Some(_) => vec![],
        };
        let nodes = other_nodes(&chosen.case.cluster.spec, fleet);
        Ok(Step {
            what: format!("{} on {} of {}", row.model, counted(row.gpus, "GPU"), row.cluster),
            gpus: row.gpus,
            cluster: Some(chosen.case.cluster.spec.clone()),
            time_s,
            // A step that takes longer than costed uses the GPUs less.
            mfu: row.mfu.map(|mfu| mfu * costed / time_s).filter(|mfu| mfu.is_finite()),
            state_bytes: state,
            notes: chosen.notes().into_iter().chain(nodes).chain(otherwise).collect(),
            tokens: Some(row.global_batch as f64 * row.seq_len as f64),
        })
    }

    /// Where step and state are told, nothing is costed. Errors: flags that only a costed step has a use for.
    fn only_gpus(&self) -> Result<()> {
        if self.plan.path().is_none() && !self.config.says_more_than_gpus() {
            return Ok(());
        }
        let why = "with --step-time and --state no step is costed: of the flags of a configuration only --gpus is used; leave \
                   the others (--model, --tp, --seq-len, --plan ..) out, or leave --step-time or --state out";
        Err(Error::spec("the command line", "configuration", why))
    }
}

/// What fails with one, stands by and is repaired is what the fleet calls a node.
fn other_nodes(cluster: &ClusterSpec, fleet: &FleetSpec) -> Option<String> {
    let [own, of_fleet] = [cluster.gpus_per_node, fleet.gpus_per_node];
    (own != of_fleet).then(|| {
        format!(
            "nodes: failures, spares and repairs are counted by {of_fleet} GPUs, as fleet {} has them, where {} has {own} to a \
             node; if more go down with one, give a --fleet of its own",
            fleet.name, cluster.name
        )
    })
}
