//! Operations that treat every element alike.

use super::{Need, NodePlacement, Site};
use crate::{Error, Result};
use merak_trace::{
    Axis, Op, Placement, Shard,
    op::{AxisSlice, DropoutSpec},
};

/// Keeps the split of the operand.
pub(super) fn unary(site: &Site<'_>) -> NodePlacement {
    match site.shard(0) {
        Some(shard) => NodePlacement::new(
            [Need::Cut(shard.clone())],
            site.node.op.clone(),
            [Placement::Shard(shard.clone())],
        ),
        None => site.whole(),
    }
}

/// Keeps the split and draws this rank's part of the whole mask.
///
/// A slice of the mask has neighbouring indices, or those of a mirrored cut: fused parts are joined
/// first.
///
/// # Errors
/// [`Error::DropoutOfPositions`] when the sequence lies where a mask counts the samples.
pub(super) fn dropout(site: &Site<'_>, dropout: &DropoutSpec) -> Result<NodePlacement> {
    let Some(shard) = site.shard(0) else {
        return Ok(site.whole());
    };
    let of_positions = site.along_sequence[0] && shard.dim == 0;
    if of_positions && site.options.sequence_dim() == Some(0) {
        return Err(Error::DropoutOfPositions {
            node: site.node.name.to_string(),
        });
    }
    // In `[S, H]`, which has no dimension of samples, a mask counts positions. A rank draws those
    // of neighbours; a mirrored cut gives it others.
    let is_drawn = !of_positions || !shard.mirrored;
    let is_slice = shard.is_of_one() && !site.pads(0) && is_drawn;
    let spec = match site.options.axis {
        Axis::Sequence => of_sequence(site, shard, dropout),
        axis @ (Axis::Tensor | Axis::Data | Axis::Pipeline) => {
            dropout.slice.is_none().then_some(DropoutSpec {
                slice: Some(AxisSlice::new(axis, shard.dim, shard.parts[0])),
                ..*dropout
            })
        }
    };
    let Some(spec) = spec.filter(|_| is_slice) else {
        return Ok(site.whole());
    };
    let op = Op::Dropout(spec);
    Ok(NodePlacement::new(
        [Need::Cut(shard.clone())],
        op,
        [Placement::Shard(shard.clone())],
    ))
}

/// The mask of a slice over the sequence axis, which each tensor rank may have a slice of along the
/// same dimension, or along the one of the features after it.
fn of_sequence(site: &Site<'_>, shard: &Shard, dropout: &DropoutSpec) -> Option<DropoutSpec> {
    let own = || (shard.dim, shard.parts.iter().sum());
    let of_features = dropout.cut_dim().is_some_and(|(dim, _)| dim == 2);
    if of_features && shard.dim == 1 && dropout.nested.is_none() {
        let (dim, full) = own();
        let rows = AxisSlice {
            mirrored: shard.mirrored,
            ..AxisSlice::new(Axis::Sequence, dim, full)
        };
        return Some(DropoutSpec {
            nested: Some(rows),
            ..*dropout
        });
    }
    let (dim, full) = dropout.cut_dim().unwrap_or_else(own);
    let nested = dropout.slice.map(|slice| AxisSlice {
        full: full / site.degree,
        ..slice
    });
    // Slices of the tensor axis are of the slice, however that lies.
    let mirrored = match nested {
        Some(_) => site.options.mirrors(full),
        None => shard.mirrored,
    };
    let slice = Some(AxisSlice {
        mirrored,
        ..AxisSlice::new(Axis::Sequence, dim, full)
    });
    let is_free = dim == shard.dim && dropout.nested.is_none();
    is_free.then_some(DropoutSpec {
        slice,
        nested,
        ..*dropout
    })
}

/// Cuts both operands alike; the second may lack leading dimensions.
pub(super) fn binary(site: &Site<'_>) -> NodePlacement {
    let missing = site.types[0].ndim() - site.types[1].ndim();
    let shard = match (site.shard(0), site.shard(1)) {
        (Some(shard), _) => shard.clone(),
        (None, Some(shard)) => shard.along(shard.dim + missing),
        (None, None) => return site.whole(),
    };
    let second = match shard.dim.checked_sub(missing) {
        Some(dim) => Need::Cut(shard.along(dim)),
        None => Need::Copied,
    };
    NodePlacement::new(
        [Need::Cut(shard.clone()), second],
        site.node.op.clone(),
        [Placement::Shard(shard)],
    )
}
