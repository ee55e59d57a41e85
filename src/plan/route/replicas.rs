//! Experts that several slots hold: who has copies of whose weights, and how the gradients of the copies become one.
//!
//! Every copy sums up the gradient of the rows that came to it. The first slot of an expert, its *home*, takes in the
//! others' and gives the total back, so that every copy takes the same step and stays the same. Both ways are an
//! exchange whose tokens are slots: a combine home, a dispatch from there.

use super::{Counts, DROPPED, Route};
use crate::error::{Error, Result};

impl Route {
    /// The route where slot i holds expert `holds[i]`, some of them in several slots. Errors: a list that does not fit
    /// the slots or leaves an expert without one, a token that goes to two slots of one expert.
    pub fn holding(self, holds: Vec<u32>) -> Result<Route> {
        let bad = |why: String| Err(Error::spec("route", "holds", why));
        if holds.len() != self.experts as usize {
            return bad(format!(
                "{} slots, {} are said to hold an expert; name one for each",
                self.experts,
                holds.len()
            ));
        }
        let experts = holds.iter().max().map_or(0, |e| u64::from(*e) + 1);
        if experts > holds.len() as u64 {
            return bad(format!("expert {} in {} slots; count experts from 0", experts - 1, holds.len()));
        }
        if let Some(missing) = (0..experts as u32).find(|e| !holds.contains(e)) {
            return bad(format!("no slot holds expert {missing}; every expert needs one"));
        }
        let route = Route { holds, ..self };
        for src in 0..route.ranks {
            let rows = route.choices(src).unwrap_or_default().chunks(route.topk as usize);
            for (token, row) in rows.enumerate() {
                let mut experts: Vec<u32> =
                    row.iter().filter(|s| **s != DROPPED).map(|s| route.expert_in(*s)).collect();
                experts.sort_unstable();
                if experts.windows(2).any(|pair| pair[0] == pair[1]) {
                    let why = format!("source {src}, token {token}: two slots of one expert");
                    return bad(why + "; a token goes to different experts");
                }
            }
        }
        Ok(route)
    }

    /// The expert that a slot holds; [`DROPPED`] stays what it is.
    pub fn expert_in(&self, slot: u32) -> u32 {
        if slot == DROPPED || self.holds.is_empty() { slot } else { self.holds[slot as usize] }
    }

    /// Number of experts, each counted once.
    pub fn distinct_experts(&self) -> u32 {
        self.holds.iter().max().map_or(self.experts, |e| e + 1)
    }

    /// The slots of each expert, in slot order.
    fn slots_by_expert(&self) -> Vec<Vec<u32>> {
        let mut slots = vec![vec![]; self.distinct_experts() as usize];
        (0..self.experts).for_each(|slot| slots[self.expert_in(slot) as usize].push(slot));
        slots
    }

