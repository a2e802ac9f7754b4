//! Helpers of the kernels' tests.
use super::{Float, Threads};

/// Values in -1 to 1 that look random and are the same everywhere.
pub(super) fn noise<T: Float>(seed: u64, len: usize) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            T::from_f64(f64::from((state >> 40) as u32) / f64::from(1 << 23) - 1.0)
        })
        .collect()
}

pub(super) fn to_f64<T: Float>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Transposes a matrix: `x: [rows, cols]`.
pub(super) fn transposed<T: Copy>(rows: usize, cols: usize, x: &[T]) -> Vec<T> {
    (0..rows * cols)
        .map(|i| x[i % rows * cols + i / rows])
        .collect()
}

/// A matrix product by its definition: `a: [m, k]`, `b: [k, n]`.
pub(super) fn product_of((m, k, n): (usize, usize, usize), a: &[f64], b: &[f64]) -> Vec<f64> {
    let product = |i: usize, p: usize| a[i / n * k + p] * b[p * n + i % n];
    let element = |i| (0..k).map(|p| product(i, p)).sum();
    (0..m * n).map(element).collect()
}

/// Every element within `tolerance` of the expected one, relative to it or to one.
#[track_caller]
pub(super) fn assert_close<T: Float>(actual: &[T], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (actual, &expected)) in actual.iter().zip(expected).enumerate() {
        let actual = actual.to_f64();
        assert!(
            (actual - expected).abs() <= tolerance * expected.abs().max(1.0),
            "element {i}: {actual} instead of {expected}"
        );
    }
}

/// The result of `kernel` on one thread, after checking that two and three give the same bits.
#[track_caller]
pub(super) fn on_any_threads<T: Float>(kernel: impl Fn(&Threads) -> Vec<T>) -> Vec<T> {
    let bits = |x: &[T]| x.iter().map(|x| x.to_f64().to_bits()).collect::<Vec<_>>();
    let one = kernel(&Threads::one());
    for num_threads in [2, 3] {
        let several = kernel(&Threads::new(num_threads).unwrap());
        assert!(bits(&one) == bits(&several), "{num_threads} threads differ");
    }
    one
}

/// Checks `gradient` of `sum(weights * f(x))` against central differences at a sample of elements.
#[track_caller]
pub(super) fn assert_gradient(
    x: &[f64],
    weights: &[f64],
    f: impl Fn(&[f64]) -> Vec<f64>,
    gradient: &[f64],
) {
    assert_eq!(x.len(), gradient.len());
    let objective = |x: &[f64]| f(x).iter().zip(weights).map(|(y, w)| y * w).sum::<f64>();
    let step = 1e-5;
    for i in (0..x.len()).step_by((x.len() / 40).max(1)) {
        let mut moved = x.to_vec();
        moved[i] = x[i] + step;
        let up = objective(&moved);
        moved[i] = x[i] - step;
        let expected = (up - objective(&moved)) / (2.0 * step);
        assert!(
            (gradient[i] - expected).abs() <= 1e-7 * expected.abs().max(1.0),
            "element {i}: gradient {} instead of {expected}",
            gradient[i]
        );
    }
}
