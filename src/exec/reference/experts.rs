//! Experts: y_t = sum over its choices j of w_tj FFN_j(x_t), token by token.

use super::config::*;
use super::layer::Model;
use super::math::{Mat, sigmoid, softmax, swiglu, swiglu_backward};
use crate::spec::{Gate, Score};
use ndarray::{Array1, Axis, s};

impl Model<'_> {
    /// The experts of a token, by number, that there are.
    fn chosen(&self, i: usize, experts: &Experts, sequence: usize, t: usize, logits: &[f64]) -> Vec<usize> {
        let layers = &experts.choices;
        if layers.is_empty() {
            return self.highest_of(i, experts, logits);
        }
        let of = if layers.len() == 1 { &layers[0] } else { &layers[i - self.cfg.dense_layers] };
        let of = &of[sequence][t * experts.top_k..][..experts.top_k];
        of.iter().map(|&e| e as usize).filter(|&e| e < experts.count).collect()
    }

    /// What the router of a layer chooses for the rows of x, [s, top_k].
    pub fn highest(&self, i: usize, experts: &Experts, x: &Mat) -> Vec<u32> {
        let logits = self.linear(&layer(i, ROUTER), x);
        let chosen = logits.rows().into_iter().flat_map(|row| self.highest_of(i, experts, &row.to_vec()));
        chosen.map(|e| e as u32).collect()
    }

    /// The experts of the highest scores, those of DeepSeek-V3 with a bias and among the groups whose two highest
    /// scores sum up to most; of equal ones the first.
    fn highest_of(&self, i: usize, experts: &Experts, logits: &[f64]) -> Vec<usize> {
        let mut scores = scores(&experts.gate, logits);
        if let Some(bias) = self.weights.get(&layer(i, ROUTER_BIAS)) {
            scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
        }
        if let Some([count, kept]) = experts.groups {
            let size = experts.count / count;
            let of =
                |g: usize| highest(&scores[g * size..(g + 1) * size], 2).iter().map(|e| scores[g * size + e]).sum();
            let sums: Vec<f64> = (0..count).map(of).collect();
            let groups = highest(&sums, kept);
            let out = |e: usize| !groups.contains(&(e / size));
            scores.iter_mut().enumerate().filter(|(e, _)| out(*e)).for_each(|(_, score)| *score = f64::NEG_INFINITY);
        }
        highest(&scores, experts.top_k)
    }

    /// Rows of the stacked matrices that are one expert's.
    fn expert(&self, i: usize, e: usize) -> [Mat; 2] {
        let cfg = self.cfg.experts.as_ref().expect("experts");
        let (up, h) = (2 * cfg.ffn, self.cfg.hidden);
        let rows = |name, rows| self.w(&layer(i, name)).slice(s![e * rows..(e + 1) * rows, ..]).to_owned();
        [rows(EXPERTS_UP, up), rows(EXPERTS_DOWN, h)]
    }

    pub fn experts(&self, i: usize, experts: &Experts, sequence: usize, x: &Mat) -> Mat {
        let logits = self.linear(&layer(i, ROUTER), x);
        let mut y = Mat::zeros((x.nrows(), self.cfg.hidden));
        for (t, row) in x.axis_chunks_iter(Axis(0), 1).enumerate() {
            let own = logits.row(t).to_vec();
            let chosen = self.chosen(i, experts, sequence, t, &own);
            let weighs = gates(&experts.gate, &own, &chosen);
            for (e, weigh) in chosen.into_iter().zip(weighs) {
                let [up, down] = self.expert(i, e);
                let out = swiglu(&row.dot(&up.t()), experts.ffn).dot(&down.t()) * weigh;
                y.slice_mut(s![t..t + 1, ..]).zip_mut_with(&out, |y, out| *y += out);
            }
        }
        if experts.shared > 0 {
            let act = swiglu(&self.linear(&layer(i, SHARED_UP), x), experts.shared);
            y += &self.linear(&layer(i, SHARED_DOWN), &act);
        }
        y
    }

    pub fn experts_backward(&mut self, i: usize, sequence: usize, x: &Mat, dy: &Mat) -> Mat {
        let experts = self.cfg.experts_of(i).expect("experts");
        let logits = self.linear(&layer(i, ROUTER), x);
        let (mut dx, mut d_logits) = (Mat::zeros(x.raw_dim()), Mat::zeros(logits.raw_dim()));
        for t in 0..x.nrows() {
            let (row, d_row) = (x.slice(s![t..t + 1, ..]), dy.slice(s![t..t + 1, ..]));
            let own = logits.row(t).to_vec();
            let chosen = self.chosen(i, experts, sequence, t, &own);
            let weighs = gates(&experts.gate, &own, &chosen);
            let mut d_weighs = vec![];
            for (&e, weigh) in chosen.iter().zip(&weighs) {
                let [up, down] = self.expert(i, e);
                let gate_up = row.dot(&up.t());
                let act = swiglu(&gate_up, experts.ffn);
                d_weighs.push((&act.dot(&down.t()) * &d_row).sum());
                let d_out = &d_row * *weigh;
                let d_gate_up = swiglu_backward(&gate_up, &d_out.dot(&down));
                self.add_to_rows(&layer(i, EXPERTS_DOWN), e, d_out.t().dot(&act));
                self.add_to_rows(&layer(i, EXPERTS_UP), e, d_gate_up.t().dot(&row));
                dx.slice_mut(s![t..t + 1, ..]).zip_mut_with(&d_gate_up.dot(&up), |x, d| *x += d);
            }
            let d = gates_backward(&experts.gate, &own, &chosen, &d_weighs);
            d_logits.row_mut(t).assign(&Array1::from(d));
        }
        if experts.shared > 0 {
            let gate_up = self.linear(&layer(i, SHARED_UP), x);
            let act = swiglu(&gate_up, experts.shared);
            let d_gate_up = swiglu_backward(&gate_up, &self.linear_backward(&layer(i, SHARED_DOWN), &act, dy));
            dx += &self.linear_backward(&layer(i, SHARED_UP), x, &d_gate_up);
        }
        dx + self.linear_backward(&layer(i, ROUTER), x, &d_logits)
    }

    /// Adds the gradient of one expert's matrix.
    fn add_to_rows(&mut self, name: &str, e: usize, grad: Mat) {
        let whole = self.grads.get_mut(name).expect("every weight has a gradient");
        let mut rows = whole.slice_mut(s![e * grad.nrows()..(e + 1) * grad.nrows(), ..]);
        rows += &grad;
    }
}

