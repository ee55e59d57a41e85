//! Causal attention over one sequence, head by head, with all its scores.

use super::config::DenseConfig;
use super::math::{Mat, softmax, softmax_backward};
use crate::plan::dropout;
use ndarray::{Array2, ArrayView2, s};

/// What attention keeps for its backward pass.
pub struct Attention {
    /// Rotated queries [s, a*d] and keys [s, k*d], and values [s, k*v].
    q: Mat,
    k: Mat,
    v: Mat,
    /// The probabilities of each head, [s, s].
    p: Vec<Mat>,
    /// The factors that dropout multiplies the probabilities with, by head.
    left: Vec<Mat>,
    /// The output, [s, a*v].
    pub o: Mat,
}

impl Attention {
    /// Attention of one sequence. `chosen`: whether each query sees each key; `None`: it sees all that the mask leaves.
    pub fn new(cfg: &DenseConfig, layer: usize, [q, k, v]: [Mat; 3], chosen: Option<&Array2<bool>>) -> Attention {
        let len = q.nrows();
        let mut this = Attention { o: Mat::zeros((len, cfg.heads * cfg.v_dim())), p: vec![], left: vec![], q, k, v };
        for head in 0..cfg.heads {
            let (q, k, v) = this.parts(cfg, head);
            let mut scores = q.dot(&k.t()) * cfg.score_scale();
            if cfg.blocks.alibi {
                let slope = slopes(cfg.heads)[head];
                scores.columns_mut().into_iter().enumerate().for_each(|(j, mut key)| key += slope * j as f64);
            }
            if let Some(chosen) = chosen {
                scores.zip_mut_with(chosen, |score, chosen| *score = if *chosen { *score } else { f64::NEG_INFINITY });
            }
            let probs = masked_softmax(cfg, layer, scores);
            let drop = attention_dropout(cfg, head, len);
            let o = (&probs * &drop).dot(&v);
            head_of(&mut this.o, head * cfg.v_dim(), &o);
            this.p.push(probs);
            this.left.push(drop);
        }
        this
    }

    /// A query head's q, k and v: a/k neighbouring query heads share one KV head.
    fn parts(&self, cfg: &DenseConfig, head: usize) -> (ArrayView2<'_, f64>, ArrayView2<'_, f64>, ArrayView2<'_, f64>) {
        let (kv_head, d, v) = (kv_head(cfg, head), cfg.head_dim, cfg.v_dim());
        (
            self.q.slice(s![.., head * d..(head + 1) * d]),
            self.k.slice(s![.., kv_head * d..(kv_head + 1) * d]),
            self.v.slice(s![.., kv_head * v..(kv_head + 1) * v]),
        )
    }

    /// The probabilities, averaged over the heads.
    pub fn mean_probs(&self) -> Mat {
        let sum = self.p.iter().fold(Mat::zeros(self.p[0].raw_dim()), |sum, p| sum + p);
        sum / self.p.len() as f64
    }

    /// The gradients of q, k and v.
    pub fn backward(&self, cfg: &DenseConfig, d_o: &Mat) -> [Mat; 3] {
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|m| Mat::zeros(m.raw_dim()));
        let (d, v_dim) = (cfg.head_dim, cfg.v_dim());
        for (head, (p, left)) in self.p.iter().zip(&self.left).enumerate() {
            let ((q, k, v), kv_head) = (self.parts(cfg, head), kv_head(cfg, head));
            let d_o = d_o.slice(s![.., head * v_dim..(head + 1) * v_dim]);
            let ds = softmax_backward(p, d_o.dot(&v.t()) * left) * cfg.score_scale();
            head_of(&mut dq, head * d, &ds.dot(&k));
            head_of(&mut dk, kv_head * d, &ds.t().dot(&q));
            head_of(&mut dv, kv_head * v_dim, &(p * left).t().dot(&d_o));
        }
        [dq, dk, dv]
    }
}

/// Slopes of ALiBi as their authors list them: powers of the first for a power of two of heads, then every second
/// slope of twice as many. A query's own position is the same in all its scores, and the softmax does not see it.
fn slopes(heads: usize) -> Vec<f64> {
    if heads.is_power_of_two() {
        let first = 0.5f64.powf(8.0 / heads as f64);
        return (1..=heads as i32).map(|i| first.powi(i)).collect();
    }
    let below = heads.next_power_of_two() / 2;
    let more = slopes(2 * below).into_iter().step_by(2).take(heads - below);
    slopes(below).into_iter().chain(more).collect()
}

fn kv_head(cfg: &DenseConfig, head: usize) -> usize {
    head * cfg.kv_heads / cfg.heads
}

/// The factors of dropout on probabilities: 0 where one is dropped, else what makes up for those.
fn attention_dropout(cfg: &DenseConfig, head: usize, len: usize) -> Mat {
    let p = cfg.blocks.attention_dropout;
    let stays = |(i, j)| dropout::keeps(p, 2, i as u64, (head * len + j) as u64);
    Mat::from_shape_fn((len, len), |at| if stays(at) { 1.0 / (1.0 - p) } else { 0.0 })
}

/// Adds `part` to the columns from `at` on.
pub fn head_of(whole: &mut Mat, at: usize, part: &Mat) {
    let mut columns = whole.slice_mut(s![.., at..at + part.ncols()]);
    columns += part;
}

/// The softmax of scores under the mask: causal, within documents, and the last keys of a window.
fn masked_softmax(cfg: &DenseConfig, layer: usize, mut scores: Mat) -> Mat {
    for (i, mut row) in scores.rows_mut().into_iter().enumerate() {
        row.slice_mut(s![i + 1..]).fill(f64::NEG_INFINITY);
        let first = cfg.window_of(layer).map_or(0, |w| (i + 1).saturating_sub(w)).max(cfg.document_start(i));
        row.slice_mut(s![..first]).fill(f64::NEG_INFINITY);
        softmax(row.as_slice_mut().expect("rows are contiguous"));
    }
    scores
}

/// Rotates all query and key heads by their position; `direction` -1 turns back.
pub fn rotate(cfg: &DenseConfig, qkv: &mut Mat, direction: f64) {
    let (d, turned) = (cfg.head_dim, cfg.rotary());
    let half = turned / 2;
    let turning = cfg.turning(turned, qkv.nrows());
    for (position, mut row) in qkv.rows_mut().into_iter().enumerate() {
        for head in 0..cfg.heads + cfg.kv_heads {
            for i in 0..half {
                let angle = (position - cfg.document_start(position)) as f64 * turning.speeds[i];
                let (sin, cos) = (turning.factor * direction * angle.sin(), turning.factor * angle.cos());
                let (x, y) = (row[head * d + i], row[head * d + half + i]);
                row[head * d + i] = x * cos - y * sin;
                row[head * d + half + i] = y * cos + x * sin;
            }
        }
    }
}
