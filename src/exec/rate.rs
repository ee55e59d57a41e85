//! What a core of this machine can do: the yardstick of an MFU here.

use super::kernels::{Scalar, run};
use crate::plan::{Axis, Kernel, Mesh, Plan};
use crate::units::FlopsPerSec;
use cpu_time::ThreadTime;
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

/// Elements of each operand of a pass in a core's cache, and of one that is in no cache near the core.
const CACHED: usize = 1 << 14;
const IN_MEMORY: usize = 1 << 21;
/// Passes in cache that are timed together: one alone takes microseconds.
const PASSES: usize = 64;

/// Kernels that are alike every time, to see how fast the machine is now. Their memory was touched before.
pub struct Yardstick {
    square: [Vec<f32>; 3],
    cached: [Vec<f32>; 3],
    large: [Vec<f32>; 3],
}

impl Default for Yardstick {
    fn default() -> Yardstick {
        let three = |n: usize| [0.5, 0.25, 0.0].map(|x| vec![x; n]);
        Yardstick { square: three((SIDE * SIDE) as usize), cached: three(CACHED), large: three(IN_MEMORY) }
    }
}

impl Yardstick {
    /// Seconds of a core that each kernel takes: a product, `PASSES` passes in cache, a pass over memory.
    pub fn kernels(&mut self) -> [f64; 3] {
        let [m, n, k] = [SIDE; 3];
        let product = Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8: false, bias: false };
        let add = |n: usize| Kernel::Add { elems: n as u64, trim: None };
        [
            on_core(&product, &mut self.square, 1),
            on_core(&add(CACHED), &mut self.cached, PASSES),
            on_core(&add(IN_MEMORY), &mut self.large, 1),
        ]
    }
}

fn on_core(kernel: &Kernel, [a, b, c]: &mut [Vec<f32>; 3], times: usize) -> f64 {
    let (views, core) = ([Mesh::new(&[(Axis::Dp, 1)])], ThreadTime::now());
    for _ in 0..times {
        run(kernel, &views, 0, 1, &[Some(&**a), Some(&**b)], &mut [&mut **c]);
    }
    core.elapsed().as_secs_f64()
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
