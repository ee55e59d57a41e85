//! What bytes that were posted before lose on a port to bytes posted later.
//!
//! Bytes posted later have 1 / (k + 1) of the port beside k others, for as long as these are there if they are slowed
//! down by it. When the later bytes come, it is known when the others will have left, and what waits for these may have
//! gone on from there. So what each of them gives up is owed by its lane: the next bytes on that lane set off so much
//! later. A port carries no more than it can, and over a chain of messages everyone has its part.
//!
//! Bytes that something else holds up fill only a part of the port, as a send between nodes whose channel carries half of
//! what several sends have of a NIC: what all of them together leave is nobody's loss, and where they ask for more than there
//! is, each is as much slower.
//!
//! Messages of one lane inside a node, as keys and values in one group, are no loss to each other: each has channels of
//! its own, and together they get more of a link than one does. A later one is as much slower as if they filled what
//! holds each of them up. Rings that send two are measured faster than those of twice as long a message would be
//! (ring-flash-attention on eight H800 and on eight RTX 4090, traces/published/blind_attention_2.json). Between nodes
//! they take turns ([`in_turns`](crate::collective::LinkTime::in_turns)): each fills its part of what one would.

/// What bytes fill that nothing but the port holds up.
pub const FULL: u16 = 256;

/// Bytes that go through a port: the lane that they are of, and what they fill of it alone, of [`FULL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    pub lane: u16,
    pub fills: u16,
}

impl Stream {
    /// Bytes of a lane that would fill `part` of the port.
    pub fn new(lane: u16, part: f64) -> Stream {
        Stream { lane, fills: (part * f64::from(FULL)).ceil().clamp(1.0, f64::from(FULL)) as u16 }
    }

    #[cfg(test)]
    pub fn full(lane: u16) -> Stream {
        Stream { lane, fills: FULL }
    }
}

/// A time in which bytes of an op on a lane hold a port, ps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spell {
    pub from: u64,
    pub to: u64,
    pub lane: u16,
    /// What the bytes fill of the port, of [`FULL`].
    pub fills: u16,
}

impl Spell {
    pub fn new(from: u64, to: u64, Stream { lane, fills }: Stream) -> Spell {
        Spell { from, to, lane, fills }
    }

    pub fn stream(&self) -> Stream {
        Stream { lane: self.lane, fills: self.fills }
    }

    /// What it counts as beside bytes of lane `own`: what it fills; of the same lane one, in the upper half of the number,
    /// where nothing but the port holds it up.
    #[inline]
    pub fn amount(&self, own: u16) -> i64 {
        if self.lane == own && self.fills == FULL { 1 << 32 } else { i64::from(self.fills) }
    }
}

/// The times at which holders come and go, ps, in order, each with what the holder counts as.
pub fn edges(before: impl Iterator<Item = Spell>, own: u16, edges: &mut Vec<(u64, i64)>) {
    edges.clear();
    for spell in before {
        let by = spell.amount(own);
        edges.extend([(spell.from, by), (spell.to, -by)]);
    }
    edges.sort_unstable();
}

/// How many holders are of the same lane.
#[inline]
fn own(held: i64) -> f64 {
    (held >> 32) as f64
}

/// How much slower than alone holders are, and how much slower beside one that `fills` so much, too; those of its lane
/// fill as much as it does.
#[inline]
fn slower(held: i64, fills: u16) -> (f64, f64) {
    let part = |n: i64| n as f64 / f64::from(FULL);
    let before = part(held & 0xffff_ffff) + own(held) * part(fills.into());
    (before.max(1.0), (before + part(fills.into())).max(1.0))
}

/// How much slower than alone bytes are that fill so much and come to `held` others.
#[inline]
fn comes(held: i64, fills: u16) -> f64 {
    slower(held, fills).1.max(own(held) + 1.0)
}

