//! How much memory a program needs, without saying where every slot lies.
//!
//! Slots of a tensor are as large as each other and mostly come to lie one behind the other: what the layers keep for
//! the backward pass. Such a run is looked at as a whole, and which of its slots conflict with another slot is a word
//! of bits. The answer is that of [`Layout`](super::Layout), in a fraction of the time.

use super::{ALIGN, Conflicts, Layout, SlotId, sizes};
use crate::error::Result;
use crate::plan::op::*;
use crate::plan::program::Plan;

/// The memory of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of the arena: the peak.
    pub bytes: u64,
    /// The same of what is in the host's memory: an arena of its own, with offsets of its own.
    pub host_bytes: u64,
    /// Bytes of the device alive at the fullest moment of program order, by kind.
    pub live_by_kind: Vec<(TensorKind, u64)>,
    /// What the placement could not squeeze out of the peak.
    pub gaps: u64,
}

/// The slots of [`Conflicts`], tensor after tensor.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Tensors that live throughout, and how many of their slots do; then the others.
    always: Vec<(TensorId, u64)>,
    others: Vec<(TensorId, u64)>,
    /// How many are alive beside those that live throughout at each moment that may be the fullest.
    moments: Vec<Moment>,
}

impl Counts {
    /// `peaks`: sets of the slots that do not live throughout, each alive at a moment that may be the fullest.
    pub fn of(conflicts: &Conflicts, peaks: &[Vec<u64>]) -> Counts {
        let (always, others) = conflicts.slots.split_at(conflicts.always);
        let tensors = |slots: &[SlotId]| counted(slots.iter().map(|at| at.tensor));
        let (always, others) = (tensors(always), tensors(others));
        let mut moments = vec![];
        peaks.iter().for_each(|peak| add_moment(&mut moments, alive(peak, &others)));
        Counts { always, others, moments }
    }
}

/// How many of each in a row.
fn counted(tensors: impl Iterator<Item = TensorId>) -> Vec<(TensorId, u64)> {
    let mut all: Vec<(TensorId, u64)> = vec![];
    for tensor in tensors {
        match all.last_mut() {
            Some(last) if last.0 == tensor => last.1 += 1,
            _ => all.push((tensor, 1)),
        }
    }
    all
}

/// How many slots of each tensor are in a set; `tensors`: in order, with how many slots each has.
fn alive(set: &[u64], tensors: &[(TensorId, u64)]) -> Moment {
    let (mut first, mut sum, mut all) = (0, 0, vec![]);
    for &(tensor, slots) in tensors {
        let end = first + slots as usize;
        let mut count = 0;
        while first < end {
            let (word, bit) = (first / 64, first % 64);
            let here = (64 - bit).min(end - first);
            count += (set[word] >> bit & (u64::MAX >> (64 - here))).count_ones();
            first += here;
        }
        if count > 0 {
            all.push((tensor, u64::from(count)));
            sum += u64::from(count);
        }
    }
    let mask = all.iter().fold(0, |mask, (tensor, _)| mask | 1 << (tensor % 64));
    Moment { slots: all, sum, mask }
}

/// Adds a moment unless no more slots of any tensor are alive than at another not far back; and takes those away of
/// which it has as many: every layer adds to the one before.
fn add_moment(moments: &mut Vec<Moment>, now: Moment) {
    const BACK: usize = 64;
    let back = moments.len().saturating_sub(BACK);
    if moments[back..].iter().rev().any(|other| now.within(other)) {
        return;
    }
    let mut kept = back;
    for at in back..moments.len() {
        if !moments[at].within(&now) {
            moments.swap(kept, at);
            kept += 1;
        }
    }
    moments.truncate(kept);
    moments.push(now);
}

/// How many slots of each tensor are alive at a moment, and of all.
#[derive(Debug, Clone)]
struct Moment {
    slots: Vec<(TensorId, u64)>,
    sum: u64,
    /// A bit for each of the tensors, or for several: most moments have one that another has not.
    mask: u64,
}

