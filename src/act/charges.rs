//! What bytes that were posted before lose on a port to bytes posted later.
//!
//! Bytes posted later have 1 / (k + 1) of the port beside k others, for as long as these are there if they are slowed
//! down by it. When the later bytes come, it is known when the others will have left, and what waits for these may have
//! gone on from there. So what each of them gives up is owed by its lane: the next bytes on that lane set off so much
//! later. A port carries no more than it can, and over a chain of messages everyone has its part.
//!
//! Messages of one lane, as keys and values in one group, are no loss to each other: each has channels of its own, and
//! together they get more of a link than one does. Rings that send two are measured faster than those of twice as long
//! a message would be (ring-flash-attention on eight H800 and on eight RTX 4090, traces/published/blind_attention_2.json).

/// A time in which bytes of an op on a lane hold a port, ps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spell {
    pub from: u64,
    pub to: u64,
    pub lane: u16,
}

/// What a holder of the same lane counts as: so much that it is told apart from holders of other lanes.
pub const OWN: i32 = 1 << 16;

/// What a holder on `lane` counts as beside bytes of lane `own`.
#[inline]
pub fn amount(lane: u16, own: u16) -> i32 {
    if lane == own { OWN } else { 1 }
}

/// The times at which holders come and go, ps, in order, each with what the holder counts as.
pub fn edges(before: impl Iterator<Item = Spell>, own: u16, edges: &mut Vec<(u64, i32)>) {
    edges.clear();
    for spell in before {
        let by = amount(spell.lane, own);
        edges.extend([(spell.from, by), (spell.to, -by)]);
    }
    edges.sort_unstable();
}

/// A time in which others hold the port, which would be `long` were they alone: how much of their own work bytes do
/// meanwhile beside `held` of them, and how long all of it takes, ps.
#[inline]
fn beside(held: i32, long: u64) -> (f64, f64) {
    let long = long as f64;
    match held {
        0 => (long, long),
        OWN.. => (long * part(held), long),
        k => (long / f64::from(k), long * f64::from(k + 1) / f64::from(k)),
    }
}

/// Holders of a port, by what they count as together.
fn count(held: i32) -> i32 {
    held / OWN + held % OWN
}

/// The part of a port that is left for bytes that come to `held` others.
pub fn part(held: i32) -> f64 {
    1.0 / f64::from(count(held) + 1)
}

/// How long `transfer` takes from `start` on, ps, beside holders that were posted before: `held` is what is there
/// before the first of their [`edges`], whose times are those of holders alone. By as much as holders are slowed down,
/// they stay longer.
pub fn lasting(edges: &[(u64, i32)], mut held: i32, start: u64, transfer: u64) -> u64 {
    let (mut at, mut left, mut takes) = (start, transfer as f64, 0.0);
    for &(edge, change) in edges {
        if edge > at {
            let (work, time) = beside(held, edge - at);
            if work >= left {
                break;
            }
            (at, left, takes) = (edge, left - work, takes + time);
        }
        held += change;
    }
    // Rounded to the nearest: neither part is negative.
    (takes + left / part(held) + 0.5) as u64
}

/// What is held at `now` by the holders beside whom bytes set off at `start`, and until when, ps; `u64::MAX`: no end of
/// any of them is known yet.
pub fn held_at(edges: &[(u64, i32)], start: u64, now: u64) -> (i32, u64) {
    let (mut at, mut held, mut takes) = (start, 0, 0.0);
    // An edge so far away would be rounded in an f64 to some other time.
    for &(edge, change) in edges.iter().take_while(|edge| edge.0 < u64::MAX) {
        if edge > at {
            takes += beside(held, edge - at).1;
            let until = start.saturating_add(takes as u64);
            if until > now {
                return (held, until);
            }
            at = edge;
        }
        held += change;
    }
    (held, u64::MAX)
}

/// When the bytes of a lane have left a port by their spells, and when they will have left with what they have lost;
/// ps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owed {
    pub last: u64,
    /// The earliest time at which bytes still to come on the lane set off.
    pub until: u64,
}

impl Owed {
    /// Notes bytes of the lane that hold the port until `to`.
    #[inline]
    pub fn hold(&mut self, to: u64) {
        self.last = self.last.max(to);
    }

    /// Moves the times that are not before `floor` on by `by`.
    pub fn later(&mut self, floor: u64, by: u64) {
        for time in [&mut self.last, &mut self.until] {
            *time += if *time >= floor { by } else { 0 };
        }
    }

    /// Notes that bytes of the lane lose `loss` ps to others.
    #[inline]
    pub fn charge(&mut self, loss: u64) {
        self.until = self.until.max(self.last) + loss;
    }
}

