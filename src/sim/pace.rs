//! The speed of a link over time, and work whose speed changes while it is done.

/// Speed of a link over time, as a share of what it has when it is well.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pace {
    spells: Vec<Spell>,
}

/// A time in which a link is not well; times in ps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spell {
    pub from: u64,
    pub to: u64,
    /// Speed while the link is down, as a share.
    pub factor: f64,
    /// How long the link is up, and down, in turns, up first, and how much of a turn is over at `from`; `None`: it is down all
    /// the time.
    pub turns: Option<[u64; 3]>,
    /// Whether links behind it are as slow, as the uplinks of a dead plane are: whoever is held up there has no room to spare.
    pub behind: bool,
}

/// What work asks of a link that is well, as shares.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Asks {
    /// Of the link itself.
    pub link: f64,
    /// Of whatever holds the work up on its way, the link or one behind it: 1 where that is what it waits for.
    pub behind: f64,
}

impl Spell {
    fn speed(&self, at: u64) -> f64 {
        let within = self.from <= at && at < self.to;
        let up = self
            .turns
            .is_some_and(|[up, down, over]| at.saturating_sub(self.from).saturating_add(over) % (up + down) < up);
        if within && !up { self.factor } else { 1.0 }
    }

    /// The next time after `at` at which the speed may change.
    fn next(&self, at: u64) -> u64 {
        if at < self.from {
            return self.from;
        }
        let turn = self.turns.map_or(u64::MAX, |[up, down, over]| {
            let within = (at - self.from).saturating_add(over) % (up + down);
            let edge = if within < up { up } else { up + down };
            at.saturating_add(edge - within)
        });
        if at < self.to { turn.min(self.to) } else { u64::MAX }
    }
}

impl Pace {
    pub fn add(&mut self, spell: Spell) {
        self.spells.push(spell);
    }

    pub fn is_well(&self) -> bool {
        self.spells.is_empty()
    }

    pub fn speed(&self, at: u64) -> f64 {
        self.spells.iter().map(|s| s.speed(at)).product()
    }

    /// The share of its speed that is left at `at` for work that asks for so much of the link when that is well: a link
    /// with room to spare may be slower before anything takes longer.
    pub fn leaves(&self, at: u64, asks: Asks) -> f64 {
        let behind: f64 = self.spells.iter().filter(|s| s.behind).map(|s| s.speed(at)).product();
        let left = |asked: f64, speed: f64| if asked > speed { speed / asked } else { 1.0 };
        left(asks.link, self.speed(at)).min(left(asks.behind, behind))
    }

    /// The next time after `at` at which the speed may change, ps. While one spell keeps the link down, no other
    /// changes it.
    pub fn next(&self, at: u64) -> u64 {
        let keeps = |s: &&Spell| s.factor == 0.0 && s.turns.is_none() && s.from <= at && at < s.to;
        let down = self.spells.iter().filter(keeps).map(|s| s.to).max();
        down.or_else(|| self.spells.iter().map(|s| s.next(at)).min()).unwrap_or(u64::MAX)
    }
}

