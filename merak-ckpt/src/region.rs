//! Boxes of tensors.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A box of a tensor: in each dim the indices `offset .. offset + size`.
///
/// Prints as `[0:4,8:16]`. The box of a tensor without dims has no dims either, and one element.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    /// First index in each dim.
    pub offset: Vec<usize>,
    /// Number of indices in each dim.
    pub size: Vec<usize>,
}

impl Region {
    /// The box that starts at `offset` and has `size` indices in each dim.
    pub fn new(offset: impl Into<Vec<usize>>, size: impl Into<Vec<usize>>) -> Self {
        Self {
            offset: offset.into(),
            size: size.into(),
        }
    }

    /// All of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Self::new(vec![0; shape.len()], shape)
    }

    /// Number of elements, or `None` where it exceeds `usize`.
    pub fn num_elements(&self) -> Option<usize> {
        num_elements(&self.size)
    }

    /// Whether the box is all of a tensor of this shape.
    pub fn is_whole(&self, shape: &[usize]) -> bool {
        self.size == shape && self.offset.iter().all(|&offset| offset == 0)
    }

    /// Whether the box has the dims of `shape` and ends within each of them.
    pub fn is_within(&self, shape: &[usize]) -> bool {
        self.offset.len() == shape.len()
            && self.size.len() == shape.len()
            && (0..shape.len()).all(|dim| {
                self.offset[dim]
                    .checked_add(self.size[dim])
                    .is_some_and(|end| end <= shape[dim])
            })
    }

    /// The elements that both boxes hold, or `None` where there are none.
    ///
    /// Both must have the same number of dims and lie within one tensor.
    pub(crate) fn intersection(&self, other: &Self) -> Option<Self> {
        let mut common = Self::new(Vec::new(), Vec::new());
        for dim in 0..self.size.len() {
            let begin = self.offset[dim].max(other.offset[dim]);
            let end = self.end(dim).min(other.end(dim));
            if begin >= end {
                return None;
            }
            common.offset.push(begin);
            common.size.push(end - begin);
        }
        Some(common)
    }

    /// One past the last index in `dim`.
    pub(crate) fn end(&self, dim: usize) -> usize {
        self.offset[dim] + self.size[dim]
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, (offset, size)) in self.offset.iter().zip(&self.size).enumerate() {
            let comma = if dim == 0 { "" } else { "," };
            write!(f, "{comma}{offset}:{}", offset.saturating_add(*size))?;
        }
        f.write_str("]")
    }
}

/// Number of elements of a shape, or `None` where it exceeds `usize`.
pub(crate) fn num_elements(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape
        .iter()
        .try_fold(1_usize, |n, &size| n.checked_mul(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_print_as_half_open_ranges() {
        assert_eq!(Region::new([0, 8], [4, 8]).to_string(), "[0:4,8:16]");
        assert_eq!(Region::whole(&[]).to_string(), "[]");
    }

    #[test]
    fn boxes_that_only_touch_do_not_intersect() {
        let left = Region::new([0, 0], [4, 4]);
        assert_eq!(left.intersection(&Region::new([0, 4], [4, 4])), None);
        assert_eq!(
            left.intersection(&Region::new([2, 3], [4, 4])),
            Some(Region::new([2, 3], [2, 1]))
        );
    }

    #[test]
    fn bounds_hold_for_absurd_numbers() {
        assert!(!Region::new([usize::MAX], [2]).is_within(&[usize::MAX]));
        assert_eq!(num_elements(&[usize::MAX, 2]), None);
        assert_eq!(num_elements(&[usize::MAX, 2, 0]), Some(0));
    }
}
