//! RMSNorm. Shapes: x, y, dx, dy [rows, cols]; w, dw [cols].

use super::Scalar;
use super::scalar::{sum_with, wide};

/// 1 / root of the mean square.
#[inline(always)]
fn inverse_rms<T: Scalar>(x: &[T], eps: f64) -> T {
    let mean = sum_with(x, x, |x, y| x * y) / T::from_f64(x.len() as f64);
    T::one() / (mean + T::from_f64(eps)).sqrt()
}

pub fn forward<T: Scalar>(cols: usize, eps: f64, x: &[T], w: &[T], y: &mut [T]) {
    for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
        forward_row(eps, x, w, y);
    }
}

wide! {
    fn forward_row<'a, T>(eps: f64, x: &'a [T], w: &'a [T], y: &'a mut [T]) -> () {
        let r = inverse_rms(x, eps);
        y.iter_mut().zip(x.iter().zip(w)).for_each(|(y, (&x, &w))| *y = x * r * w);
    }
}

/// Adds the norm's gradient to `dx`, which holds the residual's, and to `dw`.
pub fn backward<T: Scalar>(cols: usize, eps: f64, [x, w, dy]: [&[T]; 3], dx: &mut [T], dw: &mut [T]) {
    let rows = x.chunks_exact(cols).zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols));
    let mut dn = vec![T::zero(); cols];
    for ((x, dy), dx) in rows {
        backward_row(eps, [x, w, dy], [&mut dn, dx, &mut *dw]);
    }
}

wide! {
    /// `reads` are x, w and dy, `writes` are scratch, dx and dw.
    fn backward_row<'a, T>(eps: f64, reads: [&'a [T]; 3], writes: [&'a mut [T]; 3]) -> () {
        let ([x, w, dy], [dn, dx, dw]) = (reads, writes);
        let r = inverse_rms(x, eps);
        dn.iter_mut().zip(w.iter().zip(dy)).for_each(|(dn, (&w, &dy))| *dn = w * dy);
        // The part of the gradient along x only changes the root mean square, which is divided out.
        let along = sum_with(x, dn, |x, dn| x * dn) * r * r / T::from_f64(x.len() as f64);
        dx.iter_mut().zip(x.iter().zip(&*dn)).for_each(|(dx, (&x, &dn))| *dx += r * (dn - x * along));
        dw.iter_mut().zip(x.iter().zip(dy)).for_each(|(dw, (&x, &dy))| *dw += dy * x * r);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::plan::Kernel;

    const EPS: f64 = 1e-3;

    fn norm(x: &[f64], w: &[f64]) -> Vec<f64> {
        let mut y = vec![f64::NAN; x.len()];
        let kernel = Kernel::Norm { rows: 3, cols: 11, eps: EPS };
        launch(&kernel, &[Some(x), Some(w)], &mut [&mut y]);
        y
    }

    #[test]
    fn forward_equals_the_definition() {
        let (x, w) = (random(33, 1), random(11, 2));
        let mean = |r: usize| x[r * 11..][..11].iter().map(|x| x * x).sum::<f64>() / 11.0;
        let want: Vec<f64> = (0..33).map(|i| w[i % 11] * x[i] / (mean(i / 11) + EPS).sqrt()).collect();
        assert_close(&norm(&x, &w), &want, 1e-12);
    }

    #[test]
    fn backward_equals_finite_differences_beside_the_residual() {
        let (x, w, dy) = (random(33, 1), random(11, 2), random(33, 3));
        let (residual, before) = (random(33, 4), random(11, 5));
        let plus = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
        let want_x = plus(&residual, &slope(|x| dot(&norm(x, &w), &dy), &x));
        let want_w = plus(&before, &slope(|w| dot(&norm(&x, w), &dy), &w));
        let kernel = Kernel::NormBwd { rows: 3, cols: 11, eps: EPS };
        for in_place in [true, false] {
            let (mut dx, mut dw) =
                if in_place { (residual.clone(), before.clone()) } else { (vec![f64::NAN; 33], vec![f64::NAN; 11]) };
            let old = |x| if in_place { None } else { Some(x) };
            let reads = [Some(&x[..]), Some(&w), Some(&dy), old(&residual[..]), old(&before[..])];
            launch(&kernel, &reads, &mut [&mut dx, &mut dw]);
            assert_close(&dx, &want_x, 1e-8);
            assert_close(&dw, &want_w, 1e-8);
        }
    }
}
