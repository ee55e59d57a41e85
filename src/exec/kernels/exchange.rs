//! The local halves of an all-to-all between heads and sequence (DeepSpeed-Ulysses, arXiv:2309.14509).
//!
//! A packed buffer is [ranks][batch][seq][concatenated parts of one token]; a part is [tokens, lanes*heads*d]
//! with all heads of the tokens here, or with some heads of the tokens of every rank.

use super::Scalar;
use crate::plan::{Exchange, HeadPart};

/// The shape of one exchange.
pub struct Layout<'p> {
    ranks: usize,
    batch: usize,
    seq: usize,
    parts: &'p [HeadPart],
}

/// Elements that stay together: where they lie in a part and in the packed buffer.
struct Piece {
    part: usize,
    in_part: usize,
    packed: usize,
    len: usize,
    /// These elements of the part are already in an earlier rank's piece.
    again: bool,
}

impl<'p> Layout<'p> {
    pub fn new(ranks: u64, batch: u64, seq: u64, parts: &'p [HeadPart]) -> Layout<'p> {
        Layout { ranks: ranks as usize, batch: batch as usize, seq: seq as usize, parts }
    }

    pub fn permute<T: Scalar>(&self, exchange: Exchange, reads: &[&[T]], writes: &mut [&mut [T]]) {
        match exchange {
            Exchange::PackHeads => self.by_heads(|p| pack(&p, reads, writes)),
            Exchange::PackSeq => self.by_tokens(|p| pack(&p, reads, writes)),
            Exchange::UnpackSeq => self.by_tokens(|p| unpack(&p, reads, writes)),
            Exchange::UnpackHeads => self.by_heads(|p| unpack(&p, reads, writes)),
        }
    }

    /// The local rows of each rank, sequence and token in the packed buffer, as (rank, seq, token, part, start).
    fn rows(&self, mut f: impl FnMut([usize; 3], usize, usize)) {
        let mut packed = 0;
        for at in 0..self.ranks * self.batch * self.seq {
            let place = [at / self.seq / self.batch, at / self.seq % self.batch, at % self.seq];
            for (part, shape) in self.parts.iter().enumerate() {
                f(place, part, packed);
                packed += shape.local_row(self.ranks as u64) as usize;
            }
        }
    }

    /// Parts that hold all heads of the tokens here: a rank's piece is some heads of each lane.
    fn by_heads(&self, mut f: impl FnMut(Piece)) {
        self.rows(|[rank, b, token], part, packed| {
            let shape = self.parts[part];
            let [lanes, heads, head_dim] = [shape.lanes, shape.heads, shape.head_dim].map(|x| x as usize);
            let len = shape.local_heads(self.ranks as u64) as usize * head_dim;
            let (first, again) = self.first_head(rank, heads);
            for lane in 0..lanes {
                let in_part = (((b * self.seq + token) * lanes + lane) * heads + first) * head_dim;
                f(Piece { part, in_part, packed: packed + lane * len, len, again });
            }
        });
    }

    /// Parts that hold some heads of the tokens of every rank, in rank order within a sequence.
    fn by_tokens(&self, mut f: impl FnMut(Piece)) {
        self.rows(|[rank, b, token], part, packed| {
            let len = self.parts[part].local_row(self.ranks as u64) as usize;
            let in_part = ((b * self.ranks + rank) * self.seq + token) * len;
            f(Piece { part, in_part, packed, len, again: false });
        });
    }

    /// The first head that `rank` holds, and whether an earlier rank holds it too.
    fn first_head(&self, rank: usize, heads: usize) -> (usize, bool) {
        if heads >= self.ranks {
            return (rank * (heads / self.ranks), false);
        }
        let copies = self.ranks / heads;
        (rank / copies, !rank.is_multiple_of(copies))
    }
}

// Packed buffers, if there are several, are equally long and follow each other.

fn pack<T: Scalar>(p: &Piece, parts: &[&[T]], packed: &mut [&mut [T]]) {
    let each = packed[0].len();
    packed[p.packed / each][p.packed % each..][..p.len].copy_from_slice(&parts[p.part][p.in_part..][..p.len]);
}

fn unpack<T: Scalar>(p: &Piece, packed: &[&[T]], parts: &mut [&mut [T]]) {
    let each = packed[0].len();
    let from = &packed[p.packed / each][p.packed % each..][..p.len];
    let to = &mut parts[p.part][p.in_part..][..p.len];
    if p.again {
        to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
    } else {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use crate::plan::{Kernel, Packing};

    const BATCH: usize = 2;
    const SEQ: usize = 3;

    fn permute(exchange: Exchange, ranks: usize, parts: &[HeadPart], reads: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let local = BATCH * SEQ;
        let size = |p: &HeadPart| match exchange {
            Exchange::UnpackSeq => ranks * local * p.local_row(ranks as u64) as usize,
            _ => local * (p.lanes * p.heads * p.head_dim) as usize,
        };
        let packed = parts.iter().map(|p| ranks * local * p.local_row(ranks as u64) as usize).sum();
        let mut writes: Vec<Vec<f64>> = match exchange {
            Exchange::PackHeads | Exchange::PackSeq => vec![vec![f64::NAN; packed]],
            _ => parts.iter().map(|p| vec![f64::NAN; size(p)]).collect(),
        };
        let (r, b, s) = (ranks as u64, BATCH as u64, SEQ as u64);
        let packing = Packing::Together;
        let kernel = Kernel::Permute { exchange, packing, ranks: r, batch: b, seq: s, parts: parts.to_vec() };
        let reads: Vec<Option<&[f64]>> = reads.iter().map(|x| Some(&x[..])).collect();
        let mut views: Vec<&mut [f64]> = writes.iter_mut().map(|x| &mut x[..]).collect();
        launch(&kernel, &reads, &mut views);
        writes
    }

    /// Rank i's receive buffer is the i-th block of every send buffer, in rank order.
    fn all_to_all(sends: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let block = sends[0].len() / sends.len();
        let block_of = |send: &Vec<f64>, i: usize| send[i * block..(i + 1) * block].to_vec();
        (0..sends.len()).map(|i| sends.iter().flat_map(|send| block_of(send, i)).collect()).collect()
    }

    /// `parts` of every rank, all heads of its own tokens -> some heads of all tokens.
    fn to_heads(ranks: usize, parts: &[HeadPart], x: &[Vec<Vec<f64>>]) -> Vec<Vec<Vec<f64>>> {
        let sends: Vec<_> = x.iter().map(|x| permute(Exchange::PackHeads, ranks, parts, x).remove(0)).collect();
        let received = all_to_all(&sends);
        received.into_iter().map(|r| permute(Exchange::UnpackSeq, ranks, parts, &[r])).collect()
    }

    fn to_tokens(ranks: usize, parts: &[HeadPart], x: &[Vec<Vec<f64>>]) -> Vec<Vec<Vec<f64>>> {
        let sends: Vec<_> = x.iter().map(|x| permute(Exchange::PackSeq, ranks, parts, x).remove(0)).collect();
        let received = all_to_all(&sends);
        received.into_iter().map(|r| permute(Exchange::UnpackHeads, ranks, parts, &[r])).collect()
    }

    /// Each element says where it comes from: token, lane, head, element.
    fn labelled(rank: usize, part: &HeadPart) -> Vec<f64> {
        let row = (part.lanes * part.heads * part.head_dim) as usize;
        let token = |at: usize| (at / row / SEQ, rank * SEQ + at / row % SEQ);
        (0..BATCH * SEQ * row).map(|at| (token(at).0 * 100 + token(at).1) as f64 * 1000.0 + (at % row) as f64).collect()
    }

    /// Q with 8 heads, K and V with 2: more ranks than KV heads from 4 on.
    const PARTS: [HeadPart; 2] =
        [HeadPart { lanes: 1, heads: 8, head_dim: 3 }, HeadPart { lanes: 2, heads: 2, head_dim: 3 }];

    fn inputs(ranks: usize) -> Vec<Vec<Vec<f64>>> {
        (0..ranks).map(|rank| PARTS.iter().map(|part| labelled(rank, part)).collect()).collect()
    }

    #[test]
    fn each_rank_gets_its_heads_of_every_token() {
        for ranks in [1, 2, 4, 8] {
            let got = to_heads(ranks, &PARTS, &inputs(ranks));
            for (rank, (part, shape)) in (0..ranks).flat_map(|r| PARTS.iter().enumerate().map(move |p| (r, p))) {
                let (heads, local) = (shape.heads as usize, shape.local_heads(ranks as u64) as usize);
                let first = rank * heads / ranks;
                let mut want = Vec::new();
                for token in (0..BATCH).flat_map(|b| (0..ranks * SEQ).map(move |t| b * 100 + t)) {
                    for (lane, head) in (0..shape.lanes as usize).flat_map(|l| (0..local).map(move |h| (l, first + h)))
                    {
                        want.extend((0..3).map(|i| (token * 1000 + (lane * heads + head) * 3 + i) as f64));
                    }
                }
                assert_eq!(got[rank][part], want, "rank {rank} of {ranks}, part {part}");
            }
        }
    }

    #[test]
    fn there_and_back_is_the_identity_times_the_copies() {
        for ranks in [1, 2, 4, 8] {
            let x = inputs(ranks);
            let back = to_tokens(ranks, &PARTS, &to_heads(ranks, &PARTS, &x));
            for (x, back) in x.iter().zip(&back) {
                assert_eq!(x[0], back[0]);
                let copies = (ranks / 2).max(1) as f64;
                let times: Vec<f64> = x[1].iter().map(|x| x * copies).collect();
                assert_eq!(times, back[1], "the gradient of a copy is a sum");
            }
        }
    }

    #[test]
    fn the_way_back_is_the_transpose_of_the_way_there() {
        for ranks in [2, 8] {
            let draw = |sizes: Vec<Vec<usize>>, seed: u64| -> Vec<Vec<Vec<f64>>> {
                let of = |r: usize, s: &Vec<usize>| {
                    s.iter().enumerate().map(|(p, &n)| random(n, seed + (2 * r + p) as u64)).collect()
                };
                sizes.iter().enumerate().map(|(r, s)| of(r, s)).collect()
            };
            let sizes = |x: &[Vec<Vec<f64>>]| x.iter().map(|x| x.iter().map(Vec::len).collect()).collect();
            let x = draw(sizes(&inputs(ranks)), 1);
            let ax = to_heads(ranks, &PARTS, &x);
            let y = draw(sizes(&ax), 1000);
            let aty = to_tokens(ranks, &PARTS, &y);
            let inner = |x: &[Vec<Vec<f64>>], y: &[Vec<Vec<f64>>]| dot(&x.concat().concat(), &y.concat().concat());
            assert_close(&[inner(&ax, &y)], &[inner(&x, &aty)], 1e-12);
        }
    }
}
