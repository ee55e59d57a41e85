//! A program as its ranks follow it: every call spliced, every edge both ways, and each distinct op worked out once.
//!
//! Block by block, in place of op by op, kernels in a row are one op, named by the first of them, if nobody in between
//! waits for one or is waited for (`blocks`).

use super::block_times::Lookup;
use super::blocks::{Blocks, name};
use super::posting::Posting;
use crate::act::{Acts, Deed, Deeds, Machine};
use crate::error::{Error, Result};
use crate::fold::Fold;
use crate::plan::link::{AtomTable, Line, Node};
use crate::plan::matching::group_sizes;
use crate::plan::*;
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};

pub struct Script<'p> {
    line: Line<'p>,
    /// The blocks of the line; `None`: it is gone through op by op.
    blocks: Option<Blocks>,
    /// The distinct op that each op is.
    distinct: Vec<u32>,
    pub deeds: Deeds,
    /// The ops that wait for each op, flat: where those of each begin, and all of them.
    next_at: Vec<u32>,
    next: Vec<u32>,
    /// Ops that wait for nothing.
    pub roots: Vec<u32>,
    /// Where the turns of each op begin.
    turns_at: Vec<u32>,
    /// How many legs, or collectives, like it came before each on its lane and over its distance.
    turns: Vec<u32>,
    /// A number for each leg or collective, lower the earlier it counts as posted.
    posted: Vec<u64>,
}

/// The longest time that an op may take, ps: times are u64, which end after 213 days, and no op is to take a good part
/// of that.
const MOST_PS: u64 = 1_000_000_000_000_000_000;

/// The scripts of all programs: op by op, or block by block with what was measured of blocks. Errors: more than 200
/// lanes, an op that takes longer than [`MOST_PS`], those of [`crate::act::Acts::deeds`].
pub fn write<'p>(
    plan: &'p Plan,
    machine: Machine<'p>,
    fold: &'p Fold,
    blocks: Option<&Lookup>,
) -> Result<Vec<Script<'p>>> {
    if plan.lanes.len() > 200 {
        return Err(Error::plan(format!("{} lanes; at most 200 are simulated", plan.lanes.len())));
    }
    let atoms = AtomTable::new(plan)?;
    let (mut acts, sizes) = (Acts::new(plan, machine, fold), group_sizes(plan));
    let posting = Posting::of(plan);
    let script = |program: u32| {
        let mut script = Script::new(plan, &atoms, &mut acts, &sizes, program, blocks)?;
        if script.deeds.longest() > MOST_PS {
            let why =
                "an op takes longer than 11 days; a rate or a latency of the cluster, or a peak of the GPU, is wrong";
            return Err(Error::spec(&machine.cluster.spec.name, "rates", why));
        }
        script.posted = script.all_posted(program, posting.as_ref());
        Ok(script)
    };
    (0..plan.programs.len() as u32).map(script).collect()
}

