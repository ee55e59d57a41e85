//! A collective alone on a cluster: its flows over the links there are, sharing them as max-min fairness has it.

use super::share::{Demand, Resource, Share};
use crate::cluster::{Cluster, Link};
use crate::collective::streams::Stream;
use crate::units::Seconds;
use std::collections::BTreeMap;

/// How long the flows take together, each of which would take `alone` if it shared nothing: just that where no link is
/// too narrow for all that crosses it, longer where one is.
pub fn transfer(cluster: &Cluster, streams: &[Stream], alone: Seconds) -> Seconds {
    let mut share = Share::new();
    let mut links: BTreeMap<Link, Resource> = BTreeMap::new();
    if alone.value() <= 0.0 {
        return alone;
    }
    for stream in streams.iter().filter(|s| s.bytes > 0.0) {
        let mut resource = |link| *links.entry(link).or_insert_with(|| share.resource(cluster.capacity(link).value()));
        let uses: Vec<_> = stream.links.iter().map(|&link| (resource(link), 1.0)).collect();
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
    use crate::collective::streams::streams;
    use crate::collective::{Operation, choices};
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

    #[test]
    fn nothing_shared_takes_what_the_analytic_model_says() {
        let kinds = [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::AllToAll];
        let whole = kinds.map(Operation::Whole);
        for (name, gpus) in [("dgx-h100", 8), ("dgx-h100", 32), ("dgx-a100", 16), ("gb200-nvl72", 72)] {
            let (cluster, stack) = of(&ClusterSpec::find(name).unwrap(), gpus);
            let members: Vec<u32> = (0..gpus).collect();
            for op in whole.into_iter().chain([Operation::Broadcast, Operation::SendRecv]) {
                for (alone, shared) in both(&cluster, &stack, op, &members) {
                    assert!((shared / alone - 1.0).abs() < 1e-6, "{name} {gpus} {op:?}: {shared}, not {alone}");
                }
            }
        }
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