    /// The route by which the gradients of copies become one: its tokens, and its slots, are each rank's slots of
    /// experts that have several, in slot order. `None` where no expert has several. Errors: such slots stand behind
    /// others.
    pub fn sums(&self) -> Result<Option<Route>> {
        let by_expert = self.slots_by_expert();
        let most = by_expert.iter().map(Vec::len).max().unwrap_or(1) as u32;
        if most <= 1 {
            return Ok(None);
        }
        let shared = |slot: u32| by_expert[self.expert_in(slot) as usize].len() > 1;
        let tokens: Vec<u64> =
            (0..self.ranks).map(|rank| self.rank_slots(rank).filter(|slot| shared(*slot)).count() as u64).collect();
        let first = |rank: u32, n: u64| self.rank_slots(rank).take(n as usize).all(shared);
        if let Some(rank) = (0..self.ranks).find(|&rank| !first(rank, tokens[rank as usize])) {
            let why = format!("rank {rank} has slots of experts with copies behind others; put them first");
            return Err(Error::spec("route", "holds", why));
        }
        let room = tokens.iter().copied().max().unwrap_or(0) as u32;
        // The place of a slot in the new route, where every rank has `room` of them.
        let place = |slot: u32| self.rank_of(slot) * room + slot % self.local_experts();
        let mut choices = vec![];
        for slot in (0..self.experts).filter(|slot| shared(*slot)) {
            let of = &by_expert[self.expert_in(slot) as usize];
            let home = of[0] == slot;
            let all = of.iter().filter(|_| home).map(|slot| place(*slot));
            choices.extend(all.chain(std::iter::repeat(DROPPED)).take(most as usize));
        }
        Route::new([self.ranks, self.node], self.ranks * room, most, Counts::Listed { tokens, choices }).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks of three slots; expert 1 has copies on both, expert 0 two on rank 1.
    fn route(choices: Vec<u32>) -> Result<Route> {
        let tokens = vec![choices.len() as u64 / 2, 0];
        Route::new([2, 2], 6, 2, Counts::Listed { tokens, choices })?.holding(vec![1, 2, 3, 0, 0, 1])
    }

    #[test]
    fn sums_go_home_and_back_to_every_copy() {
        let sums = route(vec![0, 3]).unwrap().sums().unwrap().unwrap();
        assert_eq!((sums.experts, sums.topk, sums.tokens(0), sums.tokens(1)), (6, 2, 1, 3));
        assert_eq!(sums.choices(0).unwrap(), [0, 5]);
        assert_eq!(sums.choices(1).unwrap(), [3, 4, DROPPED, DROPPED, DROPPED, DROPPED]);
        // Every copy gets one row, and nobody else.
        let rows: Vec<f64> = (0..6).map(|slot| sums.rows_of_expert(slot)).collect();
        assert_eq!(rows, [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn slots_say_what_they_hold() {
        let r = route(vec![5, 2]).unwrap();
        assert_eq!((r.expert_in(5), r.expert_in(DROPPED), r.distinct_experts()), (1, DROPPED, 4));
        let text = serde_json::to_string(&r).unwrap();
        assert_eq!(serde_json::from_str::<Route>(&text).unwrap(), r);
        let plain = Route::new([2, 2], 4, 1, Counts::Balanced { tokens: 3 }).unwrap();
        assert!(plain.sums().unwrap().is_none() && plain.expert_in(3) == 3);
    }

    #[test]
    fn what_holds_nothing_sound_is_refused() {
        let why = |r: Result<Route>| r.unwrap_err().to_string();
        assert!(why(route(vec![0, 5])).contains("two slots of one expert"));
        let plain = || Route::new([2, 2], 4, 1, Counts::Balanced { tokens: 3 }).unwrap();
        assert!(why(plain().holding(vec![0, 1])).contains("name one for each"));
        assert!(why(plain().holding(vec![0, 0, 2, 2])).contains("no slot holds expert 1"));
        assert!(why(plain().holding(vec![0, 0, 9, 1])).contains("count experts from 0"));
        let behind = plain().holding(vec![0, 1, 2, 1]).unwrap().sums();
        assert!(behind.unwrap_err().to_string().contains("put them first"));
    }

    #[test]
    fn padded_routes_send_as_much_to_everyone() {
        let choices = vec![0, 3, 1, 2, 0, DROPPED];
        let listed =
            || Route::new([2, 2], 4, 2, Counts::Listed { tokens: vec![2, 1], choices: choices.clone() }).unwrap();
        let padded = listed().padded(3).unwrap();
        assert_eq!((padded.copies(1, 3), padded.copies_to_rank(0, 1), padded.expanded_rows(1)), (3.0, 6.0, 12.0));
        let rows = crate::plan::Layout::Experts.list(&padded, 1);
        let unique: std::collections::BTreeSet<_> = rows.iter().collect();
        assert_eq!((rows.len(), unique.len()), (12, 12));
        let balanced = Route::new([2, 2], 4, 1, Counts::Balanced { tokens: 8 }).unwrap();
        assert_eq!(balanced.clone().padded(5).unwrap().copies_to_rank(0, 1), 10.0);
        assert!(balanced.padded(1).unwrap_err().to_string().contains("make more room"));
    }
}
