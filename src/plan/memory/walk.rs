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
    let mut all: Vec<Vec<SlotLives>> =
        plan.tensors.iter().map(|t| vec![SlotLives::default(); t.slots as usize]).collect();
    for node in 0..line.nodes.len() {
        let on = On { op: node as u32, lane: line.nodes[node].lane, lanes: plan.lanes.len() };
        touched(line, node, &|place| (place.tensor, place.slot), &mut |(tensor, slot), how| {
            all[tensor as usize][slot as usize].touch(on, how, plan.tensors[tensor as usize].rows());
        });
    }
    all.into_iter().map(|slots| slots.into_iter().map(|slot| slot.lives).collect()).collect()
}

/// Tells which slots an op touches, and how.
fn touched(
    line: &Line,
    node: usize,
    slot: &dyn Fn(&Place) -> (TensorId, u32),
    tell: &mut dyn FnMut((TensorId, u32), How),
) {
    let (reads, writes) = (line.reads(node), line.writes(node));
    for (i, place) in writes.iter().enumerate() {
        let same = |other: &&Place| slot(other) == slot(place);
        if writes[..i].iter().any(|other| same(&other)) {
            continue;
        }
        // Parts that it writes apart, as the messages of one transfer, make up the whole.
        let mut parts: Vec<[u64; 2]> = writes.iter().filter(same).map(|part| part.rows).collect();
        parts.sort_unstable();
        let rows = hull(&parts);
        let in_one = parts.windows(2).all(|pair| pair[0][1] == pair[1][0]);
        tell(
            slot(place),
            match in_one && !reads.iter().any(|read| same(&read)) {
                true => How::Writes(rows),
                false => How::Uses(rows),
            },
        );
    }
    for place in reads {
        tell(slot(place), How::Uses(place.rows));
    }
}

/// The rows from the first to the last of some.
fn hull(parts: &[[u64; 2]]) -> [u64; 2] {
    parts.iter().fold([u64::MAX, 0], |all, part| [all[0].min(part[0]), all[1].max(part[1])])
}

/// How an op touches a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// It writes these rows, and reads nothing of the slot.
    Writes([u64; 2]),
    /// It reads, or writes beside what it reads, some of these rows.
    Uses([u64; 2]),
}

/// An op that is walked: its number, its lane, and how many lanes there are.
#[derive(Debug, Clone, Copy)]
struct On {
    op: u32,
    lane: u16,
    lanes: usize,
}

/// What an op touches, as it names it, and how.
type Touch = (TensorRef, u32, How);

