//! Experts that every rank computes for itself: whose weights come to it, and whose gradient goes home (FasterMoE's
//! shadowing, PPoPP 2022, section 4.2).
//!
//! A rank has slots of its own and behind them a slot for each shadowed expert, the same on every rank. Tokens that
//! choose such an expert go to the slot of their own rank. The slot that has the weights, its *owner*, stands among the first of
//! its rank's; a route of its own, whose tokens are these slots, brings weights to everyone and sums gradients back.

use super::{Counts, Route};
use crate::error::{Error, Result};

impl Route {
    /// The route where the last `shadows` slots of every rank are those of the shadowed experts, owner after owner.
    /// Errors: slots that do not fit that.
    pub fn shadowing(self, shadows: u32) -> Result<Route> {
        let route = Route { shadows, ..self };
        let bad = |why: String| Err(Error::spec("route", "shadows", why));
        if shadows >= route.local_experts() || route.holds.is_empty() || !route.is_listed() || route.pad.is_some() {
            let why = format!(
                "{shadows} of {} slots a rank; list the choices, unpadded, and what each slot holds",
                route.local_experts()
            );
            return bad(why);
        }
        let shadowed = route.shadowed();
        if let Some(rank) = (0..route.ranks).find(|&rank| route.shadows_of(rank) != shadowed) {
            return bad(format!("rank {rank} shadows other experts than rank 0; every rank shadows the same"));
        }
        let mut owned = vec![];
        for rank in 0..route.ranks {
            let own = route.own_of(rank);
            let first = own.iter().take_while(|expert| shadowed.contains(expert)).count();
            if own[first..].iter().any(|expert| shadowed.contains(expert)) {
                return bad(format!("rank {rank} owns shadowed experts behind others; put them first"));
            }
            owned.extend_from_slice(&own[..first]);
        }
        if owned != shadowed {
            return bad(format!(
                "ranks own {owned:?} of the shadowed experts {shadowed:?}; each has one owner, in this order"
            ));
        }
        Ok(route)
    }

    /// Slots of one rank whose weights are its own.
    pub fn own_slots(&self) -> u32 {
        self.local_experts() - self.shadows
    }

    fn own_of(&self, rank: u32) -> &[u32] {
        let first = (rank * self.local_experts()) as usize;
        &self.holds[first..first + self.own_slots() as usize]
    }

    fn shadows_of(&self, rank: u32) -> &[u32] {
        let end = ((rank + 1) * self.local_experts()) as usize;
        &self.holds[end - self.shadows as usize..end]
    }

    /// The experts that every rank computes for itself.
    pub fn shadowed(&self) -> &[u32] {
        if self.shadows == 0 { &[] } else { self.shadows_of(0) }
    }

    /// The experts of the slots that have their weights, rank after rank.
    pub fn owned(&self) -> Vec<u32> {
        (0..self.ranks).flat_map(|rank| self.own_of(rank).iter().copied()).collect()
    }

    /// The route by which weights of shadowed experts come to every rank: a rank's tokens are the experts that it owns,
    /// and each goes to all ranks. `None` where no expert is shadowed. Errors: those of [`Route::new`].
    pub fn broadcast(&self) -> Result<Option<Route>> {
        if self.shadows == 0 {
            return Ok(None);
        }
        let owns = |rank| self.own_of(rank).iter().filter(|expert| self.shadowed().contains(expert)).count() as u64;
        let tokens: Vec<u64> = (0..self.ranks).map(owns).collect();
        let choices = (0..self.shadows).flat_map(|_| 0..self.ranks).collect();
        let counts = Counts::Listed { tokens, choices };
        Route::new([self.ranks, self.node], self.ranks, self.ranks, counts).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::rows::{Landing, Layout};

    /// Two ranks of two own slots and two shadows: expert 3, which rank 1 owns, and expert 1 of rank 0.
    fn route(holds: Vec<u32>) -> Result<Route> {
        let counts = Counts::Listed { tokens: vec![2, 1], choices: vec![2, 3, 1, 4, 6, 7] };
        Route::new([2, 2], 8, 2, counts)?.holding(holds)?.shadowing(2)
    }

    fn good() -> Vec<u32> {
        vec![1, 0, 1, 3, 3, 2, 1, 3]
    }

    #[test]
    fn weights_go_from_their_owner_to_everyone() {
        let r = route(good()).unwrap();
        assert_eq!((r.own_slots(), r.shadowed(), r.owned()), (2, &[1, 3][..], vec![1, 0, 3, 2]));
        let ways = r.broadcast().unwrap().unwrap();
        assert_eq!((ways.tokens(0), ways.tokens(1), ways.experts, ways.topk), (1, 1, 2, 2));
        // On both ranks the shadows stand in the order of their slots.
        for place in 0..2 {
            let rows = Layout::Landed(Landing::Everyone).list(&ways, place);
            assert_eq!(rows.iter().map(|row| (row.src, row.token)).collect::<Vec<_>>(), [(0, 0), (1, 0)]);
        }
        let text = serde_json::to_string(&r).unwrap();
        assert_eq!(serde_json::from_str::<Route>(&text).unwrap(), r);
    }

    #[test]
    fn shadows_that_nobody_can_lend_are_refused() {
        let of = |holds: Vec<u32>| {
            let counts = Counts::Listed { tokens: vec![1, 0], choices: vec![2, 3] };
            Route::new([2, 2], 8, 2, counts)
                .unwrap()
                .holding(holds)
                .and_then(|r| r.shadowing(2))
                .unwrap_err()
                .to_string()
        };
        assert!(of(vec![1, 0, 1, 3, 3, 2, 3, 1]).contains("every rank shadows the same"));
        assert!(of(vec![0, 1, 1, 3, 3, 2, 1, 3]).contains("put them first"));
        assert!(of(vec![1, 0, 3, 1, 3, 2, 3, 1]).contains("in this order"));
        let balanced = Route::new([2, 2], 8, 2, Counts::Balanced { tokens: 1 }).unwrap();
        assert!(balanced.shadowing(2).unwrap_err().to_string().contains("list the choices"));
    }
}
