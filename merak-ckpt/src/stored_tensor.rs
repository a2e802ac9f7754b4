//! Where a tensor lies in a file.

use crate::region::num_elements;
use crate::{DType, format};

/// Where a tensor lies in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its sizes, outermost first.
    pub shape: Vec<usize>,
    /// Elements from one index to the next of each dim, where the order is not row-major, as in a
    /// transposed tensor that `torch.save` wrote.
    pub strides: Option<Vec<usize>>,
    /// First byte in the file, and the one after the last; elements are little-endian.
    pub bytes: [u64; 2],
}

/// Bytes of a tensor of this shape, within the limits of the format.
pub(crate) fn checked_bytes(dtype: DType, shape: &[usize]) -> Option<usize> {
    let elements = num_elements(shape).filter(|&n| n <= isize::MAX as usize / 16)?;
    (shape.len() <= format::MAX_NDIM).then_some(elements * dtype.size_bytes())
}
