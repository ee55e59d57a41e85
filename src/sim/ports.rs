//! The ports of a rank: while k transfers that were posted before hold a port, a transfer has 1 / (k + 1) of it.

use super::meeting::MeetingId;
use super::pace::{self, Pace};
use crate::act::stretch::{Held, lasting};

/// A transfer on a port.
#[derive(Debug, Clone, Copy)]
pub struct Holder {
    pub held: Held,
    pub order: u64,
    pub meeting: MeetingId,
}

/// Who holds a port, or did while someone who still does was waiting for it.
#[derive(Debug, Clone, Default)]
pub struct Port {
    holders: Vec<Holder>,
}

impl Port {
    /// Forgets what nobody can ask for any more.
    pub fn forget(&mut self, now: u64) {
        if self.holders.is_empty() {
            return;
        }
        let busy = self.holders.iter().filter(|h| h.held.to > now);
        let since = busy.map(|h| h.held.from).min().unwrap_or(u64::MAX);
        self.holders.retain(|h| h.held.to > since.min(now));
    }

    pub fn hold(&mut self, meeting: MeetingId, order: u64, from: u64, to: u64) {
        self.holders.push(Holder { held: Held { from, to, amount: 1 }, order, meeting });
    }

    /// A holder will be done at another time than it seemed.
    pub fn change(&mut self, meeting: MeetingId, from: u64, to: u64) {
        let mine = |h: &&mut Holder| h.meeting == meeting && h.held.from == from;
        self.holders.iter_mut().filter(mine).for_each(|h| h.held.to = to);
    }

    /// How long `transfer` takes from `ready` on beside all that were posted before `order`, on a link of such speed of which
    /// it asks for a `part`.
    pub fn lasting(&self, order: u64, ready: u64, transfer: u64, (link, part): (&Pace, f64)) -> u64 {
        let before = || self.holders.iter().filter(move |h| h.order < order).map(|h| h.held);
        if link.is_well() {
            return if self.holders.is_empty() { transfer } else { lasting(before(), ready, transfer, share) };
        }
        let held = |at: u64| before().filter(|h| h.from <= at && at < h.to).map(|h| h.amount).sum();
        let edge = |at: u64| before().flat_map(|h| [h.from, h.to]).filter(|&e| e > at).min().unwrap_or(u64::MAX);
        pace::lasting(ready, transfer, |at| share(held(at)) * link.leaves(at, part), |at| edge(at).min(link.next(at)))
    }

    /// The part of the port, and of its link's speed, that one posted at `order` has at `now`, and when that may change.
    pub fn speed(&self, order: u64, now: u64, (link, part): (&Pace, f64)) -> (f64, u64) {
        let before = || self.holders.iter().filter(|h| h.order < order).map(|h| h.held);
        let held = before().filter(|h| h.from <= now && now < h.to).map(|h| h.amount).sum();
        let edge = before().flat_map(|h| [h.from, h.to]).filter(|&e| e > now).min().unwrap_or(u64::MAX);
        (share(held) * link.leaves(now, part), edge.min(link.next(now)))
    }

    /// Holders that were posted after `order` and are still busy at `now`.
    pub fn behind(&self, order: u64, now: u64) -> impl Iterator<Item = &Holder> {
        self.holders.iter().filter(move |h| h.order > order && h.held.to > now)
    }
}

/// What is left of a port that `k` others hold.
fn share(k: u32) -> f64 {
    1.0 / f64::from(k + 1)
}
