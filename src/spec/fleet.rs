//! A fleet: how often what breaks in it, how soon that is seen, and how long a machine is gone.

use super::{Found, Origin, Sourced, check_positive, find, read};
use crate::error::{Error, Result};
use crate::units::Seconds;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetSpec {
    pub name: String,
    pub gpus_per_node: u32,
    /// Nodes times days over which the causes were counted.
    pub node_days: Sourced<f64>,
    pub causes: Vec<InterruptionKind>,
    /// From a failure until it is known which machine or program has failed.
    pub detect: Sourced<Seconds>,
    /// From then until processes and communicators stand again, before anything is loaded.
    pub restart: Sourced<Seconds>,
    /// Until a node that was taken out can be used again.
    pub repair: Sourced<Seconds>,
}

/// Interruptions of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterruptionKind {
    pub cause: String,
    /// How many there were in the fleet's `node_days`.
    pub count: f64,
    /// Another node has to step in.
    #[serde(default, skip_serializing_if = "is_false")]
    pub takes_node: bool,
    /// Somebody stops the run, and saves a checkpoint first.
    #[serde(default, skip_serializing_if = "is_false")]
    pub planned: bool,
}

fn is_false(word: &bool) -> bool {
    !word
}

impl FleetSpec {
    /// A shipped fleet by name, or a file by path.
    pub fn find(name: &str) -> Result<FleetSpec> {
        FleetSpec::from_found(&find("fleet", name)?)
    }

    /// The fields that nobody has measured.
    pub fn assumed(&self) -> Vec<&'static str> {
        let all = [
            ("node_days", self.node_days.provenance),
            ("detect", self.detect.provenance),
            ("restart", self.restart.provenance),
            ("repair", self.repair.provenance),
        ];
        all.into_iter().filter(|(_, origin)| *origin == Origin::Assumed).map(|(field, _)| field).collect()
    }

    fn from_found(found: &Found) -> Result<FleetSpec> {
        let spec: FleetSpec = read(found)?;
        check_positive(&found.file, "node_days", spec.node_days.value)?;
        check_positive(&found.file, "gpus_per_node", f64::from(spec.gpus_per_node))?;
        let wrong = |field: &str, why: String| Err(Error::spec(&found.file, field, why));
        if spec.causes.is_empty() {
            return wrong("causes", "none is named; a fleet that never fails has one with a count of 0".into());
        }
        if let Some(cause) = spec.causes.iter().find(|c| !(c.count >= 0.0 && c.count.is_finite())) {
            return wrong(
                "causes.count",
                format!("{} of {:?} is not a number of interruptions", cause.count, cause.cause),
            );
        }
        let times = [("detect", &spec.detect), ("restart", &spec.restart), ("repair", &spec.repair)];
        if let Some((field, time)) = times.iter().find(|(_, time)| !(0.0..=TEN_YEARS).contains(&time.value.value())) {
            return wrong(field, format!("{} is no time of a repair (0 to 10 years)", time.value));
        }
        Ok(spec)
    }
}

/// Seconds, to the week.
const TEN_YEARS: f64 = 10.0 * 365.25 * 86400.0;
