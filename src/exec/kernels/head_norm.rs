//! RMSNorm of each head of q and of k. Shapes: qkv [n, (a+2k)*d], q and k before [n, (a+k)*d], w, dw `[q's d | k's d]`.

use super::{Scalar, norm};

pub struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
}

impl Heads {
    pub fn new(sizes: [u64; 3], eps: f64) -> Heads {
        let [heads, kv_heads, head_dim] = sizes.map(|n| n as usize);
        Heads { heads, kv_heads, head_dim, eps }
    }

    /// The columns at which q, k and a row end.
    fn ends(&self) -> [usize; 3] {
        [self.heads, self.heads + self.kv_heads, self.heads + 2 * self.kv_heads].map(|n| n * self.head_dim)
    }

    /// Normalises q and k in `qkv`, having kept what they were in `before`.
    pub fn forward<T: Scalar>(&self, w: &[T], qkv: &mut [T], before: &mut [T]) {
        let [q, qk, all] = self.ends();
        let (w_q, w_k) = w.split_at(self.head_dim);
        for (row, before) in qkv.chunks_exact_mut(all).zip(before.chunks_exact_mut(qk)) {
            before.copy_from_slice(&row[..qk]);
            norm::forward(self.head_dim, self.eps, &before[..q], w_q, &mut row[..q]);
            norm::forward(self.head_dim, self.eps, &before[q..], w_k, &mut row[q..qk]);
        }
    }

    /// The gradients of q and k in `d_qkv` become those of what was normalised.
    pub fn backward<T: Scalar>(&self, [before, w]: [&[T]; 2], d_qkv: &mut [T], dw: &mut [T]) {
        let [q, qk, all] = self.ends();
        let ((w_q, w_k), (dw_q, dw_k)) = (w.split_at(self.head_dim), dw.split_at_mut(self.head_dim));
        let mut dy = vec![T::zero(); qk];
        for (row, before) in d_qkv.chunks_exact_mut(all).zip(before.chunks_exact(qk)) {
            dy.copy_from_slice(&row[..qk]);
            row[..qk].fill(T::zero());
            let (dq, dk) = row[..qk].split_at_mut(q);
            norm::backward(self.head_dim, self.eps, [&before[..q], w_q, &dy[..q]], dq, dw_q);
            norm::backward(self.head_dim, self.eps, [&before[q..], w_k, &dy[q..]], dk, dw_k);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::plan::Kernel;

    const EPS: f64 = 1e-3;
    // Two tokens, a = 2, k = 1, d = 3: rows of 12, of which 9 are q and k.
    const SIZES: [u64; 4] = [2, 2, 1, 3];

    fn kernel(backward: bool) -> Kernel {
        let [rows, heads, kv_heads, head_dim] = SIZES;
        match backward {
            false => Kernel::HeadNorm { rows, heads, kv_heads, head_dim, eps: EPS },
            true => Kernel::HeadNormBwd { rows, heads, kv_heads, head_dim, eps: EPS },
        }
    }

    fn forward(x: &[f64], w: &[f64]) -> [Vec<f64>; 2] {
        let [mut y, mut before] = [vec![f64::NAN; 24], vec![f64::NAN; 18]];
        launch(&kernel(false), &[Some(x), Some(w)], &mut [&mut y, &mut before]);
        [y, before]
    }

    #[test]
    fn each_head_of_q_and_k_has_its_own_mean_square() {
        let (x, w) = (random(24, 1), random(6, 2));
        let [y, before] = forward(&x, &w);
        for (at, got) in y.iter().enumerate() {
            let (head, i) = (at % 12 / 3, at % 3);
            let of = &x[at / 3 * 3..][..3];
            let rms = (of.iter().map(|x| x * x).sum::<f64>() / 3.0 + EPS).sqrt();
            // Two heads of q, one of k, one of v.
            let want = [w[i] * x[at] / rms, w[i] * x[at] / rms, w[3 + i] * x[at] / rms, x[at]][head];
            assert_close(&[*got], &[want], 1e-12);
        }
        assert_eq!(before, [&x[..9], &x[12..21]].concat());
    }

    #[test]
    fn backward_equals_finite_differences() {
        let (x, w, dy, held) = (random(24, 1), random(6, 2), random(24, 3), random(6, 4));
        let before = forward(&x, &w)[1].clone();
        let [mut dx, mut dw] = [vec![f64::NAN; 24], held.clone()];
        let reads = [Some(&dy[..]), Some(&before[..]), Some(&w[..]), None];
        launch(&kernel(true), &reads, &mut [&mut dx, &mut dw]);
        assert_close(&dx, &slope(|x| dot(&forward(x, &w)[0], &dy), &x), 1e-8);
        let added: Vec<f64> = dw.iter().zip(&held).map(|(new, old)| new - old).collect();
        assert_close(&added, &slope(|w| dot(&forward(&x, w)[0], &dy), &w), 1e-8);
    }
}
