//! What multi-head latent attention needs beside products and attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).
//!
//! A head's query and key are `nope` elements that do not turn and `rope` that do, of the keys the same ones in every
//! head. Element 2i turns with 2i + 1, by position * theta^(-2i/rope), as in DeepSeek's checkpoints; Hugging Face puts
//! the pairs' halves apart first, in queries and keys alike, which no score sees.
//!
//! Shapes: q [n, a*(nope + rope)], kv [n, a*(nope + v)], k [n, rope]; together q as it was and
//! [n, (K: a*(nope + rope) | V: a*v)].

use super::{Scalar, norm};
use crate::spec::Turning;

/// RMSNorm of the first `cols` of each row; the columns behind them are copied to `rest`.
pub fn norm_forward<T: Scalar>([cols, width]: [usize; 2], eps: f64, x: &[T], w: &[T], y: &mut [T], rest: &mut [T]) {
    for (i, x) in x.chunks_exact(width).enumerate() {
        norm::forward(cols, eps, &x[..cols], w, &mut y[i * cols..(i + 1) * cols]);
        if width > cols {
            rest[i * (width - cols)..][..width - cols].copy_from_slice(&x[cols..]);
        }
    }
}

/// dx, and dw added to; `reads` are x, w, dy and the gradient of what is behind, or nothing.
pub fn norm_backward<T: Scalar>(
    [cols, width]: [usize; 2],
    eps: f64,
    [x, w, dy, d_rest]: [&[T]; 4],
    dx: &mut [T],
    dw: &mut [T],
) {
    let rows = x.chunks_exact(width).zip(dx.chunks_exact_mut(width)).zip(dy.chunks_exact(cols));
    for (i, ((x, dx), dy)) in rows.enumerate() {
        let (first, behind) = dx.split_at_mut(cols);
        first.fill(T::zero());
        norm::backward(cols, eps, [&x[..cols], w, dy], first, dw);
        if width > cols {
            behind.copy_from_slice(&d_rest[i * (width - cols)..][..width - cols]);
        }
    }
}

pub struct Heads<T> {
    /// (cos, sin) by position and pair, [len, rope/2].
    turns: Vec<(T, T)>,
    heads: usize,
    nope: usize,
    rope: usize,
    v: usize,
}

impl<T: Scalar> Heads<T> {
    pub fn new(
        positions: &[u64],
        [heads, nope, rope, v]: [usize; 4],
        Turning { speeds, factor }: &Turning,
    ) -> Heads<T> {
        // In f64: the angle of a far position has no digits left in f32.
        let turn = |angle: f64| (T::from_f64(factor * angle.cos()), T::from_f64(factor * angle.sin()));
        let turns = positions.iter().flat_map(|&p| speeds.iter().map(move |s| turn(p as f64 * s))).collect();
        Heads { turns, heads, nope, rope, v }
    }

    fn turns(&self, row: usize) -> &[(T, T)] {
        let (half, all) = (self.rope / 2, self.turns.len());
        if all == 0 { &[] } else { &self.turns[row * half % all..][..half] }
    }

    pub fn forward(&self, [q_in, kv_in, k_in]: [&[T]; 3], q: &mut [T], kv: &mut [T]) {
        let (qk, a) = (self.nope + self.rope, self.heads);
        let mut shared = vec![T::zero(); self.rope];
        q.copy_from_slice(q_in);
        let rows = q.chunks_exact_mut(a * qk).zip(kv.chunks_exact_mut(a * (qk + self.v)));
        for (row, (q, kv)) in rows.enumerate() {
            let turns = self.turns(row);
            q.chunks_exact_mut(qk).for_each(|head| rotate(&mut head[self.nope..], turns, T::one()));
            shared.copy_from_slice(&k_in[row * self.rope..][..self.rope]);
            rotate(&mut shared, turns, T::one());
            let (k, v) = kv.split_at_mut(a * qk);
            let given = kv_in[row * a * (self.nope + self.v)..].chunks_exact(self.nope + self.v);
            for ((given, k), v) in given.zip(k.chunks_exact_mut(qk)).zip(v.chunks_exact_mut(self.v)) {
                k[..self.nope].copy_from_slice(&given[..self.nope]);
                k[self.nope..].copy_from_slice(&shared);
                v.copy_from_slice(&given[self.nope..]);
            }
        }
    }

