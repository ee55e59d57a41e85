//! All classes of ranks side by side: the state that later ops can find of earlier ones, and how an op changes it.
//! State is stored thing after thing (lane, atom or op) and, for each thing, class after class.

use super::guess::Guess;
use super::past::Past;
use super::ports::Port;
use super::track::Track;
use crate::act::charges::{Owed, Spell, Stream};
pub use crate::act::stamp::Stamp;
pub use crate::act::stretch::Held;
use crate::act::stretch::lasting;
use crate::act::waits::{OTHERS, Path};
use crate::act::{Act, End, Machine, PORTS, Sheet, picoseconds};
use crate::device::OnSms;
use crate::fold::Fold;
use crate::plan::*;
use crate::timeline::Usage;
use std::ops::Range;

/// The state of one class, besides its stamps.
#[derive(Debug, Clone, Default)]
pub struct ClassState {
    pub ports: [Port; PORTS],
    /// What each lane owes on each port; and whether any lane owes anything.
    pub owed: [Vec<Owed>; PORTS],
    pub owes: bool,
    pub sms: Vec<Held>,
    /// When the last kernel of the compute lane was over, ps.
    pub compute_end: u64,
    /// Time the compute lane waited, ps, by the lane it waited for; the CPU is behind the lanes.
    pub waited: Vec<u64>,
    pub past: Past,
}

/// When the last op of every lane was over, and the last write and the last read of every atom: thing after thing,
/// class after class.
#[derive(Debug, Clone, Default)]
pub struct Stamps {
    pub lanes: Vec<Stamp>,
    pub written: Vec<Stamp>,
    pub read: Vec<Stamp>,
}

/// When the bytes of a meeting set off, and when they have arrived, ps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Arrival {
    ready: u64,
    /// Number of the path of whoever came last; [`NO_PATH`] where all came at once.
    path: u32,
    end: u64,
}

const NO_PATH: u32 = u32::MAX;

/// Not arrived yet.
const UNKNOWN: Arrival = Arrival { ready: u64::MAX, path: NO_PATH, end: u64::MAX };

/// The state of all classes.
pub struct Ranks {
    pub classes: usize,
    pub stamps: Stamps,
    pub state: Vec<ClassState>,
    /// When each shared device is free, ps.
    pub devices: Vec<u64>,
    /// When the CPU of each class has issued all ops so far, ps: it runs ahead of the device except where it waits.
    pub host: Vec<u64>,
    /// The ops of the line that the CPU of each class has waited for, each with the time at which it would have begun
    /// the line had it not waited and issued as fast as it does.
    waits: Vec<Vec<(u32, u64)>>,
    /// Time to issue an op, ps.
    host_launch: u64,
    /// The device of each class; `None` where every rank has a device of its own.
    device_of: Option<Vec<u32>>,
    sms: u32,
    lanes: usize,
    /// Whether stages of a pipeline talk on each lane, see [`Lane::joins_stages`].
    joins_stages: Vec<bool>,
    /// What can be forgotten; `None`: nothing is.
    pub guess: Option<Guess>,
    /// Something was asked for that had been forgotten.
    pub missed: bool,
    /// Earliest start of an op since the floor was last reset, ps.
    pub floor: u64,
    /// Whether, since it was last reset, ranks in step had to wait for the CPU to issue an op, or the CPU for them.
    pub host_led: bool,
    // The line being walked: its nodes, and for each node its classes.
    pub starts: Vec<Stamp>,
    pub ends: Vec<Stamp>,
    /// The meetings of the line: when bytes set off and arrived, and the paths of those who came last.
    arrivals: Vec<Arrival>,
    paths: Vec<Path>,
    /// Room to work in.
    pub edges: Vec<(u64, i64)>,
    pub spells: Vec<Spell>,
}

