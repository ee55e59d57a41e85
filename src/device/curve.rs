//! A measured curve: how long a kernel takes by its sizes, from the sizes that were timed.
//!
//! A sum of terms with a physical meaning (a start, FLOPs, bytes of each operand) is fitted with coefficients that
//! are not negative; what it leaves over is interpolated between the points, in the logarithm of sizes and times.

use super::measured::Known;
use crate::plan::{Work, WorkClass};
use crate::spec::Provenance;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

/// A size that was timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// m, n, k of a product, and of how many experts; q_rows, kv_rows, area, heads of all sequences, head_dim of attention;
    /// rows and bytes of an exchange; bytes of a message; of a pass over memory bytes, on a CPU once more with those that
    /// are cold counted twice.
    pub size: Vec<f64>,
    /// Median of the runs.
    pub seconds: f64,
    /// Of the runs, relative: the standard deviation estimated from the median absolute deviation.
    pub spread: f64,
    pub runs: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// Coefficients of `terms`, in seconds.
    pub fit: Vec<f64>,
    /// Standard deviation of the logarithm of measured / predicted, each point predicted from the others.
    pub residual_sd: f64,
    /// Nineteen of twenty predictions are within this factor, by Student's t.
    pub interval_95: f64,
    pub points: Vec<Point>,
}

/// Sizes as a curve counts them; of a product `filled` up with rows that count for nothing, those that were filled in
/// too: what fills blocks of a GPU takes its time, and a CPU computes no such rows. `cold`: of the bytes of a pass over memory,
/// those that are not in a core's caches, where somebody looks.
pub fn size(work: &Work, filled: bool, cold: Option<u64>) -> Vec<f64> {
    let all = match work.class {
        WorkClass::Gemm { n, k, groups: 1, .. } if !filled => return real(work.flops, [n, k]),
        WorkClass::Gemm { n, k, groups, .. } if !filled => {
            return real(work.flops, [n, k]).into_iter().chain([groups as f64]).collect();
        }
        WorkClass::Gemm { m, n, k, .. } => vec![m, n, k],
        WorkClass::Attention { q_rows, kv_rows, area, batch_heads, dims: [d, v], .. } => {
            // As it was measured with values as wide as keys: the width between the two stands for both.
            vec![q_rows, kv_rows, area, batch_heads, d.midpoint(v)]
        }
        WorkClass::Memory | WorkClass::Scan { .. } => {
            [work.bytes].into_iter().chain(cold.map(|cold| work.bytes + cold)).collect()
        }
    };
    all.into_iter().map(|x| x as f64).collect()
}

fn real(flops: u64, [n, k]: [u64; 2]) -> Vec<f64> {
    let [n, k] = [n, k].map(|x| x as f64);
    vec![flops as f64 / (2.0 * n * k).max(1.0), n, k]
}

/// What takes time: a start; then for a product FLOPs and the elements of A, B and C; for attention visible
/// scores times head_dim, visible scores, and the rows of either side; rows and bytes of an exchange; else bytes, and
/// bytes with the cold ones twice.
fn terms(size: &[f64]) -> Vec<f64> {
    match *size {
        [m, n, k] => vec![1.0, m * n * k, m * k, k * n, m * n],
        // Each expert has a B of its own.
        [m, n, k, groups] => vec![1.0, m * n * k, m * k, groups * k * n, m * n],
        [q, kv, area, heads, d] => vec![1.0, area * heads * d, area * heads, q * heads * d, kv * heads * d],
        // Of an exchange rows and bytes, else bytes, of either kind.
        _ => [1.0].into_iter().chain(size.iter().copied()).collect(),
    }
}

/// Squared, in the logarithms of sizes. Of attention the visible part of the rectangle says most, whether the diagonal goes
/// through it, and heads say little: there are many either way.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let apart = |a: f64, b: f64| (a.max(1.0) / b.max(1.0)).ln().powi(2);
    match (a, b) {
        (&[q, kv, area, heads, d], &[q1, kv1, area1, heads1, d1]) => {
            let visible = |area: f64, q: f64, kv: f64| area.max(1.0) / (q * kv).max(1.0);
            let mask = (visible(area, q, kv) / visible(area1, q1, kv1)).ln().powi(2);
            apart(q, q1) + apart(kv, kv1) + 4.0 * mask + apart(heads, heads1) / 4.0 + apart(d, d1)
        }
        _ => a.iter().zip(b).map(|(&a, &b)| apart(a, b)).sum(),
    }
}

