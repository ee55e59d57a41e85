//! The ports of a rank: while k transfers that were posted before hold a port, a transfer has 1 / (k + 1) of it, and
//! they lose what it takes; of what they leave free it has all that it fills ([`charges`](crate::act::charges)).
//!
//! The walk comes to ops in the order in which they are posted, not in that of time: the send of a pipeline that had to
//! wait for its receive sets off while sums that were posted before it hold the port, whatever else the walk has come
//! to since. Spells that were over before anything that is likely to come are forgotten ([`Guess`]); a transfer that
//! comes earlier after all is noticed, and the walk begins again and forgets nothing. Spells that repeat are kept as a
//! repetition.
//!
//! [`Guess`]: super::guess::Guess

use crate::act::charges::{self, Spell, Stream};
use crate::act::stretch::Held;
use std::rc::Rc;

/// The spells in which transfers hold a port of a rank, or did.
#[derive(Debug, Clone, Default)]
pub struct Port {
    /// The spells of each lane, lanes in the order in which they first came: one lane may be far ahead of another, but
    /// its own spells come one behind the other.
    lanes: Vec<(u16, List)>,
    /// Spells, or repetitions of them, so far; and how many of these are still known.
    posted: usize,
    known: usize,
    /// When all spells are over, ps.
    latest: u64,
    /// Spells that are forgotten were posted before this number of others, and were over at `lost`, ps.
    forgotten: usize,
    lost: u64,
    /// Known spells from which on it is worth while to look for some to forget.
    room: usize,
}

/// The spells of one lane, as they were posted.
#[derive(Debug, Clone, Default)]
struct List {
    times: Vec<Time>,
    /// A summary of each run of [`BLOCK`] of them. One spell that holds the port for long keeps those behind it in the
    /// list, and to pass over these one by one would take most of a walk.
    blocks: Vec<Block>,
}

/// A run of spells of which none holds the port before it begins, or when it is over (times in ps).
#[derive(Debug, Clone, Copy)]
struct Block {
    begins: u64,
    over: u64,
    /// Spells in the run, each time of a repetition counted.
    many: u64,
}

/// Entries of a list that share a summary.
const BLOCK: usize = 32;

/// A spell, or spells that repeat: from when the first of them begins to when the last is over, ps.
#[derive(Debug, Clone)]
struct Time {
    from: u64,
    to: u64,
    /// What the spell fills of the port; of repetitions nothing.
    fills: u16,
    again: Option<Rc<Again>>,
    /// Entries of any lane that were posted before.
    after: usize,
    /// When this spell and all before it in the list are over, ps.
    latest: u64,
}

/// Spells that come `times` times more, each time a `period` later, ps.
#[derive(Debug)]
struct Again {
    spells: List,
    period: u64,
    times: u64,
    /// Spells in each of the repetitions.
    many: u64,
}

/// Known spells that a port has room for, at least, before it looks for some to forget.
const LEAST: usize = 256;

/// Up to this many spells an upper bound is good enough.
const FEW: u64 = 256;

impl Port {
    #[inline]
    pub fn hold(&mut self, spell: Spell) {
        let (posted, list) = (self.posted, self.list(spell.lane));
        list.push((spell.from, spell.to), spell.fills, None, posted);
        (self.posted, self.known, self.latest) = (posted + 1, self.known + 1, self.latest.max(spell.to));
    }

    #[inline]
    fn list(&mut self, lane: u16) -> &mut List {
        let at = self.lanes.iter().position(|known| known.0 == lane).unwrap_or_else(|| {
            self.lanes.push((lane, List::default()));
            self.lanes.len() - 1
        });
        &mut self.lanes[at].1
    }

