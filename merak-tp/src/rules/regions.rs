//! Collectives over the tensor axis, in a model whose sequence is cut over the sequence axis.
//!
//! The sequence is cut over the sequence axis first: a rank of the tensor axis has a slice of the
//! slice, where it has one at all.

use super::{Need, NodePlacement, Site, elementwise};
use crate::{Error, Result};
use merak_trace::{Op, Placement, Shard};

/// Cuts and joins the own slice of the sequence as the model does the whole.
pub(super) fn region(site: &Site<'_>) -> Result<NodePlacement> {
    let op = &site.node.op;
    let (have, cuts_sequence) = match (site.shard(0), op) {
        (Some(shard), _) => (shard.clone(), false),
        (None, Op::Scatter { shard, .. }) => match site.first_cut()? {
            Some(first) if first.dim == shard.dim => (first, true),
            _ => return Ok(site.whole()),
        },
        (None, _) => return Ok(site.whole()),
    };
    let len = site.results[0].shape[have.dim];
    let own_len = share(site, &have, len)?;
    // A cut over the tensor axis along the same dimension is one of the slice.
    let own = |shard: &Shard| {
        let mut shard = shard.clone();
        if shard.dim == have.dim {
            shard.parts.iter_mut().for_each(|part| *part /= site.degree);
        }
        shard
    };
    let local_of = |shard: &Shard, local| {
        if shard.dim == have.dim {
            own_len
        } else {
            local
        }
    };
    let op = match op {
        Op::AllGather { axis, shard, grad } => Op::AllGather {
            axis: *axis,
            shard: own(shard),
            grad: *grad,
        },
        Op::Scatter { axis, shard, local } => Op::Scatter {
            axis: *axis,
            shard: own(shard),
            local: local_of(shard, *local),
        },
        Op::ReduceScatter { axis, shard, local } => Op::ReduceScatter {
            axis: *axis,
            shard: own(shard),
            local: local_of(shard, *local),
        },
        Op::AllToAll { axis, from, to } => Op::AllToAll {
            axis: *axis,
            from: own(from),
            to: own(to),
        },
        _ => return Ok(elementwise::unary(site)),
    };
    let result = if len == site.types[0].shape[have.dim] {
        Placement::Shard(have.clone())
    } else {
        Placement::Shard(site.options.evenly(have.dim, len))
    };
    Ok(NodePlacement {
        cuts_sequence,
        ..NodePlacement::new([Need::Cut(have)], op, [result])
    })
}

/// What a rank has of `len` positions.
fn share(site: &Site<'_>, have: &Shard, len: usize) -> Result<usize> {
    if site.options.is_whole() || len.is_multiple_of(site.degree) {
        return Ok(len / site.degree);
    }
    Err(Error::NestedSequence {
        node: site.node.name.to_string(),
        len,
        tp: site.types[0].shape[have.dim].div_ceil(len),
        degree: site.degree,
    })
}
