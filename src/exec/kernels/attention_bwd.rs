//! The backward pass of one block of attention, from the final log-sum-exp and delta.
//!
//! With p = exp(s - lse): dV = pᵀ dO, dP = dO Vᵀ, dS = p (dP - delta), dQ = dS K, dK = dSᵀ Q, the last
//! two scaled as the scores are. Since lse and delta are those of the whole row, blocks simply add up.
//!
//! Shapes: q, dq [b*sq, a*d]; do [b*sq, a*v]; kv, dkv [b*sk, (K: k*d | V: k*v)]; lse, delta [b*sq, a].

use super::Scalar;
use super::attention::{Head, KV_TILE, Q_TILE, Tiling};
use super::gemm::{window, window_mut};
use super::mask::{Run, clipped, keys_seen, lean, live_rows};
use super::scalar::{sum_with, wide};
use crate::plan::{AttnBlock, Mesh, Side};
use crate::spec::Mask;
use ndarray::ArrayView2;
use ndarray::linalg::general_mat_mul;
use std::ops::Range;

/// delta = rowsum(dO * O) of every head.
pub fn delta<T: Scalar>(head_dim: usize, o: &[T], d_o: &[T], delta: &mut [T]) {
    let heads = o.chunks_exact(head_dim).zip(d_o.chunks_exact(head_dim));
    for (delta, (o, d_o)) in delta.iter_mut().zip(heads) {
        *delta = sum_with(o, d_o, |o, d_o| o * d_o);
    }
}

/// The gradients of one block. `reads` are q, kv, do, lse, delta. The gradients of the side `onto` are added to what is
/// there.
pub fn backward<T: Scalar>(
    block: &AttnBlock,
    views: &[Mesh],
    rank: u32,
    [q, kv, d_o, lse, delta]: [&[T]; 5],
    dq: &mut [T],
    dkv: &mut [T],
    onto: Option<Side>,
) {
    if onto != Some(Side::Q) {
        clear_rows(dq, live_rows(block, Side::Q, views, rank), block.q_row());
    }
    if onto != Some(Side::Kv) {
        clear_rows(dkv, live_rows(block, Side::Kv, views, rank), block.kv_row());
    }
    let tiling = Tiling::new(block, views, rank);
    let mut scratch = Scratch { p: vec![T::zero(); Q_TILE * KV_TILE], ds: vec![T::zero(); Q_TILE * KV_TILE] };
    let (one, scale) = (T::one(), T::from_f64(tiling.scale));
    for head in tiling.heads() {
        let tiles = tiling.kv.iter().flat_map(|&kv| tiling.q.iter().map(move |&q| (q, kv)));
        for (q_run, kv_run) in tiles.flat_map(|(q, kv)| clipped(q, kv, &tiling.mask)) {
            let (q, d_o) = (head.q(q, q_run), head.o(d_o, q_run));
            let (k, v) = (head.k(kv, kv_run), head.v(kv, kv_run));
            scratch.products(scale, [q, k, d_o, v]);
            scratch.soften(&head, q_run, kv_run, &tiling.mask, [lse, delta]);
            let (p, ds) = scratch.tiles(q_run.len, kv_run.len);
            general_mat_mul(one, &p.t(), &d_o, one, &mut head.v_mut(dkv, kv_run));
            general_mat_mul(scale, &ds.t(), &q, one, &mut head.k_mut(dkv, kv_run));
            general_mat_mul(scale, &ds, &k, one, &mut head.q_mut(dq, q_run));
        }
    }
}

fn clear_rows<T: Scalar>(x: &mut [T], rows: Vec<Range<usize>>, row_len: u64) {
    for range in rows {
        x[range.start * row_len as usize..range.end * row_len as usize].fill(T::zero());
    }
}

/// One tile of p and dS, [queries, keys].
struct Scratch<T> {
    p: Vec<T>,
    ds: Vec<T>,
}

impl<T: Scalar> Scratch<T> {
    /// The scores into `p`, dP into `ds`.
    fn products(&mut self, scale: T, [q, k, d_o, v]: [ArrayView2<T>; 4]) {
        let shape = (q.nrows(), k.nrows());
        general_mat_mul(scale, &q, &k.t(), T::zero(), &mut window_mut(&mut self.p, 0, shape, shape.1));
        general_mat_mul(T::one(), &d_o, &v.t(), T::zero(), &mut window_mut(&mut self.ds, 0, shape, shape.1));
    }

