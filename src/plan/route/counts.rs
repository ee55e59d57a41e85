//! The counts of listed choices, made in one pass.

use super::{DROPPED, Route};
use crate::error::{Error, Result};

/// The rows of every source, counted three ways.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tables {
    /// [source x slot]: copies.
    pub to_expert: Vec<u32>,
    /// [source x rank]: tokens that have a slot there.
    pub to_rank: Vec<u32>,
    /// [source x node]: tokens that have a slot there.
    pub to_node: Vec<u32>,
}

impl Tables {
    /// The tables of a route whose choices are listed, source after source. Errors: other numbers of sources or choices
    /// than the route has, 2^32 - 1 tokens of a source or more, a token with a choice that it cannot have.
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

/// The entries of one source in each table.
struct Of<'a> {
    expert: &'a mut [u32],
    rank: &'a mut [u32],
    node: &'a mut [u32],
}

/// Which parts of a group the present token has reached.
trait Marks {
    /// Begins the next token.
    fn clear(&mut self);
    /// Marks a part; returns whether it was not marked yet.
    fn first(&mut self, part: u32) -> bool;
}

/// Marks as bits, one for each part.
struct Few(u64);

impl Marks for Few {
    fn clear(&mut self) {
        self.0 = 0;
    }

    fn first(&mut self, part: u32) -> bool {
        let before = self.0;
        self.0 |= 1 << part;
        before != self.0
    }
}

/// Marks as the number of the token that reached each part last, so that nothing has to be cleared.
struct Many {
    seen: Vec<u64>,
    stamp: u64,
}

impl Many {
    fn new(parts: u32) -> Many {
        Many { seen: vec![0; parts as usize], stamp: 0 }
    }
}

impl Marks for Many {
    fn clear(&mut self) {
        self.stamp += 1;
    }

    fn first(&mut self, part: u32) -> bool {
        std::mem::replace(&mut self.seen[part as usize], self.stamp) != self.stamp
    }
}

/// Parts that there is a bit for in [`Few`].
const FEW: u32 = u64::BITS;

struct Counter {
    topk: usize,
    /// The rank and node of each slot.
    place: Vec<[u32; 2]>,
    slots: Many,
    ranks: u32,
}

impl Counter {
    fn new(route: &Route) -> Counter {
        let place = |e| [route.rank_of(e), route.node_of(route.rank_of(e))];
        Counter {
            topk: route.topk as usize,
            place: (0..route.experts).map(place).collect(),
            slots: Many::new(route.experts),
            ranks: route.ranks,
        }
    }

    /// Counts the choices of one source. The error is the token whose choices are no valid ones, and why.
    fn count(&mut self, to: Of, choices: &[u32]) -> std::result::Result<(), (usize, String)> {
        match self.ranks {
            0..=FEW => self.marked(to, choices, [Few(0), Few(0)]),
            n => self.marked(to, choices, [Many::new(n), Many::new(n)]),
        }
    }

    fn marked(&mut self, to: Of, choices: &[u32], marks: [impl Marks; 2]) -> std::result::Result<(), (usize, String)> {
        let Counter { place, slots, .. } = self;
        let [mut ranks, mut nodes] = marks;
        for (token, row) in choices.chunks_exact(self.topk).enumerate() {
            slots.clear();
            ranks.clear();
            nodes.clear();
            for &slot in row.iter().filter(|s| **s != DROPPED) {
                let Some(&[rank, node]) = place.get(slot as usize) else {
                    let why = format!("slot {slot} of {}; write {DROPPED} for one dropped", place.len());
                    return Err((token, why));
                };
                if !slots.first(slot) {
                    return Err((token, format!("slot {slot} twice; a token goes to different slots")));
                }
                to.expert[slot as usize] += 1;
                to.rank[rank as usize] += u32::from(ranks.first(rank));
                to.node[node as usize] += u32::from(nodes.first(node));
            }
        }
        Ok(())
    }
}
