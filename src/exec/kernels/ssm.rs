//! What a Mamba-2 mixer needs between its projections: a causal convolution, the state-space scan by chunks
//! (arXiv:2405.21060, section 6), and a norm of groups times a gate.
//!
//! Legend: H heads of p elements, G groups, N elements of a state for each of a head's, Q tokens of a chunk, K taps.
//! Shapes: proj [n, (z: H*p | x: H*p | B: G*N | C: G*N | dt: H)]; xbc its columns x, B and C; y [n, H*p]. A sequence's
//! rows are one behind the other, and know nothing of the next one's.

mod own;
mod scan;
#[cfg(test)]
mod testing;

pub use own::{own, own_bwd};

use super::Scalar;
use super::exchange::Moved;
use crate::plan::Mesh;
use crate::plan::kernel::{SsmKernel, SsmOp};

pub fn run<T: Scalar>(kernel: &SsmKernel, views: &[Mesh], rank: u32, reads: &[Option<&[T]>], writes: &mut [&mut [T]]) {
    let read = |i: usize| reads[i].unwrap_or_else(|| panic!("{}: operand {i} is one of its results", kernel.name()));
    let m = Mamba::new(kernel);
    match (kernel.op, writes) {
        (SsmOp::Conv, [xbc]) => m.conv(read(0), read(1), xbc),
        (SsmOp::ConvBwd, [d_proj, dw]) => m.conv_bwd([1, 2, 3].map(read), d_proj, dw),
        (SsmOp::Scan, [y]) => m.scan([0, 1, 2].map(read), y),
        (SsmOp::ScanBwd, [d_proj, d_xbc, d_params]) => m.scan_bwd([1, 2, 3, 4].map(read), d_proj, d_xbc, d_params),
        (SsmOp::Norm { eps }, [out]) => m.norm(eps, [0, 1, 2].map(read), out),
        (SsmOp::NormBwd { eps }, [dy, d_proj, dw]) => m.norm_bwd(eps, [0, 1, 2, 3].map(read), dy, d_proj, dw),
        (SsmOp::Gate, [gated]) => m.gate(read(0), read(1), gated),
        (SsmOp::GateBwd, [dy, d_proj]) => m.gate_bwd([0, 1, 2].map(read), dy, d_proj),
        (SsmOp::GroupNorm { eps }, [out]) => m.rows(out).for_each(|(row, out)| {
            m.norm_row(eps, &read(0)[row * m.inner()..][..m.inner()], read(1), out);
        }),
        (SsmOp::GroupNormBwd { eps }, [d_gated, dw]) => m.rows(d_gated).for_each(|(row, d_gated)| {
            let [gated, d_out] = [0, 2].map(|i| &read(i)[row * m.inner()..][..m.inner()]);
            m.norm_row_bwd(eps, [gated, read(1), d_out], d_gated, dw);
        }),
        (SsmOp::Own(ranks), writes) => {
            for Moved { read: of, from, write, to, len, .. } in own(kernel, ranks, views, rank) {
                writes[write][to..][..len].copy_from_slice(&read(of)[from.expect("no zeros")..][..len]);
            }
        }
        (SsmOp::OwnBwd(ranks), writes) => {
            for Moved { read: of, from, write, to, len, .. } in own_bwd(kernel, ranks, views, rank) {
                axpy(T::one(), &read(of)[from.expect("no zeros")..][..len], &mut writes[write][to..][..len]);
            }
        }
        _ => unreachable!("the number of writes is that of the kernel"),
    }
}

struct Mamba {
    batch: usize,
    seq: usize,
    heads: usize,
    head_dim: usize,
    groups: usize,
    state: usize,
    taps: usize,
    chunk: usize,
}

fn sigmoid<T: Scalar>(x: T) -> T {
    T::one() / (T::one() + (-x).exp())
}

/// silu(x), and its slope.
fn silu<T: Scalar>(x: T) -> [T; 2] {
    let s = sigmoid(x);
    [x * s, s * (T::one() + x * (T::one() - s))]
}

/// y += a x.
fn axpy<T: Scalar>(a: T, x: &[T], y: &mut [T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y += a * x);
}