/// A time in which others hold the port, which would be `long` were they alone: how much of their own work bytes that
/// fill so much do meanwhile beside them, and how long all of it takes, ps.
#[inline]
fn beside(held: i64, fills: u16, long: u64) -> (f64, f64) {
    let long = long as f64;
    let (before, with) = slower(held, fills);
    match held >> 32 {
        _ if held == 0 => (long, long),
        0 => (long / before, long * with / before),
        _ => (long / comes(held, fills), long),
    }
}

/// The part of their own speed that is left for bytes that fill so much and come to `held` others.
pub fn part(held: i64, fills: u16) -> f64 {
    1.0 / comes(held, fills)
}

/// How long `transfer` takes from `start` on, ps, for bytes that fill so much beside holders that were posted before:
/// `held` is what is there before the first of their [`edges`], whose times are those of holders alone. By as much as
/// holders are slowed down, they stay longer.
pub fn lasting(edges: &[(u64, i64)], mut held: i64, fills: u16, start: u64, transfer: u64) -> u64 {
    let (mut at, mut left, mut takes) = (start, transfer as f64, 0.0);
    for &(edge, change) in edges {
        if edge > at {
            let (work, time) = beside(held, fills, edge - at);
            if work >= left {
                break;
            }
            (at, left, takes) = (edge, left - work, takes + time);
        }
        held += change;
    }
    // Rounded to the nearest: neither part is negative.
    (takes + left * comes(held, fills) + 0.5) as u64
}

