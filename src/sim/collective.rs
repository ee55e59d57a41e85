//! A collective alone on a cluster: its flows over the links there are, sharing them as max-min fairness has it.

use super::share::{Demand, Resource, Share};
use crate::cluster::{Cluster, Link};
use crate::collective::streams::{Stream, streams};
use crate::collective::{Algorithm, Operation, pairs};
use crate::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// How long the bytes of a collective take over the cluster's links, if they take `alone` by the analytic model.
pub fn simulated(
    cluster: &Cluster,
    algorithm: Algorithm,
    op: Operation,
    members: &[u32],
    bytes: f64,
    alone: Seconds,
) -> Seconds {
    match (algorithm, op) {
        (Algorithm::Pairwise, Operation::Whole(_)) => all_to_all(cluster, members, bytes, alone),
        _ => transfer(cluster, &streams(cluster, algorithm, op, members, bytes), alone),
    }
}

/// [`transfer`] with a flow for every two members. All flows are as large and as fast alone, so that max-min fairness
/// gives the least to those over the link that is the fullest for its width: they keep their rate to the end, all
/// others end before, and that link takes its bytes over its width.
fn all_to_all(cluster: &Cluster, members: &[u32], bytes: f64, alone: Seconds) -> Seconds {
    // On a torus this goes along the axes, without a walk for every pair.
    if let Some(block) = cluster.block(members) {
        return alone.max(block.all_to_all_alone(Bytes::new(bytes)));
    }
    let one = bytes / members.len() as f64;
    let loads = pairs::loads(cluster, members, one);
    let takes =
        |(&link, &bytes): (&Link, &f64)| bytes * cluster.collisions(link, bytes / one) / cluster.capacity(link).value();
    let narrowest = loads.iter().map(takes).fold(0.0, f64::max);
    alone.max(Seconds::new(narrowest))
}