/// The places of the highest numbers, the highest first; of equal ones the first.
fn highest(of: &[f64], count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..of.len()).collect();
    all.sort_by(|&a, &b| of[b].total_cmp(&of[a]));
    all.truncate(count);
    all
}

/// The score of every expert.
fn scores(gate: &Gate, logits: &[f64]) -> Vec<f64> {
    let mut all = logits.to_vec();
    match gate.score {
        Score::Softmax => softmax(&mut all),
        Score::Sigmoid => all.iter_mut().for_each(|x| *x = sigmoid(*x)),
    }
    all
}

/// What the chosen experts weigh.
fn gates(gate: &Gate, logits: &[f64], chosen: &[usize]) -> Vec<f64> {
    let scores = scores(gate, logits);
    let total: f64 = if gate.normalise { chosen.iter().map(|&e| scores[e]).sum() } else { 1.0 };
    chosen.iter().map(|&e| gate.scale * scores[e] / total).collect()
}

/// The gradient of the logits: by the chain rule over w_j = scale s_j / S, one derivative after the other.
fn gates_backward(gate: &Gate, logits: &[f64], chosen: &[usize], d_weighs: &[f64]) -> Vec<f64> {
    let scores = scores(gate, logits);
    let total: f64 = chosen.iter().map(|&e| scores[e]).sum();
    let mut d_scores = vec![0.0; logits.len()];
    for (&j, d) in chosen.iter().zip(d_weighs) {
        for &i in chosen {
            let same = if i == j { 1.0 } else { 0.0 };
            let slope = if gate.normalise { same / total - scores[j] / (total * total) } else { same };
            d_scores[i] += d * gate.scale * slope;
        }
    }
    let jacobian = |a: usize, b: usize| match gate.score {
        Score::Sigmoid => {
            if a == b {
                scores[a] * (1.0 - scores[a])
            } else {
                0.0
            }
        }
        Score::Softmax => scores[a] * (if a == b { 1.0 } else { 0.0 } - scores[b]),
    };
    (0..logits.len()).map(|b| (0..logits.len()).map(|a| d_scores[a] * jacobian(a, b)).sum()).collect()
}