/// What the ops of a line touch. None if some name rows: what these add up to is then another matter whenever names mean
/// other slots.
fn touches(line: &Line) -> Option<Rc<[Vec<Touch>]>> {
    if line.places().iter().any(|place| place.named.rows.is_some()) {
        return None;
    }
    let of_node = |node: usize| {
        let mut all = vec![];
        let names = line.reads(node).iter().chain(line.writes(node));
        let named: Vec<((TensorId, u32), Buf)> = names.map(|at| ((at.tensor, at.slot), at.named)).collect();
        touched(line, node, &|at| (at.tensor, at.slot), &mut |slot, how| {
            let (_, buf) = named.iter().find(|(known, _)| *known == slot).expect("it is one of its places");
            all.push((buf.of, buf.slot, how));
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
    growing: Option<Growing>,
    /// Whether anything of the last life has been read: rows that nobody has read are there for others to be written over
    /// them, as the zeros of a framework before pieces come.
    read: bool,
}

/// A life that began with the first rows of its slot, of which more may be written: the pieces of a loss, or the chunks
/// of a sequence. Nothing behind them has been looked at since, so that whatever was there before is of no use.
#[derive(Debug, Clone, Copy)]
struct Growing {
    /// Rows written so far.
    rows: u64,
    /// Whoever writes more rows has to come after the op that began; what is of one lane does.
    lane: u16,
}

impl SlotLives {
    /// Notes that an op touches the slot, which has `rows`.
    ///
    /// A life begins with an op that writes rows from the first one on without reading any, and goes on as the
    /// rows behind them are written. Where rows are touched that were not written since, the slot had lived before.
    fn touch(&mut self, on: On, how: How, rows: u64) {
        match (how, &mut self.growing) {
            (How::Writes([0, end]), _) if end == rows => self.begin(on, None),
            (How::Writes([0, end]), None) if self.read || self.lives.is_empty() => {
                self.begin(on, Some(Growing { rows: end, lane: on.lane }));
            }
            (How::Writes([from, end]), Some(life)) if from == life.rows && on.lane == life.lane => {
                life.rows = end;
                self.growing = self.growing.filter(|life| life.rows < rows);
            }
            (How::Writes(touched) | How::Uses(touched), Some(life)) if touched[1] > life.rows => self.go_on(on.lanes),
            _ => {}
        }
        self.read |= matches!(how, How::Uses(_));
        // What is read before it is written was there from the start.
        if self.lives.is_empty() {
            self.lives.push(Life { first: 0, last: on.op, uses: 0 });
            self.last_on_lane.resize(on.lanes, NEVER);
        }
        let life = self.lives.last_mut().expect("not empty");
        life.uses += u32::from(life.uses == 0 || life.last != on.op);
        life.last = on.op;
        let lanes = self.last_on_lane.len() - on.lanes;
        self.last_on_lane[lanes + on.lane as usize] = on.op;
    }

    fn begin(&mut self, on: On, growing: Option<Growing>) {
        self.lives.push(Life { first: on.op, last: on.op, uses: 0 });
        self.last_on_lane.resize(self.lives.len() * on.lanes, NEVER);
        (self.growing, self.read) = (growing, false);
    }

    /// The last life is the one before it going on, or was there from the start.
    fn go_on(&mut self, lanes: usize) {
        self.growing = None;
        let [.., before, last] = &mut self.lives[..] else {
            self.lives[0].first = 0;
            return;
        };
        (before.last, before.uses) = (last.last, before.uses + last.uses);
        self.lives.pop();
        let own = self.last_on_lane.split_off(self.lives.len() * lanes);
        let all = self.last_on_lane.len() - lanes;
        for (last, own) in self.last_on_lane[all..].iter_mut().zip(own) {
            *last = if own == NEVER { *last } else { own };
        }
    }
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
            self.touches.push(touches(line));
        }
        let known = self.touches[number].clone();
        for node in 0..line.nodes.len() {
            self.wait(line, node, first);
            let on = On { op: first + node as u32, lane: line.nodes[node].lane, lanes: self.before.lanes };
            match &known {
                Some(known) => known[node].iter().for_each(|&(of, slot, how)| {
                    let (tensor, base) = resolve(of, env);
                    self.lives_on((tensor, base + slot), on, how);
                }),
                None => self.live(line, node, on, env),
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
        let on_lanes = line.outer.lanes.of(node).iter().map(|&lane| self.on_lane[lane as usize]);
        let writers = line.outer_reads(node).iter().chain(line.outer_writes(node));
        let writers = writers.map(|&atom| self.writer[now[atom as usize] as usize]);
        let readers = |&atom: &u32| &self.readers[now[atom as usize] as usize * lanes..][..lanes];
        let readers = line.outer_writes(node).iter().flat_map(readers).copied();
        for op in on_lanes.chain(writers).chain(readers).filter(|op| *op != NEVER) {
            self.before.add(op);
        }
        self.before.lane_of.push(lane);
    }

    /// Notes what an op keeps alive.
    fn live(&mut self, line: &Line, node: usize, on: On, env: &[(TensorId, u32)]) {
        let slot = |place: &Place| {
            let (tensor, base) = resolve(place.named.of, env);
            (tensor, base + place.named.slot)
        };
        touched(line, node, &slot, &mut |slot, how| self.lives_on(slot, on, how));
    }

    /// Notes that an op touches a slot.
    fn lives_on(&mut self, (tensor, slot): (TensorId, u32), on: On, how: How) {
        self.slots[tensor as usize][slot as usize].touch(on, how, self.plan.tensors[tensor as usize].rows());
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

#[cfg(test)]
mod tests {
    use super::*;
    use How::{Uses, Writes};

    /// The first and last ops of the lives of a slot of eight rows, touched so on lanes.
    fn lives(touched: &[(u16, How)]) -> Vec<(u32, u32)> {
        let mut slot = SlotLives::default();
        for (op, &(lane, how)) in (10..).zip(touched) {
            slot.touch(On { op, lane, lanes: 2 }, how, 8);
        }
        assert_eq!(slot.lives.iter().map(|life| life.uses).sum::<u32>() as usize, touched.len());
        let of_last: Vec<u32> = slot.last_on_lane[(slot.lives.len() - 1) * 2..].to_vec();
        let last = of_last.iter().filter(|&&op| op != NEVER).max().copied();
        assert_eq!((slot.last_on_lane.len(), last), (2 * slot.lives.len(), slot.lives.last().map(|life| life.last)));
        slot.lives.iter().map(|life| (life.first, life.last)).collect()
    }

    #[test]
    fn a_slot_written_piece_by_piece_lives_from_its_first_piece_on() {
        let whole = (0, Writes([0, 8]));
        let all = Uses([0, 8]);
        assert_eq!(lives(&[whole, (1, all), (0, Writes([0, 4])), (0, Writes([4, 8])), (1, all)]), [(10, 11), (12, 14)]);
        // Pieces that are read, or written again, before the next come.
        let halves = [(0, Writes([0, 4])), (1, Uses([0, 4])), (1, Writes([0, 2])), (0, Writes([4, 8])), (0, all)];
        assert_eq!(lives(&halves), [(10, 14)]);
        // Again and again.
        let twice = [(0, Writes([0, 4])), (0, Writes([4, 8])), (0, all), (0, Writes([0, 4])), (0, Writes([4, 8]))];
        assert_eq!(lives(&twice), [(10, 12), (13, 14)]);
        // Zeros before pieces.
        assert_eq!(
            lives(&[whole, (0, all), whole, (0, Writes([0, 4])), (0, Writes([4, 8])), (0, all)]),
            [(10, 11), (12, 15)]
        );
        // Nobody asks for the rest.
        assert_eq!(lives(&[whole, (0, all), (0, Writes([0, 4])), (0, Uses([1, 3]))]), [(10, 11), (12, 13)]);
    }

    #[test]
    fn what_is_read_before_all_of_it_is_written_lived_before() {
        let (first, all) = ((0, Writes([0, 4])), Uses([0, 8]));
        assert_eq!(lives(&[first, (0, all)]), [(0, 11)]);
        assert_eq!(lives(&[(0, Writes([0, 8])), (1, first.1), (0, all)]), [(10, 12)]);
        // Written in another order, with a hole, or by a lane that need not wait for the first piece.
        assert_eq!(lives(&[(0, Writes([4, 8])), first, (0, all)]), [(0, 12)]);
        assert_eq!(lives(&[first, (0, Writes([6, 8])), (0, all)]), [(0, 12)]);
        assert_eq!(lives(&[first, (1, Writes([4, 8])), (0, all)]), [(0, 12)]);
    }
}
