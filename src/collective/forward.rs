//! The messages of an exchange, row by row: who hands which rows to whom, round after round.
//!
//! Dispatch copies rows on their way out; combine takes the same ways back, and whoever receives several rows of one
//! name adds them up before they go on.

use super::count::row_bytes;
use crate::plan::link::Line;
use crate::plan::rows::{RowId, WHOLE, of_slot, place_of};
use crate::plan::{Dtype, ExchangeAlgo, Layout, OpKind, Phase, Plan, Route};
use std::collections::BTreeMap;

/// Rows that go from one place of the group to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub from: u32,
    pub to: u32,
    pub rows: Vec<RowId>,
}

/// A round: messages that are all there before the next round begins.
pub type Round = Vec<Message>;

/// The rounds of an exchange; none of their messages is empty, and none is to its own sender.
pub fn rounds(route: &Route, algo: ExchangeAlgo, phase: Phase) -> Vec<Round> {
    let mut rounds = match algo {
        ExchangeAlgo::AllGather | ExchangeAlgo::Broadcast => {
            forwarded(route, |src, _| own(route, src), |src, _| own(route, src))
        }
        ExchangeAlgo::Nccl => vec![pairwise(route, |src, dst| copies(route, src, dst))],
        ExchangeAlgo::DeepepV2Direct { .. } => vec![pairwise(route, |src, dst| unique(route, src, dst))],
        ExchangeAlgo::DeepepLowLatency { .. } => vec![one_by_one(route)],
        ExchangeAlgo::DeepepNormal { .. } | ExchangeAlgo::DeepepV2Hybrid { .. } | ExchangeAlgo::HybridEp { .. } => {
            forwarded(route, |src, node| of_node(route, src, node), |src, dst| unique(route, src, dst))
        }
        ExchangeAlgo::Hierarchical => {
            let to_node = |src, node: u32| {
                let ranks = node * route.node..(node + 1) * route.node;
                ranks.flat_map(|dst| copies(route, src, dst)).collect()
            };
            forwarded(route, to_node, |src, dst| copies(route, src, dst))
        }
    };
    if phase == Phase::Combine {
        rounds.reverse();
        rounds.iter_mut().flatten().for_each(|m| std::mem::swap(&mut m.from, &mut m.to));
    }
    rounds.iter_mut().for_each(|round| round.retain(|m| m.from != m.to && !m.rows.is_empty()));
    rounds
}

/// The rows that a rank handles in an exchange: it takes them up, sends, takes in and lays down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    pub phase: Phase,
    /// Dtype of the rows' values.
    pub dtype: Dtype,
    pub held: u64,
    /// Rows sent, and taken in, in each round.
    pub sent: Vec<u64>,
    pub taken: Vec<u64>,
    pub landed: u64,
    /// Bytes of a row.
    pub row: u64,
}

impl Load {
    pub fn rows(&self) -> u64 {
        self.held + self.sent.iter().chain(&self.taken).sum::<u64>() + self.landed
    }

    /// The size by which a measured curve counts it: rows and bytes.
    pub fn size(&self) -> [f64; 2] {
        [self.rows() as f64, (self.rows() * self.row) as f64]
    }
}

/// The load of `rank` in op `node`, whose `rounds` are those of its route; `None` where the op is no exchange.
pub fn load(plan: &Plan, line: &Line, (node, rank): (usize, u32), rounds: &[Round]) -> Option<Load> {
    let OpKind::Exchange { route, algo, phase, .. } = &line.nodes[node].op.kind else { return None };
    let (route, here) = (plan.route_of(*route, rank), place_of(&plan.views, rank));
    let [from, to] = algo.ends(*phase);
    // Where rows travel by choice, a token is taken up once for each of its choices.
    let each = |row: &RowId| match row.choice == WHOLE && algo.landed().by_choice() {
        true => u64::from(route.topk),
        false => 1,
    };
    let of = |ours: &dyn Fn(&Message) -> bool| -> Vec<u64> {
        let rows = |round: &Round| round.iter().filter(|m| ours(m)).map(|m| m.rows.len() as u64).sum();
        rounds.iter().map(rows).collect()
    };
    Some(Load {
        phase: *phase,
        dtype: line.reads(node)[0].dtype(plan),
        held: from.list(route, here).iter().map(each).sum(),
        sent: of(&|m| m.from == here),
        taken: of(&|m| m.to == here),
        landed: to.list(route, here).len() as u64,
        row: row_bytes(plan, line, node, *algo, *phase, route.topk),
    })
}

/// The rows of `src` for `dst`, one for each token and slot.
fn copies(route: &Route, src: u32, dst: u32) -> Vec<RowId> {
    route.rank_slots(dst).flat_map(|slot| of_slot(route, src, slot)).collect()
}

/// The rows of `src` for `dst`, one for each token.
fn unique(route: &Route, src: u32, dst: u32) -> Vec<RowId> {
    route.row_list(src, route.rank_slots(dst)).into_iter().map(|t| RowId::token(src, t)).collect()
}

fn of_node(route: &Route, src: u32, node: u32) -> Vec<RowId> {
    route.row_list(src, route.node_slots(node)).into_iter().map(|t| RowId::token(src, t)).collect()
}

