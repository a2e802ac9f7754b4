//! How a rank's local tensor lies in the global one.

use crate::common_runs::{Side, for_each_run};
use crate::cut::share;
use crate::region::{Region, num_elements};
use crate::{Cut, Error, Result};
use std::convert::Infallible;
use std::ops::Range;

/// The place of a local tensor (the elements of a rank, row-major) in the global one.
///
/// A local tensor is made of [`Part`]s, boxes of the global tensor. Mostly there is one; a fused
/// `[q k v]` weight under tensor parallelism has three. Elements of the local tensor that are in
/// no part (the padding of a vocabulary) are neither written nor read.
///
/// ```
/// use merak_ckpt::Layout;
///
/// # fn main() -> Result<(), merak_ckpt::Error> {
/// // Rank 1 of tp = 2 of a fused q, k, v weight [8, 12]: columns 2..4, 6..8 and 10..12.
/// let layout = Layout::along(&[8, 12], 1, &[2..4, 6..8, 10..12])?;
/// assert_eq!(layout.local_shape(), [8, 6]);
/// assert_eq!(layout.parts().len(), 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    shape: Vec<usize>,
    local_shape: Vec<usize>,
    parts: Vec<Part>,
    cut: Option<Cut>,
}

/// One box of the global tensor and where it lies in the local one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The box of the global tensor.
    pub region: Region,
    /// Where the first element of the box lies in the local tensor, per dim.
    pub local_offset: Vec<usize>,
}

/// What a flat range of a local tensor holds of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartRange<'a> {
    pub(crate) part: &'a Part,
    /// Flat range within the part's box.
    pub(crate) range: Range<usize>,
}

impl Layout {
    /// A local tensor that is the whole global tensor.
    pub fn whole(shape: &[usize]) -> Self {
        Self {
            shape: shape.to_vec(),
            local_shape: shape.to_vec(),
            parts: vec![Part {
                region: Region::whole(shape),
                local_offset: vec![0; shape.len()],
            }],
            cut: None,
        }
    }

    /// A local tensor that is one box of the global tensor of this shape.
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where the box does not lie in the tensor.
    pub fn region(shape: &[usize], region: Region) -> Result<Self> {
        let local_shape = region.size.clone();
        let local_offset = vec![0; local_shape.len()];
        Self::new(
            shape,
            &local_shape,
            vec![Part {
                region,
                local_offset,
            }],
        )
    }

    /// A local tensor that is the range `range` of dim `dim` of the global tensor.
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where `dim` or the range is out of bounds.
    pub fn shard(shape: &[usize], dim: usize, range: Range<usize>) -> Result<Self> {
        Self::along(shape, dim, std::slice::from_ref(&range))
    }

    /// A local tensor that is the concatenation of `ranges` of dim `dim` of the global tensor: a
    /// fused tensor that is split per part.
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where `dim` or a range is out of bounds, or ranges overlap.
    pub fn along(shape: &[usize], dim: usize, ranges: &[Range<usize>]) -> Result<Self> {
        if dim >= shape.len() {
            return Err(invalid(shape, format!("it has no dim {dim}")));
        }
        let mut local_shape = shape.to_vec();
        local_shape[dim] = 0;
        let mut parts = Vec::with_capacity(ranges.len());
        for range in ranges {
            if range.start > range.end || range.end > shape[dim] {
                return Err(invalid(shape, format!("dim {dim} has no range {range:?}")));
            }
            let mut region = Region::whole(shape);
            region.offset[dim] = range.start;
            region.size[dim] = range.len();
            let mut local_offset = vec![0; shape.len()];
            local_offset[dim] = local_shape[dim];
            local_shape[dim] += range.len();
            parts.push(Part {
                region,
                local_offset,
            });
        }
        Self::new(shape, &local_shape, parts)
    }

    /// A local tensor of any parts.
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where a part does not lie in both tensors, two parts overlap in
    /// either, or a tensor has more elements than memory can hold.
    pub fn new(shape: &[usize], local_shape: &[usize], parts: Vec<Part>) -> Result<Self> {
        for sizes in [shape, local_shape] {
            if num_elements(sizes).is_none_or(|n| n > isize::MAX as usize / 16) {
                return Err(invalid(shape, format!("shape {sizes:?} is too large")));
            }
        }
        let locals: Vec<Region> = parts.iter().map(Part::local_region).collect();
        for (part, local) in parts.iter().zip(&locals) {
            if !part.region.is_within(shape) || !local.is_within(local_shape) {
                let Part { region, .. } = part;
                let reason = format!(
                    "part {region} at {local} is out of bounds of the local shape {local_shape:?}"
                );
                return Err(invalid(shape, reason));
            }
        }
        for (i, j) in (0..parts.len()).flat_map(|j| (0..j).map(move |i| (i, j))) {
            let (a, b) = (&parts[i].region, &parts[j].region);
            if a.intersection(b)
                .or(locals[i].intersection(&locals[j]))
                .is_some()
            {
                return Err(invalid(shape, format!("parts {a} and {b} overlap")));
            }
        }
        Ok(Self {
            shape: shape.to_vec(),
            local_shape: local_shape.to_vec(),
            parts,
            cut: None,
        })
    }

