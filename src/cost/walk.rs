//! Walks a plan, segment by segment: a segment is a run of ops between calls. One line is walked for all
//! classes side by side, which is why state lies thing after thing and, of one thing, class after class.

use super::repeat::Names;
use super::{Effort, Found};
pub use crate::act::stamp::Stamp;
pub use crate::act::stretch::Held;
use crate::act::stretch::lasting;
use crate::act::{Act, Acts, End, Meeting, PORTS, Sheet};
use crate::act::{Machine, picoseconds, seconds};
use crate::error::{Error, Result};
use crate::fold::Fold;
use crate::plan::link::{AtomTable, Env, Line};
use crate::plan::matching::Matching;
use crate::plan::order::{self, Moment};
use crate::plan::segment::{self, Part, Segments};
use crate::plan::*;
use crate::timeline::{Span, Usage};
use std::ops::Range;
use std::rc::Rc;

/// What later ops can find of one class, besides stamps.
#[derive(Debug, Clone, Default)]
pub struct ClassState {
    pub ports: [Vec<Held>; PORTS],
    pub sms: Vec<Held>,
    /// When the compute lane was last busy.
    pub compute_end: u64,
    /// Time the compute lane waited, by the lane it waited for.
    pub waited: Vec<u64>,
}

/// The last op on every lane, the last to write and to read every atom: thing after thing, class after class.
#[derive(Debug, Clone, Default)]
pub struct Stamps {
    pub lanes: Vec<Stamp>,
    pub written: Vec<Stamp>,
    pub read: Vec<Stamp>,
}

/// What every class does on a line, and in which order.
struct Compiled {
    sheet: Sheet,
    /// Absent where ranks are in step.
    order: Option<Vec<Moment>>,
    width: usize,
}

pub struct Walker<'p> {
    pub plan: &'p Plan,
    pub effort: Effort,
    /// Every op meets only itself, so that all ranks go through their line side by side.
    in_step: bool,
    pub atoms: Rc<AtomTable>,
    pub classes: usize,
    pub stamps: Stamps,
    pub state: Vec<ClassState>,
    /// Time at which each shared device is free.
    pub devices: Vec<u64>,
    /// When the CPU of each class has issued all ops so far: it runs ahead of the device, never behind it.
    pub host: Vec<u64>,
    /// Time to issue an op.
    host_launch: u64,
    device_of: Option<Vec<u32>>,
    fold: &'p Fold,
    sms: u32,
    acts: Acts<'p>,
    segments: Segments<'p>,
    /// By segment; or the one line of all.
    compiled: Vec<Rc<Compiled>>,
    /// How often each ran: what it counts is multiplied at the end.
    pub runs: Vec<u64>,
    /// Earliest start since it was last reset.
    pub floor: u64,
    pub names: Names,
    spans: Vec<Vec<Span>>,
    // Of the segment being walked: nodes, then classes.
    starts: Vec<Stamp>,
    ends: Vec<Stamp>,
    /// When the bytes of each meeting have arrived.
    arrivals: Vec<u64>,
}

/// Not arrived yet.
const UNKNOWN: u64 = u64::MAX;