/// How long `duration` of work takes from `start` at `speed`, which changes at most at the times that `next` tells, ps;
/// `u64::MAX` if it is never done.
pub fn lasting(start: u64, duration: u64, speed: impl Fn(u64) -> f64, next: impl Fn(u64) -> u64) -> u64 {
    let (mut at, mut left) = (start, duration as f64);
    loop {
        let (now, edge) = (speed(at), next(at));
        debug_assert!(edge > at, "speed changes at {edge} ps, not after {at} ps");
        let could = (edge - at) as f64 * now;
        if edge < u64::MAX && could < left {
            (at, left) = (edge, left - could);
        } else if now > 0.0 {
            // Rounded to the nearest: neither is negative.
            return (at - start).saturating_add((left / now + 0.5) as u64);
        } else {
            return if left > 0.0 { u64::MAX } else { at - start };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(pace: &Pace, start: u64, duration: u64) -> u64 {
        lasting(start, duration, |at| pace.speed(at), |at| pace.next(at))
    }

    #[test]
    fn spells_slow_work_down_while_they_last() {
        let mut pace = Pace::default();
        assert_eq!(took(&pace, 5, 100), 100);
        pace.add(Spell { from: 50, to: 150, factor: 0.5, turns: None, behind: false });
        assert_eq!(
            [took(&pace, 0, 50), took(&pace, 0, 60), took(&pace, 0, 200), took(&pace, 150, 9)],
            [50, 70, 250, 9]
        );
        pace.add(Spell { from: 100, to: u64::MAX, factor: 0.0, turns: None, behind: false });
        assert_eq!([took(&pace, 0, 75), took(&pace, 0, 76)], [100, u64::MAX]);
    }

    #[test]
    fn a_link_with_room_to_spare_may_be_slower() {
        let mut pace = Pace::default();
        pace.add(Spell { from: 0, to: u64::MAX, factor: 0.5, turns: None, behind: false });
        let asks = |link| Asks { link, behind: 1.0 };
        assert_eq!([1.0, 0.8, 0.5, 0.1, 0.0].map(|part| pace.leaves(9, asks(part))), [0.5, 0.625, 1.0, 1.0, 1.0]);
        pace.add(Spell { from: 5, to: u64::MAX, factor: 0.0, turns: None, behind: false });
        assert_eq!([1.0, 0.1, 0.0].map(|part| pace.leaves(9, asks(part))), [0.0, 0.0, 1.0]);
    }

    #[test]
    fn what_is_held_up_behind_a_link_has_no_room_to_spare() {
        let mut pace = Pace::default();
        pace.add(Spell { from: 0, to: u64::MAX, factor: 0.5, turns: None, behind: true });
        assert_eq!(pace.leaves(9, Asks { link: 0.25, behind: 1.0 }), 0.5);
        assert_eq!(pace.leaves(9, Asks { link: 0.25, behind: 0.25 }), 1.0);
        pace.add(Spell { from: 0, to: u64::MAX, factor: 0.2, turns: None, behind: false });
        assert_eq!(pace.leaves(9, Asks { link: 0.25, behind: 1.0 }), 0.4);
    }

    #[test]
    fn a_link_that_is_down_does_not_flap() {
        let mut pace = Pace::default();
        pace.add(Spell { from: 0, to: u64::MAX, factor: 0.0, turns: Some([10, 5, 0]), behind: false });
        pace.add(Spell { from: 40, to: 100, factor: 0.0, turns: None, behind: false });
        assert_eq!([0, 10, 39, 40, 70, 99, 100].map(|at| pace.next(at)), [10, 15, 40, 100, 100, 100, 105]);
        pace.add(Spell { from: 50, to: u64::MAX, factor: 0.0, turns: None, behind: false });
        assert_eq!(
            [49, 50, 1000].map(|at| (pace.speed(at), pace.next(at))),
            [100, u64::MAX, u64::MAX].map(|n| (0.0, n))
        );
    }

    #[test]
    fn a_flapping_link_is_up_in_turns() {
        let mut pace = Pace::default();
        pace.add(Spell { from: 0, to: u64::MAX, factor: 0.0, turns: Some([30, 10, 0]), behind: false });
        assert_eq!([took(&pace, 0, 30), took(&pace, 0, 31), took(&pace, 35, 5), took(&pace, 0, 90)], [30, 41, 10, 110]);
        // A part of a turn is over, or all of the time up and some of that down.
        for (over, took_5) in [(0, 5), (25, 5), (27, 15), (36, 9)] {
            let turns = Some([30, 10, over]);
            let mut pace = Pace::default();
            pace.add(Spell { from: 0, to: u64::MAX, factor: 0.0, turns, behind: false });
            assert_eq!(took(&pace, 0, 5), took_5, "{over}");
        }
    }
}
