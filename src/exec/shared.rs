//! What all ranks of a run share and nobody changes.

use super::inject::Injection;
use super::transport::Hub;
use super::turns::Turns;
use crate::plan::Plan;
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::{Life, SlotId};
use std::time::Instant;

pub struct Shared<'p> {
    pub plan: &'p Plan,
    pub lines: &'p [Line<'p>],
    pub matching: &'p Matching,
    /// Per program: the ops that wait for each op.
    pub next: &'p [Vec<Vec<u32>>],
    pub lives: &'p [Vec<Vec<Vec<Life>>>],
    pub turns: &'p Turns,
    pub hub: Hub,
    /// The step, counted from 1, and when it began.
    pub step: u64,
    pub zero: Instant,
    /// Slots whose contents are kept at the end of each of their lives.
    pub watched: Vec<SlotId>,
    /// Slots whose contents are kept at the end of the step.
    pub kept: Vec<SlotId>,
    /// Whether slots are filled with NaN after their last use.
    pub poison: bool,
    /// Whether logits are kept.
    pub logits: bool,
    pub atoms: &'p AtomTable,
    /// What goes wrong in this step.
    pub inject: Option<Injection>,
    /// Of the plan.
    pub hash: &'p str,
}