    /// The scores to probabilities, dP to dS; both zero where the mask hides a key.
    fn soften(&mut self, head: &Head, q: Run, kv: Run, mask: &Mask, [lse, delta]: [&[T]; 2]) {
        let rows = self.p.chunks_exact_mut(kv.len).zip(self.ds.chunks_exact_mut(kv.len));
        for (i, (p, ds)) in rows.take(q.len).enumerate() {
            let seen = keys_seen(q, kv, mask, i);
            for hidden in [0..seen.start, seen.end..kv.len] {
                p[hidden.clone()].fill(T::zero());
                ds[hidden].fill(T::zero());
            }
            lean(&mut p[seen.clone()], head.slope(), q, kv, i, seen.clone());
            let (lse, delta) = (lse[head.lane(q.row + i)], delta[head.lane(q.row + i)]);
            soften_row(&mut p[seen.clone()], &mut ds[seen], lse, delta);
        }
    }

    fn tiles(&self, queries: usize, keys: usize) -> (ArrayView2<'_, T>, ArrayView2<'_, T>) {
        (window(&self.p, 0, (queries, keys), keys), window(&self.ds, 0, (queries, keys), keys))
    }
}

wide! {
    /// Turns a row's scores to probabilities and its dP to dS.
    fn soften_row<'a, T>(p: &'a mut [T], ds: &'a mut [T], lse: T, delta: T) -> () {
        p.iter_mut().for_each(|p| *p = (*p - lse).exp());
        ds.iter_mut().zip(&*p).for_each(|(ds, p)| *ds = *p * (*ds - delta));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::exec::kernels::run;
    use crate::plan::{Axis, Kernel, Segs};
    use crate::spec::Factor;

    fn block(q: Segs, kv: Segs, mask: Mask) -> AttnBlock {
        AttnBlock { q, kv, batch: 2, heads: 4, kv_heads: 2, head_dim: 4, v_dim: None, mask, factor: Factor::ONE }
    }

    fn sizes(b: &AttnBlock, views: &[Mesh]) -> (usize, usize) {
        let (q, kv) = (b.q.len(views) * b.heads, b.kv.len(views) * 2 * b.kv_heads);
        ((b.batch * q * b.head_dim) as usize, (b.batch * kv * b.head_dim) as usize)
    }

    fn attend(b: &AttnBlock, views: &[Mesh], rank: u32, q: &[f64], kv: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![f64::NEG_INFINITY; q.len() / b.head_dim as usize]);
        let kernel = Kernel::Attention(b.clone());
        run(&kernel, views, rank, 1, &[Some(q), Some(kv)], &mut [&mut o, &mut lse]);
        (o, lse)
    }

    fn delta_of(o: &[f64], d_o: &[f64]) -> Vec<f64> {
        let mut delta = vec![f64::NAN; o.len() / 4];
        let kernel = Kernel::AttentionDelta { rows: o.len() as u64 / 16, heads: 4, head_dim: 4 };
        launch(&kernel, &[Some(o), Some(d_o)], &mut [&mut delta]);
        delta
    }

    /// dq and dkv, in buffers of NaN.
    fn gradients<T: Scalar>(b: &AttnBlock, views: &[Mesh], rank: u32, reads: [&[T]; 5]) -> (Vec<T>, Vec<T>) {
        let nan = T::from_f64(f64::NAN);
        let (mut dq, mut dkv) = (vec![nan; reads[0].len()], vec![nan; reads[1].len()]);
        run(&Kernel::AttentionBwd(b.clone()), views, rank, 1, &reads.map(Some), &mut [&mut dq, &mut dkv]);
        (dq, dkv)
    }

    #[test]
    fn one_block_equals_finite_differences() {
        let views = ring(1);
        for mask in masks(1) {
            let b = block(zigzag(6), zigzag(6), mask);
            let (nq, nkv) = sizes(&b, &views);
            let (q, kv, d_o) = (random(nq, 1), random(nkv, 2), random(nq, 3));
            let (o, lse) = attend(&b, &views, 0, &q, &kv);
            let delta = delta_of(&o, &d_o);
            let (dq, dkv) = gradients(&b, &views, 0, [&q, &kv, &d_o, &lse, &delta]);
            assert_close(&dq, &slope(|q| dot(&attend(&b, &views, 0, q, &kv).0, &d_o), &q), 1e-8);
            assert_close(&dkv, &slope(|kv| dot(&attend(&b, &views, 0, &q, kv).0, &d_o), &kv), 1e-8);
            let [q, kv, d_o, lse, delta] = [&q, &kv, &d_o, &lse, &delta].map(|x| narrow(x));
            let narrow = gradients(&b, &views, 0, [&q, &kv, &d_o, &lse, &delta]);
            assert_close(&widen(&narrow.0), &dq, 1e-5);
            assert_close(&widen(&narrow.1), &dkv, 1e-5);
        }
    }

    /// Scatters the rows of each sequence to their positions, adding; NaN rows are those left alone.
    fn add_rows(whole: &mut [f64], part: &[f64], len: usize, positions: &[u64]) {
        let row = whole.len() / (2 * len);
        for (at, part) in part.chunks_exact(row).enumerate() {
            let (b, i) = (at / positions.len(), at % positions.len());
            let whole = &mut whole[(b * len + positions[i] as usize) * row..][..row];
            assert!(part.iter().all(|x| x.is_nan()) || part.iter().all(|x| x.is_finite()), "a row is whole");
            whole.iter_mut().zip(part).filter(|(_, x)| x.is_finite()).for_each(|(w, x)| *w += x);
        }
    }

    /// What is added within a kernel is what the kernel gives alone; rows outside the mask stay as they were.
    fn onto_sums(b: &AttnBlock, views: &[Mesh], rank: u32, reads: [&[f64]; 5], alone: &(Vec<f64>, Vec<f64>)) {
        let sum = |part: &[f64]| -> Vec<f64> { part.iter().map(|x| if x.is_nan() { 1.0 } else { x + 1.0 }).collect() };
        for side in [Side::Q, Side::Kv] {
            let begin = |own, len| vec![if side == own { 1.0 } else { f64::NAN }; len];
            let (mut dq, mut dkv) = (begin(Side::Q, alone.0.len()), begin(Side::Kv, alone.1.len()));
            let reads: Vec<_> = reads.iter().map(|x| Some(*x)).chain([None]).collect();
            run(&Kernel::AttentionBwdOnto(b.clone(), side), views, rank, 1, &reads, &mut [&mut dq, &mut dkv]);
            let (of_q, of_kv) =
                if side == Side::Q { (sum(&alone.0), alone.1.clone()) } else { (alone.0.clone(), sum(&alone.1)) };
            assert_close(&dq, &of_q, 1e-12);
            assert_close(&dkv, &of_kv, 1e-12);
        }
    }

    #[test]
    fn blocks_of_a_ring_add_up_to_the_whole() {
        // Long enough for several tiles a run.
        const LEN: usize = 2 * 2 * 300;
        let (one, views) = (ring(1), ring(2));
        let whole = block(Segs::new(LEN as u64, &[]), Segs::new(LEN as u64, &[]), Mask::new(true));
        let (nq, nkv) = sizes(&whole, &one);
        let (q, kv, d_o) = (random(nq, 4), random(nkv, 5), random(nq, 6));
        let (o, lse) = attend(&whole, &one, 0, &q, &kv);
        let delta = delta_of(&o, &d_o);
        let want = gradients(&whole, &one, 0, [&q, &kv, &d_o, &lse, &delta]);

        let segs = zigzag(LEN as u64);
        let (mut dq, mut dkv) = (vec![0.0; nq], vec![0.0; nkv]);
        for (rank, step) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let b = block(segs.clone(), segs.shifted(Axis::Cp, -step), Mask::new(true));
            let (at_q, at_kv) = (b.q.positions(&views, rank), b.kv.positions(&views, rank));
            let local_kv = rows_at(&kv, LEN, &at_kv);
            let local = [&q, &d_o, &lse, &delta].map(|x| rows_at(x, LEN, &at_q));
            let part = gradients(&b, &views, rank, [&local[0], &local_kv, &local[1], &local[2], &local[3]]);
            let reads = [&local[0], &local_kv, &local[1], &local[2], &local[3]].map(|x| &x[..]);
            onto_sums(&b, &views, rank, reads, &part);
            add_rows(&mut dq, &part.0, LEN, &at_q);
            add_rows(&mut dkv, &part.1, LEN, &at_kv);
        }
        assert_close(&dq, &want.0, 1e-12);
        assert_close(&dkv, &want.1, 1e-12);
    }

    #[test]
    fn rows_outside_the_mask_are_left_alone() {
        let views = ring(2);
        let segs = zigzag(16);
        // Rank 1 holds 4..12, rank 0 holds 0..4 and 12..16: nothing of rank 1 sees 12..16.
        let b = block(segs.clone(), segs.shifted(Axis::Cp, -1), Mask::new(true));
        let (nq, nkv) = sizes(&b, &views);
        let (q, kv, d_o) = (random(nq, 7), random(nkv, 8), random(nq, 9));
        let (o, lse) = attend(&b, &views, 1, &q, &kv);
        let (dq, dkv) = gradients(&b, &views, 1, [&q, &kv, &d_o, &lse, &delta_of(&o, &d_o)]);
        assert!(dq.iter().all(|x| x.is_finite()));
        for (row, dkv) in dkv.chunks_exact(16).enumerate() {
            assert!(dkv.iter().all(|x| x.is_finite() == (row % 8 < 4)), "row {row}");
        }
    }
}
