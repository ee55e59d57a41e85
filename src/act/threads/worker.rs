//! One thread: the ranks of a device, a job at a time, in the order in which the executor looks for one.

use super::Shared;
use super::hub::Hub;
use super::job::Job;
use super::rank::Rank;
use crate::error::Result;

#[derive(Debug, Clone)]
pub enum State {
    /// Looks for something to do from this time on, in s.
    Free(f64),
    /// Busy with a job of one of its ranks, by the rank's number.
    Busy(usize, Job),
    /// Waits until somebody tells one of its ranks something; since when, in s.
    Waiting(f64),
    Done,
}

/// A piece of work that a thread did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    pub rank: u32,
    pub node: u32,
    /// Start and end, in s.
    pub from: f64,
    pub to: f64,
    /// The piece that the thread had waited for before this one; `None`: it went on from its own last piece.
    pub after: Option<Cause>,
}

/// A thread, and a piece of it, by number.
pub type Cause = (u32, u32);

pub struct Worker {
    number: u32,
    pub ranks: Vec<usize>,
    pub state: State,
    pub pieces: Vec<Piece>,
    /// The piece that has woken the thread since its own last piece.
    pub woken_by: Option<Cause>,
}

impl Worker {
    /// One worker for each device that has ranks.
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

    /// How many times longer its job takes while all cores do the same; `None` while it has no job.
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
            // Ops that ended at once may have let other ops start.
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
