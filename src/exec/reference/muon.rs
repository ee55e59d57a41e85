//! The optimizer Muon, by its definition: Jordan et al. (2024), and the scale of Liu et al., arXiv:2502.16982, equation 4.

use super::math::Mat;
use crate::exec::inputs;
use crate::plan::{Adam, Plan};
use std::collections::{BTreeMap, BTreeSet};

/// A matrix that is orthogonalised by itself: elements of a parameter, in rows of `cols`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    pub elems: Vec<usize>,
    pub cols: usize,
    /// The longer side of the matrix that it is a part of.
    pub longer: usize,
}

/// The matrices of every parameter of a plan that Muon updates: a rank makes what it has of one orthogonal by itself.
pub fn pieces(plan: &Plan) -> BTreeMap<String, Vec<Piece>> {
    let by_muon = plan.params.iter().filter(|param| !param.matrices.is_empty());
    let of = |param: &crate::plan::Param| {
        let width = param.shape[1] as usize;
        // Which matrix each row is of.
        let rows = param.matrices.iter().cycle().enumerate().flat_map(|(n, rows)| vec![(n, *rows); *rows as usize]);
        let rows: Vec<(usize, u64)> = rows.take(param.shape[0] as usize).collect();
        let mut all = BTreeSet::new();
        for rank in (0..plan.ranks()).filter(|rank| inputs::has(plan, param, *rank)) {
            let elems: Vec<usize> =
                inputs::places(plan, param, rank).into_iter().flatten().map(|at| at as usize).collect();
            // A rank may have the same expert twice.
            for elems in elems.chunk_by(|a, b| rows[a / width].0 == rows[b / width].0 && a < b) {
                let cols = elems.iter().take_while(|at| *at / width == elems[0] / width).count();
                let longer = rows[elems[0] / width].1.max(width as u64) as usize;
                all.insert(Piece { elems: elems.to_vec(), cols, longer });
            }
        }
        (param.name.clone(), all.into_iter().collect())
    };
    by_muon.map(of).collect()
}

/// A step: m = 0.95 m + g, every matrix of g + 0.95 m made orthogonal, and the weights moved by it.
pub(super) fn step(param: &[f64], grad: &[f64], m: &mut Vec<f64>, pieces: &[Piece], adam: &Adam) -> Vec<f64> {
    m.resize(grad.len(), 0.0);
    m.iter_mut().zip(grad).for_each(|(m, g)| *m = 0.95 * *m + g);
    let mut new = param.to_vec();
    for piece in pieces {
        let u = piece.elems.iter().map(|&at| grad[at] + 0.95 * m[at]).collect();
        let u = Mat::from_shape_vec((piece.elems.len() / piece.cols, piece.cols), u).expect("rows are of one length");
        let by = 0.2 * (piece.longer as f64).sqrt();
        for (&at, o) in piece.elems.iter().zip(orthogonal(u)) {
            new[at] = param[at] - adam.lr * (adam.weight_decay * param[at] + by * o);
        }
    }
    new
}

/// Near the orthogonal factor: five times 3.4445 X - 4.7750 (XXᵀ) X + 2.0315 (XXᵀ)² X.
fn orthogonal(u: Mat) -> Mat {
    let mut x = &u / (u.iter().map(|u| u * u).sum::<f64>().sqrt() + 1e-7);
    for _ in 0..5 {
        let gram = x.dot(&x.t());
        let once = gram.dot(&x);
        x = 3.4445 * &x - 4.7750 * &once + 2.0315 * gram.dot(&once);
    }
    x
}
