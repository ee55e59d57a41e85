//! The acts of a plan: what each op of a line does on each class of ranks. That is how long kernels take, who meets
//! whom and how long the bytes of a meeting are under way, and what all of it counts.
//!
//! * `machine`: what a plan is interpreted on.
//! * `deeds`: what distinct ops do on each class, read by sheets and by engines that go through events.
//! * `sheet`, `draft`: the acts of all classes on a line, which are deeds with whom they meet, read and written. `form`:
//!   the sheet of a structure, to be filled in for other sizes. `tallies`: what ops add up to.
//! * `kernels`, `positions`: how long kernels take, and what masks leave of attention on each rank. `cold`: what of
//!   their operands a core's caches no longer have.
//! * `meetings`, `ports`: who meets whom, how long bytes are under way, and through which ports.
//! * `exchange`, `host`: rows of experts; what goes to and from the host.
//! * `charges`: what bytes lose on a port to those posted later.
//! * `waits`: what a gap between kernels is charged to. `gaps`: the same of a plan that ran.
//! * `stamp`: when something was over, and what brought it about. `stretch`: work beside what holds a share of its
//!   means.
//! * `threads`: ranks on the threads of one machine.

pub mod charges;
mod cold;
mod deeds;
mod draft;
mod exchange;
mod form;
pub mod gaps;
mod host;
mod kernels;
mod machine;
mod meetings;
mod ports;
mod positions;
mod sheet;
pub mod stamp;
pub mod stretch;
mod tallies;
pub mod threads;
pub mod waits;

pub use cold::{cold_bytes, sharing};
pub use deeds::{Deed, Deeds, Way, Whole, together};
pub use form::Form;
pub use kernels::work_of;
pub use machine::{Machine, picoseconds, seconds};
pub use meetings::{Gang, Hop, Transit, over};
pub use ports::{PORTS, RECV, SCALE_OUT, SEND, numbers, port};
pub use sheet::{Act, End, Meeting, Sheet};
pub use tallies::{PROVENANCES, Tallies};

use crate::collective::{Algorithm, LinkTime};
use crate::error::Result;
use crate::fold::Fold;
use crate::plan::link::Line;
use crate::plan::matching::Matching;
use crate::plan::*;
use draft::Draft;
use kernels::Timed;
use meetings::Route;
use positions::Positions;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// Makes sheets and deeds, remembering what was computed before.
pub struct Acts<'a> {
    plan: &'a Plan,
    machine: Machine<'a>,
    fold: &'a Fold,
    /// The program of each class.
    program: Vec<u32>,
    /// The names of kernels met so far, by the numbers that tallies have for them.
    names: Vec<&'static str>,
    known: Known,
    positions: Positions,
    hops: FxHashMap<(u16, i32, [u64; 2]), Rc<[Hop]>>,
    exchanges: FxHashMap<exchange::Asked, exchange::Found>,
}

/// What of the acts stays true for other sizes of a plan, on the same machine.
#[derive(Default)]
pub struct Known {
    kernels: FxHashMap<(&'static str, Work, Dtype), Timed>,
    routes: FxHashMap<(u16, i32), Rc<[Route]>>,
    gangs: FxHashMap<u16, Rc<[Rc<Gang>]>>,
    links: FxHashMap<(CollectiveKind, u16, u32, u64), (LinkTime, Algorithm)>,
}

impl Known {
    /// Entries that are kept, at most; then all are forgotten.
    const MOST: usize = 1 << 16;

    /// The times of kernels alone, which hold whatever the plan.
    pub fn of_kernels(self) -> Known {
        Known { kernels: self.kernels, ..Known::default() }
    }

    fn bound(&mut self) {
        if self.kernels.len() > Self::MOST {
            self.kernels.clear();
        }
        if self.links.len() > Self::MOST {
            self.links.clear();
        }
    }
}

pub fn ctas(engine: Engine) -> u16 {
    match engine {
        Engine::Sm { ctas } => ctas,
        Engine::CopyEngine => 0,
    }
}

impl<'a> Acts<'a> {
    pub fn new(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold) -> Acts<'a> {
        let program = fold.representatives.iter().map(|&r| plan.program_of(r)).collect();
        let (names, known, positions, hops, exchanges) = Default::default();
        Acts { plan, machine, fold, program, names, known, positions, hops, exchanges }
    }

    /// Acts for other sizes of a plan that `known` holds for, its ranks all running one program.
    pub fn resume(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold, mut known: Known) -> Acts<'a> {
        known.bound();
        let (names, positions, hops, exchanges) = Default::default();
        let program = vec![0; fold.representatives.len()];
        Acts { plan, machine, fold, program, names, known, positions, hops, exchanges }
    }

    pub fn into_known(self) -> Known {
        self.known
    }

    /// Acts for ranks that all run one program, whichever of the plan's programs it is.
    pub fn of_one_program(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold) -> Acts<'a> {
        let mut acts = Acts::new(plan, machine, fold);
        acts.program.fill(0);
        acts
    }

    /// The names of kernels, by their numbers in the tallies of all sheets so far.
    pub fn kernel_names(&self) -> &[&'static str] {
        &self.names
    }

    pub fn class_of(&self, rank: u32) -> u32 {
        self.fold.class_of[rank as usize]
    }

    pub fn representative(&self, class: u32) -> u32 {
        self.fold.representatives[class as usize]
    }

    /// The acts of every class on its program's line. Errors: a leg or collective that a member does not take part in,
    /// a copy to a host's memory that the cluster says nothing of, an exchange that its library or the cluster refuses.
    pub fn sheet(&mut self, lines: &[Line], matching: &Matching) -> Result<Sheet> {
        lines.iter().for_each(|line| self.name_kernels(line));
        let (lanes, classes) = (self.plan.lanes.len(), self.fold.representatives.len());
        let mut draft = Draft::new(lanes, lines, matching, classes, self.names.len());
        let mut all = Vec::with_capacity(lines.len());
        for (program, line) in lines.iter().enumerate() {
            let once: Vec<(u32, u32)> = (0..line.nodes.len() as u32).map(|node| (node, 1)).collect();
            let deeds = self.deeds(program as u32, line, &once)?;
            draft.write(self, line, &deeds)?;
            all.push(deeds);
        }
        for (line, deeds) in lines.iter().zip(&all) {
            draft.join(self, line, deeds)?;
        }
        Ok(draft.finish())
    }

    /// Numbers the kernels of a line that have no number yet.
    fn name_kernels(&mut self, line: &Line) {
        for node in &line.nodes {
            if let OpKind::Compute { kernel, .. } = &node.op.kind
                && !self.names.contains(&kernel.name())
            {
                self.names.push(kernel.name());
            }
        }
    }
}
