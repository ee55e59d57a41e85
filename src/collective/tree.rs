//! Two binary trees over the same members (Sanders, Speck and Traeff, Parallel Computing 35, 2009; NCCL 2.4): whoever is
//! an inner vertex of one is a leaf of the other, so that half of the data over each keeps every port busy both ways.

/// The parent of each of `n` members in the first tree; `None` for the root. Members stand in order, vertex v at the
/// height of its lowest set bit; member 0 is above the vertex in the middle.
pub fn first(n: usize) -> Vec<Option<usize>> {
    (0..n).map(|v| parent(v, n)).collect()
}

/// The parent of each member in the second tree: mirrored where the number is even, shifted by one where it is odd.
pub fn second(n: usize) -> Vec<Option<usize>> {
    let image = |v: usize| if n.is_multiple_of(2) { n - 1 - v } else { (v + 1) % n };
    let mut parents = vec![None; n];
    for (v, up) in first(n).into_iter().enumerate() {
        parents[image(v)] = up.map(image);
    }
    parents
}

fn parent(v: usize, n: usize) -> Option<usize> {
    if v == 0 {
        return None;
    }
    let bit = v & v.wrapping_neg();
    let up = (v ^ bit) | (bit << 1);
    Some(if up >= n { v ^ bit } else { up })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth(parents: &[Option<usize>], mut v: usize) -> usize {
        let mut steps = 0;
        while let Some(up) = parents[v] {
            (v, steps) = (up, steps + 1);
            assert!(steps <= parents.len(), "a cycle");
        }
        steps
    }

    #[test]
    fn both_are_trees_of_logarithmic_depth() {
        for n in 1..200 {
            for parents in [first(n), second(n)] {
                assert_eq!(parents.iter().filter(|p| p.is_none()).count(), 1);
                let deepest = (0..n).map(|v| depth(&parents, v)).max().unwrap();
                assert!(deepest <= n.next_power_of_two().ilog2() as usize + 1, "{n}: {deepest}");
                let children = |v| parents.iter().filter(|p| **p == Some(v)).count();
                assert!((0..n).all(|v| children(v) <= 2));
            }
        }
    }

    #[test]
    fn inner_vertices_of_one_are_leaves_of_the_other() {
        for n in (2..100).step_by(2) {
            let inner = |parents: &[Option<usize>], v| parents.contains(&Some(v));
            let (a, b) = (first(n), second(n));
            // The root has one child; it may be inner in both.
            let both = (0..n).filter(|&v| inner(&a, v) && inner(&b, v) && a[v].is_some() && b[v].is_some()).count();
            assert_eq!(both, 0, "{n}");
        }
    }
}