impl Ranks {
    pub fn new(machine: Machine, fold: &Fold, plan: &Plan, atoms: usize) -> Ranks {
        let (lanes, classes) = (plan.lanes.len(), fold.representatives.len());
        let none = |things: usize| vec![Stamp::default(); things * classes];
        let stamps = Stamps { lanes: none(lanes), written: none(atoms), read: none(atoms) };
        // One more than there are lanes: the CPU is the last.
        let owed = std::array::from_fn(|_| vec![Owed::default(); lanes]);
        let (waited, past) = (vec![0; lanes + 1], Past::new(lanes));
        let class = ClassState { owed, waited, past, ..ClassState::default() };
        let devices = machine.devices.map_or(0, |d| d.iter().max().map_or(0, |m| *m as usize + 1));
        let device = |d: &[u32]| fold.representatives.iter().map(|&r| d[r as usize]).collect();
        Ranks {
            classes,
            stamps,
            state: vec![class; classes],
            devices: vec![0; devices],
            host: vec![0; classes],
            waits: vec![vec![]; classes],
            host_launch: picoseconds(machine.host_launch()),
            device_of: machine.devices.map(device),
            sms: machine.cluster.gpu.sms.value,
            lanes,
            joins_stages: plan.lanes.iter().map(Lane::joins_stages).collect(),
            guess: None,
            missed: false,
            floor: u64::MAX,
            host_led: false,
            starts: vec![],
            ends: vec![],
            arrivals: vec![],
            paths: vec![],
            edges: vec![],
            spells: vec![],
        }
    }

    /// These ranks, made to forget what nobody is likely to ask for any more.
    pub fn forgetting(self) -> Ranks {
        Ranks { guess: Some(Guess::default()), ..self }
    }

    /// Spells that hold a port of any class at `since` or later, at most.
    pub fn held_since(&self, since: u64) -> u64 {
        let ports = self.state.iter().flat_map(|state| &state.ports);
        ports.map(|port| port.at_most_since(since)).fold(0, u64::saturating_add)
    }

    /// Forgets all that is over before anything that is likely to come.
    pub fn forget(&mut self) {
        let Some(guess) = &self.guess else { return };
        for (class, state) in self.state.iter_mut().enumerate() {
            let soonest = guess.soonest(class);
            state.ports.iter_mut().for_each(|port| port.lose(soonest));
        }
    }

    /// Begins a line of `width` ops.
    pub fn enter(&mut self, sheet: &Sheet, width: usize) {
        let cells = width * self.classes;
        self.starts.clear();
        self.starts.resize(cells, Stamp::default());
        self.ends.clear();
        self.ends.resize(cells, Stamp::default());
        self.arrivals.clear();
        self.arrivals.resize(sheet.meetings.len(), UNKNOWN);
        self.paths.clear();
        self.waits.iter_mut().for_each(Vec::clear);
    }

    /// Runs every op of a line that all classes go through in step. `now`: the atom that each number of the track
    /// means.
    pub fn run(&mut self, sheet: &Sheet, track: &Track, now: &[u32]) {
        let cells = track.width() * self.classes;
        // What the entries hold is written before it is read.
        self.starts.resize(self.starts.len().max(cells), Stamp::default());
        self.ends.resize(self.ends.len().max(cells), Stamp::default());
        self.arrivals.resize(self.arrivals.len().max(sheet.meetings.len()), UNKNOWN);
        self.paths.clear();
        if track.any_wait {
            self.waits.iter_mut().for_each(Vec::clear);
        }
        if let Some(guess) = &mut self.guess {
            guess.began.rotate_right(1);
            guess.began[0] = u64::MAX;
        }
        for node in 0..track.width() {
            self.begin(sheet, track, now, node);
            if let Some(guess) = &mut self.guess {
                let starts = &self.starts[node * self.classes..][..self.classes];
                guess.began[0] = starts.iter().fold(guess.began[0], |least, start| least.min(start.ps()));
            }
            match track.is_kernel[node] {
                true => self.kernels(sheet, track, node),
                false => self.meetings(sheet, track.lane[node], node),
            }
        }
        self.leave(track, now, 0..self.classes);
        if track.any_wait {
            return self.issued(sheet);
        }
        let issues = sheet.all_issued(track.width());
        self.host.iter_mut().zip(issues).for_each(|(host, &ops)| *host += u64::from(ops) * self.host_launch);
    }

