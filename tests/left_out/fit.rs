//! The constants of a model that explain measurements best, found by their logarithms: Gauss-Newton steps with the
//! damping of Levenberg and Marquardt.
//!
//! What is least: the sum over the measurements of `weight` * rho(ln(predicted / measured)), and for each constant
//! half the square of ln(found / begun) over its spread. rho(e) is |e| / (1 + |e|): a row that is off by much more than a
//! factor of e, because its cluster is broken or of a kind of its own, pulls no harder than one that is off by that.

/// A constant: where it begins, and by how much it may well be another (of ln, a standard deviation).
#[derive(Debug, Clone, Copy)]
pub struct Prior {
    pub name: &'static str,
    pub begin: f64,
    pub spread: f64,
}

/// Below so much an error counts by its square.
const SMOOTH: f64 = 0.05;
/// Of ln, to each side of where a derivative is wanted.
const APART: f64 = 0.02;
const MOST_STEPS: usize = 40;

fn rho(error: f64) -> f64 {
    let a = error.abs();
    let a = if a < SMOOTH { a * a / (2.0 * SMOOTH) + SMOOTH / 2.0 } else { a };
    a / (1.0 + a)
}

/// The constants. `errors` gives ln(predicted / measured) of every row; `weights` add up to the number of rows.
pub fn fit(priors: &[Prior], weights: &[f64], mut errors: impl FnMut(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let at = |x: &[f64]| -> Vec<f64> { priors.iter().zip(x).map(|(p, x)| p.begin * x.exp()).collect() };
    let cost = |x: &[f64], e: &[f64]| -> f64 {
        let rows: f64 = weights.iter().zip(e).map(|(w, e)| w * rho(*e)).sum();
        rows + priors.iter().zip(x).map(|(p, x)| 0.5 * (x / p.spread).powi(2)).sum::<f64>()
    };
    let n = priors.len();
    let mut x = vec![0.0; n];
    let mut now = errors(&at(&x));
    let (mut best, mut damping) = (cost(&x, &now), 1.0);
    for _ in 0..MOST_STEPS {
        let slopes: Vec<Vec<f64>> = (0..n)
            .map(|j| {
                let mut side = |by: f64| {
                    let mut there = x.clone();
                    there[j] += by;
                    errors(&at(&there))
                };
                let (up, down) = (side(APART), side(-APART));
                up.iter().zip(down).map(|(up, down)| (up - down) / (2.0 * APART)).collect()
            })
            .collect();
        let pull: Vec<f64> = weights
            .iter()
            .zip(&now)
            .map(|(w, e)| w / e.abs().max(SMOOTH) / (1.0 + e.abs().max(SMOOTH)).powi(2))
            .collect();
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).zip(&pull).map(|((a, b), w)| a * b * w).sum() };
        let stiff = |j: usize| priors[j].spread.powi(-2);
        let mut hessian: Vec<Vec<f64>> =
            (0..n).map(|i| (0..n).map(|j| dot(&slopes[i], &slopes[j])).collect()).collect();
        (0..n).for_each(|j| hessian[j][j] += stiff(j));
        let downhill: Vec<f64> = (0..n).map(|j| -dot(&slopes[j], &now) - x[j] * stiff(j)).collect();
        let Some((there, there_errors, found)) = (0..6).find_map(|_| {
            let mut damped = hessian.clone();
            (0..n).for_each(|j| damped[j][j] += damping * (hessian[j][j] + 1e-3));
            let step = solved(damped, downhill.clone());
            let there: Vec<f64> = x.iter().zip(step).map(|(x, d)| x + d.clamp(-1.0, 1.0)).collect();
            let e = errors(&at(&there));
            let found = cost(&there, &e);
            let better = found < best;
            damping = if better { f64::max(damping / 4.0, 1e-3) } else { damping * 4.0 };
            better.then_some((there, e, found))
        }) else {
            break;
        };
        let enough = best - found < 1e-4 * best;
        (x, now, best) = (there, there_errors, found);
        if enough {
            break;
        }
    }
    at(&x)
}

/// x of a x = b, by elimination.
fn solved(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
    let n = b.len();
    for i in 0..n {
        let pivot = (i..n).max_by(|p, q| a[*p][i].abs().total_cmp(&a[*q][i].abs())).expect("a row");
        a.swap(i, pivot);
        b.swap(i, pivot);
        for row in i + 1..n {
            let factor = a[row][i] / a[i][i];
            let of_pivot = a[i].clone();
            a[row].iter_mut().zip(of_pivot).skip(i).for_each(|(here, there)| *here -= factor * there);
            b[row] -= factor * b[i];
        }
    }
    for i in (0..n).rev() {
        b[i] = (b[i] - (i + 1..n).map(|j| a[i][j] * b[j]).sum::<f64>()) / a[i][i];
    }
    b
}

#[test]
fn constants_of_a_line_are_found_beside_rows_that_are_wrong() {
    let x: Vec<f64> = (0..40).map(|i| f64::from(1 << (i % 20))).collect();
    // Every tenth row is a hundred times too long.
    let y: Vec<f64> = (0..40).map(|i| (30.0 + 0.25 * x[i]) * if i % 10 == 7 { 100.0 } else { 1.0 }).collect();
    let priors = [("start", 1.0), ("slope", 1.0)].map(|(name, begin)| Prior { name, begin, spread: 3.0 });
    let found = fit(&priors, &[1.0; 40], |c| x.iter().zip(&y).map(|(x, y)| ((c[0] + c[1] * x) / y).ln()).collect());
    assert!((found[0] / 30.0 - 1.0).abs() < 0.05 && (found[1] / 0.25 - 1.0).abs() < 0.05, "{found:?}");
}
