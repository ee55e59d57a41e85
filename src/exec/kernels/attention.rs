//! Flash attention with log-sum-exp, and the merge of two such results.
//!
//! Shapes: q [b*sq, a*d]; kv [b*sk, (K: k*d | V: k*v)]; o [b*sq, a*v]; lse [b*sq, a]; v is d unless a block says otherwise.
//! Query head j reads KV head j / (a/k).

use super::Scalar;
use super::gemm::{window, window_mut};
use super::mask::{Run, clipped, keys_seen, lean, live_rows, runs};
use super::scalar::{exp_all, largest, wide};
use crate::plan::{AttnBlock, Mesh, Side};
use crate::spec::Mask;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};

/// Tiles large enough for the matrix product to pay off, small enough for scores to stay in cache.
pub const Q_TILE: usize = 128;
pub const KV_TILE: usize = 256;

/// The sizes of a block and the runs of rows that its tiles are.
pub struct Tiling {
    heads: usize,
    kv_heads: usize,
    pub head_dim: usize,
    /// Elements of a head's value.
    pub v_dim: usize,
    pub mask: Mask,
    pub scale: f64,
    q_len: usize,
    kv_len: usize,
    batch: usize,
    /// The slopes of the heads by which scores lean on distance; empty where they do not.
    slopes: Vec<f64>,
    pub q: Vec<Run>,
    pub kv: Vec<Run>,
}

impl Tiling {
    pub fn new(block: &AttnBlock, views: &[Mesh], rank: u32) -> Tiling {
        Tiling {
            heads: block.heads as usize,
            kv_heads: block.kv_heads as usize,
            head_dim: block.head_dim as usize,
            v_dim: block.v_dim() as usize,
            mask: block.mask.clone(),
            scale: block.scale(),
            q_len: block.q.len(views) as usize,
            kv_len: block.kv.len(views) as usize,
            batch: block.batch as usize,
            slopes: block.slopes(views, rank),
            q: runs(&block.q.spans(views, rank), Q_TILE),
            kv: runs(&block.kv.spans(views, rank), KV_TILE),
        }
    }

    /// Every head of every sequence.
    pub fn heads(&self) -> impl Iterator<Item = Head<'_>> {
        (0..self.batch).flat_map(move |seq| (0..self.heads).map(move |head| Head { tiling: self, seq, head }))
    }
}

/// One query head of one sequence: where its rows lie in the operands.
pub struct Head<'t> {
    tiling: &'t Tiling,
    seq: usize,
    head: usize,
}

impl Head<'_> {
    /// Start, shape and stride of the rows of an operand that has `dim` elements for every query head.
    fn by_head(&self, run: Run, dim: usize) -> (usize, (usize, usize), usize) {
        let t = self.tiling;
        let stride = t.heads * dim;
        ((self.seq * t.q_len + run.row) * stride + self.head * dim, (run.len, dim), stride)
    }

    /// Start, shape and stride of the rows of K, `lane` 0, or V, `lane` 1.
    fn kv_window(&self, run: Run, lane: usize) -> (usize, (usize, usize), usize) {
        let t = self.tiling;
        let stride = t.kv_heads * (t.head_dim + t.v_dim);
        let (first, dim) = [(0, t.head_dim), (t.kv_heads * t.head_dim, t.v_dim)][lane];
        let head = self.head / (t.heads / t.kv_heads);
        ((self.seq * t.kv_len + run.row) * stride + first + head * dim, (run.len, dim), stride)
    }

    pub fn slope(&self) -> Option<f64> {
        self.tiling.slopes.get(self.head).copied()
    }

    pub fn q<'x, T>(&self, q: &'x [T], run: Run) -> ArrayView2<'x, T> {
        let (at, shape, stride) = self.by_head(run, self.tiling.head_dim);
        window(q, at, shape, stride)
    }

    pub fn q_mut<'x, T>(&self, q: &'x mut [T], run: Run) -> ArrayViewMut2<'x, T> {
        let (at, shape, stride) = self.by_head(run, self.tiling.head_dim);
        window_mut(q, at, shape, stride)
    }

    pub fn o<'x, T>(&self, o: &'x [T], run: Run) -> ArrayView2<'x, T> {
        let (at, shape, stride) = self.by_head(run, self.tiling.v_dim);
        window(o, at, shape, stride)
    }

    fn o_mut<'x, T>(&self, o: &'x mut [T], run: Run) -> ArrayViewMut2<'x, T> {
        let (at, shape, stride) = self.by_head(run, self.tiling.v_dim);
        window_mut(o, at, shape, stride)
    }

    pub fn k<'x, T>(&self, kv: &'x [T], run: Run) -> ArrayView2<'x, T> {
        let (at, shape, stride) = self.kv_window(run, 0);
        window(kv, at, shape, stride)
    }

    pub fn v<'x, T>(&self, kv: &'x [T], run: Run) -> ArrayView2<'x, T> {
        let (at, shape, stride) = self.kv_window(run, 1);
        window(kv, at, shape, stride)
    }

    pub fn k_mut<'x, T>(&self, kv: &'x mut [T], run: Run) -> ArrayViewMut2<'x, T> {
        let (at, shape, stride) = self.kv_window(run, 0);
        window_mut(kv, at, shape, stride)
    }

    pub fn v_mut<'x, T>(&self, kv: &'x mut [T], run: Run) -> ArrayViewMut2<'x, T> {
        let (at, shape, stride) = self.kv_window(run, 1);
        window_mut(kv, at, shape, stride)
    }

    /// Where the head's number for a row lies in lse and delta.
    pub fn lane(&self, row: usize) -> usize {
        (self.seq * self.tiling.q_len + row) * self.tiling.heads + self.head
    }
}