    /// Finds when every class starts `node`.
    fn begin(&mut self, sheet: &Sheet, track: &Track, now: &[u32], node: usize) {
        if self.classes == 1 && !track.any_wait {
            return self.begin_alone(sheet, track, now, node);
        }
        let (classes, stamps) = (self.classes, &self.stamps);
        let of = |thing: u32| thing as usize * classes;
        let at = &mut self.starts[of(node as u32)..][..classes];
        at.fill(Stamp::default());
        for &pred in track.preds.of(node) {
            raise(at, &self.ends[of(pred)..][..classes]);
        }
        for &lane in track.after_lanes.of(node) {
            raise(at, &stamps.lanes[of(lane)..][..classes]);
        }
        for &atom in track.after_write.of(node) {
            raise(at, &stamps.written[of(now[atom as usize])..][..classes]);
        }
        for &atom in track.after_reads.of(node) {
            raise(at, &stamps.read[of(now[atom as usize])..][..classes]);
        }
        let host_lane = self.lanes as u16;
        let (mut floor, mut host_led) = (self.floor, self.host_led);
        for (class, (at, &ops)) in at.iter_mut().zip(sheet.all_issued(node)).enumerate() {
            let waited = if track.any_wait { began(&self.waits[class], node) } else { None };
            let host = waited.unwrap_or(self.host[class]) + u64::from(ops) * self.host_launch;
            // Where both come at the same moment, the device counts as what was waited for.
            if host > at.ps() {
                *at = Stamp::new(host, host_lane);
                host_led = true;
            }
            floor = floor.min(at.ps());
        }
        (self.floor, self.host_led) = (floor, host_led);
    }

    /// [`begin`](Ranks::begin) where there is one class and its CPU waits for nothing: every thing has one stamp.
    fn begin_alone(&mut self, sheet: &Sheet, track: &Track, now: &[u32], node: usize) {
        let Stamps { lanes, written, read } = &self.stamps;
        let mut at = Stamp::default();
        for &pred in track.preds.of(node) {
            at = at.max(self.ends[pred as usize]);
        }
        for &lane in track.after_lanes.of(node) {
            at = at.max(lanes[lane as usize]);
        }
        for &atom in track.after_write.of(node) {
            at = at.max(written[now[atom as usize] as usize]);
        }
        for &atom in track.after_reads.of(node) {
            at = at.max(read[now[atom as usize] as usize]);
        }
        let host = self.host[0] + sheet.issued(node, 0) * self.host_launch;
        // Where both come at the same moment, the device counts as what was waited for.
        if host > at.ps() {
            at = Stamp::new(host, self.lanes as u16);
            self.host_led = true;
        }
        self.starts[node] = at;
        self.floor = self.floor.min(at.ps());
    }

    /// Ends the kernel `node` of every class.
    fn kernels(&mut self, sheet: &Sheet, track: &Track, node: usize) {
        let (first, lane) = (node * self.classes, track.lane[node]);
        for (class, act) in sheet.acts(node).iter().enumerate() {
            let start = self.starts[first + class];
            self.ends[first + class] = match *act {
                Act::Compute { duration, on_sms } => {
                    let (begun, end) = self.compute(class, start, duration, on_sms);
                    // Nobody meets a kernel, so this is for spans: waiting for a shared device is not the op's.
                    self.starts[first + class] = Stamp::new(begun, start.lane());
                    start.or_later(end, lane)
                }
                _ => start,
            };
            if track.is_wait[node] {
                self.wait(sheet, node, class);
            }
        }
    }

    /// The CPU of a class waits for the kernel that `node` is.
    fn wait(&mut self, sheet: &Sheet, node: usize, class: usize) {
        let until_here = sheet.issued(node, class) * self.host_launch;
        let began = began(&self.waits[class], node).unwrap_or(self.host[class]);
        let end = self.ends[node * self.classes + class].ps();
        self.host_led = true;
        self.waits[class].push((node as u32, began.max(end.saturating_sub(until_here))));
    }

    /// Ends the transfer or collective `node` of every class.
    fn meetings(&mut self, sheet: &Sheet, lane: u16, node: usize) {
        for &meeting in sheet.meetings_of(node) {
            self.meet(sheet, lane, meeting as usize);
        }
        self.arrive(sheet, lane, node, 0..self.classes);
    }

    /// The CPU has issued every op of a line.
    pub fn issued(&mut self, sheet: &Sheet) {
        for (class, host) in self.host.iter_mut().enumerate() {
            let began = self.waits[class].last().map_or(*host, |wait| wait.1);
            *host = began + sheet.issues(class) * self.host_launch;
        }
    }

