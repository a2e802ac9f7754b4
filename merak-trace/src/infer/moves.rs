//! Elements in another shape or order, their pieces, and the slices of ranks.

use super::checks::{Reason, Types, ensure, has_dim, product};
use crate::{TensorType, placement::Shard};

pub(super) fn reshape(shape: &[usize], [x]: [&TensorType; 1]) -> Types {
    ensure(product(shape) == Some(x.numel()), || {
        format!("{x} has not as many elements as {shape:?}")
    })?;
    Ok(vec![x.with_shape(shape)])
}

pub(super) fn transpose(perm: &[usize], [x]: [&TensorType; 1]) -> Types {
    let mut sorted = perm.to_vec();
    sorted.sort_unstable();
    ensure(sorted.iter().copied().eq(0..x.ndim()), || {
        format!("{perm:?} does not order the dimensions of {x}")
    })?;
    let shape: Vec<_> = perm.iter().map(|&d| x.shape[d]).collect();
    Ok(vec![x.with_shape(shape)])
}

pub(super) fn split(dim: usize, sizes: &[usize], [x]: [&TensorType; 1]) -> Types {
    has_dim(x, dim)?;
    ensure(sum(sizes) == Some(x.shape[dim]), || {
        format!("pieces {sizes:?} do not make up dimension {dim} of {x}")
    })?;
    Ok(sizes.iter().map(|&size| x.with_dim(dim, size)).collect())
}

pub(super) fn concat(dim: usize, inputs: &[TensorType]) -> Types {
    let first = inputs.first().ok_or("nothing to join")?;
    has_dim(first, dim)?;
    let mut total = 0;
    for ty in inputs {
        ensure(
            ty.ndim() == first.ndim() && ty.with_dim(dim, 0) == first.with_dim(dim, 0),
            || format!("{first} and {ty} differ outside dimension {dim}"),
        )?;
        total += ty.shape[dim];
    }
    Ok(vec![first.with_dim(dim, total)])
}

pub(super) fn all_gather(shard: &Shard, [x]: [&TensorType; 1]) -> Types {
    divides(x, shard, |local, full| local != 0 && local <= full)?;
    Ok(vec![x.with_dim(shard.dim, shard.parts.iter().sum())])
}

pub(super) fn scatter(local: usize, shard: &Shard, [x]: [&TensorType; 1]) -> Types {
    divides(x, shard, |whole, full| whole == full)?;
    Ok(vec![x.with_dim(shard.dim, local)])
}

pub(super) fn all_to_all(from: &Shard, to: &Shard, [x]: [&TensorType; 1]) -> Types {
    ensure(from.dim != to.dim, || {
        format!("dimension {} is cut before and after", to.dim)
    })?;
    divides(x, from, |local, full| local != 0 && full % local == 0)?;
    divides(x, to, |whole, full| whole == full)?;
    let joined: usize = from.parts.iter().sum();
    let ranks = joined / x.shape[from.dim];
    let whole = x.shape[to.dim];
    ensure(whole.is_multiple_of(ranks), || {
        format!("dimension {} of {x} has no {ranks} equal slices", to.dim)
    })?;
    Ok(vec![
        x.with_dim(from.dim, joined).with_dim(to.dim, whole / ranks),
    ])
}

/// Checks that `shard` describes dimension `shard.dim` of `x`.
fn divides(
    x: &TensorType,
    shard: &Shard,
    fits: impl Fn(usize, usize) -> bool,
) -> Result<(), Reason> {
    has_dim(x, shard.dim)?;
    let Some(full) = sum(&shard.parts) else {
        return Err(format!("no dimension has parts of {:?}", shard.parts));
    };
    ensure(fits(x.shape[shard.dim], full), || {
        format!("dimension {} of {x} is no slice of {full}", shard.dim)
    })
}

/// Their sum.
fn sum(sizes: &[usize]) -> Option<usize> {
    sizes
        .iter()
        .try_fold(0, |all: usize, &size| all.checked_add(size))
}
