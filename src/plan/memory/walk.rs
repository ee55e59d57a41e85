//! Who lives when: a walk over the ops of a program that notes the lives of every slot, and for every op what
//! has certainly ended before it starts.

use super::Life;
use super::gaps::Gaps;
use crate::error::{Error, Result};
use crate::plan::link::{AtomTable, Line, MOST_OPS, Place, bind, repeats_itself, resolve};
use crate::plan::op::*;
use crate::plan::program::Plan;
use crate::plan::segment::{self, Part, Segments};
use crate::plan::structure::is_of_microbatches;
use std::ops::Range;
use std::rc::Rc;

/// Lives of every slot, in program order.
pub fn lives(plan: &Plan, line: &Line) -> Vec<Vec<Vec<Life>>> {
    let mut all: Vec<Vec<Vec<Life>>> = plan.tensors.iter().map(|t| vec![Vec::new(); t.slots as usize]).collect();
    for node in 0..line.nodes.len() {
        touched(plan, line, node, &|place| (place.tensor, place.slot), &mut |(tensor, slot), anew| {
            touch(&mut all[tensor as usize][slot as usize], node as u32, anew);
        });
    }
    all
}

/// Tells which slots an op touches, and whether it begins a new life: it writes all of it and reads nothing.
fn touched(
    plan: &Plan,
    line: &Line,
    node: usize,
    slot: &dyn Fn(&Place) -> (TensorId, u32),
    tell: &mut dyn FnMut((TensorId, u32), bool),
) {
    let (reads, writes) = (line.reads(node), line.writes(node));
    for (i, place) in writes.iter().enumerate() {
        let same = |other: &&Place| slot(other) == slot(place);
        if writes[..i].iter().any(|other| same(&other)) {
            continue;
        }
        // Parts that it writes apart, as the messages of one transfer, make up the whole.
        let written: u64 = writes.iter().filter(same).map(|part| part.rows[1] - part.rows[0]).sum();
        let whole = written == plan.tensors[place.tensor as usize].rows();
        tell(slot(place), whole && !reads.iter().any(|read| slot(read) == slot(place)));
    }
    for place in reads {
        tell(slot(place), false);
    }
}

fn touch(lives: &mut Vec<Life>, at: u32, anew: bool) {
    if anew || lives.is_empty() {
        // What is read before it is written was there from the start.
        lives.push(Life { first: if anew { at } else { 0 }, last: at, uses: 1 });
        return;
    }
    let life = lives.last_mut().expect("not empty");
    life.uses += u32::from(life.last != at);
    life.last = at;
}

/// What an op touches, as it names it, and whether a new life begins.
type Touch = (TensorRef, u32, bool);

/// What the ops of a line touch. None if some name rows: what these add up to is then another matter whenever names mean
/// other slots.
fn touches(plan: &Plan, line: &Line) -> Option<Rc<[Vec<Touch>]>> {
    if line.places().iter().any(|place| place.named.rows.is_some()) {
        return None;
    }
    let of_node = |node: usize| {
        let mut all = vec![];
        let names = line.reads(node).iter().chain(line.writes(node));
        let named: Vec<((TensorId, u32), Buf)> = names.map(|at| ((at.tensor, at.slot), at.named)).collect();
        touched(plan, line, node, &|at| (at.tensor, at.slot), &mut |slot, anew| {
            let (_, buf) = named.iter().find(|(known, _)| *known == slot).expect("it is one of its places");
            all.push((buf.of, buf.slot, anew));
        });
        all
    };
    Some((0..line.nodes.len()).map(of_node).collect())
}

/// "No op."
const NEVER: u32 = u32::MAX;

/// Lives of a slot, with the last op of every lane that touches each.
#[derive(Debug, Clone, Default)]
pub struct SlotLives {
    pub lives: Vec<Life>,
    /// Life after life, lane after lane.
    last_on_lane: Vec<u32>,
}

/// For each op and lane the last op of that lane that is certain to have ended before the op starts.
pub struct Before {
    lanes: usize,
    lane_of: Vec<u16>,
    /// One past the op's index; 0 for none. Op after op, lane after lane.
    clock: Vec<u32>,
}

