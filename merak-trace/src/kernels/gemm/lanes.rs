//! Vector registers, as the products use them.
#![expect(
    clippy::inline_always,
    reason = "registers stay registers only where these functions are inlined into their dispatch"
)]

use bytemuck::Pod;
use pulp::{
    Simd, cast,
    x86::{V3, V4},
};

use super::super::{MatMut, MatRef, Threads};
use super::Start;

/// An instruction set that has kernels for products: AVX2 with fused multiply-adds, or AVX-512.
pub trait Isa: Simd {
    /// Bits of as many 16-bit elements as a register has lanes of `f32`.
    type Halves: Pod;

    /// `a0 b0 a1 b1 ..`, over two registers.
    fn interleave_f32s(self, a: Self::f32s, b: Self::f32s) -> [Self::f32s; 2];
    /// `a0 b0 a1 b1 ..`, over two registers.
    fn interleave_f64s(self, a: Self::f64s, b: Self::f64s) -> [Self::f64s; 2];
    /// Widens bf16 bits to `f32`.
    fn widen_bf16s(self, bits: Self::Halves) -> Self::f32s;
}

impl Isa for V3 {
    type Halves = [u16; 8];

    #[inline(always)]
    fn interleave_f32s(self, a: Self::f32s, b: Self::f32s) -> [Self::f32s; 2] {
        let (avx, a, b) = (self.avx, cast(a), cast(b));
        // The unpacks work within each half of a register; only the last step crosses halves.
        let (low, high) = (avx._mm256_unpacklo_ps(a, b), avx._mm256_unpackhi_ps(a, b));
        [
            cast(avx._mm256_permute2f128_ps::<0x20>(low, high)),
            cast(avx._mm256_permute2f128_ps::<0x31>(low, high)),
        ]
    }

    #[inline(always)]
    fn interleave_f64s(self, a: Self::f64s, b: Self::f64s) -> [Self::f64s; 2] {
        let (avx, a, b) = (self.avx, cast(a), cast(b));
        let (low, high) = (avx._mm256_unpacklo_pd(a, b), avx._mm256_unpackhi_pd(a, b));
        [
            cast(avx._mm256_permute2f128_pd::<0x20>(low, high)),
            cast(avx._mm256_permute2f128_pd::<0x31>(low, high)),
        ]
    }

    #[inline(always)]
    fn widen_bf16s(self, bits: Self::Halves) -> Self::f32s {
        let wide = self.avx2._mm256_cvtepu16_epi32(cast(bits));
        cast(self.avx2._mm256_slli_epi32::<16>(wide))
    }
}

impl Isa for V4 {
    type Halves = [u16; 16];

    #[inline(always)]
    fn interleave_f32s(self, a: Self::f32s, b: Self::f32s) -> [Self::f32s; 2] {
        let low: [u32; 16] = [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23];
        let (a, b) = (cast(a), cast(b));
        [low, low.map(|lane| lane + 8)].map(
            #[inline(always)]
            |from| cast(self.avx512f._mm512_permutex2var_ps(a, cast(from), b)),
        )
    }

    #[inline(always)]
    fn interleave_f64s(self, a: Self::f64s, b: Self::f64s) -> [Self::f64s; 2] {
        let low: [u64; 8] = [0, 8, 1, 9, 2, 10, 3, 11];
        let (a, b) = (cast(a), cast(b));
        [low, low.map(|lane| lane + 4)].map(
            #[inline(always)]
            |from| cast(self.avx512f._mm512_permutex2var_pd(a, cast(from), b)),
        )
    }

    #[inline(always)]
    fn widen_bf16s(self, bits: Self::Halves) -> Self::f32s {
        let wide = self.avx512f._mm512_cvtepu16_epi32(cast(bits));
        cast(self.avx512f._mm512_slli_epi32::<16>(wide))
    }
}

/// An element type with registers.
pub trait Lanes: Pod {
    /// A register.
    type Register<S: Isa>: Pod;

    /// A register with one value in all lanes.
    fn splat<S: Isa>(simd: S, value: Self) -> Self::Register<S>;
    /// `a * b + c`, rounded once.
    fn mul_add<S: Isa>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
        c: Self::Register<S>,
    ) -> Self::Register<S>;
    /// `a0 b0 a1 b1 ..`, over two registers.
    fn interleave<S: Isa>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
    ) -> [Self::Register<S>; 2];
    /// Whole registers of a slice; the remainder is dropped.
    fn registers<S: Isa>(slice: &[Self]) -> &[Self::Register<S>];
    /// Whole registers of a slice; the remainder is dropped.
    fn registers_mut<S: Isa>(slice: &mut [Self]) -> &mut [Self::Register<S>];

    /// Computes `c = alpha a b + start` on the matrix units of the processor.
    ///
    /// # Errors
    /// The processor has no matrix units for this type; `c` is unchanged.
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
     $interleave:ident, $tiles:expr) => {
        impl Lanes for $type {
            type Register<S: Isa> = S::$register;

            #[inline(always)]
            fn splat<S: Isa>(simd: S, value: Self) -> S::$register {
                simd.$splat(value)
            }

            #[inline(always)]
            fn mul_add<S: Isa>(
                simd: S,
                a: S::$register,
                b: S::$register,
                c: S::$register,
            ) -> S::$register {
                simd.$mul_add(a, b, c)
            }

            #[inline(always)]
            fn interleave<S: Isa>(simd: S, a: S::$register, b: S::$register) -> [S::$register; 2] {
                simd.$interleave(a, b)
            }

            #[inline(always)]
            fn registers<S: Isa>(slice: &[Self]) -> &[S::$register] {
                S::$as(slice).0
            }

            #[inline(always)]
            fn registers_mut<S: Isa>(slice: &mut [Self]) -> &mut [S::$register] {
                S::$as_mut(slice).0
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
    f32s,
    splat_f32s,
    mul_add_f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    interleave_f32s,
    super::amx::product::<_, _, { super::amx::SPLIT }>
);
lanes!(
    f64,
    f64s,
    splat_f64s,
    mul_add_f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    interleave_f64s,
    |_, _, _, _, _, c| Err(c)
);
