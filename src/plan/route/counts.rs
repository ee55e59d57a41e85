//! The counts of listed choices, made in one pass.

use super::{DROPPED, Route};
use crate::error::{Error, Result};

/// Rows of every source.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tables {
    /// [source x slot]: copies.
    pub to_expert: Vec<u32>,
    /// [source x rank]: tokens that have a slot there.
    pub to_rank: Vec<u32>,
    /// [source x node]: the same by nodes.
    pub to_node: Vec<u32>,
}

impl Tables {
    pub fn new(route: &Route, tokens: &[u64], choices: &[u32]) -> Result<Tables> {
        check_lengths(route, tokens, choices)?;
        let [ranks, nodes, experts] = [route.ranks, route.nodes(), route.experts].map(|n| n as usize);
        let mut tables = Tables {
            to_expert: vec![0; ranks * experts],
            to_rank: vec![0; ranks * ranks],
            to_node: vec![0; ranks * nodes],
        };
        let mut counter = Counter::new(route);
        let mut rest = choices;
        for (src, &n) in tokens.iter().enumerate() {
            let (own, after) = rest.split_at(n as usize * route.topk as usize);
            rest = after;
            let to = Of {
                expert: &mut tables.to_expert[src * experts..][..experts],
                rank: &mut tables.to_rank[src * ranks..][..ranks],
                node: &mut tables.to_node[src * nodes..][..nodes],
            };
            counter.count(to, own).map_err(|(token, why)| bad(format!("source {src}, token {token}: {why}")))?;
        }
        Ok(tables)
    }
}

fn bad(why: String) -> Error {
    Error::spec("route", "counts.listed", why)
}

fn check_lengths(route: &Route, tokens: &[u64], choices: &[u32]) -> Result<()> {
    if tokens.len() != route.ranks as usize {
        return Err(bad(format!("{} sources, {} ranks; give one number of tokens a rank", tokens.len(), route.ranks)));
    }
    let all: u128 = tokens.iter().map(|t| u128::from(*t)).sum();
    if all * u128::from(route.topk) != choices.len() as u128 {
        let why = format!(
            "{} choices for {all} tokens of {} each; write {DROPPED} for one dropped",
            choices.len(),
            route.topk
        );
        return Err(bad(why));
    }
    if tokens.iter().any(|t| *t >= u64::from(u32::MAX)) {
        return Err(bad("a source has more than 2^32 tokens; use more microbatches".into()));
    }
    Ok(())
}

/// The rows of one source in each table.
struct Of<'a> {
    expert: &'a mut [u32],
    rank: &'a mut [u32],
    node: &'a mut [u32],
}

/// Marks by the number of the token that came last, so that nothing is cleared between tokens.
struct Counter {
    topk: usize,
    /// The rank and node of each slot.
    place: Vec<[u32; 2]>,
    seen_expert: Vec<u64>,
    seen_rank: Vec<u64>,
    seen_node: Vec<u64>,
    stamp: u64,
}

impl Counter {
    fn new(route: &Route) -> Counter {
        let place = |e| [route.rank_of(e), route.node_of(route.rank_of(e))];
        Counter {
            topk: route.topk as usize,
            place: (0..route.experts).map(place).collect(),
            seen_expert: vec![0; route.experts as usize],
            seen_rank: vec![0; route.ranks as usize],
            seen_node: vec![0; route.nodes() as usize],
            stamp: 0,
        }
    }

    /// Counts the choices of one source; where they are no choices, the token and why.
    fn count(&mut self, to: Of, choices: &[u32]) -> std::result::Result<(), (usize, String)> {
        for (token, row) in choices.chunks_exact(self.topk).enumerate() {
            self.stamp += 1;
            for &slot in row.iter().filter(|s| **s != DROPPED) {
                let Some(&[rank, node]) = self.place.get(slot as usize) else {
                    let why = format!("slot {slot} of {}; write {DROPPED} for one dropped", self.place.len());
                    return Err((token, why));
                };
                if !first(&mut self.seen_expert[slot as usize], self.stamp) {
                    return Err((token, format!("slot {slot} twice; a token goes to different slots")));
                }
                to.expert[slot as usize] += 1;
                to.rank[rank as usize] += u32::from(first(&mut self.seen_rank[rank as usize], self.stamp));
                to.node[node as usize] += u32::from(first(&mut self.seen_node[node as usize], self.stamp));
            }
        }
        Ok(())
    }
}

/// Whether it is the first mark with this stamp.
fn first(mark: &mut u64, stamp: u64) -> bool {
    std::mem::replace(mark, stamp) != stamp
}
