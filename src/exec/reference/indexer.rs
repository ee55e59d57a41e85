//! The lightning indexer of DeepSeek Sparse Attention with all its scores, and what it learns: for each query the divergence of its
//! scores' softmax from what attention made of the keys that were chosen.

use super::config::*;
use super::layer::Model;
use super::math::{Mat, centred, rms_norm, rms_norm_backward, softmax};
use crate::spec::IndexerSpec;
use ndarray::{Array2, ArrayViewMut2, Axis, s};

/// What the indexer keeps for its backward pass.
pub struct Index {
    /// Queries, turned, [s, i*d]; keys before the norm and, in `k`, behind it and turned, [s, d].
    q: Mat,
    down: Mat,
    k: Mat,
    /// The weights of the index heads, [s, i].
    w: Mat,
    /// The scores of queries and keys, [s, s].
    scores: Mat,
    /// Whether a query sees a key.
    pub chosen: Array2<bool>,
}

/// Turns the first columns of a head by the position of each row, in the order that they stand in.
fn turn(cfg: &DenseConfig, of: &IndexerSpec, mut head: ArrayViewMut2<f64>, direction: f64) {
    let half = cfg.mla.expect("an indexer belongs to latent attention").rope / 2;
    let turning = cfg.turning(2 * half, head.nrows());
    for (position, mut row) in head.rows_mut().into_iter().enumerate() {
        for i in 0..half {
            let angle = (position - cfg.document_start(position)) as f64 * turning.speeds[i];
            let (sin, cos) = (turning.factor * direction * angle.sin(), turning.factor * angle.cos());
            let (a, b) = if of.interleaved { (2 * i, 2 * i + 1) } else { (i, half + i) };
            (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[b] * cos + row[a] * sin);
        }
    }
}

fn turn_heads(cfg: &DenseConfig, of: &IndexerSpec, x: &mut Mat, direction: f64) {
    let d = of.head_dim as usize;
    (0..x.ncols() / d).for_each(|head| turn(cfg, of, x.slice_mut(s![.., head * d..(head + 1) * d]), direction));
}

impl Model<'_> {
    /// The scores and choices of a layer's indexer, from the layer's normed input and the compressed queries.
    pub fn index(&self, i: usize, of: &IndexerSpec, x: &Mat, latent: &Mat) -> Index {
        let (cfg, name) = (self.cfg, |name: &str| layer(i, name));
        let (heads, d) = (of.heads as usize, of.head_dim as usize);
        let mut q = latent.dot(&self.w(&name(INDEX_Q)).t());
        turn_heads(cfg, of, &mut q, 1.0);
        let down = x.dot(&self.w(&name(INDEX_K)).t());
        let mut k = rms_norm(&centred(&down), self.w(&name(INDEX_K_NORM)), IndexerSpec::NORM_EPS);
        k += self.w(&name(INDEX_K_BIAS));
        turn_heads(cfg, of, &mut k, 1.0);
        let w = x.dot(&self.w(&name(INDEX_HEADS)).t());
        let scale = 1.0 / ((heads * d) as f64).sqrt();
        let mut scores = Mat::zeros((x.nrows(), x.nrows()));
        for head in 0..heads {
            let product = q.slice(s![.., head * d..(head + 1) * d]).dot(&k.t()).mapv(|x| x.max(0.0));
            scores += &(&product * &w.column(head).insert_axis(Axis(1)) * scale);
        }
        let mut chosen = Array2::from_elem(scores.raw_dim(), false);
        for (t, row) in scores.rows().into_iter().enumerate() {
            let mut keys: Vec<usize> = (cfg.document_start(t)..=t).collect();
            keys.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            keys.into_iter().take(of.top_k as usize).for_each(|key| chosen[[t, key]] = true);
        }
        Index { q, down, k, w, scores, chosen }
    }

    /// Adds the divergence from `p`, the probabilities of attention in the mean over heads, and its gradient, which ends at
    /// the indexer's own weights.
    pub fn index_backward(&mut self, i: usize, of: &IndexerSpec, [x, latent]: [&Mat; 2], index: &Index, p: &Mat) {
        let (cfg, name) = (self.cfg, |name: &str| layer(i, name));
        let (heads, d) = (of.heads as usize, of.head_dim as usize);
        let mut shares = index.scores.clone();
        shares.zip_mut_with(&index.chosen, |score, chosen| *score = if *chosen { *score } else { f64::NEG_INFINITY });
        shares.rows_mut().into_iter().for_each(|mut row| softmax(row.as_slice_mut().expect("rows are contiguous")));
        for (at, &p) in p.indexed_iter().filter(|(at, p)| index.chosen[*at] && **p > 0.0) {
            self.divergence += p * (p / shares[at]).ln() / self.count;
        }
        let scale = 1.0 / ((heads * d) as f64).sqrt();
        let d_scores = (shares - p) * (scale / self.count);
        let [mut dq, mut dk, mut dw] = [&index.q, &index.k, &index.w].map(|m| Mat::zeros(m.raw_dim()));
        for head in 0..heads {
            let columns = s![.., head * d..(head + 1) * d];
            let (q, w) = (index.q.slice(columns), index.w.column(head).insert_axis(Axis(1)));
            let product = q.dot(&index.k.t());
            dw.column_mut(head).assign(&(&d_scores * &product.mapv(|x| x.max(0.0))).sum_axis(Axis(1)));
            let d_product = &d_scores * &w * product.mapv(|x| if x > 0.0 { 1.0 } else { 0.0 });
            dq.slice_mut(columns).assign(&d_product.dot(&index.k));
            dk += &d_product.t().dot(&q);
        }
        turn_heads(cfg, of, &mut dq, -1.0);
        turn_heads(cfg, of, &mut dk, -1.0);
        self.add_grad(&name(INDEX_Q), dq.t().dot(latent));
        self.add_grad(&name(INDEX_HEADS), dw.t().dot(x));
        self.add_grad(&name(INDEX_K_BIAS), dk.sum_axis(Axis(0)).insert_axis(Axis(0)));
        let (d_down, d_norm) =
            rms_norm_backward(&centred(&index.down), self.w(&name(INDEX_K_NORM)), &dk, IndexerSpec::NORM_EPS);
        self.add_grad(&name(INDEX_K_NORM), d_norm);
        self.add_grad(&name(INDEX_K), centred(&d_down).t().dot(x));
    }
}