impl Before {
    /// What is certain once op `node` has ended is certain in the last row, which is being written.
    fn add(&mut self, node: u32) {
        let at = self.clock.len() - self.lanes;
        let (known, row) = self.clock.split_at_mut(at);
        let (ended, lane) = (&known[node as usize * self.lanes..][..self.lanes], self.lane_of[node as usize] as usize);
        row.iter_mut().zip(ended).for_each(|(row, &ended)| *row = (*row).max(ended));
        row[lane] = row[lane].max(node + 1);
    }

    /// How many ops were walked.
    pub fn ops(&self) -> usize {
        self.lane_of.len()
    }

    pub fn lane(&self, node: u32) -> u16 {
        self.lane_of[node as usize]
    }

    /// Every use of a life has ended before op `node` starts.
    pub fn ended(&self, of: &SlotLives, life: usize, node: u32) -> bool {
        let clock = &self.clock[node as usize * self.lanes..][..self.lanes];
        let last = &of.last_on_lane[life * self.lanes..][..self.lanes];
        last.iter().zip(clock).all(|(&last, &known)| last == NEVER || last < known)
    }
}

/// A walk over the ops of a program, segment by segment. A call that only repeats itself is walked twice: its
/// first and its last iteration show every neighbourhood that more would.
pub struct Walk<'p> {
    /// What is left out of calls that go from layer to layer; none: every layer is walked.
    gaps: Option<Gaps>,
    plan: &'p Plan,
    atoms: &'p AtomTable,
    given: Vec<TensorId>,
    /// The ops walked of the program's call of several microbatches that are alike.
    microbatches: Option<Range<u32>>,
    segments: Segments<'p>,
    slots: Vec<Vec<SlotLives>>,
    before: Before,
    /// By segment, and of each by node, what ops touch as they name it; none of a segment where that may differ from
    /// time to time.
    touches: Vec<Option<Rc<[Vec<Touch>]>>>,
    /// The last op on each lane, the last to write each atom, and by atom and lane the last since to read it.
    on_lane: Vec<u32>,
    writer: Vec<u32>,
    readers: Vec<u32>,
}

