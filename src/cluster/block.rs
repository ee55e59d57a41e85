//! Groups of ranks on a torus or mesh of chips: blocks of it, whose collectives go along all their axes at once, both ways.
//!
//! An axis of m members that closes gives every member two links, and an all-gather takes V (m - 1) / m over the rate of
//! both; where it is open, what comes from one end leaves by the other, and the middle link has all of it: one link's rate.
//! Of several axes each carries a part of the bytes of its own, in another order of the axes, so that their rates add up
//! (as Google's "How to Scale Your Model", section 3, has all-gathers over several axes of a TPU's torus; as remembered, not
//! looked up).

use super::Cluster;
use super::path::Link;
use crate::spec::GraphShape;
use crate::units::{Bytes, BytesPerSec, Seconds};
use rustc_hash::FxHashSet;

/// Members of a group that are every `stride`-th vertex of some axes of a graph, in all their combinations.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    axes: Vec<Axis>,
    /// Bytes a second of a link, in one direction.
    wire: BytesPerSec,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Axis {
    /// Vertices from one to its neighbour along the axis, in the numbering of the graph; and vertices along all of it.
    pace: u32,
    vertices: u32,
    members: u32,
    /// Vertices from one member to the next; the groups in between share the links.
    stride: u32,
    /// Whether the last vertex is the neighbour of the first.
    closed: bool,
}

impl Cluster {
    /// The block that the members are on a graph of chips; `None` where there is no such graph, or they are no block.
    pub fn block(&self, members: &[u32]) -> Option<Block> {
        let graph = self.spec.graph.as_ref().filter(|_| self.spec.scale_out.is_none())?;
        let (dims, closes) = match &graph.shape {
            GraphShape::Torus(dims) => (dims, true),
            GraphShape::Mesh(dims) => (dims, false),
            _ => return None,
        };
        let (mut axes, mut pace, mut all) = (vec![], 1, 1);
        for &vertices in dims.iter().rev() {
            let mut at = vec![false; vertices as usize];
            members.iter().for_each(|m| at[(m / pace % vertices) as usize] = true);
            let at: Vec<u32> = (0..vertices).filter(|&v| at[v as usize]).collect();
            let here = at.len() as u32;
            if here > 1 {
                let stride = at[1] - at[0];
                if at.windows(2).any(|pair| pair[1] - pair[0] != stride) {
                    return None;
                }
                let closed = closes && vertices > 2 && here * stride == vertices;
                axes.push(Axis { pace, vertices, members: here, stride, closed });
            }
            (pace, all) = (pace * vertices, all * here);
        }
        (all as usize == members.len() && all > 1).then_some(Block { axes, wire: graph.bandwidth.value })
    }
}

impl Axis {
    /// Links of a member's own that carry a collective along the axis.
    fn links(&self) -> f64 {
        (if self.closed { 2.0 } else { 1.0 }) / f64::from(self.stride)
    }
}

impl Block {
    /// Bytes a second that a member sends in a collective of rings, while the groups beside it do the same.
    pub fn rate(&self) -> BytesPerSec {
        self.wire * self.axes.iter().map(Axis::links).sum::<f64>()
    }

    /// Links from the first member to the last that hears of it.
    pub fn hops(&self) -> f64 {
        let of = |axis: &Axis| {
            let steps = if axis.closed { axis.members / 2 } else { axis.members - 1 };
            f64::from(steps * axis.stride)
        };
        self.axes.iter().map(of).sum()
    }

    /// What every member takes to send its part of `bytes` to every other, while the groups beside it do the same. Rows go
    /// dim by dim, the shorter way around: of the links of an axis the middle one, or any where it closes, is crossed by as
    /// many bytes as if the axis were alone.
    pub fn all_to_all(&self, bytes: Bytes) -> Seconds {
        self.exchange(bytes, |axis| f64::from(axis.stride))
    }

    /// [`all_to_all`](Block::all_to_all) while the groups beside it are silent.
    pub fn all_to_all_alone(&self, bytes: Bytes) -> Seconds {
        self.exchange(bytes, |_| 1.0)
    }

    fn exchange(&self, bytes: Bytes, beside: impl Fn(&Axis) -> f64) -> Seconds {
        let time = |axis: &Axis| {
            let m = u64::from(axis.members);
            // Pairs of the m members whose way crosses a link; a closed axis shares the hops of all pairs out over both
            // directions.
            let crossing = if axis.closed { (m * m / 4) as f64 / 2.0 } else { ((m / 2) * m.div_ceil(2)) as f64 };
            bytes * (crossing / m as f64 * beside(axis)) / self.wire
        };
        self.axes.iter().map(time).fold(Seconds::ZERO, Seconds::max)
    }

    /// The flows of a collective of rings in which every member sends `bytes`.
    pub fn streams(&self, members: &[u32], bytes: f64) -> Vec<(Vec<Link>, f64)> {
        let all: f64 = self.axes.iter().map(Axis::links).sum();
        let mut flows = vec![];
        let there: FxHashSet<u32> = members.iter().copied().collect();
        for axis in &self.axes {
            let part = bytes * axis.links() / all;
            let each = if axis.closed { part / 2.0 } else { part };
            for &member in members {
                // With two vertices each is a step up from the other: there is one way.
                let ways = if axis.vertices > 2 { vec![1, axis.vertices - 1] } else { vec![1] };
                let ways = ways.into_iter().filter_map(|by| axis.way(member, by, &there));
                flows.extend(ways.map(|links| (links, each)));
            }
        }
        flows
    }
}

