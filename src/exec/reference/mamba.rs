//! A Mamba-2 mixer by its recurrence, token by token and number by number (arXiv:2405.21060, equation 2 with a scalar A;
//! arXiv:2504.03624):
//!
//! ```text
//! z | u | dt = x W;  v = silu(conv u);  d = softplus(dt + bias);  a = exp(-exp(A) d)
//! h_t = a_t h_(t-1) + d_t v_x v_B;  y_t = h_t v_C + D v_x;  out = W' (norm of groups of (y silu(z)))
//! ```
//!
//! Legend: s tokens, H heads of p elements, N elements of a state for each of them; head k takes B and C of group k G / H.

use super::config::*;
use super::layer::Model;
use super::math::{Mat, rms_norm, rms_norm_backward, sigmoid};
use crate::spec::MambaSpec;
use ndarray::{Array2, s};

/// What the mixer keeps for its backward pass.
pub struct States {
    proj: Mat,
    /// x, B and C before and behind the activation.
    conv: Mat,
    v: Mat,
    /// The state [N, p], by head and token.
    h: Vec<Vec<Mat>>,
    y: Mat,
    out: Mat,
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn silu_slope(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Where things are in rows.
struct At {
    inner: usize,
    p: usize,
    n: usize,
    heads: usize,
    groups: usize,
    taps: usize,
}

impl From<MambaSpec> for At {
    fn from(m: MambaSpec) -> At {
        let [inner, p, n, heads, groups, taps] =
            [m.inner(), m.head_dim, m.state, m.heads, m.groups, m.conv].map(|n| n as usize);
        At { inner, p, n, heads, groups, taps }
    }
}

impl At {
    /// The number of columns of x, B and C.
    fn columns(&self) -> usize {
        self.inner + 2 * self.groups * self.n
    }

    fn group(&self, head: usize) -> usize {
        head * self.groups / self.heads
    }

    fn b(&self, head: usize, n: usize) -> usize {
        self.inner + self.group(head) * self.n + n
    }

    fn c(&self, head: usize, n: usize) -> usize {
        self.b(head, n) + self.groups * self.n
    }

    fn dt(&self, head: usize) -> usize {
        self.inner + self.columns() + head
    }
}

impl Model<'_> {
    fn at(&self) -> At {
        self.cfg.mamba.expect("the pattern has states").into()
    }

    /// d and a of a head at a token.
    fn steps(&self, i: usize, proj: &Mat, t: usize, head: usize) -> (f64, f64) {
        let d = softplus(proj[[t, self.at().dt(head)]] + self.w(&layer(i, DT_BIAS))[[0, head]]);
        (d, (-self.w(&layer(i, A_LOG))[[0, head]].exp() * d).exp())
    }

    pub fn mamba(&self, i: usize, x: &Mat) -> (Mat, States) {
        let (at, len, proj) = (self.at(), x.nrows(), self.linear(&layer(i, IN_PROJ), x));
        let (w, bias) = (self.w(&layer(i, CONV)), self.w(&layer(i, CONV_BIAS)));
        let conv = Array2::from_shape_fn((len, at.columns()), |(t, c)| {
            let tap = |k: usize| {
                let from = (t + k + 1).checked_sub(at.taps);
                from.map_or(0.0, |from| w[[c, k]] * proj[[from, at.inner + c]])
            };
            bias[[0, c]] + (0..at.taps).map(tap).sum::<f64>()
        });
        let v = conv.mapv(silu);
        let mut y = Mat::zeros((len, at.inner));
        let mut all = vec![];
        for head in 0..at.heads {
            let (mut h, mut states) = (Mat::zeros((at.n, at.p)), vec![]);
            for t in 0..len {
                let (d, a) = self.steps(i, &proj, t, head);
                for (n, p) in (0..at.n).flat_map(|n| (0..at.p).map(move |p| (n, p))) {
                    h[[n, p]] = a * h[[n, p]] + d * v[[t, head * at.p + p]] * v[[t, at.b(head, n)]];
                    y[[t, head * at.p + p]] += h[[n, p]] * v[[t, at.c(head, n)]];
                }
                for p in 0..at.p {
                    y[[t, head * at.p + p]] += self.w(&layer(i, SKIP))[[0, head]] * v[[t, head * at.p + p]];
                }
                states.push(h.clone());
            }
            all.push(states);
        }
        let out = self.groups(i, &self.gated(&proj, &y), |x, w| rms_norm(x, w, self.cfg.eps));
        let result = self.linear(&layer(i, OUT_PROJ), &out);
        (result, States { proj, conv, v, h: all, y, out })
    }

    fn gated(&self, proj: &Mat, y: &Mat) -> Mat {
        y * &proj.slice(s![.., ..self.at().inner]).mapv(silu)
    }

    /// Applies `of` to every group of columns with its weights, and puts the results side by side.
    fn groups(&self, i: usize, x: &Mat, of: impl Fn(&Mat, &Mat) -> Mat) -> Mat {
        let (at, w) = (self.at(), self.w(&layer(i, GATED_NORM)));
        let (mut y, width) = (x.clone(), at.inner / at.groups);
        for g in 0..at.groups {
            let columns = s![.., g * width..(g + 1) * width];
            y.slice_mut(columns).assign(&of(&x.slice(columns).to_owned(), &w.slice(columns).to_owned()));
        }
        y
    }

    /// The gradient of the layer's normed input, `x`.
    pub fn mamba_backward(&mut self, i: usize, x: &Mat, saved: &States, dy: &Mat) -> Mat {
        let States { proj, conv, v, h, y, out } = saved;
        let (at, len) = (self.at(), x.nrows());
        let d_out = self.linear_backward(&layer(i, OUT_PROJ), out, dy);
        let gated = self.gated(proj, y);
        let (mut d_gated, mut dw, width) = (d_out.clone(), Mat::zeros((1, at.inner)), at.inner / at.groups);
        for g in 0..at.groups {
            let columns = s![.., g * width..(g + 1) * width];
            let part = |m: &Mat| m.slice(columns).to_owned();
            let w = part(self.w(&layer(i, GATED_NORM)));
            let (d, d_weight) = rms_norm_backward(&part(&gated), &w, &part(&d_out), self.cfg.eps);
            d_gated.slice_mut(columns).assign(&d);
            dw.slice_mut(columns).assign(&d_weight);
        }
        self.add_grad(&layer(i, GATED_NORM), dw);
        let mut d_proj = Mat::zeros(proj.raw_dim());
        let mut d_y = Mat::zeros(y.raw_dim());
        for ((t, c), &d) in d_gated.indexed_iter() {
            d_y[[t, c]] = d * silu(proj[[t, c]]);
            d_proj[[t, c]] = d * y[[t, c]] * silu_slope(proj[[t, c]]);
        }
        let mut d_v = Mat::zeros(v.raw_dim());
        let [mut d_bias, mut d_a_log, mut d_skip] = [(); 3].map(|()| Mat::zeros((1, at.heads)));
        for head in 0..at.heads {
            let a_of_head = self.w(&layer(i, A_LOG))[[0, head]].exp();
            let skip = self.w(&layer(i, SKIP))[[0, head]];
            let mut d_h = Mat::zeros((at.n, at.p));
            for t in (0..len).rev() {
                let (d, a) = self.steps(i, proj, t, head);
                let (mut d_d, mut d_a) = (0.0, 0.0);
                for p in 0..at.p {
                    let c = head * at.p + p;
                    d_skip[[0, head]] += d_y[[t, c]] * v[[t, c]];
                    d_v[[t, c]] += d_y[[t, c]] * skip;
                    for n in 0..at.n {
                        let [b_at, c_at] = [at.b(head, n), at.c(head, n)];
                        d_v[[t, c_at]] += d_y[[t, c]] * h[head][t][[n, p]];
                        d_h[[n, p]] += d_y[[t, c]] * v[[t, c_at]];
                        let d = [d_h[[n, p]], d];
                        d_d += d[0] * v[[t, c]] * v[[t, b_at]];
                        d_v[[t, c]] += d[0] * d[1] * v[[t, b_at]];
                        d_v[[t, b_at]] += d[0] * d[1] * v[[t, c]];
                        if t > 0 {
                            d_a += d[0] * h[head][t - 1][[n, p]];
                        }
                        d_h[[n, p]] *= a;
                    }
                }
                // a = exp(-e^A d).
                d_d -= d_a * a * a_of_head;
                d_a_log[[0, head]] -= d_a * a * a_of_head * d;
                let raw = proj[[t, at.dt(head)]] + self.w(&layer(i, DT_BIAS))[[0, head]];
                d_proj[[t, at.dt(head)]] = d_d * sigmoid(raw);
                d_bias[[0, head]] += d_d * sigmoid(raw);
            }
        }
        let d_conv = d_v * conv.mapv(silu_slope);
        let mut d_w = Mat::zeros((at.columns(), at.taps));
        for ((t, c), &d) in d_conv.indexed_iter() {
            for k in (0..at.taps).filter(|k| t + k + 1 >= at.taps) {
                let from = t + k + 1 - at.taps;
                d_w[[c, k]] += d * proj[[from, at.inner + c]];
                d_proj[[from, at.inner + c]] += d * self.w(&layer(i, CONV))[[c, k]];
            }
        }
        let d_conv_bias = d_conv.sum_axis(ndarray::Axis(0)).insert_axis(ndarray::Axis(0));
        for (name, d) in [(CONV, d_w), (CONV_BIAS, d_conv_bias), (DT_BIAS, d_bias), (A_LOG, d_a_log), (SKIP, d_skip)] {
            self.add_grad(&layer(i, name), d);
        }
        self.linear_backward(&layer(i, IN_PROJ), x, &d_proj)
    }
}