impl Mamba {
    fn new(kernel: &SsmKernel) -> Mamba {
        let m = &kernel.mamba;
        let [batch, seq, heads, head_dim] = [kernel.batch, kernel.seq, m.heads, m.head_dim].map(|n| n as usize);
        let [groups, state, taps, chunk] = [m.groups, m.state, m.conv, m.chunk].map(|n| n as usize);
        Mamba { batch, seq, heads, head_dim, groups, state, taps, chunk }
    }

    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    fn conv_cols(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    fn proj_cols(&self) -> usize {
        self.inner() + self.conv_cols() + self.heads
    }

    /// Rows of proj, and where the columns of x, B and C begin.
    fn conv_at(&self, row: usize) -> usize {
        row * self.proj_cols() + self.inner()
    }

    /// The convolution before its activation, in the row of a token `t` of its sequence.
    fn conv_row<T: Scalar>(&self, proj: &[T], w: &[T], row: usize, t: usize, sums: &mut [T]) {
        let cols = self.conv_cols();
        sums.copy_from_slice(&w[cols * self.taps..]);
        for back in 0..self.taps.min(t + 1) {
            let x = &proj[self.conv_at(row - back)..][..cols];
            let tap = self.taps - 1 - back;
            sums.iter_mut().zip(x).enumerate().for_each(|(c, (sum, &x))| *sum += w[c * self.taps + tap] * x);
        }
    }

    fn conv<T: Scalar>(&self, proj: &[T], w: &[T], xbc: &mut [T]) {
        for (row, y) in xbc.chunks_exact_mut(self.conv_cols()).enumerate() {
            self.conv_row(proj, w, row, row % self.seq, y);
            y.iter_mut().for_each(|y| *y = silu(*y)[0]);
        }
    }

    fn conv_bwd<T: Scalar>(&self, [proj, d_xbc, w]: [&[T]; 3], d_proj: &mut [T], dw: &mut [T]) {
        let (cols, taps) = (self.conv_cols(), self.taps);
        (0..self.batch * self.seq).for_each(|row| d_proj[self.conv_at(row)..][..cols].fill(T::zero()));
        let mut sums = vec![T::zero(); cols];
        for (row, dy) in d_xbc.chunks_exact(cols).enumerate() {
            let t = row % self.seq;
            self.conv_row(proj, w, row, t, &mut sums);
            sums.iter_mut().zip(dy).for_each(|(s, &dy)| *s = dy * silu(*s)[1]);
            axpy(T::one(), &sums, &mut dw[cols * taps..]);
            for back in 0..taps.min(t + 1) {
                let (at, tap) = (self.conv_at(row - back), taps - 1 - back);
                for (c, &d) in sums.iter().enumerate() {
                    dw[c * taps + tap] += d * proj[at + c];
                    d_proj[at + c] += d * w[c * taps + tap];
                }
            }
        }
    }

    /// The rows of what the scan leaves, with their numbers.
    fn rows<'a, T>(&self, x: &'a mut [T]) -> impl Iterator<Item = (usize, &'a mut [T])> {
        x.chunks_exact_mut(self.inner()).enumerate()
    }

    /// The norm of groups of each row: of y, times the activation of the gate beside it.
    fn norm<T: Scalar>(&self, eps: f64, [y, proj, w]: [&[T]; 3], out: &mut [T]) {
        let mut gated = vec![T::zero(); self.inner()];
        for (row, out) in self.rows(out) {
            self.gated(&y[row * self.inner()..][..self.inner()], &proj[row * self.proj_cols()..], &mut gated);
            self.norm_row(eps, &gated, w, out);
        }
    }

    fn norm_row<T: Scalar>(&self, eps: f64, gated: &[T], w: &[T], out: &mut [T]) {
        let width = self.inner() / self.groups;
        let groups = gated.chunks_exact(width).zip(w.chunks_exact(width)).zip(out.chunks_exact_mut(width));
        groups.for_each(|((gated, w), out)| super::norm::forward(width, eps, gated, w, out));
    }

    fn gated<T: Scalar>(&self, y: &[T], z: &[T], gated: &mut [T]) {
        gated.iter_mut().zip(y.iter().zip(z)).for_each(|(g, (&y, &z))| *g = y * silu(z)[0]);
    }

    fn gate<T: Scalar>(&self, y: &[T], proj: &[T], gated: &mut [T]) {
        for (row, gated) in self.rows(gated) {
            self.gated(&y[row * self.inner()..][..self.inner()], &proj[row * self.proj_cols()..], gated);
        }
    }

    fn norm_bwd<T: Scalar>(
        &self,
        eps: f64,
        [y, proj, w, d_out]: [&[T]; 4],
        dy: &mut [T],
        d_proj: &mut [T],
        dw: &mut [T],
    ) {
        let mut gated = vec![T::zero(); self.inner()];
        let mut d_gated = gated.clone();
        for (row, dy) in self.rows(dy) {
            let at = row * self.inner()..(row + 1) * self.inner();
            let z = row * self.proj_cols()..row * self.proj_cols() + self.inner();
            self.gated(&y[at.clone()], &proj[z.clone()], &mut gated);
            self.norm_row_bwd(eps, [&gated, w, &d_out[at.clone()]], &mut d_gated, dw);
            gate_row_bwd([&y[at], &proj[z.clone()], &d_gated], dy, &mut d_proj[z]);
        }
    }

    fn norm_row_bwd<T: Scalar>(&self, eps: f64, [gated, w, d_out]: [&[T]; 3], d_gated: &mut [T], dw: &mut [T]) {
        let width = self.inner() / self.groups;
        d_gated.fill(T::zero());
        for at in (0..self.groups).map(|group| group * width..(group + 1) * width) {
            let reads = [gated, w, d_out].map(|x| &x[at.clone()]);
            super::norm::backward(width, eps, reads, &mut d_gated[at.clone()], &mut dw[at]);
        }
    }