/// Closer than this in the logarithm, sizes are averaged rather than told apart: a tenth of noise is not a shape.
const NEAR: f64 = 0.05;

/// Further off the fitted curve than this, in the logarithm, a point is rather a disturbed run than the kernel.
const FAR: f64 = 0.5;

impl Curve {
    /// Fits points; at least one.
    pub fn new(points: Vec<Point>) -> Curve {
        let fit = fit(&points);
        let mut curve = Curve { fit, residual_sd: 0.0, interval_95: 1.0, points };
        let residuals: Vec<f64> = (0..curve.points.len()).map(|i| curve.left_out(i)).collect();
        (curve.residual_sd, curve.interval_95) = spread_of(&residuals);
        curve
    }

    /// The logarithm of measured / predicted of a point that the interpolation may not use.
    fn left_out(&self, i: usize) -> f64 {
        let at = &self.points[i];
        let others = self.points.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, p)| p);
        (at.seconds / self.predict(&at.size, others)).ln()
    }

    fn predict<'a>(&self, size: &[f64], points: impl Iterator<Item = &'a Point>) -> f64 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for point in points {
            let left_over = (point.seconds / self.base(&point.size)).ln();
            // A point far off its curve is believed less, however near it is.
            let belief = 1.0 / (1.0 + (left_over / FAR).powi(2));
            let weight = belief * (distance(size, &point.size) + NEAR * NEAR).powi(-2);
            sum += weight * left_over;
            weights += weight;
        }
        self.base(size) * if weights > 0.0 { (sum / weights).exp() } else { 1.0 }
    }

    fn base(&self, size: &[f64]) -> f64 {
        terms(size).iter().zip(&self.fit).map(|(t, c)| t * c).sum::<f64>().max(1e-9)
    }

    /// Seconds at a size, and how they are known.
    pub fn at(&self, size: &[f64]) -> (f64, Provenance) {
        (self.predict(size, self.points.iter()), self.provenance(size))
    }

    /// How far the nearest size is that was timed, in the logarithms of sizes.
    pub fn nearest(&self, size: &[f64]) -> f64 {
        let all = self.points.iter().map(|p| distance(size, &p.size));
        all.reduce(f64::min).unwrap_or(f64::INFINITY).sqrt()
    }

    fn provenance(&self, size: &[f64]) -> Provenance {
        if self.points.iter().any(|p| distance(size, &p.size) < 1e-12) {
            return Provenance::Measured;
        }
        let inside = |i: usize| {
            let all = || self.points.iter().map(|p| p.size[i]);
            let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
            // A little beyond the last point is no other regime.
            size[i] >= low * 0.75 && size[i] <= high * 1.25
        };
        if (0..size.len()).all(inside) { Provenance::Interpolated } else { Provenance::Extrapolated }
    }

    /// What is wrong with a curve that was read from a file.
    pub fn flaw(&self) -> Option<(String, String)> {
        let sizes = self.points.first().map_or(0, |p| p.size.len());
        if !matches!(sizes, 1..=5) {
            return Some(("points".into(), "no point has a size of 1 to 5 numbers".into()));
        }
        if self.fit.len() != terms(&vec![1.0; sizes]).len() {
            return Some((
                "fit".into(),
                format!("{} coefficients do not fit sizes of {sizes} numbers", self.fit.len()),
            ));
        }
        let bad = |p: &Point| p.size.len() != sizes || !p.size.iter().all(|x| x.known()) || !p.seconds.known();
        let at = self.points.iter().position(bad)?;
        let p = &self.points[at];
        Some((format!("points[{at}]"), format!("size {:?} takes {} seconds; both must be positive", p.size, p.seconds)))
    }
}

/// Standard deviation and the factor of a 95 % interval of what a fit leaves over.
fn spread_of(residuals: &[f64]) -> (f64, f64) {
    if residuals.len() < 3 {
        // Nothing to judge by: half as much again either way.
        return (0.2, 1.5);
    }
    let n = residuals.len() as f64;
    let sd = (residuals.iter().map(|r| r * r).sum::<f64>() / (n - 1.0)).sqrt();
    let t = StudentsT::new(0.0, 1.0, n - 1.0).expect("at least two degrees of freedom").inverse_cdf(0.975);
    (sd, (t * sd).exp())
}