impl Axis {
    /// The links from a member to the next one: upward in steps `by` of 1, or downward in steps of all but one vertex;
    /// `None` beyond the end of an open axis.
    fn way(&self, member: u32, by: u32, members: &FxHashSet<u32>) -> Option<Vec<Link>> {
        let place = |rank: u32| rank / self.pace % self.vertices;
        let onward = |rank: u32| rank - place(rank) * self.pace + (place(rank) + by) % self.vertices * self.pace;
        let mut stops = vec![member];
        for _ in 0..self.stride {
            let last = stops[stops.len() - 1];
            let next = onward(last);
            // The next vertex would be beyond the end of an open axis.
            if !self.closed && place(next).abs_diff(place(last)) != 1 {
                return None;
            }
            stops.push(next);
        }
        let reached = members.contains(&stops[stops.len() - 1]);
        reached.then(|| stops.windows(2).map(|w| Link::Wire { from: w[0], to: w[1] }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(cluster: &Cluster, members: impl IntoIterator<Item = u32>) -> Option<f64> {
        let block = cluster.block(&members.into_iter().collect::<Vec<_>>())?;
        let wire = cluster.spec.graph.as_ref().unwrap().bandwidth.value;
        Some(block.rate().value() / wire.value())
    }

    #[test]
    fn axes_of_a_block_add_up() {
        // 4 x 4 x 4, all of whose rings close.
        let cube = Cluster::shipped("tpu-v5p-pod", 64);
        assert_eq!(links(&cube, 0..64), Some(6.0));
        assert_eq!(links(&cube, 4..8), Some(2.0));
        assert_eq!(links(&cube, 16..32), Some(4.0));
        // Two neighbours have one link; the two groups of every second one share theirs.
        assert_eq!(links(&cube, 0..2), Some(1.0));
        assert_eq!(links(&cube, [0, 2]), Some(1.0));
        assert_eq!(links(&cube, (0..64).step_by(16)), Some(2.0));
        assert_eq!(links(&cube, (0..64).step_by(2)), Some(5.0));
        // No block.
        assert_eq!(links(&cube, [0, 1, 4]), None);
        assert_eq!(links(&cube, [0, 1, 3]), None);
        assert_eq!(links(&cube, [7]), None);
        assert_eq!(links(&Cluster::shipped("dgx-h100", 8), 0..8), None);
    }

    #[test]
    fn an_open_axis_has_half() {
        // 8 x 8 of 16 x 16.
        let square = Cluster::shipped("tpu-v6e-pod", 64);
        assert_eq!(links(&square, 0..8), Some(1.0));
        assert_eq!(links(&square, 0..64), Some(2.0));
        let block = square.block(&(0..8).collect::<Vec<_>>()).unwrap();
        assert_eq!(block.hops(), 7.0);
        assert_eq!(Cluster::shipped("tpu-v6e-pod", 256).block(&(0..16).collect::<Vec<_>>()).unwrap().hops(), 8.0);
        // From four to four over the link between them, of what each has an eighth for each of the others.
        let bytes = Bytes::new(block.wire.value());
        assert_eq!(block.all_to_all(bytes).value(), 2.0);
        // Every second of a ring of 16, whose links the others use as well.
        let ring = Cluster::shipped("tpu-v6e-pod", 256);
        let block = ring.block(&(0..16).step_by(2).collect::<Vec<_>>()).unwrap();
        assert_eq!(block.all_to_all(bytes).value(), 2.0);
        assert_eq!(block.rate(), block.wire);
    }

    /// Of all groups together no link carries more than it can in the time that a collective takes, and some carry that.
    #[test]
    fn streams_fill_the_links_and_no_more() {
        for (name, gpus, group) in
            [("tpu-v5p-pod", 64, 16), ("tpu-v6e-pod", 64, 8), ("tpu-v5e-pod", 128, 2), ("tpu-v5p-pod", 32, 4)]
        {
            let cluster = Cluster::shipped(name, gpus);
            for stride in [1, gpus / group] {
                let mut loads = std::collections::BTreeMap::new();
                let first = |g: u32| if stride == 1 { g * group } else { g };
                for g in 0..gpus / group {
                    let members: Vec<u32> = (0..group).map(|i| first(g) + i * stride).collect();
                    let block = cluster.block(&members).unwrap();
                    for (link, bytes) in
                        block.streams(&members, 1.0).iter().flat_map(|(l, b)| l.iter().map(move |l| (*l, b)))
                    {
                        *loads.entry(link).or_insert(0.0) += bytes / block.wire.value() * block.rate().value();
                    }
                }
                let most = loads.values().copied().fold(0.0, f64::max);
                assert!((most - 1.0_f64).abs() < 1e-9, "{name} {gpus} {group} by {stride}: {most}");
            }
        }
    }
}