    /// The transpose of the forward pass: gradients of its inputs from those of its results.
    pub fn backward(&self, [dq, dkv]: [&[T]; 2], d_q_in: &mut [T], d_kv_in: &mut [T], d_k_in: &mut [T]) {
        let (qk, a) = (self.nope + self.rope, self.heads);
        d_q_in.copy_from_slice(dq);
        let rows = d_q_in.chunks_exact_mut(a * qk).zip(dkv.chunks_exact(a * (qk + self.v)));
        for (row, (d_q_in, dkv)) in rows.enumerate() {
            let turns = self.turns(row);
            d_q_in.chunks_exact_mut(qk).for_each(|head| rotate(&mut head[self.nope..], turns, -T::one()));
            let d_shared = &mut d_k_in[row * self.rope..][..self.rope];
            d_shared.fill(T::zero());
            let (dk, dv) = dkv.split_at(a * qk);
            let to = d_kv_in[row * a * (self.nope + self.v)..].chunks_exact_mut(self.nope + self.v);
            for ((to, dk), dv) in to.zip(dk.chunks_exact(qk)).zip(dv.chunks_exact(self.v)) {
                to[..self.nope].copy_from_slice(&dk[..self.nope]);
                to[self.nope..].copy_from_slice(dv);
                d_shared.iter_mut().zip(&dk[self.nope..]).for_each(|(sum, &d)| *sum += d);
            }
            rotate(d_shared, turns, -T::one());
        }
    }
}

