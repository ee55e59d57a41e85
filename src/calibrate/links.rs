//! Durations of a collective by its bytes, as the lowest of one to three affine lines.
//!
//! NCCL chooses among protocols that each take a latency and a time per byte, so that one line is wrong by a quarter
//! while two or three are not. Lines are fitted on relative errors: a row of 8 bytes counts as much as one of 8 GiB.

use crate::spec::{CollectiveOp, Line, MeasuredCollective};
use crate::units::{BytesPerSec, Seconds};

/// t = a + b x, seconds and seconds per byte.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Affine {
    a: f64,
    b: f64,
}

impl Affine {
    fn at(self, bytes: f64) -> f64 {
        self.a + self.b * bytes
    }
}

/// Another line has to lower the sum of squares by this part to be kept: else it follows noise.
const WORTH: f64 = 0.25;
/// Lines that err by less than this need no other.
const GOOD: f64 = 0.01;
/// Rows that a line needs.
const ROWS: usize = 3;
/// Seconds a byte of a line that no byte takes longer on: it has no bandwidth to name, and gets a huge one.
const FLAT: f64 = 1e-18;

/// What was fitted, and how well.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    pub lines: Vec<Line>,
    /// ln(predicted / measured) of every row, in the order of bytes.
    pub residuals: Vec<f64>,
    /// Root mean square of them, over the degrees of freedom.
    pub rel_sd: f64,
}

impl Fit {
    /// What ever larger buffers reach, bytes a second; none where a line has times that do not grow with the bytes.
    pub fn bandwidth(&self) -> Option<f64> {
        let most = self.lines.iter().map(|line| line.bandwidth.value()).fold(0.0, f64::max);
        (most < 0.5 / FLAT).then_some(most)
    }

    /// Under another name: what a cluster keeps of it.
    pub fn measured(&self, op: CollectiveOp, gpus: u32, nodes: u32, source: &str) -> MeasuredCollective {
        let (lines, rel_sd) = (self.lines.clone(), self.rel_sd);
        MeasuredCollective { op, gpus, nodes, lines, rel_sd, source: source.into() }
    }
}

/// Fits (bytes, seconds) of ascending bytes. None for fewer than two sizes.
pub fn fit(rows: &[(f64, f64)]) -> Option<Fit> {
    if !has_sizes(rows) {
        return None;
    }
    let mut best = fit_with(rows, 1);
    for k in 2..=3 {
        if rows.len() < ROWS * k {
            break;
        }
        let more = fit_with(rows, k);
        let (now, then) = (squares(&best, rows), squares(&more, rows));
        if now > GOOD * GOOD * rows.len() as f64 && then < now * (1.0 - WORTH) {
            best = more;
        }
    }
    let residuals: Vec<f64> = rows.iter().map(|&(x, t)| (lowest(&best, x) / t).ln()).collect();
    let free = rows.len().saturating_sub(2 * best.len()).max(1);
    let rel_sd = (residuals.iter().map(|r| r * r).sum::<f64>() / free as f64).sqrt();
    let line = |l: &Affine| Line { latency: Seconds::new(l.a), bandwidth: BytesPerSec::new(1.0 / l.b.max(FLAT)) };
    Some(Fit { lines: best.iter().map(line).collect(), residuals, rel_sd })
}

/// Whether ascending rows are of two sizes or more: of one there is no slope.
fn has_sizes(rows: &[(f64, f64)]) -> bool {
    rows.first().map(|row| row.0) != rows.last().map(|row| row.0)
}

fn lowest(lines: &[Affine], bytes: f64) -> f64 {
    lines.iter().map(|l| l.at(bytes)).fold(f64::INFINITY, f64::min)
}

fn squares(lines: &[Affine], rows: &[(f64, f64)]) -> f64 {
    rows.iter().map(|&(x, t)| (lowest(lines, x) / t).ln().powi(2)).sum()
}

/// The best `k` lines over consecutive rows: every way to cut them is tried.
fn fit_with(rows: &[(f64, f64)], k: usize) -> Vec<Affine> {
    let mut best: Option<(f64, Vec<Affine>)> = None;
    let sloped = |cuts: &Vec<usize>| cuts.windows(2).all(|w| has_sizes(&rows[w[0]..w[1]]));
    for cuts in cuts(rows.len(), k).into_iter().filter(sloped) {
        let lines: Vec<Affine> = cuts.windows(2).map(|w| affine(&rows[w[0]..w[1]])).collect();
        let error = squares(&lines, rows);
        if best.as_ref().is_none_or(|b| error < b.0) {
            best = Some((error, lines));
        }
    }
    best.map_or_else(|| vec![affine(rows)], |b| b.1)
}

