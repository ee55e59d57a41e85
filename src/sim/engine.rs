//! The event loop.

use super::fault::Health;
use super::jitter::{Jitter, Noise, axes_of};
use super::meeting::{Key, MeetingId, Meetings, Party, order};
use super::run::{Kept, Moved, Run, Running, Taken};
use super::script::Script;
use crate::act::stamp::Stamp;
use crate::act::stretch::{Held, lasting};
use crate::act::{Deed, Machine, SCALE_OUT, numbers, picoseconds, seconds};
use crate::fold::Fold;
use crate::plan::{Direction, Plan};
use crate::timeline::{Arrow, ArrowEnd};
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
    pub meetings: Meetings,
    queue: BinaryHeap<Queued>,
    /// Ops that can begin now.
    ready: VecDeque<(u32, u32)>,
    pub now: u64,
    found: u64,
    pub events: u64,
    pub slowed: u64,
    jitter: Option<Jitter>,
    pub moved: Vec<Moved>,
    pub arrows: Vec<Arrow>,
    sms: u32,
    host_launch: u64,
    keep: bool,
}

impl<'p> Engine<'p> {
    pub fn new(
        plan: &'p Plan,
        machine: Machine,
        fold: &'p Fold,
        scripts: &'p [Script<'p>],
        health: &[Health],
        jitter: Option<Jitter>,
        keep: bool,
    ) -> Engine<'p> {
        let mut runs: Vec<Option<Run>> = fold.representatives.iter().map(|_| None).collect();
        for (program, script) in scripts.iter().enumerate() {
            for (local, &class) in script.deeds.classes.iter().enumerate() {
                let health = health[class].clone();
                runs[class] = Some(Run::new(script, (program, local), plan.lanes.len(), health, keep));
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
            jitter,
            moved: vec![],
            arrows: vec![],
            sms: machine.cluster.gpu.sms.value,
            host_launch: picoseconds(machine.stack.host_launch.value),
            keep,
        }
    }

    /// Goes through all events there are. Ops that are left then wait for what never comes.
    pub fn run(&mut self) {
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
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Issued { class, op } => self.begin(class, op),
            Event::KernelEnds { class, op } => self.kernel_ends(class, op),
            Event::Arrives { meeting, version } => {
                let found = self.meetings.get(meeting);
                let dead = || found.parties.iter().any(|p| self.runs[p.class as usize].health.dead < self.now);
                if found.version == version && !dead() {
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
        if run.health.dead <= self.now {
            return;
        }
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

    fn kernel(&mut self, class: u32, op: u32, alone: u64, sm_bound: bool) {
        let run = &mut self.runs[class as usize];
        let start = run.cell(&self.scripts[run.program], op).start;
        let (now, mut noise) = (start.ps(), run.noise[start.lane() as usize]);
        if now > run.compute_end {
            run.waited[start.lane() as usize] += now - run.compute_end;
        }
        if run.kernels.is_empty() {
            run.sms.retain(|taken| taken.held.to > now);
        }
        let slow = if run.health.slow > 1.0 { (alone as f64 * run.health.slow).round() as u64 } else { alone };
        let duration = self.jitter.as_mut().map_or(slow, |jitter| jitter.kernel(slow, &mut noise));
        let mut kernel = Running { op, start: now, duration, end: 0, sm_bound, noise };
        kernel.end = now.saturating_add(beside(run, self.sms, &kernel));
        run.kernels.push(kernel);
        if self.keep {
            run.kept[op as usize] = Kept { start: now, end: now, by: (class, op) };
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
        if run.health.dead < now {
            return;
        }
        let noise = run.kernels.swap_remove(at).noise;
        run.compute_end = run.compute_end.max(now);
        let lane = self.scripts[run.program].lane(op);
        run.noise[lane as usize] = noise;
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
    fn launch(&mut self, class: u32, op: u32, meetings: u32, ctas: u16) -> Noise {
        let (run, now) = (&mut self.runs[class as usize], self.now);
        let cell = run.cell(&self.scripts[run.program], op);
        cell.waits = meetings;
        let lane = cell.start.lane();
        let noise = run.noise[lane as usize];
        if self.keep {
            run.kept[op as usize] = Kept { start: now, end: u64::MAX, by: (class, op) };
        }
        self.take_sms(class, op, ctas);
        noise
    }

    fn legs(&mut self, class: u32, op: u32, first: u32, count: u16, ctas: u16) {
        let noise = self.launch(class, op, u32::from(count), ctas);
        let script = &self.scripts[self.runs[class as usize].program];
        let lane = script.lane(op);
        for (leg, way) in script.deeds.legs(first, count).iter().enumerate() {
            let key = (lane, Some(way.by), way.sender, script.turn(op, leg));
            let id = self.meetings.enter(key);
            let meeting = self.meetings.get_mut(id);
            let mut party = Party::new(class, op, way.ports, noise, self.now);
            party.sends = way.dir == Direction::Send;
            meeting.parties.push(party);
            // Bytes move as their sender sees it.
            if way.dir == Direction::Send {
                (meeting.latency, meeting.transfer) = (way.latency, way.transfer);
                meeting.order = order(op, leg, class);
                meeting.sent = tiers(way.ports, way.bytes as f64);
                meeting.between_two = way.sender != way.receiver;
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
        let noise = self.launch(class, op, 1, ctas);
        let script = &self.scripts[self.runs[class as usize].program];
        let whole = &script.deeds.wholes[at as usize];
        let classes = &whole.gang.classes;
        let key = (script.lane(op), None, classes[0], script.turn(op, 0));
        let id = if classes.len() > 1 { self.meetings.enter(key) } else { self.meetings.fresh() };
        let meeting = self.meetings.get_mut(id);
        let mut party = Party::new(class, op, whole.ports, noise, self.now);
        if self.jitter.is_some() || self.keep {
            let mine = whole.gang.members.iter().filter(|&&m| self.fold.class_of[m as usize] == class);
            party.count = mine.count() as u32;
        }
        meeting.parties.push(party);
        if class == classes[0] {
            (meeting.latency, meeting.transfer) = (whole.latency, whole.transfer);
            meeting.order = order(op, 0, class);
            meeting.between_two = false;
            meeting.sent = whole.sent.map(|bytes| bytes * whole.gang.members.len() as f64);
        }
        if meeting.parties.len() == classes.len() {
            if whole.apart { self.set_off_apart(&key, id) } else { self.set_off(&key, id) }
        }
    }

    /// Everyone is there, and each has bytes of its own to see off.
    fn set_off_apart(&mut self, key: &Key, id: MeetingId) {
        self.meetings.full(key);
        let mut parties = std::mem::take(&mut self.meetings.get_mut(id).parties);
        self.meetings.over(id);
        parties.sort_by_key(|party| party.class);
        for party in parties {
            let run = &self.runs[party.class as usize];
            let script = &self.scripts[run.program];
            let Deed::Whole { at, .. } = script.deed(party.op, run.local) else { continue };
            let whole = &script.deeds.wholes[at as usize];
            let own = self.meetings.fresh();
            let meeting = self.meetings.get_mut(own);
            meeting.parties = vec![party];
            (meeting.latency, meeting.transfer) = (whole.latency, whole.transfer);
            meeting.order = order(party.op, 0, party.class);
            self.set_off(key, own);
        }
    }

    /// Everyone is there: the bytes set off.
    fn set_off(&mut self, key: &Key, id: MeetingId) {
        self.meetings.full(key);
        let now = self.now;
        let mut parties = self.meetings.get(id).parties.clone();
        parties.iter_mut().for_each(|p| p.ago = now - p.ago);
        let axes = axes_of(&self.plan.lanes[key.0 as usize]);
        let (late, noise) = self.jitter.as_mut().map_or_else(Default::default, |jitter| jitter.gather(&parties, axes));
        let meeting = self.meetings.get_mut(id);
        (meeting.ready, meeting.noise) = (now + late, noise);
        let (posted, ready) = (meeting.order, meeting.ready);
        for party in &parties {
            for port in party.ports() {
                self.runs[party.class as usize].ports[port].forget(now);
            }
        }
        let longest = self.lasting(id);
        let mut behind = BTreeSet::new();
        for party in &parties {
            for port in party.ports() {
                let port = &mut self.runs[party.class as usize].ports[port];
                behind.extend(port.behind(posted, now).map(|h| (h.order, h.meeting)));
                port.hold(id, posted, ready, ready.saturating_add(longest));
            }
        }
        let meeting = self.meetings.get_mut(id);
        meeting.longest = longest;
        let (time, version) = (meeting.arrives(), meeting.version);
        self.push(time, Event::Arrives { meeting: id, version });
        self.price(behind);
    }

    /// How long the bytes of a meeting take, as far as is known: on the port that keeps them longest.
    fn lasting(&self, id: MeetingId) -> u64 {
        let meeting = self.meetings.get(id);
        let ports = meeting.parties.iter().flat_map(|p| p.ports().map(|port| (p.class as usize, port)));
        let on = |(class, port): (usize, usize)| {
            let run = &self.runs[class];
            let link = &run.health.links[port / SCALE_OUT];
            run.ports[port].lasting(meeting.order, meeting.ready, meeting.transfer, link)
        };
        ports.map(on).fold(meeting.transfer, u64::max)
    }

    /// Works out again when meetings are over that others went before, and then those behind them.
    fn price(&mut self, mut behind: BTreeSet<(u64, MeetingId)>) {
        while let Some((posted, id)) = behind.pop_first() {
            let (longest, now) = (self.lasting(id), self.now);
            let meeting = self.meetings.get_mut(id);
            if longest == meeting.longest {
                continue;
            }
            meeting.longest = longest;
            meeting.version += 1;
            let (time, version, ready) = (meeting.arrives().max(now), meeting.version, meeting.ready);
            let parties = std::mem::take(&mut meeting.parties);
            for party in &parties {
                for port in party.ports() {
                    let port = &mut self.runs[party.class as usize].ports[port];
                    port.change(id, ready, ready.saturating_add(longest));
                    behind.extend(port.behind(posted, now).map(|h| (h.order, h.meeting)));
                }
            }
            self.meetings.get_mut(id).parties = parties;
            self.push(time, Event::Arrives { meeting: id, version });
        }
    }

    fn arrive(&mut self, id: MeetingId) {
        let meeting = self.meetings.get_mut(id);
        let parties = std::mem::take(&mut meeting.parties);
        let (noise, ready, meeting_of_two) = (meeting.noise, meeting.ready, meeting.between_two);
        self.slowed += u64::from(meeting.longest > meeting.transfer);
        if self.keep {
            let times = times(&self.fold.multiplicity, &parties, meeting_of_two);
            self.moved.push(Moved { from: ready, to: ready + meeting.longest, sent: meeting.sent, times });
        }
        if self.keep && meeting_of_two {
            self.arrow(&parties, ready);
        }
        // The one for whom all others waited came last.
        let last = parties.last().map(|p| (p.class, p.op));
        for party in &parties {
            let run = &mut self.runs[party.class as usize];
            let script = &self.scripts[run.program];
            let cell = run.cell(script, party.op);
            cell.waits -= 1;
            if cell.waits == 0 {
                let lane = script.lane(party.op);
                run.noise[lane as usize] = noise;
                if let (true, Some(by)) = (self.keep, last) {
                    run.kept[party.op as usize].by = by;
                }
                self.give_sms(party.class, party.op);
                self.end(party.class, party.op, Stamp::new(self.now, lane));
            }
        }
        self.meetings.get_mut(id).parties = parties;
        self.meetings.over(id);
    }

    /// Notes a message from one class to another.
    fn arrow(&mut self, parties: &[Party], ready: u64) {
        let end = |party: &Party, at: u64| {
            let lane = self.scripts[self.runs[party.class as usize].program].lane(party.op);
            ArrowEnd { rank: self.fold.representatives[party.class as usize], lane, at: seconds(at) }
        };
        let [a, b] = parties else { return };
        let (from, to) = if a.sends { (a, b) } else { (b, a) };
        self.arrows.push(Arrow { from: end(from, ready), to: end(to, self.now) });
    }

    /// An op is over: those that wait for nothing else can begin.
    fn end(&mut self, class: u32, op: u32, end: Stamp) {
        let run = &mut self.runs[class as usize];
        let script = &self.scripts[run.program];
        if self.keep {
            let kept = &mut run.kept[op as usize];
            let begun = if matches!(script.deed(op, run.local), Deed::Skip) { end.ps() } else { kept.start };
            (kept.start, kept.end) = (begun, end.ps());
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
}

/// Bytes by tier, of a message through these ports.
fn tiers(ports: u8, bytes: f64) -> [f64; 2] {
    if numbers(ports).any(|port| port >= SCALE_OUT) { [0.0, bytes] } else { [bytes, 0.0] }
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

/// How many meetings one of classes stands for: a message for each rank of the class that sends it, a collective for
/// as many ranks of a class as take part in one.
fn times(multiplicity: &[u32], parties: &[Party], between_two: bool) -> f64 {
    let first = if between_two { parties.iter().find(|p| p.sends) } else { parties.first() };
    let Some(first) = first else { return 0.0 };
    let together = if between_two {
        1
    } else {
        parties.iter().filter(|p| p.class == first.class).map(|p| p.count).sum::<u32>().max(1)
    };
    f64::from(multiplicity[first.class as usize]) / f64::from(together)
}
