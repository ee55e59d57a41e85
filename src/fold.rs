//! Ranks into classes by symmetry: ranks of one class do the same thing at the same time.
//!
//! Colour refinement. A rank's first colour is its program and its coordinates on axes that decide how
//! much it computes. Then ranks of one colour are told apart by the colours of whom they talk to and by
//! the links in between, until nothing changes. [`trivial`] puts every rank alone and is the oracle.

use crate::cluster::{Cluster, Link, Tier};
use crate::collective::nccl::tree_uplinks;
use crate::plan::rows::{place_of, replica_of};
use crate::plan::{Axis, Group, OpKind, Plan};
use rustc_hash::{FxHashMap, FxHasher};
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fold {
    /// A rank of each class, ascending.
    pub representatives: Vec<u32>,
    pub multiplicity: Vec<u32>,
    pub class_of: Vec<u32>,
}

/// Every rank a class of its own.
pub fn trivial(ranks: u32) -> Fold {
    Fold {
        representatives: (0..ranks).collect(),
        multiplicity: vec![1; ranks as usize],
        class_of: (0..ranks).collect(),
    }
}

/// The coarsest classes that refinement finds.
pub fn refine(plan: &Plan, cluster: &Cluster) -> Fold {
    refine_marked(plan, cluster, &[])
}

/// As [`refine`], where ranks with different marks are different to begin with; without marks all are alike.
pub fn refine_marked(plan: &Plan, cluster: &Cluster, marks: &[u64]) -> Fold {
    let talks = Talks::of(plan);
    let axes = work_axes(plan);
    let n = plan.ranks();
    let narrow = talks.narrow(plan, cluster);
    let first = |r: u32| {
        let at: Vec<u32> = axes.iter().map(|&(view, axis)| plan.views[view as usize].coord(r, axis)).collect();
        // Listed choices give every rank of experts rows of its own.
        let listed = plan.routes.iter().any(|route| route.is_listed());
        let replica = plan.routes_by_replica.then(|| replica_of(&plan.views, r));
        let place = listed.then(|| place_of(&plan.views, r));
        let own = (marks.get(r as usize), narrow.get(r as usize));
        colour(&(plan.program_of(r), at, place, replica, own))
    };
    let mut colours: Vec<u64> = (0..n).map(first).collect();
    let mut count = distinct(&colours);
    let around = Around::of(&talks, plan, cluster);
    loop {
        let seen = around.seen(&colours);
        let next: Vec<u64> = colours.iter().zip(&seen).map(|(c, s)| colour(&(c, s))).collect();
        let now = distinct(&next);
        colours = next;
        if now == count {
            return classes(&colours);
        }
        count = now;
    }
}

fn colour(of: &impl Hash) -> u64 {
    let mut h = FxHasher::default();
    of.hash(&mut h);
    h.finish()
}

fn distinct(colours: &[u64]) -> usize {
    let mut known = colours.to_vec();
    known.sort_unstable();
    known.dedup();
    known.len()
}

fn classes(colours: &[u64]) -> Fold {
    let mut fold = Fold { representatives: vec![], multiplicity: vec![], class_of: vec![] };
    let mut known: FxHashMap<u64, u32> = FxHashMap::default();
    for (rank, &c) in colours.iter().enumerate() {
        let class = *known.entry(c).or_insert_with(|| {
            fold.representatives.push(rank as u32);
            fold.multiplicity.push(0);
            fold.representatives.len() as u32 - 1
        });
        fold.multiplicity[class as usize] += 1;
        fold.class_of.push(class);
    }
    fold
}

/// Axes along which a mask gives ranks different work.
fn work_axes(plan: &Plan) -> BTreeSet<(u8, Axis)> {
    let masks = plan.kernels().filter_map(|k| k.mask());
    masks.flat_map(|m| [&m.q, &m.kv]).flat_map(|s| s.order.iter().map(|o| (s.view, o.0))).collect()
}

/// The distinct ways in which ranks talk: a group and a distance for legs, a group for collectives.
struct Talks {
    hops: BTreeSet<(Group, i32)>,
    groups: BTreeSet<Group>,
}

impl Talks {
    fn of(plan: &Plan) -> Talks {
        // By lane first: there are many legs, and few communicators.
        let (mut hops, mut whole) = (BTreeSet::new(), BTreeSet::new());
        for (lane, op) in plan.ops().filter_map(|(_, op)| Some((op.lane?, op))) {
            match &op.kind {
                OpKind::Transfer { legs, .. } => hops.extend(legs.iter().map(|leg| (lane, leg.by))),
                _ => drop(whole.insert(lane)),
            }
        }
        let group = |lane: u16| plan.lanes[lane as usize].group().cloned();
        Talks {
            hops: hops.into_iter().filter_map(|(lane, by)| Some((group(lane)?, by))).collect(),
            groups: whole.into_iter().filter_map(group).collect(),
        }
    }

