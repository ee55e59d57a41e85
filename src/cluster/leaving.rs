//! Sends that leave their pods: how many do, and what the uplinks leave each of them.

use super::Cluster;
use std::collections::BTreeMap;

/// Sends out of each pod, tier by tier, while everyone sends to a peer.
#[derive(Debug, Clone, Default)]
pub struct Leaving {
    tiers: Vec<BTreeMap<u32, f64>>,
}

impl Cluster {
    /// The sends that leave pods where each of some ranks sends to a peer, every GPU of the pod being in a group like
    /// theirs.
    pub fn leaving(&self, sends: impl Iterator<Item = [u32; 2]> + Clone) -> Leaving {
        let of_tier = |size: u32| {
            let mut known: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
            for [from, to] in sends.clone() {
                let (all, leave) = known.entry(from / size).or_default();
                *all += 1;
                *leave += u32::from(from / size != to / size);
            }
            let alike = |(pod, (all, leave)): (u32, (u32, u32))| {
                let gpus = size.min(self.gpus.saturating_sub(pod * size));
                (pod, f64::from(leave) * (f64::from(gpus) / f64::from(all)).max(1.0))
            };
            known.into_iter().map(alike).collect()
        };
        Leaving { tiers: self.spec.pods.iter().map(|pod| of_tier(pod.gpus)).collect() }
    }

    /// The share of its NIC's bandwidth that a send gets, where it leaves its pod beside all others that do. A pod of
    /// which few ranks send out has its uplinks for these: with pipeline stages as the outermost groups only the last
    /// ranks of a pod have their next stage in another.
    pub fn uplink_share_of_send(&self, [from, to]: [u32; 2], leaving: &Leaving) -> f64 {
        let share = |(tier, sends): (usize, &BTreeMap<u32, f64>)| {
            let pod = &self.spec.pods[tier];
            let flows = sends.get(&(from / pod.gpus)).copied().unwrap_or_default();
            if from / pod.gpus == to / pod.gpus || flows == 0.0 {
                return 1.0;
            }
            let asked = flows * pod.oversubscription.value / f64::from(pod.gpus);
            1.0 / (asked * self.collide_all(tier, flows, f64::from(pod.gpus)))
        };
        leaving.tiers.iter().enumerate().map(share).fold(1.0, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uplinks_are_for_those_who_leave() {
        let c = Cluster::shipped("h100-24k-roce", 24576);
        let share = |by: u32, ranks: u32| {
            let sends = (0..ranks).map(|from| [from, (from + by) % ranks]);
            c.uplink_share_of_send([3071, 3071 + by], &c.leaving(sends))
        };
        // All of a pod, a seventh and less, half of it; pods of 3072 GPUs, 7:1.
        assert_eq!([share(3072, 24576), share(438, 24576), share(1536, 24576)], [1.0 / 7.0, 1.0, 2.0 / 7.0]);
        // Inside the pod.
        let next = c.leaving((0..24576).map(|from| [from, (from + 8) % 24576]));
        assert_eq!(c.uplink_share_of_send([0, 8], &next), 1.0);
        // Groups of which one is looked at, the others being like it: half of the GPUs leave with every send.
        let ring: Vec<u32> = (0..12).map(|i| i * 512).collect();
        let sends = (0..12).map(|i| [ring[i], ring[(i + 1) % 12]]);
        let found = c.uplink_share_of_send([5 * 512, 6 * 512], &c.leaving(sends));
        assert!((found - 6.0 / 7.0).abs() < 1e-12, "one of six leaves: {found}");
    }
}
