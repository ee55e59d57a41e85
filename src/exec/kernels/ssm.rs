//! What a Mamba-2 mixer needs between its projections: a causal convolution, the state-space scan by chunks
//! (arXiv:2405.21060, section 6), and a norm of groups times a gate.
//!
//! Legend: H heads of p elements, G groups, N elements of a state for each of a head's, Q tokens of a chunk, K taps.
//! Shapes: proj [n, (z: H*p | x: H*p | B: G*N | C: G*N | dt: H)]; xbc its columns x, B and C; y [n, H*p]. A sequence's
//! rows are one behind the other, and know nothing of the next one's.

use super::Scalar;
use super::exchange::Moved;
use crate::plan::Mesh;
use crate::plan::kernel::{HeadRanks, SsmKernel, SsmOp};
use crate::spec::MambaSpec;

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

/// Runs of the convolution's weights (operand 0) and of the heads' parameters (1) that go with the heads of `rank`: from
/// those of all heads here to a part of its own.
pub fn own(kernel: &SsmKernel, ranks: HeadRanks, views: &[Mesh], rank: u32) -> Vec<Moved> {
    let (all, here, place) = (&kernel.mamba, kernel.mamba.share(ranks.all()), ranks.place(views, rank));
    let group = place * all.groups / ranks.all();
    // Of both, where columns of x, B and C begin, how far in the part's do, and how many there are.
    let columns = |m: &MambaSpec| [0, m.inner(), m.inner() + m.bc_cols()];
    let [x, bc] = [place * here.inner(), group * all.state];
    let cut: Vec<[u64; 3]> = (0..3)
        .map(|k| {
            let (first, count) = if k == 0 { (x, here.inner()) } else { (bc, here.bc_cols()) };
            [columns(all)[k] + first, columns(&here)[k], count]
        })
        .collect();
    let run = |operand: usize, [from, to, len]: [u64; 3]| {
        let [from, to, len] = [from, to, len].map(|n| n as usize);
        Moved { read: operand, from: Some(from), write: operand, to, len, turn: 0 }
    };
    let taps = cut.iter().map(|[from, to, len]| run(0, [from * all.conv, to * all.conv, len * all.conv]));
    let bias = [all, &here].map(|m| m.conv_cols() * m.conv);
    let biases = cut.iter().map(|[from, to, len]| run(0, [bias[0] + from, bias[1] + to, *len]));
    let heads = (0..3).map(|k| run(1, [k * all.heads + place * here.heads, k * here.heads, here.heads]));
    taps.chain(biases).chain(heads).collect()
}

/// The same runs back, to be added.
pub fn own_bwd(kernel: &SsmKernel, ranks: HeadRanks, views: &[Mesh], rank: u32) -> Vec<Moved> {
    let back = |moved: Moved| Moved { from: Some(moved.to), to: moved.from.unwrap_or(0), turn: 1, ..moved };
    own(kernel, ranks, views, rank).into_iter().map(back).collect()
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

/// ln(1 + e^x), without e^x where x is large.
fn softplus<T: Scalar>(x: T) -> T {
    let zero = T::zero();
    let (most, small) = if x > zero { (x, (-x).exp()) } else { (zero, x.exp()) };
    most + (T::one() + small).ln()
}

/// y += a x.
fn axpy<T: Scalar>(a: T, x: &[T], y: &mut [T]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y += a * x);
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
    /// By token: dt, and what stood before its softplus.
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
        // Of the state behind a chunk.
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

    fn chunks(&self) -> impl DoubleEndedIterator<Item = std::ops::Range<usize>> + ExactSizeIterator {
        (0..self.seq.div_ceil(self.chunk)).map(|c| c * self.chunk..((c + 1) * self.chunk).min(self.seq))
    }

    /// Rows of proj, and where the columns of x, B and C begin.
    fn conv_at(&self, row: usize) -> usize {
        row * self.proj_cols() + self.inner()
    }

    /// Before the activation, for the row of a token `t` of its sequence.
    fn sums<T: Scalar>(&self, proj: &[T], w: &[T], row: usize, t: usize, sums: &mut [T]) {
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
            self.sums(proj, w, row, row % self.seq, y);
            y.iter_mut().for_each(|y| *y = silu(*y)[0]);
        }
    }

    fn conv_bwd<T: Scalar>(&self, [proj, d_xbc, w]: [&[T]; 3], d_proj: &mut [T], dw: &mut [T]) {
        let (cols, taps) = (self.conv_cols(), self.taps);
        (0..self.batch * self.seq).for_each(|row| d_proj[self.conv_at(row)..][..cols].fill(T::zero()));
        let mut sums = vec![T::zero(); cols];
        for (row, dy) in d_xbc.chunks_exact(cols).enumerate() {
            let t = row % self.seq;
            self.sums(proj, w, row, t, &mut sums);
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

    fn scan<T: Scalar>(&self, reads: [&[T]; 3], y: &mut [T]) {
        self.all_heads().for_each(|at| self.head(at, reads).forward(y));
    }

    fn scan_bwd<T: Scalar>(
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

    /// Rows of what the scan leaves, with their numbers.
    fn rows<'a, T>(&self, x: &'a mut [T]) -> impl Iterator<Item = (usize, &'a mut [T])> {
        x.chunks_exact_mut(self.inner()).enumerate()
    }

    /// Rows of groups: y, and the gate beside it.
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

/// Of one row, the gradients of y and of the gate before its activation.
fn gate_row_bwd<T: Scalar>([y, z, d_gated]: [&[T]; 3], dy: &mut [T], dz: &mut [T]) {
    for (i, (&d, &z)) in d_gated.iter().zip(z).enumerate() {
        let [gate, slope] = silu(z);
        (dy[i], dz[i]) = (d * gate, d * y[i] * slope);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::plan::Kernel;
    use crate::plan::kernel::{SsmKernel, SsmOp};
    use crate::spec::MambaSpec;

    // Two sequences of 7 tokens in chunks of 3; 4 heads of 3 in 2 groups, states of 5: columns 12 | 12 + 10 + 10 | 4.
    const M: MambaSpec = MambaSpec { heads: 4, head_dim: 3, groups: 2, state: 5, conv: 3, chunk: 3 };
    const ROWS: usize = 14;
    const INNER: usize = 12;
    const CONV: usize = 32;
    const PROJ: usize = 48;
    const EPS: f64 = 1e-3;

    fn kernel(op: SsmOp) -> Kernel {
        Kernel::Ssm(SsmKernel { batch: 2, seq: 7, mamba: M, op })
    }

    fn of(op: SsmOp, reads: &[&[f64]], size: usize) -> Vec<f64> {
        let mut y = vec![f64::NAN; size];
        let reads: Vec<Option<&[f64]>> = reads.iter().map(|x| Some(*x)).collect();
        launch(&kernel(op), &reads, &mut [&mut y]);
        y
    }

    fn silu(x: f64) -> f64 {
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

    /// A product of each part of `x`, where only the columns from..to of its rows are looked at.
    fn columns(x: &[f64], row: usize, columns: std::ops::Range<usize>) -> Vec<f64> {
        x.chunks_exact(row).flat_map(|row| row[columns.clone()].to_vec()).collect()
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
            let y = super::softplus(x);
            assert!(y.is_finite() && (y - x.max(0.0)).abs() <= 0.7, "{x}: {y}");
            assert!(super::silu(x).iter().all(|v| v.is_finite()), "{x}");
        }
    }
}