impl<'p> Walker<'p> {
    pub fn new(
        plan: &'p Plan,
        machine: Machine<'p>,
        fold: &'p Fold,
        effort: Effort,
        in_step: bool,
        atoms: Rc<AtomTable>,
    ) -> Result<Walker<'p>> {
        if plan.lanes.len() > 200 {
            return Err(Error::plan(format!("{} lanes; at most 200 are costed", plan.lanes.len())));
        }
        let segments = Segments::new(plan, &atoms);
        let (classes, count) = (fold.representatives.len(), atoms.count as usize);
        let none = |things: usize| vec![Stamp::default(); things * classes];
        let stamps = Stamps { lanes: none(plan.lanes.len()), written: none(count), read: none(count) };
        // One more than there are lanes: the host.
        let class = ClassState { waited: vec![0; plan.lanes.len() + 1], ..ClassState::default() };
        let device_of = machine.devices.map(|d| d.to_vec());
        let devices = device_of.as_ref().map_or(0, |d| d.iter().max().map_or(0, |m| *m as usize + 1));
        Ok(Walker {
            plan,
            effort,
            in_step,
            atoms,
            classes,
            stamps,
            state: vec![class; classes],
            devices: vec![0; devices],
            host: vec![0; classes],
            host_launch: picoseconds(machine.stack.host_launch.value),
            device_of,
            fold,
            sms: machine.cluster.gpu.sms.value,
            acts: if in_step { Acts::of_one_program(plan, machine, fold) } else { Acts::new(plan, machine, fold) },
            segments,
            compiled: vec![],
            runs: vec![],
            floor: u64::MAX,
            names: Names::default(),
            spans: vec![vec![]; classes],
            starts: vec![],
            ends: vec![],
            arrivals: vec![],
        })
    }

    pub fn run(mut self) -> Result<Found> {
        let plan = self.plan;
        if self.effort.stride && !self.effort.spans && self.in_step && segment::show_all(plan) {
            self.body(None, &plan.programs[0].ops, &Env::new())?;
        } else {
            self.whole()?;
        }
        let end = self.end();
        Ok(self.found(end))
    }

    /// Runs ops of the program between two calls.
    pub fn run_ops(&mut self, ops: &'p [Op]) -> Result<()> {
        self.segment(None, ops, &Env::new())
    }

    /// Every op of every rank, spliced flat.
    fn whole(&mut self) -> Result<()> {
        let programs = 0..self.plan.programs.len() as u32;
        let lines = programs.map(|p| Line::program(self.plan, &self.atoms, p)).collect::<Result<Vec<Line>>>()?;
        let compiled = self.compile(&lines)?;
        self.evaluate(&lines, &compiled);
        if self.effort.spans {
            self.record(&lines);
        }
        self.compiled.push(Rc::new(compiled));
        self.runs.push(1);
        Ok(())
    }

    /// Walks a body: segments and calls in turn.
    pub fn body(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<()> {
        for part in segment::parts(ops) {
            match part {
                Part::Call { block, args, repeat, .. } => self.call(block, args, repeat, env)?,
                Part::Segment(ops) => self.segment(block, ops, env)?,
            }
        }
        Ok(())
    }

    fn segment(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<()> {
        let number = self.segments.enter(&self.atoms, block, ops, env);
        let segment = self.segments.get(number);
        let lines = std::slice::from_ref(&segment.line);
        if number == self.compiled.len() {
            let compiled = self.compile(lines)?;
            self.compiled.push(Rc::new(compiled));
            self.runs.push(0);
        }
        self.evaluate(lines, &self.compiled[number].clone());
        self.runs[number] += 1;
        Ok(())
    }

    fn compile(&mut self, lines: &[Line]) -> Result<Compiled> {
        let matching = Matching::new(self.plan, lines);
        let order = match self.in_step {
            true => None,
            false => {
                let ranks: Vec<u32> = (0..self.plan.ranks()).collect();
                Some(order::of_ranks(self.plan, lines, &matching, &ranks)?)
            }
        };
        let sheet = self.acts.sheet(lines, &matching)?;
        let width = lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        Ok(Compiled { sheet, order, width })
    }

    /// Runs lines once: a segment's, or one of each program.
    fn evaluate(&mut self, lines: &[Line], compiled: &Compiled) {
        let cells = compiled.width * self.classes;
        self.starts.clear();
        self.starts.resize(cells, Stamp::default());
        self.ends.clear();
        self.ends.resize(cells, Stamp::default());
        self.arrivals.clear();
        self.arrivals.resize(compiled.sheet.meetings.len(), UNKNOWN);
        match &compiled.order {
            None => {
                for node in 0..compiled.width {
                    self.start(&compiled.sheet, &lines[0], node, 0..self.classes);
                    self.finish(&compiled.sheet, &lines[0], node, 0..self.classes);
                }
                self.leave(&lines[0], 0..self.classes);
            }
            Some(order) => {
                let line = |class: usize| &lines[self.plan.program_of(class as u32) as usize];
                let lines: Vec<&Line> = (0..self.classes).map(line).collect();
                for m in order {
                    let (class, node) = (m.rank as usize, m.node as usize);
                    match m.end {
                        false => self.start(&compiled.sheet, lines[class], node, class..class + 1),
                        true => self.finish(&compiled.sheet, lines[class], node, class..class + 1),
                    }
                }
                lines.iter().enumerate().for_each(|(class, line)| self.leave(line, class..class + 1));
            }
        }
        for (class, host) in self.host.iter_mut().enumerate() {
            *host += compiled.sheet.issues(class) * self.host_launch;
        }
    }

    fn start(&mut self, sheet: &Sheet, line: &Line, node: usize, classes: Range<usize>) {
        let of =
            |thing: u32| thing as usize * self.classes + classes.start..thing as usize * self.classes + classes.end;
        let at = &mut self.starts[of(node as u32)];
        for &pred in line.preds(node) {
            raise(at, &self.ends[of(pred)]);
        }
        if line.outer.first_on_lane[node] {
            raise(at, &self.stamps.lanes[of(u32::from(line.nodes[node].lane))]);
        }
        for &atom in line.outer_reads(node) {
            raise(at, &self.stamps.written[of(self.segments.now[atom as usize])]);
        }
        for &atom in line.outer_writes(node) {
            let atom = of(self.segments.now[atom as usize]);
            raise(at, &self.stamps.written[atom.clone()]);
            raise(at, &self.stamps.read[atom]);
        }
        let host_lane = self.plan.lanes.len() as u16;
        for (at, class) in at.iter_mut().zip(classes) {
            let host = self.host[class] + sheet.issued(node, class) * self.host_launch;
            // At the same moment it is the device that was waited for.
            if host > at.ps() {
                *at = Stamp::new(host, host_lane);
            }
        }
        self.floor = at.iter().fold(self.floor, |floor, s| floor.min(s.ps()));
    }

    fn finish(&mut self, sheet: &Sheet, line: &Line, node: usize, classes: Range<usize>) {
        let lane = line.nodes[node].lane;
        if !matches!(line.nodes[node].op.kind, OpKind::Compute { .. }) {
            return self.communicate(sheet, node, lane, classes);
        }
        for class in classes {
            let cell = node * self.classes + class;
            let start = self.starts[cell];
            self.ends[cell] = match sheet.act(node, class) {
                Act::Compute { duration, sm_bound } => {
                    let (begun, end) = self.compute(class, start, duration, sm_bound);
                    // Nobody meets a kernel, so this is for spans: waiting for a shared device is not the op's.
                    self.starts[cell] = Stamp::new(begun, start.lane());
                    Stamp::new(end, lane)
                }
                _ => start,
            };
        }
    }

    /// A kernel on the compute lane: waits for its device, and for the SMs that communication holds.
    /// Returns its start and end.
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
        state.compute_end = state.compute_end.max(end);
        if let Some(d) = device {
            self.devices[d] = end;
        }
        (start, end)
    }

    /// Ends a transfer or collective: when all its meetings have.
    fn communicate(&mut self, sheet: &Sheet, node: usize, lane: u16, classes: Range<usize>) {
        let met = |class| match sheet.act(node, class) {
            Act::Meet { first, count, ctas } => (sheet.met(first, count), u32::from(ctas)),
            _ => (&[][..], 0),
        };
        // Leg by leg and not class by class, so that ports are as busy for the last class as for the first.
        let legs = classes.clone().map(|class| met(class).0.len()).max().unwrap_or(0);
        for leg in 0..legs {
            for class in classes.clone() {
                if let Some(&meeting) = met(class).0.get(leg)
                    && self.arrivals[meeting as usize] == UNKNOWN
                {
                    self.arrivals[meeting as usize] = self.arrival(sheet, &sheet.meetings[meeting as usize]);
                }
            }
        }
        for class in classes {
            let cell = node * self.classes + class;
            let (start, (meetings, ctas)) = (self.starts[cell].ps(), met(class));
            let end = meetings.iter().map(|&m| self.arrivals[m as usize]).max().unwrap_or(start);
            // A communication kernel holds its SMs from its launch to its end.
            if ctas > 0 && end > start {
                self.state[class].sms.push(Held { from: start, to: end, amount: ctas });
            }
            self.ends[cell] = Stamp::new(end, lane);
        }
    }

    /// When the bytes of a meeting have arrived, which set off when its last member has started. While k
    /// transfers that were posted before hold the busiest of its ports, it has 1 / (k + 1) of it.
    fn arrival(&mut self, sheet: &Sheet, meeting: &Meeting) -> u64 {
        let ends = sheet.ends(meeting);
        let start = |end: &End| self.starts[end.node as usize * self.classes + end.class as usize].ps();
        let ready = ends.iter().map(start).max().unwrap_or(0);
        let mut longest = meeting.transfer;
        for end in ends {
            for port in end.ports() {
                let held = &mut self.state[end.class as usize].ports[port];
                longest = longest.max(stretched(held, ready, meeting.transfer, |k| 1.0 / f64::from(k + 1)));
            }
        }
        for end in ends {
            for port in end.ports() {
                let held = Held { from: ready, to: ready + longest, amount: 1 };
                self.state[end.class as usize].ports[port].push(held);
            }
        }
        ready + meeting.latency + longest
    }

    /// What the segment leaves behind for what comes after it.
    fn leave(&mut self, line: &Line, classes: Range<usize>) {
        let of =
            |thing: u32| thing as usize * self.classes + classes.start..thing as usize * self.classes + classes.end;
        for &(lane, node) in &line.outer.last_on_lane {
            self.stamps.lanes[of(u32::from(lane))].copy_from_slice(&self.ends[of(node)]);
        }
        for &(atom, node) in &line.outer.last_write {
            self.stamps.written[of(self.segments.now[atom as usize])].copy_from_slice(&self.ends[of(node)]);
        }
        for &(atom, node) in &line.outer.last_reads {
            raise(&mut self.stamps.read[of(self.segments.now[atom as usize])], &self.ends[of(node)]);
        }
    }

    fn record(&mut self, lines: &[Line]) {
        for class in 0..self.classes {
            let program = self.plan.program_of(self.fold.representatives[class]);
            let line = &lines[program as usize];
            for (i, node) in line.nodes.iter().enumerate() {
                let cell = i * self.classes + class;
                let what = match &node.op.kind {
                    OpKind::Compute { kernel, .. } => kernel.name(),
                    OpKind::Collective { kind, .. } => kind.name(),
                    _ => "transfer",
                };
                let (start, end) = (seconds(self.starts[cell].ps()), seconds(self.ends[cell].ps()));
                self.spans[class].push(Span { path: line.path(i), what, lane: node.lane, start, end });
            }
        }
    }

    /// The last op on any lane of a class.
    fn last(&self, class: usize) -> Stamp {
        let last = |lane: usize| self.stamps.lanes[lane * self.classes + class];
        (0..self.plan.lanes.len()).map(last).max().unwrap_or_default()
    }

    /// When all classes are done.
    pub fn end(&self) -> u64 {
        (0..self.classes).map(|class| self.last(class).ps()).max().unwrap_or(0)
    }

    /// What was found of a step that is over at `end`.
    pub fn found(self, end: u64) -> Found {
        let lasts: Vec<Stamp> = (0..self.classes).map(|class| self.last(class)).collect();
        let mut usages = Vec::with_capacity(self.classes);
        for (class, state) in self.state.iter().enumerate() {
            let mut usage = Usage::default();
            for (compiled, &runs) in self.compiled.iter().zip(&self.runs) {
                usage.add(&compiled.sheet.usages[class], runs as f64);
            }
            let mut waited = state.waited.clone();
            // After its last kernel a rank waits for its own last transfer, and then for the others.
            let own = lasts[class].ps().max(state.compute_end);
            waited[lasts[class].lane() as usize] += own - state.compute_end;
            waited[0] += end - own;
            let idle: u64 = waited.iter().sum();
            usage.compute = (end - idle) as f64 * 1e-12;
            usage.host = waited[self.plan.lanes.len()] as f64 * 1e-12;
            for (lane, &ps) in self.plan.lanes.iter().zip(&waited) {
                let waited = ps as f64 * 1e-12;
                match lane {
                    Lane::Comm(group, _) => *usage.exposed.entry(group.charged_axis()).or_default() += waited,
                    Lane::Compute(_) => usage.turns += waited,
                }
            }
            usages.push(usage);
        }
        Found { end, usages, spans: self.spans }
    }
}

fn raise(at: &mut [Stamp], to: &[Stamp]) {
    at.iter_mut().zip(to).for_each(|(at, &to)| *at = (*at).max(to));
}

/// How long `duration` of work takes from `start`, at a speed that depends on how much is held; forgets what
/// is over.
pub fn stretched(held: &mut Vec<Held>, start: u64, duration: u64, speed: impl Fn(u32) -> f64) -> u64 {
    held.retain(|h| h.to > start);
    lasting(held.iter().copied(), start, duration, speed)
}
