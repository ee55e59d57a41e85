//! The ports of a rank: while k transfers that were posted before hold a port, a transfer has 1 / (k + 1) of it, and
//! they lose what it takes; of what they leave free it has all that it fills ([`charges`](crate::act::charges)).

use super::meeting::MeetingId;
use super::pace::{self, Asks, Pace};
use crate::act::charges::{Owed, Spell, Stream, charges, edges, held_at, lasting, part};

/// A transfer on a port.
#[derive(Debug, Clone, Copy)]
pub struct Holder {
    pub spell: Spell,
    pub order: u64,
    pub meeting: MeetingId,
    /// How long its bytes would take alone, ps.
    transfer: u64,
    /// Whether it is over, and what others lost by it is noted.
    noted: bool,
}

/// Bytes on their way through a port: what they are of, when they were posted, the link, and the part of it that they
/// ask for.
#[derive(Debug, Clone, Copy)]
pub struct Through<'a> {
    pub stream: Stream,
    pub order: u64,
    pub link: &'a Pace,
    pub asks: Asks,
}

/// The holders of a port, with former ones as long as a present one was waiting for them; and what lanes owe there.
#[derive(Debug, Clone, Default)]
pub struct Port {
    holders: Vec<Holder>,
    lanes: Vec<Lane>,
}

/// The notes on a lane, in the order of posting: what later bytes owe follows from these.
#[derive(Debug, Clone, Default)]
struct Lane {
    lane: u16,
    /// What is owed by the notes that were dropped from the list.
    owed: Owed,
    notes: Vec<Noted>,
}

/// A note, and what is owed by it and all notes before it.
#[derive(Debug, Clone, Copy)]
struct Noted {
    order: u64,
    note: Note,
    owed: Owed,
}

#[derive(Debug, Clone, Copy)]
enum Note {
    /// Bytes of the lane held the port until then, ps.
    Held(u64),
    /// Bytes of the lane lost this much to others, ps.
    Lost(u64),
}

impl Note {
    fn on(self, owed: &mut Owed) {
        match self {
            Note::Held(to) => owed.hold(to),
            Note::Lost(loss) => owed.charge(loss),
        }
    }
}

/// Notes that are always kept; notes that can go are looked for where there are twice as many.
const NOTES: usize = 32;

impl Lane {
    fn note(&mut self, order: u64, note: Note) {
        let place = self.notes.partition_point(|known| known.order <= order);
        self.notes.insert(place, Noted { order, note, owed: Owed::default() });
        let mut owed = self.before(place);
        for noted in &mut self.notes[place..] {
            noted.note.on(&mut owed);
            noted.owed = owed;
        }
    }

    /// What is owed by the first `place` notes.
    fn before(&self, place: usize) -> Owed {
        place.checked_sub(1).map_or(self.owed, |last| self.notes[last].owed)
    }

    /// Drops notes that nobody can ask for: nothing posted before `order` is still to be noted, or to be asked for.
    /// Behind a sum that has come late there may be thousands that were posted later.
    fn settle(&mut self, order: u64) {
        if self.notes.len() < 2 * NOTES {
            return;
        }
        let settled = self.notes.partition_point(|known| known.order < order).min(self.notes.len() - NOTES);
        self.owed = self.before(settled);
        self.notes.drain(..settled);
    }
}

impl Port {
    /// Forgets the holders that nobody can ask for any more at `now`.
    pub fn forget(&mut self, now: u64) {
        if self.holders.is_empty() {
            return;
        }
        for at in 0..self.holders.len() {
            let holder = self.holders[at];
            if holder.spell.to <= now && !holder.noted {
                self.holders[at].noted = true;
                self.lane(holder.spell.lane).note(holder.order, Note::Held(holder.spell.to));
                for (lane, loss) in self.losses(&holder) {
                    self.lane(lane).note(holder.order, Note::Lost(loss));
                }
            }
        }
        let busy = self.holders.iter().filter(|h| h.spell.to > now);
        let since = busy.map(|h| h.spell.from).min().unwrap_or(u64::MAX);
        self.holders.retain(|h| h.spell.to > since.min(now));
    }

    fn lane(&mut self, lane: u16) -> &mut Lane {
        let place = self.lanes.iter().position(|known| known.lane == lane).unwrap_or_else(|| {
            self.lanes.push(Lane { lane, ..Lane::default() });
            self.lanes.len() - 1
        });
        &mut self.lanes[place]
    }

