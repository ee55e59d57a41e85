//! LayerNorm (Ba et al., arXiv:1607.06450). Shapes: x, y, dx, dy [rows, cols]; w, dw [cols], or [weight | bias].

use super::Scalar;
use super::scalar::sum_with;

/// The mean of a row, and 1 / its standard deviation.
fn moments<T: Scalar>(x: &[T], eps: f64) -> (T, T) {
    let cols = T::from_f64(x.len() as f64);
    let mean = sum_with(x, x, |x, _| x) / cols;
    let variance = sum_with(x, x, |x, _| (x - mean) * (x - mean)) / cols;
    (mean, T::one() / (variance + T::from_f64(eps)).sqrt())
}

pub fn forward<T: Scalar>(cols: usize, eps: f64, x: &[T], w: &[T], y: &mut [T]) {
    let (w, bias) = w.split_at(cols);
    for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
        let (mean, r) = moments(x, eps);
        y.iter_mut().zip(x.iter().zip(w)).for_each(|(y, (&x, &w))| *y = (x - mean) * r * w);
        y.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
    }
}

/// Adds the norm's gradient to `dx`, which holds the residual's, and to `dw`.
pub fn backward<T: Scalar>(cols: usize, eps: f64, [x, w, dy]: [&[T]; 3], dx: &mut [T], dw: &mut [T]) {
    let (dw, db) = dw.split_at_mut(cols);
    let count = T::from_f64(cols as f64);
    let (mut n, mut dn) = (vec![T::zero(); cols], vec![T::zero(); cols]);
    for ((x, dy), dx) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)) {
        let (mean, r) = moments(x, eps);
        n.iter_mut().zip(x).for_each(|(n, &x)| *n = (x - mean) * r);
        dn.iter_mut().zip(w.iter().zip(dy)).for_each(|(dn, (&w, &dy))| *dn = w * dy);
        // What only moves the mean or scales the row is divided out.
        let (shift, along) = (sum_with(&dn, &dn, |dn, _| dn) / count, sum_with(&n, &dn, |n, dn| n * dn) / count);
        dx.iter_mut().zip(n.iter().zip(&dn)).for_each(|(dx, (&n, &dn))| *dx += r * (dn - shift - n * along));
        dw.iter_mut().zip(n.iter().zip(dy)).for_each(|(dw, (&n, &dy))| *dw += dy * n);
        db.iter_mut().zip(dy).for_each(|(db, &dy)| *db += dy);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::plan::Kernel;

    const EPS: f64 = 1e-3;

    fn norm(x: &[f64], w: &[f64]) -> Vec<f64> {
        let mut y = vec![f64::NAN; x.len()];
        let kernel = Kernel::LayerNorm { rows: 3, cols: 11, eps: EPS, bias: w.len() == 22 };
        launch(&kernel, &[Some(x), Some(w)], &mut [&mut y]);
        y
    }

    #[test]
    fn forward_equals_the_definition() {
        let (x, w) = (random(33, 1), random(22, 2));
        let row = |r: usize| &x[r * 11..][..11];
        let mean = |r: usize| row(r).iter().sum::<f64>() / 11.0;
        let variance = |r: usize| row(r).iter().map(|x| (x - mean(r)).powi(2)).sum::<f64>() / 11.0;
        let at = |i: usize| w[i % 11] * (x[i] - mean(i / 11)) / (variance(i / 11) + EPS).sqrt();
        assert_close(&norm(&x, &w[..11]), &(0..33).map(at).collect::<Vec<f64>>(), 1e-12);
        assert_close(&norm(&x, &w), &(0..33).map(|i| at(i) + w[11 + i % 11]).collect::<Vec<f64>>(), 1e-12);
    }

    #[test]
    fn backward_equals_finite_differences_beside_the_residual() {
        for width in [11, 22] {
            let (x, w, dy) = (random(33, 1), random(width, 2), random(33, 3));
            let (residual, before) = (random(33, 4), random(width, 5));
            let plus = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
            let want_x = plus(&residual, &slope(|x| dot(&norm(x, &w), &dy), &x));
            let want_w = plus(&before, &slope(|w| dot(&norm(&x, w), &dy), &w));
            let kernel = Kernel::LayerNormBwd { rows: 3, cols: 11, eps: EPS, bias: width == 22 };
            let (mut dx, mut dw) = (residual.clone(), vec![f64::NAN; width]);
            let reads = [Some(&x[..]), Some(&w), Some(&dy), None, Some(&before[..])];
            launch(&kernel, &reads, &mut [&mut dx, &mut dw]);
            assert_close(&dx, &want_x, 1e-8);
            assert_close(&dw, &want_w, 1e-8);
        }
    }
}