impl<'p> Script<'p> {
    fn new(
        plan: &'p Plan,
        atoms: &AtomTable,
        acts: &mut Acts,
        sizes: &[u32],
        program: u32,
        blocks: Option<&Lookup>,
    ) -> Result<Script<'p>> {
        let line = Line::program(plan, atoms, program)?;
        let (distinct, firsts) = distinct_ops(&line);
        let mut deeds = acts.deeds(program, &line, &firsts)?;
        let (next_at, next, roots, turns_at) = Default::default();
        let (blocks, distinct) = match blocks {
            Some(times) => {
                let (blocks, distinct) = Blocks::of(plan, &line, &distinct, &mut deeds, (program, times));
                (Some(blocks), distinct)
            }
            None => (None, distinct),
        };
        let posted = vec![];
        let mut script =
            Script { line, blocks, distinct, deeds, next_at, next, roots, turns_at, turns: vec![], posted };
        (script.next_at, script.next) = turned_round(&script);
        script.roots = (0..script.len()).filter(|&op| script.preds(op).is_empty()).collect();
        (script.turns_at, script.turns) = turns(&script, sizes);
        Ok(script)
    }

    pub fn len(&self) -> u32 {
        self.distinct.len() as u32
    }

    /// The node that an op is in the line; for a block its first one.
    fn node(&self, op: u32) -> &Node<'p> {
        &self.line.nodes[self.at(op)]
    }

    fn at(&self, op: u32) -> usize {
        self.blocks.as_ref().map_or(op, |blocks| blocks.members.of(op as usize)[0]) as usize
    }

    /// Whether the CPU issues nothing behind an op before it is over; such an op is in no block with others.
    pub fn is_wait(&self, op: u32) -> bool {
        self.line.is_wait(self.at(op))
    }

    /// The ops that an op waits for.
    pub fn preds(&self, op: u32) -> &[u32] {
        match &self.blocks {
            Some(blocks) => blocks.preds.of(op as usize),
            None => self.line.preds(op as usize),
        }
    }

    /// How long the CPU takes until an op can begin, which for a block is its first kernel, and until all of it is
    /// issued; in `host_launch`es.
    pub fn issues(&self, op: u32, class: usize) -> [u32; 2] {
        let distinct = self.distinct[op as usize];
        match self.blocks.as_ref().and_then(|blocks| blocks.kernels.get(&distinct)) {
            Some(kernels) => kernels[class],
            None => [self.deeds.launches(distinct, class); 2],
        }
    }

    pub fn path(&self, op: u32) -> String {
        self.line.path(self.at(op))
    }

    /// The deed of an op on a class, which is counted among the classes of the program.
    pub fn deed(&self, op: u32, class: usize) -> Deed {
        self.deeds.of(self.distinct[op as usize], class)
    }

    /// The name of every block of kernels, and the longest time that it takes on any class, ps.
    pub fn block_times(&self, plan: &Plan, program: u32) -> Vec<(String, u64)> {
        let Some(blocks) = &self.blocks else { return vec![] };
        let takes = |op: u32| {
            let longest = |class| match self.deed(op, class) {
                Deed::Kernel { duration, .. } => Some(duration),
                _ => None,
            };
            let longest = (0..self.deeds.classes.len()).filter_map(longest).max()?;
            Some((name(plan, program, &self.line, blocks.members.of(op as usize)), longest))
        };
        (0..self.len()).filter_map(takes).collect()
    }

    /// Every distinct op that is on a lane, by its place in [`Deeds`], with its lane.
    pub fn distinct_lanes(&self) -> impl Iterator<Item = (u32, u16)> {
        let mut seen = vec![false; self.distinct.iter().max().map_or(0, |&most| most as usize + 1)];
        let pairs = (0..self.len()).map(|op| (self.distinct[op as usize], self.lane(op)));
        pairs.filter(move |&(op, _)| !std::mem::replace(&mut seen[op as usize], true))
    }

    /// The ports that an op of a class uses, a bit each.
    pub fn ports(&self, op: u32, class: usize) -> u8 {
        self.deeds.ports(self.distinct[op as usize], class)
    }

    pub fn next(&self, op: u32) -> std::ops::Range<usize> {
        self.next_at[op as usize] as usize..self.next_at[op as usize + 1] as usize
    }

    pub fn next_op(&self, at: usize) -> u32 {
        self.next[at]
    }

    pub fn lane(&self, op: u32) -> u16 {
        self.node(op).lane
    }

    pub fn turn(&self, op: u32, leg: usize) -> u32 {
        self.turns[self.turns_at[op as usize] as usize + leg]
    }

    /// A number that is lower the earlier a leg or collective counts as posted; 40 bits.
    pub fn posted(&self, op: u32, leg: usize) -> u64 {
        self.posted[self.turns_at[op as usize] as usize + leg]
    }

    fn all_posted(&self, program: u32, posting: Option<&Posting>) -> Vec<u64> {
        let mut all = Vec::with_capacity(self.turns.len());
        for op in 0..self.len() {
            let from = self.turns_at[op as usize] as usize;
            let to = self.turns_at.get(op as usize + 1).map_or(self.turns.len(), |&to| to as usize);
            for leg in 0..(to - from) as u16 {
                let number = posting.map_or(op, |posting| posting.number(program, self.at(op) as u32, leg));
                all.push(u64::from(number) << 8 | u64::from(leg & 0xff));
            }
        }
        all
    }

    /// The name of an op's kind.
    pub fn what(&self, op: u32) -> &'static str {
        self.node(op).op.kind.name()
    }
}

/// The distinct op that each op is; and for each distinct op one of its ops, and how often there is one. Two ops are
/// the same if they were written as one and work on the same tensors, in whichever slots.
fn distinct_ops(line: &Line) -> (Vec<u32>, Vec<(u32, u32)>) {
    let mut known: FxHashMap<(usize, u64), u32> = FxHashMap::default();
    let mut firsts: Vec<(u32, u32)> = vec![];
    let number = |i: usize| {
        let mut h = FxHasher::default();
        line.reads(i).iter().chain(line.writes(i)).for_each(|place| place.tensor.hash(&mut h));
        let op: *const Op = line.nodes[i].op;
        let number = *known.entry((op as usize, h.finish())).or_insert_with(|| {
            firsts.push((i as u32, 0));
            firsts.len() as u32 - 1
        });
        firsts[number as usize].1 += 1;
        number
    };
    let distinct = (0..line.nodes.len()).map(number).collect();
    (distinct, firsts)
}

/// The edges the other way round: where those of each op begin, and all of them.
fn turned_round(script: &Script) -> (Vec<u32>, Vec<u32>) {
    let n = script.len();
    let mut at = vec![0u32; n as usize + 1];
    (0..n).flat_map(|op| script.preds(op)).for_each(|&p| at[p as usize + 1] += 1);
    (0..n as usize).for_each(|i| at[i + 1] += at[i]);
    let (mut free, mut next) = (at.clone(), vec![0; at[n as usize] as usize]);
    for op in 0..n {
        for &p in script.preds(op) {
            next[free[p as usize] as usize] = op;
            free[p as usize] += 1;
        }
    }
    (at, next)
}

/// The turns of all legs and collectives: the k-th send over a lane and distance meets the k-th receive, the k-th
/// collective of a lane those of all members.
fn turns(script: &Script, sizes: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let mut seen: FxHashMap<(u16, Option<(Direction, u32)>), u32> = FxHashMap::default();
    let (mut at, mut turns) = (Vec::with_capacity(script.len() as usize), vec![]);
    let mut take = |key| {
        let turn = seen.entry(key).or_insert(0);
        *turn += 1;
        *turn - 1
    };
    for node in (0..script.len()).map(|op| script.node(op)) {
        at.push(turns.len() as u32);
        match &node.op.kind {
            OpKind::Transfer { legs, .. } => {
                let by = |leg: &Leg| leg.by.rem_euclid(sizes[node.lane as usize] as i32) as u32;
                turns.extend(legs.iter().map(|leg| take((node.lane, Some((leg.dir, by(leg)))))));
            }
            OpKind::Collective { .. } | OpKind::Exchange { .. } => turns.push(take((node.lane, None))),
            _ => {}
        }
    }
    (at, turns)
}
