//! What all ranks of a run share and nobody changes.

use super::arena::{Arena, Data, Part};
use super::inject::Injection;
use super::spares::Spares;
use super::transport::Hub;
use super::turns::Turns;
use crate::collective::forward::{self, Round};
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::{Life, SlotId};
use crate::plan::{ExchangeAlgo, OpKind, Phase, Plan};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Barrier, OnceLock};
use std::time::Instant;

/// The messages of every exchange, by the plan's number of its route.
pub type Rounds = FxHashMap<(u32, ExchangeAlgo, Phase), Arc<Vec<Round>>>;

/// The messages of every exchange, found before anything is timed: who hands which rows to whom is known of a route
/// before its rows come.
pub fn rounds(plan: &Plan, lines: &[Line]) -> Rounds {
    let mut all = Rounds::default();
    for node in lines.iter().flat_map(|line| &line.nodes) {
        let OpKind::Exchange { route, algo, phase, .. } = &node.op.kind else { continue };
        for number in *route..*route + plan.routes_at_once() {
            let of = &plan.routes[number as usize];
            if of.is_listed() {
                let found = || Arc::new(forward::rounds(of, *algo, *phase));
                all.entry((number, *algo, *phase)).or_insert_with(found);
            }
        }
    }
    all
}

pub struct Shared<'p> {
    pub plan: &'p Plan,
    pub lines: &'p [Line<'p>],
    pub matching: &'p Matching,
    /// The ops that wait for each op, by program.
    pub next: &'p [Vec<Vec<u32>>],
    pub lives: &'p [Vec<Vec<Vec<Life>>>],
    pub turns: &'p Turns,
    pub hub: Hub,
    /// Memory of messages that were delivered.
    pub spares: &'p Spares,
    /// The step, counted from 1, and when it began: when every worker was there.
    pub step: u64,
    pub zero: OnceLock<Instant>,
    /// Slots whose contents are kept at the end of each of their lives.
    pub watched: Vec<SlotId>,
    /// Slots whose contents are kept at the end of the step.
    pub kept: Vec<SlotId>,
    /// Whether slots are filled with NaN after their last use.
    pub poison: bool,
    /// Whether logits are kept.
    pub logits: bool,
    pub atoms: &'p AtomTable,
    pub rounds: &'p Rounds,
    /// What goes wrong in this step.
    pub inject: Option<Injection>,
    /// Other runs that begin at the same moment.
    pub beside: Option<Arc<Barrier>>,
    /// The hash of the plan.
    pub hash: &'p str,
}

impl Shared<'_> {
    /// What lies in a part of a rank's memory, to be handed over.
    pub fn message(&self, arena: &Arena, part: &Part) -> Data {
        let elems = part.bytes.len() as u64 / part.dtype.size();
        arena.read_into(part, self.spares.take(part.dtype, elems))
    }

    /// The messages of an exchange of `rank`, whose op names route `route`; empty for a route that lists no rows.
    pub fn rounds_of(&self, route: u32, rank: u32, algo: ExchangeAlgo, phase: Phase) -> Arc<Vec<Round>> {
        self.rounds.get(&(self.plan.route_number(route, rank), algo, phase)).cloned().unwrap_or_default()
    }
}
