//! How a whole exchange of a mixture-of-experts layer becomes hops, and how long it takes.
//!
//! [`hops`] is the one lowering that all interpreters share: who sends how many rows to whom. [`time`] takes the
//! same rows; an exchange is a stream of chunks, so that its time is a maximum over what the rows cross, by rank, or a sum
//! where one call waits for another ([`hierarchical`]).
//!
//! Bytes are counted two ways that published tables mix up. *Logical*: all rows, those that stay on their own rank
//! or node as well. *Real*: those that cross, with the headers that a library sends along.

pub mod allgather;
mod aside;
pub mod broadcast;
pub mod buffers;
pub mod deepep_ll;
pub mod deepep_normal;
pub mod deepep_v2;
pub mod hierarchical;
pub mod hybrid_ep;
mod message;
pub mod nccl_all_to_all;
mod streamed;
mod traffic;

pub use aside::{Aside, aside, aside_of_plan, runs_on, unmeant};
pub use buffers::{Buffers, buffers};
pub use message::message_row;
pub use streamed::library;
pub use traffic::{Flow, Traffic, traffic, traffic_of};

use super::{nccl, wires};
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::plan::route::{ExchangeAlgo, Phase, Route, Rows};
use crate::spec::{ExchangeSpec, Provenance, StackSpec, Transport};
use crate::units::Seconds;

/// The links that a hop is meant to cross. A hop to the sender itself crosses nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Via {
    /// The links inside a node.
    Links,
    Network,
}

/// Rows on their way from one rank of the group to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hop {
    /// Rows of stage 1 are those that stage 0 brought; they go on chunk by chunk, without waiting for all of stage 0.
    pub stage: u8,
    pub via: Via,
    pub from: u32,
    pub to: u32,
    pub rows: Rows,
}

impl Hop {
    /// Whether the rows leave their rank.
    pub fn crosses(&self) -> bool {
        self.from != self.to
    }

    /// The hop of the way back, in an exchange of `stages` stages.
    fn reversed(self, stages: u8) -> Hop {
        Hop { stage: stages - 1 - self.stage, from: self.to, to: self.from, ..self }
    }
}

/// The links between two ranks of the group.
fn via(route: &Route, from: u32, to: u32) -> Via {
    if route.node_of(from) == route.node_of(to) { Via::Links } else { Via::Network }
}

/// The rank of `node` that has the same place in it as `rank` has in its own.
pub fn same_place(route: &Route, rank: u32, node: u32) -> u32 {
    node * route.node + rank % route.node
}

/// The hops that `rank` sends in a dispatch.
pub fn sent_by(route: &Route, algo: ExchangeAlgo, rank: u32) -> Vec<Hop> {
    match algo {
        ExchangeAlgo::Nccl => nccl_all_to_all::hops(route, rank),
        ExchangeAlgo::AllGather | ExchangeAlgo::Broadcast => allgather::hops(route, rank),
        ExchangeAlgo::DeepepNormal { .. } => deepep_normal::hops(route, rank),
        ExchangeAlgo::DeepepLowLatency { .. } => deepep_ll::hops(route, rank),
        ExchangeAlgo::DeepepV2Hybrid { .. } => deepep_v2::hybrid(route, rank),
        ExchangeAlgo::DeepepV2Direct { .. } => deepep_v2::direct(route, rank),
        ExchangeAlgo::HybridEp { .. } => hybrid_ep::hops(route, rank),
        ExchangeAlgo::Hierarchical => hierarchical::hops(route, rank),
    }
}

/// Stages of an exchange: 2 where rows wait on a rank between source and expert, else 1.
fn stages(route: &Route, algo: ExchangeAlgo) -> u8 {
    let direct = matches!(
        algo,
        ExchangeAlgo::Nccl | ExchangeAlgo::DeepepLowLatency { .. } | ExchangeAlgo::DeepepV2Direct { .. }
    );
    if direct || route.nodes() == 1 { 1 } else { 2 }
}

/// All hops of an exchange, by stage and sender. A combine is the dispatch backwards: rows that fanned out from a rank
/// are summed up there.
pub fn hops(route: &Route, algo: ExchangeAlgo, phase: Phase) -> Vec<Hop> {
    let mut all: Vec<Hop> = (0..route.ranks).flat_map(|rank| sent_by(route, algo, rank)).collect();
    if phase == Phase::Combine {
        let stages = stages(route, algo);
        all.iter_mut().for_each(|hop| *hop = hop.reversed(stages));
    }
    all.sort_by_key(|hop| (hop.stage, hop.from, hop.to));
    all
}

/// The time of one rank's part of an exchange, by what it is spent on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RankTime {
    /// Before the first row; for two calls, before the first row of each.
    pub start: Seconds,
    /// Counting the rows, and telling the counts to others.
    pub notify: Seconds,
    /// The rows' time, by what they cross: network, links, SMs.
    pub network: Seconds,
    pub links: Seconds,
    pub sms: Seconds,
    /// Behind the last row.
    pub finish: Seconds,
    /// Whether all rows have crossed the network before the first crosses the links, or the other way round, rather
    /// than in a stream of chunks.
    pub in_turn: bool,
}

/// What sets the pace of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limiter {
    Latency,
    Network,
    Links,
    Sms,
}

