//! Rounding to FP8, E4M3 (Micikevicius et al., arXiv:2209.05433): four bits of exponent, three of mantissa,
//! 448 the largest number, 2^-9 the smallest.

use super::Scalar;
use crate::plan::kernel::FP8_BLOCK;

const LARGEST: f64 = 448.0;
const SMALLEST_NORMAL: f64 = 1.0 / 64.0;

/// The nearest E4M3 number, ties to an even mantissa; what is too large becomes the largest.
fn e4m3(x: f64) -> f64 {
    let exponent = x.abs().max(SMALLEST_NORMAL).log2().floor();
    let last_place = (exponent - 3.0).exp2();
    ((x / last_place).round_ties_even() * last_place).clamp(-LARGEST, LARGEST)
}

/// The operand as a product sees it: every [`FP8_BLOCK`] elements along k divided by a scale that makes
/// the largest of them 448, rounded, and multiplied again. Row i starts at i * `walk.0`, and its elements
/// are `walk.1` apart.
pub fn rounded<T: Scalar>(x: &[T], [rows, k]: [usize; 2], walk: (usize, usize)) -> Vec<T> {
    let mut out = x.to_vec();
    for row in 0..rows {
        for start in (0..k).step_by(FP8_BLOCK as usize) {
            let places = (start..k.min(start + FP8_BLOCK as usize)).map(|j| row * walk.0 + j * walk.1);
            let top = places.clone().map(|at| x[at].to_f64().abs()).fold(0.0, f64::max);
            if top > 0.0 {
                let scale = top / LARGEST;
                places.for_each(|at| out[at] = T::from_f64(e4m3(x[at].to_f64() / scale) * scale));
            }
        }
    }
    out
}

/// Rows of `cols` elements as codes, each an integer of 0 to 255, and a scale for every [`FP8_BLOCK`] of them.
pub fn encode<T: Scalar>(x: &[T], cols: usize, codes: &mut [T], scales: &mut [T]) {
    let width = cols.div_ceil(FP8_BLOCK as usize);
    for (i, x) in x.chunks(cols).enumerate() {
        for (b, x) in x.chunks(FP8_BLOCK as usize).enumerate() {
            let top = x.iter().map(|x| x.to_f64().abs()).fold(0.0, f64::max);
            // What travels is a scale in f32, and codes are made with that one.
            let scale = f64::from((top / LARGEST) as f32);
            scales[i * width + b] = T::from_f64(scale);
            for (code, x) in codes[i * cols + b * FP8_BLOCK as usize..].iter_mut().zip(x) {
                let scaled = if scale > 0.0 { x.to_f64() / scale } else { 0.0 };
                *code = T::from_f64(f64::from(code_of(e4m3(scaled))));
            }
        }
    }
}

/// The numbers that codes and scales stand for.
pub fn decoded<T: Scalar>(codes: &[T], scales: &[T], cols: usize) -> Vec<T> {
    let width = cols.div_ceil(FP8_BLOCK as usize);
    let number = |(at, code): (usize, &T)| {
        let scale = scales[at / cols * width + at % cols / FP8_BLOCK as usize].to_f64();
        T::from_f64(number_of(code.to_index() as u8) * scale)
    };
    codes.iter().enumerate().map(number).collect()
}

/// The code of a number that has one: sign, four bits of exponent, three of mantissa.
fn code_of(x: f64) -> u8 {
    let sign = if x.is_sign_negative() { 128 } else { 0 };
    let size = x.abs();
    if size < SMALLEST_NORMAL {
        return sign | (size * 512.0) as u8;
    }
    let exponent = size.log2().floor();
    sign | ((exponent + 7.0) as u8) << 3 | ((size / exponent.exp2() - 1.0) * 8.0) as u8
}