/// Tells `each` what every lane of `before`, the spells posted before, loses, ps, to bytes of lane `own` that set off
/// at `start`: as much as these do of their work meanwhile.
pub fn charges(before: &[Spell], own: u16, start: u64, transfer: u64, each: &mut impl FnMut(u16, u64)) {
    if let [one] = before {
        let alone = one.from.saturating_sub(start);
        let loss = one.to.saturating_sub(one.from.max(start)).min(transfer.saturating_sub(alone));
        if one.lane != own && loss > 0 {
            each(one.lane, loss);
        }
        return;
    }
    let mut edges: Vec<(u64, bool, u16)> = Vec::with_capacity(2 * before.len());
    for spell in before.iter().filter(|spell| spell.to > start) {
        edges.extend([(spell.from, true, spell.lane), (spell.to, false, spell.lane)]);
    }
    edges.sort_unstable();
    // For each lane: how many of its spells hold the port, and what it has lost.
    let mut lanes: Vec<(u16, u32, f64)> = vec![];
    let (mut at, mut held, mut left) = (start, 0, transfer as f64);
    for (edge, comes, lane) in edges {
        if edge > at {
            let work = beside(held, edge - at).0.min(left);
            if held > 0 {
                let each_loses = work / f64::from(count(held));
                lanes.iter_mut().for_each(|(_, active, loss)| *loss += f64::from(*active) * each_loses);
            }
            (at, left) = (edge, left - work);
            if left <= 0.0 {
                break;
            }
        }
        let place = lanes.iter().position(|known| known.0 == lane).unwrap_or_else(|| {
            lanes.push((lane, 0, 0.0));
            lanes.len() - 1
        });
        let (active, by) = (&mut lanes[place].1, amount(lane, own));
        if comes {
            (*active, held) = (*active + 1, held + by);
        } else {
            (*active, held) = (*active - 1, held - by);
        }
    }
    lanes.sort_unstable_by_key(|&(lane, ..)| lane);
    for (lane, _, loss) in lanes.into_iter().filter(|&(lane, _, loss)| lane != own && loss > 0.0) {
        each(lane, (loss + 0.5) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// What those who come later carry in others' time is what the others lose.
        #[test]
        fn nobody_carries_what_nobody_loses(
            spells in prop::collection::vec((0..100u64, 1..80u64, 1..4u16), 1..8), from in 0..150u64, transfer in 1..200u64,
        ) {
            let scale = 1 << 20;
            let before: Vec<Spell> = spells
                .iter()
                .map(|&(from, long, lane)| Spell { from: from * scale, to: (from + long) * scale, lane })
                .collect();
            let (start, transfer) = (from * scale, transfer * scale);
            let (mut lost, mut all) = (0, vec![]);
            charges(&before, 0, start, transfer, &mut |_, loss| lost += loss);
            edges(before.iter().copied(), 0, &mut all);
            // With nobody there it is no loss to anyone, and takes as long as it does alone.
            let mut times: Vec<u64> = all.iter().map(|edge| edge.0.max(start)).chain([start, u64::MAX >> 8]).collect();
            times.sort_unstable();
            let (mut by_itself, mut left) = (0.0, transfer as f64);
            for gap in times.windows(2) {
                let here = before.iter().filter(|s| s.from <= gap[0] && gap[0] < s.to).count() as f64;
                let work = ((gap[1] - gap[0]) as f64 / here.max(1.0)).min(left);
                by_itself += if here == 0.0 { work } else { 0.0 };
                left -= work;
            }
            prop_assert!((transfer as f64 - by_itself - lost as f64).abs() <= 16.0, "{by_itself} of {transfer}, {lost} lost");
            // A port that is never empty is as long in use as all that goes through it.
            let first = before.iter().filter(|s| s.from <= start && s.to > start).max_by_key(|s| s.to).copied();
            if let Some(one) = first {
                edges([one].into_iter(), 0, &mut all);
                let takes = lasting(&all, 0, start, transfer);
                let theirs = (one.to - start).min(transfer);
                prop_assert!(takes.abs_diff(transfer + theirs) <= 1, "{takes} for {transfer} and {theirs}");
            }
        }
    }

    #[test]
    fn only_messages_of_other_lanes_lose() {
        let before = [Spell { from: 0, to: 100, lane: 3 }];
        let mut all = vec![];
        edges(before.iter().copied(), 3, &mut all);
        assert_eq!(lasting(&all, 0, 0, 100), 150);
        assert_eq!((held_at(&all, 0, 50), held_at(&all, 0, 100)), ((OWN, 100), (0, u64::MAX)));
        // Nobody knows yet when the other is over, and no time is far enough away to stand for that.
        for start in [1, 1_000_001, 123_456_789_012] {
            edges([Spell { from: start, to: u64::MAX, lane: 3 }].into_iter(), 3, &mut all);
            assert_eq!(held_at(&all, start, start + 5), (OWN, u64::MAX));
        }
        charges(&before, 3, 0, 200, &mut |lane, loss| panic!("{lane} owes itself {loss}"));
        charges(&before, 4, 20, 50, &mut |lane, loss| assert_eq!((lane, loss), (3, 50)));
        charges(&before, 4, 20, 500, &mut |lane, loss| assert_eq!((lane, loss), (3, 80)));
        // Half the port, until what is left of the other is gone, too.
        edges(before.iter().copied(), 4, &mut all);
        assert_eq!(held_at(&all, 20, 90), (1, 180));
        assert_eq!([50, 80, 500].map(|transfer| lasting(&all, 0, 20, transfer)), [100, 160, 580]);
    }
}
