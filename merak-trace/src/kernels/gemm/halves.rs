//! Products of operands that are rounded to bf16, with sums of `f32`.
//!
//! ```text
//! matrix units (AMX)      one product of tiles, where an f32 product takes six
//! AVX-512-BF16            pairs of bf16, twice as many as numbers of f32
//! neither, or a few rows  the products of f32, with rounded copies of the operands
//! ```
//!
//! All round to the nearest bf16, ties to even. What a unit multiplies in one step it may add up in
//! its own order, and the first two take numbers below 2^-126 for zero.

#![expect(
    clippy::inline_always,
    reason = "numbers are rounded in registers only where that is inlined into its dispatch"
)]

use half::bf16;
#[cfg(target_arch = "x86_64")]
use pulp::{cast, f32x16, u32x16};

#[cfg(target_arch = "x86_64")]
use super::super::Units;
use super::super::{MatMut, MatRef, Threads, simd::vectorize};
use super::{Operand, Start, TILE, operand::with_copy, product};
#[cfg(target_arch = "x86_64")]
use super::{
    amx, blocked, dots,
    pairs::{PAIRED, Pairs},
};

/// Most elements of a rounded copy, unless [`TILE`] lines have more.
const COPIED: usize = 1 << 22;

/// An element type that is rounded to bf16, if it is not bf16.
pub(in super::super) trait Halves: Operand<f32> {
    /// The type of rounded elements.
    type Rounded: Operand<f32>;

    /// Calls `f` with the matrix rounded.
    fn with_rounded<R>(
        threads: &Threads,
        matrix: MatRef<'_, Self>,
        f: impl FnOnce(MatRef<'_, Self::Rounded>) -> R,
    ) -> R;

    /// Neighbours along k as pairs.
    #[cfg(target_arch = "x86_64")]
    fn along(simd: Pairs, x: &[Self; PAIRED]) -> u32x16;

    /// The elements of one line and of the next as pairs.
    #[cfg(target_arch = "x86_64")]
    fn across(simd: Pairs, x: &[Self; PAIRED / 2], next: &[Self; PAIRED / 2]) -> u32x16;
}

impl Halves for f32 {
    type Rounded = f32;

