//! A step, and the same step with more microbatches.
//!
//! Once an iteration over the microbatches repeats the one before it, every further one adds as much as that did, and
//! what follows the last is later by as much and otherwise the same. So a sweep over batch sizes walks a step once. It
//! is exact in picoseconds, as the stride that it lengthens is.

use super::frame::Frame;
use super::ranks::settle;
use super::{Found, timeline};
use crate::act::Tallies;
use crate::plan::{Lane, Plan};
use crate::timeline::{Timeline, Usage};

/// The state of a step at its end, or what a microbatch adds to that; times in ps.
pub(super) struct Standing {
    pub end: u64,
    /// Time waited by class, for each class as [`Ranks::waits`](super::ranks::Ranks::waits) has it.
    pub waited: Vec<Vec<u64>>,
    /// How often each segment ran.
    pub runs: Vec<u64>,
}

/// A step of a plan, and what each further microbatch adds.
pub struct Series {
    /// What each segment counts when it runs once.
    pub(super) tallies: Vec<Tallies>,
    pub(super) whole: Standing,
    /// What each further microbatch adds; `None` where a step with more of them has to be walked.
    pub(super) each: Option<Standing>,
}

impl Series {
    /// Whether steps with more microbatches are known too.
    pub fn goes_on(&self) -> bool {
        self.each.is_some()
    }

    /// The timeline of the step with `more` microbatches; `plan` and `frame` are those it was costed with.
    ///
    /// Panics if there are more and the series does not go on.
    pub fn timeline(&self, frame: &Frame, plan: &Plan, more: u64) -> Timeline {
        timeline(plan, &frame.fold, self.found(frame, &plan.lanes, more))
    }

    fn found(&self, frame: &Frame, lanes: &[Lane], more: u64) -> Found {
        let with = |whole: u64, each: &dyn Fn(&Standing) -> u64| match more {
            0 => whole,
            _ => whole + more * each(self.each.as_ref().expect("a series that goes on")),
        };
        let classes = self.whole.waited.len();
        let mut sum = Tallies::new(frame.kernels.len(), lanes.len(), classes);
        for (s, (tally, &runs)) in self.tallies.iter().zip(&self.whole.runs).enumerate() {
            sum.add(tally, with(runs, &|each| each.runs[s]) as f64);
        }
        let end = with(self.whole.end, &|each| each.end);
        let usage = |class: usize| -> Usage {
            let mut usage = sum.usage(class, &frame.kernels, lanes);
            let waited = self.whole.waited[class].iter().enumerate();
            let waited: Vec<u64> = waited.map(|(lane, &ps)| with(ps, &|each| each.waited[class][lane])).collect();
            settle(&waited, end, lanes, &mut usage);
            usage
        };
        Found { end, usages: (0..classes).map(usage).collect(), spans: vec![vec![]; classes] }
    }
}
