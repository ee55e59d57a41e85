//! The event loop.

use super::meeting::{Key, MeetingId, Meetings, Party, order};
use super::run::{Run, Running, Taken};
use super::script::Script;
use super::{Effort, Simulated, account};
use crate::act::stamp::Stamp;
use crate::act::stretch::{Held, lasting};
use crate::act::{Deed, Machine, picoseconds};
use crate::error::{Error, Result};
use crate::fold::Fold;
use crate::plan::{Direction, Plan};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The host has issued an op that nothing else keeps.
    Issued {
        class: u32,
        op: u32,
    },
    KernelEnds {
        class: u32,
        op: u32,
    },
    Arrives {
        meeting: MeetingId,
        version: u32,
    },
}

/// Time, then the order in which events were found.
type Queued = Reverse<(u64, u64, Event)>;

pub struct Engine<'p> {
    pub plan: &'p Plan,
    pub fold: &'p Fold,
    pub scripts: &'p [Script<'p>],
    pub runs: Vec<Run>,
    meetings: Meetings,
    queue: BinaryHeap<Queued>,
    /// Ops that can begin now.
    ready: VecDeque<(u32, u32)>,
    now: u64,
    found: u64,
    pub events: u64,
    slowed: u64,
    sms: u32,
    host_launch: u64,
    effort: Effort,
}

