//! Rotary embedding (Su et al., arXiv:2104.09864), with Hugging Face's pairs: element i of a head turns
//! with element i + d/2, by position * theta^(-2i/d), or as [`Turning`] scales that.
//!
//! Shapes: qkv [n, (a+2k)*d], q [n, a*d], kv [n, (K: k*d | V: k*d)]. Row b*len + j stands at the j-th of
//! the rank's positions, in every sequence.

use super::Scalar;
use super::scalar::wide;
use crate::spec::Turning;

pub struct Rope<T> {
    /// Cosines by position and pair, [len, d/2]; sines likewise.
    cos: Vec<T>,
    sin: Vec<T>,
    q_row: usize,
    k_row: usize,
    head_dim: usize,
    /// Elements of a head that turn.
    rotary: usize,
}

impl<T: Scalar> Rope<T> {
    pub fn new(positions: &[u64], [heads, kv_heads, head_dim]: [usize; 3], turning: &Turning) -> Rope<T> {
        let half = turning.speeds.len();
        let [mut cos, mut sin] = [0, 1].map(|_| vec![T::zero(); positions.len() * half]);
        let rows = cos.chunks_exact_mut(half.max(1)).zip(sin.chunks_exact_mut(half.max(1)));
        let mut known = Known::new(turning);
        positions.iter().zip(rows).for_each(|(&p, (cos, sin))| known.turns(p, cos, sin));
        Rope { cos, sin, q_row: heads * head_dim, k_row: kv_heads * head_dim, head_dim, rotary: 2 * half }
    }

    pub fn forward(&self, qkv: &[T], q: &mut [T], kv: &mut [T]) {
        let rows = q.chunks_exact_mut(self.q_row).zip(kv.chunks_exact_mut(2 * self.k_row));
        let mut turns = self.rows_of_turns();
        for (qkv, (q, kv)) in qkv.chunks_exact(self.q_row + 2 * self.k_row).zip(rows) {
            let turns = turns();
            q.copy_from_slice(&qkv[..self.q_row]);
            kv.copy_from_slice(&qkv[self.q_row..]);
            self.rotate(q, turns, T::one());
            self.rotate(&mut kv[..self.k_row], turns, T::one());
        }
    }

    /// The transpose of the forward pass: turns gradients back.
    pub fn backward(&self, dq: &[T], dkv: &[T], dqkv: &mut [T]) {
        let rows = dq.chunks_exact(self.q_row).zip(dkv.chunks_exact(2 * self.k_row));
        let mut turns = self.rows_of_turns();
        for (dqkv, (dq, dkv)) in dqkv.chunks_exact_mut(self.q_row + 2 * self.k_row).zip(rows) {
            let turns = turns();
            dqkv[..self.q_row].copy_from_slice(dq);
            dqkv[self.q_row..].copy_from_slice(dkv);
            self.rotate(&mut dqkv[..self.q_row + self.k_row], turns, -T::one());
        }
    }

    /// The turns of one row after the other, over all sequences.
    fn rows_of_turns<'a>(&'a self) -> impl FnMut() -> Turns<'a, T> {
        let (half, mut at) = (self.rotary / 2, 0);
        move || {
            let from = at % self.cos.len().max(1);
            at = from + half;
            (&self.cos[from..from + half], &self.sin[from..from + half])
        }
    }

    /// Turns every head of a row.
    fn rotate(&self, row: &mut [T], turns: Turns<T>, direction: T) {
        rotate_heads(row, [self.head_dim, self.rotary], turns, direction);
    }
}

/// Cosines and sines of one position.
type Turns<'a, T> = (&'a [T], &'a [T]);

wide! {
    fn rotate_heads<'a, T>(row: &'a mut [T], sizes: [usize; 2], turns: Turns<'a, T>, direction: T) -> () {
        let [head_dim, rotary] = sizes;
        for head in row.chunks_exact_mut(head_dim) {
            let (low, high) = head[..rotary].split_at_mut(rotary / 2);
            for ((x, y), (&cos, &sin)) in low.iter_mut().zip(high).zip(turns.0.iter().zip(turns.1)) {
                let sin = sin * direction;
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

/// Positions between two whose turns are computed from their angles.
const FINE: u64 = 64;

/// Turns of positions: of a multiple of `FINE` and of less, one after the other. So most cost a complex product in place of
/// a cosine and a sine; and the same ones are multiplied for a position whatever others a rank has.
struct Known<'a> {
    turning: &'a Turning,
    /// Which multiple, and its cosines and sines, by whose factor they and so all products are multiplied.
    coarse: Option<(u64, Vec<f64>, Vec<f64>)>,
    /// Turns of the positions 0 to FINE, those that were asked for.
    fine: Vec<Option<(Vec<f64>, Vec<f64>)>>,
}

impl Known<'_> {
    fn new(turning: &Turning) -> Known<'_> {
        Known { turning, coarse: None, fine: vec![None; FINE as usize] }
    }

    fn turns<T: Scalar>(&mut self, position: u64, cos: &mut [T], sin: &mut [T]) {
        let (multiple, rest) = (position / FINE, position % FINE);
        let Turning { speeds, factor } = self.turning;
        let of = |position: u64| {
            let [mut cos, mut sin] = [0, 1].map(|_| vec![0.0; speeds.len()]);
            turns(position as f64, speeds, &mut cos, &mut sin);
            (cos, sin)
        };
        if self.coarse.as_ref().is_none_or(|(at, ..)| *at != multiple) {
            let (mut cos, mut sin) = of(multiple * FINE);
            cos.iter_mut().chain(&mut sin).for_each(|x| *x *= factor);
            self.coarse = Some((multiple, cos, sin));
        }
        let (_, coarse_cos, coarse_sin) = self.coarse.as_ref().expect("it was just made");
        let fine = self.fine[rest as usize].get_or_insert_with(|| of(rest));
        one_after_the_other((coarse_cos, coarse_sin), (&fine.0, &fine.1), cos, sin);
    }
}

