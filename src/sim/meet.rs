//! Those who communicate: they wait for each other, their bytes go, and arrive.

use super::engine::{Engine, Event};
use super::jitter::{Noise, axes_of};
use super::links::footprint;
use super::meeting::{Key, Meeting, MeetingId, Party, What, order};
use super::pace::Asks;
use super::ports::Through;
use super::run::{Kept, Moved, Run, Taken};
use crate::act::charges::Spell;
use crate::act::stamp::Stamp;
use crate::act::stretch::Held;
use crate::act::waits::Path;
use crate::act::{Deed, SCALE_OUT, over, seconds};
use crate::plan::Direction;
use crate::timeline::{Arrow, ArrowEnd};
use std::collections::BTreeSet;

impl Engine<'_> {
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

    pub(super) fn legs(&mut self, class: u32, op: u32, first: u32, count: u16, ctas: u16) {
        let noise = self.launch(class, op, u32::from(count), ctas);
        let script = &self.scripts[self.runs[class as usize].program];
        let lane = script.lane(op);
        for (leg, way) in script.deeds.legs(first, count).iter().enumerate() {
            let key = (lane, Some(way.by), way.sender, script.turn(op, leg));
            let id = self.meetings.enter(key);
            let meeting = self.meetings.get_mut(id);
            let mut party = Party::new(class, op, way.ports(), noise, self.now);
            party.sends = way.dir == Direction::Send;
            meeting.parties.push(party);
            // Bytes move as their sender sees it.
            if way.dir == Direction::Send {
                meeting.transit = way.transit;
                meeting.order = order(script.posted(op, leg), class);
                meeting.sent = over(way.tier, way.bytes);
                meeting.asks = asks(meeting.sent, self.rates, way.transit.transfer);
                (meeting.between_two, meeting.apart) = (way.sender != way.receiver, false);
                meeting.bytes = way.bytes;
                meeting.what = What::Hop { lane, by: way.by, class };
                let kind = (lane, footprint::Way::Hop(way.by), class);
                meeting.kind = self.links.as_ref().filter(|links| links.crosses(&kind)).map(|_| kind);
            }
            if meeting.parties.len() == 2 {
                self.set_off(&key, id);
            }
        }
        if count == 0 {
            let start = self.runs[class as usize].cell(script, op).start;
            self.end(class, op, start);
        }
    }

    pub(super) fn whole(&mut self, class: u32, op: u32, at: u32, ctas: u16) {
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
            meeting.transit = whole.transit;
            meeting.order = order(script.posted(op, 0), class);
            (meeting.between_two, meeting.apart) = (false, false);
            meeting.sent = whole.sent.map(|bytes| bytes * whole.gang.members.len() as f64);
            meeting.asks = asks(whole.sent, self.rates, whole.transit.transfer);
            meeting.bytes = whole.bytes;
            let program = self.runs[class as usize].program;
            meeting.what = What::Whole { program: program as u32, at };
            meeting.kind = self.links.as_ref().and_then(|l| l.kind(program, script.lane(op), at, class));
        }
        if meeting.parties.len() == classes.len() {
            if whole.apart() { self.set_off_apart(&key, id) } else { self.set_off(&key, id) }
        }
    }

    /// Everyone is there, and each has bytes of its own to see off.
    fn set_off_apart(&mut self, key: &Key, id: MeetingId) {
        self.meetings.full(key);
        let mut parties = std::mem::take(&mut self.meetings.get_mut(id).parties);
        self.say_what_made_late(&mut parties);
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
            (meeting.between_two, meeting.apart) = (false, true);
            meeting.transit = whole.transit;
            meeting.order = order(script.posted(party.op, 0), party.class);
            meeting.bytes = whole.bytes;
            meeting.what = What::Whole { program: run.program as u32, at };
            (meeting.sent, meeting.asks) = (whole.sent, asks(whole.sent, self.rates, whole.transit.transfer));
            meeting.kind = self.links.as_ref().and_then(|l| l.kind(run.program, key.0, at, party.class));
            self.set_off(key, own);
        }
    }

    /// Everyone is there: the bytes set off.
    fn set_off(&mut self, key: &Key, id: MeetingId) {
        self.meetings.full(key);
        let now = self.now;
        let mut parties = std::mem::take(&mut self.meetings.get_mut(id).parties);
        self.say_what_made_late(&mut parties);
        self.meetings.get_mut(id).parties = parties.clone();
        parties.iter_mut().for_each(|p| p.ago = now - p.ago);
        let axes = axes_of(&self.plan.lanes[key.0 as usize]);
        let (late, noise) = self.jitter.as_mut().map_or_else(Default::default, |jitter| jitter.gather(&parties, axes));
        let (posted, lane) = (self.meetings.get(id).order, key.0);
        let mut ready = now + late;
        for party in &parties {
            for port in party.ports() {
                let port = &mut self.runs[party.class as usize].ports[port];
                port.forget(now);
                ready = ready.max(port.owed(lane, posted, now));
            }
        }
        let meeting = self.meetings.get_mut(id);
        (meeting.lane, meeting.all_here, meeting.ready, meeting.noise) = (lane, now + late, ready, noise);
        let meeting = self.meetings.get(id);
        let (crosses, transfer, stream) = (meeting.kind.is_some(), meeting.transit.transfer, meeting.stream());
        // Until when those on shared links hold their ports is known when they are over.
        let longest = if crosses { u64::MAX } else { self.lasting(id) };
        let mut behind = BTreeSet::new();
        for party in &parties {
            for port in party.ports() {
                let port = &mut self.runs[party.class as usize].ports[port];
                behind.extend(port.behind(posted, self.now).map(|h| (h.order, h.meeting)));
                port.hold(id, posted, Spell::new(ready, ready.saturating_add(longest), stream), transfer);
            }
        }
        let meeting = self.meetings.get_mut(id);
        meeting.longest = longest;
        let (time, version) = (meeting.arrives(), meeting.version);
        match crosses {
            true if ready > now => self.push(ready, Event::Goes { meeting: id, version }),
            true => self.go(id),
            false => self.push(time, Event::Arrives { meeting: id, version }),
        }
        self.price(behind);
    }

    /// Bytes on shared links, at the speed that the ports of those who meet leave them now.
    pub(super) fn go(&mut self, id: MeetingId) {
        let meeting = self.meetings.get(id);
        let ports = meeting.parties.iter().flat_map(|p| p.ports().map(|port| (p.class as usize, port)));
        let now = self.now;
        let on = |(class, port): (usize, usize)| {
            let run = &self.runs[class];
            run.ports[port].speed(through(run, meeting, port), meeting.ready, now)
        };
        let least = |(cap, edge): (f64, u64), (speed, next): (f64, u64)| (cap.min(speed), edge.min(next));
        let (cap, edge) = ports.map(on).fold((1.0, u64::MAX), least);
        let Some(links) = &mut self.links else { return };
        links.advance(now);
        let meeting = self.meetings.get_mut(id);
        meeting.version += 1;
        let version = meeting.version;
        if links.go(id, meeting, cap) {
            self.push(edge, Event::Goes { meeting: id, version });
        } else {
            self.have_gone(id);
        }
    }

    /// The last bytes have left their ports.
    pub(super) fn have_gone(&mut self, id: MeetingId) {
        let now = self.now;
        let meeting = self.meetings.get_mut(id);
        // Ends that are nearly together are taken together: never before it could have been alone.
        let longest = (now - meeting.ready).max(meeting.transit.transfer);
        (meeting.activity, meeting.longest) = (None, longest);
        meeting.version += 1;
        let (time, version, kind) = (meeting.arrives(), meeting.version, meeting.kind);
        if let (Some(links), Some(kind), true) = (&mut self.links, kind, longest > meeting.transit.transfer) {
            links.was_slowed(&kind, longest - meeting.transit.transfer);
        }
        let mut behind = BTreeSet::new();
        // Its ports alone would have let it go sooner. What it lost on links it has lost already: were its ports held for
        // that time, too, its lane would owe it once more, and those behind it would wait for bytes that are gone.
        self.hold_for(id, longest.min(self.lasting(id)), &mut behind);
        self.push(time, Event::Arrives { meeting: id, version });
        self.price(behind);
    }

    /// A meeting holds its ports for so long; `behind` hears of those that wait for it there.
    fn hold_for(&mut self, id: MeetingId, longest: u64, behind: &mut BTreeSet<(u64, MeetingId)>) {
        let meeting = self.meetings.get(id);
        let (ready, posted) = (meeting.ready, meeting.order);
        for party in &meeting.parties {
            for port in party.ports() {
                let port = &mut self.runs[party.class as usize].ports[port];
                port.change(id, ready, ready.saturating_add(longest));
                behind.extend(port.behind(posted, self.now).map(|h| (h.order, h.meeting)));
            }
        }
    }

    /// How long the bytes of a meeting take, as far as is known: on the port that keeps them longest.
    fn lasting(&self, id: MeetingId) -> u64 {
        let meeting = self.meetings.get(id);
        let ports = meeting.parties.iter().flat_map(|p| p.ports().map(|port| (p.class as usize, port)));
        let on = |(class, port): (usize, usize)| {
            let run = &self.runs[class];
            run.ports[port].lasting(through(run, meeting, port), meeting.ready, meeting.transit.transfer)
        };
        ports.map(on).fold(meeting.transit.transfer, u64::max)
    }

    /// Works out again when meetings are over that others went before, and then those behind them.
    fn price(&mut self, mut behind: BTreeSet<(u64, MeetingId)>) {
        while let Some((_, id)) = behind.pop_first() {
            if self.meetings.get(id).kind.is_some() {
                if self.meetings.get(id).activity.is_some() {
                    self.go(id);
                }
                continue;
            }
            let (longest, now) = (self.lasting(id), self.now);
            let meeting = self.meetings.get_mut(id);
            if longest == meeting.longest {
                continue;
            }
            meeting.longest = longest;
            meeting.version += 1;
            let (time, version) = (meeting.arrives().max(now), meeting.version);
            self.hold_for(id, longest, &mut behind);
            self.push(time, Event::Arrives { meeting: id, version });
        }
    }

    pub(super) fn arrive(&mut self, id: MeetingId) {
        let meeting = self.meetings.get_mut(id);
        let parties = std::mem::take(&mut meeting.parties);
        let (noise, ready, meeting_of_two) = (meeting.noise, meeting.ready, meeting.between_two);
        let all_here = meeting.all_here;
        self.slowed += u64::from(meeting.longest > meeting.transit.transfer);
        if self.keep {
            let times = times(&self.fold.multiplicity, &parties, meeting.apart);
            let Meeting { sent, what, bytes, longest, .. } = *meeting;
            self.moved.push(Moved { from: ready, to: ready + longest, sent, what, bytes, times });
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
            let all_came = if all_here > cell.start.ps() { Stamp::new(all_here, party.made_late) } else { cell.start };
            cell.came = cell.came.max((self.now, all_came));
            let came = cell.came.1;
            if cell.waits == 0 {
                let lane = script.lane(party.op);
                run.noise[lane as usize] = noise;
                if let (true, Some(by)) = (self.keep, last) {
                    run.kept[party.op as usize].by = by;
                }
                self.give_sms(party.class, party.op);
                self.end_beside(party.class, party.op, Some(came));
            }
        }
        self.meetings.get_mut(id).parties = parties;
        self.meetings.over(id);
    }

    /// Notes of each party what has made the last of them later.
    fn say_what_made_late(&mut self, parties: &mut [Party]) {
        let cell = |party: &Party| {
            let run = &mut self.runs[party.class as usize];
            let cell = run.cell(&self.scripts[run.program], party.op);
            (cell.start, cell.launched)
        };
        let launched: Vec<(Stamp, Path)> = parties.iter().map(cell).collect();
        let at = launched.iter().map(|launched| launched.0).max().unwrap_or_default();
        let first = launched.iter().map(|launched| launched.0.ps()).min().unwrap_or_default();
        if first == at.ps() {
            return;
        }
        let joins_stages = parties.first().is_some_and(|party| {
            let script = &self.scripts[self.runs[party.class as usize].program];
            self.plan.lanes[script.lane(party.op) as usize].joins_stages()
        });
        let last = launched.iter().filter(|(start, _)| *start == at);
        let path = if joins_stages { Some(Path::default()) } else { last.map(|(_, path)| path.back_to(first)).max() };
        let Some(path) = path else { return };
        for (party, (since, _)) in parties.iter_mut().zip(&launched).filter(|(_, launched)| launched.0.ps() < at.ps()) {
            party.made_late = path.made_late(since.ps());
        }
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
}

