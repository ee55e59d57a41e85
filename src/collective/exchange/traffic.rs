//! The rows that each rank sends and receives.

use super::{Hop, Setting, Via, hops, nccl_all_to_all, sent_by};
use crate::plan::route::{ExchangeAlgo, Phase, Route, Rows};

/// Rows of one rank over one kind of link.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Flow {
    /// Rows that cross the links.
    pub sent: Rows,
    pub received: Rows,
    /// Rows that stay on their own rank.
    pub kept: Rows,
}

impl Flow {
    /// Rows that a library counts as received: those that crossed and those that stayed.
    pub fn logical(&self) -> Rows {
        self.received + self.kept
    }

    /// Rows in the busier of the two directions.
    pub fn busier(&self) -> Rows {
        self.sent.max(self.received)
    }

    fn add(&mut self, other: Flow) {
        self.sent += other.sent;
        self.received += other.received;
        self.kept += other.kept;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Traffic {
    pub links: Flow,
    pub network: Flow,
}

impl Traffic {
    fn of(&mut self, via: Via) -> &mut Flow {
        match via {
            Via::Links => &mut self.links,
            Via::Network => &mut self.network,
        }
    }

    fn sends(&mut self, hop: &Hop) {
        let flow = if hop.crosses() {
            Flow { sent: hop.rows, ..Flow::default() }
        } else {
            Flow { kept: hop.rows, ..Flow::default() }
        };
        self.of(hop.via).add(flow);
    }

    fn receives(&mut self, hop: &Hop) {
        if hop.crosses() {
            self.of(hop.via).received += hop.rows;
        }
    }
}

/// The traffic of each rank; one entry for all ranks where they are alike, of which each then receives as many rows as
/// it sends.
pub fn traffic(route: &Route, algo: ExchangeAlgo, phase: Phase) -> Vec<Traffic> {
    if !route.is_listed() {
        return vec![alike(&sent_by(route, algo, 0))];
    }
    let mut all = vec![Traffic::default(); route.ranks as usize];
    for hop in hops(route, algo, phase) {
        all[hop.from as usize].sends(&hop);
        all[hop.to as usize].receives(&hop);
    }
    all
}

/// The same on the nodes of a cluster. Where they cut the group, those of the route are parts that none of them cuts, and
/// a library that has nodes of its own takes them so; what goes straight to its rank crosses what lies between.
pub fn traffic_of(at: &Setting, algo: ExchangeAlgo) -> Vec<Traffic> {
    match algo {
        ExchangeAlgo::Nccl if is_cut(at) => nccl_all_to_all::where_ranks_are(at),
        _ => traffic(at.route, algo, at.phase),
    }
}

/// Whether some ranks of the group lie in one node that are not in one node of the route.
fn is_cut(at: &Setting) -> bool {
    let node = |rank: &u32| at.cluster.node_of(*rank);
    at.route.nodes() > 1 && at.members.chunk_by(|a, b| node(a) == node(b)).any(|of| of.len() != at.route.node as usize)
}

fn alike(hops: &[Hop]) -> Traffic {
    let mut one = Traffic::default();
    for hop in hops {
        one.sends(hop);
        one.receives(hop);
    }
    one
}
