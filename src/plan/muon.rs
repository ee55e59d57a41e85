//! Muon (Jordan et al., 2024; for large models Liu et al., arXiv:2502.16982): a weight that is a matrix moves by its
//! momentum made orthogonal, and its optimizer keeps one number an element where Adam keeps two. What is no matrix goes by
//! Adam, in the same tensors.
//!
//! The orthogonal factor of a matrix comes of five steps of Newton and Schulz, X <- aX + (bA + cA²)X with A = XXᵀ, from X = M / |M|:
//! three products a step, of 2 s² l, 2 s³ and 2 s² l FLOP for a matrix of short side s and long side l. They need all of the
//! matrix, of which a rank under ZeRO has a slice.

use super::kernel::{Operands, Work, WorkClass};
use super::mesh::{Group, Mesh};
use super::optimizer::Adam;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Steps of Newton and Schulz.
pub const STEPS: usize = 5;

/// The coefficients a, b and c of each step, which bring singular values near 1 fast rather than to it (Jordan's
/// quintic).
pub const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

/// Added to the norm that a matrix is divided by, so that a matrix of zeros stays one.
pub const EPS: f64 = 1e-7;

/// The share of itself that the momentum keeps from step to step.
pub const MOMENTUM: f64 = 0.95;

/// Factor of an update, which makes its elements in the mean as large as Adam's: 0.2 of the square root of the longer
/// side (arXiv:2502.16982, equation 4).
pub const SCALE: f64 = 0.2;

/// Matrices of one size, one behind the other in a flat tensor of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrices {
    pub from: u64,
    pub count: u64,
    /// Rows and columns of a rank's part of each matrix.
    pub rows: u64,
    pub cols: u64,
    /// The longer side of the whole matrix.
    pub longer: u64,
}

impl Matrices {
    /// Where the matrices begin and end in the flat tensor.
    pub fn range(&self) -> [u64; 2] {
        [self.from, self.from + self.count * self.rows * self.cols]
    }

    pub fn elems(&self) -> u64 {
        self.count * self.rows * self.cols
    }

    /// Elements of the Gram matrices of all of them.
    pub fn gram_elems(&self) -> u64 {
        self.count * self.rows.min(self.cols).pow(2)
    }
}

/// A rank's part of a flat tensor of weights, and where matrices stand in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Elements of the part.
    pub elems: u64,
    /// The ranks that share the tensor in equal parts, in group order; `None`: the part is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Group>,
    /// The matrices, in the order of the tensor.
    pub matrices: Vec<Matrices>,
    /// Elements that there is room for of what is no matrix, for its second moments: as many as the part with most of
    /// them has.
    pub others: u64,
}

/// A stretch of a rank's part: of matrices, or of what is none (`of`: `None`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch<'p> {
    /// Elements of the part.
    pub elems: Range<usize>,
    pub of: Option<&'p Matrices>,
}

impl Part {
    /// A tensor in `parts` equal parts of `elems` elements each.
    pub fn new(elems: u64, parts: u64, group: Option<Group>, matrices: Vec<Matrices>) -> Part {
        let mut part = Part { elems, group, matrices, others: 0 };
        let others = |place| {
            let of = part.stretches_from(place * elems);
            of.iter().filter(|s| s.of.is_none()).map(|s| s.elems.len() as u64).sum::<u64>()
        };
        part.others = (0..parts).map(others).max().unwrap_or(0);
        part
    }

    /// The stretches of the part that `rank` has, in order.
    pub fn stretches(&self, views: &[Mesh], rank: u32) -> Vec<Stretch<'_>> {
        let place = self.group.as_ref().map_or(0, |group| u64::from(group.place(views, rank)));
        self.stretches_from(place * self.elems)
    }

    fn stretches_from(&self, first: u64) -> Vec<Stretch<'_>> {
        let end = first + self.elems;
        let mut all = vec![];
        let mut at = first;
        let mut add = |from: u64, to: u64, of| {
            if from < to {
                all.push(Stretch { elems: (from - first) as usize..(to - first) as usize, of });
            }
        };
        for of in &self.matrices {
            let [from, to] = of.range().map(|x| x.clamp(first, end));
            add(at, from.max(at), None);
            add(from.max(at), to, Some(of));
            at = at.max(to);
        }
        add(at, end, None);
        all
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MuonKernel {
    /// m = momentum m + g of matrices, u = g + momentum m (Nesterov's), zeros where no matrix is. Reads g, m; writes m, u.
    Momentum { part: Part, momentum: f64 },
    /// X = M / (|M| + eps), matrix by matrix. Reads M; writes X.
    Normalise { of: Matrices },
    /// A = XXᵀ, or XᵀX where that is smaller. Reads X; writes A.
    Gram { of: Matrices },
    /// B = bA + cA². Reads A; writes B.
    Square { of: Matrices },
    /// Y = aX + BX, or aX + XB. Reads X, B; writes Y.
    Apply { of: Matrices },
    /// Matrices lose the share lr * decay of themselves and lr * 0.2 sqrt(longer side) of their orthogonal factors; the rest is
    /// updated by Adam. Reads g, o, w, m and, where not all is matrices, v; writes w, m, v, and where there is one more the weights
    /// cast.
    Update { part: Part, adam: Adam },
}

