//! What several operations ask of their operands.

use crate::TensorType;
use merak_mpu::DType;

/// Why operands do not fit an operation.
pub(super) type Reason = String;

/// The types of the results.
pub(super) type Types = Result<Vec<TensorType>, Reason>;

/// The operands as an array, if there are `N`.
pub(super) fn operands<const N: usize>(inputs: &[TensorType]) -> Result<[&TensorType; N], Reason> {
    let refs: Vec<_> = inputs.iter().collect();
    refs.try_into()
        .map_err(|_| format!("takes {N} operands, got {}", inputs.len()))
}

/// The product of sizes, which a user may have named; `None` beyond all integers.
pub(super) fn product(sizes: &[usize]) -> Option<usize> {
    sizes
        .iter()
        .try_fold(1, |all: usize, &size| all.checked_mul(size))
}

pub(super) fn ensure(holds: bool, reason: impl FnOnce() -> Reason) -> Result<(), Reason> {
    if holds { Ok(()) } else { Err(reason()) }
}

pub(super) fn same(a: &TensorType, b: &TensorType) -> Result<(), Reason> {
    ensure(a == b, || format!("{a} and {b} differ"))
}

pub(super) fn is_float(x: &TensorType) -> Result<(), Reason> {
    ensure(x.dtype.is_float(), || format!("{x} is not of a float type"))
}

pub(super) fn is_ids(ids: &TensorType) -> Result<(), Reason> {
    ensure(ids.dtype == DType::I64, || {
        format!("ids are {ids}, not i64")
    })
}

pub(super) fn is_f64_scalar(x: &TensorType) -> Result<(), Reason> {
    same(&TensorType::scalar(DType::F64), x)
}

pub(super) fn has_ndim(x: &TensorType, ndim: usize) -> Result<(), Reason> {
    ensure(x.ndim() == ndim, || {
        format!("{x} has not {ndim} dimensions")
    })
}

pub(super) fn has_dim(x: &TensorType, dim: usize) -> Result<(), Reason> {
    ensure(dim < x.ndim(), || format!("{x} has no dimension {dim}"))
}

/// What scales or moves the elements of each row: a vector of `f32` fits 16-bit rows, and one of 16
/// bits rows of `f32`.
pub(super) fn is_vector_for(w: &TensorType, x: &TensorType) -> Result<(), Reason> {
    let expected = x.with_shape([x.last_dim()]);
    let fits = w.shape == expected.shape && stat_dtype(w) == stat_dtype(x);
    ensure(fits, || format!("expected {expected}, found {w}"))
}

pub(super) fn is_vector_of(x: &TensorType, len: usize, dtype: DType) -> Result<(), Reason> {
    let expected = TensorType::new([len], dtype);
    ensure(*x == expected, || format!("expected {expected}, found {x}"))
}

/// One statistic per row.
pub(super) fn rows_of(x: &TensorType) -> TensorType {
    TensorType::new([x.rows()], stat_dtype(x))
}

/// Statistics of 16-bit tensors are kept in `f32`.
pub(super) fn stat_dtype(x: &TensorType) -> DType {
    match x.dtype {
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    }
}
