//! Kernels that take one element, or one pair, at a time.

use super::Scalar;
use super::mask::live_rows;
use super::scalar::wide;
use crate::plan::dropout::{Dropout, keeps};
use crate::plan::{Adam, AttnBlock, Mesh, Side};
use std::ops::Range;

#[inline(always)]
fn sigmoid<T: Scalar>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

/// [gate | up] [rows, 2*cols] -> silu(gate) * up.
pub fn swiglu<T: Scalar>(cols: usize, x: &[T], y: &mut [T]) {
    for (x, y) in x.chunks_exact(2 * cols).zip(y.chunks_exact_mut(cols)) {
        let (gate, up) = x.split_at(cols);
        swiglu_row(gate, up, y);
    }
}

wide! {
    fn swiglu_row<'a, T>(gate: &'a [T], up: &'a [T], y: &'a mut [T]) -> () {
        y.iter_mut().zip(gate.iter().zip(up)).for_each(|(y, (&g, &u))| *y = g * sigmoid(g) * u);
    }
}

/// -> [d_gate | d_up].
pub fn swiglu_bwd<T: Scalar>(cols: usize, x: &[T], dy: &[T], dx: &mut [T]) {
    let rows = x.chunks_exact(2 * cols).zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(2 * cols));
    for ((x, dy), dx) in rows {
        swiglu_bwd_row(x.split_at(cols), dy, dx.split_at_mut(cols));
    }
}

type Halves<'a, T> = (&'a [T], &'a [T]);
type HalvesMut<'a, T> = (&'a mut [T], &'a mut [T]);

wide! {
    fn swiglu_bwd_row<'a, T>(x: Halves<'a, T>, dy: &'a [T], dx: HalvesMut<'a, T>) -> () {
        let (reads, writes) = (x.0.iter().zip(x.1).zip(dy), dx.0.iter_mut().zip(dx.1));
        for (((&g, &u), &dy), (d_gate, d_up)) in reads.zip(writes) {
            let s = sigmoid(g);
            *d_gate = dy * u * s * (T::one() + g * (T::one() - s));
            *d_up = dy * g * s;
        }
    }
}

/// gelu(x) = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), and its derivative (Hendrycks and Gimpel,
/// arXiv:1606.08415).
#[inline(always)]
fn gelu_of<T: Scalar>(x: T) -> (T, T) {
    let [half, c, k, three] = [0.5, (2.0 / std::f64::consts::PI).sqrt(), 0.044715, 3.0].map(T::from_f64);
    // tanh(u) = 2 sigmoid(2u) - 1
    let s = sigmoid((c + c) * (x + k * x * x * x));
    let tanh = s + s - T::one();
    let slope = c * (T::one() + three * k * x * x);
    (x * s, half * (T::one() + tanh) + half * x * (T::one() - tanh * tanh) * slope)
}

wide! {
    pub fn gelu<'a, T>(x: &'a [T], y: &'a mut [T]) -> () {
        y.iter_mut().zip(x).for_each(|(y, &x)| *y = gelu_of(x).0);
    }
}

wide! {
    pub fn gelu_bwd<'a, T>(x: &'a [T], dy: &'a [T], dx: &'a mut [T]) -> () {
        dx.iter_mut().zip(x.iter().zip(dy)).for_each(|(dx, (&x, &dy))| *dx = dy * gelu_of(x).1);
    }
}

wide! {
    pub fn relu2<'a, T>(x: &'a [T], y: &'a mut [T]) -> () {
        y.iter_mut().zip(x).for_each(|(y, &x)| *y = x.larger(T::zero()) * x.larger(T::zero()));
    }
}

wide! {
    pub fn relu2_bwd<'a, T>(x: &'a [T], dy: &'a [T], dx: &'a mut [T]) -> () {
        dx.iter_mut().zip(x.iter().zip(dy)).for_each(|(dx, (&x, &dy))| *dx = dy * (T::one() + T::one()) * x.larger(T::zero()));
    }
}

/// Adds `row` to every row of `x`.
pub fn add_rows<T: Scalar>(cols: usize, row: &[T], x: &mut [T]) {
    x.chunks_exact_mut(cols).for_each(|x| x.iter_mut().zip(row).for_each(|(x, &b)| *x += b));
}