    /// Adds to the manifest how tensor parallelism cuts the tensor, which
    /// [`reshard`](crate::reshard) needs to cut for another degree. A writer of one rank notes the
    /// cut too; a tensor that every rank holds whole has none.
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where the cut does not fit the global shape.
    pub fn with_cut(self, cut: Cut) -> Result<Self> {
        cut.check(&self.shape)
            .map_err(|reason| invalid(&self.shape, reason))?;
        Ok(Self {
            cut: Some(cut),
            ..self
        })
    }

    /// How values lie that belong to this tensor, one for all along `dim`: the same parts and the
    /// same cut without that dim. Where the tensor is cut along `dim` itself, every rank has all
    /// of them.
    ///
    /// ```
    /// use merak_ckpt::{Cut, Layout};
    ///
    /// # fn main() -> Result<(), merak_ckpt::Error> {
    /// // Rank 1 of tp = 2 of a fused weight [12, 8], cut along its rows.
    /// let weight = Cut::new(0, [4, 4, 4]).layout(&[12, 8], 1, 2)?;
    /// let of_rows = weight.without_dim(1)?;
    /// assert_eq!((of_rows.shape(), of_rows.local_shape()), (&[12][..], &[6][..]));
    /// assert_eq!(of_rows.parts().len(), 3);
    /// assert_eq!(weight.without_dim(0)?, Layout::whole(&[8]));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where the tensor has no such dim, or parts of different boxes along
    /// it would lie at one place.
    pub fn without_dim(&self, dim: usize) -> Result<Self> {
        if dim >= self.shape.len() {
            return Err(invalid(&self.shape, format!("it has no dim {dim}")));
        }
        let without = |sizes: &[usize]| {
            let mut sizes = sizes.to_vec();
            sizes.remove(dim);
            sizes
        };
        let mut parts: Vec<Part> = Vec::new();
        for part in &self.parts {
            let left = Part {
                region: Region::new(without(&part.region.offset), without(&part.region.size)),
                local_offset: without(&part.local_offset),
            };
            if !parts.contains(&left) {
                parts.push(left);
            }
        }
        let left = Self::new(&without(&self.shape), &without(&self.local_shape), parts)?;
        match &self.cut {
            Some(cut) if cut.dim != dim => {
                let moved = cut.dim - usize::from(cut.dim > dim);
                left.with_cut(Cut::new(moved, cut.parts.clone()))
            }
            _ => Ok(left),
        }
    }

    /// The cut of the tensor by tensor parallelism, where that was noted.
    pub fn cut(&self) -> Option<&Cut> {
        self.cut.as_ref()
    }

    /// The shape of the global tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The shape of the local tensor.
    pub fn local_shape(&self) -> &[usize] {
        &self.local_shape
    }

    /// The boxes of the global tensor that the local one holds.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Number of elements of the local tensor.
    pub fn num_local_elements(&self) -> usize {
        num_elements(&self.local_shape).unwrap_or(usize::MAX)
    }

    /// What the flat range `range` of the local tensor holds of each part, empty ones left out.
    ///
    /// Row-major order of the local tensor restricted to a part is row-major order of its box,
    /// so a flat range of one is a flat range of the other.
    pub(crate) fn part_ranges(&self, range: &Range<usize>) -> Vec<PartRange<'_>> {
        self.parts
            .iter()
            .map(|part| PartRange {
                part,
                range: self.count_before(part, range.start)..self.count_before(part, range.end),
            })
            .filter(|found| !found.range.is_empty())
            .collect()
    }

    /// Number of elements of `part` that lie before flat index `end` of the local tensor.
    fn count_before(&self, part: &Part, end: usize) -> usize {
        let size = &part.region.size;
        if end >= self.num_local_elements() {
            return num_elements(size).unwrap_or(usize::MAX);
        }
        let (mut count, mut rest, mut stride) = (0, end, self.num_local_elements());
        let mut inner: usize = size.iter().product();
        for (dim, &size) in size.iter().enumerate() {
            stride /= self.local_shape[dim];
            inner = inner.checked_div(size).unwrap_or(0);
            let index = rest / stride;
            rest %= stride;
            let Some(local) = index.checked_sub(part.local_offset[dim]) else {
                return count;
            };
            count += local.min(size) * inner;
            if local >= size {
                return count;
            }
        }
        count
    }
}

impl Cut {
    /// What rank `rank` of `degree` holds of a tensor of this shape, with the cut noted.
    ///
    /// # Errors
    /// [`Error::InvalidLayout`] where the cut does not fit the shape.
    ///
    /// # Panics
    /// Where `rank` is not below `degree`.
    pub fn layout(&self, shape: &[usize], rank: usize, degree: usize) -> Result<Layout> {
        assert!(rank < degree, "rank {rank} of {degree}");
        // Checks the cut before the ranges are computed from it.
        let noted = Layout::whole(shape).with_cut(self.clone())?;
        if degree == 1 {
            return Ok(noted);
        }
        let mut begin = 0;
        let mut ranges = Vec::with_capacity(self.parts.len());
        for &size in &self.parts {
            let own = share(size, rank, degree);
            ranges.push(begin + own.start..begin + own.end);
            begin += size;
        }
        ranges.retain(|range| !range.is_empty());
        Layout::along(shape, self.dim, &ranges)?.with_cut(self.clone())
    }
}