/// How long the flows take together, if each would take `alone` and share nothing: just that where no link is too
/// narrow for all that crosses it, longer where one is.
pub fn transfer(cluster: &Cluster, streams: &[Stream], alone: Seconds) -> Seconds {
    let mut share = Share::new();
    let mut links: BTreeMap<Link, Resource> = BTreeMap::new();
    let mut crossing: BTreeMap<Link, f64> = BTreeMap::new();
    for link in streams.iter().filter(|s| s.bytes > 0.0).flat_map(|s| &s.links) {
        *crossing.entry(*link).or_default() += 1.0;
    }
    if alone.value() <= 0.0 {
        return alone;
    }
    for stream in streams.iter().filter(|s| s.bytes > 0.0) {
        let mut resource = |link| *links.entry(link).or_insert_with(|| share.resource(cluster.capacity(link).value()));
        let collide = |link| cluster.collisions(link, crossing[&link]);
        let uses: Vec<_> = stream.links.iter().map(|&link| (resource(link), collide(link))).collect();
        share.add(&Demand::flow(stream.bytes, stream.bytes / alone.value(), &uses, 0));
    }
    let (mut end, mut tags) = (0, Vec::new());
    while let Some(at) = share.complete(&mut tags) {
        (end, tags) = (at, Vec::new());
    }
    Seconds::new(end as f64 * 1e-12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Protocol, choices};
    use crate::plan::CollectiveKind;
    use crate::spec::{ClusterSpec, GpuSpec, StackSpec};
    use crate::units::Bytes;

    fn of(spec: &ClusterSpec, gpus: u32) -> (Cluster, StackSpec) {
        let cluster = Cluster::new(spec, &GpuSpec::find(&spec.gpu).unwrap(), gpus).unwrap();
        (cluster, StackSpec::find("nccl-fa3").unwrap())
    }

    /// (analytic, simulated) of every way to do it.
    fn both(cluster: &Cluster, stack: &StackSpec, op: Operation, members: &[u32]) -> Vec<(f64, f64)> {
        let bytes = 1024.0 * 1024.0 * 1024.0;
        let all = choices(cluster, stack, op, members, Bytes::new(bytes));
        assert!(!all.is_empty());
        let one = |choice: &crate::collective::Choice| {
            let flows = streams(cluster, choice.algorithm, op, members, bytes);
            let alone = choice.time.transfer;
            (alone.value(), transfer(cluster, &flows, alone).value())
        };
        all.iter().map(one).collect()
    }

    /// Where every two GPUs have links of their own, few of them have those between themselves, and dies of a package more.
    #[test]
    fn few_members_have_the_links_between_them() {
        let kinds = [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::AllToAll];
        let groups: [&[u32]; 7] =
            [&[0, 1], &[0, 2], &[0, 1, 2], &[1, 2, 5], &[0, 1, 2, 3], &[0, 2, 4, 6], &[0, 1, 2, 3, 4]];
        for name in ["frontier", "mi250-8x200", "mi300x-8x400", "gaudi2-8", "v100-dgx1"] {
            let (cluster, stack) = of(&ClusterSpec::find(name).unwrap(), 8);
            for members in groups {
                for op in kinds.map(Operation::Whole).into_iter().chain([Operation::Broadcast, Operation::SendRecv]) {
                    for (alone, shared) in both(&cluster, &stack, op, members) {
                        assert!(
                            (shared / alone - 1.0).abs() < 1e-6,
                            "{name} {members:?} {op:?}: {shared}, not {alone}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_shared_takes_what_the_analytic_model_says() {
        let kinds = [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::AllToAll];
        let whole = kinds.map(Operation::Whole);
        let switched = [("dgx-h100", 8), ("dgx-h100", 32), ("dgx-a100", 16), ("gb200-nvl72", 72)];
        // Meshes, whose rings go over all peers, and tori, whose rings go along all axes.
        let direct = [("mi300x-8x400", 8), ("mi300x-8x400", 32), ("gaudi2-8", 8), ("mi250-8x200", 16)];
        let tori = [("tpu-v5p-pod", 64), ("tpu-v5p-pod", 32), ("tpu-v6e-pod", 256), ("tpu-v5e-pod", 8)];
        for (name, gpus) in switched.into_iter().chain(direct).chain(tori) {
            let (cluster, stack) = of(&ClusterSpec::find(name).unwrap(), gpus);
            let members: Vec<u32> = (0..gpus).collect();
            for op in whole.into_iter().chain([Operation::Broadcast, Operation::SendRecv]) {
                for (alone, shared) in both(&cluster, &stack, op, &members) {
                    assert!((shared / alone - 1.0).abs() < 1e-6, "{name} {gpus} {op:?}: {shared}, not {alone}");
                }
            }
        }
    }

    /// Counted and not listed, an all-to-all takes as long.
    #[test]
    fn an_all_to_all_takes_what_its_flows_take() {
        let mut roce = ClusterSpec::find("h100-24k-roce").unwrap();
        roce.pods[0].gpus = 16;
        let named = ["a100-4x200", "l20-pcie", "tpu-v4-pod", "dgx-h100"].map(|name| ClusterSpec::find(name).unwrap());
        for (spec, gpus) in named.into_iter().zip([32, 8, 64, 32]).chain([(roce, 64)]) {
            let (cluster, _) = of(&spec, gpus);
            let members: Vec<u32> = (0..gpus).filter(|m| m % 8 != 3).collect();
            let op = Operation::Whole(CollectiveKind::AllToAll);
            for alone in [1e-9, 1e-3, 1.0].map(Seconds::new) {
                let listed = transfer(&cluster, &streams(&cluster, Algorithm::Pairwise, op, &members, 1e9), alone);
                let counted = simulated(&cluster, Algorithm::Pairwise, op, &members, 1e9, alone);
                let error = counted.value() / listed.value() - 1.0;
                assert!(error.abs() < 1e-5, "{} {alone:?}: {counted:?}, not {listed:?}", spec.name);
            }
        }
    }

    /// Rings and trees of whole nodes leave a pod by every NIC of a node: the analytic model and the links agree where all
    /// ranks are in groups alike.
    #[test]
    fn groups_alike_share_the_uplinks_of_pods_as_the_analytic_model_has_it() {
        let mut wide = ClusterSpec::find("h100-24k-roce").unwrap();
        wide.pods[0].gpus = 32;
        let mut narrow = wide.clone();
        (wide.pods[0].oversubscription.value, narrow.pods[0].oversubscription.value) = (1e-3, 8.0);
        let (wide, stack) = of(&wide, 64);
        let (narrow, _) = of(&narrow, 64);
        // One, two and four nodes of each pod; and one rank of each node.
        let whole = |nodes: u32| -> Vec<Vec<u32>> {
            let of = |group: u32| {
                [0, 32].into_iter().flat_map(move |pod| (0..8 * nodes).map(move |i| pod + group * 8 * nodes + i))
            };
            (0..4 / nodes).map(|group| of(group).collect()).collect()
        };
        let ranks: Vec<Vec<u32>> = (0..8).map(|place| (place..64).step_by(8).collect()).collect();
        for groups in [whole(1), whole(2), whole(4), ranks] {
            let op = Operation::Whole(CollectiveKind::AllReduce);
            let of = |cluster| choices(cluster, &stack, op, &groups[0], Bytes::new(1e9));
            // Protocols that are slower than the wire are so on uplinks, too.
            let simple = of(&wide).into_iter().zip(of(&narrow)).filter(|(alone, _)| alone.protocol == Protocol::Simple);
            for (alone, with) in simple.filter(|(alone, _)| alone.algorithm != Algorithm::Hierarchical) {
                let flows = groups.iter().flat_map(|group| streams(&narrow, alone.algorithm, op, group, 1e9));
                let shared = transfer(&narrow, &flows.collect::<Vec<_>>(), alone.time.transfer).value();
                let analytic = with.time.transfer.value();
                let told = format!("{:?} of {}: {analytic}, {shared} over the links", alone.algorithm, groups[0].len());
                assert!(analytic > 1.2 * alone.time.transfer.value(), "{told}");
                // 0.92 of what a tree could reach.
                assert!((0.999..1.09).contains(&(analytic / shared)), "{told}");
            }
        }
    }

    /// Eight uplinks a switch, hashed: eight rings leave each, of which the fullest uplink has 2.44 times the mean; of an
    /// all-to-all 28,672 flows, of which it has no more than 3 %. The analytic model says the same of both; spread evenly, the
    /// uplinks' rings would have all that their NICs carry, and 9 % more than what is left inside nodes.
    #[test]
    fn hashed_flows_collide_by_their_number() {
        let hashed = ClusterSpec::find("dcn-plus-512").unwrap();
        let mut sprayed = hashed.clone();
        sprayed.scale_out.as_mut().unwrap().routing = crate::spec::Routing::Spray;
        let ((hashed, stack), (sprayed, _)) = (of(&hashed, 512), of(&sprayed, 512));
        let (members, bytes): (Vec<u32>, _) = ((0..512).collect(), 1e9);
        let ratio = |kind| {
            let op = Operation::Whole(kind);
            let of = |cluster: &Cluster| {
                let all = choices(cluster, &stack, op, &members, Bytes::new(bytes));
                let simple = all.into_iter().find(|choice| choice.protocol == Protocol::Simple).unwrap();
                let [analytic, nics] = [simple.time.transfer, Seconds::new(1e-9)];
                [analytic.value(), simulated(cluster, simple.algorithm, op, &members, bytes, nics).value()]
            };
            let ([analytic, shared], [alone, spread]) = (of(&hashed), of(&sprayed));
            assert!((shared / analytic - 1.0).abs() < 0.02, "{kind:?}: {analytic}, {shared} over the links");
            [analytic / alone, shared / spread]
        };
        let [rings, of_links] = ratio(CollectiveKind::AllGather);
        assert!((of_links / 2.44 - 1.0).abs() < 0.01 && (rings / 2.23 - 1.0).abs() < 0.01, "{rings} {of_links}");
        assert!(ratio(CollectiveKind::AllToAll).iter().all(|ratio| (1.0..1.03).contains(ratio)));
    }

    #[test]
    fn narrow_uplinks_take_longer() {
        let mut spec = ClusterSpec::find("h100-24k-roce").unwrap();
        spec.pods[0].gpus = 16;
        let (cluster, stack) = of(&spec, 32);
        let members: Vec<u32> = (0..32).collect();
        for (alone, shared) in both(&cluster, &stack, Operation::Whole(CollectiveKind::AllToAll), &members) {
            assert!(shared >= alone * (1.0 - 1e-9));
        }
        let op = Operation::SendRecv;
        let flows = streams(&cluster, crate::collective::Algorithm::Pairwise, op, &[0, 16, 1, 17, 2, 18, 3, 19], 1e9);
        // Eight flows each way over 16/7 NICs, which alone would have one each.
        let nic = cluster.capacity(Link::NicOut { node: 0, nic: 0 }).value();
        let alone = Seconds::new(1e9 / nic);
        assert!(transfer(&cluster, &flows, alone).value() > 1.5 * alone.value());
    }
}