/// Zeros what is dropped of `x`, scales what stays, and notes it; a row for each of `positions`.
pub fn drop_some<T: Scalar>(d: &Dropout, positions: &[u64], cols: usize, x: &mut [T], stays: &mut [T]) {
    let scale = T::from_f64(1.0 / (1.0 - d.probability));
    let rows = x.chunks_exact_mut(cols).zip(stays.chunks_exact_mut(cols)).zip(positions);
    for ((x, stays), &position) in rows {
        for (column, (x, stays)) in x.iter_mut().zip(stays).enumerate() {
            *stays = if keeps(d.probability, d.salt, position, column as u64) { T::one() } else { T::zero() };
            *x *= *stays * scale;
        }
    }
}

pub fn dropout_bwd<T: Scalar>(probability: f64, dy: &[T], stays: &[T], dx: &mut [T]) {
    let scale = T::from_f64(1.0 / (1.0 - probability));
    dx.iter_mut().zip(dy.iter().zip(stays)).for_each(|(dx, (&dy, &stays))| *dx = dy * stays * scale);
}

/// Adds every row of `dy` to `db`.
pub fn bias_bwd<T: Scalar>(cols: usize, dy: &[T], db: &mut [T]) {
    dy.chunks_exact(cols).for_each(|dy| db.iter_mut().zip(dy).for_each(|(db, &dy)| *db += dy));
}

/// sum = a + b, where None is what `sum` holds; a trim leaves the other rows as they are.
pub fn add<T: Scalar>(trim: Option<Trim>, terms: [Option<&[T]>; 2], sum: &mut [T]) {
    let Some(trim) = trim else { return add_span(terms, sum) };
    for span in trim.spans(sum.len()) {
        add_span(terms.map(|term| term.map(|x| &x[span.clone()])), &mut sum[span]);
    }
}

fn add_span<T: Scalar>(terms: [Option<&[T]>; 2], sum: &mut [T]) {
    match terms {
        [Some(a), Some(b)] => sum.iter_mut().zip(a.iter().zip(b)).for_each(|(s, (&a, &b))| *s = a + b),
        [None, Some(x)] | [Some(x), None] => sum.iter_mut().zip(x).for_each(|(s, &x)| *s += x),
        [None, None] => sum.iter_mut().for_each(|s| *s += *s),
    }
}

/// The rows of an operand that a mask leaves.
pub struct Trim {
    live: Vec<Range<usize>>,
    /// Rows of the whole operand.
    rows: usize,
}

impl Trim {
    pub fn new(block: &AttnBlock, side: Side, views: &[Mesh], rank: u32) -> Trim {
        let segs = if side == Side::Q { &block.q } else { &block.kv };
        Trim { live: live_rows(block, side, views, rank), rows: (block.batch * segs.len(views)) as usize }
    }

    fn spans(&self, elems: usize) -> Vec<Range<usize>> {
        let row_len = elems / self.rows;
        self.live.iter().map(|r| r.start * row_len..r.end * row_len).collect()
    }
}

wide! {
    /// One step of AdamW, counted from 1, on the weights and their two moments.
    pub fn adam<'a, T>(adam: &'a Adam, step: u64, grad: &'a [T], state: [&'a mut [T]; 3]) -> () {
    let [w, m, v] = state;
    let [beta1, beta2, eps] = [adam.beta1, adam.beta2, adam.eps].map(T::from_f64);
    let [take1, take2] = [adam.beta1, adam.beta2].map(|beta| T::from_f64(1.0 - beta));
    // The running means start at zero; dividing by these undoes it.
    let [mean, square] = [adam.beta1, adam.beta2].map(|beta| 1.0 - beta.powf(step as f64));
    let (lr, unbias) = (T::from_f64(adam.lr / mean), T::from_f64(1.0 / square));
    let stays = T::from_f64(1.0 - adam.lr * adam.weight_decay);
    for (((w, m), v), &g) in w.iter_mut().zip(m).zip(v).zip(grad) {
        *m = beta1 * *m + take1 * g;
        *v = beta2 * *v + take2 * g * g;
        *w = stays * *w - lr * *m / ((*v * unbias).sqrt() + eps);
    }
    }
}

