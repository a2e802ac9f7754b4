//! Element types of the right operand of a product.
#![expect(
    clippy::inline_always,
    reason = "registers stay registers only where these functions are inlined into their dispatch"
)]

use bytemuck::Pod;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use pulp::x86::V4;

use super::super::{Float, MatMut, MatRef, Threads, simd::vectorize};
#[cfg(target_arch = "x86_64")]
use super::{Isa, Lanes, amx};
use super::{Start, product_of_halves};

/// An element type whose values are all values of `T`: `T` itself, or one that takes less memory.
///
/// A product widens such elements where it loads or packs them. Its sums have the bits of a product
/// with the widened operand, which is never in memory as a whole.
pub trait Operand<T: Float>: Pod + Send + Sync {
    /// As many elements as a register of `T` has lanes.
    #[cfg(target_arch = "x86_64")]
    type Group<S: Isa>: Pod;

    /// Converts to `T`, exactly.
    fn wide(self) -> T;

    /// Calls `f` with the matrix widened to `T`.
    fn with_wide<R>(
        threads: &Threads,
        matrix: MatRef<'_, Self>,
        f: impl FnOnce(MatRef<'_, T>) -> R,
    ) -> R;

    /// Whole groups of a slice; the remainder is dropped.
    #[cfg(target_arch = "x86_64")]
    fn groups<S: Isa>(slice: &[Self]) -> &[Self::Group<S>];

    /// A register with the elements of a group, widened.
    #[cfg(target_arch = "x86_64")]
    fn widen<S: Isa>(simd: S, group: Self::Group<S>) -> T::Register<S>;

    /// Computes `c = alpha a b + start` of operands that are rounded to bf16, if `T` is `f32`.
    fn product_of_halves(
        threads: &Threads,
        alpha: T,
        operands: (MatRef<'_, T>, MatRef<'_, Self>),
        start: Start<'_, T>,
        c: MatMut<'_, T>,
    );

    /// Computes `c = alpha a b + start` on the matrix units of the processor.
    ///
    /// # Errors
    /// The processor has no matrix units for these types; `c` is unchanged.
    #[cfg(target_arch = "x86_64")]
    fn product_on_tiles<'c>(
        simd: V4,
        threads: &Threads,
        alpha: T,
        operands: (MatRef<'_, T>, MatRef<'_, Self>),
        start: Start<'_, T>,
        c: MatMut<'c, T>,
    ) -> Result<(), MatMut<'c, T>>;
}

impl<T: Float> Operand<T> for T {
    #[cfg(target_arch = "x86_64")]
    type Group<S: Isa> = T::Register<S>;

    #[inline(always)]
    fn wide(self) -> T {
        self
    }

    fn with_wide<R>(_: &Threads, matrix: MatRef<'_, T>, f: impl FnOnce(MatRef<'_, T>) -> R) -> R {
        f(matrix)
    }

    fn product_of_halves(
        threads: &Threads,
        alpha: T,
        operands: (MatRef<'_, T>, MatRef<'_, T>),
        start: Start<'_, T>,
        c: MatMut<'_, T>,
    ) {
        T::product_of_halves(threads, alpha, operands, start, c);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn groups<S: Isa>(slice: &[T]) -> &[T::Register<S>] {
        T::registers::<S>(slice)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn widen<S: Isa>(_: S, group: T::Register<S>) -> T::Register<S> {
        group
    }

    #[cfg(target_arch = "x86_64")]
    fn product_on_tiles<'c>(
        simd: V4,
        threads: &Threads,
        alpha: T,
        operands: (MatRef<'_, T>, MatRef<'_, T>),
        start: Start<'_, T>,
        c: MatMut<'c, T>,
    ) -> Result<(), MatMut<'c, T>> {
        <T as Lanes>::product_on_tiles(simd, threads, alpha, operands, start, c)
    }
}