impl<'p> Engine<'p> {
    pub fn new(
        plan: &'p Plan,
        machine: Machine,
        fold: &'p Fold,
        scripts: &'p [Script<'p>],
        effort: Effort,
    ) -> Engine<'p> {
        let mut runs: Vec<Option<Run>> = fold.representatives.iter().map(|_| None).collect();
        for (program, script) in scripts.iter().enumerate() {
            for (local, &class) in script.deeds.classes.iter().enumerate() {
                runs[class] = Some(Run::new(script, program, local, plan.lanes.len(), effort.spans));
            }
        }
        Engine {
            plan,
            fold,
            scripts,
            runs: runs.into_iter().map(|run| run.expect("every class runs a program")).collect(),
            meetings: Meetings::default(),
            queue: BinaryHeap::new(),
            ready: VecDeque::new(),
            now: 0,
            found: 0,
            events: 0,
            slowed: 0,
            sms: machine.cluster.gpu.sms.value,
            host_launch: picoseconds(machine.stack.host_launch.value),
            effort,
        }
    }

    pub fn run(&mut self) -> Result<()> {
        for class in 0..self.runs.len() {
            let roots = &self.scripts[self.runs[class].program].roots;
            self.ready.extend(roots.iter().map(|&op| (class as u32, op)));
        }
        self.begin_all();
        while let Some(Reverse((time, _, event))) = self.queue.pop() {
            assert!(time >= self.now, "an event at {time} ps after {} ps", self.now);
            self.now = time;
            self.events += 1;
            self.take(event);
            self.begin_all();
        }
        if self.runs.iter().any(|run| run.left > 0) { Err(self.deadlock()) } else { Ok(()) }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Issued { class, op } => self.begin(class, op),
            Event::KernelEnds { class, op } => self.kernel_ends(class, op),
            Event::Arrives { meeting, version } => {
                if self.meetings.get(meeting).version == version {
                    self.arrive(meeting);
                }
            }
        }
    }

    fn push(&mut self, time: u64, event: Event) {
        // What never ends is no event: those who wait for it are found waiting.
        if time < u64::MAX {
            self.found += 1;
            self.queue.push(Reverse((time, self.found, event)));
        }
    }

    fn begin_all(&mut self) {
        while let Some((class, op)) = self.ready.pop_front() {
            let (host_lane, launch) = (self.plan.lanes.len() as u16, self.host_launch);
            let run = &mut self.runs[class as usize];
            let cell = run.cell(&self.scripts[run.program], op);
            let host = u64::from(cell.issued) * launch;
            // At the same moment it is the device that was waited for.
            if host > cell.start.ps() {
                cell.start = Stamp::new(host, host_lane);
            }
            match cell.start.ps() {
                start if start > self.now => self.push(start, Event::Issued { class, op }),
                _ => self.begin(class, op),
            }
        }
    }

    fn begin(&mut self, class: u32, op: u32) {
        let run = &mut self.runs[class as usize];
        let script = &self.scripts[run.program];
        match script.deed(op, run.local) {
            Deed::Skip => {
                let start = run.cell(script, op).start;
                self.end(class, op, start);
            }
            Deed::Kernel { duration, sm_bound } => self.kernel(class, op, duration, sm_bound),
            Deed::Legs { first, count, ctas } => self.legs(class, op, first, count, ctas),
            Deed::Whole { at, ctas } => self.whole(class, op, at, ctas),
        }
    }

    fn kernel(&mut self, class: u32, op: u32, duration: u64, sm_bound: bool) {
        let run = &mut self.runs[class as usize];
        let start = run.cell(&self.scripts[run.program], op).start;
        let now = start.ps();
        if now > run.compute_end {
            run.waited[start.lane() as usize] += now - run.compute_end;
        }
        if run.kernels.is_empty() {
            run.sms.retain(|taken| taken.held.to > now);
        }
        let mut kernel = Running { op, start: now, duration, end: 0, sm_bound };
        kernel.end = now.saturating_add(beside(run, self.sms, &kernel));
        run.kernels.push(kernel);
        if self.effort.spans {
            run.kept[op as usize][0] = now;
        }
        self.push(kernel.end, Event::KernelEnds { class, op });
    }

    /// The SMs that communication holds are others than was thought.
    fn price_kernels(&mut self, class: u32, held_by: u32) {
        let (run, now) = (&mut self.runs[class as usize], self.now);
        let mut changed = vec![];
        for at in 0..run.kernels.len() {
            let kernel = run.kernels[at];
            if kernel.sm_bound && kernel.op > held_by {
                let end = kernel.start.saturating_add(beside(run, self.sms, &kernel)).max(now);
                if end != kernel.end {
                    run.kernels[at].end = end;
                    changed.push((end, kernel.op));
                }
            }
        }
        changed.into_iter().for_each(|(end, op)| self.push(end, Event::KernelEnds { class, op }));
    }

    fn kernel_ends(&mut self, class: u32, op: u32) {
        let (run, now) = (&mut self.runs[class as usize], self.now);
        let Some(at) = run.kernels.iter().position(|k| k.op == op && k.end == now) else { return };
        run.kernels.swap_remove(at);
        run.compute_end = run.compute_end.max(now);
        let lane = self.scripts[run.program].lane(op);
        self.end(class, op, Stamp::new(now, lane));
    }

    /// A communication kernel holds its SMs from its launch to its end.
    fn take_sms(&mut self, class: u32, op: u32, ctas: u16) {
        if ctas > 0 {
            let held = Held { from: self.now, to: u64::MAX, amount: u32::from(ctas) };
            let run = &mut self.runs[class as usize];
            if run.kernels.is_empty() {
                run.sms.retain(|taken| taken.held.to > held.from);
            }
            run.sms.push(Taken { op, held });
            self.price_kernels(class, op);
        }
    }

    fn give_sms(&mut self, class: u32, op: u32) {
        let now = self.now;
        let mine = |t: &&mut Taken| t.op == op && t.held.to == u64::MAX;
        if let Some(taken) = self.runs[class as usize].sms.iter_mut().find(mine) {
            taken.held.to = now;
            self.price_kernels(class, op);
        }
    }

    /// An op that communicates has been launched; it waits for so many meetings.
    fn launch(&mut self, class: u32, op: u32, meetings: u32, ctas: u16) {
        let (run, now) = (&mut self.runs[class as usize], self.now);
        run.cell(&self.scripts[run.program], op).waits = meetings;
        if self.effort.spans {
            run.kept[op as usize][0] = now;
        }
        self.take_sms(class, op, ctas);
    }

    fn legs(&mut self, class: u32, op: u32, first: u32, count: u16, ctas: u16) {
        self.launch(class, op, u32::from(count), ctas);
        let script = &self.scripts[self.runs[class as usize].program];
        let lane = script.lane(op);
        for (leg, way) in script.deeds.legs(first, count).iter().enumerate() {
            let key = (lane, Some(way.by), way.sender, script.turn(op, leg));
            let id = self.meetings.enter(key);
            let meeting = self.meetings.get_mut(id);
            meeting.parties.push(Party::new(class, op, way.ports));
            // Bytes move as their sender sees it.
            if way.dir == Direction::Send {
                (meeting.latency, meeting.transfer) = (way.latency, way.transfer);
                meeting.order = order(op, leg, class);
            }
            if meeting.parties.len() == 2 {
                self.set_off(&key, id);
            }
        }
        if count == 0 {
            self.end(class, op, Stamp::new(self.now, lane));
        }
    }

    fn whole(&mut self, class: u32, op: u32, at: u32, ctas: u16) {
        self.launch(class, op, 1, ctas);
        let script = &self.scripts[self.runs[class as usize].program];
        let whole = &script.deeds.wholes[at as usize];
        let classes = &whole.gang.classes;
        let key = (script.lane(op), None, classes[0], script.turn(op, 0));
        let id = if classes.len() > 1 { self.meetings.enter(key) } else { self.meetings.fresh() };
        let meeting = self.meetings.get_mut(id);
        meeting.parties.push(Party::new(class, op, whole.ports));
        if class == classes[0] {
            (meeting.latency, meeting.transfer) = (whole.latency, whole.transfer);
            meeting.order = order(op, 0, class);
        }
        if meeting.parties.len() == classes.len() {
            self.set_off(&key, id);
        }
    }

    /// Everyone is there: the bytes set off.
    fn set_off(&mut self, key: &Key, id: MeetingId) {
        self.meetings.full(key);
        let now = self.now;
        let meeting = self.meetings.get_mut(id);
        (meeting.ready, meeting.longest) = (now, meeting.transfer);
        let (posted, transfer, parties) = (meeting.order, meeting.transfer, meeting.parties.clone());
        let mut longest = transfer;
        for party in &parties {
            for port in party.ports() {
                let port = &mut self.runs[party.class as usize].ports[port];
                if !port.is_free() {
                    port.forget(now);
                    longest = longest.max(port.lasting(posted, now, transfer));
                }
            }
        }
        let mut behind = BTreeSet::new();
        for party in &parties {
            for port in party.ports() {
                let port = &mut self.runs[party.class as usize].ports[port];
                behind.extend(port.behind(posted, now).map(|h| (h.order, h.meeting)));
                port.hold(id, posted, now, now.saturating_add(longest));
            }
        }
        let meeting = self.meetings.get_mut(id);
        meeting.longest = longest;
        let (time, version) = (meeting.arrives(), meeting.version);
        self.push(time, Event::Arrives { meeting: id, version });
        self.price(behind);
    }

    /// Works out again when meetings are over that others went before, and then those behind them.
    fn price(&mut self, mut behind: BTreeSet<(u64, MeetingId)>) {
        while let Some((posted, id)) = behind.pop_first() {
            let (meeting, now) = (self.meetings.get(id), self.now);
            let (ready, transfer) = (meeting.ready, meeting.transfer);
            let ports = || meeting.parties.iter().flat_map(|p| p.ports().map(|port| (p.class as usize, port)));
            let lasting = |(class, port): (usize, usize)| self.runs[class].ports[port].lasting(posted, ready, transfer);
            let longest = ports().map(lasting).fold(transfer, u64::max);
            if longest == meeting.longest {
                continue;
            }
            for (class, port) in ports() {
                let port = &mut self.runs[class].ports[port];
                port.change(id, ready, ready.saturating_add(longest));
                behind.extend(port.behind(posted, now).map(|h| (h.order, h.meeting)));
            }
            let meeting = self.meetings.get_mut(id);
            meeting.longest = longest;
            meeting.version += 1;
            let (time, version) = (meeting.arrives().max(now), meeting.version);
            self.push(time, Event::Arrives { meeting: id, version });
        }
    }

    fn arrive(&mut self, id: MeetingId) {
        let meeting = self.meetings.get(id);
        self.slowed += u64::from(meeting.longest > meeting.transfer);
        let parties = std::mem::take(&mut self.meetings.get_mut(id).parties);
        for party in &parties {
            let run = &mut self.runs[party.class as usize];
            let script = &self.scripts[run.program];
            let cell = run.cell(script, party.op);
            cell.waits -= 1;
            if cell.waits == 0 {
                let lane = script.lane(party.op);
                self.give_sms(party.class, party.op);
                self.end(party.class, party.op, Stamp::new(self.now, lane));
            }
        }
        self.meetings.get_mut(id).parties = parties;
        self.meetings.over(id);
    }

    /// An op is over: those that wait for nothing else can begin.
    fn end(&mut self, class: u32, op: u32, end: Stamp) {
        let run = &mut self.runs[class as usize];
        let script = &self.scripts[run.program];
        if self.effort.spans {
            let kept = &mut run.kept[op as usize];
            let begun = if matches!(script.deed(op, run.local), Deed::Skip) { end.ps() } else { kept[0] };
            *kept = [begun, end.ps()];
        }
        let last = &mut run.lasts[script.lane(op) as usize];
        *last = (*last).max(end);
        for at in script.next(op) {
            let next = script.next_op(at);
            let cell = run.cell(script, next);
            cell.start = cell.start.max(end);
            cell.waits -= 1;
            if cell.waits == 0 {
                self.ready.push_back((class, next));
            }
        }
        run.over(script, op);
    }

    /// Names each waiting rank, the op it waits in and whom for.
    fn deadlock(&self) -> Error {
        let mut said = vec![];
        for (class, run) in self.runs.iter().enumerate().filter(|(_, run)| run.left > 0) {
            let (rank, script) = (self.fold.representatives[class], &self.scripts[run.program]);
            let Some((op, _)) = run.open().next() else { continue };
            said.push(format!("rank {rank} waits in {}", script.line.path(op as usize)));
        }
        let more = said.len().saturating_sub(8);
        said.truncate(8);
        let tail = if more > 0 { format!("; and {more} more classes of ranks") } else { String::new() };
        Error::plan(format!("deadlock: {}{tail}", said.join("; ")))
    }

    pub fn found(self) -> Simulated {
        let (events, slowed) = (self.events, self.slowed);
        Simulated { timeline: account::timeline(self), events, slowed }
    }
}

/// How long a kernel takes beside communication that was launched before it.
fn beside(run: &Run, sms: u32, kernel: &Running) -> u64 {
    if !kernel.sm_bound || run.sms.is_empty() {
        return kernel.duration;
    }
    let before = run.sms.iter().filter(|taken| taken.op < kernel.op).map(|taken| taken.held);
    let speed = |held: u32| f64::from(sms.saturating_sub(held).max(1)) / f64::from(sms);
    lasting(before, kernel.start, kernel.duration, speed)
}