wide! {
    /// The turns of two angles one after the other: products of complex numbers of length one, in f64.
    fn one_after_the_other<'a, T>(a: Turns<'a, f64>, b: Turns<'a, f64>, cos: &'a mut [T], sin: &'a mut [T]) -> () {
        let both = a.0.iter().zip(a.1).zip(b.0.iter().zip(b.1));
        for (((cos_a, sin_a), (cos_b, sin_b)), (cos, sin)) in both.zip(cos.iter_mut().zip(sin)) {
            *cos = T::from_f64(cos_a * cos_b - sin_a * sin_b);
            *sin = T::from_f64(sin_a * cos_b + cos_a * sin_b);
        }
    }
}

wide! {
    /// The turns by the angles position * speed, in f64: the angle of a far position has no digits left in f32.
    fn turns<'a, T>(position: f64, speeds: &'a [f64], cos: &'a mut [T], sin: &'a mut [T]) -> () {
        for (speed, (cos, sin)) in speeds.iter().zip(cos.iter_mut().zip(sin)) {
            let (c, s) = cos_sin(position * speed);
            (*cos, *sin) = (T::from_f64(c), T::from_f64(s));
        }
    }
}

/// Cosine and sine without a branch, so that a loop of it becomes vectors: what is left of the angle after quarters of a
/// turn, by the polynomials of fdlibm (k_sin.c, k_cos.c). Right to 1e-15 for angles up to a million, and to 1e-9 for those
/// a thousand times as large.
#[inline(always)]
fn cos_sin(angle: f64) -> (f64, f64) {
    /// 1.5 * 2^52: added to a number it leaves the nearest integer in the last bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let rounded = angle * std::f64::consts::FRAC_2_PI + ROUND;
    let (quarter, n) = (rounded.to_bits(), rounded - ROUND);
    // Half of pi in two parts, of which the first times n is exact.
    let r = angle - n * 1.570_796_326_734_125_6 - n * 6.077_100_506_506_192e-11;
    let z = r * r;
    let of = |all: [f64; 6]| all.into_iter().rev().reduce(|p, c| p * z + c).unwrap_or(0.0);
    let s = of([
        -1.666_666_666_666_663_2e-1,
        8.333_333_333_322_49e-3,
        -1.984_126_982_985_795e-4,
        2.755_731_370_707_007e-6,
        -2.505_076_025_340_686_3e-8,
        1.589_690_995_211_55e-10,
    ]);
    let c = of([
        4.166_666_666_666_66e-2,
        -1.388_888_888_887_411e-3,
        2.480_158_728_947_673e-5,
        -2.755_731_435_139_066_3e-7,
        2.087_572_321_298_175e-9,
        -1.135_964_755_778_819_5e-11,
    ]);
    let (sin, cos) = (r + r * z * s, 1.0 - 0.5 * z + z * z * c);
    let (odd, negative) = (quarter & 1 == 1, |quarter: u64| if quarter & 2 == 2 { -1.0 } else { 1.0 });
    let (x, y) = if odd { (sin, cos) } else { (cos, sin) };
    (x * negative(quarter.wrapping_add(1)), y * negative(quarter))
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use crate::exec::kernels::run;
    use crate::plan::{Kernel, Segs};
    use crate::spec::RopeScaling;

    // b = 2, s = 8 on two ranks, a = 3, k = 1, d = 6.
    const ROWS: usize = 2 * 4;

    fn kernel(segs: &Segs, backward: bool) -> Kernel {
        Kernel::Rope {
            segs: segs.clone(),
            documents: vec![3, 5].into(),
            batch: 2,
            heads: 3,
            kv_heads: 1,
            head_dim: 6,
            theta: 100.0,
            backward,
            rotary: None,
            scaling: None,
        }
    }

    fn forward(rank: u32, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut q, mut kv) = (vec![f64::NAN; ROWS * 18], vec![f64::NAN; ROWS * 12]);
        run(&kernel(&zigzag(8), false), &ring(2), rank, 1, &[Some(qkv)], &mut [&mut q, &mut kv]);
        (q, kv)
    }

    #[test]
    fn cosines_and_sines_are_right_near_and_far() {
        for i in -40_000..40_000 {
            let angle = f64::from(i) * 0.731;
            for (angle, near) in [(angle * 1e-2, 1e-15), (angle, 1e-14), (angle * 1e3, 2e-9)] {
                let (cos, sin) = super::cos_sin(angle);
                assert!((cos - angle.cos()).abs() < near && (sin - angle.sin()).abs() < near, "{angle}: {cos} {sin}");
            }
        }
        assert_eq!(super::cos_sin(0.0), (1.0, 0.0));
    }

    #[test]
    fn turns_one_after_the_other_are_those_of_the_angle() {
        let speeds: Vec<f64> = (0..16).map(|i| 1e4f64.powf(-f64::from(i) / 16.0)).collect();
        let turning = crate::spec::Turning { speeds: speeds.clone(), factor: 1.5 };
        let mut known = super::Known::new(&turning);
        for position in (0..300).chain(65_530..65_540).chain([3, 1_000_003, 5]) {
            let (mut cos, mut sin) = ([0.0f64; 16], [0.0f64; 16]);
            known.turns(position, &mut cos, &mut sin);
            for (i, speed) in speeds.iter().enumerate() {
                let angle = position as f64 * speed;
                let near = 1e-15 * (2.0 + angle);
                let [cos, sin] = [cos[i] / 1.5, sin[i] / 1.5];
                assert!((cos - angle.cos()).abs() < near && (sin - angle.sin()).abs() < near, "{position}, {i}");
            }
        }
    }

    #[test]
    fn forward_turns_each_pair_as_a_complex_number() {
        let qkv = random(ROWS * 30, 1);
        let (q, kv) = forward(1, &qkv);
        // Rank 1 of 2 holds the two middle chunks, 2 to 6; the second document begins at 3.
        for (row, position) in [2.0, 0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0].into_iter().enumerate() {
            for (head, i) in (0..4).flat_map(|head| (0..3).map(move |i| (head, i))) {
                let x = &qkv[row * 30 + head * 6..][..6];
                let angle = position * 100f64.powf(-(i as f64) / 3.0);
                let (sin, cos) = angle.sin_cos();
                let got = if head < 3 { &q[row * 18 + head * 6..][..6] } else { &kv[row * 12..][..6] };
                assert_close(&[got[i], got[i + 3]], &[x[i] * cos - x[i + 3] * sin, x[i + 3] * cos + x[i] * sin], 1e-12);
            }
            assert_eq!(kv[row * 12 + 6..][..6], qkv[row * 30 + 24..][..6], "V goes through");
        }
    }

    /// Of documents the longest, five tokens, says how dynamic frequencies are scaled; and YaRN multiplies what it turns.
    #[test]
    fn scaled_frequencies_go_by_documents_and_factors() {
        let qkv = random(ROWS * 30, 1);
        let with = |kind: RopeScaling| {
            let Kernel::Rope { segs, documents, batch, heads, kv_heads, head_dim, theta, backward, rotary, .. } =
                kernel(&zigzag(8), false)
            else {
                panic!("it is rotary embedding")
            };
            let scaling = Some(kind);
            let kernel =
                Kernel::Rope { segs, documents, batch, heads, kv_heads, head_dim, theta, backward, rotary, scaling };
            let (mut q, mut kv) = (vec![f64::NAN; ROWS * 18], vec![f64::NAN; ROWS * 12]);
            run(&kernel, &ring(2), 1, 1, &[Some(&qkv)], &mut [&mut q, &mut kv]);
            q
        };
        let yarn = RopeScaling::Yarn {
            factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original: 8,
            truncate: true,
            attention_factor: 1.5,
            mscale_all_dim: 0.0,
        };
        let plain: Vec<f64> = forward(1, &qkv).0.iter().map(|x| 1.5 * x).collect();
        assert_close(&with(yarn), &plain, 1e-12);
        let q = with(RopeScaling::Dynamic { factor: 3.0, original: 4 });
        // The fourth row stands at 2 of the second document; the base is 100 (3 * 5/4 - 2)^(6/4).
        let theta = 100.0 * 1.75f64.powf(1.5);
        for (x, got) in qkv[3 * 30..][..6].chunks(6).zip(q[3 * 18..].chunks(6)) {
            for i in 0..3 {
                let (sin, cos) = (2.0 * theta.powf(-(i as f64) / 3.0)).sin_cos();
                assert_close(&[got[i], got[i + 3]], &[x[i] * cos - x[i + 3] * sin, x[i + 3] * cos + x[i] * sin], 1e-12);
            }
        }
    }

    #[test]
    fn backward_is_the_transpose() {
        let (x, dq, dkv) = (random(ROWS * 30, 1), random(ROWS * 18, 2), random(ROWS * 12, 3));
        for rank in 0..2 {
            let (q, kv) = forward(rank, &x);
            let mut dx = vec![f64::NAN; ROWS * 30];
            let reads = [Some(&dq[..]), Some(&dkv[..])];
            run(&kernel(&zigzag(8), true), &ring(2), rank, 1, &reads, &mut [&mut dx]);
            // <y, R x> = <Rᵀ y, x>
            assert_close(&[dot(&dx, &x)], &[dot(&dq, &q) + dot(&dkv, &kv)], 1e-12);
        }
    }
}
