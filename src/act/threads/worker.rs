//! One thread: the ranks of a device, a job at a time, in the order in which the executor looks for one.

use super::Shared;
use super::hub::Hub;
use super::job::Job;
use super::rank::Rank;
use crate::error::Result;

#[derive(Debug, Clone)]
pub enum State {
    /// Looks for something to do, from a time on.
    Free(f64),
    /// With something of one of its ranks, by number.
    Busy(usize, Job),
    /// Until somebody tells one of its ranks something; since when.
    Waiting(f64),
    Done,
}

/// Something that a thread did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    pub rank: u32,
    pub node: u32,
    /// Seconds.
    pub from: f64,
    pub to: f64,
    /// Where the thread had waited before: the thread and the piece that it had waited for; none: the one before it.
    pub after: Option<Cause>,
}

/// A thread, and a piece of it, by number.
pub type Cause = (u32, u32);

pub struct Worker {
    number: u32,
    pub ranks: Vec<usize>,
    pub state: State,
    pub pieces: Vec<Piece>,
    /// What has woken it since its last piece.
    pub woken_by: Option<Cause>,
}

impl Worker {
    /// One for each device that has ranks.
    pub fn all(devices: &[u32]) -> Vec<Worker> {
        let most = devices.iter().max().map_or(0, |d| *d + 1);
        let of = |device: u32| (0..devices.len()).filter(|&rank| devices[rank] == device).collect::<Vec<usize>>();
        let crews = (0..most).map(of).filter(|ranks| !ranks.is_empty());
        let worker =
            |(number, ranks)| Worker { number, ranks, state: State::Free(0.0), pieces: vec![], woken_by: None };
        (0..).zip(crews).map(worker).collect()
    }

    pub fn is_free(&self, now: f64) -> bool {
        matches!(self.state, State::Free(at) if at <= now)
    }

    /// How much company hurts what it does, while it does something.
    pub fn crowded(&self) -> Option<f64> {
        match &self.state {
            State::Busy(_, job) => Some(job.crowded),
            _ => None,
        }
    }

    /// Finds the next thing to do: messages of any rank first, then a kernel.
    pub fn step(&mut self, shared: &Shared, ranks: &mut [Rank], hub: &mut Hub, now: f64) -> Result<()> {
        for &rank in &self.ranks {
            ranks[rank].post_all(shared, hub, now)?;
        }
        let fly = self.ranks.iter().find_map(|&rank| Some((rank, ranks[rank].fly(shared, hub, now)?)));
        let mut compute = || self.ranks.iter().find_map(|&rank| Some((rank, ranks[rank].compute(shared, hub, now)?)));
        self.state = match fly.or_else(&mut compute) {
            Some((rank, job)) => {
                let node = ranks[rank].node_of(job.then);
                let after = self.woken_by.take();
                self.pieces.push(Piece { rank: rank as u32, node, from: now, to: now, after });
                State::Busy(rank, job)
            }
            None if self.ranks.iter().all(|&rank| ranks[rank].is_over()) => State::Done,
            // Ops that ended at once may have let others start.
            None if self.ranks.iter().any(|&rank| ranks[rank].could_go_on(shared, hub)) => State::Free(now),
            None => State::Waiting(now),
        };
        Ok(())
    }

    /// Ends the job at hand, if it is done.
    pub fn complete(&mut self, shared: &Shared, ranks: &mut [Rank], hub: &mut Hub, now: f64) {
        let State::Busy(rank, Job { left: 0.0, then, .. }) = self.state else { return };
        self.state = State::Free(now);
        if let Some(piece) = self.pieces.last_mut() {
            piece.to = now;
        }
        hub.acts = Some((self.number, self.pieces.len() as u32 - 1));
        ranks[rank].done(shared, hub, then, now);
    }
}
