//! The ports of a rank: while k transfers that were posted before hold a port, a transfer has 1 / (k + 1) of it, and
//! they lose what it takes ([`charges`](crate::act::charges)).
//!
//! The walk comes to ops in the order in which they are posted, not in that of time: the send of a pipeline that had to
//! wait for its receive sets off while sums that were posted before it hold the port, whatever else the walk has come to
//! since. So only what is over before anything that is still to come can begin is forgotten ([`Ahead`]), and
//! what repeats is kept as a repetition.
//!
//! [`Ahead`]: super::ahead::Ahead

use crate::act::charges::{self, Spell, amount};
use crate::act::stretch::Held;
use std::rc::Rc;

/// Who holds a port, and who did.
#[derive(Debug, Clone, Default)]
pub struct Port {
    spells: List,
    /// How many there were before these, and when the last of those was over.
    forgotten: usize,
    lost: u64,
    /// How many have room before it is worth while to look for what can be forgotten.
    room: usize,
}

/// Spells as they were posted.
#[derive(Debug, Clone, Default)]
struct List {
    times: Vec<Time>,
    /// When all of each block of them is over: one that holds the port for long keeps those behind it in the list, and
    /// to pass over these one by one would take most of a walk.
    ends: Vec<u64>,
}

/// Spells of a block.
const BLOCK: usize = 32;

#[derive(Debug, Clone)]
struct Time {
    what: What,
    /// When the last of all up to here and with it is over.
    latest: u64,
}

#[derive(Debug, Clone)]
enum What {
    Once(Spell),
    /// The same spells, so many times more, each a period later.
    Again {
        spells: Rc<List>,
        period: u64,
        times: u64,
    },
}

/// A port with fewer spells has room for more.
const LEAST: usize = 256;

impl Port {
    #[inline]
    pub fn hold(&mut self, spell: Spell) {
        self.spells.push(What::Once(spell), spell.to);
    }

    /// Whether it is worth while to [`forget`](Port::forget).
    #[inline]
    pub fn is_full(&self) -> bool {
        self.spells.times.len() >= self.room
    }

    /// Forgets the first spells as long as they are over at `soonest`: nobody asks for an earlier time any more.
    pub fn forget(&mut self, soonest: u64) {
        let times = &mut self.spells.times;
        let over = times.partition_point(|spell| spell.latest <= soonest);
        if let Some(last) = over.checked_sub(1) {
            self.lost = self.lost.max(times[last].latest);
            self.forgotten += over;
            times.drain(..over);
            self.spells.divide();
        }
        self.room = LEAST.max(2 * self.spells.times.len());
    }

    /// Whether all that was held at `start` or later is known.
    #[inline]
    pub fn knows(&self, start: u64) -> bool {
        start >= self.lost
    }

    /// How many spells there were so far, for [`again`](Port::again).
    #[inline]
    pub fn mark(&self) -> usize {
        self.forgotten + self.spells.times.len()
    }

    /// All spells since `mark` come `times` more, each a `period` later than the one before. Those that are forgotten
    /// do not: what repeats will have forgotten them by then, too.
    pub fn again(&mut self, mark: usize, period: u64, times: u64) {
        if mark < self.forgotten {
            self.lost += period * times;
        }
        // What was before them is no part of what repeats.
        let spells = List::of(self.spells.times[mark.saturating_sub(self.forgotten)..].iter().cloned());
        if !spells.times.is_empty() && times > 0 {
            let to = spells.latest() + period * times;
            self.spells.push(What::Again { spells: spells.into(), period, times }, to);
        }
    }

    /// Who holds it at `start` or later, the last posted first.
    pub fn since(&self, start: u64, each: &mut impl FnMut(Spell)) {
        self.spells.since(start, 0, each);
    }

    /// How many of these there are at most, without going through them.
    pub fn at_most_since(&self, start: u64) -> u64 {
        self.spells.at_most(start)
    }

    /// Whether anyone holds it at `start` or later.
    #[inline]
    pub fn is_held(&self, start: u64) -> bool {
        self.spells.latest() > start
    }

    /// How long `transfer` takes from `start` on, of an op on lane `own`. `edges`: room to work in.
    #[inline]
    pub fn lasting(&self, own: u16, start: u64, transfer: u64, edges: &mut Vec<(u64, i32)>) -> u64 {
        let mut late = self.spells.times.iter().rev().take_while(|time| time.latest > start);
        let Some(last) = late.next() else { return transfer };
        // Mostly it is the other half of the same message alone.
        if let What::Once(spell) = last.what
            && spell.from <= start
            && late.next().is_none()
        {
            let by = amount(spell.lane, own);
            return charges::lasting(&[(spell.to, -by)], by, start, transfer);
        }
        edges.clear();
        self.since(start, &mut |spell| {
            let by = amount(spell.lane, own);
            edges.extend([(spell.from, by), (spell.to, -by)]);
        });
        edges.sort_unstable();
        charges::lasting(edges, 0, start, transfer)
    }