impl Part {
    fn local_region(&self) -> Region {
        Region::new(self.local_offset.clone(), self.region.size.clone())
    }
}

impl PartRange<'_> {
    /// Calls `copy(local, part, len)` for each run of elements that is contiguous both in the
    /// local tensor and in the part's box; `local` counts from `local_start`, `part` from the
    /// start of the part's range.
    pub(crate) fn for_each_run(
        &self,
        local_shape: &[usize],
        local_range: &Range<usize>,
        mut copy: impl FnMut(usize, usize, usize),
    ) {
        let size = &self.part.region.size;
        let local = Side {
            shape: local_shape,
            start: &self.part.local_offset,
            window: local_range.clone(),
        };
        let part = Side {
            shape: size,
            start: &vec![0; size.len()],
            window: self.range.clone(),
        };
        let Ok(()) = for_each_run::<Infallible>(size, &local, &part, &mut |from, to, len| {
            copy(from, to, len);
            Ok(())
        });
    }
}

fn invalid(shape: &[usize], reason: String) -> Error {
    Error::InvalidLayout {
        shape: shape.into(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_range_of_a_fused_tensor_is_a_flat_range_of_each_part() {
        let layout = Layout::along(&[2, 6], 1, &[1..2, 3..4, 5..6]).unwrap();
        assert_eq!(layout.local_shape(), [2, 3]);
        // Local elements 1..5 are k and v of row 0, q and k of row 1.
        let ranges: Vec<_> = layout
            .part_ranges(&(1..5))
            .into_iter()
            .map(|p| p.range)
            .collect();
        assert_eq!(ranges, [1..2, 0..2, 0..1]);
    }

    #[test]
    fn counting_agrees_with_enumeration() {
        let part = Part {
            region: Region::new([1, 2], [2, 2]),
            local_offset: vec![1, 1],
        };
        let layout = Layout::new(&[4, 5], &[4, 4], vec![part.clone()]).unwrap();
        let inside = |flat: usize| (1..3).contains(&(flat / 4)) && (1..3).contains(&(flat % 4));
        for end in 0..=16 {
            let expected = (0..end).filter(|&flat| inside(flat)).count();
            assert_eq!(layout.count_before(&part, end), expected, "before {end}");
        }
    }

    #[test]
    fn a_scalar_has_one_element() {
        let layout = Layout::whole(&[]);
        assert_eq!(layout.num_local_elements(), 1);
        assert_eq!(layout.part_ranges(&(0..1))[0].range, 0..1);
    }

    #[test]
    fn wrong_layouts_are_refused_with_a_reason() {
        let message = |result: Result<Layout>| result.unwrap_err().to_string();
        insta::assert_snapshot!(message(Layout::shard(&[4, 4], 2, 0..1)),
            @"invalid layout of a tensor of shape [4, 4]: it has no dim 2");
        insta::assert_snapshot!(message(Layout::shard(&[4, 4], 1, 3..5)),
            @"invalid layout of a tensor of shape [4, 4]: dim 1 has no range 3..5");
        insta::assert_snapshot!(message(Layout::along(&[4, 4], 1, &[0..3, 2..4])),
            @"invalid layout of a tensor of shape [4, 4]: parts [0:4,0:3] and [0:4,2:4] overlap");
        insta::assert_snapshot!(message(Layout::region(&[4], Region::new([3], [2]))),
            @"invalid layout of a tensor of shape [4]: part [3:5] at [0:2] is out of bounds of the local shape [2]");
    }

    #[test]
    fn cuts_that_do_not_fit_are_refused_with_a_reason() {
        let message = |cut: Cut| cut.layout(&[4, 6], 0, 2).unwrap_err().to_string();
        insta::assert_snapshot!(message(Cut::new(2, [6])), @"invalid layout of a tensor of shape [4, 6]: cut of dim 2 as 6, but it has no dim 2");
        insta::assert_snapshot!(message(Cut::new(1, [2, 2])), @"invalid layout of a tensor of shape [4, 6]: cut of dim 1 as 2+2, expected at most 64 parts with the sum 6");
        insta::assert_snapshot!(message(Cut::new(1, [usize::MAX, 7])), @"invalid layout of a tensor of shape [4, 6]: cut of dim 1 as 18446744073709551615+7, expected at most 64 parts with the sum 6");
    }

    #[test]
    fn more_ranks_than_indices_leave_some_without_any() {
        let cut = Cut::new(0, [2]);
        let held: Vec<_> = (0..3)
            .map(|rank| cut.layout(&[2, 4], rank, 3).unwrap().num_local_elements())
            .collect();
        assert_eq!(held, [0, 4, 4]);
    }
}
