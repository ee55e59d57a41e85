//! Iterations that repeat the one before, taken in one stride.
//!
//! What an iteration does depends on the state it finds: the last times of lanes and buffers. If two
//! iterations in a row left every one of those later by the same D, or so early that nothing waited for
//! it, then so will the next, and all after it: starts are maxima of what is found, plus constants. The
//! stride adds D times the iterations left, and is exact in picoseconds.
//!
//! Buffers take part by role: slot 5 in iteration 5 is what slot 4 was in iteration 4. Slots that only the
//! iterations ahead touch must be early too, or the stride is not taken.

use super::walk::{AtomRef, Held, SegmentKey, Stamp, Walker};
use crate::error::Result;
use crate::plan::link::{Env, bind};
use crate::plan::*;
use rustc_hash::{FxHashMap, FxHashSet};

/// The state after an iteration, by role.
struct Mark {
    lanes: Vec<Stamp>,
    /// Last write and last read of every role, class by class.
    roles: Vec<(Stamp, Stamp)>,
    held: Vec<Vec<Held>>,
    compute_end: Vec<u64>,
    devices: Vec<u64>,
    waited: Vec<Vec<u64>>,
    stolen: Vec<u64>,
    /// Nothing in the iteration started before.
    floor: u64,
    runs: FxHashMap<SegmentKey, u64>,
}

impl<'p> Walker<'p> {
    /// Runs a block `repeat` times.
    pub fn call(&mut self, block: BlockId, args: &[Arg], repeat: u32, env: &Env) -> Result<()> {
        let plan = self.plan;
        let body = &plan.blocks[block as usize].ops;
        let stride = self.effort.stride && repeat > 3;
        let roles: Vec<AtomRef> = if stride { self.roles(block).into_iter().collect() } else { vec![] };
        // An iteration may look back as far as a slot is apart from its reuse; that many must agree.
        let back = reach(args, repeat);
        let (mut before, mut agreed): (Option<(Mark, u64)>, u32) = (None, 0);
        for i in 0..repeat {
            let inner = bind(args, env, i);
            let outside = std::mem::replace(&mut self.floor, u64::MAX);
            self.body(Some(block), body, &inner)?;
            let floor = self.floor;
            self.floor = outside.min(floor);
            if !stride || i + 1 == repeat {
                continue;
            }
            let mark = self.mark(&roles, &inner, floor);
            let step = before.as_ref().and_then(|(b, _)| mark.step_from(b));
            let same = matches!((step, &before), (Some(d), Some((_, last))) if agreed == 0 || d == *last);
            agreed = if same { agreed + 1 } else { u32::from(step.is_some()) };
            if let (Some(d), Some((b, _))) = (step, &before)
                && agreed >= back
                && self.ahead_is_early(&roles, args, env, i, repeat, &mark)
            {
                self.take(b, &mark, d, &roles, args, env, i, repeat);
                return Ok(());
            }
            before = Some((mark, step.unwrap_or(0)));
        }
        Ok(())
    }

    /// Every atom that a block touches, in the names of its formals.
    fn roles(&self, block: BlockId) -> FxHashSet<AtomRef> {
        let mut roles = FxHashSet::default();
        for op in &self.plan.blocks[block as usize].ops {
            if let OpKind::Call { block, args, repeat } = &op.kind {
                for role in self.roles(*block) {
                    let TensorRef::Formal(formal) = role.of else {
                        roles.insert(role);
                        continue;
                    };
                    let arg = args[formal as usize];
                    for i in 0..(*repeat).min(arg.period()) {
                        roles.insert(AtomRef { of: arg.of(), slot: arg.slot(i) + role.slot, ..role });
                    }
                }
                continue;
            }
            let (reads, writes) = op.bufs();
            for buf in reads.iter().chain(&writes) {
                roles.extend(self.atoms_of(block, *buf));
            }
        }
        roles
    }

    /// The atoms of a buffer in a block: all of the slot's, since a formal's cuts are its tensor's.
    fn atoms_of(&self, block: BlockId, buf: Buf) -> Vec<AtomRef> {
        let count = match buf.of {
            TensorRef::Tensor(id) => self.atoms.per_slot(id),
            TensorRef::Formal(f) => self.formal_atoms(block, f),
        };
        (0..count).map(|atom| AtomRef { of: buf.of, slot: buf.slot, atom }).collect()
    }

    /// Atoms a slot of the tensors bound to a formal has.
    fn formal_atoms(&self, block: BlockId, formal: u32) -> u32 {
        let mut count = 0;
        for (caller, op) in self.callers(block) {
            let OpKind::Call { args, .. } = &op.kind else { continue };
            count = count.max(match (args[formal as usize].of(), caller) {
                (TensorRef::Tensor(id), _) => self.atoms.per_slot(id),
                (TensorRef::Formal(f), Some(caller)) => self.formal_atoms(caller, f),
                (TensorRef::Formal(_), None) => 0,
            });
        }
        count
    }

    fn callers(&self, block: BlockId) -> impl Iterator<Item = (Option<BlockId>, &'p Op)> {
        let plan = self.plan;
        let blocks = plan.blocks.iter().enumerate().flat_map(|(b, x)| x.ops.iter().map(move |op| (Some(b as u32), op)));
        let programs = plan.programs.iter().flat_map(|p| p.ops.iter().map(|op| (None, op)));
        blocks.chain(programs).filter(move |(_, op)| matches!(op.kind, OpKind::Call { block: b, .. } if b == block))
    }

