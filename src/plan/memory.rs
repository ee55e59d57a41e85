//! Memory read off the plan: who lives when, and where everything is put.
//!
//! A *life* of a slot runs from an op that writes it without reading it to its last use. Two slots may
//! share bytes only where edges of the plan order every life of one before or after every life of the
//! other, so that placing memory never changes timing. The executor allocates by this very placement.

use super::link::{AtomTable, Line};
use super::op::*;
use super::program::Plan;
use crate::error::{Error, Result};

/// Every place is a multiple of this, as CUDA's allocator has it.
pub const ALIGN: u64 = 256;

/// A slot of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId {
    pub tensor: TensorId,
    pub slot: u32,
}

/// One life of a slot: ops in program order, and the last op of each lane that touches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    pub first: u32,
    pub last: u32,
    /// Ops that touch it.
    pub uses: u32,
    last_on_lane: Vec<u32>,
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
        let line = Line::short(plan, atoms, program)?;
        let lives = lives(plan, &line);
        let items = items(plan, &line, &lives)?;
        Ok(place(plan, &line, items))
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
        let (reads, writes) = (line.reads(node), line.writes(node));
        for place in writes {
            let read_too = reads.iter().any(|r| (r.tensor, r.slot) == (place.tensor, place.slot));
            let whole = place.rows == [0, plan.tensors[place.tensor as usize].rows()];
            touch(&mut all[place.tensor as usize][place.slot as usize], node, line, whole && !read_too);
        }
        for place in reads {
            touch(&mut all[place.tensor as usize][place.slot as usize], node, line, false);
        }
    }
    all
}

fn touch(lives: &mut Vec<Life>, node: usize, line: &Line, anew: bool) {
    let at = node as u32;
    if anew || lives.is_empty() {
        // What is read before it is written was there from the start.
        let first = if anew { at } else { 0 };
        lives.push(Life { first, last: at, uses: 0, last_on_lane: vec![NEVER; line.lanes] });
    }
    let life = lives.last_mut().expect("just pushed");
    life.last = at;
    let lane = &mut life.last_on_lane[line.nodes[node].lane as usize];
    if *lane != at {
        *lane = at;
        life.uses += 1;
    }
}

/// "No op of that lane."
const NEVER: u32 = u32::MAX;

/// For each op and lane the last op of that lane that is certain to have ended before the op starts.
struct Before {
    lanes: usize,
    /// One past the op's index; 0 for none.
    clock: Vec<u32>,
}

impl Before {
    fn new(line: &Line) -> Before {
        let lanes = line.lanes;
        let mut clock = vec![0u32; line.nodes.len() * lanes];
        for node in 0..line.nodes.len() {
            for &pred in line.preds(node) {
                let pred = pred as usize;
                for lane in 0..lanes {
                    clock[node * lanes + lane] = clock[node * lanes + lane].max(clock[pred * lanes + lane]);
                }
                let own = &mut clock[node * lanes + line.nodes[pred].lane as usize];
                *own = (*own).max(pred as u32 + 1);
            }
        }
        Before { lanes, clock }
    }

    /// Every use of `life` has ended before op `node` starts.
    fn ended(&self, life: &Life, node: u32) -> bool {
        let clock = &self.clock[node as usize * self.lanes..][..self.lanes];
        life.last_on_lane.iter().zip(clock).all(|(&last, &known)| last == NEVER || last < known)
    }
}

/// A slot to be placed.
struct Item<'a> {
    at: SlotId,
    bytes: u64,
    kind: TensorKind,
    /// Empty for what lives throughout.
    lives: &'a [Life],
}

