//! Memory read off the plan: who lives when, and where everything is put.
//!
//! A *life* of a slot runs from an op that writes it without reading it to its last use. Two slots may
//! share bytes only where edges of the plan order every life of one before or after every life of the
//! other, so that placing memory never changes timing. The executor allocates by this very placement.

use super::link::{AtomTable, Line, MOST_OPS, Place, bind, repeats_itself, resolve};
use super::op::*;
use super::program::Plan;
use super::segment::{self, Part, Segments};
use crate::error::{Error, Result};

/// Every place is a multiple of this, as CUDA's allocator has it.
pub const ALIGN: u64 = 256;

/// A slot of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId {
    pub tensor: TensorId,
    pub slot: u32,
}

/// One life of a slot: ops in program order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    pub first: u32,
    pub last: u32,
    /// Ops that touch it.
    pub uses: u32,
}

/// Where one rank keeps everything.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Bytes of the arena: the peak.
    pub bytes: u64,
    offsets: Vec<Vec<Option<u64>>>,
    /// Bytes alive at the fullest moment of program order, by kind.
    pub live_by_kind: Vec<(TensorKind, u64)>,
    /// What the placement could not squeeze out of the peak.
    pub gaps: u64,
}

impl Layout {
    /// The layout of a program.
    pub fn new(plan: &Plan, atoms: &AtomTable, program: u32) -> Result<Layout> {
        let mut walk = Walk::new(plan, atoms);
        walk.body(None, &plan.programs[program as usize].ops, &[])?;
        let (slots, before) = walk.finish();
        let items = items(plan, &slots)?;
        Ok(place(plan, &before, items))
    }

    /// Bytes of weights, gradients and optimizer state, which no split of the sequence makes fewer.
    pub fn persisting(&self) -> u64 {
        self.live_by_kind.iter().filter(|(kind, _)| kind.persists()).map(|(_, bytes)| bytes).sum()
    }

    /// Byte offset of a slot in the arena; none for a slot that no op touches.
    pub fn offset(&self, at: SlotId) -> Option<u64> {
        self.offsets[at.tensor as usize][at.slot as usize]
    }
}

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
    for place in writes {
        let whole = place.rows == [0, plan.tensors[place.tensor as usize].rows()];
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

/// "No op."
const NEVER: u32 = u32::MAX;

/// Lives of a slot, with the last op of every lane that touches each.
#[derive(Debug, Clone, Default)]
struct SlotLives {
    lives: Vec<Life>,
    /// Life after life, lane after lane.
    last_on_lane: Vec<u32>,
}

/// For each op and lane the last op of that lane that is certain to have ended before the op starts.
struct Before {
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

    /// Every use of a life has ended before op `node` starts.
    fn ended(&self, of: &SlotLives, life: usize, node: u32) -> bool {
        let clock = &self.clock[node as usize * self.lanes..][..self.lanes];
        let last = &of.last_on_lane[life * self.lanes..][..self.lanes];
        last.iter().zip(clock).all(|(&last, &known)| last == NEVER || last < known)
    }
}

/// A walk over the ops of a program, segment by segment. A call that only repeats itself is walked twice: its
/// first and its last iteration show every neighbourhood that more would.
struct Walk<'p> {
    plan: &'p Plan,
    atoms: &'p AtomTable,
    segments: Segments<'p>,
    slots: Vec<Vec<SlotLives>>,
    before: Before,
    /// The last op on each lane, the last to write each atom, and by atom and lane the last since to read it.
    on_lane: Vec<u32>,
    writer: Vec<u32>,
    readers: Vec<u32>,
}

