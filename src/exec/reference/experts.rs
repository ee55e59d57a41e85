//! Experts: y_t = sum over its choices j of w_tj FFN_j(x_t), token by token.

use super::config::*;
use super::fp8;
use super::layer::Model;
use super::math::{Mat, relu2, relu2_slope, sigmoid, softmax, swiglu, swiglu_backward};
use crate::spec::{Gate, Score};
use ndarray::{Array1, Axis, s};

impl Model<'_> {
    /// The experts of a token, by number, without choices that are no expert.
    fn chosen(&self, i: usize, experts: &Experts, sequence: usize, t: usize, logits: &[f64]) -> Vec<usize> {
        let layers = &experts.choices;
        if layers.is_empty() {
            return self.highest_of(i, experts, logits);
        }
        let of = if layers.len() == 1 { &layers[0] } else { &layers[self.cfg.experts_before(i)] };
        let of = &of[sequence][t * experts.top_k..][..experts.top_k];
        of.iter().map(|&e| e as usize).filter(|&e| e < experts.count).collect()
    }

    /// What the router of a layer chooses for the rows of x, [s, top_k].
    pub fn highest(&self, i: usize, experts: &Experts, x: &Mat) -> Vec<u32> {
        let logits = self.linear(&layer(i, ROUTER), x);
        let chosen = logits.rows().into_iter().flat_map(|row| self.highest_of(i, experts, &row.to_vec()));
        chosen.map(|e| e as u32).collect()
    }

    /// The experts of the highest scores, those of DeepSeek-V3 with a bias and among the groups whose highest scores, one
    /// or two, sum up to most; of equal ones the first. Experts of other groups are out of question, as in DeepSeek's own code;
    /// transformers gives them a score of 0, which wins where a bias makes those of the groups that are kept negative.
    fn highest_of(&self, i: usize, experts: &Experts, logits: &[f64]) -> Vec<usize> {
        let mut scores = scores(&experts.gate, logits);
        if let Some(bias) = self.weights.get(&layer(i, ROUTER_BIAS)) {
            scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
        }
        if let Some([count, kept, summed]) = experts.groups {
            let size = experts.count / count;
            let of = |g: usize| {
                highest(&scores[g * size..(g + 1) * size], summed).iter().map(|e| scores[g * size + e]).sum()
            };
            let sums: Vec<f64> = (0..count).map(of).collect();
            let groups = highest(&sums, kept);
            let out = |e: usize| !groups.contains(&(e / size));
            scores.iter_mut().enumerate().filter(|(e, _)| out(*e)).for_each(|(_, score)| *score = f64::NEG_INFINITY);
        }
        highest(&scores, experts.top_k)
    }

    /// The rows of the stacked matrices that are one expert's.
    fn expert(&self, i: usize, e: usize) -> [Mat; 2] {
        let cfg = self.cfg.experts.as_ref().expect("experts");
        let rows = |name| {
            let all = self.w(&layer(i, name));
            let rows = all.nrows() / cfg.count;
            all.slice(s![e * rows..(e + 1) * rows, ..]).to_owned()
        };
        [rows(self.expert_up()), rows(EXPERTS_DOWN)]
    }

    /// The name of the projection before the activation of experts; `shared_up`: of the one that every token visits.
    fn expert_up(&self) -> &'static str {
        if self.cfg.gated() { EXPERTS_UP } else { ONE_UP }
    }

    fn shared_up(&self) -> &'static str {
        if self.cfg.gated() { SHARED_UP } else { SHARED_ONE_UP }
    }

    fn act(&self, up: &Mat, width: usize) -> Mat {
        if self.cfg.gated() { swiglu(up, width) } else { up.mapv(relu2) }
    }

    fn act_backward(&self, up: &Mat, d_act: &Mat) -> Mat {
        if self.cfg.gated() { swiglu_backward(up, d_act) } else { d_act * up.mapv(relu2_slope) }
    }

    pub fn experts(&self, i: usize, experts: &Experts, sequence: usize, x: &Mat) -> Mat {
        let logits = self.linear(&layer(i, ROUTER), x);
        let given = arrived(experts, self.squeezed(i, experts, x));
        let mut y = Mat::zeros(given.raw_dim());
        for (t, row) in given.axis_chunks_iter(Axis(0), 1).enumerate() {
            let own = logits.row(t).to_vec();
            let chosen = self.chosen(i, experts, sequence, t, &own);
            let weighs = gates(&experts.gate, &own, &chosen);
            for (e, weigh) in chosen.into_iter().zip(weighs) {
                let [up, down] = self.expert(i, e);
                let out = self.act(&row.dot(&up.t()), experts.ffn).dot(&down.t()) * weigh;
                y.slice_mut(s![t..t + 1, ..]).zip_mut_with(&out, |y, out| *y += out);
            }
        }
        if experts.latent > 0 {
            y = self.linear(&layer(i, UNSQUEEZE), &y);
        }
        if experts.shared > 0 {
            let act = self.act(&self.linear(&layer(i, self.shared_up()), x), experts.shared);
            y += &self.linear(&layer(i, SHARED_DOWN), &act);
        }
        y
    }

    /// The input of experts: rows projected to `latent` columns, or as they are.
    fn squeezed(&self, i: usize, experts: &Experts, x: &Mat) -> Mat {
        if experts.latent > 0 { self.linear(&layer(i, SQUEEZE), x) } else { x.clone() }
    }

    pub fn experts_backward(&mut self, i: usize, sequence: usize, x: &Mat, dy: &Mat) -> Mat {
        let experts = self.cfg.experts_of(i).expect("experts");
        let logits = self.linear(&layer(i, ROUTER), x);
        let given = arrived(experts, self.squeezed(i, experts, x));
        // The gradient of the sums of experts; the projection behind them keeps its own, once these are known.
        let d_sums = if experts.latent > 0 { dy.dot(self.w(&layer(i, UNSQUEEZE))) } else { dy.clone() };
        let d_sums = arrived(experts, d_sums);
        let mut sums = Mat::zeros(given.raw_dim());
        let (mut d_given, mut d_logits) = (Mat::zeros(given.raw_dim()), Mat::zeros(logits.raw_dim()));
        for t in 0..x.nrows() {
            let (row, d_row) = (given.slice(s![t..t + 1, ..]), d_sums.slice(s![t..t + 1, ..]));
            let own = logits.row(t).to_vec();
            let chosen = self.chosen(i, experts, sequence, t, &own);
            let weighs = gates(&experts.gate, &own, &chosen);
            let mut d_weighs = vec![];
            for (&e, weigh) in chosen.iter().zip(&weighs) {
                let [up, down] = self.expert(i, e);
                let gate_up = row.dot(&up.t());
                let act = self.act(&gate_up, experts.ffn);
                let out = act.dot(&down.t());
                d_weighs.push((&out * &d_row).sum());
                sums.slice_mut(s![t..t + 1, ..]).zip_mut_with(&out, |sum, out| *sum += weigh * out);
                let d_out = &d_row * *weigh;
                let d_gate_up = self.act_backward(&gate_up, &d_out.dot(&down));
                self.add_to_rows(&layer(i, EXPERTS_DOWN), e, d_out.t().dot(&act));
                self.add_to_rows(&layer(i, self.expert_up()), e, d_gate_up.t().dot(&row));
                d_given.slice_mut(s![t..t + 1, ..]).zip_mut_with(&d_gate_up.dot(&up), |x, d| *x += d);
            }
            let d = gates_backward(&experts.gate, &own, &chosen, &d_weighs);
            d_logits.row_mut(t).assign(&Array1::from(d));
        }
        let mut dx = d_given;
        if experts.latent > 0 {
            self.linear_backward(&layer(i, UNSQUEEZE), &sums, dy);
            dx = self.linear_backward(&layer(i, SQUEEZE), x, &dx);
        }
        if experts.shared > 0 {
            let gate_up = self.linear(&layer(i, self.shared_up()), x);
            let act = self.act(&gate_up, experts.shared);
            let d_act = self.linear_backward(&layer(i, SHARED_DOWN), &act, dy);
            let d_gate_up = self.act_backward(&gate_up, &d_act);
            dx += &self.linear_backward(&layer(i, self.shared_up()), x, &d_gate_up);
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

/// Rows as they come to their experts.
fn arrived(experts: &Experts, rows: Mat) -> Mat {
    if experts.fp8_rows { fp8::rounded(rows) } else { rows }
}

/// The weights of the chosen experts' outputs.
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
