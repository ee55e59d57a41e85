//! Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), one module behind the other.

use super::config::*;
use super::layer::Model;
use super::math::Mat;
use ndarray::Axis;

impl Model<'_> {
    /// Module `k`, counted from 0, behind hidden states `h`: adds its loss and those of the modules behind it, and returns
    /// the gradient of `h`. `targets` are the tokens that stand k + 1 further than those of the sequence, which it looks up.
    pub fn module(&mut self, k: usize, number: usize, h: &Mat, targets: &[u32]) -> Mat {
        let first = self.cfg.layers + k * self.cfg.mtp.layers;
        let own = |name| layer(first, name);
        let rows: Vec<usize> = targets.iter().map(|&t| t as usize).collect();
        let embedded = self.w(EMBED).select(Axis(0), &rows);
        let (token, hidden) = (self.norm(&own(TOKEN_NORM), &embedded), self.norm(&own(HIDDEN_NORM), h));
        let mut x = self.linear(&own(TOKEN_PROJ), &token) + self.linear(&own(HIDDEN_PROJ), &hidden);
        let mut saved = vec![];
        for i in first..first + self.cfg.mtp.layers {
            let (y, kept) = self.any_forward(i, number, x);
            saved.push((i, kept));
            x = y;
        }
        // The last token has nothing further than its target: it is told that again.
        let mut next = targets[1..].to_vec();
        next.push(targets[targets.len() - 1]);
        let mut dx = self.head(&x, &next, &own(AHEAD_NORM), self.cfg.mtp.part);
        if k + 1 < self.cfg.mtp.depth {
            dx += &self.module(k + 1, number, &x, &next);
        }
        for (i, kept) in saved.iter().rev() {
            dx = self.any_backward(*i, kept, dx);
        }
        let d_token = self.linear_backward(&own(TOKEN_PROJ), &token, &dx);
        let d_hidden = self.linear_backward(&own(HIDDEN_PROJ), &hidden, &dx);
        let d_embedded = self.norm_backward(&own(TOKEN_NORM), &embedded, &d_token);
        self.add_embedded_grad(&rows, &d_embedded);
        self.norm_backward(&own(HIDDEN_NORM), h, &d_hidden)
    }
}
