//! Sums, products and copies, element by element.
#![expect(
    clippy::inline_always,
    reason = "an element's function vectorises only where it is inlined into a dispatched loop"
)]

use super::{Float, Threads};

/// Elements per unit of parallel work.
pub(super) const CHUNK: usize = 16 * 1024;

/// Computes `out = x + y`.
///
/// # Panics
///
/// If the lengths differ.
pub fn add<T: Float>(threads: &Threads, x: &[T], y: &[T], out: &mut [T]) {
    map2(threads, x, y, out, |x, y| x + y);
}

/// Computes `out += x`.
///
/// # Panics
///
/// If the lengths differ.
pub fn add_assign<T: Float>(threads: &Threads, x: &[T], out: &mut [T]) {
    update(threads, x, out, |out, x| out + x);
}

/// Computes `out = x y`.
///
/// # Panics
///
/// If the lengths differ.
pub fn mul<T: Float>(threads: &Threads, x: &[T], y: &[T], out: &mut [T]) {
    map2(threads, x, y, out, |x, y| x * y);
}

/// Computes `out = factor x`.
///
/// # Panics
///
/// If the lengths differ.
pub fn scale<T: Float>(threads: &Threads, factor: T, x: &[T], out: &mut [T]) {
    map(threads, x, out, |x| factor * x);
}

/// Adds a tensor to each consecutive block of `x`: a bias, or position embeddings.
///
/// # Shapes
///
/// `x`, `out`: `[.., C]`; `rhs`: `[C]`, where C stands for all dimensions of the suffix.
///
/// # Panics
///
/// If the lengths differ or are not a whole number of blocks.
pub fn add_suffix<T: Float>(threads: &Threads, x: &[T], rhs: &[T], out: &mut [T]) {
    assert_eq!(x.len(), out.len(), "sums have the length of their terms");
    let Some(block) = (!rhs.is_empty()).then_some(rhs.len()) else {
        assert!(
            x.is_empty(),
            "an empty tensor is added to {} elements",
            x.len()
        );
        return;
    };
    assert!(x.len().is_multiple_of(block), "blocks of {block} elements");
    let chunks = x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)).enumerate();
    threads.for_each(chunks, |(chunk, (x, out))| {
        let mut done = 0;
        while done < x.len() {
            let rhs = &rhs[(chunk * CHUNK + done) % block..];
            let len = rhs.len().min(x.len() - done);
            add_slices(
                &x[done..done + len],
                &rhs[..len],
                &mut out[done..done + len],
            );
            done += len;
        }
    });
}

fn add_slices<T: Float>(x: &[T], y: &[T], out: &mut [T]) {
    T::vectorize(
        #[inline(always)]
        || {
            for (out, (&x, &y)) in out.iter_mut().zip(x.iter().zip(y)) {
                *out = x + y;
            }
        },
    );
}

/// Computes `out = f(x)` for each element.
#[inline(always)]
pub(super) fn map<T: Float>(
    threads: &Threads,
    x: &[T],
    out: &mut [T],
    f: impl Fn(T) -> T + Send + Sync,
) {
    update(threads, x, out, |_, x| f(x));
}

/// Computes `out = f(out, x)` for each element.
#[inline(always)]
fn update<T: Float>(
    threads: &Threads,
    x: &[T],
    out: &mut [T],
    f: impl Fn(T, T) -> T + Send + Sync,
) {
    assert_eq!(x.len(), out.len(), "the result has the length of the input");
    let chunks = x.chunks(CHUNK).zip(out.chunks_mut(CHUNK));
    threads.for_each(chunks, |(x, out)| {
        T::vectorize(
            #[inline(always)]
            || {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = f(*out, x);
                }
            },
        );
    });
}

/// Computes `out = f(x, y)` for each element.
#[inline(always)]
pub(super) fn map2<T: Float>(
    threads: &Threads,
    x: &[T],
    y: &[T],
    out: &mut [T],
    f: impl Fn(T, T) -> T + Send + Sync,
) {
    assert_eq!(x.len(), y.len(), "both inputs have one length");
    assert_eq!(
        x.len(),
        out.len(),
        "the result has the length of the inputs"
    );
    let chunks = x.chunks(CHUNK).zip(y.chunks(CHUNK));
    threads.for_each(chunks.zip(out.chunks_mut(CHUNK)), |((x, y), out)| {
        T::vectorize(
            #[inline(always)]
            || {
                for (out, (&x, &y)) in out.iter_mut().zip(x.iter().zip(y)) {
                    *out = f(x, y);
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{noise, on_any_threads};
    use super::*;

    #[test]
    fn sums_products_and_multiples_are_taken_element_by_element() {
        for len in [0, 1, 17, CHUNK + 3] {
            let (x, y) = (noise::<f32>(1, len), noise::<f32>(2, len));
            let run = |kernel: fn(&Threads, &[f32], &[f32], &mut [f32])| {
                on_any_threads(|threads| {
                    let mut out = y.clone();
                    kernel(threads, &x, &y, &mut out);
                    out
                })
            };
            let expect = |f: fn(f32, f32) -> f32| -> Vec<f32> {
                x.iter().zip(&y).map(|(&x, &y)| f(x, y)).collect()
            };
            assert_eq!(run(add), expect(|x, y| x + y));
            assert_eq!(run(mul), expect(|x, y| x * y));
            assert_eq!(
                run(|t, x, _, out| add_assign(t, x, out)),
                expect(|x, y| x + y)
            );
            assert_eq!(
                run(|t, x, _, out| scale(t, 3.0, x, out)),
                expect(|x, _| 3.0 * x)
            );
        }
    }

    #[test]
    fn a_suffix_is_added_to_every_block_across_chunk_borders() {
        for (blocks, len) in [(5, 1), (1, 7), (3, CHUNK + 1), (1000, 33)] {
            let (x, rhs) = (noise::<f32>(1, blocks * len), noise::<f32>(2, len));
            let out = on_any_threads(|threads| {
                let mut out = vec![0.0; x.len()];
                add_suffix(threads, &x, &rhs, &mut out);
                out
            });
            assert!((0..x.len()).all(|i| out[i] == x[i] + rhs[i % len]));
        }
    }
}
