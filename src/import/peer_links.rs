//! Links that lead from one GPU straight to another, where no switch joins them all: as many to each, or more to some and
//! to others none, as in the hybrid cube mesh of a DGX-1.

use crate::spec::{ClusterSpec, Origin, Package, ScaleUp, Sourced};
use crate::units::BytesPerSec;

/// Links between every two GPUs of a node, row by row. Empty behind a switch, and where there are no such links.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PeerLinks {
    gpus: usize,
    links: Vec<u32>,
}

impl PeerLinks {
    pub fn new(gpus: usize, links: impl Fn(usize, usize) -> u32) -> PeerLinks {
        let all = (0..gpus * gpus).map(|at| (at / gpus, at % gpus));
        PeerLinks { gpus, links: all.map(|(a, b)| if a == b { 0 } else { links(a, b) }).collect() }
    }

    /// GPUs of the largest equal parts of the node, of neighbours, that have links between all of them; 1 where there are
    /// no such parts.
    fn part(&self) -> usize {
        let linked = |size: &usize| self.pairs(*size, true).all(|links| links > 0);
        (1..=self.gpus).rev().filter(|size| self.gpus.is_multiple_of(*size)).find(linked).unwrap_or(1)
    }

    /// Links of every two GPUs that are of one part of so many GPUs, or of two.
    fn pairs(&self, size: usize, same: bool) -> impl Iterator<Item = u32> {
        let between = move |at: &usize| (at / self.gpus, at % self.gpus);
        let all = (0..self.links.len()).filter(move |at| {
            let (a, b) = between(at);
            a != b && (a / size == b / size) == same
        });
        all.map(|at| self.links[at])
    }

    /// Mean links of such pairs, and the fewest and the most; none where there is no such pair.
    fn mean(&self, size: usize, same: bool) -> Option<(f64, u32, u32)> {
        let (least, most) = (self.pairs(size, same).min()?, self.pairs(size, same).max()?);
        let n = self.pairs(size, same).count();
        Some((self.pairs(size, same).map(f64::from).sum::<f64>() / n as f64, least, most))
    }

    /// What a note says of the links, those of the cluster that was `made` of them.
    pub fn note(&self, made: &ScaleUp) -> Option<String> {
        let outside = made.per_peer.as_ref().filter(|_| self.gpus > 2)?;
        let part = self.part();
        let said = |(mean, least, most): (f64, u32, u32)| match least == most {
            true => format!("{least}"),
            false => format!("{least} to {most} ({mean:.2} in the mean)"),
        };
        let all = self.mean(self.gpus, true).map(said)?;
        Some(match &made.package {
            Some(package) if part > 1 && part < self.gpus => format!(
                "no switch: links lead from GPU to GPU, {} to each of {part} neighbours, which are taken to send {} to one of \
                 them, and {} to each other one, {}",
                self.mean(part, true).map(said)?,
                package.per_peer.value,
                self.mean(part, false).map(said)?,
                outside.value
            ),
            _ => format!(
                "no switch: links lead from GPU to GPU, {all} to each other one, and a GPU is taken to send {} to one of them",
                outside.value
            ),
        })
    }

