//! How a whole collective becomes rounds of hops, and how long it takes.
//!
//! [`rounds`] are the hops of `exec`, and of ranks that are threads of a CPU; on GPUs `cost` takes the closed forms of
//! [`nccl`], and `sim` the flows of [`streams`]. Members are named by their position in the group. A payload is cut into
//! n near-equal parts, see [`part`].

pub mod count;
pub mod exchange;
pub mod forward;
pub mod nccl;
pub mod pairs;
pub mod pairwise;
pub mod pat;
pub mod ring;
pub mod streams;
pub mod tree;
pub mod wires;

use crate::plan::CollectiveKind;
use std::ops::Range;

pub use nccl::{Choice, Comm, LinkTime, Shared, channels_between, choices, chosen, collective, collective_by, p2p};

/// An operation among members, as nccl-tests has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Whole(CollectiveKind),
    /// Data go from the first member to all.
    Broadcast,
    /// Data go from every member to the next.
    SendRecv,
}

impl Operation {
    /// Bus bandwidth over algorithm bandwidth among `n` members: the factor that makes figures of different `n` alike
    /// (nccl-tests, doc/PERFORMANCE.md).
    pub fn bus_factor(self, n: f64) -> f64 {
        match self {
            Operation::Whole(CollectiveKind::AllReduce) => 2.0 * (n - 1.0) / n,
            Operation::Whole(_) => (n - 1.0) / n,
            Operation::Broadcast | Operation::SendRecv => 1.0,
        }
    }
}

/// The pattern by which members send to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    Ring,
    /// Chains inside nodes, two binary trees between them.
    Tree,
    /// The switch of a node adds up, for members in one node.
    Nvls,
    /// Switches add up inside nodes, trees between them.
    NvlsTree,
    /// Every member sends to every other.
    Pairwise,
    /// Members 1, 2, 4, .. apart, the farthest first: NCCL's parallel aggregated trees, among nodes of which each has one
    /// member.
    Pat,
    /// Rings inside nodes, then rings of equal ranks between nodes.
    Hierarchical,
}

impl Algorithm {
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::Nvls => "nvls",
            Algorithm::NvlsTree => "nvls-tree",
            Algorithm::Pairwise => "pairwise",
            Algorithm::Pat => "pat",
            Algorithm::Hierarchical => "hierarchical",
        }
    }
}

/// NCCL's protocol: how data that have arrived are told from those that have not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// A flag with every 4 bytes of data: lines of 8.
    Ll,
    /// A flag with every 120 bytes of data: lines of 128.
    Ll128,
    /// A flag with every chunk.
    Simple,
}

impl Protocol {
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Ll => "LL",
            Protocol::Ll128 => "LL128",
            Protocol::Simple => "Simple",
        }
    }
}

/// One message of a round.
///
/// In a ring `part` is a part of the full buffer: the destination of an all-gather, the source of a
/// reduce-scatter, either of an all-reduce. In an all-to-all it is the part of the sender's source, which
/// lands in part `from` of the receiver's destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hop {
    pub from: usize,
    pub to: usize,
    pub part: usize,
    /// Whether the receiver adds what arrives to what it has.
    pub reduce: bool,
}

/// The rounds of a collective among `n` members. Hops of a round are independent of each other; a round
/// uses what the rounds before it brought.
///
/// * all_reduce: every member starts with its own addend and ends with the sum.
/// * reduce_scatter: starts the same, member i ends with part i of the sum.
/// * all_gather: member i starts with part i in its destination, all end with all parts.
/// * all_to_all: the part of the sender for itself is a local copy, not a hop.
pub fn rounds(kind: CollectiveKind, n: usize) -> Vec<Vec<Hop>> {
    match kind {
        CollectiveKind::AllReduce => {
            let mut rounds = ring::reduce_scatter(n);
            rounds.extend(ring::all_gather(n));
            rounds
        }
        CollectiveKind::ReduceScatter => ring::reduce_scatter(n),
        CollectiveKind::AllGather => ring::all_gather(n),
        CollectiveKind::AllToAll => pairwise::all_to_all(n),
    }
}

/// Part `i` of `n` near-equal parts of `len`.
pub fn part(len: u64, i: usize, n: usize) -> Range<u64> {
    let at = |i: usize| (u128::from(len) * i as u128 / n as u128) as u64;
    at(i)..at(i + 1)
}

