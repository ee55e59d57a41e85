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
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    /// A token id, which travels as a float: exact below 2^24 even in f32.
    fn to_index(self) -> usize {
        self.to_f64() as usize
    }
}

macro_rules! scalar {
    ($t:ty, $dtype:expr) => {
        impl Scalar for $t {
            const NEG_INFINITY: $t = <$t>::NEG_INFINITY;
            const DTYPE: Dtype = $dtype;

            fn from_f64(x: f64) -> $t {
                x as $t
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn exp(self) -> $t {
                <$t>::exp(self)
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

scalar!(f32, Dtype::F32);
scalar!(f64, Dtype::F64);

/// The largest of `xs` and `start`.
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