/// One block of attention. With `onto` the rows go on from what o and lse hold.
pub fn forward<T: Scalar>(
    block: &AttnBlock,
    views: &[Mesh],
    rank: u32,
    [q, kv]: [&[T]; 2],
    o: &mut [T],
    lse: &mut [T],
    onto: bool,
) {
    let tiling = Tiling::new(block, views, rank);
    let mut online = Online::new(tiling.v_dim);
    for head in tiling.heads() {
        for &q_tile in &tiling.q {
            online.begin();
            if onto {
                online.go_on(&head, q_tile, o, lse);
            }
            for &kv_tile in &tiling.kv {
                for (q_run, kv_run) in clipped(q_tile, kv_tile, &tiling.mask) {
                    online.scores(tiling.scale, head.q(q, q_run), head.k(kv, kv_run));
                    online.soften(&head, q_run.row - q_tile.row, q_run, kv_run, &tiling.mask);
                    online.gather(q_run.row - q_tile.row, q_run.len, head.v(kv, kv_run));
                }
            }
            online.finish(&head, q_tile, o, lse);
        }
    }
}

/// The running softmax of one tile of queries (Milakov and Gimelshein, arXiv:1805.02867).
struct Online<T> {
    /// Largest score of each row so far.
    top: Vec<T>,
    /// Sum of exp(score - top).
    sum: Vec<T>,
    /// Sum of exp(score - top) * v, [Q_TILE, d].
    acc: Vec<T>,
    /// Scores, then probabilities, of the tile at hand.
    p: Vec<T>,
    v_dim: usize,
}

impl<T: Scalar> Online<T> {
    fn new(v_dim: usize) -> Online<T> {
        let zeros = |n| vec![T::zero(); n];
        let (top, sum) = (zeros(Q_TILE), zeros(Q_TILE));
        Online { top, sum, acc: zeros(Q_TILE * v_dim), p: zeros(Q_TILE * KV_TILE), v_dim }
    }

    fn begin(&mut self) {
        self.top.fill(T::NEG_INFINITY);
        self.sum.fill(T::zero());
        self.acc.fill(T::zero());
    }

    /// Goes on from an output and its log-sum-exp, which count as one key with that output as its value.
    fn go_on(&mut self, head: &Head, tile: Run, o: &[T], lse: &[T]) {
        for (i, (o, acc)) in head.o(o, tile).rows().into_iter().zip(self.acc.chunks_exact_mut(self.v_dim)).enumerate() {
            let lse = lse[head.lane(tile.row + i)];
            if lse != T::NEG_INFINITY {
                acc.iter_mut().zip(o).for_each(|(acc, &o)| *acc = o);
                (self.top[i], self.sum[i]) = (lse, T::one());
            }
        }
    }

    fn scores(&mut self, scale: f64, q: ArrayView2<T>, k: ArrayView2<T>) {
        let shape = (q.nrows(), k.nrows());
        general_mat_mul(T::from_f64(scale), &q, &k.t(), T::zero(), &mut window_mut(&mut self.p, 0, shape, shape.1));
    }

