//! What a search is asked.

use super::Space;
use crate::error::Result;
use crate::spec::{Documents, Dtype, LlmSpec};
use crate::sweep::asked::{Asked, above_zero, least, trained};
use crate::sweep::{Batch, Case};
use serde::Serialize;

/// What is asked: the contents of study.json.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Question {
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub gpus: u32,
    pub dtype: Dtype,
    pub seq_len: Vec<u64>,
    pub batch: Batch,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<String>,
    /// Packed into every sequence, again and again until it is full. None: a sequence is one document.
    #[serde(default, skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
    /// Trained without the model's modules of multi-token prediction.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_mtp: bool,
    /// How many of the fastest are found for certain.
    pub best: usize,
    /// How much faster than the last of these a way that was not costed may be, over its own step: 0.05 for 5 %. Rows hold
    /// whatever it is, so that a folder does not say it: whoever wants to know better goes on with less.
    #[serde(skip)]
    pub slack: f64,
    /// The part of a GPU's memory that every way leaves free, beside what the stack takes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub headroom: f64,
    pub space: Space,
}

fn is_zero(part: &f64) -> bool {
    *part == 0.0
}

impl Question {
    /// The model that is trained.
    pub fn spec(&self) -> Result<LlmSpec> {
        trained(&self.model, self.no_mtp)
    }

    pub fn case(&self) -> Result<Case> {
        let Question { cluster, stack, gpus, dtype, documents, routing, .. } = self;
        let (model, routing) = (self.spec()?, routing.as_deref());
        let case = Asked { model, cluster, stack, gpus: *gpus, dtype: *dtype, documents, routing }.case()?;
        Ok(case.leaving(self.headroom))
    }

    /// What no search could be made of.
    pub fn check(&self) -> Result<()> {
        let space = &self.space;
        let lists = [
            ("tp", least(&space.tp)),
            ("pp", least(&space.pp)),
            ("vp", least(&space.vp)),
            ("ulysses", least(&space.ulysses)),
            ("ring", least(&space.ring)),
            ("ep", least(&space.ep)),
            ("seq_len", least(&self.seq_len)),
            ("batch", self.batch.smallest()),
            ("micro_batch", least(&space.micro_batch)),
        ];
        above_zero("search", &lists)
    }
}
