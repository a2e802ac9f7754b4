//! Sine, cosine and logarithm with the same bits on every host.
#![expect(
    clippy::inline_always,
    reason = "these functions vectorise only where they are inlined into a dispatched loop"
)]

use std::f64::consts::{FRAC_2_PI, LN_2};

/// Sine and cosine, with an error of about 1e-14 for `|x| < 1e6`.
#[inline(always)]
pub(super) fn sin_cos(x: f64) -> (f64, f64) {
    /// Adding it rounds to the nearest integer, which then lies in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// The first 33 bits of pi/2, so that small multiples are exact, and the rest.
    const HALF_PI_HIGH: f64 = 1.570_796_326_734_125_6;
    const HALF_PI_LOW: f64 = 6.077_100_506_506_192e-11;
    let shifted = x.mul_add(FRAC_2_PI, ROUND);
    let quadrant = shifted.to_bits();
    let turns = shifted - ROUND;
    let r = turns.mul_add(-HALF_PI_LOW, turns.mul_add(-HALF_PI_HIGH, x));
    let (sin, cos) = (sin_series(r), cos_series(r));
    let (sin, cos) = if quadrant & 1 == 0 {
        (sin, cos)
    } else {
        (cos, sin)
    };
    (
        if quadrant & 2 == 0 { sin } else { -sin },
        if (quadrant + 1) & 2 == 0 { cos } else { -cos },
    )
}

/// Taylor series, to 2e-16 for `|r| <= pi/4`.
#[inline(always)]
fn sin_series(r: f64) -> f64 {
    let square = r * r;
    let mut sum = 1.0;
    for n in [16, 14, 12, 10, 8, 6, 4, 2] {
        sum = (-square * sum).mul_add(1.0 / f64::from(n * (n + 1)), 1.0);
    }
    r * sum
}

#[inline(always)]
fn cos_series(r: f64) -> f64 {
    let square = r * r;
    let mut sum = 1.0;
    for n in [15, 13, 11, 9, 7, 5, 3, 1] {
        sum = (-square * sum).mul_add(1.0 / f64::from(n * (n + 1)), 1.0);
    }
    sum
}

/// Natural logarithm of a positive normal number, with an error of about 1e-16.
#[inline(always)]
pub(super) fn ln_of_normal(x: f64) -> f64 {
    /// Bits of the square root of one half: mantissas are taken from there to twice it.
    const SQRT_HALF: u64 = 0x3fe6_a09e_667f_3bcd;
    let exponent = x.to_bits().wrapping_sub(SQRT_HALF).cast_signed() >> 52;
    let mantissa = f64::from_bits(x.to_bits().wrapping_sub((exponent << 52).cast_unsigned()));
    // ln m = 2 artanh((m - 1) / (m + 1)), and the argument is at most 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for n in [19, 17, 15, 13, 11, 9, 7, 5, 3, 1] {
        series = f64::mul_add(series, square, 1.0 / f64::from(n));
    }
    (exponent as f64).mul_add(LN_2, 2.0 * s * series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sine_and_cosine_match_the_standard_library() {
        for i in -200_000..200_000 {
            let x = f64::from(i) * 0.017;
            let ((sin, cos), (expected_sin, expected_cos)) = (sin_cos(x), x.sin_cos());
            assert!((sin - expected_sin).abs() < 1e-12, "sin {x}: {sin}");
            assert!((cos - expected_cos).abs() < 1e-12, "cos {x}: {cos}");
        }
    }

    #[test]
    fn logarithms_match_the_standard_library() {
        for i in 1..200_000 {
            for x in [
                f64::from(i) * 1e-5,
                f64::from(i) * 1e12,
                1e-300 * f64::from(i),
            ] {
                let (actual, expected) = (ln_of_normal(x), x.ln());
                let error = (actual - expected).abs();
                assert!(error <= 1e-15 * expected.abs().max(1.0), "{x}: {actual}");
            }
        }
        assert_eq!(ln_of_normal(1.0), 0.0);
    }
}
