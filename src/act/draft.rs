//! A sheet being written: what ops do on each class, and whom they meet.

use super::deeds::{Deed, Deeds, Whole};
use super::meetings::Transit;
use super::ports::{RECV, port};
use super::sheet::{Act, End, Meeting, Sheet, issued, order};
use super::tallies::Tallies;
use super::{Acts, Gang};
use crate::error::{Error, Result};
use crate::plan::link::Line;
use crate::plan::matching::{LegAt, Matching};
use crate::plan::{Direction, Leg, OpKind};
use std::rc::Rc;

/// In place of a meeting: none yet.
const NONE: u32 = u32::MAX;

/// A sheet being written.
pub(super) struct Draft<'a> {
    matching: &'a Matching,
    classes: usize,
    acts: Vec<Act>,
    launches: Vec<u32>,
    meetings: Vec<Meeting>,
    ends: Vec<End>,
    met: Vec<u32>,
    /// The meeting of each sent leg, class after class.
    sent: Vec<u32>,
    tallies: Tallies,
}

impl<'a> Draft<'a> {
    /// An empty sheet. `lanes`, `kernels`: how many of them tallies tell apart.
    pub(super) fn new(
        lanes: usize,
        lines: &[Line],
        matching: &'a Matching,
        classes: usize,
        kernels: usize,
    ) -> Draft<'a> {
        let width = lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        let legs = (0..lines.len() as u32).map(|p| matching.leg_count(p)).max().unwrap_or(0);
        Draft {
            matching,
            classes,
            acts: vec![Act::Skip; width * classes],
            launches: vec![1; width * classes],
            meetings: vec![],
            ends: vec![],
            met: vec![],
            sent: vec![NONE; legs * classes],
            tallies: Tallies::new(kernels, lanes, classes),
        }
    }

    /// Writes what the ops of a line do on the classes that run it, `deeds`, and makes a meeting of each message that
    /// is sent, and of each collective; who receives a message is told by [`join`](Draft::join), once all are made.
    /// Errors: a member of a collective that does not take part.
    pub(super) fn write(&mut self, acts: &mut Acts, line: &Line, deeds: &Deeds) -> Result<()> {
        for (node, spliced) in line.nodes.iter().enumerate() {
            if let OpKind::Transfer { legs, .. } = &spliced.op.kind {
                self.send(acts, spliced.lane, node, legs, deeds);
            }
            for (local, &class) in deeds.classes.iter().enumerate() {
                self.launches[node * self.classes + class] = deeds.launches_unmasked(node as u32);
                match deeds.of(node as u32, local) {
                    Deed::Skip | Deed::Legs { .. } => {}
                    Deed::Kernel { duration, on_sms } => self.act(node, class, Act::Compute { duration, on_sms }),
                    Deed::Aside { duration } => self.act(node, class, Act::Aside { duration }),
                    Deed::Whole { at, ctas } => {
                        self.gather(acts, line, node, class, &deeds.wholes[at as usize], ctas)?;
                    }
                }
            }
        }
        for (local, &class) in deeds.classes.iter().enumerate() {
            self.tallies.take(class, &deeds.tallies, local);
        }
        Ok(())
    }

    /// Makes a meeting for each send of a transfer, with the class that receives it.
    fn send(&mut self, acts: &Acts, lane: u16, node: usize, legs: &[Leg], deeds: &Deeds) {
        for (l, leg) in legs.iter().enumerate().filter(|(_, leg)| leg.dir == Direction::Send) {
            let at = LegAt { node: node as u32, leg: l as u16 };
            for (local, &class) in deeds.classes.iter().enumerate() {
                let Deed::Legs { first, count, .. } = deeds.of(node as u32, local) else { unreachable!("a transfer") };
                let way = deeds.legs(first, count)[l];
                let own = acts.program[class];
                // Without a partner there is no one to receive; `join` says so for either end.
                let met = self.matching.partner(own, acts.program[way.receiver as usize], lane, leg, at);
                let from = End { class: class as u32, node: node as u32, ports: way.ports() };
                let to = met.map(|m| End { class: way.receiver, node: m.node, ports: port(way.tier, RECV) });
                let meeting = self.meeting(way.transit, [from].into_iter().chain(to));
                self.sent[self.matching.leg(own, at) * self.classes + class] = meeting;
            }
        }
    }

    /// Makes one meeting of each gang for a collective, or one of each class for an exchange, which begins when all
    /// members have started and is over with the class's own last hop.
    fn gather(
        &mut self,
        acts: &mut Acts,
        line: &Line,
        node: usize,
        class: usize,
        whole: &Whole,
        ctas: u16,
    ) -> Result<()> {
        // A gang's first class makes the meeting for all.
        if !whole.apart() && whole.gang.classes[0] as usize != class {
            return Ok(());
        }
        let gangs = acts.gangs(line.nodes[node].lane);
        let mut ends = self.members(acts, line, node, class, &gangs)?;
        let first = self.met.len() as u32;
        let act = Act::Meet { first, count: 1, ctas };
        if whole.apart() {
            ends.iter_mut().filter(|end| end.class as usize != class).for_each(|end| end.ports = 0);
            self.act(node, class, act);
        } else {
            ends.iter().for_each(|end| self.act(end.node as usize, end.class as usize, act));
        }
        let meeting = self.meeting(whole.transit, ends);
        self.met.push(meeting);
        Ok(())
    }

    /// The classes that take part in the collective that `node` of `class` is. Errors: a member that does not take
    /// part.
    fn members(&self, acts: &Acts, line: &Line, node: usize, class: usize, gangs: &[Rc<Gang>]) -> Result<Vec<End>> {
        let (own, lane) = (acts.program[class], line.nodes[node].lane);
        let end = |&there: &u32| {
            let same = self.matching.same_collective(own, acts.program[there as usize], lane, node as u32);
            let (rank, other) = (acts.representative(class as u32), acts.representative(there));
            let node = same.ok_or_else(|| {
                Error::plan(format!("rank {rank}, {}: rank {other} does not take part", line.path(node)))
            })?;
            let ports = gangs[there as usize].ports(acts.machine.cluster.node_of(other));
            Ok(End { class: there, node, ports })
        };
        gangs[class].classes.iter().map(end).collect()
    }

    /// Makes the legs of all transfers of a line point to the meetings that their senders made. Errors: a leg that no op
    /// of its peer meets.
    pub(super) fn join(&mut self, acts: &Acts, line: &Line, deeds: &Deeds) -> Result<()> {
        for (local, &class) in deeds.classes.iter().enumerate() {
            for (node, spliced) in line.nodes.iter().enumerate() {
                let (OpKind::Transfer { legs, .. }, Deed::Legs { first, count, ctas }) =
                    (&spliced.op.kind, deeds.of(node as u32, local))
                else {
                    continue;
                };
                let (own, met_first) = (acts.program[class], self.met.len() as u32);
                for (l, (leg, way)) in legs.iter().zip(deeds.legs(first, count)).enumerate() {
                    let at = LegAt { node: node as u32, leg: l as u16 };
                    let there = if leg.dir == Direction::Send { way.receiver } else { way.sender } as usize;
                    let met = self.matching.partner(own, acts.program[there], spliced.lane, leg, at);
                    let met = met.ok_or_else(|| alone(acts, line, node, class, leg))?;
                    let (sender, from) = if leg.dir == Direction::Send { (class, at) } else { (there, met) };
                    let sent = self.matching.leg(acts.program[sender], from) * self.classes + sender;
                    self.met.push(self.sent[sent]);
                }
                self.act(node, class, Act::Meet { first: met_first, count, ctas });
            }
        }
        Ok(())
    }

    fn act(&mut self, node: usize, class: usize, act: Act) {
        self.acts[node * self.classes + class] = act;
    }

    fn meeting(&mut self, transit: Transit, ends: impl IntoIterator<Item = End>) -> u32 {
        let first = self.ends.len() as u32;
        self.ends.extend(ends);
        self.meetings.push(Meeting { transit, ends: first..self.ends.len() as u32 });
        self.meetings.len() as u32 - 1
    }

    pub(super) fn finish(self) -> Sheet {
        let Draft { classes, acts, launches, meetings, ends, met, tallies, .. } = self;
        let issued = issued(&acts, &launches, classes);
        let (order, launches) = (order(&acts, classes, &met, meetings.len()).into(), launches.into());
        let (ends, met, tallies) = (ends.into(), met.into(), tallies.into());
        Sheet { classes, acts, meetings, ends, met, order, launches, issued, tallies }
    }
}

/// The error of a leg that nothing meets.
fn alone(acts: &Acts, line: &Line, node: usize, class: usize, leg: &Leg) -> Error {
    let rank = acts.representative(class as u32);
    let peer = acts.group(line.nodes[node].lane).neighbour(&acts.plan.views, rank, leg.by);
    Error::plan(format!("rank {rank}, {}: no op of rank {peer} meets it", line.path(node)))
}
