//! Matrix products, by ndarray's matrixmultiply.

use super::Scalar;
use super::fp8;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, ShapeBuilder};

/// A window of `x`: `shape` elements from `at` on, the rows `stride` apart; one head of some tokens, for example.
pub fn window<T>(x: &[T], at: usize, shape: (usize, usize), stride: usize) -> ArrayView2<'_, T> {
    ArrayView2::from_shape(shape.strides((stride, 1)), &x[at..]).expect("a window lies within its operand")
}

pub fn window_mut<T>(x: &mut [T], at: usize, shape: (usize, usize), stride: usize) -> ArrayViewMut2<'_, T> {
    ArrayViewMut2::from_shape(shape.strides((stride, 1)), &mut x[at..]).expect("a window lies within its operand")
}

/// The product of operands rounded to FP8, each along k.
pub fn matmul_fp8<T: Scalar>(
    [m, n, k]: [usize; 3],
    transposed: [bool; 2],
    accumulate: bool,
    a: &[T],
    b: &[T],
    c: &mut [T],
) {
    // Where the rows of A and the columns of B start, and how far apart their elements along k are.
    let (a_walk, b_walk) = (if transposed[0] { (1, m) } else { (k, 1) }, if transposed[1] { (k, 1) } else { (1, n) });
    let (a, b) = (fp8::rounded(a, [m, k], a_walk), fp8::rounded(b, [n, k], b_walk));
    matmul([m, n, k], transposed, accumulate, &a, &b, c);
}

/// C[m,n] (+)= A[m,k] B[k,n], A stored [k,m] and B stored [n,k] where `transposed` says so.
pub fn matmul<T: Scalar>(
    [m, n, k]: [usize; 3],
    transposed: [bool; 2],
    accumulate: bool,
    a: &[T],
    b: &[T],
    c: &mut [T],
) {
    let a = stored(a, m, k, transposed[0]);
    let b = stored(b, k, n, transposed[1]);
    let beta = if accumulate { T::one() } else { T::zero() };
    general_mat_mul(T::one(), &a, &b, beta, &mut window_mut(c, 0, (m, n), n));
}

fn stored<T>(x: &[T], rows: usize, cols: usize, transposed: bool) -> ArrayView2<'_, T> {
    if transposed { window(x, 0, (cols, rows), rows).reversed_axes() } else { window(x, 0, (rows, cols), cols) }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::plan::Kernel;

    /// C = A B by its definition, then laid out as the flags say.
    fn naive(m: usize, n: usize, k: usize, a: &[f64], b: &[f64]) -> Vec<f64> {
        let c = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
        (0..m * n).map(|at| c(at / n, at % n)).collect()
    }

    fn transpose(rows: usize, cols: usize, x: &[f64]) -> Vec<f64> {
        (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect()
    }

    #[test]
    fn every_orientation_equals_the_definition() {
        let (m, n, k) = (7, 5, 9);
        let (a, b, c) = (random(m * k, 1), random(k * n, 2), random(m * n, 3));
        let product = naive(m, n, k, &a, &b);
        let sum: Vec<f64> = product.iter().zip(&c).map(|(x, y)| x + y).collect();
        for (a_t, b_t) in [(false, false), (false, true), (true, false), (true, true)] {
            let a = if a_t { transpose(m, k, &a) } else { a.clone() };
            let b = if b_t { transpose(k, n, &b) } else { b.clone() };
            let kernel =
                |accumulate| Kernel::MatMul { m: 7, n: 5, k: 9, a_t, b_t, accumulate, fp8: false, bias: false };
            let mut out = vec![f64::NAN; m * n];
            launch(&kernel(false), &[Some(&a), Some(&b)], &mut [&mut out]);
            assert_close(&out, &product, 1e-12);
            let mut out = vec![f64::NAN; m * n];
            launch(&kernel(true), &[Some(&a), Some(&b), Some(&c)], &mut [&mut out]);
            assert_close(&out, &sum, 1e-12);
            let mut out = c.clone();
            launch(&kernel(true), &[Some(&a), Some(&b), None], &mut [&mut out]);
            assert_close(&out, &sum, 1e-12);
            let mut out = narrow(&c);
            launch(&kernel(true), &[Some(&narrow(&a)), Some(&narrow(&b)), None], &mut [&mut out]);
            assert_close(&widen(&out), &sum, 1e-5);
        }
    }
}