/// Bytes that the member at `position` sends. `payload` are the bytes of the full buffer: the whole result
/// of an all-gather, the whole source of a reduce-scatter, one member's source of an all-to-all.
pub fn sent_bytes(kind: CollectiveKind, n: usize, position: usize, payload: u64) -> u64 {
    let hops = rounds(kind, n).into_iter().flatten().filter(|hop| hop.from == position);
    hops.map(|hop| part(payload, hop.part, n)).map(|r| r.end - r.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use CollectiveKind::*;

    const LEN: u64 = 23;

    /// Member `m`'s element `i`: sums of different members differ.
    fn element(m: usize, i: u64) -> u64 {
        10u64.pow(m as u32) * (i + 1)
    }

    fn source(m: usize) -> Vec<u64> {
        (0..LEN).map(|i| element(m, i)).collect()
    }

    /// Plays the rounds of a ring on buffers that are both source and destination.
    fn play_ring(kind: CollectiveKind, mut bufs: Vec<Vec<u64>>) -> Vec<Vec<u64>> {
        let n = bufs.len();
        for round in rounds(kind, n) {
            let before = bufs.clone();
            for hop in round {
                for i in part(LEN, hop.part, n) {
                    let sent = before[hop.from][i as usize];
                    let at = &mut bufs[hop.to][i as usize];
                    *at = if hop.reduce { *at + sent } else { sent };
                }
            }
        }
        bufs
    }

    #[test]
    fn the_rounds_compute_what_their_names_say() {
        for n in 1..=7 {
            let sources: Vec<_> = (0..n).map(source).collect();
            let sum: Vec<u64> = (0..LEN).map(|i| (0..n).map(|m| element(m, i)).sum()).collect();
            assert!(play_ring(AllReduce, sources.clone()).iter().all(|b| *b == sum));
            for (m, buf) in play_ring(ReduceScatter, sources).iter().enumerate() {
                let own = part(LEN, m, n);
                let own = own.start as usize..own.end as usize;
                assert_eq!(buf[own.clone()], sum[own]);
            }
            let whole = source(0);
            let own =
                |m: usize| (0..LEN).map(|i| if part(LEN, m, n).contains(&i) { whole[i as usize] } else { 0 }).collect();
            let parts = (0..n).map(own).collect();
            assert!(play_ring(AllGather, parts).iter().all(|b| *b == whole));
        }
    }

    #[test]
    fn all_to_all_transposes() {
        for n in 1..=7 {
            let mut got = vec![vec![None; n]; n];
            for hop in rounds(AllToAll, n).into_iter().flatten() {
                assert_eq!((hop.part, hop.reduce), (hop.to, false));
                assert_eq!(got[hop.to][hop.from].replace((hop.from, hop.part)), None);
            }
            for (to, row) in got.iter().enumerate() {
                for (from, cell) in row.iter().enumerate() {
                    assert_eq!(*cell, (from != to).then_some((from, to)));
                }
            }
        }
    }

    #[test]
    fn a_member_sends_and_receives_once_a_round() {
        for kind in [AllReduce, ReduceScatter, AllGather, AllToAll] {
            for round in rounds(kind, 6) {
                let mut ends: Vec<_> = round.iter().map(|h| h.from).collect();
                ends.sort();
                assert_eq!(ends, [0, 1, 2, 3, 4, 5]);
                ends = round.iter().map(|h| h.to).collect();
                ends.sort();
                assert_eq!(ends, [0, 1, 2, 3, 4, 5]);
            }
        }
    }

    #[test]
    fn volumes_are_the_known_fractions() {
        for n in 1..=7usize {
            let payload = 5040 * 4;
            let once = payload * (n as u64 - 1) / n as u64;
            for position in 0..n {
                assert_eq!(sent_bytes(AllReduce, n, position, payload), 2 * once);
                for kind in [ReduceScatter, AllGather, AllToAll] {
                    assert_eq!(sent_bytes(kind, n, position, payload), once);
                }
            }
            // Uneven parts: what all send together is exact still.
            let total: u64 = (0..n).map(|p| sent_bytes(AllReduce, n, p, 23)).sum();
            assert_eq!(total, 2 * 23 * (n as u64 - 1));
        }
    }
}
