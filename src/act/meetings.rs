//! Who meets whom, and how long the bytes of a meeting are under way.

use super::ports::{RECV, SEND, port};
use super::{Acts, ctas, picoseconds};
use crate::cluster::{Cluster, Tier};
use crate::collective::{self, Algorithm, Comm, LinkTime, Shared};
use crate::fold::{Fold, crossing, over_a_wire};
use crate::plan::link::Line;
use crate::plan::*;
use crate::units::Bytes;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// How long the bytes of a meeting are under way, ps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Transit {
    pub latency: u64,
    /// How long ports are busy if nothing else uses them.
    pub transfer: u64,
    /// The part of the ports that the bytes fill if nothing else uses them.
    pub fills: f64,
}

impl Transit {
    pub fn of(time: &LinkTime) -> Transit {
        Transit { latency: picoseconds(time.latency), transfer: picoseconds(time.transfer), fills: time.fills }
    }
}

/// A message of a transfer, as the class that sends it sees it.
#[derive(Clone, Copy)]
pub struct Hop {
    /// How long it is on its way, with the turns of others to its peer.
    pub time: LinkTime,
    /// How long it takes by itself.
    pub own: LinkTime,
    pub tier: Tier,
    pub peer: u32,
}

/// One member's part of a collective or of an exchange.
pub(super) struct Part {
    pub(super) time: LinkTime,
    /// Bytes of the full buffer; of an exchange, those that the member sends between nodes.
    pub(super) bytes: u64,
    /// Bytes that it sends inside nodes, and between them.
    pub(super) sent: [f64; 2],
    /// SMs that its kernels hold.
    pub(super) ctas: u16,
}

/// The members of a communicator around one rank.
pub struct Gang {
    pub members: Vec<u32>,
    /// The classes of the members, ascending, each once.
    pub classes: Vec<u32>,
    /// The nodes of the members, and how many members are on each.
    nodes: Vec<(u32, u32)>,
    /// Shares inside nodes and between nodes: of the hops between members in rank order around a ring, and of all
    /// ordered pairs. What a member sends is counted as the mean over the group, since which member sits at the edge of
    /// a node is an accident of numbering.
    pub(super) ring: [f64; 2],
    pub(super) pairs: [f64; 2],
}

impl Gang {
    fn of(cluster: &Cluster, fold: &Fold, members: Vec<u32>) -> Gang {
        let mut classes: Vec<u32> = members.iter().map(|&m| fold.class_of[m as usize]).collect();
        classes.sort_unstable();
        classes.dedup();
        let nodes = cluster.on_nodes(&members);
        let n = members.len() as f64;
        // Members are in rank order and nodes are filled in rank order: a ring leaves each node once.
        let leaves = if nodes.len() > 1 { nodes.len() as f64 / n } else { 0.0 };
        let pairs = nodes.iter().map(|&(_, on)| f64::from(on) * (f64::from(on) - 1.0)).sum::<f64>();
        let inside = if n > 1.0 { pairs / (n * (n - 1.0)) } else { 1.0 };
        Gang { members, classes, nodes, ring: [1.0 - leaves, leaves], pairs: [inside, 1.0 - inside] }
    }

    /// The ports through which a member on `node` reaches the others.
    pub(super) fn ports(&self, node: u32) -> u8 {
        let beside = self.nodes.iter().any(|&(at, on)| at == node && on > 1);
        let beyond = self.nodes.iter().any(|&(at, _)| at != node);
        let ways = |reached: bool, tier| if reached { port(tier, SEND | RECV) } else { 0 };
        ways(beside, Tier::ScaleUp) | ways(beyond, Tier::ScaleOut)
    }
}

/// The way of a class's message: whom it goes to, over what, and with how many others it shares the link.
pub(super) struct Route {
    pub(super) peer: u32,
    pub(super) tier: Tier,
    pub(super) shared: Shared,
}

