//! The time that the wires of a network that is a graph need for a collective that has them to itself. NICs alone do
//! not say it: over a ring of switches an all-to-all of eight nodes crosses each wire many times.
//!
//! The choice of the algorithm does not look at wires: NCCL's tuner knows NICs, and no network.

use super::streams::{loads, streams};
use super::{Algorithm, Operation, pairs};
use crate::cluster::{Cluster, Link};
use crate::plan::CollectiveKind;
use crate::units::{Bytes, Seconds};

/// Whether nodes are joined by wires of a graph. Chips whose own links are the graph have other rules
/// ([`Block`](crate::cluster::Block)).
pub fn join_nodes(cluster: &Cluster) -> bool {
    cluster.spec.graph.is_some() && cluster.spec.scale_out.is_some()
}

/// How long the busiest wire is busy with a collective of `bytes` (of the full buffer); 0 where no wires join nodes.
pub fn busy(cluster: &Cluster, op: Operation, algorithm: Algorithm, members: &[u32], bytes: Bytes) -> Seconds {
    if !join_nodes(cluster) {
        return Seconds::ZERO;
    }
    let all_to_all = op == Operation::Whole(CollectiveKind::AllToAll);
    busiest(
        cluster,
        match all_to_all {
            true => pairs::loads(cluster, members, bytes.value() / members.len() as f64),
            false => loads(&streams(cluster, algorithm, op, members, bytes.value())),
        },
    )
}

/// How long the busiest wire is busy where each of `members` sends `bytes` to those on other nodes, as many to one as
/// to another; 0 where no wires join nodes.
pub fn busy_with_rows(cluster: &Cluster, members: &[u32], bytes: f64) -> Seconds {
    if !join_nodes(cluster) {
        return Seconds::ZERO;
    }
    let on_nodes = cluster.on_nodes(members);
    // The mean over all members, which are taken as alike.
    let n = members.len() as f64;
    let away: f64 = on_nodes.iter().map(|(_, on)| f64::from(*on) * (n - f64::from(*on))).sum::<f64>() / n;
    if away > 0.0 { busiest(cluster, pairs::loads(cluster, members, bytes / away)) } else { Seconds::ZERO }
}

fn busiest(cluster: &Cluster, loads: impl IntoIterator<Item = (Link, f64)>) -> Seconds {
    let wires = loads.into_iter().filter(|(link, _)| matches!(link, Link::Wire { .. }));
    let times = wires.map(|(link, bytes)| bytes / cluster.capacity(link).value());
    Seconds::new(times.fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ClusterSpec, GpuSpec};

    /// Nodes of eight H100 on a ring of wires of 5 GB/s.
    fn ring_of(nodes: u32) -> Cluster {
        let mut spec = ClusterSpec::find("h100-24k-roce").unwrap();
        let torus = ClusterSpec::find("tpu-v5e-pod").unwrap().graph;
        spec.graph = torus.map(|mut graph| {
            graph.shape = crate::spec::GraphShape::Torus(vec![nodes]);
            graph.bandwidth.value = crate::units::BytesPerSec::new(5e9);
            graph
        });
        (spec.pods, spec.nodes) = (vec![], nodes);
        Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), 8 * nodes).unwrap()
    }

    /// A ring of rings sends (n - 1) / n of the buffer over each wire; of an all-to-all among eight nodes around a ring, a wire
    /// carries the 1 + 2 + 3 flows of nodes that are so far apart, and half of those that are four apart.
    #[test]
    fn the_busiest_wire_by_hand() {
        let c = ring_of(8);
        let members: Vec<u32> = (0..64).collect();
        let of = |kind, algorithm| busy(&c, Operation::Whole(kind), algorithm, &members, Bytes::new(64e9)).value();
        let ring = of(CollectiveKind::AllGather, Algorithm::Ring);
        assert!((ring - 63e9 / 5e9).abs() < 1e-6, "{ring}");
        let all = of(CollectiveKind::AllToAll, Algorithm::Pairwise);
        // Each pair of nodes exchanges 64 flows of 1 GB each way.
        assert!((all - 64e9 * (1.0 + 2.0 + 3.0 + 2.0) / 5e9).abs() < 1e-6, "{all}");
        // As many bytes in rows: a rank sends 56 GB to other nodes.
        assert!((busy_with_rows(&c, &members, 56e9).value() - all).abs() < 1e-6);
        let dgx = ClusterSpec::find("dgx-h100").unwrap();
        let dgx = Cluster::new(&dgx, &GpuSpec::find(&dgx.gpu).unwrap(), 64).unwrap();
        assert_eq!(busy_with_rows(&dgx, &members, 56e9), Seconds::ZERO);
    }
}