fn rotate<T: Scalar>(x: &mut [T], turns: &[(T, T)], direction: T) {
    for (pair, &(cos, sin)) in x.chunks_exact_mut(2).zip(turns) {
        let (sin, [x, y]) = (sin * direction, [pair[0], pair[1]]);
        (pair[0], pair[1]) = (x * cos - y * sin, y * cos + x * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::exec::kernels::run;
    use crate::plan::{Kernel, Segs};

    // b = 2, s = 8 on two ranks, a = 3, nope = 3, rope = 4, v = 2: rows of 21, 15 and 4, together 21 and 27.
    const ROWS: usize = 2 * 4;
    const EPS: f64 = 1e-3;

    fn kernel(segs: &Segs, backward: bool) -> Kernel {
        let documents = vec![3, 5].into();
        let (batch, heads, nope, rope, v) = (2, 3, 3, 4, 2);
        Kernel::LatentRope {
            segs: segs.clone(),
            documents,
            batch,
            heads,
            nope,
            rope,
            v,
            theta: 100.0,
            backward,
            scaling: None,
        }
    }

    fn forward(rank: u32, x: [&[f64]; 3]) -> [Vec<f64>; 2] {
        let [mut q, mut kv] = [21, 27].map(|row| vec![f64::NAN; ROWS * row]);
        run(&kernel(&zigzag(8), false), &ring(2), rank, 1, &x.map(Some), &mut [&mut q, &mut kv]);
        [q, kv]
    }

    #[test]
    fn pairs_turn_as_complex_numbers_and_heads_share_their_keys() {
        let [q_in, kv_in, k_in] = [(21, 1), (15, 2), (4, 3)].map(|(row, seed)| random(ROWS * row, seed));
        let [q, kv] = forward(1, [&q_in, &kv_in, &k_in]);
        // Rank 1 of 2 holds the two middle chunks, 2 to 6; the second document begins at 3.
        for (row, position) in [2.0, 0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0].into_iter().enumerate() {
            let turned = |x: &[f64], pair: usize| {
                let (sin, cos) = (position * 100f64.powf(-(pair as f64) / 2.0)).sin_cos();
                [x[2 * pair] * cos - x[2 * pair + 1] * sin, x[2 * pair + 1] * cos + x[2 * pair] * sin]
            };
            for head in 0..3 {
                let (q_in, q) = (&q_in[row * 21 + head * 7..][..7], &q[row * 21 + head * 7..][..7]);
                let (given, k, v) =
                    (&kv_in[row * 15 + head * 5..], &kv[row * 27 + head * 7..][..7], &kv[row * 27 + 21 + head * 2..]);
                assert_eq!((&q[..3], &k[..3], &v[..2]), (&q_in[..3], &given[..3], &given[3..5]));
                for pair in 0..2 {
                    let at = 3 + 2 * pair;
                    assert_close(&q[at..at + 2], &turned(&q_in[3..], pair), 1e-12);
                    assert_close(&k[at..at + 2], &turned(&k_in[row * 4..], pair), 1e-12);
                }
            }
        }
    }

    #[test]
    fn backward_is_the_transpose() {
        let x = [(21, 1), (15, 2), (4, 3)].map(|(row, seed)| random(ROWS * row, seed));
        let dy = [(21, 4), (27, 5)].map(|(row, seed)| random(ROWS * row, seed));
        for rank in 0..2 {
            let y = forward(rank, [&x[0], &x[1], &x[2]]);
            let [mut a, mut b, mut c] = [21, 15, 4].map(|row| vec![f64::NAN; ROWS * row]);
            let reads = [Some(&dy[0][..]), Some(&dy[1][..])];
            run(&kernel(&zigzag(8), true), &ring(2), rank, 1, &reads, &mut [&mut a, &mut b, &mut c]);
            // <dy, A x> = <Aᵀ dy, x>
            let there = dot(&dy[0], &y[0]) + dot(&dy[1], &y[1]);
            assert_close(&[dot(&a, &x[0]) + dot(&b, &x[1]) + dot(&c, &x[2])], &[there], 1e-12);
        }
    }

    fn norm(x: &[f64], w: &[f64], rest: u64) -> Vec<f64> {
        let kernel = Kernel::LatentNorm { rows: 3, cols: 5, rest, eps: EPS };
        let [mut y, mut behind] = [vec![f64::NAN; 15], vec![f64::NAN; 3 * rest as usize]];
        match rest {
            0 => launch(&kernel, &[Some(x), Some(w)], &mut [&mut y]),
            _ => launch(&kernel, &[Some(x), Some(w)], &mut [&mut y, &mut behind]),
        }
        [y, behind].concat()
    }

    #[test]
    fn norms_of_a_part_of_a_row() {
        for rest in [0, 2] {
            let (x, w, dy) = (random(3 * (5 + rest), 1), random(5, 2), random(3 * (5 + rest), 3));
            let y = norm(&x, &w, rest as u64);
            for row in 0..3 {
                let of = &x[row * (5 + rest)..][..5];
                let rms = (of.iter().map(|x| x * x).sum::<f64>() / 5.0 + EPS).sqrt();
                let want: Vec<f64> = of.iter().zip(&w).map(|(x, w)| x / rms * w).collect();
                assert_close(&y[row * 5..][..5], &want, 1e-12);
                assert_eq!(y[15 + row * rest..][..rest], x[row * (5 + rest) + 5..][..rest]);
            }
            let kernel = Kernel::LatentNormBwd { rows: 3, cols: 5, rest: rest as u64, eps: EPS };
            let [mut dx, mut dw] = [vec![f64::NAN; 3 * (5 + rest)], vec![1.0; 5]];
            let mut reads = vec![Some(&x[..]), Some(&w[..]), None, Some(&dy[..15])];
            reads.extend((rest > 0).then_some(Some(&dy[15..])));
            launch(&kernel, &reads, &mut [&mut dx, &mut dw]);
            assert_close(&dx, &slope(|x| dot(&norm(x, &w, rest as u64), &dy), &x), 1e-8);
            let added: Vec<f64> = dw.iter().map(|dw| dw - 1.0).collect();
            assert_close(&added, &slope(|w| dot(&norm(&x, w, rest as u64), &dy), &w), 1e-8);
        }
    }
}
