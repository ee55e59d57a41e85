//! Rows that an all-gather brought rank after rank, and the order of the sequence.
//!
//! Shapes: gathered [rank][batch][len][cols], in sequence order [batch][position][cols].

use super::Scalar;
use super::exchange::Moved;
use crate::plan::{Mesh, Segs, Span};

/// Elements that stay together: where they lie in either order.
struct Piece {
    gathered: usize,
    ordered: usize,
    len: usize,
}

pub struct Pieces(Vec<Piece>);

impl Pieces {
    /// The pieces of every rank along the axis of `segs`, which are those of `rank`.
    pub fn new(segs: &Segs, views: &[Mesh], rank: u32, batch: usize, cols: usize) -> Pieces {
        let (mesh, axis) = (&views[segs.view as usize], segs.order[0].0);
        let here = mesh.coord(rank, axis) as i32;
        let ranges: Vec<_> = (0..mesh.degree(axis) as i32)
            .map(|at| segs.shifted(axis, at - here).spans(views, rank))
            .flat_map(|held| std::iter::repeat_n(held, batch).enumerate())
            .flat_map(|(b, held)| held.into_iter().flat_map(Span::runs).map(move |range| (b, range)))
            .collect();
        let mut gathered = 0;
        let piece = |(b, range): (usize, std::ops::Range<u64>)| {
            let len = (range.end - range.start) as usize * cols;
            gathered += len;
            Piece { gathered: gathered - len, ordered: (b * segs.seq as usize + range.start as usize) * cols, len }
        };
        Pieces(ranges.into_iter().map(piece).collect())
    }

    /// The pieces as a list of moves, from gathered to in order; with `inverse` from in order to gathered.
    pub fn moves(&self, inverse: bool) -> Vec<Moved> {
        let moved = |p: &Piece| {
            let (from, to) = if inverse { (p.ordered, p.gathered) } else { (p.gathered, p.ordered) };
            Moved { read: 0, from: Some(from), write: 0, to, len: p.len, turn: 0 }
        };
        self.0.iter().map(moved).collect()
    }

    /// Puts gathered rows in order.
    pub fn join<T: Scalar>(&self, from: &[T], to: &mut [T]) {
        for p in &self.0 {
            to[p.ordered..][..p.len].copy_from_slice(&from[p.gathered..][..p.len]);
        }
    }

    /// Puts rows in order back as they were gathered.
    pub fn cut<T: Scalar>(&self, from: &[T], to: &mut [T]) {
        for p in &self.0 {
            to[p.gathered..][..p.len].copy_from_slice(&from[p.ordered..][..p.len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::exec::kernels::run;
    use crate::plan::Kernel;

    fn reorder(rank: u32, inverse: bool, x: &[f64]) -> Vec<f64> {
        let mut y = vec![f64::NAN; x.len()];
        let kernel = Kernel::Reorder { segs: zigzag(8), batch: 2, cols: 1, inverse };
        run(&kernel, &ring(2), rank, 1, &[Some(x)], &mut [&mut y]);
        y
    }

    #[test]
    fn gathered_zigzag_pieces_become_the_sequence_and_back() {
        // Rank 0 holds positions 0, 1, 6, 7 of either sequence, rank 1 the middle; sequence 1 counts from 10.
        let gathered = [0, 1, 6, 7, 10, 11, 16, 17, 2, 3, 4, 5, 12, 13, 14, 15].map(f64::from);
        let ordered: Vec<f64> = (0..8).chain(10..18).map(f64::from).collect();
        for rank in 0..2 {
            assert_eq!(reorder(rank, false, &gathered), ordered, "whoever gathers");
            assert_eq!(reorder(rank, true, &ordered), gathered);
        }
    }
}