impl<'p> Walk<'p> {
    pub fn new(plan: &'p Plan, atoms: &'p AtomTable) -> Walk<'p> {
        let (lanes, count) = (plan.lanes.len(), atoms.count as usize);
        Walk {
            gaps: None,
            plan,
            atoms,
            given: plan.feed.given(),
            microbatches: None,
            touches: vec![],
            segments: Segments::new(plan, atoms),
            slots: plan.tensors.iter().map(|t| vec![SlotLives::default(); t.slots as usize]).collect(),
            before: Before { lanes, lane_of: vec![], clock: vec![] },
            on_lane: vec![NEVER; lanes],
            writer: vec![NEVER; count],
            readers: vec![NEVER; count * lanes],
        }
    }

    /// The same walk with the layers in the middle left out, see [`Gaps`].
    pub fn leaving_gaps(self) -> Walk<'p> {
        Walk { gaps: Some(Gaps::default()), ..self }
    }

    #[cfg(test)]
    pub fn gaps(&self) -> &Gaps {
        self.gaps.as_ref().expect("a walk that leaves some")
    }

    /// The ops walked of the program's call of several microbatches that are alike, if it has one.
    pub fn microbatches(&self) -> Option<Range<u32>> {
        self.microbatches.clone()
    }

    pub fn finish(self) -> (Vec<Vec<SlotLives>>, Before, Gaps) {
        (self.slots, self.before, self.gaps.unwrap_or_default())
    }

    pub fn body(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &[(TensorId, u32)]) -> Result<()> {
        for part in segment::parts(ops) {
            match part {
                Part::Segment(ops) => self.segment(block, ops, env)?,
                Part::Call { block, args, repeat, op } => {
                    let body = &self.plan.blocks[block as usize].ops;
                    if repeat > 2 && repeats_itself(self.plan, op) {
                        let first = self.before.ops() as u32;
                        self.body(Some(block), body, &bind(args, env, 0))?;
                        self.body(Some(block), body, &bind(args, env, repeat - 1))?;
                        if is_of_microbatches(&self.given, args) {
                            self.microbatches = Some(first..self.before.ops() as u32);
                        }
                        continue;
                    }
                    let middle = self.gaps.as_mut().and_then(|gaps| gaps.middle(args, env, repeat));
                    for i in (0..repeat).filter(|i| middle.as_ref().is_none_or(|middle| !middle.leaves_out(*i))) {
                        let mut inner = bind(args, env, i);
                        if let Some(middle) = &middle {
                            middle.close(i, &mut inner);
                        }
                        self.body(Some(block), body, &inner)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn segment(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &[(TensorId, u32)]) -> Result<()> {
        let number = self.segments.enter(self.atoms, block, ops, env);
        let segment = self.segments.get(number);
        let (line, first) = (&segment.line, self.before.lane_of.len() as u32);
        if first as usize + line.nodes.len() > MOST_OPS {
            return Err(Error::plan(format!("op {:?} is one of more than {MOST_OPS}", ops[0].label)));
        }
        if number == self.touches.len() {
            self.touches.push(touches(self.plan, line));
        }
        let known = self.touches[number].clone();
        for node in 0..line.nodes.len() {
            self.wait(line, node, first);
            let (at, lane) = (first + node as u32, line.nodes[node].lane as usize);
            match &known {
                Some(known) => known[node].iter().for_each(|&(of, slot, anew)| {
                    let (tensor, base) = resolve(of, env);
                    self.lives_on((tensor, base + slot), at, lane, anew);
                }),
                None => self.live(line, node, at, env),
            }
        }
        self.leave(line, first);
        Ok(())
    }

    /// Notes what has ended before an op starts. `first` is the index of the segment's first op.
    fn wait(&mut self, line: &Line, node: usize, first: u32) {
        let (lanes, now) = (self.before.lanes, &self.segments.now);
        let lane = line.nodes[node].lane;
        self.before.clock.resize(self.before.clock.len() + lanes, 0);
        line.preds(node).iter().for_each(|pred| self.before.add(first + pred));
        let on_lane = line.outer.first_on_lane[node].then(|| self.on_lane[lane as usize]);
        let writers = line.outer_reads(node).iter().chain(line.outer_writes(node));
        let writers = writers.map(|&atom| self.writer[now[atom as usize] as usize]);
        let readers = |&atom: &u32| &self.readers[now[atom as usize] as usize * lanes..][..lanes];
        let readers = line.outer_writes(node).iter().flat_map(readers).copied();
        for op in on_lane.into_iter().chain(writers).chain(readers).filter(|op| *op != NEVER) {
            self.before.add(op);
        }
        self.before.lane_of.push(lane);
    }

    /// Notes what an op keeps alive.
    fn live(&mut self, line: &Line, node: usize, at: u32, env: &[(TensorId, u32)]) {
        let lane = line.nodes[node].lane as usize;
        let slot = |place: &Place| {
            let (tensor, base) = resolve(place.named.of, env);
            (tensor, base + place.named.slot)
        };
        touched(self.plan, line, node, &slot, &mut |slot, anew| self.lives_on(slot, at, lane, anew));
    }

    /// Notes that an op touches a slot.
    fn lives_on(&mut self, (tensor, slot): (TensorId, u32), at: u32, lane: usize, anew: bool) {
        let (slot, lanes) = (&mut self.slots[tensor as usize][slot as usize], self.before.lanes);
        touch(&mut slot.lives, at, anew);
        slot.last_on_lane.resize(slot.lives.len() * lanes, NEVER);
        slot.last_on_lane[(slot.lives.len() - 1) * lanes + lane] = at;
    }

    /// What the segment leaves for ops after it to wait for.
    fn leave(&mut self, line: &Line, first: u32) {
        let (lanes, now) = (self.before.lanes, &self.segments.now);
        for &(lane, node) in &line.outer.last_on_lane {
            self.on_lane[lane as usize] = first + node;
        }
        for &(atom, node) in &line.outer.last_write {
            let atom = now[atom as usize] as usize;
            self.writer[atom] = first + node;
            self.readers[atom * lanes..][..lanes].fill(NEVER);
        }
        // Ops of one lane end in order: the last of each is enough.
        for &(atom, node) in &line.outer.last_reads {
            let last = &mut self.readers[now[atom as usize] as usize * lanes + line.nodes[node as usize].lane as usize];
            *last = if *last == NEVER { first + node } else { (*last).max(first + node) };
        }
    }
}