wide! {
    /// The part of it that makes the moments, and what weights are divided by: `state` is m, v and that.
    pub fn adam_moments<'a, T>(adam: &'a Adam, step: u64, grad: &'a [T], state: [&'a mut [T]; 3]) -> () {
    let [m, v, d] = state;
    let [beta1, beta2, eps] = [adam.beta1, adam.beta2, adam.eps].map(T::from_f64);
    let [take1, take2] = [adam.beta1, adam.beta2].map(|beta| T::from_f64(1.0 - beta));
    let unbias = T::from_f64(1.0 / (1.0 - adam.beta2.powf(step as f64)));
    for (((m, v), d), &g) in m.iter_mut().zip(v).zip(d).zip(grad) {
        *m = beta1 * *m + take1 * g;
        *v = beta2 * *v + take2 * g * g;
        *d = (*v * unbias).sqrt() + eps;
    }
    }
}

wide! {
    /// And the part that moves the weights, by the first moment over that.
    pub fn adam_move<'a, T>(adam: &'a Adam, step: u64, by: [&'a [T]; 2], w: &'a mut [T]) -> () {
    let lr = T::from_f64(adam.lr / (1.0 - adam.beta1.powf(step as f64)));
    let stays = T::from_f64(1.0 - adam.lr * adam.weight_decay);
    for ((w, &m), &d) in w.iter_mut().zip(by[0]).zip(by[1]) {
        *w = stays * *w - lr * m / d;
    }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::exec::kernels::run;
    use crate::plan::foreach::ForeachKernel;
    use crate::plan::{Adam, AttnBlock, Axis, Dropout, Kernel, Segs, Side};
    use crate::spec::{Factor, Mask};

    fn swiglu(x: &[f64]) -> Vec<f64> {
        let mut y = vec![f64::NAN; x.len() / 2];
        launch(&Kernel::SwiGlu { rows: 3, cols: 5 }, &[Some(x)], &mut [&mut y]);
        y
    }

    #[test]
    fn swiglu_and_its_gradient() {
        let (x, dy) = (random(30, 1), random(15, 2));
        let pair = |i: usize| (x[i / 5 * 10 + i % 5], x[i / 5 * 10 + 5 + i % 5]);
        let want: Vec<f64> = (0..15).map(pair).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        assert_close(&swiglu(&x), &want, 1e-12);
        let mut dx = vec![f64::NAN; 30];
        launch(&Kernel::SwiGluBwd { rows: 3, cols: 5 }, &[Some(&x), Some(&dy)], &mut [&mut dx]);
        assert_close(&dx, &slope(|x| dot(&swiglu(x), &dy), &x), 1e-9);
    }

    #[test]
    fn gelu_and_its_gradient() {
        let (x, dy) = (random(20, 1).iter().map(|x| 4.0 * x).collect::<Vec<f64>>(), random(20, 2));
        let gelu = |x: &[f64]| {
            let mut y = vec![f64::NAN; 20];
            launch(&Kernel::Gelu { elems: 20 }, &[Some(x)], &mut [&mut y]);
            y
        };
        let tanh = |x: f64| ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh();
        let want: Vec<f64> = x.iter().map(|&x| 0.5 * x * (1.0 + tanh(x))).collect();
        assert_close(&gelu(&x), &want, 1e-12);
        let mut dx = vec![f64::NAN; 20];
        launch(&Kernel::GeluBwd { elems: 20 }, &[Some(&x), Some(&dy)], &mut [&mut dx]);
        assert_close(&dx, &slope(|x| dot(&gelu(x), &dy), &x), 1e-8);
    }

    #[test]
    fn relu2_and_its_gradient() {
        let (x, dy) = (random(20, 1), random(20, 2));
        let relu2 = |x: &[f64]| {
            let mut y = vec![f64::NAN; 20];
            launch(&Kernel::Relu2 { elems: 20 }, &[Some(x)], &mut [&mut y]);
            y
        };
        let want: Vec<f64> = x.iter().map(|&x| if x > 0.0 { x * x } else { 0.0 }).collect();
        assert_close(&relu2(&x), &want, 1e-12);
        let mut dx = vec![f64::NAN; 20];
        launch(&Kernel::Relu2Bwd { elems: 20 }, &[Some(&x), Some(&dy)], &mut [&mut dx]);
        assert_close(&dx, &slope(|x| dot(&relu2(x), &dy), &x), 1e-8);
    }

    #[test]
    fn dropout_keeps_the_mean_and_its_gradient_follows() {
        let (rows, cols) = (8, 50);
        let dropout = Some(Dropout { probability: 0.25, salt: 1, segs: Segs::new(8, &[]), share: None });
        let (mut y, mut stays) = (vec![f64::NAN; 400], vec![f64::NAN; 400]);
        let kernel = Kernel::Residual { rows, cols, biases: 0, dropout };
        launch(&kernel, &[Some(&[1.0; 400]), Some(&[3.0; 400])], &mut [&mut y, &mut stays]);
        assert!(y.iter().zip(&stays).all(|(y, s)| (*y, *s) == (1.0, 0.0) || (*y, *s) == (5.0, 1.0)));
        let kept = stays.iter().sum::<f64>();
        assert!((kept - 300.0).abs() < 30.0, "{kept}");
        let mut dx = vec![f64::NAN; 400];
        let kernel = Kernel::DropoutBwd { elems: 400, probability: 0.25 };
        launch(&kernel, &[Some(&[3.0; 400]), Some(&stays)], &mut [&mut dx]);
        assert_close(&dx, &stays.iter().map(|s| 4.0 * s).collect::<Vec<f64>>(), 1e-12);
    }

    #[test]
    fn biases_and_their_gradient() {
        let (x, branch, a, b) = (random(6, 1), random(6, 2), random(3, 3), random(3, 4));
        let mut y = vec![f64::NAN; 6];
        let kernel = Kernel::Residual { rows: 2, cols: 3, biases: 2, dropout: None };
        launch(&kernel, &[Some(&x), Some(&branch), Some(&a), Some(&b)], &mut [&mut y]);
        let want: Vec<f64> = (0..6).map(|i| x[i] + branch[i] + a[i % 3] + b[i % 3]).collect();
        assert_close(&y, &want, 1e-12);
        let mut db = a.clone();
        launch(&Kernel::BiasBwd { rows: 2, cols: 3 }, &[Some(&x), None], &mut [&mut db]);
        assert_close(&db, &(0..3).map(|i| a[i] + x[i] + x[3 + i]).collect::<Vec<f64>>(), 1e-12);
    }

    #[test]
    fn swiglu_of_a_very_negative_gate_is_zero() {
        let x = [-1e4f32, 1.0];
        let (mut y, mut dx) = ([f32::NAN], [f32::NAN; 2]);
        launch(&Kernel::SwiGlu { rows: 1, cols: 1 }, &[Some(&x)], &mut [&mut y]);
        launch(&Kernel::SwiGluBwd { rows: 1, cols: 1 }, &[Some(&x), Some(&[1.0])], &mut [&mut dx]);
        assert_eq!((y, dx), ([0.0], [0.0, 0.0]));
    }

    #[test]
    fn add_in_every_position() {
        let (a, b) = (random(6, 1), random(6, 2));
        let kernel = Kernel::Add { elems: 6, trim: None };
        let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let cases = [(Some(&a[..]), Some(&b[..]), vec![f64::NAN; 6]), (None, Some(&b[..]), a.clone())];
        for (x, y, mut sum) in cases.into_iter().chain([(Some(&a[..]), None, b.clone())]) {
            launch(&kernel, &[x, y], &mut [&mut sum]);
            assert_close(&sum, &want, 0.0);
        }
    }

    #[test]
    fn add_trimmed_leaves_the_other_rows() {
        let (views, segs) = (ring(2), zigzag(8));
        // Rank 1 holds 2..6 and sees of rank 0's 0, 1, 6, 7 the first two; rank 0's 6, 7 see all of rank 1.
        let block = |step| {
            let kv = segs.shifted(Axis::Cp, step);
            AttnBlock {
                q: segs.clone(),
                kv,
                batch: 2,
                heads: 1,
                kv_heads: 1,
                head_dim: 1,
                v_dim: None,
                mask: Mask::new(true),
                factor: Factor::ONE,
            }
        };
        for (rank, side, live) in [(1, Side::Kv, [0, 1]), (0, Side::Q, [2, 3])] {
            let kernel = Kernel::Add { elems: 24, trim: Some((block(1), side)) };
            let mut sum = vec![1.0; 24];
            run(&kernel, &views, rank, 1, &[None, Some(&[5.0; 24])], &mut [&mut sum]);
            for (i, sum) in sum.iter().enumerate() {
                assert_eq!(*sum, if live.contains(&(i / 3 % 4)) { 6.0 } else { 1.0 }, "{side:?} {i}");
            }
        }
    }

    #[test]
    fn cast_and_fill() {
        let mut y = vec![f64::NAN; 4];
        launch(&Kernel::Cast { elems: 4 }, &[Some(&[1.0, 2.0, 3.0, 4.0])], &mut [&mut y]);
        assert_eq!(y, [1.0, 2.0, 3.0, 4.0]);
        launch(&Kernel::Fill { elems: 4 }, &[], &mut [&mut y]);
        assert_eq!(y, [0.0; 4]);
    }

    #[test]
    fn adam_equals_the_paper_for_three_steps() {
        let kernel = Kernel::Adam { elems: 5, lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.3 };
        let mut want = random(5, 1);
        let (mut w, mut m, mut v) = (want.clone(), vec![0.0; 5], vec![0.0; 5]);
        let mut cast = vec![f64::NAN; 5];
        let mut moments = [(0.0, 0.0); 5];
        for step in 1..=3 {
            let grad = random(5, 10 + step);
            for (i, (m, v)) in moments.iter_mut().enumerate() {
                *m = 0.9 * *m + 0.1 * grad[i];
                *v = 0.99 * *v + 0.01 * grad[i].powi(2);
                let (m_hat, v_hat) = (*m / (1.0 - 0.9f64.powi(step as i32)), *v / (1.0 - 0.99f64.powi(step as i32)));
                want[i] = want[i] * (1.0 - 0.1 * 0.3) - 0.1 * m_hat / (v_hat.sqrt() + 1e-8);
            }
            let (old_w, old_m, old_v) = (w.clone(), m.clone(), v.clone());
            let out_of_place = step == 2;
            let old = |x| if out_of_place { Some(x) } else { None };
            let reads = [Some(&grad[..]), old(&old_w[..]), old(&old_m[..]), old(&old_v[..])];
            let views = ring(1);
            run(&kernel, &views, 0, step, &reads, &mut [&mut w, &mut m, &mut v, &mut cast]);
            assert_close(&w, &want, 1e-12);
            assert_eq!(w, cast);
        }
    }

    #[test]
    fn adam_in_two_kernels_has_the_bits_of_the_one() {
        let adam = Adam { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.3 };
        let Adam { lr, beta1, beta2, eps, weight_decay } = adam;
        let whole = Kernel::Adam { elems: 5, lr, beta1, beta2, eps, weight_decay };
        let moments = Kernel::Foreach(ForeachKernel::Moments { elems: 5, adam });
        let moves = Kernel::Foreach(ForeachKernel::Move { elems: 5, adam });
        let mut one = [random(5, 1), vec![0.0; 5], vec![0.0; 5], vec![f64::NAN; 5]];
        let [mut w, mut m, mut v, mut cast] = one.clone();
        let mut d = vec![f64::NAN; 5];
        for step in 1..=3 {
            let grad = random(5, 10 + step);
            let mut state = one.each_mut().map(|x| &mut x[..]);
            run(&whole, &ring(1), 0, step, &[Some(&grad), None, None, None], &mut state);
            run(&moments, &ring(1), 0, step, &[Some(&grad), None, None], &mut [&mut m, &mut v, &mut d]);
            run(&moves, &ring(1), 0, step, &[None, Some(&m), Some(&d)], &mut [&mut w, &mut cast]);
            assert_eq!([&w, &m, &v, &cast], one.each_ref());
        }
    }
}