fn items<'a>(plan: &Plan, line: &Line, lives: &'a [Vec<Vec<Life>>]) -> Result<Vec<Item<'a>>> {
    let mut items = Vec::new();
    let mut total: u64 = 0;
    for (t, tensor) in plan.tensors.iter().enumerate() {
        let touched = lives[t].iter().any(|l| !l.is_empty());
        for slot in 0..tensor.slots {
            let own = &lives[t][slot as usize];
            let bytes = tensor.bytes().next_multiple_of(ALIGN);
            // A slot of the middle iterations that were not walked lives throughout: only inputs are such.
            let lives: &[Life] = if tensor.kind.persists() || own.is_empty() { &[] } else { own };
            if touched {
                total = total.checked_add(bytes).filter(|t| *t < 1 << 60).ok_or_else(|| {
                    Error::infeasible(format!(
                        "memory: the tensors of one rank, {:?} among them, pass an exabyte",
                        tensor.name
                    ))
                })?;
                items.push(Item { at: SlotId { tensor: t as u32, slot }, bytes, kind: tensor.kind, lives });
            }
        }
    }
    debug_assert!(!line.nodes.is_empty() || items.is_empty());
    Ok(items)
}

/// Whether two slots ever need their bytes at the same time, as far as edges can tell.
fn conflict(a: &Item, b: &Item, before: &Before) -> bool {
    if a.lives.is_empty() || b.lives.is_empty() {
        return true;
    }
    // Lives of one slot are ordered among themselves, so neighbours in program order decide.
    let (mut i, mut j) = (0, 0);
    while i < a.lives.len() && j < b.lives.len() {
        let (la, lb) = (&a.lives[i], &b.lives[j]);
        let ordered = if la.first <= lb.first { before.ended(la, lb.first) } else { before.ended(lb, la.first) };
        if !ordered {
            return true;
        }
        if la.first <= lb.first { i += 1 } else { j += 1 }
    }
    false
}

/// Largest first, each at the lowest offset where it touches nothing it conflicts with.
fn place(plan: &Plan, line: &Line, mut items: Vec<Item>) -> Layout {
    let before = Before::new(line);
    let (live_by_kind, live) = fullest_moment(line, &items);
    items.sort_by_key(|i| (!i.lives.is_empty(), std::cmp::Reverse(i.bytes), i.at));
    let mut offsets: Vec<Vec<Option<u64>>> = plan.tensors.iter().map(|t| vec![None; t.slots as usize]).collect();
    // Always in order of offset.
    let mut placed: Vec<(u64, usize)> = Vec::with_capacity(items.len());
    let mut peak = 0;
    for at in 0..items.len() {
        let item = &items[at];
        let mut offset = 0;
        for &(from, other) in &placed {
            if from >= offset + item.bytes {
                break;
            }
            let end = from + items[other].bytes;
            if end > offset && conflict(item, &items[other], &before) {
                offset = end;
            }
        }
        offsets[item.at.tensor as usize][item.at.slot as usize] = Some(offset);
        peak = peak.max(offset + item.bytes);
        let index = placed.partition_point(|p| p.0 <= offset);
        placed.insert(index, (offset, at));
    }
    Layout { bytes: peak, offsets, live_by_kind, gaps: peak - live }
}

/// Bytes by kind at the moment of program order at which most are alive.
fn fullest_moment(line: &Line, items: &[Item]) -> (Vec<(TensorKind, u64)>, u64) {
    let n = line.nodes.len().max(1);
    let mut change = vec![[0i64; TensorKind::ALL.len()]; n + 1];
    for item in items {
        let kind = item.kind as usize;
        if item.lives.is_empty() {
            change[0][kind] += item.bytes as i64;
        }
        for life in item.lives {
            change[life.first as usize][kind] += item.bytes as i64;
            change[life.last as usize + 1][kind] -= item.bytes as i64;
        }
    }
    let mut now = [0i64; TensorKind::ALL.len()];
    let mut best = now;
    for step in &change {
        now.iter_mut().zip(step).for_each(|(n, c)| *n += c);
        if now.iter().sum::<i64>() > best.iter().sum() {
            best = now;
        }
    }
    let by_kind = TensorKind::ALL.iter().map(|&k| (k, best[k as usize] as u64)).collect();
    (by_kind, best.iter().sum::<i64>() as u64)
}