    /// Whether it is worth while to [`forget`](Port::forget) spells.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.known >= self.room
    }

    /// Forgets the first spells of each lane that are over at `soonest`, ps: nobody asks for an earlier time any more.
    pub fn forget(&mut self, soonest: u64) {
        for (_, list) in &mut self.lanes {
            if let Some((last, forgotten)) = list.forget(soonest) {
                self.lost = self.lost.max(last.latest);
                self.forgotten = self.forgotten.max(last.after + 1);
                self.known -= forgotten;
            }
        }
        self.room = LEAST.max(2 * self.known);
    }

    /// Counts all spells that were over at `soonest` as forgotten.
    pub fn lose(&mut self, soonest: u64) {
        self.lost = self.lost.max(soonest);
    }

    /// The time, ps, at which spells that were over by then may be forgotten.
    #[inline]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether all spells that hold the port at `start` or later are known.
    #[inline]
    pub fn knows(&self, start: u64) -> bool {
        start >= self.lost
    }

    /// Spells and repetitions so far: the mark that [`again`](Port::again) takes.
    #[inline]
    pub fn mark(&self) -> usize {
        self.posted
    }

    /// Repeats all spells since `mark` another `times` times, each a `period` later than the one before. Spells that
    /// are forgotten are not repeated: what repeats will have forgotten them by then, too.
    pub fn again(&mut self, mark: usize, period: u64, times: u64) {
        if mark < self.forgotten {
            self.lost += period * times;
        }
        let mut posted = self.posted;
        for (_, list) in &mut self.lanes {
            // Spells from before the mark are no part of what repeats.
            let spells = List::of(&list.times[list.times.partition_point(|time| time.after < mark)..]);
            if !spells.times.is_empty() && times > 0 {
                let (from, to) = (spells.begins() + period, spells.latest() + period * times);
                let many = spells.at_most(0);
                list.push((from, to), 0, Some(Again { spells, period, times, many }.into()), posted);
                self.latest = self.latest.max(to);
                posted += 1;
            }
        }
        self.known += posted - self.posted;
        self.posted = posted;
    }

    /// Gives `each` the known spells that hold the port at `start` or later: lane by lane, the last posted of a lane
    /// first.
    pub fn since(&self, start: u64, each: &mut impl FnMut(Spell)) {
        self.within((start.max(self.lost), u64::MAX), &mut true, each);
    }

    /// Gives `each` the spells that hold the port at `span.0` or later and begin before `span.1`; sets `all` to false
    /// where some begin later.
    fn within(&self, span: (u64, u64), all: &mut bool, each: &mut impl FnMut(Spell)) {
        self.lanes.iter().for_each(|(lane, list)| list.within(*lane, span, 0, all, each));
    }

    /// Spells that hold the port at `start` or later, at most, without going through them.
    pub fn at_most_since(&self, start: u64) -> u64 {
        self.lanes.iter().map(|(_, list)| list.at_most(start.max(self.lost))).fold(0, u64::saturating_add)
    }

    /// Whether any spell holds the port behind `start`.
    #[inline]
    pub fn is_held(&self, start: u64) -> bool {
        self.latest > start
    }

    /// The only spell that holds the port at `start` or later, if it holds it at `start`; `None` if there are several
    /// spells, or there is no spell.
    #[inline]
    fn alone(&self, start: u64) -> Option<Spell> {
        let mut late = self.lanes.iter().filter(|(_, list)| list.latest() > start);
        let (lane, list) = late.next()?;
        match list.times[..] {
            [.., Time { latest, .. }, _] if latest > start => None,
            [.., Time { from, to, fills, again: None, .. }] if from <= start && late.next().is_none() => {
                Some(Spell { from, to, lane: *lane, fills })
            }
            _ => None,
        }
    }

    /// How long `transfer` takes from `start` on, ps, for bytes of a lane. `edges`: room to work in.
    #[inline]
    pub fn lasting(&self, own: Stream, start: u64, transfer: u64, edges: &mut Vec<(u64, i64)>) -> u64 {
        if !self.is_held(start) {
            return transfer;
        }
        // Mostly that is the other half of the same message.
        if let Some(spell) = self.alone(start) {
            let by = spell.amount(own.lane);
            return charges::lasting(&[(spell.to, -by)], by, own.fills, start, transfer);
        }
        // Many of the spells posted may begin far later, and those that begin when the transfer is over do not matter
        // to it.
        let mut far = transfer.saturating_mul(4).max(1);
        loop {
            edges.clear();
            let mut all = true;
            self.within((start, start.saturating_add(far)), &mut all, &mut |spell| {
                let by = spell.amount(own.lane);
                edges.extend([(spell.from, by), (spell.to, -by)]);
            });
            edges.sort_unstable();
            let lasts = charges::lasting(edges, 0, own.fills, start, transfer);
            if all || lasts < far {
                return lasts;
            }
            far = lasts.saturating_mul(4);
        }
    }

    /// What each lane loses, ps, to bytes of a lane that set off at `start` and have left at `end`. `spells`: room to
    /// work in.
    pub fn charges(
        &self,
        own: Stream,
        (start, end, transfer): (u64, u64, u64),
        spells: &mut Vec<Spell>,
        each: &mut impl FnMut(u16, u64),
    ) {
        spells.clear();
        // Times are rounded: two picoseconds are allowed for that.
        self.within((start, end.saturating_add(2)), &mut true, &mut |spell| spells.push(spell));
        charges::charges(spells, own, start, transfer, each);
    }
}

