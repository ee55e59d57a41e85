//! The part of a torus that a job gets: a block of neighbours, not the first vertices in the order of their numbers.

use crate::spec::{Graph, GraphShape};

/// Vertices along an edge of the cubes that optical switches join in tori of three dims. The switches close the rings
/// of any block of whole cubes (Jouppi et al., arXiv:2304.01433, section 2).
const CUBE: u32 = 4;

/// The block of `gpus` vertices that is nearest to a cube or square; `None` where no block has `gpus` vertices, where
/// blocks are not cut from such a graph, or where all of it is used.
pub fn slice(graph: &Graph, gpus: u32) -> Option<Graph> {
    let GraphShape::Torus(all) = &graph.shape else { return None };
    if all.iter().map(|&d| u64::from(d)).product::<u64>() <= u64::from(gpus) {
        return None;
    }
    let dims = blocks(all, gpus).into_iter().min_by_key(|dims| {
        let cut = dims.iter().filter(|d| **d % CUBE != 0).count();
        (dims.iter().sum::<u32>(), cut, dims.clone())
    })?;
    let cubes = all.len() == 3 && dims.iter().all(|d| d % CUBE == 0);
    // Two neighbours have one link, whichever way around.
    let closes = |(d, of): (&u32, &u32)| cubes || d == of || *d <= 2;
    let shape = match dims.iter().zip(all).all(closes) {
        true => GraphShape::Torus(dims),
        false => GraphShape::Mesh(dims),
    };
    Some(Graph { shape, ..graph.clone() })
}

/// The dims of all blocks of `gpus` vertices, none longer than the dims they are cut from.
fn blocks(all: &[u32], gpus: u32) -> Vec<Vec<u32>> {
    let Some((&most, rest)) = all.split_first() else { return if gpus == 1 { vec![vec![]] } else { vec![] } };
    let with = |first: u32| blocks(rest, gpus / first).into_iter().map(move |dims| [vec![first], dims].concat());
    (1..=most.min(gpus)).filter(|first| gpus.is_multiple_of(*first)).flat_map(with).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ClusterSpec;

    fn of(name: &str, gpus: u32) -> Option<GraphShape> {
        slice(&ClusterSpec::find(name).unwrap().graph.unwrap(), gpus).map(|graph| graph.shape)
    }

    #[test]
    fn a_job_gets_a_block_of_its_pod() {
        use GraphShape::{Mesh, Torus};
        assert_eq!(of("tpu-v5p-pod", 64), Some(Torus(vec![4, 4, 4])));
        assert_eq!(of("tpu-v5p-pod", 2048), Some(Torus(vec![8, 16, 16])));
        assert_eq!(of("tpu-v5p-pod", 32), Some(Mesh(vec![2, 4, 4])));
        assert_eq!(of("tpu-v5p-pod", 18), Some(Mesh(vec![2, 3, 3])));
        assert_eq!(of("tpu-v6e-pod", 8), Some(Mesh(vec![2, 4])));
        assert_eq!(of("tpu-v6e-pod", 64), Some(Mesh(vec![8, 8])));
        // All of it, and more in one line than there are.
        assert_eq!((of("tpu-v6e-pod", 256), of("tpu-v6e-pod", 17)), (None, None));
    }
}