    fn with_rounded<R>(
        threads: &Threads,
        matrix: MatRef<'_, f32>,
        f: impl FnOnce(MatRef<'_, f32>) -> R,
    ) -> R {
        with_copy(threads, matrix, f, |lines, memory| {
            let copies = memory.chunks_exact_mut(lines.cols().max(1)).enumerate();
            threads.for_each(copies, |(row, out)| {
                vectorize(
                    #[inline(always)]
                    || {
                        for (out, &x) in out.iter_mut().zip(lines.row(row)) {
                            *out = rounded(x);
                        }
                    },
                );
            });
        })
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn along(simd: Pairs, x: &[f32; PAIRED]) -> u32x16 {
        let [low, high]: [f32x16; 2] = cast(*x);
        simd.neighbours(low, high)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn across(simd: Pairs, x: &[f32; PAIRED / 2], next: &[f32; PAIRED / 2]) -> u32x16 {
        simd.deal(simd.neighbours(cast(*x), cast(*next)))
    }
}

impl Halves for bf16 {
    type Rounded = bf16;

    fn with_rounded<R>(
        _: &Threads,
        matrix: MatRef<'_, bf16>,
        f: impl FnOnce(MatRef<'_, bf16>) -> R,
    ) -> R {
        f(matrix)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn along(_: Pairs, x: &[bf16; PAIRED]) -> u32x16 {
        bytemuck::cast(*x)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn across(simd: Pairs, x: &[bf16; PAIRED / 2], next: &[bf16; PAIRED / 2]) -> u32x16 {
        simd.deal(bytemuck::cast([*x, *next]))
    }
}

/// The nearest bf16, ties to even; a NaN stays one.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    const UPPER: u32 = 0xffff_0000;
    const QUIET: u32 = 0x0040_0000;
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    f32::from_bits(UPPER & if x.is_nan() { bits | QUIET } else { nearest })
}

/// Rounds each element to the nearest bf16, ties to even.
pub fn narrow(threads: &Threads, wide: &[f32], narrow: &mut [bf16]) {
    const BLOCK: usize = 1 << 14;
    let blocks = narrow.chunks_mut(BLOCK).zip(wide.chunks(BLOCK));
    threads.for_each(blocks, |(narrow, wide)| {
        vectorize(
            #[inline(always)]
            || {
                for (narrow, &wide) in narrow.iter_mut().zip(wide) {
                    *narrow = bf16::from_bits((rounded(wide).to_bits() >> 16) as u16);
                }
            },
        );
    });
}

/// Computes `c = alpha a b + start` of rounded operands.
pub(in super::super) fn product_of_halves<W: Halves>(
    threads: &Threads,
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, W>),
    start: Start<'_, f32>,
    c: MatMut<'_, f32>,
) {
    #[cfg(target_arch = "x86_64")]
    let c = match on_units(threads, alpha, (a, b), start, c) {
        Ok(()) => return,
        Err(c) => c,
    };
    product_of_copies(threads, alpha, (a, b), start, c);
}

/// The same on units of this processor that multiply bf16.
///
/// # Errors
/// There are none, or they do not pay; `c` is unchanged.
#[cfg(target_arch = "x86_64")]
fn on_units<'c, W: Halves>(
    threads: &Threads,
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, W>),
    start: Start<'_, f32>,
    c: MatMut<'c, f32>,
) -> Result<(), MatMut<'c, f32>> {
    let pays = blocked::pays(a.rows(), a.cols(), b.cols());
    let simd = Pairs::try_new().filter(|_| pays && threads.units() >= Units::Vector);
    let Some(simd) = simd else {
        return Err(c);
    };
    if let Err(c) = amx::product::<W, _, 1>(simd, threads, alpha, (a, b), start, c) {
        dots::product(simd, threads, alpha, (a, b), start, c);
    }
    Ok(())
}

/// The same with rounded copies, some rows and columns at a time.
fn product_of_copies<W: Halves>(
    threads: &Threads,
    alpha: f32,
    (a, b): (MatRef<'_, f32>, MatRef<'_, W>),
    start: Start<'_, f32>,
    c: MatMut<'_, f32>,
) {
    let most = (COPIED / a.cols().max(1)).max(TILE);
    for (block, c) in c.col_blocks(most).enumerate() {
        let (first, cols) = (block * most, c.cols());
        let start = start.columns(first, cols);
        W::with_rounded(threads, b.sub_cols(first, cols), |b| {
            for (block, out) in c.row_blocks(most).enumerate() {
                f32::with_rounded(threads, a.sub_rows(block * most, out.rows()), |a| {
                    product(threads, alpha, a, b, start, out);
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{
        assert_close, noise, on_any_threads, product_of, to_f64, transposed,
    };
    use super::super::gemm_of_halves;
    use super::*;
    use crate::kernels::Units;

    const EVERY: [Units; 3] = [Units::None, Units::Vector, Units::Matrix];

    fn rounded_all(x: &[f32]) -> Vec<f32> {
        x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
    }

    fn naive(shape: (usize, usize, usize), a: &[f32], b: &[f32]) -> Vec<f64> {
        let [a, b] = [a, b].map(|x| to_f64(&rounded_all(x)));
        product_of(shape, &a, &b)
    }

    /// A matrix and its elements in both orders of memory.
    fn views<'a, T: Copy>(
        rows: usize,
        cols: usize,
        x: &'a [T],
        turned: &'a [T],
    ) -> [MatRef<'a, T>; 2] {
        [
            MatRef::new(x, rows, cols),
            MatRef::new(turned, cols, rows).transposed(),
        ]
    }

    #[test]
    fn products_of_odd_shapes_in_every_layout_are_those_of_rounded_operands_on_all_units() {
        for (m, k, n) in [
            (1, 1, 1),
            (5, 0, 3),
            (3, 17, 1),
            (48, 32, 32),
            (49, 33, 47),
            (57, 1025, 95),
            (64, 64, 64),
            (113, 2050, 33),
            (9, 1030, 33),
            (260, 75, 300),
            (60, 1030, 330),
        ] {
            let (a, b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
            let (at, bt) = (transposed(m, k, &a), transposed(k, n, &b));
            let narrow_b: Vec<_> = b.iter().map(|&x| bf16::from_f32(x)).collect();
            let narrow_bt = transposed(k, n, &narrow_b);
            let expected = naive((m, k, n), &a, &b);
            let bias = noise::<f32>(3, n);
            let biased: Vec<f64> = (0..m * n)
                .map(|i| expected[i] + f64::from(bias[i % n]))
                .collect();
            for a in views(m, k, &a, &at) {
                let wide = views(k, n, &b, &bt);
                let narrow = views(k, n, &narrow_b, &narrow_bt);
                for (b, narrow) in wide.into_iter().zip(narrow) {
                    for units in EVERY {
                        let from_wide = on_any_threads(|threads| {
                            let mut c = vec![f32::NAN; m * n];
                            let out = MatMut::new(&mut c, m, n);
                            let threads = threads.clone().with_units(units);
                            gemm_of_halves(&threads, a, b, Start::Row(&bias), out);
                            c
                        });
                        assert_close(&from_wide, &biased, 1e-4);
                        let threads = Threads::one().with_units(units);
                        let mut c = vec![f32::NAN; m * n];
                        let out = MatMut::new(&mut c, m, n);
                        gemm_of_halves(&threads, a, narrow, Start::Row(&bias), out);
                        assert!(c == from_wide, "{m} {k} {n} {units:?}");
                        let mut c = biased.iter().map(|&x| -x as f32).collect::<Vec<_>>();
                        let out = MatMut::new(&mut c, m, n);
                        gemm_of_halves(&threads, a, b, Start::Output, out);
                        let left: Vec<_> = (0..m * n).map(|i| -f64::from(bias[i % n])).collect();
                        assert_close(&c, &left, 2e-4);
                    }
                }
            }
        }
    }

    #[test]
    fn nan_and_infinity_of_either_operand_reach_what_depends_on_them_alone() {
        let (m, k, n) = (60, 70, 40);
        let (mut a, mut b) = (vec![1.0_f32; m * k], vec![1.0_f32; k * n]);
        (a[5], a[k + 69], b[3 * n + 39]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        for units in EVERY {
            let mut c = vec![0.0_f32; m * n];
            let threads = Threads::one().with_units(units);
            let out = MatMut::new(&mut c, m, n);
            let (a, b) = (MatRef::new(&a, m, k), MatRef::new(&b, k, n));
            gemm_of_halves(&threads, a, b, Start::Zero, out);
            for (i, x) in c.into_iter().enumerate() {
                let expected = match (i / n, i % n) {
                    (0, _) | (1, 39) => f32::NAN,
                    (1, _) => f32::INFINITY,
                    (_, 39) => f32::NEG_INFINITY,
                    _ => 70.0,
                };
                let same = x == expected || x.is_nan() && expected.is_nan();
                assert!(same, "{x} instead of {expected} at {i} on {units:?}");
            }
        }
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_bf16_and_ties_to_even() {
        let bits = [
            0x3f80_0000,
            0x3f80_7fff,
            0x3f80_8000,
            0x3f80_8001,
            0x3f81_8000,
            0xbf81_8000,
            0x7f7f_ffff,
            0x7f80_0000,
            0xff80_0000,
            0x7f80_0001,
            0xffff_ffff,
            0x0000_8001,
        ];
        let wide = bits.map(f32::from_bits);
        let mut found = [bf16::ZERO; 12];
        narrow(&Threads::one(), &wide, &mut found);
        assert_eq!(
            found.map(bf16::to_bits),
            wide.map(|x| bf16::from_f32(x).to_bits())
        );
    }
}
