//! The local halves of an all-to-all between heads and sequence (DeepSpeed-Ulysses, arXiv:2309.14509).
//!
//! A packed buffer is [ranks][batch][seq][concatenated parts of one token]; a part is [tokens, lanes*heads*d]
//! with all heads of the tokens here, or with some heads of the tokens of every rank. Parts that are joined are columns
//! of one operand.

use super::Scalar;
use crate::plan::{Exchange, HeadPart, HeadPermute, Mesh, Packing};
use rustc_hash::FxHashMap;

/// The shape of one exchange.
pub struct Layout<'p> {
    exchange: Exchange,
    packing: Packing,
    ranks: usize,
    batch: usize,
    seq: usize,
    parts: &'p [HeadPart],
    /// The columns of each part in its operand: where all heads are, and where all tokens are.
    columns: [Vec<Columns>; 2],
    /// Where in its sequence each token of every rank stands, rank after rank; `None`: tokens stand in the order of the
    /// ranks.
    places: Option<Vec<u64>>,
}

/// One lane of one token that goes to one rank.
#[derive(Clone, Copy)]
struct Row {
    rank: usize,
    batch: usize,
    token: usize,
    part: usize,
    lane: usize,
    /// Packed buffer, and where the row begins in it.
    buffer: usize,
    packed: usize,
}

/// Elements that stay together: where they lie in an operand, if they do, and in a packed buffer.
struct Piece {
    operand: usize,
    at: Option<usize>,
    buffer: usize,
    packed: usize,
    len: usize,
    /// Whether these elements of the operand are already in an earlier rank's piece.
    again: bool,
}

/// A part as columns of an operand.
#[derive(Clone, Copy)]
struct Columns {
    operand: usize,
    first: usize,
    /// Elements of a row.
    stride: usize,
}

impl Columns {
    /// The columns of parts, each with its width in elements: all of one operand if they are joined.
    fn of(wide: impl Iterator<Item = u64>, joined: bool) -> Vec<Columns> {
        let wide: Vec<usize> = wide.map(|elems| elems as usize).collect();
        let part = |i: usize| match joined {
            true => Columns { operand: 0, first: wide[..i].iter().sum(), stride: wide.iter().sum() },
            false => Columns { operand: i, first: 0, stride: wide[i] },
        };
        (0..wide.len()).map(part).collect()
    }

    fn at(&self, row: usize) -> usize {
        row * self.stride + self.first
    }
}

/// A run of elements on its way between operands.
pub struct Moved {
    pub read: usize,
    /// The element that the run begins at; `None`: the run is zeros.
    pub from: Option<usize>,
    pub write: usize,
    pub to: usize,
    pub len: usize,
    /// How many runs come to this place before this one; 0: it is copied there, else added to what they left.
    pub turn: usize,
}

