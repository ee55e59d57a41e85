//! The analytic interpreter: when every op starts and ends, op by op, in picoseconds.
//!
//! The files in the order of reading:
//!
//! * `walk`: goes through a plan of one program, segment by segment.
//! * `track`: what the ops of a line wait for and leave behind.
//! * `ranks`: all classes side by side: when an op starts on each, and when it ends.
//! * `ports`: who holds a rank's ports, and how long a transfer takes beside them.
//! * `past`: what led to what is over, to charge waits by.
//! * `guess`: what nobody is likely to ask for any more, and is forgotten.
//! * `repeat`: iterations of a call that repeat the one before, taken in one stride.
//! * `alike`: which slots the iterations of a call touch, and whether that repeats.
//! * `across`: several programs, a walker each, and what passes between them.
//! * `steady`: the periods of several programs' steady state, taken in one stride.
//! * `frame`: what of a cost hangs on structure alone, made once.
//! * `telling`: which tensors make ops of one lane wait for another's.
//! * `sized`: a plan of some sizes on such a frame.
//! * `series`: a step, and the same step with more microbatches.
//!
//! An op starts when its edges hold, takes its duration alone on its device, and ends; a communicating op
//! starts to move when everyone it meets has started. Four things slow ops down besides:
//!
//! * a kernel bound by SMs loses those that communication kernels posted before it occupy;
//! * a transfer has 1 / (k + 1) of a port of a rank while k that were posted before it hold it, or what they leave free,
//!   and what these lose by it their lanes owe;
//! * ranks that share a device take turns;
//! * the CPU issues the ops of a rank one by one, in program order, on whichever lane: none starts before.
//!
//! Time is integer picoseconds and every duration is rounded once, so that equal things are equal.
//! Ranks that are threads of one machine share more than that: see [`threads`](crate::act::threads).
//!
//! The iterations of a call that only repeat the one before are taken in one stride, exactly (`repeat`); so are the
//! microbatches of a filled pipeline (`steady`), and a step with more microbatches than one that is known (`series`). What
//! a rank's waits are charged to is looked up in what led there (`past`). A walk over every op is the oracle they are
//! tested against.

mod across;
mod alike;
mod frame;
mod guess;
mod past;
mod ports;
mod ranks;
mod repeat;
mod series;
mod sized;
mod steady;
mod telling;
mod track;
mod walk;

pub use crate::act::Machine;
use crate::act::{seconds, stamp::in_time};
use crate::error::Result;
use crate::fold::{self, Fold};
use crate::plan::crew::Crews;
use crate::plan::link::AtomTable;
use crate::plan::{Plan, order};
use crate::timeline::{Class, Timeline, lane_labels};
pub use frame::Frame;
pub use series::Series;
use std::rc::Rc;

/// How much work to spare, and what to keep. All efforts give the same answer but for one case: with `spans`, a plan of
/// several programs is walked op by op and not crew by crew, so that stages of a pipeline may come to a port in another
/// order. That was 0.015 and 0.11 % of a step in two mixtures over 32 H800.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Walk one rank of each class of equal ranks.
    pub fold: bool,
    /// Take iterations that repeat the one before in one stride.
    pub stride: bool,
    /// Keep every op's start and end.
    pub spans: bool,
}

impl Effort {
    /// Sums only, as fast as can be.
    pub const SUMS: Effort = Effort { fold: true, stride: true, spans: false };
    /// Every op of every rank, one by one.
    pub const ALL_SPANS: Effort = Effort { fold: false, stride: false, spans: true };
}

/// Costs a plan. Errors: a plan that deadlocks, copies to a host's memory that the cluster says nothing of, an exchange
/// of experts' rows that its library or the cluster refuses, a step longer than can be told.
///
/// Panics where the device has no peak for a dtype of the plan: check them with `Roofline::peak` before.
pub fn cost(plan: &Plan, machine: Machine, effort: Effort) -> Result<Timeline> {
    if let Some(threads) = machine.kernels.threads() {
        return Ok(crate::act::threads::play(plan, machine, threads, &mut |_, s| s)?.timeline);
    }
    let (shared, in_step) = (machine.devices.is_some(), order::meets_itself(plan));
    let side_by_side = plan.programs.len() > 1 && !shared && !effort.spans;
    let crews = if side_by_side { Crews::new(plan) } else { None };
    let fold = if effort.fold && !shared && (in_step || crews.is_some()) {
        fold::refine(plan, machine.cluster)
    } else {
        fold::trivial(plan.ranks())
    };
    let atoms = Rc::new(AtomTable::new(plan)?);
    if effort.stride && !effort.spans && Frame::fits(plan, machine) {
        let frame = Frame::new(plan, &atoms, machine, fold)?;
        if let Some(timeline) = cost_on(&frame, plan, machine)? {
            return Ok(timeline);
        }
        let found = walk::run(plan, machine, &frame.fold, effort, in_step, &atoms)?;
        in_time(found.end)?;
        return Ok(timeline(plan, &frame.fold, found));
    }
    let found = match crews {
        Some(crews) => across::run(plan, machine, &fold, effort, &crews, &atoms)?,
        None => walk::run(plan, machine, &fold, effort, in_step, &atoms)?,
    };
    in_time(found.end)?;
    Ok(timeline(plan, &fold, found))
}

/// Costs a plan on the frame of its structure. Only the sizes of the plan are looked at: it need have neither names nor
/// the buffers of kernels. `None`: the frame does not fit after all, and the plan has to be walked. Errors: those of
/// [`cost`].
pub fn cost_on(frame: &Frame, plan: &Plan, machine: Machine) -> Result<Option<Timeline>> {
    Ok(series_on(frame, plan, machine)?.map(|series| series.timeline(frame, plan, 0)))
}

/// [`cost_on`] with what further microbatches add, for steps with more of them. Errors: those of [`cost`].
pub fn series_on(frame: &Frame, plan: &Plan, machine: Machine) -> Result<Option<Series>> {
    sized::run(frame, plan, machine)
}

/// What a walk found, by class.
struct Found {
    end: u64,
    usages: Vec<crate::timeline::Usage>,
    spans: Vec<Vec<crate::timeline::Span>>,
}

fn timeline(plan: &Plan, fold: &Fold, found: Found) -> Timeline {
    let classes = found.usages.into_iter().zip(found.spans).enumerate().map(|(c, (usage, spans))| Class {
        rank: fold.representatives[c],
        multiplicity: fold.multiplicity[c],
        usage,
        spans,
    });
    Timeline { step: seconds(found.end), classes: classes.collect(), lanes: lane_labels(plan) }
}
