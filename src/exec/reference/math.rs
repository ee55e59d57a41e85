//! Norms, activations, softmax.

use ndarray::{Array1, Array2, Axis};

pub type Mat = Array2<f64>;

/// Every row less its mean.
pub fn centred(x: &Mat) -> Mat {
    x - &x.mean_axis(Axis(1)).expect("a row is not empty").insert_axis(Axis(1))
}

/// x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3).
pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + gelu_tanh(x))
}

fn gelu_tanh(x: f64) -> f64 {
    ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()
}

pub fn gelu_slope(x: f64) -> f64 {
    let (t, du) = (gelu_tanh(x), (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x));
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du
}

pub fn relu2(x: f64) -> f64 {
    x.max(0.0).powi(2)
}

pub fn relu2_slope(x: f64) -> f64 {
    2.0 * x.max(0.0)
}

pub fn swiglu(gate_up: &Mat, ffn: usize) -> Mat {
    let (gate, up) = gate_up.view().split_at(Axis(1), ffn);
    gate.mapv(|g| g * sigmoid(g)) * up
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn swiglu_backward(gate_up: &Mat, d_act: &Mat) -> Mat {
    let f = d_act.ncols();
    let mut d = Array2::zeros(gate_up.raw_dim());
    for ((t, j), &dy) in d_act.indexed_iter() {
        let (g, u) = (gate_up[[t, j]], gate_up[[t, f + j]]);
        let (sig, silu) = (sigmoid(g), g * sigmoid(g));
        d[[t, j]] = dy * u * (sig + silu * (1.0 - sig));
        d[[t, f + j]] = dy * silu;
    }
    d
}

pub fn softmax(row: &mut [f64]) {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// The root of the mean square of each row.
pub fn rms(x: &Mat, eps: f64) -> Array1<f64> {
    x.rows().into_iter().map(|x| (x.dot(&x) / x.len() as f64 + eps).sqrt()).collect()
}

pub fn rms_norm(x: &Mat, w: &Mat, eps: f64) -> Mat {
    x / &rms(x, eps).insert_axis(Axis(1)) * w
}

/// With n = x / rms: dx = (dn - n mean(n dn)) / rms, where dn = dy w; dw sums n dy.
pub fn rms_norm_backward(x: &Mat, w: &Mat, dy: &Mat, eps: f64) -> (Mat, Mat) {
    let rms = rms(x, eps).insert_axis(Axis(1));
    let n = x / &rms;
    let dn = dy * w;
    let mean = (&n * &dn).mean_axis(Axis(1)).expect("a row is not empty").insert_axis(Axis(1));
    let dw = (&n * dy).sum_axis(Axis(0)).insert_axis(Axis(0));
    ((dn - &n * &mean) / &rms, dw)
}

/// ds = p (dp - sum of p dp over the row).
pub fn softmax_backward(p: &Mat, dp: Mat) -> Mat {
    let mean = (p * &dp).sum_axis(Axis(1)).insert_axis(Axis(1));
    p * &(dp - mean)
}