impl<'p> Layout<'p> {
    pub fn new(permute: &'p HeadPermute, views: &[Mesh], rank: u32) -> Layout<'p> {
        let HeadPermute { exchange, packing, ranks, batch, seq, parts, joined, .. } = permute;
        let outside = Columns::of(parts.iter().map(HeadPart::row), *joined);
        let inside = Columns::of(parts.iter().map(|part| part.local_row(*ranks)), *joined);
        let [ranks, batch, seq] = [ranks, batch, seq].map(|x| *x as usize);
        let (exchange, packing, columns) = (*exchange, *packing, [outside, inside]);
        Layout { exchange, packing, ranks, batch, seq, parts, columns, places: permute.places(views, rank) }
    }

    pub fn permute<T: Scalar>(&self, reads: &[&[T]], writes: &mut [&mut [T]]) {
        match self.exchange {
            Exchange::PackHeads => self.by_heads(|p| pack(&p, reads, writes)),
            Exchange::PackSeq => self.by_tokens(|p| pack(&p, reads, writes)),
            Exchange::UnpackSeq => self.by_tokens(|p| unpack(&p, reads, writes)),
            Exchange::UnpackHeads => self.by_heads(|p| unpack(&p, reads, writes)),
        }
    }

    /// Where every run of elements goes, for whoever moves them by a list.
    pub fn moves(&self) -> Vec<Moved> {
        let by_heads = matches!(self.exchange, Exchange::PackHeads | Exchange::UnpackHeads);
        let packs = matches!(self.exchange, Exchange::PackHeads | Exchange::PackSeq);
        let mut out: Vec<Moved> = vec![];
        let mut copies: FxHashMap<(usize, usize), usize> = FxHashMap::default();
        let mut take = |p: Piece| {
            if packs {
                let (read, from, write, to) = (p.operand, p.at, p.buffer, p.packed);
                out.push(Moved { read, from, write, to, len: p.len, turn: 0 });
            } else if let Some(to) = p.at {
                let turn = copies.entry((p.operand, to)).or_default();
                out.push(Moved { read: p.buffer, from: Some(p.packed), write: p.operand, to, len: p.len, turn: *turn });
                *turn += 1;
            }
        };
        if by_heads {
            self.by_heads(&mut take)
        } else {
            self.by_tokens(&mut take)
        }
        out
    }

    /// The rows of each rank, sequence, token, part and lane, as the packed buffers have them.
    fn rows(&self, mut f: impl FnMut(Row)) {
        let lanes = self.parts.iter().enumerate().flat_map(|(i, p)| (0..p.lanes as usize).map(move |lane| (i, lane)));
        let lanes: Vec<_> = lanes.collect();
        let mut ends = vec![0; self.ranks.max(lanes.len())];
        for at in 0..self.ranks * self.batch * self.seq {
            let [rank, batch, token] = [at / self.seq / self.batch, at / self.seq % self.batch, at % self.seq];
            for (i, &(part, lane)) in lanes.iter().enumerate() {
                let buffer = match self.packing {
                    Packing::Together => 0,
                    Packing::ByRank => rank,
                    Packing::ByLane => i,
                };
                f(Row { rank, batch, token, part, lane, buffer, packed: ends[buffer] });
                ends[buffer] += self.parts[part].local_lane(self.ranks as u64, lane as u64) as usize;
            }
        }
    }

    /// Parts that hold all heads of the tokens here: a rank's piece is some heads of each lane.
    fn by_heads(&self, mut f: impl FnMut(Piece)) {
        self.rows(|row| {
            let shape = &self.parts[row.part];
            let (head_dim, before) = (shape.dim_of(row.lane as u64) as usize, shape.dims_before(row.lane as u64));
            let local = shape.local_heads(self.ranks as u64) as usize;
            let (first, again) = self.first_head(row.rank, shape.all_heads() as usize);
            let columns = self.columns[0][row.part];
            let start = columns.at(row.batch * self.seq + row.token) + (shape.heads * before) as usize;
            // Heads stay together unless some of them are zeros.
            let run = if shape.pad.is_some() { 1 } else { local };
            for at in (0..local).step_by(run) {
                let held = shape.held((first + at) as u64).map(|head| start + head as usize * head_dim);
                let (packed, len) = (row.packed + at * head_dim, run * head_dim);
                f(Piece { operand: columns.operand, at: held, buffer: row.buffer, packed, len, again });
            }
        });
    }

    /// Parts that hold some heads of the tokens of every rank.
    fn by_tokens(&self, mut f: impl FnMut(Piece)) {
        self.rows(|row| {
            let shape = &self.parts[row.part];
            let (ranks, lane) = (self.ranks as u64, row.lane as u64);
            let len = shape.local_lane(ranks, lane) as usize;
            let among = row.rank * self.seq + row.token;
            let place = self.places.as_ref().map_or(among, |places| places[among] as usize);
            let before = shape.local_heads(ranks) * shape.dims_before(lane);
            let columns = self.columns[1][row.part];
            let at = columns.at(row.batch * self.ranks * self.seq + place) + before as usize;
            f(Piece {
                operand: columns.operand,
                at: Some(at),
                buffer: row.buffer,
                packed: row.packed,
                len,
                again: false,
            });
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

fn pack<T: Scalar>(p: &Piece, operands: &[&[T]], packed: &mut [&mut [T]]) {
    let to = &mut packed[p.buffer][p.packed..][..p.len];
    match p.at {
        Some(at) => to.copy_from_slice(&operands[p.operand][at..][..p.len]),
        None => to.fill(T::zero()),
    }
}

fn unpack<T: Scalar>(p: &Piece, packed: &[&[T]], operands: &mut [&mut [T]]) {
    let Some(at) = p.at else { return };
    let (from, to) = (&packed[p.buffer][p.packed..][..p.len], &mut operands[p.operand][at..][..p.len]);
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
    use crate::plan::{HeadPad, Kernel};

    const BATCH: usize = 2;
    const SEQ: usize = 3;

    fn permute(exchange: Exchange, ranks: usize, parts: &[HeadPart], reads: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (r, b, s) = (ranks as u64, BATCH as u64, SEQ as u64);
        let packing = Packing::Together;
        into_nan(&Kernel::Permute(HeadPermute::new(exchange, packing, [r, b, s], parts.to_vec())), reads)
    }

    /// Runs a kernel into buffers of NaN.
    fn into_nan(kernel: &Kernel, reads: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut writes: Vec<_> = kernel.operands(&ring(1)).writes.iter().map(|&n| vec![f64::NAN; n as usize]).collect();
        let reads: Vec<Option<&[f64]>> = reads.iter().map(|x| Some(&x[..])).collect();
        let mut views: Vec<&mut [f64]> = writes.iter_mut().map(|x| &mut x[..]).collect();
        launch(kernel, &reads, &mut views);
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
        let row = part.row() as usize;
        let token = |at: usize| (at / row / SEQ, rank * SEQ + at / row % SEQ);
        (0..BATCH * SEQ * row).map(|at| (token(at).0 * 100 + token(at).1) as f64 * 1000.0 + (at % row) as f64).collect()
    }

    /// Q with 8 heads, K and V with 2: more ranks than KV heads from 4 on.
    const PARTS: [HeadPart; 2] = [HeadPart::new(1, 8, 3), HeadPart::new(2, 2, 3)];

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

    #[test]
    fn heads_of_zeros_go_there_and_nowhere_back() {
        // Two groups of three query heads become groups of four; five KV heads become eight.
        let pad = |group, to_group, to_heads| Some(HeadPad { group, to_group, to_heads });
        let parts = [
            HeadPart { pad: pad(3, 4, 8), ..HeadPart::new(1, 6, 3) },
            HeadPart { pad: pad(1, 1, 8), ..HeadPart::new(2, 5, 3) },
        ];
        let x: Vec<Vec<Vec<f64>>> = (0..4).map(|rank| parts.iter().map(|p| labelled(rank, p)).collect()).collect();
        let there = to_heads(4, &parts, &x);
        // Rank 1 has query heads 2 and none, then the second group begins: a row is 2 heads of 3.
        assert_eq!(there[1][0][..6], [x[0][0][6], x[0][0][7], x[0][0][8], 0.0, 0.0, 0.0]);
        assert_eq!(there[2][0][..3], x[0][0][9..12]);
        assert_eq!(to_tokens(4, &parts, &there), x);
    }

    #[test]
    fn packed_apart_is_packed_together_cut() {
        let x = inputs(4).remove(0);
        let pack = |packing| {
            let shape = [2, BATCH as u64, SEQ as u64];
            let of = |exchange| Kernel::Permute(HeadPermute::new(exchange, packing, shape, PARTS.to_vec()));
            let packed = into_nan(&of(Exchange::PackHeads), &x);
            assert_eq!(into_nan(&of(Exchange::UnpackHeads), &packed), x, "{packing:?}");
            packed
        };
        let whole = pack(Packing::Together).remove(0);
        assert_eq!(pack(Packing::ByRank).concat(), whole);
        // A row: four query heads, a head of K, a head of V.
        let lanes = [0..12, 12..15, 15..18];
        let lane =
            |lane: &std::ops::Range<usize>| whole.chunks(18).flat_map(|row| row[lane.clone()].to_vec()).collect();
        assert_eq!(pack(Packing::ByLane), lanes.iter().map(lane).collect::<Vec<Vec<f64>>>());
    }

    /// Parts that are columns of one operand, and all tokens in the order of a zigzag sequence.
    #[test]
    fn columns_of_one_operand_travel_as_operands_do_and_tokens_find_their_places() {
        use crate::plan::{Axis, Segs, Split};
        let (views, ranks) = (ring(2), 2);
        let segs = Segs::new(8, &[(Axis::Cp, Split::Zigzag)]);
        let shape = [ranks, 1, 4];
        let apart = |exchange| HeadPermute::new(exchange, Packing::Together, shape, PARTS.to_vec());
        let join = |parts: &[Vec<f64>], wide: [usize; 2]| -> Vec<f64> {
            let rows = parts[0].chunks(wide[0]).zip(parts[1].chunks(wide[1]));
            rows.flat_map(|(a, b)| [a, b].concat()).collect()
        };
        let run = |permute: HeadPermute, rank: u32, reads: &[Vec<f64>]| {
            let kernel = Kernel::Permute(permute);
            let mut writes: Vec<_> =
                kernel.operands(&views).writes.iter().map(|&n| vec![f64::NAN; n as usize]).collect();
            let reads: Vec<Option<&[f64]>> = reads.iter().map(|x| Some(&x[..])).collect();
            let mut to: Vec<&mut [f64]> = writes.iter_mut().map(|x| &mut x[..]).collect();
            crate::exec::kernels::run(&kernel, &views, rank, 1, &reads, &mut to);
            writes
        };
        // Rank 0 has positions 0, 1, 6 and 7, and says so.
        let x: Vec<Vec<Vec<f64>>> = (0..2)
            .map(|rank| {
                let at = segs.positions(&views, rank);
                let part = |p: &HeadPart| at.iter().flat_map(|&t| vec![t as f64; p.row() as usize]).collect();
                PARTS.iter().map(part).collect()
            })
            .collect();
        let wide = [24, 12];
        let sends: Vec<Vec<f64>> =
            (0..2).map(|r| run(apart(Exchange::PackHeads), r, &x[r as usize]).remove(0)).collect();
        let joined = HeadPermute { joined: true, ..apart(Exchange::PackHeads) };
        assert_eq!(run(joined, 1, &[join(&x[1], wide)])[0], sends[1]);
        let received = all_to_all(&sends);
        for rank in 0..2 {
            let ordered = HeadPermute { order: Some(segs.clone()), ..apart(Exchange::UnpackSeq) };
            let there = run(ordered.clone(), rank, &received[rank as usize..][..1]);
            let rows: Vec<f64> = there[0].chunks(12).map(|row| row[0]).collect();
            assert_eq!(rows, (0..8).map(f64::from).collect::<Vec<f64>>());
            let one = HeadPermute { joined: true, ..ordered.clone() };
            assert_eq!(run(one, rank, &received[rank as usize..][..1])[0], join(&there, [12, 6]));
            let back = HeadPermute { exchange: Exchange::PackSeq, ..ordered };
            assert_eq!(run(back, rank, &there)[0], received[rank as usize]);
        }
    }
}
