//! An exchange of a mixture-of-experts layer under way on one thread: rows are taken up, go out and come in round by
//! round, and are laid down. The profile says how long the whole takes by its rows and bytes; each part has its share
//! of the rows.

use super::Shared;
use super::flight::{Flight, Next, Work, job};
use super::hub::{Hub, Key};
use super::job::What;
use crate::collective::forward::{self, Load, Message, Round};
use crate::device::Threads;
use crate::device::measured::{exchange_key, slower};
use crate::error::{Cause, Error, Result};
use crate::plan::rows::place_of;
use crate::plan::{Lane, OpKind};
use std::rc::Rc;

pub struct Exchange {
    pub node: u32,
    members: Vec<u32>,
    here: u32,
    rounds: Rc<Vec<Round>>,
    load: Load,
    /// Seconds for each row that this rank handles.
    row_s: f64,
    /// How many times longer the exchange takes while all cores do the same.
    crowded: f64,
    stage: Stage,
    round: usize,
    sent: bool,
}

#[derive(PartialEq)]
enum Stage {
    /// The rank's own rows are not taken up yet.
    New,
    /// Waits until all members have taken up their rows.
    Meeting,
    Rounds,
    Landed,
}

impl Exchange {
    pub fn start(shared: &Shared, rank: u32, node: u32) -> Result<Flight> {
        let (plan, line) = (shared.plan, shared.line(rank));
        let spliced = &line.nodes[node as usize];
        let path = || format!("rank {rank}, {}", line.path(node as usize));
        let (Lane::Comm(group, _), OpKind::Exchange { route, algo, phase, .. }) =
            (&plan.lanes[spliced.lane as usize], &spliced.op.kind)
        else {
            return Err(Error::plan(format!("{} communicates on a compute lane", path())));
        };
        if !plan.route_of(*route, rank).is_listed() {
            let why = "its route is balanced, which says how many rows go and not which; give --routing uniform";
            return Err(Cause::Routing.infeasible(format!("{}: {why}", path())));
        }
        let number = plan.route_number(*route, rank);
        let rounds = shared
            .rounds
            .borrow_mut()
            .entry((number, *algo, *phase))
            .or_insert_with(|| Rc::new(forward::rounds(&plan.routes[number as usize], *algo, *phase)))
            .clone();
        let load = forward::load(plan, line, (node as usize, rank), &rounds).expect("an exchange");
        let name = exchange_key(load.phase, load.dtype);
        let Some(curve) = shared.threads.exchanges.get(&name) else {
            let why = format!("the profile has timed no `{name}`; write a new one with `foretrain calibrate --on cpu`");
            return Err(Cause::Other.infeasible(format!("{}: {why}", path())));
        };
        let size = load.size().map(|x| x.max(1.0));
        let row_s = curve.at(&size).0 / load.rows().max(1) as f64;
        let crowded = shared.threads.beside.exchanges.get(&name).map_or(1.0, |beside| slower(beside, curve, &size));
        Ok(Flight::Exchange(Exchange {
            node,
            members: group.members(&plan.views, rank),
            here: place_of(&plan.views, rank),
            rounds,
            load,
            row_s,
            crowded,
            stage: Stage::New,
            round: 0,
            sent: false,
        }))
    }

    /// An exchange is named by its first member: all members run it as the same op.
    fn meeting(&self) -> (u32, u32) {
        (self.members[0], self.node)
    }

    fn rows(&self, count: u64, threads: &Threads) -> Work {
        Work { alone: (count as f64 * self.row_s).max(threads.op_s), crowded: self.crowded }
    }

    /// The messages of the round that `ours` wants, each with its key and rows.
    fn messages(&self, ours: impl Fn(&Message) -> bool) -> Vec<(Key, u64)> {
        let key = |(number, m): (usize, &Message)| {
            let [from, to] = [m.from, m.to].map(|place| self.members[place as usize]);
            (Key { from, to, node: self.node, part: (self.round as u32) << 24 | number as u32 }, m.rows.len() as u64)
        };
        self.rounds[self.round].iter().enumerate().filter(|(_, m)| ours(m)).map(key).collect()
    }

    pub fn next(&mut self, at: usize, threads: &Threads, hub: &mut Hub, now: f64) -> Next {
        match self.stage {
            Stage::New => return job(at, What::Begun, self.rows(self.load.held, threads)),
            Stage::Meeting if hub.started(self.meeting()) < self.members.len() as u32 => return Next::Nothing,
            Stage::Meeting => self.stage = Stage::Rounds,
            Stage::Rounds => {}
            Stage::Landed => return Next::Over,
        }
        if self.round == self.rounds.len() {
            return job(at, What::Landed, self.rows(self.load.landed, threads));
        }
        if !self.sent {
            return job(at, What::Sent(self.round), self.rows(self.load.sent[self.round], threads));
        }
        let expected = self.messages(|m| m.to == self.here);
        // All messages are asked for, also those behind a late one.
        let there = expected.iter().filter(|(key, _)| hub.has(*key, now)).count();
        if there < expected.len() {
            return Next::Nothing;
        }
        expected.iter().for_each(|(key, _)| hub.take(*key, false));
        job(at, What::Taken(self.round), self.rows(self.load.taken[self.round], threads))
    }

    pub fn done(&mut self, what: What, hub: &mut Hub, now: f64) {
        match what {
            What::Begun => {
                self.stage = Stage::Meeting;
                hub.start(self.meeting(), &self.members);
            }
            What::Sent(_) => {
                for (key, rows) in self.messages(|m| m.from == self.here) {
                    hub.send(key, rows * self.load.row, now);
                }
                self.sent = true;
            }
            What::Taken(_) => (self.round, self.sent) = (self.round + 1, false),
            What::Landed => self.stage = Stage::Landed,
        }
    }
}
