//! The state-space scan by chunks (arXiv:2405.21060, section 6), head by head.
//!
//! Within a chunk every token meets those before it, as in attention; what came before the chunk is a state [N, p].

use super::{Mamba, Scalar, axpy, sigmoid};

/// ln(1 + e^x), without e^x where x is large.
fn softplus<T: Scalar>(x: T) -> T {
    let zero = T::zero();
    let (most, small) = if x > zero { (x, (-x).exp()) } else { (zero, x.exp()) };
    most + (T::one() + small).ln()
}

fn dot<T: Scalar>(x: &[T], y: &[T]) -> T {
    x.iter().zip(y).map(|(&x, &y)| x * y).sum()
}

/// One head of one sequence: where its rows and columns are, and its parameters.
struct Head<'a, T> {
    m: &'a Mamba,
    first: usize,
    head: usize,
    xbc: &'a [T],
    /// The head's dt by token, and what stood before its softplus.
    dt: Vec<T>,
    raw: Vec<T>,
    /// -exp(A), and D.
    a: T,
    d: T,
}

impl<T: Scalar> Head<'_, T> {
    fn row(&self, t: usize) -> usize {
        (self.first + t) * self.m.conv_cols()
    }

    fn x_at(&self, t: usize) -> usize {
        self.row(t) + self.head * self.m.head_dim
    }

    fn b_at(&self, t: usize) -> usize {
        self.row(t) + self.m.inner() + self.group() * self.m.state
    }

    fn c_at(&self, t: usize) -> usize {
        self.b_at(t) + self.m.groups * self.m.state
    }

    fn group(&self) -> usize {
        self.head / (self.m.heads / self.m.groups)
    }

    fn x(&self, t: usize) -> &[T] {
        &self.xbc[self.x_at(t)..][..self.m.head_dim]
    }

    fn b(&self, t: usize) -> &[T] {
        &self.xbc[self.b_at(t)..][..self.m.state]
    }

    fn c(&self, t: usize) -> &[T] {
        &self.xbc[self.c_at(t)..][..self.m.state]
    }

    fn y_at(&self, t: usize) -> usize {
        (self.first + t) * self.m.inner() + self.head * self.m.head_dim
    }

    /// Sums of a dt from a chunk's first token on.
    fn sums(&self, chunk: std::ops::Range<usize>) -> Vec<T> {
        let step = |sum: &mut T, t: usize| {
            *sum += self.a * self.dt[t];
            Some(*sum)
        };
        chunk.scan(T::zero(), step).collect()
    }

    /// What a chunk makes of the state [N, p] before it.
    fn renew(&self, state: &mut [T], chunk: std::ops::Range<usize>) {
        let (sums, p) = (self.sums(chunk.clone()), self.m.head_dim);
        let last = *sums.last().expect("a chunk has tokens");
        state.iter_mut().for_each(|h| *h *= last.exp());
        for (t, &sum) in chunk.zip(&sums) {
            let by = (last - sum).exp() * self.dt[t];
            state.chunks_exact_mut(p).zip(self.b(t)).for_each(|(h, &b)| axpy(by * b, self.x(t), h));
        }
    }

    fn forward(&self, y: &mut [T]) {
        let p = self.m.head_dim;
        let mut state = vec![T::zero(); self.m.state * p];
        for chunk in self.m.chunks() {
            let sums = self.sums(chunk.clone());
            for (i, t) in chunk.clone().enumerate() {
                let y = &mut y[self.y_at(t)..][..p];
                y.iter_mut().zip(self.x(t)).for_each(|(y, &x)| *y = self.d * x);
                for (j, s) in (chunk.start..=t).enumerate() {
                    let score = dot(self.c(t), self.b(s)) * (sums[i] - sums[j]).exp() * self.dt[s];
                    axpy(score, self.x(s), y);
                }
                let decay = sums[i].exp();
                state.chunks_exact(p).zip(self.c(t)).for_each(|(h, &c)| axpy(decay * c, h, y));
            }
            self.renew(&mut state, chunk);
        }
    }

    /// The states before each chunk.
    fn states(&self) -> Vec<Vec<T>> {
        let mut state = vec![T::zero(); self.m.state * self.m.head_dim];
        let before = |chunk| {
            let before = state.clone();
            self.renew(&mut state, chunk);
            before
        };
        self.m.chunks().map(before).collect()
    }

    /// Adds to the gradients of B and C, writes that of x; returns those of dt's input by token, of dt's bias, A and D.
    fn backward(&self, dy: &[T], d_xbc: &mut [T]) -> (Vec<T>, [T; 3]) {
        let (p, n) = (self.m.head_dim, self.m.state);
        let states = self.states();
        // The gradient of the state behind a chunk.
        let mut d_state = vec![T::zero(); n * p];
        let mut d_dt = vec![T::zero(); self.m.seq];
        let [mut d_a, mut d_d] = [T::zero(); 2];
        for (chunk, before) in self.m.chunks().zip(&states).rev() {
            let sums = self.sums(chunk.clone());
            let last = *sums.last().expect("a chunk has tokens");
            let mut d_sums = vec![T::zero(); sums.len()];
            let dy_of = |t: usize| &dy[self.y_at(t)..][..p];
            // x times dt: what scores and the state meet.
            for (j, s) in chunk.clone().enumerate() {
                let mut d_in = vec![T::zero(); p];
                for (i, t) in (s..chunk.end).enumerate().map(|(i, t)| (i + j, t)) {
                    let decay = (sums[i] - sums[j]).exp();
                    let score = dot(self.c(t), self.b(s)) * decay;
                    axpy(score, dy_of(t), &mut d_in);
                    let d_score = dot(dy_of(t), self.x(s)) * self.dt[s];
                    axpy(d_score * decay, self.b(s), &mut d_xbc[self.c_at(t)..][..n]);
                    axpy(d_score * decay, self.c(t), &mut d_xbc[self.b_at(s)..][..n]);
                    d_sums[i] += d_score * score;
                    d_sums[j] -= d_score * score;
                }
                let stays = (last - sums[j]).exp();
                let mut kept = T::zero();
                for (k, (d_h, &b)) in d_state.chunks_exact(p).zip(self.b(s)).enumerate() {
                    axpy(stays * b, d_h, &mut d_in);
                    let d_b = stays * self.dt[s] * dot(d_h, self.x(s));
                    d_xbc[self.b_at(s) + k] += d_b;
                    kept += d_b * b;
                }
                d_sums[j] -= kept;
                *d_sums.last_mut().expect("a chunk has tokens") += kept;
                d_dt[s] += dot(self.x(s), &d_in);
                d_d += dot(self.x(s), dy_of(s));
                let d_x = &mut d_xbc[self.x_at(s)..][..p];
                d_x.iter_mut()
                    .zip(d_in.iter().zip(dy_of(s)))
                    .for_each(|(d, (&i, &y))| *d = self.dt[s] * i + self.d * y);
            }
            // The state before: read by every token, and left to the next chunk.
            *d_sums.last_mut().expect("a chunk has tokens") += last.exp() * dot(before, &d_state);
            d_state.iter_mut().for_each(|d| *d *= last.exp());
            for (i, t) in chunk.clone().enumerate() {
                let decay = sums[i].exp();
                for (k, (h, d_h)) in before.chunks_exact(p).zip(d_state.chunks_exact_mut(p)).enumerate() {
                    let c = self.c(t)[k];
                    let read = decay * dot(h, dy_of(t));
                    d_xbc[self.c_at(t) + k] += read;
                    d_sums[i] += read * c;
                    axpy(decay * c, dy_of(t), d_h);
                }
            }
            let mut behind = T::zero();
            for (t, d_sum) in chunk.zip(d_sums).rev() {
                behind += d_sum;
                d_dt[t] += self.a * behind;
                d_a += self.dt[t] * behind;
            }
        }
        let d_raw: Vec<T> = d_dt.iter().zip(&self.raw).map(|(&d, &raw)| d * sigmoid(raw)).collect();
        let d_bias = d_raw.iter().copied().sum();
        // a = -exp(A): its slope is itself.
        (d_raw, [d_bias, d_a * self.a, d_d])
    }
}

