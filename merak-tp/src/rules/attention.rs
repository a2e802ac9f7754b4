//! Operations on packed heads.

use super::{Need, NodePlacement, Site};
use crate::{Error, Result, error::divisors};
use merak_trace::{
    Axis, Op, Placement, Shard,
    op::{Attention, AttentionOptions, AxisSlice, DropoutSpec, Rope},
};

/// Dimension of the heads in `[B, S, heads * D]`.
const PACKED: usize = 2;

/// Each rank computes its share of the query heads.
///
/// Key and value heads are shared out likewise; if there are fewer than ranks, neighbouring ranks
/// get the head that their query heads share.
pub(super) fn attention(site: &Site<'_>, spec: &Attention) -> Result<NodePlacement> {
    let degree = site.degree;
    let by_heads =
        (0..3).any(|operand| site.shard(operand).is_some_and(|shard| shard.dim == PACKED));
    if !by_heads || spec.dropout.is_some_and(|dropout| dropout.slice.is_some()) {
        return Ok(site.whole());
    }
    let (keys, kv_heads) = key_share(site, spec)?;
    let slice = Some(AxisSlice {
        axis: Axis::Tensor,
        dim: 1,
        full: spec.heads,
    });
    let dropout = spec.dropout.map(|dropout| DropoutSpec { slice, ..dropout });
    let op = Op::Attention(Attention {
        heads: spec.heads / degree,
        kv_heads,
        dropout,
        ..spec.clone()
    });
    let width = site.types[0].last_dim();
    let results = [
        Placement::shard(PACKED, width),
        Placement::shard(1, spec.heads),
    ];
    let mut needs = vec![cut(width), keys.clone(), keys];
    let options = AttentionOptions::find(site.types.iter().copied(), 3);
    needs.extend(options.seen.map(|_| Need::Whole));
    if options.table.is_some() {
        // Each rank has the biases of its heads.
        let table = Shard {
            dim: 1,
            parts: vec![spec.heads],
        };
        needs.extend([Need::Cut(table), Need::Whole]);
    }
    Ok(NodePlacement::new(needs, op, results))
}

/// The need of keys and values, and their heads on each rank.
fn key_share(site: &Site<'_>, spec: &Attention) -> Result<(Need, usize)> {
    let shares_keys = |degree: usize| {
        spec.kv_heads.is_multiple_of(degree) || degree.is_multiple_of(spec.kv_heads)
    };
    let (degree, module) = (site.degree, || site.node.scope.to_string());
    let legal = || {
        let mut degrees = divisors(spec.heads);
        degrees.retain(|&degree| shares_keys(degree));
        degrees
    };
    if !spec.heads.is_multiple_of(degree) {
        Err(Error::Heads {
            module: module(),
            heads: spec.heads,
            degree,
            legal: legal(),
        })
    } else if spec.kv_heads.is_multiple_of(degree) {
        Ok((cut(site.types[1].last_dim()), spec.kv_heads / degree))
    } else if shares_keys(degree) {
        Ok((Need::Spread(spec.kv_heads), 1))
    } else {
        Err(Error::KvHeads {
            module: module(),
            kv_heads: spec.kv_heads,
            degree,
            legal: legal(),
        })
    }
}

/// Turns whole heads, each rank its own.
pub(super) fn rope(site: &Site<'_>, rope: &Rope) -> NodePlacement {
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    let whole_heads = shard
        .parts
        .iter()
        .all(|part| (part / site.degree).is_multiple_of(rope.head_dim));
    if shard.dim != PACKED || !whole_heads {
        return site.whole();
    }
    NodePlacement::new(
        [Need::Cut(shard.clone()), Need::Whole],
        site.node.op.clone(),
        [Placement::Shard(shard.clone())],
    )
}

fn cut(width: usize) -> Need {
    Need::Cut(Shard {
        dim: PACKED,
        parts: vec![width],
    })
}
