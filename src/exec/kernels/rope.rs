//! Rotary embedding (Su et al., arXiv:2104.09864), with Hugging Face's pairs: element i of a head turns
//! with element i + d/2, by position * theta^(-2i/d).
//!
//! Shapes: qkv [n, (a+2k)*d], q [n, a*d], kv [n, (K: k*d | V: k*d)]. Row b*len + j stands at the j-th of
//! the rank's positions, in every sequence.

use super::Scalar;

pub struct Rope<T> {
    /// (cos, sin) by position and pair, [len, d/2].
    turns: Vec<(T, T)>,
    q_row: usize,
    k_row: usize,
    head_dim: usize,
    /// Elements of a head that turn.
    rotary: usize,
}

impl<T: Scalar> Rope<T> {
    pub fn new(positions: &[u64], [heads, kv_heads, head_dim, rotary]: [usize; 4], theta: f64) -> Rope<T> {
        let half = rotary / 2;
        let speeds: Vec<f64> = (0..half).map(|i| theta.powf(-2.0 * i as f64 / rotary as f64)).collect();
        // In f64: the angle of a far position has no digits left in f32.
        let turn = |angle: f64| (T::from_f64(angle.cos()), T::from_f64(angle.sin()));
        let turns = positions.iter().flat_map(|&p| speeds.iter().map(move |s| turn(p as f64 * s))).collect();
        Rope { turns, q_row: heads * head_dim, k_row: kv_heads * head_dim, head_dim, rotary }
    }

    pub fn forward(&self, qkv: &[T], q: &mut [T], kv: &mut [T]) {
        let rows = q.chunks_exact_mut(self.q_row).zip(kv.chunks_exact_mut(2 * self.k_row));
        let mut turns = self.rows_of_turns();
        for (qkv, (q, kv)) in qkv.chunks_exact(self.q_row + 2 * self.k_row).zip(rows) {
            let turns = turns();
            q.copy_from_slice(&qkv[..self.q_row]);
            kv.copy_from_slice(&qkv[self.q_row..]);
            self.rotate(q, turns, T::one());
            self.rotate(&mut kv[..self.k_row], turns, T::one());
        }
    }

    /// The transpose: turns back.
    pub fn backward(&self, dq: &[T], dkv: &[T], dqkv: &mut [T]) {
        let rows = dq.chunks_exact(self.q_row).zip(dkv.chunks_exact(2 * self.k_row));
        let mut turns = self.rows_of_turns();
        for (dqkv, (dq, dkv)) in dqkv.chunks_exact_mut(self.q_row + 2 * self.k_row).zip(rows) {
            let turns = turns();
            dqkv[..self.q_row].copy_from_slice(dq);
            dqkv[self.q_row..].copy_from_slice(dkv);
            self.rotate(&mut dqkv[..self.q_row + self.k_row], turns, -T::one());
        }
    }

    /// The turns of one row after the other, over all sequences.
    fn rows_of_turns<'a>(&'a self) -> impl FnMut() -> &'a [(T, T)] {
        let (half, mut at) = (self.rotary / 2, 0);
        move || {
            let from = at % self.turns.len().max(1);
            at = from + half;
            &self.turns[from..from + half]
        }
    }

    /// Turns every head of a row.
    fn rotate(&self, row: &mut [T], turns: &[(T, T)], direction: T) {
        for head in row.chunks_exact_mut(self.head_dim) {
            let (low, high) = head[..self.rotary].split_at_mut(self.rotary / 2);
            for ((x, y), &(cos, sin)) in low.iter_mut().zip(high).zip(turns) {
                let sin = sin * direction;
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::exec::kernels::run;
    use crate::plan::{Kernel, Segs};

    // b = 2, s = 8 on two ranks, a = 3, k = 1, d = 6.
    const ROWS: usize = 2 * 4;

    fn kernel(segs: &Segs, backward: bool) -> Kernel {
        Kernel::Rope {
            segs: segs.clone(),
            documents: vec![3, 5].into(),
            batch: 2,
            heads: 3,
            kv_heads: 1,
            head_dim: 6,
            theta: 100.0,
            backward,
            rotary: None,
        }
    }

    fn forward(rank: u32, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut q, mut kv) = (vec![f64::NAN; ROWS * 18], vec![f64::NAN; ROWS * 12]);
        run(&kernel(&zigzag(8), false), &ring(2), rank, 1, &[Some(qkv)], &mut [&mut q, &mut kv]);
        (q, kv)
    }

    #[test]
    fn forward_turns_each_pair_as_a_complex_number() {
        let qkv = random(ROWS * 30, 1);
        let (q, kv) = forward(1, &qkv);
        // Rank 1 of 2 holds the two middle chunks, 2 to 6; the second document begins at 3.
        for (row, position) in [2.0, 0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0].into_iter().enumerate() {
            for (head, i) in (0..4).flat_map(|head| (0..3).map(move |i| (head, i))) {
                let x = &qkv[row * 30 + head * 6..][..6];
                let angle = position * 100f64.powf(-(i as f64) / 3.0);
                let (sin, cos) = angle.sin_cos();
                let got = if head < 3 { &q[row * 18 + head * 6..][..6] } else { &kv[row * 12..][..6] };
                assert_close(&[got[i], got[i + 3]], &[x[i] * cos - x[i + 3] * sin, x[i + 3] * cos + x[i] * sin], 1e-12);
            }
            assert_eq!(kv[row * 12 + 6..][..6], qkv[row * 30 + 24..][..6], "V goes through");
        }
    }

    #[test]
    fn backward_is_the_transpose() {
        let (x, dq, dkv) = (random(ROWS * 30, 1), random(ROWS * 18, 2), random(ROWS * 12, 3));
        for rank in 0..2 {
            let (q, kv) = forward(rank, &x);
            let mut dx = vec![f64::NAN; ROWS * 30];
            let reads = [Some(&dq[..]), Some(&dkv[..])];
            run(&kernel(&zigzag(8), true), &ring(2), rank, 1, &reads, &mut [&mut dx]);
            // <y, R x> = <Rᵀ y, x>
            assert_close(&[dot(&dx, &x)], &[dot(&dq, &q) + dot(&dkv, &kv)], 1e-12);
        }
    }
}
