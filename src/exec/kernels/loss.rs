//! The two ends of the model, where token ids are: embedding and cross-entropy.
//!
//! Shapes: ids, targets [rows]; table, dtable [vocab, cols]; x, dx [rows, cols]; logits, log-probabilities [rows, vocab];
//! loss [1].
//! A part of a table, or of the logits, has the ids from `first` on.

use super::Scalar;
use super::scalar::{exp_all, largest, sum_with, wide};
use std::ops::Range;

/// A row of the table, with a message for an id that no row has.
fn row_of<T: Scalar>(id: T, cols: usize, table_len: usize) -> Range<usize> {
    let at = id.to_index() * cols;
    assert!(at < table_len, "token id {id} is outside the vocabulary of {}", table_len / cols);
    at..at + cols
}

/// The first id of a part of the table, and its rows.
type Part = (u64, u64);

/// The row of an id; `None` where it stands in another part.
fn row_in<T: Scalar>(id: T, cols: usize, part: Option<Part>, table_len: usize) -> Option<Range<usize>> {
    let Some((first, rows)) = part else { return Some(row_of(id, cols, table_len)) };
    let at = (id.to_index() as u64).checked_sub(first).filter(|at| *at < rows)? as usize;
    Some(at * cols..(at + 1) * cols)
}

pub fn embed<T: Scalar>(cols: usize, part: Option<Part>, ids: &[T], table: &[T], x: &mut [T]) {
    for (&id, x) in ids.iter().zip(x.chunks_exact_mut(cols)) {
        match row_in(id, cols, part, table.len()) {
            Some(row) => x.copy_from_slice(&table[row]),
            None => x.fill(T::zero()),
        }
    }
}

pub fn embed_bwd<T: Scalar>(cols: usize, part: Option<Part>, ids: &[T], dx: &[T], dtable: &mut [T]) {
    for (&id, dx) in ids.iter().zip(dx.chunks_exact(cols)) {
        let Some(row) = row_in(id, cols, part, dtable.len()) else { continue };
        dtable[row].iter_mut().zip(dx).for_each(|(sum, &dx)| *sum += dx);
    }
}

/// The positions of some rows.
pub struct Places {
    pub positions: Vec<u64>,
    pub cols: usize,
}

impl Places {
    fn of(&self, row: usize) -> Range<usize> {
        let at = self.positions[row] as usize * self.cols;
        at..at + self.cols
    }

    /// Adds to each row the table's row of its position.
    pub fn forward<T: Scalar>(&self, table: &[T], x: &mut [T]) {
        for (i, x) in x.chunks_exact_mut(self.cols).enumerate() {
            x.iter_mut().zip(&table[self.of(i)]).for_each(|(x, &p)| *x += p);
        }
    }

    pub fn backward<T: Scalar>(&self, dx: &[T], dtable: &mut [T]) {
        for (i, dx) in dx.chunks_exact(self.cols).enumerate() {
            dtable[self.of(i)].iter_mut().zip(dx).for_each(|(sum, &dx)| *sum += dx);
        }
    }
}

/// Where a target stands among the columns of a part.
fn column<T: Scalar>(target: T, ids: &Range<u64>) -> Option<usize> {
    let id = target.to_index() as u64;
    ids.contains(&id).then(|| (id - ids.start) as usize)
}

/// [rows, 2]: the log-sum-exp of the columns, and the target's logit, 0 where it is not among them.
pub fn vocab_stats<T: Scalar>(cols: usize, ids: Range<u64>, logits: &[T], targets: &[T], stats: &mut [T]) {
    let own = (ids.end - ids.start) as usize;
    for ((row, &target), stats) in logits.chunks_exact(cols).zip(targets).zip(stats.chunks_exact_mut(2)) {
        stats[0] = log_sum_exp(row[..own].iter().copied());
        stats[1] = column(target, &ids).map_or(T::zero(), |at| row[at]);
    }
}

fn log_sum_exp<T: Scalar>(xs: impl Iterator<Item = T> + Clone) -> T {
    let top = xs.clone().fold(T::NEG_INFINITY, Scalar::larger);
    // Nothing but minus infinity: a rank beyond the end of the vocabulary.
    if top == T::NEG_INFINITY { top } else { top + xs.map(|x| (x - top).exp()).sum::<T>().ln() }
}

wide! {
    fn probabilities<'a, T>(logits: &'a mut [T], lse: T, factor: T) -> () {
        logits.iter_mut().for_each(|x| *x = factor * (*x - lse).exp());
    }
}

