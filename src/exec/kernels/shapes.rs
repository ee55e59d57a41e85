//! Holds the operands a kernel is given against the sizes it needs.
//!
//! The kernels walk their operands in step, so one that is too short would end the walk early and leave
//! stale numbers behind, silently. Hence sizes are compared once, here, before anything runs.

use crate::plan::kernel::Operands;
use crate::plan::{Kernel, Mesh};

/// # Panics
/// Where an operand is missing, superfluous or of another size.
pub fn check<T>(kernel: &Kernel, views: &[Mesh], reads: &[Option<&[T]>], writes: &[&mut [T]]) {
    let name = kernel.name();
    let Operands { reads: read_sizes, writes: mut write_sizes } = kernel.operands(views);
    if kernel.may_cast() && writes.len() == write_sizes.len() + 1 {
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