fn pairwise(route: &Route, rows: impl Fn(u32, u32) -> Vec<RowId>) -> Round {
    let to = |src: u32| (0..route.ranks).map(move |dst| (src, dst));
    (0..route.ranks).flat_map(to).map(|(from, to)| Message { from, to, rows: rows(from, to) }).collect()
}

/// A round with a message for each row.
fn one_by_one(route: &Route) -> Round {
    let single = |m: Message| m.rows.into_iter().map(move |row| Message { from: m.from, to: m.to, rows: vec![row] });
    pairwise(route, |src, dst| copies(route, src, dst)).into_iter().flat_map(single).collect()
}

/// The rounds of rows that go between nodes to the rank of the same place, and from there to the ranks of the node.
fn forwarded(
    route: &Route,
    to_node: impl Fn(u32, u32) -> Vec<RowId>,
    to_rank: impl Fn(u32, u32) -> Vec<RowId>,
) -> Vec<Round> {
    let at = |node: u32, rank: u32| node * route.node + rank % route.node;
    let (mut out, mut inside): (Round, BTreeMap<(u32, u32), Vec<RowId>>) = (vec![], BTreeMap::new());
    for src in 0..route.ranks {
        for node in 0..route.nodes() {
            let over = at(node, src);
            if over != src {
                out.push(Message { from: src, to: over, rows: to_node(src, node) });
            }
            for dst in node * route.node..(node + 1) * route.node {
                inside.entry((over, dst)).or_default().extend(to_rank(src, dst));
            }
        }
    }
    let inside = inside.into_iter().map(|((from, to), rows)| Message { from, to, rows });
    vec![out, inside.collect()]
}

/// The tokens of a source.
fn own(route: &Route, src: u32) -> Vec<RowId> {
    Layout::Tokens.list(route, src)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::exchange;
    use crate::plan::Counts;
    use crate::plan::route::DROPPED;
    use std::collections::BTreeSet;

    /// Two nodes of two ranks, two slots each: ragged, one source empty, a choice dropped.
    fn route() -> Route {
        let choices = vec![0, 1, 7, 4, 2, DROPPED, 5, 6, 0, 7, 3, 2];
        Route::new([4, 2], 8, 3, Counts::Listed { tokens: vec![2, 0, 1, 1], choices }).unwrap()
    }

    const ALGOS: [ExchangeAlgo; 9] = [
        ExchangeAlgo::Nccl,
        ExchangeAlgo::AllGather,
        ExchangeAlgo::Broadcast,
        ExchangeAlgo::DeepepNormal { sms: 20 },
        ExchangeAlgo::DeepepLowLatency { hook: true, slots: 2 },
        ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) },
        ExchangeAlgo::HybridEp { sms: 16 },
        ExchangeAlgo::DeepepV2Direct { sms: Some(12) },
        ExchangeAlgo::Hierarchical,
    ];

    /// Every rank ends with the rows of its landing, and nobody sends what it has not got.
    #[test]
    fn rows_arrive_where_they_are_chosen() {
        let r = route();
        for algo in ALGOS {
            let fine = algo.landed().by_choice();
            let own = |p: u32| if fine { Layout::Copies } else { Layout::Tokens }.list(&r, p).into_iter().collect();
            let mut held: Vec<BTreeSet<RowId>> = (0..4).map(own).collect();
            for round in rounds(&r, algo, Phase::Dispatch) {
                let before = held.clone();
                for m in round {
                    assert!(m.rows.iter().all(|row| before[m.from as usize].contains(row)), "{algo:?} {m:?}");
                    held[m.to as usize].extend(m.rows);
                }
            }
            for (place, held) in held.iter().enumerate() {
                let want = algo.landed().list(&r, place as u32);
                assert!(want.iter().all(|row| held.contains(row)), "{algo:?} {place}");
            }
        }
    }

    /// Rows of a combine are as many as those of the dispatch, hop by hop.
    #[test]
    fn combine_goes_back_the_same_way() {
        let r = route();
        for algo in ALGOS {
            let count = |phase| -> usize { rounds(&r, algo, phase).into_iter().flatten().map(|m| m.rows.len()).sum() };
            assert_eq!(count(Phase::Dispatch), count(Phase::Combine), "{algo:?}");
        }
    }

    /// Hop by hop as many rows as the lowering says that times and bytes are counted from.
    #[test]
    fn messages_are_the_hops() {
        let r = route();
        for (algo, phase) in ALGOS.iter().flat_map(|&a| [(a, Phase::Dispatch), (a, Phase::Combine)]) {
            let mut sent: BTreeMap<(u32, u32), f64> = BTreeMap::new();
            for m in rounds(&r, algo, phase).into_iter().flatten() {
                *sent.entry((m.from, m.to)).or_default() += m.rows.len() as f64;
            }
            let mut planned: BTreeMap<(u32, u32), f64> = BTreeMap::new();
            for hop in exchange::hops(&r, algo, phase).into_iter().filter(|h| h.crosses() && h.rows > 0.0) {
                *planned.entry((hop.from, hop.to)).or_default() += hop.rows;
            }
            assert_eq!(sent, planned, "{algo:?} {phase:?}");
        }
    }
}