impl<'a> Acts<'a> {
    pub(super) fn group(&self, lane: u16) -> &'a Group {
        self.plan.lanes[lane as usize].group().expect("check: communication runs on communicators")
    }

    /// The messages of `bytes` that the members of a lane send `by` on, by class, each in one group with others to the
    /// same peer, `all` bytes together.
    pub fn hops(&mut self, lane: u16, by: i32, [bytes, all]: [u64; 2]) -> Rc<[Hop]> {
        if let Some(known) = self.hops.get(&(lane, by, [bytes, all])) {
            return known.clone();
        }
        let (machine, gangs) = (self.machine, self.gangs(lane));
        let (routes, moved) = (self.routes(lane, by), Bytes::new(bytes as f64));
        let hop = |((&rank, route), gang): ((&u32, &Route), &Rc<Gang>)| {
            let comm = Comm { size: gang.members.len() as u32, nodes: gang.nodes.len() as u32 };
            let pair = [rank, route.peer];
            let time = collective::p2p(machine.cluster, machine.stack, moved, pair, comm, route.shared);
            let in_turns = all > bytes && route.tier == Tier::ScaleOut;
            let turns = if in_turns { time.in_turns(all as f64 / bytes as f64) } else { time };
            Hop { time: turns, own: time, tier: route.tier, peer: route.peer }
        };
        let hops = self.fold.representatives.iter().zip(routes.iter()).zip(gangs.iter()).map(hop);
        let hops: Rc<[Hop]> = hops.collect();
        self.hops.insert((lane, by, [bytes, all]), hops.clone());
        hops
    }

    pub(super) fn routes(&mut self, lane: u16, by: i32) -> Rc<[Route]> {
        if let Some(known) = self.known.routes.get(&(lane, by)) {
            return known.clone();
        }
        let (group, cluster, plan) = (self.group(lane), self.machine.cluster, self.plan);
        let wired = over_a_wire(plan, cluster, group, by);
        let step = group.step(&plan.views, by);
        let leaving = cluster.leaving((0..plan.ranks()).map(|rank| [rank, step.of(rank)]));
        let route = |&rank: &u32| {
            let peer = group.neighbour(&plan.views, rank, by);
            let tier = cluster.tier(rank, peer);
            let sharing = if tier == Tier::ScaleOut { crossing(plan, cluster, group, by, rank).max(1) } else { wired };
            let uplinks = cluster.uplink_share_of_send([rank, peer], &leaving);
            Route { peer, tier, shared: Shared { flows: f64::from(sharing), uplinks } }
        };
        let routes: Rc<[Route]> = self.fold.representatives.iter().map(route).collect();
        self.known.routes.insert((lane, by), routes.clone());
        routes
    }

    /// The communicators of a lane, by class.
    pub fn gangs(&mut self, lane: u16) -> Rc<[Rc<Gang>]> {
        if let Some(known) = self.known.gangs.get(&lane) {
            return known.clone();
        }
        let (group, mut by_first) = (self.group(lane), FxHashMap::<u32, Rc<Gang>>::default());
        let gang = |&rank: &u32| {
            let members = group.members(&self.plan.views, rank);
            by_first
                .entry(members[0])
                .or_insert_with(|| Rc::new(Gang::of(self.machine.cluster, self.fold, members)))
                .clone()
        };
        let gangs: Rc<[Rc<Gang>]> = self.fold.representatives.iter().map(gang).collect();
        self.known.gangs.insert(lane, gangs.clone());
        gangs
    }

    /// A member's part of a collective. Its bytes are those of the full buffer.
    pub(super) fn gathered(&mut self, line: &Line, node: usize, kind: CollectiveKind, gang: &Gang) -> Part {
        let spliced = &line.nodes[node];
        let OpKind::Collective { wire, engine, .. } = &spliced.op.kind else { unreachable!("a collective") };
        let ends = [line.reads(node)[0], line.writes(node)[0]].map(|place| place.sized(self.plan));
        let bytes = wire.full_bytes(self.plan, ends);
        let (time, sent) = self.link(kind, spliced.lane, gang, bytes);
        let channels = collective::channels_between(self.machine.cluster, kind, gang.nodes.len());
        Part { time, bytes, sent, ctas: ctas(*engine).min(channels) }
    }

    /// How long a collective takes, and the bytes that a member sends inside nodes and between them, on average over the
    /// group.
    pub fn link(&mut self, kind: CollectiveKind, lane: u16, gang: &Gang, bytes: u64) -> (LinkTime, [f64; 2]) {
        let (cluster, stack) = (self.machine.cluster, self.machine.stack);
        let found = || collective::collective_by(cluster, stack, kind, &gang.members, Bytes::new(bytes as f64));
        let key = (kind, lane, gang.members[0], bytes);
        let (time, algorithm) = *self.known.links.entry(key).or_insert_with(found);
        (time, sent(kind, algorithm, gang, bytes as f64))
    }
}

