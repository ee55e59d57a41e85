//! The ways of messages through networks that are no trees.

use super::path::Link;
use crate::spec::{Graph, GraphShape};
use std::collections::VecDeque;

/// Neighbours of every vertex, in order; empty for a graph whose shape says them.
pub type Neighbours = Vec<Vec<u32>>;

/// The neighbours of every vertex, for a graph that is a list of links. The error names two hosts that no way leads
/// between.
pub fn neighbours(graph: &Graph, hosts: u32) -> Result<Neighbours, String> {
    let GraphShape::Links(links) = &graph.shape else { return Ok(vec![]) };
    let vertices = links.iter().flatten().max().map_or(0, |&v| v as usize + 1);
    let mut all = vec![vec![]; vertices];
    for &[a, b] in links {
        all[a as usize].push(b);
        all[b as usize].push(a);
    }
    all.iter_mut().for_each(|n| n.sort_unstable());
    let from = tree(&all, 0);
    match (1..hosts).find(|&h| from.get(h as usize).is_none_or(|f| f.is_none())) {
        Some(apart) => Err(format!("no way leads from host 0 to host {apart}; link them")),
        None => Ok(all),
    }
}

/// Appends the links from host `a` to host `b`.
pub fn way(graph: &Graph, neighbours: &Neighbours, a: u32, b: u32, links: &mut Vec<Link>) {
    let stops = match &graph.shape {
        GraphShape::Torus(dims) => grid(dims, true, a, b),
        GraphShape::Mesh(dims) => grid(dims, false, a, b),
        GraphShape::Dragonfly { groups, routers, hosts } => dragonfly(*groups, *routers, a / hosts, b / hosts),
        GraphShape::Links(_) => shortest(neighbours, a, b),
    };
    links.extend(stops.windows(2).map(|w| Link::Wire { from: w[0], to: w[1] }));
}

/// Number of links, each direction counted as one.
pub fn wires(graph: &Graph) -> u64 {
    match &graph.shape {
        GraphShape::Torus(dims) => {
            let vertices: u64 = dims.iter().map(|&d| u64::from(d)).product();
            // A ring of two vertices has one link.
            dims.iter().map(|&d| vertices * u64::from(d.min(3) - 1)).sum()
        }
        GraphShape::Mesh(dims) => {
            let vertices: u64 = dims.iter().map(|&d| u64::from(d)).product();
            dims.iter().map(|&d| 2 * (vertices - vertices / u64::from(d))).sum()
        }
        GraphShape::Dragonfly { groups, routers, .. } => {
            let (groups, routers) = (u64::from(*groups), u64::from(*routers));
            groups * routers * (routers - 1) + groups * (groups - 1)
        }
        GraphShape::Links(links) => 2 * links.len() as u64,
    }
}

/// The vertices on the way from `a` to `b`, dim by dim; rings that close are gone round the shorter way, and where both
/// ways are as long, half of the messages take either.
fn grid(dims: &[u32], closed: bool, a: u32, b: u32) -> Vec<u32> {
    let (mut at, mut stops, mut stride) = (a, vec![a], 1);
    for &n in dims.iter().rev() {
        let to = b / stride % n;
        let from = at / stride % n;
        let ahead = (to + n - from) % n;
        let both = 2 * ahead == n && from % 2 == 0;
        let upwards = if closed { 2 * ahead < n || both } else { from <= to };
        let (steps, by) = if upwards { (ahead, 1) } else { (n - ahead, n - 1) };
        for _ in 0..steps {
            let here = at / stride % n;
            at = at - here * stride + (here + by) % n * stride;
            stops.push(at);
        }
        stride *= n;
    }
    stops
}

/// The routers on the way from `a` to `b`: to the router of the own group that has the link to the other group, over
/// it, and on to the router.
fn dragonfly(groups: u32, routers: u32, a: u32, b: u32) -> Vec<u32> {
    let (from, to) = (a / routers, b / routers);
    let gate = |group: u32, other: u32| group * routers + (other + groups - group - 1) % groups % routers;
    let mut stops = vec![a];
    if from != to {
        stops.extend([gate(from, to), gate(to, from)]);
    }
    stops.push(b);
    stops.dedup();
    stops
}

fn shortest(neighbours: &Neighbours, a: u32, b: u32) -> Vec<u32> {
    let from = tree(neighbours, a);
    let mut stops = vec![b];
    while let Some(Some(before)) = stops.last().filter(|&&v| v != a).map(|&v| from[v as usize]) {
        stops.push(before);
    }
    stops.reverse();
    stops
}

/// The vertex from which each vertex is reached first, going breadth first from `root`; `None` for the root and for
/// what is never reached.
fn tree(neighbours: &Neighbours, root: u32) -> Vec<Option<u32>> {
    let mut from = vec![None; neighbours.len()];
    let Some(first) = from.get_mut(root as usize) else { return from };
    *first = Some(root);
    let mut next = VecDeque::from([root]);
    while let Some(at) = next.pop_front() {
        for &to in &neighbours[at as usize] {
            if from[to as usize].is_none() {
                from[to as usize] = Some(at);
                next.push_back(to);
            }
        }
    }
    from
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torus_goes_the_shorter_way_around() {
        // 4 x 4, vertex 4 y + x.
        assert_eq!(grid(&[4, 4], true, 0, 3), [0, 3]);
        assert_eq!(grid(&[4, 4], true, 0, 6), [0, 1, 2, 6]);
        assert_eq!(grid(&[4, 4], true, 5, 5), [5]);
        // Without the links that close its rings.
        assert_eq!(grid(&[4, 4], false, 3, 0), [3, 2, 1, 0]);
        assert_eq!(grid(&[4, 4], false, 0, 13), [0, 1, 5, 9, 13]);
        for (a, b) in (0..24).flat_map(|a| (0..24).map(move |b| (a, b))) {
            let [ring, line] = [true, false].map(|closed| grid(&[2, 3, 4], closed, a, b));
            assert_eq!((ring[0], *ring.last().unwrap()), (a, b));
            assert_eq!((line[0], *line.last().unwrap()), (a, b));
            assert!(ring.len() <= 1 + 1 + 1 + 2 && ring.len() <= line.len());
        }
    }

    #[test]
    fn a_dragonfly_needs_three_hops_at_most() {
        let (groups, routers) = (9, 4);
        for (a, b) in (0..36).flat_map(|a| (0..36).map(move |b| (a, b))) {
            let stops = dragonfly(groups, routers, a, b);
            assert_eq!((stops[0], *stops.last().unwrap()), (a, b));
            assert!(stops.len() <= 4);
            let back: Vec<u32> = dragonfly(groups, routers, b, a).into_iter().rev().collect();
            assert_eq!(stops, back);
        }
    }

    #[test]
    fn lists_of_links_are_walked_by_the_shortest_way() {
        let graph = |links: &[[u32; 2]]| Graph {
            shape: GraphShape::Links(links.to_vec()),
            bandwidth: serde_json::from_str(r#"{"value": "1 GB/s", "source": "", "provenance": "assumed"}"#).unwrap(),
            latency: serde_json::from_str(r#"{"value": "1 us", "source": "", "provenance": "assumed"}"#).unwrap(),
        };
        let square = graph(&[[0, 1], [1, 2], [2, 3], [3, 0]]);
        let near = neighbours(&square, 4).unwrap();
        assert_eq!([shortest(&near, 0, 2), shortest(&near, 3, 0)], [vec![0, 1, 2], vec![3, 0]]);
        assert!(neighbours(&graph(&[[0, 1], [2, 3]]), 4).unwrap_err().contains("host 0 to host 2"));
    }
}
