//! Latent attention to the keys that an indexer chooses, by definition: one query after the other.
//!
//! Legend: as in [`SparseKernel`].

use super::gemm::{window, window_mut};
use super::{Scalar, fp8, outputs, turned};
use crate::plan::sparse::{Chosen, Half, HeadProduct, Indexer, Product, SparseKernel, Turn};
use crate::plan::{AttnBlock, Mesh};
use crate::spec::Turning;
use ndarray::linalg::general_mat_mul;

pub fn run<T: Scalar>(
    kernel: &SparseKernel,
    views: &[Mesh],
    rank: u32,
    reads: &[Option<&[T]>],
    writes: &mut [&mut [T]],
) {
    let read = |i: usize| reads[i].unwrap_or_else(|| panic!("{}: operand {i} cannot be a result", kernel.name()));
    match kernel {
        SparseKernel::Turn { turn, backward } => {
            let [x] = outputs(writes);
            if let Some(given) = reads[0] {
                x.copy_from_slice(given);
            }
            Turns::new(turn, views, rank).turn(x, *backward);
        }
        SparseKernel::Join { turn, backward: false } => {
            let [joined] = outputs(writes);
            let (before, rope) = (turn.before as usize, turn.rope as usize);
            let rows = read(0).chunks_exact(before).zip(read(1).chunks_exact(rope));
            for (to, (latent, k)) in joined.chunks_exact_mut(before + rope).zip(rows) {
                to[..before].copy_from_slice(latent);
                to[before..].copy_from_slice(k);
            }
            Turns::new(turn, views, rank).turn(joined, false);
        }
        SparseKernel::Join { turn, backward: true } => {
            let [d_latent, d_k] = outputs(writes);
            let (before, rope) = (turn.before as usize, turn.rope as usize);
            let mut joined = read(0).to_vec();
            Turns::new(turn, views, rank).turn(&mut joined, true);
            let rows = d_latent.chunks_exact_mut(before).zip(d_k.chunks_exact_mut(rope));
            for (from, (latent, k)) in joined.chunks_exact(before + rope).zip(rows) {
                latent.copy_from_slice(&from[..before]);
                k.copy_from_slice(&from[before..]);
            }
        }
        SparseKernel::Product(product) => {
            let [y] = outputs(writes);
            head_product(product, reads, y);
        }
        SparseKernel::Score(of) => {
            let [chosen] = outputs(writes);
            score(of, views, rank, [0, 1, 2].map(read), chosen);
        }
        SparseKernel::ScoreBwd { of, part } => {
            let [dq, dk, dw] = outputs(writes);
            score_backward(of, *part, views, [0, 1, 2, 3, 4].map(read), [dq, dk, dw]);
        }
        SparseKernel::Attend(of) => {
            let [o, lse] = outputs(writes);
            attend(of, views, [0, 1, 2].map(read), o, lse);
        }
        SparseKernel::AttendBwd(of) => {
            let [dq, dk, p] = outputs(writes);
            attend_backward(of, views, [0, 1, 2, 3, 4, 5].map(read), [dq, dk, p]);
        }
    }
}

/// (cos, sin) of every position and pair.
struct Turns<'k, T> {
    of: &'k Turn,
    turns: Vec<(T, T)>,
}

