//! Registers of bf16 pairs (AVX-512-BF16): two neighbours along k in each lane of 32 bits.
#![expect(
    clippy::inline_always,
    reason = "registers stay registers only where these functions are inlined into their dispatch"
)]
#![expect(
    clippy::unused_self,
    reason = "holding a token shows that the processor has the instructions"
)]
#![expect(
    unsafe_code,
    reason = "functions of instructions that only some processors have"
)]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_permutexvar_epi16,
};

use pulp::{NullaryFnOnce, cast, f32x16, u32x16, x86::V4};

/// Elements that two registers of `f32` hold, or one of pairs.
pub(super) const PAIRED: usize = 32;

/// Shows that this processor has the instructions.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Pairs {
    pub(super) wide: V4,
}

impl Pairs {
    pub(super) fn try_new() -> Option<Self> {
        let wide = V4::try_new()?;
        is_x86_feature_detected!("avx512bf16").then_some(Self { wide })
    }

    /// Runs a function that is compiled for these instructions where it is inlined.
    #[inline(always)]
    pub(super) fn vectorize<F: NullaryFnOnce>(self, f: F) -> F::Output {
        #[target_feature(
            enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16"
        )]
        fn run<F: NullaryFnOnce>(f: F) -> F::Output {
            f.call()
        }
        // SAFETY: `self` shows that the processor has all of them.
        unsafe { run(f) }
    }

    /// `sum + a0 b0 + a1 b1` in each lane. Numbers below the normal ones count as zero.
    #[inline(always)]
    pub(super) fn dot(self, a: u32x16, b: u32x16, sum: f32x16) -> f32x16 {
        // SAFETY: `self` shows that the processor has the instruction.
        let sum = unsafe { _mm512_dpbf16_ps(cast(sum), bits_of(a), bits_of(b)) };
        cast(sum)
    }

    /// The elements of two registers, rounded, in their order.
    #[inline(always)]
    pub(super) fn neighbours(self, low: f32x16, high: f32x16) -> u32x16 {
        // SAFETY: `self` shows that the processor has the instruction.
        let halves = unsafe { _mm512_cvtne2ps_pbh(cast(high), cast(low)) };
        // SAFETY: both types are 64 bytes that may have any value.
        unsafe { std::mem::transmute::<__m512bh, u32x16>(halves) }
    }

    /// Pairs of the halves of a register: element i and element 16 + i.
    #[inline(always)]
    pub(super) fn deal(self, halves: u32x16) -> u32x16 {
        const FROM: [u16; PAIRED] = {
            let mut from = [0; PAIRED];
            let mut i = 0;
            while i < PAIRED {
                from[i] = (i / 2 + i % 2 * (PAIRED / 2)) as u16;
                i += 1;
            }
            from
        };
        // SAFETY: `self` shows that the processor has the instruction.
        let dealt: __m512i = unsafe { _mm512_permutexvar_epi16(cast(FROM), cast(halves)) };
        cast(dealt)
    }
}

#[inline(always)]
fn bits_of(pairs: u32x16) -> __m512bh {
    // SAFETY: both types are 64 bytes that may have any value.
    unsafe { std::mem::transmute::<u32x16, __m512bh>(pairs) }
}