    pub fn start(&mut self, sheet: &Sheet, track: &Track, now: &[u32], node: usize, classes: Range<usize>) {
        let of =
            |thing: u32| thing as usize * self.classes + classes.start..thing as usize * self.classes + classes.end;
        let at = &mut self.starts[of(node as u32)];
        for &pred in track.preds.of(node) {
            raise(at, &self.ends[of(pred)]);
        }
        for &lane in track.after_lanes.of(node) {
            raise(at, &self.stamps.lanes[of(lane)]);
        }
        for &atom in track.after_write.of(node) {
            raise(at, &self.stamps.written[of(now[atom as usize])]);
        }
        for &atom in track.after_reads.of(node) {
            raise(at, &self.stamps.read[of(now[atom as usize])]);
        }
        let host_lane = self.lanes as u16;
        for (at, class) in at.iter_mut().zip(classes) {
            let began = began(&self.waits[class], node).unwrap_or(self.host[class]);
            let host = began + sheet.issued(node, class) * self.host_launch;
            // Where both come at the same moment, the device counts as what was waited for.
            if host > at.ps() {
                *at = Stamp::new(host, host_lane);
            }
        }
        self.floor = at.iter().fold(self.floor, |floor, s| floor.min(s.ps()));
    }

    pub fn finish(&mut self, sheet: &Sheet, track: &Track, node: usize, classes: Range<usize>) {
        let lane = track.lane[node];
        if !track.is_kernel[node] {
            return self.communicate(sheet, node, lane, classes);
        }
        for class in classes {
            let cell = node * self.classes + class;
            let start = self.starts[cell];
            self.ends[cell] = match sheet.act(node, class) {
                Act::Compute { duration, on_sms } => {
                    let (begun, end) = self.compute(class, start, duration, on_sms);
                    // Nobody meets a kernel, so this is for spans: waiting for a shared device is not the op's.
                    self.starts[cell] = Stamp::new(begun, start.lane());
                    start.or_later(end, lane)
                }
                _ => start,
            };
            if track.is_wait[node] {
                self.wait(sheet, node, class);
            }
        }
    }

    /// Runs a kernel on the compute lane: it waits for its device, and is slowed down by the SMs that communication
    /// holds. Returns its start and end, ps.
    fn compute(&mut self, class: usize, ready: Stamp, duration: u64, on_sms: OnSms) -> (u64, u64) {
        let device = self.device_of.as_ref().map(|d| d[class] as usize);
        let start = device.map_or(ready.ps(), |d| ready.ps().max(self.devices[d]));
        // Time lost to a shared device is charged to the compute lane.
        let by = if start > ready.ps() { Stamp::new(start, OTHERS as u16) } else { ready };
        let state = &mut self.state[class];
        if start > state.compute_end {
            state.past.charge(&mut state.waited, state.compute_end, by);
        }
        let all = self.sms;
        let speed = |held: u32| f64::from(all.saturating_sub(held).max(1)) / f64::from(all);
        let end = start + on_sms.lasts(duration, |work| stretched(&mut state.sms, start, work, speed));
        state.past.note_kernel(by, end);
        state.compute_end = state.compute_end.max(end);
        if let Some(d) = device {
            self.devices[d] = end;
        }
        (start, end)
    }

    /// Ends a transfer or collective when all its meetings have ended. A copy or a kernel of the CPU ends by itself.
    fn communicate(&mut self, sheet: &Sheet, node: usize, lane: u16, classes: Range<usize>) {
        let met = |class| match sheet.act(node, class) {
            Act::Meet { first, count, .. } => sheet.met(first, count),
            _ => &[],
        };
        // Leg by leg and not class by class, so that ports are as busy for the last class as for the first.
        let legs = classes.clone().map(|class| met(class).len()).max().unwrap_or(0);
        for leg in 0..legs {
            for class in classes.clone() {
                if let Some(&meeting) = met(class).get(leg)
                    && self.arrivals[meeting as usize] == UNKNOWN
                {
                    self.meet(sheet, lane, meeting as usize);
                }
            }
        }
        self.arrive(sheet, lane, node, classes);
    }