fn number_of(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let size = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) };
    if code & 128 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::plan::Kernel;

    /// All 256 codes decoded bit by bit, without the two that are NaN.
    fn codes() -> Vec<f64> {
        let decode = |code: u8| {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let size = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) };
            if code & 128 == 0 { size } else { -size }
        };
        (0..=255u8).filter(|code| code & 127 != 127).map(decode).collect()
    }

    #[test]
    fn rounding_finds_the_nearest_code() {
        let codes = codes();
        assert!(codes.iter().all(|&x| e4m3(x) == x));
        assert_eq!((e4m3(1e9), e4m3(-449.0), e4m3(1e-4)), (448.0, -448.0, 0.0));
        // A tie goes to the even mantissa: 1.0625 lies between 1 and 1.125, 1.1875 between 1.125 and 1.25.
        assert_eq!((e4m3(1.0625), e4m3(1.1875)), (1.0, 1.25));
        for x in random(1000, 1).into_iter().flat_map(|x| [x, 300.0 * x, x / 100.0]) {
            let nearest = codes.iter().map(|c| (c - x).abs()).fold(f64::MAX, f64::min);
            assert_eq!((e4m3(x) - x).abs(), nearest, "{x}");
        }
    }

    #[test]
    fn codes_stand_for_their_numbers() {
        assert!((0..=255u8).filter(|c| c & 127 != 127).all(|c| code_of(number_of(c)) == c));
        let (rows, cols) = (3, 200);
        let x: Vec<f64> = random(rows * cols, 5).iter().map(|x| 30.0 * x).collect();
        let (mut codes, mut scales) = (vec![f64::NAN; 600], vec![f64::NAN; 6]);
        encode(&x, cols, &mut codes, &mut scales);
        assert_close(&decoded(&codes, &scales, cols), &rounded(&x, [rows, cols], (cols, 1)), 1e-6);
        encode(&[0.0; 4], 4, &mut codes, &mut scales);
        assert_eq!((&decoded(&codes[..4], &scales[..1], 4)[..], scales[0]), (&[0.0; 4][..], 0.0));
    }

    #[test]
    fn every_block_along_k_has_its_own_scale_however_it_is_stored() {
        let (rows, k) = (3, 200);
        let mut x = random(rows * k, 1);
        // A far larger number spoils its own block of 128 alone.
        x[k + 130] = 1e6;
        let out = rounded(&x, [rows, k], (k, 1));
        let error = |row: usize, from: usize, to: usize| {
            (from..to).map(|j| (out[row * k + j] - x[row * k + j]).abs()).fold(0.0, f64::max)
        };
        assert!(error(1, 0, 128) < 0.04 && error(0, 128, 200) < 0.04 && error(1, 131, 200) > 0.5);
        let turned: Vec<f64> = (0..rows * k).map(|i| x[i % rows * k + i / rows]).collect();
        let other = rounded(&turned, [rows, k], (1, rows));
        assert!((0..rows * k).all(|i| other[i] == out[i % rows * k + i / rows]));
    }

    #[test]
    fn a_product_in_fp8_is_that_of_the_rounded_operands() {
        let (m, n, k) = (5, 4, 150);
        // Rows of A and columns of B, k long, before and after rounding.
        let (a, b) = (random(m * k, 1), random(n * k, 2));
        let round = |x: &[f64]| x.chunks(k).flat_map(|row| rounded(row, [1, k], (k, 1))).collect::<Vec<f64>>();
        let dots = |a: &[f64], b: &[f64]| -> Vec<f64> {
            a.chunks(k).flat_map(|a| b.chunks(k).map(|b| dot(a, b)).collect::<Vec<f64>>()).collect()
        };
        let turned = |x: &[f64], rows: usize| (0..rows * k).map(|i| x[i % rows * k + i / rows]).collect::<Vec<f64>>();
        let (want, exact) = (dots(&round(&a), &round(&b)), dots(&a, &b));
        for (a_t, b_t) in [(false, true), (true, true), (false, false), (true, false)] {
            let stored_a = if a_t { turned(&a, m) } else { a.clone() };
            let stored_b = if b_t { b.clone() } else { turned(&b, n) };
            let mut c = vec![f64::NAN; m * n];
            let [m, n, k] = [m, n, k].map(|x| x as u64);
            let kernel = Kernel::MatMul { m, n, k, a_t, b_t, accumulate: false, fp8: true, bias: false };
            launch(&kernel, &[Some(&stored_a), Some(&stored_b)], &mut [&mut c]);
            assert_close(&c, &want, 1e-12);
            assert!(c.iter().zip(&exact).all(|(c, e)| c != e && (c - e).abs() < 0.6));
        }
    }
}