/// What is held at `now` by the holders beside whom bytes that fill so much set off at `start`, and until when, ps;
/// `u64::MAX`: no end of any of them is known yet.
pub fn held_at(edges: &[(u64, i64)], fills: u16, start: u64, now: u64) -> (i64, u64) {
    let (mut at, mut held, mut takes) = (start, 0, 0.0);
    // An edge so far away would be rounded in an f64 to some other time.
    for &(edge, change) in edges.iter().take_while(|edge| edge.0 < u64::MAX) {
        if edge > at {
            takes += beside(held, fills, edge - at).1;
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

/// Tells `each` what every lane of `before`, the spells posted before, loses, ps, to bytes that set off at `start`: as
/// much as these do of their work meanwhile in what was not left over.
pub fn charges(before: &[Spell], own: Stream, start: u64, transfer: u64, each: &mut impl FnMut(u16, u64)) {
    let Stream { lane: own, fills } = own;
    // Of the work that is done beside holders, for each of them.
    let lost = |work: f64, held: i64| {
        let (before, with) = slower(held, fills);
        work * (with - before) / before
    };
    if let [one] = before {
        let alone = one.from.saturating_sub(start);
        let work = one.to.saturating_sub(one.from.max(start)).min(transfer.saturating_sub(alone));
        let loss = (lost(work as f64, i64::from(one.fills)) + 0.5) as u64;
        if one.lane != own && loss > 0 {
            each(one.lane, loss);
        }
        return;
    }
    let mut edges: Vec<(u64, bool, u16, i64)> = Vec::with_capacity(2 * before.len());
    for spell in before.iter().filter(|spell| spell.to > start) {
        let by = spell.amount(own);
        edges.extend([(spell.from, true, spell.lane, by), (spell.to, false, spell.lane, -by)]);
    }
    edges.sort_unstable();
    // For each lane: how many of its spells hold the port, and what it has lost.
    let mut lanes: Vec<(u16, u32, f64)> = vec![];
    let (mut at, mut held, mut left) = (start, 0, transfer as f64);
    for (edge, comes, lane, by) in edges {
        if edge > at {
            let work = beside(held, fills, edge - at).0.min(left);
            if held > 0 {
                let each_loses = lost(work, held);
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
        let active = &mut lanes[place].1;
        *active = if comes { *active + 1 } else { *active - 1 };
        held += by;
    }
    lanes.sort_unstable_by_key(|&(lane, ..)| lane);
    let theirs = lanes.into_iter().filter(|&(lane, ..)| lane != own).map(|(lane, _, loss)| (lane, (loss + 0.5) as u64));
    for (lane, loss) in theirs.filter(|&(_, loss)| loss > 0) {
        each(lane, loss);
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
                .map(|&(from, long, lane)| Spell::new(from * scale, (from + long) * scale, Stream::full(lane)))
                .collect();
            let (start, transfer) = (from * scale, transfer * scale);
            let (mut lost, mut all) = (0, vec![]);
            charges(&before, Stream::full(0), start, transfer, &mut |_, loss| lost += loss);
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
                let takes = lasting(&all, 0, FULL, start, transfer);
                let theirs = (one.to - start).min(transfer);
                prop_assert!(takes.abs_diff(transfer + theirs) <= 1, "{takes} for {transfer} and {theirs}");
            }
        }
    }

    #[test]
    fn only_messages_of_other_lanes_lose() {
        let before = [Spell::new(0, 100, Stream::full(3))];
        let own = before[0].amount(3);
        let mut all = vec![];
        edges(before.iter().copied(), 3, &mut all);
        assert_eq!(lasting(&all, 0, FULL, 0, 100), 150);
        assert_eq!((held_at(&all, FULL, 0, 50), held_at(&all, FULL, 0, 100)), ((own, 100), (0, u64::MAX)));
        // Nobody knows yet when the other is over, and no time is far enough away to stand for that.
        for start in [1, 1_000_001, 123_456_789_012] {
            edges([Spell::new(start, u64::MAX, Stream::full(3))].into_iter(), 3, &mut all);
            assert_eq!(held_at(&all, FULL, start, start + 5), (own, u64::MAX));
        }
        charges(&before, Stream::full(3), 0, 200, &mut |lane, loss| panic!("{lane} owes itself {loss}"));
        charges(&before, Stream::full(4), 20, 50, &mut |lane, loss| assert_eq!((lane, loss), (3, 50)));
        charges(&before, Stream::full(4), 20, 500, &mut |lane, loss| assert_eq!((lane, loss), (3, 80)));
        // Half the port, until what is left of the other is gone, too.
        edges(before.iter().copied(), 4, &mut all);
        assert_eq!(held_at(&all, FULL, 20, 90), (i64::from(FULL), 180));
        assert_eq!([50, 80, 500].map(|transfer| lasting(&all, 0, FULL, 20, transfer)), [100, 160, 580]);
    }

    /// By the parts of a port that a holder and a comer fill: how long the comer takes, and what the holder loses.
    #[test]
    fn what_a_port_has_left_over_is_nobodys_loss() {
        let takes = |holder: f64, comer: f64, own: u16| {
            let before = [Spell::new(0, 1000, Stream::new(3, holder))];
            let (mut all, mut lost) = (vec![], 0);
            edges(before.iter().copied(), own, &mut all);
            let comer = Stream::new(own, comer);
            charges(&before, comer, 0, 500, &mut |lane, loss| lost += if lane == 3 { loss } else { u64::MAX });
            // The same beside a holder that is over before anything comes.
            let more = [Spell::new(0, 0, Stream::full(5)), before[0]];
            charges(&more, comer, 0, 500, &mut |_, loss| lost -= loss);
            assert_eq!(lost, 0);
            charges(&before, comer, 0, 500, &mut |_, loss| lost = loss);
            (lasting(&all, 0, comer.fills, 0, 500), lost)
        };
        assert_eq!((takes(1.0, 1.0, 4), takes(1.0, 0.5, 4)), ((1000, 500), (750, 250)));
        assert_eq!((takes(0.5, 0.5, 4), takes(0.25, 0.75, 4), takes(0.5, 1.0, 4)), ((500, 0), (500, 0), (750, 250)));
        assert_eq!(takes(0.75, 0.5, 4), (625, 125));
        // Of its own lane: where nothing but the port holds them up the comer is slower, and the other is not; what fills a
        // part is what is left of messages that take turns.
        assert_eq!((takes(1.0, 1.0, 3), takes(0.5, 0.5, 3), takes(0.75, 0.5, 3)), ((1000, 0), (500, 0), (625, 0)));
    }
}
