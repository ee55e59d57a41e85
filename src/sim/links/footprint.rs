//! The bytes that a meeting puts on the links that several ranks share.

use crate::cluster::{Cluster, Link};
use crate::collective::streams::{Stream, loads, streams};
use crate::collective::{Algorithm, Operation, pairs};
use crate::plan::CollectiveKind;

/// A way to communicate: meetings of one lane and way load the same links with the same shares of their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// A message over a distance along the lane's group.
    Hop(u32),
    Whole(CollectiveKind, Algorithm),
    /// Rows from one member to all others.
    Exchange,
}

/// A link, and what it carries of each byte of a meeting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    pub link: Link,
    pub share: f64,
}

/// The loads of shared links, and the largest share of the bytes that goes as one flow.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Footprint {
    pub loads: Vec<Load>,
    pub flow: f64,
}

/// Whether ranks can get in each other's way on a link. The port of a GPU, and a NIC that is a rank's own, are
/// accounted for by the ports of the rank.
fn is_shared(cluster: &Cluster, link: Link) -> bool {
    match link {
        Link::Out(_) | Link::In(_) | Link::Peer(..) => false,
        Link::NicOut { .. } | Link::NicIn { .. } => {
            let detours = cluster.spec.scale_out.as_ref().is_some_and(|out| out.rails && out.pxn);
            detours || cluster.nics_apart() < cluster.spec.gpus_per_node
        }
        Link::Bridge { .. } | Link::Up { .. } | Link::Down { .. } | Link::Wire { .. } => true,
    }
}

/// Whether the cluster has any such link.
pub fn any_shared(cluster: &Cluster) -> bool {
    let nics = cluster.nodes() > 1 && is_shared(cluster, Link::NicOut { node: 0, nic: 0 });
    let spec = &cluster.spec;
    nics || spec.graph.is_some() || spec.scale_up.sockets.is_some() || (cluster.nodes() > 1 && !spec.pods.is_empty())
}

impl Footprint {
    pub fn of_message(cluster: &Cluster, from: u32, to: u32) -> Footprint {
        if stays(cluster, &[from, to]) {
            return Footprint::default();
        }
        let loads = cluster.path(from, to).links.into_iter().map(|link| (link, 1.0));
        Footprint::of_loads(cluster, loads, 1.0, &[from, to])
    }

    pub fn of_whole(cluster: &Cluster, kind: CollectiveKind, algorithm: Algorithm, members: &[u32]) -> Footprint {
        if stays(cluster, members) {
            return Footprint::default();
        }
        if algorithm == Algorithm::Pairwise {
            let each = 1.0 / members.len() as f64;
            return Footprint::of_loads(cluster, pairs::loads(cluster, members, each), each, members);
        }
        Footprint::of_streams(cluster, &streams(cluster, algorithm, Operation::Whole(kind), members, 1.0), members)
    }

    /// The footprint of rows from `from` to each of the others alike, as far as they leave its node.
    pub fn of_rows(cluster: &Cluster, from: u32, members: &[u32]) -> Footprint {
        let away: Vec<u32> = members.iter().copied().filter(|&m| cluster.node_of(m) != cluster.node_of(from)).collect();
        let each = 1.0 / away.len().max(1) as f64;
        let stream = |&to: &u32| Stream { links: cluster.path(from, to).links, bytes: each };
        // The flows of all other ranks collide as those of this one.
        Footprint::of_streams(cluster, &away.iter().map(stream).collect::<Vec<_>>(), &[from])
    }

    fn of_streams(cluster: &Cluster, streams: &[Stream], members: &[u32]) -> Footprint {
        let flow = streams.iter().map(|s| s.bytes).fold(0.0, f64::max);
        Footprint::of_loads(cluster, loads(streams), flow, members)
    }

