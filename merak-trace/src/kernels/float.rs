//! The element types of the kernels and their elementary functions.
#![expect(
    clippy::inline_always,
    reason = "these functions vectorise only where they are inlined into a dispatched loop"
)]

use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use super::gemm::{self, Element, Lanes, Start};
use super::simd;
use super::trig::ln_of_normal;
use super::{MatMut, MatRef, Threads};

/// An element type: `f32` to compute with, `f64` to check gradients by finite differences.
///
/// The functions of `f32` are branch-free polynomials, good to about 1e-7 of the value, and made of
/// additions, fused multiply-adds and divisions alone, so that they vectorise and give the same
/// bits on every host. NaN and infinities behave as in the standard library.
pub trait Float:
    Element
    + Lanes
    + Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Sum
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Minus infinity.
    const NEG_INFINITY: Self;

    /// Nearest value of this type.
    fn from_f64(value: f64) -> Self;
    /// The same value, exactly.
    fn to_f64(self) -> f64;
    /// `self * factor + summand`, rounded once.
    #[must_use]
    fn fma(self, factor: Self, summand: Self) -> Self;
    /// e to the power of this.
    #[must_use]
    fn exp(self) -> Self;
    /// Natural logarithm; not vectorised.
    #[must_use]
    fn ln(self) -> Self;
    /// Square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent.
    #[must_use]
    fn tanh(self) -> Self;
    /// The standard normal distribution at this point, `(cumulative, density)`.
    fn normal_cdf_pdf(self) -> (Self, Self);

    /// Runs `body`, a loop over this type, as compiled for an instruction set of this processor.
    fn vectorize<R>(body: impl FnMut() -> R) -> R;

    /// Computes `c = alpha a b + start`; `f32` operands are rounded to bf16.
    fn product_of_halves(
        threads: &Threads,
        alpha: Self,
        operands: (MatRef<'_, Self>, MatRef<'_, Self>),
        start: Start<'_, Self>,
        c: MatMut<'_, Self>,
    );

    /// `1 / (1 + exp(-self))`.
    #[inline(always)]
    #[must_use]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + Float::exp(-self))
    }
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn fma(self, factor: Self, summand: Self) -> Self {
        self.mul_add(factor, summand)
    }

    /// Results below the normal numbers are zero: processors are slow on subnormal ones, and
    /// softmax has many.
    #[inline(always)]
    fn exp(self) -> Self {
        const LOWEST: f32 = -87.336_54;
        let (fraction, power) = split_exp(clamp(self, LOWEST, 89.0));
        let result = scale_by_power_of_two(1.0 + fraction, power);
        if self < LOWEST { 0.0 } else { result }
    }

    #[inline(always)]
    fn ln(self) -> Self {
        // As f64, a subnormal is normal.
        let value = if self > 0.0 && self < f32::INFINITY {
            ln_of_normal(f64::from(self))
        } else {
            f64::from(self).ln()
        };
        value as f32
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }

    /// `t / (t + 2)` with `t = exp(2 |x|) - 1`, which loses no digits near zero.
    #[inline(always)]
    fn tanh(self) -> Self {
        let (fraction, power) = split_exp(clamp(2.0 * self.abs(), 0.0, 20.0));
        let scale = f32::from_bits(((power + 127) as u32) << 23);
        let t = scale.mul_add(fraction, scale - 1.0);
        (t / (t + 2.0)).copysign(self)
    }

    /// The tail is `exp(-x^2 / 2) t Q(t)` with `t = 1 / (1 + |x| / 8^(1/2))`; Q is the minimax
    /// polynomial of degree 9 (relative error 2e-8) for `|x| <= 13.5`, where the density vanishes.
    #[inline(always)]
    fn normal_cdf_pdf(self) -> (Self, Self) {
        const Q: [f32; 10] = [
            0.282_061_43,
            0.282_920_7,
            0.238_084_57,
            0.228_289_06,
            -0.106_607_16,
            0.437_282_17,
            -0.689_865_5,
            0.444_198_93,
            -0.129_893_89,
            0.013_529_705,
        ];
        const INV_SQRT_8: f32 = 0.353_553_38;
        const INV_SQRT_2_PI: f32 = 0.398_942_3;
        let t = 1.0 / self.abs().mul_add(INV_SQRT_8, 1.0);
        let bell = Float::exp(-0.5 * self * self);
        let tail = 0.5 * bell * t * polynomial(t, &Q);
        let cumulative = if self > 0.0 { 1.0 - tail } else { tail };
        (cumulative, bell * INV_SQRT_2_PI)
    }

    #[inline]
    fn vectorize<R>(body: impl FnMut() -> R) -> R {
        simd::vectorize(body)
    }

    fn product_of_halves(
        threads: &Threads,
        alpha: f32,
        operands: (MatRef<'_, Self>, MatRef<'_, Self>),
        start: Start<'_, Self>,
        c: MatMut<'_, Self>,
    ) {
        gemm::product_of_halves(threads, alpha, operands, start, c);
    }
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn fma(self, factor: Self, summand: Self) -> Self {
        self.mul_add(factor, summand)
    }

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> Self {
        f64::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }

    /// Near zero the series `1/2 + pdf (x + x^3/3 + x^5/15 + ..)`, far out the continued fraction
    /// `pdf / (x + 1/(x + 2/(x + 3/(x + ..))))`.
    fn normal_cdf_pdf(self) -> (Self, Self) {
        let pdf = (-0.5 * self * self).exp() / (2.0 * std::f64::consts::PI).sqrt();
        let x = self.abs();
        let tail = if x < 3.0 {
            let series = (1..60)
                .rev()
                .fold(1.0, |inner, n| 1.0 + x * x / f64::from(2 * n + 1) * inner);
            0.5 - pdf * x * series
        } else {
            pdf / (1..200).rev().fold(x, |inner, n| x + f64::from(n) / inner)
        };
        (if self > 0.0 { 1.0 - tail } else { tail }, pdf)
    }

    #[inline]
    fn vectorize<R>(body: impl FnMut() -> R) -> R {
        simd::vectorize_wide(body)
    }

    fn product_of_halves(
        threads: &Threads,
        alpha: f64,
        operands: (MatRef<'_, Self>, MatRef<'_, Self>),
        start: Start<'_, Self>,
        c: MatMut<'_, Self>,
    ) {
        gemm::product(threads, alpha, operands.0, operands.1, start, c);
    }
}

