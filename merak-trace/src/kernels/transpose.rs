//! Dimensions in another order.

use super::{Threads, rows::rows_per_chunk};

/// Copies a tensor with its dimensions in another order: dimension `i` of `out` is dimension
/// `perm[i]` of `x`.
///
/// # Shapes
///
/// `x`: of `shape`; `out`: of the sizes `shape[perm[i]]`.
///
/// # Panics
///
/// If `perm` is no order of the dimensions, or the lengths differ from the shape's.
pub fn transpose<T: Copy + Send + Sync>(
    threads: &Threads,
    shape: &[usize],
    perm: &[usize],
    x: &[T],
    out: &mut [T],
) {
    let len: usize = shape.iter().product();
    assert_eq!((x.len(), out.len()), (len, len), "tensors of {shape:?}");
    assert_eq!(perm.len(), shape.len(), "{perm:?} orders {shape:?}");
    // The size of each dimension of `out`, and the elements of `x` between its neighbours.
    let dims = perm.iter().map(|&dim| Dim {
        size: shape[dim],
        stride: shape[dim + 1..].iter().product(),
    });
    let dims: Vec<Dim> = dims.collect();
    let Some((last, outer)) = dims.split_last().filter(|_| len > 0) else {
        out.copy_from_slice(x);
        return;
    };
    let rows = rows_per_chunk(last.size);
    let chunks = out.chunks_mut(rows * last.size).enumerate();
    threads.for_each(chunks, |(chunk, out)| {
        for (i, out) in out.chunks_exact_mut(last.size).enumerate() {
            let x = &x[place(outer, chunk * rows + i)..];
            if last.stride == 1 {
                out.copy_from_slice(&x[..last.size]);
            } else {
                let column = x.iter().step_by(last.stride);
                out.iter_mut().zip(column).for_each(|(out, &x)| *out = x);
            }
        }
    });
}

struct Dim {
    size: usize,
    stride: usize,
}

/// Where the elements of a row begin.
fn place(outer: &[Dim], row: usize) -> usize {
    let (mut place, mut row) = (0, row);
    for dim in outer.iter().rev() {
        place += row % dim.size * dim.stride;
        row /= dim.size;
    }
    place
}

#[cfg(test)]
mod tests {
    use super::super::testing::on_any_threads;
    use super::*;

    /// Element by element, by the definition.
    fn expected(shape: &[usize], perm: &[usize], x: &[f32]) -> Vec<f32> {
        let stride = |dim: usize| shape[dim + 1..].iter().product::<usize>();
        let sizes: Vec<usize> = perm.iter().map(|&dim| shape[dim]).collect();
        let element = |place: usize| {
            let index = |i: usize| place / sizes[i + 1..].iter().product::<usize>() % sizes[i];
            x[(0..perm.len())
                .map(|i| index(i) * stride(perm[i]))
                .sum::<usize>()]
        };
        (0..x.len()).map(element).collect()
    }

    #[test]
    fn elements_follow_the_order_of_the_dimensions() {
        let cases: [(&[usize], &[usize]); 8] = [
            (&[], &[]),
            (&[5], &[0]),
            (&[3, 0, 2], &[2, 1, 0]),
            (&[150, 230], &[1, 0]),
            (&[2, 3, 4], &[0, 2, 1]),
            (&[2, 3, 4], &[2, 0, 1]),
            (&[2, 1, 4, 3], &[1, 3, 0, 2]),
            (&[5, 3, 8, 8, 8, 8], &[0, 2, 4, 1, 3, 5]),
        ];
        for (shape, perm) in cases {
            let len: usize = shape.iter().product();
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let y = on_any_threads(|threads| {
                let mut y = vec![f32::NAN; len];
                transpose(threads, shape, perm, &x, &mut y);
                y
            });
            assert_eq!(y, expected(shape, perm, &x), "{shape:?} {perm:?}");
        }
    }
}