    /// Scores to exp(score - top), what was summed under the old top rescaled. `first` is the place of the
    /// run in the tile.
    fn soften(&mut self, head: &Head, first: usize, q: Run, kv: Run, mask: &Mask) {
        for i in 0..q.len {
            let (row, seen) = (first + i, keys_seen(q, kv, mask, i));
            let p = &mut self.p[i * kv.len..][..kv.len];
            p[..seen.start].fill(T::zero());
            p[seen.end..].fill(T::zero());
            if !seen.is_empty() {
                lean(&mut p[seen.clone()], head.slope(), q, kv, i, seen.clone());
                let acc = &mut self.acc[row * self.v_dim..][..self.v_dim];
                (self.top[row], self.sum[row]) = soften_row(&mut p[seen], self.top[row], self.sum[row], acc);
            }
        }
    }

    fn gather(&mut self, first: usize, rows: usize, v: ArrayView2<T>) {
        let p = window(&self.p, 0, (rows, v.nrows()), v.nrows());
        let at = first * self.v_dim;
        let mut acc = window_mut(&mut self.acc, at, (rows, self.v_dim), self.v_dim);
        general_mat_mul(T::one(), &p, &v, T::one(), &mut acc);
    }

    fn finish(&self, head: &Head, tile: Run, o: &mut [T], lse: &mut [T]) {
        let acc = self.acc.chunks_exact(self.v_dim);
        for (i, (mut o, acc)) in head.o_mut(o, tile).rows_mut().into_iter().zip(acc).enumerate() {
            // A row that saw no key has summed nothing. (A NaN is not zero, and has to show.)
            if self.sum[i] != T::zero() {
                o.iter_mut().zip(acc).for_each(|(o, &acc)| *o = acc / self.sum[i]);
                lse[head.lane(tile.row + i)] = self.top[i] + self.sum[i].ln();
            }
        }
    }
}

wide! {
    /// Scores of a row to exp(score - top), `acc` rescaled if the largest score so far, `top`, is one of them. The new
    /// largest score and the new sum.
    fn soften_row<'a, T>(scores: &'a mut [T], top: T, sum: T, acc: &'a mut [T]) -> (T, T) {
        let new = largest(scores, top);
        let here = exp_all(scores, new);
        if new == top {
            return (top, sum + here);
        }
        let keep = (top - new).exp();
        acc.iter_mut().for_each(|o| *o *= keep);
        (new, sum * keep + here)
    }
}

/// Adds a block's output to the running one, in the rows that saw a key of the block.
pub fn merge<T: Scalar>(
    block: &AttnBlock,
    views: &[Mesh],
    rank: u32,
    [o_block, lse_block]: [&[T]; 2],
    o: &mut [T],
    lse: &mut [T],
) {
    let (heads, v_dim) = (block.heads as usize, block.v_dim() as usize);
    for rows in live_rows(block, Side::Q, views, rank) {
        for lane in rows.start * heads..rows.end * heads {
            let span = lane * v_dim..(lane + 1) * v_dim;
            merge_head(&mut o[span.clone()], &mut lse[lane], &o_block[span], lse_block[lane]);
        }
    }
}

/// Adds a block's log-sum-exp to the running one, in the rows that saw a key of the block.
pub fn add_lse<T: Scalar>(block: &AttnBlock, views: &[Mesh], rank: u32, lse_block: &[T], lse: &mut [T]) {
    let heads = block.heads as usize;
    for rows in live_rows(block, Side::Q, views, rank) {
        for lane in rows.start * heads..rows.end * heads {
            merge_head(&mut [], &mut lse[lane], &[], lse_block[lane]);
        }
    }
}

/// Adds exp(lse_block - lse) times a block's output, in the rows that saw a key of the block.
pub fn add_weighted<T: Scalar>(
    block: &AttnBlock,
    views: &[Mesh],
    rank: u32,
    [o_block, lse_block, lse]: [&[T]; 3],
    o: &mut [T],
) {
    let (heads, v_dim) = (block.heads as usize, block.v_dim() as usize);
    for rows in live_rows(block, Side::Q, views, rank) {
        for lane in rows.start * heads..rows.end * heads {
            let (span, weight) = (lane * v_dim..(lane + 1) * v_dim, (lse_block[lane] - lse[lane]).exp());
            o[span.clone()].iter_mut().zip(&o_block[span]).for_each(|(o, &add)| *o += weight * add);
        }
    }
}