/// Rounds of weighing anew.
const ROUNDS: usize = 8;
/// Relative errors above it weigh less and less.
const LARGE: f64 = 0.1;

/// Coefficients that are not negative, by relative errors. Large errors count in proportion, not by their square
/// (Huber's weights): a run that others disturbed must not bend the curve.
fn fit(points: &[Point]) -> Vec<f64> {
    let rows: Vec<Vec<f64>> = points.iter().map(|p| terms(&p.size).iter().map(|t| t / p.seconds).collect()).collect();
    let mut weights = vec![1.0; rows.len()];
    let mut fit = vec![];
    for _ in 0..ROUNDS {
        fit = least_squares(&rows, &weights);
        for (row, weight) in rows.iter().zip(&mut weights) {
            let error = (1.0 - row.iter().zip(&fit).map(|(x, c)| x * c).sum::<f64>()).abs();
            *weight = (LARGE / error.max(LARGE)).max(1e-3);
        }
    }
    fit
}

/// Rows times coefficients nearest to one, a coefficient at a time until all stand still (coordinate descent; the
/// problem is convex).
fn least_squares(rows: &[Vec<f64>], weights: &[f64]) -> Vec<f64> {
    let width = rows.first().map_or(0, Vec::len);
    let mut fit = vec![0.0; width];
    let mut left: Vec<f64> = vec![1.0; rows.len()];
    let weighed = || rows.iter().zip(weights);
    let squares: Vec<f64> = (0..width).map(|j| weighed().map(|(r, w)| w * r[j] * r[j]).sum()).collect();
    for _ in 0..1000 {
        let mut moved = 0.0f64;
        for j in (0..width).filter(|&j| squares[j] > 0.0) {
            let gain = weighed().zip(&left).map(|((r, w), l)| w * r[j] * l).sum::<f64>() / squares[j];
            let step = (fit[j] + gain).max(0.0) - fit[j];
            fit[j] += step;
            rows.iter().zip(&mut left).for_each(|(r, l)| *l -= r[j] * step);
            moved = moved.max(step.abs() * squares[j].sqrt());
        }
        if moved < 1e-7 {
            break;
        }
    }
    fit
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(seconds: impl Fn(f64) -> f64) -> Vec<Point> {
        (10..24)
            .map(|i| 2f64.powi(i))
            .map(|n| Point { size: vec![n], seconds: seconds(n), spread: 0.0, runs: 1 })
            .collect()
    }

    #[test]
    fn a_line_is_found_and_interpolated() {
        let line = |bytes: f64| 1e-6 + bytes / 8e9;
        let curve = Curve::new(points(line));
        assert!((curve.fit[0] / 1e-6 - 1.0).abs() < 1e-3 && (curve.fit[1] * 8e9 - 1.0).abs() < 1e-3, "{:?}", curve.fit);
        let (seconds, provenance) = curve.at(&[3e5]);
        assert!((seconds / line(3e5) - 1.0).abs() < 1e-3 && provenance == Provenance::Interpolated);
        assert_eq!(curve.at(&[65536.0]).1, Provenance::Measured);
        assert_eq!(curve.at(&[1e9]).1, Provenance::Extrapolated);
        assert!((curve.at(&[1e9]).0 / line(1e9) - 1.0).abs() < 0.01);
    }

    #[test]
    fn a_cache_that_runs_over_is_followed_and_says_its_residual() {
        let cached = |bytes: f64| bytes / if bytes < 1e6 { 4e10 } else { 1e10 };
        let curve = Curve::new(points(cached));
        for bytes in [5e3, 3e5, 3e6] {
            assert!((curve.at(&[bytes]).0 / cached(bytes) - 1.0).abs() < 0.2, "{bytes}");
        }
        assert!(curve.residual_sd > 0.05 && curve.interval_95 > 1.1);
    }

    #[test]
    fn coefficients_are_never_negative() {
        let odd = Curve::new(points(|bytes| (bytes / 8e9 - 1e-7).max(1e-9)));
        assert!(odd.fit.iter().all(|c| *c >= 0.0), "{:?}", odd.fit);
    }
}