/// Bytes of a send, inside a node and between nodes.
pub fn over(tier: Tier, bytes: u64) -> [f64; 2] {
    match tier {
        Tier::ScaleOut => [0.0, bytes as f64],
        Tier::ScaleUp | Tier::Local => [bytes as f64, 0.0],
    }
}

/// Bytes that a member sends inside nodes and between them, on average over the group: what
/// [`streams`](crate::collective::streams) puts on links, added up.
fn sent(kind: CollectiveKind, algorithm: Algorithm, gang: &Gang, bytes: f64) -> [f64; 2] {
    let n = gang.members.len() as f64;
    let nodes = gang.nodes.len() as f64;
    // Up the chain of a node and down again, or into the switch and out of it; then two trees of the nodes.
    let trees = 2.0 * (nodes - 1.0) / n;
    let (passes, shares) = match (kind, algorithm) {
        (CollectiveKind::AllReduce, Algorithm::Tree) => return [2.0 * (n - nodes) / n, trees].map(|part| part * bytes),
        (CollectiveKind::AllReduce, Algorithm::Nvls | Algorithm::NvlsTree) => {
            return [(n + nodes) / n, trees].map(|part| part * bytes);
        }
        (CollectiveKind::AllReduce, _) => (2.0, gang.ring),
        (CollectiveKind::ReduceScatter | CollectiveKind::AllGather, _) => (1.0, gang.ring),
        (CollectiveKind::AllToAll, _) => (1.0, gang.pairs),
    };
    shares.map(|share| share * passes * bytes * (n - 1.0) / n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Link;
    use crate::collective::Operation;
    use crate::collective::streams::{loads, streams};
    use crate::fold;
    use crate::spec::{ClusterSpec, GpuSpec};

    /// The bytes of the formulas are those that flows put on ports and NICs.
    #[test]
    fn bytes_are_those_of_the_flows() {
        let gpu = GpuSpec::find("h100-sxm5").unwrap();
        let cluster = Cluster::new(&ClusterSpec::find("dgx-h100").unwrap(), &gpu, 32).unwrap();
        let groups: [Vec<u32>; 4] =
            [(0..32).collect(), (0..8).collect(), (0..32).step_by(8).collect(), (0..32).step_by(2).collect()];
        for members in groups {
            let gang = Gang::of(&cluster, &fold::trivial(32), members.clone());
            for (kind, algorithm) in [
                (CollectiveKind::AllReduce, Algorithm::Ring),
                (CollectiveKind::AllReduce, Algorithm::Tree),
                (CollectiveKind::AllReduce, Algorithm::NvlsTree),
                (CollectiveKind::AllGather, Algorithm::Ring),
                (CollectiveKind::ReduceScatter, Algorithm::Pat),
                (CollectiveKind::AllToAll, Algorithm::Pairwise),
            ] {
                // Of nodes with one member each.
                if algorithm == Algorithm::Pat && gang.nodes.len() < members.len() {
                    continue;
                }
                let flows = loads(&streams(&cluster, algorithm, Operation::Whole(kind), &members, 1.0));
                let of = |is: fn(&Link) -> bool| {
                    flows.iter().filter(|(link, _)| is(link)).map(|(_, bytes)| bytes).sum::<f64>()
                        / members.len() as f64
                };
                let on_links =
                    [of(|link| matches!(link, Link::Out(_))), of(|link| matches!(link, Link::NicOut { .. }))];
                let told = sent(kind, algorithm, &gang, 1.0);
                for (told, counted) in told.iter().zip(on_links) {
                    assert!((told - counted).abs() < 1e-9, "{kind:?} {algorithm:?} {members:?}: {told} {counted}");
                }
            }
        }
    }
}