    /// What each lane loses to bytes of lane `own` that set off at `start`. `spells`: room to work in.
    pub fn charges(
        &self,
        own: u16,
        (start, transfer): (u64, u64),
        spells: &mut Vec<Spell>,
        each: &mut impl FnMut(u16, u64),
    ) {
        spells.clear();
        self.since(start, &mut |spell| spells.push(spell));
        charges::charges(spells, own, start, transfer, each);
    }
}

impl What {
    /// When the last of it is over.
    fn end(&self) -> u64 {
        match self {
            What::Once(spell) => spell.to,
            What::Again { spells, period, times } => spells.latest() + period * times,
        }
    }
}

impl List {
    /// The same spells with nothing before them.
    fn of(times: impl IntoIterator<Item = Time>) -> List {
        let mut list = List::default();
        for Time { what, .. } in times {
            let end = what.end();
            list.push(what, end);
        }
        list
    }

    /// Into blocks, anew.
    fn divide(&mut self) {
        let end = |block: &[Time]| block.iter().map(|time| time.what.end()).max().unwrap_or(0);
        self.ends.clear();
        self.ends.extend(self.times.chunks(BLOCK).map(end));
    }

    /// `to`: when it is over.
    #[inline]
    fn push(&mut self, what: What, to: u64) {
        match self.ends.last_mut().filter(|_| !self.times.len().is_multiple_of(BLOCK)) {
            Some(end) => *end = (*end).max(to),
            None => self.ends.push(to),
        }
        self.times.push(Time { what, latest: self.latest().max(to) });
    }

    /// When all of it is over.
    #[inline]
    fn latest(&self) -> u64 {
        self.times.last().map_or(0, |last| last.latest)
    }

    fn at_most(&self, start: u64) -> u64 {
        let of = |time: &Time| match &time.what {
            What::Once(_) => 1,
            What::Again { spells, period, times } => {
                let over = start.saturating_sub(spells.latest()).checked_div(*period).unwrap_or(0).min(*times);
                (times - over).saturating_mul(spells.at_most(0))
            }
        };
        let late = self.times.iter().rev().take_while(|spell| spell.latest > start);
        late.map(of).fold(0, u64::saturating_add)
    }

    /// Who of it holds the port at `start` or later, if all of it is so much `later`; the last posted first.
    fn since(&self, start: u64, later: u64, each: &mut impl FnMut(Spell)) {
        for (block, end) in self.times.chunks(BLOCK).zip(&self.ends).rev() {
            if end + later <= start {
                if block.first().is_some_and(|first| first.latest + later <= start) {
                    return;
                }
                continue;
            }
            for time in block.iter().rev().take_while(|time| time.latest + later > start) {
                match &time.what {
                    What::Once(Spell { from, to, lane }) if to + later > start => {
                        each(Spell { from: from + later, to: to + later, lane: *lane });
                    }
                    What::Once(_) => {}
                    What::Again { spells, period, times } => {
                        let over = |n: &u64| spells.latest() + later + period * n > start;
                        (1..=*times).rev().take_while(over).for_each(|n| spells.since(start, later + period * n, each));
                    }
                }
            }
        }
    }
}

/// As something held, to be compared: of a port it is the lane that tells holders apart.
pub fn held(Spell { from, to, lane }: Spell) -> Held {
    Held { from, to, amount: lane.into() }
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
        Spell { from, to: from + long, lane: (long % 2) as u16 }
    }

    proptest! {
        /// What repeats is there as if each time had been told, and the bytes of one more take as long as beside a list.
        #[test]
        fn repetitions_are_what_they_stand_for(
            spells in prop::collection::vec((0..60u64, 1..40u64), 1..80), mark in 0..80usize, inner in 0..80usize,
            (period, times, outer) in (1..90u64, 0..5u64, 0..4u64), (start, transfer) in (0..400u64, 1..300u64),
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
            for own in [0, 2] {
                let mut edges = vec![];
                charges::edges(flat.iter().copied(), own, &mut edges);
                let wanted = charges::lasting(&edges, 0, start, transfer);
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
            prop_assert_eq!(port.lasting(2, start, transfer, &mut vec![]), whole.lasting(2, start, transfer, &mut vec![]));
            prop_assert_eq!(port.mark(), whole.mark());
        }
    }
}