    /// Ends a transfer or collective whose bytes have arrived.
    fn arrive(&mut self, sheet: &Sheet, lane: u16, node: usize, classes: Range<usize>) {
        for class in classes {
            let cell = node * self.classes + class;
            let (launched, start) = (self.starts[cell], self.starts[cell].ps());
            let (meetings, ctas) = match sheet.act(node, class) {
                Act::Meet { first, count, ctas } => (sheet.met(first, count), u32::from(ctas)),
                _ => (&[][..], 0),
            };
            // Of meetings that end at the same moment, the one whose bytes set off last counts.
            let came = |&m: &u32| {
                let Arrival { ready, path, end } = self.arrivals[m as usize];
                let path = self.paths.get(path as usize).filter(|_| ready > start);
                (end, path.map_or(launched, |path| Stamp::new(ready, path.made_late(start))))
            };
            let (end, ready) = match sheet.act(node, class) {
                Act::Aside { duration } => (start + duration, launched),
                _ => meetings.iter().map(came).max().unwrap_or((start, launched)),
            };
            // A communication kernel holds its SMs from its launch to its end.
            if ctas > 0 && end > start {
                self.state[class].sms.push(Held { from: start, to: end, amount: ctas });
            }
            self.state[class].past.note(lane, launched, ready, end);
            self.ends[cell] = launched.or_later(end, lane);
        }
    }

    /// Notes when the bytes of a meeting have arrived. They set off when its last member has started and what its lane
    /// owed on the ports is paid. While k transfers that were posted before hold the busiest of its ports, it has 1 /
    /// (k + 1) of it.
    fn meet(&mut self, sheet: &Sheet, lane: u16, number: usize) {
        let meeting = &sheet.meetings[number];
        let ends = sheet.ends(meeting);
        let start = |end: &End| self.starts[end.node as usize * self.classes + end.class as usize];
        let (mut launched, mut first) = (Stamp::default(), Stamp::LAST);
        for at in ends.iter().map(start) {
            (launched, first) = (launched.max(at), first.min(at));
        }
        let (ready, first) = (launched.ps(), first.ps());
        let mut path = NO_PATH;
        if first < ready {
            path = self.paths.len() as u32;
            self.paths.push(Path::default());
            if !self.joins_stages[lane as usize] {
                let mut last = ends.iter().filter(|end| start(end) == launched);
                let past = |end: &End| &self.state[end.class as usize].past;
                let led = &mut self.paths[path as usize];
                last.next().into_iter().for_each(|end| past(end).lead(launched, first, led));
                last.for_each(|end| *led = (*led).max(past(end).path(launched, first)));
            }
        }
        let ports = || ends.iter().flat_map(|end| end.ports().map(|port| (end.class as usize, port)));
        let off = ports().fold(ready, |off, (class, port)| off.max(self.owed(class, port, lane)));
        let (mut longest, stream) = (meeting.transit.transfer, Stream::new(lane, meeting.transit.fills));
        for (class, port) in ports() {
            let port = &self.state[class].ports[port];
            self.missed |= !port.knows(off);
            longest = longest.max(port.lasting(stream, off, meeting.transit.transfer, &mut self.edges));
        }
        for (class, port) in ports() {
            self.hold(class, port, Spell::new(off, off + longest, stream), meeting.transit.transfer);
        }
        let arrival = &mut self.arrivals[number];
        (arrival.ready, arrival.path, arrival.end) = (ready, path, off + meeting.transit.latency + longest);
    }

    /// The time before which no bytes of a lane set off on a port, ps; 0 where the lane owes nothing.
    #[inline]
    pub fn owed(&self, class: usize, port: usize, lane: u16) -> u64 {
        let state = &self.state[class];
        if state.owes { state.owed[port][lane as usize].until } else { 0 }
    }

    /// Lets bytes of a class hold a port, and charges the lanes whose bytes held it before for what they lose by it.
    pub fn hold(&mut self, class: usize, port: usize, spell: Spell, transfer: u64) {
        if let Some(guess) = &self.guess
            && self.state[class].ports[port].is_full()
        {
            self.state[class].ports[port].forget(guess.soonest(class));
        }
        let state = &mut self.state[class];
        state.owed[port][spell.lane as usize].hold(spell.to);
        if state.ports[port].is_held(spell.from) {
            let (owed, owes) = (&mut state.owed[port], &mut state.owes);
            state.ports[port].charges(
                spell.stream(),
                (spell.from, spell.to, transfer),
                &mut self.spells,
                &mut |lane, loss| {
                    owed[lane as usize].charge(loss);
                    *owes = true;
                },
            );
        }
        state.ports[port].hold(spell);
    }

