//! Activation functions, element by element.
#![expect(
    clippy::inline_always,
    reason = "these functions vectorise only where they are inlined into a dispatched loop"
)]

use super::elementwise::{map, map2};
use super::{Activation, Float, Threads};

/// Computes `y = f(x)`; NaN gives NaN.
///
/// # Panics
///
/// If the lengths differ.
pub fn activation<T: Float>(threads: &Threads, kind: Activation, x: &[T], y: &mut [T]) {
    match kind {
        Activation::Relu => map(threads, x, y, |x| if x < T::ZERO { T::ZERO } else { x }),
        Activation::GeluErf => map(threads, x, y, |x| x * x.normal_cdf_pdf().0),
        Activation::GeluTanh => map(threads, x, y, |x| x * gelu_argument(x).0.sigmoid()),
        Activation::Silu => map(threads, x, y, |x| x * x.sigmoid()),
        Activation::Tanh => map(threads, x, y, Float::tanh),
    }
}

/// Computes `dx = dy f'(x)` from the input of [`activation`].
///
/// # Panics
///
/// If the lengths differ.
pub fn activation_grad<T: Float>(
    threads: &Threads,
    kind: Activation,
    x: &[T],
    dy: &[T],
    dx: &mut [T],
) {
    match kind {
        Activation::Relu => map2(
            threads,
            x,
            dy,
            dx,
            |x, dy| {
                if x <= T::ZERO { T::ZERO } else { dy }
            },
        ),
        Activation::GeluErf => map2(threads, x, dy, dx, |x, dy| {
            let (cdf, pdf) = x.normal_cdf_pdf();
            dy * x.fma(pdf, cdf)
        }),
        Activation::GeluTanh => map2(threads, x, dy, dx, |x, dy| {
            let (argument, inner_slope) = gelu_argument(x);
            let (value, slope) = sigmoid_and_slope(argument);
            dy * (x * slope).fma(inner_slope, value)
        }),
        Activation::Silu => map2(threads, x, dy, dx, |x, dy| dy * silu_and_slope(x).1),
        Activation::Tanh => map2(threads, x, dy, dx, |x, dy| {
            let y = Float::tanh(x);
            dy * (T::ONE - y * y)
        }),
    }
}

/// Computes `y = silu(gate) up`, the gate of [SwiGLU](https://arxiv.org/abs/2002.05202).
///
/// # Panics
///
/// If the lengths differ.
pub fn silu_mul<T: Float>(threads: &Threads, gate: &[T], up: &[T], y: &mut [T]) {
    map2(threads, gate, up, y, |gate, up| gate * gate.sigmoid() * up);
}

/// Gradients of [`silu_mul`] with respect to both inputs.
///
/// # Panics
///
/// If the lengths differ.
pub fn silu_mul_grad<T: Float>(
    threads: &Threads,
    gate: &[T],
    up: &[T],
    dy: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    const CHUNK: usize = super::elementwise::CHUNK;
    for len in [up.len(), dy.len(), dgate.len(), dup.len()] {
        assert_eq!(len, gate.len(), "all have one length");
    }
    let inputs = gate
        .chunks(CHUNK)
        .zip(up.chunks(CHUNK))
        .zip(dy.chunks(CHUNK));
    let outputs = dgate.chunks_mut(CHUNK).zip(dup.chunks_mut(CHUNK));
    threads.for_each(inputs.zip(outputs), |(((gate, up), dy), (dgate, dup))| {
        T::vectorize(
            #[inline(always)]
            || {
                let inputs = gate.iter().zip(up).zip(dy);
                let outputs = dgate.iter_mut().zip(&mut *dup);
                for (((&gate, &up), &dy), (dgate, dup)) in inputs.zip(outputs) {
                    let (value, slope) = silu_and_slope(gate);
                    *dgate = dy * up * slope;
                    *dup = dy * value;
                }
            },
        );
    });
}

/// Twice the argument of the tanh in GELU, and its derivative: `(1 + tanh(u)) / 2 = sigmoid(2 u)`.
#[inline(always)]
fn gelu_argument<T: Float>(x: T) -> (T, T) {
    let scale = T::from_f64(2.0 * (2.0 / std::f64::consts::PI).sqrt());
    let cubic = T::from_f64(0.044_715);
    let square = x * x;
    (
        scale * x * square.fma(cubic, T::ONE),
        scale * square.fma(T::from_f64(3.0) * cubic, T::ONE),
    )
}