impl List {
    /// A list of these spells, with nothing before them.
    fn of(times: &[Time]) -> List {
        let mut list = List::default();
        times.iter().for_each(|time| list.push((time.from, time.to), time.fills, time.again.clone(), time.after));
        list
    }

    /// Forgets the first spells that are over at `soonest`, by whole blocks. Returns the last of them, and how many
    /// entries they were; `None` if no block is over.
    fn forget(&mut self, soonest: u64) -> Option<(Time, usize)> {
        let blocks = self.times.partition_point(|time| time.latest <= soonest) / BLOCK;
        let over = blocks * BLOCK;
        let last = self.times[..over].last().cloned()?;
        self.times.drain(..over);
        self.blocks.drain(..blocks);
        Some((last, over))
    }

    #[inline]
    fn push(&mut self, (from, to): (u64, u64), fills: u16, again: Option<Rc<Again>>, after: usize) {
        if self.times.len().is_multiple_of(BLOCK) {
            self.blocks.push(Block { begins: u64::MAX, over: 0, many: 0 });
        }
        if let Some(block) = self.blocks.last_mut() {
            let many = again.as_ref().map_or(1, |again| again.times.saturating_mul(again.many));
            (block.begins, block.over) = (block.begins.min(from), block.over.max(to));
            block.many = block.many.saturating_add(many);
        }
        self.times.push(Time { from, to, fills, again, after, latest: self.latest().max(to) });
    }

    /// When the first spell of the list begins, ps.
    fn begins(&self) -> u64 {
        self.blocks.iter().map(|block| block.begins).min().unwrap_or(0)
    }

    /// When all spells of the list are over, ps.
    #[inline]
    fn latest(&self) -> u64 {
        self.times.last().map_or(0, |last| last.latest)
    }

    /// How many of the first entries are over at `start`, all before them being over, too. Mostly few come behind them:
    /// to search among the last alone leaves the others in memory untouched.
    fn over_at(&self, start: u64) -> usize {
        let (all, mut few) = (self.times.len(), BLOCK);
        while few < all && self.times[all - few].latest > start {
            few *= 2;
        }
        let from = all.saturating_sub(few);
        from + self.times[from..].partition_point(|time| time.latest <= start)
    }

    fn at_most(&self, start: u64) -> u64 {
        let over = self.over_at(start);
        let blocks = self.blocks[over / BLOCK..].iter();
        let (all, many) = (blocks.fold(0, |all: u64, block| all.saturating_add(block.many)), self.times.len() - over);
        if all == (many + over % BLOCK) as u64 {
            return many as u64;
        }
        if all <= FEW {
            return all;
        }
        // A repetition may be partly over.
        let of = |time: &Time| {
            time.again.as_deref().map_or(1, |Again { spells, period, times, many }| {
                let over = start.saturating_sub(spells.latest()).checked_div(*period).unwrap_or(0).min(*times);
                (times - over).saturating_mul(*many)
            })
        };
        self.times[over..].iter().map(of).fold(0, u64::saturating_add)
    }

    /// Gives `each` the spells that hold the port at `start` or later and begin before `until`, all of the list taken
    /// as `later` ps later; the last posted first. Sets `all` to false where others begin at `until` or later.
    fn within(&self, lane: u16, (start, until): (u64, u64), later: u64, all: &mut bool, each: &mut impl FnMut(Spell)) {
        for (times, block) in self.times.chunks(BLOCK).zip(&self.blocks).rev() {
            if block.over + later <= start {
                if times.first().is_some_and(|first| first.latest + later <= start) {
                    return;
                }
                continue;
            }
            if block.begins + later >= until {
                *all = false;
                continue;
            }
            for time in times.iter().rev().take_while(|time| time.latest + later > start) {
                let (from, to) = (time.from + later, time.to + later);
                if to <= start {
                    continue;
                }
                if from >= until {
                    *all = false;
                    continue;
                }
                match time.again.as_deref() {
                    None => each(Spell { from, to, lane, fills: time.fills }),
                    Some(Again { spells, period, times, .. }) => {
                        let over = |n: &u64| spells.latest() + later + period * n > start;
                        (1..=*times).rev().take_while(over).for_each(|n| {
                            spells.within(lane, (start, until), later + period * n, all, each);
                        });
                    }
                }
            }
        }
    }
}