impl<'k, T: Scalar> Turns<'k, T> {
    fn new(of: &'k Turn, views: &[Mesh], rank: u32) -> Turns<'k, T> {
        let turning = Turning::new(of.theta, of.scaling.as_ref(), of.rope, of.documents.longest(of.segs.seq));
        let turn = |angle: f64| (T::from_f64(turning.factor * angle.cos()), T::from_f64(turning.factor * angle.sin()));
        let positions = turned(&of.segs, &of.documents, views, rank);
        let turns = positions.iter().flat_map(|&p| turning.speeds.iter().map(move |s| turn(p as f64 * s))).collect();
        Turns { of, turns }
    }

    /// Rows of heads, in place.
    fn turn(&self, x: &mut [T], back: bool) {
        let of = self.of;
        let [heads, before, rope, behind] = [of.heads, of.before, of.rope, of.behind].map(|n| n as usize);
        let (half, width) = (rope / 2, before + rope + behind);
        for (row, x) in x.chunks_exact_mut(heads * width).enumerate() {
            let turns = &self.turns[row * half % self.turns.len().max(1)..][..half];
            for head in x.chunks_exact_mut(width) {
                let part = &mut head[before..before + rope];
                for (i, &(cos, sin)) in turns.iter().enumerate() {
                    let [a, b] = if of.interleaved { [2 * i, 2 * i + 1] } else { [i, half + i] };
                    let (sin, [x, y]) = (if back { -sin } else { sin }, [part[a], part[b]]);
                    (part[a], part[b]) = (x * cos - y * sin, y * cos + x * sin);
                }
            }
        }
    }
}

/// A product of each head; what turns goes through.
fn head_product<T: Scalar>(of: &HeadProduct, reads: &[Option<&[T]>], y: &mut [T]) {
    let [rows, heads, lora, nope, rope, v] = [of.rows, of.heads, of.lora, of.nope, of.rope, of.v].map(|n| n as usize);
    let (narrow, rope, first) = match of.half {
        Half::Key => (nope, rope, 0),
        Half::Value => (v, 0, nope),
    };
    let (slim, wide) = (narrow + rope, lora + rope);
    let read = |i: usize| reads[i].expect("no product reads its result, but sums");
    let matrix = |head: usize| (head * (nope + v) + first) * lora;
    for head in 0..heads {
        let slim_at = |x| window(x, head * slim, (rows, narrow), heads * slim);
        let wide_at = |x| window(x, head * wide, (rows, lora), heads * wide);
        if of.product == Product::Dw {
            let mut dw = window_mut(y, matrix(head), (narrow, lora), lora);
            general_mat_mul(T::one(), &slim_at(read(0)).t(), &wide_at(read(1)), T::one(), &mut dw);
            continue;
        }
        let w = window(read(1), matrix(head), (narrow, lora), lora);
        let widens = (of.half == Half::Key) == (of.product == Product::Forward);
        let (from, to) = if widens { (slim, wide) } else { (wide, slim) };
        if widens {
            let mut y = window_mut(y, head * wide, (rows, lora), heads * wide);
            general_mat_mul(T::one(), &slim_at(read(0)), &w, T::zero(), &mut y);
        } else {
            let mut y = window_mut(y, head * slim, (rows, narrow), heads * slim);
            general_mat_mul(T::one(), &wide_at(read(0)), &w.t(), T::zero(), &mut y);
        }
        for row in 0..rows {
            let [from, to] = [from, to].map(|width| (row * heads + head) * width + width - rope);
            y[to..to + rope].copy_from_slice(&read(0)[from..from + rope]);
        }
    }
}

/// A query: its row, its sequence, and the keys that it may see, by their rows in the sequence.
struct Query {
    row: usize,
    seq: usize,
    seen: std::ops::Range<usize>,
}

fn queries(block: &AttnBlock, views: &[Mesh], rank: u32) -> Vec<Query> {
    let (positions, spans) = (block.q.positions(views, rank), block.kv.spans(views, rank));
    // Keys are those of the whole sequence, in its order.
    let [keys] = &spans[..] else { panic!("keys that are chosen are those of the whole sequence") };
    let one = |seq: usize, i: usize, at: u64| {
        let seen = block.mask.seen(at, keys);
        Query { row: seq * positions.len() + i, seq, seen: seen.start as usize..seen.end as usize }
    };
    let of = |seq: usize| positions.iter().enumerate().map(move |(i, &at)| one(seq, i, at));
    (0..block.batch as usize).flat_map(of).collect()
}

fn dot<T: Scalar>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).map(|(&a, &b)| a * b).sum()
}

fn add<T: Scalar>(to: &mut [T], by: T, x: &[T]) {
    to.iter_mut().zip(x).for_each(|(to, &x)| *to += by * x);
}

/// The score of a query, [i*di] and weights [i], and a key.
fn score_of<T: Scalar>(q: &[T], w: &[T], k: &[T], scale: T) -> T {
    let heads = q.chunks_exact(k.len()).zip(w);
    heads.map(|(q, &w)| w * scale * relu(dot(q, k))).sum()
}

fn relu<T: Scalar>(x: T) -> T {
    if x > T::zero() { x } else { T::zero() }
}

fn score<T: Scalar>(of: &Indexer, views: &[Mesh], rank: u32, [q, k, w]: [&[T]; 3], chosen: &mut [T]) {
    let (heads, d, top_k) = (of.block.heads as usize, of.block.head_dim as usize, of.top_k as usize);
    let len = of.block.kv.len(views) as usize;
    let round = |x: &[T]| if of.fp8 { fp8::rounded(x, [x.len() / d, d], (d, 1)) } else { x.to_vec() };
    let (q, k, scale) = (round(q), round(k), T::from_f64(of.scale()));
    for Query { row, seq, seen } in queries(&of.block, views, rank) {
        let (q, w) = (&q[row * heads * d..][..heads * d], &w[row * heads..][..heads]);
        let mut scores: Vec<(usize, T)> =
            seen.map(|s| (s, score_of(q, w, &k[(seq * len + s) * d..][..d], scale))).collect();
        // The sort is stable: of equals the earlier key comes first.
        scores.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal));
        let mut places: Vec<usize> = scores.iter().take(top_k).map(|(s, _)| *s).collect();
        places.sort_unstable();
        let to = &mut chosen[row * top_k..][..top_k];
        to.fill(T::from_f64(len as f64));
        to.iter_mut().zip(places).for_each(|(to, place)| *to = T::from_f64(place as f64));
    }
}

