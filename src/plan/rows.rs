//! In which orders the rows of a route stand in buffers, on their way to the experts and back.
//!
//! ```text
//! Tokens --(one copy a choice)--> Copies --exchange--> Landed --> Experts
//! ```
//! A way that sends each row as it is goes from Tokens straight to Landed. Going back along the same orders sums
//! what was one row before.

use super::mesh::{Axis, Mesh};
use super::route::{DROPPED, ExchangeAlgo, Phase, Route, Rows};
use serde::{Deserialize, Serialize};

/// A plan's second view: (pipeline stage, ranks that hold the same experts, ranks that hold different ones).
pub const EXPERT_VIEW: u8 = 1;

/// The place of a rank in its group of experts.
pub fn place_of(views: &[Mesh], rank: u32) -> u32 {
    views.get(EXPERT_VIEW as usize).map_or(0, |view| view.coord(rank, Axis::Ep))
}

/// The place of a rank among the ranks that hold the same experts.
pub fn replica_of(views: &[Mesh], rank: u32) -> u32 {
    views.get(EXPERT_VIEW as usize).map_or(0, |view| view.coord(rank, Axis::Edp))
}

/// How many ranks hold the same experts.
pub fn replicas(views: &[Mesh]) -> u32 {
    views.get(EXPERT_VIEW as usize).map_or(1, |view| view.degree(Axis::Edp))
}

/// The rows that an exchange leaves on a rank, and their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Landing {
    /// A row for each token that has a slot here; source after source, tokens ascending.
    Unique,
    /// Every token of every source.
    Everyone,
    /// A row for each token and slot; source after source, slot after slot, tokens ascending.
    Pairs,
    /// The rows of experts in a buffer with room for all tokens of every source in every slot, `[slots, sources x most tokens]`
    /// (DeepEP's `packed_recv_x`).
    Padded,
}

/// An order of rows on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// The rank's own tokens.
    Tokens,
    /// A row for each slot of each of the rank's tokens: slot after slot, tokens ascending.
    Copies,
    Landed(Landing),
    /// A row for each token and slot of this rank: slot after slot, source after source, tokens ascending.
    Experts,
}

/// A row: a token, or one of its choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId {
    pub src: u32,
    pub token: u32,
    /// Which of the token's choices it is; [`WHOLE`] for the token itself.
    pub choice: u32,
}

/// In place of a choice: all choices of the token.
pub const WHOLE: u32 = u32::MAX;

impl RowId {
    pub fn token(src: u32, token: u32) -> RowId {
        RowId { src, token, choice: WHOLE }
    }

    /// The row of the whole token that a choice belongs to.
    pub fn whole(self) -> RowId {
        RowId { choice: WHOLE, ..self }
    }
}

impl Layout {
    /// Whether a row stands for one choice alone.
    pub fn by_choice(self) -> bool {
        matches!(self, Layout::Copies | Layout::Landed(Landing::Pairs | Landing::Padded) | Layout::Experts)
    }

    /// Rows on the rank at `place` of the group: an expected value where the route is balanced.
    pub fn count(self, route: &Route, place: u32) -> Rows {
        match self {
            Layout::Tokens => route.tokens(place) as f64,
            Layout::Copies => (0..route.ranks).map(|dst| route.copies_to_rank(place, dst)).sum(),
            Layout::Landed(Landing::Unique) => route.received_unique(place),
            Layout::Landed(Landing::Everyone) => (0..route.ranks).map(|src| route.tokens(src) as f64).sum(),
            Layout::Landed(Landing::Pairs | Landing::Padded) | Layout::Experts => route.expanded_rows(place),
        }
    }

    /// Rows that a buffer needs on every rank: those of the fullest rank, or all that there is room for.
    pub fn capacity(self, route: &Route) -> u64 {
        if self == Layout::Landed(Landing::Padded) {
            return (u64::from(route.local_experts()) * u64::from(route.ranks) * route.most_tokens()).max(1);
        }
        let most = (0..route.ranks).map(|place| self.count(route, place)).fold(0.0, f64::max);
        // Sums of expected values come out a hair above whole numbers.
        ((most - 1e-6).ceil() as u64).max(1)
    }

    /// The rows themselves; empty where choices are not listed.
    pub fn list(self, route: &Route, place: u32) -> Vec<RowId> {
        let sources = 0..route.ranks;
        match self {
            Layout::Tokens => tokens(route, place),
            Layout::Copies => (0..route.experts).flat_map(|slot| of_slot(route, place, slot)).collect(),
            Layout::Landed(Landing::Everyone) => sources.flat_map(|src| tokens(route, src)).collect(),
            Layout::Landed(Landing::Unique) => {
                let of =
                    |src| route.row_list(src, route.rank_slots(place)).into_iter().map(move |t| RowId::token(src, t));
                sources.flat_map(of).collect()
            }
            Layout::Landed(Landing::Pairs) => {
                let of = |src| route.rank_slots(place).flat_map(move |slot| of_slot(route, src, slot));
                sources.flat_map(of).collect()
            }
            Layout::Landed(Landing::Padded) | Layout::Experts => {
                let of = |slot| (0..route.ranks).flat_map(move |src| of_slot(route, src, slot));
                route.rank_slots(place).flat_map(of).collect()
            }
        }
    }
}

