//! The event loop.

use super::fault::Health;
use super::jitter::Jitter;
use super::links::Links;
use super::meeting::{MeetingId, Meetings};
use super::run::{Cell, Kept, Moved, Run, Running};
use super::script::Script;
use crate::act::stamp::Stamp;
use crate::act::stretch::lasting;
use crate::act::{Deed, Machine, picoseconds};
use crate::device::OnSms;
use crate::fold::Fold;
use crate::plan::{Lane, Plan};
use crate::timeline::Arrow;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The host has issued an op for which nothing else has to be waited.
    Issued {
        class: u32,
        op: u32,
    },
    KernelEnds {
        class: u32,
        op: u32,
    },
    /// A copy, or a kernel of the CPU, ends.
    AsideEnds {
        class: u32,
        op: u32,
    },
    Arrives {
        meeting: MeetingId,
        version: u32,
    },
    /// Bytes set off on shared links, or a port on their way has another speed.
    Goes {
        meeting: MeetingId,
        version: u32,
    },
    /// A plane of the network goes down or comes back.
    Planes,
}

/// An event in the queue: its time, ps, then its place in the order in which events were found.
type Queued = Reverse<(u64, u64, Event)>;

pub struct Engine<'p> {
    pub plan: &'p Plan,
    pub fold: &'p Fold,
    pub scripts: &'p [Script<'p>],
    pub runs: Vec<Run>,
    pub meetings: Meetings,
    pub(super) queue: BinaryHeap<Queued>,
    /// Ops that can begin now, by class.
    pub(super) ready: VecDeque<(u32, u32)>,
    pub now: u64,
    pub(super) found: u64,
    /// The time of the latest event that was asked for, ps.
    pub latest: u64,
    pub events: u64,
    pub slowed: u64,
    pub(super) jitter: Option<Jitter>,
    /// The links on which ranks can get in each other's way; `None` if there are no such links.
    pub links: Option<Links>,
    pub moved: Vec<Moved>,
    pub arrows: Vec<Arrow>,
    pub(super) sms: u32,
    /// Bytes a second of a rank's links inside the node, and of its links out of it.
    pub(super) rates: [f64; 2],
    pub(super) host_launch: u64,
    pub(super) keep: bool,
    /// How long an op that communicates may wait and take together, ps.
    pub watchdog: u64,
    /// When the first op had taken longer than that, ps.
    pub overdue: u64,
    /// The time behind which no event is gone through, ps.
    pub until: u64,
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
            latest: 0,
            events: 0,
            slowed: 0,
            jitter,
            links: None,
            moved: vec![],
            arrows: vec![],
            sms: machine.cluster.gpu.sms.value,
            rates: machine.cluster.rates_of_a_rank(),
            host_launch: picoseconds(machine.host_launch()),
            keep,
            watchdog: u64::MAX,
            overdue: u64::MAX,
            until: u64::MAX,
        }
    }

    /// Goes through all events up to `until`. Ops that are left wait for something that never comes, or comes later.
    pub fn run(&mut self) {
        for class in 0..self.runs.len() {
            let roots = &self.scripts[self.runs[class].program].roots;
            self.ready.extend(roots.iter().map(|&op| (class as u32, op)));
        }
        self.planes_change();
        self.begin_all();
        loop {
            let until = self.until;
            let next = self.queue.peek().map(|Reverse((time, ..))| *time).filter(|&time| time <= until);
            // Everything that happens at one moment is told to the links before they are asked how things go on.
            if next != Some(self.now) && self.bytes_end(next.unwrap_or(until)) {
                continue;
            }
            let Some(Reverse((time, _, event))) = next.and_then(|_| self.queue.pop()) else { break };
            assert!(time >= self.now, "an event at {time} ps after {} ps", self.now);
            self.now = time;
            self.events += 1;
            self.take(event);
            self.begin_all();
        }
        if self.until < u64::MAX {
            self.now = self.until;
        }
    }

    /// The end of the last op, ps.
    pub fn last(&self) -> u64 {
        self.runs.iter().map(|run| run.last().ps()).max().unwrap_or(0)
    }

    /// When the first of the ops that communicate now will have taken longer than the watchdog lets it, ps.
    pub fn first_due(&self) -> u64 {
        let since = |(class, op): (u32, u32)| self.runs[class as usize].since(op);
        self.meetings.parties().filter_map(since).min().map_or(u64::MAX, |since| since.saturating_add(self.watchdog))
    }

    /// Goes on to the next end of bytes on shared links, if that comes no later than `next`; returns whether it did.
    fn bytes_end(&mut self, next: u64) -> bool {
        let Some(links) = &mut self.links else { return false };
        let Some(end) = links.next_end().filter(|&end| end <= next) else { return false };
        let mut done = vec![];
        links.complete(&mut done);
        self.now = end;
        self.events += done.len() as u64;
        for id in done.into_iter().map(|id| id as MeetingId) {
            // A meeting that went before may have taken this one along.
            if self.meetings.get(id).activity.is_some() {
                self.have_gone(id);
            }
        }
        self.begin_all();
        true
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Issued { class, op } => self.begin(class, op),
            Event::KernelEnds { class, op } => self.kernel_ends(class, op),
            Event::AsideEnds { class, op } => {
                let run = &self.runs[class as usize];
                if run.health.dead >= self.now {
                    self.end_beside(class, op, None);
                }
            }
            Event::Arrives { meeting, version } => {
                let found = self.meetings.get(meeting);
                let dead = || found.parties.iter().any(|p| self.runs[p.class as usize].health.dead < self.now);
                if found.version == version && !dead() {
                    self.arrive(meeting);
                }
            }
            Event::Goes { meeting, version } if self.meetings.get(meeting).version == version => self.go(meeting),
            Event::Goes { .. } => {}
            Event::Planes => self.planes_change(),
        }
    }

    /// Sets links between nodes to what is left of the planes, from now to the next change.
    fn planes_change(&mut self) {
        let now = self.now;
        if let Some(links) = &mut self.links {
            let next = links.planes_change(now);
            // Once nothing is left to do, further changes are no events.
            if self.runs.iter().any(|run| run.left > 0) {
                self.push(next, Event::Planes);
            }
        }
    }

    pub(super) fn push(&mut self, time: u64, event: Event) {
        // An event at no time never comes: those who wait for it are found waiting. An event too late to be told is
        // dropped, too.
        self.latest = self.latest.max(if time < u64::MAX { time } else { 0 });
        if time < Stamp::LIMIT {
            self.found += 1;
            self.queue.push(Reverse((time, self.found, event)));
        }
    }

    fn begin_all(&mut self) {
        while let Some((class, op)) = self.ready.pop_front() {
            let (host_lane, launch) = (self.plan.lanes.len() as u16, self.host_launch);
            let run = &mut self.runs[class as usize];
            let cell = run.cell(&self.scripts[run.program], op);
            let issued = u64::from(cell.issued) * launch;
            let host = run.began(op) + issued;
            let cell = run.cell(&self.scripts[run.program], op);
            // Where both come at the same moment, the device counts as what was waited for.
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
        let start = run.cell(script, op).start;
        run.cell(script, op).launched = run.recent.path(start);
        match script.deed(op, run.local) {
            Deed::Skip => self.end(class, op, start),
            Deed::Kernel { duration, on_sms } => self.kernel(class, op, duration, on_sms),
            Deed::Aside { duration } => {
                if self.keep {
                    run.kept[op as usize] = Kept { start: self.now, end: u64::MAX, by: (class, op) };
                }
                self.push(self.now.saturating_add(duration), Event::AsideEnds { class, op });
            }
            Deed::Legs { first, count, ctas } => self.legs(class, op, first, count, ctas),
            Deed::Whole { at, ctas } => self.whole(class, op, at, ctas),
        }
    }

    fn kernel(&mut self, class: u32, op: u32, alone: u64, on_sms: OnSms) {
        let run = &mut self.runs[class as usize];
        let Cell { start, launched, .. } = *run.cell(&self.scripts[run.program], op);
        let (now, mut noise) = (start.ps(), run.noise[start.lane() as usize]);
        if now > run.compute_end {
            launched.charge(&mut run.waited, run.compute_end);
        }
        if run.kernels.is_empty() {
            run.sms.retain(|taken| taken.held.to > now);
        }
        let slow = if run.health.slow > 1.0 { (alone as f64 * run.health.slow).round() as u64 } else { alone };
        let duration = self.jitter.as_mut().map_or(slow, |jitter| jitter.kernel(class, slow, &mut noise));
        let mut kernel = Running { op, start: now, duration, end: 0, on_sms, noise };
        kernel.end = now.saturating_add(beside(run, self.sms, &kernel));
        run.kernels.push(kernel);
        if self.keep {
            run.kept[op as usize] = Kept { start: now, end: now, by: (class, op) };
        }
        self.push(kernel.end, Event::KernelEnds { class, op });
    }

    /// Finds the ends of running kernels anew: communication holds more or fewer SMs than was thought.
    pub(super) fn price_kernels(&mut self, class: u32, held_by: u32) {
        let (run, now) = (&mut self.runs[class as usize], self.now);
        let mut changed = vec![];
        for at in 0..run.kernels.len() {
            let kernel = run.kernels[at];
            if kernel.on_sms != OnSms::NONE && kernel.op > held_by {
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
        let script = &self.scripts[run.program];
        let (lane, Cell { start, launched, .. }) = (script.lane(op), *run.cell(script, op));
        run.recent.note_kernel(&launched, now);
        run.noise[lane as usize] = noise;
        self.end(class, op, start.or_later(now, lane));
    }

    /// Ends an op beside the compute lane now. `ready`: when all who take part had come, and the lane that the last of
    /// them had waited for; `None` for an op without partners.
    pub(super) fn end_beside(&mut self, class: u32, op: u32, ready: Option<Stamp>) {
        let run = &mut self.runs[class as usize];
        let script = &self.scripts[run.program];
        let (lane, Cell { start, launched, .. }) = (script.lane(op), *run.cell(script, op));
        if self.now - start.ps() > self.watchdog && matches!(self.plan.lanes.get(lane as usize), Some(Lane::Comm(..))) {
            self.overdue = self.overdue.min(start.ps() + self.watchdog);
        }
        run.recent.note(lane, &launched, ready.unwrap_or(start), self.now);
        self.end(class, op, start.or_later(self.now, lane));
    }

    /// Ends an op, and lets those begin that wait for nothing else.
    pub(super) fn end(&mut self, class: u32, op: u32, end: Stamp) {
        let run = &mut self.runs[class as usize];
        let script = &self.scripts[run.program];
        if self.keep {
            let kept = &mut run.kept[op as usize];
            let begun = if matches!(script.deed(op, run.local), Deed::Skip) { end.ps() } else { kept.start };
            (kept.start, kept.end) = (begun, end.ps());
        }
        let last = &mut run.lasts[script.lane(op) as usize];
        *last = (*last).max(end);
        if script.is_wait(op) {
            let until_here = u64::from(run.cell(script, op).issued) * self.host_launch;
            run.waited(op, end.ps().saturating_sub(until_here));
        }
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

/// How long a kernel takes beside communication that was launched before it, ps.
fn beside(run: &Run, sms: u32, kernel: &Running) -> u64 {
    if run.sms.is_empty() {
        return kernel.duration;
    }
    let before = run.sms.iter().filter(|taken| taken.op < kernel.op).map(|taken| taken.held);
    let speed = |held: u32| f64::from(sms.saturating_sub(held).max(1)) / f64::from(sms);
    kernel.on_sms.lasts(kernel.duration, |work| lasting(before, kernel.start, work, speed))
}
