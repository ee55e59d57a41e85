//! What a core of this machine can do: the yardstick of an MFU here.

use super::kernels::{Scalar, run};
use crate::plan::{Axis, Kernel, Mesh, Plan};
use crate::units::FlopsPerSec;
use std::time::Instant;

/// Rows, columns and inner dim of the product that is timed: large enough to fill the caches' blocks.
const SIDE: u64 = 512;

/// The best rate of a matrix product on one core, in the arithmetic that `plan` is run in. Takes some ten
/// milliseconds; the best of a few, since whatever else runs only makes it slower.
pub fn best_gemm(plan: &Plan) -> FlopsPerSec {
    let timed = if super::computes_in_f64(plan) { product::<f64> } else { product::<f32> };
    let best = (0..4).map(|_| timed()).fold(f64::INFINITY, f64::min);
    FlopsPerSec::new(2.0 * (SIDE as f64).powi(3) / best)
}

/// Seconds that one product takes.
fn product<T: Scalar>() -> f64 {
    let [m, n, k] = [SIDE; 3];
    let kernel = Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8: false, bias: false };
    let side = vec![T::from_f64(0.5); (SIDE * SIDE) as usize];
    let mut c = side.clone();
    let start = Instant::now();
    run(&kernel, &[Mesh::new(&[(Axis::Dp, 1)])], 0, 1, &[Some(&side), Some(&side)], &mut [&mut c]);
    start.elapsed().as_secs_f64()
}
