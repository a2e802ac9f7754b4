//! Element-wise reduction of several buffers, in blocks that stay in the first cache.

use crate::{DType, Element, ReduceOp};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use std::ops::Range;

/// Elements that are folded at once.
const BLOCK: usize = 1024;

/// Folds `memory[0]`, `memory[1]`, .. `memory[inputs - 1]` in this order and writes the result to
/// `memory[targets]`. All slices are of one length and aligned for `dtype`.
pub(crate) fn reduce(
    dtype: DType,
    op: ReduceOp,
    inputs: usize,
    memory: &mut [&mut [u8]],
    targets: Range<usize>,
) {
    match dtype {
        DType::F64 => reduce_as::<f64>(op, inputs, memory, targets),
        DType::F32 => reduce_as::<f32>(op, inputs, memory, targets),
        DType::BF16 => reduce_as::<bf16>(op, inputs, memory, targets),
        DType::F16 => reduce_as::<f16>(op, inputs, memory, targets),
        DType::I64 => reduce_as::<i64>(op, inputs, memory, targets),
        DType::U32 => reduce_as::<u32>(op, inputs, memory, targets),
        DType::U8 => reduce_as::<u8>(op, inputs, memory, targets),
    }
}

fn reduce_as<T: Fold>(
    op: ReduceOp,
    inputs: usize,
    memory: &mut [&mut [u8]],
    targets: Range<usize>,
) {
    let len = memory.first().map_or(0, |slice| slice.len()) / size_of::<T>();
    let mut scratch = [T::Sum::default(); BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let end = (start + BLOCK).min(len);
        let bytes = start * size_of::<T>()..end * size_of::<T>();
        let sum = &mut scratch[..end - start];
        for (rank, slice) in memory[..inputs].iter().enumerate() {
            let elements: &[T] = bytemuck::cast_slice(&slice[bytes.clone()]);
            if rank == 0 {
                T::load(sum, elements);
            } else {
                T::fold(op, sum, elements);
            }
        }
        for slice in &mut memory[targets.clone()] {
            T::store(sum, bytemuck::cast_slice_mut(&mut slice[bytes.clone()]));
        }
    }
}

/// How elements of a type are summed up.
trait Fold: Element {
    /// The type of the running sum.
    type Sum: Copy + Default;

    fn load(sum: &mut [Self::Sum], elements: &[Self]);
    fn fold(op: ReduceOp, sum: &mut [Self::Sum], elements: &[Self]);
    fn store(sum: &[Self::Sum], elements: &mut [Self]);
}

/// Types that are their own sum. `x != x` is true for a NaN alone, which stays once it is in the
/// sum.
macro_rules! fold_as_itself {
    ($($type:ty: $add:expr),*) => {$(
        impl Fold for $type {
            type Sum = Self;

            fn load(sum: &mut [Self], elements: &[Self]) {
                sum.copy_from_slice(elements);
            }

            fn fold(op: ReduceOp, sum: &mut [Self], elements: &[Self]) {
                let pairs = sum.iter_mut().zip(elements);
                match op {
                    ReduceOp::Sum => pairs.for_each(|(sum, &x)| *sum = $add(*sum, x)),
                    ReduceOp::Max => pairs.for_each(|(sum, &x)| *sum = if x > *sum || is_nan(&x) { x } else { *sum }),
                    ReduceOp::Min => pairs.for_each(|(sum, &x)| *sum = if x < *sum || is_nan(&x) { x } else { *sum }),
                }
            }

            fn store(sum: &[Self], elements: &mut [Self]) {
                elements.copy_from_slice(sum);
            }
        }
    )*};
}
fold_as_itself!(
    f64: |a: f64, b: f64| a + b,
    f32: |a: f32, b: f32| a + b,
    i64: i64::wrapping_add,
    u32: u32::wrapping_add,
    u8: u8::wrapping_add
);

/// 16-bit floats, summed in f32 and rounded once.
macro_rules! fold_as_f32 {
    ($($type:ty),*) => {$(
        impl Fold for $type {
            type Sum = f32;

            fn load(sum: &mut [f32], elements: &[Self]) {
                elements.convert_to_f32_slice(sum);
            }

            fn fold(op: ReduceOp, sum: &mut [f32], elements: &[Self]) {
                let mut wide = [0.0; BLOCK];
                let wide = &mut wide[..elements.len()];
                elements.convert_to_f32_slice(wide);
                f32::fold(op, sum, wide);
            }

            fn store(sum: &[f32], elements: &mut [Self]) {
                elements.convert_from_f32_slice(sum);
            }
        }
    )*};
}
fold_as_f32!(bf16, f16);

/// Whether a number differs from itself.
fn is_nan<T: PartialOrd>(x: &T) -> bool {
    x.partial_cmp(x).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Fold>(op: ReduceOp, mut rows: Vec<Vec<T>>) -> Vec<T> {
        let n = rows.len();
        let mut memory: Vec<&mut [u8]> = rows
            .iter_mut()
            .map(|row| bytemuck::cast_slice_mut(row.as_mut_slice()))
            .collect();
        reduce(T::DTYPE, op, n, &mut memory, 0..n);
        let first = rows.swap_remove(0);
        for row in rows {
            assert_eq!(
                bytemuck::cast_slice::<T, u8>(&row),
                bytemuck::cast_slice::<T, u8>(&first)
            );
        }
        first
    }

    #[test]
    fn nan_on_any_rank_gives_nan() {
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            let out = reduced(
                op,
                vec![vec![f32::NAN, 1.0], vec![1.0, f32::NAN], vec![2.0, 2.0]],
            );
            assert!(out.iter().all(|x| x.is_nan()), "{op}: {out:?}");
        }
    }

    #[test]
    fn half_floats_are_rounded_once() {
        // 2048 + 1 + 1 is 2048 when each step is rounded to f16, whose steps there are 2.
        let rows = [2048.0, 1.0, 1.0].map(|x| vec![f16::from_f32(x)]).to_vec();
        assert_eq!(reduced(ReduceOp::Sum, rows), [f16::from_f32(2050.0)]);
    }

    #[test]
    fn integers_wrap_around() {
        assert_eq!(reduced(ReduceOp::Sum, vec![vec![250_u8], vec![10]]), [4]);
        assert_eq!(reduced(ReduceOp::Min, vec![vec![-3_i64], vec![10]]), [-3]);
        assert_eq!(reduced(ReduceOp::Max, vec![vec![3_u32], vec![10]]), [10]);
    }

    #[test]
    fn sums_run_in_ascending_rank_over_more_than_one_block() {
        let rows: Vec<Vec<f32>> = [1e8, 1.0, -1e8].map(|x| vec![x; 2 * BLOCK + 3]).to_vec();
        let expected = (1e8_f32 + 1.0) + -1e8;
        assert_eq!(reduced(ReduceOp::Sum, rows), vec![expected; 2 * BLOCK + 3]);
    }
}
