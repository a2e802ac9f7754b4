//! How tensors lie on the ranks of the mesh, and which of their elements a rank holds.

use crate::TensorType;
use merak_mpu::{Axis, Coord};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The placement of one logical tensor on the ranks of a mesh axis.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Every rank has the whole tensor.
    #[default]
    Replicate,
    /// Each rank has one slice.
    Shard(Shard),
    /// Every rank has a summand; the tensor is their sum.
    Partial,
}

/// A tensor cut along one dimension.
///
/// The dimension is the concatenation of `parts`, and each part is cut evenly: rank `r` of `n`
/// holds the `r`-th `1/n` of every part, one after the other. One part is the usual slice; a fused
/// `[q|k|v]` projection has three, and rank `r` then holds `q_r|k_r|v_r`. Where `n` does not divide
/// a part (a vocabulary), every rank has room for the `1/n` rounded up: the last ranks hold fewer
/// elements, and padding follows.
///
/// In a mirrored cut `n` divides every part, and ranks count every second part from its end: there
/// rank `r` holds the `r`-th `1/n` from the last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// The dimension that is cut.
    pub dim: usize,
    /// Sizes of the parts in the full tensor.
    pub parts: Vec<usize>,
    /// Whether the ranks come in descending order in every second part.
    #[serde(default)]
    pub mirrored: bool,
}

impl Shard {
    /// A cut of dimension `dim`, which consists of these parts.
    pub fn new(dim: usize, parts: Vec<usize>) -> Self {
        Self {
            dim,
            parts,
            mirrored: false,
        }
    }

    /// A mirrored cut of dimension `dim`: a slice from each half of its `len` indices.
    pub fn mirrored(dim: usize, len: usize) -> Self {
        Self {
            mirrored: true,
            ..Self::new(dim, vec![len / 2, len - len / 2])
        }
    }

    /// The same cut of another dimension.
    #[must_use]
    pub fn along(&self, dim: usize) -> Self {
        Self {
            dim,
            ..self.clone()
        }
    }

    /// Whether it cuts a dimension that is one part as a whole.
    pub fn is_of_one(&self) -> bool {
        self.parts.len() == if self.mirrored { 2 } else { 1 }
    }

    /// The room of one rank for each part.
    pub(crate) fn local_parts(&self, degree: usize) -> impl Iterator<Item = usize> + '_ {
        self.parts.iter().map(move |part| part.div_ceil(degree))
    }

    /// Size of the dimension on one rank.
    pub fn local_size(&self, degree: usize) -> usize {
        self.local_parts(degree).sum()
    }

    /// What a rank holds of the part with this number, counted within the part.
    pub(crate) fn own_of_part(&self, part: usize, rank: usize, degree: usize) -> Range<usize> {
        let (index, size) = (self.turned(part, rank, degree), self.parts[part]);
        let room = size.div_ceil(degree);
        (index * room).min(size)..((index + 1) * room).min(size)
    }

    /// The number of a rank's slice among the `degree` slices of a part; or the rank that holds the
    /// slice of this number.
    pub(crate) fn turned(&self, part: usize, rank: usize, degree: usize) -> usize {
        if self.mirrored && part % 2 == 1 {
            degree - 1 - rank
        } else {
            rank
        }
    }
}

impl Placement {
    /// A plain cut of dimension `dim`, of size `size` in the full tensor.
    pub fn shard(dim: usize, size: usize) -> Self {
        Self::Shard(Shard::new(dim, vec![size]))
    }

    /// The cut of the tensor, if there is one.
    pub fn as_shard(&self) -> Option<&Shard> {
        match self {
            Self::Shard(shard) => Some(shard),
            Self::Replicate | Self::Partial => None,
        }
    }

    /// The local type of a tensor of type `full` on one of `degree` ranks, padding included.
    #[must_use]
    pub fn local_type(&self, full: &TensorType, degree: usize) -> TensorType {
        match self.as_shard() {
            Some(shard) => full.with_dim(shard.dim, shard.local_size(degree)),
            None => full.clone(),
        }
    }
}

/// The placement of one logical tensor on the mesh: a [`Placement`] for each axis.
///
/// A tensor that is cut along several axes is cut by one after the other: each cuts what those
/// before it left. Along an axis without an entry every rank has the same.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Placements(Vec<OnAxis>);

/// How a tensor lies on the ranks of one axis.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OnAxis {
    axis: Axis,
    degree: usize,
    placement: Placement,
}

impl Placements {
    /// The placement of the tensor on the ranks of an axis.
    pub fn on(&self, axis: Axis) -> &Placement {
        let found = self.0.iter().find(|entry| entry.axis == axis);
        found.map_or(&Placement::Replicate, |entry| &entry.placement)
    }