impl Moment {
    /// Whether another has as many of everything; both in the same order.
    fn within(&self, other: &Moment) -> bool {
        if self.mask & !other.mask != 0 {
            return false;
        }
        let mut rest = other.slots.iter();
        let mut has = |of: &(TensorId, u64)| rest.find(|there| there.0 == of.0).is_some_and(|there| there.1 >= of.1);
        self.sum <= other.sum && self.slots.len() <= other.slots.len() && self.slots.iter().all(&mut has)
    }
}

impl Footprint {
    /// The memory of a program whose conflicts are known.
    pub fn of(plan: &Plan, conflicts: &Conflicts) -> Result<Footprint> {
        if plan.tensors.iter().any(|t| t.host) {
            // Two arenas; and such plans are few.
            return Layout::of(plan, conflicts).map(|layout| layout.footprint);
        }
        let counts = &conflicts.counts;
        let of_slot: Vec<u64> = plan.tensors.iter().map(|t| t.bytes().next_multiple_of(ALIGN)).collect();
        let size = |tensor: TensorId| of_slot[tensor as usize];
        let throughout = || inputs(plan, conflicts).chain(counts.always.iter().copied());
        if !fits_numbers(plan, conflicts) {
            // Has the words for it.
            sizes(plan, conflicts)?;
        }
        let bytes_of = |alive: &[(TensorId, u64)]| alive.iter().map(|&(t, slots)| size(t) * slots).sum::<u64>();
        let bottom = throughout().map(|(t, slots)| size(t) * slots).sum();
        let bytes = peak(conflicts, &of_slot, bottom);
        // The first one of the fullest.
        let mut fullest: (u64, &[(TensorId, u64)]) = (0, &[]);
        for moment in &counts.moments {
            let now = bytes_of(&moment.slots);
            if now > fullest.0 {
                fullest = (now, &moment.slots);
            }
        }
        let mut by_kind = TensorKind::ALL.map(|kind| (kind, 0));
        for (tensor, slots) in throughout().chain(fullest.1.iter().copied()) {
            by_kind[plan.tensors[tensor as usize].kind as usize].1 += size(tensor) * slots;
        }
        let live: u64 = by_kind.iter().map(|(_, bytes)| bytes).sum();
        Ok(Footprint { bytes, host_bytes: 0, live_by_kind: by_kind.to_vec(), gaps: bytes - live })
    }

    /// The memory of `plan` where this is that of a plan with `more` slots fewer of each input, and else the same:
    /// inputs lie below all that is placed. None where that is not so, or is too much for numbers.
    pub fn with_inputs(&self, plan: &Plan, conflicts: &Conflicts, more: u64) -> Option<Footprint> {
        if plan.tensors.iter().any(|t| t.host) || !fits_numbers(plan, conflicts) {
            return None;
        }
        let mut footprint = self.clone();
        for (tensor, _) in inputs(plan, conflicts) {
            let tensor = &plan.tensors[tensor as usize];
            let bytes = tensor.bytes().next_multiple_of(ALIGN) * more;
            footprint.bytes += bytes;
            footprint.live_by_kind.iter_mut().filter(|(kind, _)| *kind == tensor.kind).for_each(|(_, b)| *b += bytes);
        }
        Some(footprint)
    }

    /// Bytes of weights, gradients and optimizer state, which no split of the sequence makes fewer.
    pub fn persisting(&self) -> u64 {
        self.live_by_kind.iter().filter(|(kind, _)| kind.persists()).map(|(_, bytes)| bytes).sum()
    }
}

/// The inputs, and how many slots each has.
fn inputs(plan: &Plan, conflicts: &Conflicts) -> impl Iterator<Item = (TensorId, u64)> {
    conflicts.inputs.iter().map(|&t| (t, u64::from(plan.tensors[t as usize].slots)))
}

