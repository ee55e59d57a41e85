//! Walks a plan, segment by segment: a segment is a run of ops between calls whose meetings all happen
//! inside it, so that one rank's ops can be walked in program order, all classes side by side.

use super::act::{Act, Acts, Alone, ClassActs, LegAct};
use super::{Effort, Found, Machine, seconds};
use crate::error::{Error, Result};
use crate::fold::Fold;
use crate::plan::link::{AtomTable, Env, Line};
use crate::plan::matching::Matching;
use crate::plan::order::{self, Moment};
use crate::plan::*;
use crate::timeline::{Span, Usage};
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// A moment in picoseconds and the lane whose op brought it about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Stamp(u64);

impl Stamp {
    /// 2^56 ps are 20 hours: no step takes longer.
    const LANE_BITS: u32 = 8;

    pub fn new(ps: u64, lane: u16) -> Stamp {
        Stamp(ps << Self::LANE_BITS | u64::from(lane))
    }

    pub fn ps(self) -> u64 {
        self.0 >> Self::LANE_BITS
    }

    pub fn lane(self) -> u16 {
        (self.0 & ((1 << Self::LANE_BITS) - 1)) as u16
    }

    pub fn later(self, by: u64) -> Stamp {
        Stamp(self.0 + (by << Self::LANE_BITS))
    }
}

/// Something of a rank held for a while: SMs by a communication kernel, or a share of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    pub from: u64,
    pub to: u64,
    pub amount: u32,
}

/// Ports of a rank: send and receive, inside the node and out of it.
pub const PORTS: usize = 4;

/// Everything that later ops can depend on, for one class.
#[derive(Debug, Clone, Default)]
pub struct ClassState {
    pub lanes: Vec<Stamp>,
    pub written: Vec<Stamp>,
    pub read: Vec<Stamp>,
    pub ports: [Vec<Held>; PORTS],
    pub sms: Vec<Held>,
    /// When the compute lane was last busy.
    pub compute_end: u64,
    /// Time the compute lane waited, by the lane it waited for.
    pub waited: Vec<u64>,
    /// Compute time lost to communication kernels.
    pub stolen: u64,
}

/// Which atom an op means, as the op names it: to be resolved under the bindings of the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AtomRef {
    pub of: TensorRef,
    pub slot: u32,
    pub atom: u32,
}

/// A segment linked for some combination of bound tensors, with every class's acts.
pub struct Compiled<'p> {
    lines: Vec<Line<'p>>,
    /// Absolute atoms at the time of linking -> how the ops name them.
    vars: Vec<(u32, AtomRef)>,
    classes: Vec<ClassActs>,
    order: Option<Vec<Moment>>,
}

pub type SegmentKey = (Option<BlockId>, usize, Vec<TensorId>);

pub struct Walker<'p> {
    pub plan: &'p Plan,
    pub fold: &'p Fold,
    pub effort: Effort,
    pub atoms: AtomTable,
    pub state: Vec<ClassState>,
    /// Time at which each shared device is free.
    pub devices: Vec<u64>,
    device_of: Option<Vec<u32>>,
    sms: u32,
    acts: Acts<'p>,
    compiled: FxHashMap<SegmentKey, Rc<Compiled<'p>>>,
    /// How often each compiled segment ran: what it counts is multiplied at the end.
    pub runs: FxHashMap<SegmentKey, u64>,
    /// Earliest start since it was last reset.
    pub floor: u64,
    spans: Vec<Vec<Span>>,
    starts: Vec<Stamp>,
    ends: Vec<Stamp>,
    /// When the bytes of a meeting have arrived, by the class and op that stand for it.
    arrivals: FxHashMap<Meeting, u64>,
}

/// (class, op, leg) of the sender of a leg, or of the first member of a collective.
type Meeting = (u32, u32, u16);