    /// These placements with the tensor of type `full` placed on the `degree` ranks of an axis;
    /// cuts along other axes come before it. What is wrong with that, if it cannot be.
    pub(crate) fn with(
        &self,
        axis: Axis,
        placement: Placement,
        degree: usize,
        full: &TensorType,
    ) -> Result<Self, String> {
        let others = self.0.iter().filter(|entry| entry.axis != axis);
        let mut placements = Self(others.cloned().collect());
        let left = placements.local_type(full);
        if degree == 0 {
            return Err(format!("there are no ranks along the {axis} axis"));
        }
        if let Some(Shard { dim, parts, .. }) = placement.as_shard() {
            let size = left.shape.get(*dim);
            let sum = parts
                .iter()
                .try_fold(0_usize, |sum, part| sum.checked_add(*part));
            if size.is_none() || size != sum.as_ref() {
                return Err(format!(
                    "dimension {dim} of {left} cannot be cut into parts of {parts:?}"
                ));
            }
        }
        placements.0.push(OnAxis {
            axis,
            degree,
            placement,
        });
        Ok(placements)
    }

    /// The local type of a tensor of type `full`.
    #[must_use]
    pub fn local_type(&self, full: &TensorType) -> TensorType {
        self.0.iter().fold(full.clone(), |ty, entry| {
            entry.placement.local_type(&ty, entry.degree)
        })
    }

    /// The boxes of a tensor of type `full` that the rank at `place` holds, in the order of its
    /// local tensor.
    pub fn local_boxes(&self, full: &TensorType, place: Coord) -> Vec<LocalBox> {
        let mut dims: Vec<Vec<Run>> = full
            .shape
            .iter()
            .map(|&len| vec![Run::whole(len)])
            .collect();
        for entry in &self.0 {
            if let Some(shard) = entry.placement.as_shard() {
                let (rank, degree) = (place.get(entry.axis), entry.degree);
                let cut = std::mem::take(&mut dims[shard.dim]);
                dims[shard.dim] = Run::cut(&cut, shard, rank, degree);
            }
        }
        let mut boxes = vec![LocalBox::default()];
        for runs in &dims {
            let with = |piece: &LocalBox| {
                let piece = piece.clone();
                runs.iter().map(move |run| piece.clone().with(*run))
            };
            boxes = boxes.iter().flat_map(with).collect();
        }
        boxes
    }
}

/// Neighbouring indices of one dimension of a full tensor, and where the local one has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    start: usize,
    len: usize,
    local: usize,
}

impl Run {
    fn whole(len: usize) -> Self {
        Self {
            start: 0,
            len,
            local: 0,
        }
    }

    /// What rank `rank` of `degree` keeps of a dimension that has `runs`.
    fn cut(runs: &[Self], shard: &Shard, rank: usize, degree: usize) -> Vec<Self> {
        let mut kept = Vec::with_capacity(shard.parts.len());
        let (mut part_start, mut local) = (0, 0);
        for (index, part) in shard.parts.iter().enumerate() {
            let slice = shard.own_of_part(index, rank, degree);
            let own = part_start + slice.start;
            for run in runs {
                let first = own.max(run.local);
                let end = (own + slice.len()).min(run.local + run.len);
                if first < end {
                    kept.push(Self {
                        start: run.start + first - run.local,
                        len: end - first,
                        local: local + first - own,
                    });
                }
            }
            part_start += part;
            local += part.div_ceil(degree);
        }
        kept
    }
}

/// A box of a full tensor and where it lies in the local one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LocalBox {
    /// First index per dimension in the full tensor.
    pub offset: Vec<usize>,
    /// Size per dimension.
    pub size: Vec<usize>,
    /// First index per dimension in the local tensor.
    pub local: Vec<usize>,
}

impl LocalBox {
    /// The same box with one more dimension.
    fn with(mut self, run: Run) -> Self {
        self.offset.push(run.start);
        self.size.push(run.len);
        self.local.push(run.local);
        self
    }

    /// The flat ranges of the box in the full tensor of shape `full`, in row-major order.
    pub fn full_ranges(&self, full: &[usize]) -> impl Iterator<Item = Range<usize>> {
        ranges(&self.size, &self.offset, full)
    }

    /// The flat ranges of the box in the local tensor of shape `local`, in row-major order.
    pub fn local_ranges(&self, local: &[usize]) -> impl Iterator<Item = Range<usize>> {
        ranges(&self.size, &self.local, local)
    }
}