    /// The time that each lane loses to a holder, ps, as far as is certain: to one whose bytes are over, all of it.
    fn losses(&self, holder: &Holder) -> Vec<(u16, u64)> {
        let beside = |h: &&Holder| h.order < holder.order && h.spell.to > holder.spell.from;
        let before: Vec<Spell> = self.holders.iter().filter(beside).map(|h| h.spell).collect();
        let mut lost = vec![];
        let each = &mut |lane, loss| lost.push((lane, loss));
        charges(&before, holder.spell.stream(), holder.spell.from, holder.transfer, each);
        lost
    }

    /// The time before which no bytes of `lane` posted at `order` set off, ps, unless bytes posted before them are
    /// still to come.
    pub fn owed(&self, lane: u16, order: u64, now: u64) -> u64 {
        let under_way = |h: &&Holder| !h.noted && h.order < order && h.spell.lane != lane && h.spell.from < now;
        let lost = |holder: &Holder| {
            let lost = self.losses(holder).into_iter().find(|lost| lost.0 == lane);
            lost.map(|(_, loss)| (holder.order, Note::Lost(loss)))
        };
        let mut notes: Vec<(u64, Note)> = self.holders.iter().filter(under_way).filter_map(lost).collect();
        let first = notes.iter().map(|note| note.0).min().unwrap_or(order);
        let mut owed = Owed::default();
        if let Some(known) = self.lanes.iter().find(|known| known.lane == lane) {
            let certain = known.notes.partition_point(|known| known.order < first);
            owed = known.before(certain);
            let others = known.notes[certain..].iter().take_while(|known| known.order < order);
            notes.extend(others.map(|known| (known.order, known.note)));
        }
        notes.sort_by_key(|note| note.0);
        notes.into_iter().for_each(|(_, note)| note.on(&mut owed));
        owed.until
    }

    pub fn hold(&mut self, meeting: MeetingId, order: u64, spell: Spell, transfer: u64) {
        // A lane goes in the order of posting, and others lose only to holders that are there.
        let open = self.holders.iter().filter(|h| !h.noted).map(|h| h.order).fold(order, u64::min);
        if let Some(known) = self.lanes.iter_mut().find(|known| known.lane == spell.lane) {
            known.settle(open);
        }
        self.holders.push(Holder { spell, order, meeting, transfer, noted: false });
    }

    /// Changes the end of a holder that will be done at another time than it seemed.
    pub fn change(&mut self, meeting: MeetingId, from: u64, to: u64) {
        let mine = |h: &&mut Holder| h.meeting == meeting && h.spell.from == from;
        self.holders.iter_mut().filter(mine).for_each(|h| h.spell.to = to);
    }

    /// How long `transfer` takes from `ready` on beside all holders that were posted before, ps.
    pub fn lasting(&self, through: Through, ready: u64, transfer: u64) -> u64 {
        if through.link.is_well() && self.holders.is_empty() {
            return transfer;
        }
        let edges = self.edges(through, ready);
        if through.link.is_well() {
            return lasting(&edges, 0, through.stream.fills, ready, transfer);
        }
        let Through { stream: Stream { fills, .. }, link, asks, .. } = through;
        let held = |at: u64| held_at(&edges, fills, ready, at);
        let speed = |at: u64| part(held(at).0, fills) * link.leaves(at, asks);
        pace::lasting(ready, transfer, speed, |at| held(at).1.min(link.next(at)))
    }

    /// The part of the port, and of its link's speed, that bytes have at `now` which set off at `ready`, and when that
    /// may change, ps.
    pub fn speed(&self, through: Through, ready: u64, now: u64) -> (f64, u64) {
        let fills = through.stream.fills;
        let (held, edge) = held_at(&self.edges(through, ready), fills, ready, now);
        (part(held, fills) * through.link.leaves(now, through.asks), edge.min(through.link.next(now)))
    }

    /// The times at which the holders that were posted before come and go, each with what it counts as.
    fn edges(&self, Through { stream, order, .. }: Through, ready: u64) -> Vec<(u64, i64)> {
        let mut all = vec![];
        let before = self.holders.iter().filter(|h| h.order < order && h.spell.to > ready);
        edges(before.map(|h| h.spell), stream.lane, &mut all);
        all
    }

    /// The holders that were posted after `order` and are still busy at `now`.
    pub fn behind(&self, order: u64, now: u64) -> impl Iterator<Item = &Holder> {
        self.holders.iter().filter(move |h| h.order > order && h.spell.to > now)
    }
}