/// `low` below the range, `high` above it, and NaN for NaN.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// Value of the polynomial with these coefficients, the constant one first.
#[inline(always)]
fn polynomial(x: f32, coefficients: &[f32]) -> f32 {
    coefficients
        .iter()
        .rev()
        .fold(0.0, |sum, &coefficient| sum.mul_add(x, coefficient))
}

/// `exp(x) = 2^power (1 + fraction)`, with `|x - power ln 2| <= ln 2 / 2`, where x is less
/// than 100.
#[inline(always)]
fn split_exp(x: f32) -> (f32, i32) {
    /// Adding it puts the nearest integer into the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// `(exp(r) - 1 - r) / r^2` as its Taylor series.
    const TAYLOR: [f32; 6] = [
        0.5,
        1.0 / 6.0,
        1.0 / 24.0,
        1.0 / 120.0,
        1.0 / 720.0,
        1.0 / 5040.0,
    ];
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let power = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .cast_signed();
    let rounded = shifted - ROUND;
    let r = rounded.mul_add(-LN_2_LOW, rounded.mul_add(-LN_2_HIGH, x));
    let fraction = (r * r).mul_add(polynomial(r, &TAYLOR), r);
    (fraction, power)
}

/// `x 2^power` in two steps, since the power may be one too large for a factor.
#[inline(always)]
fn scale_by_power_of_two(x: f32, power: i32) -> f32 {
    let factor = |power: i32| f32::from_bits((power.wrapping_add(127) as u32) << 23);
    let half = power >> 1;
    x * factor(half) * factor(power.wrapping_sub(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error of `f` against `exact` relative to the value, over a dense range.
    fn worst_error(low: f32, high: f32, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
        (0..=200_000)
            .map(|i| low + (high - low) * (i as f32 / 200_000.0))
            .map(|x| {
                let exact = exact(f64::from(x));
                ((f64::from(f(x)) - exact) / exact.abs().max(1e-37)).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_good_to_two_ulp() {
        assert!(worst_error(-87.0, 88.7, Float::exp, f64::exp) < 2.4e-7);
        assert!(worst_error(-1.0, 1.0, Float::exp, f64::exp) < 2.4e-7);
    }

    #[test]
    fn exp_saturates_and_keeps_nan() {
        assert_eq!(Float::exp(0.0_f32), 1.0);
        assert_eq!(Float::exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(Float::exp(89.0_f32), f32::INFINITY);
        assert_eq!(Float::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Float::exp(-200.0_f32), 0.0);
        assert!(Float::exp(-87.336_5_f32) >= f32::MIN_POSITIVE);
        assert_eq!(Float::exp(-87.4_f32), 0.0);
        assert!(Float::exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_good_to_two_ulp_near_zero_and_far_out() {
        assert!(worst_error(1e-6, 1e-3, Float::tanh, f64::tanh) < 2.4e-7);
        assert!(worst_error(-12.0, 12.0, Float::tanh, f64::tanh) < 3e-7);
        assert_eq!(Float::tanh(f32::INFINITY), 1.0);
        assert_eq!(Float::tanh(f32::NEG_INFINITY), -1.0);
        assert_eq!(Float::tanh(-0.0_f32).to_bits(), (-0.0_f32).to_bits());
        assert!(Float::tanh(f32::NAN).is_nan());
    }

    #[test]
    fn normal_distribution_is_good_in_both_tails() {
        let cdf = |x: f64| x.normal_cdf_pdf().0;
        assert!(worst_error(-2.0, 8.0, |x| x.normal_cdf_pdf().0, cdf) < 5e-7);
        assert!(worst_error(-10.0, -2.0, |x| x.normal_cdf_pdf().0, cdf) < 5e-6);
        let pdf = |x: f64| x.normal_cdf_pdf().1;
        assert!(worst_error(-5.0, 5.0, |x| x.normal_cdf_pdf().1, pdf) < 2e-6);
        assert!(f32::NAN.normal_cdf_pdf().0.is_nan());
        assert_eq!(f32::INFINITY.normal_cdf_pdf().0, 1.0);
        assert_eq!(f32::NEG_INFINITY.normal_cdf_pdf().0, 0.0);
    }

    #[test]
    fn double_precision_normal_matches_tables() {
        for (x, expected) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (-2.0, 0.022_750_131_948_179_21),
            (-5.0, 2.866_515_718_791_939e-7),
            (3.0, 0.998_650_101_968_369_9),
        ] {
            let actual = f64::normal_cdf_pdf(x).0;
            assert!((actual / expected - 1.0).abs() < 1e-12, "{x}: {actual}");
        }
    }

    #[test]
    fn ln_is_exact_to_rounding_and_has_its_limits() {
        assert!(worst_error(1e-3, 0.9, Float::ln, f64::ln) < 1e-7);
        assert!(worst_error(1.1, 1e6, Float::ln, f64::ln) < 1e-7);
        assert!((Float::ln(1e-45_f32) + 103.278_93).abs() < 1e-4);
        assert_eq!(Float::ln(0.0_f32), f32::NEG_INFINITY);
        assert_eq!(Float::ln(f32::INFINITY), f32::INFINITY);
        assert!(Float::ln(-1.0_f32).is_nan() && Float::ln(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_reaches_both_ends() {
        assert_eq!(100.0_f32.sigmoid(), 1.0);
        assert_eq!((-200.0_f32).sigmoid(), 0.0);
        assert_eq!(0.0_f32.sigmoid(), 0.5);
    }
}