/// The logits become scale * (softmax - onehot) over all parts, of which `stats` tells, [parts, rows, 2].
pub fn vocab_cross_entropy<T: Scalar>(
    cols: usize,
    ids: Range<u64>,
    scale: f64,
    [targets, stats]: [&[T]; 2],
    logits: &mut [T],
    loss: &mut [T],
) {
    let (rows, own, factor) = (targets.len(), (ids.end - ids.start) as usize, T::from_f64(scale));
    let of = |row: usize, what: usize| stats.chunks_exact(2 * rows).map(move |part| part[2 * row + what]);
    let mut total = 0.0;
    for (i, (row, &target)) in logits.chunks_exact_mut(cols).zip(targets).enumerate() {
        let lse = log_sum_exp(of(i, 0));
        total += (lse - of(i, 1).sum::<T>()).to_f64();
        row[own..].fill(T::zero());
        probabilities(&mut row[..own], lse, factor);
        if let Some(at) = column(target, &ids) {
            row[at] -= factor;
        }
    }
    loss[0] += T::from_f64(scale * total);
}

/// The logits become scale * (softmax - onehot); `loss` grows by scale * the sum of the token losses.
pub fn cross_entropy<T: Scalar>(vocab: usize, scale: f64, targets: &[T], logits: &mut [T], loss: &mut [T]) {
    // In f64: a million small losses would drown in a float's last digits.
    let mut total = 0.0;
    for (&target, row) in targets.iter().zip(logits.chunks_exact_mut(vocab)) {
        let target = row_of(target, 1, vocab).start;
        total += token_loss(row, target);
        let factor = T::from_f64(scale);
        row.iter_mut().for_each(|p| *p *= factor);
        row[target] -= factor;
    }
    loss[0] += T::from_f64(scale * total);
}

wide! {
    /// The softmax in place of the logits; the largest less the target's, and the sum of e^(logit - largest).
    fn softmax<'a, T>(row: &'a mut [T], target: usize) -> (T, T) {
        let top = largest(row, T::NEG_INFINITY);
        let margin = top - row[target];
        let sum = exp_all(row, top);
        row.iter_mut().for_each(|e| *e = *e / sum);
        (margin, sum)
    }
}

/// The negative log-likelihood of `target`; leaves the softmax in place of the logits.
fn token_loss<T: Scalar>(row: &mut [T], target: usize) -> f64 {
    let (margin, sum) = softmax(row, target);
    (sum.ln() + margin).to_f64()
}

/// The log-probabilities of each row of logits.
pub fn log_softmax<T: Scalar>(vocab: usize, logits: &[T], log_probs: &mut [T]) {
    let rows = logits.chunks_exact(vocab).zip(log_probs.chunks_exact_mut(vocab));
    rows.for_each(|(logits, log_probs)| log_softmax_row(logits, log_probs));
}

wide! {
    fn log_softmax_row<'a, T>(logits: &'a [T], log_probs: &'a mut [T]) -> () {
        let top = largest(logits, T::NEG_INFINITY);
        log_probs.copy_from_slice(logits);
        let log = exp_all(log_probs, top).ln();
        log_probs.iter_mut().zip(logits).for_each(|(p, &x)| *p = x - top - log);
    }
}

/// `loss` grows by scale * the sum of the token losses, -scale is the gradient of each target's log-probability, 0 that of
/// all others.
pub fn nll<T: Scalar>(
    vocab: usize,
    scale: f64,
    [log_probs, targets]: [&[T]; 2],
    d_log_probs: &mut [T],
    loss: &mut [T],
) {
    d_log_probs.fill(T::zero());
    let mut total = 0.0;
    for (row, &target) in targets.iter().enumerate() {
        let at = row * vocab + row_of(target, 1, vocab).start;
        total -= log_probs[at].to_f64();
        d_log_probs[at] = T::from_f64(-scale);
    }
    loss[0] += T::from_f64(scale * total);
}

/// The gradient of logits: that of their log-probabilities, less the probabilities times its sum over the row.
pub fn log_softmax_bwd<T: Scalar>(vocab: usize, [log_probs, d_log_probs]: [&[T]; 2], d_logits: &mut [T]) {
    let rows = log_probs.chunks_exact(vocab).zip(d_log_probs.chunks_exact(vocab));
    for ((log_probs, d_log_probs), d_logits) in rows.zip(d_logits.chunks_exact_mut(vocab)) {
        log_softmax_bwd_row(log_probs, d_log_probs, d_logits);
    }
}

