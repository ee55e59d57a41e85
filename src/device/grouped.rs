//! Products of experts on a GPU, by its profile: plain products, one for each expert that has rows, one behind the other. Calibration times
//! many plain ones and few of experts. Near those few they are as they were timed: a next product begins while the
//! one before still ends. Far from them a curve of few points says less than the plain products that they are.

use super::curve::Curve;
use super::measured::{Profile, key};
use crate::plan::{Dtype, Work, WorkClass};
use crate::spec::Provenance;

/// Half way between both, in the logarithms of sizes from the nearest that was timed: chosen, not fitted.
const HALF_WAY: f64 = 0.5;

/// The plain product that each expert's is.
fn plain(curve: &str) -> Option<&'static str> {
    match curve {
        "grouped_matmul" => Some("matmul_nt"),
        "grouped_matmul_dx" => Some("matmul_nn"),
        "grouped_matmul_dw" => Some("matmul_tn_onto"),
        _ => None,
    }
}

/// Seconds of a product of experts, and how they are known; none for what is none, or without a curve of plain ones.
pub(super) fn time(profile: &Profile, curve: &str, work: &Work, dtype: Dtype) -> Option<(f64, Provenance)> {
    let WorkClass::Gemm { m, n, k, groups, .. } = work.class else { return None };
    let gpu = profile.gpu.as_ref()?;
    let each = profile.kernels.get(&key(plain(curve)?, dtype))?;
    let [m, n, k, groups] = [m, n, k, groups.max(1)].map(|x| x as f64);
    let (one, how) = each.at(&[m / groups, n, k]);
    // One behind the other they start while the one before ends.
    let apart = (one * groups - gpu.launch_s * (groups - 1.0)).max(one);
    let timed = profile.kernels.get(&key(curve, dtype)).filter(|_| groups > 1.0);
    Some(timed.map_or((apart, how), |timed| between(timed, &[m, n, k], (apart, how))))
}

/// As it was timed where that is near, and the other where it is not.
fn between(timed: &Curve, size: &[f64], (apart, how): (f64, Provenance)) -> (f64, Provenance) {
    let near = 1.0 / (1.0 + (timed.nearest(size) / HALF_WAY).powi(4));
    let (seconds, by_timed) = timed.at(size);
    let seconds = (near * seconds.ln() + (1.0 - near) * apart.ln()).exp();
    (seconds, if near > 0.5 { by_timed } else { how })
}