impl MuonKernel {
    pub fn name(&self) -> &'static str {
        match self {
            MuonKernel::Momentum { .. } => "muon_momentum",
            MuonKernel::Normalise { .. } => "muon_normalise",
            MuonKernel::Gram { .. } => "muon_gram",
            MuonKernel::Square { .. } => "muon_square",
            MuonKernel::Apply { .. } => "muon_apply",
            MuonKernel::Update { .. } => "muon_update",
        }
    }

    /// The curve of measured times that the kernel is on; products share the curves of products that every profile has.
    pub fn curve(&self) -> &'static str {
        match self {
            MuonKernel::Gram { of } if of.rows <= of.cols => "matmul_nt",
            MuonKernel::Gram { .. } => "matmul_tn_onto",
            MuonKernel::Square { .. } | MuonKernel::Apply { .. } => "matmul_nn",
            MuonKernel::Momentum { .. } | MuonKernel::Update { .. } => "adam",
            MuonKernel::Normalise { .. } => "add",
        }
    }

    /// Whether the kernel reads gradients, and not only what was made of them.
    pub fn reads_gradients(&self) -> bool {
        matches!(self, MuonKernel::Momentum { .. } | MuonKernel::Update { .. })
    }

    pub fn operands(&self) -> Operands {
        let of = |reads: &[u64], writes: &[u64]| Operands { reads: reads.to_vec(), writes: writes.to_vec() };
        match self {
            MuonKernel::Momentum { part, .. } => of(&[part.elems; 2], &[part.elems; 2]),
            MuonKernel::Normalise { of: m } => of(&[m.elems()], &[m.elems()]),
            MuonKernel::Gram { of: m } => of(&[m.elems()], &[m.gram_elems()]),
            MuonKernel::Square { of: m } => of(&[m.gram_elems()], &[m.gram_elems()]),
            MuonKernel::Apply { of: m } => of(&[m.elems(), m.gram_elems()], &[m.elems()]),
            // The cast copy is optional; `check` allows for it.
            MuonKernel::Update { part, .. } => {
                let mut reads = vec![part.elems; 4];
                let mut writes = vec![part.elems; 2];
                if part.others > 0 {
                    reads.push(part.others);
                    writes.push(part.others);
                }
                of(&reads, &writes)
            }
        }
    }

    /// The work, given the bytes of each operand.
    pub fn work(&self, reads: &[u64], writes: &[u64]) -> Work {
        let bytes = reads.iter().chain(writes).sum();
        let product = |of: &Matrices, [n, k]: [u64; 2], rows: u64| {
            let m = of.count * rows;
            let result = writes[0] / (m * n).max(1);
            let (groups, unaligned) = (of.count, false);
            let class = WorkClass::Gemm { m, n, k, cast: 0, result, groups, unaligned, of_weights: false };
            Work { flops: 2 * m * n * k, bytes, class }
        };
        match self {
            MuonKernel::Gram { of } => {
                let (short, long) = (of.rows.min(of.cols), of.rows.max(of.cols));
                product(of, [short, long], short)
            }
            MuonKernel::Square { of } => {
                let short = of.rows.min(of.cols);
                product(of, [short; 2], short)
            }
            MuonKernel::Apply { of } => product(of, [of.cols, of.rows.min(of.cols)], of.rows),
            MuonKernel::Momentum { .. } | MuonKernel::Normalise { .. } | MuonKernel::Update { .. } => {
                // The norm of a matrix is known only when all of it was read once.
                let again = if matches!(self, MuonKernel::Normalise { .. }) { reads[0] } else { 0 };
                Work { flops: 0, bytes: bytes + again, class: WorkClass::Memory }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(from: u64, rows: u64, cols: u64) -> Matrices {
        Matrices { from, count: 1, rows, cols, longer: rows.max(cols) }
    }

    /// A tensor of 4 numbers, a matrix of 6, 2 numbers and two matrices of 4, padded to 21: in three parts of 7.
    #[test]
    fn parts_know_what_is_a_matrix() {
        let pair = Matrices { count: 2, ..one(12, 2, 2) };
        let part = Part::new(7, 3, None, vec![one(4, 2, 3), pair]);
        let of = |first| {
            let all = part.stretches_from(first);
            all.into_iter().map(|s| (s.elems, s.of.map(|m| m.from))).collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(0..4, None), (4..7, Some(4))]);
        assert_eq!(of(7), [(0..3, Some(4)), (3..5, None), (5..7, Some(12))]);
        assert_eq!(of(14), [(0..6, Some(12)), (6..7, None)]);
        assert_eq!(part.others, 4);
    }

    /// Five steps of 4 s² l + 2 s³ each (arXiv:2502.16982 counts them so), whichever side is the short one.
    #[test]
    fn products_have_the_flops_of_newton_and_schulz() {
        for (rows, cols) in [(64, 160), (160, 64)] {
            let of = Matrices { count: 3, ..one(0, rows, cols) };
            let kernels = [MuonKernel::Gram { of }, MuonKernel::Square { of }, MuonKernel::Apply { of }];
            let flops: u64 = kernels
                .iter()
                .map(|kernel| {
                    let Operands { reads, writes } = kernel.operands();
                    kernel.work(&reads, &writes).flops
                })
                .sum();
            assert_eq!(flops, 3 * (4 * 64 * 64 * 160 + 2 * 64 * 64 * 64));
        }
    }
}