    /// Of every rank, what of its ways is narrower than NICs and ports: uplinks of pods, bridges between sockets, links
    /// between packages. Empty where nothing is.
    fn narrow(&self, plan: &Plan, cluster: &Cluster) -> Vec<u64> {
        let up = &cluster.spec.scale_up;
        if cluster.spec.pods.is_empty() && up.sockets.is_none() && up.package.is_none() {
            return vec![];
        }
        let inside = |members: &[u32]| {
            [cluster.bridge(members), cluster.slowest_peer(members)].map(|rate| rate.map_or(0, |r| r.value().to_bits()))
        };
        let way = |members: &[u32]| {
            (cluster.uplink_share(members).to_bits(), cluster.beyond_pods(members).to_bits(), inside(members))
        };
        let mut all: Vec<FxHasher> = vec![FxHasher::default(); plan.ranks() as usize];
        for (group, by) in &self.hops {
            let step = group.step(&plan.views, *by);
            let pair = |rank: u32| [rank, step.of(rank)];
            let leaving = cluster.leaving((0..plan.ranks()).map(pair));
            for (rank, h) in (0..).zip(&mut all) {
                (cluster.uplink_share_of_send(pair(rank), &leaving).to_bits(), inside(&pair(rank))).hash(h);
            }
        }
        for group in &self.groups {
            let mut known = FxHashMap::default();
            for (rank, h) in (0..).zip(&mut all) {
                let first = group.first(&plan.views, rank);
                let whole = |members: Vec<u32>| (way(&members), tree_uplinks(cluster, &members).to_bits());
                known.entry(first).or_insert_with(|| whole(group.members(&plan.views, first))).hash(h);
            }
        }
        all.iter().map(FxHasher::finish).collect()
    }
}

/// Whom every rank sees around it, and over what: all but their colours, which change from round to round.
struct Around {
    /// Of each hop, by rank: the peer, the tier in between, and with how many the rank shares the way.
    hops: Vec<Vec<(u32, Tier, u32)>>,
    /// Of each group, by rank: the number of its communicator, and of the part of that on its node.
    groups: Vec<Vec<[u32; 2]>>,
}

impl Around {
    fn of(talks: &Talks, plan: &Plan, cluster: &Cluster) -> Around {
        let ranks = plan.ranks();
        let hop = |(group, by): &(Group, i32)| {
            let step = group.step(&plan.views, *by);
            let peers: Vec<u32> = (0..ranks).map(|rank| step.of(rank)).collect();
            let nic = |rank| (cluster.node_of(rank), cluster.nic_of(rank));
            let mut crossing: FxHashMap<(u32, u32), u32> = FxHashMap::default();
            for (rank, &peer) in (0..).zip(&peers) {
                if cluster.node_of(peer) != cluster.node_of(rank) {
                    *crossing.entry(nic(rank)).or_default() += 1;
                }
            }
            let sharing = |rank| crossing.get(&nic(rank)).copied().unwrap_or(0);
            (0..).zip(peers).map(|(rank, peer)| (peer, cluster.tier(rank, peer), sharing(rank))).collect()
        };
        let group = |group: &Group| {
            let mut parts: FxHashMap<(u32, u32), u32> = FxHashMap::default();
            let place = |rank: u32| {
                let whole = group.first(&plan.views, rank);
                let next = parts.len() as u32;
                [whole, *parts.entry((whole, cluster.node_of(rank))).or_insert(next)]
            };
            (0..ranks).map(place).collect()
        };
        Around { hops: talks.hops.iter().map(hop).collect(), groups: talks.groups.iter().map(group).collect() }
    }

    /// What every rank sees around it. Who is in a group with it is summed up once a group, so that a round
    /// is linear in the ranks.
    fn seen(&self, colours: &[u64]) -> Vec<u64> {
        let mut all: Vec<FxHasher> = vec![FxHasher::default(); colours.len()];
        for hop in &self.hops {
            for (&(peer, tier, sharing), h) in hop.iter().zip(&mut all) {
                (tier, sharing, colours[peer as usize]).hash(h);
            }
        }
        for group in &self.groups {
            // Sums of mixed colours: equal for equal multisets, whatever the order.
            let mut sums = [vec![0u64; colours.len()], vec![0u64; colours.len()]];
            for (place, c) in group.iter().zip(colours) {
                for (sums, &at) in sums.iter_mut().zip(place) {
                    sums[at as usize] = sums[at as usize].wrapping_add(colour(c));
                }
            }
            let [whole, near] = sums;
            for (&[at, part], h) in group.iter().zip(&mut all) {
                (whole[at as usize], near[part as usize]).hash(h);
            }
        }
        all.iter().map(FxHasher::finish).collect()
    }
}

/// How many of all ranks send over the wire between chips that most of them send over when all do the same hop; 1 where
/// there are no such wires. What is asked of one rank is so of all, as the last of them is waited for.
pub fn over_a_wire(plan: &Plan, cluster: &Cluster, group: &Group, by: i32) -> u32 {
    if cluster.spec.graph.is_none() || cluster.spec.scale_out.is_some() {
        return 1;
    }
    let step = group.step(&plan.views, by);
    let mut sends: FxHashMap<Link, u32> = FxHashMap::default();
    for link in (0..plan.ranks()).flat_map(|rank| cluster.path(rank, step.of(rank)).links) {
        *sends.entry(link).or_default() += 1;
    }
    sends.into_values().max().unwrap_or(1)
}

/// Flows out of a node, as [`Cluster::nic_share`] shares out its NICs, when all ranks do the same hop and every NIC had as
/// many of them as that of `rank`: a GPU sends by the one that is near it, whoever uses the others.
pub fn crossing(plan: &Plan, cluster: &Cluster, group: &Group, by: i32, rank: u32) -> u32 {
    let (node, nic) = (cluster.node_of(rank), cluster.nic_of(rank));
    let step = group.step(&plan.views, by);
    let near = cluster.ranks_on(node).filter(|&r| r < plan.ranks() && cluster.nic_of(r) == nic);
    near.filter(|&r| cluster.node_of(step.of(r)) != node).count() as u32 * cluster.nics_apart()
}