/// Calls `f` with a copy in `f32` of a matrix in the same order of memory; `copy` writes the lines
/// that are contiguous.
pub(super) fn with_copy<T: Copy, R>(
    threads: &Threads,
    matrix: MatRef<'_, T>,
    f: impl FnOnce(MatRef<'_, f32>) -> R,
    copy: impl FnOnce(MatRef<'_, T>, &mut [f32]),
) -> R {
    let is_turned = !matrix.has_contiguous_rows();
    let lines = if is_turned {
        matrix.transposed()
    } else {
        matrix
    };
    let (rows, cols) = (lines.rows(), lines.cols());
    threads.with_scratch(rows * cols, |memory: &mut [f32]| {
        copy(lines, memory);
        let copied = MatRef::new(memory, rows, cols);
        f(if is_turned {
            copied.transposed()
        } else {
            copied
        })
    })
}

impl Operand<f32> for bf16 {
    #[cfg(target_arch = "x86_64")]
    type Group<S: Isa> = S::Halves;

    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn with_wide<R>(
        threads: &Threads,
        matrix: MatRef<'_, bf16>,
        f: impl FnOnce(MatRef<'_, f32>) -> R,
    ) -> R {
        with_copy(threads, matrix, f, |lines, memory| {
            let rows = memory.chunks_exact_mut(lines.cols().max(1)).enumerate();
            rows.for_each(|(row, out)| widen(lines.row(row), out));
        })
    }

    fn product_of_halves(
        threads: &Threads,
        alpha: f32,
        operands: (MatRef<'_, f32>, MatRef<'_, bf16>),
        start: Start<'_, f32>,
        c: MatMut<'_, f32>,
    ) {
        product_of_halves(threads, alpha, operands, start, c);
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn groups<S: Isa>(slice: &[bf16]) -> &[S::Halves] {
        let len = size_of::<S::Halves>() / size_of::<bf16>();
        bytemuck::cast_slice(&slice[..slice.len() / len * len])
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn widen<S: Isa>(simd: S, group: S::Halves) -> S::f32s {
        simd.widen_bf16s(group)
    }

    #[cfg(target_arch = "x86_64")]
    fn product_on_tiles<'c>(
        simd: V4,
        threads: &Threads,
        alpha: f32,
        operands: (MatRef<'_, f32>, MatRef<'_, bf16>),
        start: Start<'_, f32>,
        c: MatMut<'c, f32>,
    ) -> Result<(), MatMut<'c, f32>> {
        amx::product::<_, _, { amx::SPLIT }>(simd, threads, alpha, operands, start, c)
    }
}

/// Widens each element, exactly.
pub fn widen<T: Float, N: Operand<T>>(narrow: &[N], wide: &mut [T]) {
    vectorize(
        #[inline(always)]
        || {
            for (wide, narrow) in wide.iter_mut().zip(narrow) {
                *wide = narrow.wide();
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{noise, on_any_threads};
    use super::super::{Write, gemm, gemm_bias};
    use super::*;

    fn narrow(seed: u64, len: usize) -> (Vec<bf16>, Vec<f32>) {
        let narrow: Vec<_> = noise::<f32>(seed, len)
            .into_iter()
            .map(bf16::from_f32)
            .collect();
        let wide = narrow.iter().map(|x| x.to_f32()).collect();
        (narrow, wide)
    }

    /// All layouts of a right operand of `k` rows and `n` columns.
    fn layouts<T: Float, W: Operand<T>>(b: &[W], k: usize, n: usize) -> [MatRef<'_, W>; 2] {
        [MatRef::new(b, k, n), MatRef::new(b, n, k).transposed()]
    }

    #[test]
    fn a_product_with_a_bf16_operand_has_the_bits_of_one_with_the_same_numbers_in_f32() {
        // A tile of any kind, a few rows, blocks that are packed, and odd edges of all of these.
        for (m, k, n) in [
            (1, 1, 1),
            (5, 0, 3),
            (3, 17, 2),
            (9, 40, 300),
            (1, 1030, 133),
            (3, 129, 300),
            (8, 500, 70),
            (47, 64, 301),
            (48, 32, 32),
            (97, 75, 70),
            (130, 600, 290),
        ] {
            let a = noise::<f32>(1, m * k);
            let ((b, wide), bias) = (narrow(2, k * n), noise::<f32>(3, n));
            let layouts = layouts::<f32, _>(&b, k, n)
                .into_iter()
                .zip(layouts::<f32, f32>(&wide, k, n));
            for (b, wide) in layouts {
                let expected = on_any_threads(|threads| {
                    let mut c = vec![f32::NAN; m * n];
                    gemm_bias(
                        threads,
                        MatRef::new(&a, m, k),
                        wide,
                        &bias,
                        MatMut::new(&mut c, m, n),
                    );
                    c
                });
                let found = on_any_threads(|threads| {
                    let mut c = vec![f32::NAN; m * n];
                    gemm_bias(
                        threads,
                        MatRef::new(&a, m, k),
                        b,
                        &bias,
                        MatMut::new(&mut c, m, n),
                    );
                    c
                });
                assert_eq!(found, expected, "{m} {k} {n}");
                let (mut found, mut expected) = (found, expected);
                let one = Threads::one();
                let a = MatRef::new(&a, m, k);
                gemm(
                    &one,
                    -0.5,
                    a,
                    wide,
                    Write::Add,
                    MatMut::new(&mut expected, m, n),
                );
                gemm(&one, -0.5, a, b, Write::Add, MatMut::new(&mut found, m, n));
                assert_eq!(found, expected, "{m} {k} {n}");
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn packed_multiply_adds_have_the_same_bits_with_any_registers_and_widen_too() {
        use super::super::{STRIP, blocked};
        use pulp::x86::V3;

        /// Rows of a strip whose sums fill 16 registers.
        const SHORT_STRIP: usize = 6;

        let Some(narrow_registers) = V3::try_new() else {
            return eprintln!("skipped: no AVX2");
        };
        let (m, k, n) = (60, 530, 75);
        let (a, (b, wide)) = (noise::<f32>(1, m * k), narrow(2, k * n));
        let layouts = layouts::<f32, _>(&b, k, n)
            .into_iter()
            .zip(layouts::<f32, f32>(&wide, k, n));
        for (b, wide) in layouts {
            let (a, one, start) = (MatRef::new(&a, m, k), Threads::one(), Start::Zero);
            let compute = |product: &dyn Fn(MatMut<'_, f32>)| {
                let mut c = vec![f32::NAN; m * n];
                product(MatMut::new(&mut c, m, n));
                c
            };
            let simd = narrow_registers;
            let expected = compute(&|c| {
                blocked::product::<_, _, _, SHORT_STRIP>(simd, &one, 1.0, (a, wide), start, c);
            });
            let found = compute(&|c| {
                blocked::product::<_, _, _, SHORT_STRIP>(simd, &one, 1.0, (a, b), start, c);
            });
            assert!(found == expected);
            let Some(simd) = V4::try_new() else {
                continue;
            };
            let found = compute(&|c| {
                blocked::product::<_, _, _, STRIP>(simd, &one, 1.0, (a, wide), start, c);
            });
            assert!(found == expected);
            let found = compute(&|c| {
                blocked::product::<_, _, _, STRIP>(simd, &one, 1.0, (a, b), start, c);
            });
            assert!(found == expected);
        }
    }

    #[test]
    fn infinities_and_nan_of_a_bf16_operand_reach_what_depends_on_them() {
        let (m, k, n) = (50, 64, 70);
        let (a, (mut b, mut wide)) = (noise::<f32>(1, m * k), narrow(2, k * n));
        for (at, value) in [(3 * n + 69, f32::INFINITY), (40 * n + 1, f32::NAN)] {
            (b[at], wide[at]) = (bf16::from_f32(value), value);
        }
        let bits = |c: Vec<f32>| {
            c.into_iter().map(|x| {
                if x.is_nan() {
                    f32::NAN.to_bits()
                } else {
                    x.to_bits()
                }
            })
        };
        let a = MatRef::new(&a, m, k);
        let (mut found, mut expected) = (vec![0.0; m * n], vec![0.0; m * n]);
        let (one, write) = (Threads::one(), Write::Replace);
        gemm(
            &one,
            1.0,
            a,
            MatRef::new(&wide, k, n),
            write,
            MatMut::new(&mut expected, m, n),
        );
        gemm(
            &one,
            1.0,
            a,
            MatRef::new(&b, k, n),
            write,
            MatMut::new(&mut found, m, n),
        );
        assert!(found.iter().any(|x| x.is_nan()) && found.iter().any(|x| x.is_infinite()));
        assert!(bits(found).eq(bits(expected)));
    }
}