/// Whether all slots together are fewer bytes than are counted with.
fn fits_numbers(plan: &Plan, conflicts: &Conflicts) -> bool {
    let counts = [&conflicts.counts.always, &conflicts.counts.others].into_iter().flatten().copied();
    let total = inputs(plan, conflicts).chain(counts).try_fold(0u64, |sum, (tensor, slots)| {
        let bytes = plan.tensors[tensor as usize].bytes().next_multiple_of(ALIGN);
        sum.checked_add(bytes.checked_mul(slots)?).filter(|total| *total < 1 << 60)
    });
    total.is_some()
}

/// Slots of a tensor that lie one behind the other, no more of them than a word has bits.
struct Run {
    from: u64,
    end: u64,
    size: u64,
    first: usize,
    count: usize,
}

impl Run {
    const MOST: usize = 64;
}

/// The end of the last slot: largest first, each at the lowest offset where it touches nothing it conflicts with, and
/// nothing below `bottom`. `bytes`: of a slot of each tensor.
fn peak(conflicts: &Conflicts, bytes: &[u64], bottom: u64) -> u64 {
    let mut first = conflicts.always;
    let mut tensors: Vec<(u64, usize, usize)> = (conflicts.counts.others.iter())
        .map(|&(tensor, slots)| {
            let own = (bytes[tensor as usize], first, slots as usize);
            first += own.2;
            own
        })
        .collect();
    tensors.sort_by_key(|&(size, first, _)| (std::cmp::Reverse(size), first));
    // Always in order of offset.
    let mut runs: Vec<Run> = Vec::with_capacity(2 * tensors.len());
    let (mut top, mut earlier) = (bottom, vec![0; conflicts.words()]);
    for (size, first, slots) in tensors {
        // The run that the slot before is the last of, and where that slot lies.
        let (mut run, mut last) = (usize::MAX, bottom);
        for slot in first..first + slots {
            // Where the slot before it touches the same, no place below that one's is free.
            let mut offset = bottom;
            if slot > first {
                if conflicts.like_before(slot) || conflicts.same_among(&earlier, slot - 1, slot) {
                    offset = if conflicts.between(slot - 1, slot) { last + size } else { last };
                }
                conflicts.add_to(&mut earlier, slot - 1);
            }
            // Above all that is placed there is nothing in the way.
            if offset < top {
                offset = lowest(conflicts, &runs, slot, size, offset);
            }
            top = top.max(offset + size);
            last = offset;
            if let Some(run) = runs.get_mut(run).filter(|run| run.end == offset && run.count < Run::MOST && size > 0) {
                (run.count, run.end) = (run.count + 1, offset + size);
            } else {
                run = runs.partition_point(|run| run.from <= offset);
                runs.insert(run, Run { from: offset, end: offset + size, size, first: slot, count: 1 });
            }
        }
        conflicts.add_to(&mut earlier, first + slots - 1);
    }
    top
}

/// The lowest place from `offset` on where a slot touches none that it conflicts with.
fn lowest(conflicts: &Conflicts, runs: &[Run], slot: usize, size: u64, mut offset: u64) -> u64 {
    loop {
        let before = offset;
        for run in runs {
            if run.from >= offset + size {
                break;
            }
            if run.end <= offset {
                continue;
            }
            // Those that conflict, one batch of neighbours after the other.
            let mut bits = conflicts.with(slot, run.first, run.count);
            let mut at = run.from;
            while bits != 0 {
                let free = bits.trailing_zeros();
                bits >>= free;
                let taken = bits.trailing_ones();
                bits = bits.checked_shr(taken).unwrap_or(0);
                let from = at + u64::from(free) * run.size;
                at = from + u64::from(taken) * run.size;
                if from >= offset + size {
                    break;
                }
                offset = offset.max(at);
            }
        }
        // Runs may lie on top of each other: what was passed may be in the way from here.
        if offset == before {
            return offset;
        }
    }
}
