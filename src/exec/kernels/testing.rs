//! What the tests of the kernels share.

use super::{Scalar, run};
use crate::plan::{Axis, Kernel, Mesh, Segs, Split};
use crate::spec::{Documents, Mask};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Numbers in -1..1.
pub fn random(n: usize, seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}

pub fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

pub fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Runs a kernel that does not depend on the rank.
pub fn launch<T: Scalar>(kernel: &Kernel, reads: &[Option<&[T]>], writes: &mut [&mut [T]]) {
    run(kernel, &ring(1), 0, 1, reads, writes);
}

/// A mesh of `cp` ranks in a ring.
pub fn ring(cp: u32) -> Vec<Mesh> {
    vec![Mesh::new(&[(Axis::Cp, cp)])]
}

pub fn zigzag(seq: u64) -> Segs {
    Segs::new(seq, &[(Axis::Cp, Split::Zigzag)])
}

/// Four masks for 6 * `unit` tokens: causal, full, with a window, of documents.
pub fn masks(unit: u64) -> [Mask; 4] {
    let documents: Documents = vec![2 * unit - 1, 3 * unit + 1, unit].into();
    let window = Mask { window: Some(unit + 3), ..Mask::new(true) };
    [Mask::new(true), Mask::new(false), window, Mask { documents, ..Mask::new(true) }]
}

/// The rows at `positions` of each of the two sequences of `len`.
pub fn rows_at(x: &[f64], len: usize, positions: &[u64]) -> Vec<f64> {
    let row = x.len() / (2 * len);
    let rows = (0..2).flat_map(|b| positions.iter().map(move |&p| b * len + p as usize));
    rows.flat_map(|r| x[r * row..][..row].iter().copied()).collect()
}

/// Visibility by its definition.
pub fn sees(mask: &Mask, i: u64, j: u64) -> bool {
    let document = |at: u64| {
        let mut end = 0;
        mask.documents.lengths().iter().position(|length| {
            end += length;
            at < end
        })
    };
    document(i) == document(j) && (!mask.causal || (j <= i && mask.window.is_none_or(|w| i - j < w)))
}

#[track_caller]
pub fn assert_close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        // Infinities and untouched NaNs must agree exactly.
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * (1.0 + w.abs());
        assert!(same, "element {i}: {g}, expected {w}");
    }
}

/// The gradient of `f` at `x` by central differences.
pub fn slope(f: impl Fn(&[f64]) -> f64, x: &[f64]) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let at = |i: usize, by: f64| {
        let mut moved = x.to_vec();
        moved[i] += by;
        f(&moved)
    };
    (0..x.len()).map(|i| (at(i, STEP) - at(i, -STEP)) / (2.0 * STEP)).collect()
}

pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
