//! One case, predicted.

use crate::published::row::case::Case;
use crate::report::record::Like;
use serde::Serialize;

/// What was found for a case, before it is held against what was measured.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prediction {
    pub measured: Option<f64>,
    pub predicted: Option<f64>,
    pub unit: String,
    pub cluster: String,
    pub stack: String,
    /// Degrees, batch and choices, in words.
    pub split: String,
    /// What the predicted step is made of; of training runs.
    pub parts: String,
    /// Why there is no prediction.
    pub why: Vec<String>,
    /// The memory that the plan lacks, if so.
    pub memory: Option<String>,
    /// GiB of the fullest GPU at its fullest moment, as the source counts them.
    pub mem_measured_gib: Option<f64>,
    pub mem_predicted_gib: Option<f64>,
    /// What it has in common with other runs; of training runs.
    pub like: Option<Like>,
}

/// A line of the table.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct Verdict {
    pub id: String,
    pub group: String,
    pub measured: Option<f64>,
    pub predicted: Option<f64>,
    pub unit: String,
    /// predicted / measured - 1.
    pub rel_error: Option<f64>,
    /// Why there is no prediction, or what is to be known about it.
    pub why: String,
    pub cluster: String,
    pub stack: String,
    pub split: String,
    /// What the predicted step is made of, the largest part first; empty for cases that are no whole steps.
    pub parts: String,
    /// The fullest moment of a GPU's memory, where the source states it.
    pub mem_measured_gib: Option<f64>,
    pub mem_predicted_gib: Option<f64>,
    /// predicted / measured - 1.
    pub mem_rel_error: Option<f64>,
    /// For the record; names of software are no finding.
    #[serde(skip)]
    pub like: Option<Like>,
}

impl Verdict {
    pub fn of(case: &Case, found: Prediction) -> Verdict {
        let mut why = found.why;
        why.extend(found.memory);
        let error = |(predicted, measured): (f64, f64)| predicted / measured - 1.0;
        let rel_error = found.predicted.zip(found.measured).map(error);
        Verdict {
            id: case.id.clone(),
            group: case.group.clone(),
            measured: found.measured,
            predicted: found.predicted,
            unit: found.unit,
            rel_error,
            why: why.join("; ").replace('\n', " "),
            cluster: found.cluster,
            stack: found.stack,
            split: found.split,
            parts: found.parts,
            mem_measured_gib: found.mem_measured_gib,
            mem_predicted_gib: found.mem_predicted_gib,
            mem_rel_error: found.mem_predicted_gib.zip(found.mem_measured_gib).map(error),
            like: found.like,
        }
    }

    /// Its share in a summary: a missing prediction is wholly wrong.
    pub fn error(&self) -> f64 {
        self.rel_error.map_or(1.0, f64::abs)
    }
}