/// The flat ranges of a box of `size` at `start` in a tensor of shape `shape`, in row-major order.
fn ranges(size: &[usize], start: &[usize], shape: &[usize]) -> impl Iterator<Item = Range<usize>> {
    // A range goes over the last dimensions that the box fills, and over the one before them.
    let filled = size.iter().zip(shape).rev();
    let filled = filled.take_while(|(size, shape)| size == shape).count();
    let rows = size.len().saturating_sub(filled + 1);
    let inner: usize = shape[rows.min(shape.len())..].iter().skip(1).product();
    let len: usize = size[rows..].iter().product();
    let (rows, outer) = (size[..rows].to_vec(), shape.to_vec());
    let start = start.to_vec();
    (0..rows.iter().product()).map(move |row: usize| {
        let (mut rest, mut stride, mut first) = (row, 1, 0);
        if let Some(&at) = start.get(rows.len()) {
            first += at * inner;
            stride = outer[rows.len()] * inner;
        }
        for dim in (0..rows.len()).rev() {
            first += (start[dim] + rest % rows[dim]) * stride;
            rest /= rows[dim];
            stride *= outer[dim];
        }
        first..first + len
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Init, Param, ParamRole};
    use merak_mpu::DType;

    /// A parameter that is cut along some axes, `(axis, dim, parts, degree)`, in this order.
    fn cut(shape: [usize; 2], cuts: &[(Axis, usize, &[usize], usize)]) -> Param {
        let full = TensorType::new(shape, DType::F32);
        let mut param = Param::new("w", full, Init::Constant(0.0), ParamRole::Weight);
        for &(axis, dim, parts, degree) in cuts {
            let parts = parts.to_vec();
            let placement = Placement::Shard(Shard::new(dim, parts));
            param.place(axis, placement, degree).unwrap();
        }
        param
    }

    #[test]
    fn a_cut_that_does_not_fit_is_refused_and_changes_nothing() {
        let before = cut([4, 6], &[(Axis::Sequence, 1, &[6], 2)]);
        let refused = |placement: Placement, degree| {
            let mut param = before.clone();
            let error = param.place(Axis::Tensor, placement, degree).unwrap_err();
            assert_eq!(param, before);
            error.to_string()
        };
        let parts = |dim, parts: &[usize]| Placement::Shard(Shard::new(dim, parts.to_vec()));
        let what = "parameter w: dimension 2 of f32[4, 3] cannot be cut into parts of [1]";
        assert_eq!(refused(parts(2, &[1]), 2), what);
        let what = "parameter w: dimension 1 of f32[4, 3] cannot be cut into parts of [3, 3]";
        assert_eq!(refused(parts(1, &[3, 3]), 2), what);
        let what = "parameter w: there are no ranks along the tensor axis";
        assert_eq!(refused(Placement::Replicate, 0), what);
        assert!(refused(parts(0, &[usize::MAX, 5]), 2).contains("cannot be cut"));
    }

    /// The places of all ranks of two axes of degree 2 and `tp`.
    fn places(tp: usize) -> impl Iterator<Item = Coord> {
        let place = move |sp| (0..tp).map(move |tp| (sp, tp));
        (0..2).flat_map(place).map(|(sp, tp)| Coord {
            sp,
            tp,
            ..Coord::default()
        })
    }

    /// Counts how often each element of the full tensor is held, and each of every local one.
    fn covered(param: &Param, places: impl Iterator<Item = Coord>) -> Vec<usize> {
        let mut held = vec![0; param.full.numel()];
        for place in places {
            let mut filled = vec![0; param.local.numel()];
            for piece in param.placements.local_boxes(&param.full, place) {
                let full = piece.full_ranges(&param.full.shape).flatten();
                let local = piece.local_ranges(&param.local.shape).flatten();
                for (full, local) in full.zip(local) {
                    held[full] += 1;
                    filled[local] += 1;
                }
            }
            assert_eq!(filled, vec![1; param.local.numel()], "{place:?}");
        }
        held
    }

    #[test]
    fn a_fused_projection_is_cut_per_part() {
        let param = cut([4, 12], &[(Axis::Tensor, 1, &[4, 4, 4], 2)]);
        assert_eq!(param.local.shape, [4, 6]);
        let place = Coord::default().with(Axis::Tensor, 1);
        let boxes = param.placements.local_boxes(&param.full, place);
        let starts = boxes.iter().map(|b| (b.offset[1], b.local[1]));
        assert_eq!(starts.collect::<Vec<_>>(), [(2, 0), (6, 2), (10, 4)]);
    }

    #[test]
    fn the_boxes_of_all_ranks_cover_the_tensor_once() {
        let param = cut([6, 5], &[(Axis::Tensor, 0, &[2, 4], 2)]);
        assert_eq!(covered(&param, places(2).take(2)), [1; 30]);
    }

    #[test]
    fn two_axes_cut_two_dims_or_one_after_the_other() {
        let two_dims = [
            (Axis::Tensor, 1, [4, 8].as_slice(), 2),
            (Axis::Sequence, 0, &[6], 2),
        ];
        let one_dim = [
            (Axis::Tensor, 1, [4, 8].as_slice(), 2),
            (Axis::Sequence, 1, &[6], 2),
        ];
        for (cuts, local) in [(two_dims, [3, 6]), (one_dim, [6, 3])] {
            let param = cut([6, 12], &cuts);
            assert_eq!(param.local.shape, local);
            assert_eq!(covered(&param, places(2)), [1; 72]);
            assert!(param.placements.on(Axis::Data).as_shard().is_none());
        }
    }
}