/// A spell as something held, to be compared: the amount stands for its lane and what it fills.
pub fn held(Spell { from, to, lane, fills }: Spell) -> Held {
    Held { from, to, amount: u32::from(lane) << 16 | u32::from(fills) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn listed(port: &Port) -> Vec<Spell> {
        let mut all = vec![];
        port.since(0, &mut |spell| all.push(spell));
        all
    }

    /// Two lanes by turns; whose bytes come is a third, or the first.
    fn spell(from: u64, long: u64) -> Spell {
        // Two that fill all of the port, and one of each lane that fills three tenths.
        let part = if long.is_multiple_of(3) { 0.3 } else { 1.0 };
        Spell::new(from, from + long, Stream::new((long % 2) as u16, part))
    }

    proptest! {
        /// What repeats is there as if each time had been told, and the bytes of one more take as long as beside a list.
        #[test]
        fn repetitions_are_what_they_stand_for(
            spells in prop::collection::vec((0..60u64, 1..40u64), 1..80), mark in 0..80usize, inner in 0..80usize,
            (period, times, outer) in (1..90u64, 0..5u64, 0..4u64), (start, transfer) in (0..400u64, 0..300u64),
        ) {
            let (mut port, mut flat) = (Port::default(), vec![]);
            let (mark, inner) = (mark.min(spells.len()), inner.min(spells.len()));
            for spell in spells.iter().map(|&(from, long)| spell(from, long)) {
                port.hold(spell);
                flat.push(spell);
            }
            let again = |flat: &mut Vec<Spell>, first: usize, period: u64, times: u64| {
                let part = flat[first..].to_vec();
                let later = |s: &Spell, by: u64| Spell { from: s.from + by, to: s.to + by, ..*s };
                (1..=times).for_each(|n| flat.extend(part.iter().map(|s| later(s, n * period))));
            };
            port.again(inner.max(mark), period, times);
            again(&mut flat, inner.max(mark), period, times);
            port.again(mark, 7 * period, outer);
            again(&mut flat, mark, 7 * period, outer);
            let mut told = listed(&port);
            flat.sort_unstable();
            told.sort_unstable();
            prop_assert_eq!(&told, &flat);
            let mut late = vec![];
            port.since(start, &mut |spell| late.push(spell));
            late.sort_unstable();
            prop_assert_eq!(late, flat.iter().copied().filter(|spell| spell.to > start).collect::<Vec<_>>());
            for (own, part) in [(0, 1.0), (2, 1.0), (2, 0.4)] {
                let (own, mut edges) = (Stream::new(own, part), vec![]);
                charges::edges(flat.iter().copied(), own.lane, &mut edges);
                let wanted = charges::lasting(&edges, 0, own.fills, start, transfer);
                prop_assert_eq!(port.lasting(own, start, transfer, &mut vec![]), wanted);
            }
        }

        /// What is forgotten is missed by nobody who comes later, nor by what repeats.
        #[test]
        fn what_is_over_is_not_missed(
            spells in prop::collection::vec((0..30u64, 1..40u64), 1..120), mark in 0..120usize,
            (late, period, times) in (0..200u64, 60..90u64, 0..4u64), (start, transfer) in (0..400u64, 1..300u64),
        ) {
            let (mut port, mut whole) = (Port::default(), Port::default());
            let mut marks = vec![(0, 0)];
            for (n, &(from, long)) in (0..).zip(&spells) {
                [&mut port, &mut whole].into_iter().for_each(|port| port.hold(spell(5 * n + from, long)));
                marks.push((port.mark(), whole.mark()));
                if port.is_full() {
                    // Nobody asks for what is before the one posted last.
                    port.forget((5 * n).min(late));
                }
            }
            let soonest = (5 * (spells.len() as u64 - 1)).min(late);
            let (here, there) = marks[mark.min(spells.len())];
            port.again(here, period, times);
            whole.again(there, period, times);
            let start = soonest + period * times + start;
            let (mut known, mut all) = (vec![], vec![]);
            port.since(start, &mut |spell| known.push(spell));
            whole.since(start, &mut |spell| all.push(spell));
            assert!([&port, &whole].iter().zip([&known, &all]).all(|(p, list)| p.at_most_since(start) >= list.len() as u64));
            prop_assert_eq!(known, all);
            let takes = |port: &Port| port.lasting(Stream::full(2), start, transfer, &mut vec![]);
            prop_assert_eq!(takes(&port), takes(&whole));
            prop_assert_eq!(port.mark(), whole.mark());
        }
    }
}
