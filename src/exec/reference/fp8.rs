//! Rows as they arrive where they travel in FP8, E4M3 (Micikevicius et al., arXiv:2209.05433): every 128 elements of a row are
//! divided by a scale in f32 that makes the largest of them 448, and each becomes the nearest number that there is. A gradient
//! passes as if nothing had been rounded.

use super::math::Mat;

/// Elements that share a scale.
const BLOCK: usize = 128;

pub fn rounded(mut x: Mat) -> Mat {
    let numbers = numbers();
    for mut row in x.rows_mut() {
        let row = row.as_slice_mut().expect("rows are contiguous");
        for block in row.chunks_mut(BLOCK) {
            let largest = block.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let scale = f64::from((largest / 448.0) as f32);
            if scale > 0.0 {
                block.iter_mut().for_each(|x| *x = nearest(&numbers, *x / scale) * scale);
            }
        }
    }
    x
}

/// All E4M3 numbers that are not below zero, ascending: 0 to 448 by their codes.
fn numbers() -> Vec<f64> {
    let number = |code: i32| match (code / 8, f64::from(code % 8)) {
        (0, mantissa) => mantissa / 512.0,
        (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    (0..127).map(number).collect()
}

/// The nearest of `numbers`; of two that are as near, that of the even code.
fn nearest(numbers: &[f64], x: f64) -> f64 {
    let above = numbers.partition_point(|number| *number < x.abs()).min(numbers.len() - 1);
    let below = above.saturating_sub(1);
    let [up, down] = [numbers[above] - x.abs(), x.abs() - numbers[below]];
    let at = if up < down || (up == down && above % 2 == 0) { above } else { below };
    numbers[at].copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array2;

    #[test]
    fn the_nearest_number_by_hand() {
        let numbers = numbers();
        assert_eq!((numbers[1], numbers[8], numbers[126]), (2f64.powi(-9), 2f64.powi(-6), 448.0));
        let found = [1.0, 1.05, 1.0625, 1.1875, -1.07, 447.0, 500.0, 1e-4, 0.0].map(|x| nearest(&numbers, x));
        assert_eq!(found, [1.0, 1.0, 1.0, 1.25, -1.125, 448.0, 448.0, 0.0, 0.0]);
    }

    #[test]
    fn every_block_of_a_row_has_a_scale() {
        let mut x = Array2::from_shape_fn((2, 130), |(i, j)| (1 + i + j) as f64);
        x[[0, 129]] = 448e6;
        let y = rounded(x.clone());
        assert_eq!((y[[0, 128]], y[[0, 129]]), (0.0, 448e6), "the large one spoils its own block");
        let scale = f64::from((128.0 / 448.0) as f32);
        assert_eq!((y[[0, 127]], y[[0, 126]]), (448.0 * scale, 448.0 * scale), "448 and 416 are neighbours");
        assert!((0..128).all(|j| (y[[1, j]] - x[[1, j]]).abs() <= x[[1, j]] / 15.0));
    }
}
