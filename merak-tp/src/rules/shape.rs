//! Operations that rearrange or sum dimensions.

use super::{Need, NodePlacement, Site};
use merak_trace::{Op, Placement, Shard};

/// Keeps a split dimension that leads its group of merged or divided dimensions, as heads do.
pub(super) fn reshape(site: &Site<'_>, to: &[usize]) -> NodePlacement {
    let from = &site.types[0].shape;
    match site
        .shard(0)
        .and_then(|shard| Some((shard, reshaped(shard, from, to, site.degree)?)))
    {
        Some((shard, moved)) => {
            let mut shape = to.to_vec();
            shape[moved.dim] = moved.local_size(site.degree);
            NodePlacement::new(
                [Need::Cut(shard.clone())],
                Op::Reshape { shape },
                [Placement::Shard(moved)],
            )
        }
        None => site.whole(),
    }
}

/// The cut of `from` in terms of `to`, if slices stay slices.
///
/// The elements before the cut dimension must be those before some dimension of `to`, and every
/// slice must hold whole steps of that dimension.
fn reshaped(shard: &Shard, from: &[usize], to: &[usize], degree: usize) -> Option<Shard> {
    let outer: usize = from[..shard.dim].iter().product();
    let inner: usize = from[shard.dim + 1..].iter().product();
    // Dimensions of size 1 have the same elements before them. A dimension that stays with all
    // before it is the real one, else the last of the candidates.
    let stays = to.get(..=shard.dim) == Some(&from[..=shard.dim]);
    let last = || {
        let mut candidates = (0..to.len()).rev();
        candidates.find(|&dim| to[..dim].iter().product::<usize>() == outer)
    };
    let dim = if stays { shard.dim } else { last()? };
    let step: usize = to[dim + 1..].iter().product();
    let mut parts = Vec::with_capacity(shard.parts.len());
    for part in &shard.parts {
        // Padding keeps its place only in the same dimension.
        let is_same = inner == step;
        let is_even = part.is_multiple_of(degree) && (part / degree * inner).is_multiple_of(step);
        if !is_same && !is_even {
            return None;
        }
        parts.push(part * inner / step);
    }
    let is_all = parts.iter().sum::<usize>() == to[dim];
    is_all.then_some(Shard {
        parts,
        ..shard.along(dim)
    })
}

pub(super) fn transpose(site: &Site<'_>, perm: &[usize]) -> NodePlacement {
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    let moved = perm
        .iter()
        .position(|&dim| dim == shard.dim)
        .expect("perm orders all dimensions");
    let result = shard.along(moved);
    NodePlacement::new(
        [Need::Cut(shard.clone())],
        site.node.op.clone(),
        [Placement::Shard(result)],
    )
}

/// Takes pieces that consist of whole parts; a piece across a part needs the whole operand.
pub(super) fn split(site: &Site<'_>, dim: usize, sizes: &[usize]) -> NodePlacement {
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    let need = Need::Cut(shard.clone());
    if shard.dim != dim {
        return NodePlacement::new(
            [need],
            site.node.op.clone(),
            vec![Placement::Shard(shard.clone()); sizes.len()],
        );
    }
    // A piece of a mirrored cut is none.
    let groups = grouped(&shard.parts, sizes).filter(|_| !shard.mirrored);
    let Some(groups) = groups else {
        return site.whole();
    };
    let room = |parts: &Vec<usize>| parts.iter().map(|part| part.div_ceil(site.degree)).sum();
    let local = groups.iter().map(room).collect();
    let results: Vec<_> = groups
        .into_iter()
        .map(|parts| Placement::Shard(Shard::new(dim, parts)))
        .collect();
    NodePlacement::new([need], Op::Split { dim, sizes: local }, results)
}

/// The parts that make up each piece, if pieces end where parts end.
fn grouped(parts: &[usize], sizes: &[usize]) -> Option<Vec<Vec<usize>>> {
    let mut rest = parts.iter().copied();
    let mut groups = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let mut group = Vec::new();
        while group.iter().sum::<usize>() < size {
            group.push(rest.next()?);
        }
        if group.iter().sum::<usize>() != size {
            return None;
        }
        groups.push(group);
    }
    Some(groups)
}

/// Joins split operands part after part, or as slices of a dimension that all of them share.
pub(super) fn concat(site: &Site<'_>, dim: usize) -> NodePlacement {
    let Some(first) = (0..site.types.len()).find_map(|operand| site.shard(operand)) else {
        return site.whole();
    };
    if first.dim != dim {
        let needs = vec![Need::Cut(first.clone()); site.types.len()];
        return NodePlacement::new(
            needs,
            site.node.op.clone(),
            [Placement::Shard(first.clone())],
        );
    }
    let mut parts = Vec::new();
    let mut needs = Vec::new();
    for (operand, ty) in site.types.iter().enumerate() {
        let own = match site.shard(operand) {
            Some(shard) if shard.mirrored => return site.whole(),
            Some(shard) if shard.dim == dim => shard.clone(),
            _ if ty.shape[dim].is_multiple_of(site.degree) => Shard::new(dim, vec![ty.shape[dim]]),
            _ => return site.whole(),
        };
        parts.extend(&own.parts);
        needs.push(Need::Cut(own));
    }
    NodePlacement::new(
        needs,
        site.node.op.clone(),
        [Placement::Shard(Shard::new(dim, parts))],
    )
}

/// A split dimension that is summed away leaves partial sums.
pub(super) fn sum_leading(site: &Site<'_>) -> NodePlacement {
    let Some(shard) = site.shard(0) else {
        return site.whole();
    };
    let mut shape = site.results[0].shape.clone();
    let summed = site.types[0].ndim() - shape.len();
    let result = match shard.dim.checked_sub(summed) {
        // Padding need not be zero.
        None if site.pads(0) => return site.whole(),
        None => Placement::Partial,
        Some(dim) => {
            shape[dim] = shard.local_size(site.degree);
            Placement::Shard(shard.along(dim))
        }
    };
    NodePlacement::new(
        [Need::Cut(shard.clone())],
        Op::SumLeading { shape },
        [result],
    )
}

pub(super) fn sum_all(site: &Site<'_>) -> NodePlacement {
    match site.shard(0) {
        Some(shard) if !site.pads(0) => {
            NodePlacement::new([Need::Cut(shard.clone())], Op::SumAll, [Placement::Partial])
        }
        _ => site.whole(),
    }
}