wide! {
    fn log_softmax_bwd_row<'a, T>(log_probs: &'a [T], d_log_probs: &'a [T], d_logits: &'a mut [T]) -> () {
        let sum = sum_with(d_log_probs, d_log_probs, |d, _| d);
        let both = log_probs.iter().zip(d_log_probs);
        d_logits.iter_mut().zip(both).for_each(|(dx, (&p, &d))| *dx = d - p.exp() * sum);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::exec::kernels::{Scalar, run};
    use crate::plan::{Axis, Kernel, VocabPart};

    #[test]
    fn embedding_takes_rows_and_its_gradient_adds_to_them() {
        let (table, dx, before) = (random(4 * 3, 1), random(3 * 3, 2), random(4 * 3, 3));
        let ids = [2.0, 0.0, 2.0];
        let mut x = vec![f64::NAN; 9];
        launch(&Kernel::Embed { rows: 3, cols: 3, vocab: 4, shard: None }, &[Some(&ids), Some(&table)], &mut [&mut x]);
        assert_eq!(x, [&table[6..9], &table[0..3], &table[6..9]].concat());

        let mut want = before.clone();
        for (i, row) in [2, 0, 2].into_iter().enumerate() {
            (0..3).for_each(|c| want[row * 3 + c] += dx[i * 3 + c]);
        }
        let kernel = Kernel::EmbedBwd { rows: 3, cols: 3, vocab: 4, shard: None };
        for (old, mut dtable) in [(None, before.clone()), (Some(&before[..]), vec![f64::NAN; 12])] {
            launch(&kernel, &[Some(&ids), Some(&dx), old], &mut [&mut dtable]);
            assert_close(&dtable, &want, 1e-12);
        }
    }

    #[test]
    #[should_panic(expected = "token id 4 is outside the vocabulary of 4")]
    fn an_id_beyond_the_vocabulary_is_named() {
        let kernel = Kernel::Embed { rows: 1, cols: 3, vocab: 4, shard: None };
        launch(&kernel, &[Some(&[4.0]), Some(&random(12, 1))], &mut [&mut [0.0; 3]]);
    }

    /// Loss and gradient of the kernel, the loss added to 10.
    fn cross_entropy(logits: &[f64]) -> (f64, Vec<f64>) {
        let (mut logits, mut loss) = (logits.to_vec(), [10.0]);
        let kernel = Kernel::CrossEntropy { rows: 3, vocab: 5, scale: 0.25 };
        launch(&kernel, &[None, Some(&[4.0, 0.0, 3.0]), None], &mut [&mut logits, &mut loss]);
        (loss[0], logits)
    }

    #[test]
    fn cross_entropy_equals_the_definition_and_finite_differences() {
        let x = random(15, 1);
        let (loss, grad) = cross_entropy(&x);
        let token = |r: usize, t: usize| x[r * 5..][..5].iter().map(|x| x.exp()).sum::<f64>().ln() - x[r * 5 + t];
        assert_close(&[loss], &[10.0 + 0.25 * (token(0, 4) + token(1, 0) + token(2, 3))], 1e-12);
        assert_close(&grad, &slope(|x| cross_entropy(x).0, &x), 1e-9);
    }

    /// Loss and gradient by a kernel for each step, the loss added to 10.
    fn in_steps<T: Scalar>(logits: &[T], targets: &[T], vocab: u64, scale: f64) -> (T, Vec<T>) {
        let rows = targets.len() as u64;
        let [mut log_probs, mut d_log_probs, mut d_logits] =
            [(); 3].map(|()| vec![T::from_f64(f64::NAN); logits.len()]);
        let mut loss = [T::from_f64(10.0)];
        launch(&Kernel::LogSoftmax { rows, vocab }, &[Some(logits)], &mut [&mut log_probs]);
        let nll = Kernel::Nll { rows, vocab, scale };
        launch(&nll, &[Some(&log_probs), Some(targets), None], &mut [&mut d_log_probs, &mut loss]);
        let backward = Kernel::LogSoftmaxBwd { rows, vocab };
        launch(&backward, &[Some(&log_probs), Some(&d_log_probs)], &mut [&mut d_logits]);
        (loss[0], d_logits)
    }

    #[test]
    fn a_kernel_for_each_step_makes_what_the_fused_one_makes() {
        let x = random(15, 1);
        let ((loss, grad), (want_loss, want)) = (in_steps(&x, &[4.0, 0.0, 3.0], 5, 0.25), cross_entropy(&x));
        assert_close(&[loss], &[want_loss], 1e-14);
        assert_close(&grad, &want, 1e-14);

        // More columns than lanes, in the precision of a step, and logits whose exponentials no float holds.
        let logits: Vec<f32> = random(2 * 1003, 2).iter().map(|&x| (200.0 * x) as f32).collect();
        let targets = [1002.0, 0.0];
        let (loss, grad) = in_steps(&logits, &targets, 1003, 0.5);
        let (mut want, mut want_loss) = (logits.clone(), [10.0]);
        let fused = Kernel::CrossEntropy { rows: 2, vocab: 1003, scale: 0.5 };
        launch(&fused, &[None, Some(&targets[..]), None], &mut [&mut want, &mut want_loss]);
        assert_close(&widen(&[loss]), &widen(&want_loss), 1e-6);
        assert_close(&widen(&grad), &widen(&want), 1e-5);
    }

    /// Three ranks of two columns share five ids.
    #[test]
    fn parts_of_the_vocabulary_add_up_to_the_whole() {
        let (x, targets) = (random(15, 1), [4.0, 0.0, 3.0]);
        let (views, part) = (ring(3), VocabPart { rows: 3, cols: 2, vocab: 5, axis: Axis::Cp });
        let own = |rank: usize| -> Vec<f64> {
            (0..6).map(|i| if 2 * rank + i % 2 < 5 { x[i / 2 * 5 + 2 * rank + i % 2] } else { 1e3 }).collect()
        };
        let mut stats = [f64::NAN; 18];
        for (rank, stats) in stats.chunks_exact_mut(6).enumerate() {
            let reads = [Some(&own(rank)[..]), Some(&targets[..])];
            run(&Kernel::VocabStats(part), &views, rank as u32, 1, &reads, &mut [stats]);
        }
        let (loss, grad) = cross_entropy(&x);
        let kernel = Kernel::VocabCrossEntropy { part, ranks: 3, scale: 0.25 };
        for rank in 0..3 {
            let (mut logits, mut got) = (own(rank), [10.0]);
            let reads = [None, Some(&targets[..]), Some(&stats[..]), None];
            run(&kernel, &views, rank as u32, 1, &reads, &mut [&mut logits, &mut got]);
            assert_close(&got, &[loss], 1e-12);
            let want: Vec<f64> =
                (0..6).map(|i| if 2 * rank + i % 2 < 5 { grad[i / 2 * 5 + 2 * rank + i % 2] } else { 0.0 }).collect();
            assert_close(&logits, &want, 1e-12);
        }
    }

    #[test]
    fn parts_of_the_table_add_up_to_the_whole() {
        let (table, dx, ids) = (random(4 * 3, 1), random(3 * 3, 2), [2.0, 0.0, 2.0]);
        let views = ring(2);
        let (rows, cols, shard) = (3, 3, Some(Axis::Cp));
        let (mut x, mut d) = (vec![0.0; 9], vec![]);
        for rank in 0..2 {
            let (mut part, own) = (vec![f64::NAN; 9], &table[6 * rank..][..6]);
            let kernel = Kernel::Embed { rows, cols, vocab: 2, shard };
            run(&kernel, &views, rank as u32, 1, &[Some(&ids), Some(own)], &mut [&mut part]);
            x.iter_mut().zip(part).for_each(|(x, part)| *x += part);
            let mut grad = vec![0.0; 6];
            let kernel = Kernel::EmbedBwd { rows, cols, vocab: 2, shard };
            run(&kernel, &views, rank as u32, 1, &[Some(&ids), Some(&dx), None], &mut [&mut grad]);
            d.extend(grad);
        }
        assert_eq!(x, [&table[6..9], &table[0..3], &table[6..9]].concat());
        let sum = |c: usize| dx[c] + dx[6 + c];
        assert_close(&d, &[&dx[3..6], &[0.0; 3], &[sum(0), sum(1), sum(2)], &[0.0; 3]].concat(), 1e-12);
    }

    #[test]
    fn cross_entropy_survives_large_logits_and_reads_out_of_place() {
        let logits = [1e4f32, -1e4, 0.0];
        let (mut grad, mut loss) = ([f32::NAN; 3], [f32::NAN]);
        let kernel = Kernel::CrossEntropy { rows: 1, vocab: 3, scale: 1.0 };
        launch(&kernel, &[Some(&logits), Some(&[1.0]), Some(&[0.0])], &mut [&mut grad, &mut loss]);
        assert_eq!((grad, loss), ([1.0, -1.0, 0.0], [2e4]));
    }
}