/// Two normalised outputs weigh as exp(lse). An empty side, at lse -inf, says nothing: its output, which
/// may be anything, is not read.
fn merge_head<T: Scalar>(o: &mut [T], lse: &mut T, o_block: &[T], lse_block: T) {
    if lse_block == T::NEG_INFINITY {
        return;
    }
    if *lse == T::NEG_INFINITY {
        o.copy_from_slice(o_block);
        *lse = lse_block;
        return;
    }
    let top = lse.larger(lse_block);
    let both = top + ((*lse - top).exp() + (lse_block - top).exp()).ln();
    let (keep, take) = ((*lse - both).exp(), (lse_block - both).exp());
    o.iter_mut().zip(o_block).for_each(|(o, &add)| *o = *o * keep + add * take);
    *lse = both;
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::exec::kernels::run;
    use crate::plan::{Axis, Kernel, Segs, Split};
    use crate::spec::Factor;
    use proptest::prelude::*;

    fn block(segs: (Segs, Segs), mask: Mask) -> AttnBlock {
        AttnBlock {
            q: segs.0,
            kv: segs.1,
            batch: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            v_dim: None,
            mask,
            factor: Factor::ONE,
        }
    }

    /// Attention by its definition, one query and head at a time, visibility by comparing positions.
    fn naive(b: &AttnBlock, views: &[Mesh], rank: u32, q: &[f64], kv: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (q_pos, kv_pos) = (b.q.positions(views, rank), b.kv.positions(views, rank));
        let [a, k, d] = [b.heads, b.kv_heads, b.head_dim].map(|x| x as usize);
        let rows = b.batch as usize * q_pos.len();
        let (mut o, mut lse) = (vec![f64::NAN; rows * a * d], vec![f64::NAN; rows * a]);
        for (row, head) in (0..rows).flat_map(|row| (0..a).map(move |head| (row, head))) {
            let (seq, i) = (row / q_pos.len(), row % q_pos.len());
            let seen: Vec<usize> = (0..kv_pos.len()).filter(|&j| sees(&b.mask, q_pos[i], kv_pos[j])).collect();
            if seen.is_empty() {
                continue;
            }
            let lane =
                |j: usize, lane: usize| &kv[((seq * kv_pos.len() + j) * 2 * k + lane * k + head / (a / k)) * d..][..d];
            let q = &q[(row * a + head) * d..][..d];
            let e: Vec<f64> = seen.iter().map(|&j| (dot(q, lane(j, 0)) / (d as f64).sqrt()).exp()).collect();
            let sum: f64 = e.iter().sum();
            lse[row * a + head] = sum.ln();
            for c in 0..d {
                o[(row * a + head) * d + c] = seen.iter().zip(&e).map(|(&j, e)| e / sum * lane(j, 1)[c]).sum();
            }
        }
        (o, lse)
    }

    fn operands(b: &AttnBlock, views: &[Mesh], seed: u64) -> (Vec<f64>, Vec<f64>) {
        let q = b.batch * b.q.len(views) * b.heads * b.head_dim;
        let kv = b.batch * b.kv.len(views) * 2 * b.kv_heads * b.head_dim;
        (random(q as usize, seed), random(kv as usize, seed + 1))
    }

    /// The kernel, into buffers of NaN, so that untouched rows show.
    fn attend<T: Scalar>(b: &AttnBlock, views: &[Mesh], rank: u32, q: &[T], kv: &[T]) -> (Vec<T>, Vec<T>) {
        let nan = T::from_f64(f64::NAN);
        let (mut o, mut lse) = (vec![nan; q.len()], vec![nan; q.len() / b.head_dim as usize]);
        let kernel = Kernel::Attention(b.clone());
        run(&kernel, views, rank, 1, &[Some(q), Some(kv)], &mut [&mut o, &mut lse]);
        (o, lse)
    }

    #[test]
    fn every_block_of_a_ring_equals_the_definition() {
        let views = ring(3);
        let steps = [(0, 0), (0, 1), (2, 1), (1, 2), (2, 0)];
        let splits = [Split::Zigzag, Split::Stripe].into_iter().flat_map(|split| steps.map(|step| (split, step)));
        for ((split, (rank, shift)), mask) in splits.flat_map(|case| masks(150).map(|mask| (case, mask))) {
            let segs = Segs::new(6 * 150, &[(Axis::Cp, split)]);
            let b = block((segs.clone(), segs.shifted(Axis::Cp, shift)), mask);
            let (q, kv) = operands(&b, &views, 7);
            let (o, lse) = attend(&b, &views, rank, &q, &kv);
            let want = naive(&b, &views, rank, &q, &kv);
            assert_close(&o, &want.0, 1e-12);
            assert_close(&lse, &want.1, 1e-12);
            let (o, lse) = attend(&b, &views, rank, &narrow(&q), &narrow(&kv));
            assert_close(&widen(&o), &want.0, 1e-5);
            assert_close(&widen(&lse), &want.1, 1e-5);
        }
    }

    #[test]
    fn rows_that_see_no_key_are_left_alone() {
        let views = ring(2);
        let segs = zigzag(16);
        // Rank 0 holds 0..4 and 12..16, rank 1 holds 4..12: 0..4 sees none of it.
        let b = block((segs.clone(), segs.shifted(Axis::Cp, 1)), Mask::new(true));
        let (q, kv) = operands(&b, &views, 9);
        let (o, lse) = attend(&b, &views, 0, &q, &kv);
        assert!(o[..4 * 32].iter().chain(&lse[..4 * 4]).all(|x| x.is_nan()));
        assert!(o[4 * 32..8 * 32].iter().chain(&lse[4 * 4..8 * 4]).all(|x| x.is_finite()));
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let views = ring(1);
        let b = block((zigzag(16), zigzag(16)), Mask::new(true));
        let (q, kv) = operands(&b, &views, 11);
        let q: Vec<f32> = q.iter().map(|x| *x as f32 * 1e4).collect();
        let (o, lse) = attend(&b, &views, 0, &q, &narrow(&kv));
        assert!(o.iter().chain(&lse).all(|x| x.is_finite()));
    }

    #[test]
    fn blocks_of_a_ring_merge_to_the_whole() {
        let (views, p) = (ring(4), 4);
        let segs = zigzag(64);
        let whole_views = ring(1);
        let whole = block((Segs::new(64, &[]), Segs::new(64, &[])), Mask::new(true));
        let (q, kv) = operands(&whole, &whole_views, 13);
        let want = attend(&whole, &whole_views, 0, &q, &kv);
        let local = |x: &[f64], rank: u32| rows_at(x, 64, &segs.positions(&views, rank));
        for rank in 0..p {
            let b = |step: i32| block((segs.clone(), segs.shifted(Axis::Cp, -step)), Mask::new(true));
            let (mut o, mut lse) = attend(&b(0), &views, rank, &local(&q, rank), &local(&kv, rank));
            let (mut on_o, mut on_lse) = (o.clone(), lse.clone());
            let mut parts = vec![(o.clone(), lse.clone())];
            for step in 1..p as i32 {
                let from = views[0].shift(rank, Axis::Cp, -step);
                let (q, kv) = (local(&q, rank), local(&kv, from));
                let (ob, lb) = attend(&b(step), &views, rank, &q, &kv);
                let merge = Kernel::MergeLse(b(step));
                run(&merge, &views, rank, 1, &[None, None, Some(&ob), Some(&lb)], &mut [&mut o, &mut lse]);
                let onto = Kernel::AttentionOnto(b(step));
                run(&onto, &views, rank, 1, &[Some(&q), Some(&kv), None, None], &mut [&mut on_o, &mut on_lse]);
                parts.push((ob, lb));
            }
            let (mut sum_o, mut sum_lse) = (vec![0.0; o.len()], parts[0].1.clone());
            for (step, (_, lb)) in (0..).zip(&parts).skip(1) {
                run(&Kernel::AddLse(b(step)), &views, rank, 1, &[None, Some(lb)], &mut [&mut sum_lse]);
            }
            for (step, (ob, lb)) in (0..).zip(&parts) {
                let reads = [None, Some(&ob[..]), Some(lb), Some(&sum_lse)];
                run(&Kernel::AddWeighted(b(step)), &views, rank, 1, &reads, &mut [&mut sum_o]);
            }
            for (o, lse) in [(o, lse), (on_o, on_lse), (sum_o, sum_lse)] {
                assert_close(&o, &local(&want.0, rank), 1e-12);
                assert_close(&lse, &local(&want.1, rank), 1e-12);
            }
        }
    }

    /// An output and its log-sum-exp, empty one time in four, and then with nonsense in the output.
    fn part() -> impl Strategy<Value = (Vec<f64>, f64)> {
        prop_oneof![
            3 => (prop::collection::vec(-2.0..2.0, 4), -30.0..30.0),
            1 => Just((vec![f64::NAN; 4], f64::NEG_INFINITY)),
        ]
    }

    fn merged(mut x: (Vec<f64>, f64), y: &(Vec<f64>, f64)) -> (Vec<f64>, f64) {
        merge_head(&mut x.0, &mut x.1, &y.0, y.1);
        x
    }

    proptest! {
        #[test]
        fn merging_is_associative_and_commutative(x in part(), y in part(), z in part()) {
            let left = merged(merged(x.clone(), &y), &z);
            let right = merged(x.clone(), &merged(y.clone(), &z));
            let turned = merged(merged(z, &y), &x);
            for other in [right, turned] {
                assert_close(&left.0, &other.0, 1e-12);
                assert_close(&[left.1], &[other.1], 1e-12);
            }
        }
    }
}