impl Mamba {
    fn chunks(&self) -> impl DoubleEndedIterator<Item = std::ops::Range<usize>> + ExactSizeIterator {
        (0..self.seq.div_ceil(self.chunk)).map(|c| c * self.chunk..((c + 1) * self.chunk).min(self.seq))
    }

    fn head<'a, T: Scalar>(&'a self, [sequence, head]: [usize; 2], [xbc, proj, params]: [&'a [T]; 3]) -> Head<'a, T> {
        let first = sequence * self.seq;
        let raw = |t: usize| proj[(first + t + 1) * self.proj_cols() - self.heads + head] + params[head];
        let raw: Vec<T> = (0..self.seq).map(raw).collect();
        let dt = raw.iter().map(|&raw| softplus(raw)).collect();
        let [a, d] = [1, 2].map(|of| params[of * self.heads + head]);
        Head { m: self, first, head, xbc, dt, raw, a: -a.exp(), d }
    }

    fn all_heads(&self) -> impl Iterator<Item = [usize; 2]> + '_ {
        (0..self.batch).flat_map(|sequence| (0..self.heads).map(move |head| [sequence, head]))
    }

    pub(super) fn scan<T: Scalar>(&self, reads: [&[T]; 3], y: &mut [T]) {
        self.all_heads().for_each(|at| self.head(at, reads).forward(y));
    }