    fn gate_bwd<T: Scalar>(&self, [y, proj, d_gated]: [&[T]; 3], dy: &mut [T], d_proj: &mut [T]) {
        for (row, dy) in self.rows(dy) {
            let at = row * self.inner()..(row + 1) * self.inner();
            let z = row * self.proj_cols()..row * self.proj_cols() + self.inner();
            gate_row_bwd([&y[at.clone()], &proj[z.clone()], &d_gated[at]], dy, &mut d_proj[z]);
        }
    }
}

/// The gradients of y and of the gate before its activation, of one row.
fn gate_row_bwd<T: Scalar>([y, z, d_gated]: [&[T]; 3], dy: &mut [T], dz: &mut [T]) {
    for (i, (&d, &z)) in d_gated.iter().zip(z).enumerate() {
        let [gate, slope] = silu(z);
        (dy[i], dz[i]) = (d * gate, d * y[i] * slope);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::silu as silu_and_slope;
    use super::testing::*;
    use crate::plan::kernel::SsmOp;

    pub fn silu(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    #[test]
    fn a_convolution_sees_no_token_of_the_future_nor_of_another_sequence() {
        let (proj, w) = (random(ROWS * PROJ, 1), random(CONV * 4, 2));
        let xbc = of(SsmOp::Conv, &[&proj, &w], ROWS * CONV);
        for (row, column) in [(0, 0), (1, 5), (6, 31), (7, 3), (13, 20)] {
            let tap = |k: usize| {
                let t = row % 7 + k;
                if t < 2 { 0.0 } else { w[column * 3 + k] * proj[(row + k - 2) * PROJ + INNER + column] }
            };
            let want = silu(w[CONV * 3 + column] + tap(0) + tap(1) + tap(2));
            assert_close(&[xbc[row * CONV + column]], &[want], 1e-12);
        }
    }

    #[test]
    fn backward_of_the_convolution_equals_finite_differences() {
        let (proj, w, d_xbc) = (random(ROWS * PROJ, 1), random(CONV * 4, 2), random(ROWS * CONV, 3));
        let y = |proj: &[f64], w: &[f64]| dot(&of(SsmOp::Conv, &[proj, w], ROWS * CONV), &d_xbc);
        let (mut d_proj, mut dw) = (vec![9.0; ROWS * PROJ], vec![1.0; CONV * 4]);
        let reads = [None, Some(&proj[..]), Some(&d_xbc), Some(&w), None];
        launch(&kernel(SsmOp::ConvBwd), &reads, &mut [&mut d_proj, &mut dw]);
        let of_proj = slope(|p| y(p, &w), &proj);
        assert_close(&columns(&d_proj, PROJ, 12..44), &columns(&of_proj, PROJ, 12..44), 1e-8);
        assert!(columns(&d_proj, PROJ, 0..12).iter().all(|d| *d == 9.0));
        let added: Vec<f64> = dw.iter().map(|d| d - 1.0).collect();
        assert_close(&added, &slope(|w| y(&proj, w), &w), 1e-8);
    }

    #[test]
    fn a_norm_of_groups_and_its_gradients() {
        let (y, proj, w) = (random(ROWS * INNER, 1), random(ROWS * PROJ, 2), random(INNER, 3));
        let out = |y: &[f64], proj: &[f64], w: &[f64]| of(SsmOp::Norm { eps: EPS }, &[y, proj, w], ROWS * INNER);
        let all = out(&y, &proj, &w);
        for (row, group) in [(0, 0), (9, 1)] {
            let gated = |i: usize| y[row * INNER + group * 6 + i] * silu(proj[row * PROJ + group * 6 + i]);
            let mean = (0..6).map(|i| gated(i).powi(2)).sum::<f64>() / 6.0;
            let want: Vec<f64> = (0..6).map(|i| gated(i) / (mean + EPS).sqrt() * w[group * 6 + i]).collect();
            assert_close(&all[row * INNER + group * 6..][..6], &want, 1e-12);
        }
        let d_out = random(ROWS * INNER, 4);
        let [mut dy, mut d_proj, mut dw] = [vec![f64::NAN; ROWS * INNER], vec![9.0; ROWS * PROJ], vec![1.0; INNER]];
        let reads = [Some(&y[..]), Some(&proj), Some(&w), Some(&d_out), None];
        launch(&kernel(SsmOp::NormBwd { eps: EPS }), &reads, &mut [&mut dy, &mut d_proj, &mut dw]);
        assert_close(&dy, &slope(|y| dot(&out(y, &proj, &w), &d_out), &y), 1e-8);
        let of_proj = slope(|p| dot(&out(&y, p, &w), &d_out), &proj);
        assert_close(&columns(&d_proj, PROJ, 0..12), &columns(&of_proj, PROJ, 0..12), 1e-8);
        let added: Vec<f64> = dw.iter().map(|d| d - 1.0).collect();
        assert_close(&added, &slope(|w| dot(&out(&y, &proj, w), &d_out), &w), 1e-8);
    }

    #[test]
    fn far_inputs_overflow_nothing() {
        for x in [-1e4f32, -80.0, 0.0, 80.0, 1e4] {
            assert!(silu_and_slope(x).iter().all(|v| v.is_finite()), "{x}");
        }
    }
}