/// The rows of keys that a query sees, in all sequences.
fn rows_of<T: Scalar>(chosen: &[T], seq: usize, len: usize) -> Vec<usize> {
    chosen.iter().map(|at| at.to_index()).filter(|at| *at < len).map(|at| seq * len + at).collect()
}

fn softmax<T: Scalar>(scores: &mut [T]) {
    let top = scores.iter().fold(T::NEG_INFINITY, |top, &x| top.larger(x));
    scores.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum: T = scores.iter().copied().sum();
    scores.iter_mut().for_each(|x| *x = *x / sum);
}

fn score_backward<T: Scalar>(
    of: &Indexer,
    part: f64,
    views: &[Mesh],
    [q, k, w, chosen, p]: [&[T]; 5],
    [dq, dk, dw]: [&mut [T]; 3],
) {
    let (heads, d, top_k) = (of.block.heads as usize, of.block.head_dim as usize, of.top_k as usize);
    let (queries, len) = (of.block.q.len(views) as usize, of.block.kv.len(views) as usize);
    let (scale, part) = (T::from_f64(of.scale()), T::from_f64(part));
    [&mut *dq, &mut *dk, &mut *dw].into_iter().for_each(|x| x.fill(T::zero()));
    for row in 0..of.block.batch as usize * queries {
        let keys = rows_of(&chosen[row * top_k..][..top_k], row / queries, len);
        let (q, w) = (&q[row * heads * d..][..heads * d], &w[row * heads..][..heads]);
        let mut shares: Vec<T> = keys.iter().map(|s| score_of(q, w, &k[s * d..][..d], scale)).collect();
        softmax(&mut shares);
        for ((&s, share), &p) in keys.iter().zip(shares).zip(&p[row * top_k..]) {
            let (k, d_score) = (&k[s * d..][..d], (share - p) * part * scale);
            for head in 0..heads {
                let (at, q) = (head * d, &q[head * d..][..d]);
                let product = dot(q, k);
                if product > T::zero() {
                    dw[row * heads + head] += d_score * product;
                    add(&mut dq[row * heads * d + at..][..d], d_score * w[head], k);
                    add(&mut dk[s * d..][..d], d_score * w[head], q);
                }
            }
        }
    }
}

fn attend<T: Scalar>(of: &Chosen, views: &[Mesh], [q, k, chosen]: [&[T]; 3], o: &mut [T], lse: &mut [T]) {
    let (b, top_k) = (&of.block, of.top_k as usize);
    let [heads, d, v] = [b.heads, b.head_dim, b.v_dim()].map(|n| n as usize);
    let (queries, len, scale) = (b.q.len(views) as usize, b.kv.len(views) as usize, T::from_f64(of.scale));
    for row in 0..b.batch as usize * queries {
        let keys = rows_of(&chosen[row * top_k..][..top_k], row / queries, len);
        for lane in row * heads..(row + 1) * heads {
            let q = &q[lane * d..][..d];
            let mut p: Vec<T> = keys.iter().map(|s| scale * dot(q, &k[s * d..][..d])).collect();
            let top = p.iter().fold(T::NEG_INFINITY, |top, &x| top.larger(x));
            p.iter_mut().for_each(|x| *x = (*x - top).exp());
            let sum: T = p.iter().copied().sum();
            lse[lane] = top + sum.ln();
            let o = &mut o[lane * v..][..v];
            o.fill(T::zero());
            keys.iter().zip(p).for_each(|(s, p)| add(o, p / sum, &k[s * d..][..v]));
        }
    }
}

fn attend_backward<T: Scalar>(
    of: &Chosen,
    views: &[Mesh],
    [q, k, d_o, lse, delta, chosen]: [&[T]; 6],
    [dq, dk, mean]: [&mut [T]; 3],
) {
    let (b, top_k) = (&of.block, of.top_k as usize);
    let [heads, d, v] = [b.heads, b.head_dim, b.v_dim()].map(|n| n as usize);
    let (queries, len, scale) = (b.q.len(views) as usize, b.kv.len(views) as usize, T::from_f64(of.scale));
    let each = T::one() / T::from_f64(heads as f64);
    [&mut *dq, &mut *dk, &mut *mean].into_iter().for_each(|x| x.fill(T::zero()));
    for row in 0..b.batch as usize * queries {
        let keys = rows_of(&chosen[row * top_k..][..top_k], row / queries, len);
        for lane in row * heads..(row + 1) * heads {
            let (q, d_o) = (&q[lane * d..][..d], &d_o[lane * v..][..v]);
            for (i, &s) in keys.iter().enumerate() {
                let key = &k[s * d..][..d];
                let p = (scale * dot(q, key) - lse[lane]).exp();
                let d_score = p * (dot(d_o, &key[..v]) - delta[lane]) * scale;
                mean[row * top_k + i] += p * each;
                add(&mut dq[lane * d..][..d], d_score, key);
                add(&mut dk[s * d..][..d], d_score, q);
                add(&mut dk[s * d..][..v], p, d_o);
            }
        }
    }
}
