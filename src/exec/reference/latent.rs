//! Queries, keys and values of multi-head latent attention, as Hugging Face's DeepseekV3Attention makes them: of what
//! turns, the even elements are put before the odd ones, and then halves are rotated.

use super::config::*;
use super::layer::Model;
use super::math::{Mat, rms_norm, rms_norm_backward};
use crate::spec::{MlaSpec, Turning};
use ndarray::s;

/// What latent attention keeps for its backward pass: compressed rows before and behind their norms.
pub struct Latent {
    /// Compressed queries before and behind their norm; `None`: queries were projected at once.
    q: Option<[Mat; 2]>,
    kv: [Mat; 2],
}

impl Latent {
    /// Compressed queries, behind their norm.
    pub fn queries(&self) -> &Mat {
        let [_, normed] = self.q.as_ref().expect("index queries are made of compressed ones");
        normed
    }
}

/// Rows turned by their position: even elements, then odd ones, rotated as halves.
fn turned(cfg: &DenseConfig, x: &Mat) -> Mat {
    let (half, turning) = (x.ncols() / 2, cfg.turning(x.ncols(), x.nrows()));
    let mut y = Mat::zeros(x.raw_dim());
    for position in 0..x.nrows() {
        for i in 0..half {
            let (sin, cos) = turn(cfg, &turning, position, i);
            let (even, odd) = (x[[position, 2 * i]], x[[position, 2 * i + 1]]);
            y[[position, i]] = even * cos - odd * sin;
            y[[position, half + i]] = odd * cos + even * sin;
        }
    }
    y
}

/// The gradient of x from that of y.
fn turned_back(cfg: &DenseConfig, dy: &Mat) -> Mat {
    let (half, turning) = (dy.ncols() / 2, cfg.turning(dy.ncols(), dy.nrows()));
    let mut dx = Mat::zeros(dy.raw_dim());
    for position in 0..dy.nrows() {
        for i in 0..half {
            let (sin, cos) = turn(cfg, &turning, position, i);
            let (first, second) = (dy[[position, i]], dy[[position, half + i]]);
            dx[[position, 2 * i]] = first * cos + second * sin;
            dx[[position, 2 * i + 1]] = second * cos - first * sin;
        }
    }
    dx
}

/// Sine and cosine of a pair.
fn turn(cfg: &DenseConfig, turning: &Turning, position: usize, i: usize) -> (f64, f64) {
    let angle = (position - cfg.document_start(position)) as f64 * turning.speeds[i];
    (turning.factor * angle.sin(), turning.factor * angle.cos())
}

impl Model<'_> {
    /// q, k and v of every head from the layer's normed input.
    pub fn latent(&self, i: usize, mla: &Mla, x: &Mat) -> (Latent, [Mat; 3]) {
        let (cfg, name) = (self.cfg, |name: &str| layer(i, name));
        let squeezed = |down: &Mat, norm: &str| rms_norm(down, self.w(&name(norm)), MlaSpec::NORM_EPS);
        let (q, q_up) = match mla.q_lora {
            Some(_) => {
                let down = self.linear(&name(Q_DOWN), x);
                let normed = squeezed(&down, Q_LATENT_NORM);
                let up = self.linear(&name(Q_UP), &normed);
                (Some([down, normed]), up)
            }
            None => (None, self.linear(&name(Q_DIRECT), x)),
        };
        let down = self.linear(&name(KV_DOWN), x);
        let normed = squeezed(&down.slice(s![.., ..mla.kv_lora]).to_owned(), KV_NORM);
        let kv_up = self.linear(&name(KV_UP), &normed);
        let shared = turned(cfg, &down.slice(s![.., mla.kv_lora..]).to_owned());
        let (a, d, len) = (cfg.heads, mla.nope + mla.rope, x.nrows());
        let [mut qs, mut ks, mut vs] = [a * d, a * d, a * mla.v].map(|cols| Mat::zeros((len, cols)));
        for head in 0..a {
            let (at, up) = (head * d, head * (mla.nope + mla.v));
            qs.slice_mut(s![.., at..at + mla.nope]).assign(&q_up.slice(s![.., at..at + mla.nope]));
            let turns = q_up.slice(s![.., at + mla.nope..at + d]).to_owned();
            qs.slice_mut(s![.., at + mla.nope..at + d]).assign(&turned(cfg, &turns));
            ks.slice_mut(s![.., at..at + mla.nope]).assign(&kv_up.slice(s![.., up..up + mla.nope]));
            ks.slice_mut(s![.., at + mla.nope..at + d]).assign(&shared);
            let value = kv_up.slice(s![.., up + mla.nope..up + mla.nope + mla.v]);
            vs.slice_mut(s![.., head * mla.v..(head + 1) * mla.v]).assign(&value);
        }
        (Latent { q, kv: [down, normed] }, [qs, ks, vs])
    }

    /// The gradient of the layer's normed input.
    pub fn latent_backward(&mut self, i: usize, mla: &Mla, x: &Mat, saved: &Latent, [dq, dk, dv]: [Mat; 3]) -> Mat {
        let (cfg, name) = (self.cfg, |name: &str| layer(i, name));
        let (a, d, len) = (cfg.heads, mla.nope + mla.rope, x.nrows());
        let [mut d_q_up, mut d_kv_up] = [a * d, a * (mla.nope + mla.v)].map(|cols| Mat::zeros((len, cols)));
        let mut d_shared = Mat::zeros((len, mla.rope));
        for head in 0..a {
            let (at, up) = (head * d, head * (mla.nope + mla.v));
            d_q_up.slice_mut(s![.., at..at + mla.nope]).assign(&dq.slice(s![.., at..at + mla.nope]));
            let turns = dq.slice(s![.., at + mla.nope..at + d]).to_owned();
            d_q_up.slice_mut(s![.., at + mla.nope..at + d]).assign(&turned_back(cfg, &turns));
            d_kv_up.slice_mut(s![.., up..up + mla.nope]).assign(&dk.slice(s![.., at..at + mla.nope]));
            d_shared += &dk.slice(s![.., at + mla.nope..at + d]);
            let value = dv.slice(s![.., head * mla.v..(head + 1) * mla.v]);
            d_kv_up.slice_mut(s![.., up + mla.nope..up + mla.nope + mla.v]).assign(&value);
        }
        let mut dx = match &saved.q {
            Some([down, normed]) => {
                let d_normed = self.linear_backward(&name(Q_UP), normed, &d_q_up);
                let (d_down, dw) = rms_norm_backward(down, self.w(&name(Q_LATENT_NORM)), &d_normed, MlaSpec::NORM_EPS);
                self.add_grad(&name(Q_LATENT_NORM), dw);
                self.linear_backward(&name(Q_DOWN), x, &d_down)
            }
            None => self.linear_backward(&name(Q_DIRECT), x, &d_q_up),
        };
        let [down, normed] = &saved.kv;
        let d_normed = self.linear_backward(&name(KV_UP), normed, &d_kv_up);
        let squeezed = down.slice(s![.., ..mla.kv_lora]).to_owned();
        let (d_squeezed, dw) = rms_norm_backward(&squeezed, self.w(&name(KV_NORM)), &d_normed, MlaSpec::NORM_EPS);
        self.add_grad(&name(KV_NORM), dw);
        let mut d_down = Mat::zeros(down.raw_dim());
        d_down.slice_mut(s![.., ..mla.kv_lora]).assign(&d_squeezed);
        d_down.slice_mut(s![.., mla.kv_lora..]).assign(&turned_back(cfg, &d_shared));
        dx += &self.linear_backward(&name(KV_DOWN), x, &d_down);
        dx
    }
}
