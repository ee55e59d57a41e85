//! Attention whose scores are in memory, a kernel at a time.
//!
//! Shapes: q, o `[b*sq, a*d]`; kv `[b*sk, (K: k*d | V: k*d)]`; scores and probabilities `[b, a, sq, sk]`. Query head
//! j meets KV head j / (a/k).

use super::Scalar;
use super::attention::Tiling;
use super::gemm::{window, window_mut};
use super::mask::Run;
use super::scalar::largest;
use crate::plan::{AttnBlock, HeadDropout, Mesh, ScoreStep, Span, dropout::keeps};
use ndarray::linalg::general_mat_mul;
use std::ops::Range;

/// Scores and probabilities of a block: one matrix for each sequence and head.
pub struct Matrices<'a> {
    block: &'a AttnBlock,
    views: &'a [Mesh],
    rank: u32,
    tiling: Tiling,
    /// All queries, and all keys, of a sequence.
    q: Run,
    kv: Run,
}

/// All rows of a sequence; where they stand matters to no product.
fn whole(len: u64) -> Run {
    Run { row: 0, pos: 0, len: len as usize, step: 1 }
}

impl<'a> Matrices<'a> {
    pub fn new(block: &'a AttnBlock, views: &'a [Mesh], rank: u32) -> Matrices<'a> {
        let (q, kv) = (whole(block.q.len(views)), whole(block.kv.len(views)));
        Matrices { block, views, rank, tiling: Tiling::new(block, views, rank), q, kv }
    }

    /// Runs a step. `reads` are its operands without those that may be results.
    pub fn run<T: Scalar>(&self, step: &ScoreStep, reads: &[&[T]], writes: &mut [&mut [T]]) {
        match step {
            ScoreStep::Scores => {
                self.outer(reads[0], reads[1], 0, self.tiling.scale, writes[0]);
                self.lean(writes[0]);
            }
            ScoreStep::Softmax => self.softmax(reads[0], writes[0]),
            ScoreStep::Drop(dropout) => {
                let (left, stays) = writes.split_at_mut(1);
                self.drop(dropout, reads[0], left[0], stays[0]);
            }
            ScoreStep::Values => self.inner(reads[0], reads[1], 1, 1.0, writes[0]),
            ScoreStep::ProbsBwd => self.outer(reads[0], reads[1], 1, 1.0, writes[0]),
            ScoreStep::SoftmaxBwd => self.softmax_bwd(reads[0], writes[0]),
            ScoreStep::QBwd => self.inner(reads[0], reads[1], 0, self.tiling.scale, writes[0]),
            ScoreStep::KvBwd => self.kv_bwd([reads[0], reads[1], reads[2], reads[3]], writes[0]),
        }
    }

    fn area(&self) -> usize {
        self.q.len * self.kv.len
    }

    /// x y^T of every head, y being K (lane 0) or V (lane 1).
    fn outer<T: Scalar>(&self, x: &[T], kv: &[T], lane: usize, scale: f64, to: &mut [T]) {
        for (map, head) in self.tiling.heads().enumerate() {
            let (x, y) = (head.q(x, self.q), if lane == 0 { head.k(kv, self.kv) } else { head.v(kv, self.kv) });
            let mut to = window_mut(to, map * self.area(), (self.q.len, self.kv.len), self.kv.len);
            general_mat_mul(T::from_f64(scale), &x, &y.t(), T::zero(), &mut to);
        }
    }

    /// Takes off all scores what the distance of query and key costs them.
    fn lean<T: Scalar>(&self, scores: &mut [T]) {
        let [q, kv] = [&self.block.q, &self.block.kv].map(|segs| segs.positions(self.views, self.rank));
        for (map, head) in self.tiling.heads().enumerate() {
            let Some(slope) = head.slope() else { return };
            let rows = scores[map * self.area()..][..self.area()].chunks_exact_mut(self.kv.len);
            for (row, &i) in rows.zip(&q) {
                row.iter_mut().zip(&kv).for_each(|(score, &j)| *score -= T::from_f64(slope * i.abs_diff(j) as f64));
            }
        }
    }

    /// p y of every head.
    fn inner<T: Scalar>(&self, p: &[T], kv: &[T], lane: usize, scale: f64, to: &mut [T]) {
        for (map, head) in self.tiling.heads().enumerate() {
            let p = window(p, map * self.area(), (self.q.len, self.kv.len), self.kv.len);
            let y = if lane == 0 { head.k(kv, self.kv) } else { head.v(kv, self.kv) };
            general_mat_mul(T::from_f64(scale), &p, &y, T::zero(), &mut head.q_mut(to, self.q));
        }
    }

    /// dK = dS^T q / sqrt(d), dV = P^T do, both summed over the query heads of a KV head.
    fn kv_bwd<T: Scalar>(&self, [ds, q, p, d_o]: [&[T]; 4], dkv: &mut [T]) {
        dkv.fill(T::zero());
        for (map, head) in self.tiling.heads().enumerate() {
            let [ds, p] = [ds, p].map(|x| window(x, map * self.area(), (self.q.len, self.kv.len), self.kv.len));
            let (q, d_o) = (head.q(q, self.q), head.q(d_o, self.q));
            let scale = T::from_f64(self.tiling.scale);
            general_mat_mul(scale, &ds.t(), &q, T::one(), &mut head.k_mut(dkv, self.kv));
            general_mat_mul(T::one(), &p.t(), &d_o, T::one(), &mut head.v_mut(dkv, self.kv));
        }
    }

    /// The columns that a query at a position sees.
    fn seen(&self, position: u64, keys: &[Span]) -> Vec<Range<usize>> {
        let mut column = 0;
        let mut all = vec![];
        for span in keys {
            let seen = self.block.mask.seen(position, span);
            all.push(column + seen.start as usize..column + seen.end as usize);
            column += span.len as usize;
        }
        all
    }

    fn softmax<T: Scalar>(&self, scores: &[T], p: &mut [T]) {
        let keys = self.block.kv.spans(self.views, self.rank);
        let positions = self.block.q.positions(self.views, self.rank);
        let rows = scores.chunks_exact(self.kv.len).zip(p.chunks_exact_mut(self.kv.len));
        for (i, (scores, p)) in rows.enumerate() {
            p.fill(T::zero());
            let seen = self.seen(positions[i % positions.len()], &keys);
            let top = seen.iter().fold(T::NEG_INFINITY, |top, r| largest(&scores[r.clone()], top));
            if top == T::NEG_INFINITY {
                continue;
            }
            for range in &seen {
                p[range.clone()].iter_mut().zip(&scores[range.clone()]).for_each(|(p, &x)| *p = (x - top).exp());
            }
            let sum: T = p.iter().copied().sum();
            p.iter_mut().for_each(|p| *p = *p / sum);
        }
    }

    /// ds = p (dp - sum of p dp over the row), over dp.
    fn softmax_bwd<T: Scalar>(&self, p: &[T], dp: &mut [T]) {
        for (p, dp) in p.chunks_exact(self.kv.len).zip(dp.chunks_exact_mut(self.kv.len)) {
            let mean = p.iter().zip(&*dp).fold(T::zero(), |sum, (&p, &dp)| sum + p * dp);
            dp.iter_mut().zip(p).for_each(|(dp, &p)| *dp = p * (*dp - mean));
        }
    }

    fn drop<T: Scalar>(&self, d: &HeadDropout, p: &[T], left: &mut [T], stays: &mut [T]) {
        let positions = self.block.q.positions(self.views, self.rank);
        let (heads, keys) = (self.block.heads, self.kv.len as u64);
        let first = d.first_head(self.views, self.rank, heads);
        let scale = T::from_f64(1.0 / (1.0 - d.probability));
        for (at, ((left, stays), &p)) in left.iter_mut().zip(stays).zip(p).enumerate() {
            let (row, key) = (at / self.kv.len, at as u64 % keys);
            let head = first + (row / self.q.len) as u64 % heads;
            let kept = keeps(d.probability, HeadDropout::SALT, positions[row % self.q.len], head * keys + key);
            (*left, *stays) = if kept { (p * scale, T::one()) } else { (T::zero(), T::zero()) };
        }
    }
}
