//! Registers of AVX-512, as the products use them.

use bytemuck::Pod;
use pulp::{Simd, x86::V4};

use super::super::{MatMut, MatRef, Threads};
use super::Start;

/// An element type with registers of AVX-512.
pub trait Lanes: Pod {
    /// A register.
    type Register: Pod;

    /// A register with one value in all lanes.
    fn splat(simd: V4, value: Self) -> Self::Register;
    /// `a * b + c`, rounded once.
    fn mul_add(simd: V4, a: Self::Register, b: Self::Register, c: Self::Register)
    -> Self::Register;
    /// `a0 b0 a1 b1 ..`, over two registers.
    fn interleave(simd: V4, a: Self::Register, b: Self::Register) -> [Self::Register; 2];
    /// Whole registers of a slice; what is left over is dropped.
    fn registers(slice: &[Self]) -> &[Self::Register];
    /// Whole registers of a slice; what is left over is dropped.
    fn registers_mut(slice: &mut [Self]) -> &mut [Self::Register];

    /// Computes `c = alpha a b + start` on the matrix units of the processor.
    ///
    /// # Errors
    /// There are no such units, or not for this type; `c` is as it was.
    fn product_on_tiles<'c>(
        simd: V4,
        threads: &Threads,
        alpha: Self,
        operands: (MatRef<'_, Self>, MatRef<'_, Self>),
        start: Start<'_, Self>,
        c: MatMut<'c, Self>,
    ) -> Result<(), MatMut<'c, Self>>;
}

macro_rules! lanes {
    ($type:ident, $register:ident, $splat:ident, $mul_add:ident, $as:ident, $as_mut:ident,
     $permute:ident, $index:ident, $low:expr, $high:expr, $tiles:expr) => {
        impl Lanes for $type {
            type Register = pulp::$register;

            #[inline(always)]
            fn splat(simd: V4, value: Self) -> Self::Register {
                simd.$splat(value)
            }

            #[inline(always)]
            fn mul_add(
                simd: V4,
                a: Self::Register,
                b: Self::Register,
                c: Self::Register,
            ) -> Self::Register {
                simd.$mul_add(a, b, c)
            }

            #[inline(always)]
            fn interleave(simd: V4, a: Self::Register, b: Self::Register) -> [Self::Register; 2] {
                let (low, high): ([$index; _], [$index; _]) = ($low, $high);
                let (a, b) = (pulp::cast(a), pulp::cast(b));
                [low, high].map(
                    #[inline(always)]
                    |from| pulp::cast(simd.avx512f.$permute(a, pulp::cast(from), b)),
                )
            }

            #[inline(always)]
            fn registers(slice: &[Self]) -> &[Self::Register] {
                V4::$as(slice).0
            }

            #[inline(always)]
            fn registers_mut(slice: &mut [Self]) -> &mut [Self::Register] {
                V4::$as_mut(slice).0
            }

            fn product_on_tiles<'c>(
                simd: V4,
                threads: &Threads,
                alpha: Self,
                operands: (MatRef<'_, Self>, MatRef<'_, Self>),
                start: Start<'_, Self>,
                c: MatMut<'c, Self>,
            ) -> Result<(), MatMut<'c, Self>> {
                $tiles(simd, threads, alpha, operands, start, c)
            }
        }
    };
}

lanes!(
    f32,
    f32x16,
    splat_f32s,
    mul_add_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    _mm512_permutex2var_ps,
    u32,
    [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23],
    [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31],
    super::amx::product
);
lanes!(
    f64,
    f64x8,
    splat_f64s,
    mul_add_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    _mm512_permutex2var_pd,
    u64,
    [0, 8, 1, 9, 2, 10, 3, 11],
    [4, 12, 5, 13, 6, 14, 7, 15],
    |_, _, _, _, _, c| Err(c)
);
