//! How many elements each operand of a kernel has.
//!
//! The kernels walk their operands in step, so one that is too short would end the walk early and leave
//! stale numbers behind, silently. Hence sizes are compared once, here, before anything runs.

use crate::plan::{AttnBlock, Exchange, HeadPart, Kernel, Mesh};

/// Elements of every read and every write, in the order of the kernel's documentation.
pub fn operand_sizes(kernel: &Kernel, views: &[Mesh]) -> (Vec<u64>, Vec<u64>) {
    let (reads, writes): (&[u64], &[u64]) = match *kernel {
        Kernel::MatMul { m, n, k, accumulate: false, .. } => (&[m * k, k * n], &[m * n]),
        Kernel::MatMul { m, n, k, accumulate: true, .. } => (&[m * k, k * n, m * n], &[m * n]),
        Kernel::Attention(ref b) | Kernel::AttentionBwd(ref b) | Kernel::MergeLse(ref b) => {
            return attention(kernel, b, views);
        }
        Kernel::AttentionDelta { rows, heads, head_dim } => {
            (&[rows * heads * head_dim, rows * heads * head_dim], &[rows * heads])
        }
        Kernel::Norm { rows, cols, .. } => (&[rows * cols, cols], &[rows * cols]),
        Kernel::NormBwd { rows, cols, .. } => {
            (&[rows * cols, cols, rows * cols, rows * cols, cols], &[rows * cols, cols])
        }
        Kernel::Rope { ref segs, batch, heads, kv_heads, head_dim, backward, .. } => {
            let n = batch * segs.len(views) * head_dim;
            let (joint, split) = (vec![n * (heads + 2 * kv_heads)], vec![n * heads, n * 2 * kv_heads]);
            return if backward { (split, joint) } else { (joint, split) };
        }
        Kernel::SwiGlu { rows, cols } => (&[2 * rows * cols], &[rows * cols]),
        Kernel::SwiGluBwd { rows, cols } => (&[2 * rows * cols, rows * cols], &[2 * rows * cols]),
        Kernel::Permute { exchange, ranks, batch, seq, ref parts } => {
            return permute(exchange, ranks, batch * seq, parts);
        }
        Kernel::Cast { elems } => (&[elems], &[elems]),
        Kernel::Add { elems, .. } => (&[elems, elems], &[elems]),
        Kernel::Fill { elems } => (&[], &[elems]),
        Kernel::Embed { rows, cols, vocab } => (&[rows, vocab * cols], &[rows * cols]),
        Kernel::EmbedBwd { rows, cols, vocab } => (&[rows, rows * cols, vocab * cols], &[vocab * cols]),
        Kernel::CrossEntropy { rows, vocab, .. } => (&[rows * vocab, rows, 1], &[rows * vocab, 1]),
        Kernel::Adam { elems, .. } => (&[elems; 4], &[elems; 3]),
    };
    (reads.to_vec(), writes.to_vec())
}

fn attention(kernel: &Kernel, b: &AttnBlock, views: &[Mesh]) -> (Vec<u64>, Vec<u64>) {
    let lse = b.batch * b.q.len(views) * b.heads;
    let q = lse * b.head_dim;
    let kv = b.batch * b.kv.len(views) * 2 * b.kv_heads * b.head_dim;
    match kernel {
        Kernel::Attention(_) => (vec![q, kv], vec![q, lse]),
        Kernel::AttentionBwd(_) => (vec![q, kv, q, lse, lse], vec![q, kv]),
        _ => (vec![q, lse, q, lse], vec![q, lse]),
    }
}

fn permute(exchange: Exchange, ranks: u64, tokens: u64, parts: &[HeadPart]) -> (Vec<u64>, Vec<u64>) {
    let here = || parts.iter().map(|p| tokens * p.lanes * p.heads * p.head_dim).collect();
    let everywhere = || parts.iter().map(|p| ranks * tokens * p.local_row(ranks)).collect::<Vec<u64>>();
    let packed = || vec![everywhere().iter().sum()];
    match exchange {
        Exchange::PackHeads => (here(), packed()),
        Exchange::UnpackSeq => (packed(), everywhere()),
        Exchange::PackSeq => (everywhere(), packed()),
        Exchange::UnpackHeads => (packed(), here()),
    }
}

/// # Panics
/// Where an operand is missing, superfluous or of another size.
pub fn check<T>(kernel: &Kernel, views: &[Mesh], reads: &[Option<&[T]>], writes: &[&mut [T]]) {
    let name = kernel.name();
    let (read_sizes, mut write_sizes) = operand_sizes(kernel, views);
    if matches!(kernel, Kernel::Adam { .. }) && writes.len() == 4 {
        write_sizes.push(write_sizes[0]);
    }
    let [r, w] = [reads.len(), writes.len()];
    let [expected_r, expected_w] = [read_sizes.len(), write_sizes.len()];
    assert!(r == expected_r && w == expected_w, "{name}: {r} reads and {w} writes, not {expected_r} and {expected_w}");
    for (i, (x, size)) in reads.iter().zip(read_sizes).enumerate() {
        let given = x.map_or(size, |x| x.len() as u64);
        assert!(given == size, "{name}: read {i} has {given} elements, not {size}");
    }
    for (i, (x, size)) in writes.iter().zip(write_sizes).enumerate() {
        assert!(x.len() as u64 == size, "{name}: write {i} has {} elements, not {size}", x.len());
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::launch;
    use crate::plan::Kernel;

    #[test]
    #[should_panic(expected = "norm: read 0 has 5 elements, not 6")]
    fn a_short_operand_is_named() {
        let kernel = Kernel::Norm { rows: 2, cols: 3, eps: 0.0 };
        launch(&kernel, &[Some(&[1.0; 5]), Some(&[1.0; 3])], &mut [&mut [0.0; 6]]);
    }

    #[test]
    #[should_panic(expected = "cast: operand 0 cannot be one of its results")]
    fn only_what_is_accumulated_may_be_in_place() {
        launch(&Kernel::Cast { elems: 1 }, &[None], &mut [&mut [0.0]]);
    }
}
