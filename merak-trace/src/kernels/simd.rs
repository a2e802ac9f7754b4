//! Plain loops, compiled for the processor that runs them.
//!
//! A kernel's inner loop is a closure (or an `inline(always)` function) given to
//! [`Float::vectorize`]: it is compiled once per instruction set and the best one is picked at run
//! time, up to AVX2 for `f64`. Sums run over a fixed number of lanes, so the order of additions,
//! and with it the result, is the same for every instruction set; multiply-adds are fused on all
//! of them.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use std::array;

use pulp::NullaryFnOnce;

use super::Float;

/// Lanes of a reduction: four registers of f32 with AVX-512, which hides the latency of an add.
const LANES: usize = 64;

/// A loop that is compiled for an instruction set where it is inlined into its dispatch.
///
/// A closure is inlined as its attribute says where it is called by reference. By value it is
/// called through a function of the compiler's, which is inlined only while it is small: a large
/// loop would run without the instructions.
pub(super) struct Body<F>(pub(super) F);

impl<R, F: FnMut() -> R> NullaryFnOnce for Body<F> {
    type Output = R;

    #[inline(always)]
    fn call(mut self) -> R {
        (self.0)()
    }
}

/// Runs `body` as compiled for the best instruction set of this processor.
#[inline]
pub(super) fn vectorize<R>(body: impl FnMut() -> R) -> R {
    pulp::Arch::new().dispatch(Body(body))
}

/// The same for loops over `f64`, with no more than AVX2 on x86: they are for checks of gradients,
/// and each instruction set takes room in a program.
#[inline]
pub(super) fn vectorize_wide<R>(body: impl FnMut() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    return match pulp::x86::V3::try_new() {
        Some(simd) => simd.vectorize(Body(body)),
        None => Body(body).call(),
    };
    #[cfg(not(target_arch = "x86_64"))]
    vectorize(body)
}

/// Folds slices of equal length. Lane `j` folds the elements j, j + 64, j + 128 and so on; pairs of
/// lanes are then combined until one is left. The order depends on the length alone.
#[inline(always)]
fn fold<T: Float, const N: usize>(
    slices: [&[T]; N],
    start: T,
    step: impl Fn(T, [T; N]) -> T,
    combine: impl Fn(T, T) -> T,
) -> T {
    let len = slices[0].len();
    let slices = slices.map(|slice| &slice[..len]);
    let mut body = [start; LANES];
    let full = len / LANES * LANES;
    for base in (0..full).step_by(LANES) {
        let blocks: [&[T; LANES]; N] = slices.map(|slice| {
            let block = &slice[base..base + LANES];
            block
                .try_into()
                .expect("a block has the length of the lanes")
        });
        body = array::from_fn(
            #[inline(always)]
            |lane| step(body[lane], array::from_fn(|s| blocks[s][lane])),
        );
    }
    // A copy of the lanes, so that the compiler can keep those of the loop above in registers.
    let mut lanes = body;
    for (lane, i) in lanes.iter_mut().zip(full..len) {
        *lane = step(*lane, array::from_fn(|s| slices[s][i]));
    }
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = lanes.split_at_mut(width);
        for (low, high) in low.iter_mut().zip(high) {
            *low = combine(*low, *high);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of `term` over the elements of slices of one length.
#[inline(always)]
pub(super) fn sum<T: Float, const N: usize>(slices: [&[T]; N], term: impl Fn([T; N]) -> T) -> T {
    fold(slices, T::ZERO, |acc, x| acc + term(x), |a, b| a + b)
}

/// Sum of products of two slices of one length.
#[inline(always)]
pub(super) fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    fold([x, y], T::ZERO, |acc, [x, y]| x.fma(y, acc), |a, b| a + b)
}

/// Largest element, or minus infinity if there is none. NaN is ignored.
#[inline(always)]
pub(super) fn max<T: Float>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    fold([x], T::NEG_INFINITY, |acc, [x]| larger(acc, x), larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folds_cover_each_element_once_at_every_length() {
        for len in [0, 1, 63, 64, 65, 129, 1000] {
            let x: Vec<f64> = (0..len).map(f64::from).collect();
            let n = f64::from(len);
            assert_eq!(sum([&x], |[x]| x), n * (n - 1.0) / 2.0);
            assert_eq!(dot(&x, &x), (n - 1.0) * n * (2.0 * n - 1.0) / 6.0);
            let expected = if len == 0 { f64::NEG_INFINITY } else { n - 1.0 };
            assert_eq!(max(&x), expected);
        }
    }
}
