//! The optimizer Muon.

use super::{Scalar, gemm, outputs, pointwise};
use crate::plan::Mesh;
use crate::plan::muon::{COEFFICIENTS, EPS, Matrices, MuonKernel, SCALE, Stretch};
use ndarray::linalg::general_mat_mul;

/// Where a rank runs, and in which step of the optimizer, counted from 1.
pub type At<'a> = (&'a [Mesh], u32, u64);

pub fn run<T: Scalar>(kernel: &MuonKernel, (views, rank, step): At, reads: &[Option<&[T]>], writes: &mut [&mut [T]]) {
    let read = |i: usize| reads[i].unwrap_or_else(|| panic!("{}: operand {i} cannot be a result", kernel.name()));
    match kernel {
        MuonKernel::Momentum { part, momentum } => {
            let [m, u] = outputs(writes);
            momentum_of(&part.stretches(views, rank), *momentum, read(0), m, u);
        }
        MuonKernel::Normalise { of } => {
            let [x] = outputs(writes);
            each(of, read(0), x).for_each(|(m, x)| normalise(m, x));
        }
        MuonKernel::Gram { of } => {
            let [a] = outputs(writes);
            let (short, long) = sides(of);
            let is_wide = of.rows <= of.cols;
            for (x, a) in read(0).chunks(short * long).zip(a.chunks_mut(short * short)) {
                gemm::matmul([short, short, long], [!is_wide, is_wide], false, x, x, a);
            }
        }
        MuonKernel::Square { of } => {
            let [b] = outputs(writes);
            let (short, _) = sides(of);
            let [_, of_a, of_square] = COEFFICIENTS.map(T::from_f64);
            for (a, b) in read(0).chunks(short * short).zip(b.chunks_mut(short * short)) {
                b.copy_from_slice(a);
                let a = gemm::window(a, 0, (short, short), short);
                general_mat_mul(of_square, &a, &a, of_a, &mut gemm::window_mut(b, 0, (short, short), short));
            }
        }
        MuonKernel::Apply { of } => {
            let [y] = outputs(writes);
            let (rows, cols) = (of.rows as usize, of.cols as usize);
            let (short, long) = sides(of);
            let of_x = T::from_f64(COEFFICIENTS[0]);
            let matrices = read(0).chunks(short * long).zip(read(1).chunks(short * short));
            for ((x, b), y) in matrices.zip(y.chunks_mut(short * long)) {
                y.copy_from_slice(x);
                let (x, b) = (gemm::window(x, 0, (rows, cols), cols), gemm::window(b, 0, (short, short), short));
                let mut y = gemm::window_mut(y, 0, (rows, cols), cols);
                if rows <= cols {
                    general_mat_mul(T::one(), &b, &x, of_x, &mut y);
                } else {
                    general_mat_mul(T::one(), &x, &b, of_x, &mut y);
                }
            }
        }
        MuonKernel::Update { part, adam } => {
            let (state, cast) = writes.split_at_mut(if part.others > 0 { 3 } else { 2 });
            let [w, m, rest @ ..] = state else { unreachable!("operands were counted") };
            let v: &mut [T] = rest.first_mut().map_or(&mut [], |v| v);
            let (grad, o) = (read(0), read(1));
            let mut done = 0;
            for Stretch { elems, of } in part.stretches(views, rank) {
                let w = &mut w[elems.clone()];
                let Some(of) = of else {
                    let v = &mut v[done..done + elems.len()];
                    pointwise::adam(adam, step, &grad[elems.clone()], [w, &mut m[elems.clone()], v]);
                    done += elems.len();
                    continue;
                };
                let stays = T::from_f64(1.0 - adam.lr * adam.weight_decay);
                let by = T::from_f64(adam.lr * SCALE * (of.longer as f64).sqrt());
                w.iter_mut().zip(&o[elems.clone()]).for_each(|(w, &o)| *w = stays * *w - by * o);
            }
            if let [cast] = cast {
                cast.copy_from_slice(w);
            }
        }
    }
}

/// The shorter and the longer side of a matrix.
fn sides(of: &Matrices) -> (usize, usize) {
    (of.rows.min(of.cols) as usize, of.rows.max(of.cols) as usize)
}

fn each<'x, T>(of: &Matrices, x: &'x [T], y: &'x mut [T]) -> impl Iterator<Item = (&'x [T], &'x mut [T])> {
    let one = (of.rows * of.cols) as usize;
    x.chunks(one).zip(y.chunks_mut(one))
}

fn normalise<T: Scalar>(m: &[T], x: &mut [T]) {
    let square: T = m.iter().map(|&m| m * m).sum();
    let by = T::one() / (square.sqrt() + T::from_f64(EPS));
    x.iter_mut().zip(m).for_each(|(x, &m)| *x = m * by);
}