    /// Gives the links of `spec`, all of which it has already, to the peers that they lead to: those of `base` if they are
    /// as many among as many GPUs, else a part of what sends reach over all of them. Two GPUs have all between them.
    pub fn share(&self, spec: &mut ClusterSpec, base: &ClusterSpec, read: impl Fn(&str) -> String) {
        let same = (base.gpus_per_node, base.scale_up.links) == (spec.gpus_per_node, spec.scale_up.links);
        let up = &mut spec.scale_up;
        if base.scale_up.per_peer.is_some() && same {
            return;
        }
        (up.per_peer, up.package) = (None, None);
        if self.gpus < 3 {
            return;
        }
        let (part, links) = (self.part(), f64::from(up.links));
        let rate = |(mean, ..): (f64, u32, u32), whom: &str| Sourced {
            value: BytesPerSec::new((up.p2p.value.value() * mean / links / 1e6).round() * 1e6),
            source: read(&format!("{mean:.2} of {} links lead to {whom}", up.links)),
            provenance: Origin::Derived,
        };
        let [inside, outside] = [true, false].map(|same| self.mean(part, same));
        match (inside, outside) {
            (Some(inside), Some(outside)) => {
                let package = Package { gpus: part as u32, per_peer: rate(inside, "each GPU of a part") };
                (up.per_peer, up.package) = (Some(rate(outside, "each GPU of another part")), Some(package));
            }
            (one, other) => up.per_peer = one.or(other).map(|all| rate(all, "each other GPU")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight V100 as github issue NVIDIA/nccl-tests#29 has them.
    const CUBE: [[u32; 8]; 8] = [
        [0, 2, 2, 1, 1, 0, 0, 0],
        [2, 0, 1, 2, 0, 1, 0, 0],
        [2, 1, 0, 1, 0, 0, 2, 0],
        [1, 2, 1, 0, 0, 0, 0, 2],
        [1, 0, 0, 0, 0, 2, 2, 1],
        [0, 1, 0, 0, 2, 0, 1, 2],
        [0, 0, 2, 0, 2, 1, 0, 1],
        [0, 0, 0, 2, 1, 2, 1, 0],
    ];

    fn shared(led: &PeerLinks, links: u32, base: &str) -> ClusterSpec {
        let base = ClusterSpec::find(base).unwrap();
        let mut spec = base.clone();
        (spec.gpus_per_node, spec.scale_up.links) = (led.gpus as u32, links);
        spec.scale_up.per_peer = None;
        led.share(&mut spec, &base, |what| what.into());
        spec.check("x").unwrap();
        spec
    }

    #[test]
    fn peers_have_their_part_of_all_links() {
        let four = shared(&PeerLinks::new(4, |_, _| 4), 12, "dgx-a100").scale_up;
        assert_eq!((four.per_peer.as_ref().unwrap().value.value(), four.package.as_ref()), (65e9, None));
        // A ring of two has no more than the links between them, of four all.
        let ring = |members| four.ring(4, members, four.per_peer.as_ref().map(|rate| rate.value)).value();
        assert!((ring(2) / 74e9 - 1.0).abs() < 1e-9 && ring(4) == 222e9, "{}", ring(2));
        let note = PeerLinks::new(4, |_, _| 4).note(&four).unwrap();
        assert!(
            note.contains("no switch") && note.contains("4 to each other one") && note.contains("65 GB/s"),
            "{note}"
        );
        let pair = PeerLinks::new(2, |_, _| 4);
        let two = shared(&pair, 4, "dgx-a100").scale_up;
        assert_eq!((two.per_peer.as_ref(), pair.note(&two)), (None, None));
    }

    #[test]
    fn a_cube_is_two_parts_of_which_each_is_linked() {
        let cube = PeerLinks::new(8, |a, b| CUBE[a][b]);
        assert_eq!((cube.part(), cube.mean(4, true), cube.mean(4, false)), (4, Some((1.5, 1, 2)), Some((0.375, 0, 2))));
        let up = shared(&cube, 6, "dgx-a100").scale_up;
        let package = up.package.as_ref().unwrap();
        assert_eq!((package.gpus, package.per_peer.value.value()), (4, 48.75e9));
        let note = cube.note(&up).unwrap();
        assert!(
            note.contains("1 to 2 (1.50 in the mean) to each of 4 neighbours") && note.contains("0 to 2"),
            "{note}"
        );
        // As many links of as many GPUs as a shipped node has: what is known of that counts.
        let base = ClusterSpec::find("v100-dgx1").unwrap();
        let mut spec = base.clone();
        cube.share(&mut spec, &base, |what| what.into());
        assert_eq!(spec, base);
    }

    #[test]
    fn a_ring_of_gpus_has_no_part_that_is_linked_but_pairs() {
        let ring = PeerLinks::new(4, |a, b| u32::from(a.abs_diff(b) != 2) * 2);
        assert_eq!((ring.part(), ring.mean(2, true), ring.mean(2, false)), (2, Some((2.0, 2, 2)), Some((1.0, 0, 2))));
        assert_eq!(PeerLinks::default().note(&ClusterSpec::find("v100-dgx1").unwrap().scale_up), None);
    }
}
