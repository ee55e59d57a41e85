//! The progress of a class through its script.

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

/// The state of an op that is not over, and within sight.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    /// The latest end so far of the ops that it waits for.
    pub start: Stamp,
    /// The path that led to its launch, once it has begun.
    pub launched: Path,
    /// Number of ops, and once it has begun of meetings, that it still waits for; [`OVER`] when it is over.
    pub waits: u32,
    /// When the last of its meetings so far was over; and when all had come there, with the lane that had made the last
    /// of them late. Of several that are over at the same moment, it is the one that set off last.
    pub came: (u64, Stamp),
    /// How long the CPU takes until it has issued this op, in `host_launch`es.
    pub issued: u32,
}

const OVER: u32 = u32::MAX;

/// A kernel that runs.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    pub op: u32,
    pub start: u64,
    /// How long it takes alone on the device, ps.
    pub duration: u64,
    pub end: u64,
    pub on_sms: OnSms,
    pub noise: Noise,
}

/// How an op went; times in ps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Kept {
    pub start: u64,
    pub end: u64,
    /// The class and the op that started last of those that had to meet.
    pub by: (u32, u32),
}

/// The bytes that went at a meeting; times in ps.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    pub from: u64,
    pub to: u64,
    /// Bytes inside nodes and between them: those of a message, of all members of a collective, or of one member where
    /// each has its own.
    pub sent: [f64; 2],
    pub what: What,
    /// Bytes of a message, or of the full buffer of a collective.
    pub bytes: u64,
    /// How many such meetings there are over all ranks.
    pub times: f64,
}

/// SMs that a communication kernel holds.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub op: u32,
    pub held: Held,
}

/// A class on its way through its script.
pub struct Run {
    /// Its program, and its number among the classes of that.
    pub program: usize,
    pub local: usize,
    /// The op of the first cell.
    base: u32,
    cells: VecDeque<Cell>,
    issued: u32,
    /// Ops that the CPU has waited for, each with the time at which it would have begun had it not waited and issued as
    /// fast as it does.
    waits: Vec<(u32, u64)>,
    /// Number of ops that are not over.
    pub left: u32,
    pub health: Health,
    /// Noise of the last op on each lane; the host has none.
    pub noise: Vec<Noise>,
    pub kernels: Vec<Running>,
    pub sms: Vec<Taken>,
    pub ports: [Port; PORTS],
    /// The end of the last op on each lane.
    pub lasts: Vec<Stamp>,
    /// When the last kernel was over, and how long the compute lane waited, ps, by the lane it waited for.
    pub compute_end: u64,
    pub waited: Vec<u64>,
    pub recent: Recent,
    /// Every op as it went, if ops are kept; else empty.
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
            // One more than there are lanes: the host is the last.
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

    /// The ops that were seen and are not over, in program order.
    pub fn open(&self) -> impl Iterator<Item = (u32, Cell)> {
        (self.base..).zip(self.cells.iter().copied()).filter(|(_, cell)| cell.waits != OVER)
    }

    /// When an op that is not over began, ps; for one that has not begun, the latest end of what it waits for so far;
    /// `None` for one that is over or was not seen.
    pub fn since(&self, op: u32) -> Option<u64> {
        let cell = self.cells.get(op.checked_sub(self.base)? as usize).filter(|cell| cell.waits != OVER)?;
        Some(cell.start.ps())
    }

    /// When the CPU began, as far as an op can tell: by the waits before it, ps.
    pub fn began(&self, op: u32) -> u64 {
        self.waits.iter().rev().find(|wait| wait.0 < op).map_or(0, |wait| wait.1)
    }

    /// Notes that the CPU has waited for an op. `began`: when it would have begun to issue, had it issued as fast as it
    /// does.
    pub fn waited(&mut self, op: u32, began: u64) {
        let began = began.max(self.began(op));
        self.waits.push((op, began));
    }

    /// When the last op on any lane was over, and its lane.
    pub fn last(&self) -> Stamp {
        self.lasts.iter().copied().max().unwrap_or_default()
    }
}