/// The bytes of a meeting at a port of one of those who meet.
fn through<'a>(run: &'a Run, meeting: &Meeting, port: usize) -> Through<'a> {
    let tier = port / SCALE_OUT;
    Through { stream: meeting.stream(), order: meeting.order, link: &run.health.links[tier], asks: meeting.asks[tier] }
}

/// What bytes inside nodes and between them ask of links of such `rates`, in bytes a second, if they take `transfer`
/// picoseconds where all is well. Of their own links less than all where something else holds them up, as a send whose few
/// channels fill half of a NIC; all of it where nothing is known of how long they take. Of what holds them up all for the
/// tier that takes longest, and of the other as much as keeps up.
fn asks(sent: [f64; 2], rates: [f64; 2], transfer: u64) -> [Asks; 2] {
    let alone = [0, 1].map(|tier| sent[tier] / rates[tier]);
    let (longest, takes) = (alone[0].max(alone[1]), seconds(transfer).value());
    let share = |alone: f64, of: f64| if of > 0.0 { (alone / of).min(1.0) } else { 1.0 };
    alone.map(|alone| Asks { link: share(alone, takes), behind: share(alone, longest) })
}

/// How often a meeting's bytes go: a message of each rank of the class that sends it, bytes apart of each rank of their
/// class, those of a collective once for as many ranks of a class as take part in one.
fn times(multiplicity: &[u32], parties: &[Party], apart: bool) -> f64 {
    let sender = parties.iter().find(|party| party.sends);
    let Some(first) = sender.or(parties.first()) else { return 0.0 };
    let together = match apart || sender.is_some() {
        true => 1,
        false => parties.iter().filter(|p| p.class == first.class).map(|p| p.count).sum::<u32>().max(1),
    };
    f64::from(multiplicity[first.class as usize]) / f64::from(together)
}