/// The sigmoid `s` and its derivative. The derivative is not computed as `s (1 - s)`, which loses
/// digits where `s` is nearly one.
#[inline(always)]
fn sigmoid_and_slope<T: Float>(x: T) -> (T, T) {
    let small = Float::exp(if x > T::ZERO { -x } else { x });
    let inverse = T::ONE / (T::ONE + small);
    let value = if x > T::ZERO {
        inverse
    } else {
        small * inverse
    };
    (value, small * inverse * inverse)
}

#[inline(always)]
fn silu_and_slope<T: Float>(x: T) -> (T, T) {
    let (value, slope) = sigmoid_and_slope(x);
    (x * value, x.fma(slope, value))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_gradient, noise, on_any_threads, to_f64};
    use super::*;

    const KINDS: [Activation; 5] = [
        Activation::Relu,
        Activation::GeluErf,
        Activation::GeluTanh,
        Activation::Silu,
        Activation::Tanh,
    ];

    fn wide_noise<T: Float>(seed: u64, len: usize) -> Vec<T> {
        let x = noise::<T>(seed, len);
        x.into_iter().map(|x| x * T::from_f64(8.0)).collect()
    }

    fn definition(kind: Activation, x: f64) -> f64 {
        match kind {
            Activation::Relu => x.max(0.0),
            Activation::GeluErf => x * x.normal_cdf_pdf().0,
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + f64::tanh(u))
            }
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Tanh => f64::tanh(x),
        }
    }

    #[test]
    fn values_match_the_definitions() {
        for kind in KINDS {
            for len in [0, 1, 31, 40_000] {
                let x = wide_noise::<f32>(1, len);
                let y = on_any_threads(|threads| {
                    let mut y = vec![0.0; len];
                    activation(threads, kind, &x, &mut y);
                    y
                });
                let expected: Vec<f64> = to_f64(&x).iter().map(|&x| definition(kind, x)).collect();
                assert_close(&y, &expected, 1e-6);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences_and_single_precision_matches_double() {
        for kind in KINDS {
            let (x, dy) = (wide_noise::<f64>(2, 200), noise::<f64>(3, 200));
            let mut dx = vec![0.0; 200];
            activation_grad(&Threads::one(), kind, &x, &dy, &mut dx);
            let f = |x: &[f64]| x.iter().map(|&x| definition(kind, x)).collect();
            assert_gradient(&x, &dy, f, &dx);

            let single = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
            let (x, dy) = (single(&x), single(&dy));
            let dx32 = on_any_threads(|threads| {
                let mut dx = vec![0.0; 200];
                activation_grad(threads, kind, &x, &dy, &mut dx);
                dx
            });
            assert_close(&dx32, &dx, 3e-6);
        }
    }

    #[test]
    fn gated_silu_is_silu_times_up_with_gradients_for_both() {
        let (gate, up, dy) = (
            wide_noise::<f64>(4, 99),
            noise::<f64>(5, 99),
            noise::<f64>(6, 99),
        );
        let f = |gate: &[f64], up: &[f64]| {
            let mut y = vec![0.0; 99];
            silu_mul(&Threads::one(), gate, up, &mut y);
            y
        };
        let expected: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(&g, u)| definition(Activation::Silu, g) * u)
            .collect();
        assert_close(&f(&gate, &up), &expected, 1e-14);
        let both = on_any_threads(|threads| {
            let (mut dgate, mut dup) = (vec![0.0; 99], vec![0.0; 99]);
            silu_mul_grad(threads, &gate, &up, &dy, &mut dgate, &mut dup);
            [dgate, dup].concat()
        });
        assert_gradient(&gate, &dy, |gate| f(gate, &up), &both[..99]);
        assert_gradient(&up, &dy, |up| f(&gate, up), &both[99..]);
    }

    #[test]
    fn special_values_follow_the_formulas() {
        let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for kind in KINDS {
            let mut y = [0.0; 3];
            activation(&Threads::one(), kind, &x, &mut y);
            assert!(y[0].is_nan(), "{kind:?}");
            match kind {
                Activation::Relu => assert_eq!(y[1..], [f32::INFINITY, 0.0]),
                Activation::Tanh => assert_eq!(y[1..], [1.0, -1.0]),
                _ => assert!(y[1] == f32::INFINITY && y[2].is_nan(), "{kind:?}"),
            }
        }
    }
}
