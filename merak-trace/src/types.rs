//! Shapes and element types of the values of a graph.

use merak_mpu::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The static type of a value: its shape and the type of its elements.
///
/// ```
/// use merak_trace::{DType, TensorType};
/// let ty = TensorType::new([2, 3], DType::F32);
/// assert_eq!(ty.to_string(), "f32[2, 3]");
/// assert_eq!(ty.size_bytes(), 24);
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorType {
    /// Sizes of the dimensions, slowest first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
}

impl TensorType {
    /// Makes a type from its shape and element type.
    pub fn new(shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
        }
    }

    /// Makes the type of a single number.
    pub fn scalar(dtype: DType) -> Self {
        Self::new([], dtype)
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes that the elements take.
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Whether memory can hold it: at most 2^47 bytes, all that a process can address. Sums and
    /// products of the sizes of a few such types do not overflow.
    pub fn is_addressable(&self) -> bool {
        let bytes = self
            .shape
            .iter()
            .try_fold(self.dtype.size_bytes(), |bytes, &size| {
                bytes.checked_mul(size)
            });
        bytes.is_some_and(|bytes| bytes <= isize::MAX as usize >> 16)
    }

    /// The size of the last dimension, 1 for a scalar.
    pub fn last_dim(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The number of rows when the last dimension counts as columns.
    pub fn rows(&self) -> usize {
        self.shape
            .split_last()
            .map_or(1, |(_, rest)| rest.iter().product())
    }

    /// The same element type with another shape.
    #[must_use]
    pub fn with_shape(&self, shape: impl Into<Vec<usize>>) -> Self {
        Self::new(shape, self.dtype)
    }

    /// The same shape with dimension `dim` of size `size`.
    #[must_use]
    pub fn with_dim(&self, dim: usize, size: usize) -> Self {
        let mut ty = self.clone();
        ty.shape[dim] = size;
        ty
    }

    /// The number of elements between neighbours along `dim`.
    pub fn inner(&self, dim: usize) -> usize {
        self.shape[dim + 1..].iter().product()
    }

    /// The number of positions before `dim`.
    pub fn outer(&self, dim: usize) -> usize {
        self.shape[..dim].iter().product()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_overflow_are_not_addressable() {
        let addressable = |shape: &[usize]| TensorType::new(shape, DType::F32).is_addressable();
        assert!(addressable(&[]) && addressable(&[1 << 20, 1 << 20]) && addressable(&[0, 8]));
        assert!(!addressable(&[1 << 24, 1 << 24]));
        assert!(!addressable(&[usize::MAX, 2]) && !addressable(&[usize::MAX / 4, 3, 5]));
    }
}