fn momentum_of<T: Scalar>(stretches: &[Stretch], momentum: f64, grad: &[T], m: &mut [T], u: &mut [T]) {
    let keep = T::from_f64(momentum);
    for Stretch { elems, of } in stretches {
        if of.is_none() {
            u[elems.clone()].fill(T::zero());
            continue;
        }
        for i in elems.clone() {
            m[i] = keep * m[i] + grad[i];
            u[i] = grad[i] + keep * m[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::plan::Kernel;
    use crate::plan::muon::{Part, STEPS};
    use crate::plan::optimizer::Adam;

    fn one(from: u64, rows: u64, cols: u64) -> Matrices {
        Matrices { from, count: 1, rows, cols, longer: rows.max(cols) }
    }

    fn launched(kernel: MuonKernel, reads: &[&[f64]], elems: u64) -> Vec<f64> {
        let mut out = vec![f64::NAN; elems as usize];
        launch(&Kernel::Muon(kernel), &reads.iter().map(|x| Some(*x)).collect::<Vec<_>>(), &mut [&mut out]);
        out
    }

    /// What the chain makes of matrices.
    fn orthogonal(of: Matrices, x: &[f64]) -> Vec<f64> {
        let mut x = launched(MuonKernel::Normalise { of }, &[x], of.elems());
        for _ in 0..STEPS {
            let a = launched(MuonKernel::Gram { of }, &[&x], of.gram_elems());
            let b = launched(MuonKernel::Square { of }, &[&a], of.gram_elems());
            x = launched(MuonKernel::Apply { of }, &[&x, &b], of.elems());
        }
        x
    }

    /// Of a matrix with known singular values, which are s cos and s sin of nothing but scalings here: the chain does to each of
    /// them what the polynomial does to a number, and leaves the vectors alone.
    #[test]
    fn singular_values_go_the_way_of_the_polynomial() {
        let (rows, cols) = (3, 5);
        // Rows that are orthogonal to each other: their lengths are the singular values.
        let mut x = vec![0.0; rows * cols];
        let lengths = [2.0, 0.5, 1.0];
        for (i, length) in lengths.into_iter().enumerate() {
            x[i * cols + i] = length * 0.6;
            x[i * cols + (i + 3) % cols] += if i < 2 { length * 0.8 } else { 0.0 };
        }
        x[2 * cols + 2] = 1.0;
        let norm = lengths.iter().map(|s| s * s).sum::<f64>().sqrt() + EPS;
        let [a, b, c] = COEFFICIENTS;
        let through = |s: f64| (0..STEPS).fold(s / norm, |s, _| a * s + b * s.powi(3) + c * s.powi(5));
        let want: Vec<f64> =
            (0..rows * cols).map(|at| x[at] / lengths[at / cols] * through(lengths[at / cols])).collect();
        assert_close(&orthogonal(one(0, 3, 5), &x), &want, 1e-12);
        let turned = |x: &[f64]| (0..rows * cols).map(|at| x[at % rows * cols + at / rows]).collect::<Vec<f64>>();
        assert_close(&orthogonal(one(0, 5, 3), &turned(&x)), &turned(&want), 1e-12);
        for s in want.chunks(cols) {
            let length = s.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((0.65..1.25).contains(&length), "{length} is not near 1");
        }
    }

    #[test]
    fn matrices_behind_each_other_are_orthogonalised_each_by_itself() {
        let x = random(2 * 12, 3);
        let pair = Matrices { count: 2, ..one(0, 3, 4) };
        let alone: Vec<f64> = x.chunks(12).flat_map(|x| orthogonal(one(0, 3, 4), x)).collect();
        assert_close(&orthogonal(pair, &x), &alone, 1e-13);
    }

    /// Two numbers, a matrix of six, one number: the second of two parts has a piece of the matrix and the last number.
    #[test]
    fn matrices_move_by_their_factors_and_the_rest_by_adam() {
        let adam = Adam { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.2 };
        let part = Part::new(9, 1, None, vec![one(2, 2, 3)]);
        let [g, mut m, o, mut w, mut v] = [(9, 1), (9, 2), (9, 3), (9, 4), (3, 5)].map(|(n, seed)| random(n, seed));
        v.iter_mut().for_each(|v| *v = v.abs());
        let (m0, w0, v0) = (m.clone(), w.clone(), v.clone());
        let mut u = vec![f64::NAN; 9];
        let kernel = Kernel::Muon(MuonKernel::Momentum { part: part.clone(), momentum: 0.95 });
        launch(&kernel, &[Some(&g), None], &mut [&mut m, &mut u]);
        let kernel = Kernel::Muon(MuonKernel::Update { part, adam });
        let mut cast = vec![f64::NAN; 9];
        launch(&kernel, &[Some(&g), Some(&o), None, None, None], &mut [&mut w, &mut m, &mut v, &mut cast]);
        for i in 0..9 {
            let (want_w, want_m, want_u) = match [0, 1, 8].iter().position(|&at| at == i) {
                Some(at) => {
                    let (m, v) = (0.9 * m0[i] + 0.1 * g[i], 0.99 * v0[at] + 0.01 * g[i] * g[i]);
                    let by = (m / 0.1) / ((v / 0.01).sqrt() + 1e-8);
                    (0.98 * w0[i] - 0.1 * by, m, 0.0)
                }
                None => {
                    let m = 0.95 * m0[i] + g[i];
                    (0.98 * w0[i] - 0.1 * 0.2 * 3f64.sqrt() * o[i], m, g[i] + 0.95 * m)
                }
            };
            assert_close(&[w[i], m[i], u[i], cast[i]], &[want_w, want_m, want_u, want_w], 1e-12);
        }
    }
}
