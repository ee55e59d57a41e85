//! How far a class has come.

use super::fault::Health;
use super::jitter::Noise;
use super::meeting::What;
use super::ports::Port;
use super::recent::Recent;
use super::script::Script;
use crate::act::PORTS;
use crate::act::stamp::Stamp;
use crate::act::stretch::Held;
use crate::act::waits::Path;
use crate::device::OnSms;
use std::collections::VecDeque;

/// An op that is neither over nor out of sight.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// The latest end of what it waits for so far.
    pub start: Stamp,
    /// What led to its launch, once it has begun.
    pub launched: Path,
    /// Ops, and once it has begun meetings, that it waits for; [`OVER`] when it is over.
    pub waits: u32,
    /// When the last meeting so far was over, and when all had come there, and what had made the last of them late. Of
    /// several that are over at the same moment, the one that set off last.
    pub came: (u64, Stamp),
    /// What the CPU takes until it has issued this one, in `host_launch`es.
    pub issued: u32,
}

const OVER: u32 = u32::MAX;

/// A kernel that runs.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    pub op: u32,
    pub start: u64,
    /// Alone on the device.
    pub duration: u64,
    pub end: u64,
    pub on_sms: OnSms,
    pub noise: Noise,
}

/// An op as it went.
#[derive(Debug, Clone, Copy, Default)]
pub struct Kept {
    pub start: u64,
    pub end: u64,
    /// The class and op that was last to start of those that had to meet.
    pub by: (u32, u32),
}

/// Bytes that went at a meeting.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    pub from: u64,
    pub to: u64,
    /// Inside nodes and between them: of a message, of all members of a collective, of one of those who have bytes of their own.
    pub sent: [f64; 2],
    pub what: What,
    /// Of a message, or of the full buffer of a collective.
    pub bytes: u64,
    /// How often that is, over all ranks.
    pub times: f64,
}

/// SMs held by a communication kernel.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub op: u32,
    pub held: Held,
}

/// One class on its way through its script.
pub struct Run {
    /// Which program, and which of its classes.
    pub program: usize,
    pub local: usize,
    /// The op of the first cell.
    base: u32,
    cells: VecDeque<Cell>,
    issued: u32,
    /// Ops that the CPU has waited for, and when it would have begun had it not waited and issued as fast as it does.
    waits: Vec<(u32, u64)>,
    /// Ops to go.
    pub left: u32,
    pub health: Health,
    /// By lane, of the last op there; the host has none.
    pub noise: Vec<Noise>,
    pub kernels: Vec<Running>,
    pub sms: Vec<Taken>,
    pub ports: [Port; PORTS],
    /// The end of the last op on each lane.
    pub lasts: Vec<Stamp>,
    /// When the compute lane was last busy, and how long it waited, by the lane it waited for.
    pub compute_end: u64,
    pub waited: Vec<u64>,
    pub recent: Recent,
    /// Every op, if they are kept.
    pub kept: Vec<Kept>,
}

impl Run {
    pub fn new(script: &Script, (program, local): (usize, usize), lanes: usize, health: Health, keep: bool) -> Run {
        let len = script.len();
        Run {
            program,
            local,
            base: 0,
            cells: VecDeque::new(),
            issued: 0,
            waits: vec![],
            left: len,
            health,
            noise: vec![Noise::default(); lanes + 1],
            kernels: vec![],
            sms: vec![],
            ports: Default::default(),
            lasts: vec![Stamp::default(); lanes],
            compute_end: 0,
            // One more than there are lanes: the host.
            waited: vec![0; lanes + 1],
            recent: Recent::new(lanes),
            kept: if keep { vec![Kept::default(); len as usize] } else { vec![] },
        }
    }

    /// The cell of an op that is not over.
    pub fn cell(&mut self, script: &Script, op: u32) -> &mut Cell {
        while self.base + (self.cells.len() as u32) <= op {
            let next = self.base + self.cells.len() as u32;
            let ([first, all], waits) = (script.issues(next, self.local), script.preds(next).len() as u32);
            let issued = self.issued + first;
            self.issued += all;
            let (start, launched) = Default::default();
            self.cells.push_back(Cell { start, launched, waits, came: Default::default(), issued });
        }
        &mut self.cells[(op - self.base) as usize]
    }

    pub fn over(&mut self, script: &Script, op: u32) {
        self.cell(script, op).waits = OVER;
        self.left -= 1;
        while self.cells.front().is_some_and(|cell| cell.waits == OVER) {
            self.cells.pop_front();
            self.base += 1;
        }
    }

    /// Ops that were seen and are not over, in program order.
    pub fn open(&self) -> impl Iterator<Item = (u32, Cell)> {
        (self.base..).zip(self.cells.iter().copied()).filter(|(_, cell)| cell.waits != OVER)
    }

    /// When an op that is not over began; of one that has not begun, the latest end of what it waits for so far.
    pub fn since(&self, op: u32) -> Option<u64> {
        let cell = self.cells.get(op.checked_sub(self.base)? as usize).filter(|cell| cell.waits != OVER)?;
        Some(cell.start.ps())
    }

    /// When the CPU began, as far as an op can tell.
    pub fn began(&self, op: u32) -> u64 {
        self.waits.iter().rev().find(|wait| wait.0 < op).map_or(0, |wait| wait.1)
    }

    /// The CPU has waited for an op, which was over so long after it would have been issued at once.
    pub fn waited(&mut self, op: u32, began: u64) {
        let began = began.max(self.began(op));
        self.waits.push((op, began));
    }

    /// The last op on any lane.
    pub fn last(&self) -> Stamp {
        self.lasts.iter().copied().max().unwrap_or_default()
    }
}