impl<'p> Walk<'p> {
    fn new(plan: &'p Plan, atoms: &'p AtomTable) -> Walk<'p> {
        let (lanes, count) = (plan.lanes.len(), atoms.count as usize);
        Walk {
            plan,
            atoms,
            segments: Segments::new(plan, atoms),
            slots: plan.tensors.iter().map(|t| vec![SlotLives::default(); t.slots as usize]).collect(),
            before: Before { lanes, lane_of: vec![], clock: vec![] },
            on_lane: vec![NEVER; lanes],
            writer: vec![NEVER; count],
            readers: vec![NEVER; count * lanes],
        }
    }

    fn finish(self) -> (Vec<Vec<SlotLives>>, Before) {
        (self.slots, self.before)
    }

    fn body(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &[(TensorId, u32)]) -> Result<()> {
        for part in segment::parts(ops) {
            match part {
                Part::Segment(ops) => self.segment(block, ops, env)?,
                Part::Call { block, args, repeat, op } => {
                    let body = &self.plan.blocks[block as usize].ops;
                    let short = repeat > 2 && repeats_itself(self.plan, op);
                    for i in (0..repeat).filter(|i| !short || *i == 0 || i + 1 == repeat) {
                        self.body(Some(block), body, &bind(args, env, i))?;
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
        for node in 0..line.nodes.len() {
            self.wait(line, node, first);
            self.live(line, node, first + node as u32, env);
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
        let (lanes, lane) = (self.before.lanes, line.nodes[node].lane as usize);
        let slot = |place: &Place| {
            let (tensor, base) = resolve(place.named.of, env);
            (tensor, base + place.named.slot)
        };
        touched(self.plan, line, node, &slot, &mut |(tensor, slot), anew| {
            let slot = &mut self.slots[tensor as usize][slot as usize];
            touch(&mut slot.lives, at, anew);
            slot.last_on_lane.resize(slot.lives.len() * lanes, NEVER);
            slot.last_on_lane[(slot.lives.len() - 1) * lanes + lane] = at;
        });
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

/// A slot to be placed.
struct Item<'a> {
    at: SlotId,
    bytes: u64,
    kind: TensorKind,
    /// Absent for what lives throughout.
    lives: Option<&'a SlotLives>,
}

fn items<'a>(plan: &Plan, slots: &'a [Vec<SlotLives>]) -> Result<Vec<Item<'a>>> {
    let mut items = Vec::new();
    let (mut total, given) = (0u64, plan.feed.given());
    for (t, (tensor, slots)) in plan.tensors.iter().zip(slots).enumerate() {
        if slots.iter().all(|slot| slot.lives.is_empty()) {
            continue;
        }
        let bytes = tensor.bytes().next_multiple_of(ALIGN);
        // Iterations that were not walked bind slots of the inputs; no other slot can have been overlooked.
        let (input, stays) = (given.contains(&(t as u32)), tensor.kind.persists() || plan.feed.stays(t as u32));
        for (slot, own) in (0..).zip(slots) {
            if own.lives.is_empty() && !stays && !input {
                continue;
            }
            total = total.checked_add(bytes).filter(|t| *t < 1 << 60).ok_or_else(|| {
                Error::infeasible(format!(
                    "memory: the tensors of one rank, {:?} among them, pass an exabyte",
                    tensor.name
                ))
            })?;
            let lives = Some(own).filter(|own| !stays && !own.lives.is_empty());
            items.push(Item { at: SlotId { tensor: t as u32, slot }, bytes, kind: tensor.kind, lives });
        }
    }
    Ok(items)
}

/// Whether two slots ever need their bytes at the same time, as far as edges can tell.
fn conflict(a: &Item, b: &Item, before: &Before) -> bool {
    let (Some(a), Some(b)) = (a.lives, b.lives) else { return true };
    // Lives of one slot are ordered among themselves, so of those that begin before a life of the other slot
    // only the last can still be going on.
    let (mut i, mut j) = (0, 0);
    while let (Some(life_a), Some(life_b)) = (a.lives.get(i), b.lives.get(j)) {
        let ordered = if life_a.first <= life_b.first {
            i = a.lives.partition_point(|life| life.first <= life_b.first);
            before.ended(a, i - 1, life_b.first)
        } else {
            j = b.lives.partition_point(|life| life.first < life_a.first);
            before.ended(b, j - 1, life_a.first)
        };
        if !ordered {
            return true;
        }
    }
    false
}

/// Largest first, each at the lowest offset where it touches nothing it conflicts with.
fn place(plan: &Plan, before: &Before, mut items: Vec<Item>) -> Layout {
    let live_by_kind = fullest_moment(before.lane_of.len(), &items);
    let live: u64 = live_by_kind.iter().map(|(_, bytes)| bytes).sum();
    items.sort_by_key(|i| (i.lives.is_some(), std::cmp::Reverse(i.bytes), i.at));
    let mut offsets: Vec<Vec<Option<u64>>> = plan.tensors.iter().map(|t| vec![None; t.slots as usize]).collect();
    let mut put = |item: &Item, offset| offsets[item.at.tensor as usize][item.at.slot as usize] = Some(offset);
    // What lives throughout lies at the bottom, one behind the other.
    let (always, sometimes) = items.split_at(items.partition_point(|i| i.lives.is_none()));
    let mut bottom = 0;
    for item in always {
        put(item, bottom);
        bottom += item.bytes;
    }
    // Always in order of offset.
    let mut placed: Vec<(u64, &Item)> = Vec::with_capacity(sometimes.len());
    let mut peak = bottom;
    for item in sometimes {
        let mut offset = bottom;
        for &(from, other) in &placed {
            if from >= offset + item.bytes {
                break;
            }
            let end = from + other.bytes;
            if end > offset && conflict(item, other, before) {
                offset = end;
            }
        }
        put(item, offset);
        peak = peak.max(offset + item.bytes);
        placed.insert(placed.partition_point(|p| p.0 <= offset), (offset, item));
    }
    Layout { bytes: peak, offsets, live_by_kind, gaps: peak - live }
}

/// Bytes by kind at the moment of program order, of `ops` in all, at which most are alive.
fn fullest_moment(ops: usize, items: &[Item]) -> Vec<(TensorKind, u64)> {
    let mut change = vec![0i64; ops + 1];
    for item in items {
        for life in item.lives.iter().flat_map(|own| &own.lives) {
            change[life.first as usize] += item.bytes as i64;
            change[life.last as usize + 1] -= item.bytes as i64;
        }
    }
    let (mut now, mut most, mut moment) = (0, 0, 0);
    for (op, change) in (0..).zip(&change) {
        now += change;
        if now > most {
            (most, moment) = (now, op);
        }
    }
    let alive = |item: &&Item| {
        item.lives.is_none_or(|own| own.lives.iter().any(|life| life.first <= moment && moment <= life.last))
    };
    let bytes = |kind| items.iter().filter(|i| i.kind == kind).filter(alive).map(|i| i.bytes).sum();
    TensorKind::ALL.iter().map(|&kind| (kind, bytes(kind))).collect()
}