    pub(super) fn scan_bwd<T: Scalar>(
        &self,
        [xbc, proj, params, dy]: [&[T]; 4],
        d_proj: &mut [T],
        d_xbc: &mut [T],
        d_params: &mut [T],
    ) {
        d_xbc.fill(T::zero());
        for [sequence, head] in self.all_heads() {
            let (d_raw, d_own) = self.head([sequence, head], [xbc, proj, params]).backward(dy, d_xbc);
            for (t, d) in d_raw.into_iter().enumerate() {
                d_proj[(sequence * self.seq + t + 1) * self.proj_cols() - self.heads + head] = d;
            }
            d_own.into_iter().enumerate().for_each(|(of, d)| d_params[of * self.heads + head] += d);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::*;
    use super::super::testing::*;
    use crate::plan::kernel::SsmOp;

    /// By the recurrence, token by token, of one head at a time.
    fn recurrence(xbc: &[f64], proj: &[f64], params: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; ROWS * INNER];
        for (sequence, head) in (0..2).flat_map(|b| (0..4).map(move |h| (b, h))) {
            let mut state = [[0.0; 3]; 5];
            for row in sequence * 7..sequence * 7 + 7 {
                let at = |from: usize, i: usize| xbc[row * CONV + from + i];
                let dt = (1.0 + (proj[row * PROJ + 44 + head] + params[head]).exp()).ln();
                let decay = (-params[4 + head].exp() * dt).exp();
                for p in 0..3 {
                    let x = at(head * 3, p);
                    let mut out = params[8 + head] * x;
                    for (n, row) in state.iter_mut().enumerate() {
                        row[p] = decay * row[p] + dt * at(12 + head / 2 * 5, n) * x;
                        out += at(22 + head / 2 * 5, n) * row[p];
                    }
                    y[row * INNER + head * 3 + p] = out;
                }
            }
        }
        y
    }

    #[test]
    fn chunks_give_what_the_recurrence_does() {
        let (xbc, proj, params) = (random(ROWS * CONV, 1), random(ROWS * PROJ, 2), random(12, 3));
        let y = of(SsmOp::Scan, &[&xbc, &proj, &params], ROWS * INNER);
        assert_close(&y, &recurrence(&xbc, &proj, &params), 1e-12);
    }

    #[test]
    fn backward_of_the_scan_equals_finite_differences() {
        let (xbc, proj, params) = (random(ROWS * CONV, 1), random(ROWS * PROJ, 2), random(12, 3));
        let dy = random(ROWS * INNER, 4);
        let y =
            |xbc: &[f64], proj: &[f64], params: &[f64]| dot(&of(SsmOp::Scan, &[xbc, proj, params], ROWS * INNER), &dy);
        let (mut d_proj, mut d_xbc, mut d_params) =
            (vec![9.0; ROWS * PROJ], vec![f64::NAN; ROWS * CONV], vec![1.0; 12]);
        let reads = [None, Some(&xbc[..]), Some(&proj), Some(&params), Some(&dy), None];
        launch(&kernel(SsmOp::ScanBwd), &reads, &mut [&mut d_proj, &mut d_xbc, &mut d_params]);
        assert_close(&d_xbc, &slope(|x| y(x, &proj, &params), &xbc), 1e-8);
        let of_proj = slope(|p| y(&xbc, p, &params), &proj);
        assert_close(&columns(&d_proj, PROJ, 44..48), &columns(&of_proj, PROJ, 44..48), 1e-8);
        assert!(columns(&d_proj, PROJ, 0..44).iter().all(|d| *d == 9.0), "other columns are left as they were");
        let added: Vec<f64> = d_params.iter().map(|d| d - 1.0).collect();
        assert_close(&added, &slope(|p| y(&xbc, &proj, p), &params), 1e-8);
    }

    #[test]
    fn far_inputs_overflow_nothing() {
        for x in [-1e4f32, -80.0, 0.0, 80.0, 1e4] {
            let y = super::softplus(x);
            assert!(y.is_finite() && (y - x.max(0.0)).abs() <= 0.7, "{x}: {y}");
        }
    }
}
