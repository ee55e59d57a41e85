//! The discrete-event interpreter: what shares a link, who waits for whom, and what a slow or dead part costs.
//!
//! It means what [`cost`](crate::cost) means, op by op, and takes its durations from the same place,
//! [`act`](crate::act): with nothing shared between ranks the two agree to the picosecond. What only time order
//! can tell is found here: an event is the end of a kernel, or of the bytes of a meeting.
//!
//! * [`script`]: a program with all calls spliced, its edges both ways, and what each distinct op does.
//! * [`engine`]: the loop. An op begins when the last thing it waits for has ended; time is u64 picoseconds, and
//!   events of one moment are taken in the order in which they were found, so that runs repeat exactly.
//! * [`ports`]: transfers that share a port of a rank.

mod account;
pub mod collective;
mod engine;
mod meeting;
mod ports;
mod run;
mod script;
pub mod share;

pub use crate::act::Machine;
use crate::error::{Error, Result};
use crate::fold::{self, Fold};
use crate::plan::Plan;
use crate::timeline::Timeline;

/// How much work to spare, and what to keep. The answer is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Follow one rank of each class of equal ranks.
    pub fold: bool,
    /// Keep every op's start and end.
    pub spans: bool,
}

impl Effort {
    pub const SUMS: Effort = Effort { fold: true, spans: false };
    pub const SPANS: Effort = Effort { fold: true, spans: true };
}

/// What a simulation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulated {
    pub timeline: Timeline,
    /// Events that were gone through.
    pub events: u64,
    /// Transfers that others on a port or a link slowed down.
    pub slowed: u64,
}

/// Plays a plan event by event. Errors: a dtype the device has no peak for, a plan that deadlocks.
pub fn simulate(plan: &Plan, machine: Machine, effort: Effort) -> Result<Simulated> {
    if machine.devices.is_some() {
        return Err(Error::plan("ranks that share a device are costed, not simulated; give each a device of its own"));
    }
    let fold = if effort.fold { fold::refine(plan, machine.cluster) } else { fold::trivial(plan.ranks()) };
    play(plan, machine, &fold, effort)
}

fn play(plan: &Plan, machine: Machine, fold: &Fold, effort: Effort) -> Result<Simulated> {
    let scripts = script::write(plan, machine, fold)?;
    let mut engine = engine::Engine::new(plan, machine, fold, &scripts, effort);
    engine.run()?;
    Ok(engine.found())
}