impl Limiter {
    pub fn name(self) -> &'static str {
        match self {
            Limiter::Latency => "latency",
            Limiter::Network => "network",
            Limiter::Links => "links",
            Limiter::Sms => "SMs",
        }
    }
}

impl RankTime {
    pub fn rows(&self) -> Seconds {
        let crossing = if self.in_turn { self.network + self.links } else { self.network.max(self.links) };
        crossing.max(self.sms)
    }

    pub fn total(&self) -> Seconds {
        self.start + self.notify + self.rows() + self.finish
    }

    pub fn limiter(&self) -> Limiter {
        let paces = [(self.network, Limiter::Network), (self.links, Limiter::Links), (self.sms, Limiter::Sms)];
        let latency = (self.start + self.notify, Limiter::Latency);
        let later = |a: (Seconds, Limiter), b: (Seconds, Limiter)| if b.0 > a.0 { b } else { a };
        paces.into_iter().fold(latency, later).1
    }
}

/// The estimate of how long an exchange takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The times of each rank of the group; one entry for all ranks where they are alike.
    ranks: Vec<RankTime>,
    /// SMs that the exchange's kernels hold while rows are under way.
    pub sms: u32,
    pub provenance: Provenance,
    /// Relative standard deviation of the time.
    pub rel_sd: f64,
}

impl Estimate {
    pub fn rank(&self, rank: u32) -> &RankTime {
        self.ranks.get(rank as usize).unwrap_or(&self.ranks[0])
    }

    /// The rank that ends last.
    pub fn slowest(&self) -> &RankTime {
        let total = |r: &&RankTime| r.total().value();
        self.ranks.iter().max_by(|a, b| total(a).total_cmp(&total(b))).expect("a group has ranks")
    }

    /// Mean time over the ranks.
    pub fn mean(&self) -> Seconds {
        let sum: f64 = self.ranks.iter().map(|r| r.total().value()).sum();
        Seconds::new(sum / self.ranks.len() as f64)
    }
}

/// What [`time`] has to know of an exchange beside its algorithm.
pub struct Setting<'a> {
    pub route: &'a Route,
    pub phase: Phase,
    pub row_bytes: u64,
    /// The ranks of the cluster, in the order of the group.
    pub members: &'a [u32],
    pub cluster: &'a Cluster,
    pub stack: &'a StackSpec,
    /// A library that moves rows the same way, whose constants to use in place of the algorithm's own; `None`: its own.
    pub library: Option<&'static ExchangeSpec>,
}

/// How long an exchange takes. Every rank's time is counted from when the last one has started. Errors: members that do
/// not fit the route, a route over nodes without a network, a GPU that the library has no rule for.
pub fn time(at: &Setting, algo: ExchangeAlgo) -> Result<Estimate> {
    let (route, cluster) = (at.route, at.cluster);
    if at.members.len() != route.ranks as usize {
        let why = format!("an exchange among {} ranks on {} members", route.ranks, at.members.len());
        return Err(Error::plan(why));
    }
    if route.nodes() > 1 && cluster.spec.scale_out.is_none() {
        let why = format!("a route over {} nodes on {}, which has no network", route.nodes(), cluster.spec.name);
        return Err(Error::spec("route", "node", why));
    }
    let all = traffic_of(at, algo);
    let mut found = match algo {
        ExchangeAlgo::Nccl => nccl_all_to_all::time(at, &all),
        ExchangeAlgo::AllGather => allgather::time(at),
        ExchangeAlgo::Broadcast => broadcast::time(at),
        ExchangeAlgo::Hierarchical => hierarchical::time(at, &all),
        ExchangeAlgo::DeepepNormal { sms } => deepep_normal::time(at, &all, sms),
        ExchangeAlgo::DeepepLowLatency { hook, .. } => deepep_ll::time(at, &all, hook),
        ExchangeAlgo::DeepepV2Hybrid { sms } | ExchangeAlgo::DeepepV2Direct { sms } => deepep_v2::time(at, &all, sms)?,
        ExchangeAlgo::HybridEp { sms } => hybrid_ep::time(at, &all, sms),
    };
    // Rows of a list load wires as if they were spread evenly: as many rows as there are on average.
    let sent: f64 = all.iter().map(|rank| rank.network.sent).sum();
    let busy = wires::busy_with_rows(cluster, at.members, sent / all.len() as f64 * at.row_bytes as f64);
    found.ranks.iter_mut().for_each(|rank| rank.network = rank.network.max(busy));
    Ok(found)
}

impl Setting<'_> {
    /// The library whose constants to use: `own` unless another one was asked for.
    fn library(&self, own: &str) -> &'static ExchangeSpec {
        let out = self.cluster.spec.scale_out.as_ref().filter(|_| self.route.nodes() > 1);
        let over = |transport| if transport == Transport::Efa { over_efa(own) } else { own };
        self.library.unwrap_or_else(|| library(out.map_or(own, |out| over(out.transport))))
    }
}

/// The library whose constants hold where rows of library `own` go over EFA, and a thread of the CPU posts them: for
/// DeepEP V1's normal kernels it is UCCL-EP, which has the same kernels with such a thread.
fn over_efa(own: &str) -> &str {
    match own {
        "deepep-v1-normal" => "uccl-ep-efa",
        "deepep-v1-ll" => "deepep-v1-ll-efa",
        "deepep-v2" => "deepep-v2-efa",
        own => own,
    }
}

#[cfg(test)]
mod tests;