fn tokens(route: &Route, src: u32) -> Vec<RowId> {
    (0..route.tokens(src) as u32).map(|t| RowId::token(src, t)).collect()
}

/// The rows of one source for one slot; empty where choices are not listed.
pub fn of_slot(route: &Route, src: u32, slot: u32) -> Vec<RowId> {
    let Some(choices) = route.choices(src) else { return vec![] };
    let row = |(at, _): (usize, &u32)| RowId { src, token: at as u32 / route.topk, choice: at as u32 % route.topk };
    let mut rows: Vec<RowId> =
        choices.iter().enumerate().filter(|(_, chosen)| **chosen == slot && slot != DROPPED).map(row).collect();
    if let Some(pad) = route.pad {
        // Rows of zeros have names that no token has.
        let first = route.tokens(src) as u32 + slot * pad;
        rows.extend((rows.len() as u32..pad).map(|i| RowId { src, token: first + i, choice: 0 }));
    }
    rows
}

impl ExchangeAlgo {
    /// The order in which rows leave their source, and come back to it.
    pub fn source(self) -> Layout {
        match self {
            ExchangeAlgo::Nccl | ExchangeAlgo::Hierarchical => Layout::Copies,
            _ => Layout::Tokens,
        }
    }

    /// The order in which rows arrive at the ranks of their experts.
    pub fn landed(self) -> Layout {
        match self {
            ExchangeAlgo::Nccl | ExchangeAlgo::Hierarchical => Layout::Landed(Landing::Pairs),
            ExchangeAlgo::AllGather | ExchangeAlgo::Broadcast => Layout::Landed(Landing::Everyone),
            ExchangeAlgo::DeepepLowLatency { .. } => Layout::Landed(Landing::Padded),
            _ => Layout::Landed(Landing::Unique),
        }
    }

    /// The order of rows before an exchange, and the order behind it.
    pub fn ends(self, phase: Phase) -> [Layout; 2] {
        match phase {
            Phase::Combine => [self.landed(), self.source()],
            _ => [self.source(), self.landed()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Counts;

    /// Two ranks of two slots; the third token of source 0 lost a choice, source 1 has one token.
    fn route() -> Route {
        let choices = vec![0, 3, 2, 3, 1, DROPPED, 3, 0];
        Route::new([2, 2], 4, 2, Counts::Listed { tokens: vec![3, 1], choices }).unwrap()
    }

    fn short(layout: Layout, place: u32) -> Vec<(u32, u32, i32)> {
        let id = |r: RowId| (r.src, r.token, r.choice as i32);
        layout.list(&route(), place).into_iter().map(id).collect()
    }

    #[test]
    fn rows_stand_as_their_order_says() {
        assert_eq!(short(Layout::Copies, 0), [(0, 0, 0), (0, 2, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]);
        assert_eq!(short(Layout::Landed(Landing::Unique), 1), [(0, 0, -1), (0, 1, -1), (1, 0, -1)]);
        assert_eq!(short(Layout::Landed(Landing::Pairs), 0), [(0, 0, 0), (0, 2, 0), (1, 0, 1)]);
        assert_eq!(short(Layout::Experts, 0), [(0, 0, 0), (1, 0, 1), (0, 2, 0)]);
        assert_eq!(short(Layout::Landed(Landing::Everyone), 1).len(), 4);
    }

    #[test]
    fn counts_are_those_of_the_lists() {
        let r = route();
        let landed = [Landing::Unique, Landing::Everyone, Landing::Pairs].map(Layout::Landed);
        let padded = Layout::Landed(Landing::Padded);
        for layout in landed.into_iter().chain([padded, Layout::Tokens, Layout::Copies, Layout::Experts]) {
            let counts = [0, 1].map(|place| layout.count(&r, place));
            assert_eq!(counts, [0, 1].map(|place| layout.list(&r, place).len() as f64), "{layout:?}");
            // Two slots, two sources of up to three tokens.
            let room = if layout == padded { 12.0 } else { counts[0].max(counts[1]) };
            assert_eq!(layout.capacity(&r) as f64, room, "{layout:?}");
        }
        assert_eq!(padded.list(&r, 0), Layout::Experts.list(&r, 0));
    }
}