    /// The footprint of the loads of `members`, no flow more than `flow`, while all other ranks below the same switches
    /// do as they do.
    fn of_loads(
        cluster: &Cluster,
        loads: impl IntoIterator<Item = (Link, f64)>,
        flow: f64,
        members: &[u32],
    ) -> Footprint {
        let shared = loads.into_iter().filter(|(link, _)| is_shared(cluster, *link));
        let load = |(link, share): (Link, f64)| {
            let groups = cluster.below(link, members).map_or(1.0, |[inside, all]| all / inside.max(1.0));
            Load { link, share: share * cluster.collisions(link, share / flow * groups) }
        };
        Footprint { loads: shared.map(load).collect(), flow }
    }
}

/// Whether nothing leaves the node of the members, and nothing in there is shared.
fn stays(cluster: &Cluster, members: &[u32]) -> bool {
    let inside = cluster.spec.scale_up.sockets.is_none() && cluster.spec.graph.is_none();
    inside && members.iter().all(|&m| cluster.node_of(m) == cluster.node_of(members[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(footprint: &Footprint) -> Vec<(Link, f64)> {
        footprint.loads.iter().map(|load| (load.link, load.share)).collect()
    }

    #[test]
    fn what_is_a_ranks_own_is_not_shared() {
        for (name, gpus, shared) in
            [("dgx-h100", 64, false), ("a100-4x200", 16, true), ("a100-4x200", 8, false), ("l20-pcie", 8, true)]
        {
            assert_eq!(any_shared(&Cluster::shipped(name, gpus)), shared, "{name} {gpus}");
        }
        let dgx = Cluster::shipped("dgx-h100", 16);
        assert_eq!(Footprint::of_message(&dgx, 0, 8).loads, []);
        assert_eq!(Footprint::of_message(&Cluster::shipped("a100-4x200", 16), 0, 1).loads, []);
    }

    /// A ring of n sends (n - 1) / n of the buffer over each of its links, twice for an all-reduce.
    #[test]
    fn a_ring_of_replicas_leaves_its_pod_once() {
        let c = Cluster::shipped("h100-24k-roce", 6144);
        let members: Vec<u32> = (0..6144).step_by(8).collect();
        let footprint = Footprint::of_whole(&c, CollectiveKind::AllReduce, Algorithm::Ring, &members);
        let up = |pod| (Link::Up { tier: 0, pod, rail: 0 }, 2.0 * 767.0 / 768.0);
        let found = shares(&footprint);
        assert!(found.len() == 4 && found.contains(&up(0)) && found.contains(&up(1)), "{found:?}");
    }

    /// Two GPUs of a NIC: what each sends to the eight of another node goes over it.
    #[test]
    fn rows_leave_by_the_nic_of_their_rank() {
        let c = Cluster::shipped("a100-4x200", 16);
        let members: Vec<u32> = (0..16).collect();
        let found = shares(&Footprint::of_rows(&c, 3, &members));
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(found.iter().any(|(l, s)| *l == Link::NicOut { node: 0, nic: 1 } && near(*s, 1.0)), "{found:?}");
        for nic in 0..4 {
            assert!(found.iter().any(|(l, s)| *l == Link::NicIn { node: 1, nic } && near(*s, 0.25)), "{found:?}");
        }
    }

    /// An all-to-all of any number of ranks is on the links of its pods: what leaves one of two equal pods is half of all.
    #[test]
    fn large_exchanges_leave_their_pods() {
        let c = Cluster::shipped("h100-24k-roce", 6144);
        let members: Vec<u32> = (0..6144).collect();
        let footprint = Footprint::of_whole(&c, CollectiveKind::AllToAll, Algorithm::Pairwise, &members);
        let up = footprint.loads.iter().find(|load| load.link == Link::Up { tier: 0, pod: 1, rail: 0 }).unwrap();
        assert!((up.share - 3072.0 * 0.5).abs() < 1e-6, "{up:?}");
        assert!((footprint.flow * 6144.0 - 1.0).abs() < 1e-12);
    }
}
