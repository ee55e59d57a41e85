//! The two ends of the model, where token ids are: embedding and cross-entropy.
//!
//! Shapes: ids, targets [rows]; table, dtable [vocab, cols]; x, dx [rows, cols]; logits [rows, vocab]; loss [1].

use super::Scalar;
use super::scalar::{largest, sum_with};

/// A row of the table, with a message for an id that no row has.
fn row_of<T: Scalar>(id: T, cols: usize, table_len: usize) -> std::ops::Range<usize> {
    let at = id.to_index() * cols;
    assert!(at < table_len, "token id {id} is outside the vocabulary of {}", table_len / cols);
    at..at + cols
}

pub fn embed<T: Scalar>(cols: usize, ids: &[T], table: &[T], x: &mut [T]) {
    for (&id, x) in ids.iter().zip(x.chunks_exact_mut(cols)) {
        x.copy_from_slice(&table[row_of(id, cols, table.len())]);
    }
}

pub fn embed_bwd<T: Scalar>(cols: usize, ids: &[T], dx: &[T], dtable: &mut [T]) {
    for (&id, dx) in ids.iter().zip(dx.chunks_exact(cols)) {
        let row = row_of(id, cols, dtable.len());
        dtable[row].iter_mut().zip(dx).for_each(|(sum, &dx)| *sum += dx);
    }
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

/// The negative log-likelihood of `target`; leaves the softmax in place of the logits.
fn token_loss<T: Scalar>(row: &mut [T], target: usize) -> f64 {
    let top = largest(row, T::NEG_INFINITY);
    let margin = top - row[target];
    row.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum = sum_with(row, row, |e, _| e);
    row.iter_mut().for_each(|e| *e = *e / sum);
    (sum.ln() + margin).to_f64()
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::plan::Kernel;

    #[test]
    fn embedding_takes_rows_and_its_gradient_adds_to_them() {
        let (table, dx, before) = (random(4 * 3, 1), random(3 * 3, 2), random(4 * 3, 3));
        let ids = [2.0, 0.0, 2.0];
        let mut x = vec![f64::NAN; 9];
        launch(&Kernel::Embed { rows: 3, cols: 3, vocab: 4 }, &[Some(&ids), Some(&table)], &mut [&mut x]);
        assert_eq!(x, [&table[6..9], &table[0..3], &table[6..9]].concat());

        let mut want = before.clone();
        for (i, row) in [2, 0, 2].into_iter().enumerate() {
            (0..3).for_each(|c| want[row * 3 + c] += dx[i * 3 + c]);
        }
        let kernel = Kernel::EmbedBwd { rows: 3, cols: 3, vocab: 4 };
        for (old, mut dtable) in [(None, before.clone()), (Some(&before[..]), vec![f64::NAN; 12])] {
            launch(&kernel, &[Some(&ids), Some(&dx), old], &mut [&mut dtable]);
            assert_close(&dtable, &want, 1e-12);
        }
    }

    #[test]
    #[should_panic(expected = "token id 4 is outside the vocabulary of 4")]
    fn an_id_beyond_the_vocabulary_is_named() {
        let kernel = Kernel::Embed { rows: 1, cols: 3, vocab: 4 };
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

    #[test]
    fn cross_entropy_survives_large_logits_and_reads_out_of_place() {
        let logits = [1e4f32, -1e4, 0.0];
        let (mut grad, mut loss) = ([f32::NAN; 3], [f32::NAN]);
        let kernel = Kernel::CrossEntropy { rows: 1, vocab: 3, scale: 1.0 };
        launch(&kernel, &[Some(&logits), Some(&[1.0]), Some(&[0.0])], &mut [&mut grad, &mut loss]);
        assert_eq!((grad, loss), ([1.0, -1.0, 0.0], [2e4]));
    }
}