    fn mark(&self, roles: &[AtomRef], env: &Env, floor: u64) -> Mark {
        let at: Vec<usize> = roles.iter().map(|&r| self.atom(r, env) as usize).collect();
        Mark {
            lanes: self.state.iter().flat_map(|s| s.lanes.iter().copied()).collect(),
            roles: self.state.iter().flat_map(|s| at.iter().map(|&a| (s.written[a], s.read[a]))).collect(),
            held: self.state.iter().flat_map(|s| s.ports.iter().chain([&s.sms]).cloned()).collect(),
            compute_end: self.state.iter().map(|s| s.compute_end).collect(),
            devices: self.devices.clone(),
            waited: self.state.iter().map(|s| s.waited.clone()).collect(),
            stolen: self.state.iter().map(|s| s.stolen).collect(),
            floor,
            runs: self.runs.clone(),
        }
    }

    /// Whether what only the iterations ahead will find is too early to matter.
    fn ahead_is_early(&self, roles: &[AtomRef], args: &[Arg], env: &Env, i: u32, repeat: u32, mark: &Mark) -> bool {
        let inner = bind(args, env, i);
        let known: FxHashSet<u32> = roles.iter().map(|&r| self.atom(r, &inner)).collect();
        (i + 1..repeat).all(|j| {
            let inner = bind(args, env, j);
            roles.iter().map(|&r| self.atom(r, &inner)).filter(|a| !known.contains(a)).all(|atom| {
                let early = |s: Stamp| s.ps() <= mark.floor;
                self.state.iter().all(|s| early(s.written[atom as usize]) && early(s.read[atom as usize]))
            })
        })
    }

    /// Adds what the iterations after `i` do, each `d` later than the one before.
    #[allow(clippy::too_many_arguments)]
    fn take(
        &mut self,
        before: &Mark,
        mark: &Mark,
        d: u64,
        roles: &[AtomRef],
        args: &[Arg],
        env: &Env,
        i: u32,
        repeat: u32,
    ) {
        let floor = mark.floor;
        for j in i + 1..repeat {
            let inner = bind(args, env, j);
            let by = d * u64::from(j - i);
            for (r, &role) in roles.iter().enumerate() {
                let atom = self.atom(role, &inner) as usize;
                for (class, state) in self.state.iter_mut().enumerate() {
                    let (written, read) = mark.roles[class * roles.len() + r];
                    if written.ps() > floor {
                        state.written[atom] = written.later(by);
                    }
                    if read.ps() > floor {
                        state.read[atom] = read.later(by);
                    }
                }
            }
        }
        let left = u64::from(repeat - 1 - i);
        let by = d * left;
        for (class, state) in self.state.iter_mut().enumerate() {
            state.lanes.iter_mut().filter(|l| l.ps() > floor).for_each(|l| *l = l.later(by));
            for held in state.ports.iter_mut().chain([&mut state.sms]).flatten().filter(|h| h.to > floor) {
                (held.from, held.to) = (held.from + by, held.to + by);
            }
            state.compute_end += by;
            for (w, was) in state.waited.iter_mut().zip(&before.waited[class]) {
                *w += (*w - was) * left;
            }
            state.stolen += (state.stolen - before.stolen[class]) * left;
        }
        self.devices.iter_mut().filter(|t| **t > floor).for_each(|t| *t += by);
        for (key, run) in &mut self.runs {
            *run += (*run - before.runs.get(key).copied().unwrap_or(0)) * left;
        }
    }
}

/// How many iterations back an iteration can look: the longest way from a slot's use to its reuse.
fn reach(args: &[Arg], repeat: u32) -> u32 {
    let each = |arg: &Arg| match *arg {
        Arg::Each { tensor, first, step, of } => Some((tensor, first, step, of)),
        Arg::Buf { .. } => None,
    };
    let mut most = 1;
    for (tensor, first, step, of) in args.iter().filter_map(each) {
        if of < repeat {
            most = most.max(of);
        }
        for (_, other, _, _) in args.iter().filter_map(each).filter(|o| o.0 == tensor) {
            most = most.max((first - other).unsigned_abs() / step.unsigned_abs().max(1));
        }
    }
    most
}

impl Mark {
    /// By how much everything that matters is later than in `before`; none if not all by the same.
    fn step_from(&self, before: &Mark) -> Option<u64> {
        let d = self.compute_end[0].checked_sub(before.compute_end[0])?;
        let early = |t: u64| t <= self.floor;
        let same = |now: Stamp, then: Stamp| now == then.later(d) || (early(now.ps()) && early(then.ps()));
        let pairs = |now: &[Stamp], then: &[Stamp]| now.iter().zip(then).all(|(n, t)| same(*n, *t));
        let held = |now: &Vec<Held>, then: &Vec<Held>| {
            let now: Vec<&Held> = now.iter().filter(|h| !early(h.to)).collect();
            // What counted as early then is what is early now, one step back.
            let then: Vec<&Held> = then.iter().filter(|h| h.to + d > self.floor).collect();
            let shifted = |n: &&Held, t: &&Held| n.from == t.from + d && n.to == t.to + d && n.amount == t.amount;
            now.len() == then.len() && now.iter().zip(&then).all(|(n, t)| shifted(n, t))
        };
        let all = pairs(&self.lanes, &before.lanes)
            && self.roles.iter().zip(&before.roles).all(|(n, t)| same(n.0, t.0) && same(n.1, t.1))
            && self.held.iter().zip(&before.held).all(|(n, t)| held(n, t))
            && self.compute_end.iter().zip(&before.compute_end).all(|(n, t)| *n == t + d)
            && self.devices.iter().zip(&before.devices).all(|(n, t)| *n == t + d || (early(*n) && early(*t)));
        all.then_some(d)
    }
}
