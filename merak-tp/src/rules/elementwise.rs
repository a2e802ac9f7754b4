//! Operations that treat every element alike.

use super::{Need, NodePlacement, Site};
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
/// A slice of the mask is contiguous, so fused parts are joined first.
pub(super) fn dropout(site: &Site<'_>, dropout: &DropoutSpec) -> NodePlacement {
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    let is_slice = shard.parts.len() == 1 && !site.pads(0);
    if !is_slice || dropout.slice.is_some() {
        return site.whole();
    }
    let slice = Some(AxisSlice {
        axis: Axis::Tensor,
        dim: shard.dim,
        full: shard.parts[0],
    });
    let op = Op::Dropout(DropoutSpec { slice, ..*dropout });
    NodePlacement::new(
        [Need::Cut(shard.clone())],
        op,
        [Placement::Shard(shard.clone())],
    )
}

/// Cuts both operands alike; the second may lack leading dimensions.
pub(super) fn binary(site: &Site<'_>) -> NodePlacement {
    let missing = site.types[0].ndim() - site.types[1].ndim();
    let shard = match (site.shard(0), site.shard(1)) {
        (Some(shard), _) => shard.clone(),
        (None, Some(shard)) => Shard {
            dim: shard.dim + missing,
            parts: shard.parts.clone(),
        },
        (None, None) => return site.whole(),
    };
    let second = match shard.dim.checked_sub(missing) {
        Some(dim) => Need::Cut(Shard {
            dim,
            parts: shard.parts.clone(),
        }),
        None => Need::Copied,
    };
    NodePlacement::new(
        [Need::Cut(shard.clone()), second],
        site.node.op.clone(),
        [Placement::Shard(shard)],
    )
}
