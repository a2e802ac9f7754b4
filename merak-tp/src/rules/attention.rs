//! Operations on packed heads.

use super::{Need, NodePlacement, Site};
use crate::{Error, Result, SequenceMethod, error::shares_of_heads};
use merak_trace::{
    Axis, Op, Placement, Shard,
    op::{Attention, AttentionOptions, AxisSlice, DropoutSpec, Keys, Rope},
};

/// Dimension of the heads in `[B, S, heads * D]`.
const PACKED: usize = 2;

/// Dimension of the sequence.
const SEQUENCE: usize = 1;

/// Each rank computes its share of the query heads.
///
/// Key and value heads are shared out likewise; if there are fewer than ranks, neighbouring ranks
/// get the head that their query heads share. Where the sequence is cut over the sequence axis,
/// each rank has all positions of its heads, and afterwards all heads of its positions again.
pub(super) fn attention(site: &Site<'_>, spec: &Attention) -> Result<NodePlacement> {
    let along =
        |dim| (0..3).map(move |operand| site.shard(operand).filter(|shard| shard.dim == dim));
    let options = AttentionOptions::find(site.types.iter().copied(), 3);
    let (is_split, is_bound, turns) = match site.options.axis {
        Axis::Sequence => {
            let is_split = along(SEQUENCE).all(|shard| shard.is_some());
            // The places of queries among keys of another length do not follow from their slice,
            // nor do the rows of an index of biases.
            let is_of_itself = site.types[0].shape[SEQUENCE] == site.types[1].shape[SEQUENCE];
            let is_free = is_of_itself && options.table.is_none();
            let keeps_queries = site.options.method != SequenceMethod::Ulysses;
            if let (true, true, Some(shard)) = (keeps_queries, is_split && is_free, site.shard(0)) {
                return Ok(of_own_queries(site, spec, shard, options));
            }
            (is_split, !is_free, site.shard(0).cloned())
        }
        Axis::Tensor | Axis::Data | Axis::Pipeline => {
            (along(PACKED).any(|shard| shard.is_some()), true, None)
        }
    };
    let dropout = spec.dropout;
    let dropout = dropout.map(|dropout| of_heads(site, spec.heads, dropout));
    if !is_split || dropout == Some(None) {
        return Ok(site.whole());
    }
    let (keys, kv_heads) = key_share(site, spec, is_bound)?;
    let op = Op::Attention(Attention {
        heads: spec.heads / site.degree,
        kv_heads,
        dropout: dropout.flatten(),
        ..spec.clone()
    });
    let width = site.types[0].last_dim();
    let results = [
        Placement::shard(PACKED, width),
        Placement::shard(1, spec.heads),
    ];
    let mut needs = vec![cut(width), keys.clone(), keys];
    needs.extend(options.seen.map(|_| Need::Whole));
    if options.table.is_some() {
        // Each rank has the biases of its heads.
        let table = Shard::new(1, vec![spec.heads]);
        needs.extend([Need::Cut(table), Need::Whole]);
    }
    Ok(NodePlacement {
        turns,
        ..NodePlacement::new(needs, op, results)
    })
}

/// Each rank computes its own positions of all heads, from the keys and values of all positions,
/// which it gathers, or which go round.
fn of_own_queries(
    site: &Site<'_>,
    spec: &Attention,
    shard: &Shard,
    options: AttentionOptions,
) -> NodePlacement {
    let positions = site.types[0].shape[SEQUENCE];
    let (own, keys) = match site.options.method {
        SequenceMethod::Ring => (Need::Cut(shard.clone()), Keys::Ring),
        SequenceMethod::AllGather | SequenceMethod::Ulysses => (Need::Copied, Keys::All),
    };
    let op = if site.options.is_whole() {
        Op::Attention(spec.clone())
    } else {
        Op::Attention(Attention {
            queries: Some(AxisSlice {
                mirrored: shard.mirrored,
                ..AxisSlice::new(site.options.axis, SEQUENCE, positions)
            }),
            keys,
            ..spec.clone()
        })
    };
    let mut needs = vec![Need::Cut(shard.clone()), own.clone(), own];
    needs.extend(options.seen.map(|_| Need::Whole));
    let results = [
        Placement::Shard(shard.clone()),
        Placement::Shard(shard.along(2)),
    ];
    NodePlacement::new(needs, op, results)
}

/// The dropout of a rank's share of the heads, if there is a form for it.
fn of_heads(site: &Site<'_>, heads: usize, dropout: DropoutSpec) -> Option<DropoutSpec> {
    let own = Some(AxisSlice::new(site.options.axis, 1, heads));
    match (site.options.axis, dropout.slice, dropout.nested) {
        (_, None, _) => Some(DropoutSpec {
            slice: own,
            ..dropout
        }),
        // The heads of a tensor rank are shared out once more.
        (Axis::Sequence, Some(_), None) => Some(DropoutSpec {
            nested: own,
            ..dropout
        }),
        _ => None,
    }
}

/// The need of keys and values, and their heads on each rank.
fn key_share(site: &Site<'_>, spec: &Attention, is_bound: bool) -> Result<(Need, usize)> {
    let degree = site.degree;
    if !spec.heads.is_multiple_of(degree) {
        Err(Error::heads(
            &site.node.scope,
            spec,
            (site.options.axis, degree),
            is_bound,
        ))
    } else if spec.kv_heads.is_multiple_of(degree) {
        Ok((cut(site.types[1].last_dim()), spec.kv_heads / degree))
    } else if degree.is_multiple_of(spec.kv_heads) {
        Ok((Need::Spread(spec.kv_heads), 1))
    } else {
        Err(Error::KvHeads {
            module: site.node.scope.to_string(),
            kv_heads: spec.kv_heads,
            axis: site.options.axis,
            degree,
            is_bound,
            legal: shares_of_heads(spec),
        })
    }
}

/// Turns whole heads, each rank its own, or those at its positions.
pub(super) fn rope(site: &Site<'_>, rope: &Rope) -> NodePlacement {
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    if shard.dim == SEQUENCE {
        // `[S]`, or `[B, S]`.
        let positions = shard.along(site.types[1].ndim() - 1);
        return NodePlacement::new(
            [Need::Cut(shard.clone()), Need::Cut(positions)],
            site.node.op.clone(),
            [Placement::Shard(shard.clone())],
        );
    }
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
    Need::Cut(Shard::new(PACKED, vec![width]))
}