    /// Leaves the stamps of a line that is over for what comes after it.
    pub fn leave(&mut self, track: &Track, now: &[u32], classes: Range<usize>) {
        if self.classes == 1 {
            return self.leave_alone(track, now);
        }
        let of =
            |thing: u32| thing as usize * self.classes + classes.start..thing as usize * self.classes + classes.end;
        for &(lane, node) in &track.last_on_lane {
            self.stamps.lanes[of(u32::from(lane))].copy_from_slice(&self.ends[of(node)]);
        }
        for &(atom, node) in &track.last_write {
            self.stamps.written[of(now[atom as usize])].copy_from_slice(&self.ends[of(node)]);
        }
        for &(atom, node) in &track.last_reads {
            raise(&mut self.stamps.read[of(now[atom as usize])], &self.ends[of(node)]);
        }
    }

    /// [`leave`](Ranks::leave) where there is one class.
    fn leave_alone(&mut self, track: &Track, now: &[u32]) {
        let (ends, stamps) = (&self.ends, &mut self.stamps);
        for &(lane, node) in &track.last_on_lane {
            stamps.lanes[lane as usize] = ends[node as usize];
        }
        for &(atom, node) in &track.last_write {
            stamps.written[now[atom as usize] as usize] = ends[node as usize];
        }
        for &(atom, node) in &track.last_reads {
            let last = &mut stamps.read[now[atom as usize] as usize];
            *last = (*last).max(ends[node as usize]);
        }
    }

    /// When the last op of a class on any lane was over, and its lane.
    pub fn last(&self, class: usize) -> Stamp {
        let last = |lane: usize| self.stamps.lanes[lane * self.classes + class];
        (0..self.lanes).map(last).max().unwrap_or_default()
    }

    /// Time that a class waited in a step that is over at `end`, ps: by lane, and then for the CPU.
    pub fn waits(&self, class: usize, end: u64) -> Vec<u64> {
        let (state, last) = (&self.state[class], self.last(class));
        let mut waited = state.waited.clone();
        // After its last kernel a rank waits for its own last transfer, and then for the others.
        state.past.charge(&mut waited, state.compute_end, last);
        waited[OTHERS] += end - last.ps().max(state.compute_end);
        waited
    }

    /// Splits the time of a class in a step that is over at `end` into compute and waits, in `usage`.
    pub fn settle(&self, class: usize, end: u64, lanes: &[Lane], usage: &mut Usage) {
        settle(&self.waits(class, end), end, lanes, usage);
    }

    /// When all classes are done, ps.
    pub fn end(&self) -> u64 {
        (0..self.classes).map(|class| self.last(class).ps()).max().unwrap_or(0)
    }
}

/// Splits a step that is over at `end` into compute and waits, in `usage`. `waited`: ps by lane, and then for the CPU.
pub fn settle(waited: &[u64], end: u64, lanes: &[Lane], usage: &mut Usage) {
    let idle: u64 = waited.iter().sum();
    usage.compute = (end - idle) as f64 * 1e-12;
    usage.host = waited[lanes.len()] as f64 * 1e-12;
    for (lane, &ps) in lanes.iter().zip(waited) {
        usage.waited(lane, ps as f64 * 1e-12);
    }
}

/// When the CPU would have begun the line, by the last op before `node` that it waited for, ps; `None` if it waited for
/// no op.
fn began(waits: &[(u32, u64)], node: usize) -> Option<u64> {
    waits.iter().rev().find(|wait| (wait.0 as usize) < node).map(|wait| wait.1)
}

/// Raises each stamp of `at` to that of `to` where the latter is later.
pub fn raise(at: &mut [Stamp], to: &[Stamp]) {
    at.iter_mut().zip(to).for_each(|(at, &to)| *at = (*at).max(to));
}

/// How long `duration` of work takes from `start`, ps, at a speed that depends on how much is held. Drops from `held`
/// what is over.
fn stretched(held: &mut Vec<Held>, start: u64, duration: u64, speed: impl Fn(u32) -> f64) -> u64 {
    // Mostly all of it is over: to see that takes less time than to sort it.
    if held.iter().all(|h| h.to <= start) {
        held.clear();
        return duration;
    }
    held.retain(|h| h.to > start);
    lasting(held.iter().copied(), start, duration, speed)
}
