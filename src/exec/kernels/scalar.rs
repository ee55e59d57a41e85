//! The element types kernels run in: f32 as hardware does, f64 to tell logic errors from rounding.

use crate::plan::Dtype;
use ndarray::LinalgScalar;
use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{AddAssign, MulAssign, Neg, SubAssign};

pub trait Scalar:
    LinalgScalar
    + bytemuck::Pod
    + PartialOrd
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
    + Send
    + Sync
    + Debug
    + Display
{
    const NEG_INFINITY: Self;
    /// How buffers of this type are declared.
    const DTYPE: Dtype;

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;

    /// The larger of two numbers; neither is NaN in a sound run.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    /// A token id, which travels as a float: exact below 2^24 even in f32.
    fn to_index(self) -> usize {
        self.to_f64() as usize
    }
}

macro_rules! scalar {
    ($t:ty, $dtype:expr, $exp:expr) => {
        impl Scalar for $t {
            const NEG_INFINITY: $t = <$t>::NEG_INFINITY;
            const DTYPE: Dtype = $dtype;

            #[inline(always)]
            fn from_f64(x: f64) -> $t {
                x as $t
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn exp(self) -> $t {
                $exp(self)
            }
            fn ln(self) -> $t {
                <$t>::ln(self)
            }
            fn sqrt(self) -> $t {
                <$t>::sqrt(self)
            }
        }
    };
}

scalar!(f32, Dtype::F32, exp_f32);
scalar!(f64, Dtype::F64, f64::exp);

/// A function over `'a` and a scalar `T`, compiled for the widest vectors that the machine has. (Its body is a method
/// that is always inlined into code for them: a closure or a function that is handed over would stay one of its own
/// as soon as it is not small, compiled for the oldest machine there is.)
macro_rules! wide {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<'a, T>($($arg:ident: $ty:ty),* $(,)?) -> $out:ty $body:block) => {
        $(#[$doc])*
        $vis fn $name<'a, T: Scalar>($($arg: $ty),*) -> $out {
            struct Loops<'a, T> {
                $($arg: $ty,)*
                of: std::marker::PhantomData<&'a T>,
            }
            impl<'a, T: Scalar> pulp::NullaryFnOnce for Loops<'a, T> {
                type Output = $out;

                #[inline(always)]
                fn call(self) -> $out {
                    let Loops { $($arg,)* .. } = self;
                    $body
                }
            }
            pulp::Arch::new().dispatch(Loops { $($arg,)* of: std::marker::PhantomData })
        }
    };
}
pub(super) use wide;

/// Every x to e^(x - top); returns their sum, in eight lanes. (Two passes: the compiler makes no vectors of one.)
#[inline(always)]
pub fn exp_all<T: Scalar>(xs: &mut [T], top: T) -> T {
    xs.iter_mut().for_each(|x| *x = (*x - top).exp());
    sum_with(xs, xs, |x, _| x)
}

/// e^x without a branch, so that a loop of it becomes vectors: e^x = 2^n e^r with |r| <= ln(2)/2, e^r by the
/// polynomial of Cephes (expf.c), right to about one unit in the last place. Multiplies and adds apart, so that
/// it gives the same bits wherever in a loop an element stands. Zero below the normal numbers; NaN stays NaN.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.722_84;
    /// 1.5 * 2^23: added to a small number it leaves the nearest integer in the last bits.
    const ROUND: f32 = 12_582_912.0;
    let low = if x < LOWEST { LOWEST } else { x };
    let within = if low > HIGHEST { HIGHEST } else { low };
    let rounded = within * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    // ln(2) in two parts, of which the first times n is exact.
    let r = within - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let coefficients = [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let p = coefficients.into_iter().fold(1.987_569_1e-4, |p, c| p * r + c);
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    let y = (p * r * r + r + 1.0) * power;
    if x < LOWEST { 0.0 } else { y }
}

/// The largest of `xs` and `start`.
#[inline(always)]
pub fn largest<T: Scalar>(xs: &[T], start: T) -> T {
    // Eight lanes: one running maximum would wait for itself at every element.
    let mut lanes = [start; 8];
    let (eights, rest) = xs.as_chunks::<8>();
    for eight in eights {
        for (lane, &x) in lanes.iter_mut().zip(eight) {
            *lane = lane.larger(x);
        }
    }
    rest.iter().chain(&lanes).fold(start, |top, &x| top.larger(x))
}

/// The sum over i of `f(xs[i], ys[i])`, in eight lanes.
#[inline(always)]
pub fn sum_with<T: Scalar>(xs: &[T], ys: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::zero(); 8];
    let ((x8, x_rest), (y8, y_rest)) = (xs.as_chunks::<8>(), ys.as_chunks::<8>());
    for (xs, ys) in x8.iter().zip(y8) {
        for i in 0..8 {
            lanes[i] += f(xs[i], ys[i]);
        }
    }
    let rest: T = x_rest.iter().zip(y_rest).map(|(&x, &y)| f(x, y)).sum();
    lanes.into_iter().fold(rest, |sum, lane| sum + lane)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_right_to_the_last_places_and_hides_no_nan() {
        for x in (-87_300..88_300).map(|i| i as f32 * 1e-3) {
            let (got, want) = (f64::from(exp_f32(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 2.5e-7, "{x}: {got} for {want}");
        }
        assert_eq!([f32::NEG_INFINITY, -1e4, 0.0, f32::INFINITY].map(exp_f32), [0.0, 0.0, 1.0, f32::INFINITY]);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    wide! {
        fn all_exp<'a, T>(xs: &'a mut [T]) -> T {
            exp_all(xs, T::zero())
        }
    }

    #[test]
    fn an_element_has_the_same_bits_wherever_it_stands() {
        let xs: Vec<f32> = (0..37).map(|i| i as f32 * -0.37).collect();
        let all = {
            let mut all = xs.clone();
            all_exp(&mut all[..]);
            all
        };
        for (x, y) in xs.iter().zip(all) {
            assert_eq!(exp_f32(*x).to_bits(), y.to_bits());
        }
    }
}