impl<'p> Walker<'p> {
    pub fn new(plan: &'p Plan, machine: Machine<'p>, fold: &'p Fold, effort: Effort) -> Result<Walker<'p>> {
        if plan.lanes.len() > 200 {
            return Err(Error::plan(format!("{} lanes; at most 200 are costed", plan.lanes.len())));
        }
        let atoms = AtomTable::new(plan)?;
        let class = ClassState {
            lanes: vec![Stamp::default(); plan.lanes.len()],
            written: vec![Stamp::default(); atoms.count as usize],
            read: vec![Stamp::default(); atoms.count as usize],
            waited: vec![0; plan.lanes.len()],
            ..ClassState::default()
        };
        let classes = fold.representatives.len();
        let device_of = machine.devices.map(|d| d.to_vec());
        let devices = device_of.as_ref().map_or(0, |d| d.iter().max().map_or(0, |m| *m as usize + 1));
        Ok(Walker {
            plan,
            fold,
            effort,
            atoms,
            state: vec![class; classes],
            devices: vec![0; devices],
            device_of,
            sms: machine.cluster.gpu.sms.value,
            acts: Acts::new(plan, machine, fold),
            compiled: FxHashMap::default(),
            runs: FxHashMap::default(),
            floor: u64::MAX,
            spans: vec![vec![]; classes],
            starts: vec![],
            ends: vec![],
            arrivals: FxHashMap::default(),
        })
    }

    pub fn run(mut self) -> Result<Found> {
        let by_segment = self.plan.programs.len() == 1 && !self.effort.spans && self.closed(&self.plan.programs[0].ops);
        if by_segment {
            self.body(None, &self.plan.programs[0].ops, &Env::new())?;
        } else {
            self.whole()?;
        }
        Ok(self.found())
    }

    /// Every op of every rank, spliced flat.
    fn whole(&mut self) -> Result<()> {
        let programs = 0..self.plan.programs.len() as u32;
        let lines = programs.map(|p| Line::program(self.plan, &self.atoms, p)).collect::<Result<Vec<Line>>>()?;
        let compiled = Rc::new(self.compile(lines, vec![])?);
        let key = (None, usize::MAX, vec![]);
        *self.runs.entry(key.clone()).or_default() += 1;
        self.compiled.insert(key, compiled.clone());
        let same: Vec<u32> = (0..self.atoms.count).collect();
        self.evaluate(&compiled, &|atom| same[atom as usize]);
        if self.effort.spans {
            self.record(&compiled);
        }
        Ok(())
    }

    /// Whether every segment of every body reachable from `ops` keeps its meetings to itself.
    fn closed(&self, ops: &[Op]) -> bool {
        let shown = |ops: &[Op]| {
            let in_call = |op: &Op| matches!(op.kind, OpKind::Call { .. });
            ops.split(in_call).all(|segment| segment_closed(self.plan, segment))
        };
        shown(ops) && self.plan.blocks.iter().all(|b| shown(&b.ops))
    }

    /// Walks a body: segments and calls in turn.
    pub fn body(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<()> {
        let mut at = 0;
        while at < ops.len() {
            if let OpKind::Call { block, args, repeat } = &ops[at].kind {
                self.call(*block, args, *repeat, env)?;
                at += 1;
                continue;
            }
            let len = ops[at..].iter().take_while(|op| !matches!(op.kind, OpKind::Call { .. })).count();
            self.segment(block, at, &ops[at..at + len], env)?;
            at += len;
        }
        Ok(())
    }

    fn segment(&mut self, block: Option<BlockId>, at: usize, ops: &'p [Op], env: &Env) -> Result<()> {
        let key = (block, at, env.iter().map(|b| b.0).collect::<Vec<u32>>());
        if let Some(compiled) = self.compiled.get(&key).cloned()
            && let Some(now) = self.rebind(&compiled, env)
        {
            self.evaluate(&compiled, &|atom| now[&atom]);
            *self.runs.entry(key).or_default() += 1;
            return Ok(());
        }
        let line = Line::segment(self.plan, &self.atoms, ops, env);
        let vars = vars(&line, &self.atoms);
        let compiled = Rc::new(self.compile(vec![line], vars)?);
        self.evaluate(&compiled, &|atom| atom);
        // Another aliasing of the same buffers replaces the one before: what it counts is the same.
        *self.runs.entry(key.clone()).or_default() += 1;
        self.compiled.insert(key, compiled);
        Ok(())
    }

    /// Atoms at the time of linking -> atoms now; none if buffers alias in another way than then.
    fn rebind(&self, compiled: &Compiled, env: &Env) -> Option<FxHashMap<u32, u32>> {
        let mut now: FxHashMap<u32, u32> = FxHashMap::default();
        let mut taken: FxHashMap<u32, u32> = FxHashMap::default();
        for &(then, var) in &compiled.vars {
            let atom = self.atom(var, env);
            if *now.entry(then).or_insert(atom) != atom || *taken.entry(atom).or_insert(then) != then {
                return None;
            }
        }
        Some(now)
    }

    /// The atom that `var` means under `env`.
    pub fn atom(&self, var: AtomRef, env: &[(TensorId, u32)]) -> u32 {
        let (tensor, base) = match var.of {
            TensorRef::Tensor(id) => (id, 0),
            TensorRef::Formal(i) => env[i as usize],
        };
        self.atoms.slot(tensor, base + var.slot).first + var.atom
    }

    fn compile(&mut self, lines: Vec<Line<'p>>, vars: Vec<(u32, AtomRef)>) -> Result<Compiled<'p>> {
        let matching = Matching::new(self.plan, &lines);
        let order = match order::in_step(self.plan, &lines, &matching) {
            true => None,
            false => Some(order::of_all_ranks(self.plan, &lines, &matching)?),
        };
        if order.is_some() && self.fold.representatives.len() != self.plan.ranks() as usize {
            return Err(Error::plan("ranks that meet in different ops cannot be folded"));
        }
        let classes = 0..self.fold.representatives.len() as u32;
        let classes = classes.map(|c| self.acts.of_class(&lines, &matching, c)).collect::<Result<_>>()?;
        Ok(Compiled { lines, vars, classes, order })
    }

    fn line<'c>(&self, compiled: &'c Compiled<'p>, class: usize) -> &'c Line<'p> {
        &compiled.lines[self.plan.program_of(self.fold.representatives[class]) as usize]
    }

    /// Runs a linked segment once. `now` maps atoms at linking to atoms now.
    fn evaluate(&mut self, compiled: &Compiled<'p>, now: &dyn Fn(u32) -> u32) {
        let width = compiled.lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        let classes = self.state.len();
        self.starts.clear();
        self.starts.resize(classes * width, Stamp::default());
        self.ends.clear();
        self.ends.resize(classes * width, Stamp::default());
        self.arrivals.clear();
        match &compiled.order {
            Some(order) => {
                for m in order {
                    let class = m.rank as usize;
                    let step = if m.end { Self::finish } else { Self::start };
                    step(self, compiled, class, m.node as usize, width, now);
                }
            }
            None => {
                for node in 0..width {
                    let local = matches!(compiled.classes[0].acts[node], Act::Compute { .. } | Act::Skip);
                    for class in 0..classes {
                        self.start(compiled, class, node, width, now);
                        if local {
                            self.finish(compiled, class, node, width, now);
                        }
                    }
                    for class in (0..classes).filter(|_| !local) {
                        self.finish(compiled, class, node, width, now);
                    }
                }
            }
        }
        for class in 0..classes {
            self.leave(compiled, class, width, now);
        }
    }

    fn start(&mut self, compiled: &Compiled<'p>, class: usize, node: usize, width: usize, now: &dyn Fn(u32) -> u32) {
        let line = self.line(compiled, class);
        let state = &self.state[class];
        let ends = &self.ends[class * width..];
        let mut at = Stamp::default();
        for &pred in line.preds(node) {
            at = at.max(ends[pred as usize]);
        }
        if line.outer.first_on_lane[node] {
            at = at.max(state.lanes[line.nodes[node].lane as usize]);
        }
        for &atom in line.outer_reads(node) {
            at = at.max(state.written[now(atom) as usize]);
        }
        for &atom in line.outer_writes(node) {
            let atom = now(atom) as usize;
            at = at.max(state.written[atom]).max(state.read[atom]);
        }
        self.floor = self.floor.min(at.ps());
        self.starts[class * width + node] = at;
    }

    fn finish(&mut self, compiled: &Compiled<'p>, class: usize, node: usize, width: usize, _: &dyn Fn(u32) -> u32) {
        let lane = self.line(compiled, class).nodes[node].lane;
        let start = self.starts[class * width + node];
        let end = match &compiled.classes[class].acts[node] {
            Act::Skip => start,
            Act::Compute { duration, sm_bound } => {
                let (begun, end) = self.compute(class, start, *duration, *sm_bound);
                // Waiting for a shared device is not part of the op; nobody meets a kernel, so this is for spans.
                self.starts[class * width + node] = Stamp::new(begun, start.lane());
                Stamp::new(end, lane)
            }
            Act::Transfer { legs, ctas } => {
                let at = |(l, leg): (usize, &LegAct)| self.deliver(class, node, l, start, leg, width);
                let end = legs.iter().enumerate().map(at).max().unwrap_or(start.ps());
                self.occupy(class, start, end, *ctas, lane)
            }
            Act::Collective { with, alone, ctas } => {
                let end = self.gather(class, node, start, with, alone, width);
                self.occupy(class, start, end, *ctas, lane)
            }
        };
        self.ends[class * width + node] = end;
    }

    /// A kernel on the compute lane: waits for its device, and for the SMs that communication holds. Its
    /// start and end.
    fn compute(&mut self, class: usize, ready: Stamp, duration: u64, sm_bound: bool) -> (u64, u64) {
        let device = self.device_of.as_ref().map(|d| d[self.fold.representatives[class] as usize] as usize);
        let start = device.map_or(ready.ps(), |d| ready.ps().max(self.devices[d]));
        let state = &mut self.state[class];
        if start > state.compute_end {
            // Time lost to a shared device is charged to the compute lane.
            let lane = if start > ready.ps() { 0 } else { ready.lane() };
            state.waited[lane as usize] += start - state.compute_end;
        }
        let all = self.sms;
        let speed = |held: u32| f64::from(all.saturating_sub(held).max(1)) / f64::from(all);
        let end = start + if sm_bound { stretched(&mut state.sms, start, duration, speed) } else { duration };
        state.stolen += end - start - duration;
        state.compute_end = state.compute_end.max(end);
        if let Some(d) = device {
            self.devices[d] = end;
        }
        (start, end)
    }

    /// When a leg's bytes have arrived. Both ends ask; whoever asks first works it out.
    fn deliver(&mut self, class: usize, node: usize, leg: usize, start: Stamp, act: &LegAct, width: usize) -> u64 {
        let peer = act.peer_class as usize;
        let meeting = match act.send {
            true => (class as u32, node as u32, leg as u16),
            false => (act.peer_class, act.peer.node, act.peer.leg),
        };
        if let Some(&arrival) = self.arrivals.get(&meeting) {
            return arrival;
        }
        let both = start.ps().max(self.starts[peer * width + act.peer.node as usize].ps());
        let (from, to) = if act.send { (class, peer) } else { (peer, class) };
        let arrival = self.through_ports(&[(from, 0), (to, 1)], both, &act.alone);
        self.arrivals.insert(meeting, arrival);
        arrival
    }

    /// When a collective has ended: it starts when its last member has.
    fn gather(
        &mut self,
        class: usize,
        node: usize,
        start: Stamp,
        with: &[(u32, u32)],
        alone: &Alone,
        width: usize,
    ) -> u64 {
        let here = (class as u32, node as u32);
        let first = with.first().copied().unwrap_or(here).min(here);
        let meeting = (first.0, first.1, u16::MAX);
        if let Some(&end) = self.arrivals.get(&meeting) {
            return end;
        }
        let starts = with.iter().map(|&(c, n)| self.starts[c as usize * width + n as usize].ps());
        let all = starts.max().unwrap_or(0).max(start.ps());
        let mut classes: Vec<usize> = with.iter().map(|w| w.0 as usize).chain([class]).collect();
        classes.sort_unstable();
        classes.dedup();
        let ends: Vec<(usize, usize)> = classes.iter().flat_map(|&c| [(c, 0), (c, 1)]).collect();
        let end = self.through_ports(&ends, all, alone);
        self.arrivals.insert(meeting, end);
        end
    }

    /// Moves bytes through ports ((class, 0 to send or 1 to receive)), beginning at `ready`. While k
    /// transfers that were posted before hold the busiest of the ports, this one has 1 / (k + 1) of it.
    fn through_ports(&mut self, ends: &[(usize, usize)], ready: u64, alone: &Alone) -> u64 {
        let used = [alone.up, alone.out];
        let ports = || {
            let tiers = (0..2).filter(|&t| used[t]);
            tiers.flat_map(|tier| ends.iter().map(move |&(class, way)| (class, 2 * tier + way)))
        };
        let mut longest = alone.transfer;
        for (class, port) in ports() {
            let held = &mut self.state[class].ports[port];
            longest = longest.max(stretched(held, ready, alone.transfer, |k| 1.0 / f64::from(k + 1)));
        }
        for (class, port) in ports() {
            self.state[class].ports[port].push(Held { from: ready, to: ready + longest, amount: 1 });
        }
        ready + alone.latency + longest
    }

    /// Notes that a communication kernel held SMs from its launch to its end.
    fn occupy(&mut self, class: usize, start: Stamp, end: u64, ctas: u32, lane: u16) -> Stamp {
        if ctas > 0 && end > start.ps() {
            self.state[class].sms.push(Held { from: start.ps(), to: end, amount: ctas });
        }
        Stamp::new(end, lane)
    }

    /// What the segment leaves behind for what comes after it.
    fn leave(&mut self, compiled: &Compiled<'p>, class: usize, width: usize, now: &dyn Fn(u32) -> u32) {
        let line = self.line(compiled, class);
        let ends = &self.ends[class * width..];
        let state = &mut self.state[class];
        for &(lane, node) in &line.outer.last_on_lane {
            state.lanes[lane as usize] = ends[node as usize];
        }
        for &(atom, node) in &line.outer.last_write {
            state.written[now(atom) as usize] = ends[node as usize];
        }
        for &(atom, node) in &line.outer.last_reads {
            let read = &mut state.read[now(atom) as usize];
            *read = (*read).max(ends[node as usize]);
        }
        let from = state.compute_end;
        state.sms.retain(|t| t.to > from);
    }

    fn record(&mut self, compiled: &Compiled<'p>) {
        let width = compiled.lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        for class in 0..self.state.len() {
            let line = self.line(compiled, class);
            for (i, node) in line.nodes.iter().enumerate() {
                let (start, end) = (self.starts[class * width + i], self.ends[class * width + i]);
                let what = match &node.op.kind {
                    OpKind::Compute { kernel, .. } => kernel.name(),
                    OpKind::Collective { kind, .. } => kind.name(),
                    _ => "transfer",
                };
                let (start, end) = (seconds(start.ps()), seconds(end.ps()));
                self.spans[class].push(Span { path: line.path(i), what, lane: node.lane, start, end });
            }
        }
    }

    fn found(self) -> Found {
        let last = |s: &ClassState| s.lanes.iter().copied().max().unwrap_or_default();
        let end = self.state.iter().map(|s| last(s).ps()).max().unwrap_or(0);
        let mut usages = Vec::new();
        for (class, state) in self.state.iter().enumerate() {
            let mut usage = Usage::default();
            for (key, &runs) in &self.runs {
                usage.add(&self.compiled[key].classes[class].usage, runs as f64);
            }
            let mut waited = state.waited.clone();
            // After its last kernel a rank waits for its own last transfer, or for the others.
            waited[last(state).lane() as usize] += end - state.compute_end;
            let idle: u64 = waited.iter().sum();
            usage.compute = (end - idle) as f64 * 1e-12;
            for (lane, &ps) in self.plan.lanes.iter().zip(&waited) {
                let axis = match lane {
                    Lane::Comm(group, _) => group.charged_axis(),
                    // Ranks that wait for each other's kernels: on a shared device, or at the very end.
                    Lane::Compute(_) => Axis::Dp,
                };
                *usage.exposed.entry(axis).or_default() += ps as f64 * 1e-12;
            }
            usages.push(usage);
        }
        Found { end, usages, spans: self.spans }
    }
}

/// How long `duration` of work takes from `start`, at a speed that depends on how much is held.
fn stretched(held: &mut Vec<Held>, start: u64, duration: u64, speed: impl Fn(u32) -> f64) -> u64 {
    held.retain(|h| h.to > start);
    if held.is_empty() {
        return duration;
    }
    let mut edges: Vec<u64> = held.iter().flat_map(|h| [h.from, h.to]).filter(|&e| e > start).collect();
    edges.sort_unstable();
    let speed = |at: u64| speed(held.iter().filter(|h| h.from <= at && at < h.to).map(|h| h.amount).sum());
    let (mut at, mut left) = (start, duration as f64);
    for edge in edges {
        let could = (edge - at) as f64 * speed(at);
        if could >= left {
            break;
        }
        left -= could;
        at = edge;
    }
    at - start + (left / speed(at)).round() as u64
}

/// Atoms of a line and every way in which its ops name them.
fn vars(line: &Line, atoms: &AtomTable) -> Vec<(u32, AtomRef)> {
    let mut all = Vec::new();
    for place in line.places() {
        let first = atoms.slot(place.tensor, place.slot).first;
        all.extend(
            place
                .atoms
                .iter()
                .map(|atom| (atom, AtomRef { of: place.named.of, slot: place.named.slot, atom: atom - first })),
        );
    }
    all.sort_unstable();
    all.dedup();
    all
}

/// Whether sends and receives of a run of ops balance, and no `after` reaches out of it.
fn segment_closed(plan: &Plan, ops: &[Op]) -> bool {
    let first = ops.first().map_or(0, |op| op.id);
    if ops.iter().flat_map(|op| &op.after).any(|&a| a < first) {
        return false;
    }
    let mut open: FxHashMap<(u16, i64), i64> = FxHashMap::default();
    for op in ops {
        let OpKind::Transfer { legs, .. } = &op.kind else { continue };
        let Some(lane) = op.lane else { return false };
        let Lane::Comm(group, _) = &plan.lanes[lane as usize] else { return false };
        let n = group.members(&plan.views, 0).len() as i64;
        for leg in legs {
            let sent = if leg.dir == Direction::Send { leg.by } else { -leg.by };
            let one = if leg.dir == Direction::Send { 1 } else { -1 };
            *open.entry((lane, i64::from(sent).rem_euclid(n))).or_default() += one;
        }
    }
    open.values().all(|&n| n == 0)
}