/// Borders of `k` parts of `n` rows, each of [`ROWS`] at least (all of them, if it is one part).
fn cuts(n: usize, k: usize) -> Vec<Vec<usize>> {
    match k {
        1 => vec![vec![0, n]],
        2 => (ROWS..=n - ROWS).map(|i| vec![0, i, n]).collect(),
        _ => (ROWS..=n - 2 * ROWS).flat_map(|i| (i + ROWS..=n - ROWS).map(move |j| vec![0, i, j, n])).collect(),
    }
}

/// Least squares of relative errors, neither latency nor time per byte below zero.
fn affine(rows: &[(f64, f64)]) -> Affine {
    let (mut w, mut wx, mut wxx, mut wt, mut wxt) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(x, t) in rows {
        let weight = 1.0 / (t * t);
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wt += weight * t;
        wxt += weight * x * t;
    }
    let det = w * wxx - wx * wx;
    let (a, b) = ((wt * wxx - wxt * wx) / det, (w * wxt - wx * wt) / det);
    // Of sizes that are hardly apart there is no slope: `det` is about 0.
    if det <= 0.0 || !a.is_finite() || !b.is_finite() || b < 0.0 {
        return Affine { a: wt / w, b: 0.0 };
    }
    if a < 0.0 { Affine { a: 0.0, b: wxt / wxx } } else { Affine { a, b } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(lines: &[Affine], noise: impl Fn(usize) -> f64) -> Vec<(f64, f64)> {
        (3..33).map(|i| 2f64.powi(i)).enumerate().map(|(i, x)| (x, lowest(lines, x) * (1.0 + noise(i)))).collect()
    }

    #[test]
    fn known_lines_come_back() {
        let lines = [Affine { a: 10e-6, b: 1e-10 }, Affine { a: 40e-6, b: 4e-12 }];
        let found = fit(&rows(&lines, |_| 0.0)).unwrap();
        assert_eq!(found.lines.len(), 2);
        for (line, right) in found.lines.iter().zip(lines) {
            assert!((line.latency.value() / right.a - 1.0).abs() < 0.02, "{line:?}");
            assert!((line.bandwidth.value() * right.b - 1.0).abs() < 0.02, "{line:?}");
        }
        assert!(found.rel_sd < 0.01);
    }

    #[test]
    fn noise_makes_no_lines() {
        let noise = |i: usize| 0.05 * ((i * 7919 % 13) as f64 / 6.0 - 1.0);
        let found = fit(&rows(&[Affine { a: 10e-6, b: 1e-11 }], noise)).unwrap();
        assert_eq!(found.lines.len(), 1);
        assert!(found.rel_sd > 0.01 && found.rel_sd < 0.06);
    }

    #[test]
    fn too_few_sizes_are_no_fit() {
        assert_eq!((fit(&[]), fit(&[(8.0, 1e-6)])), (None, None));
        assert_eq!(fit(&[(8.0, 1e-6), (8.0, 1.1e-6), (8.0, 1e-6)]), None);
    }

    /// Three rows of the largest size would be a line of their own, on which no buffer takes longer than another.
    #[test]
    fn rows_of_one_size_are_no_line() {
        let mut rows = rows(&[Affine { a: 10e-6, b: 1e-11 }], |_| 0.0);
        let (bytes, time) = rows[rows.len() - 1];
        rows.extend([(bytes, 2.0 * time), (bytes, 2.0 * time)]);
        assert!(fit(&rows).unwrap().bandwidth().is_some_and(|rate| rate < 2e11));
    }

    #[test]
    fn times_that_do_not_grow_have_no_bandwidth() {
        assert_eq!(fit(&[(1e6, 20e-6), (2e6, 10e-6)]).unwrap().bandwidth(), None);
        let rate = fit(&[(1e6, 10e-6), (2e6, 20e-6)]).unwrap().bandwidth().unwrap();
        assert!((rate / 1e11 - 1.0).abs() < 1e-6, "{rate}");
    }

    proptest! {
        #[test]
        fn any_rows_give_times_above_zero(mut rows in prop::collection::vec((1u64..1 << 40, 1e-7f64..10.0), 2..20)) {
            rows.sort_by_key(|r| r.0);
            let rows: Vec<_> = rows.into_iter().map(|(x, t)| (x as f64, t)).collect();
            let found = fit(&rows).unwrap();
            prop_assert!(found.rel_sd.is_finite());
            let above = |line: &Line| line.latency.value() >= 0.0 && line.bandwidth.value() > 0.0;
            prop_assert!(found.lines.iter().all(above));
        }
    }
}
