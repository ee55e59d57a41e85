//! The ops that touched each atom and lane last, while ops are gone through in program order: a line's edges come from
//! these.

use super::{AtomTable, Outer};

pub(super) const NONE: u32 = u32::MAX;

/// The ops that touched each atom of a plan last; none between two lines.
#[derive(Debug, Default)]
pub struct Touches {
    writer: Vec<u32>,
    /// The readers of each atom since it was written, as a chain with the last reader of each lane; here its first
    /// link.
    readers: Vec<u32>,
    is_touched: Vec<bool>,
    /// The atoms that are touched.
    all: Vec<u32>,
}

impl Touches {
    pub fn new(atoms: &AtomTable) -> Touches {
        let count = atoms.count as usize;
        Touches { writer: vec![NONE; count], readers: vec![NONE; count], is_touched: vec![false; count], all: vec![] }
    }

    fn clear(&mut self) {
        for atom in self.all.drain(..) {
            (self.writer[atom as usize], self.readers[atom as usize]) = (NONE, NONE);
            self.is_touched[atom as usize] = false;
        }
    }
}

/// The ops that touched each atom and lane last, while a line is walked in program order.
pub(super) struct Tracker<'a> {
    lane_of: &'a [u16],
    /// The last op that had its turn on each lane.
    pub(super) lane: Vec<u32>,
    /// The op that the CPU waited for last, by lane, since the last op there.
    pub(super) waited: Vec<u32>,
    atoms: &'a mut Touches,
    chain: Vec<Reader>,
}

#[derive(Clone, Copy)]
struct Reader {
    node: u32,
    next: u32,
}

#[derive(Default)]
pub(super) struct Waits {
    /// Ops that an op waits for, at most one of each lane.
    pub(super) preds: Vec<u32>,
    pub(super) outer_lanes: Vec<u32>,
    pub(super) outer_reads: Vec<u32>,
    pub(super) outer_writes: Vec<u32>,
}

impl Waits {
    pub(super) fn clear(&mut self) {
        self.preds.clear();
        self.outer_lanes.clear();
        self.outer_reads.clear();
        self.outer_writes.clear();
    }
}

impl<'a> Tracker<'a> {
    pub(super) fn new(lane_of: &'a [u16], lanes: usize, atoms: &'a mut Touches) -> Tracker<'a> {
        Tracker { lane_of, lane: vec![NONE; lanes], waited: vec![NONE; lanes], atoms, chain: vec![] }
    }

    /// Adds an op to wait for, unless a later one of its lane is there already.
    pub(super) fn latest(&self, preds: &mut Vec<u32>, node: u32) {
        let lane = self.lane_of[node as usize];
        match preds.iter_mut().find(|pred| self.lane_of[**pred as usize] == lane) {
            Some(pred) => *pred = (*pred).max(node),
            None => preds.push(node),
        }
    }

    /// Waits for the last op that had its turn on a lane.
    pub(super) fn before_turn(&self, lane: usize, waits: &mut Waits) {
        match self.lane[lane] {
            NONE => waits.outer_lanes.push(lane as u32),
            last => self.latest(&mut waits.preds, last),
        }
    }

    pub(super) fn before_read(&self, atom: u32, waits: &mut Waits) {
        match self.atoms.writer[atom as usize] {
            NONE => waits.outer_reads.push(atom),
            writer => self.latest(&mut waits.preds, writer),
        }
    }

    pub(super) fn before_write(&self, atom: u32, waits: &mut Waits) {
        self.readers_of(atom).for_each(|reader| self.latest(&mut waits.preds, reader));
        match self.atoms.writer[atom as usize] {
            NONE => waits.outer_writes.push(atom),
            writer => self.latest(&mut waits.preds, writer),
        }
    }

    fn readers_of(&self, atom: u32) -> impl Iterator<Item = u32> {
        let first = self.chain.get(self.atoms.readers[atom as usize] as usize);
        std::iter::successors(first, |reader| self.chain.get(reader.next as usize)).map(|reader| reader.node)
    }

    fn touch(&mut self, atom: u32) {
        if !std::mem::replace(&mut self.atoms.is_touched[atom as usize], true) {
            self.atoms.all.push(atom);
        }
    }

    pub(super) fn read(&mut self, atom: u32, node: u32) {
        self.touch(atom);
        let (lane, mut last) = (self.lane_of[node as usize], NONE);
        let mut at = self.atoms.readers[atom as usize];
        while at != NONE {
            let reader = &mut self.chain[at as usize];
            if self.lane_of[reader.node as usize] == lane {
                reader.node = node;
                return;
            }
            (last, at) = (at, reader.next);
        }
        let new = self.chain.len() as u32;
        self.chain.push(Reader { node, next: NONE });
        match last {
            NONE => self.atoms.readers[atom as usize] = new,
            last => self.chain[last as usize].next = new,
        }
    }

    pub(super) fn write(&mut self, atom: u32, node: u32) {
        self.touch(atom);
        self.atoms.readers[atom as usize] = NONE;
        self.atoms.writer[atom as usize] = node;
    }

    pub(super) fn finish(self, outer: &mut Outer) {
        let lanes = self.lane.iter().enumerate().filter(|(_, n)| **n != NONE);
        outer.last_on_lane = lanes.map(|(l, n)| (l as u16, *n)).collect();
        for &atom in &self.atoms.all {
            let writer = self.atoms.writer[atom as usize];
            if writer != NONE {
                outer.last_write.push((atom, writer));
            }
            outer.last_reads.extend(self.readers_of(atom).map(|n| (atom, n)));
        }
        self.atoms.clear();
    }
}
